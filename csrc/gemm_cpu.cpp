// fp32 matrix product for AVX-512 machines whose BLAS does not use it (kernels/linear/__init__.py
// says when).
//
// [Note: blocking]
// C[M, N] is made of tiles of kMr x kNr that live in registers while k runs. k is cut into passes
// of at most kMaxK. In a pass the smaller of A and B is packed once into a panel that all threads
// read; the larger is cut into chunks that fit in L2, each packed and multiplied by one thread.
// Packed, the operands lie in slivers of kMr rows (A) or kNr columns (B), zero-padded, k outermost;
// a last sliver of A with fewer rows is multiplied by those alone (one of 128 rows has 2: 8 %
// less). Sums run in registers for kSum products and are then added to the tile: shorter chains
// round less than one long one. The order of the additions of an element of C depends on K alone,
// so its bits do not depend on M, N, strides or threads.
#include <algorithm>
#include <array>
#include <stdexcept>
#include <utility>
#include <vector>

#include "ops.h"
#include "simd.h"

#if FASTPAR_X86
#if !defined(__clang__)
// GCC's own AVX-512 headers pass deliberately undefined vectors (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#endif

namespace fastpar {

#if FASTPAR_X86
namespace {

constexpr int64_t kMr = 14, kNr = 32;       // 28 accumulators, 2 of B, 1 of A: 31 of 32 registers
constexpr int64_t kMaxK = 768;              // a pass: 42 KiB of A's sliver, 96 KiB of B's
constexpr int64_t kSum = 128;               // products in one chain
constexpr int64_t kChunkBytes = 512 << 10;  // of the packed larger operand: half of L2
constexpr int64_t kBlockBytes = 256 << 10;  // of the panel, walked through for each such chunk
constexpr int64_t kGrain = 1 << 20;         // multiply-adds worth a thread: 10 us
constexpr int64_t kFloat = sizeof(float);

int64_t up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

struct AlignedBuffer {
  std::vector<float> memory;
  float* get(int64_t size) {
    if (static_cast<int64_t>(memory.size()) < size + 16) memory.resize(size + 16);
    return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~63ull);
  }
};

// Reused by every product of a thread: page faults once.
thread_local AlignedBuffer panel_buffer, chunk_buffer;

// out[j] = column j of the 16 x 16 matrix whose rows are in[i].
FASTPAR_TARGET_AVX512 inline void transpose16(const __m512 in[16], __m512 out[16]) {
  __m512 a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_ps(in[i], in[i + 1]);
    a[i + 1] = _mm512_unpackhi_ps(in[i], in[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    b[i] = _mm512_shuffle_ps(a[i], a[i + 2], 0x44);
    b[i + 1] = _mm512_shuffle_ps(a[i], a[i + 2], 0xee);
    b[i + 2] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0x44);
    b[i + 3] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm512_shuffle_f32x4(b[i], b[i + 4], 0x88);
    a[i + 4] = _mm512_shuffle_f32x4(b[i], b[i + 4], 0xdd);
    a[i + 8] = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0x88);
    a[i + 12] = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; ++i) {
    out[i] = _mm512_shuffle_f32x4(a[i], a[i + 8], 0x88);
    out[i + 8] = _mm512_shuffle_f32x4(a[i], a[i + 8], 0xdd);
  }
}

// One sliver: to[p * W + lane] = from[lane * lane_stride + p * k_stride], 0 from `lanes` to W.
template <int64_t W>
FASTPAR_TARGET_AVX512 void pack_sliver(float* to, const float* from, int64_t lane_stride,
                                       int64_t k_stride, int64_t lanes, int64_t k) {
  for (int64_t first = 0; first < W; first += 16) {
    const int64_t width = std::min<int64_t>(16, W - first);
    const int64_t valid = std::max<int64_t>(0, std::min(width, lanes - first));
    const __mmask16 store = static_cast<__mmask16>((1u << width) - 1);
    const __mmask16 load = static_cast<__mmask16>((1u << valid) - 1);
    const float* source = from + first * lane_stride;
    if (lane_stride == 1) {
      for (int64_t p = 0; p < k; ++p) {
        const __m512 x = _mm512_maskz_loadu_ps(load, source + p * k_stride);
        _mm512_mask_storeu_ps(to + p * W + first, store, x);
      }
    } else if (k_stride == 1) {
      for (int64_t p = 0; p < k; p += 16) {
        const int64_t depth = std::min<int64_t>(16, k - p);
        const __mmask16 mask = static_cast<__mmask16>((1u << depth) - 1);
        __m512 rows[16], columns[16];
        for (int64_t lane = 0; lane < 16; ++lane) {
          rows[lane] = lane < valid ? _mm512_maskz_loadu_ps(mask, source + lane * lane_stride + p)
                                    : _mm512_setzero_ps();
        }
        transpose16(rows, columns);
        for (int64_t j = 0; j < depth; ++j) {
          _mm512_mask_storeu_ps(to + (p + j) * W + first, store, columns[j]);
        }
      }
    } else {
      for (int64_t p = 0; p < k; ++p) {
        for (int64_t lane = 0; lane < width; ++lane) {
          to[p * W + first + lane] =
              lane < valid ? source[lane * lane_stride + p * k_stride] : 0.0f;
        }
      }
    }
  }
}

// C[M, n] = A's sliver @ B's sliver + bias, or += without bias; M <= kMr, n <= kNr.
template <int M>
FASTPAR_TARGET_AVX512 void multiply_slivers(const float* a, const float* b, int64_t k, float* c,
                                            int64_t ldc, int64_t n, bool accumulate,
                                            const float* bias) {
  for (int64_t i = 0; i < M; ++i) {  // what is added to, or written, at the end
    _mm_prefetch(c + i * ldc, _MM_HINT_T0);
    _mm_prefetch(c + i * ldc + 16, _MM_HINT_T0);
  }
  __m512 tile[M][2];
  for (int64_t start = 0; start < k; start += kSum) {
    const int64_t depth = std::min(kSum, k - start);
    __m512 sum[M][2];
#pragma GCC unroll 14
    for (int i = 0; i < M; ++i) sum[i][0] = sum[i][1] = _mm512_setzero_ps();
    for (int64_t p = 0; p < depth; ++p, a += kMr, b += kNr) {
      const __m512 left = _mm512_load_ps(b), right = _mm512_load_ps(b + 16);
#pragma GCC unroll 14
      for (int i = 0; i < M; ++i) {
        const __m512 x = _mm512_set1_ps(a[i]);
        sum[i][0] = _mm512_fmadd_ps(x, left, sum[i][0]);
        sum[i][1] = _mm512_fmadd_ps(x, right, sum[i][1]);
      }
    }
    if (start == 0) {
#pragma GCC unroll 14
      for (int i = 0; i < M; ++i) tile[i][0] = sum[i][0], tile[i][1] = sum[i][1];
    } else {
#pragma GCC unroll 14
      for (int i = 0; i < M; ++i) {
        tile[i][0] = _mm512_add_ps(tile[i][0], sum[i][0]);
        tile[i][1] = _mm512_add_ps(tile[i][1], sum[i][1]);
      }
    }
  }
  for (int half = 0; half < 2; ++half) {
    const int64_t columns = std::max<int64_t>(0, std::min<int64_t>(16, n - 16 * half));
    const __mmask16 mask = static_cast<__mmask16>((1u << columns) - 1);
    const __m512 add = bias ? _mm512_maskz_loadu_ps(mask, bias + 16 * half) : _mm512_setzero_ps();
    for (int64_t i = 0; i < M; ++i) {
      float* to = c + i * ldc + 16 * half;
      const __m512 before = accumulate ? _mm512_maskz_loadu_ps(mask, to) : add;
      _mm512_mask_storeu_ps(to, mask, _mm512_add_ps(before, tile[i][half]));
    }
  }
}

using Multiply = void (*)(const float*, const float*, int64_t, float*, int64_t, int64_t, bool,
                          const float*);

// multiply_slivers of 1 to kMr rows.
template <int... rows>
constexpr std::array<Multiply, kMr> by_rows(std::integer_sequence<int, rows...>) {
  return {multiply_slivers<rows + 1>...};
}
constexpr auto kMultiply = by_rows(std::make_integer_sequence<int, kMr>{});

// C[m, n] = or += packed A @ packed B. A is walked in blocks that stay in L2 while B passes by.
void multiply_packed(const float* a, const float* b, int64_t k, float* c, int64_t ldc, int64_t m,
                     int64_t n, bool accumulate, const float* bias) {
  const int64_t block = std::max(kMr, kBlockBytes / (k * kFloat) / kMr * kMr);
  for (int64_t start = 0; start < m; start += block) {
    const int64_t end = std::min(m, start + block);
    for (int64_t j = 0; j < n; j += kNr) {
      for (int64_t i = start; i < end; i += kMr) {
        const Multiply multiply = kMultiply[std::min(kMr, m - i) - 1];
        multiply(a + i * k, b + j * k, k, c + i * ldc + j, ldc, std::min(kNr, n - j), accumulate,
                 bias ? bias + j : nullptr);
      }
    }
  }
}

}  // namespace

void gemm(const Matrix& a, const Matrix& b, float* c, int64_t ldc, int64_t m, int64_t n, int64_t k,
          bool accumulate, const float* bias, int threads) {
  threads = useful_threads(m * n * k, kGrain, threads);
  const bool share_a = m <= n;
  const int64_t passes = std::max<int64_t>(1, (k + kMaxK - 1) / kMaxK);
  const int64_t depth = (k + passes - 1) / passes;
  const int64_t shared = share_a ? up(m, kMr) : up(n, kNr);
  const int64_t extent = share_a ? n : m;
  const int64_t step = share_a ? kNr : kMr;
  const int64_t fits = std::max(step, kChunkBytes / (std::max<int64_t>(1, depth) * kFloat));
  const int64_t rounds = (extent + fits * threads - 1) / (fits * threads);
  const int64_t chunk = up((extent + rounds * threads - 1) / (rounds * threads), step);
  float* panel = panel_buffer.get(shared * depth);
#pragma omp parallel num_threads(threads) if (threads > 1)
  for (int64_t start = 0; start < k; start += depth) {
    const int64_t kc = std::min(depth, k - start);
    const float* a_pass = a.data + start * a.column_stride;
    const float* b_pass = b.data + start * b.row_stride;
    const bool add = accumulate || start > 0;
    if (share_a) {
#pragma omp for schedule(static)
      for (int64_t i = 0; i < m; i += kMr) {
        pack_sliver<kMr>(panel + i * kc, a_pass + i * a.row_stride, a.row_stride, a.column_stride,
                         m - i, kc);
      }
#pragma omp for schedule(dynamic)
      for (int64_t j = 0; j < n; j += chunk) {
        const int64_t columns = std::min(chunk, n - j);
        float* packed = chunk_buffer.get(chunk * depth);
        for (int64_t s = 0; s < columns; s += kNr) {
          pack_sliver<kNr>(packed + s * kc, b_pass + (j + s) * b.column_stride, b.column_stride,
                           b.row_stride, columns - s, kc);
        }
        multiply_packed(panel, packed, kc, c + j, ldc, m, columns, add, bias ? bias + j : nullptr);
      }
    } else {
#pragma omp for schedule(static)
      for (int64_t j = 0; j < n; j += kNr) {
        pack_sliver<kNr>(panel + j * kc, b_pass + j * b.column_stride, b.column_stride,
                         b.row_stride, n - j, kc);
      }
#pragma omp for schedule(dynamic)
      for (int64_t i = 0; i < m; i += chunk) {
        const int64_t rows = std::min(chunk, m - i);
        float* packed = chunk_buffer.get(chunk * depth);
        for (int64_t s = 0; s < rows; s += kMr) {
          pack_sliver<kMr>(packed + s * kc, a_pass + (i + s) * a.row_stride, a.row_stride,
                           a.column_stride, rows - s, kc);
        }
        multiply_packed(packed, panel, kc, c + i * ldc, ldc, rows, n, add, bias);
      }
    }
  }
}

#else

void gemm(const Matrix&, const Matrix&, float*, int64_t, int64_t, int64_t, int64_t, bool,
          const float*, int) {
  throw std::runtime_error(
      "gemm: expected an x86-64 build, got another machine; use torch.mm there");
}

#endif

}  // namespace fastpar
