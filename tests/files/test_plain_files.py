"""Opening and parsing what others may have put into a folder: refused at once, never awaited.
Where this user's files of every run are kept."""

import os
import pwd
import socket
import tempfile
from pathlib import Path

import pytest

from fastpar.data.sources import cache_folder
from fastpar.doctor.table import proofs_folder
from fastpar.files.plain_files import (
    is_plain_name,
    open_plain,
    parse_object,
    read_object,
    read_plain,
    reason,
    shown,
    user_cache,
)
from fastpar.predict.machine import rates_folder


def test_plain_names():
    for name in ("model.safetensors", "a", "A-b_c.1", "0", "x" * 255):
        assert is_plain_name(name), name
    for name in (
        *("", ".", "..", "../a", "a/b", "/etc/passwd", ".hidden", "a\0", "a\n", "a b", "\u00e4"),
        *("-x", "x" * 256, "a\\b", None, 3, ["a"]),
    ):
        assert not is_plain_name(name), name


def test_what_is_no_regular_file_is_refused_at_once(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "to_pipe").symlink_to(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        monkeypatch.chdir(tmp_path)  # the length of a socket's path is limited
        server.bind("socket")
    for name in ("folder", "pipe", "socket"):
        with pytest.raises(OSError, match="not a regular file"):
            open_plain(tmp_path / name)
    with pytest.raises(OSError, match="a symbolic link"):
        open_plain(tmp_path / "link")
    assert read_plain(tmp_path / "link", 9, links=True) == b"abc"
    with pytest.raises(OSError, match="not a regular file"):
        open_plain(tmp_path / "to_pipe", links=True)
    with pytest.raises(FileNotFoundError) as error:
        open_plain(tmp_path / "none")
    assert reason(error.value) == "no such file"
    for name in ("a\0b", "\ud800"):
        with pytest.raises(OSError, match="not a file name"):
            open_plain(name)


def test_a_file_put_in_place_of_the_one_looked_at(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"abc")
    os.mkfifo(tmp_path / "pipe")
    looked_at = os.stat(tmp_path / "file")
    monkeypatch.setattr("fastpar.files.plain_files.os.stat", lambda *a, **k: looked_at)
    with pytest.raises(OSError, match="not a regular file"):
        open_plain(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(OSError, match="symbolic links"):
        open_plain(tmp_path / "link")


def test_a_regular_file_is_read_up_to_its_limit(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert read_plain(tmp_path / "a", 3) == b"abc"
    with pytest.raises(OSError, match="larger than 2 bytes"):
        read_plain(tmp_path / "a", 2)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "not JSON: Expecting value"),
        (b'{"a": 1', "not JSON: Expecting ',' delimiter"),
        (b"\xff\xfe{\x00}\x00", "not UTF-8 at byte 0"),
        (b"[1]", "no JSON object but list"),
        (b"1", "no JSON object but int"),
        (b"[" * 100000, "nested too deeply"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "'c' twice"),
        (b'{"a": ' + b"9" * 5000 + b"}", "a number of 5000 digits"),
    ],
)
def test_what_is_not_an_object(content, problem, tmp_path):
    with pytest.raises(ValueError, match=problem):
        parse_object(content)
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=problem):
        read_object(tmp_path / "a.json")


def test_a_file_that_is_not_there_and_values_in_messages(tmp_path):
    with pytest.raises(ValueError, match=r"^no such file$"):
        read_object(tmp_path / "a.json")
    with pytest.raises(ValueError, match=r"^not a regular file$"):
        read_object(tmp_path)
    assert shown("\n\u00e4") == r"'\n\xe4'"
    assert len(shown("x" * 1000)) == 80


def test_a_user_without_a_home(tmp_path, monkeypatch):
    """As in a container that runs under a number: neither HOME nor an entry in passwd."""

    def nobody(uid):
        raise KeyError(uid)

    for name in ("HOME", "XDG_CACHE_HOME", "FASTPAR_PROOFS", "FASTPAR_RATES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache = tmp_path / f"fastpar-{os.getuid()}"
    assert cache_folder(None) == user_cache() == cache
    assert (proofs_folder(), rates_folder()) == (cache / "proofs", cache / "rates")
    monkeypatch.setenv("HOME", "/h")
    assert user_cache() == Path("/h/.cache/fastpar")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert user_cache() == Path("/x/fastpar")
