"""Offload is the run without it: the ZeRO matrix again, with the state on the host's side of a bus.

The same references, bit for bit: ranks, copies, accumulation, formats, clipping, overflows.
"""

import itertools

import pytest
from cells import few, slow
from zero_cells import ACCUM, all_cells, assert_same_run, run

from fastpar.engine.debug import Debug

KEEP_MB = 0.02  # of 0.05 to 0.2 a rank


def sharded():
    """(cell, mode, MiB kept on the device): all of stages 0 to 3, few of them in make test."""
    found = []
    for i, cell in enumerate(all_cells()):
        mode = "parameters" if cell.stage == 3 and i % 3 else "optimizer"
        found.append((cell, mode, KEEP_MB if i % 4 == 0 else 0.0))

    def pairs(case):
        cell, mode, keep = case
        options = {**vars(cell), "mode": mode, "keep": keep}
        names = ("stage", "world_size", "accum", "precision", "deterministic", "mode", "keep")
        return set(itertools.combinations([(n, options[n]) for n in names], 2))

    quick = few(
        found, pairs, lambda case: (case[0].world_size * ACCUM[case[0].accum][0] + 2) ** 0.5
    )
    return [pytest.param(*c) if c in quick else slow(*c) for c in found]


@pytest.mark.parametrize(("cell", "mode", "keep"), sharded(), ids=str)
def test_cell(cell, mode, keep):
    debug = Debug(bus_gb_s=0.5, poison=True)
    results = run(cell, offload=mode, offload_keep_mb=keep, debug=debug)
    assert_same_run(cell, results)
