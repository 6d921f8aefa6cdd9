"""Tokens and batches. Text is tokenized once and cached; a batch is a pure function of an index.

[Note: sample order] Sample i belongs to epoch e = i // n with n = n_samples_per_epoch. An epoch
divides the tokens into n windows of T inputs on a grid that starts at a random offset below T, and
visits them in a random order. Both depend on (seed, e) only, so windows differ between epochs and
no token is the input of two samples of one epoch. The order is not stored: position p of the epoch
is mapped to a window by a Feistel network on w = bit_length(n - 1) bits (w // 2 and w - w // 2),
each round a bijection. A result >= n is mapped again until it is below n (cycle walking; fewer than
two passes on average because 2**w < 2 n), which makes a bijection on [0, n). So ranks,
accumulation and resuming need no state other than the index.

[Note: packing] A document reaches from one end-of-text token to the next, both included: the first
marks the beginning, the second is predicted. So each pair of adjacent tokens is in exactly one row.
Documents longer than a row are split into full rows and a remainder. Rows are filled by best fit,
longest pieces first: each piece goes into the row with the least sufficient space; unused space has
no targets. Rows depend on tokens and block_size only; epochs visit all rows, shuffled as above.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastpar.data.sources import (
    Shards,
    TextData,
    Tokens,
    TokenSource,
    cache_folder,
    digest_of,
    open_source,
    progress_bar,
    say,
    tokenized,
)
from fastpar.data.tokenizer import IdTokenizer, check_name, learns_from_text, make_tokenizer
from fastpar.files.plain_files import write_text

_SCAN = 1 << 24  # tokens scanned at once
_DEFAULT_TOKENIZER = "bpe-4096"
_FEISTEL_ROUNDS = 8
_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: splitmix64's increment


@dataclass(frozen=True, eq=False)
class PackedTokens:
    """Documents packed into rows. A piece's inputs are tokens[start : start + length].

    Attributes:
        starts, lengths: of all pieces, row after row.
        first: [rows + 1], index of each row's first piece.
        n_documents: number of documents.
        n_split: number of documents longer than a row.
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
    def description(self) -> str:
        """What packing did, in one line."""
        unused = 1 - float(self.lengths.sum()) / (self.n_rows * self.block_size)
        return (
            f"packed   {self.n_documents:,} documents into {self.n_rows:,} rows of "
            f"{self.block_size} tokens, {unused:.2%} unused; {self.n_split:,} longer than the "
            "context were split"
        )

    def fill(self, row: int, x: np.ndarray, y: np.ndarray, positions: np.ndarray) -> None:
        """Write a row's inputs, targets and positions within documents, [block_size] each."""
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
    """Pack the documents of these tokens into rows of block_size tokens.

    Args:
        end_of_text: the token between documents.
    Raises:
        ValueError: end_of_text is None; fewer than two tokens.
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


def _best_fit(lengths: list[int], size: int) -> np.ndarray:
    """The row of each piece (sorted, longest first): the fullest that it fits into, or a new
    one."""
    rows = np.empty(len(lengths), np.int64)
    open_rows: list[list[int]] = [[] for _ in range(size + 1)]  # by free space
    some = n_rows = 0  # bit k of some: there is a row with k free
    for i, n in enumerate(lengths):
        fits = some >> n << n
        if fits:
            free = (fits & -fits).bit_length() - 1
            row = open_rows[free].pop()
            if not open_rows[free]:
                some &= ~(1 << free)
        else:
            free, row, n_rows = size, n_rows, n_rows + 1
        rows[i] = row
        if free > n:
            open_rows[free - n].append(row)
            some |= 1 << free - n
    return rows


def load_data(
    source: str = "bible",
    tokenizer: str | None = "auto",
    *,
    cache_dir: str | Path | None = None,
    val_fraction: float = 0.05,
    text_column: str = "text",
    token_bits: int = 16,
    block_size: int | None = None,
    progress: bool = True,
    meet: Callable[[], None] = lambda: None,
) -> TextData:
    """Load the tokens of a source, from the cache or by tokenizing it now.

    Args:
        source, text_column, token_bits: see `fastpar.data.sources.open_source`.
        tokenizer: see `fastpar.data.tokenizer.make_tokenizer`; auto: bpe-4096 for text; for .bin
            files gpt2, or the characters of a meta.pkl in their folder. ids (for .bin only): use
            ids as numbers; the largest sets the vocabulary. None: as auto, but never trained on the
            text.
        cache_dir: default $XDG_CACHE_HOME/fastpar or ~/.cache/fastpar.
        val_fraction: in (0, 1), of the text for validation: whole documents spread over the text,
            or its end if there are too few documents. Sources with a validation split keep it.
        block_size: if given, both parts must have at least one sequence of this length.
        progress: show a bar and notes on stderr in this process.
        meet: returns when every rank has called it. Each calls it once: the one that shows progress
            when it has tried to lock the cache, the others before that. So it is the one to
            tokenize.
    Raises:
        ValueError: see `open_source` and `make_tokenizer`; text with tokenizer=None; token ids
            outside the vocabulary; text too short for block_size.
        ImportError: a package is missing.
        RuntimeError: the cache folder is not writable.
    Ranks: any number may call it at the same time; one tokenizes, the others wait.
    Deterministic: yes; split and ids depend on content and arguments only.
    """
    opened = open_source(source, text_column=text_column, token_bits=token_bits)
    for note in opened.notes:
        say(note, progress)
    cache = cache_folder(cache_dir)
    if isinstance(opened, TokenSource):
        meet()
        data = _load_tokens(opened, tokenizer or "auto", val_fraction, cache, progress)
    else:
        if tokenizer is None:
            raise ValueError(
                "load_data: expected the tokenizer that the weights were trained with, got none "
                f"for the text {opened.name}; name it: gpt2, bytes or a folder"
            )
        name = _DEFAULT_TOKENIZER if tokenizer == "auto" else tokenizer
        check_name(name)
        data = tokenized(opened, name, val_fraction, cache=cache, progress=progress, meet=meet)
    if block_size is not None:
        for part, tokens in (("training", data.train), ("validation", data.val)):
            _check_length("load_data", tokens, block_size, f"{part} tokens of {data.name}")
    return data


def n_samples_per_epoch(tokens: Tokens, block_size: int) -> int:
    """Number of windows of block_size inputs, each with its next token, in an epoch.

    This is up to one less than would fit, because of the offset in [Note: sample order].
    """
    _check_length("n_samples_per_epoch", tokens, block_size, "tokens")
    return max(1, (len(tokens) - block_size) // block_size)


def sample_batch(
    tokens: Tokens | PackedTokens,
    *,
    seed: int,
    first_sample: int,
    n_samples: int,
    block_size: int,
    device: str | torch.device = "cpu",
) -> tuple[torch.Tensor, ...]:
    """Samples first_sample .. first_sample + n_samples - 1 of the endless shuffled series.

    Args:
        tokens: 1-D, uint16 or uint32, more than block_size of them; or rows of pack_documents().
        seed: any integer, taken modulo 2**64; decides offsets and orders.
    Returns:
        x, y: int64 [n_samples, block_size] on device; y is x shifted by one token. For packed
        documents also positions, which start at 0 in each document; y is -100 in unused space. The
        copy to a GPU is asynchronous on the current stream, from pinned memory.
    Raises:
        ValueError: too few tokens.
    Deterministic: yes, a pure function of its arguments; see [Note: sample order].
    """
    index = np.arange(first_sample, first_sample + n_samples)
    if isinstance(tokens, PackedTokens):
        epoch, position = np.divmod(index, tokens.n_rows)
        keys = _epoch_keys(seed, epoch)[:-1]
        rows = _permute(position.astype(np.uint64), tokens.n_rows, keys)
        return _batch(3, rows.tolist(), tokens.block_size, device, tokens.fill)
    n = n_samples_per_epoch(tokens, block_size)
    epoch, position = np.divmod(index, n)
    keys = _epoch_keys(seed, epoch)
    offset = keys[-1] % np.uint64(min(block_size, len(tokens) - n * block_size))
    window = _permute(position.astype(np.uint64), n, keys[:-1])
    starts = (offset + window * np.uint64(block_size)).astype(np.int64)
    return _gather(tokens, starts, block_size, device)


def eval_batches(
    tokens: Tokens,
    *,
    batch_size: int,
    block_size: int,
    n_batches: int | None = None,
    rank: int = 0,
    world_size: int = 1,
    device: str | torch.device = "cpu",
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Batches of consecutive, disjoint windows from the start of the tokens.

    Args:
        n_batches: stop after this many, counted over all ranks; None: all windows. The last batch
            may have fewer rows: weight losses by rows.
        rank, world_size: take the batches rank, rank + world_size, ...
    Returns:
        An iterator of (x, y) as from `sample_batch`.
    Raises:
        ValueError: too few tokens.
    """
    _check_length("eval_batches", tokens, block_size, "tokens")
    starts = np.arange((len(tokens) - 1) // block_size) * block_size
    last = len(starts) if n_batches is None else min(len(starts), n_batches * batch_size)
    firsts = range(rank * batch_size, last, world_size * batch_size)
    return (
        _gather(tokens, starts[first : min(first + batch_size, last)], block_size, device)
        for first in firsts
    )


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy values to the device without waiting for it, through pinned memory."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


def _check_length(function: str, tokens: Tokens, block_size: int, what: str) -> None:
    if len(tokens) <= block_size:
        raise ValueError(
            f"{function}: expected at least block_size + 1 = {block_size + 1} {what}, got "
            f"{len(tokens)}; use more text or a smaller block_size"
        )


def _gather(
    tokens: Tokens, starts: np.ndarray, block_size: int, device: str | torch.device
) -> tuple[torch.Tensor, ...]:
    """Windows of block_size + 1 tokens as inputs and targets."""
    source = tokens if isinstance(tokens, Shards) else np.asarray(tokens)

    def fill(start: int, x: np.ndarray, y: np.ndarray) -> None:
        window = source[start : start + block_size + 1]
        x[:], y[:] = window[:-1], window[1:]

    return _batch(2, starts.tolist(), block_size, device, fill)


def _batch(
    n: int, rows: list[int], width: int, device: str | torch.device, fill: Callable[..., None]
) -> tuple[torch.Tensor, ...]:
    """n tensors int64 [rows, width] on the device; fill(row, *arrays) writes a row of each."""
    device = torch.device(device)
    pinned, shape = device.type == "cuda", (n, len(rows), width)
    batch = torch.empty(shape, dtype=torch.int64, pin_memory=pinned, device="cpu")
    for i, row in enumerate(rows):
        fill(row, *batch[:, i].numpy())
    return tuple(batch.to(device, non_blocking=True))


def _epoch_keys(seed: int, epoch: np.ndarray) -> np.ndarray:
    """Random words for each sample's epoch, uint64 [2 * rounds + 1, n_samples], by splitmix64."""
    n_words = 2 * _FEISTEL_ROUNDS + 1
    base = np.array([_mix64(np.array([seed & _MASK64], np.uint64))[0]])
    counter = epoch.astype(np.uint64) * np.uint64(n_words)
    counter = counter + np.arange(1, n_words + 1, dtype=np.uint64)[:, None]
    return _mix64(base + counter * np.uint64(_GOLDEN))


def _mix64(x: np.ndarray) -> np.ndarray:
    """splitmix64's finalizer, a bijection on 64 bits (Steele, Lea, Flood 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _permute(position: np.ndarray, n: int, keys: np.ndarray) -> np.ndarray:
    """A bijection on [0, n), chosen by the keys; see [Note: sample order]."""
    width = (n - 1).bit_length()
    low = np.uint64(width - width // 2)
    mask_high, mask_low = np.uint64((1 << width // 2) - 1), np.uint64((1 << int(low)) - 1)
    window = position
    again = np.ones(len(position), dtype=bool)
    while again.any():
        high, rest = window >> low, window & mask_low
        for r in range(0, len(keys), 4):
            high = high ^ (_hash(rest, keys[r], keys[r + 1]) & mask_high)
            rest = rest ^ (_hash(high, keys[r + 2], keys[r + 3]) & mask_low)
        window = np.where(again, (high << low) | rest, window)
        again = window >= np.uint64(n)
    return window


def _hash(x: np.ndarray, key: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """The bits from 32 up of a keyed product, which depend on every bit of a small x."""
    return ((x ^ key) * (factor | np.uint64(1))) >> np.uint64(32)


def _load_tokens(
    source: TokenSource, tokenizer: str, val_fraction: float, cache: Path, progress: bool
) -> TextData:
    name = source.tokenizer if tokenizer == "auto" else tokenizer
    if name != "ids":
        check_name(name)
    if learns_from_text(name):
        raise ValueError(
            f"load_data: expected the tokenizer that wrote {source.name}, got "
            f"tokenizer={tokenizer}, which learns from text; name gpt2, bytes or a folder"
        )
    max_id, where = _max_id(source, cache, progress)
    chosen = IdTokenizer(max_id + 1) if name == "ids" else make_tokenizer(name)
    if chosen.vocab_size > 1 << 8 * source.train.dtype.itemsize:
        raise ValueError(
            f"load_data: expected a tokenizer of at most 65536 tokens for 16-bit ids, got "
            f"tokenizer={chosen.name} with {chosen.vocab_size}; set --token-bits, or name the one "
            f"that wrote {source.name}"
        )
    if max_id >= chosen.vocab_size:
        raise ValueError(
            f"load_data: expected token ids below {chosen.vocab_size}, the vocabulary of tokenizer "
            f"{chosen.name}, got id={max_id} in {where}; name the tokenizer that wrote the file"
        )
    train, val = source.train, source.val
    if val is None:
        n, cut = len(train), int(len(train) * (1.0 - val_fraction))
        if isinstance(train, Shards):
            train, val = train.part(0, cut), train.part(cut, n)
        else:
            train, val = train[:cut], train[cut:]
    return TextData(source.name, train, val, chosen, chosen.vocab_size)


def _max_id(source: TokenSource, cache: Path, progress: bool) -> tuple[int, str]:
    """(largest id of all files, the part that has it); cached while the files are unchanged."""
    stats: list[Any] = [source.train.dtype.str]
    stats += [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in source.files]
    memo = cache / f"max-id-{digest_of(stats)}.json"
    try:
        memo_of = json.loads(memo.read_text(encoding="utf-8"))
        return int(memo_of["id"]), str(memo_of["part"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    best = (-1, "")
    sources = {"training": source.train, "validation": source.val}
    parts = {part: tokens for part, tokens in sources.items() if tokens is not None}
    total = sum(map(len, parts.values()))
    what = f"checking ids of {source.name}"
    with progress_bar(total, "token", what, progress) as bar:
        for part, tokens in parts.items():
            for start in range(0, len(tokens), _SCAN):
                block = tokens[start : start + _SCAN]
                best = max(best, (int(block.max()), f"the {part} files of {source.name}"))
                bar.update(len(block))
    write_text(memo, json.dumps({"id": best[0], "part": best[1]}))
    return best
