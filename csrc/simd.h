// What every CPU kernel shares: the choice of an instruction set at run time, storage types, exp.
//
// [Note: same bits on every instruction set]
// A kernel is written once, as plain loops in an always_inline function, and compiled three times:
// for the baseline of the compiler's target, for AVX2 and for AVX-512. The compiler vectorizes each
// copy. The build forbids contraction (-ffp-contract=off) and no kernel reassociates a sum, so the
// same operations are rounded in the same order whatever the width, and so are a loop's tail and
// its vector body. Sums use a fixed number of lanes (kLanes), not the machine's. Attention's
// products are fused, with the same bits on a CPU without FMA (multiply_add in attention_cpu.cpp).
// The dispatch is our own because GCC's target_clones("arch=haswell") does not pick AMD machines.
#pragma once

#include <cstdint>
#include <string>

#include "numeric.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define FASTPAR_X86 1
#define FASTPAR_TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
#define FASTPAR_TARGET_AVX512 \
  __attribute__((             \
      target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#if defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11
#define FASTPAR_AMX 1
#define FASTPAR_TARGET_AMX                                                               \
  __attribute__((                                                                        \
      target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512," \
             "avx512bf16,amx-tile,amx-bf16")))
#endif
#else
#define FASTPAR_X86 0
#define FASTPAR_TARGET_AVX2
#define FASTPAR_TARGET_AVX512
#endif

namespace fastpar {

// amx: as avx512, and products of bf16 on tiles of registers.
enum class Isa : int { baseline = 0, avx2 = 1, avx512 = 2, amx = 3 };

// The instruction set in use: the best that the machine supports, or the argument of set_isa().
// isa() is of vectors: avx512 for amx.
Isa isa();
std::string isa_name();
bool isa_supported(const std::string& name);
// Whether the machine multiplies and adds with one rounding; x86 does with AVX2.
#pragma GCC visibility push(default)
bool has_fma();
#pragma GCC visibility pop
bool cpu_is_intel();
// name: auto | baseline | avx2 | avx512 | amx. Throws std::invalid_argument for an unknown name and
// std::runtime_error for one that the machine does not support.
void set_isa(const std::string& name);

template <class Kernel, class... Args>
FASTPAR_TARGET_AVX512 void run_avx512(Args... args) {
  Kernel::run(args...);
}

template <class Kernel, class... Args>
FASTPAR_TARGET_AVX2 void run_avx2(Args... args) {
  Kernel::run(args...);
}

template <class Kernel, class... Args>
void run_baseline(Args... args) {
  Kernel::run(args...);
}

// Runs Kernel::run(args...), a static FASTPAR_INLINE function, compiled for `target`.
template <class Kernel, class... Args>
inline void dispatch(Isa target, Args... args) {
#if FASTPAR_X86
  if (target == Isa::avx512) return run_avx512<Kernel>(args...);
  if (target == Isa::avx2) return run_avx2<Kernel>(args...);
#endif
  (void)target;
  run_baseline<Kernel>(args...);
}

// Threads worth starting for `work` items of which one thread should do at least `grain`.
inline int useful_threads(int64_t work, int64_t grain, int threads) {
  const int64_t wanted = (work + grain - 1) / grain;
  return static_cast<int>(wanted < 1 ? 1 : (wanted < threads ? wanted : threads));
}

constexpr int kLanes = 64;  // partial sums of a reduction: four AVX-512 registers

// exp(x) within 1.5 ulp (tests/ops/test_backend.py), without FMA, see [Note: same bits on every
// instruction set]. Results below 2^-125 are 0; nan gives nan.
// Source of the coefficients: Cephes expf, S. Moshier.
FASTPAR_INLINE float exp_float(float x) {
  const float shifted = x * 1.44269504088896341f + 12582912.0f;  // 1.5 * 2^23 rounds to an integer
  const float n = shifted - 12582912.0f;
  const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  // 2^(n-1), then doubled: n reaches 128, whose power of two is not a float.
  const uint32_t exponent = (bit_cast<uint32_t>(shifted) - 0x4b400000u + 126u) << 23;
  const float y = p * bit_cast<float>(exponent) * 2.0f;
  const float low = x < -86.6f ? 0.0f : y;
  return x > 88.7228317f ? bit_cast<float>(0x7f800000u) : low;
}

}  // namespace fastpar
