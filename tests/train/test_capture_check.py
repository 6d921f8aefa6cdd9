"""What the capture of a CUDA graph forbids is found on a CPU, and a micro-batch has none of it."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from pretend_cuda import pretend_cuda

from fastpar import GPT, AdamW, GPTConfig, Mesh, engine_of, parallelize
from fastpar.kernels import adamw, bias_gelu, make_key
from fastpar.optim import adamw as optim
from fastpar.optim import base
from fastpar.train import cuda_graphs
from fastpar.train.cuda_graphs import CaptureCheck, StepGraph, recording

SMALL = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=64, dropout=0.1)
kept = []
outside = torch.ones(4)
FORBIDDEN = {
    "item": (lambda x: x.sum().item(), "reads a value: _local_scalar_dense"),
    "bool": (lambda x: 1 if x.sum() > 0 else 0, "reads a value"),
    "tolist": (lambda x: x.tolist(), r"reads a value: Tensor\.tolist"),
    "cpu": (lambda x: x.cpu(), r"reads a value: Tensor\.cpu"),
    "numpy": (lambda x: x.numpy(), r"reads a value: Tensor\.numpy"),
    "equal": (lambda x: torch.equal(x, x + 1), "reads a value: equal"),
    "nonzero": (lambda x: x.nonzero(), "how large the result is: nonzero"),
    "mask": (lambda x: x[x > 0], "how large the result is: index"),
    "masked": (lambda x: x.masked_select(x > 0), "how large the result is: masked_select"),
    "unique": (lambda x: x.unique(), "how large the result is: _unique2"),
    "synchronize": (lambda x: torch.cuda.synchronize(), r"waits for the device: torch\.cuda"),
    "event": (lambda x: torch.cuda.Event.synchronize(x), r"the device: Event\.synchronize"),
    "query": (lambda x: torch.cuda.Event.query(x), r"waits for the device: Event\.query"),
    "record": (lambda x: torch.cuda.Event.record(x), "record the event again"),
    "pin": (lambda x: x.pin_memory(), "memory of the host is pinned"),
    "key": (lambda x: make_key(1, 2), "a number of the host: lift_fresh"),
    "alive": (lambda x: kept.append(x * 2), "outlives the graph: mul"),
    "address": (lambda x: x + outside, "not static is used: add"),
    "meta": (lambda x: x.to("meta"), "exchange values: _to_copy"),
}


@pytest.mark.parametrize("act", FORBIDDEN)
def test_what_a_capture_forbids_is_found(act):
    do, why = FORBIDDEN[act]
    x = torch.arange(4.0)
    why = f"CaptureCheck: expected .* got .*{why}"
    with pytest.raises(RuntimeError, match=why) as error, CaptureCheck([x]):
        do(x)
    assert f"{'philox.py' if act == 'key' else __file__}:" in str(error.value)
    kept.clear()
    assert x.tolist() == [0, 1, 2, 3]  # the patches are gone


def test_what_a_capture_allows_passes():
    """Other threads go on, too: a watchdog waits for its events, a save copies to the host."""
    x, out = torch.arange(4.0), torch.empty(4)
    weight = torch.ones(4, requires_grad=True)
    with CaptureCheck([x, out, weight]):
        (grad,) = torch.autograd.grad((weight * x).relu().sum(), weight)
        out.copy_(grad)
        del grad
    assert out.equal(x)
    with ThreadPoolExecutor(1) as pool, CaptureCheck([x]):
        assert pool.submit(outside.tolist).result() == [1.0] * 4
    y = x.clone().requires_grad_()
    y.register_hook(lambda grad: grad.tolist() and None)  # autograd's thread is not another
    with pytest.raises(RuntimeError, match="reads a value"), CaptureCheck([y]):
        y.sum().backward()
    with pytest.raises(ZeroDivisionError), CaptureCheck([outside]):  # an error is not hidden
        1 / 0  # noqa: B018


def test_it_looks_inside_of_ops(monkeypatch):
    """A host read in the code that launches a kernel, in forward and in backward."""
    from fastpar.kernels import gelu_triton

    for name in ("bias_gelu_fwd", "bias_gelu_bwd"):
        launch = getattr(gelu_triton, name)

        def reads(x, *args, launch=launch):
            x.sum().item()
            return launch(x, *args)

        x = torch.randn(4, 16, requires_grad=True)
        with monkeypatch.context() as patched:
            patched.setattr(gelu_triton, name, reads)
            why = "reads a value: _local_scalar_dense at .*test_capture_check.py"
            with pytest.raises(RuntimeError, match=why), pretend_cuda(), CaptureCheck([x]):
                bias_gelu(x).sum().backward()


@pytest.mark.parametrize(("dropout", "adds"), [(0.1, False), (0.1, True), (0.1, None), (0.0, None)])
def test_a_training_micro_batch_can_be_captured(dropout, adds):
    """The host's code of a GPU, Triton's kernels aside: forward, backward, gradients kept. Its key
    has to be the device's."""
    model = parallelize(GPT(GPTConfig(**{**vars(SMALL), "dropout": dropout})).train(), Mesh())
    engine = engine_of(model)
    ids, key, loss = torch.arange(32).view(2, 16), make_key(1, 0), torch.empty(())
    static = [*model.parameters(), ids, key, loss, *(b.grad for b in engine.buckets)]
    with (
        recording(engine, adds=adds) as fired,
        pretend_cuda() as launched,
        CaptureCheck(static),
    ):
        part = model(ids, ids, rng_key=key) / 2
        (part * loss).backward()
        loss.copy_(part.detach())
        del part
    assert set(fired) == set(model.parameters())
    assert len(launched) > 20  # the way of a GPU
    assert {"_attention_fwd_kernel", "_layer_norm_fwd_kernel"} <= set(launched), launched
    why = r"number of the host: lift_fresh at .*philox.py"
    with pytest.raises(RuntimeError, match=why), pretend_cuda(), CaptureCheck(static):
        model(ids, ids, rng_key=make_key(1, 0, ids.device))


def after_two_steps(monkeypatch, dtype=torch.float32, scale=None, **options):
    """The optimizer of a StepGraph, and its third step of two micro-batches, on a GPU's way."""
    monkeypatch.setattr(cuda_graphs, "check_device", lambda device: None)
    module = sys.modules["fastpar.kernels.linear_cross_entropy"]  # torch has it on CUDA alone
    monkeypatch.setattr(module, "wide_product", lambda a, b, *_, add: a.float() @ b.float())
    model = parallelize(GPT(SMALL).to(dtype).train(), Mesh(), grad_dtype=torch.float32)
    optimizer = AdamW(model.parameters(), max_grad_norm=1.0, **options)

    def compute(ids, key, scale):
        loss = model(ids, ids, rng_key=key) / 2
        (loss if scale is None else loss * scale).backward()
        return loss.detach()

    graph = StepGraph(compute, model, engine_of(model), optimizer)
    batches = [(torch.arange(32).view(2, 16), make_key(1, 2 * j)) for j in range(2)]
    for _ in range(2):
        graph(batches, scale)

    def third():
        with pretend_cuda() as launched:
            graph(batches, scale)
        return launched

    return optimizer, third


@pytest.mark.parametrize(
    ("dtype", "scale", "options"),
    [
        (torch.float32, None, {}),
        (torch.float16, 4.0, {"master_weights": True}),
        (torch.bfloat16, None, {"master_weights": "remainder", "moment_dtype": torch.uint8}),
    ],
)
def test_a_whole_step_can_be_captured(monkeypatch, dtype, scale, options):
    """Under the check: forward, backward, norm and update."""
    optimizer, third = after_two_steps(monkeypatch, dtype, scale, **options)
    # Past the dispatcher, which would tell the op that it is on a CPU.
    monkeypatch.setattr(adamw._adamw_step, "mutates", False)
    launched = third()
    assert launched.count("_attention_fwd_kernel") == 4  # of two layers and micro-batches
    assert launched[-1] == "adamw_step_cuda"
    assert {"norm_finish_cuda", "_layer_norm_bwd_kernel"} <= set(launched), launched
    counters = {float(s["step"]) for s in optimizer.state.values()}
    assert scale or counters == {3.0}, counters  # under a scale the flag that counts is not written


@pytest.mark.parametrize("place", ["global_norm", "adamw_step_", "_count", "torch's AdamW"])
def test_what_a_step_reads_on_the_host_is_found(monkeypatch, place):
    _, third = after_two_steps(monkeypatch)

    def reads(*args, **kwargs):
        x = args[0]
        return (x[0] if isinstance(x, list) else x).sum().item()

    owner = {"global_norm": base, "adamw_step_": optim, "_count": optim}.get(place)
    if owner is not None:
        monkeypatch.setattr(owner, place, reads)
    where = "adamw" if owner is None else "capture_check"
    with pytest.raises(RuntimeError, match=rf"reads a value: \w*(item|dense) at .*{where}.py"):
        third()
