"""A batch's walk through the house, as the README tells it, is the order of the calls of a run."""

import re
import sys
from pathlib import Path

from train_runs import run

import fastpar

README = Path(fastpar.__file__).parent / "train" / "README.md"


def test_a_batch_walks_as_the_readme_says(here):
    section = README.read_text().partition("## A batch's walk\n")[2].partition("\n## ")[0]
    steps = re.findall(r"^\d+\. `([\w/]+\.py)` `(\w+)`", section, re.MULTILINE)
    assert len(steps) > 20
    left = list(reversed(steps))

    def follow(frame, event, arg):
        code = frame.f_code
        file, name = left[-1] if left else ("", "")
        if event == "call" and code.co_name == name and code.co_filename.endswith(f"/{file}"):
            left.pop()

    sys.setprofile(follow)
    try:
        assert run("r", max_steps=2, eval_every=0, save_every=0) == 0
    finally:
        sys.setprofile(None)
    assert not left, f"no call of {left[-1]} after {steps[-len(left) - 1]}"
