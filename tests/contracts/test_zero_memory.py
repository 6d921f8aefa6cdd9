"""A name for tests/checkpoint, until it comes from alive.py."""

from alive import Alive  # noqa: F401
