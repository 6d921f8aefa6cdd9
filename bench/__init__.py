"""Benchmarks: `python -m bench` from a checkout. Times are taken by fastpar/doctor/trial.py."""
