"""One file adds an axis: settings, rules, engine, planner, checkpoint have it."""

import json
import os
import subprocess
import sys
from pathlib import Path

MAIN = "import sys, toy_axis; from fastpar.cli import main; sys.exit(main(sys.argv[1:]))"
SIZES = "--model micro --n-layer 4 --n-head 2 --n-embd 32 --block-size 32 --batch-size 4"


def run(*words, cwd, code=MAIN, status=0):
    """What a process that knows the axis prints, or says of a mistake."""
    command = [sys.executable, "-c", code, *map(str, words)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=cwd, env=env)
    assert ran.returncode == status, ran.stdout + ran.stderr
    return ran.stdout if status == 0 else ran.stderr


def test_flags_rules_and_a_run_have_it(tmp_path):
    said = run("train", "--help-all", cwd=tmp_path)
    assert "--halve-every" in said
    assert "Every so many blocks keep activations in bf16" in said
    (tmp_path / "text.txt").write_text("to be or not to be\n" * 200)
    words = f"{SIZES} --data text.txt --tokenizer bytes --device cpu --max-steps 2 --num-samples 0"
    train = ["train", *words.split(), "--halve-every", 2]
    refused = run(*train, "--compile", cwd=tmp_path, status=2)
    assert "--halve-every does not run with --compile" in refused
    assert "halve_every >= 0" in run(*train[:-1], -1, cwd=tmp_path, status=2)
    run(*train, "--out", "run", cwd=tmp_path)
    manifest = json.loads(next((tmp_path / "run").rglob("manifest.json")).read_text())
    assert manifest["axes"] == {"halved": {"every": 2}}
    assert json.loads((tmp_path / "run/config.json").read_text())["settings"]["halve_every"] == 2


ENGINE = """
import sys, toy_axis, torch, fastpar
from fastpar import Mesh, GPT, GPTConfig, Parallel, parallelize, engine_of
from fastpar.settings.model import block_parts
torch.manual_seed(1)
shape = GPTConfig(vocab_size=64, n_layer=4, n_head=2, n_embd=32, block_size=32)
def train(**settings):
    torch.manual_seed(1)
    model = parallelize(GPT(shape), Mesh(device="cpu"), Parallel.of(**settings))
    idx = torch.arange(64).view(2, 32)
    loss = model(idx, idx)
    loss.backward()
    grads = torch.cat([p.grad.flatten() for p in model.parameters()])
    return engine_of(model).describe(), loss.item(), grads
said, loss, grad = train(halve_every=2)
plain, same, exact = train()
assert "halved: one of 2 blocks keeps 16 bits" in said and "halved" not in plain
assert loss == same and not torch.equal(grad, exact)
kept = 2 * sum(len(part.keeps) for part in block_parts())  # tensors of the two blocks
# Each element is rounded once, by 2**-9 at most; roundings of tensors do not depend on each other.
assert (grad - exact).norm() <= kept**0.5 * 2**-9 * exact.norm()
"""


def test_the_engine_has_it(tmp_path):
    run(cwd=tmp_path, code=ENGINE)


def test_the_planner_has_it(tmp_path):
    words = f"plan --gpu cpu --gpus 1 {SIZES} --top 20 --json plan.json"
    said = run(*words.split(), cwd=tmp_path)
    assert "halved 2" in said
    layouts = json.loads((tmp_path / "plan.json").read_text())["layouts"]
    memory = {
        layout["halve_every"]: layout["memory_bytes"]["activations"]
        for layout in layouts
        if layout["activation_checkpointing"] == "none"
    }
    assert memory[2] < memory[0]
