"""keys.py: attention over gathered keys is that of one process; every rank has as much to do."""

import math

import pytest
import torch
from cells import covering, slow

from fastpar import GPT, GPTConfig, Mesh, parallelize
from fastpar.axes.context import keys
from fastpar.axes.context.keys import attend_keys, pieces, planned
from fastpar.axes.context.sequences import ContextParallel
from fastpar.comm.transports import TorchCollectives
from fastpar.kernels import Rng, attention_qkvpacked, make_key
from fastpar.kernels.reference import attention_ref
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

RNG = Rng(make_key(5, 3), 2)
# Of 2 rows of 24 tokens: documents that begin at, before and inside of a rank's runs of tokens, end
# with a row, and have one token.
BOUNDS = (0, 3, 4, 9, 18, 24, 25, 30, 48)


def random(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)  # the default one is shared by threads
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def attended(batch, time, heads, p, dtype, documents):
    """All tokens' attention and gradient, of which each rank has computed its part."""
    cp = ContextParallel(TorchCollectives(), "keys")
    of_ranks = cp.of_ranks(random(batch, time, 3, heads, 8, dtype=dtype))
    qkv = of_ranks[cp.rank].clone().requires_grad_()
    o = attend_keys(qkv, batch, cp, dropout_p=p, rng=RNG, documents=documents)
    do = cp.of_ranks(random(batch, time, heads, 8, seed=1, dtype=dtype))[cp.rank]
    o.backward(do)
    return tuple(
        cp.in_order(cp.group.gathered(x), batch).unflatten(0, (batch, time))
        for x in (o.detach(), qkv.grad)
    )


@covering(
    2,
    ("ranks", [1, 2, 3, 4]),
    ("heads", [2, 5]),
    ("p", [0.0, 0.3]),
    ("dtype", [torch.float32, torch.bfloat16, torch.float64]),
    ("packed", [False, True]),
)
def test_attention_has_the_bits_of_one_process(ranks, heads, p, dtype, packed):
    """Of o and dq; dk and dv are sums over ranks. In fp64 torch's products round with their sizes.
    There may be more ranks than heads."""
    batch, time = 2, 24
    documents = torch.tensor(BOUNDS, dtype=torch.int32) if packed else None
    qkv = random(batch, time, 3, heads, 8, dtype=dtype).requires_grad_()
    given = qkv.flatten(0, 1) if packed else qkv
    o = attention_qkvpacked(given, dropout_p=p, rng=RNG, cu_seqlens=documents)
    o = o.view(batch, time, heads, 8)
    o.backward(random(batch, time, heads, 8, seed=1, dtype=dtype))
    for found, grad in run_ranks(attended, ranks, batch, time, heads, p, dtype, documents):
        if dtype == torch.float64:
            assert (found - o).abs().max() < 1e-13
            assert (grad - qkv.grad).abs().max() < 1e-13
            continue
        assert torch.equal(found, o)
        assert torch.equal(grad[:, :, 0], qkv.grad[:, :, 0])
        # A sum of 24 products in parts, each rounded once where it is sent and once where added.
        bound = (2 * ranks + 2) * torch.finfo(dtype).eps * qkv.grad.abs().max()
        assert (grad - qkv.grad).abs().max() <= bound


def test_documents_are_read_once_a_batch(monkeypatch):
    """On a GPU the host waits for them, and what follows from them is copied there."""
    read = []
    monkeypatch.setattr(keys, "pieces", lambda *args: read.append(args) or pieces(*args))

    def layers(documents):
        cp = ContextParallel(TorchCollectives(), "keys")
        qkv = cp.of_ranks(random(2, 24, 3, 2, 8))[cp.rank].requires_grad_()
        for _ in range(3):
            o = attend_keys(qkv, 2, cp, dropout_p=0.3, rng=RNG, documents=documents)
            qkv = qkv + o[:, None]
        qkv.sum().backward()

    for batch in (1, 2):
        run_ranks(layers, 1, torch.tensor(BOUNDS, dtype=torch.int32))
        assert len(read) == batch


def test_documents_that_are_written_are_read_again():
    documents = torch.tensor(BOUNDS, dtype=torch.int32)
    first = [one.piece for one in planned(Place(0, 2), 2, 24, documents)]
    documents[1] += 1
    again = [one.piece for one in planned(Place(0, 2), 2, 24, documents)]
    assert again != first
    assert again == list(pieces(Place(0, 2), 2, 24, documents.tolist()))
    with torch.inference_mode():
        assert planned(Place(0, 2), 2, 24, documents.clone())


def test_attention_is_the_oracle_s():
    """So that both sides of the comparison above are not wrong alike."""
    q, k, v = random(2, 24, 3, 2, 8, dtype=torch.float64).unbind(2)
    exact = attention_ref(q, k, v, dropout_p=0.3, rng=RNG)
    [(o, _), *_] = run_ranks(attended, 2, 2, 24, 2, 0.3, torch.float64, None)
    assert (o - exact).abs().max() < 1e-12


class Place(ContextParallel):
    """A rank of so many, which sends nothing."""

    def __init__(self, rank, size, method="keys"):
        super().__init__(type("Group", (), {"rank": rank, "world_size": size}), method)


@pytest.mark.parametrize("bounds", [None, BOUNDS, (0, 24, 48), tuple(range(49))])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_pieces_have_every_query_and_its_keys_once(size, bounds):
    """Counted pair by pair of places."""
    batch, time = 2, 24
    of = [0] * batch * time
    for i, start in enumerate(bounds[:-1] if bounds else (0, time)):
        of[start:] = [i] * (batch * time - start)
    wanted = {(i, j) for i in range(batch * time) for j in range(i + 1) if of[i] == of[j]}
    seen = []
    for rank in range(size):
        cp = Place(rank, size)
        every = torch.arange(batch * time)
        mine = cp.of_ranks(every.view(batch, time))[rank]
        for piece in pieces(cp, batch, time, bounds):
            queries, keys = piece.of_queries(mine, batch), piece.of_keys(every, batch)
            if piece.bounds is None:
                for q_row, k_row in zip(queries, keys):
                    assert piece.first_row == len(k_row) - len(q_row)
                    for i, q in enumerate(q_row.tolist()):
                        last = i + len(k_row) - len(q_row)
                        seen += [(q, k) for k in k_row[: last + 1].tolist()]
                continue
            assert torch.equal(queries, keys)
            for d, (a, b) in enumerate(zip(piece.bounds, piece.bounds[1:])):
                assert of[queries[a]] == piece.sample + d
                seen += [
                    (queries[i].item(), keys[j].item())
                    for i in range(a, b)
                    for j in range(a, i + 1)
                ]
    assert len(seen) == len(set(seen))
    assert set(seen) == wanted


@pytest.mark.parametrize("method", ["heads", "keys"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_layout_says_the_same_in_every_way(size, method):
    """slice(), of_ranks(), in_order() and the runs that masks and positions are numbered by."""
    batch, time = 3, 12
    every = torch.arange(batch * time).view(batch, time)
    parts = []
    for rank in range(size):
        cp = Place(rank, size, method)
        mine = cp.slice(every)
        assert torch.equal(cp.of_ranks(every)[rank], mine)
        first, rows, (low, high) = cp.runs(batch, time)
        numbers = first + torch.arange(len(mine))
        places = numbers % rows + torch.where(2 * (numbers % rows) < rows, low, high)
        assert torch.equal(numbers // rows * time + places, mine)
        parts.append(mine)
    assert torch.equal(cp.in_order(torch.stack(parts), batch), every.flatten())


# Work


def visited(rank, size, time, monkeypatch, fwd):
    """Tiles of keys that the forward kernel loads for this rank's queries."""
    count, load = [0], fwd.load_tile

    def counted(*args):
        count[0] += 1
        return load(*args)

    monkeypatch.setattr(fwd, "load_tile", counted)
    q, kv = torch.zeros(1, time // size, 1, 16), torch.zeros(2, 1, time, 1, 16)
    tiles = 0
    for piece in pieces(Place(rank, size), 1, time, None):
        rows = q[:, piece.queries]
        k, v = kv[:, :, piece.keys]
        fwd.attention_fwd(rows, k, v, True, 1.0, None, 0, 0, None)
        config = fwd.get_config(90, "fwd", 16, "fp32")
        tiles -= -(-rows.shape[1] // config.block_q)  # q is loaded by the same function
    monkeypatch.setattr(fwd, "load_tile", load)
    return (tiles + count[0]) // 2  # of k and v


@pytest.mark.parametrize("time", [1024, slow(4096)])
def test_every_rank_visits_as_many_tiles(monkeypatch, time):
    """Counted in the kernel as it runs; at cp = 4 the busiest has at most 1.1 of the mean."""
    pytest.importorskip("triton", reason="needs triton")
    if torch.cuda.is_available():
        pytest.skip("counts in the interpreter")
    from fastpar.kernels import attention_triton as fwd

    counts = [visited(rank, 4, time, monkeypatch, fwd) for rank in range(4)]
    assert sum(counts) > 0
    assert max(counts) <= 1.1 * sum(counts) / 4


def test_work_by_the_tiles_of_the_cpu_s_kernel():
    """Of 8 queries and 32 keys; contiguous slices would have 1.75 of the mean."""
    size, time, counts = 4, 4096, []
    for rank in range(size):
        tiles = 0
        for piece in pieces(Place(rank, size), 1, time, None):
            for first in range(piece.first_row, piece.keys.stop, 8):
                tiles += math.ceil(min(first + 8, piece.keys.stop) / 32)
        counts.append(tiles)
    assert max(counts) <= 1.001 * sum(counts) / size


# The model


SHAPE = GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=13, vocab_size=37, dropout=0.0)


def whole_logits(cp, tp, sequence):
    mesh = Mesh(cp=cp, tp=tp)
    model = parallelize(
        GPT(SHAPE).double(), mesh, Parallel.of(cp_method="keys", sequence_parallel=sequence)
    )
    return model(torch.arange(26).view(2, 13)).detach()


@pytest.mark.parametrize(("cp", "tp", "sequence"), [(3, 1, False), (4, 1, False), (2, 2, False)])
def test_logits_are_those_of_all_tokens(cp, tp, sequence):
    """More ranks than heads, and a length that no chunk divides."""
    expected = GPT(SHAPE).double()(torch.arange(26).view(2, 13))
    for logits in run_ranks(whole_logits, cp * tp, cp, tp, sequence):
        assert (logits - expected).abs().max() < 1e-12


def opchecked():
    cp = ContextParallel(TorchCollectives(), "keys")
    x, key = random(8, 3, 2, 4).requires_grad_(), make_key(1, 2)
    of = torch.ops.fastpar.cp_attend_keys.default
    for bounds in (None, torch.tensor([0, 3, 4, 8], dtype=torch.int32)):
        torch.library.opcheck(of, (x, 2, 0.5, None, 0, 0, bounds, cp.number))
        torch.library.opcheck(of, (x, 2, 0.5, key, 3 << 16, 26, bounds, cp.number))


def test_opcheck():
    """On one rank: its checks run ops a number of times that other ranks would not follow."""
    run_ranks(opchecked, 1)
