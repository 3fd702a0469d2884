"""Locks, signals, dead or hung processes, and runs that learn nothing."""
