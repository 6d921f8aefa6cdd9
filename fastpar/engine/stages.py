"""What a ZeRO stage means, as a policy that the parts of the engine ask; phases; settings.

    stage   reduction        whole gradients      whole parameters              gathered
    0       all-reduce       kept                 kept                          never
    1       reduce-scatter   kept                 kept                          after a step
    2       reduce-scatter   freed when reduced   kept                          after a step
    3       reduce-scatter   freed when reduced   freed outside of their use    around use

`zero_stage` is a number in arguments and reports only; whoever decides something asks a field.

The state of a step and of a bucket is a phase; tables say which may follow which, and checked()
holds every change to them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

from fastpar.files.tensor_file import FLOATS
from fastpar.settings.parallel import Parallel

PhaseT = TypeVar("PhaseT", bound=enum.Enum)


@dataclass(frozen=True)
class Stage:
    """The policy of one ZeRO stage; see the table above.

    Args:
        number: zero_stage.
        shards: each rank owns a slice of the optimizer's state and of the reduced gradients:
            gradients are reduce-scattered, otherwise all-reduced.
        frees_gradients: whole gradients are freed when they are reduced.
        frees_parameters: whole parameters exist only around their use.
    """

    number: int
    shards: bool
    frees_gradients: bool
    frees_parameters: bool

    @property
    def gathers_after_step(self) -> bool:
        """Whether parameters are gathered once a step, under the next forward."""
        return self.shards and not self.frees_parameters


STAGES = (
    Stage(0, shards=False, frees_gradients=False, frees_parameters=False),
    Stage(1, shards=True, frees_gradients=False, frees_parameters=False),
    Stage(2, shards=True, frees_gradients=True, frees_parameters=False),
    Stage(3, shards=True, frees_gradients=True, frees_parameters=True),
)


class StepPhase(enum.Enum):
    """What an engine knows of the gradients of a step."""

    EMPTY = "empty"  # there are none
    BACKWARD = "backward"  # a backward runs
    LOCAL = "local"  # some are those of this rank only
    REDUCED = "reduced"  # they are means over the ranks
    STEPPED = "stepped"  # an optimizer has used them


STEP_PHASES = {
    StepPhase.EMPTY: frozenset({StepPhase.EMPTY, StepPhase.BACKWARD, StepPhase.REDUCED}),
    StepPhase.BACKWARD: frozenset({StepPhase.LOCAL}),
    StepPhase.LOCAL: frozenset({StepPhase.EMPTY, StepPhase.BACKWARD, StepPhase.REDUCED}),
    StepPhase.REDUCED: frozenset({StepPhase.EMPTY, StepPhase.BACKWARD, StepPhase.STEPPED}),
    StepPhase.STEPPED: frozenset(
        {StepPhase.EMPTY, StepPhase.BACKWARD, StepPhase.REDUCED, StepPhase.STEPPED}
    ),
}


class BucketPhase(enum.Enum):
    """How far the gradients of a bucket are in a backward."""

    IDLE = "idle"  # no backward adds to it
    COLLECTING = "collecting"  # some parameters have not had their gradient
    READY = "ready"  # all have, or none will get one
    IN_FLIGHT = "in flight"  # its collective is under way
    REDUCED = "reduced"  # the mean is there; other buckets may still be under way


BUCKET_PHASES = {
    BucketPhase.IDLE: frozenset({BucketPhase.COLLECTING, BucketPhase.IN_FLIGHT}),
    BucketPhase.COLLECTING: frozenset({BucketPhase.READY, BucketPhase.IN_FLIGHT, BucketPhase.IDLE}),
    BucketPhase.READY: frozenset({BucketPhase.IN_FLIGHT, BucketPhase.IDLE}),
    BucketPhase.IN_FLIGHT: frozenset({BucketPhase.REDUCED}),
    BucketPhase.REDUCED: frozenset({BucketPhase.IDLE}),
}
SENT = BucketPhase.IN_FLIGHT, BucketPhase.REDUCED  # its gradients of this backward have left


@dataclass(frozen=True)
class Settings:
    """What parallelize() was asked for, and what of it is in effect.

    Attributes:
        stage: that is run: that of zero_stage, or 0 where nobody shares a copy.
        n_shards: ranks that share one copy.
    """

    asked: Parallel
    stage: Stage
    n_shards: int
    bucket_mb: float

    @property
    def deterministic(self) -> bool:
        return self.asked.deterministic

    @property
    def by_unit(self) -> bool:
        """Whether a forward waits for the parameters of each unit."""
        return self.stage.shards or self.asked.offload.what is not None

    @property
    def grad_dtype(self) -> torch.dtype | None:
        """In which gradients are kept and added up; None: each parameter's own."""
        return FLOATS.get(self.asked.precision.grad_dtype or "")

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """Of gradients on the wire; None: as they are kept."""
        return FLOATS.get(self.asked.precision.reduce_dtype or "")

    @property
    def accumulate(self) -> str:
        """Whether each backward is reduced ("shard"), or the last one of a step ("full")."""
        return self.asked.accumulate or "shard"

    @property
    def reduces_each(self) -> bool:
        """Whether each micro-batch of a pipeline is reduced by itself."""
        return self.accumulate == "shard" and self.stage.frees_gradients


class MicroBatches:
    """How far a step is, and which backward passes reduce; see engine.py, [Note: micro-batches]."""

    def __init__(self, accumulate: str, grad_accum_steps: int) -> None:
        self._reduced_at = grad_accum_steps if accumulate == "full" else 1
        self._of_step = grad_accum_steps
        self.begun = 0  # since the last step
        self.told = False  # by begin(): backward passes belong to that one
        self.part: int | None = None  # of the model that it runs; None: all
        self.last = True  # gradients are reduced after this one's backward passes
        self.synchronize = True  # False under no_sync()

    @property
    def final(self) -> bool:
        """Whether no other one is expected in this step."""
        return self.last and (self.told or self.begun >= self._of_step)

    @property
    def finished(self) -> int:
        """Those before the present one."""
        return self.begun - self.told

    def begin(self, last: bool, part: int | None) -> None:
        """The next one, as the training loop tells it."""
        self.begun += 1
        self.told, self.last, self.part = True, last, part

    def begin_backward(self) -> None:
        """A backward begins: of the one that was told, or of the next one."""
        if not self.told:
            self.begun += 1
            self.last = self.synchronize and self.begun >= self._reduced_at

    def forget(self) -> None:
        """The gradients of all that were begun are gone."""
        self.begun = int(self.told)

    def end_step(self) -> None:
        """The next step begins with the next one."""
        self.begun, self.told, self.part = 0, False, None


def checked(
    what: str, now: PhaseT, then: PhaseT, allowed: Mapping[PhaseT, frozenset[PhaseT]]
) -> PhaseT:
    """The phase `then`, if it may follow `now`.

    Raises:
        RuntimeError: it may not; names both.
    """
    if then not in allowed[now]:
        possible = " or ".join(sorted(f"'{phase.value}'" for phase in allowed[now]))
        raise RuntimeError(
            f"Engine: expected {what} to go from '{now.value}' to {possible}, got '{then.value}'; "
            "a backward or step ran inside of another, or the engine has an error"
        )
    return then
