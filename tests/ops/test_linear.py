"""linear beyond the cases of kernels/cases.py: both GEMM libraries."""

import itertools
import os
import sys

import pytest
import torch
import torch.nn.functional as F
from cells import sweep

from fastpar.kernels import _C, backend, linear
from fastpar.kernels import choice as choice_module
from fastpar.kernels.linear import add_matmul_, matmul

MODULE = sys.modules["fastpar.kernels.linear"]  # the function hides it
HAS_AMX = _C is not None and _C.isa() == "amx"


def make(n, c, f, dtype=torch.float32):
    shapes = ((n, c), (f, c), (f,))
    return [torch.randn(s).to(dtype).requires_grad_() for s in shapes]


@sweep(("shapes", "words"), [
    (((2, 3), (4, 5)), r"expected x \[..., C\] and weight .* weight=\[4, 5\]"),
    (((2, 3), (4, 3), (3,)), r"expected bias \[F\] .* got bias=\[3\] weight=\[4, 3\]"),
])  # fmt: skip
def test_what_is_refused(shapes, words):
    with pytest.raises(ValueError, match=words):
        linear(*map(torch.ones, shapes))


def wide(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_what_torchs_linear_has_this_has_too():
    """Second derivatives, tangents, vmap, autocast; of any number of dimensions."""
    for given in ((wide(2, 3, 4), wide(5, 4), wide(5)), (wide(4), wide(5, 4), None)):
        assert torch.autograd.gradgradcheck(linear, given)
    x, weight, bias = (t.detach() for t in make(3, 4, 5))
    tangents = tuple(map(torch.randn_like, (x, weight, bias)))
    for got, want in zip(
        torch.func.jvp(linear, (x, weight, bias), tangents),
        torch.func.jvp(F.linear, (x, weight, bias), tangents),
        strict=True,
    ):
        assert torch.equal(got, want)
    rows = torch.randn(6, 3, 4)
    each = torch.func.vmap(linear, (0, None, None))(rows, weight, bias)
    torch.testing.assert_close(each, F.linear(rows, weight, bias))
    leaves = make(3, 4, 5), make(3, 4, 5)
    for a, b in zip(*leaves):
        b.data = a.data.clone()
    for call, given in zip((linear, F.linear), leaves):
        with torch.autocast("cpu", torch.bfloat16):
            y = call(*given)
        assert y.dtype == torch.bfloat16
        y.sum().backward()
    for a, b in zip(*leaves):
        assert a.grad.dtype == torch.float32
        assert torch.equal(a.grad, b.grad)


@sweep("frozen", [(), (0,), (1,), (0, 1), (2,)])
def test_linear_keeps_what_its_gradients_need(frozen):
    given, kept = make(3, 4, 5), []
    for i in frozen:
        given[i].requires_grad_(False)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.data_ptr()) or t, lambda t: t
    ):
        y = linear(*given)
    x, weight, _ = (t.data_ptr() for t in given)
    needed = [weight] * (0 not in frozen) + [x] * (1 not in frozen)
    assert sorted(kept) == sorted(needed)
    y.sum().backward()
    assert [t.grad is None for t in given] == [i in frozen for i in range(3)]


def mkl_promises_bits():
    """On Intel's CPUs with AVX2 at least, if .ci/cpus does not take it away."""
    lowered = os.environ.get("MKL_ENABLE_INSTRUCTIONS") == "SSE4_2"
    return _C is not None and _C.cpu_is_intel() and _C.isa_supported("avx2") and not lowered


def test_mkl_has_the_same_bits_for_any_threads_and_rows():
    """With the setting in fastpar/__init__.py."""
    if backend.has_gemm or not (torch.backends.mkl.is_available() and mkl_promises_bits()):
        pytest.skip("needs an Intel CPU with AVX2 and MKL: other libraries promise less")
    for dtype, (k, n), m in itertools.product(
        (torch.float32, torch.float64),
        ((64, 64), (768, 96), (96, 768), (1000, 33)),
        (2, 3, 16, 100, 257),
    ):
        x, weight = torch.randn(m, k, dtype=dtype), torch.randn(n, k, dtype=dtype)
        whole = matmul(x, weight.t())
        cut = [matmul(rows, weight.t()) for rows in x.split(-(-m // 2))]
        torch.set_num_threads(2)
        threads = matmul(x, weight.t())
        torch.set_num_threads(1)
        assert torch.equal(whole, threads), (dtype, m, k, n)
        assert torch.equal(whole, torch.cat(cut)), (dtype, m, k, n)


FEW_ROWS = tuple(itertools.product((2, 5, 7, 9, 16, 33), (16, 100, 512), (13, 16, 128)))


def at_threads(count, dtype):
    """Products of the sizes FEW_ROWS."""
    random = torch.Generator().manual_seed(0)
    torch.set_num_threads(count)
    with choice_module.ignoring_times():
        return [
            matmul(
                torch.randn(m, k, generator=random, dtype=dtype),
                torch.randn(n, k, generator=random, dtype=dtype).t(),
            )
            for m, k, n in FEW_ROWS
        ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_products_have_the_same_bits_for_any_threads_or_that_is_said(dtype):
    """In deterministic mode, on whatever CPU runs. Intel's MKL and our own products keep it."""
    pairs = zip(FEW_ROWS, at_threads(1, dtype), at_threads(2, dtype), strict=True)
    differ = [size for size, one, two in pairs if not torch.equal(one, two)]
    said = MODULE.depends_on_threads(dtype)
    assert not differ or said, differ
    if mkl_promises_bits() or (backend.has_gemm and dtype == torch.float32):
        assert not said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_deterministic_mode_threads_do_not_decide_whose_a_product_is(monkeypatch, dtype):
    monkeypatch.setattr(MODULE, "has_gemm", True)
    monkeypatch.setattr(MODULE, "has_bf16_gemm", True)
    sizes = [*FEW_ROWS, (64, 768, 768), (512, 96, 384), (512, 768, 0)]

    def ours():
        x, found = torch.ones(1, dtype=dtype), []
        for threads, turned in itertools.product((1, 2), (False, True)):
            torch.set_num_threads(threads)
            found.append([MODULE.use_gemm(x, *size, turned=turned) for size in sizes])
        return found[:2], found[2:]

    usual = ours()
    with choice_module.ignoring_times():
        one, two = ours()
    assert one == two
    if dtype == torch.float32:
        assert one == [[True] * (len(sizes) - 1) + [False]] * 2
    else:
        assert usual[0] != usual[1]  # by speed
        assert one[0][-3:] == one[1][-3:] == [True, True, False]


U = 2.0**-24  # unit roundoff of fp32


def of_a_sum(k):
    """How far a sum of k products of unit normals may be off: sums of j of them are about sqrt(j),
    each is rounded by up to U of it, and the longest order is one chain: a standard deviation of
    U / sqrt(3) * sqrt(k^2 / 2), of which 5 are allowed."""
    return U * 5 / 6**0.5 * k


def gemm(a, b, out, bias=None, accumulate=False, threads=1):
    _C.gemm(a, b, out, accumulate, bias, threads)
    return out


LAYOUTS = {
    "rows": lambda t: t,
    "columns": lambda t: t.t().contiguous().t(),
    "neither": lambda t: torch.stack([t, t], 2)[..., 0],
}


SIZES = [(1, 1, 1), (14, 32, 128), (15, 33, 129), (63, 127, 1000), (257, 5, 16), (3, 600, 47)]
ISA_OF = {torch.float32: "avx512", torch.bfloat16: "amx"}


def needs_isa(dtype):
    if _C is None or not _C.isa_supported(ISA_OF[dtype]) or (dtype.itemsize == 2 and not HAS_AMX):
        pytest.skip(f"needs {ISA_OF[dtype]}: this CPU has none, or FASTPAR_ISA leaves it out")


@sweep("b_layout", LAYOUTS)
@sweep("a_layout", LAYOUTS)
@sweep("sizes", [*SIZES, (40, 70, 2500)])
@pytest.mark.parametrize("dtype", ISA_OF)
def test_gemm_at_its_edges(dtype, sizes, a_layout, b_layout):
    """Within the roundings of a sum of k products, and for a result in bf16 one of that; nothing
    outside the result is touched."""
    needs_isa(dtype)
    m, n, k = sizes
    a, b, bias = (torch.randn(s).to(dtype) for s in ((m, k), (k, n), (n,)))
    exact = a.double() @ b.double()
    operands = (LAYOUTS[a_layout](a), LAYOUTS[b_layout](b))
    ways = [({}, 0.0), ({"accumulate": True}, 0.0), ({"bias": bias}, bias)]
    for to in {torch.float32, dtype}:
        wide = torch.full((m + 1, n + 3), torch.nan, dtype=to)
        out, before = wide[:m, :n], 0.0
        for how, add in ways:
            want = exact + add + (before if how.get("accumulate") else 0.0)
            gemm(*operands, out, **how)
            u = (1 + bool(how)) * torch.finfo(to).eps / 2  # what is added is rounded, too
            assert ((out - want).abs() <= of_a_sum(k) + u * want.abs().max()).all(), how
            before = out.double()
        assert wide[m].isnan().all()
        assert wide[:, n:].isnan().all()


@pytest.mark.parametrize("dtype", ISA_OF)
def test_gemm_has_the_same_bits_for_any_threads_and_cut(dtype):
    needs_isa(dtype)
    a, b = torch.randn(700, 2100).to(dtype), torch.randn(2100, 333).to(dtype)
    first = gemm(a, b, torch.empty(700, 333))
    for threads in (2, 3, 5):
        assert torch.equal(gemm(a, b, torch.empty(700, 333), threads=threads), first)
    assert torch.equal(gemm(a[100:150], b, torch.empty(50, 333)), first[100:150])
    assert torch.equal(gemm(a, b[:, 7:50], torch.empty(700, 43)), first[:, 7:50])
    narrow = gemm(a, b, torch.empty(700, 333, dtype=dtype), threads=2)
    assert torch.equal(narrow, first.to(dtype))


def test_gemm_of_bf16_keeps_what_is_not_finite():
    needs_isa(torch.bfloat16)
    a = torch.ones(64, 512, dtype=torch.bfloat16)
    a[1, 7], a[2, 8], a[3, 9], a[40, 1] = torch.inf, -torch.inf, torch.nan, 3e38
    b = torch.ones(512, 64, dtype=torch.bfloat16)
    b[7, 5] = 0.0
    want = a.float() @ b.float()
    assert want[1, 5].isnan()
    for to in (torch.float32, torch.bfloat16):
        found = gemm(a, b, torch.empty(64, 64, dtype=to))
        torch.testing.assert_close(found, want.to(to), rtol=0, atol=0, equal_nan=True)


@sweep("choice", ["auto", "torch"])
def test_matmul_reads_strides_adds_bias_and_accumulates(choice, monkeypatch):
    monkeypatch.setattr(backend, "choice", choice)
    a, b, bias = torch.randn(150, 100).t(), torch.randn(90, 150).t(), torch.randn(90)
    out, exact = torch.empty(100, 90), a.double() @ b.double()
    for got, want, sums in (
        (matmul(a, b), exact, 1),
        (matmul(a, b, bias=bias, out=out).clone(), exact + bias, 1),
        (add_matmul_(out, a, b), 2 * exact + bias, 2),
    ):  # and the roundings of the result, of the bias and of the addition
        bound = sums * of_a_sum(150) + 3 * U * want.abs().max()
        assert (got - want).abs().max() <= bound
