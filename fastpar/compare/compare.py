"""`fastpar compare`: the same GPT-2 on the same text by a list of strategies, measured in turn.

Every run is a start of fresh processes (worker.py). Repeats take turns, each in another order, so
that a machine that warms up or gets busy hits all alike. The results are written after every run:
what was measured stays, whatever ends the command.
"""

from __future__ import annotations

from pathlib import Path

from fastpar.comm.ranks import RankFailed
from fastpar.compare.pictures import draw_all
from fastpar.compare.report import TABLE, markdown, summary
from fastpar.compare.results import RESULTS, Comparison, Run
from fastpar.compare.schedule import CompareCommand, Schedule, check
from fastpar.compare.worker import measure
from fastpar.files.progress import Progress
from fastpar.files.runs import RUNS, make_next_free


def compare(command: CompareCommand) -> int:
    """Measures, and writes the folder; the exit status: 1 where a strategy failed.

    Raises:
        ValueError: settings that do not fit together, the machine or the folder.
    """
    check(command)
    schedule = Schedule.of(command)
    folder = make_next_free(Path(RUNS) / "compare") if command.out is None else Path(command.out)
    folder.mkdir(parents=True, exist_ok=True)
    comparison, runs = schedule.comparison, schedule.runs()
    print(*schedule.lines(runs), f"results  {folder}", sep="\n", flush=True)
    progress = Progress(schedule.steps * len(runs))
    stopped = False
    try:
        for n, run in enumerate(runs):
            _measure_one(schedule, run, f"run {n + 1}/{len(runs)}", n * schedule.steps, progress)
            comparison.complete = n + 1 == len(runs)
            comparison.save(folder / RESULTS)
    except KeyboardInterrupt:
        stopped = True
    finally:
        progress.close()
    if comparison.names:
        write_report(comparison, folder)
    print("", *summary(comparison), "", folder / TABLE, sep="\n", flush=True)
    return 130 if stopped else int(bool(comparison.failed))


def _measure_one(
    schedule: Schedule, run: Run, where: str, first_step: int, progress: Progress
) -> None:
    """One run, whose failure ends no other."""
    comparison = schedule.comparison
    where += f" {run.strategy}"
    where += f", micro-batches of {run.micro_batch_size}" if run.yardstick else ""

    def on_step(step: int, loss: float, seconds: float) -> None:
        speed = comparison.tokens_per_step / seconds
        progress.update(first_step + step, f"{where}  loss {loss:.3f}  {speed:,.0f} tokens/s")

    try:
        measure(schedule.spec(run), on_step)
    except RankFailed as error:
        run.error = f"rank {error.rank}: {error.reason}" if run.ranks > 1 else error.reason
    comparison.runs.append(run)
    if run.error is not None:
        progress.say(f"{where}: failed: {run.error}")
    else:
        progress.say(
            f"{where}: {comparison.tokens_per_s(run):,.0f} tokens/s, last loss "
            f"{run.losses[-1]:.4f}, {run.seconds:.0f} s"
        )


def write_report(comparison: Comparison, folder: Path) -> None:
    """Table and pictures from the results; without matplotlib a line and no pictures."""
    try:
        draw_all(comparison, folder)
    except ImportError as error:
        print(f"no pictures: {error}", flush=True)
    (folder / TABLE).write_text(markdown(comparison))
