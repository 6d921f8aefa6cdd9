"""The AdamW step, with and without clipping, on a GPT-2's own list of tensors.

Variants are torch's three implementations (a loop over tensors, foreach, fused), foreach under
torch.compile, fastpar.AdamW, and the op below it, adamw_step_. All read static gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench import stock
from bench.harness import Bench, Call, Case
from fastpar.config import GPTConfig
from fastpar.kernels import Hyper, adamw_step_
from fastpar.kernels.reference import adamw_step_ref
from fastpar.optim import AdamW
from fastpar.testing import assert_matches_oracle

TIME_LIMIT_S = {"cpu": 900, "cuda": 110}
LR, BETA1, BETA2, EPS, WEIGHT_DECAY, STEP = 6e-4, 0.9, 0.95, 1e-8, 0.1, 10
TORCH: dict[str, dict[str, Any]] = {
    "torch loop": {"foreach": False},
    "torch foreach": {"foreach": True},
    "torch fused": {"fused": True},
}
HYPER: dict[str, Any] = {
    "lr": LR,
    "betas": (BETA1, BETA2),
    "eps": EPS,
    "weight_decay": WEIGHT_DECAY,
}
OP_HYPER: dict[str, Any] = {
    "lr": LR,
    "beta1": BETA1,
    "beta2": BETA2,
    "eps": EPS,
    "weight_decay": WEIGHT_DECAY,
    "step": STEP,
}


def parameters(shapes: list[torch.Size], device: str) -> list[Tensor]:
    """Random fp32 parameters with random gradients."""
    generator = torch.Generator(device).manual_seed(3)
    params = []
    for shape in shapes:
        p = torch.randn(shape, generator=generator, device=device).requires_grad_()
        p.grad = torch.randn(shape, generator=generator, device=device)
        params.append(p)
    return params


def by_keywords(*lists: list[Tensor], **hyper: float) -> None:
    """adamw_step_, called as its oracle is."""
    adamw_step_(*lists, Hyper(**hyper))  # type: ignore[misc]


def op_call(shapes: list[torch.Size], device: str) -> Call:
    params = [p.detach() for p in parameters(shapes, device)]
    grads, exp_avgs = ([torch.randn_like(p) for p in params] for _ in range(2))
    exp_avg_sqs = [torch.rand_like(p) for p in params]
    return lambda: adamw_step_(params, grads, exp_avgs, exp_avg_sqs, Hyper(**OP_HYPER))


def build_calls(
    shapes: list[torch.Size], device: str, clip: bool
) -> dict[str, Callable[[], list[Call]]]:
    """Variant -> what makes its calls; memory for its state is taken there."""

    def torch_step(kind: dict[str, Any]) -> list[Call]:
        params = parameters(shapes, device)
        optimizer = torch.optim.AdamW(params, **HYPER, **kind)

        def call() -> None:
            if clip:
                torch.nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()

        return [call]

    def fastpar_step() -> list[Call]:
        params = parameters(shapes, device)
        return [AdamW(params, **HYPER, max_grad_norm=1.0 if clip else None).step]

    makers: dict[str, Callable[[], list[Call]]] = {
        name: lambda kind=kind: torch_step(kind)  # type: ignore[misc]
        for name, kind in TORCH.items()
    }
    makers["fastpar"] = fastpar_step
    if clip:
        params = parameters(shapes, device)
        makers["clip_grad_norm_ alone"] = lambda: [
            lambda: torch.nn.utils.clip_grad_norm_(params, 1.0)
        ]
    else:
        makers["fastpar adamw_step_"] = lambda: [op_call(shapes, device)]
    return makers


def compiled_step(shapes: list[torch.Size], device: str) -> list[Call]:
    # capturable keeps the step count on the GPU and so inside the graph.
    kind: dict[str, Any] = {"foreach": True, "capturable": device == "cuda"}
    optimizer = torch.optim.AdamW(parameters(shapes, device), **HYPER, **kind)
    return [torch.compile(optimizer.step, dynamic=False, fullgraph=False)]


def check(variant: str, device: str) -> None:
    """One step of odd sizes against fp64; torch's fused step is the yardstick."""
    if not variant.startswith("fastpar"):
        return
    generator = torch.Generator(device).manual_seed(4)
    inputs = [torch.randn(100_003, generator=generator, device=device) for _ in range(4)]
    inputs[3].square_()

    def by_op(step: Callable[..., None]) -> Callable[..., tuple[Tensor, ...]]:
        def function(*tensors: Tensor) -> tuple[Tensor, ...]:
            p, g, m, v = (t.clone() for t in tensors)
            step([p], [g], [m], [v], **OP_HYPER)
            return p, m, v

        return function

    def by_optimizer(make: Callable[..., torch.optim.Optimizer], **kind: Any):
        def function(*tensors: Tensor) -> tuple[Tensor, ...]:
            p, g, m, v = (t.clone() for t in tensors)
            p.requires_grad_()
            p.grad = g
            optimizer = make([p], **HYPER, **kind)
            optimizer.step()  # makes the state; p and the moments are set back below
            state = optimizer.state[p]
            with torch.no_grad():
                for target, source in ((p, tensors[0]), (state["exp_avg"], m)):
                    target.copy_(source)
                state["exp_avg_sq"].copy_(v)
            state["step"] = state["step"] * 0 + (STEP - 1)
            optimizer.step()
            return p.detach(), state["exp_avg"], state["exp_avg_sq"]

        return function

    ours = by_op(by_keywords) if variant.endswith("_") else by_optimizer(AdamW)
    assert_matches_oracle(
        ours,
        by_op(adamw_step_ref),
        inputs,
        eager=by_optimizer(torch.optim.AdamW, fused=True),
        grad=False,
    )


def run(bench: Bench) -> None:
    config = GPTConfig(n_layer=12, n_head=12, n_embd=768, vocab_size=50304)
    if bench.device == "cpu":
        config = GPTConfig(n_layer=6, n_head=6, n_embd=384, block_size=256, vocab_size=50304)
    if bench.quick:
        config = GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=32, vocab_size=256)
    with torch.device("meta"):
        shapes = [p.shape for p in stock.GPT(config).parameters()]
    numel = sum(shape.numel() for shape in shapes)
    millions = f"{numel / 1e6:.1f}M in {len(shapes)} tensors"
    for title, clip in ((f"adamw {millions}", False), (f"clip + adamw {millions}", True)):
        makers = build_calls(shapes, bench.device, clip)
        # The step reads and writes p, m, v and reads g; clipping has to read g once more.
        run_case(bench, title, makers, numel * 4.0 * (8 if clip else 7))
    makers = {
        "torch fused": build_calls(shapes, bench.device, False)["torch fused"],
        "torch.compile": lambda: compiled_step(shapes, bench.device),
    }
    run_case(bench, f"adamw compiled {millions}", makers, numel * 4.0 * 7)


def run_case(
    bench: Bench, title: str, makers: dict[str, Callable[[], list[Call]]], bytes_moved: float
) -> None:
    case = Case(
        title,
        lambda generator, small: (),
        {},
        None,
        torch.float32,
        bytes_moved={"step": bytes_moved},
        check=lambda variant: check(variant, bench.device),
        baseline="torch fused",
    )
    if bench.only in title:
        bench.run_calls(case, "step", makers)
