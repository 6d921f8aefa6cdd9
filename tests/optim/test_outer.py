"""outer.py: what replicas that train apart have in common with runs that do not."""

import warnings
from functools import partial

import pytest
import torch
from cells import covering, sweep
from test_engine import SMALL, Net, batch

from fastpar import AdamW, Mesh, Muon, Outer, engine_of, muon_groups, parallelize
from fastpar.checkpoint.restore import load_checkpoint
from fastpar.checkpoint.saver import save_checkpoint
from fastpar.engine.debug import Debug
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

AS_IT_IS = {"lr": 1.0, "momentum": 0.0}


def adamw(model, **options):
    return AdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0, **options)


def muon(model, **options):
    return Muon(muon_groups(model), lr=0.02, adamw={"lr": 1e-2}, **options)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train(model, opt, steps, first=0, data=lambda i: i):
    """Training steps on batches of numbers that data gives."""
    for i in range(first, first + steps):
        logits = model(batch(data(i)))
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch(data(i)).flatten()).backward()
        opt.step()
        opt.zero_grad()


def weights(model):
    with engine_of(model).gathered():
        return [p.detach().clone() for p in model.parameters()]


def run(mesh, steps, make=adamw, data=lambda i: i, dtype=None, options=None, **outer):
    """The weights of this rank after some steps with an outer optimizer, without if not given."""
    asked = Parallel.of(**SMALL, **options or {})
    model = parallelize(Net().to(dtype), mesh, asked, debug=Debug(bus_gb_s=12))
    opt = make(model)
    listening = Outer(opt, **outer) if outer else None
    train(model, opt, steps, data=data)
    return weights(model), listening


def same(found, expected):
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@covering(1, ("stage", [0, 1, 2, 3]), ("make", [adamw, muon]), ("masters", [False, True]))
def test_one_replica_with_the_mean_alone_is_the_inner_run(stage, make, masters):
    """Bit for bit, at every stage."""
    dtype = torch.bfloat16 if masters else torch.float32

    def rank():
        optimizer = partial(make, master_weights=masters)
        how = {"make": optimizer, "dtype": dtype, "options": {"zero_stage": stage}}
        found, _ = run(Mesh(), 9, **how, every=3, **AS_IT_IS)
        return same(found, run(Mesh(), 9, **how)[0])

    assert run_ranks(rank, 2) == [True, True]


@sweep("stage", [0, 1, 2, 3])
def test_replicas_with_equal_data_are_the_inner_run(stage):
    """Two replicas of two ranks each, by the bits of two ranks."""
    options = {"zero_stage": stage}

    def replicas():
        found, outer = run(Mesh(replicas=2), 9, options=options, every=3, **AS_IT_IS)
        return found, outer.sent_bytes

    def alone():
        return run(Mesh(), 9, options=options)[0]

    expected = run_ranks(alone, 2)[0]
    for found, sent in run_ranks(replicas, 4, timeout_s=30):
        assert same(found, expected)
        assert sent > 0


@covering(1, ("stage", [0, 2, 3]), ("offload", ["optimizer", "parameters"]))
def test_state_on_the_host(stage, offload):
    """The outer step is one of what lies there: the bits of the run without offload."""
    kept = {"zero_stage": stage}
    offload = offload if stage == 3 else "optimizer"
    away = {**kept, "offload": offload}
    how = {"every": 3, "lr": 0.7, "momentum": 0.9}

    def replicas(options):
        mesh = Mesh(replicas=2)
        data = lambda i: 2 * i + mesh.replica  # noqa: E731
        return run(mesh, 8, data=data, options=options, **how)[0]

    expected = run_ranks(replicas, 4, kept, timeout_s=30)
    for found, plain in zip(run_ranks(replicas, 4, away, timeout_s=30), expected, strict=True):
        assert same(found, plain)


def test_a_mean_after_every_step_of_sgd_is_data_parallel():
    """To rounding: the mean of weights is the weight less the mean of gradients."""

    def replicas():
        mesh = Mesh(replicas=4)
        return run(mesh, 6, sgd, data=lambda i: 4 * i + mesh.replica, every=1, **AS_IT_IS)[0]

    def together():
        mesh = Mesh()
        return run(mesh, 6, sgd, data=lambda i: 4 * i + mesh.dp_rank)[0]

    expected = run_ranks(together, 4)[0]
    for found in run_ranks(replicas, 4, timeout_s=30):
        for mine, theirs in zip(found, expected, strict=True):
            # Six steps and as many means of weights below 1, each a few roundings.
            assert (mine - theirs).abs().max() < 6 * 8 * 2**-24


def diloco(n, steps, every, lr, momentum):
    """The weights of n replicas by the formula, in one process."""
    models = [Net() for _ in range(n)]
    opts = [AdamW(m.parameters(), lr=1e-2, max_grad_norm=1.0) for m in models]
    at = [p.detach().clone() for p in models[0].parameters()]
    kept = [torch.zeros_like(p) for p in at]
    for step in range(steps):
        for m, (model, opt) in enumerate(zip(models, opts, strict=True)):
            train(model, opt, 1, n * step + m)
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

    def rank():
        mesh = Mesh(replicas=n)
        data = lambda i: n * i + mesh.replica  # noqa: E731
        return run(mesh, 8, data=data, every=4, lr=0.7, momentum=0.9)[0]

    expected = diloco(n, 8, 4, 0.7, 0.9)
    for found in run_ranks(rank, n):
        for mine, theirs in zip(found, expected, strict=True):
            # The second outer step is of Adam's updates, which a rounding of weights changes.
            assert (mine - theirs).abs().max() < 2e-5


def test_lookahead():
    """One replica without momentum or an engine: halfway to where the inner steps went."""
    model, inner = Net(), Net()
    opt, theirs = sgd(model), sgd(inner)
    Outer(opt, every=3, lr=0.5, momentum=0.0)
    for first in (0, 3):
        slow = [p.detach().clone() for p in model.parameters()]
        inner.load_state_dict(model.state_dict())
        train(model, opt, 3, first)
        train(inner, theirs, 3, first)
        for p, fast, before in zip(model.parameters(), inner.parameters(), slow, strict=True):
            assert torch.equal(p, fast.detach().add(before - fast.detach(), alpha=0.5))


def test_a_run_goes_on_from_its_state():
    """Of the inner optimizer, in which the outer state is."""

    def halves(stop):
        model = Net()
        opt = adamw(model)
        Outer(opt, every=3)
        train(model, opt, stop)
        state = {"model": model.state_dict(), "opt": opt.state_dict()}
        other = Net(seed=7)
        second = adamw(other)
        outer = Outer(second, every=3)
        other.load_state_dict(state["model"])
        second.load_state_dict(state["opt"])
        train(other, second, 11 - stop, stop)
        assert outer.steps == 11
        return list(other.parameters())

    whole = Net()
    opt = adamw(whole)
    Outer(opt, every=3)
    train(whole, opt, 11)
    for stop in (4, 5, 6):
        assert same(halves(stop), list(whole.parameters()))


def resumed(folder, stage, outer, stop, first):
    """The weights after 13 steps, of two runs if there is a stop; each replica has its folder."""
    mesh = Mesh(replicas=2)
    folder = f"{folder}/{mesh.replica}"
    model = parallelize(Net(), mesh, Parallel.of(zero_stage=stage, **SMALL))
    opt = adamw(model)
    Outer(opt, **outer)
    if first:
        train(model, opt, stop, data=lambda i: 2 * i + mesh.replica)
        save_checkpoint(folder, step=stop, model=model, optimizer=opt)
        return None
    if stop:
        load_checkpoint(f"{folder}/latest", model=model, optimizer=opt)
    train(model, opt, 13 - stop, stop, data=lambda i: 2 * i + mesh.replica)
    return weights(model)


@covering(1, ("wire", ["fp32", "int4"]), ("stage", [0, 2]), ("stop", [6, 8]))
def test_a_checkpoint_has_the_outer_state(wire, stage, stop, tmp_path):
    """Weights, momentum, errors of differences: the bits of the run without a stop."""
    args = str(tmp_path), stage, {"every": 4, "wire": wire}
    whole = run_ranks(resumed, 4, *args, 0, False, timeout_s=60)
    run_ranks(resumed, 4, *args, stop, True, timeout_s=60)
    again = run_ranks(resumed, 4, *args, stop, False, timeout_s=60)
    assert all(map(same, again, whole))


@pytest.mark.parametrize(
    ("after", "wire", "why"),
    [(2, "int4", None), (4, "int4", "4 go on"), (1, "int4", "1 go on"), (2, "fp32", "weights are")],
)
def test_errors_of_other_replicas_are_dropped_aloud(after, wire, why, tmp_path):
    def rank(replicas, wire, steps, load):
        mesh = Mesh(replicas=replicas)
        model = parallelize(Net(), mesh, Parallel.of(**SMALL))
        opt = adamw(model)
        Outer(opt, every=2, wire=wire)
        path = tmp_path / "0"
        if load:
            load_checkpoint(path / "latest", model=model, optimizer=opt)
        train(model, opt, steps, data=lambda i: 2 * i + mesh.replica)
        if mesh.replica == 0:
            save_checkpoint(path, step=steps, model=model, optimizer=opt)

    run_ranks(rank, 2, 2, "int4", 3, False, timeout_s=60)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run_ranks(rank, after, after, wire, 4, True, timeout_s=60)
        run_ranks(rank, after, after, wire, 5, True, timeout_s=60)  # of its own errors
    found = [str(w.message) for w in told if "Outer" in str(w.message)]
    start = "Outer: what differences of 2 replicas had lost on the wire is dropped: "
    assert len(found) == (why is not None), found
    assert all(text.startswith(start + why) for text in found)


@sweep("form", ["bf16", "int8", "int4"])
def test_compressed_differences(form):
    """All replicas get the same weights; fewer bytes."""

    def replicas(wire):
        mesh = Mesh(replicas=2)
        data = lambda i: 2 * i + mesh.replica  # noqa: E731
        found, outer = run(mesh, 12, data=data, every=2, wire=wire, **AS_IT_IS)
        return found, outer.sent_bytes

    exact, compressed = (run_ranks(replicas, 2, wire) for wire in ("fp32", form))
    assert same(compressed[0][0], compressed[1][0])
    ratio = exact[0][1] / compressed[0][1]
    assert ratio >= {"bf16": 1.9, "int8": 3.0, "int4": 4.0}[form]  # padded to blocks
    largest = max((a - b).abs().max() for a, b in zip(exact[0][0], compressed[0][0], strict=True))
    # Differences of two steps are at most 0.02 an element: codes of 4 bits keep a seventh of them.
    assert 0 < largest < 0.02


@sweep(
    ["outer", "message"],
    [
        ({"every": 0}, r"Outer: expected every >= 1, got every=0; set every"),
        ({"every": 4, "lr": 0.0}, r"expected lr in \(0, 2\], got lr=0.0; 0.7 is usual"),
        ({"every": 4, "momentum": 1.0}, r"expected momentum in \[0, 1\), got momentum=1.0"),
        ({"every": 4, "wire": "int2"}, r"expected wire to be one of fp32, bf16.*got wire=int2"),
    ],
)
def test_bad_numbers(outer, message):
    with pytest.raises(ValueError, match=message):
        Outer(adamw(Net()), **outer)


def test_one_optimizer_of_two_engines():
    both = [parallelize(Net(seed=s), Mesh()) for s in (0, 1)]
    opt = AdamW([p for model in both for p in model.parameters()])
    with pytest.raises(ValueError, match=r"expected one engine, got 2 engines; build one"):
        Outer(opt, every=2)


def test_replicas_that_do_not_divide_the_ranks():
    def rank():
        with pytest.raises(
            ValueError,
            match=r"Mesh: expected replicas to divide the number of ranks, got replicas=3 with "
            r"world_size=4; start a multiple of 3",
        ):
            Mesh(replicas=3)
        with pytest.raises(ValueError, match=r"expected replicas to be a positive integer"):
            Mesh(replicas=0)

    run_ranks(rank, 4)


def test_two_models_on_the_same_replicas():
    """Each has an outer optimizer of its own, on the same mesh."""

    def together():
        mesh = Mesh(replicas=2)
        models = [parallelize(Net(seed=s), mesh, Parallel.of(**SMALL)) for s in (0, 1)]
        opts = [adamw(model) for model in models]
        for opt in opts:
            Outer(opt, every=2)
        for i in range(4):
            for model, opt in zip(models, opts, strict=True):
                train(model, opt, 1, i, lambda i: 2 * i + mesh.replica)
        return [weights(model) for model in models]

    def alone():
        mesh = Mesh(replicas=2)
        return run(mesh, 4, data=lambda i: 2 * i + mesh.replica, every=2)[0]

    expected = run_ranks(alone, 2)
    for (first, second), one in zip(run_ranks(together, 2), expected, strict=True):
        assert same(first, one)
        assert not same(second, one)


def test_replicas_with_other_settings():
    def rank():
        mesh = Mesh(replicas=2)
        opt = adamw(parallelize(Net(), mesh))
        with pytest.raises(
            ValueError,
            match=r"expected the same on every replica, got 'every=3 lr=0.7 .*' on replica 1 where",
        ):
            Outer(opt, every=2 + mesh.replica)

    run_ranks(rank, 2)
