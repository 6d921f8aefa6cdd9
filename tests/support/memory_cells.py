"""Short runs on the CPU that measure the peak memory of a step."""

import gc
from functools import partial
from unittest import mock

import torch
from alive import Alive
from lone_rank import LoneMesh, heard

from fastpar.axes.step import Setup, Workload
from fastpar.engine.debug import Debug
from fastpar.kernels.loss.linear_cross_entropy import release_workspaces, workspace_bytes
from fastpar.models import set_up
from fastpar.predict import measure as measure_on
from fastpar.predict.measure import ShortRun, StepMemory, alive_bytes, held_bytes
from fastpar.settings.mesh import parse_grid
from fastpar.settings.model import BLOCK_FIELDS, PRESETS, GPTConfig

SHAPES = {
    "balanced": {"n_layer": 4, "width": 128, "tokens": 128, "vocab": 500, "dropout": 0.1},
    "long": {"n_layer": 4, "width": 128, "tokens": 1024, "vocab": 500, "dropout": 0.1},
    "deep": {"n_layer": 10, "width": 128, "tokens": 64, "vocab": 1000},
    "split": {"n_layer": 4, "width": 256, "tokens": 64, "vocab": 18000},  # wte above a bucket's cap
    "wide": {"n_layer": 2, "width": 192, "tokens": 128, "vocab": 5000, "dropout": 0.1},
    "mixed": {  # experts in every second layer
        **{"n_layer": 4, "width": 128, "tokens": 128, "vocab": 500, "dropout": 0.1},
        **{"n_expert": 4, "top_k": 2, "expert_every": 2},
    },
    "experts": {  # all chosen equally often
        **{"n_layer": 4, "width": 128, "tokens": 128, "vocab": 500},
        **{"n_expert": 4, "top_k": 4, "expert_hidden": 128},
    },
    "short": {"n_layer": 3, "width": 256, "tokens": 32, "vocab": 3000},  # units of 2 layers and 1
}
# Today's, wide enough that weights count.
BLOCKS = {"nanochat": {}, "llama": {"n_inner": 1024}, "qwen3": {"n_inner": 1024, "head_dim": 64}}
SHAPES |= {
    name: {
        **{"n_layer": 6, "width": 384, "heads": 8, "tokens": 128, "vocab": 2000},
        **{field: getattr(PRESETS[f"{name}-tiny"], field) for field in BLOCK_FIELDS},
        **changes,
    }
    for name, changes in BLOCKS.items()
}


def workload(n_layer=4, width=128, heads=4, tokens=128, batch=4, vocab=512, dropout=0.0, **more):
    return Workload(GPTConfig(n_layer, heads, width, tokens, vocab, dropout, **more), batch)


def setup(**settings):
    """The set-up of a CPU run with these settings."""
    return Setup(**{"dtype": "fp32", "device_type": "cpu", "transport": "shm", **settings})


def mesh_of(setup):
    return measure_on.mesh_of(setup, "cpu")


def measure(workload, setup, mesh):
    """The peak of the second step: the first makes the optimizer's state.

    Without what earlier tests of this process have left.
    """
    release_workspaces()
    while gc.collect():  # models of earlier cells
        pass
    left = alive_bytes()
    run = ShortRun(workload, setup, mesh)
    run.step()
    gc.collect()  # what the first recomputation leaves in a cycle
    with StepMemory(mesh.device) as memory:
        run.step()
    return memory.peak_bytes - left


def measure_alive(workload, setup):
    """The peak of the second step on a stage of a pipeline, by the tensors that are alive.

    A gloo thread frees messages; StepMemory does not see that.
    """
    torch.set_num_threads(1)
    release_workspaces()
    mesh = mesh_of(setup)
    with Alive() as alive:
        run = ShortRun(workload, setup, mesh)
        run.step()
        alive.peak = 0
        run.step()
        return alive.peak + workspace_bytes()


def measure_first_rank(workload, setup):
    """The peak of the second step on the first rank, of a grid too; no other rank is there."""
    torch.set_num_threads(1)
    release_workspaces()
    make = partial(set_up.parallelize, debug=Debug(collectives=heard([])))
    alone = mock.patch.object(set_up, "parallelize", make)
    grid = parse_grid(setup.mesh.tp_grid)
    with alone, LoneMesh(setup.world_size, 0, tp_grid=grid) as mesh:
        run = ShortRun(workload, setup, mesh)
        run.step()
        while gc.collect():  # models of earlier cells
            pass
        gc.disable()  # no garbage may be freed during the measurement
        try:
            held = held_bytes(run.engine, run.optimizer)
            with StepMemory(mesh.device, alive_bytes=held) as memory:
                run.step()
        finally:
            gc.enable()
        return memory.peak_bytes


def measure_all(cells):
    """The peak of every cell, on this rank of a process group that fits them all."""
    torch.set_num_threads(1)
    return [measure(one, s, mesh_of(s)) for one, s in cells]
