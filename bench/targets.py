"""What a row of fastpar has to reach, and whether it does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.records import Row

HOST_US = 15.0  # of a forward call
SAID = {  # measure -> the bound in words
    "speed": ">= {value:.3g}x {others}",
    "ceiling": ">= {value:.3g} % of the ceiling",
    "memory": "peak <= {percent:.3g} % of {others}",
    "host": "host <= {value:.3g} us",
    "time": "<= {value:.6g} ms",
    "exposed": "exposed <= {value:.3g} % of communication",
}


@dataclass(frozen=True)
class Target:
    """A bound for one measure of a row.

    measure: "speed": at least `value` times that of the fastest variant in `of`; "ceiling": at
        least `value` percent; "memory": peak at most `value` times that of the one variant in
        `of`; "host": at most `value` microseconds a call; "time": at most `value` milliseconds;
        "exposed": at most `value` percent of communication not hidden behind computation.
    """

    measure: str
    value: float
    of: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.measure not in SAID:
            raise ValueError(
                f"Target: expected measure in {tuple(SAID)}, got measure={self.measure}; choose one"
            )

    def __str__(self) -> str:
        others = self.of[0] if len(self.of) == 1 else f"the best of {', '.join(self.of)}"
        return SAID[self.measure].format(value=self.value, percent=100 * self.value, others=others)

    def reached(self, row: Row, others: Iterable[Row]) -> float | None:
        """What the row reaches, in the target's unit; None where it or every peer has no time."""
        peers = [r for r in others if r.variant in self.of and r.median_ms is not None]
        if row.median_ms is None or (self.of and not peers):
            return None
        if self.measure == "speed":
            return min(r.median_ms or 0.0 for r in peers) / row.median_ms
        if self.measure == "memory":
            peak = peers[0].peak_bytes
            return row.peak_bytes / peak if row.peak_bytes is not None and peak else None
        if self.measure == "time":
            return row.median_ms
        if self.measure == "exposed":
            return row.notes.get("exposed_percent")
        return row.percent_of_ceiling if self.measure == "ceiling" else row.host_us

    def met(self, reached: float) -> bool:
        if self.measure in ("speed", "ceiling"):
            return reached >= self.value
        return reached <= self.value

    def to_json(self) -> list[Any]:
        return [self.measure, self.value, *self.of]


def targets_of(row: Row) -> list[Target]:
    """Those that the bench wrote into the row's notes."""
    return [Target(t[0], t[1], tuple(t[2:])) for t in row.notes.get("targets", ())]


def faster(value: float, *of: str) -> Target:
    return Target("speed", value, of)


def note(targets: Sequence[Target]) -> dict[str, Any]:
    return {"targets": [t.to_json() for t in targets]} if targets else {}
