// The exact sum of squares behind the global norm, for host and device.
//
// [Note: exact sum of squares]
// The square s of a float is exact in double: 48 bits, at least 2^-298, below 2^256. Bins lie 52
// bits apart over that range; bin b counts in units u(b) = 2^(52 b - 350), so bin 1's unit is the
// smallest square and bin 0 is never reached. s is split from the top: the nearest multiple of u(b)
// goes to bin b, what is left (at most u(b) / 2 either way) to bin b - 1, and so on down. Two facts
// follow from rounding to nearest, ties to even:
//   1. A square of at most u(b) / 2 gives nothing to bin b and is left as it was. So the split of
//      an element is the same from any bin that is high enough: it is a function of the element.
//   2. The highest bin that elements reach, B, is that of the largest square, u(B) / 2 < s <=
//      u(B + 1) / 2, and its total is positive.
// A chunk of elements fills only the two bins from that of its own largest element down. Above its
// top it would add 0, so bins B and B - 1 of the whole have received everything, however the
// elements were cut into chunks, and only these two make the result. Totals are integers:
// associative. Hence the same bits for any cut, order, number of threads or ranks, on CPU and GPU.
// What is left out is at most u(B - 1) / 2 for an element: relative to the sum n * 2^-52 for n
// elements, half of that in the norm, less than a float's rounding up to 2^28 elements even when
// all but one of them have the worst size.
//
// A square takes at most 2^51 units of a bin either way, so kNormChunk = 2^11 of them fit an int64.
// A bin's total does not: it is kept in two words, total = low + 2^32 high. Each chunk adds less
// than 2^32 to either, so 2^31 chunks fit, and the words of ranks can be added as they are. Two
// further words count what is not finite and takes no part in the sum.
#pragma once

#include <cmath>

#include "ops.h"

namespace fastpar {

constexpr int kNormBins = 12;
constexpr int kNormBinBits = 52;
constexpr int kNormLowestUnit = -350;  // u(0) = 2^-350
constexpr int kNormInfinities = 2 * kNormBins;
constexpr int kNormNans = kNormInfinities + 1;
constexpr int kNormWords = kNormNans + 1;  // low and high word of each bin, two counts
constexpr int kNormChunk = 1 << 11;

// 1.5 * 2^52 units of a bin: adding it rounds to a multiple of the unit, and the sum's bits, as an
// integer, count the units.
FASTPAR_HOST_DEVICE double norm_rounder(int bin) {
  const uint64_t exponent = static_cast<uint64_t>(1023 + kNormLowestUnit + 52 + kNormBinBits * bin);
  return bit_cast<double>(exponent << 52 | uint64_t(1) << 51);
}

// The bin that the largest of some elements reaches; `largest` is finite.
FASTPAR_HOST_DEVICE int norm_top(float largest) {
  const double square = static_cast<double>(largest) * static_cast<double>(largest);
  if (square == 0.0) return 1;
  // 2^exponent < square <= 2^(exponent + 1)
  const int exponent = static_cast<int>((bit_cast<uint64_t>(square) - 1) >> 52) - 1023;
  return (exponent + 1 - kNormLowestUnit) / kNormBinBits;
}

// Sums of the bits of rounded squares, modulo 2^64: what a loop over at most kNormChunk elements
// accumulates for its top bin and for the one below.
struct NormSums {
  uint64_t top, below;
};

FASTPAR_HOST_DEVICE void norm_add(float x, double rounder, double rounder_below, NormSums* sums) {
  const double square = static_cast<double>(x) * static_cast<double>(x);
  const double rounded = square + rounder;
  const double left = square - (rounded - rounder);
  sums->top += bit_cast<uint64_t>(rounded);
  sums->below += bit_cast<uint64_t>(left + rounder_below);
}

// What `count` (at most kNormChunk) calls of norm_add summed up, in units of each bin.
FASTPAR_HOST_DEVICE NormSums norm_units(const NormSums& sums, double rounder, double rounder_below,
                                        int64_t count) {
  const uint64_t n = static_cast<uint64_t>(count);
  return {sums.top - n * bit_cast<uint64_t>(rounder),
          sums.below - n * bit_cast<uint64_t>(rounder_below)};
}

// Adds the units of one chunk to its bins.
FASTPAR_HOST_DEVICE void norm_store(const NormSums& units, int top, int64_t* words) {
  words[2 * top] += static_cast<int64_t>(units.top & 0xffffffffu);
  words[2 * top + 1] += static_cast<int64_t>(units.top) >> 32;
  words[2 * top - 2] += static_cast<int64_t>(units.below & 0xffffffffu);
  words[2 * top - 1] += static_cast<int64_t>(units.below) >> 32;
}

// A bin's total as a double, and whether it is zero. Independent of how it is spread over its
// words.
FASTPAR_HOST_DEVICE double norm_bin(const int64_t* words, int bin, bool* zero) {
  const int64_t high = words[2 * bin + 1] + (words[2 * bin] >> 32);
  const int64_t low = words[2 * bin] & 0xffffffff;
  *zero = high == 0 && low == 0;
  const uint64_t exponent = static_cast<uint64_t>(1023 + kNormLowestUnit + kNormBinBits * bin);
  const double units = static_cast<double>(high) * 0x1p32 + static_cast<double>(low);
  return units * bit_cast<double>(exponent << 52);
}

// result[3]: norm (inf with infinities, nan with nans, as in torch), factor for gradients, 1 where
// the norm is not finite, else 0.
FASTPAR_HOST_DEVICE void norm_result(const int64_t* words, const NormClip& clip, float* result) {
  double sum = 0.0;
  for (int bin = kNormBins - 1; bin > 0; --bin) {
    bool zero, zero_below;
    const double top = norm_bin(words, bin, &zero);
    if (!zero) {
      sum = top + norm_bin(words, bin - 1, &zero_below);
      break;
    }
  }
  const Factor& scale = clip.loss_scale;
  const double loss_scale = static_cast<double>(scale.at ? *scale.at : scale.value);
  float norm = static_cast<float>(std::sqrt(sum) / loss_scale);
  if (words[kNormInfinities] != 0) norm = bit_cast<float>(0x7f800000u);
  if (words[kNormNans] != 0) norm = bit_cast<float>(0x7fc00000u);
  const double clipped = clip.max_norm / (static_cast<double>(norm) + clip.eps);
  const double factor = clip.max_norm < 0 || clipped > 1.0 ? 1.0 : clipped;  // a nan stays
  result[0] = norm;
  result[1] = static_cast<float>(factor / loss_scale);
  result[2] = (bit_cast<uint32_t>(norm) & 0x7fffffffu) < 0x7f800000u ? 0.0f : 1.0f;
}

}  // namespace fastpar
