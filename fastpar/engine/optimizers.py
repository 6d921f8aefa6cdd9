"""Steps of optimizers that know no engine: torch.optim's, and others of its interface.

    opt = torch.optim.RAdam(model.parameters(), lr=1e-3)  # after parallelize(), at any stage and tp

Where a rank has whole parameters and their gradients, such an optimizer steps by itself. Elsewhere
hooks around its step() put this rank's pieces of parameters and reduced gradients into its groups.
Its state then has this rank's elements; state_dict() is whole on every rank, and a whole one that
was loaded is cut in the next step.

An optimizer is elementwise if the update of an element depends only on that element's history: SGD,
Adam, RAdam, Lion. It may then step pieces of tensors, as ranks of ZeRO and tensor parallelism hold
them, with the result of one process. LAMB, Shampoo, Adafactor and Muon need whole tensors; Prodigy
needs the whole model.

An optimizer does not say whether it is elementwise, so the first step tries a copy of it: the copy
steps two tensors whole, and in halves as two ranks would, and the bits of values and state are
compared after each of 32 steps ([Note: trial]). The trial also shows the entries of the state: like
the tensor (cut as it is), or others (the same on all ranks). Entries that it does not show are
refused when they appear and when they are loaded. torch.optim's own elementwise classes are known:
of these it looks at the entries only.

One thread: torch's CPU kernels round 16-bit sums differently in whole vectors and in the rest at
the end, and each thread's range of a tensor has an end. So pieces of 16-bit weights are stepped by
one thread on a CPU: they begin at multiples of 256 elements, so their ends are the tensor's. Slices
of tp may end anywhere: there 16-bit weights (with torch's fused kernels fp32 ones too) may differ
by a rounding from those of one process.

[Note: trial] Halves are one-dimensional, begin at whole vectors and get gradients of other sizes,
signs and zeros than their neighbours: a norm, a mean, a shape, another parameter or a random number
that an update depends on gives other bits. The learning rate is 0.1, not the user's, which may be 0
at first. What the trial cannot show: what begins after its 32 steps, at gradients of a size that it
does not try (0, 0.001, 1 and 1000; in fp16 30), or by tensors and objects that the constructor got
(numbers and texts among the attributes are copied).
"""

from __future__ import annotations

import contextlib
import copy
import math
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fastpar.axes import engine_of_parameter
from fastpar.engine.absent import engines_of
from fastpar.engine.bucket import ON_DEVICE

_SHAPES, _STEPS = ((32, 32), (16, 32)), 32  # of the trial
_TRIAL = threading.Lock()  # it restores generators that all threads share
_HALF = (torch.bfloat16, torch.float16)
# Entries that this package adds to the state of any optimizer: like the parameter, and counts.
OF_WEIGHTS = ("average", "outer_weight", "outer_momentum")
OURS = {*OF_WEIGHTS, "outer_steps"}
# Without LBFGS, SparseAdam, Adafactor and Muon.
_NAMES = "SGD Adam AdamW NAdam RAdam Adamax RMSprop Adagrad Adadelta ASGD Rprop"
_KNOWN = frozenset(getattr(torch.optim, name) for name in _NAMES.split())

_lock = threading.Lock()
_guarded = 0


class _ThreadEngines(threading.local):
    """The engines of this thread: ranks may be threads."""

    def __init__(self) -> None:
        self.engines: weakref.WeakSet[Any] = weakref.WeakSet()
        # What a step of an optimizer was checked with: engines, parameters without one.
        self.seen: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


_here = _ThreadEngines()
_known: weakref.WeakKeyDictionary[Any, Stepped] = weakref.WeakKeyDictionary()


def guard_optimizers(engine: Any) -> None:
    """Make step() of any optimizer in this thread step the engine's parameters, or refuse.

    Called for each engine; the hook is installed once per process.
    """
    global _guarded
    _here.engines.add(engine)
    with _lock:
        _guarded += 1
        if _guarded == 1:
            register_optimizer_step_pre_hook(_before_step)


def engines_made() -> int:
    """How many engines this process has made: until then a parameter's engine stays the same."""
    return _guarded


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    params = params_of(optimizer)
    if getattr(optimizer, "steps_engines", False):
        owners = optimizer.members().owners  # type: ignore[attr-defined]
    else:
        owners = engines_of(params)
        if (known := _known.get(optimizer)) is not None and known.is_stepping:
            refuse_after_failure()
        if any(map(_needs_hooks, dict.fromkeys(owners))):
            stepped(optimizer).stay_innermost(optimizer)
    strangers = [p for p, engine in zip(params, owners) if engine is None and p.requires_grad]
    seen = len(_here.engines), engines_made(), [*map(id, strangers)]
    if not strangers or not _here.engines or _here.seen.get(optimizer) == seen:
        return
    for engine in list(_here.engines):
        model = engine.shards.model()
        if model is not None and not {*strangers}.isdisjoint(model.parameters()):
            engine.shards.check()  # the error names it
    _here.seen[optimizer] = seen


def refuse_after_failure() -> NoReturn:
    """Raise: a step began and did not end."""
    raise RuntimeError(
        "Engine: the last step of an optimizer failed, so weights may be half stepped; restart "
        "from a checkpoint"
    )


def refuse_scaler(caller: str, engines: Iterable[Any]) -> None:
    """Refuse a loss scale of torch where a rank does not see the overflows of all."""
    for engine in engines:
        if engine.shares and not engine.can_measure:
            raise RuntimeError(
                f"{caller}.step: GradScaler and found_inf do not work with {engine.sharing}, where "
                "no ranks together have all gradients; set grad_scale of a fastpar optimizer from "
                "a fastpar.optim.schedule.DynamicLossScale"
            )


def _needs_hooks(engine: Any) -> bool:
    """Whether p and p.grad are not what a step needs."""
    if engine is None:
        return False
    moved = engine.shares or engine.shards.has_main_grads or engine.shards.storage is not ON_DEVICE
    return moved or engine.control.counts_tokens


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters of all groups."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _as_piece(values: Tensor) -> nn.Parameter:
    """A parameter that an optimizer steps in the place of a model's."""
    piece = nn.Parameter(values)
    piece._fastpar_piece = True  # type: ignore[attr-defined]  # see comm/mesh.py
    return piece


class Entry(NamedTuple):
    """One entry of the state, as the trial found it."""

    like: bool  # it has the parameter's elements; else it is the same on all ranks
    shape: torch.Size
    dtype: torch.dtype | None  # None: the parameter's
    on_device: bool
    kind: type  # Tensor, or the type of a number

    @classmethod
    def of(cls, value: Any, x: Tensor) -> Entry:
        """The entry of x with this value."""
        if not isinstance(value, Tensor):
            return cls(False, torch.Size(), None, False, type(value))
        like = value.shape == x.shape
        dtype = None if like and value.dtype == x.dtype else value.dtype
        return cls(like, value.shape, dtype, value.device == x.device, Tensor)

    def fits(self, value: Any, x: Tensor) -> bool:
        """Whether a value is such an entry of x."""
        if not isinstance(value, Tensor) or self.kind is not Tensor:
            return not isinstance(value, Tensor) and self.kind is not Tensor
        shape = x.shape if self.like else self.shape
        return (value.shape, value.dtype) == (shape, self.dtype or x.dtype)


class Trial(NamedTuple):
    """What the trial of a group showed, besides the entries."""

    in_pieces: bool  # it was stepped in halves, too, or need not be
    first: frozenset[str]  # entries after one step
    counts: tuple[str, ...]  # options of the group that a step changes


def stepped(optimizer: torch.optim.Optimizer) -> Stepped:
    """What is known of an optimizer; registers its hooks at the first call."""
    if not hasattr(optimizer, "_optimizer_load_state_dict_post_hooks"):
        name = type(optimizer).__name__
        raise RuntimeError(
            f"{name}.step: {name} did not call torch.optim.Optimizer.__init__, so it has no hooks, "
            "which sharded parameters need; use the optimizer that it wraps"
        )
    with _lock:
        if optimizer not in _known:
            _known[optimizer] = Stepped(optimizer)
        return _known[optimizer]


class Stepped:
    """One optimizer of others, and the pieces that it steps.

    Attributes:
        entries: of its state, by name, as the trials showed them; trials: by group.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.name = type(optimizer).__name__
        self.entries: dict[str, Entry] = {}
        self.trials: dict[int, Trial] = {}
        self._is_whole = True  # the state's entries are those of whole parameters
        self._pieces: dict[Tensor, nn.Parameter] = {}
        self._stepped: list[tuple[Tensor, nn.Parameter, Tensor]] = []  # while it steps
        self._threads = self._n_entries = 0
        self._before = optimizer.register_step_pre_hook(self._begin).id
        self._after = optimizer.register_step_post_hook(self._end).id
        optimizer.register_state_dict_post_hook(self._make_whole)
        optimizer.register_load_state_dict_post_hook(self._loaded)

    def stay_innermost(self, optimizer: torch.optim.Optimizer) -> None:
        """Let other hooks of a step see the parameters."""
        optimizer._optimizer_step_pre_hooks.move_to_end(self._before)  # type: ignore[attr-defined]
        hooks: Any = optimizer._optimizer_step_post_hooks
        hooks.move_to_end(self._after, last=False)

    # The step

    def _begin(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        params = params_of(optimizer)
        owners = engines_of(params)
        engines = [e for e in dict.fromkeys(owners) if e is not None]
        if not any(map(_needs_hooks, engines)):
            return None
        given = {**dict(zip(("self", "closure"), args)), **kwargs}
        if (closure := given.get("closure")) is not None:
            with torch.enable_grad():
                loss = closure()
            args, kwargs = args[:1], {**kwargs, "closure": lambda: loss}
        self._check(optimizer, engines)
        pieces: dict[Tensor, Any] = {}
        without: set[Tensor] = set()
        for engine in engines:
            engine.before_step(optimizer)
            pieces |= engine.shards.pieces()
            engine.exchange(None)
            without |= engine.without_grad()
        self.cut(optimizer)
        for p, engine in zip(params, owners):
            if engine is None:
                continue
            (value, grad, _), x = pieces[p], self._pieces.get(p)
            if x is None:
                x = self._pieces[p] = _as_piece(value.detach())
            if grad is not None and p not in without:
                x.grad = _divided(grad, engine.control.token_scale, x)
            self._stepped.append((p, x, value))
        for engine in engines:
            engine.begin_step_of_pieces()
        for group in optimizer.param_groups:
            group["params"] = [self._pieces.get(p, p) for p in group["params"]]
        for p, x, _ in self._stepped:
            if entries := optimizer.state.pop(p, None):
                optimizer.state[x] = entries
        n = torch.get_num_threads()
        if n > 1 and any(x.device.type == "cpu" and x.dtype in _HALF for _, x, _ in self._stepped):
            self._threads = n
            torch.set_num_threads(1)
        return args, kwargs

    def _end(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._stepped:
            return
        done, self._stepped = self._stepped, []
        if self._threads:
            torch.set_num_threads(self._threads)
            self._threads = 0
        of: dict[Tensor, Tensor] = {x: p for p, x, _ in done}
        for group in optimizer.param_groups:
            group["params"] = [of.get(x, x) for x in group["params"]]
        n_entries = 0
        for p, x, value in done:
            x.grad = None
            if x.data_ptr() != value.data_ptr():  # the optimizer replaced x.data
                value.detach().copy_(x.detach())
                x.data = value.detach()
            if entries := optimizer.state.pop(x, None):
                n_entries += len(entries)
                optimizer.state[p] = entries
        engines = [e for e in dict.fromkeys(engines_of(of.values())) if e is not None]
        if n_entries != self._n_entries:
            self._n_entries = n_entries
            self._check_trials(optimizer, engines, stepped=True)
        for engine in engines:
            engine.after_step()

    @property
    def is_stepping(self) -> bool:
        """Whether a step has begun and not ended."""
        return bool(self._stepped)

    def _check(self, optimizer: torch.optim.Optimizer, engines: list[Any]) -> None:
        """Refuse what cannot be stepped in pieces."""
        for storage in (e.shards.storage for e in engines if e.shards.storage.steps_later):
            raise RuntimeError(
                f"{self.name}.step: offload={storage.where!r} needs an optimizer that steps on the "
                "host; use fastpar.AdamW, or drop offload"
            )
        if getattr(optimizer, "found_inf", None) is not None:
            refuse_scaler(self.name, engines)
        self._check_trials(optimizer, engines, stepped=False)

    def _check_trials(
        self, optimizer: torch.optim.Optimizer, engines: list[Any], *, stepped: bool
    ) -> None:
        """Where ranks have parts of tensors, refuse an optimizer that needs whole ones, and entries
        that its trial did not show."""
        shared = [engine for engine in engines if engine.shares]
        if not shared:
            return
        try:
            self.learn(optimizer, in_pieces=True)
            if stepped and self.strange(optimizer):
                self.trials.clear()  # an option was changed
                self.learn(optimizer, in_pieces=True)
                if names := self.strange(optimizer):
                    raise NotElementwise(
                        f"its state has '{names[0]}', unlike in the trial of {_STEPS} steps"
                    )
        except NotElementwise as why:
            raise RuntimeError(
                f"{self.name}.step: {self.name} is not elementwise, as {why}, so it cannot run "
                f"with {shared[0].sharing}; use an elementwise optimizer (fastpar.AdamW, or "
                "fastpar.Muon, which gathers matrices), or zero_stage=0 without tp"
            ) from why.__cause__

    def strange(self, optimizer: torch.optim.Optimizer) -> list[str]:
        """Entries of its state that are not as in the trial."""
        return [
            name
            for p in params_of(optimizer)
            for name, value in optimizer.state.get(p, {}).items()
            if value is not None and name not in OURS
            if name not in self.entries or not self.entries[name].fits(value, self._piece(p))
        ]

    def _piece(self, p: Tensor) -> Tensor:
        """What a step changes."""
        engine = engine_of_parameter(p)
        if p in self._pieces or engine is None or not engine.shares:
            return self._pieces.get(p, p)
        return engine.shards.piece(p).param

    # The trial

    def learn(self, optimizer: torch.optim.Optimizer, *, in_pieces: bool) -> None:
        """Try the groups that were not tried yet.

        Args:
            in_pieces: its parameters are split over ranks.
        Raises:
            NotElementwise: then; the text says why.
        """
        for i, group in enumerate(optimizer.param_groups):
            known = self.trials.get(i)
            if known is None or in_pieces > known.in_pieces:
                self.trials[i] = self._try(optimizer, group, in_pieces)

    def _try(
        self, optimizer: torch.optim.Optimizer, group: dict[str, Any], in_pieces: bool
    ) -> Trial:
        runs: list[int | None] = [None]  # of whole tensors, or of one half of each
        if in_pieces and type(optimizer) not in _KNOWN:
            runs += [0, 1]
        first: set[str] = set()
        counts: list[str] = []
        kinds = {(p.device.type, p.dtype): p.device for p in group["params"]}
        for kind, dtype in sorted(kinds, key=repr):
            device = torch.device("cpu") if kind == "meta" else kinds[kind, dtype]
            try:
                inner, first, before = _step_runs(optimizer, group, runs, device, dtype)
            except NotElementwise:
                raise
            except Exception as error:
                raise NotElementwise(f"it cannot step a part of a tensor ({error})") from error
            x = inner.param_groups[0]["params"][0]
            kept = {n: v for n, v in inner.state.get(x, {}).items() if v is not None}
            entries = {name: Entry.of(value, x) for name, value in kept.items()}
            for name, entry in entries.items() if in_pieces else ():
                if entry.kind not in (Tensor, bool, int, float):
                    raise NotElementwise(f"it keeps a {entry.kind.__name__} as '{name}'")
            self.entries |= entries
            first &= entries.keys()
            after = options_of(inner.param_groups[0])
            counts = [n for n, v in before.items() if v != repr(after[n])]
        return Trial(in_pieces, frozenset(first), tuple(counts))

    # State

    def block(self, name: str) -> int:
        """1: an entry has the parameter's elements; 0: every rank has all of it."""
        entry = self.entries.get(name)
        return int(name in OF_WEIGHTS if entry is None else entry.like)

    def _loaded(self, optimizer: torch.optim.Optimizer) -> None:
        self._is_whole = True

    def cut(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep this rank's part of entries that were loaded, or made in the constructor.

        Raises:
            RuntimeError: they are not this optimizer's, of these parameters.
        """
        if not self._is_whole:
            return
        new: dict[Tensor, dict[str, Any]] = {}
        for p, engine in _shared(optimizer):
            for name, value in optimizer.state.get(p, {}).items():
                new.setdefault(p, {})[name] = self._part_of(name, value, p, engine)
        for p, entries in new.items():
            optimizer.state[p] = entries
        self._is_whole = False

    def _part_of(self, name: str, value: Any, p: Tensor, engine: Any) -> Any:
        shape, whole = getattr(value, "shape", None), engine.shards.whole_shape(p)
        if self.block(name) and shape == whole:
            return engine.shards.shard_of(value, p)
        if self.block(name) and shape == p.shape:  # made by the constructor, of a slice along tp
            _, start, stop = engine.shards.place(p)
            return value.reshape(-1)[start:stop].clone() if engine.stage.shards else value
        if self.block(name) or name not in {*self.entries, *OURS}:
            raise RuntimeError(
                f"{self.name}.step: expected the state of {self.name} for parameter "
                f"'{engine.shards.name_of(p)}' of shape {list(whole)}, got {name} of "
                f"shape={list(shape or ())}; load the state_dict() that was saved with this model "
                "and these options"
            )
        return value

    def _make_whole(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> Any:
        """Hook of state_dict(). Ranks: all, if parameters are sharded or split."""
        if self._is_whole:
            return None
        places = {p: i for i, p in enumerate(params_of(optimizer))}
        state = dict(saved["state"])
        for p, engine in _shared(optimizer):
            whole: dict[str, Any] = {}
            for name, value in state.get(places[p], {}).items():
                joins = isinstance(value, Tensor) and self.block(name)
                whole[name] = engine.shards.full(value, p).cpu() if joins else value
            if whole:
                state[places[p]] = whole
        return {**saved, "state": state}


def _shared(optimizer: torch.optim.Optimizer) -> list[tuple[Tensor, Any]]:
    """(parameter, engine) of those of which this rank has a part."""
    params = params_of(optimizer)
    owners = zip(params, engines_of(params))
    return [(p, engine) for p, engine in owners if engine is not None and engine.shares]


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """A group without its parameters."""
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def _divided(grad: Tensor, tokens: Tensor | None, x: Tensor) -> Tensor:
    """The gradient of one of `tokens` tokens in the dtype of x; divided in fp32."""
    if tokens is None and grad.dtype == x.dtype:
        return grad
    if tokens is not None:
        wide = torch.promote_types(grad.dtype, torch.float32)
        grad = grad.to(wide) * (1.0 / tokens.to(grad.device, torch.float32))
    return grad.to(x.dtype).view(x.shape)


# The trial


class NotElementwise(Exception):  # noqa: N818 - a verdict, not a failure
    """Why an optimizer cannot step pieces."""


def _copy_of(
    optimizer: torch.optim.Optimizer, options: dict[str, Any], params: list[Tensor]
) -> torch.optim.Optimizer:
    """An optimizer like this one, of other parameters, without its hooks: made by its class, or a
    copy if the class takes other arguments than groups."""
    groups = [{**copy.deepcopy(options), "params": params}]
    own = ("defaults", "param_groups", "state", "step")  # a schedule of learning rates wraps step
    kept = {n: v for n, v in vars(optimizer).items() if n not in own and n[:11] != "_optimizer_"}
    try:
        make: Any = type(optimizer)
        made: Any = make(groups)
        kept = {n: v for n, v in kept.items() if isinstance(v, (bool, int, float, str))}
    except TypeError:
        made = object.__new__(type(optimizer))
        rest = {n: v for n, v in optimizer.state.items() if not isinstance(n, Tensor)}
        kept |= {"defaults": optimizer.defaults, "state": defaultdict(dict, rest)}
        made.__setstate__({**copy.deepcopy(kept), "param_groups": groups})
        return made
    vars(made).update(kept)
    return made


def _step_runs(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    runs: list[int | None],
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[torch.optim.Optimizer, set[str], dict[str, str]]:
    """Step the tensors of the trial in each run; returns the first one's optimizer, its entries
    after one step, and its options as they were before.

    Raises:
        NotElementwise: another run has other bits.
    """
    options = options_of(group)
    if isinstance(options.get("lr"), (float, int, Tensor)):
        options["lr"] = options["lr"] * 0.0 + 0.1  # so that each step can be seen
    values, *gradients = [
        [x.view(s) if run is None else x[run] for run in runs for x, s in zip(each, _SHAPES)]
        for each in _draws(device, dtype)
    ]
    n = len(_SHAPES)
    params: list[Tensor] = [_as_piece(x.clone()) for x in values]
    of_runs = [params[i : i + n] for i in range(0, len(params), n)]
    on_gpu = []
    if device.type == "cuda":
        on_gpu = [torch.cuda.current_device() if device.index is None else device.index]
    first: set[str] = set()
    with _TRIAL, torch.random.fork_rng(on_gpu), _one_thread():
        inners = [_copy_of(optimizer, options, xs) for xs in of_runs]
        before = {k: repr(v) for k, v in options_of(inners[0].param_groups[0]).items()}
        for i, grads in enumerate(gradients):
            for x, grad in zip(params, grads):
                x.grad = grad.clone()
            for inner in inners:
                inner.step()
            if i == 0:
                first = set(inners[0].state.get(params[0], {}))
            for each in zip(*of_runs):
                _compare(each, [inner.state.get(x, {}) for inner, x in zip(inners, each)])
            _compare([], [_of_no_parameter(inner) for inner in inners])
    return inners[0], first, before


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """See "One thread" above."""
    n = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n)


def _draws(device: torch.device, dtype: torch.dtype) -> Iterator[list[Tensor]]:
    """The values of the trial's tensors, then the gradients of each step: two halves, [2, N / 2],
    of other sizes, signs and zeros."""
    random = torch.Generator("cpu").manual_seed(0)
    large = 30.0 if dtype == torch.float16 else 1e3  # its square fits
    sizes = (1.0, -large), (large, 1e-3), (0.0, 1.0), (1e-3, -large), (1.0, 0.0)
    for step in range(_STEPS + 1):
        scale = torch.tensor(sizes[step % len(sizes)], dtype=torch.float32, device="cpu")[:, None]
        each = []
        for shape in _SHAPES:
            half = math.prod(shape) // 2
            x = torch.randn(2, half, generator=random, dtype=torch.float32, device="cpu")
            each.append(((x.abs() if step % 3 == 1 else x) * scale).to(device, dtype))
        yield each


def _of_no_parameter(inner: torch.optim.Optimizer) -> dict[str, Any]:
    """Numbers that an optimizer keeps in its groups, attributes and state of no parameter."""
    rest = {str(key): value for key, value in inner.state.items() if not isinstance(key, Tensor)}
    return {**vars(inner), **options_of(inner.param_groups[0]), **rest}


def _compare(xs: Sequence[Tensor], states: list[dict[str, Any]]) -> None:
    """Refuse if other runs than the first have other values of a tensor (none: only state), or
    other state."""
    values = [{"": x} for x in xs] or [{} for _ in states]
    whole, *others = ({**x, **state} for x, state in zip(values, states))
    for name, value in whole.items() if others else ():
        parts = [other.get(name) for other in others]
        if xs and isinstance(value, Tensor) and value.shape == xs[0].shape:
            flat = [x.detach().flatten() for x in parts if isinstance(x, Tensor)]
            same = _are_equal(torch.cat(flat) if flat else None, value.detach().flatten())
        else:
            same = all(_are_equal(part, value) for part in parts)
        if not same:
            what = f"'{name}' of its state" if name else "its step"
            raise NotElementwise(f"{what} is not the same for two halves of a tensor as for all")


def _are_equal(a: Any, b: Any) -> bool:
    """Whether two values of the same kind are equal; tensors in their bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        bits = [x.detach().reshape(-1).view(torch.uint8) for x in (a, b)]
        return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*bits)
    return a == b if isinstance(a, (bool, int, float)) else True
