"""The log of a run."""
