"""The choice for --budget and --depth, and --plan."""
