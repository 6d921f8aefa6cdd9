"""buffers.py: gradients end in the flat buffer whatever autograd does; broken views are seen."""

import copy

import pytest
import torch
from torch import nn

from fastpar.buffers import FlatBuffers
from fastpar.layout import ALIGN

CPU = torch.device("cpu")


class Tied(nn.Module):
    """A tied embedding, a frozen layer, a buffer."""

    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(11, 6)
        self.mlp = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.wte.weight
        self.register_buffer("scale", torch.ones(()))

    def forward(self, idx):
        return self.head(self.frozen(self.mlp(self.wte(idx))) * self.scale)


def flatten(model, **options):
    return FlatBuffers(model, device=CPU, **options)


def test_values_stay_and_parameters_become_views_of_one_buffer():
    model = Tied()
    before = copy.deepcopy(model.state_dict())
    frozen = model.frozen.weight.data_ptr()
    buffers = flatten(model, world_size=3)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert model.head.weight is model.wte.weight
    assert model.frozen.weight.data_ptr() == frozen
    assert list(buffers.frozen.values()) == ["frozen.weight", "frozen.bias"]
    for bucket, flat in zip(buffers.layout.buckets, buffers.param_buckets):
        for i in bucket.slots:
            p = buffers.params[i]
            assert p.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
            assert p.data_ptr() % (ALIGN * 4) == flat.data_ptr() % (ALIGN * 4)
    names = [buffers.name(i) for i in range(len(buffers.params))]
    assert names == ["mlp.bias", "mlp.weight", "wte.weight"]


def test_a_non_contiguous_parameter_becomes_contiguous_with_its_values():
    model = nn.Linear(3, 5)
    model.weight = nn.Parameter(torch.arange(15.0).view(3, 5).t())
    flatten(model)
    assert model.weight.is_contiguous()
    assert model.weight[1, 2] == 11.0


def backward(model):
    model(torch.tensor([[1, 2, 3]])).square().sum().backward()


@pytest.mark.parametrize("state", ["none", "zeroed", "foreign"])
def test_store_brings_any_gradient_into_the_view(state):
    model = Tied()
    plain = copy.deepcopy(model)
    buffers = flatten(model)
    for view in buffers.views:
        view.fill_(float("nan"))
    backward(plain)
    if state == "zeroed":  # what zero_grad(set_to_none=False) leaves
        for p, view in zip(buffers.params, buffers.views):
            p.grad = view.zero_()
    backward(model)
    if state == "foreign":
        for p in buffers.params:
            p.grad = p.grad.clone()
    for i, p in enumerate(buffers.params):
        buffers.store(i)
        assert p.grad is buffers.views[i]
        twin = plain.get_parameter(buffers.name(i))
        assert torch.equal(buffers.views[i], twin.grad)
        assert torch.equal(buffers.grad_of(p), twin.grad)


def test_collect_zeroes_the_view_of_a_missing_gradient_and_repairs_a_replaced_one():
    model = nn.Linear(3, 2)
    buffers = flatten(model)
    bias, weight = buffers.params
    buffers.views[0].fill_(float("nan"))
    weight.grad = torch.full((2, 3), 5.0)
    assert not buffers.collect(0)
    assert buffers.collect(1)
    assert (bias.grad, weight.grad) == (None, buffers.views[1])
    assert buffers.views[0].tolist() == [0.0, 0.0]
    assert buffers.views[1].tolist() == [[5.0] * 3] * 2
    buffers.adopt(0)
    assert bias.grad is buffers.views[0]
    buffers.zero_grad()
    assert (bias.grad, weight.grad) == (None, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_main_gradients_add_up_in_fp32(dtype):
    model = nn.Linear(3, 2).to(dtype)
    buffers = flatten(model, grad_dtype=torch.float32)
    buffers.grad_buckets[0].fill_(float("nan"))
    bias = buffers.params[0]
    assert buffers.grad_of(bias) is None
    assert not buffers.collect(1)
    for value in (1.0, 2.0**-12):  # lost in 16 bits
        bias.grad = torch.full((2,), value, dtype=dtype)
        buffers.store(0)
        assert bias.grad is None
    assert bias.main_grad.dtype == torch.float32
    assert buffers.grad_of(bias) is bias.main_grad
    assert bias.main_grad.tolist() == [1.0 + 2.0**-12] * 2
    assert buffers.collect(0)
    buffers.zero_grad()
    assert buffers.grad_of(bias) is None
    bias.grad = torch.full((2,), 3.0, dtype=dtype)
    buffers.store(0)
    assert bias.main_grad.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("grad_dtype", [None, torch.float32])
def test_zero_grad_can_keep_gradients_as_zeros(grad_dtype):
    model = nn.Linear(3, 2).bfloat16()
    buffers = flatten(model, grad_dtype=grad_dtype)
    bias, weight = buffers.params
    bias.grad = torch.ones(2, dtype=torch.bfloat16)
    buffers.store(0)
    buffers.zero_grad(set_to_none=False)
    assert buffers.grad_of(bias) is buffers.views[0]
    assert buffers.views[0].tolist() == [0.0, 0.0]
    assert buffers.grad_of(weight) is None


def test_fp32_gradients_of_fp32_parameters_stay_in_grad():
    buffers = flatten(nn.Linear(3, 2), grad_dtype=torch.float32)
    assert not hasattr(buffers.params[0], "main_grad")


def test_parameters_of_two_dtypes_have_a_buffer_each():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 3).bfloat16())
    buffers = flatten(model)
    assert {b.dtype for b in buffers.param_buckets} == {torch.float32, torch.bfloat16}
    assert all(g.dtype == p.dtype for g, p in zip(buffers.views, buffers.params))


def sparse(model):
    p = model.wte.weight
    p.grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 6), p.shape, check_invariants=True)


def with_graph(model):
    x = torch.ones((), requires_grad=True)
    model.wte.weight.grad = torch.ones(11, 6) * x


@pytest.mark.parametrize(
    ("put", "message"),
    [
        (sparse, r"expected a dense gradient for parameter 'wte\.weight', got layout=torch.sparse"),
        (with_graph, r"expected backward without create_graph, .* parameter 'wte\.weight'"),
    ],
)
def test_gradients_that_do_not_fit(put, message):
    model = Tied()
    buffers = flatten(model)
    put(model)
    with pytest.raises(RuntimeError, match=message):
        buffers.store(2)


def to_half(model):
    model.half()


def assign(model):
    state = {k: v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def untie(model):
    model.head.weight = nn.Parameter(model.wte.weight.detach().clone())


def unfreeze(model):
    model.frozen.requires_grad_(True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (to_half, r"expected parameter 'mlp\.bias' to stay in its flat buffer, got other memory "),
        (assign, r"expected the model to keep its parameter 'wte\.weight', got another object"),
        (untie, r"expected the model to keep its parameter 'wte\.weight', got another object"),
        (unfreeze, r"expected parameter 'frozen\.weight' to stay frozen, got requires_grad=True"),
    ],
)
def test_broken_views_are_named(change, message):
    model = Tied()
    buffers = flatten(model)
    buffers.check()
    change(model)
    with pytest.raises(RuntimeError, match=message):
        buffers.check()


def test_what_keeps_views_passes_the_check():
    model = Tied()
    buffers = flatten(model)
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    model.float().cpu().train().requires_grad_(False)
    buffers.check()


def shared_memory():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight.data = model[0].weight.data
    return model


def complex_parameter():
    model = nn.Linear(3, 3)
    model.weight = nn.Parameter(model.weight.to(torch.complex64))
    return model


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (nn.ReLU, r"expected a model with parameters to train, got 0 parameters"),
        (lambda: nn.Linear(2, 2).requires_grad_(False), r"got 2 parameters and none with"),
        (lambda: nn.Linear(2, 2, device="meta"), r"mesh\.device=cpu, got device=meta for 'weight'"),
        (complex_parameter, r"got dtype=torch\.complex64 for 'weight'"),
        (shared_memory, r"got '0\.weight' and '1\.weight' sharing memory"),
    ],
)
def test_models_that_do_not_fit(build, message):
    model = build()
    with pytest.raises(ValueError, match=message):
        flatten(model)


def test_grad_dtype_must_be_floating_point():
    with pytest.raises(ValueError, match=r"expected a floating-point grad_dtype, got .*int32"):
        flatten(nn.Linear(2, 2), grad_dtype=torch.int32)
