"""The trainer with the optimizer's state on the host: the run without it, also across a resume."""

import re

import pytest
from cells import slow
from nan_bus import NanBus
from train_runs import TINY, Runs, bits, curve, forget_after

from fastpar.engine.debug import Debug
from fastpar.models import set_up
from fastpar.nn import recompute
from fastpar.predict import run as capacity
from fastpar.predict.memory import activations_on_host
from fastpar.testing import run_ranks
from fastpar.train.journal import read_metrics

FEW = {
    **TINY,
    "n_layer": 3,
    "max_steps": 4,
    "save_every": 2,
    "micro_batch_size": 2,
    "deterministic": True,
}
run = Runs(FEW)
ON_THE_HOST = {"offload_activations": True, "activation_checkpointing": "full"}
CASES = [
    (1, {"offload": "optimizer", "zero_stage": 2}),
    (2, {"offload": "optimizer", "zero_stage": 1, "offload_keep_mb": 0.05}),
    (2, {"offload": "parameters", "zero_stage": 3, "ema": 0.9}),
    (2, {"offload": "parameters", "zero_stage": 3, "tp": 2}),
    (1, {"offload": "optimizer"}),
    (2, {"offload": "optimizer", "grad_accum_steps": 2, "ema": 0.9}),
    (1, {**ON_THE_HOST, "offload": "optimizer", "grad_accum_steps": 4}),
    (1, {**ON_THE_HOST, "offload_pinned": False}),
    slow(2, {**ON_THE_HOST, "zero_stage": 3, "tp": 2}),
    slow(2, {**ON_THE_HOST, "offload": "parameters", "zero_stage": 3}),
    slow(2, {**ON_THE_HOST, "pp": 2, "grad_accum_steps": 4}),
    slow(2, {**ON_THE_HOST, "cp": 2}),
    slow(2, {"offload": "optimizer", "tp": 2}),
    slow(2, {"offload": "optimizer", "pp": 2}),
    slow(2, {"offload": "optimizer", "zero_stage": 1, "cp": 2}),
    slow(2, {"offload": "parameters", "zero_stage": 3, "cp": 2, "grad_accum_steps": 2}),
    slow(4, {"offload": "optimizer", "zero_stage": 2, "shard_size": 2}),
    slow(4, {"offload": "optimizer", "zero_stage": 2, "tp": 2, "grad_accum_steps": 2}),
    (4, {"offload": "optimizer", "zero_stage": 2, "pp": 2, "schedule": "zb-v"}),
]


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    """A bus on a machine without a GPU."""
    real = set_up.parallelize
    debug = Debug(bus_gb_s=1.0, poison=True)

    def made(model, mesh, settings):
        return real(model, mesh, settings, debug=debug if settings.offload.what else None)

    monkeypatch.setattr(set_up, "parallelize", made)
    monkeypatch.setattr(recompute, "_LEAST_BYTES", 1024)
    monkeypatch.setattr(set_up, "bus_of", lambda device, pinned: NanBus(1.0))


@pytest.mark.parametrize(("ranks", "changes"), CASES)
def test_the_bits_of_the_run_without_it(here, ranks, changes):
    """Losses, norms, validations, weights, moments and averages; dropout and clipping are on."""
    without = {k: v for k, v in changes.items() if not k.startswith("offload")}
    run("without", ranks, **without)
    run("with", ranks, **changes)
    assert curve("with") == curve("without")
    for step in (2, 4):
        assert bits("with", step) == bits("without", step)


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (1, {}),
        (2, {"tp": 2, "zero_stage": 3}),
        (2, {"pp": 2, "grad_accum_steps": 4}),
        (2, {"pp": 2, "grad_accum_steps": 4, "schedule": "gpipe"}),
    ],
)
def test_bytes_of_blocks_inputs_on_the_host(here, ranks, changes):
    """What was pinned is what the plan says; a host with less is refused before the first step."""

    def one(changes):
        trainer = run.trainer({**changes, "max_steps": 1, "save_every": 0})
        trainer.run()
        pinned = {
            keeper: keeper.host_bytes
            for m in trainer.model.modules()
            if (keeper := getattr(vars(m).get("forward"), "keeper", None)) is not None
        }
        return sum(pinned.values()), trainer.setup, trainer.model.config

    found = run_ranks(one, ranks, {**ON_THE_HOST, **changes, "out": "run"})
    pinned, setup, shape = max(found, key=lambda rank: rank[0])
    assert pinned == activations_on_host(setup.workload(shape), setup) > 0


def test_a_host_too_small_for_blocks_inputs_is_refused(here, monkeypatch):
    monkeypatch.setattr(capacity, "free_memory", lambda: 1000)
    match = r"of free memory on the host for offload_activations by 1 rank, got 0.0 MB; lower"
    with pytest.raises(ValueError, match=match):
        run.rank({**ON_THE_HOST, "out": "run"})


def test_what_a_run_says_of_the_host(here, capsys):
    """Threads, node and rate once; in each step's row what it waited, apart from communication."""
    run("with", 1, offload="optimizer", save_every=0)
    text = r"offload  optimizer on the host, \d+ of \d+ buckets, \d+ threads.*, [\d.]+ GB/s"
    assert len(re.findall(text, capsys.readouterr().out)) == 1
    rows = [row for row in read_metrics("with/metrics.jsonl") if "compute_ms" in row]
    assert len(rows) == 4
    for row in rows:
        parts = row["compute_ms"] + row["exposed_ms"] + row["offload_ms"]
        assert row["offload_ms"] > 0 or row is rows[0]
        assert parts == pytest.approx(row["step_ms"])


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        ((1, {}), (2, {"offload": "parameters", "zero_stage": 3})),
        ((1, {"offload": "optimizer", "zero_stage": 2}), (2, {"zero_stage": 1})),
    ],
)
def test_resumes_with_and_without(here, saved, resumed):
    run("alone", 1)
    run("moved", saved[0], **saved[1])
    forget_after("moved", 2)
    run("moved", resumed[0], resume=True, **resumed[1])
    assert curve("moved") == curve("alone")
    assert bits("moved", 4) == bits("alone", 4)
