"""What goes wrong in real runs of two processes: a killed rank, a stop, a mistake, no launcher."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from fault_runs import (
    FASTPAR,
    TRAIN,
    all_gone,
    curve,
    finish,
    ranks_of,
    run_in_threads,
    torchrun,
    wait_for,
    wait_for_steps,
)
from saved import bits

from fastpar.checkpoint.reader import newest_checkpoint
from fastpar.files.runs import list_checkpoints, step_of
from fastpar.train.journal import read_metrics


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "options"),
    [
        (1, ["--zero=3", "--transport=torch"]),
        (0, []),
        (0, ["--tp=2"]),
        (1, ["--pp=2", "--transport=torch"]),
    ],
)
def test_killed_rank_stops_the_others(here, start, victim, options):
    launcher = start(*FASTPAR, *TRAIN, "--nproc=2", "--max-steps=1000000", "--out=r", *options)
    wait_for_steps(launcher, "r", 3)
    ranks = ranks_of(launcher.pid)
    assert sorted(ranks) == [0, 1]
    os.kill(ranks[victim], signal.SIGKILL)
    code, _, err = finish(launcher, timeout_s=15)
    assert code == 1
    lines = [row for row in err.strip().splitlines() if "tokenizing" not in row]
    said = f"fastpar: rank {victim} (pid {ranks[victim]}) died of SIGKILL (out of memory?); all ra"
    assert lines[-1].startswith(said)
    assert len(lines) <= 2
    assert all_gone(ranks.values())


@pytest.mark.slow
def test_stopped_run_goes_on_under_torchrun_bit_for_bit(here, start):
    """SIGTERM to the launcher reaches both ranks: they save the same step, and no step is lost."""
    length = "--max-steps=150"
    run_in_threads("whole", 2, length)
    cut = start(*FASTPAR, *TRAIN, length, "--nproc=2", "--out=cut")
    wait_for_steps(cut, "cut", 5)
    cut.terminate()
    code, out, err = finish(cut)
    assert code == 128 + signal.SIGTERM
    assert err.count("finishing this step, then saving; once more to quit at once") == 1
    assert out.count("fastpar  ") == 1  # rank 0 alone prints
    assert "ranks 2, threads a rank " in out
    assert out.endswith("saved in cut\ngo on: fastpar train --resume --out cut\n")
    [saved] = list_checkpoints("cut")
    assert read_metrics("cut/metrics.jsonl")[-1]["step"] == int(saved.name.removeprefix("step_"))
    assert saved.name < "step_000150"

    code, _, err = finish(start(*torchrun(2), "train", "--resume", "--out=cut"))
    assert code == 0, err
    curves = [curve(out) for out in ("whole", "cut")]
    assert curves[0] == curves[1]
    assert len(curves[0]) == 151
    assert bits(list_checkpoints("whole")[-1]) == bits(list_checkpoints("cut")[-1])


@pytest.mark.slow
def test_a_mistake_found_by_the_ranks_is_one_line(here, start):
    Path("text.txt").write_text("too short")
    code, out, err = finish(start(*FASTPAR, *TRAIN, "--nproc=2", "--max-restarts=3", "--out=r"))
    assert (code, out) == (2, "")  # and no restart
    *progress, line = err.strip().splitlines()
    assert line.startswith("load_data: expected at least block_size + 1 = 17 training tokens of te")
    assert not [row for row in progress if row and "tokenizing" not in row]
    assert not Path("r").exists()


@pytest.mark.slow
def test_ranks_do_not_outlive_their_launcher(here, start):
    """One that computes, and one that answers no signal any more."""
    command = (*FASTPAR, *TRAIN, "--nproc=2", "--max-steps=1000000", "--out=r")
    launcher = start(*command, env={"TMPDIR": "."})
    wait_for_steps(launcher, "r", 3)
    ranks = ranks_of(launcher.pid)
    os.kill(ranks[1], signal.SIGSTOP)
    launcher.kill()
    wait_for(5, all_gone, ranks.values())


@pytest.mark.slow
def test_a_run_under_nohup_survives_its_terminal(here, start):
    run = start("nohup", *FASTPAR, *TRAIN, "--nproc=2", "--max-steps=300", "--out=r")
    wait_for_steps(run, "r", 3)
    for pid in (run.pid, *ranks_of(run.pid).values()):
        os.kill(pid, signal.SIGHUP)
    code, _, err = finish(run)
    assert code == 0, err
    assert read_metrics("r/metrics.jsonl")[-1]["step"] == 300


@pytest.mark.slow
def test_a_damaged_checkpoint_on_resume_of_two_ranks(here, start):
    run = (*FASTPAR, *TRAIN, "--nproc=2", "--out=r", "--max-steps=6")
    assert finish(start(*run, "--save-every=3"))[0] == 0
    shutil.copytree("r", "s", symlinks=True)
    (list_checkpoints("r")[-1] / "optimizer-00002-of-00002.safetensors").unlink()
    code, out, err = finish(start(*run, "--save-every=3", "--resume"))
    assert code == 0, err
    assert "got optimizer-00002-of-00002.safetensors (" in out
    assert bits(list_checkpoints("r")[-1]) == bits(list_checkpoints("s")[-1])


DRIVER = str(Path(__file__).parents[1] / "support" / "offload_driver.py")
RUN = ("--n-layer=3", "--max-steps=8", "--save-every=2", "--keep-last=9", "--max-grad-norm=0.5")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "how", "options"),
    [
        (1, "raise", ("--offload=parameters", "--zero=3")),
        (0, "kill", ("--offload=optimizer", "--zero=2")),
    ],
)
def test_a_host_that_fails_in_its_step(here, start, victim, how, options):
    command = [*torchrun(2)[:-2], DRIVER, json.dumps([victim, how, 6])]
    run = start(*command, *TRAIN, *RUN, "--out=r", *options)
    code, _, err = finish(run, timeout_s=100)
    assert code == 1
    assert all_gone(ranks_of(run.pid).values())
    assert ("the host has a broken core" in err) == (how == "raise")
    found = newest_checkpoint("r", say=lambda line: pytest.fail(line))
    assert step_of(found) in (2, 4)
    run_in_threads("whole", 2, *RUN)
    assert bits(found) == bits(Path("whole/checkpoints") / found.name)
    run_in_threads("r", 2, *RUN, "--resume", "--zero=0", "--unset", "offload")
    assert curve("r") == curve("whole")
