"""The engine: right gradients for every way of running backward, and collectives in one order.

tests/contracts/ has whole runs of every stage, way of accumulating and number of ranks.
"""

import contextlib
import functools

import pytest
import torch
from cells import covering
from torch import nn
from torch.utils.checkpoint import checkpoint

from fastpar import GPT, AdamW, GPTConfig, engine_of, parallelize
from fastpar.comm.collectives import Collectives
from fastpar.comm.mesh import Mesh
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

SMALL = {"bucket_mb": 0.0021, "first_bucket_mb": 0.001}  # a bucket per parameter or two
stages = pytest.mark.parametrize("stage", [0, 1, 2, 3])


class Net(nn.Module):
    """Tied embedding, a block used twice, norms; mode: none | checkpoint."""

    def __init__(self, mode="none", seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)  # the default one is shared by threads
        self.mode = mode
        self.wte = nn.Embedding(13, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.wte.weight
        self.extra = nn.Linear(8, 8)
        with torch.no_grad():
            for p in self.parameters():
                p.uniform_(-0.5, 0.5, generator=generator)

    def forward(self, idx, use_extra=True):
        x = self.wte(idx)
        for block in (*self.blocks, self.blocks[0]):
            if self.mode == "none":
                x = x + block(x).tanh()
            else:
                x = x + checkpoint(block, x, use_reentrant=False).tanh()
        if use_extra:
            x = x + self.extra(x)
        return self.head(self.norm(x))


def one_rank():
    return Mesh(device="cpu")


def batch(i):
    generator = torch.Generator().manual_seed(i)
    return torch.randint(0, 13, (3, 5), generator=generator)


def loss_of(model, i, **kwargs):
    idx = batch(i)
    logits = model(idx, **kwargs)
    return nn.functional.cross_entropy(logits.flatten(0, 1), idx.roll(1, 1).flatten())


def gradients(model):
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def reduced(model):
    """The reduced gradients of a parallel model, whole at every stage. Ranks: all."""
    names = {p: n for n, p in model.named_parameters()}
    return {names[p]: g.clone() for p, g in engine_of(model).grads()}


def tree(terms):
    """((0 + 1) + (2 + 3)) + ..., what is left over folded from the right."""
    while len(terms) > 1:
        pairs = [a + b for a, b in zip(terms[::2], terms[1::2])]
        terms = pairs + terms[2 * len(pairs) :]
    return terms[0]


def mean_of(*batches):
    """What ranks should agree on: gradients of each one's batches, added in a tree."""
    ranks = []
    for of_rank in batches:
        model = Net()
        for i in of_rank:
            loss_of(model, i).backward()
        ranks.append(gradients(model))
    return {name: tree([g[name] for g in ranks]) / len(ranks) for name in ranks[0]}


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert (value is None) == (b[name] is None), name
        assert value is None or torch.equal(value, b[name]), name


@pytest.mark.parametrize("mode", ["none", "checkpoint"])
def test_one_rank_has_the_bits_of_plain_autograd(mode):
    plain, model = Net(mode), Net(mode)
    parallelize(model, one_rank(), Parallel.of(**SMALL))
    engine = engine_of(model)
    for bucket in engine.buckets:
        bucket.grad.fill_(float("nan"))
    for step in range(6):
        for micro in range(2):
            for m in (plain, model):
                loss_of(m, 2 * step + micro, use_extra=step % 2 == 0).backward()
        assert_same(gradients(plain), gradients(model))
        storages = {g.untyped_storage().data_ptr() for _, g in engine.grads()}
        assert storages <= {bucket.grad.untyped_storage().data_ptr() for bucket in engine.buckets}
        for m in (plain, model):
            m.zero_grad(set_to_none=step % 3 != 1)


@covering(2, ("stage", [0, 1, 2, 3]), ("world_size", [2, 3]), ("deterministic", [False, True]))
def test_gradients_are_the_mean_over_ranks(stage, world_size, deterministic):
    """Bit for bit, in the order of the tree, whatever the buckets are."""

    def ranks():
        mesh = Mesh()
        options = {"zero_stage": stage, "deterministic": deterministic, **SMALL}
        model = parallelize(Net("checkpoint"), mesh, Parallel.of(**options))
        result = []
        for step in range(3):
            loss_of(model, step * world_size + mesh.dp_rank).backward()
            result.append(reduced(model))
            model.zero_grad()
        return result

    results = run_ranks(ranks, world_size)
    for step in range(3):
        expected = mean_of(*([step * world_size + r] for r in range(world_size)))
        for result in results:
            assert_same(result[step], expected)


def recording(monkeypatch):
    """Log (rank, bucket) of every reduction that an engine launches."""
    log = []
    for name in ("all_reduce", "reduce_scatter"):
        real = getattr(Collectives, name)

        def logged(self, *args, tag=0, real=real, **kwargs):
            log.append((self.rank, tag))
            return real(self, *args, tag=tag, **kwargs)

        monkeypatch.setattr(Collectives, name, logged)
    return log


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_launch_order_does_not_follow_the_hooks(monkeypatch, stage):
    """Rank 1 runs its two branches the other way round, so its hooks fire in another order."""

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x, swapped):
            first, second = (self.b, self.a) if swapped else (self.a, self.b)
            return second(first(x)).sum()

    log, fired = recording(monkeypatch), ([], [])

    def ranks():
        mesh, small = Mesh(), {"bucket_mb": 0.001, "first_bucket_mb": 0.001}
        model = parallelize(Branches(), mesh, Parallel.of(zero_stage=stage, **small))
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda _, name=name: fired[mesh.rank].append(name))
        for _ in range(3):
            model(torch.ones(2, 16), mesh.rank == 1).backward()
            model.zero_grad()
        return [tag for rank, tag in log if rank == mesh.rank]

    first, second = run_ranks(ranks, 2)
    assert fired[0] != fired[1]
    n = len(set(first))
    assert n > 1
    assert first == second == list(range(n)) * 3


@stages
def test_no_sync_adds_up_without_communication_and_nothing_is_reduced_twice(monkeypatch, stage):
    log = recording(monkeypatch)

    def ranks():
        mesh = Mesh()
        model = parallelize(Net(), mesh, Parallel.of(zero_stage=stage, **SMALL))
        engine, result = engine_of(model), []

        def sent():
            return sum(rank == mesh.rank for rank, _ in log)

        for step in range(2):
            before = sent()
            for micro in range(3):
                with engine.no_sync() if micro < 2 or step else contextlib.nullcontext():
                    loss_of(model, step * 6 + micro * 2 + mesh.dp_rank).backward()
                assert sent() - before == (0 if micro < 2 or step else len(engine.buckets))
            for _ in range(2):  # what no_sync() left
                engine.reduce_rest()
                assert sent() - before == len(engine.buckets)
            result.append(reduced(model))
            model.zero_grad()
        return result

    first, second = run_ranks(ranks, 2)
    for step in range(2):
        expected = mean_of(*([step * 6 + m * 2 + r for m in range(3)] for r in range(2)))
        assert_same(first[step], expected)
        assert_same(first[step], second[step])


@stages
def test_a_micro_batch_of_several_forwards(stage):
    """Three of two forwards and two backward passes each: only the last one reduces."""

    def ranks():
        mesh = Mesh()
        model = parallelize(Net(), mesh, Parallel.of(zero_stage=stage, **SMALL))
        engine, found = engine_of(model), []
        for step in range(2):
            for micro in range(3):
                engine.begin_micro_batch(last=micro == 2)
                first = 6 * (2 * step + mesh.dp_rank) + 2 * micro
                for loss in [loss_of(model, first), loss_of(model, first + 1)]:
                    before = engine.log.hashes[0]
                    loss.backward()
                    assert (engine.log.hashes[0] != before) == (micro == 2)
                assert engine.micro_batches.begun == micro + 1
            found.append(reduced(model))
            model.zero_grad()
        return found

    results = run_ranks(ranks, 2)
    for step in range(2):
        expected = mean_of(*(range(6 * n, 6 * n + 6) for n in (2 * step, 2 * step + 1)))
        for result in results:
            for name, grad in result[step].items():
                # Six sums of values of at most 4 in another order: as many roundings on each side.
                assert (grad - expected[name]).abs().max() <= 12 * 2**-24 * 4.0, name


def test_an_engine_refuses_to_step_with_gradients_that_are_not_reduced():
    model = parallelize(Net(), one_rank(), Parallel.of(**SMALL))
    engine = engine_of(model)
    message = "from 'empty' to 'backward' or 'empty' or 'reduced', got 'stepped'"
    with pytest.raises(RuntimeError, match=message):
        engine.after_step()
    with engine.no_sync():
        loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"from 'local' .*, got 'stepped'"):
        engine.after_step()
    next(model.parameters()).register_post_accumulate_grad_hook(
        lambda p: engine.begin_micro_batch(last=True)
    )
    with pytest.raises(RuntimeError, match="expected a call between backward passes"):
        loss_of(model, 0).backward()


@stages
def test_sums_of_half_gradients_are_fp32(stage):
    class Weight(nn.Linear):
        def forward(self, x):
            return (self.weight * x).sum()

    def ranks():
        mesh = Mesh()
        model = parallelize(Weight(4, 1).bfloat16(), mesh, zero_stage=stage)
        model([1.0, 2.0**-8, 2.0**-8, 2.0**-8][mesh.dp_rank]).backward()
        return reduced(model)["weight"]

    # In bf16 each of the small terms would vanish next to 1.
    expected = torch.tensor((1.0 + 3 * 2.0**-8) / 4).bfloat16()
    for grad in run_ranks(ranks, 4):
        assert (grad == expected).all()
    assert expected != torch.tensor(0.25).bfloat16()


# Reports and checks


def test_grads_are_listed_in_registration_order():
    model = parallelize(Net(), one_rank())
    loss_of(model, 0, use_extra=False).backward()
    expected = [p for n, p in model.named_parameters() if not n.startswith("extra")]
    pairs = engine_of(model).grads()
    assert [id(p) for p, _ in pairs] == [id(p) for p in expected]
    assert all(p.grad is g for p, g in pairs)


def test_scalars_are_summed_in_rank_order():
    """2**53 + 1 is 2**53: in rank order only the last one may be more."""

    def ranks(deterministic):
        mesh = Mesh()
        engine = engine_of(parallelize(nn.Linear(2, 2), mesh, deterministic=deterministic))
        mine = torch.where(torch.arange(3) == mesh.rank, 2.0**53, 1.0).double()
        kept = mine.clone()
        total = engine.all_reduce_scalars(mine) - 2.0**53
        assert torch.equal(mine, kept)
        return total.tolist()

    for deterministic in (False, True):
        assert run_ranks(ranks, 3, deterministic) == [[0.0, 0.0, 2.0]] * 3
    engine = engine_of(parallelize(nn.Linear(2, 2), one_rank()))
    assert engine.all_reduce_scalars(torch.ones(2)).tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match=r"expected fp32 or fp64, got dtype=torch\.int64"):
        engine.all_reduce_scalars(torch.ones(2, dtype=torch.int64))


def gloo_ranks_on_one_gpu():
    mesh = Mesh(device="cuda:0")
    model = parallelize(Net().to(mesh.device), mesh, Parallel.of(**SMALL))
    engine = engine_of(model)
    for step in range(3):
        model(batch(step * 2 + mesh.dp_rank).to(mesh.device)).square().mean().backward()
        engine.before_step()
        engine.after_step()
        result = {n: g.cpu() for n, g in gradients(model).items()}
        engine.zero_grad()
    torch.cuda.synchronize()
    assert engine.report.exposed_ms > 0
    engine.check_replicas()
    return result


@pytest.mark.gpu
def test_two_ranks_share_a_gpu_through_gloo():
    """NCCL refuses two ranks on one GPU; gloo runs the engine's CUDA path there."""
    first, second = run_ranks(gloo_ranks_on_one_gpu, 2, backend="gloo")
    assert_same(first, second)


# Gradients that are a sum over tp are whole once, and counted once;
# tests/contracts/test_same_run.py has every way to accumulate them.


SIZES = {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 8, "vocab_size": 30, "dropout": 0.0}


# eps well above the rounding of gradients that are 0 in exact arithmetic (those of the keys' bias).
HYPER = {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-4}


def gpt():
    return GPT(GPTConfig(**SIZES)).double()


def tokens(step, micro, rank):
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randint(0, 30, (2, 8), generator=generator)


def split(tp, stage=0, **options):
    return parallelize(gpt(), Mesh(tp=tp), Parallel.of(zero_stage=stage, bucket_mb=0.01, **options))


def whole_grads(model):
    engine = engine_of(model)
    return {
        engine.shards.layout.slots[engine.shards.index[p]].spec.names[0]: g
        for p, g in engine.grads()
    }


def reference(dp, micros, steps=1, optimizer_of=AdamW):
    """Gradients before each step and parameters after all, of one process."""
    model = gpt()
    optimizer, grads = optimizer_of(model.parameters(), **HYPER), []
    for step in range(steps):
        for micro in range(micros):
            for rank in range(dp):
                idx = tokens(step, micro, rank)
                (model(idx, idx) / dp).backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return grads, model.state_dict()


def assert_near(got, expected):
    assert got.keys() == expected.keys()
    for name, want in expected.items():
        bound = 1e-12 * want.abs().max().item() + 1e-18
        assert (got[name] - want).abs().max().item() <= bound, name


def accumulates(stage, look, no_sync):
    """Gradients and parameters of a rank of two steps; between backwards it may look at p.grad."""
    model = split(2, stage)
    engine, mesh = engine_of(model), engine_of(model).mesh
    optimizer, grads = AdamW(model.parameters(), **HYPER), []
    for step in range(2):
        for micro in range(3):
            idx = tokens(step, micro, mesh.dp_rank)
            quiet = no_sync and micro < 2
            with engine.no_sync() if quiet else contextlib.nullcontext():
                model(idx, idx).backward()
            if look:
                seen = whole_grads(model)
                if stage == 0 and not quiet:  # p.grad itself can be read
                    named = dict(model.named_parameters())
                    assert all(torch.equal(named[n].grad, g) for n, g in seen.items() if "ln_" in n)
                if not no_sync and step == 0:
                    assert_near(seen, reference(mesh.dp_size, micro + 1)[0][0])
        grads.append(whole_grads(model))
        optimizer.step()
        optimizer.zero_grad(set_to_none=not look)
    return grads, model.state_dict()


@covering(
    2,
    (("dp", "stage"), [(1, 0), (2, 0), (2, 1), (2, 2), (2, 3)]),
    ("look", [False, True]),
    ("no_sync", [False, True]),
)
def test_several_backwards_add_up(dp, stage, look, no_sync):
    expected, parameters = reference(dp, 3, 2)
    for grads, state in run_ranks(accumulates, dp * 2, stage, look, no_sync):
        for got, want in zip(grads, expected, strict=True):
            assert_near(got, want)
        assert_near(state, parameters)


class Scaled(nn.Module):
    """A norm that one rank may leave out, and one that nobody uses."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.full((4,), 2.0)) for _ in range(3))
        self.tp = None

    def tensor_parallel(self, tp):
        self.tp = tp
        return dict.fromkeys("abc", tp.per_token)

    def forward(self, with_b):
        mine = torch.arange(4.0) + (self.tp.rank if self.tp else 0)
        loss = (self.a * mine).sum()
        return loss + (self.b * mine).sum() if with_b else loss


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("users", [(0,), (1,), (0, 1)])
def test_parameters_that_some_ranks_leave_out(users, stage):
    """Ranks of a tp group run the same model, but ranks of dp need not use the same of it."""

    def rank():
        mesh = Mesh(tp=2)
        model = parallelize(Scaled(), mesh, zero_stage=stage)
        optimizer = AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
        model(mesh.dp_rank in users).backward()
        optimizer.step()
        return {name: value.tolist() for name, value in model.state_dict().items()}

    for state in run_ranks(rank, 4):
        first_step = [pytest.approx(1.9, abs=1e-5)] * 3
        assert (state["a"][1:], state["b"][1:]) == (first_step, first_step)
        assert state["c"] == [2.0] * 4

    def part():
        """What only one rank of tp has is a part like any other; the other's is 0."""
        mesh = Mesh(tp=2)
        model = parallelize(Scaled(), mesh, zero_stage=1)
        model(mesh.tp_rank == 1).backward()
        return {n: g.tolist() for n, g in whole_grads(model).items()}

    for grads in run_ranks(part, 4):
        assert grads["b"] == [1.0, 2.0, 3.0, 4.0]
        assert grads["a"] == [1.0, 3.0, 5.0, 7.0]


# Other optimizers, and clipping by hand


@pytest.mark.parametrize(
    ("ranks", "stage", "foreach"),
    [*((4, stage, None) for stage in (0, 1, 3)), (2, 0, False), (4, 0, True)],
)
def test_other_optimizers_step_with_the_same_sums(ranks, stage, foreach):
    """Two of one model; torch's at stage 0: what it does to an element depends on that alone."""
    stock = functools.partial(torch.optim.AdamW, foreach=foreach)

    def rank():
        model = split(2, stage)
        names = dict(model.named_parameters())
        of = [[p for n, p in names.items() if ("ln_" in n) == norm] for norm in (True, False)]
        optimizers = [
            AdamW(part, **HYPER) if foreach is None else stock(part, **HYPER) for part in of
        ]
        for step in range(2):
            for micro in range(2):
                idx = tokens(step, micro, engine_of(model).mesh.dp_rank)
                model(idx, idx).backward()
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        engine_of(model).check_replicas()
        return model.state_dict()

    expected = reference(ranks // 2, 2, 2, AdamW if foreach is None else torch.optim.AdamW)[1]
    for state in run_ranks(rank, ranks):
        assert_near(state, expected)


CHANGED = (
    r"Engine: expected gradients as backward left them with tp=2, got p\.grad of '.*' "
    r"changed in place; a rank sees its part of the norm only: clip with fastpar\.AdamW\("
    r"max_grad_norm=\.\.\.\)"
)


@pytest.mark.parametrize("tp", [2, 1])
@pytest.mark.parametrize("optimizer_of", [AdamW, torch.optim.AdamW, torch.optim.SGD])
def test_clipping_by_hand_is_refused_with_tp(optimizer_of, tp):
    def rank(clip, limit):
        model = split(tp)
        optimizer, idx = optimizer_of(model.parameters(), lr=0.1), tokens(0, 0, 0)
        for clips in (False, True, False):  # not changed, changed, new gradients
            model(idx, idx).backward()
            if clips:
                clip(model.parameters(), limit)
            refused = clips and tp > 1
            with (
                pytest.raises(RuntimeError, match=CHANGED) if refused else contextlib.nullcontext()
            ):
                optimizer.step()
            optimizer.zero_grad()

    for clip, limit in ((nn.utils.clip_grad_value_, 1e-6), (nn.utils.clip_grad_norm_, 1e-3)):
        run_ranks(rank, 2, clip, limit)
