#include "cuda_launch.h"

namespace fastpar {
namespace {

constexpr int kThreads = 256;

template <class T, class S>
__global__ void accumulate_kernel(T* total, const S* values, int64_t n) {
  const int64_t first = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  for (int64_t i = first; i < n; i += int64_t(gridDim.x) * blockDim.x) {
    total[i] = from_float<T>(to_float(total[i]) + to_float(values[i]));
  }
}

}  // namespace

void accumulate_cuda(void* total, const void* values, Dtype total_dtype, Dtype values_dtype,
                     int64_t n, Stream stream) {
  with_dtype(total_dtype, [&](auto t) {
    with_dtype(values_dtype, [&](auto s) {
      using T = decltype(t);
      using S = decltype(s);
      const int64_t blocks =
          std::min<int64_t>((n + kThreads - 1) / kThreads, 8 * multiprocessors());
      launch(accumulate_kernel<T, S>, blocks, kThreads, stream, static_cast<T*>(total),
             static_cast<const S*>(values), n);
    });
  });
}

}  // namespace fastpar
