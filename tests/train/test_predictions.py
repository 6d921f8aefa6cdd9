"""What a run predicted and measured: the two lines at its end, and the row of metrics.jsonl."""

from types import SimpleNamespace

import pytest
from train_runs import start

from fastpar.axes.step import Setup, Workload
from fastpar.comm.mesh import Mesh
from fastpar.kernels.loss.linear_cross_entropy import release_workspaces
from fastpar.predict.machine import FOLDER, MeasuredRates, Rate, machine_name
from fastpar.predict.measure import ShortRun
from fastpar.predict.run import lines_of, predict
from fastpar.settings.config import TrainConfig
from fastpar.settings.model import GPTConfig
from fastpar.testing import run_ranks
from fastpar.train import journal
from fastpar.train.journal import SKIPPED, Predictions, read_metrics

SIZES = {"n_embd": 64, "block_size": 32, "max_steps": 6, "eval_every": 0, "save_every": 0}
SIZES |= {"num_samples": 0, "dropout": None}
FACTS = {"device": "CPU", "threads": 1}
SHAPE = GPTConfig(1, 2, 64, 32, 256, dropout=0.0)


def setup_of(world_size=1, transport="none", **changes):
    """The setup of such a run with changes, of one micro-batch of eight samples."""
    config = TrainConfig().replace({"batch_size": 8, **SIZES})
    counts = {"micro_batch_size": 8, "grad_accum_steps": 1, "dtype": "fp32", "block_size": 32}
    return Setup(world_size, config, "cpu", transport, **{**counts, **changes})


@pytest.fixture(autouse=True)
def folder(here, monkeypatch):
    monkeypatch.setenv(FOLDER, str(here / "rates"))


def run(out="run", **changes):
    assert start(out, **{**SIZES, **changes}) == 0
    rows = read_metrics(f"{out}/metrics.jsonl")
    return [row["prediction"] for row in rows if "prediction" in row]


def own_lines(capsys):
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if line[:9] in ("memory   ", "step     ")]


def rates(**about):
    """Of one product, measured on this machine."""
    known = {"machine": machine_name(), "gpu": "", "device_type": "cpu", "dtype": "fp32",
             "dropout": False, "ranks": 1, "threads": 1, "date": "2026-11-22",
             "spread": 0.05}  # fmt: skip
    product = ("matmul", (1, 1, 1), "forward")
    return MeasuredRates({**known, **about}, {product: Rate(1.0, 1e9, 1e9)})


def test_a_run_tells_at_its_end(capsys):
    release_workspaces()  # those of other tests
    rates().save()
    (row,) = run()
    memory, step = own_lines(capsys)
    assert memory.startswith("memory   predicted ")
    assert "measured" in memory
    assert ": parameters " in memory
    assert step.startswith("step     predicted ")
    assert "(measured on this machine, 1 rank x 1 thread, 2026-11-22, spread 5%), measured" in step
    assert row["measured_ms"] > 0
    assert abs(row["predicted_bytes"] / row["measured_bytes"] - 1) < 0.05
    assert sum(row["memory"].values()) == row["predicted_bytes"]
    assert sum(row["step_ms"].values()) == pytest.approx(row["predicted_ms"])
    assert len(run(resume=True)) == 1
    assert own_lines(capsys) == []  # it had nothing to do


def test_too_few_steps_are_predicted_and_not_measured(capsys):
    rates().save()
    (row,) = run(max_steps=1)
    assert row["measured_bytes"] is None
    assert row["measured_ms"] is None
    memory, step = own_lines(capsys)
    assert "measured" not in memory
    assert step.endswith("spread 5%)")
    (_, row) = run(max_steps=2, resume=True)
    assert row["measured_bytes"] is None, "the first step of a process makes its optimizer's state"
    assert len(run(max_steps=6, resume=True)) == 3


def test_what_is_not_known_and_what_fails_fail_no_run(capsys, monkeypatch):
    (row,) = run()
    assert own_lines(capsys) == []
    assert not row["measured_rates"]
    assert row["rates"] == "data sheet of cpu; `fastpar plan --measure` makes it exact"
    (row,) = run("other", init_from="run/latest", activation_checkpointing="full")
    assert row["measured_bytes"]
    assert row["step_ms"]["recompute"] > 0
    rates(spread=1.72).save()
    assert run("no_use", max_steps=1) == []
    out = capsys.readouterr().out
    line = "predicted: not available, find_rates: expected rates with a spread of at most 30%"
    assert line in out
    assert "run `fastpar plan --measure` when nothing else runs here\n" in out

    def fail(*_):
        raise KeyError("flux")

    monkeypatch.setattr(journal, "predict", fail)
    assert run("fails", max_steps=1) == []
    assert "predicted: not available (KeyError: 'flux')\n" in capsys.readouterr().out


def test_a_gpu_that_is_not_in_the_table_is_said():
    gpu = setup_of(transport="nccl", dtype="bf16").change(device_type="cuda")
    found = predict(SHAPE, gpu, {**FACTS, "device": "Voodoo 2"})["rates"]
    assert found.startswith("data sheet of h100; Voodoo 2 is not in the table; ")


def test_a_run_in_the_planners_words():
    counts = {"micro_batch_size": 2, "grad_accum_steps": 2, "block_size": 16}
    setup = setup_of(4, "gloo", tp=2, zero_stage=2, **counts)
    workload = setup.workload(SHAPE)
    assert (workload.seq_len, workload.batch_size) == (16, 8)
    assert (setup.world_size, setup.tp, setup.dp, setup.zero_stage) == (4, 2, 2, 2)
    assert (setup.accumulate, setup.transport, setup.dtype) == ("shard", "gloo", "fp32")
    row = {"predicted_bytes": 110_000_000, "measured_bytes": 100_000_000, "rates": "made up",
           "memory": {"parameters": 110_000_000}, "predicted_ms": 9.0,
           "measured_ms": 10.0}  # fmt: skip
    assert lines_of(row) == [
        "memory   predicted 0.1 GB, measured 0.1 GB (+10.0%): parameters 0.1 GB",
        "step     predicted 9.0 ms (made up), measured 10.0 ms (-10.0%)",
    ]


class Journal:
    """What tell() needs of one."""

    def __init__(self, main):
        self.folder = SimpleNamespace(notes=()) if main else None
        self.rows = []

    def keep(self, **row):
        self.rows.append(row)


def tell_on_two_ranks():
    setup = Setup(world_size=2, dtype="fp32", device_type="cpu", transport="shm")
    run = ShortRun(Workload(SHAPE, 2), setup, Mesh(device="cpu"))
    watch = Predictions(run.engine, run.optimizer)
    for _ in range(6):
        watch.watched(run.step)
    found = len(watch.times_ms), watch.peak_bytes
    rank = run.mesh.rank
    watch.peak_bytes = 1000 * (rank + 1)
    watch.times_ms.clear()
    watch.times_ms.extend([1.0, 10.0 * (rank + 1), 100.0])
    journal = Journal(run.mesh.is_main)
    watch.tell(journal, SHAPE, setup.change(batch_size=2, block_size=32), FACTS)
    return journal.rows, journal.folder.notes if journal.folder else (), found


@pytest.mark.slow
def test_the_fullest_and_the_slowest_rank_count():
    (rows, notes, first), (nothing, _, second) = run_ranks(tell_on_two_ranks, 2, backend="gloo")
    assert nothing == []
    assert first[0] == second[0] == 6 - SKIPPED
    assert first[1] > 0
    assert rows[0]["prediction"]["measured_bytes"] == 2000
    assert rows[0]["prediction"]["measured_ms"] == 20.0
    assert notes == (), "no rates of two ranks were measured"
