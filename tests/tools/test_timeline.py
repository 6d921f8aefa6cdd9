"""The timeline of the overlap bench: the picture comes from the file beside it."""

import json

from test_records import ABOUT
from test_timeline_picture import PANELS

from bench.report import timeline
from fastpar.comm.recorder import Span


def test_the_picture_comes_from_the_file_beside_it(tmp_path, capsys):
    timeline.save(PANELS, ABOUT, "two ranks", tmp_path)
    stored = json.loads((tmp_path / "timeline.json").read_text())
    assert stored["line"] == "two ranks"
    assert [Span(*s) for s in stored["steps"]["fastpar ZeRO-0"]] == PANELS["fastpar ZeRO-0"]
    first = (tmp_path / "timeline.png").read_bytes()
    (tmp_path / "timeline.png").unlink()
    assert timeline.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == "timeline.png: drawn\n"
    assert (tmp_path / "timeline.png").read_bytes() == first


def test_a_picture_needs_its_file(tmp_path, capsys):
    assert timeline.main([str(tmp_path)]) == 2
    wanted = f"timeline: expected timeline.json in {tmp_path.name}, got No such file or directory"
    assert wanted in capsys.readouterr().err
