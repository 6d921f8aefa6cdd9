"""Tensor-parallel contenders: one door, the gate, cases in turns, their table and pictures."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from test_bench import make_bench
from test_records import ABOUT, make_row

from bench.peers import tensor_parallel
from bench.peers.engines import SINGLE
from bench.peers.tensor_parallel import OWN, STOCK, TORCH, Way
from bench.records import ResultFile, load
from bench.report import pictures, tables
from bench.systems import bench_tp, bench_zero
from bench.systems.bench_zero import GATE_STEPS, Reference, Trial, judge
from bench.systems.worker import WorkerError
from fastpar.compare.strategies import Settings
from fastpar.config.config import GPTConfig
from fastpar.testing import run_ranks

TINY = GPTConfig(2, 4, 32, 16, 200, dropout=0.0)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The folder of the exact weights of TINY, and the errors of one fp32 process."""
    folder = str(tmp_path_factory.mktemp("exact"))
    return folder, Reference(Trial(SINGLE, TINY, folder, world_size=1), 0).write()


def checks_on_rank(ways, folder, settings):
    """A rank trains each way; its answers to the gate."""
    answers = []
    for way in ways:
        trial = bench_tp.trial_of(way, dist.get_world_size(), TINY, folder)
        rank = bench_tp.Rank.__new__(bench_tp.Rank)
        rank.trial, rank.rank = replace(trial, settings=settings), dist.get_rank()
        rank.contender = rank.build()
        rank.first_losses = rank.steps(0, GATE_STEPS)["losses"]
        answers.append(rank.check())
    return answers


def errors_of(ways, ranks, reference, settings=None):
    folder, errors = reference
    settings = settings or Settings()
    found = run_ranks(checks_on_rank, ranks, ways, folder, settings, backend="gloo", timeout_s=240)
    return [judge(answers, errors) for answers in zip(*found)]


def ways(ranks):
    (case,) = (case for case in bench_tp.CASES if case.ranks == ranks)
    return [case.base, *(way for group in case.groups for way in group)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("some", "ranks"),
    [
        (
            [
                Way(TORCH),
                Way(TORCH, sequence_parallel=False),
                Way(OWN, transport="shm"),
                Way(OWN, sequence_parallel=False),
                Way(STOCK),
                Way(STOCK, sequence_parallel=False),
            ],
            2,
        ),
        ([Way(TORCH, zero_stage=3), Way(OWN, zero_stage=2), Way(STOCK, zero_stage=3)], 4),
    ],
)
def test_ranks_train_what_one_process_trains(some, ranks, reference):
    assert set(some) <= set(ways(ranks))
    for way, error in zip(some, errors_of(some, ranks, reference)):
        assert 0 < error < 1e-4, way


@pytest.mark.slow
def test_the_gate_is_red_for_another_update(reference):
    with pytest.raises(WorkerError, match="weights after 2 steps: expected an error of the update"):
        errors_of([Way(STOCK)], 2, reference, Settings(weight_decay=0.0))


def test_names_tell_all_ways_apart():
    for ranks in (2, 4):
        names = [str(way) for way in ways(ranks)]
        assert len(set(names)) == len(names)
    assert str(Way(TORCH, zero_stage=2)) == "torch DTensor + FSDP2, no reshard"
    assert str(Way(OWN, zero_stage=1, transport="shm")) == "fastpar, ZeRO-1, shm"
    assert str(Way(STOCK, sequence_parallel=False)) == "fastpar, stock model, gloo, whole sequences"


def test_rows_by_heads_go_there_and_back():
    rows = torch.arange(3 * 4 * 2.0)
    state = {"h.0.attn.c_attn.bias": rows, "wte.weight": rows}
    moved = tensor_parallel.by_heads(state, 4)
    assert moved["wte.weight"] is rows
    by_head = moved["h.0.attn.c_attn.bias"]
    assert by_head[:6].tolist() == [0, 1, 8, 9, 16, 17]  # q, k and v of the first head
    assert torch.equal(tensor_parallel.by_heads(moved, 4, back=True)["h.0.attn.c_attn.bias"], rows)


def test_ranks_of_one_replica_have_the_same_batch(reference):
    batches = []
    for rank in range(4):
        made = bench_tp.Rank.__new__(bench_tp.Rank)
        made.trial, made.rank = bench_tp.trial_of(Way(TORCH), 4, TINY, reference[0]), rank
        batches.append(made.batch(0)[0])
    assert torch.equal(batches[0], batches[1])
    assert torch.equal(batches[2], batches[3])
    whole = bench_zero.batch(TINY, 0, 0, 1)[0]
    assert torch.equal(torch.cat(batches[::2]), whole)


@pytest.mark.slow
def test_the_bench_runs_beside_its_base(tmp_path, monkeypatch):
    case = replace(bench_tp.CASES[0], groups=((Way(OWN, transport="shm"),),))
    monkeypatch.setattr(bench_tp, "CASES", (case,))
    bench_tp.run(make_bench(tmp_path, "tp"))
    _, rows = load(tmp_path / "rows.json")
    base, own = rows
    assert (base.variant, own.variant) == ("torch DTensor", "fastpar, shm")
    assert own.refused is None
    assert own.baseline == "torch DTensor"
    assert own.speedup == pytest.approx(base.median_ms / own.median_ms, rel=1e-4)
    assert own.notes["ranks"] == base.notes["ranks"] == 2


@pytest.fixture
def rows():
    def row(variant, ms, speedup, case="tp=2, tiny", **values):
        return make_row(
            bench="tp", case=case, direction="step", variant=variant, median_ms=ms,
            tokens_per_s=512e3 / ms, speedup=speedup, peak_bytes=10**9, threads=1,
            notes={"ranks": 2}, **values,
        )  # fmt: skip

    return [
        row("torch DTensor", 2000.0, 1.0),
        row("torch DTensor, whole sequences", 1000.0, 2.0),
        row("fastpar, shm", 500.0, 4.0),
        row("fastpar, gloo", 4000.0, 0.5),
        row("torch DTensor + FSDP2", 100.0, 1.0, case="dp=2 tp=2, tiny"),
    ]


def test_the_table_compares_with_the_fastest_of_torch(rows):
    text = tables.TABLES["tp"](rows[::-1])
    lines = text.splitlines()[2:]
    assert "| tp=2, tiny: fastpar, shm | 2 x 1 | 500 | 1024 | 2.00x | 1000 |" in lines
    assert "| tp=2, tiny: fastpar, gloo | 2 x 1 | 4000 | 128 | 0.25x, loses | 1000 |" in lines
    assert lines[-1].startswith("| dp=2 tp=2, tiny: torch DTensor + FSDP2 | 2 x 1 | 100 ")
    refused = [replace(rows[2], refused="gone"), *rows[:2]]
    assert "fastpar, shm | 2 x 1 | refused: gone |" in tables.TABLES["tp"](refused)
    assert len({line.count("|") for line in text.splitlines()}) == 1


def test_pictures_are_drawn_of_each_case(tmp_path, rows):
    ResultFile(tmp_path / "a.json", ABOUT).add(*rows[:4], replace(rows[4], notes={"ranks": 4}))
    drawn = pictures.draw_all(tmp_path)
    assert [path.name for path in drawn] == ["tp_2.png", "tp_4.png"]
    assert all(path.stat().st_size > 5000 for path in drawn)
