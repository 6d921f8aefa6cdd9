"""Numbers, lists and tables as text, for both commands; and the summary of a comparison.

Each sentence of a summary is computed from the numbers that it states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np

from fastpar.observe.results import FACTOR, FLOOR, Comparison, Run, Stat, judge_losses
from fastpar.observe.strategies import SINGLE


def number(value: float) -> str:
    """Three digits and more: 21,300; 481.2; 48.1; 0.0123."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.3g}"


def percent(fraction: float | None) -> str:
    """0.237 -> 24 %."""
    return "" if fraction is None else f"{100 * fraction:.0f} %"


def counted(n: int, noun: str) -> str:
    """1 rank; 2 ranks."""
    return f"{n} {noun}{'s' * (n > 1)}"


def listed(names: Sequence[str]) -> str:
    """a; a and b; a, b and c."""
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def text_table(rows: Iterable[Sequence[str]], *widths: int) -> list[str]:
    """A line per row: the first cell flush left, others flush right, the last unpadded."""
    lines = []
    for first, *cells, last in rows:
        right = "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths[1:]))
        lines.append(f"{first:{widths[0]}}{right}  {last}".rstrip())
    return lines


def markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table; the first row is its head; short rows are padded."""
    width = len(rows[0])
    cells = [[c.replace("|", "/") for c in row] + [""] * (width - len(row)) for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return [lines[0], f"|{'---|' * width}", *lines[1:]]


# A comparison's table

TABLE = "table.md"
MEMORY = "peak memory allocated in a step, per rank"
NOT_KNOWN = "not known"
_CONDITIONS = """\
{model}: {shape[n_layer]} layers, {shape[n_head]} heads, width {shape[n_embd]}, context
{shape[block_size]}, {parameters:,} parameters, fp32, no dropout; text {data}, tokenizer
{tokenizer}.

{batch_size} sequences per step over all ranks, {epochs} epochs of {epoch_steps} steps, {optimizer}
with warm-up and cosine decay, gradients clipped to a norm of 1; {runs} per strategy, in fresh
processes and rotating order.

{device}, {ranks} with {threads} each; {versions}; {date}."""
_NOTES = """\
Times are medians over the repeats, with their range in brackets, on the slowest rank. The first
{untimed_steps} steps of a run are not timed. The fastest strategy comes first; ratios are of
medians, relative to {baseline}.

Memory: {memory}, on the rank with the most.

Sent: the bytes that ring algorithms send for the collectives of a step. For torch and DeepSpeed,
the collectives that torch's dispatcher sees; for fastpar, what its engine reports; for tp, all
calls of its transports.

Exposed: time of a step in which a rank only waits for others. For fastpar, as its engine measures
it (tp: in calls and waits of its transports); for DDP, the difference to a step without
communication in the same processes; for FSDP2 and DeepSpeed, {not_known}.

Within rounding: strategies add the same gradients in different orders. The drift of losses that
this causes is measured by training the single device again with other micro-batches, and with the
gradient's norm summed in fp64 instead of fp32. Up to {factor:g} times that drift, or {floor:g}
roundings of the loss, count as rounding."""


def _number_of(
    value: Callable[[Comparison, Run], float | None], comparison: Comparison, name: str
) -> str:
    """A cell: the median over the repeats, with their range."""
    stat = comparison.stat(name, partial(value, comparison))
    if stat is None:
        return NOT_KNOWN
    text, low, high = (number(x) for x in stat[:3])
    return f"{text} ({low}-{high})" if stat.n > 1 and low != high else text


def _ratio_of(value: Callable[[Comparison, Run], float], comparison: Comparison, name: str) -> str:
    """A cell: the median relative to the baseline's."""
    names = name, comparison.baseline or name
    stat, base = (comparison.stat(n, partial(value, comparison)) for n in names)
    if stat is None or base is None or not base.median:
        return NOT_KNOWN
    return f"{stat.median / base.median:.2f}"


def _sent_mb(comparison: Comparison, name: str) -> str:
    stat = comparison.stat(name, Run.sent_mb)
    return NOT_KNOWN if stat is None else number(stat.median)


# Title -> the cell of a measured strategy.
COLUMNS: dict[str, Callable[[Comparison, str], str]] = {
    "strategy": lambda comparison, name: name,
    "ranks": lambda comparison, name: f"{comparison.of(name)[0].ranks}",
    "tokens/s": partial(_number_of, Comparison.tokens_per_s),
    "speed, {baseline} = 1": partial(_ratio_of, Comparison.tokens_per_s),
    "epoch, s": partial(_number_of, Comparison.mean_epoch_s),
    "peak memory per rank, MB": partial(_number_of, Comparison.memory_mb),
    "memory, {baseline} = 1": partial(_ratio_of, Comparison.memory_mb),
    "sent per step, MB": _sent_mb,
    "exposed, ms per step": partial(_number_of, lambda comparison, run: run.exposed_ms),
    "last loss": lambda comparison, name: f"{comparison.of(name)[0].losses[-1]:.5f}",
}


def head(comparison: Comparison) -> list[str]:
    """Titles of the columns."""
    return [title.format(baseline=comparison.baseline) for title in COLUMNS]


def rows(comparison: Comparison) -> list[list[str]]:
    """A row per strategy, the fastest first; skipped and failed ones come last, with the reason."""
    measured = [name for name, _ in comparison.ranking(comparison.tokens_per_s, most=True)]
    table = [[cell(comparison, name) for cell in COLUMNS.values()] for name in measured]
    for name in dict.fromkeys([*comparison.settings["strategies"], *comparison.skipped]):
        if name in comparison.skipped:
            table.append([name, f"skipped: {comparison.skipped[name]}"])
        elif name in comparison.failed and name not in measured:
            table.append([name, f"failed: {comparison.failed[name]}"])
        elif name not in measured:
            table.append([name, "stopped before its first run"])
    return table


def markdown(comparison: Comparison) -> str:
    """The table, the summary, the setting, and how each column was measured."""
    s, m = comparison.settings, comparison.machine
    names = ("python", "torch", "fastpar", "deepspeed", "commit")
    optimizer = f"AdamW, learning rate {s['lr']:g}"
    if s.get("optimizer", "adamw") != "adamw":  # earlier results name none
        muon = f"fastpar.Muon (on every rank of ddp), learning rate {s['muon_lr']:g}"
        optimizer = f"{muon}, AdamW's {s['lr']:g},"
    words = {
        **{**s, **m, "optimizer": optimizer},
        **{"runs": counted(s["repeats"], "run"), "ranks": counted(s["nproc"], "rank")},
        "threads": counted(s["threads"], "thread"),
        "versions": ", ".join(f"{name} {m[name]}" for name in names if m.get(name)),
        **{"baseline": comparison.baseline, "memory": MEMORY},
        **{"not_known": NOT_KNOWN, "factor": FACTOR, "floor": FLOOR},
    }
    lines = markdown_table([head(comparison), *rows(comparison)])
    lines += ["", *(f"- {line}" for line in summary(comparison))]
    for text in (_CONDITIONS, _NOTES):
        lines += ["", *(" ".join(p.split()) for p in text.format(**words).split("\n\n"))]
    return "\n".join(lines) + "\n"


# In words


def summary(comparison: Comparison) -> list[str]:
    """Sentences: which is fastest, which has least memory, whether the losses are the same."""
    if not comparison.names:
        return ["No run succeeded: nothing was measured.", *_left_out(comparison)]
    return [
        _best(comparison, comparison.tokens_per_s, "Fastest", "tokens/s", most=True),
        _best(comparison, comparison.memory_mb, "Smallest", "MB", most=False),
        f"Memory is the {MEMORY}.",
        *_losses(comparison),
        *_repeats(comparison),
        *_left_out(comparison),
    ]


def with_range(stat: Stat, unit: str) -> str:
    """A number and the range of its repeats."""
    text = f"{number(stat.median)} {unit}"
    if stat.n == 1:
        return f"{text} (one run)"
    return f"{text} ({number(stat.low)} to {number(stat.high)} in {stat.n} repeats)"


def _best(
    comparison: Comparison, value: Callable[[Run], float], word: str, unit: str, *, most: bool
) -> str:
    """The best strategy, its lead, and those that do not differ; see [Note: no difference]."""
    ranking = comparison.ranking(value, most=most)
    first, best = ranking[0]
    if len(ranking) == 1:
        return f"Only {first} was measured: {with_range(best, unit)}."
    second, other = ranking[1]
    distance = 100 * abs(other.median / best.median - 1) if best.median else 0.0
    lead = (
        f"{first}, {with_range(best, unit)}; next is {second} with {number(other.median)}, "
        f"{distance:.1f} % {'less' if most else 'more'}"
    )
    if best.n < 2:
        return f"{word} in one run each, which proves no order: {lead}."
    alike = [name for name, stat in ranking[1:] if stat.touches(best)]
    if alike:
        return (
            f"{word}: the repeats of {listed([first, *alike])} overlap, so no difference is "
            f"proved. By the median: {lead}."
        )
    return f"{word}: {lead}; no repeat of another strategy is as good as any of its repeats."


def _losses(comparison: Comparison) -> list[str]:
    verdict = judge_losses(comparison)
    if verdict is None:
        return []
    difference = (
        f"The largest difference of loss between two strategies is {verdict.difference:.2g}, in "
        f"step {verdict.step} ({verdict.high} above {verdict.low})."
    )
    if verdict.yardstick is None:
        return [
            difference,
            f"Whether that is rounding is not known: {SINGLE} ran in one order of sums only.",
        ]
    judged = "In every step this is within rounding"
    if verdict.beyond is not None:
        judged = "THIS IS MORE THAN ROUNDING, from step {} on, where {} is furthest from the others"
    return [
        difference,
        f"{judged.format(*verdict.beyond or ())}: {SINGLE} with its sums in {verdict.orders} "
        f"orders drifts by {verdict.yardstick:.2g} (allowed: {FACTOR:g} times the drift up to a "
        f"step, or {FLOOR:g} roundings of the loss).",
    ]


def _repeats(comparison: Comparison) -> list[str]:
    """Whether repeats gave the same losses, bit for bit as far as they are stored."""
    spread = {}
    for name in comparison.names:
        losses = np.array([run.losses for run in comparison.of(name)])
        if len(losses) > 1:
            spread[name] = float(np.ptp(losses, axis=0).max())
    other = [name for name, difference in spread.items() if difference > 0]
    if not spread:
        return []
    if not other:
        return ["Repeats of a strategy gave the same losses to the last bit."]
    some = len(other) < len(spread)
    return [
        f"Repeats{f' of {listed(other)}' * some} differed in their losses, by "
        f"{max(spread.values()):.2g} at most{'; those of the others did not' * some}."
    ]


def _left_out(comparison: Comparison) -> list[str]:
    lines = [f"Skipped: {name} ({why})." for name, why in comparison.skipped.items()]
    lines += [f"Failed: {name} ({why})." for name, why in comparison.failed.items()]
    if not comparison.complete:
        lines.append("The comparison was stopped before all runs were done.")
    return lines
