"""--pack documents: documents do not see each other, and a run has the bits of one process."""

import pytest
import torch
from train_runs import TINY, Runs, bits, curve, forget_after

from fastpar import AdamW, parallelize, pipeline_step
from fastpar.comm.mesh import Mesh
from fastpar.models.gpt import GPT
from fastpar.settings.model import GPTConfig
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks

RUN = {**TINY, "data": "texts", "pack": "documents", "micro_batch_size": 2, "max_steps": 4}
RUN |= {"eval_every": 4, "save_every": 2, "deterministic": True, "tokenizer": "bpe-300"}
run = Runs(RUN)


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
    with pytest.raises(ValueError, match=r"pack=documents, by which .*, got pack=stream; leave"):
        run.rank({"out": "alone", "resume": True, "pack": "stream", "max_steps": 6})
    run("stream", 1, pack="stream")
    assert bits("stream", 4) != expected
    assert len([row for row in curve("alone") if "loss" in row]) == 4


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        (2, {"pp": 2, "zero_stage": 2}),
        (2, {"pp": 2, "schedule": "zb-v", "zero_stage": 3, "activation_checkpointing": "full"}),
        pytest.param(4, {"pp": 2, "schedule": "gpipe"}, marks=pytest.mark.slow),
        pytest.param(2, {"pp": 2, "schedule": "interleaved"}, marks=pytest.mark.slow),
        pytest.param(3, {"pp": 3, "schedule": "zb-h1"}, marks=pytest.mark.slow),
    ],
)
def test_the_bits_of_one_process_through_stages(texts, ranks, changes):
    """With dropout and clipping."""
    shape = {"n_layer": 4, "micro_batch_size": 1, "dropout": 0.1}
    run("alone", 1, **shape)
    run("stages", ranks, **shape, **changes)
    assert curve("stages") == curve("alone")
    assert bits("stages", 4) == bits("alone", 4)


def _on_ranks(tp, sequence_parallel):
    model = GPT(GPTConfig(2, 2, 16, 12, 50, 0.0), seed=3).double()
    mesh = Mesh(tp=tp, device="cpu")
    parallelize(model, mesh, Parallel.of(sequence_parallel=sequence_parallel, zero_stage=1))
    x, y = torch.randint(50, (2, 3, 11), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(n) for n in (5, 4, 2)]).repeat(3, 1)
    loss = model(x, y, positions=positions)
    loss.backward()
    optimizer = AdamW(model.parameters(), eps=1.0)
    optimizer.step()
    return loss.detach(), {name: p.clone() for name, p in model.state_dict().items()}


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_split_layers_see_the_same_documents(sequence_parallel):
    """With sequences that the ranks have to pad."""
    [(loss, weights)] = run_ranks(_on_ranks, 1, 1, sequence_parallel)
    for mine, theirs in run_ranks(_on_ranks, 2, 2, sequence_parallel):
        torch.testing.assert_close(mine, loss, rtol=1e-12, atol=0)
        for name, w in theirs.items():
            torch.testing.assert_close(w, weights[name], rtol=1e-12, atol=1e-13)


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
    parallelize(model, Mesh(device="cpu"))
    with pytest.raises(ValueError, match=r"positions of idx's shape \[1, 8\], got positions=\[8\]"):
        pipeline_step(model, x, x, positions=torch.arange(8))


def test_a_document_beyond_the_context():
    model, x = GPT(GPTConfig(1, 2, 16, 8, 50, 0.0)), torch.zeros(1, 8, dtype=torch.int64)
    positions = torch.arange(8)[None].clone()
    positions[0, 7] = 8
    with pytest.raises(ValueError, match="documents of at most block_size=8 tokens, got a positio"):
        model(x, x, positions=positions)


@pytest.mark.parametrize(
    ("method", "tp", "pp"),
    [
        ("keys", 1, 1),
        ("heads", 1, 1),
        *(pytest.param(m, *s, marks=pytest.mark.slow) for m in ("heads", "keys")
          for s in ((2, 1), (1, 2))),
    ],
)  # fmt: skip
def test_ranks_that_share_rows_of_documents(texts, method, tp, pp):
    """With dropout; resumed by the other method. Sums over a row's parts round otherwise."""
    shape = {"dropout": 0.1, "n_head": 4, "n_layer": 2}
    changes = {**shape, "tp": tp, "pp": pp, "cp": 2, "zero_stage": 1}
    run("alone", 1, **shape)
    run("shared", 2 * tp * pp, **changes, cp_method=method)
    forget_after("shared", 2)
    other = "heads" if method == "keys" else "keys"
    run("shared", 2 * tp * pp, **changes, cp_method=other, resume=True)
    expected, found = ([row for row in curve(o) if "loss" in row] for o in ("alone", "shared"))
    assert len(expected) == len(found) == 4
    for a, b in zip(expected, found):
        assert b["loss"] == pytest.approx(a["loss"], rel=2e-6)


def test_a_tokenizer_without_an_end(here):
    with pytest.raises(ValueError, match="end-of-text token between documents, got end_of_text=N"):
        run.rank({"out": "none", "data": "text.txt", "tokenizer": "chars"})
