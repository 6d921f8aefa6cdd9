import gc
import subprocess
import sys
import threading
import time

import pytest
import torch
from memory_cells import setup, workload

from fastpar.comm.mesh import Mesh
from fastpar.comm.transports import ShmCollectives
from fastpar.predict.measure import ShortRun
from fastpar.predict.memory import StepMemory, alive_bytes, held_bytes
from fastpar.testing import run_ranks

CPU = torch.device("cpu")
MB = 1_000_000


def test_the_peak_of_what_comes_and_goes():
    with StepMemory(CPU, alive_bytes=0) as memory:
        x = torch.zeros(MB, dtype=torch.uint8)
        y = torch.zeros(3 * MB, dtype=torch.uint8)
        del y
        z = torch.zeros(MB, dtype=torch.uint8)
    assert memory.peak_bytes == 4 * MB
    assert memory.left_bytes == x.nbytes + z.nbytes


def test_temporaries_inside_of_an_operation_count():
    x = torch.randn(1000, 1000)
    with StepMemory(CPU, alive_bytes=0) as memory:
        x.logsumexp(1)
    assert memory.peak_bytes >= x.nbytes
    assert memory.left_bytes < x.nbytes


def test_what_is_alive_before_counts_once():
    gc.collect()
    before = alive_bytes()
    x = torch.zeros(MB, dtype=torch.uint8)
    views = [x[10:], x.view(1000, 1000), torch.nn.Parameter(x.float())]
    assert alive_bytes() - before == 5 * MB
    with StepMemory(CPU) as memory:
        torch.zeros(2 * MB, dtype=torch.uint8)
    assert memory.alive_bytes - before == 5 * MB
    assert memory.peak_bytes - before == 7 * MB
    del views


def test_begin_step_forgets_the_peak_of_building():
    with StepMemory(CPU, alive_bytes=0) as memory:
        x = torch.zeros(9 * MB, dtype=torch.uint8)
        x = torch.zeros(MB, dtype=torch.uint8)
        memory.begin_step()
        torch.zeros(2 * MB, dtype=torch.uint8)
    assert memory.alive_bytes == x.nbytes
    assert memory.peak_bytes == 3 * MB


def test_each_thread_measures_itself():
    found = {}

    def rank(size):
        with StepMemory(CPU, alive_bytes=0) as memory:
            torch.zeros(size, dtype=torch.uint8)
        found[size] = memory.peak_bytes

    threads = [threading.Thread(target=rank, args=(n * MB,)) for n in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n * MB: n * MB for n in (1, 2, 3)}


def settled_bytes():
    """alive_bytes() once the threads that set a group up have let go of what they sent."""
    last, now = -1, 0
    while now != last:
        gc.collect()
        time.sleep(0.1)
        last, now = now, alive_bytes()
    return now


def shared(rank_bytes):
    import torch.distributed as dist

    group = ShmCollectives(dist.group.WORLD, heap_gb=0.1)
    before = settled_bytes()
    x = group.empty(rank_bytes, torch.uint8)
    with StepMemory(CPU) as memory:
        x.fill_(1)
    return memory.alive_bytes - before, memory.peak_bytes - before


def test_memory_that_ranks_share_counts_where_it_was_taken():
    for alive, peak in run_ranks(shared, 2, 2 * MB, backend="gloo"):
        assert alive == 2 * MB
        assert 2 * MB <= peak < 2 * MB + 1000


def leftovers(stage, tp):
    s = setup(world_size=2, zero_stage=stage, tp=tp, micro_batch_size=2)
    run = ShortRun(workload(), s, Mesh(tp=tp, device="cpu"))
    for _ in range(4):
        with StepMemory(CPU) as memory:
            run.step()
        found = memory.left_bytes, alive_bytes()
    return found


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("stage", "tp"), [(3, 1), pytest.param(0, 1, marks=SLOW), pytest.param(0, 2, marks=SLOW)]
)
def test_a_step_frees_what_it_takes_as_far_as_is_seen(stage, tp):
    """Otherwise the peak would be too high: what another thread frees is not seen."""
    for left, alive in run_ranks(leftovers, 2, stage, tp, backend="gloo"):
        assert left == pytest.approx(alive, rel=0.002)


def test_it_says_nothing_on_stderr():
    code = (
        "import torch\n"
        "from fastpar.predict.memory import StepMemory\n"
        "x = torch.zeros(1000)\n"
        "with StepMemory(torch.device('cpu')):\n"
        "    del x\n"
        "import sys; print('still there', file=sys.stderr)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ran.stderr == "still there\n", ran.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_it_is_the_allocators_peak():
    device = torch.device("cuda")
    with StepMemory(device) as memory:
        x = torch.zeros(MB, device=device)
        y = torch.zeros(3 * MB, device=device)
        del y
    assert memory.peak_bytes - memory.alive_bytes == pytest.approx(16 * MB, rel=0.01)
    assert memory.left_bytes - memory.alive_bytes == pytest.approx(x.nbytes, rel=0.01)


def held_and_alive(stage):
    """After two steps of a rank that is a process: nothing else is alive there."""
    one, s = workload(n_layer=3, width=64), setup(world_size=2, zero_stage=stage)
    run = ShortRun(one, s, Mesh(device="cpu"))
    run.seconds(2)
    gc.collect()
    return held_bytes(run.engine, run.optimizer), alive_bytes()


@pytest.mark.parametrize("stage", [pytest.param(0, marks=SLOW), 3])
def test_what_is_held_is_what_is_alive(stage):
    for held, alive in run_ranks(held_and_alive, 2, stage, backend="gloo"):
        assert held == pytest.approx(alive, rel=0.02)
