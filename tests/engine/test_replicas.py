"""debug.py: one flipped bit in what ranks have alike is found, and inputs that should be alike and
are not; errors of late collectives. tests/contracts has runs with late ones."""

import copy
import functools
import pickle
import random
import re

import pytest
import torch
from late import Delays
from torch import nn

from fastpar import GPT, Adafactor, AdamW, GPTConfig, Mesh, engine_of, parallelize, pipeline_step
from fastpar.comm.transports import ShmCollectives
from fastpar.engine import debug
from fastpar.engine.debug import Debug, checksum
from fastpar.settings.parallel import Parallel
from fastpar.sharding.placements import Replicate
from fastpar.testing import run_ranks

SMALL = {"bucket_mb": 0.002, "first_bucket_mb": 0.001}


def flip(x, at=0, bit=0):
    """One bit of one byte, in place."""
    raw = x.detach().view(-1).view(torch.uint8)
    raw[at] = int(raw[at]) ^ (1 << bit)


def test_what_the_sum_sees_and_does_not(monkeypatch):
    monkeypatch.setattr(debug, "_CHUNK", 256)
    x = torch.randn(1000)
    for swapped in ([10, 700], [2, 40]):  # of two chunks, and in one
        y = x.clone()
        y[swapped] = x[swapped[::-1]]
        assert checksum(y) != checksum(x)
    turned = x.view(10, 100).t()
    assert checksum(turned) == checksum(turned.contiguous())
    assert checksum(torch.zeros(0)) == checksum(torch.zeros(5)) == 0
    assert checksum(torch.tensor(0.0)) != checksum(torch.tensor(-0.0))


@pytest.mark.gpu
def test_a_gpu_has_the_sums_of_the_cpu():
    x = torch.randn(3_000_001)
    assert checksum(x.cuda()).item() == checksum(x).item()


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(37, 11), nn.Linear(11, 3), nn.Linear(3, 50))


def gpt():
    return GPT(GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=130, dropout=0.0))


def trained(options, adamw, debug=None):
    """Model, engine and optimizer of this rank after two steps, each rank on its own data."""
    options = dict(options)
    tp, dtype = options.pop("tp", 1), options.pop("dtype", torch.float32)
    mesh, model = Mesh(tp=tp), (net() if tp == 1 else gpt()).to(dtype)
    parallelize(model, mesh, Parallel.of(**SMALL, **options), debug=debug)
    kind = Adafactor if adamw is Adafactor else functools.partial(AdamW, **adamw)
    optimizer = kind(model.parameters(), lr=0.01)
    for step in range(2):
        generator = torch.Generator().manual_seed(100 * step + mesh.dp_rank)  # ranks are threads
        if tp == 1:
            model(torch.randn(4, 37, generator=generator).to(dtype)).square().mean().backward()
        else:
            idx = torch.randint(0, 130, (2, 8), generator=generator)
            model(idx, idx).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, engine_of(model), optimizer


def damaged(options, adamw, rank, name, key):
    """Checks that it is fine, flips a bit on one rank, checks again; what the error said."""
    model, engine, optimizer = trained(options, adamw)
    engine.check_replicas(optimizer, step=7)
    if engine.mesh.rank == rank:
        p, rng = dict(model.named_parameters())[name], random.Random(rank)
        x = engine.shards.piece(p).param if key is None else optimizer.state[p][key]
        flip(x, rng.randrange(x.numel() * x.element_size()), rng.randrange(8))
    with pytest.raises(RuntimeError, match=r"replicas differ") as caught:
        engine.check_replicas(optimizer, step=7)
    return str(caught.value)


BF16 = {"dtype": torch.bfloat16, "grad_dtype": torch.float32}
FULL, BITS = {"master_weights": True}, {"master_weights": "remainder"}
COPIES = [{"zero_stage": stage, "shard_size": 2} for stage in range(4)]
FLIPPED = [  # ranks, the damaged one, what of it, who else has a copy; of two nobody knows whose
    (3, {}, {}, 1, "1.bias", None, "0, 2"),
    (3, {}, {}, 0, "0.weight", "exp_avg", "1, 2"),
    (4, {}, {"moment_dtype": torch.uint8}, 2, "0.weight", "exp_avg_sq_codes", "0, 1, 3"),
    (3, {}, Adafactor, 1, "0.weight", "row_var", "0, 2"),
    (6, {**COPIES[3], **BF16}, FULL, 4, "2.bias", "master_weight", "0, 2"),
    (6, COPIES[2], {}, 4, "0.weight", "exp_avg_sq", "0, 2"),
    (6, COPIES[3], {}, 0, "0.weight", None, "2, 4"),
    (4, COPIES[1], {}, 0, "0.weight", "exp_avg", "0 and rank 2"),
    (4, {"tp": 2}, {}, 1, "wpe.weight", None, "0, 2, 3"),
    (4, {"tp": 2, **BF16}, FULL, 0, "ln_f.bias", "master_weight", "1, 2, 3"),
    (6, {"tp": 2}, {}, 3, "h.0.attn.c_attn.weight", None, "1, 5"),
    (2, {}, {}, 1, "1.bias", None, "0 and rank 1"),
    (2, {"tp": 2}, {}, 1, "ln_f.weight", "exp_avg", "0 and rank 1"),
    (4, COPIES[3], {}, 3, "0.weight", None, "1 and rank 3"),
]


@pytest.mark.parametrize(("ranks", "options", "adamw", "rank", "name", "key", "others"), FLIPPED)
def test_a_flipped_bit_is_named(ranks, options, adamw, rank, name, key, others):
    what = f"{f'{key} of ' if key else ''}parameter '{name}' after step 7, "
    if "and" in others:
        said = rf"replicas differ between rank {others} in {what}without a majority"
    else:
        said = rf"replicas differ on rank {rank} in {what}where ranks {others} agree; check that"
    [found] = set(run_ranks(damaged, ranks, options, adamw, rank, name, key))
    assert re.search(said, found), found


@pytest.mark.parametrize(
    ("ranks", "options", "adamw"),
    [
        *((4, {"tp": 2, "zero_stage": stage}, {}) for stage in range(4)),
        (4, {**COPIES[3], **BF16}, BITS),
        (4, {"tp": 2, **BF16}, {"stochastic_rounding": True, "moment_dtype": torch.bfloat16}),
        (2, {**BF16}, {"stochastic_rounding": True, "moment_dtype": torch.uint8}),
    ],
)
def test_healthy_ranks_pass_and_stay_as_they_are(ranks, options, adamw):
    """tests/contracts/test_same_run.py has those of dp, `watched`."""

    def of_rank():
        how = Debug(check_replicas=True, check_inputs=options.get("tp") == 2)
        model, engine, optimizer = trained(options, adamw, how)
        before = {name: p.clone() for name, p in model.state_dict().items()}
        engine.check_replicas(optimizer)
        assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())

    run_ranks(of_rank, ranks)


def test_equal_pieces_of_one_parameter_are_no_copies():
    def of_rank():
        model = parallelize(nn.Linear(1024, 4, bias=False), Mesh(), zero_stage=3)
        assert engine_of(model).shards.piece(model.weight).param.numel() == 2048
        engine_of(model).check_replicas()

    run_ranks(of_rank, 2)


@pytest.mark.parametrize("where", ["gathered", "frozen"])
def test_whole_parameters_that_were_gathered_and_frozen_ones_are_compared(where):
    def of_rank():
        model = net()
        model[1].weight.requires_grad_(where == "gathered")
        stage = 2 if where == "gathered" else 3
        engine = engine_of(parallelize(model, Mesh(), Parallel.of(zero_stage=stage, **SMALL)))
        engine.check_replicas()
        with engine.gathered():
            if engine.mesh.rank == 2:
                flip(model[1].weight, 5)
            with pytest.raises(RuntimeError, match=r"differ on rank 2 in parameter '1.weight'"):
                engine.check_replicas()

    run_ranks(of_rank, 3)


def test_a_step_checks_if_it_is_asked_to():
    def of_rank():
        model, engine, optimizer = trained({"tp": 2}, {}, Debug(check_replicas=True))
        idx = torch.arange(8)[None]
        model(idx, idx).backward()
        with torch.no_grad():
            model.wpe.weight[0] += engine.mesh.tp_rank
        optimizer.step()

    words = r"between ranks 0, 2 and ranks 1, 3 in parameter 'wpe.weight' after step 3, without a m"
    with pytest.raises(RuntimeError, match=words):
        run_ranks(of_rank, 4)


class Takes(torch.nn.Module):
    """A model of any arguments."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.tp_states = {"weight": Replicate()}

    def forward(self, idx, targets=None, *rest, **kwargs):
        return self.weight.sum()


def idx_of(changed=False, at=(0, 1)):
    idx = torch.arange(24).view(4, 6)
    idx[at] += changed
    return idx


def given(*args, **kwargs):
    return args, kwargs


SAME = [
    lambda r: given(idx_of()),
    lambda r: given(idx=None),
    lambda r: given(torch.tensor([float("nan"), 1.0])),
    lambda r: given(idx_of(), None, r, name=str(r)),  # no tensors
    lambda r: given(idx_of().T, b=torch.tensor(True), c=torch.zeros(0, 3)),
]
SIGNS = [torch.tensor([1.0, zero], dtype=torch.bfloat16) for zero in (0.0, -0.0)]
DIFFERENT = [  # values, and which argument differs on which rank
    (lambda r: given(idx_of(r == 1, (2, 5))), "'idx' on tp rank 1"),
    (lambda r: given(idx_of(r > 1, (3, r))), "'idx' on tp rank 2"),
    (lambda r: given(1, targets=idx_of(r == 3)), "'targets' on tp rank 3"),
    (lambda r: given(SIGNS[r == 1]), "'idx' on tp rank 1"),
    (lambda r: given([{"a": idx_of(r == 1)}]), "'idx[0]['a']' on tp rank 1"),
    (lambda r: given(1, 2, 3, idx_of(r == 1)), "'*3' on tp rank 1"),
    (lambda r: given(idx_of()[: 4 - (r == 2)]), "'idx' on tp rank 2"),
    (lambda r: given(idx_of().short() if r == 1 else idx_of()), "'idx' on tp rank 1"),
]
MISSING = [  # who has it, who says so
    (lambda r: given(idx=idx_of() if r == 1 else None), (1,)),
    (lambda r: given(idx=None if r == 1 else idx_of()), (0, 2, 3)),
]


def call_with(make, compiled=False, **axes):
    """A forward; every rank waits until all have one, or have raised."""
    mesh = Mesh(**axes or {"tp": 4})
    model = parallelize(Takes(), mesh, debug=Debug(check_inputs=True))
    call = torch.compile(model, backend="eager") if compiled else model
    args, kwargs = make(mesh.rank)
    try:
        call(*args, **kwargs)
    except RuntimeError as error:
        return str(error)
    # A copy compares nothing: alone, on one rank after another.
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other(idx_of(True, (0, mesh.rank))) is not None
    return "ran"


def test_inputs_that_differ_are_told_on_every_rank():
    for make in SAME:
        assert run_ranks(call_with, 4, make) == ["ran"] * 4
    for make, which in DIFFERENT:
        [said] = set(run_ranks(call_with, 4, make))
        assert f"ranks of a tp group got different inputs: argument {which} is not" in said
    for make, having in MISSING:
        for rank, said in enumerate(run_ranks(call_with, 4, make)):
            name = "argument 'idx'" if rank in having else "a further argument"
            assert f"got different inputs: {name} on tp rank 1 is not that" in said
    assert run_ranks(lambda: call_with(DIFFERENT[0][0], dp=2), 2) == ["ran"] * 2  # others' own
    of_groups = run_ranks(lambda: call_with(lambda r: given(idx_of(r > 1)), tp=2), 4)
    assert of_groups == ["ran"] * 4


def test_the_first_forwards_are_compared_without_being_asked():
    def ranks(axes, bad):
        mesh = Mesh(**axes)
        config = GPTConfig(n_layer=2, n_head=2, n_embd=8, block_size=6, vocab_size=30, dropout=0.0)
        model = parallelize(GPT(config, seed=0), mesh)
        idx, targets = (torch.arange(24).view(4, 6) for _ in range(2))
        if "pp" in axes:
            run = functools.partial(pipeline_step, model, micro_batches=2)
        else:
            run = model
        other = mesh.rank_in("tp", "cp", "rows", "depth")
        run(idx, targets)
        run(idx, targets + other if bad else targets)
        return run(idx, targets.roll(other, 0)) is not None  # the third is not compared

    sizes = ((1, 2), "tp"), ((2, 1), "rows"), ((1, 1, 2), "rows")
    grids = [({"tp_grid": grid}, axis) for grid, axis in sizes]
    for axes, axis in (({"tp": 2}, "tp"), ({"cp": 2}, "cp"), ({"tp": 2, "pp": 2}, "tp"), *grids):
        n = 4 if "pp" in axes else 2
        assert all(run_ranks(ranks, n, axes, False))
        words = rf"ranks of a {axis} group got different inputs: argument 'targets' on"
        with pytest.raises(RuntimeError, match=words):
            run_ranks(ranks, n, axes, True)


def compiled():
    return call_with(lambda r: given(idx_of(r == 1)), True, tp=2)


@pytest.mark.slow
def test_inputs_of_compiled_models_are_compared():
    for said in run_ranks(compiled, 2, backend="gloo", timeout_s=120.0):
        assert "'idx' on tp rank 1" in said


make_shm = functools.partial(ShmCollectives, timeout_s=20.0, heap_gb=0.01)


def test_errors_of_late_collectives_come_out_of_wait():
    def fails():
        c = make_shm()
        Delays(c)
        assert c.why.endswith("; delayed by up to 1.0 ms")
        handle = c.all_reduce(torch.ones(3 + c.rank), async_op=True)
        with pytest.raises(RuntimeError, match="expected the same call on every rank"):
            handle.wait()
        with pytest.raises(RuntimeError, match="barrier: the group has failed before"):
            c.barrier()

    run_ranks(fails, 2)
    for gb_s in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=r"Debug: expected 0 <= bus_gb_s, got bus_gb_s="):
            Debug(bus_gb_s=gb_s)
