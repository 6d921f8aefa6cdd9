"""Text to token files on disk, once: split, tokenize, check, reuse.

[Note: cache] A cache entry is one folder, named by the digest of content, tokenizer, split and
format. It is written under a temporary name and renamed when complete, so that a reader sees all of
it or nothing, and two writers that race both end with the same entry; a lock file spares the second
one the work. Checksums are compared at each opening; what does not match is built again.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import numpy as np

from fastpar.data.sources import Document, TextSource, Tokens, map_array, pieces
from fastpar.data.tokenizer import (
    Tokenizer,
    fingerprint,
    learns_from_text,
    load_tokenizer,
    make_tokenizer,
)
from fastpar.files.packages import import_package
from fastpar.files.plain_files import user_cache
from fastpar.settings.files import WRONG_PATH

_CACHE_FORMAT = 1
_BPE_TRAIN_BYTES = 128 << 20
_BATCH_BYTES = 4 << 20
_CHECKSUM_BLOCK_BYTES = 1 << 20
_CHECKSUM_BLOCKS = 256


@dataclass(frozen=True)
class TextData:
    """Tokens to train on and tokens to validate on, with the tokenizer that reads them.

    train, val: 1-D, uint16 or uint32, mapped from disk; len() and contiguous slices work.
    val_bytes: bytes of text that val stands for, None for ready-made tokens;
        val_loss * len(val) / val_bytes / ln 2 is bits per byte, comparable across tokenizers.
    notes: what the user should know, as files that were skipped.
    """

    name: str
    train: Tokens
    val: Tokens
    tokenizer: Tokenizer
    vocab_size: int
    val_bytes: int | None = None
    notes: tuple[str, ...] = ()

    def describe(self) -> str:
        """One line for the set-up a run prints."""
        text = (
            f"{self.name}: {len(self.train):,} tokens to train on, {len(self.val):,} to validate "
            f"on; tokenizer {self.tokenizer.name}, {self.vocab_size:,} tokens"
        )
        if self.val_bytes and len(self.val):
            text += f", {self.val_bytes / len(self.val):.2f} bytes per token"
        return text


def tokenized(
    source: TextSource, tokenizer: str, val_fraction: float, *, cache: Path, progress: bool
) -> TextData:
    """The source's tokens in the cache, made first where they are not there or are damaged.

    Args:
        tokenizer: see `fastpar.data.tokenizer.make_tokenizer`; one that learns from text learns
            from this one. A BPE sees only what is not held out, chars sees all.
        val_fraction: share of the text that is held out, unless the source has a part for that.
        cache: a folder that `cache_folder` returned.
    Raises:
        ValueError, RuntimeError: see `make_tokenizer`.
        RuntimeError: the disk is full.
    Ranks: any number of processes may call it at once, see [Note: cache].
    """
    corpus = Corpus(source, val_fraction)
    key = corpus.key(tokenizer)
    readable = re.sub(r"[^A-Za-z0-9.-]+", "-", f"{source.name}-{Path(tokenizer).name}")[:60]
    entry = cache / f"{readable}-{key}"
    with _locked(cache / f"{readable}-{key}.lock") as alone:
        if alone:
            for left in cache.glob(f".tmp-{key}-*"):  # of a process that was killed
                shutil.rmtree(left, ignore_errors=True)
        if entry.exists() and (reason := _why_damaged(entry)):
            say(f"cache entry {entry} is damaged ({reason}): tokenizing again", progress)
            shutil.rmtree(entry)
        if not entry.exists():
            with temporary(cache, f".tmp-{key}-") as folder:
                try:
                    _tokenize(corpus, tokenizer, folder, progress)
                except OSError as error:
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                        raise
                    raise RuntimeError(
                        f"load_data: expected room for the tokens of {source.name}, got "
                        f"cache_dir={cache} with {error.strerror}; free some or choose another one"
                    ) from error
                try:
                    os.rename(folder, entry)
                except OSError:
                    if not entry.exists():  # else another process was first: take its entry
                        raise
    meta = json.loads((entry / "meta.json").read_text(encoding="utf-8"))
    train, val = (_map_tokens(entry / f"{part}.bin", meta["dtype"]) for part in ("train", "val"))
    chosen = load_tokenizer(entry)
    size, notes = chosen.vocab_size, tuple(source.notes)
    return TextData(source.name, train, val, chosen, size, meta["val_bytes"], notes)


class Corpus:
    """The documents of a source, read once for their sizes and the digest of their content.

    Args:
        val_fraction: share of the text that is held out, unless the source has a part for that.
    """

    def __init__(self, source: TextSource, val_fraction: float) -> None:
        self.source, self.val_fraction = source, val_fraction
        self._digest = hashlib.sha256()
        self.sizes = [self._read(document) for document in source.documents()]
        val_documents = source.val_documents() if source.val_documents else ()
        self.val_sizes = [self._read(document) for document in val_documents]

    def _read(self, document: Document) -> int:
        if self.source.content_key is None:
            self._digest.update(len(document).to_bytes(8, "little"))
            self._digest.update(document)
        return len(document)

    def key(self, tokenizer: str) -> str:
        """The name of the cache entry."""
        choices = [fingerprint(tokenizer), self.val_fraction, self.source.content_key]
        return digest_of([_CACHE_FORMAT, *choices, self._digest.hexdigest()])

    def split(self) -> Iterator[tuple[str, Document]]:
        """Documents with the part each belongs to, in order.

        A document is held out when less than val_fraction of what came before is: whole documents,
        spread over the text. Where that misses the fraction by half (few documents, or one of them
        very long), the end of the text is held out instead, if need be from within a document.
        """
        source, fraction = self.source, self.val_fraction
        if source.val_documents is not None:
            yield from (("train", document) for document in source.documents())
            yield from (("val", document) for document in source.val_documents())
            return
        total, seen, held_out, parts = sum(self.sizes), 0, 0, []
        for size in self.sizes:
            parts.append("val" if held_out < fraction * seen else "train")
            held_out += size * (parts[-1] == "val")
            seen += size
        if 0.5 * fraction * total <= held_out <= 1.5 * fraction * total:
            yield from zip(parts, source.documents())
            return
        cut = int(total * (1.0 - fraction))
        for document in source.documents():
            at = min(max(cut, 0), len(document))
            while 0 < at < len(document) and document[at] & 0xC0 == 0x80:  # inside a character
                at -= 1
            if at:
                yield "train", document[:at]
            if at < len(document):
                yield "val", document[at:]
            cut -= len(document)

    def texts_to_learn(self, tokenizer: str) -> Iterator[str]:
        """All characters for chars; for a BPE what is not held out, up to _BPE_TRAIN_BYTES."""
        seen = 0
        for part, document in self.split():
            if tokenizer == "chars":
                yield from pieces(document)
            elif part == "train" and seen < _BPE_TRAIN_BYTES:
                for text in pieces(document):
                    seen += len(text)
                    yield text
                    if seen >= _BPE_TRAIN_BYTES:
                        break


def _tokenize(corpus: Corpus, tokenizer: str, folder: Path, progress: bool) -> None:
    """Writes a complete cache entry into the folder: tokens, tokenizer, checksums."""
    name, sizes = corpus.source.name, [*corpus.sizes, *corpus.val_sizes]
    texts = None
    if learns_from_text(tokenizer):
        say(f"making tokenizer {tokenizer} from {name}", progress)
        texts = chain(corpus.texts_to_learn(tokenizer), ["\n"] if len(sizes) > 1 else [])
    chosen = make_tokenizer(tokenizer, texts)
    chosen.save(folder)
    dtype = np.dtype("<u2" if chosen.vocab_size <= 1 << 16 else "<u4")
    joint = [] if chosen.eot is None else [chosen.eot]
    if chosen.eot is None and len(sizes) > 1:
        joint = chosen.encode("\n")
    val_bytes = n_batch = n_done = 0
    batch: list[tuple[str, bool, str]] = []
    with (
        (folder / "train.bin").open("wb") as train,
        (folder / "val.bin").open("wb") as val,
        progress_bar(sum(sizes), "B", f"tokenizing {name} with {chosen.name}", progress) as bar,
    ):
        files = {"train": train, "val": val}
        for part, document in corpus.split():
            val_bytes += len(document) if part == "val" else 0
            for i, text in enumerate(pieces(document)):
                batch.append((part, i == 0, text))
                n_batch += len(text.encode())
                if n_batch >= _BATCH_BYTES:
                    _write_tokens(batch, chosen, dtype, joint, files)
                    bar.update(n_batch)
                    n_done += n_batch
                    batch, n_batch = [], 0
        _write_tokens(batch, chosen, dtype, joint, files)
        bar.update(sum(sizes) - n_done)  # to the end, although pieces leave out carriage returns
    meta = {
        "source": name,
        "tokenizer": chosen.name,
        "dtype": dtype.str,
        "val_bytes": val_bytes,
        "checksums": {file.name: _checksum(file) for file in sorted(folder.iterdir())},
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")


def _write_tokens(
    batch: Sequence[tuple[str, bool, str]],
    tokenizer: Tokenizer,
    dtype: np.dtype,
    joint: list[int],
    files: Mapping[str, BinaryIO],
) -> None:
    ids_of = tokenizer.encode_batch([text for _, _, text in batch])
    for (part, is_first, _), ids in zip(batch, ids_of):
        if is_first and files[part].tell():
            files[part].write(np.array(joint, dtype=dtype).tobytes())
        files[part].write(np.array(ids, dtype=dtype).tobytes())


def _map_tokens(file: Path, dtype: str) -> np.ndarray:
    if file.stat().st_size == 0:
        return np.empty(0, dtype=dtype)
    return map_array(file, dtype)


def _why_damaged(entry: Path) -> str | None:
    try:
        meta = json.loads((entry / "meta.json").read_text(encoding="utf-8"))
        if not isinstance(meta["val_bytes"], int) or meta["dtype"] not in ("<u2", "<u4"):
            return "meta.json"
        for file in {"train.bin", "val.bin", "tokenizer_config.json", *meta["checksums"]}:
            if _checksum(entry / file) != meta["checksums"][file]:
                return file
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"


def _checksum(file: Path) -> str:
    """Digest of the size and of evenly spaced blocks: all of a file up to 256 MiB."""
    size = file.stat().st_size
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    step = max(_CHECKSUM_BLOCK_BYTES, -(-size // _CHECKSUM_BLOCKS))
    with file.open("rb") as stream:
        for start in range(0, size, step):
            stream.seek(start)
            digest.update(stream.read(_CHECKSUM_BLOCK_BYTES))
    return digest.hexdigest()


def digest_of(value: Any) -> str:
    """Name for a JSON value: 24 hexadecimal digits."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:24]


def cache_folder(cache_dir: str | Path | None) -> Path:
    """The folder of the cache, made if need be; ValueError or RuntimeError where it cannot be."""
    folder = user_cache() if cache_dir is None else Path(cache_dir).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with temporary(folder, ".tmp-try-"):
            pass
    except OSError as error:
        kind = ValueError if error.errno in WRONG_PATH else RuntimeError
        raise kind(
            f"load_data: expected a folder that can be written, got cache_dir={folder} with "
            f"{error.strerror}; choose another one or set XDG_CACHE_HOME"
        ) from error
    return folder


@contextmanager
def temporary(parent: Path, prefix: str) -> Iterator[Path]:
    """A folder that is gone afterwards, or has been renamed."""
    folder = Path(tempfile.mkdtemp(dir=parent, prefix=prefix))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(file: Path) -> Iterator[bool]:
    """Holds the lock file; False where the file system has no locks, and the rename decides."""
    with file.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX)
        except OSError:
            yield False
            return
        yield True


def say(text: str, progress: bool) -> None:
    """One line on stderr, from the process that shows progress."""
    if progress:
        print(f"fastpar: {text}", file=sys.stderr)


def progress_bar(total: int, unit: str, what: str, progress: bool) -> Any:
    """A context manager whose update(n) moves tqdm's bar on stderr, where progress is shown."""
    if not progress:
        return nullcontext(SimpleNamespace(update=lambda n: None))
    instead = ", or pass progress=False"
    tqdm = import_package("tqdm", "load_data", " for progress=True", instead).tqdm
    return tqdm(total=total, unit=unit, unit_scale=True, desc=what, file=sys.stderr)
