"""gelu_mlp: the same as its three ops, and by cublasLt's epilogues on a cublasLt for CPU tensors;
linear's bias gradient by one of them.

tests/support/fake_cublaslt.cpp stands for the library, with the numbers and rules of its manual: so
csrc/linear_lt.cpp is what runs, descriptors, transposes and leading dimensions included.
"""

import contextlib
import ctypes
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cells import sweep

from fastpar.config.config import GPTConfig
from fastpar.doctor import doctor, trial
from fastpar.kernels import _C, backend, bias_gelu, choice, gelu_mlp, linear
from fastpar.kernels.choice import OWN, STOCK, Case
from fastpar.kernels.gelu_mlp import _gelu_mlp, _gelu_mlp_bwd
from fastpar.kernels.linear import GELU_AUX_BIAS
from fastpar.kernels.reference import gelu_mlp_ref, linear_ref
from fastpar.kernels.weight_gradients import WeightGradients
from fastpar.models.gpt import GPT
from fastpar.testing import assert_matches_oracle

ROOT = Path(__file__).parents[2]
HALF = Case("cpu", "gelu_mlp", torch.bfloat16, 16)


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """Path of the cublasLt for CPU tensors."""
    path = tmp_path_factory.mktemp("lt") / "libcublasLt.so"
    source = ROOT / "tests" / "support" / "fake_cublaslt.cpp"
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", f"-I{ROOT / 'csrc'}"]
    subprocess.run(["c++", *flags, str(source), "-o", str(path)], check=True)
    return path


@pytest.fixture
def lt(library, monkeypatch):
    """The library, open, for CPU tensors."""
    assert _C.open_lt(str(library)) == ""
    module = sys.modules["fastpar.kernels.linear"]  # the function hides it
    monkeypatch.setattr(module, "why_no_epilogues", lambda: "")
    monkeypatch.setattr(backend, "cuda_on_cpu", True)
    monkeypatch.setattr(choice, "proofs", {})
    fake = ctypes.CDLL(str(library))
    yield fake
    fake.fake_fault(0)


def make(shape, hidden, out, dtype, bias2=True):
    C = shape[-1]
    sizes = [shape, (hidden, C), (hidden,), (out, hidden), (out,)]
    inputs = [torch.randn(size).to(dtype) for size in sizes[: 5 if bias2 else 4]]
    return [x.requires_grad_() for x in inputs]


def eager(x, weight1, bias1, weight2, bias2=None):
    return F.linear(F.gelu(F.linear(x, weight1, bias1), approximate="tanh"), weight2, bias2)


def gradients(inputs):
    y = gelu_mlp(*inputs)
    return y, *torch.autograd.grad(y.sum(), inputs)


@sweep("dtype", [torch.float32, torch.bfloat16])
def test_without_epilogues_it_is_its_three_ops_bit_for_bit(dtype):
    inputs = make((5, 7, 24), 40, 16, dtype)
    assert_matches_oracle(gelu_mlp, gelu_mlp_ref, inputs, eager=eager)
    x, weight1, bias1, weight2, bias2 = inputs
    want = linear(bias_gelu(linear(x, weight1), bias1), weight2, bias2)
    assert torch.equal(gelu_mlp(*inputs), want)


@pytest.mark.usefixtures("poisoned")
@sweep("dtype", [torch.bfloat16, torch.float16])
@sweep(
    ("shape", "hidden", "out"),
    [((33, 16), 64, 16), ((1, 8), 8, 8), ((2, 5, 24), 40, 16), ((130, 8), 136, 40)],
)
def test_epilogues_match_the_oracle(lt, shape, hidden, out, dtype):
    inputs = make(shape, hidden, out, dtype)
    before = lt.fake_calls()
    assert_matches_oracle(gelu_mlp, gelu_mlp_ref, inputs, eager=eager)
    assert lt.fake_calls() == before + 3  # h and u; du and dbias1; dweight2 and dbias2
    assert_matches_oracle(gelu_mlp, gelu_mlp_ref, inputs[:4], eager=eager)
    assert lt.fake_calls() == before + 5


@sweep("bias2", [True, False])
def test_weights_that_wait_get_the_same_gradients(lt, bias2):
    """See weight_gradients.py."""
    inputs = make((2, 5, 24), 40, 16, torch.bfloat16, bias2)
    y, *want = gradients(inputs)
    queue = WeightGradients(set(inputs))
    before = lt.fake_calls()
    with queue.collect():
        again = gelu_mlp(*inputs)
    again.sum().backward()
    assert lt.fake_calls() == before + 2  # not yet the product with dweight2 and dbias2
    waiting = [1, 3, 4] if bias2 else [1, 3]
    assert [x.grad is None for x in inputs] == [i in waiting for i in range(len(inputs))]
    for p, compute in queue.take():
        p.grad = compute(None)
    assert torch.equal(again, y)
    assert all(map(torch.equal, (x.grad for x in inputs), want))


def test_a_gradient_at_an_odd_address_is_served_by_torch(lt):
    def move(dy):
        return torch.cat([dy.new_empty(1), dy.flatten()])[1:].view_as(dy)

    def moved(*inputs):
        y = gelu_mlp(*inputs)
        if y.requires_grad:
            y.register_hook(move)
        return y

    before = lt.fake_calls()
    with pytest.warns(UserWarning, match="cublasLt: expected an algorithm"):
        assert_matches_oracle(
            moved, gelu_mlp_ref, make((12, 8), 16, 8, torch.bfloat16), eager=eager
        )
    assert lt.fake_calls() == before + 1  # the forward's


def test_a_product_without_an_algorithm_is_computed_by_torch(lt):
    """A size that the proof did not meet: what the library refuses costs time, not the run."""
    inputs = make((12, 8), 16, 8, torch.bfloat16)
    lt.fake_fault(2)
    with pytest.warns(UserWarning, match="cublasLt: expected an algorithm .*computed by torch"):
        assert_matches_oracle(gelu_mlp, gelu_mlp_ref, inputs, eager=eager)


@sweep("fault", [0, 2])
def test_what_the_library_answered_is_asked_once(lt, fault):
    """A refusal too: asking takes longer than the product's launch."""
    lt.fake_fault(fault)
    a, b, out, aux = (torch.zeros(16, 16, dtype=torch.bfloat16) for _ in range(4))
    before = lt.fake_asked()
    for _ in range(3):
        with contextlib.suppress(RuntimeError):
            _C.matmul_lt(a, b, out, aux[0], aux, GELU_AUX_BIAS, 0, torch.empty(0), 0)
    assert lt.fake_asked() == before + 1


def test_products_of_a_stream_share_one_workspace(lt, monkeypatch):
    module, seen = sys.modules["fastpar.kernels.linear"], []

    class Spy:
        def matmul_lt(self, *arguments):
            seen.append(arguments[-2].data_ptr())
            _C.matmul_lt(*arguments)

    monkeypatch.setattr(module, "_C", Spy())
    kept = [gradients(make((12, 8), 16, 8, torch.bfloat16)) for _ in range(2)]
    assert len(seen) == 3 * len(kept)
    assert len(set(seen)) == 1
    monkeypatch.setattr(backend, "cuda_stream", lambda x: 7)
    gradients(make((12, 8), 16, 8, torch.bfloat16))
    assert seen[-1] != seen[0]
    assert lt.fake_calls()


def test_deterministic_algorithms_go_by_the_three_ops(lt):
    inputs, before = make((12, 8), 16, 8, torch.bfloat16), lt.fake_calls()
    torch.use_deterministic_algorithms(True)
    try:
        gradients(inputs)
    finally:
        torch.use_deterministic_algorithms(False)
    assert lt.fake_calls() == before


def test_only_what_is_needed_is_computed(lt):
    inputs = make((9, 8), 16, 8, torch.bfloat16)
    want = gradients(inputs)
    for i in range(5):
        few = [x.detach().requires_grad_(i == j) for j, x in enumerate(inputs)]
        y = gelu_mlp(*few)
        (grad,) = torch.autograd.grad(y.sum(), few[i])
        assert torch.equal(grad, want[1 + i])
    assert lt.fake_calls()


def test_same_bits_twice_and_for_strided_gradients(lt):
    inputs = make((12, 8), 16, 8, torch.bfloat16)
    assert all(map(torch.equal, gradients(inputs), gradients(inputs)))
    y = gelu_mlp(*inputs)
    dy = torch.randn(8, 12).bfloat16().t()
    first = torch.autograd.grad(y, inputs, dy, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(y, inputs, dy.contiguous())))


def test_what_epilogues_cannot_serve_goes_by_the_three_ops(lt, monkeypatch):
    before = lt.fake_calls()
    monkeypatch.setattr(sys.modules["fastpar.kernels.linear"], "_is_fused", lambda *t: False)
    bf16 = torch.bfloat16
    x, *rest = make((8, 8), 16, 8, bf16)
    for inputs in (
        make((8, 8), 16, 8, torch.float32),
        make((8, 7), 16, 8, bf16),
        make((8, 8), 15, 8, bf16),
        make((0, 8), 16, 8, bf16),
        [torch.randn(8, 16).bfloat16()[:, ::2].requires_grad_(), *rest],
        make((8, 8), 16, 7, bf16),
        make((8, 8), 16, 7, bf16, bias2=False),
        [torch.randn(65).bfloat16()[1:].view(8, 8).requires_grad_(), *rest],  # at an odd address
    ):
        gradients(inputs)
    with torch.autocast("cpu", bf16):
        gradients(make((8, 8), 16, 8, torch.float32))
    gelu_mlp(x, rest[0], None, rest[2])
    torch.func.vmap(lambda row: gelu_mlp(row, *rest))(x)
    torch.compile(gelu_mlp, backend="eager", fullgraph=True)(x, *rest)
    monkeypatch.setattr(backend, "choice", "torch")
    gelu_mlp(x, *rest)
    assert lt.fake_calls() == before


@pytest.mark.usefixtures("lt")
def test_schemas_and_shapes():
    """What torch.library asks of the ops: fake tensors, autograd, traced with dynamic shapes."""
    inputs = make((6, 8), 16, 8, torch.bfloat16)
    torch.library.opcheck(_gelu_mlp.overload, inputs, test_utils=("test_schema", "test_faketensor"))
    with torch.no_grad():
        y, h, u = _gelu_mlp(*inputs)
    x, weight1, _, weight2, _ = (t.detach() for t in inputs)
    for need in ([True] * 5, [False] * 5, [False, True, False, True, False]):
        args = (torch.ones_like(y).detach(), x, weight1, weight2, h.detach(), u.detach(), need)
        torch.library.opcheck(_gelu_mlp_bwd.overload, args, test_utils="test_schema")
        torch.library.opcheck(_gelu_mlp_bwd.overload, args, test_utils="test_faketensor")


def test_shapes_that_do_not_fit_are_refused(lt):
    x, weight1, bias1, weight2, bias2 = make((8, 8), 16, 8, torch.bfloat16)
    with pytest.raises(ValueError, match=r"linear: expected x .* and weight"):
        gelu_mlp(x, weight1[:, :7], bias1, weight2, bias2)
    with pytest.raises(ValueError, match="bias_gelu: expected bias of shape"):
        gelu_mlp(x, weight1, bias1[:8], weight2, bias2)
    with pytest.raises(ValueError, match=r"linear: expected bias .* with weight"):
        gelu_mlp(x, weight1, bias1, weight2, bias1)
    assert lt.fake_calls() >= 0


@pytest.mark.usefixtures("lt")
def test_a_second_derivative_is_refused():
    inputs = make((8, 8), 16, 8, torch.bfloat16)
    with pytest.raises(RuntimeError, match="gelu_mlp: expected one backward, got create_graph"):
        torch.autograd.grad(gelu_mlp(*inputs).sum(), inputs, create_graph=True)


def test_a_gpts_mlps_go_by_epilogues(lt):
    torch.manual_seed(1)
    config = GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=64)
    model, idx = GPT(config).bfloat16(), torch.randint(64, (2, 8))
    before = lt.fake_calls()
    loss = model(idx, idx)
    (loss[-1] if isinstance(loss, tuple) else loss).backward()
    assert lt.fake_calls() == before + 2 * (3 + 1)  # the last for c_attn's bias


@pytest.mark.usefixtures("poisoned")
@sweep("dtype", [torch.bfloat16, torch.float16])
@sweep(("shape", "out"), [((33, 16), 64), ((1, 8), 8), ((2, 5, 24), 40)])
def test_a_linear_layers_bias_gradient_comes_with_its_weights(lt, shape, out, dtype):
    inputs = make(shape, out, 8, dtype)[:3]
    before = lt.fake_calls()
    assert_matches_oracle(linear, linear_ref, inputs, eager=F.linear)
    assert lt.fake_calls() == before + 1
    x, weight, bias = inputs
    y = linear(x, weight, bias)
    assert torch.equal(y, F.linear(x, weight, bias))
    dy = torch.randn(*reversed(y.shape)).to(dtype).permute(*reversed(range(y.dim())))
    grads = torch.autograd.grad(y, inputs[1:], dy, retain_graph=True)
    assert all(map(torch.equal, grads, torch.autograd.grad(y, inputs[1:], dy.contiguous())))


def test_linear_layers_that_go_without_the_epilogue(lt):
    x, weight, bias, *_ = make((16, 8), 24, 8, torch.bfloat16)
    before = lt.fake_calls()
    for some in ((x, weight), (x, weight.detach(), bias), (x, weight, bias.detach())):
        linear(*some).sum().backward()
    torch.autograd.grad(linear(x, weight, bias).sum(), x, create_graph=True)
    queue = WeightGradients({weight})
    with queue.collect():
        linear(x, weight, bias).sum().backward()
    assert [p for p, _ in queue.take()] == [weight]
    with torch.no_grad():
        linear(x, weight, bias)
    with torch.autocast("cpu", torch.bfloat16):
        linear(x, weight, bias).sum().backward()
    assert lt.fake_calls() == before


# The proof


@pytest.mark.parametrize("op", ["gelu_mlp", "linear"])
@pytest.mark.parametrize(("own_ms", "chosen"), [(2.0, STOCK), (0.5, OWN)])
def test_a_right_library_is_proven(lt, monkeypatch, op, own_ms, chosen):
    """It is right; the times, which are given here, choose."""
    times = {OWN: (own_ms, own_ms), "instead": (1.0, 1.0), "stock": (1.0, 1.0)}
    monkeypatch.setattr(trial, "_times", lambda *_: times)
    before = lt.fake_calls()
    proof = trial.prove(HALF._replace(op=op), rows=64)
    assert proof.wrong == ""
    assert lt.fake_calls() > before
    assert (proof.chosen, proof.own_ms) == (chosen, times[OWN])


@pytest.mark.parametrize(
    ("fault", "why"),
    [(1, "error of y is .* was allowed"), (2, "cublasLt: expected an algorithm .* got status=15")],
)
def test_a_wrong_library_is_refused_with_its_numbers_and_never_runs(lt, monkeypatch, fault, why):
    lt.fake_fault(fault)
    monkeypatch.setattr(doctor, "_prover", doctor.Prover())
    proof = trial.prove(HALF, rows=64)
    assert proof.chosen == STOCK
    assert re.search(why, proof.wrong)
    monkeypatch.setitem(choice.proofs, HALF, proof)
    before = lt.fake_calls()
    gelu_mlp(*make((8, 16), 64, 16, torch.bfloat16))
    assert lt.fake_calls() == before


def test_another_ops_trial_does_not_use_what_is_not_proven(lt):
    before = lt.fake_calls()
    inputs = make((8, 8), 16, 8, torch.bfloat16)
    with choice.trying("bias_gelu", OWN):
        gelu_mlp(*inputs)
    assert lt.fake_calls() == before
    with choice.trying("gelu_mlp", OWN):
        gelu_mlp(*inputs)
    assert lt.fake_calls() == before + 1


def test_without_cublaslt_nothing_is_asked_for(library, tmp_path):
    assert "nowhere.so" in _C.open_lt(str(tmp_path / "nowhere.so"))
    assert _C.open_lt("libc.so.6") == "libc.so.6 lacks functions of cublasLt"
    cases = doctor.cases_of_model("cuda", torch.bfloat16, GPTConfig.preset("gpt2"))
    if torch.version.cuda is None:
        assert "gelu_mlp" not in {case.op for case in cases}


def test_numbers_are_those_of_the_header(tmp_path):
    """Where a CUDA toolkit or torch's wheels of it have the header."""
    places = [Path("/usr/local/cuda/include"), *Path(torch.__file__).parents[1].glob("nvidia/*/*")]
    folders = [p for p in places if (p / "cublasLt.h").exists()]
    if not folders:
        pytest.skip("needs cublasLt.h")
    pairs = {
        "CUBLASLT_EPILOGUE_GELU_AUX_BIAS": 164, "CUBLASLT_EPILOGUE_DGELU_BGRAD": 208,
        "CUBLASLT_EPILOGUE_BGRADB": 512, "CUBLAS_COMPUTE_32F": 68, "CUDA_R_16BF": 14,
        "CUDA_R_16F": 2, "CUDA_R_32F": 0, "CUBLASLT_MATMUL_DESC_TRANSA": 3,
        "CUBLASLT_MATMUL_DESC_TRANSB": 4, "CUBLASLT_MATMUL_DESC_EPILOGUE": 7,
        "CUBLASLT_MATMUL_DESC_BIAS_POINTER": 8, "CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER": 11,
        "CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD": 12, "CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES": 1,
        "CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK": 3,
        "CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES": 5,
        "CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE": 2, "sizeof(cublasLtMatmulHeuristicResult_t)": 96,
    }  # fmt: skip
    lines = ["#include <cublasLt.h>"]
    lines += [f'static_assert({name} == {n}, "{name}");' for name, n in pairs.items()]
    source = tmp_path / "numbers.cpp"
    source.write_text("\n".join(lines) + "\n")
    include = [f"-I{folder}" for folder in {*folders, *(p for p in places if p.is_dir())}]
    run = ["c++", "-std=c++17", "-fsyntax-only", *include, str(source)]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
