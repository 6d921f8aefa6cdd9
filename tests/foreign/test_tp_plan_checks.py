"""Plans and models that do not fit are refused, and left as they were."""

import copy

import pytest
import torch
from foreign_models import gpt2, logits_of
from nanogpt_cells import NanoGPT
from test_tp_plan import PLAN, TOKENS, T, batch, hf, mine, nano, patched

import fastpar
from fastpar import Mesh, Partial, parallelize
from fastpar.foreign.tp_plan import GPT2, Column, Divide, Row, Tokens, Vocab
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks


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


def fused_nano():
    return patched(NanoGPT(n_embd=32, n_head=4))


STYLE = (
    r"expected a style of tp_plan, got .* for 'head'; use column, row, vocab, head, tokens, "
    r"enter, leave, replicate, partial, or Column\(groups=\.\.\.\), "
)
DROPOUT = (
    r"expected no dropout that torch draws beside split layers, got it in '{}', the same mask "
    r"for other features on every rank; run fastpar\.patch\(model\) first \(attention\), set "
    r"it to 0, or name it in tp_plan as Tokens\(\)"
)
DIVIDE = (
    r"expected tp to divide num_heads of 'transformer\.h\.0\.attn', got tp={} num_heads=4; choose "
    r"another tp"
)
UPP = (
    r"expected every pattern of tp_plan to name a module, got 'layers\.\*\.upp', which names "
    r"nothing; close to it: layers\.\d\.up, "
)
# plan, model, mesh, options, words
REFUSED = {
    "a pattern of nothing": ({"layers.*.upp": "column"}, mine, {"tp": 2}, {}, UPP),
    "a pattern of nothing, tp=1": ({"layers.*.upp": "column"}, mine, {"tp": 1}, {}, UPP),
    "a pattern that is none": (
        {"#": "column"}, mine, {"tp": 2}, {},
        r"got '#', which names nothing; see model\.named_modules\(\)",
    ),
    "twice": (
        {"layers.*.up": "column", "layers.0.*": "row"}, mine, {"tp": 2}, {},
        r"expected one pattern of tp_plan for 'layers\.0\.up', got 'layers\.\*\.up' and "
        r"'layers\.0\.\*'; make one of them narrower",
    ),
    **{
        f"style {style}": ({"head": style}, mine, {"tp": 2}, {}, STYLE)
        for style in ("colunm", 3, None, Column)
    },
    "an unknown plan": (
        "gpt3", mine, {"tp": 2}, {},
        r"expected tp_plan as a mapping or one of gpt2, nanogpt, got tp_plan=gpt3; pass \{pattern",
    ),
    "another class": (
        {"norm": "column"}, mine, {"tp": 2}, {},
        r"expected nn\.Linear to make a ColumnParallelLinear of, got norm=LayerNorm; leave it out "
        r"of tp_plan, or put the plain layer there",
    ),
    "no state": (
        without(PLAN, "layers.*.gain"), mine, {"tp": 2}, {},
        r"expected a declared state for every parameter beside split layers, got none for "
        r"'layers\.0\.gain' beside 'layers\.0\.up'; name it in tp_plan: Shard, Replicate \(its",
    ),
    "no state of tokens": (
        without(TOKENS, "head"), mine, {"tp": 2}, {},
        r"expected tp_plan to name every parameter under sequence parallelism, got none of its "
        r"patterns for 'head\.weight'; add Tokens\(\) for its module if it works on a rank's "
        r"tokens, Replicate\(\) if on all, or pass sequence_parallel=False",
    ),
    "no place for tokens": (
        PLAN, mine, {"tp": 2}, {"sequence_parallel": True},
        r"expected a tp_plan with Enter, Tokens and Leave for sequence_parallel=True, got none of "
        r"them; add them, or leave sequence_parallel out",
    ),
    "two states": (
        {**PLAN, "scaled.scale": Partial()}, mine, {"tp": 2}, {},
        r"expected one state for parameter 'scaled\.scale', got Replicate\(\) and Partial\(\); "
        r"declare it once",
    ),
    "tied": (
        without(PLAN, "head"), tied, {"tp": 2}, {},
        r"expected every use of a split parameter in tp_plan, got 'head\.weight', which is tied to "
        r"one; name 'head' too, as Head\(\) or Vocab\(\)",
    ),
    "more than heads": (heads("num_heads"), hf, {"tp": 8}, {}, DIVIDE.format(8)),
    "heads not said": (heads(None), hf, {"tp": 3}, {}, DIVIDE.format(3)),
    "features": (
        PLAN, mine, {"tp": 8}, {},
        r"expected tp=8 to split parameter 'layers\.0\.gain' of shape \[12\] as Shard\(.*dimension "
        r"0 of size 12 does not divide by 8; choose another tp",
    ),
    "nothing said": (
        None, mine, {"tp": 2}, {},
        r"expected a declared state for every parameter with tp=2, got none for 'words\.weight'; "
        r"name it in tp_plan",
    ),
    "a model that declares itself": (
        {"wte": "vocab"}, own_gpt, {"tp": 2}, {},
        r"expected no tp_plan for GPT, which declares its own states, got tp_plan=\{wte\}; leave it"
        r" out",
    ),
    "nanoGPT as it is": (
        None, nano, {"tp": 2}, {},
        r"expected 'transformer\.h\.0\.attn' to be patched, got SelfAttention, whose own forward "
        r"takes the number of features from its input; run fastpar\.patch\(model\) first",
    ),
    "no groups": (
        {"*.c_attn": "column"}, hf, {"tp": 2}, {},
        r"expected groups of the fused projection 'transformer\.h\.0\.attn\.c_attn', got Column\(\)"
        r" of one, which would mix queries, keys and values; write Column\(groups=3\)",
    ),
    "named like GPT-2": (
        None, named_like_gpt2, {"tp": 2}, {},
        r"expected a declared state for every parameter with tp=2, got none for",
    ),
    "dropout": (
        None, lambda: hf(attn_pdrop=0.1), {"tp": 2}, {},
        DROPOUT.format(r"transformer\.h\.0\.attn\.attn_dropout"),
    ),
    "dropout, a number": (
        PLAN, dropout_of_a_number, {"tp": 2}, {}, DROPOUT.format(r"layers\.1\.dropout_p"),
    ),
    "cp of nanoGPT": (
        None, fused_nano, {"cp": 2}, {},
        r"for cp=2, or a patched GPT-2 .* positions .* got NanoGPT; load its weigh",
    ),
    "cp before the patch": (
        None, lambda: gpt2("D8", n_head=4, n_embd=32), {"cp": 2}, {},
        r"patch\(model\) before cp=2, .* with its own transformer; call it",
    ),
    "dropout of cp and tp": (
        None, lambda: patched(hf(n_positions=13, dropout=0.1)), {"cp": 2, "tp": 2}, {},
        "no dropout .* with cp=2 and tp=2, got rates of 0.1; set",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    plan, make, mesh, options, message = REFUSED[case]
    model = make()

    def run():
        target = copy.deepcopy(model)
        before = {name: type(module) for name, module in target.named_modules()}
        try:
            parallelize(target, Mesh(**mesh), Parallel.of(**options), tp_plan=plan)
        finally:
            after = {name: type(module) for name, module in target.named_modules()}
            assert before == after, "a refused plan leaves the model as it was"

    with pytest.raises(ValueError, match=message):
        run_ranks(run, torch.Size(mesh.values()).numel())


def test_a_count_of_heads_that_is_not_divided():
    with pytest.raises(ValueError, match="heads to be one of num_heads, got heads=n_head; name it"):
        Divide("num_heads", heads="n_head")


def test_a_call_that_falls_back_with_dropout_is_refused():
    torch.manual_seed(0)
    model = patched(hf(attn_pdrop=0.1))

    def run():
        mine = copy.deepcopy(model)
        parallelize(mine, Mesh(tp=2))
        mask = torch.ones(4, T, dtype=torch.int64)
        mask[0, 0] = 0
        mine(batch(0), attention_mask=mask)

    message = (
        r"GPT2Attention: expected a call that needs no fallback while dropout is on in split "
        r"attention, got attention_mask; see fastpar\.patch's report"
    )
    with pytest.raises(ValueError, match=message):
        run_ranks(run, 2)


def calls_of_shared_sequences():
    model, ids = parallelize(patched(hf(n_positions=13)), Mesh(cp=2)), batch(0)
    for more, message in [
        ({"attention_mask": torch.ones_like(ids)}, "no argument but .*, got attention_mask; leave"),
        ({"use_cache": True}, "no argument but .*, got use_cache; leave it out, generate and"),
        ({"input_ids": ids.repeat(1, 2)}, r"T <= n_positions=13 with cp=2, got .*\[4, 24\]; crop"),
    ]:
        with pytest.raises(ValueError, match="GPT2LMHeadModel: expected .*" + message):
            model(**{"input_ids": ids, **more})
    model.loss_function = lambda logits, labels: None
    message = r"loss_function of shift_labels .* got one of logits, lab"
    with pytest.raises(ValueError, match=message):
        model(ids, labels=ids)
    model.transformer.h[0].attn.reorder_and_upcast_attn = True
    message = r"Attention: expected a call .* with cp=2, .*got reorder_"
    with pytest.raises(ValueError, match=message):
        logits_of(model, ids)


def test_calls_of_shared_sequences_are_refused():
    run_ranks(calls_of_shared_sequences, 2)


def test_styles_are_what_the_ready_plan_says():
    assert GPT2["*.attn.c_attn"] == Column(groups=3)
    assert GPT2["*.attn"] == Divide("num_heads", "split_size", heads="num_heads")
    assert GPT2["*wte"] == Vocab()
    assert GPT2["*.ln_1"] == Tokens()
    assert GPT2["*.mlp.c_proj"] == Row()
