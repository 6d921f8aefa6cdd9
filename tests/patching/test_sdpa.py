"""fastpar's attention behind torch's own SDPA: who serves, values, gradients, masks, switching off.

On a CPU torch gives SDPA to another op, without dropout, and chooses in C++ where no Python kernel
comes between. So the fixture plays the part of a GPU: a choice of torch's flash op for calls
without attn_mask, and kernels of "torch" below that op. torch's autograd of that op is its own.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.nn import attention as registry

import fastpar
from bench.peers import stock
from fastpar.config.config import GPTConfig
from fastpar.kernels import Rng, attention, attention_peers, choice, draw_key
from fastpar.kernels.choice import OWN, STOCK, Case, Proof, trying
from fastpar.kernels.reference import attention_ref
from fastpar.patching import sdpa
from fastpar.testing import assert_matches_oracle

aten = torch.ops.aten
FLASH = "_scaled_dot_product_flash_attention"


@pytest.fixture
def calls(monkeypatch):
    """fastpar registered on a "GPU"; gives the list of the calls that torch's kernels got."""
    seen = []
    library = torch.library.Library("aten", "IMPL")
    before = torch.library.get_kernel("aten::scaled_dot_product_attention", "AutogradCPU")

    def choose(keys, q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, **rest):
        if attn_mask is not None:
            return before.call_boxed(keys, q, k, v, attn_mask, dropout_p, is_causal, **rest)
        return getattr(aten, FLASH)(q, k, v, dropout_p, is_causal, scale=rest.get("scale"))[0]

    def torch_forward(q, k, v, p=0.0, causal=False, debug=False, *, scale=None):
        seen.append("forward")
        found = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        seed, offset = q.new_zeros(2, dtype=torch.uint64), q.new_zeros((), dtype=torch.uint64)
        return *found, None, None, q.shape[2], k.shape[2], seed, offset, q.new_empty(0)

    def torch_backward(do, q, k, v, o, lse, _1, _2, _3, _4, p, causal, *_, scale=None):
        seen.append("backward")
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            do, q, k, v, o, lse, 0.0, causal, scale=scale
        )

    for key in ("CPU", "AutogradCPU"):
        library.impl("scaled_dot_product_attention", choose, key, with_keyset=True)
    library.impl(FLASH, torch_forward, "CPU")
    library.impl(f"{FLASH}_backward", torch_backward, "CPU")
    monkeypatch.setattr(sdpa, "DEVICE", "CPU")
    fastpar.register_sdpa()
    yield seen
    if registry.current_flash_attention_impl():
        registry.restore_flash_attention_impl()
    sdpa._keep_backward.cache_clear()
    library._destroy()


def heads(B, T, H, D, *, like_nanogpt=True):
    """[B, H, T, D], as a view of a projection or in memory of its own."""
    x = torch.randn(B, T, H, D) if like_nanogpt else torch.randn(B, H, T, D).transpose(1, 2)
    return x.transpose(1, 2).detach().requires_grad_()


@pytest.mark.parametrize("p", [0.0, 0.25])
def test_values_and_gradients_are_those_of_the_oracle(calls, p):
    cases = ((True, 2, None, True), (False, 2, 0.3, True), (True, 1, None, False))
    for causal, Hkv, scale, like_nanogpt in cases:
        inputs = [heads(2, 33, n, 16, like_nanogpt=like_nanogpt) for n in (2, Hkv, Hkv)]

        def ours(q, k, v, causal=causal, scale=scale):
            torch.manual_seed(3)
            o = F.scaled_dot_product_attention(
                q, k, v, dropout_p=p, is_causal=causal, scale=scale, enable_gqa=True
            )
            assert o.stride() == torch.empty_like(q).stride()  # what torch.compile expects
            return o

        def oracle(q, k, v, causal=causal, scale=scale):
            torch.manual_seed(3)
            o = attention_ref(
                *(x.transpose(1, 2) for x in (q, k, v)), causal=causal, softmax_scale=scale,
                dropout_p=p, rng=(draw_key(), 0) if p else None,
            )  # fmt: skip
            return o.transpose(1, 2)

        assert_matches_oracle(ours, oracle, inputs)
    assert calls == []


def test_masks_are_attentions_for_the_key_that_torchs_generator_gives(calls):
    q, k, v = (heads(2, 40, 2, 16) for _ in range(3))
    torch.manual_seed(5)
    found = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5, is_causal=True)
    torch.manual_seed(5)
    rng = Rng(draw_key(), 0)
    expected = attention(*(x.transpose(1, 2) for x in (q, k, v)), dropout_p=0.5, rng=rng)
    assert torch.equal(found, expected.transpose(1, 2))


def test_logsumexp_is_natural(calls):
    q, k, v = (heads(1, 9, 2, 8) for _ in range(3))
    lse = getattr(aten, FLASH)(q, k, v, 0.0, False)[1]
    torch.testing.assert_close(lse, (q @ k.mT * 8**-0.5).logsumexp(-1))


def test_a_stock_nanogpt_model_calls_our_attention_dropout_included(calls, monkeypatch):
    config = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=50, dropout=0.25)
    model = stock.GPT(config).train()
    other = copy.deepcopy(model)
    idx, targets = torch.randint(50, (2, 2, 16))
    torch.manual_seed(1)
    loss = model(idx, targets)
    loss.backward()
    assert calls == []

    drawn = []

    def oracle(q, k, v, dropout_p, is_causal):
        drawn.append(draw_key())
        o = attention_ref(
            *(x.transpose(1, 2) for x in (q, k, v)), dropout_p=dropout_p, rng=(drawn[-1], 0)
        )
        return o.transpose(1, 2)

    monkeypatch.setattr(F, "scaled_dot_product_attention", oracle)
    torch.manual_seed(1)
    expected = other(idx, targets)
    expected.backward()
    assert len(drawn) == config.n_layer
    torch.testing.assert_close(loss, expected)
    for (name, found), reference in zip(model.named_parameters(), other.parameters()):
        torch.testing.assert_close(found.grad, reference.grad, msg=lambda m, name=name: name + m)


def test_what_we_do_not_serve_is_torchs_own(calls):
    q, k, v = (heads(1, 8, 2, 16) for _ in range(3))
    F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(8, 8, dtype=torch.bool))
    assert calls == []  # another op of torch's
    wide = heads(1, 8, 2, 264)
    for inputs, settings in (
        ((q, k[:, :, :5], v[:, :, :5]), {"is_causal": True}),
        ((wide, wide, wide), {}),
        ([x.double() for x in (q, k, v)], {}),
        ((q, k, v), {"dropout_p": 1 / 1000}),
        ((q, k, v), {"scale": -1.0}),
    ):
        expected = F.scaled_dot_product_attention(*(x.detach() for x in inputs), **settings)
        calls.clear()
        found = F.scaled_dot_product_attention(*inputs, **settings)
        found.sum().backward()
        assert calls == ["forward", "backward"]
        assert torch.equal(found, expected)


def test_a_failed_proof_leaves_a_call_to_torch(calls, monkeypatch):
    q, k, v = (heads(1, 8, 2, 16) for _ in range(3))
    case = Case("cpu", "attention", torch.float32, 16)
    monkeypatch.setitem(choice.proofs, case, Proof(STOCK, "error of o is 1e+0"))
    F.scaled_dot_product_attention(q, k, v).sum().backward()
    assert calls == ["forward", "backward"]
    F.scaled_dot_product_attention(q, k, v, dropout_p=0.5).sum().backward()  # another proof's
    assert calls == ["forward", "backward"]


def test_a_proof_made_in_a_call_can_take_gradients(calls, monkeypatch):
    """torch calls kernels without autograd; a trial there would find no gradients."""
    could = []

    def may_run(op, x):
        with torch.enable_grad():
            y = torch.ones(1, 1, requires_grad=True) * 2
            could.append(y.requires_grad and (y @ y).dtype == torch.float32)  # and no autocast
        return True

    monkeypatch.setattr(sdpa, "use_cpp", may_run)
    F.scaled_dot_product_attention(*(heads(1, 8, 2, 16) for _ in range(3))).sum().backward()
    assert could == [True, True]


def test_torchs_flash_kernel_behind_our_op_is_not_ours_again(calls, monkeypatch):
    """Our op may have been found slower than torch's flash, which it then calls: this op."""
    flash = attention_peers.PEERS["flash"]._replace(device="cpu", dtypes=(torch.float32,))
    monkeypatch.setitem(attention_peers.PEERS, "flash", flash)
    q, k, v = (heads(1, 8, 2, 16) for _ in range(3))
    with trying("attention", "flash"):
        o = attention(*(x.transpose(1, 2) for x in (q, k, v)))
        o.sum().backward()
    assert calls == ["forward", "backward"]
    calls.clear()
    with trying("attention", f"{OWN}/flash"):  # forward ours, backward torch's
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    assert calls == ["backward"]


def test_off_and_on_again(calls):
    assert registry.current_flash_attention_impl() == "fastpar"
    q, k, v = (heads(1, 8, 2, 16) for _ in range(3))
    registry.restore_flash_attention_impl()
    F.scaled_dot_product_attention(q, k, v).sum().backward()
    assert calls == ["forward", "backward"]
    registry.activate_flash_attention_impl("fastpar")
    fastpar.register_sdpa()
    calls.clear()
    F.scaled_dot_product_attention(q, k, v, dropout_p=0.5).sum().backward()
    assert calls == []


def test_flash_is_asked_first_while_active_and_the_order_comes_back(calls):
    registry.restore_flash_attention_impl()
    cudnn_first = [3, 1, 2, 0, 4]
    before = torch._C._get_sdp_priority_order()
    torch._C._set_sdp_priority_order(cudnn_first)
    try:
        registry.activate_flash_attention_impl("fastpar")
        assert torch._C._get_sdp_priority_order() == [1, 3, 2, 0, 4]
        registry.restore_flash_attention_impl()
        assert torch._C._get_sdp_priority_order() == cudnn_first
    finally:
        torch._C._set_sdp_priority_order(before)


def test_switched_off_between_forward_and_backward_the_mask_stays(calls):
    q, k, v = (heads(1, 24, 2, 16) for _ in range(3))

    def grads(off):
        torch.manual_seed(2)
        o = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5, is_causal=True)
        if off:
            registry.restore_flash_attention_impl()
        return torch.autograd.grad(o.square().sum(), (q, k, v))

    for found, expected in zip(grads(off=False), grads(off=True)):
        assert torch.equal(found, expected)
    assert calls == []


def test_a_torch_without_the_registry_or_without_gpus_is_refused(monkeypatch):
    monkeypatch.setattr(sdpa, "DEVICE", "CPU")  # torch has no kernel of this op there
    with pytest.raises(RuntimeError, match=r"flash attention for GPUs.*fastpar\.patch"):
        fastpar.register_sdpa()
    monkeypatch.delattr(registry, "restore_flash_attention_impl")
    with pytest.raises(RuntimeError, match=r"2\.13 or later, got torch .*fastpar\.patch"):
        fastpar.register_sdpa()
