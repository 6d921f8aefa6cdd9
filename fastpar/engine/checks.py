"""What parallelize() refuses before it changes anything, and what step() of any optimizer refuses.

[Note: strangers]
A parameter that was added to the model or unfrozen after parallelize() has no engine, so every rank
would train its own. The engine sees it when it reduces gradients; if all of the others have been
frozen there are none to reduce, and only the optimizer that steps it knows of it.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fastpar.comm.mesh import Mesh
from fastpar.comm.wires import CODES, rounded_weights
from fastpar.engine.bucket import Settings
from fastpar.engine.debug import Debug
from fastpar.engine.engine import Engine, engine_of_parameter
from fastpar.files.tensor_file import FLOATS
from fastpar.kernels.linear import depends_on_threads
from fastpar.settings.fields import check_types, flat
from fastpar.settings.model import GPTConfig
from fastpar.settings.parallel import Parallel, Pipeline
from fastpar.settings.rules import check, of_shape


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


def check_settings(model: nn.Module, mesh: Mesh, asked: Parallel, debug: Debug, dp: int) -> str:
    """Refuse settings that contradict each other, the mesh or the model; returns the transport.

    Args:
        dp: ranks that compute different tokens.
    """
    for name, p in model.named_parameters():
        if engine_of_parameter(p) is not None:
            raise ValueError(
                f"parallelize: expected a model without an engine, got parameter '{name}' of "
                "an earlier fastpar.parallelize; call it once"
            )
    # A schedule does nothing in one stage; cut_stages() refuses those that there are not.
    check_types("parallelize", replace(asked, pipeline=Pipeline()))
    values = flat(asked) | _facts(model, mesh, dp)
    check("parallelize", {n: v for n, v in values.items() if n not in ("schedule", "chunks")})
    if asked.offload.what is not None and mesh.device.type == "cpu" and not debug.bus_gb_s:
        raise ValueError(
            f"parallelize: expected a GPU with offload={asked.offload.what!r}, got device=cpu; it "
            "moves the optimizer's state from a GPU's memory to its host's: leave it out on a CPU, "
            "or try it there over a stand-in for the bus, debug=Debug(bus_gb_s=12)"
        )
    return _check_wires(model, asked, dp)


def _facts(model: nn.Module, mesh: Mesh, dp: int) -> dict[str, Any]:
    """What the rules of settings may ask of a model and a mesh."""
    config, grid = getattr(model, "config", None), mesh.tp_grid
    facts: dict[str, Any] = {axis: mesh.size(axis) for axis in ("cp", "ep", "pp")}
    facts |= {"dp": dp, "tp": mesh.size("tp") if grid is None else 1}
    facts |= {"tp_grid": None if grid is None else "x".join(map(str, grid))}
    facts |= {"delayed_scales": bool(rounded_weights(model)), "offload_activations": False}
    if isinstance(config, GPTConfig):
        capacity = {"n_expert": config.n_expert, "expert_capacity": config.expert_capacity}
        return facts | of_shape(config) | capacity
    heads = getattr(config, "n_head", None)
    return facts if heads is None else facts | {"n_head": heads}


def _check_wires(model: nn.Module, asked: Parallel, dp: int) -> str:
    """Refuse formats that gradients cannot be sent in; returns the transport."""
    wires, stage, transport = asked.wires, asked.zero_stage, asked.transport
    if wires.gradients == "fp32" and wires.weights is None:
        return transport
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
    kept = {FLOATS.get(asked.precision.grad_dtype or "", dtype) for dtype in dtypes}
    keeps = wires.error_feedback and not wires.error_buffer and stage == 1
    in_place = {torch.float16} if keeps else set()
    changes = wires.gradients != "fp32" or wires.weights != CODES  # products round so anyway
    for dtype in (kept | dtypes) & {torch.float64} | kept & in_place if changes else ():
        raise ValueError(
            "parallelize: expected gradients in fp32 or bf16 with wire formats (fp16 without "
            f"error_feedback), got dtype={dtype}; pass grad_dtype=torch.float32 for fp16 parameters"
        )
    if wires.gradients == "int4" and not (wires.error_feedback or wires.error_buffer):
        warnings.warn(
            "parallelize: int4 gradients without error_feedback train worse (Formats on the wire "
            "in bench/results/README.md); pass error_feedback=True, or use int8",
            stacklevel=4,
        )
    return "torch" if transport == "auto" and dp > 1 else transport


_WITHOUT_AMX = "ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16"


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
