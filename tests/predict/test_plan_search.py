"""plan_search.py: which layouts are tried, which win, why others lose, what would make one fit."""

import time
from dataclasses import replace

import pytest

from fastpar.axes.step import Setup, Workload
from fastpar.predict.memory import predict_memory
from fastpar.predict.search import (
    families,
    layouts,
    possible_batches,
    refused,
    search,
    smallest_changes,
    why_not,
)
from fastpar.settings.mesh import divisors
from fastpar.settings.model import PRESETS, GPTConfig

GPT2 = Workload(PRESETS["gpt2"], 64)


class PaperRates:
    """1 TFLOP/s, 100 GB/s of memory, links of 10 GB/s and 10 us."""

    peak_flops, overlap = 1e12, 0.9

    def op_s(self, op):
        return max(op.flops / 1e12, op.bytes / 1e11)

    def comm_s(self, send):
        return 1e-5 + send.bytes / 1e10

    def overhead_s(self, workload, setup):
        return 0.0


class SlowLinks(PaperRates):
    def comm_s(self, send):
        return send.bytes / 1e8


class FreeLinks(PaperRates):
    def op_s(self, op):
        return 0.0 if op.name == "optimizer" else super().op_s(op)

    def comm_s(self, send):
        return 0.0


RATES = PaperRates()


def splits(workload, template, per_node):
    """Layouts without stages, grids and offload."""
    plain = {"pp", "tp_grid", "offload"}
    return list(layouts(workload, template, per_node, plain))


def found(workload=GPT2, world=8, limit=80e9, per_node=8, **template):
    return search(
        workload,
        Setup(world_size=world, **template),
        rates=RATES,
        limit_bytes=limit,
        per_node=per_node,
    )


def test_divisors():
    assert divisors(36) == [1, 2, 3, 4, 6, 9, 12, 18, 36]
    assert divisors(1) == [1]
    assert divisors(13) == [1, 13]


def test_every_split_divides_what_it_cuts():
    seen = splits(Workload(PRESETS["gpt2-xl"], 96), Setup(world_size=48), 8)
    assert {s.tp for s in seen} == {1, 2, 4, 8}  # 25 heads, which are padded
    seen = splits(Workload(PRESETS["gpt2"], 96), Setup(world_size=48), 8)
    assert {s.tp for s in seen} == {1, 2, 4, 8}
    assert {s.zero_stage for s in seen} == {0, 1, 2, 3}
    assert all(s.shard_size is None or s.data % s.shard_size == 0 for s in seen)
    assert {s.tp * s.cp for s in seen} == {1, 2, 4, 8}  # ranks that share a node
    assert {s.cp for s in seen if s.tp == 2} == {1, 2, 4}  # of which each has six heads
    assert {s.shard_size for s in seen if s.tp == 1} == {None, 8}
    seen = splits(Workload(PRESETS["gpt2"], 96), Setup(world_size=48), 12)
    assert {s.tp for s in seen} == {1, 2, 3, 4, 6, 12}
    # The runtime cuts the context of 1024 into 3 parts with padding in none of its ways.
    assert all(s.sequence_parallel == (1024 % s.tp == 0) for s in seen)


def test_a_batch_that_no_split_divides_leaves_nothing():
    workload = replace(GPT2, batch_size=7)
    assert found(workload, world=13) == []
    assert {(e.setup.pp, e.setup.cp) for e in found(workload, world=5)} == {(5, 1), (1, 5)}
    assert possible_batches(workload, Setup(world_size=5), 8, {"pp", "cp"}) == [5, 10, 15]


def test_fastest_first_and_all_within_the_limit():
    estimates = found()
    times = [e.time.step_s if e.time else float("inf") for e in estimates]
    assert times[1:] == sorted(times[1:])
    assert times[0] <= 1.01 * times[1]
    assert all((e.memory.total <= 80e9) == (e.time is not None) for e in estimates)
    assert len({e.family for e in estimates}) == len(families(estimates)) > 8
    assert families(estimates)[0] is estimates[0]


def test_the_micro_batch_is_the_fastest_that_fits():
    limit = 12e9
    estimates = [e for e in found(limit=limit, world=1) if e.time is not None]
    assert estimates
    for e in estimates:
        rows = e.setup.micro_batch_size * e.setup.grad_accum_steps
        assert rows == GPT2.batch_size
        more = replace(
            e.setup,
            micro_batch_size=2 * e.setup.micro_batch_size,
            grad_accum_steps=e.setup.grad_accum_steps // 2,
        )
        assert e.setup.micro_batch_size == rows or predict_memory(GPT2, more).total > limit


@pytest.mark.parametrize(
    "world", [1, 6, 8, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 16, 48))]
)
@pytest.mark.parametrize("model", ["gpt2", "gpt2-xl", "mini"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_nothing_is_proposed_that_the_trainer_refuses(model, world, dtype):
    workload = Workload(PRESETS[model], 96)
    for e in found(workload, world, dtype=dtype):
        assert refused(workload, e.setup) is None
        config = e.setup.config(workload)
        batch = config.batch(workload.seq_len, e.setup.dp)
        assert batch == (e.setup.micro_batch_size, e.setup.grad_accum_steps)


def test_what_the_trainer_refuses():
    assert "tp to divide the MLP's width of 3072" in refused(GPT2, Setup(world_size=5, tp=5))
    assert "does not divide dp=8" in refused(GPT2, Setup(world_size=8, zero_stage=1, shard_size=3))
    assert "int8" in refused(GPT2, Setup(world_size=8, tp=2, moment_dtype="int8"))
    assert not any(e.setup.tp > 1 for e in found(moment_dtype="int8"))


def test_why_a_layout_lost_is_said_from_its_numbers():
    estimates = search(GPT2, Setup(world_size=8), rates=SlowLinks(), limit_bytes=6e9, per_node=8)
    winner = estimates[0]
    assert winner.time is not None
    timed = [e for e in estimates if e.time is not None]
    slower = next(e for e in timed if e.time.step_s > 1.01 * winner.time.step_s)
    assert "% slower: " in why_not(slower, winner, 6e9)
    percent = 100 * slower.time.step_s / winner.time.step_s - 100
    assert f"{percent:.1f} % slower" in why_not(slower, winner, 6e9)
    tight = found(limit=1e9)
    too_large = next(e for e in tight if e.time is None)
    text = why_not(too_large, tight[0], 1e9)
    assert text.startswith(f"does not fit: {too_large.memory.total / 1e9:,.1f} GB of 1.0 GB")
    assert why_not(winner, winner, 6e9) == "as fast within 1%, 0% less memory, and less simple"


def test_of_layouts_alike_the_simplest_wins():
    """Of one rank's work nothing depends on the stage but what is sent: nothing here."""
    estimates = search(GPT2, Setup(world_size=8), rates=FreeLinks(), limit_bytes=80e9, per_node=8)
    winner = estimates[0]
    assert (winner.setup.tp, winner.setup.zero_stage) == (1, 0)
    fastest = min(e.time.step_s for e in estimates if e.time is not None)
    assert winner.time is not None
    assert winner.time.step_s <= 1.01 * fastest


def test_the_smallest_changes_that_make_something_fit():
    template = Setup(world_size=2)
    shape = GPTConfig.preset("gpt2-xl")
    workload = Workload(shape, 64)
    least = min(
        predict_memory(
            workload, replace(s, grad_accum_steps=64 // s.dp, activation_checkpointing="full")
        ).total
        for s in layouts(workload, template, 2, {"pp", "tp_grid"})
    )
    asked = []

    def larger(size):
        asked.append(size)
        return "h200"

    ways = smallest_changes(workload, template, limit_bytes=least - 1, per_node=2, larger=larger)
    assert asked == [least]
    assert any(way.startswith("--block-size ") for way in ways)
    assert "--gpus 4" in ways
    assert ways[-1] == "--gpu h200"
    ways = smallest_changes(
        workload, template, limit_bytes=1e8, per_node=2, larger=lambda size: None
    )
    assert not [way for way in ways if way.startswith("--gpu ")]
    assert "--optimizer adamw with --offload" not in ways


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_offload_is_offered_to_those_who_have_it_not(device):
    """XL with Muon takes more than 24 GB; AdamW's state may leave the device."""
    template = Setup(optimizer="muon", device_type=device)
    ways = smallest_changes(
        Workload(GPTConfig.preset("gpt2-xl"), 64),
        template,
        limit_bytes=20.5e9,
        per_node=1,
        larger=lambda size: None,
    )
    assert ("--optimizer adamw with --offload" in ways) == (device == "cuda")
    assert not any("--moment-dtype" in way for way in ways)  # which Muon has not


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_inputs_of_blocks_may_leave_the_device_too(device):
    """Of a long context they are what does not fit."""
    workload = Workload(GPTConfig.preset("gpt2-xl", block_size=65536), 1)
    ways = smallest_changes(
        workload,
        Setup(device_type=device),
        limit_bytes=20e9,
        per_node=1,
        larger=lambda size: None,
    )
    flags = "fastpar train --activation-checkpointing full --offload-activations"
    # 94 inputs of 65,536 * 1,600 numbers of 16 bits, 18 bytes each of 1.66e9 parameters.
    assert (f"{flags}, with 49.6 GB of a rank's host" in ways) == (device == "cuda")


def test_sixteen_thousand_ranks_and_a_trillion_parameters_within_two_seconds():
    shape = GPTConfig(n_layer=128, n_head=160, n_embd=25600, block_size=2048)
    workload = Workload(shape, 16384)
    began = time.process_time()
    estimates = found(workload, 16384)
    seconds = time.process_time() - began
    assert estimates[0].time is not None
    assert workload.n_parameters > 1e12
    # A bound on work, not on this machine: tens of times what it takes.
    assert seconds < 20.0


@pytest.mark.parametrize(("world", "per_node"), [(12, 6), (24, 6), (12, 3), (64, 8)])
def test_tp_stays_inside_a_node(world, per_node):
    """Ranks 4 to 7 of nodes of 6 are in two nodes: a size that does not divide a node is none."""
    workload, plain = replace(GPT2, batch_size=192), {"pp"}
    sizes = {s.tp for s in splits(workload, Setup(world_size=world), per_node)}
    assert sizes == set(divisors(per_node))
    one = replace(GPT2, batch_size=1)
    allowed = possible_batches(one, Setup(world_size=world), per_node, plain)
    assert allowed[0] == world // max(sizes)
