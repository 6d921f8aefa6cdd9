"""Round trips: the same bits back, in any layout, storage and model; what is refused on the way."""

import itertools
import json
import re
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from cells import cells, slow, sweep
from nanogpt_cells import NanoGPT
from optimizers import BF16, MODES, adamw, assert_same
from saved import bits, named_state, whole_tensors
from torch import nn

from fastpar import GPT, AdamW, GPTConfig, Mesh, Muon, parallelize
from fastpar.checkpoint import commands, reader, restore
from fastpar.checkpoint.commands import examine
from fastpar.checkpoint.manifest import read_manifest
from fastpar.checkpoint.reader import newest_checkpoint, verify_checkpoint
from fastpar.checkpoint.restore import load_checkpoint, load_weights, read_run_state, read_state
from fastpar.checkpoint.saver import Saver, save_checkpoint
from fastpar.data.tokenizer import make_tokenizer
from fastpar.files.runs import list_checkpoints, point_latest
from fastpar.files.tensor_file import STORED
from fastpar.optim.schedule import param_groups
from fastpar.testing import run_ranks

CONFIG = GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=131, dropout=0.1)
HALF_MOMENTS = (BF16, adamw, {"master_weights": "remainder", "moment_dtype": BF16})
FORMS = {**MODES, "remainder, bf16 moments": HALF_MOMENTS}  # of a model and its optimizer


def make(config=CONFIG, form="fp32", seed=0, steps=2, *, mesh=None, stage=0, frozen=()):
    dtype, _, options = FORMS[form]
    model = GPT(config, seed=seed).to(dtype)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    ranks, rank = 1, 0
    if mesh is not None:
        parallelize(model, mesh, zero_stage=stage, grad_dtype=torch.float32)
        ranks, rank = mesh.dp_size, mesh.dp_rank
    optimizer = AdamW(param_groups(model, 0.1), lr=1e-2, **options)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        idx = torch.randint(0, config.vocab_size, (4, 9), generator=generator).chunk(ranks)[rank]
        model(idx[:, :-1], idx[:, 1:], rng_key=torch.tensor([1, step])).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def save(run, made, step=2, **state):
    given = {"model": made[0], "optimizer": made[1], "tokenizer": make_tokenizer("bytes")}
    return save_checkpoint(run, step=step, state=state, **given)


@sweep("form", ["fp32", "amsgrad", "bf16-master", "remainder, bf16 moments", "8-bit-stochastic"])
def test_same_bits_back(tmp_path, form):
    """In a new optimizer, and in the memory of one that has taken steps."""
    made = make(form=form)
    path = save(tmp_path / form, made, tokens=7, rng={"a": [1]})
    verify_checkpoint(path)
    expected = named_state(*made)
    for seed, steps in ((5, 0), (6, 3)):
        model, optimizer = make(form=form, seed=seed, steps=steps)
        before = {p: {n: x.data_ptr() for n, x in s.items()} for p, s in optimizer.state.items()}
        state = load_checkpoint(path, model=model, optimizer=optimizer)
        assert (state["step"], state["tokens"], state["rng"]) == (2, 7, {"a": [1]})
        assert state["model"]["n_layer"] == 2
        assert_same(named_state(model, optimizer), expected)
        for p, places in before.items():
            assert {n: optimizer.state[p][n].data_ptr() for n in places} == places


LAYOUTS = [(2, 3, 1), (1, 0, 1), (4, 3, 2)]  # ranks, stage, tp
CHANGES = [
    *itertools.permutations(("fp32", "bf16-master", "remainder"), 2),
    ("fp32", "fp16-master"),
    ("fp16-master", "fp32"),
]


def masters(model, optimizer):
    """The fp32 values that a model trains and their first moments, by name."""
    state = named_state(model, optimizer)
    found = {}
    for name, _ in model.named_parameters():
        value = state.get(f"{name}/master_weight", state[name].float())
        if f"{name}/master_remainder" in state:
            high = state[name].view(torch.int16).int() << 16
            value = (high + state[f"{name}/master_remainder"].int()).view(torch.float32)
        found[name] = value, state[f"{name}/exp_avg"].float()
    return found


@pytest.mark.parametrize(("change", "layout"), cells(CHANGES, LAYOUTS, strength=1))
def test_masters_and_moments_survive_another_dtype(tmp_path, change, layout):
    (before, after), (ranks, stage, tp) = change, layout
    made = make(form=before, steps=2)
    wpe = made[1].state[made[0].wpe.weight].get("master_weight", made[0].wpe.weight.data)
    if wpe.dtype == torch.float32:  # exactly between two bf16 numbers
        wpe.view(torch.int32)[:4] = (wpe.view(torch.int32)[:4] >> 16 << 16) + 0x8000
        made[0].wpe.weight.data.copy_(wpe)
    expected, path = masters(*made), save(tmp_path, made)

    def work():
        again = make(form=after, seed=3, mesh=Mesh(tp=tp, device="cpu"), stage=stage)
        load_checkpoint(path, model=again[0], optimizer=again[1])
        return masters(*again)

    for got in run_ranks(work, ranks):
        for name, (value, moment) in expected.items():
            rows = slice(0, len(value))
            assert torch.equal(got[name][0][rows], value), name
            assert torch.equal(got[name][1][rows], moment), name


@sweep("after", ["bf16-moments", "8-bit"])
def test_moments_are_rounded_as_load_state_dict_rounds_them(tmp_path, after):
    made = make()
    path = save(tmp_path / after, made)
    expected, got = make(form=after, steps=0), make(form=after, steps=0)
    expected[1].load_state_dict(made[1].state_dict())
    load_checkpoint(path, model=got[0], optimizer=got[1])
    a, b = (x[1].state_dict()["state"] for x in (expected, got))
    for i in a:
        assert_same(b[i], a[i])


@sweep("stage", [0, 3])
def test_weights_of_a_running_model_are_replaced(tmp_path, stage):
    """Between two steps, whatever is being gathered."""
    path, x = save(tmp_path / f"{stage}", make(seed=8)), torch.arange(8)[None]
    weights, _ = whole_tensors(path)

    def work():
        model, optimizer = make(mesh=Mesh(device="cpu"), stage=stage)
        load_checkpoint(path, model=model, optimizer=optimizer)
        return model.eval()(x, x).item(), model.state_dict()["wpe.weight"]

    alone, _ = make(seed=1, steps=0)
    load_checkpoint(path, model=alone)
    for loss, wpe in run_ranks(work, 2):
        assert torch.equal(wpe, weights["transformer.wpe.weight"])
        assert loss == alone.eval()(x, x).item()


@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (2, 3)])
def test_a_link_that_moves_while_it_is_read(tmp_path, monkeypatch, ranks, stage):
    """As run/latest does while the run saves: all is read from one checkpoint, on every rank."""
    paths = itertools.cycle([save(tmp_path, make(seed=n), step=n, n=n) for n in (1, 2)])

    def moving(real):
        def call(*args, **options):
            found = real(*args, **options)
            point_latest(tmp_path, next(paths))
            return found

        return call

    for module in (commands, reader, restore):
        for name in ("read_manifest", "linked"):
            monkeypatch.setattr(module, name, moving(getattr(module, name)))

    def work():
        mesh = Mesh(device="cpu")
        model, optimizer = make(mesh=mesh, stage=stage)
        latest = tmp_path / "latest"
        state = load_checkpoint(latest, model=model, optimizer=optimizer)
        return state["n"], model.state_dict()["wpe.weight"]

    found = run_ranks(work, ranks)
    expected = whole_tensors(tmp_path / "checkpoints" / f"step_00000{found[0][0]}")[0]
    for n, wpe in found:
        assert n == found[0][0]
        assert torch.equal(wpe, expected["transformer.wpe.weight"])
    if ranks > 1:
        return
    said = []
    assert commands.verify(tmp_path / "latest", said.append, "wpe.weight")
    assert "DAMAGED" not in "".join(said)
    verify_checkpoint(tmp_path / "latest")
    load_weights(tmp_path / "latest")
    commands.export_weights(tmp_path / "latest", tmp_path / "to", torch.bfloat16)


def test_a_part_of_a_model_and_another_dropout(tmp_path):
    """What both have is loaded, what only one has is listed."""
    saved, _ = made = make()
    path = save(tmp_path, made)
    model, _ = make(replace(CONFIG, dropout=0.0), seed=4, steps=0)
    load_checkpoint(path, model=model)
    assert all(map(torch.equal, model.parameters(), saved.parameters()))
    model, _ = make(replace(CONFIG, n_layer=3), seed=4)
    kept = {n: p.detach().clone() for n, p in model.named_parameters() if n.startswith("h.2.")}
    state = load_checkpoint(path, model=model, strict=False)
    assert (state["missing"], state["unexpected"]) == ([f"transformer.{n}" for n in kept], [])
    assert torch.equal(model.wpe.weight, saved.wpe.weight)
    assert all(torch.equal(p, kept[n]) for n, p in model.named_parameters() if n in kept)
    smaller, _ = make(replace(CONFIG, n_layer=1))
    assert len(load_checkpoint(path, model=smaller, strict=False)["unexpected"]) == len(kept)


class Extra(nn.Linear):
    def get_extra_state(self):
        return 1

    def set_extra_state(self, state):
        pass


def odd_buffer():
    layer = nn.Linear(2, 2)
    layer.register_buffer("odd", torch.zeros(1, dtype=torch.complex128))
    return layer


def of_another():
    return nn.Linear(2, 2), AdamW(nn.Linear(3, 2).parameters())


class Schedule:
    """No optimizer."""


@sweep(
    ["made", "words"],
    [
        (
            lambda: (nn.Sequential(nn.ReLU(), Extra(2, 2)), None),
            r"get_extra_state\(\) of 1, a Extra;",
        ),
        (lambda: (odd_buffer(), None), "got odd of dtype=torch.complex128; convert it, or regi"),
        (
            of_another,
            r"parameter 0 of group 0 of shape \[2, 3\], which the model lacks; pass a mod",
        ),
        (lambda: (nn.Linear(2, 2), Schedule()), "an optimizer, got optimizer=Schedule; pass fas"),
    ],
)
def test_what_a_checkpoint_would_leave_out(tmp_path, made, words):
    model, optimizer = made()
    with pytest.raises(ValueError, match=f"Saver: expected .*{words}"):
        Saver(tmp_path, model=model, optimizer=optimizer)
    if optimizer is not None:
        with pytest.raises(ValueError, match=f"load_checkpoint: expected .*{words}"):
            load_checkpoint(tmp_path, model=model, optimizer=optimizer)


@sweep(
    ["where", "state", "words"],
    [
        ("count", 3, "state under 'count', which is no parameter of the model; save it yourself"),
        (None, {7: torch.ones(2)}, "a state of parameters with the name 7;"),
        (None, {"a/b": torch.ones(2)}, "a state of parameters with the name 'a/b';"),
        (None, {"history": [1]}, "a state of parameters with history of type list;"),
    ],
)
def test_state_of_an_optimizer_that_has_no_place(tmp_path, where, state, words):
    """Found when it appears; the run goes on."""
    model = nn.Linear(2, 2)
    optimizer = AdamW(model.parameters())
    optimizer.state[model.weight if where is None else where] = state
    saver = Saver(tmp_path, model=model, optimizer=optimizer, asynchronous=False)
    saver.save(1, {})
    assert f"expected an optimizer whose state can be saved, got {words}" in saver.last.errors[0]
    assert not list_checkpoints(tmp_path)


@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (2, 3)])
def test_buffers_of_every_dtype(tmp_path, ranks, stage):
    assert {torch.float8_e4m3fn, torch.uint16, torch.complex64} < set(STORED.values())

    def build(fill):
        layer = nn.Linear(2, 2)
        for name, dtype in STORED.items():
            raw = torch.arange(64, dtype=torch.uint8) % (2 if dtype == torch.bool else 64)
            layer.register_buffer(name, (raw * fill).view(dtype).view(2, -1))
        return parallelize(layer, Mesh(device="cpu"), zero_stage=stage)

    def work():
        model, again = build(1), build(0)
        path = save(tmp_path, (model, None))
        load_checkpoint(path, model=again)
        for (name, found), expected in zip(again.named_buffers(), model.buffers(), strict=True):
            raw = [x.contiguous().view(torch.uint8) for x in (found, expected)]
            assert torch.equal(*raw), name
        return path

    path = run_ranks(work, ranks)[0]
    said = []
    assert commands.verify(path, said.append, "")
    assert len([line for line in said if line.startswith(tuple(STORED))]) == len(STORED)


def test_a_run_instead_of_its_checkpoint(tmp_path):
    model, path = make(steps=0)[0], save(tmp_path, make(steps=0))
    for named in (tmp_path / "latest", path):
        for load in (lambda path: load_checkpoint(path, model=model), load_weights):
            words = f"load_.*: expected the folder of a check.*, got path={tmp_path}, .* {named}$"
            with pytest.raises(ValueError, match=words):
                load(tmp_path)
        (tmp_path / "latest").unlink(missing_ok=True)


def test_a_model_in_a_wrapper(tmp_path):
    """Nothing would be loaded, which strict=False refuses too."""
    plain = make(steps=0)[0]
    wrapped = nn.ModuleDict({"module": make(steps=0)[0]})
    for saved, model, name in (
        (wrapped, plain, "transformer.wte.weight"),
        (plain, wrapped, "module.wte.weight"),
    ):
        path = save(tmp_path / name, (saved, None))
        for strict in (True, False):
            words = rf"got no {name}; load it into the same model, without a wrapper whose name"
            with pytest.raises(ValueError, match=words):
                load_checkpoint(path, model=model, strict=strict)


def linear(**options):
    return torch.nn.Linear(2, 2, **options), None


def frozen():
    return make(steps=0, frozen=("wpe.weight",))


def of(**changes):
    return lambda: make(replace(CONFIG, **changes), steps=0)


def without_optimizer():
    return make()[0], None


def nested():
    return torch.nn.Sequential(linear()[0]), None


@sweep(
    ["saved", "target", "strict", "words"],
    [
        (make, of(n_layer=3), True, "the model of .* with n_layer=2, got n_layer=3; resume"),
        (make, of(block_size=4), False, r"transformer.wpe.weight of shape \[4, 16\], go"),
        (make, lambda: make(form="amsgrad", steps=1), True, "expected max_exp_avg_sq for .* in .*"),
        (make, frozen, True, "expected the optimizer's state .* got also wpe.weight;"),
        (without_optimizer, make, True, "expected the optimizer's state .* got none; resu"),
        (linear, nested, True, "expected the weights of this model in .*, got no 0.wei"),
        (linear, lambda: linear(bias=False), True, "weights of this model .*, got also bia"),
    ],
)
def test_what_does_not_fit_is_refused_and_left_alone(tmp_path, saved, target, strict, words):
    model, optimizer = saved()
    path = save_checkpoint(tmp_path, step=1, model=model, optimizer=optimizer)
    model, optimizer = target()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=words):
        load_checkpoint(path, model=model, optimizer=optimizer, strict=strict)
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters()))


def test_ranks_that_split_a_model_refuse_together(tmp_path):
    wide = replace(CONFIG, vocab_size=301)

    def split(work, **options):
        return run_ranks(lambda: work(*make(wide, mesh=Mesh(tp=2, device="cpu"), **options)), 2)

    for changes, message in (
        ({"vocab_size": 300}, "vocab_size=300, got vocab_size=301"),  # in as many padded rows
        ({"n_embd": 32}, "n_embd=32, got n_embd=16"),
    ):
        path = save(tmp_path, make(replace(wide, **changes)))

        def work(model, optimizer, path=path, message=message):
            before = [p.detach().clone() for p in model.parameters()]
            with pytest.raises(ValueError, match=f"expected the model of .* with {message}; resu"):
                load_checkpoint(path, model=model, optimizer=optimizer)
            return all(map(torch.equal, before, model.parameters()))

        assert split(work) == [True, True]
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(ValueError, match=r"is split, which optimizer state .* does not support"):
        split(lambda *made: save(tmp_path, made), form="8-bit")
    assert not list_checkpoints(tmp_path)


def test_a_state_that_is_none(tmp_path):
    (tmp_path / "trainer_state.json").write_bytes(b"[1]")
    words = r"the state of a run, got .*trainer_state.json \(not a JSON object but list\); the"
    with pytest.raises(ValueError, match=words):
        read_state(tmp_path)


def test_a_state_of_another_program(tmp_path):
    state = {"step": 1, "model": {}, "dtype": "fp32", "data": "0", "next_sample": 3, "tokens": 4}
    file = tmp_path / "trainer_state.json"
    file.write_text(json.dumps(state))
    assert read_run_state(tmp_path) == state
    for name in ("model", "dtype", "data", "next_sample", "tokens"):
        file.write_text(json.dumps({key: value for key, value in state.items() if key != name}))
        text = rf"read_run_state: expected a checkpoint of fastpar train, got {name}=None in .*json"
        with pytest.raises(ValueError, match=text):
            read_run_state(tmp_path)


@sweep(
    ["state", "problem"],
    [
        ({"step": 7}, "expected a state without key 'step', which save.. adds; rename"),
        ({"model": "x"}, "expected a state without key 'model'"),
        ({"x": "a" * (1 << 25)}, r"can be read back, got 33\d+ bytes; save large"),
        ({"x": torch.ones(2)}, "expected a state of JSON values, got Object of type Tensor is not"),
    ],
)
def test_a_state_that_could_not_be_read_back_fails_on_all_ranks(tmp_path, state, problem):
    """Also that of one rank; one that raised left the others waiting."""

    def work():
        mesh = Mesh(device="cpu")
        saver = Saver(tmp_path, model=parallelize(torch.nn.Linear(2, 2), mesh))
        saver.save(1, state if mesh.rank == 0 else {})
        return saver.settle().errors

    first, other = run_ranks(work, 2)
    assert first == other
    assert re.search("^rank 0: .*" + problem, first[0])
    assert not list_checkpoints(tmp_path)


# Any model: what Saver commits verifies, loads and goes on
SIZES = {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}


def transformers():
    return pytest.importorskip("transformers", reason="pip install -e '.[dev]'")


class Odd(nn.Module):
    """Names that look like a GPT-2's, shapes of any kind, a buffer that two modules share."""

    def __init__(self):
        super().__init__()
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(32, 8), "norm": nn.BatchNorm1d(8), "h": nn.Conv1d(8, 8, 1)}
        )
        self.scale = nn.Parameter(torch.rand(()))
        self.empty = nn.Parameter(torch.rand(0, 3))
        table = torch.rand(4)
        for module in (self, self.transformer.wte, self.transformer.h):
            module.register_buffer("table", table)
        self.register_buffer("mask", torch.rand(3) > 0.5)

    def forward(self, idx):
        x = self.transformer.wte(idx).transpose(1, 2)
        return self.transformer.h(self.transformer.norm(x)) * self.scale + self.empty.sum()


class Partly(nn.Module):
    """A layer that is used, and one that never gets a gradient, or is no optimizer's."""

    def __init__(self, kind, head_alone=False, dtype=torch.float32):
        super().__init__()
        self.unused, self.head = nn.Linear(24, 24), nn.Linear(24, 24)
        self.kind, self.head_alone, self.uses_all = kind, head_alone, False
        self.to(dtype)

    def optimizer(self):
        return self.kind([*(self.head if self.head_alone else self).parameters()])

    def forward(self, idx):
        x = torch.linspace(-1, 1, 24, dtype=self.head.weight.dtype)[None]
        return self.head(self.unused(x) if self.uses_all else x)


def muon(params):
    return Muon([{"params": [p], "adamw": p.dim() != 2} for p in params])


def hugging(name, config, **sizes):
    def build():
        library = transformers()
        return getattr(library, name)(getattr(library, config)(**sizes))

    return build


GPT2 = {**SIZES, "n_positions": 8, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
FALCON = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
OURS = GPTConfig(**SIZES, block_size=8, dropout=0.0)
MODELS = {
    "GPT": lambda: GPT(OURS, seed=int(torch.randint(9, ()))),
    "nanoGPT": lambda: NanoGPT(**SIZES, block_size=8, bias=False),
    "GPT2LMHeadModel": hugging("GPT2LMHeadModel", "GPT2Config", **GPT2),
    "untied": hugging("GPT2LMHeadModel", "GPT2Config", **GPT2, tie_word_embeddings=False),
    "scores": hugging("GPT2ForSequenceClassification", "GPT2Config", **GPT2, pad_token_id=0),
    "GPT-J": hugging("GPTJForCausalLM", "GPTJConfig", **{**GPT2, "rotary_dim": 4}),
    "Falcon": hugging("FalconForCausalLM", "FalconConfig", **FALCON),
    "any module": Odd,
    "unused": lambda: Partly(partial(AdamW, lr=0.1, master_weights=True)),
    "unused, torch's": lambda: Partly(torch.optim.RAdam),
    "no optimizer's, Muon": lambda: Partly(muon, True),
    "no optimizer's, fp16": lambda: Partly(partial(AdamW, master_weights=True), True, torch.half),
}
CHEAP = ("nanoGPT", "any module", *[*MODELS][-4:])


def start(build, stage, seed):
    torch.manual_seed(seed)
    model = parallelize(build(), Mesh(device="cpu"), zero_stage=stage)
    partly = isinstance(model, Partly)
    return model, model.optimizer() if partly else AdamW(model.parameters(), lr=1e-2)


def step(model, optimizer, seed):
    ids = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(seed))
    if isinstance(model, GPT):
        loss = model(ids, ids)
    else:
        out = model(ids)
        loss = ((out if torch.is_tensor(out) else out[0]) - 1.0).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def goes_on(build, folder, stage):
    """Two steps, a checkpoint, a third; and the third from the checkpoint, in another model that
    has state, also where the checkpoint has none."""
    made = start(build, stage, seed=1)
    for i in range(2):
        step(*made, i)
    saved = save(folder / "a", made)
    step(*made, 2)
    third = save(folder / "b", made, step=3)
    again = start(build, stage, seed=2)
    again[0].uses_all = not getattr(again[0], "head_alone", True)
    step(*again, 9)
    again[0].uses_all = False
    assert load_checkpoint(saved, model=again[0], optimizer=again[1])["step"] == 2
    same = save(folder / "c", again)
    step(*again, 2)
    return saved, same, third, save(folder / "d", again, step=3)


@pytest.mark.parametrize("name", [n if n in CHEAP else slow(n) for n in MODELS])
def test_every_model_comes_back_and_goes_on(tmp_path, name):
    build = MODELS[name]
    build()  # skips without transformers
    for stage, ranks in ((0, 1), (3, 2)):
        folder = tmp_path / f"{stage}"
        saved, same, third, resumed = run_ranks(goes_on, ranks, build, folder, stage)[0]
        assert bits(saved) == bits(same) != bits(third) == bits(resumed)
        assert newest_checkpoint(folder / "a") == saved
        assert examine(saved).damage == []
        assert read_manifest(saved).model == ("gpt" if name == "GPT" else "module")
    made = start(build, 0, seed=3)  # what two ranks wrote, in one process
    load_checkpoint(saved, model=made[0], optimizer=made[1])
    assert bits(save(tmp_path / "one", made)) == bits(saved)
    if name in ("GPT2LMHeadModel", "GPT"):
        theirs = transformers().GPT2LMHeadModel.from_pretrained(tmp_path / "one" / "latest").eval()
        idx = torch.arange(8)[None]
        ours = made[0].eval()(idx)
        ours = ours if torch.is_tensor(ours) else ours.logits
        with torch.no_grad():  # the same products, in another order of sums of 16 values
            assert (theirs(idx).logits - ours).abs().max() < 1e-5
    if name == "nanoGPT":
        words = r"of a GPT-2 with config.json, got path=.* another mo"
        with pytest.raises(ValueError, match=words):
            load_weights(saved)
