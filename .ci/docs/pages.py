"""Writes the pages of `make docs` to build/docs/pages and builds the site of them.

A page is a tracked .md file under its own path, so links between files are links between pages; a
link to a file that is none becomes its name. The pages of the API list the public names.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import fastpar
from fastpar import kernels

ROOT = Path(__file__).resolve().parents[2]
BUILD, CONFIG = ROOT / "build" / "docs", Path(__file__).with_name("mkdocs.yml")
PAGES, PACKAGE = BUILD / "pages", BUILD / "package" / "fastpar"
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#:]+)\)")


def tracked(*patterns: str) -> list[Path]:
    """Files of the checkout, by their paths in it."""
    listed = subprocess.run(
        ["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [Path(line) for line in listed.stdout.splitlines() if (ROOT / line).exists()]


def copy(path: Path, pages: set[Path]) -> None:
    """A page, or a picture, under its own path."""
    target = PAGES / path
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix != ".md":
        shutil.copyfile(ROOT / path, target)
        return

    def kept(match: re.Match[str]) -> str:
        other = (ROOT / path.parent / match[2]).resolve()
        there = other.is_relative_to(ROOT) and other.relative_to(ROOT) in pages
        return match[0] if there else f"{match[1]} (`{match[2]}`)"

    target.write_text(LINK.sub(kept, (ROOT / path).read_text(encoding="utf-8")), encoding="utf-8")


def api(title: str, names: list[str]) -> str:
    """A page that shows the docstrings of these names."""
    return f"# {title}\n\n" + "".join(f"::: {name}\n\n" for name in names)


def homes(package: str) -> list[str]:
    """Full names of a package's public names, where they are defined."""
    module = sys.modules[package]
    values = [(n, getattr(module, n)) for n in module.__all__ if not n.startswith("__")]
    return [f"{value.__module__}.{value.__qualname__}" for _, value in sorted(values)]


def main() -> int:
    shutil.rmtree(BUILD, ignore_errors=True)
    # As it is installed, with kernels/ in its place: what reads the docstrings looks at files.
    shutil.copytree(ROOT / "fastpar", PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    ignore = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "kernels", PACKAGE / "kernels", ignore=ignore)
    pages = set(tracked("*.md", "*.png"))
    for path in sorted(pages):
        copy(path, pages)
    (PAGES / "api").mkdir(parents=True)
    (PAGES / "api" / "fastpar.md").write_text(api("fastpar", homes(fastpar.__name__)))
    (PAGES / "api" / "kernels.md").write_text(api("fastpar.kernels", homes(kernels.__name__)))
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(CONFIG)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # a word about versions that are not out yet
    done = subprocess.run(command, cwd=ROOT, env=env).returncode
    if not done:
        print("docs: build/docs/site/index.html")
    return done


if __name__ == "__main__":
    sys.exit(main())
