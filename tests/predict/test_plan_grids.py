"""Grids of ranks among the layouts: which are tried, which is asked for, what is said of them."""

from dataclasses import replace

import pytest

from fastpar.axes.grid import AXIS
from fastpar.axes.step import Setup, Workload
from fastpar.cli import main
from fastpar.predict.machine import Cluster, DatasheetRates
from fastpar.predict.search import layouts, refused, search
from fastpar.settings.model import PRESETS

XL = Workload(PRESETS["gpt2-xl"], 256)


def found_on(gpus, **asked):
    cluster, template = Cluster.of("h100", gpus, None), Setup(gpus, **asked)
    options = {"limit_bytes": 70e9, "per_node": cluster.per_node, "fixed": {"pp", *asked}}
    return search(XL, template, rates=DatasheetRates(cluster, template), **options)


def grids_of(workload, template):
    ways = layouts(workload, template, 8, ("pp", "offload"))
    return [setup for setup in ways if setup.tp_grid is not None]


def grids_text(estimates):
    return AXIS.verdict(estimates, {}).removeprefix("grids    ")


@pytest.mark.parametrize("gpus", [8, 64, 1024])
def test_every_grid_divides_what_it_cuts(gpus):
    workload = Workload(PRESETS["gpt2-xl"], 4 * gpus)
    found = grids_of(workload, Setup(world_size=gpus))
    assert {(s.rows, s.tp) for s in found} >= {(2, 2), (2, 4), (4, 2)}
    assert all(s.world_size == s.dp * s.rows * s.tp and s.tp <= 8 for s in found)
    for s in found:
        assert refused(workload, replace(s, micro_batch_size=s.rows, grad_accum_steps=4)) is None


@pytest.mark.parametrize(
    "beside", [{"optimizer": "muon"}, {"moment_dtype": "int8"}, {"offload": "optimizer"}]
)
def test_what_no_grid_runs_has_none(beside):
    assert grids_of(XL, Setup(world_size=8, **beside)) == []


def test_each_micro_batch_is_shared_out():
    found = [e.setup for e in found_on(8) if e.setup.tp_grid is not None]
    assert {s.tp_grid for s in found} >= {"2x2", "2x4", "4x2"}
    assert all(s.micro_batch_size % s.rows == 0 for s in found)


def test_one_that_is_asked_for_is_the_only_one():
    assert {e.setup.tp_grid for e in found_on(8, tp_grid="2x2x2")} == {"2x2x2"}
    assert {e.setup.tp_grid for e in found_on(8, tp_grid=None)} == {None}


def test_where_a_grid_would_win_and_where_not():
    """Beside ZeRO-3 x tensor parallelism a grid waits for its exchanges."""
    found = found_on(8)
    assert found[0].setup.tp_grid is None
    assert "2x2" in grids_text(found)
    grids = [e for e in found if e.setup.tp_grid is not None]
    assert grids_text([grids[0], *found]).startswith("2x2: dp 8, ZeRO-")
    assert grids_text(grids).endswith(": without one nothing fits")
    assert grids_text(found_on(8, tp_grid=None)) == "none: no grid fits"


NARROW = ("--n-layer", "2", "--n-head", "2", "--n-embd", "24")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("3x2",), "plan: expected 6 ranks of a grid to divide gpus=8, got tp_grid=3x2; change"),
        (("2x2", "--batch-size", "6"), "plan: expected batch_size as a multiple of 4, which data"),
        (("16x1", *NARROW), "expected rows and columns of tp_grid to divide n_embd=24, got tp_g"),
        (
            ("1x4", *NARROW),
            "plan: expected tp_grid of at most n_head=2 columns, got tp_grid",
        ),
        (("2x2", "--pp", "2"), "--tp-grid does not run with --pp; drop one"),
        (("2x2", "--optimizer", "muon"), "--tp-grid does not run with --optimizer muon; drop"),
        (("2x2", "--measure"), "plan: expected no measure with tp_grid=2x2, whose exchanges it"),
    ],
    ids=lambda value: "-".join(value).strip("-") if isinstance(value, tuple) else "",
)
def test_a_grid_that_does_not_fit_is_named(words, said, capsys):
    assert main(["plan", "--tp-grid", *words]) == 2
    assert said in capsys.readouterr().err
