"""python -m fastpar: what the command fastpar does; torchrun -m fastpar starts ranks with it.

[Note: a rank's exit] When a rank's work is done and written, the teardown of the interpreter can
still abort it ("terminate called without an active exception", a thread of torch.distributed; once
in about ten runs of two gloo ranks), which would count as a failed run. So ranks leave without it.
"""

import os
import sys

from fastpar.cli import main
from fastpar.launch import is_rank

status = main()
if is_rank():
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
sys.exit(status)
