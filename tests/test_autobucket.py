"""bucket_mb="auto": measured sizes, one choice on all ranks, and the bits of any fixed size."""

import itertools
import weakref

import pytest
import torch
from torch import nn

from fastpar import parallel
from fastpar.autobucket import STEPS, Arena, candidates
from fastpar.collectives import Collectives
from fastpar.engine import engine_of
from fastpar.mesh import Mesh
from fastpar.optim import AdamW
from fastpar.parallel import parallelize
from fastpar.testing import run_ranks

KIB = 1 / 1024  # of a MiB
DEFAULT, QUARTER, FOURFOLD = 16 * KIB, 4 * KIB, 64 * KIB  # of these tests
N_STEPS = 3 * STEPS + 3  # until the choice, and some more


def small_default(*args):
    """The model below has 3, 12 and 2 buckets then."""
    return DEFAULT


@pytest.fixture(autouse=True)
def _small_default(monkeypatch):
    monkeypatch.setattr(parallel, "default_bucket_mb", small_default)


class Clock:
    """A step takes what the script says for the number of buckets that there are."""

    def __init__(self, engine, ms):
        self.engine, self.ms, self.now = weakref.ref(engine), ms, 0.0

    def __call__(self, device):
        self.now += self.ms[len(self.engine().buckets)] / 1e3
        return self.now


def drawn(model, dtype=torch.float32):
    """From a generator of its own: threads share torch's."""
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator).mul_(0.2).to(dtype)
    return model


def model_of(dtype):
    return drawn(nn.Sequential(*(nn.Linear(32, 32) for _ in range(6))), dtype)


class Run:
    """A rank that trains."""

    def __init__(self, bucket_mb, stage, *, mesh=None, ms=None, options=None, **kwargs):
        self.mesh = mesh or Mesh(device="cpu")
        options = options or {}
        self.dtype = torch.bfloat16 if "master_weights" in options else torch.float32
        self.model = model_of(self.dtype)
        parallelize(
            self.model, self.mesh, zero_stage=stage, bucket_mb=bucket_mb,
            first_bucket_mb=QUARTER, units=[], **kwargs,
        )  # fmt: skip
        self.engine = engine_of(self.model)
        if ms is not None:
            clock = Clock(self.engine, ms[self.mesh.rank])
            self.engine.auto_bucket._mark = clock
        options = {"lr": 0.01, "max_grad_norm": 1.0, **options}
        self.optimizer = AdamW(self.model.parameters(), **options)
        self.n_buckets = [len(self.engine.buckets)]
        self.n_steps = 0

    def step(self, **how):
        generator = torch.Generator().manual_seed(self.n_steps)
        x = torch.randn(self.mesh.world_size, 8, 32, generator=generator)[self.mesh.rank]
        self.model(x.to(self.dtype)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(**how)
        self.n_buckets.append(len(self.engine.buckets))
        self.n_steps += 1

    def state(self):
        parameters = {name: value.clone() for name, value in self.model.state_dict().items()}
        return {"parameters": parameters, "optimizer": self.optimizer.state_dict()["state"]}


def train(bucket_mb, stage, kwargs):
    """(state, numbers of buckets) of this rank; its gradients are reduced in a fixed tree."""
    run = Run(bucket_mb, stage, grad_dtype=torch.float32, deterministic=True, **kwargs)
    for _ in range(N_STEPS):
        run.step()
    return run.state(), run.n_buckets


def train_in_a_process(bucket_mb, stage, kwargs):
    parallel.default_bucket_mb = small_default
    torch.set_num_threads(1)
    return train(bucket_mb, stage, kwargs)


def assert_same_bits(a, b):
    assert a.keys() == b.keys()
    for key, value in a.items():
        if isinstance(value, dict):
            assert_same_bits(value, b[key])
        elif isinstance(value, torch.Tensor):
            assert (value.dtype, value.shape) == (b[key].dtype, b[key].shape)
            assert torch.equal(value, b[key]), key
        else:
            assert value == b[key]


SECOND_WINS = {3: 3.0, 12: 1.0, 2: 2.0}  # ms by the number of buckets
OPTIONS = {
    "fp32": None,
    "bf16, master weights": {"master_weights": True},
    "8-bit moments": {"moment_dtype": torch.uint8},
}


@pytest.mark.parametrize(
    ("stage", "world_size", "option", "shard_size"),
    [
        *((stage, world_size, "fp32", None) for stage in (0, 1, 2) for world_size in (2, 3)),
        (1, 2, "bf16, master weights", None),
        (2, 3, "bf16, master weights", None),
        (1, 3, "8-bit moments", None),
        (2, 4, "fp32", 2),
    ],
)
def test_auto_has_the_bits_of_a_fixed_size(stage, world_size, option, shard_size):
    """While it measures, when it returns to a size that it had left, and afterwards."""
    kwargs = {"options": OPTIONS[option], "shard_size": shard_size}
    scripted = {**kwargs, "ms": [SECOND_WINS] * world_size}
    auto = run_ranks(train, world_size, "auto", stage, scripted)
    fixed = run_ranks(train, world_size, FOURFOLD, stage, kwargs)
    for (state, n_buckets), (expected, _) in zip(auto, fixed):
        assert n_buckets == [3] * STEPS + [12] * STEPS + [2] * STEPS + [12] * 4
        assert_same_bits(state, expected)


def test_auto_over_gloo_between_processes():
    kwargs = {"transport": "torch"}
    scripted = {**kwargs, "ms": [SECOND_WINS] * 2}
    auto = run_ranks(train_in_a_process, 2, "auto", 2, scripted, backend="gloo")
    fixed = run_ranks(train_in_a_process, 2, DEFAULT, 2, kwargs, backend="gloo")
    for (state, n_buckets), (expected, _) in zip(auto, fixed):
        assert n_buckets[-1] == 12
        assert_same_bits(state, expected)


class Tied(nn.Module):
    """Embedding and head are one matrix, larger than a bucket."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        self.middle = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
        self.head = nn.Linear(32, 256, bias=False)
        self.head.weight = self.embed.weight


def train_tied(bucket_mb, stage):
    mesh, model = Mesh(device="cpu"), drawn(Tied())
    options = {"bucket_mb": bucket_mb, "first_bucket_mb": QUARTER, "split_embedding": True}
    parallelize(model, mesh, zero_stage=stage, units=[], **options)
    engine = engine_of(model)
    if engine.auto_bucket is not None:
        engine.auto_bucket._mark = Clock(engine, {3: 3.0, 7: 1.0})
    optimizer = AdamW(model.parameters(), lr=0.01)
    for step in range(N_STEPS):
        tokens = torch.arange(8).add(7 * step + mesh.rank)
        model.head(model.middle(model.embed(tokens))).square().mean().backward()
        assert engine.split.bucket is engine.buckets[0]
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict(), len(engine.buckets)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_split_embedding_moves_with_its_bucket(stage):
    """Two ranks: a + b has the same bits in any order."""
    auto, fixed = (run_ranks(train_tied, 2, mb, stage) for mb in ("auto", DEFAULT))
    for (parameters, n_buckets), (expected, _) in zip(auto, fixed):
        assert n_buckets == 7
        assert_same_bits(parameters, expected)


def choose(ms):
    run = Run("auto", 2, ms=ms)
    said = [run.engine.describe().splitlines()[1]]
    for _ in range(N_STEPS):
        run.step()
    return run.engine.auto_bucket.bucket_mb, said, run.engine.describe().splitlines()[1]


def test_ranks_choose_alike_by_the_slowest_of_them(capsys):
    """Rank 0 alone would take the default, rank 1 a quarter or four times that."""
    ms = [{3: 1.0, 12: 3.5, 2: 2.0}, {3: 9.0, 12: 3.0, 2: 4.0}]
    first, second = run_ranks(choose, 2, ms)
    assert first == second
    assert first[0] == QUARTER
    chosen = (
        "bucket_mb=auto: 0.00390625 "
        "(size and ms of a step: 0.015625 9.0, 0.00390625 3.5, 0.0625 4.0)"
    )
    assert first[1:] == (["bucket_mb=auto: measuring 0.015625"], chosen)
    assert capsys.readouterr().err.count(f"fastpar: {chosen}\n") == 1


def test_the_first_step_of_a_size_is_not_timed():
    """It touches new memory, and learns."""

    def body():
        run = Run("auto", 1)
        times = iter([0.0, 1.0, 2.0, 9.0, 100.0, 101.0, 104.0, 108.0, 900.0, 902.0, 904.0, 906.0])
        run.engine.auto_bucket._mark = lambda device: next(times)
        for _ in range(N_STEPS):
            run.step()
        assert list(run.engine.auto_bucket.times_ms.values()) == [1000.0, 3000.0, 2000.0]

    run_ranks(body, 2)


def test_only_the_first_zero_grad_of_a_step_counts():
    def body():
        run = Run("auto", 1, ms=[SECOND_WINS] * 2)
        for _ in range(STEPS - 1):
            run.step()
            run.optimizer.zero_grad()
        run.step(set_to_none=False)  # the gradients are not forgotten
        assert run.n_buckets == [3] * (STEPS + 1)
        run.step()
        assert run.n_buckets[-1] == 12

    run_ranks(body, 2)


def test_no_memory_of_the_transport_is_taken_after_the_start():
    def body(stage):
        run = Run("auto", stage, ms=[SECOND_WINS] * 2)
        taken = run.engine.groups.reduce._heap_used
        for _ in range(N_STEPS):
            run.step()
        assert run.n_buckets[-1] == 12
        assert run.engine.groups.reduce._heap_used == taken
        own = [b.grad if stage == 0 else b.flat for b in run.engine.buckets]
        places = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in own)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))

    for stage in (0, 1):
        run_ranks(body, 2, stage)


def test_nothing_to_choose():
    """One rank; a model that fits into one bucket."""

    def body(stage, **kwargs):
        return Run("auto", stage, **kwargs).engine.auto_bucket

    assert body(0) is None
    layouts = candidates({1.0: "one"}, lambda mb: "one")
    assert layouts == {1.0: "one"}
    layouts = candidates({8.0: "b"}, lambda mb: {2.0: "a", 32.0: "b"}[mb])
    assert list(layouts) == [8.0, 2.0]


def test_arena_cuts_the_same_memory_again():
    class Plain(Collectives):
        device = torch.device("cpu")
        barrier = _all_reduce = _reduce_scatter = _all_gather = _broadcast = None

    arena = Arena(Plain(), 3 * 4096)
    first, second = arena.empty(5, torch.float32), arena.empty(2048, torch.bfloat16)
    assert second.data_ptr() - first.data_ptr() == 4096
    assert (first.shape, second.dtype) == ((5,), torch.bfloat16)
    arena.reset()
    assert arena.empty(1, torch.float64).data_ptr() == first.data_ptr()


def test_another_word_is_refused():
    with pytest.raises(ValueError, match="parallelize: expected bucket_mb in MiB, None or 'auto'"):
        Run("large", 0)
