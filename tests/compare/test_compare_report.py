"""Table and page of constructed runs; in a real browser where there is one."""

import html.parser
import json
import re
import shutil
import subprocess

import pytest
from test_compare_results import make_comparison, make_run, orders

from fastpar.compare.pictures import draw_all
from fastpar.compare.report import PAGE, head, markdown, page, rows
from fastpar.compare.results import Run
from fastpar.compare.summary import summary

BROWSERS = map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))
BROWSER = next(filter(None, BROWSERS), None)
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


class Reader(html.parser.HTMLParser):
    """Tags that are open, and everything that a browser would fetch."""

    def __init__(self):
        super().__init__()
        self.open, self.links, self.bad = [], [], []

    def handle_starttag(self, tag, attrs):
        self.links += [v for k, v in attrs if k in ("src", "href", "srcset", "action", "data")]
        if tag not in ("img", "meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if self.open.pop() != tag:
            self.bad.append(tag)


def test_the_page_is_whole_and_fetches_nothing(tmp_path):
    found = some()
    (tmp_path / "a.png").write_bytes(b"\x89PNG")
    text = page(found, [(tmp_path / "a.png", "What is 1 < 2.")])
    reader = Reader()
    reader.feed(text)
    assert (reader.open, reader.bad) == ([], [])
    assert len(reader.links) == 2
    assert text.count("What is 1 &lt; 2.") == 2
    assert all(link.startswith("data:") for link in reader.links)
    assert not re.search(r"url\(|@import|<script|https?://", text)
    assert "&lt;b&gt;RuntimeError&lt;/b&gt;" in text
    assert "<b>" not in text
    for line in summary(found)[:3]:
        assert line in text.replace("&#x27;", "'")


PROBE = """<script>
addEventListener("load", () => {
  const box = document.querySelector(".box"), d = document.documentElement;
  document.title = JSON.stringify({
    width: innerWidth, page: d.scrollWidth,
    pictures: [...document.images].map(i => i.complete && i.naturalWidth),
    table: box.scrollWidth,
    widest: Math.max(...[...document.querySelectorAll(".box, p, li, h1")]
      .map(e => e.getBoundingClientRect().right)),
    shown: Math.min(...[...document.images].map(i => i.getBoundingClientRect().width)),
    fetched: performance.getEntriesByType("resource").filter(e => !e.name.startsWith("data:"))
      .map(e => e.name),
  });
  const pre = document.createElement("pre"); pre.id = "probe"; pre.hidden = true;
  pre.textContent = document.title; document.body.append(pre);
});
</script>"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs chromium or google-chrome on PATH")
@pytest.mark.parametrize("width", [360, 1200])
def test_the_page_in_a_browser(tmp_path, width):
    """At a phone's width too: no sideways scrolling but in the table's box; all pictures there.

    A headless window has a least width of its own: the page is put into a frame of that width.
    """
    found = some()
    (tmp_path / PAGE).write_text(page(found, draw_all(found, tmp_path)) + PROBE)
    frame = f'<iframe src="{PAGE}" style="border:0;width:{width}px;height:4000px"></iframe>'
    script = """<script>addEventListener("load", () => {
      document.body.append(frames[0].document.getElementById("probe").cloneNode(true)); });
    </script>"""
    (tmp_path / "frame.html").write_text(f"<!doctype html><body>{frame}{script}</body>")
    options = [
        *("--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"),
        *("--virtual-time-budget=5000", "--run-all-compositor-stages-before-draw"),
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    done = subprocess.run(
        [BROWSER, *options, "--dump-dom", f"file://{tmp_path}/frame.html"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = re.search(r'id="probe"[^>]*>(\{.*?\})<', done.stdout)
    assert said, done.stderr[-2000:]
    seen = json.loads(said[1].replace("&gt;", ">"))
    assert seen["width"] == width
    assert seen["page"] <= width, "the page scrolls sideways"
    assert seen["pictures"] == [990] * 6
    assert seen["widest"] <= width
    assert seen["shown"] >= 600, "the words in pictures can be read; they scroll in their boxes"
    assert seen["fetched"] == []
    if width == 360:
        assert seen["table"] > width, "the table scrolls in its box"
