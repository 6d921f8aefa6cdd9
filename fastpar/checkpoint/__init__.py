"""Save, load, verify, export."""
