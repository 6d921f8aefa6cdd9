"""Who does not answer, and the process that ends what a dead launcher left."""

import os
import subprocess
import sys
import time

from fastpar.train import reaper

BEGIN = "from fastpar.train.reaper import begin_heartbeat; begin_heartbeat('{}')"


def test_the_reaper_kills_who_does_not_answer_when_the_launcher_is_dead(tmp_path):
    """It waits for who answers, and removes the launcher's folder."""
    folder, file = tmp_path / "logs", tmp_path / "answers"
    folder.mkdir()
    file.touch()
    (folder / "stuck").touch()
    stuck, answers = (
        subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        for code in (
            f"import time, ctypes; {BEGIN.format(folder / 'stuck')}; ctypes.PyDLL(None).sleep(60)",
            f"import time; {BEGIN.format(file)}; time.sleep(4)",
        )
    )
    lines = f"{stuck.pid} {folder / 'stuck'}\n{answers.pid} {file}\n"
    command = [sys.executable, "-I", "-S", reaper.__file__, str(folder), "2"]
    subprocess.run(command, input=lines, text=True, check=True, timeout=30)
    assert (stuck.wait(10), answers.wait(10)) == (-9, 0)
    assert not folder.exists()


def test_silence_is_the_time_since_the_last_answer(tmp_path):
    """Only time in which somebody looks counts; a suspended machine adds a second at most."""
    file = tmp_path / "answers"
    silence = reaper.Silence(file)
    assert silence.seconds() < 1  # not begun to answer, not there
    time.sleep(0.3)
    assert 0.3 <= silence.seconds() < 1.5
    file.touch()
    assert silence.seconds() == 0
    time.sleep(1.5)
    assert silence.seconds() == 1
    os.utime(file)
    assert silence.seconds() == 0
