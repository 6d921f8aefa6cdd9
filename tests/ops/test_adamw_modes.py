"""adamw_step_ in every storage mode: what is stored, and the same bits however the work is cut.

Statistical tests say 5.5 standard deviations: a false alarm in less than 1 of 10^7 runs, and none
once a seed has passed, since every random number here is a function of seeds.
"""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from cells import sweep

from fastpar.kernels import _C, Hyper, adamw_step_, adamw_step_flat_
from fastpar.kernels.adamw import decode_moment, encode_moment, master_join, master_split

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
NAMES = (
    "param",
    "grad",
    "exp_avg",
    "exp_avg_sq",
    "master",
    "max",
    "exp_avg_scale",
    "exp_avg_sq_scale",
)
KEYWORDS = dict(
    zip(NAMES[4:], ("master_weights", "max_exp_avg_sqs", "exp_avg_scales", "exp_avg_sq_scales"))
)
State = dict[str, torch.Tensor]


def moment(values, dtype, signed):
    if dtype == U8:
        return encode_moment(values, signed=signed)
    return values.to(dtype), None


def make(n: int, mode: Mode, seed: int = 0) -> State:
    generator = torch.Generator().manual_seed(seed)
    p, g, m, v, w = (torch.randn(n, generator=generator) for _ in range(5))
    state = {"grad": g.to(mode.grad)}
    state["exp_avg"], m_scale = moment(m * 0.1, mode.moment, True)
    state["exp_avg_sq"], v_scale = moment(v**2 * 0.1, mode.moment, False)
    if mode.moment == U8:
        state |= {"exp_avg_scale": m_scale, "exp_avg_sq_scale": v_scale}
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


def clone(state: State) -> State:
    return {name: t.clone() for name, t in state.items()}


def step(states: list[State], mode: Mode, hypers=HYPER, **kwargs) -> None:
    """adamw_step_ on a list of states."""
    lists = {name: [s[name] for s in states] for name in NAMES if name in states[0]}
    optional = {word: lists[name] for name, word in KEYWORDS.items() if name in lists}
    kwargs.setdefault("stochastic_rounding_seed", SEED if mode.master == "stochastic" else None)
    adamw_step_(*(lists[name] for name in NAMES[:4]), hypers, **optional, **kwargs)


def step_flat(state: State, ranges, mode: Mode, hypers=HYPER, **kwargs) -> None:
    optional = {word[:-1]: state[name] for name, word in KEYWORDS.items() if name in state}
    kwargs.setdefault("stochastic_rounding_seed", SEED if mode.master == "stochastic" else None)
    adamw_step_flat_(*(state[name] for name in NAMES[:4]), ranges, hypers, **optional, **kwargs)


def part(state: State, start: int, stop: int) -> State:
    def cut(name, t):
        return t[start // 256 : -(-stop // 256)] if name.endswith("scale") else t[start:stop]

    return {name: cut(name, t) for name, t in state.items()}


def same_bits(a: State, b: State) -> bool:
    return all(torch.equal(a[n].view(torch.uint8), b[n].view(torch.uint8)) for n in b)


@pytest.fixture(params=MODES, ids=lambda name: name.replace(" ", "-"))
def mode(request) -> Mode:
    return MODES[request.param]


def widened(state: State, mode: Mode) -> State:
    """The same numbers in plain fp32 form."""
    wide = {"grad": state["grad"].float()}
    for name in ("exp_avg", "exp_avg_sq"):
        t = state[name]
        signed = name == "exp_avg"
        wide[name] = (
            decode_moment(t, state[name + "_scale"], signed=signed) if t.dtype == U8 else t.float()
        )
    if mode.amsgrad:
        wide["max"] = state["max"].float()
    if mode.master == "full":
        wide["param"] = state["master"].clone()
    elif mode.master == "remainder":
        wide["param"] = master_join(state["param"], state["master"])
    else:
        wide["param"] = state["param"].float()
    return {name: t.clone() for name, t in wide.items()}


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
    levels = decode_moment(
        torch.arange(128 if signed else 256, dtype=U8), torch.ones(1), signed=signed
    )
    ratio = exact.abs().double() / scale.repeat_interleave(256)[:n].double()
    upper = torch.bucketize(ratio, levels.double()).clamp(1, len(levels) - 1)
    wide = scale.repeat_interleave(256)[:n]
    drawn = (ratio > 1.001 * levels[1]) & (
        ratio < 1
    )  # below, 1 is the only code that exp_avg_sq has
    # A ratio next to a level may be rounded to its other side: take those as on the level.
    near = (
        torch.minimum((ratio - levels[upper - 1]).abs(), (ratio - levels[upper]).abs())
        < 1e-5 * ratio
    )
    where = drawn & ~near
    low, high = levels[upper - 1] * wide, levels[upper] * wide
    assert_fair(values.abs()[where], low[where], high[where], exact.abs()[where])
    assert (values.sign() * exact.sign() >= 0).all()


def test_remainder_is_full_master_bit_for_bit():
    """Long runs through ties, subnormal, huge and non-finite numbers: parameters and masters."""
    bits = np.concatenate(
        [
            np.arange(0, 2**32, 2**20 + 1, dtype=np.uint64),
            (np.arange(0, 2**32, 2**22, dtype=np.uint64) | 0x8000),  # ties
            np.arange(0, 64),  # subnormal
        ]
    ).astype(np.uint32)
    start = torch.from_numpy(bits.view(np.float32).copy())
    start = torch.where(start.isnan(), torch.nan, start)
    n = start.numel()
    for grad_dtype in (BF16, F32):
        full, remainder = (make(n, Mode(BF16, grad_dtype, master=m)) for m in ("full", "remainder"))
        full["master"] = start.clone()
        full["param"], full["master"] = master_split(start)[0], master_join(*master_split(start))
        remainder["param"], remainder["master"] = master_split(start)
        generator = torch.Generator().manual_seed(5)
        for t in range(1, 121):
            # Below lr = 1e-38 the steps are subnormal; weight decay keeps everything moving.
            hyper = HYPER._replace(step=t, lr=(1e-2, 1e-6, 1e-39)[t % 3])
            g = torch.randn(n, generator=generator).to(grad_dtype)
            if t > 60:
                g[torch.randint(n, (3,), generator=generator)] = torch.inf
                g[torch.randint(n, (3,), generator=generator)] = torch.nan
            full["grad"], remainder["grad"] = g, g.clone()
            step([full], Mode(BF16, grad_dtype, master="full"), hyper)
            step([remainder], Mode(BF16, grad_dtype, master="remainder"), hyper)
            assert torch.equal(
                full["param"].view(torch.int16), remainder["param"].view(torch.int16)
            )
            joined = master_join(remainder["param"], remainder["master"])
            assert torch.equal(full["master"].view(torch.int32), joined.view(torch.int32))
        assert full["master"].isnan().sum() > 100
        assert full["master"].isfinite().sum() > n / 2


def test_random_bits_depend_on_seed_step_and_index_only():
    mode = MODES["bf16 stochastic 8-bit moments"]
    n = 4096

    def run(seed=SEED, t=3, first=0):
        state = make(n, mode)
        step(
            [state],
            mode,
            HYPER._replace(step=t, lr=0.0),
            stochastic_rounding_seed=seed,
            first_indices=[first],
        )
        return state

    first = run()
    assert same_bits(run(), first)
    for other in (run(seed=SEED + 1), run(first=256)):
        for name in ("exp_avg", "exp_avg_sq"):
            assert not torch.equal(other[name], first[name])
    # No two of parameter, exp_avg and exp_avg_sq share their draws: with the same exact values and
    # the same bits they would be rounded up together.
    wide = make(n, Mode(BF16, F32, BF16, "stochastic"))
    for name in ("param", "exp_avg", "exp_avg_sq"):
        wide[name] = torch.ones(n, dtype=BF16)
    wide["grad"] = torch.full((n,), 1.0 + 2**-5)
    hyper = Hyper(lr=2**-4, beta1=0.9, beta2=0.9, eps=0.0, weight_decay=0.0, step=1)
    step([wide], Mode(BF16, F32, BF16, "stochastic"), hyper)
    ups = torch.stack(
        [(wide[k] > wide[k].float().min()).double() for k in ("param", "exp_avg", "exp_avg_sq")]
    )
    assert (ups.mean(1) > 0.01).all()
    assert (ups.mean(1) < 0.99).all()
    assert (torch.corrcoef(ups) - torch.eye(3)).abs().max() < SIGMAS / n**0.5


def test_indices_beyond_32_bits():
    """A range that crosses 2^32 draws what its two halves draw."""
    mode = MODES["bf16 stochastic fp32 grad bf16 moments"]
    whole = make(2000, mode)
    halves = clone(whole)
    first = 2**32 - 768
    step([whole], mode, first_indices=[first])
    pieces = [part(halves, 0, 768), part(halves, 768, 2000)]
    step(pieces, mode, first_indices=[first, first + 768])
    assert same_bits(whole, halves)
    low = make(2000, mode)
    step([low], mode, first_indices=[0])
    assert not torch.equal(low["param"][:1232], whole["param"][768:])


def test_same_bits_for_any_cut_threads_and_isa(mode):
    n = 70_003
    before, start = _C.isa(), make(n, mode)
    expected = clone(start)
    step([expected], mode, threads=1)
    unit = 256 if mode.moment == U8 else 1
    try:
        for isa in ("baseline", "avx2", "avx512"):
            if not _C.isa_supported(isa):
                continue  # test_isa_is_there says so
            _C.set_isa(isa)
            far = (16_384, 16_384 + unit, n - n % 256 - unit)
            for threads, cuts in ((1, ()), (3, (unit,)), (2, (5 * unit, 7 * unit, *far))):
                got = clone(start)
                edges = (0, *cuts, n)
                pieces = [part(got, a, b) for a, b in itertools.pairwise(edges)]
                step(pieces, mode, threads=threads, first_indices=edges[:-1])
                assert same_bits(got, expected), (isa, threads, cuts)
                got = clone(start)
                ranges = [(a, b, 0, a) for a, b in itertools.pairwise(edges)]
                step_flat(got, ranges[::-1], mode, threads=threads)
                assert same_bits(got, expected), (isa, threads, cuts, "flat")
    finally:
        _C.set_isa(before)


@sweep("isa", ["avx2", "avx512"])
def test_isa_is_there(isa):
    if not _C.isa_supported(isa):
        pytest.skip(f"this CPU has no {isa}: its bits are not compared here")


def test_alignment_torture(mode):
    """Every offset of 0 to 63 bytes and every tail, with bytes around the arrays left alone."""
    longest = 70
    before = make(longest, mode)
    fenced = {}
    for name, t in before.items():
        memory = torch.full((longest * t.element_size() + 256,), 0xA5, dtype=U8)
        shift = -memory.data_ptr() % 64
        fenced[name] = memory[shift : shift + longest * t.element_size() + 128]
    for n in range(longest + 1):
        expected = clone(part(before, 0, n))
        step([expected], mode, zero_grad=True)
        # Few of the long ones: a tail is the rest of a division by at most 64 elements.
        for offset in range(64) if n % 23 == 0 or n < 4 else (n % 64,):
            state = {}
            for name, t in part(before, 0, n).items():
                size = t.element_size()
                at = offset // size * size
                fenced[name].fill_(0xA5)
                state[name] = fenced[name][at : at + t.numel() * size].view(t.dtype)
                state[name].copy_(t)
            step([state], mode, zero_grad=True)
            for name, t in expected.items():
                at = offset // t.element_size() * t.element_size()
                stop = at + t.numel() * t.element_size()
                assert torch.equal(fenced[name][at:stop], t.view(U8)), (name, n, offset)
                assert (fenced[name][:at] == 0xA5).all()
                assert (fenced[name][stop:] == 0xA5).all()


def test_lists_with_empty_and_one_element_tensors(mode):
    sizes = (0, 1, 300, 0, 1, 1, 16_385, 0)
    states = [make(n, mode, seed=i) for i, n in enumerate(sizes)]
    alone = [clone(s) for s in states]
    step(states, mode, first_indices=[256 * i for i in range(len(sizes))])
    for i, s in enumerate(alone):
        step([s], mode, first_indices=[256 * i])
        assert same_bits(states[i], s)


def test_groups_take_their_own_hypers(mode):
    hypers = [HYPER, HYPER._replace(lr=3e-3, weight_decay=0.0), HYPER._replace(step=17, eps=0.1)]
    states = [make(n, mode, seed=n) for n in (300, 5, 700, 256)]
    alone = [clone(s) for s in states]
    step(states, mode, hypers, hyper_index=[2, 0, 1, 2], first_indices=[0, 512, 1024, 2048])
    for s, hyper, first in zip(alone, (2, 0, 1, 2), (0, 512, 1024, 2048)):
        step([s], mode, hypers[hyper], first_indices=[first])
    assert all(same_bits(s, a) for s, a in zip(states, alone))


def test_tensors_as_hypers_give_the_same_bits(mode):
    numbers = [float(torch.tensor(x)) for x in HYPER]  # what fp32 holds
    for names in (Hyper._fields, ("lr",), ("step",), ("beta1", "beta2")):
        a, b = make(5000, mode), make(5000, mode)
        hyper = Hyper(*numbers)
        step([a], mode, hyper)
        step([b], mode, hyper._replace(**{k: torch.tensor(getattr(hyper, k)) for k in names}))
        assert same_bits(a, b)


@sweep("zero_grad", [False, True])
def test_found_inf_skips_but_zeroes(mode, zero_grad):
    before = make(20_000, mode)
    for found in (0.0, 1.0, float("nan")):
        state, expected = clone(before), clone(before)
        step([state], mode, found_inf=torch.tensor(found), zero_grad=zero_grad)
        if found == 0:
            step([expected], mode)
        if zero_grad:
            expected["grad"].zero_()
        assert same_bits(state, expected)


def test_grad_scale_and_maximize(mode):
    """A power of two commutes with every rounding of the gradient, a sign with all."""
    a, b = make(3000, mode), make(3000, mode)
    b["grad"] = -b["grad"] * 4
    step([a], mode)
    step([b], mode, grad_scale=torch.tensor(0.25), maximize=True)
    del a["grad"]
    assert same_bits(b, a)


def test_strided_gradients_and_parameters():
    mode = MODES["bf16 remainder fp32 grad 8-bit moments"]
    flat = make(600, mode)
    strided = {}
    for name, t in flat.items():
        strided[name] = t.clone() if name.endswith("scale") else t.clone().view(30, 20).t()
    grad = strided["grad"]
    strided["grad"] = grad.contiguous()
    step([flat], mode, zero_grad=True)
    step([strided], mode, zero_grad=True)
    for name, t in flat.items():
        got = strided[name] if name.endswith("scale") else strided[name].t().reshape(-1)
        assert torch.equal(got, t)


def test_versions_of_what_was_written(mode):
    for zero_grad in (False, True):
        state = make(10, mode)
        before = {name: t._version for name, t in state.items()}
        step([state], mode, zero_grad=zero_grad)
        for name, t in state.items():
            assert t._version == before[name] + (name != "grad" or zero_grad), name


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
