"""fastpar.models.gpt against GPT-2 written down in plain torch, in fp64."""

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from cells import sweep

import fastpar
from fastpar import AdamW, Mesh, parallelize
from fastpar.axes.tensor.functional import column_linear, row_linear
from fastpar.kernels import DelayedScales, Fp8, keep_mask, make_key, quantize_p
from fastpar.kernels.philox import Rng
from fastpar.models.gpt import GPT, use_fp8
from fastpar.settings.model import PRESETS, GPTConfig
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

TINY = GPTConfig(n_layer=2, n_head=2, n_embd=80, block_size=37, vocab_size=211, dropout=0.2)


def model_of(config=TINY, **kwargs):
    """A model whose biases and norms are not trivial."""
    model = GPT(config, **kwargs)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.randn(p.shape, generator=generator), alpha=0.1)
            else:
                p.mul_(3.0)
    return model


def batch(config=TINY, B=3, T=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (B, T or config.block_size)
    idx = torch.randint(config.vocab_size, shape, generator=generator)
    targets = torch.randint(config.vocab_size, shape, generator=generator)
    targets[0, 0] = -100
    return idx, targets


def gpt2_ref(w, config, idx, rng_key=None):
    """Logits of GPT-2 as in the paper's code: every op on its own, nothing delayed, no padding."""
    c = config
    site = iter(range(1 + 3 * c.n_layer))

    def drop(x):
        s = next(site)
        if rng_key is None:
            return x
        keep = keep_mask(Rng(rng_key, s), c.dropout, x.shape)
        return x * keep / (1 - quantize_p(c.dropout) / 256)

    def norm(x, name):
        shape, weight, bias = x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"]
        return F.layer_norm(x, shape, weight, bias, c.layer_norm_eps)

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    B, T = idx.shape
    wte = w["wte.weight"][: c.vocab_size]
    x = drop(wte[idx] + w["wpe.weight"][:T])
    for i in range(c.n_layer):
        h = f"h.{i}"
        qkv = linear(norm(x, f"{h}.ln_1"), f"{h}.attn.c_attn").chunk(3, dim=-1)
        q, k, v = (t.view(B, T, c.n_head, -1).transpose(1, 2) for t in qkv)  # [B, H, T, D]
        scores = q @ k.mT / math.sqrt(c.head_size)
        scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
        o = (drop(scores.softmax(-1)) @ v).transpose(1, 2).reshape(B, T, -1)
        x = x + drop(linear(o, f"{h}.attn.c_proj"))
        y = F.gelu(linear(norm(x, f"{h}.ln_2"), f"{h}.mlp.c_fc"), approximate="tanh")
        x = x + drop(linear(y, f"{h}.mlp.c_proj"))
    return norm(x, "ln_f") @ wte.T


def test_loss_reduction_and_ignored_targets():
    model = model_of().eval()
    idx, targets = batch()
    targets[1, 3:] = -100
    n_valid = int((targets != -100).sum())
    mean, total = model(idx, targets), model(idx, targets, reduction="sum")
    torch.testing.assert_close(total, mean * n_valid)
    with torch.no_grad():
        torch.testing.assert_close(model(idx, targets), mean)
    assert model.bfloat16()(idx, targets).dtype == torch.float32


def test_dropout_is_off_in_eval_mode_and_at_rate_zero_and_torchs_seed_rules_it():
    idx, _ = batch()
    model, drawn = model_of(), []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn.append(model(idx))
    assert torch.equal(drawn[0], drawn[1])
    whole = model.eval()(idx)
    assert not any(torch.equal(drawn[0], other) for other in (drawn[2], whole))
    assert torch.equal(model(idx, rng_key=make_key(0, 0)), whole)
    plain = GPT(replace(TINY, dropout=0.0))
    plain.load_state_dict(model.state_dict())
    assert torch.equal(plain.train()(idx), whole)


@sweep("adamw", [torch.optim.AdamW, fastpar.AdamW])
def test_padding_rows_stay_zero_and_change_nothing(adamw):
    model, (idx, targets), V = model_of(), batch(), TINY.vocab_size
    weight = model.wte.weight
    assert weight.shape == (256, 80)
    optimizer = adamw(model.parameters(), lr=0.1, weight_decay=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(idx, targets, rng_key=make_key(0, step)).backward()
        assert weight.grad[:V].abs().min(dim=-1).values.max() > 0
        optimizer.step()
        assert not weight.grad[V:].any()
        assert not weight[V:].any()
    model.eval()
    logits, loss = model(idx), model(idx, targets)
    with torch.no_grad():
        weight[V:] = 100.0
    assert torch.equal(model(idx), logits)
    assert torch.equal(model(idx, targets), loss)


def test_published_sizes(monkeypatch):
    """Of models on the meta device, which draw nothing."""
    monkeypatch.setattr(torch.Tensor, "normal_", None, raising=False)
    for name, n_parameters, gflops in (
        ("gpt2", 124_439_808, 0.860),
        ("gpt2-medium", 354_823_168, 2.431),
        ("gpt2-large", 774_030_080, 5.210),
        ("gpt2-xl", 1_557_611_200, 10.289),
    ):
        with torch.device("meta"):
            model = GPT(PRESETS[name])
        assert model.num_parameters() == n_parameters
        assert model.flops_per_token() / 1e9 == pytest.approx(gflops, abs=5e-4)


def test_initialization_is_gpt2s():
    config = GPTConfig(n_layer=8, n_head=2, n_embd=256, block_size=128, vocab_size=1000)
    for name, p in GPT(config).named_parameters():
        if name.endswith("bias"):
            assert torch.count_nonzero(p) == 0, name
        elif p.dim() == 1:
            assert torch.equal(p, torch.ones_like(p)), name
        else:
            std = 0.02
            if name == "wte.weight":
                assert torch.count_nonzero(p[1000:]) == 0
                p = p[:1000]
            elif name == "wpe.weight":
                std = 0.01
            elif name.endswith("c_proj.weight"):
                std = 0.02 / math.sqrt(2 * 8)
            # A sample deviation of n normals is off by std / sqrt(2n) at one sigma, a mean by
            # std / sqrt(n); six sigma is one failure in 5e8.
            n = p.numel()
            assert p.std().item() == pytest.approx(std, rel=6 / math.sqrt(2 * n)), name
            assert abs(p.mean().item()) < 6 * std / math.sqrt(n), name


def test_each_tensor_is_drawn_from_seed_and_name_alone():
    state = torch.get_rng_state()
    small = GPT(TINY, seed=5).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(123)
    deep = GPT(replace(TINY, n_layer=3), seed=5).state_dict()
    other = GPT(TINY, seed=6).state_dict()
    for name, p in small.items():
        if not name.endswith("c_proj.weight"):
            assert torch.equal(p, deep[name]), name
        if p.dim() == 2:
            assert not torch.equal(p, other[name]), name
    matrices = [p.flatten()[:100] for p in small.values() if p.dim() == 2]
    assert len({tuple(m.tolist()) for m in matrices}) == len(matrices)


@pytest.mark.slow
def test_a_compiled_model_refuses_bad_ids():
    """test_compiled.py compiles whole models."""
    compiled = torch.compile(GPT(replace(TINY, n_layer=1)), fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match="GPT: expected token ids below vocab_size"):
        compiled(torch.full((1, 5), 211), torch.zeros(1, 5).long(), rng_key=make_key(0, 0))


def test_bad_ids_and_targets_are_refused():
    model, (idx, targets) = GPT(TINY), batch()
    beyond = targets.clone()
    beyond[1, 2] = 211
    zeros = lambda *shape: torch.zeros(shape, dtype=torch.int64)  # noqa: E731
    for given, message in (
        ((zeros(5),), r"GPT: expected idx as int64 \[B, T\], got idx.shape=\[5\]"),
        ((torch.zeros(1, 5),), r"expected idx as int64 \[B, T\], got .* idx.dtype=torch.float32"),
        *(((zeros(1, T),), f"GPT: expected 1 <= T <= block_size=37, got T={T}") for T in (38, 0)),
        *(((torch.tensor([[3, i, 4]]),), rf"GPT: expected token ids in \[0, 211\), got id={i}")
          for i in (211, -1)),
        ((idx, targets[:, :-1]), r"GPT: expected targets of idx's shape \[3, 37\], got"),
        ((idx, beyond), "211"),
        ((idx.numpy(),), "GPT: expected idx as a tensor, got ndarray"),
        ((idx, targets.tolist()), "GPT: expected targets as a tensor, got list"),
        *((each, r"GPT: expected at least one sample, got idx.shape=\[0, 5\]")
          for each in ((zeros(0, 5),), (zeros(0, 5), zeros(0, 5)))),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            model(*given)
    for config in ("gpt2", None, {"n_layer": 2}):
        with pytest.raises(ValueError, match="GPT: expected config as a GPTConfig, got config="):
            GPT(config)


@sweep(("dropout", "T"), [(0.0, 37), (0.1, 37), (0.0, 1), (0.0, 2), (0.1, 36)])
def test_fp64_is_exact_throughout(dropout, T):
    """Loss, logits, gradients and a step of AdamW of the whole model, to 1e-12 of plain torch."""
    config = replace(TINY, dropout=dropout)
    model = model_of(config).double()
    idx, targets = batch(config, T=T)
    key = make_key(7, 100)
    exact = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    logits = gpt2_ref(exact, config, idx, key if dropout else None)
    want = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    want.backward()
    loss = model(idx, targets, rng_key=key)
    loss.backward()
    pairs = {"loss": (loss, want), "logits": (model(idx, rng_key=key), logits)}
    pairs |= {name: (p.grad, exact[name].grad) for name, p in model.named_parameters()}
    step = {"lr": 1e-3, "eps": 1e-3}  # of one token queries and keys have no gradient but rounding
    fastpar.AdamW(model.parameters(), **step).step()
    torch.optim.AdamW(exact.values(), **step).step()
    pairs |= {f"new {name}": (p, exact[name]) for name, p in model.named_parameters()}
    for name, (got, value) in pairs.items():
        assert got.dtype == torch.float64, name
        assert (got - value).norm() <= 1e-12 * value.norm(), name


def test_ranks_of_tp_draw_one_key_for_dropout(monkeypatch):
    """Whatever their generators are: that of the first rank."""
    base = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=8, block_size=8, vocab_size=31, dropout=0.5))
    idx = torch.arange(16).view(2, 8)
    rank = torch.distributed.get_rank
    monkeypatch.setattr("fastpar.models.gpt.draw_key", lambda device: make_key(rank(), 0, device))

    def run():
        model = copy.deepcopy(base)
        parallelize(model, Mesh(tp=2), Parallel.of(sequence_parallel=False))
        return model(idx), model(idx, rng_key=make_key(0, 0)), model(idx, rng_key=make_key(1, 0))

    for drawn, first, second in run_ranks(run, 2):
        assert torch.equal(drawn, first)
        assert not torch.equal(drawn, second)


FP8_SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 256, "block_size": 8, "vocab_size": 40}
FP8 = GPTConfig(**FP8_SHAPE, dropout=0.0)


def fp8_model(layers, dtype=torch.float64, **how):
    model = GPT(FP8).to(dtype)
    with torch.no_grad():  # at first a zero's column of values is 0
        for p in model.parameters():
            p.add_(0.01 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
        model.wte.weight[FP8.vocab_size :] = 0.0
    use_fp8(model, layers, emulate=True, **how)
    return model


def test_which_layers_have_fp8():
    for layers, names in (("mlp", {"c_fc", "mlp.c_proj"}), ("all", {"c_attn", "attn.c_proj"})):
        model = fp8_model(layers, scaling="tensor")
        found = {n: m.fp8 for n, m in model.named_modules() if getattr(m, "fp8", None)}
        assert len(found) == {"mlp": 4, "all": 8}[layers]
        for end in names:
            assert sum(name.endswith(end) for name in found) == 2
        assert len({how.layer for how in found.values()}) == len(found)
        assert [n for n, how in found.items() if not how.keeps] == [
            f"h.{i}.attn.c_proj" for i in range(2) if layers == "all"
        ]
    use_fp8(model, "none")
    assert not any(getattr(m, "fp8", None) for m in model.modules())
    assert model.fp8_scales is None


def fp8_run(layers, tp=1, sequence=True, **how):
    """Losses of three steps of one process, or of a rank, and the scales."""
    model = fp8_model(layers, **how)
    if tp > 1:
        parallelize(model, Mesh(tp=tp), Parallel.of(sequence_parallel=sequence))
    optimizer = AdamW(model.parameters(), lr=1e-3, eps=1e-3, weight_decay=0.0)
    losses = []
    for step in range(3):
        x, y = torch.randint(0, 40, (2, 2, 8), generator=torch.Generator().manual_seed(step))
        loss = model(x, y)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if model.fp8_scales is not None and tp == 1:
            model.fp8_scales.update()
    return losses, model.fp8_scales and model.fp8_scales.history


@pytest.mark.parametrize(
    ("sequence", "how"),
    [(True, {"scaling": "block"}), (False, {"scaling": "tensor", "weight_gradient": "fp8"})],
)
def test_fp8_split_by_tp_is_the_run_of_one_process(sequence, how):
    """Data-parallel runs are in test_layouts.py."""
    losses, _ = fp8_run("all", **how)
    if how["scaling"] != "tensor":  # which rounds nothing in the first step
        assert abs(fp8_run("none")[0][0] - losses[0]) > 1e-6
    ranks = run_ranks(lambda: fp8_run("all", 2, sequence, **how), 2)
    for found, history in ranks:
        assert found == pytest.approx(losses, rel=1e-12, abs=0)
        assert history is None or torch.equal(history, ranks[0][1])


def test_fp8_that_is_refused():
    with pytest.raises(ValueError, match="expected one of none, mlp, all, got layers=attn"):
        use_fp8(GPT(FP8), "attn")
    experts = GPT(GPTConfig(**{**FP8_SHAPE, "n_embd": 16}, dropout=0.0, n_expert=2))
    with pytest.raises(ValueError, match="expected a model without experts, got n_expert=2"):
        use_fp8(experts, "mlp", emulate=True)


@sweep(("op", "shape"), [(column_linear, (4, 64)), (row_linear, (1, 64))])
def test_layers_split_within_a_block_are_refused(op, shape):
    def run():
        tp = parallelize(fp8_model("none"), Mesh(tp=2, device="cpu")).tp
        x, weight = torch.ones(2, 64).double(), torch.ones(64, 64).double()
        with pytest.raises(ValueError, match=f"{op.__name__}: expected scaling=tensor, or block"):
            op(x, weight, tp=tp, fp8=Fp8("block", emulate=True))
        how = Fp8("tensor", emulate=True, scales=DelayedScales(1))
        return op(x, weight, tp=tp, fp8=how).shape

    assert run_ranks(run, 2) == [shape] * 2
