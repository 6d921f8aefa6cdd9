"""Pipeline stages: weights of several layers, what is held and sent, refusals.

tests/contracts/test_same_run.py has whole runs, which have the bits of the run without stages.
"""

import pytest
import torch
from cells import sweep

from fastpar import GPT, Adafactor, AdamW, GPTConfig, Mesh, engine_of, parallelize, pipeline_step
from fastpar.axes.pipeline.schedules import held_of, make_schedule
from fastpar.engine import pipeline_step as pipeline
from fastpar.kernels import make_key
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks
from fastpar.train.sample import generate

MICRO, T = 4, 8
CONFIG = GPTConfig(vocab_size=97, n_layer=3, n_head=2, n_embd=16, block_size=T, dropout=0.0)
SCHEDULES = ["gpipe", "1f1b", "interleaved"]


def gpt(n_layer=3, **changes):
    return GPT(GPTConfig(**{**vars(CONFIG), "n_layer": n_layer, **changes}))


def staged(model, pp=2, **options):
    mesh = Mesh(pp=pp, device="cpu")
    return parallelize(model, mesh, Parallel.of(bucket_mb=0.01, first_bucket_mb=0.001, **options))


def zeros(rows):
    return torch.zeros(rows, T, dtype=torch.int64)


def steps(pp, dp, options, shared, scale):
    """Weights after two steps; shared: two layers with one of them."""
    model, mesh = gpt(), Mesh(pp=pp, dp=dp, device="cpu")
    if shared is not None:
        model.h[shared[1]].attn.c_proj = model.h[shared[0]].attn.c_proj
    parallelize(model, mesh, Parallel.of(deterministic=True, first_bucket_mb=0.001, **options))
    optimizer = AdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)
    optimizer.grad_scale = scale
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randint(0, 97, (2, 8, T), generator=generator).chunk(dp, 1)[mesh.dp_rank]
        if pp > 1:
            pipeline_step(model, x, y, micro_batches=MICRO // dp, target=lambda loss: loss * scale)
        for part in zip(x.chunk(MICRO), y.chunk(MICRO)) if pp == 1 else ():
            (model(*part) / MICRO).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def test_a_weight_of_two_layers_gets_one_gradient_and_a_scale_goes():
    """A power of two changes no bit."""
    [expected] = run_ranks(steps, 1, 1, 1, {}, (0, 1), 1.0)
    options = {"zero_stage": 2, "accumulate": "full"}
    for found in run_ranks(steps, 4, 2, 2, options, (0, 1), 2.0**10):
        assert all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_held_micro_batches_and_messages_are_those_of_the_simulator(schedule, monkeypatch):
    many, original = 8, pipeline.PipelineStep.receive

    def received(step, op):
        step.engine.most_held = max(len(step.held), getattr(step.engine, "most_held", 0))
        return original(step, op)

    def rank():
        model, sent = staged(gpt(4), schedule=schedule), []

        def observe(group, op, nbytes, call):
            sent.extend([nbytes] * (op == "send"))
            return call()

        for link in engine_of(model).shards.stages.links.values():
            link.observers = (*link.observers, observe)
        pipeline_step(model, zeros(many), zeros(many), micro_batches=many)
        return engine_of(model).most_held, sent

    monkeypatch.setattr(pipeline.PipelineStep, "receive", received)
    order = make_schedule(schedule, 2, many)
    held = held_of(schedule, 2, many, order.chunks)
    for here, (most, sent) in enumerate(run_ranks(rank, 2)):
        assert most == max(sum(moment.held) for moment in held[here])
        mine = [order.stage_of(here, chunk) for chunk in range(order.chunks)]
        beside = [s + by for s in mine for by in (1, -1) if 0 <= s + by < order.stages]
        away = [s for s in beside if order.owner(s)[0] != here]
        assert sent == [T * CONFIG.n_embd * 4] * (many * len(away))  # the bytes of one row


@pytest.mark.parametrize(("schedule", "stage"), [("1f1b", 0), ("interleaved", 0), ("1f1b", 1)])
def test_hooks_of_others_see_every_gradient(schedule, stage):
    """They use the parameters themselves."""

    def rank():
        model, seen = staged(gpt(4), schedule=schedule, zero_stage=stage), []
        matrices = [p for p in engine_of(model).shards.params if p.dim() == 2]
        matrices[0].register_hook(seen.append)
        matrices[-1].register_post_accumulate_grad_hook(seen.append)
        pipeline_step(model, zeros(MICRO), zeros(MICRO), micro_batches=MICRO)
        return len(seen)

    assert run_ranks(rank, 4) == [2 * MICRO] * 4


def test_stages_are_cut_by_what_their_parts_cost():
    def rank(vocab_size, options):
        model = staged(gpt(4, vocab_size=vocab_size), **options)
        return engine_of(model).shards.stages.parts[0]

    for vocab_size, options, cut in ((97, {}, 3), (2000, {}, 5), (2000, {"pp_split": [1, 3]}, 2)):
        assert run_ranks(rank, 2, vocab_size, options) == [range(cut), range(cut, 6)]


def mixed():
    model = gpt()
    model.h[2].bfloat16()
    return model


def shared(first, second):
    model = gpt(4)
    model.h[second].attn.c_proj = model.h[first].attn.c_proj
    return model


COPIES = r"'h\.\d\.attn\.c_proj\.weight' is on stages {}, but only .*; keep"
CUTS = [
    (lambda: torch.nn.Linear(2, 2), {}, r"pp=2 needs a model with pipeline_parts\(\), got Linear"),
    *((gpt, {"pp_split": split}, "expected pp_split as 2 numbers of layers that add up to 3, got")
      for split in ([3, 1], [1, 1, 1])),
    (gpt, {"schedule": "interleaved", "chunks": 3},
     "would have no layers, got pp=2 with 3 chunks for 3 layers; choose a smaller"),
    (mixed, {}, r"differ in dtype: wte.weight=torch.float32 and h.2.attn.c_attn.weight="),
    (lambda: shared(0, 3), {}, COPIES.format("0 and 1")),  # each stage would train its own copy
    (lambda: shared(0, 2), {"schedule": "interleaved"}, COPIES.format("0 and 2")),
]  # fmt: skip


@sweep(("model", "options", "message"), CUTS)
def test_a_cut_that_cannot_be_is_refused(model, options, message):
    def rank():
        with pytest.raises(ValueError, match=f"parallelize: .*{message}"):
            staged(model(), **options)

    run_ranks(rank, 2)


STEPS = [
    *(({"micro_batches": n}, f"divide the 4 rows .*={n}; choose a whole") for n in (3, 0, 2.0)),
    ({"schedule": "zb-x"}, r"one of gpipe, 1f1b, .*, got schedule='zb-x'"),
    ({"targets": zeros(4)[:, 1:]}, r"idx=\[4, 8\] targets=\[4, 7\]; pass one target"),
    ({"reduction": "none"}, "reduction mean or sum, got reduction='none'"),
    ({"micro_batches": 2, "rng_keys": [make_key(0, 0)]}, "rng_keys for 2 micro-batches, got 1; p"),
]


def test_bad_steps_are_refused_and_a_stage_alone_has_no_forward():
    def rank():
        model = staged(gpt())
        for options, message in STEPS:
            with pytest.raises(ValueError, match=message):
                pipeline_step(model, zeros(4), **{"targets": zeros(4), **options})
        with pytest.raises(ValueError, match=r"='1f1b' places .*'interleaved' \(2 per rank\);"):
            pipeline_step(
                staged(gpt(), schedule="interleaved"), zeros(4), zeros(4), schedule="1f1b"
            )
        with pytest.raises(ValueError, match="work with zero_stage=0, tp=1, pp=2, as its row"):
            Adafactor(model.parameters(), lr=1e-2)
        with pytest.raises(AttributeError, match=r"call fastpar\.pipeline_step instead"):
            model(zeros(4), zeros(4))
        with pytest.raises(ValueError, match=r"generate: .* got one split into pipeline stages; l"):
            next(generate(model, zeros(4), 1))

    run_ranks(rank, 2)
