"""absent.py: nans that can be read, and refuse whatever would change or copy them."""

import copy
import pickle

import pytest
import torch
from torch import nn

from fastpar.engine.absent import Absent, AbsentParameter, hide, show


def nans(*shape):
    return torch.full((), float("nan")).expand(shape)


def gradient():
    return Absent.of(nans(2, 3), "gradient", "w")


READS = (
    lambda x: x.norm(),
    lambda x: x.sum(),
    lambda x: torch.stack([x, x]),
    lambda x: x.clone(),
    lambda x: torch.zeros(2, 3).copy_(x),
    lambda x: torch.ones(2, 3).add_(x),
    lambda x: torch._foreach_norm([x])[0],
    lambda x: torch.add(x, 1, out=torch.zeros(2, 3)),
)


def test_reads_are_nan_and_ordinary_tensors():
    for x in (gradient(), AbsentParameter(nans(2, 3)).data):
        for read in READS:
            value = read(x)
            assert type(value) is torch.Tensor
            assert value.isnan().all()
        assert (x.shape, x.dtype, x.is_sparse, x.requires_grad) == (
            (2, 3),
            torch.float32,
            False,
            False,
        )
        assert "nan" in repr(x)


WRITES = (
    lambda x: x.mul_(2),
    lambda x: x.__setitem__(0, 1.0),
    lambda x: x.__imul__(2),
    lambda x: x.detach().add_(1),
    lambda x: x.data.fill_(1),
    lambda x: x.view(6).clamp_(0),
    lambda x: x[0].sub_(1),
    lambda x: torch._foreach_mul_([torch.ones(1), x], 2.0),
    lambda x: torch.add(torch.ones(2, 3), 1, out=x),
    lambda x: copy.deepcopy(x),
    lambda x: pickle.dumps(x),
)


def test_writes_and_copies_are_refused():
    for x, message in (
        (
            gradient(),
            r"p\.grad: expected to be left as it is, got \w+ for 'w', whose gradient is not",
        ),
        (
            AbsentParameter(nans(2, 3)).data,
            r"[\w.]+: expected a whole parameter, got '\?', of which",
        ),
    ):
        for write in WRITES:
            with pytest.raises(RuntimeError, match=message):
                write(x)
        assert x.isnan().all()


def test_zeroing_a_gradient_is_noted():
    a, b, plain = gradient(), gradient(), torch.ones(2)
    assert a.zero_() is a
    torch._foreach_zero_([plain, b])
    assert (a.zeroed, b.zeroed, plain.tolist()) == (True, True, [0, 0])
    assert a.isnan().all()
    assert b.isnan().all()
    with pytest.raises(RuntimeError, match=r"p\.zero_: expected a whole parameter"):
        AbsentParameter(nans(2)).data.zero_()


def test_a_parameter_is_absent_by_its_class():
    p = nn.Parameter(torch.ones(2))
    mine = type("Mine", (nn.Parameter,), {})(torch.ones(2))
    for x in (p, mine):
        x.data = nans(2)
        hide(x)
    assert (type(p), type(mine).__name__) == (AbsentParameter, "Mine")
    for act, message in (
        (lambda: p.mul_(2), r"p\.mul_: expected a whole parameter"),
        (lambda: p.__setitem__(0, 1), r"p\.__setitem__: expected a whole parameter"),
        (lambda: copy.deepcopy(p), r"copy\.deepcopy: expected a whole parameter"),
        (lambda: pickle.dumps(p), r"pickle: expected a whole parameter"),
        (
            lambda: setattr(p, "data", torch.ones(2)),
            r"parallelize: expected parameter '\?' to keep",
        ),
    ):
        with pytest.raises(RuntimeError, match=message):
            act()
    p.data = p  # nothing changes
    p.requires_grad_(False)
    assert p.isnan().all()
    show(p)
    show(mine)
    p.data = torch.ones(2)
    assert type(p) is nn.Parameter
    assert p.mul_(2).tolist() == [2, 2]
