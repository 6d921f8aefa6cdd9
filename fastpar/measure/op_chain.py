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
import math
import statistics
import time
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastpar.cost.workload import Setup, Workload
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
from fastpar.models.block import vocabulary_rows

Key = tuple[str, tuple[int, ...], str]  # name, shape and direction of an operations.Op
EMPTY = ("empty", ())  # two stamps with nothing between them: what a stamp costs
COPY = ("copy", ())
FIRST = "first layer_norm"  # without a residual: the model has one


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
        shape, tp = workload.shape, setup.tp
        c, hidden, t = shape.n_embd, 4 * shape.n_embd // tp, workload.seq_len
        self.rows, self.width, self.time = setup.micro_batch_size, c, t  # B, C, T
        self.tokens = self.rows * t
        self.mine = -(-self.tokens // tp) if setup.sequence_parallel else self.tokens
        self.heads, self.vocab = shape.heads_of_rank(tp), vocabulary_rows(shape, tp)
        part = self.heads * shape.head_dim
        self.dropout, self.eps = shape.dropout, shape.layer_norm_eps
        self.clock, self.device, self.dtype = Clock(device), device, DTYPES[setup.dtype]
        torch.manual_seed(seed)
        self._key = make_key(seed, 0).to(device)
        self.parameters: list[Tensor] = []
        self.wte, self.wpe = self._weight(self.vocab, c), self._weight(t, c)
        shapes = {
            **{"qkv": (3 * part, c), "qkv_bias": (3 * part,), "proj": (c, part)},
            **{"proj_bias": (c,), "up": (hidden, c), "up_bias": (hidden,)},
            **{"down": (c, hidden), "down_bias": (c,)},
            **{f"norm{i}_{name}": (c,) for i in (1, 2) for name in ("weight", "bias")},
        }
        self.layers = [
            {name: self._weight(*sizes) for name, sizes in shapes.items()}
            for _ in range(shape.n_layer)
        ]
        self.last_norm = self._weight(c), self._weight(c)
        self._hook_gradients(DTYPES[setup.grad_dtype])
        self.idx, self.targets = torch.randint(self.vocab, (2, self.rows, t), device=device)

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

    def _matmul(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out, wide = weight.shape
        x = fitted(x, (self.tokens, wide))
        shape = (self.tokens, wide, out)
        return self._timed("matmul", shape, lambda v: linear(v, weight, bias), x)

    def _norm(
        self,
        x: Tensor,
        delta: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        site: int,
        x_bias: Tensor | None = None,
    ) -> Any:
        """(norm of the sum, sum)."""
        shape = (self.mine, self.width)
        more: dict[str, Any] = {"eps": self.eps}
        if delta is None:
            return self._timed(FIRST, shape, lambda v: layer_norm(v, weight, bias, **more), x), x

        def function(d: Tensor, r: Tensor) -> Any:
            dropped = self._drop(site)
            return residual_layer_norm(d, r, weight, bias, x_bias=x_bias, **more, **dropped)

        return self._timed("layer_norm", shape, function, fitted(delta, shape), x)

    def step(self) -> Tensor:
        """Forward and backward of one micro-batch, stamped."""
        c, drop = self.width, self._drop(0)
        x = self._timed(
            "embedding",
            (self.tokens, c),
            lambda w: embedding(self.idx, w, self.wpe, **drop),
            self.wte,
        )
        x, delta = fitted(x, (self.mine, c)), None
        for number, w in enumerate(self.layers):
            site = 3 * number
            y, x = self._norm(x, delta, w["norm1_weight"], w["norm1_bias"], site)
            x = self._at(EMPTY, None, x)
            x = self._at(None, EMPTY, x)
            y = self._matmul(y, w["qkv"], w["qkv_bias"])
            qkv = y.view(self.rows, self.time, 3, self.heads, -1)
            more = self._drop(site + 1)
            y = self._timed(
                "attention",
                (self.rows, self.heads, self.time, qkv.shape[-1]),
                lambda v, more=more: attention_qkvpacked(v, causal=True, **more),
                qkv,
            )
            delta = self._matmul(y.flatten(2), w["proj"])
            norm = w["norm2_weight"], w["norm2_bias"]
            y, x = self._norm(x, delta, *norm, site + 2, w["proj_bias"])
            y = self._matmul(y, w["up"])
            y = self._timed("bias_gelu", tuple(y.shape), bias_gelu, y, w["up_bias"])
            delta = self._matmul(y, w["down"], w["down_bias"])
        y, _ = self._norm(x, delta, *self.last_norm, 3 * len(self.layers))
        y = fitted(y, (self.tokens, c))
        loss = self._timed(
            "loss",
            (self.tokens, c, self.vocab),
            lambda v: linear_cross_entropy(v, self.wte, self.targets.reshape(-1)),
            y,
        )
        found = [(k, "forward", s) for k, s in self.clock.intervals()]
        loss.backward()
        self.clock.mark(None)
        found += [(k, "backward", s) for k, s in self.clock.intervals()]
        self.found = found
        return loss.detach()

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
            elif key != EMPTY and key[0] != FIRST:
                samples = out[key[0], key[1], way]
                samples.append(max(seconds - empty[way], 1e-9))
                if key[0] == "embedding":
                    samples[:] = [sum(samples)]
        moved = self.added_bytes if self.adding else self.copied_bytes
        out["copy", (moved,), "backward"] = [copied]
        return out
