"""Scores, text and comparisons of a model."""
