"""fastpar/examples/tutorials: each page is typed in, made small, and prints what it shows.

A python block is a file, named in its first line; a console block is typed; a diff block changes a
file. Output that a page shows must come again, numbers apart; "..." stands for anything. Two losses
on a page are a promise that the loss falls.
"""

import itertools
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from test_examples import MODEL

import fastpar

ROOT = Path(__file__).resolve().parents[2]
PAGES = Path(fastpar.__file__).parent / "examples" / "tutorials"
FAST = ("choose_a_layout",)
MAKE_GPT2 = """
from transformers import GPT2Config, GPT2LMHeadModel
from fastpar.data.tokenizer import make_tokenizer
sizes = {"vocab_size": 50257, "n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 2}
GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained("weights")
make_tokenizer("gpt2").save("weights")
"""
NANOGPT = """
import torch
from model import GPT
torch.manual_seed(0)
scaler = torch.amp.GradScaler(enabled=False)
weight_decay, learning_rate, beta1, beta2, grad_clip, device_type = 0.1, 1e-2, 0.9, 0.95, 1.0, "cpu"
model = GPT()
optimizer = model.configure_optimizers(weight_decay, learning_rate, (beta1, beta2), device_type)
ids = torch.randint(67, (4, 17))
for iter_num in range(91):
    _, loss = model(ids[:, :-1], ids[:, 1:].contiguous())
    scaler.scale(loss).backward()
    # clip the gradient
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    if iter_num == 0:
        print(f"step {iter_num}: train loss {loss.item():.4f}, val loss {loss.item():.4f}")
    if iter_num % 10 == 0:
        print(f"iter {iter_num}: loss {loss.item():.4f}, time 10.00ms, mfu -100.00%")
assert type(optimizer).__module__ == "fastpar.optim.adamw"
"""
TINY = "--n-layer 2 --n-head 2 --n-embd 32 --block-size 32 --threads 1 --max-new-tokens 4"
# Page -> the words of it that only say how large a run is, and what a test has in their places.
SMALL = {
    "train_nanochat": [
        ("--max-steps 400", "--max-steps 20 --n-layer 1 --threads 1 --max-new-tokens 4"),
        ("--init-from exported", "--init-from exported --threads 1 --max-new-tokens 4"),
        ("fastpar: training tokenizer bpe-4096 on my_texts\n", ""),
    ],
    "train_your_text": [
        ("--max-steps 400", f"--max-steps 20 {TINY}"),
        ("fastpar: training tokenizer bpe-4096 on my_texts\n", ""),  # said if rank 0 does it
    ],
    "fine_tune_gpt2": [
        ("hf download openai-community/gpt2 --local-dir weights", "python make_weights.py"),
        ("--max-steps 60", "--max-steps 8 --threads 1 --num-samples 0"),
        ("--max-new-tokens 40", "--max-new-tokens 4"),
        ("range(1, 61)", "range(1, 13)"),
        ("step % 20 == 1 or step == 60", "step in (1, 4, 8, 12)"),
    ],
    "two_nodes": [
        ("node0:29400", "127.0.0.1:{port}"),
        ("--nproc-per-node 8", "--nproc-per-node 1"),
        ("/shared/", ""),
        ("--data my_texts --auto", f"--data my_texts --max-steps 10 --model micro {TINY} --auto"),
    ],
    "read_a_profile": [("--batch-size 2", "--batch-size 2 --steps 2 --threads 1")],
    "add_an_axis": [("--model micro --max-steps 20", f"--model micro --max-steps 4 {TINY}")],
}
FILES = {
    "train_your_text": [
        *(f"runs/manual/{name}" for name in ("loss.png", "samples.txt", "metrics.jsonl")),
        *("runs/manual/config.json", "runs/manual/latest/model.safetensors"),
    ],
    "fine_tune_gpt2": ["runs/tuned/latest/model.safetensors", "adapter/adapter_model.safetensors"],
    "two_nodes": ["runs/night/latest/model.safetensors", "slurm.sbatch"],
    "read_a_profile": [f"runs/profile/{name}" for name in ("trace.json", "timeline.png")],
}
PACKAGES = {"fine_tune_gpt2": ["peft", "transformers"], "write_an_op": ["triton"]}
COMMANDS = {
    "python": 'exec "{python}" "$@"',
    "fastpar": 'exec "{python}" -m fastpar "$@"',
    "torchrun": 'exec "{python}" -m torch.distributed.run "$@"',
    "sbatch": 'bash -n "$3" && echo Submitted batch job 1',  # --nodes 2 slurm.sbatch
}
NUMBER = r"[-+]?\d[\d,.:]*(?:e[-+]?\d+)?"
LOSS = r"loss (\d+\.\d+)(?![\de]| ms| GB)"  # not the planner's time and memory of the loss
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
names = sorted(path.stem for path in PAGES.glob("*.md"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where a page is typed in: with a text, and what the pages have from elsewhere."""
    (tmp_path / "bin").mkdir()
    for name, command in COMMANDS.items():
        path = tmp_path / "bin" / name
        path.write_text("#!/bin/bash\n" + command.format(python=sys.executable) + "\n")
        path.chmod(0o755)
    (tmp_path / "my_texts").mkdir()
    (tmp_path / "my_texts" / "a.txt").write_text("In the beginning was the word.\n" * 2000)
    (tmp_path / "make_weights.py").write_text(MAKE_GPT2)
    (tmp_path / "train.py").write_text(NANOGPT)
    (tmp_path / "model.py").write_text(MODEL)
    support = [p for p in sys.path if p.endswith("tests/support")]
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", ":".join([str(ROOT), *support]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("TRITON_INTERPRET", "MASTER_ADDR", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


def sessions(block):
    """(node, command, refused, lines shown under it) of a console block."""
    for text in re.split(r"^(?=\w*\$ )", block, flags=re.MULTILINE):
        if text:
            typed, *shown = text.replace("\\\n", "").splitlines()
            node, command = typed.split("$ ", 1)
            yield node, command, command.endswith("# refused"), shown


def pattern(shown):
    """What finds these lines in another run's output."""
    lines = []
    for line in shown:
        parts = [re.split(NUMBER, part) for part in line.split("...")]
        lines.append(".*".join(NUMBER.join(map(re.escape, part)) for part in parts))
    text = re.sub(r"(?:\\ )+", " +", "\n".join(lines))  # numbers are shorter or longer
    return re.sub(r"(?:^|\n)\.\*(?=\n|$)", "(?s:.*)", text)


def type_in(commands):
    """Start commands together; their exit status, and output together, are as the page shows."""
    kinds = {"shell": True, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = [
        subprocess.Popen(command, executable="/bin/bash", stdin=subprocess.DEVNULL, **kinds)
        for _, command, _, _ in commands
    ]
    outputs = [process.communicate(timeout=280)[0].replace("\r", "\n") for process in started]
    output = "\n".join(["", *outputs])  # of several nodes one prints, not always the first
    for process, (_, command, refused, shown) in zip(started, commands):
        assert process.returncode == (2 if refused else 0), f"{command}\n{output}"
        assert re.search(pattern(shown), output), f"{command}\n{output}\nexpected\n{shown}"
        losses = [re.findall(LOSS, text) for text in ("\n".join(shown), output)]
        if len(losses[0]) > 1:
            assert float(losses[1][-1]) < float(losses[1][0]), f"{command}\n{output}"


def change(diff):
    """Apply a diff block to train.py: hunks without line numbers, "..." between them."""
    text = Path("train.py").read_text()
    for hunk in diff.split("...\n"):
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] != "+")
        assert text.count(old) == 1, old
        text = text.replace(old, "".join(line[1:] for line in lines if line[0] != "-"))
    Path("train.py").write_text(text)


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in names]
)
def test_a_tutorial_prints_what_it_shows(name, folder):
    for package in PACKAGES.get(name, ()):
        pytest.importorskip(package, reason=f"pip install {package}")
    page = (PAGES / f"{name}.md").read_text()
    for old, new in SMALL.get(name, ()):
        assert old in page, old
        page = page.replace(old, new.replace("{port}", free_port()))
    for kind, block in BLOCK.findall(page):
        if kind == "python":
            Path(re.match(r"# (\w+\.py)\n", block)[1]).write_text(block)
        elif kind == "diff":
            change(block)
        elif kind == "console":
            for node, together in itertools.groupby(sessions(block), lambda s: bool(s[0])):
                for commands in [list(together)] if node else ([each] for each in together):
                    type_in(commands)
        else:
            assert kind == "text", kind
    for file in FILES.get(name, ()):
        assert Path(file).exists(), file


def test_each_tutorial_is_a_page_of_the_list():
    index = (PAGES.parent / "README.md").read_text()
    assert sorted(re.findall(r"\(tutorials/(\w+)\.md\)", index)) == names
