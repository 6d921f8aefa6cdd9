"""A model's parameters on this rank: pieces, gathers, whole tensors of pieces, checks.

state_dict() and load_state_dict() of a sharded model, and of its submodules, use whole tensors. The
module on which they are called gathers for all modules inside it.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastpar.axes import Travel
from fastpar.axes.pipeline.stages import Stages
from fastpar.axes.tensor.declared import Declared, not_split
from fastpar.comm.mesh import Mesh
from fastpar.comm.recorder import CollectiveLog
from fastpar.engine.absent import NotCopied
from fastpar.engine.bucket import ON_DEVICE, BucketState, Piece, Settings
from fastpar.sharding.layout import Layout, parameter_names
from fastpar.sharding.placements import Placement


class Shards:
    """The buckets of one model on one rank, and the collectives that make parameters whole.

    Args:
        layout: the slots of the parameters in the buckets.
        travels: the groups of ranks for the buckets of each key.
        frozen: parameters that are not trained, by name.
        declared: the parameters' states along tp and other splitting axes, None without.
        stages: of a pipeline, None with pp=1.
        model: kept as a weak reference.
    Attributes:
        params: in launch order.
        log: of the collectives of this engine.
        storage: of buckets that are stepped elsewhere, or ON_DEVICE.
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
        self._states = declared or not_split(parameter_names(model))
        self.model: Callable[[], nn.Module | None] = weakref.ref(model)
        self.log = CollectiveLog(mesh.device, mesh.rank)
        self.storage: Any = ON_DEVICE
        for bucket in buckets:
            bucket.log = self.log
        self.params = [p for bucket in buckets for p in bucket.params]
        self.ids = {*map(id, self.params)}
        self.index = {p: i for i, p in enumerate(self.params)}
        self.places = {
            p: (bucket, position) for bucket in buckets for position, p in enumerate(bucket.params)
        }
        # Every module, with its parameters of now.
        self._modules = [(weakref.ref(m), {**m._parameters}) for m in model.modules()]
        self._checked: list[int] | None = None  # the modules and parameters that check() accepted
        self._norms: tuple[float, list[Tensor]] | None = None  # of the gradients, in grad_norms()
        self._order: tuple[list[Tensor], list[int]] | None = None  # see columns()
        # Inside of gathered(): the buckets to free at its end.
        self._unused: set[BucketState] | None = None

    def connect(self, collect: Callable[..., None]) -> None:
        """Give each bucket its node, whose gradients collect() gets; see bucket.py."""
        uses: dict[BucketState, list[Any]] = {bucket: [] for bucket in self.buckets}
        for module_ref, params in self._modules:
            for name, p in params.items():
                if p in self.places:
                    bucket, position = self.places[p]
                    uses[bucket].append((module_ref()._parameters, name, position))  # type: ignore[union-attr]
        for bucket, places in uses.items():
            bucket.connect(places, collect)

    # Gathers

    def gather(self, buckets: Iterable[BucketState]) -> None:
        """Make the parameters of some buckets whole, as they are stepped. Ranks: all."""
        # In the order of a forward: if one rank calls this, the others' next forward meets it.
        buckets = sorted(buckets, key=lambda bucket: (bucket.spec.unit, -bucket.spec.index))
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
        """Make all parameters whole inside; writes are kept. Ranks: all.

        Every rank must write the same values, as each keeps its own shard of them. p.data = values
        is a write too, of the same shape, dtype and device. Passes, transforms of torch.func and
        steps inside see and leave whole parameters. Nested calls have no effect.

        Raises:
            RuntimeError: at the end, for p.data that does not fit; the parameter keeps its values.
        """
        outer = self._unused
        self._unused = (outer or set()) | self._show_all()
        try:
            yield
        finally:
            moved = [(b, i, b.params[i].data.clone()) for b in self.buckets for i in b.moved()]
            with torch.no_grad():
                refused = [bucket.take_memory(i, new) for bucket, i, new in moved]
            self.save_writes()
            if outer is None:
                unused, self._unused = self._unused or (), None
                for bucket in unused:
                    bucket.make_stale()
            for message in filter(None, refused):
                raise RuntimeError(message)

    def _show_all(self) -> set[BucketState]:
        """Make all parameters whole; returns the buckets that were not and have memory to free."""
        stale = {bucket for bucket in self.buckets if not bucket.exact}
        self.gather(stale)
        for bucket in self.buckets:
            bucket.show()
        return {bucket for bucket in stale if bucket.separate}

    @property
    def is_gathered(self) -> bool:
        """Whether gathered() is open."""
        return self._unused is not None

    def save_writes(self) -> None:
        """Keep this rank's shards of what was written inside of gathered()."""
        for bucket in self.buckets:
            bucket.save_writes()

    def gather_again(self) -> None:
        """Inside of gathered(), after a step: make all parameters whole. Ranks: all."""
        assert self._unused is not None
        self._unused |= self._show_all()

    def free(self, bucket: BucketState) -> None:
        """Free a bucket that no pass needs now; inside of gathered() at its end."""
        if self._unused is None:
            bucket.make_stale()
        else:
            self._unused.add(bucket)

    def keep(self, buckets: Iterable[BucketState]) -> None:
        """Free no bucket that a pass needs, at the end of gathered()."""
        if self._unused is not None:
            self._unused.difference_update(buckets)

    def each_whole(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield every trained parameter with its values, whole along dp. Ranks: all.

        At stage 3 one bucket at a time; writes into them are lost. Values that a rank holds whole
        are yielded from the memory that is stepped.
        """
        for bucket in self.buckets:
            stale = not bucket.exact
            if bucket.spec.n_shards == 1 and self.declared is None:
                bucket.storage.settle(bucket)
                for i, p in enumerate(bucket.params):
                    yield p, bucket.slot_of(bucket.stepped, i)
                continue
            self.gather([bucket])
            yield from zip(bucket.params, bucket.views)
            if stale and bucket.separate:
                bucket.make_stale()

    def begin_writes(self) -> None:
        """Before write(): gather parameters that stay whole in memory. Ranks: all."""
        for bucket in self.buckets:
            if bucket.rounds:
                bucket.finish_gather()
                bucket.make_stale()
        self.gather(b for b in self.buckets if not b.separate or b.gathering is not None)

    def begin_write(self, p: nn.Parameter) -> tuple[Tensor, int, int] | None:
        """For writes without write(): (flat memory, first and last element of p in it); None if
        its values lie in several places."""
        bucket, start, stop = self.place(p)
        if bucket.stepped is not bucket.shard or bucket.live == bucket.separate:
            return None
        bucket.kept = False
        bucket.storage.write_weights(bucket)
        if bucket.live:
            return bucket.views[self.places[p][1]].view(-1), 0, p.numel()
        return self.piece(p).param.detach().view(-1), start, stop

    @torch.no_grad()
    def write(self, p: nn.Parameter, local: Tensor) -> None:
        """Replace a parameter by this rank's slice along tp, equal along dp."""
        bucket, start, stop = self.place(p)
        bucket.kept = False
        if bucket.separate or bucket.stepped is not bucket.shard:
            rows = local if local.dim() > 1 else local.reshape(-1)
            row = max(1, rows[:1].numel())  # copy only this rank's rows of a transposed one
            first = start // row
            rows = rows[first : -(-stop // row)].reshape(-1)
            bucket.storage.write_weights(bucket)
            mine = rows[start - first * row : stop - first * row]
            self.piece(p).param.view(-1).copy_(mine)
            if bucket.shard is not bucket.stepped:
                bucket.shard.copy_(bucket.stepped)
        if bucket.live:
            bucket.views[self.places[p][1]].copy_(local)

    # Pieces

    @property
    def shares(self) -> bool:
        """Whether this rank holds less than whole parameters and gradients."""
        return self.stage.shards or self.declared is not None or self.stages is not None

    @property
    def has_main_grads(self) -> bool:
        """Whether gradients are kept in another dtype than their parameters."""
        return any(bucket.grad_dtype != bucket.spec.dtype for bucket in self.buckets)

    @property
    def counts_all(self) -> bool:
        """Whether counts() is true of every parameter."""
        return self.stages is None and self.declared is None

    def counts(self, p: Tensor) -> bool:
        """Whether this rank's piece of p counts in sums over the whole model."""
        if self.stages is not None and self.stages.is_second_copy(p):
            return False
        # Ranks that split experts hold the same of all other parameters: the first of them counts.
        again = self.settings.n_shards < self._widest and self.mesh.dp_rank % self._widest
        return self._states.counts(p) and (self._spread(p) > 1 or not again)

    def _spread(self, p: Tensor) -> int:
        """Number of neighbours along dp that split p, besides the ZeRO stage."""
        return self.travels[self._states.key_of(p)].spread

    def summed_late(self, p: Tensor) -> bool:
        """Whether its gradient changes after its reduction."""
        tied = self.stages is not None and p in self.stages.tied
        return tied or self._states.is_partial(p)

    def whole_shape(self, p: Tensor) -> torch.Size:
        """The shape of the whole parameter, over all ranks that split it."""
        return self._states.whole_shape(p)

    def place(self, p: Tensor) -> tuple[BucketState, int, int]:
        """(bucket, start, stop) of the elements of p that this rank steps."""
        bucket, position = self.places[p]  # type: ignore[index]
        return (bucket, *bucket.pieces[position])

    def copy_of(self, p: Tensor) -> tuple[int, int]:
        """(this rank's number among those with the same piece of p, number of such ranks)."""
        mesh, states = self.mesh, self._states
        together = self._spread(p) * self.bucket_of(p).spec.n_shards  # type: ignore[arg-type]
        copy, n = (x // together for x in (mesh.dp_rank, mesh.dp_size))
        sizes = {a: g.world_size for a, g in states.groups.items() if a not in self.travels}
        placement = Placement(states.states(p), {"replicas": n, **sizes})
        return placement.copy_of({**states.place, "replicas": copy})

    def bucket_of(self, p: nn.Parameter) -> BucketState:
        """The bucket of a parameter."""
        return self.places[p][0]

    def ranks_of_copy(self) -> range:
        """The ranks that hold one replica of the model together with this one."""
        n_shards, tp = max(self.settings.n_shards, self._widest), self.mesh.tp_size
        first = self.mesh.dp_rank // n_shards * n_shards
        return range(first * tp, (first + n_shards) * tp)

    def by_bucket(self, params: Iterable[Tensor]) -> dict[BucketState, set[int]]:
        """Positions in buckets of the parameters that are in one."""
        places: defaultdict[BucketState, set[int]] = defaultdict(set)
        for bucket, position in filter(None, map(self.places.get, params)):  # type: ignore[arg-type]
            places[bucket].add(position)
        return places

    def piece(self, p: Tensor) -> Piece:
        """This rank's piece of a parameter, and of its gradient."""
        bucket, position = self.places[p]  # type: ignore[index]
        bucket.storage.await_weights(bucket)
        return bucket.piece(position)

    def are_stepped_in_place(self) -> bool:
        """Whether every piece is the parameter, with p.grad."""
        for bucket in self.buckets:
            bucket.storage.await_weights(bucket)
            if self.stage.shards or bucket.stepped is not bucket.shard or bucket.casts:
                return False
        return True

    def pieces(self) -> dict[Tensor, Piece]:
        """piece() of all."""
        pieces: dict[Tensor, Piece] = {}
        for bucket in self.buckets:
            bucket.storage.await_weights(bucket)
            pieces.update(zip(bucket.params, bucket.all_pieces()))
        return pieces

    def columns(self, params: list[Tensor]) -> tuple[Sequence[Any], ...]:
        """The fields of piece() of these parameters, a sequence each."""
        pieces: list[Piece] = []
        for bucket in self.buckets:
            bucket.storage.await_weights(bucket)
            pieces += bucket.all_pieces()
        if self._order is None or self._order[0] is not params:
            self._order = params, [self.index[p] for p in params]  # type: ignore[index]
        return tuple(zip(*map(pieces.__getitem__, self._order[1])))

    def _reduced(self, params: Iterable[Tensor]) -> list[Tensor]:
        """This rank's pieces of reduced gradients."""
        grads = (self.piece(p).grad for p in params)
        return [grad for grad in grads if grad is not None]

    def grad_norms(self, params: Iterable[Tensor], ord: float) -> list[Tensor]:
        """The norm of each whole gradient, fp32 []. Ranks: all; one collective for all parameters,
        until gradients change."""
        if self._norms is None or self._norms[0] != float(ord):
            zero = torch.zeros((), dtype=torch.float32, device=self.mesh.device)
            pieces = self._reduced(self.params)
            norms = [torch.linalg.vector_norm(x, ord, dtype=zero.dtype) for x in pieces if len(x)]
            left = iter(norms)
            each = torch.stack([next(left) if len(x) else zero for x in pieces])
            rows = self._from_ranks(each, "norms of gradients after")
            self._norms = float(ord), [*torch.linalg.vector_norm(rows, ord, dim=0)]
        return [self._norms[1][self.index[p]] for p in params]  # type: ignore[index]

    def change_grads(
        self, func: Callable[..., Any], params: Sequence[Tensor], given: Any, *args: Any, **kw: Any
    ) -> None:
        """func(given, ...) in place, of this rank's shards of these gradients; given: a placeholder
        or a list of them. Ranks: all if func checks for overflows, the first of args."""
        grads = self._reduced(params)
        if isinstance(given, Tensor):
            func(grads[0], *args, **kw)
        elif full := [grad for grad in grads if len(grad)]:
            func(full, *args, **kw)
        if func is torch._amp_foreach_non_finite_check_and_unscale_:
            found_inf = args[0]
            found_inf.copy_(self._from_ranks(found_inf.view(1), "overflows after").amax())
        for bucket in self.by_bucket(params):
            bucket.forget_summands()
        self.forget_norms()

    def forget_norms(self) -> None:
        """Gradients change. All ranks call it at the same places: memory would not tell all of
        them, as a rank may hold no element of a gradient."""
        self._norms = None

    def _from_ranks(self, x: Tensor, what: str) -> Tensor:
        """[ranks of a replica, *x.shape]: x of each."""
        group = self.buckets[0].groups.gather
        if group is None:
            return x[None]
        with self.log.naming(what, self.buckets[-1].spec.index), self.log.timer.waiting():
            return group.exact.gathered(x)

    def full(self, values: Any, p: Tensor, *, block: int = 1) -> Any:
        """Join every rank's part of a tensor. Ranks: all that share the replica.

        Args:
            values: [S] for this rank's piece of p, any dtype; block: elements of p for each value,
                0: every rank has all of them.
        Returns:
            [P / block], in the whole parameter's shape if block is 1.
        Raises:
            ValueError: blocks of a parameter that is split along tp.
        Wire: the tensor's bytes, padded to equal parts.
        """
        if not block:
            return values
        self.check_block(p, block)
        self.settle()
        local = self._joined(values, p, block) if self.stage.shards else values.clone()
        return self._states.whole(local, p) if self.is_split(p) else local

    def settle(self) -> None:
        """Wait until the stepped memory may be read: no step and no copy is in flight."""
        for bucket in self.buckets:
            bucket.storage.settle(bucket)

    def is_split(self, p: Tensor) -> bool:
        """Whether ranks hold different parts of p, besides the ZeRO stage."""
        return self._states.is_split(p)

    def part_of(self, p: Tensor) -> str:
        """The part of p that this rank holds along the axes that split it, "" if all of it."""
        axes, place = self._states.placement(p).gather_axes, self._states.place
        return ", ".join(f"{axis}={place[axis]}" for axis in axes)

    def check_block(self, p: Tensor, block: int) -> None:
        """Raise ValueError for one value per several elements if tp splits the parameter."""
        if block > 1 and self.is_split(p):
            raise ValueError(
                f"Engine: parameter '{self.name_of(p)}' is split, which optimizer state with one "
                f"value for {block} elements does not support; keep the state in fp32 or bf16"
            )

    def name_of(self, p: Tensor) -> str:
        """The first name of a parameter."""
        return self.layout.slots[self.index[p]].spec.names[0]  # type: ignore[index]

    def _blocks(self, p: Tensor, rank: int, block: int) -> slice:
        """The blocks of a parameter that begin in the piece of a rank."""
        start, stop = self.layout.piece(self.index[p], rank)  # type: ignore[index]
        return slice(-(-start // block), -(-stop // block))

    def _joined(self, values: Tensor, p: Tensor, block: int) -> Tensor:
        """Like full(), for this rank's slice along tp."""
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

    def shard_of(self, whole: Any, p: Tensor, *, block: int = 1) -> Any:
        """This rank's part of a whole tensor, a copy: the inverse of full()."""
        if not block:
            return whole
        self.check_block(p, block)
        if self.is_split(p):
            whole = self._states.cut(whole, p)
        if not self.stage.shards:
            return whole.clone()
        rank = self.bucket_of(p).rank  # type: ignore[arg-type]
        return whole.reshape(-1)[self._blocks(p, rank, block)].clone()

    def joins(self, p: Tensor, place: int) -> bool:
        """Whether this rank contributes to what the rank with this number (without pp) joins."""
        together = self._spread(p)
        return self.mesh.dp_rank // together == place // self.mesh.tp_size // together

    # Checks

    def check(self) -> None:
        """Raise RuntimeError unless the model still uses its parameters in the buckets' memory."""
        for bucket in self.buckets:
            bucket.check()
        for p, name in self.frozen.items():
            if p.requires_grad:
                raise RuntimeError(
                    f"Engine: parameter '{name}' was frozen at fastpar.parallelize and now has "
                    "requires_grad=True; set requires_grad before fastpar.parallelize"
                )
        parts: list[int] = []
        for module_ref, _ in self._modules:
            if module := module_ref():
                parts += map(id, module._parameters.values())
                parts += map(id, module._modules.values())
        if parts != self._checked:
            known = self._check_parts()
            self._checked = parts if known else None

    def _check_parts(self) -> bool:
        """check() of the model's modules; whether it has no other parameters."""
        for module_ref, params in self._modules:
            now = params if (module := module_ref()) is None else module._parameters
            for name, p in params.items():
                if p in self.places and now.get(name) is not p:
                    raise RuntimeError(
                        f"Engine: parameter '{self.name_of(p)}' of the model was replaced by "
                        "another object; load with load_state_dict(assign=False), and tie or "
                        "replace parameters before fastpar.parallelize"
                    )
        model, known = self.model(), True
        for name, p in model.named_parameters() if model is not None else ():
            stranger = p not in self.places and p not in self.frozen
            if stranger and p.requires_grad:
                raise RuntimeError(
                    f"Engine: parameter '{name}' was added to the model after "
                    "fastpar.parallelize; add parameters before"
                )
            known = known and not stranger
        return known


Gathered = Callable[[], contextlib.AbstractContextManager[None]]


def guard_state_dicts(model: nn.Module, shards: Shards, gathered: Gathered) -> None:
    """Make state_dict() and load_state_dict() use whole tensors. Ranks: all call them.

    Args:
        gathered: the engine's, by a weak reference.
    """
    if not (shards.shares or shards.settings.by_unit):
        return
    guard = _StateDicts(weakref.ref(shards), gathered)
    for module in model.modules():
        if next(module.parameters(), None) is not None:
            module.register_state_dict_pre_hook(guard.begin)
            module._register_state_dict_hook(guard.copy)
            module.register_load_state_dict_pre_hook(guard.begin_load)
            module.register_load_state_dict_post_hook(guard.end)


class _StateDicts(NotCopied):
    """Keeps gathered() open between two hooks."""

    def __init__(
        self,
        shards: Callable[[], Shards | None] = lambda: None,
        gathered: Gathered = contextlib.nullcontext,
    ) -> None:
        self._shards, self._gathered = shards, gathered
        self._open = contextlib.ExitStack()
        self._outer: Callable[[], nn.Module | None] = lambda: None  # the module of the call

    def begin(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        shards, outer = self._shards(), self._outer()
        if shards is None or (outer is not None and _is_inside(module, outer)):
            return
        self._close()  # of a call that failed
        self._open.enter_context(self._gathered())
        self._outer = weakref.ref(module)

    def begin_load(
        self, module: nn.Module, state: dict, prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        self.begin(module)
        shards = self._shards()
        if shards is None or shards.declared is None or self._outer() is not module:
            return
        errors: list[str] = args[-1]  # torch raises them together with its own
        for name, p in module.named_parameters(remove_duplicate=False):
            value, whole = state.get(prefix + name), shards.declared.whole_shape(p)
            if not isinstance(value, Tensor):
                continue
            if value.shape == whole:
                state[prefix + name] = shards.declared.cut(value, p)
            else:  # torch would accept it if it had the shape of a slice
                state[prefix + name] = p.detach().clone()
                errors.append(
                    f"size mismatch for {prefix}{name}: expected the whole tensor's shape "
                    f"{list(whole)}, got {list(value.shape)}; load a state_dict of the same model"
                )

    def copy(self, module: nn.Module, state: dict, prefix: str, metadata: Any) -> None:
        shards = self._shards()
        if shards is not None and self._outer() is module:
            joined: dict[int, Tensor] = {}  # tied parameters once, under all their names
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
        if self._outer() is module:
            self._close()

    def _close(self) -> None:
        self._outer = lambda: None
        self._open.close()


def _is_inside(module: nn.Module, outer: nn.Module) -> bool:
    return module is not outer and any(part is module for part in outer.modules())
