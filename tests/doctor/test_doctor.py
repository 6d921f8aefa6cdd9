"""Proof on first use: what is wrong or slower does not run, whoever asks and however it ends."""

import json
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from nanogpt_cells import ARGS, NanoGPT
from proofs import GELU, table_with
from torch._subclasses import FakeTensorMode

import fastpar
from fastpar.doctor import doctor, report, trial
from fastpar.doctor import table as table_module
from fastpar.doctor.report import DoctorCommand
from fastpar.doctor.table import ProofTable
from fastpar.kernels import backend, bias_gelu, choice, gelu
from fastpar.kernels.choice import OWN, STOCK, Case, Proof
from fastpar.settings.model import GPTConfig


@pytest.fixture
def quick(monkeypatch):
    """One op, and little time for it."""
    monkeypatch.setattr(trial, "SECONDS", 0.02)
    monkeypatch.setattr(report, "cases_of_model", lambda *args, **sizes: [GELU])


def break_gelu(monkeypatch, fault):
    own = gelu._bias_gelu_cpp

    def broken(x, bias):
        return fault(own(x, bias))

    monkeypatch.setattr(gelu, "_bias_gelu_cpp", broken)


def run_doctor(**options):
    lines = []
    status = report.doctor(DoctorCommand(device="cpu", **options), lines.append)
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


def test_a_wrong_kernel_is_named_and_does_not_run(quick, monkeypatch, capsys):
    break_gelu(monkeypatch, lambda y: y * 1.001)
    status, printed = run_doctor()
    assert status == 1
    assert "torch: own is WRONG" in printed
    assert (
        "WRONG  bias_gelu float32 96: at tanh N=63 F=127" in printed or "error of y is" in printed
    )
    assert "error of y is" in capsys.readouterr().err
    x = torch.randn(5, 96)
    assert torch.equal(bias_gelu(x), F.gelu(x, approximate="tanh"))
    monkeypatch.setattr(backend, "choice", "cpp")
    with pytest.raises(RuntimeError, match=r"failed for bias_gelu float32 96: at .* error of y is"):
        bias_gelu(x)


def test_results_that_change_from_call_to_call_are_wrong(quick, monkeypatch):
    calls = []

    def flip(y):
        calls.append(None)
        return torch.nextafter(y, y + 1) if len(calls) % 2 else y

    break_gelu(monkeypatch, flip)
    status, printed = run_doctor()
    assert status == 1
    assert "differs between two calls" in printed


def test_a_slow_kernel_is_not_chosen_but_may_be_forced(quick, monkeypatch):
    break_gelu(monkeypatch, lambda y: time.sleep(0.05) or y)
    status, _ = run_doctor()
    assert status == 0
    assert choice.proofs[GELU][:2] == (STOCK, "")
    x, used = torch.randn(5, 96), []
    monkeypatch.setattr(gelu, "_bias_gelu_cpp", lambda x, bias: used.append(1) or x)
    bias_gelu(x)
    assert not used
    monkeypatch.setattr(backend, "choice", "cpp")
    bias_gelu(x)
    assert used


def test_a_kernel_that_raises_is_wrong(quick, monkeypatch):
    def fault(y):
        raise RuntimeError("an illegal memory access was encountered\nmore")

    break_gelu(monkeypatch, fault)
    status, printed = run_doctor()
    assert status == 1
    assert "RuntimeError: an illegal memory access was encountered" in printed


def test_a_lost_gpu_bars_the_kernel_that_lost_it_and_ends_the_process(monkeypatch):
    """Each later call of CUDA raises the same error, whichever kernel makes it."""
    cuda, cases = [], [GELU._replace(device="cuda", size=n) for n in (96, 64)]

    def lost():
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    def measure(self, dtype, device):
        cuda.append(self.shape)
        lost()

    monkeypatch.setattr(trial.OpCase, "measure", measure)
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    prover = doctor.Prover()
    start = ProofTable.__init__  # with the CPU's file
    monkeypatch.setattr(ProofTable, "__init__", lambda table, device: start(table, "cpu"))
    with pytest.raises(SystemExit, match=r"float32 96 by own at .* illegal .* start again"):
        [prover.proof_of(case) for case in cases]
    assert len(cuda) == 1
    (kept,) = ProofTable("cpu").proofs.items()
    assert kept[0].size == 96
    assert "illegal memory access" in kept[1].wrong


def test_an_error_that_leaves_the_gpu_alone_is_of_one_kernel(monkeypatch):
    def refuse(*args):
        raise RuntimeError("CUDA error: too many resources requested for launch")

    monkeypatch.setattr(trial.OpCase, "measure", refuse)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    found = trial.proof_cases("weight_gradient", 96, "cpu", 64)
    case = Case("cuda", "weight_gradient", torch.bfloat16, 96)
    assert "too many resources" in trial.what_is_wrong(case, found)
    other = trial.DeviceLost(case, "own/flash", "at T=64: CUDA error").proof
    assert (other.chosen, other.wrong, [peer.name for peer in other.peers]) == (OWN, "", ["flash"])


def test_a_kernel_that_fails_at_the_timed_size_alone_does_not_run(quick, monkeypatch):
    def fault(y):
        if len(y) > 100:
            raise RuntimeError("out of resource: shared memory")
        return y

    break_gelu(monkeypatch, fault)
    status, printed = run_doctor()
    assert status == 1
    assert "WRONG  bias_gelu float32 96: at tanh N=512 F=96: RuntimeError: out of" in printed
    assert choice.proofs[GELU].chosen == STOCK


def test_what_has_no_memory_for_the_timed_size_is_not_timed(quick, monkeypatch):
    found = trial.proof_cases("bias_gelu", 96, "cpu", 64)[:2]

    def no_memory(x, bias):
        if len(x) > 100:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return F.gelu(x + bias, approximate="tanh")

    monkeypatch.setattr(found[0], "eager", no_memory)
    monkeypatch.setattr(found[0], "make", lambda draw: {"x": draw(512, 96), "bias": draw(96)})
    monkeypatch.setattr(trial, "proof_cases", lambda *args: found)
    proof = trial.prove(GELU)
    assert (proof.chosen, proof.stock_ms) == (OWN, (0.0, 0.0))
    assert min(*proof.own_ms, *proof.instead_ms) > 0


def test_an_error_without_a_message_is_named(quick, monkeypatch):
    def fault(y):
        raise AssertionError

    break_gelu(monkeypatch, fault)
    status, printed = run_doctor()
    assert status == 1
    assert "AssertionError: no message" in printed


def test_what_is_much_slower_is_not_timed_for_long(quick, monkeypatch):
    calls, plain = [], trial.proof_cases("bias_gelu", 96, "cpu", 64)[:2]

    def slow(x, bias):
        calls.append(time.sleep(0.05))
        return F.gelu(x + bias, approximate="tanh")

    for case in plain:
        monkeypatch.setattr(case, "eager", slow)
    monkeypatch.setattr(trial, "proof_cases", lambda *args: plain)
    proof = trial.prove(GELU)
    assert proof.stock_ms[0] > 50
    assert len(calls) == 1 + 1 + 2  # right, for backward, timed


def test_no_memory_says_nothing_about_a_kernel_and_is_not_kept(quick, monkeypatch, capsys):
    def fault(y):
        raise torch.OutOfMemoryError("CUDA out of memory")

    break_gelu(monkeypatch, fault)
    proof = doctor.Prover().proof_of(GELU)
    assert proof == Proof(STOCK)
    assert "no memory is left to try it" in capsys.readouterr().err
    assert ProofTable("cpu").proofs == {}


def test_a_timed_call_is_never_larger_than_memory_allows(monkeypatch):
    asked = []
    monkeypatch.setattr(
        trial, "proof_cases", lambda op, size, device, rows: asked.append(rows) or []
    )
    trial.prove(Case("cuda", "cross_entropy", torch.bfloat16, 50304), rows=1 << 15)
    assert asked == [trial.MOST_ELEMENTS["cuda"] // 50304]


def test_known_proofs_are_not_made_again_unless_asked_for(quick, monkeypatch):
    run_doctor()
    monkeypatch.setattr(doctor, "prove", lambda *args: pytest.fail("proven again"))
    run_doctor()
    monkeypatch.setattr(doctor, "_prover", doctor.Prover())  # as another process
    run_doctor()
    monkeypatch.setattr(doctor, "prove", lambda *args: Proof(STOCK, "now wrong"))
    assert run_doctor(again=True)[0] == 1


def test_info_shows_what_the_tables_say(quick, monkeypatch):
    assert len(report.known_choices()) == 1
    slow, wrong = GELU._replace(size=64), GELU._replace(size=32)
    table = table_with({
        GELU: Proof(OWN), slow: Proof(STOCK, "", (2.0, 1.0), (1.0, 1.0)),
        wrong: Proof(STOCK, "error is 7"),
    })  # fmt: skip
    monkeypatch.setattr(doctor, "_prover", doctor.Prover())
    text = "\n".join(report.known_choices())
    assert f"cpu: 3 in {table.path}, of 20" in text
    assert "bias_gelu float32 64: own takes 3.000 ms, torch 2.000" in text
    assert "bias_gelu float32 32: own is WRONG: error is 7" in text


@pytest.mark.slow
def test_torch_compile_is_timed_where_it_is_asked_for(quick):
    status, printed = run_doctor()
    assert "under torch.compile" not in printed
    status, printed = run_doctor(compile=True)
    assert status == 0
    assert "backward by PyTorch's functions under torch.compile" in printed
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
    asked = []

    def prove(case, rows, compiled):
        asked.append((case.op, compiled))
        return Proof(
            OWN, "", (2.0, 2.0), (3.0, 3.0), (3.0, 3.0), (1.0, 1.0) if compiled else (0, 0)
        )

    monkeypatch.setattr(doctor, "prove", prove)
    gelu, flat = GELU, GELU._replace(op="global_norm", size=0)
    doctor.adopt([gelu, flat])
    doctor.adopt([gelu, flat], compiled=True)
    doctor.adopt([gelu, flat], compiled=True)
    assert asked == [("bias_gelu", False), ("global_norm", False), ("bias_gelu", True)]


def test_it_can_be_called_without_the_command_line_s_package():
    code = "import sys; sys.modules['tyro'] = None; import fastpar.doctor.report as report; "
    code += "report.cases_of_model = lambda *a, **k: []; "
    code += "sys.exit(report.doctor(report.DoctorCommand(device='cpu')))"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_no_gpu_is_a_mistake_with_a_way_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"expected a GPU with --device cuda.*use --device cpu"):
        report.doctor(DoctorCommand(device="cuda"))


# The file


def test_an_unwritable_folder_is_told_once_and_the_proofs_count(quick, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FASTPAR_PROOFS", str(tmp_path / "file" / "below"))
    with pytest.warns(UserWarning, match="cannot be kept .* FASTPAR_PROOFS") as told:
        assert run_doctor()[0] == 0
    assert len(told) == 1
    assert choice.proofs[GELU]


def test_a_trial_that_ended_its_process_twice_is_not_begun_again(monkeypatch):
    monkeypatch.setattr(doctor, "prove", lambda *args: Proof(OWN))
    for _ in range(2):
        table = ProofTable("cpu")
        with table.locked():
            trial_of_it = table.trial(GELU)
            assert trial_of_it.__enter__() == ""  # and the process is gone
    proof = doctor.Prover().proof_of(GELU)
    assert proof.chosen == STOCK
    assert "ended 2 times while it was tried" in proof.wrong


def test_an_interrupted_trial_leaves_nothing_behind(monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    for _ in range(3):
        monkeypatch.setattr(doctor, "prove", interrupted)
        with pytest.raises(KeyboardInterrupt):
            doctor.Prover().proof_of(GELU)
    monkeypatch.setattr(doctor, "_prover", doctor.Prover())
    monkeypatch.setattr(doctor, "prove", lambda *args: Proof(OWN))
    assert doctor.Prover().proof_of(GELU) == Proof(OWN)


# What the ops ask


@pytest.fixture
def real(monkeypatch):
    """OnGpu counts as a tensor with memory."""
    monkeypatch.setattr(choice, "is_real", lambda x: True)


class OnGpu:
    """As much of a CUDA tensor as a choice looks at."""

    is_cuda, dtype, shape = True, torch.bfloat16, (4, 768)
    device = torch.device("cuda", 0)

    def dim(self):
        return 2

    def numel(self):
        return 4 * 768


def test_a_gpu_class_is_proven_at_its_first_call_only(monkeypatch, real):
    asked = []

    def first_use(case, x):
        asked.append(case)
        return Proof(STOCK if case.op == "bias_gelu" else OWN)

    monkeypatch.setattr(doctor, "prove_first_use", first_use)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert [choice.may_run("layer_norm", OnGpu()) for _ in range(3)] == [True] * 3
    assert [choice.may_run("bias_gelu", OnGpu()) for _ in range(3)] == [False] * 3
    assert [case.op for case in asked] == ["layer_norm", "bias_gelu"]
    assert choice.may_run("layer_norm", torch.ones(4, 768))  # a CPU's is never proven by itself


def test_nothing_is_tried_while_a_graph_is_captured(monkeypatch, real):
    monkeypatch.setattr(doctor, "prove_first_use", lambda *args: pytest.fail("tried"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not choice.may_run("layer_norm", OnGpu())
    choice.proofs[choice.case_of("layer_norm", OnGpu())] = Proof(OWN)
    assert choice.may_run("layer_norm", OnGpu())


def test_nothing_is_tried_while_torch_compile_traces(monkeypatch):
    monkeypatch.setattr(doctor, "prove_first_use", lambda *args: pytest.fail("tried"))
    with FakeTensorMode():
        assert choice.may_run("layer_norm", torch.empty(4, 768, device="cuda"))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert choice.may_run("layer_norm", OnGpu())


def test_a_forced_kernel_that_failed_in_another_process_is_refused(monkeypatch, real):
    gelu = Case("cuda", "bias_gelu", torch.bfloat16, 768)
    monkeypatch.setattr(doctor, "known_proof", {gelu: Proof(STOCK, "error is 7")}.get)
    monkeypatch.setattr(doctor, "prove_first_use", lambda *args: pytest.fail("tried"))
    monkeypatch.setattr(backend, "choice", "triton")
    monkeypatch.setattr(backend, "check_gpu", lambda *args: None)
    with pytest.raises(RuntimeError, match="failed for bias_gelu bfloat16 768: error is 7"):
        backend.use_triton("bias_gelu", OnGpu())
    assert backend.use_triton("layer_norm", OnGpu())  # nothing is known of it


def test_a_table_serves_those_who_ask_without_a_trial():
    table_with({GELU: Proof(STOCK, "error is 7")})
    assert doctor.known_proof(GELU).wrong == "error is 7"
    assert doctor.known_proof(GELU._replace(size=7)) is None


@pytest.mark.parametrize("name", ["torch", "cpp", "triton"])
def test_a_forced_implementation_leaves_no_proof_of_another(quick, monkeypatch, no_proofs, name):
    monkeypatch.setattr(backend, "choice", name)
    monkeypatch.setattr(doctor, "prove", lambda *args: pytest.fail("tried"))
    with pytest.raises(ValueError, match=f"to choose from, got FASTPAR_BACKEND={name}; unset"):
        run_doctor()
    doctor.prove_before_training("cpu", torch.bfloat16, GPTConfig())
    assert not list(no_proofs.glob("*.json"))


def test_an_old_gpu_is_refused_by_name_before_a_kernel_is_tried(monkeypatch):
    monkeypatch.setattr(backend, "_able_gpus", set())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *args: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (7, 5))
    monkeypatch.setattr(doctor, "prove", lambda *args: pytest.fail("tried"))
    monkeypatch.setattr(table_module, "_driver", lambda: "570")
    message = r"fastpar: expected a GPU of compute capability 8.0 or newer .* Tesla T4 of 7.5"
    with pytest.raises(RuntimeError, match=message):
        doctor.prove_before_training("cuda", torch.bfloat16, GPTConfig())
    with pytest.raises(RuntimeError, match=message):
        report.doctor(DoctorCommand(device="cuda"), lambda line: None)


# Patched models

SIZES = {name: value for name, value in ARGS.items() if name != "dropout"}


@pytest.fixture
def patched():
    model = NanoGPT(**SIZES)
    fastpar.patch(model)
    return model


def test_the_first_call_of_a_patched_model_has_all_of_it_proven_at_once(patched, monkeypatch, real):
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


def test_proofs_have_their_kernels_compiled_before_them(monkeypatch):
    order = []
    cases = [Case("cuda", op, torch.bfloat16, 96) for op in ("layer_norm", "bias_gelu")]
    monkeypatch.setattr(doctor, "table_of", lambda device: ProofTable("cpu"))
    monkeypatch.setattr(backend, "check_gpu", lambda *args: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    pcie = SimpleNamespace(major=9, minor=0, multi_processor_count=114)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: pcie)
    monkeypatch.setattr(doctor, "warm", lambda cases, gpu: order.append((gpu, len(cases))) or [])
    monkeypatch.setattr(
        doctor.Prover, "proof_of", lambda self, case, **_: order.append(case.op) or Proof(OWN)
    )
    flat = Case("cuda", "adamw_step_", torch.float32, 0)  # no Triton
    for asked, warmed in ((cases, [((90, 114), 2)]), (cases[:1], [((90, 114), 1)]), ([flat], [])):
        order.clear()
        doctor.adopt(asked)
        assert order == [*warmed, *(case.op for case in asked)]


def test_what_the_doctor_found_on_a_cpu_counts_in_a_patched_model(monkeypatch):
    model = NanoGPT(**SIZES)
    C = ARGS["n_embd"]
    norm = Case("cpu", "layer_norm", torch.float32, C)
    table_with({norm: Proof(STOCK), norm._replace(size=C + 1): Proof(STOCK)})
    monkeypatch.setattr(doctor, "prove", lambda *args: pytest.fail("tried"))
    fastpar.patch(model)
    assert choice.proofs == {norm: Proof(STOCK)}


def test_deterministic_runs_go_by_right_and_wrong_not_by_times(monkeypatch):
    x = torch.ones(4, 96)
    case = choice.case_of("layer_norm", x)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    for proof, runs in (
        (Proof(STOCK, "", (2.0, 2.0), (1.0, 1.0)), True),
        (Proof(STOCK, "error is 7"), False),
        (Proof(STOCK), False),  # could not be tried
    ):
        choice.proofs[case] = proof
        assert choice.may_run("layer_norm", x) is runs


def test_parts_of_an_op_go_by_its_proof():
    assert choice.case_of("norm_bins", torch.ones(3)).op == "global_norm"
    assert choice.case_of("adamw_step_", torch.ones(3)).size == 0


def test_compiled_code_goes_by_the_proofs(quick, monkeypatch):
    x, weight = torch.randn(4, 96), torch.ones(96)
    choice.proofs[choice.case_of("layer_norm", x)] = Proof(STOCK)
    from fastpar.kernels import layer_norm

    compiled = torch.compile(lambda x: layer_norm(x, weight), fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), F.layer_norm(x, (96,), weight))
