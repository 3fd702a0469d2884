"""Publishing of checkpoints: assemble the folder, verify it in a fresh process, upload it."""
