// Every op that has a CUDA kernel, with its contract: ops.h for the device. Pointers are to device
// memory, or where said to host memory that is read before the call returns; work is enqueued on
// `stream` of the current device and never waited for. The results have the bits of the CPU's.
#pragma once

#include "ops.h"

namespace fastpar {

using Stream = void*;  // a cudaStream_t; null is the default stream

// Returns the number of launches: one where the ranges fit into a kernel's argument, about 800 in
// fp32 and 450 in the mode that needs most, with at most 32 hypers (adamw_cuda.cu [Note: one
// launch]).
int64_t adamw_step_cuda(const AdamwRange* ranges, int64_t range_count, const AdamwHyper* hypers,
                        int64_t hyper_count, const AdamwModes& modes, Stream stream);

// One launch; world <= 4087.
void sum_shards_cuda(const void* const* shards, int64_t world, void* out, int64_t n,
                     Dtype shard_dtype, Dtype out_dtype, float scale, Stream stream);

// The rows that norm_partials_cuda may write for `count` ranges.
int64_t norm_rows_cuda(int64_t count);

// rows[returned number][kNormWords] = parts of what norm_bins adds. One launch for about a thousand
// ranges.
int64_t norm_partials_cuda(const NormRange* ranges, int64_t count, int64_t* rows, Stream stream);

// Sums the rows into words[kNormWords] and writes norm_result()'s result[3]; either may be null.
// One launch.
void norm_finish_cuda(const int64_t* rows, int64_t count, const NormClip& clip, int64_t* words,
                      float* result, Stream stream);

// One launch each. codes are aligned to 16 bytes in quantize_blockwise, out in
// dequantize_blockwise.
void quantize_blockwise_cuda(const void* x, Dtype x_dtype, const QuantizeBlocks& to, int64_t n,
                             const uint64_t* seed, uint64_t first_index, Stream stream);
void dequantize_blockwise_cuda(const QuantizeBlocks& from, Code code, void* out, Dtype out_dtype,
                               int64_t n, Stream stream);

}  // namespace fastpar
