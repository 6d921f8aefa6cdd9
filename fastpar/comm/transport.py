"""Which transport carries the collectives of a group, and why."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist

from fastpar.comm.collectives import Collectives
from fastpar.comm.shm import ShmCollectives, ShmUnavailable
from fastpar.comm.torch_collectives import TorchCollectives


def make_collectives(
    group: dist.ProcessGroup | None = None,
    *,
    device: torch.device | str = "cpu",
    transport: str = "auto",
    timeout_s: float = 1800.0,
    in_rank_order: bool = False,
) -> Collectives:
    """The collectives of one group of ranks.

    Args:
        group: of torch.distributed; None is all ranks.
        transport: "shm" (CPU tensors of ranks on one host), "torch" (gloo or NCCL), or "auto":
            shared memory for CPU ranks that can share it, else torch with a warning that says why.
        timeout_s: after this long without its peers an operation fails (torch: the group's own).
        in_rank_order: every transport's all_reduce gives the bits of shared memory's.
    Ranks: all of the group, with the same arguments.
    Raises:
        ValueError: an unknown transport; shm for CUDA tensors.
        RuntimeError: transport="shm" where the ranks cannot share memory.
    """
    device = torch.device(device)
    if transport not in ("auto", "shm", "torch"):
        raise ValueError(
            f"make_collectives: expected auto, shm or torch, got transport={transport}; "
            "choose one of these"
        )
    if transport == "shm" and device.type != "cpu":
        raise ValueError(
            f"make_collectives: expected CPU tensors for transport=shm, got device={device}; "
            "use transport='torch'"
        )
    if transport == "torch" or device.type != "cpu":
        why = "asked for" if transport == "torch" else f"tensors are on {device.type}"
        return TorchCollectives(group, device=device, in_rank_order=in_rank_order, why=why)
    try:
        return ShmCollectives(group, timeout_s=timeout_s)
    except ShmUnavailable as reason:
        if transport == "shm":
            raise RuntimeError(
                f"make_collectives: expected ranks that can share memory, got: {reason}; "
                "use transport='torch'"
            ) from reason
        warnings.warn(f"fastpar: gloo instead of shared memory: {reason}", stacklevel=2)
        return TorchCollectives(group, device=device, in_rank_order=in_rank_order, why=str(reason))
