"""`fastpar profile`: a few steps of `fastpar train`, measured, then profiled, then judged."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from fastpar.comm.mesh import gather_objects, ranks_along
from fastpar.comm.recorder import COMPUTE, HOST, PP, WAIT, Span, busy_ms, window
from fastpar.files.runs import RUNS
from fastpar.observe.pictures import draw_timeline
from fastpar.observe.step_profile import WARM_UP, Trained, measure, title_of
from fastpar.observe.verdict import Measured, percent
from fastpar.settings.config import TrainConfig
from fastpar.settings.files import check_at_least

_SHOWN_RANKS = 4


@dataclass(frozen=True)
class ProfileOptions:
    """What `fastpar profile` has beside the settings of `fastpar train`."""

    steps: int = 5
    out: str | None = None

    def __post_init__(self) -> None:
        check_at_least("profile", vars(self), {"steps": 1})


def parse_profile(arguments: Sequence[str]) -> tuple[ProfileOptions, list[str]]:
    """The options, and the flags that are left, which are those of `fastpar train`."""
    parser = argparse.ArgumentParser(
        "fastpar profile",
        add_help=False,
        allow_abbrev=False,
        description="Where the time of a training step goes, and what to change. Takes all "
        "settings of `fastpar train` (see its --help), and:",
    )
    parser.add_argument("--steps", type=int, default=5, help="measured steps (default: 5)")
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="new folder for trace.json, timeline.png and profile.json; unset: the first free one "
        f"of {RUNS}/profile, {RUNS}/profile-2, ...",
    )
    known, left = parser.parse_known_args(arguments)
    if "-h" in left or "--help" in left:
        print(parser.format_help())
    return ProfileOptions(known.steps, known.out), left


def prepare(options: ProfileOptions, config: TrainConfig) -> tuple[ProfileOptions, TrainConfig]:
    """The folder chosen, by rank 0, and the settings of the run that profile() takes.

    Raises:
        ValueError: --resume; a folder that is not new; what `fastpar train` refuses.
        ImportError: matplotlib is missing.
    """
    if config.run.resume or config.run.auto_resume:
        raise ValueError(
            "profile: expected a new run, got resume=True; leave --resume out: nothing is saved, "
            "and --init-from takes the weights of a run"
        )
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(
            "fastpar profile: expected matplotlib, got no such package; pip install matplotlib"
        )
    if int(os.environ.get("RANK", "0")) == 0:
        out = Path(options.out) if options.out is not None else _free_folder(Path(RUNS))
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ValueError(
                f"profile: expected a new or empty folder, got out={out}; choose another --out"
            )
        options = replace(options, out=str(out))
    n_steps = WARM_UP + 2 * options.steps + 1
    config = config.replace({"max_steps": max(config.run.max_steps, n_steps), "out": None})
    config = config.replace({"cuda_graphs": False})  # a replay has no phases that a host sees
    return options, config


def _free_folder(runs: Path) -> Path:
    numbered = (runs / f"profile-{n}" for n in itertools.count(2))
    return next(p for p in itertools.chain([runs / "profile"], numbered) if not p.exists())


def profile(trainer: Trained, options: ProfileOptions) -> int:
    """All of it on one rank; rank 0 writes and prints. Returns the exit status. Ranks: all."""
    mesh, out = trainer.mesh, Path(options.out or RUNS)
    if mesh.is_main:
        out.mkdir(parents=True, exist_ok=True)
        print(f"profile  {title_of(trainer)}", flush=True)
    report, steps = measure(trainer, options.steps, out if mesh.is_main else None)
    everyone = [steps]
    if mesh.world_size > 1:
        assert dist.group.WORLD is not None
        everyone = gather_objects(steps, dist.group.WORLD)
    if mesh.is_main:
        print("\n".join(["", *report.lines()]))
        on_gpu = mesh.device.type == "cuda"
        step = _median_step(steps)
        lines, found = [title_of(trainer), _caption(report.measured, len(everyone))], {}
        panels = {name: everyone[r][step] for name, r in _lanes(trainer, len(everyone)).items()}
        piped = trainer.engine.shards.stages is not None
        if piped:
            waits = [waited_for_stages(spans) for spans in panels.values()]
            found = {"bubble": sum(waits) / len(waits), "bubble_of_ranks": waits}
            lines.append(_bubble_line(waits))
            print(f"\n{lines[-1]}")
        shown = dict(list(panels.items())[: 1 if on_gpu and not piped else _SHOWN_RANKS])
        draw_timeline(shown, lines, out / "timeline.png")
        (out / "profile.json").write_text(json.dumps(report.as_json() | found, indent=1) + "\n")
        print(f"\n{out}: {', '.join(sorted(p.name for p in out.iterdir()))}", flush=True)
    mesh.close()
    return 0


def _lanes(trainer: Trained, n_ranks: int) -> dict[str, int]:
    """What is drawn: title -> rank. Of pipelines the first one, by stages."""
    stages = trainer.engine.shards.stages
    if stages is None:
        return {f"rank {rank}": rank for rank in range(n_ranks)}
    found, schedule = {}, stages.schedule
    for place, rank in enumerate(ranks_along(trainer.mesh.sizes, ["pp"])[0]):
        own = [str(schedule.stage_of(place, chunk)) for chunk in range(schedule.chunks)]
        found[f"rank {rank}, stage{'s' * (len(own) > 1)} {', '.join(own)}"] = rank
    return found


def waited_for_stages(spans: Sequence[Span]) -> float:
    """The part of a step in which a stage of a pipeline waited for a message of another."""
    end = max((s.end_ms for s in spans if s.row in (HOST, COMPUTE)), default=0.0)
    waits = [s for s in spans if s.row == WAIT]
    ms = busy_ms([s for s in waits if s.name == PP], [WAIT])
    of_gpu = (s for s in waits if s.name == "nccl")  # of any collective: which one, its bar says
    ms += sum(busy_ms(window(spans, s.begin_ms, s.end_ms), [PP]) for s in of_gpu)
    return ms / end if end else 0.0


def _bubble_line(waits: Sequence[float]) -> str:
    each = ", ".join(percent(wait) for wait in waits)
    mean = percent(sum(waits) / len(waits))
    return f"Bubble: stages wait for messages of others {mean} of the step (by rank: {each})."


def _median_step(steps: Sequence[Sequence[Span]]) -> int:
    """The one that takes the median time."""
    ends = [max((s.end_ms for s in step), default=0.0) for step in steps]
    return sorted(range(len(steps)), key=lambda i: ends[i])[len(steps) // 2]


def _caption(measured: Measured, ranks: int) -> str:
    kind = "a profiled step" if measured.setup.device_type == "cuda" else "a step, not profiled"
    return f"{kind}; {ranks} rank{'s' * (ranks > 1)}; {measured.bound}-bound, see profile.json"
