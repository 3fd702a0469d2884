"""The tokens of a run, and the batches of a step."""
