"""The AdamW step of a list of tensors, or of ranges of flat buffers, in one call.

    g = grad * grad_scale (negated to maximize),  p = p * (1 - lr * weight_decay)
    m = m + (g - m) * (1 - beta1),  v = v * beta2 + (1 - beta2) * g * g
    p = p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

One pass over memory unscales, clips, skips, updates, rounds to the parameter's type and zeroes the
gradient. The compiled kernels round the same operations in the same order everywhere
(csrc/adamw_math.h), so the bits depend neither on how a tensor is cut into pieces, nor on threads,
instruction set or device: shards of any world size hold the parameters of one rank.

[Note: storage modes]
A 16-bit parameter is the rounded image of fp32 master weights, which take p's part above. A bf16
parameter may have an int16 remainder instead, its master's lower half: the same bits in half the
memory. Or it has no master and is rounded stochastically. Moments are fp32, bf16 or 8-bit codes
with a scale for each 256 elements (kernels/adamw_storage.py); the latter two are rounded
stochastically as well, because to nearest exp_avg_sq would stop moving at beta2 = 0.999.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fastpar.kernels import _C, backend, choice
from fastpar.kernels.adamw_checks import (
    MOMENT_CODES,
    Hyper,
    check_one,
    check_scalar,
    checked_seed,
    checked_threads,
    flatten_hypers,
)
from fastpar.kernels.adamw_storage import (
    MOMENT_BLOCK,
    decode_moment,
    encode_moment,
    in_order,
    master_join,
    master_split,
    new_moment,
    round_to_bf16,
)
from fastpar.kernels.backend import DTYPE_CODES, use_cpp, use_cuda
from fastpar.kernels.op import define_op

__all__ = [
    "MOMENT_BLOCK",
    "Hyper",
    "adamw_step_",
    "adamw_step_flat_",
    "decode_moment",
    "encode_moment",
    "master_join",
    "master_split",
    "new_moment",
]


_COPIED_ELEMENTS = 1 << 26  # of scaled or widened gradients that exist at once
# Codes of csrc/ops.h.
_MASTERS = {torch.float32: 1, torch.int16: 2}
_STOCHASTIC = 3


def _storage(p: Tensor, g: Tensor, exp_avg: Tensor, masters: list[Tensor]) -> list[int]:
    """Codes of (parameter, gradient, moments, master) for the compiled kernels."""
    master = _STOCHASTIC if p.dtype == torch.bfloat16 else 0
    if masters:
        master = _MASTERS[masters[0].dtype]
    return [DTYPE_CODES[p.dtype], DTYPE_CODES[g.dtype], MOMENT_CODES[exp_avg.dtype], master]


def _step_compiled(
    columns: list[list[Tensor]],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    ranges: list[int],
    hypers: list[float],
    hyper_tensors: list[Tensor],
    hyper_slots: list[int],
    maximize: bool,
    zero_grad: bool,
    seed: int,
    threads: int,
    on_cuda: bool,
) -> None:
    params, grads = columns[0], columns[1]
    ordered = [in_order(g, p) for p, g in zip(params, grads)]
    hypers_at: list[Tensor | None] = [None] * len(hypers)
    for slot, t in zip(hyper_slots, hyper_tensors):
        hypers_at[slot] = t
    call = (
        [params, ordered, *columns[2:]],
        ranges,
        hypers,
        hypers_at,
        _storage(params[0], grads[0], columns[2][0], columns[5]),
        maximize,
        zero_grad,
        grad_scale,
        found_inf,
        seed,
    )
    if on_cuda:
        with torch.cuda.device_of(params[0]):
            backend.cuda_kernels.adamw_step_cuda(*call, backend.cuda_stream(params[0]))
    else:
        _C.adamw_step(*call, threads)
    if zero_grad:
        for g, used in zip(grads, ordered):
            if used is not g:
                g.zero_()


def _step_torch(
    columns: list[list[Tensor]],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    ranges: list[int],
    hypers: list[float],
    hyper_tensors: list[Tensor],
    hyper_slots: list[int],
    maximize: bool,
    zero_grad: bool,
) -> None:
    """torch's fused AdamW on fp32 tensors, then a copy to 16-bit parameters.

    Hyper-parameters that are tensors are read on the host.
    """
    params, exp_avgs, masters = columns[0], columns[2], columns[5]
    half = params[0].dtype in (torch.bfloat16, torch.float16)
    wide = (torch.float32, torch.float64)
    if exp_avgs[0].dtype not in wide or (half and (not masters or masters[0].dtype not in wide)):
        raise RuntimeError(
            "adamw_step_: expected fp32 moments, and fp32 master weights of 16-bit parameters, "
            f"where torch's AdamW serves, got exp_avgs={exp_avgs[0].dtype} master_weights="
            f"{masters[0].dtype if masters else None} on {params[0].device}; "
            f"these modes need the compiled kernels: {backend.way_to_cpp()}"
        )
    hypers = list(hypers)
    for slot, t in zip(hyper_slots, hyper_tensors):
        hypers[slot] = t.item()
    by_hyper: dict[int, list[list[Tensor]]] = {}
    for tensor, start, stop, hyper, _ in zip(*[iter(ranges)] * 5):
        row = [column[tensor] for column in columns[:6] if column]
        if stop - start != row[0].numel():
            row = [t[start:stop] for t in row]
        by_hyper.setdefault(hyper, []).append(row)
    for hyper, rows in by_hyper.items():
        while rows:
            taken = elements = 0
            while taken < len(rows) and (not taken or elements <= _COPIED_ELEMENTS):
                elements += rows[taken][0].numel()
                taken += 1
            values = hypers[6 * hyper : 6 * hyper + 6]
            _fused_torch(
                rows[:taken], values, grad_scale, found_inf, maximize, bool(columns[4]), half
            )
            rows = rows[taken:]
    if zero_grad:
        for tensor, start, stop, _, _ in zip(*[iter(ranges)] * 5):
            g = columns[1][tensor]
            (g if stop - start == g.numel() else g[start:stop]).zero_()


def _fused_torch(
    rows: list[list[Tensor]],
    hyper: list[float],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    maximize: bool,
    amsgrad: bool,
    half: bool,
) -> None:
    """Rows of param, grad, exp_avg, exp_avg_sq, then max_exp_avg_sq and master where they are."""
    params, grads, exp_avgs, exp_avg_sqs, *rest = (list(column) for column in zip(*rows))
    weights = rest[-1] if half else params
    # _fused_adamw_ would unscale the caller's gradients in place; these are copies.
    scaled = [in_order(g, w).to(w.dtype) for g, w in zip(grads, weights)]
    if grad_scale is not None:
        scaled = list(torch._foreach_mul(scaled, grad_scale.to(scaled[0].dtype)))
    lr, beta1, beta2, eps, weight_decay, step = hyper
    torch._fused_adamw_(
        weights,
        scaled,
        exp_avgs,
        exp_avg_sqs,
        rest[0] if amsgrad else [],
        [torch.full((), step, device=params[0].device, dtype=torch.float32)] * len(rows),
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=amsgrad,
        maximize=maximize,
        found_inf=found_inf,
    )
    if half:
        for p, master in zip(params, weights):
            rounded = round_to_bf16(master) if p.dtype == torch.bfloat16 else master.to(p.dtype)
            p.copy_(rounded if found_inf is None else torch.where(found_inf != 0, p, rounded))


def _run(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor],
    master_weights: list[Tensor],
    exp_avg_scales: list[Tensor],
    exp_avg_sq_scales: list[Tensor],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    ranges: list[int],
    hypers: list[float],
    hyper_tensors: list[Tensor],
    hyper_slots: list[int],
    maximize: bool,
    zero_grad: bool,
    seed: int,
    threads: int,
) -> None:
    states = (exp_avgs, exp_avg_sqs, max_exp_avg_sqs, master_weights)
    columns = [params, grads, *states, exp_avg_scales, exp_avg_sq_scales]
    call = (columns, grad_scale, found_inf, ranges, hypers, hyper_tensors, hyper_slots)
    on_cuda = params[0].dtype in DTYPE_CODES and use_cuda("adamw_step_", params[0])
    if hyper_tensors and not on_cuda and (params[0].is_cuda or backend.cuda_on_cpu):
        # torch's would read them on the host: it would wait, and a capture would fail.
        on_cuda = choice.is_right("adamw_step_", params[0])
    if on_cuda or use_cpp("adamw_step_", params[0]):
        threads = threads or torch.get_num_threads()
        _step_compiled(*call, maximize, zero_grad, seed, threads, on_cuda)
    else:
        _step_torch(*call, maximize, zero_grad)
    # Memory written through pointers: autograd must know that these tensors changed.
    written = [t for i, column in enumerate(columns) if i != 1 or zero_grad for t in column]
    torch.autograd.graph.increment_version(written)


_accepted_dtypes: set[tuple] = set()  # of rows that check_one has accepted


def _have_one_form(row: tuple[Any, ...]) -> bool:
    """Whether a row has nothing that check_one could refuse but dtypes."""
    p, g, exp_avg, exp_avg_sq, max_exp_avg_sq, master, *scales = row
    if not (
        p.is_contiguous()
        and p.device == g.device == exp_avg.device == exp_avg_sq.device
        and p.shape == g.shape == exp_avg.shape == exp_avg_sq.shape
        and p.stride() == exp_avg.stride() == exp_avg_sq.stride()
    ):
        return False
    for t in (max_exp_avg_sq, master):
        if t is not None and not (
            p.shape == t.shape and p.stride() == t.stride() and p.device == t.device
        ):
            return False
    for t in scales:
        if t is not None and not (
            t.shape == (-(-p.numel() // MOMENT_BLOCK),)
            and t.is_contiguous()
            and p.device == t.device
        ):
            return False
    return True


_adamw_step = define_op(
    "adamw_step_(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs, "
    "Tensor(d!)[] exp_avg_sqs, Tensor(e!)[] max_exp_avg_sqs, Tensor(f!)[] master_weights, "
    "Tensor(g!)[] exp_avg_scales, Tensor(h!)[] exp_avg_sq_scales, Tensor? grad_scale, "
    "Tensor? found_inf, int[] ranges, float[] hypers, Tensor[] hyper_tensors, int[] hyper_slots, "
    "bool maximize, bool zero_grad, int seed, int threads) -> ()",
    _run,
    lambda *args: None,
    ("CPU", "CUDA"),
)


def _call(columns: list[list[Tensor]], *args: Any) -> None:
    """The op on gradients whose memory holds their values; see Op's [Note: unusual tensors]."""
    grads = columns[1]
    # What is compiled cannot ask; its gradients are those of compiled code, which negates at once.
    if torch.compiler.is_compiling() or not any(map(Tensor.is_neg, grads)):
        _adamw_step(*columns, *args)
        return
    plain = [g.resolve_neg() for g in grads]
    _adamw_step(columns[0], plain, *columns[2:], *args)
    for g, used in zip(grads, plain):
        if g is not used:
            g.copy_(used)  # zeros, where these were asked for


@torch.no_grad()
def adamw_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    hypers: Hyper | Sequence[Hyper],
    *,
    hyper_index: Sequence[int] | None = None,
    master_weights: Sequence[Tensor | None] | None = None,
    max_exp_avg_sqs: Sequence[Tensor] | None = None,
    exp_avg_scales: Sequence[Tensor | None] | None = None,
    exp_avg_sq_scales: Sequence[Tensor | None] | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    maximize: bool = False,
    zero_grad: bool = False,
    stochastic_rounding_seed: int | None = None,
    first_indices: Sequence[int] | None = None,
    threads: int | None = None,
) -> None:
    """One AdamW step on every tensor of the lists, in place. See [Note: storage modes].

    Args:
        params: fp32, bf16 or fp16 (fp64: torch's kernel); dense, any shape, size 0 included. No two
            share memory, nor do their states.
        grads: dtype of the parameter; for 16-bit ones also fp32, and with fp32 master weights all
            three; any strides. Changed only by zero_grad.
        exp_avgs, exp_avg_sqs: fp32, bf16 or uint8 (new_moment), shape and strides of the parameter.
        hypers: scalars of the step, one Hyper or several; tensors among them are not checked.
        hyper_index: which of them each parameter takes; needed where there are several.
        master_weights: fp32 for a 16-bit parameter, or int16 remainder (master_split) for bf16, or
            None for bf16 to be rounded stochastically; None for each fp32 one.
        max_exp_avg_sqs: largest exp_avg_sqs so far: amsgrad. Not with uint8 moments.
        exp_avg_scales, exp_avg_sq_scales: of uint8 moments, fp32.
        grad_scale: fp32 [] on the parameters' device, multiplied into every gradient (clip factor,
            1 / loss scale); None means 1.
        found_inf: fp32 [] there; where not 0, nothing changes but the gradients under zero_grad.
            Without it non-finite gradients go into the parameters.
        maximize: ascend instead of descend.
        zero_grad: leave zeros in the gradients.
        stochastic_rounding_seed: of the random bits of stochastic rounding; needed for bf16
            parameters without master, None is 0 for bf16 and uint8 moments.
        first_indices: index of each parameter's first element among the random bits; a multiple of
            256 for uint8 moments. None: the sizes before it, each rounded up to 256.
        threads: on CPU; None is torch.get_num_threads().
    Raises:
        ValueError: lists of unequal length; dtypes, shapes, strides, devices or scalars that do not
            fit; tensors that share memory.
        RuntimeError: bf16 or uint8 moments, remainders or stochastic rounding where torch's kernel
            serves (FASTPAR_BACKEND=torch).
    Traffic: per element 28 bytes in fp32; in general that of reading the gradient and of reading
        and writing parameter, moments and master (a parameter with a full master is only written).
    Deterministic: yes; the same bits for any cut of a tensor into pieces, any number of threads and
        any instruction set.
    Oracle: fastpar.kernels.reference.adamw_step_ref
    Source: Loshchilov, Hutter 2019, arXiv 1711.05101; stochastic rounding of bf16: Zamirai et al.
        2020, arXiv 2010.06192; 8-bit moments in blocks: Dettmers et al. 2022, arXiv 2110.02861
    """
    n = len(params)
    lists = {
        "params": params,
        "grads": grads,
        "exp_avgs": exp_avgs,
        "exp_avg_sqs": exp_avg_sqs,
        "max_exp_avg_sqs": max_exp_avg_sqs,
        "master_weights": master_weights,
        "exp_avg_scales": exp_avg_scales,
        "exp_avg_sq_scales": exp_avg_sq_scales,
        "hyper_index": hyper_index,
        "first_indices": first_indices,
    }
    lengths = {name: len(value) for name, value in lists.items() if value is not None}
    if len(set(lengths.values())) != 1:
        raise ValueError(
            f"adamw_step_: expected lists of one length, got lengths={lengths}; "
            "pass one entry for each parameter"
        )
    if n == 0:
        return
    count = 1 if isinstance(hypers, Hyper) else len(hypers)
    indices = [0] * n if hyper_index is None else list(hyper_index)
    if (hyper_index is None and count != 1) or not all(0 <= h < count for h in indices):
        raise ValueError(
            f"adamw_step_: expected hyper_index to name one of {count} hypers for each parameter, "
            f"got hyper_index={hyper_index}; pass one Hyper, or an index for each parameter"
        )
    seed, threads = checked_seed(stochastic_rounding_seed), checked_threads(threads)
    nothing: list[Tensor | None] = [None] * n
    optional = [
        nothing if given is None else given
        for given in (max_exp_avg_sqs, master_weights, exp_avg_scales, exp_avg_sq_scales)
    ]
    groups: dict[tuple, tuple[list[list[Tensor]], list[int]]] = {}
    first_index, stochastic = 0, stochastic_rounding_seed is not None
    for i, row in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs, *optional)):
        p, exp_avg = row[0], row[2]
        dtypes = tuple([None if t is None else t.dtype for t in row])
        # The ordinary case in a microsecond; the rest, errors included, one by one.
        if (dtypes, stochastic) not in _accepted_dtypes or not _have_one_form(row):
            _, g, _, exp_avg_sq, max_exp_avg_sq, master, *scales = row
            check_one(i, p, g, exp_avg, exp_avg_sq, max_exp_avg_sq, master, scales, stochastic)
            _accepted_dtypes.add((dtypes, stochastic))
        if first_indices is not None:
            first_index = first_indices[i]
        if first_index < 0 or (exp_avg.dtype == torch.uint8 and first_index % MOMENT_BLOCK):
            raise ValueError(
                "adamw_step_: expected first_indices >= 0 and multiples of 256 for uint8 moments, "
                f"got first_indices[{i}]={first_index}; cut at multiples of 256"
            )
        key = (p.device, *dtypes[:3], dtypes[5])
        if key not in groups:
            groups[key] = [[] for _ in row], []
        columns, ranges = groups[key]
        ranges += (len(columns[0]), 0, p.numel(), indices[i], first_index)
        for column, t in zip(columns, row):
            if t is not None:
                column.append(t)
        first_index += -(-p.numel() // MOMENT_BLOCK) * MOMENT_BLOCK
    for (device, *_), (columns, ranges) in groups.items():
        check_scalar("grad_scale", grad_scale, device)
        check_scalar("found_inf", found_inf, device)
        numbers = flatten_hypers(hypers, device)
        flags = (maximize, zero_grad, seed, threads)
        _call(columns, grad_scale, found_inf, ranges, *numbers, *flags)


@torch.no_grad()
def adamw_step_flat_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    ranges: Sequence[tuple[int, int, int, int]],
    hypers: Hyper | Sequence[Hyper],
    *,
    master_weight: Tensor | None = None,
    max_exp_avg_sq: Tensor | None = None,
    exp_avg_scale: Tensor | None = None,
    exp_avg_sq_scale: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    maximize: bool = False,
    zero_grad: bool = False,
    stochastic_rounding_seed: int | None = None,
    threads: int | None = None,
) -> None:
    """One AdamW step on ranges of flat buffers, in place: adamw_step_ for shards.

    Args:
        param, grad, exp_avg, exp_avg_sq, master_weight, max_exp_avg_sq: [P], contiguous, of the
            dtypes that adamw_step_ takes; elements outside the ranges are left alone.
        ranges: (start, stop, hyper_index, first_index): elements [start, stop) take
            hypers[hyper_index], and element `start` has the random bits of first_index. With uint8
            moments start and first_index are multiples of 256.
        exp_avg_scale, exp_avg_sq_scale: [ceil(P / 256)] fp32, of uint8 moments.
        others: as in adamw_step_.
    Raises:
        ValueError: as adamw_step_; ranges outside the buffer or sharing elements.
    Traffic, Deterministic, Oracle, Source: as adamw_step_.
    """
    stochastic = stochastic_rounding_seed is not None
    scales = (exp_avg_scale, exp_avg_sq_scale)
    states = (exp_avg, exp_avg_sq, max_exp_avg_sq, master_weight)
    check_one(0, param, grad, *states, scales, stochastic)
    if param.dim() != 1 or not (param.is_contiguous() and grad.is_contiguous()):
        raise ValueError(
            "adamw_step_flat_: expected contiguous buffers of one dimension, got "
            f"param={list(param.shape)} with strides {param.stride()} and {grad.stride()}; "
            "use adamw_step_ for tensors"
        )
    count = 1 if isinstance(hypers, Hyper) else len(hypers)
    whole = MOMENT_BLOCK if exp_avg.dtype == torch.uint8 else 1
    flat: list[int] = []
    for i, (start, stop, hyper, first_index) in enumerate(ranges):
        if (
            not (0 <= start <= stop <= param.numel() and 0 <= hyper < count and first_index >= 0)
            or start % whole
            or first_index % whole
        ):
            raise ValueError(
                f"adamw_step_flat_: expected 0 <= start <= stop <= {param.numel()}, "
                f"0 <= hyper_index < {count}, first_index >= 0, start and first_index multiples "
                f"of {whole}, got ranges[{i}]={(start, stop, hyper, first_index)}; "
                "cut ranges within the buffer, for uint8 moments at multiples of 256"
            )
        flat += (0, start, stop, hyper, first_index)
    if not flat:
        return
    check_scalar("grad_scale", grad_scale, param.device)
    check_scalar("found_inf", found_inf, param.device)
    _call(
        [[] if t is None else [t] for t in (param, grad, *states, *scales)],
        grad_scale,
        found_inf,
        flat,
        *flatten_hypers(hypers, param.device),
        maximize,
        zero_grad,
        checked_seed(stochastic_rounding_seed),
        checked_threads(threads),
    )
