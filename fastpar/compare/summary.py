"""A comparison in words: every sentence is computed from the numbers that it states."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fastpar.compare.results import FACTOR, FLOOR, Comparison, Run, Stat, judge_losses
from fastpar.compare.strategies import SINGLE, STRATEGIES


def summary(comparison: Comparison) -> list[str]:
    """Sentences: which is fastest, which has least memory, whether the losses are the same."""
    if not comparison.names:
        return ["No run ended well: nothing was measured.", *_left_out(comparison)]
    return [
        _best(comparison, comparison.tokens_per_s, "Fastest", "tokens/s", most=True),
        *_over_single(comparison),
        _best(comparison, lambda r: comparison.memory(r) / 1e6, "Smallest", "MB", most=False),
        f"Memory is {comparison.memory_label}.",
        *_losses(comparison),
        *_experts(comparison),
        *_repeats(comparison),
        *_left_out(comparison),
    ]


def number(value: float) -> str:
    """Three digits and more: 21,300; 481.2; 48.1; 0.0123."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.3g}"


def with_range(stat: Stat, unit: str) -> str:
    """A number with what its repeats say."""
    text = f"{number(stat.median)} {unit}"
    if stat.n == 1:
        return f"{text} (one run)"
    return f"{text} ({number(stat.low)} to {number(stat.high)} in {stat.n} repeats)"


def listed(names: Sequence[str]) -> str:
    """a; a and b; a, b and c."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _best(
    comparison: Comparison, value: Callable[[Run], float], word: str, unit: str, *, most: bool
) -> str:
    """Who is first, by how much, and who cannot be told from it; see [Note: no difference]."""
    ranking = comparison.ranking(value, most=most)
    first, best = ranking[0]
    if len(ranking) == 1:
        return f"Only {first} was measured: {with_range(best, unit)}."
    second, other = ranking[1]
    percent = 100 * abs(other.median / best.median - 1) if best.median else 0.0
    beside = (
        f"{first}, {with_range(best, unit)}; next is {second} with {number(other.median)}, "
        f"{percent:.1f} % {'less' if most else 'more'}"
    )
    if best.n < 2:
        return f"{word} in one run each, which proves no order: {beside}."
    alike = [name for name, stat in ranking[1:] if stat.touches(best)]
    if alike:
        return (
            f"{word}: no difference beyond the spread of repeats between "
            f"{listed([first, *alike])}. By the median {beside}."
        )
    return f"{word}: {beside}, and no repeat of another strategy comes up to any of its own."


def _over_single(comparison: Comparison) -> list[str]:
    """The gain over one rank, of the fastest that uses more."""
    alone = comparison.stat(SINGLE, comparison.tokens_per_s)
    for name, stat in comparison.ranking(comparison.tokens_per_s, most=True):
        ranks, threads = comparison.of(name)[0].ranks, comparison.settings["threads"]
        if ranks > 1 and alone is not None:
            device = f"{threads} thread{'s' * (threads > 1)}, as many as each rank of the others"
            if comparison.settings["device"] == "cuda":
                device = "one GPU"
            return [
                f"With {ranks} ranks {name} trains {stat.median / alone.median:.2f} times as fast "
                f"as {SINGLE}, which is one rank ({device})."
            ]
    return []


def _losses(comparison: Comparison) -> list[str]:
    verdict = judge_losses(comparison)
    if verdict is None:
        return []
    found = (
        f"The largest difference of loss between two strategies is {verdict.difference:.2g}, in "
        f"step {verdict.step} ({verdict.high} above {verdict.low})."
    )
    if verdict.yardstick is None:
        return [
            found,
            f"Whether that is rounding is not known: {SINGLE} was not run in two orders.",
        ]
    measured = (
        f"{SINGLE} with its sums in {verdict.orders} orders drifts apart by {verdict.yardstick:.2g}"
        f" (allowed are {FACTOR:g} times its drift up to a step, or {FLOOR:g} roundings of the "
        "loss)."
    )
    if verdict.beyond is None:
        return [found, f"In every step that is within rounding: {measured}"]
    step, outlier = verdict.beyond
    return [
        found,
        f"THAT IS MORE THAN ROUNDING, from step {step} on, where {outlier} is furthest from the "
        f"others: {measured}",
    ]


def _experts(comparison: Comparison) -> list[str]:
    """Models with experts beside a dense one: loss at equal tokens, and at equal time."""
    sparse = [name for name in comparison.names if STRATEGIES[name].sparse]
    dense = [name for name in comparison.names if name not in sparse]
    if not sparse or not dense:
        return []
    beside = "dp" if "dp" in dense else dense[0]
    base, lines = comparison.of(beside)[0], []
    steps, of_base = len(base.losses), comparison.tokens_per_s(base)
    few = max(1, steps // 10)
    for name in sparse:
        run = comparison.of(name)[0]
        speed = comparison.tokens_per_s(run) / of_base
        # The step at which the slower one is when the faster one is done.
        ends = min(steps, int(steps * speed)), min(steps, int(steps / speed))
        (at, whole), (base_at, base_whole) = (
            [float(np.mean(r.losses[max(0, end - few) : end] or [np.nan])) for end in (at, steps)]
            for r, at in zip((run, base), ends)
        )
        lines += [
            f"{name} has experts in the place of MLPs and takes as many flops a token as {beside}, "
            f"but for its routers; it trains {speed:.2f} times as fast.",
            f"At equal tokens the loss of {name} is {_apart(whole, base_whole)} (means of the last "
            f"{few} of {steps} steps).",
            f"At equal time, after {ends[0]} steps of {name} and {ends[1]} of {beside}, it is "
            f"{_apart(at, base_at)}; the slower one's learning rate is not at its end there.",
        ]
    return [*lines, "All runs have one seed: what another one would change was not measured."]


def _apart(loss: float, other: float) -> str:
    word = "lower" if loss < other else "higher"
    return f"{loss:.4f} beside {other:.4f}, {abs(loss - other):.4f} {word}"


def _repeats(comparison: Comparison) -> list[str]:
    """Whether repeats gave the same losses, bit for bit as far as they are kept."""
    apart = {}
    for name in comparison.names:
        losses = np.array([run.losses for run in comparison.of(name)])
        if len(losses) > 1:
            apart[name] = float(np.ptp(losses, axis=0).max())
    other = [name for name, difference in apart.items() if difference > 0]
    if not apart:
        return []
    if not other:
        return ["Repeats of one strategy gave the same losses to the last bit."]
    some = len(other) < len(apart)
    return [
        f"Repeats{f' of {listed(other)}' * some} differed in their losses, by "
        f"{max(apart.values()):.2g} at most{'; those of the others did not' * some}."
    ]


def _left_out(comparison: Comparison) -> list[str]:
    lines = [f"Skipped: {name} ({why})." for name, why in comparison.skipped.items()]
    lines += [f"Failed: {name} ({why})." for name, why in comparison.failed.items()]
    if not comparison.complete:
        lines.append("The comparison was stopped before all of its runs.")
    return lines
