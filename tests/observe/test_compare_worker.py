"""One rank of a run, in this process: samples, schedule, memory, what stops it."""

from dataclasses import asdict

import pytest
import torch

from fastpar.comm.ranks import RankFailed
from fastpar.data.batches import load_data, sample_batch
from fastpar.models.gpt import GPT
from fastpar.observe.compare import EPS, Rank, measure, warmup_steps
from fastpar.observe.results import Run
from fastpar.observe.strategies import SINGLE, Settings, build
from fastpar.optim.schedule import cosine_lr
from fastpar.settings.config import TrainConfig
from fastpar.settings.model import GPTConfig
from fastpar.settings.options import TextSettings

SHAPE = asdict(GPTConfig(1, 2, 32, 16, 256, dropout=0.0))
TEXT = "In the beginning was the word, and the word was short.\n" * 40


@pytest.fixture
def spec(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return spec_of(str(path))


def spec_of(data, shape=SHAPE, micro_batch_size=2, grad_accum_steps=2, **more):
    """Five steps in one process, the first two untimed."""
    settings = {"shape": shape, "block_size": shape["block_size"], "batch_size": 4, "lr": 1e-2,
                "optimizer": "adamw", "muon_lr": 0.02,
                "epochs": 1, "epoch_steps": 5, "untimed_steps": 2, "seed": 7,
                "device": "cpu", "experts": {}}  # fmt: skip
    run = Run(SINGLE, 1, 1, 1, micro_batch_size, grad_accum_steps)
    for name in more:
        if name in settings:
            settings[name] = more[name]
        else:
            setattr(run, name, more[name])
    return settings, run, TextSettings(data, "bytes" if shape is SHAPE else "auto")


def run(spec, said=None):
    return Rank(*spec, lambda *words: said.append(words) if said is not None else None).train()


def test_a_rank_trains_the_trainers_samples_with_the_trainers_schedule(spec):
    said = []
    found = run(spec, said)
    data = load_data(spec[2].data, "bytes", block_size=16, progress=False)
    model = GPT(GPTConfig(**SHAPE), seed=7)
    settings = Settings(lr=1e-2, eps=EPS, max_grad_norm=1.0)
    made = build(SINGLE, lambda: model, settings)
    for step in range(5):
        x, y = sample_batch(data.train, seed=7, first_sample=4 * step, n_samples=4, block_size=16)
        lr = cosine_lr(step, lr=1e-2, min_lr=1e-3, warmup_steps=2, max_steps=5)
        loss = made.train_step([(x, y)], lr)
        assert found.losses[step] == pytest.approx(loss.item(), rel=1e-5)
        assert found.grad_norms[step] == pytest.approx(float(made.grad_norm), rel=1e-4)
    assert [words[0] for words in said] == [1, 2, 3, 4, 5]
    assert len(found.step_s) == 5


def test_short_runs_warm_up_for_longer_than_a_tenth():
    found = {n: warmup_steps(n) for n in (1, 2, 5, 24, 60, 240, 50_000)}
    assert found == {1: 0, 2: 1, 5: 2, 24: 12, 60: 20, 240: 24, 50_000: 1000}


@pytest.mark.slow
def test_the_warm_up_of_a_quick_comparison_does_not_spike():
    """`fastpar compare --quick` of its own model and text: the norm rose to 54 in step 5."""
    data = load_data("bible", "auto", block_size=64, progress=False)
    shape = asdict(GPTConfig.preset("micro", vocab_size=data.vocab_size, dropout=0.0))
    found = run(spec_of("bible", shape, 4, 2, batch_size=8, epoch_steps=24, lr=2.5e-3, seed=1))
    assert max(found.grad_norms[1:]) < found.grad_norms[0]
    assert max(found.losses[1:]) < found.losses[0]


def test_hyper_parameters_are_those_of_train():
    ours, theirs = Settings(), TrainConfig().optim
    assert ours.betas == theirs.betas
    assert ours.weight_decay == theirs.weight_decay
    assert theirs.max_grad_norm == 1.0
    from fastpar.optim.adamw import AdamW

    default = AdamW([torch.nn.Parameter(torch.zeros(2))]).param_groups[0]["eps"]
    assert default == EPS


def test_one_rank_sends_nothing_and_its_memory_is_known(spec):
    found = run(spec)
    assert (found.wire_bytes, found.exposed_ms) == (0, 0.0)
    parameters = 4 * sum(p.numel() for p in GPT(GPTConfig(**SHAPE)).parameters())
    # Weights, gradients and two moments, and what forward keeps.
    (step_bytes,), (rss_bytes,) = found.step_bytes, found.rss_bytes
    assert 4 * parameters < step_bytes < 12 * parameters
    assert rss_bytes > 0


def test_other_orders_of_sums_differ_by_rounding_alone(spec):
    base = run(spec)
    other = run(spec_of(spec[2].data, SHAPE, 1, 4, exact_norm=True))
    assert other.losses == pytest.approx(base.losses, rel=1e-4)
    assert other.losses != base.losses
    wrong = run(spec_of(spec[2].data, SHAPE, 1, 2))
    assert wrong.losses[1] != pytest.approx(base.losses[1], rel=1e-4), "half of the samples"


def test_micro_batches_of_every_rank_are_each_sample_once():
    for strategy in ("dp", "zero2"):
        taken = []
        for rank in range(2):
            made = Rank.__new__(Rank)
            made.run = spec_of("bible", strategy=strategy)[1]
            made.contender = type("Fake", (), {"dp_rank": rank, "dp_size": 2})()
            taken += made._numbers()
        assert sorted(taken) == [0, 1, 2, 3]
        assert made._numbers() == ([2, 3] if strategy == "dp" else [1, 3])


def test_a_loss_that_is_not_finite_ends_the_run(spec):
    rank = Rank(*spec, lambda *words: None)
    with torch.no_grad():
        rank.contender.model.wte.weight[:] = float("nan")
    with pytest.raises(RuntimeError, match=r"compare: expected a finite loss, got loss=nan in s"):
        rank.train()


def test_what_the_ranks_measured_is_merged():
    def of_rank(**measured):
        return Run("dp", 1, 2, 1, 2, 1, grad_norms=[1.0, 1.0], **measured)

    merged = Run("dp", 1, 2, 1, 2, 1)
    first = of_rank(step_s=[0.1, 0.4], losses=[2.0, 3.0], rss_bytes=[100], wire_bytes=7)
    first.exposed_ms = 1.5
    second = of_rank(step_s=[0.3, 0.2], losses=[4.0, 5.0], rss_bytes=[200], wire_bytes=9)
    second.step_bytes = [50]
    merged.merge([first, second])
    assert merged.step_s == [0.3, 0.4], "the slowest rank counts"
    assert merged.losses == [3.0, 4.0], "the mean over the ranks"
    assert (merged.rss_bytes, merged.step_bytes, merged.wire_bytes) == ([100, 200], [50], 9)
    assert merged.exposed_ms is None, "not known of one rank is not known"


def planned(spec, strategy):
    """The run of a strategy on two ranks."""
    settings = {**spec[0], "batch_size": 2, "epoch_steps": 2, "untimed_steps": 1}
    return settings, Run(strategy, 1, 2, 1, 1, 1), spec[2]


def test_two_ranks_train_and_are_measured(spec, capfd):
    """The processes that `fastpar compare` starts; what it makes of them is a slow test."""
    heard, two = [], planned(spec, "zero1")
    measure(*two, lambda *said: heard.append(said[0]))
    made = two[1]
    assert heard == [1, 2]
    assert len(made.step_s) == len(made.losses) == len(made.grad_norms) == 2
    assert len(made.step_bytes) == len(made.rss_bytes) == 2
    assert made.wire_bytes > 4 * 4096
    assert made.exposed_ms >= 0
    assert made.seconds > 0
    assert capfd.readouterr() == ("", ""), "the ranks are quiet"


@pytest.mark.slow
def test_a_run_that_fails_says_why(spec):
    failing = planned(spec, "hsdp")
    with pytest.raises(RankFailed) as caught:
        measure(*failing, lambda *said: None)
    assert caught.value.reason.startswith("ValueError: build: expected 4, 6, 8, ... ranks")
