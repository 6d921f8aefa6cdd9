"""Fused kernels and a lean parallel runtime for training GPT-2-class models in PyTorch.

The public names are loaded when they are first used: `import fastpar` itself does not import torch.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastpar._version import __version__

if TYPE_CHECKING:
    from fastpar.adafactor import Adafactor
    from fastpar.checkpoint import load_checkpoint, save_checkpoint
    from fastpar.config import GPTConfig
    from fastpar.engine import engine_of
    from fastpar.grad_state import Partial, Replicate, Shard
    from fastpar.mesh import Mesh
    from fastpar.model import GPT
    from fastpar.modules import (
        GELU,
        MLP,
        CausalSelfAttention,
        Embedding,
        LayerNorm,
        LinearCrossEntropyLoss,
        RMSNorm,
    )
    from fastpar.optim import AdamW
    from fastpar.parallel import parallelize
    from fastpar.patching import patch, unpatch
    from fastpar.saver import Saver
    from fastpar.tp_layers import (
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
        VocabParallelLinear,
    )

__all__ = [
    "GELU",
    "GPT",
    "MLP",
    "Adafactor",
    "AdamW",
    "CausalSelfAttention",
    "ColumnParallelLinear",
    "Embedding",
    "GPTConfig",
    "LayerNorm",
    "LinearCrossEntropyLoss",
    "Mesh",
    "Partial",
    "RMSNorm",
    "Replicate",
    "RowParallelLinear",
    "Saver",
    "Shard",
    "VocabParallelEmbedding",
    "VocabParallelLinear",
    "__version__",
    "engine_of",
    "load_checkpoint",
    "parallelize",
    "patch",
    "save_checkpoint",
    "unpatch",
]

_HOMES = {
    "Adafactor": "adafactor",
    "AdamW": "optim",
    "CausalSelfAttention": "modules",
    "ColumnParallelLinear": "tp_layers",
    "Embedding": "modules",
    "GELU": "modules",
    "GPT": "model",
    "GPTConfig": "config",
    "LayerNorm": "modules",
    "LinearCrossEntropyLoss": "modules",
    "MLP": "modules",
    "Mesh": "mesh",
    "Partial": "grad_state",
    "RMSNorm": "modules",
    "Replicate": "grad_state",
    "RowParallelLinear": "tp_layers",
    "Saver": "saver",
    "Shard": "grad_state",
    "VocabParallelEmbedding": "tp_layers",
    "VocabParallelLinear": "tp_layers",
    "engine_of": "engine",
    "load_checkpoint": "checkpoint",
    "parallelize": "parallel",
    "patch": "patching",
    "save_checkpoint": "checkpoint",
    "unpatch": "patching",
}


def _check_compiled() -> None:
    """Say what to type when this is a checkout that was never built."""
    spec = importlib.util.find_spec("fastpar.kernels")
    folders = spec.submodule_search_locations if spec is not None else None
    suffixes = [*importlib.machinery.EXTENSION_SUFFIXES, ".py"]  # .py: setup.py's stand-in
    names = [f"_C{suffix}" for suffix in suffixes]
    if not any((Path(folder) / name).exists() for folder in folders or () for name in names):
        raise ImportError(
            "fastpar: expected the compiled module fastpar.kernels._C, got "
            f"{'no such module' if folders else 'a checkout that is not installed'}; "
            "run `pip install -e . --no-build-isolation` in the checkout (or `make train`), with "
            "FASTPAR_CPP=0 in front where there is no C++ compiler"
        )


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fastpar' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"fastpar.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


_check_compiled()
