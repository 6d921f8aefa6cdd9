"""Plans: what the ranks of the axis tp split of a model that does not say so itself.

    parallelize(model, mesh, tp_plan={
        "*.attn.c_attn": Column(groups=3), "*.attn.c_proj": Row(), "*.attn": Divide("num_heads"),
        "*.c_fc": "column", "*.c_proj": "row", "*wte": "vocab", "lm_head": "head",
        "*.scale": Replicate(),
    })

A plan maps patterns (of fnmatch: * is any text, dots too) on the names of modules and parameters to
styles. Without one, transformers' GPT-2 and models of nanoGPT's shape get GPT2 or NANOGPT of this
file. What the plan does not name is left: every rank has it whole and computes the same with it.

[Note: regions] Where a column or row layer is split, its parent works on a part of the features.
A parameter below the parent has no default: whether its gradient is whole there, only the author
knows. Dropout there would draw the same mask on every rank for other features, so it is refused
unless the plan says that it works on whole tokens, or fastpar.patch has replaced it.

[Note: tokens] Sequence parallelism needs to know where tokens are cut and joined: Enter, Tokens and
Leave. With them in a plan it is on by default, and then every parameter has to be named, because a
norm that works on some of the tokens and is taken for whole trains, and trains wrongly.

[Note: generators] Dropout that torch draws must fall on the same elements on all ranks of tp, so
their generators have to agree: seed by the rank along dp, not by the global one.

[Note: sequences] Ranks of cp share out the sequences of a patched GPT-2 of transformers:

    model(input_ids, labels)     each rank's tokens of every row, their position_ids and targets
        its own forward          swapped attention sees the tokens of all ranks
    outputs                      the loss of all tokens, their logits

Hooks before and after the model's forward cut and join: the caller sees one process. Labels are
shifted before they are cut, and the sum of losses is divided by the targets of the whole batch.
Logits beside a loss are joined in evaluation only: in training nobody reads them, and they are the
largest tensor there is.

A model is told its positions by position_ids, or, where it is one of ours, by context_parallel().
Any other one would give every rank the positions from 0 on, and is refused.
"""

from __future__ import annotations

import difflib
import fnmatch
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from fastpar.axes.context.sequences import (
    ContextParallel,
    gather_tokens,
    sum_of_parts,
)
from fastpar.axes.tensor.declared import add_state, tp_method
from fastpar.axes.tensor.functional import TensorParallel, gather, scatter
from fastpar.comm.mesh import Mesh
from fastpar.foreign.fused import Attention, GPT2Attention, Model
from fastpar.foreign.swap import swap_of
from fastpar.nn import tp_layers
from fastpar.nn.modules import LinearCrossEntropyLoss
from fastpar.nn.tp_layers import TokenDropout, check_generators, convert, share_rows
from fastpar.sharding.placements import Partial, Replicate, Shard, State

Undo = Callable[[], None]


@dataclass(frozen=True)
class Column:
    """A linear layer (nn.Linear, transformers' Conv1D) split by its output features.

    groups: equal parts of the output that are each split alike: 3 for a fused q, k and v.
    """

    groups: int = 1


@dataclass(frozen=True)
class Row:
    """A linear layer split by its input features; the bias is added once."""


@dataclass(frozen=True)
class Vocab:
    """An nn.Embedding split by its rows."""


@dataclass(frozen=True)
class Head:
    """An nn.Linear over classes split by them, whose logits are joined.

    Or the fastpar.nn.LinearCrossEntropyLoss that is given such a layer's weight, or a tied
    embedding's: it never joins them. transformers' GPT-2 does so after fastpar.patch(fused_loss=1).
    """


@dataclass(frozen=True, init=False)
class Divide:
    """A module's integers that become those of one rank: its number of heads, a size to split by.

    heads: which of them is the number of attention's heads: a tp that does not divide it pads the
        heads, in the split layers below the module. None: tp has to divide.
    patched: the module's own forward takes sizes from elsewhere, and fastpar.patch has to replace
        it first.
    """

    names: tuple[str, ...]
    heads: str | None
    patched: bool

    def __init__(self, *names: str, heads: str | None = None, patched: bool = False) -> None:
        if heads is not None and heads not in names:
            raise ValueError(
                f"Divide: expected heads to be one of {', '.join(names)}, got heads={heads}; name "
                "it among them"
            )
        vars(self).update(names=names, heads=heads, patched=patched)  # frozen for others

    def of_rank(self, module: nn.Module, ranks: int) -> dict[str, int | None]:
        """The integers of one rank by name; None for what does not divide."""
        values = {name: getattr(module, name, None) for name in self.names}
        heads = values.get(self.heads) if self.heads else None
        if not isinstance(heads, int) or not 0 < ranks <= heads:
            heads = 0
        padded = -(-heads // ranks)

        def of(value: Any) -> int | None:
            if not isinstance(value, int):
                return None
            if heads and value % heads == 0:
                return value // heads * padded
            return value // ranks if value % ranks == 0 else None

        return {name: of(value) for name, value in values.items()}


@dataclass(frozen=True)
class Tokens:
    """A norm or dropout outside of split layers: under sequence parallelism it sees T/tp tokens."""


@dataclass(frozen=True)
class Enter:
    """A module that sees all tokens, [..., T, C]; from here on a rank has T/tp of them."""


@dataclass(frozen=True)
class Leave:
    """A module that sees T/tp tokens; from here on every rank has all of them."""


Style = Column | Row | Vocab | Head | Divide | Tokens | Enter | Leave | State
Plan = Mapping[str, "Style | str"]
_STYLES = (Column, Row, Vocab, Head, Tokens, Enter, Leave, Replicate, Partial)
_SHORT: dict[str, Style] = {style.__name__.lower(): style() for style in _STYLES}

GPT2: dict[str, Style] = {
    "*wte": Vocab(),
    "*wpe": Replicate(),
    "*drop": Enter(),
    "*.ln_1": Tokens(),
    "*.attn": Divide("num_heads", "split_size", heads="num_heads"),
    "*.attn.c_attn": Column(groups=3),
    "*.attn.c_proj": Row(),
    "*.attn.resid_dropout": Tokens(),
    "*.ln_2": Tokens(),
    "*.mlp.c_fc": Column(),
    "*.mlp.c_proj": Row(),
    "*.mlp.dropout": Tokens(),
    "*ln_f": Leave(),
    "*lm_head": Head(),
}
NANOGPT: dict[str, Style] = {**GPT2, "*.attn": Divide("n_head", heads="n_head", patched=True)}
READY = {"gpt2": GPT2, "nanogpt": NANOGPT}
_NEEDED = [name for name, s in GPT2.items() if isinstance(s, Column | Row | Vocab | Divide)]


class Planned:
    """A plan whose names were found in a model.

    Args:
        why: where the plan comes from, for the report.
        ready: patterns that name nothing are dropped, and are an error otherwise.
    Raises:
        ValueError: a pattern that names nothing, or what another names too; an unknown style.
    """

    def __init__(self, model: nn.Module, plan: Plan, why: str, *, ready: bool = False) -> None:
        self.model, self.why = model, why
        self.modules: dict[str, Style] = {}  # by the names that were found
        self.parameters: dict[str, State] = {}
        modules = [name for name, _ in model.named_modules() if name]
        parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        found_by: dict[str, str] = {}
        for pattern, given in plan.items():
            style = _style(pattern, given)
            names = fnmatch.filter(modules, pattern)
            if isinstance(style, State):
                names += fnmatch.filter(parameters, pattern)
            if not names and not ready:
                near = difflib.get_close_matches(pattern, [*modules, *parameters], 3, 0.4)
                raise ValueError(
                    "parallelize: expected every pattern of tp_plan to name a module, got "
                    f"'{pattern}', which names nothing; "
                    + (f"close to it: {', '.join(near)}" if near else "see model.named_modules()")
                )
            for name in names:
                if name in found_by:
                    raise ValueError(
                        f"parallelize: expected one pattern of tp_plan for '{name}', got "
                        f"'{found_by[name]}' and '{pattern}'; make one of them narrower"
                    )
                found_by[name] = pattern
                if name in parameters:
                    assert isinstance(style, State)
                    self.parameters[name] = style
                else:
                    self.modules[name] = style
        styles = self.modules.values()
        self.cuts_tokens = any(isinstance(style, Tokens | Enter | Leave) for style in styles)
        self._undo: list[Undo] = []
        self.left: list[str] = []

    # What parallelize() does with it, in this order.

    def check(self, tp: TensorParallel) -> None:
        """Raise before anything is changed.

        Raises:
            ValueError: sizes that do not divide; a fused projection without groups; dropout
                that would be wrong; generators that differ.
        """
        for name, style in self.modules.items():
            if isinstance(style, Divide):
                _check_divide(self.model.get_submodule(name), name, style, tp)
            if style == Column() and name.split(".")[-1] == "c_attn":
                raise ValueError(
                    f"parallelize: expected groups of the fused projection '{name}', got Column() "
                    "of one, which would mix queries, keys and values; write Column(groups=3)"
                )
        self._check_dropout(tp)

    def convert(self, tp: TensorParallel) -> None:
        """Give the named modules their parts to play; undo() takes it back."""
        heads = {
            name: getattr(self.model.get_submodule(name), style.heads)
            for name, style in self.modules.items()
            if isinstance(style, Divide) and style.heads
        }
        for name, style in self.modules.items():
            module = self.model.get_submodule(name)
            self._undo += _convert(module, name, style, tp, heads.get(name.rpartition(".")[0], 0))

    def undo(self) -> None:
        """The model is as it was, but for its parameters."""
        while self._undo:
            self._undo.pop()()

    def add_states(
        self,
        states: dict[nn.Parameter, State],
        named: Mapping[nn.Parameter, tuple[str, ...]],
        tp: TensorParallel,
    ) -> None:
        """The states of the parameters that the plan names, and of those that it leaves.

        Raises:
            ValueError: two states for one; one without; a split one that is also used elsewhere.
        """
        for name, p in self.model.named_parameters(remove_duplicate=False):
            if name in self.parameters:
                add_state(states, p, self.parameters[name], name)
        for name, style in self.modules.items():
            state = _state_below(style, tp)
            for below, p in self.model.get_submodule(name).named_parameters():
                if state is not None:
                    add_state(states, p, state, f"{name}.{below}")
        self._check_ties(states)
        for p, names in named.items():
            if p not in states:
                self._leave(p, names[0], states, tp)

    def _leave(
        self, p: nn.Parameter, name: str, states: dict[nn.Parameter, State], tp: TensorParallel
    ) -> None:
        """Leaves a parameter that no pattern names whole, where that is safe: [Note: regions]."""
        if tp.sequence_parallel:
            raise ValueError(
                "parallelize: expected tp_plan to name every parameter under sequence parallelism, "
                f"got none of its patterns for '{name}'; add Tokens() for its module if it works "
                "on a rank's tokens, Replicate() if on all, or pass sequence_parallel=False"
            )
        for region, layer in self._regions():
            if name.startswith(f"{region}." if region else ""):
                raise ValueError(
                    "parallelize: expected a declared state for every parameter beside split "
                    f"layers, got none for '{name}' beside '{layer}'; name it in tp_plan: Shard, "
                    "Replicate (its gradient is whole on every rank) or Partial (a part of it)"
                )
        states[p] = Replicate()
        self.left.append(name)

    def _regions(self) -> Iterator[tuple[str, str]]:
        """Names of the modules around split layers, with those of the layers."""
        for name, module in self.model.named_modules():
            planned = isinstance(self.modules.get(name), Column | Row)
            if planned or isinstance(module, tp_layers.Column | tp_layers.Row):
                yield name.rpartition(".")[0], name

    def _check_ties(self, states: dict[nn.Parameter, State]) -> None:
        """A slice is not used by a module that takes it for the whole."""
        speaking = tuple(
            f"{name}." if name else "" for name, m in self.model.named_modules() if _declares(m)
        )
        for prefix, module in self.model.named_modules():
            for key, p in module._parameters.items():
                name = f"{prefix}.{key}" if prefix else key
                split = p is not None and isinstance(states.get(p), Shard)
                if not split or isinstance(module, tp_layers.Split):
                    continue
                if name not in self.parameters and not name.startswith(speaking):
                    raise ValueError(
                        "parallelize: expected every use of a split parameter in tp_plan, got "
                        f"'{name}', which is tied to one; name '{prefix}' too, as Head() or Vocab()"
                    )

    def _check_dropout(self, tp: TensorParallel) -> None:
        regions = [region for region, _ in self._regions()]
        active = list(_dropouts(self.model))
        for owner, key, by_kernel in active:
            name = f"{owner}.{key}" if key else owner
            beside = any(name.startswith(f"{r}." if r else "") for r in regions)
            named = isinstance(self.modules.get(owner), Tokens | Enter | Leave | Replicate)
            if by_kernel or named or not (beside or tp.sequence_parallel):
                continue
            raise ValueError(
                f"parallelize: expected no dropout that torch draws beside split layers, got it in "
                f"'{name}', the same mask for other features on every rank; run "
                "fastpar.patch(model) first (attention), set it to 0, or name it in tp_plan as "
                "Tokens() if it works on whole features"
            )
        if active:
            tp_layers.check_generators(tp.group, "tp")


def plan_for(model: nn.Module, given: Plan | str | None) -> Planned | None:
    """The plan that is asked for, or the one that fits the model; None if it speaks for itself.

    Raises:
        ValueError: an unknown name, a plan for a model that declares its own states, or one whose
            names are not those of the model.
    """
    if given is None:
        name = _choose(model)
        if name is None:
            return None
        return Planned(model, READY[name], f"plan {name}, chosen for its modules", ready=True)
    if tp_method(model) is not None:
        short = given if isinstance(given, str) else f"{{{', '.join(given)}}}"
        raise ValueError(
            f"parallelize: expected no tp_plan for {type(model).__name__}, which declares its own "
            f"states, got tp_plan={short}; leave it out"
        )
    if isinstance(given, str):
        if given not in READY:
            raise ValueError(
                f"parallelize: expected tp_plan as a mapping or one of {', '.join(READY)}, got "
                f"tp_plan={given}; pass {{pattern: style}}"
            )
        return Planned(model, READY[given], f"plan {given}", ready=True)
    return Planned(model, given, "the given plan")


def _declares(module: nn.Module) -> bool:
    return tp_method(module) is not None or hasattr(module, "tp_states")


def _choose(model: nn.Module) -> str | None:
    """The name of a ready plan."""
    if any(_declares(module) for module in model.modules()):
        return None
    names = [name for name, _ in model.named_modules()]
    if not all(fnmatch.filter(names, pattern) for pattern in _NEEDED):
        return None
    attention = [model.get_submodule(name) for name in fnmatch.filter(names, "*.attn")]
    if all(type(m).__module__ == "transformers.models.gpt2.modeling_gpt2" for m in attention):
        return "gpt2"
    counts = [getattr(m, "n_head", None) for m in attention]
    return "nanogpt" if all(isinstance(n, int) for n in counts) else None


def _style(pattern: str, given: Any) -> Style:
    style = _SHORT.get(given) if isinstance(given, str) else given
    if not isinstance(style, Style):
        raise ValueError(
            f"parallelize: expected a style of tp_plan, got {given!r} for '{pattern}'; use "
            f"{', '.join(_SHORT)}, or Column(groups=...), Divide(...) and Shard(...)"
        )
    return style


def _check_divide(module: nn.Module, name: str, style: Divide, tp: TensorParallel) -> None:
    if style.patched and swap_of(module) is None:
        raise ValueError(
            f"parallelize: expected '{name}' to be patched, got {type(module).__name__}, whose own "
            "forward takes the number of features from its input; run fastpar.patch(model) first"
        )
    for key, local in style.of_rank(module, tp.size).items():
        if local is None:
            raise ValueError(
                f"parallelize: expected tp to divide {key} of '{name}', got tp={tp.size} "
                f"{key}={getattr(module, key, None)}; choose another tp"
            )


def _convert(
    module: Any, name: str, style: Style, tp: TensorParallel, heads: int
) -> Iterator[Undo]:
    """heads: of the attention that the module is a part of, 0 without any."""
    turn = partial(tp_layers.convert, module, name=name)
    if isinstance(style, Column):
        yield turn(tp_layers.ColumnParallelLinear, groups=style.groups, heads=heads)
    elif isinstance(style, Row):
        yield turn(tp_layers.RowParallelLinear, heads=heads)
    elif isinstance(style, Vocab):
        yield turn(tp_layers.VocabParallelEmbedding, all_tokens=True)
    elif isinstance(style, Head) and isinstance(module, LinearCrossEntropyLoss):
        yield turn(tp_layers.VocabParallelLoss, all_tokens=True)
    elif isinstance(style, Head):
        yield turn(tp_layers.VocabParallelLinear, all_tokens=True)
    elif isinstance(style, Tokens) and isinstance(module, _DropoutNd):
        yield turn(tp_layers.TokenDropout)
    elif isinstance(style, Divide):
        for key, local in style.of_rank(module, tp.size).items():
            yield partial(setattr, module, key, getattr(module, key))
            setattr(module, key, local)
    elif isinstance(style, Enter | Leave) and tp.sequence_parallel:
        hook = partial(_enter if isinstance(style, Enter) else _leave_tokens, tp)
        yield module.register_forward_hook(hook).remove


def _enter(tp: TensorParallel, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    if output.shape[-2] % tp.size:
        raise ValueError(
            f"parallelize: expected tp to divide the length of sequences under sequence "
            f"parallelism, got tp={tp.size} T={output.shape[-2]}; pad them, or pass "
            "sequence_parallel=False"
        )
    return scatter(output, -2, tp, partial=False)


def _leave_tokens(tp: TensorParallel, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return gather(output, -2, tp, partial=False)


def _state_below(style: Style, tp: TensorParallel) -> State | None:
    """The state of all parameters below a module of this style; None if it declares its own."""
    if isinstance(style, State):
        return style
    if isinstance(style, Tokens | Leave):
        return tp.per_token
    return Replicate() if isinstance(style, Enter) else None


def _dropouts(model: nn.Module) -> Iterator[tuple[str, str, bool]]:
    """Dropout with a rate above 0: names of modules and, where a number of theirs says it, of that;
    and whether it is that of patched attention, with masks by heads."""
    by_kernel = []
    for name, module in model.named_modules():
        swap = swap_of(module)
        if isinstance(module, Attention) and swap is not None:
            probs = swap.options["probs"]
            source = None if probs is None else getattr(module, probs)
            # A dropout that is neither of the two has no use: nanoGPT's, with torch's attention.
            resid = swap.options["resid"]
            by_kernel += [part for key, part in module.named_children() if key != resid]
            if isinstance(source, float) and source > 0:
                yield name, probs, True
        elif swap is None and not isinstance(module, _DropoutNd):
            for key, value in vars(module).items():
                if re.search("dropout|pdrop", key) and isinstance(value, float) and value > 0:
                    yield name, key, False
    for name, module in model.named_modules():
        if isinstance(module, _DropoutNd) and module.p > 0:
            yield name, "", any(module is source for source in by_kernel)


_LIBRARY = "transformers.models.gpt2.modeling_gpt2"
_HEADS = ("GPT2Model", "GPT2LMHeadModel")
_TOKENS = ("input_ids", "token_type_ids")  # [B, T] each, cut like the labels
_OF_LOSS = ("labels", "shift_labels", "num_items_in_batch", "ignore_index")
_TAKEN = (*_TOKENS, *_OF_LOSS, "return_dict")


def tells_rows(model: nn.Module, mesh: Mesh) -> Callable[[ContextParallel], None] | None:
    """What tells a model of the ranks of cp, which share its rows.

    Raises:
        ValueError: with cp > 1, a model that cannot be told its positions, or is not patched.
    """
    size, own = mesh.size("cp"), getattr(model, "context_parallel", None)
    if size == 1 or callable(own):
        return own
    name = type(model).__name__
    if type(model).__module__ != _LIBRARY or name not in _HEADS:
        raise ValueError(
            f"parallelize: expected a model with context_parallel() for cp={size}, or a patched "
            f"GPT-2 of transformers, which are told the positions of their tokens, got {name}; "
            "load its weights into a fastpar.GPT (fastpar train --init-from), or use tp, which "
            "shares out tokens between layers"
        )
    stock = next(_not_swapped(model), None)
    if stock is not None:
        raise ValueError(
            f"parallelize: expected fastpar.patch(model) before cp={size}, whose attention sees "
            f"the tokens of other ranks, got {name} with its own {stock}; call it, and read its "
            "report for what it has left"
        )
    return SharedRows(model, mesh)


def _not_swapped(model: nn.Module) -> Iterator[str]:
    """The names of a GPT-2's parts that have to be swapped and are not."""
    for name, module in model.named_modules():
        kind = type(module)
        whole = kind.__name__ == "GPT2Model" and not isinstance(module, Model)
        if whole or (kind.__name__.endswith("Attention") and not isinstance(module, GPT2Attention)):
            yield name or kind.__name__


def _feature_dropouts(model: nn.Module) -> Iterator[tuple[str, nn.Dropout]]:
    """Those that work on whole features of tokens; not attention's, which is a number to it."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and not name.endswith("attn_dropout"):
            yield name, module


class SharedRows:
    """The two hooks, and how they are put in place: called with the ContextParallel.

    Raises:
        ValueError: dropout with tp > 1, or from generators that differ between ranks.
    """

    by_row = True  # see ContextParallel
    cp: ContextParallel
    length = 0  # of the rows of the call under way

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self.model, self.tp_size = model, mesh.tp_size
        config: Any = model.config
        self.longest = config.n_positions
        rates = [module.p for _, module in _feature_dropouts(model)]
        self.drops = any(rates) or config.attn_pdrop > 0.0
        if self.drops and mesh.tp_size > 1:
            raise ValueError(
                f"parallelize: expected no dropout in a foreign model with cp={mesh.size('cp')} "
                f"and tp={mesh.tp_size}, got rates of {max(*rates, config.attn_pdrop)}; set them "
                "to 0, or use one of both"
            )

    def __call__(self, cp: ContextParallel) -> None:
        if self.drops:
            check_generators(cp.group, "cp")
        self.cp = cp
        for name, module in _feature_dropouts(self.model):
            convert(module, TokenDropout, name=name)
            share_rows(module, cp)
        for part in self.model.modules():
            if isinstance(part, Model | GPT2Attention):
                share_rows(part, cp)
        self.names = list(inspect.signature(self.model.forward).parameters)
        self.model.register_forward_pre_hook(self.enter, with_kwargs=True)
        self.model.register_forward_hook(self.leave, with_kwargs=True)

    def enter(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        """The arguments of this rank's part."""
        given = {**dict(zip(self.names, args)), **kwargs}
        given = {name: x for name, x in given.items() if isinstance(x, Tensor) or x}
        self._check(model, given)
        ids, cp = given["input_ids"], self.cp
        batch, self.length = ids.shape
        behind = cp.padding(batch, self.length, cp.size * self.tp_size)
        places = torch.arange(self.length + behind, device=ids.device).clamp(max=self.longest - 1)
        given["position_ids"] = cp.slice_rows(places.expand(batch, -1))
        for name in (name for name in _TOKENS if name in given):
            given[name] = cp.slice_rows(F.pad(given[name], (0, behind)))
        if "labels" in given:
            ignored = given.get("ignore_index", -100)
            shifted = given.get("shift_labels")
            if shifted is None:
                shifted = F.pad(given["labels"], (0, 1), value=ignored)[:, 1:]
            given.setdefault("num_items_in_batch", (shifted != ignored).sum())
            mine = cp.slice_rows(F.pad(shifted, (0, behind), value=ignored))
            given["labels"] = given["shift_labels"] = mine
        return (), {**given, "use_cache": False, "return_dict": True}

    def _check(self, model: nn.Module, given: Mapping[str, Any]) -> None:
        name, ids = type(model).__name__, given.get("input_ids")
        where = f"with cp={self.cp.size}"
        beside = [key for key in given if key not in _TAKEN]
        if beside:
            raise ValueError(
                f"{name}: expected no argument but {', '.join(_TAKEN)} {where}, got {beside[0]}; "
                "leave it out, generate and run padded rows in one process, from a checkpoint"
            )
        if ids is None or ids.dim() != 2 or not 1 <= ids.shape[1] <= self.longest:
            shape = None if ids is None else list(ids.shape)
            raise ValueError(
                f"{name}: expected input_ids [B, T] with 1 <= T <= n_positions={self.longest} "
                f"{where}, got input_ids.shape={shape}; crop the rows"
            )
        if "labels" in given:
            asked = inspect.signature(model.loss_function).parameters  # type: ignore[arg-type]
            if not {"shift_labels", "num_items_in_batch"} <= set(asked):
                raise ValueError(
                    f"{name}: expected a loss_function of shift_labels and num_items_in_batch "
                    f"{where}, got one of {', '.join(asked)}; leave labels out, and compute the "
                    "loss of the logits"
                )

    def leave(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
    ) -> Any:
        """The outputs of the whole batch."""
        found, batch = dict(output), len(kwargs["input_ids"])
        if found.get("loss") is not None:
            found["loss"] = sum_of_parts(found["loss"], self.cp)
            if model.training:
                found["logits"] = None
        for name in ("logits", "last_hidden_state"):
            x = found.get(name)
            if x is not None:
                x = gather_tokens(x.flatten(0, 1), batch, self.cp)
                found[name] = x.unflatten(0, (batch, -1))[:, : self.length]
        return type(output)(**found)
