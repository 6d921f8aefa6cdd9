// Random bits by position, for host and device: a pure function of (seed, step, stream, index), so
// that stochastic rounding does not depend on how an array is cut, on threads, or on the machine.
#pragma once

#include "numeric.h"

namespace fastpar {

// A key for random_bits: every (seed, step, stream) gives unrelated bits.
// Source: splitmix64, Steele, Lea, Flood 2014, OOPSLA.
FASTPAR_HOST_DEVICE uint64_t random_key(uint64_t seed, uint64_t step, uint64_t stream) {
  const uint64_t words[3] = {seed, step, stream};
  uint64_t z = 0;
  for (int i = 0; i < 3; ++i) {
    z += words[i] + 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    z ^= z >> 31;
  }
  return z;
}

// A bijection of 32-bit words in which each input bit flips each output bit with probability near
// one half. Source of the constants: C. Wellons, "Prospecting for hash functions", 2018.
FASTPAR_HOST_DEVICE uint32_t mix32(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

// 32 random bits of element `index`.
FASTPAR_HOST_DEVICE uint32_t random_bits(uint64_t key, uint64_t index) {
  const uint32_t x = mix32(static_cast<uint32_t>(index) ^ static_cast<uint32_t>(key));
  return mix32(x + static_cast<uint32_t>(key >> 32) +
               static_cast<uint32_t>(index >> 32) * 0x9E3779B9u);
}

}  // namespace fastpar
