"""Which tensors model*.safetensors holds, and in which file each of them is.

Of a GPT the names and layouts are transformers' (hf.py); of other models those of their parameters
and persistent buffers. The files are cut by the model alone, not by the ranks: the same bytes are
written from every mesh, and several ranks can write one model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastpar.models.gpt import GPT
from fastpar.models.hf import CONV1D, DTYPES, PREFIX, WEIGHTS_FILE, config_json
from fastpar.parallel.engine import engine_of_parameter

SHARD_MB = 64.0  # a file has at least so much, if there is as much
_MOST_FILES = 16


class Weight(NamedTuple):
    """A parameter, or a buffer, and how it is stored."""

    name: str  # in the model
    key: str  # in the file
    tensor: Tensor
    whole: torch.Size  # of all ranks that share it out
    shape: tuple[int, ...]  # in the file
    transposed: bool

    @property
    def nbytes(self) -> int:
        """In the file."""
        return math.prod(self.shape) * self.tensor.dtype.itemsize

    def stored(self, whole: Tensor) -> Tensor:
        """The file's tensor, a view of a whole one in the model's layout."""
        tensor = whole[: self.shape[0]] if self.shape and not self.transposed else whole
        return tensor.t() if self.transposed else tensor

    def loaded(self, stored: Tensor) -> Tensor:
        """The inverse: of a padded vocabulary without the padding rows."""
        return stored.t() if self.transposed else stored


def list_weights(model: nn.Module) -> list[Weight]:
    """All that a model's files hold, tied parameters once, in the model's order."""
    found: list[tuple[str, Tensor, torch.Size]] = []
    for name, p in model.named_parameters():
        engine = engine_of_parameter(p)
        found.append((name, p, p.shape if engine is None else engine.whole_shape(p)))
    declared = next((e.declared for e in map(engine_of_parameter, model.parameters()) if e), None)
    if declared is not None:  # frozen parameters are split too
        found = [(name, tensor, declared.whole_shape(tensor)) for name, tensor, _ in found]
    if not isinstance(model, GPT):
        found += [(name, b, b.shape) for name, b in _buffers(model)]
        return [Weight(name, name, t, whole, tuple(whole), False) for name, t, whole in found]
    weights = []
    for name, tensor, whole in found:
        transposed = name.endswith(CONV1D)
        shape = tuple(reversed(whole)) if transposed else tuple(whole)
        if name == "wte.weight":
            shape = (model.config.vocab_size, *shape[1:])
        weights.append(Weight(name, PREFIX + name, tensor, whole, shape, transposed))
    return weights


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The persistent ones; one that several modules share once, as tied parameters."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield f"{prefix}.{name}" if prefix else name, buffer


def files_of(weights: list[Weight], shard_mb: float = SHARD_MB) -> list[tuple[str, list[Weight]]]:
    """File name -> its weights, in order."""
    limit = max(shard_mb * 2**20, sum(w.nbytes for w in weights) / _MOST_FILES)
    shards: list[list[Weight]] = [[]]
    for weight in weights:
        if shards[-1] and sum(w.nbytes for w in shards[-1]) + weight.nbytes > limit:
            shards.append([])
        shards[-1].append(weight)
    n = len(shards)
    if n == 1:
        return [(WEIGHTS_FILE, shards[0])]
    return [(f"model-{i:05d}-of-{n:05d}.safetensors", shard) for i, shard in enumerate(shards, 1)]


def config_files(model: nn.Module, eot: int | None) -> dict[str, dict]:
    """File name -> JSON of what transformers reads beside the weights.

    Raises:
        ValueError: parameters of a dtype that transformers would not keep.
    """
    if isinstance(model, GPT):
        if model.wte.weight.dtype not in DTYPES:
            raise ValueError(
                f"Saver: expected parameters of {', '.join(DTYPES.values())}, got "
                f"dtype={model.wte.weight.dtype}; convert the model with .float() first"
            )
        return {"config.json": config_json(model, eot, eot)}
    to_json = getattr(getattr(model, "config", None), "to_json_string", None)
    return {"config.json": json.loads(to_json())} if to_json is not None else {}
