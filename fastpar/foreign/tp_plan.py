"""Plans: how tp ranks split a model that does not declare it itself.

    parallelize(model, mesh, tp_plan={
        "*.attn.c_attn": Column(groups=3), "*.attn.c_proj": Row(), "*.attn": Divide("num_heads"),
        "*.c_fc": "column", "*.c_proj": "row", "*wte": "vocab", "lm_head": "head",
        "*.scale": Replicate(),
    })

A plan maps patterns (of fnmatch: * is any text, including dots) on the names of modules and
parameters to styles. Without a plan, transformers' GPT-2 and models of nanoGPT's shape get GPT2 or
NANOGPT of this file. Modules that no pattern names are replicated: every rank has them whole and
computes the same.

[Note: regions] Around a split column or row layer, its parent works on a slice of the features. A
parameter directly in that parent has no default: only the author knows whether its gradient is
complete there. Dropout there would draw the same mask on every rank for different features, so it
is refused unless the plan says that it works on whole tokens, or fastpar.patch has replaced it.

[Note: tokens] Sequence parallelism needs to know where tokens are split and gathered: Enter, Tokens
and Leave. A plan with them turns it on by default, and then must name every parameter: a norm that
works on a slice of the tokens but is treated as complete trains, with wrong gradients.

[Note: generators] Dropout drawn by torch must hit the same elements on all tp ranks, so their
generators must agree: seed by the dp rank, not by the global rank.

[Note: sequences] cp ranks split the sequences of a patched GPT-2 of transformers:

    model(input_ids, labels)     each rank's tokens of every row, their position_ids and targets
        its own forward          swapped attention sees the tokens of all ranks
    outputs                      the loss of all tokens, their logits

Hooks before and after the model's forward split and gather, so that callers see what one process
would return. Labels are shifted before they are split, and the sum of losses is divided by the
number of targets in the whole batch. Logits next to a loss are gathered in evaluation only: in
training nobody reads them, and they are the largest tensor of all.

A model gets its positions by position_ids or, if it is fastpar's, by context_parallel(). Any other
model would use positions from 0 on every rank, and is refused.
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

    groups: equal sections of the output that are each split: 3 for a fused q, k and v.
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
    """An nn.Linear over classes, split by classes, whose logits are gathered.

    Or the fastpar.nn.LinearCrossEntropyLoss that gets such a layer's weight, or a tied embedding's,
    and never gathers logits. transformers' GPT-2 uses it after fastpar.patch(fused_loss=True).
    """


@dataclass(frozen=True, init=False)
class Divide:
    """Integers of a module to divide by tp: its number of heads, a size to split by.

    heads: which of them is the number of attention heads: if tp does not divide it, heads are
        padded in the split layers below the module. None: tp must divide all.
    patched: the module's own forward takes sizes from elsewhere, so fastpar.patch must have
        replaced it.
    """

    names: tuple[str, ...]
    heads: str | None
    patched: bool

    def __init__(self, *names: str, heads: str | None = None, patched: bool = False) -> None:
        if heads is not None and heads not in names:
            raise ValueError(
                f"Divide: expected heads to be one of {', '.join(names)}, got heads={heads}; add "
                "it to the names"
            )
        vars(self).update(names=names, heads=heads, patched=patched)  # frozen for others

    def of_rank(self, module: nn.Module, ranks: int) -> dict[str, int | None]:
        """The integers of one rank by name; None for those that tp does not divide."""
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
    """A norm or dropout outside split layers: under sequence parallelism it sees T/tp tokens."""


@dataclass(frozen=True)
class Enter:
    """A module that sees all tokens, [..., T, C]; after it a rank has T/tp of them."""


@dataclass(frozen=True)
class Leave:
    """A module that sees T/tp tokens; after it every rank has all of them."""


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
    """A plan matched with a model.

    Args:
        why: the origin of the plan, for the report.
        ready: ignore patterns that match nothing, which are an error otherwise.
    Raises:
        ValueError: a pattern that matches nothing; two patterns for one name; an unknown style.
    """

    def __init__(self, model: nn.Module, plan: Plan, why: str, *, ready: bool = False) -> None:
        self.model, self.why = model, why
        self.modules: dict[str, Style] = {}  # by the names that were found
        self.parameters: dict[str, State] = {}
        modules = [name for name, _ in model.named_modules() if name]
        parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        found_by: dict[str, str] = {}
        for pattern, words in plan.items():
            style = _style(pattern, words)
            names = fnmatch.filter(modules, pattern)
            if isinstance(style, State):
                names += fnmatch.filter(parameters, pattern)
            if not names and not ready:
                near = difflib.get_close_matches(pattern, [*modules, *parameters], 3, 0.4)
                raise ValueError(
                    "parallelize: expected every pattern of tp_plan to match a module, got "
                    f"'{pattern}', which matches nothing; "
                    + (f"similar: {', '.join(near)}" if near else "see model.named_modules()")
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

    # parallelize() calls these methods in this order.

    def check(self, tp: TensorParallel) -> None:
        """Refuses a bad plan before anything is changed.

        Raises:
            ValueError: sizes that tp does not divide; a fused projection without groups; dropout
                that would be wrong; generators that differ.
        """
        for name, style in self.modules.items():
            if isinstance(style, Divide):
                _check_divide(self.model.get_submodule(name), name, style, tp)
            if style == Column() and name.split(".")[-1] == "c_attn":
                raise ValueError(
                    f"parallelize: expected groups for the fused projection '{name}', got "
                    "Column(), which would mix queries, keys and values; write Column(groups=3)"
                )
            if isinstance(style, Column):
                self._check_heads(name, style, tp)
        self._check_dropout(tp)

    def convert(self, tp: TensorParallel) -> None:
        """Converts the named modules; undo() reverts it."""
        heads = {
            name: getattr(self.model.get_submodule(name), style.heads)
            for name, style in self.modules.items()
            if isinstance(style, Divide) and style.heads
        }
        for name, style in self.modules.items():
            module = self.model.get_submodule(name)
            self._undo += _convert(module, name, style, tp, heads.get(name.rpartition(".")[0], 0))

    def undo(self) -> None:
        """Restores the model, except for its parameters."""
        while self._undo:
            self._undo.pop()()

    def add_states(
        self,
        states: dict[nn.Parameter, State],
        named: Mapping[nn.Parameter, tuple[str, ...]],
        tp: TensorParallel,
    ) -> None:
        """Adds the states of the parameters that the plan names, and of all others.

        Raises:
            ValueError: two states for a parameter, or none; a split one that is used elsewhere.
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
        """Replicates a parameter that no pattern names, if that is safe: [Note: regions]."""
        if tp.sequence_parallel:
            raise ValueError(
                "parallelize: expected tp_plan to name every parameter under sequence parallelism, "
                f"got no pattern for '{name}'; add Tokens() for its module if it works on a rank's "
                "tokens, Replicate() if on all, or pass sequence_parallel=False"
            )
        for region, layer in self._regions():
            if name.startswith(f"{region}." if region else ""):
                raise ValueError(
                    "parallelize: expected a declared state for every parameter next to split "
                    f"layers, got none for '{name}' next to '{layer}'; name it in tp_plan: Shard, "
                    "Replicate (every rank has its full gradient) or Partial (a partial sum)"
                )
        states[p] = Replicate()
        self.left.append(name)

    def _regions(self) -> Iterator[tuple[str, str]]:
        """Names of the modules around split layers, and of the layers."""
        for name, module in self.model.named_modules():
            planned = isinstance(self.modules.get(name), Column | Row)
            if planned or isinstance(module, tp_layers.Column | tp_layers.Row):
                yield name.rpartition(".")[0], name

    def _check_ties(self, states: dict[nn.Parameter, State]) -> None:
        """Refuses a module that would use a slice as if it were the whole parameter."""
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
                        "parallelize: expected tp_plan to name every use of a split parameter, got "
                        f"'{name}', which is tied to one; name '{prefix}' too, as Head() or Vocab()"
                    )

    def _check_heads(self, name: str, style: Column, tp: TensorParallel) -> None:
        """Refuses to cut the heads of attention that takes them from its input's features."""
        layer, above = self.model.get_submodule(name), name.rpartition(".")[0]
        divide = self.modules.get(above)
        size = getattr(self.model.get_submodule(above), "head_dim", None)
        features = getattr(layer, "out_features", getattr(layer, "nf", None))
        pads = isinstance(divide, Divide) and divide.heads is not None
        if pads or not size or not isinstance(size, int) or not isinstance(features, int):
            return
        heads, rest = divmod(features, style.groups * size)
        if rest == 0 and heads % tp.size:
            raise ValueError(
                f"parallelize: expected tp to divide the heads of '{name}', got tp={tp.size} "
                f"heads={heads}; choose another tp"
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
                f"parallelize: expected no dropout by torch next to split layers, got '{name}', "
                "which would draw the same mask for different features on every rank; run "
                "fastpar.patch(model) first (attention), set it to 0, or name it in tp_plan as "
                "Tokens() if it works on whole features"
            )
        if active:
            tp_layers.check_generators(tp.group, "tp")


def plan_for(model: nn.Module, plan: Plan | None) -> Planned | None:
    """The given plan, or the one that fits the model; None if the model declares its states.

    Raises:
        ValueError: a plan for a model that declares its own states, or whose names do not match
            the model.
    """
    if plan is None:
        name = _choose(model)
        if name is None:
            return None
        return Planned(model, READY[name], f"plan {name}, chosen for its modules", ready=True)
    if tp_method(model) is not None:
        raise ValueError(
            f"parallelize: expected no tp_plan for {type(model).__name__}, which declares its own "
            f"states, got tp_plan={{{', '.join(plan)}}}; drop tp_plan"
        )
    return Planned(model, plan, "the given plan")


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


def _style(pattern: str, words: Any) -> Style:
    style = _SHORT.get(words) if isinstance(words, str) else words
    if not isinstance(style, Style):
        raise ValueError(
            f"parallelize: expected a style of tp_plan, got {words!r} for '{pattern}'; use "
            f"{', '.join(_SHORT)}, or Column(groups=...), Divide(...) and Shard(...)"
        )
    return style


def _check_divide(module: nn.Module, name: str, style: Divide, tp: TensorParallel) -> None:
    if style.patched and swap_of(module) is None:
        raise ValueError(
            f"parallelize: expected '{name}' to be patched, got {type(module).__name__}, whose own "
            "forward derives the number of features from its input; run fastpar.patch(model) first"
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
    """Converts a module; heads: of the attention that contains it, 0 if none."""
    convert_to = partial(tp_layers.convert, module, name=name)
    if isinstance(style, Column):
        yield convert_to(tp_layers.ColumnParallelLinear, groups=style.groups, heads=heads)
    elif isinstance(style, Row):
        yield convert_to(tp_layers.RowParallelLinear, heads=heads)
    elif isinstance(style, Vocab):
        yield convert_to(tp_layers.VocabParallelEmbedding, all_tokens=True)
    elif isinstance(style, Head) and isinstance(module, LinearCrossEntropyLoss):
        yield convert_to(tp_layers.VocabParallelLoss, all_tokens=True)
    elif isinstance(style, Head):
        yield convert_to(tp_layers.VocabParallelLinear, all_tokens=True)
    elif isinstance(style, Tokens) and isinstance(module, _DropoutNd):
        yield convert_to(tp_layers.TokenDropout)
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
            f"parallelize: expected tp to divide the sequence length under sequence parallelism, "
            f"got tp={tp.size} T={output.shape[-2]}; pad the sequences, or pass "
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
    """Dropouts with a rate above 0: the module's name; the attribute, if the rate is a number; and
    whether it belongs to patched attention, with masks by heads."""
    by_kernel = []
    for name, module in model.named_modules():
        swap = swap_of(module)
        if isinstance(module, Attention) and swap is not None:
            probs = swap.options["probs"]
            source = None if probs is None else getattr(module, probs)
            # Any other dropout is unused: nanoGPT's, with torch's attention.
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
_TOKENS = ("input_ids", "token_type_ids")  # [B, T] each, split like the labels
_OF_LOSS = ("labels", "shift_labels", "num_items_in_batch", "ignore_index")
_TAKEN = (*_TOKENS, *_OF_LOSS, "return_dict")


def connects_rows(model: nn.Module, mesh: Mesh) -> Callable[[ContextParallel], None] | None:
    """A function that gives a model its cp ranks, which split its rows.

    Raises:
        ValueError: with cp > 1, a model that cannot be given positions, or is not patched.
    """
    size, own = mesh.size("cp"), getattr(model, "context_parallel", None)
    if size == 1 or callable(own):
        return own
    name = type(model).__name__
    if type(model).__module__ != _LIBRARY or name not in _HEADS:
        raise ValueError(
            f"parallelize: expected a model with context_parallel() for cp={size}, or a patched "
            f"GPT-2 of transformers, which accept positions of their tokens, got {name}; "
            "load its weights into a fastpar.GPT (fastpar train --init-from), or use tp, which "
            "also splits tokens between layers"
        )
    stock = next(_not_swapped(model), None)
    if stock is not None:
        raise ValueError(
            f"parallelize: expected fastpar.patch(model) before cp={size}, because its attention "
            f"sees the tokens of other ranks, got {name} with its own {stock}; call patch and "
            "read its report on what was left unchanged"
        )
    return SharedRows(model, mesh)


def _not_swapped(model: nn.Module) -> Iterator[str]:
    """Names of a GPT-2's parts that must be swapped and are not."""
    for name, module in model.named_modules():
        kind = type(module)
        whole = kind.__name__ == "GPT2Model" and not isinstance(module, Model)
        if whole or (kind.__name__.endswith("Attention") and not isinstance(module, GPT2Attention)):
            yield name or kind.__name__


def _feature_dropouts(model: nn.Module) -> Iterator[tuple[str, nn.Dropout]]:
    """Dropouts that work on whole features of tokens; attention's is a number to its kernel."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and not name.endswith("attn_dropout"):
            yield name, module


class SharedRows:
    """The two hooks, and a call with the ContextParallel that installs them.

    Raises:
        ValueError: dropout with tp > 1, or with generators that differ between ranks.
    """

    by_row = True  # see ContextParallel
    cp: ContextParallel
    length = 0  # of the rows of the current call

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
                "to 0, or use only one of the two axes"
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
        self.names = inspect.signature(self.model.forward).parameters
        self.model.register_forward_pre_hook(self.enter, with_kwargs=True)
        self.model.register_forward_hook(self.leave, with_kwargs=True)

    def enter(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        """The arguments for this rank's tokens."""
        inputs = {**dict(zip(self.names, args)), **kwargs}
        inputs = {name: x for name, x in inputs.items() if not self._is_absent(name, x)}
        self._check(model, inputs)
        ids, cp = inputs["input_ids"], self.cp
        batch, self.length = ids.shape
        padding = cp.padding(batch, self.length, cp.size * self.tp_size)
        positions = torch.arange(self.length + padding, device=ids.device)
        positions = positions.clamp(max=self.longest - 1)
        inputs["position_ids"] = cp.slice_rows(positions.expand(batch, -1))
        for name in (name for name in _TOKENS if name in inputs):
            inputs[name] = cp.slice_rows(F.pad(inputs[name], (0, padding)))
        if "labels" in inputs:
            ignored = inputs.get("ignore_index", -100)
            shifted = inputs.get("shift_labels")
            if shifted is None:
                shifted = F.pad(inputs["labels"], (0, 1), value=ignored)[:, 1:]
            inputs.setdefault("num_items_in_batch", (shifted != ignored).sum())
            targets = cp.slice_rows(F.pad(shifted, (0, padding), value=ignored))
            inputs["labels"] = inputs["shift_labels"] = targets
        return (), {**inputs, "use_cache": False, "return_dict": True}

    def _is_absent(self, name: str, x: Any) -> bool:
        """Whether the argument says nothing: None, False or the default; 0 is an id or a count."""
        if x is None or x is False:
            return True
        return name in self.names and not isinstance(x, Tensor) and x == self.names[name].default

    def _check(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        name, ids = type(model).__name__, inputs.get("input_ids")
        where = f"with cp={self.cp.size}"
        unknown = [key for key in inputs if key not in _TAKEN]
        if unknown:
            raise ValueError(
                f"{name}: expected only arguments {', '.join(_TAKEN)} {where}, got {unknown[0]}; "
                "drop it; to generate or to run padded rows, use one process and a checkpoint"
            )
        if ids is None or ids.dim() != 2 or not 1 <= ids.shape[1] <= self.longest:
            shape = None if ids is None else list(ids.shape)
            raise ValueError(
                f"{name}: expected input_ids [B, T] with 1 <= T <= n_positions={self.longest} "
                f"{where}, got input_ids.shape={shape}; crop the rows"
            )
        if "labels" in inputs:
            accepted = inspect.signature(model.loss_function).parameters  # type: ignore[arg-type]
            if not {"shift_labels", "num_items_in_batch"} <= set(accepted):
                raise ValueError(
                    f"{name}: expected a loss_function with shift_labels and num_items_in_batch "
                    f"{where}, got one with {', '.join(accepted)}; drop labels, and compute the "
                    "loss from the logits"
                )

    def leave(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
    ) -> Any:
        """The outputs of the whole batch."""
        fields, batch = dict(output), len(kwargs["input_ids"])
        if fields.get("loss") is not None:
            fields["loss"] = sum_of_parts(fields["loss"], self.cp)
            if model.training:
                fields["logits"] = None
        for name in ("logits", "last_hidden_state"):
            x = fields.get(name)
            if x is not None:
                x = gather_tokens(x.flatten(0, 1), batch, self.cp)
                fields[name] = x.unflatten(0, (batch, -1))[:, : self.length]
        return type(output)(**fields)
