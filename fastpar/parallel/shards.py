"""A model's parameters as this rank has them: pieces, gathers, whole tensors of pieces, checks."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fastpar.comm.collectives import Collectives
from fastpar.comm.mesh import Mesh
from fastpar.comm.watchdog import activity
from fastpar.parallel.buffers import BucketState
from fastpar.parallel.debug import InputCheck
from fastpar.parallel.describe import describe, memory, wire_bytes
from fastpar.parallel.replicas import check_replicas
from fastpar.parallel.step_report import StepTimer
from fastpar.parallel.units import Gathers
from fastpar.sharding.layout import Layout
from fastpar.sharding.placements import Shard
from fastpar.tensor.declared import Declared

_HASH = (1 << 61) - 1


class Piece(NamedTuple):
    """What a rank owns of a parameter: elements from `start` on, [S]; at stage 0 all of it."""

    param: Tensor
    grad: Tensor | None
    start: int


@dataclass(frozen=True)
class Settings:
    """What parallelize() was asked for; see there."""

    zero_stage: int
    n_shards: int
    bucket_mb: float
    first_bucket_mb: float
    grad_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    accumulate: str
    grad_accum_steps: int
    prefetch: int
    deterministic: bool


@dataclass
class Groups:
    """The collectives of an engine; None where there is nobody to talk to."""

    reduce: Collectives | None  # stage 0: of all ranks of dp, else of those that share a copy
    gather: Collectives | None
    replicate: Collectives | None  # of the ranks with the same shard
    control: Collectives | None  # of all ranks of the mesh


class Shards:
    """The buckets of one model on one rank, and the collectives that make parameters whole.

    Attributes:
        zero_stage: that is run; 0 if nobody shares a copy, whatever was asked for.
        n_shards: ranks that share one copy; layout: the places of the parameters.
        params: in launch order.
        declared: the parameters' states along tp, None with tp=1.
    """

    def __init__(
        self,
        mesh: Mesh,
        settings: Settings,
        groups: Groups,
        frozen: dict[nn.Parameter, str],
        homes: list[tuple[weakref.ref[nn.Module], str, nn.Parameter]],
        declared: Declared | None,
    ) -> None:
        self.mesh, self.settings, self.groups = mesh, settings, groups
        self.declared = declared
        self.frozen, self._homes = frozen, homes
        self.zero_stage, self.n_shards = settings.zero_stage, settings.n_shards
        self.gathers: Gathers | None = None
        self.model: Callable[[], nn.Module | None] = lambda: None  # a weak reference to it
        self.input_check: InputCheck | None = None
        self.n_reductions = 0  # since parallelize(); names the step in errors
        self.tree_ms = 0.0  # the host's, in the fixed sums of the last step
        self._timer = StepTimer(mesh.device)
        self._hashes = [0, 0]  # reductions, gathers: what was launched since the last step

    def use(self, layout: Layout, buckets: list[BucketState]) -> None:
        """Have these buckets from now on."""
        self.layout, self.buckets = layout, buckets
        self.params = [p for bucket in buckets for p in bucket.params]
        self._place = {
            p: (bucket, position) for bucket in buckets for position, p in enumerate(bucket.params)
        }
        self._index = {p: i for i, p in enumerate(self.params)}

    # Gathers

    def launch_gather(self, bucket: BucketState) -> None:
        """Start filling a bucket with everybody's slices."""
        gather = self.groups.gather
        assert gather is not None
        bucket.allocate()
        self._note(1, bucket.spec.index)
        with self._blame("gathering", bucket):
            bucket.gathering = gather.all_gather(
                bucket.flat, bucket.shard, async_op=True, tag=bucket.spec.index
            )
        assert bucket.gathering is not None
        self._timer.add(bucket.gathering, self._wire_bytes(bucket.flat, gather, False))

    def finish_gather(self, bucket: BucketState) -> None:
        """Wait until a bucket is filled: its parameters are whole."""
        if bucket.gathering is not None:
            with self._blame("gathering", bucket), self._timer.waiting():
                bucket.gathering.wait()
            bucket.gathering = None
            bucket.make_live()

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """All parameters are whole inside; what is written there is kept. Ranks: all.

        Every rank must write the same values: each keeps its own slice of them. p.data = values is
        a write too, of the same shape, dtype and device. Inside of another it changes nothing.

        Raises:
            RuntimeError: at the end, for p.data that does not fit; the parameter keeps its values.
        """
        stale = [bucket for bucket in self.buckets if not bucket.live]
        for bucket in stale:
            if bucket.gathering is None:
                self.launch_gather(bucket)
        for bucket in stale:
            self.finish_gather(bucket)
        try:
            yield
        finally:
            refused = self._take_new_memory()
            for bucket in self.buckets:
                bucket.save_writes()
            for bucket in stale if self.zero_stage == 3 else ():
                bucket.make_stale()
            if refused:
                raise RuntimeError(refused[0])

    def _take_new_memory(self) -> list[str]:
        """What was given to p.data goes where the parameters are; what does not fit is told."""
        moved = [(b, position, new) for b in self.buckets for position, new in b.new_memory()]
        with torch.no_grad():
            told = [bucket.take_memory(position, new) for bucket, position, new in moved]
        return [message for message in told if message is not None]

    def each_whole(self) -> Iterator[nn.Parameter]:
        """Every trained parameter, whole along dp while it is yielded. Ranks: all.

        At stage 3 one bucket at a time; what is written there is lost.
        """
        for bucket in self.buckets:
            stale = not bucket.live
            if stale and bucket.gathering is None:
                self.launch_gather(bucket)
            self.finish_gather(bucket)
            yield from bucket.params
            if stale and self.zero_stage == 3:
                bucket.make_stale()

    def begin_writes(self) -> None:
        """Before write(): where whole parameters stay in memory, they are gathered. Ranks: all."""
        for bucket in self.buckets:
            if self.zero_stage in (1, 2) and not bucket.live and bucket.gathering is None:
                self.launch_gather(bucket)
            self.finish_gather(bucket)

    @torch.no_grad()
    def write(self, p: nn.Parameter, local: Tensor) -> None:
        """Replace a parameter by this rank's slice along tp, the same along dp."""
        bucket, start, stop = self.place(p)
        if self.zero_stage == 3:
            rows = local if local.dim() > 1 else local.reshape(-1)
            row = max(1, rows[:1].numel())  # of a transposed one only this rank's rows are copied
            first = start // row
            rows = rows[first : -(-stop // row)].reshape(-1)
            self.piece(p).param.copy_(rows[start - first * row : stop - first * row])
        if bucket.live:
            p.copy_(local)

    # Pieces

    @property
    def shares(self) -> bool:
        """Whether a rank has less than whole parameters, or gradients of less."""
        return self.zero_stage > 0 or self.declared is not None

    @property
    def has_main_grads(self) -> bool:
        """Whether gradients are kept in another dtype than their parameters'."""
        return any(bucket.grad_dtype != bucket.spec.dtype for bucket in self.buckets)

    def counts(self, p: Tensor) -> bool:
        """Whether this rank's piece of p counts in sums over the whole model."""
        return self.declared is None or self.declared.counts(p)

    def whole_shape(self, p: Tensor) -> torch.Size:
        """Of the parameter, over all ranks that share it out."""
        return p.shape if self.declared is None else self.declared.whole_shape(p)

    def place(self, p: Tensor) -> tuple[BucketState, int, int]:
        """(bucket, start, stop) of the elements of p that this rank steps."""
        bucket, position = self._place[p]  # type: ignore[index]
        return (bucket, *(bucket.pieces[position] if self.zero_stage else (0, p.numel())))

    def sum_over(self, group: Collectives, x: Tensor, action: str) -> None:
        """Replace x by its sum over a group, as a part of the step."""
        with self._blame(f"{action} after", self.buckets[-1]):
            handle = group.all_reduce(x, async_op=True)
            assert handle is not None
            self._timer.add(handle, self._wire_bytes(x, group, True))
            with self._timer.waiting():
                handle.wait()

    def bucket_of(self, p: nn.Parameter) -> BucketState:
        """Where it lives."""
        return self._place[p][0]

    def piece(self, p: Tensor) -> Piece:
        """What this rank owns of a parameter, and its gradient."""
        bucket, position = self._place[p]  # type: ignore[index]
        if self.zero_stage == 0:
            return Piece(p, bucket.grad_of(position), 0)
        return Piece(*bucket.piece(position))

    def full(self, values: Tensor, p: Tensor, *, block: int = 1) -> Tensor:
        """A whole tensor from every rank's part of it. Ranks: all that share the copy.

        Args:
            values: [S] for this rank's piece of p, any dtype; block: elements of p for each value.
        Returns:
            [P / block] in the whole parameter's shape if block is 1.
        Raises:
            ValueError: blocks of a parameter that is split along tp.
        Wire: the tensor's bytes, padded to equal parts.
        """
        local = self.slice_of_pieces(values, p, block=block)
        if self.declared is None:
            return local
        self.check_block(p, block)
        return self.declared.whole(local, p) if block == 1 else local

    def is_split(self, p: Tensor) -> bool:
        """Whether tp ranks have different parts of p."""
        return self.declared is not None and isinstance(self.declared.state(p), Shard)

    def check_block(self, p: Tensor, block: int) -> None:
        """Raise ValueError for values of several elements of a parameter that tp splits."""
        if block > 1 and self.is_split(p):
            raise ValueError(
                "Engine: expected values of single elements of a parameter that is split along tp, "
                f"got one for {block} of '{self.name_of(p)}'; keep the optimizer's state in fp32 "
                "or bf16"
            )

    def name_of(self, p: Tensor) -> str:
        """Its first name."""
        return self.layout.slots[self._index[p]].spec.names[0]  # type: ignore[index]

    def slice_of_pieces(self, values: Tensor, p: Tensor, *, block: int = 1) -> Tensor:
        """full(), but of this rank's slice along tp."""
        numel = -(-p.numel() // block)
        if self.zero_stage == 0:
            return values.clone()
        gather = self.groups.gather
        assert gather is not None
        parts = [
            slice(-(-start // block), -(-stop // block))
            for start, stop in (
                self.layout.piece(self._index[p], rank)  # type: ignore[index]
                for rank in range(self.n_shards)
            )
        ]
        most = max(part.stop - part.start for part in parts)
        mine = values.new_zeros(most)
        mine[: values.numel()] = values.view(-1)
        rows = values.new_empty(self.n_shards, most)
        with self._timer.waiting():
            gather.all_gather(rows.view(-1).view(torch.uint8), mine.view(torch.uint8))
        whole = values.new_empty(numel)
        for row, part in zip(rows, parts):
            whole[part] = row[: part.stop - part.start]
        return whole.view(p.shape) if block == 1 else whole

    def shard_of(self, whole: Tensor, p: Tensor, *, block: int = 1) -> Tensor:
        """This rank's part of a whole tensor, a copy: the inverse of full()."""
        if self.declared is not None and block == 1:
            whole = self.declared.cut(whole, p)
        self.check_block(p, block)
        return self.piece_of_slice(whole, p, block=block)

    def piece_of_slice(self, whole: Tensor, p: Tensor, *, block: int = 1) -> Tensor:
        """shard_of(), but of this rank's slice along tp."""
        if self.zero_stage == 0:
            return whole.clone()
        rank = self.mesh.dp_rank % self.n_shards
        start, stop = self.layout.piece(self._index[p], rank)  # type: ignore[index]
        return whole.reshape(-1)[-(-start // block) : -(-stop // block)].clone()

    def all_reduce_scalars(self, values: Tensor) -> Tensor:
        """Sum a small vector over the ranks, apart from a step (validation). Ranks: all.

        Args:
            values: fp32 or fp64, on mesh.device; loss, token count, flags. Those of every rank of
                the mesh are added up.
        Returns:
            A new tensor, the same bits on every rank.
        """
        if values.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"all_reduce_scalars: expected fp32 or fp64, got dtype={values.dtype}; "
                "pack the values with torch.tensor([...], dtype=torch.float64)"
            )
        group, mine = self.groups.control, values.detach().clone()
        if group is None:
            return mine
        rows = mine.new_empty((group.world_size, *mine.shape))
        with self._blame("summing scalars after", self.buckets[-1]), self._timer.waiting():
            group.all_gather(rows.view(-1), mine.view(-1))
        total = rows[0].clone()
        for row in rows[1:]:
            total.add_(row)
        return total

    # For people

    @property
    def last_unit(self) -> int:
        """Stage 3: the unit that stays from forward to backward, -1 as long as it is unknown."""
        return self.gathers.last_forward() if self.gathers is not None else -1

    @property
    def wire_bytes_per_step(self) -> int:
        """Bytes that this rank sends for one backward and step."""
        return sum(wire_bytes(self).values())

    def memory(self) -> dict[str, int]:
        """Bytes that are alive on this rank, by kind; see fastpar/parallel/describe.py."""
        return memory(self)

    def describe(self) -> str:
        """Units, buckets in launch order, shards, bytes by kind, and the collectives of a step."""
        return describe(self)

    # Checks

    def check(self) -> None:
        """Parameters must still be those that the model uses, in the memory of their buckets."""
        for bucket in self.buckets:
            bucket.check()
        for module_ref, attribute, p in self._homes:
            module = module_ref()
            if module is not None and module._parameters.get(attribute) is not p:
                bucket, position = self._place[p]
                raise RuntimeError(
                    f"Engine: expected the model to keep its parameter '{bucket.name(position)}', "
                    "got another object in its place; load with load_state_dict(assign=False), and "
                    "tie or replace parameters before fastpar.parallelize"
                )
        model = self.model()
        for name, p in model.named_parameters() if model is not None else ():
            if p.requires_grad and p not in self._place and p not in self.frozen:
                raise RuntimeError(
                    f"Engine: expected the model's parameters of fastpar.parallelize, got '{name}' "
                    "beside them; add parameters before fastpar.parallelize"
                )
        for p, name in self.frozen.items():
            if p.requires_grad:
                raise RuntimeError(
                    f"Engine: expected parameter '{name}' to stay frozen, got requires_grad=True; "
                    "set requires_grad before fastpar.parallelize"
                )

    def check_replicas(self, optimizer: object = None, *, step: int | None = None) -> None:
        """Raise unless the ranks hold the same bits in what they should have alike. Ranks: all.

        See fastpar/parallel/replicas.py.

        Args:
            optimizer: of this engine, whose state is compared too.
            step: for the message; None: reductions since parallelize().
        """
        check_replicas(self, optimizer, step=self.n_reductions if step is None else step)

    def _note(self, kind: int, index: int) -> None:
        self._hashes[kind] = (self._hashes[kind] * 1000003 + index + 1) % _HASH

    def _wire_bytes(self, x: Tensor, group: Collectives, both_ways: bool) -> int:
        part = x.numel() * x.element_size() // group.world_size
        return part * (group.world_size - 1) * (2 if both_ways else 1)

    @contextlib.contextmanager
    def _blame(self, action: str, bucket: BucketState) -> Iterator[None]:
        here = activity()
        outer, here.place = here.place, (action, bucket.spec.index)
        try:
            yield
        except RuntimeError as error:
            if str(error).startswith("Engine:"):
                raise
            raise RuntimeError(
                f"Engine: expected every rank to take part, got an error on rank {self.mesh.rank} "
                f"while {action} bucket {bucket.spec.index} of step {self.n_reductions} ({error}); "
                "another rank stopped or skipped a collective: its own message says why"
            ) from error
        finally:
            here.place = outer
