"""patch() of transformers' Llama, Qwen3 and NanoChat: the stock's numbers, and what is left."""

import copy
import warnings

import pytest
import torch
import transformers
from roundings import differences
from torch import nn

import fastpar
from fastpar.engine.engine import engine_of
from fastpar.testing import run_ranks

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 32, "pad_token_id": None,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2}
MODELS = {
    "llama": lambda **more: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": 2, **more})
    ),
    "qwen3": lambda **more: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**{**SIZES, **HEADS, "head_dim": 16, **more})
    ),
    "nanochat": lambda **more: transformers.NanoChatForCausalLM(
        transformers.NanoChatConfig(**{**SIZES, "num_key_value_heads": 4, **more})
    ),
}
# Norms, attention and MLPs of two layers, the embedding, the head's loss.
N = {"llama": 5 + 4 + 1 + 1, "qwen3": 9 + 4 + 1 + 1, "nanochat": 9 + 4 + 1 + 1}


def made(name, **more):
    torch.manual_seed(0)
    model = MODELS[name](**more)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


def tokens(seed=1, rows=2):
    return torch.randint(61, (rows, 20), generator=torch.Generator().manual_seed(seed))


def trained(model, **given):
    """Loss and gradients of a step."""
    model.zero_grad()
    loss = model(tokens(), labels=tokens(), **given).loss
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    return {"loss": loss.detach(), **grads}


def predicted(model):
    return {"logits": model(tokens()).logits.detach()}


def assert_same(run, model, stock):
    """To what roundings explain."""

    def plain(model):
        model.set_attn_implementation("eager")  # whose steps are seen
        return run(model)

    most = differences(plain, stock)
    found, expected = run(model), run(stock)
    assert found.keys() == expected.keys() == most.keys()
    for name, x in found.items():
        torch.testing.assert_close(x, expected[name], rtol=0, atol=most[name], msg=name)


def assert_same_step(model, stock, **given):
    assert_same(lambda m: trained(m, **given), model, stock)


@pytest.mark.parametrize("name", MODELS)
def test_a_patched_model_has_the_numbers_of_the_stock_one(name):
    stock = made(name)
    model = copy.deepcopy(stock)
    report = fastpar.patch(model, fused_loss=True)
    assert sum(map(len, report.replaced.values())) == N[name]
    assert_same_step(model, stock)
    model.eval(), stock.eval()
    assert_same(predicted, model, stock)
    assert not report.fallbacks
    assert fastpar.unpatch(model) == N[name]
    assert torch.equal(model(tokens()).logits, stock(tokens()).logits)


@pytest.mark.parametrize("name", MODELS)
def test_calls_that_no_kernel_serves_are_the_stock_ones(name):
    stock = made(name)
    model = copy.deepcopy(stock)
    report = fastpar.patch(model)
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[0, :5] = 0
    with pytest.warns(UserWarning, match="Attention falls back to its own forward"):
        assert_same_step(model, stock, attention_mask=mask)
    assert report.fallbacks
    model.eval(), stock.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made_of = [
            m.generate(tokens()[:1, :6], max_new_tokens=8, do_sample=False) for m in (model, stock)
        ]
    assert torch.equal(*made_of)


def scaled(module, args, y):
    return 1.5 * y


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", ["bias", "hooks", "autocast", "frozen"])
def test_layers_that_are_called(name, way):
    """And weights without gradients."""
    stock = made(name, attention_bias=way == "bias")
    model = copy.deepcopy(stock)
    report = fastpar.patch(model)
    for m in (model, stock):
        layer = m.model.layers[0]
        if way == "hooks":
            layer.self_attn.k_proj.register_forward_hook(scaled)
            first = layer.mlp.fc1 if name == "nanochat" else layer.mlp.gate_proj
            first.register_forward_hook(scaled)
            for part in m.model.layers[1].self_attn.children():
                if "norm" in type(part).__name__.lower():
                    part.register_forward_hook(scaled)
        if way == "frozen":
            m.requires_grad_(False)
            layer.self_attn.v_proj.requires_grad_(True)
            m.model.layers[1].self_attn.q_proj.requires_grad_(True)
    if way == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            outputs = [m(tokens(), labels=tokens()) for m in (model, stock)]
        # Some 14 roundings of up to 2^-9 on a logit's way in either model, of 1 / sqrt(3) of that
        # in the mean, and of one in sqrt(n) of it over n targets; 5 deviations.
        n, most = tokens().numel(), outputs[1].logits.abs().max()
        bound = 5 * (2 * 14 / 3 / n) ** 0.5 * 2**-9 * most
        assert (outputs[0].loss - outputs[1].loss).abs() <= bound
    else:
        assert_same_step(model, stock)
        for p, q in zip(model.parameters(), stock.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None) == (not p.requires_grad)
    assert not report.fallbacks or way == "autocast"  # norms of another dtype


def losses_of(name, patched, folder, moved=0.0):
    """Of steps of transformers' Trainer; moved: each weight by so many roundings, up or down."""
    from transformers import Trainer, TrainingArguments

    class Told(Trainer):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            found.append(loss.item())
            return loss

    found, model = [], made(name)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + moved * torch.finfo(p.dtype).eps * (2 * torch.randint_like(p, 2) - 1))
    if patched:
        fastpar.patch(model, fused_loss=True)
    rows = [{"input_ids": row, "labels": row} for row in tokens(rows=4)]
    given = {"max_steps": 8, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "seed": 3}
    given |= {"output_dir": str(folder), "save_strategy": "no", "report_to": "none"}
    Told(model, TrainingArguments(use_cpu=True, **given), train_dataset=rows).train()
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_trainers_losses_are_the_stock_ones(name, tmp_path):
    """To 16 times what moving each weight by a rounding changes: [Note: bound of a check]."""
    stock, patched = (losses_of(name, is_patched, tmp_path) for is_patched in (False, True))
    moved = losses_of(name, False, tmp_path, moved=1.0)
    bound = 16 * ((moved - stock).abs().max() + torch.finfo(torch.float32).eps * stock.max())
    assert stock[-1] < stock[0]
    assert (patched - stock).abs().max() <= bound < 1e-3 * stock[0]


LEFT = [
    ("llama", {"hidden_act": "gelu"}, "LlamaMLP", "GELUActivation) is not SiLU or relu2"),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
     "Qwen3Attention", "a window of attention has no kernel"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "more", "kind", "why"), LEFT)
def test_what_is_left_is_named(name, more, kind, why):
    stock = made(name, **more)
    model = copy.deepcopy(stock)
    report = fastpar.patch(model, fused_loss=True)
    assert [reason for (left, reason) in report.left if left == kind and why in reason]
    assert_same_step(model, stock)


def test_replaced_code_is_left(monkeypatch):
    import transformers.models.llama.modeling_llama as source

    own = source.apply_rotary_pos_emb
    monkeypatch.setattr(source, "apply_rotary_pos_emb", lambda *a, **k: own(*a, **k))
    report = fastpar.patch(made("llama"))
    why = [reason for (kind, reason) in report.left if kind == "LlamaAttention"]
    assert why == ["apply_rotary_pos_emb was replaced"]


@pytest.mark.parametrize("name", MODELS)
def test_a_changed_setting_counts(name):
    stock = made(name)
    model = copy.deepcopy(stock)
    fastpar.patch(model)
    for m in (model, stock):
        m.model.layers[1].self_attn.scaling *= 2
        norm = m.model.layers[0].input_layernorm
        vars(norm)["eps" if hasattr(norm, "eps") else "variance_epsilon"] = 0.5
    assert_same_step(model, stock)
    for m in (model, stock):
        m.model.layers[0].self_attn.sliding_window = 4
    with pytest.warns(UserWarning, match="Attention falls back"):
        model(tokens())


class Hooked(nn.SiLU):
    def forward(self, x):
        return 2 * super().forward(x)


def test_a_replaced_activation_is_used():
    stock = made("llama")
    model = copy.deepcopy(stock)
    fastpar.patch(model)
    for m in (model, stock):
        m.model.layers[0].mlp.act_fn = Hooked()
    with pytest.warns(UserWarning, match="a replaced activation"):
        assert_same_step(model, stock)


@pytest.mark.parametrize("name", MODELS)
def test_a_patched_model_trains_on_ranks(name):
    start = made(name)  # torch's generator is shared by ranks, which are threads

    def losses(model, optimizer, part=slice(None)):
        for step in range(3):
            x = tokens(step, 4)[part]
            loss = model(x, labels=x).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.detach()

    def stock(model):
        model.set_attn_implementation("eager")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
        return {"losses": torch.stack([*losses(model, optimizer)])}

    def run(stage):
        mesh, model = fastpar.Mesh(), copy.deepcopy(start)
        fastpar.patch(model, fused_loss=True)
        model = fastpar.parallelize(model, mesh, zero_stage=stage)
        optimizer = fastpar.AdamW(model.parameters(), lr=1e-3)
        part = slice(mesh.rank, None, mesh.world_size)
        total = torch.stack([*losses(model, optimizer, part)])
        return engine_of(model).all_reduce_scalars(total) / mesh.world_size

    most, expected = differences(stock, start)["losses"], stock(copy.deepcopy(start))["losses"]
    for stage, n in ((0, 1), (1, 2), (3, 2)):
        for found in run_ranks(run, n, stage):
            torch.testing.assert_close(found, expected, rtol=0, atol=most)
