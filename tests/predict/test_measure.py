"""Rates that are measured here: kept, found again, scaled; what measures steps and their memory."""

import gc
import re
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cells import slow, sweep
from memory_cells import mesh_of, workload

from fastpar.axes.step import CommOp, Op, Setup, Workload
from fastpar.comm.transports import ShmCollectives
from fastpar.predict import measure as module
from fastpar.predict.machine import (
    FOLDER,
    MeasuredRates,
    Overhead,
    Rate,
    find_rates,
    machine_name,
    overhead_key,
    rates_folder,
)
from fastpar.predict.measure import (
    WHOLE,
    Chain,
    ShortRun,
    keep_rates,
    known_s,
    measure,
    solve,
    waited_for,
)
from fastpar.predict.memory import StepMemory, alive_bytes, held_bytes
from fastpar.predict.time import comm_ops_of, ops_of, predict_step
from fastpar.settings.model import GPTConfig
from fastpar.testing import run_ranks

SETUP = Setup(world_size=2, dtype="fp32", device_type="cpu", transport="shm")
WORKLOAD = Workload(GPTConfig(2, 2, 32, 16, 128, dropout=0.0), 4)
KNOWN = {"device_type": "cpu", "dtype": "fp32", "ranks": 2, "threads": 1, "dropout": False}
CPU = torch.device("cpu")
MB = 1_000_000


def check(rates, setups):
    for setup in setups:
        assert all(rates.op_s(op) > 0 for op in ops_of(WORKLOAD, setup))
        for send in comm_ops_of(WORKLOAD, setup):
            assert rates.comm_s(send) > 0 or send.axis == "control"
        assert rates.overhead_s(WORKLOAD, setup) >= 0
        assert predict_step(WORKLOAD, setup, rates).step_s > known_s(WORKLOAD, setup, rates) * 0.999
    assert (rates.about["ranks"], rates.about["threads"]) == (2, 1)


PIPED = replace(SETUP, micro_batch_size=2, grad_accum_steps=2, pp=2)


@pytest.mark.parametrize(
    "setups",
    [
        slow([replace(SETUP, zero_stage=3, accumulate="shard", grad_accum_steps=2)]),
        slow([replace(SETUP, tp=2, micro_batch_size=4, activation_checkpointing="full")]),
        slow([PIPED]),
        slow([replace(PIPED, schedule="zb-v", chunks=2)]),
    ],
    ids=["zero3", "tp", "1f1b", "zb-v"],
)
def test_all_that_setups_do_is_measured_and_kept(setups, tmp_path, monkeypatch):
    """Of stages messages too, and the overhead by models that have too few layers for stages."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setattr(module, "_spread", lambda times: 0.1)  # whatever else runs here
    rates = measure(WORKLOAD, setups, threads=1, seconds=0.1)
    check(rates, setups)
    if setups[0].pp > 1:
        assert "send, 2 ranks" in rates.sends
        # What goes through a stage's parameters is in proportion to the whole model's.
        assert {name.split()[0] for name in rates.scaled} <= {"copy", "optimizer", "overhead"}
        return
    assert not rates.scaled
    assert len(rates.overheads) == len(setups)
    assert find_rates(**KNOWN).ops == rates.ops
    keep_rates(MeasuredRates({**rates.about, "date": "later"}))
    found = find_rates(**KNOWN)
    assert (found.about["date"], found.ops) == ("later", rates.ops)
    before = [path.read_bytes() for path in tmp_path.iterdir()]  # a large spread is not kept
    keep_rates(MeasuredRates({**rates.about, "spread": 1.72, "date": "wild"}, rates.ops))
    keep_rates(MeasuredRates({**rates.about, "spread": 1.72, "threads": 7}, rates.ops))
    assert [path.read_bytes() for path in tmp_path.iterdir()] == before


def test_overhead_is_solved_from_four_steps():
    truth = Overhead(1.0, 0.5, 0.25, 0.125)
    cells = module._tiny_cells(SETUP)
    order = [(workload.shape.n_layer, setup.grad_accum_steps) for workload, setup in cells]
    assert order == [(1, 1), (1, 3), (3, 1), (3, 3)]
    steps = [
        truth.step + n * (truth.micro_batch + layers * truth.layer) + layers * truth.layer_step
        for layers, n in order
    ]
    assert solve(steps) == pytest.approx(truth)
    assert solve([1.0, 1.0, 0.5, 0.5]) == (1.0, 0.0, 0.0, 0.0), "none is negative"
    for setups in ([], [SETUP, replace(SETUP, world_size=4)]):
        with pytest.raises(ValueError, match="setups of the same ranks, device and format"):
            measure(WORKLOAD, setups)


def test_the_slowest_rank_counts():
    """Ranks of dp meet behind the chain, those of tp at every operation."""
    a, b = ("matmul", (1, 2, 3), "forward"), ("copy", (4,), "backward")
    ranks = [{a: [1.0, 5.0], b: [2.0], WHOLE: [3.0, 7.0]}, {a: [2.0, 4.0], b: [1.0], WHOLE: [9.0]}]
    assert waited_for(ranks, each_operation=False) is ranks[0]
    assert waited_for(ranks, each_operation=True) == {a: [2.0, 5.0], b: [2.0], WHOLE: [9.0]}


def rates(**about):
    known = {
        **{"machine": machine_name(), "gpu": "", "device_type": "cpu", "spread": 0.07},
        **{
            "dtype": "fp32",
            "dropout": False,
            "ranks": 2,
            "threads": 1,
            "torch": "2",
            "date": "2026-11-22",
        },
    }
    return MeasuredRates(
        {**known, **about},
        {
            ("matmul", (64, 32, 16), "forward"): Rate(1e-3, 2.0 * 64 * 32 * 16, 4.0 * 3584),
            ("matmul", (64, 32, 64), "forward"): Rate(3e-3, 2.0 * 64 * 32 * 64, 4.0 * 8192),
            ("copy", (4096,), "backward"): Rate(1e-5, 0.0, 4096.0),
        },
        {
            "all_reduce, 2 ranks": [(1000.0, 1e-4), (3000.0, 2e-4), (9000.0, 8e-4)],
            "all_reduce, 4 ranks": [(1000.0, 3e-4)],
        },
        {
            overhead_key(SETUP): Overhead(1e-3, 2e-3, 3e-4, 4e-4),
            overhead_key(replace(SETUP, zero_stage=3)): Overhead(5e-3, 0.0, 0.0, 0.0),
        },
    )


def op(name, shape, flops, n_bytes, direction="forward"):
    return Op(name, shape, direction, flops, n_bytes, 1)


def send(n_bytes, ranks=2, kind="all_reduce", axis="dp"):
    return CommOp(kind, axis, n_bytes, ranks, 1, 1, "")


@pytest.mark.parametrize(
    ("asked", "seconds", "scaled"),
    [
        (op("matmul", (64, 32, 16), 1.0, 1.0), 1e-3, None),
        (op("matmul", (64, 32, 16), 1.0, 1.0, "recompute"), 1e-3, None),
        # Of other shapes by flops or bytes of the nearest.
        (op("matmul", (64, 32, 128), 2.0 * 64 * 32 * 128, 4.0 * 8192), 6e-3, "matmul"),
        (op("matmul", (64, 32, 17), 2.0 * 64 * 32 * 16, 3 * 4.0 * 3584), 3e-3, "matmul"),
        (op("copy", (8192,), 0.0, 8192.0, "backward"), 2e-5, "copy"),
        # Between what was measured; of other ranks and kinds the nearest.
        *((send(n_bytes), 1e-4, None) for n_bytes in (10.0, 1000.0)),
        *((send(n), s, None) for n, s in ((2e3, 1.5e-4), (6e3, 5e-4), (9e3, 8e-4), (18e3, 1.6e-3))),
        (send(1000.0, ranks=3), 1e-4, "all_reduce of 3 ranks"),
        (send(1000.0, ranks=8), 3e-4, "all_reduce of 8 ranks"),
        (send(1000.0, kind="all_gather"), 1e-4, "all_gather of 2 ranks"),
        (send(1000.0, ranks=1), 0.0, None),
        (send(1000.0, axis="control"), 0.0, None),  # a part of the overhead
    ],
)
def test_rates_are_what_was_measured_or_the_nearest(asked, seconds, scaled):
    known = rates()
    found = known.op_s(asked) if isinstance(asked, Op) else known.comm_s(asked)
    assert found == pytest.approx(seconds)
    if isinstance(asked, Op) and scaled:
        scaled += f" {asked.shape} {asked.direction}"
    assert known.scaled == ({scaled} if scaled else set())


def test_unknown_operations_exchanges_along_tp_and_overhead():
    known = rates()
    peak = 2.0 * 64 * 32 * 64 / 3e-3
    assert known.op_s(op("attention", (1, 1, 8, 8), 1e6, 4.0)) == pytest.approx(1e6 / peak)
    moved = op("bias_gelu", (8, 8), 1.0, 4096e3)
    assert known.op_s(moved) == pytest.approx(1e-2)
    known.sends["all_reduce, 2 ranks at once"] = [(1000.0, 7e-5)]
    assert known.comm_s(send(1000.0, axis="tp")) == 7e-5
    known.scaled.clear()
    setup = replace(SETUP, grad_accum_steps=5)
    expected = 1e-3 + 5 * (2e-3 + 2 * 3e-4) + 2 * 4e-4  # of two layers
    assert known.overhead_s(WORKLOAD, setup) == pytest.approx(expected)
    assert not known.scaled
    other = replace(SETUP, zero_stage=3, activation_checkpointing="full")
    assert known.overhead_s(WORKLOAD, other) == 5e-3
    assert known.scaled == {"overhead of stage 3, tp 1, full"}
    found = predict_step(replace(WORKLOAD, batch_size=2), SETUP, rates())
    assert found.parts["other"] == pytest.approx(1e-3 + 2e-3 + 2 * 7e-4)
    none = MeasuredRates(known.about)
    assert none.op_s(moved) == none.comm_s(send(1000.0)) == none.overhead_s(WORKLOAD, SETUP) == 0.0
    assert (rates().overlap, rates(device_type="cuda").overlap) == (0.0, 1.0)  # CPUs hide nothing


def test_what_is_saved_is_loaded(tmp_path, monkeypatch):
    monkeypatch.delenv(FOLDER, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert rates_folder() == tmp_path / "fastpar" / "rates"
    monkeypatch.setenv(FOLDER, str(tmp_path))
    known = rates(spread=0.3)
    path = known.save()
    assert path.parent == tmp_path
    loaded = MeasuredRates.load(path)
    for name in ("ops", "sends", "overheads"):
        assert getattr(loaded, name) == getattr(known, name)
    assert str(loaded) == "measured on this machine, 2 ranks x 1 thread, 2026-11-22, spread 30%"
    assert (known.steady, find_rates(**KNOWN).ops) == (True, known.ops)
    for other in ({"ranks": 4}, {"threads": 2}, {"dtype": "bf16"}, {"dropout": True}):
        assert find_rates(**{**KNOWN, **other}) is None, other
    more = rates(date="2026-11-23")  # later measurements count
    more.ops = {("matmul", (64, 32, 16), "forward"): Rate(9e-3, 1.0, 1.0)}
    known.update(more)
    assert known.ops["matmul", (64, 32, 16), "forward"].seconds == 9e-3
    assert known.ops["matmul", (64, 32, 64), "forward"].seconds == 3e-3
    assert known.about["date"] == "2026-11-23"
    wild = rates(spread=1.72)
    assert "spread 172%; a spread above 30%: the prediction is a rough guess and" in str(wild)
    wild.save()  # as earlier versions did
    with pytest.raises(ValueError, match="find_rates: expected rates with a spread of at most 30%"):
        find_rates(**KNOWN)
    rates(machine="Z80, 1 CPUs").save()
    with pytest.raises(ValueError, match=r"expected rates of this machine, got path=.* of Z80"):
        find_rates(**KNOWN)


@sweep(
    ("old", "new", "words"),
    [
        (r"(?s)(.*),.*", r"\1", "file of measured rates, got"),  # cut
        (r"(?s).*", "[]", "file of measured rates, got"),
        ('"ops"', '"oops"', "file of measured rates, got"),
        ("0.001", "-0.001", "file of measured rates, got"),
        ("0.001", "NaN", "file of measured rates, got"),
        ('"spread": 0.07,', "", "file of measured rates, got"),
        ('"version": 1', '"version": 99', "version=1, got version=99"),
    ],
)
def test_a_damaged_file_is_refused_and_replaced(tmp_path, monkeypatch, old, new, words):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    path = rates().save()
    path.write_text(re.sub(old, new, path.read_text(), count=1))
    with pytest.raises(ValueError, match=f"expected .*{words}"):
        MeasuredRates.load(path)
    keep_rates(rates())
    assert MeasuredRates.load(path).ops == rates().ops


@sweep("how", [{}, {"tp": 2}, {"tp": 2, "sequence_parallel": False}])
def test_a_chain_has_the_operations_that_a_step_has(how):
    dropout = 0.1 if how == {"tp": 2} else 0.0
    workload = Workload(GPTConfig(2, 4, 32, 16, 200, dropout=dropout), 4)
    kind = replace(SETUP, world_size=how.get("tp", 1), micro_batch_size=4, **how)
    chain = Chain(workload, kind, torch.device("cpu"))
    chain.step()
    times = chain.times()
    asked = Counter[Any]()
    for o in ops_of(workload, kind):
        asked[o.name, o.shape, o.direction] += o.count
    optimizer = ("optimizer", (chain.n_elements,), "forward")
    assert set(asked) == {*times, optimizer}
    assert asked[optimizer] == 1
    for key, seconds in times.items():
        assert all(s > 0 for s in seconds), key
        no_residual = key[0] == "layer_norm"  # of the first one
        assert len(seconds) == asked[key] - no_residual, key


def of_two_ranks():
    """What is held beside what is alive; then what a step leaves, as StepMemory sees it."""
    s = replace(SETUP, zero_stage=3)
    run = ShortRun(workload(n_layer=3, width=64, batch=2), s, mesh_of(s))
    assert len(run.seconds(3)) == 3
    gc.collect()
    held = held_bytes(run.engine, run.optimizer), alive_bytes()
    del run
    left, heap, settled = [], ShmCollectives(dist.group.WORLD, heap_gb=0.1), settled_bytes()
    x = heap.empty(2 * MB, torch.uint8)
    with StepMemory(CPU) as memory:
        x.fill_(1)
    shared = memory.alive_bytes - settled, memory.peak_bytes - settled
    del x
    for stage, tp in ((3, 1), (0, 2)):
        s = replace(SETUP, zero_stage=stage, tp=tp, micro_batch_size=2)
        run = ShortRun(workload(batch=4 // tp), s, mesh_of(s))
        for _ in range(4):
            with StepMemory(CPU) as memory:
                run.step()
        left.append((memory.left_bytes, alive_bytes()))
        del run
    return shared, left, held


def settled_bytes():
    """alive_bytes() once the threads that set a group up have let go of what they sent."""
    last, now = -1, 0
    while now != last:
        gc.collect()
        time.sleep(0.1)
        last, now = now, alive_bytes()
    return now


@pytest.mark.slow
def test_steps_of_ranks():
    """A step frees what it takes as far as is seen, else the peak would be too high: what another
    thread frees is not. Memory that ranks share counts where it was taken."""
    found = run_ranks(of_two_ranks, 2, backend="gloo", timeout_s=240)
    for (alive, peak), left, (held, all_there) in found:
        assert alive == 2 * MB
        assert 2 * MB <= peak < 2 * MB + 1000
        assert held == pytest.approx(all_there, rel=0.02)
        for left_bytes, alive in left:
            assert left_bytes == pytest.approx(alive, rel=0.002)


@pytest.mark.slow
def test_the_peak_of_what_comes_and_goes():
    gc.collect()
    before = alive_bytes()
    with StepMemory(CPU, alive_bytes=0) as memory:
        x = torch.zeros(9 * MB, dtype=torch.uint8)
        x = torch.zeros(MB, dtype=torch.uint8)
        memory.begin_step()  # forgets the peak of building
        y = torch.zeros(3 * MB, dtype=torch.uint8)
        del y
        z = torch.zeros(MB, dtype=torch.uint8)
    assert (memory.alive_bytes, memory.peak_bytes) == (x.nbytes, 4 * MB)
    assert memory.left_bytes == x.nbytes + z.nbytes
    wide = torch.randn(1000, 1000)
    with StepMemory(CPU, alive_bytes=0) as memory:
        wide.logsumexp(1)  # temporaries inside of an operation count
    assert memory.peak_bytes >= wide.nbytes > memory.left_bytes
    del wide, z
    views = [x[10:], x.view(1000, 1000), torch.nn.Parameter(x.float())]
    with StepMemory(CPU) as memory:
        torch.zeros(2 * MB, dtype=torch.uint8)
    # What is alive before counts once.
    assert (memory.alive_bytes - before, memory.peak_bytes - before) == (5 * MB, 7 * MB)
    del views


@pytest.mark.gpu
def test_on_a_gpu_it_is_the_allocators_peak():
    device = torch.device("cuda")
    with StepMemory(device) as memory:
        x = torch.zeros(MB, device=device)
        y = torch.zeros(3 * MB, device=device)
        del y
    assert memory.peak_bytes - memory.alive_bytes == pytest.approx(16 * MB, rel=0.01)
    assert memory.left_bytes - memory.alive_bytes == pytest.approx(x.nbytes, rel=0.01)
