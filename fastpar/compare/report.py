"""A comparison as Markdown and as one HTML page that needs nothing else."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastpar.compare.results import FACTOR, FLOOR, Comparison, Run, Stat
from fastpar.compare.words import number, summary

TABLE, PAGE = "table.md", "report.html"
NOT_KNOWN = "not known"


def head(comparison: Comparison) -> tuple[str, ...]:
    """Names of the columns."""
    base = comparison.baseline
    return (
        "strategy",
        "ranks",
        "tokens/s",
        f"speed, {base} = 1",
        "epoch, s",
        "peak memory a rank, MB",
        f"memory, {base} = 1",
        "sent a step, MB",
        "exposed, ms of a step",
        "last loss",
    )


def rows(comparison: Comparison) -> list[list[str]]:
    """A row a strategy, the fastest first; those left out come last and say why."""
    measured = [name for name, _ in comparison.ranking(comparison.tokens_per_s, most=True)]
    asked = [*comparison.settings["strategies"], *comparison.skipped]
    return [_row(comparison, name) for name in dict.fromkeys([*measured, *asked])]


def _row(comparison: Comparison, name: str) -> list[str]:
    if name in comparison.skipped:
        return [name, f"skipped: {comparison.skipped[name]}"]
    runs = comparison.of(name)
    if not runs:
        why = comparison.failed.get(name)
        return [name, "stopped before its first run" if why is None else f"failed: {why}"]
    epochs = range(comparison.settings["epochs"])

    def epoch_s(run: Run) -> float:
        return sum(comparison.epoch_s(run, epoch) for epoch in epochs) / len(epochs)

    loss = runs[0].losses[-1]
    return [
        name,
        f"{runs[0].ranks}",
        _cell(comparison.stat(name, comparison.tokens_per_s)),
        _ratio(comparison.ratio(name, comparison.tokens_per_s)),
        _cell(comparison.stat(name, epoch_s)),
        _cell(comparison.stat(name, lambda run: comparison.memory(run) / 1e6)),
        _ratio(comparison.ratio(name, comparison.memory)),
        _cell(comparison.stat(name, lambda run: _scaled(run.wire_bytes, 1e-6)), spread=False),
        _cell(comparison.stat(name, lambda run: run.exposed_ms)),
        f"{loss:.5f}",
    ]


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _ratio(value: float | None) -> str:
    return NOT_KNOWN if value is None else f"{value:.2f}"


def _cell(stat: Stat | None, *, spread: bool = True) -> str:
    if stat is None:
        return NOT_KNOWN
    text = number(stat.median)
    low, high = number(stat.low), number(stat.high)
    return f"{text} ({low}-{high})" if spread and stat.n > 1 and low != high else text


def conditions(comparison: Comparison) -> list[str]:
    """What was trained on what, and how numbers are to be read."""
    s, m = comparison.settings, comparison.machine
    shape = s["shape"]
    what = (
        f"{s['model']}: {shape['n_layer']} layers, {shape['n_head']} heads, width "
        f"{shape['n_embd']}, context {shape['block_size']}, {s['parameters']:,} parameters, fp32, "
        f"no dropout; text {s['data']}, tokenizer {s['tokenizer']}"
    )
    how = (
        f"{s['batch_size']} sequences a step over all ranks, {s['epochs']} epochs of "
        f"{s['epoch_steps']} steps, AdamW, learning rate {s['lr']:g} with warm-up and cosine, "
        f"gradients clipped to a norm of 1; {s['repeats']} run{'s' * (s['repeats'] > 1)} each, "
        "in fresh processes and turning order"
    )
    where = (
        f"{m['device']}, {s['nproc']} rank{'s' * (s['nproc'] > 1)} with {s['threads']} "
        f"thread{'s' * (s['threads'] > 1)} each; python {m['python']}, torch {m['torch']}, fastpar "
        f"{m['fastpar']}{_version(m, 'deepspeed')}{_version(m, 'commit')}; {m['date']}"
    )
    return [f"{what}.", f"{how[0].upper()}{how[1:]}.", f"{where}."]


def _version(machine: dict[str, Any], name: str) -> str:
    return f", {name} {machine[name]}" if machine.get(name) else ""


def notes(comparison: Comparison) -> list[str]:
    """How each column was measured."""
    untimed = comparison.settings["untimed_steps"]
    return [
        "Times are medians of the repeats, in brackets their range. The slowest rank counts. The "
        f"first {untimed} steps of a run train like the others and are not timed. The fastest "
        f"stands first; ratios are of medians, to those of {comparison.baseline}.",
        f"Memory: {comparison.memory_label}.",
        "Sent: what a ring would send for the collectives of a step. Of torch and DeepSpeed those "
        "that torch's dispatcher sees, of fastpar what its engine reports, of tp all of its "
        "transports' calls.",
        "Exposed: time of a step in which a rank only waits for others. Of fastpar as its engine "
        "measures it (tp: in calls and waits of its transports); of DDP a step less one without "
        f"communication, in the same processes; of FSDP2 and DeepSpeed {NOT_KNOWN}.",
        "Within rounding: strategies add the same gradients in other orders. How far that alone "
        "drives losses apart is measured by training the single device again with other "
        "micro-batches, and with the gradient's norm summed in fp64 instead of fp32. Up to "
        f"{FACTOR:g} times that drift, or {FLOOR:g} roundings of the loss, "
        "count as rounding.",
    ]


def markdown(comparison: Comparison) -> str:
    """The table, the summary and how to read them."""
    names = head(comparison)
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    for row in rows(comparison):
        cells = [cell.replace("|", "/") for cell in row]
        lines.append(f"| {' | '.join(cells + [''] * (len(names) - len(cells)))} |")
    lines += ["", *(f"- {line}" for line in summary(comparison))]
    lines += ["", *conditions(comparison), "", *notes(comparison)]
    return "\n".join(lines) + "\n"


STYLE = """
:root { color-scheme: light dark; --line: #bbb; --soft: #f3f3f3; --bad: #b00020; }
@media (prefers-color-scheme: dark) { :root { --line: #555; --soft: #222; --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 62rem; padding: 1rem; }
h1 { font-size: 1.5rem; line-height: 1.2; } h2 { font-size: 1.2rem; margin-top: 2rem; }
p, li { overflow-wrap: anywhere; }
.box { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; font-size: .875rem; width: 100%; }
th, td { padding: .4rem .6rem; text-align: right; border-bottom: 1px solid var(--line); }
td { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0;
  background: var(--soft); }
td.left-out { text-align: left; white-space: normal; color: var(--bad); }
figure { margin: 1rem 0; } img { width: 100%; min-width: 40rem; height: auto; background: #fff; }
figcaption, .small { font-size: .875rem; opacity: .85; }
""".strip()


def page(comparison: Comparison, pictures: Sequence[tuple[Path, str]]) -> str:
    """The HTML page; nothing in it is fetched.

    Args:
        pictures: PNG files with what they show.
    """

    def text(value: str) -> str:
        return html.escape(value)

    body = ["<h1>fastpar compare: which parallel strategy</h1>", "<h2>In words</h2>", "<ul>"]
    body += [f"<li>{text(line)}</li>" for line in summary(comparison)]
    body += ["</ul>", "<h2>Table</h2>", '<div class="box" tabindex="0"><table><thead><tr>']
    body += [f'<th scope="col">{text(name)}</th>' for name in head(comparison)]
    body.append("</tr></thead><tbody>")
    for row in rows(comparison):
        body.append("<tr>" + f"<td>{text(row[0])}</td>")
        if len(row) == 2:
            body.append(
                f'<td class="left-out" colspan="{len(head(comparison)) - 1}">{text(row[1])}</td>'
            )
        body += [f"<td>{text(cell)}</td>" for cell in row[1:] if len(row) > 2]
        body.append("</tr>")
    body += ["</tbody></table></div>", "<h2>Pictures</h2>"]
    for path, words in pictures:
        data = base64.b64encode(path.read_bytes()).decode()
        body.append(
            f'<figure><div class="box" tabindex="0"><img alt="{text(words)}" '
            f'src="data:image/png;base64,{data}"></div>'
            f"<figcaption>{text(words)}</figcaption></figure>"
        )
    body += ["<h2>How it was measured</h2>"]
    body += [f'<p class="small">{text(line)}</p>' for line in conditions(comparison)]
    body += [f'<p class="small">{text(line)}</p>' for line in notes(comparison)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'  # else a browser asks for one
        f"<title>fastpar compare</title>\n<style>\n{STYLE}\n</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )
