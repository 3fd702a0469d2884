"""Comparison of a model with other models and baselines, and a memorization test."""
