"""Save, load, verify, inspect, export."""
