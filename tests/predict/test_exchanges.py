"""What a step sends, as predicted, beside what a real engine begins: kinds, bytes, ranks."""

import sys
from collections import Counter
from itertools import combinations, product

import pytest
import torch
from cells import few, slow
from lone_rank import LoneRun

from fastpar import GPT, engine_of
from fastpar.axes.data import buckets_of
from fastpar.axes.step import Setup, Workload
from fastpar.predict.time import comm_ops_of
from fastpar.settings.mesh import parse_grid
from fastpar.settings.model import GPTConfig

DENSE = GPTConfig(n_layer=3, n_head=4, n_embd=64, block_size=32, vocab_size=500, dropout=0.0)
GROUPED = GPTConfig(3, 4, 64, 32, 500, dropout=0.0, n_kv_head=2)
# Chosen equally often, as the prediction has it.
EXPERTS = GPTConfig(3, 4, 64, 32, 500, dropout=0.0, n_expert=4, top_k=4, expert_hidden=64)
LAYOUTS = {  # what parallelize() and the mesh are told
    "dp": {"world_size": 4},
    "small buckets": {"world_size": 4, "bucket_mb": 0.02},
    "copies": {"world_size": 4, "shard_size": 2},
    "tp": {"world_size": 4, "tp": 4},
    "tp of shared keys": {"world_size": 8, "tp": 4},
    "tp of whole tokens": {"world_size": 4, "tp": 2, "sequence_parallel": False},
    **{f"cp by {way}": {"world_size": 4, "cp": 2, "cp_method": way} for way in ("heads", "keys")},
    **{f"cp 3 by {way}": {"world_size": 6, "cp": 3, "cp_method": way} for way in ("heads", "keys")},
    "cp x tp": {"world_size": 8, "cp": 2, "tp": 2},
    **{
        f"grid {grid}": {"world_size": 2 * ranks, "tp_grid": grid}
        for grid, ranks in (("1x2", 2), ("2x1", 2), ("2x2", 4), ("4x2", 8), ("2x2x2", 8))
    },
    "ep": {"world_size": 4, "ep": 2},
}  # fmt: skip
MODES = ("none", "selective", "full")
AXES = ("tp", "cp", "ep", "tp_grid")
OF_ROLES = {"gather": "shard", "replicate": "copies"}


def shape_of(layout):
    return {"ep": EXPERTS, "tp of shared keys": GROUPED}.get(layout, DENSE)


def rows_of(layout):
    """Of three sequences cp pads heads and tokens; rows of a grid share out four."""
    return 4 if "grid" in layout else 3


def setup_of(layout, stage, mode, steps, accumulate):
    return Setup(
        **LAYOUTS[layout], zero_stage=stage, activation_checkpointing=mode,
        grad_accum_steps=steps, accumulate=accumulate, micro_batch_size=rows_of(layout),
        dtype="fp32", device_type="cpu", transport="nccl",
    )  # fmt: skip


def said(layout, stage, mode, steps, accumulate):
    """Of the second step of a real rank, the first of a mesh whose others do not exist."""
    options, shape = dict(LAYOUTS[layout]), shape_of(layout)
    world_size = options.pop("world_size")
    axes = {name: options.pop(name) for name in AXES if name in options}
    axes["tp_grid"] = parse_grid(axes.get("tp_grid"))
    options.update(zero_stage=stage, grad_accum_steps=steps, accumulate=accumulate)
    idx = torch.arange(rows_of(layout) * shape.block_size).view(-1, shape.block_size)
    idx = idx % shape.vocab_size

    with LoneRun(lambda: GPT(shape), (idx, idx), world_size, 0, axes, mode, **options) as run:
        run.train(steps)
        ops = [op for phase in run.train(steps) for op in phase]
        return ops, engine_of(run.model), sum(p.numel() for p in run.model.parameters())


def axis_of(op):
    if op.role == "reduce":
        return {"all_reduce": "dp", "all_gather": "control"}.get(op.kind, "shard")
    return OF_ROLES.get(op.role, op.role)


STEPS = ((1, "full"), (3, "full"), (3, "shard"))
CELLS = [
    (layout, stage, mode, *steps)
    for layout, stage, mode, steps in product(LAYOUTS, range(4), MODES, STEPS)
    if ("wire" not in layout or (stage == 3 and mode != "selective"))
    and (stage or layout != "copies")
    and (stage != 1 or steps[1] == "full")
]
EACH = few(CELLS, lambda cell: {cell[:1], *combinations(enumerate(cell[1:]), 2)})
PAIRS = few(CELLS, lambda cell: set(combinations(enumerate(cell), 2)))


def check(*cell):
    setup, (ops, engine, local) = setup_of(*cell), said(*cell)
    workload = Workload(shape_of(cell[0]), setup.dp * setup.micro_batch_size * cell[3])
    found, predicted = Counter(), Counter()
    for op in ops:
        found[axis_of(op), op.kind, float(op.tensor_bytes), op.world_size, op.stride] += 1
    for c in comm_ops_of(workload, setup):
        predicted[c.axis, c.kind, float(c.bytes), c.ranks, c.stride] += c.count
    # What experts and scales add to the words of ranks is left out; partial sums of pieces differ
    # from rank to rank, and an engine has them once a step or once a micro-batch.
    apart = set()
    if setup.mesh.ep > 1 or setup.flags.system.fp8 != "none":
        apart.add("control")
    cuts_tokens = setup.mesh.tp_grid is not None or (setup.tp > 1 and setup.sequence_parallel)
    if cuts_tokens and (setup.n_shards > 1 or setup.grad_accum_steps > 1):
        apart.add(("tp", "all_reduce"))
    for counter in (found, predicted):
        for key in [key for key in counter if apart & {key[0], key[:2]}]:
            del counter[key]
    assert found == predicted, cell
    kinds = buckets_of(workload, setup).kinds
    if setup.n_shards > 1 and setup.mesh.ep == 1:
        padded = sorted(kind.padded(setup.n_shards) for kind in kinds.elements())
        assert padded == sorted(bucket.spec.numel for bucket in engine.buckets)
    if setup.mesh.tp_grid is None and setup.mesh.ep == 1:
        assert buckets_of(workload, setup).elements == local


@pytest.mark.parametrize("cells", [EACH, slow(PAIRS)], ids=["each", "pairs"])
def test_every_layout_sends_what_is_predicted(cells):
    for cell in cells:
        check(*cell)


@pytest.mark.slow
@pytest.mark.parametrize("width", [64, 192])
def test_many_units_of_the_same_size(width, monkeypatch):
    shape = GPTConfig(11, 4, width, 32, 500, dropout=0.0)
    for mb in (0.3, 2.0):
        monkeypatch.setitem(LAYOUTS, "many", {"world_size": 2, "bucket_mb": mb})
        monkeypatch.setattr(sys.modules[__name__], "DENSE", shape)
        check("many", 3, "none", 1, "full")
