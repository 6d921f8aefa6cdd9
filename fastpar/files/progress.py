"""How a run goes, for people: the bar or its lines, a time in words, a smooth curve."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
import time
from collections.abc import Iterable
from typing import Any

_INTERVAL_S = 5.0  # between two lines, where there is no bar


def duration(seconds: float) -> str:
    """4:05 or 1:02:03."""
    minutes, s = divmod(round(max(seconds, 0.0)), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02d}:{s:02d}" if hours else f"{m}:{s:02d}"


def _has_room_for_a_bar() -> bool:
    """Whether stderr is a terminal that knows its size; tqdm draws nothing on one of 0 rows."""
    try:
        return sys.stderr.isatty() and all(os.get_terminal_size(sys.stderr.fileno()))
    except (OSError, ValueError):
        return False


class Progress:
    """The bar on a terminal; a line every few seconds where there is none; nothing when disabled.

    Args:
        total: steps in all.
        initial: steps done before.
        enabled: on rank 0 alone.
        bar: None decides by whether stderr is a terminal.
    """

    def __init__(
        self, total: int, initial: int = 0, *, enabled: bool = True, bar: bool | None = None
    ) -> None:
        self.total, self.enabled = total, enabled
        self._first_step, self._started = initial, time.monotonic()
        self._last_line = -math.inf
        self._bar: Any = None
        bar = _has_room_for_a_bar() if bar is None else bar
        if enabled and bar and importlib.util.find_spec("tqdm") is not None:
            from tqdm import tqdm

            self._bar = tqdm(
                total=total,
                initial=initial,
                unit="step",
                dynamic_ncols=True,
                bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} "
                "[{elapsed}<{remaining}{postfix}]",
            )

    def update(self, step: int, text: str) -> None:
        """`step` steps are done; `text` says how it stands: loss, tokens/s."""
        if not self.enabled:
            return
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(step - self._bar.n)
            return
        now = time.monotonic()
        if now - self._last_line < _INTERVAL_S and step != self.total:
            return
        self._last_line = now
        done = step - self._first_step
        left = (now - self._started) / done * (self.total - step) if done else 0.0
        print(f"step {step}/{self.total}  {text}  eta {duration(left)}", flush=True)

    def say(self, text: str) -> None:
        """A line of its own, above the bar."""
        if not self.enabled:
            return
        if self._bar is not None:
            self._bar.write(text, file=sys.stdout)
            sys.stdout.flush()
        else:
            print(text, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def smoothed(values: Iterable[float], weight: float) -> list[float]:
    """Exponential moving average without the pull towards zero at its start."""
    average, norm, out = 0.0, 0.0, []
    for value in values:
        average = weight * average + (1 - weight) * value
        norm = weight * norm + (1 - weight)
        out.append(average / norm)
    return out
