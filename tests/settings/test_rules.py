"""Every rule refuses a row here, in the spelling of its caller."""

import copy

import pytest
from cells import sweep

from fastpar.settings import rules
from fastpar.settings.config import TrainConfig
from fastpar.settings.files import option
from fastpar.settings.options import TrainFlags
from fastpar.settings.rules import DEFAULTS, NEEDS, PAIRS, RULES, Needs, Term, broken, check, known

NAN, INF = float("nan"), float("inf")
FP8 = {"fp8": "all", "fp8_emulate": True, "n_head": 2, "n_embd": 16}
DELAYED = {**FP8, "fp8_scaling": "tensor"}
STAGES = {"pp": 2, "n_layer": 3}
GRID = {"tp_grid": "2x2"}
WIRE = {"wire_gradients": "int8", "zero_stage": 1}
EXPERTS = {"n_expert": 4}
NODES = {"zero_stage": 3, "node_size": 2, "secondary_shards": True}
APART = " does not support "
REFUSED = [
    *(
        ({rule.names[0]: int(rule.says[-1]) - 1}, f"train: expected {rule.says}, got ")
        for rule in RULES
        if rule.says[:-1] == f"{rule.names[0]} >= "
    ),
    ({"temperature": NAN}, "expected temperature >= 0, got temperature=nan"),
    ({"lr": 0.0}, "train: expected lr > 0, got lr=0.0; set --lr"),
    ({"muon_lr": 0.0}, "train: expected muon_lr > 0, got muon_lr=0.0; set --muon-lr"),
    ({"bucket_mb": INF}, "expected bucket_mb > 0, got bucket_mb=inf"),
    ({"first_bucket_mb": 0.0}, "expected first_bucket_mb > 0, got first_bucket_mb=0.0"),
    ({"betas": [0.9, 1.0]}, "expected 0 <= betas < 1, got betas=(0.9, 1.0)"),
    *(({"ema": ema}, "train: expected 0 < ema < 1, got ema=") for ema in (0.0, 1.0, NAN)),
    ({"lr_decay_fraction": 0.0}, "expected 0 < lr_decay_fraction <= 1, got lr_decay_f"),
    ({"outer_every": 4, "outer_lr": 3.0}, "outer_lr in (0, 2], got outer_lr=3.0"),
    ({"outer_every": 4, "outer_momentum": 1.0}, "outer_momentum in [0, 1), got outer_mom"),
    ({"min_lr": 1.0}, "expected min_lr <= lr=0.0025, got min_lr=1.0; lower --min-lr or"),
    ({"warmup_steps": 3000}, "expected warmup_steps <= max_steps=2000, got warmup_steps=3000"),
    ({"name": "a/b"}, "expected name to consist of letters, digits and . _ + -, got name=a/b; use"),
    ({"max_time": "5 min"}, "max_time to be a time such as 300s, 5m or 1h30m, got max_time=5 min;"),
    ({"timeout": "soon"}, "timeout to be a time such as 300s, 5m or 1h30m, got timeout=soon; set "),
    ({"model": "llama-tiny", "tp": 3}, "n_kv_head=2, or to be a multiple of it that divides n_"),
    ({"model": "qwen3-tiny", **GRID}, "GPT-2's block with tp_grid, whose norms are split, got"),
    ({"model": "nanochat-tiny", "fp8": "mlp"}, "GPT-2's block with fp8 .*, got fp8=mlp; drop --f"),
    ({"tp_grid": "2"}, "expected tp_grid to be ROWSxCOLUMNS or ROWSxCOLUMNSxDEPTH with at least"),
    ({"tp_grid": "1x1"}, "with at least two ranks, got tp_grid=1x1; write --tp-grid 2x2"),
    ({**STAGES, "pp_split": "1+2"}, "numbers of layers, such as 8,4, got pp_split=1+2"),
    ({**STAGES, "chunks": 2}, "chunks to fit schedule=1f1b (interleaved: 1 to 64, .* drop --ch"),
    # Of PAIRS and NEEDS, which are walked below, some as they are spelled.
    ({**GRID, "tp": 2}, f"--tp-grid{APART}--tp: the grid already splits each layer; drop one of t"),
    ({**GRID, "sequence_parallel": False}, f"--tp-grid{APART}--no-sequence-parallel; drop one"),
    ({"optimizer": "adafactor", "zero_stage": 1}, f"--optimizer adafactor{APART}--zero: it averag"),
    ({**WIRE, "deterministic": True}, f"--deterministic{APART}--wire-gradients: compression depen"),
    ({"offload": "parameters", "zero_stage": 2}, "--offload parameters needs --zero 3: only"),
    ({"offload_pinned": False}, "--no-offload-pinned needs --offload; add --offload, or drop"),
    ({"shard_size": 2}, "--shard-size needs --zero 1 or 2 or 3; add --zero 1, or drop --shard-s"),
    ({"replicas": 2}, "--replicas needs --outer-every; add --outer-every 50 to sync"),
    ({"grad_dtype": "bf16", "dtype": "fp32"}, "grad_dtype to be fp32 or the format of the weights"),
    ({"reduce_dtype": "fp16", "dtype": "bf16"}, "of the weights, bf16, got reduce_dtype=fp16; dr"),
    ({**STAGES, "pp": 6}, "pp * chunks <= n_layer + 2 = 3 + 2 (layers, embedding and output layer"),
    ({**STAGES, "pp": 3, "schedule": "interleaved"}, "pp * chunks <= n_layer + 2 = 3 + 2"),
    ({**STAGES, "pp_split": "1,1"}, "numbers that add up to n_layer=3, got pp_split=1,1; correct"),
    ({**STAGES, "schedule": "interleaved", "pp_split": "1,2"}, "to have pp * chunks numbers tha"),
    ({"model": "micro", "tp": 8}, "tp <= n_head=4, got tp=8; lower --tp"),
    ({"model": "micro", "cp": 8}, "cp <= n_head / tp = 4 / 1, rounded up, with cp_method=heads, g"),
    ({"tp_grid": "3x1"}, "rows and columns of tp_grid to divide n_embd=256, got tp_grid=3x1"),
    ({"tp_grid": "1x4", "n_head": 2}, "tp_grid to have at most n_head=2 columns, got tp_grid=1x4;"),
    ({"model": "micro", "tp": 3}, "tp to divide the MLP's width, 512, got tp=3; change --tp"),
    (
        {"model": "micro", "tp": 4, "block_size": 66},
        "tp to divide block_size=66 with sequence parallelism, got tp=4; .*--no-sequence-par",
    ),
    ({"n_expert": 4, "ep": 3}, "ep to divide n_expert=4, got ep=3; change --n-expert or --ep"),
    ({"ep": 2}, "ep to divide n_expert=0, got ep=2; change --n-expert or --ep"),
    ({**FP8, "n_embd": 24}, "n_embd=24 to be a multiple of 16 with fp8, got fp8=all; drop"),
    ({**FP8, "tp": 2}, "fp8_scaling=tensor with tp=2, or block if 128 * tp divides all split"),
    ({**FP8, "tp": 2, "fp8_scaling": "block"}, "got fp8_scaling=block; add --fp8-scaling tensor"),
    ({**DELAYED, "tp": 2}, "tp to leave each rank a multiple of 16 features with fp8=all, got tp="),
    (
        {**EXPERTS, "ep": 2, "zero_stage": 1, "shard_size": 3},
        "shard_size to be a multiple of ep=2, so that each group has all experts, got shard_size=3",
    ),
]  # fmt: skip
# What only those know who have ranks: {fact or setting: value}.
OF_RANKS = [
    ({"shard_size": 3, "dp": 4}, "parallelize: expected shard_size to divide the 4 data-parallel"),
    ({"node_size": 2, "dp": 2, **NODES, "shard_size": None}, "node_size to divide the number of r"),
    ({"transport": "shm", "dp": 2, **WIRE}, f"transport=shm{APART}wire_gradients: ranks read"),
    (
        {"transport": "shm", "dp": 2, "wire_weights": "int8", "zero_stage": 1},
        f"transport=shm{APART}wire_weights: ranks read each other's memory directly; drop",
    ),
]  # fmt: skip


def piece(message):
    """A regular expression of a message, in which .* stands for anything."""
    return ".*".join(map(rules.re.escape, message.split(".*")))


@sweep(("changes", "message"), REFUSED)
def test_refused_settings(changes, message):
    with pytest.raises(ValueError, match=piece(message)):
        TrainConfig().replace(changes)


@sweep(("facts", "message"), OF_RANKS)
def test_what_ranks_know(facts, message):
    with pytest.raises(ValueError, match=piece(message)):
        check("parallelize", facts)


# What switches a setting on that has no value in its Term.
ON = {
    **{"tp": 2, "tp_grid": "2x2", "cp": 2, "ep": 2, "pp": 2, "replicas": 2, "outer_every": 4},
    **{"n_expert": 4, "fp8": "all", "compile": True, "offload": "optimizer", "pack": "documents"},
    **{"offload_activations": True, "secondary_shards": True, "offload_keep_mb": 1.0},
    **{"moment_dtype": "int8", "stochastic_rounding": True, "master_weights": "full"},
    **{"deterministic": True, "activation_checkpointing": "full", "offload_pinned": False},
    **{"fp8_scaling": "tensor", "fp8_weight_gradient": "fp8", "fp8_emulate": True},
    **{"outer_lr": 0.5, "outer_momentum": 0.5, "zero_stage": 1, "wire_gradients": "int8"},
    **{"wire_weights": "int8", "node_size": 2, "shard_size": 1, "outer_wire": "int8"},
    **{"pp_split": "4", "sequence_parallel": False, "reduce_dtype": "bf16", "expert_capacity": 1.0},
}


def switched_on(term):
    if term.above is not None:
        return term.above + 1
    if not term.values:
        return ON[term.name]
    return {"True": True}.get(term.values[0]) or type(DEFAULTS[term.name] or "")(term.values[0])


@sweep("pair", [*PAIRS, *NEEDS])
def test_what_goes_apart_or_needs_another_is_refused(pair):
    """The way out: one of those that go apart is switched off, or what is needed on."""
    needs, rule = isinstance(pair, Needs), pair.rule()
    sides = (pair.one.split(" and "), pair.other.split(" or " if needs else " and "))
    one, other = ([Term.of(text) for text in side] for side in sides)
    values = {t.name: DEFAULTS[t.name] for t in other} if needs else {}
    values |= {t.name: switched_on(t) for t in (one if needs else [*other, *one])}
    words = f"{option(one[0].name, values[one[0].name])}.*{' needs ' if needs else APART}.*"
    with pytest.raises(ValueError, match=words + (pair.why or "--")):
        check("train", values, rules=[rule])
    for term in other if needs else (*one, *other):
        way_out = switched_on(term) if needs else DEFAULTS[term.name]
        check("train", {**values, term.name: way_out}, rules=[rule])


def test_every_other_rule_refuses_a_row():
    found = {row.rule()[2:] for row in (*PAIRS, *NEEDS)}
    for changes, _ in REFUSED:
        unchecked = copy.copy(TrainConfig())
        vars(unchecked).update(vars(TrainFlags().replace(changes)))
        values = known(unchecked, unchecked.model_config(vocab_size=1)) | {"lr": unchecked.lr}
        found.add(next(broken("train", values))[2:])
    found |= {next(broken("parallelize", facts))[2:] for facts, _ in OF_RANKS}
    assert [rule.says for rule in RULES if rule[2:] not in found] == []
