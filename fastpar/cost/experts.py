"""What a model with experts takes on a rank, and what its exchanges send: closed form.

Of P parameters X are of experts. With ep ranks sharing these out, n ranks sharing the state:

    stage    weights           gradients         optimizer's state
    0        P - X + X/ep      P - X + X/ep      P - X + X/ep
    1, 2     P - X + X/ep      ... 2: P/n        P/n
    3        P/n               P/n               P/n

A token's row goes to K experts and back, in forward and in backward: 4 K C (ep - 1) / ep elements a
layer, where experts are chosen equally often.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastpar.config.config import GPTConfig
from fastpar.cost.buckets import buckets_of
from fastpar.cost.operations import elements_of, expert_elements
from fastpar.cost.workload import Setup, Workload


@dataclass(frozen=True)
class ExpertCosts:
    """Bytes of one rank: what stays between steps, and what it sends to experts in a step."""

    parameters: float
    gradients: float
    optimizer: float
    all_to_all: float

    @property
    def states(self) -> float:
        return self.parameters + self.gradients + self.optimizer


def count_experts(shape: GPTConfig) -> int:
    """Parameters of all experts, without their routers."""
    one = 2 * shape.n_embd * shape.hidden + shape.n_embd + shape.hidden
    return shape.expert_layers * shape.n_expert * one


def predict_experts(workload: Workload, setup: Setup) -> ExpertCosts:
    """Of a rank of dp, tp and ep: cp and pp are 1 in setup."""
    shape, stage, n = workload.shape, setup.stage, setup.n_shards
    local, shared = elements_of(workload, setup)
    whole = sum(expert_elements(shape, setup)) + buckets_of(workload, setup).elements
    shard, ep = whole / n, setup.ep
    tokens = setup.tokens_of_rank(workload) * setup.grad_accum_steps
    rows = tokens * shape.top_k * shape.expert_layers * (ep - 1) / ep
    return ExpertCosts(
        parameters=setup.weight_bytes * (shard if stage == 3 else local),
        gradients=setup.grad_bytes * (shard if stage >= 2 else local),
        optimizer=setup.state_bytes * shared,
        all_to_all=4 * rows * shape.n_embd * setup.weight_bytes,
    )
