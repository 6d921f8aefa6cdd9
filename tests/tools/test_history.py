"""The history of speed-ups: from commits, offline, with drops flagged."""

import subprocess

import pytest
from test_records import ABOUT, make_row

from bench.records import ResultFile
from bench.report import history
from bench.report.history import Point, drop, points_of, versions


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


def test_without_git_there_are_the_files_as_they_are(repository, monkeypatch):
    monkeypatch.setattr(history, "_git", lambda *args: None)
    texts, remark = versions(repository)
    assert len(texts) == 2
    assert remark == "No git history here: only the files as they are."


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
