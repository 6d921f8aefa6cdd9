"""fastpar/examples: each script gives the numbers that its framework gives without fastpar.

Losses near 5.5 are fp32 numbers with a spacing of 5e-7; a dozen steps with sums in another order
move them by a few of these: 1e-5 is twenty.
"""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fastpar

EXAMPLES = Path(fastpar.__file__).parent / "examples"
CLOSE = {"rtol": 0, "atol": 1e-5}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # other packages'
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def example(name, package=None):
    """The module of an example; skipped where a package that it shows is missing."""
    if package is not None:
        pytest.importorskip(package, reason=f"pip install {package.replace('_', '-')}")
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def close(got, want):
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), **CLOSE)


@pytest.mark.parametrize(
    "settings",
    [{}, {"label_smoothing_factor": 0.1}, {"gradient_accumulation_steps": 4, "max_grad_norm": 0.1}],
    ids=str,
)
def test_the_trainer_of_transformers(settings):
    pytest.importorskip("accelerate", reason="pip install accelerate")
    main = example("transformers_trainer", "transformers").main
    numbers = []
    for stock in (True, False):
        trainer = main(stock, **settings)
        assert len(trainer.state.log_history) == 9  # eight steps, and the summary
        model, rows = trainer.model.eval(), trainer.train_dataset
        losses = [model(row["input_ids"][None], labels=row["labels"][None]).loss for row in rows]
        numbers.append([each["loss"] for each in trainer.state.log_history[:8]])
        numbers[-1] += [loss.item() for loss in losses]
    close(numbers[1][8:], numbers[0][8:])
    # Logs of older versions have four decimals.
    assert numbers[1][:8] == pytest.approx(numbers[0][:8], abs=1.01e-4)
    assert type(trainer.optimizer.optimizer).__name__ == "AdamW"
    assert "fastpar" in type(trainer.optimizer.optimizer).__module__
    assert not fastpar.patch(trainer.model).fallbacks or "label_smoothing_factor" in settings


@pytest.mark.parametrize("name", ["accelerate_loop", "fabric_loop"])
def test_loops_of_others(name):
    package = {"accelerate_loop": "accelerate", "fabric_loop": "lightning_fabric"}[name]
    main = example(name, package).main
    close(main(), main(stock=True))


def test_a_loop_under_torchrun_and_its_resume_on_another_number_of_ranks(tmp_path):
    main = example("torchrun_loop").main
    alone = main(str(tmp_path / "alone"))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command += [str(EXAMPLES / "torchrun_loop.py"), str(tmp_path / "both")]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    ranks = [[float(x) for x in re.findall(r"\d\.\d+", line)] for line in printed.splitlines()]
    ranks = [losses for losses in ranks if losses]
    assert [len(losses) for losses in ranks] == [8, 8]
    close([sum(pair) / 2 for pair in zip(*ranks)], alone)
    close(main(str(tmp_path / "both"), steps=12), main(str(tmp_path / "alone"), steps=12))


MODEL = """
from foreign_models import LossGPT as Shape
import torch

class GPT(Shape):
    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        params = list(self.parameters())
        groups = [{"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
                  {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=True)
"""
TRAIN = """
import torch
from model import GPT
torch.manual_seed(0)
model = GPT()
optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")
for _ in range(8):
    ids = torch.randint(67, (4, 17))
    _, loss = model(ids[:, :-1], ids[:, 1:].contiguous())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step(), optimizer.zero_grad(set_to_none=True)
    print(repr(loss.item()), type(optimizer).__module__)
"""


def test_nanogpts_script_as_it_is(tmp_path):
    """With a model and a script of its shape: it is not ours to ship."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "train.py").write_text(TRAIN)
    paths = [p for p in sys.path if p.endswith("tests/support")]
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.path += {paths!r}")
    runs = []
    for script in ("train.py", str(EXAMPLES / "nanogpt.py")):
        done = subprocess.run(
            [sys.executable, script], capture_output=True, text=True, cwd=tmp_path,
            env={"PATH": "", "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        runs.append(re.findall(r"^(\d+\.\d+) (\S+)$", done.stdout, re.MULTILINE))
    assert [len(run) for run in runs] == [8, 8]
    assert runs[1][0][1] == "fastpar.optim.adamw"
    close(*([float(loss) for loss, _ in run] for run in runs))
