"""What ops are judged by: their errors, cases of plain and hostile inputs, and proofs made of them.

An error is measured against fp64 beside that of plain PyTorch in the same dtype. A case is an op
at one shape, with its oracle and with what stock PyTorch computes. Benches make ledgers of cases;
a machine's proof of an op (proof_cases) has those of one size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpar.kernels import (
    DelayedScales,
    Fp8,
    Hyper,
    Rng,
    accumulate_,
    adamw_step_,
    attention,
    backend,
    bias_gelu,
    combine,
    cross_entropy,
    dropout,
    embedding,
    global_norm,
    grouped_linear,
    layer_norm,
    linear,
    linear_cross_entropy,
    make_key,
    pack_,
    permute,
    reference,
    residual_layer_norm,
    residual_rms_norm,
    rms_norm,
    route,
    sum_shards,
    unpack_,
)
from fastpar.kernels.backend import wide
from fastpar.kernels.linear import weight_gradient, wide_product


class Errors(NamedTuple):
    """Errors of one result against fp64, over all elements that are finite there."""

    max: float
    rms: float
    eager_max: float  # of plain PyTorch in the same dtype
    eager_rms: float
    rounding: float  # of the largest value to the result's dtype: eps / 2 * max|oracle|
    numel: int
    condition: float = 0.0  # see bound; measured where the rest of it is not enough

    @property
    def bound(self) -> float:
        """Twice what plain PyTorch's error and the condition are, and one rounding of the result.

        The largest value of a result that was exact until it was stored can be off by that
        rounding. PyTorch's error alone is no yardstick: it depends on the CPU's libraries, and is
        small by luck where few elements are compared. The condition depends on the inputs only: it
        is how far the exact result moves when each input is rounded once, in fp32 (fp64 for fp64).
        Results of a stable algorithm are those of inputs that are off by a few such roundings.
        """
        return 2.0 * (self.eager_max + self.condition) + self.rounding


def measure_errors(
    fn: Callable[..., Any],
    ref: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    eager: Callable[..., Any] | None = None,
    grad: bool = True,
    seed: int = 0,
) -> dict[str, Errors]:
    """The errors of fn and of eager (default: ref) against ref on fp64 copies of the inputs.

    For every output and for the gradient of every input with requires_grad; one random cotangent
    for all three.

    Args:
        fn, ref, eager: take *inputs, return a tensor or a tuple of tensors.
        inputs: tensors and other arguments; floating-point tensors are upcast for the oracle, the
            rest is passed on.
        grad: also compare gradients of the inputs that require them.
        seed: of the cotangents.
    Returns:
        "output 0", "gradient of input 0", ... -> Errors; results without elements are left out.
    Raises:
        AssertionError: on a missing result, a wrong shape or dtype, and where not both are finite.
    """
    truth = evaluate(ref, inputs, grad, seed, double=True)
    base = evaluate(eager or ref, inputs, grad, seed)
    ours = evaluate(fn, inputs, grad, seed)
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
        measured[name] = Errors(
            *_max_and_rms(got, exact),
            *_max_and_rms(plain, exact),
            0.5 * torch.finfo(got.dtype).eps * magnitude,
            exact.numel(),
        )
    if any(errors.max > errors.bound for errors in measured.values()):
        for draw in range(3):  # of few elements one draw may leave little
            moved = [_rounded(x, draw) for x in inputs]
            values = evaluate(ref, moved, grad, seed, double=True)
            for name, errors in measured.items():
                change, _ = _max_and_rms(values[name], truth[name])
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


def _max_and_rms(value: Tensor, exact: Tensor) -> tuple[float, float]:
    difference = (value.double() - exact)[exact.isfinite()].abs().nan_to_num(nan=float("inf"))
    if not difference.numel():
        return 0.0, 0.0
    return difference.max().item(), difference.square().mean().sqrt().item()


def evaluate(
    fn: Callable[..., Any],
    inputs: Sequence[Any],
    grad: bool = True,
    seed: int = 0,
    *,
    double: bool = False,
) -> dict[str, Tensor]:
    """Outputs and gradients of fn on detached copies of the inputs, strides kept; arguments and
    names of results as measure_errors has them."""
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
        generator = torch.Generator(device).manual_seed(seed)
        smooth = [o for o in outputs if o.requires_grad]
        drawn = [
            torch.randn(o.shape, generator=generator, dtype=torch.float32, device=device)
            for o in smooth
        ]
        # Rounded to bf16 first: exact in every dtype, so that all three see the same cotangent.
        dy = [d.bfloat16().to(o.device, o.dtype) for d, o in zip(drawn, smooth)]
        grads = torch.autograd.grad(smooth, list(leaves.values()), dy, allow_unused=True)
        results |= {f"gradient of input {i}": g for i, g in zip(leaves, grads) if g is not None}
    return results


# Cases


P = 0.1  # of dropout
LOGIT_STD = 3.0  # a spread like that of a trained model: some tokens are likely
Inputs = dict[str, Any]
Draw = Callable[..., Tensor]  # draw(*shape): standard normal, of the case's dtype and device


@dataclass
class ErrorCase:
    """One op at one shape. fn, ref and eager take the inputs in the order of make's dictionary."""

    op: str
    shape: str
    make: Callable[[Draw], Inputs]
    fn: Callable[..., Any]
    ref: Callable[..., Any]
    eager: Callable[..., Any]
    outputs: tuple[str, ...] = ("y",)
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    stock: Callable[..., Any] | None = None  # timed in the place of eager, for other results

    def inputs(self, dtype: torch.dtype, device: str) -> Inputs:
        """The same ones in every call, by name; floating-point tensors ask for gradients."""
        generator = torch.Generator(device).manual_seed(5)

        def draw(*shape: int) -> Tensor:
            x = torch.randn(shape, generator=generator, dtype=torch.float32, device=device)
            return x.to(dtype)

        def leaf(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            value = value.to(device)
            return value.requires_grad_() if value.is_floating_point() else value

        return {name: leaf(value) for name, value in self.make(draw).items()}

    def measure(self, dtype: torch.dtype, device: str) -> dict[str, Errors]:
        """Result -> its errors: "y", "dx", ..."""
        inputs = self.inputs(dtype, device)
        measured = measure_errors(self.fn, self.ref, list(inputs.values()), eager=self.eager)
        return self._by_name(inputs, measured)

    def results(self, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
        """Result -> its value in one call of the op."""
        inputs = self.inputs(dtype, device)
        return self._by_name(inputs, evaluate(self.fn, list(inputs.values())))

    def _by_name(self, inputs: Inputs, found: dict[str, Any]) -> dict[str, Any]:
        names = {f"output {i}": name for i, name in enumerate(self.outputs)}
        names |= {f"gradient of input {i}": f"d{name}" for i, name in enumerate(inputs)}
        return {names[result]: value for result, value in found.items()}


def _case(
    op: Callable[..., Any],
    shape: str,
    make: Callable[[Draw], Inputs],
    eager: Callable[..., Any] | None = None,
    outputs: tuple[str, ...] = ("y",),
    stock: Callable[..., Any] | None = None,
    **settings: Any,
) -> ErrorCase:
    """Of an op whose oracle has its name: settings are of both. eager: None is the oracle."""
    ref = functools.partial(getattr(reference, f"{op.__name__}_ref"), **settings)
    fn = functools.partial(op, **settings)
    return ErrorCase(op.__name__, shape.strip(), make, fn, ref, eager or ref, outputs, stock=stock)


def _dropped(p: float, device: str, stream: int) -> dict[str, Any]:
    """The settings of an op with dropout p, none for 0."""
    return {"dropout_p": p, "rng": Rng(make_key(1, 0, device), stream)} if p else {}


def _generators_kept(x: Tensor) -> AbstractContextManager[None]:
    """Torch's default generators give the same numbers after it as before."""
    return torch.random.fork_rng([x.device] if x.is_cuda else [])


def norms(rows: int, widths: tuple[int, ...], device: str) -> Iterator[ErrorCase]:
    """Norms of plain and hostile rows, alone and after a residual add."""

    def stream(draw: Draw, N: int, C: int, how: str) -> Tensor:
        if how == "strided rows":
            return draw(N, 2 * C)[:, :C]
        x = draw(N, C)
        return x + 100 if how == "mean 100 std" else x * 1e-3 if how == "std 1e-3" else x

    def stock(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if bias is None:
            return F.rms_norm(x, weight.shape, weight, 1e-6)
        return F.layer_norm(x, weight.shape, weight, bias)

    def plain(N: int, C: int, how: str, *, rms: bool) -> ErrorCase:
        def make(draw: Draw) -> Inputs:
            inputs = {"x": stream(draw, N, C, how), "weight": 1 + 0.1 * draw(C)}
            return inputs if rms else {**inputs, "bias": 0.1 * draw(C)}

        return _case(rms_norm if rms else layer_norm, f"N={N} C={C} {how}", make, stock)

    def residual(N: int, C: int, p: float, *, rms: bool) -> ErrorCase:
        settings = _dropped(p, device, 2)
        names = ["x", "residual", "weight", "x_bias"] + ([] if rms else ["bias"])

        def make(draw: Draw) -> Inputs:
            streams = {"x": draw(N, C), "residual": draw(N, C)}
            return streams | {n: (n == "weight") + 0.1 * draw(C) for n in names[2:]}

        def by_name(op: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *values: op(**dict(zip(names, values)), **settings)

        def eager(x, residual, weight, x_bias, bias=None, **_):
            x = x + x_bias
            if p:
                x = reference.dropout_ref(x, p, settings["rng"])
            total = residual + x
            return stock(total, weight, bias), total

        op = residual_rms_norm if rms else residual_layer_norm
        ref = reference.residual_rms_norm_ref if rms else reference.residual_layer_norm_ref
        shape = f"N={N} C={C} x_bias" + (f" dropout {P}" if p else "")
        calls = by_name(op), by_name(ref), by_name(eager)
        return ErrorCase(op.__name__, shape, make, *calls, ("y", "residual_out"))

    for rms in (False, True):
        for C in widths:
            yield plain(rows, C, "", rms=rms)
        for how in ("mean 100 std", "std 1e-3", "strided rows"):
            yield plain(min(rows, 127), widths[0], how, rms=rms)
        for N, C in ((63, 16), (1, 127), (63, 1000)) + (((5, 16384),) if rows > 127 else ()):
            yield plain(min(rows, N), C, "", rms=rms)
        yield residual(rows, widths[0], 0.0, rms=rms)
        yield residual(min(rows, 63), 127, 0.0, rms=rms)
        # The oracle draws its mask in Python, one Philox call after another.
        yield residual(min(rows, 96), widths[0], P, rms=rms)


def gelus(rows: int, widths: tuple[int, ...]) -> Iterator[ErrorCase]:
    """Both forms of GELU with a bias."""

    def one(name: str, N: int, width: int, scale: float) -> ErrorCase:
        how: dict[str, Any] = {"approximate": "none" if name == "erf" else name}
        shape = f"{name} N={N} F={width}" + (f" std {scale:g}" if scale != 1 else "")

        def make(draw: Draw) -> Inputs:
            return {"x": draw(N, width) * scale, "bias": draw(width)}

        return _case(bias_gelu, shape, make, lambda x, b: F.gelu(x + b, **how), **how)

    for name in ("tanh", "erf"):
        for width in widths:
            yield one(name, rows, width, 1.0)
        yield one(name, 63, 127, 30.0)


def losses(
    rows: int, shapes: tuple[tuple[int, int, int], ...], chunk_rows: int | None = None
) -> Iterator[ErrorCase]:
    """shapes: (C, vocabulary, its padding); chunk_rows: of linear_cross_entropy."""
    known: dict[str, dict[str, Any]] = {
        "smoothing 0.1": {"label_smoothing": 0.1},
        "z-loss 0.01": {"z_loss": 0.01},
        "no reduction": {"reduction": "none"},
        "all ignored": {"reduction": "sum"},
    }

    def stock(logits: Tensor, targets: Tensor, z_loss: float = 0.0, **settings: Any) -> Tensor:
        loss = F.cross_entropy(logits.float(), targets, **settings)
        if z_loss:
            loss = loss + z_loss * logits.float().logsumexp(-1)[targets != -100].square().mean()
        return loss

    def targets_of(logits: Tensor, how: str) -> Tensor:
        """Drawn from the model's own distribution, so that losses and gradients differ by row."""
        generator = torch.Generator(logits.device).manual_seed(7)
        probs = torch.softmax(logits.float(), -1)
        targets = torch.multinomial(probs, 1, generator=generator)[:, 0]
        if how == "logits 1e4":  # where the loss is not 0
            targets = torch.arange(len(probs), device=probs.device) % probs.shape[1]
        targets[::5] = -100
        return torch.full_like(targets, -100) if how == "all ignored" else targets

    def on_logits(N: int, V: int, pad: int, how: str) -> ErrorCase:
        def make(draw: Draw) -> Inputs:
            logits = draw(N, V + pad) * (1e4 if how == "logits 1e4" else LOGIT_STD)
            if how == "-inf logits":
                third = torch.arange(V + pad, device=logits.device) % 3 == 0
                logits = logits.masked_fill(third, -torch.inf)
            return {"logits": logits, "targets": targets_of(logits[:, :V], how)}

        settings, shape = known.get(how, {}), f"N={N} V={V}+{pad} {how}"

        def eager(logits: Tensor, targets: Tensor) -> Tensor:
            return stock(logits[:, :V], targets, **settings)

        return _case(cross_entropy, shape, make, eager, ("loss",), vocab_size=V, **settings)

    def fused(N: int, C: int, V: int, pad: int, how: str) -> ErrorCase:
        def make(draw: Draw) -> Inputs:
            x = draw(N, C)
            weight = draw(V + pad, C) * (100.0 if how == "large logits" else LOGIT_STD * C**-0.5)
            logits = (x.float() @ weight[:V].float().T).to(x.dtype)
            return {"x": x, "weight": weight, "targets": targets_of(logits, how)}

        settings, shape = known.get(how, {}), f"N={N} C={C} V={V}+{pad} {how}"

        def eager(x: Tensor, w: Tensor, targets: Tensor) -> Tensor:
            return stock(F.linear(x, w[:V]), targets, **settings)

        op = linear_cross_entropy
        case = _case(op, shape, make, eager, ("loss",), vocab_size=V, **settings)
        if chunk_rows:
            case.shape += f" in chunks of {chunk_rows}"
            case.fn = functools.partial(case.fn, chunk_rows=chunk_rows)
        return case

    for C, V, pad in shapes:
        yield on_logits(rows, V, pad, "")
        yield fused(rows, C, V, pad, "")
    C, V, pad = shapes[-1]
    small = min(rows, 63), min(V, 1000)
    for how in ("logits 1e4", "-inf logits", *known):
        yield on_logits(*small, 7, how)
    for how in ("large logits", *known):
        yield fused(small[0], C, small[1], 24, how)


def attentions(
    shapes: tuple[tuple[int, ...], ...], device: str, p: float = 0.0
) -> Iterator[ErrorCase]:
    """shapes: (B, T, Tk, H, Hkv, D), with dropout p; then documents and hostile ones.

    Beside each stands the formula, as nanoGPT writes it without flash attention.
    """

    def one(
        B: int, T: int, Tk: int, H: int, Hkv: int, D: int, *, p: float = 0.0,
        scale: float = 1.0, causal: bool = True,
    ) -> ErrorCase:  # fmt: skip
        def make(draw: Draw) -> Inputs:
            q, k = (draw(*shape) * scale for shape in ((B, T, H, D), (B, Tk, Hkv, D)))
            return {"q": q, "k": k, "v": draw(B, Tk, Hkv, D)}

        def stock(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            how: dict[str, Any] = {"is_causal": causal, "dropout_p": p, "enable_gqa": Hkv != H}
            with _generators_kept(q):
                return F.scaled_dot_product_attention(q, k, v, **how).transpose(1, 2)

        shape = f"B={B} T={T} D={D} H={H}" + (f" Tk={Tk}" if Tk != T else "")
        shape += f" Hkv={Hkv}" if Hkv != H else ""
        shape += "" if causal else " full"
        shape += f" scores {scale**2:g}" if scale != 1 else ""
        shape += f" dropout {p}" if p else ""
        settings = {"causal": causal, **_dropped(p, device, 3)}
        return _case(attention, shape, make, outputs=("o",), stock=stock, **settings)

    def documents(T: int, H: int, D: int) -> ErrorCase:
        ends = [0, 1, T // 3, T // 3 + 2, T]
        settings: dict[str, Any] = {}
        settings["cu_seqlens"] = torch.tensor(ends, dtype=torch.int32, device=device)
        shape = f"documents up to {ends}, D={D} H={H}"

        def make(draw: Draw) -> Inputs:
            return {name: draw(T, H, D) for name in ("q", "k", "v")}

        return _case(attention, shape, make, outputs=("o",), **settings)

    for shape in shapes:
        yield one(*shape, p=p)
    B, T, _, H, _, D = shapes[0]
    yield documents(min(T, 300), H, D)
    T = min(T, 96)
    yield one(B, T, T, H, H, D, causal=False)
    yield one(B, T, T, H, H, D, scale=6.0)
    yield one(1, min(T, 48), min(T, 48), H, H, D, p=P)


def embeddings(B: int, T: int, widths: tuple[int, ...], V: int, device: str) -> Iterator[ErrorCase]:
    """Token and position embedding; some tokens repeat."""

    def one(b: int, t: int, C: int, p: float) -> ErrorCase:
        settings = _dropped(p, device, 4)

        def make(draw: Draw) -> Inputs:
            idx = (draw(b, t).float().abs() * V / 8).long().clamp(max=V - 1)  # some tokens repeat
            return {"idx": idx, "wte": draw(V, C), "wpe": draw(t, C)}

        def eager(idx: Tensor, wte: Tensor, wpe: Tensor) -> Tensor:
            x = F.embedding(idx, wte) + wpe
            return reference.dropout_ref(x, p, settings["rng"]) if p else x

        shape = f"B={b} T={t} C={C} V={V}" + (f" dropout {p}" if p else "")
        return _case(embedding, shape, make, eager, **settings)

    for C in widths:
        yield one(B, T, C, 0.0)
    yield one(2, min(T, 48), widths[0], P)
    yield one(1, 1, 63, 0.0)


def experts(rows: int, C: int) -> Iterator[ErrorCase]:
    """The ops of 8 experts: their choice, tokens there and back, layers with an empty group."""
    E, K = 8, 2
    generator = torch.Generator().manual_seed(3)
    chances = torch.rand(rows, E, generator=generator, dtype=torch.float32, device="cpu")
    choices = chances.argsort(-1)[:, :K]

    def eager(x: Tensor, weight: Tensor, bias: Tensor, counts: Tensor) -> Tensor:
        parts = zip(x.split(counts.tolist()), weight, bias)
        return torch.cat([F.linear(part, w, b) for part, w, b in parts])

    def mix(x: Tensor, weights: Tensor, order: Tensor) -> Tensor:
        scaled = x.to(weights.dtype) * weights.flatten()[order, None]
        mixed = scaled.new_zeros(len(weights), C).index_add(0, order // K, scaled)
        return mixed.to(x.dtype)

    def sums(draw: Draw) -> Inputs:
        x, order, _ = permute(draw(rows, C), choices.to(draw(1).device), E)
        return {"rows": x, "weights": draw(rows, K).abs().to(wide(x.dtype)), "order": order}

    def layers(draw: Draw) -> Inputs:
        counts = torch.bincount(choices.flatten(), minlength=E)
        counts[1], counts[0] = 0, counts[0] + counts[1]
        x, weight = draw(rows * K, C), draw(E, 2 * C, C) * C**-0.5
        counts = counts.to(x.device)
        return {"x": x, "weight": weight, "bias": draw(E, 2 * C), "counts": counts}

    yield ErrorCase(
        "route",
        f"N={rows} E={E} K={K}",
        lambda draw: {"logits": draw(rows, E).float()},
        lambda logits: route(logits, K)[0],
        lambda logits: reference.route_ref(logits, K)[0],
        lambda logits: logits.topk(K, -1).values.softmax(-1),
        dtypes=(torch.float32,),
    )
    yield ErrorCase(
        "permute",
        f"N={rows} C={C} K={K}",
        lambda draw: {"x": draw(rows, C), "experts": choices.to(draw(1).device)},
        lambda x, numbers: permute(x, numbers, E)[0],
        lambda x, numbers: reference.permute_ref(x, numbers.cpu(), E)[0],
        lambda x, numbers: x[numbers.flatten().argsort(stable=True) // K],
    )
    yield _case(combine, f"N={rows} C={C} K={K}", sums, mix)
    yield _case(grouped_linear, f"M={rows * K} E={E} {C}->{2 * C}", layers, eager)


def dropouts(shape: tuple[int, ...], device: str) -> Iterator[ErrorCase]:
    """Dropout by the counter-based mask."""
    rng = Rng(make_key(1, 0, device), 5)

    def eager(x: Tensor) -> Tensor:
        keep = reference.keep_mask_ref(rng, P, tuple(x.shape)).to(x.device, x.dtype)
        return x * keep * (256 / (256 - round(256 * P)))

    def stock(x: Tensor) -> Tensor:
        with _generators_kept(x):
            return F.dropout(x, P)

    how: dict[str, Any] = {"p": P, "rng": rng}
    name = f"{list(shape)} p={P}"
    yield _case(dropout, name, lambda draw: {"x": draw(*shape)}, eager, stock=stock, **how)


def adamw_steps(numel: int) -> Iterator[ErrorCase]:
    """One step over so many elements, beside torch's fused one."""
    hyper: dict[str, Any] = {"lr": 6e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
    hyper["weight_decay"] = 0.1

    def make(draw: Draw) -> Inputs:
        p, g, m, v = (draw(numel).float() for _ in range(4))
        return {"p": p, "g": g, "exp_avg": m, "exp_avg_sq": v.square()}

    def by(step: Callable[..., Any]) -> Callable[..., Any]:
        def function(*tensors: Tensor) -> tuple[Tensor, ...]:
            p, g, m, v = (t.detach().clone() for t in tensors)
            step([p], [g], [m], [v])
            return p, m, v

        return function

    def ours(p: Any, g: Any, m: Any, v: Any) -> None:
        adamw_step_(p, g, m, v, Hyper(**hyper, step=10))

    def fused(p: Any, g: Any, m: Any, v: Any) -> None:
        step = torch.tensor(10.0, device=p[0].device, dtype=torch.float32)
        torch._fused_adamw_(p, g, m, v, [], [step], **hyper, amsgrad=False, maximize=False)

    outputs = ("p", "exp_avg", "exp_avg_sq")
    calls = by(ours), by(functools.partial(reference.adamw_step_ref, **hyper, step=10)), by(fused)
    yield ErrorCase("adamw_step_", f"P={numel}", make, *calls, outputs, (torch.float32,))


def flat_ops(numel: int) -> Iterator[ErrorCase]:
    """Ops of buckets and of the norm: a list of two tensors, or flat memory."""

    def two(draw: Draw) -> Inputs:
        return {"a": draw(numel // 3), "b": draw(numel - numel // 3)}

    def packed(op: Callable[..., None], a: Tensor, b: Tensor) -> Tensor:
        flat = a.new_empty(a.numel() + b.numel())
        op(flat, [a, b], scale=0.5)
        return flat

    def unpacked(op: Callable[..., None], a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        results = [torch.empty_like(t) for t in (a, b)]
        op(results, torch.cat([a, b]), scale=0.5)
        return tuple(results)

    def accumulated(op: Callable[..., None], a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        totals = [t.clone() for t in (a, b)]
        op(totals, [a, b], scale=0.5)
        return tuple(totals)

    def summed(op: Callable[..., None], a: Tensor, b: Tensor) -> Tensor:
        out = torch.empty_like(a)
        op(torch.stack([a, b[: a.numel()]]), out, scale=0.5)
        return out

    def norm(op: Callable[..., Tensor], a: Tensor, b: Tensor) -> Tensor:
        return op([a, b])

    def norm_ref(tensors: list[Tensor]) -> Tensor:
        return torch.cat(tensors).to(wide(tensors[0].dtype)).norm()

    def without_gradient(how: Any, op: Any) -> Callable[..., object]:
        return lambda a, b: how(op, a.detach(), b.detach())

    pairs: dict[str, tuple[Any, Any, Any]] = {
        "pack_": (packed, pack_, reference.pack_ref),
        "unpack_": (unpacked, unpack_, reference.unpack_ref),
        "accumulate_": (accumulated, accumulate_, reference.accumulate_ref),
        "sum_shards": (summed, sum_shards, reference.sum_shards_ref),
        "global_norm": (norm, lambda two: global_norm(two, max_norm=1.0)[0], norm_ref),
    }
    for op, (how, *both) in pairs.items():
        outputs = ("a", "b") if op in ("unpack_", "accumulate_") else ("y",)
        ours, ref = (without_gradient(how, one) for one in both)
        yield ErrorCase(op, f"P={numel}", two, ours, ref, ref, outputs)


def weight_gradients(rows: int, shapes: tuple[tuple[int, int], ...]) -> Iterator[ErrorCase]:
    """Of a linear layer of (C, outputs), kept in fp32, beside one rounded to 16 bits first; then
    that of two micro-batches, the second added to the first."""

    def product(dy: Tensor, x: Tensor) -> Tensor:
        return dy.detach().t() @ x.detach()

    def halves(dy: Tensor, x: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(dy.detach().chunk(2), x.detach().chunk(2))

    def added(dy: Tensor, x: Tensor) -> Tensor:
        (dy1, x1), (dy2, x2) = halves(dy, x)
        return wide_product(dy2.t(), x2, weight_gradient(dy1, x1), add=True)

    def plain(dy: Tensor, x: Tensor) -> Tensor:
        return weight_gradient(dy.detach(), x.detach())

    def rounded(dy: Tensor, x: Tensor) -> Tensor:
        return product(dy, x).float()

    def sum_of_rounded(dy: Tensor, x: Tensor) -> Tensor:
        first, second = (rounded(*part) for part in halves(dy, x))
        return first + second

    for own, eager, how in ((plain, rounded, ""), (added, sum_of_rounded, " added")):
        for C, out in shapes:

            def make(draw: Draw, C: int = C, out: int = out) -> Inputs:
                return {"dy": draw(rows, out), "x": draw(rows, C)}

            calls, dtypes = (own, product, eager), (torch.bfloat16, torch.float16)
            shape = f"N={rows} {C}->{out}{how}"
            yield ErrorCase("weight_gradient", shape, make, *calls, ("dweight",), dtypes)


def linears_fp8(rows: int, C: int) -> Iterator[ErrorCase]:
    """Layers with products in 8 bits, whose oracle is their emulation in fp64; beside bf16."""

    def one(scaling: str, out: int, how: str) -> ErrorCase:
        form, _, of_weight = scaling.partition(" ")  # and the format in a weight gradient

        def make(draw: Draw) -> Inputs:
            x = draw(rows, C)
            if how:
                spread = torch.logspace(-6, 6, rows, dtype=torch.float32, device="cpu")
                x = x * spread[:, None].to(x)
            return {"x": x, "weight": draw(out, C) * C**-0.5, "bias": draw(out)}

        def emulated(x: Any, w: Any, b: Any, emulate: bool = True) -> Tensor:
            scales = DelayedScales(1)
            scales.load_state_dict({"history": [[[8.0] * 3]], "steps": 1})  # largest values
            kind: Any = (form, of_weight or "bf16", emulate, scales if form == "tensor" else None)
            return linear(x, w, b, fp8=Fp8(*kind))

        def own(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
            return emulated(x, w, b, x.is_cpu and not backend.recording)

        shape = f"N={rows} {C}->{out} {scaling} {how}".strip()
        calls, bf16 = (own, emulated, emulated), (torch.bfloat16,)
        return ErrorCase("linear_fp8", shape, make, *calls, dtypes=bf16, stock=F.linear)

    for scaling in ("row", "block", "tensor", "tensor fp8"):
        for out, how in ((4 * C, ""), (C, ""), (16, "spread rows")):
            yield one(scaling, out, how)


# Proofs


FEW_ROWS = 64  # of the hostile cases
MANY_ELEMENTS = 1 << 22  # of a tensor: more than the tiles of all programs of a grid hold
HEADS = 12  # GPT-2's


def _attention_proofs(n: int, head_dim: int, device: str, *, masked: bool) -> Iterator[ErrorCase]:
    """Plain attention, or attention with dropout or documents; see kernels/attention.py _case."""
    T = min(n, 1024)
    heads = HEADS if n > 320 else 2 if masked else 4  # a mask's oracle is drawn in Python
    shape = (-(-n // 1024), T, T, heads, heads, head_dim)
    for case in attentions((shape,), device, p=P if masked else 0.0):
        if masked == ("dropout" in case.shape or "documents" in case.shape):
            yield case


def _losses(rows: int, size: int, chunk_rows: int | None = None) -> Iterator[ErrorCase]:
    return losses(rows, ((64, size - size // 64, size // 64),), chunk_rows)


def _builders(size: int, device: str) -> dict[str, Callable[[int], Iterator[ErrorCase]]]:
    """op -> its cases of so many rows, a plain one first."""
    return {
        **dict.fromkeys(
            ("layer_norm", "rms_norm", "residual_layer_norm", "residual_rms_norm"),
            lambda n: norms(n, (size,), device),
        ),
        "bias_gelu": lambda n: gelus(n, (size,)),
        "linear_fp8": lambda n: linears_fp8(n, size),
        "grouped_linear": lambda n: experts(n, size),
        "weight_gradient": lambda n: weight_gradients(n, ((size, 3 * size), (size, 8))),
        "embedding": lambda n: embeddings(1, n, (size,), 4096, device),
        "attention": lambda n: _attention_proofs(n, size, device, masked=False),
        "attention_masked": lambda n: _attention_proofs(n, size, device, masked=True),
        **dict.fromkeys(("cross_entropy", "linear_cross_entropy"), lambda n: _losses(n, size)),
        "dropout": lambda n: dropouts((1, n, 48), device),
        # Of few values the time is that of the call, 0.07 ms for all of a model's at once.
        "adamw_step_": lambda n: adamw_steps(min(n * 8192, 1 << 23)),
        **dict.fromkeys(
            ("pack_", "unpack_", "accumulate_", "sum_shards", "global_norm"),
            lambda n: flat_ops(n * 768),
        ),
    }


def proof_cases(op: str, size: int, device: str, rows: int) -> list[ErrorCase]:
    """What an op is proven with for tensors of this last dimension: a plain case of so many rows
    first, which can be timed, then hostile ones, on a GPU also those of many rows; none for an op
    that has no proof."""
    build = _builders(size, device).get(op)
    if build is None:
        return []
    name = op.removesuffix("_masked")
    timed, *_ = (case for case in build(rows) if case.op == name)
    few = [case for case in build(FEW_ROWS) if case.op == name]
    return [timed, *few, *(cases_of_many_rows(op, size, device) if device == "cuda" else ())]


def cases_of_many_rows(op: str, size: int, device: str) -> list[ErrorCase]:
    """What FEW_ROWS do not reach: a kernel's loop over tiles and its last, partial one, a second
    round of its programs, sums of what they leave behind, products that are added up.

    All sizes are multiples of 16, as FEW_ROWS is, so that these launch the same compiled kernels.
    """
    build = _builders(size, device)[op]
    rows: tuple[int, ...] = (208, 1024)
    known = {case.shape for case in build(FEW_ROWS)}
    known.add("N=5 C=16384")  # rows that norms read twice: other kernels than this size's
    if op == "attention":
        rows = 320, 4096  # five tiles of 64, and 4 x 1024: more pairs of tiles than a GPU has SMs
    elif op == "attention_masked":
        rows = (320,)
    elif op == "cross_entropy":
        rows = (208,)
    elif op == "linear_cross_entropy":
        rows, build = (208,), functools.partial(_losses, size=size, chunk_rows=48)
    elif op == "embedding":  # 20 tokens, each of which fills several stretches of the sorted ids
        rows, build = (2048,), lambda n: embeddings(2, n, (size,), 64, device)
    elif not size:
        rows = (208,) if op == "dropout" else (4096,)
    elif op == "bias_gelu" or op.endswith("_norm"):
        rows = 208, max(1024, MANY_ELEMENTS // size // 16 * 16)
    found = [case for n in rows for case in build(n) if case.op == op.removesuffix("_masked")]
    return list({case.shape: case for case in found if case.shape not in known}.values())
