// Every op that has a CUDA kernel, with its contract: ops.h for the device. Pointers are to device
// memory, or where said to host memory that is read before the call returns; work is enqueued on
// `stream` of the current device and never waited for. The results have the bits of the CPU's.
#pragma once

#include "ops.h"

namespace fastpar {

using Stream = void*;  // a cudaStream_t; null is the default stream

// total[n] += values[n], summed in float.
void accumulate_cuda(void* total, const void* values, Dtype total_dtype, Dtype values_dtype,
                     int64_t n, Stream stream);

}  // namespace fastpar
