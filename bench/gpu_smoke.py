"""Two minutes on a GPU that tell whether anything works: the first step of `make gpu`.

A line a check, "ok" or "WRONG" with the numbers; what fails does not stop the rest. A GPT of two
layers against fp64, 20 steps through engine, norm and AdamW, the same bits after save and resume,
each op under CUDA graph capture, and attention beside PyTorch's kernels at GPT-2's shape.
"""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastpar
from bench.records import reason
from fastpar.doctor.clocks import clock_for, interleave
from fastpar.doctor.proof_cases import proof_cases
from fastpar.kernels import attention, backend, choice

SMALL = fastpar.GPTConfig(2, 4, 256, block_size=128, vocab_size=1000, dropout=0.0)
STEPS = 20
SIZES = {
    "layer_norm": 768, "residual_layer_norm": 768, "bias_gelu": 3072, "embedding": 768,
    "attention": 64, "attention_masked": 64, "cross_entropy": 50304,
    "linear_cross_entropy": 50304, "dropout": 0, "adamw_step_": 0, "global_norm": 0, "pack_": 0,
    "unpack_": 0, "accumulate_": 0, "sum_shards": 0,
}  # fmt: skip


def batch(device: str, step: int = 0) -> Tensor:
    """Token numbers [4, T + 1], of a pattern that can be learned."""
    start = torch.arange(4)[:, None] * 7 + step
    tokens = (start + 3 * torch.arange(SMALL.block_size + 1)) % SMALL.vocab_size
    return tokens.to(device)


def gradients(device: str, dtype: torch.dtype, how: str) -> dict[str, Tensor]:
    """Loss and gradients of the small model by one backend, in fp64."""
    torch.manual_seed(3)
    model = fastpar.GPT(SMALL).to(device, dtype)
    tokens = batch(device)
    before, backend.choice = backend.choice, how
    try:
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
    finally:
        backend.choice = before
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach().double(), **{n: g.double() for n, g in named.items()}}


def against_fp64(device: str) -> str:
    """Every gradient within twice the error of plain PyTorch in the same dtype."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    exact = gradients(device, torch.float64, "torch")
    ours, plain = gradients(device, dtype, "auto"), gradients(device, dtype, "torch")
    worst = 0.0
    for name, value in exact.items():
        error, allowed = ((g[name] - value).norm().item() for g in (ours, plain))
        floor = torch.finfo(dtype).eps * value.norm().item()
        worst = max(worst, error / (2 * allowed + floor))
    if not worst <= 1:
        raise AssertionError(f"an error of {worst:.2f} times what is allowed")
    return f"{len(exact)} results, the worst at {worst:.2f} of what is allowed"


def training(device: str) -> str:
    """20 steps, and the second half again from a checkpoint: the loss falls, the bits are equal."""

    def start() -> tuple[Any, Any]:
        torch.manual_seed(3)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        model = fastpar.GPT(SMALL).to(device, dtype)
        fastpar.parallelize(model, fastpar.Mesh(device=device), zero_stage=1)
        optimizer = fastpar.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
        return model, optimizer

    def steps(model: Any, optimizer: Any, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            tokens = batch(device, step)
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    with tempfile.TemporaryDirectory() as folder:
        model, optimizer = start()
        losses = steps(model, optimizer, 0, STEPS // 2)
        half = fastpar.save_checkpoint(folder, model=model, optimizer=optimizer, step=STEPS // 2)
        losses += steps(model, optimizer, STEPS // 2, STEPS)
        model, optimizer = start()
        fastpar.load_checkpoint(half, model=model, optimizer=optimizer)
        again = steps(model, optimizer, STEPS // 2, STEPS)
    if losses[STEPS // 2 :] != again:
        raise AssertionError(f"resumed at another loss: {again[-1]!r}, not {losses[-1]!r}")
    if not losses[-1] < losses[0] - 0.5:
        raise AssertionError(f"the loss did not fall: {losses[0]:.3f} to {losses[-1]:.3f}")
    return f"loss {losses[0]:.3f} to {losses[-1]:.3f}, the same bits after a resume"


def captured(op: str, size: int) -> str:
    """The op's forward in a CUDA graph: a replay computes what an eager call does."""
    one = proof_cases(op, size, "cuda", 256)[0]
    dtype = torch.float32 if torch.bfloat16 not in one.dtypes else torch.bfloat16
    inputs = [
        x.detach() if isinstance(x, Tensor) else x for x in one.inputs(dtype, "cuda").values()
    ]
    with choice.trying(op, choice.OWN), torch.no_grad():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):
                one.fn(*inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = one.fn(*inputs)
        graph.replay()
        expected = one.fn(*inputs)
    torch.cuda.synchronize()
    pairs = zip(*(o if isinstance(o, tuple) else (o,) for o in (outputs, expected)))
    if not all(torch.equal(a, b) for a, b in pairs):
        raise AssertionError("a replay gives other values than an eager call")
    return "the same values as an eager call"


def attention_ms(device: str) -> str:
    """Forward and backward of own attention and of PyTorch's kernels, D=64."""
    B, T, H = (16, 1024, 12) if device == "cuda" else (1, 64, 2)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (
        torch.randn(B, T, H, 64, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
    )
    grad = torch.randn_like(q)
    kinds = {"flash": SDPBackend.FLASH_ATTENTION}
    if device == "cuda":
        kinds |= {"cudnn": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}

    def stock(kind: SDPBackend) -> Callable[[], Tensor]:
        def call() -> Tensor:
            with sdpa_kernel(kind):
                heads = [x.transpose(1, 2) for x in (q, k, v)]
                o = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
                return o.transpose(1, 2)

        return call

    ways = {
        "own": lambda: attention(q, k, v),
        **{name: stock(kind) for name, kind in kinds.items()},
    }
    calls: dict[str, list[Any]] = {}
    for name, way in ways.items():
        try:
            o = way()
            calls[f"{name} forward"] = [way]
            calls[f"{name} backward"] = [
                lambda o=o: torch.autograd.grad(o, (q, k, v), grad, retain_graph=True)
            ]
        except RuntimeError as error:
            print(f"   {name}: {reason(error)}")
    timed = interleave(calls, clock_for(device), budget_s=5.0, min_runs=3)
    return ", ".join(f"{name} {timing.median_ms:.3f}" for name, timing in timed.items())


def main(argv: list[str] | None = None) -> int:
    """Runs every check; 1 if one is wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_smoke", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="it is quick already")
    device = parser.parse_args(argv).device
    checks: dict[str, Callable[[], str]] = {
        "model against fp64": lambda: against_fp64(device),
        "training": lambda: training(device),
    }
    if device == "cuda":
        for op, size in SIZES.items():
            checks[f"{op} captured"] = functools.partial(captured, op, size)
    checks["ms of attention"] = lambda: attention_ms(device)
    wrong = 0
    for name, check in checks.items():
        try:
            print(f"ok     {name}: {check()}", flush=True)
        except Exception as error:
            wrong += 1
            print(f"WRONG  {name}: {reason(error)}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
