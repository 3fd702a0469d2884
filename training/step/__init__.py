"""One training step: model, loss, optimizer."""
