"""Argument checks of adamw_step_, with their error messages."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastpar.kernels.adamw_storage import MOMENT_BLOCK, is_dense
from fastpar.kernels.backend import DTYPE_CODES

MOMENT_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}  # of csrc/ops.h


class Hyper(NamedTuple):
    """The scalars of a step; a tensor is fp32 [] on the parameters' device and read there."""

    lr: float | Tensor
    beta1: float | Tensor
    beta2: float | Tensor
    eps: float | Tensor
    weight_decay: float | Tensor
    step: float | Tensor


def check_one(
    i: int,
    p: Tensor,
    g: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    master: Tensor | None,
    scales: Sequence[Tensor | None],
    stochastic: bool,
) -> None:
    """Check one parameter of a call and its state."""
    half = p.dtype in (torch.bfloat16, torch.float16)
    full = master is not None and master.dtype == torch.float32
    if p.dtype not in (*DTYPE_CODES, torch.float64) or not (
        g.dtype == p.dtype
        or (half and (g.dtype == torch.float32 or (full and g.dtype in DTYPE_CODES)))
    ):
        raise ValueError(
            "adamw_step_: expected fp32, bf16 or fp16 parameters and gradients of the same "
            "dtype, for 16-bit parameters also fp32 and with fp32 master weights all three, got "
            f"params[{i}]={p.dtype} grads[{i}]={g.dtype}; cast the gradient"
        )
    allowed = {
        torch.bfloat16: (torch.float32, torch.int16, *((None,) if stochastic else ())),
        torch.float16: (torch.float32,),
    }.get(p.dtype, (None,))
    if (None if master is None else master.dtype) not in allowed:
        raise ValueError(
            "adamw_step_: expected a master weight for each 16-bit parameter (fp32, or for bf16 an "
            "int16 remainder, or None with stochastic_rounding_seed) and None for fp32, got "
            f"params[{i}]={p.dtype} master_weights[{i}]={None if master is None else master.dtype};"
            " pass p.float(), made once before the first step"
        )
    moments = [exp_avg, exp_avg_sq, *([] if max_exp_avg_sq is None else [max_exp_avg_sq])]
    kinds = (torch.float64,) if p.dtype == torch.float64 else tuple(MOMENT_CODES)
    if any(s.dtype != exp_avg.dtype or s.dtype not in kinds for s in moments):
        raise ValueError(
            "adamw_step_: expected exp_avgs, exp_avg_sqs and max_exp_avg_sqs of one dtype, fp32, "
            f"bf16 or uint8, got {[s.dtype for s in moments]} at index {i}; use new_moment"
        )
    eight_bit = exp_avg.dtype == torch.uint8
    if eight_bit and max_exp_avg_sq is not None:
        raise ValueError(
            f"adamw_step_: expected no max_exp_avg_sqs with uint8 moments, got one at index {i}; "
            "use fp32 or bf16 moments with amsgrad"
        )
    blocks = (-(-p.numel() // MOMENT_BLOCK),)
    if any(
        (s is not None) != eight_bit
        or (
            s is not None
            and (s.dtype != torch.float32 or s.shape != blocks or not s.is_contiguous())
        )
        for s in scales
    ):
        raise ValueError(
            "adamw_step_: expected fp32 exp_avg_scales and exp_avg_sq_scales of shape "
            f"{list(blocks)} for uint8 moments and none for others, got exp_avgs[{i}]="
            f"{exp_avg.dtype} and {[None if s is None else list(s.shape) for s in scales]}; "
            "use new_moment"
        )
    states = [*moments, *([] if master is None else [master])]
    if any(s.shape != p.shape for s in (g, *states)):
        raise ValueError(
            "adamw_step_: expected one shape per parameter, got "
            f"{[list(s.shape) for s in (p, g, *states)]} at index {i}; pass matching tensors"
        )
    everything = [p, g, *states, *(s for s in scales if s is not None)]
    if any(s.device != p.device for s in everything):
        raise ValueError(
            "adamw_step_: expected one device per parameter, got "
            f"{[str(s.device) for s in everything]} at index {i}; move them together"
        )
    if not is_dense(p):
        raise ValueError(
            "adamw_step_: expected dense parameters and states, got a view with gaps or repeated "
            f"elements, params[{i}]={list(p.shape)} with strides {p.stride()}; step the tensor "
            "that it is a view of, or a copy made by contiguous()"
        )
    same = all(s.stride() == p.stride() for s in states)
    if not same and not all(s.is_contiguous() for s in (p, *states)):
        raise ValueError(
            "adamw_step_: expected dense parameters and states of the same strides, got "
            f"{[s.stride() for s in (p, *states)]} at index {i}; create states with "
            "torch.zeros_like(param), and after a change of the parameter's strides reload an "
            "optimizer's by load_state_dict(state_dict())"
        )


def check_scalar(name: str, value: Tensor | None, device: torch.device) -> None:
    """grad_scale, found_inf or a hyper-parameter that is a tensor."""
    if value is not None and (
        value.numel() != 1 or value.dtype != torch.float32 or value.device != device
    ):
        raise ValueError(
            f"adamw_step_: expected an fp32 {name} of one element on {device}, got "
            f"{list(value.shape)} {value.dtype} on {value.device}; pass torch.tensor(factor)"
        )


_BELOW = {"beta1": 1.0, "beta2": 1.0}


def flatten_hypers(
    hypers: Hyper | Sequence[Hyper], device: torch.device
) -> tuple[list[float], list[Tensor], list[int]]:
    """Numbers of all hypers, 6 each, and the tensors among them with their places."""
    rows = [hypers] if isinstance(hypers, Hyper) else hypers
    numbers: list[float] = []
    tensors, slots = [], []
    for row in rows:
        for name, value in zip(Hyper._fields, row):
            if isinstance(value, Tensor):
                check_scalar(name, value, device)
                tensors.append(value)
                slots.append(len(numbers))
                numbers.append(0.0)
                continue
            low, high = (1.0 if name == "step" else 0.0), _BELOW.get(name, float("inf"))
            if not low <= value < high:
                raise ValueError(
                    f"adamw_step_: expected {name} >= {low:g}"
                    + (f" and < {high:g}" if name in _BELOW else "")
                    + f", got {name}={value}; "
                    + ("count from 1" if name == "step" else "correct the hyper-parameter")
                )
            numbers.append(float(value))
    return numbers, tensors, slots


def checked_seed(seed: int | None) -> int:
    """The seed of the random bits, 0 for None."""
    if seed is not None and not 0 <= seed < 2**63:
        raise ValueError(
            "adamw_step_: expected 0 <= stochastic_rounding_seed < 2**63, got "
            f"stochastic_rounding_seed={seed}; choose another seed"
        )
    return seed or 0


def checked_threads(threads: int | None) -> int:
    """The number of threads; 0 is torch's, asked for outside of a compiled graph."""
    if threads is not None and threads < 1:
        raise ValueError(
            f"adamw_step_: expected threads >= 1 or None, got threads={threads}; "
            "None takes torch.get_num_threads()"
        )
    return threads or 0
