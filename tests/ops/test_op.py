"""One table over all differentiable ops: tensors and derivatives beyond the ordinary.

The reference is the same op on plain copies, or called once for each sample or gradient; that this
is right itself is what each op's own tests show.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from cells import slow, sweep
from own_product import use_own_product
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fastpar import kernels
from fastpar.kernels import Rng, backend, make_key
from fastpar.predict.measure import StepMemory

RNG = Rng(make_key(3, 0), 1)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = 2, 5, 2, 16, 16, 11  # B, T, H, D, C, V


class Case(NamedTuple):
    op: Callable[..., Tensor]
    tensors: tuple[Tensor, ...]  # each has a gradient
    batched: bool = True  # whether the first tensor may be a sample of a batch


def cases(
    dtype: torch.dtype = torch.float32, sizes: tuple[int, ...] = SIZES, device: str = "cpu"
) -> Iterator[tuple[str, Case]]:
    B, T, H, D, C, V = sizes

    def new(*shape: int) -> Tensor:
        return torch.randn(*shape).to(device, dtype)

    ids, targets = (torch.randint(0, V, (B, T)).to(device) for _ in range(2))
    bounds = torch.tensor([0, T // 2, T], dtype=torch.int32, device=device)
    x, vector = new(B, T, C), new(C)
    heads, packed, matrix = new(B, T, H, D), new(T, H, D), new(V, C)
    turns = kernels.rope_turns(torch.arange(T, device=device), 100.0, D)
    dropped, rows = {"dropout_p": 0.25, "rng": RNG}, {"reduction": "none"}
    table = [
        ("layer_norm", kernels.layer_norm, {}, x, vector, new(C)),
        ("rms_norm", kernels.rms_norm, {}, x, vector),
        ("residual_layer_norm", kernels.residual_layer_norm, dropped, x, new(B, T, C), vector,
         new(C)),
        ("residual_rms_norm", kernels.residual_rms_norm, {}, x, x + 1, vector),
        ("bias_gelu", kernels.bias_gelu, {}, x, vector),
        ("bias_gelu, erf", kernels.bias_gelu, {"approximate": "none"}, x, vector),
        ("relu2", functools.partial(kernels.activation, kind="relu2"), {}, x, vector),
        ("swiglu", functools.partial(kernels.activation, kind="swiglu"), {}, x, vector),
        ("rope", lambda x, q, k, **how: kernels.rope(x, q_weight=q, k_weight=k, **how),
         {"turns": turns, "norm": True}, new(B, T, 3, H, D), new(D), new(D)),
        ("rope, no norm", kernels.rope, {"turns": turns}, new(B, T, 3, H, D)),
        ("dropout", kernels.dropout, {"p": 0.25, "rng": RNG}, x),
        ("linear", kernels.linear, {}, x, matrix, new(V)),
        ("attention", kernels.attention, {}, heads, heads + 1, heads + 2),
        ("attention, dropout", kernels.attention, {"causal": False, **dropped}, heads, heads + 1,
         heads + 2),
        ("attention, documents", kernels.attention, {"cu_seqlens": bounds}, packed, packed + 1,
         packed + 2),
        ("attention_qkvpacked", kernels.attention_qkvpacked, {}, new(B, T, 3, H, D)),
        ("cross_entropy", kernels.cross_entropy, {"targets": targets}, new(B, T, V)),
        ("cross_entropy, rows", kernels.cross_entropy, {"targets": targets, **rows}, new(B, T, V)),
        ("cross_entropy, in place",
         lambda t, **how: kernels.cross_entropy(t * 1.0, inplace=True, **how),
         {"targets": targets}, new(B, T, V)),
        ("linear_cross_entropy", kernels.linear_cross_entropy, {"targets": targets}, x, matrix),
        ("linear_cross_entropy, rows", kernels.linear_cross_entropy, {"targets": targets, **rows},
         x, matrix),
        ("embedding", functools.partial(kernels.embedding, ids), dropped, new(V, C), new(T, C)),
    ]  # fmt: skip
    for name, op, settings, *tensors in table:

        def call(*t: Tensor, op: Any = op, settings: Any = settings) -> Tensor:
            y = op(*t, **settings)
            return sum(y) if isinstance(y, tuple) else y

        yield name, Case(call, tuple(tensors), "in place" not in name)


COMPOSED = "linear", "bias_gelu, erf"  # of torch's own functions, where they are derived once more


@pytest.fixture(params=["module", "own product"])
def products(request):
    """Also as on a machine where linear's product is our own."""
    if request.param == "own product":
        use_own_product(request)


def grads_of(case: Case, tensors: tuple[Tensor, ...], dy: Tensor) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in tensors]
    y = case.op(*leaves)
    grads = torch.autograd.grad(y, leaves, dy)
    assert not any(grad.requires_grad for grad in grads)
    return [y.detach(), *grads]


def same(name: str, got, expected) -> None:
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        # torch's products add in an order that depends on strides: 16 terms of about 1.
        limit = 16 * torch.finfo(a.dtype).eps * b.abs().amax() if "linear" in name else 0.0
        error = (a - b).abs().amax()
        assert error <= limit, f"{name}: tensor {i} differs by {error}"


def test_lazily_negated_tensors_have_their_sign(products):
    for name, case in cases():
        dy = torch.randn_like(case.op(*case.tensors))
        expected = grads_of(case, case.tensors, dy)
        contiguous = tuple(torch._neg_view(-t) for t in case.tensors)
        imaginary = tuple(torch.complex(t, -t).conj().imag for t in case.tensors)
        assert all(t.is_neg() for t in (*contiguous, *imaginary))
        same(name, grads_of(case, contiguous, torch._neg_view(-dy)), expected)
        if case.batched and not name.startswith("attention"):  # rows that are contiguous
            same(f"{name}, strided", grads_of(case, imaginary, dy), expected)
        with torch.no_grad():
            same(name, [case.op(*contiguous)], expected[:1])


def traced(call, tensors):
    return torch.jit.trace(call, tuple(t * 0.5 for t in tensors))(*tensors)


def recorded(call, tensors, **how):
    """By make_fx, with other values."""
    return make_fx(call, **how)(*(t * 0.5 for t in tensors))(*tensors)


def functional(call, tensors):
    torch._enable_functionalization(reapply_views=True)
    try:
        y = call(*map(torch._to_functional_tensor, tensors))
    finally:
        torch._disable_functionalization()
    torch._sync(y)
    return torch._from_functional_tensor(y)


def below_autograd(call, tensors):
    with torch._C._AutoDispatchBelowAutograd():
        return call(*tensors)


def with_python_dispatcher(call, tensors):
    with enable_python_dispatcher():
        return call(*tensors)


class Seen(TorchDispatchMode):
    """What the dispatcher is asked for."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def in_a_mode(call, tensors):
    with Seen():
        return call(*tensors)


def in_a_function_mode(call, tensors):
    with BaseTorchFunctionMode():
        return call(*tensors)


def under_inference_mode(call, tensors):
    with torch.inference_mode():
        return call(*tensors).clone()


def exported(call, tensors):
    class Module(torch.nn.Module):
        def forward(self, *tensors):
            return call(*tensors)

    return torch.export.export(Module(), tensors, strict=False).module()(*tensors)


KEYS: dict[str, Any] = {"_allow_non_fake_inputs": True}  # of masks, which stand outside

# Every key that torch keeps for a thread (torch._C._dispatch_tls_local_include_set() and
# _exclude_set()) or gives a tensor (torch._C._dispatch_keys()) and that changes what a call does.
# Not here: FuncTorch's and Batched (transforms, gradients in batches), Negative, Sparse, Mkldnn,
# Quantized and Conjugate (refusals), which have tests of their own; Meta, which has no memory;
# Autocast, for which no op has a rule.
STATES = {
    "Tracer": traced,
    "Python, PythonTLSSnapshot": in_a_mode,
    "Python, make_fx": recorded,
    "Python, make_fx fake": functools.partial(recorded, tracing_mode="fake", **KEYS),
    "Python, make_fx symbolic": functools.partial(recorded, tracing_mode="symbolic", **KEYS),
    "PreDispatch": functools.partial(recorded, pre_dispatch=True),
    "PreDispatch, export": exported,
    "PythonDispatcher": with_python_dispatcher,
    "functions of torch": in_a_function_mode,
    "FuncTorchDynamicLayer": lambda call, tensors: torch.func.functionalize(call)(*tensors),
    "Functionalize": functional,
    "Autograd excluded": below_autograd,
    "ADInplaceOrView excluded": under_inference_mode,
}
QUICK_STATES = "Tracer", "PreDispatch", "Functionalize", "Autograd excluded"


@pytest.mark.parametrize("state", [s if s in QUICK_STATES else slow(s) for s in STATES])
def test_every_state_of_torch_gets_values(state, products):
    """Where a recording is made, it is made with other values and run with these."""
    for name, case in cases():
        with torch.no_grad():
            same(name, [STATES[state](case.op, case.tensors)], [case.op(*case.tensors)])
        if state not in ("FuncTorchDynamicLayer", "Functionalize", "Autograd excluded"):
            leaves = tuple(t.clone().requires_grad_() for t in case.tensors)
            y = STATES[state](case.op, leaves)
            same(f"{name}, gradients on", [y.detach()], [case.op(*case.tensors)])


def test_a_recorded_loss_has_gradients_or_refuses_them():
    """A recording by torch.jit.trace always has them; another may have been made without."""
    x, w, targets = torch.randn(3, 8), torch.randn(5, 8), torch.tensor([1, 4, 0])

    def loss(x, w):
        logits = kernels.linear(x, w)
        direct = kernels.linear_cross_entropy(x, w, targets)
        return direct + kernels.cross_entropy(logits, targets)

    leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    with torch.no_grad():
        recording = torch.jit.trace(loss, (2 * x, w))
        graph = make_fx(lambda x, w: kernels.linear_cross_entropy(x, w, targets))(x, w)
    same("recorded", grads_of(Case(recording, ()), leaves, torch.ones(())),
         grads_of(Case(loss, ()), leaves, torch.ones(())))  # fmt: skip
    with pytest.raises(RuntimeError, match="expected a call that was recorded with gradients"):
        graph(*leaves).backward()


def zeros_of_torch(t):
    return torch._efficientzerotensor(t.shape)


def test_tensors_without_memory_have_their_values(products):
    """torch's zero tensors, as inputs and as gradients; tensors that are copied when written."""
    for name, case in cases():
        if "in place" in name:  # torch refuses it
            continue
        zeros = tuple(torch.zeros_like(t) for t in case.tensors)
        dy = torch.zeros_like(case.op(*zeros))
        expected = grads_of(case, zeros, dy)
        same(name, grads_of(case, tuple(map(zeros_of_torch, zeros)), zeros_of_torch(dy)), expected)
        same(f"{name}, gradient", grads_of(case, zeros, zeros_of_torch(dy)), expected)
        lazy = tuple(torch._lazy_clone(t.clone()) for t in case.tensors)
        same(f"{name}, lazy", [case.op(*lazy)], [case.op(*case.tensors)])


def relaid(t: Tensor, rows: bool) -> list[Tensor]:
    """The same values elsewhere in memory; rows: whose last dimension stays contiguous."""
    found = [
        torch.cat([t, t, t], -1)[..., t.shape[-1] : 2 * t.shape[-1]],
        torch.stack([t, t], 1)[:, 0],
    ]
    if t.dim() > 2:
        found.append(t.transpose(0, 1).contiguous().transpose(0, 1))
        found.append(t.transpose(-3, -2).contiguous().transpose(-3, -2))
    if not rows:
        found.append(t.movedim(0, -1).contiguous().movedim(-1, 0))
        found.append(torch.stack([t, t], -1)[..., 0])
    return found


WITH_TRITON = (
    *("layer_norm", "rms_norm", "residual", "bias_gelu", "relu2", "swiglu", "rope", "dropout"),
    *("attention", "cross_entropy", "embedding"),
)


def of_form(form: str, *sizes: int) -> Iterator[tuple[str, Case]]:
    """What the form has kernels of."""
    found = cases(sizes=sizes, device=form)
    return (c for c in found if backend.choice != "triton" or c[0].startswith(WITH_TRITON))


@pytest.mark.slow
def test_layouts_do_not_matter(form):
    """Inputs and gradients with strides, or expanded: other tiles add in another order. In Triton
    every second layout of a tensor, and of its gradient; attention has two in
    test_attention_triton.py."""
    few = backend.choice == "triton"
    sizes = (2, 3, 1, 16, 16, 11) if backend.choice == "triton" else SIZES
    for name, case in of_form(form, *sizes):
        # In place asks for rows that are evenly apart.
        if not case.batched or (few and name.startswith("attention")):
            continue
        dy = torch.randn_like(case.op(*case.tensors))
        expected = grads_of(case, case.tensors, dy)
        ways = [relaid(t, name.startswith("attention")) for t in case.tensors]
        of_dy = relaid(dy, False) if dy.dim() else [dy]
        for i in range(0, max(map(len, (*ways, of_dy))), 2 if few else 1):
            tensors = tuple(way[i % len(way)] for way in ways)
            got = grads_of(case, tensors, of_dy[(i + 1) % len(of_dy)])
            torch.testing.assert_close(got, expected, msg=lambda m, n=name: f"{n}: {m}")
        if dy.dim():
            first = case.tensors[0]
            row, of_row = first[:1].expand_as(first), dy[:1].expand_as(dy)
            given = grads_of(case, (row, *case.tensors[1:]), of_row)
            plain = grads_of(case, (row.contiguous(), *case.tensors[1:]), of_row.contiguous())
            torch.testing.assert_close(given, plain, msg=lambda m, n=name: f"{n}, expanded: {m}")


LARGE = 4, 75, 4, 40, 390, 1003  # work for several threads, and for whole and cut vectors


@sweep("dtype", DTYPES)
def test_bits_depend_on_neither_run_nor_threads_nor_isa(dtype, isas):
    """A library's products and its erf alone may depend on threads."""
    kept = []
    torch.set_num_threads(1)
    for name, case in cases(dtype, LARGE):
        dy = torch.randn_like(case.op(*case.tensors))
        kept.append((name, case, dy, grads_of(case, case.tensors, dy)))
    for isa in itertools.chain([None], isas()):
        for threads in (1, 3) if isa else (1,):
            torch.set_num_threads(threads)
            for name, case, dy, first in kept:
                if isa is None or not ("linear" in name or "erf" in name):
                    found = grads_of(case, case.tensors, dy)
                    assert all(map(torch.equal, found, first)), (name, isa, threads)


def test_no_rows(form):
    """Outputs without elements, gradients of zeros."""
    for name, case in of_form(form, 0, *SIZES[1:]):
        if "documents" in name:  # which have no batch
            continue
        leaves = [t.detach().requires_grad_() for t in case.tensors]
        y = case.op(*leaves)
        assert y.isnan() if not y.dim() else not y.numel(), name  # a mean over nothing
        grads = torch.autograd.grad(y.sum(), leaves)
        assert not any(g.nan_to_num(0.0).any() for g in grads), name


def test_no_gradient_is_no_gradient(products):
    """What an autograd.Function above may hand down: None for an output nobody used."""

    class Ends(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.sum()

        @staticmethod
        def backward(ctx, grad):
            return None

    for name, case in cases():
        leaves = [t.clone().requires_grad_() for t in case.tensors]
        y = case.op(*leaves)
        other = leaves[0].sum()
        (Ends.apply(y) + other).backward()
        assert torch.equal(leaves[0].grad, torch.ones_like(leaves[0])), name
        assert all(t.grad is None or not t.grad.any() for t in leaves[1:]), name


def test_what_is_frozen_changes_no_other_gradient(products):
    for name, case in cases():
        dy = torch.randn_like(case.op(*case.tensors))
        _, *grads = grads_of(case, case.tensors, dy)
        for i, want in enumerate(grads):
            given = [t.clone().requires_grad_(j == i) for j, t in enumerate(case.tensors)]
            same(name, torch.autograd.grad(case.op(*given), given[i], dy), [want])


def test_gradients_in_batches(products):
    for name, case in cases():
        leaves = [t.clone().requires_grad_() for t in case.tensors]
        y = case.op(*leaves)
        batch = torch.randn(3, *y.shape)
        got = torch.autograd.grad(y, leaves, batch, is_grads_batched=True, retain_graph=True)
        one_by_one = [torch.autograd.grad(y, leaves, dy, retain_graph=True) for dy in batch]
        same(name, got, map(torch.stack, zip(*one_by_one)))


def test_transforms_of_torch_func(products):
    for name, case in cases():
        if not case.batched:
            continue
        n = len(case.tensors)
        dy = torch.randn_like(case.op(*case.tensors))
        _, *expected = grads_of(case, case.tensors, dy)

        def loss(*t, case=case, dy=dy):
            return (case.op(*t) * dy).sum()

        got = torch.func.grad(loss, argnums=tuple(range(n)))(*case.tensors)
        same(name, got, expected)
        batch = tuple(torch.stack([t, 2 * t]) for t in case.tensors)
        samples = list(zip(*(t.unbind() for t in batch)))
        each = torch.func.vmap(torch.func.grad(loss, argnums=tuple(range(n))))(*batch)
        single = [torch.func.grad(loss, argnums=tuple(range(n)))(*s) for s in samples]
        same(f"{name}, per sample", each, map(torch.stack, zip(*single)))
        # Ordinary backward through vmap.
        leaves = [t.clone().requires_grad_() for t in batch]
        y = torch.func.vmap(case.op)(*leaves)
        same(f"{name}, vmap", y.detach(), torch.stack([case.op(*s) for s in samples]))
        got = torch.autograd.grad(y, leaves, torch.stack([dy, dy]))
        each = [grads_of(case, s, dy)[1:] for s in samples]
        same(f"{name}, vmap backward", got, map(torch.stack, zip(*each)))


def test_second_derivatives_are_refused_under_transforms_too(products):
    words = "expected one backward, got"
    for name, case in cases():
        if name in ("dropout", *COMPOSED):  # dropout is linear
            continue
        leaves = [t.clone().requires_grad_() for t in case.tensors]
        y = case.op(*leaves).square().sum()
        with pytest.raises(RuntimeError, match=f"{words} create_graph"):
            torch.autograd.grad(y, leaves, create_graph=True)
        for power in ((2,) if "embedding" in name else (1, 2)) if case.batched else ():

            def loss(t, case=case, power=power):
                return (case.op(t, *case.tensors[1:]) ** power).sum()

            def gradient(t, loss=loss):
                return torch.func.grad(loss)(t).sum()

            x = case.tensors[0]
            with pytest.raises(RuntimeError, match=words):
                torch.func.grad(gradient)(x)
            outer = gradient(x.clone().requires_grad_())
            with pytest.raises(RuntimeError, match=words):
                outer.backward()


def test_what_writes_in_place_is_refused_under_transforms():
    logits, targets = torch.randn(3, 5, 7), torch.randint(0, 7, (3, 5))
    words = r"cross_entropy_: expected tensors outside of torch\.fu"
    with pytest.raises(RuntimeError, match=words):
        torch.func.vmap(
            torch.func.grad(lambda a, t: kernels.cross_entropy(a * 1, t, inplace=True))
        )(logits, targets)


def test_forward_mode_is_refused_by_name():
    for name, case in cases():
        with forward_ad.dual_level():
            for needs_grad in (False, True):
                plain = [t.clone().requires_grad_(needs_grad) for t in case.tensors]
                case.op(*plain)  # nothing has a tangent
                duals = [forward_ad.make_dual(t, torch.ones_like(t)) for t in plain]
                if name not in COMPOSED:
                    with pytest.raises(RuntimeError, match="expected tensors without tangents"):
                        case.op(*duals)


def test_what_no_op_takes_is_refused_by_name():
    words = "expected (dense tensors, got|a floating dtype|logits|wte|x and w|x of residual)"
    for name, case in cases():
        if name in ("linear", "cross_entropy, in place"):
            continue
        first, *rest = case.tensors
        kinds = (torch.float8_e4m3fn, torch.complex64, torch.int32)
        wrong = [(x, *rest) for x in (first.to_sparse(), *map(first.to, kinds))]
        wrong += [(first, rest[0].to_sparse(), *rest[1:])] if rest else []
        for tensors in wrong:
            with pytest.raises(ValueError, match=words):
                case.op(*tensors)


X, W, Q = torch.ones(2, 4), torch.ones(4), torch.ones(1, 3, 2, 8)
EPS = "norm: expected a finite eps >= 0, got eps="
OUTSIDE = [  # words, call
    *((EPS, call) for eps in (-1e-5, float("nan"), float("inf")) for call in (
        lambda eps=eps: kernels.layer_norm(X, W, None, eps),
        lambda eps=eps: kernels.rms_norm(X.double(), W.double(), eps),
        lambda eps=eps: kernels.residual_layer_norm(X, X, W, eps=eps),
        lambda eps=eps: kernels.residual_rms_norm(X, X, W, eps=eps),
    )),
    *(("expected a finite softmax_scale > 0",
       lambda scale=scale: kernels.attention(Q, Q, Q, softmax_scale=scale))
      for scale in (float("inf"), float("nan"), 0.0, "0.1")),
    ("global_norm: expected 0 < loss_scale < inf, got",
     lambda: kernels.global_norm([X], loss_scale="2")),
    (r"make_key: expected 0 <= seed < 2..63, got seed=1.5", lambda: make_key(1.5, 0)),
]  # fmt: skip


@sweep(("words", "call"), OUTSIDE)
def test_numbers_outside_their_range_are_refused(words, call):
    with pytest.raises(ValueError, match=words):
        call()


def test_a_tensor_that_a_transform_has_left_behind():
    """torch.func's wrapper outlives the call that made it; Function.apply would unwrap it."""
    left, weight = [], torch.ones(8, requires_grad=True)
    torch.func.grad(lambda x: left.append(x) or x.sum())(torch.arange(16.0).view(2, 8))
    y = kernels.layer_norm(left[0], weight)
    assert torch.equal(y, kernels.layer_norm(torch.arange(16.0).view(2, 8), weight))
    y.square().sum().backward()
    assert weight.grad.abs().sum() > 0


def test_outputs_that_are_left_out_cost_no_memory():
    """Through the dispatcher they are empty tensors; dx would be as large as x."""
    x, weight = torch.randn(64, 128), torch.ones(128)
    _, stats = torch.ops.fastpar.layer_norm(x, weight, weight, 1e-5, False)
    options = (x.dtype, None, None, False)
    with StepMemory(x.device, alive_bytes=0) as memory:
        given = torch.ops.fastpar.layer_norm_bwd(x, None, x, weight, stats, *options)
        assert [g.numel() for g in given] == [x.numel(), 0, 128, 0, 0]
    assert memory.peak_bytes == 4 * (x.numel() + 128)
