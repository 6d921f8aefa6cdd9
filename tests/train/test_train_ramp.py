"""--batch-ramp: fewer micro-batches at first, the same samples in the same order at any dp."""

import pytest
from train_runs import TINY, bits, curve, forget_after

from fastpar.comm.mesh import Mesh
from fastpar.config.config import TrainConfig, derive_batch
from fastpar.testing import run_ranks
from fastpar.train.trainer import Trainer

RUN = {**TINY, "micro_batch_size": 1, "batch_size": 8, "batch_ramp": 2, "ramp_steps": 4}
RUN |= {"max_steps": 6, "eval_every": 6, "save_every": 3, "deterministic": True}


def rank(changes):
    config = TrainConfig().replace({**RUN, **changes})
    return Trainer(config, Mesh(device="cpu")).run()


def run(out, ranks, **changes):
    """All ranks, as threads."""
    assert run_ranks(rank, ranks, {"out": out, **changes}) == [0] * ranks


def tokens(out):
    return [row["tokens"] for row in curve(out) if "loss" in row]


def test_the_bits_of_one_process_and_after_a_resume(here):
    run("alone", 1)
    steps = [2, 2, 4, 4, 8, 8]
    assert tokens("alone") == [TINY["block_size"] * sum(steps[: n + 1]) for n in range(6)]
    for out, changes in (("r0", {}), ("r1", {"zero_stage": 1}), ("r3", {"zero_stage": 3})):
        run(out, 2, **changes)
        assert bits(out, 6) == bits("alone", 6), changes
        assert tokens(out) == tokens("alone")
    forget_after("alone", 3)  # in the middle of the ramp
    expected = bits("r0", 6)
    run("alone", 2, zero_stage=2, resume=True)
    assert bits("alone", 6) == expected
    run("plain", 1, batch_ramp=None, ramp_steps=None)
    assert bits("plain", 6) != expected


def test_micro_batches_of_a_step():
    config = TrainConfig().replace({"batch_size": 16, "batch_ramp": 4, "max_steps": 50})
    assert [config.micro_batches(step, 4) for step in (0, 4, 5, 9, 10, 49)] == [1, 1, 2, 2, 4, 4]
    assert derive_batch(config.text, 64, 2) == (2, 4)  # 4 sequences are 2 ranks' micro-batch
    at_once = config.replace({"ramp_steps": 0})
    assert at_once.micro_batches(0, 4) == 4
    assert TrainConfig().micro_batches(0, 4) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_ramp": 3}, "become batch_size=8 by doubling, got batch_ramp=3; use one of 8, 4,"),
        ({"batch_ramp": 16}, "by doubling, got batch_ramp=16"),
        ({"batch_ramp": 0}, "batch_ramp >= 1, got batch_ramp=0"),
        ({"ramp_steps": 5}, "ramp_steps=5 alone; set --batch-ramp"),
        ({"batch_ramp": 2, "cuda_graphs": True, "device": "cuda"}, "batch_ramp None with cuda"),
    ],
)
def test_bad_input(changes, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig().replace(changes)


def test_a_first_batch_that_ranks_do_not_divide():
    config = TrainConfig().replace({"batch_ramp": 2})
    with pytest.raises(ValueError, match=r"each of dp=4 .*got batch_size=2"):
        derive_batch(config.text, 64, 4)
    config = config.replace({"grad_accum_steps": 2})
    with pytest.raises(ValueError, match=r"multiple of batch_size / batch_ramp = 4, got grad_acc"):
        derive_batch(config.text, 64, 1)
