"""One table over the ops as torch has them: what is registered, traced whole, differentiated once.

The values and gradients of a whole graph are those of the same calls without torch.compile; that
these are right is what each op's own tests show.
"""

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from fastpar import kernels
from fastpar.kernels import Rng, backend, make_key, route
from fastpar.kernels.adamw import Hyper
from fastpar.kernels.global_norm import NORM_WORDS, norm_bins, norm_from_bins
from fastpar.kernels.grouped_linear import _grouped_linear, _grouped_linear_bwd
from fastpar.kernels.linear import _linear, _linear_bwd
from fastpar.kernels.permute import _combine, _combine_bwd, _permute, _permute_bwd
from fastpar.kernels.route import _route, _route_bwd

OPS = torch.ops.fastpar
F32, BF16 = torch.float32, torch.bfloat16
PLAIN = (None, 0, 0)  # key, samples, p: no dropout


class Draw:
    """Leaves and plain tensors of one device and dtype."""

    def __init__(self, device: str, dtype: torch.dtype = F32) -> None:
        self.device, self.dtype = device, dtype

    def plain(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=self.dtype).to(self.device)

    def leaf(self, *shape: int) -> Tensor:
        return self.plain(*shape).requires_grad_()

    def ids(self, n: int, *shape: int) -> Tensor:
        return torch.randint(0, n, shape).to(self.device)


Calls = Iterator[tuple[Callable, tuple]]


def losses(d: Draw) -> Calls:
    logits, targets, rows = d.leaf(6, 20), d.ids(18, 6), d.plain(6, 20)
    for reduction in ("mean", "none"):
        options = (targets, 18, -100, reduction, 0.1, 0.01)
        yield OPS.cross_entropy, (logits, *options, True)
        yield OPS.cross_entropy, (rows, *options, False)
        x, w = d.leaf(6, 8), d.leaf(20, 8)
        yield OPS.linear_cross_entropy, (x, w, *options, 4, True, True, None)
        plain = (x.detach(), w.detach(), *options)
        yield OPS.linear_cross_entropy, (*plain, 0, False, False, torch.zeros_like(w))
    yield OPS.cross_entropy_, (rows.clone(), *options)
    yield OPS.cross_entropy_bwd, (rows, d.plain(6))
    yield OPS.cross_entropy_shard, (rows, targets, 20, 18, -100)
    options = (d.plain(6), d.plain(6), 20, 18, -100, 0.1)
    yield OPS.cross_entropy_shard_grad, (rows, targets, *options)
    if d.dtype == F32:
        scalar = torch.ones((), device=d.device)
        yield OPS.cross_entropy_bwd, (rows, scalar)
        yield OPS.cross_entropy_shard_grad, (rows, targets, d.plain(6), scalar, *options[2:])
        yield OPS.cross_entropy_attach, (logits, scalar, scalar / 2)
        for needs in ((True, True), (False, True), (True, False)):
            kept = (x.detach(), w.detach(), targets, 20, -100, 0.1, 0.01, 4)
            yield OPS.linear_cross_entropy_bwd, (d.plain(6), *kept, *needs)


def rows_and_heads(d: Draw) -> Calls:
    key = make_key(3, 5, d.device)
    x, r, w, bias = d.leaf(2, 3, 8), d.leaf(2, 3, 8), d.leaf(8), d.leaf(8)
    narrow, mask = x.detach().to(BF16).requires_grad_(), (key, 3, 26, None, (0, 0, 0))
    part = (key, 3 << 16, 26, 4, (2, 0, 0))
    for rms in (False, True):
        yield OPS.layer_norm, (x, None, w, None, None, *PLAIN, None, (0, 0, 0), 1e-5, rms)
    yield OPS.layer_norm, (x, r, w, w, w, *mask, 1e-5, False)
    yield OPS.layer_norm, (x, r, w, w, w, *part, 1e-5, False)
    yield OPS.layer_norm, (narrow, r, w, None, w, *mask, 1e-5, True)
    rows = [t.detach() for t in (x, r, x, w)]
    for options in (
        (None, 3, 0, None, (0, 0, 0), F32, F32, None, False),
        (*mask, F32, F32, F32, False),
        (None, 3, 0, None, (0, 0, 0), BF16, None, BF16, True),
    ):
        stats = torch.ones(1 if options[-1] else 2, 6, device=d.device)
        yield OPS.layer_norm_bwd, (*rows, stats, *options)
    for where in (mask, part):
        yield OPS.dropout, (x, *where)
        yield OPS.keep_mask, (*where, [9, 8], torch.device(d.device))
    for tanh in (True, False):
        for added in (bias, None):
            yield OPS.bias_gelu, (x, added, tanh)
            plain = None if added is None else added.detach()
            yield OPS.bias_gelu_bwd, (x.detach(), x.detach(), plain, tanh)
    ids, dx, wte, wpe = d.ids(5, 1, 2), d.plain(1, 2, 4), d.leaf(5, 4), d.leaf(3, 4)
    drawn = (key, 1, 77)
    for table, how in ((wpe, PLAIN), (None, PLAIN), (wpe, drawn)):
        yield OPS.embedding, (ids, wte, table, 1, *how, None)
    for tokens, positions in ((5, 3), (0, 3), (5, 0)):
        yield OPS.embedding_bwd, (dx, ids, *drawn, tokens, positions, 0)
    for positions in (0, 3):
        yield OPS.embedding_bwd_, (d.plain(5, 4), dx, ids, *drawn, positions, 0)


def attentions(d: Draw, o_kept: bool) -> Calls:
    """The op with gradients, and its backward op on what the forward returned."""
    key, bounds = make_key(3, 5, d.device), torch.tensor([0, 2, 5], dtype=torch.int32)
    packed, flat = d.leaf(1, 3, 3, 2, 16), d.leaf(5, 3, 2, 16)
    heads = [d.leaf(5, n, 16) for n in (4, 2, 2)]
    for inputs, do, how, documents in (
        ((packed, None, None), d.plain(1, 3, 2, 16), PLAIN, None),
        (packed.unbind(2), d.plain(1, 3, 2, 16), (key, 0, 77), None),
        (packed.unbind(2), d.plain(1, 3, 2, 16), (key, 3 << 16 | 7, 26), None),
        ((flat, None, None), d.plain(5, 2, 16), PLAIN, bounds.to(d.device)),
        (heads, d.plain(5, 4, 16), (key, 0, 77), bounds.to(d.device)),
    ):
        inputs = [x if x is None else x.detach().requires_grad_() for x in inputs]
        settings = (True, 0.5, *how, documents)
        yield OPS.attention, (*inputs, *settings)
        plain = [x if x is None else x.detach() for x in inputs]
        o, stats = OPS.attention(*plain, *settings)
        yield OPS.attention_bwd, (do, *plain, o if o_kept else None, stats, *settings)


def lists(d: Draw) -> Calls:
    """Ops on lists and flat memory."""
    at, x = torch.tensor(0.5), [torch.randn(3), torch.randn(2, 2)]
    mixed = [x[0].to(BF16), x[1].clone()]
    yield OPS.pack_, (torch.randn(7), x, [0, 3], 1.0, at)
    yield OPS.unpack_, (x, torch.randn(7), [0, 3], 2.0, None)
    yield OPS.accumulate_, (x, mixed, 1.0, at)
    for bins in (None, torch.zeros(NORM_WORDS, dtype=torch.int64)):
        yield OPS.sum_shards, ([torch.randn(3)] * 2, torch.randn(3), 1.0, None, bins)
    yield OPS.global_norm, (x, [True, False], 1.0, 1e-6, 1.0, torch.ones(()))
    yield OPS.norm_bins, (x, [True, True])
    yield OPS.norm_from_bins, (norm_bins(x), -1.0, 1e-6, 1.0, None)
    flat = torch.randn(70)
    for bits in (8, 4):
        yield OPS.quantize_blockwise, (flat, bits, 32, 5, 0)
    yield OPS.quantize_blockwise_feedback, (flat, torch.zeros(70), 8, 32, None, 64)
    codes, scales = kernels.quantize_blockwise(flat, block=32)
    yield OPS.dequantize_blockwise, (codes, scales, 1, 32)
    numbers, ranges = [1e-3, 0.9, 0.95, 1e-8, 0.1, 1.0], [0, 0, 7, 0, 0, 1, 0, 3, 0, 256]
    plain = [[torch.rand(n) for n in (7, 3)] for _ in range(4)]
    end = ([], [], False, False, 0, 1)
    yield OPS.adamw_step_, (*plain, [], [], [], [], at, None, ranges, numbers, *end)
    low = [[torch.randn(n).to(BF16) for n in (7, 3)] for _ in "pg"]
    moments = [[torch.zeros(n, dtype=torch.uint8) for n in (7, 3)] for _ in range(2)]
    steps = [[torch.zeros(1) for _ in (7, 3)] for _ in range(2)]
    masters = [p.float() for p in low[0]]
    everything = (*low, *moments, [], masters, *steps, torch.tensor(1.0), torch.zeros(()), ranges)
    end = ([torch.tensor(0.125)], [0], True, True, 5, 1)
    yield OPS.adamw_step_, (*everything, numbers, *end)


def products(d: Draw) -> Calls:
    x, w, bias, counts = d.leaf(5, 12), d.leaf(7, 12), d.leaf(7), torch.tensor([[3, 2]])
    for added in (bias, None):
        yield _linear.overload, (x, w, added)
    yield _linear_bwd.overload, (d.plain(5, 7), x.detach(), w.detach(), True, True, True)
    each, given = d.leaf(2, 7, 12), d.leaf(2, 7)
    yield _grouped_linear.overload, (x, each, given, counts)
    for apart in (False, True):
        plain = (d.plain(5, 7), x.detach(), each.detach(), counts)
        yield _grouped_linear_bwd.overload, (*plain, [True] * 3, apart)
    logits = d.leaf(8, 3)
    yield _route.overload, (logits, 2, d.plain(3))
    yield _route.overload, (logits, 1, None)
    experts = route(logits.detach(), 2)[1]
    yield _route_bwd.overload, (d.plain(8, 2), logits.detach(), experts)
    x, rows = d.leaf(8, 6), d.leaf(16, 6)
    yield _permute.overload, (x, experts, 3, None)
    _, order, _ = kernels.permute(x, experts, 3)
    yield _permute_bwd.overload, (d.plain(16, 6), order, 8, 2)
    weights = torch.rand(8, 2, requires_grad=True)
    yield _combine.overload, (rows, weights, order)
    plain = (rows.detach(), weights.detach(), order, True, True)
    yield _combine_bwd.overload, (d.plain(8, 6), *plain)


TABLES = {
    "losses": losses,
    "rows and heads": rows_and_heads,
    "attentions": lambda d: attentions(d, o_kept=backend.choice == "triton"),
    "lists": lists,
    "products": products,
}


def check_all(calls: Calls) -> None:
    for op, args in calls:
        torch.library.opcheck(getattr(op, "default", op), args)


WITH_TRITON = ["losses", "rows and heads", "attentions"]


@pytest.mark.parametrize("table", TABLES)
def test_what_is_registered(table):
    check_all(TABLES[table](Draw("cpu")))


@pytest.mark.parametrize("table", WITH_TRITON)
def test_what_is_registered_of_the_composed_forms(table, monkeypatch):
    monkeypatch.setattr(backend, "choice", "torch")
    check_all(TABLES[table](Draw("cpu")))


def test_what_is_registered_of_fp64():
    check_all(losses(Draw("cpu", torch.float64)))


@pytest.mark.slow
@pytest.mark.parametrize("table", WITH_TRITON)
def test_what_is_registered_of_triton(table, triton_device):
    check_all(TABLES[table](Draw(triton_device)))


def test_a_capacity_has_a_shape_of_its_own():
    """Zeros where nothing goes: no gradient that torch's checks could compare."""
    experts = route(torch.randn(8, 3), 2)[1]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    args = (torch.randn(8, 6, requires_grad=True), experts, 3, 4)
    torch.library.opcheck(_permute.overload, args, test_utils=tests)


# Whole graphs

P = {"dropout_p": 0.3}


def graphs(d: Draw) -> dict[str, tuple]:
    """name -> a program, and its tensors; it may write to those without gradients."""
    rng = Rng(make_key(3, 5, d.device), 4)
    ids, targets = d.ids(5, 2, 2), d.ids(90, 30)
    targets[::5] = -100
    vectors = [d.leaf(16) for _ in range(3)]

    def norms(x, r, w, b, xb):
        y, out = kernels.residual_layer_norm(x, r, w, b, x_bias=xb, rng=rng, **P)
        z, out = kernels.residual_rms_norm(x, out, w, x_bias=xb, rng=rng, **P)
        return kernels.layer_norm(y, w, b) + kernels.rms_norm(z, w) + out

    def attended(qkv):
        o = kernels.attention_qkvpacked(qkv, rng=rng, **P) + kernels.attention_qkvpacked(qkv)
        return o + kernels.attention(*qkv.unbind(2), rng=rng, **P)

    def documents(qkv, bounds):
        settings = {"rng": rng, "cu_seqlens": bounds, **P}
        o = kernels.attention_qkvpacked(qkv, **settings)
        return o + kernels.attention(*qkv.unbind(1), **settings)

    def embedded(wte, wpe, total):
        y = kernels.embedding(ids, wte, wpe, rng=rng, wte_grad=total, **P)
        return y + kernels.embedding(ids, wte * 2, wpe, first_position=1)

    def loss(logits):
        options = {"vocab_size": 100, "label_smoothing": 0.1}
        each = kernels.cross_entropy(logits, targets, reduction="none", **options)
        return each + kernels.cross_entropy(logits * 1.0, targets, inplace=True, **options)

    def shards(logits):
        top, total, hit = kernels.cross_entropy_shard(logits, targets, first=20)
        lse, scale, work = total.log() + top, torch.ones_like(top), logits * 1.0
        kernels.cross_entropy_shard_grad(work, targets, lse, scale, first=20, out=work)
        return kernels.cross_entropy_shard_grad(logits, targets, lse, scale, first=20), hit, work

    return {
        "norms": (norms, d.leaf(2, 3, 16), d.leaf(2, 3, 16), *vectors),
        "gelu": (
            lambda x, b: kernels.bias_gelu(x * 2, b) + kernels.bias_gelu(x, approximate="none"),
            *(d.leaf(5, 12), d.leaf(12)),
        ),
        "dropout": (
            lambda x: (
                kernels.dropout(x, 0.3, rng) * kernels.keep_mask(rng, 0.3, x.shape, device=x.device)
            ),
            d.leaf(2, 3, 5),
        ),
        "attention": (attended, d.leaf(1, 6, 3, 2, 16)),
        "attention of documents": (
            documents,
            *(d.leaf(6, 3, 2, 16), torch.tensor([0, 4, 6], dtype=torch.int32).to(d.device)),
        ),
        "embedding": (embedded, d.leaf(5, 4), d.leaf(3, 4), torch.ones(5, 4, device=d.device)),
        "loss": (loss, d.leaf(30, 104)),
        "shards of a loss": (shards, d.plain(30, 40)),
    }


def more_graphs(d: Draw) -> dict[str, tuple]:
    """Those of ops without Triton kernels."""
    targets = d.ids(100, 30)

    def head(x, w, total):
        each = kernels.linear_cross_entropy(x, w, targets, reduction="none")
        mean = kernels.linear_cross_entropy(x, w, targets)
        return each + mean + kernels.linear_cross_entropy(x, w, targets, weight_grad=total)

    def flat(scale, out, *tensors):
        packed = torch.empty(7)
        kernels.pack_(packed, tensors, scale=scale)
        kernels.sum_shards([packed, packed], out)
        kernels.accumulate_([packed], [out])
        kernels.unpack_(tensors, packed)
        bins = norm_bins(tensors)
        norms = *kernels.global_norm(tensors, max_norm=1.0), *norm_from_bins(bins, max_norm=1.0)
        return packed, *norms

    def coded(x, error):
        codes, scales = kernels.quantize_blockwise(x, seed=1, error=error, bits=4)
        return kernels.dequantize_blockwise(codes, scales, out_dtype=BF16) * 2

    def stepped(scale, p, g, m, v):
        hyper = Hyper(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1)
        kernels.adamw_step_([p], [g], [m], [v], hyper, grad_scale=scale)

    half = torch.tensor(0.5)
    return {
        "linear": (
            lambda *a: kernels.linear(*a) * 2,
            *(d.leaf(128, 96), d.leaf(128, 96), d.leaf(128)),
        ),
        "loss of products": (head, d.leaf(30, 16), d.leaf(100, 16), torch.zeros(100, 16)),
        "flat memory": (flat, half, torch.empty(7), torch.randn(3), torch.randn(2, 2)),
        "codes": (coded, torch.randn(700), torch.randn(700)),
        "adamw": (stepped, half, *(torch.rand(40) for _ in "pgmv")),
    }


def results(f: Callable, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Outputs, gradients, and what stands in the tensors afterwards."""
    given = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    out = f(*given)
    outs = [] if out is None else list(out) if isinstance(out, tuple) else [out]
    leaves = [t for t in given if t.requires_grad]
    if leaves:
        torch.autograd.backward([o.square().sum() for o in outs if o.requires_grad])
    return [*outs, *(t.grad for t in leaves if t.grad is not None), *given]


def check_graph(f: Callable, *tensors: Tensor) -> None:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        got = results(torch.compile(f, fullgraph=True, backend="aot_eager"), tensors)
    for a, b in zip(got, results(f, tensors), strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


@pytest.mark.parametrize("name", [*graphs(Draw("cpu")), *more_graphs(Draw("cpu"))])
def test_a_graph_is_whole(name):
    check_graph(*(graphs(Draw("cpu")) | more_graphs(Draw("cpu")))[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", graphs(Draw("cpu")))
def test_a_graph_is_whole_with_triton(name, triton_device):
    check_graph(*graphs(Draw(triton_device))[name])


def test_a_compiled_op_still_refuses_wrong_ids():
    wte = torch.ones(5, 4)
    compiled = torch.compile(kernels.embedding, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match=r"expected token ids in \[0, 5\), got id=5"):
        compiled(torch.tensor([[5]]), wte)
    qkv = torch.ones(6, 3, 2, 4)
    compiled = torch.compile(
        lambda x, bounds: kernels.attention_qkvpacked(x, cu_seqlens=bounds), backend="aot_eager"
    )
    with pytest.raises(ValueError, match="expected cu_seqlens to end at q's total"):
        compiled(qkv, torch.tensor([0, 4, 5], dtype=torch.int32))
