"""--pack documents: documents do not see each other, and a run has the bits of one process."""

import pytest
import torch
from train_runs import TINY, bits, curve, forget_after

from fastpar.comm.mesh import Mesh
from fastpar.config.config import GPTConfig, TrainConfig
from fastpar.models.gpt import GPT
from fastpar.testing import run_ranks
from fastpar.train.trainer import Trainer

RUN = {**TINY, "data": "texts", "pack": "documents", "micro_batch_size": 2, "max_steps": 4}
RUN |= {"eval_every": 4, "save_every": 2, "deterministic": True, "tokenizer": "bpe-300"}


def rank(changes):
    config = TrainConfig().replace({**RUN, **changes})
    return Trainer(config, Mesh(device="cpu")).run()


def run(out, ranks, **changes):
    """All ranks, as threads."""
    assert run_ranks(rank, ranks, {"out": out, **changes}) == [0] * ranks


@pytest.fixture
def texts(here):
    (here / "texts").mkdir()
    for i, text in enumerate((here / "text.txt").read_text().split("\n")[:90]):
        (here / "texts" / f"{i}.txt").write_text(text * (1 + i % 4 // 3))


def test_the_bits_of_one_process_and_after_a_resume(texts, capsys):
    run("alone", 1)
    said = capsys.readouterr().out
    assert "packed   " in said
    assert "are longer than the context and were split" in said
    expected = bits("alone", 4)
    for out, ranks, changes in (("r0", 2, {}), ("r3", 4, {"zero_stage": 3})):
        run(out, ranks, **changes)
        assert bits(out, 4) == expected, changes
    forget_after("alone", 2)
    run("alone", 2, zero_stage=1, resume=True)
    assert bits("alone", 4) == expected
    run("stream", 1, pack="stream")
    assert bits("stream", 4) != expected
    assert len([row for row in curve("alone") if "loss" in row]) == 4


def test_documents_of_a_row_are_as_alone():
    """Loss and gradients of packed documents are those of each by itself, weighed by tokens."""
    model = GPT(GPTConfig(2, 2, 16, 12, 50, 0.0), seed=3).double()
    torch.manual_seed(0)
    lengths, x = (5, 4, 3), torch.randint(50, (2, 12))
    y = torch.randint(50, (2, 12))
    y[1, 9:] = -100
    positions = torch.cat([torch.arange(n) for n in lengths]).repeat(2, 1)
    loss = model(x, y, positions=positions)
    loss.backward()
    packed = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    total = 0.0
    for row in range(2):
        for part, target in zip(x[row].split(lengths), y[row].split(lengths)):
            total += model(part[None], target[None], reduction="sum") if target.max() >= 0 else 0
    alone = total / (y >= 0).sum()
    alone.backward()
    assert loss.item() == pytest.approx(alone.item(), rel=1e-12)
    for a, b in zip(packed, (p.grad for p in model.parameters())):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)


def test_bad_positions():
    model, x = GPT(GPTConfig(1, 2, 16, 8, 50, 0.0)), torch.zeros(1, 8, dtype=torch.int64)
    for positions in (torch.arange(7)[None], torch.arange(1, 9)[None]):
        with pytest.raises(ValueError, match=r"0 where a row begins, got positions\.shape"):
            model(x, x, positions=positions)
    with pytest.raises(ValueError, match="one rank's whole model"):
        model(x, x, positions=torch.arange(8)[None], parts=range(1))


@pytest.mark.parametrize("name", ["tp", "pp", "cp", "compile", "cuda_graphs"])
def test_refused_settings(name):
    changes = {name: True if name in ("compile", "cuda_graphs") else 2, "pack": "documents"}
    with pytest.raises(ValueError, match="pack"):
        TrainConfig().replace({**changes, "device": "cuda" if name == "cuda_graphs" else "cpu"})


def test_a_tokenizer_without_an_end(here):
    with pytest.raises(ValueError, match="end-of-text token between documents, got end_of_text=N"):
        rank({"out": "none", "data": "text.txt", "tokenizer": "chars"})
