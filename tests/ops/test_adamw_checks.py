"""Every wrong argument of adamw_step_ and adamw_step_flat_ has a message that names it."""

import pytest
import torch
from cells import sweep

from fastpar.kernels import _C, Hyper, adamw_step_, adamw_step_flat_, backend

HYPER = Hyper(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=1)


def four(n=4, dtype=torch.float32):
    """Parameter, gradient and moments, in lists of one."""
    return tuple(
        [make(n, dtype=dtype)] for make in (torch.ones, torch.ones, torch.zeros, torch.zeros)
    )


def refuses(match, *lists, hypers=HYPER, **kwargs):
    with pytest.raises(ValueError, match=match):
        adamw_step_(*lists, hypers, **kwargs)


def test_lists():
    p, g, m, v = four()
    refuses("expected lists of one length, got lengths=.*'exp_avg_sqs': 0", p, g, m, [])
    refuses("got lengths=.*'first_indices': 2", p, g, m, v, first_indices=[0, 0])
    refuses("expected hyper_index to name one of 2 hypers", p, g, m, v, hypers=[HYPER, HYPER])
    refuses(r"got hyper_index=\[1\]", p, g, m, v, hyper_index=[1])
    refuses(r"got hyper_index=\[-1\]", p, g, m, v, hyper_index=[-1])


def test_dtypes():
    p, g, m, v = four()
    low, half = [p[0].bfloat16()], [p[0].half()]
    f32 = [p[0].clone()]
    refuses(r"got params\[0\]=torch.float64 grads\[0\]=torch.float32", [p[0].double()], g, m, v)
    refuses(r"got params\[0\]=torch.int32", [p[0].int()], g, m, v)
    refuses(r"got params\[0\]=torch.float32 grads\[0\]=torch.bfloat16", p, low, m, v)
    refuses(r"params\[0\]=torch.bfloat16 grads\[0\]=torch.float16", low, half, m, v)
    remainder = [torch.zeros(4, dtype=torch.int16)]
    refuses("grads.0.=torch.float16", low, half, m, v, master_weights=remainder)
    refuses("a master weight for each 16-bit .* master_weights.0.=None", low, g, m, v)
    refuses("master_weights.0.=None", half, g, m, v, stochastic_rounding_seed=1)
    refuses("master_weights.0.=torch.int16", half, g, m, v, master_weights=remainder)
    refuses("None for fp32, got .* master_weights.0.=torch.float32", p, g, m, v, master_weights=f32)
    refuses("exp_avg_sqs and max_exp_avg_sqs of one dtype, .* at index 0", p, g, low, v)
    refuses("of one dtype, fp32, bf16 or uint8, got", p, g, half, half)
    refuses("of one dtype", p, g, m, v, max_exp_avg_sqs=low)


def test_eight_bit_moments():
    p, g, _, _ = four()
    codes = [[torch.zeros(4, dtype=torch.uint8)] for _ in range(3)]
    scales = {"exp_avg_scales": [torch.zeros(1)], "exp_avg_sq_scales": [torch.zeros(1)]}
    refuses(r"scales of shape \[1\] .* got exp_avgs\[0\]=torch.uint8 and \[None", p, g, *codes[:2])
    wrong = {**scales, "exp_avg_sq_scales": [torch.zeros(2)]}
    refuses(r"scales of shape \[1\] .* \[\[1\], \[2\]\]", p, g, *codes[:2], **wrong)
    _, _, m, v = four()
    refuses("and none for others", p, g, m, v, **scales)
    refuses("no max_exp_avg_sqs with uint8", p, g, *codes[:2], max_exp_avg_sqs=codes[2], **scales)
    refuses(
        r"multiples of 256 for uint8 moments, got first_indices\[0\]=100",
        p,
        g,
        *codes[:2],
        **scales,
        first_indices=[100],
    )


LISTS = ("p", "g", "m", "v", "max_exp_avg_sqs", "master_weights")
SCALES = ("exp_avg_scales", "exp_avg_sq_scales")
FORMS = {
    "shape": lambda t: t[:, :4].clone(),
    "strides": lambda t: t.t().contiguous().t(),
    "device": lambda t: t.to("meta"),
}


def call(lists):
    """adamw_step_ on lists by name."""
    lists = dict(lists)
    adamw_step_(*(lists.pop(name) for name in LISTS[:4]), HYPER, **lists)


@sweep(
    ("name", "form"),
    [
        (name, form)
        for name in (*LISTS, *SCALES)
        for form in FORMS
        if form != "strides" or name not in ("g", *SCALES)  # which may have any, and have none
    ],
)
def test_dtypes_that_were_accepted_are_no_reason_to_look_less(name, form):
    """Dtypes are checked once in a process; all else in each call."""
    lists = {n: [torch.ones(8, 6)] for n in LISTS[:5]}
    if name == "master_weights":
        lists["p"] = [torch.ones(8, 6, dtype=torch.bfloat16)]
        lists["master_weights"] = [torch.ones(8, 6)]
    if name in SCALES:
        del lists["max_exp_avg_sqs"]
        lists |= {n: [torch.ones(8, 6, dtype=torch.uint8)] for n in "mv"}
        lists |= {n: [torch.ones(1)] for n in SCALES}
    call(lists)
    x = lists[name][0]
    lists[name] = [torch.ones(2) if name in SCALES and form == "shape" else FORMS[form](x)]
    with pytest.raises(ValueError, match=r"adamw_step_: expected (one|dense|fp32 exp_avg_scales)"):
        call(lists)


def test_shapes_devices_and_strides():
    p, g, m, v = four()
    refuses(r"expected one shape per parameter, got \[\[4\], \[4\], \[3\]", p, g, [m[0][:3]], v)
    refuses(r"one device per parameter, got \['cpu', 'meta'", p, [g[0].to("meta")], m, v)
    refuses("expected dense parameters and states", [torch.ones(8)[::2]], g, m, v)
    refuses("expected dense parameters and states", p, g, [torch.zeros(8)[::2]], v)


@sweep(
    ("name", "value"),
    [
        ("lr", -1.0),
        ("lr", float("nan")),
        ("beta1", 1.0),
        ("beta1", -0.1),
        ("beta2", 1.0),
        ("eps", -1e-8),
        ("weight_decay", -0.1),
        ("weight_decay", float("inf")),
        ("step", 0),
    ],
)
def test_scalars(name, value):
    refuses(
        f"expected {name} >= .*got {name}={value}", *four(), hypers=HYPER._replace(**{name: value})
    )


def test_tensors_of_one_element():
    lists = four()
    refuses("expected an fp32 grad_scale of one element on cpu", *lists, grad_scale=torch.ones(2))
    refuses("an fp32 found_inf .* got .*float64", *lists, found_inf=torch.zeros((), dtype=float))
    lr = torch.tensor(1e-2, device="meta")
    refuses(
        "an fp32 lr of one element on cpu, got .* on meta", *lists, hypers=HYPER._replace(lr=lr)
    )


def test_seed_threads_and_first_indices():
    lists = four()
    refuses("got stochastic_rounding_seed=-1", *lists, stochastic_rounding_seed=-1)
    refuses("got stochastic_rounding_seed=9223", *lists, stochastic_rounding_seed=2**63)
    refuses("expected threads >= 1 or None, got threads=0", *lists, threads=0)
    refuses(r"got first_indices\[0\]=-1", *lists, first_indices=[-1])


def test_shared_memory():
    whole = torch.ones(10)
    other = [[torch.zeros(n) for n in (6, 5)] for _ in range(3)]
    refuses(r"got params\[0\] overlapping params\[1\]", [whole[:6], whole[5:]], *other)
    p, g, m, _ = four()
    refuses(r"got exp_avgs\[0\] overlapping exp_avg_sqs\[0\]|exp_avg_sqs.0. over", p, g, m, m)
    refuses("got params.0. overlapping grads.0.|grads.0. overlapping params", p, p, *four()[2:])
    twice, states = [p[0], torch.ones(4)], [[torch.zeros(4) for _ in range(2)] for _ in range(2)]
    refuses(r"grads\[.\] overlapping grads", twice, [g[0], g[0]], *states, zero_grad=True)
    adamw_step_(twice, [g[0], g[0]], *states, HYPER)  # read twice is no harm
    assert torch.equal(*twice)


def test_overlap_behind_a_longer_gradient():
    """Sorted by address, the neighbours of this overlap do not touch."""
    memory = torch.ones(100)
    params = [torch.ones(80), torch.ones(10), memory[50:60]]
    grads = [memory[:80], memory[:10], torch.ones(10)]
    states = [[torch.zeros_like(p) for p in params] for _ in range(2)]
    refuses(r"got grads\[0\] overlapping params\[2\]", params, grads, *states)


def test_flat():
    p, g, m, v = (t[0] for t in four(300))

    def flat_refuses(match, *tensors, ranges=((0, 300, 0, 0),), **kwargs):
        with pytest.raises(ValueError, match=match):
            adamw_step_flat_(*tensors, ranges, HYPER, **kwargs)

    for wrong in ((-1, 3, 0, 0), (5, 4, 0, 0), (0, 301, 0, 0), (0, 3, 1, 0), (0, 3, 0, -1)):
        flat_refuses(r"got ranges\[1\]=\(", p, g, m, v, ranges=[(0, 0, 0, 0), wrong])
    codes = [torch.zeros(300, dtype=torch.uint8) for _ in range(2)]
    scales = {"exp_avg_scale": torch.zeros(2), "exp_avg_sq_scale": torch.zeros(2)}
    for wrong in ((5, 300, 0, 0), (0, 300, 0, 5)):
        flat_refuses("multiples of 256, got", p, g, *codes, ranges=[wrong], **scales)
    flat_refuses("sharing|share no memory", p, g, m, v, ranges=[(0, 10, 0, 0), (9, 12, 0, 0)])
    square = [t.view(10, 30) for t in (p, g, m, v)]
    flat_refuses("expected contiguous buffers of one dimension", *square)
    flat_refuses("expected contiguous buffers", p, torch.ones(1).expand(300), m, v)


def test_modes_that_torchs_kernel_has_not(monkeypatch):
    monkeypatch.setattr(backend, "choice", "torch")
    p, g, m, v = four()
    low = [p[0].bfloat16()]
    for lists, kwargs in (
        ((p, g, [m[0].bfloat16()], [v[0].bfloat16()]), {}),
        ((low, g, m, v), {"stochastic_rounding_seed": 1}),
        ((low, g, m, v), {"master_weights": [torch.zeros(4, dtype=torch.int16)]}),
    ):
        with pytest.raises(RuntimeError, match="expected fp32 moments, and fp32 master weights"):
            adamw_step_(*lists, HYPER, **kwargs)


def test_compiled_module_checks_its_lists():
    def call(columns, ranges=(), hypers=(0.0,) * 6, hypers_at=(None,) * 6, storage=(0, 0, 0, 0)):
        scalars = (False, False, None, None, 0, 1)
        _C.adamw_step(columns, list(ranges), list(hypers), list(hypers_at), storage, *scalars)

    x = torch.zeros(3)
    columns = [[x], [x], [x], [x], [], [], [], []]
    call(columns)
    for wrong in (x[:2], x.bfloat16(), torch.zeros(6)[::2]):
        for i in range(1, 4):
            with pytest.raises(ValueError, match=r"expected \w+\[0\] of 3 elements of float32"):
                call([*columns[:i], [wrong], *columns[i + 1 :]])
    with pytest.raises(ValueError, match="expected ranges within their lists, got range 0"):
        call(columns, ranges=(0, 0, 4, 0, 0))
    with pytest.raises(ValueError, match="expected lists of equal length, got params=1 grads=0"):
        call([[x], [], *columns[2:]])
    with pytest.raises(ValueError, match="expected 6 numbers and tensors per hyper and 5 per"):
        call(columns, ranges=(0, 0, 0))
    with pytest.raises(ValueError, match="expected ranges within their lists, got range 0"):
        call(columns, ranges=(1, 0, 0, 0, 0))
    with pytest.raises(ValueError, match="expected moment codes 0 to 2 and master codes 0 to 3"):
        call(columns, storage=(0, 0, 3, 0))
    with pytest.raises(ValueError, match="expected dtype code 0, 1 or 2, got code=7"):
        call(columns, storage=(7, 0, 0, 0))
