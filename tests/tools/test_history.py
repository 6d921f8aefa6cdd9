"""The history of speed-ups: from commits, offline, with drops flagged."""

import json
import subprocess

import pytest
from test_records import ABOUT, make_row

from bench.records import ResultFile
from bench.report import history
from bench.report.history import Point, drop, points_of, render, versions


def text(*rows, **about):
    lines = [row.to_json() for row in rows]
    return json.dumps({"schema": 1, "machine": {**ABOUT, **about}, "rows": lines})


def ours(speedup, commit, **more):
    return make_row(variant="fastpar", speedup=speedup, commit=commit, date="2026-01-02", **more)


def git(folder, *command):
    me = ["-c", "user.name=me", "-c", "user.email=me@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *me, *command], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path):
    """Results of three commits: 2x, 3x, and 2.5x in a file of another day."""
    folder = tmp_path / "results"
    git(tmp_path, "init", "-q")
    for name, speedup in (("a.json", 2.0), ("a.json", 3.0), ("b.json", 2.5)):
        results = ResultFile(folder / name, {**ABOUT, "commit": f"c{speedup}"})
        results.add(make_row(variant="fastpar", speedup=speedup), make_row())
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "-q", "-m", "results")
    return folder


def test_every_measurement_of_every_commit_counts_once(repository):
    texts, remark = versions(repository)
    assert remark == ""
    (points,) = points_of(texts).values()
    assert [(p.commit, p.speedup) for p in points] == [("c2.0", 2.0), ("c3.0", 3.0), ("c2.5", 2.5)]
    page = history.write(repository).read_text()
    assert "| 2.00x (c2.0) -> 3.00x (c3.0) -> 2.50x (c2.5) | **-17 %** |" in page
    assert "1 rows of fastpar have been measured, 1 of them more than once; 1 fell by" in page
    assert history.write(repository).read_text() == page


def test_a_shallow_clone_says_so(repository, tmp_path):
    git(tmp_path, "clone", "-q", "--depth=1", f"file://{tmp_path}", "copy")
    texts, remark = versions(tmp_path / "copy" / "results")
    assert remark == "A shallow clone: older commits are missing here."
    (points,) = points_of(texts).values()
    assert 1 <= len(points) <= 2
    assert remark in history.write(tmp_path / "copy" / "results").read_text()


def test_without_git_there_are_the_files_as_they_are(repository, monkeypatch):
    monkeypatch.setattr(history, "_git", lambda *args: None)
    texts, remark = versions(repository)
    assert len(texts) == 2
    assert remark == "No git history here: only the files as they are."


def test_files_that_are_gone_or_of_another_format_are_passed_over():
    assert points_of(["", "[1]", '{"rows": []}']) == {}


def test_rows_of_others_and_of_the_baseline_have_no_history():
    rows = [make_row(), make_row(variant="fastpar", baseline="fastpar", speedup=1.0)]
    rows += [make_row(variant="fastpar", baseline=None, speedup=None)]
    assert points_of([text(*rows)]) == {}


def test_machines_are_apart():
    found = points_of([text(ours(2.0, "a")), text(ours(1.0, "b"), cpu="Other")])
    assert [len(points) for points in found.values()] == [1, 1]
    assert "| row |" not in render(found, "")


@pytest.mark.parametrize(
    ("points", "fraction"),
    [
        ([("eager", 2.0)], 0.0),
        ([("eager", 2.0), ("eager", 1.5)], 0.25),
        ([("eager", 2.0), ("eager", 2.5)], 0.0),
        ([("eager", 2.0), ("compile", 1.0)], 0.0),  # against something else
    ],
)
def test_a_drop_is_of_the_last_two(points, fraction):
    assert drop([Point("c", "d", *p) for p in points]) == pytest.approx(fraction)


def test_the_largest_drops_come_first_and_small_ones_are_not_flagged():
    cases = {"small": (2.0, 1.9), "up": (1.0, 2.0), "large": (4.0, 1.0), "drop": (2.0, 1.5)}
    texts = [text(*(ours(s[i], f"c{i}", case=c) for c, s in cases.items())) for i in (0, 1)]
    page = render(points_of(texts), "")
    lines = [line.split(" | ") for line in page.splitlines() if line.startswith("| bias_gelu: ")
             or line.startswith("| gelu: ")]  # fmt: skip
    assert [line[0].split(": ")[1].split(",")[0] for line in lines] == [
        "large",
        "drop",
        "small",
        "up",
    ]
    assert [line[-1] for line in lines] == ["**-75 %** |", "**-25 %** |", "-5 % |", "+100 % |"]
