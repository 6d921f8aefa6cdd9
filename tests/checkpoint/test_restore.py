"""Loading: other dtypes, parts of a model, and refusals that all ranks share. See test_reshard."""

import json
from pathlib import Path

import pytest
import torch
from cells import cells
from saved import whole_tensors

from fastpar import GPT, AdamW, GPTConfig, Mesh, parallelize
from fastpar.checkpoint.restore import (
    load_checkpoint,
    naming_damaged_file,
    read_run_state,
    read_state,
)
from fastpar.checkpoint.saver import save_checkpoint
from fastpar.testing import run_ranks

CONFIG = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=8, vocab_size=131)
FORMS = {
    "fp32": (torch.float32, {}),
    "master": (torch.bfloat16, {"master_weights": True}),
    "remainder": (torch.bfloat16, {"master_weights": "remainder"}),
    "fp16": (torch.float16, {"master_weights": True}),
    "bf16 moments": (torch.float32, {"moment_dtype": torch.bfloat16}),
    "int8 moments": (torch.float32, {"moment_dtype": torch.uint8}),
}


def build(form="fp32", *, stage=0, tp=1, seed=0, steps=2, config=CONFIG):
    dtype, options = FORMS[form]
    model = GPT(config, seed=seed).to(dtype)
    mesh = Mesh(tp=tp, device="cpu")
    parallelize(model, mesh, zero_stage=stage, grad_dtype=torch.float32)
    optimizer = AdamW(model.parameters(), lr=1e-2, **options)
    for step in range(steps):
        x = (torch.arange(8) + step)[None]
        model(x, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def save(tmp_path, made, step=2):
    return save_checkpoint(tmp_path, step=step, model=made[0], optimizer=made[1])


def masters(model, optimizer):
    """The fp32 values that a model trains, by name."""
    path = {}
    state = optimizer.state_dict()["state"]
    params = [p for g in optimizer.param_groups for p in g["params"]]
    weights = model.state_dict()
    for name, p in model.named_parameters():
        entries = state[next(i for i, q in enumerate(params) if q is p)]
        value = weights[name].float()
        if "master_weight" in entries:
            value = entries["master_weight"].clone()
        if "master_remainder" in entries:
            high = weights[name].view(torch.int16).int() << 16
            value = (high + entries["master_remainder"].int()).view(torch.float32)
        path[name] = value, entries["exp_avg"].float() if "exp_avg" in entries else None
    return path


LAYOUTS = [(2, 3, 1), (1, 0, 1), (2, 1, 1), (2, 0, 2), (4, 3, 2)]  # ranks, stage, tp
CHANGES = [
    ("fp32", "master"),
    ("fp32", "remainder"),
    ("master", "fp32"),
    ("remainder", "fp32"),
    ("master", "remainder"),
    ("remainder", "master"),
    ("fp32", "fp16"),
    ("fp16", "fp32"),
]


@pytest.mark.parametrize(("change", "layout"), cells(CHANGES, LAYOUTS, strength=1))
def test_masters_and_moments_survive_another_dtype(tmp_path, change, layout):
    (before, after), (ranks, stage, tp) = change, layout
    made = build(before)
    bits = made[1].state[made[0].wpe.weight].get("master_weight", made[0].wpe.weight.data)
    if bits.dtype == torch.float32:  # exactly between two bf16 numbers
        bits.view(torch.int32)[:4] = (bits.view(torch.int32)[:4] >> 16 << 16) + 0x8000
        made[0].wpe.weight.data.copy_(bits)
    expected = masters(*made)
    path = save(tmp_path, made)

    def work():
        model, optimizer = build(after, stage=stage, tp=tp, seed=3)
        load_checkpoint(path, model=model, optimizer=optimizer)
        return masters(model, optimizer)

    for got in run_ranks(work, ranks):
        for name, (value, moment) in expected.items():
            rows = slice(0, len(value))
            assert torch.equal(got[name][0][rows], value), name
            assert torch.equal(got[name][1][rows], moment), name


@pytest.mark.parametrize("after", ["bf16 moments", "int8 moments"])
def test_moments_are_rounded_as_load_state_dict_rounds_them(tmp_path, after):
    made = build()
    path = save(tmp_path, made)
    expected, got = build(after, steps=0), build(after, steps=0)
    expected[1].load_state_dict(made[1].state_dict())
    load_checkpoint(path, model=got[0], optimizer=got[1])
    a, b = (x[1].state_dict()["state"] for x in (expected, got))
    for i in a:
        assert a[i].keys() == b[i].keys()
        assert all(torch.equal(a[i][name], b[i][name]) for name in a[i])


def test_a_part_of_a_model(tmp_path):
    """What both have is loaded, what only one has is listed."""
    path = save(tmp_path, build())
    larger = GPTConfig(**{**vars(CONFIG), "n_layer": 3})
    model, _ = build(seed=4, config=larger)
    kept = {n: p.detach().clone() for n, p in model.named_parameters() if n.startswith("h.2.")}
    with pytest.raises(ValueError, match=r"load_checkpoint: expected the model of .* n_layer=2, "):
        load_checkpoint(path, model=model)
    state = load_checkpoint(path, model=model, strict=False)
    assert state["missing"] == [f"transformer.{n}" for n in kept]
    assert state["unexpected"] == []
    weights, _ = whole_tensors(path)
    assert torch.equal(model.wpe.weight, weights["transformer.wpe.weight"])
    assert all(torch.equal(p, kept[n]) for n, p in model.named_parameters() if n in kept)
    smaller, _ = build(config=GPTConfig(**{**vars(CONFIG), "n_layer": 1}))
    state = load_checkpoint(path, model=smaller, strict=False)
    assert len(state["unexpected"]) == len(kept)
    other, _ = build(config=GPTConfig(**{**vars(CONFIG), "block_size": 4}), steps=0)
    with pytest.raises(ValueError, match=r"expected transformer.wpe.weight of shape \[4, 32\], go"):
        load_checkpoint(path, model=other, strict=False)


def test_other_names_are_refused(tmp_path):
    path = save_checkpoint(tmp_path, step=1, model=torch.nn.Linear(2, 2), optimizer=None)
    with pytest.raises(ValueError, match=r"expected the weights of this model in .*, got no 0.wei"):
        load_checkpoint(path, model=torch.nn.Sequential(torch.nn.Linear(2, 2)))
    with pytest.raises(ValueError, match=r"expected the weights of this model in .*, got also bia"):
        load_checkpoint(path, model=torch.nn.Linear(2, 2, bias=False))


@pytest.mark.parametrize("stage", [0, 3])
def test_what_one_rank_finds_is_raised_by_all(tmp_path, stage):
    """A damaged piece is in the share of one of them."""
    path = run_ranks(lambda: save(tmp_path, build(stage=stage)), 2)[0]
    file = path / "optimizer-00002-of-00002.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-40] ^= 1
    file.write_bytes(raw)

    def work():
        model, optimizer = build(stage=stage)
        with pytest.raises(ValueError, match=r"optimizer-00002-of-00002\.safetensors \(other"):
            load_checkpoint(path, model=model, optimizer=optimizer)
        return True

    assert run_ranks(work, 2) == [True, True]


def test_a_file_cut_short_is_not_mapped(tmp_path):
    made = build()
    path = save(tmp_path, made)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        load_checkpoint(path, model=made[0], optimizer=made[1])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_weights_of_a_running_model_are_replaced(tmp_path, stage):
    """Between two steps, whatever is being gathered; and the optimizer's memory stays."""
    path = save(tmp_path, build(seed=8))
    weights, _ = whole_tensors(path)

    def work():
        model, optimizer = build(stage=stage)
        p = model.h[0].ln_1.weight
        before = optimizer.state[p]["exp_avg"].data_ptr()
        load_checkpoint(path, model=model, optimizer=optimizer)
        assert optimizer.state[p]["exp_avg"].data_ptr() == before
        x = torch.arange(8)[None]
        loss = model.eval()(x, x)
        return loss.item(), model.state_dict()["wpe.weight"]

    alone, _ = build(seed=1, steps=0)
    load_checkpoint(path, model=alone)
    x = torch.arange(8)[None]
    for loss, wpe in run_ranks(work, 2):
        assert torch.equal(wpe, weights["transformer.wpe.weight"])
        assert loss == alone.eval()(x, x).item()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "not JSON: Expecting value"),
        (b"\xff", "not UTF-8 at byte 0"),
        (b"[1]", "no JSON object but list"),
        (b'{"step": 1, "step": 2}', "'step' twice"),
        (b"{}", "step=None"),
        (b'{"step": true}', "step=True"),
        (b'{"step": 1, "model": 3}', "argument after .* must be a mapping"),
        (b'{"step": 1, "model": {"rank": 3}}', "unexpected keyword argument 'rank'"),
        (b'{"step": 1, "model": {"n_layer": "3"}}', "positive integer, got n_layer=3"),
    ],
)
def test_a_state_that_makes_no_sense(content, problem, tmp_path):
    (tmp_path / "trainer_state.json").write_bytes(content)
    text = r"read_state: expected the state of a run, got .*trainer_state.json \(.*"
    with pytest.raises(ValueError, match=text + problem):
        read_state(tmp_path)


def test_fields_that_are_used_later(tmp_path):
    for error in (KeyError("rng"), TypeError("x"), RuntimeError("RNG state is wrong size")):
        with (
            pytest.raises(ValueError, match=r"got file \(.*(rng|x|wrong size)"),
            naming_damaged_file(Path("file")),
        ):
            raise error


def test_a_state_of_another_program(tmp_path):
    state = {"step": 1, "model": {}, "dtype": "fp32", "data": "0", "next_sample": 3, "tokens": 4}
    file = tmp_path / "trainer_state.json"
    file.write_text(json.dumps(state))
    assert read_run_state(tmp_path) == state
    for name in ("model", "dtype", "data", "next_sample", "tokens"):
        file.write_text(json.dumps({key: value for key, value in state.items() if key != name}))
        text = (
            rf"read_run_state: expected a checkpoint of fastpar train, got {name}=None in .*json;"
        )
        with pytest.raises(ValueError, match=text):
            read_run_state(tmp_path)
