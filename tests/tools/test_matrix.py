"""bench.systems.matrix and red_rows: what a row says, and what becomes of another run."""

import json

import pytest

from bench.systems import matrix, red_rows


@pytest.fixture
def short(monkeypatch):
    """Four steps instead of twenty."""
    monkeypatch.setattr(matrix, "AT", (2, 4))
    monkeypatch.setitem(matrix.SETTINGS, "max_steps", 4)


def refuses(*_):
    raise ValueError("not here\nmore")


def test_names_tell_layouts_apart():
    names = [matrix.name_of(*layout) for layout in matrix.LAYOUTS]
    assert len(set(names)) == len(names)
    assert len(names) >= 40
    assert {1, 2, 4, 8} <= {ranks for ranks, _ in matrix.LAYOUTS}
    assert "4 ranks, experts, ep 2, pp 2" in names


def test_a_layout_is_compared_with_its_own_run_of_one_process(short):
    changes = {"optimizer": "muon", "zero_stage": 1}
    assert matrix.reference_of(changes) == {"optimizer": "muon"}
    (row,) = matrix.fastpar_rows([(2, changes)])
    assert matrix.difference(row["deterministic"]) == 0.0
    assert matrix.difference(row["default"]) < 1e-5
    first, last = row["deterministic"]["losses"]
    assert 4.0 < last < first < 5.6  # it learned something


def test_another_run_is_an_error(short, monkeypatch, capsys, tmp_path):
    """A layout with another seed of its weights."""
    real = matrix.losses_of

    def wrong(layout, **more):
        return real(layout, **more, **({"seed": 2} if layout[0] == 2 else {}))

    monkeypatch.setattr(matrix, "losses_of", wrong)
    only = ["fastpar", "--only", "2 ranks, zero 1", "--into", str(tmp_path)]
    assert matrix.main(only) == 1
    assert "another run: 2 ranks, zero 1" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_rounded_numbers_on_the_wire_make_another_run_that_repeats_itself(short):
    (row,) = matrix.by_design_rows([(2, {"wire_gradients": "int8"})])
    assert 0 < matrix.difference(row["default"]) < 0.1
    assert matrix.difference(row["again"]) == 0.0
    assert not matrix._wrong(row)
    row["again"]["beside"] = row["default"]["beside"]
    assert matrix._wrong(row)


def test_the_table_and_the_picture(tmp_path):
    mode = {"losses": [4.5, 3.5], "beside": [4.5, 3.25]}
    machine = {
        "device": "cpu", "cpu": "one", "cores": 2, "torch": "2", "triton": None, "commit": "abc",
        "dirty": False, "date": "today",
    }  # fmt: skip
    same = {"losses": [4.5, 3.5], "beside": [4.5, 3.5]}
    own = {"layout": "2 ranks, tp 2", "settings": {"tp": 2}, "deterministic": same, "default": mode}
    other = {"layout": "DDP, 2 ranks", "who": "DDP", "no dropout": same, "dropout": mode}
    refused = {"layout": "FSDP2, 2 ranks", "who": "FSDP2", "refused": "no such thing"}
    designed = {"layout": "2 ranks, int8", "default": mode, "again": same}
    for name, rows in (("fastpar", [own]), ("peers", [other, refused])):
        found = {"machine": machine, "versions": "torch 2", "rows": rows, "by_design": [designed]}
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    matrix.main(["table", "--into", str(tmp_path)])
    text = (tmp_path / "README.md").read_text()
    assert "| 2 ranks, tp 2 | 4.5 | 3.5 | 0 | 2.5e-01 |" in text
    assert "| 2 ranks, int8 | 4.5 | 3.5 | 2.5e-01 | 0 |" in text
    assert "| DDP, 2 ranks | 4.5 | 3.5 | 0 | 2.5e-01 |" in text
    assert "| FSDP2, 2 ranks | - | no such thing | - | - |" in text
    assert "0.155" in text
    assert (tmp_path / "matrix.png").stat().st_size > 10_000


@pytest.mark.parametrize("name", ["a tied table", "unequal targets, counted"])
def test_a_step_of_fastpar_is_right(name):
    program = next(p for p in red_rows.PROGRAMS if p.name == name)
    way = next(w for w in program.ways if w.name == "fastpar ZeRO-2")
    assert red_rows.error_of(program, way) < 1e-4


def test_a_wrong_step_and_a_refused_one_are_told(monkeypatch, tmp_path, capsys):
    """Means are averaged over unequal numbers of targets; a way that raises is no error of ours."""
    ways = (red_rows.WAYS[0], red_rows.Way("torch other", red_rows.TORCH, refuses))
    program = next(p for p in red_rows.PROGRAMS if p.name == red_rows.AVERAGED)
    monkeypatch.setattr(red_rows, "PROGRAMS", (red_rows.replace(program, ways=ways),))
    monkeypatch.setattr(red_rows, "LAYOUTS", ())
    assert red_rows.main(["--into", str(tmp_path)]) == 0
    wrong, refused = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert wrong["verdict"] == "wrong"
    assert wrong["error"] > 0.05
    assert refused["verdict"] == "refused"
    assert "not here" in refused["why"]
    assert "**wrong**" in (tmp_path / "README.md").read_text()
