"""Every transport: the same operations, the same sums, the same refusals."""

import functools
from itertools import product

import pytest
import torch
from cells import slow
from lone_rank import LoneMesh, heard

from fastpar.comm.collectives import SUMMABLE, sum_rows_in_tree
from fastpar.comm.transports import ShmCollectives, TorchCollectives
from fastpar.testing import run_ranks

TRANSPORTS = {
    "shm": functools.partial(ShmCollectives, timeout_s=30.0, chunk_kb=16, heap_gb=0.01),
    "torch": functools.partial(TorchCollectives, in_rank_order=True),
    "own order": TorchCollectives,
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
    return reductions_of(TRANSPORTS[transport](), n, dtype, mean)


def reductions_of(c, n, dtype, mean):
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


@pytest.mark.parametrize(
    ("dtypes", "sizes"),
    [
        ([torch.bfloat16], (1, 2, 3, 4, 7)),
        (SUMMABLE, (3,)),
        *(slow([dtype], (1, 2, 4, 7)) for dtype in SUMMABLE if dtype != torch.bfloat16),
    ],
)
def test_sums_of_shm_on_threads(dtypes, sizes):
    for world_size, dtype in product(sizes, dtypes):
        for n, mean in [(0, False), (1, False), (127, False), (10_007, dtype != torch.int64)]:
            wrong = run_ranks(reductions, world_size, "shm", n * world_size, dtype, mean)
            assert wrong == [[]] * world_size, (dtype, n, mean)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("transport", ["shm", "torch"])
def test_sums_of_processes(transport, world_size):
    n = 60_000 * world_size  # many chunks
    wrong = run_ranks(
        reductions, world_size, transport, n, torch.float32, True, backend="gloo", timeout_s=90
    )
    assert wrong == [[]] * world_size


def of_every_dtype():
    wrong = []
    for dtype in SUMMABLE:
        n, mean = 3 * 1001, dtype != torch.int64
        c = TorchCollectives(in_rank_order=True)
        wrong += [f"{dtype} {name}" for name in reductions_of(c, n, dtype, mean)]
    return wrong


def test_sums_of_gloo():
    assert run_ranks(of_every_dtype, 3, backend="gloo", timeout_s=90) == [[]] * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bfloat16])
def test_local_sums_of_torch(dtype):
    mean, n = dtype != torch.int64, 1001
    for world_size in (1, 2, 3, 4, 5, 6, 7, 8, 11):
        parts = torch.stack([values(r, n, dtype) for r in range(world_size)])
        wide = expected_sum(world_size, n, dtype, mean)
        for to in {dtype, wide.dtype}:
            out = torch.empty(n, dtype=to)
            sum_rows_in_tree(parts.clone(), out, mean)
            assert torch.equal(out, wide.to(to)), (world_size, to)


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


# Every operation, with a handle and without, on every transport


def each_once(c, alike, async_op, wrong):
    """alike: every rank has what this one has."""
    n, rank = c.world_size, c.rank

    def run(op, *args, **options):
        handle = getattr(c, op)(*args, async_op=async_op, **options)
        if not async_op:
            assert handle is None
        return handle

    def check(name, handles, found, expected):
        for handle in handles:
            if async_op:
                handle.wait()
                assert handle.is_completed()
        if not torch.equal(found, expected):
            wrong.append(f"{name} {async_op=} {found.tolist()} {expected.tolist()}")

    def of(r, size=2 * n):
        return torch.arange(float(size)) + 100.0 * (rank if alike else r)

    everyone = [of(r) for r in range(n)]
    total = sum(everyone)
    x = of(rank)
    check("all_reduce", [run("all_reduce", x)], x, total)
    x = of(rank)
    check("mean", [run("all_reduce", x, mean=True)], x, total / n)
    out = torch.empty(2)
    check("reduce_scatter", [run("reduce_scatter", out, of(rank))], out, total.view(n, 2)[rank])
    out = torch.empty(2 * n * n)
    check("all_gather", [run("all_gather", out, of(rank))], out, torch.cat(everyone))
    x = of(rank)
    check("broadcast", [run("broadcast", x, n - 1)], x, of(n - 1))
    out = torch.empty(2 * n)
    mine = [x.view(n, 2)[rank] for x in everyone]
    check("all_to_all", [run("all_to_all", out, of(rank))], out, torch.cat(mine))
    tables = [lambda src, to: to + 1]
    if not alike:
        tables.append(lambda src, to: (src + 2 * to) % 3)
    for table in tables:
        sizes = [[table(src, to) for to in range(n)] for src in range(n)]
        sent = [of(r, sum(sizes[r])).split(sizes[r])[rank] for r in range(n)]
        x, out = of(rank, sum(sizes[rank])), torch.empty(sum(map(len, sent)))
        handle = run("all_to_all", out, x, list(map(len, sent)), sizes[rank])
        check("unequal", [handle], out, torch.cat(sent))
    x, out = of(rank), torch.empty(2 * n)
    messages = [("send", x, (rank + 1) % n), ("recv", out, (rank - 1) % n)]
    if rank and not alike and not async_op:
        messages.reverse()
    handles = [run(*message, tag=5) for message in messages]
    check("send and recv", handles, out, of((rank - 1) % n))


def every_operation(kind):
    """Names of what went wrong."""
    c, wrong = TRANSPORTS[kind](), []
    for async_op in (False, True):
        each_once(c, False, async_op, wrong)
    c.barrier()
    c.close()
    return wrong


@pytest.mark.parametrize(
    ("kind", "backend"),
    [("shm", "threads"), ("torch", "threads"), ("own order", "gloo"), ("torch", "gloo"),
     pytest.param("shm", "gloo", marks=pytest.mark.slow)],
)  # fmt: skip
def test_every_operation(kind, backend):
    assert run_ranks(every_operation, 3, kind, backend=backend) == [[]] * 3


def test_every_operation_of_a_lone_rank():
    wrong = []
    with LoneMesh(3, 1) as mesh:
        for async_op in (False, True):
            each_once(heard([])(mesh.dp_group, "reduce"), True, async_op, wrong)
    assert wrong == []


def bad_calls(kind):
    c = TRANSPORTS[kind]()
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
        lambda: c.all_to_all(torch.empty(6), torch.empty(7)),
        lambda: c.all_to_all(torch.empty(6), x, [3, 3], [1, 2]),
        lambda: c.all_to_all(torch.empty(6), x, [2, 4], [4, 2]),
        lambda: c.all_to_all(torch.empty(6), x.double()),
        lambda: c.all_to_all(x, x),
        lambda: c.send(x, c.rank),
        lambda: c.recv(x, -1),
        lambda: c.send(x.view(2, 3).T, 1 - c.rank),
    ):
        try:
            call()
            messages.append("")
        except (ValueError, RuntimeError) as error:
            messages.append(str(error))
    c.barrier()  # none of these reached the other rank
    return messages


@pytest.mark.parametrize("kind", TRANSPORTS)
def test_bad_calls(kind):
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
        "all_to_all: expected the sizes of 2 slices that make 7 elements, got sizes=[3, 3]",
        "all_to_all: expected the sizes of 2 slices that make 6 elements, got sizes=[1, 2]",
        "all_to_all: expected as many elements from this rank as to it, got out_sizes=[2, 4]",
        "all_to_all: expected one dtype",
        "all_to_all: expected out apart from x",
        "send: expected 0 <= dst < 2, got dst=",
        "recv: expected 0 <= src < 2, got src=-1",
        "send: expected contiguous tensors on cpu",
    ]
    for messages in run_ranks(bad_calls, 2, kind):
        for message, start in zip(messages, expected, strict=True):
            assert message.startswith(start), (message, start)


def test_a_heap_that_is_full():
    def rank():
        ShmCollectives(timeout_s=30.0, heap_gb=0.001).empty(1 << 20, torch.float32)

    message = r"ShmCollectives.empty: expected at most 1073152 bytes in all, got 4194304;"
    with pytest.raises(RuntimeError, match=message):
        run_ranks(rank, 2)


def sizes_that_differ():
    c = TRANSPORTS["shm"]()
    c.all_to_all(torch.empty(3), torch.ones(3), [2, 1], [2, 1])  # 0 sends 1 and 1 expects 2


def test_sizes_of_two_ranks_that_do_not_fit():
    for error in run_ranks(sizes_that_differ, 2, return_exceptions=True):
        assert "expected rank 0 to take the 2 elements that rank 1 sends it, got 1 in" in str(error)
