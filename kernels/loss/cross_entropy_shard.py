"""The pieces of a cross-entropy whose vocabulary is spread over several ranks.

Each rank holds the logits of the classes from `first` on. With an all-reduce MAX of m and two
all-reduce SUMs, [N] numbers each,

    m, s, t = cross_entropy_shard(logits, targets, first=first)
    M = MAX(m),  lse = log(SUM(s * exp(m - M))) + M,  loss_i = lse_i - SUM(t)_i  where not ignored
    dlogits = cross_entropy_shard_grad(logits, targets, lse, scale, first=first)

the logits are never gathered. For linear_cross_entropy the same holds chunk by chunk: the logits
are those of a chunk of x and of this rank's rows of the weight. The collectives are the caller's.
Neither function is differentiable: they are the forward and the backward of the caller's own.
"""

import torch
from torch import Tensor

from fastpar.kernels import _C
from fastpar.kernels.backend import FLOATS, use_cpp, use_triton, wide
from fastpar.kernels.op import check_dense, define_op


def cross_entropy_shard_fwd(
    logits: Tensor, targets: Tensor, first: int, v: int, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(max, sum_exp, target_logit) of logits [N, Vp] whose first v columns are classes."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    targets = targets.contiguous()
    if use_triton("cross_entropy_shard", logits):
        from fastpar.kernels import cross_entropy_shard_triton

        return cross_entropy_shard_triton.shard_fwd(logits, targets, first, v, ignore_index)
    if use_cpp("cross_entropy_shard", logits):
        top, total, target_logit = (
            torch.empty(logits.shape[0], dtype=torch.float32, device="cpu") for _ in range(3)
        )
        options = (first, v, ignore_index, torch.get_num_threads())
        _C.cross_entropy_shard(logits, targets, top, total, target_logit, *options)
        return top, total, target_logit
    valid, local = targets != ignore_index, targets - first
    here = valid & (local >= 0) & (local < v)
    x = logits[:, :v].to(wide(logits.dtype))
    if v == 0:
        top = torch.full_like(targets, -torch.inf, dtype=x.dtype)
        total, target_logit = torch.zeros_like(top), torch.zeros_like(top)
    else:
        top = x.amax(-1)
        total = (x - torch.where(top == -torch.inf, 0.0, top)[:, None]).exp().sum(-1)
        picked = x.gather(1, torch.where(here, local, 0)[:, None])[:, 0]
        target_logit = torch.where(here, picked, 0.0)
    return torch.where(valid, top, 0.0), torch.where(valid, total, 1.0), target_logit


def _write_gradient(
    grad: Tensor,
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    scale: Tensor,
    first: int,
    v: int,
    ignore_index: int,
    z_loss: float,
) -> None:
    """Writes dlogits [N, Vp] into grad, which may be logits; lse [N], scale [] or [N]."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    targets, lse, scale = targets.contiguous(), lse.contiguous(), scale.to(lse.dtype)
    if use_triton("cross_entropy_shard_grad", logits):
        from fastpar.kernels import cross_entropy_shard_triton

        cross_entropy_shard_triton.shard_bwd(
            logits, targets, lse, scale, grad, first, v, ignore_index, z_loss
        )
    elif use_cpp("cross_entropy_shard_grad", logits):
        options = (first, v, ignore_index, z_loss, torch.get_num_threads())
        _C.cross_entropy_shard_grad(logits, targets, lse, scale, grad, *options)
    else:
        valid, local = targets != ignore_index, targets - first
        x = (logits[:, :v] - lse[:, None]).exp() * (1.0 + 2.0 * z_loss * lse[:, None])
        x -= (torch.arange(v, device=local.device) == local[:, None]).to(x.dtype)
        x *= scale if scale.dim() == 0 else scale[:, None]
        grad[:, :v].copy_(x.masked_fill_(~valid[:, None], 0.0))
        grad[:, v:].zero_()


def cross_entropy_shard_bwd(logits: Tensor, *options) -> Tensor:
    """dlogits [N, Vp] in new memory."""
    grad = logits.new_empty(logits.shape)
    _write_gradient(grad, logits, *options)
    return grad


def cross_entropy_shard_bwd_(out: Tensor, logits: Tensor, *options) -> None:
    """dlogits in out."""
    _write_gradient(out, logits, *options)
    torch.autograd.graph.increment_version(out)


def _fake_fwd(logits, targets, first, v, ignore_index):
    dtype = wide(logits.dtype)
    return tuple(logits.new_empty(logits.shape[:1], dtype=dtype) for _ in range(3))


_cross_entropy_shard = define_op(
    "cross_entropy_shard(Tensor logits, Tensor targets, SymInt first, SymInt v, int ignore_index)"
    " -> (Tensor, Tensor, Tensor)",
    cross_entropy_shard_fwd,
    _fake_fwd,
    ("CPU", "CUDA"),
)
_cross_entropy_shard_grad = define_op(
    "cross_entropy_shard_grad(Tensor logits, Tensor targets, Tensor lse, Tensor scale, "
    "SymInt first, SymInt v, int ignore_index, float z_loss) -> Tensor",
    cross_entropy_shard_bwd,
    lambda logits, *_: logits.new_empty(logits.shape),
    ("CPU", "CUDA"),
)
_cross_entropy_shard_grad_ = define_op(
    "cross_entropy_shard_grad_(Tensor(a!) out, Tensor logits, Tensor targets, Tensor lse, "
    "Tensor scale, SymInt first, SymInt v, int ignore_index, float z_loss) -> ()",
    cross_entropy_shard_bwd_,
    lambda *_: None,
    ("CPU", "CUDA"),
)


def _check(op: str, logits: Tensor, targets: Tensor, first: int, vocab_size: int | None) -> int:
    """The number of columns that are classes."""
    check_dense(op, "logits", logits)
    if logits.dim() < 1 or logits.dtype not in FLOATS:
        raise ValueError(
            f"{op}: expected logits [..., V] in bf16, fp16, fp32 or fp64, got "
            f"logits={list(logits.shape)} {logits.dtype}; cast them"
        )
    if targets.shape != logits.shape[:-1] or targets.dtype != torch.int64:
        raise ValueError(
            f"{op}: expected int64 targets of shape {list(logits.shape[:-1])}, got "
            f"targets={list(targets.shape)} {targets.dtype}; pass one target for each row"
        )
    if targets.device != logits.device:
        raise ValueError(
            f"{op}: expected targets on {logits.device}, got targets.device={targets.device}; "
            "move them"
        )
    if first < 0:
        raise ValueError(
            f"{op}: expected first >= 0, got first={first}; pass the class of column 0"
        )
    columns = logits.shape[-1]
    return columns if vocab_size is None else max(0, min(columns, vocab_size - first))


def cross_entropy_shard(
    logits: Tensor,
    targets: Tensor,
    *,
    first: int = 0,
    vocab_size: int | None = None,
    ignore_index: int = -100,
) -> tuple[Tensor, Tensor, Tensor]:
    """One shard's part of the loss: max, sum of exponentials, logit of the target.

    Args:
        logits: [..., Vp], bf16 | fp16 | fp32 | fp64: the classes first .. first + Vp - 1.
        targets: [...], int64, classes of the whole vocabulary or ignore_index.
        first: the class of column 0.
        vocab_size: classes of the whole vocabulary: columns from vocab_size - first on are padding
            (that may be all of them). None means that no column is.
        ignore_index: targets of rows that do not count.
    Returns:
        max [N], sum_exp [N] of exp(logits - max), target_logit [N], 0 where another shard holds the
        target; all fp32 (fp64 for fp64). In ignored rows 0, 1, 0; where all columns are padding
        -inf, 0, 0.
    Raises:
        ValueError: shapes, dtypes or devices that do not fit, first < 0.
    Traffic: N * Vp elements read.
    Deterministic: yes, bitwise.
    Oracle: fastpar.kernels.reference.cross_entropy_shard_ref
    """
    v = _check("cross_entropy_shard", logits, targets, first, vocab_size)
    rows = logits.detach().reshape(targets.numel(), logits.shape[-1])
    return _cross_entropy_shard(rows, targets.reshape(-1), first, v, ignore_index)


def cross_entropy_shard_grad(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    scale: Tensor,
    *,
    first: int = 0,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    z_loss: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """One shard's dlogits = scale * (softmax * (1 + 2 * z_loss * lse) - onehot).

    Args:
        logits, targets, first, vocab_size, ignore_index: as for cross_entropy_shard.
        lse: [N], fp32 (fp64 for fp64), logsumexp over the whole vocabulary.
        scale: [] or [N], the incoming gradient, over the number of targets for a mean.
        z_loss: as in cross_entropy, for a loss that adds z_loss * lse^2.
        out: shape, dtype and device of logits, rows contiguous and evenly apart: what is written
            and returned. It may be logits itself; other overlaps give a wrong result.
    Returns:
        dlogits: [..., Vp], dtype of logits; 0 in padding columns and ignored rows.
    Raises:
        ValueError: shapes, dtypes or devices that do not fit, first < 0.
    Traffic: N * Vp elements read and as many written.
    Deterministic: yes, bitwise.
    Oracle: fastpar.kernels.reference.cross_entropy_shard_grad_ref
    """
    op = "cross_entropy_shard_grad"
    v = _check(op, logits, targets, first, vocab_size)
    n = targets.numel()
    dtype = wide(logits.dtype)
    if lse.shape != (n,) or lse.dtype != dtype or scale.shape not in ((), (n,)):
        raise ValueError(
            f"{op}: expected {dtype} lse [{n}] and scale [] or [{n}], got lse={list(lse.shape)} "
            f"{lse.dtype} scale={list(scale.shape)}; pass one value for each row"
        )
    if lse.device != logits.device or scale.device != logits.device:
        raise ValueError(
            f"{op}: expected lse and scale on {logits.device}, got lse.device={lse.device} "
            f"scale.device={scale.device}; move them"
        )
    rows = logits.detach().reshape(n, logits.shape[-1])
    tensors = (rows, targets.reshape(-1), lse.detach(), scale.detach())
    options = (first, v, ignore_index, float(z_loss))
    if out is None:
        return _cross_entropy_shard_grad(*tensors, *options).view(logits.shape)
    _cross_entropy_shard_grad_(_out_rows(op, out, logits), *tensors, *options)
    return out


def _out_rows(op: str, out: Tensor, logits: Tensor) -> Tensor:
    """out as the [N, Vp] view that is written."""
    if out.shape != logits.shape or out.dtype != logits.dtype or out.device != logits.device:
        raise ValueError(
            f"{op}: expected out like logits ({list(logits.shape)}, {logits.dtype}, "
            f"{logits.device}), got out={list(out.shape)} {out.dtype} on {out.device}; "
            "make it with torch.empty_like(logits)"
        )
    columns = out.shape[-1]
    rows: Tensor | None = None
    if out.numel() == 0 or out.stride(-1) == 1 or columns == 1:
        try:
            rows = out.detach().view(-1, columns) if columns else out.detach().flatten(0, -2)
        except RuntimeError:
            rows = None
    if rows is None or (rows.shape[0] > 1 and rows.stride(0) < columns):
        raise ValueError(
            f"{op}: expected out with contiguous rows evenly apart, got out.stride()="
            f"{out.stride()}; make it with torch.empty_like(logits)"
        )
    return rows
