"""A comparison as Markdown and as one HTML page that needs nothing else."""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Sequence
from pathlib import Path
from string import Template
from typing import Any

from fastpar.compare.results import FACTOR, FLOOR, Comparison, Run
from fastpar.compare.summary import number, summary

TABLE, PAGE = "table.md", "report.html"
NOTES = "notes.txt"  # how each column was measured
NOT_KNOWN = "not known"


def _number_of(value: Callable[[Comparison, Run], float | None], *, spread: bool = True) -> Any:
    """A cell: the median over the repeats, with their range."""

    def cell(comparison: Comparison, name: str) -> str:
        stat = comparison.stat(name, lambda run: value(comparison, run))
        if stat is None:
            return NOT_KNOWN
        text, low, high = (number(x) for x in (stat.median, stat.low, stat.high))
        return f"{text} ({low}-{high})" if spread and stat.n > 1 and low != high else text

    return cell


def _ratio_of(value: Callable[[Comparison, Run], float]) -> Any:
    """A cell: the median in medians of the baseline."""

    def cell(comparison: Comparison, name: str) -> str:
        ratio = comparison.ratio(name, lambda run: value(comparison, run))
        return NOT_KNOWN if ratio is None else f"{ratio:.2f}"

    return cell


def _epoch_s(comparison: Comparison, run: Run) -> float:
    epochs = range(comparison.settings["epochs"])
    return sum(comparison.epoch_s(run, epoch) for epoch in epochs) / len(epochs)


# Title -> the cell of a strategy that was measured.
COLUMNS: dict[str, Callable[[Comparison, str], str]] = {
    "strategy": lambda comparison, name: name,
    "ranks": lambda comparison, name: f"{comparison.of(name)[0].ranks}",
    "tokens/s": _number_of(Comparison.tokens_per_s),
    "speed, {baseline} = 1": _ratio_of(Comparison.tokens_per_s),
    "epoch, s": _number_of(_epoch_s),
    "peak memory a rank, MB": _number_of(lambda c, run: c.memory(run) / 1e6),
    "memory, {baseline} = 1": _ratio_of(Comparison.memory),
    "sent a step, MB": _number_of(lambda c, run: run.sent_mb(), spread=False),
    "exposed, ms of a step": _number_of(lambda c, run: run.exposed_ms),
    "last loss": lambda comparison, name: f"{comparison.of(name)[0].losses[-1]:.5f}",
}


def head(comparison: Comparison) -> list[str]:
    """Titles of the columns."""
    return [title.format(baseline=comparison.baseline) for title in COLUMNS]


def rows(comparison: Comparison) -> list[list[str]]:
    """A row a strategy, the fastest first; those left out come last and say why."""
    measured = [name for name, _ in comparison.ranking(comparison.tokens_per_s, most=True)]
    found = [[cell(comparison, name) for cell in COLUMNS.values()] for name in measured]
    for name in dict.fromkeys([*comparison.settings["strategies"], *comparison.skipped]):
        if name in comparison.skipped:
            found.append([name, f"skipped: {comparison.skipped[name]}"])
        elif name in comparison.failed and name not in measured:
            found.append([name, f"failed: {comparison.failed[name]}"])
        elif name not in measured:
            found.append([name, "stopped before its first run"])
    return found


def conditions(comparison: Comparison) -> list[str]:
    """What was trained on what, and how numbers are to be read."""
    s, m = comparison.settings, comparison.machine
    shape = s["shape"]
    versions = [
        f"{name} {m[name]}"
        for name in ("python", "torch", "fastpar", "deepspeed", "commit")
        if m.get(name)
    ]
    return [
        f"{s['model']}: {shape['n_layer']} layers, {shape['n_head']} heads, width "
        f"{shape['n_embd']}, context {shape['block_size']}, {s['parameters']:,} parameters, fp32, "
        f"no dropout; text {s['data']}, tokenizer {s['tokenizer']}.",
        f"{s['batch_size']} sequences a step over all ranks, {s['epochs']} epochs of "
        f"{s['epoch_steps']} steps, {_optimizer(s)} with warm-up and cosine, "
        f"gradients clipped to a norm of 1; {s['repeats']} run{'s' * (s['repeats'] > 1)} each, "
        "in fresh processes and turning order.",
        f"{m['device']}, {s['nproc']} rank{'s' * (s['nproc'] > 1)} with {s['threads']} "
        f"thread{'s' * (s['threads'] > 1)} each; {', '.join(versions)}; {m['date']}.",
    ]


def _optimizer(s: dict[str, Any]) -> str:
    rate = f"learning rate {s['lr']:g}"
    if s.get("optimizer", "adamw") == "adamw":  # earlier results name none
        return f"AdamW, {rate}"
    return (
        f"fastpar.Muon (on every rank of ddp), learning rate {s['muon_lr']:g}, AdamW's {s['lr']:g},"
    )


def notes(comparison: Comparison) -> list[str]:
    """How each column was measured."""
    text = (
        (Path(__file__).parent / NOTES)
        .read_text(encoding="utf-8")
        .format(
            untimed=comparison.settings["untimed_steps"],
            baseline=comparison.baseline,
            memory=comparison.memory_label,
            not_known=NOT_KNOWN,
            factor=FACTOR,
            floor=FLOOR,
        )
    )
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]


def markdown(comparison: Comparison) -> str:
    """The table, the summary and how to read them."""
    names = head(comparison)
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    for row in rows(comparison):
        cells = [cell.replace("|", "/") for cell in row] + [""] * (len(names) - len(row))
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(f"- {line}" for line in summary(comparison))]
    lines += ["", *conditions(comparison), "", *notes(comparison)]
    return "\n".join(lines) + "\n"


def page(comparison: Comparison, pictures: Sequence[tuple[Path, str]]) -> str:
    """The HTML page; nothing in it is fetched.

    Args:
        pictures: PNG files with what they show.
    """
    template = Template((Path(__file__).parent / PAGE).read_text(encoding="utf-8"))
    return template.substitute(
        summary=_tags("li", summary(comparison)),
        head=_tags("th", head(comparison), ' scope="col"'),
        rows="\n".join(f"<tr>{_html_row(row)}</tr>" for row in rows(comparison)),
        pictures="\n".join(_figure(path.read_bytes(), html.escape(x)) for path, x in pictures),
        notes=_tags("p", [*conditions(comparison), *notes(comparison)]),
    )


def _tags(name: str, texts: Sequence[str], attributes: str = "") -> str:
    """Each text in an element of its own."""
    return "\n".join(f"<{name}{attributes}>{html.escape(text)}</{name}>" for text in texts)


def _html_row(row: Sequence[str]) -> str:
    if len(row) > 2:
        return _tags("td", row)
    left_out = f' class="left-out" colspan="{len(COLUMNS) - 1}"'
    return _tags("td", row[:1]) + _tags("td", row[1:], left_out)


def _figure(png: bytes, words: str) -> str:
    data = base64.b64encode(png).decode()
    return (
        f'<figure><div class="box" tabindex="0"><img alt="{words}" '
        f'src="data:image/png;base64,{data}"></div><figcaption>{words}</figcaption></figure>'
    )
