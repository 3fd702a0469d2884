"""The report of a run: its facts, its pages and its plots."""
