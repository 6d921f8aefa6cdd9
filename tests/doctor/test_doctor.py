"""Proof on first use: what is wrong or slower does not run, whoever asks and however it ends."""

import gc
import itertools
import json
import math
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from nanogpt_cells import ARGS, NanoGPT
from torch._subclasses import FakeTensorMode
from torch.distributed import HashStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from train_runs import FEW, Runs, bits, in_folder, make_text, steps

import fastpar
from fastpar.doctor import doctor, report, sources, trial
from fastpar.doctor import table as table_module
from fastpar.doctor.report import DoctorCommand
from fastpar.doctor.table import ProofTable
from fastpar.kernels import backend, bias_gelu, choice
from fastpar.kernels.choice import OWN, STOCK, Case, Proof
from fastpar.settings.model import GPTConfig

GELU = Case("cpu", "bias_gelu", torch.float32, 96)
activations = sys.modules["fastpar.kernels.activation"]  # the package's name is the function


def table_with(proofs):
    table = ProofTable("cpu")
    table.proofs = dict(proofs)
    table.save()
    return table


@pytest.fixture
def quick(monkeypatch):
    """One op, and little time for it."""
    monkeypatch.setattr(trial, "SECONDS", 0.02)
    monkeypatch.setattr(report, "cases_of_model", lambda *args, **sizes: [GELU])


def refuse(*args):
    pytest.fail("tried")


def break_gelu(monkeypatch, fault):
    own = activations._activation
    monkeypatch.setattr(activations, "_activation", lambda *args: fault(own(*args)))


def run_doctor(**options):
    lines = []
    status = report.doctor(DoctorCommand(**{"device": "cpu", **options}), lines.append)
    return status, "\n".join(lines)


def test_a_right_kernel_is_proven_and_the_table_is_kept(quick, no_proofs, tmp_path):
    status, printed = run_doctor(json=str(tmp_path / "doctor.json"))
    assert status == 0
    assert "bias_gelu float32 96" in printed
    (kept,) = no_proofs.glob("*.json")
    assert str(kept) in printed
    attached = json.loads((tmp_path / "doctor.json").read_text())
    as_kept = json.loads(kept.read_text())
    assert attached == {name: as_kept[name] for name in ("version", "about", "proofs")}
    (row,) = attached["proofs"]
    assert row["op"] == "bias_gelu"
    assert min(*row["own_ms"], *row["instead_ms"], *row["stock_ms"]) > 0
    assert ProofTable("cpu").proofs == choice.proofs  # as another process reads it


def flipping():
    calls = itertools.count(1)
    return lambda y: torch.nextafter(y, y + 1) if next(calls) % 2 else y


def raising(error, above=0):
    """Raises where there are more rows."""

    def fault(y):
        if len(y) > above:
            raise error
        return y

    return fault


LOST = "an illegal memory access was encountered"
# what its results go through, what is said
BROKEN = {
    "wrong": (lambda: lambda y: y * 1.001, "error of y is"),
    "changing": (flipping, "differs between two calls"),
    "raising": (lambda: raising(RuntimeError(f"{LOST}\nmore")), f"RuntimeError: {LOST}"),
    "raising without a word": (lambda: raising(AssertionError()), "AssertionError: no message"),
    "raising at the timed size": (
        lambda: raising(RuntimeError("out of resource"), above=100),
        "at tanh N=512 F=96: RuntimeError: out of resource",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_kernel_is_named_and_does_not_run(case, quick, monkeypatch, capsys):
    fault, words = BROKEN[case]
    break_gelu(monkeypatch, fault())
    status, printed = run_doctor()
    assert (status, choice.proofs[GELU].chosen) == (1, STOCK)
    assert "torch: fastpar's is WRONG" in printed
    assert "WRONG  bias_gelu float32 96: at " in printed
    assert words in printed
    assert words in capsys.readouterr().err
    x = torch.randn(5, 96)
    assert torch.equal(bias_gelu(x), F.gelu(x, approximate="tanh"))
    monkeypatch.setattr(backend, "choice", "cpp")
    with pytest.raises(RuntimeError, match=f"failed for bias_gelu float32 96: at .*{words[-20:]}"):
        bias_gelu(x)


def test_a_slow_kernel_is_not_chosen_but_may_be_forced(quick, monkeypatch):
    break_gelu(monkeypatch, lambda y: time.sleep(0.05) or y)
    assert run_doctor()[0] == 0
    assert choice.proofs[GELU][:2] == (STOCK, "")
    x, used = torch.randn(5, 96), []
    monkeypatch.setattr(activations, "_activation", lambda x, *args: used.append(1) or x)
    bias_gelu(x)
    assert not used
    monkeypatch.setattr(backend, "choice", "cpp")
    bias_gelu(x)
    assert used


def test_a_lost_gpu_bars_the_kernel_that_lost_it_and_ends_the_process(monkeypatch):
    """Each later call of CUDA raises the same error, whichever kernel makes it."""
    cases = [GELU._replace(device="cuda", size=n) for n in (96, 64)]

    lost = mock.Mock(side_effect=torch.AcceleratorError(f"CUDA error: {LOST}"))
    measure = mock.Mock(side_effect=lost.side_effect)
    monkeypatch.setattr(trial.OpCase, "measure", measure)
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    prover = doctor.Prover()
    start = ProofTable.__init__  # with the CPU's file
    monkeypatch.setattr(ProofTable, "__init__", lambda table, device: start(table, "cpu"))
    with pytest.raises(SystemExit, match=r"float32 96 by own at .* illegal .* restart"):
        [prover.proof_of(case) for case in cases]
    assert measure.call_count == 1
    (kept,) = ProofTable("cpu").proofs.items()
    assert kept[0].size == 96
    assert "illegal memory access" in kept[1].wrong


def test_an_error_that_leaves_the_gpu_alone_is_of_one_kernel(monkeypatch):
    too_large = RuntimeError("CUDA error: too many resources requested for launch")
    monkeypatch.setattr(trial.OpCase, "measure", mock.Mock(side_effect=too_large))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    found = trial.proof_cases("bias_gelu", 96, "cpu", 64)
    case = Case("cuda", "bias_gelu", torch.bfloat16, 96)
    assert "too many resources" in trial.what_is_wrong(case, found)
    other = trial.DeviceLost(case, "own/flash", "at T=64: CUDA error").proof
    assert (other.chosen, other.wrong, [peer.name for peer in other.peers]) == (OWN, "", ["flash"])


def test_what_is_much_slower_or_has_no_memory_is_not_timed_for_long(quick, monkeypatch):
    found, calls = trial.proof_cases("bias_gelu", 96, "cpu", 64)[:2], []

    def no_memory(x, bias):
        if len(x) > 100:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return F.gelu(x + bias, approximate="tanh")

    def slow(x, bias):
        calls.append(time.sleep(0.05))
        return F.gelu(x + bias, approximate="tanh")

    for case in found:
        monkeypatch.setattr(case, "eager", slow)
    monkeypatch.setattr(trial, "proof_cases", lambda *args: found)
    assert trial.prove(GELU).stock_ms[0] > 50
    assert len(calls) == 1 + 1 + 2  # right, for backward, timed
    monkeypatch.setattr(found[0], "eager", no_memory)
    monkeypatch.setattr(found[0], "make", lambda draw: {"x": draw(512, 96), "bias": draw(96)})
    proof = trial.prove(GELU)
    assert (proof.chosen, proof.stock_ms) == (OWN, (0.0, 0.0))
    assert min(*proof.own_ms, *proof.instead_ms) > 0


def test_no_memory_says_nothing_about_a_kernel_and_is_not_kept(quick, monkeypatch, capsys):
    break_gelu(monkeypatch, raising(torch.OutOfMemoryError("CUDA out of memory")))
    proof = doctor.Prover().proof_of(GELU)
    assert proof == Proof(STOCK)
    assert "out of memory during the trial" in capsys.readouterr().err
    assert ProofTable("cpu").proofs == {}


def test_a_timed_call_is_never_larger_than_memory_allows(monkeypatch):
    asked = []
    monkeypatch.setattr(trial, "proof_cases", lambda *about: asked.append(about[-1]) or [])
    trial.prove(Case("cuda", "cross_entropy", torch.bfloat16, 50304), rows=1 << 15)
    assert asked == [trial.MOST_ELEMENTS["cuda"] // 50304]


def test_known_proofs_are_not_made_again_unless_asked_for(quick, monkeypatch):
    run_doctor()
    monkeypatch.setattr(doctor, "prove", refuse)
    run_doctor()
    monkeypatch.setattr(doctor, "_prover", doctor.Prover())  # as another process
    run_doctor()
    assert doctor.known_proof(GELU) == choice.proofs[GELU]
    assert doctor.known_proof(GELU._replace(size=7)) is None
    monkeypatch.setattr(doctor, "prove", lambda *args: Proof(STOCK, "now wrong"))
    assert run_doctor(again=True)[0] == 1


@pytest.mark.slow
def test_torch_compile_is_timed_where_it_is_asked_for(quick):
    status, printed = run_doctor()
    assert "under torch.compile" not in printed
    status, printed = run_doctor(compile=True)
    assert status == 0
    assert "PyTorch's functions under torch.compile: " in printed
    assert min(choice.proofs[GELU].compiled_ms) > 0
    assert ProofTable("cpu").proofs == choice.proofs


@pytest.mark.parametrize(("times", "runs"), [((1.0, 1.5), STOCK), ((2.0, 2.5), OWN), ((0, 0), OWN)])
def test_a_compiled_run_gives_the_compiler_what_it_makes_faster(quick, monkeypatch, times, runs):
    config = GPTConfig.preset("gpt2")
    case = choice.Case("cpu", "bias_gelu", torch.float32, 4 * config.n_embd)
    proof = Proof(OWN, "", (2.0, 2.0), (3.0, 3.0), (3.0, 3.0), times)
    table = doctor.table_of("cpu")
    table.proofs[case] = proof
    doctor.prove_before_training("cpu", torch.float32, config)
    assert choice.proofs[case].chosen == OWN  # eager PyTorch is slower
    doctor.prove_before_training("cpu", torch.float32, config, compiled=True)
    assert choice.proofs[case].chosen == runs
    assert table.proofs[case] == proof  # other runs go by the times of eager PyTorch


def test_a_compiled_run_proves_again_what_has_no_time_under_torch_compile(quick, monkeypatch):
    asked, slow = [], (2.0, 2.0)

    def prove(case, rows, compiled):
        asked.append((case.op, compiled))
        return Proof(OWN, "", slow, slow, slow, (1.0, 1.0) if compiled else (0, 0))

    monkeypatch.setattr(doctor, "prove", prove)
    for compiled in (False, True, True):
        doctor.adopt([GELU, GELU._replace(op="global_norm", size=0)], compiled=compiled)
    assert asked == [("bias_gelu", False), ("global_norm", False), ("bias_gelu", True)]


def test_an_unwritable_folder_is_reported_once_and_the_proofs_count(quick, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FASTPAR_PROOFS", str(tmp_path / "file" / "below"))
    with pytest.warns(UserWarning, match="could not be saved .* FASTPAR_PROOFS") as warned:
        assert run_doctor()[0] == 0
    assert len(warned) == 1
    assert choice.proofs[GELU]


def ended_during_the_trial_of(case):
    """What another process left open."""
    table = ProofTable("cpu")
    with table.locked():
        left = table.trial(case)
        left.__enter__()
    return left


# Before its result, a process that makes the trial again does this.
ENDS = {
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "crashed": "ctypes.string_at(0)",
    "right": "None",
}
AGAIN = """
import ctypes, os, signal
from fastpar.doctor import trial
from fastpar.kernels.choice import OWN, Proof
trial.prove = lambda *args: ({what}, Proof(OWN, "", (1.0, 2.0)))[1]
trial.main()
"""


@pytest.mark.parametrize("how", ENDS)
def test_only_a_crash_in_a_trial_made_again_bars_a_kernel(monkeypatch, capsys, no_proofs, how):
    """Time limits and lack of memory end the processes of right kernels, any number of times."""
    left = [ended_during_the_trial_of(GELU) for _ in range(3)]
    command = [sys.executable, "-c", AGAIN.format(what=ENDS[how])]
    monkeypatch.setattr(trial, "call_command", lambda function: command)
    monkeypatch.setattr(doctor, "prove", refuse)  # it might end this process, too
    found = doctor.Prover().proof_of(GELU)
    kept, said = ProofTable("cpu").proofs, capsys.readouterr().err
    if how == "right":
        assert kept == {GELU: Proof(OWN, "", (1.0, 2.0))}
    elif how == "killed":
        assert (found, kept) == (Proof(STOCK), {})
        assert "ended with status -9; this process runs stock PyTorch" in said
    else:
        assert kept == {GELU: Proof(STOCK, "the process of its trial ended by SIGSEGV")}
        assert "is WRONG" in said
        monkeypatch.setattr(doctor, "_prover", doctor.Prover())
        assert "WRONG: the process of its trial ended by" in "\n".join(report.known_choices())
    assert json.loads(next(no_proofs.glob("*.json")).read_text())["tried"] == []
    monkeypatch.setattr(doctor, "prove", lambda *args: Proof(OWN))  # `doctor --again`
    assert doctor.Prover().proof_of(GELU, again=True) == Proof(OWN)
    assert ProofTable("cpu").proofs == {GELU: Proof(OWN)}
    del left


def test_an_interrupted_trial_leaves_nothing_behind(monkeypatch):
    monkeypatch.setattr(doctor, "prove", mock.Mock(side_effect=KeyboardInterrupt))
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            doctor.Prover().proof_of(GELU)
    monkeypatch.setattr(doctor, "prove", lambda *args: Proof(OWN))
    assert doctor.Prover().proof_of(GELU) == Proof(OWN)


@pytest.fixture
def real(monkeypatch):
    """ON_GPU counts as a tensor with memory."""
    monkeypatch.setattr(choice, "is_real", lambda x: True)


ON_GPU = SimpleNamespace(  # as much of a CUDA tensor as a choice looks at
    is_cuda=True,
    device=torch.device("cuda", 0),
    dtype=torch.bfloat16,
    shape=(4, 768),
    dim=lambda: 2,
    numel=lambda: 4 * 768,
)


def test_a_gpu_class_is_proven_at_its_first_call_only(monkeypatch, real):
    """Nothing is tried while a graph is captured."""
    first_use = mock.Mock(side_effect=lambda case, x: Proof(STOCK if "gelu" in case.op else OWN))
    monkeypatch.setattr(doctor, "prove_first_use", refuse)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not choice.may_run("layer_norm", ON_GPU)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(doctor, "prove_first_use", first_use)
    assert [choice.may_run("layer_norm", ON_GPU) for _ in range(3)] == [True] * 3
    assert [choice.may_run("bias_gelu", ON_GPU) for _ in range(3)] == [False] * 3
    assert [call.args[0].op for call in first_use.mock_calls] == ["layer_norm", "bias_gelu"]
    assert choice.may_run("layer_norm", torch.ones(4, 768))  # a CPU's is never proven by itself
    assert choice.case_of("norm_bins", torch.ones(3)).op == "global_norm"  # parts go by their op
    assert choice.case_of("adamw_step_", torch.ones(3)).size == 0
    monkeypatch.setattr(doctor, "prove_first_use", refuse)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert choice.may_run("layer_norm", ON_GPU)  # it is known


def test_nothing_is_tried_while_torch_compile_traces(monkeypatch):
    monkeypatch.setattr(doctor, "prove_first_use", refuse)
    with FakeTensorMode():
        assert choice.may_run("layer_norm", torch.empty(4, 768, device="cuda"))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert choice.may_run("layer_norm", ON_GPU)


def test_a_forced_kernel_that_failed_in_another_process_is_refused(monkeypatch, real):
    gelu = Case("cuda", "bias_gelu", torch.bfloat16, 768)
    monkeypatch.setattr(doctor, "known_proof", {gelu: Proof(STOCK, "error is 7")}.get)
    monkeypatch.setattr(doctor, "prove_first_use", refuse)
    monkeypatch.setattr(backend, "choice", "triton")
    monkeypatch.setattr(backend, "check_gpu", lambda *args: None)
    with pytest.raises(RuntimeError, match="failed for bias_gelu bfloat16 768: error is 7"):
        backend.use_triton("bias_gelu", ON_GPU)
    assert backend.use_triton("layer_norm", ON_GPU)  # nothing is known of it


@pytest.mark.parametrize("name", ["torch", "cpp", "triton"])
def test_a_forced_implementation_leaves_no_proof_of_another(quick, monkeypatch, no_proofs, name):
    monkeypatch.setattr(backend, "choice", name)
    monkeypatch.setattr(doctor, "prove", refuse)
    with pytest.raises(ValueError, match=f"can run, got FASTPAR_BACKEND={name}; unset"):
        run_doctor()
    doctor.prove_before_training("cpu", torch.bfloat16, GPTConfig())
    assert not list(no_proofs.glob("*.json"))


def test_an_old_gpu_is_refused_by_name_before_a_kernel_is_tried(monkeypatch):
    monkeypatch.setattr(backend, "_able_gpus", set())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *args: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (7, 5))
    monkeypatch.setattr(doctor, "prove", refuse)
    monkeypatch.setattr(table_module, "_driver", lambda: "570")
    message = r"fastpar: expected a GPU of compute capability 8.0 or newer .* Tesla T4 of 7.5"
    with pytest.raises(RuntimeError, match=message):
        doctor.prove_before_training("cuda", torch.bfloat16, GPTConfig())
    with pytest.raises(RuntimeError, match=message):
        run_doctor(device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"expected a GPU with --device cuda.*use --device cpu"):
        run_doctor(device="cuda")


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("gpt2", {"residual_layer_norm": 768, "bias_gelu": 3072, "attention": 64}),
        ("nanochat-d12", {"residual_rms_norm": 768, "relu2": 3072, "rope": 128}),
        ("qwen3-0.6b", {"rms_norm": 1024, "swiglu": 6144, "rope": 128, "attention_masked": 128}),
    ],
)
def test_the_cases_of_a_model_are_its_blocks(name, sizes):
    found = doctor.cases_of_model("cpu", torch.float32, GPTConfig.preset(name))
    assert sizes.items() <= {case.op: case.size for case in found}.items()


SIZES = {name: value for name, value in ARGS.items() if name != "dropout"}


def test_the_first_call_of_a_patched_model_has_all_of_it_proven_at_once(monkeypatch, real):
    fastpar.patch(NanoGPT(**SIZES))
    C = ARGS["n_embd"]
    expected = {
        ("embedding", C), ("layer_norm", C), ("residual_layer_norm", C), ("bias_gelu", 4 * C),
        ("attention", C // ARGS["n_head"]), ("attention_masked", C // ARGS["n_head"]),
    }  # fmt: skip
    assert doctor._expected == expected
    asked = []

    def adopt(cases, rows):
        asked.append([(case.op, case.size) for case in cases])
        choice.proofs.update(dict.fromkeys(cases, Proof(OWN)))
        return choice.proofs

    monkeypatch.setattr(doctor, "adopt", adopt)
    x = torch.randn(2, 3, C)
    doctor.prove_first_use(Case("cuda", "layer_norm", torch.bfloat16, C), x)
    assert set(asked.pop()) == expected
    doctor.prove_first_use(Case("cuda", "layer_norm", torch.bfloat16, 7), x)
    assert asked == [[("layer_norm", 7)]]


def test_a_library_user_s_model_is_proven_at_once_behind_one_line(monkeypatch, capsys):
    """Trials of seconds each, one by one in the first step, look like a program that hangs."""
    monkeypatch.setattr(doctor, "table_of", lambda device: ProofTable("cpu"))
    monkeypatch.setattr(backend, "check_gpu", lambda *args: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    h100 = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: h100)
    proven, warmed = [], []
    monkeypatch.setattr(
        doctor, "warm", lambda cases, gpu: warmed.append((gpu, len(cases), len(proven))) or []
    )
    monkeypatch.setattr(
        doctor.Prover, "proof_of", lambda self, case, **_: proven.append(case) or Proof(OWN)
    )
    config = GPTConfig(n_layer=1, n_head=2, n_embd=64, vocab_size=256, block_size=16)
    fastpar.parallelize(fastpar.GPT(config), fastpar.Mesh(device="cpu"))
    case = Case("cuda", "embedding", torch.bfloat16, 64)
    doctor.prove_first_use(case, torch.empty(1, 64))
    assert set(proven) == set(doctor.cases_of_model("cuda", torch.bfloat16, config))
    assert warmed == [((90, 132), len(proven), 0)]  # compiled before the first proof
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"fastpar: proving {len(proven)} kernels on this GPU, once")
    assert len(lines) == 1 + len(proven)  # on a terminal a bar
    doctor.prove_first_use(case, torch.empty(1, 64))
    assert not capsys.readouterr().err


def test_a_split_gpt_announces_the_sizes_of_its_slices():
    config = GPTConfig(n_layer=1, n_head=2, n_embd=64, vocab_size=256, block_size=16)
    doctor.expect_gpt(config)
    doctor.expect_gpt(config, tp=2)
    assert ("bias_gelu", 128) in doctor._expected
    assert ("bias_gelu", 256) not in doctor._expected


@pytest.mark.parametrize(("rows", "timed"), [(1, 1 << 13), (1 << 14, 1 << 14), (1 << 20, 1 << 15)])
def test_the_rows_of_the_first_call_do_not_decide_for_all(monkeypatch, rows, timed):
    asked = []
    monkeypatch.setattr(doctor, "adopt", lambda cases, **how: asked.append(how) or {GELU: None})
    doctor.prove_first_use(GELU, torch.empty(rows, 96, device="meta"))
    assert asked == [{"rows": timed}]


def test_what_the_doctor_found_on_a_cpu_counts_in_a_patched_model(monkeypatch):
    model = NanoGPT(**SIZES)
    norm = Case("cpu", "layer_norm", torch.float32, ARGS["n_embd"])
    table_with({norm: Proof(STOCK), norm._replace(size=7): Proof(STOCK)})
    monkeypatch.setattr(doctor, "prove", refuse)
    fastpar.patch(model)
    assert choice.proofs == {norm: Proof(STOCK)}


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("how", ["torch asks for it", "an engine asks for it"])
@pytest.mark.parametrize("x", [torch.ones(4, 96), ON_GPU], ids=["cpu", "gpu"])
def test_deterministic_runs_go_by_right_and_wrong_not_by_times(monkeypatch, real, how, x):
    case = choice.case_of("layer_norm", x)

    class Owner:
        pass

    owner, slower = Owner(), Proof(STOCK, "", (2.0, 2.0), (1.0, 1.0))
    if how == "torch asks for it":
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    else:
        choice.ignore_times_for(owner)
    for proof, runs in (
        (slower, True),
        (Proof(STOCK, "error is 7"), False),
        (Proof(STOCK), not x.is_cuda),  # could not be tried: a GPU's is unproven
    ):
        choice.proofs[case] = proof
        assert choice.may_run("layer_norm", x) is runs
    if how == "an engine asks for it":
        choice.proofs[case] = slower
        with Calls() as calls:  # the garbage collector may end an engine in the middle of a step
            del owner
        assert not calls.seen
        assert not choice.may_run("layer_norm", x)


CONFIG = GPTConfig(vocab_size=256, block_size=16, n_layer=1, n_head=2, n_embd=16, dropout=0.2)


def test_a_deterministic_run_is_the_same_whatever_a_timing_chose(monkeypatch, tmp_path):
    make_text(tmp_path)
    faster = {OWN: ((1.0, 1.0), (2.0, 2.0)), STOCK: ((2.0, 2.0), (1.0, 1.0))}
    by = {OWN: (OWN, OWN), STOCK: ("cpu", "cpu")}

    def run(chosen, attention, deterministic):
        gc.collect()  # an engine of an earlier test would end this one's strictness
        monkeypatch.setattr(doctor, "_prover", doctor.Prover())
        monkeypatch.setattr(choice, "proofs", {})
        monkeypatch.setattr(choice, "_strict", [])
        cases = doctor.cases_of_model("cpu", torch.float32, CONFIG)
        table = {case: Proof(chosen, "", *faster[chosen]) for case in cases}
        for case in cases:
            if case.op == "attention":
                table[case] = Proof(attention, "", *faster[attention], serves=by[chosen])
        table_with(table)
        folder = tmp_path / f"{chosen}_{attention}_{deterministic}"
        folder.mkdir()
        (folder / "text.txt").symlink_to(tmp_path / "text.txt")
        with in_folder(folder):
            Runs()("out", **{**FEW, "max_steps": 3, "deterministic": deterministic})
            found = [row["loss"] for row in steps("out")], bits("out", 3)
        assert choice.proofs == table
        return found

    wanted = run(OWN, OWN, True)
    assert run(STOCK, STOCK, True) == wanted
    assert run(STOCK, OWN, True) == wanted  # another implementation of attention
    assert run(STOCK, STOCK, False) != run(OWN, OWN, False)  # a choice shows


def test_compiled_code_goes_by_the_proofs(quick, monkeypatch):
    x, weight = torch.randn(4, 96), torch.ones(96)
    choice.proofs[choice.case_of("layer_norm", x)] = Proof(STOCK)
    from fastpar.kernels import layer_norm

    compiled = torch.compile(lambda x: layer_norm(x, weight), fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), F.layer_norm(x, (96,), weight))


# A trial at first use neither sees nor changes what the call happens in
class First(torch.autograd.Function):
    """An op in whose forward the proof is made, as when a real one is called."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        First.proof = doctor.prove_first_use(GELU, x)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


def within(context):
    def call(x):
        with context:
            return First.apply(x)

    return call


AROUND = {
    "nothing": First.apply,
    "checkpoint": lambda x: checkpoint(First.apply, x, use_reentrant=False),
    "default device": within(torch.device("meta")),
    "autocast": within(torch.autocast("cpu", torch.bfloat16)),
    "inference": within(torch.inference_mode()),
}


@pytest.mark.parametrize("around", AROUND)
def test_what_surrounds_the_first_call_does_not_reach_the_trial(quick, around):
    """And it draws no number of the run."""
    x, before = torch.ones(4, 96, requires_grad=True), torch.get_rng_state()
    y = AROUND[around](x)
    assert First.proof.wrong == ""
    assert min(First.proof.own_ms) > 0  # backward was proven too
    assert torch.equal(torch.get_rng_state(), before)
    if y.requires_grad:
        y.sum().backward()


def test_an_oracle_without_a_deterministic_form_is_no_error_of_the_kernel(quick, monkeypatch):
    def eager(x, bias, *rest):
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))  # has none
        return torch.nn.functional.gelu(x + bias, approximate="tanh")

    cases = trial.proof_cases("bias_gelu", 96, "cpu", 4)[:2]
    for case in cases:
        monkeypatch.setattr(case, "eager", eager)
    monkeypatch.setattr(trial, "proof_cases", lambda *args: cases)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.warns(UserWarning, match="put_"):
            assert trial.prove(GELU).wrong == ""
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


# Several ranks: one proves, all go by the same
def together(rank, names):
    """What ranks find that run at the same time."""
    with ThreadPoolExecutor(len(names)) as pool:
        return list(pool.map(rank, names))


def test_one_rank_proves_and_all_have_its_result(monkeypatch):
    made = []

    def prove(case, *how):
        made.append(case)
        time.sleep(0.1)
        return Proof(STOCK, "", (float(len(made)), 0.0))

    monkeypatch.setattr(doctor, "prove", prove)
    store, kind = HashStore(), ProofTable("cpu").about["device"]
    found = together(lambda _: doctor.Prover(store, [kind]).proof_of(GELU), range(4))
    assert found == [Proof(STOCK, "", (1.0, 0.0))] * 4
    assert len(made) == 1


APART = {"A": Proof(OWN, serves=("flash", OWN)), "B": Proof(OWN, serves=("cudnn", "cudnn"))}


@pytest.mark.parametrize(
    ("case", "proofs", "common", "words"),
    [
        (GELU, {"A": Proof(STOCK), "B": Proof(OWN)}, Proof(STOCK), "the ranks' GPUs differ ("),
        (GELU._replace(op="attention"), APART, Proof(OWN),
         "the fastest differs by GPU (A: flash / own, B: cudnn / cudnn); all run fastpar's kernel"),
    ],
)  # fmt: skip
def test_ranks_on_different_devices_run_what_both_can(case, proofs, common, words, capsys):
    store = HashStore()

    def rank(kind):
        prover = doctor.Prover(store, proofs)
        prover.proof_here = lambda case: proofs[kind]
        prover.table = lambda device: SimpleNamespace(about={"device": kind})
        return prover.proof_of(case)

    assert together(rank, proofs) == [common] * 2
    assert words in capsys.readouterr().err


def test_one_rank_of_a_host_compiles_and_the_others_wait(monkeypatch, capsys):
    store, compiled = HashStore(), []

    def compile_all(cases, gpu):
        time.sleep(0.1)
        compiled.append(gpu)
        return ["_activation_fwd_kernel: no registers"]

    monkeypatch.setattr(doctor, "warm", compile_all)

    def rank(_):
        doctor.Prover(store, ["GPU"]).warm([GELU], (90, 132))
        return list(compiled)

    assert together(rank, range(3)) == [[(90, 132)]] * 3
    assert capsys.readouterr().err.count("could not compile before the trial: _activation_fwd") == 1


def test_a_shipped_table_serves_every_build_of_the_same_kernels(monkeypatch, tmp_path):
    table = table_with({GELU: Proof(OWN)})
    content = json.loads(table.path.read_text())
    table.path.unlink()
    content["about"] |= {"module": "of another compiler", "driver": "another", "threads": "7"}
    content["about"]["torch"] = torch.__version__.partition("+")[0] + "+cu999"
    path = tmp_path / table_module.shipped_name(content["about"])
    path.write_text(json.dumps(content))
    monkeypatch.setattr(table_module, "SHIPPED", tmp_path)
    assert ProofTable("cpu").proofs == {GELU: Proof(OWN)}
    about = table_module.environment("cpu")
    for change, found in ({"csrc": "another"}, {}), ({"csrc": "none"}, {GELU: Proof(OWN)}):
        monkeypatch.setattr(table_module, "environment", lambda device, c=change: about | c)
        assert ProofTable("cpu").proofs == found  # a checkout's, and an installed package's
    for name in ("torch", "fastpar", "device"):
        other = content["about"] | {name: "1.0"}
        assert table_module.shipped_name(other) != path.name
    content["about"]["torch"] = "1.0"
    path.write_text(json.dumps(content))
    with pytest.warns(UserWarning, match="ignored"):
        assert ProofTable("cpu").proofs == {}


def test_a_changed_line_in_one_op_leaves_the_proofs_of_others(monkeypatch):
    norm = GELU._replace(op="layer_norm")
    table_with({GELU: Proof(OWN), norm: Proof(STOCK)})
    real = table_module.digest_of
    monkeypatch.setattr(table_module, "digest_of", lambda op: "x" if "gelu" in op else real(op))
    assert ProofTable("cpu").proofs == {norm: Proof(STOCK)}


def test_a_proof_depends_on_the_op_s_sources_and_what_they_import():
    of = {op: {str(p.relative_to(sources.KERNELS)) for p in sources.sources_of(op)} for op in (
        *backend.OPS, "attention_masked", "keep_mask", "norm_bins"
    )}  # fmt: skip
    assert all("op.py" in files for files in of.values())
    assert {"norm/triton.py", "norm/layer_norm_configs.json", "philox.py"} <= of["layer_norm"]
    assert "embedding_triton.py" in of["embedding"]  # imported when it is called
    assert not any(name.startswith("norm/") for name in of["bias_gelu"])
    assert of["attention_masked"] == of["attention"]
    whole = set.union(*of.values())
    left = {str(p.relative_to(sources.KERNELS)) for p in sources.KERNELS.rglob("*.py")} - whole
    assert left == {*sources.PASSED, "cases.py", "reference.py", "flops.py"}


def test_a_copy_of_the_module_is_the_same_build(monkeypatch, tmp_path):
    if table_module._C is None:
        pytest.skip("needs the compiled module")
    path = tmp_path / "_C.so"
    path.write_bytes(Path(table_module._C.__file__).read_bytes())  # at another time
    about = table_module.environment("cpu")
    copy = SimpleNamespace(__file__=str(path), isa=table_module._C.isa)
    monkeypatch.setattr(table_module, "_C", copy)
    assert table_module.environment.__wrapped__("cpu") == about


@pytest.mark.parametrize("what", ["fastpar", "module"])
def test_proofs_of_another_checkout_are_left_out_without_a_word(monkeypatch, what):
    """Two checkouts of one account have other versions, or other builds of one."""
    table_with({GELU: Proof(OWN)})
    about = table_module.environment("cpu")
    monkeypatch.setattr(table_module, "environment", lambda device: {**about, what: "another"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ProofTable("cpu").proofs == {}
        table_with({GELU: Proof(STOCK)})
        assert ProofTable("cpu").proofs == {GELU: Proof(STOCK)}


def test_a_damaged_file_is_reported_ignored_and_replaced(no_proofs, tmp_path):
    """Or a cache that somebody else wrote wrong."""
    table = table_with({GELU: Proof(OWN)})
    path, text = table.path, table.path.read_text()
    sound = json.loads(text)
    (row,) = sound["proofs"]
    rows = (
        {"chosen": "mine"}, {"dtype": "Tensor"}, {"op": ["bias_gelu"]}, {"size": "96"},
        {"size": 1e999}, {"own_ms": [-1.0, 0]}, {"own_ms": [math.nan, 0]}, {"own_ms": [1e999, 0]},
        {"wrong": 7}, {"wrong": "\x1b[2J"}, {"wrong": "x" * 5000}, {"serves": ["own"]},
        {"serves": ["own", "other"]}, {"stock_right": 1}, {"peers": [{"name": "cpu"}]},
        {"peers": [{"name": "cpu", "wrong": "", "ms": [-1, 0]}]},
    )  # fmt: skip
    wrong = [{"tried": [7]}, {"tried": 7}, {"version": 2}]
    wrong += [{"about": sound["about"] | {"torch": "1.0"}}, {"proofs": [row] * 100_000}]
    wrong += [{"proofs": [row | part]} for part in rows]
    for content in ("", "[]", "{", *(json.dumps(sound | part) for part in wrong)):
        assert content != text
        path.write_text(content)
        with pytest.warns(UserWarning, match=f"ignored {path.name} in "):
            assert ProofTable("cpu").proofs == {}
    table.save()
    assert ProofTable("cpu").proofs == {GELU: Proof(OWN)}
    path.rename(tmp_path / "elsewhere")  # tests/files/test_runs.py has more than links
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.warns(UserWarning, match="a symbolic link"):
        table_with({GELU: Proof(STOCK)})  # replaces the link, not what it leads to
    assert not path.is_symlink()
    assert ProofTable("cpu").proofs == {GELU: Proof(STOCK)}


def test_hosts_that_share_a_folder_without_locks_do_not_count_each_others_trials(monkeypatch):
    no_lock = mock.Mock(side_effect=OSError("no locks available"))
    monkeypatch.setattr(table_module.fcntl, "flock", no_lock)
    tables = [ProofTable("cpu") for _ in range(3)]  # hosts with the same GPU
    trials = []
    for table in tables:
        with table.locked():
            trials.append(table.trial(GELU))
            assert not trials[-1].__enter__()  # all at it at the same time


def test_hosts_that_share_a_folder_keep_each_others_proofs():
    first, second = ProofTable("cpu"), ProofTable("cpu")
    other = GELU._replace(size=64)
    for table, case in ((first, GELU), (second, other)):
        with table.locked(), table.trial(case):
            table.proofs[case] = Proof(OWN)
    assert ProofTable("cpu").proofs.keys() == {GELU, other}


def test_a_cpu_table_of_other_threads_is_no_other_version(monkeypatch):
    table_with({GELU: Proof(OWN)})
    table_module.environment.cache_clear()
    torch.set_num_threads(2)  # the tests have 1
    try:
        assert ProofTable("cpu").proofs == {}  # without a warning
    finally:
        torch.set_num_threads(1)
        table_module.environment.cache_clear()
