"""A trial at an op's first use: it neither sees nor changes what the call happens in."""

import pytest
import torch
from proofs import GELU
from torch.utils.checkpoint import checkpoint

from fastpar.doctor import doctor, trial


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(trial, "SECONDS", 0.02)


class First(torch.autograd.Function):
    """An op in whose forward the proof is made, as when a real one is called."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        First.proof = doctor.prove_first_use(GELU, x)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


def in_a_default_device(x):
    with torch.device("meta"):
        return First.apply(x)


def in_autocast(x):
    with torch.autocast("cpu", torch.bfloat16):
        return First.apply(x)


def in_inference(x):
    with torch.inference_mode():
        return First.apply(x)


@pytest.mark.parametrize(
    "call",
    [
        First.apply,
        lambda x: checkpoint(First.apply, x, use_reentrant=False),
        in_a_default_device,
        in_autocast,
        in_inference,
    ],
    ids=["forward", "checkpoint", "default device", "autocast", "inference"],
)
def test_what_surrounds_the_first_call_does_not_reach_the_trial(quick, call):
    y = call(torch.randn(4, 96, requires_grad=True))
    assert First.proof.wrong == ""
    assert min(First.proof.own_ms) > 0  # backward was proven too
    if y.requires_grad:
        y.sum().backward()


def test_a_trial_draws_no_number_of_the_run(quick):
    before = torch.get_rng_state()
    assert doctor.prove_first_use(GELU, torch.ones(4, 96)).own_ms[1] > 0
    assert torch.equal(torch.get_rng_state(), before)


def test_an_oracle_without_a_deterministic_form_is_no_error_of_the_kernel(quick, monkeypatch):
    def eager(x, bias, *rest):
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))  # has none
        return torch.nn.functional.gelu(x + bias, approximate="tanh")

    cases = trial.proof_cases("bias_gelu", 96, "cpu", 4)[:2]
    for case in cases:
        monkeypatch.setattr(case, "eager", eager)
    monkeypatch.setattr(trial, "proof_cases", lambda *args: cases)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.warns(UserWarning, match="put_"):
            assert trial.prove(GELU).wrong == ""
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
