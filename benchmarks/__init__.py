"""Benchmark scripts. Each writes its result as a JSON file into `benchmarks/results/`."""
