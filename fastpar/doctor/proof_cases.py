"""What an op is proven with on a machine: cases of cases.py at one size, plain and hostile ones."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpar.doctor.cases import (
    Draw,
    ErrorCase,
    Inputs,
    P,
    adamw_steps,
    attentions,
    dropouts,
    embeddings,
    experts,
    gelus,
    losses,
    norms,
)
from fastpar.kernels import (
    DelayedScales,
    Fp8,
    accumulate_,
    backend,
    global_norm,
    linear,
    pack_,
    reference,
    sum_shards,
    unpack_,
)
from fastpar.kernels.backend import wide
from fastpar.kernels.linear import weight_gradient, wide_product

FEW_ROWS = 64  # of the hostile cases
MANY_ELEMENTS = 1 << 22  # of a tensor: more than the tiles of all programs of a grid hold
HEADS = 12  # GPT-2's


def flat_ops(numel: int) -> Iterator[ErrorCase]:
    """Ops of buckets and of the norm: a list of two tensors, or flat memory."""

    def two(draw: Draw) -> Inputs:
        return {"a": draw(numel // 3), "b": draw(numel - numel // 3)}

    def packed(op: Callable[..., None]) -> Callable[..., Tensor]:
        def function(a: Tensor, b: Tensor) -> Tensor:
            flat = a.new_empty(a.numel() + b.numel())
            op(flat, [a.detach(), b.detach()], scale=0.5)
            return flat

        return function

    def unpacked(op: Callable[..., None]) -> Callable[..., object]:
        def function(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
            results = [torch.empty_like(t.detach()) for t in (a, b)]
            op(results, torch.cat([a.detach(), b.detach()]), scale=0.5)
            return tuple(results)

        return function

    def accumulated(op: Callable[..., None]) -> Callable[..., object]:
        def function(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
            totals = [t.detach().clone() for t in (a, b)]
            op(totals, [t.detach() for t in (a, b)], scale=0.5)
            return tuple(totals)

        return function

    def summed(op: Callable[..., None]) -> Callable[..., Tensor]:
        def function(a: Tensor, b: Tensor) -> Tensor:
            out = torch.empty_like(a.detach())
            rows = torch.stack([t.detach()[: a.numel()] for t in (a, b)])
            op(rows, out, scale=0.5)
            return out

        return function

    def norm(a: Tensor, b: Tensor) -> Tensor:
        return global_norm([a.detach(), b.detach()], max_norm=1.0)[0]

    def norm_ref(a: Tensor, b: Tensor) -> Tensor:
        return torch.cat([a.detach(), b.detach()]).to(wide(a.dtype)).norm()

    pairs: dict[str, tuple[Callable[..., object], Callable[..., object]]] = {
        "pack_": (packed(pack_), packed(reference.pack_ref)),
        "unpack_": (unpacked(unpack_), unpacked(reference.unpack_ref)),
        "accumulate_": (accumulated(accumulate_), accumulated(reference.accumulate_ref)),
        "sum_shards": (summed(sum_shards), summed(reference.sum_shards_ref)),
        "global_norm": (norm, norm_ref),
    }
    for op, (ours, ref) in pairs.items():
        outputs = ("a", "b") if op in ("unpack_", "accumulate_") else ("y",)
        yield ErrorCase(op, f"P={numel}", two, ours, ref, ref, outputs)


def weight_gradients(rows: int, shapes: tuple[tuple[int, int], ...]) -> Iterator[ErrorCase]:
    """Of a linear layer of (C, outputs), kept in fp32, beside one rounded to 16 bits first; then
    that of two micro-batches, the second added to the first."""

    def product(dy: Tensor, x: Tensor) -> Tensor:
        return dy.detach().t() @ x.detach()

    def halves(dy: Tensor, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(dy.detach().chunk(2), x.detach().chunk(2))

    def added(dy: Tensor, x: Tensor) -> Tensor:
        (dy1, x1), (dy2, x2) = halves(dy, x)
        return wide_product(dy2.t(), x2, weight_gradient(dy1, x1), add=True)

    def plain(dy: Tensor, x: Tensor) -> Tensor:
        return weight_gradient(dy.detach(), x.detach())

    for own, how in ((plain, ""), (added, "added")):
        for C, out in shapes:

            def make(draw: Draw, C: int = C, out: int = out) -> Inputs:
                return {"dy": draw(rows, out), "x": draw(rows, C)}

            def eager(dy: Tensor, x: Tensor, how: str = how) -> Tensor:
                parts = halves(dy, x) if how else ((dy, x),)
                return sum(product(*part).float() for part in parts)  # type: ignore[return-value]

            shape = f"N={rows} {C}->{out} {how}".strip()
            dtypes = (torch.bfloat16, torch.float16)
            calls = own, product, eager
            yield ErrorCase("weight_gradient", shape, make, *calls, ("dweight",), dtypes)


def linears_fp8(rows: int, C: int) -> Iterator[ErrorCase]:
    """Layers with products in 8 bits, whose oracle is their emulation in fp64; beside bf16."""
    shapes = ((4 * C, ""), (C, ""), (16, "spread rows"))
    scalings = ("row", "block", "tensor", "tensor fp8")  # and the format in a weight gradient
    for scaling, (out, how) in ((s, shape) for s in scalings for shape in shapes):

        def make(draw: Draw, out: int = out, how: str = how) -> Inputs:
            x = draw(rows, C)
            if how:
                x = x * torch.logspace(-6, 6, rows, dtype=torch.float32, device="cpu")[:, None].to(
                    x
                )
            return {"x": x, "weight": draw(out, C) * C**-0.5, "bias": draw(out)}

        def emulated(x: Any, w: Any, b: Any, how: str = scaling, emulate: bool = True) -> Tensor:
            form, _, of_weight = how.partition(" ")
            scales = DelayedScales(1)
            scales.load_state_dict({"history": [[[8.0] * 3]], "steps": 1})  # largest values
            kind: Any = (form, of_weight or "bf16", emulate, scales if form == "tensor" else None)
            return linear(x, w, b, fp8=Fp8(*kind))

        def own(x: Tensor, *rest: Tensor, emulated: Any = emulated) -> Tensor:
            return emulated(x, *rest, emulate=x.is_cpu and not backend.recording)

        shape = f"N={rows} {C}->{out} {scaling} {how}".strip()
        calls, bf16 = (own, emulated, emulated), (torch.bfloat16,)
        yield ErrorCase("linear_fp8", shape, make, *calls, dtypes=bf16, stock=F.linear)


def _attention_proofs(n: int, head_dim: int, device: str, *, masked: bool) -> Iterator[ErrorCase]:
    """Plain attention, or attention with dropout or documents; see kernels/attention.py _case."""
    T = min(n, 1024)
    heads = HEADS if n > 320 else 2 if masked else 4  # a mask's oracle is drawn in Python
    shape = (-(-n // 1024), T, T, heads, heads, head_dim)
    for case in attentions((shape,), device, p=P if masked else 0.0):
        if masked == ("dropout" in case.shape or "documents" in case.shape):
            yield case


def _losses(rows: int, size: int, chunk_rows: int | None = None) -> Iterator[ErrorCase]:
    """Both losses; linear_cross_entropy in chunks of so many rows."""
    for case in losses(rows, ((64, size - size // 64, size // 64),)):
        if chunk_rows and case.op == "linear_cross_entropy":
            fn = functools.partial(case.fn, chunk_rows=chunk_rows)
            shape = f"{case.shape} in chunks of {chunk_rows}"
            case = dataclasses.replace(case, fn=fn, shape=shape)
        yield case


def _builders(size: int, device: str) -> dict[str, Callable[[int], Iterator[ErrorCase]]]:
    """op -> its cases of so many rows, a plain one first."""
    return {
        **dict.fromkeys(
            ("layer_norm", "rms_norm", "residual_layer_norm", "residual_rms_norm"),
            lambda n: norms(n, (size,), device),
        ),
        "bias_gelu": lambda n: gelus(n, (size,)),
        "linear_fp8": lambda n: linears_fp8(n, size),
        "grouped_linear": lambda n: experts(n, size),
        "weight_gradient": lambda n: weight_gradients(n, ((size, 3 * size), (size, 8))),
        "embedding": lambda n: embeddings(1, n, (size,), 4096, device),
        "attention": lambda n: _attention_proofs(n, size, device, masked=False),
        "attention_masked": lambda n: _attention_proofs(n, size, device, masked=True),
        "cross_entropy": lambda n: _losses(n, size),
        "linear_cross_entropy": lambda n: _losses(n, size),
        "dropout": lambda n: dropouts((1, n, 48), device),
        # Of few values the time is that of the call, 0.07 ms for all of a model's at once.
        "adamw_step_": lambda n: adamw_steps(min(n * 8192, 1 << 23)),
        **dict.fromkeys(
            ("pack_", "unpack_", "accumulate_", "sum_shards", "global_norm"),
            lambda n: flat_ops(n * 768),
        ),
    }


def proof_cases(op: str, size: int, device: str, rows: int) -> list[ErrorCase]:
    """What an op is proven with for tensors of this last dimension: a plain case of so many rows
    first, which can be timed, then hostile ones, on a GPU also those of many rows; none for an op
    that has no proof."""
    build = _builders(size, device).get(op)
    if build is None:
        return []
    name = op.removesuffix("_masked")
    timed, *_ = (case for case in build(rows) if case.op == name)
    few = [case for case in build(FEW_ROWS) if case.op == name]
    return [timed, *few, *(cases_of_many_rows(op, size, device) if device == "cuda" else ())]


def cases_of_many_rows(op: str, size: int, device: str) -> list[ErrorCase]:
    """What FEW_ROWS do not reach: a kernel's loop over tiles and its last, partial one, a second
    round of its programs, sums of what they leave behind, products that are added up.

    All sizes are multiples of 16, as FEW_ROWS is, so that these launch the same compiled kernels.
    """
    build = _builders(size, device)[op]
    rows: tuple[int, ...] = (208, 1024)
    if op == "attention":
        rows = 320, 4096  # five tiles of 64, and 4 x 1024: more pairs of tiles than a GPU has SMs
    elif op == "attention_masked":
        rows = (320,)
    elif op == "cross_entropy":
        rows = (208,)
    elif op == "linear_cross_entropy":
        rows, build = (208,), functools.partial(_losses, size=size, chunk_rows=48)
    elif op == "embedding":  # 20 tokens, each of which fills several stretches of the sorted ids
        rows, build = (2048,), lambda n: embeddings(2, n, (size,), 64, device)
    elif not size:
        rows = (208,) if op == "dropout" else (4096,)
    elif op == "bias_gelu" or op.endswith("_norm"):
        rows = 208, max(1024, MANY_ELEMENTS // size // 16 * 16)
    known = {case.shape for case in _builders(size, device)[op](FEW_ROWS)}
    known.add("N=5 C=16384")  # rows that norms read twice: other kernels than this size's
    found = [case for n in rows for case in build(n) if case.op == op.removesuffix("_masked")]
    return list({case.shape: case for case in found if case.shape not in known}.values())
