"""Plans and models that do not fit are refused, and left as they were."""

import copy

import pytest
import torch
from test_tp_plan import PLAN, TOKENS, T, batch, hf, mine, nano, patched

import fastpar
from fastpar import Mesh, Partial, parallelize
from fastpar.foreign.tp_plan import GPT2, Column, Divide, Row, Tokens, Vocab
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks


def refused(message, plan, model=mine, ranks=2, **options):
    def run():
        target = model()
        before = {name: type(module) for name, module in target.named_modules()}
        try:
            parallelize(target, Mesh(tp=ranks), Parallel.of(**options), tp_plan=plan)
        finally:
            after = {name: type(module) for name, module in target.named_modules()}
            assert before == after, "a refused plan leaves the model as it was"

    with pytest.raises(ValueError, match=message):
        run_ranks(run, ranks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_pattern_that_names_nothing(ranks):
    refused(
        r"expected every pattern of tp_plan to name a module, got 'layers\.\*\.upp', which names "
        r"nothing; close to it: layers\.\d\.up, ",
        {"layers.*.upp": "column"},
        ranks=ranks,
    )
    refused(
        r"got '#', which names nothing; see model\.named_modules\(\)",
        {"#": "column"},
        ranks=ranks,
    )


def test_a_module_that_is_named_twice():
    refused(
        r"expected one pattern of tp_plan for 'layers\.0\.up', got 'layers\.\*\.up' and "
        r"'layers\.0\.\*'; make one of them narrower",
        {"layers.*.up": "column", "layers.0.*": "row"},
    )


@pytest.mark.parametrize("style", ["colunm", 3, None, Column])
def test_an_unknown_style(style):
    refused(
        r"expected a style of tp_plan, got .* for 'head'; use column, row, vocab, head, tokens, "
        r"enter, leave, replicate, partial, or Column\(groups=\.\.\.\), ",
        {"head": style},
    )


def test_an_unknown_plan():
    refused(
        r"expected tp_plan as a mapping or one of gpt2, nanogpt, got tp_plan=gpt3; pass \{pattern",
        "gpt3",
    )


def test_a_layer_of_another_class():
    refused(
        r"expected nn\.Linear to make a ColumnParallelLinear of, got norm=LayerNorm; leave it out "
        r"of tp_plan, or put the plain layer there",
        {"norm": "column"},
    )


def test_a_parameter_beside_split_layers_without_a_state():
    plan = {name: style for name, style in PLAN.items() if name != "layers.*.gain"}
    refused(
        r"expected a declared state for every parameter beside split layers, got none for "
        r"'layers\.0\.gain' beside 'layers\.0\.up'; name it in tp_plan: Shard, Replicate \(its",
        plan,
    )


def test_a_parameter_that_sequence_parallelism_does_not_know():
    plan = {name: style for name, style in TOKENS.items() if name != "head"}
    refused(
        r"expected tp_plan to name every parameter under sequence parallelism, got none of its "
        r"patterns for 'head\.weight'; add Tokens\(\) for its module if it works on a rank's "
        r"tokens, Replicate\(\) if on all, or pass sequence_parallel=False",
        plan,
    )


def test_sequence_parallelism_without_a_place_for_it():
    refused(
        r"expected a tp_plan with Enter, Tokens and Leave for sequence_parallel=True, got none of "
        r"them; add them, or leave sequence_parallel out",
        PLAN,
        sequence_parallel=True,
    )


def test_two_states_for_one_parameter():
    refused(
        r"expected one state for parameter 'scaled\.scale', got Replicate\(\) and Partial\(\); "
        r"declare it once",
        {**PLAN, "scaled.scale": Partial()},
    )


def test_a_tied_weight_whose_other_use_is_not_named():
    def tied():
        model = mine()
        model.head.weight = model.words.weight
        return model

    refused(
        r"expected every use of a split parameter in tp_plan, got 'head\.weight', which is tied to "
        r"one; name 'head' too, as Head\(\) or Vocab\(\)",
        {**{k: v for k, v in PLAN.items() if k != "head"}},
        tied,
    )


@pytest.mark.parametrize(
    ("ranks", "heads"), [(8, "num_heads"), (3, None)], ids=["more than heads", "not said"]
)
def test_heads_that_tp_cannot_split(ranks, heads):
    plan = {**GPT2, "*.attn": Divide("num_heads", "split_size", heads=heads)}
    refused(
        rf"expected tp to divide num_heads of 'transformer\.h\.0\.attn', got tp={ranks} "
        r"num_heads=4; choose another tp",
        plan,
        hf,
        ranks,
    )


def test_a_count_of_heads_that_is_not_divided():
    with pytest.raises(ValueError, match="heads to be one of num_heads, got heads=n_head; name it"):
        Divide("num_heads", heads="n_head")


def test_features_that_tp_does_not_divide():
    refused(
        r"expected tp=8 to split parameter 'layers\.0\.gain' of shape \[12\] as Shard\(.*dimension "
        r"0 of size 12 does not divide by 8; choose another tp",
        PLAN,
        ranks=8,
    )


def test_a_model_that_says_nothing():
    refused(
        r"expected a declared state for every parameter with tp=2, got none for 'words\.weight'; "
        r"name it in tp_plan",
        None,
    )


def test_a_plan_for_a_model_that_declares_itself():
    config = fastpar.GPTConfig(n_layer=1, n_head=2, n_embd=8, block_size=8, vocab_size=67)
    refused(
        r"expected no tp_plan for GPT, which declares its own states, got tp_plan=\{wte\}; leave it"
        r" out",
        {"wte": "vocab"},
        lambda: fastpar.GPT(config),
    )


def test_nanogpt_has_to_be_patched():
    refused(
        r"expected 'transformer\.h\.0\.attn' to be patched, got SelfAttention, whose own forward "
        r"takes the number of features from its input; run fastpar\.patch\(model\) first",
        None,
        nano,
    )


def test_a_fused_projection_without_groups():
    refused(
        r"expected groups of the fused projection 'transformer\.h\.0\.attn\.c_attn', got Column\(\)"
        r" of one, which would mix queries, keys and values; write Column\(groups=3\)",
        {"*.c_attn": "column"},
        hf,
    )


def test_another_models_attention_has_no_ready_plan():
    """Names of GPT-2 alone do not say how c_attn is made up."""

    def other():
        model = nano()
        for layer in model.transformer.h:
            layer.attn.num_heads = layer.attn.split_size = layer.attn.n_head
            layer.attn.n_head = None
        return model

    refused(r"expected a declared state for every parameter with tp=2, got none for", None, other)


def test_dropout_beside_split_layers():
    message = (
        r"expected no dropout that torch draws beside split layers, got it in '{}', the same mask "
        r"for other features on every rank; run fastpar\.patch\(model\) first \(attention\), set "
        r"it to 0, or name it in tp_plan as Tokens\(\)"
    )
    attention = r"transformer\.h\.0\.attn\.attn_dropout"
    refused(message.format(attention), None, lambda: hf(attn_pdrop=0.1))

    def number():
        model = mine()
        model.layers[1].dropout_p = 0.1
        return model

    refused(message.format(r"layers\.1\.dropout_p"), PLAN, number)


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


def test_styles_are_what_the_ready_plan_says():
    assert GPT2["*.attn.c_attn"] == Column(groups=3)
    assert GPT2["*.attn"] == Divide("num_heads", "split_size", heads="num_heads")
    assert GPT2["*wte"] == Vocab()
    assert GPT2["*.ln_1"] == Tokens()
    assert GPT2["*.mlp.c_proj"] == Row()
