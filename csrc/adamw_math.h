// AdamW's arithmetic, once, for host and device: the same operations, each rounded to its type, in
// the same order (the builds forbid contraction), so the same bits.
//
// Order of operations, that of torch.optim.AdamW's single-tensor loop:
//   g = grad * grad_scale                        (negated to maximize)
//   m = m + (g - m) * (1 - beta1)
//   v = v * beta2 + ((1 - beta2) * g) * g
//   u = v, or with amsgrad the largest v so far
//   p = p * (1 - lr * weight_decay) - (step_size * m) / (sqrt(u) / sqrt(1 - beta2^t) + eps)
//   step_size = lr / (1 - beta1^t)
// Source: Loshchilov, Hutter 2019, arXiv 1711.05101; amsgrad: Reddi, Kale, Kumar 2018, ICLR.
//
// [Note: how bfloat16 parameters follow their master]
// The parameter is the master rounded to nearest, ties away from zero: the upper half of the bits,
// plus one where the lower half is 0x8000 or more. Then the lower half alone, as int16, brings the
// master back from the parameter for every value: it is negative exactly where one was added. Ties
// to even would need a 17th bit. A nan has a lower half that may round to infinity, so masters that
// are nan become 0x7fc00000. The full master mode rounds alike, so both modes train the same bits.
//
// [Note: 8-bit moments]
// 256 elements whose index begins at a multiple of 256 share a scale, their largest magnitude. The
// code of exp_avg is an int8 k for scale * (k / 127)^2 with k's sign; that of exp_avg_sq is a uint8
// k for scale * (k / 255)^4. Between two levels the upper one is taken with the probability that
// makes the expected value exact: rounding to nearest would lose every change that is smaller than
// half a step, so with beta2 = 0.999 exp_avg_sq would never move. exp_avg_sq > 0 has a code of at
// least 1, because a small m over the square root of 0 is no step that Adam would make. An infinity
// or nan takes its whole block along.
#pragma once

#include <cmath>

#include "ops.h"
#include "random.h"

namespace fastpar {

// What the elements of a range need, rounded to float once.
struct AdamwScalars {
  float grad_scale, decay, one_minus_beta1, beta2, one_minus_beta2, step_size,
      sqrt_bias_correction2, eps;
  uint64_t param_key, exp_avg_key, exp_avg_sq_key, max_exp_avg_sq_key;  // for random_bits
};

// x^n by repeated squaring: the same bits on host and device, which std::pow does not promise.
FASTPAR_HOST_DEVICE double power(double x, uint64_t n) {
  double result = 1.0;
  for (; n > 0; n >>= 1) {
    if (n & 1) result *= x;
    x *= x;
  }
  return result;
}

FASTPAR_HOST_DEVICE AdamwScalars adamw_scalars(const AdamwHyper& h, const AdamwModes& modes) {
  const double lr = h.lr_at ? *h.lr_at : h.lr;
  const double beta1 = h.beta1_at ? *h.beta1_at : h.beta1;
  const double beta2 = h.beta2_at ? *h.beta2_at : h.beta2;
  const double eps = h.eps_at ? *h.eps_at : h.eps;
  const double weight_decay = h.weight_decay_at ? *h.weight_decay_at : h.weight_decay;
  const double step = h.step_at ? *h.step_at : h.step;
  const uint64_t t = step > 0.0 ? static_cast<uint64_t>(step) : 0;
  const float scale = modes.grad_scale ? *modes.grad_scale : 1.0f;
  AdamwScalars s;
  s.grad_scale = modes.maximize ? -scale : scale;
  s.decay = static_cast<float>(1.0 - lr * weight_decay);
  s.one_minus_beta1 = static_cast<float>(1.0 - beta1);
  s.beta2 = static_cast<float>(beta2);
  s.one_minus_beta2 = static_cast<float>(1.0 - beta2);
  s.step_size = static_cast<float>(lr / (1.0 - power(beta1, t)));
  s.sqrt_bias_correction2 = static_cast<float>(std::sqrt(1.0 - power(beta2, t)));
  s.eps = static_cast<float>(eps);
  s.param_key = random_key(modes.seed, t, 0);
  s.exp_avg_key = random_key(modes.seed, t, 1);
  s.exp_avg_sq_key = random_key(modes.seed, t, 2);
  s.max_exp_avg_sq_key = random_key(modes.seed, t, 3);
  return s;
}

// Whether the step must leave everything but the gradients as it is.
FASTPAR_HOST_DEVICE bool adamw_skips(const AdamwModes& modes) {
  return modes.found_inf && *modes.found_inf != 0.0f;
}

// One element; max_v is null without amsgrad.
FASTPAR_HOST_DEVICE void adamw_update(float grad, float* p, float* m, float* v, float* max_v,
                                      const AdamwScalars& s) {
  const float g = grad * s.grad_scale;
  const float exp_avg = *m + (g - *m) * s.one_minus_beta1;
  const float exp_avg_sq = *v * s.beta2 + s.one_minus_beta2 * g * g;
  float u = exp_avg_sq;
  if (max_v) {
    u = *max_v >= exp_avg_sq || *max_v != *max_v ? *max_v : exp_avg_sq;  // a nan stays
    *max_v = u;
  }
  const float denom = std::sqrt(u) / s.sqrt_bias_correction2 + s.eps;
  *m = exp_avg;
  *v = exp_avg_sq;
  *p = *p * s.decay - s.step_size * exp_avg / denom;
}

// random_bits(key, first + i) without 64-bit lanes, for i < 2^32.
FASTPAR_HOST_DEVICE uint32_t random_bits_from(uint64_t key, uint64_t first, uint32_t i) {
  const uint32_t low = static_cast<uint32_t>(first) + i;
  const uint32_t high =
      static_cast<uint32_t>(first >> 32) + (low < static_cast<uint32_t>(first) ? 1u : 0u);
  return mix32(mix32(low ^ static_cast<uint32_t>(key)) + static_cast<uint32_t>(key >> 32) +
               high * 0x9E3779B9u);
}

// The master as it is kept: for bfloat16 parameters there is one nan.
template <class P>
FASTPAR_HOST_DEVICE float keep_master(float master) {
  return master;
}

template <>
FASTPAR_HOST_DEVICE float keep_master<BFloat16>(float master) {
  return master != master ? bit_cast<float>(0x7fc00000u) : master;
}

// The parameter of a kept master. See [Note: how bfloat16 parameters follow their master].
template <class P>
FASTPAR_HOST_DEVICE P round_master(float master) {
  return from_float<P>(master);
}

template <>
FASTPAR_HOST_DEVICE BFloat16 round_master<BFloat16>(float master) {
  return {static_cast<uint16_t>((bit_cast<uint32_t>(master) + 0x8000u) >> 16)};
}

// What remains of a kept master beside round_master<BFloat16>(master).
FASTPAR_HOST_DEVICE int16_t master_remainder(float master) {
  return static_cast<int16_t>(static_cast<uint16_t>(bit_cast<uint32_t>(master)));
}

FASTPAR_HOST_DEVICE float master_join(BFloat16 param, int16_t remainder) {
  const uint32_t top = static_cast<uint32_t>(param.bits) - (remainder < 0 ? 1u : 0u);
  return bit_cast<float>(top << 16 | static_cast<uint16_t>(remainder));
}

// x rounded to one of its two bfloat16 neighbours, away from zero with the probability given by the
// lower half of its bits: the expected value is x. nan becomes 0x7fc0, infinity stays.
FASTPAR_HOST_DEVICE BFloat16 round_stochastic(float x, uint32_t random) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + (random & 0xffffu)) >> 16;
  return {static_cast<uint16_t>(x != x ? 0x7fc0u : rounded)};
}

// See [Note: 8-bit moments] for what follows.
constexpr int kMomentBlock = 256;

// A block's scale is block_scale of the largest magnitude_bits of its elements. As integers, nan
// beats infinity beats finite, in any order of the comparisons.
FASTPAR_HOST_DEVICE uint32_t magnitude_bits(float x) { return bit_cast<uint32_t>(x) & 0x7fffffffu; }

FASTPAR_HOST_DEVICE float block_scale(uint32_t largest) {
  return bit_cast<float>(largest > 0x7f800000u ? 0x7fc00000u : largest);
}

FASTPAR_HOST_DEVICE float signed_level(int k) {
  const float t = static_cast<float>(k) * (1.0f / 127.0f);  // exactly 1 for 127
  return t * std::fabs(t);
}

FASTPAR_HOST_DEVICE float positive_level(int k) {
  const float t = static_cast<float>(k) * (1.0f / 255.0f);  // exactly 1 for 255
  return t * t * (t * t);
}

FASTPAR_HOST_DEVICE float decode_signed(uint8_t code, float scale) {
  return signed_level(static_cast<int8_t>(code)) * scale;
}

FASTPAR_HOST_DEVICE float decode_positive(uint8_t code, float scale) {
  return positive_level(code) * scale;
}

// The largest integer k <= y with 0 <= k <= last; last for nan.
FASTPAR_HOST_DEVICE int floor_within(float y, int last) {
  return static_cast<int>(y < static_cast<float>(last) ? y : static_cast<float>(last));
}

// Whether x, between the levels low and high, takes the upper one.
FASTPAR_HOST_DEVICE bool takes_upper(float x, float low, float high, uint32_t random) {
  const float uniform = static_cast<float>(random >> 8) * 0x1p-24f;
  return uniform < (x - low) / (high - low);
}

FASTPAR_HOST_DEVICE uint8_t encode_signed(float x, float scale, uint32_t random) {
  const float ratio = std::fabs(x) / scale;
  const int k = floor_within(std::sqrt(ratio) * 127.0f, 126);
  const int rounded =
      k + (takes_upper(ratio, signed_level(k), signed_level(k + 1), random) ? 1 : 0);
  const int code = x < 0.0f ? -rounded : rounded;
  return static_cast<uint8_t>(scale > 0.0f ? code : 0);
}

FASTPAR_HOST_DEVICE uint8_t encode_positive(float x, float scale, uint32_t random) {
  const float ratio = x / scale;
  const int k = floor_within(std::sqrt(std::sqrt(ratio)) * 255.0f, 254);
  const int rounded =
      k + (takes_upper(ratio, positive_level(k), positive_level(k + 1), random) ? 1 : 0);
  const int code = rounded == 0 ? 1 : rounded;
  return static_cast<uint8_t>(x > 0.0f ? code : 0);
}

}  // namespace fastpar
