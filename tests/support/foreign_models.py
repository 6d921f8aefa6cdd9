"""GPT-2 of transformers and of nanoGPT's shape, patched and not, and their comparison."""

import copy
import functools
import warnings
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from nanogpt_cells import NanoGPT

import fastpar

# Head dims 40 and 8; odd vocabularies and lengths.
SIZES = {
    "D40": {"vocab_size": 101, "n_positions": 37, "n_embd": 80, "n_layer": 2, "n_head": 2},
    "D8": {"vocab_size": 67, "n_positions": 23, "n_embd": 24, "n_layer": 2, "n_head": 3},
}


def random_weights(model):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator), alpha=0.05)
    return model


def gpt2(size="D40", *, kind="GPT2LMHeadModel", dropout=0.0, attn="sdpa", **options):
    transformers = pytest.importorskip("transformers", reason="pip install -e '.[dev]'")
    transformers.utils.logging.set_verbosity_error()
    rates = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), dropout)
    config = transformers.GPT2Config(
        **{**SIZES[size], **rates, **options}, bos_token_id=None, eos_token_id=None,
        attn_implementation=attn,
    )  # fmt: skip
    return random_weights(getattr(transformers, kind)(config)).train()


def nano(**options):
    return random_weights(NanoGPT(**options))


class GPT(NanoGPT):
    """nanoGPT's forward, which gives the loss too."""

    def loss(self, logits, targets):
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.flatten(), ignore_index=-1)

    def forward(self, idx, targets=None):
        x = self.hidden(idx)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        return logits, self.loss(logits, targets)


MODELS = {
    "transformers D40": gpt2,
    "transformers D8": functools.partial(gpt2, "D8"),
    "transformers eager": functools.partial(gpt2, attn="eager"),
    "transformers without scale": functools.partial(gpt2, scale_attn_weights=False),
    "transformers scaled by layer": functools.partial(gpt2, scale_attn_by_inverse_layer_idx=True),
    "transformers erf": functools.partial(gpt2, activation_function="gelu"),
    "nanoGPT": nano,
    "nanoGPT without bias": functools.partial(nano, bias=False),
    "nanoGPT without flash": functools.partial(nano, flash=False),
    "nanoGPT tanh": functools.partial(nano, approximate="tanh"),
}
BOTH = ("transformers D40", "nanoGPT")


def ids_for(model=None, T=23, B=2):
    """Token ids that all models have."""
    return torch.randint(67, (B, T), generator=torch.Generator().manual_seed(T))


def logits_of(model, idx, **options):
    output = model(idx, **options)
    return output if isinstance(output, torch.Tensor) else output.logits


def pair(make, *options, patched=None, **more):
    """A model, its patched copy and the patch's report."""
    theirs = make(*options, **more)
    ours = copy.deepcopy(theirs)
    return theirs, ours, fastpar.patch(ours, **patched or {})


@contextmanager
def quiet():
    """Calls may fall back."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fastpar.patch")
        yield


def assert_same_logits(ours, theirs, idx=None, **options):
    idx = ids_for() if idx is None else idx
    with quiet():
        got, want = logits_of(ours, idx, **options), logits_of(theirs, idx, **options)
    torch.testing.assert_close(got, want)


def state_of(model):
    """Keys in order, identities of parameters, bytes."""
    state = model.state_dict(keep_vars=True)
    return [(k, id(v), v.detach().clone()) for k, v in state.items()]


def assert_same_state(model, before):
    after = state_of(model)
    assert [row[:2] for row in after] == [row[:2] for row in before]
    assert all(torch.equal(a[2], b[2]) for a, b in zip(after, before))
