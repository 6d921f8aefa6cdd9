"""Saving and loading GPT-2 124M with AdamW's moments, beside torch.save and torch's DCP.

1.5 GB in fp32, in one process of two threads and in two ranks of one thread, at stages 0 and 3.
Contenders take turns; each turn saves, saves asynchronously while it trains on, and loads what it
saved: from the page cache, where all files are, and after the system was asked to forget them.
fastpar hashes every byte that it saves, and compares it when it loads (XXH3); the others do not.

    save                 until committed and on the disk; "torch.save" is not flushed; "the disk" is
                         as many bytes, written and flushed in large pieces, by all ranks at once
    pause of a save      of an asynchronous one, until training goes on; beside it the whole save
    step during a save   of training, while the asynchronous save is written; and undisturbed
    load, load from disk

What a contender wrote before is removed first. GB/s count the checkpoint's tensors once, whoever
reads them. peak_bytes is a rank's most resident memory beyond that before: of a save without the
host copy, which the first row has.

torch's own train plain PyTorch's model with torch's AdamW (one process, DDP, FSDP2), fastpar its
GPT with its AdamW: the same tensors, but for 47 rows of padding in memory that no file has.
torch.save writes one file: of one process, of DDP's rank 0, and of FSDP2 one for each rank with
what it has (which no other number of ranks can load). "flushed" is followed by fsync, which both
fastpar and DCP (sync_files=True, its default) do by themselves.

[Note: the gate of bench checkpoint] Weights and moments are zeroed before every load; after it
their bits must sum up to what they did before. A row whose sums differ is refused.
"""

import gc
import importlib
import os
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from bench.harness import Bench
from bench.peers.contenders import DDP, SINGLE
from bench.peers.stock import shapes_of
from bench.records import SCRATCH, Row
from bench.systems import steps
from bench.systems.links import Ranks
from bench.systems.steps import forget_peak, start
from fastpar.checkpoint.restore import load_checkpoint
from fastpar.checkpoint.saver import Saver
from fastpar.comm.host import memory_mb
from fastpar.comm.ranks import RankFailed
from fastpar.files.runs import list_checkpoints
from fastpar.settings.model import GPTConfig

OWN, FLUSHED, UNFLUSHED, DCP = "fastpar", "torch.save, flushed", "torch.save", "torch DCP"
DISK, PIECE_BYTES = "the disk", 16 << 20
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


CASES = (Case("one process", 1, 0), Case("2 ranks, stage 3", 2, 3), Case("2 ranks, stage 0", 2, 0))


class Rank(steps.Rank):
    """Public methods are called through Ranks.ask(), by all ranks in the same order."""

    def __init__(self, trial: steps.Trial) -> None:
        super().__init__(trial)
        own = trial.name == OWN
        # Of DCP's thread: in the default group its messages would meet those of the training.
        self.apart = dist.new_group() if trial.ranks > 1 and not own else None
        self.folder, self.rank = Path(trial.folder), int(os.environ.get("RANK", "0"))
        self.sharded = trial.title == "FSDP2"
        self.saver: Any = None
        self.running: Any = None

    def train(self, n: int) -> list[float]:
        """ms of each of n training steps."""
        return self.steps(n)["ms"]

    def _measure(self, call: Callable[[], Any]) -> dict[str, float]:
        """ms from when all ranks begin, and the most resident memory beyond that before."""
        gc.collect()
        forget_peak()
        before = memory_mb()[0]
        self._barrier()
        start = time.perf_counter()
        call()
        ms = (time.perf_counter() - start) * 1e3
        return {"ms": ms, "peak": max(0, round(1e6 * (memory_mb()[1] - before)))}

    def _barrier(self) -> None:
        if self.trial.ranks > 1:
            dist.barrier()

    def prepare(self) -> dict[str, float]:
        """fastpar's host copy, in the background; ms and memory until it is there."""
        self.saver = Saver(self.folder, model=self.made.model, optimizer=self.made.optimizer)
        saver: Any = self.saver
        return self._measure(lambda: (saver.prepare(), saver._preparing.join()))

    def save(self, way: str) -> dict[str, float]:
        """Until it is on the disk; of UNFLUSHED until it is in the page cache."""
        self._fresh()
        if way == OWN:
            return self._measure(lambda: self._settle(self.saver.save(self.count, {})))
        if way == DCP:
            return self._measure(lambda: dcp().save(self._state(), **self._writer()))
        if way == DISK:
            path = self.folder / f"disk-{self.rank}"
            found = self._measure(lambda: self._write(path))
            path.unlink()
            return found
        return self._measure(lambda: self._torch_save(flushed=way == FLUSHED))

    def _write(self, path: Path) -> None:
        """This rank's part of as many bytes as the tensors have."""
        piece = os.urandom(PIECE_BYTES)
        left = bytes_of(self.trial.config) // self.trial.ranks
        with open(path, "wb", buffering=0) as file:
            while left > 0:
                left -= file.write(piece[:left])
            os.fsync(file.fileno())

    def begin(self, way: str) -> dict[str, float]:
        """Start an asynchronous save: ms until training goes on."""
        self._fresh()
        return self._measure(lambda: self._start(way))

    def _start(self, way: str) -> None:
        if way == OWN:
            self.saver.save(self.count, {})
        else:
            how = {"process_group": self.apart, **self._writer()}
            self.running = dcp().async_save(self._state(), **how)

    def beside(self, way: str) -> dict[str, Any]:
        """Steps until begin()'s save is over on this rank, at least one; ms of those within."""
        start, times = time.perf_counter(), []
        while self._busy(way):
            times += self.train(1)
        seconds = time.perf_counter() - start
        if way == OWN:
            self._settle()
        else:
            self.running.result()
        return {"steps": times[:-1] or times, "ms": seconds * 1e3}

    def _busy(self, way: str) -> bool:
        """Whether any rank's save runs: all train the same number of steps."""
        mine = self.saver.busy if way == OWN else not self.running.done()
        if self.trial.ranks == 1:
            return bool(mine)
        busy = torch.tensor([float(mine)])
        dist.all_reduce(busy)
        return bool(busy.item())

    def _settle(self, _: Any = None) -> None:
        result = self.saver.settle()
        if result is None or not result.ok:
            raise RuntimeError(f"the save failed: {result and result.errors}")

    def load(self, way: str, cold: bool) -> dict[str, float]:
        """Into a model and moments that are zeroed before, and are what they were after."""
        before = self.sums()
        self.zero()
        if cold:
            drop_cache(self.folder)
        path, both = self.folder / "latest", (self.made.model, self.made.optimizer)
        ways = {OWN: lambda: load_checkpoint(path, model=both[0], optimizer=both[1])}
        found = self._measure(ways.get(way, self._dcp_load if way == DCP else self._torch_load))
        if self.sums() != before:
            raise RuntimeError(f"{way}: other weights or moments than before the save")
        return found

    # The gate

    def tensors(self) -> list[Tensor]:
        """Weights and moments that this rank has: not copies."""
        engine = getattr(self.made, "engine", None)
        sharded = engine is not None and engine.stage.number == 3
        found = []
        for p in self.made.model.parameters():
            found.append(engine.shards.piece(p).param if engine is not None and sharded else p)
            found += [x for x in self.made.optimizer.state[p].values() if x.dim()]
        return [_local(x.detach()) for x in found]

    def sums(self) -> list[int]:
        """One number for each of them."""
        return [int(x.view(torch.int32).sum(dtype=torch.int64)) for x in self.tensors()]

    def zero(self) -> None:
        for x in self.tensors():
            x.zero_()

    # torch's ways

    def _state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        return dict(zip(("model", "optim"), get_state_dict(self.made.model, self.made.optimizer)))

    def _writer(self) -> dict[str, Any]:
        return {"storage_writer": dcp().FileSystemWriter(self.folder / "dcp")}

    def _dcp_load(self) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._state()
        dcp().load(state, checkpoint_id=self.folder / "dcp")
        found = {f"{name}_state_dict": value for name, value in state.items()}
        set_state_dict(self.made.model, self.made.optimizer, **found)

    def _file(self) -> Path:
        return self.folder / f"torch-{self.rank if self.sharded else 0}.pt"

    def _torch_save(self, *, flushed: bool) -> None:
        if self.rank == 0 or self.sharded:
            both = {"model": self.made.model, "optimizer": self.made.optimizer}
            state = {name: each.state_dict() for name, each in both.items()}
            with open(self._file(), "wb") as file:
                torch.save(tree_map(_local, state), file)
                if flushed:
                    file.flush()
                    os.fsync(file.fileno())
        self._barrier()

    def _torch_load(self) -> None:
        state = torch.load(self._file())
        if self.sharded:
            with torch.no_grad():
                for name, x in self.made.model.state_dict().items():
                    _local(x).copy_(state["model"][name])
            own = self.made.optimizer.state_dict()["state"]
            for key, entries in state["optimizer"]["state"].items():
                for name, value in entries.items():
                    _local(own[key][name]).copy_(value)
            return
        self.made.model.load_state_dict(state["model"])
        self.made.optimizer.load_state_dict(state["optimizer"])

    def _fresh(self) -> None:
        """What this contender wrote before is gone."""
        self._barrier()
        if self.rank == 0:
            for old in (*list_checkpoints(self.folder), self.folder / "dcp"):
                if (self.trial.name == OWN) != (old.name == "dcp"):
                    shutil.rmtree(old, ignore_errors=True)
            for file in self.folder.glob("torch-*.pt") if self.trial.name != OWN else ():
                file.unlink()
        self._barrier()


def bytes_of(config: GPTConfig) -> int:
    """Of fp32 weights and two moments."""
    return 3 * 4 * sum(shape.numel() for shape in shapes_of(config))


def dcp() -> Any:
    """torch's distributed checkpoints; slow to import."""
    return importlib.import_module("torch.distributed.checkpoint")


def _local(x: Any) -> Any:
    return x.to_local() if hasattr(x, "to_local") else x


def drop_cache(folder: Path) -> None:
    """Have the system forget what it has in memory of the files, which are on the disk."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


@dataclass
class Samples:
    """ms and memory of every direction and variant; the slowest rank counts."""

    ms: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    peak: dict[tuple[str, str], int] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

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
            for steps in zip(*worker.ask("train", 3)):
                found.ms[STEP, UNDISTURBED].append(max(steps))
        found.add(PAUSE, way, worker.ask("begin", way))
        during = worker.ask("beside", way)
        if way == OWN:
            for steps in zip(*(a["steps"] for a in during)):
                found.ms[STEP, OWN].append(max(steps))


def measure(case: Case, config: GPTConfig, rounds: int, folder: str) -> Samples:
    found = Samples()

    def trial(name: str, title: str) -> steps.Trial:
        ranks = case.world_size
        return steps.Trial(name, config, folder, ranks, case.threads, 2, title)

    plain = SINGLE if case.world_size == 1 else "FSDP2" if case.stage else DDP
    ours = trial(OWN, f"fastpar ZeRO-{case.stage}")
    with start(ours, Rank) as own, start(trial("torch", plain), Rank) as torchs:
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
            found.add("save", DISK, torchs.ask("save", DISK))
    return found


def rows_of(bench: Bench, case: str, of: Case, found: Samples, nbytes: int) -> list[Row]:
    """A row for each direction and variant; speed-ups are over torch's own of the same bytes."""
    base = {"save": FLUSHED, **dict.fromkeys((LOAD, COLD), "torch.load")}
    base |= {PAUSE: WHOLE, STEP: UNDISTURBED}
    how: dict[str, Any] = {"threads": of.threads, "ranks": of.world_size, "stage": of.stage}
    rows = []
    for (direction, variant), ms in found.ms.items():
        against = base.get(direction, "")
        both = against, found.ms.get((direction, against), ())
        row = bench.timed_row(case, direction, variant, ms, both, **how)
        row.peak_bytes = found.peak.get((direction, variant))
        if direction != STEP:
            bench.rate(row, nbytes, None)
            row.percent_of_ceiling = row.ceiling = None  # no memory's, and no disk's known
        rows.append(row)
    refused = found.refused.items()
    rows += [bench.timed_row(case, "save", way, (), refused=why) for way, why in refused]
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
        with tempfile.TemporaryDirectory(dir=SCRATCH, ignore_cleanup_errors=True) as folder:
            found = measure(case, config, 1 if bench.quick else ROUNDS, folder)
        bench.add(*rows_of(bench, f"{size}, {case.title}", case, found, bytes_of(config)))
