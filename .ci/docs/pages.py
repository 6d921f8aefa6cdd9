"""Write the pages of `make docs` to build/docs/pages and build a site of them.

Each tracked .md file is a page under its own path, so links between files are links between pages.
A link to any other file becomes that file's name. The pages of the API list the public names; the
matrix comes from the rules of the settings.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import fastpar
from fastpar.settings import rules
from fastpar.settings.files import option

HERE, ROOT = Path(__file__).parent, Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "docs"
PAGES, PACKAGE = BUILD / "pages", BUILD / "package" / "fastpar"
EXAMPLES = Path("fastpar", "examples")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#:]+)\)")


def tracked(*patterns: str) -> list[Path]:
    """List files of the checkout, relative to it."""
    listed = subprocess.run(
        ["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [Path(line) for line in listed.stdout.splitlines() if (ROOT / line).exists()]


def copy(path: Path, pages: set[Path]) -> None:
    """Copy a page, or a picture, to its own path."""
    target = PAGES / path
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix != ".md":
        shutil.copyfile(ROOT / path, target)
        return

    def kept(match: re.Match[str]) -> str:
        other = (ROOT / path.parent / match[2]).resolve()
        there = other.is_relative_to(ROOT) and other.relative_to(ROOT) in pages
        named = Path(match[2]).name in match[1]
        return match[0] if there else match[1] if named else f"{match[1]} (`{match[2]}`)"

    target.write_text(LINK.sub(kept, (ROOT / path).read_text(encoding="utf-8")), encoding="utf-8")


def api(package: str) -> str:
    """Return a page with the docstrings of a package's public names."""
    module = importlib.import_module(package)
    values = [(n, getattr(module, n)) for n in module.__all__ if not n.startswith("__")]
    names = [f"{value.__module__}.{value.__qualname__}" for _, value in sorted(values)]
    return f"# {package}\n\n" + "".join(f"::: {name}\n\n" for name in names)


def matrix() -> str:
    """Return the page of what runs with what: each refusal links to its reason."""
    groups = {
        "Pairs that do not run": [pair.rule() for pair in rules.PAIRS],
        "Settings that need another": [needs.rule() for needs in rules.NEEDS],
        "Other rules": list(rules.RULES),
    }
    reasons: dict[str, int] = {}  # of all groups, in order, each once
    listed = []
    for title, group in groups.items():
        new = [text for text in map(reason, group) if text not in reasons]
        reasons.update((text, number) for number, text in enumerate(new, len(reasons) + 1))
        listed += [f"## {title}", *(f'<a id="r{reasons[t]}"></a>{reasons[t]}. {t}' for t in new)]

    cells: dict[frozenset[str], str] = {}
    for pair in rules.PAIRS:
        names, text = frozenset(side[0].name for side in pair.sides()), reason(pair.rule())
        whole = all(len(side) == 1 and side[0].values in ((), ("True",)) for side in pair.sides())
        if whole or names not in cells:
            shown = text.replace("`", "").replace('"', "'")
            cells[names] = f'[{"no" if whole else "some"}](#r{reasons[text]} "{shown}")'

    def table(names: Iterable[str]) -> list[str]:
        rows = ["| | " + " | ".join(option(axis)[2:] for axis in rules.AXES) + " |"]
        rows.append("|---|" + ":-:|" * len(rules.AXES))
        for name in names:
            row = [cells.get(frozenset((name, a)), "yes" * (name != a)) for a in rules.AXES]
            if name in rules.AXES or set(row) != {"yes"}:
                rows.append(f"| `{option(name)}` | " + " | ".join(row) + " |")
        return rows

    sides = [side[0].name for pair in rules.PAIRS for side in pair.sides()]
    features = dict.fromkeys(name for name in sides if name not in rules.AXES)
    head = (
        "---\nhide: [toc]\n---\n# What runs with what\n",
        "Both settings of a cell run together (yes), do not (no), or do not for some values "
        "(some). A link leads to the reason. A pair in no table runs. `fastpar train --rules` "
        "prints the same rules; keywords of `parallelize()` follow them too.\n",
        "## Kinds of parallelism and modes\n",
    )
    tables = [*table(rules.AXES), "\n## Other settings\n", *table(features), ""]
    return "\n".join((*head, *tables, *(f"{line}\n" for line in listed)))


def reason(rule: rules.Rule) -> str:
    """Return a rule as a sentence with its flags in code."""
    text = rule.says if rule.way_out == "drop one of them" else f"{rule.says}; {rule.way_out}"
    text = rules._spelled(text, "train", {})
    return re.sub(r"(?<![\w`-])--[a-z][\w-]*", r"`\g<0>`", f"{text}.")


def config(pages: set[Path]) -> str:
    """Return mkdocs.yml with the tutorials in the order of the README beside them."""
    found = [path for path in pages if path.parent == EXAMPLES / "tutorials"]
    order = (ROOT / EXAMPLES / "README.md").read_text(encoding="utf-8")
    found.sort(key=lambda path: (order.find(path.name) % (len(order) + 1), path))
    lines = "".join(f"\n      - {path}" for path in (f"Overview: {EXAMPLES}/README.md", *found))
    return (HERE / "mkdocs.yml").read_text().replace("- Tutorials:", f"- Tutorials:{lines}")


def main() -> int:
    shutil.rmtree(BUILD, ignore_errors=True)
    # As it is installed, with kernels/ in its place: mkdocstrings reads files.
    shutil.copytree(ROOT / "fastpar", PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    ignore = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "kernels", PACKAGE / "kernels", ignore=ignore)
    pages = set(tracked("*.md", "*.png"))
    for path in sorted(pages):
        copy(path, pages)
    (PAGES / "api").mkdir(parents=True)
    for package in ("fastpar", *(f"fastpar.{name}" for name in fastpar._PACKAGES)):
        (PAGES / "api" / f"{package.split('.')[-1]}.md").write_text(api(package))
    (PAGES / "matrix.md").write_text(matrix())
    shutil.copy(HERE / "site.css", PAGES)
    (BUILD / "mkdocs.yml").write_text(config(pages))
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", BUILD / "mkdocs.yml"]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # about versions that are not out yet
    done = subprocess.run(command, cwd=ROOT, env=env).returncode
    if not done:
        print("docs: build/docs/site/index.html; its search needs python -m http.server")
    return done


if __name__ == "__main__":
    sys.exit(main())
