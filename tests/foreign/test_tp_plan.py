"""Plans: foreign models split by patterns on their modules' names equal one process; patched GPT-2
whose sequences ranks of cp share out, too."""

import copy
import functools
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from cells import covering, slow
from foreign_models import gpt2, logits_of
from foreign_models import nano as nano_of
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
    return nano_of(n_embd=8 * heads, n_head=heads, **options).double()


def patched(model, **options):
    fastpar.patch(model, **options)
    return model


MODELS = {
    "transformers": hf,
    "transformers eager": functools.partial(hf, attn="eager"),
    "transformers patched": lambda: patched(hf()),
    "nanoGPT": lambda: patched(nano()),
    "nanoGPT without bias": lambda: patched(nano(bias=False)),
    # Five heads, which tp pads.
    "transformers 5": lambda: hf(5),
    "transformers patched 5": lambda: patched(hf(5)),
    "nanoGPT 5": lambda: nano(5),
    # Positions for 13 tokens: with cp some ranks pad the rows.
    "short": lambda: patched(hf(n_positions=13)),
    "short eager": lambda: patched(hf(n_positions=13, attn="eager")),
}
THOROUGH = ("transformers", "transformers patched", "nanoGPT")


def batch(step, rank=0, ranks=1):
    ids = torch.randint(67, (4, T), generator=torch.Generator().manual_seed(step))
    return ids.chunk(ranks)[rank]


def loss_of(model, ids):
    logits = logits_of(model, ids)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()), logits.detach()


def grads_of(model):
    """The whole gradients, in the order of parameters."""
    if not hasattr(next(model.parameters()), "_fastpar_engine"):
        return [p.grad.clone() for p in model.parameters()]
    whole = {id(p): grad.clone() for p, grad in engine_of(model).grads()}
    return [whole[id(p)] for p in model.parameters()]


def train(model, optimizer, *where):
    """(loss, logits, gradients) of every step."""
    seen = []
    for step in range(STEPS):
        loss, logits = loss_of(model, batch(step, *where))
        loss.backward()
        seen.append((loss.item(), logits, grads_of(model)))
        optimizer.step()
        optimizer.zero_grad()
    return seen


ADAMW = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.01}  # eps hides that a key's bias has no
# gradient but rounding


def one_process(model):
    """By torch alone."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    return train(model, optimizer), model.state_dict()


def split_run(model, mesh, plan=None, **options):
    torch.set_num_threads(1)
    mesh, model = Mesh(**mesh), copy.deepcopy(model)
    parallelize(model, mesh, Parallel.of(**options), tp_plan=plan)
    seen = train(model, AdamW(model.parameters(), **ADAMW), mesh.dp_rank, mesh.dp_size)
    return mesh.dp_rank, seen, model.state_dict(), engine_of(model).tp_report


def same(got, want, bound=1e-12):
    assert got.shape == want.shape
    assert (got - want).abs().max() <= bound * want.abs().max().clamp_min(1.0)


def compare(ranks, dp, reference):
    seen_once, whole = reference
    for dp_rank, seen, state, _ in ranks:
        for (_, logits, grads), (_, want_logits, want_grads) in zip(seen, seen_once):
            same(logits, want_logits.chunk(dp)[dp_rank])
            for grad, want in zip(grads, want_grads, strict=True):
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
        *(slow(name, 1, 4, 0) for name in [*MODELS][:5] if name != "nanoGPT"),
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
    run = functools.partial(split_run, model, {"tp": tp}, sequence_parallel=tokens)
    ranks = run_ranks(functools.partial(run, zero_stage=stage), dp * tp)
    compare(ranks, dp, reference)
    where = "on" if tokens else "off"
    plan = "gpt2" if name.startswith("transformers") else "nanogpt"
    chosen = f"tp={tp}, sequence parallelism {where}, plan {plan}, chosen for its modules"
    assert chosen in ranks[0][3]


@pytest.mark.filterwarnings("error:fastpar.patch")  # no call falls back
@pytest.mark.parametrize(
    ("name", "mesh", "method", "stage"),
    [
        ("short", {"cp": 2}, "heads", 3),
        ("short", {"cp": 2}, "keys", 0),
        ("short", {"cp": 2, "tp": 2}, "keys", 2),
        slow("short eager", {"cp": 2}, "keys", 0),
        *(slow("short", {"cp": cp}, m, 0) for cp in (3, 4) for m in ("heads", "keys")),
        *(slow("short", {"cp": 2}, m, stage) for m in ("heads", "keys") for stage in (1, 2)),
        slow("short", {"cp": 2, "dp": 2}, "heads", 1),
        slow("short", {"cp": 2, "dp": 2}, "keys", 3),
        slow("short", {"cp": 2, "tp": 2}, "heads", 0),
        slow("short", {"cp": 5}, "keys", 0),
    ],
)
def test_shared_sequences_equal_one_process(name, mesh, method, stage):
    """12 tokens: of these cp some pad the rows."""
    model, reference = model_and_reference(name)
    run = functools.partial(split_run, model, mesh, zero_stage=stage, cp_method=method)
    found = run_ranks(run, torch.Size(mesh.values()).numel())
    compare(found, mesh.get("dp", 1), reference)


def checkpointed(name):
    torch.manual_seed(0)
    model = MODELS[name]()
    if name == "nanoGPT":
        model.checkpointing = False
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


@pytest.mark.parametrize(
    ("name", "mesh", "options"),
    [
        ("transformers", {"tp": 2}, {"sequence_parallel": False}),
        ("nanoGPT", {"tp": 2}, {"sequence_parallel": True}),
        ("short", {"cp": 2}, {"cp_method": "heads"}),
        ("short", {"cp": 2}, {"cp_method": "keys"}),
        slow("transformers", {"tp": 2}, {"sequence_parallel": True}),
        slow("nanoGPT", {"tp": 2}, {"sequence_parallel": False}),
    ],
)
def test_activation_checkpointing(name, mesh, options):
    model = checkpointed(name)
    run = functools.partial(split_run, model, mesh, **options)
    compare(run_ranks(run, 2), 1, one_process(model))


# Dropout draws from torch's default generator, which threads share: processes.


RATES = {"attn_pdrop": 0.0, "embd_pdrop": 0.25, "resid_pdrop": 0.25}
TOKENS_OR_NOT = ({"sequence_parallel": False}, {"sequence_parallel": True})
DROPPED = {
    "transformers": (lambda: hf(**RATES), "tp", TOKENS_OR_NOT),
    "transformers patched": (lambda: patched(hf(dropout=0.25)), "tp", TOKENS_OR_NOT),
    "nanoGPT patched": (lambda: patched(nano(dropout=0.25)), "tp", TOKENS_OR_NOT),
    "short": (
        lambda: patched(hf(n_positions=13, dropout=0.25)), "cp",
        ({"cp_method": "heads"}, {"cp_method": "keys"}),
    ),
}  # fmt: skip


def dropped(ranks):
    torch.set_num_threads(1)
    results = {}
    for name, (make, axis, modes) in DROPPED.items():
        for i, options in enumerate(modes if ranks > 1 else modes[:1]):
            torch.manual_seed(0)
            results[name, i] = split_run(make(), {axis: ranks}, **options)
    return results


def with_other_seeds():
    """They are refused: ranks would draw other masks."""
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
    torch.manual_seed(mesh.rank)
    model = patched(hf(n_positions=13, dropout=0.1))
    torch.manual_seed(mesh.rank)
    with pytest.raises(ValueError, match="the 2 ranks of cp to have the same torch generator"):
        parallelize(model, Mesh(cp=2))
    torch.manual_seed(0)
    parallelize(hf(embd_pdrop=0.1), mesh)
    return True


def masks_and_seeds(ranks):
    return dropped(ranks), ranks == 1 or with_other_seeds()


@pytest.mark.slow
def test_the_same_masks_as_one_process():
    ((once, _),) = run_ranks(masks_and_seeds, 1, 1, backend="gloo", timeout_s=300)
    ranks = run_ranks(masks_and_seeds, 2, 2, backend="gloo", timeout_s=300)
    for name in DROPPED:
        for i in range(2):
            compare([rank[name, i] for rank, _ in ranks], 1, once[name, 0][1:3])


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


@pytest.mark.parametrize("name", ["transformers", "transformers patched"])
def test_generate(name):
    model, _ = model_and_reference(name)

    def generated(tp, tokens):
        mine = copy.deepcopy(model).eval()
        parallelize(mine, Mesh(tp=tp), Parallel.of(sequence_parallel=tokens))
        return mine.generate(batch(0)[:, :5], max_new_tokens=8, do_sample=False, pad_token_id=0)

    (want,) = run_ranks(generated, 1, 1, False)
    for got in run_ranks(generated, 2, 2, False):
        assert torch.equal(got, want)
    message = (
        r"expected tp to divide the length of sequences under sequence parallelism, got tp=2 T=5; "
        r"pad them, or pass sequence_parallel=False"
    )
    with pytest.raises(ValueError, match=message):
        run_ranks(generated, 2, 2, True)


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
        return output.loss.detach(), output.logits, grads_of(mine)

    for loss, logits, grads in run_ranks(run, tp):
        assert logits is None
        same(loss, want.detach())
        for grad, want_grad in zip(grads, grads_of(once), strict=True):
            same(grad, want_grad)


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


# The library's own loss, of sequences that are cut. It computes in fp32; here in fp64.


def in_fp64(logits, labels, vocab_size, num_items_in_batch=None, shift_labels=None, **_):
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=-100)[..., 1:]
    kind = "mean" if num_items_in_batch is None else "sum"
    loss = F.cross_entropy(
        logits.flatten(0, 1), shift_labels.flatten(), ignore_index=-100, reduction=kind
    )
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def labels_of(ids):
    labels = ids.clone()
    labels[0, 2:9] = -100  # all targets of a rank's part of this row
    return labels


@pytest.mark.parametrize("items", [None, 7])
@pytest.mark.parametrize("method", ["heads", "keys"])
def test_the_loss_of_labels(method, items):
    """Shifted before they are cut; divided by the targets of all ranks."""
    base, _ = model_and_reference("short")
    ids, more = batch(0), {} if items is None else {"num_items_in_batch": items}

    def run(cp):
        model = copy.deepcopy(base)
        if cp > 1:
            parallelize(model, Mesh(cp=cp), Parallel.of(cp_method=method))
        model.loss_function = in_fp64
        found = model(ids, labels=labels_of(ids), **more)
        found.loss.backward()
        assert cp == 1 or found.logits is None
        grads = grads_of(model)
        model.eval()
        with torch.no_grad():
            return [found.loss.detach(), *grads, model(ids, labels=labels_of(ids)).logits]

    expected = run(1)
    for found in run_ranks(run, 2, 2):
        for got, want in zip(found, expected, strict=True):
            assert (got - want).abs().max() <= 1e-12


def test_the_fused_loss_of_cut_sequences():
    model = patched(gpt2("D8", n_head=4, n_embd=32), fused_loss=True)
    ids = batch(0)
    want = model(ids, labels=labels_of(ids)).loss.item()

    def rank():
        mine = parallelize(copy.deepcopy(model), Mesh(cp=2))
        return mine(ids, labels=labels_of(ids)).loss.item()

    for found in run_ranks(rank, 2):
        assert found == pytest.approx(want, rel=1e-6)


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
    run = functools.partial(split_run, mine(), {"tp": tp}, plan, sequence_parallel=tokens)
    compare(run_ranks(run, tp), 1, one_process(mine()))


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
    if plan is not None:
        parallelize(model, Mesh(tp=2), tp_plan=plan)
        model = torch.compile(model, backend="aot_eager", fullgraph=True)
    F.cross_entropy(model(batch(0)).flatten(0, 1), batch(0).flip(1).flatten()).backward()
    return grads_of(getattr(model, "_orig_mod", model))


@pytest.mark.slow
def test_a_compiled_model():
    for grads in run_ranks(compiled, 2, mine(), TOKENS, backend="gloo", timeout_s=300):
        for got, want in zip(grads, compiled(mine(), None), strict=True):
            same(got, want)
