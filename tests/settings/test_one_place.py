"""A setting that is declared once, with its help, is there for all that reads settings."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow
LINE = "    secondary_shards: bool = False\n"
NEW = '''    parity_bits: int = 0
    """Bits of parity that each message carries."""
'''
# Imports the module with the new lines; inspect, by which tyro finds the help, sees them too.
HOOK = f"""
import linecache, sys
from importlib.machinery import SourceFileLoader

load = SourceFileLoader.get_data

def get_data(loader, path):
    if "/settings/__pycache__/parallel." in path:
        raise OSError("compiled without them")
    data = load(loader, path)
    if path.endswith("/settings/parallel.py"):
        before, line, after = data.decode().partition({LINE!r})
        lines = "".join((before, {NEW!r}, line, after)).splitlines(True)
        data = "".join(lines).encode()
        linecache.cache[path] = len(data), None, lines, path
    return data

SourceFileLoader.get_data, sys.dont_write_bytecode = get_data, True
"""


CODE = """
import contextlib, fastpar
from fastpar.cli import main
from fastpar.engine.engine import engine_of
from fastpar.predict.plan import PlanCommand, flags, make_plan

with contextlib.suppress(SystemExit):
    main(["train", "--help-all"])
words = "--model micro --n-layer 1 --n-head 1 --n-embd 16 --block-size 16 --batch-size 2"
words += " --data text.txt --tokenizer bytes --device cpu --max-steps 1 --num-samples 0"
assert main(f"train {words} --parity-bits 3 --out run".split()) == 0
assert main("train --resume --out run --max-steps 2".split()) == 0
assert main("plan --gpu cpu --gpus 1 --model micro --json plan.json".split()) == 0

assert fastpar.Parallel.of(parity_bits=3).wires == fastpar.Wires(parity_bits=3)
model = fastpar.GPT(fastpar.GPTConfig(1, 1, 16, 16, 64))
fastpar.parallelize(model, fastpar.Mesh(device="cpu"), wires=fastpar.Wires(parity_bits=3))
assert engine_of(model).settings.parallel.wires.parity_bits == 3
plan = make_plan(PlanCommand(gpus=1, gpu="cpu", model="micro"))
setup = plan.estimates[0].setup.change(parity_bits=3)
assert setup.parity_bits == 3
print(*flags(plan, setup))
"""


def test_flags_runs_records_parallelize_and_the_planner_have_it(tmp_path):
    (tmp_path / "text.txt").write_text("to be or not to be\n" * 200)
    command = [sys.executable, "-c", HOOK + CODE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert " --parity-bits 3" in done.stdout
    assert "Bits of parity that each message carries" in done.stdout
    content = json.loads((tmp_path / "run/config.json").read_text())
    assert content["settings"]["parity_bits"] == 3
    assert [start["parity_bits"] for start in content["starts"]] == [3, 3]
    layouts = json.loads((tmp_path / "plan.json").read_text())["layouts"]
    assert {layout["parity_bits"] for layout in layouts} == {0}
