"""optim_state.py: what AdamW keeps, in which form, and state dicts of this package and of torch."""

import copy
import io
import math
import pickle

import pytest
import torch
from adamw_bound import ExactAdamW
from test_optim import HYPER, build, put_gradients, run, vector
from torch import nn

from fastpar.kernels.adamw import decode_moment, encode_moment
from fastpar.optim.adamw import AdamW
from fastpar.optim.state import Storage

FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
UINT8 = torch.uint8
# (dtype of the parameters, options)
MODES = {
    "fp32": (FP32, {}),
    "fp64": (FP64, {"amsgrad": True}),
    "amsgrad": (FP32, {"amsgrad": True}),
    "capturable": (FP32, {"capturable": True}),
    "bf16-master": (BF16, {"master_weights": True}),
    "fp16-master": (FP16, {"master_weights": True}),
    "remainder": (BF16, {"master_weights": "remainder"}),
    "stochastic": (BF16, {"stochastic_rounding": True}),
    "bf16-moments": (FP32, {"moment_dtype": BF16}),
    "bf16-amsgrad": (FP32, {"moment_dtype": BF16, "amsgrad": True}),
    "8-bit": (FP32, {"moment_dtype": UINT8}),
    "8-bit-remainder": (BF16, {"master_weights": "remainder", "moment_dtype": UINT8}),
    "8-bit-stochastic": (BF16, {"stochastic_rounding": True, "moment_dtype": UINT8}),
}
modes = pytest.mark.parametrize(("dtype", "options"), MODES.values(), ids=MODES)


def through_a_file(saved):
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file)


def assert_same_state(a, b):
    """Bit for bit, names and dtypes included."""
    assert a["state"].keys() == b["state"].keys()
    for i, entries in a["state"].items():
        assert entries.keys() == b["state"][i].keys()
        for name, value in entries.items():
            other = b["state"][i][name]
            assert value.dtype == other.dtype, name
            assert torch.equal(value, other), name


@modes
def test_a_resumed_run_continues_bit_for_bit(dtype, options):
    whole, half = build(dtype), build(dtype)
    a = AdamW(whole.parameters(), **HYPER, **options, seed=7)
    run(whole, a, 6)
    b = AdamW(half.parameters(), **HYPER, **options, seed=7)
    run(half, b, 3)
    saved = through_a_file({"model": half.state_dict(), "optimizer": b.state_dict()})
    resumed = build(dtype, seed=1)
    resumed.load_state_dict(saved["model"])
    c = AdamW(resumed.parameters(), **options)  # its lr and its seed come from the file
    c.load_state_dict(saved["optimizer"])
    assert_same_state(c.state_dict(), b.state_dict())
    run(resumed, c, 3, start=3)
    assert torch.equal(vector(resumed), vector(whole))
    assert_same_state(c.state_dict(), a.state_dict())


@modes
@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_continue_alone(dtype, options, how):
    model = build(dtype)
    measured = dtype != FP64
    optimizer = AdamW(model.parameters(), **HYPER, **options, seed=3)
    if measured:
        optimizer.max_grad_norm, optimizer.grad_scale = 1.0, 2.0
    run(model, optimizer, 2)
    twin_model, twin = how((model, optimizer))
    assert twin.skipped is False
    assert torch.equal(run(model, optimizer, 2, start=2), run(twin_model, twin, 2, start=2))
    assert not measured or torch.equal(twin.grad_norm, optimizer.grad_norm)
    assert_same_state(twin.state_dict(), optimizer.state_dict())


@modes
def test_names_and_dtypes_are_the_documented_ones(dtype, options):
    model = build(dtype)
    optimizer = AdamW(model.parameters(), **HYPER, **options)
    run(model, optimizer, 1)
    moments = FP64 if dtype == FP64 else options.get("moment_dtype", FP32)
    names = {"step": FP32}
    for name in ("exp_avg", "exp_avg_sq"):
        if moments == UINT8:
            names |= {f"{name}_codes": UINT8, f"{name}_scale": FP32}
        else:
            names[name] = moments
    if options.get("amsgrad"):
        names["max_exp_avg_sq"] = moments
    if options.get("master_weights") == "remainder":
        names["master_remainder"] = torch.int16
    elif dtype in (BF16, FP16) and "stochastic_rounding" not in options:
        names["master_weight"] = FP32
    for state in optimizer.state.values():
        assert {name: value.dtype for name, value in state.items()} == names


# Random bits


def round_stochastically(seed, grads):
    """One step from 1.0 on four equal parameters, of which each None in grads has no gradient."""
    params = [nn.Parameter(torch.ones(64, dtype=BF16)) for _ in grads]
    optimizer = AdamW(params, lr=1e-3, stochastic_rounding=True, seed=seed)
    for p, g in zip(params, grads):
        p.grad = g if g is None else torch.full_like(p, g)
    optimizer.step()
    return [p.detach() for p in params]


def test_each_element_draws_its_own_bits():
    """Also equal parameters; and they do not depend on which others have a gradient."""
    whole = round_stochastically(0, [1.0, 1.0, 1.0, 1.0])
    assert len({tuple(p.tolist()) for p in whole}) == 4
    part = round_stochastically(0, [None, 1.0, None, 1.0])
    assert torch.equal(part[1], whole[1])
    assert torch.equal(part[3], whole[3])


def test_the_seed_decides():
    first, again, other = (round_stochastically(seed, [1.0]) for seed in (5, 5, 6))
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], other[0])


# torch's state


def run_with_torch(amsgrad, steps):
    """Models and optimizers after so many steps of torch's, in fp64 and in fp32."""
    pairs = []
    for dtype, cls in ((torch.float64, ExactAdamW), (FP32, torch.optim.AdamW)):
        model = build().to(dtype)
        optimizer = cls(model.parameters(), **HYPER, amsgrad=amsgrad)
        run(model, optimizer, steps)
        pairs.append((model, optimizer))
    return pairs


@pytest.mark.parametrize("amsgrad", [False, True])
def test_state_of_torch_loads_here(amsgrad):
    (_, exact), (eager, _) = run_with_torch(amsgrad, 6)
    ours, a = run_with_torch(amsgrad, 3)[1]
    b = AdamW(ours.parameters(), lr=1.0)
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    assert b.param_groups[0]["lr"] == HYPER["lr"]
    assert b.param_groups[0].keys() == a.param_groups[0].keys()
    assert_same_state(a.state_dict(), b.state_dict())
    for p in ours.parameters():
        for name, value in a.state[p].items():
            assert b.state[p][name].data_ptr() != value.data_ptr()
    run(ours, b, 3, start=3)
    exact.holds(eager.parameters(), ours.parameters())


@pytest.mark.parametrize("amsgrad", [False, True])
def test_state_loads_into_torch(amsgrad):
    (_, exact), (eager, _) = run_with_torch(amsgrad, 6)
    ours = build()
    b = AdamW(ours.parameters(), **HYPER, amsgrad=amsgrad)
    run(ours, b, 3)
    a = torch.optim.AdamW(ours.parameters())
    a.load_state_dict(copy.deepcopy(b.state_dict()))
    assert_same_state(a.state_dict(), b.state_dict())
    run(ours, a, 3, start=3)
    exact.holds(eager.parameters(), ours.parameters())


@modes
def test_every_form_loads_into_torch(dtype, options):
    ours = build(dtype)
    b = AdamW(ours.parameters(), **HYPER, **options)
    run(ours, b, 3)
    eager = copy.deepcopy(ours)
    eager = eager if dtype == FP64 else eager.float()
    a = torch.optim.AdamW(eager.parameters())
    saved = through_a_file(b.torch_state_dict())
    a.load_state_dict(saved)
    for p, q in zip(ours.parameters(), eager.parameters()):
        state = b.state[p]
        for name in ("exp_avg", "exp_avg_sq"):
            if f"{name}_codes" in state:
                parts = (state[f"{name}_codes"], state[f"{name}_scale"])
                expected = decode_moment(*parts, signed=name == "exp_avg")
            else:
                expected = state[name].to(q.dtype)
            assert a.state[q][name].dtype == q.dtype
            assert torch.equal(a.state[q][name], expected)
        assert int(a.state[q]["step"]) == 3
    a.param_groups[0]["capturable"] = False  # on a CPU torch cannot
    run(eager, a, 1)
    assert vector(eager).isfinite().all()


@pytest.mark.parametrize("step", [2, torch.tensor([2.0])])
def test_an_older_state_of_torch_loads(step):
    """Before 1.12 step was a number, to 2.0 of shape [1] too, and groups had fewer options."""
    model = build()
    a = torch.optim.AdamW(model.parameters(), **HYPER)
    run(model, a, 2)
    saved = copy.deepcopy(a.state_dict())
    for state in saved["state"].values():
        state["step"] = step
    for name in ("foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"):
        del saved["param_groups"][0][name]
    b = AdamW(model.parameters())
    b.load_state_dict(saved)
    assert_same_state(a.state_dict(), b.state_dict())
    assert b.param_groups[0]["capturable"] is False


@pytest.mark.parametrize("moments", [BF16, UINT8])
def test_moments_of_torch_are_stored_in_few_bits(moments):
    model = build()
    a = torch.optim.AdamW(model.parameters(), **HYPER)
    run(model, a, 3)
    b = AdamW(model.parameters(), moment_dtype=moments)
    b.load_state_dict(a.state_dict())
    for p in model.parameters():
        for name in ("exp_avg", "exp_avg_sq"):
            exact = a.state[p][name]
            if moments == BF16:
                assert torch.equal(b.state[p][name], exact.bfloat16())
                continue
            codes, scale = encode_moment(exact, signed=name == "exp_avg")
            assert torch.equal(b.state[p][f"{name}_codes"], codes)
            assert torch.equal(b.state[p][f"{name}_scale"], scale)


def test_bits_that_are_there_survive_a_way_through_torchs_form():
    """8 bits -> fp32 -> 8 bits: decoded values are codes exactly."""
    model = build()
    a = AdamW(model.parameters(), **HYPER, moment_dtype=UINT8)
    run(model, a, 5)
    b = AdamW(model.parameters(), **HYPER, moment_dtype=UINT8)
    b.load_state_dict(a.torch_state_dict())
    assert_same_state(a.state_dict(), b.state_dict())


# From one form to another


def test_master_weights_change_their_form():
    """fp32 master -> remainder -> fp32 master, and all three runs go on with the same bits."""
    first = build(BF16)
    a = AdamW(first.parameters(), **HYPER, master_weights=True)
    run(first, a, 3)
    second, third = copy.deepcopy(first), copy.deepcopy(first)
    b = AdamW(second.parameters(), master_weights="remainder")
    b.load_state_dict(a.state_dict())
    c = AdamW(third.parameters(), master_weights=True)
    c.load_state_dict(b.state_dict())
    assert_same_state(c.state_dict(), a.state_dict())
    for model, optimizer in ((first, a), (second, b), (third, c)):
        run(model, optimizer, 3, start=3)
    assert torch.equal(vector(first), vector(second))
    assert torch.equal(vector(first), vector(third))


def test_a_remainder_needs_the_weights_it_belongs_to():
    model = build(BF16)
    a = AdamW(model.parameters(), **HYPER, master_weights=True)
    run(model, a, 1)
    b = AdamW(build(BF16, seed=1).parameters(), master_weights="remainder")
    with pytest.raises(ValueError, match=r"parameter 0 of group 0.*rounding of its saved master"):
        b.load_state_dict(a.state_dict())
    assert not b.state


def test_a_stale_master_weight_is_made_anew():
    """torch's AdamW casts entries it does not know, and steps the parameters without them."""
    model = build(BF16)
    a = AdamW(model.parameters(), **HYPER, master_weights=True)
    run(model, a, 1)
    eager = torch.optim.AdamW(model.parameters(), **HYPER)
    eager.load_state_dict(a.state_dict())
    run(model, eager, 1)
    b = AdamW(model.parameters(), master_weights=True)
    b.load_state_dict(eager.state_dict())
    for p in model.parameters():
        assert torch.equal(b.state[p]["master_weight"], p.detach().float())


def test_states_without_a_master_get_one_and_unused_ones_are_dropped():
    model = build(BF16)
    a = AdamW(model.parameters(), **HYPER, stochastic_rounding=True)
    run(model, a, 1)
    b = AdamW(model.parameters(), master_weights=True)
    b.load_state_dict(a.state_dict())
    for p in model.parameters():
        assert torch.equal(b.state[p]["master_weight"], p.detach().float())
    c = AdamW(model.parameters(), stochastic_rounding=True)
    c.load_state_dict(b.state_dict())
    assert_same_state(c.state_dict(), a.state_dict())


def test_entries_of_others_are_kept():
    model = build()
    a = AdamW(model.parameters(), **HYPER)
    run(model, a, 1)
    saved = a.state_dict()
    saved["state"][0] = {**saved["state"][0], "ema": torch.ones(2)}
    saved["state"]["note"] = 5
    a.load_state_dict(saved)
    assert torch.equal(a.state[model[0].weight]["ema"], torch.ones(2))
    assert a.state["note"] == 5


def test_fp32_parameters_are_their_own_master():
    model = build()
    for kind in (True, "remainder"):
        optimizer = AdamW(model.parameters(), master_weights=kind)
        run(model, optimizer, 1)
        assert all(s.keys() == {"step", "exp_avg", "exp_avg_sq"} for s in optimizer.state.values())


def test_amsgrad_can_be_switched_on_later():
    model = build()
    optimizer = AdamW(model.parameters(), **HYPER)
    run(model, optimizer, 2)
    optimizer.param_groups[0]["amsgrad"] = True
    run(model, optimizer, 1, scale=0.0)
    for state in optimizer.state.values():
        assert (state["max_exp_avg_sq"] > state["exp_avg_sq"]).all()


@modes
def test_what_is_loaded_is_a_copy(dtype, options):
    model = build(dtype)
    a = AdamW(model.parameters(), lr=torch.tensor(0.5), **options)
    run(model, a, 1)
    b = AdamW(model.parameters(), **options)
    b.load_state_dict(a.state_dict())
    assert b.param_groups[0]["lr"] is not a.param_groups[0]["lr"]
    for p in model.parameters():
        for name, value in a.state[p].items():
            assert b.state[p][name].data_ptr() != value.data_ptr(), name


def test_hooks_see_what_is_loaded():
    model = build()
    a, b = AdamW(model.parameters(), **HYPER), AdamW(model.parameters())
    run(model, a, 1)
    seen = []
    b.register_load_state_dict_pre_hook(lambda _, saved: {**saved, "state": {}})
    b.register_load_state_dict_post_hook(lambda optimizer: seen.append(len(optimizer.state)))
    b.load_state_dict(a.state_dict())
    assert seen == [0]
    assert b.param_groups[0]["lr"] == HYPER["lr"]


# States of another model


def saved_by(model, **options):
    optimizer = AdamW(model.parameters(), **HYPER, **options)
    run(model, optimizer, 1)
    return optimizer.state_dict()


def refuses(optimizer, saved, message):
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert str(optimizer.state_dict()) == str(before)


def test_another_number_of_groups_or_parameters():
    model = build()
    optimizer = AdamW(model.parameters())
    run(model, optimizer, 1)
    two = AdamW([{"params": [p]} for p in list(model.parameters())[:2]]).state_dict()
    refuses(optimizer, two, r"expected 1 parameter groups, got 2; load the state that was saved")
    refuses(optimizer, saved_by(model[0]), r"expected 6 parameters in group 0, got 2; load")


def test_the_first_entry_of_another_shape_is_named():
    model = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.LayerNorm(33), nn.Linear(33, 4))
    optimizer = AdamW(model.named_parameters())
    message = (
        r"expected exp_avg of shape \[4, 33\] for parameter 4 of group 0 \('3\.weight'\), "
        r"got shape=\[3, 33\]; load the state that was saved with this model"
    )
    refuses(optimizer, saved_by(build()), message)


def test_missing_entries_are_named():
    model = build()
    optimizer = AdamW(model.parameters())
    saved = copy.deepcopy(saved_by(model))
    del saved["state"][2]["exp_avg_sq"]
    refuses(optimizer, saved, r"expected exp_avg_sq for parameter 2 of group 0.*entries=\['exp_avg")
    saved = copy.deepcopy(saved_by(model))
    del saved["state"][1]["step"]
    refuses(optimizer, saved, r"expected step for parameter 1 of group 0")


def test_scales_of_another_size_are_named():
    model = build()
    optimizer = AdamW(model.parameters(), moment_dtype=UINT8)
    saved = copy.deepcopy(saved_by(model, moment_dtype=UINT8))
    saved["state"][0]["exp_avg_scale"] = torch.ones(2)
    refuses(optimizer, saved, r"expected exp_avg_scale of shape \[1\] for parameter 0 of group 0")


def test_state_of_adam_is_refused():
    model = build()
    adam = torch.optim.Adam(model.parameters())
    message = r"load_state_dict: expected decoupled_weight_decay=True, got .*=False; continue"
    refuses(AdamW(model.parameters()), adam.state_dict(), message)


def test_options_of_a_file_are_checked():
    model = build()
    saved = copy.deepcopy(saved_by(model))
    saved["param_groups"][0]["lr"] = math.nan
    refuses(AdamW(model.parameters()), saved, r"load_state_dict: expected 0\.0 <= lr < inf, got")
    saved = saved_by(model, amsgrad=True)
    optimizer = AdamW(model.parameters(), moment_dtype=UINT8)
    refuses(optimizer, saved, r"expected amsgrad=False with moment_dtype=torch\.uint8")


# Options of storage


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"master_weights": "half"}, r"False, True or 'remainder', got master_weights='half'"),
        ({"moment_dtype": FP16}, r"bfloat16 or torch\.uint8, got moment_dtype=torch\.float16"),
        (
            {"master_weights": True, "stochastic_rounding": True},
            r"expected stochastic_rounding=True without master weights, got master_weights=True",
        ),
    ],
)
def test_options_that_make_no_sense(options, message):
    options = {
        "master_weights": False,
        "stochastic_rounding": False,
        "moment_dtype": FP32,
    } | options
    with pytest.raises(ValueError, match=message):
        Storage(**options)
    with pytest.raises(ValueError, match=message):
        AdamW(build().parameters(), **options)


@pytest.mark.parametrize(
    ("dtype", "options", "message"),
    [
        (BF16, {}, r"dtype=torch\.bfloat16 with master_weights=False and .*; pass master_weights"),
        (FP16, {}, r"dtype=torch\.float16 with master_weights=False and .*; pass master_weights"),
        (FP16, {"master_weights": "remainder"}, r"dtype=torch\.float16 with 'remainder'.*pass"),
        (FP16, {"stochastic_rounding": True}, r"float16 with stochastic_rounding=True.*pass"),
        (FP32, {"amsgrad": True, "moment_dtype": UINT8}, r"expected amsgrad=False with moment"),
        (
            FP64,
            {"moment_dtype": BF16},
            r"expected moment_dtype=torch\.float32 with fp64 parameters",
        ),
        (torch.complex64, {}, r"expected fp32, .* got a parameter of dtype=torch\.complex64"),
    ],
)
def test_parameters_that_the_options_cannot_train(dtype, options, message):
    p = nn.Parameter(torch.zeros(3, dtype=dtype))
    with pytest.raises(ValueError, match=message):
        AdamW([p], **options)
    optimizer = AdamW([nn.Parameter(torch.zeros(3))], **{**options, "amsgrad": False})
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [p], "amsgrad": options.get("amsgrad", False)})
    assert len(optimizer.param_groups) == 1


def test_mixed_models_keep_each_its_own():
    """fp32 norms beside bf16 matrices: one optimizer, one step."""
    model = build(BF16)
    model[2].float()
    optimizer = AdamW(model.parameters(), **HYPER, master_weights="remainder")
    put_gradients(model, 0)
    optimizer.step()
    kept = ["master_remainder" in optimizer.state[p] for p in model.parameters()]
    assert kept == [True, True, False, False, True, True]
