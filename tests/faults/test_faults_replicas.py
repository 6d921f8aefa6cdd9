"""Replicas that are killed: the others go on, those that come back are copies, the loss is that of
runs to which nothing happened."""

import os
import random
import re
import signal
import time
from pathlib import Path

import pytest
from fault_runs import FASTPAR, TRAIN, finish, ranks_of

from fastpar.train.metrics import read_metrics

SHORT = ("--max-steps=500", "--outer-every=5", "--outer-lr=1", "--outer-momentum=0")
LONG = ("--max-steps=2500", *SHORT[1:])
WHOLE_RESTART = r"; (restart \d+ of|all ranks stopped)"


def command(out, *options, ranks=2):
    return [*FASTPAR, *TRAIN, f"--nproc={ranks}", "--replicas=2", f"--out={out}", *options]


def last_loss(out):
    return [row["val_loss"] for row in read_metrics(f"{out}/metrics.jsonl") if "val_loss" in row][
        -1
    ]


def kill(launcher, rank):
    """kill -9 of a rank that lives, if there is one."""
    pid = ranks_of(launcher.pid).get(rank)
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
    return pid is not None


def steps_of(out):
    file = Path(out) / "metrics.jsonl"
    rows = read_metrics(file) if file.exists() else []
    return max((row["step"] for row in rows), default=0)


def joined(out):
    """Steps at which a replica went on as a copy of another."""
    return [row["joined"] for row in read_metrics(f"{out}/metrics.jsonl") if "joined" in row]


def wait_for(launcher, out, step, seconds=120):
    deadline = time.monotonic() + seconds
    while steps_of(out) < step and launcher.poll() is None:
        assert time.monotonic() < deadline, f"{out} stands at step {steps_of(out)}"
        time.sleep(0.02)


@pytest.mark.parametrize(("restarts", "victim"), [(0, 0), (2, 1)])
def test_a_killed_replica_leaves_the_run_going(here, start, restarts, victim):
    launcher = start(*command("r", *SHORT, f"--max-restarts={restarts}"))
    wait_for(launcher, "r", 60)
    assert kill(launcher, victim)
    status, _, err = finish(launcher)
    assert status == 0, err
    after = "starts again, of 2 times" if restarts else "is left out"
    cause = rf"fastpar: rank {victim} \(pid \d+\) died of SIGKILL.*"
    assert re.search(f"{cause}; replica {victim} {after}", err)
    assert ("the first replica is gone; the run is in r/replica_1\n" in err) == (victim == 0)
    assert steps_of("r/replica_1") == 500
    if restarts:
        assert steps_of("r") == 500
        assert joined("r/replica_1")


def wait_for_all(launcher, out):
    """Both replicas live, and have met: what each has written goes on."""
    for folder in (out, f"{out}/replica_1"):
        wait_for(launcher, folder, steps_of(folder) + 20)


def killed(start, out, rng):
    """A run of which replicas are killed, at most five times, never the last one: loss, kills."""
    launcher = start(*command(out, *LONG, "--save-every=100", "--max-restarts=8", "--seed=1"))
    kills = 0
    while kills < 5:
        wait_for_all(launcher, out)
        time.sleep(rng.uniform(0.0, 1.0))
        number = rng.randrange(2)
        folder = f"{out}/replica_1" if number else out
        before = len(joined(folder))
        if launcher.poll() is not None or not kill(launcher, number):
            break
        kills += 1
        while len(joined(folder)) == before and launcher.poll() is None:
            time.sleep(0.05)
    status, _, err = finish(launcher, 300)
    assert status == 0, err
    assert re.search(WHOLE_RESTART, err) is None, err
    assert err.count("starts again") == kills, err
    return last_loss(out), kills


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_twenty_random_kills(here, start):
    """Every run ends, with a loss within what other seeds spread over."""
    losses = []
    for seed in (1, 2, 3):
        launcher = start(*command(f"whole{seed}", *LONG, f"--seed={seed}"))
        assert finish(launcher, 400)[0] == 0
        losses.append(last_loss(f"whole{seed}"))
    rng, found, kills = random.Random(0), [], 0
    while kills < 20:
        loss, n = killed(start, f"r{len(found)}", rng)
        found.append(loss)
        kills += n
    spread = max(losses) - min(losses)
    print(f"undisturbed {losses}, after {kills} kills {found}")
    assert all(min(losses) - spread < loss < max(losses) + spread for loss in found)
