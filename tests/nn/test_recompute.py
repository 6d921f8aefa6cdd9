"""Recomputed blocks: the same bits with less memory, for our model, transformers' and any other;
their inputs on the host."""

import copy
import functools
import pickle
import weakref
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from cells import slow, sweep
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastpar import GPT, GPTConfig, patch
from fastpar.comm.host import SlowBus, bus_of
from fastpar.kernels import make_key
from fastpar.nn.recompute import HostActivations, Recomputed, recompute

IDS = torch.arange(96).view(2, 48) * 7 % 61


class Block(nn.Module):
    """Inputs and outputs by name, torch's dropout, products and an attention of torch."""

    def __init__(self, width=32):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, state):
        x = state["x"]
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(y.transpose(1, 2).flatten(2))
        return {"x": x + self.drop(self.down(F.gelu(self.up(x)).square()))}


class Nested(nn.Module):
    """A ModuleList of ModuleLists; a block has a list of its own."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(61, 32)
        self.stages = nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(2))
        self.stages[0][0].experts = nn.ModuleList([nn.Linear(32, 32)])

    def forward(self, idx, targets):
        state = {"x": self.wte(idx)}
        for stage in self.stages:
            for block in stage:
                state = block(state)
        logits = state["x"] @ self.wte.weight.t()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt(dtype=torch.float32, dropout=0.1):
    return GPT(GPTConfig(3, 4, 32, block_size=48, vocab_size=61, dropout=dropout)).to(dtype)


def transformers_gpt2(patched=False, cache=False):
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = transformers.GPT2Config(
        n_layer=3, n_head=4, n_embd=32, n_positions=48, vocab_size=61, use_cache=cache
    )
    model = transformers.GPT2LMHeadModel(config).train()
    if patched:
        patch(model)
    return model


MODELS = {
    "ours": gpt,
    "ours bf16": lambda: gpt(torch.bfloat16),
    "transformers": transformers_gpt2,
    "transformers patched": lambda: transformers_gpt2(patched=True),
    "nested": Nested,
}


def loss_of(model):
    torch.manual_seed(3)
    out = model(IDS, labels=IDS) if hasattr(model, "generate") else model(IDS, IDS)
    return out.loss if hasattr(out, "loss") else out


def loss_and_gradients(model):
    model.zero_grad()
    loss = loss_of(model)
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if "exp" not in n}
    return {"loss": loss.detach(), **grads}


same_bits = functools.partial(torch.testing.assert_close, rtol=0, atol=0)


def kept_bytes(model):
    """What a forward leaves allocated, by torch's allocator; the graph is alive meanwhile."""
    loss_of(model)
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        loss = loss_of(model)
    total = sum(event.self_cpu_memory_usage for event in profile.key_averages())
    del loss
    return total


@pytest.mark.parametrize("name", MODELS)
def test_gradients_have_the_same_bits(name):
    model = MODELS[name]()
    expected = loss_and_gradients(model)
    for mode in ("full", "selective", "none"):
        same_bits(loss_and_gradients(recompute(model, mode)), expected)


@pytest.mark.parametrize("name", ["ours", "transformers patched", slow("transformers"), "nested"])
def test_less_is_kept_between_forward_and_backward(name):
    model = MODELS[name]()
    kept = {m: kept_bytes(recompute(model, m)) for m in ("none", "full", "selective")}
    assert kept["full"] < 0.5 * kept["none"]
    assert kept["full"] < kept["selective"] < 0.9 * kept["none"]


class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


TORCHS_ATTENTION = "aten._scaled_dot_product_flash_attention_for_cpu"  # without dropout


@sweep(
    ("build", "kept", "cheap"),
    [
        (gpt, ["fastpar.linear", "fastpar.attention"], "fastpar.activation"),
        (lambda: Nested().eval(), ["aten.addmm", TORCHS_ATTENTION], "aten.gelu"),
    ],
)
def test_selective_runs_only_the_cheap_ops_again(build, kept, cheap):
    model, counts = build(), {}
    for mode in ("none", "full", "selective"):
        loss = loss_of(recompute(model, mode))
        with Count() as count:
            loss.backward()
        counts[mode] = count.calls
    n_blocks = len(recomputed_names(model))
    for op in (f"{name}.default" for name in kept):
        assert counts["full"][op] >= counts["none"][op] + n_blocks
        assert counts["selective"][op] == counts["none"][op]
    assert counts["full"][f"{cheap}.default"] == counts["selective"][f"{cheap}.default"] == n_blocks


def recomputed_names(model):
    return [n for n, m in model.named_modules() if isinstance(vars(m).get("forward"), Recomputed)]


def test_which_blocks():
    model = Nested()
    names = ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]
    assert recomputed_names(recompute(model)) == names
    assert recomputed_names(recompute(model, every=3)) == [names[0], names[3]]
    assert recomputed_names(recompute(model, blocks=[model.stages[1][1]])) == names[3:]
    assert recomputed_names(recompute(model, blocks=nn.Linear, mode="none")) == []
    assert len(recomputed_names(recompute(model, blocks=nn.Linear))) == 3 * 4 + 1
    assert recomputed_names(recompute(model.stages, "selective")) == [n[7:] for n in names]


def test_names_and_an_earlier_forward_of_the_instance_stay():
    model = Nested()
    keys = list(model.state_dict())
    calls = []
    block = model.stages[1][0]

    def mine(state):
        calls.append(1)
        return Block.forward(block, state)

    block.forward = mine
    loss_and_gradients(recompute(model))
    assert list(model.state_dict()) == keys
    assert len(calls) == 2  # forward and recompute
    recompute(recompute(model, "selective"), "none")
    assert block.forward is mine
    assert "forward" not in vars(model.stages[0][0])


@sweep("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_recompute_their_own_blocks(copied):
    model = recompute(gpt(), "selective")
    other = copied(model)
    for block in other.h:
        assert block.forward.block is block
        assert block.forward.mode == "selective"
    expected = loss_and_gradients(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    same_bits(loss_and_gradients(other), expected)


def test_without_gradients_nothing_is_recomputed_and_caches_work():
    model = transformers_gpt2(cache=True).eval()
    expected = model.generate(IDS[:, :4], max_new_tokens=8, do_sample=False)
    recompute(model, "selective")
    assert torch.equal(model.generate(IDS[:, :4], max_new_tokens=8, do_sample=False), expected)
    with torch.no_grad():
        assert model(IDS).past_key_values.get_seq_length() == IDS.shape[1]
    assert model(IDS).past_key_values.get_seq_length() == 0  # withheld: gradients are recorded


@sweep(
    ("call", "message"),
    [
        *((lambda how=how: recompute(Nested(), **how), words) for how, words in (
            ({"mode": "half"}, r"expected a mode of none, full, selective, got mode='half'"),
            ({"every": 0}, r"expected every >= 1, got every=0"),
            ({"blocks": nn.Conv2d}, r"got model=Nested without any module of that class; pass bl"),
            ({"blocks": [nn.Linear(1, 1)]}, r"got blocks\[0\]=Linear, which is not one; take them"),
            ({"mode": "selective", "offload": SlowBus(1.0)},
             "'full' with offload, got mode='selective'"),
        )),
        (lambda: recompute(nn.Linear(2, 2)), r"got model=Linear without an nn\.ModuleList"),
        (lambda: bus_of(torch.device("cpu")), "expected a GPU, got device=cpu"),
    ],
)  # fmt: skip
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# Inputs of recomputed blocks on the host: the same bits, few of them on the device
DEEP = GPTConfig(6, 2, 128, vocab_size=97, block_size=64, dropout=0.1)


def deep_batch(step):
    x = torch.randint(0, 97, (4, 65), generator=torch.Generator().manual_seed(step))
    return x[:, :-1].contiguous(), x[:, 1:].contiguous()


def run(bus, micro_batches):
    """The model, its losses and its gradients."""
    model, losses = recompute(GPT(DEEP, seed=0), "full", offload=bus), []
    for i in range(3 * micro_batches):
        loss = model(*deep_batch(i), rng_key=make_key(1, i))
        loss.backward()
        losses.append(loss)
    return model, [*losses, *(p.grad for p in model.parameters())]


@pytest.mark.slow
@pytest.mark.parametrize(("gb_s", "micro_batches"), [(0.05, 2), slow(5.0, 1)])
def test_the_bits_of_the_run_without_a_host(gb_s, micro_batches, monkeypatch):
    """Whenever a block begins its backward its own input is on the device, and those that come up
    for the next one; the host keeps its memory from step to step."""
    alive, most, made = [], [], []
    bus, up = SlowBus(gb_s), SlowBus.up
    memory = bus.memory

    def seen(self, x, host):
        alive.append(weakref.ref(x))
        most.append(sum(ref() is not None for ref in alive))
        return up(self, x, host)

    bus.memory = lambda *given: made.append(given) or memory(*given)
    monkeypatch.setattr(SlowBus, "up", seen)
    model, found = run(bus, micro_batches)
    assert all(map(torch.equal, found, run(None, micro_batches)[1]))
    n_inputs = 2 * DEEP.n_layer - 1
    # Each of a step but the last one, which never leaves
    assert len(alive) == 3 * micro_batches * (n_inputs - 1)
    assert max(most) <= 5
    keeper: HostActivations = vars(model.h[0])["forward"].keeper
    assert len(made) == n_inputs - 1
    assert keeper.host_bytes == len(made) * 4 * 64 * 128 * 4


@pytest.mark.parametrize("offload", [None, SlowBus(5.0)], ids=["device", "host"])
def test_a_second_backward_and_a_forward_alone(offload):
    model = recompute(GPT(DEEP, seed=0), "full", offload=offload)
    batch, key = deep_batch(0), make_key(1, 2)
    model(*batch, rng_key=key)  # without a backward
    loss = model(*batch, rng_key=key)
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in model.parameters()]
    loss.backward()
    assert all(torch.equal(p.grad, 2 * g) for p, g in zip(model.parameters(), first))
