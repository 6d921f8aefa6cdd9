"""python -m fastpar: what the command fastpar does; torchrun -m fastpar starts ranks with it.

[Note: a rank's exit] When a rank's work is done and written, the teardown of the interpreter can
still abort it ("terminate called without an active exception", a thread of torch.distributed; once
in about ten runs of two gloo ranks), which would count as a failed run. So ranks leave without it.

[Note: waiting threads] OpenMP's threads spin while they wait for each other. On cores that other
work uses too, a rank of two threads then waits for a thread that has no core: steps of a small
model take six times as long. With OMP_WAIT_POLICY=passive they sleep, and on free cores the same
steps take 30 to 40 % longer (2-core Intel). So the load at the start decides, where the user has
set nothing; a rank is not asked, its neighbours start beside it and it has its starter's setting.
"""

import os
import signal
import sys
import time
from pathlib import Path

_STAT = Path("/proc/stat")
_LAUNCHED = ("RANK", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_RANK")  # torchrun, srun, mpirun
_COMPUTE = ("train", "profile", "compare", "info")


def busy_cores(before: str, after: str, cores: set[int]) -> float:
    """How many of these cores worked between two readings of /proc/stat."""

    def ticks(text: str) -> dict[str, list[int]]:
        rows = (line.split() for line in text.splitlines() if line.startswith("cpu"))
        return {row[0]: [int(n) for n in row[1:9]] for row in rows}  # guests are in user's

    busy, old, new = 0.0, ticks(before), ticks(after)
    for name in {f"cpu{core}" for core in cores} & old.keys() & new.keys():
        spent = [b - a for a, b in zip(old[name], new[name], strict=True)]
        idle = spent[3] + spent[4]  # idle, iowait
        busy += (sum(spent) - idle) / max(1, sum(spent))
    return busy


def sleep_where_shared(command: str | None) -> None:
    """Set OMP_WAIT_POLICY where half a core is busy. See [Note: waiting threads]."""
    if command not in _COMPUTE or os.environ.keys() & {"OMP_WAIT_POLICY", *_LAUNCHED}:
        return
    try:
        before = _STAT.read_text()
        time.sleep(0.1)
        busy = busy_cores(before, _STAT.read_text(), os.sched_getaffinity(0))
    except (OSError, ValueError, AttributeError):  # not Linux, or hidden
        return
    if busy >= 0.5:
        os.environ["OMP_WAIT_POLICY"] = "passive"
        print(
            f"fastpar: other work keeps {busy:.1f} cores busy; threads sleep while they wait "
            "(OMP_WAIT_POLICY=active: they spin)",
            file=sys.stderr,
        )


def run() -> int:
    """The command in sys.argv; its exit status."""
    if sys.path[0] in ("", os.getcwd()):  # python -m: a ./random.py there is not Python's
        sys.path.append(sys.path.pop(0))
    sleep_where_shared(next(iter(sys.argv[1:]), None))
    handler = signal.getsignal(signal.SIGINT)
    if handler == signal.default_int_handler:  # as launch.interrupt_kills, which is not there yet
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from fastpar.cli import main
    from fastpar.comm.ranks import is_rank

    signal.signal(signal.SIGINT, handler)
    status = main()
    if is_rank():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


if __name__ == "__main__":
    sys.exit(run())
