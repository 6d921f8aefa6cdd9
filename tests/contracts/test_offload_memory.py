"""What is alive on both sides of the bus with offload, in bytes, against the formulas.

P parameters in bf16, gradients, masters and both moments in fp32, d ranks; see test_zero_memory.py.
Bytes per parameter that stay on the device, and what a backward needs on top of them at its peak:

    offload      stage   stays      for a moment
    optimizer    0, 1    6          w + copies on their way down: 4 buckets, of stage 1 4 / d
    optimizer    2       2          w + whole buckets + 3 / d buckets on their way down
    optimizer    3       2 / d      the same                      + 2 * (root + two units)
    parameters   3       0          the same                      + 2 * (root + two units)

On the host: 18 / d bytes (18 at stage 0): weights 2, gradients 4, master and moments 12.
As many gradients are on their way as there may be: copies run when somebody waits for them.
"""

import functools

import fake_streams
import pytest
import torch
from alive import Alive
from cells import slow
from test_zero_memory import build, in_a_row, sizes

from fastpar.axes.offload import IN_FLIGHT
from fastpar.comm.mesh import Mesh
from fastpar.engine.debug import Debug
from fastpar.engine.engine import engine_of
from fastpar.engine.parallelize import parallelize
from fastpar.optim.adamw import AdamW
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

MODES = [("optimizer", 0), ("optimizer", 1), ("optimizer", 2), ("optimizer", 3), ("parameters", 3)]


def train(mode, stage):
    """Bytes (on the device after a step, at its peak; on the host) of this rank."""
    mesh = Mesh(device="cpu")
    idx = torch.arange(4)
    with Alive() as alive:
        model = build()
        parallelize(
            model,
            mesh,
            Parallel.of(
                zero_stage=stage,
                grad_dtype=torch.float32,
                bucket_mb=2.0,
                first_bucket_mb=0.25,
                offload=mode,
            ),
            debug=Debug(bus_gb_s=0.02),
        )
        optimizer = AdamW(model.parameters(), master_weights=True, max_grad_norm=1.0)
        for _ in range(2):
            alive.peak = 0
            model(idx).backward()
            peak = alive.peak
            optimizer.step()
            optimizer.zero_grad()
            engine = engine_of(model)
            engine.shards.settle()
            states = [v for s in optimizer.state.values() for v in s.values()]
            told = engine.memory()
            host = sum(v.nbytes for v in states if v.dim())
            host += told["host weights"] + told["host gradients"]
        after = alive.now()
    buckets = [4 * b.numel for b in engine.shards.layout.buckets]
    return {"after": after - host, "peak": peak - host, "host": host, "buckets": buckets}


def on_their_way(buckets, stage, d, ranks):
    """The largest sum of those that go down, and of whole ones that are filled and reduced."""
    found = []
    for i in range(len(buckets)):
        down, rest = buckets[i : i + IN_FLIGHT], buckets[i + IN_FLIGHT :]
        if stage < 2:
            found.append(sum(buckets[i : i + IN_FLIGHT + 1]) / d)
        elif ranks == 1:  # reduced at once, in place
            found.append(sum(down) + (rest or [0])[0])
        else:
            found.append(sum(down) / d + in_a_row(rest))
    return max(found)


@pytest.mark.parametrize(
    ("mode", "stage", "ranks"),
    [
        cell if cell in (("optimizer", 2, 1), ("parameters", 3, 2)) else slow(*cell)
        for cell in ((*kind, ranks) for kind in MODES for ranks in (1, 2))
    ],
)
def test_bytes_on_both_sides(monkeypatch, mode, stage, ranks):
    fake_streams.install(monkeypatch)
    total, root, layer, weight = sizes()
    stays = {0: 6, 1: 6, 2: 2, 3: 2 / ranks if mode == "optimizer" else 0}[stage] * total
    for rank in run_ranks(functools.partial(train, mode, stage), ranks):
        d = ranks if stage else 1
        assert rank["host"] == pytest.approx(18 * total / d, rel=0.03)
        assert rank["after"] == pytest.approx(stays, rel=0.03, abs=0.06 * total)
        moment = 2 * weight + on_their_way(rank["buckets"], stage, d, ranks)
        if stage == 3:
            moment += 2 * (root + 2 * layer)  # the next one is there before this is sent
        assert rank["peak"] <= 1.03 * (stays + moment)
        if ranks == 1 or stage < 2:
            assert rank["peak"] == pytest.approx(stays + moment, rel=0.03)
