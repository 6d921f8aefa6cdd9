"""The report: tables between markers and pictures, from the newest rows of one machine."""

from dataclasses import replace

import pytest
from test_records import ABOUT, make_row

from bench.ops.errors import ErrorRow
from bench.records import RESULTS, ResultFile
from bench.report import pictures, report, tables
from bench.report.cells import newest
from bench.targets import Target, faster, note, targets_of


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
            notes={
                "total_s": 90.25,
                "time_ratio": 0.5,
                "val_loss": 1.23456,
                "max_loss_difference": 2e-6,
            },
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


def test_headline_shows_what_passed_beside_the_fastest_other(tmp_path):
    """Slower rows say so, refused and missing ones are left out, other GPU sizes are found."""

    def save(variant, median_ms, **changes):
        values = {"bench": "checkpoint", "case": "GPT-2 124M and AdamW, one process"}
        return make_row(**{**values, "direction": "save", "baseline": None, "speedup": None,
                           "variant": variant, "median_ms": median_ms, **changes})  # fmt: skip

    case = {
        "bench": "gelu",
        "case": "bias_gelu N=9 F=3072",
        "direction": "forward+backward",
        "speedup": None,
    }
    loss = {"bench": "cross_entropy", "case": "cross_entropy N=9 V=50304"}
    zero = {"bench": "zero", "case": "GPT-2 124M T=256 B=1 a rank, 2 ranks", "direction": "step"}
    ResultFile(tmp_path / "cpu.json", ABOUT).add(
        make_row(**case),
        make_row(**case, variant="torch.compile", median_ms=1.5),
        make_row(**case, variant="fastpar", median_ms=0.5),
        make_row(**{**case, **loss}),
        make_row(**{**case, **loss}, variant="fastpar", median_ms=None, refused="red check"),
        save("torch.save", 1.0),  # does not wait for the disk, as fastpar does
        save("torch.save, flushed", 9.0),
        save("torch DCP", 2.0),
        save("fastpar", 4.0),
        make_row(**zero, variant="one process", median_ms=1.0, baseline="DDP", speedup=9.0),
        make_row(**zero, variant="DDP", median_ms=6.0, baseline="DDP", speedup=1.0),
        make_row(**zero, variant="FSDP2", median_ms=5.0, baseline="DDP", speedup=0.9),
        make_row(**zero, variant="fastpar ZeRO-2", median_ms=4.0, baseline="DDP", speedup=2.0),
    )
    text = report.render("headline", tmp_path)
    _, _, *lines = [line for line in text.splitlines() if line.startswith("|")]
    assert lines == [
        "| bias + GELU: N=9 F=3072, forward+backward | 0.5 ms | 1.5 ms, torch.compile | 3.00x "
        "| not yet measured |",
        "| training step, ZeRO-2: GPT-2 124M T=256 B=1 a rank, 2 ranks | 4 ms | 6 ms, DDP | 2.00x "
        "| not yet measured |",
        "| checkpoint save to disk: GPT-2 124M and AdamW | 4 ms | 2 ms, torch DCP | 0.50x, slower "
        "| not yet measured |",
    ]
    about = {**ABOUT, "device": "cuda", "gpu": "GPU 9", "driver": "1", "cuda": "13.0"}
    on_gpu = {**case, "case": "bias_gelu N=99 F=3072", "device": "cuda"}
    ResultFile(tmp_path / "gpu.json", about).add(
        make_row(**on_gpu, median_ms=0.3), make_row(**on_gpu, variant="fastpar", median_ms=0.1)
    )
    text = report.render("headline", tmp_path)
    assert "3.00x | 0.1 ms, 3.00x eager |" in text
    assert "Test CPU (R) 9000, 2 cores; torch 2.13.0, triton none; GPU 9, driver 1" in text


def test_report_refuses_what_it_cannot_fill(results):
    with pytest.raises(ValueError, match=r"render: expected one of train, .*, got name=nope"):
        report.update("<!-- bench:nope -->\n<!-- /bench:nope -->\n", results)
    with pytest.raises(ValueError, match="update: expected <!-- /bench:ops-cpu --> after"):
        report.update("<!-- bench:ops-cpu -->\n", results)
    with pytest.raises(ValueError, match="newest: expected results of device cuda, got none"):
        report.update("<!-- bench:ops-cuda -->\n<!-- /bench:ops-cuda -->\n", results)
    with pytest.raises(ValueError, match="render: expected rows for the table checkpoint-cpu"):
        report.update("<!-- bench:checkpoint-cpu -->\n<!-- /bench:checkpoint-cpu -->\n", results)


@pytest.mark.parametrize("name", tables.TABLES)
def test_every_line_of_a_table_has_its_columns(name):
    """Also those of rows that were refused."""
    _, rows = newest("cpu", RESULTS)
    refused = [replace(row, refused="why", median_ms=None) for row in rows]
    for some in (rows, refused, []):
        for text in tables.TABLES[name](some).split("\n\n"):
            lines = [line for line in text.splitlines() if line.startswith("|")]
            assert len({line.count(" |") for line in lines}) <= 1


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


# Targets

TARGETS = [
    faster(1.5, "eager", "torch.compile"),
    Target("ceiling", 34.0),
    Target("memory", 0.15, ("eager",)),
    Target("host", 15.0),
]


def test_targets_survive_the_row_and_are_judged_by_the_report():
    ours = make_row(
        variant="fastpar", median_ms=1.0, peak_bytes=20, host_us=14.96, notes=note(TARGETS)
    )
    assert targets_of(type(ours).from_json(ours.to_json())) == TARGETS
    group = [make_row(peak_bytes=100), make_row(variant="torch.compile", median_ms=1.4), ours]
    text = tables.targets_table(group)
    for line in (
        "| >= 1.5x the best of eager, torch.compile | 1.40x | **no** |",
        "| >= 34 % of the ceiling | 34 % | yes |",
        "| peak <= 15 % of eager | 20.0 % | **no** |",
        "| host <= 15 us | 15.0 us | yes |",
    ):
        assert line in text
    assert tables.targets_table([make_row(peak_bytes=100)]).count("\n") == 1  # no targets


# Errors


def make_errors(**changes):
    values = {
        "op": "bias_gelu",
        "shape": "N=1 F=2",
        "dtype": "float32",
        "implementation": "cpp",
        "device": "cpu",
        "results": {"y": [3.0, 1.0, 2.0, 2.0, 0.5, 64], "dx": [1.0, 1.8, 4.0, 2.0, 0.5, 64]},
    }
    return ErrorRow(**{**values, **changes})


def test_errors_table_shows_the_worst_of_each_op_implementation_and_dtype(tmp_path):
    file = ResultFile(tmp_path / "errors" / "a.json", ABOUT, ErrorRow)
    file.add(
        make_errors(),
        make_errors(shape="N=9", results={"y": [9.0, 1.0, 2.0, 2.0, 0.5, 64]}),
        make_errors(implementation="triton"),
        make_errors(dtype="bfloat16", results={}, refused="why"),
    )
    text = report.render("errors-cpu", tmp_path)
    assert "| bias_gelu | cpp | float32 | 4.50x | y, N=9 | 0.90x | 1 of 2 shapes |" in text
    assert (
        "| bias_gelu | triton, interpreted | float32 | 1.50x | y, N=1 F=2 | 0.90x | 1 of 1 shapes |"
        in text
    )
    assert "| bias_gelu | cpp | bfloat16 |  |  |  | 0 of 1 shapes |" in text
    with pytest.raises(ValueError, match=r"got none in errors; run `python -m bench errors --dev"):
        report.render("errors-cuda", tmp_path)


# Pictures


def test_picture_shows_every_variant_case_and_direction(tmp_path, monkeypatch):
    """Bars by rate with their times; a refused variant in words; the ceiling; the machine."""
    from matplotlib import pyplot

    kept = []
    monkeypatch.setattr(pyplot, "close", kept.append)
    rows = [
        make_row(),
        make_row(variant="fastpar", median_ms=0.5, gb_per_s=48.0, percent_of_ceiling=96.0),
        make_row(variant="fastpar without dropout"),
        make_row(variant="torch.compile", median_ms=None, gb_per_s=None, refused="why"),
        make_row(direction="backward", case="bias_gelu N=9"),
    ]
    pictures.draw("gelu", [(ABOUT, rows)], tmp_path / "gelu.png")
    assert (tmp_path / "gelu.png").stat().st_size > 10_000
    (figure,) = kept
    forward, backward = figure.axes
    assert [bar.get_width() for bar in forward.patches] == [12.0, 48.0]
    words = [text.get_text().strip() for text in forward.texts]
    assert words == ["2 ms", "torch.compile: refused", "0.5 ms"]
    assert forward.get_title() == "gelu, forward, float32 (CPU)"
    assert forward.get_xlabel().startswith("GB/s")
    assert forward.lines[0].get_xdata()[0] == pytest.approx(50.0)
    assert [label.get_text() for label in backward.get_yticklabels()] == ["bias_gelu N=9"]
    assert "CPU: Test CPU (R) 9000, 2 cores" in figure.get_supxlabel()
    assert "dashed" in figure.get_supxlabel()
    monkeypatch.undo()
    pyplot.close(figure)


def test_the_door_draws_and_writes_everything(results, monkeypatch, tmp_path, capsys):
    from bench import __main__ as door
    from bench.report import history

    drawn = []
    readme = tmp_path / "README.md"
    readme.write_text("<!-- bench:ops-cpu -->\n<!-- /bench:ops-cpu -->\n")
    monkeypatch.setattr(report, "DOCUMENTS", [readme])
    monkeypatch.setattr(report.update, "__defaults__", (results,))
    monkeypatch.setattr(report, "draw_pictures", lambda: drawn.append("all"))
    assert door.main(["report", "--check"]) == 1
    assert door.main(["report", "--pictures"]) == 0
    assert readme.read_text().count("\n") == 2
    assert drawn == ["all"]
    assert door.main(["report"]) == 0
    assert drawn == ["all"] * 2
    assert door.main(["report", "--check"]) == 0
    assert door.main(["report", "--tables"]) == 0
    assert drawn == ["all"] * 2
    monkeypatch.setattr(history, "write", lambda: tmp_path / "history.md")
    assert door.main(["report", "--history"]) == 0
    assert capsys.readouterr().out == (
        "README.md: out of date\nREADME.md: tables rewritten\nhistory.md: written\n"
    )


def test_a_users_own_rows_are_drawn_beside_them(results, capsys):
    pytest.importorskip("matplotlib")
    from bench import __main__ as door

    assert door.main(["report", "--results", str(results)]) == 0
    assert capsys.readouterr().out.endswith("gelu.png: drawn\nreport.md: written\n")
    text = (results / "report.md").read_text()
    assert "## train, cpu\n\n| training step |" in text
    assert "| bias_gelu N=1 F=2, forward | 2 (eager) | 1 (torch.compile) | 0.5 | 2.00x |" in text
    assert "CPU: Test CPU (R) 9000, 2 cores" in text
    assert "## tp" not in text
    assert (results / "gelu.png").stat().st_size > 10_000
    assert door.main(["report", "--results", str(results / "nowhere")]) == 2
    assert capsys.readouterr().err.startswith(
        "report: expected a folder with rows of `python -m bench`, got results="
    )
