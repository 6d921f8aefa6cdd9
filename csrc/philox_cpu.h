// Philox-4x32-10 for the CPU kernels that draw dropout masks. What the counters mean is defined in
// kernels/philox.py [Note: the mask].
#pragma once

#include <algorithm>
#include <vector>

#include "ops.h"
#include "simd.h"

namespace fastpar {

constexpr int64_t kGroup = 16;  // elements that one Philox call serves
constexpr int64_t kLanesDrawn = 32;

// Philox of n counters (group[i], row[i], head, sample), 16 bytes each.
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
          const uint64_t p0 = uint64_t(uint32_t(c0[l])) * 0xD2511F53u;
          const uint64_t p1 = uint64_t(uint32_t(c2[l])) * 0xCD9E8D57u;
          c0[l] = (p1 >> 32) ^ c1[l] ^ k0;
          c2[l] = (p0 >> 32) ^ c3[l] ^ k1;
          c1[l] = p1;
          c3[l] = p0;
        }
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
      }
      for (int l = 0; l < L; ++l) {
        const uint64_t words[2] = {uint32_t(c0[l]) | c1[l] << 32, uint32_t(c2[l]) | c3[l] << 32};
        std::memcpy(bytes + (i + l) * kGroup, words, sizeof(words));
      }
    }
  }
};

// The bytes of n counters of sample b and head h of the block. Arrays hold n rounded up to a
// multiple of kLanesDrawn counters.
inline void draw(Isa target, const MaskBlock& at, int64_t b, int64_t h, const uint32_t* group,
                 const uint32_t* row, int64_t n, uint8_t* bytes) {
  const uint64_t sample = uint64_t(at.first_sample) + uint64_t(b), seed = uint64_t(at.seed);
  const uint32_t head = uint32_t(at.site) << 16 | uint32_t(at.first_head + h);
  const uint32_t key0 = uint32_t(seed), key1 = uint32_t(seed >> 32) ^ uint32_t(sample >> 32);
  if (target == Isa::avx512) {
    const int64_t rounded = (n + kLanesDrawn - 1) / kLanesDrawn * kLanesDrawn;
    dispatch<Draw<kLanesDrawn>>(target, group, row, head, uint32_t(sample), key0, key1, rounded,
                                bytes);
  } else {
    Draw<1>::run(group, row, head, uint32_t(sample), key0, key1, n, bytes);
  }
}

// Draws the mask of one row after another.
class RowMask {
 public:
  RowMask(const MaskBlock& at, Isa target) : at_(at), target_(target) {
    if (!at.threshold) return;
    const int64_t groups = (at.cols + kGroup - 1) / kGroup;
    const int64_t padded = (groups + kLanesDrawn - 1) / kLanesDrawn * kLanesDrawn;
    group_.resize(padded);
    row_.resize(padded);
    bytes_.resize(padded * kGroup);
    for (int64_t i = 0; i < padded; ++i) group_[i] = static_cast<uint32_t>(i);
  }

  bool active() const { return at_.threshold > 0; }
  uint8_t threshold() const { return static_cast<uint8_t>(at_.threshold); }
  float scale() const { return static_cast<float>(256.0 / (256 - at_.threshold)); }

  // The first n bytes of row r of head h of sample b, all within the block.
  const uint8_t* bytes(int64_t b, int64_t h, int64_t r, int64_t n) {
    return drawn(b, h, at_.first_row + r, n);
  }

  // The bytes of row first_row + i of whole [samples * heads * rows].
  const uint8_t* row(int64_t i) {
    const int64_t g = at_.first_row + i, plane = g / at_.rows;
    const int64_t r = g % at_.rows, moved = 2 * r < at_.rows ? at_.low : at_.high;
    return drawn(plane / at_.heads, plane % at_.heads, r + moved, at_.cols);
  }

 private:
  const uint8_t* drawn(int64_t b, int64_t h, int64_t r, int64_t n) {
    std::fill(row_.begin(), row_.end(), static_cast<uint32_t>(r));
    draw(target_, at_, b, h, group_.data(), row_.data(), (n + kGroup - 1) / kGroup, bytes_.data());
    return bytes_.data();
  }

  const MaskBlock& at_;
  Isa target_;
  std::vector<uint32_t> group_, row_;
  std::vector<uint8_t> bytes_;
};

}  // namespace fastpar
