"""--replicas, --outer-every: runs of replicas, their samples and folders, other numbers of them."""

import re
import signal
from pathlib import Path

import pytest
import torch
from train_runs import TINY, Runs, bits, curve, forget_after

from fastpar.checkpoint.restore import load_weights
from fastpar.comm.mesh import Mesh
from fastpar.files.runs import checkpoint_folder, list_checkpoints, step_of
from fastpar.settings.config import TrainConfig
from fastpar.testing import run_ranks
from fastpar.train.journal import read_metrics
from fastpar.train.trainer import Trainer

RUN = {**TINY, "micro_batch_size": 2, "max_steps": 6, "eval_every": 6, "save_every": 1}
run = Runs(RUN)
MEAN = {"outer_lr": 1.0, "outer_momentum": 0.0}
EVERY = {"outer_every": 3}


def test_one_replica_with_the_mean_alone(here):
    run("alone")
    run("mean", **EVERY, **MEAN)
    assert curve("mean") == curve("alone")
    run("slower", **EVERY, outer_lr=0.5, outer_momentum=0.0)
    assert curve("slower") != curve("alone")


def test_one_replica_tells_how_it_goes(here, capsys):
    run("r", 4, replicas=2, zero_stage=2, **EVERY)
    printed = capsys.readouterr()
    for words in ("validation loss", "saved: "):
        steps = re.findall(rf"^step (\d+)  {words}", printed.out, re.MULTILINE)
        assert len(steps) == len(set(steps)) > 1
    assert "replica_1" not in printed.out + printed.err
    assert printed.out.count("next: fastpar sample r") == 1
    assert "== step 6" in Path("r/replica_1/samples.txt").read_text()


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_two_replicas_of_two_ranks_go_on(here, wire):
    """From their own inner state, and with the samples that nobody has had."""
    outer = {"replicas": 2, "zero_stage": 2, "outer_every": 3, "outer_wire": wire}
    run("whole", 4, **outer)
    run("cut", 4, **outer)
    for folder in ("cut", "cut/replica_1"):
        forget_after(folder, 2)
    run("cut", 4, **outer, resume=True)
    for folder in ("", "/replica_1"):
        assert bits(f"cut{folder}", 6) == bits(f"whole{folder}", 6)
        rows = [row for row in curve(f"cut{folder}") if "tokens" in row]
        assert [row["tokens"] for row in rows] == [n * 8 * 16 for n in range(1, 7)]
    assert bits("whole", 5) != bits("whole/replica_1", 5)
    first, second = (
        load_weights(checkpoint_folder(f, 6)).parameters() for f in ("whole", "whole/replica_1")
    )
    assert all(map(torch.equal, first, second))  # they have just met


def test_a_save_that_one_of_them_lacks(here):
    """It was killed before it had committed: both go on from the one before."""
    outer = {"replicas": 2, **EVERY}
    run("whole", 2, **outer)
    run("cut", 2, **outer)
    forget_after("cut", 4)
    forget_after("cut/replica_1", 2)
    run("cut", 2, **outer, resume=True)
    for folder in ("", "/replica_1"):
        assert bits(f"cut{folder}", 6) == bits(f"whole{folder}", 6)


class Asked(Trainer):
    """The second replica is asked for something in its first step."""

    def train_step(self):
        if self.step == 0 and self.mesh.replica == 1:
            asked = self.saves.signals if self.config.run.seed else self.stop_signals
            asked.append(signal.SIGUSR1 if self.config.run.seed else signal.SIGTERM)
        return super().train_step()


def ask(changes):
    config = TrainConfig().replace({**RUN, **changes})
    return Asked(config, Mesh(replicas=config.mesh.replicas, device="cpu")).run()


@pytest.mark.parametrize(("what", "seed", "status"), [("stop", 0, 143), ("save", 1, 0)])
def test_what_one_was_asked_for_all_do_after_the_next_meeting(here, what, seed, status):
    changes = {"replicas": 2, "outer_every": 4, "save_every": 0, "seed": seed, "out": "r"}
    assert run_ranks(ask, 4, changes) == [status] * 4
    for folder in ("r", "r/replica_1"):
        steps = [step_of(path) for path in list_checkpoints(folder)]
        assert steps == ([4] if what == "stop" else [4, 6])


def test_a_replica_has_the_same_samples_at_every_stage(here):
    """Reduced at once or added up first: a replica's micro-batches of a step are the same ones."""
    same = {"replicas": 2, "micro_batch_size": 1, "deterministic": True, "max_steps": 4, **EVERY}
    for name, stage, accumulate in ("a", 0, "full"), ("b", 1, "shard"), ("c", 2, "auto"):
        run(name, 4, **same, zero_stage=stage, accumulate=accumulate)
    for folder in ("", "/replica_1"):
        assert curve(f"a{folder}") == curve(f"b{folder}") == curve(f"c{folder}")


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4), (0, 2)])
def test_another_number_of_replicas(here, before, after):
    """0: a run without an outer step, which ends with post-local averaging."""
    run("run", max(1, before), **(EVERY if before else {}), replicas=max(1, before))
    run("run", after, **EVERY, replicas=after, resume=True, max_steps=9, eval_every=9)
    losses = [row["loss"] for row in read_metrics("run/metrics.jsonl") if "loss" in row]
    assert len(losses) == 9
    assert losses[8] < losses[0]
    for i in range(1, after):
        assert bits(f"run/replica_{i}", 9)
