"""What modules say of their parameters, how these are cut, and what a report says of it."""

from typing import ClassVar

import pytest
import torch
from cells import sweep
from torch import nn

from fastpar import GPT, GPTConfig, Mesh, engine_of, parallelize
from fastpar.axes.tensor.declared import find_states
from fastpar.axes.tensor.functional import TensorParallel
from fastpar.comm.transports import TorchCollectives
from fastpar.foreign.tp_plan import Column
from fastpar.settings.parallel import Parallel
from fastpar.sharding.placements import Partial, Replicate, Shard
from fastpar.testing import run_ranks


class Scale(nn.Module):
    tp_states: ClassVar = {"scale": Partial()}

    def __init__(self, n):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(n))


def test_states_that_contradict_each_other_or_are_of_no_parameter():
    """Tied parameters have the state of either name."""
    two = r"parallelize: parameter '1\.scale' has two states, Partial\(\) and Replicate\(\);"
    none = r"parallelize: Scale declares a state for '1\.shift', which is not a parameter; correct"

    def rank():
        tp, model = TensorParallel(TorchCollectives()), nn.ModuleList([Scale(3), Scale(3)])
        model[1].scale = model[0].scale
        assert len(find_states(model, tp)) == 1
        for states, message in (
            ({"scale": Replicate()}, two),
            ({"scale": Partial(), "shift": Partial()}, none),
        ):
            model[1].tp_states = states
            with pytest.raises(ValueError, match=message):
                find_states(model, tp)

    run_ranks(rank, 1)


def gpt(**sizes):
    default = {"n_layer": 1, "n_head": 4, "n_embd": 32, "block_size": 8, "vocab_size": 50}
    return GPT(GPTConfig(**default | sizes))


def linear(**states):
    model = nn.Sequential(nn.Linear(3, 2, bias=False))
    model[0].tp_states = states
    return model


PLAIN = {"sequence_parallel": False}
REFUSED = [
    (linear, 2, {}, r"parallelize: parameter '0\.weight' has no declared state with tp=2; name it "
     r"in tp_plan, or in its module's tp_states: Shard, Replicate or"),
    (lambda: linear(weight=Shard(1)), 2, {}, r"parallelize: tp=2 cannot split parameter "
     r"'0\.weight' of shape \[2, 3\] as Shard\(dim=1, groups=1, pad_to=None\): dimension 1 "
     r"of size 3 does not divide by 2; choose another tp, or Replicate\(\)"),
    (gpt, 3, PLAIN, r"parallelize: expected tp to divide the MLP's width, \d+, got tp=3; change"),
]  # fmt: skip


@sweep(("make", "tp", "options", "message"), REFUSED)
def test_a_model_that_does_not_split_stays_as_it_was(make, tp, options, message):
    def rank():
        model = make()
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(torch.distributed.get_rank())
        before = {name: p.clone() for name, p in model.named_parameters()}
        with pytest.raises(ValueError, match=message):
            parallelize(model, Mesh(tp=tp), Parallel.of(**options))
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())

    run_ranks(rank, tp)


def test_a_report_of_a_plan():
    """Every parameter has its line, of what a plan names and of what it does not."""

    def rank():
        mlp = nn.ModuleDict({"up": nn.Linear(8, 12), "down": nn.Linear(12, 8)})
        model = nn.ModuleDict({"mlp": mlp, "norm": nn.LayerNorm(8)})
        plan = {"mlp.up": Column(), "mlp.down": "row"}
        parallelize(model, Mesh(tp=2), Parallel.of(**PLAIN), tp_plan=plan)
        return engine_of(model).tp_report

    report = run_ranks(rank, 2)[0]
    assert "1 mlp.up.weight  [12, 8] -> [6, 8]  Shard(0)" in report
    kinds = [kind.split("\n     1 ")[1:] for kind in report.split(" parameters, ")[1:]]
    assert [[line.split()[0] for line in kind] for kind in kinds] == [
        ["mlp.up.weight", "mlp.up.bias", "mlp.down.weight"],
        ["mlp.down.bias"],
        ["norm.weight", "norm.bias"],
    ]
