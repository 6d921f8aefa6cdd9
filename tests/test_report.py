"""The report: tables between markers, from the newest rows of one machine."""

import pytest
from test_records import ABOUT, make_row

from bench import report
from bench.records import ResultFile


@pytest.fixture
def results(tmp_path):
    """A folder with two files of one machine and one of an older machine."""
    folder = tmp_path / "results"
    old = {**ABOUT, "cpu": "Old CPU", "date": "2025-12-31"}
    ResultFile(folder / "z.json", old).add(
        make_row(median_ms=77.0), make_row(case="gone", variant="fastpar")
    )
    first = {**ABOUT, "date": "2026-01-01"}
    ResultFile(folder / "b.json", first).add(
        make_row(median_ms=55.0),
        make_row(bench="train", case="6x384", direction="step", tokens_per_s=600.0),
    )
    ResultFile(folder / "a.json", ABOUT).add(
        make_row(),
        make_row(variant="fastpar", median_ms=0.5, speedup=4.0),
        make_row(variant="torch.compile", median_ms=1.0),
        make_row(case="other", variant="fastpar", median_ms=None, refused="red check"),
        make_row(
            bench="train",
            case="char 4x128",
            direction="step",
            variant="fastpar",
            notes={"total_s": 90.25, "val_loss": 1.23456, "max_loss_difference": 2e-6},
        ),
    )
    return folder


def test_report_writes_between_markers_only(results):
    text = "before\n<!-- bench:ops-cpu -->\nold\n<!-- /bench:ops-cpu -->\nafter\n"
    new = report.update(text, results)
    assert new.startswith("before\n<!-- bench:ops-cpu -->\n| op |")
    assert new.endswith("<!-- /bench:ops-cpu -->\nafter\n")
    assert "old" not in new
    assert "| bias_gelu N=1 F=2, forward | 2 (eager) | 1 (torch.compile) | 0.5 | 2.00x |" in new
    assert "refused: red check" in new
    assert "CPU: Test CPU (R) 9000, 2 cores" in new
    assert "77" not in new
    assert "gone" not in new  # another machine's
    assert report.update(new, results) == new


def test_report_takes_each_key_from_its_newest_file(results):
    text = report.render("train-cpu", results)  # only the older file of this machine has it
    assert "| 6x384 | eager | 1 x 2 | 2 | 600 | 1.00x |" in text
    assert "55" not in report.render("ops-cpu", results)


def test_report_of_the_char_run(results):
    text = report.render("char-cpu", results)
    assert "| char 4x128 | fastpar | 90.2 | 2 | 1.00x | 1.2346 | 2.0e-06 |" in text


def test_report_refuses_what_it_cannot_fill(results):
    with pytest.raises(ValueError, match=r"render: expected one of train-cpu, .*, got name=nope"):
        report.update("<!-- bench:nope -->\n<!-- /bench:nope -->\n", results)
    with pytest.raises(ValueError, match="update: expected <!-- /bench:ops-cpu --> after"):
        report.update("<!-- bench:ops-cpu -->\n", results)
    with pytest.raises(ValueError, match="newest: expected results of device cuda, got none"):
        report.update("<!-- bench:ops-cuda -->\n<!-- /bench:ops-cuda -->\n", results)
    with pytest.raises(ValueError, match="render: expected rows for the table ceilings-cpu"):
        report.update("<!-- bench:ceilings-cpu -->\n<!-- /bench:ceilings-cpu -->\n", results)


def test_report_check_tells_a_stale_file(results, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(report.update, "__defaults__", (results,))
    readme = tmp_path / "README.md"
    readme.write_text("<!-- bench:ops-cpu -->\n<!-- /bench:ops-cpu -->\n")
    assert report.main([str(readme), "--check"]) == 1
    assert report.main([str(readme)]) == 0
    assert report.main([str(readme), "--check"]) == 0
    readme.write_text("<!-- bench:ops-cpu -->\n")
    assert report.main([str(readme)]) == 2
    assert "update: expected" in capsys.readouterr().err


def test_summary_has_a_line_for_each_case():
    text = report.summary([make_row(), make_row(variant="fastpar", refused="x", median_ms=None)])
    assert text == "bias_gelu N=1 F=2, fwd, ms: eager 2 (34 %) | fastpar refused"
