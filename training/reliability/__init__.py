"""Nothing is lost: checkpoints, and whatever may go wrong."""
