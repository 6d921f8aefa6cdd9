"""The optimizer's step on the host's side of a stand-in bus: order, faults, refusals.

tests/contracts/test_same_run.py has whole runs, test_memory.py the bytes. The last part is offload
as it runs on a GPU: which stream waits for which, with streams that are not there.
"""

import functools
import subprocess
import sys
import time

import fake_streams
import pytest
import torch
from cells import covering, slow
from fake_streams import FakeBus, device_is_busy, poisoned
from programs import assert_same

import fastpar
from fastpar import GPT, AdamW, GPTConfig, Mesh, engine_of, parallelize
from fastpar.checkpoint.restore import load_checkpoint
from fastpar.checkpoint.saver import Saver
from fastpar.comm import host
from fastpar.comm.collectives import StreamHandle
from fastpar.comm.host import Bus, SlowBus
from fastpar.engine.debug import Debug
from fastpar.kernels import make_key
from fastpar.nn.recompute import recompute
from fastpar.optim.schedule import AveragedWeights
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

CONFIG = GPTConfig(vocab_size=97, n_layer=3, n_head=2, n_embd=32, block_size=16, dropout=0.1)
BUS = Debug(bus_gb_s=2.0, poison=True)
HOSTS = [*(("optimizer", stage) for stage in range(4)), ("parameters", 3)]


def made(mode="optimizer", stage=2, debug=BUS, dtype=torch.float32, **options):
    model = GPT(CONFIG, seed=0).to(dtype)
    kept = {"bucket_mb": 0.03, "first_bucket_mb": 0.003, **options}
    asked = Parallel.of(zero_stage=stage, offload=mode, **kept)
    parallelize(model, Mesh(device="cpu"), asked, debug=debug if mode else None)
    return model


def adamw(model, **options):
    return AdamW(model.parameters(), lr=1e-2, **{"max_grad_norm": 0.5, **options})


def loss_of(model, step):
    g = torch.Generator().manual_seed(10 * step + engine_of(model).mesh.dp_rank)
    x = torch.randint(0, 97, (2, 17), generator=g)
    return model(x[:, :-1], x[:, 1:])


def steps(model, optimizer, n=3, first=0):
    losses = []
    for step in range(first, first + n):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def final(model, optimizer):
    """Weights and state."""
    state = optimizer.state_dict()["state"]
    values = {f"{i}.{k}": torch.as_tensor(v) for i, s in state.items() for k, v in s.items()}
    return {k: v.clone() for k, v in (model.state_dict() | values).items()}


def held(program, cells=HOSTS, ranks=1, **options):
    """What program(model) returns in every cell has the bits of the run without offload."""

    def run(mode, stage):
        if ranks == 1:  # threads share a generator
            torch.manual_seed(0)
        model = made(mode, stage, **options)
        return program(model if ranks == 1 else model.eval())

    expected = run_ranks(run, ranks, None, 0)
    for cell in cells:
        assert_same(run_ranks(run, ranks, *cell), expected, cell)


def test_an_error_of_the_host_reaches_the_next_forward(monkeypatch):
    model = made()
    optimizer = adamw(model)
    steps(model, optimizer, 1)

    def fails():
        raise OSError("the host has a broken core")

    monkeypatch.setattr(AdamW, "prepare", lambda self, rows, factor: [fails])
    with pytest.raises((OSError, RuntimeError), match="broken core"):
        steps(model, optimizer, 2)


# The run without it; tests/contracts/test_loops.py has more loops
def changes_rates(model):
    """Numbers of a step are those of its step(), also where they are tensors; the average of the
    weights is theirs after each step."""
    optimizer = AdamW(model.parameters(), lr=torch.tensor(1e-2))
    average = AveragedWeights(optimizer, 0.9)
    for step in range(3):
        steps(model, optimizer, 1, step)
        average.update(step)
        optimizer.param_groups[0]["lr"].mul_(0.5)
        optimizer.param_groups[0]["weight_decay"] *= 0.5
    with average.in_the_model():
        return loss_of(model.eval(), 9).item(), final(model, optimizer)


def writes_weights(model):
    """gathered(), while the host steps and again before a step, with gradients that wait."""
    optimizer, found = adamw(model.eval()), []

    def change(factor):
        with engine_of(model).gathered(), torch.no_grad():
            for p in model.parameters():
                found.append(p.clone())
                p.mul_(factor)

    for step in range(3):
        loss_of(model, step).backward()
        change(0.5)
        optimizer.step()
        change(1.5)
        optimizer.zero_grad()
    return found, final(model, optimizer)


def changes_gradients(model):
    """p.grad is the gradient, until step(): torch's clipping, other values, None, GradScaler's."""
    optimizer = adamw(model, max_grad_norm=None)
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


def trains(model, accum=1, **options):
    """With an evaluation after the second of four steps."""
    optimizer, losses, trained = adamw(model, **options), [], model.training
    for step in range(4):
        for i in range(accum):
            losses.append(loss_of(model, 10 * step + i))
            losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            with torch.no_grad():
                losses.append(loss_of(model.eval(), 99))
            model.train(trained)
    return torch.stack(losses).detach(), final(model, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "hosts", "ranks"),
    [
        (changes_rates, HOSTS[1:], 1),
        (changes_gradients, HOSTS[:1], 1),
        (writes_weights, HOSTS[1::2], 1),
        (writes_weights, HOSTS[::2], 2),
    ],
)
def test_what_a_loop_does_has_the_bits_of_the_run_without(program, hosts, ranks):
    held(program, hosts, ranks)


BF16, REMAINDER = {"moment_dtype": torch.bfloat16}, {"master_weights": "remainder"}
FORMATS = {
    "bf16 remainder": (torch.bfloat16, REMAINDER),
    "bf16 remainder, bf16 moments": (torch.bfloat16, {**REMAINDER, **BF16}),
    "bf16 rounded by chance, bf16 moments": (torch.bfloat16, {"stochastic_rounding": True, **BF16}),
    "fp32, 8-bit moments": (torch.float32, {"moment_dtype": torch.uint8}),
    "fp32, amsgrad, capturable": (torch.float32, {"amsgrad": True, "capturable": True}),
}


@pytest.mark.slow
@covering(1, ("ranks", [1, 2]), ("name", FORMATS))
def test_formats_of_the_state(name, ranks):
    """Each format of the optimizer's state, at half of the stages by turns, with clipping."""
    dtype, options = FORMATS[name]
    hosts = HOSTS[([*FORMATS].index(name) + ranks) % 2 :: 2]
    held(functools.partial(trains, **options), hosts, ranks, dtype=dtype, grad_dtype=torch.float32)


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
    assert_same(final(other, again), final(model, optimizer), mode)


# Refusals and memory; those of settings are in test_refusals.py
def test_a_host_that_is_too_small_says_what_would_fit(monkeypatch):
    """Of fp32 weights: these and their gradients cross the bus, and two moments stay."""

    def refused(words, free=None, **options):
        monkeypatch.setattr(host, "free_memory", lambda: free)
        with pytest.raises(ValueError, match=f"parallelize: .*{words}"):
            made(**options)

    sizes = [bucket.spec.numel for bucket in engine_of(made()).buckets]
    needed = 16 * sum(sizes)
    refused("got device=cpu", debug=Debug())
    refused("offload_keep_mb below", needed, offload_keep_mb=1e4)
    words = f"needs {needed / 1e9:.3g} GB of free host memory"
    refused(f"{words}.*offload_keep_mb=1 fits, or use 2 times as many hosts", needed - 1)
    made(offload_keep_mb=0.05)
    refused("GB; use ", 0)
    monkeypatch.setattr(host, "free_memory", lambda: needed)
    made()
    monkeypatch.setattr(SlowBus, "pinned", True)  # by torch, in powers of two
    needed = sum(8 * n + 2 * (1 << (4 * n - 1).bit_length()) for n in sizes)
    refused(f"needs {needed / 1e9:.3g} GB of free host memory", needed - 1)


@pytest.mark.parametrize("kind", [fastpar.Muon, fastpar.Adafactor])
def test_an_optimizer_without_a_host_step_is_refused(kind):
    model = made()
    groups = fastpar.muon_groups(model) if kind is fastpar.Muon else model.parameters()
    with pytest.raises(ValueError, match=f"{kind.__name__}: offload='opt.* needs an optimizer"):
        kind(groups)
    with pytest.raises(ValueError, match="or offload, got zero_stage=0, offload=optimizer; drop"):
        adamw(made("optimizer", 0), zero_grad_in_step=True)


def test_memory_is_pinned_unless_asked_and_a_system_that_refuses_is_told(monkeypatch):
    given, empty = [], torch.empty

    def no_pinned(*args, pin_memory=False, **kwargs):
        if args and kwargs.get("dtype") is not None and pin_memory is None:
            raise RuntimeError("CUDA error: OS call failed or operation not supported on this OS")
        return empty(*args, **kwargs)

    with monkeypatch.context() as context:
        context.setattr(SlowBus, "pinned", None)
        context.setattr(torch, "empty", no_pinned)
        with pytest.raises(RuntimeError, match=r"could not pin .* GB .* offload_pinned=False"):
            made()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory, **k: given.append(pin_memory))
    for options in ({}, {"pinned": False}):
        Bus(torch.device("cpu"), **options).memory(1, torch.float32)
    assert given == [True, False]


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


@pytest.mark.slow
def test_a_process_may_end_while_the_host_steps():
    """Threads in a kernel when Python ends would abort it."""
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


# With the streams of a GPU
@pytest.fixture
def streams(monkeypatch):
    fake_streams.install(monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("accum", [slow(1), 2])
def test_copies_that_come_at_the_last_moment_change_nothing(streams, accum):
    held(functools.partial(trains, accum=accum), grad_accum_steps=accum)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [(StreamHandle, "wait"), (FakeBus, "arrived")])
def test_who_waits_for_no_copy_reads_nan(streams, monkeypatch, kind, name):
    """The order broken once: a forward that waits for no weights, a host for no gradients."""
    monkeypatch.setattr(kind, name, lambda *args: None)
    for cell in HOSTS:
        assert not trains(made(*cell))[0].isfinite().all(), cell
    if kind is StreamHandle:
        assert not all(x.isfinite().all() for x in recomputed(poisoned(FakeBus)(), 1))


@pytest.mark.parametrize("clip", [0.5, None])
@pytest.mark.parametrize(("mode", "stage"), HOSTS)
def test_nothing_changes_while_the_device_may_read_old_weights(streams, mode, stage, clip):
    """An evaluation that was begun before step() and has not run yet."""
    model = made(mode, stage)
    optimizer = adamw(model, max_grad_norm=clip)
    steps(model, optimizer, 1)
    loss_of(model, 1).backward()
    storage = engine_of(model).shards.storage
    for bucket in storage.order:
        storage.send(bucket)
        storage._arrived(bucket)
    before = {bucket: bucket.stepped.clone() for bucket in storage.order}
    with device_is_busy():
        optimizer.step()
        time.sleep(0.05)
        assert all(torch.equal(bucket.stepped, old) for bucket, old in before.items())
    engine_of(model).shards.settle()
    assert not any(torch.equal(bucket.stepped, old) for bucket, old in before.items())


def recomputed(bus, micro_batches):
    """Losses and gradients of a model whose blocks keep their inputs on the host."""
    shape = GPTConfig(n_layer=6, n_head=2, n_embd=128, vocab_size=97, block_size=64, dropout=0.1)
    model, found = recompute(GPT(shape, seed=0), "full", offload=bus), []
    for i in range(3 * micro_batches):
        x = torch.randint(0, 97, (4, 65), generator=torch.Generator().manual_seed(i))
        loss = model(x[:, :-1].contiguous(), x[:, 1:].contiguous(), rng_key=make_key(1, i))
        loss.backward()
        found.append(loss)
    return [*found, *(p.grad for p in model.parameters())]


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [slow(1), 2])
def test_activations(streams, micro_batches):
    found = recomputed(poisoned(FakeBus)(), micro_batches)
    assert_same(found, recomputed(None, micro_batches), micro_batches)
