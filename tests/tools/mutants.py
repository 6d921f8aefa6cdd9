"""Breaks the product in 60 places, one at a time, and says which tests notice.

    python tests/tools/mutants.py list
    python tests/tools/mutants.py run OUT.json [--tree DIR] [--only NUMBER,...] [--rooms TEXT]
    python tests/tools/mutants.py compare BEFORE.json AFTER.json

A mutant is one change of one line of engine, axes, optimizer, checkpoint or kernels, drawn with a
fixed seed: a comparison turned, a sum made a difference, a number one larger, a condition negated,
a call left out. It is named by its function and by the line's text, so that it is found in another
tree, too. The tests of its room run first, then the contracts; the first that fails ends the run.
A change that means the same as before cannot be noticed: what counts is that no mutant that was
noticed before lives on.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOMS = {  # folder of the product -> how many mutants, tests that run
    "fastpar/engine": (16, ("engine", "contracts")),
    "fastpar/axes": (14, ("axes", "contracts", "predict")),
    "fastpar/optim": (10, ("optim", "contracts")),
    "fastpar/checkpoint": (8, ("checkpoint", "contracts")),
    "kernels": (12, ("ops", "nn", "contracts")),
}
SWAPS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*",
    ast.And: "or", ast.Or: "and", ast.Is: "is not", ast.IsNot: "is",
}  # fmt: skip
SIGNS = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//",
    ast.And: "and", ast.Or: "or", ast.Is: "is", ast.IsNot: "is not",
}  # fmt: skip
# Not of a promise: what is printed, typed or refused in other words; Triton's own functions.
LEFT_OUT = ("__repr__", "describe", "text", "note", "facts", "verdict", "complexity")
LIMIT_S = 1500


def sites(path: Path) -> Iterator[tuple[str, str, str, str]]:
    """(function, line, what stands there, what comes instead) of every change in a file."""
    source = path.read_text()
    lines = source.splitlines()

    def between(left: ast.expr, right: ast.expr) -> tuple[int, int, int] | None:
        if left.end_lineno != right.lineno or left.end_col_offset is None:
            return None
        return right.lineno, left.end_col_offset, right.col_offset

    def visit(node: ast.AST, name: str) -> Iterator[tuple[str, int, int, int, str]]:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            if node.name in LEFT_OUT or any("jit" in ast.unparse(d) for d in node.decorator_list):
                return
            name = f"{name}.{node.name}".strip(".")
        if isinstance(node, (ast.Raise, ast.Assert, ast.AnnAssign, ast.JoinedStr)):
            return
        if "." in name or (name and name[0].islower()):
            if isinstance(node, ast.Compare) and len(node.ops) == 1:
                yield from change(name, between(node.left, node.comparators[0]), node.ops[0])
            elif isinstance(node, ast.BinOp):
                yield from change(name, between(node.left, node.right), node.op)
            elif isinstance(node, ast.BoolOp):
                yield from change(name, between(*node.values[:2]), node.op)
            elif isinstance(node, ast.If) and node.test.lineno == node.test.end_lineno:
                t = node.test
                text = lines[t.lineno - 1][t.col_offset : t.end_col_offset]
                yield name, t.lineno, t.col_offset, t.end_col_offset or 0, f"not ({text})"
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                if node.lineno == node.end_lineno and "." in ast.unparse(node.value.func):
                    yield name, node.lineno, node.col_offset, node.end_col_offset or 0, "pass"
            elif isinstance(node, ast.Constant) and type(node.value) is int and node.value < 5:
                n = str(node.value + 1)
                yield name, node.lineno, node.col_offset, node.end_col_offset or 0, n
        for child in ast.iter_child_nodes(node):
            yield from visit(child, name)

    def change(
        name: str, where: tuple[int, int, int] | None, sign: ast.AST
    ) -> Iterator[tuple[str, int, int, int, str]]:
        if where and type(sign) in SWAPS:
            line, start, end = where
            text = lines[line - 1][start:end]
            if text.strip() == SIGNS[type(sign)]:
                swap = text.replace(text.strip(), SWAPS[type(sign)])
                yield name, line, start, end, swap

    for name, number, start, end, instead in visit(ast.parse(source), ""):
        line = lines[number - 1]
        if lines.count(line) == 1 and line.isascii():
            yield name, line, line, line[:start] + instead + line[end:]


def drawn(root: Path) -> list[dict[str, str]]:
    """The mutants, of the tree in which they are drawn."""
    chosen = []
    for room, (count, _) in ROOMS.items():
        files = [p for p in sorted((root / room).rglob("*.py")) if "/." not in str(p)]
        draw = random.Random(room)
        pool = [(p, site) for p in files for site in sites(p)]
        for path, (name, _, line, instead) in draw.sample(pool, count):
            where = {"room": room, "file": str(path.relative_to(root)), "function": name}
            chosen.append({**where, "line": line, "instead": instead})
    return chosen


def place_of(root: Path, mutant: dict[str, str]) -> Path:
    """The file of this tree that has the mutant's line, in its function."""
    first = root / mutant["file"]
    others = sorted((root / mutant["room"]).rglob("*.py"))
    for path in [first, *others]:
        text = path.read_text() if path.exists() else ""
        here = mutant["function"].rpartition(".")[2] in text
        if here and text.splitlines().count(mutant["line"]) == 1:
            return path
    raise LookupError(f"no file has this line once: {mutant['line'].strip()}")


def judge(root: Path, mutant: dict[str, str], rooms: str, python: str) -> dict[str, object]:
    """Runs the tests with the mutant in its place; what they said."""
    path = place_of(root, mutant)
    source = path.read_text()
    lines = [mutant["instead"] if x == mutant["line"] else x for x in source.splitlines()]
    tests = rooms.split() or ROOMS[mutant["room"]][1]
    command = [python, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", "-rN"]
    command += ["--tb=line", "--durations=0", "--durations-min=1e9"]
    start = time.time()
    try:
        path.write_text("\n".join(lines) + "\n")
        with subprocess.Popen(
            [*command, *(f"tests/{room}" for room in tests if (root / "tests" / room).exists())],
            cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        ) as run:  # fmt: skip
            try:
                text, _ = run.communicate(timeout=LIMIT_S)
                status = "lives" if run.returncode == 0 else "killed"
            except subprocess.TimeoutExpired:
                os.killpg(run.pid, signal.SIGKILL)
                text, status = "", "killed: it hangs"
    finally:
        path.write_text(source)
    said = [line for line in text.splitlines() if "Error" in line or ".py:" in line]
    seconds = round(time.time() - start)
    return {**mutant, "status": status, "by": (said or [""])[0][:160], "seconds": seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("mode", choices=("list", "run", "compare"))
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--tree", type=Path, default=Path(__file__).resolve().parents[2])
    parser.add_argument("--mutants", type=Path, help="a list made before, by `list FILE`")
    parser.add_argument("--only", default="", help="numbers, as 3,7,20-29")
    parser.add_argument("--rooms", default="", help="test these rooms alone")
    parser.add_argument("--python", default=sys.executable)
    args = parser.parse_args()
    if args.mode == "compare":
        before, after = (json.loads(path.read_text()) for path in args.files)
        lost = [n for n, x in before.items() if x["status"] != "lives" == after[n]["status"]]
        for name, found in (("before", before), ("after", after)):
            print(
                name, sum(x["status"] != "lives" for x in found.values()), "killed of", len(found)
            )
        for n in lost:
            print(f"lives on now: {n} {after[n]['file']}: {after[n]['instead'].strip()}")
        return int(bool(lost))
    chosen = json.loads(args.mutants.read_text()) if args.mutants else drawn(args.tree)
    if args.mode == "list":
        for i, m in enumerate(chosen):
            print(
                f"{i:2} {m['file']} {m['function']}: {m['line'].strip()} -> {m['instead'].strip()}"
            )
        for path in args.files:
            path.write_text(json.dumps(chosen, indent=1) + "\n")
        return 0
    ranges = [part.partition("-") for part in args.only.split(",") if part]
    numbers = {n for a, _, b in ranges for n in range(int(a), int(b or a) + 1)}
    (out,) = args.files
    found = json.loads(out.read_text()) if out.exists() else {}
    for i, mutant in enumerate(chosen):
        if (numbers and i not in numbers) or str(i) in found:
            continue
        found[str(i)] = row = judge(args.tree, mutant, args.rooms, args.python)
        print(i, row["status"], row["seconds"], "s", row["by"], flush=True)
        out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
