"""`fastpar compare`: statistics of constructed runs, what counts as rounding, the report; what the
command decides and refuses, one rank of a run, real comparisons."""

import json
import sys
from collections import Counter
from dataclasses import asdict

import numpy as np
import pytest
import torch
from cells import sweep

from fastpar import cli
from fastpar.comm.ranks import RankFailed
from fastpar.data.batches import load_data, sample_batch
from fastpar.models.gpt import GPT
from fastpar.observe import compare, results
from fastpar.observe.pictures import PICTURES, look
from fastpar.observe.report import head, markdown, rows, summary
from fastpar.observe.results import RESULTS, Comparison, Run, Stat, judge_losses, yardstick
from fastpar.observe.strategies import SINGLE, STRATEGIES, Settings, build
from fastpar.optim.schedule import cosine_lr
from fastpar.settings.model import GPTConfig
from fastpar.settings.options import ModelSize, TextSettings

LOSSES = [8.0, 7.0, 6.5, 6.0, 5.5, 5.2, 5.0, 4.9, 4.8, 4.7]
SETTINGS = {
    "nproc": 2, "model": "micro",
    "shape": {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64}, "parameters": 1_325_824,
    "data": "bible", "tokenizer": "bpe-4096", "batch_size": 8, "block_size": 64, "epochs": 2,
    "epoch_steps": 5, "untimed_steps": 2, "optimizer": "adamw", "lr": 2.5e-3, "muon_lr": 0.02,
    "seed": 1, "device": "cpu", "threads": 1,
}  # fmt: skip
MACHINE = {
    "device": "CPU: test, 2 cores", "python": "3.11", "torch": "2.13", "fastpar": "0.1",
    "deepspeed": None, "commit": "abc", "date": "2026-11-22",
}  # fmt: skip


def make_run(name, repeat=1, *, step_s=0.1, memory=50e6, nudge=0.0, **more):
    """A run whose steps take step_s, the untimed ones ten times as long; losses moved by nudge."""
    values = {
        "ranks": 1 if name == "single" else 2, "threads": 1, "micro_batch_size": 4,
        "grad_accum_steps": 2 if name == "single" else 1,
        "step_s": [10 * step_s] * 2 + [step_s] * 8, "losses": [loss + nudge for loss in LOSSES],
        "grad_norms": [2.0] * 10, "step_bytes": [int(memory), int(memory) - 1000],
        "wire_bytes": 0 if name == "single" else 5_000_000,
        "exposed_ms": None if name.startswith("fsdp") else 3.0, "seconds": 9.0,
    }  # fmt: skip
    return Run(name, repeat, **{**values, **more})


def repeats(name, *step_s, **more):
    return [make_run(name, n + 1, step_s=s, **more) for n, s in enumerate(step_s)]


def other_order(nudge=0.0):
    """A run of `single` with its sums in another order."""
    return make_run("single", nudge=nudge, yardstick=True, micro_batch_size=1)


def make_comparison(*runs, skipped=None, complete=True, **settings):
    """With what Schedule.of() decides."""
    known = {
        **SETTINGS,
        "strategies": list(dict.fromkeys(run.strategy for run in runs if not run.yardstick)),
        "repeats": max(run.repeat for run in runs),
    }
    return Comparison({**known, **settings}, MACHINE, skipped or {}, list(runs), complete)


def read(path):
    """What save() has written."""
    content = json.loads(path.read_text())
    assert content.pop("format") == 1
    runs = [Run(**run) for run in content.pop("runs")]
    return Comparison(runs=runs, **content)


FAILED = Run("hsdp", 1, 2, 1, 4, 1, error="rank 0: <b>RuntimeError</b>: no | room")


def test_numbers_are_medians_with_their_range_and_untimed_steps_do_not_count():
    runs = repeats("dp", 0.1, 0.3, 0.2)
    found = make_comparison(*runs)
    assert [found.tokens_per_s(runs[0], *of) for of in ((), (0,))] == pytest.approx([5120] * 2)
    assert [found.epoch_s(runs[0], e) for e in range(2)] == pytest.approx([0.5, 0.5])
    stat = found.stat("dp", lambda run: found.epoch_s(run, 1))
    assert stat == Stat(pytest.approx(1.0), pytest.approx(0.5), pytest.approx(1.5), 3)
    assert make_comparison(make_run("fsdp2")).stat("fsdp2", lambda run: run.exposed_ms) is None
    for other, touches in ((Stat(4, 3, 5, 3), True), (Stat(4, 3.1, 5, 3), False)):
        assert Stat(2, 1, 3, 3).touches(other) == touches
    assert Stat(2, 2, 2, 1).touches(Stat(9, 9, 9, 1)), "one run each"
    assert found.memory_mb(make_run("dp", step_bytes=[7, 9])) == 9e-6
    # Yardsticks and failed runs are no repeats.
    found = make_comparison(make_run("single"), FAILED, other_order(1e-6))
    assert (found.names, len(found.of("single")), len(found.orders)) == (["single"], 1, 2)
    assert found.failed == {"hsdp": FAILED.error}


def test_the_yardstick_grows_and_has_a_floor():
    single, other = make_run("single"), other_order()
    other.losses = [loss + (1e-4 if at == 3 else 0.0) for at, loss in enumerate(LOSSES)]
    found = make_comparison(single, make_run("dp"), other)
    np.testing.assert_allclose(yardstick(found), [0] * 3 + [1e-4] * 7, rtol=1e-6)
    bounds = [results.FLOOR * results.EPS * 8.0, results.FACTOR * 1e-4]
    assert results.allowed(found)[[0, 5]] == pytest.approx(bounds)
    assert yardstick(make_comparison(single, make_run("dp"))) is None


@pytest.mark.parametrize(("nudge", "beyond"), [(3.9e-5, None), (4.1e-5, (1, "zero2"))])
def test_losses_apart_by_more_than_rounding_are_found_and_said(nudge, beyond):
    runs = [make_run("single"), make_run("dp"), make_run("zero2", nudge=nudge), other_order(1e-5)]
    verdict = judge_losses(make_comparison(*runs))
    assert verdict.difference == pytest.approx(nudge)
    assert (verdict.high, verdict.beyond, verdict.orders) == ("zero2", beyond, 2)
    assert verdict.yardstick == pytest.approx(1e-5)
    text = "\n".join(summary(make_comparison(*runs)))
    assert ("MORE THAN ROUNDING, from step 1 on, where" in text) == (beyond is not None)


def test_the_largest_difference_is_between_two_strategies():
    """Repeats of one strategy are not compared with each other, but one may go astray."""
    for nudge, difference, high, low in ((0.4, 0.4, "single", "dp"), (0.2, 0.3, "dp", "single")):
        runs = [make_run("dp"), make_run("dp", 2, nudge=0.5), make_run("single", nudge=nudge)]
        verdict = judge_losses(make_comparison(*runs))
        assert verdict.difference == pytest.approx(difference)
        assert (verdict.high, verdict.low) == (high, low)
        assert verdict.yardstick is verdict.beyond is None
    assert judge_losses(make_comparison(make_run("dp"))) is None
    runs = [make_run("single"), make_run("dp"), make_run("dp", 2, nudge=1.0), other_order(1e-5)]
    assert judge_losses(make_comparison(*runs)).beyond == (1, "dp")


def test_the_table_has_a_row_for_each_strategy_and_the_fastest_stands_first():
    runs = [*repeats("dp", 0.13, 0.14), make_run("zero1", step_s=0.05), make_run("ddp", step_s=0.2)]
    names, skipped = ["tp", "dp", "zero1", "ddp", "hsdp"], {"deepspeed1": "is not installed"}
    found = make_comparison(*runs, FAILED, skipped=skipped, strategies=names, complete=False)
    cells = rows(found)
    assert [row[0] for row in cells] == ["zero1", "dp", "ddp", "tp", "hsdp", "deepspeed1"]
    assert [row[3] for row in cells[:3]] == ["4.00", "1.48", "1.00"]
    assert cells[1][1:3] == ["2", "3,798 (3,657-3,938)"]  # 512 tokens in 0.13 and 0.14 s
    ends = ["stopped before its first run", "failed", "skipped"]
    assert [row[1].partition(":")[0] for row in cells[3:]] == ends
    table = [line for line in markdown(found).splitlines() if line.startswith("|")]
    assert {line.count("|") for line in table} == {len(head(found)) + 1}, "no cell breaks the table"
    assert "speed, ddp = 1" in head(found)
    found.runs = found.runs[:2]
    assert "speed, dp = 1" in head(found), "the first that was asked for and ran"


CLAIMS = [
    # A clear margin, no difference beyond the spread, and one run each, which proves no order.
    ([*repeats("dp", 0.1, 0.101, 0.102), *repeats("ddp", 0.2, 0.201, 0.19)],
     "Fastest: dp, 5,069 tokens/s (5,020 to 5,120 in 3 repeats); next is ddp with 2,560, 49.5 %"),
    ([*repeats("dp", 0.1, 0.11, 0.12), *repeats("ddp", 0.105, 0.115, 0.125)],
     "Fastest: the repeats of dp and ddp overlap, so no difference is proved."),
    ([make_run("dp"), make_run("ddp", step_s=0.2)],
     "Fastest in one run each, which proves no order: dp, 5,120"),
    ([make_run("single"), make_run("dp", nudge=1.0)],
     "Whether that is rounding is not known: single ran in one order"),
]  # fmt: skip


@sweep(("runs", "said"), CLAIMS)
def test_claims(runs, said):
    text = "\n".join(summary(make_comparison(*runs)))
    assert said in text


@pytest.mark.slow
def test_pictures_of_a_report_are_optional(tmp_path, monkeypatch, capfd):
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    found = make_comparison(make_run("single"), make_run("dp"), FAILED, other_order(1e-6))
    compare.write_report(found, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"table.md", *PICTURES}
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in PICTURES)
    looks = [(s["color"], s["marker"], s["linestyle"]) for s in map(look, STRATEGIES)]
    assert len(set(looks)) == len(STRATEGIES), "no two strategies look alike"
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    compare.write_report(found, tmp_path)
    words = "no pictures: draw_all: expected the package matplotlib, got "
    assert words in capfd.readouterr().out


SHAPE = asdict(GPTConfig(1, 2, 32, 16, 256, dropout=0.0))


@pytest.fixture
def text(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "text.txt"
    path.write_text("In the beginning was the word, and the word was short.\n" * 40)
    return str(path)


def command_of(data="bible", batch_size=8, **more):
    text = TextSettings(data=data, tokenizer="bytes", batch_size=batch_size)
    return compare.CompareCommand(text=text, **more)


def schedule_of(text, **more):
    size = ModelSize(model="micro", n_layer=1, n_embd=32, block_size=16)
    small = {"device": "cpu", "threads": 1, "shape": size}
    return compare.Schedule.of(command_of(text, **{**small, **more}))


REFUSED = [
    ({"strategies": "dp,zero4"}, r"got strategy=zero4; did you mean zero3\?"),
    ({"strategies": "horovod"}, r"got strategy=horovod; choose from these"),
    ({"strategies": ","}, r"compare: expected comma-separated names, got strategies=','; drop"),
    *(
        ({name: 0}, rf"compare: expected {name} >= 1, got {name}=0")
        for name in ("nproc", "epochs", "repeats", "batch_size", "threads")
    ),
    ({"epoch_steps": -1}, r"expected epoch_steps >= 0, got epoch_steps=-1; set --epoch-steps"),
    ({"lr": 0.0}, r"compare: expected lr > 0, got lr=0\.0; set --lr"),
    ({"muon_lr": -1.0}, r"compare: expected muon_lr > 0, got muon_lr=-1\.0; set --muon-lr"),
    ({"batch_size": 8, "nproc": 3}, r"multiple of nproc=3, got batch_size=8; use --batch-si"),
    ({"out": "full"}, r"compare: expected a new or an empty folder, got out=full;"),
    ({"out": "full/file"}, r"compare: expected a new or an empty folder, got out=full/file"),
]


def test_settings_that_make_no_sense_are_refused(tmp_path, monkeypatch):
    """And what cannot run, before the text is read."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    for out in ("new", "full"):
        compare.check(compare.CompareCommand(out=out))
    (tmp_path / "full" / "file").touch()
    for settings, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            compare.check(command_of(**settings))
    for more, message in (
        ({"shape": ModelSize(model="x")}, r"GPTConfig\.preset: .* of gpt2, .* got name=x"),
        ({"strategies": "tp", "nproc": 1}, "can run here, got none: tp needs 2 ranks, got 1;"),
        ({"device": "cuda"}, "compare: expected a GPU for device=cuda, got none t"),
    ):
        if "device" not in more or not torch.cuda.is_available():
            with pytest.raises(ValueError, match=message):
                schedule_of("no such text", **more)


def test_what_cannot_run_is_skipped_with_its_reason():
    one_head = {"n_head": 1, "block_size": 63}
    for name, command, sizes, gpus, why in (
        ("tp-zero1", {}, {}, None, "needs 4 ranks, got 2"),
        ("tp", {}, one_head, None, "needs 2 heads or more, got 1"),
        ("tp", {}, {"block_size": 63}, None, "needs a context that is a multiple of 2, got 63"),
        ("pp", {"nproc": 4}, {"n_layer": 3}, None, "needs 4 layers or more, got 3"),
        ("dp-pp", {"nproc": 4}, {"n_layer": 3}, None, None),
        ("dp", {}, {}, 1, "needs a GPU for each of 2 ranks, got 1"),
        ("single", {}, {}, 1, None),
        ("dp", {"device": "cpu"}, {}, 1, None),
    ):
        shape = GPTConfig.preset("micro", **sizes)
        assert compare.why_not(name, compare.CompareCommand(**command), shape, gpus) == why, name


def test_repeats_begin_with_another_strategy_and_orders_come_last(text):
    runs = schedule_of(text, strategies="single,dp,zero1", repeats=3).runs()
    real = [run for run in runs if not run.yardstick]
    assert [run.strategy for run in real[::3]] == ["single", "dp", "zero1"]
    assert set(Counter((run.strategy, run.repeat) for run in real).values()) == {1}
    assert len(real) == 9
    extra = [(run.micro_batch_size, run.grad_accum_steps, run.exact_norm) for run in runs[9:]]
    assert extra == [(8, 1, True), (1, 8, False)]
    for run in schedule_of(text, nproc=4, strategies="single,dp,tp,tp-zero2", batch_size=8).runs():
        groups = run.ranks // STRATEGIES[run.strategy].mesh.tp  # the same sequences in a step
        assert groups * run.micro_batch_size * run.grad_accum_steps == 8
    runs = schedule_of(text, strategies="dp,zero1", batch_size=2).runs()  # single is not asked for
    orders = [run for run in runs if run.yardstick]
    kinds = {(run.strategy, run.micro_batch_size, run.exact_norm) for run in orders}
    assert kinds == {("single", 2, True), ("single", 1, False)}
    runs = schedule_of(text, strategies="single", nproc=1, batch_size=1).runs()
    assert [(run.micro_batch_size, run.exact_norm) for run in runs[3:]] == [(1, True)]


def test_lengths_of_runs(text):
    for changes, counts in (({"quick": True, "epochs": 5}, (5, 12, 1)), ({}, (3, 80, 3))):
        settings = schedule_of(text, **changes).comparison.settings
        assert tuple(settings[n] for n in ("epochs", "epoch_steps", "repeats")) == counts
    schedule = schedule_of(text, epoch_steps=0, batch_size=4)  # one pass of the text
    windows = (len(schedule.data.train) - 16) // 16
    assert schedule.comparison.settings["epoch_steps"] == windows // 4
    assert schedule_of(text, epoch_steps=2).comparison.settings["untimed_steps"] == 1


def spec_of(data, micro_batch_size=2, grad_accum_steps=2, run=None, **more):
    """Five steps in one process, the first two untimed."""
    settings = {"shape": SHAPE, "block_size": 16, "batch_size": 4, "lr": 1e-2, "muon_lr": 0.02,
                "optimizer": "adamw", "epochs": 1, "epoch_steps": 5, "untimed_steps": 2,
                "seed": 7, "device": "cpu", "experts": {}}  # fmt: skip
    made = Run(SINGLE, 1, 1, 1, micro_batch_size, grad_accum_steps, **(run or {}))
    return {**settings, **more}, made, TextSettings(data, "bytes")


def train(spec, said=lambda *words: None):
    return compare.Rank(*spec, said).train()


@pytest.mark.slow
def test_a_rank_trains_the_trainers_samples_with_the_trainers_schedule(text):
    said = []
    found = train(spec_of(text), lambda *words: said.append(words[0]))
    data = load_data(text, "bytes", block_size=16, progress=False)
    model = GPT(GPTConfig(**SHAPE), seed=7)
    made = build(SINGLE, lambda: model, Settings(lr=1e-2, eps=compare.EPS, max_grad_norm=1.0))
    for step in range(5):
        batch = sample_batch(data.train, seed=7, first_sample=4 * step, n_samples=4, block_size=16)
        lr = cosine_lr(step, lr=1e-2, min_lr=1e-3, warmup_steps=2, max_steps=5)
        loss = made.train_step([batch], lr)
        assert found.losses[step] == pytest.approx(loss.item(), rel=1e-5)
        assert found.grad_norms[step] == pytest.approx(float(made.grad_norm), rel=1e-4)
    assert said == [1, 2, 3, 4, 5]
    assert (len(found.step_s), found.wire_bytes, found.exposed_ms) == (5, 0, 0.0)
    parameters = 4 * sum(p.numel() for p in model.parameters())
    # Weights, gradients and two moments, and what forward keeps.
    assert 4 * parameters < found.step_bytes[0] < 12 * parameters
    # Other orders of its sums differ by rounding alone; half of the samples do not.
    other = train(spec_of(text, 1, 4, run={"exact_norm": True}))
    assert other.losses == pytest.approx(found.losses, rel=1e-4)
    assert other.losses != found.losses
    wrong = train(spec_of(text, 1, 2))
    assert wrong.losses[1] != pytest.approx(found.losses[1], rel=1e-4)
    rank = compare.Rank(*spec_of(text), lambda *words: None)
    with torch.no_grad():
        rank.contender.model.wte.weight[:] = float("nan")
    with pytest.raises(RuntimeError, match=r"compare: expected a finite loss, got loss=nan in s"):
        rank.train()


def test_what_the_ranks_measured_is_merged():
    merged, *ranks = (Run("dp", 1, 2, 1, 2, 1, grad_norms=[1.0, 1.0]) for _ in range(3))
    known = {
        "step_s": ([0.1, 0.4], [0.3, 0.2], [0.3, 0.4]),  # the slowest rank counts
        "losses": ([2.0, 3.0], [4.0, 5.0], [3.0, 4.0]),  # the mean over the ranks
        "step_bytes": ([], [50], [50]),
        "wire_bytes": (7, 9, 9),
        "exposed_ms": (1.5, None, None),  # not known of one rank is not known
    }
    for at, run in enumerate(ranks):
        vars(run).update({name: values[at] for name, values in known.items()})
    merged.merge(ranks)
    assert {name: getattr(merged, name) for name in known} == {n: v[2] for n, v in known.items()}


@pytest.fixture
def arguments(tmp_path, text):
    pytest.importorskip("tyro", reason="needs tyro")
    return [
        *("compare", "--data", text, "--tokenizer", "bytes", "--n-layer", "1", "--n-embd", "32"),
        *("--block-size", "16", "--threads", "1", "--device", "cpu", "--epochs", "1"),
        *("--epoch-steps", "2", "--repeats", "1", "--batch-size", "2"),
        *("--out", str(tmp_path / "out")),
    ]


@pytest.mark.slow
def test_two_strategies_on_two_ranks(arguments, tmp_path, capfd):
    """With batch size 2 there are two more orders of sums: four runs."""
    assert cli.main([*arguments, "--strategies", "zero1,ddp,tp-zero1"]) == 0
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} == {RESULTS, "table.md", *PICTURES}
    found = read(out / RESULTS)
    assert (found.complete, found.names) == (True, ["zero1", "ddp"])
    assert found.skipped == {"tp-zero1": "needs 4 ranks, got 2"}
    runs = [found.of(name)[0] for name in found.names]
    for run in runs:
        assert len(run.step_s) == len(run.losses) == len(run.grad_norms) == 2
        assert len(run.step_bytes) == 2
        assert min(run.step_bytes) > 0
        assert run.wire_bytes > 4 * 4096
        assert run.exposed_ms >= 0
    assert runs[0].losses == pytest.approx(runs[1].losses, rel=1e-6)
    words = "In every step this is within rounding: single with its sums in 2"
    assert words in capfd.readouterr().out
    assert str(tmp_path) not in (out / RESULTS).read_text()
    assert cli.main([*arguments, "--strategies", "zero1"]) == 2, "the folder is taken"


NO_ROOM = RankFailed(1, "RuntimeError: no room")


@pytest.mark.parametrize(
    ("names", "errors", "status", "measured", "said"),
    [
        ("single,ddp,dp", {"ddp": NO_ROOM}, 1, ["single", "dp"],
         "ddp: failed: rank 1: RuntimeError: no room"),
        ("dp", {"dp": NO_ROOM, "single": NO_ROOM}, 1, [], "nothing was measured"),
        ("single,ddp,dp", {"dp": KeyboardInterrupt()}, 130, ["single", "ddp"],
         "stopped before all runs were done"),
    ],
)  # fmt: skip
def test_what_ends_a_comparison_early(
    arguments, tmp_path, capfd, monkeypatch, names, errors, status, measured, said
):
    """One that fails ends no other, and an interrupt keeps what was measured. Without --out the
    first free folder is taken."""

    def measure(settings, run, text, on_step):
        if run.strategy in errors:
            raise errors[run.strategy]
        on_step(1, 5.0, 0.1)
        steps = settings["epochs"] * settings["epoch_steps"]
        run.step_s, run.losses, run.grad_norms = [0.1] * steps, [5.0] * steps, [1.0] * steps
        run.step_bytes, run.wire_bytes, run.exposed_ms, run.seconds = [10**7] * 2, 1, None, 1.0

    monkeypatch.setattr(compare, "measure", measure)
    monkeypatch.setattr(compare, "draw_all", lambda comparison, folder: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/compare").mkdir(parents=True)
    assert cli.main([*arguments[:-2], "--strategies", names]) == status
    assert said in capfd.readouterr().out
    out = tmp_path / "runs/compare-2"
    found = read(out / RESULTS)
    assert (found.names, found.complete) == (measured, status == 1)
    if measured:
        said = "stopped before its first run" if status == 130 else "failed: rank 1: RuntimeError: "
        assert said in (out / "table.md").read_text()
    else:  # no pictures of nothing
        assert [path.name for path in out.iterdir()] == [RESULTS]
