"""What parallelize() refuses before it changes anything, and what step() of any optimizer refuses.

[Note: strangers]
A parameter that was added to the model or unfrozen after parallelize() has no engine, so every rank
would train its own. The engine sees it when it reduces gradients; if all of the others have been
frozen there are none to reduce, and only the optimizer that steps it knows of it.
"""

from __future__ import annotations

import math
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fastpar.comm.mesh import Mesh
from fastpar.comm.wires import CODES, OF_GRADIENTS, OF_WEIGHTS, rounded_weights
from fastpar.files.dtypes import FLOATS
from fastpar.kernels.linear import depends_on_threads
from fastpar.parallel.debug import Debug
from fastpar.parallel.engine import Engine, engine_of_parameter
from fastpar.parallel.stages import STAGES, Settings


class _Alone:
    """What DistributedDataParallel reads first of a module that it wraps."""

    def __iter__(self) -> Iterator[str]:
        raise ValueError(
            "DistributedDataParallel: expected a model without an engine, got one of "
            "fastpar.parallelize, which averages gradients itself; leave it out"
        )


def refuse_ddp(model: nn.Module) -> None:
    """From now on, wrapping this model in DistributedDataParallel raises."""
    vars(model)["_ddp_params_and_buffers_to_ignore"] = _Alone()


def check_model(model: Any, mesh: Any) -> None:
    """Refuse what is no model or no mesh of ours, and models that others have wrapped or split."""
    for name, value, kind, advice in (
        ("model", model, nn.Module, "pass the model"),
        ("mesh", mesh, Mesh, "pass fastpar.Mesh()"),
    ):
        if not isinstance(value, kind):
            known = "fastpar.Mesh" if kind is Mesh else "torch.nn.Module"
            raise ValueError(
                f"parallelize: expected a {known}, got {name}={type(value).__name__}; {advice}"
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise ValueError(
                "parallelize: expected a model without DistributedDataParallel, which averages "
                f"gradients too, got '{name or 'model'}'; pass its .module"
            )
    for name, p in model.named_parameters():
        if nn.parameter.is_lazy(p):
            raise ValueError(
                f"parallelize: expected parameters with values, got an uninitialized '{name}'; "
                "call the model once before"
            )
        if is_traceable_wrapper_subclass(p) or hasattr(p, "_is_flat_param"):
            raise ValueError(
                f"parallelize: expected plain parameters, got {type(p).__name__} '{name}'; leave "
                "FSDP and fully_shard out: zero_stage=3 takes their place"
            )


def check_arguments(model: nn.Module, dp: int, options: Mapping[str, Any]) -> None:
    """Refuse options outside their range, and a model that has an engine."""
    for name, p in model.named_parameters():
        if engine_of_parameter(p) is not None:
            raise ValueError(
                f"parallelize: expected a model without an engine, got parameter '{name}' of "
                "an earlier fastpar.parallelize; call it once"
            )
    zero_stage, shard_size = options["zero_stage"], options["shard_size"]
    bucket_mb, accumulate = options["bucket_mb"], options["accumulate"]
    if isinstance(zero_stage, bool) or zero_stage not in range(len(STAGES)):
        raise ValueError(
            f"parallelize: expected zero_stage 0, 1, 2 or 3, got zero_stage={zero_stage!r}; "
            "0 shares nothing, 3 everything"
        )
    if shard_size is not None and (
        isinstance(shard_size, bool)
        or not isinstance(shard_size, int)
        or shard_size < 1
        or dp % shard_size
    ):
        raise ValueError(
            f"parallelize: expected shard_size to divide dp={dp}, got shard_size={shard_size}; "
            "leave it out to share one copy among all ranks"
        )
    if isinstance(bucket_mb, (bool, str)):
        raise ValueError(
            f"parallelize: expected bucket_mb in MiB or None, got bucket_mb={bucket_mb!r}; "
            "leave it out for a size that fits ranks and transport"
        )
    for name in ("grad_dtype", "reduce_dtype"):
        value = options[name]
        if value not in (None, *FLOATS):
            raise ValueError(
                f"parallelize: expected a floating-point {name}, got {name}={value}; "
                "use torch.float32 or None"
            )
    if accumulate not in (None, "shard", "full"):
        raise ValueError(
            f"parallelize: expected accumulate 'shard' or 'full', got accumulate={accumulate!r}; "
            "'shard' reduces every backward, 'full' the last one"
        )
    for name, least in (("grad_accum_steps", 1), ("prefetch", 0)):
        count = least if options[name] is None else options[name]
        if isinstance(count, bool) or not isinstance(count, int) or count < least:
            raise ValueError(
                f"parallelize: expected an integer {name} >= {least}, got {name}={count!r}; "
                f"{least} is the least"
            )


def check_offload(options: Mapping[str, Any], device: torch.device, debug: Debug) -> None:
    """Refuse offload where there is nothing to gain, or nothing that is shared out."""
    mode, stage, keep = (options[n] for n in ("offload", "zero_stage", "offload_keep_mb"))
    if mode not in (None, "optimizer", "parameters"):
        raise ValueError(
            "parallelize: expected offload None, 'optimizer' or 'parameters', got "
            f"offload={mode!r}; 'optimizer' keeps AdamW's state in the host's memory"
        )
    known = isinstance(keep, int | float) and not isinstance(keep, bool) and 0 <= keep < math.inf
    if not known or (keep and mode is None):
        raise ValueError(
            f"parallelize: expected a number offload_keep_mb >= 0 with offload, got "
            f"offload_keep_mb={keep!r} and offload={mode!r}; leave it out"
        )
    if mode is None and not options["offload_pinned"]:
        raise ValueError(
            "parallelize: expected offload_pinned=True without offload, got offload_pinned=False; "
            "leave it out"
        )
    if mode is None:
        return
    if mode == "parameters" and stage < 3:
        raise ValueError(
            "parallelize: expected zero_stage=3 with offload='parameters', got zero_stage="
            f"{stage}, which keeps whole parameters on the GPU; pass zero_stage=3, also for one "
            "rank, or offload='optimizer'"
        )
    if device.type == "cpu" and not debug.bus_gb_s:
        raise ValueError(
            f"parallelize: expected a GPU with offload={mode!r}, got device=cpu; it moves the "
            "optimizer's state from a GPU's memory to its host's: leave it out on a CPU, or try it "
            "there over a stand-in for the bus, debug=Debug(bus_gb_s=12)"
        )


def check_wires(model: nn.Module, options: Mapping[str, Any], dp: int, ep: int) -> str:
    """Refuse formats that are not known, or not to be had; returns the transport."""
    _check_nodes(options, dp, ep)
    gradients, weights, stage, feedback, transport = (
        options[n]
        for n in ("wire_gradients", "wire_weights", "zero_stage", "error_feedback", "transport")
    )
    buffer = options["error_buffer"]
    for name, value, known in (
        ("wire_gradients", gradients, OF_GRADIENTS),
        ("wire_weights", weights, (None, *OF_WEIGHTS)),
        ("error_feedback", feedback, (False, True)),
    ):
        if value not in known:
            raise ValueError(
                f"parallelize: expected {name} {', '.join(map(repr, known))}, got {name}="
                f"{value!r}; choose one of these"
            )
    if gradients == "fp32" and weights is None:
        if feedback or buffer:
            raise ValueError(
                "parallelize: expected wire_gradients other than 'fp32' with error_feedback, got "
                "wire_gradients='fp32' and error_feedback=True; nothing is lost: leave it out"
            )
        return transport
    _check_weights(model, weights, stage)
    changes = gradients != "fp32" or weights != CODES  # what products round anyway changes nothing
    for name, value in (("deterministic", False), ("offload", None), ("reduce_dtype", None)):
        if options[name] != value and (changes or name == "offload"):
            raise ValueError(
                f"parallelize: expected {name}={value} with wire formats (wire_gradients="
                f"{gradients!r}, wire_weights={weights!r}), got {name}={options[name]!r}; "
                + _BESIDE_WIRES[name]
            )
    if feedback and not buffer and stage > 1:
        raise ValueError(
            "parallelize: expected error_buffer=True at stages 2 and 3, got error_feedback="
            f"True and zero_stage={stage}, which frees the gradients that would keep the errors; "
            "a buffer costs 4 bytes a parameter on every rank: ask for it, use zero_stage=1, where "
            "it costs nothing, or leave it out"
        )
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
    kept = {FLOATS.get(options["grad_dtype"], dtype) for dtype in dtypes}
    in_place = {torch.float16} if feedback and not buffer and stage == 1 else set()
    for dtype in (kept | dtypes) & {torch.float64} | kept & in_place if changes else ():
        raise ValueError(
            "parallelize: expected gradients in fp32 or bf16 with wire formats (fp16 without "
            f"error_feedback), got dtype={dtype}; pass grad_dtype=torch.float32 for fp16 parameters"
        )
    if transport == "shm" and dp > 1:
        raise ValueError(
            "parallelize: expected transport 'auto' or 'torch' with wire formats, got "
            "transport='shm', whose ranks read each other's memory; nothing is sent there: leave "
            "the formats out"
        )
    if gradients == "int4" and not (feedback or buffer):
        warnings.warn(
            "parallelize: wire_gradients='int4' without error_feedback " + WITHOUT_FEEDBACK,
            stacklevel=3,
        )
    return "torch" if transport == "auto" and dp > 1 else transport


def _check_weights(model: nn.Module, weights: str | None, stage: int) -> None:
    """Refuse formats of weights where none are sent, and codes of products that there are not."""
    if weights is not None and stage == 0:
        raise ValueError(
            "parallelize: expected zero_stage 1, 2 or 3 with wire_weights, got zero_stage=0 and "
            f"wire_weights={weights!r}, where no weights are sent; leave it out"
        )
    if weights == CODES and (stage < 3 or not rounded_weights(model)):
        layers = "such layers" if rounded_weights(model) else "no such layer"
        raise ValueError(
            "parallelize: expected zero_stage=3 and layers with delayed scales of fp8 with "
            f"wire_weights='fp8', got zero_stage={stage} and {layers}; call use_fp8(model, 'mlp', "
            "scaling='tensor') before, whose codes are sent, or use wire_weights='int8'"
        )


def _check_nodes(options: Mapping[str, Any], dp: int, ep: int) -> None:
    """Refuse nodes that are no part of a copy, and nodes or secondary shards without a use."""
    size, second, stage = (options[n] for n in ("node_size", "secondary_shards", "zero_stage"))
    compressed = options["wire_gradients"] != "fp32"
    if size is None and not second:
        return
    shards = options["shard_size"] or dp
    if (
        isinstance(size, bool)
        or not isinstance(size, int)
        or not 1 < size < shards
        or shards % size
    ):
        raise ValueError(
            f"parallelize: expected node_size to divide the {shards} ranks that share a copy, "
            f"above 1 and below {shards}, got node_size={size!r} and secondary_shards={second!r}; "
            "give the number of these ranks on each node, or leave both out where one node has all"
        )
    if second and stage != 3:
        raise ValueError(
            f"parallelize: expected zero_stage=3 with secondary_shards, got zero_stage={stage}, "
            "which keeps whole parameters for backward; leave it out"
        )
    if not second and (stage == 0 or not compressed):
        raise ValueError(
            "parallelize: expected secondary_shards at stage 3, or wire_gradients 'bf16', 'int8' "
            f"or 'int4' at stages 1 to 3, with node_size={size}, got zero_stage={stage} and "
            f"wire_gradients={options['wire_gradients']!r}; nothing else asks for nodes"
        )
    beside = {"offload": options["offload"], "ep": ep if ep > 1 else None}
    if compressed and shards < dp:
        beside["shard_size"] = shards  # copies are averaged between nodes already
    for name, value in beside.items():
        if value is not None:
            raise ValueError(
                f"parallelize: expected {name} left out with node_size={size}, got {name}="
                f"{value!r}; leave one of them out"
            )


_BESIDE_WIRES = {
    "deterministic": "codes depend on how many ranks there are: leave one of them out",
    "offload": "leave one of them out",
    "reduce_dtype": "the format is that of wire_gradients: leave it out",
}
_WITHOUT_AMX = "ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16"
WITHOUT_FEEDBACK = (
    "learned 3.451 bits a byte in 250 steps of a small GPT on 4 ranks where fp32 learned 3.406, "
    "one seed, and 2.343 in 2,000 steps on 2 ranks where fp32 learned 2.341, three seeds, which "
    "differ by more: see Formats on the wire in bench/results/README.md; pass error_feedback, or "
    "use 'int8'"
)


def check_deterministic(
    settings: Settings, named: dict[nn.Parameter, tuple[str, ...]], mesh: Mesh
) -> None:
    """Refuse sums that are rounded to 16 bits on the way, warn of products that depend on threads.

    Such sums depend on how they are split.
    """
    if not settings.deterministic:
        return
    for p, names in named.items():
        kept = settings.grad_dtype or p.dtype
        wire = settings.reduce_dtype or kept
        if p.requires_grad and (kept.itemsize < 4 or wire.itemsize < kept.itemsize):
            raise ValueError(
                "parallelize: expected gradients kept and sent in fp32 with deterministic=True, "
                f"got grad_dtype={kept}, reduce_dtype={wire} for '{names[0]}'; pass "
                "grad_dtype=torch.float32 and leave reduce_dtype out"
            )
    if mesh.rank or mesh.device.type != "cpu":
        return
    for dtype in sorted({p.dtype for p in named if p.requires_grad}, key=str):
        if depends_on_threads(dtype):
            setting = "MKL_CBWR=AUTO,STRICT" if dtype.itemsize > 2 else _WITHOUT_AMX
            warnings.warn(
                f"parallelize: with deterministic=True, products of {dtype} have other bits with "
                "other numbers of threads here, so only runs with equally many threads a rank have "
                f"the same bits; set {setting} before the process starts, or fix the number",
                stacklevel=3,
            )


def check_parameters(
    named: dict[nn.Parameter, tuple[str, ...]], device: torch.device, meta: bool
) -> None:
    """What buckets cannot hold is refused before anything is changed."""
    if not any(p.requires_grad for p in named):
        raise ValueError(
            f"parallelize: expected a model with parameters to train, got {len(named)} parameters "
            "and none with requires_grad; pass the whole model and unfreeze what is to be trained"
        )
    expected = torch.device("meta") if meta else device
    memory: dict[int, str] = {}
    for p, names in named.items():
        if p.device.type == "meta" and not meta:
            raise ValueError(
                f"parallelize: expected parameters with values, got device=meta for '{names[0]}'; "
                "pass materialize=, which fills them"
            )
        if p.device != expected:
            raise ValueError(
                f"parallelize: expected every parameter on {'' if meta else 'mesh.device='}"
                f"{expected}, got device={p.device} for '{names[0]}'; "
                + ("build the model on the meta device" if meta else "call model.to(mesh.device)")
                + " first"
            )
        if not p.requires_grad:
            continue
        if p.dtype not in FLOATS.values():
            raise ValueError(
                f"parallelize: expected fp32, bf16, fp16 or fp64 parameters, got dtype={p.dtype} "
                f"for '{names[0]}'; convert it, or set requires_grad=False"
            )
        other = memory.setdefault(p.data_ptr(), names[0]) if p.numel() and not meta else names[0]
        if other != names[0]:
            raise ValueError(
                f"parallelize: expected tied weights to be one Parameter, got '{other}' and "
                f"'{names[0]}' sharing memory; assign the Parameter itself, not its data"
            )


def check_in_place_writers(model: nn.Module, dp: int) -> None:
    """A forward that writes into its rows would leave another model on each rank, or be lost."""
    for name, module in model.named_modules() if dp > 1 else ():
        writes = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
        if writes and module.weight.requires_grad:
            raise ValueError(
                "parallelize: expected forwards that write no parameters where several ranks share "
                f"them, got max_norm={module.max_norm} of embedding '{name}', which writes the "
                "rows of this rank's batch; set max_norm=None, and scale rows after each step "
                "inside `with fastpar.engine_of(model).gathered():`"
            )


# Optimizers

_lock = threading.Lock()
_installed = False


class _Here(threading.local):
    """Ranks may be threads: each looks at its own models."""

    def __init__(self) -> None:
        self.engines: weakref.WeakSet[Engine] = weakref.WeakSet()


_here = _Here()


def guard_optimizers(engine: Engine) -> None:
    """From now on, step() of any optimizer in this thread refuses what it cannot step right.

    Called when an engine is made; installed once in a process.
    """
    global _installed
    _here.engines.add(engine)
    with _lock:
        if not _installed:
            register_optimizer_step_pre_hook(_before_step)
            _installed = True


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not getattr(optimizer, "steps_engines", False):
        _refuse_sharded(optimizer)
    strangers = {
        p
        for group in (optimizer.param_groups if _here.engines else ())
        for p in group["params"]
        if p.requires_grad and engine_of_parameter(p) is None
    }
    for engine in list(_here.engines) if strangers else ():
        model = engine.shards.model()
        if model is not None and not strangers.isdisjoint(model.parameters()):
            engine.shards.check()  # says which, see [Note: strangers]


def _refuse_sharded(optimizer: torch.optim.Optimizer) -> None:
    name = type(optimizer).__name__
    params = (p for group in optimizer.param_groups for p in group["params"])
    for engine in map(engine_of_parameter, params):
        if engine is None:
            continue
        engine.partials.check()
        if engine.shards.has_main_grads:
            what, got = "with main gradients", f"grad_dtype={engine.settings.grad_dtype}"
            advice = "it reads p.grad only: use fastpar.AdamW, or parallelize without grad_dtype"
        elif engine.stage.shards:
            what, got = "of an engine with zero_stage >= 1", f"zero_stage={engine.stage.number}"
            advice = "their gradients exist only as shards: use fastpar.AdamW, or zero_stage=0"
        else:
            continue
        raise RuntimeError(
            f"{name}.step: expected fastpar.AdamW for parameters {what}, got {name} "
            f"with {got}; {advice}"
        )
