"""cross_entropy, linear_cross_entropy and the pieces of a vocabulary-parallel loss beyond
test_cases.py: padding, hostile rows, memory, what is written in place, refusals, Triton's tiles."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from cells import slow, sweep
from more_cases import FEW_LOSSES
from test_cases import check

from fastpar import kernels
from fastpar.kernels import backend, reference
from fastpar.kernels.cases import loss_of_logits, shard_of_loss
from fastpar.kernels.loss import TABLE
from fastpar.kernels.loss.linear_cross_entropy import (
    default_chunk_rows,
    linear_cross_entropy_bwd,
    linear_cross_entropy_fwd,
    release_workspaces,
    workspace,
    workspace_bytes,
)
from fastpar.predict.measure import StepMemory

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
REDUCTIONS = ("mean", "sum", "none")
U = 2.0**-24  # one rounding of fp32
EACH = {"how": "both, each", **FEW_LOSSES["both, each"]}

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # interpreted Triton


def targets_of(n, v, ignored=True):
    targets = torch.randint(0, v, (n,))
    targets[: n if ignored else 0 : 5] = -100
    return targets


def of_logits(n, v, device="cpu", *, pad=0, dtype=torch.float32, ignored=True, scale=3.0):
    """(logits, targets)"""
    logits = (torch.randn(n, v + pad) * scale).to(device, dtype)
    return logits.requires_grad_(), targets_of(n, v, ignored).to(device)


def of_products(n, v, *, c=16, pad=0, dtype=torch.float32, ignored=True, scale=0.3):
    """(x, weight, targets)"""
    x, weight = torch.randn(n, c).to(dtype), (torch.randn(v + pad, c) * scale).to(dtype)
    return x.requires_grad_(), weight.requires_grad_(), targets_of(n, v, ignored)


each_loss = sweep("make", [of_logits, of_products])


LOSSES = {  # by the number of inputs
    2: (kernels.cross_entropy, reference.cross_entropy_ref),
    3: (kernels.linear_cross_entropy, reference.linear_cross_entropy_ref),
}


def loss_of(*inputs, oracle=False, **kwargs):
    return LOSSES[len(inputs)][oracle](*inputs, **kwargs)


def gradients(*inputs, dloss=1.0, **kwargs):
    """(loss, dlogits) or (loss, dx, dweight) with the incoming gradient dloss, a number or not."""
    *leaves, targets = inputs
    leaves = [x.detach().requires_grad_() for x in leaves]
    given = [x * 1.0 for x in leaves] if kwargs.get("inplace") else leaves
    loss = loss_of(*given, targets, **kwargs)
    loss.backward(torch.as_tensor(dloss).to(loss).expand(loss.shape))
    return loss.detach(), *(x.grad for x in leaves)


def some(form, values):
    """The last of the values where Triton is interpreted, which costs by its programs."""
    return values[-1:] if kernels.backend.choice == "triton" and form == "cpu" else values


@pytest.mark.parametrize(
    ("pad", "dtype"), [(47, torch.float32), slow(0, torch.bfloat16), slow(47, torch.float16)]
)
def test_gpt2_vocabulary(form, pad, dtype):
    check(loss_of_logits(3, 50257, pad, **EACH), dtype, form)


def test_padding_is_left_out(form):
    """Whatever the padding columns hold; their gradient is exactly 0."""
    logits, targets = of_logits(6, 100, form, pad=28)
    logits = logits.detach()
    options = {"label_smoothing": 0.1, "z_loss": 0.01}
    expected = gradients(logits[:, :100], targets, **options)
    for value in (1e4, -torch.inf, torch.inf, torch.nan):
        logits[:, 100:] = value
        loss, dlogits = gradients(logits, targets, vocab_size=100, **options)
        assert torch.equal(loss, expected[0])
        assert torch.equal(dlogits[:, :100], expected[1])
        assert not dlogits[:, 100:].any()


@each_loss
def test_shapes(make):
    first, *rest, targets = make(24, 50)
    expected = gradients(first, *rest, targets, reduction="none")
    shaped = first.view(2, 3, 4, -1), *rest, targets.view(2, 3, 4)
    for got, want in zip(gradients(*shaped, reduction="none"), expected):
        assert torch.equal(got.reshape(want.shape), want)
    assert loss_of(*shaped, reduction="none").shape == (2, 3, 4)
    assert loss_of(first[1], *rest, targets[1]).shape == ()


@sweep("options", [{}, {"label_smoothing": 1.0, "z_loss": 0.1}])
def test_all_targets_ignored(form, options):
    """A mean over nothing is nan, as torch has it; its gradient is 0."""
    for inputs in (of_logits(3, 10, form), of_products(3, 10))[: 2 if form == "cpu" else 1]:
        *leaves, targets = inputs
        for reduction in REDUCTIONS:
            given = (*leaves, torch.full_like(targets, -100))
            loss, *grads = gradients(*given, reduction=reduction, **options)
            assert loss.isnan().all() == (reduction == "mean")
            assert not loss.nan_to_num(0.0).any()
            assert not any(grad.any() for grad in grads)


@sweep("label_smoothing", [0.0, 0.1])
def test_hostile_logits(form, label_smoothing):
    """-inf has probability 0 and as a target (or smoothed over) an infinite loss, as torch has it;
    1e4; non-finite rows say so, and alone; what an ignored row holds does not matter.

    lse is off by a sum of 300 terms, an exponential and a logarithm, (sqrt(300) + 4) roundings; a
    probability by two such, and by d * exp(-d) < 1 roundings of the distance d that it comes from.
    """
    logits, targets = of_logits(7, 300, ignored=False)
    logits = logits.detach()
    logits[:2, ::3] = -torch.inf
    targets[0], targets[1] = 1, 3
    logits[2] *= 3000
    logits[3, 5] = torch.nan
    logits[4, 5] = torch.inf
    logits[5] = -torch.inf
    logits[6] = torch.nan
    targets[6] = -100
    options = {"reduction": "none", "label_smoothing": label_smoothing}
    leaf = logits.double().requires_grad_()
    want = F.cross_entropy(leaf, targets, **options)
    (expected,) = torch.autograd.grad(want.sum(), leaf)
    loss, dlogits = (
        t.cpu().double() for t in gradients(logits.to(form), targets.to(form), **options)
    )
    torch.testing.assert_close(loss, want.detach(), rtol=4 * U, atol=22 * U, equal_nan=True)
    torch.testing.assert_close(dlogits[:3], expected[:3], rtol=4 * U, atol=45 * U)
    assert dlogits[3:6].isnan().any(1).all()
    assert not dlogits[6].any()


@each_loss
def test_fp16_gradients_survive_a_loss_scale(make):
    """Gradients below fp16's range / 65536 are there once a loss scale is applied; so are those of
    single losses whose incoming gradients are below it."""
    inputs = make(4096, 300, dtype=torch.float16, ignored=False, scale=0.02)
    exact = [x.double() if x.is_floating_point() else x for x in inputs]
    for reduction, dloss in (("mean", 65536.0), ("none", torch.rand(4096))):
        options = {"dloss": dloss, "reduction": reduction}
        _, *want = gradients(*exact, oracle=True, **options)
        for a, b in zip(gradients(*inputs, **options)[1:], want):
            # Of the logits' gradient and of the result, 2^-11 each; of products of the logits, too.
            assert (a.double() - b).norm() / b.norm() < 2.0**-11 * 2 ** (len(inputs) - 1)


@sweep("reduction", REDUCTIONS)
def test_inplace(form, reduction):
    """The same bits, and the gradient lies where the logits were."""
    for dtype in some(form, (torch.float64, *DTYPES)):
        logits, targets = of_logits(6, 70, form, pad=3, dtype=dtype)
        options = {"reduction": reduction, "vocab_size": 70, "label_smoothing": 0.1}
        expected = gradients(logits, targets, dloss=2.0, **options)
        leaf = logits.detach().requires_grad_()
        hidden, seen = leaf * 1.0, []
        loss = kernels.cross_entropy(hidden, targets, inplace=True, **options)
        assert hidden._version > 0
        hidden.register_hook(lambda g, seen=seen: seen.append(g.data_ptr()))
        loss.backward(torch.tensor(2.0).to(loss).expand(loss.shape))
        assert torch.equal(loss, expected[0])
        assert torch.equal(leaf.grad, expected[1])
        assert seen == [hidden.data_ptr()]


def test_inplace_is_noticed_by_whoever_needs_the_logits():
    """Without gradients nothing is written."""
    logits, targets = of_logits(20, 70)
    before = logits.detach().clone()
    with torch.no_grad():
        kernels.cross_entropy(logits, targets, inplace=True)
    kernels.cross_entropy(before, targets, inplace=True)
    assert torch.equal(before, logits)
    kept, overwritten = logits.tanh(), logits * 1.0  # tanh keeps its result for backward
    for hidden in (kept, overwritten):
        loss = kernels.cross_entropy(hidden, targets, inplace=True)
        if hidden is overwritten:
            hidden.detach().zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_gradients_far_beyond_a_softcap_keep_their_digits(form):
    """1 - tanh(u)^2 at u = 6 is 2.5e-5: a difference of fp32 numbers near 1 has 8 bits of it. In
    eps: exp's argument of 12 is rounded once (6), two capped logits of 15 twice (30), some ten
    roundings follow. torch's own tanh has no such derivative."""
    if backend.choice == "torch":
        return
    logits = torch.tensor([[90.0, -90.0, 91.5, 3.0]], device=form).requires_grad_()
    targets = torch.tensor([1], device=form)
    kernels.cross_entropy(logits, targets, softcap=15.0).backward()
    exact = logits.detach().double().requires_grad_()
    capped = 15.0 * torch.tanh(exact / 15.0)
    torch.nn.functional.cross_entropy(capped, targets).backward()
    error = ((logits.grad - exact.grad) / exact.grad).abs()
    assert error.max() <= 64 * torch.finfo(torch.float32).eps, error


@sweep("dtype", [torch.float32, torch.bfloat16])
def test_a_softcap_holds_logits_of_any_size(dtype, form):
    """From 1e-3 to far beyond the cap, where gradients end."""
    scales = torch.tensor([1e-3, 1.0, 100.0, 1e4])[:, None]
    logits = (torch.randn(4, 300) * scales).to(form, dtype).requires_grad_()
    targets = torch.tensor([3, 50, 299, 0], device=form)
    options = {"reduction": "none", "softcap": 15.0}
    losses = kernels.cross_entropy(logits, targets, **options)
    grad = torch.autograd.grad(losses.sum(), logits)[0]
    wide = logits.detach().double().requires_grad_()
    want = reference.cross_entropy_ref(wide, targets, **options)
    exact = torch.autograd.grad(want.sum(), wide)[0]
    # Losses: a few roundings of a logit of at most 15. Gradients: those of one of at most 1, and
    # of the dtype.
    torch.testing.assert_close(losses.detach().double(), want.detach(), rtol=0, atol=1e-5)
    limit = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 2e-6}
    torch.testing.assert_close(grad.double(), exact, **limit)


@each_loss
def test_no_gradient_is_made_where_none_is_needed(make):
    *leaves, targets = make(20, 70)
    given, options = [x.detach() for x in leaves], (targets, 70, -100, "mean", 0.0, 0.0, 0.0)
    if make is of_logits:
        outputs = torch.ops.fastpar.cross_entropy(*given, *options, False)
    else:
        outputs = linear_cross_entropy_fwd(*given, *options, 0, False, False)
    assert [t.numel() for t in outputs] == ([1, 0, 1] if make is of_logits else [1, 0, 0, 1])


@sweep("dtype", DTYPES[:2])
@each_loss
def test_backward_twice_with_retained_graph(make, dtype):
    *leaves, targets = inputs = make(20, 70, dtype=dtype)
    _, *plain = gradients(*inputs)
    for options in ({}, {"inplace": True})[: 2 if make is of_logits else 1]:
        given = [x * 1.0 for x in leaves] if options else leaves
        loss = loss_of(*given, targets, **options)
        first, third, again = (
            torch.autograd.grad(factor * loss, leaves, retain_graph=factor != 2)
            for factor in (1, 3, 2)
        )
        for a, b, c, want in zip(first, third, again, plain):
            assert torch.equal(a, want)
            torch.testing.assert_close(b, 3 * want)
            assert torch.equal(c, 2 * want)


def test_chunks():
    """Balanced; on a GPU of sizes that the GEMMs can use, and at most 15 % of eager's peak: [Note:
    chunk size]."""
    cpu = [default_chunk_rows(n, 512, 50304, "cpu") for n in (0, 1, 512, 513, 2048)]
    gpu = [default_chunk_rows(n, 768, 50304, "cuda") for n in (0, 3, 2048, 2049)]
    assert (cpu, gpu) == ([1, 1, 512, 257, 512], [1, 3, 2048, 1280])
    v = 50304
    for n, c in itertools.product((16384, 32768, 65536), (768, 1280, 1600)):
        rows = default_chunk_rows(n, c, v, "cuda")
        assert 2048 <= rows <= 8192
        assert rows % 256 == 0
        assert 2 * rows * v + 4 * v * c + 2 * n * c <= 0.15 * 6 * n * v


@pytest.mark.parametrize("choice", ["auto", "torch"])
def test_rows_of_padding_and_of_nan(choice, monkeypatch):
    """Whatever finite values the weight's padding rows hold; rows that are not finite say so."""
    monkeypatch.setattr(kernels.backend, "choice", choice)
    x, weight, targets = of_products(30, 100, pad=28)
    expected = gradients(x, weight[:100], targets)
    loss, dx, dweight = gradients(x, weight, targets, vocab_size=100)
    for got, want in zip((loss, dx, dweight[:100]), expected):
        torch.testing.assert_close(got, want)
    assert not dweight[100:].any()
    x = x.detach()
    x[2] = torch.nan
    loss, dx, _ = gradients(x, weight, targets)
    assert loss.isnan()
    assert dx[2].isnan().all()
    assert dx[3:].isfinite().all()


@sweep("reduction", ["mean", "none"])
@sweep("choice", ["auto", "torch"])
def test_never_holds_all_logits(choice, reduction, monkeypatch):
    monkeypatch.setattr(kernels.backend, "choice", choice)
    x, weight, targets = of_products(400, 300, c=4)
    inputs = (x.detach(), weight.detach(), targets, 300, -100)
    with StepMemory(x.device, alive_bytes=0) as memory:
        linear_cross_entropy_fwd(*inputs, reduction, 0.0, 0.0, 0.0, 40, True, True)
        linear_cross_entropy_bwd(torch.ones(400), *inputs, 0.0, 0.0, 0.0, 40, True, True)
    assert 0 < memory.peak_bytes < 4 * 400 * 300 / 2  # logits of chunks of 40 rows


def test_threads_of_one_process_do_not_share_a_workspace():
    cases = [of_products(200, 500) for _ in range(2)]
    expected = [gradients(*case, chunk_rows=16) for case in cases]

    def rank(index):
        found = [gradients(*cases[index], chunk_rows=16) for _ in range(20)]
        return all(torch.equal(a, b) for one in found for a, b in zip(one, expected[index]))

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(rank, range(2)))


def test_workspaces_stay_until_they_are_released():
    release_workspaces()
    for rows, columns in ((64, 1024), (2, 2)):
        assert workspace(rows, columns, torch.zeros(())).shape == (rows, columns)
        assert workspace_bytes() == 4 * 64 * 1024
    release_workspaces()
    assert workspace_bytes() == 0


def test_the_weights_gradient_is_made_where_it_was_saved_unless_the_graph_is_kept():
    """Two tensors of its size would be alive: 154 MB each at GPT-2's table."""
    x, weight = torch.randn(6, 8), torch.randn(20, 8, requires_grad=True)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        loss = kernels.linear_cross_entropy(x, weight, torch.arange(6))
    (saved,) = (t for t in packed if t.shape == weight.shape)
    before = saved.clone()
    (kept,) = torch.autograd.grad(loss / 3, weight, retain_graph=True)
    assert torch.equal(saved, before)
    assert torch.equal(kept, before * (torch.ones(()) / 3))
    (again,) = torch.autograd.grad(loss / 3, weight)
    assert torch.equal(again, kept)
    assert again.data_ptr() == saved.data_ptr()


@sweep(
    ("cuts", "z_loss", "softcap"),
    [((500,), 0.01, 0.0), ((333, 700), 0.0, 2.0), ((1, 999), 0.01, 0.0), ((500,), 0.01, 3.0)],
)
def test_shards_make_the_whole_loss(cuts, z_loss, softcap):
    """Oracles of two and three shards, as the ranks that own the columns between the cuts find
    them, the last with padding. What the kernels find is the oracles': test_cases.py."""
    logits, targets = of_logits(9, 1000, dtype=torch.float64)
    targets[1] = 989
    targets.clamp_(max=989)
    losses, grad = gradients(
        logits, targets, oracle=True, reduction="none", z_loss=z_loss, softcap=softcap,
        vocab_size=990,
    )  # fmt: skip
    owned = [
        (logits.detach()[:, a:b], {"first": a, "vocab_size": 990, "softcap": softcap})
        for a, b in itertools.pairwise([0, *cuts, 1000])
    ]
    parts = [reference.cross_entropy_shard_ref(part, targets, **options) for part, options in owned]
    tops, sums, hits = map(torch.stack, zip(*parts))
    top = tops.amax(0)
    lse = top + (sums * (tops - top).exp()).sum(0).log()
    found = torch.where(targets == -100, 0.0, lse - hits.sum(0) + z_loss * lse**2)
    torch.testing.assert_close(found, losses)
    given = targets, lse, torch.ones((), dtype=torch.float64)
    grads = [
        reference.cross_entropy_shard_grad_ref(part, *given, z_loss=z_loss, **options)
        for part, options in owned
    ]
    torch.testing.assert_close(torch.cat(grads, 1), grad)


def test_a_shard_of_padding(form):
    """Whatever it holds."""
    logits, targets = of_logits(4, 20, form)
    logits, valid = torch.full_like(logits, torch.nan), targets != -100
    options = {"first": 32, "vocab_size": 30}
    top, total, hit = kernels.cross_entropy_shard(logits, targets, **options)
    assert torch.equal(top, torch.where(valid, -torch.inf, 0.0))
    assert torch.equal(total, torch.where(valid, 0.0, 1.0))
    assert not hit.any()
    lse, one = torch.ones(4, device=form), torch.ones((), device=form)
    assert not kernels.cross_entropy_shard_grad(logits, targets, lse, one, **options).any()


def test_hostile_rows_of_a_shard(form):
    """All -inf, nan, 1e4; targets of other shards; ignored rows of anything. Bounds are those of
    test_hostile_logits."""
    logits, _ = of_logits(6, 64)
    logits = logits.detach()
    targets = torch.tensor([3, -100, 70, 2**40, -5, 6])
    logits[0] = -torch.inf
    logits[1] = torch.nan
    logits[2, 5] = torch.nan
    logits[5] = 1e4
    logits[5, 6] = 1e4 - 1
    lse, scale = torch.full((6,), 7.0), torch.tensor(1.0)
    lse[5] = 1e4 + 4
    inputs = [t.to(form) for t in (logits, targets, lse, scale)]
    keep = [0, 1, 3, 4, 5]
    got = kernels.cross_entropy_shard(*inputs[:2])
    for ours, want in zip(got, reference.cross_entropy_shard_ref(logits.double(), targets)):
        torch.testing.assert_close(ours.cpu().double()[keep], want[keep], rtol=22 * U, atol=0)
    assert got[1][2].isnan()
    grad = kernels.cross_entropy_shard_grad(*inputs).cpu().double()
    doubles = (x.double() if x.is_floating_point() else x for x in (logits, targets, lse, scale))
    want = reference.cross_entropy_shard_grad_ref(*doubles)
    torch.testing.assert_close(grad, want, rtol=22 * U, atol=0, equal_nan=True)
    assert not grad[1].any()


@pytest.mark.slow
@sweep(("v", "dtype"), [(1, torch.float32), (63, torch.float16), (300, torch.bfloat16)])
def test_gradient_written_where_the_caller_says(form, v, dtype):
    """Into the logits or rows of a wider workspace, from logits with any strides: the same bits."""
    logits, targets = (t.detach() for t in of_logits(6, v, form, dtype=dtype))
    targets[1], targets[2], targets[3] = v - 1, 0, v + 5
    lse, scale = logits.float().logsumexp(-1), torch.randn(6, 2).to(form)[:, 1]
    options = {"vocab_size": max(1, v - 3), "z_loss": 0.01}
    want = kernels.cross_entropy_shard_grad(logits, targets, lse, scale.contiguous(), **options)
    columns_first = logits.t().clone(memory_format=torch.contiguous_format).t()
    strided = torch.stack([logits, logits], 1)[:, 1]
    wide = torch.full((6, v + 7), torch.nan, dtype=dtype, device=form)
    for x, out in ((columns_first, wide[:, 3 : v + 3]), (strided, logits), (strided, strided)):
        parts = (
            kernels.cross_entropy_shard(x, targets),
            kernels.cross_entropy_shard(x.contiguous(), targets),
        )
        assert all(map(torch.equal, *parts))
        version = out._version
        assert kernels.cross_entropy_shard_grad(x, targets, lse, scale, **options, out=out) is out
        assert out._version > version
        assert torch.equal(out, want)
    assert wide[:, :3].isnan().all()
    assert wide[:, v + 3 :].isnan().all()
    shaped = wide[:, :v].unflatten(0, (2, 3))
    given = columns_first.unflatten(0, (2, 3)), targets.view(2, 3), lse, scale
    kernels.cross_entropy_shard_grad(*given, **options, out=shaped)
    assert torch.equal(shaped.flatten(0, 1), want)


LOGITS = torch.ones(6, 20)
X, W = torch.ones(6, 8), torch.ones(20, 8, requires_grad=True)
TARGETS = torch.zeros(6, dtype=torch.int64)
LSE, BUFFER = torch.ones(6), torch.zeros(20, 8)
OF_TARGETS = [
    (r"expected int64 targets of shape \[6\], got targets=\[5\]", {"targets": TARGETS[:5]}),
    (r"expected int64 .* got targets=\[6\] torch.int32", {"targets": TARGETS.int()}),
    ("expected targets on cpu, got targets.device=meta", {"targets": TARGETS.to("meta")}),
]
OF_LOGITS = [(r"expected logits \[..., V\] .* torch.int32", {"logits": LOGITS.int()})]
OF_LOSSES = [
    ("expected mean, sum or none, got reduction=max", {"reduction": "max"}),
    ("expected vocab_size in 1..20 .* got vocab_size=21", {"vocab_size": 21}),
    ("expected vocab_size in 1..20 .* got vocab_size=0", {"vocab_size": 0}),
    (r"expected label_smoothing in \[0, 1\]", {"label_smoothing": 1.5}),
    ("expected a finite z_loss >= 0, got z_loss=-1.0", {"z_loss": -1.0}),
    ("expected a finite z_loss >= 0, got z_loss=nan", {"z_loss": torch.nan}),
    ("expected a finite softcap >= 0, got softcap=-1.0", {"softcap": -1.0}),
    ("expected a finite softcap >= 0, got softcap=inf", {"softcap": torch.inf}),
    (r"expected targets in \[0, 19\) .* got targets\[0\]=19",
     {"targets": TARGETS + 19, "vocab_size": 19}),
    (r"expected targets .* got targets\[0\]=-1", {"targets": TARGETS - 1}),
]  # fmt: skip
LEAF = LOGITS.clone().requires_grad_()
HIDDEN, IN_PLACE = LEAF * 1.0, {"inplace": True}
WHOLE = [
    (r"expected logits .* got logits=\[\]", {"logits": torch.tensor(1.0)}),
    ("expected logits that were computed .* leaf", {"logits": LEAF, **IN_PLACE}),
    ("expected logits whose rows are evenly spaced",
     {"logits": HIDDEN[:1].expand(6, 20), **IN_PLACE}),
    (r"expected logits whose rows .* strides=\[1, 6\]",
     {"logits": HIDDEN.t().contiguous().t(), **IN_PLACE}),
]  # fmt: skip
PRODUCTS = [
    (r".*got x=\[6, 8\] weight=\[20, 7\]", {"weight": W[:, :7]}),
    (r".*one dtype.* weight=torch.bfloat16", {"weight": W.bfloat16()}),
    (r".*one dtype.* x=torch.int32", {"x": X.int(), "weight": W.int()}),
    (r"expected x and weight on one device.* weight.device=meta", {"weight": W.to("meta")}),
    ("expected chunk_rows >= 1, got chunk_rows=0", {"chunk_rows": 0}),
]  # fmt: skip
OUT = r"expected out like logits \(\[6, 20\], torch.float32, cpu\), got out="
ROWS = "expected out with contiguous, evenly spaced rows"
UNEVEN = {"out": torch.empty(2, 4, 20)[:, :3], "targets": TARGETS.view(2, 3)}
GRAD = [
    (r"expected torch.float32 lse \[6\] .* got lse=\[5\]", {"lse": LSE[:5]}),
    (r"expected torch.float32 lse .* torch.float64", {"lse": LSE.double()}),
    (r"expected torch.float64 lse .* torch.float32", {"logits": LOGITS.double()}),
    (r"expected torch.float32 lse .* scale=\[3\]", {"scale": LSE[:3]}),
    ("expected lse and scale on cpu, .* scale.device=meta", {"scale": LSE.to("meta")}),
    *((OUT, {"out": out}) for out in (LOGITS[1:], LOGITS.half(), LOGITS.to("meta"))),
    (ROWS, {"out": torch.empty(20, 6).t()}),
    (ROWS, {"out": torch.empty(20).expand(6, 20)}),
    (ROWS, {"logits": LOGITS.view(2, 3, 20), **UNEVEN}),
]


def test_what_is_refused():
    given = {"logits": LOGITS, "x": X, "weight": W, "targets": TARGETS, "lse": LSE, "scale": LSE[0]}
    logits, products = ("logits", "targets"), ("x", "weight", "targets")
    shard = [*OF_TARGETS, *OF_LOGITS, ("expected first >= 0, got first=-1", {"first": -1})]
    for op, names, rows in (
        (kernels.cross_entropy, logits, OF_TARGETS + OF_LOGITS + OF_LOSSES + WHOLE),
        (kernels.linear_cross_entropy, products, OF_TARGETS + OF_LOSSES + PRODUCTS),
        (kernels.cross_entropy_shard, logits, shard),
        (kernels.cross_entropy_shard_grad, (*logits, "lse", "scale"), shard + GRAD),
    ):
        for words, changes in rows:
            with pytest.raises(ValueError, match=f"^{op.__name__}: {words}"):
                op(**{name: given[name] for name in names} | changes)


def test_targets_out_of_range_are_safe_in_triton(triton_device):
    """nan and no gradient; memory around the rows stays as it is."""
    from fastpar.kernels.loss import triton

    around = torch.full((7, 64), 7.0, device=triton_device)
    view = around[1:6, 8:48]
    view.copy_(torch.randn(5, 40))
    targets = torch.tensor([3, 40, -1, 2**40, -(2**40)]).to(triton_device)
    one = torch.ones((), device=triton_device)
    losses = triton.cross_entropy_rows(view, targets, view, 40, -100, 0.1, 0.01, 0.0, one)
    assert losses.isnan().tolist() == [False, True, True, True, True]
    assert view[0].any()
    assert not view[1:].any()
    view.fill_(7.0)
    assert torch.equal(around, torch.full_like(around, 7.0))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("v", "pad"),
    [(31, 0), (57, 40), (65, 1), (96, 0), (200, 40), slow(32, 1), slow(64, 0), slow(127, 40)],
)
def test_every_kind_of_tile(triton_device, monkeypatch, v, pad):
    """Heads, unrolled and single tiles, tails, tiles of padding, at every alignment, of 32 lanes:
    of the loss and of both ops of shards."""
    from fastpar.kernels.loss import triton

    if triton_device == "cuda":
        pytest.skip("tiles of 32 lanes are for the interpreter: a GPU runs the shipped ones")
    config = {"U": 2, "W": 32, "num_warps": 1, "maxnreg": 64}
    monkeypatch.setattr(triton, "config", lambda row_bytes, size, how: config)
    for dtype in DTYPES[: 1 + v % 2]:
        check(loss_of_logits(9, v, pad, **EACH), dtype, triton_device)
    for case in shard_of_loss(9, v, v // 2, 0.0, False):
        check(case, dtype, triton_device)


@pytest.mark.parametrize(
    ("v", "how"), [(8193, 0), (32769, 4), slow(8192, 1), slow(8193, 2), slow(50257, 3)]
)
def test_every_configuration(triton_device, v, how):
    """4, 8 and 16 warps in 16 bits, every alternative of the tuning list."""
    from fastpar.kernels.loss import triton

    warps = triton.config(2 * v, 2, TABLE.get(90))["num_warps"]
    assert warps == {8192: 4, 8193: 8, 32769: 16, 50257: 16}[v]
    with TABLE.trying((), TABLE.candidates(90)[how]):
        check(loss_of_logits(2, v, z_loss=0.01), torch.float16, triton_device)
