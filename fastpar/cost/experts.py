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
from fastpar.cost.workload import Setup, Workload
from fastpar.models.mlp import parameters_of


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


def predict_experts(workload: Workload, setup: Setup, ep: int) -> ExpertCosts:
    """Of the ranks of dp alone: tp, cp and pp are 1 in setup."""
    shape, stage, n = workload.shape, setup.stage, setup.n_shards
    padding = (shape.padded_vocab_size - shape.vocab_size) * shape.n_embd
    whole, experts = parameters_of(shape) + padding, count_experts(shape)
    here, shared = whole - experts + experts / ep, whole / n
    tokens = setup.tokens_of_rank(workload) * setup.grad_accum_steps
    rows = tokens * shape.top_k * shape.expert_layers * (ep - 1) / ep
    return ExpertCosts(
        parameters=setup.weight_bytes * (shared if stage == 3 else here),
        gradients=setup.grad_bytes * (shared if stage >= 2 else here),
        optimizer=setup.state_bytes * (shared if stage else here),
        all_to_all=4 * rows * shape.n_embd * setup.weight_bytes,
    )
