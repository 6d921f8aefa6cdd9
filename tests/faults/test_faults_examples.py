"""The scripts of fastpar/examples: all of them parse, and that for a single node is run."""

import contextlib
import re
import subprocess
import sys
from importlib import resources

import pytest
from fault_runs import SETTINGS, curve, finish, kill, wait_for_steps
from torch.distributed.run import get_args_parser

from fastpar.cli import main

EXAMPLES = resources.files("fastpar") / "examples"
MORE = [f"--{name}={value}" for name, value in SETTINGS.items() if name != "save-every"]
NAMES = ("one_node.sh", "several_nodes.sh", "slurm.sbatch")


@pytest.mark.parametrize("name", NAMES)
def test_a_script_is_one_and_has_no_option_that_we_do_not_know(name, capsys):
    path = EXAMPLES / name
    scripts = [p.name for p in EXAMPLES.iterdir() if p.suffix in (".sh", ".sbatch")]
    assert sorted(scripts) == sorted(NAMES)
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    ours = path.read_text().replace("\\\n", " ").partition("-m fastpar train")[2].split("\n")[0]
    flags = set(re.findall(r"--[a-z-]+", ours))
    assert {"--auto-resume", "--out", "--timeout", "--save-every"} <= flags
    with contextlib.suppress(SystemExit):
        main(["train", "--help-all"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    assert flags <= known
    theirs = set(re.findall(r"--[a-z-]+", path.read_text().partition("distributed.run")[2]))
    known |= set(re.findall(r"--[a-z-]+", get_args_parser().format_help()))
    assert theirs <= known | {"--save-every"}


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
