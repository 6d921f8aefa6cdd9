"""The file of a machine's proofs: damage, other versions, strangers, several hosts."""

import json
from types import SimpleNamespace

import pytest
import torch
from proofs import GELU, table_with

from fastpar.doctor import table as table_module
from fastpar.doctor.table import ProofTable
from fastpar.kernels.choice import OWN, STOCK, Proof


def test_a_damaged_file_is_told_ignored_and_replaced(no_proofs):
    table = table_with({GELU: Proof(OWN)})
    sound = table.path.read_text()
    for damaged in (
        "", "[]", "{", sound.replace('"own"', '"mine"'), sound.replace("float32", "Tensor"),
        sound.replace("0.0", "-1.0", 1), sound.replace("0.0", "NaN", 1),
        sound.replace('"version": 3', '"version": 2'),
        sound.replace(f'"torch": "{torch.__version__}"', '"torch": "1.0"'),
    ):  # fmt: skip
        assert damaged != sound
        table.path.write_text(damaged)
        with pytest.warns(UserWarning, match=f"{table.path.name} in .* are not used"):
            assert ProofTable("cpu").proofs == {}
    table.save()
    assert ProofTable("cpu").proofs == {GELU: Proof(OWN)}


def test_a_shipped_table_serves_every_build_of_the_same_kernels(monkeypatch, tmp_path):
    table = table_with({GELU: Proof(OWN)})
    content = json.loads(table.path.read_text())
    table.path.unlink()
    content["about"]["module"] = "of another machine's compiler"
    (tmp_path / table.path.name).write_text(json.dumps(content))
    monkeypatch.setattr(table_module, "SHIPPED", tmp_path)
    assert ProofTable("cpu").proofs == {GELU: Proof(OWN)}
    content["about"]["torch"] = "1.0"
    (tmp_path / table.path.name).write_text(json.dumps(content))
    with pytest.warns(UserWarning, match="are not used"):
        assert ProofTable("cpu").proofs == {}


def test_proofs_of_another_version_are_told(no_proofs, monkeypatch):
    table = table_with({GELU: Proof(OWN)})
    table.path.rename(table.path.with_name(table.path.name[:-13] + "deadbeef.json"))
    with pytest.warns(UserWarning, match="1 of another version of fastpar, torch or the driver"):
        assert ProofTable("cpu").proofs == {}


def test_what_is_no_table_is_told_and_ignored(no_proofs, tmp_path):
    """A cache that somebody else wrote wrong."""
    table = table_with({GELU: Proof(OWN)})
    sound, path = json.loads(table.path.read_text()), table.path
    (row,) = sound["proofs"]
    for wrong in (
        {"tried": {"x": 1e999}}, {"tried": {"x": -1}}, {"proofs": [row | {"size": 1e999}]},
        {"proofs": [row | {"own_ms": [1e300 * 1e10, 0]}]}, {"proofs": [row | {"wrong": 7}]},
        {"proofs": [row | {"wrong": "\x1b[2J"}]}, {"proofs": [row | {"wrong": "x" * 5000}]},
        {"proofs": [row | {"serves": ["own"]}]}, {"proofs": [row | {"serves": ["own", "other"]}]},
        {"proofs": [row | {"peers": [{"name": "cpu"}]}]},
        {"proofs": [row | {"peers": [{"name": "cpu", "wrong": "", "ms": [-1, 0]}]}]},
        {"proofs": [row | {"op": ["bias_gelu"]}]}, {"proofs": [row | {"size": "96"}]},
        {"proofs": [row] * 100_000},
    ):  # fmt: skip
        path.write_text(json.dumps(sound | wrong))
        with pytest.warns(UserWarning, match=f"{path.name} in .* are not used"):
            assert ProofTable("cpu").proofs == {}
    path.write_text("[" * 100_000)
    with pytest.warns(UserWarning, match="nested too deeply"):
        assert ProofTable("cpu").proofs == {}
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.warns(UserWarning, match="a symbolic link"):
        assert ProofTable("cpu").proofs == {}
    with pytest.warns(UserWarning, match="a symbolic link"):
        table_with({GELU: Proof(STOCK)})  # replaces the link, not what it leads to
    assert not path.is_symlink()
    assert ProofTable("cpu").proofs == {GELU: Proof(STOCK)}
    path.unlink()
    path.mkdir()
    with pytest.warns(UserWarning, match="not a regular file") as told:
        ProofTable("cpu").save()
    assert len(told) == 1


def test_hosts_that_share_a_folder_without_locks_do_not_count_each_others_trials(monkeypatch):
    def no_lock(*args):
        raise OSError("no locks available")

    monkeypatch.setattr(table_module.fcntl, "flock", no_lock)
    tables = [ProofTable("cpu") for _ in range(3)]  # hosts with the same GPU
    trials = []
    for table in tables:
        with table.locked():
            trials.append(table.trial(GELU))
            assert trials[-1].__enter__() == ""  # all at it at the same time


def test_a_driver_is_named_without_its_file(monkeypatch):
    def version(address):
        address._obj.value = 13_020
        return 0

    def no_file(*args):
        raise FileNotFoundError

    monkeypatch.setattr(table_module.Path, "read_text", no_file)
    for load, named in (
        (lambda name: SimpleNamespace(cuDriverGetVersion=version), "of CUDA 13.2"),
        (no_file, "unknown"),
    ):
        monkeypatch.setattr(table_module.ctypes, "CDLL", load)
        assert table_module._driver() == named


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
