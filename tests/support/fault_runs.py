"""Runs real processes, for tests of faults."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from fastpar.cli import parse_train
from fastpar.comm.mesh import Mesh
from fastpar.testing import run_ranks
from fastpar.train.journal import read_metrics
from fastpar.train.trainer import Trainer

SETTINGS = {
    "data": "text.txt", "tokenizer": "bytes", "model": "micro", "n-layer": 1, "n-embd": 16,
    "n-head": 2, "block-size": 16, "dropout": 0.2, "batch-size": 4, "eval-every": 0,
    "save-every": 0, "num-samples": 1, "max-new-tokens": 3, "device": "cpu",
}  # fmt: skip
TRAIN = ["train", *(f"--{name}={value}" for name, value in SETTINGS.items())]
FASTPAR = [sys.executable, "-m", "fastpar"]
CURVE = ("step", "loss", "lr", "grad_norm", "val_loss")
CURVES = {"loss", "val_loss"}  # rows without are of saves


def run_in_threads(out, ranks, *options):
    """Runs these ranks as threads without a fault; the bits are those of processes."""
    config = parse_train([*TRAIN[1:], *options, f"--out={out}", "--threads=1"])
    replicas = config.mesh.replicas
    work = lambda: Trainer(config, Mesh(replicas=replicas, device="cpu")).run()  # noqa: E731
    assert run_ranks(work, ranks, timeout_s=200) == [0] * ranks


def torchrun(nproc, *options):
    module = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*module, f"--nproc-per-node={nproc}", *options, "-m", "fastpar"]


def enter(folder, monkeypatch):
    """Be in a folder with a text, alone with what is cached."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    rng = random.Random(0)
    Path("text.txt").write_text(" ".join(rng.choices(("god", "lord", "unto", "sea"), k=2000)))


class Commands:
    """Starts commands; kills those that still run at the end."""

    def __init__(self):
        self.started = []

    def __call__(self, *command, env=None):
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
            preexec_fn=os.setpgrp,  # a job of its own, as a shell makes it: it can be stopped
        )
        self.started.append(process)
        return process

    def close(self):
        for process in self.started:
            for pid in ranks_of(process.pid).values():
                os.kill(pid, signal.SIGKILL)
            process.kill()
            process.communicate()


def ranks_of(launcher: int) -> dict[int, int]:
    """Rank -> pid of the processes that a launcher has started and that live."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            environment = (stat.parent / "environ").read_bytes().split(b"\0")
        except OSError:  # gone meanwhile
            continue
        rank = next((e[5:] for e in environment if e.startswith(b"RANK=")), None)
        if int(parent) == launcher and rank is not None and state != "Z":
            found[int(rank)] = int(stat.parent.name)
    return found


def state_of(pid: int) -> str:
    """Linux's letter for the state of a process: T stopped, Z dead; "Z" also if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def is_alive(pid: int) -> bool:
    return state_of(pid) != "Z"


def wait_for(seconds, happened, *args, process=None):
    """Until happened(*args); the process must live meanwhile."""
    deadline = time.monotonic() + seconds
    while not happened(*args):
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_for_steps(process, out, n):
    file = Path(out) / "metrics.jsonl"
    wait_for(100, lambda: len(read_metrics(file)) >= n, process=process)


def all_gone(pids):
    return not any(map(is_alive, pids))


def kill(launcher, rank, how=signal.SIGKILL):
    """Kills these ranks' processes; returns the ranks that lived until then."""
    ranks = ranks_of(launcher.pid)
    os.kill(ranks[rank], how)
    return set(ranks.values())


def finish(process, timeout_s=100):
    out, err = process.communicate(timeout=timeout_s)
    return process.returncode, out, err


def curve(out):
    """The metrics that must be equal in two runs."""
    rows = read_metrics(f"{out}/metrics.jsonl")
    return [{k: row[k] for k in CURVE if k in row} for row in rows if CURVES & row.keys()]
