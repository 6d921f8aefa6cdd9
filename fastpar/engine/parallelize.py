"""fastpar.parallelize: trains one model on all ranks of a mesh."""

from __future__ import annotations

import dataclasses
import functools
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fastpar.axes import Making, Travel, every
from fastpar.axes.tensor.declared import Declared
from fastpar.comm.collectives import Collectives, OneRank
from fastpar.comm.mesh import Mesh
from fastpar.comm.transports import make_collectives
from fastpar.comm.wires import Encoders
from fastpar.doctor.doctor import FLAT_OPS, expect
from fastpar.engine.absent import Hook, refuse_ddp
from fastpar.engine.bucket import STAGES, BucketGroups, BucketState, Settings, Stage
from fastpar.engine.control import prove_together
from fastpar.engine.debug import Debug, InputCheck
from fastpar.engine.engine import Engine, engine_of_parameter
from fastpar.engine.gathers import find_units, unit_of_parameters
from fastpar.engine.optimizers import guard_optimizers
from fastpar.engine.shards import Shards, guard_state_dicts
from fastpar.files.tensor_file import FLOATS
from fastpar.foreign.patch import calls_of
from fastpar.foreign.tp_plan import Plan, connects_rows, plan_for
from fastpar.kernels import _C
from fastpar.kernels.choice import ignore_times_for
from fastpar.kernels.linear import depends_on_threads
from fastpar.settings.fields import check_types, flat
from fastpar.settings.mesh import AXES
from fastpar.settings.model import GPTConfig
from fastpar.settings.parallel import Offload, Parallel, Pipeline, Precision, Wires
from fastpar.settings.rules import check, of_shape
from fastpar.sharding.layout import (
    ParamSpec,
    build_layout,
    default_bucket_mb,
    inventory,
    parameter_names,
)

Materialize = Callable[[str, Tensor], None]


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    settings: Parallel | None = None,
    *,
    zero_stage: int | None = None,
    shard_size: int | None = None,
    grad_accum_steps: int | None = None,
    grad_dtype: torch.dtype | str | None = None,
    precision: Precision | None = None,
    wires: Wires | None = None,
    offload: Offload | None = None,
    pipeline: Pipeline | None = None,
    deterministic: bool | None = None,
    units: Sequence[nn.Module] | type | tuple[type, ...] | None = None,
    tp_plan: Plan | None = None,
    materialize: Materialize | None = None,
    debug: Debug | None = None,
) -> nn.Module:
    """Train model on all ranks of mesh; the training loop does not change.

    Gradients are averaged over the ranks, as by torch's DDP. At stage 0 they are in p.grad after
    backward(), or in p.main_grad if grad_dtype is not the parameter's dtype; while they are not
    reduced (no_sync(), accumulate="full"), p.grad is this rank's sum, or nan if deterministic. At
    stages 1 to 3 each rank holds a shard of them, which optimizers step: fastpar's, and elementwise
    ones of torch and others (optimizers.py). p.grad is nan then, also where there is no gradient,
    and None in hooks; engine_of(model).grads() has whole ones. Setting p.grad to None, or
    model.zero_grad(), discards the gradient. Several backward() calls before a step accumulate, as
    in one process.

    At stages 1 to 3 arithmetic with a parameter is refused between a step and the next forward, at
    stage 3 always outside of forward and backward: averages of weights (torch.optim.swa_utils,
    teachers) are updated in `with engine_of(model).gathered():`, where parameters are whole.
    state_dict() and load_state_dict() gather by themselves; all ranks must call them.
    A forward may read a weight without calling its module. At stage 3, if that happens outside of
    the weight's block, the block stays whole until the end of backward.

    Args:
        model: on mesh.device, or on the meta device (see materialize). Its parameters become views
            of flat buckets, with the values of rank 0. Buffers and frozen parameters are copied
            from rank 0 once; frozen parameters stay whole on every rank.
        settings: all settings of the layout, Parallel(zero_stage=2, bucket_mb=25); Parallel.of()
            takes the names of `fastpar train`'s flags. The keywords from zero_stage to
            deterministic override its fields.
        zero_stage: 0 shards nothing; 1 the optimizer's state; 2 also gradients; 3 also parameters.
        shard_size: number of neighbouring ranks that shard one replica of the model, a divisor of
            dp (HSDP). Default: all ranks.
        grad_accum_steps: backward passes per step, default 1. Any number gives correct results; the
            right one is faster.
        grad_dtype: short for precision: dtype in which gradients are kept and accumulated, such as
            torch.float32 under bf16 parameters. Default: the parameter's.
        precision: Precision(grad_dtype=, reduce_dtype=); reduce_dtype is the dtype of the reduction
            between ranks.
        wires: Wires(gradients="int8", weights="int8"): compressed formats between ranks, rounded
            stochastically (bf16: to nearest), see comm/README.md. All ranks compute with the
            rounded weights.
        offload: Offload("optimizer") keeps AdamW's state in host memory, where AdamW steps it
            during the next forward; one rank may use it too. Offload("parameters") also moves the
            shards of stage 3. At stages 2 and 3 gradients move to the host as they are reduced.
            Parameters are absent between a step and a forward. Pass grad_accum_steps with it.
        pipeline: Pipeline(schedule="1f1b", split=(8, 4)): the schedule that places the stages, and
            the layers of each. Train with fastpar.pipeline_step.
        deterministic: sum over ranks and micro-batches in a fixed tree. The bits are then the same
            at every stage, and for any split of equal micro-batches into ranks and accumulation
            (powers of two; with cp or a grid only if every backward reduces; not with cp and ep
            together). Costs one more copy of the gradients at stages 0 and 1. While the model
            lives, no timing decides in this process which kernels run.
        units: modules, or their types, whose parameters are gathered together. Default: the
            elements of ModuleLists and Sequentials, without torch's RNN cells. At stage 3 every
            rank must call a unit equally often in a forward; one that is called once some ranks may
            leave out. Keep modules that run once per time step out of units if lengths differ
            between ranks.
        tp_plan: how tp splits a model that does not define that itself
            (fastpar/foreign/tp_plan.py). Default: that of GPT-2 or nanoGPT, if it fits.
            engine_of(model).tp_report shows the choice.
        materialize: materialize(name, tensor) fills one tensor of a model that is on the meta
            device. Parameters and buffers are then created bucket by bucket, so that no rank
            holds more than its shard.
        debug: a fastpar.engine.debug.Debug.
    Returns:
        The same module (with new parameters if it was on the meta device).
    Ranks: all, with the same model and arguments.
    Wire: per step and rank P bytes of gradients and of parameters: 2 * (dp - 1) / dp * P at stages
        0 to 2, 3 * (dp - 1) / dp * P at stage 3; see engine_of(model).describe().
    Streams: collectives run on their own stream; the compute stream waits where it needs a result.
        The host does not wait, except with gloo and for parameters without a gradient.
    Raises:
        ValueError: a stage outside 0..3; no trainable parameter; a dtype, device or shared memory
            that buckets cannot hold; an embedding with max_norm and dp above 1; a model that was
            parallelized before; models that differ between ranks.
    Source: Rajbhandari et al. 2020, arXiv 1910.02054
    """
    _check_group("settings", settings, Parallel)
    _check_group("precision", precision, Precision)
    _check_group("wires", wires, Wires)
    _check_group("offload", offload, Offload)
    _check_group("pipeline", pipeline, Pipeline)
    usual = settings or Parallel()
    zero_stage = usual.zero_stage if zero_stage is None else zero_stage
    precision = precision or usual.precision
    kept: Any = grad_dtype or precision.grad_dtype  # _check_settings() checks the types
    parallel = dataclasses.replace(
        usual,
        zero_stage=zero_stage,  # type: ignore[arg-type]
        shard_size=usual.shard_size if shard_size is None else shard_size,
        grad_accum_steps=usual.grad_accum_steps if grad_accum_steps is None else grad_accum_steps,
        precision=dataclasses.replace(precision, grad_dtype=kept),
        wires=wires or usual.wires,
        offload=offload or usual.offload,
        pipeline=pipeline or usual.pipeline,
        deterministic=usual.deterministic if deterministic is None else deterministic,
    )
    options, debug = flat(parallel), debug or Debug()
    options["tp_plan"] = dict(tp_plan) if isinstance(tp_plan, Mapping) else tp_plan
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"parallelize: expected a torch.nn.Module, got model={type(model).__name__}; pass the "
            "model"
        )
    if not isinstance(mesh, Mesh):
        raise ValueError(
            f"parallelize: expected a fastpar.Mesh, got mesh={type(mesh).__name__}; pass "
            "fastpar.Mesh()"
        )
    given, mesh = mesh, mesh.of_gradients()
    _check_modules(model, mesh.dp_size)
    _check_parameters(parameter_names(model), mesh.device, materialize is not None)
    _check_settings(model, given, parallel, mesh.dp_size)
    plan = options["tp_plan"]
    planned, rows = functools.partial(plan_for, model, plan), connects_rows(model, given)
    making = Making(
        model, given, parallel, debug, plan, planned, rows, transport=parallel.transport
    )
    for axis in every():
        axis.plan(making)
    maker = GroupMaker(mesh, making.transport, parallel, debug)
    making.make = maker.make
    mesh.check_same("parallelize", [*(f"{k}={v}" for k, v in options.items()), *inventory(model)])
    prove_together(mesh)
    expect({*calls_of(model), *((op, 0) for op in FLAT_OPS)}, "cuda", torch.float32)
    for axis in every():
        axis.cut(making)
    for axis in reversed(every()):
        axis.split(making)
    n_shards = 1 if zero_stage == 0 else parallel.shard_size or mesh.size("dp")
    stays = parallel.offload.what is None
    stage = STAGES[0 if n_shards == 1 and stays else zero_stage]
    groups, control = maker.of_engine(stage, n_shards, alone=not stays)
    travels = {"": Travel(mesh, mesh.dp_rank, mesh.broadcast_, groups=groups)}
    for axis in every():
        travel = axis.travel(making, n_shards)
        if travel is not None:
            travels[axis.key] = travel._replace(groups=maker.of_mesh(travel.mesh, stage))
    transport = groups.reduce.transport if groups.reduce else "none"
    bucket_mb = parallel.bucket_mb or default_bucket_mb(mesh.dp_size, transport)
    in_effect = Settings(parallel, stage, n_shards, bucket_mb)
    _check_deterministic(in_effect, parameter_names(model), mesh)
    if materialize is not None:
        allocate_meta(model, mesh.device, making.declared)
    for axis in every():
        axis.connect(making)
    modules = find_units(
        model, units, merge_bytes=parallel.first_bucket_mb * 2**20, starts=making.unit_starts
    )
    shards = _make_shards(making, mesh, in_effect, travels, modules, materialize)
    engine = Engine(shards, modules, control, given, debug)
    engine.tp_report = making.report
    if parallel.deterministic:
        ignore_times_for(engine)
    for axis in every():
        axis.attach(making, engine)
    refuse_ddp(model)
    guard_optimizers(engine)
    guard_state_dicts(model, shards, Hook(weakref.ref(engine), Engine.gathered))
    seen = None if making.stages else model  # of stages pipeline_step() looks at inputs
    for name, group in making.same_inputs.items():
        inputs = InputCheck(group, name, always=debug.check_inputs, model=seen)
        engine.input_checks.append(inputs)
    return model


# Checks before anything is changed


def _check_group(name: str, group: Any, kind: type) -> None:
    """Refuse a group of settings that is of another type."""
    if not isinstance(group, kind | None):
        short = "Parallel(zero_stage=2), or just zero_stage=2"
        advice = short if kind is Parallel else f"{name}={kind.__name__}({group!r})"
        raise ValueError(
            f"parallelize: expected a fastpar.{kind.__name__}, got {name}={group!r}; pass {advice}"
        )


def _check_modules(model: nn.Module, dp: int) -> None:
    """Refuse DDP, which averages gradients too, and embeddings whose forward changes weights:
    replicas would come to differ."""
    for name, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise ValueError(
                "parallelize: expected a model without DistributedDataParallel, which averages "
                f"gradients too, got '{name or 'model'}'; pass its .module"
            )
        writes = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
        if dp > 1 and writes and module.weight.requires_grad:
            raise ValueError(
                f"parallelize: embedding '{name}' has max_norm={module.max_norm}, whose forward "
                "changes only the rows of this rank's batch; set max_norm=None and rescale rows "
                "after each step inside `with fastpar.engine_of(model).gathered():`"
            )


def _check_settings(model: nn.Module, mesh: Mesh, parallel: Parallel, dp: int) -> None:
    """Refuse settings that contradict each other, the mesh or the model.

    Args:
        dp: number of ranks that compute different tokens.
    """
    # Without pipeline stages the schedule has no effect; cut_stages() checks it otherwise.
    check_types("parallelize", dataclasses.replace(parallel, pipeline=Pipeline()))
    values = flat(parallel) | _facts(model, mesh, dp)
    check("parallelize", {n: v for n, v in values.items() if n not in ("schedule", "chunks")})


def _facts(model: nn.Module, mesh: Mesh, dp: int) -> dict[str, Any]:
    """The values of model and mesh that the rules of settings refer to."""
    config, grid = getattr(model, "config", None), mesh.tp_grid
    facts: dict[str, Any] = {axis: mesh.size(axis) for axis in ("cp", "ep", "pp")}
    facts |= {"dp": dp, "tp": mesh.size("tp") if grid is None else 1}
    facts |= {"tp_grid": None if grid is None else "x".join(map(str, grid))}
    facts |= {"offload_activations": False}
    if isinstance(config, GPTConfig):
        capacity = {"n_expert": config.n_expert, "expert_capacity": config.expert_capacity}
        return facts | of_shape(config) | capacity
    heads = getattr(config, "n_head", None)
    return facts if heads is None else facts | {"n_head": heads}


_WITHOUT_AMX = "ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16"


def _check_deterministic(
    settings: Settings, named: dict[nn.Parameter, tuple[str, ...]], mesh: Mesh
) -> None:
    """Refuse sums rounded to 16 bits, which depend on how they are split.

    Warns if matrix products depend on the number of threads.
    """
    if not settings.deterministic:
        return
    for p, names in named.items():
        kept = settings.grad_dtype or p.dtype
        wire = settings.reduce_dtype or kept
        if p.requires_grad and (kept.itemsize < 4 or wire.itemsize < kept.itemsize):
            raise ValueError(
                "parallelize: deterministic=True needs gradients kept and reduced in fp32, got "
                f"grad_dtype={kept}, reduce_dtype={wire} for '{names[0]}'; pass "
                "grad_dtype=torch.float32 and no reduce_dtype"
            )
    if mesh.rank or mesh.device.type != "cpu":
        return
    for dtype in sorted({p.dtype for p in named if p.requires_grad}, key=str):
        if product := depends_on_threads(dtype):
            advice = "give each run equally many"
            if _C is not None and _C.cpu_is_intel():
                setting = "MKL_CBWR=AUTO,STRICT" if dtype.itemsize > 2 else _WITHOUT_AMX
                advice = f"set {setting} before the process starts, or {advice}"
            warnings.warn(
                f"parallelize: deterministic=True, but some {dtype} matrix products on this CPU "
                f"depend on the number of threads ({product}), so bits may differ between runs "
                f"with other numbers of threads per rank; {advice}",
                stacklevel=3,
            )


def _check_parameters(
    named: dict[nn.Parameter, tuple[str, ...]], device: torch.device, meta: bool
) -> None:
    """Refuse parameters that buckets cannot hold."""
    if not any(p.requires_grad for p in named):
        raise ValueError(
            f"parallelize: none of the model's {len(named)} parameters requires a gradient; pass "
            "the whole model and set requires_grad on what is to be trained"
        )
    expected = torch.device("meta") if meta else device
    memory: dict[int, str] = {}
    for p, names in named.items():
        if nn.parameter.is_lazy(p):
            raise ValueError(
                f"parallelize: parameter '{names[0]}' is not initialized (a lazy module); call the "
                "model once before fastpar.parallelize"
            )
        if is_traceable_wrapper_subclass(p) or hasattr(p, "_is_flat_param"):
            raise ValueError(
                f"parallelize: expected plain parameters, got {type(p).__name__} '{names[0]}'; "
                "drop FSDP and fully_shard and use zero_stage=3 instead"
            )
        if engine_of_parameter(p) is not None:
            raise ValueError(
                f"parallelize: the model was parallelized before (parameter '{names[0]}'); call "
                "fastpar.parallelize once"
            )
        if p.device.type == "meta" and not meta:
            raise ValueError(
                f"parallelize: parameter '{names[0]}' is on the meta device; pass materialize= to "
                "fill it"
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
                f"parallelize: '{other}' and '{names[0]}' share memory but are two Parameters; tie "
                "weights by assigning the Parameter itself, not its data"
            )


# Settings, values, buckets


def allocate_meta(model: nn.Module, device: torch.device, declared: Declared | None) -> None:
    """Replace meta parameters by parameters on device; trained ones have no memory yet."""
    old = parameter_names(model)
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is None:
                continue
            if p not in made:
                shape = torch.empty((), dtype=p.dtype, device=device).expand(p.shape)
                data = shape if p.requires_grad else torch.empty_like(p, device=device)
                made[p] = nn.Parameter(data, requires_grad=p.requires_grad)
            module._parameters[name] = made[p]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device=device)
    if declared is not None:
        declared.rename(old, parameter_names(model))


def _make_shards(
    making: Making,
    mesh: Mesh,
    settings: Settings,
    travels: dict[str, Travel],
    units: list[list[nn.Module]],
    materialize: Materialize | None,
) -> Shards:
    """Put the parameters into buckets, with the values of the first rank that holds them."""
    model, declared, stages = making.model, making.declared, making.stages
    stage, named, unit_of = settings.stage, parameter_names(model), unit_of_parameters(units)

    def fill(p: nn.Parameter, memory: Tensor) -> None:
        """Write the first values of p into memory."""
        if materialize is None:
            memory.copy_(p.detach())
        elif declared is None or not declared.is_split(p):
            materialize(named[p][0], memory)
        else:
            whole = memory.new_empty(declared.whole_shape(p))
            materialize(named[p][0], whole)
            memory.copy_(declared.cut(whole, p))

    keys = {p: declared.key_of(p) if declared else "" for p in named}
    trained = [p for p in named if p.requires_grad]
    layout = build_layout(
        [ParamSpec(named[p], tuple(p.shape), p.dtype) for p in trained],
        n_shards=settings.n_shards,
        bucket_bytes=settings.bucket_mb * 2**20,
        first_bucket_bytes=settings.parallel.first_bucket_mb * 2**20,
        grad_dtype=settings.grad_dtype,
        # Embeddings get their gradient last; they share no bucket with a block (test_buckets.py).
        unit_of=[unit_of[p] if settings.by_unit else min(unit_of[p], 1) for p in trained],
        alone=[i for i, p in enumerate(trained) if stages and p in stages.tied],
        part_of=[stages.chunk_of[p] for p in trained] if stages else None,
        keys={i: keys[p] for i, p in enumerate(trained)},
        spread={key: travel.spread for key, travel in travels.items()},
        flags=not stage.shards,
    )
    buckets, how = [], settings.parallel.wires
    wires = Encoders(how.gradients, how.weights, mesh.dp_rank)
    for spec in layout.buckets:  # one after another, to need little extra memory
        travel = travels[spec.key]
        bucket = BucketState(
            layout,
            spec,
            [trained[layout.slots[i].registered] for i in spec.slots],
            settings,
            travel.groups.on_wires(wires, spec, stage),
            rank=travel.rank % spec.n_shards,
            device=mesh.device,
            poison=making.debug.poison,
            sources=travel.sources,
        )
        for view, p in zip(bucket.views, bucket.params):
            fill(p, view)
        travel.share([bucket.flat])
        bucket.attach()
        if bucket.separate:
            bucket.make_stale()
        buckets.append(bucket)
    frozen = {p: names[0] for p, names in named.items() if not p.requires_grad}
    if materialize is not None:
        for p in frozen:
            fill(p, p.data)
        for name, buffer in model.named_buffers():
            materialize(name, buffer.data)
    for key, travel in travels.items():
        buffers = () if key else model.buffers()
        travel.share([*(p for p in frozen if keys[p] == key), *buffers])
    return Shards(
        mesh,
        settings,
        layout,
        buckets,
        travels=travels,
        frozen=frozen,
        declared=declared,
        stages=stages,
        model=model,
    )


# Process groups


class GroupMaker:
    """Makes the collectives of process groups, the same way for every role.

    Args:
        transport: of make_collectives.
        parallel: the settings of parallelize.
    """

    def __init__(self, mesh: Mesh, transport: str, parallel: Parallel, debug: Debug) -> None:
        self.mesh, self.transport, self.parallel, self.debug = mesh, transport, parallel, debug

    def make(self, group: Any, role: str, transport: str | None = None) -> Collectives:
        """Collectives of a process group. Ranks: all of the group."""
        if self.debug.collectives is not None:
            made = self.debug.collectives(group, role)
        else:
            made = make_collectives(
                group,
                device=self.mesh.device,
                transport=transport or self.transport,
                timeout_s=self.mesh.timeout_s,
                in_rank_order=self.parallel.deterministic,
            )
        if self.debug.observe is not None:
            self.debug.observe(made)
        return made

    def of_engine(
        self, stage: Stage, n_shards: int, *, alone: bool = False
    ) -> tuple[BucketGroups, Collectives | None]:
        """The groups of the buckets, and all ranks' group of the control exchange. Ranks: all.

        Each role has its own group, so that gathers and reductions never queue behind each other.
        Gradients are reduced over dp and replicas; shards are gathered over dp.

        Args:
            alone: give a rank that reduces with no other rank a group, too.
        """
        mesh = self.mesh.with_replicas(self.mesh.dp_size // n_shards)
        one = OneRank(mesh.device) if alone and mesh.dp_size == 1 else None
        if mesh.dp_size == 1:
            control = self.make(mesh.group(*AXES), "control") if mesh.world_size > 1 else None
            return BucketGroups(one, one), control
        whole = self.make(mesh.dp_group, "reduce")
        kind = self._like(whole)
        # The control exchange carries the norm, the flags and the loss of all ranks.
        control = whole
        if mesh.world_size > mesh.dp_size:
            control = self.make(mesh.group(*AXES), "control", kind)
        return self._roles(mesh, stage, whole), control

    def of_mesh(self, mesh: Mesh, stage: Stage) -> BucketGroups:
        """The groups of buckets that are replicated over the ranks of another mesh. Ranks: all."""
        if mesh.size("replicas", "dp") == 1:
            alone = OneRank(mesh.device)
            return BucketGroups(alone, alone)
        whole = self.make(mesh.new_group("replicas", "dp"), "reduce")
        return self._roles(mesh, stage, whole)

    def _like(self, whole: Collectives) -> str:
        return "shm" if whole.transport == "shm" else self.transport

    def _roles(self, mesh: Mesh, stage: Stage, whole: Collectives) -> BucketGroups:
        """A group for each role, of the ranks along replicas and dp; whole: all of these ranks."""
        kind, wires = self._like(whole), self.parallel.wires
        # Shared memory queues nothing.
        new = self.debug.collectives is None and whole.transport != "shm"

        def second(of: Mesh, *axes: str) -> Collectives:
            return self.make(of.new_group(*axes) if new else of.group(*axes), "gather", kind)

        if not stage.shards:
            again = second(mesh, "replicas", "dp") if wires.gradients != "fp32" else None
            return BucketGroups(whole, again=again)
        if mesh.size("dp") == 1:  # each replica is whole on its rank
            alone = OneRank(mesh.device)
            return BucketGroups(alone, alone, whole)
        gather, node = second(mesh, "dp"), None
        if wires.node_size is not None:
            node = second(self.mesh.with_replicas(self.mesh.dp_size // wires.node_size), "dp")
        if mesh.size("replicas") == 1:
            return BucketGroups(whole, gather, node=node)
        reduce = self.make(mesh.group("dp"), "reduce", kind)
        copies = self.make(mesh.group("replicas"), "replicate", kind)
        return BucketGroups(reduce, gather, copies, node=node)
