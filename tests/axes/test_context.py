"""Context parallelism: what ranks exchange or gather is what one process has, and each rank has as
much to do. tests/contracts/test_same_run.py has whole runs."""

import copy
import math
import pickle

import pytest
import torch
from cells import covering, sweep
from torch import nn

from fastpar import GPT, GPTConfig, Mesh, parallelize, pipeline_step
from fastpar.axes.context import keys
from fastpar.axes.context.keys import attend_keys, calls_of, planned
from fastpar.axes.context.sequences import ContextParallel, to_heads, to_tokens
from fastpar.comm.transports import TorchCollectives
from fastpar.kernels import Rng, attention_qkvpacked, make_key
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks
from fastpar.train.sample import generate

SIZES = {"n_layer": 2, "n_head": 4, "n_embd": 16, "block_size": 13, "vocab_size": 37}
RNG = Rng(make_key(5, 3), 2)
BATCH, TIME = 2, 24
# Of 2 rows of 24 tokens: documents that begin at, before and inside of a rank's runs of tokens, end
# with a row, and have one token.
BOUNDS = (0, 3, 4, 9, 18, 24, 25, 30, 48)


def random(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)  # the default one is shared by threads
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def by_heads(cp, qkv, heads, p, documents):
    """This rank's part of attention, by exchanges."""
    mine = to_heads(qkv, cp).view(BATCH, TIME, 3, -1, 8)
    rng = Rng(make_key(5, 3), 2, first_head=cp.first_head(heads))
    o = attention_qkvpacked(mine, causal=True, dropout_p=p, rng=rng)
    return to_tokens(o.flatten(0, 1)[:, None], heads, cp)[:, 0]


def by_keys(cp, qkv, heads, p, documents):
    return attend_keys(qkv, BATCH, cp, dropout_p=p, rng=RNG, documents=documents)


def attended(method, heads, p, dtype, documents):
    """All tokens' attention and gradient, of which each rank has computed its part."""
    cp = ContextParallel(TorchCollectives(), method)
    qkv = cp.of_ranks(random(BATCH, TIME, 3, heads, 8, dtype=dtype))[cp.rank].clone()
    qkv.requires_grad_()
    o = {"heads": by_heads, "keys": by_keys}[method](cp, qkv, heads, p, documents)
    o.backward(cp.of_ranks(random(BATCH, TIME, heads, 8, seed=1, dtype=dtype))[cp.rank])
    return tuple(
        cp.in_order(cp.group.gathered(x), BATCH).unflatten(0, (BATCH, TIME))
        for x in (o.detach(), qkv.grad)
    )


@covering(
    2, (("method", "packed"), [("heads", False), ("keys", False), ("keys", True)]),
    ("ranks", [1, 2, 3, 4]), ("heads", [2, 5, 12]), ("p", [0.0, 0.3]),
    ("dtype", [torch.float32, torch.bfloat16, torch.float64]),
)  # fmt: skip
def test_attention_has_the_bits_of_one_process(method, packed, ranks, heads, p, dtype):
    """Heads that the ranks do not divide are padded. By keys dk and dv are sums over ranks, there
    may be more ranks than heads, and in fp64 torch's products round with their sizes."""
    documents = torch.tensor(BOUNDS, dtype=torch.int32) if packed else None
    qkv = random(BATCH, TIME, 3, heads, 8, dtype=dtype).requires_grad_()
    given = qkv.flatten(0, 1) if packed else qkv
    o = attention_qkvpacked(given, causal=True, dropout_p=p, rng=RNG, cu_seqlens=documents)
    o = o.view(BATCH, TIME, heads, 8)
    o.backward(random(BATCH, TIME, heads, 8, seed=1, dtype=dtype))
    for found, grad in run_ranks(attended, ranks, method, heads, p, dtype, documents):
        if method == "keys" and dtype == torch.float64:
            assert (found - o).abs().max() < 1e-13
            assert (grad - qkv.grad).abs().max() < 1e-13
            continue
        assert torch.equal(found, o)
        exact = 3 if method == "heads" else 1
        assert torch.equal(grad[:, :, :exact], qkv.grad[:, :, :exact])
        # A sum of 24 products in parts, each rounded once where it is sent and once where added.
        bound = (2 * ranks + 2) * torch.finfo(dtype).eps * qkv.grad.abs().max()
        assert (grad - qkv.grad).abs().max() <= bound


def test_documents_are_read_once_a_batch(monkeypatch):
    """On a GPU the host waits for them, and what follows from them is copied there; documents that
    are written are read again."""
    read = []
    monkeypatch.setattr(keys, "calls_of", lambda *args: read.append(args) or calls_of(*args))

    def layers(documents):
        cp = ContextParallel(TorchCollectives(), "keys")
        qkv = cp.of_ranks(random(BATCH, TIME, 3, 2, 8))[cp.rank].requires_grad_()
        for _ in range(3):
            qkv = qkv + by_keys(cp, qkv, 2, 0.3, documents)[:, None]
        qkv.sum().backward()

    for batch in (1, 2):
        run_ranks(layers, 1, torch.tensor(BOUNDS, dtype=torch.int32))
        assert len(read) == batch
    documents = torch.tensor(BOUNDS, dtype=torch.int32)
    first = [one.call for one in planned(Place(0, 2), BATCH, TIME, documents)]
    documents[1] += 1
    again = [one.call for one in planned(Place(0, 2), BATCH, TIME, documents)]
    assert again != first
    assert again == list(calls_of(Place(0, 2), BATCH, TIME, documents.tolist()))
    with torch.inference_mode():
        assert planned(Place(0, 2), BATCH, TIME, documents.clone())


class Place(ContextParallel):
    """A rank of so many, which sends nothing."""

    def __init__(self, rank, size, method="keys"):
        super().__init__(type("Group", (), {"rank": rank, "world_size": size}), method)


def test_work_by_the_tiles_of_the_cpu_s_kernel():
    """Of 8 queries and 32 keys; contiguous slices would have 1.75 of the mean."""
    counts = [
        sum(
            math.ceil(min(first + 8, call.keys.stop) / 32)
            for call in calls_of(Place(rank, 4), 1, 4096, None)
            for first in range(call.first_row, call.keys.stop, 8)
        )
        for rank in range(4)
    ]
    assert max(counts) <= 1.001 * sum(counts) / 4


def opchecked():
    heads, of = ContextParallel(TorchCollectives()), torch.ops.fastpar
    x = random(2, 3, 5, 4).requires_grad_()
    for op, more in ((of.cp_to_heads, ()), (of.cp_to_tokens, (5,)), (of.cp_sum, ())):
        torch.library.opcheck(op.default, (x, *more, heads.number))
    torch.library.opcheck(of.cp_gather.default, (x, 1, heads.number))
    cp = ContextParallel(TorchCollectives(), "keys")
    x, key = random(8, 3, 2, 4).requires_grad_(), make_key(1, 2)
    bounds = torch.tensor([0, 3, 4, 8], dtype=torch.int32)
    for p, given, documents in ((None, (0, 0), bounds), (key, (3 << 16, 26), None)):
        args = (x, 2, 0.5, p, *given, documents, cp.number)
        torch.library.opcheck(of.cp_attend_keys.default, args)


@pytest.mark.slow
def test_opcheck():
    """On one rank: its checks run ops a number of times that other ranks would not follow."""
    run_ranks(opchecked, 1, timeout_s=300)


def gpt(**changes):
    return GPT(GPTConfig(**{**SIZES, "dropout": 0.0, **changes})).double()


def batch(time=13):
    """Tokens and targets."""
    return torch.randint(0, 37, (2, 2, time), generator=torch.Generator().manual_seed(0))


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


def test_what_a_model_of_cp_refuses():
    def rank():
        model = parallelize(gpt(dropout=0.1), Mesh(cp=2))
        assert copy.deepcopy(model).cp is model.cp
        x, _ = batch()
        for kind, message, call in (
            (RuntimeError, r"itself on rank \d of 2; save", lambda: pickle.dumps(model)),
            (ValueError, "got one with cp=2; load it", lambda: generate(model, x, 1)),
            (ValueError, "<= block_size=13, got T=14; crop the", lambda: model(*batch(14))),
        ):
            with pytest.raises(kind, match=message):
                call()

    run_ranks(rank, 2)


BAD = [
    (lambda: nn.Linear(2, 2), {}, r"a model with context_parallel\(\) for cp=2, .* got Linear; load"
     r" its weights into a fastpar.GPT .*, or use tp"),
    (gpt, {"cp_method": "ring"}, "one of heads, keys for cp_method, got cp_method="),
]  # fmt: skip


@sweep(("model", "options", "message"), BAD)
def test_bad_input_changes_nothing(model, options, message):
    def rank():
        made = model()
        with pytest.raises(ValueError, match="parallelize: expected " + message):
            parallelize(made, Mesh(cp=2), Parallel.of(**options))
        assert getattr(made, "cp", None) is None

    run_ranks(rank, 2)
