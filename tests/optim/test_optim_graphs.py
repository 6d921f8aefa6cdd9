"""optim.py on a GPU's terms: CUDA kernels, CUDA graphs without host reads, torch.compile."""

import functools
import math

import pytest
import torch
from test_optim import HYPER, build, put_gradients, run, vector

from fastpar.kernels import backend
from fastpar.optim import adamw as optim
from fastpar.optim.adamw import AdamW


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {"max_grad_norm": 1.0}),
        (torch.float32, {"max_grad_norm": 1.0, "capturable": True, "amsgrad": True}),
        (torch.bfloat16, {"master_weights": "remainder", "moment_dtype": torch.bfloat16}),
        (torch.bfloat16, {"stochastic_rounding": True, "moment_dtype": torch.uint8}),
        (torch.float16, {"master_weights": True, "zero_grad_in_step": True}),
    ],
)
def test_the_cuda_kernels_take_the_same_steps(cuda_device, monkeypatch, dtype, options):
    """Bit for bit those of the CPU, a skipped one included."""

    def take(device):
        model = build(dtype).to(device)
        optimizer = AdamW(model.parameters(), **HYPER, **options)
        optimizer.grad_scale = torch.tensor(4.0, device=device)
        norms = []
        for step in range(5):
            put_gradients(model.cpu(), step, scale=math.inf if step == 2 else 4.0)
            model.to(device)
            optimizer.step()
            norms.append(optimizer.grad_norm.item())
            assert optimizer.skipped == (step == 2)
        return vector(model).cpu(), str(norms)

    values, norms = take(cuda_device)
    monkeypatch.setattr(backend, "cuda_on_cpu", False)
    expected, expected_norms = take("cpu")
    assert torch.equal(values, expected)
    assert norms == expected_norms


def test_capturable_steps_are_the_same_steps():
    plain, ours = build(), build()
    options = {**HYPER, "max_grad_norm": 1.0}
    a = AdamW(plain.parameters(), **options)
    b = AdamW(ours.parameters(), **options, capturable=True)
    assert torch.equal(run(plain, a, 5), run(ours, b, 5))


def test_a_capturable_step_does_not_read_the_host(monkeypatch):
    model = build()
    optimizer = AdamW(
        model.parameters(),
        lr=torch.tensor(1e-2),
        betas=(torch.tensor(0.9), torch.tensor(0.99)),
        capturable=True,
        max_grad_norm=1.0,
    )
    optimizer.grad_scale = torch.tensor(4.0)
    run(model, optimizer, 1)

    def refuse(*args):
        raise AssertionError("a value was read on the host")

    steps = []
    monkeypatch.setattr(optim, "adamw_step_", lambda *args, **kwargs: steps.append(args[4]))
    for name in ("item", "tolist", "__bool__", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    run(model, optimizer, 1)
    monkeypatch.undo()
    assert isinstance(steps[0][0].step, torch.Tensor)
    assert not optimizer.skipped


def test_a_capture_begins_after_a_first_step(monkeypatch):
    model = build()
    optimizer = AdamW(model.parameters(), **HYPER)
    put_gradients(model, 0)
    monkeypatch.setattr(optim, "capturing", lambda device: True)
    with pytest.raises(RuntimeError, match=r"expected capturable=True while a CUDA graph"):
        optimizer.step()
    optimizer.param_groups[0]["capturable"] = True
    with pytest.raises(RuntimeError, match=r"expected a first step before the capture"):
        optimizer.step()
    assert not optimizer.state


@pytest.mark.gpu
def test_a_captured_step_replays():
    plain, ours = build().cuda(), build().cuda()
    options = {"max_grad_norm": 1.0, "capturable": True}
    a = AdamW(plain.parameters(), lr=torch.tensor(1e-2, device="cuda"), **options)
    b = AdamW(ours.parameters(), lr=torch.tensor(1e-2, device="cuda"), **options)
    generator = torch.Generator().manual_seed(0)
    shapes = [p.shape for p in plain.parameters()]
    grads = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(4)]
    for p in (*plain.parameters(), *ours.parameters()):
        p.grad = torch.zeros_like(p)

    def fill(model, values):
        for p, g in zip(model.parameters(), values):
            p.grad.copy_(g)

    for model, optimizer in ((plain, a), (ours, b)):
        fill(model, grads[0])
        optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        b.step()
    for values in grads[1:]:
        for model, do in ((plain, a.step), (ours, graph.replay)):
            fill(model, values)
            do()
        a.param_groups[0]["lr"].mul_(0.5)
        b.param_groups[0]["lr"].mul_(0.5)
    assert torch.equal(vector(plain), vector(ours))
    assert {int(s["step"]) for s in b.state.values()} == {4}


@pytest.mark.parametrize(
    "whole", [pytest.param(True, marks=pytest.mark.slow), False], ids=["step", "forward"]
)
def test_it_works_under_torch_compile(whole):
    """Compiled with the optimizer's calls inside, and around a compiled forward: the same bits."""

    def train(compiled):
        model = build()
        optimizer = AdamW(model.parameters(), **HYPER, max_grad_norm=1.0)
        forward = model
        if compiled and not whole:
            forward = torch.compile(model, backend="eager")

        def step(x):
            loss = forward(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        if compiled and whole:
            step = torch.compile(step, backend="eager")
        losses = [step(torch.full((2, 7), 0.1 * i)).item() for i in range(4)]
        return losses, vector(model)

    losses, values = train(False)
    compiled_losses, compiled_values = train(True)
    assert losses == compiled_losses
    assert torch.equal(values, compiled_values)


def test_the_compiler_does_not_trace_the_step():
    from torch._dynamo.testing import CompileCounter

    model = build()
    optimizer = AdamW(model.parameters(), **HYPER)
    put_gradients(model, 0)
    counter = CompileCounter()

    @functools.partial(torch.compile, backend=counter)
    def step():
        optimizer.step()

    for _ in range(3):
        step()
    assert counter.frame_count == 0
    assert {int(s["step"]) for s in optimizer.state.values()} == {3}
    assert math.isfinite(vector(model).sum())
