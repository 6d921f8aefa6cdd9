"""One bucket on one rank: collects gradients, sends them, and keeps their mean.

    stage   reduction        whole gradients      whole parameters              gathered
    0       all-reduce       kept                 kept                          never
    1       reduce-scatter   kept                 kept                          after a step
    2       reduce-scatter   freed when reduced   kept                          after a step
    3       reduce-scatter   freed when reduced   freed outside of their use    around use

`zero_stage` is a number only in arguments and reports; code reads a field of Stage.

Where gradients live: the bucket's node gets them from autograd ([Note: nodes]), or the hook of a
parameter that is used without its module, and take() copies them into the bucket, or adds them.
Nothing is zeroed beforehand: slots of parameters without a gradient keep old bytes until
fill_missing(). At stage 0 p.grad is then a view of the bucket (p.main_grad if the gradient's dtype
is not the parameter's); at other stages p.grad is None.

Stale parameters: after a step a rank holds only its own shard of the new parameters; at stage 3
also between uses. p.data is then a placeholder of the right shape with one nan for all elements:
readers see nans instead of old values, and do not touch freed memory, which would crash. It stays
one after a gather, as forwards use the node's outputs, until code reads p itself (show()). Tensors
that autograd saved keep the storage, which is resized and filled again in place.

[Note: nodes]
Each bucket has one autograd node: its outputs are the weights of forwards, its backward has their
gradients. While a forward runs, `module._parameters` has outputs of the node instead of the
parameters, in the same memory. So autograd calls Python once for a bucket, when the gradients of
all uses are there, instead of once for a parameter. The node is made once and serves every forward.

What reads a parameter itself, outside of its module's forward (a regularizer in the loss, a list of
weights that a module keeps), is right as well: its gradient comes by the parameter's own hooks. So
do the gradients of parameters with hooks of other code, which are not lent.

Secondary shards: the ranks of a node together keep what the first gather of a step, over all ranks,
has brought, with the values of forwards (rounded if wire_weights rounds). Later gathers of the
step, those of backward and of further micro-batches, stay inside the node. All ranks choose the
same way for the same gather, because the choice depends only on gathers, steps and writes, which
are the same on all ranks.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from fastpar.comm.collectives import DONE, Collectives, Handle, PairwiseSum, started
from fastpar.comm.wires import CompressedSums, Encoders
from fastpar.engine.absent import AbsentParameter, Marks
from fastpar.files.tensor_file import FLOATS
from fastpar.kernels import lists
from fastpar.settings.parallel import Parallel
from fastpar.sharding.layout import Bucket, Layout


@dataclass(frozen=True)
class Stage:
    """The policy of one ZeRO stage; see the table at the top of the file.

    Args:
        number: zero_stage.
        shards: each rank owns a shard of the optimizer's state and of the reduced gradients:
            gradients are reduce-scattered instead of all-reduced.
        frees_gradients: whole gradients are freed when they are reduced.
        frees_parameters: whole parameters exist only around their use.
    """

    number: int
    shards: bool
    frees_gradients: bool
    frees_parameters: bool

    @property
    def gathers_after_step(self) -> bool:
        """Whether parameters are gathered once per step, during the next forward."""
        return self.shards and not self.frees_parameters


STAGES = (
    Stage(0, shards=False, frees_gradients=False, frees_parameters=False),
    Stage(1, shards=True, frees_gradients=False, frees_parameters=False),
    Stage(2, shards=True, frees_gradients=True, frees_parameters=False),
    Stage(3, shards=True, frees_gradients=True, frees_parameters=True),
)


@dataclass(frozen=True)
class Settings:
    """The settings of parallelize(), and which of them are in effect.

    Attributes:
        stage: the stage that runs: zero_stage, or 0 if each rank has a whole replica.
        n_shards: ranks that shard one replica.
    """

    parallel: Parallel
    stage: Stage
    n_shards: int
    bucket_mb: float

    @property
    def deterministic(self) -> bool:
        return self.parallel.deterministic

    @property
    def by_unit(self) -> bool:
        """Whether a forward waits for the parameters of each unit."""
        return self.stage.shards or self.parallel.offload.what is not None

    @property
    def grad_dtype(self) -> torch.dtype | None:
        """Dtype in which gradients are kept and accumulated; None: each parameter's own."""
        return FLOATS.get(self.parallel.precision.grad_dtype or "")

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """Dtype of gradients between ranks; None: as they are kept."""
        return FLOATS.get(self.parallel.precision.reduce_dtype or "")

    @property
    def accumulate(self) -> str:
        """Whether each backward is reduced ("shard"), or only the last one of a step ("full")."""
        return self.parallel.accumulate or "shard"

    @property
    def reduces_each(self) -> bool:
        """Whether each micro-batch of a pipeline is reduced."""
        return self.accumulate == "shard" and self.stage.frees_gradients


# Awaited by a bucket beside the positions of parameters: what a forward since the last step used of
# its node; what code used without a module, whose gradient comes by itself, nobody knows when.
NODE, DIRECT = -1, -2


@dataclass(frozen=True)
class BucketGroups:
    """The groups of ranks that exchange a bucket; None where a rank is alone.

    They follow from the placement of its parameters: the axes along which these are replicated.

    Args:
        reduce: sums gradients: all ranks that have the parameters, or those of one replica.
        gather: the same ranks as reduce in another group, so that neither waits for the other.
        copies: the ranks that own the same shard in the other replicas.
        again: the same ranks as reduce, for the second half of a compressed all-reduce.
        node: the ranks of gather on this node; see "Secondary shards" above.
    """

    reduce: Collectives | None = None
    gather: Collectives | None = None
    copies: Collectives | None = None
    again: Collectives | None = None
    node: Collectives | None = None

    def on_wires(self, wires: Encoders, spec: Bucket, stage: Stage) -> BucketGroups:
        """The same groups with the wire formats of one bucket."""
        index, flags = spec.index, spec.numel - spec.used_start
        exact = 0 if stage.shards else flags
        return BucketGroups(
            wires.sums(self.reduce, index, again=self.again, exact=exact),
            wires.gathers(self.gather, spec.dtype),
            wires.sums(self.copies, index),
            node=self.node,
        )


# Nodes with the highest number run first: a bucket is sent before the rest of the backward.
_FIRST = 2**63


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, start: Tensor, bucket_ref: weakref.ref[BucketState]) -> Any:
        ctx.bucket_ref = bucket_ref  # weak: the garbage collector knows no references of autograd
        ctx.set_materialize_grads(False)
        bucket = bucket_ref()
        assert bucket is not None
        pairs = zip(bucket.params, bucket.views)  # gathers are no changes that autograd may count
        return tuple(v.data if type(p) is AbsentParameter else p.detach() for p, v in pairs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None]:
        bucket = ctx.bucket_ref()
        if bucket is not None:
            bucket.collect(bucket, grads)
        return None, None


def _hooks_of(params: Iterable[Any]) -> list[tuple[int, int]]:
    return [
        (len(p._backward_hooks or ()), len(p._post_accumulate_grad_hooks or ())) for p in params
    ]


class Storage:
    """Where the memory lies that an optimizer steps: here on the device; see axes/offload.py.

    Attributes:
        where: what is kept elsewhere, for messages; None: nothing.
        steps_later: the optimizer steps it during the next forward.
    """

    where: str | None = None
    steps_later = False

    def gather(self, bucket: BucketState, group: Collectives | None, own: Tensor) -> Handle:
        """Begin to make its parameters whole; await_weights() and the handle's wait() end it."""
        if group is None:  # the storage is that of another bucket of this engine
            return DONE
        index = bucket.spec.index
        return started(group.all_gather(bucket.flat, own, async_op=True, tag=index))

    def await_weights(self, bucket: BucketState) -> None:
        """Make the current stream wait for its new weights."""

    def settle(self, bucket: BucketState) -> None:
        """Wait until the stepped memory may be read and written."""

    def touch(self, bucket: BucketState) -> None:
        """Called before its reduced gradients are written."""

    def bring_back(self, bucket: BucketState) -> None:
        """Called before more is added to its reduced gradients."""

    def send(self, bucket: BucketState) -> None:
        """Called when its gradients of this step are final."""

    def send_rest(self) -> None:
        """Called before a step: send everything that was not sent when it was reduced."""

    def write_weights(self, bucket: BucketState) -> None:
        """Called before the stepped memory is written."""

    def norm_bins(self, params: Iterable[Tensor]) -> Tensor | None:
        """The norm bins of these gradients on this rank; None: the caller computes them."""

    def step(self, optimizer: Any, rows: list[Any], factor: Any, found_inf: Any) -> list[Any]:
        """Begin the step of the rows that lie elsewhere; returns the other rows."""
        return rows

    def memory(self) -> dict[str, int]:
        """Bytes elsewhere, by kind."""
        return {}


ON_DEVICE = Storage()


class Piece(NamedTuple):
    """This rank's shard of one parameter: [S] elements from `start` on; at stage 0 all of it."""

    param: Tensor
    grad: Tensor | None
    start: int


class BucketState:
    """One bucket; the engine decides when what happens.

    Attributes:
        params: its parameters, in the order of the layout's slots.
        flat: [P] parameters; without memory while a bucket of stage 3 is freed.
        casts: whether gradients have another dtype than the parameters.
        shows_grad: whether p.grad is in the bucket's memory.
        shard: [S] this rank's shard of the newest parameters.
        stepped: [S] what an optimizer changes: shard, or its counterpart on the host.
        live: whether flat has the values; shown: whether the parameters are views of flat.
        rounds: whether forwards use other values than those that are stepped.
        hides: parameters stay placeholders, as the forwards of this step use the node's outputs.
        rank: among the ranks that shard one replica.
        separate: whether shard has memory of its own.
        own: the range of shard in flat; storage: of stepped.
        secondary: [P / ranks of a node], or None; kept: whether it holds this step's weights.
        groups: that exchange it; device: where it lies.
        wire_dtype: of gradients between ranks.
        grad: [P] gradients of this rank, None while they are freed; grad_views: each parameter's.
        used: stage 0: its elements, one for each parameter, see layout.py; made with grad_views.
        reduced: [S] ([P] at stage 0) mean over the ranks, None until the first of a step.
    """

    def __init__(
        self,
        layout: Layout,
        spec: Bucket,
        params: list[nn.Parameter],
        settings: Settings,
        groups: BucketGroups,
        *,
        rank: int,
        device: torch.device,
        poison: bool = False,
        sources: Callable[[BucketState], Any] | None = None,
    ) -> None:
        self.spec, self.params, self.stage = spec, params, settings.stage
        self.slots = [layout.slots[i] for i in spec.slots]
        self.groups, self.device, self.poison = groups, device, poison
        self.rank, self.own = rank, slice(*spec.shard(rank))
        self.pieces = [layout.piece(i, rank) for i in spec.slots]
        self._shapes = [s.spec.shape for s in self.slots]
        edges = [x for s in self.slots for x in (s.start, s.stop)] + [spec.used_start, spec.numel]
        # Of each slot and of the gap behind it, and of `used`.
        self._sizes = [b - a for a, b in itertools.pairwise(edges)]
        stage, self.grad_dtype = settings.stage, settings.grad_dtype or spec.dtype
        # Memory that peers read without a copy.
        shared = groups.gather if stage.gathers_after_step else None
        self.flat = self._empty(shared, spec.numel, spec.dtype).zero_()
        self.views = [self.slot_of(self.flat, i) for i in range(len(params))]
        self.shard = self.flat[self.own] if stage.shards else self.flat
        self.rounds = groups.gather is not None and groups.gather.rounds
        self.separate = stage.frees_parameters or self.rounds
        if self.separate:
            self.shard = self._empty(groups.gather, spec.shard_numel, spec.dtype)
        self.stepped = self.shard
        node, self.kept = groups.node, False
        self.secondary: Tensor | None = None
        if node is not None:
            self.secondary = self._empty(node, spec.numel // node.world_size, spec.dtype)
        self.storage: Any = ON_DEVICE
        self.log: Any = None  # a comm.recorder.CollectiveLog, of all buckets
        self._placeholders = list(self.views)
        self.live = self.gathered_exact = True
        self.shown = False
        self.hides = False
        self.gathering: Handle | None = None
        self.collect: Any = None  # called with itself and the gradients of its node
        self._uses: list[tuple[dict[str, Any], str, int]] = []
        self._hooks: list[tuple[int, int]] = []
        self._outputs: tuple[Tensor, ...] = ()  # of its node
        self._usable: list[bool] = []  # which of them forwards may use
        self._all = [True] * len(params)
        self._stream: Any = None
        self._lent = False
        self.expects: set[int] = set()  # NODE and DIRECT, where forwards used them
        self._awaited: set[int] = set()  # in this backward: positions, and of expects
        self.deterministic = settings.deterministic
        self.wire_dtype = settings.reduce_dtype or self.grad_dtype
        self.casts = self.grad_dtype != spec.dtype
        self.shows_grad = not (stage.shards or self.casts)
        self.grad: Tensor | None = None
        self._starts = [s.start for s in self.slots]
        self._grad_views: list[Tensor] | None = None
        self.used: Any = None
        if not stage.frees_gradients:
            self._set_grad(self._empty(groups.reduce, spec.numel, self.grad_dtype))
        self.grad_shard: Tensor | None = self._new_shard() if stage.frees_gradients else None
        self.has: set[int] = set()  # positions with a gradient of this rank in `grad`
        self.seen: set[int] = set()  # positions with a gradient since zero_grad(), also reduced
        self.unreduced: PairwiseSum | None = None  # earlier micro-batches that were not reduced
        self.reduced: Tensor | None = None
        self._reductions: PairwiseSum | None = None
        # A block of codes may reach from the end of a parameter to the start of the next.
        ends = [*(s.start for s in self.slots[1:]), spec.numel]
        pads = [slice(s.stop, end) for s, end in zip(self.slots, ends) if s.stop < end]
        self._pads = pads if isinstance(groups.reduce, CompressedSums) else []
        self._piece_views: tuple[Tensor | None, list] | None = None  # of reduced; of piece()
        self.marks = Marks(params)
        self._zeroed = set(range(len(params)))  # positions without a gradient on any rank
        self.sources = None if sources is None else sources(self)
        if self.casts and not stage.shards:
            for p, view in zip(params, self.grad_views):
                p.main_grad = view  # type: ignore[attr-defined]

    # Parameters

    def _empty(self, group: Collectives | None, numel: int, dtype: torch.dtype) -> Tensor:
        if group is None:
            return torch.empty(numel, dtype=dtype, device=self.device)
        return group.empty(numel, dtype)

    def name(self, position: int) -> str:
        """The first name of the parameter at a position."""
        return self.slots[position].spec.names[0]

    def slot_of(self, whole: Tensor | None, position: int) -> Tensor:
        """A parameter's slice of whole parameters or gradients, in its shape."""
        assert whole is not None
        slot = self.slots[position]
        return whole[slot.start : slot.stop].view(slot.spec.shape)

    def _new_shard(self) -> Tensor:
        return torch.empty(self.spec.shard_numel, dtype=self.grad_dtype, device=self.device)

    def attach(self) -> None:
        """Make the parameters views of flat, which holds their values for the first time."""
        if self.separate:
            self.shard.copy_(self.flat[self.own])
        for p in self.params:
            p.grad = None
        self._point()

    @property
    def exact(self) -> bool:
        """Whether the parameters have the values that are stepped."""
        return self.live and self.gathered_exact

    def allocate(self) -> None:
        """Allocate memory for all parameters, without values."""
        if self.stage.frees_parameters and not self.flat.untyped_storage().nbytes():
            self.flat.untyped_storage().resize_(self.spec.numel * self.spec.dtype.itemsize)

    def launch_gather(self, *, exact: bool = False) -> None:
        """Start to gather all ranks' shards; exact: as stepped, not as rounded for forwards."""
        group, own, index = self.groups.gather, self.shard, self.spec.index
        if self.kept and self.secondary is not None and not exact:
            group, own = self.groups.node, self.secondary
        group = group.exact if exact and group is not None else group
        self.gathered_exact = exact or not self.rounds
        self.allocate()
        self.log.note(1, index)
        with self.log.naming("gathering", index):
            self.gathering = self.storage.gather(self, group, own)
        if group is not None:
            self.log.add(self.gathering, self.flat, group, both_ways=False)

    def finish_gather(self) -> None:
        """Wait until the gather is done: its parameters are whole."""
        if self.gathering is not None:
            self.storage.await_weights(self)
            self.log.wait(self.gathering, "gathering", self.spec.index)
            self.gathering = None
            node, mine = self.groups.node, self.secondary
            of_all = not (self.kept or (self.rounds and self.gathered_exact))
            if node is not None and mine is not None and of_all:  # see "Secondary shards" above
                mine.copy_(self.flat.view(node.world_size, -1)[node.rank])
                self.kept = True
            self.make_live()

    def make_live(self) -> None:
        """Note that flat has the values; lends them, or makes parameters views of it."""
        self.live = True
        if not self.hides:
            self.show()
        if self._lent:
            self._lend(again=False)

    def show(self) -> None:
        """Make parameters views of flat, now or when it is live, in this step."""
        self.hides = False
        if not self.live or self.shown:
            return
        if not all(type(p) is AbsentParameter for p in self.params):
            self.check()  # absent parameters refuse other memory by themselves
        self._point()

    def _point(self) -> None:
        for p, view in zip(self.params, self.views):
            if type(p) is AbsentParameter:
                p.__class__ = nn.Parameter  # type: ignore[assignment]
            p.data = view
        self.shown = True

    # Its node

    def connect(self, uses: list[tuple[dict[str, Any], str, int]], collect: Any) -> None:
        """Have a node from now on.

        Args:
            uses: (`module._parameters`, name, position of the parameter) of each.
            collect: called with this bucket and the gradients of a backward, None where there is
                none.
        """
        self._uses, self.collect, self.hides = uses, collect, self.stage.shards
        self._hooks = _hooks_of(self.params)

    def lend(self) -> None:
        """Give modules the outputs of its node, now or when it is live, until take_back(): of
        parameters that are in their places."""
        again, self._lent = self._lent, True
        self.expects.add(NODE)
        if self.live:
            self._lend(again=again)

    def _lend(self, *, again: bool) -> None:
        """again: modules may have the present outputs."""
        stream = None if again else self._stream
        if not self._outputs or (stream and stream != torch.cuda.current_stream(stream.device)):
            self._make_node()
        with torch._C.DisableTorchFunctionSubclass():
            usable = [p.requires_grad for p in self.params]
            if (hooks := _hooks_of(self.params)) != self._hooks:
                usable = [x and n == known for x, n, known in zip(usable, hooks, self._hooks)]
        if self.shown and not self._is_in_place():  # something has moved them out of flat
            pairs = zip(usable, self.params, self.views)
            usable = [x and lists.are_at((p,), (view,)) for x, p, view in pairs]
        self._usable = usable
        lists.swap(self._uses, self.params, self._outputs, usable)

    def _make_node(self) -> None:
        """Make the node, on the current stream: its backward will run there."""
        if self.device.type == "cuda":
            self._stream = torch.cuda.current_stream(self.device)
        start = torch.zeros((), dtype=torch.float32, device=self.device, requires_grad=True)
        with torch.enable_grad():
            self._outputs = _Node.apply(start, weakref.ref(self))
        self._outputs[0].grad_fn._set_sequence_nr(_FIRST)  # type: ignore[union-attr]
        for p, output in zip(self.params, self._outputs):
            output.__class__ = nn.Parameter  # for code that looks
            # It keeps the parameter, and so the engine, while no module does.
            vars(output).update(vars(p), fastpar_parameter=p)

    def weight(self, position: int) -> Tensor:
        """What a forward uses now: an output of its node, or the parameter."""
        lent = self._lent and self.live and self._usable[position]
        return (self._outputs if lent else self.params)[position]

    def take_back(self) -> None:
        """End lend()."""
        if not self._lent:
            return
        self._lent = False
        if self._outputs:
            lists.swap(self._uses, self._outputs, self.params, self._all)

    def make_stale(self) -> None:
        """Mark parameters as out of date, at stage 3 free them; see "Stale parameters" above."""
        if not self.live:
            return
        self.take_back()
        self.check()
        self.live = False
        if self.shown:
            self._hide()
        if self.stage.frees_parameters:
            if self.poison:
                self.flat.fill_(float("nan"))
            self.flat.untyped_storage().resize_(0)

    def _hide(self) -> None:
        self.shown = False
        # A new one: a parameter with one element could be written in place.
        nan = torch.full((), float("nan"), dtype=self.spec.dtype, device=self.device)
        self._placeholders = [nan.expand(shape) for shape in self._shapes]
        for p, placeholder in zip(self.params, self._placeholders):
            p.data = placeholder
            if type(p) is nn.Parameter:
                p.__class__ = AbsentParameter

    def take_memory(self, position: int, new: Tensor) -> str | None:
        """Copy such values into the old memory; returns an error message if they do not fit."""
        p, view = self.params[position], self.views[position]
        p.data = view
        fits = (new.shape, new.dtype, new.device) == (view.shape, view.dtype, view.device)
        if fits and hasattr(p, "_fastpar_engine"):
            view.copy_(new)
            return None
        return (
            f"gathered: p.data of parameter '{self.name(position)}' was replaced by "
            f"{list(new.shape)}, {new.dtype}, on {new.device}, expected {list(view.shape)}, "
            f"{view.dtype}, on {view.device}; write values with p.copy_(), and change shapes and "
            "dtypes before fastpar.parallelize"
        )

    def save_writes(self) -> None:
        """Keep this rank's shard of whole parameters that were written."""
        if self.separate:
            self.shard.copy_(self.flat[self.own])
        if self.stepped is not self.shard:
            self.stepped.copy_(self.shard)
        self.kept = False

    def _is_in_place(self) -> bool:
        """Whether all parameters are views of flat."""
        with torch._C.DisableTorchFunctionSubclass():
            return lists.are_at(self.params, self.views)

    def moved(self) -> list[int]:
        """Positions of parameters that do not use the bucket's memory, with the same layout. Absent
        ones refuse other memory."""
        if self.shown and self._is_in_place():
            return []
        places = zip(self.params, self.views if self.shown else self._placeholders)
        return [
            i
            for i, (p, view) in enumerate(places)
            if type(p) is not AbsentParameter and not (
                p.data_ptr() == view.data_ptr() and p.dtype is view.dtype
                and p.shape == view.shape and p.stride() == view.stride()
            )
        ]  # fmt: skip

    def check(self) -> None:
        """Raise RuntimeError if a parameter, or a weight of a forward, was given other memory."""
        weights: Sequence[Tensor] = self.params
        moved = self.moved()
        if not moved and self._outputs and not lists.are_at(self._outputs, self.views):
            weights, pairs = self._outputs, enumerate(zip(self._outputs, self.views))
            moved = [i for i, (x, view) in pairs if not lists.are_at((x,), (view,))]
        for i in moved:
            now = weights[i]
            raise RuntimeError(
                f"Engine: parameter '{self.name(i)}' left its flat buffer (now dtype={now.dtype}, "
                f"shape={list(now.shape)}, device={now.device}); call module.to() before "
                "fastpar.parallelize, and write values inside "
                "`with fastpar.engine_of(model).gathered():`"
            )

    # Gradients

    @property
    def ready(self) -> bool:
        """Whether this backward has given all gradients, of parameters that it is known to give."""
        return not self._awaited

    @property
    def grad_bytes(self) -> int:
        """Bytes of the whole gradients."""
        return self.spec.numel * self.grad_dtype.itemsize

    def piece(self, position: int) -> Piece:
        """This rank's piece of a parameter."""
        if self.stage.shards:
            return self.all_pieces()[position]
        whole = self.stepped is self.shard
        value = self.params[position] if whole else self.slot_of(self.stepped, position)
        return Piece(value, self.grad_of(position), 0)

    def all_pieces(self) -> list[Piece]:
        """piece() of all."""
        if not self.stage.shards:
            return list(map(self.piece, range(len(self.params))))
        if self._piece_views is None or self._piece_views[0] is not self.reduced:
            views = []
            for slot, (start, stop) in zip(self.slots, self.pieces):
                at = slot.start + start - self.own.start
                place = slice(at, at + stop - start)
                grad = None if self.reduced is None else self.reduced[place]
                views.append(Piece(self.stepped[place], grad, start))
            self._piece_views = self.reduced, views  # of a stage >= 2, the same in every step
        return self._piece_views[1]

    def keep_on_host(self, grads: Tensor) -> None:
        """Take reduced gradients on the host; frees those on the device."""
        self.reduced, self.grad_shard, self._piece_views = grads, None, None

    def _set_grad(self, grad: Tensor | None) -> None:
        self.grad, self._grad_views, self.used = grad, None, None
        self._note_version()

    @property
    def grad_views(self) -> list[Tensor]:
        """Each parameter's part of grad, in its shape."""
        if self._grad_views is None:
            assert self.grad is not None
            *parts, used = self.grad.split_with_sizes(self._sizes)[::2]
            self._grad_views = [part.view(shape) for part, shape in zip(parts, self._shapes)]
            self.used = used[: len(parts)]
        return self._grad_views

    def take(self, given: dict[int, Tensor | None], *, by_hook: bool = False) -> bool:
        """Copy gradients into `grad`, or add them; returns whether the bucket became ready.

        Args:
            given: by position; None: there is none.
            by_hook: from the hook of a parameter, whose p.grad it is; otherwise from the node.
        """
        if self.sources is not None:
            for i in given:
                self.sources.collect(i, first=i not in self.has)
        new = {i: grad for i, grad in given.items() if grad is not None}
        for i, grad in new.items():
            if grad.requires_grad or grad.layout is not torch.strided:
                self._refuse_grad(i, grad)
        if new:
            self.open_grad()
            self._write(new, by_hook)
            self.has.update(new)
            self.seen.update(new)
        was_ready = self.ready
        self._awaited.difference_update(new if by_hook else (*new, NODE))
        return self.ready and not was_ready

    def _write(self, new: dict[int, Tensor], by_hook: bool) -> None:
        """Copy these into `grad`, or add them to what this rank has."""
        assert self.grad is not None
        first, again = new, self.has & new.keys()
        if by_hook and self.shows_grad:  # autograd has added it
            first, again = {i: x for i, x in new.items() if x is not self.grad_views[i]}, set()
        elif self.shows_grad:
            for i in new.keys() - again:
                if (grad := self.params[i].grad) is not None:  # set by hand
                    self.grad_views[i].copy_(grad)
                    again.add(i)
        if again:
            views = self.grad_views  # made when they are needed, as `grad` is freed at stages >= 2
            torch._foreach_add_([views[i] for i in again], [new[i] for i in again])
            first = {i: x for i, x in new.items() if i not in again}
        if first:
            lists.copy_into(self.grad, [self._starts[i] for i in first], [*first.values()])
        if self.shows_grad:
            views = self.grad_views
            self.marks.show({i: views[i] for i in new if by_hook or i not in self.has})
        elif by_hook:
            for i in new:
                self.params[i].grad = None

    def _refuse_grad(self, position: int, grad: Tensor) -> NoReturn:
        """Raise for a gradient that is sparse or has a graph."""
        name = self.name(position)
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"Engine: expected a dense gradient for parameter '{name}', got "
                f"layout={grad.layout}; build the embedding with sparse=False"
            )
        raise RuntimeError(
            f"Engine: the gradient of parameter '{name}' has a graph of its own "
            "(create_graph=True); use torch.autograd.grad for higher derivatives"
        )

    def open_grad(self) -> None:
        """Allocate `grad` before it is written; moves the sum so far out of its own slice."""
        if self.grad is None:
            self._set_grad(self._empty(None, self.spec.numel, self.grad_dtype))
        elif self.stage.shards and self.reduced is not None and not self.has:
            in_place = self.reduced.data_ptr() == self.grad[self.own].data_ptr()
            self.reduced = self.reduced.clone() if in_place else self.reduced

    def fill_missing(self, *, flags: bool) -> list[int]:
        """Zero the slots without a gradient and set `used`; returns their positions."""
        self.open_grad()
        self._zeroed.clear()
        for pad in self._pads:
            self.grad[pad].zero_()  # type: ignore[index]
        missing = [i for i in range(len(self.params)) if i not in self.has]
        for position in missing:
            self.check_given(position)
            self.grad_views[position].zero_()
        if flags:
            self.used.fill_(1.0)
            for position in missing:
                # Deterministic: the gradients of earlier micro-batches are not in `grad`.
                self.used[position] = float(self.deterministic and position in self.seen)
        return missing

    def check_given(self, position: int) -> None:
        """Refuse a p.grad that no backward produced."""
        if position not in self.has and self.params[position].grad is not None:
            self.marks.refuse(position)

    def keep_local(self) -> None:
        """Deterministic: keep this micro-batch's gradients separately, for the tree."""
        self.fill_missing(flags=False)
        if self.unreduced is None:
            self.unreduced = PairwiseSum()
        self.unreduced.push(self._micro_batch(clone=not self.stage.frees_gradients))
        if self.stage.frees_gradients:
            self._set_grad(None)
        self._forget_local()

    def add_local(self) -> None:
        """Deterministic: sum the micro-batches that were kept here into `grad`, as a tree."""
        if self.unreduced is None and self.sources is None:
            return
        assert self.grad is not None
        total = self._micro_batch(clone=True)
        if self.unreduced is not None:
            self.unreduced.push(total)
            total = self.unreduced.total()
        if self.sources is not None:
            self.sources.sum_into(self.grad[: self.spec.used_start], total)
        else:
            self.grad.copy_(total)
        self.unreduced = None

    def _micro_batch(self, *, clone: bool) -> Tensor:
        """The gradients of the backward passes since the last micro-batch, for the tree."""
        if self.sources is not None:
            return self.sources.micro_batch(self.has)
        assert self.grad is not None
        return self.grad.clone() if clone else self.grad

    def _forget_local(self) -> None:
        self.has.clear()
        self.marks.lift()

    def target(self) -> Tensor:
        """Where the next reduction writes its result."""
        assert self.grad is not None
        if not self.stage.shards:
            return self.grad
        if not self.stage.frees_gradients or (self.spec.n_shards == 1 and not self.deterministic):
            return self.grad[self.own]
        if self.reduced is None and not self.deterministic and self.grad_shard is not None:
            return self.grad_shard
        return self._new_shard()

    def add_reduced(self, result: Tensor) -> None:
        """Add a reduction's result; frees whole gradients if the stage does."""
        if self.deterministic:
            again = not self.stage.shards and self.reduced is not None  # without a backward
            if self._reductions is None or again:
                self._reductions = PairwiseSum()
            self._reductions.push(result if self.stage.frees_gradients else result.clone())
            self.reduced = result
            if self.stage.frees_gradients:
                self.reduced = self._new_shard() if self.grad_shard is None else self.grad_shard
            if self._reductions.count > 1 or self.stage.frees_gradients:
                self.reduced.copy_(self._reductions.total())
        elif self.reduced is None or not self.stage.shards:
            self.reduced = result
        else:
            self.reduced = self.reduced.add_(result)
        if self.stage.shards:
            self.has.clear()
        self.free_grad()

    def forget_summands(self) -> None:
        """Deterministic: reduced was changed and replaces the sum that made it."""
        if self.deterministic and self.reduced is not None:
            self._reductions = PairwiseSum(self.reduced.clone()) if self.reduced.any() else None

    def free_grad(self) -> None:
        """Free the whole gradients, which have been sent, if the stage does."""
        if self.stage.frees_gradients:
            if self.poison and self.grad is not None and self.spec.n_shards > 1:
                self.grad.fill_(float("nan"))
            self._set_grad(None)

    @property
    def written(self) -> bool:
        """Stage 0: whether p.grad was written by hand since the last backward or accept()."""
        return not self.stage.shards and self.grad is not None and self.grad._version != self._known

    def accept(self) -> None:
        """Take p.grad as it is for what the last backward passes made."""
        if self.written:
            self.forget_summands()
        self._note_version()

    def _note_version(self) -> None:
        """What is in `grad` now is no write by hand."""
        self._known = -1 if self.grad is None else self.grad._version

    def set_aside(self, *, anew: bool) -> None:
        """Deterministic stage 0: keep the sum of the last backward passes out of a new one's.

        Args:
            anew: p.grad was changed and replaces that sum.
        """
        if not self.stage.shards and self.reduced is not None:
            if anew:
                self.forget_summands()
            self.reduced = None
            self._forget_local()

    def adopt(self, position: int) -> None:
        """Stage 0: give a parameter the gradient that other ranks have for it."""
        self.has.add(position)
        self.seen.add(position)
        if self.shows_grad:
            self.marks.show({position: self.grad_views[position]})

    def grad_of(self, position: int) -> Tensor | None:
        """Stage 0: the gradient of a parameter, None if it has none."""
        if not self.casts:
            return self.params[position].grad
        return self.grad_views[position] if position in self.has else None

    @property
    def zeroed(self) -> bool:
        """Whether all gradients were zeroed since the last backward or reduction."""
        return len(self._zeroed) == len(self.params)

    @property
    def empty(self) -> bool:
        """Whether this rank holds no gradient, reduced or not."""
        return self.zeroed or (not self.seen and (not self.stage.shards or self.reduced is None))

    def zero_grad(self, set_to_none: bool, positions: set[int] | None = None) -> None:
        """Drop all gradients, which writes no memory, or set existing ones to zero.

        Args:
            positions: only the gradients of these parameters.
        """
        positions = set(range(len(self.params))) if positions is None else positions
        written, zero = self.written, set()
        with torch._C.DisableTorchFunctionSubclass():
            if not set_to_none:
                zero = {i for i in positions if self.params[i].grad is not None}
            for i in positions - zero:
                self.params[i].grad = None
        self._drop(positions - zero, zero)
        if not written or self.zeroed:
            self._note_version()

    def _drop(self, cleared: set[int], zeroed: set[int]) -> None:
        """Gradients are None, or zero, from now on; memory is written only if others stay."""
        self._zeroed |= cleared | zeroed
        self.seen -= cleared
        self.has -= cleared
        self.marks.drop(cleared)
        if self.stage.shards:
            self.has -= zeroed
        else:
            for i in zeroed:
                if (grad := self.grad_of(i)) is not None:  # or a placeholder, which may be zeroed
                    grad.zero_()
        if self.empty and not zeroed:
            if self.reduced is not self.grad_shard:
                self._piece_views = None  # they would keep it alive
            self.reduced = None
            self.free_grad()
        else:
            for i in cleared | zeroed:
                self._zero_parts(i)
        if self.empty:  # a tree of zeros would change later sums
            self.unreduced = self._reductions = None

    def begin_backward(self, *, skipped: bool = False) -> None:
        """Begin a backward; skipped: the forward did not use these parameters."""
        self._awaited = set() if skipped else {*range(len(self.params)), *self.expects}
        if self.marks.hidden:
            self.marks.lift()
        self._zeroed.clear()

    def mark(self, *, hidden: bool) -> None:
        """End a backward: its gradients are there; hidden: not in p.grad, see absent.py, Marks."""
        if hidden or self.casts:
            everywhere = self.stage.shards and self.reduced is not None
            self.marks.hide(range(len(self.params)) if everywhere else self.seen)
        self._note_version()

    def forget_cleared(self, fired: Tensor | None) -> tuple[bool, set[int]]:
        """Notice p.grad = None and zero_grad() of a module; returns whether there was anything, and
        the positions that were set to None in means, which other ranks have, too.

        Args:
            fired: stage 0: a parameter that already has its next gradient from autograd.
        """
        cleared, zeroed = self.marks.look(fired)
        in_means = self.reduced is not None or self._reductions is not None
        if cleared or zeroed:
            self._drop(cleared, zeroed)
        return bool(cleared or zeroed), cleared if in_means else set()

    def _zero_parts(self, position: int) -> None:
        """Zero a parameter's elements in the sums so far."""
        slot = self.slots[position]
        whole = slice(slot.start, slot.stop)
        start, stop = self.pieces[position]
        first = slot.start - self.own.start
        part = slice(first + start, first + stop) if self.stage.shards else whole
        for tree, place in ((self.unreduced, whole), (self._reductions, part)):
            if tree is not None:
                tree.zero_(place)
        if self.reduced is not None and self.stage.shards:
            self.storage.touch(self)
            self.reduced[part].zero_()

    @property
    def tree_bytes(self) -> int:
        """Bytes that fixed sums hold now."""
        trees = (self.unreduced, self._reductions)
        return sum(tree.nbytes for tree in trees if tree is not None)
