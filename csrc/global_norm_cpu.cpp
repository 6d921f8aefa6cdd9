#include <algorithm>
#include <vector>

#include "norm_cpu.h"
#include "ops.h"
#include "simd.h"

namespace fastpar {
namespace {

constexpr int64_t kTask = 16 * kNormChunk;  // elements of one range that a thread takes at once

template <class T>
struct NormTask {
  static FASTPAR_INLINE void run(const T* x, int64_t n, bool counted, NormBins* bins) {
    for (int64_t i = 0; i < n; i += kNormChunk) {
      norm_add_chunk(x + i, std::min<int64_t>(kNormChunk, n - i), counted, bins);
    }
  }
};

}  // namespace

void norm_bins(const NormRange* ranges, int64_t count, int64_t* words, int threads) {
  std::vector<int64_t> first_task(1, 0);  // of each range, and the total at the end
  first_task.reserve(count + 1);
  for (int64_t i = 0; i < count; ++i) {
    first_task.push_back(first_task.back() + (ranges[i].size + kTask - 1) / kTask);
  }
  const int64_t tasks = first_task.back();
  const Isa target = isa();
  threads = useful_threads(tasks, 2, threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    NormBins bins;
#pragma omp for schedule(static) nowait
    for (int64_t task = 0; task < tasks; ++task) {
      const auto next = std::upper_bound(first_task.begin(), first_task.end(), task);
      const int64_t index = next - first_task.begin() - 1;
      const NormRange& range = ranges[index];
      const int64_t start = (task - first_task[index]) * kTask;
      const int64_t n = std::min(kTask, range.size - start);
      with_dtype(range.dtype, [&](auto tag) {
        using T = decltype(tag);
        dispatch<NormTask<T>>(target, static_cast<const T*>(range.data) + start, n, range.counted,
                              &bins);
      });
    }
#pragma omp critical(fastpar_norm)
    norm_merge(bins, words);
  }
}

}  // namespace fastpar
