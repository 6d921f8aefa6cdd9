"""What a result says of its machine: enough to compare, nothing private."""

import json
import os
import re
import subprocess

from fastpar.doctor.table import cpu_name
from fastpar.predict import machine
from fastpar.predict.machine import about_machine, commit, version_of


def test_a_result_names_machine_and_versions():
    about = about_machine("cpu")
    assert about["device"].startswith(f"CPU: {cpu_name()}, ")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", about["date"])
    assert about["torch"]
    assert about["cores"] >= 1
    text = json.dumps(about)
    assert os.path.expanduser("~") not in text
    assert os.getcwd() not in text


def test_a_package_that_is_missing_has_no_version():
    assert version_of("no-such-package-of-ours") is None
    assert version_of("torch")


def test_the_commit_is_that_of_the_checkout_or_of_the_environment(monkeypatch):
    def fails(*args, **kwargs):
        raise FileNotFoundError("git")

    found = commit()
    assert found is None or re.fullmatch(r"[0-9a-f]{12}\+?", found)
    monkeypatch.setattr(subprocess, "run", fails)
    monkeypatch.setenv("FASTPAR_COMMIT", "abc")
    assert commit() == "abc"


def test_changes_of_the_checkout_are_marked(monkeypatch):
    answers = iter(["0123456789ab", " M fastpar/x.py"])
    monkeypatch.setattr(machine, "_output", lambda command: next(answers))
    assert commit() == "0123456789ab+"
