"""Data sources, tokenizers, batches."""
