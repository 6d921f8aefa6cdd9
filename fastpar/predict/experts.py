"""`fastpar plan --n-expert`: memory, exchanges and step time of every tp, ep and stage.

A token's row goes to K experts and back, in forward and in backward: 4 K C (ep - 1) / ep elements a
layer, where experts are chosen equally often; with all activations recomputed 6 of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from fastpar.axes.experts import expert_elements
from fastpar.axes.step import Setup, Workload
from fastpar.predict.estimate import tp_sizes
from fastpar.predict.machine import Cluster, DatasheetRates
from fastpar.predict.memory import Memory, format_bytes, kept_by_blocks, predict_states
from fastpar.predict.search import CHECKPOINTING
from fastpar.predict.time import StepTime, predict_step
from fastpar.settings.block import count_parameters
from fastpar.settings.config import derive_batch


class ExpertCosts(NamedTuple):
    """Bytes of one rank: what stays between steps, and what its blocks keep of a micro-batch until
    backward; what it sends to experts in a step."""

    memory: Memory
    all_to_all: float


def predict_experts(workload: Workload, setup: Setup) -> ExpertCosts:
    """Of a rank of dp, tp and ep: cp and pp are 1 in setup."""
    shape, ep = workload.shape, setup.ep
    tokens = setup.tokens_of_rank(workload) * setup.grad_accum_steps
    rows = tokens * shape.top_k * shape.expert_layers * (ep - 1) / ep
    times = 6 if setup.activation_checkpointing == "full" else 4
    kept = round(kept_by_blocks(workload, setup))
    memory = replace(predict_states(workload, setup), activations=kept)
    return ExpertCosts(memory, times * rows * shape.n_embd * setup.weight_bytes)


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
                counts = {"micro_batch_size": micro, "grad_accum_steps": accum}
                base = template.change(tp=tp, ep=ep, zero_stage=stage, **counts)
                for mode in CHECKPOINTING:
                    setup = base.change(activation_checkpointing=mode)
                    costs = predict_experts(workload, setup)
                    if costs.memory.total <= limit_bytes:
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
    experts = expert_elements(shape)
    names = ("weights", "gradients", "optimizer", "activations", "all four", "all-to-all")
    lines = [
        f"{whole:,} parameters, of experts {experts:,}; a token goes through {active:,}",
        "  tp  ep  zero  recomputed  step ms     tokens/s    "
        + "".join(f"{name:12}" for name in names).rstrip(),
    ]
    for setup, costs, time in expert_layouts(workload, template, cluster, limit_bytes):
        kept = costs.memory
        sizes = kept.parameters, kept.gradients, kept.optimizer, kept.activations, kept.total
        cells = f"{1e3 * time.step_s:<12,.1f}{time.tokens_per_s:<12,.0f}"
        cells += "".join(f"{format_bytes(size):12}" for size in (*sizes, costs.all_to_all))
        mode = f"{setup.activation_checkpointing:12}"
        fits = "" if kept.total <= limit_bytes else " does not fit"
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
