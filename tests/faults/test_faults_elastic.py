"""A run that lost a rank is started again, and ends at the bits of one that did not."""

import os
import re
import signal
from pathlib import Path

import pytest
from cells import slow
from fault_runs import (
    FASTPAR,
    TRAIN,
    all_gone,
    curve,
    finish,
    kill,
    ranks_of,
    run_in_threads,
    torchrun,
    wait_for,
    wait_for_steps,
)
from saved import whole_tensors

from fastpar.checkpoint.reader import verify_checkpoint
from fastpar.cli import main
from fastpar.files.runs import list_checkpoints

LENGTH = ("--max-steps=160", "--save-every=40", "--batch-size=12", "--keep-last=0")


@pytest.fixture
def whole(here):
    """A run of two ranks that nothing happened to."""
    run_in_threads("whole", 2, *LENGTH)
    return "whole"


def weights(run):
    """Weights and the optimizer's state of the last checkpoint, of any layout."""
    path = list_checkpoints(run)[-1]
    verify_checkpoint(path)
    found, state = whole_tensors(path)
    return {**found, **state}


def assert_same(run, other):
    """The same bits in the end, and the same curve, every step once."""
    a, b = weights(run), weights(other)
    assert a.keys() == b.keys()
    for key, tensor in a.items():
        assert tensor.equal(b[key]), key
    assert curve(run) == curve(other)


def wait_for_save(process, run, step):
    """It is written beside the steps."""
    manifest = Path(run, f"checkpoints/step_{step:06d}/manifest.json")
    wait_for(100, manifest.exists, process=process)


def renewed(launcher, old):
    ranks = ranks_of(launcher.pid)
    return ranks.keys() == {0, 1} and not old & set(ranks.values())


@pytest.mark.parametrize("kills", [1, slow(2)])
def test_a_killed_rank_costs_at_most_a_save_interval(whole, start, kills):
    launcher = start(*FASTPAR, *TRAIN, *LENGTH, "--nproc=2", "--max-restarts=2", "--out=r")
    for attempt, steps in ((1, 50), (2, 130))[:kills]:
        wait_for_steps(launcher, "r", steps)
        wait_for_save(launcher, "r", steps // 40 * 40)
        wait_for(30, renewed, launcher, kill(launcher, attempt % 2), process=launcher)
    code, out, err = finish(launcher)
    assert code == 0, err
    found = re.findall(
        r"^fastpar: rank (\d) \(pid \d+\) died of SIGKILL \(out of memory\?\); restart (\d) of 2, "
        r"from step (\d+)$",
        err,
        re.MULTILINE,
    )
    assert [(a, b) for a, b, _ in found] == [("1", "1"), ("0", "2")][:kills], err
    for at_least, (_, _, step) in zip((40, 120), found):
        assert int(step) >= at_least
    assert out.count("run      r, steps ") == kills + 1
    assert_same("r", whole)


@pytest.mark.slow
@pytest.mark.parametrize("by_torchrun", [False, True])
def test_a_killed_replica_costs_no_bits(here, start, by_torchrun):
    """All replicas start again, from the last step that each of them has saved."""
    options = (*LENGTH, "--replicas=2", "--outer-every=10")
    run_in_threads("whole", 2, *options)
    again = ("--max-restarts=1",)
    command = torchrun(2, *again) if by_torchrun else FASTPAR
    more = () if by_torchrun else ("--nproc=2", *again)
    launcher = start(*command, *TRAIN, *options, *more, "--out=r")
    for folder in ("r", "r/replica_1"):  # with nothing saved it would go on as a copy of the first
        wait_for_save(launcher, folder, 40)
    os.kill(ranks_of(launcher.pid)[1], signal.SIGKILL)
    code, out, err = finish(launcher)
    assert code == 0, err
    assert out.count("run      r, steps ") == 2
    for folder in ("", "/replica_1"):
        assert_same(f"r{folder}", f"whole{folder}")


@pytest.mark.slow
def test_torchrun_restarts_a_run_whose_folder_it_chose_itself(whole, start):
    """Once before anything is saved: from step 0 in the same folder; once in the middle."""
    command = torchrun(2, "--max-restarts=2")
    run, seen = "runs/micro-text", set()
    launcher = start(*command, *TRAIN, *LENGTH)
    for steps in (5, 60):
        wait_for_steps(launcher, run, steps)
        if steps == 5:
            assert list_checkpoints(run) == []
        now = kill(launcher, 0)
        assert not now & seen
        seen |= now
        wait_for(60, all_gone, seen)
    code, out, err = finish(launcher)
    assert code == 0, err
    assert [p.name for p in Path("runs").iterdir()] == ["micro-text"]
    assert out.count(f"run      {run}, steps 0 to 160") == 2
    assert re.search(rf"run      {run}, steps \d*[48]0 to 160", out)
    assert_same(run, whole)


@pytest.mark.slow
def test_a_hang_leads_to_a_restart(whole, start):
    more = ("--nproc=2", "--max-restarts=1", "--out=r", "--timeout=4s")
    launcher = start(*FASTPAR, *TRAIN, *LENGTH, *more)
    wait_for_steps(launcher, "r", 50)
    stopped = ranks_of(launcher.pid)[1]
    kill(launcher, 1, signal.SIGSTOP)
    wait_for(4 + 5 + 10, lambda: ranks_of(launcher.pid).get(1, stopped) != stopped)
    code, _, err = finish(launcher)
    assert code == 0, err
    assert re.search(r"got rank=1 without a sign of life .*; restart 1 of 1, from step 40\n", err)
    assert_same("r", whole)


@pytest.mark.slow
def test_two_runs_on_one_folder_are_refused(here, start, capsys):
    first = start(*FASTPAR, *TRAIN, "--max-steps=1000000", "--save-every=20", "--out=r")
    wait_for_steps(first, "r", 25)
    assert main([*TRAIN, "--out=r", "--resume", "--max-steps=1000001"]) == 2
    err = capsys.readouterr().err
    assert re.search(
        rf"expected a run that no other process writes, got out=\S+/r, which process {first.pid} "
        r"on \S+ since .* has; wait for it, stop it, or choose another --out\n$",
        err,
    ), err
    rows = len(curve("r"))
    wait_for_steps(first, "r", rows + 5)  # it has not noticed
    first.kill()
    first.wait()
    assert main([*TRAIN, "--out=r", "--auto-resume", "--max-steps=40"]) == 0


@pytest.mark.slow
def test_fewer_ranks_go_on(here, start):
    """4 ranks, then 2, then 1: the bits of one rank; sums of three have another tree."""
    settings = (*LENGTH, "--deterministic", "--zero=3", "--micro-batch-size=1")
    code, _, err = finish(start(*FASTPAR, *TRAIN, *settings, "--out=whole"), timeout_s=200)
    assert code == 0, err
    for nproc, steps in ((4, 50), (2, 130)):
        run = start(*FASTPAR, *TRAIN, *settings, "--auto-resume", "--out=r", f"--nproc={nproc}")
        wait_for_steps(run, "r", steps)
        os.kill(ranks_of(run.pid)[nproc - 1], signal.SIGKILL)
        assert finish(run)[0] == 1
    code, _, err = finish(start(*FASTPAR, *TRAIN, *settings, "--auto-resume", "--out=r"))
    assert code == 0, err
    assert_same("r", "whole")
    code, _, err = finish(
        start(*FASTPAR, *TRAIN, *settings, "--auto-resume", "--out=r", "--nproc=5")
    )
    assert code == 2
    assert "use one of dp=1, 2, 3, 4, 6, 12, or change --batch-size" in err
