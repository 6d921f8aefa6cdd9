// What every CUDA source shares: launching on a stream, 16-byte accesses, facts about the device.
//
// [Note: CUDA without a GPU]
// With FASTPAR_EMULATED a *_cuda.cu file is plain C++: tests/support/cuda_emulator.h defines CUDA's
// words for a CPU (a block's threads run as fibers, blocks one after another), so the tests run the
// kernels' own source, barriers and shuffles included. A kernel may therefore
// use: static __shared__ arrays of plain types, __syncthreads, the warp functions that the emulator
// lists with all 32 lanes, integer atomics, one-dimensional grids and blocks (whole warps). It must
// not let threads return before a barrier that others reach.
#pragma once

#ifdef FASTPAR_EMULATED
#include "cuda_emulator.h"
#else
#include <cuda_runtime.h>
#endif

#include <algorithm>
#include <stdexcept>

#include "checks.h"
#include "numeric.h"
#include "ops_cuda.h"

namespace fastpar {

constexpr int kWarp = 32;

struct alignas(16) Words16 {
  uint32_t word[4];
};

// One 16-byte access to global memory; p is aligned to 16 bytes. The store is spelt out, because
// nvcc 13.0 splits one whose words come from shifts and ors (`make cuda-check`).
__device__ FASTPAR_INLINE Words16 load16(const void* p) {
#ifdef FASTPAR_EMULATED
  emulator::check_aligned(p, 16);
  return *static_cast<const Words16*>(p);
#else
  const uint4 value = *static_cast<const uint4*>(p);
  return {{value.x, value.y, value.z, value.w}};
#endif
}

__device__ FASTPAR_INLINE void store16(void* p, const Words16& value) {
#ifdef FASTPAR_EMULATED
  emulator::check_aligned(p, 16);
  *static_cast<Words16*>(p) = value;
#else
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)),
               "r"(value.word[0]), "r"(value.word[1]), "r"(value.word[2]), "r"(value.word[3])
               : "memory");
#endif
}

// The last of `count` ranges that starts at or before a chunk; first(i) is range i's first chunk.
template <class First>
__device__ FASTPAR_INLINE int range_of_chunk(int count, int chunk, First first) {
  int low = 0, high = count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (first(middle) <= chunk) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Starts kernel(args...) on `blocks` blocks. Never waits; can be captured in a CUDA graph.
template <class... Parameters, class... Args>
void launch(void (*kernel)(Parameters...), int64_t blocks, int threads, Stream stream,
            const Args&... args) {
  if (blocks == 0) return;
#ifdef FASTPAR_EMULATED
  (void)stream;
  emulator::run(blocks, threads, [&] { kernel(args...); });
#else
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(threads);
  config.stream = static_cast<cudaStream_t>(stream);
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, args...);
  if (error != cudaSuccess) {
    throw std::runtime_error(concat("launch: a kernel of ", blocks, " blocks of ", threads,
                                    " threads did not start (", cudaGetErrorString(error),
                                    "); the cause may be a kernel before it: repeat with "
                                    "CUDA_LAUNCH_BLOCKING=1"));
  }
#endif
}

// Streaming multiprocessors of the current device: what a persistent grid is sized by. Results must
// not depend on it.
inline int multiprocessors() {
#ifdef FASTPAR_EMULATED
  return 2;
#else
  int device = 0, count = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count > 0 ? count : 1;
#endif
}

}  // namespace fastpar
