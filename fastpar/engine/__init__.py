"""parallelize() and the engine: buckets, gathers, reductions, the step."""
