// AdamW's update rule, once, for host and device.
//
// Order of operations (each rounded to float, no contraction), that of torch.optim.AdamW's
// single-tensor loop:
//   g = grad * grad_scale                        (sign flipped by the caller to maximize)
//   p = p * (1 - lr * weight_decay)
//   m = m + (g - m) * (1 - beta1)
//   v = v * beta2 + ((1 - beta2) * g) * g
//   p = p - (step_size * m) / (sqrt(v) / sqrt(1 - beta2^t) + eps),   step_size = lr / (1 - beta1^t)
// Source: Loshchilov, Hutter 2019, arXiv 1711.05101.
#pragma once

#include <cmath>

#include "ops.h"

namespace fastpar {

FASTPAR_HOST_DEVICE void adamw_update(float grad, float* p, float* m, float* v,
                                      const AdamwScalars& s) {
  const float g = grad * s.grad_scale;
  const float exp_avg = *m + (g - *m) * s.one_minus_beta1;
  const float exp_avg_sq = *v * s.beta2 + s.one_minus_beta2 * g * g;
  const float denom = std::sqrt(exp_avg_sq) / s.sqrt_bias_correction2 + s.eps;
  *m = exp_avg;
  *v = exp_avg_sq;
  *p = *p * s.decay - s.step_size * exp_avg / denom;
}

}  // namespace fastpar
