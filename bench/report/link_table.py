"""The table of pipelines behind a link; tables.py hands over how it writes numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from bench.records import Row


def pp_link_table(
    rows: Sequence[Row],
    table: Callable[..., str],
    number: Callable[..., str],
    times: Callable[..., str],
    base: str = "fastpar ZeRO-0",
) -> str:
    """Steps behind a link by their tokens: milliseconds, and how much faster than dp in turn."""
    found: dict[tuple[int, int], dict[str, str]] = {}
    for row in rows:
        shape = re.search(r"T=(\d+) B=(\d+), .* Mbit/s", row.case)
        if row.bench == "pp" and shape and row.median_ms:
            n_rows, length = int(shape[2]), int(shape[1])
            faster = f" ({times(row.speedup)})" if row.baseline == base != row.variant else ""
            found.setdefault((n_rows * length, n_rows), {})[row.variant] = (
                f"{number(row.median_ms)}{faster}"
            )
    names = sorted({name for each in found.values() for name in each}, key=lambda n: (n != base, n))
    lines = [
        [f"{tokens} in {n_rows} rows", *(each.get(name, "") for name in names)]
        for (tokens, n_rows), each in sorted(found.items())
    ]
    return table(["tokens a step", *names], lines)
