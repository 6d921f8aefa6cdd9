"""Documents in rows: every pair once, positions from 0, the longest first, batches by index."""

import numpy as np
import pytest
import torch

from fastpar.data.batches import pack_documents, sample_batch

END = 7


def stream(*lengths):
    """Documents of so many tokens, from 10 on, with END between them."""
    parts, at = [], 10
    for n in lengths:
        parts.append(np.arange(at, at + n, dtype=np.uint16))
        parts.append(np.array([END], np.uint16))
        at += n
    return np.concatenate(parts[:-1])


def rows_of(packed):
    found = np.empty((3, packed.n_rows, packed.block_size), np.int64)
    for row in range(packed.n_rows):
        packed.fill(row, *found[:, row])
    return found


@pytest.mark.parametrize("lengths", [(3, 5, 2), (1,) * 40, (100, 3, 8, 8, 8, 17), (9, 0, 0, 4)])
def test_every_pair_is_in_one_row(lengths):
    tokens = stream(*lengths)
    packed = pack_documents(tokens, END, 8)
    x, y, positions = rows_of(packed)
    pairs = sorted(zip(x[y >= 0].tolist(), y[y >= 0].tolist()))
    assert pairs == sorted(zip(tokens[:-1].tolist(), tokens[1:].tolist()))
    assert (positions[:, 0] == 0).all()
    steps = np.diff(positions, axis=1)
    assert ((steps == 1) | (positions[:, 1:] == 0)).all()
    inside = (positions[:, 1:] > 0) & (y[:, 1:] >= 0)
    assert (x[:, 1:][inside] == y[:, :-1][inside]).all()  # of one document
    assert (x[:, 1:][inside] != END).all()  # it stands only where one begins


def test_best_fit_and_what_is_told():
    packed = pack_documents(stream(18, 5, 4, 4, 2), END, 8)  # pairs: 18, 6, 5, 5, 2
    sizes = [
        sorted(packed.lengths[packed.first[r] : packed.first[r + 1]].tolist(), reverse=True)
        for r in range(packed.n_rows)
    ]
    assert sizes == [[8], [8], [6, 2], [5], [5, 2]]
    assert packed.told == (
        "packed   5 documents into 5 rows of 8, 10.00% free; 1 are longer than the context and "
        "were split"
    )


def test_a_batch_is_a_function_of_its_index():
    packed = pack_documents(stream(*range(1, 60)), END, 16)
    args = {"seed": 3, "block_size": 16}
    whole = sample_batch(packed, first_sample=0, n_samples=2 * packed.n_rows, **args)
    parts = [sample_batch(packed, first_sample=i, n_samples=1, **args) for i in range(9)]
    for i, tensor in enumerate(whole):
        assert tensor.dtype == torch.int64
        assert torch.equal(tensor[:9], torch.cat([part[i] for part in parts]))
        first, second = tensor.split(packed.n_rows)
        assert sorted(first.tolist()) == sorted(second.tolist())
    assert not torch.equal(*whole[0].split(packed.n_rows))


@pytest.mark.parametrize(("end", "n"), [(None, 50), (END, 1)])
def test_bad_input(end, n):
    with pytest.raises(
        ValueError, match=rf"end-of-text.*got end_of_text={end} in {n} .*2, bpe-N\)"
    ):
        pack_documents(np.zeros(n, np.uint16), end, 8)
