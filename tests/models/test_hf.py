"""Weights of transformers: the same model, the same bytes, files that are not as they should be."""

import copy
import json
import os
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from cells import cells, covering, sweep
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import fastpar.models.hf as hf
from fastpar.checkpoint.saver import Saver
from fastpar.comm.mesh import Mesh
from fastpar.engine.engine import engine_of
from fastpar.engine.parallelize import parallelize
from fastpar.files.tensor_file import TensorFile
from fastpar.models.gpt import GPT
from fastpar.settings.model import GPTConfig
from fastpar.testing import run_ranks

TINY = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=67, dropout=0.0)
# Odd vocabularies; head dims 40 and 64.
SHAPES = {
    "D40": {"vocab_size": 211, "n_positions": 37, "n_embd": 80, "n_layer": 2, "n_head": 2},
    "D64": {"vocab_size": 259, "n_positions": 64, "n_embd": 128, "n_layer": 2, "n_head": 2,
            "layer_norm_epsilon": 1e-4},
}  # fmt: skip


@pytest.fixture(scope="module")
def transformers():
    module = pytest.importorskip("transformers", reason="pip install -e '.[dev]'")
    module.utils.logging.disable_progress_bar()
    return module


@pytest.fixture(scope="module", params=SHAPES)
def pair(request, transformers, tmp_path_factory):
    """transformers' model with random weights everywhere, its folder, and ours read from it."""
    config = transformers.GPT2Config(**SHAPES[request.param], bos_token_id=None, eos_token_id=None)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(torch.randn(p.shape, generator=generator), alpha=0.05)
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder)
    return theirs, folder, hf.load_hf(folder).eval()


def random_ids(config, T, B=2):
    generator = torch.Generator().manual_seed(T)
    return torch.randint(config.vocab_size, (B, T), generator=generator)


def bytes_of(tensors):
    return {name: t.contiguous().view(torch.uint8).tolist() for name, t in tensors.items()}


@torch.no_grad()
def test_sizes_and_logits_equal_transformers_at_every_length(pair):
    theirs, _, ours = pair
    c = theirs.config
    sizes = c.n_layer, c.n_head, c.n_embd, c.n_positions, c.vocab_size
    assert ours.config == GPTConfig(*sizes, dropout=0.1, layer_norm_eps=c.layer_norm_epsilon)
    assert ours.num_parameters() == theirs.num_parameters()
    most = theirs.config.n_positions
    for T in (*range(1, most, 9), most - 1, most):
        idx = random_ids(theirs.config, T)
        expected = theirs(idx).logits
        assert expected.abs().max() > 1
        assert (ours(idx) - expected).abs().max() <= 1e-5, f"{T=}"


def test_loss_and_every_gradient_equal_transformers(pair):
    """Our error against transformers in fp64 is at most twice that of transformers in fp32, and 4
    units in the last place of the tensor's largest value, for the roundings of a GEMM's result, of
    a sum over rows and of the sum of wte's two gradients, where theirs round luckily."""
    theirs, _, ours = pair
    idx = random_ids(theirs.config, theirs.config.n_positions)

    def gradients(model):
        model.zero_grad()
        model(idx, labels=idx).loss.backward()
        return {name: p.grad for name, p in model.named_parameters()}

    exact, eager = gradients(copy.deepcopy(theirs).double()), gradients(theirs)
    ours.zero_grad()
    targets = torch.cat((idx[:, 1:], torch.full((2, 1), -100)), dim=1)
    loss = ours(idx, targets)
    assert (loss - theirs(idx, labels=idx).loss).abs() <= 1e-5
    loss.backward()
    V = theirs.config.vocab_size
    for name, p in ours.named_parameters():
        grad = p.grad[:V] if name == "wte.weight" else p.grad
        name = f"transformer.{name}"
        expected, eager_grad = (
            g[name].T if hf.is_conv1d(name) else g[name] for g in (exact, eager)
        )
        error, of_eager = ((x - expected).abs().max() for x in (grad, eager_grad))
        units = 4 * torch.finfo(torch.float32).eps * expected.abs().max()
        assert error <= 2 * of_eager + units, (name, error, of_eager, units)


@pytest.mark.parametrize(
    ("dtype", "shard"),
    cells([torch.float32, torch.float16, torch.bfloat16], [100_000, 10**9], strength=1),
)
def test_import_and_export_give_the_same_bytes(pair, transformers, tmp_path, dtype, shard):
    """transformers reads what is written."""
    theirs = copy.deepcopy(pair[0]).to(dtype)
    theirs.save_pretrained(tmp_path / "in", max_shard_size=shard)
    ours = hf.load_hf(tmp_path / "in")
    assert {p.dtype for p in ours.parameters()} == {dtype}
    hf.save_hf(ours, tmp_path / "out", max_shard_bytes=shard, eos_token_id=7)
    given, written = {}, {}
    for folder, tensors in (("in", given), ("out", written)):
        files = list((tmp_path / folder).glob("*.safetensors"))
        assert (len(files) > 1) == (shard == 100_000)
        for file in files:
            tensors |= load_file(file)
    assert (tmp_path / "out" / hf.INDEX_FILE).exists() == (shard == 100_000)
    assert {t.dtype for t in written.values()} == {dtype}
    assert bytes_of(written) == bytes_of(given)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["torch_dtype"] == str(dtype).removeprefix("torch.")
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out", torch_dtype="auto")
    assert (again.config.eos_token_id, again.config.bos_token_id) == (7, None)
    assert again.dtype == dtype
    assert bytes_of(again.state_dict()) == bytes_of(theirs.state_dict())


@pytest.fixture
def model():
    return GPT(TINY)


@pytest.fixture
def folder(model, tmp_path):
    hf.save_hf(model, tmp_path / "model")
    return tmp_path / "model"


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_weights(folder, **changes):
    """Tensors by names without "transformer.": functions of the old ones; None: left out."""
    tensors = {n: t.clone() for n, t in load_file(folder / hf.WEIGHTS_FILE).items()}
    old = dict(tensors)
    for name, change in changes.items():
        key = name if name.startswith("lm_head") else f"transformer.{name}"
        tensors[key] = change and change(old)
    save_file({n: t for n, t in tensors.items() if t is not None}, folder / hf.WEIGHTS_FILE)


def assert_same_weights(model, other):
    assert model.config == other.config
    weights = (dict(each.named_parameters()) for each in (model, other))
    torch.testing.assert_close(*weights, rtol=0, atol=0)


def test_round_trip_without_transformers(model, folder):
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert_same_weights(hf.load_hf(folder), model)
    edit_config(folder, attn_pdrop=0.3)
    assert hf.load_hf(folder, dropout=0.25).config.dropout == 0.25
    # Links, as in the caches of model hubs.
    edit_config(folder, attn_pdrop=0.0)
    for name in (hf.WEIGHTS_FILE, "config.json"):
        (folder / name).rename(folder / f"{name}.blob")
        (folder / name).symlink_to(f"{name}.blob")
    assert_same_weights(hf.load_hf(folder), model)


@pytest.mark.parametrize("max_shard_bytes", [1, 30_000])
def test_shards_hold_at_most_what_was_asked(model, tmp_path, max_shard_bytes):
    hf.save_hf(model, tmp_path, max_shard_bytes=max_shard_bytes)
    files, weights, sizes = sorted(tmp_path.glob("*.safetensors")), hf.list_weights(model), []
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / hf.INDEX_FILE).read_text())
    assert index["metadata"]["total_size"] == sum(w.nbytes for w in weights)
    for file in files:
        shard = load_file(file)
        sizes.append(sum(t.nbytes for t in shard.values()))
        assert len(shard) == 1 or sizes[-1] <= max_shard_bytes
        assert {index["weight_map"][name] for name in shard} == {file.name}
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}  # transformers < 5 refuses others
    assert all(a + b > max_shard_bytes for a, b in pairwise(sizes))
    assert [name for name, _ in hf.cut_into_files(weights, 1e9)] == ["model.safetensors"]
    cut = hf.cut_into_files(weights, max_shard_bytes)
    assert [w.key for _, ws in cut for w in ws] == [w.key for w in weights]
    assert_same_weights(hf.load_hf(tmp_path), model)


def test_keys_of_older_files_are_read(model, folder):
    """Without a prefix, with masks; a tied head may stand for the embedding."""
    old = load_file(folder / hf.WEIGHTS_FILE)
    tensors = {name.removeprefix("transformer."): t for name, t in old.items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 16, 16).tril().to(torch.uint8)
    tensors["h.1.attn.masked_bias"] = torch.tensor(-1e4)
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    for left_out in (None, "wte.weight"):
        tensors.pop(left_out, None)
        save_file(tensors, folder / hf.WEIGHTS_FILE)
        assert_same_weights(hf.load_hf(folder), model)


def test_other_tensors_are_refused_and_nothing_is_copied(model):
    tensors = {w.key: w.stored(w.tensor.detach()) + 1 for w in hf.list_weights(model)}
    before, name = copy.deepcopy(model), "transformer.h.1.mlp.c_fc.weight"
    more = [f"h.2.{part}" for part in ("ln_1.bias", "attn.c_attn.bias")]
    for given, words in (
        ({f"module.{n}": t for n, t in tensors.items()},  # as DistributedDataParallel names them
         "none of this name but module.transformer.wte.weight; rename the tensors to trans"),
        ({n: t for n, t in tensors.items() if n != name},
         f"expected a tensor {name}, got none of this name; pass"),
        ({**tensors, name: tensors[name].T},
         rf"expected {name} of shape \[32, 128\], got shape=\[128, 32\]"),
        *(({**tensors, f"transformer.{n}": torch.zeros(32)}, f"GPT-2 with n_layer=2, got {n}")
          for n in more),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            hf.load_hf_tensors(model, given)
    assert_same_weights(model, before)
    hf.load_hf_tensors(model, tensors)
    assert torch.equal(model.h[1].mlp.c_fc.weight, before.h[1].mlp.c_fc.weight + 1)
    assert torch.count_nonzero(model.wte.weight[67:]) == 0


@sweep(
    ("changes", "message"),
    [
        ({"model_type": "opt"}, "expected model_type=gpt2, got model_type=opt"),
        ({"activation_function": "gelu"}, "activation_function=gelu_new, got .*=gelu in"),
        ({"scale_attn_weights": False}, "scale_attn_weights=True, got .*=False"),
        ({"scale_attn_by_inverse_layer_idx": True}, "layer_idx=False, got .*=True"),
        ({"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn=False, got .*=True"),
        ({"is_causal": False}, "is_causal=True, got is_causal=False in"),
        ({"add_cross_attention": True}, "add_cross_attention=False, got .*=True"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings=True, got .*=False"),
        ({"n_inner": 100}, r"expected n_inner=128 \(4 \* n_embd\), got n_inner=100"),
        ({"n_embd": "32"}, "expected a number, got n_embd='32'"),
        ({"n_embd": [32]}, r"expected a number, got n_embd=\[32\]"),
        ({"layer_norm_epsilon": None}, "expected a number, got layer_norm_epsilon=None"),
        ({"n_head": True}, "expected a number, got n_head=True"),
        ({"resid_pdrop": {}}, r"expected a number, got resid_pdrop=\{\}"),
        ({"n_layer": 10**9}, "expected weights of n_layer=1000000000 layers, got 28 tensors in"),
        ({"n_embd": 2**62, "n_head": 2}, "expected sizes of a possible model, got GPTConfig"),
        ({"attn_pdrop": 0.3}, "expected one dropout rate, got embd_pdrop=0.0, attn_pdrop=0.3"),
        ({"vocab_size": 68}, r"transformer.wte.weight of shape \[68, 32\], got .*67, 32"),
        ({"n_positions": 2**40}, r"transformer.wpe.weight of shape \[1099511627776, 32\]"),
    ],
)
def test_other_architectures_are_refused_by_name(folder, changes, message, monkeypatch):
    """Before memory is taken for them."""
    monkeypatch.setattr(GPT, "to_empty", None)
    before = (folder / "config.json").read_text()
    edit_config(folder, **changes)
    with pytest.raises(ValueError, match=f"load_hf.*: .*{message}"):
        hf.load_hf(folder)
    (folder / "config.json").write_text(before)


def refused(folder, words, **options):
    with pytest.raises(ValueError, match=words):
        hf.load_hf(folder, **options)


def test_dtypes_and_heads(model, folder):
    def mix(dtype):
        edit_weights(folder, **{"wpe.weight": lambda old: old["transformer.wpe.weight"].to(dtype)})

    assert hf.load_hf(folder, dtype=torch.bfloat16).wpe.weight.dtype == torch.bfloat16
    mix(torch.float16)
    refused(folder, r"one dtype of .*torch.float16, torch.float32 in .*dtype=")
    assert hf.load_hf(folder, dtype=torch.float32).wpe.weight.dtype == torch.float32
    mix(torch.int8)
    words = r"got dtypes=torch.float32, torch.int8 in .*convert them"
    refused(folder, words, dtype=torch.float32)
    mix(torch.float32)
    head = {"lm_head.weight": lambda old: old["transformer.wte.weight"] + 1e-3}
    edit_weights(folder, **head)
    refused(folder, r"load_hf_tensors: expected lm_head.weight equal to")
    words = r"save_hf: expected parameters of .* got dtype=torch.float64"
    with pytest.raises(ValueError, match=words):
        hf.save_hf(model.double(), folder / "double")
    with pytest.raises(ValueError, match=r"Saver: expected parameters of .* dtype=torch.float64"):
        Saver(folder, model=model)


def test_damaged_or_missing_files_are_named(folder, tmp_path):
    """A pipe is not waited for."""
    refused(tmp_path / "none", r"readable config.json, got .*none/config.json \(no such")
    weights, config = folder / hf.WEIGHTS_FILE, folder / "config.json"
    weights.write_bytes(weights.read_bytes()[:-1])  # test_tensor_file.py damages them in all ways
    refused(folder, r"complete safetensors file, got .*model.safetensors \(")
    weights.unlink()
    refused(folder, r"model.safetensors or .*index.json, got neither in folder=")
    os.mkfifo(weights)
    refused(folder, r"got .*model.safetensors \(.*not a regular file")
    config.write_text("{")
    refused(folder, r"readable config.json, got .*config.json \(")
    config.write_text("[]")
    refused(folder, r"got .*config.json \(not a JSON object but list\)")
    config.unlink()
    os.mkfifo(config)
    refused(folder, r"got .*config.json \(.*not a regular file")


def test_damaged_shards_are_named(model, tmp_path):
    hf.save_hf(model, tmp_path, max_shard_bytes=30_000)
    shard, index = sorted(tmp_path.glob("*.safetensors"))[1], tmp_path / hf.INDEX_FILE
    shard.unlink()
    refused(tmp_path, f"complete safetensors file, got .*{shard.name}")
    for name in ("../model.safetensors", "/etc/passwd", "a/b", "..", 3):
        index.write_text(json.dumps({"weight_map": {"a": name}}))
        refused(tmp_path, r"expected names of files in the folder, got .*index")
    index.write_text("{}")
    refused(tmp_path, r"expected a weight_map with file names, got .*=None")


def test_a_saved_model_is_never_overwritten(model, folder):
    before = (folder / hf.WEIGHTS_FILE).read_bytes()
    with pytest.raises(ValueError, match=r"save_hf: expected a folder without a model, got folder"):
        hf.save_hf(GPT(TINY, seed=1), folder)
    assert (folder / hf.WEIGHTS_FILE).read_bytes() == before
    with pytest.raises(ValueError, match="expected max_shard_bytes >= 1, got max_shard_bytes=0"):
        hf.save_hf(model, folder / "new", max_shard_bytes=0)


def test_a_failed_save_leaves_no_model_and_can_be_repeated(model, tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text("{}")
    opened = set()

    class FailAtTheThird(TensorFile):
        def write(self, name, tensor):
            super().write(name, tensor)
            opened.add(self)
            if len(opened) == 3:
                raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(hf, "TensorFile", FailAtTheThird)
        with pytest.raises(OSError, match="disk full"):
            hf.save_hf(model, tmp_path, max_shard_bytes=30_000)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2
    assert not list(tmp_path.glob(".*"))
    with pytest.raises(ValueError, match=r"readable config.json, got .* \(no such file\)"):
        hf.load_hf(tmp_path)
    hf.save_hf(model, tmp_path, max_shard_bytes=30_000)
    assert_same_weights(hf.load_hf(tmp_path), model)
    assert (tmp_path / "tokenizer.json").exists()


@covering(1, ("vocab_size", [67, 256, 301]), ("stage", [0, 3]))  # 1, 2 and 3 times 128 rows
def test_ranks_that_split_a_model_read_whole_tensors(vocab_size, stage, tmp_path):
    config = replace(TINY, vocab_size=vocab_size)
    model = GPT(config, seed=1)
    hf.save_hf(model, tmp_path / "whole")

    def split():
        parts = parallelize(GPT(config, seed=0), Mesh(tp=2, device="cpu"), zero_stage=stage)
        engine = engine_of(parts)
        with engine.gathered():
            parts.wte.weight.detach().fill_(torch.nan)  # the padding's rows too
        with engine.gathered():
            hf.load_hf_tensors(parts, load_file(tmp_path / "whole" / hf.WEIGHTS_FILE))
        state = parts.state_dict()  # joins the slices
        with engine.gathered():
            rows = parts.wte.weight.detach().clone()
        with pytest.raises(ValueError, match=r"full weights on each rank, got one with tp=2; load"):
            hf.save_hf(parts, tmp_path / "not written")
        return state, rows

    for state, rows in run_ranks(split, 4 if stage else 2):
        for name, p in model.state_dict().items():
            assert torch.equal(state[name], p), name
        assert rows.shape[0] == (256 if vocab_size == 301 else 128)
        assert rows.isfinite().all()
    assert not (tmp_path / "not written").exists()


def test_files_of_an_unfinished_save_are_not_read(model, tmp_path):
    other = GPT(TINY, seed=1)
    for size in (10**9, 30_000, 10**9):
        hf.save_hf(other, tmp_path, max_shard_bytes=size)
        (tmp_path / "config.json").unlink()
        hf.save_hf(model, tmp_path, max_shard_bytes=30_000 if size > 30_000 else 10**9)
        assert_same_weights(hf.load_hf(tmp_path), model)
        assert (tmp_path / hf.INDEX_FILE).exists() == (size > 30_000)
        (tmp_path / "config.json").unlink()


def test_without_safetensors_the_message_says_what_to_install(model, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r"pip install 'fastpar\[train\]'"):
        hf.load_hf(folder)
    hf.save_hf(model, folder / "new")  # needs no package
    assert (folder / "new" / hf.WEIGHTS_FILE).stat().st_size > 0


def described(model):
    """Names, and files that they are cut into."""
    weights = hf.list_weights(model)
    files = [(file, [w.key for w in ws]) for file, ws in hf.cut_into_files(weights, 30_000)]
    return [(w.name, w.key, w.shape, w.transposed) for w in weights], files


@pytest.mark.parametrize(("ranks", "tp", "stage"), [(2, 1, 3), (2, 2, 0), (4, 2, 3)])
def test_the_layout_does_not_depend_on_the_mesh(ranks, tp, stage):
    def work():
        model = GPT(TINY)
        model.wpe.weight.requires_grad_(False)
        return described(parallelize(model, Mesh(tp=tp, device="cpu"), zero_stage=stage))

    assert run_ranks(work, ranks) == [described(GPT(TINY))] * ranks


def test_any_module_keeps_its_names_and_buffers():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(3, 2))
    model[2].weight = model[0].weight
    names = [w.key for w in hf.list_weights(model)]
    assert names == [n for n in model.state_dict() if n != "2.weight"][:4] + ["2.bias"] + [
        f"1.{b}" for b in ("running_mean", "running_var", "num_batches_tracked")
    ]
