"""Guards of a running job: lock, signals, dead or hung processes, loss spikes and errors."""
