"""How a model's weights are stored: the names, layouts and files of model*.safetensors.

Of a GPT the names and layouts are transformers' (hf.py); of other models those of their parameters
and persistent buffers. The files are cut by the model alone, not by the ranks: the same bytes are
written from every mesh, and several ranks can write one model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastpar.axes.tensor.declared import Declared
from fastpar.engine.engine import engine_of_parameter
from fastpar.models.gpt import GPT
from fastpar.settings.block import products

PREFIX = "transformer."
WEIGHTS_FILE = "model.safetensors"


class Weight(NamedTuple):
    """A parameter, or a buffer, and how it is stored."""

    name: str  # in the model
    key: str  # in the file
    tensor: Tensor
    whole: torch.Size  # of all ranks that share it out
    shape: tuple[int, ...]  # in the file
    transposed: bool
    declared: Declared | None  # where tp ranks share parameters out

    @property
    def nbytes(self) -> int:
        """In the file."""
        return math.prod(self.shape) * self.tensor.dtype.itemsize

    @property
    def split(self) -> bool:
        """Whether ranks of tp or ep share it out."""
        return self.declared is not None and self.declared.is_split(self.tensor)

    def stored(self, whole: Tensor) -> Tensor:
        """The file's tensor, a view of a whole one in the model's layout."""
        tensor = whole[: self.shape[0]] if self.shape and not self.transposed else whole
        return tensor.t() if self.transposed else tensor

    def local(self, stored: Tensor) -> Tensor:
        """This rank's part of the file's tensor, in the model's layout; 0 pads the vocabulary."""
        values = stored.t() if self.transposed else stored
        if self.split:
            assert self.declared is not None
            return self.declared.cut(values, self.tensor)
        if values.shape == self.whole:
            return values
        padded = values.new_zeros(self.whole)
        padded[: len(values)] = values
        return padded


def is_conv1d(name: str) -> bool:
    """Whether transformers stores a GPT's parameter as [in, out]."""
    return name.endswith(tuple(f"{product}.weight" for product in products()))


def list_weights(model: nn.Module) -> list[Weight]:
    """All that a model's files hold, tied parameters once, in the model's order."""
    engines = map(engine_of_parameter, model.parameters())
    declared = next((engine.declared for engine in engines if engine is not None), None)
    weights, gpt = [], isinstance(model, GPT)
    for name, p in model.named_parameters():
        engine = engine_of_parameter(p)
        whole = p.shape if engine is None else engine.shards.whole_shape(p)
        if declared is not None:  # frozen parameters are split too
            whole = declared.whole_shape(p)
        transposed = gpt and is_conv1d(name) and p.dim() == 2
        shape = tuple(reversed(whole)) if transposed else tuple(whole)
        if isinstance(model, GPT) and name == "wte.weight":
            shape = (model.config.vocab_size, *shape[1:])
        key = PREFIX + name if gpt else name
        weights.append(Weight(name, key, p, whole, shape, transposed, declared))
    for name, b in _buffers(model):  # of a GPT the counts of its experts
        key = PREFIX + name if gpt else name
        weights.append(Weight(name, key, b, b.shape, tuple(b.shape), False, None))
    return weights


def _buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The persistent ones; one that several modules share once, as tied parameters."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield f"{prefix}.{name}" if prefix else name, buffer


def cut_into_files(weights: list[Weight], most_bytes: float) -> list[tuple[str, list[Weight]]]:
    """File name -> its weights, in order: no more bytes than asked for, or one weight."""
    shards: list[list[Weight]] = [[]]
    for weight in weights:
        if shards[-1] and sum(w.nbytes for w in shards[-1]) + weight.nbytes > most_bytes:
            shards.append([])
        shards[-1].append(weight)
    return [(weights_file(i, len(shards)), shard) for i, shard in enumerate(shards)]


def weights_file(i: int, n: int) -> str:
    """The name of file i, from 0, of n."""
    return WEIGHTS_FILE if n == 1 else f"model-{i + 1:05d}-of-{n:05d}.safetensors"
