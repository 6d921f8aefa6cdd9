"""Compressed gradients and weights, and secondary shards, with lossy formats.

Two runs are alike, send less, and are not far from the run without. That every
gradient that is sent arrives, at its place, once, is shown by a format that loses nothing:
tests/contracts/test_same_run.py, `wire`.
"""

from collections import Counter
from types import SimpleNamespace

import pytest
import same_run
import torch
from cells import slow
from same_run import Loop, build, of_row, parallel_model, passes

import fastpar
from fastpar.checkpoint import saver
from fastpar.checkpoint.restore import load_checkpoint
from fastpar.checkpoint.saver import save_checkpoint
from fastpar.optim.schedule import AveragedWeights
from fastpar.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
SECOND = {"node_size": 2, "secondary_shards": True}
LAYOUTS = {  # rows of test_same_run.py
    "one": {}, "dp": {"dp": 2}, "more of dp": {"dp": 4}, "tp": {"dp": 2, "tp": 2},
    "pp": {"dp": 2, "pp": 2, "schedule": "interleaved", "accum": "shard_2"},
    "cp by keys": {"cp": 2, "method": "keys"},
    "ep": {"dp": 4, "ep": 2, "model": "balance", "time": 8},
    "accumulation, whole": {"dp": 2, "accum": "full_2"}, "copies": {"dp": 4, "shard_size": 2},
}  # fmt: skip
WIRES = {
    "bf16": {"wire_gradients": "bf16"},
    "int8": {"wire_gradients": "int8"},
    "int8 both": {"wire_gradients": "int8", "wire_weights": "int8"},
}


def row_of(layout, stage):
    return of_row({**LAYOUTS[layout], "stage": stage, "clip": True})


def start(layout, stage, wire):
    """A rank's loop before the first step."""
    options = {**wire}
    if stage == 0:
        options.pop("wire_weights", None)
    layout, program = row_of(layout, stage)
    model = parallel_model(layout, program, options, 0)
    return Loop(program, layout, model, model)


def advance(loop, first, last, each=lambda model: None):
    """Steps first to last; this rank's whole weights. each: before each step."""
    for step in range(first, last):
        each(loop.model)
        passes(loop, step)
        loop.step()
    fastpar.engine_of(loop.model).check_replicas(loop.optimizer)
    state = loop.model.state_dict()
    return {name: p.clone() for name, p in state.items() if p.is_floating_point()}


def train(layout, stage, wire, each=lambda model: None):
    """Whole weights, bytes that were sent, memory."""
    loop = start(layout, stage, wire)
    found, engine = advance(loop, 0, 2, each), fastpar.engine_of(loop.model)
    return found, engine.report.wire_bytes, engine.memory()


def runs(layout, stage, wire, **more):
    ranks = row_of(layout, stage)[0].ranks
    return run_ranks(lambda: train(layout, stage, wire, **more), ranks)


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


def distance(a, b):
    return sum((a[name] - b[name]).norm() ** 2 for name in a) ** 0.5


CELLS = [
    *(("dp", 0, "bf16"), ("dp", 3, "int8 both"), ("more of dp", 1, "int8")),
    *(("tp", 3, "int8 both"), ("pp", 2, "bf16")),
    *(slow("cp by keys", 1, "int8 both"), slow("ep", 3, "int8"), slow("ep", 0, "int8")),
    *(
        slow("accumulation, whole", 2, "int8 both"),
        slow("copies", 3, "int8"),
        slow("tp", 0, "int8"),
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "stage", "wire"), CELLS)
def test_two_runs_are_alike_and_near_the_one_without(layout, stage, wire):
    one, two = (runs(layout, stage, WIRES[wire]) for _ in range(2))
    plain = runs(layout, stage, {})
    begin = build(row_of(layout, stage)[1], 0).state_dict()
    for (a, sent, _), (b, *_), (c, usual, *_) in zip(one, two, plain):
        assert same(a, b)
        assert sent < usual
        assert 0 < distance(a, c) < 0.6 * distance(c, begin)
        if LAYOUTS[layout].keys() <= {"dp", "accum", "shard_size"}:
            assert same(a, one[0][0])


@pytest.mark.slow
def test_experts_in_fp32_have_the_bits_of_the_run_without():
    """test_same_run.py has them in fp64, which no format sends and no checkpoint has."""
    row = {"dp": 4, "ep": 2, "stage": 1, "model": "balance", "time": 8, "clip": True}
    plain = same_run.run(*of_row(row))
    for more in ({"wire": "gradients"}, {"wire": "weights"}, {"resumed": True}):
        for a, b in zip(plain, same_run.run(*of_row({**row, **more})), strict=True):
            assert same(a["parameters"], b["parameters"]), more


def resumed(layout, stage, wire, folder, load):
    """Two steps behind a checkpoint: it is written after two steps, or loaded."""
    loop = start(layout, stage, wire)
    held = {"model": loop.model, "optimizer": loop.optimizer}
    if load:
        load_checkpoint(folder / "latest", **held)
    else:
        advance(loop, 0, 2)
        save_checkpoint(folder, step=2, **held)
    return advance(loop, 2, 4)


def test_a_run_goes_on_with_the_random_bits_of_its_checkpoint(tmp_path, monkeypatch):
    """A checkpoint of a version with error feedback has entries that are dropped, with a line."""
    of = ("dp", 1, WIRES["int8"], tmp_path)
    now = saver.wires_of
    old = {"wire_error_0123abcd_0": SimpleNamespace(calls=7)}
    monkeypatch.setattr(saver, "wires_of", lambda *given: {**now(*given), **old})
    whole = run_ranks(resumed, 2, *of, False)
    with pytest.warns(UserWarning, match="compression errors in .* discarded, because this versi"):
        again = run_ranks(resumed, 2, *of, True)
    assert all(map(same, whole, again))
    assert not same(whole[0], run_ranks(resumed, 2, "dp", 1, {}, tmp_path, True)[0])


def look(model):
    engine = fastpar.engine_of(model)
    with engine.gathered():
        before = model.h[0].mlp.c_fc.weight.clone()
        with engine.gathered():
            assert torch.equal(model.h[0].mlp.c_fc.weight, before)
    model.state_dict()


@pytest.mark.parametrize("stage", [1, slow(2), 3])
def test_looking_at_weights_changes_nothing(stage):
    """Forwards have rounded weights, the optimizer and whoever asks for them the exact ones."""
    wire = {"wire_weights": "int8"}
    (one, *_), (two, *_) = (runs("dp", stage, wire, each=e)[0] for e in (lambda model: None, look))
    assert same(one, two)
    assert not same(one, runs("dp", stage, {})[0][0])


@pytest.mark.slow
def test_processes_have_the_bits_of_threads():
    for stage, wire in ((1, WIRES["int8 both"]), (3, WIRES["int8 both"]), (0, WIRES["int8"])):
        two = run_ranks(train, 2, "dp", stage, wire, backend="gloo")
        assert same(runs("dp", stage, wire)[0][0], two[0][0])


def test_one_rank_sends_nothing():
    assert same(*(runs("one", 1, wire)[0][0] for wire in (WIRES["int8 both"], {})))


def averaged(options):
    """Losses with the weights, with their average, and with the weights again."""
    loop = start("more of dp", 3, options)
    average, given = AveragedWeights(loop.optimizer, 0.9), loop.given(9, 0)
    for step in range(3):
        advance(loop, step, step + 1)
        average.update(step + 1)
    with torch.no_grad():
        losses = [loop.model(**given).item()]
        with average.in_the_model():
            losses.append(loop.model(**given).item())
        return [*losses, loop.model(**given).item()]


@pytest.mark.slow
def test_weights_that_are_exchanged_are_gathered_anew():
    found = run_ranks(averaged, 4, SECOND)[0]
    assert found == run_ranks(averaged, 4, {})[0]
    assert found[0] == found[2] != found[1]


def crossed(options, micro):
    """Bytes of weights that a rank gathers over all ranks, and in its node, in a step."""
    loop, bytes_of = start("more of dp", 3, options), Counter()

    def note(name):
        return lambda group, op, n_bytes, begin: bytes_of.update({name: n_bytes}) or begin()

    groups = fastpar.engine_of(loop.model).buckets[0].groups
    for name in ("gather", "node") if options else ("gather",):
        getattr(groups, name).observers += (note(name),)
    for _ in range(micro):
        passes(loop, 0)
    return bytes_of


@pytest.mark.slow
def test_weights_cross_between_nodes_once_a_step():
    """The forward's first gather does, whatever number of passes follows; the rest stays inside."""
    (once, many), plain = (
        [run_ranks(crossed, 4, options, micro)[0] for micro in (1, 3)] for options in (SECOND, {})
    )
    assert 0 < once["gather"] == many["gather"] < plain[0]["gather"] < plain[1]["gather"]
    assert 0 < once["node"] < many["node"]
    (_, _, memory), (*_, usual) = (runs("more of dp", 3, o)[0] for o in (SECOND, {}))
    own = memory.pop("secondary shards")
    assert memory == usual
    assert own == 2 * memory["parameter shards"]  # of 4 ranks: half instead of a quarter
