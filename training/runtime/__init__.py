"""Processes and devices of a run."""
