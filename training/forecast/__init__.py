"""--plan: an estimate of memory, time, cost and disk use before a run starts."""
