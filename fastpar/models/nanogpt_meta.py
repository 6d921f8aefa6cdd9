"""nanoGPT's meta.pkl: the characters behind the ids of its train.bin, val.bin and ckpt.pt.

A pickle is a program that may name any function and call it. What nanoGPT writes needs none:
{"vocab_size": n, "itos": {0: "a", ...}, "stoi": {"a": 0, ...}} is made of numbers, texts and
dictionaries, for which a pickle has operations of its own. So the unpickler here knows no name at
all: the first one that a file asks for is refused, and named in the error. It is pickle's own in
Python, because the compiled one takes memory for any index that a file claims.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

from fastpar.files.plain_files import read_plain, reason, shown

META = "meta.pkl"
_BYTES = 1 << 24


class _WithoutNames(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {shown(f'{module}.{name}')}, which is not made")


def read_chars(path: str | Path) -> str:
    """The characters of nanoGPT's meta.pkl: id i is the i-th.

    Raises:
        ValueError: the file cannot be read, needs anything to be imported or called, or has
            something else than one character for each id.
    """
    try:
        raw = read_plain(path, _BYTES, links=True)
        return _chars(_WithoutNames(io.BytesIO(raw)).load())
    except OSError as error:
        why: Exception = error
        problem = reason(error)
    except Exception as error:  # whatever the unpickler meets in a file that is none
        why, problem = error, str(error) or type(error).__name__
    raise ValueError(
        f"read_chars: expected the characters of nanoGPT's {META}, got {path} ({problem}); nothing "
        "in it is executed"
    ) from why


def _chars(content: Any) -> str:
    itos = content.get("itos") if type(content) is dict else None
    if type(itos) is not dict or not itos:
        raise ValueError("no characters by the name of itos")
    for i in range(len(itos)):
        char = itos.get(i)
        if type(char) is not str or len(char) != 1:
            raise ValueError(f"no single character for id {i} but {shown(char)}")
    chars = "".join(itos[i] for i in range(len(itos)))
    ids = {char: i for i, char in enumerate(chars)}
    if len(ids) != len(chars):
        raise ValueError("a character that has two ids")
    if content.get("vocab_size", len(chars)) != len(chars) or content.get("stoi", ids) != ids:
        raise ValueError("a vocab_size or stoi that does not go with itos")
    return chars
