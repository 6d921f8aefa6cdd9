"""guards.py: verdicts on a step's numbers, what is usual, samples that are never taken again."""

import json
import math
import random

import pytest
import torch

from fastpar.config.options import FaultSettings
from fastpar.train.guards import ENOUGH, IN_A_ROW, WINDOW, Guards, Verdict, merged, past, poison

GO_ON = Verdict()
BAD = [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.inf), (1.0, math.nan), (-math.inf, math.nan)]


def guards(scaled=False, **settings):
    return Guards(FaultSettings(**settings), scaled=scaled)


@pytest.mark.parametrize(("loss", "norm"), BAD)
def test_policies_of_what_is_not_finite(loss, norm):
    with pytest.raises(
        RuntimeError, match=rf"expected finite numbers, got loss={loss}, grad_norm={norm} in step 7"
    ):
        guards().judge(7, loss, norm)
    verdict = guards(on_nonfinite="skip").judge(7, loss, norm)
    assert (verdict.action, verdict.reason) == (
        "skip", f"loss={loss}, grad_norm={norm}; the update is left out, 1 by now",
    )  # fmt: skip
    verdict = guards(on_nonfinite="rollback").judge(7, loss, norm)
    assert (verdict.action, verdict.reason) == ("go back", f"loss={loss}, grad_norm={norm}")


def test_with_a_loss_scale_gradients_may_overflow_but_not_the_loss():
    for policy in ("stop", "skip", "rollback"):
        assert guards(True, on_nonfinite=policy).judge(1, 1.0, math.inf) == GO_ON
    assert guards(True).judge(1, math.nan, math.nan) == GO_ON
    assert guards(True, on_nonfinite="skip").judge(1, math.nan, 1.0).action == "skip"
    assert guards(True, on_nonfinite="rollback").judge(1, math.inf, 1.0).action == "go back"


def test_too_many_in_a_row_are_an_error():
    g = guards(on_nonfinite="skip")
    for step in range(IN_A_ROW - 1):
        assert g.judge(step, math.nan, 1.0).action == "skip"
    assert g.judge(20, 1.0, 1.0) == GO_ON
    for step in range(IN_A_ROW - 1):
        assert g.judge(30 + step, math.nan, 1.0).action == "skip"
    with pytest.raises(
        RuntimeError, match=r"a finite step among 10, got loss=nan, grad_norm=1.0 in step 40 as in"
    ):
        g.judge(40, math.nan, 1.0)
    assert g.skipped == 2 * IN_A_ROW - 1


def fed(losses, **settings):
    g = guards(**settings)
    for step, loss in enumerate(losses):
        assert g.judge(step, loss, 1.0) == GO_ON
    return g


def test_a_spike_is_so_many_spreads_over_the_median():
    # Median 3, half of the distances to it at most 1: a spread of 1.4826.
    losses = [1.0, 2.0, 3.0, 4.0, 5.0] * 6
    limit = 3 + 4 * 1.4826
    assert fed(losses, loss_spike=4.0).judge(30, limit - 1e-9, 1.0) == GO_ON
    verdict = fed(losses, loss_spike=4.0).judge(30, limit + 1e-3, 1.0)
    assert verdict.action == "go back"
    assert verdict.reason == (
        "loss=8.9314, 4.0 spreads of 1.4826 over the median 3.0000 of 30 steps"
    )
    assert fed(losses).judge(30, 1e9, 1.0) == GO_ON  # by default nothing is unusual
    assert fed(losses, loss_spike=4.0).judge(30, -1e9, 1.0) == GO_ON


def test_losses_that_hardly_differ_have_a_spread_all_the_same():
    assert fed([2.0] * 50, loss_spike=5.0).judge(50, 2.0999, 1.0) == GO_ON
    assert fed([2.0] * 50, loss_spike=5.0).judge(50, 2.1001, 1.0).action == "go back"
    assert fed([0.0] * 50, loss_spike=5.0).judge(50, 1e-9, 1.0).action == "go back"


def test_nothing_is_unusual_before_enough_steps():
    assert fed([2.0] * (ENOUGH - 1), loss_spike=5.0).judge(24, 1e9, 1.0) == GO_ON
    assert fed([2.0] * ENOUGH, loss_spike=5.0).judge(25, 1e9, 1.0).action == "go back"


def test_what_is_usual_follows_the_run_and_ignores_what_it_condemned():
    g = fed([2.0] * 50, loss_spike=5.0)
    for _ in range(60):
        assert g.judge(50, 9.0, 1.0).action == "go back"
    g = fed([9.0] * 50 + [2.0] * WINDOW, loss_spike=5.0)
    assert g.judge(200, 9.0, 1.0).action == "go back"


def test_noise_is_no_spike():
    rng = random.Random(1)
    fed([3.0 + rng.gauss(0, 0.2) + 4 * math.exp(-i / 300) for i in range(3000)], loss_spike=8.0)


def test_verdicts_go_on_from_a_checkpoint():
    rng = random.Random(2)
    losses = [3 + rng.random() for _ in range(130)]
    one = fed(losses, loss_spike=3.0, on_nonfinite="skip")
    one.judge(130, math.nan, 1.0)
    two = guards(loss_spike=3.0, on_nonfinite="skip")
    two.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert two.state_dict() == one.state_dict()
    assert len(two.state_dict()["losses"]) == WINDOW
    for loss in (3.0, 9.0, math.nan):
        assert one.judge(131, loss, 1.0) == two.judge(131, loss, 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_that_is_not_finite_reaches_every_gradient(dtype):
    for loss, finite in ((2.5, True), (math.inf, False), (math.nan, False), (-math.inf, False)):
        x = torch.ones(3, dtype=dtype, requires_grad=True)
        value = x.sum() / 3 + (torch.tensor(loss, dtype=dtype) - 1)
        (value * poison(value)).backward()
        plain = torch.ones(3, dtype=dtype, requires_grad=True)
        (plain.sum() / 3).backward()
        assert torch.equal(x.grad, plain.grad) if finite else x.grad.isnan().all()


def test_ranges_of_samples():
    assert merged([(40, 48), [8, 16], (16, 24), (42, 44), (60, 61)]) == [
        (8, 24), (40, 48), (60, 61),
    ]  # fmt: skip
    skipped = [(8, 16), (20, 24), (40, 48)]
    taken = range(0, 60)
    for first in taken:
        for count in (1, 3, 8):
            start = past(first, count, skipped)
            assert start >= first
            assert not any(a < start + count and start < b for a, b in skipped)
            # And never further than needed: the jump ends where a skipped range does.
            assert start == first or start in (16, 24, 48)
    assert past(5, 3, skipped) == 5
    assert past(5, 4, skipped) == 16
    assert past(5, 5, skipped) == 24
    assert past(48, 8, skipped) == 48
