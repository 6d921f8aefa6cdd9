"""Tables of the rows of studies (bench/systems/study.py).

[Note: steps to a loss] With a learning rate that decays to 0, the loss in the middle of a run
cannot be compared. AdamW at the best learning rate of its sweep is therefore compared with shorter
runs of Muon with their own decay, seed by seed.
"""

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.report.tables import Line, Table
from fastpar.settings.config import TrainConfig

Run = dict[str, Any]  # a line of a rows.jsonl
_COMPARED = {"seed", "optimizer", "lr", "muon_lr", "max_steps"}  # all else is the task


def _grouped(rows: Sequence[Run], without: set[str]) -> list[list[Run]]:
    """Groups of rows that differ only in these settings, in the order of measurement."""
    found: dict[str, list[Run]] = defaultdict(list)
    for row in rows:
        kept = {name: value for name, value in row["settings"].items() if name not in without}
        found[json.dumps(kept, sort_keys=True)].append(row)
    return list(found.values())


def _bits(rows: Sequence[Run]) -> list[str]:
    """Number of seeds; bits a byte, with their range."""
    values = [row["bits_per_byte"] for row in rows]
    text = f"{statistics.fmean(values):.3f}"
    if len(values) > 1:
        text += f" ({min(values):.3f} to {max(values):.3f})"
    return [str(len(values)), text]


def _mean(rows: Sequence[Run], name: str) -> float:
    return statistics.fmean(row[name] for row in rows)


def steps_table(rows: Sequence[Run]) -> Table:
    """See [Note: steps to a loss]."""
    lines = []
    for task in _grouped([r for r in rows if r["settings"].get("lr_schedule")], _COMPARED):
        runs = _grouped(task, {"seed"})
        adamw = [some for some in runs if some[0]["settings"].get("optimizer") != "muon"]
        if len(adamw) < 3:  # not swept
            continue
        best = min(adamw, key=lambda some: _mean(some[:1], "bits_per_byte"))
        goal = {row["seed"]: row["bits_per_byte"] for row in best}
        steps, seconds = best[0]["settings"]["max_steps"], _mean(best, "cpu_s")
        for some in [*adamw, *(r for r in runs if r not in adamw)]:
            config, of_seed = _config(some[0]), {r["seed"]: r["bits_per_byte"] for r in some}
            if config.run.max_steps > steps:
                continue
            common = of_seed.keys() & goal.keys()
            reached = sum(of_seed[seed] <= goal[seed] for seed in common)
            is_muon = some not in adamw
            what = f"{'Muon' if is_muon else 'AdamW'}, lr {config.lr:g}"
            shape, rows_of_step = config.model_config(vocab_size=1), config.text.batch_size
            cells = [f"{shape.n_layer} x {shape.n_embd}, {rows_of_step} x {shape.block_size}"]
            cells += [f"**{what}**" if some is best else what]
            cells += [f"{config.run.max_steps}", f"{config.run.max_steps / steps:.2f}x"]
            cells += [*_bits(some), f"{reached} of {len(common)}" if is_muon else ""]
            lines.append(Line([*cells, f"{_mean(some, 'cpu_s') / seconds:.2f}x"], some))
    head = ["model, batch", "optimizer", "steps", "of AdamW's", "seeds", "bits a byte"]
    return Table([*head, "seeds that reach AdamW's best", "CPU time"], lines)


def blocks_table(rows: Sequence[Run]) -> Table:
    """Runs of the main job that differ in the block only."""
    lines = []
    for task in _grouped(rows, {"seed", "model", "block_size"}):
        runs = _grouped(task, {"seed"})
        for some in runs if any("model" in run[0]["settings"] for run in runs) else ():
            settings = some[0]["settings"]
            block = {"nanochat-tiny": "NanoChat's"}.get(settings.get("model", ""), "GPT-2's")
            cells = [block, f"{settings['max_steps']}", f"{settings['lr']:g}"]
            lines.append(Line([*cells, *_bits(some), f"{_mean(some, 'cpu_s'):.0f}"], some))
    return Table(["block", "steps", "lr", "seeds", "bits a byte", "CPU s"], lines)


def _config(row: Run) -> TrainConfig:
    return TrainConfig().replace(row["settings"])


def _length(row: Run) -> tuple[int, int]:
    """(steps, ranks); earlier rows have them beside the settings."""
    settings = {"max_steps": row.get("steps"), "nproc": row.get("ranks"), **row["settings"]}
    return settings["max_steps"], settings["nproc"]


def curves_table(rows: Sequence[Run]) -> Table:
    """Losses after the same steps with each format on the wire."""
    lines = []
    for some in _grouped(rows, {"seed"}):
        for run in dict.fromkeys(map(_length, some)):
            alike = [row for row in some if _length(row) == run]
            cells = [alike[0]["format"], f"{run[0]} on {run[1]} ranks", *_bits(alike)]
            lines.append(Line(cells, alike))
    return Table(["gradients on the wire", "steps", "seeds", "bits a byte"], lines)


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
    "steps": ("main_job", steps_table),
    "blocks": ("main_job", blocks_table),
    "formats": ("wires", curves_table),
    "products": ("fp8", partial(beside_table, word="products", loss="bits_per_byte", what="fp8")),
    "storage": ("storage", partial(beside_table, word="recipe", loss="val_loss", what="storage")),
    "experts": ("experts", partial(beside_table, word="recipe", loss="val_loss", what="layers")),
}


def table(name: str, results: Path) -> tuple[dict[str, Any], Table]:
    """The newest machine and the table."""
    folder, make = TABLES[name]
    text = (results / folder / "rows.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    made = make(rows)
    used = [row for line in made.lines for row in line.rows if row in rows] or rows
    return max((row["machine"] for row in used), key=lambda machine: machine["date"]), made
