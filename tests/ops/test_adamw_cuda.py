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

from fastpar.kernels import Hyper, adamw, adamw_step_, backend, choice
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


def test_has_the_bits_of_the_cpu(cuda_device, mode):
    sizes = (0, 1, 7, 255, 256, 257, 2 * CHUNK + 300)
    states = [make(n, mode, seed=i) for i, n in enumerate(sizes)]
    check(states, mode, cuda_device)


def test_every_pair_of_types_with_all_features(cuda_device, mode):
    """maximize, zero_grad, a factor and two steps of a tensor that ends within a block."""
    scale = torch.tensor(0.37)
    state = make(CHUNK + 77, mode)
    kwargs = {"maximize": True, "zero_grad": True, "grad_scale": scale}
    (once,) = check([state], mode, cuda_device, **kwargs)
    assert not once["grad"].any()
    once["grad"] = state["grad"].to(cuda_device) * 2
    check([to(once, "cpu")], mode, cuda_device, **kwargs)


@covering(1, ("mode", MODES.values()), ("offset", range(1, 9)), ("zero_grad", [False, True]))
def test_any_common_alignment(cuda_device, mode, offset, zero_grad):
    state = make(700, mode)
    expected = on_cpu([state], mode, zero_grad=zero_grad)
    everything = dict.fromkeys(state, offset)
    moved = shift_on(state, everything, cuda_device)
    step([moved], mode, zero_grad=zero_grad)
    assert same_bits(to(moved, "cpu"), expected[0])


def shift_on(state: State, offsets: dict[str, int], device: str) -> State:
    moved = {}
    for name, t in state.items():
        offset = offsets.get(name, 0)
        room = torch.zeros(t.numel() + offset, dtype=t.dtype, device=device)
        moved[name] = room[offset:].copy_(t)
    return moved


def test_pointers_that_are_never_aligned_together(cuda_device, mode):
    state = make(700, mode)
    expected = on_cpu([state], mode, zero_grad=True)
    for name in state:
        moved = shift_on(state, {name: 1}, cuda_device)
        step([moved], mode, zero_grad=True)
        assert same_bits(to(moved, "cpu"), expected[0]), name


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


def test_hypers_are_read_on_the_device(cuda_device):
    mode = MODES["fp32"]
    values = (3e-3, 0.85, 0.99, 1e-7, 0.05, 12.0)
    on_device = Hyper(*(torch.tensor(x, device=cuda_device) for x in values))
    state = make(5000, mode)
    as_numbers = Hyper(*(torch.tensor(x).item() for x in values))
    expected = on_cpu([state], mode, hypers=as_numbers)
    got = to(clone(state), cuda_device)
    step([got], mode, on_device)
    assert same_bits(to(got, "cpu"), expected[0])


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
    check(states, mode, cuda_device)
    assert counts == [1, 2]


def test_many_hypers(cuda_device, monkeypatch):
    mode = MODES["fp32"]
    hypers = [HYPER._replace(lr=1e-3 * (i + 1), step=i + 1) for i in range(33)]
    counts = count_launches(monkeypatch)
    states = [make(40, mode, seed=i) for i in range(33)]
    expected = on_cpu(states, mode, hypers=hypers, hyper_index=range(33))
    got = [to(clone(s), cuda_device) for s in states]
    step(got, mode, hypers, hyper_index=range(33))
    assert counts == [2]
    assert all(same_bits(to(a, "cpu"), b) for a, b in zip(got, expected))


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


def test_fp64_takes_torchs_kernel(cuda_device):
    p = torch.randn(9, dtype=torch.float64, device=cuda_device)
    before = p.clone()
    adamw_step_([p], [p.clone()], [torch.zeros_like(p)], [torch.zeros_like(p)], HYPER)
    assert not p.equal(before)


def test_cuda_without_cuda_says_how_to_build(monkeypatch):
    monkeypatch.setattr(backend, "cuda_on_cpu", True)
    monkeypatch.setattr(backend, "cuda_kernels", None)
    with pytest.raises(RuntimeError, match=r"adamw_step_: expected .* put nvcc on the PATH"):
        step([make(4, MODES["fp32"])], MODES["fp32"])


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


def test_tensors_of_hyper_parameters_are_not_read_on_the_host(cuda_device, monkeypatch):
    """Also where torch's step was the faster one: a CUDA graph could not capture it."""
    slower = Proof(STOCK, own_ms=(2.0, 0.0), instead_ms=(1.0, 0.0))
    monkeypatch.setitem(choice.proofs, Case(cuda_device, "adamw_step_", torch.float32, 0), slower)
    monkeypatch.setattr(adamw, "_step_torch", lambda *_: pytest.fail("read on the host"))
    tensors = [torch.ones(100, device=cuda_device) for _ in range(4)]
    hyper = Hyper(torch.tensor(1e-2, device=cuda_device), 0.9, 0.95, 1e-8, 0.1, 1.0)
    adamw_step_(*([t] for t in tensors), hyper)
    assert not torch.equal(tensors[0], torch.ones_like(tensors[0]))
