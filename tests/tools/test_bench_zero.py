"""Data-parallel contenders: one door, the gate, groups that take turns, their table and picture."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from test_bench import make_bench
from test_records import ABOUT, make_row

from bench.peers import engines
from bench.records import load
from bench.report import pictures, tables
from bench.systems import bench_zero
from bench.systems.bench_zero import Entry, Rank, Reference, Trial, judge
from bench.systems.worker import WorkerError
from fastpar.compare.strategies import Settings
from fastpar.config.config import GPTConfig
from fastpar.testing import run_ranks

TINY = GPTConfig(2, 2, 32, 16, 200, dropout=0.0)
REFERENCE = {"error": 4e-6, "loss_error": 1e-7, "loss": 5.5}


def updates_on_rank(names, folder):
    """A rank trains by each contender; its answers to the gate. Of four, two train the same."""
    answers = []
    for name in names:
        trial = Trial(name, TINY, folder)
        rank = Rank.__new__(Rank)
        rank.trial, rank.rank = trial, dist.get_rank() % trial.world_size
        rank.contender = engines.build(
            name.removesuffix(bench_zero.STOCK), partial(bench_zero.model_of, trial), trial.settings
        )
        rank.first_losses = rank.steps(0, bench_zero.GATE_STEPS)["losses"]
        answers.append((rank.check(), rank.contender.report()))
    return answers


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The folder of the exact weights of TINY, and the errors of one fp32 process."""
    folder = str(tmp_path_factory.mktemp("exact"))
    return folder, Reference(Trial(engines.SINGLE, TINY, folder), 0).write()


PEERS = ["DDP", "DDP + ZeRO optimizer", "FSDP2", "FSDP2, no reshard"]
OURS = [f"fastpar ZeRO-{stage}{model}" for stage in range(4) for model in ("", bench_zero.STOCK)]


@pytest.mark.slow
def test_two_ranks_train_what_one_process_trains(reference):
    folder, errors = reference
    names = [*PEERS, *OURS]
    ranks = run_ranks(updates_on_rank, 2, names, folder, backend="gloo", timeout_s=240)
    for name, *answers in zip(names, *ranks):
        assert 0 < judge([check for check, _ in answers], errors) < 1e-4, name
        for _, said in answers:
            assert bool(said) == name.startswith("fastpar")
            assert said.get("live_bytes", 1) > 0


@pytest.mark.slow
def test_hsdp_trains_it_on_four_ranks_and_refuses_two(reference):
    folder, errors = reference
    ranks = run_ranks(updates_on_rank, 4, ["fastpar HSDP"], folder, backend="gloo")
    assert judge([check for ((check, _),) in ranks], errors) > 0
    with pytest.raises(ValueError, match=r"build: expected 4, 6, 8, ... ranks for HSDP, got w"):
        run_ranks(updates_on_rank, 2, ["fastpar HSDP"], folder, backend="gloo")


def test_the_names_of_rows_are_those_of_strategies():
    for name in (*PEERS, *(name for name in bench_zero.ORDER if bench_zero.STOCK not in name)):
        assert name in engines.TITLES
    with pytest.raises(ValueError, match=r"build: expected one of single, ddp, .* got name=x; c"):
        engines.build("x", torch.nn.Identity)


def test_update_error_counts_every_tensor_once_and_refuses_other_names():
    start = {"a": torch.zeros(2), "b": torch.zeros(3)}
    exact = {n: torch.ones(t.shape, dtype=torch.float64) for n, t in start.items()}
    padded = [("a", torch.tensor([1.0, 1.5])), ("b", torch.ones(5))]
    assert engines.update_error(iter(padded), exact, start) == pytest.approx(math.sqrt(0.05))
    with pytest.raises(ValueError, match=r"update_error: expected the tensors \['a', 'b'\], got n"):
        engines.update_error(iter(padded[:1]), exact, start)


def test_judge_refuses_wrong_weights_and_losses():
    good = {"error": 7e-6, "first_loss": 5.5}
    assert judge([good, good], REFERENCE) == 7e-6
    for error in (1e-5, math.nan):
        with pytest.raises(WorkerError, match="weights after 2 steps: expected an error of the up"):
            judge([{**good, "error": error}, good], REFERENCE)
    for loss in (5.50001, math.nan):
        with pytest.raises(WorkerError, match=r"first loss: expected 5\.5000000 within"):
            judge([good, {**good, "first_loss": loss}], REFERENCE)


@pytest.mark.slow
def test_a_contender_that_fails_stops_only_itself(tmp_path, reference):
    """Wrong hyper-parameters are red in the gate; a dead process is a refused row."""
    folder, errors = reference
    right = Trial(engines.SINGLE, TINY, folder, world_size=1)
    wrong = replace(right, settings=Settings(weight_decay=0.0))
    red, base = Entry(wrong, errors), Entry(right, errors)
    assert red.refused.startswith("weights after 2 steps: expected")
    assert red.worker is None
    red.turn(2, 1)
    base.turn(2, 1)
    base.turn(3, 1)
    base.worker._processes[0].kill()
    base.turn(4, 1)
    assert "the process is gone" in base.refused
    assert len(base.ms) == 2
    bench = make_bench(tmp_path, "zero")
    base.refused = None
    row = bench_zero.to_row(bench, "tiny", base, [2 * ms for ms in base.ms])
    assert row.speedup == pytest.approx(2.0)
    assert row.tokens_per_s == pytest.approx(1e3 * 32 / row.median_ms)
    assert row.peak_bytes > 0
    row = bench_zero.to_row(bench, "tiny", red, base.ms)
    assert (row.median_ms, row.speedup) == (None, None)


@pytest.mark.slow
def test_the_bench_runs_in_groups_beside_ddp(tmp_path):
    bench = make_bench(tmp_path, "zero", only="one process")
    bench_zero.run(bench)
    _, rows = load(tmp_path / "rows.json")
    assert {r.variant: r.refused for r in rows} == {"DDP": None, "one process": None}
    ddp, single = rows
    assert (ddp.threads, single.threads) == (1, 2)
    assert single.baseline == "DDP"
    assert single.speedup == pytest.approx(ddp.median_ms / single.median_ms, rel=1e-4)
    assert ddp.runs == single.runs == 2


@pytest.fixture
def rows():
    def row(variant, ms, speedup, peak, **values):
        return make_row(
            bench="zero",
            case="GPT-2",
            direction="step",
            variant=variant,
            median_ms=ms,
            tokens_per_s=512e3 / ms,
            speedup=speedup,
            peak_bytes=peak,
            threads=1,
            **values,
        )

    return [
        row("DDP", 4000.0, 1.0, 3_000_000_000),
        row("FSDP2", 6000.0, 0.5, 2_000_000_000),
        row("FSDP2, no reshard", 5000.0, 0.8, 2_000_000_000),
        make_row(bench="zero", variant="DeepSpeed ZeRO-1", speedup=None, refused="gone"),
        row("fastpar ZeRO-0", 2000.0, 2.0, 10**9, notes={"live_bytes": 5e8, "wire_bytes": 1e6}),
        row("fastpar ZeRO-3, stock model", 4000.0, 1.0, 1e9, notes={"ranks": 2}),
    ]


def test_the_table_compares_through_ddp(rows):
    text = tables.TABLES["zero"](rows[::-1])
    assert [line.split(" | ")[0] for line in text.splitlines()[2:]] == [
        f"| {row.variant}" for row in rows
    ]
    assert "| DDP | 1 x 1 | 4000 | 128 | 1.00x | 1.25x |  | 3000 |" in text
    assert "refused: gone" in text
    assert "| fastpar ZeRO-0 | 1 x 1 | 2000 | 256 | 2.00x | 2.50x |  | 1000 | 500 |  | 1 |" in text
    short = "1.00x, short of 1.2x | 1.25x, short of 1.6x |"
    assert f"| fastpar ZeRO-3, stock model | 2 x 1 | 4000 | 128 | {short}" in text
    assert len({line.count("|") for line in text.splitlines()}) == 1


def test_the_picture_shows_every_contender(tmp_path, rows):
    pictures.draw_steps(ABOUT, rows, tmp_path / "zero.png")
    assert (tmp_path / "zero.png").stat().st_size > 5000
