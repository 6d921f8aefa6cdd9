// Storage types and their conversions, for host and device: the same bits on both.
#pragma once

#include <cstdint>
#include <cstring>

#define FASTPAR_INLINE inline __attribute__((always_inline))
#ifdef __CUDACC__
#define FASTPAR_HOST_DEVICE __host__ __device__ FASTPAR_INLINE
#else
#define FASTPAR_HOST_DEVICE FASTPAR_INLINE
#endif

namespace fastpar {

template <class To, class From>
FASTPAR_HOST_DEVICE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs equal sizes");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

// Storage types. The codes are those of kernels/backend.py.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
enum class Dtype : int { float32 = 0, bfloat16 = 1, float16 = 2 };

// Calls body(T{}) with the storage type T that `dtype` names.
template <class Body>
inline void with_dtype(Dtype dtype, Body body) {
  switch (dtype) {
    case Dtype::float32:
      return body(float{});
    case Dtype::bfloat16:
      return body(BFloat16{});
    case Dtype::float16:
      return body(Float16{});
  }
}

FASTPAR_HOST_DEVICE float to_float(float x) { return x; }

FASTPAR_HOST_DEVICE float to_float(BFloat16 x) {
  return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
}

FASTPAR_HOST_DEVICE float to_float(Float16 x) {
  // Moving the bits up leaves the exponent 112 too small; the product mends it, subnormals
  // included.
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t body = static_cast<uint32_t>(x.bits & 0x7fffu) << 13;
  const float finite = bit_cast<float>(body) * 0x1p112f;
  const uint32_t special = body | 0x7f800000u;  // inf and nan
  const uint32_t bits = body >= 0x0f800000u ? special : bit_cast<uint32_t>(finite);
  return bit_cast<float>(bits | sign);
}

template <class T>
FASTPAR_HOST_DEVICE T from_float(float x);

template <>
FASTPAR_HOST_DEVICE float from_float<float>(float x) {
  return x;
}

template <>
FASTPAR_HOST_DEVICE BFloat16 from_float<BFloat16>(float x) {
  // Round to nearest even; a nan stays a (quiet) nan. All in 32 bits up to the last shift:
  // compilers vectorize that well.
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return {static_cast<uint16_t>((x != x ? bits | 0x400000u : rounded) >> 16)};
}

template <>
FASTPAR_HOST_DEVICE Float16 from_float<Float16>(float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t body = bits & 0x7fffffffu;
  // Subnormal results: adding 0.5 makes the adder round at 2^-24, float16's last place there.
  const uint32_t small = bit_cast<uint32_t>(bit_cast<float>(body) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (body - 0x38000000u + 0xfffu + ((body >> 13) & 1u)) >> 13;
  const uint32_t large = body > 0x7f800000u ? 0x7e00u : 0x7c00u;
  const uint32_t finite = body < 0x38800000u ? small : normal;
  return {static_cast<uint16_t>(sign | (body >= 0x477ff000u ? large : finite))};
}

}  // namespace fastpar
