"""Finds out what a foreign module computes, by comparing a copy of it with a formula.

[Note: seen to compute] Names do not say whether an attention is causal, has a window or a clamp.
So a part that looks like GPT-2's is copied and compared with the formula that it should compute:
outputs and gradients, in evaluation and in training, for one token up to the model's number of
positions, for values of 1 and of 1e11. Equal formulas differ by rounding; a part that rounds to
fp32 inside stays below the bound of 1e-5 of the largest value, a different formula is far above.
Each module runs with its own buffers and settings; equal modules run once.

[Note: cheap copies] A copy's linear layers are replaced by ones that mix two columns each: they
distinguish formulas as well, without the time and memory of large products. A block's attention
and MLP that were proven already are replaced by one-line functions: what is left to prove is how
the block combines them.

[Note: places of dropout] In a copy, dropout has masks that depend only on the number of elements,
in F.dropout and inside scaled_dot_product_attention alike, and each rate is a different number. So
the copy and the formula agree only if dropout is in the same places, and the rates seen show which
attribute sets which rate. A module that draws other random numbers is left unchanged. That shows in
the states of the generators, which all threads share; if torch's has changed, the copy runs again
with its operations observed (Draws), because another thread may have drawn.
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fastpar.foreign.swap import MODULE_FIELDS, Conditions, restore, settings_in, settings_of
from fastpar.nn.modules import is_conv1d, is_linear

Formula = Callable[[Any, Tensor], Tensor]
LARGE = 1e11
SIZES = ((2, 9, False), (1, 1, False), (3, 17, True), (1, 23, True))  # B, T, with large values
TOLERANCE = 1e-5
LONGEST = 1024  # tokens, if the model does not say how many it takes
# Most scores over all heads that a copy may hold at once, in elements.
SCORES = 64 * 2**20
TRIES = 4  # another thread may draw random numbers of Python or numpy at the same time


class UnprovenError(Exception):
    """The module is not what it looks like; the message says why."""


class _Mixed(nn.Linear):
    """A Linear that is cheap to run in a copy: [Note: cheap copies]."""

    def __init__(self, inputs: int, outputs: int):
        nn.Module.__init__(self)
        self.in_features, self.out_features = inputs, outputs
        generator = torch.Generator().manual_seed(inputs * 31 + outputs)
        self.columns = torch.randint(inputs, (2, outputs), generator=generator, device="cpu")
        self.factors = (
            torch.randn(3, outputs, generator=generator, dtype=torch.float64, device="cpu") * 0.7
        )
        # A module that uses the weight directly cannot be checked.
        self.weight = nn.Parameter(torch.empty(0, inputs))
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        first, second, bias = self.factors.to(x.dtype)
        return x[..., self.columns[0]] * first + x[..., self.columns[1]] * second + 0.1 * bias


class StandIn(nn.Module):
    """Replaces a module in a copy by a function that depends on its name: [Note: cheap copies]."""

    def __init__(self, name: str, width: int):
        super().__init__()
        self.mixed = _Mixed(width, width)
        self.slope = 0.5 + len(name) / 8

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if any(value is not None and value is not False for value in (*args, *kwargs.values())):
            raise UnprovenError("calls its parts with arguments besides x")
        return F.silu(self.mixed(x) * self.slope)


class Masks(TorchFunctionMode):
    """Records the rates and sizes of dropout calls: [Note: places of dropout]."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, float]] = []

    def drop(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False):
        if not training or p == 0.0:
            return x
        self.seen.append((x.numel(), p))
        generator = torch.Generator().manual_seed(x.numel())
        keep = (
            torch.rand(x.numel(), generator=generator, dtype=torch.float32, device="cpu").view(
                x.shape
            )
            >= p
        )
        return x * keep.to(x.dtype) / (1.0 - p)

    def attend(
        self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **rest
    ):
        if not dropout_p or attn_mask is not None or rest.get("enable_gqa"):
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **rest
            )
        scores = query @ key.transpose(-2, -1) * (scale or query.shape[-1] ** -0.5)
        if is_causal:
            ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cpu")
            scores = scores.masked_fill(~ones.tril(), float("-inf"))
        return self.drop(scores.softmax(-1), dropout_p) @ value

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (F.dropout, torch.dropout):
            if "train" in kwargs:
                kwargs["training"] = kwargs.pop("train")
            return self.drop(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self.attend(*args, **kwargs)
        return func(*args, **kwargs)


class Draws(TorchDispatchMode):
    """Observes whether this thread may draw from torch's generator: [Note: places of dropout].

    Attributes:
        seen: whether an operation drew from it, or an operation was not torch's.
    """

    seen = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        schema = func._schema.arguments
        given = {a.name: a.default_value for a in schema if a.has_default_value()}
        given |= dict(zip((a.name for a in schema), args)) | kwargs
        # Attention without dropout has the tag but draws nothing.
        draws = given.get("generator") is None and given.get("dropout_p", 1.0) != 0.0
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        self.seen |= (seeded and draws) or func.namespace not in ("aten", "prim", "prims")
        return func(*args, **kwargs)


@contextlib.contextmanager
def on_the_cpu() -> Iterator[None]:
    """Runs copies on the CPU, whatever torch's default device is, with one thread: they are small,
    and on a busy machine more threads would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_num_threads(threads)


def features(layer: Any) -> tuple[int, int]:
    """Inputs and outputs of a linear layer."""
    rows, columns = layer.weight.shape
    return (rows, columns) if is_conv1d(layer) else (columns, rows)


def twin_of(
    module: nn.Module, instead: Mapping[nn.Module, nn.Module] = {}, keep: Iterable[Any] = ()
) -> Any:
    """A runnable copy of a module, in fp64 on the CPU, without hooks and with random weights.

    instead: part -> its replacement; keep: objects to share rather than copy.
    """
    tensors = [*module.parameters(), *module.buffers()]
    if any(t.is_meta for t in tensors):
        raise UnprovenError("is on the meta device: load its weights first")
    linear = [(name, part) for name, part in module.named_modules() if is_linear(part)]
    memo: dict[int, Any] = {id(value): value for value in keep}
    for _, part in linear:
        memo[id(part)] = _Mixed(*features(part)).train(part.training)
    memo |= {id(part): other.train(part.training) for part, other in instead.items()}
    twin: Any = copy.deepcopy(module, memo)
    generator = torch.Generator("cpu").manual_seed(0)
    for part in twin.modules():
        restore(part)
        for key, value in vars(part).items():
            if key.endswith("_hooks") and hasattr(value, "clear"):
                value.clear()
    twin = twin.cpu().double()
    with torch.no_grad():
        for p in twin.parameters():
            p.requires_grad_(False)
            p.normal_(0.0, p.shape[-1] ** -0.5 if p.dim() else 1.0, generator=generator)
    return twin


def without_draws(call: Callable[[], Any]) -> tuple[Any, Masks]:
    """Calls a function; returns its result and its dropouts: [Note: places of dropout].

    Raises:
        UnprovenError: it draws other random numbers.
    """
    for attempt in range(TRIES):
        masks, draws, before = Masks(), Draws(), random_states()
        with masks, draws if attempt else contextlib.nullcontext():
            result = call()
        after = random_states()
        if after == before or (attempt and not draws.seen and after[1:] == before[1:]):
            return result, masks
    raise UnprovenError("draws random numbers other than dropout's")


def run(twin: Any, x: Tensor, of: Formula | None = None) -> tuple[Tensor, Tensor, Masks]:
    """The output of a copy's own forward, or of a formula, and the gradient of x."""
    x = x.clone().requires_grad_(torch.is_grad_enabled())
    y, masks = without_draws(lambda: (of or type(twin).forward)(twin, x))
    y = y[0] if isinstance(y, tuple) else y
    if not isinstance(y, Tensor) or not y.is_floating_point():
        raise UnprovenError("computes something else than its parts' names suggest")
    dx = torch.zeros((), dtype=torch.float32, device="cpu")
    if torch.is_grad_enabled():
        generator = torch.Generator().manual_seed(1)
        dy = torch.randn(y.shape, dtype=y.dtype, generator=generator, device="cpu")
        # Not grad(y, x, dy), which imports sympy.
        dx = torch.autograd.grad((y * dy).sum(), x)[0]
    return y.detach(), dx, masks


def differ(got: Tensor, want: Tensor) -> bool:
    """Whether two tensors differ by more than rounding."""
    if got.shape != want.shape or bool(got.isnan().any()):
        return True
    return bool((got - want).abs().max() > TOLERANCE * want.abs().max())


def same(twin: Any, x: Tensor, formula: Formula, own: Formula | None = None) -> None:
    """Raises UnprovenError if the copy computes something else than the formula."""
    for got, want in zip(run(twin, x, own)[:2], run(twin, x, formula)[:2]):
        if differ(got, want):
            raise UnprovenError("computes something else than its parts' names suggest")


def tokens(B: int, T: int, width: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random values [B, T, width], the same in every call."""
    generator = torch.Generator().manual_seed(B * 10_007 + T)
    return (
        torch.randn(B, T, width, dtype=torch.float64, generator=generator, device="cpu").to(dtype)
        + 0.5
    )


def set_rates(twin: nn.Module) -> dict[float, str]:
    """Sets a different rate in each nn.Dropout, except where fastpar draws masks; rate -> name."""
    rates: dict[float, str] = {}
    for holder in twin.modules():
        for name, part in holder.named_children():
            ours = name == "attn_dropout" and type(holder).__module__.startswith("fastpar.")
            if isinstance(part, nn.Dropout) and not ours:
                part.p = round(0.11 + 0.013 * len(rates), 4)
                rates[part.p] = name
    return rates


def places_of_dropout(module: nn.Module, width: int, heads: int) -> dict[str, str | None]:
    """The names of the nn.Dropout or number for the probabilities' rate, and of the nn.Dropout for
    the output's.

    Raises:
        UnprovenError: dropout elsewhere, or with a rate from anything else.
    """
    twin = twin_of(module).train()
    names = set_rates(twin)
    B, T = 2, 9 if 9 * heads != width else 10
    x, places = tokens(B, T, width), {B * heads * T * T: "probs", B * T * width: "resid"}

    def rates() -> dict[str, float]:
        seen = run(twin, x)[2].seen
        found = {places.get(size, ""): p for size, p in seen}
        if "" in found or len(found) != len(seen):
            raise UnprovenError("has dropout in other places than GPT-2")
        return found

    found = rates()
    resid = names.get(found.get("resid", 0.0))
    if "resid" in found and resid is None:
        raise UnprovenError("drops its output at a rate that no nn.Dropout sets")
    probs = names.get(found.get("probs", 0.0))
    if probs is None:
        for name, value in list(vars(twin).items()):
            if type(value) in (int, float) and 0 <= value < 1:
                setattr(twin, name, 0.29)
                with contextlib.suppress(Exception):  # not a rate
                    probs = name if rates().get("probs") == 0.29 else probs
                setattr(twin, name, value)
        if probs is None and "probs" in found:
            why = "drops attention probabilities at a rate that none of its attributes sets"
            raise UnprovenError(why)
    return {"probs": probs, "resid": resid}


def prove(
    module: nn.Module,
    width: int,
    formula: Formula,
    *,
    own: Formula | None = None,
    small: float = 1.0,
    positions: int | None = None,
    long: bool = True,
    brief: bool = False,
    heads: int = 1,
    rate: str | None = None,
    stand_ins: Iterable[str] = (),
    keep: Iterable[Any] = (),
) -> int | None:
    """Compares a module with a formula; see [Note: seen to compute].

    Args:
        own: how to run the copy; default: its class's forward(x).
        small: the size of small values.
        positions: the most tokens that the model takes, if known.
        long: whether to compare that many.
        brief: compare a few tokens with small values only, for modules known by their code.
        heads: of attention inside, whose scores take memory.
        rate: the attribute or nn.Dropout that sets the probabilities' dropout.
        stand_ins: parts that are proven already, see [Note: cheap copies].
        keep: objects that the copy shares.
    Returns:
        The most tokens that were compared; None without `long`.
    Raises:
        UnprovenError: it computes something else, draws random numbers or changes itself.
    """
    instead = {module.get_submodule(name): StandIn(name, width) for name in stand_ins}
    twin = twin_of(module, instead, keep)
    settings = attributes(twin)
    ends = [b.shape[-1] for b in twin.buffers() if b.dim() >= 2]
    most = min([positions or LONGEST, *ends])
    for training, rates in ((False, False), (True, False), (True, True)):
        twin.train(training)
        _clear_rates(twin)
        if rates:
            set_rates(twin)
        for B, T, large in SIZES[: 1 if brief else None]:
            # A kernel's gradients of one-hot probabilities are noise.
            with torch.set_grad_enabled(training and not large):
                x = tokens(B, min(T, most), width) * (LARGE if large else small)
                same(twin, x, formula, own)
    _clear_rates(twin)
    number = vars(twin).get(rate)
    if number is not None:
        setattr(twin, str(rate), 0.0)
    reached = None
    if long:
        twin, reached = twin.float(), 0
        for longest in _lengths(twin, positions, heads):
            try:
                for training in (False, True):
                    twin.train(training)
                    with torch.no_grad():
                        x = tokens(1, longest, width, torch.float32) * small
                        same(twin, x, formula, own)
            except UnprovenError:
                raise
            except Exception as error:  # too long for its mask
                last: Exception = error
                continue
            reached = longest
            break
        if not reached:
            raise last
    if number is not None:
        setattr(twin, str(rate), number)
    if attributes(twin) != settings:
        raise UnprovenError("its forward changes its own attributes")
    return reached


def _lengths(twin: nn.Module, positions: int | None, heads: int) -> list[int]:
    """Numbers of tokens to try, the largest first."""
    most = int((SCORES / heads) ** 0.5)
    ends = {b.shape[-1] for b in twin.buffers() if b.dim() >= 2}
    wanted = {positions or LONGEST, *ends, 512, 256, 128, 64, 32, 16, 8}
    return sorted({min(n, most) for n in wanted if n <= max(positions or LONGEST, 23)})[::-1]


def _clear_rates(twin: nn.Module) -> None:
    for part in twin.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0


def attributes(twin: nn.Module) -> list[Any]:
    """Attributes of a copy's modules that are not tensors, modules or rates."""
    kinds = (bool, int, float, str, type(None), tuple)
    return [
        (name, key, value)
        for name, part in twin.named_modules()
        for key, value in sorted(vars(part).items())
        if isinstance(value, kinds) and key not in ("p", "training")
    ]


def random_states() -> tuple[Any, ...]:
    """The states of the generators of torch, Python and numpy, for comparison."""
    numpy: Any = sys.modules.get("numpy")
    legacy = () if numpy is None else numpy.random.get_state(legacy=True)
    parts = (legacy[1].tobytes(), legacy[2]) if legacy else ()
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), parts


def words_of(error: Exception) -> str:
    """Why a module is left unchanged."""
    if isinstance(error, UnprovenError):
        return str(error)
    words = str(error).splitlines()
    return f"could not be checked: {type(error).__name__}" + (f": {words[0]}" if words else "")


def conditions_of(
    module: nn.Module, options: dict[str, Any], used: tuple[str, ...], tokens: int | None
) -> Conditions:
    """The conditions of the proof: the module's settings, and its parts other than `used`.

    Raises:
        UnprovenError: a part whose effect is unknown.
    """
    parts = {name: type(part) for name, part in module.named_children() if name not in used}
    for name, kind in parts.items():
        if kind not in (nn.Dropout, nn.Identity):
            raise UnprovenError(f"has a part of unknown use: {name}")
    settings = settings_of(module)
    for looked_at in ("n_head", options.get("probs")):
        settings.pop(str(looked_at), None)  # read in every call, not just compared
    holders = {
        name: vars(value)
        for name, value in vars(module).items()
        if name not in MODULE_FIELDS
        and hasattr(value, "__dict__")
        and not isinstance(value, Tensor | nn.Module | type)
    }
    for name, values in holders.items():
        settings |= {f"{name}.{key}": value for key, value in settings_in(values).items()}
    by_part = {"": settings}
    activation = options.get("activation")
    if activation is not None:
        by_part[activation] = settings_of(getattr(module, activation))
    tensors = {**vars(module), **module._buffers}
    buffers = {k: v.detach().cpu().clone() for k, v in tensors.items() if isinstance(v, Tensor)}
    return Conditions(by_part, parts, buffers, tokens)
