"""What a model with experts takes on a rank, and what its exchanges send: closed form.

Of P parameters X are of experts. With ep ranks sharing these out, n ranks sharing the state:

    stage    weights           gradients         optimizer's state
    0        P - X + X/ep      P - X + X/ep      P - X + X/ep
    1, 2     P - X + X/ep      ... 2: P/n        P/n
    3        P/n               P/n               P/n

A token's row goes to K experts and back, in forward and in backward: 4 K C (ep - 1) / ep elements a
layer, where experts are chosen equally often; with all activations recomputed 6 of them.

[Note: what a layer keeps] Of a token, in the place of an MLP, in the weights' format (of
the rest see memory_model.py):

    none        K (2 C + 2 F/tp): permuted rows, c_fc's output, GELU's, what came back
    selective   K (C + F/tp): outputs of c_fc and c_proj; with ep what was received, twice K C more
    full        nothing more than a dense block

and the router's: logits and weights in fp32, the choices and (none) their order in int64, and
(none) x of all tokens in fp32 in the place of the norm's output.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastpar.cost.buckets import buckets_of
from fastpar.cost.memory_model import kept_by_blocks
from fastpar.cost.operations import elements_of, expert_elements
from fastpar.cost.workload import Setup, Workload


@dataclass(frozen=True)
class ExpertCosts:
    """Bytes of one rank: what stays between steps, what its blocks keep of a micro-batch until
    backward, and what it sends to experts in a step."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    all_to_all: float

    @property
    def memory(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations


def predict_experts(workload: Workload, setup: Setup) -> ExpertCosts:
    """Of a rank of dp, tp and ep: cp and pp are 1 in setup."""
    shape, stage, n = workload.shape, setup.stage, setup.n_shards
    local, shared = elements_of(workload, setup)
    whole = sum(expert_elements(shape, setup)) + buckets_of(workload, setup).elements
    shard, ep = whole / n, setup.ep
    tokens = setup.tokens_of_rank(workload) * setup.grad_accum_steps
    rows = tokens * shape.top_k * shape.expert_layers * (ep - 1) / ep
    times = 6 if setup.activation_checkpointing == "full" else 4
    return ExpertCosts(
        parameters=setup.weight_bytes * (shard if stage == 3 else local),
        gradients=setup.grad_bytes * (shard if stage >= 2 else local),
        optimizer=setup.state_bytes * shared,
        activations=kept_by_blocks(workload, setup),
        all_to_all=times * rows * shape.n_embd * setup.weight_bytes,
    )
