"""One mask, everywhere: against the published generator, between implementations, for any cut; a
rank that holds some heads, or some rows, draws their part of the mask that one process draws.
Statistical tests draw from fixed seeds, so they are either always green or always red. Bounds are
stated as the chance that a correct generator would fail one of them for a random seed.
"""

import itertools
import math

import pytest
import torch
from cells import slow, sweep

from fastpar.kernels import (
    _C,
    Rng,
    attention,
    attention_qkvpacked,
    backend,
    draw_key,
    dropout,
    embedding,
    keep_mask,
    make_key,
    quantize_p,
    residual_layer_norm,
    residual_rms_norm,
)
from fastpar.kernels.attention import BITS, Mask
from fastpar.kernels.philox import philox_4x32
from fastpar.kernels.reference import keep_mask_ref, philox_ref

# Known answers of Philox4x32-10, from the Random123 library's own test.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]  # fmt: skip
SHAPES = [(3, 5), (2, 7, 33), (1, 2, 3, 16), (2, 3, 2, 5, 63), (1, 1, 1, 1), (2, 2, 1000),
          (2, 70, 48)]  # fmt: skip
BACKENDS = ["torch", "triton", "baseline", "avx2", "avx512"]


@pytest.fixture(params=BACKENDS)
def device(request, monkeypatch):
    """torch ops, Triton's kernels, or the compiled one on each instruction set of this machine."""
    if request.param in ("torch", "triton"):
        monkeypatch.setattr(backend, "choice", "torch")
        yield request.getfixturevalue("triton_device") if request.param == "triton" else "cpu"
        return
    if not _C.isa_supported(request.param):
        pytest.skip(f"this machine has no {request.param}")
    before = _C.isa()
    _C.set_isa(request.param)
    yield "cpu"
    _C.set_isa(before)


def rng(seed=1, first_sample=0, site=0):
    return Rng(make_key(seed, first_sample), site)


@sweep(("counter", "key", "expected"), KNOWN)
def test_philox_gives_the_published_words(counter, key, expected):
    assert philox_ref(counter, key) == expected
    words = philox_4x32([torch.tensor(c) for c in counter], [torch.tensor(k) for k in key])
    assert tuple(int(w) for w in words) == expected


@sweep("shape", SHAPES)
def test_mask_equals_the_oracle(device, shape):
    # Seed and sample beyond 32 bits, the sample crossing 2**33 within the batch.
    for r in (rng(5, 3, 9), rng(2**62 + 12345, 2**33 - 1, 2**15 - 1)):
        got = keep_mask(r, 0.3, shape, device=device)
        assert got.dtype == torch.bool
        assert torch.equal(got.cpu(), keep_mask_ref(r, 0.3, shape))
    if len(shape) == 4:
        heads = r._replace(first_head=1)
        mask = keep_mask_ref(r, 0.3, (shape[0], shape[1] + 1, *shape[2:]))[:, 1:]
        assert torch.equal(keep_mask(heads, 0.3, shape, device=device).cpu(), mask)
        assert torch.equal(dropout(torch.ones(shape, device=device), 0.3, heads).cpu() != 0, mask)


@pytest.mark.slow
@sweep("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@sweep("shape", SHAPES)
def test_dropout_is_the_mask_times_the_scale(device, shape, dtype):
    if backend.choice == "triton" and dtype == torch.float64:
        return  # torch's
    x, r = torch.randn(shape).to(dtype), rng(7, 11, 3)
    x[x > 1], x[x < -1] = math.inf, math.nan  # are dropped like others
    y = dropout(x.to(device), 0.3, r)
    assert y.dtype == dtype
    expected = torch.where(keep_mask_ref(r, 0.3, shape), x, 0.0) * (256 / (256 - 77))
    assert torch.equal(y.cpu().nan_to_num(7), expected.nan_to_num(7))


def test_masks_are_independent():
    """Rates of keeping, and agreement of masks that differ in one coordinate: |z| < 6 for each.

    A correct generator fails once in 2e7 seeds. (n = 2^18, p = 1/2: independent bits agree half of
    the time.)
    """
    for p in (1 / 256, 0.1, 0.5, 0.9, 255 / 256):
        n, q = 1 << 20, 1 - quantize_p(p) / 256
        kept = keep_mask(rng(123), p, (4, 512, 512)).sum().item()
        assert abs(kept - n * q) < 6 * math.sqrt(n * q * (1 - q)), p

    def drawn(*at):
        return keep_mask(rng(*at), 0.5, (4, 4, 128, 128))

    base = drawn(17, 40, 6)
    others = [  # another site, seed or sample, near and in the high bits
        *((17, 40, 7), (17, 40, 6 + 2**14), (18, 40, 6), (17 + 2**32, 40, 6)),
        *((17, 41, 6), (17, 40 + 2**32, 6)),
    ]
    agree = {at: base == drawn(*at) for at in others}
    # A head, rows, and columns of the same word, the next word and the next call of Philox.
    for dim, step in ((1, 1), (2, 1), (2, 64), (3, 1), (3, 4), (3, 16)):
        n = base.shape[dim] - step
        agree[dim, step] = base.narrow(dim, step, n) == base.narrow(dim, 0, n)
    upper = torch.ones(128, 128, dtype=torch.bool).triu(1)
    agree["row and column"] = (base == base.mT)[..., upper]
    agree["head and sample"] = (base == base.transpose(0, 1))[upper[:4, :4]]
    for name, same in agree.items():
        z = (same.sum().item() - same.numel() / 2) / (math.sqrt(same.numel()) / 2)
        assert abs(z) < 6, (name, z)


def test_backward_draws_the_same_mask(device):
    """Also of strided and expanded gradients, with a key on either device; and twice."""
    x, r = torch.randn(2, 3, 50, device=device, requires_grad=True), rng(3, 4, 5)
    for key in (r.key, r.key.to(device))[: 1 if device == "cpu" else 2]:
        y = dropout(x, 0.3, r._replace(key=key))
        for dy in (torch.randn(2, 50, 3).mT, torch.randn(50).expand(2, 3, 50), torch.ones(2, 3, 1)):
            dy = dy.to(device).expand(2, 3, 50)
            (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
            assert torch.equal(dx, dropout(dy.contiguous(), 0.3, r))
    if backend.choice != "triton":  # fp64 is of the other two
        x = torch.randn(2, 3, 7, dtype=torch.float64, requires_grad=True)
        torch.autograd.gradgradcheck(lambda x: dropout(x, 0.3, r), x)


@sweep("op", [
    dropout,
    lambda x, p: attention(*[x.view(1, 20, 2, 5)] * 3, dropout_p=p),
    lambda x, p: residual_layer_norm(x, x, torch.ones(100), dropout_p=p)[1],
    lambda x, p: embedding(torch.tensor([[0, 1]]), x, dropout_p=p),
])  # fmt: skip
def test_without_rng_torch_decides(op):
    x = torch.ones(2, 100)
    torch.manual_seed(5)
    first = op(x, 0.5)
    assert not torch.equal(op(x, 0.5), first)
    torch.manual_seed(5)
    assert torch.equal(op(x, 0.5), first)
    assert draw_key().shape == (2,)


def test_no_dropout_and_p_in_units_of_a_256th():
    x = torch.randn(3)
    assert dropout(x, 0.0) is x
    assert dropout(torch.empty(0, 5), 0.5).shape == (0, 5)
    assert keep_mask(rng(), 0.5, (2, 0, 7)).shape == (2, 0, 7)
    for p, threshold in ((0.0, 0), (0.1, 26), (0.5, 128), (0.002, 1), (0.999, 255)):
        assert quantize_p(p) == threshold


P = 0.3
KEY = make_key(3, 2**32 - 2)  # the sample index crosses 2**32 within the batch
RNG = Rng(KEY, 2**15 - 1)
# Cuts of 4 samples of 7 rows: at a sample, inside one, a part inside one sample, ranks of 2, 3, 4.
CUTS = [(0, 14, 28), (0, 9, 28), (0, 3, 6, 28), (0, 5, 23, 28), (0, 7, 14, 21, 28), (0, 1, 27, 28)]
B, T, C = 4, 7, 37


def parts(cut):
    for start, end in itertools.pairwise(cut):
        yield slice(start, end), Rng(*RNG[:2], first_row=start, rows=T)


def with_grads(fn, *inputs):
    """Outputs and the gradients of every input, for the same dy at every row."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    outputs = fn(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    loss = sum((y * y.detach().cos()).sum() for y in outputs)
    return [*outputs, *torch.autograd.grad(loss, inputs)]


def residual_ops(device):
    weight, bias = torch.randn(C, device=device), torch.randn(C, device=device)
    yield lambda x, r, rng, op=residual_layer_norm: op(x, r, weight, bias, dropout_p=P, rng=rng)
    yield lambda x, r, rng, op=residual_rms_norm: op(
        x, r, weight, x_bias=bias, dropout_p=P, rng=rng
    )


def same(a, b):
    """Bits; composed of torch's functions, products of other shapes add in another order."""
    if backend.choice == "torch":
        torch.testing.assert_close(a, b)
    else:
        assert torch.equal(a, b)


def of_interpreter(form, cuts):
    """The second one where Triton is interpreted."""
    return cuts[1:2] if backend.choice == "triton" and form == "cpu" else cuts


@pytest.mark.parametrize("shape", [(T, 2, 16), slow((T, 3, 5, 64))])
def test_dropout_of_rows(form, shape):
    """Of more than one dimension a sample."""
    x = torch.randn(B, *shape, device=form)
    (n, *_), cols, per = shape, shape[-1], x[0, 0].numel() // shape[-1]
    whole = with_grads(lambda x: dropout(x.view(B, -1, cols), P, RNG), x)
    flat = x.view(B * T, *shape[1:])
    for part, rng in itertools.chain(*map(parts, of_interpreter(form, CUTS))):
        rng = rng._replace(rows=n * per, first_row=part.start * per)
        got = with_grads(lambda x, rng=rng: dropout(x, P, rng), flat[part])
        for a, b in zip(got, whole):
            assert torch.equal(a, b.reshape(flat.shape)[part])
        mask = keep_mask(rng, P, flat[part].shape, device=form)
        assert torch.equal(mask, whole[1].reshape(flat.shape)[part] != 0)


def moved_parts(low, high):
    """(rows of the whole batch, rng): the first and the second half of a rank's rows are runs of 2
    that lie apart in a sample, all of them and some."""
    places = torch.tensor([b * T + r for b in range(B) for r in (low, low + 1, high + 2, high + 3)])
    for start, end in ((0, 4 * B), (1, 11)):
        rng = Rng(*RNG[:2], first_row=start, rows=4, moved=(low, high))
        yield places[start:end], rng


@pytest.mark.slow
def test_rows_of_ops(form):
    """Of dropout and of the residual norms, in any leading dimensions."""
    x, r = (torch.randn(B, T, C, device=form) for _ in range(2))
    some = [part for cut in of_interpreter(form, CUTS) for part in parts(cut)]
    some += [part for cut in of_interpreter(form, [(0, 2), (3, 1)]) for part in moved_parts(*cut)]
    some = some[1::2] if backend.choice == "triton" and form == "cpu" else some
    for op in [*residual_ops(form), lambda x, r, rng: dropout(x + r, P, rng)]:
        whole = with_grads(lambda x, r, op=op: op(x, r, RNG), x, r)
        for part, rng in some:
            for shape in of_interpreter(form, [(1, -1, C), (-1, 1, C), (-1, C)]):
                rows = (t.view(B * T, C)[part].view(shape) for t in (x, r))
                got = with_grads(lambda x, r, op=op, rng=rng: op(x, r, rng), *rows)
                for a, b in zip(got, whole):
                    assert torch.equal(a.view(-1, C), b.view(B * T, C)[part])
    for part, rng in some:
        n = len(torch.arange(B * T)[part])
        exact = keep_mask_ref((KEY.cpu(), *rng[1:]), P, (n, C))
        assert torch.equal(keep_mask(rng, P, (n, C), device=form).cpu(), exact)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cut", "documents"),
    [
        ((0, 1, 2), False),
        slow((0, 2, 4), True),
        slow((0, 1, 6), True),
        *(slow((0, 1, 3, 6), documents) for documents in (False, True)),
    ],
)
def test_attention_of_heads(form, cut, documents):
    qkv = torch.randn(2 if cut[-1] > 2 else 1, 19, 3, cut[-1], 16, device=form)
    settings = {"dropout_p": P}
    if documents:
        qkv = qkv.flatten(0, 1)
        settings["cu_seqlens"] = torch.tensor([0, 11, 38], dtype=torch.int32, device=form)
    whole = with_grads(lambda x: attention_qkvpacked(x, rng=RNG, **settings), qkv)
    for start, end in itertools.pairwise(cut):
        settings["rng"] = RNG._replace(first_head=start)
        heads = qkv[..., start:end, :]
        got = with_grads(lambda x: attention_qkvpacked(x, **settings), heads)
        apart = with_grads(lambda *x: attention(*x, **settings), *heads.unbind(-3))
        for a, b in zip([*got, apart[0], torch.stack(apart[1:], -3)], whole * 2, strict=True):
            same(a, b[..., start:end, :])


@pytest.fixture
def drawn():
    """Where the whole mask is kept as bits, as on Hopper, Triton adds up keys in another order."""
    with BITS.trying((), Mask(0)):
        yield


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        ((1, 9, 16), torch.float32),
        slow((5, 19, 16), torch.float32),
        *(slow(s, torch.float16) for s in ((64, 128, 16), (63, 150, 24))),
    ],
)
def test_attention_of_the_last_queries(form, sizes, dtype):
    """Of their keys, as a key/value cache has them; first_row says where their rows lie in the
    mask."""
    (n, Tk, D), H = sizes, 2 if sizes[0] > 1 else 1
    at, inputs = Tk - n, torch.randn(3, 3, Tk, H, D, device=form).to(dtype)

    def last(q, k, v):
        rng = RNG._replace(first_row=at)
        return attention(q[:, at:], k, v, dropout_p=P, rng=rng)

    def of_all(q, k, v):
        return attention(q, k, v, dropout_p=P, rng=RNG)[:, at:]

    def close(a, b, roundings):
        atol = roundings * torch.finfo(dtype).eps * b.abs().max().item()
        torch.testing.assert_close(a, b, rtol=0, atol=atol)

    o, dq, dk, dv = zip(with_grads(last, *inputs), with_grads(of_all, *inputs))
    for a, b in (o, dq):
        if dtype == torch.float16 and form == "cpu" and backend.choice == "triton":
            close(a, b, 1)  # NumPy's products round a row differently at other places of a tile
        else:
            same(a, b)
    # These add up queries in another order, in fp32: 8 roundings of half an eps either way are
    # allowed there, and in 16 bits one rounding of each result.
    for a, b in (dk, dv):
        close(a, b, 16 if dtype == torch.float32 else 2)


X, IDX, Q = torch.ones(2, 3, 8), torch.zeros(2, 3, dtype=torch.int64), torch.ones(1, 2, 3, 8)
LONG, CU = torch.ones(5, 3, 8), torch.tensor([0, 2, 5], dtype=torch.int32)
ROWS = Rng(KEY, 0, first_row=2, rows=3)
NORMS = (residual_layer_norm, residual_rms_norm)
OTHERS = [ROWS, RNG._replace(rows=0), RNG._replace(moved=(1, 2))]
OF_RNG = [  # words, shape, rng; of dropout and of keep_mask
    (r"expected 0 <= site < 32768, got site=32768", (2, 3), Rng(KEY, 2**15)),
    (r"expected an int64 key of shape \[2\], got key=torch.flo", (2, 3), Rng(KEY.float(), 0)),
    (r"expected an int64 key of shape \[2\], got key=.* \[1\]", (2, 3), Rng(KEY[:1], 0)),
    (r"expected a key on the CPU or on cpu, got key on meta", (2, 3), Rng(KEY.to("meta"), 0)),
    (r"expected fewer than 65536 heads .*got H=65536", (1, 2**16, 1, 1), Rng(KEY, 0)),
    (r"expected x of shape \[B, ..., C\], got x=\[3\]", (3,), Rng(KEY, 0)),
    *((words, X.shape, ROWS._replace(**changes)) for words, changes in (
        ("expected rng.rows >= 1, .*got rows=0", {"rows": 0}),
        ("expected 0 <= rng.first_row .*got first_row=-1 N=6", {"first_row": -1}),
        ("expected 0 <= .* first_row=2147483642 N=6", {"first_row": 2**31 - 6}),
        ("expected an rng without first_head, got first_head=1", {"first_head": 1}),
        ("expected an rng without first_row, got first_row=2", {"rows": None}),
        ("expected rng.rows >= 1, and even if .*got rows=3 moved", {"moved": (1, 2)}),
        ("expected rng.moved that leave no row below 0", {"rows": 4, "moved": (-1, 2)}),
        (r"expected rng.moved that leave .*moved=\(1, -3", {"rows": 4, "moved": (1, -3)}),
        ("expected rng.moved that leave .*1073741824", {"rows": 4, "moved": (0, 2**30)}),
    )),
]  # fmt: skip
REFUSALS = [  # words, op, tensors, rng or other arguments
    *((words, dropout, (torch.ones(shape), 0.1, rng), {}) for words, shape, rng in OF_RNG),
    *((words, keep_mask, (rng, 0.1, shape, "cpu"), {}) for words, shape, rng in OF_RNG),
    *((words, residual_layer_norm, (X, X, X[0, 0]), rng)
      for words, shape, rng in OF_RNG if shape == X.shape),
    *((r"expected 0 <= p < 1, got p=", dropout, (X, p), {}) for p in (-0.1, 1.0, 1.5, math.nan)),
    (r"expected p = 0 or p > 1/512, got p=0.001", quantize_p, (0.001,), {}),
    (r"make_key: expected 0 <= seed < 2\*\*63, got seed=-1", make_key, (-1, 0), {}),
    (r"make_key: expected 0 <= first_sample < 2\*\*63, got", make_key, (0, 2**63), {}),
    (r"expected 0 <= threshold <= 255, got thresh", _C.keep_mask,
     (torch.empty(1, dtype=torch.bool), 0, 0, 0, 256, 1, 1, 1, 1, 0, 0, 1), {}),
    *((f"{op.__name__}: expected an rng without first_head", op, (x, x, x[0, 0]),
       RNG._replace(first_head=1)) for op in NORMS for x in (X, X.double())),
    *(("attention: expected an rng without (rows|moved)", attention, (q, q, q), rng)
      for rng in OTHERS for q in (Q, Q.double())),
    *((f"attention: expected 0 <= rng.first_row .* got first_row={n} T=2; count row", attention,
       (Q, Q, Q), RNG._replace(first_row=n)) for n in (-1, 2**31 - 2)),
    ("attention: expected an rng without first_row, got fir", attention, (LONG, LONG, LONG),
     {"rng": RNG._replace(first_row=2), "cu_seqlens": CU, "dropout_p": P}),
    *((f"dropout: expected 0 <= rng.first_head .*got first_head={n} H=3", attention, (Q, Q, Q),
       RNG._replace(first_head=n)) for n in (-1, 2**16 - 3)),
    *(("embedding: expected an rng without (first_row|rows|mov)", embedding, (IDX, X[0]), rng)
      for rng in (*OTHERS, RNG._replace(first_row=2))),
    ("embedding: expected an rng without first_head, got fir", embedding, (IDX, X[0]),
     RNG._replace(first_head=2)),
]  # fmt: skip


@sweep(("words", "op", "args", "how"), REFUSALS)
def test_what_is_refused(words, op, args, how):
    options = {"dropout_p": P, "rng": how} if isinstance(how, Rng) else how
    with pytest.raises(ValueError, match=words):
        op(*args, **options)
