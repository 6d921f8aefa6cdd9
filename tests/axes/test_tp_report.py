"""What a report of split parameters says."""

import torch
from test_tp_plan import PLAN, mine

from fastpar import Mesh, engine_of, parallelize
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks


def report(model, *, tp=2, sequence_parallel=None, **options):
    parallelize(model, Mesh(tp=tp), Parallel(sequence_parallel=sequence_parallel), **options)
    return engine_of(model).tp_report.splitlines()


def test_every_parameter_has_its_line():
    lines, _ = run_ranks(lambda: report(mine(), tp_plan=PLAN), 2)
    assert lines == [
        "tensor parallelism: tp=2, sequence parallelism off, the given plan",
        "split over the ranks: 10 parameters, 0.01 MiB of 0.01 MiB here",
        "     1 words.weight  [67, 8] -> [64, 8]  Shard(0, pad_to=64)",
        "     2 layers.*.gain  [12] -> [6]  Shard(0)",
        "     2 layers.*.up.weight  [12, 8] -> [6, 8]  Shard(0)",
        "     2 layers.*.up.bias  [12] -> [6]  Shard(0)",
        "     2 layers.*.down.weight  [8, 12] -> [8, 6]  Shard(1)",
        "     1 head.weight  [67, 8] -> [64, 8]  Shard(0, pad_to=64)",
        "replicated, the same gradient on every rank: 4 parameters, 0.00 MiB here",
        "     2 layers.*.down.bias  [8]",
        "     1 scaled.scale  [8]",
        "     1 head.bias  [67]",
        "left: named by nobody, taken for the same on every rank: 2 parameters, 0.00 MiB here",
        "     1 norm.weight  [8]",
        "     1 norm.bias  [8]",
    ]


def test_nothing_is_split():
    (lines,) = run_ranks(lambda: report(torch.nn.Linear(2, 2), tp=1), 1)
    assert lines == ["tensor parallelism: tp=1, nothing is split"]
