"""What is predicted not to fit runs out of memory: processes with a limit around the prediction."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from memory_cells import setup, workload

from fastpar.predict.measure import ShortRun
from fastpar.predict.memory import predict_memory

LAYOUTS = {
    "many activations": (
        {"n_layer": 4, "width": 256, "tokens": 256, "vocab": 1000, "dropout": 0.1},
        {"micro_batch_size": 8},
    ),
    "recomputed": (
        {"n_layer": 12, "width": 256, "tokens": 128, "vocab": 1000},
        {"micro_batch_size": 8, "activation_checkpointing": "full"},
    ),
    "many states": (
        {"n_layer": 8, "width": 512, "tokens": 64, "vocab": 2000},
        {"micro_batch_size": 2, "dtype": "bf16", "grad_accum_steps": 2},
    ),
}
OUT_OF_MEMORY = 3


def data_bytes():
    """Private writable memory of this process, which RLIMIT_DATA limits."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if "VmData" in x)
    return int(line.split()[1]) * 1024


def train_within(name, factor):
    """Two steps with factor * the predicted peak on top of what the process has by now."""
    import torch

    from fastpar.comm.mesh import Mesh

    torch.set_num_threads(1)
    shape, settings = LAYOUTS[name]
    one, s, mesh = workload(**shape), setup(**settings), Mesh(device="cpu")
    tiny, small = (
        workload(n_layer=1, width=64, tokens=16),
        setup(**{**settings, "micro_batch_size": 1}),
    )
    ShortRun(tiny, small, mesh).step()  # what is loaded at first use
    limit = data_bytes() + round(factor * predict_memory(one, s).total)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        run = ShortRun(one, s, mesh)
        for _ in range(2):
            run.step()
    except (RuntimeError, MemoryError) as error:
        known = "can't allocate memory" in str(error) or "bad_alloc" in str(error)
        os._exit(OUT_OF_MEMORY if known or isinstance(error, MemoryError) else 1)
    os._exit(0)


def exit_status(name, factor):
    code = f"import test_memory_limit as t; t.train_within({name!r}, {factor})"
    # Freed blocks go back to the system at once: the limit counts what is mapped.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    env["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    ran = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300
    )
    return ran.returncode, ran.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_DATA of Linux")
@pytest.mark.parametrize("name", LAYOUTS)
def test_15_percent_less_than_predicted_is_too_little_and_15_more_enough(name):
    status, words = exit_status(name, 0.85)
    assert status == OUT_OF_MEMORY, words
    status, words = exit_status(name, 1.15)
    assert status == 0, words
