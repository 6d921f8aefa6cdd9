"""`fastpar plan --n-expert`: memory, exchanges and step time of every tp, ep and stage."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from fastpar.cost.datasheet import DatasheetRates
from fastpar.cost.devices import Cluster
from fastpar.cost.experts import ExpertCosts, predict_experts
from fastpar.cost.memory_model import format_bytes
from fastpar.cost.operations import expert_elements
from fastpar.cost.step_time import StepTime, predict_step
from fastpar.cost.workload import Setup, Workload
from fastpar.models.block import count_parameters
from fastpar.plan.estimate import tp_sizes
from fastpar.plan.search import CHECKPOINTING
from fastpar.settings.config import derive_batch


class ExpertLayout(NamedTuple):
    """One way to share out a model with experts, and what it costs."""

    setup: Setup
    costs: ExpertCosts
    time: StepTime


def expert_layouts(
    workload: Workload, template: Setup, cluster: Cluster, limit_bytes: float
) -> list[ExpertLayout]:
    """Of every tp inside of a node, ep and stage, the fastest first; recomputing as little as fits.

    Raises:
        ValueError: a batch that no number of data-parallel ranks divides.
    """
    shape, ranks, found = workload.shape, template.world_size, []
    for tp in tp_sizes(workload, template, cluster.per_node):
        dp = ranks // tp
        if workload.batch_size % dp or shape.hidden % tp:
            continue
        micro, accum = derive_batch(workload.batch_size, shape.block_size, dp)
        for ep in (n for n in range(1, dp + 1) if dp % n == 0 and shape.n_expert % n == 0):
            for stage in range(4) if dp > 1 else range(1):
                setup = replace(template, tp=tp, ep=ep, zero_stage=stage)
                setup = replace(setup, micro_batch_size=micro, grad_accum_steps=accum)
                for mode in CHECKPOINTING:
                    setup = replace(setup, activation_checkpointing=mode)
                    costs = predict_experts(workload, setup)
                    if costs.memory <= limit_bytes:
                        break
                time = predict_step(workload, setup, DatasheetRates(cluster, setup))
                found.append(ExpertLayout(setup, costs, time))
    if not found:
        raise ValueError(
            f"plan: expected a batch_size that the {ranks} ranks divide, got batch_size="
            f"{workload.batch_size}; use --batch-size {-(-workload.batch_size // ranks) * ranks}"
        )
    return sorted(found, key=lambda layout: layout.time.step_s)


def experts_report(
    workload: Workload, template: Setup, cluster: Cluster, limit_bytes: float
) -> str:
    """A table of them, those that surely do not fit named."""
    shape = workload.shape
    whole, active = count_parameters(shape), count_parameters(shape, active=True)
    experts, _ = expert_elements(shape, Setup())
    names = ("weights", "gradients", "optimizer", "activations", "all four", "all-to-all")
    lines = [
        f"{whole:,} parameters, of experts {experts:,}; a token goes through {active:,}",
        "  tp  ep  zero  recomputed  step ms     tokens/s    "
        + "".join(f"{name:12}" for name in names).rstrip(),
    ]
    for setup, costs, time in expert_layouts(workload, template, cluster, limit_bytes):
        sizes = (costs.parameters, costs.gradients, costs.optimizer, costs.activations)
        cells = f"{1e3 * time.step_s:<12,.1f}{time.tokens_per_s:<12,.0f}"
        cells += "".join(
            f"{format_bytes(size):12}" for size in (*sizes, costs.memory, costs.all_to_all)
        )
        mode = f"{setup.activation_checkpointing:12}"
        fits = "" if costs.memory <= limit_bytes else " does not fit"
        lines.append(f"{setup.tp:4}{setup.ep:4}  {setup.stage:4}  {mode}{cells.rstrip()}{fits}")
    return "\n".join(
        [
            *lines,
            f"Of {format_bytes(limit_bytes)} a rank; activations are those that forward keeps, "
            "what backward needs for a moment comes on top; all-to-all: sent by a rank in a step. "
            "Where experts are chosen equally often; times by the data sheet, which no run with "
            "experts has checked.",
        ]
    )
