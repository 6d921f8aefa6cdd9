"""linear_cross_entropy against its oracle: values, gradients, memory, hostile inputs."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastpar.kernels import backend, linear_cross_entropy
from fastpar.kernels.linear_cross_entropy import default_chunk_rows, linear_cross_entropy_fwd
from fastpar.kernels.reference import linear_cross_entropy_ref
from fastpar.testing import assert_matches_oracle

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def eager(x, weight, targets, *, vocab_size=None, ignore_index=-100, reduction="mean"):
    """F.cross_entropy on the stored logits, summed in fp32 as the op promises."""
    logits = F.linear(x, weight)[..., :vocab_size].flatten(0, -2)
    losses = F.cross_entropy(
        logits.float(), targets.flatten(), ignore_index=ignore_index, reduction=reduction
    )
    return losses.float()


def make(n, c, v, *, pad=0, dtype=torch.float32, ignored=True, scale=0.3):
    x = torch.randn(n, c).to(dtype).requires_grad_()
    weight = torch.randn(v + pad, c) * scale
    weight[v:] = 0
    targets = torch.randint(0, v, (n,))
    if ignored:
        targets[::5] = -100
    return x, weight.to(dtype).requires_grad_(), targets


def gradients(x, weight, targets, dloss=1.0, **kwargs):
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    loss = linear_cross_entropy(x, weight, targets, **kwargs)
    loss.backward(torch.tensor(dloss))
    return loss.detach(), x.grad, weight.grad


def check(inputs, **kwargs):
    chunk_rows = kwargs.pop("chunk_rows", None)
    return assert_matches_oracle(
        lambda *a: linear_cross_entropy(*a, chunk_rows=chunk_rows, **kwargs),
        lambda *a: linear_cross_entropy_ref(*a, **kwargs),
        inputs,
        eager=lambda *a: eager(*a, **kwargs),
    )


@pytest.fixture
def poisoned():
    """Memory from torch.empty holds NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("sizes", [(2, 1, 1, 0), (63, 17, 127, 1), (127, 64, 1000, 24)])
def test_matches_oracle(sizes, reduction, dtype):
    n, c, v, pad = sizes
    check(make(n, c, v, pad=pad, dtype=dtype), vocab_size=v, reduction=reduction, chunk_rows=50)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gpt2_vocabulary(dtype):
    check(make(9, 48, 50257, pad=47, dtype=dtype), vocab_size=50257)


def test_torch_tile_matches_oracle(monkeypatch):
    monkeypatch.setattr(backend, "choice", "torch")
    for dtype in DTYPES:
        check(make(63, 17, 127, pad=1, dtype=dtype), vocab_size=127, chunk_rows=20)


def test_default_chunk_is_balanced():
    rows = [default_chunk_rows(n, 512, 50304, "cpu") for n in (0, 1, 512, 513, 2048)]
    assert rows == [1, 1, 512, 257, 512]
    rows = [default_chunk_rows(n, 384, 50304, "cpu") for n in (1, 352, 353, 2048)]
    assert rows == [1, 352, 177, 342]


@pytest.mark.parametrize("choice", ["auto", "torch"])
def test_padding_is_left_out(choice, monkeypatch):
    """Whatever finite values the padding rows hold."""
    monkeypatch.setattr(backend, "choice", choice)
    x, weight, targets = make(30, 16, 100, pad=28)
    expected = gradients(x, weight[:100], targets)
    weight = weight.detach()
    weight[100:] = torch.randn(28, 16)
    loss, dx, dweight = gradients(x, weight, targets, vocab_size=100)
    torch.testing.assert_close(loss, expected[0])
    torch.testing.assert_close(dx, expected[1])
    torch.testing.assert_close(dweight[:100], expected[2])
    assert torch.equal(dweight[100:], torch.zeros(28, 16))


def test_shapes_and_other_ignore_index():
    x, weight, targets = make(24, 16, 100, ignored=False)
    targets[3] = 7
    expected = gradients(x, weight, torch.where(targets == 7, -100, targets))
    got = gradients(x.view(2, 3, 4, 16), weight, targets.view(2, 3, 4), ignore_index=7)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1].view(24, 16), expected[1])
    assert torch.equal(got[2], expected[2])


def test_strided_and_expanded():
    x, weight, targets = make(24, 16, 100)
    expected = gradients(x, weight, targets)
    wide = torch.stack([x.detach(), x.detach()], 2)[:, :, 0]  # stride 2 in the last dimension
    for got, want in zip(gradients(wide, weight.detach().t().contiguous().t(), targets), expected):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7)
    same = gradients(x[:1].expand(24, 16), weight, targets[:1].expand(24))
    assert same[1].shape == (24, 16)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_all_targets_ignored(reduction):
    x, weight, targets = make(6, 8, 10)
    loss, dx, dweight = gradients(x, weight, torch.full_like(targets, -100), reduction=reduction)
    want = eager(x, weight, torch.full_like(targets, -100), reduction=reduction)
    assert torch.equal(loss.nan_to_num(7.0), want.detach().nan_to_num(7.0))
    assert not dx.any()
    assert not dweight.any()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_rows(reduction):
    x, weight, targets = torch.ones(0, 8), torch.ones(10, 8), torch.ones(0, dtype=torch.int64)
    loss, dx, dweight = gradients(x, weight, targets, reduction=reduction)
    want = eager(x, weight, targets, reduction=reduction)
    assert torch.equal(loss.nan_to_num(7.0), want.nan_to_num(7.0))
    assert dx.shape == (0, 8)
    assert torch.equal(dweight, torch.zeros(10, 8))


@pytest.mark.parametrize("choice", ["auto", "torch"])
@pytest.mark.parametrize("size", [1e4, torch.inf])
def test_extreme_logits(size, choice, monkeypatch):
    """A class at -size has probability 0; 1e4 logits neither overflow nor lose the loss."""
    monkeypatch.setattr(backend, "choice", choice)
    weight = torch.randn(70, 1)
    weight[::3] = -size
    if size < torch.inf:
        weight[5] = size
    weight.requires_grad_()
    x, targets = torch.ones(4, 1), torch.tensor([1, 5, 4, 68])
    loss = linear_cross_entropy(x, weight, targets)
    want = eager(x, weight, targets)
    torch.testing.assert_close(loss, want)
    (dweight,) = torch.autograd.grad(loss, weight)
    torch.testing.assert_close(dweight, torch.autograd.grad(want, weight)[0])
    assert torch.equal(dweight[::3], torch.zeros(24, 1))


def test_non_finite_rows_say_so():
    x, weight, targets = make(4, 8, 70, ignored=False)
    x = x.detach()
    x[2] = torch.nan
    loss, dx, _ = gradients(x, weight, targets)
    assert loss.isnan()
    assert dx[2].isnan().all()
    assert dx[[0, 1, 3]].isfinite().all()


def test_fp16_gradients_survive_a_loss_scale():
    """Gradients below fp16's range / 65536 are there once a loss scale is applied."""
    x, weight, targets = make(4096, 8, 500, dtype=torch.float16, ignored=False, scale=0.02)
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    linear_cross_entropy_ref(*exact, targets).backward()
    _, dx, dweight = gradients(x, weight, targets, dloss=65536.0)
    for got, want in ((dx, exact[0].grad), (dweight, exact[1].grad)):
        error = (got.double() / 65536 - want).norm() / want.norm()
        assert error < 2.0**-9  # two roundings of fp16


def test_gradient_of_one_input_only():
    x, weight, targets = make(20, 8, 70)
    _, dx, dweight = gradients(x, weight, targets)
    linear_cross_entropy(x, weight.detach(), targets).backward()
    assert torch.equal(x.grad, dx)
    linear_cross_entropy(x.detach(), weight, targets).backward()
    assert torch.equal(weight.grad, dweight)


def test_no_gradient_work_without_gradients():
    x, weight, targets = make(20, 8, 70)
    outputs = linear_cross_entropy_fwd(
        x.detach(), weight.detach(), targets, 70, -100, "mean", 0.0, 0.0, 0, False, False, None
    )
    assert [t.numel() for t in outputs] == [1, 0, 0, 1]
    with torch.no_grad():
        loss = linear_cross_entropy(x, weight, targets)
    assert not loss.requires_grad
    assert torch.equal(loss, linear_cross_entropy(x, weight, targets))


def test_incoming_gradient_scales_both():
    x, weight, targets = make(20, 8, 70)
    _, dx, dweight = gradients(x, weight, targets)
    _, dx4, dweight4 = gradients(x, weight, targets, dloss=4.0)
    assert torch.equal(dx4, dx * 4)
    assert torch.equal(dweight4, dweight * 4)


def test_backward_twice_with_retained_graph():
    x, weight, targets = make(20, 8, 70)
    loss = linear_cross_entropy(x, weight, targets)
    loss.backward(retain_graph=True)
    first = x.grad.clone()
    loss.backward()
    assert torch.equal(x.grad, 2 * first)


class LargestOutput(TorchDispatchMode):
    """Records the most elements that any torch op returned."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return out


@pytest.mark.parametrize("choice", ["auto", "torch"])
def test_never_holds_all_logits(choice, monkeypatch):
    monkeypatch.setattr(backend, "choice", choice)
    x, weight, targets = make(400, 4, 300)
    with LargestOutput() as largest:
        linear_cross_entropy_fwd(
            x.detach(), weight.detach(), targets, 300, -100, "mean", 0.0, 0.0, 40, True, True, None
        )
    assert largest.elements == 40 * 300  # the logits of one chunk, not 400 * 300


def test_two_runs_have_the_same_bits():
    inputs = make(127, 64, 1000, pad=24)
    for a, b in zip(gradients(*inputs, chunk_rows=50), gradients(*inputs, chunk_rows=50)):
        assert torch.equal(a, b)


def test_threads_of_one_process_do_not_share_a_workspace():
    cases = [make(200, 16, 500) for _ in range(2)]
    expected = [gradients(*case, chunk_rows=16) for case in cases]
    wrong = []

    def rank(index):
        for _ in range(20):
            got = gradients(*cases[index], chunk_rows=16)
            if not all(torch.equal(a, b) for a, b in zip(got, expected[index])):
                wrong.append(index)

    threads = [threading.Thread(target=rank, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_opcheck():
    x, weight, targets = make(6, 8, 20)
    op = torch.ops.fastpar.linear_cross_entropy.default
    torch.library.opcheck(op, (x, weight, targets, 20, -100, "mean", 0.0, 0.0, 4, True, True, None))
    detached = (x.detach(), weight.detach(), targets)
    torch.library.opcheck(
        op, (*detached, 20, -100, "none", 0.1, 0.01, 0, False, False, torch.zeros(20, 8))
    )
    bwd = torch.ops.fastpar.linear_cross_entropy_bwd.default
    for needs in ((True, True), (False, True), (True, False)):
        torch.library.opcheck(bwd, (torch.ones(6), *detached, 20, -100, 0.1, 0.01, 4, *needs))


def test_compiles_without_graph_breaks():
    x, weight, targets = make(30, 16, 100)
    expected = gradients(x, weight, targets, dloss=0.5)
    compiled = torch.compile(
        lambda *a: linear_cross_entropy(*a) * 0.5, fullgraph=True, backend="aot_eager"
    )
    compiled(x, weight, targets).backward()
    torch.testing.assert_close(x.grad, expected[1])
    torch.testing.assert_close(weight.grad, expected[2])


def test_double_backward_is_refused():
    x, weight, targets = make(6, 8, 20)
    with pytest.raises(RuntimeError, match=r"linear_cross_entropy: expected one backward"):
        torch.autograd.grad(linear_cross_entropy(x, weight, targets), x, create_graph=True)


def test_errors():
    x, weight, targets = make(6, 8, 20)

    def refuses(match, *args, **kwargs):
        with pytest.raises(ValueError, match=match):
            linear_cross_entropy(*args, **kwargs)

    refuses("expected mean, sum or none, got reduction=max", x, weight, targets, reduction="max")
    refuses(r"got x=\[6, 8\] weight=\[20, 7\]", x, weight[:, :7], targets)
    refuses(r"one dtype.* weight=torch.bfloat16", x, weight.bfloat16(), targets)
    refuses(r"one dtype.* x=torch.float64", x.double(), weight.double(), targets)
    refuses(r"int64 targets of shape \[6\], got targets=\[5\]", x, weight, targets[:5])
    refuses(r"got targets=\[6\] torch.int32", x, weight, targets.int())
    refuses("expected vocab_size in 1..20 .* got vocab_size=21", x, weight, targets, vocab_size=21)
    refuses("expected chunk_rows >= 1, got chunk_rows=0", x, weight, targets, chunk_rows=0)
    targets[4] = 19
    refuses(
        r"expected targets in \[0, 19\) .* got targets\[4\]=19", x, weight, targets, vocab_size=19
    )
    targets[2] = -1
    refuses(r"got targets\[2\]=-1", x, weight, targets)
