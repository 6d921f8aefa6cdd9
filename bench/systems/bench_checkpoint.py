"""Saving and loading GPT-2 124M with AdamW's moments, beside torch.save and torch's DCP.

1.5 GB in fp32, in one process of two threads and in two ranks of one thread, at stages 0 and 3.
Contenders take turns; each turn saves, saves asynchronously while it trains on, and loads what it
saved: from the page cache, where all files are, and after the system was asked to forget them.
Every byte that fastpar loads is compared with its SHA-256; the others compare nothing.

    save                 until committed and on the disk; "torch.save" is not flushed
    pause of a save      of an asynchronous one, until training goes on; beside it the whole save
    step during a save   of training, while the asynchronous save is written; and undisturbed
    load, load from disk

What a contender wrote before is removed first.

GB/s count the checkpoint's tensors once, whoever reads them. peak_bytes is a rank's most resident
memory beyond that before: of a save without the host copy, which the first row has.

[Note: the gate of bench checkpoint] Weights and moments are zeroed before every load; after it
their bits must sum up to what they did before. A row whose sums differ is refused.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch

from bench.harness import Bench
from bench.peers.checkpoint import DCP, FLUSHED, OWN, UNFLUSHED, Rank, Trial
from bench.records import SCRATCH, Row
from bench.systems.links import Ranks
from bench.systems.worker import start
from bench.targets import faster, note
from fastpar.comm.ranks import RankFailed
from fastpar.doctor.trial import Timing
from fastpar.settings.model import GPTConfig

TIME_LIMIT_S = {"cpu": 1200, "cuda": 10}
CONFIG = GPTConfig(12, 12, 768, 256, 50304, dropout=0.0)
QUICK = GPTConfig(2, 2, 32, 32, 256, dropout=0.0)
ROUNDS = 3
WHOLE, UNDISTURBED, FIRST = "fastpar, whole save", "no save", "first save"
PAUSE, STEP, LOAD, COLD = "pause of a save", "step during a save", "load", "load from disk"


@dataclass(frozen=True)
class Case:
    """Ranks and ZeRO stage."""

    title: str
    world_size: int
    stage: int

    @property
    def threads(self) -> int:
        return 2 // self.world_size


CASES = (
    Case("one process", 1, 0),
    Case("2 ranks, stage 3", 2, 3),
    Case("2 ranks, stage 0", 2, 0),
)


class Samples:
    """ms and memory of every direction and variant; the slowest rank counts."""

    def __init__(self) -> None:
        self.ms: dict[tuple[str, str], list[float]] = defaultdict(list)
        self.peak: dict[tuple[str, str], int] = {}
        self.refused: dict[str, str] = {}

    def add(self, direction: str, variant: str, answers: list[dict[str, Any]]) -> None:
        key = direction, variant
        self.ms[key].append(max(a["ms"] for a in answers))
        if "peak" in answers[0]:
            self.peak[key] = max(self.peak.get(key, 0), *(a["peak"] for a in answers))


def turn(worker: Ranks, way: str, found: Samples) -> None:
    """One turn of a contender: save, save asynchronously, load."""
    found.add("save", way, worker.ask("save", way))
    if way == OWN:
        found.ms[PAUSE, WHOLE].append(found.ms["save", OWN][-1])
    for direction, cold in ((LOAD, False), (COLD, True)):
        if way != UNFLUSHED:  # the file would be the same
            name = "torch.load" if way == FLUSHED else way
            found.add(direction, name, worker.ask("load", way, cold))
    if way in (OWN, DCP):
        if way == OWN:
            for steps in zip(*worker.ask("steps", 3)):
                found.ms[STEP, UNDISTURBED].append(max(steps))
        found.add(PAUSE, way, worker.ask("begin", way))
        during = worker.ask("beside", way)
        if way == OWN:
            for steps in zip(*(a["steps"] for a in during)):
                found.ms[STEP, OWN].append(max(steps))


def measure(case: Case, config: GPTConfig, rounds: int, folder: str) -> Samples:
    found = Samples()

    def trial(own: bool) -> Trial:
        return Trial(own, config, folder, case.stage, case.world_size, case.threads)

    with start(trial(True), make=Rank) as own, start(trial(False), Rank) as torchs:
        found.add("host copy", OWN, own.ask("prepare"))
        for index in range(rounds):
            for way in (OWN, FLUSHED, DCP, UNFLUSHED):
                if way in found.refused:
                    continue
                try:
                    if index == 0 and way == OWN:
                        found.add(PAUSE, f"{OWN}, {FIRST}", own.ask("begin", OWN))
                        own.ask("beside", OWN)
                    turn(own if way == OWN else torchs, way, found)
                except RankFailed as error:
                    found.refused[way] = str(error)
    return found


def rows_of(bench: Bench, case: str, of: Case, found: Samples, nbytes: int) -> list[Row]:
    """A row for each direction and variant; speed-ups are over torch's own of the same bytes."""
    base = {
        "save": FLUSHED,
        LOAD: "torch.load",
        COLD: "torch.load",
        PAUSE: WHOLE,
        STEP: UNDISTURBED,
    }
    targets = {
        "save": [faster(1.0, FLUSHED), faster(1.0, DCP)],
        LOAD: [faster(1.0, "torch.load"), faster(1.0, DCP)],
        PAUSE: [faster(10.0, WHOLE), faster(1.0, DCP)],
    }
    rows = []
    for (direction, variant), ms in found.ms.items():
        row = bench.row(case, direction, variant, torch.float32)
        row.threads, row.notes = of.threads, {"ranks": of.world_size, "stage": of.stage}
        if variant == OWN and not bench.quick:
            row.notes |= note(targets.get(direction, ()))
        row.median_ms, row.p20_ms, row.p80_ms, row.runs = Timing.of(ms)
        row.peak_bytes = found.peak.get((direction, variant))
        if direction != STEP:
            bench.rate(row, nbytes, None)
            row.percent_of_ceiling = row.ceiling = None  # no memory's, and no disk's known
        against = base.get(direction)
        times = found.ms.get((direction, against or ""))
        if times:
            row.baseline, row.speedup = against, Timing.of(times).median_ms / row.median_ms
        rows.append(row)
    for way, why in found.refused.items():
        rows.append(bench.row(case, "save", way, torch.float32, refused=why))
    return rows


def run(bench: Bench) -> None:
    """Case after case, in a folder of the disk that the repository is on."""
    if bench.device != "cpu":
        return
    config = QUICK if bench.quick else CONFIG
    size = "quick" if bench.quick else "GPT-2 124M and AdamW"
    for case in CASES:
        if bench.only not in case.title:
            continue
        SCRATCH.mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(dir=SCRATCH)
        try:
            found = measure(case, config, 1 if bench.quick else ROUNDS, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        nbytes = 3 * 4 * parameters(config)
        bench.add(*rows_of(bench, f"{size}, {case.title}", case, found, nbytes))


def parameters(config: GPTConfig) -> int:
    """Elements of the weights, the tied head counted once."""
    n, c = config.n_layer, config.n_embd
    return n * (12 * c * c + 13 * c) + (config.vocab_size + config.block_size + 2) * c
