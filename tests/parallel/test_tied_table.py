"""When the gradient of an embedding that is tied to the head is sent, and what is sent with it.

Backward ends with the embedding, so the table's gradient is complete when nothing is left to
compute. Nothing else may wait for that. DDP (and nanoGPT with it) sends what is left of the first
block in that bucket, too; FSDP2 the parameters outside of the blocks, as stages 1 to 3 do here.
"""

import torch

from fastpar import GPT, GPTConfig, Mesh, engine_of, parallelize
from fastpar.parallel.units import find_units, unit_of_parameters
from fastpar.sharding.layout import ParamSpec, build_layout, default_bucket_mb, parameter_names
from fastpar.testing import run_ranks

MIB = 2**20


def order_of_sends(stage):
    """Bytes of each reduction, and between them where the embedding's backward begins."""
    torch.manual_seed(0)
    config = GPTConfig(n_layer=3, n_head=2, n_embd=16, block_size=8, vocab_size=2000, dropout=0.0)
    model = GPT(config)
    model = parallelize(model, Mesh(), zero_stage=stage, bucket_mb=0.01, first_bucket_mb=0.002)
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
            assert len(sizes) - at == (2 if stage == 0 else 1), (stage, seen)
            assert max(sizes) == sizes[-1]


def test_what_the_table_of_gpt2_is_sent_with():
    """The figures of 124M in fp32: the table has 154 MB, and 3 to 22 more follow backward."""
    with torch.device("meta"):
        model = GPT(GPTConfig.preset("gpt2"))
    named = parameter_names(model)
    unit_of = unit_of_parameters(find_units(model, None, merge_bytes=MIB))
    late = {"wte.weight", "wpe.weight"}
    for shards, units in ((1, None), (8, [unit_of[p] for p in named])):
        layout = build_layout(
            [ParamSpec(names, tuple(p.shape), p.dtype) for p, names in named.items()],
            n_shards=shards,
            bucket_bytes=default_bucket_mb(8, "nccl") * MIB,
            first_bucket_bytes=MIB,
            unit_of=units,
        )
        waiting = [
            b for b in layout.buckets if late & {layout.slots[i].spec.names[0] for i in b.slots}
        ]
        table = model.wte.weight.numel() * 4
        beside = sum(b.numel * 4 for b in waiting) - table
        assert beside < (23e6 if shards == 1 else 3.5e6)
        assert waiting[-1] is layout.buckets[-1]
