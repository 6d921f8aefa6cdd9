"""The Triton kernels of the vocabulary shards: on a GPU, or in Triton's interpreter."""

import pytest
import torch
from cells import covering

pytest.importorskip("triton", reason="needs triton")


from fastpar.kernels import cross_entropy_shard, cross_entropy_shard_grad
from fastpar.kernels.loss import TABLE
from fastpar.kernels.loss import triton as cross_entropy_shard_triton
from fastpar.kernels.loss import triton as cross_entropy_triton
from fastpar.kernels.reference import (
    cross_entropy_shard_grad_ref,
    cross_entropy_shard_ref,
)
from fastpar.kernels.triton_launch import record
from fastpar.testing import assert_matches_oracle

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # numpy's


def make(n, v, vocabulary, device, dtype=torch.float32):
    logits = (torch.randn(n, v) * 3).to(device, dtype)
    targets = torch.randint(0, vocabulary, (n,))
    targets[::5] = -100
    return logits, targets.to(device)


@covering(
    1,
    (("n", "v", "first"), [(2, 1, 0), (7, 63, 40), (6, 1000, 500), (2, 25147, 9)]),
    ("z_loss", [0.0, 0.01]),
    ("dtype", DTYPES),
)
def test_backward_matches_oracle(n, v, first, z_loss, dtype, triton_device):
    logits, targets = make(n, v, 2 * v, triton_device, dtype)
    lse = logits.float().logsumexp(-1) + 0.5
    options = {"first": first, "vocab_size": first + v - v // 10, "z_loss": z_loss}

    def eager(x, *a):
        return cross_entropy_shard_grad_ref(x.float(), *a, **options).to(x.dtype)

    for scale in (torch.tensor(0.25), torch.randn(n)):
        assert_matches_oracle(
            lambda *a: cross_entropy_shard_grad(*a, **options),
            lambda *a: cross_entropy_shard_grad_ref(*a, **options),
            (logits, targets, lse, scale.to(triton_device)),
            eager=eager,
        )


@covering(1, ("v", [63, 1000, 5003]), ("dtype", DTYPES))
def test_gradient_over_the_logits(v, dtype, triton_device):
    """In place, and in rows of a wider workspace that stand elsewhere: the same bits."""
    logits, targets = make(6, v, v, triton_device, dtype)
    targets[1] = v + 5
    lse, scale = logits.float().logsumexp(-1), torch.randn(6).to(triton_device)
    options = {"vocab_size": v - 3, "z_loss": 0.01}
    want = cross_entropy_shard_grad(logits, targets, lse, scale, **options)
    wide = torch.full((6, v + 9), torch.nan, dtype=dtype, device=triton_device)
    for out in (wide[:, 5 : v + 5], logits):
        cross_entropy_shard_grad(logits, targets, lse, scale, **options, out=out)
        assert torch.equal(out, want)
    assert wide[:, :5].isnan().all()
    assert wide[:, v + 5 :].isnan().all()


def test_hostile_rows(triton_device):
    logits, targets = make(5, 64, 64, "cpu")
    targets[:] = torch.tensor([3, -100, 70, 2**40, -5])  # the last three are other shards'
    logits[0] = -torch.inf
    logits[1] = torch.nan
    logits[2, 5] = torch.nan
    got = cross_entropy_shard(logits.to(triton_device), targets.to(triton_device))
    for ours, want in zip(got, cross_entropy_shard_ref(logits, targets)):
        keep = [0, 1, 3, 4]
        torch.testing.assert_close(ours.cpu()[keep], want[keep])
    assert got[1][2].isnan()
    lse, scale = torch.full((5,), 7.0), torch.tensor(1.0)
    inputs = [t.to(triton_device) for t in (logits, targets, lse, scale)]
    grad = cross_entropy_shard_grad(*inputs).cpu()
    want = cross_entropy_shard_grad_ref(logits, targets, lse, scale)
    torch.testing.assert_close(grad, want, equal_nan=True)
    assert not grad[1].any()


def test_padding_only_and_no_rows(triton_device):
    logits, targets = make(4, 20, 30, triton_device)
    logits[:, :] = torch.nan
    options = {"first": 32, "vocab_size": 30}
    top, total, hit = cross_entropy_shard(logits, targets, **options)
    valid = targets != -100
    assert torch.equal(top, torch.where(valid, -torch.inf, 0.0))
    assert torch.equal(total, torch.where(valid, 0.0, 1.0))
    assert not hit.any()
    lse, one = torch.ones(4, device=triton_device), torch.ones((), device=triton_device)
    assert not cross_entropy_shard_grad(logits, targets, lse, one, **options).any()
    assert [t.shape for t in cross_entropy_shard(logits[:0], targets[:0])] == [(0,)] * 3


def test_launches_are_recorded():
    for arch in (80, 90):
        for label, call in cross_entropy_shard_triton.aot_calls():
            if label not in ("bf16", "fp32"):  # of whole vocabularies
                continue
            with record(arch) as launches:
                call()
            assert len(launches) == 3, label
            assert all(x.options["num_warps"] in (8, 16) for x in launches)
    assert cross_entropy_triton.config(25216 * 2, 2, TABLE.get(90))["num_warps"] == 8
