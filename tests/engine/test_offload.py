"""The optimizer's step on the host's side of a stand-in bus: order, faults, memory, refusals.

That it is the run without it: tests/contracts/test_offload_matrix.py.
"""

from __future__ import annotations

import functools
import subprocess
import sys

import pytest
import torch
from cells import slow

from fastpar import (
    GPT,
    Adafactor,
    AdamW,
    GPTConfig,
    Mesh,
    Muon,
    engine_of,
    muon_groups,
    parallelize,
)
from fastpar.axes import offload
from fastpar.checkpoint.restore import load_checkpoint
from fastpar.checkpoint.saver import Saver
from fastpar.comm import host
from fastpar.comm.host import Bus, SlowBus
from fastpar.engine.debug import Debug
from fastpar.optim.schedule import AveragedWeights
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

CONFIG = GPTConfig(vocab_size=97, n_layer=3, n_head=2, n_embd=32, block_size=16, dropout=0.1)
BUS = Debug(bus_gb_s=2.0, poison=True)
MIB = 2**20


def made(mode="optimizer", stage=2, debug=BUS, dtype=torch.float32, **options):
    model = GPT(CONFIG, seed=0).to(dtype)
    kept = {"bucket_mb": 0.03, "first_bucket_mb": 0.003, **options}
    asked = Parallel.of(zero_stage=stage, offload=mode, **kept)
    parallelize(model, Mesh(device="cpu"), asked, debug=debug if mode else None)
    return model


def adamw(model, **options):
    return AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5, **options)


def loss_of(model, step, rank=0):
    g = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randint(0, 97, (2, 17), generator=g)
    return model(x[:, :-1], x[:, 1:])


def steps(model, optimizer, n=3, first=0):
    losses = []
    for step in range(first, first + n):
        loss = loss_of(model, step, engine_of(model).mesh.dp_rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def final(model, optimizer):
    state = optimizer.state_dict()["state"]
    values = {f"{i}.{k}": torch.as_tensor(v) for i, s in state.items() for k, v in s.items()}
    return {**{k: v.clone() for k, v in model.state_dict().items()}, **values}


def same(a, b):
    """Bits; the state of shards is flat and that of one process is not."""
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name].reshape(-1), b[name].reshape(-1)) for name in a)


def test_the_host_steps_in_the_order_of_the_next_forward(monkeypatch):
    model = made()
    optimizer = adamw(model)
    engine, seen = engine_of(model), []
    prepare = AdamW.prepare

    def spy(self, rows, factor):
        seen.extend(engine.shards.name_of(row.param) for row in rows)
        return prepare(self, rows, factor)

    monkeypatch.setattr(AdamW, "prepare", spy)
    steps(model, optimizer, 1)
    of_block = [name.split(".")[1] for name in seen if name.startswith("h.")]
    assert of_block == sorted(of_block)
    assert not seen[0].startswith("h.")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_of_the_state_is_on_the_device(dtype):
    """Between steps: weights in their own dtype; no gradient, no master, no moment."""
    wide = {"grad_dtype": torch.float32} if dtype != torch.float32 else {}
    model = made(dtype=dtype, **wide)
    optimizer = adamw(model, master_weights=dtype != torch.float32)
    steps(model, optimizer)
    engine, n = engine_of(model), sum(p.numel() for p in model.parameters())
    kinds, padding = engine.memory(), 256 * dtype.itemsize * len(list(model.parameters()))
    assert kinds["gradients"] == kinds["gradient shards"] == kinds["partial sums"] == 0
    assert n * dtype.itemsize <= kinds["parameters"] <= n * dtype.itemsize + padding
    assert kinds["host weights"] == kinds["parameters"]
    assert kinds["host gradients"] == kinds["parameters"] // dtype.itemsize * 4
    assert "offload: optimizer on the host" in engine.describe()
    assert engine.report.offload_ms >= 0


def test_few_gradients_are_on_their_way_at_once(monkeypatch):
    """A slow bus holds the backward up, rather than to let gradients pile up on the device."""
    under_way, most, arrived = [], [], SlowBus.arrived
    down = SlowBus.down

    def counted(self, host, x):
        handle = down(self, host, x)
        under_way.append(handle)
        most.append(sum(not h.is_completed() for h in under_way))
        return handle

    monkeypatch.setattr(SlowBus, "down", counted)
    monkeypatch.setattr(SlowBus, "arrived", lambda self, handle: arrived(self, handle))
    model = made(debug=Debug(bus_gb_s=0.005))
    steps(model, adamw(model), 1)
    assert len(under_way) > 2 * offload.IN_FLIGHT
    assert max(most) <= offload.IN_FLIGHT + 1


def test_gradients_that_are_read_too_early_are_nan(monkeypatch):
    """The order broken once: the host steps before its gradients have arrived."""
    model = made(debug=Debug(bus_gb_s=0.002, poison=True))
    optimizer = adamw(model)
    assert all(map(torch.isfinite, map(torch.tensor, steps(model, optimizer, 2))))
    monkeypatch.setattr(SlowBus, "arrived", lambda self, handle: None)
    assert not torch.isfinite(torch.tensor(steps(model, optimizer, 3, first=2))).all()


def test_an_error_of_the_host_reaches_the_next_forward(monkeypatch):
    model = made()
    optimizer = adamw(model)
    steps(model, optimizer, 1)

    def fails(self, rows, factor):
        def call():
            raise OSError("the host has a broken core")

        return [call]

    monkeypatch.setattr(AdamW, "prepare", fails)
    with pytest.raises((OSError, RuntimeError), match="broken core"):
        steps(model, optimizer, 2)


def test_a_schedule_may_change_the_rate_while_the_host_steps(monkeypatch):
    """Numbers of a step are those of its step(), also where they are tensors."""

    def run(mode):
        model = made(mode, stage=2 if mode else 0, debug=Debug(bus_gb_s=0.01))
        optimizer = AdamW(model.parameters(), lr=torch.tensor(1e-2))
        for step in range(3):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"].mul_(0.5)
            optimizer.param_groups[0]["weight_decay"] *= 0.5
        return final(model, optimizer)

    torch.manual_seed(0)
    expected = run(None)
    torch.manual_seed(0)
    same(run("optimizer"), expected)


def test_two_optimizers_averages_and_checks_of_one_model():
    """Half of the parameters each, a norm each; the average of the weights; wholes in between."""

    def run(mode, stage):
        torch.manual_seed(0)
        model = made(mode, stage)
        params = list(model.parameters())
        halves = [adamw(model), adamw(model)]
        for i, optimizer in enumerate(halves):
            optimizer.param_groups[0]["params"] = params[i::2]
        averages = [AveragedWeights(optimizer, 0.9) for optimizer in halves]
        norms = []
        for step in range(3):
            loss_of(model, step).backward()
            for optimizer, average in zip(halves, averages):
                optimizer.step()
                average.update(step)
                norms.append(optimizer.grad_norm.item())
            for optimizer in halves:
                optimizer.zero_grad()
        with averages[0].in_the_model():
            loss = loss_of(model.eval(), 9).item()
        model.train()
        return norms, loss, {**final(model, halves[0]), **final(model, halves[1])}

    expected = run(None, 0)
    for mode, stage in (("optimizer", 1), ("optimizer", 3), ("parameters", 3)):
        norms, loss, found = run(mode, stage)
        assert (norms, loss) == expected[:2]
        same(found, expected[2])


@pytest.mark.parametrize(("mode", "stage"), [("optimizer", 1), ("optimizer", 3), ("parameters", 3)])
def test_states_move_between_hosts_and_devices(mode, stage):
    """Loaded with offload what was saved without, and the other way round."""

    def there(before, then, stages):
        torch.manual_seed(0)
        model = made(before, stages[0])
        optimizer = adamw(model)
        steps(model, optimizer, 2)
        weights, state = model.state_dict(), optimizer.state_dict()
        weights = {k: v.clone() for k, v in weights.items()}
        other = made(then, stages[1])
        with torch.no_grad():
            other.load_state_dict(weights)
        again = adamw(other)
        again.load_state_dict(state)
        torch.manual_seed(1)
        return steps(other, again, 2, first=2), final(other, again)

    losses, expected = there(None, None, (0, 0))
    for before, then, stages in ((None, mode, (0, stage)), (mode, None, (stage, 0))):
        found_losses, found = there(before, then, stages)
        assert found_losses == losses
        same(found, expected)


def test_gradients_may_be_read_zeroed_and_added_to():
    """grads(), zero_grad(set_to_none=False), a second backward that nobody announced."""

    def run(mode, stage):
        torch.manual_seed(0)
        model = made(mode, stage)
        optimizer = adamw(model)
        engine, found = engine_of(model), []
        for step in range(3):
            loss_of(model, step).backward()
            found += [g.clone() for _, g in engine.grads()]
            if step == 1:
                optimizer.zero_grad(set_to_none=False)
            loss_of(model, step + 50).backward()
            found += [g.clone() for _, g in engine.grads()]
            optimizer.step()
            optimizer.zero_grad()
        return found, final(model, optimizer)

    grads, expected = run(None, 0)
    for mode, stage in (("optimizer", 1), ("optimizer", 2), ("parameters", 3)):
        found, end = run(mode, stage)
        assert len(found) == len(grads)
        assert all(map(torch.equal, found, grads))
        same(end, expected)


@pytest.mark.parametrize("ranks", [1, 2])
def test_whole_parameters_are_read_and_written_between_steps(ranks):
    """gathered(), while the host steps and again before a step, with gradients that wait."""

    def run(mode, stage):
        model = made(mode, stage).eval()
        optimizer = adamw(model)
        shards, found = engine_of(model).shards, []

        def change(factor):
            with shards.gathered(), torch.no_grad():
                for p in model.parameters():
                    found.append(p.clone())
                    p.mul_(factor)

        for step in range(3):
            loss_of(model, step, engine_of(model).mesh.dp_rank).backward()
            change(0.5)
            optimizer.step()
            change(1.5)
            optimizer.zero_grad()
        return found, final(model, optimizer)

    expected = run_ranks(functools.partial(run, None, 2), ranks)
    for mode, stage in (*(("optimizer", stage) for stage in range(4)), ("parameters", 3)):
        found = run_ranks(functools.partial(run, mode, stage), ranks)
        for (values, end), (without, state) in zip(found, expected, strict=True):
            assert all(map(torch.equal, values, without))
            same(end, state)


def refused(**options):
    with pytest.raises(ValueError, match=r"expected|needs") as error:
        made(**options)
    return str(error.value)


def test_what_is_refused(monkeypatch):
    assert "got device=cpu" in refused(debug=Debug())
    assert "offload=parameters needs zero_stage=3: it keeps no" in refused(mode="parameters")
    assert "got offload='disk'" in refused(mode="disk")
    assert "offload_keep_mb below" in refused(offload_keep_mb=1e4)
    assert "expected float for offload_keep_mb, got offload_keep_mb='5'" in refused(
        offload_keep_mb="5"
    )
    assert "got offload_keep_mb=True" in refused(offload_keep_mb=True)
    assert "offload_pinned=False needs offload; add" in refused(mode=None, offload_pinned=False)


def test_a_host_that_is_too_small_says_what_would_fit(monkeypatch):
    """Of fp32 weights: these and their gradients cross the bus, and two moments stay."""
    model = made()
    padded = sum(bucket.spec.numel for bucket in engine_of(model).buckets)
    monkeypatch.setattr(host, "free_memory", lambda: 16 * padded - 1)
    said = refused()
    assert f"expected {16 * padded / 1e9:.3g} GB of free memory on the host" in said
    assert "offload_keep_mb=1 fits, or share the state among 2 times as many hosts" in said
    made(offload_keep_mb=0.05)
    monkeypatch.setattr(host, "free_memory", lambda: 0)
    assert "GB; share the state" in refused()
    monkeypatch.setattr(host, "free_memory", lambda: 16 * padded)
    made()
    monkeypatch.setattr(SlowBus, "pinned", True)  # by torch, in powers of two
    sizes = [bucket.spec.numel for bucket in engine_of(model).buckets]
    needed = sum(8 * n + 2 * (1 << (4 * n - 1).bit_length()) for n in sizes)
    monkeypatch.setattr(host, "free_memory", lambda: needed - 1)
    assert f"expected {needed / 1e9:.3g} GB of free memory on the host" in refused()


@pytest.mark.parametrize(("mode", "stage"), [("optimizer", 2), ("parameters", 3)])
def test_a_checkpoint_comes_from_the_host(tmp_path, monkeypatch, mode, stage):
    """Nothing crosses the bus for it: neither down, nor up."""
    model = made(mode, stage)
    optimizer = adamw(model)
    saver = Saver(tmp_path, model=model, optimizer=optimizer, asynchronous=False)
    steps(model, optimizer, 2)
    engine_of(model).shards.settle()
    with monkeypatch.context() as context:
        context.setattr(SlowBus, "_copy", None)
        assert saver.save(2, {})
    other = made(None, 0)
    again = adamw(other)
    load_checkpoint(saver.last.path, model=other, optimizer=again)
    same(final(other, again), final(model, optimizer))


@pytest.mark.parametrize("kind", [Muon, Adafactor])
def test_an_optimizer_without_a_host_step_is_refused(kind):
    model = made()
    groups = muon_groups(model) if kind is Muon else model.parameters()
    with pytest.raises(ValueError, match=f"{kind.__name__}: expected an optimizer that steps on"):
        kind(groups)


def test_pinned_memory_that_the_system_refuses_is_told(monkeypatch):
    empty = torch.empty

    def no_pinned(*args, pin_memory=False, **kwargs):
        if args and kwargs.get("dtype") is not None and pin_memory is None:
            raise RuntimeError("CUDA error: OS call failed or operation not supported on this OS")
        return empty(*args, **kwargs)

    monkeypatch.setattr(SlowBus, "pinned", None)
    monkeypatch.setattr(torch, "empty", no_pinned)
    with pytest.raises(RuntimeError, match=r"GB of pinned memory .* offload_pinned=False"):
        made()


def test_memory_is_pageable_only_if_asked(monkeypatch):
    given = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(
        torch, "empty", lambda *args, pin_memory, **kwargs: given.append(pin_memory)
    )
    for options in ({}, {"pinned": False}):
        bus = Bus(torch.device("cpu"), **options)
        bus.memory(1, torch.float32)
    assert given == [True, False]


FORMATS = {
    "bf16 remainder": (torch.bfloat16, {"master_weights": "remainder"}),
    "bf16 remainder, bf16 moments": (
        torch.bfloat16,
        {"master_weights": "remainder", "moment_dtype": torch.bfloat16},
    ),
    "bf16 rounded by chance, bf16 moments": (
        torch.bfloat16,
        {"stochastic_rounding": True, "moment_dtype": torch.bfloat16},
    ),
    "fp32, 8-bit moments": (torch.float32, {"moment_dtype": torch.uint8}),
    "fp32, amsgrad, capturable": (torch.float32, {"amsgrad": True, "capturable": True}),
}


@pytest.mark.parametrize("ranks", [1, slow(2), slow(4)])
@pytest.mark.parametrize(("dtype", "options"), FORMATS.values(), ids=FORMATS)
def test_formats_of_the_state(dtype, options, ranks):
    """Each format of the optimizer's state, at every stage, with clipping: the same bits."""
    wide = {"grad_dtype": torch.float32} if dtype != torch.float32 else {}

    def run(mode, stage):
        torch.manual_seed(0)
        model = made(mode, stage, dtype=dtype, **wide).eval()
        optimizer = adamw(model, **options)
        losses = steps(model, optimizer)
        return losses, final(model, optimizer)

    expected = run_ranks(functools.partial(run, None, 0), ranks)
    for mode, stage in (*(("optimizer", stage) for stage in range(4)), ("parameters", 3)):
        found = run_ranks(functools.partial(run, mode, stage), ranks)
        for (losses, end), (without, state) in zip(found, expected, strict=True):
            assert losses == without
            same(end, state)


def test_gradients_of_stage_0_may_be_changed_by_hand():
    """p.grad is the gradient, until step(): torch's clipping, other values, None, GradScaler's."""

    def run(mode):
        torch.manual_seed(0)
        model = made(mode, 0)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        params, norms = list(model.parameters()), []
        for step in range(5):
            loss_of(model, step).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(params, 0.3).item())
            if step == 1:
                params[0].grad.mul_(2.0)
                params[3].grad = None
            if step == 2:
                optimizer.step()  # twice with the same gradients
            if step > 2:
                optimizer.grad_scale, optimizer.found_inf = 2.0, torch.tensor([float(step == 3)])
            optimizer.step()
            assert optimizer.skipped == (step == 3)
            optimizer.zero_grad()
        return norms, final(model, optimizer)

    norms, expected = run(None)
    found, state = run("optimizer")
    assert found == norms
    same(state, expected)


def test_zero_grad_in_step_is_refused():
    with pytest.raises(ValueError, match="or offload, got True with zero_stage=0, offload=opt"):
        adamw(made("optimizer", 0), zero_grad_in_step=True)


def test_ranks_in_threads_keep_their_own_state():
    def rank():
        model = made("optimizer", 2)
        optimizer = adamw(model)
        losses = steps(model.eval(), optimizer)
        return losses, final(model, optimizer)

    def without():
        model = made(None, 2)
        optimizer = adamw(model)
        losses = steps(model.eval(), optimizer)
        return losses, final(model, optimizer)

    for (losses, found), (expected, end) in zip(run_ranks(rank, 2), run_ranks(without, 2)):
        assert losses == expected
        same(found, end)


SCRIPT = """
import torch, fastpar
from fastpar.engine.debug import Debug
shape = fastpar.GPTConfig(n_layer=8, n_head=8, n_embd=768, vocab_size=8192, block_size=16)
model = fastpar.GPT(shape)
debug = Debug(bus_gb_s=50.0)
mesh = fastpar.Mesh(device="cpu")
fastpar.parallelize(model, mesh, zero_stage=2, offload=fastpar.Offload("optimizer"), debug=debug)
optimizer = fastpar.AdamW(model.parameters(), max_grad_norm=1.0)
x = torch.randint(0, 8192, (1, 16))
model(x, x).backward()
optimizer.step()
"""


def test_a_process_may_end_while_the_host_steps():
    """Threads in a kernel when Python ends would abort it."""
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
