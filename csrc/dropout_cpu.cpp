// Counter-based dropout. The mask is defined once: kernels/philox.py [Note: the mask].
#include <algorithm>

#include "philox_cpu.h"

namespace fastpar {
namespace {

constexpr int64_t kSpan = 64;        // groups drawn at a time: their bytes stay in L1
constexpr int64_t kGrain = 1 << 15;  // elements worth a thread

template <class T>
struct Scale {
  static FASTPAR_INLINE void run(const uint8_t* drawn, const T* x, T* y, int64_t n,
                                 uint8_t threshold, float scale) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      // A mask of bits, not a choice of two floats: GCC vectorizes this on every instruction set.
      const uint32_t kept = -static_cast<uint32_t>(drawn[i] >= threshold);
      y[i] = from_float<T>(bit_cast<float>(bit_cast<uint32_t>(to_float(x[i]) * scale) & kept));
    }
  }
};

struct Keep {
  static FASTPAR_INLINE void run(const uint8_t* __restrict drawn, uint8_t* __restrict keep,
                                 int64_t n, uint8_t threshold) {
    for (int64_t i = 0; i < n; ++i) keep[i] = drawn[i] >= threshold;
  }
};

// Calls body(bytes, offset, n) for every run of n elements of the block that starts at `offset`.
// Groups are drawn in spans that run on from row to row, so that short rows fill the lanes too.
template <class Body>
void for_each_run(const MaskBlock& at, int threads, Body body) {
  const int64_t groups = (at.cols + kGroup - 1) / kGroup;
  const int64_t plane = at.rows * groups;
  const int64_t spans = (plane + kSpan - 1) / kSpan;
  const int64_t planes = at.samples * at.heads;
  threads = useful_threads(planes * at.rows * at.cols, kGrain, threads);
  const Isa target = isa();
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t item = 0; item < planes * spans; ++item) {
    const int64_t b = item / (at.heads * spans), h = item / spans % at.heads;
    const int64_t first = item % spans * kSpan;
    const int64_t n = std::min(kSpan, plane - first);
    uint32_t group[kSpan] = {}, row[kSpan] = {};
    int64_t r = first / groups, g = first % groups;
    for (int64_t i = 0; i < n; ++i) {
      group[i] = uint32_t(g);
      row[i] = uint32_t(at.first_row + r);
      if (++g == groups) g = 0, ++r;
    }
    alignas(64) uint8_t bytes[kSpan * kGroup];
    draw(target, at, b, h, group, row, n, bytes);
    const int64_t base = (b * at.heads + h) * at.rows * at.cols;
    for (int64_t done = 0; done < n;) {
      const int64_t flat = first + done, start = flat % groups * kGroup;
      // Rows of whole groups lie end to end in bytes as in memory: one run.
      const int64_t left =
          at.cols % kGroup == 0 ? n - done : std::min(n - done, groups - flat % groups);
      const int64_t size =
          at.cols % kGroup == 0 ? left * kGroup : std::min(left * kGroup, at.cols - start);
      body(target, bytes + done * kGroup, base + flat / groups * at.cols + start, size);
      done += left;
    }
  }
}

}  // namespace

void dropout(const void* x, void* y, Dtype dtype, const MaskBlock& at, int threads) {
  const auto threshold = uint8_t(at.threshold);
  const float scale = float(256.0 / (256 - at.threshold));
  with_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    const T* from = static_cast<const T*>(x);
    T* to = static_cast<T*>(y);
    for_each_run(at, threads, [=](Isa target, const uint8_t* drawn, int64_t offset, int64_t n) {
      dispatch<Scale<T>>(target, drawn, from + offset, to + offset, n, threshold, scale);
    });
  });
}

void keep_mask(uint8_t* keep, const MaskBlock& at, int threads) {
  const auto threshold = uint8_t(at.threshold);
  for_each_run(at, threads, [=](Isa target, const uint8_t* drawn, int64_t offset, int64_t n) {
    dispatch<Keep>(target, drawn, keep + offset, n, threshold);
  });
}

}  // namespace fastpar
