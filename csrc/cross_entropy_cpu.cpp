#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "ops.h"
#include "simd.h"

namespace fastpar {
namespace {

// Folds lanes in halves into the first one.
template <class T, class Combine>
FASTPAR_INLINE T fold(T* lanes, const Combine& combine) {
  for (int half = kLanes / 2; half; half /= 2) {
    for (int k = 0; k < half; ++k) lanes[k] = combine(lanes[k], lanes[k + half]);
  }
  return lanes[0];
}

FASTPAR_INLINE double sum_of(const float* lanes) {
  double wide[kLanes];
  for (int k = 0; k < kLanes; ++k) wide[k] = lanes[k];
  return fold(wide, [](double a, double b) { return a + b; });
}

template <class T>
FASTPAR_INLINE float row_max(const T* row, int64_t v) {
  float lanes[kLanes];
  for (int k = 0; k < kLanes; ++k) lanes[k] = -INFINITY;
  int64_t i = 0;
  for (; i + kLanes <= v; i += kLanes) {
    for (int k = 0; k < kLanes; ++k) {
      const float x = to_float(row[i + k]);
      lanes[k] = lanes[k] < x ? x : lanes[k];
    }
  }
  for (int64_t k = 0; i + k < v; ++k) {
    const float x = to_float(row[i + k]);
    lanes[k] = lanes[k] < x ? x : lanes[k];
  }
  return fold(lanes, [](float a, float b) { return a < b ? b : a; });
}

// Sum of exp(x - max), which `weights` keeps with kKeep; with kSmooth also the sum of x - max.
template <class T, bool kKeep, bool kSmooth>
FASTPAR_INLINE double row_sum(const T* row, float* weights, int64_t v, float max, double* below) {
  float lanes[kLanes], distances[kLanes];
  for (int k = 0; k < kLanes; ++k) lanes[k] = distances[k] = 0.0f;
  int64_t i = 0;
  for (; i + kLanes <= v; i += kLanes) {
    for (int k = 0; k < kLanes; ++k) {
      const float x = to_float(row[i + k]) - max;
      const float e = exp_float(x);
      if (kKeep) weights[i + k] = e;
      lanes[k] += e;
      if (kSmooth) distances[k] += x;
    }
  }
  for (int64_t k = 0; i + k < v; ++k) {
    const float x = to_float(row[i + k]) - max;
    const float e = exp_float(x);
    if (kKeep) weights[i + k] = e;
    lanes[k] += e;
    if (kSmooth) distances[k] += x;
  }
  if (kSmooth) *below = sum_of(distances);
  return sum_of(lanes);
}

// One row: loss, and with kGrad its gradient in `grad`, which may be the row. `weights` holds
// exp(x - max) as float; it is `grad` itself for float32, so that nothing is rounded twice for the
// others. kPlain: neither label smoothing nor z-loss.
template <class T, bool kGrad, bool kPlain>
struct CrossEntropyRow {
  static FASTPAR_INLINE void run(const T* row, T* grad, float* weights, int64_t v, int64_t width,
                                 int64_t target, float scale, double label_smoothing, double z_loss,
                                 float* loss) {
    const float target_logit = to_float(row[target]);
    const float max = row_max(row, v);
    double below = 0.0;
    const double sum = row_sum<T, kGrad, !kPlain>(row, weights, v, max, &below);
    const double lse = std::log(sum) + static_cast<double>(max);
    double growth = 1.0;  // of the softmax's part of the gradient
    if (kPlain) {
      *loss = static_cast<float>(lse - target_logit);
    } else {
      const double hard = static_cast<double>(target_logit) - max;
      double value = std::log(sum) - (1.0 - label_smoothing) * hard + z_loss * lse * lse;
      if (label_smoothing != 0.0) value -= label_smoothing * (below / v);
      *loss = static_cast<float>(value);
      growth = 1.0 + 2.0 * z_loss * lse;
    }
    if (!kGrad) return;

    const double spread = label_smoothing / v;
    const double at_target = weights[target] / sum * growth - 1.0 + (label_smoothing - spread);
    if (kPlain) {
      const float factor = static_cast<float>(scale / sum);
      for (int64_t i = 0; i < v; ++i) grad[i] = from_float<T>(weights[i] * factor);
    } else {
      const float factor = static_cast<float>(scale * growth / sum);
      const float shift = static_cast<float>(scale * spread);
      for (int64_t i = 0; i < v; ++i) grad[i] = from_float<T>(weights[i] * factor - shift);
    }
    grad[target] = from_float<T>(static_cast<float>(at_target) * scale);
    for (int64_t i = v; i < width; ++i) grad[i] = from_float<T>(0.0f);
  }
};

// cap * tanh(x / cap) and its derivative; nan passes. Coefficients: Cephes tanhf, S. Moshier. The
// derivative 1 - t^2 is r (2 - r) where t = 1 - r is near 1, without a difference of near numbers.
struct Capped {
  float value, slope;
};
FASTPAR_INLINE Capped capped(float x, float cap, float inverse) {
  const float u = x * inverse, size = u < 0.0f ? -u : u, z = u * u;
  float p = -5.70498872745e-3f;
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const float near = p * z * u + u, r = 2.0f / (exp_float(2.0f * size) + 1.0f);
  if (size < 0.625f) return {cap * near, 1.0f - near * near};
  return {cap * (u < 0.0f ? r - 1.0f : 1.0f - r), r * (2.0f - r)};
}

// The row under the cap, and, if the gradient is wanted, the slopes there.
template <class T, bool kGrad>
struct CapRow {
  static FASTPAR_INLINE void run(const T* __restrict row, float* __restrict to,
                                 float* __restrict slopes, int64_t v, float cap) {
    const float inverse = 1.0f / cap;
    for (int64_t i = 0; i < v; ++i) {
      const Capped found = capped(to_float(row[i]), cap, inverse);
      to[i] = found.value;
      if (kGrad) slopes[i] = found.slope;
    }
  }
};

// The gradient of the row from that of the capped one.
template <class T>
struct UncapRow {
  static FASTPAR_INLINE void run(const float* __restrict grad, const float* __restrict slopes,
                                 T* __restrict to, int64_t v) {
    for (int64_t i = 0; i < v; ++i) to[i] = from_float<T>(grad[i] * slopes[i]);
  }
};

// A row as the loss sees it: itself, or capped in a thread's buffer, where its gradient is made,
// too. width includes the padding.
template <class T>
class Cap {
 public:
  Cap(const CrossEntropyRows& at, Isa target)
      : cap_(static_cast<float>(at.softcap)), v_(at.v), width_(at.width), target_(target) {
    if (cap_ != 0.0f) values_.resize(3 * at.v);
  }
  // Calls body(row, grad, width), then writes the row's gradient to `out` (null: none).
  template <class Body>
  void run(const T* row, T* out, Body body) {
    if (cap_ == 0.0f) return body(row, out, width_);
    float *const values = values_.data(), *const grad = values + v_, *const slopes = grad + v_;
    if (!out) {
      dispatch<CapRow<T, false>>(target_, row, values, slopes, v_, cap_);
      return body(static_cast<const float*>(values), static_cast<float*>(nullptr), v_);
    }
    dispatch<CapRow<T, true>>(target_, row, values, slopes, v_, cap_);
    body(static_cast<const float*>(values), grad, v_);
    dispatch<UncapRow<T>>(target_, grad, slopes, out, v_);
    std::fill(out + v_, out + width_, from_float<T>(0.0f));
  }

 private:
  float cap_;
  int64_t v_, width_;
  Isa target_;
  std::vector<float> values_;
};

template <class T>
struct ShardRow {
  static FASTPAR_INLINE void run(const T* row, int64_t v, float* max, float* sum) {
    *max = row_max(row, v);
    // A shard of only -inf has a share of 0, where exp(x - max) would be nan.
    const float from = *max == -INFINITY ? 0.0f : *max;
    double total = 0.0, unused = 0.0;
    for (int64_t i = 0; i < v; i += 4096) {  // short chains of float additions
      const int64_t size = v - i < 4096 ? v - i : 4096;
      total += row_sum<T, false, false>(row + i, nullptr, size, from, &unused);
    }
    *sum = static_cast<float>(total);
  }
};

template <class T>
struct ShardGradRow {
  static FASTPAR_INLINE void run(const T* row, T* grad, int64_t v, int64_t width, int64_t target,
                                 float lse, float scale, float growth) {
    const bool here = target >= 0 && target < v;
    const float target_logit = here ? to_float(row[target]) : 0.0f;  // grad may be row
    for (int64_t i = 0; i < v; ++i) {
      grad[i] = from_float<T>(exp_float(to_float(row[i]) - lse) * growth * scale);
    }
    if (here) {
      const double p = exp_float(target_logit - lse);
      grad[target] = from_float<T>(static_cast<float>(p * growth - 1.0) * scale);
    }
    for (int64_t i = v; i < width; ++i) grad[i] = from_float<T>(0.0f);
  }
};

template <class T, bool kGrad, bool kPlain>
void rows(const CrossEntropyRows& at, T* grad, float* loss, int threads) {
  const Isa isa_now = isa();
  constexpr bool in_place = std::is_same<T, float>::value;
  threads = useful_threads(at.n * at.v, 1 << 14, threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::vector<float> scratch(in_place || !kGrad || at.softcap != 0.0 ? 0 : at.v);
    Cap<T> cap(at, isa_now);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < at.n; ++i) {
      const T* row = static_cast<const T*>(at.logits) + i * at.stride;
      T* out = kGrad ? grad + i * at.grad_stride : nullptr;
      if (at.targets[i] == at.ignore_index) {
        loss[i] = 0.0f;
        if (kGrad) std::fill(out, out + at.width, from_float<T>(0.0f));
        continue;
      }
      cap.run(row, out, [&](const auto* seen, auto* made, int64_t width) {
        using Seen = std::remove_cv_t<std::remove_pointer_t<decltype(seen)>>;
        float* weights = scratch.data();
        if constexpr (std::is_same_v<Seen, float>) weights = made;
        dispatch<CrossEntropyRow<Seen, kGrad, kPlain>>(isa_now, seen, made, weights, at.v, width,
                                                       at.targets[i], at.scale[i * at.scale_stride],
                                                       at.label_smoothing, at.z_loss, loss + i);
      });
    }
  }
}

}  // namespace

int64_t count_targets(const int64_t* targets, int64_t n, int64_t v, int64_t ignore_index) {
  int64_t valid = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (targets[i] == ignore_index) continue;
    if (targets[i] < 0 || targets[i] >= v) return -(i + 1);
    ++valid;
  }
  return valid;
}

void cross_entropy_rows(const CrossEntropyRows& at, void* grad, float* loss, Dtype dtype,
                        int threads) {
  with_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    T* out = static_cast<T*>(grad);
    const bool plain = at.label_smoothing == 0.0 && at.z_loss == 0.0;
    if (out != nullptr && plain) return rows<T, true, true>(at, out, loss, threads);
    if (out != nullptr) return rows<T, true, false>(at, out, loss, threads);
    if (plain) return rows<T, false, true>(at, out, loss, threads);
    rows<T, false, false>(at, out, loss, threads);
  });
}

void cross_entropy_shard(const CrossEntropyRows& at, int64_t first, float* max, float* sum,
                         float* target_logit, Dtype dtype, int threads) {
  const Isa isa_now = isa();
  threads = useful_threads(at.n * at.v, 1 << 14, threads);
  with_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
      Cap<T> cap(at, isa_now);
#pragma omp for schedule(static)
      for (int64_t i = 0; i < at.n; ++i) {
        const T* row = static_cast<const T*>(at.logits) + i * at.stride;
        const int64_t target = at.targets[i] - first;
        max[i] = target_logit[i] = 0.0f;
        sum[i] = 1.0f;
        if (at.targets[i] == at.ignore_index) continue;
        cap.run(row, static_cast<T*>(nullptr), [&](const auto* seen, auto*, int64_t) {
          using Seen = std::remove_cv_t<std::remove_pointer_t<decltype(seen)>>;
          dispatch<ShardRow<Seen>>(isa_now, seen, at.v, max + i, sum + i);
          if (target >= 0 && target < at.v) target_logit[i] = to_float(seen[target]);
        });
      }
    }
  });
}

void cross_entropy_shard_grad(const CrossEntropyRows& at, int64_t first, const float* lse,
                              void* grad, Dtype dtype, int threads) {
  const Isa isa_now = isa();
  threads = useful_threads(at.n * at.v, 1 << 14, threads);
  with_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
      Cap<T> cap(at, isa_now);
#pragma omp for schedule(static)
      for (int64_t i = 0; i < at.n; ++i) {
        const T* row = static_cast<const T*>(at.logits) + i * at.stride;
        T* out = static_cast<T*>(grad) + i * at.grad_stride;
        if (at.targets[i] == at.ignore_index) {
          std::fill(out, out + at.width, from_float<T>(0.0f));
          continue;
        }
        const float growth = static_cast<float>(1.0 + 2.0 * at.z_loss * lse[i]);
        cap.run(row, out, [&](const auto* seen, auto* made, int64_t width) {
          using Seen = std::remove_cv_t<std::remove_pointer_t<decltype(seen)>>;
          dispatch<ShardGradRow<Seen>>(isa_now, seen, made, at.v, width, at.targets[i] - first,
                                       lse[i], at.scale[i * at.scale_stride], growth);
        });
      }
    }
  });
}

}  // namespace fastpar
