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

  // Adds n 16-byte words of each lane, of values stored as T; values beyond the end of the data are
  // 0. What is not finite is cleared in x.
  template <class T, int n>
  __device__ FASTPAR_INLINE void add(Words16 (&x)[n], bool counted) {
    float most = largest<T>(x);
    if (!is_finite(most)) {
      count_and_clear<T>(x);
      most = largest<T>(x);
    }
    if (!counted) return;
    constexpr int kValues = n * sizeof(Words16) / sizeof(T);
    const int reached = norm_top(most);
    if (reached > top || count + kValues > kNormChunk) {
      flush();
      top = reached > top ? reached : top;
    }
    const double rounder = norm_rounder(top), rounder_below = norm_rounder(top - 1);
#pragma unroll
    for (int i = 0; i < kValues; ++i)
      norm_add(to_float(get<T>(x, i)), rounder, rounder_below, &sums);
    count += kValues;
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
  template <class T, int n>
  __device__ static FASTPAR_INLINE T get(const Words16 (&x)[n], int i) {
    constexpr int kPerWord = 4 / sizeof(T);
    const uint32_t word = x[i / kPerWord / 4].word[i / kPerWord % 4];
    if constexpr (sizeof(T) == 4) {
      return bit_cast<T>(word);
    } else {
      return T{static_cast<uint16_t>(word >> (16 * (i % kPerWord)))};
    }
  }

  // Of the warp. Bits without the sign are ordered like magnitudes, inf and nan last.
  template <class T, int n>
  __device__ static FASTPAR_INLINE float largest(const Words16 (&x)[n]) {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 4 * n; ++i) {
      const uint32_t word = x[i / 4].word[i % 4];
      if constexpr (sizeof(T) == 4) {
        most = max_of(most, word & 0x7fffffffu);
      } else {
        most = max_of(most, max_of(word & 0x7fffu, word >> 16 & 0x7fffu));
      }
    }
    most = __reduce_max_sync(kAllLanes, most);
    if constexpr (sizeof(T) == 4) {
      return bit_cast<float>(most);
    } else {
      return to_float(T{static_cast<uint16_t>(most)});
    }
  }

  template <class T, int n>
  __device__ FASTPAR_INLINE void count_and_clear(Words16 (&x)[n]) {
    constexpr int kParts = 4 / sizeof(T);
#pragma unroll
    for (int i = 0; i < 4 * n * kParts; ++i) {
      const float value = to_float(get<T>(x, i));
      const bool nan = value != value, infinite = !nan && !is_finite(value);
      infinities += infinite;
      nans += nan;
      const uint32_t part = sizeof(T) == 4 ? 0xffffffffu : 0xffffu << (16 * (i % kParts));
      x[i / kParts / 4].word[i / kParts % 4] &= nan || infinite ? ~part : 0xffffffffu;
    }
  }

  __device__ static FASTPAR_INLINE bool is_finite(float x) {
    return (bit_cast<uint32_t>(x) & 0x7fffffffu) < 0x7f800000u;
  }

  __device__ static FASTPAR_INLINE uint32_t max_of(uint32_t a, uint32_t b) { return a > b ? a : b; }

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
