"""Tensor parallelism: conjugate operators, the split vocabulary, declared placements."""
