"""The same run at every layout; experts, fp8, averages, documents, replicas, states on the host."""

import json
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from cells import slow
from fake_streams import poisoned
from train_runs import FEW, STORAGE, Runs, bits, check_same, curve, flags_of, forget_after, steps

from fastpar import engine_of, parallelize, pipeline_step
from fastpar.checkpoint.commands import export_weights
from fastpar.checkpoint.restore import load_weights, read_run_state
from fastpar.cli import main
from fastpar.comm.host import SlowBus
from fastpar.comm.mesh import Mesh
from fastpar.engine.control import Control
from fastpar.engine.debug import Debug
from fastpar.engine.engine import Engine
from fastpar.files.runs import checkpoint_folder, list_checkpoints, step_of
from fastpar.models import set_up
from fastpar.models.gpt import GPT, upcycled
from fastpar.models.hf import load_hf, save_hf
from fastpar.nn import recompute
from fastpar.predict import run as capacity
from fastpar.predict.memory import activations_on_host
from fastpar.settings.config import TrainConfig
from fastpar.settings.model import GPTConfig
from fastpar.testing import run_ranks
from fastpar.train.journal import read_metrics
from fastpar.train.start import pick_dtype
from fastpar.train.trainer import Trainer, validation_loss

run = Runs(**FEW)
SAME = {**FEW, "deterministic": True}
EXPERTS = {"n_layer": 2, "n_expert": 4, "balance_loss": 0.1, "router_z_loss": 0.01}
EXPERTS |= {"balance_rate": 0.01}
FP8 = {"n_layer": 2, "fp8": "all", "fp8_emulate": True}
DELAYED = {**FP8, "fp8_scaling": "tensor", "fp8_weight_gradient": "fp8"}
DOCUMENTS = {"data": "texts", "pack": "documents", "tokenizer": "bpe-300", "n_layer": 4}
DOCUMENTS |= {"micro_batch_size": 1, "dropout": 0.1}
MUON = {"optimizer": "muon", "muon_lr": 1e-3}
NANOCHAT = {"model": "nanochat-tiny", **MUON}
# What a run trains, however it is shared: with dropout and clipping.
BASES = {
    "dense": {},
    "deep": {"n_layer": 3, "eval_every": 2},
    "deep, rounding": {"n_layer": 3, **STORAGE[1]},
    "average, bf16": {"ema": 0.3, "dtype": "bf16", "master_weights": "remainder"},
    "muon": {"n_layer": 3, "optimizer": "muon", "ema": 0.3},
    "nanochat": {**NANOCHAT, "n_layer": 3, "dropout": 0.1},
    "experts": EXPERTS,
    "experts, rounding": {**EXPERTS, "dtype": "bf16", "stochastic_rounding": True},
    "fp8": FP8,
    "fp8 delayed": DELAYED,
    "documents": DOCUMENTS,
}
Z1, Z2, Z3 = ({"zero_stage": stage} for stage in (1, 2, 3))
FULL, SELECTIVE = ({"activation_checkpointing": mode} for mode in ("full", "selective"))
UNSHARED = {"sequence_parallel": False}
HOSTED = {**SAME, "n_layer": 3}
OPTIMIZER = {"offload": "optimizer"}
PARAMETERS = {"offload": "parameters", "zero_stage": 3}


def stages(schedule, **more):
    return {"pp": 2, "schedule": schedule, **more}


# Engines are tests/contracts' matrices; here is what the trainer adds: samples, masks, validation,
# saves, averages, scales, and features that those leave out.
LAYOUTS = [
    ("dense", 2, {"zero_stage": 0, "accumulate": "shard"}),
    ("dense", 2, {**Z1, "accumulate": "full"}),
    ("dense", 4, {**Z3, "shard_size": 2}),
    slow("dense", 2, {**Z3, "transport": "torch", **FULL}),
    ("deep", 2, stages("interleaved", pp_split="0,1,1,1", zero_stage=3)),
    slow("deep", 2, {"pp": 2, "on_nonfinite": "skip", "pp_split": "0,3"}),
    slow("deep, rounding", 2, {"pp": 2}),  # both copies of the tied table are rounded alike
    ("average, bf16", 2, Z3),
    slow("muon", 2, {"pp": 2, "pp_split": "0,3", **Z1}),  # a stage without a layer
    slow("nanochat", 4, stages("interleaved", **Z2, **SELECTIVE)),
    ("experts", 2, {"ep": 2, **Z3}),
    slow("experts", 4, {"ep": 2, "pp": 2, **Z1}),
    slow("experts, rounding", 4, {"ep": 4, **Z2, "shard_size": 4}),
    slow("fp8", 2, {**Z2, **FULL}),
    ("fp8 delayed", 2, Z3),
    slow("fp8 delayed", 4, {**Z3, "pp": 2, "pp_split": "2,0"}),
    slow("documents", 2, {"pp": 2, **Z2}),
    slow("documents", 2, stages("interleaved", zero_stage=3, **FULL)),
]


def name(value):
    if isinstance(value, dict):
        return "-".join(f"{key}={x}" for key, x in value.items())
    return ">".join(f"{ranks}" for ranks, _ in value) if isinstance(value, list) else str(value)


@pytest.mark.parametrize(("base", "ranks", "layout"), LAYOUTS, ids=name)
def test_every_layout_has_the_bits_of_one_process(made, base, ranks, layout):
    """Losses, norms, validations, texts, weights, moments, averages and scales."""
    settings = {**SAME, **BASES[base]}
    one = made(1, **settings)
    assert 0 < max(row["grad_norm"] for row in steps(one)) != 1.0
    check_same(made(ranks, **settings, **layout), one)


@pytest.mark.slow
def test_what_a_base_trains_is_no_other(made):
    found = [steps(made(1, **{**SAME, **base}))[-1]["loss"] for base in BASES.values()]
    assert len({round(loss, 12) for loss in found}) >= len(BASES) - 2  # averages change no loss


SPLIT = {**FEW, "n_layer": 2, "n_head": 4}
# What a trainer has beside model and optimizer, whose states are tests/contracts/test_reshard.py's.
HOPS = {
    "averages": ({**STORAGE[0], "ema": 0.3}, [(2, Z3), (1, {}), (2, Z2)]),
    "experts": (EXPERTS, [(4, {"ep": 4, **Z2}), (2, {"ep": 2, **Z3}), (1, {})]),
    "fp8": (DELAYED, [(1, {}), (4, Z3), (2, {"pp": 2}), (2, Z3)]),
    "documents": (DOCUMENTS, [(1, {}), (2, Z1)]),
    "host": (
        {"n_layer": 3, "ema": 0.9},
        [
            (1, {}),
            (2, PARAMETERS),
            (2, {**OPTIMIZER, **Z2, "offload_keep_mb": 0.05}),
            (2, {**OPTIMIZER, "pp": 2, "schedule": "interleaved", "offload_pinned": False}),
        ],
    ),
    "wsd": ({"lr_schedule": "wsd", "lr_decay_fraction": 0.75}, [(1, {}), (2, Z3), (2, {})]),
}


@pytest.fixture
def bus(monkeypatch):
    """A bus on a machine without a GPU."""
    real, debug = set_up.parallelize, Debug(bus_gb_s=1.0, poison=True)

    def parallelized(model, mesh, settings, **options):
        on_bus = {"debug": debug} if settings.offload.what else {}
        return real(model, mesh, settings, **options, **on_bus)

    monkeypatch.setattr(set_up, "parallelize", parallelized)
    monkeypatch.setattr(recompute, "_LEAST_BYTES", 1024)
    monkeypatch.setattr(set_up, "bus_of", lambda device, pinned: poisoned(SlowBus)(1.0))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["averages", *map(slow, [*HOPS][1:])])
def test_a_run_goes_on_at_any_other_layout(made, bus, case):
    """A step at each, from the checkpoint of the one before: as if uninterrupted."""
    settings, hops = HOPS[case]
    settings = {**SAME, **settings, "save_every": 1}
    out = made.cut(1, hops[0][0], **settings, **hops[0][1])
    for step, (ranks, layout) in enumerate(hops[1:], 1):
        forget_after(out, step)
        made.go_on(out, ranks, **{**settings, **layout})
    check_same(out, made(1, **settings))


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (1, FEW),
        slow(4, {**SPLIT, "tp": 2, **Z3}),
        slow(2, {**SPLIT, **DOCUMENTS, "n_layer": 2, "cp": 2, "cp_method": "keys"}),
        *(slow(2, {**FEW, **storage}) for storage in STORAGE),
        slow(4, {**FEW, **Z3, "shard_size": 2}),
    ],
    ids=name,
)
def test_a_resume_on_the_same_ranks_has_the_bits_of_the_whole_run(made, ranks, settings):
    half = settings["max_steps"] // 2
    out = made.cut(half, ranks, **settings)
    made.go_on(out, ranks, **settings)
    check_same(out, made(ranks, **settings))


def train_in_fp64(changes):
    """(step, loss) of validations and (loss, norm, requests) of steps, on one rank."""
    trainer, found = Runs(**SPLIT).trainer(**changes), []
    tp = trainer.model.tp
    if "tp" in changes:
        assert tp.sequence_parallel == changes.get("sequence_parallel", True)
    for _ in range(3):
        trainer.validate()
        found += [torch.tensor(trainer.val).double(), trainer.train_step().values]
    return torch.cat(found)


ALONE = {}  # what one process found, by settings


@pytest.mark.parametrize(
    ("settings", "ranks", "layout"),
    [
        slow({}, 4, {"tp": 4, **UNSHARED}),
        ({}, 2, {"cp": 2, **Z3, **SELECTIVE}),
        ({}, 4, {"tp_grid": "2x2", **Z1, **FULL}),
        slow({}, 4, {"cp": 2, "pp": 2, "grad_accum_steps": 4}),
        slow({}, 8, {"tp_grid": "2x2x2", "micro_batch_size": 4, **SELECTIVE}),
        slow(MUON, 4, {"cp": 2, "tp": 2}),
        slow(EXPERTS, 4, {"cp": 2, "cp_method": "keys", "ep": 2, **Z2}),
        slow(DOCUMENTS, 4, {"cp": 2, "tp": 2, "cp_method": "keys"}),
        slow(NANOCHAT, 4, {"cp": 2, "tp": 2, **Z1}),
        slow({"model": "llama-tiny", **MUON}, 8, {"tp": 4, "pp": 2, "micro_batch_size": 1}),
        slow({"model": "qwen3-tiny"}, 4, {"cp": 2, "cp_method": "keys", "tp": 2, **FULL}),
    ],
    ids=name,
)
def test_split_layers_have_the_curve_of_one_process(here, monkeypatch, settings, ranks, layout):
    """In fp64, where a difference that is no rounding cannot hide."""
    real = set_up.parallelize
    in_fp64 = lambda *of, grad_dtype, **options: real(*of, **options)  # noqa: E731
    monkeypatch.setattr("fastpar.train.start.pick_dtype", lambda *given: "fp64")
    monkeypatch.setattr(set_up, "parallelize", in_fp64)
    key = repr(settings)
    if key not in ALONE:
        [ALONE[key]] = run_ranks(train_in_fp64, 1, settings)
    found = run_ranks(train_in_fp64, ranks, {**settings, **layout})
    assert all(torch.equal(x, found[0]) for x in found)
    torch.testing.assert_close(found[0], ALONE[key], rtol=1e-12, atol=0)


SHAPE = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=130, dropout=0.5)
TOKENS = np.random.default_rng(0).integers(0, 130, 7 * 8 + 1).astype(np.uint16)  # seven windows


def validated(axes, stage, **options):
    mesh = Mesh(**axes, device="cpu")
    model = parallelize(GPT(SHAPE).double(), mesh, zero_stage=stage)
    return validation_loss(model, engine_of(model), TOKENS, block_size=8, **options)


@pytest.mark.parametrize(
    ("ranks", "stage", "axes"),
    [
        *((1, 0, {}), (2, 0, {}), (3, 3, {}), (4, 0, {"tp": 2}), (4, 3, {"tp": 2})),
        *((2, 3, {"tp_grid": (1, 2)}), slow(8, 0, {"tp_grid": (2, 2, 2)})),
    ],
    ids=name,
)
def test_every_window_counts_once_in_validation(ranks, stage, axes):
    """Some ranks get fewer of the seven, or none, and the last batch has one; dropout is off."""
    ids = torch.from_numpy(TOKENS.astype(np.int64))

    def found(**options):
        first, *others = run_ranks(lambda: validated(axes, stage, **options), ranks)
        assert set(others) <= {first}
        return first

    for rows, n_batches, windows in ((1, 100, 7), (2, 100, 7), (4, 100, 7), (2, 2, 4)):
        if "tp_grid" in axes and rows == 1:
            continue
        x, y = (ids[i : i + 8 * windows].view(windows, 8) for i in (0, 1))
        with torch.no_grad():
            expected = GPT(SHAPE).double().eval()(x, y).item()
        assert found(rows=rows, n_batches=n_batches) == pytest.approx(expected, rel=1e-12)


def test_a_step_has_one_exchange(here, monkeypatch):
    counted = []

    def count(cls, method):
        real = getattr(cls, method)

        def call(self, *args, **rest):
            counted.append(method)
            return real(self, *args, **rest)

        monkeypatch.setattr(cls, method, call)

    def three(stage):
        trainer = run.trainer(zero_stage=stage, deterministic=True)
        counted.clear()
        return [trainer.train_step().values.tolist() for _ in range(3)]

    count(Control, "exchange")
    count(Engine, "all_reduce_scalars")
    count(Mesh, "broadcast_")
    for stage in range(4):
        one, two = run_ranks(three, 2, stage)
        assert counted == ["exchange"] * 6
        assert one == two


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tp": 2}, slow({"pp": 2})], ids=name)
def test_sample_and_export_take_a_run_of_ranks(here, capsys, layout):
    """The text at the end is that of the weights that it saved, whole; rank 0 alone draws it."""
    Runs(**SPLIT)("r", 4, **layout, max_steps=2, num_samples=2)
    drawn = Path("r/samples.txt").read_text().partition("\n")[2]
    capsys.readouterr()
    options = ["--num-samples=2", f"--max-new-tokens={FEW['max_new_tokens']}", "--seed=1"]
    assert main(["sample", "r", *options]) == 0
    assert capsys.readouterr().out == drawn
    assert main(["export", "r", "--to=given"]) == 0
    assert main(["sample", "given", *options]) == 0
    assert capsys.readouterr().out.endswith(drawn)


experts = Runs(**{**SAME, **EXPERTS})


@pytest.mark.slow
def test_rows_say_what_experts_do_and_texts_are_drawn_of_them(here, capsys):
    experts("r", 2, ep=2, zero_stage=3, expert_capacity=0.5)
    for row in steps("r"):
        load = torch.tensor(row["expert_load"])
        assert load.shape == (2, 4)
        torch.testing.assert_close(load.sum(1), torch.ones(2), atol=1e-3, rtol=0)
        assert 0.5 <= row["expert_dropped"] < 0.7  # at most half fits
        assert row["balance"] >= 0.99
        assert row["router_z"] > 0
    assert main(["sample", "r", "--max-new-tokens", "4", "--device", "cpu"]) == 0
    # transformers has no such model.
    words = "expected a GPT-2 that transformers supports, got one with n_expert=4"
    assert main(["export", "r", "--to", "hf"]) != 0
    assert re.search(f"{words}.*use the checkpoint itself", capsys.readouterr().err)
    folder = checkpoint_folder("r", 4)
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "fastpar-gpt2-experts"
    model = load_hf(folder)
    assert model.config.n_expert == 4
    with pytest.raises(ValueError, match=f"save_hf: {words}"):
        save_hf(model, "again")
    del config["top_k"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"expected numbers of experts in .*'top_k'"):
        load_hf(folder)


@pytest.mark.slow
def test_an_upcycled_model_has_the_loss_of_the_dense_one(here):
    model = GPT(GPTConfig(2, 2, 16, 16, 50, dropout=0.0), seed=1).double()
    sparse = upcycled(model, {"n_expert": 4, "top_k": 2}, seed=5)
    idx = torch.randint(0, 50, (3, 16))
    assert abs(model(idx, idx) - sparse.eval()(idx, idx)) < 1e-12
    assert sparse.h[0].mlp.router.weight.std() > 0.01  # equal logits would never differ
    for dense, options, words in (
        (model, {"top_k": 1}, "top_k >= 2, .* got top_k=1"),
        (model, {"expert_hidden": 8}, "top_k >= 2, .* as wide as the MLP, got .* expert_hidden=8"),
        (sparse, {}, "a dense model, got one with n_expert=4"),
    ):
        with pytest.raises(ValueError, match=f"upcycled: expected {words}"):
            upcycled(dense, {"n_expert": 4, **options})
    experts("dense", n_expert=0, max_steps=2)
    experts("sparse", 2, ep=2, init_from=str(checkpoint_folder("dense", 2)), max_steps=2)
    last, first = curve("dense")[-1], curve("sparse")[0]
    assert first["val_loss"] == pytest.approx(last["val_loss"], rel=1e-6)
    assert load_weights(checkpoint_folder("sparse", 2)).config.n_expert == 4


def test_metrics_say_how_much_overflowed(here):
    Runs(**{**SAME, **DELAYED})("r", 2, lr=0.3, max_steps=6, save_every=0)
    rows = steps("r")
    assert rows[0]["fp8_overflows"] == 0  # nothing is rounded yet
    assert sum(row["fp8_overflows"] for row in rows) > 0  # such a rate makes weights grow
    tops = torch.tensor(read_run_state(checkpoint_folder("r", 6))["fp8"]["history"])
    assert tops.shape == (16, 8, 3)
    assert (tops[:6] > 0).all()
    assert not tops[6:].any()


def test_devices_that_fp8_refuses(here, capsys, monkeypatch):
    assert main(["train", *flags_of(FEW), "--fp8", "mlp", "--out", "r"]) == 2
    said = capsys.readouterr().err
    assert "newer with fp8=mlp, got device=cpu dtype=fp32; drop --fp8, or add --fp8-emul" in said
    assert not (here / "r").exists()
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    mesh = type("OfGpus", (), {"device": torch.device("cuda")})
    config = TrainConfig().replace({"fp8": "mlp"})
    for minor, dtype, kind in (((8, 6), "auto", "bf16"), ((9, 0), "fp32", "fp32")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=minor: c)
        words = rf"got compute capability {minor[0]}\.{minor[1]} dtype={kind}"
        with pytest.raises(ValueError, match=words):
            pick_dtype(config.replace({"dtype": dtype}), mesh, None)
    assert pick_dtype(config, mesh, None) == "bf16"


AVERAGED = {**SAME, "save_every": 1, "eval_every": 2, "ema": 0.3}


def test_the_average_is_that_of_the_weights_and_trains_the_same(here, made, capsys):
    alone, plain = made(**AVERAGED), made(**{**AVERAGED, "ema": None})
    for row, wanted in zip(curve(alone), curve(plain), strict=True):
        average = row.pop("ema_val_loss", None)
        assert row == wanted  # validating the average leaves no trace
        assert (average is None) == ("val_loss" not in row or row["step"] == 0)
    assert average != wanted["val_loss"]

    def exported(step, to, **options):
        export_weights(checkpoint_folder(alone, step), here / to, **options)
        return {name: p.detach() for name, p in load_weights(here / to).named_parameters()}

    expected, *later = (exported(step, f"to{step}") for step in range(1, 5))
    for step, weights in enumerate(later, 1):  # of the second step and later ones
        factor = min(0.3, (1 + step) / (10 + step))  # young, it keeps less
        expected = {n: p.lerp(weights[n], 1.0 - factor) for n, p in expected.items()}
    got = exported(4, "average", average=True)
    for name, p in got.items():
        torch.testing.assert_close(p, expected[name], rtol=1e-6, atol=1e-7)
    assert any(not torch.equal(p, later[-1][name]) for name, p in got.items())
    half = exported(4, "half", average=True, dtype=torch.bfloat16)
    assert all(torch.equal(p, got[name].bfloat16()) for name, p in half.items())
    assert main(["export", str(plain), "--to", "out", "--ema"]) == 2
    assert "expected averaged weights with --ema, got none in" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_stops_averaging(made):
    half = {**AVERAGED, "dtype": "bf16", "master_weights": "remainder"}
    without = {**half, "ema": None}
    assert bits(made(**without), 4) != bits(made(**half), 4)
    out = made.cut(2, 2, zero_stage=3, **half)
    made.go_on(out, **without)
    assert bits(out, 4) == bits(made(**without), 4)


PACKED = {**SAME, "data": "texts", "pack": "documents", "tokenizer": "bpe-300"}


def test_a_run_packs_documents_and_goes_on_with_them(made):
    out = made.cut(2, **PACKED)
    assert bits(made(**{**PACKED, "pack": "stream"}), 4) != bits(made(**PACKED), 4)
    for changes, words in (
        ({"pack": "stream"}, r"pack=documents as in .*, got pack=stream; drop"),
        ({"data": "text.txt", "tokenizer": "chars"}, "end-of-text token between documents, got en"),
    ):
        with pytest.raises(ValueError, match=words):
            made.go_on(out, **{**PACKED, "max_steps": 6, **changes})


def test_documents_of_a_row_are_as_alone():
    """Loss and gradients of packed documents are those of each by itself, weighed by tokens."""
    model, lengths = GPT(GPTConfig(2, 2, 16, 12, 50, 0.0), seed=3).double(), (5, 4, 3)
    x, y = torch.randint(50, (2, 2, 12))
    y[1, 9:] = -100
    positions = torch.cat([torch.arange(n) for n in lengths]).repeat(2, 1)
    loss = model(x, y, positions=positions)
    packed = torch.autograd.grad(loss, tuple(model.parameters()))
    parts = [p for row in range(2) for p in zip(x[row].split(lengths), y[row].split(lengths))]
    sums = [model(a[None], b[None], reduction="sum") for a, b in parts if b.max() >= 0]
    alone = sum(sums) / (y >= 0).sum()
    assert loss.item() == pytest.approx(alone.item(), rel=1e-12)
    for a, b in zip(packed, torch.autograd.grad(alone, tuple(model.parameters()))):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)


def test_positions_that_are_refused():
    model, x = GPT(GPTConfig(1, 2, 16, 8, 50, 0.0)), torch.zeros(1, 8, dtype=torch.int64)
    long = torch.tensor([[*range(7), 8]])
    for positions, words in (
        (torch.arange(7)[None], r"0 where a row begins, got positions\.shape"),
        (torch.arange(1, 9)[None], r"0 where a row begins, got positions\.shape"),
        (long, "documents of at most block_size=8 tokens, got a positio"),
    ):
        with pytest.raises(ValueError, match=words):
            model(x, x, positions=positions)
    parallelize(model, Mesh(device="cpu"))
    with pytest.raises(ValueError, match=r"positions of idx's shape \[1, 8\], got positions=\[8\]"):
        pipeline_step(model, x, x, positions=torch.arange(8))


APART = {**FEW, "max_steps": 6, "eval_every": 6, "save_every": 1}
EVERY = {"outer_every": 3}


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "wire"), [(2, "fp32"), slow(4, "fp32"), slow(4, "bf16")])
def test_two_replicas_go_on(made, ranks, wire):
    """The second one was killed before it had committed a save: both go on from the one before."""
    outer = {**APART, **EVERY, "replicas": 2, "outer_wire": wire}
    outer |= {"zero_stage": 2 if ranks == 4 else 0}
    whole = made(ranks, **outer)
    assert "== step 6" in (whole / "replica_1/samples.txt").read_text()
    out = made.cut(4, ranks, **outer)
    forget_after(out / "replica_1", 2)
    made.go_on(out, ranks, **outer)
    for found, expected in ((out, whole), (out / "replica_1", whole / "replica_1")):
        assert bits(found, 6) == bits(expected, 6)
        assert [row["tokens"] for row in steps(found)] == [n * 8 * 16 for n in range(1, 7)]
    assert bits(whole, 5) != bits(whole / "replica_1", 5)
    paths = [checkpoint_folder(folder, 6) for folder in (whole, whole / "replica_1")]
    first, second = (load_weights(path).parameters() for path in paths)
    assert all(map(torch.equal, first, second))  # they have just met


class Asked(Trainer):
    """The second replica is asked for something in its first step."""

    def train_step(self):
        if self.step == 0 and self.mesh.replica == 1:
            asked = self.saves.signals if self.config.run.seed else self.stop_signals
            asked.append(signal.SIGUSR1 if self.config.run.seed else signal.SIGTERM)
        return super().train_step()


@pytest.mark.parametrize(("what", "seed", "status"), [("stop", 0, 143), ("save", 1, 0)])
def test_what_one_was_asked_for_all_do_after_the_next_meeting(here, what, seed, status):
    changes = {**APART, "outer_every": 4, "save_every": 0, "seed": seed, "out": "r", "replicas": 2}

    def ask():
        return Asked(TrainConfig().replace(changes), Mesh(replicas=2, device="cpu")).run()

    assert run_ranks(ask, 2) == [status] * 2
    for folder in ("r", "r/replica_1"):
        saves = [step_of(path) for path in list_checkpoints(folder)]
        assert saves == ([4] if what == "stop" else [4, 6])


@pytest.mark.slow
def test_a_replica_has_the_same_samples_at_every_stage(made):
    """Reduced at once or added up first: a replica's micro-batches of a step are the same ones."""
    same = {**APART, "replicas": 2, "micro_batch_size": 1, "deterministic": True, **EVERY}
    cuts = [(0, "full"), (1, "shard"), (2, "auto")]
    runs = [made(4, **same, zero_stage=stage, accumulate=how) for stage, how in cuts]
    for folder in ("", "replica_1"):
        first, *others = (curve(run / folder) for run in runs)
        assert others == [first] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [slow(1, 2), slow(2, 1), (0, 2)])
def test_another_number_of_replicas(here, before, after):
    """0: a run without an outer step, which ends with post-local averaging."""
    run = Runs(**APART)
    run("run", max(1, before), **(EVERY if before else {}), replicas=max(1, before))
    run("run", after, **EVERY, replicas=after, resume=True, max_steps=9, eval_every=9)
    losses = [row["loss"] for row in steps("run")]
    assert len(losses) == 9
    assert losses[8] < losses[0]
    assert all(bits(f"run/replica_{i}", 9) for i in range(1, after))


def test_bytes_of_blocks_inputs_on_the_host(here, bus, monkeypatch):
    """What was pinned is what the plan says; a host with less is refused before the first step."""
    kept = {"offload_activations": True, "activation_checkpointing": "full"}
    run = Runs(**{**HOSTED, **kept, "max_steps": 1, "save_every": 0})
    trainer = run.trainer(out="run")
    trainer.run()
    forwards = [vars(m).get("forward") for m in trainer.model.modules()]
    keepers = {getattr(forward, "keeper", None) for forward in forwards} - {None}
    workload = trainer.setup.workload(trainer.model.config)
    pinned = sum(keeper.host_bytes for keeper in keepers)
    assert pinned == activations_on_host(workload, trainer.setup) > 0
    monkeypatch.setattr(capacity, "free_memory", lambda: 1000)
    words = r"of free memory on the host for offload_activations by 1 rank, got 0.0 MB; lower"
    with pytest.raises(ValueError, match=words):
        run.rank({"out": "small"})


@pytest.mark.slow
def test_rows_say_what_a_step_waited_for_the_host(made, bus):
    out = made(**HOSTED, **OPTIMIZER)
    rows = [row for row in read_metrics(out / "metrics.jsonl") if "compute_ms" in row]
    assert len(rows) == 4
    for row in rows:
        parts = row["compute_ms"] + row["exposed_ms"] + row["offload_ms"]
        assert row["offload_ms"] > 0 or row is rows[0]
        assert parts == pytest.approx(row["step_ms"])
    check_same(out, made(**HOSTED))
