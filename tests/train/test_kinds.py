"""Runs with experts, fp8, averages, packed documents, replicas and states on the host: what each
says, keeps and refuses. test_layouts.py has their bits on other ranks."""

import json
import re
import signal
from pathlib import Path

import pytest
import torch
from cells import slow
from nan_bus import NanBus
from train_runs import FEW, TINY, Runs, bits, check_same, curve, flags_of, forget_after, steps

from fastpar import AdamW, parallelize, pipeline_step
from fastpar.checkpoint.commands import export_weights
from fastpar.checkpoint.restore import load_weights, read_run_state
from fastpar.cli import main
from fastpar.comm.mesh import Mesh
from fastpar.engine.debug import Debug
from fastpar.files.runs import checkpoint_folder, list_checkpoints, step_of
from fastpar.models import set_up
from fastpar.models.gpt import GPT, upcycled
from fastpar.models.hf import load_hf, save_hf
from fastpar.nn import recompute
from fastpar.predict import run as capacity
from fastpar.predict.memory import activations_on_host
from fastpar.settings.config import TrainConfig
from fastpar.settings.model import GPTConfig
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks
from fastpar.train.journal import read_metrics
from fastpar.train.start import pick_dtype
from fastpar.train.trainer import Trainer

SAME = {**FEW, "deterministic": True}

# Experts

EXPERTS = {"n_layer": 2, "n_expert": 4, "balance_loss": 0.1, "router_z_loss": 0.01}
experts = Runs(**{**SAME, **EXPERTS})


def test_a_run_tells_what_its_experts_do_and_draws_texts_of_them(here, capsys):
    experts("r", 2, ep=2, zero_stage=3, expert_capacity=0.5)
    printed = capsys.readouterr().out
    assert "4 experts (top 2) in 2 layers" in printed
    assert "ranks    experts over 2 of dp, stage 3" in printed
    for row in steps("r"):
        load = torch.tensor(row["expert_load"])
        assert load.shape == (2, 4)
        torch.testing.assert_close(load.sum(1), torch.ones(2), atol=1e-3, rtol=0)
        assert 0.5 <= row["expert_dropped"] < 0.7  # at most half fits
        assert row["balance"] >= 0.99
        assert row["router_z"] > 0
    assert main(["sample", "r", "--max-new-tokens", "4", "--device", "cpu"]) == 0
    assert capsys.readouterr().out


def test_transformers_cannot_read_experts(here, capsys):
    experts("r", max_steps=1)
    assert main(["export", "r", "--to", "hf"]) != 0
    said = capsys.readouterr().err
    assert "expected a GPT-2 that transformers has, got one with n_expert=4" in said
    assert "use the checkpoint itself" in said
    folder = checkpoint_folder("r", 1)
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "fastpar-gpt2-experts"
    model = load_hf(folder)
    assert model.config.n_expert == 4
    with pytest.raises(ValueError, match="save_hf: expected a GPT-2 that transformers has"):
        save_hf(model, "again")
    del config["top_k"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"expected the numbers of experts in .*'top_k'"):
        load_hf(folder)


def test_an_upcycled_model_has_the_loss_of_the_dense_one(here):
    model = GPT(GPTConfig(2, 2, 16, 16, 50, dropout=0.0), seed=1).double()
    sparse = upcycled(model, {"n_expert": 4, "top_k": 2}, seed=5)
    idx = torch.randint(0, 50, (3, 16))
    assert abs(model(idx, idx) - sparse.eval()(idx, idx)) < 1e-12
    assert sparse.h[0].mlp.router.weight.std() > 0.01  # equal logits would never differ
    for dense, options, words in (
        (model, {"top_k": 1}, "top_k >= 2, .* got top_k=1"),
        (model, {"expert_hidden": 8}, "top_k >= 2, .* as wide as the MLP, got .* expert_hidden=8"),
        (sparse, {}, "a dense model to make experts of, got one with n_expert=4"),
    ):
        with pytest.raises(ValueError, match=f"upcycled: expected {words}"):
            upcycled(dense, {"n_expert": 4, **options})
    experts("dense", n_expert=0, max_steps=2)
    experts("sparse", 2, ep=2, init_from=str(checkpoint_folder("dense", 2)), max_steps=2)
    last, first = curve("dense")[-1], curve("sparse")[0]
    assert first["val_loss"] == pytest.approx(last["val_loss"], rel=1e-6)
    assert load_weights(checkpoint_folder("sparse", 2)).config.n_expert == 4


# fp8

FP8 = {**SAME, "n_layer": 2, "fp8": "all", "fp8_emulate": True}
DELAYED = {**FP8, "fp8_scaling": "tensor", "fp8_weight_gradient": "fp8"}


def test_metrics_say_how_much_overflowed(here):
    Runs(**DELAYED)("r", 2, lr=0.3, max_steps=6, save_every=0)
    rows = steps("r")
    assert rows[0]["fp8_overflows"] == 0  # nothing is rounded yet
    assert sum(row["fp8_overflows"] for row in rows) > 0  # such a rate makes weights grow
    tops = torch.tensor(read_run_state(checkpoint_folder("r", 6))["fp8"]["history"])
    assert tops.shape == (16, 8, 3)
    assert (tops[:6] > 0).all()
    assert not tops[6:].any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [(4, {"tp": 2, "n_embd": 32}), (4, {"cp": 2}), (4, {"shard_size": 2}),
     (2, {"optimizer": "muon", "activation_checkpointing": "full"})],
)  # fmt: skip
def test_codes_on_the_wire_change_no_other_layout(here, ranks, layout):
    run = Runs(**{**DELAYED, **layout, "zero_stage": 3, "dropout": 0.0})
    run("plain", ranks)
    run("codes", ranks, wire_weights="fp8")
    check_same("codes", "plain")


@pytest.mark.slow
def test_values_of_a_sequence_that_ranks_share_are_those_of_one_process(here):
    """Sums have another order with cp: the largest values differ by a few roundings in fp32."""
    for out, cp in (("one", 1), ("two", 2)):
        Runs(**DELAYED)(out, cp, cp=cp, dropout=0.0)
    tops = [read_run_state(checkpoint_folder(n, 4))["fp8"]["history"] for n in ("one", "two")]
    rounding = 8 * torch.finfo(torch.float32).eps
    torch.testing.assert_close(*map(torch.tensor, tops), rtol=rounding, atol=0.0)


def test_devices_that_fp8_refuses(here, capsys, monkeypatch):
    assert main(["train", *flags_of(TINY), "--fp8", "mlp", "--out", "r"]) == 2
    said = capsys.readouterr().err
    assert "newer with fp8=mlp, got device=cpu dtype=fp32; drop --fp8, or add --fp8-emul" in said
    assert not (here / "r").exists()
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    mesh = type("OfGpus", (), {"device": torch.device("cuda")})
    config = TrainConfig().replace({"fp8": "mlp"})
    for capability, dtype, words in (
        ((8, 6), "auto", r"got compute capability 8\.6 dtype=bf16"),
        ((9, 0), "fp32", r"got compute capability 9\.0 dtype=fp32"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        with pytest.raises(ValueError, match=words):
            pick_dtype(config.replace({"dtype": dtype}), mesh, None)
    assert pick_dtype(config, mesh, None) == "bf16"


# Averages of the weights

AVERAGED = {**SAME, "save_every": 1, "eval_every": 2, "ema": 0.3}


def test_the_average_is_that_of_the_weights_and_trains_the_same(here, made, capsys):
    alone, plain = made(**AVERAGED), made(**{**AVERAGED, "ema": None})
    for row, wanted in zip(curve(alone), curve(plain), strict=True):
        average = row.pop("ema_val_loss", None)
        assert row == wanted  # validating the average leaves no trace
        assert (average is None) == ("val_loss" not in row or row["step"] == 0)
    assert average != wanted["val_loss"]

    def exported(step, **options):
        to = here / f"to{step}{len(options)}"
        export_weights(checkpoint_folder(alone, step), to, **options)
        return dict(load_weights(to).named_parameters())

    weights = [exported(step) for step in range(1, 5)]
    expected = {name: p.detach().clone() for name, p in weights[0].items()}
    for step in (1, 2, 3):  # of the second step and later ones; young, it keeps less
        factor = min(0.3, (1 + step) / (10 + step))
        for name, p in weights[step].items():
            expected[name].lerp_(p.detach(), 1.0 - factor)
    got = exported(4, average=True)
    for name, p in got.items():
        torch.testing.assert_close(p.detach(), expected[name], rtol=1e-6, atol=1e-7)
    assert any(not torch.equal(p, weights[3][name]) for name, p in got.items())
    half = exported(4, average=True, dtype=torch.bfloat16)
    assert all(torch.equal(p, got[name].bfloat16()) for name, p in half.items())
    assert main(["export", str(plain), "--to", "out", "--ema"]) == 2
    assert "expected averages of weights with --ema, got none in" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_stops_averaging(made):
    half = {**AVERAGED, "dtype": "bf16", "master_weights": "remainder"}
    without = {**half, "ema": None}
    assert bits(made(**without), 4) != bits(made(**half), 4)
    out = made.cut(2, 2, zero_stage=3, **half)
    made.go_on(out, **without)
    assert bits(out, 4) == bits(made(**without), 4)


# Documents in rows

PACKED = {**SAME, "data": "texts", "pack": "documents", "tokenizer": "bpe-300"}


def test_a_run_packs_documents_and_goes_on_with_them(made, capsys):
    capsys.readouterr()
    out = made.cut(2, **PACKED)
    said = capsys.readouterr().out
    assert "packed   " in said
    assert "are longer than the context and were split" in said
    assert bits(made(**{**PACKED, "pack": "stream"}), 4) != bits(made(**PACKED), 4)
    for changes, words in (
        ({"pack": "stream"}, r"pack=documents, by which .*, got pack=stream; leave"),
        ({"data": "text.txt", "tokenizer": "chars"}, "end-of-text token between documents, got en"),
    ):
        with pytest.raises(ValueError, match=words):
            made.go_on(out, **{**PACKED, "max_steps": 6, **changes})


def two_layers():
    return GPT(GPTConfig(2, 2, 16, 12, 50, 0.0), seed=3).double()


def train_documents(tp, sequence_parallel):
    model, mesh = two_layers(), Mesh(tp=tp, device="cpu")
    parallelize(model, mesh, Parallel.of(sequence_parallel=sequence_parallel, zero_stage=1))
    x, y = torch.randint(50, (2, 3, 11), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(n) for n in (5, 4, 2)]).repeat(3, 1)
    loss = model(x, y, positions=positions)
    loss.backward()
    AdamW(model.parameters(), eps=1.0).step()
    return loss.detach(), {name: p.clone() for name, p in model.state_dict().items()}


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_split_layers_see_the_same_documents(sequence_parallel):
    """With sequences that the ranks have to pad."""
    [(loss, weights)] = run_ranks(train_documents, 1, 1, sequence_parallel)
    for mine, theirs in run_ranks(train_documents, 2, 2, sequence_parallel):
        torch.testing.assert_close(mine, loss, rtol=1e-12, atol=0)
        for name, w in theirs.items():
            torch.testing.assert_close(w, weights[name], rtol=1e-12, atol=1e-13)


def test_documents_of_a_row_are_as_alone():
    """Loss and gradients of packed documents are those of each by itself, weighed by tokens."""
    model, lengths = two_layers(), (5, 4, 3)
    x, y = torch.randint(50, (2, 2, 12))
    y[1, 9:] = -100
    positions = torch.cat([torch.arange(n) for n in lengths]).repeat(2, 1)
    loss = model(x, y, positions=positions)
    loss.backward()
    packed = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    total = 0.0
    for row in range(2):
        for part, target in zip(x[row].split(lengths), y[row].split(lengths)):
            total += model(part[None], target[None], reduction="sum") if target.max() >= 0 else 0
    alone = total / (y >= 0).sum()
    alone.backward()
    assert loss.item() == pytest.approx(alone.item(), rel=1e-12)
    for a, b in zip(packed, (p.grad for p in model.parameters())):
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


# Replicas that meet now and then

APART = {**FEW, "max_steps": 6, "eval_every": 6, "save_every": 1}
EVERY = {"outer_every": 3}


def test_one_replica_with_the_mean_alone(made):
    alone = curve(made(**APART))
    rates = {"outer_lr": 1.0, "outer_momentum": 0.0}
    assert curve(made(**APART, **EVERY, **rates)) == alone
    assert curve(made(**APART, **EVERY, **{**rates, "outer_lr": 0.5})) != alone


@pytest.mark.parametrize(("ranks", "wire"), [(2, "fp32"), slow(4, "fp32"), slow(4, "bf16")])
def test_two_replicas_go_on(made, capfd, ranks, wire):
    """From their own inner state, and with the samples that nobody has had; one tells how it goes.
    The second was killed before it had committed a save: both go on from the one before."""
    outer = {**APART, **EVERY, "replicas": 2, "outer_wire": wire}
    outer |= {"zero_stage": 2 if ranks == 4 else 0}
    capfd.readouterr()
    whole = made(ranks, **outer)
    printed = capfd.readouterr()
    for words in ("validation loss", "saved: "):
        told = re.findall(rf"^step (\d+)  {words}", printed.out, re.MULTILINE)
        assert len(told) == len(set(told)) > 1
    assert "replica_1" not in printed.out + printed.err
    assert printed.out.count("next: fastpar sample ") == 1
    assert "== step 6" in (whole / "replica_1/samples.txt").read_text()
    out = made.cut(4, ranks, **outer)
    forget_after(out / "replica_1", 2)
    made.go_on(out, ranks, **outer)
    for found, expected in ((out, whole), (out / "replica_1", whole / "replica_1")):
        assert bits(found, 6) == bits(expected, 6)
        assert [row["tokens"] for row in steps(found)] == [n * 8 * 16 for n in range(1, 7)]
    assert bits(whole, 5) != bits(whole / "replica_1", 5)
    first, second = (
        load_weights(checkpoint_folder(f, 6)).parameters() for f in (whole, whole / "replica_1")
    )
    assert all(map(torch.equal, first, second))  # they have just met


class Asked(Trainer):
    """The second replica is asked for something in its first step."""

    def train_step(self):
        if self.step == 0 and self.mesh.replica == 1:
            asked = self.saves.signals if self.config.run.seed else self.stop_signals
            asked.append(signal.SIGUSR1 if self.config.run.seed else signal.SIGTERM)
        return super().train_step()


def ask(changes):
    config = TrainConfig().replace({**APART, **changes})
    return Asked(config, Mesh(replicas=config.mesh.replicas, device="cpu")).run()


@pytest.mark.parametrize(("what", "seed", "status"), [("stop", 0, 143), ("save", 1, 0)])
def test_what_one_was_asked_for_all_do_after_the_next_meeting(here, what, seed, status):
    changes = {"replicas": 2, "outer_every": 4, "save_every": 0, "seed": seed, "out": "r"}
    assert run_ranks(ask, 2, changes) == [status] * 2
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


@pytest.mark.parametrize(("before", "after"), [slow(1, 2), slow(2, 1), (0, 2)])
def test_another_number_of_replicas(here, before, after):
    """0: a run without an outer step, which ends with post-local averaging."""
    run = Runs(**APART)
    run("run", max(1, before), **(EVERY if before else {}), replicas=max(1, before))
    run("run", after, **EVERY, replicas=after, resume=True, max_steps=9, eval_every=9)
    losses = [row["loss"] for row in steps("run")]
    assert len(losses) == 9
    assert losses[8] < losses[0]
    for i in range(1, after):
        assert bits(f"run/replica_{i}", 9)


# States and activations on the host

HOSTED = {**SAME, "n_layer": 3}
KEPT = {"offload_activations": True, "activation_checkpointing": "full"}
OPTIMIZER = {"offload": "optimizer"}
PARAMETERS = {"offload": "parameters", "zero_stage": 3}


@pytest.fixture
def bus(monkeypatch):
    """A bus on a machine without a GPU."""
    real, debug = set_up.parallelize, Debug(bus_gb_s=1.0, poison=True)

    def parallelized(model, mesh, settings):
        return real(model, mesh, settings, debug=debug if settings.offload.what else None)

    monkeypatch.setattr(set_up, "parallelize", parallelized)
    monkeypatch.setattr(recompute, "_LEAST_BYTES", 1024)
    monkeypatch.setattr(set_up, "bus_of", lambda device, pinned: NanBus(1.0))


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        slow(1, {**OPTIMIZER, "zero_stage": 2}),
        (2, {**PARAMETERS, "ema": 0.9}),
        slow(1, {**KEPT, **OPTIMIZER}),
        slow(2, {**OPTIMIZER, "zero_stage": 1, "offload_keep_mb": 0.05}),
        slow(2, {**PARAMETERS, "tp": 2}),
        slow(1, {**KEPT, "offload_pinned": False}),
        slow(2, {**KEPT, "pp": 2}),
        slow(2, {**KEPT, "cp": 2}),
        slow(4, {**OPTIMIZER, "zero_stage": 2, "pp": 2, "schedule": "zb-v"}),
    ],
)
def test_states_on_the_host_change_no_bit(made, bus, ranks, changes):
    """Losses, norms, validations, weights, moments and averages; dropout and clipping are on."""
    without = {k: v for k, v in changes.items() if not k.startswith("offload")}
    check_same(made(ranks, **{**HOSTED, **changes}), made(ranks, **{**HOSTED, **without}))


@pytest.mark.slow
def test_a_run_goes_on_with_and_without_the_host(made, bus):
    out = made.cut(2, **HOSTED)
    made.go_on(out, 2, **HOSTED, **PARAMETERS)
    forget_after(out, 2)
    made.go_on(out, 2, **HOSTED, **OPTIMIZER, zero_stage=2)
    check_same(out, made(**HOSTED))


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (1, {}),
        slow(2, {"tp": 2, "zero_stage": 3}),
        slow(2, {"pp": 2}),
        slow(2, {"pp": 2, "schedule": "gpipe"}),
    ],
)
def test_bytes_of_blocks_inputs_on_the_host(here, bus, monkeypatch, ranks, changes):
    """What was pinned is what the plan says; a host with less is refused before the first step."""
    run = Runs(**{**HOSTED, **KEPT, **changes, "max_steps": 1, "save_every": 0, "out": "run"})

    def one():
        trainer = run.trainer()
        trainer.run()
        pinned = {
            keeper: keeper.host_bytes
            for m in trainer.model.modules()
            if (keeper := getattr(vars(m).get("forward"), "keeper", None)) is not None
        }
        return sum(pinned.values()), trainer.setup, trainer.model.config

    pinned, setup, shape = max(run_ranks(one, ranks), key=lambda rank: rank[0])
    assert pinned == activations_on_host(setup.workload(shape), setup) > 0
    if ranks == 1:
        monkeypatch.setattr(capacity, "free_memory", lambda: 1000)
        words = r"of free memory on the host for offload_activations by 1 rank, got 0.0 MB; lower"
        with pytest.raises(ValueError, match=words):
            run.rank({"out": "small"})


def test_what_a_run_says_of_the_host(here, bus, capsys):
    """Threads, node and rate once; in each step's row what it waited, apart from communication."""
    Runs(**HOSTED)("with", offload="optimizer", save_every=0)
    text = r"offload  optimizer on the host, \d+ of \d+ buckets, \d+ threads.*, [\d.]+ GB/s"
    assert len(re.findall(text, capsys.readouterr().out)) == 1
    rows = [row for row in read_metrics(Path("with/metrics.jsonl")) if "compute_ms" in row]
    assert len(rows) == 4
    for row in rows:
        parts = row["compute_ms"] + row["exposed_ms"] + row["offload_ms"]
        assert row["offload_ms"] > 0 or row is rows[0]
        assert parts == pytest.approx(row["step_ms"])
