"""The bits of short training runs, recorded once and compared ever after: a move changes none.

The other tests say that layouts agree with each other and with plain torch. This one says that they
agree with an earlier commit: losses, final weights and optimizer state of every cell, as digests.

[Note: recording] `PYTHONPATH=tests/support python tests/contracts/test_recorded_bits.py FILE` in a
checkout writes its record. torch's matrix products have other bits on other processors and
versions, so the record holds the digest of a run of plain torch too. Where that one differs, the
stored record says nothing: the slow tests then build the commit that last changed it, in
build/recorded, and let it write its record here (three core minutes, once). The others find that
record or skip.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cells import few_fields
from torch import nn

import fastpar
from fastpar.kernels import make_key
from fastpar.nn.recompute import recompute
from fastpar.testing import run_ranks

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path(__file__).parent / "recorded_bits.json"
STEPS, B, T, V, C, HEADS = 4, 2, 16, 97, 32, 4
MODELS = ("gpt", "stock", "patched")


@dataclass(frozen=True)
class Cell:
    ranks: int = 1
    tp: int = 1
    stage: int = 0
    precision: str = "fp32"  # bf16: fp32 masters; remainder: the 16 bits that bf16 lacks
    model: str = "gpt"
    accumulate: str = "once"  # once | shard | full | no_sync, three micro-batches each
    recompute: str = "none"
    deterministic: bool = False
    optimizer: str = "adamw"
    shard_size: int | None = None
    clip: bool = True

    def __str__(self) -> str:
        default = asdict(Cell())
        changed = {k: v for k, v in asdict(self).items() if v != default[k]}
        return " ".join(f"{k}={v}" for k, v in changed.items()) or "one process"


def cells() -> list[Cell]:
    """Every layout in every precision, and every option with layouts of each kind."""
    found = [
        Cell(ranks=ranks, stage=stage, precision=precision)
        for ranks, stage, precision in itertools.product(
            (1, 2, 4), (0, 1, 2, 3), ("fp32", "bf16", "remainder")
        )
    ]
    found += [
        Cell(ranks=ranks, tp=2, stage=stage, precision=precision)
        for ranks, stage, precision in itertools.product((2, 4), (0, 1, 2, 3), ("fp32", "bf16"))
    ]
    options: list[dict] = [
        *({"accumulate": kind} for kind in ("shard", "full", "no_sync")),
        *({"recompute": mode} for mode in ("full", "selective")),
        {"deterministic": True},
        {"deterministic": True, "accumulate": "shard"},
        {"model": "stock"},
        {"model": "stock", "precision": "bf16", "accumulate": "full"},
        {"model": "patched"},
        {"model": "patched", "precision": "bf16"},
        {"clip": False},
    ]
    layouts: list[dict] = [
        {},
        {"ranks": 2},
        {"ranks": 2, "stage": 2},
        {"ranks": 4, "stage": 1},
        {"ranks": 2, "stage": 3},
        {"ranks": 4, "stage": 3, "shard_size": 2},
        {"ranks": 4, "stage": 2, "tp": 2},
    ]
    for option, layout in itertools.product(options, layouts):
        if not (layout.get("tp") and option.get("model")):
            found.append(Cell(**{**layout, **option}))
    for precision, ranks in itertools.product(("fp32", "bf16"), (1, 2)):
        found.append(Cell(ranks=ranks, optimizer="adafactor", precision=precision))
    return found


class StockBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.proj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.fc, self.out = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x):
        q, k, v = self.qkv(self.ln_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.out(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


class Stock(nn.Module):
    """Somebody's GPT with a tied head: nothing of ours in it."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, C), nn.Embedding(T, C)
        self.h = nn.ModuleList(StockBlock() for _ in range(2))
        self.ln_f, self.head = nn.LayerNorm(C), nn.Linear(C, V, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1]))
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.head(self.ln_f(x)).flatten(0, 1).float(), targets.flatten())


class Patched(nn.Module):
    """transformers' GPT-2 after fastpar.patch."""

    def __init__(self) -> None:
        super().__init__()
        import transformers

        transformers.utils.logging.set_verbosity_error()
        config = transformers.GPT2Config(
            vocab_size=V, n_positions=T, n_embd=C, n_layer=2, n_head=HEADS,
            embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        self.lm = transformers.GPT2LMHeadModel(config)
        fastpar.patch(self.lm)

    def forward(self, idx, targets):
        logits = self.lm(idx, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def build(kind: str) -> nn.Module:
    if kind == "gpt":
        config = fastpar.GPTConfig(
            n_layer=2, n_head=HEADS, n_embd=C, block_size=T, vocab_size=V, dropout=0.1
        )
        return fastpar.GPT(config)
    model: nn.Module = Stock() if kind == "stock" else Patched()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.normal_(0.0, 0.05, generator=generator).add_("ln_" in name and "weight" in name)
    return model.train()


def batch(step: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + index)
    tokens = torch.randint(0, V, (B, T + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def digest(*values: torch.Tensor) -> str:
    sha = hashlib.sha256()
    for value in values:
        value = value.detach().cpu().contiguous()
        sha.update(f"{value.dtype} {tuple(value.shape)}".encode())
        sha.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]


def digest_of_state(state: dict) -> str:
    tensors = []
    for key, entries in state.items():
        for name, value in sorted(entries.items()):
            tensors += [torch.tensor([*f"{key}/{name}".encode()]), torch.as_tensor(value)]
    return digest(*tensors)


def train(cell: Cell) -> dict[str, str]:
    """One rank of a cell: digests of its losses, and of the whole weights and state."""
    mesh = fastpar.Mesh(dp=cell.ranks // cell.tp, tp=cell.tp)
    model = build(cell.model)
    half = cell.precision != "fp32"
    if half:
        model.bfloat16()
    if cell.recompute != "none":
        recompute(model, cell.recompute)
    micro_batches = 1 if cell.accumulate == "once" else 3
    fastpar.parallelize(
        model,
        mesh,
        fastpar.Parallel.of(
            zero_stage=cell.stage,
            shard_size=cell.shard_size,
            bucket_mb=0.02,
            first_bucket_mb=0.005,
            grad_dtype=torch.float32 if half else None,
            accumulate="full" if cell.accumulate == "full" else "shard",
            grad_accum_steps=micro_batches if cell.accumulate == "full" else 1,
            deterministic=cell.deterministic,
        ),
    )
    engine = fastpar.engine_of(model)
    masters = {"fp32": False, "bf16": True, "remainder": "remainder"}[cell.precision]
    clip = 0.5 if cell.clip else None
    optimizer: torch.optim.Optimizer
    if cell.optimizer == "adafactor":
        optimizer = fastpar.Adafactor(
            model.parameters(), lr=1e-2, master_weights=masters, max_grad_norm=clip
        )
    else:
        optimizer = fastpar.AdamW(
            model.parameters(), lr=1e-2, master_weights=masters, max_grad_norm=clip
        )
    losses = []
    for step in range(STEPS):
        for j in range(micro_batches):
            index = mesh.dp_rank * micro_batches + j
            idx, targets = batch(step, index)
            quiet = cell.accumulate == "no_sync" and j < micro_batches - 1
            with engine.no_sync() if quiet else contextlib.nullcontext():
                if cell.model == "gpt":
                    key = make_key(step, 7 * index)
                    loss = model(idx, targets, rng_key=key)
                else:
                    loss = model(idx, targets)
                (loss / micro_batches).backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state_dict()["state"]
    weights = model.state_dict()
    return {
        "losses": digest(*losses),
        "weights": digest(*(value for _, value in sorted(weights.items()))),
        "state": digest_of_state(state),
    }


def run(cell: Cell) -> str:
    """Weights, state, and every rank's losses."""
    if cell.model == "patched":  # before threads do: transformers' lazy imports are not safe there
        pytest.importorskip("transformers.models.gpt2.modeling_gpt2")
    ranks = run_ranks(train, cell.ranks, cell)
    (weights,), (state,) = ({r[name] for r in ranks} for name in ("weights", "state"))
    return " ".join([weights, state, *(r["losses"] for r in ranks)])


def plain_torch() -> str:
    """The digest of a run without fastpar: what this machine's torch makes of such products."""
    digests = []
    for dtype in (torch.float32, torch.bfloat16):
        model = build("stock").to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            loss = model(*batch(step, 0))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        digests.append(digest(*model.parameters(), loss))
    return " ".join([torch.__version__, *digests])


def record() -> dict:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    return {
        "commit": commit.stdout.strip(),
        "plain_torch": plain_torch(),
        "cells": {str(cell): run(cell) for cell in cells()},
    }


def git(*words: str) -> str:
    done = subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else ""


def record_of_this_cpu(here: str, *, make: bool) -> dict:
    """What the commit that last changed the stored record writes on a CPU of other bits."""
    if git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip(f"the stored record is of another CPU ({here} here), and git has no history")
    commit = git("log", "-1", "--format=%H", "--", str(RECORD))
    name = hashlib.sha256(f"{commit} {here}".encode()).hexdigest()[:16]
    folder = ROOT / "build" / "recorded"
    path = folder / f"{name}.json"
    if not path.exists() and not make:
        pytest.skip(
            f"the stored record is of another CPU ({here} here); `make test-slow ROOM=contracts` "
            f"makes one, with commit {commit[:12]}"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:  # of several test processes one builds
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=folder) as tree:
                write_record(commit, Path(tree), path)
    found: dict = json.loads(path.read_text())
    assert found["plain_torch"] == here
    return found


def write_record(commit: str, tree: Path, path: Path) -> None:
    """The record of a commit, whose package is built in `tree`."""
    archive, script = tree / "tree.tar", "tests/contracts/test_recorded_bits.py"
    environment = {**os.environ, "PYTHONPATH": f"{tree / 'lib'}:{tree / 'tests/support'}"}
    for command in (
        ["git", "-C", ROOT, "archive", "-o", archive, commit],
        ["tar", "-xf", archive],
        [sys.executable, "setup.py", "-q", "build", "--build-lib", "lib"],
        [sys.executable, script, "record.json"],
    ):
        done = subprocess.run(
            [*map(str, command)], cwd=tree, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
    (tree / "record.json").rename(path)


@functools.cache
def plain_torch_here() -> str:
    return plain_torch()


@pytest.fixture
def recorded(request, _same_start) -> dict:
    found: dict = json.loads(RECORD.read_text())
    here = plain_torch_here()
    if here == found["plain_torch"]:
        return found
    make = request.node.get_closest_marker("slow") is not None
    return record_of_this_cpu(here, make=make)


def test_every_cell_is_in_the_record():
    assert json.loads(RECORD.read_text())["cells"].keys() == {str(cell) for cell in cells()}


@pytest.mark.timeout(1800)  # with a build
@pytest.mark.parametrize("cell", few_fields(cells(), strength=1), ids=str)
def test_the_bits_are_those_of_the_record(recorded, cell):
    assert run(cell) == recorded["cells"][str(cell)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    Path(sys.argv[1]).write_text(json.dumps(record(), indent=1) + "\n")
