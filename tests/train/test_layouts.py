"""The same run however ranks share it: bits, curves, resumes at other layouts, what it costs."""

import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from cells import slow
from train_runs import (
    FEW,
    RANDOM,
    STORAGE,
    TINY,
    Runs,
    bits,
    check_same,
    flags_of,
    forget_after,
    steps,
)

from fastpar import GPT, GPTConfig, engine_of, parallelize
from fastpar.axes.pipeline import stage_layers
from fastpar.axes.step import Setup
from fastpar.checkpoint.reader import newest_checkpoint
from fastpar.checkpoint.restore import load_weights
from fastpar.cli import main
from fastpar.comm.mesh import Mesh
from fastpar.engine.control import Control
from fastpar.engine.engine import Engine
from fastpar.files.runs import list_checkpoints
from fastpar.files.tensor_file import TensorFile
from fastpar.models import set_up
from fastpar.optim.schedule import DynamicLossScale
from fastpar.settings.config import TrainConfig
from fastpar.settings.model import part_flops
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks
from fastpar.train import trainer as train_module
from fastpar.train.trainer import validation_loss

run = Runs(**FEW)
SAME = {**FEW, "deterministic": True}
EXPERTS = {"n_layer": 2, "n_expert": 4, "balance_loss": 0.1, "router_z_loss": 0.01}
EXPERTS |= {"balance_rate": 0.01}
FP8 = {"n_layer": 2, "fp8": "all", "fp8_emulate": True}
DELAYED = {**FP8, "fp8_scaling": "tensor", "fp8_weight_gradient": "fp8"}
DOCUMENTS = {"data": "texts", "pack": "documents", "tokenizer": "bpe-300", "n_layer": 4}
DOCUMENTS |= {"micro_batch_size": 1, "dropout": 0.1}
# What a run trains, however it is shared: with dropout and clipping.
BASES = {
    "dense": {},
    "bf16": {"dtype": "bf16"},
    "deep": {"n_layer": 3, "eval_every": 2},
    "deep, bf16 moments": {"n_layer": 3, **RANDOM[0]},
    "deep, rounding": {"n_layer": 3, **RANDOM[1]},
    "average": {"n_layer": 3, "ema": 0.3},
    "average, bf16": {"ema": 0.3, "dtype": "bf16", "master_weights": "remainder"},
    "muon": {"n_layer": 3, "optimizer": "muon", "ema": 0.3},
    "experts": EXPERTS,
    "experts, bf16 moments": {**EXPERTS, **RANDOM[0]},
    "experts, rounding": {**EXPERTS, "dtype": "bf16", "stochastic_rounding": True},
    "fp8": FP8,
    "fp8 delayed": DELAYED,
    "fp8 blocks": {**FP8, "fp8_scaling": "block", "dtype": "bf16"},
    "documents": DOCUMENTS,
}
Z1, Z2, Z3 = ({"zero_stage": stage} for stage in (1, 2, 3))
FULL, SELECTIVE = ({"activation_checkpointing": mode} for mode in ("full", "selective"))
UNSHARED = {"sequence_parallel": False}
CODES = {**Z3, "wire_weights": "fp8"}


def stages(schedule, **more):
    return {"pp": 2, "schedule": schedule, **more}


LAYOUTS = [
    ("dense", 1, {**Z3, "accumulate": "shard"}),
    ("dense", 2, {"zero_stage": 0, "accumulate": "shard"}),
    ("dense", 2, {**Z1, "accumulate": "full"}),
    ("dense", 4, Z2),
    ("dense", 4, {**Z3, "shard_size": 2}),
    slow("dense", 2, {**Z3, "transport": "torch", **FULL}),
    slow("dense", 2, {**Z3, "accumulate": "shard", "bucket_mb": 1e-3}),
    slow("dense", 4, {**Z1, "shard_size": 2}),
    slow("bf16", 4, Z3),
    ("deep", 2, {"pp": 2, **Z2}),
    slow("deep", 3, {"pp": 3, "schedule": "gpipe", "pp_split": "1,1,1"}),
    slow("deep", 2, {"pp": 2, "on_nonfinite": "skip", "pp_split": "0,3"}),
    ("deep", 2, stages("zb-v", pp_split="0,1,1,1", zero_stage=3)),
    slow("deep", 4, {"pp": 2}),
    slow("deep", 2, stages("zb-v", **FULL)),
    slow("deep", 2, stages("zb-h1", **SELECTIVE)),
    slow("deep", 2, stages("interleaved", **SELECTIVE)),
    slow("deep", 3, {"pp": 3, "schedule": "zb-h1"}),
    slow("deep, bf16 moments", 2, {"pp": 2}),  # both copies of the tied table are rounded alike
    slow("deep, rounding", 2, {"pp": 2}),
    slow("average", 4, {**Z3, "shard_size": 2}),
    ("average, bf16", 2, Z3),
    slow("muon", 2, Z3),
    slow("muon", 4, {**Z2, "shard_size": 2}),
    slow("muon", 2, {"pp": 2, "pp_split": "0,3", **Z1}),  # a stage without a layer
    ("experts", 2, {"ep": 2, **Z3}),
    slow("experts", 4, {"ep": 4, **Z2, "shard_size": 4}),
    slow("experts", 4, {"ep": 2, "pp": 2, **Z1}),
    slow("experts", 4, {"ep": 2, **Z2, **FULL}),
    slow("experts, bf16 moments", 2, {"ep": 2}),
    slow("experts, rounding", 2, {"ep": 2}),
    slow("fp8", 2, {**Z2, **FULL}),
    ("fp8 delayed", 2, CODES),
    slow("fp8 delayed", 4, {**CODES, "pp": 2, "pp_split": "2,0"}),  # no layers: no codes
    slow("fp8 blocks", 2, Z3),
    slow("fp8 blocks", 2, {"pp": 2, **FULL}),
    slow("documents", 2, {"pp": 2, **Z2}),
    slow("documents", 2, stages("zb-v", zero_stage=3, **FULL)),
    slow("documents", 2, stages("interleaved")),
    slow("documents", 3, {"pp": 3, "schedule": "zb-h1"}),
]


def name(value):
    if isinstance(value, dict):
        return "-".join(f"{key}={x}" for key, x in value.items())
    return ">".join(f"{ranks}" for ranks, _ in value) if isinstance(value, list) else str(value)


@pytest.mark.parametrize(("base", "ranks", "layout"), LAYOUTS, ids=name)
def test_every_layout_has_the_bits_of_one_process(made, base, ranks, layout):
    """Losses, norms, validations, texts, weights, moments, averages and scales."""
    settings = {**SAME, **BASES[base]}
    one = made(1, **settings)
    assert 0 < max(row["grad_norm"] for row in steps(one)) != 1.0
    check_same(made(ranks, **settings, **layout), one)


@pytest.mark.slow
def test_what_a_base_trains_is_no_other(made):
    """So none of the settings above is lost on its way."""
    found = [steps(made(1, **{**SAME, **base}))[-1]["loss"] for base in BASES.values()]
    assert len({round(loss, 12) for loss in found}) >= len(BASES) - 2  # averages change no loss


# The losses of these runs are near 5.5, their norms below that; single precision has 24 bits, and
# before clipping and dividing by sqrt(exp_avg_sq) a step hands on what its sums of some hundred
# products were rounded by: less than 2**5 units in the last place.
ROUNDING = 2.0 ** -(24 - 5)
SPLIT = {**FEW, "n_layer": 2, "n_head": 4}
HOPS = {
    "averages": ({**SAME, **STORAGE[0], "ema": 0.3}, [(2, Z3), (1, {}), (2, Z2), (2, Z1)]),
    "rounding": ({**SAME, **STORAGE[1]}, [(2, Z3), (1, {}), (2, Z2), (2, Z1)]),
    "pipelines": (
        {**SAME, "n_layer": 3},
        [
            (2, {"pp": 2}),
            (3, {"pp": 3, **Z1}),
            (2, stages("interleaved")),
            (2, stages("zb-v", **Z3)),
        ],
    ),
    "muon": ({**SAME, **BASES["muon"]}, [(2, Z3), (1, {}), (2, {"pp": 2, **Z1}), (2, Z2)]),
    "experts": ({**SAME, **EXPERTS}, [(4, {"ep": 4, **Z2}), (2, {"ep": 2, **Z3}), (1, {})]),
    "fp8": ({**SAME, **DELAYED}, [(1, {}), (4, CODES), (2, {"pp": 2}), (2, CODES)]),
    "documents": ({**SAME, **DOCUMENTS}, [(1, {}), (2, Z1)]),
    "wsd": ({**SAME, "lr_schedule": "wsd", "lr_decay_fraction": 0.75}, [(1, {}), (2, Z3), (2, {})]),
    "tp": (SPLIT, [(1, {}), (4, {"tp": 2, **Z3}), (4, {"tp": 4, **UNSHARED}), (2, Z1)]),
    "cp": (SPLIT, [(2, {"cp": 2}), (1, {}), (4, {"cp": 2, "tp": 2, **Z3})]),
    "grid": (SPLIT, [(4, {"tp_grid": "2x2", **Z1, **FULL}), (2, {"tp": 2})]),
    "cp of documents": (
        {**SPLIT, **DOCUMENTS, "n_layer": 2},
        [(2, {"cp": 2, "cp_method": method}) for method in ("keys", "heads", "keys")],
    ),
}
FEW_HOPS = ("averages", "tp")


@pytest.mark.parametrize("case", [case if case in FEW_HOPS else slow(case) for case in HOPS])
def test_a_run_goes_on_at_any_other_layout(made, case):
    """A step at each, from the checkpoint of the one before: as if uninterrupted."""
    settings, hops = HOPS[case]
    settings = {**settings, "save_every": 1}
    out = made.cut(1, hops[0][0], **settings, **hops[0][1])
    for step, (ranks, layout) in enumerate(hops[1:], 1):
        forget_after(out, step)
        made.go_on(out, ranks, **{**settings, **layout})
    check_same(out, made(1, **settings), rel=0.0 if "deterministic" in settings else ROUNDING)


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (1, {**TINY, "micro_batch_size": 2}),
        slow(4, {**SPLIT, "tp": 2, **Z3}),
        slow(2, {**SPLIT, "cp": 2, **Z3}),
        *(slow(1, {**TINY, **storage}) for storage in ({"dtype": "bf16"}, *STORAGE[1:])),
        *(slow(2, {**FEW, **storage}) for storage in STORAGE),
        slow(2, {**FEW, **Z1}),
        slow(4, {**FEW, **Z3, "shard_size": 2}),
    ],
    ids=name,
)
def test_a_resume_on_the_same_ranks_has_the_bits_of_the_whole_run(made, ranks, settings):
    """Also where other ranks would have other bits."""
    half = settings["max_steps"] // 2
    out = made.cut(half, ranks, **settings)
    made.go_on(out, ranks, **settings)
    check_same(out, made(ranks, **settings))


def train_in_fp64(changes):
    """(step, loss) of validations and (loss, norm, requests) of steps, on one rank."""
    trainer, found = Runs(**SPLIT).trainer(**changes), []
    tp = trainer.model.tp
    if "tp" in changes:
        assert tp.sequence_parallel == changes.get("sequence_parallel", True)
    for _ in range(3):
        trainer.validate()
        found += [torch.tensor(trainer.val).double(), trainer.train_step().values]
    return torch.cat(found)


MUON = {"optimizer": "muon", "muon_lr": 1e-3}


@pytest.mark.parametrize(
    ("settings", "ranks", "layout"),
    [
        ({}, 4, {"tp": 4, **UNSHARED}),
        slow({}, 4, {"tp": 2, **Z3, **FULL}),
        ({}, 2, {"cp": 2, **Z3, **SELECTIVE}),
        slow({}, 3, {"cp": 3, **Z2}),
        ({}, 4, {"tp_grid": "2x2", **Z1, **FULL}),
        slow(MUON, 4, {"cp": 2, "tp": 2}),
        slow(EXPERTS, 4, {"cp": 2, "cp_method": "keys", "ep": 2, **Z2}),
        slow(DOCUMENTS, 2, {"cp": 2, **Z1}),
        slow({}, 4, {"tp": 4, "accumulate": "shard"}),
        slow({}, 4, {"tp": 2, **Z2, **UNSHARED}),
        slow({}, 4, {"tp": 2, **Z1, **SELECTIVE}),
        slow({}, 4, {"cp": 2, "pp": 2, "grad_accum_steps": 4}),
        slow({}, 4, {"cp": 2, **Z1, "accumulate": "shard"}),
        slow({}, 4, {"cp": 2, "tp": 2, **UNSHARED, **FULL}),
        slow({}, 4, {"pp": 2, "tp": 2}),
        slow({}, 4, {"tp_grid": "2x1x2", **Z2, "micro_batch_size": 4}),
        slow({}, 8, {"tp_grid": "2x2x2", "micro_batch_size": 4, **SELECTIVE}),
        slow(MUON, 2, {"tp": 2, **Z1}),
        slow(DOCUMENTS, 4, {"cp": 2, "tp": 2, "cp_method": "keys"}),
        slow(DOCUMENTS, 4, {"cp": 2, "pp": 2}),
    ],
    ids=name,
)
def test_ranks_that_split_layers_have_the_curve_of_one_process(
    here, monkeypatch, settings, ranks, layout
):
    """In fp64, where a difference that is no rounding cannot hide."""
    real = set_up.parallelize
    monkeypatch.setattr("fastpar.train.start.pick_dtype", lambda *given: "fp64")
    monkeypatch.setattr(
        set_up, "parallelize", lambda model, mesh, s: real(model, mesh, s.change(grad_dtype=None))
    )
    [one] = run_ranks(train_in_fp64, 1, settings)
    found = run_ranks(train_in_fp64, ranks, {**settings, **layout})
    assert all(torch.equal(x, found[0]) for x in found)
    torch.testing.assert_close(found[0], one, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "layouts",
    [
        [(2, Z1), (2, Z3)],
        slow([(4, {"tp": 2, **Z3, "sequence_parallel": shared}) for shared in (0, 1)]),
    ],
    ids=["stages", "tp"],
)
def test_all_ranks_skip_a_step_that_overflows(here, monkeypatch, layouts):
    """fp16 is refused on the CPU; the loop's part of it, a loss scale for all ranks, is run.

    Its gradients below 2**-14 lose bits when the mean over more micro-batches divides them: the
    same number of dp ranks for all. Under sequence parallelism a bias' gradient is summed over 1/tp
    of the tokens in fp16, and these sums in fp32: what overflows in one process may not there.
    """
    monkeypatch.setattr("fastpar.train.start.pick_dtype", lambda *given: "fp16")
    monkeypatch.setattr(
        train_module, "DynamicLossScale", lambda **rest: DynamicLossScale(init=2.0**20, **rest)
    )

    def skipped(out):
        return [row["grad_norm"] is None for row in steps(out)]

    run("plain", 2, deterministic=True)
    assert skipped("plain")[0]
    assert not skipped("plain")[-1]
    for i, (ranks, layout) in enumerate(layouts):
        shared = bool(layout.get("sequence_parallel"))
        run(f"r{i}", ranks, deterministic=True, **{**layout, "sequence_parallel": shared or None})
        if "tp" not in layout:
            check_same(f"r{i}", "plain")
        elif shared:
            assert skipped(f"r{i}")[0] > skipped(f"r{i}")[-1]
        else:
            assert skipped(f"r{i}") == skipped("plain")
            # fp16 has 11 bits; a loss is a mean of losses that are computed from fp16 logits.
            losses = [[row["loss"] for row in steps(out)] for out in (f"r{i}", "plain")]
            assert losses[0] == pytest.approx(losses[1], rel=2.0**-11)


SHAPE = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8, vocab_size=130, dropout=0.5)
TOKENS = np.random.default_rng(0).integers(0, 130, 7 * 8 + 1).astype(np.uint16)  # seven windows


def validated(axes, stage, rows, n_batches):
    model = parallelize(
        GPT(SHAPE).double(), Mesh(**axes, device="cpu"), Parallel.of(zero_stage=stage)
    )
    return validation_loss(
        model, engine_of(model), TOKENS, rows=rows, block_size=8, n_batches=n_batches
    )


@pytest.mark.parametrize(
    ("ranks", "stage", "axes"),
    [
        *((1, 0, {}), (2, 0, {}), (3, 3, {}), (4, 3, {}), (4, 0, {"tp": 2}), (4, 3, {"tp": 2})),
        *((2, 3, {"tp_grid": (1, 2)}), (4, 0, {"tp_grid": (2, 1, 2)})),
        slow(8, 3, {"tp_grid": (2, 1, 2)}),
        slow(8, 0, {"tp_grid": (2, 2, 2)}),
    ],
    ids=name,
)
def test_every_window_counts_once_in_validation(ranks, stage, axes):
    """Some ranks get fewer of the seven, or none, and the last batch has one; dropout is off."""
    model = GPT(SHAPE).double().eval()
    ids = torch.from_numpy(TOKENS.astype(np.int64))
    with torch.no_grad():
        expected = model(ids[:-1].view(7, 8), ids[1:].view(7, 8)).item()
        first = model(ids[:32].view(4, 8), ids[1:33].view(4, 8)).item()
    for rows in (1, 2, 4) if "tp_grid" not in axes else (2, 4):
        found = run_ranks(validated, ranks, axes, stage, rows, 100)
        assert len(set(found)) == 1
        assert found[0] == pytest.approx(expected, rel=1e-12)
    assert run_ranks(validated, ranks, axes, stage, 2, 2)[0] == pytest.approx(first, rel=1e-12)


# What a step sends, what a run says, what is left of it


def test_a_step_has_one_exchange(here, monkeypatch):
    counted = []
    places = ((Control, "exchange"), (Engine, "all_reduce_scalars"), (Mesh, "broadcast_"))
    for cls, method in places:
        real = getattr(cls, method)

        def call(self, *args, method=method, real=real, **rest):
            counted.append(method)
            return real(self, *args, **rest)

        monkeypatch.setattr(cls, method, call)

    def three(stage):
        trainer = run.trainer(zero_stage=stage, deterministic=True)
        counted.clear()
        return [trainer.train_step().values.tolist() for _ in range(3)]

    for stage in range(4):
        counted.clear()
        one, two = run_ranks(three, 2, stage)
        assert counted == ["exchange"] * 6
        assert one == two
        assert all(math.isfinite(x) for values in one for x in values)


def test_stages_are_told_and_their_files_are_one_model(here, capsys):
    run("r", 2, pp=2, n_layer=3, max_steps=2)
    printed = capsys.readouterr().out
    parts = part_flops(GPTConfig(3, 2, 16, 16, 256))  # those of bytes
    quick, long = sorted((sum(parts[:3]), sum(parts[3:])))
    waits = 1 - 6 * (long + quick) / (12 * long + 3 * quick)  # both work 12 of their own a step
    line = f"stages   2 + 1 layers, 1f1b over 4 micro-batches: ranks wait for {waits:.0%} of a step"
    assert line in printed
    assert "ranks    dp 1, pp 2, stage 0" in printed
    model = load_weights("r/latest")
    assert model.wte.weight.shape[1] == 16
    assert torch.isfinite(model.h[2].mlp.c_fc.weight).all()

    def split(pp):
        shape = {"n_layer": 12, "n_embd": 768, "block_size": 1024}
        config = TrainConfig().replace({"pp": pp, **shape})
        return list(stage_layers(config.model_config(50304), Setup(flags=config)))

    # The output layer of 124M weighs 4.9 layers, so the last of two stages has fewer layers.
    assert [split(2), split(4), split(1)] == [[8, 4], [4, 4, 4, 0], [12]]


@pytest.mark.parametrize("layout", [{"tp": 2}, slow({"cp": 2}), slow({"tp": 4})], ids=name)
def test_sample_and_export_take_a_run_of_ranks(here, capsys, layout):
    """The text at the end is that of the weights that it saved, whole; rank 0 alone draws it."""
    Runs(**SPLIT)("r", 4, **layout, max_steps=2, num_samples=2)
    drawn = Path("r/samples.txt").read_text().partition("\n")[2]
    capsys.readouterr()
    options = ["--num-samples=2", f"--max-new-tokens={TINY['max_new_tokens']}", "--seed=1"]
    assert main(["sample", "r", *options]) == 0
    assert capsys.readouterr().out == drawn
    assert main(["export", "r", "--to=given"]) == 0
    assert main(["sample", "given", *options]) == 0
    assert capsys.readouterr().out.endswith(drawn)


@pytest.mark.slow
def test_the_time_is_up_for_all_ranks(here):
    run("r", 4, tp=2, zero_stage=2, max_steps=10**6, max_time="1s", eval_every=0, save_every=0)
    [path] = list_checkpoints("r")
    assert int(path.name.removeprefix("step_")) == steps("r")[-1]["step"] < 10**6


# Processes


def train_in(folder, changes):
    os.chdir(folder)
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    return run.trainer(**changes).run()


def test_two_processes_have_the_bits_of_one(here):
    """Two micro-batches of 4 are summed the same way in one process; halving them is exact."""
    run("one", micro_batch_size=4)
    two = {"micro_batch_size": None, "out": "two"}
    assert run_ranks(train_in, 2, here, two, backend="gloo") == [0, 0]
    check_same("two", "one")
    for row in steps("two"):
        assert 0 < row["exposed_ms"] < row["step_ms"]
        assert row["comm_ms"] > 0
        assert row["wire_mb"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_threads_do_not_matter(here, dtype):
    """One process with two threads is the run of two with one each, as cores are shared out."""
    sizes = {"n_embd": 256, "block_size": 128, "batch_size": 2, "micro_batch_size": 1}
    flags = flags_of({**SAME, **sizes, "dtype": dtype, "max_steps": 2, "save_every": 0})
    for out, cut in (("one", ["--nproc=1", "--threads=2"]), ("two", ["--nproc=2", "--threads=1"])):
        words = [sys.executable, "-m", "fastpar", "train", *flags, f"--out={out}", *cut]
        subprocess.run(words, check=True)
    check_same("two", "one")


@pytest.mark.slow
def test_processes_of_both_launchers_print_the_curve_of_one(here):
    Runs(**SPLIT)("one")
    words = ["train", *flags_of(SPLIT), "--nproc=4", "--tp=2", "--zero=2", "--out=four"]
    own = [sys.executable, "-m", "fastpar", *words]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node=2", "-m", "fastpar", "train", "--resume", "--out=four"]
    for command in (own, [*torchrun, "--zero=0"]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        if command == own:
            told = "ranks    dp 2, tp 2 (sequence parallel), stage 2, shards 2, transport shm"
            assert told in done.stdout
            check_same("four", "one", rel=ROUNDING)
            forget_after("four", 2)
    check_same("four", "one", rel=ROUNDING)


def dies_in_a_save(folder, changes):
    """Rank 1 is gone before the third tensor that it writes of its second checkpoint."""
    real, written = TensorFile.write, []

    def write(self, name, tensor):
        if "optimizer-00002" in self._file.name and "step_000002" in self._file.name:
            written.append(name)
            if len(written) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
        return real(self, name, tensor)

    train_module._LAST_WAIT_S = 0.0  # run_ranks waits less for an answer than a launcher
    TensorFile.write = write
    return train_in(folder, changes)


@pytest.mark.slow
def test_a_rank_that_dies_in_a_save_leaves_the_older_checkpoints(here):
    changes = {**Z3, "out": "r", "save_every": 1, "deterministic": True}
    errors = run_ranks(dies_in_a_save, 2, here, changes, backend="gloo", return_exceptions=True)
    assert "rank 1: died of SIGKILL" in str(errors[1])
    assert "got the end of rank 1" in str(errors[0])
    assert [p.name for p in list_checkpoints("r")] == ["step_000001"]
    assert newest_checkpoint("r").name == "step_000001"
    run("r", 2, zero_stage=3, deterministic=True, resume=True)
    assert not list(Path("r/checkpoints").glob(".step*"))
    run("whole", 2, zero_stage=3, deterministic=True)
    assert bits("r", 4) == bits("whole", 4)
