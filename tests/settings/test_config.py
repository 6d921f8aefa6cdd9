"""GPTConfig and TrainConfig: what they accept, what they refuse and how they say it."""

import pytest

from fastpar.settings.config import PRESETS, GPTConfig, TrainConfig, derive_batch
from fastpar.settings.files import option

NAN = float("nan")
GRAPHS = {"cuda_graphs": True, "device": "cuda"}
FP8 = {"fp8": "all", "fp8_emulate": True, "n_head": 2, "n_embd": 16}
DELAYED = {**FP8, "fp8_scaling": "tensor", "fp8_weight_gradient": "fp8"}
STAGES = {"pp": 2, "n_layer": 3}
GRID = {"tp_grid": "2x2"}


def test_published_sizes():
    assert PRESETS["gpt2"] == GPTConfig()
    assert (PRESETS["gpt2-xl"].n_layer, PRESETS["gpt2-xl"].n_embd) == (48, 1600)
    for config in PRESETS.values():
        assert config.padded_vocab_size % 128 == 0 <= config.padded_vocab_size - config.vocab_size
        assert config.head_dim * config.n_head == config.n_embd


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"n_layer": 0},
            r"expected a positive integer, got n_layer=0; set n_layer >= 1",
        ),
        ({"block_size": True}, r"GPTConfig: expected a positive integer, got block_size=True"),
        ({"vocab_size": 2.5}, r"GPTConfig: expected a positive integer, got vocab_size=2.5"),
        ({"n_embd": 100, "n_head": 3}, r"expected n_embd divisible by n_head=3, got n_embd=100"),
        ({"dropout": 1.0}, r"GPTConfig: expected 0 <= dropout < 1, got dropout=1.0"),
        ({"layer_norm_eps": 0.0}, r"expected layer_norm_eps > 0, got layer_norm_eps=0.0"),
    ],
)
def test_refused_shapes(sizes, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**sizes)


def test_formats_of_gradients_that_go_together():
    for changes in (
        {"grad_dtype": "bf16", "dtype": "bf16"},
        {"reduce_dtype": "bf16", "dtype": "fp32"},
        {"reduce_dtype": "fp16", "dtype": "fp16"},
        {"grad_dtype": "bf16"},  # its auto may turn out as bf16
        {"zero_stage": 3, "shard_size": 2, "deterministic": True, "reduce_dtype": "fp32"},
    ):
        TrainConfig().replace(changes)


def test_splits_that_go_together():
    for changes in (
        {"model": "micro", "tp": 4, "zero": 3, "moment_dtype": "bf16"},
        {"model": "micro", "tp": 4, "block_size": 66, "sequence-parallel": False},
        {"model": "gpt2-xl", "tp": 5, "block_size": 1000},
        {"init_from": "a folder whose heads are not known yet", "tp": 3},
        {**FP8, "tp": 2, "fp8_scaling": "block", "n_embd": 256},
        {**FP8, "tp": 2, "fp8_scaling": "tensor", "n_embd": 32},
        {**FP8, "tp": 2, "fp8_scaling": "block", "fp8": "mlp", "n_embd": 64},
    ):
        TrainConfig().replace(changes)


def test_settings_have_one_name_each_and_go_there_and_back():
    config = TrainConfig()
    each = [len(vars(group)) for group in vars(config).values()]
    inner = [
        vars(getattr(config.parallel, n)) for n in ("precision", "wires", "offload", "pipeline")
    ]
    assert len(config.settings()) == sum(each) + sum(map(len, inner)) - len(inner)  # none twice
    changed = TrainConfig().replace({"lr": 1, "betas": [0.8, 0.9], "max-steps": 7, "dtype": "bf16"})
    assert (changed.optim.betas, changed.run.max_steps) == ((0.8, 0.9), 7)
    assert TrainConfig().replace(changed.settings()) == changed
    assert option("max_steps") == "--max-steps"
    for key in ("zero", "zero_stage", "zero-stage"):
        assert TrainConfig().replace({key: 2}).parallel.zero_stage == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_stepps": 1}, r"setting of `fastpar train --help-all` in f.toml, got key=max_stepps; "
         r"did you mean max_steps\?"),
        ({"zzz": 1}, r"got key=zzz; remove it"),
        ({"optim": {"lr": 1.0}}, r"expected a setting .* got key=optim"),
        ({"lr": "fast"}, r"expected float for lr in f.toml, got lr='fast'"),
        ({"max_steps": 1.5}, r"expected int for max_steps in f.toml, got max_steps=1.5"),
        ({"max_steps": True}, r"expected int for max_steps in f.toml, got max_steps=True"),
        ({"betas": [0.9]}, r"expected 2 numbers for betas"),
        ({"prompt": ["a", 1]}, r"expected str or a list of them for prompt in f.toml, got"),
        ({"dtype": "fp8"}, r"expected one of auto, fp32, bf16, fp16 for dtype"),
        ({"compile": 1}, r"expected bool for compile"),
        ({"max_steps": 0}, r"train: expected max_steps >= 1, got max_steps=0; set --max-steps"),
        ({"grad_accum_steps": 0}, r"expected grad_accum_steps >= 1, got grad_accum_steps=0"),
        ({"weight_decay": -0.1}, r"expected weight_decay >= 0, got weight_decay=-0.1"),
        ({"temperature": float("nan")}, r"expected temperature >= 0, got temperature=nan"),
        ({"lr": 0.0}, r"train: expected lr > 0, got lr=0.0; set --lr"),
        ({"bucket_mb": float("inf")}, r"expected bucket_mb > 0, got bucket_mb=inf"),
        ({"bucket_mb": "auto"}, r"expected float for bucket_mb in f.toml, got bucket_mb='auto'"),
        ({"betas": [0.9, 1.0]}, r"expected 0 <= betas < 1, got betas=\(0.9, 1.0\)"),
        ({"min_lr": 1.0}, r"expected min_lr <= lr=0.0025, got min_lr=1.0"),
        ({"optimizer": "sgd"}, r"expected one of adamw, adafactor, muon for optimizer in f"),
        ({"moment_dtype": "fp8"}, r"expected one of fp32, bf16, int8 for moment_dtype"),
        ({"optimizer": "adafactor", "moment_dtype": "int8"},
         r"expected moment_dtype=fp32 with optimizer=adafactor, got moment_dtype=int8; use --opt"),
        ({"optimizer": "adafactor", "stochastic_rounding": True},
         r"expected stochastic_rounding=False with optimizer=adafactor, got .*leave --stoch"),
        ({"optimizer": "muon", "moment_dtype": "bf16"},
         r"expected moment_dtype=fp32 with optimizer=muon, got moment_dtype=bf16; use --opt"),
        ({"lr_schedule": "step"}, r"one of cosine, wsd, linear for lr_schedule in f.toml, got lr"),
        ({"lr_decay_fraction": 0.0}, r"expected 0 < lr_decay_fraction <= 1, got lr_decay_f"),
        ({"muon_lr": 0.0}, r"train: expected muon_lr > 0, got muon_lr=0.0; set --muon-lr"),
        ({"stochastic_rounding": True, "master_weights": "full"},
         r"stochastic_rounding or master_weights, got both: master_weights=full; leave one of"),
        ({"stochastic_rounding": True, "dtype": "fp32"},
         r"expected bf16 weights with stochastic_rounding, got dtype=fp32; use --dtype bf16"),
        ({"master_weights": "remainder", "dtype": "fp16"},
         r"expected bf16 weights with master_weights=remainder, got dtype=fp16; use --master-w"),
        ({"zero_stage": 4}, r"one of 0, 1, 2, 3 for zero_stage in f.toml, got zero_stage=4; see"),
        ({"zero_stage": True}, r"expected one of 0, 1, 2, 3 for zero_stage .* got zero_stage=True"),
        ({"zero": 4}, r"expected one of 0, 1, 2, 3 for zero_stage in f.toml"),
        ({"shard_size": 2}, r"expected zero_stage 1, 2 or 3 with shard_size, got zero_stage=0 "
         r"with shard_size=2; add --zero, or"),
        ({"optimizer": "adafactor", "zero_stage": 1},
         r"zero_stage=0 and tp=1 with optimizer=adafactor, .* got zero_stage=1, tp=1; use --op"),
        ({"optimizer": "adafactor", "tp": 2},
         r"whose means of rows and columns need whole matrices, got zero_stage=0, tp=2; use --op"),
        ({"moment_dtype": "int8", "tp": 2},
         r"moment_dtype fp32 or bf16 with tp > 1, got moment_dtype=int8 with tp=2; .* --moment-d"),
        ({"tp": 0}, r"train: expected tp >= 1, got tp=0; set --tp"),
        ({"tp": True}, r"expected int for tp in f.toml, got tp=True"),
        ({"sequence_parallel": 1}, r"expected bool for sequence_parallel in f.toml, got sequen"),
        ({"model": "micro", "tp": 3}, r"to divide the MLP's width of 512, got tp=3; change --tp"),
        ({"model": "micro", "tp": 8}, r"of at most n_head=4, got tp=8; .* by heads: lower --tp"),
        ({"model": "micro", "tp": 4, "block_size": 66},
         r"to divide block_size=66 under sequence parallelism, got tp=4; .* --no-sequence-parall"),
        ({"shard_size": 0, "zero_stage": 1}, r"expected shard_size >= 1, got shard_size=0"),
        ({"activation_checkpointing": "block"}, r"one of none, full, selective for activ"),
        ({"transport": "tcp"}, r"expected one of auto, shm, torch for transport"),
        ({"grad_dtype": "bf16", "dtype": "fp32"},
         r"expected grad_dtype to be fp32 or the weights' dtype=fp32, got grad_dtype=bf16; leave"),
        ({"reduce_dtype": "fp16", "dtype": "bf16"},
         r"expected reduce_dtype to be fp32 or the weights' dtype=bf16, got reduce_dtype=fp16"),
        ({"reduce_dtype": "bf16", "deterministic": True},
         r"expected reduce_dtype=fp32 with deterministic, got reduce_dtype=bf16; sums of 16 bits"),
        ({"grad_dtype": "bf16", "dtype": "bf16", "deterministic": True},
         r"expected grad_dtype=fp32 with deterministic, got grad_dtype=bf16; .* leave --grad-dty"),
        ({"name": "a/b"}, r"expected name of letters, digits and . _ \+ -, got name='a/b'"),
        ({"keep_every": -1}, r"expected keep_every >= 0, got keep_every=-1; set --keep-every"),
        ({"save_overlap": "queue"}, r"expected one of wait, skip for save_overlap in f.toml"),
        ({"async_save": 1}, r"expected bool for async_save in f.toml, got async_save=1"),
        ({"on_nonfinite": "ignore"}, r"one of stop, skip for on_nonfinite in f.toml"),
        ({"check_replicas_every": -1}, r"check_replicas_every >= 0, got check_replicas_every=-1"),
        ({"max_restarts": -1}, r"expected max_restarts >= 0, got max_restarts=-1"),
        ({"timeout": "soon"}, r"a time such as 300s, 5m or 1h30m, got timeout=soon; set --timeout"),
        ({"max_time": "5 min"}, r"expected a time such as 300s, 5m or 1h30m, got max_time=5 min"),
        # Sizes are refused before any text is read.
        ({"model": "mini", "n_embd": 130}, r"n_embd divisible by n_head=4, got n_embd=130"),
        ({"model": "gpt3"}, r"GPTConfig.preset: expected one of gpt2, .*got name=gpt3; choose one"),
        *(({"ema": ema}, r"train: expected 0 < ema < 1, got ema=") for ema in (0.0, 1.0, NAN)),
        ({"pack": "documents", "compile": True}, r"no compile with pack=documents, got compile=T"),
        ({**GRAPHS, "pack": "documents"}, r"pack stream with cuda_graphs: rows have any .* --pack"),
        ({**GRAPHS, "device": "cpu"}, r"device auto or cuda with cuda_graphs: .* change --device"),
        ({**GRAPHS, "zero_stage": 3}, r"zero_stage 0 or 1 with cuda_graphs: .* change --zero"),
        ({**GRAPHS, "tp": 2}, r"tp 1 with cuda_graphs"),
        ({**GRAPHS, "compile": True}, r"compile False .* leave --cuda-graphs out"),
        ({**GRAPHS, "activation_checkpointing": "full"}, r"activation_checkpointing none with c"),
        ({**GRAPHS, "offload": "optimizer", "zero_stage": 1}, r"offload None with .* --offload"),
        ({**GRAPHS, "fp8": "all"}, r"fp8 none with cuda_graphs: .* change --fp8"),
        ({**GRAPHS, "tp_grid": "2x2"}, r"tp_grid None with cuda_graphs: .* change --tp-grid"),
        ({**GRAPHS, "pp": 2}, r"expected pp 1 with cuda_graphs: the"),
        ({**GRAPHS, "n_expert": 4}, r"n_expert 0 with cuda_graphs"),
        ({**GRAPHS, "outer_every": 4}, r"outer_every None with cuda_graphs: the outer step is no"),
        ({"fp8_emulate": True}, r"expected fp8 with fp8_emulate, got fp8=none fp8_emulate=True"),
        ({**DELAYED, "tp": 2}, r"multiples of 16 with fp8=all, got 32 and 8 with tp=2; lower --tp"),
        ({**FP8, "fp8_weight_gradient": "fp8"}, r"fp8_scaling=tensor with fp8_weight_gradient"),
        ({**FP8, "n_expert": 2}, r"n_expert left out or another with fp8=all, got n_expert=2"),
        ({**FP8, "compile": True}, r"expected compile left out .* with fp8=all, got compile=True"),
        ({**FP8, "activation_checkpointing": "selective"}, r"activation_checkpointing left out"),
        ({**FP8, "pp": 2, "schedule": "zb-h1"}, r"schedule left out .*, got schedule=zb-h1"),
        ({**FP8, "n_embd": 24}, r"n_embd to be a multiple of 16 with fp8, got n_embd=24"),
        ({**FP8, "wire_weights": "fp8", "zero_stage": 3}, r"zero_stage=3, .*got .*scaling=row"),
        ({**DELAYED, "wire_weights": "fp8"}, r"expected zero_stage 1, 2 or 3 with wire_weights"),
        ({**DELAYED, "wire_weights": "fp8", "zero_stage": 2}, r"wire_weights=fp8, .*stage=2"),
        ({**FP8, "tp": 2}, r"fp8_scaling=tensor, or block with 256 dividing the 16 features"),
        ({**FP8, "tp": 2, "fp8_scaling": "block"}, r"got fp8_scaling=block; scales would depend"),
        ({**STAGES, "pp": 6}, r"pp \* chunks of at most 5, the 3 layers, .* got pp=6; low"),
        ({**STAGES, "pp_split": "1,1"}, r"pp=2 numbers of layers that make 3, got pp_split=1,1"),
        ({**STAGES, "pp_split": "1,1,1"}, r"as pp=2 numbers .* got pp_split=1,1,1; correct it, or"),
        ({**STAGES, "pp_split": "1+2"}, r"layers, such as 8,4, got pp_split=1\+"),
        ({"pp": 0}, r"expected pp >= 1, got pp=0; set --pp"),
        ({**STAGES, "schedule": "2f2b"}, r"expected one of 1f1b, gpipe, interleaved, .* for sched"),
        ({**STAGES, "chunks": 2}, r"chunks=1 with schedule=1f1b, got chunks=2; leave --chunks out"),
        ({**STAGES, "pp": 3, "schedule": "zb-v"}, r"at most 5, .* got pp \* chunks = 3 \* 2; low"),
        ({**STAGES, "schedule": "zb-v", "pp_split": "1,2"}, r"as pp \* chunks = 2 \* 2 numbers of"),
        ({**STAGES, "compile": True}, r"no compile with pp > 1, got compile=True with pp=2; leave"),
        ({**STAGES, "optimizer": "adafactor"}, r"got optimizer=adafactor with pp=2; leave one"),
        ({"outer_every": 0}, r"train: expected outer_every >= 1, got outer_every=0; these are"),
        ({"outer_momentum": 0.5}, r"outer_every with outer_momentum, got outer_momentum=0.5"),
        ({"replicas": 2}, r"outer_every with replicas, got replicas=2 alone; add --outer-e"),
        ({"outer_every": 4, "outer_lr": 3.0}, r"outer_lr in \(0, 2\], got outer_lr=3.0; 1"),
        ({"outer_every": 4, "outer_wire": "int8", "deterministic": True},
         r"expected deterministic False with outer_wire=int8, got deterministic="),
        ({"replicas": 0, "outer_every": 4}, r"expected replicas >= 1, got replicas=0"),
        ({"tp_grid": "2"}, r"expected tp_grid as ROWSxCOLUMNS or ROWSxCOLUMNSxDEPTH of ranks, got"),
        ({"tp_grid": "1x1"}, r"expected tp_grid of two or three positive integers"),
        *(({**GRID, axis: 2, "n_expert": 2 * (axis == "ep")}, rf"expected no {axis} beside tp_grid")
          for axis in ("tp", "pp", "cp", "ep")),
        ({**GRID, "optimizer": "muon"}, r"expected optimizer=adamw with tp_grid=2x2"),
        ({**GRID, "compile": True}, r"expected compile=False with tp_grid=2x2, got compile=True"),
        ({**GRID, "offload": "optimizer"}, r"expected offload=None with tp_grid"),
        ({**GRID, "fp8": "mlp"}, r"expected fp8=none with tp_grid=2x2, got fp8=mlp"),
        ({**GRID, "n_expert": 4}, r"expected n_expert=0 with tp_grid=2x2, got n_expert=4"),
        ({**GRID, "replicas": 2, "outer_every": 2}, r"expected replicas=1 with tp_grid"),
        ({**GRID, "sequence_parallel": False}, r"expected sequence_parallel=None with"),
        ({**GRID, "pack": "documents"}, r"expected pack=stream with tp_grid=2x2"),
        ({**GRID, "moment_dtype": "int8"}, r"expected moment_dtype fp32 or bf16 with"),
        ({"tp_grid": "3x1"}, r"expected rows and columns of tp_grid to divide n_embd="),
        ({"tp_grid": "1x4", "n_head": 2}, r"at most n_head=2 columns, .* got tp_grid=1x4; change"),
        ({"n_expert": 4, "expert_top_k": 5}, r"top_k of at most n_expert=4, got top_k=5"),
        ({"n_expert": 4, "ep": 3}, r"multiple of ep=3, got n_expert=4; set --n-expert 6"),
        ({"ep": 2}, r"a multiple of ep=2, got n_expert=0; set --n-expert 2"),
        ({"n_expert": 4, "expert_capacity": 0.0}, r"expert_capacity > 0, got expert_capacity=0.0"),
        ({"n_expert": 4, "cp": 2, "expert_capacity": 1.0},
         r"no expert_capacity with cp=2, whose .* got expert_capacity=1.0; drop one of them"),
        ({"n_expert": 4, "ep": 2, "optimizer": "adafactor"},
         r"optimizer left out with ep=2, got optimizer=adafactor; drop it, or --ep"),
    ],
)  # fmt: skip
def test_refused_settings(changes, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig().replace(changes, "f.toml")


def test_why_there_are_no_graphs_is_known_where_nobody_asked_for_them():
    assert not TrainConfig().why_no_graphs()
    assert TrainConfig().replace({"tp": 2}).why_no_graphs().startswith("tp 1 with cuda_graphs")


def batch(rows, micro=None, accum=None):
    return {"batch_size": rows, "micro_batch_size": micro, "grad_accum_steps": accum}


def test_batches_are_derived():
    assert derive_batch(**batch(32), block_size=128, dp_size=1) == (32, 1)
    assert derive_batch(**batch(32), block_size=128, dp_size=2) == (16, 1)
    assert derive_batch(**batch(480), block_size=1024, dp_size=8) == (
        15,
        4,
    )  # 16 would fit 16384 tokens
    assert derive_batch(**batch(7), block_size=100_000, dp_size=1) == (1, 7)
    assert derive_batch(**batch(24, micro=3), block_size=64, dp_size=2) == (3, 4)
    assert derive_batch(**batch(24, accum=4), block_size=64, dp_size=2) == (3, 4)
    assert derive_batch(**batch(24, micro=3, accum=4), block_size=64, dp_size=2) == (3, 4)
    assert derive_batch(**batch(2), block_size=64, dp_size=2) == (1, 1)


@pytest.mark.parametrize(
    ("settings", "ranks", "message"),
    [
        (batch(2), 4, r"each of dp=4 \(ranks / tp / cp / pp\), got batch_size=2; use fewer"),
        (batch(32), 3, r"grad_accum_steps = 3 . 10 . 1 = 30, got batch_size=32"),
        (batch(32, micro=3), 2, r"= 2 . 3 . 5 = 30, got batch_size=32; change --batch-size, or"),
        (batch(32, accum=3), 1, r"grad_accum_steps = 1 . 10 . 3 = 30, got batch_size=32"),
        (batch(4, micro=16), 1, r"grad_accum_steps = 1 . 16 . 1 = 16, got batch_size=4"),
        (batch(4, micro=2, accum=3), 1, r"grad_accum_steps = 1 . 2 . 3 = 6, got batch_size=4"),
        (batch(12), 5, r"batch_size=12; use one of dp=1, 2, 3, 4, 6, 12, or ch"),
    ],
)
def test_refused_batches(settings, ranks, message):
    with pytest.raises(ValueError, match=message):
        derive_batch(**settings, block_size=64, dp_size=ranks)
