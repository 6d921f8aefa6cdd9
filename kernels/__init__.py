"""Ops for GPT-2-class models: functions from tensors to tensors, drop-in for torch's.

This folder is installed as the subpackage `fastpar.kernels`.
"""

if __name__ != "fastpar.kernels":
    raise ImportError(
        f"kernels: expected to be imported as fastpar.kernels, got {__name__}; "
        "run `pip install -e .` in the checkout and import fastpar.kernels"
    )

from fastpar.kernels.attention import attention, attention_qkvpacked
from fastpar.kernels.embedding import embedding
from fastpar.kernels.layer_norm import layer_norm, residual_layer_norm
from fastpar.kernels.philox import Rng, draw_key, dropout, keep_mask, make_key, quantize_p

__all__ = [
    "Rng",
    "attention",
    "attention_qkvpacked",
    "draw_key",
    "dropout",
    "embedding",
    "keep_mask",
    "layer_norm",
    "make_key",
    "quantize_p",
    "residual_layer_norm",
]
