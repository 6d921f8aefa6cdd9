"""Others' kernels behind the op attention: any forward with any backward, who serves, forcing."""

import math

import pytest
import torch
from cells import sweep, torch_attends
from test_cases import check

from fastpar.kernels import Rng, attention, attention_qkvpacked, backend, choice, make_key
from fastpar.kernels.attention import peers as attention_peers
from fastpar.kernels.attention.peers import PEERS, read_forced, read_left_out, refusal
from fastpar.kernels.cases import attention_case
from fastpar.kernels.choice import OWN, PeerProof, Proof, trying

Q = torch.ones(1, 4, 2, 8)
DROPOUT = {"dropout_p": 0.5, "rng": Rng(make_key(0, 0), 0)}


def draw(*shape, dtype=torch.float32, device="cpu"):
    return torch.randn(shape, dtype=dtype, device=device).requires_grad_()


@pytest.fixture
def force(monkeypatch):
    return lambda name: monkeypatch.setattr(attention_peers, "forced", name)


@pytest.fixture
def prove(monkeypatch):
    """What a proof has found for attention of this dtype and head dimension."""
    return lambda p: monkeypatch.setattr(choice, "proofs", {choice.case_of("attention", Q): p})


@sweep("dtype", [torch.float32, torch.bfloat16])
@sweep("causal", [True, False])
@sweep("pair", ["cpu", "cpu/own", "own/cpu"])
def test_matches_oracle(pair, causal, dtype, recorded):
    if not torch_attends(dtype):
        return
    calls = [recorded(attention_peers, name) for name in ("forward", "backward")]
    qkv, do = draw(2, 40, 3, 2, 16, dtype=dtype), torch.randn(2, 40, 2, 16).to(dtype)
    with trying("attention", pair):
        check(attention_case(2, 65, 32, 3, "cpu", causal=causal), dtype, "cpu")
        (packed,) = torch.autograd.grad(attention_qkvpacked(qkv, causal=causal), qkv, do)
        apart = torch.autograd.grad(attention(*qkv.unbind(2), causal=causal), qkv, do)[0]
    assert torch.equal(packed, apart)
    assert list(map(bool, calls)) == [pair.startswith("cpu"), pair.endswith("cpu")]


def test_statistics_go_through_both_forms():
    q, k, v, do = (torch.randn(1, 33, 2, 16) for _ in range(4))
    found = []
    for base_2, shape in ((True, (1, 2, 33)), (False, (1, 2, 33, 2))):
        o, stats = attention_peers.forward("cpu", q, k, v, True, 0.25, base_2)
        assert stats.shape == shape
        grads = tuple(map(torch.empty_like, (q, k, v)))
        attention_peers.backward("cpu", do, q, k, v, o, stats, True, 0.25, grads)
        found.append(grads)
        if base_2:
            scores = (q[0, -1, 0] @ k[0, :, 0].T * 0.25).logsumexp(0)
            torch.testing.assert_close(stats[0, 0, -1] * math.log(2), scores)
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_the_hopper_kernels_statistics_are_the_own_ones(monkeypatch):
    """Its backward gets the numbers that its forward wrote: nothing is made of them in between."""
    q, o, lse, got = torch.ones(1, 4, 2, 64), torch.ones(1, 4, 2, 64), torch.randn(1, 2, 4), []
    calls = {"forward": lambda *a: (o, lse), "backward": lambda *a: got.append(a[5])}
    monkeypatch.setitem(PEERS, "hopper", PEERS["hopper"]._replace(**calls))
    found, stats = attention_peers.forward("hopper", q, q, q, True, 0.125, True)
    attention_peers.backward("hopper", q, q, q, q, found, stats, True, 0.125, (q, q, q))
    assert found is o
    assert got[0] is stats is lse


def test_what_a_peer_cannot_serve_is_the_own_kernels(recorded):
    calls = recorded(attention_peers, "forward")
    with trying("attention", "cpu"), trying("attention_masked", "cpu"):
        attention(Q, *[torch.ones(1, 6, 2, 8)] * 2)  # more keys
        attention(Q, Q[:, :, :1], Q[:, :, :1])  # fewer key heads
        attention(*[torch.ones(1, 4, 2, 7)] * 3)
        attention(Q, Q, Q, **DROPOUT)
        attention(*[Q[0]] * 3, cu_seqlens=torch.tensor([0, 4], dtype=torch.int32))
    assert not calls


def test_a_forced_peer_refuses_what_it_cannot_serve_by_name(force, prove, monkeypatch):
    def refuses(name, error, words, *tensors, **settings):
        force(name)
        with pytest.raises(error, match=words):
            attention(*tensors or (Q, Q, Q), **settings)
        force("own")
        attention(Q, Q, Q, **settings)

    words = "would not be the same mask on every layout; unset FAST"
    refuses("cpu", ValueError, words, **DROPOUT)
    words = "would align a causal mask to another key"
    refuses("cpu", ValueError, words, Q[:, :2], Q, Q)
    words = r"FASTPAR_ATTENTION=flash supports, got one that it does not: it needs cuda ten"
    refuses("flash", ValueError, words)
    prove(Proof(OWN, peers=(PeerProof("cpu", "error of dq is 3.00e-01", (0.0, 0.0)),)))
    words = r"got cpu, which failed for attention float32 8: error of dq is 3.00e-01; unset FASTPAR"
    refuses("cpu", RuntimeError, words)
    monkeypatch.setattr(choice, "proofs", {})
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    words = r"FASTPAR_ATTENTION=cpu supports, .* promises no equal bits, as deterministic mode asks"
    refuses("cpu", ValueError, words)


@sweep("name", ["cpu", "own"])
def test_a_forced_name_is_not_ignored_where_torch_s_function_runs(force, name, prove, monkeypatch):
    force(name)
    words = (
        r"expected a call of fastpar's kernels under FASTPAR_ATTENTION=.*, got torch's own "
        r"function for attention\w* float32 8 \(`fastpar info` says why\); unset FASTPAR_ATTENTION"
    )
    prove(Proof(choice.STOCK))
    with pytest.raises(RuntimeError, match=words):
        attention(Q, Q, Q)
    monkeypatch.setattr(choice, "proofs", {})
    monkeypatch.setattr(backend, "choice", "torch")
    for settings in ({}, DROPOUT):
        with pytest.raises(RuntimeError, match=words):
            attention(Q, Q, Q, **settings)
    monkeypatch.setattr(backend, "choice", "auto")


def test_peers_that_are_left_out_are_neither_tried_nor_served(monkeypatch):
    q, k, v = (torch.randn(1, 64, 2, 64) for _ in range(3))
    assert refusal("cpu", q, k, v, causal=True) == ""
    monkeypatch.setattr(attention_peers, "wanted", lambda *_: "cpu")
    assert attention_peers.serving("attention", q, k, v, True, 0) == "cpu"
    monkeypatch.setattr(attention_peers, "left_out", read_left_out("-cpu,-hopper"))
    assert refusal("cpu", q, k, v, causal=True) == "is left out by FASTPAR_PEERS"
    assert attention_peers.serving("attention", q, k, v, True, 0) == ""
    for wrong in ("hopper", "-own", "-cpu,flash"):
        with pytest.raises(ValueError, match=f"each after a minus .* FASTPAR_PEERS={wrong}"):
            read_left_out(wrong)


def test_an_unknown_name_is_refused():
    assert [read_forced(name) for name in ("auto", "own", "flash")] == ["", "own", "flash"]
    with pytest.raises(ValueError, match=r"auto, own or one of hopper, flash, .* got FAST"):
        read_forced("fash")


@pytest.mark.slow
def test_the_proof_says_who_serves(prove, monkeypatch, recorded):
    """Under torch.compile too; not in deterministic mode, and not where a backend is forced."""
    q = torch.randn(1, 16, 2, 8, requires_grad=True)
    prove(Proof(OWN, serves=("cpu", "cpu")))
    eager = torch.autograd.grad(attention(q, q, q).sum(), q)[0]
    compiled = torch.compile(lambda q: attention(q, q, q).sum(), backend="aot_eager")
    assert torch.equal(torch.autograd.grad(compiled(q), q)[0], eager)
    calls = recorded(attention_peers, "forward")
    monkeypatch.setattr(attention_peers, "backward", None)  # the own one runs
    prove(Proof(OWN, own_ms=(1.0, 1.0), serves=("cpu", "own")))
    attention(q, q, q).sum().backward()
    assert [name for name, *_ in calls] == ["cpu"]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        attention(q, q, q)
    prove(Proof(OWN, serves=("cpu", "cpu")))
    monkeypatch.setattr(backend, "choice", "cpp")
    attention(q, q, q).sum().backward()
    assert len(calls) == 1


ON_GPUS = [name for name, peer in PEERS.items() if peer.device == "cuda"]


@sweep("name", [name for name in ON_GPUS if name != "hopper"])
def test_calls_for_a_gpu_fit_torchs_functions(name):
    """Arguments and shapes of CUDA's kernels, forward and backward, on tensors without memory."""
    q, k, v, do = (torch.empty(2, 40, 3, 64, dtype=torch.bfloat16, device="meta") for _ in range(4))
    o, stats = attention_peers.forward(name, q, k, v, True, 0.125, True)
    assert (o.shape, stats.shape, o.is_contiguous()) == (q.shape, (2, 3, 40), True)
    lse = attention_peers.to_natural(stats, q)
    grads = PEERS[name].backward(do, q, k, v, o, lse, True, 0.125)
    assert [g.shape for g in grads] == [q.shape] * 3


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPUS)
@pytest.mark.parametrize("D", [64, 128])
def test_on_a_gpu(name, D):
    q = draw(2, 192, 3, D, dtype=torch.bfloat16, device="cuda")
    why = refusal(name, q, q, q, True)
    if why:
        pytest.skip(why)
    for pair in (f"{name}/own", name, f"own/{name}"):
        with trying("attention", pair):
            check(attention_case(2, 192, D, 3, "cuda"), torch.bfloat16, "cuda")


def test_who_may_serve():
    for dtype, able in ((torch.float32, ["cpu"]), (torch.float64, [])):
        q = Q.to(dtype)
        assert [name for name in PEERS if not refusal(name, q, q, q, True)] == able
    for name in ON_GPUS:
        assert refusal(name, Q, Q, Q, True) == "needs cuda tensors, not cpu"
    here = torch.cuda.is_available()
    assert any("no GPU here" in line for line in attention_peers.table()) != here
