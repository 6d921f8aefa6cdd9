"""Formats on the wire in every other layout: tp, pp, cp, ep, recomputation, accumulation, compile.

With a format that loses nothing a run has the bits of the same layout without formats: every
gradient that is sent arrives, at its place, once. With real ones two runs are alike.
"""

import pytest
import torch
from cells import covering, slow
from test_wired_engine import distance, same

import fastpar
from fastpar.checkpoint.restore import load_checkpoint
from fastpar.checkpoint.saver import save_checkpoint
from fastpar.comm.wires import FORMATS, WireFormat
from fastpar.nn.recompute import recompute
from fastpar.settings.model import GPTConfig
from fastpar.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
LOSSLESS = WireFormat("int8", torch.float32, 32)
STEPS = 2
# Layout -> ranks, axes, further options.
LAYOUTS = {
    "tp": (4, {"tp": 2}, {}),
    "grid": (4, {"tp_grid": (1, 2)}, {}),
    "grid of rows": (8, {"tp_grid": (2, 2)}, {}),
    "tokens shared out": (4, {"tp": 2}, {"sequence_parallel": True}),
    "pp": (4, {"pp": 2}, {}),
    "pp, zb-v": (4, {"pp": 2}, {"schedule": "zb-v"}),
    "cp": (2, {"cp": 2}, {}),
    "cp by keys": (2, {"cp": 2}, {"cp_method": "keys"}),
    "ep": (4, {"ep": 2}, {}),
    "tp and cp": (4, {"tp": 2, "cp": 2}, {"cp_method": "keys"}),
    "recomputation": (2, {}, {}),
    "accumulation": (2, {}, {"grad_accum_steps": 2}),
    "accumulation, whole": (2, {}, {"grad_accum_steps": 2, "accumulate": "full"}),
    "copies": (4, {"replicas": 2}, {"shard_size": 2}),
}
# Two axes that have ranks beside each other.
PAIRS = {
    "dp and tp": (4, {"tp": 2}, {}),
    "dp and cp": (4, {"cp": 2}, {}),
    "dp and ep": (4, {"ep": 2}, {}),
    "dp and pp": (4, {"pp": 2}, {}),
    "tp and cp": (4, {"tp": 2, "cp": 2}, {"cp_method": "keys"}),
    "tp and ep": (4, {"tp": 2, "ep": 2}, {}),
    "tp and pp": (4, {"tp": 2, "pp": 2}, {}),
    "cp and ep": (4, {"cp": 2, "ep": 2}, {}),
    "cp and pp": (4, {"cp": 2, "pp": 2}, {}),
    "ep and pp": (4, {"ep": 2, "pp": 2}, {}),
    "dp and rows": (4, {"tp_grid": (2, 1)}, {}),
    "rows and tp": (4, {"tp_grid": (2, 2)}, {}),
    "depth and tp": (4, {"tp_grid": (1, 2, 2)}, {}),
    "partial sums": (4, {"tp": 2}, {"sequence_parallel": True}),
    "dp and copies": (4, {}, {"shard_size": 2}),
}
OF = {**LAYOUTS, **PAIRS}
WIRES = {
    "int8": {"wire_gradients": "int8"},
    "int4, fed back": {"wire_gradients": "int4", "error_feedback": True},
    "int8 both": {"wire_gradients": "int8", "wire_weights": "int8"},
}


def rows(step, mesh):
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(64, (8, 17), generator=draw, device="cpu")
    n = 8 // mesh.dp_size
    mine = tokens[mesh.dp_rank * n :][:n]
    return mine[:, :-1].contiguous(), mine[:, 1:].contiguous()


def start(layout):
    shape = {"n_expert": 4, "top_k": 2} if "ep" in OF[layout][1] else {}
    n_layer = 4 if "pp" in OF[layout][1] else 2
    return fastpar.GPT(GPTConfig(n_layer, 2, 40, 16, 64, dropout=0.0, **shape), seed=0)


def train(layout, stage, wire):
    """This rank's whole weights, and the bytes that were sent and announced."""
    return train_on(start(layout), layout, stage, wire)


def train_on(model, layout, stage, wire, dtype=torch.float32, device="cpu"):
    """train() of this model, under other defaults of torch."""
    torch.set_default_dtype(dtype)  # of all ranks, which are threads
    with torch.device(device):
        return _train(model, layout, stage, wire)


def _train(model, layout, stage, wire):
    model, optimizer = parallel(model, layout, stage, wire)
    return steps(model, optimizer, layout, 0, STEPS), fastpar.engine_of(model).report.wire_bytes


def parallel(model, layout, stage, wire):
    _, axes, options = OF[layout]
    options = {**options, **wire}
    debug = options.pop("debug", None)
    if options.get("error_feedback") and stage > 1:
        options["error_buffer"] = options.pop("error_feedback")
    if layout == "recomputation":
        recompute(model, "full")
    small = {"bucket_mb": 0.02, "first_bucket_mb": 0.01}
    mesh = fastpar.Mesh(**axes)
    model = fastpar.parallelize(
        model, mesh, fastpar.Parallel.of(zero_stage=stage, **small, **options), debug=debug
    )
    return model, fastpar.AdamW(model.parameters(), lr=1e-2, eps=1e-3, max_grad_norm=1.0)


def steps(model, optimizer, layout, first, last):
    """Steps first to last; this rank's whole weights."""
    options, engine = OF[layout][2], fastpar.engine_of(model)
    schedule, micro = options.get("schedule", "1f1b"), options.get("grad_accum_steps", 1)
    for step in range(first, last):
        for part in range(micro):
            x, y = rows(step * micro + part, engine.mesh)
            if engine.mesh.size("pp") > 1:
                fastpar.pipeline_step(model, x, y, micro_batches=2, schedule=schedule)
            else:
                model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.check_replicas(optimizer)
    return {name: p.clone() for name, p in model.state_dict().items() if p.is_floating_point()}


@covering(1, ("layout", list(LAYOUTS)), ("stage", [0, 1, 2, 3]))
def test_what_loses_nothing_changes_no_bit(layout, stage, monkeypatch):
    stage = stage or int(layout == "copies")
    plain = run_ranks(train, LAYOUTS[layout][0], layout, stage, {})
    monkeypatch.setitem(FORMATS, "int8", LOSSLESS)
    wired = run_ranks(train, LAYOUTS[layout][0], layout, stage, WIRES["int8"])
    for (a, _), (b, _) in zip(plain, wired):
        assert same(a, b)


@covering(1, ("layout", list(LAYOUTS)), ("stage", [0, 1, 2, 3]), ("wire", list(WIRES)))
def test_two_runs_are_alike_and_near_the_one_without(layout, stage, wire):
    options = dict(WIRES[wire])
    if stage == 0:
        options.pop("wire_weights", None)
    ranks = LAYOUTS[layout][0]
    one, two, plain = (run_ranks(train, ranks, layout, stage, o) for o in (options, options, {}))
    begin = start(layout).state_dict()
    for (a, sent), (b, _), (c, usual) in zip(one, two, plain):
        assert same(a, b)
        assert sent < usual
        assert 0 < distance(a, c) < 0.6 * distance(c, begin)


@covering(1, ("layout", ["tp", "pp, zb-v", "tp and cp", "ep", "copies"]), ("stage", [0, 1, 2, 3]))
def test_the_defaults_of_torch_change_no_bit(layout, stage):
    wire = {} if stage == 0 else {**WIRES["int4, fed back"], "wire_weights": "int8"}
    ranks, arguments = LAYOUTS[layout][0], (layout, stage or int(layout == "copies"), wire)
    plain = run_ranks(train, ranks, *arguments)
    models = [start(layout) for _ in range(ranks)]
    try:
        other = run_ranks(
            lambda *args: train_on(models.pop(), *args), ranks, *arguments, torch.bfloat16, "meta"
        )
    finally:
        torch.set_default_dtype(torch.float32)
    for (a, sent), (b, also_sent) in zip(plain, other):
        assert same(a, b)
        assert sent == also_sent


def resumed(layout, stage, wire, folder, load):
    """Two steps behind a checkpoint: it is written after two steps, or loaded."""
    model, optimizer = parallel(start(layout), layout, stage, wire)
    if load:
        load_checkpoint(folder / "latest", model=model, optimizer=optimizer)
    else:
        steps(model, optimizer, layout, 0, 2)
        save_checkpoint(folder, step=2, model=model, optimizer=optimizer)
    return steps(model, optimizer, layout, 2, 4)


@covering(1, ("layout", list(PAIRS)), ("stage", [0, 1, 2, 3]))
def test_a_checkpoint_of_every_pair_of_axes_goes_on_with_the_same_bits(layout, stage, tmp_path):
    stage, ranks = stage or int("copies" in layout), OF[layout][0]
    wire = {**WIRES["int4, fed back"], **({"wire_weights": "int8"} if stage else {})}
    whole, again = (
        run_ranks(resumed, ranks, layout, stage, wire, tmp_path, load) for load in (False, True)
    )
    assert all(map(same, whole, again))


def compiled(stage, wire):
    """A run with every block compiled; in processes, because dynamo's state belongs to one."""
    torch._dynamo.reset()
    mesh = fastpar.Mesh()
    model = fastpar.parallelize(
        start("tp"), mesh, fastpar.Parallel.of(zero_stage=stage, bucket_mb=0.02, **wire)
    )
    for block in model.h:
        block.compile(backend="aot_eager")
    optimizer = fastpar.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    for step in range(STEPS):
        model(*rows(step, mesh)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.clone() for name, p in model.state_dict().items()}


def plainly(stage, wire):
    """The same without torch.compile."""
    block, original = torch.nn.Module.compile, None
    torch.nn.Module.compile = lambda *args, **kwargs: original
    try:
        return compiled(stage, wire)
    finally:
        torch.nn.Module.compile = block


@pytest.mark.parametrize("stage", [slow(1), slow(3)])
def test_compiled_blocks_send_the_same(stage):
    """aot_eager computes as eager does: the codes, and so the bits, are the same."""
    wire = WIRES["int8 both"]
    one, two = (run_ranks(each, 2, stage, wire, backend="gloo") for each in (compiled, plainly))
    for a, b in zip(one, two):
        assert same(a, b)
