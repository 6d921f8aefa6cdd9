// Counter-based dropout. The mask is defined once: kernels/philox.py [Note: the mask].
#include <algorithm>

#include "ops.h"

namespace fastpar {
namespace {

constexpr uint32_t kMul0 = 0xD2511F53u, kMul1 = 0xCD9E8D57u;
constexpr uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;
constexpr int64_t kGroup = 16;       // elements that one Philox call serves
constexpr int64_t kSpan = 64;        // groups drawn at a time: their bytes stay in L1
constexpr int64_t kGrain = 1 << 15;  // elements worth a thread

// Philox-4x32-10 of n counters (group[i], row[i], head, sample), n a multiple of L; 16 bytes each.
//
// A 32-bit word lives in the low half of a 64-bit lane: the widening product reads that half alone,
// so what a round leaves above it is never cleared. GCC turns 32 lanes into straight AVX-512 code
// (0.06 ns an element on an AVX-512 EPYC); without AVX-512 one lane in scalar registers is faster
// (0.3 ns) than what it makes of more.
template <int L>
struct Draw {
  static FASTPAR_INLINE void run(const uint32_t* group, const uint32_t* row, uint32_t head,
                                 uint32_t sample, uint32_t key0, uint32_t key1, int64_t n,
                                 uint8_t* bytes) {
    for (int64_t i = 0; i < n; i += L) {
      uint64_t c0[L], c1[L], c2[L], c3[L];
      for (int l = 0; l < L; ++l) {
        c0[l] = group[i + l];
        c1[l] = row[i + l];
        c2[l] = head;
        c3[l] = sample;
      }
      uint32_t k0 = key0, k1 = key1;
      for (int round = 0; round < 10; ++round) {
        for (int l = 0; l < L; ++l) {
          const uint64_t p0 = uint64_t(uint32_t(c0[l])) * kMul0;
          const uint64_t p1 = uint64_t(uint32_t(c2[l])) * kMul1;
          c0[l] = (p1 >> 32) ^ c1[l] ^ k0;
          c2[l] = (p0 >> 32) ^ c3[l] ^ k1;
          c1[l] = p1;
          c3[l] = p0;
        }
        k0 += kWeyl0;
        k1 += kWeyl1;
      }
      for (int l = 0; l < L; ++l) {
        const uint64_t words[2] = {uint32_t(c0[l]) | c1[l] << 32, uint32_t(c2[l]) | c3[l] << 32};
        std::memcpy(bytes + (i + l) * kGroup, words, sizeof(words));
      }
    }
  }
};

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
    const uint64_t sample = uint64_t(at.first_sample) + uint64_t(b);
    const uint64_t seed = uint64_t(at.seed);
    uint32_t group[kSpan] = {}, row[kSpan] = {};
    int64_t r = first / groups, g = first % groups;
    for (int64_t i = 0; i < n; ++i) {
      group[i] = uint32_t(g);
      row[i] = uint32_t(at.first_row + r);
      if (++g == groups) g = 0, ++r;
    }
    alignas(64) uint8_t bytes[kSpan * kGroup];
    const auto head = uint32_t(at.site) << 16 | uint32_t(at.first_head + h);
    const auto key0 = uint32_t(seed), key1 = uint32_t(seed >> 32) ^ uint32_t(sample >> 32);
    if (target == Isa::avx512) {
      dispatch<Draw<32>>(target, group, row, head, uint32_t(sample), key0, key1, kSpan, bytes);
    } else {
      Draw<1>::run(group, row, head, uint32_t(sample), key0, key1, n, bytes);
    }
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
