"""The CUDA step of csrc/adamw_cuda.cu has the bits of the CPU's, in every storage mode."""

import itertools

import pytest
import torch
from cells import covering, slow
from test_adamw import (
    F32,
    HYPER,
    MODES,
    U8,
    Mode,
    State,
    clone,
    make,
    part,
    same_bits,
    step,
    step_flat,
)

from fastpar.kernels import Hyper, adamw, backend, choice
from fastpar.kernels.choice import STOCK, Case, Proof

CHUNK = 8192  # csrc/adamw_cuda.cu's kChunk
ARGUMENT_WORDS = 4088  # its kWords


def to(state: State, device: str) -> State:
    return {name: t.to(device) for name, t in state.items()}


def on_cpu(states: list[State], mode: Mode, **kwargs) -> list[State]:
    """The same step by the CPU kernel; the states stay as they are."""
    copies = [clone(to(state, "cpu")) for state in states]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "cuda_on_cpu", False)
        step(copies, mode, **kwargs)
    return copies


def check(states: list[State], mode: Mode, device: str, **kwargs) -> list[State]:
    """One step of clones on the device against the CPU's."""
    expected = on_cpu(states, mode, **kwargs)
    moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    got = [clone(to(state, device)) for state in states]
    step(got, mode, **moved)
    for before, one, wanted in zip(states, got, expected):
        back = to(one, "cpu")
        assert same_bits(back, wanted), [n for n in wanted if not back[n].equal(wanted[n])]
        if before["param"].numel() > 200:  # a few moments may be rounded back to what they were
            assert not back["exp_avg_sq"].equal(before["exp_avg_sq"])
    return got


@pytest.fixture(params=MODES, ids=lambda name: name.replace(" ", "-"))
def mode(request) -> Mode:
    return MODES[request.param]


@covering(1, ("mode", MODES.values()), ("offset", range(1, 9)), ("zero_grad", [False, True]))
def test_any_common_alignment(cuda_device, mode, offset, zero_grad):
    state = make(700, mode)
    expected = on_cpu([state], mode, zero_grad=zero_grad)
    everything = dict.fromkeys(state, offset)
    moved = shift_on(state, everything, cuda_device)
    step([moved], mode, zero_grad=zero_grad)
    assert same_bits(to(moved, "cpu"), expected[0])
    for name in state:  # pointers that are never aligned together
        moved = shift_on(state, {name: 1}, cuda_device)
        step([moved], mode, zero_grad=zero_grad)
        assert same_bits(to(moved, "cpu"), expected[0]), name


def shift_on(state: State, offsets: dict[str, int], device: str) -> State:
    moved = {}
    for name, t in state.items():
        offset = offsets.get(name, 0)
        room = torch.zeros(t.numel() + offset, dtype=t.dtype, device=device)
        moved[name] = room[offset:].copy_(t)
    return moved


def test_has_the_bits_of_the_cpu(cuda_device, mode):
    """Sizes around blocks and chunks; then maximize, zero_grad, a factor and a second step."""
    sizes = (0, 1, 7, 255, 256, 257, 2 * CHUNK + 300)
    check([make(n, mode, seed=i) for i, n in enumerate(sizes)], mode, cuda_device)
    state = make(CHUNK + 77, mode)
    options = {"maximize": True, "zero_grad": True, "grad_scale": torch.tensor(0.37)}
    (once,) = check([state], mode, cuda_device, **options)
    assert not once["grad"].any()
    once["grad"] = state["grad"].to(cuda_device) * 2
    check([to(once, "cpu")], mode, cuda_device, **options)


def test_hypers_are_read_on_the_device_and_not_on_the_host(cuda_device, monkeypatch):
    """Also where torch's step was the faster one: a CUDA graph could not capture it."""
    slower = Proof(STOCK, own_ms=(2.0, 0.0), instead_ms=(1.0, 0.0))
    monkeypatch.setitem(choice.proofs, Case(cuda_device, "adamw_step_", F32, 0), slower)
    monkeypatch.setattr(adamw, "_step_torch", lambda *_: pytest.fail("read on the host"))
    mode, values = MODES["fp32"], [torch.tensor(x) for x in (3e-3, 0.85, 0.99, 1e-7, 0.05, 12.0)]
    state = make(5000, mode)
    got = to(clone(state), cuda_device)
    step([got], mode, Hyper(*(x.to(cuda_device) for x in values)))
    monkeypatch.setattr(choice, "proofs", {})
    (expected,) = on_cpu([state], mode, hypers=Hyper(*(x.item() for x in values)))
    assert same_bits(to(got, "cpu"), expected)


def test_found_inf_leaves_all_but_gradients(cuda_device, mode):
    state = make(600, mode)
    for zero_grad in (False, True):
        got = clone(to(state, cuda_device))
        found = torch.ones((), device=cuda_device)
        step([got], mode, found_inf=found, zero_grad=zero_grad)
        wanted = clone(state)
        if zero_grad:
            wanted["grad"].zero_()
        assert same_bits(to(got, "cpu"), wanted)
    check([state], mode, cuda_device, found_inf=torch.zeros(()))


def count_launches(monkeypatch) -> list[int]:
    """Launches of each call from now on."""
    counts: list[int] = []
    run = backend.cuda_kernels.adamw_step_cuda
    monkeypatch.setattr(
        backend.cuda_kernels, "adamw_step_cuda", lambda *args: counts.append(run(*args))
    )
    return counts


def ranges_of_a_launch(mode: Mode) -> int:
    """[Note: one launch] of csrc/adamw_cuda.cu, for one hyper of 12 words."""
    random = mode.master == "stochastic" or mode.moment != F32
    pointers = 4 + mode.amsgrad + (mode.master in ("full", "remainder")) + 2 * (mode.moment == U8)
    return (ARGUMENT_WORDS - 12) // (1 + pointers + random)


@pytest.mark.parametrize(
    "mode",
    [n if n in ("bf16 full", "fp32 8-bit moments", "bf16 remainder") else slow(n) for n in MODES],
    indirect=True,
)
def test_many_tensors(cuda_device, mode, monkeypatch):
    """One launch up to the number that its argument holds, then a second."""
    limit = ranges_of_a_launch(mode)
    if mode == MODES["bf16 full"]:
        assert limit >= 580  # the tensors of GPT-2 XL
    counts = count_launches(monkeypatch)
    states = [make(3, mode, seed=i) for i in range(limit + 1)]
    check(states[:-1], mode, cuda_device)
    hypers = [HYPER._replace(lr=1e-3 * (i + 1), step=i + 1) for i in range(33)]
    check(states, mode, cuda_device)
    assert counts == [1, 2]
    index = [i % 33 for i in range(len(states))]
    check(states[:33], mode, cuda_device, hypers=hypers, hyper_index=index[:33])


def test_cuts_do_not_show(cuda_device, mode):
    n = CHUNK + 1024 + 13
    state = make(n, mode)
    expected = on_cpu([state], mode)
    cuts = [0, 256, 512 if mode.moment == U8 else 515, CHUNK + 256, n]
    whole = to(clone(state), cuda_device)
    ranges = [(a, b, 0, a) for a, b in itertools.pairwise(cuts)]
    step_flat(whole, ranges, mode)
    assert same_bits(to(whole, "cpu"), expected[0])
    parts = to(clone(state), cuda_device)
    views = [part(parts, a, b) for a, b in itertools.pairwise(cuts)]
    step(views, mode, first_indices=cuts[:-1])
    assert same_bits(to(parts, "cpu"), expected[0])


def test_values_at_the_edges(cuda_device):
    """Subnormal, huge and infinite gradients and masters; nans, whose payload may differ, apart."""
    values = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 1e38, -3e38, 65504.0, 1e-8, 3.0, float("inf")])
    for name in ("fp32", "bf16 full", "bf16 remainder", "fp16 full fp32 grad 8-bit moments"):
        mode = MODES[name]
        state = make(300, mode)
        state["grad"] = values.repeat(30).to(mode.grad)
        expected = on_cpu([state], mode)[0]
        got = to(clone(state), cuda_device)
        step([got], mode)
        for key, t in to(got, "cpu").items():
            if t.is_floating_point():
                assert torch.equal(t.isnan(), expected[key].isnan())
                t, expected[key] = t.nan_to_num(), expected[key].nan_to_num()
            assert torch.equal(t, expected[key]), (name, key)


@pytest.mark.gpu
def test_captured_in_a_cuda_graph(mode):
    """Replays equal eager steps: gradients, found_inf and step are read when a graph runs."""
    eager = to(make(3 * CHUNK + 5, mode), "cuda")
    captured, warm = clone(eager), clone(eager)
    at = torch.ones((), device="cuda")
    hyper = HYPER._replace(step=at)
    found, scale = torch.zeros((), device="cuda"), torch.full((), 0.5, device="cuda")
    step([warm], mode, hyper, grad_scale=scale, found_inf=found)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step([captured], mode, hyper, grad_scale=scale, found_inf=found)
    for i in range(1, 4):
        at.fill_(i)
        found.fill_(i == 2)
        step([eager], mode, hyper, grad_scale=scale, found_inf=found)
        graph.replay()
    assert same_bits(captured, eager)
