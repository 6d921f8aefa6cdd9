"""The README: its code runs, its links lead somewhere, and each limit is what the code does."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import fastpar
from fastpar.kernels import attention, backend, embedding
from fastpar.kernels.attention import TRITON_HEAD_DIM
from fastpar.kernels.philox import quantize_p
from fastpar.settings.config import TrainConfig
from fastpar.settings.model import GPTConfig
from fastpar.testing import run_ranks

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
LIMITS = README.split("## Limits")[1]


def code(number):
    return re.findall(r"```python\n(.*?)```", README, re.DOTALL)[number]


def test_links_lead_to_files():
    documents = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "fastpar").rglob("README.md"),
    ]
    documents += [ROOT / room / "README.md" for room in ("kernels", "csrc", "bench", "tests")]
    for document in documents:
        for link in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / link).exists(), (document, link)


def test_the_loop_runs_as_it_stands(tmp_path, monkeypatch):
    """But for a checkpoint every 3 steps instead of every 1000."""
    monkeypatch.chdir(tmp_path)
    tiny = GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=8, vocab_size=64)
    monkeypatch.setattr(fastpar.GPTConfig, "preset", lambda name: tiny)
    tokens = torch.randint(0, 64, (2, 9))
    names = {"loader": [(tokens[:, :-1], tokens[:, 1:])] * 3}
    exec(code(1).replace("% 1000", "% 3"), names)
    assert Path("runs/mine/latest").exists()
    exec("import fastpar; model = fastpar.GPT(fastpar.GPTConfig.preset(''))\n" + code(0), names)
    assert "replaced" in str(names["report"])


def gpu_figures():
    """Those of the step are the ones that one run measured."""
    found = []
    for path in (ROOT / "bench/results").glob("nvidia-*.json"):
        rows = json.loads(path.read_text())["rows"]
        steps = [row["median_ms"] for row in rows if row["case"] == "124M T=1024 B=32"]
        found.append(len(steps) == 3 and all(f"{ms:.1f}" in LIMITS for ms in steps))
    assert any(found)


def _with_stages():
    fastpar.parallelize(nn.Linear(2, 2), fastpar.Mesh(pp=2))


def layouts():
    with pytest.raises((ValueError, TypeError), match="pp"):
        run_ranks(_with_stages, 2)


def _stock_optimizer():
    model = fastpar.parallelize(nn.Linear(2, 2), fastpar.Mesh(), zero_stage=2)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match=r"expected fastpar\.AdamW"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(ValueError, match="expected parameters of an engine with zero_stage=0"):
        fastpar.Adafactor(model.parameters())


def attention_on_gpus():
    assert TRITON_HEAD_DIM == (16, 128, 8)
    q = torch.randn(1, 1, 4, 256)
    assert attention(q, q, q).shape == q.shape  # a CPU takes it


def ids_out_of_range():
    with pytest.raises((IndexError, ValueError)):
        embedding(torch.tensor([[7]]), torch.ones(4, 8))


def products():
    compiled = backend._C is not None and backend._C.isa() == "avx512"
    assert backend.has_gemm == (compiled and not backend._C.cpu_is_intel())


def half_precision():
    from fastpar.train.trainer import Trainer

    with pytest.raises(ValueError, match="expected dtype fp32 or bf16 on the CPU, got dtype=fp16"):
        Trainer(TrainConfig().replace({"dtype": "fp16"}), fastpar.Mesh())


CHECKS = {
    "GPU figures": gpu_figures,
    "Layouts": layouts,
    "Optimizers": lambda: run_ranks(_stock_optimizer, 2),
    "Attention on GPUs": attention_on_gpus,
    "Ids out of range": ids_out_of_range,
    "fp32 products on CPUs": products,
    "fp16": half_precision,
    "Dropout": lambda: quantize_p(0.1) == 26 or pytest.fail("quantize_p"),
    "Same bits": lambda: (ROOT / "tests/contracts/test_same_run.py").resolve(strict=True),
}


@pytest.mark.parametrize("name", CHECKS)
def test_a_limit_is_true(name):
    CHECKS[name]()


def test_every_limit_is_held_by_a_check_or_names_the_test_that_holds_it():
    bullets = re.findall(r"^- \*\*(.+?)\.\*\* (.*?)(?=^- |\n\n)", LIMITS, re.DOTALL | re.MULTILINE)
    assert len(bullets) >= 9
    for name, text in bullets:
        assert name in CHECKS or re.search(r"`tests/[\w/]+\.py`", text), name
