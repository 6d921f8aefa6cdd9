"""Experts: what is recomputed, ties, numbers that are not finite, what is counted, refusals.

tests/contracts/test_same_run.py has whole runs against a dense fp64 oracle.
"""

import pytest
import torch
from cells import sweep
from dense_experts import step
from test_recompute import Count

import fastpar
from fastpar.axes.experts.balance import Losses
from fastpar.models.gpt import GPT
from fastpar.nn.recompute import recompute
from fastpar.settings.model import GPTConfig
from fastpar.testing import run_ranks

V, T = 41, 8
BASE = {
    "n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": T, "vocab_size": V, "dropout": 0.0,
    "n_expert": 4, "top_k": 2, "balance_loss": 0.5, "router_z_loss": 0.02,
}  # fmt: skip


def make(**changes):
    config = GPTConfig(**{**BASE, **changes})
    model = GPT(config, seed=3).double()
    for name, p in model.named_parameters():  # differing logits
        if "router" in name:
            p.data *= 20
    return model, config


def batches(steps, micro):
    generator = torch.Generator().manual_seed(5)

    def one():
        idx = torch.randint(0, V, (3, T), generator=generator)
        targets = torch.randint(0, V, (3, T), generator=generator)
        targets[0, :3] = -100
        return idx, targets

    return [[one() for _ in range(micro)] for _ in range(steps)]


def managed(**changes):
    model, config = make(**changes)
    return fastpar.parallelize(model, fastpar.Mesh()), config


def ops_in_backward(mode):
    model, config = make()
    model = recompute(fastpar.parallelize(model, fastpar.Mesh(ep=2)), mode)
    loss = model(*batches(1, 1)[0][0])
    with Count() as count:
        loss.backward()
    names = ("grouped_linear", "grouped_linear_bwd", "ep_counts", "ep_exchange")
    return [count.calls[f"fastpar.{name}.default"] // config.n_layer for name in names]


@pytest.mark.slow
def test_selective_recomputation_neither_multiplies_nor_sends_again():
    """A layer has two products, and in backward two exchanges of its own."""
    for mode in ("none", "selective"):
        assert run_ranks(ops_in_backward, 2, mode) == [[0, 2, 0, 2]] * 2
    assert run_ranks(ops_in_backward, 2, "full") == [[2, 2, 1, 4]] * 2


def alike(model, row, value):
    """Every token has the same logits, of which one is set."""
    with torch.no_grad():
        for block in model.h:
            block.ln_2.weight.zero_()
            block.ln_2.bias.fill_(1.0)
            block.mlp.router.weight.zero_()
            block.mlp.router.weight[row] = value


@sweep(("top_k", "value", "counts"), [(1, 0.5, [0, 0, 48, 0]), (2, 0.0, [48, 48, 0, 0])])
def test_all_tokens_on_one_and_equal_logits_on_the_lower_numbers(top_k, value, counts):
    model, config = managed(top_k=top_k)
    alike(model, 2, value)
    weights = {n: p.clone() for n, p in model.state_dict().items()}
    [data] = batches(1, 2)
    _, expected, *_ = step(weights, config, data)
    for idx, targets in data:
        model(idx, targets, reduction="sum").backward()
    tokens = sum(int((y != -100).sum()) for _, y in data)
    for name, p in model.named_parameters():
        assert (p.grad / tokens - expected[name]).abs().max() <= 1e-12, name
    fastpar.AdamW(model.parameters()).step()
    assert model.experts.last[:, :4].tolist() == [counts] * 2
    assert model.h[0].mlp.router.load.tolist() == weights["h.0.mlp.router.load"].tolist() == counts


@sweep("value", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_show_in_loss_and_norm(value):
    model, _ = managed()
    with torch.no_grad():
        model.h[1].mlp.router.weight[1, 0] = value
    opt = fastpar.AdamW(model.parameters(), max_grad_norm=1.0)
    loss = model(*batches(1, 1)[0][0])
    loss.backward()
    opt.step()
    assert not loss.isfinite()
    assert not opt.grad_norm.isfinite()


def test_evaluations_and_dropped_steps_are_not_counted():
    model, config = managed()
    opt = fastpar.AdamW(model.parameters())
    idx, targets = batches(1, 1)[0][0]
    with torch.no_grad():
        model(idx, targets)
    model.eval()
    model(idx, targets).backward()
    assert not model.experts.take(torch.device("cpu")).any()
    model.train()
    for _ in range(2):
        opt.zero_grad()
        model(idx, targets).backward()
    opt.step()
    assert model.experts.last[:, :4].sum() == 2 * idx.numel() * config.top_k


def test_the_bias_goes_towards_balance():
    """An expert that everybody likes is passed on to the others after some steps."""
    no_losses = {"balance_loss": 0.0, "router_z_loss": 0.0, "balance_rate": 0.5}
    model, _ = managed(n_layer=1, top_k=1, **no_losses)
    alike(model, 0, 1 / 16)
    opt, served = fastpar.AdamW(model.parameters(), lr=0.0), set()
    for _ in range(4):
        model(*batches(1, 1)[0][0]).backward()
        opt.step()
        opt.zero_grad()
        served |= {int(model.experts.last[0, :4].argmax())}
    assert len(served) > 1


def test_buffers_in_16_bits_and_flops_of_active_experts():
    model = GPT(GPTConfig(**BASE)).bfloat16()
    model.h[0].mlp.router.steps += 1001
    assert model.bfloat16().h[0].mlp.router.steps[0] == 1001
    dense = GPT(GPTConfig(**{**BASE, "n_expert": 0}))
    sparse, config = make(expert_hidden=32)  # two experts of half the width
    router = config.n_layer * (config.n_expert * config.n_embd + config.n_embd)  # and one bias more
    assert sparse.flops_per_token() == dense.flops_per_token() + 6 * router


BAD = {
    "n_expert": (-1, "an integer n_expert >= 0, got n_expert=-1; set n_expert >= 0"),
    "expert_every": (3, "expert_every <= n_layer=2, got expert_every=3"),
    "expert_hidden": (0, "an integer expert_hidden >= 1, got expert_hidden=0"),
    "balance_loss": (-1.0, "balance_loss >= 0, got balance_loss=-1.0; 0: off"),
}


def test_what_is_refused():
    for name, (value, message) in BAD.items():
        with pytest.raises(ValueError, match=f"GPTConfig: expected {message}"):
            GPTConfig(**{**BASE, name: value})
    # Training needs somebody who sums the counts.
    idx = torch.zeros(1, T, dtype=torch.int64)
    message = r"experts needs fastpar\.parallelize, .* balance_loss=0.5"
    with pytest.raises(ValueError, match=message):
        make()[0](idx, idx)
    model, _ = make(balance_loss=0.0, router_z_loss=0.0)
    model(idx, idx).backward()
    assert isinstance(model.experts, Losses)
