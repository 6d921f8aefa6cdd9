"""Grids on paper: states as parallelize() makes them, exchanges as a rank begins them."""

from collections import Counter
from dataclasses import replace

import torch
from cells import covering
from lone_rank import LoneMesh, heard

from fastpar import GPT, AdamW, GPTConfig, Mesh, engine_of, parallelize
from fastpar.axes.step import Setup, Workload
from fastpar.engine.debug import Debug
from fastpar.nn.recompute import recompute
from fastpar.predict.memory import predict_states
from fastpar.predict.run import predict
from fastpar.predict.time import comm_ops_of
from fastpar.settings.config import TrainConfig
from fastpar.testing import run_ranks

SHAPE = GPTConfig(2, 4, 64, 32, 200, dropout=0.0)
B = 4
GRIDS = ((1, 2), (2, 1), (2, 2), (4, 2), (2, 2, 2))


def setup_of(grid, dp, **options):
    ranks = dp * torch.Size(grid).numel()
    named = {"tp_grid": "x".join(map(str, grid)), "world_size": ranks}
    formats = {"dtype": "fp32", "device_type": "cpu", "transport": "shm"}
    return Setup(**named, **formats, micro_batch_size=B, **options)


@covering(
    1,
    ("grid", GRIDS),
    ("stage", [0, 1, 2, 3]),
    ("mode", ["none", "selective", "full"]),
)
def test_what_a_grid_sends(grid, stage, mode):
    """Kind and bytes of every exchange inside of layers, and how often."""
    setup = setup_of(grid, 2, zero_stage=stage, activation_checkpointing=mode)
    with LoneMesh(setup.world_size, 0, tp_grid=grid) as mesh:
        ops = []
        model = GPT(SHAPE)
        parallelize(model, mesh, zero_stage=stage, debug=Debug(collectives=heard(ops)))
        recompute(model, mode)
        optimizer = AdamW(model.parameters())
        idx = torch.arange(B * 32).view(B, 32) % 200
        ops.clear()
        model(idx, idx).backward()
        optimizer.step()
        said = Counter((op.kind, op.tensor_bytes) for op in ops if op.role == "tp")
    found = Counter()
    for comm in comm_ops_of(Workload(SHAPE, B * setup.dp), setup):
        if comm.axis == "tp":
            found[comm.kind, comm.bytes] += comm.count
    sums = [{b for kind, b in ops if kind == "all_reduce"} for ops in (said, found)]
    whole = Counter({k: n for k, n in found.items() if k[0] != "all_reduce"})
    assert {k: n for k, n in said.items() if k[0] != "all_reduce"} == whole
    # Of partial gradients a rank sums those of its own pieces, which are not all alike.
    assert len(sums[0]) == len(sums[1])
    assert max(sums[0], default=0) <= 2 * setup.n_shards * max(sums[1], default=0)
    if setup.stage == 0:
        assert sums[0] == sums[1]


@covering(1, ("grid", GRIDS), ("stage", [0, 1, 2, 3]))
def test_states_of_a_grid(grid, stage):
    """Parameters, gradients and AdamW's moments, within 3 %."""
    setup = setup_of(grid, 1, zero_stage=stage)

    def rank():
        model = GPT(SHAPE)
        parallelize(model, Mesh(tp_grid=grid), zero_stage=stage)
        optimizer = AdamW(model.parameters())
        idx = torch.arange(B * 32).view(B, 32) % 200
        model(idx, idx).backward()
        optimizer.step()
        states = optimizer.state.values()
        moments = [v for state in states for v in state.values() if torch.is_tensor(v) and v.dim()]
        held = engine_of(model).memory()
        return held["parameters"], sum(v.nbytes for v in moments)

    predicted = predict_states(Workload(SHAPE, B), setup)
    found = run_ranks(rank, setup.world_size)
    weights, moments = (max(of_ranks) for of_ranks in zip(*found))
    if stage < 3:
        assert abs(weights - predicted.parameters) <= 0.03 * predicted.parameters
    mean = sum(m for _, m in found) / len(found)
    assert abs(mean - predicted.optimizer) <= 0.03 * predicted.optimizer
    assert moments <= 1.5 * predicted.optimizer


def test_settings_come_back():
    config = TrainConfig().replace({"tp_grid": "2x2x2", "nproc": 8, "n_head": 4, "n_embd": 64})
    setup = Setup(8, config)
    assert (setup.tp, setup.rows, setup.depth, setup.data, setup.dp) == (2, 2, 2, 2, 1)
    assert setup.config(Workload(SHAPE, 8)).mesh == config.mesh
    assert replace(setup, tp_grid=None, tp=2).data == 4


def test_a_run_on_a_grid_is_predicted():
    config = TrainConfig().replace({"tp_grid": "2x2", "nproc": 4, "batch_size": 8})
    given = Setup(4, config, "cpu", "shm", dtype="fp32", micro_batch_size=8)
    found = predict(SHAPE, given, {"device": "CPU", "threads": 1})
    setup = setup_of((2, 2), 1)
    assert found["predicted_bytes"] > predict_states(Workload(SHAPE, 8), setup).total
    assert found["step_ms"]["tp"] > 0
