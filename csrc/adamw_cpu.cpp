#include <algorithm>

#include "adamw_math.h"
#include "ops.h"
#include "simd.h"

namespace fastpar {
namespace {

// 16 K elements: 448 KiB of traffic, enough to hide the loop over chunks, small enough to balance.
constexpr int64_t kChunk = 1 << 14;

template <class P, class G>
struct AdamwChunk {
  static FASTPAR_INLINE void run(P* __restrict param, const G* __restrict grad,
                                 float* __restrict exp_avg, float* __restrict exp_avg_sq,
                                 float* __restrict master, int64_t n, const AdamwScalars* scalars) {
    const AdamwScalars s = *scalars;
    for (int64_t i = 0; i < n; ++i) {
      float p = master[i];
      float m = exp_avg[i];
      float v = exp_avg_sq[i];
      adamw_update(to_float(grad[i]), &p, &m, &v, nullptr, s);
      exp_avg[i] = m;
      exp_avg_sq[i] = v;
      master[i] = p;
      param[i] = from_float<P>(p);
    }
  }
};

template <class G>
struct AdamwChunk<float, G> {
  static FASTPAR_INLINE void run(float* __restrict param, const G* __restrict grad,
                                 float* __restrict exp_avg, float* __restrict exp_avg_sq, float*,
                                 int64_t n, const AdamwScalars* scalars) {
    const AdamwScalars s = *scalars;
    for (int64_t i = 0; i < n; ++i) {
      float p = param[i];
      float m = exp_avg[i];
      float v = exp_avg_sq[i];
      adamw_update(to_float(grad[i]), &p, &m, &v, nullptr, s);
      exp_avg[i] = m;
      exp_avg_sq[i] = v;
      param[i] = p;
    }
  }
};

template <class P, class G>
void step_all(const std::vector<AdamwTensor>& tensors, const AdamwScalars& scalars, int threads) {
  std::vector<int64_t> first_chunk;  // of each tensor, and the total at the end
  first_chunk.reserve(tensors.size() + 1);
  first_chunk.push_back(0);
  for (const AdamwTensor& t : tensors) {
    first_chunk.push_back(first_chunk.back() + (t.size + kChunk - 1) / kChunk);
  }
  const int64_t chunks = first_chunk.back();
  const Isa target = isa();
  threads = useful_threads(chunks, 2, threads);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const auto next = std::upper_bound(first_chunk.begin(), first_chunk.end(), chunk);
    const int64_t index = next - first_chunk.begin() - 1;
    const AdamwTensor& t = tensors[index];
    const int64_t start = (chunk - first_chunk[index]) * kChunk;
    const int64_t n = std::min(kChunk, t.size - start);
    dispatch<AdamwChunk<P, G>>(target, static_cast<P*>(t.param) + start,
                               static_cast<const G*>(t.grad) + start, t.exp_avg + start,
                               t.exp_avg_sq + start, t.master ? t.master + start : nullptr, n,
                               &scalars);
  }
}

}  // namespace

void adamw_step(const std::vector<AdamwTensor>& tensors, Dtype param_dtype, Dtype grad_dtype,
                const AdamwScalars& scalars, int threads) {
  with_dtype(param_dtype, [&](auto param) {
    with_dtype(grad_dtype, [&](auto grad) {
      step_all<decltype(param), decltype(grad)>(tensors, scalars, threads);
    });
  });
}

}  // namespace fastpar
