"""`fastpar plan --model FOLDER`: predicted peaks of transformers' models against measured ones."""

import gc
import json
import re
import sys

import pytest
import torch

from fastpar.axes.step import Setup
from fastpar.cli import main
from fastpar.comm.mesh import Mesh
from fastpar.engine.parallelize import parallelize
from fastpar.files.tensor_file import DTYPES
from fastpar.optim.adamw import AdamW
from fastpar.predict.folder import FolderModel, longest, predict_folder
from fastpar.predict.measure import StepMemory, alive_bytes
from fastpar.testing import run_ranks

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable")

LENGTH = 128
SMALL = {
    "hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 8, "vocab_size": 2000,
    "num_hidden_layers": 4, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
KINDS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL, num_key_value_heads=4),
    "tied": lambda: transformers.Qwen2Config(
        **SMALL, num_key_value_heads=4, tie_word_embeddings=True
    ),
    "neox": lambda: transformers.GPTNeoXConfig(**{**SMALL, "vocab_size": 4000}),
    "gpt2": lambda: transformers.GPT2Config(
        n_layer=4, n_embd=256, n_head=8, vocab_size=2000, n_positions=512, bos_token_id=1,
        eos_token_id=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ),
}  # fmt: skip
SHORT = {"colwise": "column", "rowwise": "row", "embedding_rowwise": "vocab"}


def made(kind, dtype):
    model = transformers.AutoModelForCausalLM.from_config(KINDS[kind]())
    return model.to(DTYPES[dtype]).train()


def measure(kind, s):
    """The peak of the third step of a plain loop, without what earlier cells have left."""
    while gc.collect():
        pass
    left = alive_bytes()
    model, mesh, more = made(kind, s.dtype), Mesh(tp=s.tp, device="cpu"), {}
    if s.recompute.activation_checkpointing == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if s.tp > 1 and kind != "gpt2":
        more = {"tp_plan": {name: SHORT.get(how, "head") for name, how in model.tp_plan.items()}}
    parallelize(model, mesh, zero_stage=s.parallel.zero_stage, grad_dtype=torch.float32, **more)
    optimizer = AdamW(model.parameters(), lr=1e-4, master_weights=s.dtype == "bf16")

    def step():
        ids = torch.randint(0, 1000, (s.micro_batch_size, LENGTH))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    gc.collect()
    with StepMemory(mesh.device) as memory:
        step()
    return memory.peak_bytes - left


def measure_all(cells):
    """On a rank that is a process."""
    torch.set_num_threads(1)
    return [measure(*cell) for cell in cells]


def predict(kind, s):
    with torch.device("meta"):
        model = made(kind, s.dtype)
    split = FolderModel(model, s.tp)
    sizes = split.sizes(1, LENGTH).at(split.sizes(2, LENGTH), s.micro_batch_size)
    return predict_folder(split, s, sizes).total


def cell(kind, ranks, stage, tp, micro_batch, mode, dtype):
    how = {"zero_stage": stage, "tp": tp, "micro_batch_size": micro_batch, "dtype": dtype}
    how["activation_checkpointing"] = mode
    return kind, Setup(ranks, device_type="cpu", transport="shm", **how)


EVERY = [
    cell(kind, *row)
    for kind in KINDS
    for row in (
        (1, 0, 1, 4, "none", "fp32"), (1, 0, 1, 1, "none", "bf16"), (1, 0, 1, 8, "full", "fp32"),
        (2, 0, 1, 2, "none", "bf16"), (2, 2, 1, 2, "none", "fp32"), (2, 3, 1, 4, "none", "bf16"),
        (2, 3, 1, 4, "full", "fp32"),
    )
]  # fmt: skip
EVERY.append(cell("llama", 2, 0, 2, 4, "none", "fp32"))
FEW = [cell("llama", 1, 0, 1, 4, "none", "fp32"), cell("gpt2", 1, 0, 1, 8, "full", "fp32")]


def check(cells):
    for ranks in sorted({s.world_size for _, s in cells}):
        some = [one for one in cells if one[1].world_size == ranks]
        if ranks == 1:
            peaks = [[measure(*one) for one in some]]
        else:
            peaks = run_ranks(measure_all, ranks, some, backend="gloo", timeout_s=900)
        for one, of_ranks in zip(some, zip(*peaks, strict=True), strict=True):
            assert predict(*one) == pytest.approx(max(of_ranks), rel=0.1), one


def test_the_peak_of_a_plain_loop_is_predicted():
    check(FEW)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_peak_of_every_kind_of_model_is_predicted():
    """Rotary and learned positions, gated and plain MLPs, tied and own heads; stages; tp."""
    check(EVERY)


def test_two_runs_tell_all_sizes():
    with torch.device("meta"):
        split = FolderModel(made("llama", "bf16"))
    one, two, five = (split.sizes(n, 64) for n in (1, 2, 5))
    for name, value in vars(one.at(two, 5)).items():
        # Which op needs most can depend on the size.
        assert value == pytest.approx(getattr(five, name), rel=0.2 if name == "needs" else 1e-3)
    assert five.kept[0] > 4 * one.kept[0] > 0


def folder(tmp_path, config):
    config.save_pretrained(tmp_path)
    return ["plan", "--model", str(tmp_path)]


def test_what_is_printed_and_stored(tmp_path, capsys):
    config = transformers.LlamaConfig(architectures=["LlamaForCausalLM"])  # of 7 billion
    words = folder(tmp_path, config)
    stored = tmp_path / "p.json"
    words += ["--gpus", "8", "--block-size", "512", "--batch-size", "64"]
    assert main([*words, "--json", str(stored)]) == 0
    out = capsys.readouterr().out
    assert "LlamaForCausalLM: 6,738,415,616 parameters" in out
    assert "fastpar.parallelize(model, fastpar.Mesh(), zero_stage=1)" in out
    rows, limit = json.loads(stored.read_text())["layouts"], 72.2e9
    assert {row["zero_stage"] for row in rows} == {0, 1, 2, 3}
    assert {row["tp"] for row in rows} == {1, 2, 4, 8}
    assert all(row["fits"] == (row["memory_bytes"]["total"] <= limit) for row in rows)
    states = {
        row["zero_stage"]: row["memory_bytes"]
        for row in rows
        if row["tp"] == 1 and row["activation_checkpointing"] == "full"
    }
    n = 6_738_415_616
    assert states[0]["optimizer"] == pytest.approx(12 * n, rel=0.01)
    assert states[3]["parameters"] == pytest.approx(2 * n / 8, rel=0.01)
    assert main([*words, "--gpu", "a100-40", "--gpus-per-node", "1"]) == 0
    assert "dp 8, ZeRO-2" in capsys.readouterr().out.splitlines()[-2]  # 34.8 of 36.2 GB
    words[3:] = "--gpus", "2", "--block-size", "512", "--batch-size", "1"  # so not over dp
    assert main(words) == 0
    out = capsys.readouterr().out
    assert '    "model.layers.*.self_attn.o_proj": "row",' in out
    assert out.endswith("(model, fastpar.Mesh(tp=2), zero_stage=0, tp_plan=plan)\n")


def test_bad_input(tmp_path, capsys):
    words = folder(tmp_path, transformers.LlamaConfig(architectures=["LlamaForCausalLM"]))
    few = ["--batch-size", "8", "--block-size", "128"]
    for more, said in (
        (
            ["--gpus", "1", *few],
            r"fits into 72.1 GB a rank, got .*, which takes 12\d.\d GB; use --gpus 2, --gpu \w+",
        ),
        (["--gpus", "8", "--pp", "2"], "--pp is for models of `fastpar train`, not for a folder"),
        (["--gpus", "0"], "expected gpus >= 1, got gpus=0"),
        (["--gpus", "7", "--batch-size", "3"], "got batch_size=3 with gpus=7; use --batch-size 7"),
    ):
        assert main([*words, *more]) == 2
        err = capsys.readouterr().err
        assert re.search(said, err), err
    (tmp_path / "config.json").write_text('{"model_type": "none-such"}')
    assert main(words) == 2
    assert "transformers cannot make a causal language model of" in capsys.readouterr().err


def test_models_that_cannot_be_planned(tmp_path, capsys, monkeypatch):
    mixed = transformers.MixtralConfig(**SMALL, architectures=["MixtralForCausalLM"])
    words = [*folder(tmp_path, mixed), "--gpus", "1", "--block-size", "64", "--gpu", "v100"]
    assert main([*words, "--dtype", "fp32"]) == 2
    err = capsys.readouterr().err
    assert "MixtralForCausalLM does not run on the meta device" in err
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(words) == 2
    assert "needs the package transformers; pip install transformers" in capsys.readouterr().err


def test_longest():
    assert longest(transformers.LlamaConfig(max_position_embeddings=131072)) == 4096
    assert longest(transformers.GPT2Config()) == 1024
