"""What README and guides tell to type runs, their links lead somewhere."""

import json
import pickle
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from nanogpt_cells import ARGS, write

import fastpar
from fastpar.settings.model import GPTConfig

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
    write(here / "nanogpt" / "out" / "ckpt.pt", args={**ARGS, "vocab_size": 50304})
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
    assert len(commands("train")) >= 12
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


# The README: its code runs, its links lead somewhere, its figures are results
README = (ROOT / "README.md").read_text()
GPUS = README.split("## GPUs")[1].split("\n## ")[0]


def code(number):
    return re.findall(r"```python\n(.*?)```", README, re.DOTALL)[number]


def test_links_lead_to_files():
    folders = [ROOT / part for part in ("kernels", "csrc", "fastpar", "bench", "tests")]
    for document in (*ROOT.glob("*.md"), *(p for part in folders for p in part.rglob("*.md"))):
        for link in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / link).exists(), (document, link)


def test_the_loop_runs_as_it_stands(tmp_path, monkeypatch):
    """But for a checkpoint every 3 steps instead of every 1000."""
    monkeypatch.chdir(tmp_path)
    tiny = GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=8, vocab_size=64)
    monkeypatch.setattr(fastpar.GPTConfig, "preset", lambda name, **more: tiny)
    tokens = torch.randint(0, 64, (2, 9))
    batch = tokens[:, :-1], tokens[:, 1:]
    names = {"loader": [batch] * 3, "batch": batch}
    exec("import fastpar\n" + code(1).replace("% 1000", "% 3"), names)
    assert Path("runs/mine/latest").exists()
    exec("model = fastpar.GPT(fastpar.GPTConfig.preset(''))\n" + code(0), names)
    assert "replaced" in str(names["report"])


def test_the_figures_of_gpus_are_results():
    """Those of the step are the ones that one run measured."""
    found = []
    for path in (ROOT / "bench/results").glob("nvidia-*.json"):
        rows = json.loads(path.read_text())["rows"]
        steps = [row["median_ms"] for row in rows if row["case"] == "124M T=1024 B=32"]
        found.append(len(steps) == 3 and all(f"{ms:.1f}" in GPUS for ms in steps))
    assert any(found)
    with_graphs = [
        f"{ms[0] if isinstance(ms, list) else ms:.1f}"
        for path in (ROOT / "bench/results/gpu").glob("*.json")
        for row in json.loads(path.read_text())["cells"]
        for name, ms in row.get("ms", {}).items()
        if name.endswith("graphs")
    ]
    assert with_graphs
    assert all(ms in GPUS for ms in with_graphs)


def test_the_times_of_the_first_screen_are_results():
    """A step of AdamW with clipping; `python -m bench report` writes the table that has them."""
    found = re.search(r"take ([\d.]+) ms on a 2-core AMD CPU;.*?take ([\d.]+) ms", README, re.S)
    cell = f"| {found[1]}; clip_grad_norm_ + torch fused + casts {found[2]} ("
    assert cell in (ROOT / "bench/results/README.md").read_text()
