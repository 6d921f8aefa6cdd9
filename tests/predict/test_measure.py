"""Real steps of `fastpar plan --measure`; what measures the memory of steps."""

import gc
import re
import time

import pytest
import torch
import torch.distributed as dist
from memory_cells import setup, workload

from fastpar.cli import main
from fastpar.comm.transports import ShmCollectives
from fastpar.predict.measure import ShortRun, StepMemory, alive_bytes, held_bytes, measure, mesh_of
from fastpar.testing import run_ranks

CPU = torch.device("cpu")
MB = 1_000_000


@pytest.mark.slow
def test_every_kind_of_layout_is_measured():
    setups = [
        setup(world_size=2, zero_stage=3, accumulate="shard", grad_accum_steps=4),
        setup(world_size=2, tp=2, micro_batch_size=8, activation_checkpointing="full"),
        setup(world_size=2, micro_batch_size=2, grad_accum_steps=4, pp=2),
        setup(world_size=2, tp_grid="2x1", micro_batch_size=8),
        setup(world_size=2, cp=2, micro_batch_size=8),
    ]
    one = workload(n_layer=2, width=32, tokens=16, vocab=128, batch=8)
    found = measure(one, setups, threads=1, seconds=0.1)
    assert len(found) == len(setups)
    assert all(len(times) >= 2 and min(times) > 0 for times in found)


def test_measured_layouts_are_ranked_by_their_steps(capsys, monkeypatch):
    """The slowest by the data sheet may be the fastest here."""
    asked = []

    def measured(workload, setups, *, seconds):
        asked.extend(setups)
        return [[1.0 - 0.1 * i, 1.1 - 0.1 * i, 1.1 - 0.1 * i] for i in range(len(setups))]

    monkeypatch.setattr("fastpar.predict.measure.measure", measured)
    assert (
        main(["plan", "--model", "micro", "--gpus", "2", "--measure", "--quick", "--top", "20"])
        == 0
    )
    out = capsys.readouterr().out
    table = re.findall(r"^(.+?) +\d+ x \d+ .* ([\d,.]+) +[\d,]+ +[\d.]+% +[\d.]+$", out, re.M)
    times = [float(ms.replace(",", "")) for _, ms in table]
    assert len(asked) == len(table) > 5
    assert times == sorted(times)
    assert times[-1] == 1100
    assert f"real steps on this machine, of {len(table)} of " in out
    assert "of the same layout differ by " in out
    assert not re.search("exposed|bubble|time  ", out)  # which real steps do not tell


def of_two_ranks():
    """What is held beside what is alive; then what a step leaves, as StepMemory sees it."""
    s = setup(world_size=2, zero_stage=3)
    run = ShortRun(workload(n_layer=3, width=64, batch=2), s, mesh_of(s, CPU))
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
        s = setup(world_size=2, zero_stage=stage, tp=tp, micro_batch_size=2)
        run = ShortRun(workload(batch=4 // tp), s, mesh_of(s, CPU))
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
