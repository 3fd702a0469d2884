"""Recipes for fine-tuning a trained model with TRL, Trainer and PEFT."""
