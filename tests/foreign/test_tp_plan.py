"""Plans: foreign models split by patterns on their modules' names equal one process."""

import copy
import functools
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from cells import covering, slow
from test_patched import Nano, gpt2, logits_of, random_weights
from torch import nn

import fastpar
from fastpar import AdamW, Mesh, Replicate, Shard, engine_of, parallelize
from fastpar.foreign.tp_plan import Column, Enter, Head, Leave
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

T = 12
STEPS = 3


def hf(heads=4, **options):
    return gpt2("D8", n_head=heads, n_embd=8 * heads, **options).double()


def nano(heads=4, **options):
    return random_weights(Nano(width=8 * heads, heads=heads, **options)).double()


def five_heads(make, **options):
    return make(heads=5, **options)


def patched(model, **options):
    fastpar.patch(model, **options)
    return model


MODELS = {
    "transformers": hf,
    "transformers eager": functools.partial(hf, attn="eager"),
    "transformers patched": lambda **k: patched(hf(**k)),
    "nanoGPT": lambda **k: patched(nano(**k)),
    "nanoGPT without bias": lambda **k: patched(nano(bias=False, **k)),
    # Five heads, which tp pads.
    "transformers 5": functools.partial(five_heads, hf),
    "transformers patched 5": lambda **k: patched(five_heads(hf, **k)),
    "nanoGPT 5": lambda **k: patched(five_heads(nano, **k)),
}

THOROUGH = ("transformers", "transformers patched", "nanoGPT")


def batch(step, rank=0, ranks=1):
    ids = torch.randint(67, (4, T), generator=torch.Generator().manual_seed(step))
    return ids.chunk(ranks)[rank]


def loss_of(model, ids):
    logits = logits_of(model, ids)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()), logits.detach()


def train(model, optimizer, *where):
    """(loss, logits, gradients) of every step."""
    seen = []
    for step in range(STEPS):
        loss, logits = loss_of(model, batch(step, *where))
        loss.backward()
        if hasattr(next(model.parameters()), "_fastpar_engine"):
            whole = {id(p): grad.clone() for p, grad in engine_of(model).grads()}
            grads = [whole[id(p)] for p in model.parameters()]
        else:
            grads = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        seen.append((loss.item(), logits, grads))
    return seen


def one_process(model):
    """By torch alone; eps hides that a key's bias has no gradient but rounding."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.01)
    return train(model, optimizer), model.state_dict()


def split_run(model, tp, stage, tokens, plan=None):
    torch.set_num_threads(1)
    mesh, model = Mesh(tp=tp), copy.deepcopy(model)
    parallelize(model, mesh, Parallel.of(zero_stage=stage, sequence_parallel=tokens), tp_plan=plan)
    optimizer = AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.01)
    seen = train(model, optimizer, mesh.dp_rank, mesh.dp_size)
    return mesh.dp_rank, seen, model.state_dict(), engine_of(model).tp_report


def same(got, want, bound=1e-12):
    assert got.shape == want.shape
    assert (got - want).abs().max() <= bound * want.abs().max().clamp_min(1.0)


def compare(ranks, dp, reference):
    seen_once, whole = reference
    for dp_rank, seen, state, _ in ranks:
        for (_, logits, grads), (_, want_logits, want_grads) in zip(seen, seen_once):
            same(logits, want_logits.chunk(dp)[dp_rank])
            assert len(grads) == len(want_grads)
            for grad, want in zip(grads, want_grads):
                same(grad, want)
        assert list(state) == list(whole)
        for name, want in whole.items():
            same(state[name], want)
    for step, (want, *_) in enumerate(seen_once):
        mean = sum(seen[step][0] for _, seen, *_ in ranks) / len(ranks)
        assert abs(mean - want) <= 1e-12 * abs(want)


@functools.cache
def model_and_reference(name):
    torch.manual_seed(0)
    model = MODELS[name]()
    return model, one_process(model)


@pytest.mark.filterwarnings("error:fastpar.patch")  # no call falls back
@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize(
    ("name", "dp", "tp", "stage"),
    [
        ("nanoGPT", 1, 4, 0),
        ("transformers patched", 2, 2, 3),
        ("transformers 5", 1, 2, 0),
        slow("transformers patched 5", 2, 2, 3),
        slow("transformers 5", 1, 4, 1),
        slow("nanoGPT 5", 2, 4, 2),
        *(slow(name, 1, 4, 0) for name in MODELS if name not in ("nanoGPT", "transformers 5")),
        *(
            slow(name, 2, 2, stage)
            for name in THOROUGH
            for stage in range(4)
            if (name, stage) != ("transformers patched", 3)
        ),
    ],
)
def test_a_ready_plan_equals_one_process(name, dp, tp, stage, tokens):
    model, reference = model_and_reference(name)
    ranks = run_ranks(split_run, dp * tp, model, tp, stage, tokens)
    compare(ranks, dp, reference)
    where = "on" if tokens else "off"
    plan = "gpt2" if name.startswith("transformers") else "nanogpt"
    chosen = f"tp={tp}, sequence parallelism {where}, plan {plan}, chosen for its modules"
    assert chosen in ranks[0][3]


def checkpointed(name):
    torch.manual_seed(0)
    if name == "nanoGPT":
        model = patched(nano())
        model.checkpointing = False
        return model
    model = hf()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


@covering(1, ("name", ["transformers", "nanoGPT"]), ("tokens", [False, True]))
def test_activation_checkpointing(name, tokens):
    model = checkpointed(name)
    compare(run_ranks(split_run, 2, model, 2, 0, tokens), 1, one_process(model))


# Dropout draws from torch's default generator, which threads share: processes.


RATES = {"attn_pdrop": 0.0, "embd_pdrop": 0.25, "resid_pdrop": 0.25}
DROPPED = {
    "transformers": lambda: hf(**RATES),
    "transformers patched": lambda: patched(hf(dropout=0.25)),
    "nanoGPT patched": lambda: patched(nano(p=0.25)),
}


def dropped(tp, modes):
    torch.set_num_threads(1)
    results = {}
    for name, make in DROPPED.items():
        for tokens in modes:
            torch.manual_seed(0)
            results[name, tokens] = split_run(make(), tp, 0, tokens)
    return results


@pytest.mark.slow
def test_the_same_masks_as_one_process():
    (once,) = run_ranks(dropped, 1, 1, (None,), backend="gloo")
    ranks = run_ranks(dropped, 2, 2, (False, True), backend="gloo")
    for name in DROPPED:
        for tokens in (False, True):
            compare([rank[name, tokens] for rank in ranks], 1, once[name, None][1:3])


def with_other_seeds():
    mesh = Mesh(tp=2)
    torch.manual_seed(mesh.rank)
    model = hf(embd_pdrop=0.1)
    torch.manual_seed(mesh.rank)
    message = (
        r"expected the 2 ranks of tp to have the same torch generator for dropout, got other "
        r"states; call torch\.manual_seed\(seed \+ mesh\.dp_rank\) before"
    )
    with pytest.raises(ValueError, match=message):
        parallelize(model, mesh)
    torch.manual_seed(0)
    parallelize(model, mesh)
    return True


@pytest.mark.slow
def test_generators_that_differ_are_refused():
    assert run_ranks(with_other_seeds, 2, backend="gloo") == [True, True]


# What people do with a transformers model


def saved(model, folder):
    model = copy.deepcopy(model)
    parallelize(model, Mesh(tp=2), Parallel.of(sequence_parallel=False))
    state = model.state_dict()
    model.load_state_dict({name: x * 2 for name, x in state.items()})
    twice = model.state_dict()
    torch.distributed.barrier()
    if Mesh(tp=2).rank == 0:
        model.save_pretrained(folder, state_dict=dict(state))  # which takes tied ones out
    return state, twice


def test_state_dict_and_save_pretrained(tmp_path):
    import transformers

    model, _ = model_and_reference("transformers")
    for state, twice in run_ranks(saved, 2, model, tmp_path):
        assert list(state) == list(model.state_dict())
        for name, want in model.state_dict().items():
            assert torch.equal(state[name], want)
            assert torch.equal(twice[name], want * 2)
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, dtype=torch.float64)
    for name, want in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], want)


def generated(model, tp):
    model = copy.deepcopy(model).eval()
    parallelize(model, Mesh(tp=tp), Parallel.of(sequence_parallel=False))
    return model.generate(batch(0)[:, :5], max_new_tokens=8, do_sample=False, pad_token_id=0)


@pytest.mark.parametrize("name", ["transformers", "transformers patched"])
def test_generate(name):
    model, _ = model_and_reference(name)
    (want,) = run_ranks(generated, 1, model, 1)
    for got in run_ranks(generated, 2, model, 2):
        assert torch.equal(got, want)


def test_generate_needs_all_tokens():
    model, _ = model_and_reference("transformers")

    def odd():
        mine = copy.deepcopy(model).eval()
        parallelize(mine, Mesh(tp=2))
        mine(batch(0)[:, :5])

    message = (
        r"expected tp to divide the length of sequences under sequence parallelism, got tp=2 T=5; "
        r"pad them, or pass sequence_parallel=False"
    )
    with pytest.raises(ValueError, match=message):
        run_ranks(odd, 2)


@covering(1, ("tp", [2, 4]), ("tokens", [False, True]))
def test_a_fused_loss_never_joins_logits(tp, tokens):
    torch.manual_seed(0)
    model = patched(hf(), fused_loss=True)
    once = copy.deepcopy(model)
    want, _ = loss_of(once, batch(0))
    want.backward()

    def run():
        mine = copy.deepcopy(model)
        parallelize(mine, Mesh(tp=tp), Parallel.of(sequence_parallel=tokens))
        output = mine(batch(0), labels=batch(0))
        output.loss.backward()
        grads = {id(p): grad.clone() for p, grad in engine_of(mine).grads()}
        return output.loss.detach(), output.logits, [grads[id(p)] for p in mine.parameters()]

    for loss, logits, grads in run_ranks(run, tp):
        assert logits is None
        same(loss, want.detach())
        for grad, p in zip(grads, once.parameters()):
            same(grad, p.grad)


def test_gpt2model_without_a_head_has_the_plan():
    torch.manual_seed(0)
    model = gpt2("D8", kind="GPT2Model", n_head=4, n_embd=32).double().eval()
    want = model(batch(0)).last_hidden_state

    def run():
        mine = copy.deepcopy(model)
        parallelize(mine, Mesh(tp=2), tp_plan="gpt2")
        return mine(batch(0)).last_hidden_state, engine_of(mine).tp_report

    for got, report in run_ranks(run, 2):
        same(got, want)
        assert "sequence parallelism on, plan gpt2\n" in report


# A model of a user's


class Scaled(nn.Module):
    tp_states: ClassVar = {"scale": Replicate()}

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((8,), 1.5))

    def forward(self, x):
        return x * self.scale


class Mixer(nn.Module):
    def __init__(self, hidden=12):
        super().__init__()
        self.up, self.down = nn.Linear(8, hidden), nn.Linear(hidden, 8)
        self.gain = nn.Parameter(torch.rand(hidden))

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)) * self.gain)


class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(67, 8)
        self.drop = nn.Dropout(0.0)
        self.layers = nn.ModuleList(Mixer() for _ in range(2))
        self.norm, self.scaled = nn.LayerNorm(8), Scaled()
        self.head = nn.Linear(8, 67)

    def forward(self, ids):
        x = self.drop(self.words(ids))
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.scaled(self.norm(x)))


PLAN = {
    "words": "vocab",
    "layers.*.up": Column(),
    "layers.*.down": "row",
    "layers.*.gain": Shard(0),
    "head": Head(),
}
TOKENS = {**PLAN, "drop": Enter(), "norm": Leave()}


def mine():
    torch.manual_seed(0)
    return Mine().double()


@covering(1, (("plan", "tokens"), [(PLAN, None), (TOKENS, None), (TOKENS, False)]), ("tp", [2, 4]))
def test_a_users_own_model(plan, tokens, tp):
    ranks = run_ranks(split_run, tp, mine(), tp, 0, tokens, plan)
    compare(ranks, 1, one_process(mine()))


@pytest.mark.parametrize("plan", [PLAN, TOKENS])
def test_a_model_on_the_meta_device(plan):
    whole, want = mine().state_dict(), mine()(batch(0)).detach()

    def run():
        with torch.device("meta"):
            model = Mine().double()
        parallelize(
            model,
            Mesh(tp=2),
            tp_plan=plan,
            zero_stage=2,
            materialize=lambda name, tensor: tensor.copy_(whole[name]),
        )
        return model(batch(0)).detach()

    for got in run_ranks(run, 2):
        same(got, want)


def compiled(model, plan):
    torch.set_num_threads(1)
    model = copy.deepcopy(model)
    parallelize(model, Mesh(tp=2), tp_plan=plan)
    called = torch.compile(model, backend="aot_eager", fullgraph=True)
    F.cross_entropy(called(batch(0)).flatten(0, 1), batch(0).flip(1).flatten()).backward()
    grads = {id(p): grad.clone() for p, grad in engine_of(model).grads()}
    return [grads[id(p)] for p in model.parameters()]


@pytest.mark.slow
def test_a_compiled_model():
    model = mine()
    F.cross_entropy(model(batch(0)).flatten(0, 1), batch(0).flip(1).flatten()).backward()
    for grads in run_ranks(compiled, 2, mine(), TOKENS, backend="gloo", timeout_s=300):
        for got, p in zip(grads, model.parameters()):
            same(got, p.grad)
