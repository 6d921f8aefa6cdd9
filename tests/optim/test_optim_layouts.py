"""Optimizers on tensors that lie in memory in unusual ways, and torch's form of the step count."""

import math

import pytest
import torch
from torch import Tensor

from fastpar import Adafactor, AdamW, Muon
from fastpar.kernels import adamw_step_, backend, global_norm
from fastpar.kernels.adamw import Hyper
from fastpar.optim.schedule import DynamicLossScale


def layouts(x: Tensor) -> dict[str, Tensor]:
    """The same values, each time laid out in another way."""
    gaps = x.new_zeros(*x.shape, 2)
    gaps[..., 0] = x
    return {
        "contiguous": x.clone(),
        "transposed": x.T.contiguous().T,
        "with gaps": gaps[..., 0],
        "negated": torch._neg_view(-x),
        "negated and transposed": torch._neg_view((-x).T.contiguous()).T,
    }


def stepped(make, values: Tensor, grads: list[Tensor], turned: bool = False) -> Tensor:
    p = torch.nn.Parameter(values.T.contiguous().T if turned else values.clone())
    optimizer = make([p])
    for grad in grads:
        p.grad = grad
        optimizer.step()
    return p.detach()


@pytest.mark.parametrize("choice", ["auto", "torch"])
def test_gradients_may_lie_in_any_order(choice, monkeypatch):
    monkeypatch.setattr(backend, "choice", choice)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        values, grad = torch.randn(5, 3, dtype=dtype), torch.randn(5, 3, dtype=dtype)
        masters = {"master_weights": True} if dtype == torch.bfloat16 else {}

        def adamw(params, masters=masters, **options):
            return AdamW(params, lr=0.1, **masters, **options)

        def adafactor(params, masters=masters):
            return Adafactor(params, **masters)

        for make in (
            adamw,
            lambda params: adamw(params, max_grad_norm=0.5),
            lambda params: adamw(params, amsgrad=True, maximize=True),
            *((adafactor,) if dtype != torch.float64 else ()),
        ):
            expected = stepped(make, values, [grad, 2 * grad])
            for name, laid in layouts(grad).items():
                for turned in (False, True):
                    got = stepped(make, values, [laid, 2 * laid], turned)
                    # torch's kernels, which Adafactor's sums are too, round by places in memory.
                    ours = choice == "auto" and dtype != torch.float64 and make is not adafactor
                    limit = 0.0 if ours else 8 * torch.finfo(dtype).eps
                    assert (got - expected).abs().max() <= limit, (choice, dtype, name, turned)
        if not masters:
            torchs = stepped(lambda params: torch.optim.AdamW(params, lr=0.1), values, [grad])
            error = (stepped(adamw, values, [layouts(grad)["transposed"]]) - torchs).abs().max()
            assert error <= 8 * torch.finfo(dtype).eps


def test_gradients_used_transposed_in_fp64():
    """The parameter's own gradient, in the order that its use had."""
    w = torch.nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
    other = torch.nn.Parameter(w.detach().clone())
    x = torch.randn(7, 3, dtype=torch.float64)
    for p, optimizer in ((w, AdamW([w], lr=0.1)), (other, torch.optim.AdamW([other], lr=0.1))):
        (grad,) = torch.autograd.grad((x @ p.T).square().sum(), p)
        p.grad = grad.T.contiguous().T
        optimizer.step()
    torch.testing.assert_close(w, other, rtol=0, atol=1e-14)


def test_zeroed_gradients_and_the_norm_of_negated_ones():
    for dtype in (torch.float32, torch.float64):
        grad = torch.randn(5, 3, dtype=dtype)
        for name, laid in layouts(grad).items():
            norm = global_norm([laid]).norm
            assert norm == global_norm([grad]).norm, name
            p = torch.nn.Parameter(torch.randn(5, 3, dtype=dtype))
            p.grad = laid
            AdamW([p], zero_grad_in_step=True).step()
            assert not laid.any(), name
    flat, values = torch._neg_view(torch.ones(4)), torch.zeros(4)
    adamw_step_([values], [flat], *([torch.zeros(4)] for _ in range(2)), Hyper(1, 0, 0, 0, 0, 1))
    assert torch.equal(values, torch.ones(4))


def test_saved_states_may_lie_in_any_order():
    values, grad = torch.randn(5, 3), torch.randn(5, 3)
    for make in (lambda p: AdamW(p, lr=0.1), Adafactor):
        expected = stepped(make, values, [grad, grad])
        p = torch.nn.Parameter(values.clone())
        first = make([p])
        p.grad = grad
        first.step()
        for name in layouts(values):
            saved = first.state_dict()
            state = {
                key: layouts(x)[name] if x.dim() > 1 else x for key, x in saved["state"][0].items()
            }
            q = torch.nn.Parameter(p.detach().clone())
            second = make([q])
            second.load_state_dict({**saved, "state": {0: state}})
            q.grad = grad
            second.step()
            assert torch.equal(q, expected), name


def test_parameters_that_are_views_with_gaps_are_refused_when_they_are_given():
    whole = torch.randn(4, 6)
    for view, words in (
        (whole[:, :3], r"parameter 0 of group 0, \[4, 3\], a view with strides \(6, 1\)"),
        (whole[0].expand(2, 6), r"a view with strides \(0, 1\)"),
        (torch._neg_view(whole), "a view negated lazily"),
    ):
        with pytest.raises(ValueError, match=words):
            AdamW([torch.nn.Parameter(view)])
    # The advice works.
    p = torch.nn.Parameter(whole[:, :3].detach().clone(memory_format=torch.contiguous_format))
    p.grad = torch.ones_like(p)
    AdamW([p]).step()
    for optimizer in (AdamW, Adafactor):
        with pytest.raises(ValueError, match="expected dense parameters, got parameter 0 of group"):
            optimizer([torch.nn.Parameter(whole.to_sparse())])
    # A view that became one afterwards.
    late = torch.nn.Parameter(torch.randn(4, 3))
    optimizer = AdamW([late])
    late.data = whole[:, :3]
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


@pytest.mark.parametrize("default", [torch.float32, torch.float64])
def test_the_step_count_has_torchs_dtype(default, monkeypatch):
    torch.set_default_dtype(default)
    try:
        for ours, theirs in ((AdamW, torch.optim.AdamW), (Adafactor, torch.optim.Adafactor)):
            params = [torch.nn.Parameter(torch.ones(3, 2, dtype=torch.float32)) for _ in range(2)]
            optimizers = [ours([params[0]]), theirs([params[1]])]
            for p, optimizer in zip(params, optimizers):
                p.grad = torch.ones_like(p)
                optimizer.step()
            mine, torchs = (o.state[p]["step"] for p, o in zip(params, optimizers))
            assert mine.dtype == torchs.dtype == default
            # Loaded, from either default, in either optimizer.
            for dtype in (torch.float32, torch.float64):
                saved = optimizers[1].state_dict()
                saved["state"][0]["step"] = torch.tensor(4.0, dtype=dtype)
                for p, optimizer in zip(params, optimizers):
                    optimizer.load_state_dict(saved)
                    optimizer.step()
                    assert optimizer.state[p]["step"].dtype == dtype
                    assert optimizer.state[p]["step"] == 5
        # Where the kernel reads the count, it is fp32.
        p = torch.nn.Parameter(torch.ones(3, dtype=torch.float32))
        p.grad = torch.ones_like(p)
        optimizer = AdamW([p], capturable=True)
        optimizer.step()
        assert optimizer.state[p]["step"].dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_options_that_are_no_numbers_are_refused_by_name():
    p = torch.nn.Parameter(torch.ones(3))
    adamw = [
        ({"lr": "0.1"}, "expected lr to be a number, got lr='0.1'"),
        ({"lr": None}, "expected lr to be a number, got lr=None"),
        ({"lr": math.nan}, "expected 0.0 <= lr < inf, got lr=nan"),
        ({"lr": 1j}, "expected lr to be a number"),
        ({"betas": None}, "expected betas to be two numbers, got betas=None"),
        ({"betas": 0.9}, "expected betas to be two numbers, got betas=0.9"),
        ({"betas": (0.9,)}, "expected betas to be two numbers"),
        ({"betas": (0.9, 0.99, 0.5)}, "expected betas to be two numbers"),
        ({"betas": "ab"}, "expected betas to be two numbers"),
        ({"betas": (0.9, None)}, r"expected betas\[1\] to be a number"),
        ({"eps": "1e-8"}, "expected eps to be a number"),
        ({"eps": -1.0}, "expected 0.0 <= eps"),
        ({"weight_decay": None}, "expected weight_decay to be a number"),
        ({"seed": 0.5}, "expected 0 <= seed"),
        ({"max_grad_norm": "1"}, "expected max_grad_norm to be a number"),
        ({"max_grad_norm": math.nan}, "expected max_grad_norm > 0"),
    ]
    adafactor = [
        ({"lr": "0.1"}, "expected lr to be a number"),
        ({"lr": torch.ones(2)}, "expected a number or a tensor of one element, got lr"),
        ({"eps": 1e-3}, "expected eps to be two numbers"),
        ({"eps": None}, "expected eps to be two numbers"),
        ({"eps": (None, "x")}, r"expected eps\[1\] to be a number"),
        ({"beta2_decay": None}, "expected beta2_decay to be a number"),
        ({"d": "1"}, "expected d to be a number"),
        ({"beta1": "0.9"}, "expected beta1 to be a number"),
        ({"foreach": "yes"}, "expected foreach to be None, True or False"),
        ({"max_grad_norm": "1"}, "expected max_grad_norm to be a number"),
    ]
    for optimizer, table in ((AdamW, adamw), (Adafactor, adafactor)):
        for options, words in table:
            with pytest.raises(ValueError, match=words):
                optimizer([p], **options)
    group = AdamW([p]).state_dict()
    group["param_groups"][0]["betas"] = (0.9, 0.99, 0.999)
    with pytest.raises(ValueError, match=r"AdamW.load_state_dict: expected betas to be two"):
        AdamW([p]).load_state_dict(group)
    with pytest.raises(ValueError, match="expected an integer growth_interval"):
        DynamicLossScale(growth_interval=math.nan)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_pieces_of_fsdp_are_refused_where_they_are_not_enough(use_orig_params):
    """Its flat parameters are plain tensors; a norm or a matrix needs those of all ranks."""
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        device = torch.device("cpu")
        model = FullyShardedDataParallel(
            torch.nn.Linear(3, 4), use_orig_params=use_orig_params, device_id=device
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


def test_parameters_of_fully_shard_are_refused_by_name():
    """FSDP2 keeps a rank's part of each parameter in a DTensor."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Linear(3, 4)
    before = AdamW(model.parameters())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        fully_shard(model, mesh=mesh)
        words = "got parameter 0 of group 0 of type=DTensor; for FSDP2's DTensors use fastpar.par"
        for optimizer in (AdamW, Adafactor):
            with pytest.raises(
                ValueError, match=rf"{optimizer.__name__}: expected plain .*{words}"
            ):
                optimizer(model.parameters())
        with pytest.raises(ValueError, match=r"got parameter 0 of group 1 .*DTensor"):
            before.add_param_group({"params": list(model.parameters())})
        assert len(before.param_groups) == 1
    finally:
        dist.destroy_process_group()
