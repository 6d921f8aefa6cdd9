"""Steps as CUDA graphs, of the trainer and of a loop of one's own: the same bits; what is refused;
what a capture forbids is found on a CPU."""

import contextlib
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from cells import slow, sweep
from pretend_cuda import pretend_cuda
from train_runs import TINY, Runs, curve

from fastpar import GPT, AdamW, GPTConfig, Mesh, Muon, engine_of, graphed, muon_groups, parallelize
from fastpar.comm.transports import ShmCollectives
from fastpar.kernels import adamw, choice, make_key
from fastpar.kernels.activation import triton as activation_triton
from fastpar.optim import adamw as optim
from fastpar.optim import base, graphs
from fastpar.optim.graphs import CaptureCheck, StepGraph
from fastpar.testing import run_ranks
from fastpar.train.trainer import Trainer

SMALL = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=64, dropout=0.1)
run = Runs(device="auto", max_steps=5, eval_every=2, save_every=0)


class Again:
    """In place of a CUDA graph: a replay runs the region once more, without the engine's hooks."""

    def __init__(self, region, warm_up):
        self.replay = region


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture
def captured(monkeypatch):
    """What was captured by now, on a CPU that has graphs."""
    found = []

    def capture(*args):
        found.append(args)
        return Again(*args)

    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(graphs, "has_graphs", lambda device: True)
    # A CPU's model looks at token ids; below is the check, on a GPU's way.
    monkeypatch.setattr(graphs, "CaptureCheck", contextlib.nullcontext)
    return found


def nothing(trainer):
    pass


def weights_of(out, asked, changes, prepare=nothing):
    """Of one rank, at the end of a run; prepare(trainer) comes before its third step."""
    trainer = run.trainer(**changes, out=out, cuda_graphs=asked)
    step = trainer.train_step

    def train_step():
        if trainer.step == 2:
            prepare(trainer)
        return step()

    trainer.train_step = train_step
    assert trainer.run() == 0
    return [p.detach().clone() for p in trainer.model.parameters()]


def same(found, expected):
    return all(map(torch.equal, found, expected))


TWO = {"micro_batch_size": 2}


@pytest.mark.parametrize(
    "changes",
    [
        {**TWO, "dtype": "bf16", "on_nonfinite": "skip", "ema": 0.9},
        slow({"dtype": "bf16", "stochastic_rounding": True, "max_grad_norm": 0.0}),
    ],
)
def test_a_replayed_run_has_the_same_bits(here, captured, changes):
    expected = weights_of("plain", False, changes)
    assert not captured
    found = weights_of("graphs", True, changes)
    assert len(captured) == 1
    assert curve("graphs") == curve("plain")
    assert same(found, expected)


def test_a_run_goes_on_with_and_without_graphs(here, captured):
    """Counters, rates and masters that a graph reads on the device are saved as ever."""
    same_rates = {"min_lr": TINY["lr"], "warmup_steps": 0}  # whatever max_steps is

    def go(out, asked, max_steps=6, **changes):
        changes |= {"dtype": "bf16", "max_steps": max_steps, "save_every": 6}
        return weights_of(out, asked, {**same_rates, **changes})

    for out, asked in (("plain", False), ("graphs", True)):
        go(out, asked)
    expected = go("plain", False, 12, resume=True)
    assert not same(go("graphs", True, 11, resume=True), expected)
    assert same(go("graphs", False, 12, resume=True), expected)
    assert len(captured) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"zero_stage": 0, "micro_batch_size": 2},
        {"zero_stage": 2, "dtype": "bf16", "on_nonfinite": "skip", "ema": 0.9},
        slow({"zero_stage": 3, "micro_batch_size": 2, "dtype": "bf16", "eval_every": 1}),
    ],
)
def test_a_replayed_run_of_ranks_has_the_same_bits(here, captured, monkeypatch, changes):
    """With validations and saves between steps, and a resume."""
    monkeypatch.setattr(ShmCollectives, "captures", True)
    changes |= {"max_steps": 6, "save_every": 3}
    for out, asked in (("plain", False), ("graphs", True)):
        run(out, 2, cuda_graphs=asked, **changes)
        changes_after = {**changes, "max_steps": 11, "min_lr": TINY["lr"], "resume": True}
        run(out, 2, cuda_graphs=asked, **changes_after)
    assert len(captured) == 4
    assert curve("graphs") == curve("plain")


def test_ranks_agree_on_requests_beside_replays(here, captured, monkeypatch):
    """One rank alone is told to stop: all read that from the sums of the same step."""
    monkeypatch.setattr(ShmCollectives, "captures", True)
    asks = Trainer._requests

    def requests(trainer):
        if trainer.step == 5 and trainer.mesh.rank == 1:
            trainer.stop_signals.append(15)
        return asks(trainer)

    monkeypatch.setattr(Trainer, "_requests", requests)
    run("r", 2, status=128 + 15, cuda_graphs=True, max_steps=9, zero_stage=1)
    assert len(captured) == 2
    assert curve("r")[-1]["step"] == 6


def test_what_is_captured_and_said(here, captured, monkeypatch):
    """By default where steps can be; where they are asked for and cannot be, the reason."""

    def said(changes):
        trainer = run.trainer(**changes)
        assert (trainer.step_graph is None) == ("graphs" not in trainer._facts)
        return trainer._facts.get("graphs", "")

    for ranks, changes, expected in (
        (1, {}, "of the whole step"), (1, {"cuda_graphs": False}, ""),
        (1, {"optimizer": "muon"}, ""), (1, {"activation_checkpointing": "full"}, ""), (2, {}, ""),
    ):  # fmt: skip
        assert run_ranks(said, ranks, changes)[0] == expected, changes
    with pytest.raises(ValueError, match=r"no CUDA graph can hold these steps: .* own: shm"):
        run_ranks(said, 2, {"cuda_graphs": True})
    monkeypatch.setattr(ShmCollectives, "captures", True)
    assert "NCCL inside graphs never ran" in run_ranks(said, 2, {"cuda_graphs": True})[0]
    assert run_ranks(said, 2, {}) == [""] * 2
    for changes, why in (
        ({"deterministic": True}, "in a tree"),
        ({"optimizer": "adafactor"}, "numbers on the host"),
        ({"nproc": 2, "tp": 2}, "data-parallel ranks alone"),
        ({"nproc": 2, "pp": 2}, "data-parallel ranks alone"),
        ({"nproc": 2, "wire_gradients": "int8"}, "random bits come from the host"),
    ):
        with pytest.raises(ValueError, match=why):
            run.trainer(cuda_graphs=True, **changes)
    monkeypatch.undo()
    assert said({}) == ""  # no GPU


@contextlib.contextmanager
def finds(known):
    raise RuntimeError("CaptureCheck: expected operations that a CUDA graph can hold, got x; keep ")
    yield


def halve(trainer):
    trainer.micro_batch_size //= 2


def hook(trainer):
    trainer.model.wte.weight.register_hook(lambda grad: None)


def check(trainer):
    graphs.CaptureCheck = finds  # the fixture puts its own back


@pytest.mark.parametrize(
    ("prepare", "settings", "said"),
    [
        (nothing, {"dtype": "bf16", "moment_dtype": "int8"}, "graphs   of the whole step"),
        (hook, {"dtype": "bf16", "on_nonfinite": "skip"}, "expected no hooks"),
        (halve, {"ema": 0.9}, "expected every step like the first one"),
        (check, {}, "CaptureCheck: expected operations that a CUDA graph can hold"),
    ],
)
def test_a_run_goes_on_without_its_graphs(here, capfd, captured, prepare, settings, said):
    expected = weights_of("plain", False, {**TWO, **settings}, prepare)
    assert "graphs  " not in capfd.readouterr().out
    found = weights_of("graphs", None, {**TWO, **settings}, prepare)
    out = capfd.readouterr().out
    assert said in out
    assert ("graphs   none from step 3 on: " in out) == (prepare is not nothing)
    assert len(captured) == (prepare is nothing)
    assert curve("graphs") == curve("plain")
    assert same(found, expected)


def ids(rows, length=16):
    return torch.arange(rows * length).view(rows, length) % 64


def compute_of(model):
    def compute(x, key, scale):
        loss = model(x, x, rng_key=key)
        (loss if scale is None else loss * scale).backward()
        return loss.detach()

    return compute


def test_what_a_step_graph_refuses(captured, monkeypatch):
    model = parallelize(GPT(SMALL).train(), Mesh())
    graph = StepGraph(compute_of(model), model, engine_of(model), AdamW(model.parameters()))
    one, unlike = (ids(2), make_key(1, 0)), r"expected every step like the first one, .* pad them"
    graph([one], None)
    handle = model.h[1].register_forward_hook(lambda *args: None)
    with pytest.raises(ValueError, match=r"expected no hooks, got one of 'h\.1', which"):
        graph([one], None)
    handle.remove()
    for batches, scale in (([(ids(1), one[1])], None), ([one] * 2, None), ([one], 1.0)):
        with pytest.raises(ValueError, match=unlike):
            graph(batches, scale)
    graph._compute = lambda x, key, scale: torch.zeros(())
    with pytest.raises(RuntimeError, match=r"expected a gradient of every parameter, got none of"):
        graph([one], None)


def test_why_there_is_no_graph(captured, monkeypatch):
    def why(config=SMALL, optimizer=AdamW, **settings):
        model = parallelize(GPT(config).train(), Mesh(), **settings)
        params = muon_groups(model) if optimizer is Muon else model.parameters()
        return graphed(lambda x: model(x, x), model, optimizer(params, lr=0.01)).why

    assert why() == ""
    assert why(GPTConfig(**{**vars(SMALL), "n_expert": 2})).startswith("the counts of experts")
    assert why(optimizer=Muon) == "Muon reads its numbers on the host"
    assert why(deterministic=True) == "the host sums micro-batches in a tree"
    assert run_ranks(why, 2)[0].startswith("collectives are not NCCL's own: shm (all r")
    monkeypatch.undo()
    assert why() == "cpu has no CUDA graphs"
    with pytest.raises(ValueError, match="engine_of: GPT has no engine"):
        graphed(None, GPT(SMALL), None)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_loop_of_ones_own_has_the_same_bits(captured, monkeypatch, parts):
    """With a graph, without one, and written out; a step of another shape ends the graph."""

    def losses(kind):
        torch.manual_seed(0)
        model = parallelize(GPT(SMALL).train(), Mesh())
        optimizer = AdamW(model.parameters(), lr=2.0**-7, max_grad_norm=1.0)  # exact in fp32
        step = graphed(lambda x, key: model(x, x, rng_key=key), model, optimizer)
        found = []
        for i in range(7):
            rows = 1 if i == 6 else 2
            batches = [(ids(rows), make_key(1, 4 * i + 2 * j)) for j in range(parts)]
            if kind == "by hand":
                shares = [model(x, x, rng_key=key) / parts for x, key in batches]
                for share in shares:
                    share.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(sum(share.double() for share in shares).item())
            elif i == 6 and kind == "graph":
                with pytest.warns(UserWarning, match="without a CUDA graph from now on: StepGraph"):
                    found.append(step(*batches).item())
                assert "expected every step like the first one" in step.why
            else:
                found.append(step(*(batches if parts > 1 else batches[0])).item())
        return found

    found = losses("graph")
    assert len(captured) == 1
    monkeypatch.setattr(graphs, "has_graphs", lambda device: False)
    assert losses("no graph") == found
    assert losses("by hand") == found
    assert len(captured) == 1


def train(device, with_graph, dtype, scaled):
    """What seven steps of two micro-batches each give, one of them an overflow if scaled."""
    torch.manual_seed(0)
    model = GPT(SMALL).to(device, dtype).train()
    engine = engine_of(parallelize(model, Mesh(device=device), grad_dtype=torch.float32))
    masters = dtype != torch.float32
    optimizer = AdamW(model.parameters(), lr=0.01, master_weights=masters, max_grad_norm=1.0)
    compute = compute_of(model)
    graph = StepGraph(compute, model, engine, optimizer) if with_graph else None
    found = []
    for step in range(7):
        scale = None if not scaled else 2.0**127 if step == 4 else 2.0 ** (step % 3)
        batches = [(ids(2).to(device), make_key(1, 4 * step + 2 * j).to(device)) for j in range(2)]
        optimizer.param_groups[0]["lr"] = 2.0**-step
        if graph is None:
            loss = torch.zeros((), dtype=torch.float64, device=device)
            for batch in batches:
                loss += compute(*batch, scale)
            if scaled:
                optimizer.grad_scale = scale
            optimizer.step()
        else:
            loss = graph(batches, scale)
        optimizer.zero_grad()
        found += [loss.item(), str(optimizer.grad_norm.item()), optimizer.skipped]
    counters = {float(s["step"]) for s in optimizer.state.values()}
    return [*found, counters], [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_have_the_same_bits(request, device, monkeypatch, dtype):
    """On a CPU with a stand-in for graphs, so that the GPU's test is known to run."""
    if device == "cpu":
        captured = request.getfixturevalue("captured")
    scaled = dtype == torch.bfloat16
    plain, values = train(device, False, dtype, scaled)
    again, found = train(device, True, dtype, scaled)
    assert plain[-1] == {6.0 if scaled else 7.0}
    assert again == plain
    assert same(found, values)
    if device == "cpu":
        assert len(captured) == 1


kept = []
outside = torch.ones(4)
FORBIDDEN = {
    "item": (lambda x: x.sum().item(), "reads a value: _local_scalar_dense"),
    "tolist": (lambda x: x.tolist(), r"reads a value: Tensor\.tolist"),
    "cpu": (lambda x: x.cpu(), r"reads a value: Tensor\.cpu"),
    "numpy": (lambda x: x.numpy(), r"reads a value: Tensor\.numpy"),
    "equal": (lambda x: torch.equal(x, x + 1), "reads a value: equal"),
    "nonzero": (lambda x: x.nonzero(), "how large the result is: nonzero"),
    "mask": (lambda x: x[x > 0], "how large the result is: index"),
    "unique": (lambda x: x.unique(), "how large the result is: _unique2"),
    "synchronize": (lambda x: torch.cuda.synchronize(), r"waits for the device: torch\.cuda"),
    "event": (lambda x: torch.cuda.Event.synchronize(x), r"the device: Event\.synchronize"),
    "query": (lambda x: torch.cuda.Event.query(x), r"waits for the device: Event\.query"),
    "resize": (lambda x: x.untyped_storage().resize_(0), "static memory is freed: resize_"),
    "record": (lambda x: torch.cuda.Event.record(x), "record the event again"),
    "pin": (lambda x: x.pin_memory(), "host memory is pinned"),
    "key": (lambda x: make_key(1, 2), "a number of the host: lift_fresh"),
    "alive": (lambda x: kept.append(x * 2), "outlives the graph: mul"),
    "address": (lambda x: x + outside, "not static is used: add"),
    "meta": (lambda x: x.to("meta"), "exchange values: _to_copy"),
}


@pytest.mark.slow
@sweep("act", FORBIDDEN)
def test_what_a_capture_forbids_is_found(act):
    do, why = FORBIDDEN[act]
    x = torch.arange(4.0)
    why = f"CaptureCheck: expected .* got .*{why}"
    with pytest.raises(RuntimeError, match=why) as error, CaptureCheck([x]):
        do(x)
    assert f"{'philox.py' if act == 'key' else __file__}:" in str(error.value)
    kept.clear()
    assert x.tolist() == [0, 1, 2, 3]  # the patches are gone


class _Event:
    """Has the method that is torch's at the time of the call."""

    record = property(lambda self: partial(torch.cuda.Event.record, "event"))


@pytest.mark.slow
def test_what_a_capture_allows_passes(monkeypatch):
    """Other threads go on, too: a watchdog waits for its events, a save copies to the host."""
    x, out, weight = torch.arange(4.0), torch.empty(4), torch.ones(4, requires_grad=True)
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
    empty = torch.empty(4)
    empty.untyped_storage().resize_(0)
    with CaptureCheck([empty]):
        empty.untyped_storage().resize_(16)
        empty.add_(1)
        empty.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="empty before is kept"), CaptureCheck([empty]):
        empty.untyped_storage().resize_(16)
    recorded = []
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda.Event, "record", lambda *args: recorded.append(args))
        with CaptureCheck([x]):  # fork and join of streams
            torch.cuda.Stream.record_event("stream", _Event())
    assert recorded == [("event", "stream")]
    with pytest.raises(ZeroDivisionError), CaptureCheck([outside]):  # an error is not hidden
        1 / 0  # noqa: B018


def after_two_steps(monkeypatch, dtype=torch.float32, scale=None, **options):
    """The optimizer of a StepGraph, and its third step of two micro-batches, on a GPU's way."""
    module = sys.modules["fastpar.kernels.loss.linear_cross_entropy"]  # torch has it on CUDA alone
    monkeypatch.setattr(module, "wide_product", lambda a, b, *_: a.float() @ b.float())
    # As on a GPU: behind the dispatcher the tensors say that they are on a CPU.
    monkeypatch.setattr(module, "workspace", lambda m, n, like: like.new_empty(m, n))
    model = parallelize(GPT(SMALL).to(dtype).train(), Mesh(), grad_dtype=torch.float32)
    optimizer = AdamW(model.parameters(), max_grad_norm=1.0, **options)
    graph = StepGraph(compute_of(model), model, engine_of(model), optimizer)
    batches = [(ids(2), make_key(1, 2 * j)) for j in range(2)]
    for _ in range(2):
        graph(batches, scale)

    def third():
        with pretend_cuda() as launched:
            graph(batches, scale)
        return launched

    return optimizer, third


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "scale", "options"),
    [
        (torch.float32, None, {}),
        (torch.float16, 4.0, {"master_weights": True}),
        (torch.bfloat16, None, {"master_weights": "remainder", "moment_dtype": torch.uint8}),
    ],
)
def test_a_whole_step_can_be_captured(monkeypatch, dtype, scale, options):
    optimizer, third = after_two_steps(monkeypatch, dtype, scale, **options)
    launched = third()
    assert launched.count("_attention_fwd_kernel") == 4  # of two layers and micro-batches
    assert launched[-1] == "adamw_step_cuda"
    assert {"norm_finish_cuda", "_layer_norm_bwd_kernel"} <= set(launched), launched
    counters = {float(s["step"]) for s in optimizer.state.values()}
    assert scale or counters == {3.0}, counters  # under a scale the flag that counts is not written


def test_a_step_may_tell_the_library_who_serves(monkeypatch):
    _, third = after_two_steps(monkeypatch)
    norm = base.norm_of_rows

    def tells(*args, **kwargs):
        choice.forget_recipes()
        return norm(*args, **kwargs)

    monkeypatch.setattr(base, "norm_of_rows", tells)
    third()


@pytest.mark.parametrize(
    ("owner", "place"),
    [
        (activation_triton, "activation_fwd"),
        (activation_triton, "activation_bwd"),
        (base, "norm_of_rows"),
        (optim, "adamw_step_"),
        (optim, "_count"),
        (None, "torch's AdamW"),
    ],
)
def test_what_a_step_reads_on_the_host_is_found(monkeypatch, owner, place):
    """Inside of ops, too: in what launches a kernel, in forward and in backward."""
    _, third = after_two_steps(monkeypatch)

    def reads(*args, **kwargs):
        x = args[0]
        return (x[0] if isinstance(x, list) else x).sum().item()

    if owner is not None:
        monkeypatch.setattr(owner, place, reads)
    else:  # through the dispatcher, which says that the tensors are on a CPU
        monkeypatch.setattr(adamw, "_is_direct", lambda columns: False)
    where = "adamw" if owner is None else "test_cuda_graphs"
    with pytest.raises(RuntimeError, match=rf"reads a value: \w*(item|dense) at .*{where}.py"):
        third()
