// Matrix products: of fp32 with AVX-512, for machines whose BLAS does not use it, and of bf16 with
// AMX (kernels/linear/__init__.py says when).
//
// [Note: blocking]
// C[M, N] is made of tiles of kMr x kNr that live in registers while k runs. k is cut into passes
// of at most kMaxK. In a pass the smaller of A and B is packed once into a panel that all threads
// read; the larger is cut into chunks that fit in L2, each packed and multiplied by one thread.
// Packed, the operands lie in slivers of kMr rows (A) or kNr columns (B), zero-padded. The order of
// the additions of an element of C depends on K alone, so its bits do not depend on M, N, strides
// or threads. Sums between passes are fp32.
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

constexpr int64_t kGrain = 1 << 20;  // multiply-adds worth a thread: 10 us

int64_t up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

struct AlignedBuffer {
  std::vector<float> memory;
  template <class T>
  T* get(int64_t size) {
    const size_t floats = static_cast<size_t>(size) * sizeof(T) / sizeof(float) + 17;
    if (memory.size() < floats) memory.resize(floats);
    return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~63ull);
  }
};

// Reused by every product of a thread: page faults once.
thread_local AlignedBuffer panel_buffer, chunk_buffer, sums_buffer;

// Rows of fp32, or of bf16, `stride` elements apart; null data is zeros. A bias has stride 0.
struct Rows {
  void* data;
  int64_t stride;
  bool bf16;

  Rows from(int64_t row, int64_t column) const {
    const int64_t bytes = (row * stride + column) * (bf16 ? 2 : 4);
    return {data == nullptr ? data : static_cast<char*>(data) + bytes, stride, bf16};
  }
};

FASTPAR_TARGET_AVX512 inline __m512 load_row(const Rows& rows, int64_t row, int64_t column,
                                             __mmask16 mask) {
  if (rows.data == nullptr) return _mm512_setzero_ps();
  const int64_t at = row * rows.stride + column;
  if (!rows.bf16) return _mm512_maskz_loadu_ps(mask, static_cast<const float*>(rows.data) + at);
  const auto* bits = static_cast<const uint16_t*>(rows.data) + at;
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, bits));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

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

constexpr int64_t kRows = 14, kColumns = 32;  // 28 accumulators, 2 of B, 1 of A: of 32 registers
constexpr int64_t kSum = 128;                 // products in one chain, see [Note: fp32]

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

// to[M, n] = A's sliver @ B's sliver + before; M <= kRows, n <= kColumns.
template <int M>
FASTPAR_TARGET_AVX512 void multiply_slivers(const float* a, const float* b, int64_t k, Rows before,
                                            Rows to, int64_t n) {
  const auto* c = static_cast<const float*>(to.data);
  for (int64_t i = 0; i < M; ++i) {
    _mm_prefetch(c + i * to.stride, _MM_HINT_T0);
    _mm_prefetch(c + i * to.stride + 16, _MM_HINT_T0);
  }
  __m512 tile[M][2];
  for (int64_t start = 0; start < k; start += kSum) {
    const int64_t depth = std::min(kSum, k - start);
    __m512 sum[M][2];
#pragma GCC unroll 14
    for (int i = 0; i < M; ++i) sum[i][0] = sum[i][1] = _mm512_setzero_ps();
    for (int64_t p = 0; p < depth; ++p, a += kRows, b += kColumns) {
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
    for (int64_t i = 0; i < M; ++i) {
      const __m512 start = load_row(before, i, 16 * half, mask);
      float* row = static_cast<float*>(to.data) + i * to.stride + 16 * half;
      _mm512_mask_storeu_ps(row, mask, _mm512_add_ps(start, tile[i][half]));
    }
  }
}

using Multiply = void (*)(const float*, const float*, int64_t, Rows, Rows, int64_t);

// multiply_slivers of 1 to kMr rows.
template <int... rows>
constexpr auto by_rows(std::integer_sequence<int, rows...>) {
  return std::array<Multiply, sizeof...(rows)>{multiply_slivers<rows + 1>...};
}

// [Note: fp32] Sums run in registers for kSum products and are then added to the tile: shorter
// chains round less than one long one. A last sliver of A with fewer rows is multiplied by those
// alone (one of 128 rows has 2: 8 % less).
struct Fp32 {
  using Element = float;
  static constexpr int64_t kMr = kRows, kNr = kColumns;
  static constexpr int64_t kStep = 1;                // k is padded to it
  static constexpr int64_t kMaxK = 768;              // a pass: 42 KiB of A's sliver, 96 KiB of B's
  static constexpr int64_t kChunkBytes = 512 << 10;  // of the packed larger operand: half of L2
  static constexpr int64_t kBlockBytes = 256 << 10;  // of the panel, walked through for each chunk
  static void begin() {}
  static void end() {}
  static constexpr auto pack_a = pack_sliver<kMr>, pack_b = pack_sliver<kNr>;
  // to[m, n] = slivers of A @ a sliver of B + before.
  static void multiply(const float* a, const float* b, int64_t k, Rows before, Rows to, int64_t m,
                       int64_t n) {
    static constexpr auto kMultiply = by_rows(std::make_integer_sequence<int, kMr>{});
    for (int64_t i = 0; i < m; i += kMr) {
      kMultiply[std::min(kMr, m - i) - 1](a + i * k, b, k, before.from(i, 0), to.from(i, 0), n);
    }
  }
};

#if FASTPAR_AMX
// [Note: bf16] A sliver holds, for each 32 of k, two tiles of registers: of A 16 rows of 32 k, of B
// 16 pairs of k of 16 columns, a pair in 32 bits. Products are exact, sums fp32; the instruction
// takes subnormal numbers for 0.
struct Bf16 {
  using Element = uint16_t;
  static constexpr int64_t kMr = 32, kNr = 32, kStep = 32;
  static constexpr int64_t kMaxK = 1024;  // a pass: 64 KiB of a sliver
  static constexpr int64_t kChunkBytes = 512 << 10;
  static constexpr int64_t kBlockBytes = 1 << 20;

  struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  };

  // The configuration is a thread's own; oneDNN has others.
  FASTPAR_TARGET_AMX static void begin() {
    const Config config;
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
  }
  FASTPAR_TARGET_AMX static void end() { _tile_release(); }

  // Tiles of 16 lanes x 32 k (PAIRS: of 16 pairs of k x 16 lanes), two for each 32 of k.
  template <bool PAIRS>
  FASTPAR_TARGET_AVX512 static void pack(uint16_t* to, const uint16_t* from, int64_t lane_stride,
                                         int64_t k_stride, int64_t lanes, int64_t k) {
    for (int64_t p = 0; p < k; p += 32) {
      const int64_t depth = std::min<int64_t>(32, k - p);
      const __mmask32 deep = static_cast<__mmask32>((1ull << depth) - 1);
      for (int64_t first = 0; first < 32; first += 16, to += 512) {
        const int64_t valid = std::max<int64_t>(0, std::min<int64_t>(16, lanes - first));
        const __mmask16 wide = static_cast<__mmask16>((1u << valid) - 1);
        const uint16_t* source = from + first * lane_stride + p * k_stride;
        __m512 tile[16], turned[16];
        bool pairs = false;  // as they are read
        if (k_stride == 1) {
          for (int64_t i = 0; i < 16; ++i) {
            tile[i] =
                i < valid
                    ? _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(deep, source + i * lane_stride))
                    : _mm512_setzero_ps();
          }
        } else if (lane_stride == 1) {
          pairs = true;
          for (int64_t i = 0; i < 16; ++i) {
            __m512i half[2];
            for (int64_t j = 0; j < 2; ++j) {
              const __mmask16 mask = 2 * i + j < depth ? wide : 0;
              const uint16_t* row = source + (mask ? 2 * i + j : 0) * k_stride;
              half[j] = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, row));
            }
            tile[i] = _mm512_castsi512_ps(_mm512_or_si512(half[0], _mm512_slli_epi32(half[1], 16)));
          }
        } else {
          alignas(64) uint16_t one[16][32] = {};
          for (int64_t i = 0; i < valid; ++i) {
            for (int64_t j = 0; j < depth; ++j) one[i][j] = source[i * lane_stride + j * k_stride];
          }
          for (int64_t i = 0; i < 16; ++i) tile[i] = _mm512_load_ps(one[i]);
        }
        if (pairs != PAIRS) transpose16(tile, turned);
        for (int64_t i = 0; i < 16; ++i) {
          _mm512_store_ps(to + 32 * i, pairs != PAIRS ? turned[i] : tile[i]);
        }
      }
    }
  }
  static constexpr auto pack_a = pack<false>, pack_b = pack<true>;

  // to[m, n] = slivers of A @ a sliver of B + before.
  static void multiply(const uint16_t* a, const uint16_t* b, int64_t k, Rows before, Rows to,
                       int64_t m, int64_t n) {
    const auto finished = before.data == nullptr
                              ? (to.bf16 ? finish<false, true> : finish<false, false>)
                              : (to.bf16 ? finish<true, true> : finish<true, false>);
    for (int64_t i = 0; i < m; i += kMr) {
      alignas(64) float sums[32 * 32];
      multiply_slivers(a + i * k, b, k, sums);
      finished(sums, before.from(i, 0), to.from(i, 0), std::min(kMr, m - i), n);
    }
  }

  FASTPAR_TARGET_AMX static void multiply_slivers(const uint16_t* a, const uint16_t* b, int64_t k,
                                                  float* sums) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t p = 0; p < k; p += kStep, a += 1024, b += 1024) {
      _tile_loadd(4, a, 64);
      _tile_loadd(6, b, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, b + 512, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, a + 512, 64);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + 16, 128);
    _tile_stored(2, sums + 512, 128);
    _tile_stored(3, sums + 528, 128);
  }

  // to[m, n] = sums + before. One conversion is for 32 columns: bf16 rounded to nearest even.
  template <bool BEFORE, bool BF16>
  FASTPAR_TARGET_AMX static void finish(const float* sums, Rows before, Rows to, int64_t m,
                                        int64_t n) {
    const __mmask16 left = static_cast<__mmask16>((1u << std::min<int64_t>(16, n)) - 1);
    const __mmask16 right = static_cast<__mmask16>((1u << std::max<int64_t>(0, n - 16)) - 1);
    const __mmask32 both = static_cast<__mmask32>(right) << 16 | left;
    for (int64_t i = 0; i < m; ++i) {
      __m512 x = _mm512_load_ps(sums + 32 * i), y = _mm512_load_ps(sums + 32 * i + 16);
      if (BEFORE) {
        x = _mm512_add_ps(load_row(before, i, 0, left), x);
        y = _mm512_add_ps(load_row(before, i, 16, right), y);
      }
      if (BF16) {
        auto* row = static_cast<uint16_t*>(to.data) + i * to.stride;
        _mm512_mask_storeu_epi16(row, both, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(y, x)));
      } else {
        auto* row = static_cast<float*>(to.data) + i * to.stride;
        _mm512_mask_storeu_ps(row, left, x);
        _mm512_mask_storeu_ps(row + 16, right, y);
      }
    }
  }
};
#endif

// to[m, n] = packed A @ packed B + before. A is walked in blocks that stay in L2 while B passes by.
template <class Kind>
void multiply_packed(const typename Kind::Element* a, const typename Kind::Element* b, int64_t k,
                     Rows before, Rows to, int64_t m, int64_t n) {
  constexpr int64_t kMr = Kind::kMr, kNr = Kind::kNr;
  const int64_t sliver = kMr * k * static_cast<int64_t>(sizeof(typename Kind::Element));
  const int64_t block = std::max<int64_t>(1, Kind::kBlockBytes / sliver) * kMr;
  for (int64_t start = 0; start < m; start += block) {
    const int64_t end = std::min(m, start + block);
    for (int64_t j = 0; j < n; j += kNr) {
      Kind::multiply(a + start * k, b + j * k, k, before.from(start, j), to.from(start, j),
                     end - start, std::min(kNr, n - j));
    }
  }
}

// A pass: to = a @ b + before. Called by every thread of a parallel region.
template <class Kind>
void multiply_pass(const Matrix& a, const Matrix& b, Rows before, Rows to, int64_t m, int64_t n,
                   int64_t k, typename Kind::Element* panel, int64_t chunk) {
  using Element = typename Kind::Element;
  constexpr int64_t kMr = Kind::kMr, kNr = Kind::kNr;
  const auto* a_data = static_cast<const Element*>(a.data);
  const auto* b_data = static_cast<const Element*>(b.data);
  const int64_t deep = up(k, Kind::kStep);
  const bool share_a = m <= n;
  const int64_t shared = share_a ? m : n, cut = share_a ? n : m;
  const int64_t shared_step = share_a ? kMr : kNr, cut_step = share_a ? kNr : kMr;
  const auto pack = [&](bool left, Element* out, int64_t first, int64_t lanes) {
    if (left) {
      Kind::pack_a(out, a_data + first * a.row_stride, a.row_stride, a.column_stride, lanes, k);
    } else {
      Kind::pack_b(out, b_data + first * b.column_stride, b.column_stride, b.row_stride, lanes, k);
    }
  };
#pragma omp for schedule(static)
  for (int64_t i = 0; i < shared; i += shared_step) {
    pack(share_a, panel + i * deep, i, shared - i);
  }
#pragma omp for schedule(dynamic)
  for (int64_t i = 0; i < cut; i += chunk) {
    const int64_t size = std::min(chunk, cut - i);
    auto* packed = chunk_buffer.get<Element>(chunk * deep);
    for (int64_t s = 0; s < size; s += cut_step) {
      pack(!share_a, packed + s * deep, i + s, size - s);
    }
    if (share_a) {
      multiply_packed<Kind>(panel, packed, deep, before.from(0, i), to.from(0, i), m, size);
    } else {
      multiply_packed<Kind>(packed, panel, deep, before.from(i, 0), to.from(i, 0), size, n);
    }
  }
}

template <class Kind>
void run(const Matrix& a, const Matrix& b, Rows before, Rows to, int64_t m, int64_t n, int64_t k,
         int threads) {
  using Element = typename Kind::Element;
  constexpr auto kSize = static_cast<int64_t>(sizeof(Element));
  threads = useful_threads(m * n * k, kGrain, threads);
  const bool share_a = m <= n;
  const int64_t step = share_a ? Kind::kNr : Kind::kMr;
  const int64_t shared = share_a ? up(m, Kind::kMr) : up(n, Kind::kNr);
  const int64_t extent = share_a ? n : m;
  const int64_t passes = (k + Kind::kMaxK - 1) / Kind::kMaxK;
  const int64_t depth = up((k + passes - 1) / passes, Kind::kStep);
  const int64_t fits = std::max(step, Kind::kChunkBytes / (depth * kSize));
  const int64_t rounds = (extent + fits * threads - 1) / (fits * threads);
  const int64_t chunk = up((extent + rounds * threads - 1) / (rounds * threads), step);
  auto* panel = panel_buffer.get<Element>(shared * depth);
  Rows sums = to;  // between passes
  if (to.bf16 && passes > 1) sums = {sums_buffer.get<float>(m * n), n, false};
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Kind::begin();
    for (int64_t start = 0; start < k; start += depth) {
      multiply_pass<Kind>({a.at(start * a.column_stride, kSize), a.row_stride, a.column_stride},
                          {b.at(start * b.row_stride, kSize), b.row_stride, b.column_stride},
                          start == 0 ? before : sums, start + depth < k ? sums : to, m, n,
                          std::min(depth, k - start), panel, chunk);
    }
    Kind::end();
  }
}

}  // namespace

void gemm(const Matrix& a, const Matrix& b, void* c, int64_t ldc, int64_t m, int64_t n, int64_t k,
          bool accumulate, const void* bias, Dtype dtype, Dtype out, int threads) {
  const bool bf16 = dtype == Dtype::bfloat16;
  const Rows to{c, ldc, out == Dtype::bfloat16};
  const Rows before = accumulate ? to : Rows{const_cast<void*>(bias), 0, bf16};
#if FASTPAR_AMX
  if (bf16) return run<Bf16>(a, b, before, to, m, n, k, threads);
#endif
  run<Fp32>(a, b, before, to, m, n, k, threads);
}

#else

void gemm(const Matrix&, const Matrix&, void*, int64_t, int64_t, int64_t, int64_t, bool,
          const void*, Dtype, Dtype, int) {
  throw std::runtime_error(
      "gemm: expected an x86-64 build, got another machine; use torch.mm there");
}

#endif

}  // namespace fastpar
