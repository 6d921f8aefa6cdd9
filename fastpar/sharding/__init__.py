"""Where a parameter lives: placements, layout of buckets, index ranges. No tensor is moved."""
