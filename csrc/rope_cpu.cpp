// Norm and rotation of the heads of a packed row [queries + 2, groups, D]: group g has `queries`
// heads of queries, numbered g * queries + r in q, and one of keys and of values.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "lanes.h"
#include "ops.h"
#include "simd.h"

namespace fastpar {
namespace {

constexpr int64_t kGrain = 1 << 14;  // elements worth a thread
constexpr int64_t kBlocks = 64;      // most blocks of rows in the gradients of weights
constexpr int64_t kBlockRows = 16;   // fewest rows of a block

template <class T>
FASTPAR_INLINE void widen(const T* __restrict x, float* __restrict to, int64_t d) {
  for (int64_t j = 0; j < d; ++j) to[j] = to_float(x[j]);
}

// Sum of a[j] * b[j] * w[j], or with kSquare of a[j] * a[j].
template <bool kSquare, int kWidth>
FASTPAR_INLINE float sum_of(const float* a, const float* b, const float* w, int64_t d) {
  constexpr int kVectors = kStep / kWidth;
  Floats<kWidth> sums[kVectors] = {};
  float tail = 0.0f;
  int64_t j = 0;
  for (; j + kStep <= d; j += kStep) {
    for (int k = 0; k < kVectors; ++k) {
      const int64_t i = j + kWidth * k;
      const Floats<kWidth> v = load<kWidth>(a + i);
      sums[k] += kSquare ? v * v : v * load<kWidth>(b + i) * load<kWidth>(w + i);
    }
  }
  for (; j < d; ++j) tail += kSquare ? a[j] * a[j] : a[j] * b[j] * w[j];
  return fold<kWidth>(sums, tail);
}

template <int kWidth>
FASTPAR_INLINE float rstd_of(const float* x, int64_t d, float eps) {
  const float mean = sum_of<true, kWidth>(x, nullptr, nullptr, d) / static_cast<float>(d);
  return 1.0f / std::sqrt(mean + eps);
}

// (a c - b s, b c + a s) of the halves of x; kBack: by the negative angle.
template <bool kBack, class From, class To>
FASTPAR_INLINE void turn(const From* __restrict x, const float* __restrict turns, To* __restrict y,
                         int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float a = to_float(x[i]), b = to_float(x[half + i]);
    const float c = turns[i], s = kBack ? -turns[half + i] : turns[half + i];
    y[i] = from_float<To>(a * c - b * s);
    y[half + i] = from_float<To>(b * c + a * s);
  }
}

// What is the same for all heads of a row.
template <class T>
struct Row {
  const float *turns, *q_weight, *k_weight;
  T *q, *k;  // of the row
};

// The place of a head of a packed row in q or k.
template <class T>
FASTPAR_INLINE T* place(const RopeShape& at, const Row<T>& row, int64_t head) {
  const int64_t r = head / at.groups, g = head % at.groups;
  return r < at.queries ? row.q + (g * at.queries + r) * at.d : row.k + g * at.d;
}

template <class T, bool kNorm, bool kTurn>
struct Forward {
  template <int kWidth>
  struct Heads {
    static FASTPAR_INLINE void run(const RopeShape* shape, const T* qkv, const Row<T>* to,
                                   float* buffer) {
      const RopeShape at = *shape;
      const Row<T> row = *to;
      const int64_t d = at.d;
      for (int64_t head = 0; head < (at.queries + 1) * at.groups; ++head) {
        const T* x = qkv + head * d;
        T* y = place(at, row, head);
        if (!kNorm) {
          turn<false>(x, row.turns, y, d / 2);
          continue;
        }
        const float* __restrict weight =
            head < at.queries * at.groups ? row.q_weight : row.k_weight;
        float* __restrict n = buffer;
        widen(x, n, d);
        const float scale = rstd_of<kWidth>(n, d, at.eps);
        if (kTurn) {
          for (int64_t j = 0; j < d; ++j) n[j] = n[j] * scale * weight[j];
          turn<false>(n, row.turns, y, d / 2);
        } else {
          for (int64_t j = 0; j < d; ++j) y[j] = from_float<T>(n[j] * scale * weight[j]);
        }
      }
    }
  };
};

// sums: of both weights' gradients, [2, D].
template <class T, bool kNorm, bool kTurn>
struct Backward {
  template <int kWidth>
  struct Heads {
    static FASTPAR_INLINE void run(const RopeShape* shape, const T* qkv, T* dqkv,
                                   const Row<const T>* from, float* sums, float* buffer) {
      const RopeShape at = *shape;
      const Row<const T> row = *from;
      const int64_t d = at.d;
      for (int64_t head = 0; head < (at.queries + 1) * at.groups; ++head) {
        const T* dy = place(at, row, head);
        T* __restrict dx = dqkv + head * d;
        if (!kNorm) {
          turn<true>(dy, row.turns, dx, d / 2);
          continue;
        }
        const bool of_q = head < at.queries * at.groups;
        const float* __restrict weight = of_q ? row.q_weight : row.k_weight;
        float* __restrict sum = of_q ? sums : sums + d;
        float* __restrict g = buffer, * __restrict x = buffer + d;
        if (kTurn) {
          turn<true>(dy, row.turns, g, d / 2);
        } else {
          widen(dy, g, d);
        }
        widen(qkv + head * d, x, d);
        const float scale = rstd_of<kWidth>(x, d, at.eps);
        const float slope = scale * sum_of<false, kWidth>(g, x, weight, d) / static_cast<float>(d);
        for (int64_t j = 0; j < d; ++j) {
          const float n = x[j] * scale;
          sum[j] += g[j] * n;
          dx[j] = from_float<T>(scale * (g[j] * weight[j] - n * slope));
        }
      }
    }
  };
};

// Calls body(norm, turn), as types, for what the shape asks for.
template <class Body>
void with_steps(const RopeShape& at, Body body) {
  if (!at.norm) return body(std::false_type{}, std::true_type{});
  if (!at.turns) return body(std::true_type{}, std::false_type{});
  body(std::true_type{}, std::true_type{});
}

// Both weights, each [D], ones in the place of those that are missing.
std::vector<float> weights_of(const RopeShape& at) {
  std::vector<float> weights(2 * at.d, 1.0f);
  if (at.q_weight) std::copy(at.q_weight, at.q_weight + at.d, weights.begin());
  if (at.k_weight) std::copy(at.k_weight, at.k_weight + at.d, weights.begin() + at.d);
  return weights;
}

template <class T>
Row<T> row_of(const RopeShape& at, const std::vector<float>& weights, T* q, T* k, int64_t i) {
  const float* turns = at.turns ? at.turns + i % at.turn_rows * at.d : nullptr;
  const int64_t keys = at.groups * at.d;
  return {turns, weights.data(), weights.data() + at.d, q + i * at.queries * keys, k + i * keys};
}

template <class T>
void fwd(const T* qkv, T* q, T* k, T* v, const RopeShape& at, int threads) {
  const Isa target = isa();
  const int64_t keys = at.groups * at.d, packed = (at.queries + 2) * keys;
  const std::vector<float> weights = weights_of(at);
  threads = useful_threads(at.n * packed, kGrain, threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::vector<float> buffer(at.d);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < at.n; ++i) {
      const T* row = qkv + i * packed;
      const Row<T> to = row_of(at, weights, q, k, i);
      if (at.norm || at.turns) {
        with_steps(at, [&](auto norm, auto turned) {
          using Kernel = Forward<T, norm, turned>;
          dispatch_wide<Kernel::template Heads>(target, &at, row, &to, buffer.data());
        });
      } else {
        for (int64_t head = 0; head < (at.queries + 1) * at.groups; ++head) {
          std::memcpy(place(at, to, head), row + head * at.d, at.d * sizeof(T));
        }
      }
      std::memcpy(v + i * keys, row + packed - keys, keys * sizeof(T));
    }
  }
}

template <class T>
void bwd(const T* dq, const T* dk, const T* dv, const T* qkv, T* dqkv, float* dq_weight,
         float* dk_weight, const RopeShape& at, int threads) {
  const Isa target = isa();
  const int64_t d = at.d, keys = at.groups * d, packed = (at.queries + 2) * keys;
  const std::vector<float> weights = weights_of(at);
  const int64_t rows = std::max(kBlockRows, (at.n + kBlocks - 1) / kBlocks);
  const int64_t blocks = (at.n + rows - 1) / rows;
  std::vector<float> partials(blocks * 2 * d, 0.0f);
  threads = useful_threads(at.n * packed, kGrain, threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::vector<float> buffer(2 * d);
#pragma omp for schedule(static)
    for (int64_t block = 0; block < blocks; ++block) {
      for (int64_t i = block * rows; i < std::min(at.n, (block + 1) * rows); ++i) {
        T* row = dqkv + i * packed;
        const Row<const T> from = row_of(at, weights, dq, dk, i);
        const T* x = at.norm ? qkv + i * packed : nullptr;
        float* sums = partials.data() + block * 2 * d;
        if (at.norm || at.turns) {
          with_steps(at, [&](auto norm, auto turned) {
            using Kernel = Backward<T, norm, turned>;
            dispatch_wide<Kernel::template Heads>(target, &at, x, row, &from, sums, buffer.data());
          });
        } else {
          for (int64_t head = 0; head < (at.queries + 1) * at.groups; ++head) {
            std::memcpy(row + head * d, place(at, from, head), d * sizeof(T));
          }
        }
        std::memcpy(row + packed - keys, dv + i * keys, keys * sizeof(T));
      }
    }
  }
  for (float* total : {dq_weight, dk_weight}) {
    if (!total) continue;
    std::fill(total, total + d, 0.0f);
    for (int64_t block = 0; block < blocks; ++block) {
      const float* partial = partials.data() + block * 2 * d + (total == dq_weight ? 0 : d);
      for (int64_t j = 0; j < d; ++j) total[j] += partial[j];
    }
  }
}

}  // namespace

void rope_fwd(const void* qkv, void* q, void* k, void* v, Dtype dtype, const RopeShape& at,
              int threads) {
  with_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    fwd(static_cast<const T*>(qkv), static_cast<T*>(q), static_cast<T*>(k), static_cast<T*>(v), at,
        threads);
  });
}

void rope_bwd(const void* dq, const void* dk, const void* dv, const void* qkv, void* dqkv,
              float* dq_weight, float* dk_weight, Dtype dtype, const RopeShape& at, int threads) {
  with_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    bwd(static_cast<const T*>(dq), static_cast<const T*>(dk), static_cast<const T*>(dv),
        static_cast<const T*>(qkv), static_cast<T*>(dqkv), dq_weight, dk_weight, at, threads);
  });
}

}  // namespace fastpar
