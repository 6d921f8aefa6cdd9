"""What the guides tell to type runs, and the site of them builds."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import fastpar
from fastpar import kernels

ROOT = Path(__file__).resolve().parents[2]
GUIDES = [ROOT / "README.md", *(ROOT / "fastpar").rglob("README.md")]
# What makes a command of a guide a matter of seconds; the words before it stay as they are.
SMALL = "--max-steps 2 --num-samples 1 --max-new-tokens 4 --eval-batches 1 --threads 1"
SIZES = {"--batch-size": "8", "--block-size": "64", "--micro-batch-size": "2", "--model": "micro"}
FOLDERS = {"my_texts/", "nanogpt/data/shakespeare_char", "nanogpt/out/ckpt.pt", "my.toml"}


def commands():
    """`fastpar ...` of all code blocks of the guides, each once, without what follows a #."""
    found = set()
    for guide in GUIDES:
        for block in re.findall(r"^```\w*\n(.*?)^```", guide.read_text(), re.DOTALL | re.MULTILINE):
            for line in re.findall(r"^(?:\$ )?(fastpar [a-z]+(?: .*)?)$", block, re.MULTILINE):
                found.add(line.split("#")[0].strip())
    return sorted(found)


def run(line, folder, timeout=280):
    words = shlex.split(line.replace("<name>", "name"))
    command = [sys.executable, "-m", "fastpar", *words[1:]]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
    )


def small(line):
    """A command with sizes that two cores train in seconds."""
    words = line.split()
    for flag, value in SIZES.items():
        if flag in words:
            words[words.index(flag) + 1] = value
    if not {"--model", "--init-from", "--resume"} & set(words):
        words += ["--model", "micro"]
    return " ".join([*words, *(() if "--resume" in words else ["--block-size", "64"]), SMALL])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the commands are typed: with a run, a text, settings, and nanoGPT's files."""
    import test_nanogpt  # noqa: F401  tells where nanoGPT's files are made

    here = tmp_path_factory.mktemp("guides")
    (here / "my.toml").write_text("max-steps = 500\n")
    (here / "my_texts").mkdir()
    (here / "my_texts" / "a.txt").write_text("In the beginning was the word. " * 4000)
    done = run(f"fastpar train --out runs/name --model micro {SMALL}", here)
    assert done.returncode == 0, done.stderr
    return here


def of(name):
    return [line for line in commands() if line.split()[1] == name]


def test_the_guides_have_commands():
    assert len(of("train")) >= 15
    assert of("plan")
    assert of("sample")
