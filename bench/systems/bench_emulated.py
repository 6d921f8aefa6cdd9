"""Overlap behind emulated links: GPT-2 from 124M to 1.5B as one of 8 or 64 ranks, on one device.

One rank computes; what it would say to the others takes the time of its bytes on a link
(bench/systems/emulated.py says what that leaves out). A variant is a link; all of them are
measured on the
same model in turn. Exposed is what a step lasts longer than the same step without a link.

Steps are timed from start to start, without a stop between them: what overlaps with the next
forward counts as hidden. Cases vary the stage and the number of ranks, and for one size of model
the bucket size (stages 0 to 2) and the units gathered ahead (stage 3). FASTPAR_EMULATED_S bounds
the seconds in which new cases begin.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.harness import Bench
from bench.records import Row, machine_line, reason
from bench.systems.emulated import (
    ETHERNET_1,
    ETHERNET_25,
    NODES,
    NVLINK,
    PCIE,
    PROFILES,
    EmulatedMesh,
    Link,
    Profile,
    emulated,
)
from fastpar.config.config import GPTConfig
from fastpar.doctor.clocks import Timing, steady_ms, synchronize
from fastpar.models.gpt import GPT
from fastpar.optim.adamw import AdamW
from fastpar.optim.schedule import param_groups
from fastpar.parallel.engine import Engine, engine_of
from fastpar.parallel.parallelize import parallelize

TIME_LIMIT_S = {"cpu": 1500, "cuda": 540}
BASELINE = "emulated, no link"
SIZES = {"124M": "gpt2", "350M": "gpt2-medium", "774M": "gpt2-large", "1.5B": "gpt2-xl"}
SMALL = GPTConfig(6, 6, 384, 256, 50304, dropout=0.0)  # for CPUs: 30M parameters
QUICK = GPTConfig(2, 2, 32, 32, 256, dropout=0.0)
BUCKETS_MB = (1.0, 5.0, 25.0, 100.0)


@dataclass(frozen=True)
class Setting:
    """One model as one rank trains it."""

    size: str
    config: GPTConfig
    batch_size: int  # of this rank
    ranks: int
    zero_stage: int
    bucket_mb: float | None = None
    prefetch: int = 1
    tp: int = 1
    sequence_parallel: bool = True

    def __str__(self) -> str:
        title = f"{self.size} T={self.config.block_size} B={self.batch_size}, {self.ranks} ranks, "
        title += f"stage {self.zero_stage}"
        if self.tp > 1:
            title += f", tp {self.tp}" + ", whole sequences" * (not self.sequence_parallel)
        if self.bucket_mb is not None:
            title += f", buckets of {self.bucket_mb:g} MB"
        return title + (f", prefetch {self.prefetch}" if self.prefetch != 1 else "")


def settings(device: str, quick: bool) -> Iterator[Setting]:
    """In the order of what they tell, should the time run out."""
    if device == "cpu":
        size, config, batch = ("tiny", QUICK, 2) if quick else ("30M", SMALL, 4)
        for stage in range(4):
            yield Setting(size, config, batch, 8, stage)
        if not quick:
            yield from curves(size, config, batch, 8)
        return
    configs = {size: GPTConfig.preset(name, dropout=0.0) for size, name in SIZES.items()}
    if quick:
        configs = {"tiny": QUICK}
    for size in sorted(configs, key=["124M", "1.5B", "350M", "774M", "tiny"].index):
        for stage in range(4):
            yield Setting(size, configs[size], 8, 64, stage)
        if size in ("124M", "1.5B"):
            yield from curves(size, configs[size], 8, 64)
    for size, config in configs.items():
        for stage in range(4):
            yield Setting(size, config, 8, 8, stage)


def tp_settings(device: str, quick: bool) -> Iterator[Setting]:
    """For bench_tp.py: tp ranks that split a model, and data-parallel ones of the others."""
    if device == "cpu" or quick:
        size, config, batch = ("tiny", QUICK, 2) if quick else ("30M", SMALL, 4)
        splits = [(size, config, batch, 2)]
    else:
        large = [("350M", 8), ("774M", 4), ("124M", 4), ("124M", 2)]
        splits = [(n, GPTConfig.preset(SIZES[n], dropout=0.0), 8, tp) for n, tp in large]
    for size, config, batch, tp in splits:
        for ranks, stage in ((tp, 0), (8 * tp, 2)):
            for sequence_parallel in (True, False):
                yield Setting(
                    size, config, batch, ranks, stage, tp=tp, sequence_parallel=sequence_parallel
                )


def curves(size: str, config: GPTConfig, batch_size: int, ranks: int) -> Iterator[Setting]:
    for bucket_mb in BUCKETS_MB:
        for stage in (0, 2):
            yield Setting(size, config, batch_size, ranks, stage, bucket_mb)
    for prefetch in (0, 2):
        yield Setting(size, config, batch_size, ranks, 3, None, prefetch)


class Sample(NamedTuple):
    """A step: ms of it and of its operations, bytes sent, and through each adapter of a node."""

    ms: float
    comm_ms: float
    wire_bytes: float
    nic_bytes: float


class Rank:
    """The one rank that exists."""

    def __init__(self, setting: Setting, device: str) -> None:
        self.device = device
        on_gpu = device == "cuda"
        with contextlib.ExitStack() as stack:
            mesh = stack.enter_context(EmulatedMesh(setting.ranks, device=device, tp=setting.tp))
            self.link = Link(None, device)
            stack.callback(self.link.close)
            with torch.device("meta"):
                model = GPT(setting.config)
            model.to(torch.bfloat16 if on_gpu else torch.float32)
            self.model = parallelize(
                model,
                mesh,
                zero_stage=setting.zero_stage,
                bucket_mb=setting.bucket_mb,
                prefetch=setting.prefetch,
                grad_dtype=torch.float32 if on_gpu else None,
                reduce_dtype=torch.bfloat16 if on_gpu else None,
                materialize=fill,
                collectives=emulated(self.link),
                sequence_parallel=setting.sequence_parallel,
            )
            self.engine: Engine = engine_of(self.model)
            self.optimizer: Any = AdamW(
                param_groups(self.model, 0.1), lr=1e-4, max_grad_norm=1.0, master_weights=on_gpu
            )
            generator = torch.Generator().manual_seed(0)
            shape = (setting.batch_size, setting.config.block_size + 1)
            tokens = torch.randint(setting.config.vocab_size, shape, generator=generator)
            self.tokens = tokens.to(device)
            self._stack = stack.pop_all()

    def step(self) -> None:
        self.model(self.tokens[:, :-1], self.tokens[:, 1:]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def sample(self, profile: Profile | None, count: int) -> Sample:
        """Means over count steps."""
        synchronize(self.device)
        self.link.profile = profile
        self.link.clear()
        ms = steady_ms(self.step, count, self.device)
        synchronize(self.device)
        sums = self.link.comm_ms(), self.link.wire_bytes(), self.link.nic_bytes()
        return Sample(ms, *(total / (count + 1) for total in sums))

    def close(self) -> None:
        synchronize(self.device)
        self._stack.close()


def fill(name: str, tensor: Tensor) -> None:
    """Values of about a GPT's; which ones does not matter for time."""
    with torch.no_grad():
        if ".ln_" in f".{name}" and name.endswith("weight"):
            tensor.fill_(1.0)
        elif name.endswith("bias"):
            tensor.zero_()
        else:
            tensor.normal_(0.0, 0.02)


def profiles_of(device: str, ranks: int, tp: int = 1) -> Sequence[Profile]:
    if device == "cpu":
        return (ETHERNET_25, ETHERNET_1)
    nodes = NODES if ranks > 8 else ()
    return (NVLINK, PCIE, *nodes) if tp > 1 else (*PROFILES, *nodes)


def measure(
    rank: Rank, profiles: Sequence[Profile], *, rounds: int, budget_s: float
) -> dict[str, list[Sample]]:
    """Variant -> its samples; all links in turn, as many rounds as fit into the budget."""
    for _ in range(3):
        rank.step()
    variants: dict[str, Profile | None] = {BASELINE: None}
    variants |= {f"emulated {profile.name}": profile for profile in profiles}
    samples: dict[str, list[Sample]] = {name: [] for name in variants}
    start = time.monotonic()
    for turn in range(rounds):
        if turn and (time.monotonic() - start) * (turn + 1) / turn > budget_s:
            break
        for name, profile in variants.items():
            before = samples[name][-1].ms if turn else 500.0
            samples[name].append(rank.sample(profile, max(1, min(4, int(500 / before)))))
    return samples


def rows_of(
    bench: Bench, setting: Setting, rank: Rank, samples: dict[str, list[Sample]]
) -> list[Row]:
    dtype = torch.bfloat16 if bench.device == "cuda" else torch.float32
    rows = []
    base = statistics.median(sample.ms for sample in samples[BASELINE])
    for variant, taken in samples.items():
        row = bench.row(str(setting), "step", variant, dtype)
        row.median_ms, row.p20_ms, row.p80_ms, row.runs = Timing.of([sample.ms for sample in taken])
        row.baseline, row.speedup = BASELINE, base / row.median_ms
        row.notes = {
            "emulated": True,
            "size": setting.size,
            "ranks": setting.ranks,
            "zero_stage": setting.zero_stage,
            "bucket_mb": setting.bucket_mb,
            "prefetch": setting.prefetch,
            "tp": setting.tp,
            "buckets": len(rank.engine.shards.layout.buckets),
            "wire_mb": taken[0].wire_bytes / 1e6,
        }
        if variant != BASELINE:
            comm, exposed = statistics.median(s.comm_ms for s in taken), row.median_ms - base
            row.notes |= {"comm_ms": comm, "exposed_ms": exposed, "exposed": exposed / comm}
        if taken[0].nic_bytes:
            row.notes["nic_mb"] = taken[0].nic_bytes / 1e6
        rows.append(row)
    return rows


def run(bench: Bench) -> None:
    run_settings(bench, settings(bench.device, bench.quick))


def run_settings(bench: Bench, these: Iterable[Setting]) -> None:
    """Rows of each, as far as the time goes."""
    rounds, budget_s = (1, 0.0) if bench.quick else (5, 8.0 if bench.device == "cuda" else 40.0)
    chosen = [s for s in these if bench.only in str(s)]
    deadline = time.monotonic() + float(os.environ.get("FASTPAR_EMULATED_S", "inf"))
    for index, setting in enumerate(chosen):
        if time.monotonic() > deadline:
            print(f"emulated: time is up, {len(chosen) - index} cases left out", flush=True)
            break
        rank = None
        try:
            rank = Rank(setting, bench.device)
            taken = measure(
                rank,
                profiles_of(bench.device, setting.ranks, setting.tp),
                rounds=rounds,
                budget_s=budget_s,
            )
            rows = rows_of(bench, setting, rank, taken)
        except Exception as error:
            rows = [bench.row(str(setting), "step", BASELINE, torch.float32, refused=reason(error))]
        finally:
            if rank is not None:
                rank.close()
            rank = None
            if bench.device == "cuda":
                torch.cuda.empty_cache()
        bench.add(*rows)


def draw(about: dict[str, Any], rows: Sequence[Row], path: Path) -> None:
    """Exposed communication by link and stage; below, over the bucket size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if "comm_ms" in row.notes]
    ranks = max(row.notes["ranks"] for row in rows)
    rows = [row for row in rows if row.notes["ranks"] == ranks]
    plain = [r for r in rows if r.notes.get("bucket_mb") is None and r.notes["prefetch"] == 1]
    swept = [r for r in rows if r.notes.get("bucket_mb") is not None]
    sizes = list(dict.fromkeys(r.notes["size"] for r in plain))
    curved = list(dict.fromkeys(r.notes["size"] for r in swept))
    links = list(dict.fromkeys(r.variant for r in rows))
    colour = dict(zip(links, ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#999999", "#56B4E9")))
    width = max(len(sizes), len(curved))
    figure, panels = pyplot.subplots(
        1 + bool(curved), width, figsize=(4.2 * width + 1, 3.2 * (1 + bool(curved))),
        squeeze=False, layout="constrained",
    )  # fmt: skip
    for panel in panels.flat[:]:
        panel.set_axis_off()
    for axes, size in zip(panels[0], sizes):
        axes.set_axis_on()
        for at, link in enumerate(links):
            own = [r for r in plain if r.notes["size"] == size and r.variant == link]
            x = [
                r.notes["zero_stage"] + (at - (len(links) - 1) / 2) * 0.8 / len(links) for r in own
            ]
            axes.bar(x, [r.notes["comm_ms"] for r in own], 0.75 / len(links),
                     color=colour[link], alpha=0.3)  # fmt: skip
            axes.bar(x, [max(r.notes["exposed_ms"], 0) for r in own], 0.75 / len(links),
                     color=colour[link], label=link)  # fmt: skip
        axes.set_title(f"{size}, {ranks} ranks (emulated)", fontsize=10)
        axes.set_xlabel("ZeRO stage; pale: communication, full: exposed", fontsize=8)
        axes.set_xticks(sorted({r.notes["zero_stage"] for r in plain}))
        axes.set_ylabel("ms a step", fontsize=8)
        axes.set_yscale("log" if len(links) > 2 else "linear")
    for axes, size in zip(panels[-1], curved):
        axes.set_axis_on()
        for link in links:
            for stage, style in ((0, "-"), (2, "--")):
                points = [
                    (r.notes["bucket_mb"], r.notes["exposed_ms"])
                    for r in swept
                    if (r.notes["size"], r.variant, r.notes["zero_stage"]) == (size, link, stage)
                ]
                axes.plot(
                    *zip(*sorted(points)), style, marker="o", markersize=3, color=colour[link]
                )
        axes.set_xscale("log")
        axes.set_title(f"{size}, {ranks} ranks (emulated)", fontsize=10)
        axes.set_xlabel("bucket, MB; full lines: stage 0, dashed: stage 2", fontsize=8)
        axes.set_ylabel("exposed ms a step", fontsize=8)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=5, fontsize=8, frameon=False)
    figure.supxlabel(machine_line(about), fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
