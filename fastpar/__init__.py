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
    from fastpar.checkpoint.checkpoint import load_checkpoint, save_checkpoint
    from fastpar.checkpoint.saver import Saver
    from fastpar.comm.mesh import Mesh
    from fastpar.config.config import GPTConfig
    from fastpar.models.gpt import GPT
    from fastpar.nn.modules import (
        GELU,
        MLP,
        CausalSelfAttention,
        Embedding,
        LayerNorm,
        LinearCrossEntropyLoss,
        RMSNorm,
    )
    from fastpar.nn.tp_layers import (
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
        VocabParallelLinear,
    )
    from fastpar.optim.adafactor import Adafactor
    from fastpar.optim.adamw import AdamW
    from fastpar.parallel.engine import engine_of
    from fastpar.parallel.parallelize import parallelize
    from fastpar.patching.patch import patch, unpatch
    from fastpar.sharding.placements import Partial, Replicate, Shard

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
    "Adafactor": "optim.adafactor",
    "AdamW": "optim.adamw",
    "CausalSelfAttention": "nn.modules",
    "ColumnParallelLinear": "nn.tp_layers",
    "Embedding": "nn.modules",
    "GELU": "nn.modules",
    "GPT": "models.gpt",
    "GPTConfig": "config.config",
    "LayerNorm": "nn.modules",
    "LinearCrossEntropyLoss": "nn.modules",
    "MLP": "nn.modules",
    "Mesh": "comm.mesh",
    "Partial": "sharding.placements",
    "RMSNorm": "nn.modules",
    "Replicate": "sharding.placements",
    "RowParallelLinear": "nn.tp_layers",
    "Saver": "checkpoint.saver",
    "Shard": "sharding.placements",
    "VocabParallelEmbedding": "nn.tp_layers",
    "VocabParallelLinear": "nn.tp_layers",
    "engine_of": "parallel.engine",
    "load_checkpoint": "checkpoint.checkpoint",
    "parallelize": "parallel.parallelize",
    "patch": "patching.patch",
    "save_checkpoint": "checkpoint.checkpoint",
    "unpatch": "patching.patch",
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
