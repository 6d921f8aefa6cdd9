"""A gradient's walk goes as engine/README.md describes it."""

import re
import sys
from pathlib import Path

import torch
from torch import nn

import fastpar
from fastpar.engine.parallelize import parallelize
from fastpar.testing import run_ranks

PACKAGE = Path(fastpar.__file__).parent
TEXT = (PACKAGE / "engine/README.md").read_text().split("## A gradient's walk")[1].split("\n## ")[0]
STEPS = re.findall(r"^\d+\. `(.*?)` `(.*?)`", TEXT, re.MULTILINE)
BESIDE = set(re.findall(r"`(\w+/\w+\.py)`", TEXT.split("Beside")[1]))
AT_MOST = 8  # files


def walked():
    """(file, function) of all calls from a backward to the next forward, on one of two ranks."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    mesh = fastpar.Mesh(dp=2, device="cpu")
    parallelize(model, mesh, zero_stage=2)
    optimizer = fastpar.AdamW(model.parameters(), max_grad_norm=1.0)
    calls = []

    def called(frame, event, arg):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            calls.append((path.relative_to(PACKAGE).as_posix(), frame.f_code.co_name))

    x = torch.ones(4, 8)
    for _ in range(2):  # the first makes what later steps have
        loss = model(x).sum()
        sys.setprofile(called if mesh.rank == 0 else None)
        calls.clear()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model(x)
        sys.setprofile(None)
    return calls


def test_a_gradient_walks_as_described():
    calls = run_ranks(walked, 2)[0]
    rest = iter(calls)
    for file, name in STEPS:
        assert (file, name.split(".")[-1]) in rest, f"{name} does not follow on those before it"
    files = {file for file, _ in STEPS}
    assert {file for file, _ in calls} <= files | BESIDE
    assert len(files) <= AT_MOST
