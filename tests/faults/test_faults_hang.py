"""A rank that hangs: all others name it in time, whatever carries their collectives."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from cells import slow
from fault_runs import (
    FASTPAR,
    TRAIN,
    all_gone,
    finish,
    ranks_of,
    torchrun,
    wait_for_steps,
)

TIMEOUT_S = 4
ENDLESS = ("--max-steps=1000000", "--out=r", f"--timeout={TIMEOUT_S}s", "--batch-size=12")
GLOO, SHM = ("--transport=torch",), ("--transport=shm",)


def said_by(rank, logs="logs"):
    return "".join(p.read_text() for p in Path(logs).glob(f"*/attempt_0/{rank}/stderr.log"))


@pytest.mark.parametrize(
    ("nproc", "victim", "options"),
    [
        (2, 1, (*SHM, "--zero=3")),
        slow(2, 1, (*GLOO, "--pp=2")),
        slow(3, 2, (*GLOO, "--zero=3")),
        slow(2, 0, (*SHM, "--tp=2")),
        slow(4, 3, (*GLOO, "--tp=2", "--zero=3")),
        slow(2, 0, (*SHM, "--pp=2", "--schedule=zb-v", "--n-layer=2")),
    ],
)
def test_all_others_name_a_stopped_rank_in_time(here, start, nproc, victim, options):
    launcher = start(*torchrun(nproc, "--log-dir=logs", "-r", "3"), *TRAIN, *ENDLESS, *options)
    wait_for_steps(launcher, "r", 20)
    ranks = ranks_of(launcher.pid)
    others = sorted(ranks.keys() - {victim})
    assert len(others) == nproc - 1
    time.sleep(1.5)  # heartbeats
    os.kill(ranks[victim], signal.SIGSTOP)
    began, words = time.monotonic(), "watchdog: expected every rank to take part within timeout="
    while not all(words in said_by(rank) for rank in others):
        assert time.monotonic() - began < TIMEOUT_S + 5, {r: said_by(r) for r in others}
        time.sleep(0.02)
    assert time.monotonic() - began >= TIMEOUT_S - 0.5
    code, _, err = finish(launcher, timeout_s=25)
    assert code == 1
    assert all_gone(ranks.values())
    for rank in others:
        said = said_by(rank)
        assert said.count(words) == 1
        found = re.search(
            rf"timeout=4s, got rank={victim} without a sign of life for \d.\d s \(stopped, dead or "
            rf"cut off\), last seen in step (\d+)\b.*; rank {rank} has waited \d.\d s: step (\d+)"
            r"(, [\w' ]+ (?:bucket|micro-batch) \d+)? \((all_gather|all_reduce|reduce_scatter|recv)"
            r"\); this rank ends, "
            rf"and the run can go on .*\n  last stack of rank {victim}, innermost last:\n",
            said,
        )
        assert found, said
        if "--tp=2" not in options:
            assert found[3], said  # the bucket
        assert 0 < int(found[1]) <= int(found[2])
        assert re.search(
            r"\n    fastpar/train/trainer.py:\d+ run\n    fastpar/train/trainer.py:\d+ ", said
        )
    assert "watchdog: expected every rank to take part" in err  # as the cause, by torchrun


@pytest.mark.slow
def test_the_launcher_tells_of_a_hang(here, start):
    launcher = start(*FASTPAR, *TRAIN, *ENDLESS, "--nproc=2", "--zero=2")
    wait_for_steps(launcher, "r", 20)
    ranks = ranks_of(launcher.pid)
    time.sleep(1.0)
    os.kill(ranks[0], signal.SIGSTOP)
    code, _, err = finish(launcher, timeout_s=25)
    assert code == 1
    assert err.count("  last stack of rank 0, innermost last:\n    ") == 1
    assert re.search(
        r"\nfastpar: rank 1 \(pid \d+\) failed: .*watchdog: expected every rank to take part "
        r"within timeout=4s, got rank=0 without .*; all ranks stopped\n$",
        err,
    ), err
    assert all_gone(ranks.values())


@pytest.mark.slow
def test_a_rank_that_computes_for_long_is_not_hung(here, start):
    """Rank 1 loops for ever in its forward; the others wait for it, and say where it is."""
    Path("loop.py").write_text(
        "import fastpar.train.trainer as t\n"
        "from fastpar.cli import main\n"
        "import os, sys\n"
        "batch = t.sample_batch\n"
        "n = [0]\n"
        "def endless(*args, **kwargs):\n"
        "    n[0] += 1\n"
        "    while os.environ['RANK'] == '1' and n[0] == 30:\n"
        "        pass\n"
        "    return batch(*args, **kwargs)\n"
        "t.sample_batch = endless\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = [*torchrun(2, "--log-dir=logs", "-r", "3")[:-2], "loop.py"]
    launcher = start(*command, *TRAIN, *ENDLESS, *GLOO)
    code, _, err = finish(launcher, timeout_s=60)
    assert code == 1
    assert "got rank=1 that waits for nobody: step 30, outside of collectives; rank 0" in err
    said = said_by(0)
    assert said.count("watchdog:") == 1
    assert re.search(r"    \S*/loop.py:\d+ endless\n", said + "\n"), said
