"""Other libraries' attention kernels behind the op `attention`; the fastest right ones run.

    own        this package's: supports dropout and documents; the same bits on every layout
    hopper     this package's kernels for sm_90: hopper_triton.py and hopper_bwd_triton.py
    flash      torch's FlashAttention 2
    cudnn      torch's call of cuDNN
    cpu        torch's flash kernel for CPU tensors

All keep the logarithm of a row's sum of exponentials, so that any forward can be combined with any
backward, ours included. fastpar/doctor tries each on this machine: from then on the right and
fastest serve plain calls (no dropout, no documents), chosen separately for forward and backward.
FASTPAR_ATTENTION=<name> forces one, and is an error where it would be ignored; FASTPAR_BACKEND=cpp
or triton forces `own`; FASTPAR_PEERS=-<name>,... leaves some out. In deterministic mode `own`
serves: other backwards add in any order (torch: flash unless requested otherwise, cuDNN always),
and other forwards may split a row's keys depending on the batch size. torch's memory-efficient
kernel is not among them: on an H200 it took 2.5 times as long forward and 3.5 times backward.

[Note: others' masks] With dropout, others draw their own masks, which are not the same on every
layout: such calls run `own`, and are refused if another is forced.
"""

import importlib
import importlib.util
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpar.kernels import backend, choice
from fastpar.kernels.attention.plans import tma_reads
from fastpar.kernels.choice import OWN

LOG2_E = math.log2(math.e)
_HALF = (torch.float16, torch.bfloat16)
_Three = tuple[Tensor, Tensor, Tensor]
_aten = torch.ops.aten


class Peer(NamedTuple):
    """One implementation.

    Attributes:
        forward: (q, k, v, causal, scale) -> o, lse; all [B, T, H, D], lse [B, H, T], natural, in
            base 2 if in_place.
        backward: (do, q, k, v, o, lse, causal, scale) -> dq, dk, dv. If in_place it takes `own`'s
            statistics, and dq, dk and dv after scale, which it writes.
        device, dtypes, most: what it supports; most: the largest head dimension.
        in_subprocess: its trial runs in a process of its own, because it may hang.
    """

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., Any]
    device: str
    dtypes: tuple[torch.dtype, ...]
    most: int
    in_place: bool = False
    in_subprocess: bool = False


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    """[B, T, H, D] as [B, H, T, D], or back."""
    return [x.transpose(1, 2) for x in tensors]


def _no_numbers(q: Tensor) -> tuple[Tensor, Tensor]:
    """Seed and offset of a mask that is not drawn."""
    return tuple(torch.zeros((), dtype=torch.int64, device=q.device) for _ in range(2))  # type: ignore[return-value]


def _flash_fwd(q, k, v, causal, scale):
    run = _aten._scaled_dot_product_flash_attention
    o, lse, *_ = run(*_heads_first(q, k, v), 0.0, causal, False, scale=scale)
    return o.transpose(1, 2), lse


def _flash_bwd(do, q, k, v, o, lse, causal, scale):
    run = _aten._scaled_dot_product_flash_attention_backward
    rest = lse, None, None, q.shape[1], k.shape[1], 0.0, causal, *_no_numbers(q)
    return _heads_first(*run(*_heads_first(do, q, k, v, o), *rest, scale=scale))


def _cudnn_fwd(q, k, v, causal, scale):
    run = _aten._scaled_dot_product_cudnn_attention
    o, lse, *_ = run(*_heads_first(q, k, v), None, True, 0.0, causal, False, scale=scale)
    return o.transpose(1, 2), lse.squeeze(-1)


def _cudnn_bwd(do, q, k, v, o, lse, causal, scale):
    run = _aten._scaled_dot_product_cudnn_attention_backward
    rest = (*_no_numbers(q), None, None, None, q.shape[1], k.shape[1], 0.0, causal)
    return _heads_first(*run(*_heads_first(do, q, k, v, o), lse.unsqueeze(-1), *rest, scale=scale))


def _cpu_fwd(q, k, v, causal, scale):
    run = _aten._scaled_dot_product_flash_attention_for_cpu
    o, lse = run(*_heads_first(q, k, v), 0.0, causal, scale=scale)
    return o.transpose(1, 2), lse


def _cpu_bwd(do, q, k, v, o, lse, causal, scale):
    run = _aten._scaled_dot_product_flash_attention_for_cpu_backward
    return _heads_first(*run(*_heads_first(do, q, k, v, o), lse, 0.0, causal, scale=scale))


_HOPPER_HEAD_DIMS = (64, 128)


def _gluon_found() -> bool:
    try:
        return importlib.util.find_spec("triton.experimental.gluon.nvidia.hopper") is not None
    except ModuleNotFoundError:  # no Triton at all, or one before Gluon
        return False


def refusal_of_hopper(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True) -> str:
    """Why attention_forward_hopper cannot serve such a call; "" if it can."""
    arch = torch.cuda.get_device_capability(q.device) if q.is_cuda else None
    if arch != (9, 0):
        return "needs a GPU of sm_90 (H100, H200)"
    if not _gluon_found():
        return "needs Triton 3.6 or later, with triton.experimental.gluon"
    if not causal or q.shape[1] != k.shape[1]:
        return "is causal, with as many keys as queries"
    if q.shape[-1] not in _HOPPER_HEAD_DIMS:
        return f"has head dimensions {_HOPPER_HEAD_DIMS}, not {q.shape[-1]}"
    if q.dtype not in _HALF:
        return f"takes bfloat16 and float16, not {q.dtype}"
    if not all(tma_reads(x) for x in (q, k, v)):
        return "needs addresses and steps of 16 bytes"
    return ""


def _refuse(name: str, why: str) -> None:
    if why:
        raise RuntimeError(
            f"{name}: expected a call that it supports, got one that it does not: it {why}; call "
            "attention"
        )


def attention_forward_hopper(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """o, contiguous, and lse [B, H, T] in base 2 of causal attention without dropout. Raises
    RuntimeError if refusal_of_hopper() refuses."""
    _refuse("attention_forward_hopper", refusal_of_hopper(q, k, v, causal=causal))
    from fastpar.kernels.attention.hopper_triton import attention_hopper_fwd

    return attention_hopper_fwd(q, k, v, scale)


def refusal_of_backward(q: Tensor) -> str:
    """Why attention_backward_hopper cannot serve a call that the forward can; "" if it can."""
    if q.shape[-1] != 64:
        return f"has a backward for head dimension 64, not {q.shape[-1]}"
    if q.shape[1] % 4:
        return f"reads statistics of rows by 16 bytes, not T={q.shape[1]} of them"
    return ""


def attention_backward_hopper(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool,
    scale: float, dq: Tensor, dk: Tensor, dv: Tensor,
) -> None:  # fmt: skip
    """Writes dq, dk and dv, which may be slices of one tensor; dq by the usual Triton kernel. lse
    is the forward's; RuntimeError also for calls that refusal_of_backward() refuses."""
    why = refusal_of_hopper(q, k, v, causal=causal) or refusal_of_backward(q)
    _refuse("attention_backward_hopper", why)
    from fastpar.kernels.attention.triton import attention_bwd

    do, mask = do if tma_reads(do) else do.contiguous(), (None, 0, 0, None)
    attention_bwd(do, q, k, v, o, lse, dq, dk, dv, True, scale, *mask, hopper=True)


_HOPPER = attention_forward_hopper, attention_backward_hopper
PEERS = {
    "hopper": Peer(*_HOPPER, "cuda", _HALF, 128, in_place=True, in_subprocess=True),
    "flash": Peer(_flash_fwd, _flash_bwd, "cuda", _HALF, 256),
    "cudnn": Peer(_cudnn_fwd, _cudnn_bwd, "cuda", _HALF, 128),
    "cpu": Peer(_cpu_fwd, _cpu_bwd, "cpu", (*_HALF, torch.float32), 256),
}


def read_forced(name: str) -> str:
    """FASTPAR_ATTENTION's value, checked; "" for auto."""
    if name not in ("auto", OWN, *PEERS):
        raise ValueError(
            f"attention: expected auto, own or one of {', '.join(PEERS)}, got "
            f"FASTPAR_ATTENTION={name}; correct it"
        )
    return "" if name == "auto" else name


def read_left_out(text: str) -> frozenset[str]:
    """FASTPAR_PEERS's value, checked: "-hopper,-cudnn"."""
    names = [name for name in text.split(",") if name]
    if any(name[0] != "-" or name[1:] not in PEERS for name in names):
        raise ValueError(
            f"attention: expected names of {', '.join(PEERS)}, each after a minus sign, got "
            f"FASTPAR_PEERS={text}; correct it"
        )
    return frozenset(name[1:] for name in names)


forced = read_forced(os.environ.get("FASTPAR_ATTENTION", "auto"))
left_out = read_left_out(os.environ.get("FASTPAR_PEERS", ""))


def _refusal_of_kind(name: str, device: str, dtype: torch.dtype, head_dim: int) -> str:
    peer = PEERS[name]
    if name in left_out:
        return "is left out by FASTPAR_PEERS"
    if device != peer.device:
        return f"needs {peer.device} tensors, not {device}"
    if dtype not in peer.dtypes:
        return f"does not take {dtype}"
    if head_dim % 8 or head_dim > peer.most:
        return f"takes head dimensions up to {peer.most} in steps of 8, not {head_dim}"
    return ""


def refusal(
    name: str, q: Tensor, k: Tensor, v: Tensor, causal: bool, *, masked: bool = False
) -> str:
    """Why a peer cannot serve such a call of [B, T, H, D]; "" if it can."""
    if masked:
        return (
            "serves neither documents nor dropout, whose mask would not be the same mask on every "
            "layout"
        )
    if why := _refusal_of_kind(name, q.device.type, q.dtype, q.shape[-1]):
        return why
    if q.shape[-2] != k.shape[-2]:
        return "takes a key head for each query head here"
    if causal and q.shape[-3] != k.shape[-3]:
        return "would align a causal mask to another key"
    if name == "cudnn" and 1 in (q.shape[-3], k.shape[-3]):
        return "takes two tokens or more"  # cuDNN 9.19 refuses one, or ends the process
    return refusal_of_hopper(q, k, v, causal=causal) if name == "hopper" else ""


def wanted(op: str, q: Tensor, direction: int) -> str:
    """The preferred server of such calls: by the variables, else by the proof."""
    if choice.is_trying():
        return choice.server(op, q, direction)
    return forced or (OWN if backend.forced() else choice.server(op, q, direction))


def refuse_to_ignore(op: str, q: Tensor) -> None:
    """Refuses to ignore FASTPAR_ATTENTION in a call that torch's own function serves."""
    if forced and not choice.is_trying():
        raise RuntimeError(
            f"attention: expected a call of fastpar's kernels under FASTPAR_ATTENTION={forced}, "
            f"got torch's own function for {choice.case_of(op, q)} (`fastpar info` says why); "
            "unset FASTPAR_ATTENTION"
        )


def serving(op: str, q: Tensor, k: Tensor, v: Tensor, causal: bool, direction: int) -> str:
    """Who serves a call instead of fastpar's kernel, "" for none. op: "attention" for plain calls,
    "attention_masked" for those with dropout or documents; direction: 0 forward, 1 backward.
    ValueError: FASTPAR_ATTENTION names one that cannot; RuntimeError: one that failed its proof."""
    asked = "" if choice.is_trying() else forced
    name = wanted(op, q, direction)
    if name == OWN or (direction and name == "hopper" and refusal_of_backward(q)):
        return ""
    why = refusal(name, q, k, v, causal, masked=op != "attention")
    if not asked:
        return "" if why else name
    if choice.ignores_times():
        why = "promises no equal bits, as deterministic mode asks"
    if why:
        raise ValueError(
            f"attention: expected a call that FASTPAR_ATTENTION={name} supports, got one that it "
            f"does not: it {why}; unset FASTPAR_ATTENTION"
        )
    choice.refuse_peer(op, q, name, "FASTPAR_ATTENTION")
    return name


def to_natural(stats: Tensor, q: Tensor) -> Tensor:
    """lse [B, H, T] in base e from the statistics of forward()."""
    lse = stats / LOG2_E if stats.dim() < q.dim() else stats[..., 0] - stats[..., 1].log()
    return lse.contiguous()


def forward(
    name: str, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, base_2: bool
) -> tuple[Tensor, Tensor]:
    """o [B, T, H, D], contiguous, and the statistics that `own`'s backward takes.

    base_2: for the Triton kernels: lse [B, H, T] in base 2; else for the C++ kernel: a row's
        largest score and the inverse of its sum, [B, H, T, 2].
    """
    o, lse = PEERS[name].forward(q, k, v, causal, scale)
    if not PEERS[name].in_place:  # lse is natural
        lse = lse.float()
        lse = lse * LOG2_E if base_2 else torch.stack((lse, torch.ones_like(lse)), -1)
    return o.contiguous(), lse.contiguous()


def backward(
    name: str, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, stats: Tensor,
    causal: bool, scale: float, grads: _Three,
) -> None:  # fmt: skip
    """Writes dq, dk, dv, from the statistics of any forward."""
    if PEERS[name].in_place:
        PEERS[name].backward(do, q, k, v, o, stats, causal, scale, *grads)
        return
    found = PEERS[name].backward(do, q, k, v, o, to_natural(stats, q), causal, scale)
    for grad, value in zip(grads, found, strict=True):
        grad.copy_(value)


def table() -> list[str]:
    """What serves which case here, for `fastpar info`."""
    lines = [
        "attention own, for dropout and documents always; for plain calls what is right and faster:"
    ]
    for name, peer in PEERS.items():
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in peer.dtypes)
        gone = peer.device == "cuda" and not torch.cuda.is_available()
        why = "no GPU here" if gone else _refusal_of_kind(name, peer.device, peer.dtypes[0], 64)
        text = f"forward and backward on {peer.device}, {dtypes}, head dim up to {peer.most}"
        lines.append(f"          {name:<10}{text}{f' ({why})' if why else ''}")
    return [*lines, f"          FASTPAR_ATTENTION={forced or 'auto'}"]
