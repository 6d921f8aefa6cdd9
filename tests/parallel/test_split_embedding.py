"""split_embedding.py: both parts of a tied embedding's gradient, sent apart, are its gradient."""

import copy
import pickle

import pytest
import torch
from torch import nn

from fastpar import GPT, GPTConfig, Mesh, engine_of, parallelize
from fastpar.parallel.split_embedding import head_weight
from fastpar.sharding.layout import default_bucket_mb
from fastpar.testing import run_ranks

V, C = 400, 16
SMALL = {"bucket_mb": 0.005, "first_bucket_mb": 0.002}


class Net(nn.Module):
    """nn.Embedding and nn.Linear that share their weight."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)  # the default one is shared by threads
        self.wte = nn.Embedding(V, C)
        self.h = nn.ModuleList(nn.Linear(C, C) for _ in range(3))
        self.head = nn.Linear(C, V, bias=False)
        self.head.weight = self.wte.weight
        self.double()
        with torch.no_grad():
            for p in self.parameters():
                p.uniform_(-0.3, 0.3, generator=generator)

    def forward(self, idx, part="all"):
        if part == "head":
            return self.head(torch.ones(2, C, dtype=torch.float64))
        x = self.wte(idx)
        if part == "embedding":
            return x
        for block in self.h:
            x = x + block(x).tanh()
        return self.head(x)


def loss_of(model, idx):
    logits = model(idx[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), idx[:, 1:].flatten())


def batch(step, rows=12, vocab=V):
    return torch.randint(0, vocab, (rows, 9), generator=torch.Generator().manual_seed(step))


def steps(build, backward, accum, early, **options):
    """Four steps of gradient descent; (parameters, how often rows were sent)."""
    model, mesh = build(), Mesh()
    parallelize(model, mesh, split_embedding=early, grad_accum_steps=accum, **SMALL, **options)
    engine, sent = engine_of(model), 0
    if engine.split is not None:
        keep = engine.split._keep_rows

        def counted(grad):
            nonlocal sent
            sent += 1
            keep(grad)

        engine.split._keep_rows = counted
    for step in range(4):
        parts = batch(step).chunk(mesh.dp_size * accum)
        for j in range(accum):
            backward(model, parts[mesh.dp_rank * accum + j], step)
        engine.before_step()
        engine.exchange(None)
        with torch.no_grad():
            for p in engine.params:
                piece = engine.piece(p)
                if piece.grad is not None:
                    piece.param.sub_(piece.grad, alpha=0.5)
        engine.after_step()
        model.zero_grad()
    with engine.gathered():
        return [p.detach().clone() for p in model.parameters()], sent


def once(model, idx, step):
    loss_of(model, idx).backward()


def twice(model, idx, step):
    """Two heads and two embeddings in one backward."""
    (loss_of(model, idx) + loss_of(model, idx.flip(0))).backward()


def without_tokens(model, idx, step):
    """Step 1: nobody uses the embedding; step 2: nobody uses the head."""
    if step == 1:
        model(idx, "head").logsumexp(-1).sum().backward()
    elif step == 2:
        model(idx, "embedding").square().sum().backward()
    else:
        once(model, idx, step)


def assert_close(a, b):
    """Sums in another order: a few roundings of values below 1."""
    for x, y in zip(a, b, strict=True):
        assert (x - y).abs().max() < 32 * torch.finfo(x.dtype).eps


@pytest.mark.parametrize(("accum", "accumulate"), [(1, "shard"), (2, "shard"), (2, "full")])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 3])
def test_it_is_the_unsplit_gradient(ranks, stage, accum, accumulate):
    options = {"zero_stage": stage, "accumulate": accumulate}

    def whole():
        return steps(Net, once, accum, False, accumulate=accumulate)

    def split():
        return steps(Net, once, accum, True, **options)

    expected = run_ranks(whole, ranks)[0][0]
    for params, sent in run_ranks(split, ranks):
        assert_close(params, expected)
        # The first reduction tells how many rows there are; "full" reduces once a step.
        assert sent == 4 * (accum if accumulate == "shard" else 1) - 1


@pytest.mark.parametrize("backward", [twice, without_tokens])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_other_uses_of_the_parameter(stage, backward):
    expected = run_ranks(lambda: steps(Net, backward, 1, False), 2)[0][0]
    for params, _ in run_ranks(lambda: steps(Net, backward, 1, True, zero_stage=stage), 2):
        assert_close(params, expected)


def test_with_copies_of_the_shards():
    expected = run_ranks(lambda: steps(Net, once, 1, False), 4)[0][0]
    results = run_ranks(lambda: steps(Net, once, 1, True, zero_stage=2, shard_size=2), 4)
    for params, sent in results:
        assert_close(params, expected)
        assert sent == 3


def gpt():
    return GPT(GPTConfig(vocab_size=V, block_size=8, n_layer=2, n_head=2, n_embd=C, dropout=0.0))


def gpt_step(model, idx, step):
    model(idx[:, :-1], idx[:, 1:]).backward()


@pytest.mark.parametrize("stage", [0, 3])
def test_the_gpt_of_this_package(stage):
    expected = run_ranks(lambda: steps(gpt, gpt_step, 1, False), 2)[0][0]
    for params, sent in run_ranks(lambda: steps(gpt, gpt_step, 1, True, zero_stage=stage), 2):
        assert_close(params, expected)
        assert sent


def test_a_large_batch_is_sent_in_one_part():
    def many(model, idx, step):
        loss_of(model, torch.arange(V).view(-1, 8)).backward()

    for _, sent in run_ranks(lambda: steps(Net, many, 1, True, zero_stage=2), 2):
        assert sent == 0


def launches(sizes):
    """For each backward, (bucket, whether before its end) in launch order.

    sizes: tokens of each rank in each backward.
    """
    model, mesh = Net(), Mesh()
    parallelize(model, mesh, split_embedding=True, zero_stage=2, **SMALL)
    engine, found = engine_of(model), []
    launch = engine._launch

    def noted(index):
        found[-1].append((index, engine._root != -1))
        launch(index)

    engine._launch = noted
    for row in sizes:
        found.append([])
        idx = torch.arange(row[mesh.dp_rank]) % V
        loss_of(model, idx.view(1, -1)).backward()
        engine.before_step()
        engine.exchange(None)
        engine.after_step()
        model.zero_grad()
    return found


def test_others_do_not_wait():
    """Behind the table's gradient, which is complete when backward ends."""
    many, few = V // 2, 20
    sizes = [(few, few), (few, few), (many, few), (many, many), (few, few), (few, few)]
    for found in run_ranks(launches, 2, sizes):
        n = len(found[0])
        first, last = [*range(n)], [*range(1, n), 0]
        orders = [[index for index, _ in each] for each in found]
        assert orders == [last, first, first, last, last, first]
        for each in found:
            assert all(inside for index, inside in each if index) or each is found[2]


def test_it_is_used_where_the_gradient_exceeds_a_default_bucket():
    def used(rows, **options):
        model = nn.ModuleDict({"wte": nn.Embedding(rows, 64), "head": nn.Linear(64, rows, False)})
        model["head"].weight = model["wte"].weight
        parallelize(model, Mesh(), **options)
        return engine_of(model).split is not None

    rows = int(default_bucket_mb(2, "shm") * 2**20 / (64 * 4))
    assert run_ranks(used, 2, rows + 1) == [True, True]
    assert run_ranks(used, 2, rows) == [False, False]
    # Bucket sizes change no bits, and the split does.
    assert run_ranks(lambda: used(rows, bucket_mb=1e-3), 2) == [False, False]
    assert run_ranks(lambda: used(rows + 1, bucket_mb=100.0), 2) == [True, True]
    assert run_ranks(lambda: used(rows + 1, deterministic=True), 2) == [False, False]
    assert used(rows + 1) is False  # one rank


@pytest.mark.parametrize("options", [{"deterministic": True}, {}])
def test_it_cannot_be_had_without_a_tied_embedding_or_with_fixed_sums(options):
    model = Net() if options else nn.Linear(2, 2)
    with pytest.raises(ValueError, match="expected split_embedding=True with a tied embedding"):
        parallelize(model, Mesh(), split_embedding=True, **options)


def test_copies_and_evaluation_do_not_know_the_split():
    def ranks():
        model = parallelize(Net(), Mesh(), split_embedding=True, **SMALL)
        weight = model.wte.weight
        with torch.no_grad():
            assert head_weight(weight) is weight
        assert head_weight(weight) is not weight
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert head_weight(other.wte.weight) is other.wte.weight
            assert other.head.weight is other.wte.weight
            loss_of(other, batch(0)).backward()
        model(batch(0))
        assert model.head.weight is weight

    run_ranks(ranks, 2)


def memory_of_the_table(stage, rows):
    """Bytes of the table's bucket that this rank has between two steps."""
    model, mesh = Net(), Mesh()
    parallelize(model, mesh, split_embedding=True, zero_stage=stage, **SMALL)
    engine = engine_of(model)
    bucket = engine.split.bucket
    freed, free = [], bucket.free_grad

    def watched():
        freed.append(None if bucket.grad is None else bucket.grad.untyped_storage()._weak_ref())
        free()

    bucket.free_grad = watched
    for step in range(2):
        once(model, batch(step, rows).chunk(mesh.dp_size)[mesh.dp_rank], step)
        engine.before_step()
        engine.exchange(None)
        engine.after_step()
        engine.zero_grad()
    alive = [torch.UntypedStorage._new_with_weak_ptr(weak) for weak in freed]
    for weak in freed:
        torch.UntypedStorage._free_weak_ref(weak)
    return [0 if storage is None else storage.nbytes() for storage in alive]


@pytest.mark.parametrize("rows", [2, 24])
@pytest.mark.parametrize("stage", [2, 3])
def test_nothing_keeps_the_whole_gradient_after_a_step(stage, rows):
    """Sent early (few rows) and late."""
    for found in run_ranks(memory_of_the_table, 2, stage, rows):
        assert found == [0, 0]
