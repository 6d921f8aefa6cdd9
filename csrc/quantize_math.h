// Blockwise codes, for host and device: scale, rounding and decoding, the same bits on both.
//
// A block of elements v shares scale = max|v| / kTop, and element v is the whole number of
// v * (1 / scale): to nearest even, or seeded to one of its two neighbours, the upper one with the
// probability of the distance from the lower one. 8-bit floats are decoded only.
#pragma once

#include "ops.h"
#include "random.h"

namespace fastpar {

FASTPAR_HOST_DEVICE uint32_t magnitude_bits(float x) { return bit_cast<uint32_t>(x) & 0x7fffffffu; }

// a >= 0 below 2^23: a whole number, the fraction rounded up where 31 random bits lie below it.
FASTPAR_HOST_DEVICE uint32_t stochastic_whole(float a, uint32_t random) {
  const int32_t whole = static_cast<int32_t>(a);
  const float fraction = a - static_cast<float>(whole);  // exact
  const int32_t threshold = static_cast<int32_t>(fraction * 0x1p31f);
  return static_cast<uint32_t>(whole) + (static_cast<int32_t>(random >> 1) < threshold ? 1u : 0u);
}

constexpr float kTop = 127.0f;  // the largest code, as far from 0 as the least one

// |x| < 2^22: a whole number, to nearest even.
FASTPAR_HOST_DEVICE uint8_t nearest_code(float x) {
  // 1.5 * 2^23 leaves the whole number, rounded to nearest even, in the last bits.
  return static_cast<uint8_t>(bit_cast<uint32_t>(x + 12582912.0f));
}

FASTPAR_HOST_DEVICE uint8_t stochastic_code(float x, uint32_t random) {
  const uint32_t magnitude = stochastic_whole(bit_cast<float>(magnitude_bits(x)), random);
  return static_cast<uint8_t>(x < 0.0f ? 0u - magnitude : magnitude);
}

struct Int8 {
  static FASTPAR_HOST_DEVICE float decode(uint8_t code) {
    return static_cast<float>(static_cast<int8_t>(code));
  }
};

// kMantissa bits of mantissa, exponents biased by kBias; magnitudes from kInfinity on are inf (only
// where ieee) and nan.
template <int kMantissa, int kBias, bool ieee>
struct Float8 {
  static constexpr int kShift = 23 - kMantissa;
  static constexpr uint32_t kInfinity = ieee ? 0x7cu : 0x7fu;

  static FASTPAR_HOST_DEVICE float decode(uint8_t code) {
    // The distance of subnormal codes is 2^(1 - kBias - kMantissa).
    const float step = bit_cast<float>(static_cast<uint32_t>(128 - kBias - kMantissa) << 23);
    // Difference of a float's exponent and mantissa, shifted, and the code's.
    const uint32_t offset = static_cast<uint32_t>(127 - kBias) << kMantissa;
    const uint32_t body = code & 0x7fu;
    const float normal = bit_cast<float>((body + offset) << kShift);
    const float finite =
        body < (1u << kMantissa) ? static_cast<float>(static_cast<int32_t>(body)) * step : normal;
    const uint32_t special = ieee ? bit_cast<uint32_t>(normal) | 0x7f800000u : 0x7fc00000u;
    const uint32_t bits = body >= kInfinity ? special : bit_cast<uint32_t>(finite);
    return bit_cast<float>(bits | static_cast<uint32_t>(code & 0x80u) << 24);
  }
};

using E4m3 = Float8<3, 7, false>;
using E5m2 = Float8<2, 15, true>;

// Calls body(C{}) with the decoder C that `code` names.
template <class Body>
inline void with_code(Code code, Body body) {
  switch (code) {
    case Code::int8:
      return body(Int8{});
    case Code::e4m3:
      return body(E4m3{});
    case Code::e5m2:
      return body(E5m2{});
  }
}

// The scale of a block from magnitude_bits of its largest element, which a nan exceeds. A block
// with an inf or nan has the scale inf or nan (and codes 0), so that all of it decodes to nan. A
// scale is no subnormal number, whose inverse could overflow, and its largest code decodes to no
// infinity.
FASTPAR_HOST_DEVICE float block_scale(uint32_t largest) {
  if (largest >= 0x7f800000u) return bit_cast<float>(largest > 0x7f800000u ? 0x7fc00000u : largest);
  const float scale = bit_cast<float>(largest) / kTop;
  if (scale * kTop > 0x1.fffffep127f) return bit_cast<float>(bit_cast<uint32_t>(scale) - 1u);
  return largest != 0 && scale < 0x1p-126f ? 0x1p-126f : scale;
}

// 1 / scale; 0 for a block that is all zero or not finite.
FASTPAR_HOST_DEVICE float block_inverse(float scale) {
  return magnitude_bits(scale) - 1u < 0x7f7fffffu ? 1.0f / scale : 0.0f;
}

// The code of v in a finite block.
template <bool seeded>
FASTPAR_HOST_DEVICE uint8_t encode(float v, float inverse, uint64_t key, uint64_t index) {
  const float x = v * inverse;
  const float low = x < -kTop ? -kTop : x;
  const float scaled = low > kTop ? kTop : low;
  return seeded ? stochastic_code(scaled, random_bits(key, index)) : nearest_code(scaled);
}

}  // namespace fastpar
