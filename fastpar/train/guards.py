"""What the numbers of a step mean for the run: go on, leave the update out, go back, or stop.

[Note: everyone decides alike] Loss and norm are the step's agreed numbers, the same bits on every
rank, and nothing else is looked at: all ranks reach the same verdict without talking about it. A
rank that went back by itself would leave the others waiting in a collective.

[Note: an update that is left out] has to be left out on the device: when the host learns that a
gradient was not finite, the step is over. The optimizer does so as soon as it has a loss scale, be
it 1. A loss that is not finite makes the gradients so (poison), which tells all ranks at once.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from fastpar.config.options import FaultSettings

WINDOW = 100  # steps whose losses say what is usual
ENOUGH = 25  # of them, before anything is unusual
IN_A_ROW = 10  # updates that may be left out
_FLOOR = 0.01  # of the median: the least spread that is believed
_SIGMA = 1.4826  # a normal distribution's standard deviation, in median absolute deviations


@dataclass(frozen=True)
class Verdict:
    """What to do after a step, and why, in words."""

    action: Literal["go on", "skip", "go back"] = "go on"
    reason: str = ""


class Guards:
    """The rules of --on-nonfinite and --loss-spike, and the losses that they compare with.

    Args:
        scaled: there is a loss scale: then gradients that are not finite are its business.
    Attributes:
        skipped: updates that were left out so far.
    """

    def __init__(self, settings: FaultSettings, *, scaled: bool) -> None:
        self.settings, self.scaled = settings, scaled
        self.skipped = 0
        self._in_a_row = 0
        self._losses: deque[float] = deque(maxlen=WINDOW)

    def judge(self, step: int, loss: float, norm: float) -> Verdict:
        """What to do after a step with these numbers; to be asked step by step.

        Raises:
            RuntimeError: the run cannot go on.
        """
        policy = self.settings.on_nonfinite
        if math.isfinite(loss if self.scaled else loss + norm):
            self._in_a_row = 0
            reason = self._spike(loss)
            if reason:
                return Verdict("go back", reason)
            if math.isfinite(norm):
                self._losses.append(loss)
            return Verdict()
        reason = f"loss={loss}, grad_norm={norm}"
        if policy == "rollback":
            return Verdict("go back", reason)
        if policy == "skip":
            self.skipped += 1
            self._in_a_row += 1
            if self._in_a_row < IN_A_ROW:
                return Verdict("skip", f"{reason}; the update is left out, {self.skipped} by now")
            raise RuntimeError(
                f"train: expected a finite step among {IN_A_ROW}, got {reason} in step {step} as "
                "in those before it; lower --lr, then --resume from the last checkpoint"
            )
        if self.scaled:
            return Verdict()
        raise RuntimeError(
            f"train: expected finite numbers, got {reason} in step {step}; lower --lr, then "
            "--resume from the last checkpoint, or see --on-nonfinite"
        )

    def _spike(self, loss: float) -> str:
        """Why a loss is unusual; nothing if it is not."""
        limit = self.settings.loss_spike
        if not limit or len(self._losses) < ENOUGH:
            return ""
        median = statistics.median(self._losses)
        spread = _SIGMA * statistics.median(abs(x - median) for x in self._losses)
        spread = max(spread, _FLOOR * abs(median))
        if loss <= median + limit * spread:
            return ""
        times = (loss - median) / spread if spread else math.inf
        return (
            f"loss={loss:.4f}, {times:.1f} spreads of {spread:.4f} over the median {median:.4f} "
            f"of {len(self._losses)} steps"
        )

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs, so that later verdicts are those of the uninterrupted run."""
        return {"losses": list(self._losses), "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state_dict()."""
        self._losses = deque(map(float, state["losses"]), maxlen=WINDOW)
        self.skipped, self._in_a_row = int(state["skipped"]), 0


def poison(loss: Tensor) -> Tensor:
    """1 for a finite loss, else NaN; a factor that hands this on to all gradients."""
    return loss.detach() * 0 + 1


def merged(ranges: Iterable[Sequence[int]]) -> list[tuple[int, int]]:
    """The same samples as sorted ranges [a, b) that do not touch."""
    out: list[tuple[int, int]] = []
    for a, b in sorted((int(a), int(b)) for a, b in ranges):
        if out and a <= out[-1][1]:
            out[-1] = out[-1][0], max(b, out[-1][1])
        else:
            out.append((a, b))
    return out


def past(first: int, count: int, skipped: Sequence[tuple[int, int]]) -> int:
    """Where `count` samples from `first` on may start without any of the skipped, merged ranges."""
    for a, b in skipped:
        if first < b and a < first + count:
            first = b
    return first
