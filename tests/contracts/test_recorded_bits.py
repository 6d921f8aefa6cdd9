"""The bits of short training runs are those of an earlier commit: a move changes none.

The other tests say that layouts agree with each other and with plain torch. This one builds COMMIT
in build/recorded and lets it run the same cells here (five core minutes, once): torch's products
have other bits on other processors, so that no record can be kept. What changes bits on purpose
says so in the CHANGELOG and moves COMMIT.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from same_run import of_row, run

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "41b3b0ec2e5dbb64465cda8c1810b2b97aa9987b"
LAYOUTS: list[dict[str, Any]] = [
    {}, {"dp": 2}, {"dp": 2, "stage": 2}, {"dp": 4, "stage": 1}, {"dp": 2, "stage": 3},
    {"dp": 4, "stage": 3, "shard_size": 2},
]  # fmt: skip
CELLS: list[dict[str, Any]] = [
    *({**layout, "precision": p} for layout in LAYOUTS for p in ("fp32", "bf16", "fp16")),
    *(
        {**layout, "dropout": True, "clip": True, **more}
        for layout, more in itertools.product(
            LAYOUTS[::2],
            (
                *({"accum": kind} for kind in ("shard_2", "full_2", "no_sync_2")),
                *({"recompute": mode} for mode in ("full", "selective")),
                *({"deterministic": True}, {"model": "foreign tied", "precision": "bf16"}),
            ),
        )
    ),
    *({"tp": 2, "sequence": True, "dp": 2, "stage": stage} for stage in range(4)),
    {"dp": 2, "stage": 2, "optimizer": "muon"},
    {"dp": 2, "stage": 3, "offload": "parameters"},
    {"cp": 2, "documents": True, "method": "keys"},
    {"pp": 2, "accum": "full_2", "schedule": "interleaved"},
    {"ep": 2, "dp": 2, "stage": 1, "model": "capacity", "precision": "fp64"},
    {"grid": "2x2", "stage": 1},
]


def name_of(cell: dict[str, Any]) -> str:
    return " ".join(f"{k}={v}" for k, v in cell.items()) or "one process"


def digest(value: Any) -> str:
    """Of tensors and numbers in dicts and lists."""
    if isinstance(value, dict):
        value = [x for key in sorted(value, key=str) for x in (str(key), value[key])]
    if isinstance(value, (list, tuple)):
        return hashlib.sha256(" ".join(map(digest, value)).encode()).hexdigest()[:16]
    if isinstance(value, torch.Tensor):
        value = value.detach().contiguous().view(-1)
        value = (value.dtype, value.view(torch.uint8).numpy().tobytes())
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def bits_of(cell: dict[str, Any]) -> str:
    """Of weights, gradients, losses, norms and the optimizer's state of every rank."""
    return digest(run(*of_row(cell)))


def record() -> dict[str, Any]:
    return {"commit": COMMIT, "cells": {name_of(cell): bits_of(cell) for cell in CELLS}}


def do(*words: Any, **options: Any) -> str:
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def recorded() -> dict[str, str]:
    """What COMMIT's package has, with the programs of this checkout."""
    if do("git", "-C", ROOT, "rev-parse", "--is-shallow-repository") != "false":
        pytest.skip(f"git has no history here, and so no commit {COMMIT[:12]}")
    folder = ROOT / "build" / "recorded"
    programs = (Path(__file__), ROOT / "tests/support/same_run.py")
    text = "".join(path.read_text() for path in programs)
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:  # of several test processes one builds
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=folder) as tree:
                do("git", "-C", ROOT, "archive", "-o", f"{tree}/tree.tar", COMMIT)
                do("tar", "-xf", "tree.tar", cwd=tree)
                do(sys.executable, "setup.py", "-q", "build", "--build-lib", "lib", cwd=tree)
                support = ROOT / "tests/support"
                there = {**os.environ, "PYTHONPATH": f"{tree}/lib:{support}"}
                do(sys.executable, __file__, f"{tree}/record.json", cwd=tree, env=there)
                Path(tree, "record.json").rename(path)
    found: dict[str, Any] = json.loads(path.read_text())
    return found["cells"]


@pytest.mark.slow
@pytest.mark.timeout(1800)  # with a build
@pytest.mark.parametrize("cell", CELLS, ids=name_of)
def test_the_bits_are_those_of_the_record(recorded, cell):
    assert bits_of(cell) == recorded[name_of(cell)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    Path(sys.argv[1]).write_text(json.dumps(record(), indent=1) + "\n")
