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

// Activations of single elements: y(u) and y'(u).
struct Gelu {
  static constexpr int64_t kWide = 1;  // inputs of an output

  static FASTPAR_INLINE float value(float u) {
    const float t = tail(u);
    const float small = t > 0.0f ? u * t : t;  // not inf * 0
    return u > 0.0f ? u - small : small;
  }
  static FASTPAR_INLINE float slope(float x) {
    // Beyond 10 the derivative is 1 or 0 to the last place; the clamp keeps u^3 finite. Nan passes.
    const float low = x < -10.0f ? -10.0f : x;
    const float u = low > 10.0f ? 10.0f : low;
    const float dz = kTwoSqrt2OverPi * (1.0f + 3.0f * kCubic * u * u);
    const float t = tail(u);
    const float slope = u * dz * t * (1.0f - t);
    return (u > 0.0f ? 1.0f - t : t) + slope;
  }
};

struct Relu2 {
  static constexpr int64_t kWide = 1;

  static FASTPAR_INLINE float positive(float u) { return u < 0.0f ? 0.0f : u; }  // nan passes
  static FASTPAR_INLINE float value(float u) { return positive(u) * positive(u); }
  static FASTPAR_INLINE float slope(float u) { return 2.0f * positive(u); }
};

// silu(gate) * up of rows [gate, up].
struct Swiglu {
  static constexpr int64_t kWide = 2;
};

// The sigmoids of g and of -g: one exp that cannot overflow, neither a difference.
FASTPAR_INLINE void sigmoids(float g, float* near, float* far) {
  const float e = exp_float(g > 0.0f ? -g : g);
  const float one = 1.0f / (1.0f + e);
  *near = g > 0.0f ? one : e * one;
  *far = g > 0.0f ? e * one : one;
}

template <bool kBias, class T>
FASTPAR_INLINE float at(const T* x, const float* bias, int64_t j) {
  return kBias ? to_float(x[j]) + bias[j] : to_float(x[j]);
}

template <class T, class A, bool kBias>
struct Forward {
  static FASTPAR_INLINE void run(const T* __restrict x, const float* __restrict bias,
                                 T* __restrict y, int64_t n) {
    for (int64_t j = 0; j < n; ++j) y[j] = from_float<T>(A::value(at<kBias>(x, bias, j)));
  }
};

template <class T, bool kBias>
struct Forward<T, Swiglu, kBias> {
  static FASTPAR_INLINE void run(const T* __restrict x, const float* __restrict bias,
                                 T* __restrict y, int64_t n) {
    for (int64_t j = 0; j < n; ++j) {
      const float gate = at<kBias>(x, bias, j), up = at<kBias>(x, bias, n + j);
      float near, far;
      sigmoids(gate, &near, &far);
      y[j] = from_float<T>(gate * near * up);
    }
  }
};

// kBias: adds the gradients to sum.
template <class T, class A, bool kBias>
struct Backward {
  static FASTPAR_INLINE void run(const T* __restrict dy, const T* __restrict x,
                                 const float* __restrict bias, T* __restrict dx,
                                 float* __restrict sum, int64_t n) {
    for (int64_t j = 0; j < n; ++j) {
      const float d = to_float(dy[j]) * A::slope(at<kBias>(x, bias, j));
      dx[j] = from_float<T>(d);
      if (kBias) sum[j] += d;
    }
  }
};

template <class T, bool kBias>
struct Backward<T, Swiglu, kBias> {
  static FASTPAR_INLINE void run(const T* __restrict dy, const T* __restrict x,
                                 const float* __restrict bias, T* __restrict dx,
                                 float* __restrict sum, int64_t n) {
    for (int64_t j = 0; j < n; ++j) {
      const float gate = at<kBias>(x, bias, j), up = at<kBias>(x, bias, n + j);
      float near, far;
      sigmoids(gate, &near, &far);
      const float d = to_float(dy[j]);
      const float d_gate = d * up * (near * (1.0f + gate * far));
      const float d_up = d * (gate * near);
      dx[j] = from_float<T>(d_gate);
      dx[n + j] = from_float<T>(d_up);
      if (kBias) {
        sum[j] += d_gate;
        sum[n + j] += d_up;
      }
    }
  }
};

constexpr int64_t kGrain = 1 << 14;  // elements worth a thread
constexpr int64_t kBlocks = 64;      // most blocks of rows in dbias
constexpr int64_t kBlockRows = 16;   // fewest rows of a block

template <class T, class A>
void fwd(const T* x, const float* bias, T* y, int64_t n, int64_t c, int threads) {
  const Isa target = isa();
  const int64_t total = n * c;
  threads = useful_threads(total, kGrain, threads);
  if (!bias && A::kWide == 1) c = kGrain;  // rows do not matter
  const int64_t rows = (total + c - 1) / c;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t i = 0; i < rows; ++i) {
    const T* row = x + i * c;
    T* to = y + i * c / A::kWide;
    const int64_t size = std::min(c, total - i * c) / A::kWide;
    if (bias) {
      dispatch<Forward<T, A, true>>(target, row, bias, to, size);
    } else {
      dispatch<Forward<T, A, false>>(target, row, bias, to, size);
    }
  }
}

template <class T, class A>
void bwd(const T* dy, const T* x, const float* bias, T* dx, float* dbias, int64_t n, int64_t c,
         int threads) {
  const Isa target = isa();
  const int64_t total = n * c;
  threads = useful_threads(total, kGrain, threads);
  if (!bias) {
    if (A::kWide == 1) c = kGrain;
    const int64_t rows = (total + c - 1) / c;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < rows; ++i) {
      dispatch<Backward<T, A, false>>(target, dy + i * c / A::kWide, x + i * c, bias, dx + i * c,
                                      dbias, std::min(c, total - i * c) / A::kWide);
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
      dispatch<Backward<T, A, true>>(target, dy + i * c / A::kWide, x + i * c, bias, dx + i * c,
                                     partials.data() + block * c, c / A::kWide);
    }
  }
  std::fill(dbias, dbias + c, 0.0f);
  for (int64_t block = 0; block < blocks; ++block) {
    const float* partial = partials.data() + block * c;
    for (int64_t j = 0; j < c; ++j) dbias[j] += partial[j];
  }
}

// Calls body(T{}, A{}) with the storage type and the activation.
template <class Body>
void with_kind(Dtype dtype, Activation kind, Body body) {
  with_dtype(dtype, [&](auto tag) {
    if (kind == Activation::gelu) return body(tag, Gelu{});
    if (kind == Activation::relu2) return body(tag, Relu2{});
    body(tag, Swiglu{});
  });
}

}  // namespace

void activation_fwd(const void* x, const float* bias, void* y, Activation kind, Dtype dtype,
                    int64_t n, int64_t c, int threads) {
  with_kind(dtype, kind, [&](auto tag, auto activation) {
    using T = decltype(tag);
    fwd<T, decltype(activation)>(static_cast<const T*>(x), bias, static_cast<T*>(y), n, c, threads);
  });
}

void activation_bwd(const void* dy, const void* x, const float* bias, void* dx, float* dbias,
                    Activation kind, Dtype dtype, int64_t n, int64_t c, int threads) {
  with_kind(dtype, kind, [&](auto tag, auto activation) {
    using T = decltype(tag);
    bwd<T, decltype(activation)>(static_cast<const T*>(dy), static_cast<const T*>(x), bias,
                                 static_cast<T*>(dx), dbias, n, c, threads);
  });
}

}  // namespace fastpar
