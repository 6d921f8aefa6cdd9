"""One file adds an axis: settings, rules, engine, planner, checkpoint have it."""

import json
import os
import subprocess
import sys
from pathlib import Path

SIZES = "--model micro --n-layer 4 --n-head 2 --n-embd 32 --block-size 32 --batch-size 4"
TRAIN = f"train {SIZES} --data text.txt --tokenizer bytes --device cpu --max-steps 2"
TRAIN += " --num-samples 0 --halve-every"
COMMANDS = [
    "train --help-all", f"{TRAIN} 2 --compile", f"{TRAIN} -1", f"{TRAIN} 2 --out run",
    f"plan --gpu cpu --gpus 1 {SIZES} --top 20 --json plan.json",
]  # fmt: skip
IN_A_PROCESS_THAT_KNOWS_THE_AXIS = """
import contextlib, io, json, sys, toy_axis, torch
from fastpar import Mesh, GPT, GPTConfig, Parallel, parallelize, engine_of
from fastpar.cli import main
from fastpar.settings.model import block_parts

said = []
for words in json.loads(sys.argv[1]):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            status = main(words.split())
        except SystemExit as error:
            status = error.code
    said.append([status or 0, out.getvalue()])
shape = GPTConfig(vocab_size=64, n_layer=4, n_head=2, n_embd=32, block_size=32)
def train(**settings):
    torch.manual_seed(1)
    model = parallelize(GPT(shape), Mesh(device="cpu"), Parallel.of(**settings))
    idx = torch.arange(64).view(2, 32)
    loss = model(idx, idx)
    loss.backward()
    grads = torch.cat([p.grad.flatten() for p in model.parameters()])
    return engine_of(model).describe(), loss.item(), grads
described, loss, grad = train(halve_every=2)
plain, same, exact = train()
assert "halved: one of 2 blocks keeps 16 bits" in described and "halved" not in plain
assert loss == same and not torch.equal(grad, exact)
kept = 2 * sum(len(part.keeps) for part in block_parts(shape))  # tensors of the two blocks
# Each element is rounded once, by 2**-9 at most; roundings of tensors do not depend on each other.
assert (grad - exact).norm() <= kept**0.5 * 2**-9 * exact.norm()
json.dump(said, open("said.json", "w"))
"""


def test_settings_rules_engine_planner_and_checkpoint_have_it(tmp_path):
    (tmp_path / "text.txt").write_text("to be or not to be\n" * 200)
    command = [sys.executable, "-c", IN_A_PROCESS_THAT_KNOWS_THE_AXIS, json.dumps(COMMANDS)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    how = {"capture_output": True, "text": True, "timeout": 300, "cwd": tmp_path, "env": env}
    ran = subprocess.run(command, **how)
    assert ran.returncode == 0, ran.stdout + ran.stderr

    def read(path):
        return json.loads((tmp_path / path).read_text())

    statuses, (helps, refused, too_low, _, planned) = zip(*read("said.json"), strict=True)
    assert statuses == (0, 2, 2, 0, 0), (refused, planned)
    assert "--halve-every" in helps
    assert "Every so many blocks keep activations in bf16" in helps
    assert "--halve-every does not support --compile" in refused
    assert "halve_every >= 0" in too_low
    manifest = json.loads(next((tmp_path / "run").rglob("manifest.json")).read_text())
    assert manifest["axes"] == {"halved": {"every": 2}}
    assert read("run/config.json")["settings"]["halve_every"] == 2
    assert "halved 2" in planned
    tried = {layout["halve_every"] for layout in read("plan.json")["layouts"]}
    assert tried == {0, 2}
