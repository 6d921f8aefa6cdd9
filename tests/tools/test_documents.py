"""What the guides tell to type runs, and the site of them builds."""

import pickle
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from nanogpt_cells import ARGS, write

import fastpar
from fastpar import kernels

ROOT = Path(__file__).resolve().parents[2]
GUIDES = [ROOT / "README.md", *sorted((ROOT / "fastpar").rglob("README.md"))]
# What makes a command of a guide a matter of seconds; its other words stay as they are.
SIZES = {"--batch-size": "8", "--block-size": "64", "--micro-batch-size": "2", "--model": "micro"}
TRAIN = "--max-steps 2 --num-samples 1 --max-new-tokens 4 --eval-batches 1 --threads 1"
COMMON = {"train": TRAIN, "profile": "--threads 1 --steps 2 --model micro"}


def commands(name):
    """`fastpar NAME ...` of all code blocks of the guides, each once, without a comment behind."""
    found = set()
    for guide in GUIDES:
        for block in re.findall(r"^```\w*\n(.*?)^```", guide.read_text(), re.DOTALL | re.MULTILINE):
            for line in re.findall(rf"^(?:\$ )?(fastpar {name}\b.*)$", block, re.MULTILINE):
                found.add(line.split("#")[0].strip())
    return sorted(found)


def small(line):
    words = line.replace("<name>", "name").split()
    for flag, value in SIZES.items():
        if flag in words:
            words[words.index(flag) + 1] = value
    if words[1] == "train" and not {"--model", "--init-from", "--resume"} & set(words):
        words += ["--model", "micro"]
    return " ".join([*words, COMMON.get(words[1], "")])


def run(line, folder):
    return subprocess.run(
        [sys.executable, "-m", "fastpar", *shlex.split(line)[1:]], cwd=folder,
        capture_output=True, text=True, timeout=280, stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the commands are typed: with a run, a text, settings, and nanoGPT's files."""
    here = tmp_path_factory.mktemp("guides")
    (here / "my.toml").write_text("max-steps = 500\n")
    (here / "my_texts").mkdir()
    (here / "my_texts" / "a.txt").write_text("In the beginning was the word.\n\n" * 4000)
    (here / "nanogpt" / "out").mkdir(parents=True)
    write(here / "nanogpt" / "out" / "ckpt.pt", args={**ARGS, "vocab_size": 4096})
    data = here / "nanogpt" / "data" / "shakespeare_char"
    data.mkdir(parents=True)
    letters = [chr(65 + i) for i in range(40)]
    for name, n in (("train", 20000), ("val", 4000)):
        np.random.default_rng(0).integers(40, size=n, dtype=np.uint16).tofile(data / f"{name}.bin")
    meta = {"vocab_size": 40, "itos": dict(enumerate(letters))}
    meta["stoi"] = {letter: i for i, letter in enumerate(letters)}
    (data / "meta.pkl").write_bytes(pickle.dumps(meta))
    done = run(f"fastpar train --out runs/name --model micro {TRAIN}", here)
    assert done.returncode == 0, done.stderr
    return here


def test_the_guides_have_commands():
    assert len(commands("train")) >= 15
    assert all(commands(name) for name in ("plan", "profile", "compare", "sample"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", [line for name in ("train", "sample", "plan", "profile") for line in commands(name)]
)
def test_a_command_of_a_guide_runs(line, folder):
    if "--measure" in line:
        pytest.skip("takes minutes: tests/predict/ runs it")
    done = run(small(line), folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.slow
def test_the_site_has_every_public_name_and_a_link_that_leads_nowhere_is_an_error(tmp_path):
    pytest.importorskip("mkdocstrings", reason="pip install -e '.[docs]' (make docs)")
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", "--shared", str(ROOT), str(clone)], check=True)
    for path in ("mkdocs.yml", "pages.py"):  # as they are, not as they were committed
        (clone / ".ci" / "docs" / path).write_text((ROOT / ".ci" / "docs" / path).read_text())
    command = [sys.executable, ".ci/docs/pages.py"]
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    site = clone / "build" / "docs" / "site"
    for page, module in (("fastpar", fastpar), ("kernels", kernels)):
        text = (site / "api" / f"{page}.html").read_text()
        for name in module.__all__:
            home = f"{getattr(module, name).__module__}.{name}" if name[0] != "_" else ""
            assert f'id="{home}"' in text or not home, name
    assert "https://fonts" not in (site / "index.html").read_text()
    with (clone / "README.md").open("a") as file:
        file.write("\n[nowhere](fastpar/train/README.md#no-such-heading)\n")
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True)
    assert done.returncode != 0
    assert "no-such-heading" in done.stdout + done.stderr
