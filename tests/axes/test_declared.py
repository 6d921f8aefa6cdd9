"""declared.py: what modules say of their parameters, and what follows from it."""

from typing import ClassVar

import pytest
import torch
from torch import nn

from fastpar import GPT, GPTConfig, engine_of, parallelize
from fastpar.axes.tensor.declared import Declared, add_state, find_states, split_parameters
from fastpar.axes.tensor.functional import TensorParallel
from fastpar.comm.mesh import Mesh
from fastpar.comm.transports import TorchCollectives
from fastpar.settings.parallel import Parallel
from fastpar.sharding.layout import parameter_names
from fastpar.sharding.placements import Partial, Replicate, Shard
from fastpar.testing import run_ranks


class Scale(nn.Module):
    tp_states: ClassVar = {"scale": Partial()}

    def __init__(self, n):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(n))


class Pair(nn.Module):
    """States of parameters of its children, by dotted names."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 6, bias=False)
        self.tp = None

    def tensor_parallel(self, tp):
        self.tp = tp
        return {"a.weight": Shard(0), "a.bias": Shard(0), "b.weight": Shard(1)}


class Model(nn.Module):
    tp_states: ClassVar = {"pair.b.weight": Shard(1), "table": Shard(0, pad_to=2)}

    def __init__(self):
        super().__init__()
        self.pair, self.norm = Pair(), Scale(6)
        self.table = nn.Parameter(torch.arange(15.0).view(5, 3))
        self.same = nn.Linear(3, 2, bias=False)
        self.same.tp_states = {"weight": Replicate()}


def one_rank():
    """A TensorParallel of a single rank: nothing is said to anybody."""
    return TensorParallel(TorchCollectives())


def test_states_come_from_attributes_and_methods():
    def rank():
        model, tp = Model(), one_rank()
        states = find_states(model, tp)
        names = {names[0]: states[p] for p, names in parameter_names(model).items()}
        assert model.pair.tp is tp
        return names

    assert run_ranks(rank, 1) == [
        {
            "pair.a.weight": Shard(0),
            "pair.a.bias": Shard(0),
            "pair.b.weight": Shard(1),
            "norm.scale": Partial(),
            "table": Shard(0, pad_to=2),
            "same.weight": Replicate(),
        }
    ]


def test_a_shared_module_is_asked_once():
    calls = []

    def rank():
        class Counts(Scale):
            def tensor_parallel(self, tp):
                calls.append(self)
                return {}

        one = Counts(3)
        model = nn.ModuleList([one, one])
        return len(find_states(model, one_rank()))

    assert run_ranks(rank, 1) == [1]
    assert len(calls) == 1


def test_tied_parameters_have_the_state_of_either_name():
    def rank():
        model = nn.ModuleList([Scale(3), Scale(3)])
        model[1].scale = model[0].scale
        assert len(find_states(model, one_rank())) == 1
        model[1].tp_states = {"scale": Replicate()}
        message = (
            r"parallelize: expected one state for parameter '1\.scale', got Partial\(\) and "
            r"Replicate\(\); declare it once"
        )
        with pytest.raises(ValueError, match=message):
            find_states(model, one_rank())

    run_ranks(rank, 1)


def test_a_state_of_no_parameter():
    def rank():
        model = nn.Sequential(Scale(3))
        model[0].tp_states = {"scale": Partial(), "shift": Partial()}
        message = (
            r"parallelize: expected states of Scale's parameters, got one for '0\.shift', which is "
            r"none; correct its tensor_parallel or tp_states"
        )
        with pytest.raises(ValueError, match=message):
            find_states(model, one_rank())
        with pytest.raises(ValueError, match=r"got one for 'shift', which is none"):
            find_states(model[0], one_rank())

    run_ranks(rank, 1)


def split(model, tp, mesh):
    return split_parameters(
        parameter_names(model),
        find_states(model, tp),
        tp,
        lambda tensors: mesh.broadcast_(tensors, "tp"),
    )


def splits_a_model():
    mesh = Mesh(tp=2)
    tp = TensorParallel(TorchCollectives(mesh.tp_group))
    model, first = Model(), Model()
    generator = torch.Generator().manual_seed(mesh.rank)  # ranks begin with other values
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
        generator.manual_seed(0)
        for p in first.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    declared = split(model, tp, mesh)
    for (name, p), whole in zip(model.named_parameters(), first.parameters()):
        state = declared.states(p)["tp"]
        expected = whole
        if isinstance(state, Shard):
            expected = state.cut(whole.detach(), mesh.tp_rank, 2)
        assert torch.equal(p.detach(), expected.detach()), name
        assert declared.whole_shape(p) == whole.shape
        assert torch.equal(declared.whole(p.detach(), p), whole.detach())
        assert torch.equal(declared.cut(whole.detach(), p), p.detach())
        for other in (torch.float64, torch.bfloat16, torch.uint8, torch.bool):  # of an optimizer
            values = whole.detach().to(other)
            assert torch.equal(declared.whole(declared.cut(values, p), p), values)
        assert declared.counts(p) == (mesh.tp_rank == 0 or isinstance(state, Shard))
    return [list(p.shape) for p in model.parameters()]


@pytest.mark.parametrize("backend", ["threads", pytest.param("gloo", marks=pytest.mark.slow)])
def test_parameters_are_cut_in_place_with_the_first_ranks_values(backend):
    shapes = [[4, 3], [4, 6], [4], [6, 4], [6], [2, 3]]
    assert run_ranks(splits_a_model, 2, backend=backend) == [shapes] * 2


def test_what_is_whole_is_a_copy():
    def rank():
        model, mesh = Model(), Mesh(tp=2)
        declared = split(model, TensorParallel(TorchCollectives(mesh.tp_group)), mesh)
        p = model.norm.scale
        declared.whole(p.detach(), p).fill_(5.0)
        declared.cut(p.detach(), p).fill_(5.0)
        return p.tolist()

    assert run_ranks(rank, 2) == [[1.0] * 6] * 2


def refused(change, match, tp=2):
    """split_parameters() of a model that change(model) has spoilt leaves everything as it was."""

    def rank():
        mesh, model = Mesh(tp=tp), Model()
        change(model)
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(mesh.rank)
        shapes = [p.shape for p in model.parameters()]
        with pytest.raises(ValueError, match=match):
            split(model, TensorParallel(TorchCollectives(mesh.tp_group)), mesh)
        assert shapes == [p.shape for p in model.parameters()]
        assert all((p == mesh.rank).all() for p in model.parameters())

    run_ranks(rank, tp)


def test_a_parameter_without_a_state():
    def forget(model):
        del model.same.tp_states

    refused(
        forget,
        r"parallelize: expected a declared state for every parameter with tp=2, got none for "
        r"'same\.weight'; name it in tp_plan, or in its module's tp_states: Shard, Replicate or",
    )


def test_a_parameter_that_does_not_split():
    def change(model):
        model.same.tp_states = {"weight": Shard(1)}

    refused(
        change,
        r"parallelize: expected tp=2 to split parameter 'same\.weight' of shape \[2, 3\] as "
        r"Shard\(dim=1, groups=1, pad_to=None\), got: dimension 1 of size 3 does not divide by 2; "
        r"choose another tp, or Replicate\(\)",
    )


def test_add_state_keeps_the_first():
    p = nn.Parameter(torch.ones(2))
    states = {}
    add_state(states, p, Replicate(), "p")
    add_state(states, p, Replicate(), "p")
    with pytest.raises(ValueError, match=r"expected one state for parameter 'p'"):
        add_state(states, p, Partial(), "p")
    assert states == {p: Replicate()}


def test_renamed_parameters_keep_their_states():
    def rank():
        old, new = Model(), Model()
        declared = Declared(
            one_rank(),
            {p: {"tp": state} for p, state in find_states(old, one_rank()).items()},
            {p: torch.Size([i]) for i, p in enumerate(old.parameters())},
        )
        before = [declared.states(p)["tp"] for p in old.parameters()]
        declared.rename(parameter_names(old), parameter_names(new))
        assert [declared.states(p)["tp"] for p in new.parameters()] == before
        assert [list(declared.whole_shape(p)) for p in new.parameters()] == [[i] for i in range(6)]
        with pytest.raises(KeyError):
            declared.states(next(old.parameters()))

    run_ranks(rank, 1)


def gpt(**sizes):
    return GPT(
        GPTConfig(
            **{"n_layer": 1, "n_head": 4, "n_embd": 32, "block_size": 8, "vocab_size": 50} | sizes
        )
    )


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_every_parameter_of_gpt_is_declared(sequence_parallel):
    def rank():
        model = gpt()
        parallelize(model, Mesh(tp=4), Parallel.of(sequence_parallel=sequence_parallel))
        declared = engine_of(model).declared
        return {name: declared.states(p)["tp"] for name, p in model.named_parameters()}

    per_token = Partial() if sequence_parallel else Replicate()
    attention, mlp = ("h.0.attn.c_attn", "h.0.attn.c_proj"), ("h.0.mlp.c_fc", "h.0.mlp.c_proj")
    norms = ("h.0.ln_1", "h.0.ln_2", "ln_f")
    expected = {
        "wte.weight": Shard(0, pad_to=128),
        "wpe.weight": per_token,
        f"{attention[0]}.weight": Shard(0, groups=3),
        f"{attention[0]}.bias": Shard(0, groups=3),
        f"{attention[1]}.weight": Shard(1),
        f"{attention[1]}.bias": per_token,
        f"{mlp[0]}.weight": Shard(0),
        f"{mlp[0]}.bias": Shard(0),
        f"{mlp[1]}.weight": Shard(1),
        f"{mlp[1]}.bias": per_token,
        **{f"{name}.{of}": per_token for name in norms for of in ("weight", "bias")},
    }
    assert run_ranks(rank, 4) == [expected] * 4


@pytest.mark.parametrize(
    ("sizes", "tp", "options", "match"),
    [
        (
            {"n_head": 4},
            3,
            {"sequence_parallel": False},
            r"parallelize: expected tp to divide the MLP's width of \d+, got tp=3; change tp",
        ),
        (
            {"n_head": 2},
            4,
            {},
            r"parallelize: expected tp of at most n_head=2, got tp=4; lower tp",
        ),
        (
            {"block_size": 9},
            2,
            {},
            r"expected tp to divide block_size=9 .*, or add sequence_parallel=False",
        ),
    ],
)
def test_a_gpt_that_does_not_split(sizes, tp, options, match):
    def rank():
        with pytest.raises(ValueError, match=match):
            parallelize(gpt(**sizes), Mesh(tp=tp), Parallel.of(**options))

    run_ranks(rank, tp)


def test_a_module_that_says_nothing_is_refused_by_parallelize():
    def rank():
        message = (
            r"expected a declared state for every parameter with tp=2, got none for '0\.weight'"
        )
        with pytest.raises(ValueError, match=message):
            parallelize(nn.Sequential(nn.Linear(4, 4)), Mesh(tp=2))

    run_ranks(rank, 2)


def test_a_method_of_that_name_which_means_something_else_is_not_called():
    class Foreign(nn.Linear):
        def tensor_parallel(self, device_mesh):
            raise AssertionError("transformers' own")

    assert run_ranks(lambda: find_states(Foreign(2, 2), one_rank()), 1) == [{}]


def test_a_refused_model_is_as_it_was():
    def rank():
        model = gpt().eval()  # no dropout
        idx = torch.zeros(1, 8, dtype=torch.int64)
        before = model(idx, idx).item()
        model.own = torch.nn.Parameter(torch.zeros(3))  # nobody declares it
        with pytest.raises(ValueError, match="got none for 'own'"):
            parallelize(model, Mesh(tp=2))
        del model.own
        assert model(idx, idx).item() == before
        parallelize(model, Mesh(tp=2))
        assert model(idx, idx).item() == pytest.approx(before, rel=1e-6)

    run_ranks(rank, 2)
