// LayerNorm and RMSNorm (kRms: no mean, no bias) with what precedes them; sums: lanes.h.
#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "lanes.h"
#include "ops.h"
#include "philox_cpu.h"
#include "simd.h"

namespace fastpar {
namespace {

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
struct Normalize {
  template <int kWidth>
  struct Row {
    static FASTPAR_INLINE void run(const float* __restrict x, const float* __restrict weight,
                                   const float* __restrict bias, T* __restrict y, float* mean,
                                   float* rstd, int64_t c, float eps) {
      constexpr int kVectors = kStep / kWidth;
      const float count = static_cast<float>(c);
      Floats<kWidth> sum[kVectors] = {}, square[kVectors] = {};
      float sum_tail = 0.0f, square_tail = 0.0f;
      int64_t j = 0;
      if (kRms) {
        for (; j + kStep <= c; j += kStep) {
          for (int k = 0; k < kVectors; ++k) {
            const Floats<kWidth> v = load<kWidth>(x + j + kWidth * k);
            square[k] += v * v;
          }
        }
        for (; j < c; ++j) square_tail += x[j] * x[j];
        const float scale = 1.0f / std::sqrt(fold<kWidth>(square, square_tail) / count + eps);
        for (j = 0; j < c; ++j) y[j] = from_float<T>(x[j] * scale * weight[j]);
        *rstd = scale;
        return;
      }
      for (; j + kStep <= c; j += kStep) {
        for (int k = 0; k < kVectors; ++k) sum[k] += load<kWidth>(x + j + kWidth * k);
      }
      for (; j < c; ++j) sum_tail += x[j];
      const float center = fold<kWidth>(sum, sum_tail) / count;

      for (int k = 0; k < kVectors; ++k) sum[k] = Floats<kWidth>{};
      sum_tail = 0.0f;
      for (j = 0; j + kStep <= c; j += kStep) {
        for (int k = 0; k < kVectors; ++k) {
          const Floats<kWidth> d = load<kWidth>(x + j + kWidth * k) - center;
          sum[k] += d;
          square[k] += d * d;
        }
      }
      for (; j < c; ++j) {
        const float d = x[j] - center;
        sum_tail += d;
        square_tail += d * d;
      }
      const float rest = fold<kWidth>(sum, sum_tail) / count;
      const float variance = fold<kWidth>(square, square_tail) / count - rest * rest;
      const float scale = 1.0f / std::sqrt((variance < 0.0f ? 0.0f : variance) + eps);
      for (j = 0; j < c; ++j) {
        y[j] = from_float<T>(((x[j] - center) - rest) * scale * weight[j] + bias[j]);
      }
      *mean = center + rest;
      *rstd = scale;
    }
  };
};

// A row of the backward pass: dsum = gradient of the normalized row, plus `residual`.
struct GradRow {
  const float *dy, *x, *residual;
  float* dsum;
  float mean, rstd, slope, offset;
};

// slope = mean(dy * weight * normal), offset = mean(dy * weight).
template <bool kRms>
struct Means {
  template <int kWidth>
  struct Row {
    static FASTPAR_INLINE void run(GradRow* at, const float* __restrict weight, int64_t c) {
      constexpr int kVectors = kStep / kWidth;
      const float *dy = at->dy, *x = at->x;
      const float mean = at->mean, rstd = at->rstd, count = static_cast<float>(c);
      Floats<kWidth> along[kVectors] = {}, total[kVectors] = {};
      float along_tail = 0.0f, total_tail = 0.0f;
      int64_t j = 0;
      for (; j + kStep <= c; j += kStep) {
        for (int k = 0; k < kVectors; ++k) {
          const int64_t i = j + kWidth * k;
          const Floats<kWidth> g = load<kWidth>(dy + i) * load<kWidth>(weight + i);
          along[k] += g * ((load<kWidth>(x + i) - mean) * rstd);
          if (!kRms) total[k] += g;
        }
      }
      for (; j < c; ++j) {
        const float g = dy[j] * weight[j];
        along_tail += g * ((x[j] - mean) * rstd);
        if (!kRms) total_tail += g;
      }
      at->slope = fold<kWidth>(along, along_tail) / count;
      at->offset = kRms ? 0.0f : fold<kWidth>(total, total_tail) / count;
    }
  };
};

// dsum of kRows rows, whose terms of dweight and dbias are added in order: a pair of rows reads and
// writes these sums once.
template <bool kRms, bool kAdd, int kRows>
struct Gradients {
  template <class V>
  static FASTPAR_INLINE void step(const GradRow* at, const float* weight, float* dweight,
                                  float* dbias, int64_t j) {
    V w, slopes, offsets;
    std::memcpy(&w, weight + j, sizeof(V));
    std::memcpy(&slopes, dweight + j, sizeof(V));
    if (!kRms) std::memcpy(&offsets, dbias + j, sizeof(V));
    for (int r = 0; r < kRows; ++r) {
      V d, x;
      std::memcpy(&d, at[r].dy + j, sizeof(V));
      std::memcpy(&x, at[r].x + j, sizeof(V));
      const V normal = (x - at[r].mean) * at[r].rstd;
      slopes += d * normal;
      if (!kRms) offsets += d;
      V dsum = at[r].rstd * (d * w - at[r].offset - normal * at[r].slope);
      if (kAdd) {
        V residual;
        std::memcpy(&residual, at[r].residual + j, sizeof(V));
        dsum += residual;
      }
      std::memcpy(at[r].dsum + j, &dsum, sizeof(V));
    }
    std::memcpy(dweight + j, &slopes, sizeof(V));
    if (!kRms) std::memcpy(dbias + j, &offsets, sizeof(V));
  }

  template <int kWidth>
  struct Rows {
    static FASTPAR_INLINE void run(const GradRow* rows, const float* weight, float* dweight,
                                   float* dbias, int64_t c) {
      GradRow at[kRows];
      for (int r = 0; r < kRows; ++r) at[r] = rows[r];
      int64_t j = 0;
      for (; j + kWidth <= c; j += kWidth) step<Floats<kWidth>>(at, weight, dweight, dbias, j);
      for (; j < c; ++j) step<float>(at, weight, dweight, dbias, j);
    }
  };
};

// to = the row, plus the residual stream's own gradient with kAdd.
template <class T, bool kAdd>
struct NarrowRow {
  static FASTPAR_INLINE void run(float* __restrict row, const T* __restrict dsum_out,
                                 T* __restrict to, int64_t c) {
    for (int64_t j = 0; j < c; ++j) {
      if (kAdd) row[j] += to_float(dsum_out[j]);
      to[j] = from_float<T>(row[j]);
    }
  }
};

// dx = the row under the mask; 16 bits keep the floats in place.
template <class T>
struct DropRow {
  static FASTPAR_INLINE void run(const float* row, float* kept, const uint8_t* __restrict drawn,
                                 uint8_t threshold, float scale, T* dx, int64_t c) {
    for (int64_t j = 0; j < c; ++j) {
      const uint32_t bits = -static_cast<uint32_t>(drawn[j] >= threshold);
      const float value = bit_cast<float>(bit_cast<uint32_t>(row[j] * scale) & bits);
      if (!std::is_same_v<T, float>) kept[j] = value;
      dx[j] = from_float<T>(value);
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
    std::vector<float> wide(std::is_same_v<T, float> ? 0 : c);
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
      dispatch_wide<Normalize<T, kRms>::template Row>(target, widened(target, row, wide.data(), c),
                                                      weight, bias, y + i * c,
                                                      kRms ? nullptr : mean + i, rstd + i, c, eps);
    }
  }
}

// Two rows, or the last one of a block.
template <bool kRms, bool kAdd>
void add_gradients(Isa target, GradRow* rows, int count, const float* weight, float* dweight,
                   float* dbias, int64_t c) {
  for (int r = 0; r < count; ++r)
    dispatch_wide<Means<kRms>::template Row>(target, rows + r, weight, c);
  if (count == 2) {
    dispatch_wide<Gradients<kRms, kAdd, 2>::template Rows>(target, rows, weight, dweight, dbias, c);
  } else {
    dispatch_wide<Gradients<kRms, kAdd, 1>::template Rows>(target, rows, weight, dweight, dbias, c);
  }
}

template <class T, bool kRms>
void bwd(const T* dy, const T* dsum_out, const T* x, const float* weight, const float* mean,
         const float* rstd, T* dsum, T* dx, float* dweight, float* dbias, float* dx_bias, int64_t n,
         int64_t c, const MaskBlock& at, int threads) {
  constexpr bool is_wide = std::is_same_v<T, float>;
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
    std::vector<float> wide(is_wide ? 0 : 6 * c);  // dy, x and dsum of two rows
#pragma omp for schedule(static)
    for (int64_t block = 0; block < blocks; ++block) {
      float* partial = partials.data() + block * sums * c;
      const int64_t end = std::min(n, (block + 1) * rows);
      for (int64_t i = block * rows; i < end; i += 2) {
        const int count = i + 1 < end ? 2 : 1;
        GradRow pair[2];
        for (int r = 0; r < count; ++r) {
          const int64_t first = (i + r) * c;
          float* buffer = wide.data() + 3 * r * c;
          pair[r].dy = widened(target, dy + first, buffer, c);
          pair[r].x = widened(target, x + first, buffer + c, c);
          pair[r].mean = kRms ? 0.0f : mean[i + r];
          pair[r].rstd = rstd[i + r];
          if constexpr (is_wide) {
            pair[r].residual = dsum_out ? dsum_out + first : nullptr;
            pair[r].dsum = dsum + first;
          } else {
            pair[r].dsum = buffer + 2 * c;
          }
        }
        float* const to_bias = kRms ? nullptr : partial + c;
        if (is_wide && dsum_out) {
          add_gradients<kRms, true>(target, pair, count, weight, partial, to_bias, c);
        } else {
          add_gradients<kRms, false>(target, pair, count, weight, partial, to_bias, c);
        }
        for (int r = 0; r < count; ++r) {
          const int64_t first = (i + r) * c;
          float* row = pair[r].dsum;
          if constexpr (!is_wide) {
            if (dsum_out) {
              dispatch<NarrowRow<T, true>>(target, row, dsum_out + first, dsum + first, c);
            } else {
              dispatch<NarrowRow<T, false>>(target, row, dsum_out, dsum + first, c);
            }
          }
          if (dx) {
            dispatch<DropRow<T>>(target, row, row, mask.row(i + r), mask.threshold(), mask.scale(),
                                 dx + first, c);
            if constexpr (is_wide) row = dx + first;
          }
          if (dx_bias) dispatch<SumRow>(target, row, partial + own * c, c);
        }
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
