"""Mixtures of experts: the router, its losses and counts, and tokens sent to where experts are."""
