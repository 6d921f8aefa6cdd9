"""The trainer with Muon: the bits of one process at every layout, resume across layouts."""

import pytest
from train_runs import TINY, Runs, bits, curve, forget_after, losses

RUN = {**TINY, "n_layer": 3, "micro_batch_size": 2, "max_steps": 4, "eval_every": 4}
RUN |= {"save_every": 2, "deterministic": True, "optimizer": "muon"}
run = Runs(RUN)


def test_the_bits_of_one_process(here):
    """Also where a stage of a pipeline has no layer, so nothing that Muon steps."""
    run("alone", 1)
    for i, (ranks, changes) in enumerate(
        [
            (2, {}),
            (2, {"zero_stage": 3}),
            (4, {"zero_stage": 2, "shard_size": 2}),
            (2, {"pp": 2, "pp_split": "0,3", "zero_stage": 1}),
        ]
    ):
        run(f"r{i}", ranks, **changes)
        assert bits(f"r{i}", 4) == bits("alone", 4), changes
        assert losses(f"r{i}") == losses("alone"), changes
    run("tp", 2, tp=2, zero_stage=1)  # forward sums in another order there
    assert losses("tp") == pytest.approx(losses("alone"), rel=1e-6)


@pytest.mark.slow
def test_hundreds_of_steps_have_the_bits_of_one_process(here):
    long = {"max_steps": 300, "eval_every": 100, "save_every": 0, "ema": 0.99}
    run("alone", 1, **long)
    run("shared", 2, zero_stage=3, **long)
    assert curve("shared") == curve("alone")
    assert bits("shared", 300) == bits("alone", 300)


def test_a_schedule_goes_on_after_a_resume(here):
    schedule = {"lr_schedule": "wsd", "lr_decay_fraction": 0.75}
    run("whole", 1, **schedule, optimizer="adamw")
    assert [row["lr"] for row in curve("whole") if "lr" in row] == pytest.approx(
        [1e-3, 1e-3, 2e-3 / 3, 1e-3 / 3]
    )
    forget_after("whole", 2)
    expected = bits("whole", 2)
    run("again", 2, **schedule, optimizer="adamw", zero_stage=3)
    assert bits("again", 2) == expected
    run("whole", 2, resume=True, optimizer="adamw", **schedule)
    assert bits("whole", 4) == bits("again", 4)


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        ((2, {"zero_stage": 3}), (1, {})),
        ((2, {"pp": 2}), (2, {"zero_stage": 2})),
        pytest.param((1, {}), (2, {"pp": 2, "zero_stage": 1}), marks=pytest.mark.slow),
    ],
)
def test_resumes_at_another_layout(here, saved, resumed):
    run("whole", 1)
    run("cut", saved[0], **saved[1])
    forget_after("cut", 2)
    run("cut", resumed[0], **{"pp": 1, "zero_stage": 0, **resumed[1], "resume": True})
    assert bits("cut", 4) == bits("whole", 4)


def test_another_optimizers_checkpoint_is_refused(here):
    run("cut", 1, optimizer="adamw")
    forget_after("cut", 2)
    with pytest.raises(ValueError, match="momentum_buffer"):
        run.rank({"out": "cut", "resume": True})
