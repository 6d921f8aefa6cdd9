"""Constructed runs of a comparison, for the tests of what is made of them."""

import json

from fastpar.observe.results import Comparison, Run

LOSSES = [8.0, 7.0, 6.5, 6.0, 5.5, 5.2, 5.0, 4.9, 4.8, 4.7]
SETTINGS = {
    "nproc": 2, "model": "micro",
    "shape": {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64}, "parameters": 1_325_824,
    "data": "bible", "tokenizer": "bpe-4096", "batch_size": 8, "block_size": 64, "epochs": 2,
    "epoch_steps": 5, "untimed_steps": 2, "optimizer": "adamw", "lr": 2.5e-3, "muon_lr": 0.02,
    "seed": 1, "device": "cpu", "threads": 1,
}  # fmt: skip
MACHINE = {
    "device": "CPU: test, 2 cores", "python": "3.11", "torch": "2.13", "fastpar": "0.1",
    "deepspeed": None, "commit": "abc", "date": "2026-11-22",
}  # fmt: skip


def make_run(name, repeat=1, *, step_s=0.1, memory=50e6, nudge=0.0, **more):
    """A run whose steps take step_s, the untimed ones ten times as long; losses moved by nudge."""
    values = {
        "ranks": 1 if name == "single" else 2,
        "threads": 1,
        "micro_batch_size": 4,
        "grad_accum_steps": 2 if name == "single" else 1,
        "step_s": [10 * step_s] * 2 + [step_s] * 8,
        "losses": [loss + nudge for loss in LOSSES],
        "grad_norms": [2.0] * 10,
        "rss_bytes": [int(memory), int(memory) - 1000],
        "wire_bytes": 0 if name == "single" else 5_000_000,
        "exposed_ms": None if name.startswith("fsdp") else 3.0,
        "seconds": 9.0,
    }
    return Run(name, repeat, **{**values, **more})


def repeats(name, *step_s, **more):
    return [make_run(name, n + 1, step_s=s, **more) for n, s in enumerate(step_s)]


def orders(*nudges):
    """Runs of `single` with their sums in other orders."""
    return [
        make_run("single", nudge=nudge, yardstick=True, micro_batch_size=1 + at)
        for at, nudge in enumerate(nudges)
    ]


def make_comparison(*runs, skipped=None, complete=True, **settings):
    """With what Schedule.of() decides."""
    known = {
        **SETTINGS,
        "strategies": list(dict.fromkeys(run.strategy for run in runs if not run.yardstick)),
        "repeats": max(run.repeat for run in runs),
    }
    return Comparison({**known, **settings}, MACHINE, skipped or {}, list(runs), complete)


def read(path):
    """What save() has written."""
    content = json.loads(path.read_text())
    assert content.pop("format") == 1
    runs = [Run(**run) for run in content.pop("runs")]
    return Comparison(runs=runs, **content)
