"""Times of a model's operations, each where it stands: a chain of them, forward and backward.

[Note: in their places] Alone and again and again an operation finds its inputs, weights and memory
in the cache; in a model it finds there what the one before it wrote, and its weights not, once they
are more than the cache holds. So a GPT's operations run one after the other, through their public
functions and autograd, as often as the model has layers, and between any two stands a stamp: an
identity that takes the time when it is passed, forward and backward. What ranks of tp would
exchange is left out: where the next operation needs another size, a cheap one of torch's stands
outside of the stamps.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastpar.axes.step import Setup, Workload
from fastpar.files.dtypes import DTYPES
from fastpar.kernels import (
    Rng,
    attention_qkvpacked,
    bias_gelu,
    embedding,
    layer_norm,
    linear,
    linear_cross_entropy,
    make_key,
    residual_layer_norm,
)
from fastpar.settings.block import FIRST, LAST, Part, block_parts, shapes_of, widths

Key = tuple[str, tuple[int, ...], str]  # name, shape and direction of an operations.Op
EMPTY = ("empty", ())  # two stamps with nothing between them: what a stamp costs
COPY = ("copy", ())
FIRST_NORM = "first layer_norm"  # without a residual: the model has one


class Clock:
    """Collects when stamps were passed; on a GPU events of the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[Any, Any]] = []  # (what begins or None, time)

    def mark(self, begins: Any) -> None:
        """`begins` starts here, and what began at the last mark ends."""
        at: Any
        if self._on_gpu:
            at = torch.cuda.Event(enable_timing=True)
            at.record()
        else:
            at = time.perf_counter()
        self._marks.append((begins, at))

    def intervals(self) -> list[tuple[Any, float]]:
        """(what, seconds) of all that had a name, in order; forgets them."""
        if self._on_gpu:
            torch.cuda.synchronize()
        found = []
        for (what, start), (_, end) in zip(self._marks, self._marks[1:]):
            if what is not None:
                seconds = start.elapsed_time(end) * 1e-3 if self._on_gpu else end - start
                found.append((what, seconds))
        self._marks = []
        return found


class _Stamp(torch.autograd.Function):
    """Identity of tensors that takes the time: what begins here forward, and here backward."""

    @staticmethod
    def forward(ctx: Any, clock: Clock, forward: Any, backward: Any, *tensors: Tensor) -> Any:
        ctx.clock, ctx.begins = clock, backward
        clock.mark(forward)
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.clock.mark(ctx.begins)
        return None, None, None, *grads


def fitted(x: Tensor, shape: Sequence[int]) -> Tensor:
    """The elements of x, cut or repeated, as a tensor of this shape."""
    numel, flat = math.prod(shape), x.reshape(-1)
    if flat.numel() < numel:
        flat = torch.cat([flat] * -(-numel // flat.numel()))
    return flat[:numel].view(*shape)


class Chain:
    """One rank's operations of a micro-batch: a GPT without what its ranks exchange.

    Args:
        seed: of weights and tokens.
    """

    def __init__(
        self,
        workload: Workload,
        setup: Setup,
        device: torch.device,
        seed: int = 0,
    ) -> None:
        shape, tp, block = workload.shape, setup.tp, block_parts()
        self.rows, self.time = setup.micro_batch_size, workload.seq_len  # B, T
        self.heads, self.letters = shape.heads_of_rank(tp), widths(shape, tp)
        tokens = self.rows * self.time
        self.on = {"tokens": tokens, "own": -(-tokens // tp) if setup.sequence_parallel else tokens}
        self.dropout, self.eps = shape.dropout, shape.layer_norm_eps
        self.clock, self.device, self.dtype = Clock(device), device, DTYPES[setup.dtype]
        torch.manual_seed(seed)
        self._key = make_key(seed, 0).to(device)
        self.parameters: list[Tensor] = []
        self.parts = [
            (part, [self._weight(*sizes) for sizes in shapes_of([part], shape, tp)])
            for part in (*FIRST, *block * shape.n_layer, *LAST)
        ]
        # Products whose bias the op behind them in the block adds.
        self.without_bias = {
            a.name for a, b in itertools.pairwise(block) if a.op == "matmul" and b.cheap
        }
        self._hook_gradients(DTYPES[setup.grad_dtype])
        size = 2, self.rows, self.time
        self.idx, self.targets = torch.randint(self.letters["V"], size, device=device)

    def _weight(self, *shape: int) -> Tensor:
        weight = torch.randn(*shape, device=self.device, dtype=torch.float32).mul_(0.02)
        self.parameters.append(weight.to(self.dtype).requires_grad_())
        return self.parameters[-1]

    def _hook_gradients(self, dtype: torch.dtype) -> None:
        """Every gradient goes to its place in one buffer when it is there, as the engine's do."""
        self.n_elements = sum(p.numel() for p in self.parameters)
        self.buffer = torch.empty(self.n_elements, dtype=dtype, device=self.device)
        self.adding = False  # what is there already, as in a later micro-batch
        item, wide = self.dtype.itemsize, dtype.itemsize
        self.copied_bytes = self.n_elements * (item + wide)
        self.added_bytes = self.n_elements * (item + 2 * wide)
        at, me = 0, weakref.ref(self)  # torch keeps hooks where no collector looks

        def take(p: Tensor, view: Tensor) -> None:
            chain = me()
            if chain is not None:
                chain._take(p, view)

        for p in self.parameters:
            view = self.buffer[at : at + p.numel()].view_as(p)
            at += p.numel()
            p.register_post_accumulate_grad_hook(functools.partial(take, view=view))

    def _take(self, p: Tensor, view: Tensor) -> None:
        assert p.grad is not None
        self.clock.mark(COPY)
        view.add_(p.grad) if self.adding else view.copy_(p.grad)
        p.grad = None
        self.clock.mark(None)

    def _at(self, begins: Any, ends: Any, *tensors: Tensor) -> Any:
        """Stamp: forward `begins` begins here; backward `ends` does."""
        found = _Stamp.apply(self.clock, begins, ends, *tensors)
        return found if len(tensors) > 1 else found[0]

    def _timed(self, name: str, shape: tuple[int, ...], function: Any, *inputs: Tensor) -> Any:
        """function(*inputs) between two stamps."""
        key = (name, shape)
        # What comes behind the embedding's backward is its too: the head's gradient is added.
        inputs = self._at(key, key if name == "embedding" else None, *inputs)
        out = function(*inputs) if isinstance(inputs, tuple) else function(inputs)
        return self._at(None, key, *out) if isinstance(out, tuple) else self._at(None, key, out)

    def _drop(self, site: int) -> dict[str, Any]:
        return {"dropout_p": self.dropout, "rng": Rng(self._key, site)} if self.dropout else {}

    def _call(
        self, part: Part, weights: list[Tensor], bias: Tensor | None, site: int
    ) -> tuple[tuple[int, ...], Callable[..., Any]]:
        """The sizes of a part's Op, and what it computes; bias: of a product before it."""
        rows, into, out = self.on[part.on], self.letters[part.into], self.letters[part.out]
        drop = self._drop(site)
        if part.op == "layer_norm":
            options = {"x_bias": bias, "eps": self.eps, **drop}
            return (rows, out), lambda y, x: residual_layer_norm(y, x, *weights, **options)
        if part.op == "bias_gelu":
            return (rows, out), lambda y: bias_gelu(y, bias)
        if part.op == "loss":
            wte, targets = self.parameters[0], self.targets.reshape(-1)
            return (rows, into, out), lambda y: linear_cross_entropy(y, wte, targets)
        if part.op == "matmul":
            return (rows, into, out), lambda y: linear(y, *weights)
        heads = self.rows, self.time, 3, self.heads, -1
        shape = self.rows, self.heads, self.time, out // self.heads
        return shape, lambda y: attention_qkvpacked(y.view(heads), causal=True, **drop).flatten(2)

    def step(self) -> Tensor:
        """Forward and backward of one micro-batch, stamped."""
        wte, wpe, *_ = self.parameters
        drop, size = self._drop(0), (self.on["tokens"], self.letters["C"])
        x = self._timed("embedding", size, lambda w: embedding(self.idx, w, wpe, **drop), wte)
        y: Any = None
        before: Tensor | None = None
        for site, (part, weights) in enumerate(self.parts[2:]):
            bias = None
            if part.name in self.without_bias:
                weights, bias = weights[:1], weights[1]
            shape, call = self._call(part, weights, before, site)
            before = bias
            if part.op != "layer_norm":
                y = fitted(y, (self.on[part.on], self.letters[part.into]))
                y = self._timed(part.op, shape, call, y)
            elif y is None:
                x = fitted(x, shape)
                y = self._timed(
                    FIRST_NORM, shape, lambda v, w=weights: layer_norm(v, w[0], w[1], self.eps), x
                )
            else:
                y, x = self._timed(part.op, shape, call, fitted(y, shape), x)
                x = self._at(None, EMPTY, self._at(EMPTY, None, x))
        found = [(k, "forward", s) for k, s in self.clock.intervals()]
        y.backward()
        self.clock.mark(None)
        found += [(k, "backward", s) for k, s in self.clock.intervals()]
        self.found = found
        return y.detach()

    def times(self) -> dict[Key, list[float]]:
        """Seconds of every operation of the last step, without the stamps' own."""
        empty = {
            way: statistics.median([s for k, w, s in self.found if k == EMPTY and w == way])
            for way in ("forward", "backward")
        }
        out: dict[Key, list[float]] = defaultdict(list)
        copied = 0.0
        for key, way, seconds in self.found:
            if key == COPY:
                copied += seconds
            elif key != EMPTY and key[0] != FIRST_NORM:
                samples = out[key[0], key[1], way]
                samples.append(max(seconds - empty[way], 1e-9))
                if key[0] == "embedding":
                    samples[:] = [sum(samples)]
        moved = self.added_bytes if self.adding else self.copied_bytes
        out["copy", (moved,), "backward"] = [copied]
        return out
