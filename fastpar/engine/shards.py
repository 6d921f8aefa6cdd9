"""A model's parameters as this rank has them: pieces, gathers, whole tensors of pieces, checks.

state_dict() and load_state_dict() of a model whose ranks have parts of it see whole tensors, those
of its submodules too. The module that is asked gathers for all that it asks in turn.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fastpar.axes import Travel
from fastpar.axes.pipeline.stages import Stages
from fastpar.axes.tensor.declared import Declared
from fastpar.comm.mesh import Mesh
from fastpar.comm.recorder import CollectiveLog
from fastpar.engine.absent import NotCopied
from fastpar.engine.bucket import ON_DEVICE, BucketState, Settings
from fastpar.sharding.layout import Layout
from fastpar.sharding.placements import Placement


class Piece(NamedTuple):
    """What a rank owns of a parameter: elements from `start` on, [S]; at stage 0 all of it."""

    param: Tensor
    grad: Tensor | None
    start: int


class Shards:
    """The buckets of one model on one rank, and the collectives that make parameters whole.

    Args:
        layout: the places of the parameters in the buckets.
        travels: over which ranks the buckets of each key go.
        frozen: parameters that are not trained, by name.
        declared: the parameters' states along tp and axes that share out some, None without.
        stages: of a pipeline, None with pp=1.
        model: weakly referred to.
    Attributes:
        params: in launch order.
        log: of the collectives of this engine.
        storage: of buckets that are not stepped on the device, or the device's.
    """

    def __init__(
        self,
        mesh: Mesh,
        settings: Settings,
        layout: Layout,
        buckets: list[BucketState],
        *,
        travels: dict[str, Travel],
        frozen: dict[nn.Parameter, str],
        declared: Declared | None,
        stages: Stages | None,
        model: nn.Module,
    ) -> None:
        self.mesh, self.settings, self.stage = mesh, settings, settings.stage
        self.layout, self.buckets, self.travels = layout, buckets, travels
        self._widest = max(travel.spread for travel in travels.values())
        self.declared, self.frozen, self.stages = declared, frozen, stages
        self.model: Callable[[], nn.Module | None] = weakref.ref(model)
        self.log = CollectiveLog(mesh.device, mesh.rank)
        self.storage: Any = ON_DEVICE
        for bucket in buckets:
            bucket.log = self.log
        self.params = [p for bucket in buckets for p in bucket.params]
        self.index = {p: i for i, p in enumerate(self.params)}
        self.places = {
            p: (bucket, position) for bucket in buckets for position, p in enumerate(bucket.params)
        }
        self._homes = [
            (weakref.ref(module), attribute, p)
            for module in model.modules()
            for attribute, p in module._parameters.items()
            if p is not None and p.requires_grad
        ]
        self._modules = [weakref.ref(module) for module in model.modules()]
        self._checked: list[int] | None = None  # the parts that check() has found right

    # Gathers

    def gather(self, buckets: Iterable[BucketState]) -> None:
        """Make the parameters of some buckets whole, as they are stepped. Ranks: all."""
        buckets = list(buckets)
        for bucket in buckets:
            if bucket.rounds and not bucket.exact:
                bucket.finish_gather()
                bucket.make_stale()
            if not bucket.live and bucket.gathering is None:
                bucket.launch_gather(exact=True)
        for bucket in buckets:
            bucket.finish_gather()

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """All parameters are whole inside; what is written there is kept. Ranks: all.

        Every rank must write the same values: each keeps its own slice of them. p.data = values is
        a write too, of the same shape, dtype and device. Inside of another it changes nothing.

        Raises:
            RuntimeError: at the end, for p.data that does not fit; the parameter keeps its values.
        """
        stale = [bucket for bucket in self.buckets if not bucket.exact]
        self.gather(stale)
        try:
            yield
        finally:
            refused = self._take_new_memory()
            for bucket in self.buckets:
                bucket.save_writes()
            for bucket in stale:
                if bucket.apart:
                    bucket.make_stale()
            if refused:
                raise RuntimeError(refused[0])

    def _take_new_memory(self) -> list[str]:
        """What was given to p.data goes where the parameters are; what does not fit is told."""
        moved = [(b, position, new) for b in self.buckets for position, new in b.new_memory()]
        with torch.no_grad():
            told = [bucket.take_memory(position, new) for bucket, position, new in moved]
        return [message for message in told if message is not None]

    def each_whole(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Every trained parameter, with its values whole along dp while it is yielded. Ranks: all.

        At stage 3 one bucket at a time; what is written there is lost. What a rank has whole lies
        where it is stepped.
        """
        for bucket in self.buckets:
            stale = not bucket.exact
            if bucket.spec.n_shards == 1 and self.declared is None:
                bucket.storage.settle(bucket)
                for i, p in enumerate(bucket.params):
                    yield p, bucket.slot_of(bucket.stepped, i)
                continue
            self.gather([bucket])
            yield from ((p, p.detach()) for p in bucket.params)
            if stale and bucket.apart:
                bucket.make_stale()

    def begin_writes(self) -> None:
        """Before write(): where whole parameters stay in memory, they are gathered. Ranks: all."""
        for bucket in self.buckets:
            if bucket.rounds:
                bucket.finish_gather()
                bucket.make_stale()
        self.gather(b for b in self.buckets if not b.apart or b.gathering is not None)

    def begin_write(self, p: nn.Parameter) -> tuple[Tensor, int, int] | None:
        """For who writes p without write(): (flat memory, first and last element of p there); None
        where its values are in several places."""
        bucket, start, stop = self.place(p)
        if bucket.stepped is not bucket.shard or bucket.live == bucket.apart:
            return None
        bucket.kept = False
        bucket.storage.write_weights(bucket)
        if bucket.live:
            return p.detach().view(-1), 0, p.numel()
        return self.piece(p).param.detach().view(-1), start, stop

    @torch.no_grad()
    def write(self, p: nn.Parameter, local: Tensor) -> None:
        """Replace a parameter by this rank's slice along tp, the same along dp."""
        bucket, start, stop = self.place(p)
        bucket.kept = False
        if bucket.apart or bucket.stepped is not bucket.shard:
            rows = local if local.dim() > 1 else local.reshape(-1)
            row = max(1, rows[:1].numel())  # of a transposed one only this rank's rows are copied
            first = start // row
            rows = rows[first : -(-stop // row)].reshape(-1)
            bucket.storage.write_weights(bucket)
            mine = rows[start - first * row : stop - first * row]
            self.piece(p).param.view(-1).copy_(mine)
            if bucket.shard is not bucket.stepped:
                bucket.shard.copy_(bucket.stepped)
        if bucket.live:
            p.copy_(local)

    # Pieces

    @property
    def shares(self) -> bool:
        """Whether a rank has less than whole parameters, or gradients of less."""
        return self.stage.shards or self.declared is not None or self.stages is not None

    @property
    def has_main_grads(self) -> bool:
        """Whether gradients are kept in another dtype than their parameters'."""
        return any(bucket.grad_dtype != bucket.spec.dtype for bucket in self.buckets)

    def counts(self, p: Tensor) -> bool:
        """Whether this rank's piece of p counts in sums over the whole model."""
        if self.stages is not None and self.stages.is_second_copy(p):
            return False
        if self.declared is None:
            return True
        # A copy of what is spread is on as many ranks, each with a copy of the rest.
        again = self.settings.n_shards < self._widest and self.mesh.dp_rank % self._widest
        return self.declared.counts(p) and (self._spread(p) > 1 or not again)

    def _spread(self, p: Tensor) -> int:
        """Neighbours along dp that share p out, beside the stage of ZeRO."""
        return 1 if self.declared is None else self.travels[self.declared.key_of(p)].spread

    def summed_late(self, p: Tensor) -> bool:
        """Whether its gradient changes after its reduction."""
        partial = self.declared is not None and self.declared.is_partial(p)
        return partial or (self.stages is not None and p in self.stages.tied)

    def whole_shape(self, p: Tensor) -> torch.Size:
        """The shape of the parameter, over all ranks that share it out."""
        return p.shape if self.declared is None else self.declared.whole_shape(p)

    def place(self, p: Tensor) -> tuple[BucketState, int, int]:
        """(bucket, start, stop) of the elements of p that this rank steps."""
        bucket, position = self.places[p]  # type: ignore[index]
        return (bucket, *(bucket.pieces[position] if self.stage.shards else (0, p.numel())))

    def copy_of(self, p: Tensor) -> tuple[int, int]:
        """(number of this rank among those that have the same piece of p, how many these are)."""
        mesh, declared = self.mesh, self.declared
        together = self._spread(p) * self.bucket_of(p).spec.n_shards  # type: ignore[arg-type]
        copy, n = (x // together for x in (mesh.dp_rank, mesh.dp_size))
        if declared is None:
            return copy, n
        sizes = {a: g.world_size for a, g in declared.groups.items() if a not in self.travels}
        placement = Placement(declared.states(p), {"replicas": n, **sizes})
        return placement.copy_of({**declared.place, "replicas": copy})

    def bucket_of(self, p: nn.Parameter) -> BucketState:
        """The bucket of a parameter."""
        return self.places[p][0]

    def ranks_of_copy(self) -> range:
        """The ranks that hold one copy of the model with this one."""
        n_shards, tp = max(self.settings.n_shards, self._widest), self.mesh.tp_size
        first = self.mesh.dp_rank // n_shards * n_shards
        return range(first * tp, (first + n_shards) * tp)

    def by_bucket(self, params: Iterable[Tensor]) -> dict[BucketState, set[int]]:
        """Positions in buckets of those parameters that are in one."""
        found: dict[BucketState, set[int]] = {}
        for p in params:
            if p in self.places:
                bucket, position = self.places[p]  # type: ignore[index]
                found.setdefault(bucket, set()).add(position)
        return found

    def piece(self, p: Tensor) -> Piece:
        """What this rank owns of a parameter, and its gradient."""
        bucket, position = self.places[p]  # type: ignore[index]
        bucket.storage.await_weights(bucket)
        if self.stage.shards:
            return Piece(*bucket.piece(position))
        here = bucket.stepped is bucket.shard
        values = p if here else bucket.slot_of(bucket.stepped, position)
        return Piece(values, bucket.grad_of(position), 0)

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
        self.check_block(p, block)
        self.settle()
        local = self._joined(values, p, block) if self.stage.shards else values.clone()
        return local if self.declared is None or block > 1 else self.declared.whole(local, p)

    def settle(self) -> None:
        """What is stepped may be read: no step and no copy of it is under way."""
        for bucket in self.buckets:
            bucket.storage.settle(bucket)

    def is_split(self, p: Tensor) -> bool:
        """Whether ranks have different parts of p, beside the stage of ZeRO."""
        return self.declared is not None and self.declared.is_split(p)

    def part_of(self, p: Tensor) -> str:
        """Which part of p this rank has along the axes that split it, "" where that is all."""
        if self.declared is None:
            return ""
        axes, place = self.declared.placement(p).gather_axes, self.declared.place
        return ", ".join(f"{axis}={place[axis]}" for axis in axes)

    def check_block(self, p: Tensor, block: int) -> None:
        """Raise ValueError for values of several elements of a parameter that tp splits."""
        if block > 1 and self.is_split(p):
            raise ValueError(
                "Engine: expected values of single elements of a parameter that is split, "
                f"got one for {block} of '{self.name_of(p)}'; keep the optimizer's state in fp32 "
                "or bf16"
            )

    def name_of(self, p: Tensor) -> str:
        """The first name of a parameter."""
        return self.layout.slots[self.index[p]].spec.names[0]  # type: ignore[index]

    def _blocks(self, p: Tensor, rank: int, block: int) -> slice:
        """The blocks of a parameter that begin in the piece of a rank."""
        start, stop = self.layout.piece(self.index[p], rank)  # type: ignore[index]
        return slice(-(-start // block), -(-stop // block))

    def _joined(self, values: Tensor, p: Tensor, block: int) -> Tensor:
        """full(), but of this rank's slice along tp."""
        group = self.bucket_of(p).groups.gather  # type: ignore[arg-type]
        assert group is not None
        group = group.exact
        parts = [self._blocks(p, rank, block) for rank in range(group.world_size)]
        longest = max(part.stop - part.start for part in parts)
        mine = torch.zeros(longest, dtype=values.dtype, device=group.device)
        mine[: values.numel()] = values.view(-1)
        with self.log.timer.waiting():
            sent = group.gathered(mine.view(torch.uint8)).view(-1)  # no elements: no rows to cast
        rows = sent.view(values.dtype).view(group.world_size, mine.numel())
        joined = torch.cat([row[: part.stop - part.start] for row, part in zip(rows, parts)])
        return joined.view(p.shape) if block == 1 else joined

    def shard_of(self, whole: Tensor, p: Tensor, *, block: int = 1) -> Tensor:
        """This rank's part of a whole tensor, a copy: the inverse of full()."""
        self.check_block(p, block)
        if self.declared is not None and block == 1:
            whole = self.declared.cut(whole, p)
        if not self.stage.shards:
            return whole.clone()
        rank = self.bucket_of(p).rank  # type: ignore[arg-type]
        return whole.reshape(-1)[self._blocks(p, rank, block)].clone()

    def joins(self, p: Tensor, place: int) -> bool:
        """Whether this rank has a part of what the rank at a place, of all but pp, is to join."""
        together = self._spread(p)
        return self.mesh.dp_rank // together == place // self.mesh.tp_size // together

    # Checks

    def check(self) -> None:
        """Parameters must still be those that the model uses, in the memory of their buckets."""
        for bucket in self.buckets:
            bucket.check()
        for p, name in self.frozen.items():
            if p.requires_grad:
                raise RuntimeError(
                    f"Engine: expected parameter '{name}' to stay frozen, got requires_grad=True; "
                    "set requires_grad before fastpar.parallelize"
                )
        parts = self._parts()
        if parts is None or parts != self._checked:
            known = self._check_parts()
            self._checked = parts if known else None

    def _parts(self) -> list[int] | None:
        """Identities of all modules and parameters below the model's; None if one is gone."""
        found: list[int] = []
        for module in (ref() for ref in self._modules):
            if module is None:
                return None
            found.extend(map(id, module._modules.values()))
            found.extend(map(id, module._parameters.values()))
        return found

    def _check_parts(self) -> bool:
        """check(), of the model's modules; whether it has the parameters of parallelize() alone."""
        for module_ref, attribute, p in self._homes:
            module = module_ref()
            if module is not None and module._parameters.get(attribute) is not p:
                bucket, position = self.places[p]
                raise RuntimeError(
                    f"Engine: expected the model to keep its parameter '{bucket.name(position)}', "
                    "got another object in its place; load with load_state_dict(assign=False), and "
                    "tie or replace parameters before fastpar.parallelize"
                )
        model, known = self.model(), True
        for name, p in model.named_parameters() if model is not None else ():
            stranger = p not in self.places and p not in self.frozen
            if stranger and p.requires_grad:
                raise RuntimeError(
                    f"Engine: expected the model's parameters of fastpar.parallelize, got '{name}' "
                    "beside them; add parameters before fastpar.parallelize"
                )
            known = known and not stranger
        return known


def guard_state_dicts(model: nn.Module, shards: Shards) -> None:
    """From now on they gather, join and cut what the ranks share out. Ranks: all call them."""
    if not (shards.shares or shards.settings.by_unit):
        return
    guard = _StateDicts(weakref.ref(shards))
    for module in model.modules():
        if next(module.parameters(), None) is not None:
            module.register_state_dict_pre_hook(guard.begin)
            module._register_state_dict_hook(guard.copy)
            module.register_load_state_dict_pre_hook(guard.begin_load)
            module.register_load_state_dict_post_hook(guard.end)


class _StateDicts(NotCopied):
    """Holds gathered() open between two hooks."""

    def __init__(self, shards: Callable[[], Shards | None] = lambda: None) -> None:
        self._shards = shards
        self._open: contextlib.ExitStack | None = None
        self._asked: Callable[[], nn.Module | None] = lambda: None  # the outermost module

    def begin(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        shards, asked = self._shards(), self._asked()
        if shards is None or (asked is not None and _is_inside(module, asked)):
            return
        self._close()  # of one that failed
        self._asked, self._open = weakref.ref(module), contextlib.ExitStack()
        self._open.enter_context(shards.gathered())

    def begin_load(
        self, module: nn.Module, state: dict, prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        self.begin(module)
        shards = self._shards()
        if shards is None or shards.declared is None or self._asked() is not module:
            return
        errors: list[str] = args[-1]  # torch raises them together with its own
        for name, p in module.named_parameters(remove_duplicate=False):
            value, whole = state.get(prefix + name), shards.declared.whole_shape(p)
            if not isinstance(value, Tensor):
                continue
            if value.shape == whole:
                state[prefix + name] = shards.declared.cut(value, p)
            else:  # torch would take it if it happened to have the shape of a slice
                state[prefix + name] = p.detach().clone()
                errors.append(
                    f"size mismatch for {prefix}{name}: expected the whole tensor's shape "
                    f"{list(whole)}, got {list(value.shape)}; load a state_dict of the same model"
                )

    def copy(self, module: nn.Module, state: dict, prefix: str, metadata: Any) -> None:
        shards = self._shards()
        if shards is not None and self._asked() is module:
            joined: dict[int, Tensor] = {}  # tied ones once, under all their names
            for name, p in module.named_parameters(remove_duplicate=False):
                value = state.get(prefix + name)
                if value is None or value.data_ptr() != p.data_ptr():
                    continue
                if shards.declared is not None:
                    if id(p) not in joined:
                        joined[id(p)] = shards.declared.whole(p.detach(), p)
                    state[prefix + name] = joined[id(p)]
                elif shards.stage.shards:
                    state[prefix + name] = value.clone()
        self.end(module)

    def end(self, module: nn.Module, *args: Any) -> None:
        if self._asked() is module:
            self._close()

    def _close(self) -> None:
        opened, self._open, self._asked = self._open, None, lambda: None
        if opened is not None:
            opened.close()


def _is_inside(module: nn.Module, outer: nn.Module) -> bool:
    return module is not outer and any(part is module for part in outer.modules())
