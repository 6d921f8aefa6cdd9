"""Both transports against sums written out: every collective, dtype and number of ranks."""

import functools

import pytest
import torch

from fastpar.collectives import SUMMABLE, TorchCollectives
from fastpar.shm import ShmCollectives
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


def expected_sum(world_size, n, dtype, mean):
    """Rank order, 16-bit types in fp32, one rounding."""
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = values(0, n, dtype).to(wide)
    for rank in range(1, world_size):
        total = total + values(rank, n, dtype).to(wide)
    return (total / world_size if mean else total).to(dtype)


def reductions(transport, n, dtype, mean):
    c = TRANSPORTS[transport]()
    whole = expected_sum(c.world_size, n, dtype, mean)
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


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64])
def test_gloo_dtypes(dtype):
    wrong = run_ranks(
        reductions, 3, "torch", 3 * 1001, dtype, dtype != torch.int64, backend="gloo", timeout_s=90
    )
    assert wrong == [[]] * 3


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
        "broadcast: expected 0 <= src < 2, got src=2",
        "ShmCollectives.empty: expected at most 1073152 bytes in all, got 4194304;",
    ]
    for messages in run_ranks(bad_calls, 2):
        for message, start in zip(messages, expected, strict=True):
            assert message.startswith(start), (message, start)
