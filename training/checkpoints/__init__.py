"""What a run writes: metrics, checkpoints, backups."""
