"""Short runs on the CPU, with the peak of a step's memory measured."""

import gc

import torch
from alive import Alive

from fastpar.comm.mesh import Mesh
from fastpar.config.config import GPTConfig
from fastpar.cost.step_memory import StepMemory
from fastpar.cost.workload import Setup, Workload
from fastpar.kernels.linear_cross_entropy import release_workspaces, workspace_bytes
from fastpar.measure.short_run import ShortRun


def workload(n_layer=4, width=128, heads=4, tokens=128, batch=4, vocab=512, dropout=0.0):
    return Workload(GPTConfig(n_layer, heads, width, tokens, vocab, dropout), batch)


def setup(**settings):
    """What these settings of a run on the CPU mean."""
    half = settings.get("dtype", "fp32") != "fp32"
    usual = {
        "dtype": "fp32",
        "device_type": "cpu",
        "transport": "shm",
        "accumulate": "shard" if settings.get("zero_stage", 0) >= 2 else "full",
        "master_weights": "full" if half else "none",
    }
    return Setup(**{**usual, **settings})


def measure(workload, setup, mesh):
    """The peak of the second step: the first makes the optimizer's state."""
    release_workspaces()
    while gc.collect():  # models of earlier cells
        pass
    run = ShortRun(workload, setup, mesh)
    run.step()
    with StepMemory(mesh.device) as memory:
        run.step()
    return memory.peak_bytes


def measure_alive(workload, setup):
    """The peak of the second step on a stage of a pipeline, by the tensors that are alive.

    A message is let go of by a thread of gloo's, which StepMemory does not see.
    """
    torch.set_num_threads(1)
    release_workspaces()
    mesh = Mesh(tp=setup.tp, cp=setup.cp, pp=setup.pp, device="cpu")
    with Alive() as alive:
        run = ShortRun(workload, setup, mesh)
        run.step()
        alive.peak = 0
        run.step()
        return alive.peak + workspace_bytes()


def measure_all(cells):
    """The peak of every cell, on this rank of a process group that fits them all."""
    torch.set_num_threads(1)
    return [measure(one, s, Mesh(tp=s.tp, cp=s.cp, pp=s.pp, device="cpu")) for one, s in cells]
