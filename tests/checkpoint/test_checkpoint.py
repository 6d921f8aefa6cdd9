"""Checkpoints: the same bits back, transformers reads them, and damage of any kind is named."""

import os
from dataclasses import replace

import pytest
import torch
from saved import bits

from fastpar.checkpoint import saver
from fastpar.checkpoint.reader import newest_checkpoint, verify_checkpoint
from fastpar.checkpoint.restore import load_checkpoint, read_state
from fastpar.checkpoint.saver import save_checkpoint
from fastpar.comm.mesh import Mesh
from fastpar.data.tokenizer import make_tokenizer
from fastpar.engine.parallelize import parallelize
from fastpar.files.runs import list_checkpoints
from fastpar.models.gpt import GPT
from fastpar.optim.adamw import AdamW
from fastpar.optim.schedule import param_groups
from fastpar.settings.model import GPTConfig
from fastpar.testing import run_ranks

CONFIG = GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=131, dropout=0.1)
OPTIMIZER = "optimizer-00001-of-00001.safetensors"


def make(config=CONFIG, dtype=torch.float32, seed=0, steps=2, **options):
    model = GPT(config, seed=seed).to(dtype)
    options = options or {"master_weights": dtype != torch.float32}
    optimizer = AdamW(param_groups(model, 0.1), **options)
    for step in range(steps):
        idx = torch.randint(
            0, config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(step)
        )
        model(idx[:, :-1], idx[:, 1:], rng_key=torch.tensor([1, step])).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def optimizer_tensors(model, optimizer):
    """PARAMETER/ENTRY -> whole tensor."""
    names = {p: name for name, p in model.named_parameters()}
    params = [p for g in optimizer.param_groups for p in g["params"]]
    state = optimizer.state_dict()["state"]
    return {
        f"{names[p]}/{entry}": torch.as_tensor(value)
        for i, p in enumerate(params)
        for entry, value in state[i].items()
    }


def save(run, step=2, *, keep_last=0, made=None, **state):
    model, optimizer = made or make(seed=step)
    return save_checkpoint(
        run,
        step=step,
        model=model,
        optimizer=optimizer,
        tokenizer=make_tokenizer("bytes"),
        state=state,
        keep_last=keep_last,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_back(tmp_path, dtype):
    model, optimizer = make(dtype=dtype)
    path = save(tmp_path, made=(model, optimizer), tokens=7, rng={"a": [1]})
    verify_checkpoint(path)
    again, its_optimizer = make(dtype=dtype, seed=5, steps=0)
    state = load_checkpoint(path, model=again, optimizer=its_optimizer)
    assert (state["step"], state["tokens"], state["rng"]) == (2, 7, {"a": [1]})
    assert state["model"]["n_layer"] == 2
    for (name, p), q in zip(model.named_parameters(), again.parameters()):
        assert torch.equal(p, q), name
    expected, got = optimizer_tensors(model, optimizer), optimizer_tensors(again, its_optimizer)
    assert expected.keys() == got.keys()
    assert {k.rpartition("/")[2] for k in got} == {"step", "exp_avg", "exp_avg_sq"} | (
        {"master_weight"} if dtype == torch.bfloat16 else set()
    )
    for key, tensor in expected.items():
        assert tensor.dtype == got[key].dtype
        assert torch.equal(tensor, got[key]), key
    # ... and an optimizer that has taken steps is overwritten in place.
    other, its_optimizer = make(dtype=dtype, seed=6, steps=3)
    load_checkpoint(path, model=other, optimizer=its_optimizer)
    for key, tensor in optimizer_tensors(other, its_optimizer).items():
        assert torch.equal(tensor, expected[key]), key


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.bfloat16, {"master_weights": "remainder", "moment_dtype": torch.bfloat16}),
        (torch.bfloat16, {"stochastic_rounding": True, "moment_dtype": torch.uint8}),
        (torch.float32, {"amsgrad": True}),
    ],
)
def test_every_form_of_state_comes_back(tmp_path, dtype, options):
    model, optimizer = make(dtype=dtype, **options)
    path = save(tmp_path, made=(model, optimizer))
    again, its_optimizer = make(dtype=dtype, seed=5, steps=0, **options)
    load_checkpoint(path, model=again, optimizer=its_optimizer)
    expected, got = optimizer_tensors(model, optimizer), optimizer_tensors(again, its_optimizer)
    assert expected.keys() == got.keys()
    for key, tensor in expected.items():
        assert tensor.dtype == got[key].dtype
        assert torch.equal(tensor, got[key]), key


MESHES = [(1, 1, 0), (2, 1, 3), (4, 4, 0), (4, 2, 1), (4, 2, 3)]
FEW = [(1, 1, 0), (4, 2, 3)]
WIDE = replace(CONFIG, n_head=4, vocab_size=301)  # with tp=2 slices of 256 rows, the last with 45


def on_mesh(ranks, tp, stage, work, *, frozen=(), dtype=torch.float32, **options):
    """work(model, optimizer) on all ranks, after two steps."""

    def one():
        mesh = Mesh(tp=tp, device="cpu")
        model = GPT(WIDE, seed=1).to(dtype)
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
        parallelize(model, mesh, zero_stage=stage, grad_dtype=torch.float32)
        optimizer = AdamW(param_groups(model, 0.1), **options)
        generator = torch.Generator().manual_seed(ranks + tp + stage)  # others on each mesh
        for _ in range(2):
            idx = torch.randint(0, WIDE.vocab_size, (4, 9), generator=generator)
            idx = idx.chunk(mesh.dp_size)[mesh.dp_rank]
            model(idx[:, :-1], idx[:, 1:], rng_key=torch.tensor([1, 2])).backward()
            optimizer.step()
            optimizer.zero_grad()
        return work(model, optimizer)

    return run_ranks(one, ranks)


FROZEN = ("wte.weight", "h.0.attn.c_attn.weight", "h.1.ln_1.bias")


@pytest.mark.parametrize(
    "meshes", [FEW, pytest.param(MESHES, marks=pytest.mark.slow)], ids=["few", "all"]
)
@pytest.mark.parametrize(
    ("frozen", "dtype", "options"),
    [
        pytest.param((), torch.float32, {}, marks=pytest.mark.slow),
        (FROZEN, torch.bfloat16, {"master_weights": True}),
        pytest.param(
            (),
            torch.bfloat16,
            {"master_weights": "remainder", "moment_dtype": torch.bfloat16},
            marks=pytest.mark.slow,
        ),
        pytest.param(FROZEN, torch.float32, {"amsgrad": True}, marks=pytest.mark.slow),
    ],
)
def test_the_same_bytes_from_every_mesh(tmp_path, frozen, dtype, options, meshes):
    """What a mesh has trained goes through the next one, and what one process has through all.

    So a state has one form on disk, whoever read it before.
    """

    def work(model, optimizer):
        made = model, optimizer
        found = {"own": save(tmp_path / f"own {mesh}", made=made)}
        for name, path in sources.items():
            load_checkpoint(path, model=model, optimizer=optimizer)
            found[name] = save(tmp_path / f"{name} {mesh}", made=made)
        return found

    sources = {}
    for mesh in meshes:
        found = on_mesh(*mesh, work, frozen=frozen, dtype=dtype, **options)[0]
        for name, path in sources.items():
            assert bits(found[name]) == bits(path), (name, mesh)
        assert all(bits(found["own"]) != bits(path) for path in sources.values())
        sources = {"one": sources.get("one", found["own"]), "before": found["own"]}


def test_with_tp_blocks_of_eight_bits_are_refused_on_every_rank(tmp_path):
    def work(model, optimizer):
        save(tmp_path, made=(model, optimizer))

    with pytest.raises(ValueError, match=r"values of single elements of a parameter that is split"):
        on_mesh(2, 2, 0, work, moment_dtype=torch.uint8)
    assert not list_checkpoints(tmp_path)


def test_the_checkpoint_of_another_model_is_refused_by_ranks_that_split_it(tmp_path):
    for changes, message in (
        ({"vocab_size": 300}, "vocab_size=300, got vocab_size=301"),  # in as many padded rows
        ({"n_embd": 32}, "n_embd=32, got n_embd=16"),
    ):
        path = save(tmp_path, made=make(replace(WIDE, **changes)))

        def work(model, optimizer, path=path, message=message):
            before = [p.detach().clone() for p in model.parameters()]
            with pytest.raises(ValueError, match=f"expected the model of .* with {message}; resu"):
                load_checkpoint(path, model=model, optimizer=optimizer)
            return all(map(torch.equal, before, model.parameters()))

        assert on_mesh(2, 2, 0, work) == [True, True]


@pytest.mark.slow
def test_transformers_reads_the_link_to_the_newest(tmp_path):
    transformers = pytest.importorskip("transformers", reason="pip install -e '.[dev]'")
    gpt2 = transformers.GPT2LMHeadModel
    model, optimizer = make()
    save(tmp_path, 1)
    save(tmp_path, 2, made=(model, optimizer))
    theirs = gpt2.from_pretrained(tmp_path / "latest").eval()
    idx = torch.arange(8)[None]
    with torch.no_grad():
        assert (theirs(idx).logits - model.eval()(idx)).abs().max() < 1e-5


def test_only_the_last_ones_are_kept(tmp_path):
    made = make()
    for step in (9, 10, 100, 1_000_000):
        save(tmp_path, step, made=made, keep_last=2)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step_000100", "step_1000000"]
    assert os.readlink(tmp_path / "latest") == "checkpoints/step_1000000"
    assert newest_checkpoint(tmp_path).name == "step_1000000"


def test_saving_a_step_again_replaces_it(tmp_path):
    save(tmp_path, 4, tokens=1)
    (tmp_path / "checkpoints" / ".step_000003.tmp").mkdir()  # left by a crash
    path = save(tmp_path, 4, tokens=2)
    assert read_state(path)["tokens"] == 2
    assert os.listdir(tmp_path / "checkpoints") == ["step_000004"]


def test_a_save_that_fails_leaves_the_older_ones(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saver, "_write_flushed", full)
    for step in (1, 2):
        with pytest.raises(OSError, match=r"rank 0: .*No space left"):
            save(tmp_path, step)
    assert os.listdir(tmp_path / "checkpoints") == ["step_000001"]
    verify_checkpoint(newest_checkpoint(tmp_path))


def test_no_complete_checkpoint_at_all(tmp_path):
    with pytest.raises(
        ValueError, match=r"expected a run with a complete checkpoint, .* with none"
    ):
        newest_checkpoint(tmp_path)
    path = save(tmp_path, 1)
    (path / "trainer_state.json").unlink()
    with pytest.raises(ValueError, match=r"damaged ones only; the newest: .*trainer_state.json"):
        newest_checkpoint(tmp_path, say=lambda line: None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_layer": 3}, r"expected the model of .* with n_layer=2, got n_layer=3; resume with"),
        ({"n_embd": 32}, r"expected the model of .* with n_embd=16, got n_embd=32"),
        ({"vocab_size": 130}, r"expected the model of .* with vocab_size=131, got vocab_size=130"),
    ],
)
def test_another_model_is_refused_and_left_alone(tmp_path, changes, message):
    path = save(tmp_path, 1)
    model, optimizer = make(GPTConfig(**{**vars(CONFIG), **changes}), steps=1)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=f"load_checkpoint: {message}"):
        load_checkpoint(path, model=model, optimizer=optimizer)
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters()))


def test_dropout_may_change(tmp_path):
    saved, optimizer = make()
    path = save(tmp_path, 1, made=(saved, optimizer))
    model, _ = make(GPTConfig(**{**vars(CONFIG), "dropout": 0.0}), steps=0)
    load_checkpoint(path, model=model)
    assert all(map(torch.equal, model.parameters(), saved.parameters()))


def test_other_optimizer_state_is_refused(tmp_path):
    model, optimizer = make(steps=1, amsgrad=True)
    before = [p.clone() for p in model.parameters()]
    path = save(tmp_path, 1)
    with pytest.raises(ValueError, match=r"expected max_exp_avg_sq for .* in .*step_000001"):
        load_checkpoint(path, model=model, optimizer=optimizer)
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters()))


def test_the_state_of_other_parameters_is_refused(tmp_path):
    made = make(steps=0)
    made[0].wpe.weight.requires_grad_(False)
    path = save(tmp_path, 1)
    with pytest.raises(ValueError, match=r"expected the optimizer's state .* got also wpe.weight;"):
        load_checkpoint(path, model=made[0], optimizer=made[1])
    path = save_checkpoint(tmp_path, step=2, model=made[0], optimizer=None)
    model, optimizer = make()
    with pytest.raises(ValueError, match=r"expected the optimizer's state .* got no h.0.attn"):
        load_checkpoint(path, model=model, optimizer=optimizer)
    load_checkpoint(path, model=model)
