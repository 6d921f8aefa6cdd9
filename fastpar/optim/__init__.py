"""Optimizers whose state may be sharded, loss scale, schedules."""
