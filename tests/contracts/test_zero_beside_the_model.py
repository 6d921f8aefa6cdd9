"""What runs beside the passes of the whole model, and backward passes that fail, at every stage."""

import contextlib

import pytest
import torch
from test_zero_awkward import batch
from test_zero_torch_loops import Loop, check, clear_model, clear_optimizers

from fastpar import Mesh
from fastpar.testing import run_ranks


def submodules_first(grad):
    def body(loop, step):
        model = loop.model
        with contextlib.nullcontext() if grad else torch.no_grad():
            x = model.blocks[step](model.wte(batch(step)))
            model.blocks[0](x)
        loop.backward(step)
        with torch.no_grad():
            model.blocks[1](x)
        loop.step()
        clear_optimizers(loop)

    return body


def a_backward_that_fails(loop, step):
    """Before anything was sent, but after the next units were gathered."""

    def fail(grad):
        raise ArithmeticError

    def watch(module, args, output):
        output.register_hook(fail)

    handle = loop.model.norm.register_forward_hook(watch)
    with pytest.raises(ArithmeticError):
        loop.backward(step + 10)
    handle.remove()
    clear_model(loop)
    loop.backward(step)
    loop.step()
    clear_model(loop)


def test_what_runs_beside_the_model_changes_nothing():
    for body in (submodules_first(False), submodules_first(True), a_backward_that_fails):
        check(body, [(2, {"stage": 1}), (2, {"stage": 3, "prefetch": 2})])


def test_a_backward_that_failed_after_sending_is_refused():
    def ranks(stage):
        loop = Loop(2, mesh=Mesh(), stage=stage)
        loop.backward(0)
        loop.step()

        def fail(grad):
            raise ArithmeticError

        handle = loop.model.blocks[1].up.weight.register_hook(fail)
        with pytest.raises(ArithmeticError):
            loop.backward(1)
        handle.remove()
        clear_model(loop)
        loop.backward(1)

    for stage in range(4):
        with pytest.raises(
            RuntimeError, match=r"expected backward to run to its end, got .* buckets sent on rank"
        ):
            run_ranks(ranks, 2, stage)


@pytest.mark.parametrize("transport", ["shm", "torch"])
def test_ranks_that_begin_different_things_are_told_at_once(transport):
    """At stage 3 a forward waits for other ranks, and not for those in a step."""

    def ranks(unequal):
        mesh = Mesh()
        loop = Loop(2, mesh=mesh, stage=3, transport=transport)
        for step in range(3):
            if unequal(step, mesh.dp_rank) == "evaluate":
                with torch.no_grad():
                    loop.model(batch(0))
            for _ in range(1 + (unequal(step, mesh.dp_rank) == "more")):
                loop.backward(step)
            loop.step()
            clear_optimizers(loop)

    got = {
        "more": "a step after 1 micro-batches on rank 1 where rank 0 begins a forward after 1;",
        "evaluate": "a forward after 0 micro-batches on rank 1 where rank 0 begins a forward witho",
    }
    for what, words in got.items():

        def unequal(step, rank, what=what):
            return what if step == 1 and rank == 0 else ""

        with pytest.raises(RuntimeError, match=f"every rank to begin the same, got {words}"):
            run_ranks(ranks, 2, unequal, timeout_s=20)
