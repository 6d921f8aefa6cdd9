"""The two lines at the end of a run, and the row of metrics.jsonl."""

import random
from types import SimpleNamespace

import pytest

from fastpar.axes.step import Setup, Workload
from fastpar.comm.mesh import Mesh
from fastpar.kernels.linear_cross_entropy import release_workspaces
from fastpar.predict.machine import FOLDER, MeasuredRates, Rate, machine_name
from fastpar.predict.measure import ShortRun
from fastpar.predict.run import lines_of, predict
from fastpar.settings.config import TrainConfig
from fastpar.settings.model import GPTConfig
from fastpar.testing import run_ranks
from fastpar.train import journal
from fastpar.train.journal import SKIPPED, Predictions, read_metrics
from fastpar.train.trainer import train

SETTINGS = {
    "data": "text.txt",
    "tokenizer": "bytes",
    "model": "micro",
    "n_layer": 1,
    "n_head": 2,
    "n_embd": 64,
    "block_size": 32,
    "batch_size": 8,
    "max_steps": 6,
    "eval_every": 0,
    "save_every": 0,
    "num_samples": 0,
    "threads": 1,
    "device": "cpu",
    "out": "run",
}
FACTS = {"device": "CPU", "threads": 1}
SHAPE = GPTConfig(1, 2, 64, 32, 256, dropout=0.0)


def setup_of(world_size=1, transport="none", **changes):
    """The setup of a run of SETTINGS with changes, of one micro-batch of eight samples."""
    config = TrainConfig().replace(SETTINGS)
    counts = {"micro_batch_size": 8, "grad_accum_steps": 1, "dtype": "fp32", "block_size": 32}
    return Setup(world_size, config, "cpu", transport, **{**counts, **changes})


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(FOLDER, str(tmp_path / "rates"))
    rng = random.Random(0)
    text = (" ".join(rng.choices(("the", "lord", "unto", "his"), k=8)) for _ in range(300))
    (tmp_path / "text.txt").write_text("\n".join(text))
    return tmp_path


def run(**changes):
    assert train(TrainConfig().replace({**SETTINGS, **changes})) == 0
    return [row["prediction"] for row in read_metrics("run/metrics.jsonl") if "prediction" in row]


def own_lines(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if line[:9] in LINES]


LINES = ("memory   ", "step     ")


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


def test_without_measured_rates_a_run_tells_nothing(capsys):
    (row,) = run()
    assert own_lines(capsys) == []
    assert not row["measured_rates"]
    assert row["rates"] == "data sheet of cpu; `fastpar plan --measure` makes it exact"


def test_rates_of_no_use_are_said_in_a_line(capsys):
    rates(spread=1.72).save()
    assert run() == []
    out = capsys.readouterr().out
    assert (
        "predicted: not available, find_rates: expected rates with a spread of at most 30%" in out
    )
    assert "run `fastpar plan --measure` when nothing else runs here\n" in out


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


def test_a_run_that_has_nothing_to_do_tells_nothing(capsys):
    run()
    capsys.readouterr()
    assert len(run(resume=True)) == 1
    assert own_lines(capsys) == []


def test_weights_of_others_and_recomputing(capsys):
    run(num_samples=0)
    (row,) = run(init_from="run/latest", out="other", activation_checkpointing="full") and [
        r["prediction"] for r in read_metrics("other/metrics.jsonl") if "prediction" in r
    ]
    assert row["measured_bytes"]
    assert row["step_ms"]["recompute"] > 0


def rates(**about):
    known = {
        "machine": machine_name(),
        "gpu": "",
        "device_type": "cpu",
        "dtype": "fp32",
        "dropout": False,
        "ranks": 1,
        "threads": 1,
        "date": "2026-11-22",
        "spread": 0.05,
    }
    return MeasuredRates(
        {**known, **about}, {("matmul", (1, 1, 1), "forward"): Rate(1.0, 1e9, 1e9)}
    )


def test_rates_of_this_machine_count_if_there_are_some():
    assert predict(SHAPE, setup_of(), FACTS)["rates"].startswith("data sheet of cpu;")
    rates().save()
    found = predict(SHAPE, setup_of(), FACTS)
    assert found["rates"] == "measured on this machine, 1 rank x 1 thread, 2026-11-22, spread 5%"
    assert predict(SHAPE, setup_of(), {**FACTS, "threads": 2})["rates"].startswith("data sheet")
    rates(machine="Z80").save()
    with pytest.raises(ValueError, match=r"expected rates of this machine, got path=.* of Z80"):
        predict(SHAPE, setup_of(), FACTS)


def test_a_gpu_that_is_not_in_the_table_is_said():
    setup = setup_of(transport="nccl", dtype="bf16").change(device_type="cuda")
    text = "data sheet of h100; Voodoo 2 is not in the table; "
    assert predict(SHAPE, setup, {**FACTS, "device": "Voodoo 2"})["rates"].startswith(text)


def test_a_run_in_the_planners_words():
    counts = {"micro_batch_size": 2, "grad_accum_steps": 2, "block_size": 16}
    setup = setup_of(4, "gloo", tp=2, zero_stage=2, **counts)
    workload = setup.workload(SHAPE)
    assert (workload.seq_len, workload.batch_size) == (16, 8)
    assert (setup.world_size, setup.tp, setup.dp, setup.zero_stage) == (4, 2, 2, 2)
    assert (setup.accumulate, setup.transport, setup.dtype) == ("shard", "gloo", "fp32")


def test_lines():
    row = {
        "predicted_bytes": 110_000_000,
        "measured_bytes": 100_000_000,
        "memory": {"parameters": 110_000_000},
        "predicted_ms": 9.0,
        "measured_ms": 10.0,
        "rates": "made up",
    }
    assert lines_of(row) == [
        "memory   predicted 0.1 GB, measured 0.1 GB (+10.0%): parameters 0.1 GB",
        "step     predicted 9.0 ms (made up), measured 10.0 ms (-10.0%)",
    ]


def test_a_prediction_that_fails_fails_no_run(capsys, monkeypatch):
    def fail(*_):
        raise KeyError("flux")

    monkeypatch.setattr(journal, "predict", fail)
    assert run() == []
    assert "predicted: not available (KeyError: 'flux')\n" in capsys.readouterr().out


class Journal:
    """What tell() needs of one."""

    def __init__(self, main):
        self.folder = SimpleNamespace(notes=()) if main else None
        self.rows = []

    def keep(self, **row):
        self.rows.append(row)


def test_the_fullest_and_the_slowest_rank_count():
    (rows, notes, first), (nothing, _, second) = run_ranks(tell_on_two_ranks, 2, backend="gloo")
    assert nothing == []
    assert first[0] == second[0] == 6 - SKIPPED
    assert first[1] > 0
    assert rows[0]["prediction"]["measured_bytes"] == 2000
    assert rows[0]["prediction"]["measured_ms"] == 20.0
    assert notes == (), "no rates of two ranks were measured"


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
