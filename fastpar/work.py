"""What a step is made of, without saying how long it takes: operations and exchanges of one rank.

Op and Send are the words between those who count (step_work.py), those who know a machine (rates)
and those who add up (step_time.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from fastpar.job import Job, Setup


class Op(NamedTuple):
    """One kind of operation of a rank, `count` times in a step.

    name, shape (per rank):
        matmul         (M, K, N): x[M, K] @ w[N, K].T; three such make forward and backward
        attention      (B, H, T, D), causal
        layer_norm     (N, C): residual_layer_norm
        bias_gelu      (N, F)
        embedding      (N, C)
        loss           (N, C, V): linear_cross_entropy, whose forward computes the gradients too
        optimizer      (elements,): norm and update of so many elements
        copy           (bytes,)
    direction: "forward" or "backward" ("forward" for optimizer and copy).
    flops, bytes: of one of them; what must move through memory at least.
    """

    name: str
    shape: tuple[int, ...]
    direction: str
    flops: float
    bytes: float
    count: float


class Send(NamedTuple):
    """One kind of exchange of a rank, `count` times in a step.

    kind: all_reduce, reduce_scatter, all_gather, broadcast or send.
    axis: "dp", "shard", "copies" (of shards), "tp", "pp" or "control".
    bytes: of the whole tensor (of all_gather: gathered; of reduce_scatter: before it).
    ranks: of the group; stride: distance of neighbours in the group, in global ranks.
    under: what can hide it: "forward", "backward" or "" (nothing: the rank waits).
    """

    kind: str
    axis: str
    bytes: float
    ranks: int
    stride: int
    count: float
    under: str


class Rates(Protocol):
    """What a machine does: datasheet.py from data sheets, measured.py from this machine."""

    def op_s(self, op: Op) -> float:
        """Seconds of one such operation."""

    def send_s(self, send: Send) -> float:
        """Seconds of one such exchange."""

    def overhead_s(self, job: Job, setup: Setup) -> float:
        """Seconds of a step that no Op and no Send stands for: Python, hooks, data; 0: not known.

        step_time.predict_step adds it to the step as one of its parts.
        """

    @property
    def peak_flops(self) -> float | None:
        """Of a rank at the format of the weights: what MFU is a fraction of; None: not known."""

    @property
    def overlap(self) -> float:
        """Fraction of the compute time under which an exchange hides; 0: ranks' cores do both."""
