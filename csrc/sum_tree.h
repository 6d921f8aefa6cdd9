// The order in which the values of several ranks are added, everywhere on a CPU.
//
// [Note: the tree] Neighbours first, ((r0 + r1) + (r2 + r3)) + ((r4 + r5) + (r6 + r7)); where the
// ranks are not a power of two, the largest power of two below them is on the left and the rest is
// a tree of its own on the right: (r0 + r1) + r2. Ranks that each hold the tree of equally many
// values (micro-batches) then have, together, the tree of all: the bits do not depend on how many
// ranks the values were spread over (test_ranks_that_hold_trees_of_their_own).
// csrc/sum_shards_cuda.cu, kernels/sum_shards.py and fastpar/comm/collectives.py add in the same
// order.
#pragma once

#include <cstdint>

#include "simd.h"

namespace fastpar {

// What a type is added in.
template <class T>
struct Sum {
  using Type = T;
  static FASTPAR_INLINE T widen(T x) { return x; }
  static FASTPAR_INLINE T narrow(T x) { return x; }
};
template <>
struct Sum<int64_t> {
  using Type = uint64_t;  // wraps around where a signed sum would be undefined
  static FASTPAR_INLINE uint64_t widen(int64_t x) { return static_cast<uint64_t>(x); }
  static FASTPAR_INLINE int64_t narrow(uint64_t x) { return static_cast<int64_t>(x); }
};
template <>
struct Sum<BFloat16> {
  using Type = float;
  static FASTPAR_INLINE float widen(BFloat16 x) { return to_float(x); }
  static FASTPAR_INLINE BFloat16 narrow(float x) { return from_float<BFloat16>(x); }
};
template <>
struct Sum<Float16> {
  using Type = float;
  static FASTPAR_INLINE float widen(Float16 x) { return to_float(x); }
  static FASTPAR_INLINE Float16 narrow(float x) { return from_float<Float16>(x); }
};

// Sums of a tile of elements, which stay in the first cache; levels[0].sum is the result.
template <class T>
struct SumTree {
  using S = typename Sum<T>::Type;
  static constexpr int64_t kTile = 1 << 10;
  static constexpr int64_t kLeaf = 4;  // ranks that are added in registers
  static constexpr int kLevels = 30;   // enough for 2^31 ranks; memory is touched as far as needed

  S levels[kLevels][kTile];

  // levels[0][i] = the tree over r of from[r][first + i], i < n <= kTile.
  FASTPAR_INLINE void add_up(const T* const* from, int64_t world, int64_t first, int64_t n) {
    int depth = 0;  // of the stack of sums that wait for their right neighbour
    for (int64_t r = 0, leaf = 0; r < world; r += kLeaf, ++leaf) {
      add_leaf(from + r, world - r, first, n, levels[depth++]);
      const bool last = r + kLeaf >= world;
      for (int64_t bits = leaf; last ? depth > 1 : (bits & 1) != 0; bits >>= 1) {
        --depth;
        S* left = levels[depth - 1];
        const S* right = levels[depth];
        for (int64_t i = 0; i < n; ++i) left[i] += right[i];
      }
    }
  }

 private:
  static FASTPAR_INLINE S wide(T x) { return Sum<T>::widen(x); }

  static FASTPAR_INLINE void add_leaf(const T* const* from, int64_t count, int64_t first, int64_t n,
                                      S* sum) {
    const T* a = from[0] + first;
    const T* b = from[count > 1] + first;
    const T* c = from[count > 2 ? 2 : 0] + first;
    const T* d = from[count > 3 ? 3 : 0] + first;
    if (count == 1) {
      for (int64_t i = 0; i < n; ++i) sum[i] = wide(a[i]);
    } else if (count == 2) {
      for (int64_t i = 0; i < n; ++i) sum[i] = wide(a[i]) + wide(b[i]);
    } else if (count == 3) {
      for (int64_t i = 0; i < n; ++i) sum[i] = (wide(a[i]) + wide(b[i])) + wide(c[i]);
    } else {
      for (int64_t i = 0; i < n; ++i) {
        sum[i] = (wide(a[i]) + wide(b[i])) + (wide(c[i]) + wide(d[i]));
      }
    }
  }
};

}  // namespace fastpar
