"""fastpar.parallelize: makes the ranks of a mesh train one model together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastpar.comm.collectives import Collectives, OneRank
from fastpar.comm.mesh import Mesh
from fastpar.comm.transport import make_collectives
from fastpar.comm.wires import CODES, Wires, rounded_weights
from fastpar.context.sequences import check_method, mesh_of_gradients
from fastpar.kernels import Fp8
from fastpar.parallel.bucket import BucketGroups
from fastpar.parallel.checks import (
    check_arguments,
    check_deterministic,
    check_in_place_writers,
    check_model,
    check_offload,
    check_parameters,
    check_wires,
    guard_optimizers,
    refuse_ddp,
)
from fastpar.parallel.control import prove_together
from fastpar.parallel.debug import Debug, InputCheck
from fastpar.parallel.engine import Engine
from fastpar.parallel.experts import (
    Travel,
    attach_experts,
    check_experts,
    mesh_of_experts,
    share_experts,
)
from fastpar.parallel.offload import keep_on_host
from fastpar.parallel.shards import Shards, guard_state_dicts
from fastpar.parallel.split_backward import Places
from fastpar.parallel.stages import STAGES, Settings, Stage
from fastpar.parallel.units import find_units, unit_of_parameters
from fastpar.patching.context import share_context
from fastpar.patching.tp_plan import Plan, Planned, plan_for, use_tokens
from fastpar.pipeline.stages import Stages, cut_stages, make_stages
from fastpar.settings.axes import AXES, TP_AXES
from fastpar.sharding.layout import (
    FIRST_BUCKET_MB,
    ParamSpec,
    build_layout,
    default_bucket_mb,
    inventory,
    parameter_names,
)
from fastpar.tensor.declared import Declared, find_states, split_parameters
from fastpar.tensor.functional import TensorParallel
from fastpar.tensor.grid import make_grid
from fastpar.tensor.report import tp_report

Factory = Callable[[Any, str], Collectives]
Materialize = Callable[[str, Tensor], None]
# Arguments of parallelize() that may differ between ranks, or are compared in another way.
_NO_OPTIONS = {"model", "mesh", "units", "materialize", "debug", "collectives"}


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    *,
    zero_stage: int = 0,
    shard_size: int | None = None,
    bucket_mb: float | None = None,
    first_bucket_mb: float = FIRST_BUCKET_MB,
    grad_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    accumulate: str = "shard",
    grad_accum_steps: int = 1,
    units: Sequence[nn.Module] | type | tuple[type, ...] | None = None,
    prefetch: int = 1,
    deterministic: bool = False,
    transport: str = "auto",
    materialize: Materialize | None = None,
    debug: Debug | None = None,
    collectives: Factory | None = None,
    tp_plan: Plan | str | None = None,
    sequence_parallel: bool | None = None,
    pp_split: Sequence[int] | None = None,
    pp_schedule: str = "1f1b",
    pp_chunks: int | None = None,
    cp_method: str = "heads",
    offload: str | None = None,
    offload_keep_mb: float = 0.0,
    offload_pinned: bool = True,
    wire_gradients: str = "fp32",
    wire_weights: str | None = None,
    error_feedback: bool | str = False,
    node_size: int | None = None,
    secondary_shards: bool = False,
) -> nn.Module:
    """Make the ranks of mesh train model together; an ordinary training loop stays as it was.

    Gradients are the mean over the ranks (the convention of torch's DDP). At stage 0 they are in
    p.grad after backward(), or in p.main_grad where grad_dtype differs from the parameter's. At
    stages 1 to 3 each rank has a part of them, which fastpar.AdamW finds. Where it is not the
    gradient, p.grad reads as nan; set to None, by zero_grad() of a module too, it says that the
    parameter has no gradient. Several backward() calls before a step add up as in one process.

    Between a step and the next forward, at stage 3 always outside of forward and backward,
    parameters of stages 1 to 3 read as nan: engine_of(model).gathered() makes them whole.
    state_dict() and load_state_dict() do so themselves, and are called by all ranks.
    A forward may use a weight without a call of its module; at stage 3, where that is outside of
    the weight's block, the block then stays whole until the end of backward.

    Args:
        model: on mesh.device (or on the meta device, see materialize); its parameters become views
            of flat buckets, with the values of rank 0. Buffers and frozen parameters are copied
            from rank 0 too, once; frozen parameters stay whole on every rank.
        zero_stage: 0 shares nothing; 1 the optimizer's state; 2 also gradients; 3 also parameters.
        shard_size: ranks that share one copy, a divisor of dp; None: all. Neighbours share.
        bucket_mb: cap of the gradients that one collective sends, in MiB; None: by the number of
            ranks and the transport (fastpar.sharding.layout.default_bucket_mb).
        first_bucket_mb: cap of the first bucket; units below it are merged with their neighbours.
        grad_dtype: in which gradients are kept and added up, e.g. torch.float32 under bf16
            parameters; None: the parameter's own.
        reduce_dtype: of gradients on the wire; None: grad_dtype. Sums are fp32 (fp64 of fp64).
        accumulate: "shard" reduces every backward into the shard; "full" keeps whole gradients
            until backward number grad_accum_steps since the last step, or step() if fewer come.
        units: modules, or their types, whose parameters are gathered together; None: the elements
            of ModuleLists and Sequentials except torch's RNN cells. At stage 3 all ranks call a
            unit equally often in a forward, or some not at all: leave out what runs once a time
            step over lengths that differ between ranks.
        prefetch: units gathered ahead of use.
        deterministic: sums over ranks and micro-batches in a fixed tree, so that the same bits come
            out at every stage and for any split of equal micro-batches into ranks and accumulation
            (sizes that are powers of two); costs a copy of the gradients at stages 0 and 1.
        transport: "auto" (shared memory between CPU ranks of one host, otherwise gloo or NCCL),
            "shm" or "torch".
        materialize: fills one tensor, given its name, of a model on the meta device; parameters
            and buffers are then made bucket by bucket, so that no rank holds more than its part.
        debug: a fastpar.parallel.debug.Debug.
        collectives: makes the collectives of (process group, role) instead of the transport.
        tp_plan: what tp ranks split of a model that does not say so itself
            (fastpar/patching/tp_plan.py); "gpt2", "nanogpt"; None: one of these where it fits.
        sequence_parallel: tp ranks also share out the tokens between split layers; None: where the
            model or its plan can. engine_of(model).tp_report says what was chosen.
        pp_split: layers on each pipeline stage; None: so that the slowest stage has as little to do
            as possible, by the model's pipeline_costs(), or equal numbers. Training steps are those
            of fastpar.pipeline_step.
        pp_schedule, pp_chunks: the schedule whose placement the stages have: "interleaved" gives
            each rank pp_chunks of them (2), "zb-v" two in the shape of a V, any other one.
        cp_method: how ranks of cp attend tokens of the others (fastpar/context): "heads" exchanges
            all tokens of some heads, "keys" gathers the keys and values of all tokens. The ranks
            get the same batches and return the same loss.
        offload: "optimizer" keeps AdamW's state in the host's memory, where it is stepped under the
            next forward, also of one rank; "parameters" the shards of stage 3 too. The same bits as
            without. Gradients leave the GPU at stages 2 and 3. Parameters read as nan between a
            step and a forward. Where backward passes add up, pass grad_accum_steps.
        offload_keep_mb: MiB of that state that stay on the GPU: of what a forward needs first.
        offload_pinned: False takes memory that the system does not lock for what crosses the bus:
            where it refuses to, at about half of the speed.
        wire_gradients: "bf16", "int8" or "int4": sent so, rounded at random without bias
            (bf16: to nearest), added up in fp32; see comm/README.md. "fp32": in reduce_dtype;
        wire_weights: "bf16" or "int8": gathered so; all ranks compute with what is sent. "fp8": at
            stage 3, weights of a use_fp8(scaling="tensor") model as its products' codes.
        error_feedback: True adds what a gradient lost to the next; "buffer" in memory of its own.
        node_size: neighbours among the ranks that share a copy, on one machine: wire_gradients are
            added up there first, and encoded once more for each of the other nodes.
        secondary_shards: stage 3 keeps 1 / node_size of what its first forward in a step gathered,
            and gathers inside of the node until weights change; the same bits.
    Returns:
        The same module (of a model on the meta device, with new parameters).
    Ranks: all, with the same model and arguments.
    Wire: per step and rank, P bytes of gradients and of parameters: 2 * (dp - 1) / dp * P at stages
        0 to 2, 3 * at stage 3; see engine_of(model).describe().
    Streams: collectives run beside the compute stream, which waits for them where it needs them;
        the host does not wait (except for gloo, and where a parameter was unused).
    Raises:
        ValueError: a stage outside 0..3; no trainable parameter; a dtype, device or sharing of
            memory that buckets cannot hold; an embedding with max_norm and dp above 1; parallelized
            twice; models that differ between ranks.
    Source: Rajbhandari et al. 2020, arXiv 1910.02054
    """
    options = {name: value for name, value in locals().items() if name not in _NO_OPTIONS}
    options["tp_plan"] = dict(tp_plan) if isinstance(tp_plan, Mapping) else tp_plan
    check_model(model, mesh)
    check_method(cp_method)
    given, mesh = mesh, mesh_of_gradients(mesh)
    check_arguments(model, mesh.dp_size, options)
    check_experts(model, given, options)
    check_offload(options, given.device, debug or Debug())
    transport = check_wires(model, options, mesh.dp_size, given.size("ep"))
    check_parameters(parameter_names(model), mesh.device, materialize is not None)
    check_in_place_writers(model, mesh.dp_size)
    mesh.check_same("parallelize", [*(f"{k}={v}" for k, v in options.items()), *inventory(model)])
    prove_together(mesh)
    debug = debug or Debug()
    maker = GroupMaker(mesh, transport, collectives, options, debug)
    context, take_context = share_context(model, given, maker.make, cp_method)
    cut = cut_stages(model, mesh, pp_split, pp_schedule, pp_chunks)
    declared, report = _split_along_tp(model, given, maker, options)
    declared = share_experts(model, given, maker.make, declared)
    if context is not None:
        take_context(context)
    n_shards = 1 if zero_stage == 0 else shard_size or mesh.size("dp")
    stage = STAGES[zero_stage if n_shards > 1 or offload else 0]
    groups, control = maker.of_engine(stage, n_shards, alone=offload is not None)
    of_experts = maker.of_experts(given, stage, n_shards)
    settings = _settings(options, stage, n_shards, mesh.dp_size, groups)
    check_deterministic(settings, parameter_names(model), mesh)
    if materialize is not None:
        allocate_meta(model, mesh.device, declared)
    stages = None if cut is None else make_stages(cut, model, mesh, maker.make)
    apart = () if cut is None else cut.starts(model)
    modules = find_units(model, units, merge_bytes=first_bucket_mb * 2**20, apart=apart)
    fill = Fill(parameter_names(model), materialize, declared, stages)
    travel = Travel(mesh, given, groups, of_experts, settings, debug.poison)
    shards = _make_shards(model, travel, modules, fill)
    engine = Engine(shards, modules, control, given, debug)
    engine.tp_report = report
    keep_on_host(engine, options, debug)
    attach_experts(engine, model)
    refuse_ddp(model)
    Places.offer(engine)
    guard_optimizers(engine)
    guard_state_dicts(model, shards)
    InputCheck.attach_all(engine, model, tp=declared and declared.tp, cp=context)
    return model


def _settings(
    options: Mapping[str, Any], stage: Stage, n_shards: int, dp: int, groups: BucketGroups
) -> Settings:
    """The options, with the default of bucket_mb filled in."""
    names = [f.name for f in dataclasses.fields(Settings) if f.name in options]
    settings = Settings(stage=stage, n_shards=n_shards, **{name: options[name] for name in names})
    if settings.bucket_mb is not None:
        return settings
    transport = groups.reduce.transport if groups.reduce else "none"
    return dataclasses.replace(settings, bucket_mb=default_bucket_mb(dp, transport))


class Fill:
    """Gives parameters their first values.

    Args:
        named: all parameters with their names.
        materialize: where the model was on the meta device; else parameters have their values.
    """

    def __init__(
        self,
        named: dict[nn.Parameter, tuple[str, ...]],
        materialize: Materialize | None,
        declared: Declared | None,
        stages: Stages | None,
    ) -> None:
        self.named, self.materialize, self.declared = named, materialize, declared
        self.stages = stages

    def __call__(self, p: nn.Parameter, memory: Tensor) -> None:
        """Write the values of p into memory."""
        if self.materialize is None:
            memory.copy_(p.detach())
        elif self.declared is None or not self.declared.is_split(p):
            self.materialize(self.named[p][0], memory)
        else:
            whole = memory.new_empty(self.declared.whole_shape(p))
            self.materialize(self.named[p][0], whole)
            memory.copy_(self.declared.cut(whole, p))

    def rest(self, model: nn.Module, frozen: Iterable[nn.Parameter]) -> None:
        """Values of what is in no bucket."""
        if self.materialize is None:
            return
        for p in frozen:
            self(p, p.data)
        for name, buffer in model.named_buffers():
            self.materialize(name, buffer.data)


def allocate_meta(model: nn.Module, device: torch.device, declared: Declared | None) -> None:
    """Parameters of the meta device -> parameters on device, trained ones without memory yet."""
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
    model: nn.Module, travel: Travel, units: list[list[nn.Module]], fill: Fill
) -> Shards:
    """Bring the parameters into buckets, with the values of the first rank that has them."""
    mesh, settings, declared = travel.mesh, travel.settings, fill.declared
    stage, unit_of = settings.stage, unit_of_parameters(units)
    trained = [p for p in fill.named if p.requires_grad]
    stages, by_unit = fill.stages, stage.shards or settings.offload is not None
    chunk_of = None if stages is None else stages.chunk_of
    codes: dict[int, Fp8] = {}
    if settings.wire_weights == CODES:
        found = rounded_weights(model)
        codes = {i: found[p] for i, p in enumerate(trained) if p in found}
    layout = build_layout(
        [ParamSpec(fill.named[p], tuple(p.shape), p.dtype) for p in trained],
        n_shards=settings.n_shards,
        bucket_bytes=settings.bucket_mb * 2**20,
        first_bucket_bytes=settings.first_bucket_mb * 2**20,
        grad_dtype=settings.grad_dtype,
        # Embeddings, which are ready last, let no block wait (test_tied_table.py).
        unit_of=[unit_of[p] if by_unit else min(unit_of[p], 1) for p in trained],
        alone=[i for i, p in enumerate(trained) if stages and p in stages.tied],
        part_of=None if chunk_of is None else [chunk_of[p] for p in trained],
        experts=[i for i, p in enumerate(trained) if declared and declared.of_experts(p)],
        rounded=codes,
        ep=travel.given.size("ep"),
        flags=not stage.shards,
    )
    buckets, how = [], (settings.wire_gradients, settings.wire_weights, settings.error_feedback)
    wires = Wires(*how, mesh.dp_rank, codes)
    for spec in layout.buckets:  # one after another: little extra memory
        params = [trained[layout.slots[i].registered] for i in spec.slots]
        bucket = travel.bucket(layout, spec, params, wires)
        for view, p in zip(bucket.views, bucket.params):
            fill(p, view)
        travel.share([bucket.flat], experts=spec.experts)
        bucket.attach()
        if bucket.apart:
            bucket.make_stale()
        buckets.append(bucket)
    frozen = {p: names[0] for p, names in fill.named.items() if not p.requires_grad}
    fill.rest(model, frozen)
    apart = [p for p in frozen if declared and declared.of_experts(p)]
    travel.share([*(p for p in frozen if p not in set(apart)), *model.buffers()])
    travel.share(apart, experts=True)
    return Shards(
        mesh,
        settings,
        layout,
        buckets,
        frozen=frozen,
        declared=declared,
        stages=fill.stages,
        model=model,
    )


def _split_along_tp(
    model: nn.Module, mesh: Mesh, maker: GroupMaker, options: Mapping[str, Any]
) -> tuple[Declared | None, str]:
    """What each rank of tp keeps of the model, and a report of it. Ranks: all."""
    planned = plan_for(model, options["tp_plan"])
    tokens = use_tokens(planned, options["sequence_parallel"])
    if mesh.tp_grid is None and mesh.tp_size == 1:
        return None, "tensor parallelism: tp=1, nothing is split"
    if mesh.tp_grid is not None:
        tp: TensorParallel = make_grid(model, mesh, maker.make, options)
    else:
        tp = TensorParallel(maker.of_tp(), sequence_parallel=tokens)
    declared = _split(model, mesh, tp, planned)
    by = "declared by its modules" if planned is None else planned.why
    return declared, tp_report(
        declared, parameter_names(model), by, planned.left if planned else ()
    )


def _split(model: nn.Module, mesh: Mesh, tp: TensorParallel, planned: Planned | None) -> Declared:
    """Each rank of tp keeps its part of the model."""
    # Before modules are told of tp: buffers that they make then may be those of a slice.
    mesh.broadcast_([buffer for buffer in model.buffers() if not buffer.is_meta], *TP_AXES)
    named = parameter_names(model)
    if planned is not None:
        planned.check(tp)
    before = {module: vars(module).get("tp") for module in model.modules()}
    try:
        if planned is not None:
            planned.convert(tp)
        states = find_states(model, tp)
        if planned is not None:
            planned.add_states(states, named, tp)
        return split_parameters(named, states, tp, lambda values: mesh.broadcast_(values, *TP_AXES))
    except BaseException:
        if planned is not None:
            planned.undo()
        for module, old in before.items():  # told of tp already
            if vars(module).get("tp") is not old:
                vars(module)["tp"] = old
        raise


# Process groups


class GroupMaker:
    """Makes collectives of process groups, the same way for every role.

    Args:
        transport: of make_collectives; factory: makes collectives of (process group, role) instead.
        options: of parallelize.
    Attributes:
        again: whether to make the groups of this name, see BucketGroups.
    """

    def __init__(
        self,
        mesh: Mesh,
        transport: str,
        factory: Factory | None,
        options: Mapping[str, Any],
        debug: Debug,
    ) -> None:
        self.mesh, self.transport, self.factory = mesh, transport, factory
        self.deterministic, self.debug = options["deterministic"], debug
        self.node_size, self.secondary = options["node_size"], options["secondary_shards"]
        self.again = options["wire_gradients"] != "fp32"

    def make(self, group: Any, role: str, transport: str | None = None) -> Collectives:
        """Collectives of a process group. Ranks: all of the group."""
        if self.factory is not None:
            return self.debug.delayed(self.factory(group, role))
        return self.debug.delayed(
            make_collectives(
                group,
                device=self.mesh.device,
                transport=transport or self.transport,
                timeout_s=self.mesh.timeout_s,
                in_rank_order=self.deterministic,
            )
        )

    def of_tp(self) -> Collectives:
        """For activations of the ranks along tp. Ranks: all."""
        mesh = self.mesh
        shared = mesh.size("tp") == mesh.world_size  # the control exchange has all ranks' group
        own = shared and self.factory is None
        return self.make(mesh.new_group("tp") if own else mesh.group("tp"), "tp")

    def of_engine(
        self, stage: Stage, n_shards: int, *, alone: bool = False
    ) -> tuple[BucketGroups, Collectives | None]:
        """What the buckets travel over, and all ranks' group of the control exchange. Ranks: all.

        alone: a rank that reduces with nobody has a group, too.

        One group for each role: gather and reduce never queue behind each other.

        Parameters are replicated along dp and replicas: their gradients are reduced there, and
        their shards gathered along dp.
        """
        mesh = self.mesh.with_replicas(self.mesh.dp_size // n_shards)
        one = OneRank(mesh.device) if alone and mesh.dp_size == 1 else None
        if mesh.world_size == 1:
            return BucketGroups(one, one), None
        if mesh.dp_size == 1:
            return BucketGroups(one, one), self.make(mesh.group(*AXES), "control")
        whole = self.make(mesh.dp_group, "reduce")
        kind = self._like(whole)
        # The norm, the flags and the loss are those of all ranks.
        control = whole
        if mesh.world_size > mesh.dp_size:
            control = self.make(mesh.group(*AXES), "control", kind)
        return self._roles(mesh, stage, whole), control

    def of_experts(self, given: Mesh, stage: Stage, n_shards: int) -> BucketGroups | None:
        """The same for experts, None with ep=1. Ranks: all."""
        if given.size("ep") == 1:
            return None
        mesh = mesh_of_experts(given, n_shards)
        if mesh.size("replicas", "dp") == 1:
            alone = OneRank(mesh.device)
            return BucketGroups(alone, alone)
        whole = self.make(mesh.new_group("replicas", "dp"), "reduce")
        return self._roles(mesh, stage, whole)

    def _like(self, whole: Collectives) -> str:
        return "shm" if whole.transport == "shm" else self.transport

    def _roles(self, mesh: Mesh, stage: Stage, whole: Collectives) -> BucketGroups:
        """A group for each role, of the ranks along replicas and dp; whole: all of these."""
        kind = self._like(whole)
        new = self.factory is None and whole.transport != "shm"  # shared memory only meets in one
        if not stage.shards:
            if not self.again:
                return BucketGroups(whole)
            of = mesh.new_group("replicas", "dp") if new else mesh.group("replicas", "dp")
            return BucketGroups(whole, again=self.make(of, "gather", kind))
        if mesh.size("dp") == 1:  # experts of which each copy is whole
            alone = OneRank(mesh.device)
            return BucketGroups(alone, alone, whole)
        gather = self.make(mesh.new_group("dp") if new else mesh.group("dp"), "gather", kind)
        node, nodes = self._of_nodes(new, kind)
        if mesh.size("replicas") == 1:
            return BucketGroups(whole, gather, node=node, nodes=nodes)
        reduce = self.make(mesh.group("dp"), "reduce", kind)
        copies = self.make(mesh.group("replicas"), "replicate", kind)
        return BucketGroups(reduce, gather, copies, node=node)

    def _of_nodes(self, new: bool, kind: str) -> tuple[Collectives | None, Any]:
        """`node` and `nodes` of BucketGroups. Ranks: all."""
        if self.node_size is None:
            return None, None
        mesh = self.mesh.with_replicas(self.mesh.dp_size // self.node_size)

        def of(axis: str, role: str) -> Collectives:
            return self.make(mesh.new_group(axis) if new else mesh.group(axis), role, kind)

        node = of("dp", "gather") if self.secondary else None
        return node, (of("dp", "reduce"), of("replicas", "replicate")) if self.again else None
