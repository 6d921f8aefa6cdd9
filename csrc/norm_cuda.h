// One CUDA thread's part of the exact sum of squares; see norm_math.h. For use inside kernels.
#pragma once

#include "cuda_launch.h"
#include "norm_math.h"

namespace fastpar {

constexpr unsigned kAllLanes = 0xffffffffu;

__device__ FASTPAR_INLINE int64_t warp_sum(int64_t x) {
#pragma unroll
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) x += __shfl_xor_sync(kAllLanes, x, lanes);
  return x;
}

// The bins of a warp are a row of shared memory, zero at first; what its lanes have summed since
// the last flush are in registers. Every method is called by all 32 lanes.
struct NormLane {
  int64_t* words;  // the warp's row
  int64_t infinities = 0, nans = 0;
  NormSums sums = {0, 0};
  int top = 1;  // of the largest element of the warp since it last rose, as in norm_cpu.h
  int count = 0;

  __device__ FASTPAR_INLINE explicit NormLane(int64_t* row) : words(row) {}

  // Adds n values of each lane; values beyond the end of the data are 0.
  template <int n>
  __device__ FASTPAR_INLINE void add(float (&x)[n], bool counted) {
    uint32_t most = largest(x);
    if (most >= 0x7f800000u) {
      count_and_clear(x);
      most = largest(x);
    }
    if (!counted) return;
    const int reached = norm_top(bit_cast<float>(most));
    if (reached > top || count + n > kNormChunk) {
      flush();
      top = reached > top ? reached : top;
    }
    const double rounder = norm_rounder(top), rounder_below = norm_rounder(top - 1);
#pragma unroll
    for (int i = 0; i < n; ++i) norm_add(x[i], rounder, rounder_below, &sums);
    count += n;
  }

  // Moves everything into the warp's row.
  __device__ FASTPAR_INLINE void finish() {
    flush();
    const int64_t all_infinities = warp_sum(infinities), all_nans = warp_sum(nans);
    if (threadIdx.x % kWarp == 0) {
      words[kNormInfinities] += all_infinities;
      words[kNormNans] += all_nans;
    }
    infinities = nans = 0;
  }

 private:
  template <int n>
  __device__ FASTPAR_INLINE uint32_t largest(const float (&x)[n]) const {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const uint32_t bits = bit_cast<uint32_t>(x[i]) & 0x7fffffffu;
      most = bits > most ? bits : most;
    }
    return __reduce_max_sync(kAllLanes, most);
  }

  template <int n>
  __device__ FASTPAR_INLINE void count_and_clear(float (&x)[n]) {
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const uint32_t bits = bit_cast<uint32_t>(x[i]) & 0x7fffffffu;
      infinities += bits == 0x7f800000u;
      nans += bits > 0x7f800000u;
      if (bits >= 0x7f800000u) x[i] = 0.0f;
    }
  }

  __device__ FASTPAR_INLINE void flush() {
    if (count == 0) return;
    const NormSums units =
        norm_units(sums, norm_rounder(top), norm_rounder(top - 1), static_cast<int64_t>(count));
    const int64_t top_low = warp_sum(static_cast<int64_t>(units.top & 0xffffffffu));
    const int64_t top_high = warp_sum(static_cast<int64_t>(units.top) >> 32);
    const int64_t below_low = warp_sum(static_cast<int64_t>(units.below & 0xffffffffu));
    const int64_t below_high = warp_sum(static_cast<int64_t>(units.below) >> 32);
    if (threadIdx.x % kWarp == 0) {
      words[2 * top] += top_low;
      words[2 * top + 1] += top_high;
      words[2 * top - 2] += below_low;
      words[2 * top - 1] += below_high;
    }
    sums = {0, 0};
    count = 0;
  }
};

}  // namespace fastpar
