// [Note: two launches] The partials kernel takes the list of ranges as its argument: Table is as
// large as CUDA allows, about a thousand ranges; longer lists take one launch per Table. Its blocks
// take tiles of the ranges in turn and write one row of bins each. The finish kernel, one block,
// adds the rows and computes the norm, the factor and the flag. Sums are of integers, so neither
// the number of blocks nor their order changes a bit.
#include "norm_cuda.h"

namespace fastpar {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kLoads = 4;          // 16-byte loads of a thread that are in flight at once
constexpr int kSteps = 4;          // times a thread does that within a tile
constexpr int kBlocksPerUnit = 3;  // of a multiprocessor
constexpr int kFinishThreads = 1024;
constexpr int64_t kTileWords = int64_t(kThreads) * kLoads * kSteps;  // of 16 bytes
constexpr int64_t kArgumentBytes = 32764;                            // of all arguments of a kernel

struct Range {
  const void* data;
  int64_t size;
  int32_t first_tile;
  uint8_t dtype, counted;
};

constexpr int64_t kRanges = (kArgumentBytes - 64) / sizeof(Range);

struct Table {
  int32_t count, tiles;
  Range ranges[kRanges];
};

__device__ FASTPAR_INLINE void set_first(Words16* words, float x) {
  words->word[0] = bit_cast<uint32_t>(x);
}

template <class T>
__device__ FASTPAR_INLINE void set_first(Words16* words, T x) {
  words->word[0] = x.bits;
}

// Tile `tile` of data[size]: kTileWords of its aligned 16-byte words; the first tile also takes the
// elements before and after these.
template <class T>
__device__ FASTPAR_INLINE void add_tile(const T* data, int64_t size, int64_t tile, bool counted,
                                        NormLane* lane) {
  constexpr int kGroup = sizeof(Words16) / sizeof(T);
  const int64_t to_aligned =
      (0 - reinterpret_cast<std::uintptr_t>(data)) % sizeof(Words16) / sizeof(T);
  const int64_t head = to_aligned < size ? to_aligned : size;
  const int64_t words = (size - head) / kGroup;
  const T* body = data + head;
  const int64_t first = tile * kTileWords;
  const int64_t last = first + kTileWords < words ? first + kTileWords : words;
  for (int64_t start = first; start < last; start += kThreads * kLoads) {
    Words16 x[kLoads];
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      const int64_t at = start + u * kThreads + threadIdx.x;
      x[u] = at < last ? load16(body + at * kGroup) : Words16{};
    }
    lane->add<T>(x, counted);
  }
  if (tile == 0) {
    const int64_t edge = threadIdx.x < head ? threadIdx.x : threadIdx.x + words * kGroup;
    Words16 x[1] = {};
    if (edge < size) set_first(&x[0], data[edge]);
    lane->add<T>(x, counted);
  }
}

__global__ void __launch_bounds__(kThreads, kBlocksPerUnit)
    norm_partials_kernel(const __grid_constant__ Table table, int64_t* rows) {
  __shared__ int64_t bins[kWarps * kNormWords];
  for (int i = threadIdx.x; i < kWarps * kNormWords; i += kThreads) bins[i] = 0;
  __syncthreads();
  NormLane lane(bins + threadIdx.x / kWarp * kNormWords);
  for (int tile = blockIdx.x; tile < table.tiles; tile += gridDim.x) {
    const int low =
        range_of_chunk(table.count, tile, [&](int i) { return table.ranges[i].first_tile; });
    const Range& range = table.ranges[low];
    const int64_t within = tile - range.first_tile;
    switch (static_cast<Dtype>(range.dtype)) {
      case Dtype::float32:
        add_tile(static_cast<const float*>(range.data), range.size, within, range.counted, &lane);
        break;
      case Dtype::bfloat16:
        add_tile(static_cast<const BFloat16*>(range.data), range.size, within, range.counted,
                 &lane);
        break;
      case Dtype::float16:
        add_tile(static_cast<const Float16*>(range.data), range.size, within, range.counted, &lane);
        break;
    }
  }
  lane.finish();
  __syncthreads();
  if (threadIdx.x < kNormWords) {
    int64_t sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += bins[w * kNormWords + threadIdx.x];
    rows[int64_t(blockIdx.x) * kNormWords + threadIdx.x] = sum;
  }
}

// A warp for every 32nd row, a lane for every word.
__global__ void __launch_bounds__(kFinishThreads)
    norm_finish_kernel(const int64_t* rows, int64_t count, NormClip clip, int64_t* words,
                       float* result) {
  static_assert(kNormWords <= kWarp, "a lane holds one word");
  __shared__ int64_t partial[kFinishThreads];
  const int word = threadIdx.x % kWarp;
  int64_t sum = 0;
  if (word < kNormWords) {
    for (int64_t row = threadIdx.x / kWarp; row < count; row += kFinishThreads / kWarp) {
      sum += rows[row * kNormWords + word];
    }
  }
  partial[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x < kWarp) {
    for (int warp = 1; warp < kFinishThreads / kWarp; ++warp) {
      sum += partial[warp * kWarp + threadIdx.x];
    }
    partial[threadIdx.x] = sum;
    if (words && word < kNormWords) words[word] = sum;
  }
  __syncthreads();
  if (threadIdx.x == 0 && result) norm_result(partial, clip, result);
}

// More than enough for the elements before, within and after the aligned words.
int64_t tiles_of(const NormRange& range) {
  const int64_t group = range.dtype == Dtype::float32 ? 4 : 8;
  return (range.size / group + kTileWords) / kTileWords;
}

int64_t max_blocks() { return kBlocksPerUnit * multiprocessors(); }

}  // namespace

int64_t norm_rows_cuda(int64_t count) { return (count / kRanges + 1) * max_blocks(); }

int64_t norm_partials_cuda(const NormRange* ranges, int64_t count, int64_t* rows, Stream stream) {
  int64_t written = 0;
  for (int64_t next = 0; next < count;) {
    Table table;
    table.count = table.tiles = 0;
    for (; next < count && table.count < kRanges; ++next) {
      const NormRange& r = ranges[next];
      if (r.size == 0) continue;
      const int64_t tiles = table.tiles + tiles_of(r);
      FASTPAR_CHECK(tiles <= INT32_MAX,
                    "norm_bins: expected less than 2^45 bytes, got size=", r.size,
                    "; pass parts of it");
      table.ranges[table.count++] = {r.data, r.size, table.tiles, static_cast<uint8_t>(r.dtype),
                                     static_cast<uint8_t>(r.counted)};
      table.tiles = static_cast<int32_t>(tiles);
    }
    const int64_t blocks = std::min<int64_t>(table.tiles, max_blocks());
    launch(norm_partials_kernel, blocks, kThreads, stream, table, rows + written * kNormWords);
    written += blocks;
  }
  return written;
}

void norm_finish_cuda(const int64_t* rows, int64_t count, const NormClip& clip, int64_t* words,
                      float* result, Stream stream) {
  launch(norm_finish_kernel, 1, kFinishThreads, stream, rows, count, clip, words, result);
}

}  // namespace fastpar
