"""Breaks the product in 60 places, one at a time, and says which tests notice.

    python .ci/mutants.py list [LIST.json]
    python .ci/mutants.py run OUT.json [--mutants LIST.json] [--only NUMBER,...]
    python .ci/mutants.py compare BEFORE.json AFTER.json

A mutant is one change of one line of engine, axes, optimizer, checkpoint or kernels, drawn with a
fixed seed: a comparison turned, a sum made a difference, a number one larger, a condition negated,
a call left out. It is named by its function and by the line's text, so that it is found in another
tree, too. The tests of its folder run first, then the contracts; the first that fails ends the run.
A change that means the same as before cannot be noticed: what counts is that no mutant that was
noticed before lives on.
"""

import argparse
import ast
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

FOLDERS = {  # folder of the product -> how many mutants, tests that run
    "fastpar/engine": (16, ("engine", "contracts")),
    "fastpar/axes": (14, ("axes", "contracts", "predict")),
    "fastpar/optim": (10, ("optim", "contracts")),
    "fastpar/checkpoint": (8, ("checkpoint", "contracts")),
    "kernels": (12, ("ops", "nn", "contracts")),
}
SWAPS = {
    ast.Lt: "< <=", ast.LtE: "<= <", ast.Gt: "> >=", ast.GtE: ">= >", ast.Eq: "== !=",
    ast.NotEq: "!= ==", ast.Add: "+ -", ast.Sub: "- +", ast.Mult: "* +", ast.Div: "/ *",
    ast.FloorDiv: "// *", ast.And: "and or", ast.Or: "or and", ast.Is: "is is_not",
    ast.IsNot: "is_not is",
}  # fmt: skip
# Not of a promise: what is printed, typed or refused in other words; Triton's own functions.
LEFT_OUT = ("__repr__", "describe", "text", "note", "facts", "verdict")
LIMIT_S = 1500


def sites(path):
    """(function, line, line instead) of every change in a file."""
    lines = path.read_text().splitlines()

    def swapped(left, sign, right):
        """(line number, start, end, text instead)"""
        if left.end_lineno == right.lineno and type(sign) in SWAPS:
            old, new = (word.replace("_", " ") for word in SWAPS[type(sign)].split())
            start, end = left.end_col_offset, right.col_offset
            text = lines[right.lineno - 1][start:end]
            if text.strip() == old:
                return right.lineno, start, end, text.replace(old, new)
        return None

    def change_of(node):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return swapped(node.left, node.ops[0], node.comparators[0])
        if isinstance(node, ast.BinOp):
            return swapped(node.left, node.op, node.right)
        if isinstance(node, ast.BoolOp):
            return swapped(node.values[0], node.op, node.values[1])
        instead = None
        if isinstance(node, ast.If):
            node = node.test
            instead = f"not ({ast.get_source_segment(chr(10).join(lines), node)})"
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            instead = "pass" if "." in ast.unparse(node.value.func) else None
        elif isinstance(node, ast.Constant) and type(node.value) is int and node.value < 5:
            instead = str(node.value + 1)
        if instead is None or node.lineno != node.end_lineno:
            return None
        return node.lineno, node.col_offset, node.end_col_offset, instead

    def visit(node, name):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            if node.name in LEFT_OUT or any("jit" in ast.unparse(d) for d in node.decorator_list):
                return
            name = f"{name}.{node.name}".strip(".")
        if isinstance(node, ast.Raise | ast.Assert | ast.AnnAssign | ast.JoinedStr):
            return
        if ("." in name or name[:1].islower()) and (found := change_of(node)):
            number, start, end, instead = found
            line = lines[number - 1]
            if lines.count(line) == 1 and line.isascii():
                yield name, line, line[:start] + instead + line[end:]
        for child in ast.iter_child_nodes(node):
            yield from visit(child, name)

    yield from visit(ast.parse("\n".join(lines)), "")


def drawn(root):
    """The mutants, of the tree in which they are drawn."""
    chosen = []
    for folder, (count, _) in FOLDERS.items():
        files = [p for p in sorted((root / folder).rglob("*.py")) if "/." not in str(p)]
        pool = [(p, site) for p in files for site in sites(p)]
        for path, (name, line, instead) in random.Random(folder).sample(pool, count):
            where = {"folder": folder, "file": str(path.relative_to(root)), "function": name}
            chosen.append({**where, "line": line, "instead": instead})
    return chosen


def place_of(root, mutant):
    """The file of this tree that has the mutant's line, in its function."""
    for path in [root / mutant["file"], *sorted((root / mutant["folder"]).rglob("*.py"))]:
        text = path.read_text() if path.exists() else ""
        here = mutant["function"].rpartition(".")[2] in text
        if here and text.splitlines().count(mutant["line"]) == 1:
            return path
    raise LookupError(f"no file has this line once: {mutant['line'].strip()}")


def judge(root, mutant, folders, python):
    """Runs the tests with the mutant in its place; what they said."""
    path = place_of(root, mutant)
    source, start = path.read_text(), time.time()
    lines = [mutant["instead"] if x == mutant["line"] else x for x in source.splitlines()]
    tests = [f"tests/{folder}" for folder in folders.split() or FOLDERS[mutant["folder"]][1]]
    options = "-x -q -p no:cacheprovider --no-header -rN --tb=line --durations=0"
    command = [python, "-m", "pytest", *options.split(), "--durations-min=1e9", *tests]
    text, status = "", "killed: it hangs"
    try:
        path.write_text("\n".join(lines) + "\n")
        with subprocess.Popen(
            command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        ) as run:  # fmt: skip
            try:
                text, _ = run.communicate(timeout=LIMIT_S)
                status = "lives" if run.returncode == 0 else "killed"
            except subprocess.TimeoutExpired:
                os.killpg(run.pid, signal.SIGKILL)
    finally:
        path.write_text(source)
    said = [line for line in text.splitlines() if "Error" in line or ".py:" in line]
    seconds = round(time.time() - start)
    return {**mutant, "status": status, "by": (said or [""])[0][:160], "seconds": seconds}


def compare(before, after):
    lost = [n for n, x in before.items() if x["status"] != "lives" == after[n]["status"]]
    for name, found in (("before", before), ("after", after)):
        print(name, sum(x["status"] != "lives" for x in found.values()), "killed of", len(found))
    for n in lost:
        print(f"lives on now: {n} {after[n]['file']}: {after[n]['instead'].strip()}")
    return int(bool(lost))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("mode", choices=("list", "run", "compare"))
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--tree", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument("--mutants", type=Path, help="a list made before, by `list FILE`")
    parser.add_argument("--only", default="", help="numbers, as 3,7,20-29")
    parser.add_argument("--folders", default="", help="run the tests of these folders only")
    parser.add_argument("--python", default=sys.executable)
    args = parser.parse_args()
    if args.mode == "compare":
        return compare(*(json.loads(path.read_text()) for path in args.files))
    chosen = json.loads(args.mutants.read_text()) if args.mutants else drawn(args.tree)
    if args.mode == "list":
        for i, m in enumerate(chosen):
            change = f"{m['line'].strip()} -> {m['instead'].strip()}"
            print(f"{i:2} {m['file']} {m['function']}: {change}")
        for path in args.files:
            path.write_text(json.dumps(chosen, indent=1) + "\n")
        return 0
    ranges = [part.partition("-") for part in args.only.split(",") if part]
    numbers = {n for a, _, b in ranges for n in range(int(a), int(b or a) + 1)}
    (out,) = args.files
    found = json.loads(out.read_text()) if out.exists() else {}
    for i, mutant in enumerate(chosen):
        if (not numbers or i in numbers) and str(i) not in found:
            found[str(i)] = row = judge(args.tree, mutant, args.folders, args.python)
            print(i, row["status"], row["seconds"], "s", row["by"], flush=True)
            out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
