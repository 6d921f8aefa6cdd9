"""Fused kernels and a lean parallel runtime for training GPT-2-class models in PyTorch."""

from fastpar._version import __version__

__all__ = ["__version__"]
