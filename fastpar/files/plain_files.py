"""Safe reading of untrusted files: names, file types and JSON are checked.

A name from a manifest, an index or a user must not lead outside its folder, and may be a link, a
pipe without a writer, or a device. open_plain() opens a regular file or raises, and never waits.
JSON is UTF-8, an object, of limited size.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")
JSON_BYTES = 1 << 26  # above this a JSON file is not parsed


def is_plain_name(name: object) -> bool:
    """Whether this is a plain file name: no path, not hidden."""
    return isinstance(name, str) and _PLAIN.fullmatch(name) is not None


def open_plain(path: str | Path, *, links: bool = False) -> int:
    """Open a regular file for reading; return its descriptor.

    Args:
        path: the file.
        links: whether it may be a symbolic link, as in the caches of model hubs.
    Raises:
        OSError: missing, not readable, or not a regular file.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW)
    try:
        mode = os.stat(path, follow_symlinks=links).st_mode
        if stat.S_ISLNK(mode):
            raise OSError(None, "a symbolic link", str(path))
        if not stat.S_ISREG(mode):  # opening a device can have effects
            raise OSError(None, "not a regular file", str(path))
        return os.open(path, flags)
    except ValueError as error:  # a name with NUL or without an encoding
        raise OSError(None, f"not a file name ({error})", str(path)) from error


def read_plain(path: str | Path, limit: int, *, links: bool = False) -> bytes:
    """The content of a regular file of at most `limit` bytes.

    Raises:
        OSError: see open_plain; or the file is larger.
    """
    with open(open_plain(path, links=links), "rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(None, f"larger than {limit} bytes", str(path))
    return content


def read_into(descriptor: int, buffer: memoryview, offset: int) -> None:
    """Fill a buffer with the bytes of a file from `offset` on.

    Raises:
        OSError: the file ends before that, or cannot be read; names the byte.
    """
    while buffer:
        try:
            n = os.preadv(descriptor, [buffer], offset)
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror} at byte {offset}") from error
        if n == 0:
            raise OSError(None, f"ends at byte {offset}")
        offset, buffer = offset + n, buffer[n:]


def parse_object(content: bytes) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        ValueError: it is not one; the text states only the problem, without a file name.
    """
    try:
        value = json.loads(content.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from error
    except RecursionError:
        raise ValueError("not valid JSON: nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"not a JSON object but {type(value).__name__}")
    return value


def read_object(path: str | Path, *, links: bool = False) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ValueError: unreadable, or not an object; the text states only the problem.
    """
    try:
        content = read_plain(path, JSON_BYTES, links=links)
    except OSError as error:
        raise ValueError(reason(error)) from error
    return parse_object(content)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path; the file is moved to `path` at the end, or removed on an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file that appears complete or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def user_cache() -> Path:
    """The user's cache folder of fastpar.

    Raises:
        ValueError: the user has no home folder.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fastpar"
    except RuntimeError:
        raise ValueError(
            "user_cache: expected a home folder, got none; set HOME, or XDG_CACHE_HOME to a folder "
            "of your own"
        ) from None


def reason(error: Exception) -> str:
    """The message of an exception, without the path of an OSError."""
    if isinstance(error, OSError):
        return "no such file" if isinstance(error, FileNotFoundError) else str(error.strerror)
    return str(error)


def shown(value: object) -> str:
    """A value as text of limited length, for one-line messages."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def printable(text: str) -> str:
    """A text of lines without what commands a terminal; such characters become escapes."""
    plain = (c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
    return text if text.isprintable() else "".join(plain)
