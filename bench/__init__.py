"""Benchmarks: `python -m bench` from a checkout. harness.py is the only timer."""
