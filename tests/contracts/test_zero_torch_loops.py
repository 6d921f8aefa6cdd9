"""Training loops as people write them for torch: every stage has the numbers of plain torch.

The yardstick is torch.optim.AdamW on one process with the mean of the ranks' losses, in fp64.
"""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from test_zero_awkward import SMALL, Net, batch, fill

from fastpar import GPT, AdamW, GPTConfig, Mesh, engine_of, parallelize
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks


class Loop:
    """What a loop needs, with an engine or without."""

    def __init__(self, world_size, build=Net, *, mesh=None, stage=0, split=None, **options):
        self.world_size, self.rank = world_size, None
        self.model = fill(build().double())
        self.engine, optimizer = None, torch.optim.AdamW
        if mesh is not None:
            self.rank = mesh.dp_rank
            parallelize(self.model, mesh, Parallel.of(zero_stage=stage, **{**SMALL, **options}))
            self.engine, optimizer = engine_of(self.model), AdamW
        split = split or (lambda name: 0)
        sets = [[], []]
        for name, p in self.model.named_parameters():
            sets[split(name)].append(p)
        self.optimizers = [
            optimizer(params, lr=0.05, weight_decay=0.1, eps=1e-4) for params in sets if params
        ]
        self.first, self.last = self.optimizers[0], self.optimizers[-1]
        self._tokens = 0

    def count(self, i):
        """Before the backward of batch i, whose loss is then a sum."""
        if self.engine is not None:
            self.engine.count_tokens(5 * _size(i, self.rank))
        else:
            self._tokens += 5 * sum(_size(i, rank) for rank in range(self.world_size))

    def step(self, *optimizers):
        for optimizer in optimizers or self.optimizers:
            if self.engine is None and self._tokens:
                for group in optimizer.param_groups:
                    for p in group["params"]:
                        if p.grad is not None:
                            p.grad.div_(self._tokens)
            optimizer.step()
        self._tokens = 0

    def backward(self, i, *, sums=False):
        ranks = range(self.world_size) if self.rank is None else [self.rank]
        for rank in ranks:
            n = _size(i, rank) if sums else 3
            idx = batch(i * self.world_size + rank, n)
            targets = idx.roll(1, 1)
            if isinstance(self.model, GPT):
                loss = self.model(idx, targets)
            else:
                reduction = "sum" if sums else "mean"
                logits = self.model(idx).flatten(0, -2)
                loss = F.cross_entropy(logits, targets.flatten(), reduction=reduction)
            (loss if sums else loss / len(ranks)).backward()


def _size(i, rank):
    return 1 + (i + rank) % 3


def train(loop, body, steps=3):
    for step in range(steps):
        body(loop, step)
    return {name: v.clone() for name, v in loop.model.state_dict().items()}


def ranks_of(world_size, body, tp=1, **options):
    def ranks():
        return train(Loop(world_size, mesh=Mesh(tp=tp), **options), body)

    return run_ranks(ranks, world_size * tp)


FEW = [(2, {}), (2, {"stage": 3})]
MORE = [
    (1, {}),
    (2, {"stage": 2}),
    (2, {"stage": 3, "accumulate": "full", "grad_accum_steps": 2}),
    (1, {"deterministic": True}),
    (2, {"stage": 1}),
    (3, {"stage": 0, "deterministic": True}),
    (2, {"stage": 1, "deterministic": True}),
    (2, {"stage": 2, "deterministic": True}),
    (3, {"stage": 1}),
    (4, {"stage": 3, "shard_size": 2}),
]


def check(body, cells=FEW, *, within=1e-11, build=Net, split=None):
    for world_size, options in cells:
        expected = train(Loop(world_size, build, split=split), body)
        for result in ranks_of(world_size, body, build=build, split=split, **options):
            for name, value in expected.items():
                error = (result[name] - value).abs().max().item()
                assert error <= within, (body, world_size, options, name, error)


# A step that does not come


def clear_optimizers(loop):
    for optimizer in loop.optimizers:
        optimizer.zero_grad()


def clear_model(loop):
    loop.model.zero_grad()


def clear_to_zero(loop):
    for optimizer in loop.optimizers:
        optimizer.zero_grad(set_to_none=False)


def clear_model_to_zero(loop):
    loop.model.zero_grad(set_to_none=False)


def abandoned(clear):
    def body(loop, step):
        clear(loop)
        loop.count(step)
        loop.backward(step, sums=True)
        if step == 1:  # it is thrown away
            loop._tokens = 0
            clear(loop)
            loop.count(step)
            loop.backward(step + 10, sums=True)
        loop.count(step)
        loop.backward(step + 20, sums=True)
        loop.step()

    return body


def counted_late(loop, step):
    loop.backward(step, sums=True)
    loop.count(step)
    if step == 1:
        loop._tokens = 0
        clear_model(loop)
        loop.backward(step + 10, sums=True)
        loop.count(step + 10)
    loop.step()
    clear_optimizers(loop)


CLEAR = (clear_optimizers, clear_model, clear_to_zero)
COUNTED = [*map(abandoned, CLEAR), counted_late]
COUNTED_WITHIN = 1e-8  # multiplied by one fp32 number: 6e-8 of an update


def test_a_step_that_does_not_come_leaves_no_tokens():
    for body in COUNTED:
        check(body, within=COUNTED_WITHIN)


def halved_by_hand(loop, step):
    clear_optimizers(loop)
    loop.backward(step)
    for p in loop.model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)
    loop.backward(step + 20)
    loop.step()


def test_gradients_changed_by_hand_are_what_is_added_to():
    fixed = {"deterministic": True}
    check(halved_by_hand, [(1, {}), (2, {"stage": 0}), (1, fixed), (2, {"stage": 0, **fixed})])


def zeroed(loop, step):
    loop.backward(step)
    loop.model.zero_grad(set_to_none=False)
    loop.backward(step + 10)
    loop.backward(step + 20)
    loop.step()
    clear_model(loop)


def test_a_step_that_does_not_come_leaves_nothing_in_the_tree():
    check(zeroed, [(1, {"deterministic": True})])


def test_what_was_told_of_gradients_that_a_module_zeroed():
    """Placeholders say that they were zeroed; of p.grad itself nobody is told."""
    body = abandoned(clear_model_to_zero)
    check(body, [(2, {"stage": 3})], within=COUNTED_WITHIN)
    with pytest.raises(
        RuntimeError, match=r"after count_tokens\(\) or contribute\(\), got p\.grad"
    ):
        ranks_of(2, body)


def means(loop, step):
    loop.backward(step)
    clear_optimizers(loop)
    loop.backward(step + 10)
    loop.backward(step + 20)
    loop.step()
    clear_model(loop)


def test_a_step_that_does_not_come_leaves_nothing():
    check(means)

    def ranks():
        loop = Loop(2, mesh=Mesh(), stage=2)
        for value in (1.0, 2.0):
            clear_optimizers(loop)
            loop.engine.contribute(torch.tensor([value]))
            loop.backward(0)
        loop.step()
        return loop.engine.control.contributed.tolist()

    assert run_ranks(ranks, 2) == [[4.0]] * 2


@pytest.mark.parametrize("how", ["early", "some"])
def test_a_count_that_was_dropped_is_missed(how):
    got = {"early": "none after zero_grad", "some": "zero_grad.. of some parameters only, after"}

    def ranks(stage, clear):
        loop = Loop(2, mesh=Mesh(), stage=stage, split=halves)
        loop.count(0)
        loop.backward(0, sums=True)
        if how == "some":
            loop.last.zero_grad()  # what is counted is not the count of both
            loop.first.step()
        loop.step()
        loop.count(0)
        clear(loop)
        loop.backward(0, sums=True)
        loop.step()

    for stage in (0, 2):
        for clear in (clear_optimizers, clear_model):
            with pytest.raises(
                RuntimeError,
                match=rf"Engine: expected count_tokens\(\) of .* got {got[how]}.*; call zero_grad",
            ):
                run_ranks(ranks, 2, stage, clear)


# Two optimizers on one model


def halves(name):
    """Across every bucket."""
    return sum(map(ord, name)) % 2


def one_backward(loop, step):
    loop.backward(step)
    loop.step()
    clear_optimizers(loop)


def in_turn(loop, step):
    loop.backward(step)
    for optimizer in loop.optimizers:
        loop.step(optimizer)
        optimizer.zero_grad()


def each_its_own(loop, step):
    """A GAN's: what one backward leaves in the other's parameters is cleared before its own."""
    for k, optimizer in enumerate(loop.optimizers):
        optimizer.zero_grad()
        loop.backward(2 * step + k)
        loop.step(optimizer)


def left_over(loop, step):
    """The second one steps with the gradients of both backward passes."""
    loop.first.zero_grad()
    loop.backward(step)
    loop.backward(step + 10)
    loop.step(loop.first)
    loop.first.zero_grad()
    loop.backward(step + 20)
    loop.step(loop.last)
    loop.last.zero_grad()


def to_zero(loop, step):
    loop.backward(step)
    loop.first.zero_grad(set_to_none=False)
    loop.backward(step + 10)
    loop.step(loop.first)
    loop.last.zero_grad(set_to_none=False)
    loop.step(loop.last)
    clear_model(loop)


def locally(loop, step):
    """Cleared while the gradients are this rank's own."""
    engine = loop.engine
    with contextlib.nullcontext() if engine is None else engine.no_sync():
        loop.backward(step)
        loop.first.zero_grad()
    loop.backward(step + 10)
    loop.step()
    clear_optimizers(loop)


TWO = [one_backward, in_turn, each_its_own, left_over, to_zero, locally]


def test_two_optimizers_clear_their_own_gradients():
    for body in TWO:
        check(body, split=halves)


def test_partial_gradients_are_cleared_by_their_optimizer():
    config = GPTConfig(n_layer=1, n_head=2, n_embd=8, block_size=5, vocab_size=13, dropout=0.0)
    options = {"tp": 2, "sequence_parallel": False}
    check(left_over, [(2, {**options, "stage": 2})], build=lambda: GPT(config), split=halves)
    for body in (in_turn, some_of_gpt):
        check(body, [(1, options)], build=lambda: GPT(config), split=halves)


# Cleared by hand


def some(loop, step):
    loop.backward(step)
    loop.model.blocks[step % 3].zero_grad()
    loop.model.norm.bias.grad = None
    loop.step()
    clear_optimizers(loop)


def some_of_gpt(loop, step):
    loop.backward(step)
    loop.model.h[0].zero_grad()
    loop.step()
    clear_model(loop)


def between(loop, step):
    loop.backward(step)
    loop.model.blocks[step % 3].zero_grad()
    loop.backward(step + 10)
    loop.model.norm.weight.grad = None
    loop.model.wte.weight.grad = None  # tied
    loop.step()
    clear_model(loop)


def to_zero_by_hand(loop, step):
    loop.backward(step)
    loop.model.blocks[step % 3].zero_grad(set_to_none=False)
    loop.backward(step + 10)
    loop.model.norm.weight.grad.zero_()
    loop.step()
    loop.model.zero_grad(set_to_none=False)
    loop.step()  # by weight decay and momentum


BY_HAND = [some, between, to_zero_by_hand]


def test_gradients_that_are_set_to_none_are_not_stepped():
    for body in BY_HAND:
        check(body, split=halves)


@pytest.mark.slow
def test_every_loop_at_every_stage():
    for body in COUNTED:
        check(body, MORE, within=COUNTED_WITHIN)
    for body in (means, zeroed, *TWO, *BY_HAND):
        check(body, MORE, split=halves)
    for body in BY_HAND:
        check(body, [*FEW, *MORE])


def one_rank_clears(loop):
    loop.backward(0)
    if loop.rank == 1:
        loop.model.norm.weight.grad = None
    loop.step()


def replaces(loop):
    loop.backward(0)
    loop.model.norm.weight.grad = torch.zeros_like(loop.model.norm.weight)
    loop.step()


def steps_twice(loop):
    other = AdamW([loop.model.norm.weight])
    for i in range(2):
        loop.backward(i)
        (loop.first if i else other).step()  # each with gradients of its own
        clear_model(loop)
    loop.backward(2)
    loop.step()
    other.step()


REFUSED = [
    (
        one_rank_clears,
        r"same gradients set to None on every rank .*, got others on rank 1 than .*; do",
    ),
    (
        replaces,
        r"p\.grad of 'norm\.weight' as backward left it, got another .*; set p\.grad to None",
    ),
    (
        steps_twice,
        r"AdamW\.step: expected parameters of one .*, got 'norm\.weight', which AdamW has stepped",
    ),
]


@pytest.mark.parametrize(("body", "message"), REFUSED)
def test_loops_that_are_refused(body, message):
    for stage in range(4):
        with pytest.raises(RuntimeError, match=message):
            run_ranks(lambda stage=stage: body(Loop(2, mesh=Mesh(), stage=stage)), 2)


def test_main_gradients_are_cleared_by_hand():
    def ranks():
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).bfloat16()
        parallelize(fill(model), Mesh(), grad_dtype=torch.float32)
        optimizer = AdamW(model.parameters(), lr=0.1, master_weights=True)
        x, found = torch.ones(2, 4, dtype=torch.bfloat16), []
        for _ in range(2):
            model(x).float().sum().backward()
            found.append(model[0].weight.main_grad.clone())
            model.zero_grad()
        model(x).float().sum().backward()
        model[1].zero_grad()
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        moved = [not torch.equal(p, q) for p, q in zip(model.parameters(), before)]
        return found, moved

    for world_size in (1, 2):
        for found, moved in run_ranks(ranks, world_size):
            assert torch.equal(*found)
            assert moved == [True, True, False, False]
