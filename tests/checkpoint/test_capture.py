"""What each rank writes: together everything once, and nobody all of it."""

import pytest
import torch
from saved import whole_tensors

from fastpar import GPT, AdamW, GPTConfig, Mesh, parallelize
from fastpar.checkpoint import saver as saver_module
from fastpar.checkpoint.saver import Capture, piece_runs, save_checkpoint
from fastpar.engine.engine import engine_of_parameter
from fastpar.settings.parallel import Parallel
from fastpar.sharding.placements import check_cover, cut_runs
from fastpar.testing import run_ranks

CONFIG = GPTConfig(n_layer=2, n_head=4, n_embd=64, block_size=8, vocab_size=301)
MESHES = [(1, 1, 0, None), (3, 1, 0, None), (4, 1, 1, None), (3, 1, 2, None), (4, 1, 3, None),
          (4, 1, 3, 2), (4, 2, 0, None), (4, 2, 3, None), (4, 4, 0, None)]  # fmt: skip


def build(tp, stage, shard_size=None, dtype=torch.float32, **options):
    model = GPT(CONFIG).to(dtype)
    mesh = Mesh(tp=tp, device="cpu")
    parallelize(model, mesh, Parallel.of(zero_stage=stage, shard_size=shard_size, bucket_mb=0.05))
    optimizer = AdamW(model.parameters(), lr=1e-3, **options)
    x = torch.arange(8).repeat(mesh.dp_size, 1)[mesh.dp_rank][None]
    model(x, x).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize(("ranks", "tp", "stage", "shard_size"), MESHES)
def test_the_pieces_of_all_ranks_are_the_whole(ranks, tp, stage, shard_size):
    def work():
        model, _ = build(tp, stage, shard_size)
        found = {}
        for name, p in model.named_parameters():
            engine = engine_of_parameter(p)
            shards = engine.shards
            found[name] = piece_runs(p, engine), shards.copy_of(p), shards.whole_shape(p)
        return found

    everyone = run_ranks(work, ranks)
    for name, (_, (_, n_copies), shape) in everyone[0].items():
        for copy in range(n_copies):
            pieces = [rank[name][0] for rank in everyone if rank[name][1][0] == copy]
            assert check_cover(pieces, shape.numel()) is None, (name, copy)


@pytest.mark.parametrize(("ranks", "tp", "stage", "shard_size"), MESHES)
def test_each_rank_copies_its_share(ranks, tp, stage, shard_size):
    """It copies as much of the optimizer's state as the others, and never all of the weights."""

    def work():
        capture = Capture(*build(tp, stage, shard_size), shard_mb=0.01)
        items = capture.take().items
        sizes = [
            sum(i.host.nbytes for i in items if (i.weight is None) == moments)
            for moments in (True, False)
        ]
        return *sizes, capture.nbytes, [(i.key, i.shape, i.runs) for i in items if not i.weight]

    everyone = run_ranks(work, ranks)
    moments = [rank[0] for rank in everyone]
    n = sum(p.numel() for p in GPT(CONFIG).parameters())
    assert sum(moments) >= 8 * n
    assert max(moments) < 1.3 * 8 * n / ranks + 4096 * 8
    if ranks > 1:
        assert max(rank[1] for rank in everyone) < 0.7 * 4 * n
    written = {}
    for rank in everyone:
        for key, shape, runs in rank[3]:
            written.setdefault((key, shape), []).append(runs)
    for (_, shape), pieces in written.items():
        assert check_cover(pieces, torch.Size(shape).numel()) is None


def test_the_host_copy_is_made_once():
    model, optimizer = build(1, 0)
    capture = Capture(model, optimizer)
    capture.allocate()
    first = {i.key: i.host.data_ptr() for i in capture.take().items}
    model.wpe.weight.data.fill_(7.0)
    items = {i.key: i for i in capture.take().items}
    assert {key: i.host.data_ptr() for key, i in items.items()} == first
    assert bool((items["transformer.wpe.weight"].host == 7.0).all())
    assert capture.nbytes == sum(p.numel() for p in model.parameters()) * 12 + 4 * len(
        list(model.parameters())
    ) - 4 * 64 * (384 - 301)


def test_the_host_copy_is_made_of_powers_of_two(monkeypatch):
    """As torch rounds what it pins: of a copy in one piece up to half would be unused."""
    model, optimizer = build(1, 0)
    whole = Capture(model, optimizer)
    expected = {item.key: item.host for item in whole.take().items}
    monkeypatch.setattr(saver_module, "_BLOCK", 1 << 17)
    zeros, capture = torch.zeros, Capture(model, optimizer)
    with monkeypatch.context() as on_a_gpu:
        on_a_gpu.setattr(torch, "zeros", lambda *size, pin_memory=False, **of: zeros(*size, **of))
        on_a_gpu.setattr(capture, "device", torch.device("cuda"))
        capture.allocate()
    sizes = [block.numel() for block in capture._blocks]
    used = sum(-(-host.nbytes // 64) * 64 for host in expected.values())
    assert all(size.bit_count() == 1 for size in sizes)
    assert used <= sum(sizes) < used + (1 << 17)
    found = {item.key: item.host for item in capture.take().items}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], host) for key, host in expected.items())


def test_what_follows_a_copy_does_not_change_it(tmp_path):
    """At stage 3 the memory of a bucket is used again for the next."""

    def work():
        model, optimizer = build(1, 3)
        expected = {k: v.clone() for k, v in model.state_dict().items()}
        path = save_checkpoint(tmp_path, step=1, model=model, optimizer=optimizer)
        return path, expected

    path, expected = run_ranks(work, 2)[0]
    weights, _ = whole_tensors(path)
    assert torch.equal(weights["transformer.wpe.weight"], expected["wpe.weight"])
    assert torch.equal(weights["transformer.wte.weight"], expected["wte.weight"][:301])
    stored = weights["transformer.h.1.mlp.c_fc.weight"]
    assert torch.equal(stored, expected["h.1.mlp.c_fc.weight"].t())


def test_holes_of_a_padded_vocabulary_are_not_written():
    def work():
        model, optimizer = build(4, 0)
        p = model.wte.weight
        runs = piece_runs(p, engine_of_parameter(p))
        items = Capture(model, optimizer).take().items
        return runs, [i for i in items if i.key == "wte.weight/exp_avg"]

    last, items = run_ranks(work, 4)[3]
    assert [r.start for r in last] == [-1]  # 384 rows on 4 ranks in slices of 128
    assert items == []
    assert cut_runs(last, 0, 5)[0].length == 5
