"""Training with compressed gradients and weights: what stays the same, what is kept, refusals."""

import functools

import pytest
import torch
import torch.distributed as dist
from cells import covering, slow, sweep

import fastpar
from fastpar.checkpoint.restore import load_checkpoint
from fastpar.checkpoint.saver import save_checkpoint
from fastpar.settings.model import GPTConfig
from fastpar.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:parallelize. int4 gradients")
SHAPE = GPTConfig(2, 2, 40, 16, 64, dropout=0.0)


def batch(step):
    """This rank's rows; three ranks leave one out."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(64, (4, 17), generator=generator)
    n = 4 // dist.get_world_size()
    rows = tokens[dist.get_rank() * n :][:n]
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def start(stage, options):
    model = fastpar.parallelize(
        fastpar.GPT(SHAPE, seed=0),
        fastpar.Mesh(),
        fastpar.Parallel.of(zero_stage=stage, bucket_mb=0.05, first_bucket_mb=0.01, **options),
    )
    return model, fastpar.AdamW(model.parameters(), lr=1e-2, eps=1e-3, max_grad_norm=1.0)


def train(stage, options, steps=3, first=0, started=None, each=lambda model: None):
    """Weights as they are stepped, and the engine."""
    model, optimizer = started or start(stage, options)
    for step in range(first, steps):
        model(*batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        each(model)
    engine = fastpar.engine_of(model)
    return {k: v.clone() for k, v in model.state_dict().items()}, engine


def weights(*args, **kwargs):
    found, engine = train(*args, **kwargs)
    return found, engine.report.wire_bytes, engine.wire_bytes(), engine.memory()


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


def distance(a, b):
    return sum((a[name] - b[name]).norm() ** 2 for name in a) ** 0.5


@pytest.fixture(scope="module")
def plain():
    return run_ranks(weights, 2, 0, {})[0][0]


@covering(1, ("stage", [0, 1, 2, 3]), ("name", ["bf16", "int8", "int4"]), ("ranks", [2, 4]))
def test_ranks_stay_alike_and_near_the_run_in_fp32(stage, name, ranks, plain):
    """Another format is another run; it must be this one, twice, and not far from that in fp32."""
    options = {"wire_gradients": name, "wire_weights": "int8" if stage else None}
    one, two = (run_ranks(weights, ranks, stage, options) for _ in range(2))
    start = fastpar.GPT(SHAPE, seed=0).state_dict()
    for (a, sent, announced, _), (b, *_) in zip(one, two):
        assert same(a, one[0][0])
        assert same(a, b)
        assert sent == sum(announced.values())
        assert 0 < distance(a, plain) < 0.6 * distance(plain, start)


@sweep("name", ["int8", "int4"])
def test_errors_in_the_memory_of_gradients_are_those_of_a_buffer(name):
    """Stage 1 keeps them in place: the bits of stage 2 with a buffer, without any memory; with
    accumulation too, and where a parameter has no gradient."""
    free = run_ranks(weights, 2, 1, {"wire_gradients": name, "error_feedback": True})
    paid = run_ranks(weights, 2, 2, {"wire_gradients": name, "error_buffer": True})
    without = run_ranks(weights, 2, 1, {"wire_gradients": name})
    for (a, *_, memory), (b, *_, buffered), (c, *_, usual) in zip(free, paid, without):
        assert same(a, b)
        assert not same(a, c)
        assert memory == usual
        assert buffered["errors on the wire"] == buffered["parameters"]


def sent_in_all(stage, feedback):
    """Of a parameter whose gradients are known: their mean after each of several backward passes,
    some of which do not reach it."""
    torch.manual_seed(dist.get_rank())
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(70, 9), "b": torch.nn.Linear(70, 9)})
    options = {"wire_gradients": "int4"} | {name: True for name in [feedback] if name}
    fastpar.parallelize(model, fastpar.Mesh(), fastpar.Parallel.of(zero_stage=stage, **options))
    optimizer = fastpar.AdamW(model.parameters(), lr=0.0)
    engine, true, got = fastpar.engine_of(model), 0.0, 0.0
    for step in range(40):
        scale = torch.randn(9, 70)
        with engine.gathered():
            pass
        uses = dist.get_rank() or step % 3
        for _ in range(2):  # added up
            x = (model["a"].weight * scale).sum() if uses else 0.0
            (x + model["b"](torch.ones(70)).sum()).backward()
        true = true + 2 * scale * bool(uses)
        p = model["a"].weight
        piece = engine.shards.piece(p)
        if piece.grad is not None:
            mine = torch.zeros(9 * 70)
            mine[piece.start :][: piece.grad.numel()] = piece.grad.view(-1)
            got = got + mine
        optimizer.step()
        optimizer.zero_grad()
    return true, got


@sweep(("stage", "feedback"), [(0, "error_feedback"), (1, "error_feedback"), (2, "error_buffer")])
def test_what_was_lost_is_sent_later(stage, feedback):
    """Over 40 steps of two backward passes the sum of what arrived is within one error of the truth
    (the distance of two int4 codes is max / 7, of |2 randn| + an error < 12; stage 0 rounds means
    again), where without feedback it wanders off by the square root of the steps."""
    found = run_ranks(sent_in_all, 2, stage, feedback)
    true = (found[0][0] + found[1][0]).view(-1) / 2
    got = found[0][1] if stage == 0 else found[0][1] + found[1][1]
    assert (got - true).abs().max() < (2 if stage == 0 else 1) * 12 / 7
    other = run_ranks(sent_in_all, 2, stage, None)
    wanders = (other[0][1] if stage == 0 else other[0][1] + other[1][1]) - true
    assert (got - true).norm() < 0.5 * wanders.norm()


def dropped(stop):
    """A backward whose gradients are dropped, between two steps."""
    model, optimizer = start(1, {"wire_gradients": "int8", "error_feedback": True})
    train(1, {}, 1, started=(model, optimizer))
    bucket = fastpar.engine_of(model).buckets[0]
    with fastpar.engine_of(model).no_sync():
        model(*batch(7)).backward()
    model.zero_grad() if stop else optimizer.zero_grad()
    model(*batch(1)).backward()
    assert bucket.grad.isfinite().all()
    optimizer.step()
    return optimizer.grad_norm.item()


@sweep("stop", [True, False])
def test_dropped_gradients_leave_nothing(stop):
    """A norm as that of the gradients alone, not of two micro-batches."""
    for norm in run_ranks(dropped, 2, stop):
        assert norm < 1.2 * run_ranks(norms, 2)[0][1]


def norms():
    found = []
    model, optimizer = start(1, {})
    train(
        1,
        {},
        2,
        started=(model, optimizer),
        each=lambda _: found.append(optimizer.grad_norm.item()),
    )
    return found


def overflow(stage, options):
    model, optimizer = start(stage, options)
    loss = model(*batch(0))
    (loss * (torch.inf if dist.get_rank() == 1 else 1.0)).backward()
    optimizer.step()
    bad = optimizer.grad_norm.isfinite().item()
    model, optimizer = start(stage, options)
    model(*batch(0)).backward()
    optimizer.step()
    return bad, optimizer.grad_norm.isfinite().item()


@covering(1, ("stage", [0, 1, 2, 3]), ("name", ["bf16", "int8", "int4"]))
def test_an_overflow_on_one_rank_is_seen_by_all(stage, name):
    for bad, good in run_ranks(overflow, 2, stage, {"wire_gradients": name}):
        assert (bad, good) == (False, True)


@pytest.mark.parametrize("stage", [1, slow(2), 3])
def test_looking_at_weights_changes_nothing(stage):
    """Forwards have rounded weights, the optimizer and whoever asks for them the exact ones."""
    options = {"wire_weights": "int8"}

    def look(model):
        engine = fastpar.engine_of(model)
        with engine.gathered():
            before = model.h[0].mlp.c_fc.weight.clone()
            with engine.gathered():
                assert torch.equal(model.h[0].mlp.c_fc.weight, before)
        model.state_dict()

    one, two = (
        run_ranks(functools.partial(weights, each=e), 2, stage, options)
        for e in (lambda model: None, look)
    )
    assert same(one[0][0], two[0][0])
    assert not same(one[0][0], run_ranks(weights, 2, stage, {})[0][0])


def resumed(folder, stage, options, load, save):
    model, optimizer = start(stage, options)
    if load:
        load_checkpoint(folder + "/latest", model=model, optimizer=optimizer)
    else:
        train(stage, options, 2, started=(model, optimizer))
    if save:
        save_checkpoint(folder, step=2, model=model, optimizer=optimizer)
    return train(stage, options, 4, 2, started=(model, optimizer))[0]


@covering(1, ("stage", [0, 1, 2, 3]), ("name", ["int8", "int4"]), ("feedback", [True, False]))
def test_a_checkpoint_goes_on_with_the_same_bits(stage, name, feedback, tmp_path):
    keep = "error_feedback" if stage < 2 else "error_buffer"
    options = {"wire_gradients": name, keep: feedback}
    options["wire_weights"] = "int8" if stage else None
    args = str(tmp_path), stage, options
    whole = run_ranks(resumed, 2, *args, False, True)
    again = run_ranks(resumed, 2, *args, True, False)
    assert same(whole[0], again[0])
    other = {**options, "wire_gradients": "fp32", keep: False}
    assert not same(whole[0], run_ranks(resumed, 2, str(tmp_path), stage, other, True, False)[0])
    if feedback:
        with pytest.warns(UserWarning, match="what gradients had lost on the wire is dropped"):
            run_ranks(resumed, 4, *args, True, False)


@pytest.mark.slow
def test_processes_have_the_bits_of_threads():
    options = {"wire_gradients": "int8", "wire_weights": "int8"}
    for stage in (1, 3):
        one = run_ranks(weights, 2, stage, options)
        two = run_ranks(weights, 2, stage, options, backend="gloo")
        assert same(one[0][0], two[0][0])
    one = run_ranks(weights, 2, 0, {"wire_gradients": "int8", "error_feedback": True})
    two = run_ranks(
        weights, 2, 0, {"wire_gradients": "int8", "error_feedback": True}, backend="gloo"
    )
    assert same(one[0][0], two[0][0])


BAD = [
    (0, {"wire_gradients": "int2"}, "one of fp32, bf16, int8, int4 for wire_gradients, got .*int2"),
    (3, {"wire_weights": "fp8"}, "^wire_weights=fp8 needs fp8 with fp8_scaling=tensor: it sends"),
    (1, {"wire_gradients": "int8", "error_feedback": 2}, "expected bool for error_feedback, got"),
    (0, {"wire_weights": "int8"}, "^wire_weights needs zero_stage=1, 2 or 3: stage 0 sends no we"),
    (1, {"wire_gradients": "int8", "transport": "shm"}, "^transport=shm does not run with wire_g"),
]


def refused(stage, options):
    start(stage, options)


@sweep(("stage", "options", "message"), BAD)
def test_bad_formats(stage, options, message):
    with pytest.raises(ValueError, match=message):
        run_ranks(refused, 2, stage, options)


def bytes_of(stage, options):
    return fastpar.parallelize(
        torch.nn.Linear(3, 3), fastpar.Mesh(), fastpar.Parallel.of(zero_stage=stage, **options)
    )


def of_dtype(dtype):
    options = {"wire_gradients": "int8", "error_feedback": True, "zero_stage": 1}
    fastpar.parallelize(
        torch.nn.Linear(3, 3, dtype=dtype), fastpar.Mesh(), fastpar.Parallel.of(**options)
    )


@sweep("dtype", [torch.float64, torch.float16])
def test_what_no_code_holds(dtype):
    with pytest.raises(
        ValueError, match=f"expected gradients in fp32 or bf16 .* got dtype={dtype}"
    ):
        run_ranks(of_dtype, 2, dtype)


def test_int4_alone_warns_and_one_rank_sends_nothing():
    with pytest.warns(UserWarning, match="int4 gradients without error_feedback train worse"):
        run_ranks(bytes_of, 2, 1, {"wire_gradients": "int4"})
    options = {"wire_gradients": "int8", "error_feedback": True}
    assert same(run_ranks(weights, 1, 1, options)[0][0], run_ranks(weights, 1, 1, {})[0][0])
