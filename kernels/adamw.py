"""The AdamW step of a whole list of tensors in one call.

    g = grad * grad_scale (negated to maximize),  p = p * (1 - lr * weight_decay)
    m = m + (g - m) * (1 - beta1),  v = v * beta2 + (1 - beta2) * g * g
    p = p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

16-bit parameters are the rounded image of fp32 master weights, which take p's part above. On CPU
the compiled kernel rounds the same operations in the same order everywhere (csrc/adamw_math.h), so
the bits depend neither on how a tensor is cut into pieces, nor on threads or instruction set:
shards of any world size hold the parameters of one rank. On CUDA the step is torch's fused AdamW.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fastpar.kernels import _C
from fastpar.kernels.backend import DTYPE_CODES, define_op, use_cpp


class Hyper(NamedTuple):
    """The scalars of a step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int


_COPIED_ELEMENTS = 1 << 26  # of scaled or widened gradients that exist at once


def _check(params, grads, exp_avgs, exp_avg_sqs, master_weights) -> None:
    sizes = [len(params), len(grads), len(exp_avgs), len(exp_avg_sqs)]
    if master_weights is not None:
        sizes.append(len(master_weights))
    if len(set(sizes)) != 1:
        raise ValueError(
            f"adamw_step_: expected lists of one length, got lengths={sizes}; "
            "pass one entry for each parameter"
        )
    masters = master_weights or [None] * len(params)
    f32 = torch.float32
    for i, (p, g, m, v, w) in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, masters)):
        plain = p.dtype is g.dtype is m.dtype is v.dtype is f32 and w is None
        # The ordinary case in a microsecond; the rest, errors included, one by one.
        if not (
            plain
            and p.is_contiguous()
            and p.device == g.device == m.device == v.device
            and p.shape == g.shape == m.shape == v.shape
            and p.stride() == m.stride() == v.stride()
        ):
            _check_one(i, p, g, m, v, w)


def _check_one(
    i: int, p: Tensor, g: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, master: Tensor | None
) -> None:
    if p.dtype not in DTYPE_CODES or g.dtype not in (p.dtype, torch.float32):
        raise ValueError(
            "adamw_step_: expected fp32, bf16 or fp16 parameters and gradients of the same "
            f"dtype or fp32, got params[{i}]={p.dtype} grads[{i}]={g.dtype}; cast the gradient"
        )
    if (master is None) != (p.dtype == torch.float32):
        raise ValueError(
            "adamw_step_: expected a master weight for each 16-bit parameter and None for "
            f"fp32, got params[{i}]={p.dtype} master_weights[{i}]="
            f"{None if master is None else master.dtype}; "
            "pass p.float(), made once before the first step"
        )
    states = (exp_avg, exp_avg_sq) if master is None else (exp_avg, exp_avg_sq, master)
    if any(s.dtype != torch.float32 for s in states):
        raise ValueError(
            "adamw_step_: expected fp32 exp_avgs, exp_avg_sqs and master_weights, got "
            f"{[s.dtype for s in states]} at index {i}; keep optimizer state in fp32"
        )
    if any(s.shape != p.shape for s in (g, *states)):
        raise ValueError(
            "adamw_step_: expected one shape per parameter, got "
            f"{[list(s.shape) for s in (p, g, *states)]} at index {i}; pass matching tensors"
        )
    if any(s.device != p.device for s in (g, *states)):
        raise ValueError(
            "adamw_step_: expected one device per parameter, got "
            f"{[str(s.device) for s in (p, g, *states)]} at index {i}; move them together"
        )
    same = all(s.stride() == p.stride() for s in states)
    if not (same and _is_dense(p)) and not all(s.is_contiguous() for s in (p, *states)):
        raise ValueError(
            "adamw_step_: expected dense parameters and states of the same strides, got "
            f"{[s.stride() for s in (p, *states)]} at index {i}; "
            "create states with torch.zeros_like(param)"
        )


def _is_dense(t: Tensor) -> bool:
    """Whether t's elements fill one block of memory without overlap."""
    if t.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(t.stride(), t.shape)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def adamw_step_cpu(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    master_weights: list[Tensor],
    grad_scale: float,
    hyper: Hyper,
) -> None:
    """The compiled kernel, for tensors of one parameter and one gradient dtype."""
    grads = [
        g
        if g.stride() == p.stride()
        else torch.empty_strided(p.shape, p.stride(), dtype=g.dtype).copy_(g)
        for p, g in zip(params, grads)
    ]
    _C.adamw_step(
        [p.data_ptr() for p in params],
        [g.data_ptr() for g in grads],
        [m.data_ptr() for m in exp_avgs],
        [v.data_ptr() for v in exp_avg_sqs],
        [w.data_ptr() for w in master_weights],
        [p.numel() for p in params],
        DTYPE_CODES[params[0].dtype],
        DTYPE_CODES[grads[0].dtype],
        grad_scale,
        1 - hyper.lr * hyper.weight_decay,
        1 - hyper.beta1,
        hyper.beta2,
        1 - hyper.beta2,
        hyper.lr / (1 - hyper.beta1**hyper.step),
        math.sqrt(1 - hyper.beta2**hyper.step),
        hyper.eps,
        torch.get_num_threads(),
    )


def adamw_step_torch(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    master_weights: list[Tensor],
    grad_scale: Tensor | None,
    maximize: bool,
    hyper: Hyper,
) -> None:
    """torch's fused AdamW on the fp32 tensors, then a copy to 16-bit parameters. No host sync."""
    weights = master_weights or params
    steps = torch.full((), float(hyper.step), device=params[0].device)
    first = 0
    while first < len(params):
        last, elements = first + 1, params[first].numel()
        while last < len(params) and elements + params[last].numel() <= _COPIED_ELEMENTS:
            elements += params[last].numel()
            last += 1
        part = slice(first, last)
        # _fused_adamw_ would unscale the caller's gradients in place; these are copies.
        scaled = [g.float() for g in grads[part]]
        if grad_scale is not None:
            scaled = list(torch._foreach_mul(scaled, grad_scale))
        torch._fused_adamw_(
            weights[part],
            scaled,
            exp_avgs[part],
            exp_avg_sqs[part],
            [],
            [steps] * (last - first),
            lr=hyper.lr,
            beta1=hyper.beta1,
            beta2=hyper.beta2,
            weight_decay=hyper.weight_decay,
            eps=hyper.eps,
            amsgrad=False,
            maximize=maximize,
        )
        first = last
    if master_weights:
        torch._foreach_copy_(params, master_weights)


def _run(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    master_weights: list[Tensor],
    grad_scale: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    maximize: bool,
) -> None:
    states = (params, grads, exp_avgs, exp_avg_sqs, master_weights)
    hyper = Hyper(lr, beta1, beta2, eps, weight_decay, step)
    if use_cpp("adamw_step_", params[0]):
        scale = 1.0 if grad_scale is None else grad_scale.item()
        adamw_step_cpu(*states, -scale if maximize else scale, hyper)
    else:
        adamw_step_torch(*states, grad_scale, maximize, hyper)
    # Memory written through pointers: autograd must know that these tensors changed.
    torch.autograd.graph.increment_version([*params, *exp_avgs, *exp_avg_sqs, *master_weights])


_adamw_step = define_op(
    "adamw_step_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, "
    "Tensor(c!)[] exp_avg_sqs, Tensor(d!)[] master_weights, Tensor? grad_scale, float lr, "
    "float beta1, float beta2, float eps, float weight_decay, int step, bool maximize) -> ()",
    _run,
    lambda *args: None,
    ("CPU", "CUDA"),
)


@torch.no_grad()
def adamw_step_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    master_weights: list[Tensor] | list[Tensor | None] | None = None,
    grad_scale: Tensor | None = None,
    maximize: bool = False,
) -> None:
    """One AdamW step on every tensor of the lists, in place.

    Args:
        params: fp32, or bf16 | fp16 with master_weights; dense, any shape, size 0 included.
        grads: dtype of the parameter or fp32; any strides. Not changed.
        exp_avgs, exp_avg_sqs: fp32, shape and strides of the parameter.
        lr, beta1, beta2, eps, weight_decay: as in torch.optim.AdamW.
        step: t, 1 in the first step; one for all tensors of the call.
        master_weights: fp32, one for each 16-bit parameter, None for each fp32 one.
        grad_scale: fp32 [] on the parameters' device, multiplied into every gradient (clip factor,
            or 1 / loss scale); None means 1.
        maximize: ascend instead of descend.
    Raises:
        ValueError: lists of unequal length; dtypes, shapes or strides that do not fit; step < 1.
    Traffic: 28 bytes per fp32 element; with master weights 24 + bytes of gradient and parameter.
    Deterministic: yes; on CPU the same bits for any cut of a tensor into pieces, any number of
        threads and any instruction set.
    Oracle: fastpar.kernels.reference.adamw_step_ref
    Source: Loshchilov, Hutter 2019, arXiv 1711.05101
    """
    _check(params, grads, exp_avgs, exp_avg_sqs, master_weights)
    if step < 1:
        raise ValueError(f"adamw_step_: expected step >= 1, got step={step}; count from 1")
    if grad_scale is not None and (grad_scale.numel() != 1 or grad_scale.dtype != torch.float32):
        raise ValueError(
            "adamw_step_: expected an fp32 grad_scale of one element, got "
            f"{list(grad_scale.shape)} {grad_scale.dtype}; pass torch.tensor(factor)"
        )
    masters = master_weights or [None] * len(params)
    groups: dict[tuple, tuple[list, ...]] = {}
    for row in zip(params, grads, exp_avgs, exp_avg_sqs, masters):
        p, g = row[0], row[1]
        lists = groups.setdefault((p.device, p.dtype, g.dtype), ([], [], [], [], []))
        for column, tensor in zip(lists, row):
            if tensor is not None:
                column.append(tensor)
    for lists in groups.values():
        _adamw_step(*lists, grad_scale, lr, beta1, beta2, eps, weight_decay, step, maximize)
