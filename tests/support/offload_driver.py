"""`fastpar` as a rank whose host fails: argument 1 is JSON, [rank, "kill" or "raise", n].

In the n-th step of that rank, at the second bucket; over a stand-in for the bus of a GPU.
"""

import functools
import json
import os
import signal
import sys

import fastpar.models.set_up
from fastpar.axes.offload import Offload
from fastpar.cli import main
from fastpar.engine.debug import Debug
from fastpar.optim.adamw import AdamW

victim, how, n = json.loads(sys.argv.pop(1))
steps, buckets = [0], [0]
parallelize, prepare = fastpar.models.set_up.parallelize, AdamW.prepare
step = Offload.step


def fail():
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise OSError("the host has a broken core")


def told_step(self, *args):
    steps[0] += 1
    buckets[0] = 0
    return step(self, *args)


def told_prepare(self, rows, factor):
    buckets[0] += 1
    due = victim == int(os.environ["RANK"]) and (steps[0], buckets[0]) == (n, 2)
    return [*[fail] * due, *prepare(self, rows, factor)]


Offload.step, AdamW.prepare = told_step, told_prepare
fastpar.models.set_up.parallelize = functools.wraps(parallelize)(
    functools.partial(parallelize, debug=Debug(bus_gb_s=1.0, poison=True))
)
sys.exit(main(sys.argv[1:]))
