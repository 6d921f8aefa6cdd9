"""Ranks that talk: mesh, collectives on every transport, watchdog, meter."""
