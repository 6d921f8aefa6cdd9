"""Replicas that train apart and average their weights now and then."""
