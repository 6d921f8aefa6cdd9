"""Inputs of recomputed blocks on the host: the same bits, few of them on the device."""

import weakref

import pytest
import torch

from fastpar import GPT, AdamW, GPTConfig
from fastpar.comm.host import SlowBus, bus_of
from fastpar.kernels import make_key
from fastpar.nn.recompute import HostActivations, recompute

CONFIG = GPTConfig(n_layer=6, n_head=2, n_embd=128, vocab_size=97, block_size=64, dropout=0.1)


def train(bus, micro_batches=1):
    model = recompute(GPT(CONFIG, seed=0), "full", offload=bus)
    optimizer, losses = AdamW(model.parameters(), lr=1e-2), []
    for step in range(3):
        g = torch.Generator().manual_seed(step)
        for i in range(micro_batches):
            x = torch.randint(0, 97, (4, 65), generator=g)
            key = make_key(1, 10 * step + i)
            loss = model(x[:, :-1].contiguous(), x[:, 1:].contiguous(), rng_key=key)
            loss.backward()
            losses.append(loss.item())
        grads = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return model, losses, grads


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("gb_s", [0.05, 5.0])
def test_the_bits_of_the_run_without_it(gb_s, micro_batches):
    _, losses, grads = train(None, micro_batches)
    _, found, same = train(SlowBus(gb_s), micro_batches)
    assert found == losses
    assert all(map(torch.equal, same, grads))


def test_few_inputs_are_on_the_device_at_once(monkeypatch):
    """Whenever a block begins its backward: its own, and those that come up for the next one."""
    alive, most = [], []
    up = SlowBus.up

    def seen(self, x, host):
        alive.append(weakref.ref(x))
        most.append(sum(ref() is not None for ref in alive))
        return up(self, x, host)

    monkeypatch.setattr(SlowBus, "up", seen)
    train(SlowBus(5.0))
    n_inputs = 2 * CONFIG.n_layer - 1
    assert len(alive) == 3 * (n_inputs - 1)  # each of a step but the last one, which never leaves
    assert max(most) <= 5


def test_the_host_keeps_its_memory_from_step_to_step():
    bus = SlowBus(5.0)
    made, memory = [], bus.memory
    bus.memory = lambda *given: made.append(given) or memory(*given)
    model, _, _ = train(bus)
    keeper: HostActivations = vars(model.h[0])["forward"].keeper
    one = 4 * 64 * 128 * 4
    assert len(made) == 2 * CONFIG.n_layer - 2
    assert keeper.host_bytes == len(made) * one


def test_a_second_backward_and_a_forward_alone():
    model = recompute(GPT(CONFIG, seed=0), "full", offload=SlowBus(5.0))
    x = torch.randint(0, 97, (4, 65), generator=torch.Generator().manual_seed(0))
    key = make_key(1, 2)
    model(x[:, :-1].contiguous(), x[:, 1:].contiguous(), rng_key=key)  # without a backward
    loss = model(x[:, :-1].contiguous(), x[:, 1:].contiguous(), rng_key=key)
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters()]
    loss.backward()
    assert all(torch.equal(p.grad, 2 * g) for p, g in zip(model.parameters(), first))


def test_what_is_refused():
    with pytest.raises(ValueError, match="expected mode='full' with offload, got mode='selective'"):
        recompute(GPT(CONFIG), "selective", offload=SlowBus(1.0))
    with pytest.raises(ValueError, match="expected a GPU, got device=cpu"):
        bus_of(torch.device("cpu"))
