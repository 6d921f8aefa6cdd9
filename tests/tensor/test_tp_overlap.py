"""Chunked products beside gathers and scatters: the same numbers for any number of chunks."""

import math
import re
from types import SimpleNamespace

import pytest
import torch

from fastpar import GPT, AdamW, GPTConfig, Mesh, engine_of, parallelize
from fastpar.comm.shm import ShmCollectives
from fastpar.comm.torch_collectives import TorchCollectives
from fastpar.kernels.backend import has_gemm
from fastpar.tensor import overlap as tp_overlap
from fastpar.tensor.functional import TensorParallel, column_linear, row_linear
from fastpar.tensor.overlap import Overlap, check_overlap, choose_overlap, why_not_symmetric
from fastpar.testing import run_ranks

K, F = 256, 264
ROWS = 74  # 37 of each of two ranks: a seventh of them is a product that is our own
own_products = pytest.mark.skipif(not has_gemm, reason="this CPU has no product of our own")


def whole(seed, *shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def make_group(transport):
    return ShmCollectives(heap_gb=0.1) if transport == "shm" else TorchCollectives()


def layers_on_rank(chunks, transport, dtype, rows, lead):
    """Outputs and gradients of a column and a row layer on this rank's tokens, by name."""
    torch.set_num_threads(1)
    group = make_group(transport)
    tp = TensorParallel(group, overlap=Overlap(group, chunks))
    n = rows // tp.size
    x = whole(1, rows, K, dtype=dtype)[tp.rank * n : (tp.rank + 1) * n].view(*lead, n, K)
    w1, b1 = whole(10 + tp.rank, F, K, dtype=dtype), whole(20 + tp.rank, F, dtype=dtype)
    w2, b2 = whole(30 + tp.rank, K, F, dtype=dtype), whole(40, K, dtype=dtype)
    inputs = [t.requires_grad_() for t in (x, w1, b1, w2, b2)]
    hidden = column_linear(x, w1, b1, tp)
    out = row_linear(hidden, w2, b2, tp)
    out.backward(whole(50 + tp.rank, *out.shape, dtype=dtype))
    names = ("x", "w1", "b1", "w2", "b2")
    grads = {f"d{name}": t.grad for name, t in zip(names, inputs)}
    group.close()
    return {"hidden": hidden.detach(), "out": out.detach(), **grads}


@own_products
@pytest.mark.parametrize("transport", ["gloo", "shm"])
@pytest.mark.parametrize("chunks", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 7))])
def test_chunks_change_no_bits(chunks, transport):
    """None of these divides a rank's rows."""
    answers = [
        run_ranks(layers_on_rank, 2, count, transport, torch.float32, ROWS, (), backend="gloo")
        for count in (1, chunks)
    ]
    for one, many in zip(*answers):
        for name, value in one.items():
            assert torch.equal(value, many[name]), name


@pytest.mark.parametrize("lead", [(), (1,)], ids=["rows", "batch-of-one"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_chunks_agree_in_fp64(world_size, lead):
    """For any product (torch's here, whose bits may depend on its rows) and number of ranks."""
    rows = 5 * world_size
    for chunks in (2, 5, 100):  # 100: more than there are rows
        one, many = (
            run_ranks(layers_on_rank, world_size, c, "gloo", torch.float64, rows, lead)
            for c in (1, chunks)
        )
        for a, b in zip(one, many):
            for name, value in a.items():
                # K terms a product and a term a rank, each of about 1, in another order.
                bound = 2 * (K + world_size) * torch.finfo(torch.float64).eps * math.sqrt(K) * 8
                assert (value - b[name]).abs().max() <= bound, name


def no_tokens_on_rank(chunks):
    group = TorchCollectives()
    overlap = Overlap(group, chunks)
    y, rows = overlap.gather_matmul(torch.empty(0, 4), torch.ones(4, 3), torch.ones(3), keep=True)
    out = overlap.begin_matmul_scatter(torch.empty(0, 4), torch.ones(4, 3)).wait()
    return y.shape, rows.shape, out.shape


@pytest.mark.parametrize("chunks", [1, 2])
def test_no_tokens_are_no_special_case(chunks):
    assert run_ranks(no_tokens_on_rank, 2, chunks)[0] == ((0, 3), (0, 4), (0, 3))


def under_way_on_rank(chunks):
    """The order of products, begins and waits on this rank."""
    log = []

    class Recorded(TorchCollectives):
        def _all_gather(self, out, x, tag):
            return self._noted("gather", super()._all_gather(out, x, tag))

        def _reduce_scatter(self, out, x, mean, tag):
            return self._noted("scatter", super()._reduce_scatter(out, x, mean, tag))

        def _noted(self, name, handle):
            log.append(name)
            return SimpleNamespace(wait=lambda: (log.append(f"wait {name}"), handle.wait()))

    real = tp_overlap.matmul

    def noted(a, b, **kwargs):
        log.append(f"product {a.shape[0]}")
        return real(a, b, **kwargs)

    tp_overlap.matmul = noted
    try:
        overlap = Overlap(Recorded(), chunks)
        overlap.gather_matmul(torch.ones(4, 2), torch.ones(2, 3))
        overlap.begin_matmul_scatter(torch.ones(8, 2), torch.ones(2, 3)).wait()
    finally:
        tp_overlap.matmul = real
    return log


def test_products_run_while_chunks_are_under_way():
    log = run_ranks(under_way_on_rank, 2, 2, backend="gloo")[0]
    assert log == [
        *("gather", "gather", "product 4", "wait gather", "product 2", "wait gather", "product 2"),
        *("product 2", "product 2", "scatter", "product 2", "product 2", "scatter"),
        *("wait scatter", "wait scatter"),
    ]


CONFIG = GPTConfig(n_layer=2, n_head=4, n_embd=256, block_size=32, vocab_size=301)


def train_on_rank(chunks):
    torch.set_num_threads(1)
    model = parallelize(GPT(CONFIG), Mesh(tp=2), tp_overlap=chunks)
    said = engine_of(model).describe()
    optimizer = AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)
    for step in range(3):
        idx = torch.randint(301, (2, 32), generator=torch.Generator().manual_seed(step))
        model(idx, idx.roll(-1, 1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return said, model.state_dict()


@own_products
def test_a_model_trains_to_the_same_bits_with_chunks():
    (said, one), _ = run_ranks(train_on_rank, 2, None, backend="gloo")
    (said_3, three), _ = run_ranks(train_on_rank, 2, 3, backend="gloo")
    assert "sequence parallel, overlap chunks=1 (by default)" in said
    assert "sequence parallel, overlap chunks=3 (asked for)" in said_3
    for name, value in one.items():
        assert torch.equal(value, three[name]), name


# What parallelize() refuses


@pytest.mark.parametrize("asked", [0, -1, True, 1.5, "chunks"])
def test_what_is_no_number_of_chunks_is_refused(asked):
    with pytest.raises(
        ValueError, match=r"parallelize: expected tp_overlap None, 'symmetric' or a number of chunk"
    ):
        check_overlap(asked, True)


def test_chunks_without_sequence_parallelism_are_refused():
    check_overlap(None, False)
    with pytest.raises(
        ValueError, match=r"parallelize: expected tp_overlap=None without sequence parallelism, got"
    ):
        parallelize(
            torch.nn.Linear(2, 2), Mesh(device="cpu"), sequence_parallel=False, tp_overlap=2
        )


def forced_on_rank():
    with pytest.raises(
        RuntimeError,
        match=r"parallelize: expected symmetric memory for tp_overlap='symmetric', got none: the "
        r"ranks compute on cpu; leave it out",
    ):
        parallelize(GPT(CONFIG), Mesh(tp=2), tp_overlap="symmetric")
    return True


def test_symmetric_memory_on_a_cpu_is_refused():
    assert run_ranks(forced_on_rank, 2) == [True, True]


# Symmetric memory, on doubles: see [Note: symmetric memory]


class FakeGroup:
    """A group of two GPUs, as far as the choice looks at it."""

    transport, rank, world_size, device = "nccl", 0, 2, torch.device("cuda")
    group = SimpleNamespace(group_name="7")


@pytest.fixture
def nvlinked(monkeypatch):
    """Two GPUs of one host with NVLink; what is changed in it makes one reason."""
    symm_mem = pytest.importorskip("torch.distributed._symmetric_memory")
    world = SimpleNamespace(places=[("host", 0), ("host", 1)], links=[[0, 18], [18, 0]], error=None)
    probed = []

    def probe(name, n_bytes):
        probed.append(name)
        if world.error:
            raise RuntimeError(world.error)

    def gather_objects(mine, group):
        return world.places if isinstance(mine, tuple) else [mine, ""]

    monkeypatch.setattr(symm_mem, "enable_symm_mem_for_group", probed.append)
    monkeypatch.setattr(symm_mem, "get_symm_mem_workspace", probe)
    monkeypatch.setattr(tp_overlap, "gather_objects", gather_objects)
    monkeypatch.setattr(tp_overlap, "_place", lambda: ("host", 0))
    monkeypatch.setattr(tp_overlap, "_nvlinks", lambda: world.links)
    world.probed = probed
    return world


def test_symmetric_memory_is_used_when_asked_for(nvlinked):
    overlap = choose_overlap("symmetric", FakeGroup(), sequence_parallel=True)
    assert overlap.symmetric == "7"
    assert str(overlap) == "overlap symmetric memory (NVLink between all ranks)"
    assert nvlinked.probed == ["7"] * 2
    for other in (None, 2):
        assert choose_overlap(other, FakeGroup(), sequence_parallel=True).symmetric is None
    assert nvlinked.probed == ["7"] * 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"places": [("host", 0), ("other", 0)]}, "the ranks are on several hosts"),
        ({"links": [[0, 0], [0, 0]]}, "there is no NVLink between GPUs 0 and 1"),
        ({"links": []}, "there is no NVLink between GPUs 0 and 1"),
        ({"error": "no peer access"}, "a probe failed on rank 0 (no peer access)"),
    ],
)
def test_why_symmetric_memory_does_not_work(nvlinked, change, reason):
    vars(nvlinked).update(change)
    assert why_not_symmetric(FakeGroup()) == reason
    with pytest.raises(
        RuntimeError,
        match="parallelize: expected symmetric memory for tp_overlap='symmetric', got none: "
        + re.escape(reason),
    ):
        choose_overlap("symmetric", FakeGroup(), sequence_parallel=True)


def test_other_transports_and_versions_have_none(monkeypatch, nvlinked):
    group = FakeGroup()
    group.transport = "emulated"
    assert why_not_symmetric(group) == "the transport is emulated"
    monkeypatch.setattr(torch.ops, "symm_mem", SimpleNamespace())
    missing = "this torch has no symm_mem.fused_all_gather_matmul"
    assert why_not_symmetric(FakeGroup()) == missing
    monkeypatch.setitem(__import__("sys").modules, "torch.distributed._symmetric_memory", None)
    assert why_not_symmetric(FakeGroup()) == "this torch has no symmetric memory"


def symmetric_on_rank():
    """The operators as torch's own fallback defines them, called through our schema."""
    group = TorchCollectives()
    calls = []

    def fused_all_gather_matmul(a, bs, gather_dim, group_name, *, return_A=True):
        calls.append(("gather", gather_dim, group_name))
        rows = a.new_empty(2 * a.shape[0], a.shape[1])
        group.all_gather(rows.view(-1), a.view(-1))
        return rows, [rows @ b for b in bs]

    def fused_matmul_reduce_scatter(a, b, reduce_op, scatter_dim, group_name):
        calls.append(("scatter", reduce_op, scatter_dim, group_name))
        part = a @ b
        out = part.new_empty(part.shape[0] // 2, part.shape[1])
        group.reduce_scatter(out.view(-1), part.view(-1))
        return out

    doubles = SimpleNamespace(
        fused_all_gather_matmul=fused_all_gather_matmul,
        fused_matmul_reduce_scatter=fused_matmul_reduce_scatter,
    )
    real = torch.ops.symm_mem
    torch.ops.symm_mem = doubles
    try:
        answers = []
        for overlap in (Overlap(group), Overlap(group, symmetric="7")):
            tp = TensorParallel(group, overlap=overlap)
            x, w = whole(tp.rank, 3, K).requires_grad_(), whole(5, F, K).requires_grad_()
            v = whole(6, K, F).requires_grad_()
            y = row_linear(column_linear(x, w, whole(7, F), tp), v, None, tp)
            y.sum().backward()
            answers.append([y.detach(), x.grad, w.grad, v.grad])
    finally:
        torch.ops.symm_mem = real
    return answers, calls


def test_symmetric_operators_are_called_by_their_schema():
    answers, calls = run_ranks(symmetric_on_rank, 2, backend="gloo")[0]
    assert calls == [
        *(("gather", 0, "7"), ("scatter", "sum", 0, "7")),
        *(("gather", 0, "7"), ("scatter", "sum", 0, "7")),
    ]
    for mine, theirs in zip(*answers):
        # Products of K terms of about 1, by two GEMMs.
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-3)


def test_doubles_have_the_schema_of_this_torch():
    """What is called above is what the installed torch defines."""
    pytest.importorskip("torch.distributed._symmetric_memory")
    schemas = {
        name: getattr(torch.ops.symm_mem, name).default._schema
        for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter")
    }
    gather, scatter = schemas.values()
    assert [a.name for a in gather.arguments][:4] == ["A", "Bs", "gather_dim", "group_name"]
    assert len(gather.returns) == 2
    names = ["A", "B", "reduce_op", "scatter_dim", "group_name"]
    assert [a.name for a in scatter.arguments] == names
