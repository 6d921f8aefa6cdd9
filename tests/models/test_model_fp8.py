"""A GPT with products in 8 bits: which layers, the same run on ranks of tp, what is refused."""

import pytest
import torch
from cells import slow

from fastpar import GPT, AdamW, Mesh, engine_of, parallelize
from fastpar.axes.tensor.functional import column_linear, row_linear
from fastpar.kernels import DelayedScales, Fp8
from fastpar.models.gpt import use_fp8
from fastpar.settings.model import GPTConfig
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 256, "block_size": 8, "vocab_size": 40}
CONFIG = GPTConfig(**SHAPE, dropout=0.0)


def make(layers, dtype=torch.float64, **how):
    model = GPT(CONFIG).to(dtype)
    with torch.no_grad():  # at first a zero's column of values is 0
        for p in model.parameters():
            p.add_(0.01 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
        model.wte.weight[CONFIG.vocab_size :] = 0.0
    use_fp8(model, layers, emulate=True, **how)
    return model


def batch(step, rows=2):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 40, (2, rows, 8), generator=generator)


def test_which_layers():
    for layers, names in (("mlp", {"c_fc", "mlp.c_proj"}), ("all", {"c_attn", "attn.c_proj"})):
        model = make(layers, scaling="tensor")
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


def plain_steps(steps, layers, **how):
    """Losses and weights of one process without an engine."""
    model = make(layers, **how)
    optimizer = AdamW(model.parameters(), lr=1e-3, eps=1e-3, weight_decay=0.0)
    losses = []
    for step in range(steps):
        loss = model(*batch(step))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if model.fp8_scales is not None:
            model.fp8_scales.update()
    return losses, {n: p.detach() for n, p in model.named_parameters()}


def rank_steps(steps, layers, tp, sequence_parallel, stage, how):
    model = make(layers, **how)
    mesh = Mesh(tp=tp, device="cpu")
    parallelize(model, mesh, Parallel.of(sequence_parallel=sequence_parallel, zero_stage=stage))
    optimizer = AdamW(model.parameters(), lr=1e-3, eps=1e-3, weight_decay=0.0)
    losses = []
    for step in range(steps):
        x, y = batch(step)
        rows = slice(mesh.dp_rank, None, mesh.dp_size)
        loss = model(x[rows], y[rows])
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    whole = {}
    with engine_of(model).gathered():
        whole = {n: p.clone() for n, p in model.state_dict().items()}
    return losses, whole, None if model.fp8_scales is None else model.fp8_scales.history


@pytest.mark.parametrize(
    ("tp", "dp", "stage", "sequence", "layers", "how"),
    [
        (2, 1, 0, True, "all", {"scaling": "block"}),
        (2, 1, 0, False, "all", {"scaling": "tensor", "weight_gradient": "fp8"}),
        (1, 2, 3, True, "all", {"scaling": "row"}),
        slow(2, 1, 0, True, "all", {"scaling": "tensor"}),
        slow(2, 1, 0, False, "mlp", {"scaling": "block"}),
        slow(1, 2, 2, True, "mlp", {"scaling": "tensor", "weight_gradient": "fp8"}),
    ],
)
def test_ranks_are_the_run_of_one_process(tp, dp, stage, sequence, layers, how):
    losses, weights = plain_steps(3, layers, **how)
    rounded, _ = plain_steps(1, "none")
    if how["scaling"] != "tensor":  # which rounds nothing in the first step
        assert abs(rounded[0] - losses[0]) > 1e-6
    results = run_ranks(rank_steps, tp * dp, 3, layers, tp, sequence, stage, how)
    for step, loss in enumerate(losses):
        mean = sum(found[0][step] for found in results) / len(results)
        assert abs(mean - loss) <= 1e-12 * abs(loss)
    for _, whole, history in results:
        if tp == 1:
            for name, p in weights.items():
                assert (whole[name] - p).abs().max() <= 1e-12 * p.abs().max(), name
        if history is not None:
            assert torch.equal(history, results[0][2])


def test_what_is_refused():
    with pytest.raises(ValueError, match="expected one of none, mlp, all, got layers=attn"):
        use_fp8(GPT(CONFIG), "attn")
    experts = GPT(GPTConfig(**{**SHAPE, "n_embd": 16}, dropout=0.0, n_expert=2))
    with pytest.raises(ValueError, match="expected a model without experts, got n_expert=2"):
        use_fp8(experts, "mlp", emulate=True)
    with pytest.raises(ValueError, match="got weight_gradient=fp8 with scaling=row"):
        use_fp8(GPT(CONFIG), "mlp", weight_gradient="fp8")


def split(op):
    mesh = Mesh(tp=2, device="cpu")
    model = parallelize(make("none"), mesh)
    x, weight = torch.ones(2, 64).double(), torch.ones(64, 64).double()
    with pytest.raises(ValueError, match=f"{op.__name__}: expected scaling=tensor, or block"):
        op(x, weight, tp=model.tp, fp8=Fp8("block", emulate=True))
    scales = DelayedScales(1)
    y = op(x, weight, tp=model.tp, fp8=Fp8("tensor", emulate=True, scales=scales))
    assert y.shape == ((4, 64) if op is column_linear else (1, 64))


@pytest.mark.parametrize("op", [column_linear, row_linear])
def test_layers_split_within_a_block_are_refused(op):
    run_ranks(split, 2, op)
