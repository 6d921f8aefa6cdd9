"""shards.py: a model whose ranks have parts of it saves and loads whole tensors."""

import copy
import io
import pickle
from typing import ClassVar

import pytest
import torch
from torch import nn

from fastpar import GPT, AdamW, GPTConfig, engine_of, parallelize
from fastpar.comm.mesh import Mesh
from fastpar.settings.parallel import Parallel
from fastpar.sharding.placements import Partial, Shard
from fastpar.testing import run_ranks

SIZES = {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 8, "vocab_size": 30}
CELLS = [(tp, stage) for tp in (1, 2) for stage in range(4) if (tp, stage) != (1, 0)]
cells = pytest.mark.parametrize(("tp", "stage"), CELLS)


def gpt(seed=0):
    return GPT(GPTConfig(**SIZES), seed=seed)


def split(tp, stage, seed=0):
    return parallelize(gpt(seed), Mesh(tp=tp), Parallel.of(zero_stage=stage, bucket_mb=0.01))


def same(a, b):
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


@cells
def test_a_state_dict_has_whole_tensors(tp, stage):
    def rank():
        model = split(tp, stage)
        return same(model.state_dict(), gpt().state_dict())

    assert run_ranks(rank, 4) == [True] * 4


@cells
def test_a_state_dict_is_a_copy_that_outlives_a_step(tp, stage):
    def rank():
        model = split(tp, stage)
        saved = model.state_dict()
        optimizer = AdamW(model.parameters(), lr=0.1)
        idx = torch.arange(8)[None]
        model(idx, idx).backward()
        optimizer.step()
        kept = same(saved, gpt().state_dict())
        for value in saved.values():
            value.fill_(7.0)
        after = model.state_dict()
        return kept, all((v != 7.0).all() for v in after.values()), same(after, gpt().state_dict())

    kept = stage > 0 or tp > 1
    assert run_ranks(rank, 4) == [(kept, True, False)] * 4


@cells
def test_a_loaded_state_dict_is_cut(tp, stage):
    """Saved with another layout: by one process, and by this one."""

    def rank():
        model, other = split(tp, stage), gpt(seed=1).state_dict()
        missing, unexpected = model.load_state_dict(other)
        first = same(model.state_dict(), other)
        engine_of(model).check_replicas()
        again = split(tp, stage)
        again.load_state_dict(model.state_dict())
        untouched = same(other, gpt(seed=1).state_dict())
        return missing, unexpected, first, same(again.state_dict(), other), untouched

    assert run_ranks(rank, 4) == [([], [], True, True, True)] * 4


@cells
def test_a_state_dict_travels_through_a_file(tp, stage):
    def rank():
        model, file = split(tp, stage, seed=1), io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        plain = gpt()
        plain.load_state_dict(torch.load(file, weights_only=True))
        return same(plain.state_dict(), gpt(seed=1).state_dict())

    assert run_ranks(rank, 4) == [True] * 4


@cells
def test_wrong_shapes_are_refused_and_change_nothing(tp, stage):
    """Also one that is a slice's: each rank would take the same for its own."""

    def rank():
        model, name = split(tp, stage), "h.0.mlp.c_fc.weight"
        for rows in (63, 32):
            wrong = {**gpt().state_dict(), name: torch.zeros(rows, 16)}
            message = rf"size mismatch for h\.0\.mlp\.c_fc\.weight: .*\[{rows}, 16\]"
            if tp > 1:
                message = (
                    r"c_fc\.weight: expected the whole tensor's shape \[64, 16\], got "
                    rf"\[{rows}, 16\]; load a state_dict of the same model"
                )
            with pytest.raises(RuntimeError, match=message):
                model.load_state_dict(wrong, strict=False)
        short = gpt().state_dict()
        del short["h.0.ln_1.bias"]
        short["extra"] = torch.zeros(1)
        message = r'(?s)Missing key.*"h\.0\.ln_1\.bias".*Unexpected key.*"extra"'
        with pytest.raises(RuntimeError, match=message):
            model.load_state_dict(short)
        missing, unexpected = model.load_state_dict(short, strict=False)
        model.state_dict()  # the hooks are closed again
        return missing, unexpected, same(model.state_dict(), gpt().state_dict())

    assert run_ranks(rank, 4) == [(["h.0.ln_1.bias"], ["extra"], True)] * 4


class Tied(nn.Module):
    tp_states: ClassVar = {"a": Shard(0), "b": Shard(0), "scale": Partial()}

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.arange(8.0).view(4, 2))
        self.b = self.a
        self.scale = nn.Parameter(torch.ones(3))
        self.frozen = nn.Parameter(torch.arange(4.0), requires_grad=False)
        self.tp_states = {**self.tp_states, "frozen": Shard(0)}
        self.register_buffer("count", torch.zeros(2))


def test_tied_frozen_and_buffers():
    """Tied names share their whole tensor, as in one process."""

    def rank():
        model = nn.Sequential(parallelize(Tied(), Mesh(tp=2)))
        saved = model.state_dict()
        shared = saved["0.a"].data_ptr() == saved["0.b"].data_ptr()
        plain = Tied()
        return shared, same(saved, nn.Sequential(plain).state_dict()), model[0].frozen.numel()

    assert run_ranks(rank, 2) == [(True, True, 2)] * 2


def test_a_submodule_is_saved_with_its_own_names():
    def rank():
        inner = parallelize(Tied(), Mesh(tp=2))
        outer = nn.ModuleDict({"x": inner})
        with torch.no_grad():
            loaded = {f"x.{k}": v + 1 for k, v in Tied().state_dict().items()}
        outer.load_state_dict(loaded)
        return same(outer.state_dict(), loaded)

    assert run_ranks(rank, 2) == [True] * 2


def test_copies_and_pickles_have_no_engine():
    """A copy of this rank's part is a plain module: nothing is gathered for it."""

    def rank():
        model = parallelize(Tied(), Mesh(tp=2))
        twin, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        return [list(m.state_dict()["a"].shape) for m in (twin, loaded, model)]

    assert run_ranks(rank, 2) == [[[2, 2], [2, 2], [4, 2]]] * 2


def test_a_dead_engine_leaves_a_plain_module():
    def rank():
        model = parallelize(Tied(), Mesh(tp=2))
        hook = next(iter(model._state_dict_hooks.values()))
        guard = hook.__self__ if hasattr(hook, "__self__") else hook
        guard._shards = lambda: None
        model.load_state_dict(model.state_dict())
        return list(model.state_dict()["a"].shape)

    assert run_ranks(rank, 2) == [[2, 2]] * 2
