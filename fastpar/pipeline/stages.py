"""Which parts of a model a rank of a pipeline keeps, and what its stages tell each other.

A model says by pipeline_parts() where it may be cut: the names of the modules of each part, first
the embedding, then the layers, last the head. A stage is a range of parts. Modules of other parts
become Absent: without parameters, so that nothing of them is made, trained or sent here, and the
names of all others stay those of one process.

[Note: a table on two stages] A module that is named by the first and the last part, GPT-2's tied
table, is on both stages. It has a bucket of its own, with the same layout on both, and the sum of
both gradients is made once a step by PartialGradients. In deterministic mode the last stage hands
on each micro-batch's gradient to the first, which adds it to its own before anything else is added:
the order of one process (test_pipeline_bits).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn

from fastpar.comm.collectives import Collectives
from fastpar.comm.mesh import Mesh, ranks_along
from fastpar.sharding.layout import parameter_names


class Absent(nn.Module):
    """Stands where another stage of the pipeline has a module."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"pipeline: expected only modules of this rank's stage to be used, got '{name}' of one "
            "that another stage has; call fastpar.pipeline_step instead of the model"
        )

    def forward(self, *args: Any, **kwargs: Any) -> None:
        """Raises: it is not here."""
        self.__getattr__("forward")


@dataclass(frozen=True)
class Stages:
    """What a rank knows of its pipeline.

    Attributes:
        parts: of the model that this rank runs.
        first, last: whether these are the first, the last ones.
        n_params: of the whole model.
        tied: parameters that the first and the last stage both have.
        onward: to the next stage; back: to the one before. A group each: on NCCL two ranks that
            send to each other in one group would wait for ever.
        pair: the first and the last stage, None in between, or where nothing is tied.
    """

    parts: range
    first: bool
    last: bool
    n_params: int
    tied: dict[nn.Parameter, None]
    onward: Collectives
    back: Collectives
    pair: Collectives | None

    def is_second_copy(self, p: Any) -> bool:
        """Whether the first stage has p too."""
        return not self.first and p in self.tied


@dataclass(frozen=True)
class Cut:
    """What cut_stages() found out; see Stages."""

    parts: range
    n_parts: int
    n_params: int
    shared: list[nn.Module]


def cut_stages(model: nn.Module, mesh: Mesh, split: Sequence[int] | None) -> Cut | None:
    """Leave in the model what this rank's stage runs; None with pp=1. Ranks: all.

    Args:
        split: layers on each stage; None: see equal_split().
    Raises:
        ValueError: a model that does not declare its parts; a split that is not one of its layers.
    """
    n_stages, stage = mesh.size("pp"), mesh.rank_in("pp")
    if n_stages == 1:
        if split is not None:
            raise ValueError(
                f"parallelize: expected pp_split with pp above 1 only, got pp_split={list(split)}; "
                "pass Mesh(pp=...), or leave it out"
            )
        return None
    declared = getattr(model, "pipeline_parts", None)
    if declared is None:
        raise ValueError(
            f"parallelize: expected a model with pipeline_parts() for pp={n_stages}, got "
            f"{type(model).__name__}; use fastpar.GPT, or leave pp out of Mesh"
        )
    names = declared()
    n_layers = len(names) - 2
    counts = equal_split(n_layers, n_stages) if split is None else list(split)
    if len(counts) != n_stages or min(counts) < 0 or sum(counts) != n_layers:
        raise ValueError(
            f"parallelize: expected pp_split as {n_stages} numbers of layers that make {n_layers}, "
            f"got pp_split={counts}; leave it out for equal stages"
        )
    ends = [0, *(1 + sum(counts[: i + 1]) for i in range(n_stages))]
    ends[-1] = len(names)
    parts = range(ends[stage], ends[stage + 1])
    if any(a == b for a, b in itertools.pairwise(ends)):
        raise ValueError(
            f"parallelize: expected every stage between the first and the last to have layers, got "
            f"pp_split={counts} for {n_layers} layers; choose a smaller pp, or another split"
        )
    values = [t for t in (*model.parameters(), *model.buffers()) if not t.is_meta]
    mesh.broadcast_(values, "pp")
    n_params = len(parameter_names(model))
    kept = {name for part in parts for name in names[part]}
    shared = [model.get_submodule(n) for n in names[0] if n in names[-1] and n in kept]
    for name in {name for part in names for name in part} - kept:
        model.set_submodule(name, Absent())
    return Cut(parts, len(names), n_params, shared)


def equal_split(n_layers: int, n_stages: int) -> list[int]:
    """Layers on each stage: equal numbers, the rest on the first ones."""
    few, more = divmod(n_layers, n_stages)
    return [few + (stage < more) for stage in range(n_stages)]


def make_stages(cut: Cut, mesh: Mesh, make: Callable[[Any, str], Collectives]) -> Stages:
    """The messages between stages are connected. Ranks: all."""
    first, last = cut.parts.start == 0, cut.parts.stop == cut.n_parts
    onward = make(mesh.group("pp"), "pipeline")
    back = make(mesh.new_group("pp"), "pipeline")
    lines = ranks_along(mesh.sizes, ["pp"])
    groups = [part for line in lines for part in (line[:: len(line) - 1], line[1:-1]) if part]
    ends, _ = dist.new_subgroups_by_enumeration(groups, timeout=timedelta(seconds=mesh.timeout_s))
    pair = make(ends, "tied") if first or last else None
    shared = (p for module in cut.shared for p in module.parameters())
    tied = dict.fromkeys(p for p in shared if p.requires_grad)
    return Stages(cut.parts, first, last, cut.n_params, tied, onward, back, pair)
