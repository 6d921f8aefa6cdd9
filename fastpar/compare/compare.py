"""`fastpar compare`: the same GPT-2 on the same text by a list of strategies, measured in turn.

Every run is a start of fresh processes (compare_worker.py). Repeats take turns, each in another
order, so that a machine that warms up or gets busy hits all alike. The results are written after
every run: what was measured stays, whatever ends the command.
"""

from __future__ import annotations

from pathlib import Path

from fastpar.compare.pictures import draw_all
from fastpar.compare.report import PAGE, TABLE, markdown, page
from fastpar.compare.results import RESULTS, Comparison, Run
from fastpar.compare.runs import RunFailed, measure
from fastpar.compare.setups import CompareCommand, Plan, check
from fastpar.compare.words import summary
from fastpar.train.metrics import Progress
from fastpar.train.run_folder import make_next_free
from fastpar.train.run_lock import RUNS


def compare(command: CompareCommand) -> int:
    """Measures, and writes the folder; the exit status: 1 where a strategy failed.

    Raises:
        ValueError: settings that do not fit together, the machine or the folder.
    """
    check(command)
    plan = Plan.of(command)
    folder = _make_folder(command.out)
    comparison, runs = plan.comparison, plan.runs()
    for line in plan.lines(runs):
        print(line, flush=True)
    print(f"results  {folder}", flush=True)
    progress = Progress(plan.steps * len(runs))
    stopped = False
    try:
        for n, run in enumerate(runs):
            _one(plan, run, n, len(runs), progress)
            comparison.complete = n + 1 == len(runs)
            comparison.save(folder / RESULTS)
    except KeyboardInterrupt:
        stopped = True
    finally:
        progress.close()
    if any(comparison.of(name) for name in comparison.names):
        write_report(comparison, folder)
    print("", *summary(comparison), "", folder / TABLE, folder / PAGE, sep="\n", flush=True)
    return 130 if stopped else int(bool(comparison.failed))


def _one(plan: Plan, run: Run, n: int, total: int, progress: Progress) -> None:
    """One run, whose failure ends no other."""
    name = run.strategy + (f", micro-batches of {run.micro_batch_size}" if run.yardstick else "")
    where = f"run {n + 1}/{total} {name}"

    def say(step: int, loss: float, seconds: float) -> None:
        speed = plan.comparison.tokens_per_step / seconds
        progress.update(n * plan.steps + step, f"{where}  loss {loss:.3f}  {speed:,.0f} tokens/s")

    plan.comparison.runs.append(run)
    try:
        measure(plan.spec(run), run.ranks, run, say)
    except RunFailed as error:
        run.error = str(error)
        progress.say(f"{where}: failed: {error}")
        return
    except KeyboardInterrupt:
        plan.comparison.runs.pop()
        raise
    speed = plan.comparison.tokens_per_s(run)
    progress.say(
        f"{where}: {speed:,.0f} tokens/s, last loss {run.losses[-1]:.4f}, {run.seconds:.0f} s"
    )


def write_report(comparison: Comparison, folder: Path) -> None:
    """Table, pictures and page from the results; without matplotlib no pictures, which is said."""
    pictures: list[tuple[Path, str]] = []
    try:
        pictures = draw_all(comparison, folder)
    except ImportError as error:
        print(f"no pictures: {error}", flush=True)
    (folder / TABLE).write_text(markdown(comparison))
    (folder / PAGE).write_text(page(comparison, pictures))


def _make_folder(out: str | None) -> Path:
    if out is None:
        return make_next_free(Path(RUNS) / "compare")
    Path(out).mkdir(parents=True, exist_ok=True)
    return Path(out)
