"""Batches by global sample index, documents in rows, and load_data from end to end."""

import json

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_sources import shard

from fastpar.data.batches import (
    TextData,
    eval_batches,
    load_data,
    n_samples_per_epoch,
    pack_documents,
    sample_batch,
)
from fastpar.data.sources import Shards
from fastpar.data.tokenizer import IdTokenizer

seeds = st.integers(-(2**70), 2**70)


def numbers(n, dtype=np.uint32):
    """Tokens that tell their own position."""
    return np.arange(n, dtype=dtype)


def batch(tokens, first, n, *, seed=0, block_size=4):
    return sample_batch(tokens, seed=seed, first_sample=first, n_samples=n, block_size=block_size)


def starts_of(x):
    return x[:, 0].tolist()


def test_the_order_is_well_mixed():
    n, tokens = 4096, numbers(4097)
    epochs = ((0, 0), (0, 1), (1, 0), (2**64 - 1, 7))
    batches = [batch(tokens, e * n, n, seed=seed, block_size=1) for seed, e in epochs]
    orders = [np.array(starts_of(x), float) for x, _ in batches]
    bound = 5 / n**0.5  # five standard deviations of the correlation of independent orders
    for i, order in enumerate(orders):
        for other in [np.arange(n), *orders[:i]]:
            assert abs(np.corrcoef(order, other)[0, 1]) < bound
        for lag in (1, 2, 64):
            assert abs(np.corrcoef(order[lag:], order[:-lag])[0, 1]) < bound


@given(
    n_tokens=st.integers(2, 600), block_size=st.integers(1, 40), seed=seeds, epoch=st.integers(0, 9)
)
@settings(max_examples=50)
def test_no_token_is_input_twice_in_an_epoch(n_tokens, block_size, seed, epoch):
    assume(n_tokens > block_size)
    tokens = numbers(n_tokens)
    n = n_samples_per_epoch(tokens, block_size)
    x, y = batch(tokens, epoch * n, n, seed=seed, block_size=block_size)
    assert x.shape == y.shape == (n, block_size)
    used = x.flatten().tolist()
    assert len(set(used)) == len(used)
    assert torch.equal(y, x + 1)
    assert (x[:, 1:] == x[:, :-1] + 1).all()
    assert len(used) > n_tokens - 2 * block_size - 1  # little is left out


@given(
    ranks=st.integers(1, 4),
    accumulation=st.integers(1, 4),
    micro_batch=st.integers(1, 4),
    step=st.integers(0, 50),
)
@settings(max_examples=60)
def test_a_step_is_the_same_for_any_cut(ranks, accumulation, micro_batch, step):
    """Steps span epochs of 24 or 25 windows, and any sample alone is that of the series."""
    tokens = numbers(100)
    per_step = ranks * accumulation * micro_batch
    x, y = batch(tokens, step * per_step, per_step)
    for j in range(accumulation):
        for rank in range(ranks):
            first = (step * accumulation * ranks + j * ranks + rank) * micro_batch
            xs, ys = batch(tokens, first, micro_batch)
            at = first - step * per_step
            assert torch.equal(xs, x[at : at + micro_batch])
            assert torch.equal(ys, y[at : at + micro_batch])


def test_epochs_and_seeds_differ():
    tokens = numbers(2000)
    n = n_samples_per_epoch(tokens, 16)
    epochs, others = (
        [tuple(starts_of(batch(tokens, e * n, n, seed=seed, block_size=16)[0])) for seed, e in of]
        for of in ([(0, e) for e in range(8)], [(seed, 0) for seed in (1, -1, 2**63)])
    )
    assert len({*epochs, *others}) == 11
    assert len({epoch[0] % 16 for epoch in epochs}) > 3  # other windows, not only another order
    # A run that resumes under a later version must see the same samples.
    x, _ = batch(numbers(1000), 60, 8, seed=1337, block_size=16)
    assert starts_of(x) == [926, 798, 510, 606, 94, 318, 206, 766]


def test_few_tokens_shards_and_none():
    for n_tokens in (5, 6, 7, 8, 9):  # one window is all there is
        tokens = numbers(n_tokens)
        assert n_samples_per_epoch(tokens, 4) == 1
        x, y = batch(tokens, 0, 64)
        assert set(starts_of(x)) == set(range(min(4, n_tokens - 4)))
        assert int(y.max()) == min(n_tokens - 1, 7)
    whole = numbers(500, np.uint16)
    shards = Shards(np.split(whole, [3, 3, 100, 250]))
    for first in (0, 1000):
        ours, theirs = (batch(tokens, first, 70, block_size=7) for tokens in (shards, whole))
        assert all(map(torch.equal, ours, theirs))
    for tensor in batch(np.full(40, 65_535, dtype=np.uint16), 3, 2):
        assert (tensor.dtype, tensor.is_contiguous()) == (torch.int64, True)
        assert (tensor == 65_535).all()
    assert batch(whole, 3, 0)[0].shape == (0, 4)


@pytest.mark.gpu
def test_batches_reach_the_gpu():
    given = {"seed": 0, "n_samples": 8, "block_size": 16}
    for first in range(0, 200, 8):
        there = sample_batch(numbers(5000), first_sample=first, **given, device="cuda")
        here = sample_batch(numbers(5000), first_sample=first, **given)
        assert there[0].is_cuda
        assert all(torch.equal(x.cpu(), y) for x, y in zip(there, here))


@given(
    n_tokens=st.integers(5, 200),
    batch_size=st.integers(1, 9),
    n_batches=st.none() | st.integers(0, 30),
    world_size=st.integers(1, 4),
)
def test_eval_batches_read_on_from_the_start(n_tokens, batch_size, n_batches, world_size):
    tokens = numbers(n_tokens)
    options = {"batch_size": batch_size, "block_size": 4, "n_batches": n_batches}
    batches = list(eval_batches(tokens, **options))
    starts = [starts_of(x) for x, _ in batches]
    last = None if n_batches is None else n_batches * batch_size
    assert [i for of_batch in starts for i in of_batch] == list(range(0, n_tokens - 4, 4))[:last]
    assert all(torch.equal(y, x + 1) for x, y in batches)
    assert all(len(x) == batch_size for x, _ in batches[:-1])
    for rank in range(world_size):
        mine = eval_batches(tokens, **options, rank=rank, world_size=world_size)
        assert [starts_of(x) for x, _ in mine] == starts[rank::world_size]


def test_what_batches_refuse():
    for call in (n_samples_per_epoch, lambda t, T: batch(t, 0, 1, block_size=T)):
        with pytest.raises(ValueError, match=r"at least block_size \+ 1 = 5 tokens, got 4; use"):
            call(numbers(4), 4)
    with pytest.raises(ValueError, match=r"eval_batches: .* block_size \+ 1 = 5 tokens, got 4"):
        eval_batches(numbers(4), batch_size=1, block_size=4)
    for end, n in ((None, 50), (END, 1)):
        words = rf"end-of-text.*got end_of_text={end} in {n} .*2, bpe-N\)"
        with pytest.raises(ValueError, match=words):
            pack_documents(np.zeros(n, np.uint16), end, 8)


END = 7


def stream(*lengths):
    """Documents of so many tokens, from 10 on, with END between them."""
    parts, at = [], 10
    for n in lengths:
        parts += [np.arange(at, at + n, dtype=np.uint16), np.array([END], np.uint16)]
        at += n
    return np.concatenate(parts[:-1])


@pytest.mark.parametrize("lengths", [(3, 5, 2), (1,) * 40, (100, 3, 8, 8, 8, 17), (9, 0, 0, 4)])
def test_every_pair_is_in_one_row(lengths):
    tokens = stream(*lengths)
    packed = pack_documents(tokens, END, 8)
    x, y, positions = found = np.empty((3, packed.n_rows, 8), np.int64)
    for row in range(packed.n_rows):
        packed.fill(row, *found[:, row])
    pairs = sorted(zip(x[y >= 0].tolist(), y[y >= 0].tolist()))
    assert pairs == sorted(zip(tokens[:-1].tolist(), tokens[1:].tolist()))
    assert (positions[:, 0] == 0).all()
    steps = np.diff(positions, axis=1)
    assert ((steps == 1) | (positions[:, 1:] == 0)).all()
    inside = (positions[:, 1:] > 0) & (y[:, 1:] >= 0)
    assert (x[:, 1:][inside] == y[:, :-1][inside]).all()  # of one document
    assert (x[:, 1:][inside] != END).all()  # it stands only where one begins


def test_best_fit_and_batches_of_rows():
    packed = pack_documents(stream(18, 5, 4, 4, 2), END, 8)  # pairs: 18, 6, 5, 5, 2
    rows = np.split(packed.lengths, packed.first[1 : packed.n_rows])
    sizes = [sorted(row.tolist(), reverse=True) for row in rows]
    assert sizes == [[8], [8], [6, 2], [5], [5, 2]]
    packed = pack_documents(stream(*range(1, 60)), END, 16)
    whole = batch(packed, 0, 2 * packed.n_rows, seed=3, block_size=16)
    parts = [batch(packed, i, 1, seed=3, block_size=16) for i in range(9)]
    for i, tensor in enumerate(whole):
        assert tensor.dtype == torch.int64
        assert torch.equal(tensor[:9], torch.cat([part[i] for part in parts]))
        first, second = tensor.split(packed.n_rows)
        assert sorted(first.tolist()) == sorted(second.tolist())
    assert not torch.equal(*whole[0].split(packed.n_rows))


@pytest.fixture
def load(tmp_path):
    """load_data() of a path below this folder, with a cache beside it."""

    def call(name, tokenizer="auto", progress=False, **options) -> TextData:
        source = name if name == "bible" else str(tmp_path / name)
        cache = tmp_path / "cache"
        return load_data(source, tokenizer, cache_dir=cache, progress=progress, **options)

    return call


def write_bins(folder, train, val=None):
    folder.mkdir(exist_ok=True)
    for name, ids in (("train", train), ("val", val)):
        if ids is not None:
            np.asarray(ids, dtype="<u2").tofile(folder / f"{name}.bin")


def test_text_end_to_end(load, tmp_path, capsys):
    """Notes are shown by the process that shows progress."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "story.txt").write_text("abcdefghij" * 100)
    (tmp_path / "in" / "x.png").write_bytes(b"\xff")
    loaded = load("in/story.txt", "bytes", val_fraction=0.1)
    assert (loaded.name, len(loaded.train), len(loaded.val)) == ("story", 900, 100)
    assert load("in/story.txt").tokenizer.name == "bpe-4096"
    for progress in (True, False):
        capsys.readouterr()
        load("in", "bytes", progress=progress)
        assert (
            "fastpar: in: skipped 1 files that are not text" in capsys.readouterr().err
        ) == progress


def test_ids_end_to_end(load, tmp_path, capsys):
    write_bins(tmp_path / "owt", range(1000), [15496, 995])
    loaded = load("owt")
    assert (loaded.vocab_size, loaded.val_bytes) == (50257, None)
    assert loaded.tokenizer.decode(loaded.val[:]) == "Hello world"
    assert load("owt", "ids").vocab_size == 15497
    write_bins(tmp_path / "only", range(1000))
    only_train = load("only", val_fraction=0.1)
    assert only_train.train[:].tolist() == list(range(900))
    assert only_train.val[:].tolist() == list(range(900, 1000))
    for i in range(3):  # the tail of several shards is held out
        (tmp_path / f"x_train_{i}.bin").write_bytes(shard(range(i * 40, i * 40 + 40)))
    loaded = load("x_train_*.bin", val_fraction=0.5)
    assert loaded.train[0:60].tolist() == list(range(60))
    assert loaded.val[0:60].tolist() == list(range(60, 120))
    write_bins(tmp_path / "char", range(65), [3])
    (tmp_path / "char" / "meta.pkl").write_bytes(b"no pickle")  # the vocabulary is that of the ids
    capsys.readouterr()
    loaded = load("char", progress=True)
    assert (loaded.tokenizer.name, loaded.vocab_size) == ("ids", 65)
    assert loaded.tokenizer.decode([3, 4]) == "3 4 "
    assert "ids stay numbers unless you name their tokenizer" in capsys.readouterr().err
    assert load("char", "bytes").tokenizer.decode([64]) == "@"


@pytest.mark.slow
def test_ids_outside_the_vocabulary(load, tmp_path):
    """A changed file or memo is checked again."""
    for part, *ids in (("training", [1, 50257], [1]), ("validation", [1, 2], [1, 50257])):
        write_bins(tmp_path / "bad", *ids)
        words = rf"ids below 50257, .* tokenizer gpt2, got id=50257 in the {part} files of bad"
        for _ in range(2):  # the second time from the memo, or from a damaged one
            with pytest.raises(ValueError, match=words):
                load("bad")
        assert load("bad", "ids").vocab_size == 50258
        with pytest.raises(ValueError, match=r"token ids below 256, .* bytes, got id=50257"):
            load("bad", "bytes")
        for memo in (tmp_path / "cache").glob("max-id*"):
            memo.write_text(json.dumps(["damaged"]))


def test_tokenizers_that_do_not_fit(load, tmp_path):
    write_bins(tmp_path / "owt", range(1000))
    IdTokenizer(65537).save(tmp_path / "wide")
    wide = str(tmp_path / "wide")
    for name, tokenizer, words in (
        ("owt", "bpe", "that wrote owt, got tokenizer=bpe, which learns"),
        ("owt", "chars", "that wrote owt, got tokenizer=chars, which learns"),
        ("owt", "words", "got tokenizer=words; choose one of these"),
        ("bible", "ids", "expected bytes, chars, .* got tokenizer=ids"),
        ("owt", wide, "at most 65536 tokens for 16-bit ids, got .* with 65537"),
    ):
        with pytest.raises(ValueError, match=words):
            load(name, tokenizer)
    np.arange(1000, dtype="<u4").tofile(tmp_path / "owt" / "train.bin")
    assert load("owt", wide, token_bits=32).vocab_size == 65537
    with pytest.raises(ValueError, match=r"expected token ids below 65537, .* got id=\d{8}"):
        load("owt", wide, token_bits=64)  # the memo of 32 bits is not its own


def test_lengths_that_are_refused(load, tmp_path):
    (tmp_path / "short.txt").write_text("a" * 100)
    assert len(load("short.txt", "bytes", block_size=4).val) == 5
    for options, words in (
        ({"block_size": 5}, "load_data: .* = 6 validation tokens of short, got 5;"),
        ({"block_size": 256}, "= 257 training tokens of short, got 95; use more text"),
    ):
        with pytest.raises(ValueError, match=words):
            load("short.txt", "bytes", **options)
