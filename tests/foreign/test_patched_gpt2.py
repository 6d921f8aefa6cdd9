"""A patched GPT-2 in transformers' Trainer: labels, losses and what is looked up by name."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from test_patched import gpt2, ids_for

import fastpar

transformers = pytest.importorskip("transformers", reason="pip install -e '.[dev]'")


def smoothed_loss(model, idx):
    """Trainer.compute_loss with a label_smoothing_factor: the labels never reach the model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.trainer_pt_utils import LabelSmoother

    shift = model._get_name() in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return LabelSmoother(epsilon=0.1)(model(input_ids=idx), idx, shift_labels=shift)


@pytest.mark.slow
def test_label_smoothing_learns_the_same():
    """Labels that are not shifted, because the class's name is not known, teach the identity."""
    theirs = gpt2("D8")
    ours = copy.deepcopy(theirs)
    fastpar.patch(ours, fused_loss=True)
    idx = torch.randint(67, (4, 12), generator=torch.Generator().manual_seed(1))
    losses = []
    for model in (theirs, ours):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses.append([])
        for _ in range(30):
            loss = smoothed_loss(model, idx)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0][-1] < losses[0][0] / 2
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-3, atol=0)


def test_names_that_others_look_up_stay():
    theirs = gpt2("D8")
    names = [(m._get_name(), type(m).__name__, repr(m)) for m in theirs.modules()]
    fastpar.patch(theirs, fused_loss=True)
    assert [(m._get_name(), type(m).__name__, repr(m)) for m in theirs.modules()] == names


def test_a_loss_function_of_ones_own_is_used():
    """Whatever it is: a partial and an object have no __name__, a function may have any."""

    def loss_of(logits, labels, vocab_size, factor=3.0, **_):
        return factor * F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    loss_of.__name__ = "ForCausalLMLoss"

    class Loss:
        def __call__(self, *args, **kwargs):
            return loss_of(*args, factor=0.1, **kwargs)

    idx = ids_for(None)
    for loss_function in (functools.partial(loss_of, factor=0.5), Loss(), loss_of):
        theirs = gpt2("D8")
        ours = copy.deepcopy(theirs)
        fastpar.patch(ours, fused_loss=True)
        for model in (theirs, ours):
            model.loss_function = loss_function
        with pytest.warns(UserWarning, match="GPT2LMHeadModel falls back .* another loss_function"):
            loss = ours(idx, labels=idx).loss
        torch.testing.assert_close(loss, theirs(idx, labels=idx).loss)
