"""adamw_step_ beyond test_cases.py and optim/test_steps.py: what every storage mode keeps; the same
bits however the work is cut, on a CPU and in CUDA; the forms of the state against their definition;
what is refused.

Statistical tests say 5.5 standard deviations: a false alarm in less than 1 of 10^7 runs, and none
once a seed has passed, since every random number here is a function of seeds.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from cells import sweep

from fastpar.kernels import _C, Hyper, adamw, adamw_step_, backend, choice
from fastpar.kernels.adamw import (
    MOMENT_BLOCK,
    decode_moment,
    encode_moment,
    master_join,
    master_split,
    new_moment,
    round_to_bf16,
)
from fastpar.kernels.choice import STOCK, Case, Proof
from fastpar.kernels.lists import rows_of

HYPER = Hyper(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=3)
SIGMAS = 5.5
F32, BF16, F16, U8 = torch.float32, torch.bfloat16, torch.float16, torch.uint8
SEED = 11


@dataclass(frozen=True)
class Mode:
    param: torch.dtype
    grad: torch.dtype
    moment: torch.dtype = F32
    master: str = "none"
    amsgrad: bool = False


MODES = {
    "fp32": Mode(F32, F32),
    "fp32 amsgrad": Mode(F32, F32, amsgrad=True),
    "fp32 bf16 moments": Mode(F32, F32, BF16),
    "fp32 8-bit moments": Mode(F32, F32, U8),
    "bf16 full": Mode(BF16, BF16, master="full"),
    "bf16 full fp32 grad": Mode(BF16, F32, master="full"),
    "bf16 full fp16 grad": Mode(BF16, F16, master="full"),
    "bf16 full bf16 moments amsgrad": Mode(BF16, BF16, BF16, "full", True),
    "fp16 full": Mode(F16, F16, master="full"),
    "fp16 full bf16 grad": Mode(F16, BF16, master="full"),
    "fp16 full fp32 grad 8-bit moments": Mode(F16, F32, U8, "full"),
    "bf16 remainder": Mode(BF16, BF16, master="remainder"),
    "bf16 remainder fp32 grad 8-bit moments": Mode(BF16, F32, U8, "remainder"),
    "bf16 stochastic": Mode(BF16, BF16, master="stochastic"),
    "bf16 stochastic fp32 grad bf16 moments": Mode(BF16, F32, BF16, "stochastic"),
    "bf16 stochastic 8-bit moments": Mode(BF16, BF16, U8, "stochastic"),
}
NAMES = ("param", "grad", "exp_avg", "exp_avg_sq", "master", "max", "exp_avg_scale",
         "exp_avg_sq_scale")  # fmt: skip
KEYWORDS = dict(
    zip(NAMES[4:], ("master_weights", "max_exp_avg_sqs", "exp_avg_scales", "exp_avg_sq_scales"))
)
State = dict[str, torch.Tensor]


def zeros(*shape: int, dtype: torch.dtype = F32) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=dtype)]


def make(n: int, mode: Mode, seed: int = 0) -> State:
    generator = torch.Generator().manual_seed(seed)
    p, g, m, v, w = (torch.randn(n, generator=generator) for _ in range(5))
    state = {"grad": g.to(mode.grad)}
    for name, values in (("exp_avg", m * 0.1), ("exp_avg_sq", v**2 * 0.1)):
        if mode.moment == U8:
            signed = name == "exp_avg"
            state[name], state[f"{name}_scale"] = encode_moment(values, signed=signed)
        else:
            state[name] = values.to(mode.moment)
    if mode.amsgrad:
        state["max"] = (w**2 * 0.1).to(mode.moment)
    if mode.master == "full":
        state["master"] = p
        state["param"] = master_split(p)[0] if mode.param == BF16 else p.to(mode.param)
    elif mode.master == "remainder":
        state["param"], state["master"] = master_split(p)
    else:
        state["param"] = p.to(mode.param)
    return state


def clone(state: State, device: str | None = None) -> State:
    return {name: t.to(device or t.device, copy=True) for name, t in state.items()}


def step(states: list[State], mode: Mode, hypers=HYPER, **kwargs) -> None:
    """adamw_step_ on a list of states."""
    lists = {name: [s[name] for s in states] for name in NAMES if name in states[0]}
    optional = {word: lists[name] for name, word in KEYWORDS.items() if name in lists}
    kwargs.setdefault("stochastic_rounding_seed", SEED if mode.master == "stochastic" else None)
    adamw_step_(*(lists[name] for name in NAMES[:4]), hypers, **optional, **kwargs)


def part(state: State, start: int, stop: int) -> State:
    def cut(name, t):
        return t[start // 256 : -(-stop // 256)] if name.endswith("scale") else t[start:stop]

    return {name: cut(name, t) for name, t in state.items()}


def same_bits(a: State, b: State) -> bool:
    return all(torch.equal(a[n].to(b[n].device).view(U8), b[n].view(U8)) for n in b)


@pytest.fixture(params=MODES, ids=lambda name: name.replace(" ", "-"))
def mode(request) -> Mode:
    return MODES[request.param]


def widened(state: State, mode: Mode) -> State:
    """The same numbers in plain fp32 form."""
    wide = {name: t.float() for name, t in state.items() if name in (*NAMES[:4], "max")}
    if mode.moment == U8:
        for name in ("exp_avg", "exp_avg_sq"):
            scale = state[f"{name}_scale"]
            wide[name] = decode_moment(state[name], scale, signed=name == "exp_avg")
    if mode.master == "full":
        wide["param"] = state["master"]
    elif mode.master == "remainder":
        wide["param"] = master_join(state["param"], state["master"])
    return clone(wide)


# The step


def test_odd_calls():
    """Nothing; two types at once; a dimension of one; nan and inf."""
    adamw_step_([], [], [], [], HYPER)
    low, high = make(100, MODES["bf16 full"]), make(50, MODES["fp32"])
    alone = clone(low), clone(high)
    step([alone[0]], MODES["bf16 full"])
    step([alone[1]], MODES["fp32"])
    both = ([a, b] for a, b in ((low[name], high[name]) for name in NAMES[:4]))
    adamw_step_(*both, HYPER, master_weights=[low["master"], None])
    assert same_bits(low, alone[0])
    assert same_bits(high, alone[1])
    p, m = torch.ones(1, 5), torch.empty_strided((1, 5), (9, 1)).zero_()
    adamw_step_([p], [torch.ones(1, 5)], [m], zeros(1, 5), HYPER._replace(step=1))
    torch.testing.assert_close(p, torch.full((1, 5), 1 - 1e-3 - 1e-2))
    p, g = torch.zeros(3), torch.tensor([torch.nan, torch.inf, 1.0])
    adamw_step_([p], [g], zeros(3), zeros(3), HYPER)
    assert p.isnan().tolist() == [True, True, False]


def test_torchs_kernel_skips_and_zeroes(monkeypatch):
    """Where torch's fused AdamW serves; test_cases.py has its other keywords."""
    state, mode = make(50, MODES["bf16 full"]), MODES["bf16 full"]
    monkeypatch.setattr(backend, "choice", "torch")
    before = clone(state)
    step([state], mode, found_inf=torch.ones(()), zero_grad=True)
    assert not state.pop("grad").any()
    assert same_bits(before, state)


# Storage modes


def bf16_neighbours(x):
    low = (x.view(torch.int32) & ~0xFFFF).view(F32)
    high = ((x.view(torch.int32) & ~0xFFFF) + 0x10000).view(F32)
    return low, high


def assert_fair(stored, low, high, exact):
    """stored is low or high, with probabilities that make its expectation exact."""
    stored, low, high, exact = (t.double() for t in (stored, low, high, exact))
    assert ((stored == low) | (stored == high) | (stored == exact)).all()
    chance = (exact - low) / (high - low)
    surprise = (stored == high).double() - chance
    deviation = (chance * (1 - chance)).sum().sqrt()
    assert deviation > 10  # there was something to draw
    assert surprise.sum().abs() <= SIGMAS * deviation
    # And not in halves that cancel: where the upper neighbour is likely, where it is not.
    for where in (chance < 0.3, chance > 0.7):
        deviation = (chance * (1 - chance))[where].sum().sqrt()
        assert surprise[where].sum().abs() <= SIGMAS * deviation


def test_every_mode_is_fp32s_step_and_then_stored(mode):
    """The step of the widened state, bit for bit, then each array rounded as its form says."""
    n = 20_011
    state = make(n, mode)
    wide = widened(state, mode)
    step([wide], MODES["fp32"])
    step([state], mode)
    exact = wide["param"]
    if mode.master == "stochastic":
        assert_fair(state["param"].float(), *bf16_neighbours(exact), exact)
    elif mode.param == BF16:
        assert torch.equal(state["param"], master_split(exact)[0])
    else:
        assert torch.equal(state["param"], exact.to(mode.param))
    if mode.master == "full":
        assert torch.equal(state["master"], exact)
    if mode.master == "remainder":
        assert torch.equal(state["master"], master_split(exact)[1])
    for name in ("exp_avg", "exp_avg_sq", "max"):
        if name not in state:
            continue
        if mode.moment == F32:
            assert torch.equal(state[name], wide[name])
        elif mode.moment == BF16:
            assert_fair(state[name].float(), *bf16_neighbours(wide[name]), wide[name])
        else:
            assert_fair_codes(state[name], state[name + "_scale"], wide[name], name == "exp_avg")


def assert_fair_codes(codes, scale, exact, signed):
    n = exact.numel()
    blocks = torch.nn.functional.pad(exact, (0, -n % 256)).view(-1, 256)
    assert torch.equal(scale, blocks.abs().amax(1))
    values = decode_moment(codes, scale, signed=signed)
    assert (values[exact == 0] == 0).all()
    if not signed:
        assert (codes[exact > 0] > 0).all()
    table = torch.arange(128 if signed else 256, dtype=U8)
    levels = decode_moment(table, torch.ones(1), signed=signed)
    ratio = exact.abs().double() / scale.repeat_interleave(256)[:n].double()
    upper = torch.bucketize(ratio, levels.double()).clamp(1, len(levels) - 1)
    wide = scale.repeat_interleave(256)[:n]
    drawn = (ratio > 1.001 * levels[1]) & (ratio < 1)  # below, 1 is exp_avg_sq's only code
    # A ratio next to a level may be rounded to its other side: take those as on the level.
    off = torch.minimum((ratio - levels[upper - 1]).abs(), (ratio - levels[upper]).abs())
    near = off < 1e-5 * ratio
    where = drawn & ~near
    low, high = levels[upper - 1] * wide, levels[upper] * wide
    assert_fair(values.abs()[where], low[where], high[where], exact.abs()[where])
    assert (values.sign() * exact.sign() >= 0).all()


def test_random_bits_depend_on_seed_step_and_index_only():
    mode = MODES["bf16 stochastic 8-bit moments"]
    n = 4096

    def run(seed=SEED, t=3, first=0):
        state = make(n, mode)
        options = {"stochastic_rounding_seed": seed, "first_indices": [first]}
        step([state], mode, HYPER._replace(step=t, lr=0.0), **options)
        return state

    first = run()
    assert same_bits(run(), first)
    for other in (run(seed=SEED + 1), run(t=4), run(first=256), run(first=2**32)):
        for name in ("exp_avg", "exp_avg_sq"):
            assert not torch.equal(other[name], first[name])
    # No two of parameter, exp_avg and exp_avg_sq share their draws: with the same exact values and
    # the same bits they would be rounded up together.
    state = {name: torch.ones(n, dtype=BF16) for name in ("param", "exp_avg", "exp_avg_sq")}
    hyper = Hyper(lr=2**-4, beta1=0.9, beta2=0.9, eps=0.0, weight_decay=0.0, step=1)
    grad = {"grad": torch.full((n,), 1.0 + 2**-5)}
    step([state | grad], Mode(BF16, F32, BF16, "stochastic"), hyper)
    ups = torch.stack([(x > x.min()).double() for x in state.values()])
    assert (ups.mean(1) > 0.01).all()
    assert (ups.mean(1) < 0.99).all()
    assert (torch.corrcoef(ups) - torch.eye(3)).abs().max() < SIGMAS / n**0.5


def test_same_bits_for_any_cut_threads_and_isa(mode, isas):
    """Also of indices that cross 2^32, and of empty pieces."""
    n, at = 70_003, 2**32 - 16_384 - 512
    start, unit = make(n, mode), 256 if mode.moment == U8 else 1
    expected = clone(start)
    step([expected], mode, threads=1, first_indices=[at])
    far = (16_384, 16_384, 16_384 + unit, n - n % 256 - unit)
    for isa in isas():
        for threads, cuts in ((1, ()), (3, (unit,)), (2, (5 * unit, 7 * unit, *far))):
            pairs = list(itertools.pairwise((0, *cuts, n)))
            got = clone(start)
            pieces, firsts = [part(got, *pair) for pair in pairs], [at + a for a, _ in pairs]
            step(pieces, mode, threads=threads, first_indices=firsts)
            assert same_bits(got, expected), (isa, threads, cuts)


def test_alignment_torture(mode):
    """Every offset of 0 to 63 bytes and every tail, with bytes around the arrays left alone."""
    before = make(70, mode)
    for n in range(71):
        expected = clone(part(before, 0, n))
        step([expected], mode, zero_grad=True)
        # Few of the long ones: a tail is the rest of a division by at most 64 elements.
        for offset in range(64) if n % 23 == 0 or n < 4 else (n % 64,):
            state, fenced, inside = {}, {}, {}
            for name, t in part(before, 0, n).items():
                fenced[name] = torch.full((t.nbytes + 256,), 0xA5, dtype=U8)
                at = -fenced[name].data_ptr() % 64 + offset // t.itemsize * t.itemsize
                inside[name] = slice(at, at + t.nbytes)
                state[name] = fenced[name][inside[name]].view(t.dtype).copy_(t)
            step([state], mode, zero_grad=True)
            for name, t in expected.items():
                want = torch.full_like(fenced[name], 0xA5)
                want[inside[name]] = t.view(U8)
                assert torch.equal(fenced[name], want), (name, n, offset)


@sweep("zero_grad", [False, True])
def test_what_tensors_say_is_read_by_the_step(mode, zero_grad):
    """Hypers; a found_inf, which leaves all but gradients. A power of two commutes with every
    rounding of the gradient, a sign with all."""
    n = 5000
    hyper = Hyper(*(float(torch.tensor(x)) for x in HYPER))  # what fp32 holds
    before = make(n, mode)
    expected = clone(before)
    step([expected], mode, hyper, zero_grad=zero_grad)
    for names in (Hyper._fields, ("lr",), ("step",), ("beta1", "beta2")):
        got = clone(before)
        tensors = {name: torch.tensor(getattr(hyper, name)) for name in names}
        step([got], mode, hyper._replace(**tensors), zero_grad=zero_grad)
        assert same_bits(got, expected)
    for found in (0.0, 1.0, float("nan")):
        got, skipped = clone(before), clone(before)
        if zero_grad:
            skipped["grad"].zero_()
        step([got], mode, hyper, found_inf=torch.tensor(found), zero_grad=zero_grad)
        assert same_bits(got, skipped if found else expected)
    got = clone(before)
    got["grad"] = -got["grad"] * 4
    step([got], mode, hyper, grad_scale=torch.tensor(0.25), maximize=True)
    del expected["grad"]
    assert same_bits(got, expected)


def test_a_block_with_an_infinity_is_lost_and_no_other():
    mode = MODES["fp32 8-bit moments"]
    for wrong in (torch.inf, torch.nan):
        state = make(768, mode)
        state["grad"][300] = wrong
        step([state], mode)
        for name in ("exp_avg", "exp_avg_sq"):
            finite = state[name + "_scale"].isfinite().tolist()
            assert finite == [True, False, True]
            values = decode_moment(state[name], state[name + "_scale"], signed=name == "exp_avg")
            assert values[:256].isfinite().all()
            assert not values[300].isfinite()


@pytest.mark.slow
def test_more_than_2_to_the_31_elements():
    """Parameter, gradient and codes take 13 GB; windows are compared with runs of their own."""
    n = 2**31 + 5
    mode = MODES["bf16 stochastic 8-bit moments"]
    state = {
        "param": torch.full((n,), 0.5, dtype=BF16),
        "grad": torch.full((n,), 0.25, dtype=BF16),
        "exp_avg": torch.full((n,), 40, dtype=U8),
        "exp_avg_sq": torch.full((n,), 200, dtype=U8),
        "exp_avg_scale": torch.full((n // 256 + 1,), 0.1),
        "exp_avg_sq_scale": torch.full((n // 256 + 1,), 0.1),
    }
    windows = ((0, 1024), (2**30, 2**30 + 768), (2**31 - 512, n))
    kept = []
    for start, stop in windows:
        part(state, start, stop)["grad"].copy_(torch.randn(stop - start))
        kept.append(clone(part(state, start, stop)))
    step([state], mode, threads=2)
    for (start, stop), window in zip(windows, kept):
        step([window], mode, first_indices=[start])
        assert same_bits(part(state, start, stop), window)


# In CUDA: csrc/adamw_cuda.cu has the bits of the CPU's step

CHUNK = 8192  # its kChunk


def on_cpu(states: list[State], mode: Mode, *args, **kwargs) -> list[State]:
    """The same step by the CPU kernel; the states stay as they are."""
    copies = [clone(state, "cpu") for state in states]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "cuda_on_cpu", False)
        step(copies, mode, *args, **kwargs)
    return copies


def check(states: list[State], mode: Mode, device: str, hypers=HYPER, **kwargs) -> None:
    """One step of clones on the device against the CPU's."""
    expected = on_cpu(states, mode, hypers, **kwargs)
    moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()}
    got = [clone(state, device) for state in states]
    step(got, mode, hypers, **moved)
    assert all(map(same_bits, got, expected))


def test_cuda_has_the_bits_of_the_cpu(cuda_device, mode):
    """Sizes around blocks and chunks; each option; pieces; all kinds of alignment."""
    sizes = (0, 1, 7, 255, 256, 257, 2 * CHUNK + 300)
    check([make(n, mode, seed=i) for i, n in enumerate(sizes)], mode, cuda_device)
    state = make(CHUNK + 77, mode)
    scaled = {"maximize": True, "zero_grad": True, "grad_scale": torch.tensor(0.37)}
    check([state], mode, cuda_device, HYPER._replace(step=4), **scaled)
    for found, zero_grad in itertools.product((0.0, 1.0), (False, True)):
        options = {"found_inf": torch.tensor(found), "zero_grad": zero_grad}
        check([make(600, mode)], mode, cuda_device, **options)
    n = CHUNK + 1024 + 13
    whole, expected = clone(make(n, mode), cuda_device), on_cpu([make(n, mode)], mode)[0]
    cuts = [0, 256, 512 if mode.moment == U8 else 515, CHUNK + 256, n]
    views = [part(whole, a, b) for a, b in itertools.pairwise(cuts)]
    step(views, mode, first_indices=cuts[:-1])
    assert same_bits(whole, expected)
    state = make(700, mode)
    (expected,) = on_cpu([state], mode)
    for offsets in (*({name: 1} for name in state), *(dict.fromkeys(state, n) for n in (1, 2, 4))):
        moved = {}
        for name, t in state.items():
            n = offsets.get(name, 0)
            moved[name] = torch.cat([t.new_zeros(n), t]).to(cuda_device)[n:]
        step([moved], mode)
        assert same_bits(moved, expected), offsets


@sweep("name", ["fp32", "bf16 full", "bf16 remainder", "fp16 full fp32 grad 8-bit moments"])
def test_cuda_at_the_edges(cuda_device, name):
    """Subnormal, huge and infinite gradients and masters; nans, whose payload may differ, apart."""
    mode, state = MODES[name], make(300, MODES[name])
    values = [0.0, -0.0, 1e-45, -1e-40, 1e38, -3e38, 65504.0, 1e-8, 3.0, float("inf")]
    state["grad"] = torch.tensor(values).repeat(30).to(mode.grad)
    (expected,) = on_cpu([state], mode)
    got = clone(state, cuda_device)
    step([got], mode)
    torch.testing.assert_close(clone(got, "cpu"), expected, rtol=0, atol=0, equal_nan=True)


def test_hypers_are_read_on_the_device_and_not_on_the_host(cuda_device, monkeypatch):
    """Also where torch's step was the faster one: a CUDA graph could not capture it."""
    slower = Proof(STOCK, own_ms=(2.0, 0.0), instead_ms=(1.0, 0.0))
    monkeypatch.setitem(choice.proofs, Case(cuda_device, "adamw_step_", F32, 0), slower)
    monkeypatch.setattr(adamw, "_step_torch", lambda *_: pytest.fail("read on the host"))
    mode, values = MODES["fp32"], [torch.tensor(x) for x in (3e-3, 0.85, 0.99, 1e-7, 0.05, 12.0)]
    state = make(5000, mode)
    got = clone(state, cuda_device)
    step([got], mode, Hyper(*(x.to(cuda_device) for x in values)))
    monkeypatch.setattr(choice, "proofs", {})
    (expected,) = on_cpu([state], mode, Hyper(*(x.item() for x in values)))
    assert same_bits(got, expected)


@pytest.mark.parametrize(
    "mode", ["bf16 full", "fp32 8-bit moments", "bf16 stochastic"], indirect=True
)
def test_many_tensors_take_few_launches(cuda_device, mode, monkeypatch):
    """Those of GPT-2 XL one. Of 700 some do not fit into one launch's argument."""
    counts, run = [], backend.cuda_kernels.adamw_step_cuda
    count = lambda *args: counts.append(run(*args)) or counts[-1]  # noqa: E731
    monkeypatch.setattr(backend.cuda_kernels, "adamw_step_cuda", count)
    states = [make(3, mode, seed=i) for i in range(700)]
    for some in (states[: 580 if mode == MODES["bf16 full"] else 500], states):
        check(some, mode, cuda_device)
    assert counts == [1, 2]
    hypers = [HYPER._replace(lr=1e-3 * (i + 1), step=i + 1) for i in range(33)]
    check(states[:33], mode, cuda_device, hypers=hypers, hyper_index=[*range(33)])


# Forms of the state


def every_upper_half():
    """Every upper half of an fp32 number with the lower halves at which rounding changes."""
    top = np.arange(2**16, dtype=np.uint32) << 16
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=np.uint32)
    bits = (top[:, None] | low).reshape(-1)
    return torch.from_numpy(bits.view(np.float32).copy())


def test_split_and_join_are_exact_and_round_to_nearest():
    """Ties away from zero; one nan."""
    x = torch.cat([every_upper_half(), torch.randn(100_000), torch.tensor([-0.0, 1e-45, 3.4e38])])
    param, remainder = master_split(x)
    back, nan = master_join(param, remainder).view(torch.int32), x.isnan()
    assert torch.equal(back[~nan], x.view(torch.int32)[~nan])
    assert (back[nan] == 0x7FC00000).all()
    x = x[x.isfinite() & (x.abs() < 3.38e38)]
    low, high = (t.double() for t in bf16_neighbours(x))  # `high` is away from zero
    nearest = torch.where((x - low).abs() < (high - x).abs(), low, high)
    assert torch.equal(round_to_bf16(x).double(), nearest)


@sweep("signed", [True, False])
def test_codes_mean_what_the_header_says(signed):
    codes = torch.arange(256, dtype=torch.uint8)
    if signed:
        k = codes.view(torch.int8).double()
        want = 3.0 * k.sign() * (k / 127) ** 2
    else:
        want = 3.0 * (codes.double() / 255) ** 4
    got = decode_moment(codes, torch.tensor([3.0]), signed=signed)
    # Roundings of k / 127 (reciprocal, product), its powers and the scale: at most 4 * 2 + 3 units.
    assert ((got - want).abs() <= 11 * 2.0**-24 * want.abs()).all()


@sweep("signed", [True, False])
@sweep("n", [0, 1, 255, 256, 257, 1000])
def test_encoding_takes_the_nearest_level(n, signed):
    x = torch.randn(n) ** 3
    x = x if signed else x.abs()
    codes, scale = encode_moment(x, signed=signed)
    assert codes.dtype == torch.uint8
    got = decode_moment(codes, scale, signed=signed)
    table = torch.arange(256, dtype=torch.uint8)
    table = table[table != 128] if signed else table[1:]  # -128 is not used, 0 for zeros only
    assert scale.shape == (-(-n // MOMENT_BLOCK),)
    for block, top, found in zip(x.split(MOMENT_BLOCK), scale, got.split(MOMENT_BLOCK)):
        levels = decode_moment(table, top[None], signed=signed)
        best = (block[:, None] - levels).abs().amin(1)
        assert ((found - block).abs() <= best + 2.0**-22 * block.abs()).all()
        assert top == block.abs().max()
    for again, value in zip(encode_moment(got, signed=signed), (codes, scale)):
        assert torch.equal(again, value)


def test_forms_keep_strides_zeros_and_small_squares():
    x = torch.zeros(512)
    x[3], x[4] = 1.0, 1e-30
    codes, _ = encode_moment(x, signed=False)
    assert codes[:6].tolist() == [0, 0, 0, 255, 1, 0]
    assert not codes[256:].any()
    x = torch.randn(6, 50).t()
    codes, scale = encode_moment(x, signed=True)
    back = decode_moment(codes, scale, signed=True)
    assert codes.stride() == back.stride() == master_split(x)[1].stride() == x.stride()
    assert (back - x).abs().max() < 0.02 * x.abs().max()
    p = x.requires_grad_()
    for dtype in (F32, BF16, U8):
        moment, scale = new_moment(p, dtype)
        assert (moment.dtype, moment.stride(), moment.requires_grad) == (dtype, p.stride(), False)
        assert (scale is None) == (dtype != U8)
    assert scale.shape == (2,)
    assert not decode_moment(moment, scale, signed=True).any()
    # A small exp_avg over the root of 0 would be a step that Adam does not make.
    state = {"param": torch.zeros(512), "grad": torch.full((512,), 1e-9)}
    state["grad"][::256], state["grad"][7::256] = 1.0, 0.0
    for name in ("exp_avg", "exp_avg_sq"):
        state[name], state[name + "_scale"] = new_moment(torch.zeros(512), U8)
    step([state], MODES["fp32 8-bit moments"], HYPER._replace(step=1))
    assert torch.equal(state["exp_avg_sq"] > 0, state["grad"] != 0)


@sweep("master_dtype", [torch.float32, torch.int16])
def test_a_nan_stays_one_whatever_its_lower_bits(master_dtype):
    """The upper half of some nans is an infinity, and rounding others would make them -0."""
    bits = torch.tensor([0x7F800001, 0x7FC0FFFF, 0x7FFFFFFF, -1], dtype=torch.int32)
    param = torch.zeros(4, dtype=torch.bfloat16)
    master = torch.zeros(4, dtype=master_dtype)
    moments = torch.zeros(4), torch.zeros(4)
    adamw_step_([param], [bits.view(torch.float32)], *([m] for m in moments), HYPER,
                master_weights=[master])  # fmt: skip
    assert param.isnan().all()
    whole = master if master_dtype == torch.float32 else master_join(param, master)
    assert torch.equal(whole.view(torch.int32), torch.full((4,), 0x7FC00000, dtype=torch.int32))


# What is refused


P, G, M, V = [torch.ones(4)], [torch.ones(4)], *(zeros(4) for _ in "mv")
LISTS = {"params": P, "grads": G, "exp_avgs": M, "exp_avg_sqs": V}
LOW, HALF, REMAINDER = [P[0].bfloat16()], [P[0].half()], zeros(4, dtype=torch.int16)
CODES, SCALES = zeros(4, dtype=U8), ("exp_avg_scales", "exp_avg_sq_scales")
OF_CODES = {"exp_avgs": CODES, "exp_avg_sqs": CODES}
SCALED = {**OF_CODES, **{name: zeros(1) for name in SCALES}}
WHOLE, MEMORY = torch.ones(10), torch.ones(100)
LONG = [torch.ones(80), torch.ones(10), MEMORY[50:60]]  # of gradients one is over the third


def states(*params, **others):
    """Lists for these parameters, the states zeros."""
    apart = {name: [torch.zeros_like(p) for p in params] for name in LISTS}
    return {**apart, "params": list(params), **others}


REFUSALS = [  # words, changes of LISTS, options; hypers: one of them
    ("expected lists of one length, got lengths=.*'exp_avg_sqs': 0", {"exp_avg_sqs": []}),
    ("got lengths=.*'first_indices': 2", {"first_indices": [0, 0]}),
    ("hyper_index to name one of 2 hypers", {"hypers": [HYPER, HYPER]}),
    *((rf"got hyper_index=\[{i}\]", {"hyper_index": [i]}) for i in (1, -1)),
    (r"params\[0\]=torch.float64 grads\[0\]=torch.float32", {"params": [P[0].double()]}),
    (r"got params\[0\]=torch.int32", {"params": [P[0].int()]}),
    (r"params\[0\]=torch.float32 grads\[0\]=torch.bfloat16", {"grads": LOW}),
    (r"params\[0\]=torch.bfloat16 grads\[0\]=torch.float16", {"params": LOW, "grads": HALF}),
    ("grads.0.=torch.float16", {"params": LOW, "grads": HALF, "master_weights": REMAINDER}),
    ("a master weight for each 16-bit .* master_weights.0.=None", {"params": LOW}),
    ("master_weights.0.=None", {"params": HALF, "stochastic_rounding_seed": 1}),
    ("master_weights.0.=torch.int16", {"params": HALF, "master_weights": REMAINDER}),
    ("None for fp32, .* master_weights.0.=torch.float32", {"master_weights": V}),
    ("exp_avg_sqs and max_exp_avg_sqs of one dtype, .* at index 0", {"exp_avgs": LOW}),
    ("of one dtype, fp32, bf16 or uint8, got", {"exp_avgs": HALF, "exp_avg_sqs": HALF}),
    ("of one dtype", {"max_exp_avg_sqs": LOW}),
    (r"scales of shape \[1\] .* got exp_avgs\[0\]=torch.uint8 and \[No", OF_CODES),
    (r"scales of shape \[1\] .* \[\[1\], \[2\]\]", {**SCALED, "exp_avg_sq_scales": zeros(2)}),
    ("and none for others", {name: SCALED[name] for name in SCALES}),
    ("no max_exp_avg_sqs with uint8", {**SCALED, "max_exp_avg_sqs": CODES}),
    (r"multiples of 256 for uint8 moments, got first_indices\[0\]=100",
     {**SCALED, "first_indices": [100]}),
    *((f"expected {name} >= .*got {name}={value}", {"hypers": HYPER._replace(**{name: value})})
      for name, value in (("lr", -1.0), ("lr", float("nan")), ("beta1", 1.0), ("beta1", -0.1),
                          ("beta2", 1.0), ("eps", -1e-8), ("weight_decay", -0.1),
                          ("weight_decay", float("inf")), ("step", 0))),
    ("dense parameters and states, got a view with gaps", {"params": [torch.ones(8)[::2]]}),
    ("expected grad_scale of one fp32 element on cpu", {"grad_scale": torch.ones(2)}),
    ("expected found_inf of .* got found_inf=.*float64", {"found_inf": torch.zeros(1).double()}),
    ("expected lr of one fp32 element on cpu, got .* on meta",
     {"hypers": HYPER._replace(lr=torch.tensor(1e-2, device="meta"))}),
    *((f"got stochastic_rounding_seed={seed}", {"stochastic_rounding_seed": seed})
      for seed in (-1, 2**63)),
    ("expected threads >= 1 or None, got threads=0", {"threads": 0}),
    (r"got first_indices\[0\]=-1", {"first_indices": [-1]}),
    (r"got params\[0\] overlapping params\[1\]", states(WHOLE[:6], WHOLE[5:])),
    (r"got exp_avgs\[0\] overlapping exp_avg_sqs\[0\]|exp_avg_sqs.0. over", {"exp_avg_sqs": M}),
    ("got params.0. overlapping grads.0.|grads.0. overlapping params", {"grads": P}),
    (r"grads\[.\] overlapping grads",
     states(P[0], torch.ones(4), grads=[G[0], G[0]], zero_grad=True)),
    # Sorted by address, the neighbours of this overlap do not touch.
    (r"got grads\[0\] overlapping params\[2\]",
     states(*LONG, grads=[MEMORY[:80], MEMORY[:10], torch.ones(10)])),
]  # fmt: skip


def test_what_is_refused(monkeypatch):
    for words, changes in REFUSALS:
        with pytest.raises(ValueError, match=words):
            adamw_step_(**{**LISTS, "hypers": HYPER, **changes})
    monkeypatch.setattr(backend, "choice", "torch")
    for changes in (
        {"exp_avgs": [M[0].bfloat16()], "exp_avg_sqs": [V[0].bfloat16()]},
        {"params": LOW, "stochastic_rounding_seed": 1},
        {"params": LOW, "master_weights": REMAINDER},
    ):
        with pytest.raises(RuntimeError, match="expected fp32 moments, and fp32 master weights"):
            adamw_step_(**{**LISTS, **changes}, hypers=HYPER)


CODES_300 = torch.zeros(300, dtype=U8)


@sweep(("call", "words"), [
    (lambda: new_moment(P[0], F16), r"new_moment: expected dtype .* got dtype=torch.float16"),
    (lambda: decode_moment(CODES_300, torch.zeros(1), signed=True),
     r"decode_moment: expected uint8 codes .* shape \[2\]"),
    (lambda: decode_moment(CODES_300[::2], torch.zeros(1), signed=True),
     "decode_moment: expected a dense tensor, got stride="),
    (lambda: encode_moment(torch.ones(4)[::2], signed=True), "encode_moment: expected a dense"),
    (lambda: master_split(P[0].double()), "master_split: expected an fp32 master, got"),
    (lambda: master_join(P[0], REMAINDER[0]), "master_join: expected a bf16 parameter and an in"),
])  # fmt: skip
def test_forms_that_are_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


FORMS = {
    "shape": (lambda t: t[1:].clone(), "one shape per parameter, got .* at index 0"),
    # Gradients may have other strides, scales have none.
    "strides": (lambda t: t.t().contiguous().t(), "dense parameters and states of the same"),
    "device": (lambda t: t.to("meta"), r"one device per parameter, got \["),
}
OF_SCALES = {"shape": "fp32 exp_avg_scales and", "device": "one device per parameter"}


@sweep("form", FORMS)
@sweep("name", [*LISTS, "max_exp_avg_sqs", "master_weights", *SCALES])
def test_dtypes_that_were_accepted_are_no_reason_to_look_less(name, form):
    """Dtypes are checked once in a process; all else in each call."""
    change, words = FORMS[form]
    words = OF_SCALES.get(form) if name in SCALES else words
    if words is None or (name, form) == ("grads", "strides"):
        return
    lists = {n: [torch.ones(8, 6)] for n in (*LISTS, "max_exp_avg_sqs")}
    if name == "master_weights":
        lists |= {"params": [torch.ones(8, 6).bfloat16()], name: [torch.ones(8, 6)]}
    if name in SCALES:
        del lists["max_exp_avg_sqs"]
        lists |= {n: zeros(8, 6, dtype=U8) for n in OF_CODES} | {n: zeros(1) for n in SCALES}
    adamw_step_(**lists, hypers=HYPER)
    lists[name] = [change(lists[name][0])]
    with pytest.raises(ValueError, match=f"adamw_step_: expected {words}"):
        adamw_step_(**lists, hypers=HYPER)


def compiled(columns, *, given=15, counted=False, hyper_index=(), firsts=(), hypers=(0.0,) * 6,
             tensors=(), slots=()):  # fmt: skip
    """The compiled module's step of columns: params, gradients, states, counters."""
    used, kept = (rows_of([*itertools.chain(*some)]) for some in (columns[:2], columns[2:]))
    how = used, kept, given, counted, hyper_index, firsts, hypers, tensors, slots
    return _C.adamw_step(*how, *[False] * 2, *[None] * 3, 1)


X3, SOME = torch.zeros(3), [[torch.ones(3)] for _ in range(4)]
OF_MODULE = [  # (words, columns, options)
    *(("expected places within their lists, got tensor 0", SOME, options)
      for options in ({"hyper_index": [1]}, {"firsts": [-1]})),
    *(("6 numbers per hyper, a slot per hyper tensor and an entry per", SOME, {name: wrong})
      for name, wrong in (("hypers", [0.0]), ("tensors", [X3]), ("firsts", [0, 0]))),
    *(("equal length, got 2 parameters and gradients and 2", SOME, {"given": given})
      for given in (7, 31)),
]  # fmt: skip


def test_what_the_compiled_module_refuses():
    """And lists that the Python around it has to look at: no step is made, nor counted."""
    for words, columns, options in OF_MODULE:
        with pytest.raises(ValueError, match=words):
            compiled(columns, **options)
    strange = [X3[:2], X3.bfloat16(), torch.zeros(6)[::2], X3.to("meta"), X3.view(3, 1)]
    strange.append(torch.zeros(3, dtype=torch.complex64).conj().imag)
    for bad, i in itertools.product(strange, range(4)):
        assert compiled([*SOME[:i], [bad], *SOME[i + 1 :]]) is None, (bad, i)
    for bad in (torch.zeros(2), torch.zeros((), dtype=torch.int64), torch.zeros((), device="meta")):
        assert compiled([*SOME, [bad]], counted=True) is None, bad
    for column in SOME:
        assert torch.equal(column[0], torch.ones(3))
