"""`fastpar compare`: what it decides and refuses before it runs, one rank of a run in this process,
a real comparison on two ranks, and what ends one."""

import json
from collections import Counter
from dataclasses import asdict

import pytest
import torch
from compared import make_comparison, make_run, read

from fastpar import cli
from fastpar.comm.ranks import RankFailed
from fastpar.data.batches import load_data, sample_batch
from fastpar.models.gpt import GPT
from fastpar.observe import compare, strategies
from fastpar.observe.compare import (
    DEFAULT,
    EPS,
    CompareCommand,
    Rank,
    Schedule,
    check,
    chosen,
    measure,
    warmup_steps,
    why_not,
    write_report,
)
from fastpar.observe.results import RESULTS, Run
from fastpar.observe.strategies import SINGLE, STRATEGIES, Settings, build
from fastpar.optim.adamw import AdamW
from fastpar.optim.schedule import cosine_lr
from fastpar.settings.config import TrainConfig
from fastpar.settings.model import GPTConfig
from fastpar.settings.options import ModelSize, TextSettings

MICRO = GPTConfig.preset("micro")
SHAPE = asdict(GPTConfig(1, 2, 32, 16, 256, dropout=0.0))
FILES = {
    *("results.json", "table.md", "throughput.png", "epoch_time.png"),
    *("memory.png", "grad_norm.png", "loss.png", "communication.png"),
}


@pytest.fixture
def text(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "text.txt"
    path.write_text("In the beginning was the word, and the word was short.\n" * 40)
    return str(path)


# What it decides


def command_of(data="bible", batch_size=8, **more):
    text = TextSettings(data=data, tokenizer="bytes", batch_size=batch_size)
    return CompareCommand(text=text, **more)


def schedule_of(text, **more):
    size = ModelSize(model="micro", n_layer=1, n_embd=32, block_size=16)
    return Schedule.of(command_of(text, device="cpu", threads=1, shape=size, **more))


def no_deepspeed(monkeypatch):
    found = strategies.importlib.util.find_spec
    monkeypatch.setattr(
        strategies.importlib.util,
        "find_spec",
        lambda name: None if name == "deepspeed" else found(name),
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategies": "dp,zero4"}, r"got strategy=zero4; did you mean zero3\?"),
        ({"strategies": "horovod"}, r"got strategy=horovod; choose of these"),
        ({"strategies": "dp,async"}, r"got strategy='async'; use zero1, .*results/parameter_serve"),
        ({"strategies": "parameter-server"}, r"whose gradients are those of the weights that they"),
        ({"strategies": ","}, r"compare: expected names with commas, got strategies=','; leave"),
        ({"nproc": 0}, r"compare: expected nproc >= 1, got nproc=0; set --nproc"),
        ({"epochs": 0}, r"compare: expected epochs >= 1, got epochs=0; set --epochs"),
        ({"epoch_steps": -1}, r"expected epoch_steps >= 0, got epoch_steps=-1; set --epoch-steps"),
        ({"repeats": 0}, r"compare: expected repeats >= 1, got repeats=0; set --repeats"),
        ({"batch_size": 0}, r"compare: expected batch_size >= 1, got batch_size=0"),
        ({"threads": 0}, r"compare: expected threads >= 1, got threads=0"),
        ({"lr": 0.0}, r"compare: expected lr > 0, got lr=0\.0; set --lr"),
        ({"muon_lr": -1.0}, r"compare: expected muon_lr > 0, got muon_lr=-1\.0; set --muon-lr"),
        ({"batch_size": 8, "nproc": 3}, r"multiple of nproc=3, got batch_size=8; use --batch-si"),
        ({"out": "full"}, r"compare: expected a new or an empty folder, got out=full"),
        ({"out": "full/file"}, r"compare: expected a new or an empty folder, got out=full/file"),
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(tmp_path, monkeypatch, settings, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    check(CompareCommand(out="new"))
    check(CompareCommand(out="full"))
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ValueError, match=message):
        check(command_of(**settings))


def test_what_cannot_run_is_refused_before_the_text_is_read():
    with pytest.raises(ValueError, match=r"GPTConfig\.preset: expected one of gpt2, .* got name=x"):
        Schedule.of(command_of("no such text", shape=ModelSize(model="x")))
    message = r"compare: expected a strategy that can run here, got none: tp needs 2 ranks, got 1;"
    with pytest.raises(ValueError, match=message):
        schedule_of("no such text", strategies="tp", nproc=1)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="compare: expected a GPU for device=cuda, got none t"):
            Schedule.of(command_of("no such text", device="cuda"))


def test_names_come_once_in_the_order_given_and_like_stands_beside_like():
    assert chosen(CompareCommand(strategies="tp, dp,tp,")) == ["tp", "dp"]
    assert chosen(CompareCommand()) == list(DEFAULT)
    rare = {"ddp-zero", "hsdp", "experts", "ep", "zero2-int8", "diloco"}
    assert set(STRATEGIES) - set(DEFAULT) == rare
    for theirs, ours in (("ddp", "dp"), ("fsdp2-no-reshard", "zero2"), ("fsdp2", "zero3")):
        assert DEFAULT.index(ours) == DEFAULT.index(theirs) + 1


def test_what_cannot_run_is_skipped_with_its_reason(monkeypatch):
    two, four = CompareCommand(), CompareCommand(nproc=4)
    one_head = GPTConfig.preset("micro", n_head=1, block_size=63)
    odd, shallow = GPTConfig.preset("micro", block_size=63), GPTConfig.preset("micro", n_layer=3)
    no_deepspeed(monkeypatch)
    for name, command, shape, gpus, why in (
        ("tp-zero1", two, MICRO, None, "needs 4 ranks, got 2"),
        ("tp-zero1", four, MICRO, None, None),
        ("tp", two, one_head, None, "needs 2 heads or more, got 1"),
        ("tp", two, odd, None, "needs a context that is a multiple of 2, got 63"),
        ("pp", four, shallow, None, "needs 4 layers or more, got 3"),
        ("dp-pp", four, shallow, None, None),
        ("dp-pp", two, MICRO, None, "needs 4 ranks, got 2"),
        ("dp", two, MICRO, 1, "needs a GPU for each of 2 ranks, got 1"),
        ("single", two, MICRO, 1, None),
        ("dp", CompareCommand(device="cpu"), MICRO, 1, None),
        ("deepspeed1", two, MICRO, None, "deepspeed is not installed"),
    ):
        assert why_not(name, command, shape, gpus) == why, name


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


def test_lengths_of_runs_and_what_is_said_of_them(text, monkeypatch):
    for changes, counts in (({"quick": True, "epochs": 5}, (5, 12, 1)), ({}, (3, 80, 3))):
        settings = schedule_of(text, **changes).comparison.settings
        assert tuple(settings[n] for n in ("epochs", "epoch_steps", "repeats")) == counts
    schedule = schedule_of(text, epoch_steps=0, batch_size=4)  # one pass of the text
    windows = (len(schedule.data.train) - 16) // 16
    assert schedule.comparison.settings["epoch_steps"] == windows // 4
    assert schedule_of(text, epoch_steps=2).comparison.settings["untimed_steps"] == 1
    no_deepspeed(monkeypatch)
    names = "single,dp,tp-zero1,deepspeed1"
    schedule = schedule_of(text, strategies=names, epoch_steps=7, repeats=2)
    said = "\n".join(schedule.lines(schedule.runs()))
    for words in ("compare  single, dp", "skipped  tp-zero1: needs 4 ranks, got 2",
                  "3 epochs of 7 steps", "single is one rank",
                  "6 runs of 21 steps, 2 of them single with other sums; expec"):  # fmt: skip
        assert words in said


# One rank


def spec_of(data, micro_batch_size=2, grad_accum_steps=2, shape=SHAPE, run=None, **more):
    """Five steps in one process, the first two untimed."""
    settings = {"shape": shape, "block_size": shape["block_size"], "batch_size": 4, "lr": 1e-2,
                "optimizer": "adamw", "muon_lr": 0.02, "epochs": 1, "epoch_steps": 5,
                "untimed_steps": 2, "seed": 7, "device": "cpu", "experts": {}}  # fmt: skip
    made = Run(SINGLE, 1, 1, 1, micro_batch_size, grad_accum_steps, **(run or {}))
    return {**settings, **more}, made, TextSettings(data, "bytes" if shape is SHAPE else "auto")


def train(spec, said=lambda *words: None):
    return Rank(*spec, said).train()


def test_a_rank_trains_the_trainers_samples_with_the_trainers_schedule(text):
    said = []
    found = train(spec_of(text), lambda *words: said.append(words[0]))
    data = load_data(text, "bytes", block_size=16, progress=False)
    model = GPT(GPTConfig(**SHAPE), seed=7)
    made = build(SINGLE, lambda: model, Settings(lr=1e-2, eps=EPS, max_grad_norm=1.0))
    for step in range(5):
        batch = sample_batch(data.train, seed=7, first_sample=4 * step, n_samples=4, block_size=16)
        lr = cosine_lr(step, lr=1e-2, min_lr=1e-3, warmup_steps=2, max_steps=5)
        loss = made.train_step([batch], lr)
        assert found.losses[step] == pytest.approx(loss.item(), rel=1e-5)
        assert found.grad_norms[step] == pytest.approx(float(made.grad_norm), rel=1e-4)
    assert said == [1, 2, 3, 4, 5]
    assert len(found.step_s) == 5
    assert (found.wire_bytes, found.exposed_ms) == (0, 0.0)
    parameters = 4 * sum(p.numel() for p in model.parameters())
    # Weights, gradients and two moments, and what forward keeps.
    (step_bytes,), (rss_bytes,) = found.step_bytes, found.rss_bytes
    assert 4 * parameters < step_bytes < 12 * parameters
    assert rss_bytes > 0
    # Other orders of its sums differ by rounding alone; half of the samples do not.
    other = train(spec_of(text, 1, 4, run={"exact_norm": True}))
    assert other.losses == pytest.approx(found.losses, rel=1e-4)
    assert other.losses != found.losses
    wrong = train(spec_of(text, 1, 2))
    assert wrong.losses[1] != pytest.approx(found.losses[1], rel=1e-4)


@pytest.mark.slow
def test_the_warm_up_of_a_quick_comparison_does_not_spike():
    """`fastpar compare --quick` of its own model and text: the norm rose to 54 in step 5."""
    data = load_data("bible", "auto", block_size=64, progress=False)
    shape = asdict(GPTConfig.preset("micro", vocab_size=data.vocab_size, dropout=0.0))
    spec = spec_of("bible", 4, 2, shape, batch_size=8, epoch_steps=24, lr=2.5e-3, seed=1)
    found = train(spec)
    assert max(found.grad_norms[1:]) < found.grad_norms[0]
    assert max(found.losses[1:]) < found.losses[0]


def test_hyper_parameters_are_those_of_train():
    ours, theirs = Settings(), TrainConfig().optim
    assert ours.betas == theirs.betas
    assert ours.weight_decay == theirs.weight_decay
    assert theirs.max_grad_norm == 1.0
    assert AdamW([torch.nn.Parameter(torch.zeros(2))]).param_groups[0]["eps"] == EPS
    # Short runs warm up for longer than a tenth.
    found = {n: warmup_steps(n) for n in (1, 2, 5, 24, 60, 240, 50_000)}
    assert found == {1: 0, 2: 1, 5: 2, 24: 12, 60: 20, 240: 24, 50_000: 1000}


def test_micro_batches_of_every_rank_are_each_sample_once():
    for strategy in ("dp", "zero2"):
        taken = []
        for rank in range(2):
            made = Rank.__new__(Rank)
            made.run = Run(strategy, 1, 2, 1, 2, 2)
            made.contender = type("Fake", (), {"dp_rank": rank, "dp_size": 2})()
            taken += made._numbers()
        assert sorted(taken) == [0, 1, 2, 3]
        assert made._numbers() == ([2, 3] if strategy == "dp" else [1, 3])


def test_a_loss_that_is_not_finite_ends_the_run(text):
    rank = Rank(*spec_of(text), lambda *words: None)
    with torch.no_grad():
        rank.contender.model.wte.weight[:] = float("nan")
    with pytest.raises(RuntimeError, match=r"compare: expected a finite loss, got loss=nan in s"):
        rank.train()


def test_what_the_ranks_measured_is_merged():
    def of_rank(step_s, losses, rss, wire, exposed_ms, step_bytes):
        return Run("dp", 1, 2, 1, 2, 1, grad_norms=[1.0, 1.0], step_s=step_s, losses=losses,
                   rss_bytes=[rss], wire_bytes=wire, exposed_ms=exposed_ms,
                   step_bytes=step_bytes)  # fmt: skip

    merged = Run("dp", 1, 2, 1, 2, 1)
    first = of_rank([0.1, 0.4], [2.0, 3.0], 100, 7, 1.5, [])
    merged.merge([first, of_rank([0.3, 0.2], [4.0, 5.0], 200, 9, None, [50])])
    assert merged.step_s == [0.3, 0.4], "the slowest rank counts"
    assert merged.losses == [3.0, 4.0], "the mean over the ranks"
    assert (merged.rss_bytes, merged.step_bytes, merged.wire_bytes) == ([100, 200], [50], 9)
    assert merged.exposed_ms is None, "not known of one rank is not known"


# The command


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
    assert {path.name for path in out.iterdir()} == FILES
    found = read(out / RESULTS)
    assert found.complete
    assert found.names == ["zero1", "ddp"]
    assert found.skipped == {"tp-zero1": "needs 4 ranks, got 2"}
    for name in found.names:
        (run,) = found.of(name)
        assert len(run.step_s) == len(run.losses) == len(run.grad_norms) == 2
        assert len(run.step_bytes) == len(run.rss_bytes) == 2
        assert run.wire_bytes > 4 * 4096
        assert run.exposed_ms >= 0
    losses = [found.of(name)[0].losses for name in found.names]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    said = capfd.readouterr().out
    for words in ("skipped  tp-zero1: needs 4 ranks, got 2", "run 1/4 zero1: ",
                  "In every step that is within rounding: single with its sums in 2"):  # fmt: skip
        assert words in said
    assert str(tmp_path) not in (out / RESULTS).read_text()
    assert cli.main([*arguments, "--strategies", "zero1"]) == 2, "the folder is taken"


@pytest.mark.slow
def test_ranks_are_quiet_and_one_that_fails_says_why(text, capfd):
    def planned(strategy):
        settings, _, data = spec_of(text, batch_size=2, epoch_steps=2, untimed_steps=1)
        return settings, Run(strategy, 1, 2, 1, 1, 1), data

    heard, two = [], planned("zero1")
    measure(*two, lambda *said: heard.append(said[0]))
    assert heard == [1, 2]
    assert two[1].seconds > 0
    assert capfd.readouterr() == ("", "")
    with pytest.raises(RankFailed) as caught:
        measure(*planned("hsdp"), lambda *said: None)
    assert caught.value.reason.startswith("ValueError: build: expected 4, 6, 8, ... ranks")


def fake_measure(monkeypatch, failing=(), interrupted_at=None):
    """Runs are made up; those of some strategies fail, and one is interrupted."""
    count = 0

    def measure(settings, run, text, on_step):
        nonlocal count
        count += 1
        if count == interrupted_at:
            raise KeyboardInterrupt
        if run.strategy in failing:
            raise RankFailed(1, "RuntimeError: no room")
        on_step(1, 5.0, 0.1)
        steps = settings["epochs"] * settings["epoch_steps"]
        run.step_s, run.losses, run.grad_norms = [0.1] * steps, [5.0] * steps, [1.0] * steps
        run.rss_bytes, run.wire_bytes, run.exposed_ms, run.seconds = [10**7] * 2, 1, None, 1.0

    monkeypatch.setattr(compare, "measure", measure)
    monkeypatch.setattr(compare, "draw_all", lambda comparison, folder: None)  # tested by itself


@pytest.mark.parametrize(
    ("how", "names", "status", "measured", "said"),
    [
        ({"failing": ("ddp",)}, "single,ddp,dp", 1, ["single", "dp"],
         "ddp: failed: rank 1: RuntimeError: no room"),
        ({"failing": ("dp", "single")}, "dp", 1, [], "nothing was measured"),
        ({"interrupted_at": 3}, "single,ddp,dp", 130, ["single", "ddp"],
         "stopped before all of its runs"),
    ],
)  # fmt: skip
def test_what_ends_a_comparison_early(
    arguments, tmp_path, capfd, monkeypatch, how, names, status, measured, said
):
    """One that fails ends no other, and an interrupt keeps what was measured."""
    fake_measure(monkeypatch, **how)
    assert cli.main([*arguments, "--strategies", names]) == status
    assert said in capfd.readouterr().out
    found = read(tmp_path / "out" / RESULTS)
    assert found.names == measured
    assert found.complete == (status == 1)
    if measured:
        table = (tmp_path / "out" / "table.md").read_text()
        said = "stopped before its first run" if status == 130 else "failed: rank 1: RuntimeError: "
        assert said in table
    else:  # no pictures of nothing
        assert [path.name for path in (tmp_path / "out").iterdir()] == [RESULTS]


def test_folders_and_mistakes(arguments, tmp_path, monkeypatch, capfd):
    """Without --out the first free folder is taken."""
    fake_measure(monkeypatch)
    monkeypatch.chdir(tmp_path)
    for name in ("compare", "compare-2"):
        assert cli.main([*arguments[:-2], "--strategies", "dp"]) == 0
        assert (tmp_path / "runs" / name / RESULTS).exists()
    assert cli.main([*arguments, "--strategies", "zero9"]) == 2
    assert "did you mean zero" in capfd.readouterr().err


def test_a_report_is_made_again_from_its_results(tmp_path, monkeypatch, capfd):
    found = make_comparison(make_run("dp"), epochs=1, epoch_steps=10)
    found.save(tmp_path / RESULTS)
    write_report(read(tmp_path / RESULTS), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == FILES
    assert json.loads((tmp_path / RESULTS).read_text())["format"] == 1

    def missing(*args):
        raise ImportError("draw_all: expected matplotlib, got none")

    monkeypatch.setattr(compare, "draw_all", missing)
    (tmp_path / "again").mkdir()
    write_report(found, tmp_path / "again")
    assert [path.name for path in (tmp_path / "again").iterdir()] == ["table.md"]
    assert "no pictures: draw_all: expected matplotlib" in capfd.readouterr().out
