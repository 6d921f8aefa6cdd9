"""sequences.py: what ranks of cp exchange is what one process has, and what is refused."""

import copy
import pickle

import pytest
import torch
from cells import covering
from torch import nn

from fastpar import GPT, AdamW, GPTConfig, Mesh, engine_of, parallelize, pipeline_step
from fastpar.axes.context.sequences import (
    ContextParallel,
    gather_tokens,
    sum_of_parts,
    to_heads,
    to_tokens,
)
from fastpar.comm.transports import TorchCollectives
from fastpar.engine.debug import Debug
from fastpar.kernels import Rng, attention_qkvpacked, make_key
from fastpar.kernels.reference import attention_ref
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks
from fastpar.train.sample import generate

SIZES = {"n_layer": 2, "n_head": 4, "n_embd": 16, "block_size": 13, "vocab_size": 37}


def random(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)  # the default one is shared by threads
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def attended(batch, time, heads, p, dtype):
    """This rank's part of attention over all tokens, and of the gradient, by exchanges."""
    cp = ContextParallel(TorchCollectives())
    whole = random(batch * time, 3, heads, 8, dtype=dtype)
    qkv = whole.chunk(cp.size)[cp.rank].clone().requires_grad_()
    mine = to_heads(qkv, cp).view(batch, time, 3, -1, 8)
    rng = Rng(make_key(5, 3), 2, first_head=cp.first_head(heads))
    o = attention_qkvpacked(mine, causal=True, dropout_p=p, rng=rng)
    o = to_tokens(o.flatten(0, 1)[:, None], heads, cp)[:, 0]
    (
        o * random(batch * time, heads, 8, seed=1, dtype=dtype).chunk(cp.size)[cp.rank]
    ).sum().backward()
    return o.detach(), qkv.grad


@covering(
    2,
    ("ranks", [2, 3, 4]),
    ("heads", [4, 5, 12]),
    ("p", [0.0, 0.3]),
    ("dtype", [torch.float32, torch.bfloat16, torch.float64]),
    ("batch", [1, 2]),
)
def test_attention_has_the_bits_of_one_process(ranks, heads, p, dtype, batch):
    """Forward and backward, its mask among them; heads that the ranks do not divide are padded."""
    time = 12
    qkv = random(batch * time, 3, heads, 8, dtype=dtype).requires_grad_()
    rng = Rng(make_key(5, 3), 2)
    view = qkv.view(batch, time, 3, heads, 8)
    o = attention_qkvpacked(view, causal=True, dropout_p=p, rng=rng).flatten(0, 1)
    (o * random(batch * time, heads, 8, seed=1, dtype=dtype)).sum().backward()
    parts = run_ranks(attended, ranks, batch, time, heads, p, dtype)
    assert torch.equal(torch.cat([part for part, _ in parts]), o)
    assert torch.equal(torch.cat([grad for _, grad in parts]), qkv.grad)


def exchanged():
    cp = ContextParallel(TorchCollectives())
    x = random(2, 3, 5, 4, seed=cp.rank).requires_grad_()
    back = to_tokens(to_heads(x, cp), 5, cp)
    assert torch.equal(back, x)
    back.sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    part = torch.full((), cp.rank + 1.0, requires_grad=True)
    total = sum_of_parts(part, cp)
    total.backward()
    rows = random(2, 3, seed=cp.rank).requires_grad_()
    whole = gather_tokens(rows, 1, cp)
    weights = torch.arange(4.0)[:, None]
    (whole * weights).sum().backward()
    mine = weights[2 * cp.rank :][:2].expand(2, 3)
    return total.item(), part.grad.item(), whole.shape, torch.equal(rows.grad, 2 * mine)


def test_sums_hand_back_what_the_mean_over_cp_divides_by():
    assert run_ranks(exchanged, 2) == [(3.0, 2.0, (4, 3), True)] * 2


def opchecked():
    cp = ContextParallel(TorchCollectives())
    x = random(2, 3, 5, 4).requires_grad_()
    of = torch.ops.fastpar
    torch.library.opcheck(of.cp_to_heads.default, (x, cp.number))
    torch.library.opcheck(of.cp_to_tokens.default, (x, 5, cp.number))
    torch.library.opcheck(of.cp_sum.default, (x, cp.number))
    torch.library.opcheck(of.cp_gather.default, (x, 1, cp.number))


def test_opcheck():
    """On one rank: its checks run ops a number of times that other ranks would not follow."""
    run_ranks(opchecked, 1)


def test_attention_is_the_oracle_s():
    """So that both sides of the comparison above are not wrong alike."""
    qkv = random(12, 3, 4, 8, dtype=torch.float64)
    o = torch.cat([part for part, _ in run_ranks(attended, 2, 1, 12, 4, 0.0, torch.float64)])
    q, k, v = qkv.view(1, 12, 3, 4, 8).unbind(2)
    exact = attention_ref(q, k, v, causal=True)[0]
    assert (o - exact).abs().max() < 1e-12


# The model


def gpt(**changes):
    return GPT(GPTConfig(**{**SIZES, "dropout": 0.0, **changes})).double()


def batch(time=13):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randint(0, 37, (2, 2, time), generator=generator)
    y[0, :7] = -100
    return x, y


def whole_logits(cp, tp):
    model = parallelize(gpt(), Mesh(cp=cp, tp=tp), Parallel.of(sequence_parallel=False))
    logits = model(batch()[0])
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch()[1].flatten()).backward()
    names = {p: n for n, p in model.named_parameters()}
    return logits.detach(), {names[p]: g for p, g in engine_of(model).grads()}


@pytest.mark.parametrize(("cp", "tp"), [(3, 1), (2, 2)])
def test_logits_are_those_of_all_tokens_and_any_loss_of_them_trains(cp, tp):
    model = gpt()
    expected = model(batch()[0])
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), batch()[1].flatten()).backward()
    for logits, grads in run_ranks(whole_logits, cp * tp, cp, tp):
        assert (logits - expected).abs().max() < 1e-12
        for name, p in model.named_parameters():
            assert (grads[name] - p.grad).abs().max() <= 1e-12 * p.grad.abs().max(), name


def means(cp):
    model = parallelize(gpt(), Mesh(cp=cp))
    loss = model(*batch())
    loss.backward()
    names = {p: n for n, p in model.named_parameters()}
    return loss.item(), {names[p]: g for p, g in engine_of(model).grads()}


@pytest.mark.parametrize("cp", [2, 3])
def test_a_mean_is_over_the_targets_of_all_slices(cp):
    """Of which the first slice has fewer."""
    model = gpt()
    expected = model(*batch())
    expected.backward()
    for loss, grads in run_ranks(means, cp, cp):
        assert loss == pytest.approx(expected.item(), rel=1e-12)
        for name, p in model.named_parameters():
            assert (grads[name] - p.grad).abs().max() <= 1e-12 * p.grad.abs().max(), name


def sums(cp, dp, stage):
    """Two steps of losses that are sums; the targets lie in few of the slices."""
    mesh = Mesh(cp=cp, dp=dp)
    model = parallelize(gpt(), mesh, zero_stage=stage)
    optimizer = AdamW(model.parameters(), lr=1e-2, eps=1e-3, max_grad_norm=0.1)
    for _ in range(2):
        x, y = (t.chunk(dp)[mesh.dp_rank] for t in batch())
        engine_of(model).count_tokens(int((y >= 0).sum()))
        loss = model(x, y, reduction="sum")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item(), {n: p.clone() for n, p in model.state_dict().items()}


@pytest.mark.parametrize(("cp", "dp", "stage"), [(2, 2, 3), (3, 1, 1), (4, 1, 0)])
def test_losses_that_are_sums_are_divided_once(cp, dp, stage):
    results = run_ranks(sums, cp * dp, cp, dp, stage)
    [(_, expected)] = run_ranks(sums, 1, 1, 1, 0)
    assert len({loss for loss, _ in results}) == dp
    for _, found in results:
        for name, p in expected.items():
            # the divisor, a mean over ranks, is rounded to fp32 where the ranks are no power of two
            assert (found[name] - p).abs().max() <= 2e-7 * p.abs().max(), name


def drawn_keys(pp):
    """The keys that this rank's layers have got, which nobody gave."""
    model = parallelize(gpt(dropout=0.3), Mesh(cp=2, pp=pp))
    features, seen = model.features, []

    def noted(idx, rng_key=None, *parts, **options):
        seen.append(rng_key.tolist())
        return features(idx, rng_key, *parts, **options)

    model.features = noted
    if pp > 1:
        pipeline_step(model, *batch(), micro_batches=2)
    else:
        model(*batch()).backward()
    return seen


@pytest.mark.parametrize("pp", [1, 2])
def test_keys_that_nobody_gave_are_the_same_on_all_ranks(pp):
    first, *others = run_ranks(drawn_keys, 2 * pp, pp)
    assert len(first) == pp
    assert others == [first] * len(others)


def held():
    model = parallelize(gpt(dropout=0.1), Mesh(cp=2))
    assert copy.deepcopy(model).cp is model.cp
    with pytest.raises(RuntimeError, match=r"got the model itself on rank \d of 2; save model.sta"):
        pickle.dumps(model)
    with pytest.raises(ValueError, match=r"generate: expected .* got one with cp=2; load_hf"):
        generate(model, batch()[0], 1)
    with pytest.raises(ValueError, match="expected 1 <= T <= block_size=13, got T=14; crop the"):
        model(*batch(14))


def test_what_a_model_of_cp_refuses():
    run_ranks(held, 2)


@pytest.mark.parametrize(
    ("model", "mesh", "options", "message"),
    [
        (lambda: nn.Linear(2, 2), {"cp": 2}, {}, r"model with context_parallel\(\) for cp=2, .* got"
         r" Linear; load its weights into a fastpar.GPT .*, or use tp"),
        (lambda: gpt(n_head=1), {"cp": 2}, {}, "cp of at most the 1 heads / tp=1, .*"
         "got cp=2; lower cp, or add cp_method=keys$"),
        (gpt, {"cp": 2}, {"cp_method": "ring"}, "one of heads, keys for cp_method, got cp_method="),
    ],
)  # fmt: skip
def test_bad_input_changes_nothing(model, mesh, options, message):
    def rank():
        made = model()
        with pytest.raises(ValueError, match="parallelize: expected a? ?" + message):
            parallelize(made, Mesh(**mesh), Parallel.of(**options))
        assert getattr(made, "cp", None) is None

    run_ranks(rank, 2)


def other_inputs():
    model = parallelize(gpt(), Mesh(cp=2), debug=Debug(check_inputs=True))
    x, y = batch()
    x[1, 0] = torch.distributed.get_rank()
    with pytest.raises(RuntimeError, match=r"of a cp group, .*'idx' first at index \[1, 0\] on cp"):
        model(x, y)


def test_ranks_with_other_batches_are_told():
    run_ranks(other_inputs, 2)
