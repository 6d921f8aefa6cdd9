"""Late collectives: the same results in the same order, and races that show. Inputs and replicas
that differ: told by every rank."""

import copy
import functools
import pickle
import random
import threading
import time

import pytest
import torch

from fastpar import GPT, AdamW, GPTConfig, Mesh, engine_of, parallelize
from fastpar.comm.transports import ShmCollectives, TorchCollectives
from fastpar.engine import debug
from fastpar.engine.debug import Debug
from fastpar.settings.parallel import Parallel
from fastpar.sharding.placements import Replicate
from fastpar.testing import run_ranks

make_shm = functools.partial(ShmCollectives, timeout_s=20.0, heap_gb=0.01)


def everything(kind):
    inner = make_shm() if kind == "shm" else TorchCollectives(in_rank_order=True)
    why = inner.why
    c = Debug(delay_ms=4.0, seed=7).delayed(inner)
    draws = random.Random(f"7 {c.rank}")
    seconds = sum(draws.uniform(0.0, 4.0) for _ in range(7)) / 1e3
    start = time.perf_counter()
    x = c.empty(6, torch.float32).fill_(1.0 + c.rank)
    part, whole = torch.empty(3), torch.empty(6)
    handles = [
        c.all_reduce(x, async_op=True, tag=1),  # 3
        c.reduce_scatter(part, x, mean=True, async_op=True, tag=2),  # 3, of what was made above
        c.all_gather(whole, part, async_op=True, tag=3),
        c.broadcast(whole, 1, async_op=True, tag=4),
        c.all_reduce(whole, async_op=True, tag=5),  # 6
    ]
    c.barrier(tag=6)
    with torch.inference_mode():
        inside = torch.full((2,), 5.0)
        c.all_reduce(inside, mean=True)
    for handle in handles:
        handle.wait()
    took = time.perf_counter() - start
    measured = all(handle.ms > 0 for handle in handles)
    c.close()
    assert c.why == f"{why}; delayed by up to 4.0 ms"
    return whole.tolist(), inside.tolist(), measured, took >= seconds


@pytest.mark.parametrize(
    ("kind", "backend"), [("shm", "threads"), ("torch", "threads"), ("torch", "gloo")]
)
def test_the_same_results_in_the_same_order(kind, backend):
    for outcome in run_ranks(everything, 2, kind, backend=backend):
        assert outcome == ([6.0] * 6, [5.0] * 2, True, True)


def writes_too_early(gate):
    """A step that does not wait before it reuses a buffer."""
    x = torch.ones(10)
    c = Debug(delay_ms=1.0).delayed(make_shm())
    handle = c.all_reduce(x, async_op=True)
    before = handle.is_completed()
    x.fill_(5.0)
    gate.wait(20)  # both have
    handle.wait()
    return before, x.tolist()


def test_a_race_shows(monkeypatch):
    gate = threading.Barrier(4)  # two ranks and their threads

    class Late:
        @staticmethod
        def sleep(seconds):
            assert 0 <= seconds <= 0.001
            gate.wait(20)

    monkeypatch.setattr(debug, "time", Late)
    assert run_ranks(writes_too_early, 2, gate) == [(False, [10.0] * 10)] * 2


def fails():
    c = Debug(delay_ms=1.0).delayed(make_shm())
    handle = c.all_reduce(torch.ones(3 + c.rank), async_op=True)
    with pytest.raises(RuntimeError, match="expected the same call on every rank"):
        handle.wait()
    with pytest.raises(RuntimeError, match="expected a working group"):
        c.barrier()


def test_errors_come_out_of_wait():
    run_ranks(fails, 2)


def plain():
    inner = make_shm()
    return Debug(check_replicas=True, poison=True).delayed(inner).observers == ()


def test_nothing_is_delayed_unless_asked():
    assert run_ranks(plain, 1) == [True]
    assert Debug() == Debug(False, False, 0.0, 0, False)


@pytest.mark.parametrize("delay_ms", [-1.0, float("inf"), float("nan")])
def test_bad_delay(delay_ms):
    with pytest.raises(ValueError, match=r"Debug: expected 0 <= delay_ms, got delay_ms="):
        Debug(delay_ms=delay_ms)


def trains(zero_stage, debug, backend_is_threads):
    """Parameters after some steps of two ranks; a race would change their bits."""
    layers = [torch.nn.Linear(8, 8) for _ in range(4)]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(8, 1))
    generator = torch.Generator().manual_seed(3)  # torch's own is shared by the threads
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / 3)
    transport = "auto" if backend_is_threads else "torch"
    parallelize(
        model,
        Mesh(),
        Parallel.of(
            zero_stage=zero_stage,
            bucket_mb=0.0005,
            first_bucket_mb=0.0001,
            deterministic=True,
            transport=transport,
        ),
        debug=debug,
    )
    optimizer = AdamW(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(engine_of(model).mesh.rank)
    for _ in range(4):
        for _ in range(2):
            model(torch.randn(4, 8, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with engine_of(model).gathered():
        return torch.cat([p.detach().flatten().clone() for p in model.parameters()])


@pytest.fixture(scope="module")
def on_time():
    return {stage: run_ranks(trains, 2, stage, None, True) for stage in range(4)}


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_training_has_the_same_bits_with_late_collectives(zero_stage, on_time):
    late = Debug(check_replicas=True, poison=True, delay_ms=3.0, seed=zero_stage)
    for expected, got in zip(
        on_time[zero_stage], run_ranks(trains, 2, zero_stage, late, True), strict=True
    ):
        assert expected.isfinite().all()
        assert torch.equal(got, expected)


def test_training_over_gloo_with_late_collectives(on_time):
    late = Debug(poison=True, delay_ms=3.0)
    for expected, got in zip(
        on_time[3], run_ranks(trains, 2, 3, late, False, backend="gloo"), strict=True
    ):
        assert torch.equal(got, expected)


# Inputs of a tp group


class Takes(torch.nn.Module):
    """A model of any arguments."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.tp_states = {"weight": Replicate()}

    def forward(self, idx, targets=None, *rest, **kwargs):
        return self.weight.sum()


def idx_of(change=()):
    idx = torch.arange(24).view(4, 6)
    for place in change:
        idx[place] += 1
    return idx


SAME = {
    "one": lambda r: ((idx_of(),), {}),
    "none": lambda r: ((), {"idx": None}),
    "no number": lambda r: ((torch.tensor([float("nan"), 1.0]),), {}),
    "not tensors": lambda r: ((idx_of(), None, r), {"name": str(r)}),
    "views": lambda r: ((idx_of().T,), {"b": torch.tensor(True), "c": torch.zeros(0, 3)}),
}
WHERE = "expected the same inputs on all ranks of a tp group, got a difference in argument "
BUT = "; give them the same batch: choose it by mesh.dp_rank, not by mesh.rank"
ROWS = "torch.int64 [4, 6]"
DIFFERENT = {
    "an element": (
        lambda r: ((idx_of([(2, 5)] * (r == 1)),), {}),
        "'idx' first at index [2, 5] on tp rank 1",
    ),
    "two ranks": (
        lambda r: ((idx_of([(3, 0)] * (r == 2) + [(1, 1)] * (r == 3)),), {}),
        "'idx' first at index [3, 0] on tp rank 2",
    ),
    "all but one": (
        lambda r: ((idx_of([(0, 0)] * (r > 0)),), {}),
        "'idx' first at index [0, 0] on tp rank 1",
    ),
    "a keyword": (
        lambda r: ((idx_of(),), {"targets": idx_of([(0, 4)] * (r == 3)), "key": torch.ones(2)}),
        "'targets' first at index [0, 4] on tp rank 3",
    ),
    "the sign of zero": (
        lambda r: ((torch.tensor([1.0, -0.0 if r == 1 else 0.0], dtype=torch.bfloat16),), {}),
        "'idx' first at index [1] on tp rank 1",
    ),
    "a number": (
        lambda r: ((torch.tensor(r == 1),), {}),
        "'idx' first at index [] on tp rank 1",
    ),
    "in a list": (
        lambda r: (([idx_of(), {"a": idx_of([(0, 1)] * (r == 1))}],), {}),
        "'idx[1]['a']' first at index [0, 1] on tp rank 1",
    ),
    "beyond the names": (
        lambda r: ((None, None, None, idx_of([(0, 1)] * (r == 1))), {}),
        "'*3' first at index [0, 1] on tp rank 1",
    ),
    "a shape": (
        lambda r: ((idx_of()[: 4 - (r == 2)],), {}),
        f"'idx' on tp rank 2: idx: torch.int64 [3, 6] where rank 0 has idx: {ROWS}",
    ),
    "a dtype": (
        lambda r: ((idx_of().to(torch.int32 if r == 1 else torch.int64),), {}),
        f"'idx' on tp rank 1: idx: torch.int32 [4, 6] where rank 0 has idx: {ROWS}",
    ),
    "one less": (
        lambda r: ((idx_of(),), {"targets": None if r == 1 else idx_of()}),
        f"'targets' on tp rank 1: nothing where rank 0 has targets: {ROWS}",
    ),
    "one more": (
        lambda r: ((), {"idx": idx_of() if r == 1 else None}),
        f"'idx' on tp rank 1: idx: {ROWS} where rank 0 has nothing",
    ),
}


def call_with(make, dp=1):
    """A forward; every rank waits until all have one, or have raised."""
    mesh = Mesh(dp=dp) if dp > 1 else Mesh(tp=4)
    model = parallelize(Takes(), mesh, debug=Debug(check_inputs=True))
    args, kwargs = make(mesh.rank)
    try:
        model(*args, **kwargs)
    except RuntimeError as error:
        return str(error)
    return "ran"


@pytest.mark.parametrize("case", SAME)
def test_equal_inputs_pass(case):
    assert run_ranks(call_with, 4, SAME[case]) == ["ran"] * 4


@pytest.mark.parametrize("case", DIFFERENT)
def test_different_inputs_are_told_on_every_rank(case):
    make, found = DIFFERENT[case]
    assert run_ranks(call_with, 4, make) == [f"parallelize: {WHERE}{found}{BUT}"] * 4


def test_ranks_of_dp_have_other_inputs():
    def rank():
        mesh = Mesh(tp=2)
        model = parallelize(Takes(), mesh, debug=Debug(check_inputs=True))
        model(idx_of([(0, mesh.dp_rank)]))

    run_ranks(rank, 4)
    assert run_ranks(call_with, 2, DIFFERENT["an element"][0], 2) == ["ran"] * 2


def gpt():
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 8, "vocab_size": 30}
    return GPT(GPTConfig(**sizes, dropout=0.0))


def sends(check_inputs):
    model = parallelize(gpt(), Mesh(tp=2), debug=Debug(check_inputs=check_inputs))
    sizes = []
    group = engine_of(model).declared.tp.group
    inner = group._all_gather

    def noted(out, x, tag):
        sizes.append(x.numel() * x.element_size())
        return inner(out, x, tag)

    group._all_gather = noted
    model(torch.arange(8)[None])
    return sizes


def test_equal_inputs_cost_eight_bytes():
    plain = run_ranks(sends, 2, False)
    assert run_ranks(sends, 2, True) == [[8, *sizes] for sizes in plain]


def test_copies_and_pickles_do_not_compare():
    def rank():
        model = parallelize(Takes(), Mesh(tp=2), debug=Debug(check_inputs=True))
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            # Alone, on one rank after another.
            assert other(idx_of([(0, engine_of(model).mesh.rank)])) is not None

    run_ranks(rank, 2)


def compiled_inputs():
    model = parallelize(Takes(), Mesh(tp=2), debug=Debug(check_inputs=True))
    run = torch.compile(model, backend="eager")
    run(idx_of())
    with pytest.raises(RuntimeError, match=r"'idx' first at index \[0, 1\] on tp rank 1"):
        run(idx_of([(0, 1)] * engine_of(model).mesh.rank))


@pytest.mark.slow
def test_compiled_models_compare():
    run_ranks(compiled_inputs, 2, backend="gloo", timeout_s=120.0)


# Replicas along tp


def corrupts(name, wrong, stage):
    """A step on 4 ranks, of which some change a parameter behind the others' back."""
    model = parallelize(
        gpt(), Mesh(tp=2), zero_stage=stage, debug=Debug(check_replicas=True, check_inputs=True)
    )
    mesh = engine_of(model).mesh
    optimizer = AdamW(model.parameters(), lr=0.1)
    idx = torch.arange(8)[None]
    model(idx, idx).backward()
    optimizer.step()
    optimizer.zero_grad()
    model(idx, idx).backward()
    with torch.no_grad():
        for p in [p for n, p in model.named_parameters() if n == name]:
            if mesh.rank in wrong:
                p[0] += 1.0
    optimizer.step()


@pytest.mark.parametrize("name", ["h.0.ln_1.weight", "wpe.weight", "h.0.mlp.c_proj.bias"])
def test_a_replica_that_drifts_on_one_rank_of_tp(name):
    message = (
        r"Engine\.check_replicas: expected the same bits on every rank, got a difference between "
        rf"ranks 0, 2 and ranks 1, 3 in parameter '{name}' after step 2, and no majority"
    )
    for error in run_ranks(corrupts, 4, name, (1, 3), 0, return_exceptions=True):
        if not isinstance(error, SystemExit):  # a thread that was stopped by the others' failure
            with pytest.raises(RuntimeError, match=message):
                raise error


def test_slices_differ_along_tp_but_not_along_dp():
    run_ranks(corrupts, 4, "h.0.mlp.c_fc.weight", (1, 3), 0)  # both ranks of dp alike
    message = r"between rank 1 and rank 3 in parameter 'h\.0\.mlp\.c_fc\.weight' after step 2, and"
    with pytest.raises(RuntimeError, match=message):
        run_ranks(corrupts, 4, "h.0.mlp.c_fc.weight", (3,), 0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_replicas_agree_at_every_stage(stage):
    run_ranks(corrupts, 4, "", (), stage)
