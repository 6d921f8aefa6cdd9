"""Options, parameters, memory and gradients that optimizers refuse, each by its name."""

import math

import pytest
import torch
from optimizers import (
    BF16,
    FP16,
    FP32,
    FP64,
    HYPER,
    UINT8,
    adafactor,
    build,
    put_gradients,
    run,
    step_counts,
    vector,
)
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import fastpar
from fastpar import Adafactor, AdamW, Muon
from fastpar.optim.base import check_overlap
from fastpar.optim.schedule import DynamicLossScale
from fastpar.optim.state import Storage

OPTIONS = {
    AdamW: [
        ({"lr": -1.0}, r"AdamW: expected 0\.0 <= lr < inf, got lr=-1\.0"),
        ({"lr": math.nan}, r"expected 0\.0 <= lr < inf, got lr=nan"),
        ({"lr": torch.tensor(-1.0)}, r"expected 0\.0 <= lr < inf, got lr=-1\.0"),
        ({"lr": torch.ones(2)}, r"a tensor of one element, got lr of shape=\[2\]"),
        ({"lr": "0.1"}, "expected lr to be a number, got lr='0.1'"),
        ({"lr": None}, "expected lr to be a number, got lr=None"),
        ({"lr": 1j}, "expected lr to be a number"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\] < 1\.0, got betas\[0\]=1\.0"),
        ({"betas": (0.9, -0.1)}, r"betas\[1\] < 1\.0, got betas\[1\]=-0\.1"),
        ({"betas": (torch.tensor(1.5), 0.9)}, r"betas\[0\] < 1\.0, got betas\[0\]=1\.5"),
        ({"betas": None}, "expected betas to be two numbers, got betas=None"),
        ({"betas": 0.9}, "expected betas to be two numbers, got betas=0.9"),
        ({"betas": (0.9,)}, "expected betas to be two numbers"),
        ({"betas": (0.9, 0.99, 0.5)}, "expected betas to be two numbers"),
        ({"betas": "ab"}, "expected betas to be two numbers"),
        ({"betas": (0.9, None)}, r"expected betas\[1\] to be a number"),
        ({"eps": "1e-8"}, "expected eps to be a number"),
        ({"eps": -1.0}, r"expected 0\.0 <= eps .* got eps=-1\.0"),
        ({"weight_decay": -0.1}, r"got weight_decay=-0\.1"),
        ({"weight_decay": None}, "expected weight_decay to be a number"),
        ({"max_grad_norm": 0.0}, r"expected max_grad_norm > 0 or None, got max_grad_norm=0\.0"),
        ({"max_grad_norm": math.nan}, r"expected max_grad_norm > 0 or None, got max_grad_norm=nan"),
        ({"max_grad_norm": "1"}, "expected max_grad_norm to be a number"),
        ({"seed": -1}, r"expected 0 <= seed < 2\*\*63, got seed=-1"),
        ({"seed": 0.5}, "expected 0 <= seed"),
        ({"differentiable": True}, r"expected differentiable=False, got .*=True; use torch\.optim"),
        ({"foreach": True, "fused": True}, r"expected at most one of foreach and fused"),
        ({"master_weights": "half"}, r"False, True or 'remainder', got master_weights='half'"),
        ({"moment_dtype": FP16}, r"bfloat16 or torch\.uint8, got moment_dtype=torch\.float16"),
        (
            {"master_weights": True, "stochastic_rounding": True},
            r"expected stochastic_rounding=True without master weights, got master_weights=True",
        ),
    ],
    Adafactor: [
        ({"lr": -1.0}, r"Adafactor: expected 0\.0 <= lr < inf, got lr=-1\.0; correct"),
        ({"lr": math.nan}, r"got lr=nan"),
        ({"lr": "0.1"}, "expected lr to be a number"),
        ({"lr": torch.ones(2)}, "expected a number or a tensor of one element, got lr"),
        ({"beta2_decay": 0.1}, r"expected -inf <= beta2_decay <= 0\.0, got beta2_decay=0\.1"),
        ({"beta2_decay": None}, "expected beta2_decay to be a number"),
        ({"eps": (-1.0, 1e-3)}, r"got eps\[0\]=-1\.0"),
        ({"eps": (None, -1e-3)}, r"got eps\[1\]=-0\.001"),
        ({"eps": 1e-3}, "expected eps to be two numbers"),
        ({"eps": None}, "expected eps to be two numbers"),
        ({"eps": (None, "x")}, r"expected eps\[1\] to be a number"),
        ({"d": 0.9}, r"expected 1\.0 <= d < inf, got d=0\.9"),
        ({"d": "1"}, "expected d to be a number"),
        ({"weight_decay": -0.1}, r"got weight_decay=-0\.1"),
        ({"beta1": 1.0}, r"expected 0\.0 <= beta1 < 1\.0, got beta1=1\.0"),
        ({"beta1": "0.9"}, "expected beta1 to be a number"),
        ({"foreach": "yes"}, "expected foreach to be None, True or False"),
        ({"max_grad_norm": 0.0}, r"Adafactor: expected max_grad_norm > 0 or None, got"),
        ({"max_grad_norm": "1"}, "expected max_grad_norm to be a number"),
        ({"master_weights": "full"}, r"to be False, True or 'remainder', got .*='full'"),
    ],
    Muon: [
        ({"matrices": 4}, r"outputs of parameter 0 .*=\[6, 4\], got matrices=4"),
        ({"ns_steps": 6}, "1 <= ns_steps <= 5, got ns_steps=6; 5 steps will do"),
        ({"adjust_lr_fn": "x"}, "'match_rms_adamw', got adjust_lr_fn='x'"),
        ({"momentum": 1.0}, "0.0 <= momentum < 1.0, got momentum=1.0"),
        ({"row_beta": -0.1}, "0.0 <= row_beta < 1.0, got row_beta=-0.1"),
        ({"momentum_dtype": FP16}, "got momentum_dtype=torch.float16"),
    ],
    DynamicLossScale: [
        ({"init": 0.5}, r"expected 0 < min_scale=1\.0 <= init <= max_scale=.*, got init=0\.5"),
        ({"init": 2.0**30}, r"got init=1073741824\.0"),
        ({"min_scale": 0.0}, r"expected 0 < min_scale=0\.0"),
        ({"growth_interval": 0}, r"expected an integer growth_interval >= 1, got .*=0"),
        ({"growth_interval": 1.5}, r"expected an integer growth_interval >= 1, got .*=1\.5"),
        ({"growth_interval": math.nan}, "expected an integer growth_interval"),
        ({"init": math.inf, "max_scale": math.inf}, r"init finite, got init=inf"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "options", "words"), [(kind, *row) for kind, rows in OPTIONS.items() for row in rows]
)
def test_options(kind, options, words):
    params = () if kind is DynamicLossScale else ([nn.Parameter(torch.zeros(6, 4))],)
    with pytest.raises(ValueError, match=words):
        kind(*params, **options)
    if options.keys() & {"master_weights", "moment_dtype"} and kind is AdamW:
        rest = {"master_weights": False, "stochastic_rounding": False, "moment_dtype": FP32}
        with pytest.raises(ValueError, match=words):
            Storage(**rest | options)


def test_options_at_their_limits_are_accepted():
    """With lr = 0 and no decay nothing moves, and nothing is divided by zero."""
    model = build()
    before = vector(model)
    optimizer = adafactor(
        model.parameters(), lr=0.0, beta2_decay=0.0, eps=(0.0, 0.0), d=1.0, beta1=0.0
    )
    assert torch.equal(run(model, optimizer, 2), before)


def test_options_of_a_group_are_checked_and_the_group_is_not_kept():
    optimizer = AdamW(build().parameters())
    with pytest.raises(ValueError, match=r"AdamW: expected 0\.0 <= lr < inf, got lr=-2\.0"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": -2.0})
    assert len(optimizer.param_groups) == 1
    for name, value in {
        "master_weights": True, "stochastic_rounding": False, "seed": 1, "moment_dtype": UINT8,
        "max_grad_norm": 1.0, "zero_grad_in_step": True,
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=rf"expected {name} as an option .*Redundancy"):
            AdamW([{"params": [nn.Parameter(torch.ones(2))], name: value}])


# Parameters

WHOLE = torch.randn(4, 6)
PARAMETERS = [
    (AdamW, torch.zeros(3, dtype=BF16), {},
     r"dtype=torch\.bfloat16 with master_weights=False and .*; pass master_weights"),
    (AdamW, torch.zeros(3, dtype=FP16), {},
     r"dtype=torch\.float16 with master_weights=False and .*; pass master_weights"),
    (AdamW, torch.zeros(3, dtype=FP16), {"master_weights": "remainder"},
     r"dtype=torch\.float16 with 'remainder'.*pass"),
    (AdamW, torch.zeros(3, dtype=FP16), {"stochastic_rounding": True},
     r"float16 with stochastic_rounding=True.*pass"),
    (AdamW, torch.zeros(3), {"amsgrad": True, "moment_dtype": UINT8},
     r"expected amsgrad=False with moment"),
    (AdamW, torch.zeros(3, dtype=FP64), {"moment_dtype": BF16},
     r"expected moment_dtype=torch\.float32 with fp64 parameters"),
    (AdamW, torch.zeros(3, dtype=torch.complex64), {},
     r"expected fp32, .* got a parameter of dtype=torch\.complex64"),
    (AdamW, WHOLE[:, :3], {}, r"of group \d, \[4, 3\], a view with strides \(6, 1\)"),
    (AdamW, WHOLE[0].expand(2, 6), {}, r"a view with strides \(0, 1\)"),
    (AdamW, torch._neg_view(WHOLE), {}, "a view negated lazily"),
    (AdamW, WHOLE.to_sparse(), {}, "expected dense parameters, got parameter 0 of group"),
    (Adafactor, WHOLE.to_sparse(), {}, "expected dense parameters, got parameter 0 of group"),
    (Adafactor, torch.ones(2, dtype=BF16), {}, r"dtype=torch.bfloat16 with master_weights=False; "),
    (Adafactor, torch.ones(2, dtype=FP64), {"master_weights": True},
     r"expected fp32 parameters, .*torch.float64"),
    (Adafactor, torch.ones(2, dtype=torch.complex64), {}, "got a parameter of dtype=torch.complex"),
    (Adafactor, torch.ones(2, dtype=FP16), {"master_weights": "remainder"},
     r"expected fp16 parameters with master"),
    (Muon, torch.zeros(4), {},
     r"\[M, N\], got parameter 0 of its group of shape=\[4\]; put it in"),
    (Muon, torch.zeros(2, 2, 2), {},
     r"shape=\[2, 2, 2\]; .* adamw=True, or take fastpar.muon_gr"),
    (Muon, torch.zeros(6, 4, dtype=BF16), {}, "master_weights=True"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "values", "options", "words"), PARAMETERS)
def test_parameters_are_refused_when_they_are_given(kind, values, options, words):
    with pytest.raises(ValueError, match=words):
        kind([nn.Parameter(values)], **options)
    group = {name: options[name] for name in options.keys() & {"amsgrad"}}
    rest = {name: value for name, value in options.items() if name not in group}
    optimizer = kind([nn.Parameter(torch.zeros(3, 2))], **rest)
    with pytest.raises(ValueError, match=words):
        optimizer.add_param_group({"params": [nn.Parameter(values)], **group})
    assert len(optimizer.param_groups) == 1


def test_a_wrong_parameter_is_named():
    named = [("h.0.weight", nn.Parameter(WHOLE)), ("h.0.bias", nn.Parameter(torch.zeros(4)))]
    with pytest.raises(ValueError, match=r"got 'h.0.bias' of shape=\[4\]; put it into a group"):
        Muon(named)


def test_parameters_that_change_their_strides_later():
    p = nn.Parameter(WHOLE[:, :3].clone(memory_format=torch.contiguous_format))
    p.grad = torch.ones_like(p)
    AdamW([p]).step()  # the advice works
    late = nn.Parameter(torch.randn(4, 3))
    optimizer = AdamW([late])
    late.data = WHOLE[:, :3]
    late.grad = torch.ones(4, 3)
    with pytest.raises(ValueError, match="got a view with gaps or repeated elements, params"):
        optimizer.step()
    # Other strides, but dense: reloading lays the state out anew, as the message says.
    p.data = p.data.T.contiguous().T
    optimizer = AdamW([p])
    optimizer.step()
    p.data = p.data.contiguous()
    with pytest.raises(ValueError, match=r"reload an optimizer's by load_state_dict\(state_dict"):
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_memory_that_two_parameters_share_is_refused():
    flat = torch.zeros(100)
    a, b = nn.Parameter(flat[:60].view(6, 10)), nn.Parameter(flat[59:])
    overlapping = r"got parameter 1 of group 0 overlapping parameter 0"
    for pair in ([a, b], [a, a]):
        with pytest.raises(ValueError, match=overlapping):
            AdamW(pair)
    with pytest.raises(ValueError, match=r"appear in more than one parameter group"):
        AdamW([{"params": [a]}, {"params": [a]}])
    optimizer = AdamW([("a", a)])
    with pytest.raises(ValueError, match=r"got parameter 0 of group 1 \('b'\) overlapping .*'a'"):
        optimizer.add_param_group({"params": [("b", b)]})
    assert len(optimizer.param_groups) == 1
    parts = [nn.Parameter(flat), nn.Parameter(flat[1:3]), nn.Parameter(flat[50:60])]
    for order in ((0, 1), (1, 0), (1, 2, 0), (2, 0)):
        with pytest.raises(ValueError, match=r"expected parameters in memory of their own, got"):
            AdamW([parts[i] for i in order])
    # Neighbours and transposed views are taken.
    parts = [flat[:20].view(4, 5).t(), flat[20:20], flat[20:100], torch.empty(0), torch.empty(0)]
    params = [nn.Parameter(t) for t in parts]
    optimizer = AdamW([*params, nn.Parameter(torch.empty(3, device="meta"))])
    check_overlap(optimizer.param_groups)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert (flat < 0).all()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["flat", "original", "DTensor"])
def test_parameters_of_torchs_fsdp(kind):
    """Its flat parameters are plain tensors; a norm or a matrix needs those of all ranks. FSDP2
    keeps a rank's part of each in a DTensor."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(3, 4)
        before = AdamW(model.parameters())
        if kind == "DTensor":
            fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
            words = "of group 0 of type=DTensor; for FSDP2's DTensors use fastpar.par"
            for make in (AdamW, Adafactor):
                with pytest.raises(ValueError, match=f"{make.__name__}: expected plain .*{words}"):
                    make(model.parameters())
            with pytest.raises(ValueError, match=r"got parameter 0 of group 1 .*DTensor"):
                before.add_param_group({"params": list(model.parameters())})
            assert len(before.param_groups) == 1
            return
        model = FullyShardedDataParallel(
            model, use_orig_params=kind == "original", device_id=torch.device("cpu")
        )
        got = "got parameter 0 of group 0.*, of which FSDP gives each rank a piece"
        for make, words in (
            (lambda p: AdamW(p, max_grad_norm=1.0), "AdamW: expected whole .* with max_grad_norm"),
            (Adafactor, "Adafactor: expected whole parameters"),
            (Muon, "Muon: expected whole parameters"),
        ):
            with pytest.raises(ValueError, match=f"{words}, {got}"):
                make(model.parameters())
        optimizer = AdamW(model.parameters())
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    finally:
        dist.destroy_process_group()


# Gradients and states of a step


@pytest.mark.parametrize("make", [AdamW, Adafactor])
def test_sparse_gradients(make):
    model = nn.Embedding(5, 3, sparse=True)
    model(torch.tensor([1])).sum().backward()
    words = rf"{make.__name__}\.step: expected dense gradients, got layout=torch\.sparse"
    with pytest.raises(RuntimeError, match=words):
        make(model.parameters()).step()


def test_a_step_that_is_refused_changes_nothing():
    """fp32 gradients of 16-bit parameters are main gradients and allowed; others are not."""
    model = build()
    optimizer = AdamW(model.parameters(), max_grad_norm=1.0)
    run(model, optimizer, 1)
    before = vector(model)
    put_gradients(model, 1)
    kept = optimizer.state[model[0].weight]["exp_avg"]
    optimizer.state[model[0].weight]["exp_avg"] = torch.empty(33, 7, device="meta")
    with pytest.raises(ValueError, match=r"adamw_step_: expected .*device.*meta"):
        optimizer.step()
    optimizer.state[model[0].weight]["exp_avg"] = kept
    p = model[3].weight
    if not hasattr(p, "grad_dtype"):
        pytest.skip("torch < 2.13 refuses a gradient of another dtype itself")
    p.grad = None
    p.grad_dtype = BF16
    p.grad = torch.ones_like(p, dtype=BF16)
    with pytest.raises(ValueError, match=r"adamw_step_: expected .*grads\[4\]=torch\.bfloat16"):
        optimizer.step()
    assert torch.equal(vector(model), before)
    assert set(step_counts(optimizer)) == {1}


def test_grad_scaler_beside_main_gradients():
    """It would not see them: its update() fails, and a loss scale never finds its level."""
    model = fastpar.parallelize(build(BF16), fastpar.Mesh(), grad_dtype=FP32)
    optimizer = AdamW(model.parameters(), **HYPER, master_weights=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(torch.ones(2, 7).bfloat16()).float().square().mean()).backward()
    words = r"expected gradients in p\.grad under GradScaler, got main"
    with pytest.raises(RuntimeError, match=words):
        scaler.step(optimizer)


def test_buckets_are_not_written_through_negated_views():
    from fastpar.kernels import accumulate_, pack_, unpack_

    negated, x = torch._neg_view(torch.zeros(4)), torch.ones(4)
    for name, call in (
        ("flat", lambda: pack_(negated, [x])),
        (r"tensors\[0\]", lambda: unpack_([negated], x)),
        (r"totals\[0\]", lambda: accumulate_([negated], [x])),
    ):
        with pytest.raises(ValueError, match=f"memory that holds values, got {name}"):
            call()
    flat, total = torch.zeros(4), torch.zeros(4)
    pack_(flat, [torch._neg_view(x)])
    accumulate_([total], [torch._neg_view(x)])
    assert torch.equal(flat, -x)
    assert torch.equal(total, -x)
