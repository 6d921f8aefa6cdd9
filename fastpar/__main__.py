"""python -m fastpar: what the command fastpar does; torchrun -m fastpar starts ranks with it."""

import sys

from fastpar.cli import main

sys.exit(main())
