"""When the gradient of an embedding that is tied to the head is sent, and what is sent with it.

Backward ends with the embedding, so the table's gradient is complete when nothing is left to
compute. No block may wait for that, only what is small and outside of the blocks: so it is with
FSDP2, while DDP (and nanoGPT with it) sends what is left of the first block in that bucket, too.
"""

import math

import torch

from fastpar import GPT, GPTConfig, Mesh, engine_of, parallelize
from fastpar.axes.data import buckets_of
from fastpar.axes.step import Setup, Workload
from fastpar.settings.parallel import Parallel
from fastpar.testing import run_ranks


def order_of_sends(stage):
    """Bytes of each reduction, and between them where the embedding's backward begins."""
    torch.manual_seed(0)
    config = GPTConfig(n_layer=3, n_head=2, n_embd=16, block_size=8, vocab_size=2000, dropout=0.0)
    model = GPT(config)
    model = parallelize(
        model, Mesh(), Parallel.of(zero_stage=stage, bucket_mb=0.01, first_bucket_mb=0.002)
    )
    seen = []
    model.h[0].register_forward_pre_hook(
        lambda _, args: args[0].register_hook(lambda _: seen.append("embedding")) and None
    )
    engine = engine_of(model)

    def note(group, op, n_bytes, begin):
        seen.append(n_bytes)
        return begin()

    group = engine.shards.buckets[0].groups.reduce
    group.observers += (note,)
    ids = torch.zeros(2, 8, dtype=torch.int64)  # repeated: nobody counts them
    model(ids, ids).backward()
    sizes = [b.spec.numel * 4 for b in engine.shards.buckets]
    return [x for x in seen if x == "embedding" or x in sizes], sizes


def test_nothing_but_the_last_buckets_waits_for_the_table():
    for stage in (0, 1, 2, 3):
        for seen, sizes in run_ranks(order_of_sends, 2, stage):
            at = seen.index("embedding")
            assert len(sizes) > 4
            assert seen[:at] + seen[at + 1 :] == sizes, stage  # each once, in their order
            assert len(sizes) - at == 1, (stage, seen)
            assert max(sizes) == sizes[-1]


def test_what_the_table_of_gpt2_is_sent_with():
    """124M in fp32: 154 MB, and the positions' 3 MB."""
    workload = Workload(GPTConfig.preset("gpt2"), 8)
    for stage in range(4):
        buckets = buckets_of(workload, Setup(world_size=8, zero_stage=stage))
        last = buckets.layout.buckets[-1]
        table, positions = (buckets.shapes[i] for i in (0, 1))
        assert {0, 1} <= {buckets.layout.slots[i].registered for i in last.slots}
        beside = last.numel - math.prod(table) - math.prod(positions)
        assert 0 <= beside < 0.001 * math.prod(table), stage
