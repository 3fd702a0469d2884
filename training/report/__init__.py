"""Report of a run: facts, pages and plots."""
