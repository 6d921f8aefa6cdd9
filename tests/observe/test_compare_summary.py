"""Words beside constructed numbers: each claim is made only where they prove it."""

import pytest
from test_compare_results import make_comparison, make_run, orders

from fastpar.observe.report import listed, number, summary
from fastpar.observe.results import Run


def repeats(name, *step_s, **more):
    return [make_run(name, n + 1, step_s=s, **more) for n, s in enumerate(step_s)]


def words_of(*runs, **more):
    return "\n".join(summary(make_comparison(*runs, **more)))


def test_the_fastest_by_a_clear_margin():
    text = words_of(*repeats("dp", 0.1, 0.101, 0.102), *repeats("ddp", 0.2, 0.201, 0.19))
    assert (
        "Fastest: dp, 5,069 tokens/s (5,020 to 5,120 in 3 repeats); next is ddp with 2,560, "
        "49.5 % less, and no repeat of another strategy comes up to any of its own." in text
    )


def test_no_difference_beyond_the_spread():
    text = words_of(
        *repeats("dp", 0.1, 0.11, 0.12),
        *repeats("ddp", 0.105, 0.115, 0.125),
        *repeats("zero1", 0.12, 0.13, 0.14),
        *repeats("zero3", 0.2, 0.2, 0.2),
    )
    assert "Fastest: no difference beyond the spread of repeats between dp, ddp and zero1." in text
    assert "comes up to" not in text.partition("Smallest")[0]


def test_one_run_each_proves_no_order():
    text = words_of(make_run("dp"), make_run("ddp", step_s=0.2))
    assert "Fastest in one run each, which proves no order: dp, 5,120 tokens/s (one run)" in text
    assert "Fastest: dp" not in text


def test_the_smallest_has_the_least_memory():
    big, small = (repeats(n, 0.1, 0.1, memory=m) for n, m in (("dp", 60e6), ("zero3", 40e6)))
    text = words_of(*big, *small)
    assert "Smallest: zero3, 40 MB (40 to 40 in 2 repeats); next is dp with 60, 50.0 % more" in text
    assert "Memory is peak resident memory above that before the model was made" in text


def test_one_strategy_is_compared_with_nothing():
    text = words_of(make_run("dp"))
    assert "Only dp was measured: 5,120 tokens/s (one run)." in text
    assert "difference of loss" not in text


def test_the_gain_over_one_rank():
    runs = [make_run("single", step_s=0.15), make_run("dp"), make_run("zero1", step_s=0.2)]
    assert "With 2 ranks dp trains 1.50 times as fast as single, which is one rank" in words_of(
        *runs
    )
    assert "times as fast" not in words_of(make_run("dp"), make_run("zero1"))


@pytest.mark.parametrize("nudge", [0.0, 3e-5, 5e-5])
def test_losses(nudge):
    text = words_of(make_run("single"), make_run("dp", nudge=nudge), *orders(1e-5))
    assert ("MORE THAN ROUNDING, from step 1 on, where" in text) == (nudge > 4e-5)
    assert ("In every step that is within rounding" in text) == (nudge < 4e-5)
    assert f"two strategies is {nudge:.2g}, in step" in text


def test_losses_without_a_yardstick_are_not_judged():
    text = words_of(make_run("single"), make_run("dp", nudge=1.0))
    assert "Whether that is rounding is not known: single was not run in two orders." in text
    assert "within rounding" not in text


def test_repeats_that_differ_are_named():
    same = repeats("single", 0.1, 0.1)
    assert "Repeats of one strategy gave the same losses to the last bit." in words_of(*same)
    other = [make_run("dp"), make_run("dp", 2, nudge=1e-6)]
    text = words_of(*same, *other)
    assert "Repeats of dp differed in their losses, by 1e-06 at most; those of the others" in text
    assert "Repeats differed in their losses, by 1e-06 at most." in words_of(*other)


def test_what_is_missing_is_said():
    failed = Run("ddp", 1, 2, 1, 4, 1, error="rank 1: RuntimeError: no")
    skipped = {"deepspeed1": "deepspeed is not installed"}
    text = words_of(make_run("dp"), failed, skipped=skipped, complete=False)
    assert "Skipped: deepspeed1 (deepspeed is not installed)." in text
    assert "Failed: ddp (rank 1: RuntimeError: no)." in text
    assert "The comparison was stopped before all of its runs." in text
    text = words_of(failed)
    assert text.startswith("No run ended well: nothing was measured.")


def test_numbers_and_lists():
    assert [number(x) for x in (21300.4, 481.23, 48.12, 0.01234, 0.0)] == [
        *("21,300", "481.2", "48.1", "0.0123", "0"),
    ]
    assert [listed(list(x)) for x in ("a", "ab", "abc")] == ["a", "a and b", "a, b and c"]


def test_experts_beside_a_dense_model_at_equal_tokens_and_at_equal_time():
    """20 steps each; the dense one is twice as fast, and done when the other has done ten."""
    dense = make_run("dp", step_s=0.1, losses=[4.0 - 0.1 * i for i in range(20)])
    sparse = make_run("experts", step_s=0.2, losses=[4.0 - 0.12 * i for i in range(20)])
    text = words_of(dense, sparse)
    assert "experts has experts in the place of MLPs and takes as many flops a token as dp" in text
    assert "it trains 0.50 times as fast." in text
    # Means of the last two of 20 steps: 4 - 0.1 * 18.5, 4 - 0.12 * 18.5; after ten 4 - 0.12 * 8.5.
    assert "At equal tokens the loss of experts is 1.7800 beside 2.1500, 0.3700 lower (m" in text
    assert "after 10 steps of experts and 20 of dp, it is 2.9800 beside 2.1500, 0.8300 high" in text
    assert "All runs have one seed" in text
    assert "difference of loss between two strategies" not in text  # they are different models
    assert "experts in the place" not in words_of(dense)
