"""Benchmarks: `python -m bench` from a checkout. Times are taken by fastpar/doctor/clocks.py."""
