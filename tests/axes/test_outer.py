"""Outer: what replicas that train apart have in common with runs that do not."""

from functools import partial

import pytest
import torch
from cells import covering, sweep
from programs import SMALL, Net, fill, loss_of

from fastpar import AdamW, Mesh, Muon, Outer, engine_of, muon_groups, parallelize
from fastpar.checkpoint.restore import load_checkpoint
from fastpar.checkpoint.saver import save_checkpoint
from fastpar.engine.debug import Debug
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

AS_IT_IS = {"lr": 1.0, "momentum": 0.0}


def net(seed=5):
    return fill(Net(), seed)


def adamw(model, **options):
    return AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0, **options)


def muon(model, **options):
    return Muon(muon_groups(model), lr=0.02, adamw={"lr": 1e-2}, **options)


def train(model, opt, steps, first=0, of=(0, 1)):
    for i in range(first, first + steps):
        loss_of(model, of[0] + i * of[1]).backward()
        opt.step()
        opt.zero_grad()


def weights(model):
    with engine_of(model).gathered():
        return [p.detach().clone() for p in model.parameters()]


def run(steps, make=adamw, replicas=1, dtype=None, options=None, apart=True, **outer):
    """The weights of this rank after some steps with an outer optimizer, without if not given, and
    the bytes that it sent. Replicas have batches of their own, or the same if not apart."""
    mesh = Mesh(replicas=replicas)
    asked = Parallel.of(**SMALL, **options or {})
    model = parallelize(net().to(dtype), mesh, asked, debug=Debug(bus_gb_s=12))
    opt = make(model)
    listening = Outer(opt, **outer) if outer else None
    train(model, opt, steps, of=(mesh.replica, replicas) if apart else (0, 1))
    return weights(model), listening and listening.sent_bytes


def same(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def apart(found, expected):
    return max((a - b).abs().max() for a, b in zip(found, expected, strict=True))


@covering(
    1,
    ("stage", [0, 1, 2, 3]),
    ("make", [adamw, muon]),
    ("masters", [False, True]),
    ("replicas", [1, 2]),
)
def test_replicas_with_equal_data_are_the_inner_run(stage, make, masters, replicas):
    """With the mean alone: of two ranks each, by the bits of two ranks."""
    how = {"make": partial(make, master_weights=masters), "options": {"zero_stage": stage}}
    how |= {"dtype": torch.bfloat16 if masters else torch.float32, "apart": False}
    expected = run_ranks(lambda: run(7, **how)[0], 2)[0]
    outer = {"replicas": replicas, "every": 3, **AS_IT_IS}
    for found, sent in run_ranks(lambda: run(7, **how, **outer), 2 * replicas, timeout_s=30):
        assert same(found, expected)
        assert replicas == 1 or sent > 0


@pytest.mark.slow
@covering(1, ("stage", [0, 2, 3]), ("offload", ["optimizer", "parameters"]))
def test_state_on_the_host(stage, offload):
    """The outer step is one of what lies there: the bits of the run without offload."""
    how = {"replicas": 2, "every": 3, "lr": 0.7, "momentum": 0.9}

    def weights_with(**more):
        options = {"zero_stage": stage, **more}
        return run_ranks(lambda: run(6, options=options, **how)[0], 4, timeout_s=30)

    away = weights_with(offload=offload if stage == 3 else "optimizer")
    assert all(map(same, away, weights_with()))


def diloco(n, steps, every, lr, momentum):
    """The weights of n replicas by the formula, in one process."""
    models = [net() for _ in range(n)]
    opts = [adamw(m) for m in models]
    at = [p.detach().clone() for p in models[0].parameters()]
    kept = [torch.zeros_like(p) for p in at]
    for step in range(steps):
        for m, (model, opt) in enumerate(zip(models, opts, strict=True)):
            train(model, opt, 1, step, of=(m, n))
        if (step + 1) % every:
            continue
        with torch.no_grad():
            for i, replicas in enumerate(zip(*(m.parameters() for m in models), strict=True)):
                delta = at[i] - sum(replicas) / n
                kept[i] = momentum * kept[i] + delta
                at[i] = at[i] - lr * (delta + momentum * kept[i])
                for p in replicas:
                    p.copy_(at[i])
    return [p.detach() for p in models[0].parameters()]


@sweep("n", [1, 2, 3])
def test_the_outer_step_is_diloco(n):
    """Nesterov's momentum on the mean of the differences."""
    how = {"every": 4, "lr": 0.7, "momentum": 0.9}
    expected = diloco(n, 8, **how)
    for found, _ in run_ranks(lambda: run(8, replicas=n, **how), n):
        # The second outer step is of Adam's updates, which a rounding of weights changes.
        assert apart(found, expected) < 2e-5


def test_lookahead():
    """One replica without momentum or an engine: halfway to where the inner steps went."""
    model, inner = net(), net()
    opt, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, inner))
    Outer(opt, every=3, lr=0.5, momentum=0.0)
    for first in (0, 3):
        slow = [p.detach().clone() for p in model.parameters()]
        inner.load_state_dict(model.state_dict())
        train(model, opt, 3, first)
        train(inner, theirs, 3, first)
        for p, fast, before in zip(model.parameters(), inner.parameters(), slow, strict=True):
            assert torch.equal(p, fast.detach().add(before - fast.detach(), alpha=0.5))


def test_a_run_goes_on_from_its_state():

    def halves(stop):
        (model, opt), (other, second) = ((m, adamw(m)) for m in (net(), net(seed=7)))
        Outer(opt, every=3)
        train(model, opt, stop)
        outer = Outer(second, every=3)
        other.load_state_dict(model.state_dict())
        second.load_state_dict(opt.state_dict())
        train(other, second, 11 - stop, stop)
        assert outer.steps == 11
        return list(other.parameters())

    whole = halves(0)
    assert all(same(halves(stop), whole) for stop in (4, 5, 6))


def part(folder, replicas, steps, first=0, *, load=False, stage=0, **outer):
    """A part of a run, from and into checkpoints of each replica."""
    mesh = Mesh(replicas=replicas)
    model = parallelize(net(), mesh, Parallel.of(zero_stage=stage, **SMALL))
    opt = adamw(model)
    Outer(opt, **outer)
    path = f"{folder}/{mesh.replica}"
    if load:
        load_checkpoint(f"{path}/latest", model=model, optimizer=opt)
    train(model, opt, steps, first, of=(mesh.replica, replicas))
    save_checkpoint(path, step=first + steps, model=model, optimizer=opt)
    return weights(model)


@pytest.mark.slow
@covering(1, ("wire", ["fp32", "int8"]), ("stage", [0, 2]), ("stop", [6, 8]))
def test_a_checkpoint_has_the_outer_state(wire, stage, stop, tmp_path):
    """Weights, momentum, the step of the random bits: the bits of the run without a stop."""
    how = partial(part, every=4, wire=wire, stage=stage)
    whole = run_ranks(lambda: how(tmp_path / "whole", 2, 13), 4, timeout_s=60)
    run_ranks(lambda: how(tmp_path, 2, stop), 4, timeout_s=60)
    again = run_ranks(lambda: how(tmp_path, 2, 13 - stop, stop, load=True), 4, timeout_s=60)
    assert all(map(same, again, whole))


@pytest.mark.slow
@sweep("form", ["bf16", "int8"])
def test_compressed_differences(form):
    how = {"replicas": 2, "every": 2, **AS_IT_IS}
    exact, compressed = (run_ranks(lambda w=w: run(12, wire=w, **how), 2) for w in ("fp32", form))
    assert same(compressed[0][0], compressed[1][0])
    ratio = exact[0][1] / compressed[0][1]
    assert ratio >= {"bf16": 1.9, "int8": 3.0}[form]  # padded to blocks
    # Differences of two steps are at most 0.02 an element.
    assert 0 < apart(exact[0][0], compressed[0][0]) < 0.02


def test_two_models_on_the_same_replicas():

    def together():
        mesh = Mesh(replicas=2)
        models = [parallelize(net(seed=s), mesh, Parallel.of(**SMALL)) for s in (5, 6)]
        both = [(model, adamw(model)) for model in models]
        for _, opt in both:
            Outer(opt, every=2)
        for i in range(4):
            for model, opt in both:
                train(model, opt, 1, i, of=(mesh.replica, 2))
        return [weights(model) for model in models]

    expected = run_ranks(lambda: run(4, replicas=2, every=2)[0], 2)
    for (first, second), one in zip(run_ranks(together, 2), expected, strict=True):
        assert same(first, one)
        assert not same(second, one)


def two_engines():
    both = [parallelize(net(seed=s), Mesh()) for s in (5, 6)]
    Outer(AdamW([p for model in both for p in model.parameters()]), every=2)


def other_settings():
    mesh = Mesh(replicas=2)
    Outer(adamw(parallelize(net(), mesh)), every=2 + mesh.replica)


def group_added_later():
    """Its parameters would never be averaged."""
    mesh = Mesh(replicas=2)
    model = parallelize(net(), mesh, Parallel.of(**SMALL))
    first, *rest = model.parameters()
    opt = AdamW([first])
    Outer(opt, every=2)
    opt.add_param_group({"params": rest})
    train(model, opt, 1)


def outer(**options):
    return lambda: Outer(adamw(net()), **options)


REFUSED = [
    (outer(every=0), r"Outer: expected every >= 1, got every=0; set every"),
    (outer(every=4, momentum=1.0), r"expected momentum in \[0, 1\), got momentum=1.0"),
    (outer(every=4, wire="int2"), r"expected wire to be one of fp32, bf16.*got wire=int2"),
    (two_engines, r"expected one engine, got 2; build an"),
    (group_added_later, r"had 1 parameters when Outer was made, and now has .*; add all"),
    (other_settings, r"replicas differ: 'every=3 lr=0.7 .*' on replica 1, "
     r"'every=.* on replica 0; start"),
    (lambda: Mesh(replicas=3), r"Mesh: expected replicas to divide the number of ranks, got "
     r"replicas=3 with world_size=2; start a multiple of 3"),
    (lambda: Mesh(replicas=0), r"expected replicas to be a positive integer"),
]  # fmt: skip


@sweep(("make", "message"), REFUSED)
def test_what_is_refused(make, message):
    def rank():
        with pytest.raises(ValueError, match=message):
            make()

    run_ranks(rank, 2)
