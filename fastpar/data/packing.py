"""Documents packed into rows from their beginnings.

A document is what stands from one end-of-text token to the next, both included: the first says that
a text begins, the second is predicted. So each pair of a token and its next one is in exactly one
row. Documents longer than a row are cut into rows of their own and a rest. Rows are filled best
fit, the longest first: each piece goes where it leaves least; what stays free has no targets.

The rows depend on tokens and block_size alone. Epochs visit all of them, in the random orders of
batches.py, so that a sample is a pure function of its index here, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fastpar.data.sources import Tokens

_SCAN = 1 << 24


@dataclass(frozen=True, eq=False)
class PackedTokens:
    """Rows of pieces of documents: inputs are tokens[start : start + length], targets one further.

    Attributes:
        starts, lengths: of all pieces, row after row; first: of each row's pieces, [rows + 1].
        n_documents, n_split: how many there are, how many of them are longer than a row.
    """

    tokens: Tokens
    block_size: int
    starts: np.ndarray
    lengths: np.ndarray
    first: np.ndarray
    n_documents: int
    n_split: int

    @property
    def n_rows(self) -> int:
        return len(self.first) - 1

    @cached_property
    def told(self) -> str:
        """What was done, in a line."""
        free = 1 - float(self.lengths.sum()) / (self.n_rows * self.block_size)
        return (
            f"packed   {self.n_documents:,} documents into {self.n_rows:,} rows of "
            f"{self.block_size}, {free:.2%} free; {self.n_split:,} are longer than the context "
            "and were split"
        )

    def fill(self, row: int, x: np.ndarray, y: np.ndarray, positions: np.ndarray) -> None:
        """A row's inputs, targets and positions in its documents, [block_size] each."""
        at = 0
        for piece in range(int(self.first[row]), int(self.first[row + 1])):
            start, n = int(self.starts[piece]), int(self.lengths[piece])
            window = np.asarray(self.tokens[start : start + n + 1])
            x[at : at + n], y[at : at + n] = window[:-1], window[1:]
            positions[at : at + n] = np.arange(n)
            at += n
        x[at:], y[at:] = 0, -100
        positions[at:] = np.arange(len(x) - at)


def pack_documents(tokens: Tokens, end_of_text: int | None, block_size: int) -> PackedTokens:
    """The documents of these tokens in rows of block_size.

    Args:
        end_of_text: the token between documents.
    Raises:
        ValueError: there is none; fewer than two tokens.
    """
    if end_of_text is None or len(tokens) < 2:
        raise ValueError(
            "pack_documents: expected tokens with an end-of-text token between documents, got "
            f"end_of_text={end_of_text} in {len(tokens)} tokens; use a tokenizer that has one "
            "(gpt2, bpe-N), or --pack stream"
        )
    parts = [
        np.flatnonzero(np.asarray(tokens[at : at + _SCAN]) == end_of_text) + at
        for at in range(0, len(tokens), _SCAN)
    ]
    bounds = np.unique(np.concatenate([[0], *parts, [len(tokens) - 1]]))
    sizes = np.diff(bounds)
    pieces = -(-sizes // block_size)
    of = np.repeat(np.arange(len(sizes)), pieces)
    number = np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = bounds[of] + number * block_size
    lengths = np.minimum(block_size, bounds[of + 1] - starts)
    order = np.lexsort((starts, -lengths))
    rows = _best_fit(lengths[order].tolist(), block_size)
    order = order[np.argsort(rows, kind="stable")]
    first = np.concatenate([[0], np.cumsum(np.bincount(rows))])
    split = int((sizes > block_size).sum())
    return PackedTokens(tokens, block_size, starts[order], lengths[order], first, len(sizes), split)


def _best_fit(lengths: list[int], room: int) -> np.ndarray:
    """The row of each piece, longest first: the fullest that it fits into, else a new one."""
    rows = np.empty(len(lengths), np.int64)
    open_rows: list[list[int]] = [[] for _ in range(room + 1)]  # by what is free
    some = n_rows = 0  # bit k of some: a row has k free
    for i, n in enumerate(lengths):
        fits = some >> n << n
        if fits:
            free = (fits & -fits).bit_length() - 1
            row = open_rows[free].pop()
            if not open_rows[free]:
                some &= ~(1 << free)
        else:
            free, row, n_rows = room, n_rows, n_rows + 1
        rows[i] = row
        if free > n:
            open_rows[free - n].append(row)
            some |= 1 << free - n
    return rows
