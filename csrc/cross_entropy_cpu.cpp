#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "ops.h"

namespace fastpar {
namespace {

// Sums the lanes in a fixed order.
FASTPAR_INLINE double fold(const float* lanes) {
  double sum = 0.0;
  for (int k = 0; k < kLanes; ++k) sum += lanes[k];
  return sum;
}

// One row: loss, and with kGrad the row's gradient in its place. `weights` holds exp(x - max) as
// float; it is the row itself for float32, so that nothing is rounded twice for the others.
template <class T, bool kGrad>
struct CrossEntropyRow {
  static FASTPAR_INLINE void run(T* row, float* weights, int64_t v, int64_t stride, int64_t target,
                                 float scale, float* loss) {
    float lanes[kLanes];
    const float target_logit = to_float(row[target]);
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
    float max = lanes[0];
    for (int k = 1; k < kLanes; ++k) max = max < lanes[k] ? lanes[k] : max;

    for (int k = 0; k < kLanes; ++k) lanes[k] = 0.0f;
    for (i = 0; i + kLanes <= v; i += kLanes) {
      for (int k = 0; k < kLanes; ++k) {
        const float e = exp_float(to_float(row[i + k]) - max);
        if (kGrad) weights[i + k] = e;
        lanes[k] += e;
      }
    }
    for (int64_t k = 0; i + k < v; ++k) {
      const float e = exp_float(to_float(row[i + k]) - max);
      if (kGrad) weights[i + k] = e;
      lanes[k] += e;
    }
    const double sum = fold(lanes);
    *loss = static_cast<float>(std::log(sum) + static_cast<double>(max) - target_logit);
    if (!kGrad) return;

    const float factor = static_cast<float>(scale / sum);
    const float at_target = static_cast<float>(weights[target] / sum - 1.0) * scale;
    for (i = 0; i < v; ++i) row[i] = from_float<T>(weights[i] * factor);
    row[target] = from_float<T>(at_target);
    for (i = v; i < stride; ++i) row[i] = from_float<T>(0.0f);
  }
};

template <class T>
void tile(T* logits, int64_t n, int64_t v, int64_t stride, const int64_t* targets,
          int64_t ignore_index, float scale, float* loss, bool write_grad, int threads) {
  const Isa target = isa();
  constexpr bool in_place = std::is_same<T, float>::value;
  threads = useful_threads(n * v, 1 << 14, threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::vector<float> scratch(in_place || !write_grad ? 0 : v);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < n; ++i) {
      T* row = logits + i * stride;
      if (targets[i] == ignore_index) {
        loss[i] = 0.0f;
        if (write_grad) std::fill(row, row + stride, from_float<T>(0.0f));
        continue;
      }
      float* weights = in_place ? reinterpret_cast<float*>(row) : scratch.data();
      if (write_grad) {
        dispatch<CrossEntropyRow<T, true>>(target, row, weights, v, stride, targets[i], scale,
                                           loss + i);
      } else {
        dispatch<CrossEntropyRow<T, false>>(target, row, weights, v, stride, targets[i], scale,
                                            loss + i);
      }
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

void cross_entropy_tile(void* logits, Dtype dtype, int64_t n, int64_t v, int64_t stride,
                        const int64_t* targets, int64_t ignore_index, float scale, float* loss,
                        bool write_grad, int threads) {
  with_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    tile(static_cast<T*>(logits), n, v, stride, targets, ignore_index, scale, loss, write_grad,
         threads);
  });
}

}  // namespace fastpar
