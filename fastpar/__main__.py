"""python -m fastpar: what the command fastpar does; torchrun -m fastpar starts ranks with it.

[Note: a rank's exit] When a rank's work is done and written, the teardown of the interpreter can
still abort it ("terminate called without an active exception", a thread of torch.distributed; once
in about ten runs of two gloo ranks), which would count as a failed run. So ranks leave without it.

[Note: waiting threads] OpenMP's threads spin while they wait for each other. On cores that other
work uses too, a rank of two threads then waits for a thread that has no core: steps of a small
model take six times as long. With OMP_WAIT_POLICY=passive they sleep.
"""

import os
import signal
import sys


def run() -> int:
    """The command in sys.argv; its exit status."""
    if sys.path[0] in ("", os.getcwd()):  # python -m: a ./random.py there is not Python's
        sys.path.append(sys.path.pop(0))
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported
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
