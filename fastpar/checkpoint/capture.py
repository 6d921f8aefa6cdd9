"""A checkpoint's tensors copied to host memory: on each rank those that it writes.

[Note: who writes what]
Weights are written as whole tensors: of the ranks that have the same stage of a pipeline, rank k
writes file k (modulo their number) of the stage's model*.safetensors and collects its tensors from
the ranks that share them, one bucket at a time; no rank holds the model. The optimizer's state
stays in pieces: a rank writes the elements that it steps. What several ranks hold alike (stage 0,
HSDP copies, what tp does not split) is divided among them, so that all ranks write about the same
amount.

[Note: the host copy]
Each rank allocates it once (pinned where there is a GPU) and uses it for every save, because fresh
memory costs more than the copy. It comes in blocks, as torch rounds each pinned one up to a power
of two. With offload it is a copy from host memory. On a GPU the copies are enqueued on the step's
stream, between this step and the next, so the host does not wait; the writing thread waits for
their event.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastpar.axes import every
from fastpar.checkpoint.wire_state import COMMON, wire_state
from fastpar.comm.host import pinned_bytes
from fastpar.comm.mesh import gather_objects
from fastpar.engine.engine import Engine, engine_of_parameter
from fastpar.models.hf import Weight, cut_into_files, list_weights, weights_file
from fastpar.optim.state import entry_block, settle
from fastpar.sharding.ranges import HOLE, Run, cut_runs, numel_of, share_of, whole_run

SHARD_MB = 64.0  # a file of weights has at least so much, if there is as much
_MOST_FILES = 16
_ALIGN = 64  # bytes
_BLOCK = 256 << 20  # bytes; one that holds the largest tensor, where that is larger


class Item(NamedTuple):
    """A tensor of this rank's files."""

    file: str
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]  # of the whole tensor
    runs: list[Run]  # what is written of it
    host: Tensor  # its elements, in memory that the next save overwrites
    weight: Weight | None  # how it is stored


class Snapshot(NamedTuple):
    """What a rank writes, once `ready` has happened."""

    items: list[Item]
    ready: torch.cuda.Event | None


class _Piece(NamedTuple):
    """A part of an entry of the optimizer's state."""

    key: str
    shape: tuple[int, ...]  # of the whole entry
    values: Tensor
    runs: list[Run]  # where the values belong

    @property
    def written(self) -> list[Run]:
        """Without what no whole tensor has."""
        return [run for run in self.runs if run.start != HOLE]


def engine_of_model(model: nn.Module) -> Engine | None:
    """The engine of a model, None without one."""
    found = (engine_of_parameter(p) for p in model.parameters())
    return next((engine for engine in found if engine is not None), None)


def of_stages(engine: Engine | None, mine: Any) -> tuple[int, list[Any]]:
    """(this rank's stage of a pipeline, what each stage has given). Ranks: all."""
    if engine is None or engine.shards.stages is None:
        return 0, [mine]
    return engine.mesh.rank_in("pp"), gather_objects(mine, engine.mesh.group("pp"))


def piece_runs(p: Tensor, engine: Engine | None, *, block: int = 1) -> list[Run]:
    """What this rank steps of a parameter, in global indices of blocks of elements."""
    runs = whole_run(-(-p.numel() // block))
    if engine is None:
        return runs
    engine.shards.check_block(p, block)
    if engine.declared is not None and block == 1:
        runs = engine.declared.runs(p)
    _, start, stop = engine.shards.place(p)
    return cut_runs(runs, -(-start // block), -(-stop // block))


class Capture:
    """Copies of one model's and optimizer's state.

    Args:
        optimizer: with whole_shape-like entries, or None for the weights alone.
        shard_mb: of a file of weights, in MiB.
    Attributes:
        files: of the weights, the same on every rank.
        nbytes: of the whole checkpoint's tensors; of the optimizer's once it has stepped.
    """

    def __init__(self, model: nn.Module, optimizer: Any, *, shard_mb: float = SHARD_MB) -> None:
        self.model, self.optimizer = model, optimizer
        self.engine = engine_of_model(model)
        mesh = None if self.engine is None else self.engine.mesh
        self.rank, self.world_size = (0, 1) if mesh is None else (mesh.rank, mesh.world_size)
        self.device = next(model.parameters()).device
        weights = list_weights(model)
        stage, everyones = of_stages(self.engine, {w.key: w.nbytes for w in weights})
        # Of a table that two stages have, the first one's copy is written.
        before = {key for theirs in everyones[:stage] for key in theirs}
        weights = [w for w in weights if w.key not in before]
        self._peers = self.world_size // len(everyones)  # ranks that have the same weights
        self._place = self.rank % self._peers
        sizes = dict(pair for theirs in everyones[::-1] for pair in theirs.items())
        self._share = sum(w.nbytes for w in weights) / max(1, sum(sizes.values()))
        self.nbytes_of_weights = sum(sizes.values())
        parts = cut_into_files(weights, max(shard_mb * 2**20, self.nbytes_of_weights / _MOST_FILES))
        _, counts = of_stages(self.engine, len(parts))
        first, n_files = sum(counts[:stage]), sum(counts)
        self.files = [(weights_file(first + i, n_files), w) for i, (_, w) in enumerate(parts)]
        mine = {w.key: file for file, weights in self.files for w in weights}
        maps = of_stages(self.engine, mine)[1]
        self.weight_map = {key: file for theirs in maps for key, file in theirs.items()}
        self._writer = {
            id(w.tensor): (i % self._peers, file, w)
            for i, (file, weights) in enumerate(self.files)
            for w in weights
        }
        self._blocks: list[Tensor] = []  # of the host copy
        self._used: list[int] = []  # bytes of each block

    @property
    def optimizer_file(self) -> str:
        """The file that this rank writes."""
        return f"optimizer-{self.rank + 1:05d}-of-{self.world_size:05d}.safetensors"

    @property
    def nbytes(self) -> int:
        """Bytes of the whole checkpoint's tensors."""
        total = 0
        for p, state in self._states():
            shapes = self.optimizer.entry_shapes(p)
            for name, value in state.items():
                if isinstance(value, Tensor) and name in shapes:
                    total += math.prod(shapes[name]) * value.dtype.itemsize
        # Of other stages: what weights as large as theirs have here.
        return self.nbytes_of_weights + math.ceil(total / (self._share or 1.0))

    def allocate(self) -> None:
        """Memory for the next take(), touched; any thread, while no other one takes."""
        sizes = [numel_of(p.written) * p.values.dtype.itemsize for p in self._pieces()]
        weights = [w for writer, _, w in self._writer.values() if writer == self._place]
        sizes += [math.prod(w.whole) * w.tensor.dtype.itemsize for w in weights]
        most = max(_BLOCK, pinned_bytes(max(sizes, default=0)))
        left = sum(map(_padded, sizes)) - sum(block.numel() for block in self._blocks)
        while left > 0:
            left -= self._add_block(min(left, most))

    def _add_block(self, nbytes: int) -> int:
        pinned = self.device.type == "cuda"
        n = pinned_bytes(nbytes) if pinned else nbytes
        self._blocks.append(torch.zeros(n, dtype=torch.uint8, pin_memory=pinned, device="cpu"))
        self._used.append(0)
        return n

    @torch.no_grad()
    def noted(self) -> dict[str, Any]:
        """What axes note of how they ran, by their names."""
        if self.engine is None:
            return {}
        noted = {axis.name: axis.record(self.engine.shards) for axis in every()}
        return {name: found for name, found in noted.items() if found}

    def take(self) -> Snapshot:
        """Copy this rank's part of the state as it is now. Ranks: all of the model's.

        Wire: at stage 3 and with tp the weights; else nothing.
        """
        if self.optimizer is not None:
            settle(self.optimizer)
        self.allocate()
        self._used = [0] * len(self._blocks)
        items = [*self._weights(), *self._optimizer()]
        ready = None
        if self.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record()
        return Snapshot(items, ready)

    # Weights

    def _weights(self) -> Iterator[Item]:
        for tensor, value in self._each_whole():
            found = self._writer.get(id(tensor))
            if found is None:
                continue
            writer, file, weight = found
            if weight.split and self.engine.shards.joins(tensor, writer):  # type: ignore[union-attr]
                assert weight.declared is not None
                value = weight.declared.whole(value, tensor)
            if writer != self._place:
                continue
            host = self._room(weight.whole, tensor.dtype)
            host.copy_(value, non_blocking=True)
            runs = whole_run(math.prod(weight.shape))
            yield Item(file, weight.key, tensor.dtype, weight.shape, runs, host, weight)

    def _each_whole(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Parameters with their values, whole along dp, and buffers; in one order on all ranks."""
        known: set[int] = set()
        if self.engine is not None:
            yield from self.engine.shards.each_whole()
            known = {id(p) for p in self.engine.shards.params}
        for _, weights in self.files:
            yield from ((w.tensor, w.tensor.detach()) for w in weights if id(w.tensor) not in known)

    # The optimizer's state

    def _states(self) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
        if self.optimizer is None:
            return
        stages = None if self.engine is None else self.engine.shards.stages
        for p in self.model.parameters():
            if stages is None or not stages.is_second_copy(p):
                yield p, self.optimizer.state.get(p, {})

    def _pieces(self) -> Iterator[_Piece]:
        """The parts of the optimizer's state that this rank writes."""
        index = 0
        names = {p: name for name, p in self.model.named_parameters()}
        for p, state in self._states():
            engine = engine_of_parameter(p)
            shapes = self.optimizer.entry_shapes(p)
            for entry, value in state.items():
                if not isinstance(value, Tensor):
                    value = torch.tensor(float(value), dtype=torch.float64, device="cpu")
                shape, block = shapes.get(entry, value.shape), entry_block(entry)
                if engine is not None and engine.shares and block:
                    runs, which = piece_runs(p, engine, block=block), engine.shards.copy_of(p)
                else:
                    runs, which = whole_run(value.numel()), (self._place, self._peers)
                start, stop = share_of(value.numel(), *which, index)
                index += 1
                values = value.detach().reshape(-1)[start:stop]
                piece = _Piece(
                    f"{names[p]}/{entry}", tuple(shape), values, cut_runs(runs, start, stop)
                )
                if numel_of(piece.written) or (self._place == 0 and not math.prod(shape)):
                    yield piece
        if self.engine is not None and self.optimizer is not None:
            for p in self.engine.shards.places:
                yield from self._on_wires(self.engine, p, names[p])

    def _on_wires(self, engine: Engine, p: nn.Parameter, name: str) -> Iterator[_Piece]:
        """What compressed gradients go on from; errors are a rank's own."""
        stages = engine.shards.stages
        for entry, value in wire_state(engine, p):
            again = self._place or (stages is not None and stages.is_second_copy(p))
            if entry not in COMMON or not again:
                runs = whole_run(value.numel())
                yield _Piece(f"{name}/{entry}", tuple(value.shape), value.reshape(-1), runs)

    def _optimizer(self) -> Iterator[Item]:
        for piece in self._pieces():
            key, shape, values, runs = piece
            written = piece.written
            host = self._room((numel_of(written),), values.dtype)
            at = to = 0
            for run in runs:
                if run.start != HOLE:
                    part = values[at : at + run.numel]
                    host[to : to + run.numel].copy_(part, non_blocking=True)
                    to += run.numel
                at += run.numel
            yield Item(self.optimizer_file, key, values.dtype, shape, written, host, None)

    def _room(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        for i, (block, start) in enumerate(zip(self._blocks, self._used)):
            if start + nbytes <= block.numel():
                self._used[i] += _padded(nbytes)
                return block[start : start + nbytes].view(dtype).view(shape)
        self._add_block(nbytes)  # what the blocks have left at their ends was missing
        return self._room(shape, dtype)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
