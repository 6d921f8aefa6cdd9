"""Every command that `fastpar plan` prints is parsed and built by the trainer, over odd shapes.

Built is what Trainer.__init__ builds: model, engine and optimizer, on one real rank of a lone
mesh. Only the text is made up: its tokenizer has as many tokens as the command's has.
"""

import re
import shlex

import pytest
import torch
from lone_rank import LoneMesh, heard

from fastpar.axes.step import Setup
from fastpar.cli import main, parse_train
from fastpar.data.batches import TextData
from fastpar.data.tokenizer import ByteTokenizer, check_name, name_for
from fastpar.engine.debug import Debug
from fastpar.engine.parallelize import parallelize
from fastpar.files.tensor_file import DTYPES
from fastpar.models import set_up
from fastpar.predict import plan
from fastpar.predict.plan import command_lines
from fastpar.settings.mesh import parse_grid
from fastpar.train import start
from fastpar.train import trainer as train

SIZES = {"auto": 4096, "bytes": 256, "gpt2": 50257}


def text_of(source, tokenizer, *, block_size, **others):
    if tokenizer != "auto":
        check_name(tokenizer)
    size = SIZES.get(tokenizer) or int(tokenizer.removeprefix("bpe-"))
    tokens = torch.zeros(2, dtype=torch.int64).numpy()
    return TextData(source, tokens, tokens, ByteTokenizer(), size, notes=())


def built(words, monkeypatch):
    """The trainer of a printed command; the other ranks are not there."""
    config = parse_train(shlex.split(words)[shlex.split(words).index("train") + 1 :])
    ranks = config.system.nproc
    found = re.search(r"--nnodes (\d+) --nproc-per-node (\d+)", words)
    ranks = int(found[1]) * int(found[2]) if found else ranks
    changes = {"device": "cpu", "nproc": 1}
    if config.system.dtype == "fp16":  # which no CPU trains: as many bytes, the same paths
        changes["dtype"] = "bf16"

    def alone(model, mesh, settings):
        heard_only = Debug(collectives=heard([]))
        return parallelize(model, mesh, settings.change(transport="auto"), debug=heard_only)

    monkeypatch.setattr(set_up, "parallelize", alone)
    monkeypatch.setattr(start, "load_data", text_of)
    axes = {axis: getattr(config.mesh, axis) for axis in ("tp", "cp", "pp")}
    axes["tp_grid"] = parse_grid(config.mesh.tp_grid)
    with LoneMesh(ranks, 0, **axes) as mesh:
        return config, train.Trainer(config.replace(changes), mesh)


def check_all(monkeypatch, capsys, words, *, all_layouts):
    """The winner's command, or those of all layouts, build what they were taken for."""
    seen = []
    with monkeypatch.context() as patch:
        patch.setattr(plan, "report", lambda made, f=plan.report: seen.append(made) or f(made))
        assert main(["plan", *map(str, words)]) == 0
    (made_plan,), out = seen, capsys.readouterr().out
    workload, estimates = made_plan.workload, made_plan.estimates
    winner = command_lines(made_plan, estimates[0].setup)[-1]
    assert out.rstrip().endswith(winner)
    fits = [e.setup for e in estimates if e.time is not None]
    for setup in fits if all_layouts else fits[:1]:
        line = command_lines(made_plan, setup)[-1]
        config, made = built(line, monkeypatch)
        assert vars(made.model.config) == vars(workload.shape), line
        assert made.mesh.world_size == setup.world_size
        assert made.mesh.tp_size == setup.tp * setup.rows
        steps = {name: getattr(setup, name) for name in ("micro_batch_size", "grad_accum_steps")}
        assert {name: getattr(made, name) for name in steps} == steps, line
        assert made.engine.stage.number == setup.zero_stage or setup.dp == 1
        assert made.engine.settings.n_shards == setup.n_shards or not setup.zero_stage, line
        machine = setup.device_type, setup.transport
        again = Setup(setup.world_size, config, *machine, **steps).in_effect()
        told = setup.in_effect()
        if setup.tp == 1:  # of one rank nothing is shared out
            told["sequence_parallel"] = again["sequence_parallel"]
        assert again == told, line
        if setup.dtype != "fp16":  # whose weights are fp32
            assert next(made.model.parameters()).dtype == DTYPES[setup.dtype]


def shape(vocab, heads, tokens, batch=12):
    return (
        *("--n-layer", 2, "--n-head", heads, "--n-embd", 8 * heads, "--block-size", tokens),
        *("--vocab-size", vocab, "--batch-size", batch),
    )


ODD = [
    # vocabulary, heads, tokens, ranks, more
    (256, 3, 17, 1, ("--gpu", "cpu")),
    (257, 6, 24, 6, ("--gpu", "h100", "--moment-dtype", "int8")),
    (300, 5, 63, 2, ("--gpu", "v100")),
    (50257, 1, 8, 3, ("--gpu", "cpu", "--dtype", "bf16")),
    (50304, 6, 33, 6, ("--gpu", "a100", "--gpus-per-node", 3, "--master-weights", "remainder")),
    (4096, 4, 16, 2, ("--gpu", "cpu")),
    (256, 4, 16, 4, ("--gpu", "cpu", "--tp-grid", "2x2")),
    (300, 4, 16, 12, ("--gpu", "cpu", "--tp-grid", "2x2x3")),
    (256, 4, 16, 4, ("--gpu", "cpu", "--n-expert", 4)),
    (256, 4, 16, 2, ("--gpu", "h100", "--n-expert", 2, "--optimizer", "muon", "--pp", 2)),
]


@pytest.mark.parametrize("case", ODD, ids=lambda case: "-".join(map(str, case[:4])))
def test_what_is_printed_is_parsed_and_built(case, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    vocab, heads, tokens, ranks, more = case
    words = (*shape(vocab, heads, tokens), "--gpus", ranks, *more)
    check_all(monkeypatch, capsys, words, all_layouts=False)


@pytest.mark.slow
def test_every_layout_is_parsed_and_built(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    for vocab, heads, tokens, ranks, more in ODD:
        words = (*shape(vocab, heads, tokens), "--gpus", ranks, *more)
        check_all(monkeypatch, capsys, words, all_layouts=vocab < 1000)
    kinds = (("cpu", "fp32"), ("cpu", "bf16"), ("v100", "fp16"), ("h100", "bf16"))
    for n, (ranks, heads) in enumerate(((2, 1), (3, 3), (6, 6), (6, 3))):
        gpu, dtype = kinds[n]
        words = (*shape((256, 257, 300, 50304)[n], heads, (8, 17, 63)[n % 3]), "--gpus", ranks)
        check_all(monkeypatch, capsys, (*words, "--gpu", gpu, "--dtype", dtype), all_layouts=True)


def test_the_vocabulary_names_the_tokenizer():
    for vocab, name in (
        *((65, "chars"), (256, "bytes"), (257, "bpe-257")),
        *((50257, "gpt2"), (50304, "bpe-50304")),
    ):
        assert name_for(vocab) == name
        check_name(name)
