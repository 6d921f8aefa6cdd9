"""The bar and its lines, times in words, smooth curves."""

import fcntl
import os
import pty
import struct
import termios

import pytest

from fastpar.files import runs as module
from fastpar.files.runs import Progress, duration, smoothed


def test_smoothed_is_an_average_from_the_start():
    assert smoothed([3.0] * 5, 0.9) == pytest.approx([3.0] * 5)
    assert smoothed([1.0, 2.0], weight=0.5) == pytest.approx([1.0, 5 / 3])
    assert smoothed([3.0, 1.0], 0.0) == [3.0, 1.0]


def test_lines_where_there_is_no_terminal(capsys, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    progress = Progress(100, 20, bar=False)
    for step in range(21, 101):
        clock[0] += 1.0
        progress.update(step, "loss 1.000")
    progress.say("saved")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 21/100  loss 1.000  eta 1:19"
    assert lines[1].startswith("step 26/100")
    assert lines[-2:] == ["step 100/100  loss 1.000  eta 0:00", "saved"]
    assert len(lines) == 18


def test_bar(capfd):
    progress = Progress(10, 2, bar=True)
    progress.update(3, "loss 1.250")
    progress.say("saved")
    progress.close()
    out, err = capfd.readouterr()
    assert out == "saved\n"
    assert "3/10" in err
    assert "loss 1.250" in err


@pytest.mark.parametrize(("rows", "bar"), [(40, True), (0, False)])
def test_a_bar_only_on_a_terminal_that_knows_its_size(monkeypatch, rows, bar):
    parent, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, 100, 0, 0))
    with os.fdopen(terminal, "w") as stderr, monkeypatch.context() as patch:
        patch.setattr(module.sys, "stderr", stderr)
        progress = Progress(10)
        assert (progress._bar is not None) == bar
        progress.close()
    os.close(parent)


def test_other_ranks_are_silent(capfd):
    progress = Progress(10, enabled=False, bar=True)
    progress.update(3, "loss")
    progress.say("saved")
    progress.close()
    assert capfd.readouterr() == ("", "")


def test_durations():
    assert [duration(s) for s in (0, 61, 3723, -2)] == ["0:00", "1:01", "1:02:03", "0:00"]
