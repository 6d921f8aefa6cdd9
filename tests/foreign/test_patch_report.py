"""What fastpar.patch reports."""

import pytest
import torch
import torch.distributed as dist
from test_patched import Nano, gpt2
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fastpar


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_report_of_gpt2(device):
    model = gpt2()
    with torch.device(device):  # torch's default device changes nothing
        report = fastpar.patch(model)
    counts = {kind: len(names) for kind, names in report.replaced.items()}
    assert counts == {
        "GPT2Model": 1, "Embedding": 2, "GPT2Block": 2, "GPT2Attention": 2, "GPT2MLP": 2,
        "LayerNorm": 5,
    }  # fmt: skip
    assert report.replaced["GPT2Attention"] == ["transformer.h.0.attn", "transformer.h.1.attn"]
    left = {kind: names for (kind, _), names in report.left.items()}
    assert left == {"GPT2LMHeadModel": ["model"], "Dropout": ["transformer.drop"],
                    "Linear": ["lm_head"]}  # fmt: skip
    text = str(report)
    for line in (
        "fastpar.patch(GPT2LMHeadModel): 14 modules replaced",
        "   2 GPT2Attention: attention on the packed projection",
        "   1 Linear (lm_head): torch's, no faster one here",
        "GPT2Attention: an attention_mask (padding); leave it out when no token is padding",
        "calls that fell back so far: none",
        "torch.manual_seed rules its masks, which are not torch's",
    ):
        assert line in text
    assert text.isascii()


def test_report_of_nanogpt():
    report = fastpar.patch(Nano())
    counts = {kind: len(names) for kind, names in report.replaced.items()}
    assert counts == {
        "Embedding": 2, "Layer": 2, "SelfAttention": 2, "FeedForward": 2, "GELU": 2, "Norm": 5,
    }  # fmt: skip


def test_what_fully_shard_had_before():
    """It gives modules classes of its own, which no formula is known of."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = gpt2()
        fully_shard(model.transformer.h[0], mesh=mesh)
        words = "FSDPGPT2Block (transformer.h.0): fully_shard has changed its class: call patch bef"
        assert words in str(fastpar.patch(model))
    finally:
        dist.destroy_process_group()
