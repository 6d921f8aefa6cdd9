"""Writes checkpoints: each rank its part, in the background, committed whole or not at all.

    checkpoints/step_000500/  config.json, model.safetensors (or several), the tokenizer's files
                              optimizer-*.safetensors  pieces of PARAMETER/ENTRY, one file per rank
                              trainer_state.json       step, sample index, RNG, loss scale, ...
                              manifest.json            the contents, and a checksum of every byte

[Note: phases]
    save()    all ranks   agree on a name; copy to host memory (Capture); training continues
    write     each rank   writes its files by several threads into a hidden folder, flushes them,
                          and writes its part of the manifest last
    commit    rank 0      once all parts exist: writes and flushes the manifest, renames the folder
                          once, updates `latest`
    settle()  all ranks   agree on the result

A crash at any moment leaves older checkpoints unchanged and at most a hidden folder, which a later
save removes. The name of that folder has a random number, so parts of two attempts never mix.
Reading starts with the manifest, and files that it does not list are not read
(test_faults_saver.py stops a save before each of its file operations).

[Note: waiting]
The writing threads never communicate: that of rank 0 looks for the other parts on the file system,
which all ranks must share. Ranks agree in save() and settle(), on the caller's thread, in the same
order on all ranks. A rank whose disk fails reports it there; then rank 0's thread stops waiting.

[Note: exit]
A process that ends first finishes its saves, also without settle() and after an exception. Python
runs _finish_all before it ends thread pools, which a save needs; a thread that still freed tensors
while Python ends would abort the process, so settle() joins it. At exit no rank can ask the others:
rank 0 waits for their parts, and they for its commit (a launcher stops all ranks once one has
ended), as long as files of the save change. os._exit and signals that kill end a save, as a crash
does.

[Note: division of work]
Weights are written as whole tensors. Among the ranks with the same pipeline stage, rank k writes
file k (modulo their number) of the stage's model*.safetensors and collects its tensors from the
ranks that shard them, one bucket at a time; no rank holds the whole model. The optimizer's state
stays in pieces: a rank writes the elements that it updates. State that several ranks hold (ZeRO 0,
replicated HSDP groups, tensors that tp does not split) is divided among them, so that all ranks
write about the same amount.

[Note: host copy]
Each rank allocates the host copy once (pinned with a GPU) and reuses it, because allocating takes
longer than copying. It consists of blocks, because torch rounds the size of a pinned block up to a
power of two. With offload it is a copy from host memory. On a GPU the copies are enqueued on the
step's stream, between this step and the next, so the host does not wait; the writing thread waits
for their event.

[Note: wires] The state of compressed gradients (comm/wires.py) is stored with the optimizer's
entries:

    PARAMETER/wire_calls                  []     number of reductions: the step of the random bits
    PARAMETER/wire_copy_calls             []     the same for reductions between HSDP groups
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastpar.axes import every
from fastpar.checkpoint.manifest import (
    ANY_MODULE,
    CONFIG,
    GPT_MODEL,
    MANIFEST,
    STATE,
    FileEntry,
    Manifest,
    TensorEntry,
    check_complete,
    digest_of,
    hasher,
    read_manifest,
)
from fastpar.comm.host import pinned_bytes
from fastpar.comm.mesh import gather_objects, warn_if_apart
from fastpar.comm.watchdog import on_this_gpu
from fastpar.engine.control import gather_errors, gather_numbers
from fastpar.engine.engine import Engine, engine_of_parameter
from fastpar.files.plain_files import JSON_BYTES, shown
from fastpar.files.runs import (
    checkpoint_folder,
    list_checkpoints,
    point_latest,
    put_folder,
    set_aside,
    step_of,
)
from fastpar.files.tensor_file import DTYPE_NAMES, THREADS, Spec, TensorFile
from fastpar.models.gpt import GPT
from fastpar.models.hf import (
    INDEX_FILE,
    Weight,
    config_json,
    cut_into_files,
    index_json,
    list_weights,
    weights_file,
)
from fastpar.optim.base import where
from fastpar.optim.foreign import saved_state
from fastpar.sharding.placements import HOLE, Run, cut_runs, numel_of, share_of, whole_run

SHARD_MB = 64.0  # least size of a file of weights, if there are several
_MOST_FILES = 16
_ALIGN = 64  # bytes
_BLOCK = 256 << 20  # bytes of a block, or the largest tensor's if that is larger


class Item(NamedTuple):
    """A tensor of this rank's files."""

    file: str
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the whole tensor
    runs: list[Run]  # the elements to write
    host: Tensor  # these elements, in memory that the next save overwrites
    weight: Weight | None  # how a weight is stored; None: optimizer state


class Snapshot(NamedTuple):
    """The copied state that a rank writes; valid once the event `ready` has happened."""

    items: list[Item]
    ready: torch.cuda.Event | None


class _Piece(NamedTuple):
    """This rank's elements of an entry of the optimizer's state."""

    key: str
    shape: tuple[int, ...]  # of the whole entry
    values: Tensor
    runs: list[Run]  # where the values belong

    @property
    def written(self) -> list[Run]:
        """The runs without padding, which no whole tensor has."""
        return [run for run in self.runs if run.start != HOLE]


def engine_of_model(model: nn.Module) -> Engine | None:
    """The engine of a model; None if it has none."""
    engines = (engine_of_parameter(p) for p in model.parameters())
    return next((engine for engine in engines if engine is not None), None)


def of_stages(engine: Engine | None, value: Any) -> tuple[int, list[Any]]:
    """(this rank's pipeline stage, the values of all stages). Ranks: all."""
    if engine is None or engine.shards.stages is None:
        return 0, [value]
    return engine.mesh.rank_in("pp"), gather_objects(value, engine.mesh.group("pp"))


def piece_runs(p: Tensor, engine: Engine | None, *, block: int = 1) -> list[Run]:
    """The elements of a parameter that this rank updates, in global indices of blocks."""
    runs = whole_run(-(-p.numel() // block))
    if engine is None:
        return runs
    engine.shards.check_block(p, block)
    if engine.declared is not None and block == 1:
        runs = engine.declared.runs(p)
    _, start, stop = engine.shards.place(p)
    return cut_runs(runs, -(-start // block), -(-stop // block))


_OWN = "save it yourself, as in torch.save(optimizer.state_dict(), path)"


def check_model(model: nn.Module) -> None:
    """Refuse a model with state that a checkpoint would leave out."""
    for name, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            raise ValueError(
                "Saver: expected modules without extra state, got get_extra_state() of "
                f"{name or 'the model'}, a {type(module).__name__}; hold it in buffers, or pass it "
                "to save() as JSON values"
            )
    for weight in list_weights(model):
        if weight.tensor.dtype not in DTYPE_NAMES:
            raise ValueError(
                f"Saver: expected dtypes of safetensors, got {weight.name} of "
                f"dtype={weight.tensor.dtype}; convert it, or register it with persistent=False"
            )


def check_optimizer(caller: str, model: nn.Module, optimizer: Any) -> None:
    """Refuse an optimizer whose state a checkpoint cannot hold."""
    if optimizer is None:
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(
            f"{caller}: expected an optimizer, got optimizer={type(optimizer).__name__}; pass "
            "fastpar's, torch.optim's or another subclass of torch.optim.Optimizer"
        )
    params = set(model.parameters())
    for i, group in enumerate(optimizer.param_groups):
        for position, p in enumerate(group["params"]):
            if p not in params:
                raise ValueError(
                    f"{caller}: expected an optimizer of the model's parameters, got "
                    f"{where(group, i, position)} of shape {list(p.shape)}, which the model lacks; "
                    "pass a module that has all of them, as in nn.ModuleList([model, loss])"
                )


class Capture:
    """Copies the state of one model and optimizer to host memory.

    Args:
        optimizer: fastpar's, torch.optim's or another; None: weights only.
        shard_mb: least size of a file of weights, MiB.
    Attributes:
        files: files of weights, the same on every rank.
        nbytes: bytes of the whole checkpoint's tensors; the optimizer's count after its first step.
    """

    def __init__(self, model: nn.Module, optimizer: Any, *, shard_mb: float = SHARD_MB) -> None:
        self.model = model
        self.optimizer: Any = None if optimizer is None else saved_state(optimizer)
        if self.optimizer is not None:
            self.optimizer.check_saves()
        self.engine = engine_of_model(model)
        mesh = None if self.engine is None else self.engine.mesh
        self.rank, self.world_size = (0, 1) if mesh is None else (mesh.rank, mesh.world_size)
        self.device = next(model.parameters()).device
        weights = list_weights(model)
        stage, everyones = of_stages(self.engine, {w.key: w.nbytes for w in weights})
        # A table that two stages hold is written by the first one.
        before = {key for theirs in everyones[:stage] for key in theirs}
        weights = [w for w in weights if w.key not in before]
        self._peers = self.world_size // len(everyones)  # ranks with the same weights
        self._place = self.rank % self._peers
        sizes = dict(pair for theirs in everyones[::-1] for pair in theirs.items())
        self._share = sum(w.nbytes for w in weights) / max(1, sum(sizes.values()))
        self.nbytes_of_weights = sum(sizes.values())
        parts = cut_into_files(weights, max(shard_mb * 2**20, self.nbytes_of_weights / _MOST_FILES))
        _, counts = of_stages(self.engine, len(parts))
        first, n_files = sum(counts[:stage]), sum(counts)
        self.files = [(weights_file(first + i, n_files), w) for i, (_, w) in enumerate(parts)]
        file_of = {w.key: file for file, weights in self.files for w in weights}
        maps = of_stages(self.engine, file_of)[1]
        self.weight_map = {key: file for theirs in maps for key, file in theirs.items()}
        self._writer = {
            id(w.tensor): (i % self._peers, file, w)
            for i, (file, weights) in enumerate(self.files)
            for w in weights
        }
        self._blocks: list[Tensor] = []  # blocks of the host copy
        self._used: list[int] = []  # bytes of each block

    @property
    def nbytes(self) -> int:
        """Bytes of the whole checkpoint's tensors."""
        total = 0
        for p, state in self._states():
            shapes = self.optimizer.entry_shapes(p)
            for name, value in state.items():
                if isinstance(value, Tensor) and name in shapes:
                    total += math.prod(shapes[name]) * value.dtype.itemsize
        # Estimate other stages from the bytes per weight here.
        return self.nbytes_of_weights + math.ceil(total / (self._share or 1.0))

    def allocate(self) -> None:
        """Allocate and touch memory for the next take(); not while another thread runs take()."""
        sizes = [numel_of(p.written) * p.values.dtype.itemsize for p in self._pieces()]
        weights = [w for writer, _, w in self._writer.values() if writer == self._place]
        sizes += [math.prod(w.whole) * w.tensor.dtype.itemsize for w in weights]
        most = max(_BLOCK, pinned_bytes(max(sizes, default=0)))
        total = sum(map(_padded, sizes))
        while (left := total - sum(block.numel() for block in self._blocks)) > 0:
            self._add_block(min(left, most))

    def _add_block(self, nbytes: int) -> None:
        pinned = self.device.type == "cuda"
        n = pinned_bytes(nbytes) if pinned else nbytes
        self._blocks.append(torch.zeros(n, dtype=torch.uint8, pin_memory=pinned, device="cpu"))
        self._used.append(0)

    @torch.no_grad()
    def noted(self) -> dict[str, Any]:
        """Axis name -> the information that it stores in the manifest."""
        if self.engine is None:
            return {}
        noted = {axis.name: axis.record(self.engine.shards) for axis in every()}
        return {name: notes for name, notes in noted.items() if notes}

    def take(self) -> Snapshot:
        """Copy this rank's part of the current state. Ranks: all of the model's.

        Wire: the weights at ZeRO 3 and with tp; otherwise nothing.
        """
        if self.optimizer is not None:
            self.optimizer.check_saves()
            self.optimizer.settle()
        self.allocate()
        self._used = [0] * len(self._blocks)
        items = [*self._weights(), *self._optimizer()]
        on_gpu = self.device.type == "cuda"
        return Snapshot(items, torch.cuda.current_stream().record_event() if on_gpu else None)

    def unsaved(self) -> str | None:
        """What of the optimizer's state a checkpoint cannot hold; None: nothing."""
        params = set(self.model.parameters())
        for key, state in () if self.optimizer is None else self.optimizer.state.items():
            if key not in params:
                return f"state under {shown(key)}, which is no parameter of the model"
            for entry, value in state.items():
                if not isinstance(entry, str) or "/" in entry:
                    return f"a state of parameters with the name {shown(entry)}"
                if not (value is None or isinstance(value, (Tensor, int, float))):
                    return f"a state of parameters with {entry} of type {type(value).__name__}"
        return None

    # Weights

    def _weights(self) -> Iterator[Item]:
        for tensor, value in self._each_whole():
            place = self._writer.get(id(tensor))
            if place is None:
                continue
            writer, file, weight = place
            if weight.split and self.engine.shards.joins(tensor, writer):  # type: ignore[union-attr]
                assert weight.declared is not None
                value = weight.declared.whole(value, tensor)
            if writer != self._place:
                continue
            host = self._host_memory(weight.whole, tensor.dtype)
            host.copy_(value, non_blocking=True)
            runs = whole_run(math.prod(weight.shape))
            yield Item(file, weight.key, tensor.dtype, weight.shape, runs, host, weight)

    def _each_whole(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(parameter or buffer, its values, gathered along dp), in one order on all ranks."""
        sharded: set[int] = set()
        if self.engine is not None:
            yield from self.engine.shards.each_whole()
            sharded = {id(p) for p in self.engine.shards.params}
        for _, weights in self.files:
            yield from (
                (w.tensor, w.tensor.detach()) for w in weights if id(w.tensor) not in sharded
            )

    # The optimizer's state

    def _states(self) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
        if self.optimizer is None:
            return
        stages = None if self.engine is None else self.engine.shards.stages
        for p in self.model.parameters():
            state = self.optimizer.state.get(p)
            if state and (stages is None or not stages.is_second_copy(p)):
                yield p, state

    def _pieces(self) -> Iterator[_Piece]:
        """The pieces of the optimizer's state that this rank writes."""
        index = 0
        names = {p: name for name, p in self.model.named_parameters()}
        for p, state in self._states():
            engine = engine_of_parameter(p)
            shapes = self.optimizer.entry_shapes(p)
            for entry, value in state.items():
                if value is None:
                    continue
                if not isinstance(value, Tensor):
                    value = torch.tensor(float(value), dtype=torch.float64, device="cpu")
                shape, block = (
                    tuple(shapes.get(entry, value.shape)),
                    self.optimizer.entry_block(entry),
                )
                runs, which = whole_run(value.numel()), (self._place, self._peers)
                if engine is not None and engine.shares and block:
                    runs, which = piece_runs(p, engine, block=block), engine.shards.copy_of(p)
                start, stop = share_of(value.numel(), *which, index)
                index += 1
                values, runs = value.detach().reshape(-1)[start:stop], cut_runs(runs, start, stop)
                piece = _Piece(f"{names[p]}/{entry}", shape, values, runs)
                if numel_of(piece.written) or (self._place == 0 and not math.prod(shape)):
                    yield piece
        if self.engine is not None and self.optimizer is not None:
            for p in self.engine.shards.places:
                yield from self._on_wires(self.engine, p, names[p])

    def _on_wires(self, engine: Engine, p: nn.Parameter, name: str) -> Iterator[_Piece]:
        """The state of compressed gradients, see [Note: wires]."""
        stages = engine.shards.stages
        if self._place or (stages is not None and stages.is_second_copy(p)):
            return
        for entry, group in wires_of(engine, p).items():
            calls = torch.tensor([float(group.calls)], dtype=torch.float32, device="cpu")
            yield _Piece(f"{name}/{entry}", (), calls, whole_run(1))

    def _optimizer(self) -> Iterator[Item]:
        file = f"optimizer-{self.rank + 1:05d}-of-{self.world_size:05d}.safetensors"
        for piece in self._pieces():
            key, shape, values, runs = piece
            host, to = self._host_memory((numel_of(piece.written),), values.dtype), 0
            for run, part in zip(runs, values.split([run.numel for run in runs])):
                if run.start != HOLE:
                    host[to : to + run.numel].copy_(part, non_blocking=True)
                    to += run.numel
            yield Item(file, key, values.dtype, shape, piece.written, host, None)

    def _host_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        for i, (block, start) in enumerate(zip(self._blocks, self._used)):
            if start + nbytes <= block.numel():
                self._used[i] += _padded(nbytes)
                return block[start : start + nbytes].view(dtype).view(shape)
        self._add_block(nbytes)  # the remainders of the blocks are too small
        return self._host_memory(shape, dtype)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def wires_of(engine: Engine, p: nn.Parameter) -> dict[str, Any]:
    """Entry -> group whose calls it counts, of a parameter with compressed gradients."""
    if engine.settings.parallel.wires.gradients == "fp32":
        return {}
    groups = engine.shards.places[p][0].groups
    named = {"wire_calls": groups.reduce, "wire_copy_calls": groups.copies}
    return {name: group for name, group in named.items() if group is not None}


_POLL_S = 0.02
_PATIENCE_S = 120.0  # wait for another rank's files while none of the save's changes
_FLUSH_BYTES = 1 << 26  # flush a file after this many bytes


@dataclass(frozen=True)
class Result:
    """The outcome of a save."""

    step: int
    path: Path | None  # the checkpoint's folder; None: the save failed
    errors: tuple[str, ...]  # such as "rank 3: [Errno 28] No space left on device"
    pause_ms: float  # time that save() took on this rank
    seconds: float  # from save() to the commit on rank 0; to the end of writing on other ranks
    nbytes: int  # of the whole checkpoint's tensors

    @property
    def ok(self) -> bool:
        """Whether the checkpoint was written."""
        return self.path is not None


class Saver:
    """Saves checkpoints of one model and optimizer; create one on every rank.

    Args:
        run: the run folder, on a file system that all ranks share.
        model: a GPT or any module; with several ranks, after fastpar.parallelize().
        optimizer: fastpar's, torch.optim's or another; None: save weights only.
        tokenizer: has save(folder) and eot; None: save none.
        keep_last: keep this many newest checkpoints after a commit; 0: all. Those of later steps,
            of a branch that this run has left, are renamed to step_N-left, with a warning.
        keep_every: also keep all checkpoints whose step is a multiple of this; 0: none.
        asynchronous: save() returns once the state is copied; False: once it is committed.
        overlap: if the previous save is still running, save() waits for it ("wait") or returns
            False ("skip").
        shard_mb: least size of a file of weights, MiB; independent of the mesh.
    Raises:
        ValueError: an unknown overlap; a dtype that transformers does not support; what a
            checkpoint would leave out: extra state of a module, a dtype that safetensors lacks, an
            optimizer of other parameters or of another library.
    """

    def __init__(
        self,
        run: str | Path,
        *,
        model: nn.Module,
        optimizer: Any = None,
        tokenizer: Any = None,
        keep_last: int = 0,
        keep_every: int = 0,
        asynchronous: bool = True,
        overlap: str = "wait",
        shard_mb: float = SHARD_MB,
    ) -> None:
        if overlap not in ("wait", "skip"):
            raise ValueError(
                f"Saver: expected overlap to be 'wait' or 'skip', got overlap={overlap!r}; "
                "choose what to do if the previous save is still running"
            )
        check_model(model)
        check_optimizer("Saver", model, optimizer)
        self.run, self.model, self.tokenizer = Path(run), model, tokenizer
        self.keep_last, self.keep_every = keep_last, keep_every
        self.asynchronous, self.overlap = asynchronous, overlap
        self._capture = Capture(model, optimizer, shard_mb=shard_mb)
        self.rank = self._capture.rank
        others = dist.is_available() and dist.is_initialized() and dist.get_rank() > 0
        if self._capture.engine is None and others:
            warn_if_apart(f"Saver of {run}", model.parameters(), "writes into one folder")
        self._config = _config_of(model, getattr(tokenizer, "eot", None))
        self._attempt: _Attempt | None = None
        self._preparing: threading.Thread | None = None
        self.last: Result | None = None

    @property
    def busy(self) -> bool:
        """Whether this rank's part of the last save is still running (rank 0: not committed)."""
        return self._attempt is not None and not self._attempt.over.is_set()

    @property
    def failed(self) -> bool:
        """Whether this rank's part of the last save failed; settle() reports it to all ranks."""
        return self._attempt is not None and self._attempt.error is not None

    def prepare(self) -> None:
        """Allocate the host copy in the background; best after the optimizer's first step."""
        if self._preparing is None:
            self._preparing = threading.Thread(target=on_this_gpu(self._prepare))
            self._preparing.start()

    def _prepare(self) -> None:
        with contextlib.suppress(Exception):  # save() tries again, and raises
            self._capture.allocate()

    def save(self, step: int, state: dict[str, Any]) -> bool:
        """Begin a checkpoint of the current state; if not asynchronous, complete it.

        Args:
            step: number of optimizer steps done.
            state: JSON values of rank 0, which load_checkpoint returns; names come back as strings.
                It must not have the keys "step" and "model", which are added.
        Returns:
            False if the previous save is still running and overlap is "skip", the same on every
            rank. settle() reports a full disk, and a state or model that cannot be read back.
        Ranks: all of the model's.
        Wire: the weights, at ZeRO 3 and with tp.
        """
        if self._attempt is not None:
            engine = self._capture.engine
            if self.overlap == "skip" and any(gather_numbers(engine, float(self.busy))):
                return False
            self.settle()
        began = time.perf_counter()
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None
        nonce, problem = 0, None
        if self.rank == 0:
            nonce = int.from_bytes(os.urandom(6), "little") + 1
            problem = _unreadable_state(state) or self._refusal()
            if problem is None and (reason := self._capture.unsaved()) is not None:
                problem = f"expected an optimizer whose state can be saved, got {reason}; " + _OWN
        nonce = int(gather_numbers(self._capture.engine, 0.0 if problem else float(nonce))[0])
        final = checkpoint_folder(self.run, step)
        hidden = final.with_name(f".{final.name}.{nonce:x}.tmp")
        attempt = _Attempt(step, self.rank, hidden, began, self._capture.nbytes)
        if not nonce:
            attempt.error = problem
            attempt.end()
        else:
            snapshot = self._capture.take()
            sizes = {"model": asdict(self.model.config)} if isinstance(self.model, GPT) else {}
            text = json.dumps({"step": step, **sizes, **state}, indent=1) + "\n"
            attempt.pause_ms = (time.perf_counter() - began) * 1e3
            noted = self._capture.noted()
            attempt.start(lambda: self._work(attempt, snapshot, text, noted))
        self._attempt = attempt  # last: after an exception there is nothing to settle
        if not self.asynchronous:
            self.settle()
        return True

    def settle(self) -> Result | None:
        """Wait for the last save and agree on its result; None if there is no unsettled save.

        Ranks: all of the model's, in the same order as save().
        """
        attempt = self._attempt
        if attempt is None:
            return None
        attempt.written.wait()
        errors = self._errors(attempt.error)
        (attempt.give_up if errors else attempt.all_written).set()
        attempt.join()
        if not errors:
            errors = self._errors(attempt.error)  # of the commit
        if errors and self.rank == 0:  # only now: other ranks could still write there before
            shutil.rmtree(attempt.folder, ignore_errors=True)
        attempt.warn(2)
        path = None if errors else checkpoint_folder(self.run, attempt.step)
        self._attempt = None
        times = attempt.pause_ms, attempt.seconds
        self.last = Result(attempt.step, path, tuple(errors), *times, attempt.nbytes)
        return self.last

    # What the ranks agree on

    def _errors(self, error: str | None) -> list[str]:
        errors = gather_errors(self._capture.engine, error)
        return [f"rank {rank}: {text}" for rank, text in errors.items()]

    def _refusal(self) -> str | None:
        """Why rank 0 cannot begin a save. Creates the folder, removes leftovers of crashes."""
        folder = self.run / "checkpoints"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            flush(self.run)
            for leftover in folder.glob(".*.tmp"):
                shutil.rmtree(leftover)
            free = shutil.disk_usage(folder).free
        except OSError as error:
            return str(error)
        need = self._capture.nbytes + _MARGIN_BYTES
        if free < need:
            return (
                f"expected {need / 1e6:,.0f} MB free for a checkpoint, got {free / 1e6:,.0f} MB in "
                f"{folder}; free disk space, or lower --keep-last"
            )
        return None

    # On the thread

    def _work(self, attempt: _Attempt, snapshot: Snapshot, state: str, noted: Any) -> None:
        folder = attempt.folder
        if snapshot.ready is not None:
            snapshot.ready.synchronize()
        folder.mkdir(exist_ok=True)
        kind = GPT_MODEL if isinstance(self.model, GPT) else ANY_MODULE
        part = _write_tensors(folder, attempt.step, snapshot.items)
        part = replace(part, model=kind, axes=noted)
        if self.rank == 0:
            part.files.update(self._write_others(folder, state))
        unseen = folder / f"{_part(self.rank)}.tmp"  # renamed: rank 0 must not read half a part
        _write_flushed(unseen, part.sealed())
        os.replace(unseen, folder / _part(self.rank))
        attempt.seconds = time.perf_counter() - attempt.began
        attempt.written.set()
        if self.rank == 0:
            self._commit(attempt, folder, checkpoint_folder(self.run, attempt.step))
            attempt.seconds = time.perf_counter() - attempt.began
            self._prune(attempt)

    def _write_others(self, folder: Path, state: str) -> dict[str, FileEntry]:
        """Write the files without tensors, on rank 0."""
        texts = {} if self._config is None else {CONFIG: self._config}
        weight_map = self._capture.weight_map
        if len(set(weight_map.values())) > 1:
            texts[INDEX_FILE] = index_json(weight_map, self._capture.nbytes_of_weights)
        for name, value in texts.items():
            (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
        if self.tokenizer is not None:
            self.tokenizer.save(folder)
        (folder / STATE).write_text(state, encoding="utf-8")
        entries = {}
        for path in sorted(folder.iterdir()):
            if path.suffix == ".safetensors" or path.name.startswith((".", _PART)):
                continue
            flush(path)
            raw = path.read_bytes()
            entries[path.name] = FileEntry(len(raw), digest_of(raw), len(raw))
        return entries

    def _commit(self, attempt: _Attempt, folder: Path, final: Path) -> None:
        names = [_part(rank) for rank in range(self._capture.world_size)]
        patience = None
        while missing := [name for name in names if not (folder / name).exists()]:
            if attempt.give_up.is_set():
                raise OSError("another rank failed")
            if patience is None and attempt.all_written.is_set():
                patience = _Patience(folder)
            if patience is not None and patience.is_over():
                raise OSError(
                    f"expected {missing[0]} of another rank in {folder}, got none; put --out on a "
                    "file system that all ranks share"
                )
            time.sleep(_POLL_S)
        sealed = _joined(folder, names)
        for name in names:
            (folder / name).unlink()
        _write_flushed(folder / MANIFEST, sealed)
        flush(folder)
        old = put_folder(folder, final)
        flush(final.parent)
        attempt.note(point_latest(self.run, final))
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)

    def _prune(self, attempt: _Attempt) -> None:
        """Remove old checkpoints; rename those of a branch that this run has left."""
        earlier = []
        for checkpoint in list_checkpoints(self.run):
            if step_of(checkpoint) <= attempt.step:
                earlier.append(checkpoint)
                continue
            what = f"{checkpoint} is of a later step than the one saved now, {attempt.step}"
            try:
                attempt.note(
                    f"{what}: of a branch that was left, it is now {set_aside(checkpoint)}"
                )
            except OSError as error:
                attempt.note(f"{what}, and cannot be renamed ({error}); delete it")
        for old in earlier[: -self.keep_last] if self.keep_last else ():
            if self.keep_every and step_of(old) % self.keep_every == 0:
                continue
            hidden = old.with_name(f".{old.name}.old.tmp")  # readers must not see half of it
            with contextlib.suppress(OSError):
                os.replace(old, hidden)
            shutil.rmtree(hidden, ignore_errors=True)


class _Attempt:
    """One save on one rank: its thread and its progress."""

    def __init__(self, step: int, rank: int, folder: Path, began: float, nbytes: int) -> None:
        self.step, self.rank, self.folder = step, rank, folder
        self.began, self.nbytes = began, nbytes
        self.pause_ms = self.seconds = 0.0
        self.error: str | None = None
        self.written, self.over = threading.Event(), threading.Event()  # set after errors, too
        self.give_up = threading.Event()  # another rank failed
        self.all_written = threading.Event()
        self._thread: threading.Thread | None = None
        self._notes: list[str] = []

    def start(self, work: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=on_this_gpu(self._run), args=(work,), name="saver")
        _unsettled.add(self)
        self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            known = isinstance(error, OSError)
            self.error = str(error) if known else f"{type(error).__name__}: {error}"
        self.end()

    def end(self) -> None:
        """Mark the attempt as over, successful or not."""
        self.written.set()
        self.over.set()

    def join(self) -> None:
        """Wait until the thread has ended and freed its memory."""
        self.over.wait()
        if self._thread is not None:
            self._thread.join()
        _unsettled.discard(self)

    def finish(self) -> None:
        """Complete the save at the end of the process, see [Note: exit]."""
        self.all_written.set()
        self.join()
        if self.error is not None:
            self.note(f"the checkpoint of step {self.step} was not saved ({self.error})")
        if self.rank == 0 and self.error is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        patience = _Patience(self.folder)
        while self.rank and self.error is None and self.folder.exists():
            if patience.is_over():
                break
            time.sleep(_POLL_S)
        self.warn(1)

    def note(self, text: str | None) -> None:
        """Keep what the user should know, for warn()."""
        if text is not None:
            self._notes.append(text)

    def warn(self, depth: int) -> None:
        """Say what was noted, once, on the caller's thread."""
        while self._notes:
            warnings.warn(f"Saver: {self._notes.pop(0)}", stacklevel=depth + 1)


class _Patience:
    """Ends once no file of a folder has changed for _PATIENCE_S."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._seen, self._until = folder, 0, 0.0

    def is_over(self) -> bool:
        seen = 1
        with contextlib.suppress(OSError):  # files may be renamed meanwhile
            seen += sum(entry.stat().st_mtime_ns for entry in os.scandir(self._folder))
        if seen != self._seen:
            self._seen, self._until = seen, time.monotonic() + _PATIENCE_S
        return time.monotonic() > self._until


_unsettled: set[_Attempt] = set()


def _finish_all() -> None:
    for attempt in list(_unsettled):
        attempt.finish()


# atexit runs too late: after it no thread pool takes work any more.
threading._register_atexit(_finish_all)  # type: ignore[attr-defined]
os.register_at_fork(after_in_child=_unsettled.clear)  # the threads are the parent's


def _config_of(model: nn.Module, eot: int | None) -> dict[str, Any] | None:
    """The config.json for transformers; None if the model has none."""
    if isinstance(model, GPT):
        return config_json("Saver", model, eot, eot)
    to_json = getattr(getattr(model, "config", None), "to_json_string", None)
    return None if to_json is None else json.loads(to_json())


def _unreadable_state(state: dict[str, Any]) -> str | None:
    """Why read_state() would refuse a state; None if it would not."""
    for name in ("step", "model"):
        if name in state:
            return f"expected a state without key {name!r}, which save() adds; rename it"
    try:
        text = json.dumps(state).encode()
    except (TypeError, ValueError) as error:
        return f"expected a state of JSON values, got {error}; save other values elsewhere"
    if len(text) > JSON_BYTES // 2:  # indents can double it
        size = f"{len(text)} bytes"
        return f"expected a state that can be read back, got {size}; save large values elsewhere"
    return None


# Files

_PART = "part-"
_MARGIN_BYTES = 1 << 22  # for the files without tensors
_NO_FLUSH = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.ENOSYS)


def _part(rank: int) -> str:
    return f"{_PART}{rank:05d}.json"


def _write_tensors(folder: Path, step: int, items: list[Item]) -> Manifest:
    """Write and flush this rank's files with tensors; return their manifest.

    A thread hashes a block and writes it while it is in the CPU's cache. Other threads flush early:
    otherwise the page cache would collect the whole checkpoint before the disk starts.
    """
    files: dict[str, FileEntry] = {}
    entries: dict[int, TensorEntry] = {}
    waiting: dict[str, int] = {}  # bytes not flushed yet
    left: dict[str, int] = {}  # tensors not written yet
    flushes: list[Future[None]] = []
    lock = threading.Lock()

    def write(file: TensorFile, item: Item) -> None:
        (kind, digest), name = hasher(), item.file
        stored = item.host if item.weight is None else item.weight.stored(item.host)
        file.write(item.key, stored, digest.update)
        what = DTYPE_NAMES[item.dtype], item.shape, tuple(item.runs)
        entries[id(item)] = TensorEntry(name, item.key, *what, f"{kind}:{digest.hexdigest()}")
        with lock:
            waiting[name] += stored.nbytes
            left[name] -= 1
            if waiting[name] > _FLUSH_BYTES or not left[name]:
                flushes.append(flushing.submit(flush, folder / name))
                waiting[name] = 0

    with (
        contextlib.ExitStack() as opened,
        ThreadPoolExecutor(THREADS, "flush") as flushing,
        ThreadPoolExecutor(THREADS, "write") as writing,
    ):
        jobs = []
        for name in dict.fromkeys(item.file for item in items):
            by_key = {item.key: item for item in items if item.file == name}
            specs = {
                key: Spec(i.dtype, i.host.shape if i.weight is None else i.shape)
                for key, i in by_key.items()
            }
            file = opened.enter_context(TensorFile(folder / name, specs, {"format": "pt"}))
            files[name] = FileEntry(file.size, digest_of(file.head), len(file.head))
            waiting[name], left[name] = 0, len(by_key)
            jobs += [writing.submit(write, file, by_key[key]) for key in file.order]
        for job in jobs:
            job.result()
        for done in flushes:
            done.result()
    weights = tuple(entries[id(item)] for item in items if item.weight is not None)
    optimizer = tuple(entries[id(item)] for item in items if item.weight is None)
    return Manifest(step, files, weights, optimizer)


def _joined(folder: Path, names: list[str]) -> bytes:
    """Join the manifests of all parts; the content of manifest.json, checked as a reader does."""
    try:
        parts = [read_manifest(folder, name) for name in names]
        whole = Manifest.join(parts)
        check_complete(whole)  # all parts together have every element once
        return whole.sealed()
    except ValueError as error:
        raise RuntimeError(
            f"Saver: expected a checkpoint that can be read back, got {error.__cause__ or error}; "
            "this save is discarded"
        ) from error


def _write_flushed(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def flush(path: Path) -> None:
    """Flush a file's content, or a folder's list of names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # CIFS and FUSE cannot flush folders; a file has to be flushed.
        if error.errno not in _NO_FLUSH or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def save_checkpoint(
    run: str | Path,
    *,
    step: int,
    model: nn.Module,
    optimizer: Any,
    tokenizer: Any = None,
    state: dict[str, Any] | None = None,
    keep_last: int = 0,
) -> Path:
    """Write run/checkpoints/step_NNNNNN, then let the link run/latest point to it.

    Args:
        run: the run folder, on a file system that all ranks share.
        step, model, optimizer, tokenizer, state, keep_last: as in Saver.
    Returns:
        The checkpoint's folder, which replaces an older one of the same step.
    Raises:
        OSError: on every rank, if the disk is full or not writable; older checkpoints are
            unchanged.
    Ranks: all of the model's.
    Wire: the weights, at ZeRO 3 and with tp.
    """
    what: Any = {"model": model, "optimizer": optimizer, "tokenizer": tokenizer}
    saver = Saver(run, **what, keep_last=keep_last, asynchronous=False)
    saver.save(step, state or {})
    result = saver.last
    assert result is not None
    if result.path is None:
        raise OSError("; ".join(result.errors))
    return result.path


def try_folder(run: Path, rank: int) -> None:
    """Try the file operations of a save in the run folder, before the first step.

    Raises:
        RuntimeError: the folder does not support them.
    """
    folder = run / f".try-{rank}.tmp"
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "part").mkdir()
        _write_flushed(folder / "part" / "file", b"tried")
        flush(folder / "part")
        put_folder(folder / "part", folder / "whole")
        flush(folder)
        shutil.rmtree(folder)
    except OSError as error:
        raise RuntimeError(
            f"Saver: expected a folder that can hold checkpoints, got out={run} with {error}; "
            "choose another --out, which all ranks share"
        ) from error
