#include <algorithm>
#include <vector>

#include "ops.h"
#include "simd.h"

namespace fastpar {
namespace {

// tanh-GELU as u * sigmoid(z): z = 2 * sqrt(2/pi) * (u + 0.044715 * u^3). tail(z) is the sigmoid of
// -|z|: one exp that cannot overflow, one division, and no cancellation on either side.
constexpr float kTwoSqrt2OverPi = 1.5957691216057308f;
constexpr float kCubic = 0.044715f;

FASTPAR_INLINE float tail(float u) {
  const float z = kTwoSqrt2OverPi * (u + kCubic * u * u * u);
  const float e = exp_float(z > 0.0f ? -z : z);
  return e / (1.0f + e);
}

FASTPAR_INLINE float gelu(float u) {
  const float t = tail(u);
  const float small = t > 0.0f ? u * t : t;  // not inf * 0
  return u > 0.0f ? u - small : small;
}

FASTPAR_INLINE float gelu_grad(float x) {
  // Beyond 10 the derivative is 1 or 0 to the last place; the clamp keeps u^3 finite. Nan passes.
  const float low = x < -10.0f ? -10.0f : x;
  const float u = low > 10.0f ? 10.0f : low;
  const float dz = kTwoSqrt2OverPi * (1.0f + 3.0f * kCubic * u * u);
  const float t = tail(u);
  const float slope = u * dz * t * (1.0f - t);
  return (u > 0.0f ? 1.0f - t : t) + slope;
}

template <class T>
struct GeluFwd {
  static FASTPAR_INLINE void run(const T* __restrict x, T* __restrict y, int64_t n) {
    for (int64_t i = 0; i < n; ++i) y[i] = from_float<T>(gelu(to_float(x[i])));
  }
};

template <class T>
struct BiasGeluFwd {
  static FASTPAR_INLINE void run(const T* __restrict x, const float* __restrict bias,
                                 T* __restrict y, int64_t c) {
    for (int64_t j = 0; j < c; ++j) y[j] = from_float<T>(gelu(to_float(x[j]) + bias[j]));
  }
};

template <class T>
struct GeluBwd {
  static FASTPAR_INLINE void run(const T* __restrict dy, const T* __restrict x, T* __restrict dx,
                                 int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      dx[i] = from_float<T>(to_float(dy[i]) * gelu_grad(to_float(x[i])));
    }
  }
};

template <class T>
struct BiasGeluBwd {
  static FASTPAR_INLINE void run(const T* __restrict dy, const T* __restrict x,
                                 const float* __restrict bias, T* __restrict dx,
                                 float* __restrict sum, int64_t c) {
    for (int64_t j = 0; j < c; ++j) {
      const float d = to_float(dy[j]) * gelu_grad(to_float(x[j]) + bias[j]);
      dx[j] = from_float<T>(d);
      sum[j] += d;
    }
  }
};

constexpr int64_t kGrain = 1 << 14;  // elements worth a thread
constexpr int64_t kBlocks = 64;      // most blocks of rows in dbias
constexpr int64_t kBlockRows = 16;   // fewest rows of a block

template <class T>
void fwd(const T* x, const float* bias, T* y, int64_t n, int64_t c, int threads) {
  const Isa target = isa();
  threads = useful_threads(n * c, kGrain, threads);
  if (!bias) {
    const int64_t chunks = (n * c + kGrain - 1) / kGrain;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t k = 0; k < chunks; ++k) {
      const int64_t start = k * kGrain;
      dispatch<GeluFwd<T>>(target, x + start, y + start, std::min(kGrain, n * c - start));
    }
    return;
  }
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < n; ++i) {
    dispatch<BiasGeluFwd<T>>(target, x + i * c, bias, y + i * c, c);
  }
}

template <class T>
void bwd(const T* dy, const T* x, const float* bias, T* dx, float* dbias, int64_t n, int64_t c,
         int threads) {
  const Isa target = isa();
  threads = useful_threads(n * c, kGrain, threads);
  if (!bias) {
    const int64_t chunks = (n * c + kGrain - 1) / kGrain;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t k = 0; k < chunks; ++k) {
      const int64_t start = k * kGrain;
      dispatch<GeluBwd<T>>(target, dy + start, x + start, dx + start,
                           std::min(kGrain, n * c - start));
    }
    return;
  }
  const int64_t rows = std::max(kBlockRows, (n + kBlocks - 1) / kBlocks);
  const int64_t blocks = (n + rows - 1) / rows;
  std::vector<float> partials(blocks * c, 0.0f);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t end = std::min(n, (block + 1) * rows);
    for (int64_t i = block * rows; i < end; ++i) {
      dispatch<BiasGeluBwd<T>>(target, dy + i * c, x + i * c, bias, dx + i * c,
                               partials.data() + block * c, c);
    }
  }
  std::fill(dbias, dbias + c, 0.0f);
  for (int64_t block = 0; block < blocks; ++block) {
    const float* partial = partials.data() + block * c;
    for (int64_t j = 0; j < c; ++j) dbias[j] += partial[j];
  }
}

}  // namespace

void bias_gelu_fwd(const void* x, const float* bias, void* y, Dtype dtype, int64_t n, int64_t c,
                   int threads) {
  with_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    fwd(static_cast<const T*>(x), bias, static_cast<T*>(y), n, c, threads);
  });
}

void bias_gelu_bwd(const void* dy, const void* x, const float* bias, void* dx, float* dbias,
                   Dtype dtype, int64_t n, int64_t c, int threads) {
  with_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    bwd(static_cast<const T*>(dy), static_cast<const T*>(x), bias, static_cast<T*>(dx), dbias, n, c,
        threads);
  });
}

}  // namespace fastpar
