"""Lines of code, without blanks, comments and docstrings: of files, functions and rooms."""

from __future__ import annotations

import ast
import functools
import io
import tokenize
from pathlib import Path

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


@functools.cache
def code_lines(text: str) -> frozenset[int]:
    """Numbers of the lines of Python that hold code."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):  # docstrings: of modules, classes, functions, fields
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            found -= set(range(value.lineno, (value.end_lineno or value.lineno) + 1))
    return frozenset(found)


def long_functions(text: str, most: int) -> list[tuple[str, int]]:
    """(name, lines of code) of the functions with more than most."""
    lines = code_lines(text)
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            n = len(lines & set(range(node.lineno, (node.end_lineno or node.lineno) + 1)))
            if n > most:
                found.append((node.name, n))
    return found


def lines_by_room(package: Path) -> dict[str, tuple[int, int]]:
    """Room of a package -> (files, lines of code); "" is the package's own folder."""
    rooms: dict[str, tuple[int, int]] = {}
    for path in sorted(package.rglob("*.py")):
        room = "/".join(path.relative_to(package).parts[:-1])
        files, lines = rooms.get(room, (0, 0))
        rooms[room] = files + 1, lines + len(code_lines(path.read_text()))
    return rooms
