"""Both transports against sums written out: every collective, dtype and number of ranks."""

import functools

import pytest
import torch

from fastpar.comm.collectives import SUMMABLE, TorchCollectives, _sum_parts
from fastpar.comm.shm import ShmCollectives
from fastpar.testing import run_ranks

TRANSPORTS = {
    "shm": functools.partial(ShmCollectives, timeout_s=30.0, chunk_kb=16, heap_gb=0.01),
    "torch": functools.partial(TorchCollectives, in_rank_order=True),
}


def values(rank, n, dtype):
    generator = torch.Generator().manual_seed(100 + rank)
    if dtype == torch.int64:
        return torch.randint(-(2**40), 2**40, (n,), generator=generator)
    return (torch.randn(n, generator=generator) * 10.0 ** (rank % 3)).to(dtype)


def tree(x):
    """Neighbours are added, then the sums' neighbours."""
    while len(x) > 1:
        x = [a + b for a, b in zip(x[::2], x[1::2])] + x[len(x) // 2 * 2 :]
    return x[0]


def expected_sum(world_size, n, dtype, mean):
    """The tree over the ranks, 16-bit types in fp32; not rounded to the dtype."""
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = tree([values(rank, n, dtype).to(wide) for rank in range(world_size)])
    return total / world_size if mean else total


def reductions(transport, n, dtype, mean):
    c = TRANSPORTS[transport]()
    wide = expected_sum(c.world_size, n, dtype, mean)
    whole = wide.to(dtype)
    part = whole.view(c.world_size, -1)[c.rank]
    results = {}

    x = values(c.rank, n, dtype)
    c.all_reduce(x, mean=mean)
    results["all_reduce"] = torch.equal(x, whole)

    x, out = values(c.rank, n, dtype), torch.empty(n // c.world_size, dtype=dtype)
    c.reduce_scatter(out, x, mean=mean)
    results["reduce_scatter"] = torch.equal(out, part)

    x = values(c.rank, n, dtype)
    own = x.view(c.world_size, -1)[c.rank]
    c.reduce_scatter(own, x, mean=mean)
    results["reduce_scatter in place"] = torch.equal(own, part)

    x, out = values(c.rank, n, dtype), torch.empty(n // c.world_size, dtype=wide.dtype)
    c.reduce_scatter(out, x, mean=mean)
    results["reduce_scatter into fp32"] = torch.equal(out, wide.view(c.world_size, -1)[c.rank])

    full = torch.empty(n, dtype=dtype)
    c.all_gather(full, part.clone())
    results["all_gather"] = torch.equal(full, whole)

    full = torch.zeros(n, dtype=dtype)
    mine = full.view(c.world_size, -1)[c.rank].copy_(part)
    c.all_gather(full, mine)
    results["all_gather in place"] = torch.equal(full, whole)

    for src in {0, c.world_size - 1}:
        x = values(c.rank, n, dtype)
        c.broadcast(x, src)
        results[f"broadcast {src}"] = torch.equal(x, values(src, n, dtype))

    x = c.empty(n, dtype).copy_(values(c.rank, n, dtype))
    c.all_reduce(x, mean=mean)
    results["all_reduce of empty()"] = torch.equal(x, whole)

    x = c.empty(n, dtype).copy_(values(c.rank, n, dtype))
    own = x.view(c.world_size, -1)[c.rank]
    c.reduce_scatter(own, x, mean=mean)
    c.all_gather(x, own)
    results["both halves of empty()"] = torch.equal(x, whole)

    x = c.empty(n, dtype).copy_(values(c.rank, n, dtype))
    out = c.empty(n // c.world_size, wide.dtype)
    c.reduce_scatter(out, x, mean=mean)
    results["reduce_scatter of empty() into fp32"] = torch.equal(
        out, wide.view(c.world_size, -1)[c.rank]
    )

    shard = c.empty(n // c.world_size, dtype).copy_(part)
    full = torch.empty(n, dtype=dtype)
    c.all_gather(full, shard)
    results["all_gather from empty()"] = torch.equal(full, whole)

    # Ranks may differ in being in place, even where the places are the same numbers.
    room = c.empty(n, dtype)
    mine = room.view(c.world_size, -1)[c.rank] if c.rank else room[: n // c.world_size].clone()
    mine.copy_(part)
    c.all_gather(room, mine)
    results["all_gather, some in place"] = torch.equal(room, whole)
    c.barrier()
    c.close()
    return [name for name, right in results.items() if not right]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("dtype", SUMMABLE, ids=str)
def test_shm_on_threads(world_size, dtype):
    for n, mean in [(0, False), (1, False), (127, False), (10_007, dtype != torch.int64)]:
        wrong = run_ranks(reductions, world_size, "shm", n * world_size, dtype, mean)
        assert wrong == [[]] * world_size, (n, mean)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_processes(transport, world_size):
    n = 60_000 * world_size  # many chunks
    wrong = run_ranks(
        reductions, world_size, transport, n, torch.float32, True, backend="gloo", timeout_s=90
    )
    assert wrong == [[]] * world_size


@pytest.mark.parametrize(
    ("dtype", "world_size"),
    [(torch.bfloat16, 3), (torch.bfloat16, 4), (torch.float64, 3), (torch.int64, 3)],
)
def test_gloo_dtypes(dtype, world_size):
    n, mean = world_size * 1001, dtype != torch.int64
    wrong = run_ranks(reductions, world_size, "torch", n, dtype, mean, backend="gloo", timeout_s=90)
    assert wrong == [[]] * world_size


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 6, 7, 8, 11])
def test_local_sums_of_torch(world_size, dtype):
    mean, n = dtype != torch.int64, 1001
    parts = torch.stack([values(r, n, dtype) for r in range(world_size)])
    wide = expected_sum(world_size, n, dtype, mean)
    for to in {dtype, wide.dtype}:
        out = torch.empty(n, dtype=to)
        _sum_parts(parts.clone(), out, mean)
        assert torch.equal(out, wide.to(to))


def micro_batches(n, dtype):
    """Each rank adds up its share of 8 micro-batches as a tree; the ranks add up the sums."""
    c = TRANSPORTS["shm"]()
    share = 8 // c.world_size
    x = tree([values(c.rank * share + i, n, dtype) for i in range(share)])
    c.all_reduce(x, mean=True)
    return x


def test_ranks_that_hold_trees_of_their_own():
    """1, 2, 4 and 8 ranks give the same bits where each holds as many values."""
    sums = {w: run_ranks(micro_batches, w, 5003, torch.float32) for w in (1, 2, 4, 8)}
    alone = sums[1][0] / 8
    for world_size, results in sums.items():
        for x in results:
            assert torch.equal(x * (world_size / 8), alone)
    in_turn = sum(values(r, 5003, torch.float32) for r in range(8)) / 8
    assert not torch.equal(in_turn, alone)  # the order shows in these values


def bad_calls():
    c = ShmCollectives(timeout_s=30.0, heap_gb=0.001)
    x = torch.ones(6)
    messages = []
    for call in (
        lambda: c.all_reduce(x.view(2, 3).T),
        lambda: c.all_reduce(x.bool()),
        lambda: c.all_reduce(x.long(), mean=True),
        lambda: c.reduce_scatter(torch.empty(2), x),
        lambda: c.all_gather(torch.empty(5), x),
        lambda: c.reduce_scatter(torch.empty(3), x.double()),
        lambda: c.reduce_scatter(torch.empty(3, dtype=torch.bfloat16), x),
        lambda: c.reduce_scatter(x[:3], x.view(torch.bfloat16)[:6]),
        lambda: c.broadcast(x, 2),
        lambda: c.empty(1 << 20, torch.float32),
    ):
        try:
            call()
            messages.append("")
        except (ValueError, RuntimeError) as error:
            messages.append(str(error))
    c.barrier()  # none of these reached the other rank
    return messages


def test_bad_calls():
    expected = [
        "all_reduce: expected contiguous tensors on cpu, got shape=[3, 2]",
        "all_reduce: expected one dtype of torch.float32",
        "all_reduce: expected a floating-point dtype for mean=True, got torch.int64",
        "reduce_scatter: expected 2 slices of 2 elements, got a whole of 6",
        "all_gather: expected 2 slices of 6 elements, got a whole of 5",
        "reduce_scatter: expected one dtype",
        "reduce_scatter: expected one dtype",
        "reduce_scatter: expected out apart from x where it is wider, got out=torch.float32",
        "broadcast: expected 0 <= src < 2, got src=2",
        "ShmCollectives.empty: expected at most 1073152 bytes in all, got 4194304;",
    ]
    for messages in run_ranks(bad_calls, 2):
        for message, start in zip(messages, expected, strict=True):
            assert message.startswith(start), (message, start)
