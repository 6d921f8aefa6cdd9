"""What a rebuild must not change: records it from one tree, compares it with another.

PYTHONPATH=tests/support:tests/contracts python tests/tools/goldens.py make FOLDER
python tests/tools/goldens.py compare FOLDER OTHER: prints what differs; status 1 if anything does.

messages: of raise and warn, by file. help: of the commands. plans: of 60 commands. collectives: in
order, of 30 layouts. keys: of state dicts and manifests. predictions: bytes and times of 200
setups. bits: losses and weights of tests/contracts/test_recorded_bits.py.
"""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import json
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def messages() -> dict[str, list[str]]:
    """The texts of raise and warn; {} stands for what is filled in."""

    def text(node: ast.AST) -> str:
        if isinstance(node, ast.Constant):
            return str(node.value)
        if isinstance(node, ast.JoinedStr):
            return "".join(text(part) for part in node.values)
        if isinstance(node, ast.BinOp):
            return text(node.left) + text(node.right)
        return "{}"

    found: dict[str, list[str]] = {}
    for path in sorted([*ROOT.glob("fastpar/**/*.py"), *ROOT.glob("kernels/**/*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            call = node.exc if isinstance(node, ast.Raise) else node
            if not isinstance(call, ast.Call):
                continue
            name = ast.unparse(call.func)
            if isinstance(node, ast.Raise) or name in ("warn", "warnings.warn"):
                words = " ".join(text(arg) for arg in call.args)
                found.setdefault(str(path.relative_to(ROOT)), []).append(f"{name}: {words}")
    return {name: sorted(set(texts)) for name, texts in found.items()}


def said(call: Callable[[], Any]) -> str:
    """What a call prints, and what it raises."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            call()
        except SystemExit as end:
            print(f"status {end.code}")
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
    return out.getvalue()


def helps() -> dict[str, str]:
    from fastpar.cli import main

    words = [["train", "--help-all"], *([name, "--help"] for name in COMMANDS)]
    return {" ".join(w): said(lambda w=w: main(w)) for w in words}  # type: ignore[misc]


COMMANDS = ("train", "plan", "compare", "profile", "sample", "doctor", "export", "verify")


def plan_commands() -> list[str]:
    """Sixty, over all axes, kinds of machines and refusals."""
    models = ("gpt2", "gpt2-medium", "gpt2-xl")
    machines = ("--gpu h100 --gpus 8", "--gpu a100 --gpus 16", "--gpu 4090 --gpus 4")
    stored = "--moment-dtype int8 --master-weights remainder"
    more = ["", "--pp 2", "--tp-grid 2x2", "--optimizer muon", stored]
    words = [f"--model {m} {g} {x}" for m, g, x in itertools.product(models, machines, more)]
    return words + OTHERS.strip().splitlines()


OTHERS = """
--gpu cpu --gpus 2 --model mini
--gpu cpu --gpus 4 --model micro --pp 2
--gpu h100 --gpus 64 --model gpt2-xl --batch-size 256
--gpu h100 --gpus 64 --n-layer 48 --n-head 64 --n-embd 8192 --batch-size 512
--gpu h200 --fp8 mlp --gpus 8 --model gpt2-xl
--gpu v100 --gpus 8
--gpu h100 --gpus 8 --n-expert 8
--gpu h100 --gpus 8 --n-expert 8 --expert-top-k 1 --pp 2
--gpu h100 --gpus 8 --block-size 8192 --batch-size 8
--gpu h100 --gpus 8 --link pcie4
--gpu h100 --gpus 32 --inter-link ethernet-100
--gpu rtx9090
--gpus 0
--gpus 7 --batch-size 5
--gpu h100 --gpus 8 --tp-grid 3x3
"""


def plans() -> dict[str, Any]:
    from fastpar.cli import main

    found: dict[str, Any] = {}
    for words in plan_commands():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "plan.json"
            printed = said(lambda: main(["plan", *words.split(), "--json", str(path)]))  # noqa: B023
            content = json.loads(path.read_text()) if path.exists() else None
        if content is not None:
            content["command"].pop("json")
        found[words] = [printed, content]
    return found


def collectives() -> dict[str, list[str]]:
    from schedule_runs import Run

    found = {}
    both, apart = ("shard", "full"), {"shard_size": 8}
    layouts: list[dict[str, Any]] = [
        *({"zero_stage": z} for z in range(4)),
        *({"zero_stage": z, **apart} for z in (1, 2, 3)),
        *({"zero_stage": z, "accumulate": k, "n_micro": 3} for z in range(4) for k in both),
        *({"zero_stage": z, "deterministic": True} for z in range(4)),
        *(
            {"zero_stage": z, **apart, "accumulate": k, "n_micro": 2}
            for z in (1, 2, 3)
            for k in both
        ),
        *({"zero_stage": z, "wire_weights": "int8"} for z in (1, 3)),
        {"zero_stage": 3, "node_size": 8, "secondary_shards": True},
        {"zero_stage": 3, "wire_weights": "bf16"},
        {"zero_stage": 3, "bucket_mb": 1.0},
    ]
    for layout in layouts:
        with Run(**layout) as run:
            run.train()
            found[str(layout)] = [f"{op}" for op in [*run.train(), "evaluate", *run.evaluate()]]
    return found


def keys_of_rank(axes: dict[str, int], more: dict[str, Any], folder: str) -> dict[str, Any]:
    import torch

    import fastpar

    mesh = fastpar.Mesh(**axes)
    shape = fastpar.GPTConfig(n_layer=2, n_head=4, n_embd=32, block_size=16, vocab_size=97)
    model = fastpar.GPT(shape, seed=0)
    fastpar.parallelize(model, mesh, fastpar.Parallel.of(**more))
    optimizer = fastpar.AdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
    idx = torch.arange(32).reshape(2, 16)
    step = getattr(fastpar, "pipeline_step", None)
    if axes.get("pp", 1) > 1 and step is not None:
        step(model, lambda i: (idx, idx), 2)
    else:
        model(idx, idx).backward()
    optimizer.step()
    saver = fastpar.Saver(folder, model=model, optimizer=optimizer)
    saver.save(1, {"note": "goldens"})
    saver.close()
    state = optimizer.state_dict()
    return {
        "model": {k: [str(v.dtype), *v.shape] for k, v in model.state_dict().items()},
        "optimizer": {str(k): sorted(v) for k, v in state["state"].items()},
        "groups": [sorted(group) for group in state["param_groups"]],
    }


def keys() -> dict[str, Any]:
    from fastpar.testing import run_ranks

    layouts = [
        (1, {}, {}),
        (2, {}, {"zero_stage": 0}),
        *((2, {}, {"zero_stage": stage}) for stage in (1, 2, 3)),
        (2, {"tp": 2}, {}),
        (4, {"tp": 2, "dp": 2}, {"zero_stage": 3}),
        (2, {}, {"zero_stage": 2, "wire_gradients": "int8", "error_buffer": True}),
        (2, {"cp": 2}, {}),
    ]

    def names(content: Any) -> Any:
        if isinstance(content, dict):
            return {k: names(v) for k, v in content.items()}
        if isinstance(content, list):
            return [names(v) for v in content[:1]]
        return type(content).__name__

    found = {}
    for n, axes, more in layouts:
        with tempfile.TemporaryDirectory() as folder:
            ranks = run_ranks(keys_of_rank, n, axes, more, folder)
            manifests = sorted(Path(folder).rglob("*.json"))
            content = {path.name: names(json.loads(path.read_text())) for path in manifests}
        found[f"{n} {axes} {more}"] = [ranks, content]
    return found


def predictions() -> dict[str, Any]:
    from fastpar.axes.step import Setup, Workload
    from fastpar.predict.machine import Cluster, DatasheetRates
    from fastpar.predict.memory import predict_memory
    from fastpar.predict.time import predict_step
    from fastpar.settings.model import GPTConfig

    draw = random.Random(20261126)
    found = {}
    while len(found) < 200:
        model = draw.choice(["gpt2", "gpt2-medium", "gpt2-xl"])
        axis = draw.choice(["none", "none", "tp", "cp", "pp", "grid"])
        world = draw.choice([2, 4, 8, 16, 64])
        values: dict[str, Any] = {
            "world_size": world,
            "zero_stage": draw.choice([0, 1, 2, 3]),
            "micro_batch_size": draw.choice([1, 2, 8]) * (2 if axis == "grid" else 1),
            "grad_accum_steps": draw.choice([1, 4]) * (4 if axis == "pp" else 1),
            "activation_checkpointing": draw.choice(["none", "selective", "full"]),
            "dtype": draw.choice(["fp32", "bf16"]),
            "optimizer": draw.choice(["adamw", "adamw", "adafactor", "muon"]),
            "accumulate": draw.choice(["full", "shard"]),
            "tp": 2 if axis in ("tp", "grid") else 1,
            "cp": 2 if axis == "cp" else 1,
            "cp_method": draw.choice(["heads", "keys"]),
            "pp": 2 if axis == "pp" else 1,
            "schedule": draw.choice(["1f1b", "gpipe"]) if axis == "pp" else "1f1b",
            "tp_grid": "2x2" if axis == "grid" and world >= 4 else "none",
        }
        if values["dtype"] == "fp32":
            values["master_weights"] = "none"
        if axis == "none" and values["zero_stage"]:
            values |= draw.choice(
                [{}, {"offload": "optimizer"}, {"wire_gradients": "int8"}, {"wire_weights": "int8"}]
            )
        text = f"{model} {values}"
        values.pop("master_weights", None)  # fp32 has none
        setup = Setup(**values)
        if text in found or (axis == "grid" and world < 4):
            continue
        rows = setup.dp * setup.depth * setup.micro_batch_size * setup.grad_accum_steps
        workload = Workload(GPTConfig.preset(model, vocab_size=50257), max(1, rows))
        try:
            memory = predict_memory(workload, setup)
            step = predict_step(workload, setup, DatasheetRates(Cluster.of("h100", world), setup))
            found[text] = [memory.total, asdict(memory), step.step_s, step.parts]
        except ValueError as error:
            found[text] = [str(error)]
    return found


def bits() -> dict[str, Any]:
    import test_recorded_bits

    found = test_recorded_bits.record()
    found.pop("commit")
    return found


PARTS: dict[str, Callable[[], Any]] = {
    "messages": messages,
    "help": helps,
    "plans": plans,
    "collectives": collectives,
    "keys": keys,
    "predictions": predictions,
    "bits": bits,
}


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        rows = [x for k in a if k in b for x in differences(a[k], b[k], f"{where}/{k}")]
        rows += [f"- {where}/{k}" for k in a if k not in b]
        return rows + [f"+ {where}/{k}" for k in b if k not in a]
    if isinstance(a, list) and isinstance(b, list):
        if all(isinstance(x, str) for x in [*a, *b]):
            return [f"- {where}: {x}" for x in a if x not in b] + [
                f"+ {where}: {x}" for x in b if x not in a
            ]
        if len(a) == len(b):
            return [x for i, y in enumerate(a) for x in differences(y, b[i], f"{where}/{i}")]
    if isinstance(a, str) and isinstance(b, str) and "\n" in a + b:
        return differences(a.splitlines(), b.splitlines(), where)
    return [] if a == b else [f"! {where}: {a!r} -> {b!r}"]


def main(words: list[str]) -> int:
    if words[0] == "make":
        folder = Path(words[1])
        folder.mkdir(parents=True, exist_ok=True)
        for name in words[2:] or PARTS:
            content = PARTS[name]()
            text = json.dumps(content, indent=1, default=str)
            (folder / f"{name}.json").write_text(text + "\n")
            print(f"{name}: {len(content)}", flush=True)
        return 0
    before, after = map(Path, words[1:3])
    rows = []
    for name in PARTS:
        one, two = (json.loads((f / f"{name}.json").read_text()) for f in (before, after))
        rows += [f"{name} {row}" for row in differences(one, two)]
    print("\n".join(rows) or "equal")
    return bool(rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
