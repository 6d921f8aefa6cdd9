"""`fastpar` as a rank that kills itself: argument 1 is JSON, a kill for each start of the ranks.

[rank, "op", n]: before the n-th file operation of its saves; [rank, "step", n]: before its n-th
step; none at a start after the time in LAST_KILL. Beside the run's folder, log.txt gets a line for
each save that rank 0 begins and each kill.
"""

import json
import os
import signal
import sys
import time

from fault_points import Countdown, watching

import fastpar.checkpoint.saver
import fastpar.train.trainer
from fastpar.cli import main

rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
kills = json.loads(sys.argv.pop(1))


def log(*words):
    with open("log.txt", "a") as file:
        file.write(" ".join(map(str, words)) + "\n")


def die():
    log("kill", attempt)
    os.kill(os.getpid(), signal.SIGKILL)


save, in_step = fastpar.checkpoint.saver.Saver.save, fastpar.train.trainer.in_step
steps = [0]


def told_save(self, step, *args, **kwargs):
    if rank == 0:
        log("save", step)
    return save(self, step, *args, **kwargs)


def told_step(step):
    steps[0] += 1
    if kind == "step" and steps[0] == n:
        die()
    in_step(step)


fastpar.checkpoint.saver.Saver.save = told_save
late = time.time() > float(os.environ.get("LAST_KILL", "inf"))
victim, kind, n = kills[attempt] if attempt < len(kills) and not late else (-1, "", 0)
if victim != rank:
    kind = ""
fastpar.train.trainer.in_step = told_step
with watching(Countdown(n if kind == "op" else 0, die)):
    code = main(sys.argv[1:])
sys.exit(code)
