"""The token cache: split, content, reuse, damage, and two processes at once."""

import errno
import fcntl
import mmap
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpar.data import sources
from fastpar.data.sources import TextSource, cache_folder, open_source, tokenized
from fastpar.data.tokenizer import CharTokenizer

DOCUMENTS = [f"document {i} says h\u00e9llo {i * 'again '}\n" for i in range(100)]


def source_of(texts, **options):
    documents = [text.encode() for text in texts]
    return TextSource("texts", lambda: documents, **options)


def tokens_of(source, tokenizer="bytes", val_fraction=0.05, *, cache, progress=False):
    return tokenized(source, tokenizer, val_fraction, cache=Path(cache), progress=progress)


def n_entries(cache):
    return sum(path.is_dir() for path in Path(cache).iterdir())


def entry_of(cache):
    (entry,) = (path for path in Path(cache).iterdir() if path.is_dir())
    return entry


def same(a, b):
    return np.array_equal(a.train, b.train) and np.array_equal(a.val, b.val)


@given(
    sizes=st.lists(st.integers(1, 30), max_size=80),
    fraction=st.floats(0.01, 0.9),
    multibyte=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_split_keeps_every_byte_once_and_holds_out_the_fraction(sizes, fraction, multibyte):
    texts = [("\u00e9" if multibyte else "a") * size for size in sizes]
    source = source_of(texts)
    n_bytes = [len(text.encode()) for text in texts]
    parts = list(sources.Corpus(source, fraction).split())
    assert b"".join(bytes(d) for _, d in parts) == "".join(texts).encode()
    total = sum(n_bytes)
    held_out = sum(len(d) for part, d in parts if part == "val")
    order = [part for part, _ in parts]
    the_end = order == sorted(order) and 0 <= held_out - fraction * total < 2 + 1e-9
    whole = len(parts) == len(texts) and 0.5 <= held_out / (fraction * total or 1) <= 1.5
    assert the_end or whole
    for _, document in parts:
        bytes(document).decode()  # never cut inside a character


def test_whole_documents_are_held_out_where_there_are_many(tmp_path):
    data = tokens_of(source_of(DOCUMENTS), cache=tmp_path)
    train, val = (bytes(part.astype(np.uint8)).decode() for part in (data.train, data.val))
    held_out = [i for i, text in enumerate(DOCUMENTS) if text in val]
    assert 3 <= len(held_out) <= 8
    assert val == "\n".join(DOCUMENTS[i] for i in held_out)
    assert train == "\n".join(text for i, text in enumerate(DOCUMENTS) if i not in held_out)
    assert data.val_bytes == sum(len(DOCUMENTS[i].encode()) for i in held_out)
    assert held_out[-1] > 80  # spread over the text


def test_nanogpts_characters_and_split(tmp_path):
    text = "".join(DOCUMENTS)
    text = text.replace("\u00e9", "e")
    data = tokens_of(source_of([text]), "chars", 0.1, cache=tmp_path)
    chars = sorted(set(text))
    n_train = int(len(text) * 0.9)
    assert data.train.tolist() == [chars.index(c) for c in text[:n_train]]
    assert data.val.tolist() == [chars.index(c) for c in text[n_train:]]
    assert data.tokenizer.vocab_size == len(chars)


@pytest.mark.parametrize("tokenizer", [pytest.param("gpt2", marks=pytest.mark.slow), "bpe-300"])
def test_documents_are_joined_by_the_end_of_text(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_BATCH_BYTES", 500)
    data = tokens_of(source_of(DOCUMENTS), tokenizer, cache=tmp_path)
    n_texts = []
    for part in (data.train, data.val):
        texts = data.tokenizer.decode(part).split("<|endoftext|>")
        assert set(texts) <= set(DOCUMENTS)
        n_texts.append(len(texts))
    assert sum(n_texts) == len(DOCUMENTS)
    assert data.train.dtype == np.uint16
    one = tokens_of(source_of(["".join(DOCUMENTS) * 5]), tokenizer, cache=tmp_path)
    assert len(one.train) > len(data.train)
    assert data.tokenizer.eot not in one.train


def test_who_learns_from_what(tmp_path, monkeypatch):
    """BPE nothing from what is held out, and from a bounded part; characters of all parts count."""
    texts = ["abab " * 20 for _ in range(100)]
    source = source_of(texts, val_documents=lambda: [b"zqzq " * 2000])
    data = tokens_of(source, "bpe-300", cache=tmp_path)
    assert len(data.tokenizer.encode("zqzqzqzq")) == 8
    assert len(data.tokenizer.encode("abab")) < 3
    assert data.tokenizer.decode(data.val) == "zqzq " * 2000
    source = source_of(["abc"], val_documents=lambda: [b"xyz"])
    data = tokens_of(source, "chars", cache=tmp_path)
    assert data.tokenizer.decode(data.val) == "xyz"
    monkeypatch.setattr(sources, "_BPE_TRAIN_BYTES", 1000)
    long, late = "abab " * 20_000, "zqzq " * 3000
    for texts in ([long, late], [long + late + "."]):
        data = tokens_of(source_of(texts), "bpe-300", cache=tmp_path)
        assert len(data.tokenizer.encode("abab")) < 3
        assert len(data.tokenizer.encode("zqzq")) == 4


def test_large_vocabularies_take_32_bits(tmp_path, monkeypatch):
    class Wide:
        name, vocab_size, eot = "wide", 70_000, 69_999

        def encode_batch(self, texts):
            return [[65_536 + len(text)] for text in texts]

        def save(self, folder):
            (folder / "tokenizer_config.json").write_text('{"fastpar_tokenizer": "bytes"}')

    monkeypatch.setattr(sources, "make_tokenizer", lambda *names: Wide())
    data = tokens_of(source_of(["abc", "de"] * 50), cache=tmp_path)
    assert data.train.dtype == np.uint32
    assert data.train[:3].tolist() == [65_539, 69_999, 65_539]


def test_second_use_reads_the_cache(tmp_path, monkeypatch):
    first = tokens_of(source_of(DOCUMENTS), "bpe-300", cache=tmp_path)
    monkeypatch.setattr(sources, "_tokenize", lambda *words: pytest.fail("tokenized again"))
    again = tokens_of(source_of(DOCUMENTS), "bpe-300", cache=tmp_path)
    assert same(first, again)
    assert isinstance(again.train, np.memmap)
    assert not again.train.flags.writeable
    assert (again.tokenizer.name, again.val_bytes) == ("bpe-300", first.val_bytes)


def test_anything_that_matters_makes_another_entry(tmp_path):
    moved = [*DOCUMENTS[:-2], DOCUMENTS[-2] + DOCUMENTS[-1][:3], DOCUMENTS[-1][3:]]
    for texts, tokenizer, fraction in [
        (DOCUMENTS, "bytes", 0.05),
        (DOCUMENTS, "bytes", 0.1),
        (DOCUMENTS, "chars", 0.05),
        (DOCUMENTS[:-1], "bytes", 0.05),
        (moved, "bytes", 0.05),  # the same bytes, cut elsewhere
        (["x" + DOCUMENTS[0][1:], *DOCUMENTS[1:]], "bytes", 0.05),  # the same sizes
    ]:
        tokens_of(source_of(texts), tokenizer, fraction, cache=tmp_path)
    assert n_entries(tmp_path) == 6
    for key in ("one", "two", "one"):
        tokens_of(source_of(DOCUMENTS, content_key=key), cache=tmp_path)
    assert n_entries(tmp_path) == 8
    for chars, ids in (("abc", [2, 1]), ("bc", [1, 0])):  # a folder with another tokenizer
        CharTokenizer(chars).save(tmp_path / "saved")
        data = tokens_of(source_of(["cb"]), str(tmp_path / "saved"), cache=tmp_path)
        assert data.train.tolist() + data.val.tolist() == ids


@pytest.mark.parametrize("file", ["train.bin", "val.bin", "tokenizer.json", "meta.json"])
def test_damage_is_found_and_mended(file, tmp_path, capsys):
    first = tokens_of(source_of(DOCUMENTS), "bpe-300", cache=tmp_path)
    expected = {path.name: path.read_bytes() for path in entry_of(tmp_path).iterdir()}
    flipped = bytearray(expected[file])
    flipped[flipped.index(b"}") if file == "meta.json" else len(flipped) // 2] ^= 1
    for content in (flipped, expected[file][:-3], b"", None):
        path = entry_of(tmp_path) / file
        path.unlink()  # `first` still maps the old file
        if content is not None:
            path.write_bytes(content)
        again = tokens_of(source_of(DOCUMENTS), "bpe-300", cache=tmp_path, progress=True)
        assert same(first, again)
        assert {path.name: path.read_bytes() for path in entry_of(tmp_path).iterdir()} == expected
        assert "is damaged" in capsys.readouterr().err
    meta = entry_of(tmp_path) / "meta.json"
    meta.write_text('{"val_bytes": 1, "dtype": "<u2", "checksums": {}}')
    assert sources._why_damaged(entry_of(tmp_path)) is not None
    meta.write_text('{"val_bytes": 1, "dtype": "<f8", "checksums": {}}')
    assert sources._why_damaged(entry_of(tmp_path)) == "meta.json"


def test_checksum_of_a_long_file_reads_blocks_of_all_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_CHECKSUM_BLOCK_BYTES", 10)
    monkeypatch.setattr(sources, "_CHECKSUM_BLOCKS", 4)
    file = tmp_path / "long"
    file.write_bytes(bytes(100))
    whole = sources._checksum(file)
    for position, differs in ((0, True), (9, True), (15, False), (79, True)):
        content = bytearray(100)
        content[position] = 1
        file.write_bytes(content)
        assert (sources._checksum(file) != whole) == differs
    file.write_bytes(bytes(99))
    assert sources._checksum(file) != whole


def test_two_processes_at_first_use_tokenize_once(tmp_path):
    code = (
        "import sys; from pathlib import Path\n"
        "from fastpar.data.sources import TextSource\n"
        "from fastpar.data.sources import tokenized\n"
        "texts = [b'some words %d\\n' % i * 200 for i in range(300)]\n"
        "source = TextSource('t', lambda: texts)\n"
        "data = tokenized(source, 'bpe-300', 0.05, cache=Path(sys.argv[1]), progress=True)\n"
        "print(len(data.train), int(data.train.sum()), data.val.sum())"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    processes = [
        subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0] != ""
    assert sum("making tokenizer" in errors for _, errors in outputs) == 1
    assert len(list(tmp_path.iterdir())) == 2  # the entry and its lock


def test_without_locks_the_first_rename_wins(tmp_path, monkeypatch):
    tokenize = sources._tokenize

    def overtaken(corpus, tokenizer, folder, progress):
        tokenize(corpus, tokenizer, folder, progress)
        key = folder.name.split("-")[1]
        shutil.copytree(folder, tmp_path / f"texts-bytes-{key}")
        (tmp_path / f"texts-bytes-{key}" / "by-the-other").touch()

    def no_locks(*arguments):
        raise OSError("no locks here")

    monkeypatch.setattr(sources, "_tokenize", overtaken)
    monkeypatch.setattr(fcntl, "flock", no_locks)
    data = tokens_of(source_of(DOCUMENTS), cache=tmp_path)
    assert len(data.train) > 0
    assert (entry_of(tmp_path) / "by-the-other").exists()


def test_who_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    """A killed writer, a broken tokenizer, a full disk."""
    killed = cache_folder(tmp_path / "killed")
    tokens_of(source_of(DOCUMENTS), cache=killed)
    entry = entry_of(killed)
    left = entry.with_name(f".tmp-{entry.name.rpartition('-')[2]}-abc")
    os.rename(entry, left)  # complete but for the rename
    (left / "train.bin").unlink()
    tokens_of(source_of(DOCUMENTS), cache=killed)
    assert entry_of(killed) == entry

    library = pytest.importorskip("tokenizers")
    broken = library.Tokenizer(library.models.WordLevel({"a": 0}, unk_token="a"))
    (tmp_path / "saved").mkdir()
    broken.save(str(tmp_path / "saved" / "tokenizer.json"))
    (tmp_path / "saved" / "tokenizer_config.json").write_text("{")
    cache = cache_folder(tmp_path / "cache")
    with pytest.raises(ValueError, match="expected an intact tokenizer"):
        tokens_of(source_of(DOCUMENTS), str(tmp_path / "saved"), cache=cache)
    for code, kind, words in (
        (errno.ENOSPC, RuntimeError, r"room for the tokens of texts, got .* with no luck; fre"),
        (errno.EIO, OSError, "no luck"),
    ):

        def fail(*arguments, code=code):
            raise OSError(code, "no luck")

        monkeypatch.setattr(sources, "_write_tokens", fail)
        with pytest.raises(kind, match=words):
            tokens_of(source_of(DOCUMENTS), cache=cache)
    assert n_entries(cache) == 0


def test_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder(None) == tmp_path / "xdg" / "fastpar"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder(None) == tmp_path / "home" / ".cache" / "fastpar"
    assert cache_folder("~/here") == tmp_path / "home" / "here"
    (tmp_path / "file").touch()
    for bad in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=r"can be written, got cache_dir=.*file.* with .*; ch"):
            cache_folder(bad)


def test_progress_goes_to_stderr_or_nowhere(tmp_path, capsys, monkeypatch):
    tokens_of(source_of(DOCUMENTS), "chars", cache=tmp_path, progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "making tokenizer chars from texts" in shown.err
    assert "tokenizing texts with chars: 100%" in shown.err
    tokens_of(source_of(DOCUMENTS), "bytes", cache=tmp_path)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    tokens_of(source_of(DOCUMENTS), "bytes", 0.1, cache=tmp_path)
    assert capsys.readouterr() == ("", "")
    with pytest.raises(ImportError, match=r"tqdm for progress=True.* pip install tqdm, or"):
        tokens_of(source_of(DOCUMENTS), "bytes", 0.2, cache=tmp_path, progress=True)


def test_a_file_system_that_maps_no_files(tmp_path, monkeypatch):
    """As some of FUSE and 9p: files are read instead."""
    (tmp_path / "c").mkdir()
    first = tokens_of(source_of(DOCUMENTS), cache=tmp_path / "c")
    (tmp_path / "a.txt").write_text("one<|endoftext|>two")
    np.arange(100, dtype="<u2").tofile(tmp_path / "train.bin")

    def refused(*arguments, **options):
        raise OSError(errno.ENODEV, "No such device")

    monkeypatch.setattr(mmap, "mmap", refused)
    assert same(first, tokens_of(source_of(DOCUMENTS), cache=tmp_path / "c"))
    documents = open_source(str(tmp_path / "a.txt")).documents()
    assert [bytes(d) for d in documents] == [b"one", b"two"]
    assert open_source(str(tmp_path / "train.bin")).train.tolist() == list(range(100))
