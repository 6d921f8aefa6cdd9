"""linear_cross_entropy against its oracle: values, gradients, memory, hostile inputs."""

import threading

import pytest
import torch
import torch.nn.functional as F
from cells import sweep
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastpar.kernels import backend, embedding, linear_cross_entropy
from fastpar.kernels.loss.linear_cross_entropy import (
    default_chunk_rows,
    linear_cross_entropy_bwd,
    linear_cross_entropy_fwd,
    release_workspaces,
    scaled,
    workspace,
)
from fastpar.kernels.reference import cross_entropy_ref, embedding_ref, linear_cross_entropy_ref

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
REDUCTIONS = ("mean", "sum", "none")


def eager(x, weight, targets, *, vocab_size=None, **kwargs):
    """The loss of the stored logits, summed in fp32 as the op promises."""
    logits = F.linear(x, weight)[..., :vocab_size].flatten(0, -2)
    if kwargs.get("z_loss"):
        return cross_entropy_ref(logits.float(), targets.flatten(), **kwargs)
    kwargs.pop("z_loss", None)
    return F.cross_entropy(logits.float(), targets.flatten(), **kwargs)


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
    loss.backward(torch.as_tensor(dloss).expand(loss.shape))
    return loss.detach(), x.grad, weight.grad


def test_default_chunk_is_balanced():
    rows = [default_chunk_rows(n, 512, 50304, "cpu") for n in (0, 1, 512, 513, 2048)]
    assert rows == [1, 1, 512, 257, 512]
    rows = [default_chunk_rows(n, 384, 50304, "cpu") for n in (1, 352, 353, 2048)]
    assert rows == [1, 352, 177, 342]


@sweep("c", [768, 1280, 1600])
@sweep("n", [16384, 32768, 65536])
def test_chunk_on_a_gpu_keeps_its_promises(n, c):
    """[Note: chunk size]: at most 15 % of eager's peak, chunks the GEMMs can use."""
    v = 50304
    rows = default_chunk_rows(n, c, v, "cuda")
    assert 2048 <= rows <= 8192
    assert rows % 256 == 0
    assert 2 * rows * v + 4 * v * c + 2 * n * c <= 0.15 * 6 * n * v


def test_chunks_on_a_gpu():
    rows = [default_chunk_rows(n, c, 50304, "cuda") for n in (16384, 32768) for c in (768, 1600)]
    assert rows == [4096, 2816, 8192, 8192]
    assert [default_chunk_rows(n, 768, 50304, "cuda") for n in (0, 3, 2048, 2049)] == [
        1,
        3,
        2048,
        1280,
    ]


@sweep("choice", ["auto", "torch"])
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


@sweep("reduction", REDUCTIONS)
def test_all_targets_ignored(reduction):
    x, weight, targets = make(6, 8, 10)
    loss, dx, dweight = gradients(x, weight, torch.full_like(targets, -100), reduction=reduction)
    want = eager(x, weight, torch.full_like(targets, -100), reduction=reduction)
    assert torch.equal(loss.nan_to_num(7.0), want.detach().nan_to_num(7.0))
    assert not dx.any()
    assert not dweight.any()


@sweep("choice", ["auto", "torch"])
@sweep("size", [1e4, torch.inf])
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


def test_fp16_gradients_of_single_losses_survive():
    """Incoming gradients below fp16's range, one for each row, and a loss scale afterwards."""
    x, weight, targets = make(64, 8, 500, dtype=torch.float16, ignored=False, scale=0.02)
    exact = [t.detach().double().requires_grad_() for t in (x, weight)]
    dloss = torch.rand(64) / 2**26
    losses = linear_cross_entropy_ref(*exact, targets, reduction="none")
    losses.backward(dloss.double() * 2**26)
    _, dx, dweight = gradients(x, weight, targets, dloss * 2**26, reduction="none")
    _, _, small = gradients(x, weight, targets, dloss, reduction="none", weight_grad=None)
    for got, want in ((dx, exact[0].grad), (dweight, exact[1].grad)):
        assert (got.double() - want).norm() / want.norm() < 2.0**-9  # two roundings of fp16
    buffer = torch.zeros(500, 8)
    gradients(x, weight, targets, dloss, reduction="none", weight_grad=buffer)
    want = exact[1].grad / 2**26
    assert (buffer.double() - want).norm() / want.norm() < 2.0**-10  # one, of the logits' gradient
    assert small.abs().max() <= 2.0**-24  # without the buffer fp16 itself ends here


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


@sweep("dtype", DTYPES)
@sweep("reduction", REDUCTIONS)
def test_weight_grad(reduction, dtype):
    """backward adds to the buffer what it would have returned, before rounding, and twice."""
    x, weight, targets = make(63, 17, 127, dtype=dtype)
    _, dx, dweight = gradients(x, weight, targets, 3.0, reduction=reduction, chunk_rows=20)
    buffer = torch.full((127, 17), 7.0)
    for times in (1, 2):
        leaves = [t.detach().requires_grad_() for t in (x, weight)]
        options = {"reduction": reduction, "chunk_rows": 20, "weight_grad": buffer}
        loss = linear_cross_entropy(*leaves, targets, **options)
        before = buffer.clone()
        loss.backward(torch.tensor(3.0).expand(loss.shape))
        assert leaves[1].grad is None
        assert torch.equal(leaves[0].grad, dx)
        rounding = torch.finfo(dtype).eps * dweight.abs().max().item() + 14 * times * 2.0**-23
        torch.testing.assert_close(buffer - before, dweight.float(), rtol=0, atol=rounding)


def test_buffers_of_fp64_get_fp64_sums():
    x, weight, targets = make(63, 17, 127, dtype=torch.float64)
    start = torch.randn(127, 17, dtype=torch.float64)
    buffer = start.clone()
    linear_cross_entropy(x, weight, targets, chunk_rows=7, weight_grad=buffer).backward()
    exact = torch.autograd.grad(linear_cross_entropy_ref(x, weight, targets), weight)[0]
    # some hundred roundings of 2^-53 each
    torch.testing.assert_close(buffer, start + exact, rtol=1e-13, atol=1e-14)
    buffer = start.clone()
    ids = targets.clamp(min=0)[None]
    embedding(ids, weight, wte_grad=buffer).cos().sum().backward()
    exact = torch.autograd.grad(embedding_ref(ids, weight).cos().sum(), weight)[0]
    torch.testing.assert_close(buffer, start + exact, rtol=1e-13, atol=1e-14)


def test_weight_grad_is_left_alone_without_backward():
    x, weight, targets = make(20, 8, 70)
    buffer = torch.ones(70, 8)
    linear_cross_entropy(x, weight, targets, weight_grad=buffer)
    with torch.no_grad():
        linear_cross_entropy(x, weight.detach(), targets, weight_grad=buffer)
    assert torch.equal(buffer, torch.ones(70, 8))


@sweep("reduction", REDUCTIONS)
def test_rows_have_their_own_gradient(reduction):
    """An expanded and a strided incoming gradient, and one that differs from row to row."""
    x, weight, targets = make(24, 16, 100)
    if reduction != "none":
        want = gradients(x, weight, targets, reduction=reduction)
        got = gradients(x, weight, targets, torch.ones(1)[0], reduction=reduction)
    else:
        dloss = torch.randn(24)
        exact = [t.detach().requires_grad_() for t in (x, weight)]
        losses = linear_cross_entropy_ref(*exact, targets, reduction="none")
        losses.backward(dloss)
        want = (losses.detach(), exact[0].grad, exact[1].grad)
        strided = torch.stack([dloss, dloss], 1)[:, 1]
        got = gradients(x, weight, targets, strided, reduction="none", chunk_rows=7)
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


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


@sweep("reduction", ["mean", "none"])
@sweep("choice", ["auto", "torch"])
def test_never_holds_all_logits(choice, reduction, monkeypatch):
    monkeypatch.setattr(backend, "choice", choice)
    x, weight, targets = make(400, 4, 300)
    inputs = (x.detach(), weight.detach(), targets, 300, -100)
    with LargestOutput() as largest:
        linear_cross_entropy_fwd(*inputs, reduction, 0.0, 0.0, 40, True, True, None)
        linear_cross_entropy_bwd(torch.ones(400), *inputs, 0.0, 0.0, 40, True, True)
    assert largest.elements == 40 * 300  # the logits of one chunk, not 400 * 300


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


def test_workspaces_stay_until_they_are_released():
    x = torch.zeros(())
    release_workspaces()
    large = workspace("logits", 64, 1024, x)
    small = workspace("logits", 2, 2, x)
    assert small.untyped_storage().nbytes() == large.untyped_storage().nbytes()
    release_workspaces()
    assert workspace("logits", 2, 2, x).untyped_storage().nbytes() == 16


def test_errors():
    x, weight, targets = make(6, 8, 20)

    def refuses(match, *args, **kwargs):
        with pytest.raises(ValueError, match=match):
            linear_cross_entropy(*args, **kwargs)

    refuses("expected mean, sum or none, got reduction=max", x, weight, targets, reduction="max")
    refuses(r"got x=\[6, 8\] weight=\[20, 7\]", x, weight[:, :7], targets)
    refuses(r"one dtype.* weight=torch.bfloat16", x, weight.bfloat16(), targets)
    refuses(r"one dtype.* x=torch.int32", x.int(), weight.int(), targets)
    refuses(r"int64 targets of shape \[6\], got targets=\[5\]", x, weight, targets[:5])
    refuses(r"got targets=\[6\] torch.int32", x, weight, targets.int())
    refuses("expected vocab_size in 1..20 .* got vocab_size=21", x, weight, targets, vocab_size=21)
    refuses(
        r"expected x and weight on one device.* weight.device=meta", x, weight.to("meta"), targets
    )
    refuses("expected targets on cpu, got targets.device=meta", x, weight, targets.to("meta"))
    refuses(r"expected label_smoothing in \[0, 1\]", x, weight, targets, label_smoothing=-0.1)
    refuses("expected a finite z_loss >= 0", x, weight, targets, z_loss=torch.inf)
    buffer = torch.zeros(20, 8)
    refuses(
        r"expected a torch.float32 weight_grad \[20, 8\]",
        x,
        weight,
        targets,
        weight_grad=buffer[1:],
    )
    refuses(r"weight_grad .*torch.float64", x, weight, targets, weight_grad=buffer.double())
    wide = (x.double(), weight.double().detach().requires_grad_(), targets)
    refuses(r"a torch.float64 weight_grad .*got .*torch.float32", *wide, weight_grad=buffer)
    refuses(r"weight_grad .* on meta", x, weight, targets, weight_grad=buffer.to("meta"))
    refuses("weight.requires_grad=False", x, weight.detach(), targets, weight_grad=buffer)
    refuses("expected chunk_rows >= 1, got chunk_rows=0", x, weight, targets, chunk_rows=0)
    targets[4] = 19
    refuses(
        r"expected targets in \[0, 19\) .* got targets\[4\]=19", x, weight, targets, vocab_size=19
    )
    targets[2] = -1
    refuses(r"got targets\[2\]=-1", x, weight, targets)


def test_gradients_are_scaled_without_a_product_in_fp32_and_keep_their_bits(monkeypatch):
    dweight, by, outs = torch.randn(50, 64), torch.tensor(0.37), []
    multiply = torch.mul

    def watched(*args, out):
        outs.append(out.dtype)
        return multiply(*args, out=out)

    monkeypatch.setattr(torch, "mul", watched)
    found = scaled(dweight, by, torch.bfloat16)
    assert outs == [torch.bfloat16]
    assert torch.equal(found, (dweight * by).to(torch.bfloat16))


def test_the_weights_gradient_is_made_where_it_was_saved_unless_the_graph_is_kept():
    """Two tensors of its size would be alive: 154 MB each at GPT-2's table."""
    x, weight = torch.randn(6, 8), torch.randn(20, 8, requires_grad=True)
    loss = linear_cross_entropy(x, weight, torch.arange(6))
    saved = loss.grad_fn.saved_tensors[1]
    assert saved.shape == weight.shape
    before = saved.clone()
    (kept,) = torch.autograd.grad(loss / 3, weight, retain_graph=True)
    assert torch.equal(saved, before)
    assert torch.equal(kept, before * (torch.ones(()) / 3))
    (again,) = torch.autograd.grad(loss / 3, weight)
    assert torch.equal(again, kept)
    assert again.data_ptr() == saved.data_ptr()
