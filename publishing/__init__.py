"""Checkpoint -> world: assemble the folder, verify it in a fresh process, upload it."""
