"""Where a parameter lives: placements, layout of buckets, index ranges. No tensor is moved."""

from fastpar.sharding.placements import Partial, Replicate, Shard

__all__ = ["Partial", "Replicate", "Shard"]
