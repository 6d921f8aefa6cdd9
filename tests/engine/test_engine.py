"""engine.py: right gradients for every way of running backward, and collectives in one order."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fastpar.comm.collectives import Collectives
from fastpar.comm.mesh import Mesh
from fastpar.engine.engine import engine_of
from fastpar.engine.parallelize import parallelize
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


def mean_of(models_and_batches):
    """What the ranks should agree on: gradients of each model on its batches, added in a tree."""
    ranks = []
    for model, batches in models_and_batches:
        for i in batches:
            loss_of(model, i).backward()
        ranks.append(gradients(model))
    return {name: tree([g[name] for g in ranks]) / len(ranks) for name in ranks[0]}


def tree(terms):
    """((0 + 1) + (2 + 3)) + ..., what is left over folded from the right."""
    while len(terms) > 1:
        pairs = [a + b for a, b in zip(terms[::2], terms[1::2])]
        terms = pairs + terms[2 * len(pairs) :]
    return terms[0]


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


def test_compiled_modules_give_the_same_gradients():
    plain, model = Net(), parallelize(Net(), one_rank(), Parallel.of(**SMALL))
    compiled = torch.compile(model, backend="aot_eager")
    assert engine_of(compiled) is engine_of(model)
    for step in range(3):
        loss_of(plain, step).backward()
        loss_of(compiled, step).backward()
        assert_same(gradients(plain), gradients(model))
        for m in (plain, model):
            m.zero_grad()


def test_retain_graph_and_two_forwards():
    plain, model = Net(), parallelize(Net(), one_rank())
    for m in (plain, model):
        loss = loss_of(m, 0) + loss_of(m, 1)
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same(gradients(plain), gradients(model))


@pytest.mark.parametrize("mode", ["none", "checkpoint"])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "world_size", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))]
)
@stages
def test_gradients_are_the_mean_over_ranks(stage, world_size, deterministic, mode):
    """Bit for bit, in the order of the tree, whatever the buckets are."""

    def ranks():
        mesh = Mesh()
        options = {"zero_stage": stage, "deterministic": deterministic, **SMALL}
        model = parallelize(Net(mode), mesh, Parallel.of(**options))
        result = []
        for step in range(3):
            loss_of(model, step * world_size + mesh.dp_rank).backward()
            result.append(reduced(model))
            model.zero_grad()
        return result

    results = run_ranks(ranks, world_size)
    for step in range(3):
        expected = mean_of([(Net(mode), [step * world_size + r]) for r in range(world_size)])
        for result in results:
            assert_same(result[step], expected)


class Reentrant(nn.Module):
    """A reentrant checkpoint around one layer, another one outside of it."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x, use_reentrant):
        return self.outer(checkpoint(self.inner, x, use_reentrant=use_reentrant)).sum()


@stages
def test_a_backward_inside_a_backward_is_refused(stage):
    def ranks():
        model = parallelize(Reentrant(), Mesh(), Parallel.of(zero_stage=stage, **SMALL))
        x = torch.ones(2, 16, requires_grad=True)
        model(x, False).backward()
        model(x, True).backward()

    with pytest.raises(RuntimeError, match=r"a backward inside of a backward.*use_reentrant=False"):
        run_ranks(ranks, 2)


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
            return second(first(x)).sum() if swapped is not None else x

    start = [Branches() for _ in range(2)]
    for p, q in zip(start[0].parameters(), start[1].parameters()):
        q.data.copy_(p.data)
    log = recording(monkeypatch)
    order, fired = {}, {}

    def ranks():
        mesh = Mesh()
        model = parallelize(
            start[mesh.rank],
            mesh,
            Parallel.of(zero_stage=stage, bucket_mb=0.001, first_bucket_mb=0.001),
        )
        fired[mesh.rank] = []
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda _, name=name: fired[mesh.rank].append(name))
        for _ in range(3):
            model(torch.ones(2, 16), mesh.rank == 1).backward()
            model.zero_grad()
        order[mesh.rank] = [tag for rank, tag in log if rank == mesh.rank]

    run_ranks(ranks, 2)
    assert fired[0] != fired[1]
    n = len(set(order[0]))
    assert n > 1
    assert order[0] == order[1] == list(range(n)) * 3


@stages
def test_buckets_are_launched_while_backward_runs(stage):
    """The hook on the first layer's input runs near the end.."""

    def ranks():
        mesh = Mesh()
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        first = 0.0025 if stage < 3 else 0.0019  # no units are merged
        parallelize(
            model, mesh, Parallel.of(zero_stage=stage, bucket_mb=0.0025, first_bucket_mb=first)
        )
        engine, launched = engine_of(model), []
        for _ in range(3):
            x = torch.ones(2, 16, requires_grad=True)
            y = model[0](x)
            y.register_hook(lambda _: launched.append(engine.reducer.n_sent))
            model[1:](y).sum().backward()
            model.zero_grad()
        return launched, len(engine.shards.layout.buckets)

    for launched, n in run_ranks(ranks, 2):
        assert n == 4
        assert launched == [3, 3, 3]


@stages
def test_no_sync_adds_up_without_communication(monkeypatch, stage):
    log = recording(monkeypatch)

    def ranks():
        mesh = Mesh()
        model = parallelize(Net(), mesh, Parallel.of(zero_stage=stage, **SMALL))
        engine = engine_of(model)
        result = []
        for step in range(2):
            for micro in range(3):
                before = len([1 for rank, _ in log if rank == mesh.rank])
                with engine.no_sync() if micro < 2 else contextlib.nullcontext():
                    loss_of(model, step * 6 + micro * 2 + mesh.dp_rank).backward()
                sent = len([1 for rank, _ in log if rank == mesh.rank]) - before
                assert sent == (0 if micro < 2 else len(engine.shards.layout.buckets))
            result.append(reduced(model))
            model.zero_grad()
        return result

    results = run_ranks(ranks, 2)
    for step in range(2):
        parts = [(Net(), [step * 6 + m * 2 + r for m in range(3)]) for r in range(2)]
        assert_same(results[0][step], mean_of(parts))
        assert_same(results[0][step], results[1][step])


@stages
def test_finish_reduces_what_no_sync_left_and_nothing_twice(monkeypatch, stage):
    log = recording(monkeypatch)

    def ranks():
        mesh = Mesh()
        model = parallelize(Net(), mesh, Parallel.of(zero_stage=stage, **SMALL))
        engine = engine_of(model)
        with engine.no_sync():
            loss_of(model, mesh.dp_rank).backward()
        sent = [len(log)]
        for _ in range(2):
            dist.barrier()
            engine.reduce_rest()
            dist.barrier()
            sent.append(len(log))
        assert sent[0] == 0
        assert sent[1] == sent[2] == 2 * len(engine.buckets)
        return reduced(model)

    assert_same(run_ranks(ranks, 2)[0], mean_of([(Net(), [0]), (Net(), [1])]))


@pytest.mark.parametrize("accumulate", ["shard", "full"])
@stages
def test_a_plain_loop_with_several_backward_calls(stage, accumulate):
    """Reduced call by call, or all at once."""

    def ranks():
        mesh = Mesh()
        options = {"zero_stage": stage, "accumulate": accumulate, "grad_accum_steps": 3}
        model = parallelize(Net(), mesh, Parallel.of(**options, **SMALL))
        for micro in range(3):
            loss_of(model, 2 * micro + mesh.dp_rank).backward()
        return reduced(model)

    results = run_ranks(ranks, 2)
    assert_same(results[0], results[1])
    expected = mean_of([(Net(), [0, 2, 4]), (Net(), [1, 3, 5])])
    for name, grad in results[0].items():
        if accumulate == "full":
            assert torch.equal(grad, expected[name]), name
        # 3 sums of 2 values of at most 2 against 2 sums of 3: 6 roundings on each side
        assert (grad - expected[name]).abs().max() <= 12 * 2**-24 * 4.0, name


@pytest.mark.parametrize("grad_dtype", [None, pytest.param(torch.float64, marks=pytest.mark.slow)])
@stages
def test_unused_parameters_match_one_process(stage, grad_dtype):
    """Used by nobody: no gradient, on one rank only: a gradient everywhere."""

    def ranks():
        mesh = Mesh()
        model = parallelize(
            Net(), mesh, Parallel.of(zero_stage=stage, grad_dtype=grad_dtype, **SMALL)
        )
        engine = engine_of(model)
        for bucket in engine.buckets:
            for flat in (bucket.grad, bucket.grad_shard):
                if flat is not None:
                    flat.fill_(float("nan"))
        result = []
        for used_by in [(), (1,), (0, 1), (), (0,)] * 5:
            loss_of(model, mesh.dp_rank, use_extra=mesh.dp_rank in used_by).backward()
            engine.before_step()
            engine.exchange(None)
            found = {n for n, p in model.named_parameters() if engine.has_grad(p)}
            grads = {n: g for n, g in reduced(model).items() if n in found}
            assert ("extra.weight" in grads) == bool(used_by)
            assert all(g.isfinite().all() for g in grads.values())
            result.append(grads)
            engine.after_step()
            engine.zero_grad()
        return result[:5]

    results = run_ranks(ranks, 2)
    plain = Net()
    loss_of(plain, 1).backward()
    for a, b in zip(*results):
        assert_same(a, b)
    if grad_dtype is None:
        assert torch.equal(results[0][1]["extra.weight"], plain.extra.weight.grad / 2)


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


def test_main_gradients_are_reduced():
    def ranks():
        mesh = Mesh()
        model = nn.Linear(4, 2).bfloat16()
        parallelize(model, mesh, grad_dtype=torch.float32)
        engine = engine_of(model)
        with engine.no_sync():
            model.weight.sum().backward()
        (model.weight * (mesh.dp_rank * 2.0**-9)).sum().backward()
        return [(p.grad, g.clone()) for p, g in engine.grads()]

    for grads in run_ranks(ranks, 2):
        assert [g.tolist() for _, g in grads] == [[[1.0 + 2.0**-10] * 4] * 2]
        assert all(grad.isnan().all() for grad, _ in grads)  # it is elsewhere


def gloo_gradients(stage, transport):
    mesh = Mesh()
    model = parallelize(Net(), mesh, Parallel.of(zero_stage=stage, transport=transport, **SMALL))
    result = []
    for step in range(3):
        loss_of(model, step * mesh.dp_size + mesh.dp_rank).backward()
        result.append(reduced(model))
        model.zero_grad()
    engine_of(model).check_replicas()
    # 2**53 + 1 is 2**53: in rank order only the last one may be more
    mine = torch.where(torch.arange(3) == mesh.rank, 2.0**53, 1.0).double()
    total = engine_of(model).all_reduce_scalars(mine) - 2.0**53
    if mesh.dp_size == 3:
        assert total.tolist() == [0.0, 0.0, 2.0]
    return result


@pytest.mark.parametrize(
    ("world_size", "stage", "transport"),
    [
        (2, 0, "torch"),
        pytest.param(3, 1, "shm", marks=pytest.mark.slow),
        pytest.param(3, 3, "torch", marks=pytest.mark.slow),
    ],
)
def test_processes_have_the_bits_of_the_tree(world_size, stage, transport):
    results = run_ranks(gloo_gradients, world_size, stage, transport, backend="gloo")
    for step in range(3):
        expected = mean_of([(Net(), [step * world_size + r]) for r in range(world_size)])
        for result in results:
            assert_same(result[step], expected)


@pytest.mark.gpu
def test_one_gpu_has_the_gradients_of_plain_autograd():
    mesh = Mesh(device="cuda")
    plain, model = Net().to(mesh.device), Net().to(mesh.device)
    parallelize(model, mesh, Parallel.of(**SMALL))
    idx = batch(0).to(mesh.device)
    for m in (plain, model):
        m(idx).square().mean().backward()
    assert_same(gradients(plain), gradients(model))


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
