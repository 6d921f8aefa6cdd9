"""The roofline: where a dot is, what the roof is, and numbers that do not collide."""

import pytest
from test_records import make_row

from bench.report import roofline
from bench.report.roofline import Ceiling, ceiling_of, dot_of, dots_of


def attention(variant="fastpar", direction="forward", ms=2.0, **more):
    """16 heads' worth of 8 MFLOP in 2 ms."""
    return make_row(
        bench="attention", case="attention B=2 H=8 T=256 D=64", direction=direction,
        variant=variant, median_ms=ms, gb_per_s=None, tflop_per_s=0.25, dtype="float32",
        ceiling="matmul fp32 1536^3 0.4 TFLOP/s", **more,
    )  # fmt: skip


def norm(variant="fastpar", n=2048, ms=0.5, gb_per_s=20.0, **more):
    return make_row(
        bench="layer_norm", case=f"layer_norm N={n} C=768", direction="forward", variant=variant,
        median_ms=ms, gb_per_s=gb_per_s, dtype="float32", ceiling="copy 40 GB/s", **more,
    )  # fmt: skip


def test_a_row_that_knows_its_bytes_has_flops_of_its_formula():
    dot = dot_of(norm())
    moved, flops = 20.0 * 0.5e6, 8 * 2048 * 768
    assert dot.intensity == pytest.approx(flops / moved)
    assert dot.tflop_per_s == pytest.approx(flops / 0.5e9)


def test_a_row_that_knows_its_flops_has_the_bytes_of_its_tensors():
    tensor = 2 * 8 * 256 * 64 * 4
    flops = 0.25 * 2.0 * 1e9
    for direction, tensors in (("forward", 4), ("backward", 8), ("forward+backward", 12)):
        dot = dot_of(attention(direction=direction))
        assert dot.intensity == pytest.approx(flops / (tensors * tensor))
        assert dot.tflop_per_s == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("bench", "case", "direction", "size"),
    [
        ("linear_cross_entropy", "x N=10 C=3 V=7", "forward", (10 + 7) * 3 * 2),
        ("linear_cross_entropy", "x N=10 C=3 V=7", "forward+backward", 2 * (10 + 7) * 3 * 2),
        ("linear", "linear qkv N=10 3->7", "forward", (30 + 21 + 70) * 2),
        ("linear", "linear qkv N=10 3->7", "forward+backward", 3 * (30 + 21 + 70) * 2),
        ("attention", "attention of nothing", "forward", None),
    ],
)
def test_least_bytes(bench, case, direction, size):
    row = make_row(bench=bench, case=case, direction=direction, dtype="bfloat16")
    assert roofline.least_bytes(row) == size


def test_pairs_are_of_fastpar_and_the_fastest_other_and_the_rest_is_said():
    rows = [
        norm(),
        norm("fastpar in place", ms=0.1),
        norm("eager", ms=2.0),
        norm("torch.compile", ms=1.0),
        make_row(bench="bucket", case="pack 148 tensors", variant="fastpar", gb_per_s=1.0),
        norm(n=1, ms=None),
        make_row(bench="train", variant="fastpar", gb_per_s=1.0),
    ]
    pairs, left = dots_of(rows)
    ((mine, other),) = pairs
    assert (mine.variant, other.variant) == ("fastpar", "torch.compile")
    assert left == ["bucket"]


def test_the_roof_is_from_the_lowest_to_the_highest_ceiling():
    rows = [norm(), norm("eager"), attention()]
    rows[1].ceiling = "copy 25.5 GB/s"
    assert ceiling_of(rows) == Ceiling((25.5, 40.0), (0.4, 0.4))
    assert ceiling_of(rows[:2]) is None
