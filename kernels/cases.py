"""Inputs, oracle, stock PyTorch, bytes and FLOPs of every op, for proofs, tests and benches.

A case is one op at one shape. `fastpar doctor` proves with cases (fastpar/doctor/trial.py), tests
judge with them (tests/ops/test_cases.py), benches time them (bench/ops), and so do the checks on a
GPU (bench/gpu_checks.py). Nothing else imports this file.

To add an op, write a maker: a function of (rows, size, device) that yields cases, a plain one
first, then hostile ones; `size` is the last dimension, 0 if it is irrelevant. `@makes("my_op")`
adds the maker to the table. tests/support/more_cases.py adds cases that only tests need.

An error is measured against fp64 and judged by Errors.bound, the 2x rule: twice the error of plain
PyTorch in the same dtype on the same machine. Tests also judge it by arithmetic alone, from
OpCase's formula, inner and stores (tests/support/roundings.py).
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpar import kernels
from fastpar.kernels import Rng, adamw, backend, make_key, reference
from fastpar.kernels.backend import wide
from fastpar.kernels.choice import PARTS
from fastpar.kernels.global_norm import norm_bins, norm_from_bins
from fastpar.kernels.orthogonalize import POLAR_EXPRESS, orthogonalize_each


class Errors(NamedTuple):
    """Largest errors of one result against fp64, where that is finite."""

    max: float
    eager_max: float  # of plain PyTorch in the same dtype
    rounding: float  # of the largest value to the result's dtype: eps / 2 * max|oracle|
    condition: float = 0.0  # see bound; measured only if the rest of it is not enough

    @property
    def bound(self) -> float:
        """Twice plain PyTorch's error plus the condition, plus one rounding of the result (which
        the largest value of an exact result is off by when it is stored). PyTorch's error alone is
        no yardstick: it depends on the CPU's libraries, and is small by luck if few elements are
        compared. The condition depends on the inputs only: it is how far the exact result moves
        when each input is rounded once, in fp32 (fp64 for fp64), as a stable algorithm's may."""
        return 2.0 * (self.eager_max + self.condition) + self.rounding


def measure_errors(
    fn: Callable[..., Any], ref: Callable[..., Any], inputs: Sequence[Any], *,
    eager: Callable[..., Any] | None = None, grad: bool = True,
) -> dict[str, Errors]:  # fmt: skip
    """The errors of fn and of eager (default: ref) against ref on fp64 copies of the inputs, for
    every output and for the gradient of every input with requires_grad; one cotangent for all
    three.

    Args:
        fn, ref, eager: take *inputs, return a tensor or a tuple of tensors.
        inputs: tensors and other arguments; floating-point tensors are upcast for the oracle.
        grad: also compare gradients.
    Returns:
        "output 0", "gradient of input 0", ... -> Errors; results without elements are left out.
    Raises:
        AssertionError: a missing result, a wrong shape or dtype, or not both finite.
    """
    truth = evaluate(ref, inputs, grad, double=True)
    base, ours = (evaluate(call, inputs, grad) for call in (eager or ref, fn))
    assert ours.keys() == truth.keys(), f"results: expected {list(truth)}, got {list(ours)}"
    measured = {}
    for name, exact in truth.items():
        got, plain = ours[name], base[name]
        assert got.shape == exact.shape, f"{name}: expected shape {exact.shape}, got {got.shape}"
        assert got.dtype == plain.dtype, f"{name}: expected dtype {plain.dtype}, got {got.dtype}"
        if not exact.numel():
            continue
        finite = exact.isfinite()
        same = torch.equal(got.double()[~finite].nan_to_num(), exact[~finite].nan_to_num())
        assert same, f"{name}: expected the oracle's infinities and NaNs"
        magnitude = exact[finite].abs().max().item() if finite.any() else 0.0
        rounding = 0.5 * torch.finfo(got.dtype).eps * magnitude
        measured[name] = Errors(largest_error(got, exact), largest_error(plain, exact), rounding)
    if any(errors.max > errors.bound for errors in measured.values()):
        for draw in range(3):  # one draw of few elements may leave little
            moved = [_rounded(x, draw) for x in inputs]
            values = evaluate(ref, moved, grad, double=True)
            for name, errors in measured.items():
                change = largest_error(values[name], truth[name])
                measured[name] = errors._replace(condition=max(change, errors.condition))
    return measured


def _rounded(x: Any, seed: int) -> Any:
    """The tensor in fp64, with every element moved up or down by one rounding."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    unit = 2.0 ** (-53 if x.dtype == torch.float64 else -24)
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, x.shape, generator=generator, device="cpu")
    moved = x.detach().double() * (1.0 + unit * (2.0 * signs - 1.0).double().to(x.device))
    return moved.requires_grad_(x.requires_grad)


def largest_error(value: Tensor, exact: Tensor) -> float:
    """The largest difference where exact is finite; inf if value is not finite there."""
    difference = (value.double() - exact)[exact.isfinite()].abs().nan_to_num(nan=float("inf"))
    return difference.max().item() if difference.numel() else 0.0


def evaluate(
    fn: Callable[..., Any], inputs: Sequence[Any], grad: bool = True, *, double: bool = False
) -> dict[str, Tensor]:
    """Outputs and gradients of fn on detached copies of the inputs, strides kept; arguments and
    names of results as in measure_errors."""
    local: list[Any] = list(inputs)
    for i, x in enumerate(inputs):
        if isinstance(x, Tensor):
            copy = x.detach().double() if double and x.is_floating_point() else x.detach()
            local[i] = copy.requires_grad_(grad and x.requires_grad)
    outputs = fn(*local)
    outputs = outputs if isinstance(outputs, tuple | list) else (outputs,)
    results = {f"output {i}": o.detach() for i, o in enumerate(outputs)}
    leaves = {i: x for i, x in enumerate(local) if isinstance(x, Tensor) and x.requires_grad}
    if leaves:
        device = next(iter(leaves.values())).device
        smooth = [o for o in outputs if o.requires_grad]
        # Rounded to bf16 first: exact in every dtype, so that all three see the same cotangent.
        wide, seed = torch.float32, torch.Generator(device).manual_seed(0)
        drawn = [torch.randn(o.shape, generator=seed, dtype=wide, device=device) for o in smooth]
        dy = [d.bfloat16().to(o.device, o.dtype) for d, o in zip(drawn, smooth)]
        grads = torch.autograd.grad(smooth, list(leaves.values()), dy, allow_unused=True)
        results |= {f"gradient of input {i}": g for i, g in zip(leaves, grads) if g is not None}
    return results


# Cases


FP32, FP64 = torch.float32, torch.float64
P = 0.1  # of dropout
LOGIT_STD = 3.0  # a spread like that of a trained model: some tokens are likely
Inputs = dict[str, Any]
Draw = Callable[..., Tensor]  # draw(*shape): standard normal, of the case's dtype and device
Pair = tuple[float, float]
HALF = (torch.bfloat16, torch.float16)


@dataclass
class OpCase:
    """One op at one shape. fn, ref and eager take the inputs in the order of make's dictionary.

    Attributes:
        ref: the oracle, in the dtype of its inputs.
        eager: plain PyTorch, as given to torch.compile; the yardstick of errors.
        stock: PyTorch's own function, timed instead of eager if its results differ.
        formula: the function whose steps are the op's; None for ref.
        inner: dtype in which the op keeps its steps; None for that of its inputs.
        stores: how often a result is rounded to its own dtype.
        in_fp64: whether it also computes in fp64.
        differentiable: False: its inputs require no gradients.
        elements: read or written by forward and by backward, of the inputs' dtype.
        flops: of forward and of backward.
    """

    op: str
    shape: str
    make: Callable[[Draw], Inputs]
    fn: Callable[..., Any]
    ref: Callable[..., Any]
    eager: Callable[..., Any]
    outputs: tuple[str, ...] = ("y",)
    dtypes: tuple[torch.dtype, ...] = (FP32, *HALF)
    stock: Callable[..., Any] | None = None
    formula: Callable[..., Any] | None = None
    inner: torch.dtype | None = None
    stores: int = 1
    in_fp64: bool = False
    differentiable: bool = True
    elements: Pair = (0.0, 0.0)
    flops: Pair = (0.0, 0.0)

    def inputs(
        self, dtype: torch.dtype, device: str, generator: torch.Generator | None = None
    ) -> Inputs:
        """Inputs by name, the same in every call without a generator."""
        generator = generator or torch.Generator(device).manual_seed(5)

        def draw(*shape: int) -> Tensor:
            x = torch.randn(shape, generator=generator, dtype=torch.float32, device=device)
            return x.to(dtype)

        def leaf(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            value = value.to(device)
            return value.requires_grad_(self.differentiable and value.is_floating_point())

        return {name: leaf(value) for name, value in self.make(draw).items()}

    def measure(self, dtype: torch.dtype, device: str) -> dict[str, Errors]:
        """Result -> its errors: "y", "dx", ..."""
        inputs = self.inputs(dtype, device)
        measured = measure_errors(self.fn, self.ref, list(inputs.values()), eager=self.eager)
        return self.by_name(inputs, measured)

    def results(self, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
        """Result -> its value in one call of the op."""
        inputs = self.inputs(dtype, device)
        return self.by_name(inputs, evaluate(self.fn, list(inputs.values())))

    def by_name(self, inputs: Inputs, found: dict[str, Any]) -> dict[str, Any]:
        """What evaluate() or measure_errors() found, by names of results: "y", "dx", ..."""
        names = {f"output {i}": name for i, name in enumerate(self.outputs)}
        names |= {f"gradient of input {i}": f"d{name}" for i, name in enumerate(inputs)}
        return {names[result]: value for result, value in found.items()}


Maker = Callable[..., Iterator[OpCase]]  # (rows, size, device)
MAKERS: dict[str, Maker] = {}  # op -> maker
UNPROVEN: set[str] = set()  # ops that run without a proof: their kernels are torch's


def makes(*ops: str, proven: bool = True) -> Callable[[Maker], Maker]:
    """Adds a maker to the table; proven=False: `fastpar doctor` has no proof of these ops."""

    def put(maker: Maker) -> Maker:
        MAKERS.update(dict.fromkeys(ops, maker))
        UNPROVEN.update(() if proven else ops)
        return maker

    return put


def cases_of(op: str, rows: int, size: int, device: str = "cpu", **how: Any) -> list[OpCase]:
    """Cases of an op in MAKERS, a plain one with `rows` rows first."""
    found = MAKERS[op](rows, size, device, **how)
    return [case for case in found if case.op == op.removesuffix("_masked")]


def _case(
    op: Callable[..., Any], shape: str, make: Callable[[Draw], Inputs],
    eager: Callable[..., Any] | None = None, outputs: tuple[str, ...] = ("y",), *,
    elements: Pair = (0.0, 0.0), flops: Pair = (0.0, 0.0), **settings: Any,
) -> OpCase:  # fmt: skip
    """A case of an op whose oracle has its name; settings are for both. eager: None: the oracle."""
    ref = functools.partial(getattr(reference, f"{op.__name__}_ref"), **settings)
    fn = functools.partial(op, **settings)
    return OpCase(
        op.__name__, shape.strip(), make, fn, ref, eager or ref, outputs,
        elements=elements, flops=flops, in_fp64=True,
    )  # fmt: skip


def _dropped(p: float, device: str, stream: int) -> dict[str, Any]:
    """The settings of an op with dropout p, none for 0."""
    return {"dropout_p": p, "rng": Rng(make_key(1, 0, device), stream)} if p else {}


def _generators_kept(x: Tensor) -> AbstractContextManager[None]:
    """Restores torch's default generators at its end."""
    if torch.compiler.is_compiling():
        return nullcontext()
    return torch.random.fork_rng([x.device] if x.is_cuda else [])


def _stock_dropout(x: Tensor, p: float) -> Tensor:
    with _generators_kept(x):
        return F.dropout(x, p)


# Norms


_NORMS = "layer_norm", "rms_norm"


def _stock_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, rms: bool = False
) -> Tensor:
    weight, bias = (None if t is None else t.to(x.dtype) for t in (weight, bias))
    if rms:
        return F.rms_norm(x, x.shape[-1:], weight, 1e-6)
    return F.layer_norm(x, x.shape[-1:], weight, bias)


def norm(N: int, C: int, how: str = "", *, rms: bool = False, bias: bool = True) -> OpCase:
    """how: "strided rows", "mean 100 std", "std 1e-3", "fp32 weights", "mean 1e4", "equal",
    "no weight"."""

    def make(draw: Draw) -> Inputs:
        x = draw(N, 2 * C)[:, :C] if how == "strided rows" else draw(N, C)
        if how.startswith("mean"):
            x = x + float(how.split()[1])
        x = x * 1e-3 if how == "std 1e-3" else torch.full_like(x, 7.0) if how == "equal" else x
        inputs = {"x": x, "weight": None if how == "no weight" else 1 + 0.1 * draw(C)}
        if bias and not rms:
            inputs["bias"] = 0.1 * draw(C)
        if how == "fp32 weights":
            inputs |= {n: v.float() for n, v in inputs.items() if n != "x" and v is not None}
        return inputs

    op, eager = getattr(kernels, _NORMS[rms]), functools.partial(_stock_norm, rms=rms)
    shape = f"N={N} C={C} {how}" + ("" if bias or rms else " no bias")
    # Read x, write y; then read x and dy, write dx.
    return _case(op, shape, make, eager, elements=(2.0 * N * C, 3.0 * N * C))


def residual_norm(
    N: int, C: int, p: float, device: str, *, rms: bool = False, x_bias: bool = True, how: str = ""
) -> OpCase:
    """how: "fp32 stream", of a 16-bit x; "no weight"."""
    settings = _dropped(p, device, 2)
    weight = ["weight"] * (how != "no weight")
    names = ["x", "residual", *weight] + ["x_bias"] * x_bias + ["bias"] * (not rms)

    def make(draw: Draw) -> Inputs:
        inputs = {"x": draw(N, C), "residual": draw(N, C)}
        inputs |= {n: (n == "weight") + 0.1 * draw(C) for n in names[2:]}
        if how == "fp32 stream":
            inputs |= {n: v.float() for n, v in inputs.items() if n not in ("x", "x_bias")}
        return inputs

    def by_name(op: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *values: op(**dict(zip(names, values)), **settings)

    def by_steps(drop: Callable[..., Tensor]) -> Callable[..., Any]:
        def call(x, residual, weight=None, x_bias=None, bias=None, **_):
            total = residual + drop(x if x_bias is None else x + x_bias, p)
            return _stock_norm(total, weight, bias, rms=rms), total

        return by_name(call)

    eager = by_steps(functools.partial(reference.dropout_ref, rng=settings.get("rng")))
    op = f"residual_{_NORMS[rms]}"
    shape = f"N={N} C={C}" + " x_bias" * x_bias + (f" dropout {p}" if p else "")
    calls = by_name(getattr(kernels, op)), by_name(getattr(reference, f"{op}_ref")), eager
    # Read x and residual, write y and the sum; then read the sum, dy and the sum's own gradient,
    # write the gradient of both inputs: one stream, or with dropout two.
    moved = 4.0 * N * C, (5.0 if p else 4.0) * N * C
    case = OpCase(op, f"{shape} {how}".strip(), make, *calls, ("y", "residual_out"))
    stock = by_steps(_stock_dropout) if p else None
    return replace(case, elements=moved, stock=stock, in_fp64=how != "fp32 stream")


@makes("layer_norm", "rms_norm", "residual_layer_norm", "residual_rms_norm")
def norms(rows: int, size: int, device: str) -> Iterator[OpCase]:
    """Plain and hostile rows, alone and after a residual add."""
    for rms in (False, True):
        yield norm(rows, size, rms=rms)
        for how in ("mean 100 std", "std 1e-3", "strided rows"):
            yield norm(min(rows, 127), size, how, rms=rms)
        for N, C in ((63, 16), (1, 127), (63, 1000)) + (((5, 16384),) if rows > 127 else ()):
            yield norm(min(rows, N), C, rms=rms)
        yield residual_norm(rows, size, 0.0, device, rms=rms)
        yield residual_norm(min(rows, 63), 127, 0.0, device, rms=rms)
        # The oracle draws its mask in Python, one Philox call after another.
        yield residual_norm(min(rows, 96), size, P, device, rms=rms)


# Rotary positions


def rope_case(
    B: int, T: int, R: int, G: int, D: int, device: str, *, norm: bool = False, weights: str = "",
    turned: bool = True, documents: bool = False,
) -> OpCase:  # fmt: skip
    """G groups of R heads of queries. weights: "", "own" or "fp32"; documents: positions of each
    row of their own."""
    positions = torch.arange(T, device=device)
    if documents:
        positions = torch.stack([(positions + 7 * b) % max(1, T // 2) for b in range(B)])
    turns = kernels.rope_turns(positions, 1e4, D) if turned else None

    def make(draw: Draw) -> Inputs:
        inputs = {"qkv": draw(B, T, R + 2, G, D)}
        if weights:
            inputs |= {name: 1 + 0.1 * draw(D) for name in ("q_weight", "k_weight")}
        if weights == "fp32":
            inputs |= {name: w.float() for name, w in inputs.items() if name != "qkv"}
        return inputs

    def by(op: Callable[..., Any]) -> Callable[..., Any]:
        def call(qkv: Tensor, q_weight: Any = None, k_weight: Any = None) -> Any:
            at = None if turns is None else turns.to(qkv.device)
            return op(qkv, at, norm=norm, q_weight=q_weight, k_weight=k_weight)

        return call

    def eager(
        qkv: Tensor, at: Any, *, norm: bool, q_weight: Any, k_weight: Any
    ) -> tuple[Tensor, ...]:
        """The usual steps of a model."""
        *q, k, v = qkv.unbind(-3)
        q_k: tuple[Tensor, ...] = torch.stack(q, -2).flatten(-3, -2), k
        if norm:
            pairs = zip(q_k, (q_weight, k_weight))
            q_k = tuple(_stock_norm(x, weight, rms=True) for x, weight in pairs)
        if at is not None:
            cos, sin = (s.repeat(*[1] * (s.dim() - 1), 2).to(qkv.dtype)[..., None, :]
                        for s in at.chunk(2, -1))  # fmt: skip
            halves = (x.chunk(2, -1) for x in q_k)
            q_k = tuple(x * cos + torch.cat([-b, a], -1) * sin for x, (a, b) in zip(q_k, halves))
        return *q_k, v

    name = f"B={B} T={T} R={R} G={G} D={D}" + " norm" * norm + f" {weights} weights" * bool(weights)
    name += "" if turned else " unturned"
    moved = float(B * T * (R + 2) * G * D)
    calls = by(kernels.rope), by(reference.rope_ref), by(eager)
    case = OpCase("rope", name + " documents" * documents, make, *calls, ("q", "k", "v"))
    return replace(case, in_fp64=True, inner=FP32, elements=(2 * moved, (2.0 + norm) * moved))


@makes("rope")
def ropes(rows: int, size: int, device: str) -> Iterator[OpCase]:
    """NanoChat's heads, then those of Qwen3 and Llama; size is D, made even."""
    D = size + size % 2
    yield rope_case(1, rows, 1, 3, D, device, norm=True)
    yield rope_case(1, rows, 2, 2, D, device, norm=True, weights="own")
    yield rope_case(2, -(-rows // 2), 3, 1, D, device)
    yield rope_case(1, min(rows, 7), 2, 1, 63, device, norm=True, weights="own", turned=False)


# Activations


def gelu(N: int, width: int, form: str = "tanh", scale: float = 1.0, *, bias: bool = True,
         how: str = "") -> OpCase:  # fmt: skip
    """form: "tanh" or "erf"; how: "fp32 bias"."""
    settings: dict[str, Any] = {"approximate": "none" if form == "erf" else form}
    shape = f"{form} N={N} F={width}" + (f" std {scale:g}" if scale != 1 else "")
    shape += "" if bias else " no bias"

    def make(draw: Draw) -> Inputs:
        inputs = {"x": draw(N, width) * scale}
        if bias:
            inputs["bias"] = draw(width).float() if how else draw(width)
        return inputs

    def eager(x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.gelu(x if bias is None else (x + bias).to(x.dtype), **settings)

    # forward reads x and writes y; backward reads x and dy and writes dx.
    elements = 2.0 * N * width, 3.0 * N * width
    return _case(kernels.bias_gelu, f"{shape} {how}", make, eager, elements=elements, **settings)


@makes("bias_gelu")
def gelus(rows: int, size: int, device: str) -> Iterator[OpCase]:
    """Both forms of GELU with a bias."""
    for form in ("tanh", "erf"):
        yield gelu(rows, size, form)
        yield gelu(63, 127, form, 30.0)


def activation(N: int, F_: int, kind: str, scale: float = 1.0, *, bias: bool = True,
               how: str = "") -> OpCase:  # fmt: skip
    """kind: "relu2" or "swiglu"; F_ outputs; how: "fp32 bias"."""
    width = 2 * F_ if kind == "swiglu" else F_
    shape = (
        f"N={N} F={F_}" + (f" std {scale:g}" if scale != 1 else "") + ("" if bias else " no bias")
    )

    def make(draw: Draw) -> Inputs:
        inputs = {"x": draw(N, width) * scale}
        if bias:
            inputs["bias"] = draw(width).float() if how else draw(width)
        return inputs

    def eager(x: Tensor, bias: Tensor | None = None) -> Tensor:
        u = x if bias is None else (x + bias).to(x.dtype)
        if kind == "relu2":
            return F.relu(u).square()
        gate, up = u.chunk(2, -1)
        return F.silu(gate) * up

    def by(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, bias=None: op(x, bias, kind)

    calls = by(kernels.activation), by(reference.activation_ref), eager
    moved = float(N * F_), float(N * width)  # y; x
    elements = sum(moved), moved[0] + 2 * moved[1]
    name = f"{shape} {how}".strip()
    return OpCase(kind, name, make, *calls, in_fp64=True, elements=elements)


@makes("relu2", "swiglu")
def activations(rows: int, size: int, device: str) -> Iterator[OpCase]:
    """Those without GELU; size is that of x."""
    for kind, width in (("relu2", size), ("swiglu", size // 2)):
        yield activation(rows, width, kind)
        yield activation(rows, width, kind, bias=False)
        yield activation(63, 127, kind, 30.0)


# Losses


_LOSSES: dict[str, dict[str, Any]] = {
    "smoothing 0.1": {"label_smoothing": 0.1},
    "z-loss 0.01": {"z_loss": 0.01},
    "softcap 5": {"softcap": 5.0},
    "no reduction": {"reduction": "none"},
    "all ignored": {"reduction": "sum"},
}


def _stock_loss(
    logits: Tensor, targets: Tensor, z_loss: float = 0.0, softcap: float = 0.0, **settings: Any
) -> Tensor:
    logits = logits.to(wide(logits.dtype))
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits, targets, **settings)
    if z_loss:
        valid = targets != settings.get("ignore_index", -100)
        squares = torch.where(valid, logits.logsumexp(-1).square(), 0.0) * z_loss
        how = settings.get("reduction", "mean")
        if how == "none":
            return loss + squares
        loss = loss + squares.sum() / (valid.sum() if how == "mean" else 1)
    return loss


def _targets_of(logits: Tensor, how: str) -> Tensor:
    """Drawn from the model's own distribution, so that losses and gradients differ by row."""
    generator = torch.Generator(logits.device).manual_seed(7)
    if how == "every row" or not len(logits):
        N, V = logits.shape
        return torch.randint(V, (N,), generator=generator, device=logits.device)
    probs = torch.softmax(logits.float(), -1)
    targets = torch.multinomial(probs, 1, generator=generator)[:, 0]
    if how == "logits 1e4":  # where the loss is not 0
        targets = torch.arange(len(probs), device=probs.device) % probs.shape[1]
    targets[::5] = 3 if how == "another index" else -100
    return torch.full_like(targets, -100) if how == "all ignored" else targets


def loss_of_logits(N: int, V: int, pad: int = 0, how: str = "", **settings: Any) -> OpCase:
    """cross_entropy with these settings; how: their name, "logits 1e4", "-inf logits", or
    "every row" for no ignored targets."""

    def make(draw: Draw) -> Inputs:
        logits = draw(N, V + pad) * (1e4 if how == "logits 1e4" else LOGIT_STD)
        if how == "-inf logits":
            third = torch.arange(V + pad, device=logits.device) % 3 == 0
            logits = logits.masked_fill(third, -torch.inf)
        return {"logits": logits, "targets": _targets_of(logits[:, :V], how)}

    def eager(logits: Tensor, targets: Tensor) -> Tensor:
        return _stock_loss(logits[:, :V], targets, **settings)

    one = float(N * V)  # logits are read once, and their gradient written once
    case = _case(
        kernels.cross_entropy, f"N={N} V={V}+{pad} {how}", make, eager, ("loss",),
        elements=(one, one), vocab_size=V, **settings,
    )  # fmt: skip
    return replace(case, inner=FP32, stores=2)  # a gradient is kept, and scaled in backward


def loss_of_products(
    N: int, C: int, V: int, pad: int = 0, how: str = "", chunk_rows: int | None = None,
    **settings: Any,
) -> OpCase:  # fmt: skip
    """linear_cross_entropy; how: as loss_of_logits, or "large logits"."""

    def make(draw: Draw) -> Inputs:
        x = draw(N, C)
        weight = draw(V + pad, C) * (100.0 if how == "large logits" else LOGIT_STD * C**-0.5)
        logits = x[:, :1].expand(N, V)  # gives the shape
        if how != "every row":
            logits = (x.float() @ weight[:V].float().T).to(x.dtype)
        return {"x": x, "weight": weight, "targets": _targets_of(logits, how)}

    def eager(x: Tensor, w: Tensor, targets: Tensor) -> Tensor:
        return _stock_loss(F.linear(x, w[:V]), targets, **settings)

    product = 2.0 * N * C * V
    case = _case(
        kernels.linear_cross_entropy, f"N={N} C={C} V={V}+{pad} {how}", make, eager, ("loss",),
        flops=(product, 2 * product), vocab_size=V, **settings,
    )  # fmt: skip
    if chunk_rows:
        case.shape += f" in chunks of {chunk_rows}"
        case.fn = functools.partial(case.fn, chunk_rows=chunk_rows)
    return case


@makes("cross_entropy", "linear_cross_entropy")
def losses(
    rows: int, size: int, device: str, *, C: int = 64, chunk_rows: int | None = None
) -> Iterator[OpCase]:
    """Losses over a vocabulary of `size` with its padding; chunk_rows: of linear_cross_entropy."""
    pad = size // 64
    V = size - pad
    yield loss_of_logits(rows, V, pad)
    yield loss_of_products(rows, C, V, pad, chunk_rows=chunk_rows)
    N, V = min(rows, 63), min(V, 1000)
    for how in ("logits 1e4", "-inf logits", *_LOSSES):
        yield loss_of_logits(N, V, 7, how, **_LOSSES.get(how, {}))
    for how in ("large logits", *_LOSSES):
        yield loss_of_products(N, C, V, 24, how, chunk_rows, **_LOSSES.get(how, {}))


def shard_of_loss(
    N: int, V: int, first: int, z_loss: float, each: bool, softcap: float = 0.0
) -> Iterator[OpCase]:
    """Classes first to first + V of a loss, of which V // 10 are padding; each: a scale a row."""
    options: dict[str, Any] = {"first": first, "vocab_size": first + V - V // 10}
    options |= {"softcap": softcap}

    def make(draw: Draw) -> Inputs:
        logits = draw(N, V) * LOGIT_STD
        generator = torch.Generator().manual_seed(8)
        targets = torch.randint(0, 2 * V, (N,), generator=generator, device="cpu")
        targets[::5] = -100
        return {"logits": logits, "targets": targets.to(logits.device)}

    def grad_inputs(draw: Draw) -> Inputs:
        inputs = make(draw)
        x = inputs["logits"].to(wide(inputs["logits"].dtype))
        scale = draw(N).to(x) if each else x.new_full((), 0.25)
        return {**inputs, "lse": x.logsumexp(-1) + 0.5, "scale": scale}

    def by(op: Any, how: Any, widen: bool = False) -> Callable[..., Any]:
        def call(logits: Tensor, *rest: Tensor) -> Any:
            x = logits.to(wide(logits.dtype)) if widen else logits
            found = op(x, *rest, **options, **how)
            return found.to(logits.dtype) if isinstance(found, Tensor) else found

        return call

    shape, z = f"N={N} V={V} from {first}", f" z-loss {z_loss}" + " each row" * each
    shape += f" softcap {softcap:g}" if softcap else ""
    how: dict[str, Any] = {"inner": FP32, "in_fp64": True, "differentiable": False}
    for name, about, inputs, outputs, also in (
        ("cross_entropy_shard", shape, make, ("max", "sum", "logit"), {}),
        ("cross_entropy_shard_grad", shape + z, grad_inputs, ("dlogits",), {"z_loss": z_loss}),
    ):
        op, ref = getattr(kernels, name), getattr(reference, f"{name}_ref")
        calls = by(op, also), by(ref, also), by(ref, also, True)
        yield OpCase(name, about, inputs, *calls, outputs, **how)


@makes("cross_entropy_shard", "cross_entropy_shard_grad")
def shards_of_losses(rows: int, size: int, device: str) -> Iterator[OpCase]:
    """A vocabulary shard's part of a loss, and of its gradient."""
    yield from shard_of_loss(rows, size, size // 2, 0.0, False)
    yield from shard_of_loss(min(rows, 63), min(size, 1000), 40, 0.01, True)
    yield from shard_of_loss(min(rows, 63), size, size // 2, 0.01, False, 5.0)


# Attention


def attention_case(
    B: int, T: int, D: int, H: int, device: str, *, Tk: int | None = None, Hkv: int | None = None,
    p: float = 0.0, scale: float = 1.0, causal: bool = True, packed: bool = False,
    softmax_scale: float | None = None,
) -> OpCase:  # fmt: skip
    """Compared with the formula, as nanoGPT writes it without flash attention. packed: q, k and v
    are slices of one projection's output."""
    Tk, Hkv = Tk or T, Hkv or H

    def make(draw: Draw) -> Inputs:
        if packed:
            return {"qkv": draw(B, T, 3, H, D)}
        q, k = (draw(*shape) * scale for shape in ((B, T, H, D), (B, Tk, Hkv, D)))
        return {"q": q, "k": k, "v": draw(B, Tk, Hkv, D)}

    def stock(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        how: dict[str, Any] = {"is_causal": causal, "dropout_p": p, "enable_gqa": Hkv != H}
        with _generators_kept(q):
            o = F.scaled_dot_product_attention(q, k, v, scale=softmax_scale, **how)
        return o.transpose(1, 2)

    shape = f"B={B} T={T} D={D} H={H}" + (f" Tk={Tk}" if Tk != T else "")
    shape += (f" Hkv={Hkv}" if Hkv != H else "") + ("" if causal else " full")
    shape += f" scores {scale**2:g}" if scale != 1 else ""
    shape += f" scale {softmax_scale:g}" if softmax_scale else ""
    shape += f" dropout {p}" if p else ""
    settings = {"causal": causal, **_dropped(p, device, 3)}
    settings |= {"softmax_scale": softmax_scale} if softmax_scale else {}
    product = 4.0 * B * H * T * Tk * D / (2 if causal else 1)
    how: dict[str, Any] = {"outputs": ("o",), "flops": (product, 2.5 * product), **settings}
    case = replace(_case(kernels.attention, shape, make, **how), stock=stock)
    return _packed(case, 2, settings) if packed else case


def _packed(case: OpCase, dim: int, settings: Inputs) -> OpCase:
    """The same case for one tensor that has q, k and v along dim."""

    def split(by: Callable[..., Any]) -> Callable[..., Any]:
        return lambda qkv: by(*qkv.unbind(dim))

    ref, stock = split(case.ref), split(case.stock) if case.stock else None
    own = functools.partial(kernels.attention_qkvpacked, **settings)
    return replace(case, shape=f"{case.shape} packed", fn=own, ref=ref, eager=ref, stock=stock)


def attention_of_documents(
    ends: Sequence[int], H: int, D: int, device: str, *, Hkv: int | None = None, p: float = 0.0,
    causal: bool = True, packed: bool = False,
) -> OpCase:  # fmt: skip
    """Documents of one row after another: cu_seqlens."""
    settings: dict[str, Any] = _dropped(p, device, 3)
    settings["cu_seqlens"] = torch.tensor(ends, dtype=torch.int32, device=device)
    settings |= {} if causal else {"causal": False}
    shape = f"documents up to {list(ends)}, D={D} H={H}" + (f" Hkv={Hkv}" if Hkv else "")
    shape += (f" dropout {p}" if p else "") + ("" if causal else " full")

    def make(draw: Draw) -> Inputs:
        if packed:
            return {"qkv": draw(ends[-1], 3, H, D)}
        heads = {"q": H, "k": Hkv or H, "v": Hkv or H}
        return {name: draw(ends[-1], n, D) for name, n in heads.items()}

    case = _case(kernels.attention, shape, make, outputs=("o",), **settings)
    return _packed(case, 1, settings) if packed else case


HEADS = 12  # GPT-2's


@makes("attention")
def plain_attentions(
    rows: int, size: int, device: str, *, masked: bool = False
) -> Iterator[OpCase]:
    """Attention, plain or with dropout or documents; see _case in attention/__init__.py."""
    B, T, D = -(-rows // 1024), min(rows, 1024), size
    # A mask's oracle is drawn in Python, and a kernel interpreted head by head.
    H = HEADS if rows > 320 else 2 if masked or rows < 48 else 4
    yield attention_case(B, T, D, H, device, p=P if masked else 0.0)
    if masked:
        total = min(T, 300)
        yield attention_of_documents([0, 1, total // 3, total // 3 + 2, total], H, D, device)
        yield attention_case(1, min(T, 48), D, H, device, p=P)
    else:
        yield attention_case(B, min(T, 96), D, H, device, causal=False)
        yield attention_case(B, min(T, 96), D, H, device, scale=6.0)


MAKERS["attention_masked"] = functools.partial(plain_attentions, masked=True)


# Embedding, experts, dropout


def embedding_case(
    B: int, T: int, C: int, V: int, p: float, device: str, *, first: int = 0, wpe: bool = True
) -> OpCase:
    """first: position of the first token; wpe: whether positions are added."""
    settings = _dropped(p, device, 4) | ({"first_position": first} if first else {})

    def make(draw: Draw) -> Inputs:
        idx = (draw(B, T).float().abs() * V / 8).long().clamp(max=V - 1)  # some tokens repeat
        return {"idx": idx, "wte": draw(V, C)} | ({"wpe": draw(T + first, C)} if wpe else {})

    def eager(idx: Tensor, wte: Tensor, wpe: Tensor | None = None) -> Tensor:
        x = F.embedding(idx, wte)
        x = x if wpe is None else x + wpe[first:]
        return reference.dropout_ref(x, p, settings["rng"]) if p else x

    shape = f"B={B} T={T} C={C} V={V}" + (f" dropout {p}" if p else "")
    shape += (f" from {first}" if first else "") + ("" if wpe else " no positions")
    row = float(B * T * C)
    # forward reads a row and writes it; backward reads dy and writes the dense gradient.
    return _case(kernels.embedding, shape, make, eager, elements=(2 * row, row + V * C), **settings)


@makes("embedding")
def embeddings(rows: int, size: int, device: str, *, B: int = 1, V: int = 4096) -> Iterator[OpCase]:
    """Token and position embedding; some tokens repeat."""
    yield embedding_case(B, rows, size, V, 0.0, device)
    yield embedding_case(2, min(rows, 48), size, V, P, device)
    yield embedding_case(1, 1, 63, V, 0.0, device)


def _choices(rows: int, E: int, K: int) -> Tensor:
    """K different experts of each token."""
    generator = torch.Generator().manual_seed(3)
    chances = torch.rand(rows, E, generator=generator, dtype=torch.float32, device="cpu")
    return chances.argsort(-1)[:, :K]


def route_case(N: int, E: int, K: int) -> OpCase:
    """A router's choice among E experts."""

    def eager(logits: Tensor) -> Tensor:
        return logits.topk(K, -1).values.softmax(-1)

    moved = 3.0 * N * E
    how: dict[str, Any] = {"dtypes": (FP32,), "in_fp64": True, "elements": (moved, moved)}
    calls = (lambda x: kernels.route(x, K)[0]), (lambda x: reference.route_ref(x, K)[0]), eager
    return OpCase("route", f"N={N} E={E} K={K}", lambda draw: {"logits": draw(N, E)}, *calls, **how)


def permute_case(N: int, C: int, E: int, K: int) -> OpCase:
    """Tokens to their experts."""
    moved = float((1 + K) * N * C)
    calls = (
        lambda x, numbers: kernels.permute(x, numbers, E)[0],
        lambda x, numbers: reference.permute_ref(x, numbers.cpu(), E)[0],
        lambda x, numbers: x.index_select(0, numbers.flatten().argsort(stable=True) // K),
    )

    def make(draw: Draw) -> Inputs:
        return {"x": draw(N, C), "experts": _choices(N, E, K).to(draw(1).device)}

    how: dict[str, Any] = {"in_fp64": True, "elements": (moved, moved)}
    return OpCase("permute", f"N={N} C={C} K={K}", make, *calls, **how)


def combine_case(N: int, C: int, E: int, K: int) -> OpCase:
    """Back from the experts. index_add, the usual way, has no guaranteed order on a GPU."""

    def make(draw: Draw) -> Inputs:
        x, order, _ = kernels.permute(draw(N, C), _choices(N, E, K).to(draw(1).device), E)
        return {"rows": x, "weights": draw(N, K).abs().to(wide(x.dtype)), "order": order}

    def eager(x: Tensor, weights: Tensor, order: Tensor) -> Tensor:
        scaled = x.to(weights.dtype) * weights.flatten()[order, None]
        mixed = scaled.new_zeros(len(weights), C).index_add(0, order // K, scaled)
        return mixed.to(x.dtype)

    moved = float((1 + K) * N * C)
    return _case(kernels.combine, f"N={N} C={C} K={K}", make, eager, elements=(moved, moved))


def grouped_linear_case(tokens: int, C: int, out: int, E: int, K: int) -> OpCase:
    """Layers of E experts, one of which has no rows."""
    M = tokens * K

    def make(draw: Draw) -> Inputs:
        counts = torch.bincount(_choices(tokens, E, K).flatten(), minlength=E)
        counts[1], counts[0] = 0, counts[0] + counts[1]
        x, weight = draw(M, C), draw(E, out, C) * C**-0.5
        return {"x": x, "weight": weight, "bias": draw(E, out), "counts": counts.to(x.device)}

    def eager(x: Tensor, weight: Tensor, bias: Tensor, counts: Tensor) -> Tensor:
        parts = zip(x.split(counts.tolist()), weight, bias)
        return torch.cat([F.linear(part, w, b) for part, w, b in parts])

    product = 2.0 * M * C * out
    shape = f"M={M} E={E} {C}->{out}"
    return _case(kernels.grouped_linear, shape, make, eager, flops=(product, 2 * product))


def experts_case(N: int, C: int, E: int, K: int) -> Iterator[OpCase]:
    """K of E experts for each token."""
    yield route_case(N, E, K)
    yield permute_case(N, C, E, K)
    yield combine_case(N, C, E, K)
    yield grouped_linear_case(N, C, 2 * C, E, K)


@makes("route", "permute", "combine", proven=False)
@makes("grouped_linear")
def experts(rows: int, size: int, device: str) -> Iterator[OpCase]:
    """The ops of experts: the choice, tokens there and back, layers with an empty group."""
    yield from experts_case(rows, size, 8, 2)


def dropout_case(shape: tuple[int, ...], device: str) -> OpCase:
    """By the counter-based mask."""
    rng = Rng(make_key(1, 0, device), 5)

    def eager(x: Tensor) -> Tensor:
        keep = reference.keep_mask_ref(rng, P, tuple(x.shape)).to(x.device, x.dtype)
        return x * keep * (256 / (256 - round(256 * P)))

    one = float(torch.Size(shape).numel())
    # forward reads x and writes y; backward reads dy and writes dx, and draws the mask again.
    how: dict[str, Any] = {"elements": (2 * one, 2 * one), "p": P, "rng": rng}
    name = f"{list(shape)} p={P}"
    case = _case(kernels.dropout, name, lambda draw: {"x": draw(*shape)}, eager, **how)
    return replace(case, stock=functools.partial(_stock_dropout, p=P))


@makes("dropout")
def dropouts(rows: int, size: int, device: str) -> Iterator[OpCase]:
    """Dropout by the counter-based mask."""
    yield dropout_case((1, rows, size or 48), device)


# Flat memory


_HYPER: dict[str, Any] = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
_LR, _STEP = 6e-4, 10.0
_MODES = {  # dtype of a parameter -> kinds of its master; None: none
    FP32: (None,), torch.bfloat16: (FP32, torch.int16, None), torch.float16: (FP32,),
}  # fmt: skip


def _masters_of(w: Tensor, dtype: torch.dtype, kind: torch.dtype | None) -> list[Tensor]:
    """A parameter of this dtype, and its master if it has one."""
    if kind == torch.int16:
        return list(adamw.master_split(w))
    p = adamw.round_to_bf16(w) if dtype == torch.bfloat16 else w.to(dtype)
    return [p] if kind is None else [p, w]


def adamw_case(
    numel: int, dtypes: tuple[torch.dtype, ...], master: torch.dtype | None = FP32,
    grad: torch.dtype | None = None, moment: torch.dtype = FP32, *, more: bool = False,
) -> OpCase:  # fmt: skip
    """A step by one way of storing its state, compared with torch's fused AdamW in fp32.

    What is rounded at random, to bf16 or 8 bits, is off by up to two roundings to nearest. So the
    yardstick has twice their error, as no function of PyTorch stores in this way.

    Args:
        master: of a 16-bit parameter; None: it is rounded at random. grad: None: the parameter's.
        more: amsgrad, ascending, a scale, zero_grad, hyper-parameters that are tensors.
    """
    eight_bits = moment == torch.uint8

    def make(draw: Draw) -> Inputs:
        first = draw(numel)
        kind = None if first.dtype == FP32 else master
        w = first.float() + 2.0**-12 * draw(numel).float()
        stored, g = _masters_of(w, first.dtype, kind), draw(numel).to(grad or first.dtype)
        m, v = draw(numel).float(), draw(numel).float().square()
        inputs = {"p": stored[0], "g": g, "exp_avg": m.to(moment), "exp_avg_sq": v.to(moment)}
        if eight_bits:
            (m, m_scale), (v, v_scale) = (
                adamw.encode_moment(x, signed=x is m) for x in (m, v)
            )  # fmt: skip
            inputs |= {"exp_avg": m, "exp_avg_sq": v, "m_scale": m_scale, "v_scale": v_scale}
        inputs |= {"largest": (2 * v).to(moment)} if more else {}
        return inputs | dict(zip(("master",), stored[1:]))

    def named(tensors: Sequence[Tensor]) -> dict[str, Any]:
        scales = ("m_scale", "v_scale") * eight_bits
        names = ("p", "g", "exp_avg", "exp_avg_sq", *scales, *["largest"] * more, "master")
        return {"master": None, "largest": None} | dict(zip(names, tensors))

    def moments_of(x: dict[str, Any]) -> list[Tensor]:
        if not eight_bits:
            return [x["exp_avg"], x["exp_avg_sq"]]
        pairs = ((x["exp_avg"], x["m_scale"]), (x["exp_avg_sq"], x["v_scale"]))
        return [adamw.decode_moment(c, s.float(), signed=not i) for i, (c, s) in enumerate(pairs)]

    def weights_of(x: dict[str, Any]) -> Tensor:
        if master == torch.int16 and x["master"] is not None:
            return adamw.master_join(x["p"].bfloat16(), x["master"])
        return x["p"] if x["master"] is None else x["master"]

    def at_random(x: Tensor, kind: torch.dtype, i: int = 0) -> Tensor:
        """As far from x as values that are rounded at random may be, on average."""
        if x.dtype != FP32 or kind == FP32:
            return x
        if kind == torch.uint8:
            stored = adamw.decode_moment(*adamw.encode_moment(x, signed=not i), signed=not i)
        else:
            stored = x.to(kind).float()
        return x + 2 * (stored - x)

    def by(step: Callable[..., Any]) -> Callable[..., Any]:
        def function(*tensors: Tensor) -> tuple[Tensor, ...]:
            x = named(tensors)
            of, kind = wide(x["g"].dtype), x["p"].dtype
            w, *moments = (t.to(of).clone() for t in (weights_of(x), *moments_of(x)))
            largest = [x["largest"].to(of).clone()] if more else None
            g, how = x["g"].to(of) * (-0.5 if more else 1), _HYPER | {"lr": _LR, "step": _STEP}
            step([w], [g], *([t] for t in moments), max_exp_avg_sqs=largest, **how)
            if x["master"] is not None:
                p = w if of == FP64 else _masters_of(w, kind, FP32)[0]
            else:
                p = at_random(w, kind)
            stored = [at_random(t, moment, i) for i, t in enumerate((*moments, *(largest or ())))]
            masters = () if x["master"] is None else (w,)
            return p, *stored[:2], *((stored[2], torch.zeros_like(g)) if more else ()), *masters

        return function

    def stock(*lists: Any, max_exp_avg_sqs: Any, step: float, **hyper: Any) -> None:
        steps = [torch.tensor(step, device=lists[0][0].device, dtype=torch.float32)]
        how = hyper | {"amsgrad": more, "maximize": False}
        fused: Any = torch._fused_adamw_
        fused(*lists, max_exp_avg_sqs or [], steps, **how)

    def own(*tensors: Tensor) -> tuple[Tensor, ...]:
        x: dict[str, Any] = {n: t if t is None else t.clone() for n, t in named(tensors).items()}
        p, g, m, v = ([x[name]] for name in ("p", "g", "exp_avg", "exp_avg_sq"))
        columns = {"master_weights": "master", "exp_avg_scales": "m_scale"}
        columns |= {"exp_avg_sq_scales": "v_scale", "max_exp_avg_sqs": "largest"}
        how: dict[str, Any] = {n: [x[of]] for n, of in columns.items() if x.get(of) is not None}
        hyper: dict[str, Any] = _HYPER | {"lr": _LR, "step": _STEP}
        if more:
            scalar = functools.partial(torch.tensor, device=x["p"].device, dtype=torch.float32)
            hyper |= {"lr": scalar(_LR), "step": scalar(_STEP)}
            how |= {"grad_scale": scalar(0.5), "found_inf": scalar(0.0)}
            how |= {"maximize": True, "zero_grad": True}
        seed = 0 if x["p"].dtype == torch.bfloat16 and master is None else None
        how["stochastic_rounding_seed"] = seed
        kernels.adamw_step_(p, g, m, v, kernels.Hyper(**hyper), **how)
        masters = () if x["master"] is None else (weights_of(x),)
        found = x["p"] if masters else x["p"].to(wide(x["p"].dtype))
        rest = (x["largest"].float(), x["g"].float()) if more else ()
        return found, *(t.float() for t in moments_of(x)), *rest, *masters

    def name_of(dtype: Any) -> str:
        return str(dtype).removeprefix("torch.")

    shape = f"P={numel}" + " and more" * more
    shape += "" if len(dtypes) > 1 or dtypes == (FP32,) else f" master {name_of(master)}"
    shape += f" grad {name_of(grad)}" if grad else ""
    shape += f" moments {name_of(moment)}" if moment != FP32 else ""
    outputs: tuple[str, ...] = ("p", "exp_avg", "exp_avg_sq")
    outputs += ("largest", "g") * more
    outputs += ("master",) * (dtypes != (FP32,) and master is not None)
    calls = own, by(reference.adamw_step_ref), by(stock)
    case = OpCase("adamw_step_", shape, make, *calls, outputs, dtypes, differentiable=False)
    # Steps in fp32; what is stored in fewer bits is off by a share of the largest.
    inner = torch.bfloat16 if moment == torch.bfloat16 or master is None else FP32
    return replace(case, inner=inner, stores=1 << 19 if eight_bits else 1)


@makes("adamw_step_")
def adamw_steps(rows: int, size: int, device: str) -> Iterator[OpCase]:
    """One step over rows * 8192 elements (or rows * size), then every way to store its state."""
    # With few values the time is that of the call, 0.07 ms for a whole model at once.
    numel = rows * size if size else min(rows * 8192, 1 << 23)
    yield adamw_case(numel, (FP32, *HALF))
    few = min(numel, 1 << 16)
    yield adamw_case(few, (FP32, *HALF), more=True)
    if backend.choice == "torch":  # torch's AdamW stores its state in one way
        return
    for dtype, masters in _MODES.items():
        for master, moment in itertools.product(masters, (FP32, torch.bfloat16, torch.uint8)):
            able = (None, FP32, *HALF) if master == FP32 else (None, FP32)
            for grad in able if dtype != FP32 else (None,):
                if grad != dtype and (dtype, master, grad, moment) != (FP32, None, None, FP32):
                    yield adamw_case(few, (dtype,), master, grad, moment)


@makes("sum_shards", "global_norm")
def flat_ops(rows: int, size: int, device: str) -> Iterator[OpCase]:
    """Sums of shards, and the norm of a list of two tensors."""
    numel = rows * (size or 768)

    def two(draw: Draw) -> Inputs:
        return {"a": draw(numel // 3), "b": draw(numel - numel // 3)}

    def summed(op: Any, a: Tensor, b: Tensor) -> Tensor:
        out = torch.empty_like(a)
        op(torch.stack([a, b[: a.numel()]]), out, scale=0.5)
        return out

    def normed(op: Any, a: Tensor, b: Tensor) -> Tensor:
        if op is kernels.global_norm:
            return op([a, b], max_norm=1.0).norm
        return torch.cat([a, b]).to(wide(a.dtype)).norm()

    def by_bins(op: Any, a: Tensor, b: Tensor) -> Tensor:
        if op is kernels.global_norm:
            return norm_from_bins(norm_bins([a, b]), max_norm=1.0).norm
        return normed(op, a, b)

    for op, how in (("sum_shards", summed), ("global_norm", normed), ("global_norm", by_bins)):
        own = functools.partial(how, getattr(kernels, op))
        ref = functools.partial(how, getattr(reference, f"{op}_ref"))
        shape = f"P={numel}" + " by bins" * (how is by_bins)
        yield OpCase(op, shape, two, own, ref, ref, ("y",), differentiable=False)


def codes_case(numel: int, block: int) -> OpCase:
    """Values of 8-bit codes in blocks."""

    def make(draw: Draw) -> Inputs:
        codes = (draw(numel).float() * 40).clamp(-127, 127).to(torch.int8)
        return {"codes": codes, "scales": draw(-(-numel // block)).abs().float()}

    op = functools.partial(kernels.dequantize_blockwise, block=block)
    ref = functools.partial(reference.dequantize_blockwise_ref, block=block)
    how: dict[str, Any] = {"dtypes": (FP32,), "differentiable": False}
    shape = f"P={numel} block {block}"
    return OpCase("dequantize_blockwise", shape, make, op, ref, ref, **how)


def quantized_case(numel: int, block: int, *, random: bool = False) -> OpCase:
    """What codes of a tensor say. random: rounded at random, by up to twice the error of rounding
    to nearest, which is the yardstick's."""

    def own(x: Tensor) -> tuple[Tensor, ...]:
        codes, scales = kernels.quantize_blockwise(x, block=block, seed=3 if random else None)
        return reference.dequantize_blockwise_ref(codes, scales, block=block), scales

    def by(stored: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
        def call(x: Tensor) -> tuple[Tensor, ...]:
            v = x.to(wide(x.dtype))
            scales = F.pad(v, (0, -numel % block)).view(-1, block).abs().amax(1) / 127
            return stored(v, scales.repeat_interleave(block)[:numel]), scales

        return call

    def nearest(v: Tensor, scale: Tensor) -> Tensor:
        if v.dtype == FP64:
            return v
        return v + (1 + random) * ((v / scale).round() * scale - v)

    shape = f"P={numel} block {block}" + " random" * random
    calls = own, by(lambda v, scale: v), by(nearest)
    made = functools.partial(OpCase, differentiable=False)
    case = made(
        "quantize_blockwise", shape, lambda draw: {"x": draw(numel)}, *calls, ("value", "scales")
    )
    return replace(case, stores=1 << 18)  # a step of the codes, in roundings of fp32


@makes("quantize_blockwise", "dequantize_blockwise")
def codes(rows: int, size: int, device: str) -> Iterator[OpCase]:
    """Codes of a tensor, and their values."""
    numel = rows * (size or 256)
    at_random = (False, True) if backend.choice != "torch" else (False,)  # torch has none
    for random in at_random:
        yield quantized_case(numel, 256, random=random)
    yield codes_case(numel, 256)


# Products


def linear_case(N: int, C: int, out: int, *, bias: bool = True) -> OpCase:
    """linear, whose weight has the size of x."""

    def make(draw: Draw) -> Inputs:
        inputs = {"x": draw(N, C), "weight": draw(out, C) * C**-0.5}
        return inputs | ({"bias": draw(out)} if bias else {})

    product = 2.0 * N * C * out
    shape = f"N={N} {C}->{out}" + ("" if bias else " no bias")
    return _case(kernels.linear, shape, make, F.linear, flops=(product, 2 * product))


@makes("linear", proven=False)
def linears(rows: int, size: int, device: str) -> Iterator[OpCase]:
    """GPT-2's layers without the last one, and a column of 127."""
    for C, out in ((size, 3 * size), (4 * size, size), (127, 1)):
        yield linear_case(rows, C, out)


def linear_fp8_case(N: int, C: int, out: int, scaling: str, how: str = "") -> OpCase:
    """scaling: "row", "block", "tensor", "tensor fp8"; how: "spread rows". The oracle is the
    emulation in fp64."""
    form, _, of_weight = scaling.partition(" ")  # and the format in a weight gradient

    def make(draw: Draw) -> Inputs:
        x = draw(N, C)
        if how:
            spread = torch.logspace(-6, 6, N, dtype=torch.float32, device="cpu")
            x = x * spread[:, None].to(x)
        return {"x": x, "weight": draw(out, C) * C**-0.5, "bias": draw(out)}

    def emulated(x: Any, w: Any, b: Any, emulate: bool = True) -> Tensor:
        scales = kernels.DelayedScales(1)
        scales.load_state_dict({"history": [[[8.0] * 3]], "steps": 1})  # largest values
        kind: Any = (form, of_weight or "bf16", emulate, scales if form == "tensor" else None)
        return kernels.linear(x, w, b, fp8=kernels.Fp8(*kind))

    def own(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return emulated(x, w, b, x.is_cpu and not backend.recording)

    shape, product = f"N={N} {C}->{out} {scaling} {how}".strip(), 2.0 * N * C * out
    calls, bf16 = (own, emulated, emulated), (torch.bfloat16,)
    case = OpCase("linear_fp8", shape, make, *calls, dtypes=bf16, stock=F.linear)
    return replace(case, flops=(product, 2 * product))


@makes("linear_fp8")
def linears_fp8(rows: int, size: int, device: str) -> Iterator[OpCase]:
    """Layers with products in 8 bits; compared with bf16."""
    for scaling in ("row", "block", "tensor", "tensor fp8"):
        for out, how in ((4 * size, ""), (size, ""), (16, "spread rows")):
            yield linear_fp8_case(rows, size, out, scaling, how)


def newton_schulz(x: Tensor, coefficients: Any = POLAR_EXPRESS) -> Tensor:
    """The steps of orthogonalize in torch's products."""
    y = x.to(torch.promote_types(x.dtype, FP32))
    y = (y / y.norm()).to(x.dtype)
    y = y.T if x.shape[0] > x.shape[1] else y
    for a, b, c in coefficients:
        gram = y @ y.T
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y.T if x.shape[0] > x.shape[1] else y


def orthogonal_case(m: int, n: int, coefficients: Any = POLAR_EXPRESS, *, many: int = 1) -> OpCase:
    """The orthogonal factor of a random matrix, compared with plain products; no gradient. many: of
    as many copies, which a GPU takes through the steps together."""
    how: dict[str, Any] = {"coefficients": tuple(coefficients)}
    steps = functools.partial(newton_schulz, **how)
    ref = functools.partial(reference.orthogonalize_ref, **how)
    calls = (lambda x: orthogonalize_each([x] * many, **how, dtype=x.dtype)[-1]), ref, steps
    about: dict[str, Any] = {"in_fp64": True, "differentiable": False, "formula": steps}
    about |= {"dtypes": (FP32, torch.bfloat16), "elements": (15.0 * (m * n + m * m), 0.0)}
    shape = f"{m}x{n}" + f" of {many}" * (many > 1)
    return OpCase("orthogonalize", shape, lambda draw: {"x": draw(m, n)}, *calls, **about)


@makes("orthogonalize", proven=False)
def orthogonals(rows: int, size: int, device: str) -> Iterator[OpCase]:
    """One matrix."""
    yield orthogonal_case(rows, size)


# Proofs


FEW_ROWS = 64  # of the hostile cases
MANY_ELEMENTS = 1 << 22  # of a tensor: more than the tiles of all programs of a grid hold
_MANY_ROWS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "attention": ((320, 4096), {}),  # 5 tiles of 64; 4 x 1024: more pairs of tiles than SMs
    "attention_masked": ((320,), {}),
    "cross_entropy": ((208,), {}),
    "dropout": ((208,), {}),
    "linear_cross_entropy": ((208,), {"chunk_rows": 48}),
    # 20 tokens, each of which fills several stretches of the sorted ids
    "embedding": ((2048,), {"B": 2, "V": 64}),
}


def proof_cases(op: str, size: int, device: str, rows: int) -> list[OpCase]:
    """The cases that prove an op for tensors of this last dimension: a plain case with `rows` rows
    first, which can be timed, then hostile ones, on a GPU also those of many rows; none for an op
    without a proof."""
    if op not in MAKERS or op in UNPROVEN:
        return []
    found = cases_of(op, rows, size, device)[:1]
    for one in (op, *(part for part, whole in PARTS.items() if whole == op and part in MAKERS)):
        found += cases_of(one, FEW_ROWS, size, device)
        found += cases_of_many_rows(one, size, device) if device == "cuda" else []
    return found


def cases_of_many_rows(op: str, size: int, device: str) -> list[OpCase]:
    """Cases beyond FEW_ROWS: a kernel's loop over tiles and its last, partial one, a second round
    of its programs, sums of partials, products that are added up. All sizes are multiples of 16, as
    FEW_ROWS is, so that these launch the same compiled kernels."""
    known = {case.shape for case in cases_of(op, FEW_ROWS, size, device)}
    known.add("N=5 C=16384")  # rows that norms read twice: different kernels than this size's
    rows, how = _MANY_ROWS.get(op, ((208, 1024) if size else (4096,), {}))
    if op in ("bias_gelu", "relu2", "swiglu") or op.endswith("_norm"):
        rows = 208, max(1024, MANY_ELEMENTS // size // 16 * 16)
    found = [case for n in rows for case in cases_of(op, n, size, device, **how)]
    return list({case.shape: case for case in found if case.shape not in known}.values())
