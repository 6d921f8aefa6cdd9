#include <algorithm>
#include <vector>

#include "norm_cpu.h"
#include "ops.h"
#include "sum_tree.h"

namespace fastpar {
namespace {

// 16 K elements: enough to hide the loop over chunks, small enough to balance the threads.
constexpr int64_t kChunk = 1 << 14;

// ivdep: to and from are disjoint, or equal and then of one type.
template <class To, class From, bool add>
struct CopyChunk {
  static FASTPAR_INLINE void run(To* to, const From* from, int64_t n, float scale) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      const float x = to_float(from[i]) * scale;
      to[i] = from_float<To>(add ? to_float(to[i]) + x : x);
    }
  }
};

template <class Shard, class Out>
struct SumChunk {
  static FASTPAR_INLINE void run(const Shard* const* shards, int64_t world, Out* out, int64_t start,
                                 int64_t n, float scale, NormBins* bins) {
    SumTree<Shard> tree;
    const float* sum = tree.levels[0];
    for (int64_t first = 0; first < n; first += tree.kTile) {
      const int64_t size = std::min(tree.kTile, n - first);
      tree.add_up(shards, world, start + first, size);
      Out* to = out + start + first;
      for (int64_t i = 0; i < size; ++i) to[i] = from_float<Out>(sum[i] * scale);
      if (bins) norm_add_chunk(to, size, true, bins);
    }
  }
};

float read(const Factor& scale) { return scale.at ? *scale.at : scale.value; }

template <bool add>
void copy_all(const BucketRange* ranges, int64_t count, float scale, int threads) {
  std::vector<int64_t> first_chunk;  // of each range, and the total at the end
  first_chunk.reserve(count + 1);
  first_chunk.push_back(0);
  for (int64_t i = 0; i < count; ++i) {
    first_chunk.push_back(first_chunk.back() + (ranges[i].size + kChunk - 1) / kChunk);
  }
  const int64_t chunks = first_chunk.back();
  const Isa target = isa();
  threads = useful_threads(chunks, 2, threads);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const auto next = std::upper_bound(first_chunk.begin(), first_chunk.end(), chunk);
    const int64_t index = next - first_chunk.begin() - 1;
    const BucketRange& range = ranges[index];
    const int64_t start = (chunk - first_chunk[index]) * kChunk;
    const int64_t n = std::min(kChunk, range.size - start);
    with_dtype(range.to_dtype, [&](auto to) {
      with_dtype(range.from_dtype, [&](auto from) {
        using To = decltype(to);
        using From = decltype(from);
        dispatch<CopyChunk<To, From, add>>(target, static_cast<To*>(range.to) + start,
                                           static_cast<const From*>(range.from) + start, n, scale);
      });
    });
  }
}

}  // namespace

void bucket_copy(const BucketRange* ranges, int64_t count, bool add, const Factor& scale,
                 int threads) {
  if (add) {
    copy_all<true>(ranges, count, read(scale), threads);
  } else {
    copy_all<false>(ranges, count, read(scale), threads);
  }
}

void sum_shards(const void* const* shards, int64_t world, void* out, int64_t n, Dtype shard_dtype,
                Dtype out_dtype, const Factor& scale, int64_t* words, int threads) {
  const float factor = read(scale);
  const int64_t chunks = (n + kChunk - 1) / kChunk;
  const Isa target = isa();
  threads = useful_threads(chunks * world, 4, threads);
  with_dtype(shard_dtype, [&](auto shard) {
    with_dtype(out_dtype, [&](auto to) {
      using Shard = decltype(shard);
      using Out = decltype(to);
      std::vector<const Shard*> from(world);
      for (int64_t w = 0; w < world; ++w) from[w] = static_cast<const Shard*>(shards[w]);
#pragma omp parallel num_threads(threads) if (threads > 1)
      {
        NormBins bins;
        NormBins* own = words ? &bins : nullptr;
#pragma omp for schedule(static) nowait
        for (int64_t chunk = 0; chunk < chunks; ++chunk) {
          const int64_t start = chunk * kChunk;
          dispatch<SumChunk<Shard, Out>>(target, from.data(), world, static_cast<Out*>(out), start,
                                         std::min(kChunk, n - start), factor, own);
        }
        if (words) {
#pragma omp critical(fastpar_norm)
          norm_merge(bins, words);
        }
      }
    });
  });
}

}  // namespace fastpar
