"""bucket.py, gradients.py: policies, checked phases, and micro-batches that a loop tells."""

import itertools

import pytest
import torch
from test_engine import SMALL, Net, loss_of, mean_of, reduced, stages

from fastpar.comm.mesh import Mesh
from fastpar.engine.bucket import BUCKET_PHASES, STAGES, checked
from fastpar.engine.engine import engine_of
from fastpar.engine.gradients import STEP_PHASES, StepPhase
from fastpar.engine.parallelize import parallelize
from fastpar.optim.adamw import AdamW
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks


def test_stages_are_a_ladder():
    rungs = [(s.shards, s.frees_gradients, s.frees_parameters) for s in STAGES]
    assert [sum(rung) for rung in rungs] == [s.number for s in STAGES] == [0, 1, 2, 3]
    assert [s.gathers_after_step for s in STAGES] == [False, True, True, False]


@pytest.mark.parametrize("table", [STEP_PHASES, BUCKET_PHASES])
def test_a_wrong_transition_names_both_phases(table):
    for now, allowed in table.items():
        for then in table:
            if then in allowed:
                assert checked("it", now, then, table) is then
                continue
            message = f"expected it to go from '{now.value}' to .*, got '{then.value}'"
            with pytest.raises(RuntimeError, match=message):
                checked("it", now, then, table)


def test_an_engine_refuses_to_step_with_gradients_that_are_not_reduced():
    model = parallelize(Net(), Mesh(device="cpu"), Parallel.of(**SMALL))
    engine = engine_of(model)
    message = "from 'empty' to 'backward' or 'empty' or 'reduced', got 'stepped'"
    with pytest.raises(RuntimeError, match=message):
        engine.after_step()
    with engine.no_sync():
        loss_of(model, 0).backward()
    assert engine.phase is StepPhase.LOCAL
    with pytest.raises(RuntimeError, match=r"from 'local' .*, got 'stepped'"):
        engine.after_step()


@stages
def test_phases_of_a_step(stage):
    def ranks():
        model = parallelize(Net(), Mesh(), Parallel.of(zero_stage=stage, **SMALL))
        engine, optimizer, seen = engine_of(model), AdamW(model.parameters()), []
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: seen.append(engine.phase))
        for _ in range(2):
            optimizer.zero_grad()
            seen.append(engine.phase)
            with engine.no_sync():
                loss_of(model, 0).backward()
            seen.append(engine.phase)
            loss_of(model, 1).backward()
            seen.append(engine.phase)
            optimizer.step()
            seen.append(engine.phase)
        return [seen[0], *(b for a, b in itertools.pairwise(seen) if a is not b)]

    one = ["EMPTY", "BACKWARD", "LOCAL", "BACKWARD", "REDUCED", "STEPPED"]
    for seen in run_ranks(ranks, 2):
        assert [phase.name for phase in seen] == one * 2


@stages
def test_a_micro_batch_of_several_forwards(stage):
    """Three of two forwards and two backward passes each: only the last one reduces."""

    def ranks():
        mesh = Mesh()
        model = parallelize(Net(), mesh, Parallel.of(zero_stage=stage, **SMALL))
        engine, found = engine_of(model), []
        for step in range(2):
            for micro in range(3):
                engine.begin_micro_batch(last=micro == 2)
                first = 6 * (2 * step + mesh.dp_rank) + 2 * micro
                losses = [loss_of(model, first), loss_of(model, first + 1)]
                for loss in losses:
                    before = engine.log.hashes[0]
                    loss.backward()
                    assert (engine.log.hashes[0] != before) == (micro == 2)
                assert engine.micro_batches.begun == micro + 1
            found.append(reduced(model))
            model.zero_grad()
        return found

    results = run_ranks(ranks, 2)
    for step in range(2):
        batches = [range(6 * (2 * step + rank), 6 * (2 * step + rank) + 6) for rank in range(2)]
        expected = mean_of([(Net(), list(batch)) for batch in batches])
        for result in results:
            for (name, grad), (_, other) in zip(
                sorted(expected.items()), sorted(result[step].items()), strict=True
            ):
                torch.testing.assert_close(other, grad, msg=name)


def test_a_micro_batch_does_not_begin_inside_a_backward():
    model = parallelize(Net(), Mesh(device="cpu"), Parallel.of(**SMALL))
    engine = engine_of(model)
    next(model.parameters()).register_post_accumulate_grad_hook(
        lambda p: engine.begin_micro_batch(last=True)
    )
    with pytest.raises(RuntimeError, match="expected a call between backward passes"):
        loss_of(model, 0).backward()
