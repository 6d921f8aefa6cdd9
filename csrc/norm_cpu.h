// One CPU thread's part of the exact sum of squares; see norm_math.h.
#pragma once

#include <algorithm>
#include <limits>

#include "norm_math.h"

namespace fastpar {

// The bins that one thread fills. `top` is that of the largest element so far: all elements since
// it last rose count as one chunk of [Note: exact sum of squares], whose top it is.
struct NormBins {
  int64_t words[kNormWords] = {};
  int top = 1;
};

// Signed, because every instruction set has their maximum.
FASTPAR_INLINE int32_t norm_magnitude(float x) { return bit_cast<int32_t>(x) & 0x7fffffff; }
FASTPAR_INLINE int16_t norm_magnitude(BFloat16 x) { return static_cast<int16_t>(x.bits & 0x7fff); }
FASTPAR_INLINE int16_t norm_magnitude(Float16 x) { return static_cast<int16_t>(x.bits & 0x7fff); }

FASTPAR_INLINE bool norm_is_finite(float x) {
  return (bit_cast<uint32_t>(x) & 0x7fffffffu) < 0x7f800000u;
}

// One pass over x[n]: units of bins top and top - 1, and the largest magnitude. The units mean
// nothing where that is not finite or reaches a higher bin.
template <class T>
FASTPAR_INLINE NormSums norm_pass(const T* x, int64_t n, int top, float* largest) {
  const double rounder = norm_rounder(top), rounder_below = norm_rounder(top - 1);
  NormSums sums = {0, 0};
  // The bits without the sign are ordered like the magnitudes, inf and nan last.
  decltype(norm_magnitude(T{})) most = 0;
  for (int64_t i = 0; i < n; ++i) {
    most = std::max(most, norm_magnitude(x[i]));
    norm_add(to_float(x[i]), rounder, rounder_below, &sums);
  }
  *largest = to_float(bit_cast<T>(most));
  return norm_units(sums, rounder, rounder_below, n);
}

// Counts what is not finite in x[n] and copies the rest, with 0 in its place.
template <class T>
FASTPAR_INLINE void norm_count(const T* x, int64_t n, int64_t* words, float* rest) {
  for (int64_t i = 0; i < n; ++i) {
    const float value = to_float(x[i]);
    const uint32_t magnitude = bit_cast<uint32_t>(value) & 0x7fffffffu;
    words[kNormInfinities] += magnitude == 0x7f800000u;
    words[kNormNans] += magnitude > 0x7f800000u;
    rest[i] = magnitude < 0x7f800000u ? value : 0.0f;
  }
}

// Adds x[n], all finite, given the units and the largest magnitude that a pass with the present top
// has found.
template <class T>
FASTPAR_INLINE void norm_add_finite(const T* x, int64_t n, NormSums units, float largest,
                                    NormBins* bins) {
  const int top = norm_top(largest);
  if (top > bins->top) {
    bins->top = top;
    units = norm_pass(x, n, top, &largest);
  }
  norm_store(units, bins->top, bins->words);
}

// Adds x[n], n at most kNormChunk, to the thread's bins; where it is not `counted`, only what is
// not finite in it. Part of a kernel's run() (simd.h), so that it is compiled for its instruction
// set.
template <class T>
FASTPAR_INLINE void norm_add_chunk(const T* x, int64_t n, bool counted, NormBins* bins) {
  float largest;
  const NormSums units = norm_pass(x, n, bins->top, &largest);
  if (norm_is_finite(largest)) {
    if (counted) norm_add_finite(x, n, units, largest, bins);
    return;
  }
  float rest[kNormChunk];
  norm_count(x, n, bins->words, rest);
  if (counted) {
    const NormSums finite = norm_pass(rest, n, bins->top, &largest);
    norm_add_finite(rest, n, finite, largest, bins);
  }
}

// Adds one thread's bins to the shared ones; the caller lets in one thread at a time.
inline void norm_merge(const NormBins& bins, int64_t* words) {
  for (int i = 0; i < kNormWords; ++i) words[i] += bins.words[i];
}

}  // namespace fastpar
