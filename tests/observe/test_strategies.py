"""Every strategy trains what one process trains, and says what it cannot."""

import importlib
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cells import slow

from fastpar.models.gpt import GPT
from fastpar.observe import strategies
from fastpar.observe.strategies import STRATEGIES, Settings, build, decay_groups
from fastpar.settings.model import GPTConfig
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

TINY = GPTConfig(2, 2, 32, 16, 200, dropout=0.0)
SPARSE = GPTConfig(2, 2, 32, 16, 200, dropout=0.0, n_expert=4, top_k=2, expert_hidden=32)
STEPS, ROWS, LIMIT = 3, 4, 0.5
ON_TWO = ["ddp", "ddp-zero", "fsdp2", "fsdp2-no-reshard", "dp", "zero1", "zero3", "tp", "pp"]


def make(shape=TINY):
    return GPT(shape, seed=3).double()


def rows_of(step, first, count):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(TINY.vocab_size, (ROWS, 17), generator=generator)[first : first + count]
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def train(name, micro_batches, optimizer="adamw"):
    """(loss, norm) of each step with so many micro-batches a rank, weights, whether it is quiet."""
    # What rounds the fp32 factor of clipping grows in orthogonalize, by up to its slope of 1000.
    limit = LIMIT if optimizer == "adamw" else math.inf
    sparse = name in ("experts", "ep")
    micro_batches = 1 if sparse else micro_batches  # experts are balanced in each
    own = Parallel(grad_accum_steps=micro_batches)
    settings = Settings(optimizer, max_grad_norm=limit, parallel=own)
    made = build(name, lambda: make(SPARSE if sparse else TINY), settings)
    own = ROWS // made.dp_size
    rows = own // micro_batches
    found = []
    for step in range(STEPS):
        batches = [rows_of(step, made.dp_rank * own + j * rows, rows) for j in range(micro_batches)]
        loss = made.train_step(batches, lr=1e-2 / (step + 1))
        if dist.is_initialized():
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        found.append((loss.item(), float(made.grad_norm)))
    weights = {n: w.detach().clone() for n, w in made.weights() if w.is_floating_point()}
    quiet = made.quiet is not None
    made.close()
    return found, weights, quiet


def on_rank(names, *options):
    return [train(name, *options) for name in names]


ON_FOUR = ["hsdp", "tp", "tp-zero1", "tp-zero2", "tp-zero3", "dp-pp"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "names", "options"),
    [
        (2, ["ddp", "zero2", "tp", "cp", "pp", "ep"], (2,)),
        slow(2, ON_TWO, (1,)),
        slow(4, ON_FOUR, (1,)),
        slow(4, ON_FOUR, (1, "muon")),
    ],
)
def test_ranks_train_what_one_process_trains(ranks, names, options):
    alone = ("single", "experts") if "ep" in names else ("single",)
    one = {name: train(name, *options) for name in alone}
    assert one["single"][0][0][1] > LIMIT, "clipping is not tried"
    for of_rank in run_ranks(on_rank, ranks, names, *options, backend="gloo", timeout_s=240):
        for name, (found, those, quiet) in zip(names, of_rank):
            exact, weights, _ = one["experts" if name == "ep" else "single"]
            # fastpar's norm, and so the factor of its clipping, is fp32.
            losses, norms = ([row[i] for row in found] for i in (0, 1))
            assert losses == pytest.approx([loss for loss, _ in exact], rel=1e-10), name
            assert norms == pytest.approx([norm for _, norm in exact], rel=1e-7), name
            assert set(those) == set(weights)
            for key, w in weights.items():
                torch.testing.assert_close(those[key], w, rtol=0, atol=1e-8, msg=f"{name} {key}")
            assert quiet == (name == "ddp")


def test_every_name_has_a_title_of_its_own_and_says_why_it_cannot_run(monkeypatch):
    assert len({s.title for s in STRATEGIES.values()}) == len(STRATEGIES)
    for name, ranks, why in (
        *((name, 1, "needs 2 ranks, got 1") for name in ("tp", "ep", "diloco")),
        ("tp", 3, "needs a multiple of 2 ranks, got 3"),
        ("tp-zero2", 2, "needs 4 ranks, got 2"),
        *((name, 2, None) for name in ("single", *ON_TWO)),
    ):
        assert STRATEGIES[name].why_not(ranks) == why, name
    without = [n for n in STRATEGIES if "muon" in (STRATEGIES[n].why_not(4, "muon") or "")]
    deepspeed = [f"deepspeed{n}" for n in (1, 2, 3)]
    assert without == ["ddp-zero", "fsdp2", "fsdp2-no-reshard", *deepspeed]
    monkeypatch.setattr(strategies.importlib.util, "find_spec", lambda name: None)
    assert STRATEGIES["deepspeed2"].why_not(2) == "deepspeed is not installed"


def apart_on_rank():
    """Weights of a rank that trains apart, before and after it meets the other one."""
    made = build("diloco", lambda: GPT(TINY, seed=1), Settings(lr=1e-2, max_grad_norm=0.5))
    idx = torch.arange(4 * 8).view(4, 8) % 41
    mine, found = idx.chunk(made.dp_size)[made.dp_rank], []
    for step in range(20):
        made.train_step([(mine, mine)], 1e-2)
        if step > 17:
            found.append(torch.cat([w.flatten() for _, w in made.weights()]))
    return made.dp_rank, found, made.report()["wire_bytes"]


def test_ranks_that_train_apart(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    first, second = run_ranks(apart_on_rank, 2)
    assert (first[0], second[0]) == (0, 1)
    assert not first[1][0].equal(second[1][0])
    assert first[1][1].equal(second[1][1])
    assert first[2] == pytest.approx(first[1][0].numel() * 4 / 20, rel=0.01)


def test_the_door_refuses(monkeypatch):
    ranks = r"build: expected 4, 6, 8, \.\.\. ranks for HSDP, got world_size=1; start"
    for name, model, settings, words in (
        ("x", torch.nn.Identity, (), r"build: expected one of single, ddp, .* got name=x; c"),
        ("ddp", torch.nn.Identity, (), r"build: expected torch\.distributed to be initialized"),
        ("fsdp2", make, (Settings("muon"),), "=adamw for fsdp2, .* got optimizer=muon; choose"),
        ("hsdp", make, (), ranks),
    ):
        with pytest.raises(ValueError, match=words):
            build(name, model, *settings)
    missing = ModuleNotFoundError("No module named 'deepspeed'", name="deepspeed")
    monkeypatch.setattr(importlib, "import_module", mock.Mock(side_effect=missing))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    with pytest.raises(ImportError, match=r"^deepspeed is not installed$"):
        build("deepspeed1", torch.nn.Identity)


class FakeDeepSpeed:
    """What DeepSpeed's engine does with micro-batches: it divides, and steps after the last."""

    def __init__(self, model, n):
        self.model, self.n, self.updates = model, n, []

    def __call__(self, x, y):
        return self.model(x, y)

    def backward(self, loss):
        (loss / self.n).backward()

    def step(self):
        self.updates.append((len(self.updates) + 1) % self.n == 0)

    def get_global_grad_norm(self):
        return 1.5


def test_deepspeed_divides_and_updates_itself():
    """Without the package: the calls that its engine gets. Decay is of matrices alone."""
    model = make()
    engine, groups = FakeDeepSpeed(model, 2), decay_groups(model, 0.1)
    made = strategies._DeepSpeed("deepspeed1", engine, torch.optim.SGD(groups, 1.0))
    made.train_step([rows_of(0, 0, 2), rows_of(0, 2, 2)], lr=0.25)
    assert made.optimizer.param_groups[0]["lr"] == 0.25
    assert engine.updates == [False, True]
    assert float(made.grad_norm) == 1.5
    split = model.wte.weight.grad.clone()
    model.zero_grad()
    model(*rows_of(0, 0, 4)).backward()
    torch.testing.assert_close(split, model.wte.weight.grad)
    assert [g["weight_decay"] for g in groups] == [0.1, 0.0]
    assert [{p.dim() for p in g["params"]} for g in groups] == [{2}, {1}]
    assert sum(len(g["params"]) for g in groups) == len(list(model.parameters()))
