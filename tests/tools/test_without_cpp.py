"""Installed with FASTPAR_CPP=0: no compiled module, torch computes everything."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_setup import setup_py

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """The package as FASTPAR_CPP=0 builds it, without a compiler."""
    folder = tmp_path_factory.mktemp("without_cpp")
    done = setup_py("build_py", "--build-lib", str(folder), FASTPAR_CPP="0", CXX="no-such-compiler")
    assert done.returncode == 0, done.stderr
    assert not list(folder.glob("**/_C*.so"))
    (folder / "bench").symlink_to(ROOT / "bench")
    return folder


def python(tree, *arguments, **env):
    """Python that finds the tree's fastpar first."""
    path = {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=tree,
        env={**os.environ, **path, **env},
        capture_output=True,
        text=True,
        timeout=280,
    )


STEP = """
import pytest, torch, fastpar
from fastpar.kernels import _C, attention, backend, host, keep_freed_memory, quantize_blockwise
assert _C is None and backend.choice == "torch" and not keep_freed_memory()
assert host.isa() == "none" and host.supported_isas() == ()
for call in (host.worker_cpus, lambda: host.set_isa("avx2")):
    with pytest.raises(RuntimeError, match="expected the compiled module.* install fastpar ag"):
        call()
with pytest.raises(RuntimeError, match="FASTPAR_BACKEND=torch seed=1; install fastpar again"):
    quantize_blockwise(torch.ones(64), seed=1)
backend.choice = "auto"  # as where Triton serves
with pytest.raises(RuntimeError, match=r"pack_: expected .* with CUDA .* \\(FASTPAR_CPP=0"):
    backend.cuda_on_cpu = True
    backend.use_cuda("pack_", torch.ones(1))
backend.choice, backend.cuda_on_cpu = "torch", False
with pytest.raises(RuntimeError, match="read_backend: expected the compiled module .* again"):
    backend.read_backend("cpp")
info = backend.describe()
assert "\\n_C        none: installed with FASTPAR_CPP=0; install fastpar again" in info
assert "\\nattention                cpu  torch [1]\\n" in info
assert "\\n[1] installed with FASTPAR_CPP=0; install fastpar again, with a C++" in info
assert ".cpp" not in info
with pytest.raises(ValueError, match=r"expected targets in \\[0, 5\\) .* got targets\\[1\\]=5"):
    fastpar.kernels.cross_entropy(torch.zeros(3, 5), torch.tensor([-100, 5, 0]))

from fastpar.settings.model import GPTConfig
config = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=32, dropout=0.1)
model = fastpar.parallelize(fastpar.GPT(config), fastpar.Mesh(), zero_stage=2)
optimizer = fastpar.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
x = torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(1))
losses = []
for _ in range(12):
    loss = model(x[:, :-1], x[:, 1:])
    loss.backward(), optimizer.step(), optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < 0.9 * losses[0], losses
"""


@pytest.mark.slow
def test_a_model_trains_and_what_is_missing_is_said(tree):
    done = python(tree, "-c", STEP)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_every_op_agrees_with_its_oracle_without_the_module(tree, tmp_path):
    words = f"-m bench errors --implementation torch --quick --out {tmp_path}/e.json"
    done = python(tree, *words.split())
    # torch's own attention is what runs; on huge fp32 scores its dv is 2.9 times eager's error.
    fails = [line for line in done.stdout.splitlines() if line.startswith("fails: ")]
    own = "fails: attention/B=1 T=33 D=16 H=2 scores 36/float32/torch/cpu"
    assert set(fails) <= {own}, done.stdout[-2000:] + done.stderr
    assert "refused" not in done.stdout
    for op in ("attention", "layer_norm", "linear_cross_entropy", "embedding", "adamw_step_"):
        assert f"\n{op} " in done.stdout


@pytest.mark.slow
def test_two_ranks_train_without_the_module(tree, tmp_path):
    (tmp_path / "text.txt").write_text("of the word and the world\n" * 400)
    flags = (
        f"-m fastpar train --data {tmp_path}/text.txt --tokenizer bytes --model micro --n-layer 1 "
        "--n-head 2 --n-embd 16 --block-size 16 --batch-size 8 --max-steps 3 --threads 1 "
        f"--device cpu --nproc 2 --out {tmp_path}/run"
    )
    done = python(tree, *flags.split())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gloo" in done.stdout + done.stderr
    assert "has no compiled module: it was installed with FASTPAR_CPP=0" in done.stderr
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count('"loss"') > 0
