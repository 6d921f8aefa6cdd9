"""What only the backward of attention's Triton kernels can get wrong.

test_attention_triton.py compares all gradients with fp64.
"""

import pytest
import torch
from cells import covering

pytest.importorskip("triton", reason="needs triton")

from test_attention_triton import NO_MASK, RNG, check, draw, run

from fastpar.kernels.attention import triton as bwd
from fastpar.kernels.attention.plans import tma_reads


def test_strides_are_read_and_written_in_place(triton_device):
    """Packed, heads before rows, steps over samples, and addresses no descriptor can hold."""
    B, T, H, D = 2, 40, 1, 32
    packed = torch.randn(B, T, 3, H, D).to(triton_device)
    ones = torch.ones(B, T, H, D, device=triton_device)
    want = run(*(x.contiguous() for x in packed.unbind(2)), ones)
    layouts = {
        "packed": packed.clone().unbind(2),
        "heads first": [x.transpose(1, 2).contiguous().transpose(1, 2) for x in packed.unbind(2)],
        "every other sample": [x.repeat_interleave(2, 0)[::2] for x in packed.unbind(2)],
        "odd address": [torch.cat([x[..., :1], x], -1)[..., 1:] for x in packed.unbind(2)],
    }
    for name, (q, k, v) in layouts.items():
        expanded = ones[:1, :1, :1, :1].expand(B, T, H, D)
        assert tma_reads(k) == (name != "odd address")
        for a, b in zip(run(q, k, v, ones if name == "packed" else expanded), want):
            torch.testing.assert_close(a, b, msg=name)


def test_gradients_of_a_packed_tensor_leave_their_neighbours_alone(triton_device):
    T, H, D = 70, 2, 40
    q, k, v = (torch.randn(1, T, H, D).to(triton_device) for _ in range(3))
    do = torch.randn_like(q)
    o, lse, *want = run(q, k, v, do)
    room = torch.full((3, T + 2, 5, H + 1, D + 8), 7.0).to(triton_device)
    grads = [room[1:2, 1 : T + 1, i, :H, :D] for i in (1, 2, 3)]
    bwd.attention_bwd(do, q, k, v, o, lse, *grads, True, D**-0.5, *NO_MASK, None)
    for got, grad in zip(grads, want):
        assert torch.equal(got, grad)
        got.fill_(7.0)
    assert (room == 7.0).all()


@covering(1, ("p", [0.0, 0.3]), ("Hkv", [1, 2]))
def test_fewer_key_heads(triton_device, Hkv, p):
    inputs = [draw(triton_device, 1, 64, h, 24, dtype=torch.float32) for h in (4, Hkv, Hkv)]
    check(inputs, dropout_p=p, rng=RNG)


@covering(1, ("seed", range(2)), ("p", [0.0, 0.1]))
def test_scores_far_apart_in_fp32(triton_device, seed, p):
    """Rows that one key owns: PyTorch's probability is 1 exactly, so ours must be 1 to a rounding.
    lse alone is off by its own rounding, and scores summed in another order by theirs."""
    torch.manual_seed(seed)
    q, k = (draw(triton_device, 1, 33, 2, 16, dtype=torch.float32, scale=6.0) for _ in range(2))
    v = draw(triton_device, 1, 33, 2, 16, dtype=torch.float32)
    check([q, k, v], dropout_p=p, rng=RNG if p else None)
