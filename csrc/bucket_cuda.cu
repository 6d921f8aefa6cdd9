// [Note: one launch] A call's list of tensors travels as a kernel argument: Table is as large as
// CUDA allows, about a thousand ranges. Longer lists take one launch per Table. Each block copies
// one chunk of one range; which one, it finds in the table. The types are read there too, so a list
// may mix them.
#include "norm_cuda.h"

namespace fastpar {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kGroup = 8;   // elements of one step of a thread: 16 bytes of a 16-bit type
constexpr int kUnroll = 4;  // groups of which a thread has the loads in flight at once
constexpr int64_t kChunk = kThreads * kGroup * kUnroll;
constexpr int64_t kArgumentBytes = 32764;  // of all arguments of a kernel

struct Range {
  void* to;
  const void* from;
  int64_t size;
  int32_t first_chunk;
  uint8_t to_dtype, from_dtype;
};

constexpr int64_t kRanges = (kArgumentBytes - 64) / sizeof(Range);

struct Table {
  int32_t count;
  Factor scale;
  Range ranges[kRanges];
};

constexpr int64_t kShards = (kArgumentBytes - 64) / sizeof(void*);
constexpr int kLeaf = 4;     // shards that are added in registers
constexpr int kLevels = 10;  // of the tree above the leaves
static_assert(kShards <= kLeaf << kLevels, "more shards than the tree holds");

struct Shards {
  int32_t world;
  Factor scale;
  const void* data[kShards];
};

__device__ FASTPAR_INLINE float read(const Factor& scale) {
  return scale.at ? *scale.at : scale.value;
}

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
FASTPAR_HOST_DEVICE bool aligned16(const void* p, int64_t bytes) {
  return (reinterpret_cast<std::uintptr_t>(p) + bytes) % sizeof(Words16) == 0;
}

template <class T, class S>
__device__ FASTPAR_INLINE int common_head(const T* p, const S* q) {
  for (int head = 0; head < kGroup; ++head) {
    if (aligned16(p, head * sizeof(T)) && aligned16(q, head * sizeof(S))) return head;
  }
  return -1;
}

template <class To, class From, bool add>
__device__ FASTPAR_INLINE void copy_one(To* to, const From* from, float scale) {
  const float x = to_float(*from) * scale;
  *to = from_float<To>(add ? to_float(*to) + x : x);
}

template <class To, class From, bool add>
__device__ FASTPAR_INLINE void copy_chunk(To* to, const From* from, int64_t size, float scale) {
  const int n = static_cast<int>(size < kChunk ? size : kChunk);
  const int thread = threadIdx.x;
  const int head = common_head(to, from);
  if (head < 0 || head >= n) {
    for (int i = thread; i < n; i += kThreads) copy_one<To, From, add>(to + i, from + i, scale);
    return;
  }
  const int groups = (n - head) / kGroup;
  const int tail = head + groups * kGroup;
  Group<From> x[kUnroll];
  Group<To> y[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int at = head + (u * kThreads + thread) * kGroup;
    if (at < tail) {
      x[u].load(from + at);
      if constexpr (add) y[u].load(to + at);
    }
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int at = head + (u * kThreads + thread) * kGroup;
    if (at < tail) {
      Group<To> result;
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const float v = x[u].get(i) * scale;
        result.set(i, add ? y[u].get(i) + v : v);
      }
      result.store(to + at);
    }
  }
  const int edge = thread < head ? thread : tail + thread - head;
  if (edge < n) copy_one<To, From, add>(to + edge, from + edge, scale);
}

template <bool add, class To>
__device__ FASTPAR_INLINE void copy_to(To* to, const void* from, uint8_t from_dtype, int64_t start,
                                       int64_t size, float scale) {
  switch (static_cast<Dtype>(from_dtype)) {
    case Dtype::float32:
      return copy_chunk<To, float, add>(to, static_cast<const float*>(from) + start, size, scale);
    case Dtype::bfloat16:
      return copy_chunk<To, BFloat16, add>(to, static_cast<const BFloat16*>(from) + start, size,
                                           scale);
    case Dtype::float16:
      return copy_chunk<To, Float16, add>(to, static_cast<const Float16*>(from) + start, size,
                                          scale);
  }
}

template <bool add>
__global__ void __launch_bounds__(kThreads, 2)
    bucket_copy_kernel(const __grid_constant__ Table table) {
  const int chunk = blockIdx.x;
  const int low =
      range_of_chunk(table.count, chunk, [&](int i) { return table.ranges[i].first_chunk; });
  const Range& range = table.ranges[low];
  const int64_t start = (chunk - range.first_chunk) * kChunk;
  const int64_t size = range.size - start;
  const float scale = read(table.scale);
  switch (static_cast<Dtype>(range.to_dtype)) {
    case Dtype::float32:
      return copy_to<add>(static_cast<float*>(range.to) + start, range.from, range.from_dtype,
                          start, size, scale);
    case Dtype::bfloat16:
      return copy_to<add>(static_cast<BFloat16*>(range.to) + start, range.from, range.from_dtype,
                          start, size, scale);
    case Dtype::float16:
      return copy_to<add>(static_cast<Float16*>(range.to) + start, range.from, range.from_dtype,
                          start, size, scale);
  }
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

// All lanes of a warp run each loop equally often, because NormLane needs them all; those beyond
// the end add zeros. Blocks add their bins to `words` by integer atomics, whose order changes
// nothing.
template <class Shard, class Out, bool bins>
__global__ void __launch_bounds__(kThreads)
    sum_shards_kernel(const __grid_constant__ Shards shards, Out* out, int64_t n, int head,
                      int64_t* words) {
  __shared__ int64_t rows[bins ? kWarps * kNormWords : 1];
  if constexpr (bins) {
    for (int i = threadIdx.x; i < kWarps * kNormWords; i += kThreads) rows[i] = 0;
    __syncthreads();
  }
  NormLane lane(rows + (bins ? threadIdx.x / kWarp * kNormWords : 0));
  const float scale = read(shards.scale);
  const int64_t first = int64_t(blockIdx.x) * kThreads;
  const int64_t step = int64_t(gridDim.x) * kThreads;
  const int64_t groups = head < 0 ? 0 : (n - head) / kGroup;
  for (int64_t start = first; start < groups; start += step) {
    const int64_t g = start + threadIdx.x;
    Group<Out> y = {};
    if (g < groups) {
      const int64_t at = head + g * kGroup;
      float sum[kGroup];
      sum_group<Shard>(shards, at, sum);
#pragma unroll
      for (int i = 0; i < kGroup; ++i) y.set(i, sum[i] * scale);
      y.store(out + at);
    }
    if constexpr (bins) lane.template add<Out>(y.words, true);
  }
  const int64_t inner = groups * kGroup;
  for (int64_t start = first; start < n - inner; start += step) {
    const int64_t i = start + threadIdx.x;
    Group<Out> y = {};
    if (i < n - inner) {
      const int64_t at = i < head ? i : i + inner;
      const float sum = sum_element<Shard>(shards, at);
      y.set(0, sum * scale);
      out[at] = from_float<Out>(sum * scale);
    }
    if constexpr (bins) lane.template add<Out>(y.words, true);
  }
  if constexpr (bins) {
    lane.finish();
    __syncthreads();
    if (threadIdx.x < kNormWords) {
      int64_t sum = 0;
      for (int w = 0; w < kWarps; ++w) sum += rows[w * kNormWords + threadIdx.x];
      using Word = unsigned long long;
      if (sum != 0) atomicAdd(reinterpret_cast<Word*>(words) + threadIdx.x, static_cast<Word>(sum));
    }
  }
}

template <bool add>
void copy_all(const BucketRange* ranges, int64_t count, const Factor& scale, Stream stream) {
  for (int64_t next = 0; next < count;) {
    Table table;
    table.count = 0;
    table.scale = scale;
    int64_t chunks = 0;
    for (; next < count && table.count < kRanges; ++next) {
      const BucketRange& r = ranges[next];
      if (r.size == 0) continue;
      const int64_t more = chunks + (r.size + kChunk - 1) / kChunk;
      if (more > INT32_MAX) break;
      table.ranges[table.count++] = {r.to,
                                     r.from,
                                     r.size,
                                     static_cast<int32_t>(chunks),
                                     static_cast<uint8_t>(r.to_dtype),
                                     static_cast<uint8_t>(r.from_dtype)};
      chunks = more;
    }
    launch(bucket_copy_kernel<add>, chunks, kThreads, stream, table);
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

void bucket_copy_cuda(const BucketRange* ranges, int64_t count, bool add, const Factor& scale,
                      Stream stream) {
  if (add) {
    copy_all<true>(ranges, count, scale, stream);
  } else {
    copy_all<false>(ranges, count, scale, stream);
  }
}

void sum_shards_cuda(const void* const* shards, int64_t world, void* out, int64_t n,
                     Dtype shard_dtype, Dtype out_dtype, const Factor& scale, int64_t* words,
                     Stream stream) {
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
      if (words) {
        launch(sum_shards_kernel<Shard, Out, true>, blocks, kThreads, stream, table, to, n,
               used_head, words);
      } else {
        launch(sum_shards_kernel<Shard, Out, false>, blocks, kThreads, stream, table, to, n,
               used_head, words);
      }
    });
  });
}

}  // namespace fastpar
