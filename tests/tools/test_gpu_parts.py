"""The parts of `make gpu`: time is shared out, what was found is kept, and becomes results."""

import io
import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
import torch

from bench import gpu, ingest
from bench.gpu import PARTS, Part, Step
from bench.records import ResultFile, Row, load, machine
from fastpar.doctor.table import VERSION

ROOT = Path(__file__).resolve().parents[2]


def says(name, code, most_s=20.0, **more):
    return Step(name, ["-c", code], most_s, **more)


def members(out):
    (archive,) = out.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = [name.partition("/")[2] for name in tar.getnames()]
        text = tar.extractfile(next(n for n in tar.getnames() if n.endswith("summary.txt"))).read()
    return archive, names, text.decode()


def test_steps_fail_alone_and_the_archive_is_complete_after_each(tmp_path):
    part = Part(1, "cpu", tmp_path, time.time())
    part.run(says("first one", "print('a number: 7'); print('noise')", shown="number"), 0)
    part.archive()
    _, names, summary = members(tmp_path)
    assert "first_one.log" in names
    assert "first one: ok" in summary
    assert "a number: 7" in summary
    assert "noise" not in summary
    part.run(says("second", "raise SystemExit(3)"), 0)
    part.run(says("third", "import time; print('begun', flush=True); time.sleep(60)", 1.5), 0)
    part.run(says("fourth", "print('still there')"), 0)
    part.run(Step("no test", ["-c", "raise SystemExit(5)", "pytest"], 20), 0)
    part.archive()
    _, names, summary = members(tmp_path)
    assert "second: FAILED, exit status 3" in summary
    assert "third: FAILED, stopped after 2 s" in summary
    assert "begun" in summary
    assert "still there" in summary
    assert "no test: none is collected here" in summary
    assert summary.rstrip().endswith("FAILED: second, third")


def test_a_step_leaves_later_ones_their_time(tmp_path, monkeypatch):
    limits = []
    monkeypatch.setattr(
        gpu, "_run", lambda command, limit, log: limits.append(limit) or log.touch()
    )
    part = Part(1, "cpu", tmp_path, time.time() - gpu.LIMIT_S + 100)
    part.run(says("long", "", most_s=500), 70)
    assert 25 < limits[0] <= 30
    part.run(says("late", ""), 99)
    assert "late: NOT STARTED, no time is left" in part.lines
    assert len(limits) == 1


def test_a_tool_that_is_missing_is_said(tmp_path):
    part = Part(1, "cpu", tmp_path, time.time())
    part.run(says("sanitizer", "", program="no-such-sanitizer"), 0)
    assert part.lines[-1] == "sanitizer: left out, no-such-sanitizer is not installed"
    assert not part.failed


def test_a_summary_has_100_lines_at_most(tmp_path):
    part = Part(1, "cpu", tmp_path, time.time())
    for i in range(30):
        part.lines += [f"step {i}: ok", *(f"    detail {j}" for j in range(14))]
    lines = part.summary()
    assert len(lines) <= gpu.MOST_LINES
    assert [line for line in lines if line.startswith("step")] == [
        f"step {i}: ok" for i in range(30)
    ]
    assert lines[-1] == "all steps are ok"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_parts_fit_their_time_and_name_what_exists(device, tmp_path):
    for number, steps in PARTS.items():
        found = steps(device, True, tmp_path)
        assert sum(step.least_s for step in found[1:]) < gpu.LIMIT_S / 2, number
        for step in found:
            for word in step.command:
                if word.startswith("tests/"):
                    assert (ROOT / word).exists(), word


def test_an_archive_becomes_results(tmp_path):
    about = {**machine("cpu"), "device": "cuda", "gpu": "A GPU", "driver": "1", "cuda": "13"}
    folder = tmp_path / "gpu_part2_a-gpu"
    row = Row("gelu", "tanh", "forward", "fastpar", "cuda", dtype="bfloat16", threads=1)
    ResultFile(folder / "rows.json", about).add(row)
    proofs = {"version": VERSION, "about": {"device": "A GPU"}, "proofs": []}
    (folder / "proofs.json").write_text(json.dumps(proofs))
    (folder / "summary.txt").write_text("part 2\n")
    archive = tmp_path / "part.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, arcname=folder.name)
    package = tmp_path / "package"
    (package / "fastpar" / "doctor").mkdir(parents=True)
    said = ingest.ingest(archive, tmp_path / "results", package)
    assert said[0].startswith("1 rows in a-gpu_")
    (rows,) = (tmp_path / "results").glob("*.json")
    assert [r.key for r in load(rows)[1]] == [row.key]
    (shipped,) = (package / "fastpar" / "doctor" / "shipped").iterdir()
    assert shipped.name.startswith("a-gpu_")
    assert json.loads(shipped.read_text())["version"] == VERSION  # else it would be ignored
    kept = tmp_path / "results" / "gpu" / "gpu_part2_a-gpu_summary.txt"
    assert kept.read_text() == "part 2\n"


def test_a_rehearsal_is_no_result(tmp_path, capsys):
    part = Part(2, "cpu", tmp_path, time.time(), gpu.REHEARSAL)
    archive = part.archive()
    assert ingest.main([str(archive)]) == 2
    assert "got the rehearsal rehearsal_part2_" in capsys.readouterr().err
    assert ingest.ingest(archive, tmp_path / "looked at", tmp_path) == [
        f"gpu/{part.name}_summary.txt"
    ]


def test_what_is_no_archive_is_refused_and_nothing_leaves_its_folder(tmp_path):
    wrong = tmp_path / "wrong.tar.gz"
    wrong.write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"expected an archive of `make gpu`, got path=wrong"):
        ingest.ingest(wrong, tmp_path / "results", tmp_path)
    with tarfile.open(wrong, "w:gz") as tar:
        member = tarfile.TarInfo("../outside.txt")
        tar.addfile(member, io.BytesIO())
    with pytest.raises(ValueError, match="expected an archive"):
        ingest.ingest(wrong, tmp_path / "results", tmp_path)
    assert ingest.main([str(wrong)]) == 2
    assert not (tmp_path.parent / "outside.txt").exists()


def script(*arguments, **env):
    command = ["bash", str(ROOT / "bench" / "gpu.sh"), *arguments]
    env = {**os.environ, "PYTHON": sys.executable, "FASTPAR_GPU_BUILD": "none", **env}
    return subprocess.run(command, env=env, capture_output=True, text=True)


@pytest.mark.slow
def test_the_script_refuses_bad_arguments(tmp_path):
    failed = script("--part", "nope", OUT=str(tmp_path))
    assert failed.returncode == 2
    assert "invalid int value: 'nope'" in failed.stderr
    if not torch.cuda.is_available():
        failed = script(OUT=str(tmp_path))
        assert failed.returncode == 2
        assert "gpu.sh: expected a GPU that torch can use, got none" in failed.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", ["1", "2", "3"])
def test_a_rehearsal_without_a_gpu(part, tmp_path):
    done = script("--device", "cpu", "--quick", "--part", part, OUT=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all steps are ok" in done.stdout
    archive, names, summary = members(tmp_path)
    assert str(archive) in done.stdout
    assert "build.log" in names
    assert len(summary.splitlines()) <= gpu.MOST_LINES
    into = tmp_path / "looked at"
    if part == "1":  # no rows
        assert ingest.ingest(archive, into, tmp_path)
    else:
        assert ingest.main([str(archive), "--into", str(into)]) == 0
        assert "quick" in (into / "report.md").read_text()
