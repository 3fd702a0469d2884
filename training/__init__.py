"""Tokens -> checkpoints: one noun a file, composed by `config.py`, told as a story by `train_accelerate.py`."""
