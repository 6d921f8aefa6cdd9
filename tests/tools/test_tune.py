"""The tuning list: wrong alternatives are refused with their numbers, slow ones not chosen, and
what was found is kept and written where it ships."""

import json
import re
import shutil
import time

import pytest
import torch

from bench import __main__ as door
from bench.ops import tune
from bench.ops.tune import Entry, Session
from fastpar.doctor import doctor, trial
from fastpar.doctor.cases import proof_cases
from fastpar.doctor.table import parse_proofs
from fastpar.kernels import attention_configs, attention_peers, backend, choice, gelu, gelu_configs
from fastpar.kernels.attention_peers import Peer
from fastpar.kernels.choice import OWN, STOCK, Case
from fastpar.kernels.config_table import TABLES
from fastpar.kernels.gelu_configs import TABLE, Config

FP32 = torch.float32
GELU = Entry(Case("cpu", "bias_gelu", FP32, 16), 0.3, TABLE)
PROOF = Entry(Case("cpu", "bias_gelu", FP32, 16), 0.2)
ATTENTION = Entry(Case("cpu", "attention", FP32, 64), 6.0)
PRESENT, GOOD, OTHER = TABLE.get(90), Config(1024, 4, 4), Config(512, 4, 4)


@pytest.fixture(autouse=True)
def no_proofs(monkeypatch, tmp_path):
    monkeypatch.setenv("FASTPAR_PROOFS", str(tmp_path / "proofs"))
    monkeypatch.setattr(doctor, "_prover", doctor.Prover())
    monkeypatch.setattr(choice, "proofs", {})
    monkeypatch.setattr(backend, "keep_freed_memory", lambda: True)  # for the whole process
    monkeypatch.setattr(trial, "SECONDS", 0.01)


class ScriptedClock:
    """Runs the call and tells the time that the config in force is given."""

    def __init__(self):
        self.ms = {PRESENT: 3.0, GOOD: 2.0, OTHER: 1.0}
        self.active = None

    def sample(self, call):
        call()
        return self.ms[self.active]


@pytest.fixture
def table(tmp_path, monkeypatch, triton_device):
    """A copy of GELU's table, two candidates, few cases, and a clock by which OTHER is fastest."""
    if triton_device == "cuda":
        pytest.skip("needs Triton's interpreter: times are scripted")
    path = tmp_path / TABLE.path.name
    shutil.copy(TABLE.path, path)
    monkeypatch.setattr(TABLE, "path", path)
    monkeypatch.setattr(TABLE, "candidates", lambda arch: [GOOD, OTHER])
    monkeypatch.setattr(tune, "proof_cases", lambda *args: proof_cases(*args)[:1])
    clock, entered = ScriptedClock(), tune.forced

    def forced(entry, config):
        clock.active = config
        return entered(entry, config)

    monkeypatch.setattr(tune, "forced", forced)
    monkeypatch.setattr(trial, "clock_for", lambda device: clock)
    yield path, clock
    TABLE.load.cache_clear()
    TABLE.get.cache_clear()


def session(tmp_path, write=False):
    return Session("cpu", 90, write, tmp_path / "tune.json", tmp_path)


def written(path):
    return Config(**json.loads(path.read_text())["90"])


SMALL = {"minutes": 5.0, "rows": 4, "checked_rows": 4}


def test_the_fastest_is_written_and_only_when_asked(table, tmp_path, capsys):
    path, _ = table
    before = path.read_text()
    found = tune.run([GELU], session(tmp_path), **SMALL)
    assert found[GELU.name].chosen == tune.shown(OTHER)
    assert path.read_text() == before
    tune.run([GELU], session(tmp_path, write=True), **SMALL)
    assert written(path) == OTHER == TABLE.get(90)
    printed = capsys.readouterr().out
    assert "tile 512 num_warps 4 programs_per_sm 4    2.0000 ms chosen" in printed
    assert "ms present" in printed
    kept = json.loads((tmp_path / "tune.json").read_text())["places"][GELU.name]
    assert kept["ms"][tune.shown(GOOD)] == [2.0, 2.0]


def test_a_wrong_config_is_refused_with_its_numbers_however_fast(
    table, monkeypatch, tmp_path, capsys
):
    from fastpar.kernels import gelu_triton

    path, _ = table
    right = gelu_triton.bias_gelu_fwd

    def wrong_with_other(*args):
        return right(*args) * (1.01 if TABLE.get(90) == OTHER else 1.0)

    monkeypatch.setattr(gelu_triton, "bias_gelu_fwd", wrong_with_other)
    found = tune.run([GELU], session(tmp_path, write=True), **SMALL)
    assert written(path) == GOOD
    assert "error of y is" in found[GELU.name].refused[tune.shown(OTHER)]
    assert "programs_per_sm 4 refused: at tanh" in capsys.readouterr().out


def test_forced_reaches_the_launch_and_is_undone(triton_device, monkeypatch):
    from fastpar.kernels import attention, attention_bwd_triton, attention_triton

    seen = []
    for module in (attention_triton, attention_bwd_triton):
        launch = module.launch
        monkeypatch.setattr(
            module,
            "launch",
            lambda kernel, *args, _launch=launch, **kwargs: (
                seen.append((kernel.__name__, kwargs["BLOCK_Q"], kwargs["BLOCK_K"])),
                _launch(kernel, *args, **kwargs),
            ),
        )
    place = ("bwd_dkdv", 16, "fp32")
    case = Case(triton_device, "attention", FP32, 16)
    entry = Entry(case, 1.0, attention_configs.TABLE, place, 1)
    small = attention_configs.Config(16, 16, 4, 1, "ptr")
    before = attention_configs.get_config(90, *place)
    q, k, v = (torch.randn(1, 20, 1, 16, device=triton_device).requires_grad_() for _ in range(3))
    with tune.forced(entry, small):
        attention(q, k, v).sum().backward()
    by_name = {name: tile for name, *tile in seen}
    assert by_name["_attention_bwd_dkdv_kernel"] == [16, 16]
    assert by_name["_attention_bwd_dq_kernel"] != [16, 16]
    assert attention_configs.get_config(90, *place) == before


# Implementations, on a CPU


def peers(monkeypatch, **found):
    """Others' attention for CPU tensors: name -> what becomes of the output of torch's kernel."""
    cpu = attention_peers.PEERS["cpu"]

    def forward(change):
        def run(*args):
            o, lse = cpu.forward(*args)
            return change(o), lse

        return run

    for name, change in found.items():
        peer = Peer(forward(change), cpu.backward, "cpu", cpu.dtypes, cpu.most)
        monkeypatch.setitem(attention_peers.PEERS, name, peer)


def test_wrong_and_slow_implementations_are_not_chosen(monkeypatch, tmp_path, capsys):
    peers(monkeypatch, wrong=lambda o: o * 1.001, slow=lambda o: time.sleep(0.05) or o)
    listed = [PROOF, ATTENTION]
    found = tune.run(listed, session(tmp_path), minutes=5.0, rows=64)
    assert list(found) == [ATTENTION.name, PROOF.name]  # longest expected gain first
    outcome = found[ATTENTION.name]
    assert "error of o is" in outcome.refused["wrong"]
    assert "wrong refused: at B=1 T=64" in capsys.readouterr().out
    assert outcome.ms["slow"][0] > 50
    # Their backward is that of "cpu", so any of the right ones may be chosen for it.
    assert "wrong" not in outcome.chosen
    assert outcome.chosen.split(" / ")[0] != "slow"
    content = json.loads((tmp_path / "tune.json").read_text())
    assert set(parse_proofs("cpu", content)) == {ATTENTION.case, PROOF.case}


def test_a_wrong_own_kernel_is_refused_with_its_numbers(monkeypatch, tmp_path):
    own = gelu._bias_gelu_cpp
    monkeypatch.setattr(gelu, "_bias_gelu_cpp", lambda x, bias: own(x, bias) * 1.001)
    outcome = tune.run([PROOF], session(tmp_path), minutes=5.0, rows=64)[PROOF.name]
    assert outcome.chosen == STOCK
    assert "error of y is" in outcome.refused[OWN]


def test_the_command_works_through_a_cpus_list(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tune, "DEFAULT_ROWS", {"cpu": 64})
    out = tmp_path / "found.json"
    assert door.main(["tune", "--device", "cpu", "--out", str(out), "bias_gelu", "layer_norm"]) == 0
    printed = capsys.readouterr().out
    places = json.loads(out.read_text())["places"]
    assert {name.split()[0] for name in places} == {
        "bias_gelu", "layer_norm", "residual_layer_norm",
    }  # fmt: skip
    assert all(name in printed for name in places)
    assert "no table that ships was written" in printed


# The list


def test_the_list_is_ordered_and_its_places_are_those_of_the_tables():
    listed = tune.entries("cuda", torch.bfloat16)
    gains = [entry.gain_ms for entry in listed]
    assert gains == sorted(gains, reverse=True)
    assert len({entry.name for entry in listed}) == len(listed)
    for entry in listed:
        if entry.table is not None:
            assert entry.place in entry.table.places
            for arch in (80, 86, 90):
                assert len(entry.configs(arch)) >= 2
    tables = {entry.table.name for entry in listed if entry.table is not None}
    assert tables == set(TABLES)


@pytest.mark.slow
def test_all_configs_are_compiled_without_a_gpu(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert door.main(["tune", "--compile", "90", "gelu", "--alternative", "programs_per_sm 3"]) == 0
    assert "configs of 1 places compiled" in capsys.readouterr().out
    warps = {json.loads(p.read_text())["num_warps"] for p in tmp_path.rglob("_bias*fwd*.json")}
    assert warps == {config.num_warps for config in gelu_configs.candidates(90)}


def test_a_forced_alternative_that_cannot_run_is_refused_by_name():
    listed = tune.entries("cuda", torch.bfloat16)
    tiles = [entry for entry in listed if entry.table is attention_configs.TABLE]
    with pytest.raises(ValueError, match="got alternative=load tma: it is for sm_90; leave"):
        tune.choose(tiles, [], "load tma", 80)
    assert tune.choose(tiles, [], "load tma", 90)
    cpu = tune.entries("cpu", FP32)
    with pytest.raises(ValueError, match="alternative=hopper: it needs cuda tensors, not cpu"):
        tune.choose(cpu, [], "hopper", 0)
    assert [e.case.op for e in tune.choose(cpu, [], "cpu", 0)] == ["attention"]
    with pytest.raises(ValueError, match="alternative=magic: no place has one of this name"):
        tune.choose(listed, [], "magic", 90)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["everything"], "tune: expected a part of a place's name, got names=everything; one of"),
        (["--minutes", "0"], "tune: expected minutes > 0, got minutes=0"),
        (["--commit-results"], "tune: expected a GPU with --commit-results, got device=cpu"),
        (["--compile", "70"], "tune: expected arch in .80, 86, 89, 90, 100, 120., got arch=70"),
    ],
)
def test_bad_calls_are_one_line(argv, said, capsys):
    assert door.main(["tune", "--device", "cpu", *argv]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(said, error), error
