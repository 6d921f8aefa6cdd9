"""The table of constructed runs."""

from test_compare_results import make_comparison, make_run, orders

from fastpar.observe.report import head, markdown, rows, summary
from fastpar.observe.results import Run

NAMES = ["single", "ddp", "fsdp2", "fsdp2-no-reshard", "dp", "zero1", "zero2", "zero3", "tp"]


def some():
    runs = [
        make_run(name, n + 1, step_s=0.1 + 0.002 * n + 0.01 * at, memory=(60 - at) * 1e6)
        for n in range(3)
        for at, name in enumerate(NAMES)
    ]
    failed = Run("hsdp", 1, 2, 1, 4, 1, error="rank 0: <b>RuntimeError</b>: no | room")
    skipped = {"deepspeed1": "deepspeed is not installed", "tp-zero1": "needs 4 ranks, got 2"}
    return make_comparison(*runs, failed, *orders(1e-6), skipped=skipped)


def test_a_row_is_what_the_runs_say():
    found = {row[0]: row for row in rows(some())}
    assert found["dp"] == [
        *("dp", "2", "3,606 (3,556-3,657)", "0.79", "0.71 (0.7-0.72)", "56", "0.95"),
        *("5", "3", "4.70000"),
    ]
    assert found["fsdp2"][8] == "not known"
    assert found["deepspeed1"] == ["deepspeed1", "skipped: deepspeed is not installed"]
    assert found["hsdp"][1].startswith("failed: rank 0")
    assert list(found)[-2:] == ["deepspeed1", "tp-zero1"]


def test_the_fastest_stands_first_and_ratios_name_their_baseline():
    runs = [make_run("dp", step_s=0.1), make_run("zero1", step_s=0.05), make_run("ddp", step_s=0.2)]
    found = make_comparison(*runs, strategies=["hsdp", "dp", "zero1", "ddp"])
    assert [row[0] for row in rows(found)] == ["zero1", "dp", "ddp", "hsdp"]
    assert [row[3] for row in rows(found)[:3]] == ["4.00", "2.00", "1.00"]
    assert "speed, ddp = 1" in head(found)
    assert "memory, ddp = 1" in head(found)
    assert "to those of ddp." in markdown(found)
    found.runs.pop()
    assert "speed, dp = 1" in head(found), "the first that was asked for and ran"
    assert rows(found)[0][3] == "2.00"
    found.runs.append(make_run("single", step_s=0.4))
    assert "speed, single = 1" in head(found)


def test_a_strategy_without_a_run_says_so():
    stopped = make_comparison(make_run("dp"), complete=False, strategies=["dp", "zero1"])
    assert rows(stopped)[1] == ["zero1", "stopped before its first run"]


def test_markdown_is_a_table_and_words():
    found = some()
    text = markdown(found)
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in table} == {len(head(found)) + 1}, "no cell breaks the table"
    assert len(table) == 2 + len(NAMES) + 3
    for line in summary(found):
        assert f"- {line}\n" in text
    assert "1,325,824 parameters" in text
    assert "2 ranks with 1 thread each" in text
    assert text.isascii()
