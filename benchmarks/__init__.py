"""What was measured, and how to measure it again. Results are JSON files in `benchmarks/results/`."""
