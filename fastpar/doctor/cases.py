"""What ops are judged by: each at a model's sizes and at hostile ones, with its oracle and with
what stock PyTorch computes in the same dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastpar.doctor.errors import Errors, evaluate, measure_errors
from fastpar.kernels import (
    Hyper,
    Rng,
    adamw_step_,
    attention,
    bias_gelu,
    combine,
    cross_entropy,
    dropout,
    embedding,
    grouped_linear,
    layer_norm,
    linear,
    linear_cross_entropy,
    make_key,
    orthogonalize,
    permute,
    reference,
    residual_layer_norm,
    residual_rms_norm,
    rms_norm,
    route,
)
from fastpar.kernels.backend import wide
from fastpar.kernels.orthogonalize import POLAR_EXPRESS

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
            return torch.randn(shape, generator=generator, dtype=torch.float32, device=device).to(
                dtype
            )

        return {name: _leaf(value, device) for name, value in self.make(draw).items()}

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


def _leaf(value: Any, device: str) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = value.to(device)
    return value.requires_grad_() if value.is_floating_point() else value


def _generators_kept(x: Tensor) -> AbstractContextManager[None]:
    """Torch's default generators give the same numbers after it as before."""
    return torch.random.fork_rng([x.device] if x.is_cuda else [])


def norms(rows: int, widths: tuple[int, ...], device: str) -> Iterator[ErrorCase]:
    """Norms of plain and hostile rows, alone and after a residual add."""

    def stream(draw: Draw, N: int, C: int, how: str) -> Tensor:
        if how == "mean 100 std":
            return draw(N, C) + 100
        if how == "strided rows":
            return draw(N, 2 * C)[:, :C]
        if how == "std 1e-3":
            return draw(N, C) * 1e-3
        return draw(N, C)

    def stock(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if bias is None:
            return F.rms_norm(x, weight.shape, weight, 1e-6)
        return F.layer_norm(x, weight.shape, weight, bias)

    def plain(N: int, C: int, how: str, *, rms: bool) -> ErrorCase:
        def make(draw: Draw) -> Inputs:
            inputs = {"x": stream(draw, N, C, how), "weight": 1 + 0.1 * draw(C)}
            return inputs if rms else {**inputs, "bias": 0.1 * draw(C)}

        shape = f"N={N} C={C} {how}".strip()
        op = rms_norm if rms else layer_norm
        ref = reference.rms_norm_ref if rms else reference.layer_norm_ref
        return ErrorCase(op.__name__, shape, make, op, ref, stock)

    def residual(N: int, C: int, p: float, *, rms: bool) -> ErrorCase:
        rng = Rng(make_key(1, 0, device), 2)
        settings: dict[str, Any] = {"dropout_p": p, "rng": rng} if p else {}
        names = ["x", "residual", "weight", "x_bias"] + ([] if rms else ["bias"])

        def make(draw: Draw) -> Inputs:
            streams = {"x": draw(N, C), "residual": draw(N, C)}
            return streams | {n: (n == "weight") + 0.1 * draw(C) for n in names[2:]}

        def by_name(op: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *values: op(**dict(zip(names, values)), **settings)

        def eager(x, residual, weight, x_bias, bias=None, **_):
            x = x + x_bias
            if p:
                x = reference.dropout_ref(x, p, rng)
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
    for approximate, name in (("tanh", "tanh"), ("none", "erf")):
        for N, width, scale in [(rows, width, 1.0) for width in widths] + [(63, 127, 30.0)]:

            def make(draw: Draw, N: int = N, width: int = width, scale: float = scale) -> Inputs:
                return {"x": draw(N, width) * scale, "bias": draw(width)}

            yield ErrorCase(
                "bias_gelu",
                f"{name} N={N} F={width}" + (f" std {scale:g}" if scale != 1 else ""),
                make,
                functools.partial(bias_gelu, approximate=approximate),
                functools.partial(reference.bias_gelu_ref, approximate=approximate),
                lambda x, b, kind=approximate: F.gelu(x + b, approximate=kind),
            )


def losses(rows: int, shapes: tuple[tuple[int, int, int], ...]) -> Iterator[ErrorCase]:
    """shapes: (C, vocabulary, its padding)."""

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

    def settings_of(how: str) -> dict[str, Any]:
        known: dict[str, dict[str, Any]] = {
            "smoothing 0.1": {"label_smoothing": 0.1},
            "z-loss 0.01": {"z_loss": 0.01},
            "all ignored": {"reduction": "sum"},
            "no reduction": {"reduction": "none"},
        }
        return known.get(how, {})

    def on_logits(N: int, V: int, pad: int, how: str) -> ErrorCase:
        def make(draw: Draw) -> Inputs:
            logits = draw(N, V + pad) * (1e4 if how == "logits 1e4" else LOGIT_STD)
            if how == "-inf logits":
                third = torch.arange(V + pad, device=logits.device) % 3 == 0
                logits = logits.masked_fill(third, -torch.inf)
            return {"logits": logits, "targets": targets_of(logits[:, :V], how)}

        settings = settings_of(how)
        return ErrorCase(
            "cross_entropy",
            f"N={N} V={V}+{pad} {how}".strip(),
            make,
            functools.partial(cross_entropy, vocab_size=V, **settings),
            functools.partial(reference.cross_entropy_ref, vocab_size=V, **settings),
            lambda logits, targets: stock(logits[:, :V], targets, **settings),
            ("loss",),
        )

    def fused(N: int, C: int, V: int, pad: int, how: str) -> ErrorCase:
        def make(draw: Draw) -> Inputs:
            x = draw(N, C)
            weight = draw(V + pad, C) * (100.0 if how == "large logits" else LOGIT_STD * C**-0.5)
            logits = (x.float() @ weight[:V].float().T).to(x.dtype)
            return {"x": x, "weight": weight, "targets": targets_of(logits, how)}

        settings = settings_of(how)
        return ErrorCase(
            "linear_cross_entropy",
            f"N={N} C={C} V={V}+{pad} {how}".strip(),
            make,
            functools.partial(linear_cross_entropy, vocab_size=V, **settings),
            functools.partial(reference.linear_cross_entropy_ref, vocab_size=V, **settings),
            lambda x, w, targets: stock(F.linear(x, w[:V]), targets, **settings),
            ("loss",),
        )

    for C, V, pad in shapes:
        yield on_logits(rows, V, pad, "")
        yield fused(rows, C, V, pad, "")
    C, V, pad = shapes[-1]
    small = min(rows, 63), min(V, 1000)
    options = ("smoothing 0.1", "z-loss 0.01", "no reduction", "all ignored")
    for how in ("logits 1e4", "-inf logits", *options):
        yield on_logits(*small, 7, how)
    for how in ("large logits", *options):
        yield fused(small[0], C, small[1], 24, how)


def attentions(
    shapes: tuple[tuple[int, ...], ...], device: str, p: float = 0.0
) -> Iterator[ErrorCase]:
    """shapes: (B, T, Tk, H, Hkv, D), with dropout p; then documents and hostile ones."""

    def one(
        B: int, T: int, Tk: int, H: int, Hkv: int, D: int, *, p: float = 0.0, **kind: Any
    ) -> ErrorCase:
        scale, causal = kind.get("scale", 1.0), kind.get("causal", True)

        def make(draw: Draw) -> Inputs:
            return {
                "q": draw(B, T, H, D) * scale,
                "k": draw(B, Tk, Hkv, D) * scale,
                "v": draw(B, Tk, Hkv, D),
            }

        settings: dict[str, Any] = {"causal": causal}
        if p:
            settings |= {"dropout_p": p, "rng": Rng(make_key(1, 0, device), 3)}

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
        formula = functools.partial(reference.attention_ref, **settings)
        return ErrorCase(
            "attention",
            shape,
            make,
            functools.partial(attention, **settings),
            formula,
            formula,  # as nanoGPT writes it without flash attention
            ("o",),
            stock=stock,
        )

    def documents(T: int, H: int, D: int) -> ErrorCase:
        ends = [0, 1, T // 3, T // 3 + 2, T]
        cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=device)
        settings: dict[str, Any] = {"cu_seqlens": cu_seqlens}
        formula = functools.partial(reference.attention_ref, **settings)
        return ErrorCase(
            "attention",
            f"documents up to {ends}, D={D} H={H}",
            lambda draw: {name: draw(T, H, D) for name in ("q", "k", "v")},
            functools.partial(attention, **settings),
            formula,
            formula,
            ("o",),
        )

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
    rng = Rng(make_key(1, 0, device), 4)
    cases = [(B, T, C, 0.0) for C in widths] + [(2, min(T, 48), widths[0], P), (1, 1, 63, 0.0)]
    for b, t, C, p in cases:

        def make(draw: Draw, b: int = b, t: int = t, C: int = C) -> Inputs:
            idx = (draw(b, t).float().abs() * V / 8).long().clamp(max=V - 1)  # some tokens repeat
            return {"idx": idx, "wte": draw(V, C), "wpe": draw(t, C)}

        settings: dict[str, Any] = {"dropout_p": p, "rng": rng} if p else {}

        def eager(idx: Tensor, wte: Tensor, wpe: Tensor, p: float = p) -> Tensor:
            x = F.embedding(idx, wte) + wpe
            return reference.dropout_ref(x, p, rng) if p else x

        yield ErrorCase(
            "embedding",
            f"B={b} T={t} C={C} V={V}" + (f" dropout {p}" if p else ""),
            make,
            functools.partial(embedding, **settings),
            functools.partial(reference.embedding_ref, **settings),
            eager,
        )


def linears(rows: int, shapes: tuple[tuple[int, int], ...]) -> Iterator[ErrorCase]:
    """shapes: (C, outputs)."""
    for C, out in shapes:

        def make(draw: Draw, C: int = C, out: int = out) -> Inputs:
            return {"x": draw(rows, C), "weight": draw(out, C) * C**-0.5, "bias": draw(out)}

        shape = f"N={rows} {C}->{out}"
        yield ErrorCase("linear", shape, make, linear, reference.linear_ref, F.linear)


def experts(rows: int, C: int) -> Iterator[ErrorCase]:
    """The ops of 8 experts: their choice, tokens there and back, layers with an empty group."""
    E, K = 8, 2
    choices = torch.rand(
        rows, E, generator=torch.Generator().manual_seed(3), dtype=torch.float32, device="cpu"
    ).argsort(-1)[:, :K]

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
    yield ErrorCase("combine", f"N={rows} C={C} K={K}", sums, combine, reference.combine_ref, mix)
    calls = grouped_linear, reference.grouped_linear_ref, eager
    yield ErrorCase("grouped_linear", f"M={rows * K} E={E} {C}->{2 * C}", layers, *calls)


def orthogonals(shapes: tuple[tuple[int, int], ...]) -> Iterator[ErrorCase]:
    """The orthogonal factor of matrices of normal numbers, beside plain products; no gradient."""

    def eager(x: Tensor) -> Tensor:
        wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
        y = (wide / wide.norm()).to(x.dtype)
        y = y.T if x.shape[0] > x.shape[1] else y
        for a, b, c in POLAR_EXPRESS:
            gram = y @ y.T
            y = a * y + (b * gram + c * gram @ gram) @ y
        return y.T if x.shape[0] > x.shape[1] else y

    for m, n in shapes:

        def make(draw: Draw, shape: tuple[int, int] = (m, n)) -> Inputs:
            return {"x": draw(*shape)}

        yield ErrorCase(
            "orthogonalize",
            f"{m}x{n}",
            make,
            lambda x: orthogonalize(x, dtype=x.dtype),
            lambda x: reference.orthogonalize_ref(x.detach(), coefficients=tuple(POLAR_EXPRESS)),
            eager,
            dtypes=(torch.float32, torch.bfloat16),
        )


def dropouts(shape: tuple[int, ...], device: str) -> Iterator[ErrorCase]:
    """Dropout by the counter-based mask."""
    rng = Rng(make_key(1, 0, device), 5)

    def eager(x: Tensor) -> Tensor:
        keep = reference.keep_mask_ref(rng, P, tuple(x.shape)).to(x.device, x.dtype)
        return x * keep * (256 / (256 - round(256 * P)))

    def stock(x: Tensor) -> Tensor:
        with _generators_kept(x):
            return F.dropout(x, P)

    yield ErrorCase(
        "dropout",
        f"{list(shape)} p={P}",
        lambda draw: {"x": draw(*shape)},
        lambda x: dropout(x, P, rng),
        lambda x: reference.dropout_ref(x, P, rng),
        eager,
        stock=stock,
    )


def adamw_steps(numel: int) -> Iterator[ErrorCase]:
    """One step over so many elements, beside torch's fused one."""
    hyper: dict[str, Any] = {"lr": 6e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
    hyper["weight_decay"] = 0.1

    def make(draw: Draw) -> Inputs:
        p, g, m, v = (draw(numel).float() for _ in range(4))
        return {"p": p, "g": g, "exp_avg": m, "exp_avg_sq": v.square()}

    def by(step: Callable[..., None]) -> Callable[..., Any]:
        def function(*tensors: Tensor) -> tuple[Tensor, ...]:
            p, g, m, v = (t.detach().clone() for t in tensors)
            step([p], [g], [m], [v], **hyper, step=10)
            return p, m, v

        return function

    def fused(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        p, m, v = (t.detach().clone() for t in (p, m, v))
        step = torch.tensor(10.0, device=p.device, dtype=torch.float32)
        torch._fused_adamw_(
            [p], [g.detach()], [m], [v], [], [step], **hyper, amsgrad=False, maximize=False
        )
        return p, m, v

    def ours(p: Any, g: Any, m: Any, v: Any, **hyper: Any) -> None:
        adamw_step_(p, g, m, v, Hyper(**hyper))

    outputs = ("p", "exp_avg", "exp_avg_sq")
    calls = by(ours), by(reference.adamw_step_ref), fused
    yield ErrorCase("adamw_step_", f"P={numel}", make, *calls, outputs, (torch.float32,))
