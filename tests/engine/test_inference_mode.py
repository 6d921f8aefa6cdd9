"""A validation under torch.inference_mode(): what is kept between calls serves training, too."""

import pytest
import torch
from test_wired_engine import same
from test_wires_beside import OF, WIRES, parallel, rows, start, steps

import fastpar
from fastpar.engine.debug import Debug
from fastpar.engine.pipeline_step import pipeline_loss
from fastpar.models.gpt import use_fp8
from fastpar.settings.model import GPTConfig
from fastpar.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
BUS = Debug(bus_gb_s=1000)  # a stand-in: there is no GPU
KINDS = {
    "plain": {},
    "wires": {**WIRES["int4, fed back"], "wire_weights": "int8"},
    "optimizer": {"offload": "optimizer", "debug": BUS},
    "parameters": {"offload": "parameters", "debug": BUS},
    "fp8": {},
}


def validate(model, mode, layout):
    model.eval()
    with mode():
        x, y = rows(99, fastpar.engine_of(model).mesh)
        loss = pipeline_loss(model, x, y) if "pp" in OF[layout][1] else model(x, y)
        fastpar.engine_of(model).all_reduce_scalars(loss.detach().double().reshape(1))
    model.train()


def train(layout, stage, kind, mode):
    model = start(layout)
    if kind == "fp8":
        model = fastpar.GPT(GPTConfig(2, 2, 64, 16, 64, dropout=0.0), seed=0)
        use_fp8(model, "all", scaling="tensor", emulate=True)
    model, optimizer = parallel(model, layout, stage, KINDS[kind])
    for step in range(3):
        validate(model, mode, layout)
        found = steps(model, optimizer, layout, step, step + 1)
    return found


CELLS = [
    *(("dp and tp", 3, "plain"), ("partial sums", 0, "plain"), ("dp and cp", 1, "plain")),
    *(("cp by keys", 2, "plain"), ("dp and ep", 0, "plain"), ("dp and pp", 1, "plain")),
    *(("rows and tp", 0, "plain"), ("copies", 3, "plain"), ("dp and tp", 2, "wires")),
    *(("dp and ep", 3, "wires"), ("dp and cp", 1, "optimizer"), ("dp and pp", 2, "optimizer")),
    *(("dp and tp", 3, "parameters"), ("dp and tp", 0, "fp8"), ("dp and cp", 3, "fp8")),
]


@pytest.mark.parametrize(("layout", "stage", "kind"), CELLS)
def test_validation_under_inference_mode_changes_nothing(layout, stage, kind):
    want, got = (
        run_ranks(train, OF[layout][0], layout, stage, kind, mode)
        for mode in (torch.no_grad, torch.inference_mode)
    )
    assert all(map(same, want, got))
