"""Offload as it runs on a GPU: which stream waits for which, with streams that are not there."""

import threading
import time

import fake_streams
import pytest
import torch
from fake_streams import FakeBus, device_is_busy
from nan_bus import poisoned
from test_offload import adamw, final, loss_of, made, same, steps

from fastpar import GPT, AdamW, engine_of
from fastpar.axes.offload import Offload
from fastpar.comm.collectives import StreamHandle
from fastpar.kernels import make_key
from fastpar.nn.recompute import recompute
from fastpar.testing import run_ranks

MODES = [("optimizer", 0), ("optimizer", 1), ("optimizer", 2), ("optimizer", 3), ("parameters", 3)]


@pytest.fixture(autouse=True)
def streams(monkeypatch):
    fake_streams.install(monkeypatch)


def run(mode, stage, clip=True, accum=1):
    torch.manual_seed(0)
    model = made(mode, stage if mode else 0, grad_accum_steps=accum)
    optimizer = adamw(model) if clip else AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(4):
        for i in range(accum):
            loss = loss_of(model, 10 * step + i)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            with torch.no_grad():
                losses.append(loss_of(model.eval(), 99).item())
            model.train()
    return losses, final(model, optimizer)


@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize(("mode", "stage"), MODES)
def test_copies_that_come_at_the_last_moment_change_nothing(mode, stage, accum):
    losses, state = run(None, 0, accum=accum)
    found, end = run(mode, stage, accum=accum)
    assert found == losses
    same(end, state)


@pytest.mark.parametrize(("mode", "stage"), MODES)
def test_a_forward_that_waits_for_no_copy_reads_nan(monkeypatch, mode, stage):
    """The order broken once."""
    monkeypatch.setattr(StreamHandle, "wait", lambda self, timeout_s=None: None)
    losses, _ = run(mode, stage)
    assert not torch.isfinite(torch.tensor(losses)).all()


@pytest.mark.parametrize(("mode", "stage"), MODES)
def test_a_host_that_waits_for_no_gradient_reads_nan(monkeypatch, mode, stage):
    monkeypatch.setattr(FakeBus, "arrived", lambda self, handle: None)
    losses, _ = run(mode, stage)
    assert not torch.isfinite(torch.tensor(losses)).all()


@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize(("mode", "stage"), MODES)
def test_nothing_changes_while_the_device_may_read_old_weights(mode, stage, clip):
    """An evaluation that was begun before step() and has not run yet."""
    model = made(mode, stage)
    optimizer = adamw(model) if clip else AdamW(model.parameters(), lr=1e-2)
    steps(model, optimizer, 1)
    loss_of(model, 1).backward()
    host: Offload = engine_of(model).shards.storage
    for bucket in host.order:
        host.send(bucket)
        host._arrived(bucket)
    before = {bucket: bucket.stepped.clone() for bucket in host.order}
    with device_is_busy():
        optimizer.step()
        time.sleep(0.05)
        assert all(torch.equal(bucket.stepped, old) for bucket, old in before.items())
    engine_of(model).shards.settle()
    assert not any(torch.equal(bucket.stepped, old) for bucket, old in before.items())


def test_a_gather_runs_beside_the_forward_that_is_there(monkeypatch):
    """Stages 1 and 2: what is gathered after a step waits for the way up alone."""
    under = []

    def rank():
        model = made("optimizer", 2)
        optimizer = adamw(model)
        steps(model, optimizer, 1)
        group = engine_of(model).buckets[0].groups.gather
        gather = type(group).all_gather

        def seen(self, out, x, **options):
            if threading.current_thread() is not threading.main_thread():
                under.append(fake_streams.current_stream() is fake_streams.COMPUTING)
            return gather(self, out, x, **options)

        monkeypatch.setattr(type(group), "all_gather", seen)
        loss_of(model, 1)

    run_ranks(rank, 2)
    assert under
    assert not any(under)


def recomputed(bus, micro_batches):
    """Losses and gradients of a model whose blocks keep their inputs on the host."""
    from test_host_activations import CONFIG

    model = recompute(GPT(CONFIG, seed=0), "full", offload=bus)
    found = []
    for i in range(3 * micro_batches):
        x = torch.randint(0, 97, (4, 65), generator=torch.Generator().manual_seed(i))
        args = x[:, :-1].contiguous(), x[:, 1:].contiguous()
        loss = model(*args, rng_key=make_key(1, i))
        loss.backward()
        found.append(loss)
    return [*found, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_activations(micro_batches):
    bus = poisoned(FakeBus)()
    for a, b in zip(recomputed(bus, micro_batches), recomputed(None, micro_batches), strict=True):
        assert torch.equal(a, b)


def test_a_backward_that_waits_for_no_input_reads_nan(monkeypatch):
    monkeypatch.setattr(StreamHandle, "wait", lambda self, timeout_s=None: None)
    found = recomputed(poisoned(FakeBus)(), 1)
    assert not all(x.isfinite().all() for x in found)
