"""Formats on the wire beside DDP, its hooks and FSDP2, on a link of 1 Gbit/s and one of 100 Mbit/s.

Two ranks with one thread each, in two network namespaces (bench/systems/links.py), train a GPT-2 of
25.4 million parameters on few tokens, so that the link decides. One variant runs after the other
(two processes take 1 GB), in groups that each have one process alone and DDP; the first step is not
timed, and replicas are measured on a link of FREE too, which holds nothing up. exposed_ms is a
step's time beyond that of the same step on one process alone, sent_bytes is what left the slower
end of the link, headers included.

[Note: the gate of formats] All variants see the same batches; their losses may differ from DDP's by
LOSS_BOUND, and by WIDE_BOUND where gradients or weights are rounded on the way.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

import fastpar
from bench.harness import Bench
from bench.records import Row
from bench.systems import bench_overlap as overlap
from bench.systems.bench_overlap import ALONE, TIMEOUT_S, Log, settled_bytes
from bench.systems.links import Link, NoLinkError, Ranks
from bench.targets import faster, note
from fastpar.comm.ranks import RankFailed, reason
from fastpar.doctor.trial import Timing
from fastpar.models.gpt import use_fp8
from fastpar.observe.strategies import Contender, Settings
from fastpar.settings.model import GPTConfig

TIME_LIMIT_S = {"cpu": 600, "cuda": 30}
CONFIG, QUICK = (
    GPTConfig(8, 8, 512, 64, 512, dropout=0.0),
    GPTConfig(2, 2, 64, 32, 256, dropout=0.0),
)
RATES, FREE = (1000, 100), 40_000  # Mbit/s
LOSS_BOUND, WIDE_BOUND = 1e-3, 0.2
INT8 = {"wire_gradients": "int8", "wire_weights": "int8"}
OURS: dict[str, tuple[int, dict[str, Any]]] = {
    "fastpar ZeRO-2": (2, {}),
    "fastpar ZeRO-2, bf16 both": (2, {"wire_gradients": "bf16", "wire_weights": "bf16"}),
    "fastpar ZeRO-2, int8 both": (2, INT8),
    "fastpar ZeRO-3, int8 both": (3, INT8),
    "fastpar ZeRO-1, int4 fed back, int8 weights": (
        1,
        {**INT8, "wire_gradients": "int4", "error_feedback": True},
    ),
    "fastpar ZeRO-0, int8 fed back": (0, {"wire_gradients": "int8", "error_feedback": True}),
}
# Products in 8 bits, emulated here; weights of blocks are gathered in fp32, and as the codes.
CODED: dict[str, tuple[int, dict[str, Any]]] = {
    "fastpar ZeRO-3": (3, {}),
    "fastpar ZeRO-3, fp8 products": (3, {"fp8": "all"}),
    "fastpar ZeRO-3, fp8 products, their codes": (3, {"fp8": "all", "wire_weights": "fp8"}),
}
OURS |= CODED
# torch refuses its bf16 hook on gloo.
DDP, FP16, BF16 = "DDP", "DDP, fp16 hook", "DDP, bf16 hook"
ZERO_PP = "DeepSpeed ZeRO++, weights and gradients quantized"
DEEPSPEED = ("DeepSpeed ZeRO-2", "DeepSpeed ZeRO-3", ZERO_PP)
FSDP2 = ("FSDP2", "FSDP2, no reshard")
# Replicas that train apart; ms is the mean of the steps from one meeting to the next.
RARE: dict[str, dict[str, Any]] = {
    "fastpar, DiLoCo every 10": {"every": 10},
    "fastpar, DiLoCo every 50": {"every": 50},
    "fastpar, DiLoCo every 50, int8": {"every": 50, "wire": "int8"},
}
GROUPS = {
    "torch": (ALONE, DDP, FP16, BF16, *FSDP2),
    "DeepSpeed": (ALONE, DDP, FSDP2[0], *DEEPSPEED),
    "fastpar": (ALONE, DDP, FSDP2[0], *(variant for variant in OURS if variant not in CODED)),
    "fp8": (ALONE, DDP, FSDP2[0], *CODED),
    "replicas": (ALONE, DDP, *RARE),
}
EXACT = (*FSDP2, *DEEPSPEED[:2], "fastpar ZeRO-2")


class Trainer(overlap.Trainer):
    """One rank of one variant."""

    def __init__(self, variant: str, config: GPTConfig, batch_size: int) -> None:
        self._options: dict[str, Any] = {}
        if variant not in OURS:
            if variant in DEEPSPEED:
                overlap.without_shared_memory()
            if variant == ZERO_PP:
                names = "zero_quantized_weights", "zero_quantized_gradients"
                self._options = {"deepspeed": dict.fromkeys(names, True)}
            known = dict.fromkeys((DDP, FP16, BF16), overlap.DDP)
            known[ZERO_PP] = DEEPSPEED[1]
            super().__init__(known.get(variant, variant), config, batch_size)
            if variant in (FP16, BF16):
                self._hook(variant)
            return
        stage, options = OURS[variant]
        self._options = options
        super().__init__(f"fastpar ZeRO-{stage}", config, batch_size)

    def _build(self, name: str, settings: Any, model: Any) -> Any:
        if self.variant in RARE:
            return replica(name, settings, model, RARE[name])
        extra = dict(self._options)
        if layers := extra.pop("fp8", None):
            model = functools.partial(in_8_bits, model, layers)
        given = {name: extra.pop(name) for name in ("deepspeed",) if name in extra}
        settings = replace(settings, parallel=settings.parallel.change(**extra), **given)
        return super()._build(name, settings, model)

    def _hook(self, variant: str) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        model: Any = self.contender.model
        hooks = {FP16: default_hooks.fp16_compress_hook, BF16: default_hooks.bf16_compress_hook}
        model.register_comm_hook(dist.group.WORLD, hooks[variant])


def in_8_bits(model: Any, layers: str) -> Any:
    """The model whose layers multiply in 8 bits with delayed scales."""
    made = model()
    use_fp8(made, layers, scaling="tensor", emulate=True)
    return made


def replica(name: str, settings: Settings, model: Any, options: dict[str, Any]) -> Contender:
    """A rank that trains apart."""
    apart = fastpar.parallelize(model(), fastpar.Mesh(replicas=2, device="cpu"))
    optimizer = fastpar.AdamW(apart.parameters(), **settings.adamw)
    fastpar.Outer(optimizer, **options)
    return Contender(name, apart, optimizer, settings)


@dataclass
class Plan:
    """What is run."""

    title: str
    config: GPTConfig
    mbit: int
    steps: int
    logs: dict[str, Log]
    batch_size: int = 1

    def steps_of(self, variant: str) -> int:
        """So many are timed."""
        if variant in RARE:
            return 2 * RARE[variant]["every"]
        return max(5, self.steps) if variant == ALONE else self.steps


def measure(plan: Plan, link: Link) -> None:
    """Every variant in turn; a failure stops only its own."""
    link.set_rate(plan.mbit)
    for variant, log in plan.logs.items():
        args = "bench.systems.bench_wires:Trainer", variant, plan.config, 1
        try:
            with Ranks(link, *args, timeout_s=TIMEOUT_S) as ranks:
                n, before = plan.steps_of(variant), settled_bytes(link)
                answers = ranks.ask("steps", 0, n, timeout_s=TIMEOUT_S)
                sent = max(now - then for now, then in zip(settled_bytes(link), before))
                log.extend(answers, sent / (n + 1))
                if (every := RARE.get(variant, {}).get("every")) is not None:
                    # Of the slower replica.
                    log.ms = [max(statistics.fmean(a["ms"][-every:]) for a in answers)]
        except RankFailed as error:
            log.refused = str(error)


def to_rows(bench: Bench, plan: Plan) -> Sequence[Row]:
    """A row for each variant."""
    rows, alone = [], plan.logs[ALONE].ms
    for variant, log in plan.logs.items():
        row = bench.row(plan.title, "step", variant, torch.float32, refused=log.refused)
        row.threads, row.notes = 1, {"ranks": 2, "link_mbit": plan.mbit}
        if variant == "fastpar ZeRO-2, int8 both" and plan.mbit == RATES[0] and not bench.quick:
            row.notes |= note([faster(2.5, *FSDP2)])
        rows.append(row)
        if log.refused is not None or not log.ms:
            continue
        row.median_ms, row.p20_ms, row.p80_ms, row.runs = timing = Timing.of(log.ms)
        tokens = 2 * plan.batch_size * plan.config.block_size
        row.notes["tokens_per_s"] = 1e3 * tokens / timing.median_ms
        row.notes["cpu_ms"] = statistics.median(log.cpu_ms)
        if variant == ALONE:
            continue
        row.notes["sent_bytes"] = min(log.sent_bytes)
        if alone:
            row.notes["exposed_ms"] = timing.median_ms - statistics.median(alone)
        for peer in (peer for peer in FSDP2 if peer in plan.logs):
            if plan.logs[peer].refused is None:
                base = statistics.median(plan.logs[peer].ms)
                row.baseline, row.speedup = peer, base / timing.median_ms
                break
    return rows


def run(bench: Bench) -> None:
    if bench.device != "cpu":
        return  # the link is between CPU ranks
    for mbit, group in [*itertools.product(RATES, GROUPS), (FREE, "replicas")]:
        config, steps = CONFIG, 1 if mbit == RATES[1] else 5
        title = f"GPT-2 25.4M B=1 T=64 a rank, 2 ranks, {mbit} Mbit/s"
        if bench.quick:
            config, steps, title = QUICK, 1, f"quick GPT-2, 2 ranks, {mbit} Mbit/s"
        if bench.only not in f"{title}, {group}":
            continue
        plan = Plan(title, config, mbit, steps, {v: Log() for v in GROUPS[group]})
        try:
            with Link(mbit) as link:
                measure(plan, link)
        except NoLinkError as error:
            bench.add(bench.row(title, "step", "link", torch.float32, refused=reason(error)))
            return
        overlap.judge(plan.logs, DDP, lambda v: LOSS_BOUND if v in EXACT else WIDE_BOUND)
        bench.add(*to_rows(bench, plan))
