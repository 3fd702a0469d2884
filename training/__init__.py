"""Training, from tokens to checkpoints. Each file defines one concept.

`train_accelerate.py` shows the whole run in order.
"""
