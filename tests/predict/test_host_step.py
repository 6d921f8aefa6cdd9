"""Offload's cost: what the device waits for, and the bytes on both sides, against real engines."""

import itertools
from dataclasses import replace

import pytest
import torch

from fastpar import GPT, AdamW, GPTConfig, Mesh, engine_of, parallelize
from fastpar.axes.offload import UnitStep, exposed_s, stepped_elements, waiting_s
from fastpar.axes.step import Setup, Workload
from fastpar.engine.debug import Debug
from fastpar.predict.machine import host_of
from fastpar.predict.memory import host_bytes, predict_memory, predict_states
from fastpar.predict.plan import PlanCommand, flags, make_plan, report
from fastpar.settings.model import PRESETS
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

XL = Workload(PRESETS["gpt2-xl"], 8)
ONE = Setup(zero_stage=2, offload="optimizer", grad_accum_steps=8, accumulate="shard")


def by_events(units):
    """The same by brute force: device, bus and host, a millisecond at a time."""
    n, now, waited = len(units), 0, 0
    made = [sum(u.backward_s for u in units[i:]) for i in range(n)]  # when gradients are there
    end = sum(u.backward_s for u in units)
    down, up, stepped = (
        [u.down_s for u in units],
        [u.up_s for u in units],
        [u.host_s for u in units],
    )
    left = [u.forward_s for u in units]
    while left:
        while left and now >= end:  # the forward of units that are there
            i = n - len(left)
            if down[i] or stepped[i] or up[i] or left[0]:
                break
            left.pop(0)
        if not left:
            break
        i = n - len(left)
        queue = [j for j in reversed(range(n)) if down[j] and made[j] <= now]
        work = [j for j in range(n) if stepped[j]]
        lift = [j for j in range(n) if up[j] and not stepped[j] and not down[j]]
        if now >= end:
            waits = down[i] or stepped[i] or up[i]
            waited += bool(waits)
            if not waits:
                left[0] -= 1
        arrived = not any(down[: work[0] + 1]) if work else False
        for j in lift[:1]:
            up[j] -= 1
        if queue:
            down[queue[0]] -= 1
        if arrived and now >= end:
            stepped[work[0]] -= 1
        now += 1
    return waited


def test_waiting_is_that_of_the_two_queues():
    for host, down, up, forward in itertools.product((3, 8), (0, 2, 11), (0, 2), (1, 4, 9)):
        units = [UnitStep(5, down, up, 0, 0), *[UnitStep(host, down, up, forward, 2 * forward)] * 4]
        assert exposed_s(units) == by_events(units), units
    assert exposed_s([UnitStep(0, 0, 0, 5, 9), *[UnitStep(4, 1, 1, 5, 9)] * 10]) == 0


def test_a_longer_forward_hides_the_host():
    """GPT-2 XL on one H100: what is left is what the first block needs, and the root."""
    elements = stepped_elements(XL, ONE)
    first = sum(elements[:2])
    slow = waiting_s(XL, ONE, host_of("hopper"), 1e-9, 10.0)
    hidden = waiting_s(XL, ONE, host_of("hopper"), 10.0, 10.0)
    assert 1 < hidden / (first / sum(elements) * slow) < 1.3  # and the way down of the root
    kept = replace(ONE, offload_keep_mb=12 * first / 2**20)
    assert waiting_s(XL, kept, host_of("hopper"), 10.0, 10.0) < hidden / 10
    assert waiting_s(XL, ONE, host_of("volta"), 1e-9, 10.0) > 3 * slow


def test_gpt2_xl_fits_a_small_gpu():
    """18.7 GB of state and 6.2 GB of gradients leave the device for the host."""
    states = predict_states(XL, ONE)
    assert (states.gradients, states.optimizer) == (0, 0)
    assert states.parameters == pytest.approx(2 * XL.n_parameters, rel=1e-3)
    assert host_bytes(XL, ONE) == pytest.approx(18 * XL.n_parameters, rel=1e-3)
    without = replace(ONE, offload=None, zero_stage=0, accumulate="full")
    once = replace(ONE, grad_accum_steps=1)
    small = replace(XL, batch_size=1)
    saved = predict_memory(small, replace(without, grad_accum_steps=1)).total
    saved -= predict_memory(small, once).total
    assert saved == pytest.approx((12 + 4) * XL.n_parameters, rel=0.03)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("mode", "stage"), [("optimizer", 1), ("optimizer", 2), ("optimizer", 3), ("parameters", 3)]
)
def test_bytes_of_real_engines(mode, stage, ranks):
    shape = GPTConfig(vocab_size=512, n_layer=3, n_head=2, n_embd=64, block_size=32)

    def rank():
        model = GPT(shape).bfloat16()
        parallelize(
            model,
            Mesh(device="cpu"),
            Parallel.of(zero_stage=stage, offload=mode, grad_dtype=torch.float32, bucket_mb=0.2),
            debug=Debug(bus_gb_s=5.0),
        )
        optimizer = AdamW(model.parameters(), master_weights=True)
        x = torch.randint(0, 512, (1, 33))
        model(x[:, :-1], x[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        engine_of(model).shards.settle()
        kept = [x.nbytes for s in optimizer.state.values() for x in s.values() if x.dim()]
        return engine_of(model).memory(), sum(kept)

    setup = Setup(world_size=ranks, zero_stage=stage, offload=mode, bucket_mb=0.2)
    workload = Workload(shape, ranks)
    states = predict_states(workload, setup)
    for memory, kept in run_ranks(rank, ranks):
        on_device = memory["parameters"] + memory["parameter shards"]
        if stage == 3:  # nothing is gathered between steps
            on_device = memory["parameter shards"]
        assert on_device == pytest.approx(states.parameters, rel=0.03)
        grads = memory["gradients"] + memory["gradient shards"]
        assert grads == pytest.approx(states.gradients, rel=0.03)
        on_host = memory["host weights"] + memory["host gradients"] + kept
        assert on_host == pytest.approx(host_bytes(workload, setup), rel=0.03)
        assert states.optimizer == 0


def test_plan_takes_it_where_nothing_else_fits():
    plan = make_plan(PlanCommand(model="gpt2-xl", gpus=1, gpu="4090"))
    winner = plan.estimates[0]
    assert winner.setup.offload == "optimizer"
    assert winner.time.parts["offload"] > 0 == winner.time.parts["optimizer"]
    assert sum(winner.time.parts.values()) == pytest.approx(winner.time.step_s)
    text = report(plan)
    assert "optimizer on the host" in text
    assert "host     28.0 GB of memory a rank" in text
    assert "--offload optimizer" in " ".join(flags(plan, winner.setup))
    assert "--chunks" not in " ".join(flags(plan, winner.setup))
    fits = make_plan(PlanCommand(model="gpt2", gpus=1, gpu="h100"))
    assert all(e.setup.offload is None for e in fits.estimates)
