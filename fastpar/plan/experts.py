"""`fastpar plan --n-expert`: memory and exchanges of every ep and stage; no times are predicted."""

from __future__ import annotations

from dataclasses import replace

from fastpar.cost.experts import ExpertCosts, count_experts, predict_experts
from fastpar.cost.memory_model import format_bytes
from fastpar.cost.workload import Setup, Workload
from fastpar.models.mlp import parameters_of


def expert_layouts(workload: Workload, template: Setup) -> list[tuple[int, Setup, ExpertCosts]]:
    """(ep, setup, costs) of every ep and stage of data-parallel ranks.

    Raises:
        ValueError: a batch that the ranks do not divide.
    """
    ranks, n_expert = template.world_size, workload.shape.n_expert
    if workload.batch_size % ranks:
        raise ValueError(
            f"plan: expected a batch_size that the {ranks} ranks divide, got batch_size="
            f"{workload.batch_size}; use --batch-size {-(-workload.batch_size // ranks) * ranks}"
        )
    rows = workload.batch_size // ranks
    sizes = [ep for ep in range(1, ranks + 1) if ranks % ep == 0 and n_expert % ep == 0]
    setups = [
        replace(template, zero_stage=stage, grad_accum_steps=rows)
        for stage in (range(4) if ranks > 1 else range(1))
    ]
    return [(ep, s, predict_experts(workload, s, ep)) for ep in sizes for s in setups]


def experts_report(workload: Workload, template: Setup, limit_bytes: float) -> str:
    """A table of them, those that surely do not fit named."""
    shape = workload.shape
    whole, active = parameters_of(shape), parameters_of(shape, active=True)
    lines = [
        f"{whole:,} parameters, of experts {count_experts(shape):,}; a token goes through "
        f"{active:,}",
        "  ep  zero  weights     gradients   optimizer   all three   all-to-all a rank and step",
    ]
    for ep, setup, costs in expert_layouts(workload, template):
        sizes = (costs.parameters, costs.gradients, costs.optimizer, costs.states)
        cells = "".join(f"{format_bytes(size):12}" for size in (*sizes, costs.all_to_all))
        fits = "" if costs.states <= limit_bytes else " does not fit"
        lines.append(f"{ep:4}  {setup.stage:4}  {cells.rstrip()}{fits}")
    return "\n".join(
        [
            *lines,
            f"Without activations; of {format_bytes(limit_bytes)} a rank. Where experts are chosen "
            "equally often. Times of experts are not predicted: fastpar train measures them.",
        ]
    )
