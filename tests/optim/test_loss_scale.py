"""DynamicLossScale: growth, back-off, limits, and a saved state."""

import pytest

from fastpar.optim.schedule import DynamicLossScale


def test_it_grows_after_enough_finite_steps_and_halves_on_overflow():
    scale = DynamicLossScale(init=8.0, growth_interval=3)
    seen = []
    for overflow in (False, False, True, False, False, False, False):
        scale.update(overflow)
        seen.append(scale.scale)
    assert seen == [8.0, 8.0, 4.0, 4.0, 4.0, 8.0, 8.0]


def test_it_stays_within_its_limits():
    scale = DynamicLossScale(init=8.0, growth_interval=1, min_scale=3.0, max_scale=20.0)
    for _ in range(5):
        scale.update(False)
    assert scale.scale == 20.0
    for _ in range(3):
        scale.update(True)
    assert scale.scale == 3.0
    with pytest.raises(RuntimeError, match=r"got an overflow at scale=3\.0; the run diverges"):
        scale.update(True)


def test_a_saved_state_continues():
    a = DynamicLossScale(init=8.0, growth_interval=3)
    a.update(True)
    a.update(False)
    a.update(False)
    b = DynamicLossScale(growth_interval=3)
    b.load_state_dict(a.state_dict())
    a.update(False)
    b.update(False)
    assert a.scale == b.scale == 8.0
    assert a.state_dict() == b.state_dict()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init": 0.5}, r"expected 0 < min_scale=1\.0 <= init <= max_scale=.*, got init=0\.5"),
        ({"init": 2.0**30}, r"got init=1073741824\.0"),
        ({"min_scale": 0.0}, r"expected 0 < min_scale=0\.0"),
        (
            {"growth_interval": 0},
            r"expected an integer growth_interval >= 1, got .*=0",
        ),
        ({"growth_interval": 1.5}, r"expected an integer growth_interval >= 1, got .*=1\.5"),
        ({"init": float("inf"), "max_scale": float("inf")}, r"init finite, got init=inf"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        DynamicLossScale(**options)


@pytest.mark.parametrize("value", [0.0, float("nan"), 2.0**40])
def test_a_foreign_state_is_refused(value):
    with pytest.raises(ValueError, match=r"expected a scale in \[1\.0, 16777216\.0\], got scale="):
        DynamicLossScale().load_state_dict({"scale": value, "finite_steps": 0})
