"""Guards of a running job: locks, signals, dead or hung processes, loss spikes, errors."""
