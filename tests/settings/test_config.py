"""GPTConfig and TrainConfig: what they accept and refuse; settings from files and words; help."""

import inspect
import re
from dataclasses import is_dataclass
from typing import get_type_hints

import pytest
from cells import sweep

from fastpar.axes.step import Setup
from fastpar.settings.config import TrainConfig, derive_batch
from fastpar.settings.fields import flat
from fastpar.settings.files import option, parse_seconds, read_settings
from fastpar.settings.model import PRESETS, GPTConfig
from fastpar.settings.options import TrainFlags
from fastpar.settings.parallel import Parallel

FP8 = {"fp8": "all", "fp8_emulate": True, "n_head": 2, "n_embd": 16}


def test_what_goes_together():
    for config in PRESETS.values():
        assert config.padded_vocab_size % 128 == 0 <= config.padded_vocab_size - config.vocab_size
        assert config.head_dim or config.head_size * config.n_head == config.n_embd
    assert PRESETS["gpt2"] == GPTConfig()
    for changes in (
        {"grad_dtype": "bf16", "dtype": "bf16"},
        {"reduce_dtype": "bf16", "dtype": "fp32"},
        {"grad_dtype": "bf16"},  # its auto may turn out as bf16
        {"wire_gradients": "int8", "zero_stage": 3},
        {"node_size": 4, "secondary_shards": True, "zero_stage": 3},
        {"zero_stage": 3, "shard_size": 2, "deterministic": True, "reduce_dtype": "fp32"},
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
    parts = ("precision", "wires", "offload", "pipeline")
    inner = [vars(getattr(config.parallel, name)) for name in parts]
    groups = len(inner) + 1  # that of axes that were registered is empty
    assert len(config.settings()) == sum(each) + sum(map(len, inner)) - groups  # none twice
    changed = config.replace({"lr": 1, "betas": [0.8, 0.9], "max-steps": 7, "dtype": "bf16"})
    assert (changed.optim.betas, changed.run.max_steps) == ((0.8, 0.9), 7)
    for there in (changed, config):
        assert config.replace(there.settings()) == there
    assert vars(config) == vars(TrainFlags())  # the defaults pass their own checks
    assert option("max_steps") == "--max-steps"
    for key in ("zero", "zero_stage", "zero-stage"):
        assert config.replace({key: 2}).parallel.zero_stage == 2


SHAPES = [
    ({"n_layer": 0}, r"expected an integer n_layer >= 1, got n_layer=0; set n_layer >= 1"),
    ({"block_size": True}, r"GPTConfig: expected an integer block_size >= 1, got block_size=True"),
    ({"vocab_size": 2.5}, r"GPTConfig: expected an integer vocab_size >= 1, got vocab_size=2.5"),
    ({"n_embd": 100, "n_head": 3}, r"expected n_embd divisible by n_head=3, got n_embd=100"),
    ({"dropout": 1.0}, r"GPTConfig: expected 0 <= dropout < 1, got dropout=1.0"),
    ({"layer_norm_eps": 0.0}, r"expected layer_norm_eps > 0, got layer_norm_eps=0.0"),
]
SETTINGS = [
    ({"max_stepps": 1}, r"setting of `fastpar train --help-all` in f.toml, got key=max_stepps; "
     r"did you mean max_steps\?"),
    ({"zzz": 1}, r"got key=zzz; remove it"),
    ({"optim": {"lr": 1.0}}, r"expected a setting .* got key=optim"),
    ({"lr": "fast"}, r"expected float for lr in f.toml, got lr='fast'"),
    ({"max_steps": True}, r"expected int for max_steps in f.toml, got max_steps=True"),
    ({"betas": [0.9]}, r"expected 2 numbers for betas"),
    ({"prompt": ["a", 1]}, r"expected str or a list of them for prompt in f.toml, got"),
    ({"dtype": "fp8"}, r"expected one of auto, fp32, bf16, fp16 for dtype"),
    ({"compile": 1}, r"expected bool for compile"),
    ({"bucket_mb": "auto"}, r"expected float for bucket_mb in f.toml, got bucket_mb='auto'"),
    ({"zero_stage": True}, r"expected one of 0, 1, 2, 3 for zero_stage .* got zero_stage=True"),
    ({"zero": 4}, r"expected one of 0, 1, 2, 3 for zero_stage in f.toml"),
    ({"sequence_parallel": 1}, r"expected bool for sequence_parallel in f.toml, got sequen"),
    ({"model": "mini", "n_embd": 130}, r"n_embd divisible by n_head=4, got n_embd=130"),
    ({"model": "gpt3"}, r"GPTConfig.preset: expected one of gpt2, .*got name=gpt3; choose one"),
    ({"n_expert": 4, "expert_top_k": 5}, r"top_k <= n_expert=4, got top_k=5"),
    ({"n_expert": 4, "expert_capacity": 0.0}, r"expert_capacity > 0, got expert_capacity=0.0"),
]  # fmt: skip


@sweep(("shape", "changes", "message"), [(1, *r) for r in SHAPES] + [(0, *r) for r in SETTINGS])
def test_refused_settings(shape, changes, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**changes) if shape else TrainConfig().replace(changes, "f.toml")


@sweep(
    ("rows", "micro", "accum", "block_size", "ranks", "expected"),
    [
        (32, None, None, 128, 1, (32, 1)),
        (32, None, None, 128, 2, (16, 1)),
        (480, None, None, 1024, 8, (15, 4)),  # 16 would fit 16384 tokens
        (7, None, None, 100_000, 1, (1, 7)),
        (24, None, 4, 64, 2, (3, 4)),
        (24, 3, 4, 64, 2, (3, 4)),
        (2, None, None, 64, 2, (1, 1)),
        (2, None, None, 64, 4, r"dp=4 \(ranks / tp / cp / pp\), got batch_size=2; use fewer"),
        (32, None, None, 64, 3, r"grad_accum_steps = 3 . 10 . 1 = 30, got batch_size=32"),
        (32, 3, None, 64, 2, r"= 2 . 3 . 5 = 30, got batch_size=32; change --batch-size, or"),
        (32, None, 3, 64, 1, r"grad_accum_steps = 1 . 10 . 3 = 30, got batch_size=32"),
        (4, 2, 3, 64, 1, r"grad_accum_steps = 1 . 2 . 3 = 6, got batch_size=4"),
        (12, None, None, 64, 5, r"batch_size=12; use one of dp=1, 2, 3, 4, 6, 12, or ch"),
    ],
)
def test_batches_are_derived(rows, micro, accum, block_size, ranks, expected):
    given = {"batch_size": rows, "micro_batch_size": micro, "grad_accum_steps": accum}
    given |= {"block_size": block_size, "dp_size": ranks}
    if isinstance(expected, tuple):
        assert derive_batch(**given) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            derive_batch(**given)


def test_every_setting_has_a_default_and_help():
    groups = list(get_type_hints(TrainFlags).values())
    for group in groups:
        source = "".join(inspect.getsource(part) for part in group.__mro__[:-1])
        for name, hint in get_type_hints(group).items():
            if is_dataclass(hint):
                groups.append(hint)
            else:
                assert re.search(rf'    {name}: [^\n]+ = [^\n]+\n    "{{3}}[^"]+', source), name


def test_rates_that_are_not_set_fit_the_run():
    """Warm-ups of short runs are longer than a tenth; given weights are not undone."""
    runs = [TrainConfig().replace({"max_steps": steps}) for steps in (1, 5, 30, 60, 400, 50_000)]
    assert [run.warmup_steps for run in runs] == [0, 2, 15, 20, 40, 1000]
    assert TrainConfig().replace({"max_steps": 30, "warmup_steps": 3}).warmup_steps == 3
    new, given = TrainConfig(), TrainConfig().replace({"init_from": "weights"})
    assert (new.lr, new.min_lr) == (2.5e-3, 2.5e-4)
    assert given.lr < new.lr / 5
    assert given.replace({"lr": 0.1}).lr == 0.1
    with pytest.raises(ValueError, match=r"min_lr <= lr=0\.0003, got min_lr=0\.001"):
        given.replace({"min_lr": 1e-3})


def test_times():
    for text, seconds in (
        ("300", 300), ("300s", 300), ("5m", 300), ("1h30m", 5400), ("1.5h", 5400),
        *((t, 0) for t in ("", "0", "0s", "m", "5x", "5m and", "1e3", "-3s")),
    ):  # fmt: skip
        assert parse_seconds(text) == seconds, text


def test_settings_files(tmp_path):
    """Headings are for the reader."""
    toml, json = tmp_path / "a.toml", tmp_path / "config.json"
    toml.write_text('lr = 0.1\n[model]\nmodel = "gpt2"\n[train]\nmax-steps = 7\n')
    config = TrainConfig().replace(read_settings(toml))
    assert (config.optim.lr, config.shape.model, config.run.max_steps) == (0.1, "gpt2", 7)
    json.write_text('{"settings": {"lr": 0.1}, "versions": {}}')
    assert read_settings(json) == {"lr": 0.1}
    with pytest.raises(ValueError, match="read_settings: expected a settings file, got path="):
        read_settings(tmp_path / "none.toml")
    for path, text, words in (
        (toml, "[optim]\nlearning = 0.2\n", "got key=learning"),
        (toml, "lr = 0.1\n[optim]\nlr = 0.2\n", r"correct it: lr is set twice, the second time un"),
        (toml, "lr = = 3", "expected TOML or the config.json of a run, got path"),
        (json, "lr = = 3", "expected TOML or the config.json of a run, got path"),
        *((json, text, 'it has no object "settings"') for text in ("{}", "[1]", '{"settings": 1}')),
        (json, 100_000 * "[", "expected TOML or the config.json of a run, got path"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=words):
            TrainConfig().replace(read_settings(path))


def test_a_setting_of_parallel_is_known_to_flags_planner_and_records():
    """A new one needs its field alone; tests/axes/test_toy_axis.py has those of a new axis."""
    usual = flat(Parallel())
    assert usual.keys() <= TrainFlags().settings().keys()
    assert Setup(**usual).in_effect().keys() >= usual.keys()
    assert Parallel.of(**usual) == Parallel()
