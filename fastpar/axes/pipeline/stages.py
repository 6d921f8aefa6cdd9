"""Which parts of a model a rank of a pipeline keeps, and the groups for its messages.

A model says with pipeline_parts() where it may be cut: the names of the modules of each part, first
the embedding, then the layers, last the head. A stage is a range of parts. Modules of other stages
become Absent, without parameters, so nothing of them is allocated, trained or sent here, and all
other names stay those of one process. A rank has as many stages as its schedule has chunks; the
schedule's name decides which (schedules.py).

A table on two stages: a module that the first and the last part name, GPT-2's tied table, is on
both stages. It has its own bucket, with the same layout on both, and PartialGradients sums both
gradients once a step. In deterministic mode the last stage sends each micro-batch's gradient to the
first, which adds it to its own first: the order of one process (test_same_run).

Messages to a higher rank and to a lower one have separate process groups, for activations and for
gradients: on NCCL two ranks that send to each other in one group would wait forever, and messages
of a group are received in the order of sending, whatever their tags.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fastpar.axes.pipeline.schedules import Schedule, cut, make_schedule
from fastpar.comm.collectives import Collectives, started
from fastpar.comm.mesh import Mesh
from fastpar.sharding.layout import parameter_names


class Absent(nn.Module):
    """Replaces a module that another stage of the pipeline runs."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"pipeline: '{name}' belongs to a module of another stage; call fastpar.pipeline_step "
            "instead of the model"
        )

    def forward(self, *args: Any, **kwargs: Any) -> None:
        """Raise AttributeError: the module is not on this rank."""
        self.__getattr__("forward")


@dataclass(frozen=True)
class Stages:
    """A rank's view of its pipeline.

    Attributes:
        schedule: defines the placement of the stages, for any number of micro-batches.
        parts: parts of the model that each chunk of this rank runs.
        n_params: of the whole model.
        used: parameters of each chunk.
        tied: parameters on both the first and the last stage, if these are on two ranks.
        links: (whether activations, whether to a higher rank) -> collectives for these messages.
        pair: the first and the last stage, None in between, or if nothing is tied.
    """

    schedule: Schedule
    parts: tuple[range, ...]
    n_params: int
    used: list[list[nn.Parameter]]
    tied: dict[nn.Parameter, None]
    links: dict[tuple[bool, bool], Collectives]
    pair: Collectives | None

    @property
    def first(self) -> bool:
        """Whether this rank has the first stage."""
        return self.parts[0].start == 0

    @property
    def chunk_of(self) -> dict[nn.Parameter, int]:
        """The chunk of each parameter; of two that use it, the first, whose backward is later."""
        return {p: c for c, used in reversed([*enumerate(self.used)]) for p in used}

    def is_second_copy(self, p: Any) -> bool:
        """Whether the first stage has p too, on another rank."""
        return not self.first and p in self.tied


@dataclass(frozen=True)
class Cut:
    """The result of cut_stages(); see Stages."""

    schedule: Schedule
    parts: tuple[range, ...]
    names: tuple[tuple[str, ...], ...]  # of the modules of each chunk
    n_params: int
    shared: list[nn.Module]

    def used(self, model: nn.Module) -> list[list[nn.Parameter]]:
        """The parameters of each chunk."""
        modules = ([model.get_submodule(name) for name in names] for names in self.names)
        params_of = ([p for m in chunk for p in m.parameters()] for chunk in modules)
        return [list(dict.fromkeys(params)) for params in params_of]

    def starts(self, model: nn.Module) -> list[nn.Module]:
        """The first module of each chunk except the first: a new unit begins there."""
        return [model.get_submodule(names[0]) for names in self.names[1:]]


def cut_stages(
    model: nn.Module, mesh: Mesh, split: Sequence[int] | None, name: str, chunks: int | None
) -> Cut | None:
    """Keep the modules of this rank's stages in the model; None with pp=1. Ranks: all.

    Args:
        split: layers on each stage. Default: by the costs of the parts, see equal_split() for a
            model without pipeline_costs().
        name, chunks: of the schedule that places the stages.
    Raises:
        ValueError: a model that does not declare its parts; a split that does not match its
            layers; chunks that the schedule does not support.
    """
    n_ranks = mesh.size("pp")
    if n_ranks == 1:
        return None
    declared = getattr(model, "pipeline_parts", None)
    if declared is None:
        raise ValueError(
            f"parallelize: pp={n_ranks} needs a model with pipeline_parts(), got "
            f"{type(model).__name__}; use fastpar.GPT, or drop pp from Mesh"
        )
    schedule = make_schedule(name, n_ranks, 1, chunks, caller="parallelize")
    names, n_stages = declared(), schedule.stages
    n_layers = len(names) - 2
    costs = getattr(model, "pipeline_costs", None)
    if split is None and costs is not None and n_stages <= len(names):
        split = cut(costs(), n_stages)
    counts = equal_split(n_layers, n_stages) if split is None else list(split)
    if len(counts) != n_stages or sum(counts) != n_layers:
        raise ValueError(
            f"parallelize: expected pp_split as {n_stages} numbers of layers that add up to "
            f"{n_layers}, got pp_split={counts}; drop it for equal stages"
        )
    ends = [0, *(1 + sum(counts[: i + 1]) for i in range(n_stages))]
    ends[-1] = len(names)
    if any(a == b for a, b in itertools.pairwise(ends)):
        got = f"pp_split={counts}" if split else f"pp={n_ranks} with {schedule.chunks} chunks"
        raise ValueError(
            f"parallelize: some stages would have no layers, got {got} for {n_layers} layers; "
            "choose a smaller pp, fewer chunks, or another split"
        )
    _check_shared(model, names, ends)
    _check_dtypes(model, names)
    values = [t for t in (*model.parameters(), *model.buffers()) if not t.is_meta]
    mesh.broadcast_(values, "pp")
    n_params = len(parameter_names(model))
    stages = [schedule.stage_of(mesh.rank_in("pp"), c) for c in range(schedule.chunks)]
    parts = tuple(range(ends[stage], ends[stage + 1]) for stage in stages)
    each = tuple(tuple(n for part in chunk for n in names[part]) for chunk in parts)
    kept = {n for chunk in each for n in chunk}
    both = {0, n_stages - 1} <= set(stages)
    tied = [] if both else [n for n in names[0] if n in names[-1] and n in kept]
    shared = [model.get_submodule(n) for n in tied]
    for n in {n for part in names for n in part} - kept:
        model.set_submodule(n, Absent())
    return Cut(schedule, parts, each, n_params, shared)


def _check_shared(model: nn.Module, names: list[tuple[str, ...]], ends: list[int]) -> None:
    """Refuse parameters of several stages, except those that the first and the last part name."""
    chunk_of: dict[nn.Parameter, int] = {}
    tables = {p for n in {*names[0]} & {*names[-1]} for p in model.get_submodule(n).parameters()}
    for stage, (start, stop) in enumerate(itertools.pairwise(ends)):
        for n in (n for part in names[start:stop] for n in part):
            for name, p in model.get_submodule(n).named_parameters(n):
                if chunk_of.setdefault(p, stage) != stage and p not in tables:
                    raise ValueError(
                        f"parallelize: '{name}' is on stages {chunk_of[p]} and {stage}, but only a "
                        "table may be shared, by the first and the last stage; keep its layers "
                        "together with pp_split, or drop pp"
                    )


def _check_dtypes(model: nn.Module, names: list[tuple[str, ...]]) -> None:
    """Refuse parts whose first matrices differ in dtype: one stage would fail, others wait."""
    first_of: dict[torch.dtype, str] = {}
    for part in names:
        named = (pair for n in part for pair in model.get_submodule(n).named_parameters(n))
        for name, p in itertools.islice((pair for pair in named if pair[1].dim() > 1), 1):
            first_of.setdefault(p.dtype, name)
    if len(first_of) > 1:
        each = " and ".join(f"{name}={dtype}" for dtype, name in first_of.items())
        raise ValueError(
            f"parallelize: pipeline stages differ in dtype: {each}; cast the whole model"
        )


def equal_split(n_layers: int, n_stages: int) -> list[int]:
    """Layers on each stage: equal numbers, the rest on the first ones."""
    few, more = divmod(n_layers, n_stages)
    return [few + (stage < more) for stage in range(n_stages)]


def make_stages(
    cut: Cut, model: nn.Module, mesh: Mesh, make: Callable[[Any, str], Collectives]
) -> Stages:
    """Make the groups for messages between stages. Ranks: all."""
    schedule = cut.schedule
    owners = [schedule.owner(stage)[0] for stage in range(schedule.stages)]
    ways = {(there > here) for here, there in itertools.pairwise(owners) if here != there}
    links = {
        (forward, up): make(mesh.new_group("pp"), "pipeline")
        for forward, up in sorted({(True, up) for up in ways} | {(False, not up) for up in ways})
    }
    shared = (p for module in cut.shared for p in module.parameters())
    tied = dict.fromkeys(p for p in shared if p.requires_grad)
    pair = None
    if owners[0] != owners[-1]:
        lines = mesh.ranks_along("pp")
        groups = [part for line in lines for part in (line[:: len(line) - 1], line[1:-1]) if part]
        ends, _ = dist.new_subgroups_by_enumeration(
            groups, timeout=timedelta(seconds=mesh.timeout_s)
        )
        pair = make(ends, "tied") if mesh.rank_in("pp") in (owners[0], owners[-1]) else None
    _connect(owners, mesh, links, pair)
    return Stages(schedule, cut.parts, cut.n_params, cut.used(model), tied, links, pair)


def _connect(
    owners: Sequence[int],
    mesh: Mesh,
    links: Mapping[tuple[bool, bool], Collectives],
    pair: Collectives | None,
) -> None:
    """Send a number along every link, so that NCCL connects the ranks now.

    Otherwise it would connect during the first step. All ranks use the links in one order.
    """
    rank = mesh.rank_in("pp")
    steps = [(a, b) for a, b in itertools.pairwise(owners) if a != b]
    ways = {(links[True, b > a], a, b) for a, b in steps}
    ways |= {(links[False, a > b], b, a) for a, b in steps}
    order = {link: i for i, link in enumerate(links.values())}
    number, handles = torch.zeros(1, device=mesh.device, dtype=torch.float32), []
    for link, source, target in sorted(ways, key=lambda way: (order[way[0]], *way[1:])):
        if rank == source:
            handles.append(started(link.send(number, target, async_op=True)))
        if rank == target:
            handles.append(started(link.recv(number.clone(), source, async_op=True)))
    if pair is not None:
        first = rank == owners[0]
        move = pair.recv if first else pair.send
        handles.append(started(move(number.clone(), 1 if first else 0, async_op=True)))
    for handle in handles:
        handle.wait()
