"""Split layers, each alone: outputs and every gradient equal the plain layer's."""

import copy
import pickle

import pytest
import torch
from cells import cells, sweep
from test_tp_plan import batch, compare, grads_of, one_process, same, split_run
from torch import nn

import fastpar
from fastpar import Mesh, parallelize
from fastpar.nn import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    VocabParallelLinear,
)
from fastpar.nn.tp_layers import TokenDropout, VocabParallelLoss, convert
from fastpar.settings.parallel import Parallel
from fastpar.sharding import Partial
from fastpar.testing import run_ranks


class Model(nn.Module):
    """Written for tp: everything is a layer of this file, or says what it is in one line."""

    tp_states = {"norm.weight": Partial(), "norm.bias": Partial()}  # noqa: RUF012

    def __init__(self, bias=True, tied=True):
        super().__init__()
        self.words = VocabParallelEmbedding(67, 8)
        self.norm = nn.LayerNorm(8)
        self.up = ColumnParallelLinear(8, 24, bias, groups=3)
        self.down = RowParallelLinear(8, 8, bias)
        self.head = VocabParallelLinear(8, 67, bias=bias)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids):
        """Logits [B, T, V] of all tokens."""
        x = self.words(ids)  # under sequence parallelism [N/tp, C]
        q, k, v = self.up(self.norm(x)).chunk(3, -1)
        return self.head(x + self.down(q * k.sigmoid() + v.tanh())).view(*ids.shape, 67)


def model(**options):
    made, drawn = Model(**options).double(), torch.Generator().manual_seed(0)  # of this thread
    for p in made.parameters():
        p.data.uniform_(-0.4, 0.4, generator=drawn)
    return made


def plain(**options):
    """The same weights in torch's layers."""
    ours, theirs = model(**options), Model(**options).double()
    theirs.words = nn.Embedding(67, 8).double()
    for name, layer in [c for c in theirs.named_children() if c[0] not in ("words", "norm")]:
        bias = layer.bias is not None
        setattr(theirs, name, nn.Linear(layer.in_features, layer.out_features, bias).double())
    if ours.head.weight is ours.words.weight:
        theirs.head.weight = theirs.words.weight
    theirs.load_state_dict(ours.state_dict())
    return theirs


def split(base, tp=2, **options):
    torch.set_num_threads(1)
    mine = copy.deepcopy(base)
    return parallelize(mine, Mesh(tp=tp), Parallel.of(**options))


@pytest.mark.parametrize(
    ("options", "tp"), cells([{}, {"bias": False}, {"tied": False}], [1, 2, 4], strength=1)
)
def test_a_model_of_split_layers_equals_torchs(options, tp):
    ranks = run_ranks(split_run, tp, model(**options), {"tp": tp})
    compare(ranks, 1, one_process(plain(**options)))


def test_before_parallelize_they_are_plain():
    mine, theirs = model(), plain()
    assert torch.equal(mine(batch(0)), theirs(batch(0)))
    assert list(mine.state_dict()) == list(theirs.state_dict())
    again = pickle.loads(pickle.dumps(mine))
    assert torch.equal(again(batch(0)), theirs(batch(0)))


def test_a_split_model_prints_its_ranks_and_is_copied_but_not_pickled():
    """A whole embedding takes any shape."""
    base, want = model(), plain().words.weight

    def run():
        mine = split(base, sequence_parallel=False)
        mine.words.tp.sequence_parallel = False
        assert torch.equal(mine.words(torch.tensor(5)), want[5])
        many = mine.words(torch.zeros(1, 2, 3, dtype=torch.int64))
        assert torch.equal(many, want[0].expand(1, 2, 3, 8))
        mine = split(base)
        twin = copy.deepcopy(mine)
        assert torch.equal(twin(batch(0)), mine(batch(0)))
        with pytest.raises(RuntimeError, match=r"cannot save the model itself"):
            pickle.dumps(mine)
        return repr(mine.up), repr(mine.head)

    up, head = run_ranks(run, 2)[1]
    assert up == "ColumnParallelLinear(in_features=8, out_features=24, bias=True, rank 1 of tp=2)"
    assert head.startswith("VocabParallelLinear(in_features=8, out_features=67")


@sweep("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_they_return_what_torchs_do(dtype):
    theirs, base = plain().float(), model().float()

    def run():
        mine = split(base)
        with torch.autocast("cpu", dtype):
            x = mine.words(batch(0))
            y = mine.up(x)
            logits = mine.head(mine.down(y.chunk(3, -1)[0]))
        return y.dtype, logits

    with torch.autocast("cpu", dtype):
        x = theirs.words(batch(0))
        want = theirs.head(theirs.down(theirs.up(x).chunk(3, -1)[0])).view(-1, 67)
    for y, logits in run_ranks(run, 2):
        assert y == logits.dtype == want.dtype == dtype
        rounding = torch.finfo(dtype).eps
        assert (logits - want).abs().max() <= 4 * rounding * want.abs().max()


def test_convert_keeps_parameters_and_hooks_and_can_be_undone():
    layer, calls = nn.Linear(4, 6), []
    layer.register_forward_hook(lambda *_: calls.append(1))
    weight, x = layer.weight, torch.randn(2, 4)
    want = layer(x)
    undo = convert(layer, ColumnParallelLinear, groups=2)
    assert type(layer) is ColumnParallelLinear
    assert layer.weight is weight
    assert layer.groups == 2
    assert torch.equal(layer(x), want)
    assert len(calls) == 2
    undo()
    assert type(layer) is nn.Linear
    assert "groups" not in vars(layer)
    transformers = pytest.importorskip("transformers", reason="pip install -e '.[dev]'")
    layer = transformers.pytorch_utils.Conv1D(6, 4)
    want = layer(x)
    convert(layer, RowParallelLinear)
    assert type(layer).__name__ == "RowParallelConv1D"
    assert isinstance(layer, transformers.pytorch_utils.Conv1D)
    assert torch.equal(layer(x), want)


def with_own_forward():
    layer = nn.Linear(4, 4)
    layer.forward = lambda x: x
    return layer


@sweep(
    ("layer", "kind", "message"),
    [
        (nn.LayerNorm(4), RowParallelLinear, r"expected nn\.Linear to convert to Row.*, "
         r"got h\.0=LayerNorm; remove it from tp_plan, or use the plain layer"),
        (nn.Embedding(4, 4, padding_idx=1), VocabParallelEmbedding,
         r"expected nn\.Embedding to convert to VocabParallelEmbedding, got h\.0=Embedding, "
         r"padding_idx=1"),
        (fastpar.nn.LinearCrossEntropyLoss(z_loss=0.1), VocabParallelLoss,
         r"got h\.0=LinearCrossEntropyLoss, vocab_size=None, z_loss=0\.1"),
        (nn.AlphaDropout(), TokenDropout, r"expected nn\.Dropout to convert to TokenDropout, got"),
        (with_own_forward(), ColumnParallelLinear, r"to ColumnParallelLinear, got h\.0=Linear;"),
    ],
)  # fmt: skip
def test_convert_refuses(layer, kind, message):
    with pytest.raises(ValueError, match=message):
        convert(layer, kind, name="h.0")


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.norm = nn.Embedding(67, 8), nn.LayerNorm(8)
        self.loss = fastpar.nn.LinearCrossEntropyLoss(vocab_size=67)

    def forward(self, ids):
        return self.loss(self.norm(self.words(ids)), self.words.weight, ids.flip(1))


@sweep("tp", [2, 4])
def test_a_loss_of_a_split_weight(tp):
    base = WithLoss().double()
    once = copy.deepcopy(base)
    want = once(batch(0))
    want.backward()

    def run():
        mine = copy.deepcopy(base)
        parallelize(mine, Mesh(tp=tp), tp_plan={"words": "vocab", "loss": "head"})
        loss = mine(batch(0))
        loss.backward()
        return loss.detach(), grads_of(mine)

    for loss, grads in run_ranks(run, tp):
        same(loss, want.detach())
        for grad, p in zip(grads, once.parameters()):
            same(grad, p.grad)


def test_what_is_refused():
    message = (
        r"VocabParallelLinear: expected a layer without bias, after parallelize\(\) with tp > 1, "
        r"got tp=None bias=True; use fastpar\.nn\.LinearCrossEntropyLoss instead"
    )
    with pytest.raises(ValueError, match=message):
        VocabParallelLinear(4, 6).loss(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"Embedding: expected no padding_idx, got"):
        VocabParallelEmbedding(4, 4, padding_idx=1)
