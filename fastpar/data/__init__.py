"""Texts, tokens, batches."""
