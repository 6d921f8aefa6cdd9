"""One rank's model and optimizer, saved and loaded by fastpar, by torch.save or by torch's DCP.

torch's own train bench/peers/stock.py's model with torch's AdamW (one process, DDP, FSDP2),
fastpar its
GPT with its AdamW: the same tensors, but for 47 rows of padding in memory that no file has.

torch.save writes one file: of one process, of DDP's rank 0, and of FSDP2 one for each rank with
what it has (which no other number of ranks can load). "flushed" is followed by fsync, which both
fastpar and DCP (sync_files=True, its default) do by themselves.
"""

from __future__ import annotations

import gc
import os
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from bench.peers.engines import DDP, SINGLE, Contender, build
from bench.systems.bench_zero import batch, forget_peak, stock_model
from fastpar.checkpoint.restore import load_checkpoint
from fastpar.checkpoint.saver import Saver
from fastpar.comm.host import memory_mb
from fastpar.files.runs import list_checkpoints
from fastpar.models.gpt import GPT
from fastpar.settings.model import GPTConfig

OWN, FLUSHED, UNFLUSHED, DCP = "fastpar", "torch.save, flushed", "torch.save", "torch DCP"


@dataclass(frozen=True)
class Trial:
    """What a worker trains and saves."""

    own: bool
    config: GPTConfig
    folder: str
    stage: int = 0
    world_size: int = 1
    threads: int = 2
    device: str = "cpu"

    @property
    def contender(self) -> str:
        if self.own:
            return f"fastpar ZeRO-{self.stage}"
        return SINGLE if self.world_size == 1 else DDP if self.stage == 0 else "FSDP2"


class Rank:
    """Public methods are the worker's commands. Ranks: all, in the same order."""

    def __init__(self, trial: Trial):
        self.trial, self.rank = trial, int(os.environ.get("RANK", "0"))
        self.folder = Path(trial.folder)
        warnings.simplefilter("ignore")  # of the peers' deprecated calls
        if trial.world_size > 1:
            dist.init_process_group("gloo")
        # Of DCP's thread: in the default group its messages would meet those of the training.
        self.apart = dist.new_group() if trial.world_size > 1 and not trial.own else None
        self.made: Contender = build(trial.contender, self._model)
        self.count = 0
        self.steps(2)
        self.saver: Saver | None = None
        self.running: Any = None

    def _model(self) -> Any:
        config = self.trial.config
        return GPT(config, seed=0) if self.trial.own else stock_model(config)

    # Training

    def steps(self, n: int) -> list[float]:
        """ms of each of n training steps."""
        times = []
        for _ in range(n):
            rows = batch(self.trial.config, self.count, self.rank, self.trial.world_size)
            self.count += 1
            start = time.perf_counter()
            self.made.step(*rows)
            times.append((time.perf_counter() - start) * 1e3)
        return times

    # Measured

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
        if self.trial.world_size > 1:
            dist.barrier()

    def prepare(self) -> dict[str, float]:
        """fastpar's host copy, in the background; ms and memory until it is there."""
        self.saver = Saver(self.folder, model=self.made.model, optimizer=self.made.optimizer)
        saver = self.saver

        def make() -> None:
            saver.prepare()
            assert saver._preparing is not None
            saver._preparing.join()

        return self._measure(make)

    def _remove_own(self) -> None:
        """The counterpart of _fresh() for the peers."""
        if self.rank == 0:
            for path in list_checkpoints(self.folder):
                shutil.rmtree(path)
        self._barrier()

    def _save(self) -> None:
        assert self.saver is not None
        self.saver.save(self.count, {})
        self._settle()

    def save(self, way: str) -> dict[str, float]:
        """Until it is on the disk; of UNFLUSHED until it is in the page cache."""
        if way == OWN:
            self._remove_own()
            return self._measure(self._save)
        name = self._fresh(way)
        if way == DCP:
            return self._measure(lambda: self._dcp().save(self._state(), **self._writer(name)))
        return self._measure(lambda: self._torch_save(name, flushed=way == FLUSHED))

    def begin(self, way: str) -> dict[str, float]:
        """Start an asynchronous save: ms until training goes on."""
        saver = self.saver
        if way == OWN:
            assert saver is not None
            self._remove_own()
            return self._measure(lambda: saver.save(self.count, {}))
        name = self._fresh(way)

        def call() -> None:
            self.running = self._dcp().async_save(
                self._state(), process_group=self.apart, **self._writer(name)
            )

        return self._measure(call)

    def beside(self, way: str) -> dict[str, Any]:
        """Steps until begin()'s save is over on this rank, at least one; ms of those within."""
        start, times = time.perf_counter(), []
        while self._busy(way):
            times += self.steps(1)
        seconds = time.perf_counter() - start
        if way == OWN:
            self._settle()
        else:
            self.running.result()
        return {"steps": times[:-1] or times, "ms": seconds * 1e3}

    def _busy(self, way: str) -> bool:
        """Whether any rank's save runs: all train the same number of steps."""
        mine = self.saver.busy if way == OWN and self.saver else not self.running.done()
        if self.trial.world_size == 1:
            return bool(mine)
        busy = torch.tensor([float(mine)])
        dist.all_reduce(busy)
        return bool(busy.item())

    def _settle(self) -> None:
        assert self.saver is not None
        result = self.saver.settle()
        if result is None or not result.ok:
            raise RuntimeError(f"the save failed: {result and result.errors}")

    def load(self, way: str, cold: bool) -> dict[str, float]:
        """Into a model and moments that are zeroed before, and are what they were after."""
        before = self.sums()
        self.zero()
        if cold:
            drop_cache(self.folder)
        if way == OWN:
            path = self.folder / "latest"
            made = self.made
            found = self._measure(
                lambda: load_checkpoint(path, model=made.model, optimizer=made.optimizer)
            )
        elif way == DCP:
            found = self._measure(self._dcp_load)
        else:
            found = self._measure(self._torch_load)
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

        model, optimizer = get_state_dict(self.made.model, self.made.optimizer)
        return {"model": model, "optimizer": optimizer}

    def _dcp(self) -> Any:
        import torch.distributed.checkpoint as dcp

        return dcp

    def _writer(self, name: Path) -> dict[str, Any]:
        return {"storage_writer": self._dcp().FileSystemWriter(name)}

    def _dcp_load(self) -> None:
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._state()
        self._dcp().load(state, checkpoint_id=self.folder / "dcp")
        set_state_dict(
            self.made.model,
            self.made.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    @property
    def _sharded(self) -> bool:
        return self.trial.contender == "FSDP2"

    def _file(self) -> Path:
        return self.folder / f"torch-{self.rank if self._sharded else 0}.pt"

    def _torch_save(self, _name: Path, *, flushed: bool) -> None:
        if self.rank == 0 or self._sharded:
            state = {
                "model": self.made.model.state_dict(),
                "optimizer": self.made.optimizer.state_dict(),
            }
            with open(self._file(), "wb") as file:
                torch.save(tree_map(_local, state), file)
                if flushed:
                    file.flush()
                    os.fsync(file.fileno())
        self._barrier()

    def _torch_load(self) -> None:
        state = torch.load(self._file())
        if self._sharded:
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

    def _fresh(self, way: str) -> Path:
        """Where the peer writes; what was there before is gone."""
        self._barrier()
        if self.rank == 0:
            shutil.rmtree(self.folder / "dcp", ignore_errors=True)
            for old in self.folder.glob("torch-*.pt"):
                old.unlink()
        self._barrier()
        return self.folder / "dcp"


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
