"""Pipeline stages are the same run as one process: in fp64 and, deterministic, to the bit."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from cells import few

from fastpar import GPT, Adafactor, AdamW, GPTConfig, Mesh, engine_of, parallelize, pipeline_step
from fastpar.axes.pipeline.schedules import chunks_of, held_of, make_schedule
from fastpar.comm.collectives import Collectives
from fastpar.engine import pipeline_step as pipeline
from fastpar.engine.engine import Engine
from fastpar.files.tensor_file import FLOATS
from fastpar.kernels import make_key
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks
from fastpar.train.sample import generate

STEPS, MICRO, B, T = 3, 4, 8, 8
CONFIG = GPTConfig(vocab_size=97, n_layer=3, n_head=2, n_embd=16, block_size=T, dropout=0.0)


@dataclass(frozen=True)
class Cell:
    pp: int = 2
    dp: int = 1
    tp: int = 1
    stage: int = 0
    schedule: str = "1f1b"
    chunks: int | None = None
    precision: str = "fp32"
    accumulate: str = "shard"
    dropout: float = 0.0
    clip: bool = False
    shared: tuple[int, int] | None = None  # layers with one weight
    cp: int = 1
    shard_size: int | None = None
    scale: float | None = None  # of the loss
    layers: int | None = None
    ignored: bool = False  # half of the first row's targets; gradients are divided by what is left


def batches(dp: int):
    """The batch of each step, [dp, B, T + 1]."""
    g = torch.Generator().manual_seed(1)
    return [torch.randint(0, 97, (dp, B, T + 1), generator=g) for _ in range(STEPS)]


def data(cell: Cell, batch):
    """(idx, targets) of the rows of a batch."""
    x, y = batch[:, :-1].contiguous(), batch[:, 1:].clone()
    if cell.ignored:
        y[0, : T // 2] = -100
    return x, y


def gpt(cell: Cell) -> GPT:
    chunks = chunks_of(cell.schedule, cell.chunks, caller="test")
    given = {"dropout": cell.dropout, "n_layer": cell.layers or max(3, cell.pp * chunks)}
    model = GPT(GPTConfig(**{**vars(CONFIG), **given})).to(FLOATS[cell.precision])
    if cell.shared is not None:
        first, second = (model.h[i].attn for i in cell.shared)
        second.c_proj = first.c_proj
    return model


def adamw(cell: Cell, model: GPT) -> AdamW:
    masters, clip = cell.precision in ("bf16", "fp16"), 0.5 if cell.clip else None
    return AdamW(model.parameters(), lr=1e-2, master_weights=masters, max_grad_norm=clip)


def train(cell: Cell, deterministic: bool):
    """(losses, parameters of this stage, norms) after some steps."""
    wide = torch.float32 if cell.precision in ("bf16", "fp16") else None
    mesh = Mesh(pp=cell.pp, dp=cell.dp, tp=cell.tp, cp=cell.cp, device="cpu")
    model = gpt(cell)
    parallelize(
        model,
        mesh,
        Parallel.of(
            zero_stage=cell.stage,
            deterministic=deterministic,
            grad_dtype=wide,
            accumulate=cell.accumulate,
            bucket_mb=0.01,
            first_bucket_mb=0.001,
            schedule=cell.schedule,
            chunks=cell.chunks,
            shard_size=cell.shard_size,
        ),
    )
    opt = adamw(cell, model)
    scaled = {}
    if cell.scale is not None:
        opt.grad_scale = cell.scale
        scaled = {"target": lambda loss: loss * cell.scale}
    losses, norms = [], []
    for step, batch in enumerate(batches(cell.dp)):
        mine = batch[mesh.dp_rank]
        first = mesh.dp_rank * MICRO
        keys = [make_key(7, step * 100 + first + i) for i in range(MICRO)]
        x, y = data(cell, mine)
        if cell.ignored:
            engine_of(model).count_tokens((y >= 0).sum())
        loss = pipeline_step(
            model,
            x,
            y,
            micro_batches=MICRO,
            schedule=cell.schedule,
            rng_keys=keys,
            reduction="sum" if cell.ignored else "mean",
            **scaled,
        )
        losses.append(loss.item())
        opt.step()
        norms.append(None if opt.grad_norm is None else opt.grad_norm.item())
        opt.zero_grad()
    engine_of(model).check_replicas(opt)
    return losses, {k: v.clone() for k, v in model.state_dict().items()}, norms, mesh.dp_rank


def order(cell: Cell) -> list[tuple[int, int]]:
    """(rank along dp, micro-batch) as they are added up: ranks first where each is reduced."""
    found = list(itertools.product(range(cell.dp), range(MICRO)))
    ranks_first = cell.accumulate == "shard" and cell.stage >= 2
    return sorted(found, key=lambda pair: pair[1]) if ranks_first else found


def one_process(cell: Cell, deterministic: bool):
    """The same run with all micro-batches of all ranks on one, a whole model, and a plain loop."""
    model = gpt(cell)
    wide = torch.float32 if cell.precision in ("bf16", "fp16") else None
    mesh = Mesh(device="cpu")
    parallelize(model, mesh, deterministic=deterministic, grad_dtype=wide)
    opt = adamw(cell, model)
    if cell.scale is not None:  # the mean over the ranks is taken after the backward there
        opt.grad_scale = cell.scale * cell.dp
    many = 1 if cell.ignored else MICRO
    losses, norms = [], []
    for step, batch in enumerate(batches(cell.dp)):
        if cell.ignored:
            counts = [(data(cell, rows)[1] >= 0).sum() for rows in batch]
            engine_of(model).count_tokens(sum(counts))
        found = torch.zeros(cell.dp, MICRO, dtype=torch.float64)
        for rank, i in order(cell):
            x, y = (each.chunk(MICRO)[i] for each in data(cell, batch[rank]))
            key = make_key(7, step * 100 + rank * MICRO + i)
            loss = model(x, y, rng_key=key, reduction="sum" if cell.ignored else "mean") / many
            (loss * (cell.scale or 1 / (1 if cell.ignored else cell.dp))).backward()
            found[rank, i] = loss.detach()
        losses.append([sum(each).item() for each in found])
        opt.step()
        norms.append(None if opt.grad_norm is None else opt.grad_norm.item())
        opt.zero_grad()
    return losses, {k: v.clone() for k, v in model.state_dict().items()}, norms


def compare(cell: Cell, deterministic: bool) -> None:
    world = cell.pp * cell.dp * cell.tp * cell.cp
    expected = run_ranks(one_process, 1, cell, deterministic)[0]
    names = set()
    for losses, state, norms, dp_rank in run_ranks(train, world, cell, deterministic):
        mine = [each[dp_rank] for each in expected[0]]
        if deterministic:
            assert (losses, norms) == (mine, expected[2]), cell
        else:
            torch.testing.assert_close(torch.tensor(losses), torch.tensor(mine), rtol=0, atol=1e-12)
        for name, value in state.items():
            if deterministic:
                assert torch.equal(value, expected[1][name]), (cell, name)
            else:
                torch.testing.assert_close(value, expected[1][name], rtol=0, atol=1e-12)
        names |= state.keys()
    assert names == expected[1].keys()


def grid() -> list[Cell]:
    """Every cell that promises bits."""
    options = {
        "pp": (2, 3, 4),
        "dp": (1, 2),
        "stage": (0, 1, 2, 3),
        "schedule": ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"),
        "chunks": (None, 1, 3),
        "precision": ("fp32", "bf16"),
        "accumulate": ("shard", "full"),
        "dropout": (0.0, 0.2),
        "clip": (False, True),
    }
    found = [
        Cell(**dict(zip(options, values)))  # type: ignore[arg-type]
        for values in itertools.product(*options.values())
    ]
    return [c for c in found if c.chunks is None or c.schedule == "interleaved"]


@pytest.mark.parametrize(
    "cell",
    [
        Cell(tp=2),
        Cell(pp=3, schedule="gpipe", clip=True),
        Cell(tp=2, schedule="zb-v"),
        Cell(pp=3, schedule="zb-h1"),
        Cell(dp=2, stage=3, schedule="interleaved"),
        Cell(cp=2, stage=2, schedule="zb-h1", dropout=0.2, clip=True),
        Cell(cp=2, schedule="zb-v"),
        Cell(dp=2, stage=2, schedule="zb-h1", ignored=True, clip=True),
        Cell(schedule="interleaved", ignored=True, dropout=0.2),
    ],
    ids=str,
)
def test_pipeline_is_one_process_in_fp64(cell):
    compare(replace(cell, precision="fp64"), False)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
def test_pipeline_of_tensor_parallel_ranks_is_one_process_in_fp64(schedule):
    for dp, stage, accumulate in ((1, 0, "shard"), (2, 2, "shard"), (2, 3, "full")):
        compare(Cell(2, dp, 2, stage, schedule, None, "fp64", accumulate, 0.2, True), False)


@pytest.mark.parametrize(
    "cell",
    [
        Cell(clip=True, dropout=0.2),
        Cell(dp=2, stage=2, precision="bf16", clip=True),
        Cell(pp=3, precision="bf16", dropout=0.2, clip=True),
        Cell(dp=2, stage=2, schedule="zb-v", precision="bf16", dropout=0.2),
        Cell(dp=2, stage=3, accumulate="full", schedule="gpipe"),
        Cell(schedule="interleaved", clip=True, dropout=0.2),
        Cell(schedule="zb-h1", clip=True, dropout=0.2),
        Cell(schedule="zb-v", clip=True, dropout=0.2),
        Cell(dp=2, stage=2, schedule="interleaved", precision="bf16", clip=True),
        Cell(dp=2, stage=3, schedule="zb-v"),
        Cell(dp=2, stage=3, schedule="zb-h1", accumulate="full"),
        Cell(dp=4, stage=3, shard_size=2, clip=True),
        Cell(dp=4, stage=1, shard_size=2, schedule="zb-v"),
        Cell(dp=2, stage=2, precision="fp16", scale=1024.0, clip=True),
        Cell(schedule="zb-v", precision="fp16", scale=1024.0),
        Cell(dp=2, stage=1, ignored=True, clip=True),
        Cell(dp=2, schedule="zb-v", ignored=True),
    ],
    ids=str,
)
def test_pipeline_bits(cell):
    compare(cell, True)


@pytest.mark.parametrize(
    "cell",
    [
        Cell(tp=2, schedule="interleaved", precision="bf16", dropout=0.2, clip=True),
        Cell(tp=2, stage=2, dp=2, schedule="zb-v"),
        Cell(cp=2, precision="bf16", dropout=0.2, clip=True),
        pytest.param(
            Cell(tp=2, schedule="zb-h1", stage=3, dp=2, dropout=0.2), marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_stages_of_ranks_that_share_a_sum_have_the_bits_of_those_ranks(cell):
    """Of tp and cp: their sums over ranks are not those of one process, with stages or without."""
    layers = len(gpt(cell).h)
    whole = replace(cell, pp=1, schedule="1f1b", chunks=None, layers=layers)
    there = run_ranks(train, cell.dp * cell.tp * cell.cp, whole, True)
    expected = {dp_rank: (losses, norms) for losses, _, norms, dp_rank in there}
    for losses, state, norms, dp_rank in run_ranks(
        train, cell.pp * cell.dp * cell.tp * cell.cp, replace(cell, layers=layers), True
    ):
        assert (losses, norms) == expected[dp_rank]
        assert all(torch.equal(value, there[0][1][name]) for name, value in state.items())


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_weight_of_two_layers_gets_one_gradient(schedule):
    compare(Cell(dp=2, stage=2, schedule=schedule, shared=(0, 1)), True)


@pytest.mark.parametrize(
    ("cell", "where"),
    [
        (Cell(shared=(0, 2)), "stages 0 and 1"),
        (Cell(schedule="interleaved", shared=(0, 2)), "stages 0 and 2"),
        (Cell(schedule="zb-v", shared=(0, 3)), "stages 0 and 3"),
    ],
)
def test_a_weight_of_two_stages_is_refused(cell, where):
    """Each stage would train its own copy."""
    message = rf"parameter but a table .* got 'h\.\d\.attn\.c_proj\.weight' on {where}; keep"
    with pytest.raises(ValueError, match=message):
        run_ranks(train, 2, cell, False)


@pytest.mark.slow
def test_pipeline_bits_of_pairs():
    pairs = few(grid(), lambda cell: set(itertools.combinations(vars(cell).items(), 2)))
    for cell in pairs:
        compare(cell, True)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
def test_held_micro_batches_and_messages_are_those_of_the_simulator(schedule, monkeypatch):
    cell, many = Cell(pp=2, schedule=schedule), 8
    original = pipeline.PipelineStep.receive

    def received(step, op):
        live = len({*step.held, *step.halves})
        step.engine.most_held = max(live, getattr(step.engine, "most_held", 0))
        return original(step, op)

    def rank():
        mesh = Mesh(pp=cell.pp, device="cpu")
        model = parallelize(gpt(cell), mesh, Parallel.of(schedule=schedule))
        stages, sent = engine_of(model).shards.stages, []

        def observe(group, op, nbytes, call):
            sent.extend([nbytes] * (op == "send"))
            return call()

        for link in stages.links.values():
            link.observers = (*link.observers, observe)
        idx = torch.zeros(many, T, dtype=torch.int64)
        pipeline_step(model, idx, idx, micro_batches=many)
        return engine_of(model).most_held, sent

    monkeypatch.setattr(pipeline.PipelineStep, "receive", received)
    order = make_schedule(schedule, cell.pp, many)
    held = held_of(schedule, cell.pp, many, order.chunks)
    stream = T * CONFIG.n_embd * 4  # bytes of one row
    for here, (most, sent) in enumerate(run_ranks(rank, cell.pp)):
        assert most == max(sum(moment.held) for moment in held[here])
        mine = [order.stage_of(here, chunk) for chunk in range(order.chunks)]
        beside = [s + by for s in mine for by in (1, -1) if 0 <= s + by < order.stages]
        away = [s for s in beside if order.owner(s)[0] != here]
        assert sent == [stream] * (many * len(away))


@pytest.mark.parametrize(
    ("schedule", "stage", "calls"),
    [("1f1b", 0, {2}), ("interleaved", 0, {1, 2}), ("1f1b", 1, {MICRO})],
)
def test_later_gradients_are_added_without_the_engines_hooks(schedule, stage, calls, monkeypatch):
    """At stage 0; but of the last backward, which reduces. Hooks of others see every one."""
    heard, original = [], Engine._on_grad

    def count(engine, p):
        heard.append(id(p))
        return original(engine, p)

    monkeypatch.setattr(Engine, "_on_grad", count)

    def rank():
        model, seen = gpt(Cell(schedule=schedule)), []
        mesh = Mesh(pp=2, dp=2, device="cpu")
        parallelize(model, mesh, Parallel.of(schedule=schedule, zero_stage=stage))
        params = engine_of(model).shards.params
        matrices = [p for p in params if p.dim() == 2]
        matrices[0].register_hook(seen.append)
        matrices[-1].register_post_accumulate_grad_hook(seen.append)
        idx = torch.zeros(MICRO, T, dtype=torch.int64)
        pipeline_step(model, idx, idx, micro_batches=MICRO)
        return {heard.count(id(p)) for p in params}, len(seen)

    for each, seen in run_ranks(rank, 4):
        assert (each, seen) == (calls, 2 * MICRO)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-v"])
def test_ranks_are_connected_before_the_first_step(schedule, monkeypatch):
    """Every way that a step's messages take had one when parallelize() returned."""
    peers = []

    def note(kind, original):
        def noted(self, x, peer, **options):
            peers.append((dist.get_rank(), id(self), kind, peer))
            return original(self, x, peer, **options)

        return noted

    for kind in ("send", "recv"):
        monkeypatch.setattr(Collectives, kind, note(kind, getattr(Collectives, kind)))

    def rank():
        cell = Cell(pp=3, schedule=schedule)
        model = parallelize(
            gpt(cell), Mesh(pp=3, device="cpu"), Parallel.of(schedule=schedule, deterministic=True)
        )
        here = dist.get_rank()
        before = {p for p in peers if p[0] == here}
        idx = torch.zeros(MICRO, T, dtype=torch.int64)
        pipeline_step(model, idx, idx, micro_batches=MICRO)
        return before, {p for p in peers if p[0] == here}

    for before, after in run_ranks(rank, 3):
        assert before == after


def test_stages_are_cut_by_what_their_parts_cost():
    def rank(vocab_size, **options):
        model = GPT(GPTConfig(**{**vars(CONFIG), "n_layer": 4, "vocab_size": vocab_size}))
        parallelize(model, Mesh(pp=2, device="cpu"), Parallel.of(**options))
        return engine_of(model).shards.stages.parts[0]

    assert run_ranks(rank, 2, 97) == [range(0, 3), range(3, 6)]
    assert run_ranks(rank, 2, 600) == [range(0, 4), range(4, 6)]
    assert run_ranks(rank, 2, 2000) == [range(0, 5), range(5, 6)]
    assert run_ranks(lambda: rank(2000, pp_split=[1, 3]), 2) == [range(0, 2), range(2, 6)]


def test_a_cut_that_cannot_be_is_refused():
    def build(model, **options):
        with pytest.raises(ValueError, match=r"parallelize: expected") as caught:
            parallelize(model, Mesh(pp=2, device="cpu"), Parallel.of(**options))
        return str(caught.value)

    def rank():
        stock = build(torch.nn.Linear(2, 2))
        mixed = GPT(CONFIG)
        mixed.h[2].bfloat16()
        many = {"schedule": "interleaved", "chunks": 3}
        return stock, build(GPT(CONFIG), pp_split=[3, 1]), build(GPT(CONFIG), **many), build(mixed)

    for stock, split, chunks, mixed in run_ranks(rank, 2):
        assert "expected a model with pipeline_parts() for pp=2, got Linear" in stock
        assert "2 numbers of layers that make 3, got pp_split=[3, 1]" in split
        assert "to have layers, got pp=2 with 3 chunks for 3 layers; choose a smaller" in chunks
        assert "of one dtype, got wte.weight=torch.float32 and h.2.attn.c_attn.weight=" in mixed


def test_bad_steps_are_refused_and_a_stage_alone_has_no_forward():
    def rank():
        model = parallelize(GPT(CONFIG), Mesh(pp=2, device="cpu"))
        idx = torch.zeros(4, T, dtype=torch.int64)
        for wrong in (3, 0, 2.0):
            with pytest.raises(ValueError, match=f"divide the 4 rows .*={wrong}; choose a whole"):
                pipeline_step(model, idx, idx, micro_batches=wrong)
        with pytest.raises(ValueError, match=r"one of gpipe, 1f1b, .*, got schedule='zb-x'"):
            pipeline_step(model, idx, idx, schedule="zb-x")
        with pytest.raises(
            ValueError, match=r"schedule='1f1b' has put them, 1 a rank, .*='zb-v' to"
        ):
            pipeline_step(model, idx, idx, schedule="zb-v")
        with pytest.raises(ValueError, match=r"idx=\[4, 8\] targets=\[4, 7\]; pass one target"):
            pipeline_step(model, idx, idx[:, 1:])
        with pytest.raises(ValueError, match="reduction mean or sum, got reduction='none'"):
            pipeline_step(model, idx, idx, reduction="none")
        with pytest.raises(ValueError, match="rng_keys for 2 micro-batches, got 1; pass one for"):
            pipeline_step(model, idx, idx, micro_batches=2, rng_keys=[make_key(0, 0)])
        with pytest.raises(ValueError, match="got zero_stage=0, tp=1, pp=2; its row and column"):
            Adafactor(model.parameters(), lr=1e-2)
        with pytest.raises(AttributeError, match=r"call fastpar\.pipeline_step instead"):
            model(idx, idx)
        with pytest.raises(ValueError, match=r"generate: .* got one cut into stages; load_hf\(\)"):
            next(generate(model, idx, 1))

    run_ranks(rank, 2)
