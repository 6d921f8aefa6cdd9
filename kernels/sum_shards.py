"""Sum of the shards of all ranks: the reduce half of an all-to-all reduce-scatter.

    out = (((received[0] + received[1]) + (received[2] + received[3])) + ...) * scale

Every sum is rounded in fp32, the result once more to the dtype of out, element by element: the bits
depend neither on threads, device nor instruction set (a nan's sign and payload excepted). One pass
over memory; on CUDA one launch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastpar.kernels import backend
from fastpar.kernels.backend import DTYPE_CODES, use_cpp, use_cuda
from fastpar.kernels.op import define_op


def _tree(parts: list[Tensor]) -> Tensor:
    """The sum in the order of csrc/sum_tree.h."""
    if len(parts) == 1:
        return parts[0]
    left = 1 << (len(parts) - 1).bit_length() - 1
    return _tree(parts[:left]) + _tree(parts[left:])


def _sum_shards(shards: list[Tensor], out: Tensor, scale: float) -> None:
    cuda = use_cuda("sum_shards", out)
    if cuda or use_cpp("sum_shards", out):
        backend.run_compiled("sum_shards", cuda, out, shards, out, scale)
        if not out.is_inference():  # written through its address: autograd must know
            torch.autograd.graph.increment_version(out)
    else:
        out.copy_(_tree([shard.float() for shard in shards]) * scale)


_sum_shards_op = define_op(
    "sum_shards(Tensor[] shards, Tensor(a!) out, float scale) -> ()", _sum_shards
)


@torch.no_grad()
def sum_shards(
    received: Tensor | Sequence[Tensor], out: Tensor, *, scale: float | None = None
) -> None:
    """Sums the shards of all ranks as a tree.

    The sum is in fp32 and rounded once, so that the result does not depend on which rank computes
    it; neighbours are added first, the largest power of two below W on the left (csrc/sum_tree.h,
    [Note: the tree]).

    Args:
        received: [W, S] with contiguous rows, or W tensors [S] of one dtype; fp32 | bf16 | fp16.
            W >= 1, on CUDA <= 4087.
        out: [S], fp32 | bf16 | fp16, contiguous; may be one of the shards.
        scale: factor (1 / W for the mean); None means 1.
    Raises:
        ValueError: shapes, dtypes or devices that do not fit; out partly over a shard.
    Traffic: bytes of received and of out.
    Deterministic: yes, bitwise, for any number of threads, device and instruction set.
    Oracle: fastpar.kernels.reference.sum_shards_ref
    """
    shards = list(received.unbind(0)) if isinstance(received, Tensor) else list(received)
    if not shards:
        raise ValueError("sum_shards: expected at least one shard, got 0; pass one per rank")
    if not torch.compiler.is_compiling() and out.is_neg():  # a graph cannot check this
        raise ValueError(
            "sum_shards: expected memory that holds values, got out negated lazily; pass "
            "out.resolve_neg(), and copy the result back"
        )
    if out.dim() != 1 or not out.is_contiguous():
        raise ValueError(
            f"sum_shards: expected a contiguous out of one dimension, got out={list(out.shape)} "
            f"stride={out.stride()}; pass out.view(-1)"
        )
    for name, t in (("out", out), *((f"received[{w}]", shard) for w, shard in enumerate(shards))):
        if t.dtype not in DTYPE_CODES:
            raise ValueError(
                f"sum_shards: expected fp32, bf16 or fp16, got {name}={t.dtype}; cast it"
            )
        if t.device != out.device:
            raise ValueError(
                f"sum_shards: expected one device, got {name} on {t.device} and out on "
                f"{out.device}; move them together"
            )
    for w, shard in enumerate(shards):
        if shard.shape != out.shape or shard.dtype != shards[0].dtype or not shard.is_contiguous():
            raise ValueError(
                f"sum_shards: expected contiguous shards of shape {list(out.shape)} and one dtype, "
                f"got received[{w}]={list(shard.shape)} {shard.dtype} stride={shard.stride()} and "
                f"received[0]={shards[0].dtype}; pass [W, S] with contiguous rows"
            )
    _sum_shards_op(shards, out, 1.0 if scale is None else float(scale))
