"""`fastpar plan`: layouts, winners, refusals; each command that it prints is parsed and built."""

import functools
import itertools
import json
import re
import shlex
from dataclasses import replace

import pytest
import torch
from cells import slow
from lone_rank import LoneMesh, heard

from fastpar.axes.step import Setup, Workload
from fastpar.cli import main, parse_train
from fastpar.data.batches import TextData
from fastpar.data.tokenizer import ByteTokenizer, check_name
from fastpar.engine.debug import Debug
from fastpar.engine.parallelize import parallelize
from fastpar.files.tensor_file import DTYPES
from fastpar.models import set_up
from fastpar.predict import plan, search
from fastpar.predict.machine import Cluster, DatasheetRates, find_device
from fastpar.predict.memory import predict_memory
from fastpar.predict.plan import PlanCommand, command_lines, report
from fastpar.predict.search import layouts
from fastpar.predict.time import predict_step
from fastpar.settings.mesh import divisors, parse_grid
from fastpar.settings.model import PRESETS, GPTConfig
from fastpar.train import start
from fastpar.train import trainer as train

GPT2 = Workload(PRESETS["gpt2"], 64)
XL = Workload(PRESETS["gpt2-xl"], 256)
INF = float("inf")
MODES = ("none", "full")


class PaperRates:
    """1 TFLOP/s, 100 GB/s of memory, links of 10 GB/s and 10 us."""

    peak_flops, overlap, overhead_s = 1e12, 0.9, 0.0

    def op_s(self, op):
        return max(op.flops / 1e12, op.bytes / 1e11)

    def comm_s(self, send):
        return 1e-5 + send.bytes / 1e10


class FreeLinks(PaperRates):
    def op_s(self, op):
        return 0.0 if op.name == "optimizer" else super().op_s(op)

    def comm_s(self, send):
        return 0.0


@functools.cache
def found(workload=GPT2, world=8, limit=80e9, per_node=8, rates=PaperRates, **template):
    setup = Setup(world_size=world, **template)
    return search.search(workload, setup, rates=rates(), limit_bytes=limit, per_node=per_node)


def ways(model, world, per_node=8, batch=96, without=("pp", "tp_grid", "offload"), **template):
    workload = Workload(PRESETS[model], batch)
    return list(layouts(workload, Setup(world_size=world, **template), per_node, set(without)))


@pytest.mark.slow
def test_every_split_divides_what_it_cuts():
    seen = ways("gpt2-xl", 48)
    assert {s.tp for s in seen} == {1, 2, 4, 8}  # 25 heads, which are padded
    seen = ways("gpt2", 48)
    assert {s.tp for s in seen} == {1, 2, 4, 8}
    assert {s.parallel.zero_stage for s in seen} == {0, 1, 2, 3}
    assert all(s.parallel.shard_size is None or s.data % s.parallel.shard_size == 0 for s in seen)
    assert {s.tp * s.mesh.cp for s in seen} == {1, 2, 4, 8}  # ranks that share a node
    assert {s.mesh.cp for s in seen if s.tp == 2} == {1, 2, 4}  # of which each has six heads
    assert {s.parallel.shard_size for s in seen if s.tp == 1} == {None, 8}
    # The runtime cuts the context of 1024 into 3 parts with padding in none of its ways.
    assert all(s.sequence_parallel == (1024 % s.tp == 0) for s in ways("gpt2", 48, 12))
    # Ranks 4 to 7 of nodes of 6 are in two nodes: a size that does not divide a node is none.
    for world, per_node in ((48, 12), (12, 6), (24, 6), (12, 3), (64, 8)):
        sizes = {s.tp for s in ways("gpt2", world, per_node, batch=192)}
        assert sizes == set(divisors(per_node))
        one = replace(GPT2, batch_size=1)
        allowed = search.possible_batches(one, Setup(world_size=world), per_node, {"pp"})
        assert allowed[0] == world // max(sizes)
    without = {"pp", "offload"}
    for gpus in (8, 64):
        seen = [s for s in ways("gpt2-xl", gpus, batch=4 * gpus, without=without) if s.mesh.tp_grid]
        assert {(s.rows, s.tp) for s in seen} >= {(2, 2), (2, 4), (4, 2)}
        assert all(s.world_size == s.dp * s.rows * s.tp and s.tp <= 8 for s in seen)
        for s in seen:
            one = replace(s, micro_batch_size=s.rows, grad_accum_steps=4)
            assert search.refused(Workload(XL.shape, 4 * gpus), one) is None
    for beside in ({"optimizer": "muon"}, {"moment_dtype": "int8"}, {"offload": "optimizer"}):
        assert not any(
            s.mesh.tp_grid for s in ways("gpt2-xl", 8, batch=256, without=without, **beside)
        )
    three = Workload(GPTConfig(3, 2, 64, 64), 16)  # no stage is without layers
    assert {way.mesh.pp for way in layouts(three, Setup(8), 8) if way.mesh.pp > 1} == {2}


def test_a_batch_that_no_split_divides_leaves_nothing():
    workload = replace(GPT2, batch_size=7)
    assert found(workload, world=13) == []
    assert {(e.setup.mesh.pp, e.setup.mesh.cp) for e in found(workload, world=5)} == {
        (5, 1),
        (1, 5),
    }
    assert search.possible_batches(workload, Setup(world_size=5), 8, {"pp", "cp"}) == [5, 10, 15]


@pytest.mark.slow
def test_fastest_first_and_all_within_the_limit():
    estimates = found(GPT2, world=8)
    times = [e.time.step_s if e.time else INF for e in estimates]
    assert times[1:] == sorted(times[1:])
    assert times[0] <= 1.01 * times[1]
    for e in estimates:
        assert (e.memory.total <= 80e9) == (e.time is not None)
        assert search.refused(GPT2, e.setup) is None
    assert len({e.family for e in estimates}) == len(search.families(estimates)) > 8
    assert search.families(estimates)[0] is estimates[0]


def test_the_micro_batch_is_the_fastest_that_fits():
    estimates = [e for e in found(limit=12e9, world=1) if e.time is not None]
    assert estimates
    for e in estimates:
        rows, steps = e.setup.micro_batch_size, e.setup.grad_accum_steps
        assert rows * steps == GPT2.batch_size
        more = replace(e.setup, micro_batch_size=2 * rows, grad_accum_steps=steps // 2)
        assert steps == 1 or predict_memory(GPT2, more).total > 12e9


@pytest.mark.slow
def test_which_one_wins_and_why_others_lose():
    for limit, words in ((1e9, "does not fit: "), (6e9, " % slower: "), (6e9, "more complex")):
        estimates = found(world=4, limit=limit)
        assert any(words in search.why_not(e, estimates[0], limit) for e in estimates)
    # Of layouts alike the simplest: of one rank's work only what is sent depends on the stage.
    estimates = found(world=4, rates=FreeLinks)
    winner = estimates[0]
    assert (winner.setup.tp, winner.setup.parallel.zero_stage) == (1, 0)
    fastest = min(e.time.step_s for e in estimates if e.time is not None)
    assert winner.time.step_s <= 1.01 * fastest
    # What the trainer refuses is not among them.
    assert "tp to divide the MLP's width, 3072" in search.refused(GPT2, Setup(world_size=5, tp=5))
    assert "does not divide dp=8" in search.refused(GPT2, Setup(8, zero_stage=1, shard_size=3))
    assert not any(e.setup.tp > 1 for e in found(world=2, moment_dtype="int8"))


@pytest.mark.slow
def test_the_smallest_changes_that_make_something_fit():
    def changes(workload, template, limit, per_node=1, larger=lambda size: None):
        how = {"limit_bytes": limit, "per_node": per_node, "larger": larger}
        return search.smallest_changes(workload, template, **how)

    workload, template, asked = replace(XL, batch_size=64), Setup(world_size=2), []
    sizes = []
    for s in layouts(workload, template, 2, {"pp", "tp_grid"}):
        s = replace(s, grad_accum_steps=64 // s.dp, activation_checkpointing="full")
        sizes.append(predict_memory(workload, s).total)
    least = min(sizes)
    found = changes(workload, template, least - 1, 2, lambda size: asked.append(size) or "h200")
    assert asked == [least]
    assert any(way.startswith("--block-size ") for way in found)
    assert "--gpus 4" in found
    assert found[-1] == "--gpu h200"
    found = changes(workload, template, 1e8, 2)
    assert not [way for way in found if way.startswith("--gpu ")]
    assert "--optimizer adamw" not in found
    long = Workload(GPTConfig.preset("gpt2-xl", block_size=65536), 1)
    # 94 inputs of 65,536 * 1,600 numbers of 16 bits, 18 bytes each of 1.66e9 parameters.
    flags = "fastpar train --activation-checkpointing full --offload-activations"
    for device in ("cuda", "cpu"):
        # XL with Muon takes more than 24 GB; AdamW's state may leave the device.
        found = changes(workload, Setup(optimizer="muon", device_type=device), 20.5e9)
        assert ("--optimizer adamw" in found) == (device == "cuda")
        assert not any("--moment-dtype" in way for way in found)  # which Muon has not
        found = changes(long, Setup(device_type=device), 20e9)
        assert (f"{flags}, with 49.6 GB of host memory per rank" in found) == (device == "cuda")


# Pipelines: what is left out could not win
def everything(workload, ways, rates):
    for way, mode in itertools.product(ways, MODES):
        for setup in search.micro_batches(workload, way.change(activation_checkpointing=mode)):
            bound = predict_step(workload, setup, rates, bubble=False).step_s
            yield predict_step(workload, setup, rates).step_s, bound, setup


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "link"),
    [(GPTConfig(8, 8, 512, 256), "ib-ndr"), (GPTConfig(8, 8, 1024, 512, 50304), "eth-100")],
)
def test_the_bounds_leave_out_no_winner(shape, link):
    workload, template = Workload(shape, 32), Setup(8)
    rates = DatasheetRates(Cluster.of("h100", 8, 2, inter=link), template)
    ways = [
        way
        for way in layouts(workload, template, 2)
        if way.mesh.pp > 1 and way.parallel.zero_stage < 2
    ]
    cases = list(everything(workload, ways, rates))
    assert all(bound <= seconds for seconds, bound, _ in cases)
    sizes = {setup: predict_memory(workload, setup).total for *_, setup in cases}
    for limit in (INF, 0.6 * max(sizes.values())):
        found = [e for e in search.try_in_order(workload, rates, limit, ways, MODES) if e.time]
        fastest = min(seconds for seconds, _, setup in cases if sizes[setup] <= limit)
        assert min(e.step_s for e in found) == fastest
        assert all(e.memory.total <= limit for e in found)


def run(capsys, words, tmp_path=None):
    """What it prints; with a folder also what it stores."""
    words = words.split() if isinstance(words, str) else list(words)
    assert main(["plan", *words, *(["--json", f"{tmp_path}/p.json"] if tmp_path else [])]) == 0
    out = capsys.readouterr().out
    return (out, json.loads((tmp_path / "p.json").read_text())) if tmp_path else out


def test_what_is_printed_and_stored(capsys, tmp_path):
    for pp in (1, 2):
        out, stored = run(capsys, f"--gpus 2 --pp {pp}", tmp_path)
        rows, limit = stored["layouts"], stored["limit_bytes"]
        assert {row["pp"] for row in rows} == {pp}
        assert all(row["fits"] == (row["memory_bytes"]["total"] <= limit) for row in rows)
        times = [row["time"]["step_s"] for row in rows if row["fits"]]
        assert times[1:] == sorted(times[1:])
        for words in ("124,475,904 parameters", "2 x "):
            assert words in out
        assert ("why not the others" in out) == (pp == 1)  # of which there are none
        assert ("--pp 2" in out.splitlines()[-1]) == (pp == 2)
    out = run(capsys, "--gpu list")
    assert all(name in out for name in ("v100", "h100", "4090", "cpu", "ib-ndr"))


def test_a_preset_is_planned_with_its_own_vocabulary(capsys, tmp_path):
    """The size that its name says; on a CPU that of the trainer's own tokenizer."""
    for words, rows, tokenizer in (
        ("--model qwen3-0.6b --gpus 1", 151_936, "--tokenizer bpe-151936"),
        ("--model qwen3-0.6b --gpus 1 --vocab-size 50257", 50_257, "--tokenizer gpt2"),
        ("--model llama-tiny --gpus 1 --gpu cpu", 4_096, "--model llama-tiny --"),
    ):
        out, stored = run(capsys, words, tmp_path)
        assert stored["shape"]["vocab_size"] == rows
        assert f"parameters with a vocabulary of {rows:,}" in out
        assert tokenizer in out.splitlines()[-1]


def test_long_steps_have_all_their_digits(capsys):
    words = "--model gpt2-xl --gpus 1 --gpu a100 --batch-size 4096 --top 3"
    printed = run(capsys, words)
    assert re.search(r"time +.*[^.\d]\d{2,3},\d{3} ms", printed)
    assert not re.search(r"\de\+\d", printed)


@pytest.mark.slow
def test_what_is_asked_for_is_what_is_compared(capsys, tmp_path):
    limits = {}
    for percent, words in ((10, ""), (0, "--headroom 0"), (50, "--headroom 0.5")):
        out, stored = run(capsys, words, tmp_path)
        limits[percent] = limit = stored["limit_bytes"]
        free = f"{percent}% headroom subtracted (--headroom)"
        assert f"{limit / 1e9:,.1f} GB per rank for tensors, {free}" in out
        assert stored["layouts"][0]["memory_bytes"]["total"] <= limit
        assert limit == pytest.approx((1 - percent / 100) * limits[10] / 0.9)
    out, stored = run(capsys, "--model gpt2-xl --gpus 8 --tp-grid 2x2x2", tmp_path)
    assert {layout["tp_grid"] for layout in stored["layouts"]} == {"2x2x2"}
    out, stored = run(capsys, "--n-expert 8 --gpus 4 --optimizer muon", tmp_path)
    layouts = stored["layouts"]
    seen = {(row["tp"], row["ep"]) for row in layouts if row["pp"] == row["cp"] == 1}
    assert seen == {(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)}
    assert {row["pp"] for row in layouts} > {1}
    assert {row["tp_grid"] for row in layouts} == {None}
    assert " --n-expert 8 " in out.splitlines()[-1]


@pytest.mark.slow
def test_what_wins_where(capsys):
    """Stages over a slow link, no grid on a node, offload where nothing else fits."""
    command = PlanCommand(gpus=8, gpus_per_node=1, inter_link="eth-25", batch_size=64)
    found = plan.make_plan(command)
    winner = found.estimates[0].setup
    assert winner.mesh.pp > 1
    assert search.refused(found.workload, winner) is None
    big = "--n-layer 48 --n-embd 10240 --n-head 64 --gpus 64 --gpu a100 --pp 2 --gpus-per-node 1"
    assert "dp 32 x pp 2, ZeRO-3, interleaved" in run(capsys, big)

    def on_8(**asked):
        cluster, template = Cluster.of("h100", 8, None), Setup(8, **asked)
        rates, fixed = DatasheetRates(cluster, template), {"pp", *asked}
        return search.search(XL, template, rates=rates, limit_bytes=70e9, per_node=8, fixed=fixed)

    found = on_8()
    grids = [e for e in found if e.setup.mesh.tp_grid is not None]
    assert found[0].setup.mesh.tp_grid is None
    assert {e.setup.mesh.tp_grid for e in grids} >= {"2x2", "2x4", "4x2"}
    assert all(e.setup.micro_batch_size % e.setup.rows == 0 for e in grids)

    found = plan.make_plan(PlanCommand(model="gpt2-xl", gpus=1, gpu="4090"))
    winner = found.estimates[0]
    assert winner.setup.parallel.offload.what == "optimizer"
    assert winner.time.parts["offload"] > 0 == winner.time.parts["optimizer"]
    assert sum(winner.time.parts.values()) == pytest.approx(winner.time.step_s)
    assert "host     28.0 GB of host memory per rank" in report(found)
    line = " ".join(plan.flags(found, winner.setup))
    assert ("--offload optimizer" in line, "--chunks" in line) == (True, False)
    fits = plan.make_plan(PlanCommand(model="gpt2", gpus=1, gpu="h100"))
    assert {
        (e.setup.parallel.offload.what, e.setup.parallel.zero_stage) for e in fits.estimates
    } == {(None, 0)}


BAD = [
    ("--model gpt3", r"plan: expected model to be one of gpt2, .* got model=gpt3"),
    ("--model gpt2-xk", r"did you mean gpt2-xl\?"),
    ("--gpus 0", r"plan: expected gpus >= 1, got gpus=0; set --gpus"),
    ("--block-size 0", r"plan: expected block_size >= 1, got block_size=0"),
    ("--gpu h1000", r"got name=.?h1000.*h100"),
    ("--gpus-per-node 0", r"plan: expected gpus_per_node >= 1, got gpus_per_node=0"),
    ("--headroom 1", r"plan: expected headroom >= 0 and < 1, .* got headroom=1.0; set --h"),
    (
        "--model gpt2-large --gpus 1 --gpu a10 --batch-size 1 --headroom 0.97",
        r"minus a headroom of 97%\), got 774,090,240 parameters, .*; use --headroom 0 \(lea",
    ),
    ("--price -1", r"plan: expected price >= 0, got price=-1"),
    # More than the layers, so no pipeline either.
    ("--gpus 13 --batch-size 7", r"got batch_size=7 with gpus=13; use --batch-size 13 or 26"),
    ("--gpu v100 --dtype bf16", r"expected fp16 or fp32 on v100.*got dtype=bf16"),
    ("--gpu cpu --dtype fp16 --gpus 1", r"expected dtype fp32 or bf16 on the CPU"),
    ("--gpus 6 --pp 4", r"pp to divide the 6 ranks and .* 12 \(12 layers\), got pp=4; use --pp 2"),
    ("--gpus 24 --pp 24", r"to be at most 12 \(12 layers\), got pp=24; use --pp 6 or 8 or 12"),
    (
        "--n-layer 96 --n-embd 12288 --n-head 96 --gpus 8 --pp 4",
        r"fits into .* on .*pp 4, .* take [34]\d\d\.\d GB .*; use no --pp, to compare",
    ),
    (
        "--model gpt2-xl --gpus 1 --gpu 4090 --n-layer 400",
        r"plan: expected a model that fits into 2\d\.\d GB a rank .*, got .*; use .*--gpus \d",
    ),
    ("--vocab-size 2000000", "plan: expected a vocab_size of a tokenizer of `fastpar train`"),
    ("--n-expert 8 --gpus 13 --batch-size 3", "of the data-parallel ranks, got batch_size=3"),
    ("--tp-grid 3x2", "plan: expected the 6 ranks of tp_grid=3x2 to divide gpus=8; change"),
    ("--tp-grid 2x2 --batch-size 6", r"plan: expected batch_size as a multiple of 4 \(data"),
    ("--n-head 2 --n-embd 24 --tp-grid 16x1", "of tp_grid to divide n_embd=24, got tp_g"),
    ("--gpus 1 --fp8 mlp", r"save at least 3% of a step, got fp8=mlp with n_embd=768: [-\d.]+ of"),
    ("--gpus 1 --fp8 mlp --gpu a100", "a GPU with fp8 products .*, got gpu=a100"),
    ("--gpus 1 --fp8 mlp --gpu cpu", r"b200\) and dtype=bf16 for fp8=mlp, got gpu=cpu"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [slow(*row) if "12288" in row[0] or "400" in row[0] else row for row in BAD],
    ids=[w for w, _ in BAD],
)
def test_bad_input(words, said, capsys):
    assert main(["plan", *words.split()]) == 2
    assert re.search(said, capsys.readouterr().err)


def rates_of(gpu, **settings):
    setup = Setup(micro_batch_size=16, **settings)
    return DatasheetRates(Cluster.of(find_device(gpu), 1, None), setup), setup


def test_8_bit_products_pay_where_they_are_large():
    rates, setup = rates_of("h100")
    m, k, n = 16384, 1600, 6400
    assert rates.fp8_saves_s(m, k, n) > 0
    assert rates.fp8_saves_s(64, 256, 256) < 0
    workload = replace(XL, batch_size=16)
    mlp = 48 * (rates.fp8_saves_s(m, k, n) + rates.fp8_saves_s(m, n, k))
    assert plan.saved_s(workload, setup, rates, "mlp") == pytest.approx(mlp, rel=1e-12)
    more = rates.fp8_saves_s(m, k, 3 * k) + rates.fp8_saves_s(m, k, k)
    assert plan.saved_s(workload, setup, rates, "all") == pytest.approx(mlp + 48 * more, rel=1e-12)
    wide = PlanCommand(model="gpt2-xl", n_embd=4096, n_head=32, n_layer=8, gpus=1, fp8="all")
    found = plan.make_plan(wide)
    assert " --fp8 all" in report(found).rpartition("fastpar train")[2]
    assert all(e.setup.flags.system.fp8 == "all" for e in found.estimates)


# Every command that is printed is parsed and built, as Trainer.__init__ builds: model, engine and
# optimizer, on one real rank of a lone mesh. Only the text is made up: its tokenizer has as many
# tokens as the command's has.
SIZES = {"auto": 4096, "chars": 65, "bytes": 256, "gpt2": 50257}


def text_of(source, tokenizer, *, block_size, **others):
    if tokenizer != "auto":
        check_name(tokenizer)
    size = SIZES.get(tokenizer) or int(tokenizer.removeprefix("bpe-"))
    tokens = torch.zeros(2, dtype=torch.int64).numpy()
    return TextData(source, tokens, tokens, ByteTokenizer(), size)


def built(words, monkeypatch):
    """The trainer of a printed command; the other ranks are not there."""
    config = parse_train(shlex.split(words)[shlex.split(words).index("train") + 1 :])
    ranks = config.system.nproc
    found = re.search(r"--nnodes (\d+) --nproc-per-node (\d+)", words)
    ranks = int(found[1]) * int(found[2]) if found else ranks
    changes = {"device": "cpu", "nproc": 1}
    if config.system.dtype == "fp16":  # which no CPU trains: as many bytes, the same paths
        changes["dtype"] = "bf16"

    def alone(model, mesh, settings, **options):
        heard_only = Debug(collectives=heard([]))
        settings = settings.change(transport="auto")
        return parallelize(model, mesh, settings, debug=heard_only, **options)

    monkeypatch.setattr(set_up, "parallelize", alone)
    monkeypatch.setattr(start, "load_data", text_of)
    axes = {axis: getattr(config.mesh, axis) for axis in ("tp", "cp", "pp")}
    axes["tp_grid"] = parse_grid(config.mesh.tp_grid)
    with LoneMesh(ranks, 0, **axes) as mesh:
        return config, train.Trainer(config.replace(changes), mesh)


def check_all(monkeypatch, capsys, words, *, all_layouts):
    """The winner's command, or those of all layouts, build what they were taken for."""
    seen = []
    with monkeypatch.context() as patch:
        patch.setattr(plan, "report", lambda made, f=plan.report: seen.append(made) or f(made))
        assert main(["plan", *map(str, words)]) == 0
    (made_plan,), out = seen, capsys.readouterr().out
    estimates = made_plan.estimates
    assert out.rstrip().endswith(command_lines(made_plan, estimates[0].setup)[-1])
    fits = [e.setup for e in estimates if e.time is not None]
    for setup in fits if all_layouts else fits[:1]:
        line = command_lines(made_plan, setup)[-1]
        config, made = built(line, monkeypatch)
        assert vars(made.model.config) == vars(made_plan.workload.shape), line
        assert made.mesh.world_size == setup.world_size
        assert made.mesh.tp_size == setup.tp * setup.rows
        steps = {name: getattr(setup, name) for name in ("micro_batch_size", "grad_accum_steps")}
        assert {name: getattr(made, name) for name in steps} == steps, line
        assert made.engine.stage.number == setup.parallel.zero_stage or setup.dp == 1
        assert made.engine.settings.n_shards == setup.n_shards or not setup.parallel.zero_stage, (
            line
        )
        again = Setup(setup.world_size, config, setup.device_type, setup.transport, **steps)
        found, told = again.in_effect(), setup.in_effect()
        if setup.tp == 1:  # of one rank nothing is shared out
            told["sequence_parallel"] = found["sequence_parallel"]
        assert found == told, line
        if setup.dtype != "fp16":  # whose weights are fp32
            assert next(made.model.parameters()).dtype == DTYPES[setup.dtype]


def shape(vocab, heads, tokens, batch=12):
    return (
        *("--n-layer", 2, "--n-head", heads, "--n-embd", 8 * heads, "--block-size", tokens),
        *("--vocab-size", vocab, "--batch-size", batch),
    )


ODD = [
    # vocabulary, heads, tokens, ranks, more
    (65, 3, 17, 1, ("--gpu", "cpu")),  # characters
    (257, 6, 24, 6, ("--gpu", "h100", "--moment-dtype", "int8")),
    (300, 5, 63, 2, ("--gpu", "v100")),
    (50257, 1, 8, 3, ("--gpu", "cpu", "--dtype", "bf16")),
    (50304, 6, 33, 6, ("--gpu", "a100", "--gpus-per-node", 3, "--master-weights", "remainder")),
    (4096, 4, 16, 2, ("--gpu", "cpu")),
    (256, 4, 16, 4, ("--gpu", "cpu", "--tp-grid", "2x2")),
    (300, 4, 16, 12, ("--gpu", "cpu", "--tp-grid", "2x2x3")),
    (256, 4, 16, 4, ("--gpu", "cpu", "--n-expert", 4)),
    (256, 4, 16, 2, ("--gpu", "h100", "--n-expert", 2, "--optimizer", "muon", "--pp", 2)),
]


@pytest.mark.parametrize("case", ODD, ids=lambda case: "-".join(map(str, case[:4])))
def test_what_is_printed_is_parsed_and_built(case, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    vocab, heads, tokens, ranks, more = case
    words = (*shape(vocab, heads, tokens), "--gpus", ranks, *more)
    check_all(monkeypatch, capsys, words, all_layouts=False)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3-tiny", "llama-tiny", "nanochat-tiny"])
def test_commands_of_todays_blocks_are_parsed_and_built(model, monkeypatch, capsys, tmp_path):
    """All layouts: at tp 4 ranks share the two heads of keys of the first two."""
    monkeypatch.chdir(tmp_path)
    words = ("--model", model, "--vocab-size", 300, "--batch-size", 16, "--gpus", 8)
    check_all(monkeypatch, capsys, (*words, "--gpu", "h100"), all_layouts=True)


@pytest.mark.slow
def test_every_layout_is_parsed_and_built(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    for vocab, heads, tokens, ranks, more in ODD:
        words = (*shape(vocab, heads, tokens), "--gpus", ranks, *more)
        check_all(monkeypatch, capsys, words, all_layouts=vocab < 1000)
    kinds = (("cpu", "fp32"), ("cpu", "bf16"), ("v100", "fp16"), ("h100", "bf16"))
    for n, (ranks, heads) in enumerate(((2, 1), (3, 3), (6, 6), (6, 3))):
        gpu, dtype = kinds[n]
        words = (*shape((256, 257, 300, 50304)[n], heads, (8, 17, 63)[n % 3]), "--gpus", ranks)
        check_all(monkeypatch, capsys, (*words, "--gpu", gpu, "--dtype", dtype), all_layouts=True)
