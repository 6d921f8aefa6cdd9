#include "norm_cuda.h"

namespace fastpar {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kGroup = 8;  // elements of one step of a thread: 16 bytes of a 16-bit type
constexpr int64_t kArgumentBytes = 32764;  // of all arguments of a kernel

constexpr int64_t kShards = (kArgumentBytes - 64) / sizeof(void*);
constexpr int kLeaf = 4;     // shards that are added in registers
constexpr int kLevels = 10;  // of the tree above the leaves
static_assert(kShards <= kLeaf << kLevels, "more shards than the tree holds");

struct Shards {
  int32_t world;
  float scale;
  const void* data[kShards];
};

// kGroup elements at p, which is aligned to 16 bytes, as they are stored.
template <class T>
struct Group {
  static constexpr int kWords = kGroup * sizeof(T) / sizeof(Words16);
  Words16 words[kWords];

  __device__ FASTPAR_INLINE void load(const T* p) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = load16(reinterpret_cast<const Words16*>(p) + i);
  }
  __device__ FASTPAR_INLINE void store(T* p) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) store16(reinterpret_cast<Words16*>(p) + i, words[i]);
  }
  __device__ FASTPAR_INLINE float get(int i) const {
    if constexpr (sizeof(T) == 4) {
      return bit_cast<float>(words[i / 4].word[i % 4]);
    } else {
      return to_float(T{static_cast<uint16_t>(words[0].word[i / 2] >> (16 * (i % 2)))});
    }
  }
  __device__ FASTPAR_INLINE void set(int i, float x) {
    if constexpr (sizeof(T) == 4) {
      words[i / 4].word[i % 4] = bit_cast<uint32_t>(x);
    } else {
      const uint32_t bits = from_float<T>(x).bits;
      uint32_t& word = words[0].word[i / 2];
      word = i % 2 ? (word & 0xffffu) | bits << 16 : bits;
    }
  }
};

// The fewest elements after which both are aligned to 16 bytes, -1 if there are none.
bool aligned16(const void* p, int64_t bytes) {
  return (reinterpret_cast<std::uintptr_t>(p) + bytes) % sizeof(Words16) == 0;
}

// (x[0] + x[1]) + (x[2] + x[3]) of the first `count` of them.
__device__ FASTPAR_INLINE float leaf_sum(int count, const float* x) {
  const float left = count > 1 ? x[0] + x[1] : x[0];
  const float right = count > 3 ? x[2] + x[3] : x[2];
  return count > 2 ? left + right : left;
}

// sum[kGroup] of shards[first : first + kLeaf], or of as many as there are.
template <class Shard>
__device__ FASTPAR_INLINE void sum_leaf(const Shards& shards, int first, int64_t at, float* sum) {
  const int count = shards.world - first;
  Group<Shard> x[kLeaf] = {};
#pragma unroll
  for (int u = 0; u < kLeaf; ++u) {
    if (u < count) x[u].load(static_cast<const Shard*>(shards.data[first + u]) + at);
  }
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    const float values[kLeaf] = {x[0].get(i), x[1].get(i), x[2].get(i), x[3].get(i)};
    sum[i] = leaf_sum(count, values);
  }
}

// The sum of one group of elements over at most 2 * kLeaf shards.
template <class Shard>
__device__ FASTPAR_INLINE void sum_group(const Shards& shards, int64_t at, float* sum) {
  sum_leaf<Shard>(shards, 0, at, sum);
  if (shards.world > kLeaf) {
    float right[kGroup];
    sum_leaf<Shard>(shards, kLeaf, at, right);
#pragma unroll
    for (int i = 0; i < kGroup; ++i) sum[i] += right[i];
  }
}

// The sum of one element over any number of shards. level[l] is the sum of 2^l leaves that waits
// for its right neighbour; unrolled, so that it is in registers.
template <class Shard>
__device__ FASTPAR_INLINE float sum_element(const Shards& shards, int64_t at) {
  float level[kLevels] = {};
  const int leaves = (shards.world + kLeaf - 1) / kLeaf;
  for (int leaf = 0; leaf < leaves; ++leaf) {
    const int first = leaf * kLeaf, count = shards.world - first;
    float x[kLeaf] = {};
#pragma unroll
    for (int u = 0; u < kLeaf; ++u) {
      if (u < count) x[u] = to_float(static_cast<const Shard*>(shards.data[first + u])[at]);
    }
    float sum = leaf_sum(count, x);
    bool placed = false;
#pragma unroll
    for (int l = 0; l < kLevels; ++l) {
      const bool waits = leaf >> l & 1;
      if (!placed && waits) sum = level[l] + sum;
      if (!placed && !waits) level[l] = sum;
      placed = placed || !waits;
    }
  }
  float total = 0.0f;
  bool begun = false;  // from the right: each remaining sum is added to the one on its left
#pragma unroll
  for (int l = 0; l < kLevels; ++l) {
    const bool waits = leaves >> l & 1;
    if (waits) total = begun ? level[l] + total : level[l];
    begun = begun || waits;
  }
  return total;
}

template <class Shard, class Out>
__global__ void __launch_bounds__(kThreads, 4)
    sum_shards_kernel(const __grid_constant__ Shards shards, Out* out, int64_t n, int head) {
  const int64_t first = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t step = int64_t(gridDim.x) * kThreads;
  const int64_t groups = head < 0 ? 0 : (n - head) / kGroup;
  for (int64_t g = first; g < groups; g += step) {
    const int64_t at = head + g * kGroup;
    float sum[kGroup];
    sum_group<Shard>(shards, at, sum);
    Group<Out> y;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) y.set(i, sum[i] * shards.scale);
    y.store(out + at);
  }
  const int64_t inner = groups * kGroup;
  for (int64_t i = first; i < n - inner; i += step) {
    const int64_t at = i < head ? i : i + inner;
    out[at] = from_float<Out>(sum_element<Shard>(shards, at) * shards.scale);
  }
}

// The fewest elements after which out and every shard are aligned to 16 bytes, -1 if there are
// none, or more shards than sum_group adds.
template <class Shard, class Out>
int common_head(const void* const* shards, int64_t world, const void* out) {
  if (world > 2 * kLeaf) return -1;
  for (int head = 0; head < kGroup; ++head) {
    if (aligned16(out, head * sizeof(Out)) &&
        std::all_of(shards, shards + world,
                    [&](const void* p) { return aligned16(p, head * sizeof(Shard)); })) {
      return head;
    }
  }
  return -1;
}

}  // namespace

void sum_shards_cuda(const void* const* shards, int64_t world, void* out, int64_t n,
                     Dtype shard_dtype, Dtype out_dtype, float scale, Stream stream) {
  FASTPAR_CHECK(world <= kShards, "sum_shards: expected at most ", kShards,
                " shards, got world=", world, "; sum parts of them first");
  Shards table;
  table.world = static_cast<int32_t>(world);
  table.scale = scale;
  std::copy(shards, shards + world, table.data);
  with_dtype(shard_dtype, [&](auto s) {
    with_dtype(out_dtype, [&](auto o) {
      using Shard = decltype(s);
      using Out = decltype(o);
      const int head = common_head<Shard, Out>(shards, world, out);
      const int64_t steps = head < 0 || head > n ? n : n / kGroup + 1;
      const int64_t blocks =
          std::min<int64_t>((steps + kThreads - 1) / kThreads, 16 * multiprocessors());
      const int used_head = head > n ? -1 : head;
      Out* to = static_cast<Out*>(out);
      launch(sum_shards_kernel<Shard, Out>, blocks, kThreads, stream, table, to, n, used_head);
    });
  });
}

}  // namespace fastpar
