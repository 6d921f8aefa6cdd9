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
import statistics
import time
import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastpar.config.config import VOCAB_MULTIPLE
from fastpar.cost.workload import Setup, Workload
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

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Key = tuple[str, tuple[int, ...], str]  # name, shape and direction of a work.Op
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
    numel = 1
    for n in shape:
        numel *= n
    flat = x.reshape(-1)
    if flat.numel() < numel:
        flat = torch.cat([flat] * -(-numel // flat.numel()))
    return flat[:numel].view(*shape)


class Chain:
    """One rank's operations of a micro-batch: a GPT without what its ranks exchange.

    Args:
        n_layer: of the chain; None is the workload's.
        seed: of weights and tokens.
    """

    def __init__(
        self,
        workload: Workload,
        setup: Setup,
        device: torch.device,
        *,
        n_layer: int | None = None,
        seed: int = 0,
    ) -> None:
        shape, tp = workload.shape, setup.tp
        self.rows = setup.micro_batch_size  # B
        self.width, self.time = shape.n_embd, workload.seq_len
        self.tokens = self.rows * self.time
        self.mine = -(-self.tokens // tp) if setup.sequence_parallel else self.tokens
        self.heads = shape.n_head // tp
        self.inner = self.width // tp
        self.n_layer = shape.n_layer if n_layer is None else n_layer
        self.dropout, self.eps = shape.dropout, shape.layer_norm_eps
        multiple = tp * VOCAB_MULTIPLE  # see Shard's pad_to
        self.vocab = -(-shape.padded_vocab_size // multiple) * VOCAB_MULTIPLE
        self.clock = Clock(device)
        torch.manual_seed(seed)
        self._key = make_key(seed, 0).to(device)
        self.device, self.dtype = device, DTYPES[setup.dtype]
        c, part = self.width, self.inner
        self.wte, self.wpe = self._weight(self.vocab, c), self._weight(self.time, c)
        self.layers: list[dict[str, Any]] = [
            {
                "qkv": self._weight(3 * part, c),
                "qkv_bias": self._weight(3 * part),
                "proj": self._weight(c, part),
                "proj_bias": self._weight(c),
                "up": self._weight(4 * part, c),
                "up_bias": self._weight(4 * part),
                "down": self._weight(c, 4 * part),
                "down_bias": self._weight(c),
                "norms": [self._weight(c) for _ in range(4)],
            }
            for _ in range(self.n_layer)
        ]
        self.last = [self._weight(c), self._weight(c)]
        self._hook_gradients(DTYPES[setup.grad_dtype])
        ids = torch.randint(self.vocab, (2, self.rows, self.time), device=device)
        self.idx, self.targets = ids[0], ids[1]

    def _weight(self, *shape: int) -> Tensor:
        weight = torch.randn(*shape, device=self.device).mul_(0.02)
        return weight.to(self.dtype).requires_grad_()

    def _hook_gradients(self, dtype: torch.dtype) -> None:
        """Every gradient goes to its place in one buffer when it is there, as the engine's do."""
        weights = list(self.parameters())
        self.n_elements = sum(p.numel() for p in weights)
        self.buffer = torch.empty(self.n_elements, dtype=dtype, device=self.device)
        self.adding = False  # what is there already, as in a later micro-batch
        item, wide = weights[0].element_size(), self.buffer.element_size()
        self.copied_bytes = self.n_elements * (item + wide)
        self.added_bytes = self.n_elements * (item + 2 * wide)
        at, me = 0, weakref.ref(self)  # torch keeps hooks where no collector looks

        def take(p: Tensor, view: Tensor) -> None:
            chain = me()
            if chain is not None:
                chain._take(p, view)

        for p in weights:
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
        norm: list[Tensor],
        site: int,
        x_bias: Tensor | None = None,
    ) -> Any:
        shape = (self.mine, self.width)
        if delta is None:
            y = self._timed(
                FIRST, shape, lambda v: layer_norm(v, norm[0], norm[1], eps=self.eps), x
            )
            return y, x

        def function(d: Tensor, r: Tensor) -> Any:
            more = self._drop(site)
            return residual_layer_norm(d, r, norm[0], norm[1], x_bias=x_bias, eps=self.eps, **more)

        return self._timed("layer_norm", shape, function, fitted(delta, shape), x)

    def step(self) -> Tensor:
        """Forward and backward of one micro-batch, stamped."""
        n, t, c = self.mine, self.time, self.width
        drop = self._drop(0)
        x = self._timed(
            "embedding",
            (self.tokens, c),
            lambda w: embedding(self.idx, w, self.wpe, **drop),
            self.wte,
        )
        x, delta = fitted(x, (n, c)), None
        for number, layer in enumerate(self.layers):
            site, norms = 3 * number, layer["norms"]
            y, x = self._norm(x, delta, norms[:2], site)
            x = self._at(EMPTY, None, x)
            x = self._at(None, EMPTY, x)
            y = self._matmul(y, layer["qkv"], layer["qkv_bias"])
            qkv = y.view(self.rows, t, 3, self.heads, -1)
            more = self._drop(site + 1)
            y = self._timed(
                "attention",
                (self.rows, self.heads, t, qkv.shape[-1]),
                lambda v, more=more: attention_qkvpacked(v, causal=True, **more),
                qkv,
            )
            delta = self._matmul(y.flatten(2), layer["proj"])
            y, x = self._norm(x, delta, norms[2:], site + 2, layer["proj_bias"])
            y = self._matmul(y, layer["up"])
            y = self._timed("bias_gelu", tuple(y.shape), bias_gelu, y, layer["up_bias"])
            delta = self._matmul(y, layer["down"], layer["down_bias"])
        y, _ = self._norm(x, delta, self.last, 3 * self.n_layer)
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

    def parameters(self) -> Iterable[Tensor]:
        """All weights."""
        yield from (self.wte, self.wpe, *self.last)
        for layer in self.layers:
            for value in layer.values():
                yield from value if isinstance(value, list) else (value,)

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
