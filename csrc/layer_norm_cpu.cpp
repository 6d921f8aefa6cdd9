// LayerNorm and RMSNorm (kRms: no mean, no bias) with what precedes them. [Note: lanes] Sums over a
// row run in four vectors of eight floats, which the compiler keeps in registers on AVX2 and
// AVX-512 alike (the loops over kLanes of other files go through memory: 0.19 ms against 0.13 ms
// forward at [2048, 384] on one core); the rest of a row is summed behind them in order. The same
// bits on every instruction set, as everywhere.
#include <algorithm>
#include <cmath>
#include <vector>

#include "ops.h"
#include "philox_cpu.h"
#include "simd.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are arguments of inlined functions only

namespace fastpar {
namespace {

constexpr int64_t kStep = 32;  // elements a turn: four vectors

typedef float Floats __attribute__((vector_size(32)));

FASTPAR_INLINE Floats load(const float* p) {
  Floats x;
  std::memcpy(&x, p, sizeof(x));
  return x;
}

FASTPAR_INLINE Floats load(const BFloat16* p) {
  typedef uint16_t Halves __attribute__((vector_size(16)));
  typedef uint32_t Words __attribute__((vector_size(32)));
  Halves bits;
  std::memcpy(&bits, p, sizeof(bits));
  const Words wide = __builtin_convertvector(bits, Words) << 16;
  Floats x;
  std::memcpy(&x, &wide, sizeof(x));
  return x;
}

FASTPAR_INLINE Floats load(const Float16* p) {
  float x[8];
  for (int k = 0; k < 8; ++k) x[k] = to_float(p[k]);
  return load(x);
}

FASTPAR_INLINE void store(float* p, const Floats& x) { std::memcpy(p, &x, sizeof(x)); }

// Sum of four vectors and what was summed behind them.
FASTPAR_INLINE float fold(const Floats* sums, float tail) {
  float lanes[8];
  store(lanes, (sums[0] + sums[2]) + (sums[1] + sums[3]));
  for (int width = 4; width > 0; width /= 2) {
    for (int k = 0; k < width; ++k) lanes[k] += lanes[k + width];
  }
  return lanes[0] + tail;
}

// sum = residual + dropout(x + x_bias). drawn is null without dropout.
template <class T, bool kDropout>
struct AddRow {
  static FASTPAR_INLINE void run(const T* __restrict x, const float* __restrict x_bias,
                                 const T* __restrict residual, const uint8_t* __restrict drawn,
                                 uint8_t threshold, float scale, T* __restrict sum, int64_t c) {
    for (int64_t j = 0; j < c; ++j) {
      float delta = to_float(x[j]) + x_bias[j];
      if (kDropout) {
        const uint32_t kept = -static_cast<uint32_t>(drawn[j] >= threshold);
        delta = bit_cast<float>(bit_cast<uint32_t>(delta * scale) & kept);
      }
      sum[j] = from_float<T>(to_float(residual[j]) + delta);
    }
  }
};

// Mean and variance in two passes, the second corrected by what the rounding of the mean left over:
// as accurate for |mean| >> std as the input allows. Without a mean one pass is enough.
template <class T, bool kRms>
struct NormalizeRow {
  static FASTPAR_INLINE void run(const T* __restrict x, const float* __restrict weight,
                                 const float* __restrict bias, T* __restrict y, float* mean,
                                 float* rstd, int64_t c, float eps) {
    const float count = static_cast<float>(c);
    Floats sum[4] = {}, square[4] = {};
    float sum_tail = 0.0f, square_tail = 0.0f;
    int64_t j = 0;
    if (kRms) {
      for (; j + kStep <= c; j += kStep) {
        for (int k = 0; k < 4; ++k) {
          const Floats v = load(x + j + 8 * k);
          square[k] += v * v;
        }
      }
      for (; j < c; ++j) square_tail += to_float(x[j]) * to_float(x[j]);
      const float scale = 1.0f / std::sqrt(fold(square, square_tail) / count + eps);
      for (j = 0; j < c; ++j) y[j] = from_float<T>(to_float(x[j]) * scale * weight[j]);
      *rstd = scale;
      return;
    }
    for (; j + kStep <= c; j += kStep) {
      for (int k = 0; k < 4; ++k) sum[k] += load(x + j + 8 * k);
    }
    for (; j < c; ++j) sum_tail += to_float(x[j]);
    const float center = fold(sum, sum_tail) / count;

    for (int k = 0; k < 4; ++k) sum[k] = Floats{};
    sum_tail = 0.0f;
    for (j = 0; j + kStep <= c; j += kStep) {
      for (int k = 0; k < 4; ++k) {
        const Floats d = load(x + j + 8 * k) - center;
        sum[k] += d;
        square[k] += d * d;
      }
    }
    for (; j < c; ++j) {
      const float d = to_float(x[j]) - center;
      sum_tail += d;
      square_tail += d * d;
    }
    const float rest = fold(sum, sum_tail) / count;
    const float variance = fold(square, square_tail) / count - rest * rest;
    const float scale = 1.0f / std::sqrt((variance < 0.0f ? 0.0f : variance) + eps);
    for (j = 0; j < c; ++j) {
      y[j] = from_float<T>(((to_float(x[j]) - center) - rest) * scale * weight[j] + bias[j]);
    }
    *mean = center + rest;
    *rstd = scale;
  }
};

// dsum = gradient of the normalized row; its terms of dweight and dbias are added to the partials.
template <class T, bool kRms>
struct BackwardRow {
  static FASTPAR_INLINE void run(const T* __restrict dy, const T* __restrict x,
                                 const float* __restrict weight, float mean, float rstd,
                                 float* __restrict dweight, float* __restrict dbias,
                                 float* __restrict dsum, int64_t c) {
    const float count = static_cast<float>(c);
    Floats along[4] = {}, total[4] = {};
    float along_tail = 0.0f, total_tail = 0.0f;
    int64_t j = 0;
    for (; j + kStep <= c; j += kStep) {
      for (int k = 0; k < 4; ++k) {
        const int64_t at = j + 8 * k;
        const Floats d = load(dy + at), normal = (load(x + at) - mean) * rstd;
        const Floats g = d * load(weight + at);
        store(dweight + at, load(dweight + at) + d * normal);
        along[k] += g * normal;
        if (!kRms) {
          store(dbias + at, load(dbias + at) + d);
          total[k] += g;
        }
      }
    }
    for (; j < c; ++j) {
      const float d = to_float(dy[j]), normal = (to_float(x[j]) - mean) * rstd;
      const float g = d * weight[j];
      dweight[j] += d * normal;
      along_tail += g * normal;
      if (!kRms) {
        dbias[j] += d;
        total_tail += g;
      }
    }
    const float slope = fold(along, along_tail) / count;
    const float offset = kRms ? 0.0f : fold(total, total_tail) / count;
    for (j = 0; j < c; ++j) {
      const float normal = (to_float(x[j]) - mean) * rstd;
      dsum[j] = rstd * (to_float(dy[j]) * weight[j] - offset - normal * slope);
    }
  }
};

// to = dsum + the residual stream's own gradient.
template <class T>
struct AddGradRow {
  static FASTPAR_INLINE void run(float* __restrict dsum, const T* __restrict dsum_out,
                                 T* __restrict to, int64_t c) {
    for (int64_t j = 0; j < c; ++j) {
      dsum[j] += to_float(dsum_out[j]);
      to[j] = from_float<T>(dsum[j]);
    }
  }
};

template <class T>
struct StoreRow {
  static FASTPAR_INLINE void run(const float* __restrict from, T* __restrict to, int64_t c) {
    for (int64_t j = 0; j < c; ++j) to[j] = from_float<T>(from[j]);
  }
};

// dx = dsum under the mask.
template <class T>
struct DropRow {
  static FASTPAR_INLINE void run(float* __restrict dsum, const uint8_t* __restrict drawn,
                                 uint8_t threshold, float scale, T* __restrict dx, int64_t c) {
    for (int64_t j = 0; j < c; ++j) {
      const uint32_t kept = -static_cast<uint32_t>(drawn[j] >= threshold);
      dsum[j] = bit_cast<float>(bit_cast<uint32_t>(dsum[j] * scale) & kept);
      dx[j] = from_float<T>(dsum[j]);
    }
  }
};

struct SumRow {
  static FASTPAR_INLINE void run(const float* __restrict row, float* __restrict sum, int64_t c) {
    for (int64_t j = 0; j < c; ++j) sum[j] += row[j];
  }
};

constexpr int64_t kGrain = 1 << 14;  // elements worth a thread
constexpr int64_t kBlocks = 64;      // most blocks of rows in dweight, dbias and dx_bias
constexpr int64_t kBlockRows = 16;   // fewest rows of a block

template <class T, bool kRms>
void fwd(const T* x, const T* residual, const float* x_bias, const float* weight, const float* bias,
         T* sum, T* y, float* mean, float* rstd, int64_t n, int64_t c, float eps,
         const MaskBlock& at, int threads) {
  const Isa target = isa();
  threads = useful_threads(n * c, kGrain, threads);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    RowMask mask(at, target);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < n; ++i) {
      const T* row = x + i * c;
      if (residual) {
        if (mask.active()) {
          dispatch<AddRow<T, true>>(target, row, x_bias, residual + i * c, mask.row(i),
                                    mask.threshold(), mask.scale(), sum + i * c, c);
        } else {
          dispatch<AddRow<T, false>>(target, row, x_bias, residual + i * c, nullptr, 0, 1.0f,
                                     sum + i * c, c);
        }
        row = sum + i * c;
      }
      dispatch<NormalizeRow<T, kRms>>(target, row, weight, bias, y + i * c,
                                      kRms ? nullptr : mean + i, rstd + i, c, eps);
    }
  }
}

template <class T, bool kRms>
void bwd(const T* dy, const T* dsum_out, const T* x, const float* weight, const float* mean,
         const float* rstd, T* dsum, T* dx, float* dweight, float* dbias, float* dx_bias, int64_t n,
         int64_t c, const MaskBlock& at, int threads) {
  const Isa target = isa();
  threads = useful_threads(n * c, kGrain, threads);
  const int64_t rows = std::max(kBlockRows, (n + kBlocks - 1) / kBlocks);
  const int64_t blocks = (n + rows - 1) / rows;
  const int64_t own = kRms ? 1 : 2;  // dweight, dbias; behind them dx_bias
  const int64_t sums = dx_bias ? own + 1 : own;
  std::vector<float> partials(blocks * sums * c, 0.0f);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    RowMask mask(at, target);
    std::vector<float> row(c);
#pragma omp for schedule(static)
    for (int64_t block = 0; block < blocks; ++block) {
      float* partial = partials.data() + block * sums * c;
      const int64_t end = std::min(n, (block + 1) * rows);
      for (int64_t i = block * rows; i < end; ++i) {
        dispatch<BackwardRow<T, kRms>>(target, dy + i * c, x + i * c, weight, kRms ? 0.0f : mean[i],
                                       rstd[i], partial, kRms ? nullptr : partial + c, row.data(),
                                       c);
        if (dsum_out) {
          dispatch<AddGradRow<T>>(target, row.data(), dsum_out + i * c, dsum + i * c, c);
        } else {
          dispatch<StoreRow<T>>(target, row.data(), dsum + i * c, c);
        }
        if (dx) {
          dispatch<DropRow<T>>(target, row.data(), mask.row(i), mask.threshold(), mask.scale(),
                               dx + i * c, c);
        }
        if (dx_bias) dispatch<SumRow>(target, row.data(), partial + own * c, c);
      }
    }
  }
  float* const totals[3] = {dweight, kRms ? dx_bias : dbias, dx_bias};
  for (int64_t s = 0; s < sums; ++s) {
    if (!totals[s]) continue;
    std::fill(totals[s], totals[s] + c, 0.0f);
    for (int64_t block = 0; block < blocks; ++block) {
      dispatch<SumRow>(target, partials.data() + (block * sums + s) * c, totals[s], c);
    }
  }
}

}  // namespace

void layer_norm_fwd(const void* x, const void* residual, const float* x_bias, const float* weight,
                    const float* bias, void* sum, void* y, float* mean, float* rstd, Dtype dtype,
                    int64_t n, int64_t c, float eps, bool rms, const MaskBlock& at, int threads) {
  with_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    (rms ? fwd<T, true> : fwd<T, false>)(static_cast<const T*>(x), static_cast<const T*>(residual),
                                         x_bias, weight, bias, static_cast<T*>(sum),
                                         static_cast<T*>(y), mean, rstd, n, c, eps, at, threads);
  });
}

void layer_norm_bwd(const void* dy, const void* dsum_out, const void* x, const float* weight,
                    const float* mean, const float* rstd, void* dsum, void* dx, float* dweight,
                    float* dbias, float* dx_bias, Dtype dtype, int64_t n, int64_t c, bool rms,
                    const MaskBlock& at, int threads) {
  with_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    (rms ? bwd<T, true> : bwd<T, false>)(static_cast<const T*>(dy), static_cast<const T*>(dsum_out),
                                         static_cast<const T*>(x), weight, mean, rstd,
                                         static_cast<T*>(dsum), static_cast<T*>(dx), dweight, dbias,
                                         dx_bias, n, c, at, threads);
  });
}

}  // namespace fastpar
