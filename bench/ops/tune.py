"""`python -m bench attention --tune`: which tile each attention kernel should use on this GPU.

For each kernel, head dim and variant of kernels/attention_configs.json: every candidate that keeps
the 2x rule is timed at GPT-2's shape, the fastest few are timed against the present entry in turn,
and the table of all of them is printed. With --commit-results a winner replaces the entry as soon
as its place is done, so that a run that is stopped keeps what it found.

    python -m bench attention --tune                        all places, until --total-limit
    python -m bench "attention:fwd D=64" --tune             places whose name holds this
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.harness import bind
from bench.records import reason
from fastpar.doctor.clocks import Call, interleave
from fastpar.kernels import Rng, attention_qkvpacked, make_key
from fastpar.kernels.attention_configs import (
    PATH,
    Config,
    candidates,
    get_config,
    set_config,
    table_for,
)
from fastpar.kernels.reference import attention_ref
from fastpar.testing import assert_matches_oracle

P = 0.1
FINALISTS = 4
SAMPLES = 5  # of a candidate's first timing
LEAST_GAIN = 1.01  # below, the present entry stays: medians of two runs differ by as much


@dataclass(frozen=True)
class Place:
    """One entry of the table."""

    kernel: str
    head_dim: int
    variant: str

    def __str__(self) -> str:
        return f"{self.kernel} D={self.head_dim} {self.variant}"

    @property
    def settings(self) -> dict[str, Any]:
        if self.variant != "dropout":
            return {}
        return {"dropout_p": P, "rng": Rng(make_key(1, 0), 0)}

    def draw(self, B: int, T: int, H: int, device: str) -> Tensor:
        dtype = torch.float32 if self.variant == "fp32" else torch.bfloat16
        if device == "cpu" and dtype == torch.bfloat16:
            dtype = torch.float16  # Triton's interpreter gets products of bf16 wrong
        generator = torch.Generator(device).manual_seed(6)
        shape = (B, T, 3, H, self.head_dim)
        qkv = torch.randn(shape, generator=generator, device=device).to(dtype)
        return qkv.requires_grad_()


PLACES = [
    Place(kernel, head_dim, variant)
    for variant in ("plain", "dropout")
    for head_dim in (64, 128)
    for kernel in ("fwd", "bwd_dkdv", "bwd_dq")
]


@contextlib.contextmanager
def forced(place: Place, config: Config) -> Iterator[None]:
    """Calls inside use this config for this place, whatever the table says."""
    from fastpar.kernels import attention_bwd_triton, attention_triton

    def choose(arch: int, kernel: str, head_dim: int, variant: str) -> Config:
        here = (kernel, head_dim, variant) == (place.kernel, place.head_dim, place.variant)
        return config if here else get_config(arch, kernel, head_dim, variant)

    modules: tuple[Any, ...] = (attention_triton, attention_bwd_triton)
    for module in modules:
        module.get_config = choose
    try:
        yield
    finally:
        for module in modules:
            module.get_config = get_config


def check(place: Place, device: str, T: int = 200) -> None:
    """Raises AssertionError unless attention keeps the 2x rule; T is a multiple of no tile."""

    def oracle(qkv: Tensor) -> Tensor:
        return attention_ref(*qkv.unbind(2), **place.settings)

    def ours(qkv: Tensor) -> Tensor:
        return attention_qkvpacked(qkv, **place.settings)

    grad = place.kernel != "fwd"
    assert_matches_oracle(ours, oracle, [place.draw(2, T, 2, device)], grad=grad)


def tune_place(
    place: Place,
    arch: int,
    clock: Any,
    *,
    device: str = "cuda",
    deadline: float = float("inf"),
    shape: tuple[int, int, int] | None = None,
    check_length: int = 200,
) -> Config:
    """Prints the place's table and returns its best config: the present one, or a faster one.

    Args:
        deadline: of time.monotonic(); candidates that are not timed by then are left out, visibly.
        shape: B, T and H of the timed call; default: 16 samples of 1024 tokens, 768 wide.
    """
    present = get_config(arch, place.kernel, place.head_dim, place.variant)
    others = candidates(arch, place.kernel, place.head_dim, place.variant)
    direction = "forward" if place.kernel == "fwd" else "backward"
    qkv = place.draw(*(shape or (16, 1024, 768 // place.head_dim)), device)
    calls: dict[Config, Call] = {}
    first_ms: dict[Config, float] = {}
    tried = 0
    print(f"== {place}: {len(others)} candidates", flush=True)
    for config in [present, *(c for c in others if c != present)]:
        if config != present and time.monotonic() > deadline:
            print(f"{place}: out of time after {tried} configs")
            break
        tried += 1
        try:
            with forced(place, config):
                check(place, device, check_length)
                call = _call(place, config, qkv, direction)
                call()
                first_ms[config] = float(np.median([clock.sample(call) for _ in range(SAMPLES)]))
                calls[config] = call
        except Exception as error:
            print(f"{_show(config)} refused: {reason(error)}", flush=True)
            continue
        print(f"{_show(config)} {first_ms[config]:9.4f} ms", flush=True)
    finalists = sorted(first_ms, key=lambda c: first_ms[c])[:FINALISTS]
    finalists += [present] if present in calls and present not in finalists else []
    if not finalists:
        raise RuntimeError(
            f"tune: expected a config of {place} that runs, got none; see the reasons above"
        )
    timings = interleave({_show(c): [calls[c]] for c in finalists}, clock, budget_s=1.0)
    ms = {c: timings[_show(c)].median_ms for c in finalists}
    best = min(finalists, key=lambda c: ms[c])
    if present in ms and ms[present] < LEAST_GAIN * ms[best]:
        best = present
    for config in finalists:
        marks = " present" * (config == present) + " best" * (config == best)
        print(f"final {_show(config)} {ms[config]:9.4f} ms{marks}", flush=True)
    return best


def _call(place: Place, config: Config, qkv: Tensor, direction: str) -> Call:
    def function(qkv: Tensor) -> Tensor:
        return attention_qkvpacked(qkv, **place.settings)

    (inner,) = bind(function, [(qkv,)], direction)

    def call() -> Any:
        with forced(place, config):
            return inner()

    return call


def _show(config: Config) -> str:
    return (
        f"q{config.block_q:<4}k{config.block_k:<4}warps {config.num_warps} "
        f"stages {config.num_stages} {config.load}"
    )


def run(
    clock: Any,
    *,
    only: str = "",
    write: bool = False,
    limit_s: float = float("inf"),
    places: Sequence[Place] = tuple(PLACES),
    path: Path = PATH,
    **settings: Any,
) -> dict[str, str]:
    """Tune the places in turn; what was found for each, by name."""
    from fastpar.kernels.triton_launch import gpu_arch

    arch = gpu_arch(torch.device(settings.get("device", "cuda")))
    deadline = time.monotonic() + limit_s
    found = {}
    for place in (p for p in places if only in str(p)):
        if time.monotonic() > deadline:
            found[str(place)] = "not tuned: out of time"
            continue
        present = get_config(arch, place.kernel, place.head_dim, place.variant)
        best = tune_place(place, arch, clock, deadline=deadline, **settings)
        found[str(place)] = f"{_show(best)}{' (as before)' if best == present else ''}"
        if write and best != present:
            set_config(arch, place.kernel, place.head_dim, place.variant, best, path)
    print(f"\ntable {table_for(arch)} of {path.name}{'' if write else ', not written'}")
    for name, what in found.items():
        print(f"{name:22} {what}")
    return found
