"""What is done to parameters and gradients by hand: as in plain torch, or refused by name."""

import contextlib
import copy
import io
import pickle
import re

import pytest
import torch
from programs import STAGES, assert_same, fill
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fastpar import AdamW, Mesh, engine_of, parallelize
from fastpar.engine.engine import engine_of_parameter
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

SMALL = {"bucket_mb": 0.001, "first_bucket_mb": 1e-4}
SHARDED = (1, 2, 3)
C = 5


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(C, C), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(C, C)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


def start():
    model = fill(Net())
    return model, AdamW(model.parameters(), lr=0.05)


def step(model, optimizer, i=0):
    x = torch.randn(4, C, generator=torch.Generator().manual_seed(i))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def on_ranks(fn, stages=STAGES):
    """fn(model, optimizer, stage) on two ranks after a step, at each stage; what follows trains."""

    def rank(stage):
        model = parallelize(fill(Net()), Mesh(), Parallel.of(zero_stage=stage, **SMALL))
        optimizer = AdamW(model.parameters(), lr=0.05)
        step(model, optimizer)
        return fn(model, optimizer, stage)

    return [result for stage in stages for result in run_ranks(rank, 2, stage)]


def goes_on(model, optimizer):
    step(model, optimizer, 1)
    return all(value.isfinite().all() for value in whole(model).values())


def whole(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def give_data(model):
    for i, p in enumerate(model.parameters()):
        p.data = torch.full_like(p.data, 0.1 * i)


def swap_data(model):
    a, b = model.blocks[0][0].weight, model.blocks[2][0].weight
    a.data, b.data = b.data, a.data
    model.head.weight.data = model.head.weight.data.t().contiguous()


def from_vector(model):
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector.flip(0) * 0.5, model.parameters())


def set_memory(model):
    with torch.no_grad():
        model.head.bias.set_(torch.arange(float(C)))


def in_place(model):
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.1, 0.2)
    nn.init.constant_(model.head.bias, 3.0)
    model.blocks[1].load_state_dict(model.blocks[0].state_dict())


@pytest.mark.parametrize("write", [give_data, swap_data, from_vector, set_memory, in_place])
def test_what_is_written_in_gathered_is_kept(write):
    model, optimizer = start()
    step(model, optimizer)
    write(model)
    expected = [whole(model)]
    step(model, optimizer, 1)
    expected.append(whole(model))

    def write_gathered(model, optimizer, stage):
        with engine_of(model).gathered():
            write(model)
        first = whole(model)
        step(model, optimizer, 1)
        return [first, whole(model)]

    for got in on_ranks(write_gathered):
        for a, b in zip(got, expected, strict=True):
            assert_same(a, b)


def test_memory_that_does_not_fit_is_refused_at_the_end_of_gathered():
    def run(model, optimizer, stage):
        before = whole(model)
        for new in (torch.ones(C + 1), torch.ones(C, dtype=torch.float64)):
            message = (
                rf"gathered: p.data of parameter 'head.bias' was replaced by \[{len(new)}\], "
                rf"{new.dtype}, on cpu, expected \[{C}\], torch.float32, .*; write values"
            )
            with pytest.raises(RuntimeError, match=message), engine_of(model).gathered():
                model.head.bias.data = new
        step(model, optimizer, 1)
        return before["head.bias"].shape == whole(model)["head.bias"].shape

    assert all(on_ranks(run))


def test_what_changes_nothing():
    """gathered() inside of gathered(), moves to where everything is, a state_dict that failed."""

    def run(model, optimizer, stage):
        engine = engine_of(model)
        with engine.gathered():
            model.state_dict()
            with engine.gathered():
                pass
            assert all(p.isfinite().all() for p in model.parameters())
        model.float().to("cpu").cpu().to(torch.float32).eval().train()

        def fail(*args):
            raise KeyError("mine")

        handle = model.blocks[1].register_state_dict_pre_hook(fail)
        with pytest.raises(KeyError, match="mine"):
            model.state_dict()
        handle.remove()
        assert_same(whole(model), expected)
        return goes_on(model, optimizer)

    model, optimizer = start()
    step(model, optimizer)
    expected = whole(model)
    assert all(on_ranks(run))


def values(model):
    return [p.detach().clone() for p in model.parameters()]


def half(model):
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)


def evaluated(model, optimizer, gathered):
    with gathered(), torch.no_grad():
        first = model(torch.ones(2, C))
        half(model)
        return [first, model(torch.ones(2, C)), *values(model)]


def passed(model, optimizer, gathered):
    with gathered():
        half(model)
        backward(model)
        found = values(model)
        half(model)
    optimizer.step()
    optimizer.zero_grad()
    return found


def a_backward_outside(model, optimizer, gathered):
    with gathered():
        loss = model(torch.ones(2, C)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return [loss.detach()]


def between_forward_and_backward(model, optimizer, gathered):
    loss = model(torch.ones(2, C)).square().mean()
    with gathered():
        found = [model(torch.zeros(2, C)).detach(), *values(model)]
    loss.backward()
    with gathered():
        found += values(model)
    optimizer.step()
    optimizer.zero_grad()
    return found


def trained(model, optimizer, gathered):
    with gathered():
        half(model)
        with gathered():
            step(model, optimizer, 2)
            found = values(model)
            half(model)
        step(model, optimizer, 3)
    return found


def transformed(model, optimizer, gathered):
    def of(x):
        return model(x).sum()

    with gathered():
        new = {name: p.detach() * 0.5 for name, p in model.named_parameters()}
        call = torch.func.functional_call
        by = torch.func.grad(lambda q: call(model, q, (torch.ones(2, C),)).sum())(new)
        found = [*by.values(), torch.func.grad(of)(torch.ones(2, C)), *values(model)]
        _, derivative = torch.func.vjp(of, torch.ones(2, C))
    return [*found, *derivative(torch.ones(()))]


INSIDE = evaluated, passed, a_backward_outside, between_forward_and_backward, trained, transformed


@pytest.mark.parametrize("fn", INSIDE)
def test_what_runs_in_gathered_is_as_in_plain_torch(fn):
    """The values are whole inside of it, and writes are kept; what follows trains."""

    def run(model, optimizer, gathered):
        found = fn(model, optimizer, gathered)
        step(model, optimizer, 1)
        return found, whole(model)

    model, optimizer = start()
    step(model, optimizer)
    expected, trained = run(model, optimizer, contextlib.nullcontext)
    for got, state in on_ranks(lambda m, o, stage: run(m, o, engine_of(m).gathered)):
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b)
        assert_same(state, trained)


def add_to(model):
    with torch.no_grad():
        model.scale += 1


def backward(model):
    model(torch.ones(2, C)).square().sum().backward()


MEMORY = (
    r"parallelize: p\.data of parameter '[\w.]+' was replaced, .*; call module\.to\(\) before "
    r".*gathered\(\)"
)
GRADIENT = (
    r"p\.grad\.\w+: the gradient of '[\w.]+' is not in p\.grad .*; clip with "
    r"fastpar\.AdamW\(max_grad_norm=\.\.\.\), .*engine_of\(model\)\.grads\(\)"
)
PARAMETER = (
    r"p\.\w+: this rank holds only a shard of parameter '[\w.]+'; "
    r"read, write, .* inside `with fastpar\.engine_of\(model\)\.gathered\(\):`, on all ranks"
)
REFUSED = {
    MEMORY: [
        lambda model: model.bfloat16(),
        lambda model: model.to(torch.float64),
        lambda model: model.blocks[1].half(),
        lambda model: setattr(model.head.weight, "data", torch.ones(C, C)),
        lambda model: nn.utils.vector_to_parameters(
            torch.ones(sum(p.numel() for p in model.parameters())), model.parameters()
        ),
    ],
    GRADIENT: [
        lambda model: model.head.bias.grad.mul_(torch.ones(C)),
        lambda model: model.head.bias.grad.view(-1).mul_(0.5),
        lambda model: model.head.bias.grad.data.div_(2),
        lambda model: model.scale.grad.add_(1),
        lambda model: model.head.bias.grad.detach().clamp_(0),
        lambda model: model.head.bias.grad.__setitem__(0, 1.0),
        lambda model: torch._foreach_mul_([torch.ones(1), model.head.bias.grad], 2.0),
        lambda model: torch.add(torch.ones(C), 1, out=model.head.bias.grad),
        lambda model: model.head.weight.grad[0].sub_(1),
        lambda model: model.head.weight.grad[0].zero_(),
        lambda model: model.head.weight.grad.view(-1).clamp_(0),
        lambda model: copy.deepcopy(model.head.bias.grad),
        lambda model: pickle.dumps(model.head.bias.grad),
    ],
    PARAMETER: [
        lambda model: model.head.weight.clamp_(-1, 1),
        lambda model: model.head.weight.data.clamp_(-1, 1),
        lambda model: model.head.weight.detach().mul_(2),
        lambda model: nn.init.normal_(model.head.weight),
        lambda model: model.scale.data.copy_(torch.ones(1)),
        lambda model: model.head.bias.set_(torch.ones(C)),
        lambda model: model.head.bias.data.zero_(),
        add_to,
    ],
}


USED = (
    r"\w+: parameter '[\w.]+' is used outside of the model's forward, where this rank holds only a "
    r"shard of it; use it in the forward, or inside `with .*gathered\(\):`, on all ranks"
)
READ = {  # of parameters
    PARAMETER: [
        lambda p: p.data.norm(), lambda p: p.norm(), lambda p: p.detach().clone(),
        lambda p: p.detach().numpy(), lambda p: p.data.nan_to_num(),
        lambda p: p.data[torch.tensor([0])], lambda p: p[0].sum(), lambda p: p.view(-1).tolist(),
        lambda p: [x.item() for x in p], lambda p: p.data.to(torch.float64) * 2,
        lambda p: torch.cat([torch.zeros(C), p.data]), lambda p: torch.zeros(C).lerp_(p.data, 0.1),
        lambda p: torch.zeros(C).copy_(p.detach()),
        lambda p: torch._foreach_lerp_([torch.zeros(C)], [p.detach()], 0.1),
        lambda p: torch.add(1, p.data, out=torch.zeros(C)), lambda p: torch.zeros(C).lerp_(p, 0.1),
        lambda p: torch._foreach_add_([torch.zeros(C)], [p]), lambda p: torch.stack([p, p]),
    ],
    USED: [
        torch.enable_grad()(lambda p: p.tolist()), torch.enable_grad()(lambda p: p > 0),
        torch.enable_grad()(lambda p: p.square().sum()),
    ],
}  # fmt: skip


# Gradients changed between backward and step, as loops with plain torch do
def by_norm(order, **options):
    def clip(params, scaler):
        return nn.utils.clip_grad_norm_(params, 0.05, norm_type=order, **options)

    return clip


def by_value(params, scaler):
    nn.utils.clip_grad_value_(params, 1e-2)
    return nn.utils.get_total_norm([p.grad for p in params])


def by_hand(params, scaler):
    for p in params:
        p.grad.mul_(0.25).clamp_(min=-0.05)
    return nn.utils.get_total_norm([p.grad for p in params])


def one_alone(params, scaler):
    params[3].grad.div_(torch.tensor(3.0))
    return params[3].grad.new_zeros(()) + torch.linalg.vector_norm(params[3].grad)


def unscaled(params, scaler):
    return scaler.norm_after_unscale(params)


class Scaler:
    """torch.amp.GradScaler's call on lists of gradients; the scale is 8."""

    def __init__(self, overflows):
        self.found_inf, self.overflows = torch.zeros(1), overflows

    def norm_after_unscale(self, params):
        grads = [p.grad for p in params]
        if self.overflows:
            torch._foreach_mul_(grads, float("inf"))
        torch._amp_foreach_non_finite_check_and_unscale_(
            grads, self.found_inf, torch.tensor([1 / 8])
        )
        return self.found_inf.squeeze() if self.overflows else by_norm(2.0)(params, self)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("change", "overflows"),
    [(change, False) for change in (by_norm(2.0), by_norm(float("inf")),
     by_norm(1.0, foreach=True), by_value, by_hand, one_alone)]
    + [(unscaled, False), (unscaled, True)],
)  # fmt: skip
def test_gradients_changed_by_hand_are_those_of_one_process(change, overflows, deterministic):
    def train(model, rank, ranks):
        optimizer = AdamW(model.parameters(), lr=0.05, eps=1e-3)
        norms = []
        for i in range(3):
            for micro in range(2):  # of a step
                x = torch.randn(4, C, generator=torch.Generator().manual_seed(2 * i + micro))
                mine = x.view(ranks, -1, C)[rank] if ranks > 1 else x
                model(mine).square().mean().backward()
            scaler = Scaler(overflows and i == 1)
            norms.append(change(list(model.parameters()), scaler))
            if not scaler.found_inf:
                optimizer.step()
            optimizer.zero_grad()
        return torch.stack([x.detach() for x in norms]), whole(model)

    def run(stage, shard_size):
        options = {"zero_stage": stage, "deterministic": deterministic, **SMALL}
        mesh = Mesh()
        model = parallelize(fill(Net()), mesh, Parallel.of(**options, shard_size=shard_size))
        return train(model, mesh.rank, mesh.world_size)

    norms, expected = train(fill(Net()), 0, 1)
    for stage, shard_size in ((1, None), (2, 2), (3, None)):
        for got_norms, got in run_ranks(run, 4, stage, shard_size):
            torch.testing.assert_close(got_norms, norms, rtol=1e-5, atol=0)
            for name, value in got.items():
                torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


def swa(model):
    return AveragedModel(model)


def ema(model):
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))


def own_average(model):
    """As people write it, on parameters and with a dict."""
    average = copy.deepcopy(model)
    average.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    @torch.no_grad()
    def update(model):
        for q, p in zip(average.parameters(), model.parameters()):
            q.data.lerp_(p.data, 0.1)
        for name, p in model.named_parameters():
            average.shadow[name].lerp_(p, 0.1)

    average.update_parameters = update
    return average


@pytest.mark.parametrize("build", [swa, ema, own_average])
def test_averages_of_weights_are_those_of_plain_torch_or_refused(build):
    """Never nan: a refused update leaves the average as it was."""

    def train(model, optimizer, gathered, refused=None):
        with gathered():
            average = build(model)
        for i in range(3):
            step(model, optimizer, i)
            if refused:
                before = whole(average)
                with pytest.raises(RuntimeError, match=refused):
                    average.update_parameters(model)
                assert_same(before, whole(average))
            with gathered():
                average.update_parameters(model)
        return {**whole(average), **getattr(average, "shadow", {})}

    def run(model, optimizer, stage):
        return train(model, optimizer, engine_of(model).gathered, PARAMETER)

    model, optimizer = start()
    step(model, optimizer)
    expected = train(model, optimizer, contextlib.nullcontext)
    for got in on_ranks(run, SHARDED):
        assert_same(got, expected)


def test_a_read_of_what_is_not_there_is_refused_at_once():
    def run(model, optimizer, stage):
        p = model.head.bias
        for message, reads in READ.items():
            for read in reads:
                with torch.no_grad(), pytest.raises(RuntimeError, match=message):
                    read(p)
        said = r"Parameter containing:\nshard of \[5\], rank \d of 2; .*\.gathered\(\) shows it"
        assert re.fullmatch(said, repr(p))
        form = p.data.view(1, C)[0].t().to(torch.float64)
        assert (form.shape, form.dtype, p.detach().dim()) == ((C,), torch.float64, 1)
        assert torch.zeros_like(p.data).type_as(p.data).view_as(p).tolist() == [0] * C
        return goes_on(model, optimizer)

    assert all(on_ranks(run, SHARDED))


READS = (
    *(torch.Tensor.norm, torch.Tensor.sum, torch.clone), lambda x: torch.stack([x, x]),
    lambda x: torch.zeros(C).copy_(x), lambda x: torch.ones(C).add_(x),
    lambda x: torch._foreach_add([x], 1)[0], lambda x: torch.add(x, 1, out=torch.zeros(C)),
)  # fmt: skip


@pytest.mark.parametrize("message", REFUSED, ids=["memory", "gradients", "parameters"])
def test_what_is_refused_at_once(message):
    def run(model, optimizer, stage):
        if message == GRADIENT:
            backward(model)
        for write in REFUSED[message]:
            grad = torch.enable_grad() if message == MEMORY else torch.no_grad()
            with grad, pytest.raises(RuntimeError, match=message):
                write(model)
        if message == GRADIENT:
            grad = model.head.bias.grad
            assert (grad.shape, grad.dtype, grad.requires_grad) == ((C,), torch.float32, False)
            for read in READS:
                value = read(grad)
                assert type(value) is torch.Tensor
                assert value.isnan().all()
            assert repr(grad).startswith("gradient shard of [5], rank")
            optimizer.step()
            optimizer.zero_grad()
        else:
            assert_same(whole(model), expected)
        return goes_on(model, optimizer)

    model, optimizer = start()
    step(model, optimizer)
    expected = whole(model)
    assert all(on_ranks(run, SHARDED))


NAN = "nan"


def shown_by_grad(stage, options):
    """p.grad of a used and of an unused parameter in the moments of two steps, in one place."""
    mesh = Mesh()
    model = nn.ModuleDict({"used": nn.Linear(1, 1, bias=False), "not": nn.Linear(1, 1)})
    parallelize(model, mesh, Parallel.of(zero_stage=stage, **SMALL, **options))
    engine, p, found = engine_of(model), model["used"].weight, []
    optimizer = AdamW(model.parameters(), lr=0.1)
    p.register_post_accumulate_grad_hook(lambda p: note() if len(found) < 4 else None)

    def note():
        grads = p.grad, model["not"].weight.grad
        found.append([g if g is None else NAN if g.isnan() else g.item() for g in grads])

    def backward(context):
        with context:  # 1 on rank 0, 3 on rank 1
            model["used"](torch.full((1, 1), 1.0 + 2 * mesh.rank)).sum().backward()

    note()
    for context in (engine.no_sync(), contextlib.nullcontext()):
        backward(context)
        note()
    whole = [g.item() for q, g in engine.grads() if q is p]
    optimizer.step()
    note()
    optimizer.zero_grad(set_to_none=False)
    note()
    whole += [g.item() for q, g in engine.grads() if q is p]
    optimizer.zero_grad()
    note()
    return whole, found


GRADS = [  # before, in a hook, not reduced, in a hook, reduced, stepped, zero, None
    (0, {}, [None, (1, 3), (1, 3), (2, 6), 4, 4, 0, None]),
    (0, {"accumulate": "full"}, [None, (1, 3), (1, 3), (2, 6), 4, 4, 0, None]),
    (0, {"deterministic": True}, [None, (1, 3), NAN, (1, 3), 4, 4, 0, None]),
    *((stage, {}, [None, None, NAN, None, NAN, NAN, NAN, None]) for stage in SHARDED),
]


@pytest.mark.parametrize(("stage", "options", "expected"), GRADS)
def test_what_a_gradient_shows(stage, options, expected):
    for rank, (whole, found) in enumerate(run_ranks(shown_by_grad, 2, stage, options)):
        assert whole == [4, 0]
        assert [used for used, _ in found] == [
            each[rank] if isinstance(each, tuple) else each for each in expected
        ]
        other = [NAN if stage and i in (4, 5, 6) else None for i in range(len(found))]
        assert [unused for _, unused in found] == other


def test_other_memory_is_refused_in_the_next_pass_where_a_parameter_is_there():
    """Stages 1 and 2: from a forward to the step; stage 3: the last unit; or inside of it."""

    def after_a_forward(model, optimizer, stage):
        model(torch.ones(1, C))
        last, dtype = model.blocks[2][0], torch.float32
        if stage < 3:
            model.bfloat16()
            dtype = torch.bfloat16
        else:
            last.weight.data = last.weight.data.clone()
        message = r"Engine: parameter '[\w.]+' left its flat buffer \(now "
        with pytest.raises(RuntimeError, match=message):
            model(torch.ones(1, C, dtype=dtype)).sum().backward()

    def inside(model, optimizer, stage):
        def change(module, args):
            module.weight.data = module.weight.data.clone()

        model.blocks[1][0].register_forward_pre_hook(change)
        with pytest.raises(RuntimeError, match=r"parameter 'blocks.1.0.weight' left its flat "):
            step(model, optimizer)

    on_ranks(after_a_forward, SHARDED)
    on_ranks(inside, SHARDED)


def test_parameters_are_ordinary_ones_while_they_are_there():
    def run(model, optimizer, stage):
        kinds = []
        model.head.register_forward_hook(lambda module, *_: kinds.append(type(module.weight)))
        step(model, optimizer)
        assert all(isinstance(p, nn.Parameter) for p in model.parameters())
        return kinds == [nn.Parameter]

    assert all(on_ranks(run))


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = (
    copy.deepcopy,
    lambda model: pickle.loads(pickle.dumps(model)),
    saved,
    lambda model: AveragedModel(model).module,
)


def test_copies_are_whole_or_refused():
    refused = r"(copy.deepcopy|pickle): this rank holds only a shard of parameter '[\w.]+'; "
    refused += r".* inside `with fastpar.engine_of\(model\).gathered"

    def run(model, optimizer, stage):
        for make in COPIES if stage else ():
            with pytest.raises(RuntimeError, match=refused):
                make(model)
        for part in (model.blocks[0], model.head.bias, list(model.parameters())) if stage else ():
            with pytest.raises(RuntimeError, match=r"holds only a shard of parameter"):
                pickle.dumps(part)
        for make in COPIES:
            with engine_of(model).gathered():
                made = make(model)
            got = made.state_dict()
            made.zero_grad()
            made(torch.ones(1, C)).sum().backward()
            assert all(p.grad is not None for p in made.parameters())
            assert all(engine_of_parameter(p) is None for p in made.parameters())
            assert_same(got, expected)
            parallelize(made, engine_of(model).mesh)
            assert engine_of(made) is not engine_of(model)

    model, optimizer = start()
    step(model, optimizer)
    expected = whole(model)
    on_ranks(run)


def test_submodules_save_and_load_whole_tensors():
    def run(model, optimizer, stage):
        expected = whole(model)
        for name in ("blocks.0", "blocks", "head", "blocks.1.0"):
            got = model.get_submodule(name).state_dict()
            for key, value in got.items():
                assert torch.equal(value, expected[f"{name}.{key}"])
            owned = {p.data_ptr() for p in model.parameters()}
            assert stage == 0 or not owned & {value.data_ptr() for value in got.values()}
        new = {name: value + 1 for name, value in model.blocks[1].state_dict().items()}
        model.blocks[1].load_state_dict(new)
        again = whole(model)
        for name, value in expected.items():
            assert torch.equal(again[name], value + 1 if "blocks.1" in name else value)
        return goes_on(model, optimizer)

    assert all(on_ranks(run))
