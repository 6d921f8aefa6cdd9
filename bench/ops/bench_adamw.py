"""The AdamW step on flat memory and on GPT-2's own tensors, in every storage mode, with clipping.

Rows compare what trains the same model: fp32 parameters with torch.optim.AdamW (loop, foreach,
fused, compiled); bf16 parameters and gradients with torch's fused step on fp32 master weights
between two casts (gradients up, parameters down), which is how it is done by hand; and the whole
of norm, clip and step. GB/s count the bytes that the algorithm has to move, for each storage mode
its own; a peer that passes over memory more often shows fewer.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.harness import Bench, Case, short
from bench.peers import packages, stock
from fastpar.doctor.trial import Call
from fastpar.kernels import adamw, global_norm
from fastpar.kernels.adamw import Hyper, adamw_step_, decode_moment, new_moment
from fastpar.kernels.reference import adamw_step_ref
from fastpar.optim.adamw import AdamW
from fastpar.testing import assert_matches_oracle

TIME_LIMIT_S = {"cpu": 900, "cuda": 150}
VALUES = Hyper(lr=6e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=10)
HYPER: dict[str, Any] = {"lr": VALUES.lr, "eps": VALUES.eps, "weight_decay": VALUES.weight_decay}
HYPER["betas"] = VALUES.beta1, VALUES.beta2
TORCH: dict[str, dict[str, Any]] = {
    "torch loop": {"foreach": False},
    "torch foreach": {"foreach": True},
    "torch fused": {"fused": True},
}
MAX_NORM = 1.0
ROOMY = {"cpu": 60_000_000, "cuda": 200_000_000}  # elements up to which all variants fit
WIDE, NARROW = torch.float32, torch.bfloat16


@dataclass(frozen=True)
class Mode:
    """What a step of fastpar stores."""

    param: torch.dtype = WIDE
    master: torch.dtype | None = None
    moment: torch.dtype = WIDE

    def bytes_per_element(self) -> float:
        """Read and written once: moments and master; a rounded image of the master is written."""
        image = self.master == WIDE
        moved = self.param.itemsize * (1 if image else 2) + self.param.itemsize  # and the gradient
        moved += 2 * self.master.itemsize if self.master else 0
        scales = 4 * 4 / adamw.MOMENT_BLOCK if self.moment == torch.uint8 else 0
        return moved + 4 * self.moment.itemsize + scales

    @property
    def seed(self) -> int | None:
        unmastered = self.param != WIDE and self.master is None
        return 1 if unmastered or self.moment != WIDE else None


FP32 = Mode()
MASTER = Mode(NARROW, WIDE)
STORAGE = {  # variant -> what it stores; all train bf16 parameters
    "fastpar": MASTER,
    "fastpar remainder": Mode(NARROW, torch.int16),
    "fastpar stochastic": Mode(NARROW),
    "fastpar bf16 moments": replace(MASTER, moment=NARROW),
    "fastpar 8-bit moments": replace(MASTER, moment=torch.uint8),
}


class State:
    """Tensors of one step in one storage mode, random but for the moments, and the step."""

    def __init__(self, shapes: Sequence[torch.Size], device: str, mode: Mode, flat: bool = False):
        if flat:
            shapes = [torch.Size([sum(s.numel() for s in shapes)])]
        generator = torch.Generator(device).manual_seed(3)
        self.mode = mode
        self.grads = [torch.empty(s, dtype=mode.param, device=device) for s in shapes]
        for g in self.grads:
            g.normal_(generator=generator)
        self.masters: list[Tensor] | None = None
        if mode.master == WIDE:
            self.masters = [g.float() for g in self.grads]
            self.params = [w.to(mode.param) for w in self.masters]
        else:
            self.params = [g.clone() for g in self.grads]
            if mode.master is not None:
                self.masters = [torch.zeros_like(g, dtype=mode.master) for g in self.grads]
        first, second = ([new_moment(p, mode.moment) for p in self.params] for _ in range(2))
        self.exp_avgs, self.exp_avg_sqs = ([m for m, _ in pairs] for pairs in (first, second))
        self.scales: dict[str, Any] = {}
        if mode.moment == torch.uint8:
            names = ("exp_avg_scale", "exp_avg_sq_scale")
            self.scales = {n: [s for _, s in pairs] for n, pairs in zip(names, (first, second))}

    def step(self, **gates: Tensor) -> None:
        lists = self.params, self.grads, self.exp_avgs, self.exp_avg_sqs
        states: dict[str, Any] = {**gates, "stochastic_rounding_seed": self.mode.seed}
        states |= {f"{name}s": scales for name, scales in self.scales.items()}
        adamw_step_(*lists, VALUES, master_weights=self.masters, **states)

    def clip_and_step(self) -> None:
        norm = global_norm(self.grads, max_norm=MAX_NORM)
        self.step(grad_scale=norm.grad_scale, found_inf=norm.found_inf)


def fastpar_calls(*args: Any, clip: bool = False, **kwargs: Any) -> Callable[[], list[Call]]:
    def make() -> list[Call]:
        state = State(*args, **kwargs)
        return [state.clip_and_step if clip else state.step]

    return make


def leaves(shapes: Sequence[torch.Size], device: str) -> list[Tensor]:
    """Random fp32 parameters with random gradients."""
    state = State(shapes, device, FP32)
    for p, g in zip(state.params, state.grads):
        p.requires_grad_().grad = g
    return state.params


def optimizer_calls(
    make_optimizer: Callable[[list[Tensor]], Any], shapes: Sequence[torch.Size], device: str, *,
    casts: bool = False, clip: bool = False, compiled: bool = False,
) -> Callable[[], list[Call]]:  # fmt: skip
    """An optimizer on fp32 parameters; casts: bf16 gradients to them, bf16 parameters from them."""

    def make() -> list[Call]:
        params = leaves(shapes, device)
        optimizer = make_optimizer(params)
        grads: list[Any] = [p.grad for p in params]
        small_grads = [g.to(NARROW) for g in grads] if casts else []
        small_params = [p.detach().to(NARROW) for p in params] if casts else []

        def call() -> None:
            if casts:
                torch._foreach_copy_(grads, small_grads)
            if clip:
                torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
            optimizer.step()
            if casts:
                with torch.no_grad():
                    torch._foreach_copy_(small_params, params)

        return [torch.compile(call, dynamic=False) if compiled else call]

    return make


def torch_adamw(**kind: Any) -> Callable[[list[Tensor]], Any]:
    return lambda params: torch.optim.AdamW(params, **HYPER, **kind)


def peer_calls(shapes: Sequence[torch.Size], device: str, **how: Any) -> dict[str, Any]:
    """Optimizers of other packages on fp32 parameters; one that is missing raises when made."""
    others = packages.adamws(device, HYPER).items()
    return {name: optimizer_calls(make, shapes, device, **how) for name, make in others}


def check(variant: str, mode: Mode, device: str) -> None:
    """Two steps of odd sizes in a storage mode, the second one against fp64. A parameter is used
    before it is stored, so that its error is that of fp32; stored without a master, it lies within
    one gap of bf16."""
    if not variant.startswith("fastpar"):
        return
    if variant == "fastpar AdamW":
        check_optimizer(device)
        return
    state = State([torch.Size([n]) for n in (100_003, 257, 1)], device, mode, "flat" in variant)
    state.step()
    exact = [[t.double() for t in some] for some in wide_tensors(state)]
    adamw_step_ref(*exact, **VALUES._asdict())
    state.step()
    narrow, eight_bit = mode.param != WIDE and mode.master is None, mode.moment == torch.uint8
    # Of 8 bits the widest gap between levels, (k / 127)^2 or (k / 255)^4, below the largest.
    of_moments = 0.016 if eight_bit else 4 * torch.finfo(mode.moment).eps
    eps = [torch.finfo(NARROW if narrow else WIDE).eps, 0.0, of_moments, of_moments]
    names = ("parameter", "gradient", "exp_avg", "exp_avg_sq")
    for name, got, wanted, e in zip(names, wide_tensors(state), exact, eps):
        near(got, wanted, e, name, of_largest=eight_bit and "exp" in name)
    if mode.master == WIDE and mode.param != WIDE:
        for p, master in zip(state.params, state.masters or ()):
            assert torch.equal(p, adamw.round_to_bf16(master)), "parameter: not the rounded master"


def near(
    values: Sequence[Tensor], exact: Sequence[Tensor], eps: float, name: str, *, of_largest: bool
) -> None:
    """Within eps of the value (of_largest: of the largest one of its block), and of what fp32 loses
    in the sum of two terms of this size."""
    for value, wanted in zip(values, exact):
        size = wanted.abs()
        if of_largest:
            blocks = F.pad(size, (0, -len(size) % adamw.MOMENT_BLOCK)).view(-1, adamw.MOMENT_BLOCK)
            size = blocks.amax(1).repeat_interleave(adamw.MOMENT_BLOCK)[: len(size)]
        off = (value.double() - wanted).abs() - eps * size
        slack = 4 * torch.finfo(WIDE).eps * wanted.abs().max()
        assert (off <= slack).all(), f"{name}: expected errors within {eps:.1e}, got {off.max()}"


def wide_tensors(state: State) -> list[list[Tensor]]:
    """Parameters as the step updates them, gradients and moments, in copies of fp32."""
    params = [p.float().clone() for p in (state.masters or state.params)]
    if state.mode.master == torch.int16:
        params = [adamw.master_join(*pair) for pair in zip(state.params, state.masters or ())]
    moments = []
    for name, found in (("exp_avg", state.exp_avgs), ("exp_avg_sq", state.exp_avg_sqs)):
        scales = state.scales.get(f"{name}_scale")
        wide = [m.float().clone() for m in found]
        for i, scale in enumerate(scales or ()):
            wide[i] = decode_moment(found[i], scale, signed=name == "exp_avg")
        moments.append(wide)
    return [params, [g.float().clone() for g in state.grads], *moments]


def check_optimizer(device: str) -> None:
    """Three steps of fastpar.AdamW beside torch's."""

    def steps(make: Callable[..., Any], **kind: Any) -> Callable[..., Tensor]:
        def function(p: Tensor, *grads: Tensor) -> Tensor:
            p = p.clone().requires_grad_()
            optimizer = make([p], **HYPER, **kind)
            for g in grads:
                p.grad = g.clone()
                optimizer.step()
            return p.detach()

        return function

    generator = torch.Generator(device).manual_seed(4)
    inputs = [torch.randn(100_003, generator=generator, device=device) for _ in range(4)]
    fused = steps(torch.optim.AdamW, fused=True)
    loop = steps(torch.optim.AdamW, foreach=False)  # in fp64 the oracle
    assert_matches_oracle(steps(AdamW), loop, inputs, eager=fused, grad=False)


def make_case(
    title: str, mode: Mode | dict[str, Mode], device: str, shapes: Sequence[torch.Size],
    baseline: str = "torch fused", reads: float = 0.0,
) -> Case:  # fmt: skip
    """reads: further bytes of each element, as the norm reads the gradient once more."""
    modes = mode if isinstance(mode, dict) else {"fastpar": mode}
    numel = sum(s.numel() for s in shapes)
    moved = {name: numel * (m.bytes_per_element() + reads) for name, m in modes.items()}
    return Case(
        title, lambda generator, small: (), {}, None, modes["fastpar"].param, baseline=baseline,
        bytes_moved={"step": moved["fastpar"]}, own_bytes=moved,
        check=lambda variant: check(variant, modes.get(variant, modes["fastpar"]), device),
    )  # fmt: skip


def fp32_case(bench: Bench, numel: int) -> None:
    shapes, device = [torch.Size([numel])], bench.device
    calls = functools.partial(optimizer_calls, shapes=shapes, device=device)
    makers = {name: calls(torch_adamw(**kind)) for name, kind in TORCH.items()}
    graph = torch_adamw(foreach=True, capturable=device == "cuda")
    makers["torch.compile"] = calls(graph, compiled=True)
    makers |= peer_calls(shapes, device)
    if numel > ROOMY[device]:
        makers = {"torch fused": makers["torch fused"]}
    makers["fastpar"] = fastpar_calls(shapes, device, FP32, flat=True)
    makers["fastpar AdamW"] = calls(lambda p: AdamW(p, **HYPER))
    title = f"adamw fp32 {short(numel)}"
    run_case(bench, make_case(title, FP32, device, shapes), makers)


def storage_case(bench: Bench, numel: int) -> None:
    """bf16 parameters and gradients in every storage mode."""
    shapes, device, base = [torch.Size([numel])], bench.device, "torch fused + casts"
    makers = {base: optimizer_calls(torch_adamw(fused=True), shapes, device, casts=True)}
    modes = STORAGE
    if numel <= ROOMY[device]:
        makers |= peer_calls(shapes, device, casts=True)
    else:
        modes = {name: STORAGE[name] for name in ("fastpar", "fastpar remainder")}
    makers |= {name: fastpar_calls(shapes, device, m, flat=True) for name, m in modes.items()}
    case = make_case(f"adamw bf16 {short(numel)}", modes, device, shapes, base)
    run_case(bench, case, makers)


def clip_case(bench: Bench, title: str, shapes: Sequence[torch.Size], mode: Mode) -> None:
    """Norm, clip and step."""
    device, casts = bench.device, mode.param != WIDE
    base = "clip_grad_norm_ + torch fused" + " + casts" * casts
    calls = functools.partial(optimizer_calls, shapes=shapes, device=device)
    makers = {base: calls(torch_adamw(fused=True), casts=casts, clip=True)}
    makers["fastpar"] = fastpar_calls(shapes, device, mode, flat=len(shapes) == 1, clip=True)
    if not casts:
        foreach = calls(torch_adamw(foreach=True), clip=True)
        makers["clip_grad_norm_ + torch foreach"] = foreach
        makers["fastpar AdamW"] = calls(lambda p: AdamW(p, **HYPER, max_grad_norm=MAX_NORM))
    title = f"norm + clip + adamw {title}"
    case = make_case(title, mode, device, shapes, base, reads=mode.param.itemsize)
    run_case(bench, case, makers)


def list_case(bench: Bench, title: str, shapes: Sequence[torch.Size], mode: Mode) -> None:
    """A list of tensors beside the same elements in one buffer."""
    device, casts = bench.device, mode.param != WIDE
    base = "torch fused" + " + casts" * casts
    makers = {base: optimizer_calls(torch_adamw(fused=True), shapes, device, casts=casts)}
    makers["fastpar"] = fastpar_calls(shapes, device, mode)
    makers["fastpar flat"] = fastpar_calls(shapes, device, mode, flat=True)
    run_case(bench, make_case(f"adamw {title}", mode, device, shapes, base), makers)


def run_case(bench: Bench, case: Case, makers: dict[str, Callable[[], list[Call]]]) -> None:
    if bench.only in case.name:
        bench.run_calls(case, "step", makers)


def run(bench: Bench) -> None:
    gpt2 = stock.gpt2_shapes(bench.quick)
    title = f"GPT-2, {short(sum(s.numel() for s in gpt2))} in {len(gpt2)} tensors"
    of_gpu = bench.device == "cuda"
    millions = (124, 1500, 1) if of_gpu else (50, 1, 200)
    for numel in (10_000,) if bench.quick else (n * 1_000_000 for n in millions):
        if of_gpu:
            clip_case(bench, f"bf16 {short(numel)}", [torch.Size([numel])], MASTER)
        storage_case(bench, numel)
        if not of_gpu or numel <= ROOMY[bench.device]:
            fp32_case(bench, numel)
    for mode, what in ((FP32, "fp32"), (MASTER, "bf16")):
        clip_case(bench, f"{what} {title}", gpt2, mode)
        list_case(bench, f"{what} {title}", gpt2, mode)
