"""adamw_step_ against its oracle and torch.optim.AdamW."""

import pytest
import torch
from adamw_bound import Bound
from cells import sweep
from hypothesis import given
from hypothesis import strategies as st

from fastpar.kernels import Hyper, adamw_step_, adamw_step_flat_, backend
from fastpar.kernels.adamw import master_join, master_split
from fastpar.kernels.reference import adamw_step_ref

HYPER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
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


@sweep("choice", ["auto", "torch"])
@sweep(("maximize", "eps"), [(False, 1e-8), (True, 1e-8), (False, 0.5)])
def test_one_step_matches_the_oracle(maximize, eps, choice, monkeypatch):
    """Parameters and moments, ours and torch's, within the bound of their roundings."""
    monkeypatch.setattr(backend, "choice", choice)
    hyper = {**HYPER, "eps": eps}
    state = make()
    exact = [[t.double() for t in tensors] for tensors in state]
    before, ours, plain = clone(exact), clone(state), clone(state)
    scale = torch.tensor(0.37)
    adamw_step_(*ours, Hyper(**hyper, step=5), grad_scale=scale, maximize=maximize)
    adamw_step_ref(*exact, **hyper, step=5, grad_scale=scale.item(), maximize=maximize)
    lr, beta1, beta2, eps, decay = hyper.values()
    for i, (p, g, m, v) in enumerate(zip(*plain)):
        parameter = torch.nn.Parameter(p)
        parameter.grad = g * scale
        optimizer = torch.optim.AdamW(
            [parameter], lr, (beta1, beta2), eps, decay, foreach=False, maximize=maximize
        )
        optimizer.state[parameter] = {"step": torch.tensor(4.0), "exp_avg": m, "exp_avg_sq": v}
        optimizer.step()
        (p0, g, m0, v0), (p1, _, m1, v1) = ([x[i] for x in lists] for lists in (before, exact))
        g = g * scale.item() * (-1 if maximize else 1)
        bound = Bound(p0.shape)
        bound.step(g, 1, p0, m0, v0, p1, m1, v1, v1, **hyper, step=5)
        for found in (ours[0][i], *(x[i] for x in ours[2:])), (parameter.detach(), m, v):
            bound.holds(*found, {"p": p1, "m": m1, "v": v1})
    assert_same([ours[1]], [state[1]])  # gradients are left alone


@sweep("amsgrad", [False, True])
@sweep("maximize", [False, True])
def test_100_steps_within_the_derived_bound_of_torch(amsgrad, maximize):
    """Parameters and moments, of ours against the exact run and against torch's single-tensor loop:
    two evaluations differ by at most twice the bound."""
    n = 3000
    p, m, v, u = torch.randn(n), torch.zeros(n), torch.zeros(n), torch.zeros(n)
    parameter = torch.nn.Parameter(p.clone())
    lr, b1, b2, eps, decay = HYPER.values()
    optimizer = torch.optim.AdamW(
        [parameter],
        lr=lr,
        betas=(b1, b2),
        eps=eps,
        weight_decay=decay,
        foreach=False,
        amsgrad=amsgrad,
        maximize=maximize,
    )
    exact = {name: t.double() for name, t in (("p", p), ("m", m), ("v", v), ("u", u))}
    bound = Bound(n)
    for step in range(1, 101):
        g = torch.randn(n) * (1.0 if step < 30 else 0.1)  # so that the maximum stays behind
        most = [u] if amsgrad else None
        adamw_step_(
            [p], [g], [m], [v], Hyper(**HYPER, step=step), max_exp_avg_sqs=most, maximize=maximize
        )
        parameter.grad = g
        optimizer.step()
        before = [exact[name].clone() for name in "pmv"]
        most = [exact["u"]] if amsgrad else None
        adamw_step_ref(
            *([t] for t in (exact["p"], g.double(), exact["m"], exact["v"])),
            **HYPER,
            step=step,
            maximize=maximize,
            max_exp_avg_sqs=most,
        )
        signed = -g.double() if maximize else g.double()
        after = [exact["p"], exact["m"], exact["v"], exact["u"] if amsgrad else exact["v"]]
        bound.step(signed, 0, *before, *after, **HYPER, step=step)
        if not amsgrad:
            bound.u = torch.zeros(n, dtype=torch.float64)
        bound.holds(p, m, v, exact)
        state = optimizer.state[parameter]
        bound.holds(parameter.detach(), state["exp_avg"], state["exp_avg_sq"], exact)
    # The bound says something: parameters moved by about 0.5.
    assert bound.p.max() < 1e-4
    assert (exact["u"] > 1.02 * exact["v"]).any() == amsgrad


hyper_parameters = st.builds(
    Hyper,
    lr=st.floats(0, 0.1),
    beta1=st.floats(0, 0.999),
    beta2=st.floats(0, 0.9999),
    eps=st.floats(1e-8, 1e-2),
    weight_decay=st.floats(0, 1),
    step=st.integers(1, 10_000),
)


@given(
    shapes=st.lists(st.lists(st.integers(0, 7), max_size=3), max_size=5),
    hypers=st.lists(hyper_parameters, min_size=1, max_size=3),
    storage=st.sampled_from(
        [("float32", "float32", None)]
        + [
            (p, g, "full")
            for p in ("bfloat16", "float16")
            for g in ("float32", "bfloat16", "float16")
        ]
        + [("bfloat16", g, "remainder") for g in ("float32", "bfloat16")]
    ),
    amsgrad=st.booleans(),
    maximize=st.booleans(),
    scale=st.one_of(st.none(), st.floats(2**-10, 8, width=32)),
    magnitude=st.sampled_from([1e-6, 1.0, 100.0]),
    data=st.data(),
)
def test_any_step_is_within_the_bound_of_the_oracle(
    shapes, hypers, storage, amsgrad, maximize, scale, magnitude, data
):
    dtype, grad_dtype = (getattr(torch, name) for name in storage[:2])
    n = len(shapes)
    hyper_index = data.draw(st.lists(st.integers(0, len(hypers) - 1), min_size=n, max_size=n))
    weights = [torch.randn(shape) for shape in shapes]
    grads = [(torch.randn(shape) * magnitude).to(grad_dtype) for shape in shapes]
    exp_avgs = [torch.randn(shape) * 0.1 for shape in shapes]
    exp_avg_sqs = [torch.rand(shape) * 0.1 for shape in shapes]
    most = [torch.rand(shape) * 0.1 for shape in shapes] if amsgrad else None
    before = clone([weights, grads, exp_avgs, exp_avg_sqs, most or exp_avg_sqs])
    params, masters = weights, None
    if storage[2] == "full":
        params, masters = [w.to(dtype) for w in weights], weights
    elif storage[2] == "remainder":
        params, masters = (list(x) for x in zip(*map(master_split, weights))) if n else ([], [])
    adamw_step_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        hypers,
        hyper_index=hyper_index,
        master_weights=masters,
        max_exp_avg_sqs=most,
        grad_scale=None if scale is None else torch.tensor(scale),
        maximize=maximize,
    )
    for i, row in enumerate(zip(*before)):
        exact = [t.double() for t in row]
        w0, _, m0, v0, _ = (t.clone() for t in exact)
        hyper = hypers[hyper_index[i]]._asdict()
        adamw_step_ref(
            *([t] for t in exact[:4]),
            **hyper,
            grad_scale=1.0 if scale is None else scale,
            maximize=maximize,
            max_exp_avg_sqs=exact[4:] if amsgrad else None,
        )
        bound = Bound(w0.shape)
        w1, _, m1, v1, u1 = exact if amsgrad else (*exact[:4], exact[3])
        g = exact[1] * (1.0 if scale is None else scale) * (-1 if maximize else 1)
        bound.step(g, int(scale is not None), w0, m0, v0, w1, m1, v1, u1, **hyper)
        weight = master_join(params[i], masters[i]) if storage[2] == "remainder" else weights[i]
        bound.holds(weight, exp_avgs[i], exp_avg_sqs[i], {"p": w1, "m": m1, "v": v1})
        if storage[2] == "full":
            rounded = master_split(weight)[0] if dtype == torch.bfloat16 else weight.to(dtype)
            assert torch.equal(params[i], rounded)


@sweep("choice", ["auto", "torch"])
@sweep("grad_dtype", [None, torch.float32])
@sweep("dtype", [torch.bfloat16, torch.float16])
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


@sweep("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_torchs_kernel_skips_zeroes_scales_and_takes_tensors(dtype, monkeypatch):
    """Where torch's fused AdamW serves, the keywords mean the same."""
    monkeypatch.setattr(backend, "choice", "torch")
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    params, grads, exp_avgs, exp_avg_sqs = make((5, 0, 7), dtype)
    exp_avgs, exp_avg_sqs = ([t.to(exact) for t in column] for column in (exp_avgs, exp_avg_sqs))
    masters = [p.float() for p in params] if dtype in (torch.bfloat16, torch.float16) else None
    most = [t.clone() for t in exp_avg_sqs]
    hyper = Hyper(**HYPER, step=3)
    before = clone([params, exp_avgs, exp_avg_sqs, masters or params, most])
    tensors = hyper._replace(lr=torch.tensor(1e-2), step=torch.tensor(3.0))
    kept = clone([grads])[0]
    lists = (params, grads, exp_avgs, exp_avg_sqs)
    keywords = {"master_weights": masters, "max_exp_avg_sqs": most, "zero_grad": True}
    adamw_step_(*lists, tensors, found_inf=torch.ones(()), **keywords)
    assert_same([params, exp_avgs, exp_avg_sqs, masters or params, most], before)
    assert not any(g.any() for g in grads)
    scale = torch.tensor(0.5)
    grads[:] = clone([kept])[0]
    found = torch.zeros(())
    adamw_step_(*lists, tensors, found_inf=found, grad_scale=scale, maximize=True, **keywords)
    wide = [[t.double() for t in column] for column in (before[3], kept, *before[1:3], before[4])]
    adamw_step_ref(
        *wide[:4],
        **{**HYPER, "lr": torch.tensor(1e-2).item()},
        step=3,
        grad_scale=0.5,
        maximize=True,
        max_exp_avg_sqs=wide[4],
    )
    for got, want in zip(masters or params, wide[0]):
        assert torch.allclose(got.double(), want, rtol=0, atol=16 * torch.finfo(exact).eps)


def test_ranges_of_flat_buffers_with_torchs_kernel(monkeypatch):
    state = [torch.rand(50) for _ in range(4)]
    ours = clone([state])[0]
    hypers = [Hyper(**HYPER, step=3), Hyper(**{**HYPER, "lr": 0.1}, step=9)]
    ranges = [(3, 20, 1, 0), (20, 31, 0, 17), (40, 40, 0, 0)]
    adamw_step_flat_(*ours, ranges, hypers, zero_grad=True)
    monkeypatch.setattr(backend, "choice", "torch")
    adamw_step_flat_(*state, ranges, hypers, zero_grad=True)
    for a, b in zip(state, ours):
        torch.testing.assert_close(a, b)
    assert not state[1][3:31].any()
    assert state[1][31:].all()
