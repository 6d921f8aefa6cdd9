"""A host that fails in the optimizer's step: all ranks stop, and the checkpoint before is whole."""

import json
from pathlib import Path

import pytest
from cells import slow
from fault_runs import TRAIN, curve, finish, is_alive, ranks_of, run_in_threads, torchrun
from saved import bits

from fastpar.checkpoint.reader import newest_checkpoint
from fastpar.files.runs import step_of

DRIVER = str(Path(__file__).parents[1] / "support" / "offload_driver.py")
RUN = ("--n-layer=3", "--max-steps=8", "--save-every=2", "--keep-last=9", "--max-grad-norm=0.5")


@pytest.mark.parametrize(
    ("victim", "how", "options"),
    [
        (1, "raise", ("--offload=parameters", "--zero=3")),
        slow(0, "kill", ("--offload=optimizer", "--zero=2")),
        slow(1, "kill", ("--offload=parameters", "--zero=3")),
        slow(0, "raise", ("--offload=optimizer",)),
    ],
)
def test_a_host_that_fails_in_its_step(here, start, victim, how, options):
    command = [*torchrun(2)[:-2], DRIVER, json.dumps([victim, how, 6])]
    run = start(*command, *TRAIN, *RUN, "--out=r", *options)
    code, _, err = finish(run, timeout_s=100)
    assert code == 1
    assert not any(is_alive(pid) for pid in ranks_of(run.pid).values())
    assert ("the host has a broken core" in err) == (how == "raise")
    found = newest_checkpoint("r", say=lambda line: pytest.fail(line))
    assert step_of(found) in (2, 4)
    run_in_threads("whole", 2, *RUN)
    assert bits(found) == bits(Path("whole/checkpoints") / found.name)
    run_in_threads("r", 2, *RUN, "--resume", "--zero=0", "--unset", "offload")
    assert curve("r") == curve("whole")
