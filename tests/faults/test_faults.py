"""What goes wrong in real runs: a killed rank, a hang, a stop, a mistake, no launcher."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib import resources
from pathlib import Path

import pytest
import yaml
from fault_runs import (
    FASTPAR,
    SETTINGS,
    TRAIN,
    all_gone,
    curve,
    finish,
    kill,
    ranks_of,
    run_in_threads,
    state_of,
    torchrun,
    wait_for,
    wait_for_steps,
)
from saved import bits
from torch.distributed.run import get_args_parser

from fastpar.checkpoint.reader import newest_checkpoint, verify_checkpoint
from fastpar.cli import main, parse_train
from fastpar.comm.watchdog import MARGIN_S
from fastpar.files.runs import list_checkpoints, step_of
from fastpar.train.journal import read_metrics


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
    assert err.count("finishing this step, then saving; repeat to quit at once") == 1
    assert out.count("fastpar  ") == 1  # rank 0 alone prints
    assert "ranks 2, threads per rank " in out
    assert out.endswith("saved in cut\nto resume: fastpar train --resume --out cut\n")
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
def test_a_run_under_nohup_survives_its_terminal(here, start):
    run = start("nohup", *FASTPAR, *TRAIN, "--nproc=2", "--max-steps=300", "--out=r")
    wait_for_steps(run, "r", 3)
    for pid in (run.pid, *ranks_of(run.pid).values()):
        os.kill(pid, signal.SIGHUP)
    code, _, err = finish(run)
    assert code == 0, err
    assert read_metrics("r/metrics.jsonl")[-1]["step"] == 300


DRIVER = str(Path(__file__).parents[1] / "support" / "offload_driver.py")
RUN = ("--n-layer=3", "--max-steps=8", "--save-every=2", "--keep-last=9", "--max-grad-norm=0.5")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "how", "options"),
    [(1, "raise", "--offload=parameters --zero=3"), (0, "kill", "--offload=optimizer --zero=2")],
)
def test_a_host_that_fails_in_its_step(here, start, victim, how, options):
    command = [*torchrun(2)[:-2], DRIVER, json.dumps([victim, how, 6])]
    run = start(*command, *TRAIN, *RUN, "--out=r", *options.split())
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


LENGTH = ("--max-steps=160", "--save-every=40", "--batch-size=12", "--keep-last=0")


@pytest.fixture
def whole(here):
    """A run of two ranks that nothing happened to."""
    run_in_threads("whole", 2, *LENGTH)
    return "whole"


def assert_same(run, other):
    """The same weights, optimizer's state and curve in the end, every step once."""
    paths = [list_checkpoints(one)[-1] for one in (run, other)]
    for path in paths:
        verify_checkpoint(path)
    assert bits(paths[0]) == bits(paths[1])
    assert curve(run) == curve(other)


def wait_for_save(process, run, step):
    """It is written beside the steps."""
    manifest = Path(run, f"checkpoints/step_{step:06d}/manifest.json")
    wait_for(100, manifest.exists, process=process)


def renewed(launcher, old):
    ranks = ranks_of(launcher.pid)
    return ranks.keys() == {0, 1} and not old & set(ranks.values())


@pytest.mark.slow
def test_a_hanging_and_a_killed_rank_cost_at_most_a_save_interval(whole, start):
    """The launcher names both causes. The first leads to a restart; after the second, for which
    none is left, the run goes on from its folder."""
    more = ("--nproc=2", "--max-restarts=1", "--out=r", "--timeout=4s")
    launcher = start(*FASTPAR, *TRAIN, *LENGTH, *more)
    for rank, step, how in ((0, 40, signal.SIGSTOP), (1, 80, signal.SIGKILL)):
        wait_for_steps(launcher, "r", step + 10)
        wait_for_save(launcher, "r", step)
        old = kill(launcher, rank, how)
        if how == signal.SIGSTOP:
            wait_for(30, renewed, launcher, old, process=launcher)
    code, out, err = finish(launcher)
    assert code == 1, err
    assert all_gone(old)
    said = (
        r"  last stack of rank 0, innermost last:\n    .*"
        r"\nfastpar: rank 1 \(pid \d+\) failed: .*watchdog: a collective did not end within "
        r"timeout=4s: rank 0 gave no sign .*; restart 1 of 1, from step (\d+)\n.*"
        r"\nfastpar: rank 1 \(pid \d+\) died of SIGKILL \(out of memory\?\); all ranks stopped\n"
    )
    found = re.search(said, f"\n{err}", re.DOTALL)
    assert found, err
    assert int(found[1]) >= 40
    assert "gloo" not in err
    assert out.count("run      r, steps ") == 2
    assert step_of(list_checkpoints("r")[-1]) >= 80
    run_in_threads("r", 2, *LENGTH, "--resume")
    assert_same("r", whole)
    for row in read_metrics("r/metrics.jsonl"):
        if "loss" in row:
            assert 0 < row["exposed_ms"] < row["step_ms"]
            assert min(row["comm_ms"], row["wire_mb"]) > 0


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


TIMEOUT_S = 4
ENDLESS = ("--max-steps=1000000", "--out=r", f"--timeout={TIMEOUT_S}s", "--batch-size=12")
GLOO, SHM = ("--transport=torch",), ("--transport=shm",)


def said_by(rank):
    return "".join(p.read_text() for p in Path("logs").glob(f"*/attempt_0/{rank}/stderr.log"))


NAMED = (
    r"timeout=4s: rank {victim} gave no sign of life for \d+.\d s \(stopped, dead or cut off"
    r"\), last seen in step (\d+)\b.*; rank {rank} has waited (\d+.\d) s: step (\d+)"
    r"(, [\w' ]+ (?:bucket|micro-batch) \d+)? \((all_gather|all_reduce|reduce_scatter|recv)\); "
    r"this rank ends, resume the run .*\n  last stack of rank {victim}, innermost last:\n"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nproc", "victim", "options"),
    [(2, 1, (*SHM, "--zero=3")), (2, 0, (*GLOO, "--pp=2")), (4, 3, (*GLOO, "--tp=2", "--zero=3"))],
)
def test_all_others_name_a_stopped_rank_in_time(here, start, nproc, victim, options):
    launcher = start(*torchrun(nproc, "--log-dir=logs", "-r", "3"), *TRAIN, *ENDLESS, *options)
    wait_for_steps(launcher, "r", 20)
    ranks = ranks_of(launcher.pid)
    others = sorted(ranks.keys() - {victim})
    assert len(others) == nproc - 1
    time.sleep(1.5)  # heartbeats, and steps in which their threads had a turn
    wait_for_steps(launcher, "r", len(read_metrics("r/metrics.jsonl")) + 20)
    os.kill(ranks[victim], signal.SIGSTOP)
    words = "watchdog: a collective did not end within timeout="
    wait_for(100, lambda: all(words in said_by(rank) for rank in others))
    code, _, err = finish(launcher, timeout_s=120)  # torchrun waits 30 s for the stopped one
    assert code == 1
    assert all_gone(ranks.values())
    waited = []
    for rank in others:
        said = said_by(rank)
        assert said.count(words) == 1
        found = re.search(NAMED.replace("{victim}", f"{victim}").replace("{rank}", f"{rank}"), said)
        assert found, said
        assert found[4] or "--tp=2" in options, said  # the bucket
        assert 0 < int(found[1]) <= int(found[3])
        waited.append(float(found[2]))
        trainer = r"\n    fastpar/train/trainer.py:\d+ "
        assert re.search(rf"{trainer}run{trainer}", said)
    assert max(waited) >= TIMEOUT_S  # that of the first one to judge
    assert "watchdog: a collective did not end" in err  # as the cause, by torchrun


@pytest.mark.slow
def test_ranks_stand_still_with_their_launcher(here, start):
    """For longer than any timeout; then they train on."""
    launcher = start(*FASTPAR, *TRAIN, *ENDLESS, *GLOO, "--nproc=2")
    wait_for_steps(launcher, "r", 20)
    everyone = (launcher.pid, *ranks_of(launcher.pid).values())
    launcher.send_signal(signal.SIGTSTP)
    wait_for(30, lambda: all(state_of(pid) == "T" for pid in everyone))
    stopped = len(read_metrics("r/metrics.jsonl"))
    time.sleep(TIMEOUT_S + MARGIN_S + 2)
    assert len(read_metrics("r/metrics.jsonl")) == stopped
    launcher.send_signal(signal.SIGCONT)
    wait_for_steps(launcher, "r", stopped + 20)
    launcher.terminate()
    code, _, err = finish(launcher)
    assert code == 128 + signal.SIGTERM, err
    assert "watchdog" not in err


LOOP = """
import fastpar.train.trainer as t
from fastpar.cli import main
import os, sys
batch = t.sample_batch
n = [0]
def endless(*args, **kwargs):
    n[0] += 1
    while os.environ['RANK'] == '1' and n[0] == 30:
        pass
    return batch(*args, **kwargs)
t.sample_batch = endless
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_rank_that_computes_for_long_is_not_hung(here, start):
    """Rank 1 loops for ever in its forward; the others wait for it, and say where it is."""
    Path("loop.py").write_text(LOOP)
    command = [*torchrun(2, "--log-dir=logs", "-r", "3")[:-2], "loop.py"]
    code, _, err = finish(start(*command, *TRAIN, *ENDLESS, *GLOO), timeout_s=120)
    assert code == 1
    assert ": rank 1 is not waiting: step 30, outside of collectives; rank 0" in err
    said = said_by(0)
    assert said.count("watchdog:") == 1
    assert re.search(r"    \S*/loop.py:\d+ endless\n", said + "\n"), said


EXAMPLES = resources.files("fastpar") / "examples"
MORE = [f"--{name}={value}" for name, value in SETTINGS.items() if name != "save-every"]


def flags_of(text):
    return set(re.findall(r"--[a-z-]+", text))


@pytest.mark.slow
def test_a_script_is_one_and_has_no_option_that_we_do_not_know(capsys):
    with contextlib.suppress(SystemExit):
        main(["train", "--help-all"])
    ours, theirs = flags_of(capsys.readouterr().out), flags_of(get_args_parser().format_help())
    scripts = [path for path in EXAMPLES.iterdir() if path.suffix in (".sh", ".sbatch")]
    assert len(scripts) == 3
    for path in scripts:
        done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        text = path.read_text()
        train = text.replace("\\\n", " ").partition("-m fastpar train")[2].split("\n")[0]
        assert {"--auto-resume", "--out", "--timeout", "--save-every"} <= flags_of(train) <= ours
        assert flags_of(text.partition("distributed.run")[2]) <= ours | theirs


def test_the_manifest_is_one_of_a_pytorchjob():
    spec = yaml.safe_load((EXAMPLES / "kubernetes.yaml").read_text())
    assert (spec["kind"], spec["apiVersion"]) == ("PyTorchJob", "kubeflow.org/v1")
    elastic = spec["spec"]["elasticPolicy"]
    pod = spec["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    (container,) = pod["containers"]
    first, *command = [*container["command"], *container["args"]]
    parsed = get_args_parser().parse_args(command)
    assert (first, parsed.training_script, parsed.module) == ("torchrun", "fastpar", True)
    config = parse_train(parsed.training_script_args[1:])
    mounted = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
    assert mounted.keys() == {"/runs", "/dev/shm"}
    assert {v["name"] for v in pod["volumes"]} == set(mounted.values())
    assert config.run.auto_resume
    assert config.run.out.startswith("/runs/")
    gpus = int(spec["spec"]["nprocPerNode"])
    nodes = range(elastic["minReplicas"], elastic["maxReplicas"] + 1)
    assert all(config.text.batch_size % (n * gpus) == 0 for n in nodes)


@pytest.mark.slow
def test_one_node_survives_a_killed_rank_and_goes_on_later(here, start):
    env = {"PYTHON": sys.executable, "NPROC": "2", "SAVE_EVERY": "20", "MAX_RESTARTS": "2"}
    script = ("bash", str(EXAMPLES / "one_node.sh"), *MORE)
    run = start(*script, "--max-steps=120", env={**env, "RUN": "r"})
    wait_for_steps(run, "r", 30)
    kill(run, 1)
    code, _, err = finish(run)
    assert code == 0, err
    assert "restart 1 of 2, from step " in err
    code, out, err = finish(start(*script, "--max-steps=140", env={**env, "RUN": "r"}))
    assert code == 0, err
    assert "run      r, steps 120 to 140" in out
    assert [row["step"] for row in curve("r") if "loss" in row] == list(range(1, 141))


@pytest.mark.slow
def test_several_nodes_of_one(here, start):
    env = {"PYTHON": sys.executable, "NPROC": "2", "SAVE_EVERY": "20", "NODES": "1", "RUN": "r"}
    script = ("bash", str(EXAMPLES / "several_nodes.sh"), *MORE, "--max-steps=60")
    code, out, err = finish(start(*script, env={**env, "HEAD": "localhost:0"}))
    assert code == 0, err
    assert "run      r, steps 0 to 60" in out
