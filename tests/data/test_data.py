"""Batches by global sample index, and load_data from end to end."""

import json

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fastpar.data import batches as data_module
from fastpar.data.batches import (
    TextData,
    eval_batches,
    load_data,
    n_samples_per_epoch,
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


@given(n=st.integers(1, 3000), seed=seeds, epoch=st.integers(0, 2**40))
@settings(max_examples=50, deadline=None)
def test_the_order_of_an_epoch_is_a_bijection(n, seed, epoch):
    keys = data_module._epoch_keys(seed, np.full(n, epoch))[:-1]
    order = data_module._permute(np.arange(n, dtype=np.uint64), n, keys)
    assert sorted(order.tolist()) == list(range(n))


def test_the_order_is_well_mixed():
    n = 4096
    orders = []
    for seed, epoch in ((0, 0), (0, 1), (1, 0), (2**64 - 1, 7)):
        keys = data_module._epoch_keys(seed, np.full(n, epoch))[:-1]
        orders.append(data_module._permute(np.arange(n, dtype=np.uint64), n, keys).astype(float))
    bound = 5 / n**0.5  # five standard deviations of the correlation of independent orders
    position = np.arange(n)
    for i, order in enumerate(orders):
        for other in [position, *orders[:i]]:
            assert abs(np.corrcoef(order, other)[0, 1]) < bound
        for lag in (1, 2, 64):
            assert abs(np.corrcoef(order[lag:], order[:-lag])[0, 1]) < bound


@pytest.mark.slow
def test_every_small_order_appears_equally_often():
    """4,000 seeds: which window comes first, for sizes where a bias would be easy to see."""
    for n in (2, 3, 8, 17):
        epochs = np.zeros(n, dtype=np.int64)
        first = [
            int(data_module._permute(np.arange(n, dtype=np.uint64), n, keys)[0])
            for keys in (data_module._epoch_keys(seed, epochs)[:-1] for seed in range(2000))
        ]
        counts = np.bincount(first, minlength=n)
        chi2 = float(((counts - 2000 / n) ** 2 / (2000 / n)).sum())
        assert chi2 < n + 5 * (2 * n) ** 0.5  # mean n - 1, variance 2 (n - 1)


@given(
    n_tokens=st.integers(2, 600), block_size=st.integers(1, 40), seed=seeds, epoch=st.integers(0, 9)
)
@settings(max_examples=50, deadline=None)
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
@settings(max_examples=60, deadline=None)
def test_a_step_is_the_same_for_any_cut(ranks, accumulation, micro_batch, step):
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


def test_any_sample_alone_is_the_sample_of_the_series():
    tokens = numbers(50)
    n = n_samples_per_epoch(tokens, 4)
    x, _ = batch(tokens, 0, 5 * n)  # one batch may span epochs
    assert [starts_of(batch(tokens, i, 1)[0])[0] for i in range(5 * n)] == starts_of(x)


def test_epochs_and_seeds_differ():
    tokens = numbers(2000)
    n = n_samples_per_epoch(tokens, 16)
    epochs = [starts_of(batch(tokens, e * n, n, block_size=16)[0]) for e in range(8)]
    assert len({tuple(epoch) for epoch in epochs}) == 8
    assert len({epoch[0] % 16 for epoch in epochs}) > 3  # other windows, not only another order
    others = [
        starts_of(batch(tokens, 0, n, seed=seed, block_size=16)[0]) for seed in (1, -1, 2**63)
    ]
    assert len({tuple(other) for other in [*others, epochs[0]]}) == 4


def test_the_series_stays_what_it_is():
    """A run that resumes under a later version must see the same samples."""
    x, _ = batch(numbers(1000), 60, 8, seed=1337, block_size=16)
    assert starts_of(x) == [926, 798, 510, 606, 94, 318, 206, 766]


def test_one_window_is_all_there_is():
    for n_tokens in (5, 6, 7, 8, 9):
        tokens = numbers(n_tokens)
        assert n_samples_per_epoch(tokens, 4) == 1
        x, y = batch(tokens, 0, 64)
        assert set(starts_of(x)) == set(range(min(4, n_tokens - 4)))
        assert int(y.max()) == min(n_tokens - 1, 7)


def test_batches_of_shards_equal_batches_of_one_array():
    whole = numbers(500, np.uint16)
    shards = Shards(np.split(whole, [3, 3, 100, 250]))
    assert n_samples_per_epoch(shards, 7) == n_samples_per_epoch(whole, 7)
    for first in (0, 40, 1000):
        ours, theirs = batch(shards, first, 70, block_size=7), batch(whole, first, 70, block_size=7)
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])


def test_batches_are_contiguous_int64_and_may_be_empty():
    tokens = np.full(40, 65_535, dtype=np.uint16)
    x, y = batch(tokens, 3, 2)
    for tensor in (x, y):
        assert (tensor.dtype, tensor.is_contiguous()) == (torch.int64, True)
        assert (tensor == 65_535).all()
    assert batch(tokens, 3, 0)[0].shape == (0, 4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_batches_reach_the_gpu():
    tokens = numbers(5000)
    for first in range(0, 200, 8):
        x, y = sample_batch(
            tokens, seed=0, first_sample=first, n_samples=8, block_size=16, device="cuda"
        )
        there = batch(tokens, first, 8, block_size=16)
        assert x.is_cuda
        assert torch.equal(x.cpu(), there[0])
        assert torch.equal(y.cpu(), there[1])


@given(
    n_tokens=st.integers(5, 200),
    batch_size=st.integers(1, 9),
    n_batches=st.none() | st.integers(0, 30),
    world_size=st.integers(1, 4),
)
@settings(max_examples=100, deadline=None)
def test_eval_batches_read_on_from_the_start(n_tokens, batch_size, n_batches, world_size):
    tokens = numbers(n_tokens)
    options = {"batch_size": batch_size, "block_size": 4, "n_batches": n_batches}
    batches = list(eval_batches(tokens, **options))
    expected = list(range(0, n_tokens - 4, 4))
    if n_batches is not None:
        expected = expected[: n_batches * batch_size]
    assert [start for x, _ in batches for start in starts_of(x)] == expected
    assert all(torch.equal(y, x + 1) for x, y in batches)
    assert all(len(x) == batch_size for x, _ in batches[:-1])
    for rank in range(world_size):
        mine = list(eval_batches(tokens, **options, rank=rank, world_size=world_size))
        assert [starts_of(x) for x, _ in mine] == [
            starts_of(x) for x, _ in batches[rank::world_size]
        ]


def test_what_batches_refuse():
    for call in (n_samples_per_epoch, lambda t, T: batch(t, 0, 1, block_size=T)):
        with pytest.raises(ValueError, match=r"at least block_size \+ 1 = 5 tokens, got 4; give"):
            call(numbers(4), 4)
        with pytest.raises(ValueError, match=r"block_size >= 1, got block_size=0;"):
            call(numbers(4), 0)
    with pytest.raises(ValueError, match=r"eval_batches: .* block_size \+ 1 = 5 tokens, got 4"):
        eval_batches(numbers(4), batch_size=1, block_size=4)


@pytest.mark.slow
def test_the_bible_is_there_after_installation(tmp_path):
    loaded = load_data(cache_dir=tmp_path, block_size=256, progress=False)
    assert (loaded.name, loaded.tokenizer.name, loaded.vocab_size) == ("bible", "bpe-4096", 4096)
    assert 1_000_000 < len(loaded.train) + len(loaded.val) < 1_100_000
    assert 0.045 < len(loaded.val) / len(loaded.train) < 0.06
    start = "Genesis 1\n1 In the beginning God created the heaven and the earth."
    assert loaded.tokenizer.decode(loaded.train[:100]).startswith(start)
    n_bytes = len(loaded.tokenizer.decode(loaded.val[:]).replace("<|endoftext|>", "").encode())
    assert loaded.val_bytes == n_bytes
    assert f"{len(loaded.train):,} tokens to train on" in loaded.describe()
    assert f"{n_bytes / len(loaded.val):.2f} bytes per token" in loaded.describe()


def test_text_file_end_to_end(tmp_path):
    (tmp_path / "in").mkdir()
    file = tmp_path / "in" / "story.txt"
    file.write_text("abcdefghij" * 100)
    (tmp_path / "in" / "x.png").write_bytes(b"\xff")
    loaded = load_data(str(file), "bytes", cache_dir=tmp_path / "c", val_fraction=0.1)
    assert (loaded.name, len(loaded.train), len(loaded.val), loaded.notes) == (
        "story",
        900,
        100,
        (),
    )
    folder = load_data(str(tmp_path / "in"), "bytes", cache_dir=tmp_path / "c", progress=False)
    assert "skipped 1 files that are not text" in folder.notes[0]


def test_notes_are_shown_by_the_process_that_shows_progress(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "story.txt").write_text("abcdefghij" * 100)
    (tmp_path / "in" / "x.png").write_bytes(b"\xff")
    for progress in (True, False):
        load_data(str(tmp_path / "in"), "bytes", cache_dir=tmp_path / "c", progress=progress)
        assert ("fastpar: in: skipped 1 files" in capsys.readouterr().err) == progress


def bin_folder(folder, train, val=None):
    folder.mkdir(exist_ok=True)
    for name, ids in (("train", train), ("val", val)):
        if ids is not None:
            np.asarray(ids, dtype="<u2").tofile(folder / f"{name}.bin")
    return str(folder)


def load_bin(folder, tokenizer="auto", **options) -> TextData:
    cache = options.pop("cache_dir", f"{folder}-cache")
    return load_data(folder, tokenizer, cache_dir=cache, progress=False, **options)


def test_bin_folder_end_to_end(tmp_path):
    folder = bin_folder(tmp_path / "owt", range(1000), [15496, 995])
    loaded = load_bin(folder)
    assert (loaded.vocab_size, loaded.val_bytes) == (50257, None)
    assert loaded.tokenizer.decode(loaded.val[:]) == "Hello world"
    assert "bytes per token" not in loaded.describe()
    assert load_bin(folder, "ids").vocab_size == 15497
    only_train = load_bin(bin_folder(tmp_path / "only", range(1000)), val_fraction=0.1)
    assert only_train.train[:].tolist() == list(range(900))
    assert only_train.val[:].tolist() == list(range(900, 1000))


def test_bin_with_meta_pkl_has_the_vocabulary_of_its_ids(tmp_path):
    folder = bin_folder(tmp_path / "char", range(65), [3])
    (tmp_path / "char" / "meta.pkl").write_bytes(b"no pickle")
    loaded = load_bin(folder)
    assert (loaded.tokenizer.name, loaded.vocab_size) == ("ids", 65)
    assert loaded.tokenizer.decode([3, 4]) == "3 4 "
    assert "the ids stay numbers unless their tokenizer is named" in loaded.notes[0]
    assert load_bin(folder, "bytes").tokenizer.decode([64]) == "@"


def test_tail_of_several_shards_is_held_out(tmp_path):
    for i in range(3):
        header = np.zeros(256, dtype="<i4")
        header[:3] = 20240520, 1, 40
        ids = np.arange(i * 40, i * 40 + 40, dtype="<u2")
        (tmp_path / f"x_train_{i}.bin").write_bytes(header.tobytes() + ids.tobytes())
    loaded = load_bin(str(tmp_path / "x_train_*.bin"), val_fraction=0.5, cache_dir=tmp_path / "c")
    assert loaded.train[0:60].tolist() == list(range(60))
    assert loaded.val[0:60].tolist() == list(range(60, 120))


@pytest.mark.parametrize("part", ["training", "validation"])
def test_ids_outside_the_vocabulary(part, tmp_path):
    ids = {"training": [1, 2, 3], "validation": [1, 2, 3]}
    ids[part] = [1, 50257, 3]
    folder = bin_folder(tmp_path / "bad", *ids.values())
    expected = rf"token ids below 50257, .* tokenizer gpt2, got id=50257 in the {part} files of bad"
    for _ in range(2):  # the second time from the memo
        with pytest.raises(ValueError, match=expected):
            load_bin(folder)
    assert load_bin(folder, "ids").vocab_size == 50258
    with pytest.raises(ValueError, match=r"token ids below 256, .* bytes, got id=50257"):
        load_bin(folder, "bytes")


def test_a_vocabulary_that_16_bits_cannot_hold(tmp_path):
    folder = bin_folder(tmp_path / "llama", range(1000))
    IdTokenizer(65537).save(tmp_path / "t")
    with pytest.raises(ValueError, match=r"at most 65536 tokens for 16-bit ids, got .* with 65537"):
        load_bin(folder, str(tmp_path / "t"))
    np.arange(1000, dtype="<u4").tofile(tmp_path / "llama" / "train.bin")
    assert load_bin(folder, str(tmp_path / "t"), token_bits=32).vocab_size == 65537
    with pytest.raises(ValueError, match=r"expected token ids below 65537, .* got id=\d{8}"):
        load_bin(folder, str(tmp_path / "t"), token_bits=64)  # the memo of 32 bits is not its own


def test_a_changed_bin_is_checked_again(tmp_path):
    folder = bin_folder(tmp_path / "x", [1, 2, 3], [4])
    assert load_bin(folder, "ids").vocab_size == 5
    bin_folder(tmp_path / "x", [1, 2, 60000], [4])
    with pytest.raises(ValueError, match="got id=60000"):
        load_bin(folder)
    for memo in (tmp_path / "x-cache").glob("max-id*"):
        memo.write_text(json.dumps(["damaged"]))
    with pytest.raises(ValueError, match="got id=60000"):
        load_bin(folder)


def test_tokenizers_that_cannot_fit_a_bin(tmp_path):
    folder = bin_folder(tmp_path / "owt", range(1000))
    for name in ("bpe", "bpe-4096", "chars"):
        with pytest.raises(
            ValueError, match=rf"that wrote owt, got tokenizer={name}, which learns"
        ):
            load_bin(folder, name)
    with pytest.raises(ValueError, match=r"got tokenizer=words; choose one of these"):
        load_bin(folder, "words")
    with pytest.raises(ValueError, match=r"expected bytes, chars, .* got tokenizer=ids"):
        load_data("bible", "ids", cache_dir=tmp_path / "c", progress=False)


def test_a_saved_tokenizer_serves_other_data(tmp_path):
    (tmp_path / "a.txt").write_text("abcabcabc" * 50)
    (tmp_path / "b.txt").write_text("cba" * 50)
    cache = tmp_path / "c"
    first = load_data(str(tmp_path / "a.txt"), "chars", cache_dir=cache, progress=False)
    first.tokenizer.save(tmp_path / "saved")
    second = load_data(str(tmp_path / "b.txt"), str(tmp_path / "saved"), cache_dir=cache)
    assert second.train[:3].tolist() == [2, 1, 0]
    (tmp_path / "b.txt").write_text("xyz" * 50)
    with pytest.raises(ValueError, match="got char='x'"):
        load_data(str(tmp_path / "b.txt"), str(tmp_path / "saved"), cache_dir=cache)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, float("nan")])
def test_val_fraction(fraction):
    with pytest.raises(ValueError, match=rf"0 < val_fraction < 1, got val_fraction={fraction};"):
        load_data(val_fraction=fraction)


def test_text_too_short_for_one_sequence(tmp_path):
    file = tmp_path / "short.txt"
    file.write_text("a" * 100)
    options = {"cache_dir": tmp_path / "c", "progress": False}
    assert len(load_data(str(file), "bytes", **options, block_size=4).val) == 5
    with pytest.raises(ValueError, match=r"load_data: .* = 6 validation tokens of short, got 5;"):
        load_data(str(file), "bytes", **options, block_size=5)
    with pytest.raises(ValueError, match=r"= 257 training tokens of short, got 95; give more text"):
        load_data(str(file), "bytes", **options, block_size=256)
    with pytest.raises(ValueError, match=r"block_size >= 1, got block_size=0"):
        load_data(str(file), "bytes", **options, block_size=0)
