"""Llama, Qwen3 and NanoChat: the logits and gradients of transformers' own classes."""

import json
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    NanoChatConfig,
    NanoChatForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.nanochat.modeling_nanochat import NanoChatRMSNorm, NanoChatRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from fastpar import GPT, GPTConfig
from fastpar.files.plain_files import write_text
from fastpar.models.families import weights_out
from fastpar.models.gpt import TABLES
from fastpar.models.hf import config_json, list_weights, load_hf, read_config, save_hf

rope_module = sys.modules["fastpar.kernels.rope"]  # the package's rope is the function
V, T = 67, 12
SIZES = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 16, "attention_dropout": 0.0,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2)),
    "llama, one head of keys": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, num_key_value_heads=1, tie_word_embeddings=True)
    ),
    "llama, heads of their own size": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, num_key_value_heads=4, head_dim=12)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(
        Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=10, tie_word_embeddings=True)
    ),
    "nanochat": lambda: NanoChatForCausalLM(NanoChatConfig(**SIZES, num_key_value_heads=4)),
    "nanochat, grouped": lambda: NanoChatForCausalLM(
        NanoChatConfig(**SIZES, num_key_value_heads=2, final_logit_softcapping=3.0)
    ),
}  # fmt: skip


def wide_norm(self, x):
    """transformers' norm without its cast to fp32, which fp64 models have, too."""
    eps = getattr(self, "variance_epsilon", getattr(self, "eps", None))
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    weight = getattr(self, "weight", None)
    return y if weight is None else weight * y


def wide_turns(positions, theta, dim):
    angles = positions[..., None].double() / theta ** (torch.arange(0, dim, 2) / dim).double()
    return angles.cos(), angles.sin()


def their_wide_turns(self, x, position_ids):
    """transformers' sines in fp64: only exact rotations may change places with a norm."""
    theta, size = self.config.rope_parameters["rope_theta"], 2 * len(self.inv_freq)
    return [torch.cat([s, s], -1).to(x.dtype) for s in wide_turns(position_ids, theta, size)]


@pytest.fixture
def theirs(request, monkeypatch):
    """A random model of transformers, with weights that are not 0 or 1."""
    for kind in (LlamaRMSNorm, Qwen3RMSNorm, NanoChatRMSNorm):
        monkeypatch.setattr(kind, "forward", wide_norm)
    monkeypatch.setattr(NanoChatRotaryEmbedding, "forward", their_wide_turns)
    if request.param.startswith("nanochat"):
        monkeypatch.setattr(rope_module, "sines", wide_turns)
    torch.manual_seed(0)
    model = MODELS[request.param]()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model


def tokens():
    return torch.randint(V, (2, T), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("theirs", MODELS, indirect=True)
def test_logits_and_gradients_are_those_of_transformers(theirs, tmp_path):
    theirs.save_pretrained(tmp_path)
    ours, x = load_hf(tmp_path).double(), tokens()
    logits = theirs.double()(x).logits
    torch.testing.assert_close(ours(x), logits, rtol=1e-12, atol=1e-12)
    loss = ours(x, x)
    expected = F.cross_entropy(logits.flatten(0, 1), x.flatten())
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    loss.backward()
    expected.backward()
    grads = {name: p.grad for name, p in ours.named_parameters()}
    grads |= {name: grads[name][:V] for name in TABLES if name in grads}
    found = weights_out(ours.config, theirs.config.model_type, grads)
    for name, p in theirs.named_parameters():
        torch.testing.assert_close(
            found.pop(name), p.grad, rtol=1e-11, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert not found


@pytest.mark.parametrize("theirs", MODELS, indirect=True)
def test_an_exported_model_has_the_bytes_of_the_imported_one(theirs, tmp_path):
    theirs.save_pretrained(tmp_path / "in")
    ids = {"bos_token_id": 3, "eos_token_id": 5}
    save_hf(load_hf(tmp_path / "in"), tmp_path / "out", max_shard_bytes=5000, **ids)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(again) is type(theirs)
    assert (again.config.bos_token_id, again.config.eos_token_id) == (3, 5)
    for (name, p), (_, q) in zip(theirs.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(p, q), name
    assert torch.equal(theirs(tokens()).logits, again(tokens()).logits)


@pytest.mark.parametrize("preset", ["llama-tiny", "qwen3-tiny", "nanochat-tiny"])
def test_dropout_survives_a_way_through_transformers(preset, tmp_path):
    """Theirs drops only attention's probabilities; ours drops embeddings and residuals too."""
    config = GPTConfig.preset(preset, vocab_size=V, dropout=0.1, n_layer=1)
    save_hf(GPT(config), tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert theirs.config.attention_dropout == 0.1
    theirs.save_pretrained(tmp_path / "back")
    for folder, given, rate in (("out", None, 0.1), ("back", None, 0.1), ("back", 0.0, 0.0)):
        assert load_hf(tmp_path / folder, dropout=given).config.dropout == rate


REFUSED = [
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
     "rope_parameters"),
    ("llama", {"attention_bias": True}, "attention_bias=True"),
    ("llama", {"hidden_act": "gelu"}, "hidden_act=gelu"),
    ("llama", {"attention_dropout": 0.1}, "expected one dropout rate, got .*_dropout=0.1, embd"),
    ("llama", {"smear": True}, "smear=True"),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
     "layer_types=sliding_attention"),
    ("nanochat", {"value_embeddings": 3}, "value_embeddings=3"),
    ("nanochat", {"hidden_size": "32"}, "n_embd=32"),
]  # fmt: skip


@pytest.mark.parametrize(("theirs", "change", "named"), REFUSED, indirect=["theirs"])
def test_what_would_change_the_function_is_refused_by_name(theirs, change, named, tmp_path):
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=named):
        load_hf(tmp_path)


CONTRADICTIONS = [
    ({"n_kv_head": 3}, "n_head divisible by n_kv_head=3"),
    ({"head_dim": 7, "rope_theta": 1e4}, "even head_dim"),
    ({"norm": "layer", "norm_weight": False}, "norm=rms with norm_weight=False"),
    ({"activation": "silu"}, "activation as one of gelu, relu2, swiglu"),
    ({"norm": "batch"}, "norm as one of layer, rms"),
    ({"logit_softcap": -1.0}, "logit_softcap >= 0"),
    ({"rope_theta": 0.0}, "rope_theta=0.0"),
    ({"attention_scale": float("inf")}, "attention_scale=inf"),
    ({"n_inner": 2.5}, "n_inner=2.5"),
    ({"rope_theta": "1e4"}, "rope_theta > 0, got rope_theta=1e4"),
    ({"attention_scale": True}, "attention_scale > 0, got attention_scale=True"),
    ({"logit_softcap": None}, "logit_softcap >= 0, got logit_softcap=None"),
    ({"bias": "no"}, "bias as one of True, False, got bias='no'"),
]


@pytest.mark.parametrize(("fields", "message"), CONTRADICTIONS)
def test_fields_that_contradict_each_other_are_one_line(fields, message):
    with pytest.raises(ValueError, match=message) as caught:
        GPTConfig(n_head=4, n_embd=32, **fields)
    assert "\n" not in str(caught.value)


class Plain(nn.Module):
    """The model of a GPTConfig in the words of torch, from the weights of a GPT."""

    def __init__(self, model):
        super().__init__()
        self.c, self.w = model.config, dict(model.named_parameters())

    def norm(self, name, x, width=None):
        w, c = self.w, self.c
        weight, bias = w.get(f"{name}.weight"), w.get(f"{name}.bias")
        if c.norm == "layer" and width is None:
            return F.layer_norm(x, x.shape[-1:], weight, bias, c.layer_norm_eps)
        return F.rms_norm(x, x.shape[-1:], weight, c.layer_norm_eps)

    def rotated(self, x):
        half = x.shape[-1] // 2
        steps = torch.arange(0, 2 * half, 2, dtype=torch.float32) / (2 * half)
        turns = torch.arange(T, dtype=torch.float32)[:, None] * (1.0 / self.c.rope_theta**steps)
        cos, sin = (f(turns).to(x.dtype)[:, None] for f in (torch.cos, torch.sin))
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def attention(self, name, y):
        c, w = self.c, self.w
        many, size = c.queries_per_key, c.head_size
        qkv = F.linear(y, w[f"{name}.c_attn.weight"], w.get(f"{name}.c_attn.bias"))
        qkv = qkv.unflatten(-1, (many + 2, -1, size))
        q, k, v = qkv[:, :, :many], qkv[:, :, many], qkv[:, :, many + 1]
        heads = []
        for g in range(k.shape[2]):  # each head by itself
            for r in range(many):
                a, b = q[:, :, r, g : g + 1], k[:, :, g : g + 1]
                if c.qk_norm:
                    a, b = self.norm(f"{name}.q_norm", a, 1), self.norm(f"{name}.k_norm", b, 1)
                if c.rope_theta:
                    a, b = self.rotated(a), self.rotated(b)
                scale = size**-0.5 if c.attention_scale is None else c.attention_scale
                scores = (a.squeeze(2) @ b.squeeze(2).transpose(1, 2)) * scale
                mask = torch.ones(T, T, dtype=torch.bool).triu(1)
                heads.append(scores.masked_fill(mask, -torch.inf).softmax(-1) @ v[:, :, g])
        return F.linear(
            torch.cat(heads, -1), w[f"{name}.c_proj.weight"], w.get(f"{name}.c_proj.bias")
        )

    def mlp(self, name, y):
        w, kind = self.w, self.c.activation
        y = F.linear(y, w[f"{name}.c_fc.weight"], w.get(f"{name}.c_fc.bias"))
        if kind == "swiglu":
            gate, up = y.chunk(2, -1)
            y = F.silu(gate) * up
        else:
            y = F.gelu(y, approximate="tanh") if kind == "gelu" else y.relu() ** 2
        return F.linear(y, w[f"{name}.c_proj.weight"], w.get(f"{name}.c_proj.bias"))

    def forward(self, idx):
        c, w = self.c, self.w
        x = w["wte.weight"][idx]
        if c.rope_theta is None:
            x = x + w["wpe.weight"][:T]
        if c.norm_embedding:
            x = self.norm("ln_e", x)
        for i in range(c.n_layer):
            x = x + self.attention(f"h.{i}.attn", self.norm(f"h.{i}.ln_1", x))
            x = x + self.mlp(f"h.{i}.mlp", self.norm(f"h.{i}.ln_2", x))
        head = w["wte.weight" if c.tied else "lm_head.weight"]
        logits = F.linear(self.norm("ln_f", x), head[: c.vocab_size])
        cap = c.logit_softcap
        return cap * torch.tanh(logits / cap) if cap else logits


def drawn(seed):
    random = torch.Generator().manual_seed(seed)

    def one(*values):
        return values[int(torch.randint(len(values), (), generator=random))]

    norm = one("layer", "rms")
    return GPTConfig(
        n_layer=2, n_head=4, n_embd=32, block_size=T, vocab_size=V, dropout=0.0,
        layer_norm_eps=one(1e-5, 1e-6), norm=norm, norm_weight=norm == "layer" or one(True, False),
        norm_embedding=one(True, False), bias=one(True, False), rope_theta=one(None, 100.0, 1e4),
        qk_norm=one(True, False), n_kv_head=one(None, 1, 2, 4), head_dim=one(None, 10),
        attention_scale=one(None, 0.2), activation=one("gelu", "relu2", "swiglu"),
        n_inner=one(None, 24), tied=one(True, False), logit_softcap=one(0.0, 2.0),
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(10))
def test_any_block_is_the_plain_one(seed):
    config = drawn(seed)
    model, x = GPT(config, seed=seed).double(), tokens()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
        for table in (model.wte, getattr(model, "lm_head", model.wte)):
            table.weight[V:] = 0.0
    plain = Plain(model)
    expected = plain(x)
    torch.testing.assert_close(model(x), expected, rtol=1e-12, atol=1e-12)
    grads = torch.autograd.grad(
        F.cross_entropy(expected.flatten(0, 1), x.flatten()), [*plain.w.values()]
    )
    model(x, x).backward()
    for (name, p), grad in zip(plain.w.items(), grads):
        torch.testing.assert_close(
            p.grad, grad, rtol=1e-10, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("preset", ["nanochat-d12", "llama-1b", "qwen3-0.6b"])
def test_presets_have_the_published_numbers_of_weights(preset):
    numbers = {"nanochat-d12": 185_597_952, "llama-1b": 1_235_814_400, "qwen3-0.6b": 596_049_920}
    with torch.device("meta"):
        model = GPT(GPTConfig.preset(preset))
    assert model.num_parameters() == numbers[preset]
    stored = {w.name: w for w in list_weights(model)}
    assert sum(w.nbytes for w in stored.values()) == 4 * numbers[preset]


def test_a_config_is_stored_whole(tmp_path):
    """Also a block that no class of transformers has."""
    for seed in range(10):
        config = drawn(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        write_text(folder / "config.json", json.dumps(config_json("x", GPT(config), None, None)))
        assert read_config(folder, None) == config
