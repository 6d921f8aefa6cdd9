"""Training loops as people write them for torch: every stage has the numbers of plain torch.

The yardstick is torch.optim.AdamW on one process with the mean of the ranks' losses, in fp64. There
rounding leaves some 1e-15; where a step divides by a count of tokens it multiplies by one fp32
number, which is off by 6e-8 of an update.
"""

import contextlib
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from programs import SMALL, STAGES, Net, batch, fill
from torch import nn

from fastpar import GPT, AdamW, GPTConfig, Mesh, engine_of, parallelize
from fastpar.engine.debug import Debug
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

WITHIN, COUNTED_WITHIN = 1e-11, 1e-8


class Loop:
    """What a loop needs, with an engine or without."""

    def __init__(
        self, world_size, build=Net, *, mesh=None, stage=0, split=None, stock=False, **options
    ):
        self.world_size, self.rank = world_size, None
        self.model = fill(build().double())
        self.engine, optimizer = None, torch.optim.AdamW
        if mesh is not None:
            self.rank = mesh.dp_rank
            asked = Parallel.of(zero_stage=stage, **{**SMALL, **options})
            bus = Debug(bus_gb_s=2.0, poison=True) if "offload" in options else None
            parallelize(self.model, mesh, asked, debug=bus)
            self.engine = engine_of(self.model)
            optimizer = torch.optim.AdamW if stock else AdamW
        split = split or (lambda name: 0)
        sets = [[], []]
        for name, p in self.model.named_parameters():
            sets[split(name)].append(p)
        self.optimizers = [
            optimizer(params, lr=0.05, weight_decay=0.1, eps=1e-4) for params in sets if params
        ]
        self.first, self.last = self.optimizers[0], self.optimizers[-1]
        self.tokens = 0

    def count(self, i):
        """Before the backward of batch i, whose loss is then a sum."""
        if self.engine is not None:
            self.engine.count_tokens(5 * _size(i, self.rank))
        else:
            self.tokens += 5 * sum(_size(i, rank) for rank in range(self.world_size))

    def step(self, *optimizers):
        for optimizer in optimizers or self.optimizers:
            if self.engine is None and self.tokens:
                for group in optimizer.param_groups:
                    for p in group["params"]:
                        if p.grad is not None:
                            p.grad.div_(self.tokens)
            optimizer.step()
        self.tokens = 0

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


FEW = [
    *((2, {}), (2, {"stage": 3})),
    *((2, {"stage": 2, "offload": "optimizer"}), (2, {"stage": 3, "offload": "parameters"})),
]
MORE = [
    *FEW, (1, {}), (2, {"stage": 2}),
    (2, {"stage": 3, "accumulate": "full", "grad_accum_steps": 2}), (1, {"deterministic": True}),
    (2, {"stage": 1}), (3, {"stage": 0, "deterministic": True}),
    (2, {"stage": 1, "deterministic": True}), (2, {"stage": 2, "deterministic": True}),
    (3, {"stage": 1}), (4, {"stage": 3, "shard_size": 2}),
]  # fmt: skip


def check(names, cells=FEW, *, within=WITHIN, build=Net, split=None):
    body = play(names)
    for world_size, options in cells:
        expected = train(Loop(world_size, build, split=split), body)
        for result in ranks_of(world_size, body, build=build, split=split, **options):
            for name, value in expected.items():
                error = (result[name] - value).abs().max().item()
                assert error <= within, (names, world_size, options, name, error)


# What loops do, each of (loop, step); b10 is the backward of batch step + 10, sum10 of a sum
def clear(loop, step=0):
    for optimizer in loop.optimizers:
        optimizer.zero_grad()


def clear_model(loop, step=0):
    loop.model.zero_grad()


def fail(grad):
    raise ArithmeticError


def failing_at(name):
    def body(loop, step):
        part = loop.model.get_submodule(name)
        handle = part.register_forward_hook(lambda m, args, out: out.register_hook(fail) and None)
        with pytest.raises(ArithmeticError):
            loop.backward(step + 10)
        handle.remove()

    return body


def no_sync(loop):
    return contextlib.nullcontext() if loop.engine is None else loop.engine.no_sync()


def locally(loop, step):
    """Cleared while the gradients are this rank's own."""
    with no_sync(loop):
        loop.backward(step)
        loop.first.zero_grad()


def mixed(loop, step):
    """Some micro-batches stay local in odd steps."""
    for j in range(3):
        with no_sync(loop) if step % 2 and j < 2 else contextlib.nullcontext():
            loop.backward(3 * step + j)


def submodules(loop, step):
    x = loop.model.blocks[step](loop.model.wte(batch(step)))
    loop.model.blocks[0](x)


def no_grads_of(*names):
    def body(loop, step):
        for name in names:
            loop.model.get_parameter(name).grad = None

    return body


def halve(loop, step):
    for p in loop.model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)


def zero_data(loop, step):
    for p in loop.model.parameters():
        p.grad.data.zero_()


def give(loop, step):
    for p in loop.model.parameters():
        p.grad = torch.full_like(p, 0.01)


def only_in_step_1(names):
    return lambda loop, step: play(names)(loop, step) if step == 1 else None


DO = {
    **{f"b{n}": lambda loop, step, n=n: loop.backward(step + n) for n in (0, 10, 20)},
    **{f"sum{n}": lambda loop, i, n=n: loop.backward(i + n, sums=True) for n in (0, 10, 20)},
    "count": lambda loop, step: loop.count(step),
    "count10": lambda loop, step: loop.count(step + 10),
    "forget": lambda loop, step: setattr(loop, "tokens", 0),
    "step": lambda loop, step: loop.step(),
    "step1": lambda loop, step: loop.step(loop.first),
    "step2": lambda loop, step: loop.step(loop.last),
    "clear": clear,
    "clear1": lambda loop, step: loop.first.zero_grad(),
    "clear2": lambda loop, step: loop.last.zero_grad(),
    "zero": lambda loop, step: [o.zero_grad(set_to_none=False) for o in loop.optimizers],
    "zero1": lambda loop, step: loop.first.zero_grad(set_to_none=False),
    "zero2": lambda loop, step: loop.last.zero_grad(set_to_none=False),
    "clear_model": clear_model,
    "zero_model": lambda loop, step: loop.model.zero_grad(set_to_none=False),
    "clear_block": lambda loop, step: loop.model.blocks[step % 3].zero_grad(),
    "zero_block": lambda loop, step: loop.model.blocks[step % 3].zero_grad(set_to_none=False),
    "clear_gpt_block": lambda loop, step: loop.model.h[0].zero_grad(),
    "no_bias": no_grads_of("norm.bias"),
    "no_tied": no_grads_of("norm.weight", "wte.weight"),
    "zero_norm": lambda loop, step: loop.model.norm.weight.grad.zero_(),
    "halve": halve,
    "zero_data": zero_data,
    "give": give,
    "failing": failing_at("norm"),  # nothing was sent, but the next units were gathered
    "failing_late": failing_at("blocks.0"),  # after most gradients have come
    "locally": locally,
    "mixed": mixed,
    "submodules": submodules,
    "look": torch.no_grad()(submodules),
}


def play(names):
    """A loop's body."""

    def body(loop, step):
        for name in names.split():
            DO[name](loop, step)

    body.__name__ = names
    return body


def thrown_away(clear):
    """A step that does not come leaves no tokens."""
    DO[f"again_{clear}"] = only_in_step_1(f"forget {clear} count sum10")
    return f"{clear} count sum0 again_{clear} count sum20 step"


DO["again"] = only_in_step_1("forget clear_model sum10 count10")
COUNTED = [*map(thrown_away, ("clear", "clear_model", "zero")), "sum0 count again step clear"]
LOOPS = [
    "mixed step clear",
    "look b0 look step clear",
    "submodules b0 look step clear",
    "failing clear_model b0 step clear_model",
]
WITH_TWO = [  # optimizers
    "b0 clear b10 b20 step clear_model",
    "b0 zero_model b10 b20 step b0 step zero_model clear b20 step clear_model",
    "b0 step clear",
    "b0 step1 clear1 step2 clear2",
    "clear1 b0 step1 clear2 b10 step2",  # as a GAN's
    "clear1 b0 b10 step1 clear1 b20 step2 clear2",  # the second steps with all three
    "b0 zero1 b10 step1 zero2 step2 clear_model",
    "locally b10 step clear",
    # What is set to None is not stepped, what is zero is, by weight decay and momentum.
    "b0 clear_block no_bias step clear",
    "b0 clear_block b10 no_tied step clear_model",
    "b0 zero_block b10 zero_norm step zero_model step",
]
BY_HAND = (
    "clear b0 halve b20 step",
    "clear give b0 step",
    "b0 b10 step step clear",
    "b0 halve zero1 b10 step clear",
)
HERE = [(1, {}), (2, {}), (1, {"deterministic": True}), (2, {"deterministic": True})]


class Listed(Net):
    """It uses weights that it has in a list before the block to which they belong."""

    def __init__(self):
        super().__init__()
        self.weights = [self.blocks[1].up.weight]

    def forward(self, idx):
        x = self.wte(idx)
        for w in self.weights:
            x = x * (1 + w.detach().square().mean())
            x = x + (x @ w.T).tanh() @ w
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def halves(name):
    """Across every bucket."""
    return sum(map(ord, name)) % 2


@pytest.mark.parametrize("cells", [FEW, pytest.param(MORE, marks=pytest.mark.slow)], ids=len)
def test_loops(cells):
    """Of few cells each loop runs one, by turns."""
    every = [
        *((names, {"within": COUNTED_WITHIN}) for names in COUNTED),
        *((names, {}) for names in (*LOOPS, *WITH_TWO[:2])),
        *((names, {"split": halves}) for names in WITH_TWO),
    ]
    for i, (names, how) in enumerate(every):
        check(names, cells[i % 4 : i % 4 + 1] if cells is FEW else cells, **how)
    check("b0 step clear", [(2, {"stage": 3})], build=Listed)
    check("b0 zero_data b10 step clear_model", [(1, {}), *FEW[1:3]])
    for names in BY_HAND:
        check(names, HERE, split=halves)  # where p.grad is the gradient
    for names in ("failing_late clear_model b0 step clear_model", "failing_late b0 step clear"):
        check(names, HERE[::2])  # several ranks would have sent some of them


def test_loops_under_tensor_parallelism():
    """Parts of gradients are cleared by their optimizer, too."""
    config = GPTConfig(n_layer=1, n_head=2, n_embd=8, block_size=5, vocab_size=13, dropout=0.0)
    options = {"tp": 2, "sequence_parallel": False}
    how = {"build": lambda: GPT(config), "split": halves}
    check(WITH_TWO[5], [(2, {**options, "stage": 2})], **how)
    for names in (WITH_TWO[3], "b0 clear_gpt_block step clear_model"):
        check(names, [(1, options)], **how)
    check("b0 b10 step clear", [(n, {**options, "stock": True}) for n in (1, 2)], **how)


def test_what_was_told_of_gradients_that_a_module_zeroed():
    """Placeholders say that they were zeroed; of p.grad itself nobody is told."""
    names = thrown_away("zero_model")
    check(names, [(2, {"stage": 3})], within=COUNTED_WITHIN)
    with pytest.raises(RuntimeError, match=r"p\.grad of .* after count_tokens\(\) or contribute"):
        ranks_of(2, play(names))


def test_what_was_contributed_to_a_step_that_did_not_come_is_dropped():
    def body(loop):
        for value in (1.0, 2.0):
            clear(loop)
            loop.engine.contribute(torch.tensor([value]))
            loop.backward(0)
        loop.step()
        return loop.engine.control.contributed.tolist()

    assert on_two(body, 2) == [[4.0]] * 2


def on_two(body, stage, **options):
    """body(loop) on two ranks."""
    return run_ranks(lambda: body(Loop(2, mesh=Mesh(), stage=stage, **options)), 2, timeout_s=20)


def dropped_count(some, clear):
    def body(loop):
        loop.count(0)
        loop.backward(0, sums=True)
        if some:
            loop.last.zero_grad()  # what is counted is not the count of both
            loop.first.step()
        loop.step()
        loop.count(0)
        clear(loop)
        loop.backward(0, sums=True)
        loop.step()

    return body


def one_rank_clears(loop):
    loop.backward(0)
    if loop.rank == 1:
        loop.model.norm.weight.grad = None
    loop.step()


def one_rank_counts(loop):
    if loop.rank == 0:
        loop.count(0)
    loop.backward(0, sums=True)
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


def fails_after_sending(loop):
    play("b0 step clear")(loop, 0)
    handle = loop.model.blocks[1].up.weight.register_hook(fail)
    with pytest.raises(ArithmeticError):
        loop.backward(1)
    handle.remove()
    clear_model(loop)
    loop.backward(1)


def uses_a_weight_before(loop):
    """Its second gradient comes when the bucket was sent."""
    penalty = loop.model.norm.weight.square().sum()
    (loop.model(batch(0)).sum() + penalty).backward()


def begins_another(more):
    """At stage 3 a forward waits for other ranks, and not for those in a step."""

    def body(loop):
        for step in range(3):
            other = step == 1 and loop.rank == 0
            if other and not more:
                with torch.no_grad():
                    loop.model(batch(0))
            for _ in range(1 + (other and more)):
                loop.backward(step)
            loop.step()
            clear(loop)

    return body


def saves_alone(loop):
    play("b0 step")(loop, 0)
    if loop.rank == 0:
        loop.model.state_dict()
    play("clear b10 step")(loop, 0)


BEGIN = "Engine: ranks differ: rank 1 begins "
DROPPED = r"Engine: the token count does not match the gradients \({}.*; call zero_grad"
REFUSED = [
    *((dropped_count(some, how), DROPPED.format(got), (0, 2), {"split": halves})
      for some, got in ((False, "zero_grad.. dropped"),
                        (True, "zero_grad.. of some parameters came after"))
      for how in (clear, clear_model)),
    *((body, message, STAGES, {}) for body, message in (
        (one_rank_counts, r"rank 1 did not call count_tokens\(\), others did; call it on every"),
        (one_rank_clears, r"Engine: ranks 0 and 1 set different gradients to None .*; set"),
        (replaces, r"p\.grad of 'norm\.weight' was replaced by another tensor; set it to None"),
        (steps_twice,
         r"AdamW\.step: parameter 'norm\.weight' was already stepped by AdamW .*; give each"),
        (fails_after_sending, r"an earlier backward stopped with .* buckets sent on rank"),
    )),
    *((begins_another(more), BEGIN + words, (3,), {"transport": transport})
      for more, words in (
        (True, "a step after 1 micro-batches, rank 0 a forward after 1; give"),
        (False, "a forward after 0 micro-batches, rank 0 a forward without gradients"))
      for transport in ("shm", "torch")),
    (uses_a_weight_before,
     r"parameter 'norm\.weight' got another gradient after bucket \d was sent \(.*; call the "
     r"module .* forward or after it", (0, 1, 2), {}),
    (saves_alone,
     BEGIN + r"a forward after 0 .*, rank 0 state_dict\(\) or gathered\(\) after 0; .* and save",
     (3,), {}),
]  # fmt: skip


@pytest.mark.parametrize(("body", "message", "stages", "options"), REFUSED)
def test_loops_that_are_refused(body, message, stages, options):
    for stage in stages:
        with pytest.raises(RuntimeError, match=message):
            on_two(body, stage, **options)


def test_a_state_dict_of_one_rank_meets_the_next_forward_of_the_others():
    """Stages 1 and 2, which gather the same in both: nobody waits for the time-out."""

    def all_save(loop):
        play("b0 step")(loop, 0)
        loop.model.state_dict()
        play("clear b10 step")(loop, 0)

    def saved(body):
        return lambda loop: (body(loop), {**loop.model.state_dict()})[1]

    for stage in (1, 2):
        alone, together = (on_two(saved(body), stage) for body in (saves_alone, all_save))
        for a, b in zip(alone, together, strict=True):
            assert all(torch.equal(a[name], b[name]) for name in b)


def test_main_gradients_are_cleared_by_hand():
    def ranks():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16()
        parallelize(fill(model), Mesh(), grad_dtype=torch.float32)
        optimizer = AdamW(model.parameters(), lr=0.1, master_weights=True)
        x, found = torch.ones(2, 4, dtype=torch.bfloat16), []
        for clear in (model.zero_grad, partial(optimizer.zero_grad, False), model.zero_grad):
            model(x).float().sum().backward()
            found.append(model[0].weight.main_grad.clone())
            clear()
        model(x).float().sum().backward()
        model[1].zero_grad()
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.step()
        moved = [not torch.equal(p, q) for p, q in zip(model.parameters(), before)]
        return found, moved

    def none():
        for model, stage in ((nn.Linear(2, 2), 0), (nn.Linear(2, 2).bfloat16(), 1)):
            parallelize(model, Mesh(), zero_stage=stage, grad_dtype=torch.float32)
            model(torch.ones(2, 2, dtype=model.weight.dtype)).sum().backward()
            assert not hasattr(model.weight, "main_grad")

    run_ranks(none, 2)
    for world_size in (1, 2):
        for found, moved in run_ranks(ranks, world_size):
            assert all(torch.equal(grad, found[0]) for grad in found)
            assert moved == [True, True, False, False]
