"""What a comparison decides before it runs, and what it refuses."""

from collections import Counter

import pytest
import torch

from fastpar.observe import strategies
from fastpar.observe.compare import DEFAULT, CompareCommand, Schedule, check, chosen, why_not
from fastpar.observe.strategies import STRATEGIES
from fastpar.settings.model import GPTConfig
from fastpar.settings.options import ModelSize, TextSettings

TEXT = "In the beginning was the word, and the word was short.\n" * 40
MICRO = GPTConfig.preset("micro")


@pytest.fixture
def text(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


def command_of(data="bible", batch_size=8, **more):
    text = TextSettings(data=data, tokenizer="bytes", batch_size=batch_size)
    return CompareCommand(text=text, **more)


def schedule_of(text, **more):
    size = ModelSize(model="micro", n_layer=1, n_embd=32, block_size=16)
    return Schedule.of(command_of(text, device="cpu", threads=1, shape=size, **more))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategies": "dp,zero4"}, r"got strategy=zero4; did you mean zero3\?"),
        ({"strategies": "horovod"}, r"got strategy=horovod; choose of these"),
        (
            {"strategies": "dp,async"},
            r"got strategy='async'; use zero1, .*results/parameter_server",
        ),
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
        (
            {"batch_size": 8, "nproc": 3},
            r"compare: expected batch_size to be a multiple of nproc=3, got batch_size=8; use "
            r"--batch-size 9",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        check(command_of(**settings))


def test_a_taken_folder_is_refused(tmp_path):
    check(CompareCommand(out=str(tmp_path / "new")))
    check(CompareCommand(out=str(tmp_path)))
    (tmp_path / "results.json").write_text("{}")
    for out in (tmp_path, tmp_path / "results.json"):
        with pytest.raises(ValueError, match=r"compare: expected a new or an empty folder, got ou"):
            check(CompareCommand(out=str(out)))


def test_names_come_once_in_the_order_given():
    assert chosen(CompareCommand(strategies="tp, dp,tp,")) == ["tp", "dp"]
    assert chosen(CompareCommand()) == list(DEFAULT)
    assert set(STRATEGIES) - set(DEFAULT) == {
        "ddp-zero",
        "hsdp",
        "experts",
        "ep",
        "zero2-int8",
        "diloco",
    }


def test_what_does_the_same_stands_side_by_side():
    for theirs, ours in (("ddp", "dp"), ("fsdp2-no-reshard", "zero2"), ("fsdp2", "zero3")):
        assert DEFAULT.index(ours) == DEFAULT.index(theirs) + 1


def test_what_cannot_run_is_skipped_with_its_reason(monkeypatch):
    two, four = CompareCommand(), CompareCommand(nproc=4)
    assert why_not("tp-zero1", two, MICRO, None) == "needs 4 ranks, got 2"
    assert why_not("tp-zero1", four, MICRO, None) is None
    odd = GPTConfig.preset("micro", n_head=1, block_size=63)
    assert why_not("tp", two, odd, None) == "needs 2 heads or more, got 1"
    odd = GPTConfig.preset("micro", block_size=63)
    assert why_not("tp", two, odd, None) == "needs a context that is a multiple of 2, got 63"
    shallow = GPTConfig.preset("micro", n_layer=3)
    assert why_not("pp", four, shallow, None) == "needs 4 layers or more, got 3"
    assert why_not("dp-pp", four, shallow, None) is None
    assert why_not("dp-pp", two, MICRO, None) == "needs 4 ranks, got 2"
    assert why_not("dp", two, MICRO, 1) == "needs a GPU for each of 2 ranks, got 1"
    assert why_not("single", two, MICRO, 1) is None
    assert why_not("dp", CompareCommand(device="cpu"), MICRO, 1) is None
    monkeypatch.setattr(strategies.importlib.util, "find_spec", lambda name: None)
    assert why_not("deepspeed1", two, MICRO, None) == "deepspeed is not installed"


def test_nothing_left_is_refused(text):
    message = r"compare: expected a strategy that can run here, got none: tp needs 2 ranks, got 1;"
    with pytest.raises(ValueError, match=message):
        schedule_of(text, strategies="tp", nproc=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_gpu_that_is_not_there_is_refused(text):
    with pytest.raises(ValueError, match=r"compare: expected a GPU for device=cuda, got none that"):
        Schedule.of(command_of(text, device="cuda"))


def test_an_unknown_model_is_refused_before_the_text_is_read():
    with pytest.raises(ValueError, match=r"GPTConfig\.preset: expected one of gpt2, .* got name=x"):
        Schedule.of(command_of("no such text", shape=ModelSize(model="x")))


def test_repeats_begin_with_another_strategy_and_orders_come_last(text):
    runs = schedule_of(text, strategies="single,dp,zero1", repeats=3).runs()
    real = [run for run in runs if not run.yardstick]
    assert [run.strategy for run in real[::3]] == ["single", "dp", "zero1"]
    assert set(Counter((run.strategy, run.repeat) for run in real).values()) == {1}
    assert len(real) == 9
    extra = [(run.micro_batch_size, run.grad_accum_steps, run.exact_norm) for run in runs[9:]]
    assert extra == [(8, 1, True), (1, 8, False)]


def test_every_strategy_has_the_same_sequences_in_a_step(text):
    schedule = schedule_of(text, nproc=4, strategies="single,dp,tp,tp-zero2", batch_size=8)
    for run in schedule.runs():
        splits = STRATEGIES[run.strategy].mesh.tp
        assert run.ranks // splits * run.micro_batch_size * run.grad_accum_steps == 8
        assert run.threads == 1
    alone = schedule.runs()[0]
    assert (alone.ranks, alone.micro_batch_size, alone.grad_accum_steps) == (1, 2, 4)


def test_a_yardstick_needs_no_single_in_the_list_and_no_batch(text):
    runs = schedule_of(text, strategies="dp,zero1", batch_size=2).runs()
    orders = [run for run in runs if run.yardstick]
    kinds = {(run.strategy, run.micro_batch_size, run.exact_norm) for run in orders}
    assert kinds == {("single", 2, True), ("single", 1, False)}
    runs = schedule_of(text, strategies="single", nproc=1, batch_size=1).runs()
    assert [(run.micro_batch_size, run.exact_norm) for run in runs[3:]] == [(1, True)]


def test_quick_fills_in_only_what_is_not_given(text):
    settings = schedule_of(text, quick=True, epochs=5).comparison.settings
    assert (settings["epochs"], settings["epoch_steps"], settings["repeats"]) == (5, 12, 1)
    settings = schedule_of(text).comparison.settings
    assert (settings["epochs"], settings["epoch_steps"], settings["repeats"]) == (3, 80, 3)


def test_an_epoch_is_one_pass_of_the_text(text):
    schedule = schedule_of(text, epoch_steps=0, batch_size=4)
    windows = (len(schedule.data.train) - 16) // 16
    assert schedule.comparison.settings["epoch_steps"] == windows // 4
    assert schedule_of(text, epoch_steps=2).comparison.settings["untimed_steps"] == 1


def test_the_lines_say_what_comes(text, monkeypatch):
    found = strategies.importlib.util.find_spec
    installed = lambda name: None if name == "deepspeed" else found(name)  # noqa: E731
    monkeypatch.setattr(strategies.importlib.util, "find_spec", installed)
    schedule = schedule_of(
        text, strategies="single,dp,tp-zero1,deepspeed1", epoch_steps=7, repeats=2
    )
    said = "\n".join(schedule.lines(schedule.runs()))
    assert "compare  single, dp" in said
    assert "skipped  tp-zero1: needs 4 ranks, got 2" in said
    assert "3 epochs of 7 steps" in said
    assert "6 runs of 21 steps, 2 of them single with other sums; expected: about " in said
    assert "single is one rank" in said
