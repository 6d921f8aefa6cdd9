"""Patched GPT-2 of transformers whose sequences ranks of cp share out equals one process."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from cells import slow
from test_patched import Nano, gpt2, logits_of
from test_tp_plan import batch, compare, one_process, train

import fastpar
from fastpar import AdamW, Mesh, engine_of, parallelize
from fastpar.comm.transports import TorchCollectives
from fastpar.nn.tp_layers import check_generators
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks


def made(**options):
    model = gpt2("D8", n_head=4, n_embd=32, n_positions=13, **options).double()
    fastpar.patch(model)
    return model


def wrap(model, mesh, **options):
    torch.set_num_threads(1)
    model = parallelize(copy.deepcopy(model), mesh, Parallel.of(**options))
    return model, AdamW(model.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.01)


def shared_run(model, mesh, **options):
    mesh = Mesh(**mesh)
    model, optimizer = wrap(model, mesh, **options)
    seen = train(model, optimizer, mesh.dp_rank, mesh.dp_size)
    return mesh.dp_rank, seen, model.state_dict(), engine_of(model).tp_report


@functools.cache
def reference(attn="sdpa"):
    model = made(attn=attn)
    return model, one_process(model)


@pytest.mark.filterwarnings("error:fastpar.patch")  # no call falls back
@pytest.mark.parametrize(
    ("mesh", "method", "stage"),
    [
        ({"cp": 2}, "heads", 3),
        ({"cp": 2}, "keys", 0),
        ({"cp": 2, "tp": 2}, "keys", 2),
        *(slow({"cp": cp}, m, 0) for cp in (3, 4) for m in ("heads", "keys")),
        *(slow({"cp": 2}, m, stage) for m in ("heads", "keys") for stage in (1, 2)),
        slow({"cp": 2, "dp": 2}, "heads", 1),
        slow({"cp": 2, "dp": 2}, "keys", 3),
        slow({"cp": 2, "tp": 2}, "heads", 0),
        slow({"cp": 5}, "keys", 0),
    ],
)  # fmt: skip
def test_logits_gradients_and_weights_are_those_of_one_process(mesh, method, stage):
    """12 tokens: of these cp some pad the rows."""
    model, expected = reference()
    ranks = 1
    for size in mesh.values():
        ranks *= size
    run = functools.partial(shared_run, model, mesh, zero_stage=stage, cp_method=method)
    found = run_ranks(run, ranks)
    compare(found, mesh.get("dp", 1), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("error:fastpar.patch")
def test_eager_attention():
    model, expected = reference("eager")
    run = functools.partial(shared_run, model, {"cp": 2}, cp_method="keys")
    compare(run_ranks(run, 2), 1, expected)


@pytest.mark.parametrize("method", ["heads", "keys"])
def test_recomputed_blocks(method):
    model = made()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    found = run_ranks(functools.partial(shared_run, model, {"cp": 2}, cp_method=method), 2)
    compare(found, 1, one_process(model))


# The library's own loss. It computes in fp32; here in fp64, to be compared.


def in_fp64(logits, labels, vocab_size, num_items_in_batch=None, shift_labels=None, **_):
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=-100)[..., 1:]
    kind = "mean" if num_items_in_batch is None else "sum"
    loss = F.cross_entropy(
        logits.flatten(0, 1), shift_labels.flatten(), ignore_index=-100, reduction=kind
    )
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def labels_of(ids):
    labels = ids.clone()
    labels[0, 2:9] = -100  # all targets of a rank's part of this row
    return labels


def loss_run(model, cp, method, items=None):
    model = copy.deepcopy(model)
    if cp > 1:
        model = parallelize(model, Mesh(cp=cp), Parallel.of(cp_method=method))
    model.loss_function = in_fp64
    ids = batch(0)
    more = {} if items is None else {"num_items_in_batch": items}
    found = model(ids, labels=labels_of(ids), **more)
    found.loss.backward()
    if cp > 1:
        whole = {id(p): grad.clone() for p, grad in engine_of(model).grads()}
        grads = [whole[id(p)] for p in model.parameters()]
        assert found.logits is None
    else:
        grads = [p.grad for p in model.parameters()]
    model.eval()
    with torch.no_grad():
        logits = model(ids, labels=labels_of(ids)).logits
        hidden = model.transformer(ids)[0] if cp == 1 else None
    return [found.loss.detach(), *grads, logits], hidden


@pytest.mark.parametrize("items", [None, 7])
@pytest.mark.parametrize("method", ["heads", "keys"])
def test_the_loss_of_labels(method, items):
    """Shifted before they are cut; divided by the targets of all ranks."""
    model, _ = reference()
    expected, _ = loss_run(model, 1, method, items)
    for found, _ in run_ranks(loss_run, 2, model, 2, method, items):
        for got, want in zip(found, expected, strict=True):
            assert (got - want).abs().max() <= 1e-12


def test_the_fused_loss():
    model = gpt2("D8", n_head=4, n_embd=32)
    fastpar.patch(model, fused_loss=True)
    ids = batch(0)
    want = model(ids, labels=labels_of(ids)).loss.item()

    def rank():
        mine = parallelize(copy.deepcopy(model), Mesh(cp=2))
        return mine(ids, labels=labels_of(ids)).loss.item()

    for found in run_ranks(rank, 2):
        assert found == pytest.approx(want, rel=1e-6)


# Dropout draws from torch's default generator, which threads share: processes.


def dropped(cp):
    results = {}
    for method in ("heads", "keys"):
        torch.manual_seed(0)
        results[method] = shared_run(made(dropout=0.25), {"cp": cp}, cp_method=method)
    return results


@pytest.mark.slow
def test_the_masks_of_one_process():
    (once,) = run_ranks(dropped, 1, 1, backend="gloo")
    ranks = run_ranks(dropped, 2, 2, backend="gloo")
    for method in ("heads", "keys"):
        compare([rank[method] for rank in ranks], 1, once[method][1:3])


# What is refused


def nano():
    model = Nano(width=32, heads=4)
    fastpar.patch(model)
    return model


def stock():
    return gpt2("D8", n_head=4, n_embd=32)


def dropping():
    return made(dropout=0.1)


@pytest.mark.parametrize(
    ("make", "mesh", "message"),
    [
        (nano, {"cp": 2}, r"for cp=2, or a patched GPT-2 .* positions .* got Nano; load its weigh"),
        (stock, {"cp": 2}, r"patch\(model\) before cp=2, .* with its own transformer; call it"),
        (dropping, {"cp": 2, "tp": 2}, "no dropout .* with cp=2 and tp=2, got rates of 0.1; set"),
    ],
)
def test_models_that_are_refused(make, mesh, message):
    def rank():
        with pytest.raises(ValueError, match="parallelize: expected .*" + message):
            parallelize(make(), Mesh(**mesh))

    run_ranks(rank, 2 * mesh.get("tp", 1))


def calls():
    model, ids = parallelize(made(), Mesh(cp=2)), batch(0)
    for more, message in [
        ({"attention_mask": torch.ones_like(ids)}, "no argument but .*, got attention_mask; leave"),
        ({"use_cache": True}, "no argument but .*, got use_cache; leave it out, generate and"),
        ({"input_ids": ids.repeat(1, 2)}, r"T <= n_positions=13 with cp=2, got .*\[4, 24\]; crop"),
    ]:
        with pytest.raises(ValueError, match="GPT2LMHeadModel: expected .*" + message):
            model(**{"input_ids": ids, **more})
    model.loss_function = lambda logits, labels: None
    with pytest.raises(
        ValueError, match=r"loss_function of shift_labels .* got one of logits, lab"
    ):
        model(ids, labels=ids)
    model.transformer.h[0].attn.reorder_and_upcast_attn = True
    with pytest.raises(
        ValueError, match=r"Attention: expected a call .* with cp=2, .*got reorder_"
    ):
        logits_of(model, ids)


def test_calls_that_are_refused():
    run_ranks(calls, 2)


def other_seeds():
    torch.manual_seed(torch.distributed.get_rank())
    with pytest.raises(ValueError, match="the 2 ranks of cp to have the same torch generator"):
        check_generators(TorchCollectives(), "cp")


def test_ranks_that_would_draw_other_masks_are_refused():
    run_ranks(other_seeds, 2, backend="gloo")
