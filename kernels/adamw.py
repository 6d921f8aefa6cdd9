"""The AdamW step of a list of tensors, or of ranges of flat buffers, in one call.

    g = grad * grad_scale (negated to maximize),  p = p * (1 - lr * weight_decay)
    m = m + (g - m) * (1 - beta1),  v = v * beta2 + (1 - beta2) * g * g
    p = p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

One pass over memory unscales, clips, skips, updates, rounds to the parameter's type and zeroes the
gradient. The compiled kernels round the same operations in the same order everywhere
(csrc/adamw_math.h), so the bits depend neither on how a tensor is divided, nor on threads,
instruction set or device: shards of any world size hold the parameters of one rank.

[Note: storage modes]
A 16-bit parameter is the rounded value of fp32 master weights, which take p's part above. A bf16
parameter may have an int16 remainder instead, its master's lower half: the same bits in half the
memory. Or it has no master and is rounded stochastically. Moments are fp32, bf16 or 8-bit codes
with a scale per 256 elements; the latter two are also rounded stochastically, because with rounding
to nearest exp_avg_sq would stop moving at beta2 = 0.999.

8-bit moments are torch.uint8 codes in the order of memory and fp32 scales, one per MOMENT_BLOCK
codes: exp_avg is scale * sign(k) * (k / 127)^2, k being the code as int8; exp_avg_sq is
scale * (k / 255)^4. The compiled kernel works on these forms (csrc/adamw_math.h explains the
choice); this file creates them and converts them from and to fp32 for state dicts.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpar.kernels import _C, backend, choice
from fastpar.kernels.backend import DTYPE_CODES, use_cpp, use_cuda
from fastpar.kernels.lists import Kept, goes_at_once, rows_of
from fastpar.kernels.op import check_scalar, define_op

MOMENT_BLOCK = 256
MOMENT_DTYPES = (torch.float32, torch.bfloat16, torch.uint8)
_COPIED_ELEMENTS = 1 << 26  # of scaled or widened gradients that exist at once


class Hyper(NamedTuple):
    """The scalars of a step; a tensor is fp32 [] on the parameters' device and read there."""

    lr: float | Tensor
    beta1: float | Tensor
    beta2: float | Tensor
    eps: float | Tensor
    weight_decay: float | Tensor
    step: float | Tensor


_LOWEST, _HIGHEST = Hyper(0, 0, 0, 0, 0, 1), Hyper(math.inf, 1, 1, math.inf, math.inf, math.inf)


def check_one(
    i: int, p: Tensor, g: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None, master: Tensor | None, scales: Sequence[Tensor | None],
    stochastic: bool,
) -> None:  # fmt: skip
    """Checks one parameter of a call and its state."""
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
    kinds = (torch.float64,) if p.dtype == torch.float64 else MOMENT_DTYPES
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
    form = torch.float32, blocks, True
    if any(
        (s is not None) != eight_bit
        or (s is not None and (s.dtype, s.shape, s.is_contiguous()) != form)
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
            f"elements, params[{i}]={list(p.shape)} with strides {p.stride()}; step the base "
            "tensor of the view, or a copy made by contiguous()"
        )
    same = all(s.stride() == p.stride() for s in states)
    if not same and not all(s.is_contiguous() for s in (p, *states)):
        raise ValueError(
            "adamw_step_: expected dense parameters and states of the same strides, got "
            f"{[s.stride() for s in (p, *states)]} at index {i}; create states with "
            "torch.zeros_like(param); after a change of the parameter's strides reload an "
            "optimizer's states by load_state_dict(state_dict())"
        )


def flatten_hypers(
    hypers: Hyper | Sequence[Hyper], device: torch.device
) -> tuple[list[float], list[Tensor], list[int]]:
    """Numbers of all hypers, 6 each, and the tensors among them with their indices."""
    rows = [hypers] if isinstance(hypers, Hyper) else hypers
    numbers: list[float] = []
    tensors, slots = [], []
    for row in rows:
        for name, value, low, high in zip(Hyper._fields, row, _LOWEST, _HIGHEST):
            if isinstance(value, Tensor):
                check_scalar("adamw_step_", name, value, device)
                tensors.append(value)
                slots.append(len(numbers))
                numbers.append(0.0)
                continue
            if not low <= value < high:
                below = "" if high == math.inf else f" and < {high:g}"
                do = "count from 1" if low else "correct the hyper-parameter"
                raise ValueError(
                    f"adamw_step_: expected {name} >= {low:g}{below}, got {name}={value}; {do}"
                )
            numbers.append(float(value))
    return numbers, tensors, slots


def check_scalars(
    grad_scale: Tensor | None, found_inf: Tensor | None, device: torch.device
) -> None:
    """Checks the tensors that a step reads on the parameters' device."""
    for name, value in (("grad_scale", grad_scale), ("found_inf", found_inf)):
        if value is not None:
            check_scalar("adamw_step_", name, value, device)


def checked_seed(seed: int | None) -> int:
    """The seed of the random bits, 0 for None."""
    if seed is not None and not 0 <= seed < 2**63:
        raise ValueError(
            "adamw_step_: expected 0 <= stochastic_rounding_seed < 2**63, got "
            f"stochastic_rounding_seed={seed}; choose another seed"
        )
    return seed or 0


def checked_threads(threads: int | None) -> int:
    """The number of threads; 0 is torch's, read outside of a compiled graph."""
    if threads is not None and threads < 1:
        raise ValueError(
            f"adamw_step_: expected threads >= 1 or None, got threads={threads}; "
            "None takes torch.get_num_threads()"
        )
    return threads or 0


def is_dense(t: Tensor) -> bool:
    """Whether t's elements fill one block of memory without overlap."""
    if t.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(t.stride(), t.shape)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def in_order(g: Tensor, p: Tensor) -> Tensor:
    """g, laid out in memory in the order of p: both are updated as flat memory."""
    if g.stride() == p.stride() or (g.is_contiguous() and p.is_contiguous()):
        return g
    return torch.empty_strided(p.shape, p.stride(), dtype=g.dtype, device=g.device).copy_(g)


def _in_memory_order(t: Tensor, op: str) -> Tensor:
    if not is_dense(t):
        raise ValueError(
            f"{op}: expected a dense tensor, got stride={t.stride()} for shape={list(t.shape)}; "
            "make it contiguous"
        )
    return t.as_strided((t.numel(),), (1,))


def new_moment(param: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """A moment of zeros for a dense parameter, with its scales for torch.uint8."""
    if dtype not in MOMENT_DTYPES:
        raise ValueError(
            "new_moment: expected dtype torch.float32, torch.bfloat16 or torch.uint8, got "
            f"dtype={dtype}; choose one of these"
        )
    moment = torch.zeros_like(param, dtype=dtype, requires_grad=False)
    if dtype != torch.uint8:
        return moment, None
    blocks = -(-param.numel() // MOMENT_BLOCK)
    return moment, torch.zeros(blocks, dtype=torch.float32, device=param.device)


def _levels(signed: bool, device: torch.device) -> Tensor:
    """The value of each code for a scale of 1."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    one = torch.ones((), device=device, dtype=torch.float32)
    if signed:
        t = codes.view(torch.int8).float() * (one / 127)
        return t * t.abs()
    t = codes.float() * (one / 255)
    return t * t * (t * t)


@torch.no_grad()
def decode_moment(codes: Tensor, scale: Tensor, *, signed: bool) -> Tensor:
    """The fp32 values of an 8-bit moment, with the codes' shape and strides. codes: uint8, dense;
    scale: [ceil(codes.numel() / MOMENT_BLOCK)] fp32; signed: True for exp_avg, else exp_avg_sq."""
    flat = _in_memory_order(codes, "decode_moment")
    blocks = -(-flat.numel() // MOMENT_BLOCK)
    if codes.dtype != torch.uint8 or scale.shape != (blocks,) or scale.dtype != torch.float32:
        raise ValueError(
            f"decode_moment: expected uint8 codes and fp32 scale of shape [{blocks}], got "
            f"{codes.dtype} and {scale.dtype} {list(scale.shape)}; pass what new_moment made"
        )
    values = torch.empty_like(codes, dtype=torch.float32)
    wide = scale.repeat_interleave(MOMENT_BLOCK)[: flat.numel()]
    found = _levels(signed, codes.device)[flat.int()] * wide
    _in_memory_order(values, "decode_moment").copy_(found)
    return values


@torch.no_grad()
def encode_moment(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """The nearest codes of an fp32 moment, with its shape and strides, and the scales. exp_avg_sq >
    0 gets a code of at least 1, as in the step."""
    flat = _in_memory_order(values, "encode_moment").float()
    blocks = -(-flat.numel() // MOMENT_BLOCK)
    padded = flat.new_zeros(blocks * MOMENT_BLOCK)
    padded[: flat.numel()] = flat
    scale = padded.view(blocks, MOMENT_BLOCK).abs().amax(1)
    wide = scale.repeat_interleave(MOMENT_BLOCK)[: flat.numel()]
    levels = _levels(signed, values.device)
    if signed:
        levels = levels[:128]
    ratio = torch.where(wide > 0, flat.abs() / wide, 0.0)
    middles = (levels[:-1].double() + levels[1:].double()) / 2
    found = torch.bucketize(ratio.double(), middles)
    if signed:
        found = torch.where(flat < 0, 256 - found, found) % 256
    else:
        found = torch.where(flat > 0, found.clamp(min=1), found)
    codes = torch.empty_like(values, dtype=torch.uint8)
    _in_memory_order(codes, "encode_moment").copy_(found)
    return codes, scale


@torch.no_grad()
def round_to_bf16(master: Tensor) -> Tensor:
    """The bf16 parameter of an fp32 master: to nearest, ties away from zero, one nan."""
    return _upper_half(_bits(master))


def _bits(master: Tensor) -> Tensor:
    """The fp32 values' bits as a new int32 tensor, with one nan."""
    return torch.where(master.isnan(), 0x7FC00000, master.view(torch.int32))


def _upper_half(bits: Tensor) -> Tensor:
    """The bf16 half, as in round_to_bf16. Overwrites bits: a copy would not fit in memory."""
    bits += 0x8000
    bits >>= 16
    return bits.to(torch.int16).view(torch.bfloat16)


@torch.no_grad()
def master_split(master: Tensor) -> tuple[Tensor, Tensor]:
    """An fp32 master as (bf16 parameter, int16 remainder), with its strides; master_join inverts
    it. Exact for every value; nan becomes the nan 0x7fc00000."""
    if master.dtype != torch.float32:
        raise ValueError(
            f"master_split: expected an fp32 master, got dtype={master.dtype}; pass param.float()"
        )
    bits = _bits(master)
    remainder = bits.to(torch.int16)
    return _upper_half(bits), remainder


@torch.no_grad()
def master_join(param: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 master of a bf16 parameter and its int16 remainder."""
    if param.dtype != torch.bfloat16 or remainder.dtype != torch.int16:
        raise ValueError(
            "master_join: expected a bf16 parameter and an int16 remainder, got "
            f"{param.dtype} and {remainder.dtype}; pass what master_split made"
        )
    low = remainder.to(torch.int32)
    bits = param.view(torch.int16).to(torch.int32)
    bits += low >> 31  # -1 where the remainder is negative
    bits <<= 16
    low &= 0xFFFF
    bits |= low
    return bits.view(torch.float32)


def values_of(p: Tensor, state: dict[str, Any]) -> Tensor:
    """The fp32 values of a parameter, to be changed in place and passed to store_values()."""
    if "master_remainder" in state:
        return master_join(p, state["master_remainder"])
    return state.get("master_weight", p)


def store_values(p: Tensor, state: dict[str, Any], values: Tensor) -> None:
    """Round the fp32 values into a 16-bit parameter, and keep the rest in its state."""
    if "master_remainder" in state:
        rounded, remainder = master_split(values)
        p.copy_(rounded)
        state["master_remainder"].copy_(remainder)
    elif "master_weight" in state:
        p.copy_(values if p.dtype == torch.float16 else round_to_bf16(values))


def _server(p: Tensor, hyper_tensors: list[Tensor]) -> bool | None:
    """Whether CUDA's kernel serves tensors like p, or the CPU's; None: torch's."""
    if p.dtype in DTYPE_CODES and use_cuda("adamw_step_", p):
        return True
    on_gpu = p.is_cuda or backend.cuda_on_cpu
    # torch's kernel would read tensors on the host, which waits and breaks a capture.
    if hyper_tensors and on_gpu and choice.is_right("adamw_step_", p):
        return True
    return False if use_cpp("adamw_step_", p) else None


def _is_direct(columns: list[list[Tensor]]) -> bool:
    """Whether a call may go to _step_compiled past the dispatcher, which no tool then sees."""
    if not goes_at_once(itertools.chain(*columns)):
        return False
    return columns[0][0].dtype in DTYPE_CODES and not torch.autograd._profiler_enabled()


def _given(columns: list[list[Tensor]]) -> int:
    """A bit for each of the lists that is given."""
    return sum(1 << i for i, column in enumerate(columns) if column)


def _fits(columns: list[list[Tensor]], stochastic: bool) -> bool:
    """Whether _step_compiled makes the step of these lists."""
    params, grads, *states = columns
    used, kept = rows_of([*params, *grads]), rows_of([*itertools.chain(*states)])
    return _C.adamw_fits(used, kept, _given(columns), stochastic)


def _step_compiled(
    on_cuda: bool, columns: list[list[Tensor]], zero_grad: bool, *how: Any, threads: int = 0
) -> bool:
    """Whether the step was made: not of lists with several dtypes or devices, with gradients in
    another memory order, or that check_one refuses."""
    params, grads, *states = columns
    kept = [*itertools.chain(*states)]
    used = rows_of([*params, *grads], len(params) * (2 if zero_grad else 1))
    lists = used, rows_of(kept, len(kept)), _given(columns), False
    return _launch(on_cuda, params[0], lists, zero_grad, *how, threads=threads)


def _launch(
    on_cuda: bool, like: Tensor, lists: tuple[Tensor, Tensor, int, bool], zero_grad: bool,
    hyper_index: list[int], first_indices: list[int], hypers: list[float],
    hyper_tensors: list[Tensor], hyper_slots: list[int], maximize: bool,
    grad_scale: Tensor | None, found_inf: Tensor | None, seed: int | None, *, threads: int = 0,
) -> bool:  # fmt: skip
    """lists: rows of parameters and gradients, rows of states and counters, the lists that are
    given, whether there are counters."""
    call = (
        *lists, hyper_index, first_indices, hypers, hyper_tensors, hyper_slots, maximize,
        zero_grad, grad_scale, found_inf, seed,
    )  # fmt: skip
    if not on_cuda:
        return _C.adamw_step(*call, threads or torch.get_num_threads()) is not None
    with torch.cuda.device_of(like):
        return backend.cuda_kernels.adamw_step_cuda(*call, backend.cuda_stream(like)) is not None


def _step_torch(
    columns: list[list[Tensor]], grad_scale: Tensor | None, found_inf: Tensor | None,
    hyper_index: list[int], hypers: list[float], hyper_tensors: list[Tensor],
    hyper_slots: list[int], maximize: bool, zero_grad: bool,
) -> None:  # fmt: skip
    """torch's fused AdamW on fp32 tensors, then a copy to 16-bit parameters. Hyper-parameters that
    are tensors are read on the host."""
    params, exp_avgs, masters = columns[0], columns[2], columns[5]
    half = params[0].dtype in (torch.bfloat16, torch.float16)
    wide = (torch.float32, torch.float64)
    if exp_avgs[0].dtype not in wide or (half and (not masters or masters[0].dtype not in wide)):
        raise RuntimeError(
            "adamw_step_: expected fp32 moments, and fp32 master weights of 16-bit parameters, "
            f"for torch's AdamW, got exp_avgs={exp_avgs[0].dtype} master_weights="
            f"{masters[0].dtype if masters else None} on {params[0].device}; "
            f"these modes need the compiled kernels: {backend.way_to_cpp()}"
        )
    hypers = list(hypers)
    for slot, t in zip(hyper_slots, hyper_tensors):
        hypers[slot] = t.item()
    by_hyper: dict[int, list[list[Tensor]]] = {}
    for i, hyper in enumerate(hyper_index):
        by_hyper.setdefault(hyper, []).append([column[i] for column in columns[:6] if column])
    how = grad_scale, found_inf, maximize, bool(columns[4]), half
    for hyper, these in by_hyper.items():
        taken = elements = 0
        for i, row in enumerate(these):
            elements += row[0].numel()
            if elements > _COPIED_ELEMENTS or i == len(these) - 1:
                _fused_torch(these[taken : i + 1], hypers[6 * hyper : 6 * hyper + 6], *how)
                taken, elements = i + 1, 0
    for row in itertools.chain(*by_hyper.values()) if zero_grad else ():
        row[1].zero_()


def _fused_torch(
    rows: list[list[Tensor]], hyper: list[float], grad_scale: Tensor | None,
    found_inf: Tensor | None, maximize: bool, amsgrad: bool, half: bool,
) -> None:  # fmt: skip
    """Rows of param, grad, exp_avg, exp_avg_sq, then max_exp_avg_sq and master if present."""
    params, grads, exp_avgs, exp_avg_sqs, *rest = (list(column) for column in zip(*rows))
    weights = rest[-1] if half else params
    # _fused_adamw_ would unscale the caller's gradients in place; these are copies.
    scaled = [in_order(g, w).to(w.dtype) for g, w in zip(grads, weights)]
    if grad_scale is not None:
        scaled = list(torch._foreach_mul(scaled, grad_scale.to(scaled[0].dtype)))
    lr, beta1, beta2, eps, weight_decay, step = hyper
    torch._fused_adamw_(
        weights, scaled, exp_avgs, exp_avg_sqs, rest[0] if amsgrad else [],
        [torch.full((), step, device=params[0].device, dtype=torch.float32)] * len(rows), lr=lr,
        beta1=beta1, beta2=beta2, weight_decay=weight_decay, eps=eps, amsgrad=amsgrad,
        maximize=maximize, found_inf=found_inf,
    )  # fmt: skip
    if half:
        for p, master in zip(params, weights):
            rounded = round_to_bf16(master) if p.dtype == torch.bfloat16 else master.to(p.dtype)
            p.copy_(rounded if found_inf is None else torch.where(found_inf != 0, p, rounded))


def _run(
    params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor],
    max_exp_avg_sqs: list[Tensor], master_weights: list[Tensor], exp_avg_scales: list[Tensor],
    exp_avg_sq_scales: list[Tensor], grad_scale: Tensor | None, found_inf: Tensor | None,
    hyper_index: list[int], first_indices: list[int], hypers: list[float],
    hyper_tensors: list[Tensor], hyper_slots: list[int], maximize: bool, zero_grad: bool, seed: int,
    threads: int,
) -> None:  # fmt: skip
    states = (exp_avgs, exp_avg_sqs, max_exp_avg_sqs, master_weights)
    columns = [params, grads, *states, exp_avg_scales, exp_avg_sq_scales]
    numbers = hypers, hyper_tensors, hyper_slots
    on_cuda = _server(params[0], hyper_tensors)
    if on_cuda is None:
        _step_torch(columns, grad_scale, found_inf, hyper_index, *numbers, maximize, zero_grad)
        # Below autograd torch does not: a call through the dispatcher is there.
        changed = [params, *states, *columns[6:], grads if zero_grad else []]
        torch.autograd.graph.increment_version([*itertools.chain(*changed)])
        return
    ordered = [in_order(g, p) for p, g in zip(params, grads)]
    done = _step_compiled(
        on_cuda,
        [params, ordered, *columns[2:]],
        zero_grad,
        hyper_index,
        first_indices,
        *numbers,
        maximize,
        grad_scale,
        found_inf,
        seed,
        threads=threads,
    )
    assert done, "adamw_step_: the compiled kernel does not take lists that check_one takes"
    if zero_grad:
        for grad, used in zip(grads, ordered):
            if used is not grad:
                grad.zero_()


_adamw_step = define_op(
    "adamw_step_(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs, "
    "Tensor(d!)[] exp_avg_sqs, Tensor(e!)[] max_exp_avg_sqs, Tensor(f!)[] master_weights, "
    "Tensor(g!)[] exp_avg_scales, Tensor(h!)[] exp_avg_sq_scales, Tensor? grad_scale, "
    "Tensor? found_inf, int[] hyper_index, int[] first_indices, float[] hypers, "
    "Tensor[] hyper_tensors, int[] hyper_slots, bool maximize, bool zero_grad, int seed, "
    "int threads) -> ()",
    _run,
)


def _call(columns: list[list[Tensor]], *args: Any) -> None:
    """The op on gradients whose memory holds their values; see Op's [Note: unusual tensors]."""
    grads = columns[1]
    # Compiled code cannot check; its gradients come from compiled code, which negates at once.
    if torch.compiler.is_compiling() or not any(map(Tensor.is_neg, grads)):
        _adamw_step(*columns, *args)
        return
    plain = [g.resolve_neg() for g in grads]
    _adamw_step(columns[0], plain, *columns[2:], *args)
    for g, used in zip(grads, plain):
        if g is not used:
            g.copy_(used)  # the requested zeros


@torch.no_grad()
def adamw_step_(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor], hypers: Hyper | Sequence[Hyper], *,
    hyper_index: Sequence[int] | None = None,
    master_weights: Sequence[Tensor | None] | None = None,
    max_exp_avg_sqs: Sequence[Tensor] | None = None,
    exp_avg_scales: Sequence[Tensor | None] | None = None,
    exp_avg_sq_scales: Sequence[Tensor | None] | None = None,
    grad_scale: Tensor | None = None, found_inf: Tensor | None = None, maximize: bool = False,
    zero_grad: bool = False, stochastic_rounding_seed: int | None = None,
    first_indices: Sequence[int] | None = None, threads: int | None = None,
) -> None:  # fmt: skip
    """One AdamW step on every tensor of the lists, in place. See [Note: storage modes].

    Args:
        params: fp32, bf16 or fp16 (fp64: torch's kernel); dense, any shape, size 0 included. No two
            share memory, nor do their states.
        grads: dtype of the parameter; for 16-bit ones also fp32, and with fp32 master weights all
            three; any strides. Changed only by zero_grad.
        exp_avgs, exp_avg_sqs: fp32, bf16 or uint8 (new_moment), shape and strides of the parameter.
        hypers: scalars of the step, one Hyper or several; tensors among them are not checked.
        hyper_index: which Hyper each parameter uses; required if there are several.
        master_weights: fp32 for a 16-bit parameter, or int16 remainder (master_split) for bf16, or
            None for bf16 to be rounded stochastically; None for each fp32 one.
        max_exp_avg_sqs: largest exp_avg_sqs so far: amsgrad. Not with uint8 moments.
        exp_avg_scales, exp_avg_sq_scales: of uint8 moments, fp32.
        grad_scale: fp32 [] on the parameters' device, multiplied into every gradient; None: 1.
        found_inf: fp32 [] there; if not 0, nothing changes except gradients under zero_grad.
        maximize: ascend. zero_grad: leave zeros in the gradients.
        stochastic_rounding_seed: of the random bits of stochastic rounding; required for bf16
            parameters without master; None is 0 for bf16 and uint8 moments.
        first_indices: index of each parameter's first element among the random bits; a multiple of
            256 for uint8 moments. None: the sizes before it, each rounded up to 256.
        threads: on CPU; None is torch.get_num_threads().
    Raises:
        ValueError: lists of unequal length; dtypes, shapes, strides, devices or scalars that do not
            fit; tensors that share memory.
        RuntimeError: bf16 or uint8 moments, remainders or stochastic rounding with torch's kernel
            (FASTPAR_BACKEND=torch).
    Traffic: per element 28 bytes in fp32; in general the gradient is read, and parameter, moments
        and master are read and written (a parameter with a full master is only written).
    Deterministic: yes, bitwise, for any division of a tensor, threads and instruction set.
    Oracle: fastpar.kernels.reference.adamw_step_ref
    Source: Loshchilov, Hutter 2019, arXiv 1711.05101; stochastic rounding of bf16: Zamirai et al.
        2020, arXiv 2010.06192; 8-bit moments in blocks: Dettmers et al. 2022, arXiv 2110.02861
    """
    n = len(params)
    lists: dict[str, Sequence[Any] | None] = {
        "params": params, "grads": grads, "exp_avgs": exp_avgs, "exp_avg_sqs": exp_avg_sqs,
        "max_exp_avg_sqs": max_exp_avg_sqs, "master_weights": master_weights,
        "exp_avg_scales": exp_avg_scales, "exp_avg_sq_scales": exp_avg_sq_scales,
        "hyper_index": hyper_index, "first_indices": first_indices,
    }  # fmt: skip
    lengths = {name: len(given) for name, given in lists.items() if given is not None}
    if len(set(lengths.values())) != 1:
        raise ValueError(
            f"adamw_step_: expected lists of one length, got lengths={lengths}; "
            "pass one entry for each parameter"
        )
    if n == 0:
        return
    count = 1 if isinstance(hypers, Hyper) else len(hypers)
    indices = [0] * n if hyper_index is None else list(hyper_index)
    if (hyper_index is None and count != 1) or min(indices) < 0 or max(indices) >= count:
        raise ValueError(
            f"adamw_step_: expected hyper_index to name one of {count} hypers for each parameter, "
            f"got hyper_index={hyper_index}; pass one Hyper, or an index for each parameter"
        )
    seed, threads = checked_seed(stochastic_rounding_seed), checked_threads(threads)
    columns: list[list[Any]] = [*map(list, (params, grads, exp_avgs, exp_avg_sqs))]
    for given in (max_exp_avg_sqs, master_weights, exp_avg_scales, exp_avg_sq_scales):
        columns.append([] if given is None or not any(t is not None for t in given) else [*given])
    firsts = [] if first_indices is None else list(first_indices)
    for i, first in enumerate(firsts):
        if first < 0 or (first % MOMENT_BLOCK and exp_avgs[i].dtype == torch.uint8):
            raise ValueError(
                "adamw_step_: expected first_indices >= 0 and multiples of 256 for uint8 "
                f"moments, got first_indices[{i}]={first}; cut at multiples of 256"
            )
    scalars, stochastic = (grad_scale, found_inf), stochastic_rounding_seed is not None
    if _is_direct(columns):
        check_scalars(*scalars, params[0].device)
        numbers = flatten_hypers(hypers, params[0].device)
        server = _server(params[0], numbers[1])
        if server is not None and _step_compiled(
            server,
            columns,
            zero_grad,
            indices,
            firsts,
            *numbers,
            maximize,
            *scalars,
            seed if stochastic else None,
            threads=threads,
        ):
            return
    full = [column or [None] * n for column in columns]
    groups: dict[tuple, list[int]] = {}
    dtypes = [[None if t is None else t.dtype for t in column] for column in full]
    for i, kind in enumerate(zip([p.device for p in params], *dtypes)):
        groups.setdefault(kind, []).append(i)
    parts = [
        [[c[i] for i in chosen] if c[chosen[0]] is not None else [] for c in full]
        for chosen in groups.values()
    ]
    at_once = len(parts) > 1 and goes_at_once(itertools.chain(*itertools.chain(*parts)))
    if not (at_once and all(_fits(part, stochastic) for part in parts)):
        for i, row in enumerate(zip(*full)):
            p, g, exp_avg, exp_avg_sq, max_exp_avg_sq, master, *scales = row
            check_one(i, p, g, exp_avg, exp_avg_sq, max_exp_avg_sq, master, scales, stochastic)
    sizes = [-(-p.numel() // MOMENT_BLOCK) * MOMENT_BLOCK for p in params]
    firsts = firsts or [*itertools.accumulate(sizes, initial=0)]
    for (device, *_), chosen, part in zip(groups, groups.values(), parts):
        places = [indices[i] for i in chosen], [firsts[i] for i in chosen]
        check_scalars(*scalars, device)
        numbers = flatten_hypers(hypers, device)
        _call(part, *scalars, *places, *numbers, maximize, zero_grad, seed, threads)


class CountedSteps:
    """Steps of the same parameters that read their numbers from counters on the host, and count.

    Args:
        columns: the lists of adamw_step_ from exp_avgs on, in the order of the op; [] for those
            that are not given.
        counters: of steps, fp32 or fp64 [].
        hyper_index, first_indices: as in adamw_step_.
    """

    def __init__(
        self, columns: list[list[Tensor]], counters: list[Tensor], hyper_index: list[int],
        first_indices: list[int],
    ) -> None:  # fmt: skip
        self.places = hyper_index, first_indices
        self._given = 3 | _given(columns) << 2
        self._kept = Kept([*itertools.chain(*columns), *counters])

    def step(
        self, used: Tensor, like: Tensor, hypers: Sequence[Hyper], grad_scale: Tensor | None,
        found_inf: Tensor | None, maximize: bool, zero_grad: bool, seed: int | None,
    ) -> bool:  # fmt: skip
        """One step; False, and nothing was done: adamw_step_ has to look at the lists.

        Args:
            used: rows of the parameters, which will be written, and of the gradients.
            like: one of the parameters.
        """
        if torch.autograd._profiler_enabled():  # which sees the op
            return False
        check_scalars(grad_scale, found_inf, like.device)
        server = _server(like, [])
        if server is None:
            return False
        numbers = flatten_hypers(hypers, like.device)
        lists = used, self._kept.rows(), self._given, True
        how = *self.places, *numbers, maximize, grad_scale, found_inf, seed
        return _launch(server, like, lists, zero_grad, *how)
