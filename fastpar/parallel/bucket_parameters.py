"""The parameters of one bucket on one rank: views of its memory, or placeholders.

[Note: stale parameters]
After a step a rank knows only its own slice of the new parameters, at stage 3 also between uses.
Until they are gathered, p.data is a placeholder of the right shape with one nan for all elements:
whoever reads it sees nans instead of old values, and not the memory that was freed, which would
crash. Tensors that autograd saved keep the storage, which is resized and filled again in place.

[Note: absent tensors]
A placeholder, of a parameter or of a gradient that was reduced into a shard, refuses to be changed:
what is written there would be lost, copies and files would hold nan without a word, and torch's own
words are about memory. A parameter is absent by its class, which costs nothing while it is there.
What a forward or a backward computes with an absent parameter has it gathered; elsewhere autograd
would follow nan, and that is refused.

[Note: secondary shards]
The ranks of a node together keep what the first gather of a step, over all ranks, has brought: as
forwards have it, rounded where wire_weights rounds. Later gathers of the step, those of backward
and of further micro-batches, stay inside of the node. Every rank takes the one or the other way for
the same gather, because it depends on gathers, steps and writes alone, which all ranks do alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fastpar.comm.bucket_wires import Wires
from fastpar.comm.collectives import Collectives
from fastpar.comm.handles import Handle
from fastpar.parallel.stages import Settings, Stage
from fastpar.pipeline.stages import Stages
from fastpar.sharding.layout import Bucket, Layout, Slot, parameter_names
from fastpar.tensor.declared import Declared

Materialize = Callable[[str, Tensor], None]


@dataclass(frozen=True)
class BucketGroups:
    """Over which ranks a bucket travels; None where there is nobody else.

    They follow from the placement of its parameters: the axes along which these are replicated.

    Args:
        reduce: sums gradients: all that have the parameters, or those that share one copy.
        gather: the same ranks as reduce, another group: neither waits for the other.
        copies: the ranks that own the same shard of other copies.
        again: the same ranks as reduce, for the second half of a compressed all-reduce.
        node: of gather's ranks those of this node: [Note: secondary shards].
        nodes: of reduce's ranks those of this node, and those at the same place in each node.
    """

    reduce: Collectives | None = None
    gather: Collectives | None = None
    copies: Collectives | None = None
    again: Collectives | None = None
    node: Collectives | None = None
    nodes: tuple[Collectives, Collectives] | None = None

    def on_wires(
        self, wires: Wires, spec: Bucket, slots: Sequence[Slot], stage: Stage
    ) -> BucketGroups:
        """The same for one bucket, in its formats; slots: of its parameters."""
        index, flags = spec.index, spec.numel - spec.used_start
        exact, in_place = (0, not stage.frees_gradients) if stage.shards else (flags, False)
        how: dict[str, Any] = {"again": self.again, "exact": exact, "in_place": in_place}
        codes = [(slice(s.start, s.stop), wires.codes[s.registered]) for s in slots if spec.rounded]
        return BucketGroups(
            wires.sums(self.reduce, index, numel=spec.numel, nodes=self.nodes, **how),
            wires.gathers(self.gather, spec.dtype, codes),
            wires.sums(self.copies, index),
            node=self.node,
        )


class BucketParameters:
    """The parameters of one bucket; see [Note: stale parameters].

    Attributes:
        params: its parameters; the slots of the layout in order.
        flat: [P] parameters; without memory while a bucket of stage 3 is freed.
        shard: [S] this rank's slice of the newest parameters.
        stepped: [S] what an optimizer changes: shard, or its twin on the host.
        live: whether the parameters are views of flat.
        rank: among those that share one copy.
        apart: shard has memory of its own.
        own: the place of shard in flat; host: see offload.py, None without it.
        secondary: [P / ranks of a node], None without; kept: whether it holds this step's weights.
        groups: over which it travels; device: where it lies.
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
    ) -> None:
        self.spec, self.params, self.stage = spec, params, settings.stage
        self.slots = [layout.slots[i] for i in spec.slots]
        self.groups, self.device, self.poison = groups, device, poison
        self.rank, self.own = rank, slice(*spec.shard(rank))
        self.pieces = [layout.piece(i, rank) for i in spec.slots]
        stage, self.grad_dtype = settings.stage, settings.grad_dtype or spec.dtype
        # Memory that the peers read without a copy.
        shared = groups.gather if stage.gathers_after_step else None
        self.flat = self._empty(shared, spec.numel, spec.dtype).zero_()
        self.views = [self.flat[s.start : s.stop].view(s.spec.shape) for s in self.slots]
        self.shard = self.flat[self.own] if stage.shards else self.flat
        self.apart = stage.frees_parameters or self.rounds
        if self.apart:
            self.shard = self._empty(groups.gather, spec.shard_numel, spec.dtype)
        self.stepped = self.shard
        node, self.kept = groups.node, False
        self.secondary: Tensor | None = None
        if node is not None:
            self.secondary = self._empty(node, spec.numel // node.world_size, spec.dtype)
        self.host: Any = None
        self._placeholders = list(self.views)
        self._absents: dict[int, Absent] = {}  # what marks show, see bucket.py
        self.live = self.gathered_exact = True
        self.gathering: Handle | None = None

    def _empty(self, group: Collectives | None, numel: int, dtype: torch.dtype) -> Tensor:
        if group is None:
            return torch.empty(numel, dtype=dtype, device=self.device)
        return group.empty(numel, dtype)

    def name(self, position: int) -> str:
        """The first name of the parameter at a position."""
        return self.slots[position].spec.names[0]

    def slot_of(self, whole: Tensor | None, position: int) -> Tensor:
        """A parameter's part of whole parameters or gradients, in its shape."""
        assert whole is not None
        slot = self.slots[position]
        return whole[slot.start : slot.stop].view(slot.spec.shape)

    def _new_shard(self) -> Tensor:
        return torch.empty(self.spec.shard_numel, dtype=self.grad_dtype, device=self.device)

    def attach(self) -> None:
        """The values are in flat, for the first time: parameters become views."""
        if self.apart:
            self.shard.copy_(self.flat[self.own])
        for p in self.params:
            p.grad = None
        self.make_live()

    @property
    def rounds(self) -> bool:
        """Whether a forward has other values than those that are stepped."""
        return self.groups.gather is not None and self.groups.gather.rounds

    @property
    def exact(self) -> bool:
        """Whether the values that are stepped are there."""
        return self.live and self.gathered_exact

    def allocate(self) -> None:
        """Memory for all parameters, their values unknown."""
        if self.stage.frees_parameters and not self.flat.untyped_storage().nbytes():
            self.flat.untyped_storage().resize_(self.spec.numel * self.spec.dtype.itemsize)

    def keep_secondary(self) -> None:
        """All parameters were gathered over all ranks: see [Note: secondary shards]."""
        node, mine = self.groups.node, self.secondary
        if node is None or mine is None or self.kept or (self.rounds and self.gathered_exact):
            return
        mine.copy_(self.flat.view(node.world_size, -1)[node.rank])
        self.kept = True

    def make_live(self) -> None:
        """The values are there: parameters are views of them."""
        if not self.live and not all(type(p) is AbsentParameter for p in self.params):
            self.check()  # those that are absent refuse other memory themselves
        for p, view in zip(self.params, self.views):
            show(p)
            p.data = view
        self.live = True

    def make_stale(self) -> None:
        """Marks parameters as out of date, at stage 3 frees them: [Note: stale parameters]."""
        if not self.live:
            return
        self.check()
        self.live = False
        nan = self._nan(self.spec.dtype)
        self._placeholders = [nan.expand(s.spec.shape) for s in self.slots]
        for p, placeholder in zip(self.params, self._placeholders):
            p.data = placeholder
            hide(p)
        if self.stage.frees_parameters:
            if self.poison:
                self.flat.fill_(float("nan"))
            self.flat.untyped_storage().resize_(0)

    def new_memory(self) -> list[tuple[int, Tensor]]:
        """(position, copy of the values) of live parameters that somebody gave other memory."""
        moved = [i for i in range(len(self.params)) if not self.is_in_place(i)]
        return [(i, self.params[i].data.clone()) for i in moved]

    def take_memory(self, position: int, new: Tensor) -> str | None:
        """Keep such values in the old memory; or say why they do not fit."""
        p, view = self.params[position], self.views[position]
        p.data = view
        fits = (new.shape, new.dtype, new.device) == (view.shape, view.dtype, view.device)
        if fits and hasattr(p, "_fastpar_engine"):
            view.copy_(new)
            return None
        return (
            f"gathered: expected values for parameter '{self.name(position)}' of shape "
            f"{list(view.shape)}, {view.dtype}, on {view.device}, got p.data={list(new.shape)}, "
            f"{new.dtype}, on {new.device}; write them with p.copy_(), and change shapes and "
            "dtypes before fastpar.parallelize"
        )

    def writable(self, grads: Tensor) -> Tensor:
        """The same gradients, where they may lie on the host and be used there."""
        if self.host is not None:
            self.host.touch(self)
        return grads

    def save_writes(self) -> None:
        """Somebody wrote into the whole parameters: this rank's slice of them is the truth."""
        if self.apart:
            self.shard.copy_(self.flat[self.own])
        if self.host is not None:
            self.stepped.copy_(self.shard)
        self.kept = False

    def _nan(self, dtype: torch.dtype) -> Tensor:
        """A new one: somebody may write into that of a parameter with one element."""
        return torch.full((), float("nan"), dtype=dtype, device=self.device)

    def _absent(self, position: int) -> Absent:
        """What stands for a parameter's gradient."""
        if position not in self._absents:
            nans = self._nan(self.spec.dtype).expand(self.slots[position].spec.shape)
            self._absents[position] = Absent.of(nans, "gradient", self.name(position))
        self._absents[position].zeroed = False
        return self._absents[position]

    def is_in_place(self, position: int) -> bool:
        """Whether the parameter still uses the bucket's memory, in the same way."""
        view = self.views[position] if self.live else self._placeholders[position]
        p = self.params[position]
        same = p.data_ptr() == view.data_ptr() and p.dtype == view.dtype
        return same and p.shape == view.shape and p.stride() == view.stride()

    def check(self) -> None:
        """Raise RuntimeError for a parameter that somebody gave other memory."""
        for position, p in enumerate(self.params):
            if not self.is_in_place(position):
                raise RuntimeError(
                    f"Engine: expected parameter '{self.name(position)}' to stay in its flat "
                    f"buffer, got other memory (dtype={p.dtype}, shape={list(p.shape)}, device="
                    f"{p.device}); call module.to() before fastpar.parallelize, and write values "
                    "inside `with fastpar.engine_of(model).gathered():`"
                )

    def check_grad(self, position: int, grad: Tensor) -> None:
        """Refuse a gradient that no bucket can take."""
        name = self.name(position)
        if grad.layout != torch.strided:
            raise RuntimeError(
                f"Engine: expected a dense gradient for parameter '{name}', got "
                f"layout={grad.layout}; build the embedding with sparse=False"
            )
        if grad.requires_grad:
            raise RuntimeError(
                "Engine: expected backward without create_graph, got a gradient with a graph for "
                f"parameter '{name}'; use torch.autograd.grad for higher derivatives"
            )


_HARMLESS = {"requires_grad_", "share_memory_"}
_WRITERS = {
    name
    for name in dir(Tensor)
    if (name.endswith("_") and not name.startswith("_") and name not in _HARMLESS)
    or (name.startswith("__i") and name[3:].strip("_") in {
        "add", "and", "div", "floordiv", "lshift", "mod", "mul", "or", "pow", "rshift", "sub",
        "truediv", "xor",
    })
} | {"__setitem__"}  # fmt: skip
_SPOKEN = {"__deepcopy__": "copy.deepcopy", "__reduce_ex__": "pickle"}


def _refuse(what: str, name: str, action: str) -> NoReturn:
    if action == "data":
        raise RuntimeError(
            f"parallelize: expected parameter '{name}' to keep its dtype, device and memory, which "
            "are a bucket's, got other memory for p.data; call module.to() before "
            "fastpar.parallelize, and write values inside `with fastpar.engine_of(model)"
            ".gathered():`"
        )
    if what == "gradient":
        raise RuntimeError(
            f"p.grad: expected to be left as it is, got {action} for '{name}', whose gradient is "
            "not in p.grad but reduced into a shard, or waits for that; clip with "
            "fastpar.AdamW(max_grad_norm=...), scale the loss, and read whole gradients with "
            "fastpar.engine_of(model).grads()"
        )
    raise RuntimeError(
        f"{_SPOKEN.get(action, f'p.{action}')}: expected a whole parameter, got '{name}', of which "
        "this rank has its slice; write, copy and save parameters inside "
        "`with fastpar.engine_of(model).gathered():`, on all ranks"
    )


class Absent(Tensor):
    """nans in the place of a gradient, or of an absent parameter's data; see the note.

    Attributes:
        zeroed: somebody called zero_() on it.
    """

    _what = "parameter"
    _name = ""
    zeroed = False

    @staticmethod
    def of(nans: Tensor, what: str, name: str) -> Absent:
        """nans as such a tensor, of the parameter or gradient with this name."""
        made: Absent = torch.Tensor._make_subclass(Absent, nans)
        made._what, made._name = what, name
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        zeroes = name in ("zero_", "_foreach_zero_")
        listed = name.startswith(("_foreach_", "_amp_foreach_")) and name.endswith("_")
        touched = [args[0] if args else kwargs.get("self")] if name in _WRITERS or listed else []
        if name in _SPOKEN:
            touched = [args[0]]
        for x in _absent((touched, kwargs.get("out"))):
            if not (zeroes and x._what == "gradient"):
                _refuse(x._what, x._name, name)
            x.zeroed = True
        with torch._C.DisableTorchFunctionSubclass():
            if zeroes:  # nothing is there to be written
                rest = [x for x in _tensors(touched) if not isinstance(x, Absent)]
                if rest:
                    torch._foreach_zero_(rest)
                return args[0] if name == "zero_" else None
            out = func(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, Absent) and _share(first, out):
            return Absent.of(out, first._what, first._name)
        return out


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for x in tree:
            yield from _tensors(x)


def _share(x: Tensor, y: Any) -> bool:
    return type(y) is Tensor and y.untyped_storage()._cdata == x.untyped_storage()._cdata


def _absent(tree: Any) -> Iterator[Absent]:
    return (x for x in _tensors(tree) if isinstance(x, Absent))


def _name_of(p: Tensor) -> str:
    link = getattr(p, "_fastpar_engine", None)
    return "?" if link is None or link.target is None else link.target.shards.name_of(p)


_data: Any = nn.Parameter.data  # the descriptor that AbsentParameter hides


class AbsentParameter(nn.Parameter):
    """A parameter that is not there; see [Note: absent tensors]."""

    @property
    def data(self) -> Tensor:
        return Absent.of(_data.__get__(self), "parameter", _name_of(self))

    @data.setter
    def data(self, new: Tensor) -> None:
        old = _data.__get__(self)
        same = (new.dtype, new.shape, new.stride()) == (old.dtype, old.shape, old.stride())
        if not same or new.data_ptr() != old.data_ptr():  # module.to() may have nothing to do
            _refuse("parameter", _name_of(self), "data")

    def detach(self) -> Tensor:
        """torch's, absent too."""
        return self.data

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, outside = kwargs or {}, []
        if _reads_values(func):
            used = [x for x in _tensors([args, *kwargs.values()]) if type(x) is AbsentParameter]
            outside = [p for p in used if not _gather(p)]
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
        if outside and any(x.grad_fn is not None for x in _tensors(out)):
            raise RuntimeError(
                f"parameter '{_name_of(outside[0])}' is used outside of the model's forward, where "
                "this rank has only its slice; use it in the forward, or inside "
                "`with fastpar.engine_of(model).gathered():`, on all ranks"
            )
        return out


def _gather(p: AbsentParameter) -> bool:
    """Whether a pass that runs has it gathered now."""
    link = getattr(p, "_fastpar_engine", None)
    gathers = None if link is None or link.target is None else link.target.gathers
    return gathers is not None and gathers.use(p)


# What a parameter is asked for that is not its values.
_ABOUT = {
    "__format__", "__hash__", "__len__", "__repr__", "data_ptr", "dim", "element_size",
    "get_device", "is_contiguous", "is_complex", "is_floating_point", "ndimension", "nelement",
    "numel", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_",
    "retain_grad", "size", "storage_offset", "stride", "type", "untyped_storage",
}  # fmt: skip


@functools.cache
def _reads_values(func: Callable[..., Any]) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return func.__self__.__name__ in ("H", "T", "imag", "mH", "mT", "real")  # type: ignore[attr-defined]
    no_value = name in ("__set__", "__delete__") or name.startswith("new_")
    return not (no_value or name in _ABOUT or name.endswith("_like"))


def _refusing(action: str) -> Callable[..., NoReturn]:
    def refuse(self: Tensor, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("parameter", _name_of(self), action)

    return refuse


for _action in (*_WRITERS, *_SPOKEN):
    setattr(AbsentParameter, _action, _refusing(_action))


def hide(p: nn.Parameter) -> None:
    """The parameter is absent from now on; its data are nans."""
    if type(p) is nn.Parameter:
        p.__class__ = AbsentParameter


def show(p: nn.Parameter) -> None:
    """The parameter is about to be there."""
    if type(p) is AbsentParameter:
        p.__class__ = nn.Parameter  # type: ignore[assignment]


class Fill:
    """Gives parameters their first values.

    Args:
        named: all parameters with their names.
        materialize: where the model was on the meta device; else parameters have their values.
    """

    def __init__(
        self,
        named: dict[nn.Parameter, tuple[str, ...]],
        materialize: Materialize | None,
        declared: Declared | None,
        stages: Stages | None,
    ) -> None:
        self.named, self.materialize, self.declared = named, materialize, declared
        self.stages = stages

    def __call__(self, p: nn.Parameter, memory: Tensor) -> None:
        """Write the values of p into memory."""
        if self.materialize is None:
            memory.copy_(p.detach())
        elif self.declared is None or not self.declared.is_split(p):
            self.materialize(self.named[p][0], memory)
        else:
            whole = memory.new_empty(self.declared.whole_shape(p))
            self.materialize(self.named[p][0], whole)
            memory.copy_(self.declared.cut(whole, p))

    def rest(self, model: nn.Module, frozen: Iterable[nn.Parameter]) -> None:
        """Values of what is in no bucket."""
        if self.materialize is None:
            return
        for p in frozen:
            self(p, p.data)
        for name, buffer in model.named_buffers():
            self.materialize(name, buffer.data)


def allocate_meta(model: nn.Module, device: torch.device, declared: Declared | None) -> None:
    """Parameters of the meta device -> parameters on device, trained ones without memory yet."""
    old = parameter_names(model)
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is None:
                continue
            if p not in made:
                shape = torch.empty((), dtype=p.dtype, device=device).expand(p.shape)
                data = shape if p.requires_grad else torch.empty_like(p, device=device)
                made[p] = nn.Parameter(data, requires_grad=p.requires_grad)
            module._parameters[name] = made[p]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=device)
    if declared is not None:
        declared.rename(old, parameter_names(model))
