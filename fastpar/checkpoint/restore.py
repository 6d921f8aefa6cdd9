"""Loads a checkpoint into a model and an optimizer, at any layout of ranks.

[Note: pieces]
A rank knows which global elements it updates (saver.piece_runs); the manifest lists the files that
hold them. So any mesh can read what any other has written, and a rank holds at most one parameter
in addition to its own state.

[Note: dtypes]
A run in 16 bits with fp32 masters resumes in fp32 from the masters; a run in fp32 resumes in 16
bits with its fp32 values as masters. Moments are converted as by AdamW.load_state_dict.

[Note: damage]
Every byte of the checkpoint is compared with its checksum. Tensors that a rank reads as a whole are
checked while they are read; the others are divided among the ranks and checked afterwards. All
ranks agree on the result before the loaded state is used.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastpar.checkpoint.manifest import CONFIG, STATE, Manifest, TensorEntry, by_key, read_manifest
from fastpar.checkpoint.reader import TensorReader, verify_files, verify_weights
from fastpar.checkpoint.saver import (
    check_optimizer,
    engine_of_model,
    of_stages,
    piece_runs,
    wires_of,
)
from fastpar.comm.mesh import AXES, gather_objects
from fastpar.engine.control import gather_errors
from fastpar.engine.engine import Engine, engine_of_parameter
from fastpar.files.plain_files import printable, read_object, shown
from fastpar.files.runs import check_checkpoint, linked
from fastpar.files.tensor_file import STORED, THREADS
from fastpar.kernels.adamw import master_join, master_split
from fastpar.models.gpt import GPT
from fastpar.models.hf import Weight, list_weights, load_hf
from fastpar.models.nanogpt import load_nanogpt
from fastpar.optim.foreign import saved_state
from fastpar.sharding.placements import Run, whole_run

# Entries that versions with error feedback saved.
_FORGOTTEN = ("wire_error_", "outer_error", "outer_members")


def read_state(path: str | Path) -> dict[str, Any]:
    """Read trainer_state.json of a checkpoint.

    Raises:
        ValueError: it is missing, or no JSON object.
    """
    file = Path(path) / STATE
    try:
        return read_object(file)
    except ValueError as error:
        raise ValueError(
            f"read_state: expected the state of a run, got {file} ({error}); the checkpoint is "
            "damaged, use another one"
        ) from error


def read_run_state(path: str | Path) -> dict[str, Any]:
    """Read trainer_state.json of a checkpoint of fastpar train.

    Raises:
        ValueError: it is missing, or written by another training loop.
    """
    state = read_state(path)
    for name, kind in _OF_A_RUN.items():
        if type(state.get(name)) is not kind:
            raise ValueError(
                f"read_run_state: expected a checkpoint of fastpar train, got {name}="
                f"{shown(state.get(name))} in {Path(path) / STATE}; resume it with the program "
                f"that wrote it, or start a new run with --init-from {path}"
            )
    return state


_OF_A_RUN = {"model": dict, "dtype": str, "data": str, "next_sample": int, "tokens": int}


@torch.no_grad()
def load_checkpoint(
    path: str | Path, *, model: nn.Module, optimizer: Any = None, strict: bool = True
) -> dict[str, Any]:
    """Load weights and moments of a checkpoint into a model and an optimizer, at any layout.

    Args:
        path: folder of a checkpoint, readable on every rank.
        model: its tensors are written in place; dtypes are converted.
        optimizer: fastpar's, torch.optim's or another, of the model; None: weights only.
        strict: the model must equal the saved one; False: load the weights that both have.
    Returns:
        The `state` of Saver.save, with "step" and, for a GPT, "model"; if not strict, also
        "missing" and "unexpected": weights that only the model or only the checkpoint has.
    Raises:
        ValueError: no checkpoint; another model or other optimizer state (names the first
            difference, nothing is changed); damage (is named, part of the state is replaced).
    Ranks: all of the model's.
    """
    check_optimizer("load_checkpoint", model, optimizer)
    engine = engine_of_model(model)
    path = _linked_on_first(engine, Path(path))
    rank, n = (0, 1) if engine is None else (engine.mesh.rank, engine.mesh.world_size)
    names_of = of_stages(engine, {w.key: w.name for w in list_weights(model)})[1]
    with _errors_of_all(engine):
        plan = _Plan(path, model, optimizer, names_of, strict=strict)
    with _errors_of_all(engine):
        try:
            plan.load()
        finally:  # if both fail, raise the error that names the damage
            verify_files(path, plan.manifest, part=rank, n_parts=n, seen=plan.seen())
    return plan.state


def _linked_on_first(engine: Engine | None, path: Path) -> Path:
    """The folder that a link names on rank 0, on every rank: another rank may read it later."""
    target = linked(path)
    if engine is None or engine.mesh.world_size == 1:
        return target
    relative = os.path.relpath(target, path.parent)
    return path.parent / gather_objects(relative, engine.mesh.group(*AXES))[0]


@contextlib.contextmanager
def _errors_of_all(engine: Engine | None) -> Iterator[None]:
    """If a rank raises inside, raise on all: a rank's own error, else another's. Ranks: all."""
    error_here = None
    try:
        yield
    except (ValueError, OSError) as error:
        error_here = str(error)
    errors = gather_errors(engine, error_here)
    if errors:
        raise ValueError(error_here or next(iter(errors.values())))


class _Plan:
    """Plans which tensors are loaded from which files; building it changes nothing.

    Args:
        known: for each pipeline stage, key -> name of its weights.
    """

    def __init__(
        self,
        path: Path,
        model: nn.Module,
        optimizer: Any,
        names_of: list[dict[str, str]],
        *,
        strict: bool,
    ) -> None:
        self.path, self.model = path, model
        self.optimizer: Any = None if optimizer is None else saved_state(optimizer)
        names = {key: name for theirs in names_of for key, name in theirs.items()}
        self.engine = engine_of_model(model)
        check_checkpoint("load_checkpoint", path)
        self.manifest: Manifest = read_manifest(path)
        verify_files(path, self.manifest, tensors=False)
        self.state = read_state(path)
        if strict and isinstance(model, GPT):
            _check_config(path, self.state.get("model", {}), asdict(model.config))
        self._reader, self._one_weight = TensorReader(path, self.manifest), threading.Lock()
        self._stored = {entry.key: entry for entry in self.manifest.weights}
        weights = list_weights(model)
        self.weights = [w for w in weights if w.key in self._stored]
        missing = [w.key for w in weights if w.key not in self._stored]
        unexpected = sorted(self._stored.keys() - names.keys())
        if strict or not self.weights:
            for wrong, what in ((missing, "no"), (unexpected, "also")):
                if wrong:
                    raise ValueError(
                        f"load_checkpoint: expected the weights of this model in {path}, got "
                        f"{what} {printable(wrong[0])}; load it into the same model, without a "
                        "wrapper whose name comes first, or pass strict=False to load a part"
                    )
        if not strict:
            self.state |= {"missing": missing, "unexpected": unexpected}
        for w in self.weights:
            shape = self._stored[w.key].shape
            if tuple(shape) != tuple(w.shape):
                raise ValueError(
                    f"load_checkpoint: expected {w.key} of shape {list(w.shape)}, got "
                    f"shape={list(shape)} in {path}; load it into the same model"
                )
        # A parameter without pieces had no gradient yet, or another optimizer, or none.
        self._pieces: dict[str, dict[str, list[TensorEntry]]] = {}
        self._on_wires: dict[str, dict[str, list[TensorEntry]]] = {}
        forgotten = False
        for key, pieces in by_key(self.manifest.optimizer).items():
            name, _, entry = key.rpartition("/")
            if entry.startswith(_FORGOTTEN):
                forgotten = True
                continue
            of = self._on_wires if entry.startswith("wire_") else self._pieces
            of.setdefault(name, {})[entry] = pieces
        for name in set(names.values()) - {w.name for w in weights}:  # weights of other stages
            self._pieces.pop(name, None)
        if optimizer is not None:
            if forgotten and (self.engine is None or self.engine.mesh.is_main):
                warnings.warn(
                    f"load_checkpoint: the compression errors in {path} are discarded, because "
                    "this version has no error feedback",
                    stacklevel=4,
                )
            self._check_moments()

    def _check_moments(self) -> None:
        held = {p for group in self.optimizer.param_groups for p in group["params"]}
        trained = {n: p for n, p in self.model.named_parameters() if p in held}
        advice = "resume with the run's settings, or load weights only"
        if self.optimizer.state and not self._pieces:
            raise ValueError(
                f"load_checkpoint: expected the optimizer's state of this model in {self.path}, "
                f"got none; {advice}"
            )
        for name in sorted(self._pieces.keys() - trained.keys()):
            raise ValueError(
                f"load_checkpoint: expected the optimizer's state of this model in {self.path}, "
                f"got also {printable(name)}; {advice}"
            )
        for name, entries in self._pieces.items():
            saved = {
                e: torch.empty(parts[0].shape, device="meta", dtype=STORED[parts[0].dtype])
                for e, parts in entries.items()
            }
            self.optimizer.check_saved(trained[name], saved, where=f"{name} in {self.path}")

    def load(self) -> None:
        """Load all weights and states, on the CPU by several threads. Ranks: all."""
        if self.engine is not None:
            self.engine.shards.begin_writes()
        on_cpu = all(weight.tensor.device.type == "cpu" for weight in self.weights)
        with self._reader, ThreadPoolExecutor(THREADS, "load") as pool:
            for _ in (pool.map if on_cpu else map)(self._load, self.weights):
                pass
            for weight in self.weights if self.optimizer is not None else ():
                self._load_wires(weight)

    def seen(self) -> dict[tuple[str, str], bool]:
        """Tensors that any rank has checked, for find_damage. Ranks: all.

        Wire: 8 bytes per tensor of the checkpoint.
        """
        seen, both = self._reader.seen, self.manifest.weights + self.manifest.optimizer
        if self.engine is None:
            return seen
        keys = [(t.file, t.key) for t in both]
        read = torch.tensor([float(key in seen) for key in keys], dtype=torch.float64, device="cpu")
        sums = self.engine.all_reduce_scalars(read.to(self.engine.mesh.device)).tolist()
        return {key: seen.get(key, True) for key, n in zip(keys, sums) if n}

    def _load_wires(self, weight: Weight) -> None:
        """Load the state of compressed gradients."""
        p, pieces = weight.tensor, self._on_wires.get(weight.name, {})
        engine = engine_of_parameter(p)
        groups = {} if engine is None else wires_of(engine, p)  # type: ignore[arg-type]
        for entry in groups.keys() & pieces.keys():
            groups[entry].calls = int(self._reader.gather(pieces[entry], whole_run(1)))

    @torch.no_grad()
    def _load(self, weight: Weight) -> None:
        p = weight.tensor
        engine = engine_of_parameter(p)
        entries = self._pieces.get(weight.name, {})
        steps = self.optimizer is not None and entries
        master_entry = self.optimizer.master_entry(p) if steps else None
        target = (p if engine is None or not steps else engine.shards.piece(p).param).detach()
        master = None
        if not self._load_in_place(weight, engine, master_entry):
            with self._one_weight:
                values = self._values(weight, engine, entries, master_entry)
                if steps and target.dtype != values.dtype == torch.float32:
                    start, stop = (0, p.numel()) if engine is None else engine.shards.place(p)[1:]
                    master = values.reshape(-1)[start:stop].clone()
        if not steps:
            if self.optimizer is not None and self._pieces:
                self.optimizer.state.pop(p, None)
            return
        saved = {name: self._read(p, name, pieces, engine) for name, pieces in entries.items()}
        if master is not None and "master_weight" not in saved:
            saved["master_weight"] = master.view(target.shape)
            saved.pop("master_remainder", None)
        saved = {
            name: x.view(target.shape) if self.optimizer.entry_block(name) == 1 else x
            for name, x in saved.items()
        }
        self.optimizer.load_piece(p, target, saved, where=weight.name)

    def _load_in_place(self, weight: Weight, engine: Engine | None, master: str | None) -> bool:
        """Read a weight directly into the model if layout and dtype allow it; whether it did."""
        p, stored = weight.tensor, self._stored[weight.key]
        if weight.split or master == "master_remainder":
            return False
        place = (p.detach().view(-1), 0, p.numel()) if p.is_contiguous() else None
        if engine is not None:
            with self._one_weight:
                place = engine.shards.begin_write(p)  # type: ignore[arg-type]
        if place is None:
            return False
        if (place[0].device.type, place[0].dtype) != ("cpu", STORED[stored.dtype]):
            return False
        shard, start, stop = place
        if weight.transposed and stop > start:
            width = weight.shape[0]
            first, last = start // width, -(-stop // width)
            whole_rows = stop - start == (last - first) * width
            rows = shard if whole_rows else shard.new_empty((last - first) * width)
            self._reader.read_transposed(stored, rows.view(-1, width), first)
            if not whole_rows:
                shard.copy_(rows[start - first * width : stop - first * width])
        elif stop > start:
            n = max(0, min(stop, math.prod(stored.shape)) - start)
            self._reader.gather([stored], [Run(start, n)] if n else [], shard[:n])
            shard[n:] = 0  # pads the vocabulary
        return True

    def _values(
        self,
        weight: Weight,
        engine: Engine | None,
        entries: dict[str, list[TensorEntry]],
        master: str | None,
    ) -> Tensor:
        """Write a weight to the model; return its values, from the fp32 master if one was saved."""
        p, splits = weight.tensor, master == "master_remainder"
        values = self._saved_values(weight, entries, exact=splits or p.dtype == torch.float32)
        rounded = values
        if splits and values.dtype == torch.float32:  # master_split rounds ties differently
            rounded, _ = master_split(values.contiguous())
        if engine is None:
            p.copy_(rounded)
        elif _keeps(p, engine):
            engine.shards.write(p, rounded)  # type: ignore[arg-type]
        return values

    def _saved_values(
        self, weight: Weight, entries: dict[str, list[TensorEntry]], *, exact: bool
    ) -> Tensor:
        """This rank's tp slice of a weight; exact: from its fp32 master if there is one."""
        p, entry = weight.tensor, self._stored[weight.key]
        if not _keeps(p, engine_of_parameter(p)):  # nothing is read
            fp32 = exact and not {"master_weight", "master_remainder"}.isdisjoint(entries)
            return torch.empty(
                0, dtype=torch.float32 if fp32 else STORED[entry.dtype], device="cpu"
            )
        local = weight.local(self._reader.whole(entry))
        runs = weight.declared.runs(p) if weight.declared else whole_run(weight.whole.numel())
        if not exact or local.dtype == torch.float32:
            return local
        if "master_weight" in entries:
            return self._reader.gather(entries["master_weight"], runs).view(local.shape)
        if "master_remainder" in entries:
            low = self._reader.gather(entries["master_remainder"], runs).view(local.shape)
            return master_join(local.contiguous(), low)
        return local

    def _read(
        self, p: Tensor, name: str, pieces: list[TensorEntry], engine: Engine | None
    ) -> Tensor:
        """This rank's shard of an optimizer entry, read into its present memory if possible."""
        state, out = self.optimizer.state.get(p, {}).get(name), None
        if isinstance(state, Tensor) and state.device.type == "cpu" and state.is_contiguous():
            out = state.detach().view(-1)
        block = self.optimizer.entry_block(name)
        if engine is None or not engine.shares or not block:
            shape = pieces[0].shape
            return self._reader.gather(pieces, whole_run(math.prod(shape)), out).view(shape)
        return self._reader.gather(pieces, piece_runs(p, engine, block=block), out)


def _keeps(p: Tensor, engine: Engine | None) -> bool:
    """Whether this rank holds elements of a parameter between steps."""
    if engine is None or engine.stage.number < 3:
        return True
    _, start, stop = engine.shards.place(p)
    return stop > start


_MAY_CHANGE = ("dropout", "expert_capacity", "balance_loss", "router_z_loss", "balance_rate")


def _check_config(path: Path, saved: dict[str, Any], config: dict[str, Any]) -> None:
    for name, value in saved.items():
        if name not in _MAY_CHANGE and config.get(name) != value:
            raise ValueError(
                f"load_checkpoint: expected the model of {path} with {name}={value}, got "
                f"{name}={config.get(name)}; resume with the run's settings, or start a new run "
                f"with --init-from {path}"
            )


def load_weights(
    source: str | os.PathLike[str],
    *,
    dropout: float | None = None,
    say: Callable[[str], None] | None = None,
) -> GPT:
    """Load a GPT from nanoGPT's ckpt.pt or from a folder; see load_nanogpt and load_hf.

    Args:
        say: called with a line about what the file lacks; None: a warning.
    Raises:
        ValueError: neither of these, or damaged; every byte of a checkpoint's weights is compared
            with its manifest first.
    """
    path = linked(source)
    if path.is_file():
        return load_nanogpt(path, dropout=dropout, say=say)
    check_checkpoint("load_weights", path)
    manifest = verify_weights(path)
    if manifest is not None and CONFIG not in manifest.files:
        raise ValueError(
            f"load_weights: expected a checkpoint of a GPT-2 with {CONFIG}, got path={path} of "
            "another module; load it into that module by fastpar.load_checkpoint"
        )
    return load_hf(path, dropout=dropout)
