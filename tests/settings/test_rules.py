"""Every rule has a row here that it refuses, told as the one who asked spells settings."""

import copy

import pytest

from fastpar.cli import parse_train
from fastpar.settings import config, rules
from fastpar.settings.config import TrainConfig
from fastpar.settings.files import option
from fastpar.settings.options import TrainFlags
from fastpar.settings.rules import (
    DEFAULTS,
    OF_IDLE,
    PAIRS,
    RULES,
    broken,
    check,
    known,
    rules_text,
    without_idle,
)

NAN, INF = float("nan"), float("inf")
GRAPHS = {"cuda_graphs": True, "device": "cuda"}
FP8 = {"fp8": "all", "fp8_emulate": True, "n_head": 2, "n_embd": 16}
DELAYED = {**FP8, "fp8_scaling": "tensor"}
STAGES = {"pp": 2, "n_layer": 3}
GRID = {"tp_grid": "2x2"}
WIRE = {"wire_gradients": "int8", "zero_stage": 1}
EXPERTS = {"n_expert": 4}
NODES = {"zero_stage": 3, "node_size": 2, "secondary_shards": True}
APART = " does not run with "
AT_LEAST = {
    1: "batch_size micro_batch_size grad_accum_steps max_steps eval_batches nproc threads "
    "shard_size tp cp ep pp chunks replicas outer_every",
    0: "eval_every save_every keep_last keep_every warmup_steps min_lr weight_decay max_grad_norm "
    "num_samples max_new_tokens temperature top_k check_replicas_every max_restarts "
    "offload_keep_mb prefetch",
    2: "node_size",
}
REFUSED = [
    *(
        ({name: low - 1}, f"train: expected {name} >= {low}, got {name}={low - 1}; set --")
        for low, names in AT_LEAST.items()
        for name in names.split()
    ),
    ({"temperature": NAN}, "expected temperature >= 0, got temperature=nan"),
    ({"lr": 0.0}, "train: expected lr > 0, got lr=0.0; set --lr"),
    ({"muon_lr": 0.0}, "train: expected muon_lr > 0, got muon_lr=0.0; set --muon-lr"),
    ({"bucket_mb": INF}, "expected bucket_mb > 0, got bucket_mb=inf"),
    ({"betas": [0.9, 1.0]}, "expected 0 <= betas < 1, got betas=(0.9, 1.0)"),
    *(({"ema": ema}, "train: expected 0 < ema < 1, got ema=") for ema in (0.0, 1.0, NAN)),
    ({"lr_decay_fraction": 0.0}, "expected 0 < lr_decay_fraction <= 1, got lr_decay_f"),
    ({"outer_every": 4, "outer_lr": 3.0}, "outer_lr in (0, 2], got outer_lr=3.0"),
    ({"outer_every": 4, "outer_momentum": 1.0}, "outer_momentum in [0, 1), got outer_mom"),
    ({"min_lr": 1.0}, "expected min_lr <= lr=0.0025, got min_lr=1.0; lower --min-lr or"),
    ({"warmup_steps": 3000}, "expected warmup_steps <= max_steps=2000, got warmup_steps=3000"),
    ({"name": "a/b"}, "expected name of letters, digits and . _ + -, got name=a/b; use --out"),
    ({"max_time": "5 min"}, "a time such as 300s, 5m or 1h30m, got max_time=5 min; set --max"),
    ({"timeout": "soon"}, "a time such as 300s, 5m or 1h30m, got timeout=soon; set --timeout"),
    ({"tp_grid": "2"}, "expected tp_grid as ROWSxCOLUMNS or ROWSxCOLUMNSxDEPTH of two ranks"),
    ({"tp_grid": "1x1"}, "of two ranks or more, got tp_grid=1x1; write --tp-grid 2x2"),
    ({**STAGES, "pp_split": "1+2"}, "numbers of layers, such as 8,4, got pp_split=1+2"),
    ({**STAGES, "chunks": 2}, "chunks with schedule=1f1b: 1 to 64 with interleaved, .* drop --ch"),
    *(({**GRID, axis: 2}, f"--tp-grid{APART}--{axis}") for axis in ("tp", "cp", "ep", "pp")),
    *(
        ({**GRID, name: value}, f"--tp-grid{APART}--{name.replace('_', '-')}")
        for name, value in (
            *(("compile", True), ("fp8", "mlp"), ("n_expert", 4), ("pack", "documents")),
            *(("optimizer", "muon"), ("offload", "optimizer"), ("replicas", 2), ("node_size", 2)),
            *(("offload_activations", True), ("secondary_shards", True)),
        )
    ),
    ({**GRID, "sequence_parallel": False}, f"--tp-grid{APART}--no-sequence-parallel; drop one"),
    *(
        ({**beside, "moment_dtype": "int8"}, f"--moment-dtype int8{APART}--")
        for beside in ({"tp": 2}, {"ep": 2, **EXPERTS}, GRID)
    ),
    *(
        ({"optimizer": "adafactor", **beside}, f"--optimizer adafactor{APART}--{name}: its means")
        for name, beside in (
            *(("zero", {"zero_stage": 1}), ("tp", {"tp": 2})),
            *(("ep", {"ep": 2, **EXPERTS}), ("pp", {"pp": 2})),
        )
    ),
    *(
        ({"optimizer": "muon", name: value}, f"--optimizer muon{APART}--{name.replace('_', '-')}")
        for name, value in (
            *(("moment_dtype", "bf16"), ("stochastic_rounding", True), ("offload", "optimizer")),
        )
    ),
    ({**STAGES, "compile": True}, f"--compile{APART}--pp; drop one of them"),
    ({"pack": "documents", "compile": True}, f"--compile{APART}--pack"),
    ({**FP8, "n_expert": 2}, f"--fp8{APART}--n-expert; drop one of them"),
    ({**FP8, "compile": True}, f"--fp8{APART}--compile"),
    ({**FP8, "activation_checkpointing": "selective"}, f"--fp8{APART}--activation-checkpointing s"),
    ({**FP8, "pp": 2, "schedule": "zb-h1"}, f"--fp8{APART}--schedule zb-h1; drop"),
    ({**EXPERTS, "cp": 2, "expert_capacity": 1.0}, f"--expert-capacity{APART}--cp: its ranks"),
    ({"stochastic_rounding": True, "master_weights": "full"}, f"{APART}--master-weights; drop one"),
    ({"stochastic_rounding": True, "dtype": "fp32"}, f"rounding{APART}--dtype fp32: it rounds"),
    ({"master_weights": "full", "dtype": "fp32"}, f"--master-weights{APART}--dtype fp32: it is"),
    ({"master_weights": "remainder", "dtype": "fp16"}, f"remainder{APART}--dtype fp16"),
    ({"grad_dtype": "bf16", "deterministic": True}, f"--deterministic{APART}--grad-dtype bf16: 16"),
    ({"reduce_dtype": "bf16", "deterministic": True}, f"--deterministic{APART}--reduce-dtype bf"),
    ({"outer_every": 4, "outer_wire": "int8", "deterministic": True}, f"istic{APART}--outer-wire"),
    ({**WIRE, "deterministic": True}, f"--deterministic{APART}--wire-gradients: codes depend"),
    ({"wire_weights": "int8", "zero_stage": 1, "deterministic": True}, f"{APART}--wire-weights in"),
    ({**WIRE, "offload": "optimizer"}, f"--offload{APART}--wire-gradients"),
    ({"wire_weights": "int8", "zero_stage": 1, "offload": "optimizer"}, f"{APART}--wire-weights"),
    ({**NODES, "offload": "optimizer"}, f"--offload{APART}--node-size"),
    ({**NODES, **EXPERTS, "ep": 2}, f"--ep{APART}--node-size"),
    ({**WIRE, "reduce_dtype": "bf16"}, f"--reduce-dtype{APART}--wire-gradients: that is the"),
    ({"wire_weights": "bf16", "zero_stage": 1, "reduce_dtype": "bf16"}, f"{APART}--wire-weights b"),
    *(
        ({**GRAPHS, name: value}, f"--cuda-graphs{APART}--{flag}")
        for name, value, flag in (
            *(("device", "cpu", "device cpu: a CPU"), ("pack", "documents", "pack: rows have")),
            *(("zero_stage", 3, "zero 3"), ("outer_every", 4, "outer-every: the outer step")),
            *(("offload", "optimizer", "offload"), ("tp", 2, "tp: "), ("tp_grid", "2x2", "tp-gr")),
            *(("cp", 2, "cp: "), ("n_expert", 4, "n-expert"), ("pp", 2, "pp: the host sends")),
            *(("compile", True, "compile"), ("fp8", "mlp", "fp8: not tried")),
            ("activation_checkpointing", "full", "activation-checkpointing: the host reads"),
        )
    ),
    ({"offload": "parameters", "zero_stage": 2}, "--offload parameters needs --zero 3: it keeps"),
    ({"offload_activations": True}, "--offload-activations needs --activation-checkpointing full"),
    ({"offload_keep_mb": 1.0}, "--offload-keep-mb needs --offload; add --offload, or drop --off"),
    ({"offload_pinned": False}, "--no-offload-pinned needs --offload; add --offload, or drop"),
    ({"shard_size": 2}, "--shard-size needs --zero 1, 2 or 3; add --zero 1, or drop --shard-siz"),
    ({"fp8_emulate": True}, "--fp8-emulate needs --fp8; add --fp8, or drop --fp8-emulate"),
    ({"fp8_scaling": "tensor"}, "--fp8-scaling needs --fp8"),
    ({"fp8_weight_gradient": "fp8"}, "--fp8-weight-gradient needs --fp8"),
    ({**FP8, "fp8_weight_gradient": "fp8"}, "gradient fp8 needs --fp8-scaling tensor: one scale"),
    ({**DELAYED, "wire_weights": "fp8"}, "--wire-weights needs --zero 1, 2 or 3: stage 0 sends"),
    ({**DELAYED, "wire_weights": "fp8", "zero_stage": 2}, "--wire-weights fp8 needs --zero 3; add"),
    ({**FP8, "wire_weights": "fp8", "zero_stage": 3}, "needs --fp8 with --fp8-scaling tensor"),
    ({"error_feedback": True}, "--error-feedback needs --wire-gradients: without it nothing"),
    ({"error_buffer": True}, "--error-buffer needs --wire-gradients"),
    ({**WIRE, "zero_stage": 2, "error_feedback": True}, "-feedback needs --error-buffer: stages"),
    ({"node_size": 2}, "--node-size needs --wire-gradients; add --wire-gradients, or drop --node"),
    ({"node_size": 2, "wire_gradients": "int8"}, "--node-size needs --zero 1, 2 or 3; add --ze"),
    ({"secondary_shards": True, "node_size": 2}, "--secondary-shards needs --zero 3"),
    ({"secondary_shards": True, "zero_stage": 3}, "--secondary-shards needs --node-size"),
    ({"replicas": 2}, "--replicas needs --outer-every; add --outer-every 50, the steps"),
    ({"outer_lr": 0.5}, "--outer-lr needs --outer-every; add --outer-every, or drop --outer-lr"),
    ({"outer_momentum": 0.5}, "--outer-momentum needs --outer-every"),
    ({"outer_wire": "int8"}, "--outer-wire needs --outer-every"),
    ({"grad_dtype": "bf16", "dtype": "fp32"}, "grad_dtype to be fp32 or that of the weights, fp32"),
    ({"reduce_dtype": "fp16", "dtype": "bf16"}, "of the weights, bf16, got reduce_dtype=fp16; dr"),
    ({**STAGES, "pp": 6}, "pp * chunks of at most the 3 layers, embedding and output layer, got"),
    ({**STAGES, "pp": 3, "schedule": "zb-v"}, "pp * chunks of at most the 3 layers"),
    ({**STAGES, "pp_split": "1,1"}, "numbers of layers that make 3, got pp_split=1,1; correct it"),
    ({**STAGES, "schedule": "zb-v", "pp_split": "1,2"}, "as pp * chunks numbers of layers that"),
    ({"model": "micro", "tp": 8}, "tp of at most n_head=4, got tp=8; lower --tp"),
    ({"model": "micro", "cp": 8}, "cp of at most the 4 heads / tp=1, which are exchanged, got cp"),
    ({"tp_grid": "3x1"}, "rows and columns of tp_grid to divide n_embd=256, got tp_grid=3x1"),
    ({"tp_grid": "1x4", "n_head": 2}, "tp_grid of at most n_head=2 columns, got tp_grid=1x4; ch"),
    ({"model": "micro", "tp": 3}, "tp to divide the MLP's width of 512, got tp=3; change --tp"),
    (
        {"model": "micro", "tp": 4, "block_size": 66},
        "tp to divide block_size=66 under sequence parallelism, got tp=4; .*--no-sequence-par",
    ),
    ({"n_expert": 4, "ep": 3}, "ep to divide n_expert=4, got ep=3; change --n-expert or --ep"),
    ({"ep": 2}, "ep to divide n_expert=0, got ep=2; change --n-expert or --ep"),
    ({**FP8, "n_embd": 24}, "n_embd to be a multiple of 16 with fp8, not 24, got fp8=all; drop"),
    ({**FP8, "tp": 2}, "fp8_scaling=tensor, or block where 128 * tp=2 divides the features"),
    ({**FP8, "tp": 2, "fp8_scaling": "block"}, "got fp8_scaling=block; add --fp8-scaling tensor"),
    ({**DELAYED, "tp": 2}, "a rank's features to be multiples of 16 with fp8=all, got tp=2; low"),
    (
        {**EXPERTS, "ep": 2, "zero_stage": 1, "shard_size": 3},
        "shard_size to be a multiple of ep=2, whose ranks have all experts, got shard_size=3",
    ),
]  # fmt: skip
# What only those know who have ranks: {fact or setting: value}.
OF_RANKS = [
    ({"shard_size": 3, "dp": 4}, "parallelize: expected shard_size to divide the 4 data-parallel"),
    ({"node_size": 2, "dp": 2, **NODES, "shard_size": None}, "node_size to divide the ranks that"),
    (
        {**NODES, "dp": 8, "shard_size": 4, "wire_gradients": "int8"},
        "no node_size beside copies of shard_size=4, which are .* drop shard_size or node_size",
    ),
    ({"transport": "shm", "dp": 2, **WIRE}, f"transport=shm{APART}wire_gradients: ranks read"),
    (
        {"transport": "shm", "dp": 2, "wire_weights": "int8", "zero_stage": 1},
        f"transport=shm{APART}wire_weights: ranks read each other's memory; drop one of them",
    ),
]  # fmt: skip


def piece(message):
    """A regular expression of a message, in which .* stands for anything."""
    return ".*".join(map(rules.re.escape, message.split(".*")))


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_refused_settings(changes, message):
    with pytest.raises(ValueError, match=piece(message)):
        TrainConfig().replace(changes)


@pytest.mark.parametrize(("facts", "message"), OF_RANKS)
def test_what_ranks_know(facts, message):
    with pytest.raises(ValueError, match=piece(message)):
        check("parallelize", facts)


def test_every_rule_refuses_a_row():
    found = set()
    for changes, _ in REFUSED:
        unchecked = copy.copy(TrainConfig())
        vars(unchecked).update(vars(TrainFlags().replace(changes)))
        values = known(unchecked, unchecked.model_config(vocab_size=1))
        found.add(next(broken("train", values)))
    found |= {next(broken("parallelize", facts)) for facts, _ in OF_RANKS}
    assert [rule.says for rule in RULES if rule not in found] == []


def test_the_table_of_what_runs_together_names_every_pair():
    lines = rules_text().splitlines()
    assert max(map(len, lines)) <= 100
    (numbered,) = [n for n, line in enumerate(lines) if line.startswith("  1. ")]
    told = " ".join(" ".join(lines[numbered:]).split())
    for rule in (*(pair.rule() for pair in PAIRS), *RULES):
        ends = rules.re.split(r"<[^>]*>|\{[^}]*\}", rule.says)
        assert all(end.strip() in told for end in ends), rule.says


IDLE_VALUES = {
    **{"schedule": "gpipe", "chunks": 2, "pp_split": "4", "cp_method": "keys", "muon_lr": 0.1},
    **{"sequence_parallel": False, "betas": (0.8, 0.9), "lr_decay_fraction": 0.2},
    **{"outer_wire": "int8", "wire_gradients": "int8", "wire_weights": "int8", "node_size": 2},
    **{"check_replicas_every": 2, "error_feedback": True, "error_buffer": True, "shard_size": 1},
    **{"reduce_dtype": "bf16", "bucket_mb": 4.0, "transport": "torch", "max_restarts": 2},
    **{"keep_every": 5, "save_overlap": "skip", "prompt": ("a",), "max_new_tokens": 5},
    **{"temperature": 1.0, "top_k": 5, "expert_top_k": 1, "expert_every": 2, "expert_hidden": 8},
    **{"expert_capacity": 1.0, "balance_loss": 0.1, "router_z_loss": 0.1, "balance_rate": 0.1},
    **{"model": "micro", "n_layer": 2, "n_head": 2, "n_embd": 8},
}
# Settings without which others do something.
OFF = {"save_every": 0, "async_save": False, "num_samples": 0, "optimizer": "adafactor"}


def test_settings_that_do_nothing_are_refused_or_dropped_where_a_run_had_them():
    assert {rule.names[0] for rule in OF_IDLE} == set(IDLE_VALUES)
    for name, value in IDLE_VALUES.items():
        read = name in ("model", "n_layer", "n_head", "n_embd")
        flags = TrainFlags().replace({**OFF, "init_from": "w" if read else None, name: value})
        flag = option(name, value)
        with pytest.raises(ValueError, match=f"^{flag} does nothing with.*, or .*{flag}$"):
            without_idle(flags, (), ranks=1)
        assert without_idle(flags, (name,), ranks=1).settings()[name] == DEFAULTS[name]
    ranks = {"nproc": 4, "pp": 2, "schedule": "gpipe", "wire_gradients": "int8", "zero_stage": 1}
    flags = TrainFlags().replace(ranks)
    assert without_idle(flags, (), ranks=4) == flags


def test_a_command_line_is_checked_once(monkeypatch):
    asked = []

    def counted(who, values, learned=None, rules=RULES):
        asked.append(learned)
        check(who, values, learned, rules)

    monkeypatch.setattr(config, "check", counted)
    found = parse_train(["--max-steps", "3", "--out", "r", "--replicas", "1"])
    assert found.in_folder("elsewhere").run.out == "elsewhere"
    assert asked == [None]
