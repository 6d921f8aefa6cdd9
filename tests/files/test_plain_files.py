"""Opening and parsing what others may have put into a folder: refused at once, never awaited."""

import os
import socket

import pytest

from fastpar.files.plain_files import (
    is_plain_name,
    open_plain,
    parse_object,
    read_object,
    read_plain,
    reason,
    shown,
)


@pytest.mark.parametrize("name", ["model.safetensors", "a", "A-b_c.1", "0", "x" * 255])
def test_plain_names(name):
    assert is_plain_name(name)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../a", "a/b", "/etc/passwd", ".hidden", "a\0", "a\n", "a b", "\u00e4", "-x"],
)
def test_names_with_more_to_them(name):
    assert not is_plain_name(name)


@pytest.mark.parametrize("name", ["x" * 256, "a\\b", None, 3, ["a"]])
def test_names_that_are_none(name):
    assert not is_plain_name(name)


def test_a_regular_file_is_read(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    assert read_plain(tmp_path / "a", 3) == b"abc"


def test_what_is_no_regular_file_is_refused_at_once(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "to_pipe").symlink_to(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        monkeypatch.chdir(tmp_path)  # the length of a socket's path is limited
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
    with pytest.raises(OSError, match="not a file name"):
        open_plain("a\0b")
    with pytest.raises(OSError, match="not a file name"):
        open_plain("\ud800")


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


def test_a_file_over_the_limit_is_not_read(tmp_path):
    (tmp_path / "a").write_bytes(b"abcd")
    with pytest.raises(OSError, match="larger than 3 bytes"):
        read_plain(tmp_path / "a", 3)


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


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"^no such file$"):
        read_object(tmp_path / "a.json")
    with pytest.raises(ValueError, match=r"^not a regular file$"):
        read_object(tmp_path)


def test_values_in_messages_are_short_and_ascii():
    assert shown("\n\u00e4") == r"'\n\xe4'"
    assert len(shown("x" * 1000)) == 80
