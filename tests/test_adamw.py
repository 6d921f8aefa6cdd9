"""adamw_step_ against its oracle and torch.optim.AdamW; the same bits however the work is cut."""

import pytest
import torch

from fastpar.kernels import _C, Hyper, adamw_step_, backend
from fastpar.kernels.adamw import master_split
from fastpar.kernels.reference import adamw_step_ref

HYPER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
U = 2.0**-24  # unit roundoff of fp32
SIZES = (0, 1, 63, 127, 1000, 50257)


def make(sizes=SIZES, dtype=torch.float32, grad_dtype=None):
    params = [torch.randn(n).to(dtype) for n in sizes]
    grads = [torch.randn(n).to(grad_dtype or dtype) for n in sizes]
    exp_avgs = [torch.randn(n) * 0.1 for n in sizes]
    exp_avg_sqs = [torch.rand(n) * 0.1 for n in sizes]
    return params, grads, exp_avgs, exp_avg_sqs


def clone(lists):
    return [[t.clone() for t in tensors] for tensors in lists]


def assert_same(got, want):
    for a, b in zip(got, want):
        for x, y in zip(a, b):
            assert torch.equal(x, y)


@pytest.mark.parametrize("choice", ["auto", "torch"])
@pytest.mark.parametrize(("maximize", "eps"), [(False, 1e-8), (True, 1e-8), (False, 0.5)])
def test_one_step_matches_the_oracle(maximize, eps, choice, monkeypatch):
    """The 2x rule for parameters and moments, with torch's own step as the yardstick."""
    monkeypatch.setattr(backend, "choice", choice)
    hyper = {**HYPER, "eps": eps}
    state = make()
    exact = [[t.double() for t in tensors] for tensors in state]
    ours, plain = clone(state), clone(state)
    scale = 0.37
    adamw_step_(*ours, Hyper(**hyper, step=5), grad_scale=torch.tensor(scale), maximize=maximize)
    adamw_step_ref(
        *exact, **hyper, step=5, grad_scale=torch.tensor(scale).item(), maximize=maximize
    )
    for p, g, m, v in zip(*plain):
        parameter = torch.nn.Parameter(p)
        parameter.grad = g * scale
        betas = (hyper["beta1"], hyper["beta2"])
        optimizer = torch.optim.AdamW(
            [parameter],
            lr=hyper["lr"],
            betas=betas,
            eps=hyper["eps"],
            weight_decay=hyper["weight_decay"],
            foreach=False,
            maximize=maximize,
        )
        optimizer.state[parameter] = {"step": torch.tensor(4.0), "exp_avg": m, "exp_avg_sq": v}
        optimizer.step()
        p.copy_(parameter.detach())
    for which in (0, 2, 3):
        for got, torchs, want in zip(ours[which], plain[which], exact[which]):
            if not want.numel():
                continue
            floor = U * want.abs().max()  # one rounding of the result
            error = (got - want).abs().max()
            assert error <= 2 * (torchs - want).abs().max() + floor
    assert_same([ours[1]], [state[1]])  # gradients are left alone


def test_100_steps_within_the_derived_bound_of_torch():
    """Running error analysis: e bounds the distance of any fp32 evaluation of the rule from the
    exact run, to first order in U, per element and step:

    m' = m + (1 - b1) * (g - m): the difference, the constant and the product round once each, the
        sum once: e_m' = b1 * e_m + U * (3 * (1 - b1) * |g - m| + |m'|)
    v' = b2 * v + (1 - b2) * g * g: constant and product, constant and two products, sum:
        e_v' = b2 * e_v + U * (2 * b2 * v + 3 * (1 - b2) * g^2 + v')
    d = sqrt(v) / s + eps: e_d = e_v / (2 * sqrt(v) * s) + 4 * U * d
    q = a * m / d: e_q = a * (e_m / d + |m| * e_d / d^2) + 3 * U * |q|
    p' = p * (1 - lr * w) - q: e_p' = e_p + U * (2 * |p| + |p'|) + e_q
    Two evaluations differ by at most 2 * e_p.
    """
    n = 3000
    p, m, v = torch.randn(n), torch.zeros(n), torch.zeros(n)
    parameter = torch.nn.Parameter(p.clone())
    lr, b1, b2, eps, decay = HYPER.values()
    optimizer = torch.optim.AdamW(
        [parameter], lr=lr, betas=(b1, b2), eps=eps, weight_decay=decay, foreach=False
    )
    exact = [[p.double()], [m.double()], [v.double()]]
    e_m = e_v = e_p = torch.zeros(n, dtype=torch.float64)
    for step in range(1, 101):
        g = torch.randn(n)
        adamw_step_([p], [g], [m], [v], Hyper(**HYPER, step=step))
        parameter.grad = g
        optimizer.step()
        p0, m0, v0 = (t[0].clone() for t in exact)
        adamw_step_ref(exact[0], [g.double()], exact[1], exact[2], **HYPER, step=step)
        p1, m1, v1 = (t[0] for t in exact)
        e_m = b1 * e_m + U * (3 * (1 - b1) * (g.double() - m0).abs() + m1.abs())
        e_v = b2 * e_v + U * (2 * b2 * v0 + 3 * (1 - b2) * g.double() ** 2 + v1)
        s, a = (1 - b2**step) ** 0.5, lr / (1 - b1**step)
        d = v1.sqrt() / s + eps
        e_d = e_v / (2 * v1.sqrt() * s) + 4 * U * d
        e_q = a * (e_m / d + m1.abs() * e_d / d**2) + 3 * U * (a * m1 / d).abs()
        e_p = e_p + U * (2 * p0.abs() + p1.abs()) + e_q
    assert ((p.double() - exact[0][0]).abs() <= e_p).all()
    assert ((p.double() - parameter.detach().double()).abs() <= 2 * e_p).all()
    assert e_p.max() < 1e-4  # the bound says something: parameters moved by about 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_same_bits_for_any_cut_threads_and_isa(dtype):
    n = 100_003
    params, grads, exp_avgs, exp_avg_sqs = make((n,), dtype)
    masters = None if dtype == torch.float32 else [params[0].float()]
    state = [params, grads, exp_avgs, exp_avg_sqs, *([masters] if masters else [])]

    def run(cuts):
        whole = clone(state)
        pieces = [[t[a:b] for a, b in zip((0, *cuts), (*cuts, n))] for (t,) in whole]
        weights = pieces[4] if masters else None
        adamw_step_(*pieces[:4], Hyper(**HYPER, step=3), master_weights=weights)
        return whole

    before = _C.isa()
    first = run(())
    try:
        for isa in ("baseline", "avx2", "avx512"):
            if not _C.isa_supported(isa):
                continue
            _C.set_isa(isa)
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                for cuts in ((), (1,), (33_333, 66_667), (5, 7, 16_384, 16_399, 100_002)):
                    assert_same(run(cuts), first)
    finally:
        _C.set_isa(before)


@pytest.mark.parametrize("choice", ["auto", "torch"])
@pytest.mark.parametrize("grad_dtype", [None, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_master_weights(dtype, grad_dtype, choice, monkeypatch):
    """The master takes fp32's step bit for bit; the parameter is the master, rounded."""
    monkeypatch.setattr(backend, "choice", choice)
    params, grads, exp_avgs, exp_avg_sqs = make(dtype=dtype, grad_dtype=grad_dtype)
    masters = [p.float() + 1e-4 for p in params]
    wide = clone([masters, [g.float() for g in grads], exp_avgs, exp_avg_sqs])
    for step in (1, 2):
        adamw_step_(
            params, grads, exp_avgs, exp_avg_sqs, Hyper(**HYPER, step=step), master_weights=masters
        )
        adamw_step_(*wide, Hyper(**HYPER, step=step))
    assert_same([masters, exp_avgs, exp_avg_sqs], [wide[0], wide[2], wide[3]])
    rounded = [master_split(w)[0] if dtype == torch.bfloat16 else w.to(dtype) for w in masters]
    assert_same([params], [rounded])


def test_mixed_dtypes_in_one_call():
    low, high = make((100,), torch.bfloat16), make((50,))
    master = low[0][0].float()
    alone = clone([*low, [master]]), clone(high)
    adamw_step_(*alone[0][:4], Hyper(**HYPER, step=1), master_weights=alone[0][4])
    adamw_step_(*alone[1], Hyper(**HYPER, step=1))
    both = [[a[0], b[0]] for a, b in zip(low, high)]
    adamw_step_(*both, Hyper(**HYPER, step=1), master_weights=[master, None])
    assert_same([both[0]], [[alone[0][0][0], alone[1][0][0]]])


def test_empty_list_and_repeatability():
    adamw_step_([], [], [], [], Hyper(**HYPER, step=1))
    state = make()
    other = clone(state)
    adamw_step_(*state, Hyper(**HYPER, step=2))
    adamw_step_(*other, Hyper(**HYPER, step=2))
    assert_same(state, other)


def test_strided_parameters_and_gradients():
    p = torch.randn(30, 20)
    g, m, v = torch.randn(30, 20), torch.zeros(30, 20), torch.zeros(30, 20)
    state = [[t.t().contiguous().t()] for t in (p, m, v)]  # dense, transposed
    adamw_step_(state[0], [g], state[1], state[2], Hyper(**HYPER, step=1))
    adamw_step_([p], [g], [m], [v], Hyper(**HYPER, step=1))
    assert_same(state, [[p], [m], [v]])
    q, same = p.clone(), p.clone()
    row = torch.randn(1, 20)
    states = [torch.zeros(30, 20) for _ in range(4)]
    adamw_step_([q], [row.expand(30, 20)], states[:1], states[1:2], Hyper(**HYPER, step=1))
    adamw_step_([same], [row.repeat(30, 1)], states[2:3], states[3:], Hyper(**HYPER, step=1))
    assert torch.equal(q, same)


def test_strides_of_a_dimension_of_one_do_not_matter():
    p, m, v = torch.ones(1, 5), torch.empty_strided((1, 5), (9, 1)).zero_(), torch.zeros(1, 5)
    adamw_step_([p], [torch.ones(1, 5)], [m], [v], Hyper(**HYPER, step=1))
    torch.testing.assert_close(p, torch.full((1, 5), 1 - 1e-3 - 1e-2))


def test_non_finite_gradients_reach_the_parameters():
    p, m, v = torch.zeros(3), torch.zeros(3), torch.zeros(3)
    adamw_step_([p], [torch.tensor([torch.nan, torch.inf, 1.0])], [m], [v], Hyper(**HYPER, step=1))
    assert p.isnan().tolist() == [True, True, False]


def test_autograd_notices_the_change():
    p = torch.randn(5, requires_grad=True)
    y = (p * p).sum()
    states = [torch.zeros(5), torch.zeros(5)]
    adamw_step_([p], [torch.ones(5)], states[:1], states[1:], Hyper(**HYPER, step=1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_opcheck():
    op = torch.ops.fastpar.adamw_step_.default
    numbers = [*HYPER.values(), 1.0]
    sizes = (7, 3)
    ranges = [0, 0, 7, 0, 0, 1, 0, 3, 0, 256]
    one = torch.tensor(1.0)
    plain = make(sizes)
    torch.library.opcheck(
        op,
        (*plain, [], [], [], [], one / 2, None, ranges, numbers, [], [], False, False, 0, 1),
    )
    low = make(sizes, torch.bfloat16)
    moments = [[torch.zeros(n, dtype=torch.uint8) for n in sizes] for _ in range(2)]
    scales = [[torch.zeros(1) for _ in sizes] for _ in range(2)]
    masters = [p.float() for p in low[0]]
    everything = (*low[:2], *moments, [], masters, *scales, one, torch.zeros(()), ranges)
    torch.library.opcheck(op, (*everything, numbers, [one / 8], [0], True, True, 5, 1))


def test_compiles_without_graph_breaks():
    state = make((40, 9))
    expected = clone(state)
    adamw_step_(*expected, Hyper(**HYPER, step=1), grad_scale=torch.tensor(0.5))

    def step(params, grads, exp_avgs, exp_avg_sqs, scale):
        adamw_step_(params, grads, exp_avgs, exp_avg_sqs, Hyper(**HYPER, step=1), grad_scale=scale)

    torch.compile(step, fullgraph=True, backend="aot_eager")(*state, torch.tensor(0.5))
    assert_same(state, expected)
