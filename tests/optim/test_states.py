"""What optimizers keep and refuse; state dicts: through files, of torch, between forms."""

import copy
import io
import math
import pickle

import pytest
import torch
from adamw_bound import ExactAdamW
from cells import sweep
from optimizers import (
    BF16,
    FORMS,
    FP16,
    FP32,
    FP64,
    HYPER,
    MODES,
    UINT8,
    adafactor,
    adamw,
    assert_same,
    assert_same_state,
    build,
    put_gradients,
    run,
    step_counts,
    vector,
)
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from fastpar import Adafactor, AdamW, Muon
from fastpar.kernels.adamw import decode_moment
from fastpar.optim.schedule import DynamicLossScale
from fastpar.optim.state import Storage

forms = pytest.mark.parametrize(("dtype", "make", "options"), FORMS.values(), ids=FORMS)


def through_a_file(saved):
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file)


@forms
def test_a_run_through_a_saved_state_continues_bit_for_bit(dtype, make, options):
    """And its copies go on alone; what is loaded is a copy too."""
    seed = {"seed": 7} if make is adamw else {}
    model = build(dtype)
    optimizer = make(model.parameters(), **{**options, "lr": torch.tensor(0.02)}, **seed)
    optimizer.max_grad_norm, optimizer.grad_scale = 1.0, 2.0
    run(model, optimizer, 3)
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    resumed = build(dtype, seed=1)
    resumed.load_state_dict(saved["model"])
    other = make(resumed.parameters(), **options)  # its lr and its seed come from the file
    other.max_grad_norm, other.grad_scale = 1.0, 2.0
    other.load_state_dict(saved["optimizer"])
    assert_same_state(other.state_dict(), optimizer.state_dict())
    assert other.param_groups[0]["lr"] is not saved["optimizer"]["param_groups"][0]["lr"]
    given, taken = (
        {x.data_ptr() for entries in state.values() for x in entries.values()}
        for state in (saved["optimizer"]["state"], other.state)
    )
    assert not given & taken
    copies = copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))
    want = run(model, optimizer, 3, start=3)
    for twin_model, twin in ((resumed, other), *copies):
        assert twin.skipped is False
        assert torch.equal(run(twin_model, twin, 3, start=3), want)
        assert torch.equal(twin.grad_norm, optimizer.grad_norm)
        assert_same_state(twin.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("first", ["torch's", "ours"])
def test_adamw_goes_on_with_torchs_state_and_torchs_with_ours(first, amsgrad):
    pairs = []
    for dtype, cls in ((FP64, ExactAdamW), (FP32, torch.optim.AdamW)):
        model = build(dtype)
        pairs.append((model, cls(model.parameters(), **HYPER, amsgrad=amsgrad)))
        run(*pairs[-1], 6)
    exact, eager = pairs[0][1], pairs[1][0]
    model = build()
    kinds = [torch.optim.AdamW, AdamW][:: 1 if first == "torch's" else -1]
    a = kinds[0](model.parameters(), **HYPER, amsgrad=amsgrad)
    run(model, a, 3)
    b = kinds[1](model.parameters(), lr=1.0)
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    assert b.param_groups[0]["lr"] == HYPER["lr"]
    assert b.param_groups[0].keys() == a.param_groups[0].keys()
    assert_same_state(a.state_dict(), b.state_dict())
    run(model, b, 3, start=3)
    exact.holds(eager.parameters(), model.parameters())


@pytest.mark.parametrize(("dtype", "make", "options"), MODES.values(), ids=MODES)
def test_every_form_loads_into_torch_and_comes_back(dtype, make, options):
    """8 bits -> fp32 -> 8 bits are the same bits too: decoded values are codes exactly."""
    ours = build(dtype)
    b = make(ours.parameters(), **options)
    run(ours, b, 3)
    eager = copy.deepcopy(ours) if dtype == FP64 else copy.deepcopy(ours).float()
    a = torch.optim.AdamW(eager.parameters())
    a.load_state_dict(through_a_file(b.torch_state_dict()))
    for p, q in zip(ours.parameters(), eager.parameters()):
        state = b.state[p]
        for name in ("exp_avg", "exp_avg_sq"):
            if f"{name}_codes" in state:
                parts = (state[f"{name}_codes"], state[f"{name}_scale"])
                expected = decode_moment(*parts, signed=name == "exp_avg")
            else:
                expected = state[name].to(q.dtype)
            assert_same(a.state[q][name], expected.to(q.dtype))
    assert set(step_counts(a)) == {3}
    if dtype == FP32:
        c = make(ours.parameters(), **options)
        c.load_state_dict(b.torch_state_dict())
        assert_same_state(b.state_dict(), c.state_dict())
    a.param_groups[0]["capturable"] = False  # on a CPU torch cannot
    assert run(eager, a, 1).isfinite().all()


@sweep("step", [2, torch.tensor([2.0])])
def test_an_older_state_of_torch_loads(step):
    """Before 1.12 step was a number, to 2.0 of shape [1] too, and groups had fewer options."""
    model = build()
    a, b = torch.optim.AdamW(model.parameters(), **HYPER), AdamW(model.parameters())
    run(model, a, 2)
    saved = copy.deepcopy(a.state_dict())
    for state in saved["state"].values():
        state["step"] = step
    for name in ("foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"):
        del saved["param_groups"][0][name]
    b.load_state_dict(saved)
    assert_same_state(a.state_dict(), b.state_dict())
    assert b.param_groups[0]["capturable"] is False


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_adafactors_state_goes_both_ways(dtype):
    theirs, ours = build(dtype), build(dtype)
    a = torch.optim.Adafactor(theirs.parameters(), lr=0.03)
    run(theirs, a, 3)
    ours.load_state_dict(theirs.state_dict())
    b = Adafactor(ours.parameters(), lr=1.0, master_weights=True)
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    assert b.param_groups[0]["lr"] == 0.03
    assert b.param_groups[0]["add_eps"] is False
    for p, q in zip(theirs.parameters(), ours.parameters()):
        for name, value in a.state[p].items():
            assert b.state[q][name].dtype == FP32
            assert torch.equal(b.state[q][name], value.float())
    run(ours, b, 3, start=3)
    theirs.load_state_dict(ours.state_dict())
    c = torch.optim.Adafactor(theirs.parameters())
    c.load_state_dict(copy.deepcopy(b.state_dict()))
    for p, q in zip(theirs.parameters(), ours.parameters()):
        for name in a.state[p]:
            assert torch.equal(c.state[p][name], b.state[q][name].to(c.state[p][name].dtype))
    found = run(theirs, c, 1, start=6), run(ours, b, 1, start=6)
    assert dtype == BF16 or torch.allclose(*found)


@pytest.mark.parametrize("default", [FP32, FP64])
def test_the_step_count_has_torchs_dtype(default, default_dtype):
    """Loaded, from either default, in either optimizer; where the kernel reads it, it is fp32."""
    default_dtype(default)

    def stepped(make, **options):
        p = nn.Parameter(torch.ones(3, 2, dtype=FP32))
        p.grad = torch.ones_like(p)
        optimizer = make([p], **options)
        optimizer.step()
        return optimizer, optimizer.state[p]

    for make in (AdamW, torch.optim.AdamW, Adafactor, torch.optim.Adafactor):
        optimizer, state = stepped(make)
        assert state["step"].dtype == default
        for dtype in (FP32, FP64):
            saved = optimizer.state_dict()
            saved["state"][0]["step"] = torch.tensor(4.0, dtype=dtype)
            optimizer.load_state_dict(saved)
            optimizer.step()
            [state] = optimizer.state.values()
            assert (state["step"].dtype, state["step"]) == (dtype, 5)
    assert stepped(AdamW, capturable=True)[1]["step"].dtype == FP32


@pytest.mark.parametrize("make", [adamw, adafactor])
def test_master_weights_change_their_form(make):
    """fp32 master -> remainder -> fp32 master, and all three runs go on with the same bits."""
    first = build(BF16)
    a = make(first.parameters(), master_weights=True)
    run(first, a, 3)
    second, third = copy.deepcopy(first), copy.deepcopy(first)
    b = make(second.parameters(), master_weights="remainder")
    b.load_state_dict(a.state_dict())
    c = make(third.parameters(), master_weights=True)
    c.load_state_dict(b.state_dict())
    assert_same_state(c.state_dict(), a.state_dict())
    want, *others = (run(m, o, 3, start=3) for m, o in ((first, a), (second, b), (third, c)))
    assert all(torch.equal(want, other) for other in others)


def test_masters_that_are_stale_or_missing_are_made_anew():
    """torch's AdamW casts entries it does not know, and steps the parameters without them."""
    model = build(BF16)
    a = adamw(model.parameters(), master_weights=True)
    run(model, a, 1)
    eager = torch.optim.AdamW(model.parameters(), **HYPER)
    eager.load_state_dict(a.state_dict())
    rounded = adamw(model.parameters(), stochastic_rounding=True)
    for other in (eager, rounded):
        run(model, other, 1)
    for other in (eager, rounded):
        b = AdamW(model.parameters(), master_weights=True)
        b.load_state_dict(other.state_dict())
        for p in model.parameters():
            assert torch.equal(b.state[p]["master_weight"], p.detach().float())
    c = AdamW(model.parameters(), stochastic_rounding=True)  # has no use for one
    c.load_state_dict(b.state_dict())
    assert_same_state(c.state_dict(), rounded.state_dict())


@sweep(("kind", "entry"), [("remainder", "master_remainder"), (True, "master_weight")])
def test_each_parameter_has_the_master_that_it_needs(kind, entry):
    model = build(BF16)
    model[2].float()
    optimizer = adamw(model.parameters(), master_weights=kind)
    run(model, optimizer, 1)
    kept = [entry in optimizer.state[p] for p in model.parameters()]
    assert kept == [True, True, False, False, True, True]


def test_amsgrad_can_be_switched_on_later():
    model = build()
    optimizer = adamw(model.parameters())
    run(model, optimizer, 2)
    optimizer.param_groups[0]["amsgrad"] = True
    run(model, optimizer, 1, scale=0.0)
    for state in optimizer.state.values():
        assert (state["max_exp_avg_sq"] > state["exp_avg_sq"]).all()


def test_entries_of_others_are_kept_and_hooks_see_what_is_loaded():
    model, seen = build(), []
    a, b = adamw(model.parameters()), AdamW(model.parameters())
    run(model, a, 1)
    saved = a.state_dict()
    saved["state"] |= {0: {**saved["state"][0], "ema": torch.ones(2)}, "note": 5}
    a.load_state_dict(saved)
    assert torch.equal(a.state[model[0].weight]["ema"], torch.ones(2))
    assert a.state["note"] == 5
    b.register_load_state_dict_pre_hook(lambda _, saved: {**saved, "state": {}})
    b.register_load_state_dict_post_hook(lambda optimizer: seen.append(len(optimizer.state)))
    b.load_state_dict(a.state_dict())
    assert seen == [0]
    assert b.param_groups[0]["lr"] == HYPER["lr"]


def altered(saved, **changes):
    """A copy with entries "index_name" or options of its group set; None: left out."""
    saved = copy.deepcopy(saved)
    for where, value in changes.items():
        index, _, name = where.partition("_")
        holder = saved["state"][int(index[1:])] if index[1:].isdigit() else saved["param_groups"][0]
        name = name if index[1:].isdigit() else where
        holder.pop(name) if value is None else holder.update({name: value})
    return saved


def saved_by(make=adamw, model=None, **options):
    model = build() if model is None else model
    optimizer = make(model.parameters(), **options)
    run(model, optimizer, 1)
    return optimizer.state_dict()


def wider():
    return nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.LayerNorm(33), nn.Linear(33, 4))


def ours(model, **options):
    return adamw(model.parameters(), **options)


OF_TWO = {"params": list(build().parameters())[:1]}, {"params": list(build().parameters())[1:2]}
SHAPE = r"of shape \[4, 33\] for parameter 4 of group 0 \('3\.weight'\), got shape=\[3, 33\]; load"
# what loads, the state, words
UNFIT = [
    (ours, lambda: AdamW(OF_TWO).state_dict(),
     r"AdamW\S* expected 1 parameter groups, got 2; load the state that was saved"),
    (ours, lambda: saved_by(model=build()[0]), r"expected 6 parameters in group 0, got 2; load"),
    (lambda m: AdamW(wider().named_parameters()), saved_by, f"expected exp_avg {SHAPE}"),
    (ours, lambda: altered(saved_by(), p2_exp_avg_sq=None),
     r"expected exp_avg_sq for parameter 2 of group 0.*entries=\['exp_avg"),
    (ours, lambda: altered(saved_by(), p1_step=None), r"expected step for parameter 1 of group"),
    (lambda m: ours(m, moment_dtype=UINT8),
     lambda: altered(saved_by(moment_dtype=UINT8), p0_exp_avg_scale=torch.ones(2)),
     r"expected exp_avg_scale of shape \[1\] for parameter 0 of group 0"),
    (ours, lambda: torch.optim.Adam(build().parameters()).state_dict(),
     r"load_state_dict: expected decoupled_weight_decay=True, got .*=False; continue"),
    (ours, lambda: altered(saved_by(), lr=math.nan),
     r"AdamW.load_state_dict: expected 0\.0 <= lr < inf, got"),
    (ours, lambda: altered(saved_by(), betas=(0.9, 0.99, 0.999)),
     r"AdamW.load_state_dict: expected betas to be two"),
    (lambda m: ours(m, moment_dtype=UINT8), lambda: saved_by(amsgrad=True),
     r"moment_dtype=torch\.uint8 does not support amsgrad=True"),
    (lambda m: AdamW(build(BF16, seed=1).parameters(), master_weights="remainder"),
     lambda: saved_by(model=build(BF16), master_weights=True),
     r"parameter 0 of group 0.*rounding of its saved master"),
    (lambda m: Adafactor(wider().named_parameters()), lambda: saved_by(adafactor),
     r"load_state_dict: expected row_var of shape \[4, 1\] for parameter 4 of group 0 \('3\.wei"),
    (lambda m: Adafactor(list(m.parameters())[::-1]), lambda: saved_by(adafactor),
     r"expected variance for parameter 0 of group 0, got entr"),
    (lambda m: Adafactor([{"params": [p]} for p in m.parameters()]), lambda: saved_by(adafactor),
     r"Adafactor.* expected 6 parameter groups, got 1; load"),
    (lambda m: adafactor(m.parameters()), lambda: altered(saved_by(adafactor), d=0.5),
     r"Adafactor.load_state_dict: expected 1.0 <= d < inf"),
    (lambda m: Muon([m[0].weight]),  # AdamW's state
     lambda: saved_by(model=nn.ParameterList([build()[0].weight])),
     r"expected momentum_buffer for parameter 0 of group 0, go"),
]  # fmt: skip


@sweep(("make", "saved", "message"), UNFIT)
def test_states_that_do_not_fit_are_refused_and_nothing_changes(make, saved, message):
    optimizer = make(build())
    for group in optimizer.param_groups:
        put_gradients(group["params"], 0)
    optimizer.step()
    before = str(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved())
    assert str(optimizer.state_dict()) == before


OPTIONS = {
    AdamW: [
        ({"lr": -1.0}, r"AdamW: expected 0\.0 <= lr < inf, got lr=-1\.0"),
        ({"lr": torch.tensor(-1.0)}, r"expected 0\.0 <= lr < inf, got lr=-1\.0"),
        ({"lr": torch.ones(2)}, r"a tensor of one element, got lr of shape=\[2\]"),
        ({"lr": "0.1"}, "expected lr to be a number, got lr='0.1'"),
        ({"betas": (1.0, 0.9)}, r"betas\[0\] < 1\.0, got betas\[0\]=1\.0"),
        ({"betas": (0.9, -0.1)}, r"betas\[1\] < 1\.0, got betas\[1\]=-0\.1"),
        ({"betas": (torch.tensor(1.5), 0.9)}, r"betas\[0\] < 1\.0, got betas\[0\]=1\.5"),
        ({"betas": None}, "expected betas to be two numbers, got betas=None"),
        ({"betas": (0.9, None)}, r"expected betas\[1\] to be a number"),
        ({"weight_decay": -0.1}, r"got weight_decay=-0\.1"),
        ({"max_grad_norm": 0.0}, r"expected max_grad_norm > 0 or None, got max_grad_norm=0\.0"),
        ({"seed": -1}, r"expected 0 <= seed < 2\*\*63, got seed=-1"),
        ({"differentiable": True}, r"expected differentiable=False, got .*=True; use torch\.optim"),
        ({"foreach": True, "fused": True}, r"expected at most one of foreach and fused"),
        ({"master_weights": "half"}, r"False, True or 'remainder', got master_weights='half'"),
        ({"moment_dtype": FP16}, r"bfloat16 or torch\.uint8, got moment_dtype=torch\.float16"),
        ({"master_weights": True, "stochastic_rounding": True},
         r"expected stochastic_rounding=True without master weights, got master_weights=True"),
    ],
    Adafactor: [
        ({"lr": -1.0}, r"Adafactor: expected 0\.0 <= lr < inf, got lr=-1\.0; correct"),
        ({"beta2_decay": 0.1}, r"expected -inf <= beta2_decay <= 0\.0, got beta2_decay=0\.1"),
        ({"eps": (-1.0, 1e-3)}, r"got eps\[0\]=-1\.0"),
        ({"eps": (None, -1e-3)}, r"got eps\[1\]=-0\.001"),
        ({"eps": 1e-3}, "expected eps to be two numbers"),
        ({"eps": (None, "x")}, r"expected eps\[1\] to be a number"),
        ({"d": 0.9}, r"expected 1\.0 <= d < inf, got d=0\.9"),
        ({"weight_decay": -0.1}, r"got weight_decay=-0\.1"),
    ],
    Muon: [
        ({"matrices": 4}, r"outputs of parameter 0 .*=\[6, 4\], got matrices=4"),
        ({"ns_steps": 6}, "1 <= ns_steps <= 5, got ns_steps=6; 5 is usual"),
        ({"adjust_lr_fn": "x"}, "'match_rms_adamw', got adjust_lr_fn='x'"),
        ({"momentum": 1.0}, "0.0 <= momentum < 1.0, got momentum=1.0"),
    ],
    DynamicLossScale: [
        ({"init": 0.5}, r"expected 0 < min_scale=1\.0 <= init <= max_scale=.*, got init=0\.5"),
        ({"min_scale": 0.0}, r"expected 0 < min_scale=0\.0"),
        ({"growth_interval": 0}, r"expected an integer growth_interval >= 1, got .*=0"),
        ({"init": math.inf, "max_scale": math.inf}, r"init finite, got init=inf"),
    ],
}  # fmt: skip


@sweep(
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
    optimizer = adafactor(model.parameters(), lr=0.0, beta2_decay=0.0, eps=(0.0, 0.0), d=1.0)
    assert torch.equal(run(model, optimizer, 2), before)


def test_options_of_a_group_are_checked_and_the_group_is_not_kept():
    optimizer = AdamW(build().parameters())
    group = {"params": [nn.Parameter(torch.ones(2))]}
    with pytest.raises(ValueError, match=r"AdamW: expected 0\.0 <= lr < inf, got lr=-2\.0"):
        optimizer.add_param_group({**group, "lr": -2.0})
    assert len(optimizer.param_groups) == 1
    for name in (
        *("master_weights", "stochastic_rounding", "seed", "moment_dtype", "max_grad_norm"),
        "zero_grad_in_step",
    ):
        with pytest.raises(ValueError, match=rf"{name} is an option of the opt.*Redundancy"):
            AdamW([{**group, name: True}])


WHOLE = torch.randn(4, 6)
PARAMETERS = [
    (AdamW, torch.zeros(3, dtype=BF16), {}, r"bfloat16 with master_weights=False; pass master"),
    (AdamW, torch.zeros(3, dtype=FP16), {"master_weights": "remainder"}, "float16 with 'remainder"),
    (AdamW, torch.zeros(3, dtype=FP16), {"stochastic_rounding": True}, "with stochastic_rounding="),
    (AdamW, torch.zeros(3), {"amsgrad": True, "moment_dtype": UINT8}, "not support amsgrad=True"),
    (AdamW, torch.zeros(3, dtype=FP64), {"moment_dtype": BF16}, "float32 with fp64 parameters"),
    (AdamW, torch.zeros(3, dtype=torch.complex64), {}, r"expected fp32, .* dtype=torch\.complex64"),
    (AdamW, WHOLE[:, :3], {}, r"of group \d, \[4, 3\], a view with strides \(6, 1\)"),
    (AdamW, WHOLE[0].expand(2, 6), {}, r"a view with strides \(0, 1\)"),
    (AdamW, torch._neg_view(WHOLE), {}, "a view negated lazily"),
    (AdamW, WHOLE.to_sparse(), {}, "expected dense parameters, got parameter 0 of group"),
    (Adafactor, WHOLE.to_sparse(), {}, "expected dense parameters, got parameter 0 of group"),
    (Adafactor, torch.ones(2, dtype=BF16), {}, "dtype=torch.bfloat16 with master_weights=False; "),
    (Adafactor, torch.ones(2, dtype=FP64), {"master_weights": True}, "work in fp64; use"),
    (Adafactor, torch.ones(2, dtype=torch.complex64), {}, "got a parameter of dtype=torch.complex"),
    (Adafactor, torch.ones(2, dtype=FP16), {"master_weights": "remainder"}, "fp16 parameters with"),
    (Muon, torch.zeros(4), {}, r"\[M, N\], got parameter 0 of its group of shape=\[4\]; put it in"),
    (Muon, torch.zeros(2, 2, 2), {}, r"=\[2, 2, 2\]; .* adamw=True, or use fastpar.muon_gro"),
    (Muon, torch.zeros(6, 4, dtype=BF16), {}, "master_weights=True"),
]  # fmt: skip


@sweep(("kind", "values", "options", "words"), PARAMETERS)
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
    with pytest.raises(
        ValueError, match=r"reload an optimizer's states by load_state_dict\(state_dict"
    ):
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_memory_that_two_parameters_share_is_refused():
    flat = torch.zeros(100)
    a, b = nn.Parameter(flat[:60].view(6, 10)), nn.Parameter(flat[59:])
    parts = [nn.Parameter(flat), nn.Parameter(flat[1:3]), nn.Parameter(flat[50:60])]
    orders = ((0, 1), (1, 0), (1, 2, 0), (2, 0))
    overlapping = "got parameter 1 of group 0 overlapping parameter 0"
    for params, words in (
        ([a, b], overlapping),
        ([a, a], overlapping),
        ([{"params": [a]}, {"params": [a]}], "appear in more than one parameter group"),
        *(([parts[i] for i in some], "parameters in separate memory, got") for some in orders),
    ):
        with pytest.raises(ValueError, match=words):
            AdamW(params)
    optimizer = AdamW([("a", a)])
    with pytest.raises(ValueError, match=r"got parameter 0 of group 1 \('b'\) overlapping .*'a'"):
        optimizer.add_param_group({"params": [("b", b)]})
    assert len(optimizer.param_groups) == 1
    # Neighbours and transposed views are taken.
    views = [flat[:20].view(4, 5).t(), flat[20:20], flat[20:100], torch.empty(0), torch.empty(0)]
    params = [nn.Parameter(t) for t in views]
    optimizer = AdamW([*params, nn.Parameter(torch.empty(3, device="meta"))])
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert (flat < 0).all()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["flat", "original", "DTensor"])
def test_parameters_of_torchs_fsdp(kind):
    """FSDP's flat parameters are plain tensors; those of FSDP2 are DTensors."""
    import torch.distributed as dist

    def refused(words, make):
        with pytest.raises(ValueError, match=words):
            make(list(model.parameters()))

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(3, 4)
        before = AdamW(model.parameters())
        if kind == "DTensor":
            fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
            words = "of group 0 of type=DTensor; instead of FSDP2's fully_shard use fastpar.par"
            for make in (AdamW, Adafactor):
                refused(f"{make.__name__}: expected plain .*{words}", make)
            add = before.add_param_group
            refused(r"got parameter 0 of group 1 .*DTensor", lambda p: add({"params": p}))
            assert len(before.param_groups) == 1
            return
        original, cpu = kind == "original", torch.device("cpu")
        model = FullyShardedDataParallel(model, use_orig_params=original, device_id=cpu)
        got = "got parameter 0 of group 0.*, which FSDP has sharded; instead"
        refused(f"AdamW: .* with max_grad_norm, {got}", lambda p: AdamW(p, max_grad_norm=1.0))
        for make in (Adafactor, Muon):
            refused(f"{make.__name__}: expected whole parameters, {got}", make)
        optimizer = AdamW(model.parameters())
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    finally:
        dist.destroy_process_group()


def test_a_step_that_is_refused_changes_nothing():
    """fp32 gradients of 16-bit parameters are main gradients and allowed; others are not."""
    sparse = nn.Embedding(5, 3, sparse=True)
    sparse(torch.tensor([1])).sum().backward()
    for make in (AdamW, Adafactor):
        words = rf"{make.__name__}\.step: expected dense gradients, got layout=torch\.sparse"
        with pytest.raises(RuntimeError, match=words):
            make(sparse.parameters()).step()
    model = build()
    optimizer = AdamW(model.parameters(), max_grad_norm=1.0)
    run(model, optimizer, 1)
    before, state = vector(model), optimizer.state[model[0].weight]
    put_gradients(model, 1)
    kept, state["exp_avg"] = state["exp_avg"], torch.empty(33, 7, device="meta")
    with pytest.raises(ValueError, match=r"adamw_step_: expected .*device.*meta"):
        optimizer.step()
    state["exp_avg"], p = kept, model[3].weight
    if not hasattr(p, "grad_dtype"):
        pytest.skip("torch < 2.13 refuses a gradient of another dtype itself")
    p.grad, p.grad_dtype = None, BF16
    p.grad = torch.ones_like(p, dtype=BF16)
    with pytest.raises(ValueError, match=r"adamw_step_: expected .*grads\[4\]=torch\.bfloat16"):
        optimizer.step()
    assert torch.equal(vector(model), before)
    assert set(step_counts(optimizer)) == {1}
