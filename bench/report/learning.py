"""Tables of the rows of studies (bench/systems/study.py).

With a learning rate that decays to 0, the loss in the middle of a run cannot be compared: runs of
other lengths have rows of their own.
"""

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.records import slug
from bench.report.tables import Line, Table

Run = dict[str, Any]  # a line of a rows.jsonl


def _mean(rows: Sequence[Run], name: str) -> float:
    return statistics.fmean(row[name] for row in rows)


def _length(row: Run) -> tuple[int, int]:
    """(steps, ranks); earlier rows have them beside the settings."""
    settings = {"max_steps": row.get("steps"), "nproc": row.get("ranks", 1), **row["settings"]}
    return settings["max_steps"], settings["nproc"]


def runs_table(rows: Sequence[Run], word: str, what: str) -> Table:
    """Every cell of a study at each length: bits a byte, with their range over the seeds."""
    runs: dict[Any, dict[Any, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        runs[row[word]][_length(row)].append(row)
    lines, timed = [], all("cpu_s" in row for row in rows)
    for name, by_length in runs.items():
        for (steps, ranks), some in by_length.items():
            bits = [row["bits_per_byte"] for row in some]
            text = f"{statistics.fmean(bits):.3f}"
            if len(bits) > 1:
                text += f" ({min(bits):.3f} to {max(bits):.3f})"
            length = f"{steps}" + f" on {ranks} ranks" * (ranks > 1)
            cpu = [f"{_mean(some, 'cpu_s'):.0f}"] if timed else []
            lines.append(Line([name, length, str(len(some)), text, *cpu], some))
    return Table([what, "steps", "seeds", "bits a byte", *["CPU s"] * timed], lines)


def beside_table(rows: Sequence[Run], word: str, loss: str, what: str) -> Table:
    """Every cell of a study beside the first one, on the same seeds."""
    cells: dict[str, dict[int, Run]] = defaultdict(dict)
    for row in rows:
        cells[row[word]][row["seed"]] = row
    first = next(iter(cells))
    base = {seed: row[loss] for seed, row in cells[first].items()}
    spread, lines = max(base.values()) - min(base.values()), []
    timed = all("cpu_s" in row for row in rows)
    for name, own in cells.items():
        apart = [row[loss] - base[seed] for seed, row in sorted(own.items())]
        mean, each = statistics.fmean(apart), ", ".join(f"{x:+.4f}" for x in apart)
        numbers = [str(len(own)), f"{_mean([*own.values()], loss):.4f}", f"{mean:+.4f} ({each})"]
        numbers += ["yes" if mean <= spread else "**no**"]
        numbers += [f"{_mean([*own.values()], 'cpu_s'):,.0f}"] if timed else []
        lines.append(Line([name, *numbers], [*own.values()]))
    head = [what, "seeds", "bits a byte" if loss == "bits_per_byte" else "validation loss"]
    head += [f"from {first}, mean (each)", "within the spread", *["CPU s"] * timed]
    return Table(head, lines, f"Spread of {first} over its seeds: {spread:.4f}.")


# Name of a table -> the folder of its rows, what makes it.
TABLES: dict[str, tuple[str, Callable[[Sequence[Run]], Table]]] = {
    "steps": ("main_job", partial(runs_table, word="recipe", what="recipe of the main job")),
    "formats": ("wires", partial(runs_table, word="format", what="gradients on the wire")),
    "products": ("fp8", partial(beside_table, word="products", loss="bits_per_byte", what="fp8")),
    "storage": ("storage", partial(beside_table, word="recipe", loss="val_loss", what="storage")),
    "experts": ("experts", partial(beside_table, word="recipe", loss="val_loss", what="layers")),
}


def tables(name: str, results: Path) -> list[tuple[dict[str, Any], Table]]:
    """A table of each machine that measured, as it was at last."""
    folder, make = TABLES[name]
    text = (results / folder / "rows.jsonl").read_text(encoding="utf-8")
    found: dict[str, list[Run]] = defaultdict(list)
    for row in map(json.loads, text.splitlines()):
        found[slug(row["machine"])].append(row)
    return [(rows[-1]["machine"], make(rows)) for rows in found.values()]
