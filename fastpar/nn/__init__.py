"""Drop-in modules and activation recomputation."""
