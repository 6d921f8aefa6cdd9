"""Benches of training, communication, checkpoints."""
