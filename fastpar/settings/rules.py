"""Rules about settings as rows of a table: allowed values, and settings that exclude each other.

A rule is checked as soon as all settings and facts that it names are known. Facts are: `dtype`
after auto is resolved, the model's sizes (n_layer, n_head, n_embd, shape), `dp` (the number of
data-parallel ranks). Rules about facts that are learned later are checked then.

[Note: spelling] In a text, <pp> becomes `--pp` for a command and `pp` for a function; <pp=2>
becomes `--pp 2` or `pp=2`; of <fp8=mlp|all> the value that is set is named; {lr} is
replaced by the value of lr.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from fastpar.settings.files import option, parse_seconds
from fastpar.settings.mesh import CHUNKS, parse_grid, pp_chunks, pp_split
from fastpar.settings.model import GPTConfig
from fastpar.settings.options import TrainFlags

DEFAULTS: dict[str, Any] = TrainFlags().settings() | {"dp": 1}
COMMANDS = ("train", "plan", "profile", "compare")  # their errors name flags


class Rule(NamedTuple):
    """A condition that settings and facts have to fulfil.

    Args:
        names: settings and facts; the first is the one to change.
        holds: takes their values; whether the condition is fulfilled.
        says: what is expected, or which settings exclude each other; see [Note: spelling].
        way_out: what the user can do.
        by: the only command or function that checks the rule; "": all of them.
    """

    names: tuple[str, ...]
    holds: Callable[..., bool]
    says: str
    way_out: str
    by: str = ""


class Term(NamedTuple):
    """A setting that is on: not the default, one of the given values, or above a number."""

    name: str
    values: tuple[str, ...]
    above: int | None

    @classmethod
    def of(cls, text: str) -> Term:
        """Parse `fp8`, `optimizer adamw muon` or `num_samples >0`."""
        name, *values = text.split()
        above = int(values[0][1:]) if values and values[0][0] == ">" else None
        return cls(name, () if above is not None else tuple(values), above)

    def on(self, value: Any) -> bool:
        """Whether the setting is on with this value."""
        if self.above is not None:
            return (value or 0) > self.above
        return str(value) in self.values if self.values else bool(value != DEFAULTS[self.name])

    @property
    def text(self) -> str:
        """The setting in a message, see [Note: spelling]."""
        values = () if self.values == ("True",) else self.values
        above = f" above {self.above}" * (self.above is not None)
        return f"<{self.name}{'=' * bool(values)}{'|'.join(values)}>{above}"


class Pair(NamedTuple):
    """Two settings that exclude each other, each a Term, or several joined by `and`."""

    one: str
    other: str
    why: str = ""
    by: str = ""

    def sides(self) -> tuple[list[Term], list[Term]]:
        return _terms(self.one, " and "), _terms(self.other, " and ")

    def rule(self) -> Rule:
        one, other = self.sides()
        names = tuple(term.name for term in (*one, *other))

        def holds(*values: Any) -> bool:
            return not all(term.on(value) for term, value in zip((*one, *other), values))

        says = f"{one[0].text} does not support {other[0].text}" + f": {self.why}" * bool(self.why)
        return Rule(names, holds, says, "drop one of them", self.by)


class Needs(NamedTuple):
    """A setting (Terms joined by `and`) that requires another (Terms joined by `or`).

    Args:
        way_out: another remedy than to add the required setting.
    """

    one: str
    other: str
    why: str = ""
    way_out: str = ""
    by: str = ""

    def rule(self) -> Rule:
        one, other = _terms(self.one, " and "), _terms(self.other, " or ")
        names = tuple(term.name for term in (*one, *other))

        def holds(*values: Any) -> bool:
            on = all(term.on(value) for term, value in zip(one, values))
            return not on or any(t.on(value) for t, value in zip(other, values[len(one) :]))

        says = f"{one[0].text} needs {other[0].text}" + f": {self.why}" * bool(self.why)
        first = other[0]._replace(values=other[0].values[:1]).text
        way_out = self.way_out or f"add {first}"
        return Rule(names, holds, says, f"{way_out}, or drop <{one[0].name}>", self.by)


def _terms(text: str, between: str) -> list[Term]:
    return [Term.of(part) for part in text.split(between)]


def _at_least(low: float, *names: str) -> list[Rule]:
    def holds(value: Any) -> bool:
        return value is None or low <= value < math.inf

    return [Rule((name,), holds, f"{name} >= {low}", f"set <{name}>") for name in names]


def _is_grid(text: str | None) -> bool:
    valid = text is None or re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", text)
    return bool(valid) and math.prod(parse_grid(text) or (2,)) > 1


def _grid(text: str | None) -> tuple[int, ...]:
    return (parse_grid(text) or (1, 1))[:2]


def _splits_layers(split: str | None, pp: int, schedule: str, chunks: int | None, n: int) -> bool:
    layers = pp_split(split)
    if pp == 1 or layers is None:
        return True
    return len(layers) == pp * pp_chunks(schedule, chunks) and sum(layers) == n


def _same_scales(fp8: str, scaling: str, tp: int, shape: GPTConfig) -> bool:
    least = shape.n_embd * (1 if fp8 == "all" else 4)
    by_block = scaling == "block" and least % (128 * tp) == 0
    return fp8 == "none" or tp == 1 or scaling == "tensor" or by_block


def _whole_tiles(fp8: str, tp: int, shape: GPTConfig) -> bool:
    heads = shape.heads_of_rank(tp) * shape.head_size
    features = [shape.hidden // tp, *[heads] * (fp8 == "all")]
    return fp8 == "none" or tp == 1 or not any(n % 16 for n in features)


def _of_nodes(size: int | None, shards: int | None, dp: int) -> bool:
    ranks = shards or dp
    return size is None or (1 < size < ranks and ranks % size == 0)


def _has_experts(ep: int, shape: GPTConfig) -> bool:
    return ep == 1 or (shape.n_expert > 0 and shape.n_expert % ep == 0)


_GRID = "the grid already splits each layer"
_MEANS = "it averages over rows and columns of whole matrices"
_BLOCKS = "blocks of 8-bit numbers must not cross the boundary between ranks"
_SPLIT = "graphs hold collectives of data-parallel ranks alone"
_UNTRIED = "this was not tested"
_ROUNDED = "rounding of 16-bit sums depends on the split"

PAIRS: list[Pair] = [
    Pair("tp_grid", "tp", _GRID),
    *(Pair("tp_grid", axis) for axis in ("cp", "ep", "pp", "replicas", "n_expert", "fp8")),
    *(Pair("tp_grid", mode) for mode in ("optimizer adafactor muon", "compile", "offload")),
    *(Pair("tp_grid", mode) for mode in ("sequence_parallel", "offload_activations", "pack")),
    *(Pair("tp_grid", mode, by="train") for mode in ("node_size", "secondary_shards")),
    *(Pair("moment_dtype int8", axis, _BLOCKS) for axis in ("tp", "ep", "tp_grid")),
    *(Pair("optimizer adafactor", axis, _MEANS) for axis in ("zero_stage", "tp", "ep", "pp")),
    Pair("optimizer adafactor muon", "moment_dtype"),
    Pair("optimizer adafactor muon", "stochastic_rounding"),
    Pair("optimizer adafactor muon", "offload", "it updates whole matrices"),
    Pair("compile", "pp"),
    Pair("compile", "pack"),
    *(Pair("fp8", mode) for mode in ("n_expert", "compile", "activation_checkpointing selective")),
    Pair("expert_capacity", "cp and n_expert", "each rank holds only a part of a sequence"),
    Pair("stochastic_rounding", "master_weights"),
    Pair("stochastic_rounding", "dtype fp32 fp16", "it rounds bf16 weights"),
    Pair("master_weights", "dtype fp32", "it is for 16-bit weights"),
    Pair("master_weights remainder", "dtype fp16", "it is for bf16 weights"),
    Pair("deterministic", "grad_dtype bf16 fp16", _ROUNDED),
    Pair("deterministic", "reduce_dtype bf16 fp16", _ROUNDED),
    Pair("deterministic", "outer_wire"),
    Pair("deterministic", "wire_gradients", "compression depends on the number of ranks"),
    Pair("deterministic", "wire_weights", "compression depends on the number of ranks"),
    Pair("offload", "wire_gradients"),
    Pair("offload", "wire_weights"),
    Pair("offload", "node_size"),
    Pair("ep", "node_size"),
    Pair("reduce_dtype", "wire_gradients", "both set the format of sent gradients"),
    Pair("reduce_dtype", "wire_weights"),
    Pair("transport shm and dp >1", "wire_gradients", "ranks read each other's memory directly"),
    Pair("transport shm and dp >1", "wire_weights", "ranks read each other's memory directly"),
    Pair("cuda_graphs True", "device cpu", "a CPU has no graphs"),
    *(Pair("cuda_graphs True", axis, _SPLIT) for axis in ("tp", "tp_grid", "cp", "pp")),
    Pair("cuda_graphs True", "wire_gradients", "each step's random bits come from the host"),
    *(Pair("cuda_graphs True", mode, _UNTRIED) for mode in ("wire_weights", "secondary_shards")),
    Pair("cuda_graphs True", "deterministic", "the host sums micro-batches in a tree"),
    Pair("cuda_graphs True", "optimizer muon adafactor", "they read numbers on the host"),
    Pair("cuda_graphs True", "pack", "the number of documents changes from batch to batch"),
    Pair("cuda_graphs True", "outer_every", "graphs do not include the outer step"),
    Pair("cuda_graphs True", "offload", "forward waits for the optimizer step on the host"),
    Pair("cuda_graphs True", "n_expert", "the host reads the number of tokens per expert"),
    Pair("cuda_graphs True", "compile", "the model may be recompiled during training"),
    Pair("cuda_graphs True", "fp8", _UNTRIED),
    Pair("cuda_graphs True", "activation_checkpointing", "the host reads the random state"),
]
NEEDS: tuple[Needs, ...] = (
    Needs("offload parameters", "zero_stage 3", "only ZeRO 3 frees whole weights on the GPU"),
    Needs("offload_activations", "activation_checkpointing full"),
    Needs("offload_keep_mb", "offload"),
    Needs("pp_split", "pp"),
    Needs("offload_pinned", "offload or offload_activations"),
    Needs("shard_size", "zero_stage 1 2 3", by="train"),
    Needs("fp8_scaling", "fp8"),
    Needs("fp8_weight_gradient", "fp8"),
    Needs("fp8_emulate", "fp8"),
    Needs("fp8_weight_gradient fp8", "fp8_scaling tensor", "all ranks have to use one scale"),
    Needs("wire_weights", "zero_stage 1 2 3", "ZeRO 0 gathers no weights"),
    Needs("node_size", "secondary_shards"),
    Needs("secondary_shards", "zero_stage 3"),
    Needs("secondary_shards", "node_size"),
    Needs("replicas", "outer_every", "", "add <outer_every=50> to synchronize every 50 steps"),
    *(Needs(f"outer_{name}", "outer_every") for name in ("lr", "momentum", "wire")),
)
RULES: list[Rule] = [
    *_at_least(1, "batch_size", "micro_batch_size", "grad_accum_steps", "max_steps"),
    *_at_least(1, "eval_batches", "nproc", "threads", "shard_size", "tp", "cp", "ep", "pp"),
    *_at_least(1, "chunks", "replicas", "outer_every"),
    *_at_least(0, "eval_every", "save_every", "keep_last", "keep_every", "warmup_steps", "min_lr"),
    *_at_least(0, "weight_decay", "max_grad_norm", "num_samples", "max_new_tokens"),
    *_at_least(0, "temperature", "top_k", "check_replicas_every", "max_restarts"),
    *_at_least(0, "offload_keep_mb", "prefetch"),
    *_at_least(2, "node_size"),
    *(
        Rule((name,), lambda v: v is None or 0 < v < math.inf, f"{name} > 0", f"set <{name}>")
        for name in ("lr", "muon_lr", "bucket_mb")
    ),
    Rule(("first_bucket_mb",), lambda v: v > 0, "first_bucket_mb > 0", "1 is usual"),
    Rule(("betas",), lambda v: all(0 <= b < 1 for b in v), "0 <= betas < 1", "0.9 0.95 are usual"),
    Rule(("ema",), lambda v: v is None or 0 < v < 1, "0 < ema < 1", "0.999 is usual"),
    Rule(
        ("lr_decay_fraction",), lambda v: 0 < v <= 1, "0 < lr_decay_fraction <= 1", "0.4 is usual"
    ),
    Rule(
        ("outer_lr",),
        lambda v: 0 < v <= 2,
        "outer_lr in (0, 2]",
        "0.7 is usual, 1 averages weights",
    ),
    Rule(("outer_momentum",), lambda v: 0 <= v < 1, "outer_momentum in [0, 1)", "0.9 is usual"),
    Rule(
        ("min_lr", "lr"),
        lambda low, lr: None in (low, lr) or low <= lr,
        "min_lr <= lr={lr}",
        "lower <min_lr> or raise <lr>",
    ),
    Rule(
        ("warmup_steps", "max_steps"),
        lambda warmup, steps: warmup is None or warmup <= steps,
        "warmup_steps <= max_steps={max_steps}",
        "lower <warmup_steps> or raise <max_steps>",
    ),
    Rule(
        ("name",),
        lambda v: v is None or bool(re.fullmatch(r"[\w.+-]*\w[\w.+-]*", v)),
        "name to consist of letters, digits and . _ + -",
        "use <out> for a path",
    ),
    *(
        Rule((n,), _is_time, f"{n} to be a time such as 300s, 5m or 1h30m", f"set <{n}>")
        for n, _is_time in (
            ("max_time", lambda v: v is None or parse_seconds(v) > 0),
            ("timeout", lambda v: parse_seconds(v) > 0),
        )
    ),
    Rule(
        ("tp_grid",),
        _is_grid,
        "tp_grid to be ROWSxCOLUMNS or ROWSxCOLUMNSxDEPTH with at least two ranks",
        "write <tp_grid=2x2>, for example",
    ),
    Rule(
        ("pp_split",),
        lambda v: v is None or bool(re.fullmatch(r"\d+(,\d+)*", v)),
        "pp_split to be numbers of layers, such as 8,4",
        "correct <pp_split>",
    ),
    Rule(
        ("chunks", "schedule"),
        lambda n, schedule: n is None or n in CHUNKS.get(schedule, (1,)),
        "chunks to fit schedule={schedule} (interleaved: 1 to 64, others: 1)",
        "drop <chunks>",
    ),
    *(pair.rule() for pair in PAIRS),
    *(needs.rule() for needs in NEEDS),
    *(
        Rule(
            (name, "dtype"),
            lambda v, dtype, also=also: v in (None, "fp32", dtype, also),
            f"{name} to be fp32 or the format of the weights, {{dtype}}",
            f"drop <{name}>",
        )
        for name, also in (("grad_dtype", None), ("reduce_dtype", "bf16"))
    ),
    Rule(
        ("pp", "schedule", "chunks", "n_layer"),
        lambda pp, schedule, chunks, n: pp == 1 or pp * pp_chunks(schedule, chunks) <= n + 2,
        "pp * chunks <= n_layer + 2 = {n_layer} + 2 (layers, embedding and output layer)",
        "lower <pp> or <chunks>",
        by="train",
    ),
    Rule(
        ("pp_split", "pp", "schedule", "chunks", "n_layer"),
        _splits_layers,
        "pp_split to have pp * chunks numbers that add up to n_layer={n_layer}",
        "correct or drop <pp_split>",
        by="train",
    ),
    Rule(
        ("tp", "shape"),
        lambda tp, shape: tp <= shape.n_head,
        "tp <= n_head={shape.n_head}",
        "lower <tp>",
    ),
    Rule(
        ("cp", "cp_method", "tp", "n_head"),
        lambda cp, method, tp, heads: cp == 1 or method == "keys" or cp <= -(-heads // tp),
        "cp <= n_head / tp = {n_head} / {tp}, rounded up, with cp_method=heads",
        "lower <cp>, or add <cp_method=keys>",
    ),
    Rule(
        ("tp_grid", "shape"),
        lambda grid, shape: not any(shape.n_embd % n for n in _grid(grid)),
        "rows and columns of tp_grid to divide n_embd={shape.n_embd}",
        "change <tp_grid>",
    ),
    Rule(
        ("tp_grid", "shape"),
        lambda grid, shape: _grid(grid)[1] <= shape.n_head,
        "tp_grid to have at most n_head={shape.n_head} columns",
        "change <tp_grid>",
    ),
    Rule(
        ("tp", "shape"),
        lambda tp, shape: shape.splits_keys(tp),
        "tp to divide n_kv_head={shape.n_kv_head}, or to be a multiple of it that divides n_head",
        "change <tp>",
    ),
    Rule(
        ("tp", "shape"),
        lambda tp, shape: shape.splits_by(tp),
        "tp to divide the MLP's width, {shape.hidden}",
        "change <tp>",
    ),
    Rule(
        ("tp_grid", "shape"),
        lambda grid, shape: grid is None or shape.is_gpt2,
        "GPT-2's block with tp_grid, whose norms are split",
        "use <tp> instead of tp_grid, or GPT-2's fields",
    ),
    Rule(
        ("fp8", "shape"),
        lambda fp8, shape: fp8 == "none" or shape.is_gpt2,
        "GPT-2's block with fp8 (its delayed scales know these layers)",
        "drop <fp8>, or use GPT-2's fields",
    ),
    Rule(
        ("tp", "sequence_parallel", "shape"),
        lambda tp, tokens, shape: tokens is False or shape.block_size % tp == 0,
        "tp to divide block_size={shape.block_size} with sequence parallelism",
        "change <tp>, or add <sequence_parallel=False>",
    ),
    Rule(
        ("ep", "shape"),
        _has_experts,
        "ep to divide n_expert={shape.n_expert}",
        "change <n_expert> or <ep>",
    ),
    Rule(
        ("fp8", "shape"),
        lambda fp8, shape: fp8 == "none" or shape.n_embd % 16 == 0,
        "n_embd={shape.n_embd} to be a multiple of 16 with fp8",
        "drop <fp8>, or change <n_embd>",
    ),
    Rule(
        ("fp8_scaling", "fp8", "tp", "shape"),
        lambda scaling, fp8, tp, shape: _same_scales(fp8, scaling, tp, shape),
        "fp8_scaling=tensor with tp={tp}, or block if 128 * tp divides all split widths",
        "add <fp8_scaling=tensor>",
    ),
    Rule(
        ("tp", "fp8", "shape"),
        lambda tp, fp8, shape: _whole_tiles(fp8, tp, shape),
        "tp to leave each rank a multiple of 16 features with fp8={fp8}",
        "lower <tp>, or drop <fp8>",
    ),
    Rule(
        ("shard_size", "dp"),
        lambda shards, dp: shards is None or dp % shards == 0,
        "shard_size to divide the {dp} data-parallel ranks",
        "drop <shard_size> to shard over all ranks",
    ),
    Rule(
        ("shard_size", "ep", "zero_stage"),
        lambda n, ep, stage: not stage or n in (None, 1) or n % ep == 0,
        "shard_size to be a multiple of ep={ep}, so that each group has all experts",
        "drop <shard_size>",
    ),
    Rule(
        ("node_size", "shard_size", "dp"),
        _of_nodes,
        "node_size to divide the number of ranks per sharding group, and to be smaller",
        "set it to the ranks per node, or drop <node_size> if there is only one node",
    ),
]


def add_rules(rows: Iterable[Rule | Pair | Needs], defaults: Mapping[str, Any]) -> None:
    """Add the rules of a registered axis, and the defaults of its settings."""
    DEFAULTS.update(defaults)
    PAIRS.extend(row for row in rows if isinstance(row, Pair))
    RULES.extend(row if isinstance(row, Rule) else row.rule() for row in rows)


def check(
    who: str,
    values: Mapping[str, Any],
    learned: Collection[str] | None = None,
    rules: Iterable[Rule] = RULES,
) -> None:
    """Check every rule whose settings and facts are known.

    Args:
        who: the command, or the function whose arguments these are.
        learned: check only rules that name one of these; None: all.
    Raises:
        ValueError: a rule is broken.
    """
    for rule in broken(who, values, learned, rules):
        raise ValueError(message(rule, who, values))


def broken(
    who: str,
    values: Mapping[str, Any],
    learned: Collection[str] | None = None,
    rules: Iterable[Rule] = RULES,
) -> Iterator[Rule]:
    """The rules that are broken, see check()."""
    for rule in rules:
        applies = all(name in values for name in rule.names) and rule.by in ("", who)
        applies = applies and (learned is None or not set(learned).isdisjoint(rule.names))
        if applies and not rule.holds(*(values[name] for name in rule.names)):
            yield rule


def message(rule: Rule, who: str, values: Mapping[str, Any]) -> str:
    """The error message of a broken rule."""
    texts = (_spelled(text, who, values) for text in (rule.says, rule.way_out))
    says, way_out = (text.format_map(values) for text in texts)
    if not rule.says.startswith("<"):
        name = rule.names[0]
        says = f"{who}: expected {says}, got {name}={values[name]}"
    text = f"{says}; {way_out}"
    return text.replace("outer_", "") if who == "Outer" else text  # the names of its arguments


def _spelled(text: str, who: str, values: Mapping[str, Any]) -> str:
    """Spell the settings in <> for a command or function, see [Note: spelling]."""

    def spell(match: re.Match[str]) -> str:
        name, listed = match.groups()
        value = values.get(name)
        if listed is not None:
            value = str(value) if str(value) in listed.split("|") else listed.replace("|", " or ")
        elif value is not False or DEFAULTS.get(name) is False:
            value = None  # only the name
        if who not in COMMANDS:
            return name if value is None else f"{name}={value}"
        off = str(value) == "False"
        return option(name, not off) + ("" if value is None or off else f" {value}")

    return re.sub(r"<(\w+)(?:=([^>]*))?>", spell, text)


def known(flags: TrainFlags, shape: GPTConfig | None) -> dict[str, Any]:
    """The settings of a run and the facts that follow from them.

    Args:
        shape: the model's shape; None: not known yet.
    """
    values = flags.settings()
    if values["dtype"] == "auto":
        del values["dtype"]
    for name in ("n_layer", "n_head", "n_embd", "block_size"):
        del values[name]
    return values if shape is None else values | of_shape(shape)


def of_shape(shape: GPTConfig) -> dict[str, Any]:
    """Facts that follow from a model's shape."""
    return {"shape": shape, "n_layer": shape.n_layer, "n_head": shape.n_head}


def rules_text() -> str:
    """The table of compatible features and the list of all rules, at most 100 columns wide."""
    pairs = [(pair, tuple(side[0].name for side in pair.sides())) for pair in PAIRS]
    refused = {frozenset(names): f"no {i}" for i, (_, names) in reversed([*enumerate(pairs, 1)])}
    beside = dict.fromkeys((*AXES, *(n for _, names in pairs for n in names)))
    lines = ["Compatibility of features. `no N`: refused by rule N of the list below.", ""]
    for axes in (AXES[: len(AXES) // 2], AXES[len(AXES) // 2 :]):
        lines.append(" " * 25 + "".join(f"{_NARROW.get(a, a):>12}" for a in axes))
        for name in beside:
            cells = ["-" if name == a else refused.get(frozenset((name, a)), "runs") for a in axes]
            if name in AXES or set(cells) != {"runs"}:
                lines.append(f"{name:25}" + "".join(f"{cell:>12}" for cell in cells))
        lines.append("")
    every = [pair.rule() for pair in PAIRS]
    every += [rule for rule in RULES if rule[2:] not in {r[2:] for r in every}]
    for i, rule in enumerate(every, 1):
        text = _spelled(f"{i:3}. {rule.says}; {rule.way_out}", "train", {})
        text = re.sub(r"\{(?:\w+\.)*(\w+)\}", r"\1", text)  # names instead of values
        lines += textwrap.wrap(text, 100, subsequent_indent=" " * 5)
    return "\n".join(lines)


# The table's columns.
AXES = (
    *("zero_stage", "tp", "tp_grid", "cp", "ep", "pp"),
    *("replicas", "n_expert", "fp8", "offload", "compile", "cuda_graphs"),
)
_NARROW = {"cuda_graphs": "graphs"}
