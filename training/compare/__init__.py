"""Comparison of a model with other models and baselines; memorization of training text."""
