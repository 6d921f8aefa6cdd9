#include <algorithm>
#include <vector>

#include "ops.h"
#include "sum_tree.h"

namespace fastpar {
namespace {

// 16 K elements: enough to hide the loop over chunks, small enough to balance the threads.
constexpr int64_t kChunk = 1 << 14;

template <class Shard, class Out>
struct SumChunk {
  static FASTPAR_INLINE void run(const Shard* const* shards, int64_t world, Out* out, int64_t start,
                                 int64_t n, float scale) {
    SumTree<Shard> tree;
    const float* sum = tree.levels[0];
    for (int64_t first = 0; first < n; first += tree.kTile) {
      const int64_t size = std::min(tree.kTile, n - first);
      tree.add_up(shards, world, start + first, size);
      Out* to = out + start + first;
      for (int64_t i = 0; i < size; ++i) to[i] = from_float<Out>(sum[i] * scale);
    }
  }
};

}  // namespace

void sum_shards(const void* const* shards, int64_t world, void* out, int64_t n, Dtype shard_dtype,
                Dtype out_dtype, float scale, int threads) {
  const int64_t chunks = (n + kChunk - 1) / kChunk;
  const Isa target = isa();
  threads = useful_threads(chunks * world, 4, threads);
  with_dtype(shard_dtype, [&](auto shard) {
    with_dtype(out_dtype, [&](auto to) {
      using Shard = decltype(shard);
      using Out = decltype(to);
      std::vector<const Shard*> from(world);
      for (int64_t w = 0; w < world; ++w) from[w] = static_cast<const Shard*>(shards[w]);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const int64_t start = chunk * kChunk;
        dispatch<SumChunk<Shard, Out>>(target, from.data(), world, static_cast<Out*>(out), start,
                                       std::min(kChunk, n - start), scale);
      }
    });
  });
}

}  // namespace fastpar
