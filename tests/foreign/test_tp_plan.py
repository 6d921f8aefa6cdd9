"""Plans: foreign models split by patterns on their modules' names equal one process; patched GPT-2
whose sequences ranks of cp share out, too."""

import copy
import functools
import threading
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from cells import covering, slow, sweep
from foreign_models import gpt2, logits_of
from foreign_models import nano as nano_of
from torch import nn

import fastpar
from fastpar import AdamW, Mesh, engine_of, parallelize
from fastpar.foreign.tp_plan import GPT2, Column, Divide, Enter, Head, Leave
from fastpar.settings.parallel import Parallel
from fastpar.sharding import Partial, Replicate, Shard
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


def checkpointed(model):
    if hasattr(model, "checkpointing"):
        model.checkpointing = False  # use_reentrant
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False})
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
    "nanoGPT 5": lambda: patched(nano(5)),
    # Positions for 13 tokens: with cp some ranks pad the rows.
    "short": lambda: patched(hf(n_positions=13)),
    "short eager": lambda: patched(hf(n_positions=13, attn="eager")),
    "transformers checkpointed": lambda: checkpointed(hf()),
    "nanoGPT checkpointed": lambda: checkpointed(patched(nano())),
    "short checkpointed": lambda: checkpointed(patched(hf(n_positions=13))),
}


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


def same(got, want):
    assert got.shape == want.shape
    assert (got - want).abs().max() <= 1e-12 * want.abs().max().clamp_min(1.0)


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


def of_tp(name, dp, tp, stage):
    """Cells with and without sequence parallelism."""
    mesh = {"dp": dp, "tp": tp}
    return [(name, mesh, {"zero_stage": stage, "sequence_parallel": on}) for on in (False, True)]


def of_cp(mesh, method, stage, name="short"):
    return name, mesh, {"zero_stage": stage, "cp_method": method}


HEADS_AND_KEYS = ("heads", "keys")
CELLS = [
    *of_tp("nanoGPT", 1, 4, 0), *of_tp("transformers patched", 2, 2, 3),
    *of_tp("transformers 5", 1, 2, 0), of_cp({"cp": 2}, "heads", 3), of_cp({"cp": 2}, "keys", 0),
    of_cp({"cp": 2, "tp": 2}, "keys", 2), of_tp("transformers checkpointed", 1, 2, 0)[0],
    of_tp("nanoGPT checkpointed", 1, 2, 0)[1],
    *(of_cp({"cp": 2}, method, 0, "short checkpointed") for method in HEADS_AND_KEYS),
]  # fmt: skip
SLOW = [
    *of_tp("transformers patched 5", 2, 2, 3), *of_tp("transformers 5", 1, 4, 1),
    *of_tp("nanoGPT 5", 2, 4, 2),
    *(cell for name in [*MODELS][:5] if name != "nanoGPT" for cell in of_tp(name, 1, 4, 0)),
    *(cell for stage in range(4) for cell in of_tp("transformers", 2, 2, stage)),
    *(cell for stage in range(4) for cell in of_tp("nanoGPT", 2, 2, stage)),
    of_tp("transformers checkpointed", 1, 2, 0)[1], of_tp("nanoGPT checkpointed", 1, 2, 0)[0],
    of_cp({"cp": 2}, "keys", 0, "short eager"),
    *(of_cp({"cp": cp}, method, 0) for cp in (3, 4) for method in HEADS_AND_KEYS),
    *(of_cp({"cp": 2}, method, stage) for method in HEADS_AND_KEYS for stage in (1, 2)),
    of_cp({"dp": 2, "cp": 2}, "heads", 1), of_cp({"dp": 2, "cp": 2}, "keys", 3),
    of_cp({"cp": 2, "tp": 2}, "heads", 0), of_cp({"cp": 5}, "keys", 0),
]  # fmt: skip


@pytest.mark.filterwarnings("error:fastpar.patch")  # no call falls back
@pytest.mark.parametrize(("name", "mesh", "options"), [*CELLS, *(slow(*cell) for cell in SLOW)])
def test_a_ready_plan_equals_one_process(name, mesh, options):
    model, reference = model_and_reference(name)
    run = functools.partial(split_run, model, mesh, **options)
    ranks = run_ranks(run, torch.Size(mesh.values()).numel())
    compare(ranks, mesh.get("dp", 1), reference)
    if "cp" not in mesh:
        where = "on" if options["sequence_parallel"] else "off"
        plan = "gpt2" if name.startswith("transformers") else "nanogpt"
        words = f"sequence parallelism {where}, plan {plan}, chosen for its modules"
        assert f"tp={mesh['tp']}, {words}" in ranks[0][3]


# Dropout draws from torch's default generator, which threads share: processes.
TOKENS_OR_NOT = ("tp", "sequence_parallel", (False, True))
DROPPED = [
    (lambda: hf(embd_pdrop=0.25, resid_pdrop=0.25), *TOKENS_OR_NOT),
    (lambda: patched(hf(dropout=0.25)), *TOKENS_OR_NOT),
    (lambda: patched(nano(dropout=0.25)), *TOKENS_OR_NOT),
    (lambda: patched(hf(n_positions=13, dropout=0.25)), "cp", "cp_method", HEADS_AND_KEYS),
]


def dropped(ranks):
    results = []
    for make, axis, option, values in DROPPED:
        for value in values:
            torch.manual_seed(0)
            results.append(split_run(make(), {axis: ranks}, **{option: value}))
    return results


@pytest.mark.slow
def test_the_same_masks_as_one_process():
    (once,) = run_ranks(dropped, 1, 1, backend="gloo", timeout_s=300)
    ranks = run_ranks(dropped, 2, 2, backend="gloo", timeout_s=300)
    for of_once, *of_ranks in zip(once, *ranks, strict=True):
        compare(of_ranks, 1, of_once[1:3])


def test_ranks_that_would_draw_other_masks_are_refused(monkeypatch):
    """Ranks are threads here, which share a generator: one sees another state."""
    state, seeds = torch.get_rng_state, threading.local()
    monkeypatch.setattr(torch, "get_rng_state", lambda: state() + getattr(seeds, "other", 0))
    models = {"tp": hf(embd_pdrop=0.1), "cp": patched(hf(n_positions=13, dropout=0.1))}

    def run(axis, other):
        seeds.other = other * torch.distributed.get_rank()
        parallelize(copy.deepcopy(models[axis]), Mesh(**{axis: 2}))

    for axis in models:
        run_ranks(run, 2, axis, 0)
        message = rf"2 ranks of {axis} to have the same torch generator .*; call torch\.manual_seed"
        with pytest.raises(ValueError, match=message):
            run_ranks(run, 2, axis, 1)


@sweep("name", ["transformers", "transformers patched"])
def test_generate(name):
    model, _ = model_and_reference(name)

    def generated(tp, tokens):
        mine = copy.deepcopy(model).eval()
        parallelize(mine, Mesh(tp=tp), Parallel.of(sequence_parallel=tokens))
        return mine.generate(batch(0)[:, :5], max_new_tokens=8, do_sample=False, pad_token_id=0)

    (want,) = run_ranks(generated, 1, 1, False)
    for got in run_ranks(generated, 2, 2, False):
        assert torch.equal(got, want)
    message = "the sequence length under sequence parallelism, got tp=2 T=5; pad the sequences, or"
    with pytest.raises(ValueError, match=message):
        run_ranks(generated, 2, 2, True)


@pytest.mark.filterwarnings("ignore:fastpar.patch")
@sweep(("tp", "tokens"), [(2, False), (4, True)])
def test_a_fused_loss_never_joins_logits(tp, tokens):
    """Nor of sequences that are cut, where the fused loss is that of one process."""
    torch.manual_seed(0)
    model, ids = patched(hf(), fused_loss=True), batch(0)
    once = copy.deepcopy(model)
    want, _ = loss_of(once, ids)
    want.backward()

    def run(mesh, labels):
        mine = parallelize(copy.deepcopy(model), mesh, Parallel.of(sequence_parallel=tokens))
        output = mine(ids, labels=labels)
        output.loss.backward()
        assert output.logits is None
        return output.loss.detach(), grads_of(mine)

    for loss, grads in run_ranks(lambda: run(Mesh(tp=tp), ids), tp):
        same(loss, want.detach())
        for grad, want_grad in zip(grads, grads_of(once), strict=True):
            same(grad, want_grad)
    tokens, model = None, model.float()
    want = model(ids, labels=labels_of(ids)).loss.item()
    for loss, _ in run_ranks(lambda: run(Mesh(cp=2), labels_of(ids)), 2):
        assert loss.item() == pytest.approx(want, rel=1e-6)


# The library's own loss, of sequences that are cut. It computes in fp32; here in fp64.
def in_fp64(logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100,
            shift_labels=None, **_):  # fmt: skip
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    kind = "mean" if num_items_in_batch is None else "sum"
    loss = F.cross_entropy(
        logits.flatten(0, 1), shift_labels.flatten(), ignore_index=ignore_index, reduction=kind
    )
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def labels_of(ids, ignored=-100):
    labels = ids.clone()
    labels[0, 2:9] = ignored  # all targets of a rank's part of this row
    return labels


NOTHING = {"use_cache": False, "past_key_values": None, "logits_to_keep": 0}
SOME = [
    *(("heads", {}), ("keys", {"num_items_in_batch": 7, **NOTHING})),
    *(("heads", {"ignore_index": 0}), ("keys", {"num_items_in_batch": 0})),
]


@sweep(("method", "more"), SOME)
def test_the_loss_of_labels(method, more):
    """Shifted before they are cut; divided by the targets of all ranks."""
    base, _ = model_and_reference("short")
    ids = batch(0)
    labels = labels_of(ids, more.get("ignore_index", -100))

    def run(cp):
        model = copy.deepcopy(base)
        if cp > 1:
            parallelize(model, Mesh(cp=cp), Parallel.of(cp_method=method))
        model.loss_function = in_fp64
        found = model(ids, labels=labels, **more)
        found.loss.backward()
        assert cp == 1 or found.logits is None
        grads = grads_of(model)
        model.eval()
        with torch.no_grad():
            return [found.loss.detach(), *grads, model(ids, labels=labels).logits]

    expected = run(1)
    for found in run_ranks(run, 2, 2):
        for got, want in zip(found, expected, strict=True):
            torch.testing.assert_close(got, want, rtol=0.0, atol=1e-12, equal_nan=True)


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
    "words": "vocab", "layers.*.up": Column(), "layers.*.down": "row", "layers.*.gain": Shard(0),
    "head": Head(),
}  # fmt: skip
TOKENS = {**PLAN, "drop": Enter(), "norm": Leave()}


def mine():
    torch.manual_seed(0)
    return Mine().double()


@covering(1, (("plan", "tokens"), [(PLAN, None), (TOKENS, None), (TOKENS, False)]), ("tp", [2, 4]))
def test_a_users_own_model(plan, tokens, tp):
    run = functools.partial(split_run, mine(), {"tp": tp}, plan, sequence_parallel=tokens)
    compare(run_ranks(run, tp), 1, one_process(mine()))


def llama():
    """Four heads of queries, two of keys."""
    transformers = pytest.importorskip("transformers", reason="pip install -e '.[dev]'")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 67}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).double()


LLAMA = {
    **dict.fromkeys(("*.[qkv]_proj", "*.gate_proj", "*.up_proj"), "column"),
    **{"*.o_proj": "row", "*.down_proj": "row", "*.embed_tokens": "vocab", "lm_head": "head"},
}


@sweep("patch", [False, True])
def test_a_plan_for_grouped_heads(patch):
    """Each rank has whole heads of queries and of keys."""
    model = patched(llama()) if patch else llama()
    run = functools.partial(split_run, model, {"tp": 2}, LLAMA)
    compare(run_ranks(run, 2), 1, one_process(llama()))


@sweep("plan", [PLAN, TOKENS])
def test_a_model_on_the_meta_device(plan):
    whole, want = mine().state_dict(), mine()(batch(0)).detach()

    def run():
        with torch.device("meta"):
            model = Mine().double()
        made = {"materialize": lambda name, tensor: tensor.copy_(whole[name])}
        parallelize(model, Mesh(tp=2), tp_plan=plan, zero_stage=2, **made)
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


# Plans and models that do not fit are refused, and left as they were
def without(plan, name):
    return {pattern: style for pattern, style in plan.items() if pattern != name}


def heads(divided):
    return {**GPT2, "*.attn": Divide("num_heads", "split_size", heads=divided)}


def tied():
    model = mine()
    model.head.weight = model.words.weight
    return model


def own_gpt():
    config = fastpar.GPTConfig(n_layer=1, n_head=2, n_embd=8, block_size=8, vocab_size=67)
    return fastpar.GPT(config)


def named_like_gpt2():
    """Names of GPT-2 alone do not say how c_attn is made up."""
    model = nano()
    for layer in model.transformer.h:
        layer.attn.num_heads = layer.attn.split_size = layer.attn.n_head
        layer.attn.n_head = None
    return model


def dropout_of_a_number():
    model = mine()
    model.layers[1].dropout_p = 0.1
    return model


UPP = r"to match a module, got 'layers\.\*\.upp', which matches nothing; similar: layers\.\d\.up, "
STYLE = r"a style of tp_plan, got .* for 'head'; use column, row, vocab, head, tokens, enter, leave"
DIVIDE = r"expected tp to divide num_heads of 'transformer\.h\.0\.attn', got tp={} num_heads=4; ch"
DROPOUT = r"no dropout by torch next to split layers, got '{}', .* set it to 0, or name it in tp_p"
# plan, model, words, mesh or options other than tp=2
REFUSED = [
    ({"layers.*.upp": "column"}, mine, UPP),
    ({"layers.*.upp": "column"}, mine, UPP, {"tp": 1}),
    ({"#": "column"}, mine, r"got '#', which matches nothing; see model\.named_modules\(\)"),
    ({"layers.*.up": "column", "layers.0.*": "row"}, mine, r"one pattern of .*0\.\*'; make one"),
    ({"head": "colunm"}, mine, STYLE),
    ({"head": Column}, mine, STYLE),
    ({"norm": "column"}, mine, r"nn\.Linear .* got norm=LayerNorm; remove it from tp_plan, or use"),
    (without(PLAN, "layers.*.gain"), mine, r"got none for 'layers\.0\.gain' next .*: Shard, Repl"),
    (without(TOKENS, "head"), mine, r"no pattern for 'head\.weight'; add Tokens\(\) for its modu"),
    (PLAN, mine, "needs a tp_plan with Enter, Tokens and Leave; add", {"sequence_parallel": True}),
    ({**PLAN, "scaled.scale": Partial()}, mine, r"'scaled\.scale' has two states, Replicate\(\) a"),
    (without(PLAN, "head"), tied, r"'head\.weight', which is tied to one; name 'head' too, as He"),
    (heads("num_heads"), hf, DIVIDE.format(8), {"tp": 8}),
    (heads(None), hf, DIVIDE.format(3), {"tp": 3}),
    (None, named_like_gpt2, "has no declared state with tp=2; name"),
    ({"wte": "vocab"}, own_gpt, r"which declares its own states, got tp_plan=\{wte\}; drop tp_"),
    (LLAMA, llama, r"heads of 'model\.layers\.0\..*k_proj', got tp=4 heads=2; ch", {"tp": 4}),
    (None, nano, r"'transformer\.h\.0\.attn' to be patched, .*; run fastpar\.patch\(model\) first"),
    ({"*.c_attn": "column"}, hf, r"groups for the fused projection .*; write Column\(groups=3\)"),
    (None, lambda: hf(attn_pdrop=0.1), DROPOUT.format(r"transformer\.h\.0\.attn\.attn_dropout")),
    (PLAN, dropout_of_a_number, DROPOUT.format(r"layers\.1\.dropout_p")),
    (None, lambda: patched(nano()), "or a patched GPT-2 .* got NanoGPT; load its weigh", {"cp": 2}),
    (None, hf, r"patch\(model\) before cp=2, .* with its own transformer; call pa", {"cp": 2}),
    (
        None, lambda: patched(hf(n_positions=13, dropout=0.1)),
        "no dropout .* with cp=2 and tp=2, got rates of 0.1; set", {"cp": 2, "tp": 2},
    ),
]  # fmt: skip


@sweep("row", REFUSED)
def test_what_is_refused(row):
    """A refused plan leaves the model as it was."""
    plan, make, message, *more = row
    options = dict(*more)
    mesh = {axis: options.pop(axis) for axis in ("tp", "cp") if axis in options} or {"tp": 2}
    model = make()

    def run():
        target = copy.deepcopy(model)
        before = {name: type(module) for name, module in target.named_modules()}
        of_all = Mesh(**mesh)
        torch.distributed.barrier()  # a rank that fails wakes those that still make groups
        try:
            parallelize(target, of_all, Parallel.of(**options), tp_plan=plan)
        finally:
            assert before == {name: type(module) for name, module in target.named_modules()}

    with pytest.raises(ValueError, match=message):
        run_ranks(run, torch.Size(mesh.values()).numel())


def test_a_call_that_falls_back_with_dropout_is_refused():
    with pytest.raises(ValueError, match="heads to be one of num_heads, got heads=n_head; add it"):
        Divide("num_heads", heads="n_head")
    torch.manual_seed(0)
    model = patched(hf(attn_pdrop=0.1))

    def run():
        mine = copy.deepcopy(model)
        parallelize(mine, Mesh(tp=2))
        mask = torch.ones(4, T, dtype=torch.int64)
        mask[0, 0] = 0
        mine(batch(0), attention_mask=mask)

    message = r"without fallback while split attention has dropout, got attention_mask; see fastpar"
    with pytest.raises(ValueError, match=message):
        run_ranks(run, 2)


def calls_of_shared_sequences():
    model, ids = parallelize(patched(hf(n_positions=13)), Mesh(cp=2)), batch(0)
    for more, message in [
        ({"attention_mask": torch.ones_like(ids)}, "only arguments .*, got attention_mask; drop"),
        ({"use_cache": True}, "only arguments .*, got use_cache; drop it; to generate"),
        ({"input_ids": ids.repeat(1, 2)}, r"T <= n_positions=13 with cp=2, got .*\[4, 24\]; crop"),
    ]:
        with pytest.raises(ValueError, match="GPT2LMHeadModel: expected .*" + message):
            model(**{"input_ids": ids, **more})
    model.loss_function = lambda logits, labels: None
    message = r"loss_function with shift_labels .* got one with logits, lab"
    with pytest.raises(ValueError, match=message):
        model(ids, labels=ids)
    model.transformer.h[0].attn.reorder_and_upcast_attn = True
    message = r"Attention: expected a call .* with cp=2, .*got reorder_"
    with pytest.raises(ValueError, match=message):
        logits_of(model, ids)


def test_calls_of_shared_sequences_are_refused():
    run_ranks(calls_of_shared_sequences, 2)
