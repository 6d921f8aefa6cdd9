"""nanoGPT's meta.pkl: its characters, and nothing of it executed."""

import os
import pickle

import numpy as np
import pytest

from fastpar.data.batches import load_data
from fastpar.data.tokenizer import (
    check_name,
    fingerprint,
    load_tokenizer,
    make_tokenizer,
    read_chars,
)

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


class Exploit:
    """Unpickling this would make a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_nothing_in_the_file_is_executed(tmp_path):
    made = tmp_path / "made"
    command = f"touch {made}".encode()
    by_protocol = [pickle.dumps(meta_of(more=Exploit(made)), n) for n in range(6)]
    for content in (
        *by_protocol,
        b"cposix\nsystem\n(V" + command + b"\ntR.",
        b"(V" + command + b"\niposix\nsystem\n.",
        b"(cposix\nsystem\nV" + command + b"\no.",
    ):
        (tmp_path / "meta.pkl").write_bytes(content)
        with pytest.raises(ValueError, match=r"asks for 'posix.system', .*nothing in it is execut"):
            read_chars(tmp_path / "meta.pkl")
        assert not made.exists()
    pickle.loads(by_protocol[0])  # it is one
    assert made.exists()
    for name in (b"builtins\nlist", b"collections\nOrderedDict", b"numpy\nndarray"):
        (tmp_path / "meta.pkl").write_bytes(b"c" + name + b"\n)R.")
        with pytest.raises(ValueError, match="which is not made"):
            read_chars(tmp_path / "meta.pkl")


def test_files_that_are_none(tmp_path):
    path = write(tmp_path / "a", meta_of())
    whole = path.read_bytes()
    for content, problem in (
        (b"", "meta.pkl"),
        (b"never read", "meta.pkl"),
        (whole[:-3], "meta.pkl"),
        (b"r\xff\xff\xff\x7f.", "meta.pkl"),  # a place in memory that pickle would make
        (b"]r\xff\xff\xff\x7f.", "no characters by the name of itos"),
        (b"\x80\x04\x95" + b"\xff" * 8, "meta.pkl"),
        (b"Vx\nQ.", "persistent"),
        (pickle.dumps([1]), "no characters by the name of itos"),
        (pickle.dumps(meta_of(itos={})), "no characters by the name of itos"),
        (pickle.dumps(meta_of(itos={1: "a"})), "no single character for id 0 but None"),
        (pickle.dumps(meta_of(itos={0: "ab"})), "no single character for id 0 but 'ab'"),
        (pickle.dumps(meta_of("aa")), "a character that has two ids"),
        (pickle.dumps(meta_of(vocab_size=3)), "a vocab_size or stoi that does not go with itos"),
        (pickle.dumps(meta_of(stoi={"a": 7})), "a vocab_size or stoi that does not go with itos"),
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


def test_nanogpts_data_is_characters(tmp_path):
    folder = tmp_path / "char"
    write(folder, meta_of())
    ids = np.arange(70, dtype="<u2") % len(CHARS)
    ids.tofile(folder / "train.bin")
    ids[:14].tofile(folder / "val.bin")
    for source in (folder, folder / "train.bin"):
        data = load_data(str(source), cache_dir=tmp_path / "cache", progress=False)
        assert data.tokenizer.decode(data.train[:7]) == CHARS
        assert (data.tokenizer.name, data.vocab_size) == ("chars", len(CHARS))
        assert data.notes == (f"char: {len(CHARS)} characters, by its meta.pkl",)
    write(folder, meta_of("abc"))
    with pytest.raises(
        ValueError, match=r"expected token ids below 3, .* tokenizer chars, got id=6"
    ):
        load_data(str(folder), cache_dir=tmp_path / "cache", progress=False)
