"""Recipes that go on from a trained model, with the libraries that people use for it."""
