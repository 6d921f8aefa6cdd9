// Softmax attention, forward and backward, one key head of one document at a time. A document is a
// sample of a batch, or a piece of a packed sequence (cu_seqlens).
//
// A thread owns such a head with all query heads that read it, so every sum has one writer and one
// order. Keys and values are copied once per head into panels; then blocks of kBlock queries see
// all of their keys at once: scores, softmax, product with the values. Scores of a block stay in
// L2; a causal block skips the panels behind its last query, tile by tile.
//
// The products run on tiles held in registers: 8 rows of two vectors with AVX-512, 4 of two or 2 of
// four otherwise. Each element sums in the order of k, each step rounded once (multiply_add), so
// the width changes no bit (simd.h [Note: same bits on every instruction set]).
#include <algorithm>
#include <cmath>
#include <vector>

#include "ops.h"
#include "philox_cpu.h"
#include "simd.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are arguments of inlined functions only

namespace fastpar {
namespace {

constexpr int64_t kPanel = 32;  // columns of a tile
constexpr int64_t kTile = 8;    // rows whose causal limit is common
constexpr int64_t kSum = 128;   // products in one chain

int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

template <int W>
struct Simd {
  typedef float Vec __attribute__((vector_size(W * 4)));
  static constexpr int kVecs = kPanel / W;  // vectors of a panel's row

  static FASTPAR_INLINE Vec load(const float* p) {
    Vec x;
    std::memcpy(&x, p, sizeof(x));
    return x;
  }
  static FASTPAR_INLINE void store(float* p, const Vec& x) { std::memcpy(p, &x, sizeof(x)); }
};

// a * b + c of floats, rounded once, without FMA: the product is exact in double. The sum is
// rounded to odd (its last bit is set if it is not exact), after which rounding to float is as of
// the exact sum. Source: Boldo, Melquiond 2008, "Emulation of a FMA and correctly rounded sums".
inline float multiply_add_in_double(float a, float b, float c) {
  const double product = static_cast<double>(a) * b, sum = product + c;
  const double part = sum - product, error = (product - (sum - part)) + (c - part);
  uint64_t bits = bit_cast<uint64_t>(sum);
  const bool finite = (bits >> 52 & 0x7ff) != 0x7ff;
  if (finite && error != 0.0 && (bits & 1) == 0) bits += (error > 0.0) == (sum > 0.0) ? 1 : -1;
  return static_cast<float>(bit_cast<double>(bits));
}

// left * x + sum, rounded once, in vectors of W floats: with FMA from AVX2 (W = 8) on and on Arm.
template <int W, class Vec>
FASTPAR_INLINE Vec multiply_add(float left, const Vec& x, const Vec& sum) {
  Vec result;
  for (int i = 0; i < W; ++i) {
    result[i] = W > 4 || !FASTPAR_X86 ? __builtin_fmaf(left, x[i], sum[i])
                                      : multiply_add_in_double(left, x[i], sum[i]);
  }
  return result;
}

// c[Rows, Vecs * W] (+)= a[Rows, k] b[k, Vecs * W], summed in registers.
template <int W, int Rows, int Vecs>
FASTPAR_INLINE void multiply_tile(const float* a, int64_t a_row, int64_t a_k, const float* b,
                                  int64_t b_k, int64_t k, float* c, int64_t c_row, bool add) {
  using S = Simd<W>;
  using Vec = typename S::Vec;
  Vec sum[Rows][Vecs];
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < Vecs; ++v) sum[r][v] = Vec{};
  }
  for (int64_t i = 0; i < k; ++i) {
    Vec right[Vecs];
#pragma GCC unroll 8
    for (int v = 0; v < Vecs; ++v) right[v] = S::load(b + i * b_k + v * W);
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      const float left = a[r * a_row + i * a_k];
#pragma GCC unroll 8
      for (int v = 0; v < Vecs; ++v) sum[r][v] = multiply_add<W>(left, right[v], sum[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < Vecs; ++v) {
      float* const to = c + r * c_row + v * W;
      S::store(to, add ? S::load(to) + sum[r][v] : sum[r][v]);
    }
  }
}

// The same for kTile rows and 32 columns. Sums of kSum products are added to c: shorter chains
// round less than one long one. A tile of two vectors reads the least of a and b; one of four,
// Short, the least of c, which counts where k is small.
template <int W, bool Short = false>
FASTPAR_INLINE void multiply(const float* a, int64_t a_row, int64_t a_k, const float* b,
                             int64_t b_k, int64_t k, float* c, int64_t c_row, bool add) {
  constexpr int kVecs = Short && W < 16 ? 4 : 2, kRows = W == 16 ? 8 : 8 / kVecs;
  for (int64_t first = 0; first < k; first += kSum) {
    for (int64_t p = 0; p < kPanel; p += kVecs * W) {
      for (int64_t r = 0; r < kTile; r += kRows) {
        multiply_tile<W, kRows, kVecs>(a + r * a_row + first * a_k, a_row, a_k, b + first * b_k + p,
                                       b_k, std::min(kSum, k - first), c + r * c_row + p, c_row,
                                       add || first > 0);
      }
    }
  }
}

// One document: where it lies, its lengths, and where its causal limits lie.
struct Document {
  int64_t sample, start;  // index in the batch or of the document; its first row
  int64_t stats_start, stats_head;
  int64_t t, tk, d, group;
  bool causal;
  float scale;
  int64_t block, d_pad, k_pad, s_row;  // padded to tiles; s_row: length of a row of scores

  Document(const AttentionShape& shape, int64_t index)
      : sample(index),
        start(shape.cu_seqlens ? shape.cu_seqlens[index] : 0),
        stats_start(2 * (shape.cu_seqlens ? start : index * shape.heads * shape.t)),
        stats_head(2 * shape.t),
        t(shape.cu_seqlens ? shape.cu_seqlens[index + 1] - start : shape.t),
        tk(shape.cu_seqlens ? t : shape.tk),
        d(shape.d),
        group(shape.heads / shape.key_heads),
        causal(shape.causal),
        scale(shape.scale) {
    d_pad = round_up(d, kPanel);
    k_pad = round_up(tk, kPanel);
    s_row = k_pad + 16;  // not a power of two, or rows would share a cache set
    block = std::clamp<int64_t>((1 << 15) / s_row / kTile * kTile, 32, 64);
    block = std::min(block, round_up(t, kTile));
  }
  int64_t stats(int64_t h) const { return stats_start + h * stats_head; }
  int64_t first() const { return causal ? std::max<int64_t>(0, t - tk) : 0; }
  // Keys that query i sees.
  int64_t keys(int64_t i) const {
    return causal ? std::min(tk, std::max<int64_t>(0, i + tk - t + 1)) : tk;
  }
};

// All documents of a call, and what buffers must hold to serve any of them.
struct Documents {
  std::vector<Document> all;
  int64_t block = 0, scores = 0, keys = 0, work = 0;
  int64_t d, d_pad;

  explicit Documents(const AttentionShape& shape) : d(shape.d), d_pad(round_up(shape.d, kPanel)) {
    all.reserve(shape.batch);
    for (int64_t i = 0; i < shape.batch; ++i) {
      const Document& doc = all.emplace_back(shape, i);
      block = std::max(block, doc.block);
      scores = std::max(scores, doc.block * doc.s_row);
      keys = std::max(keys, doc.k_pad);
      work += shape.heads * doc.t * doc.tk * doc.d;
    }
  }
};

// Zeroed memory, 64-byte aligned.
class Buffer {
 public:
  explicit Buffer(int64_t n) : memory_(n + 16, 0.0f) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
    data_ = memory_.data() + (64 - address % 64) % 64 / sizeof(float);
  }
  float* get() { return data_; }

 private:
  std::vector<float> memory_;
  float* data_;
};

// rows[n, d_pad] of x; columns beyond d stay 0.
template <class T>
FASTPAR_INLINE void copy_rows(const T* x, int64_t stride, int64_t n, int64_t d, int64_t d_pad,
                              float* rows) {
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < d; ++j) rows[i * d_pad + j] = to_float(x[i * stride + j]);
  }
}

// panels[n / 32][d, 32]: x transposed, so that 32 keys lie side by side; keys beyond n stay 0.
template <class T>
FASTPAR_INLINE void transpose_rows(const T* x, int64_t stride, int64_t n, int64_t d,
                                   float* panels) {
  for (int64_t i = 0; i < n; i += kPanel) {
    float* panel = panels + i * d;
    const int64_t keys = std::min(kPanel, n - i);
    for (int64_t j = 0; j < d; ++j) {
      for (int64_t l = 0; l < keys; ++l) panel[j * kPanel + l] = to_float(x[(i + l) * stride + j]);
    }
  }
}

// to[n, d] = rows * factor[i] (factor may be null)
template <class T>
FASTPAR_INLINE void store_rows(const float* rows, const float* factor, int64_t n, int64_t d,
                               int64_t d_pad, T* to, int64_t stride) {
  for (int64_t i = 0; i < n; ++i) {
    const float f = factor ? factor[i] : 1.0f;
    for (int64_t j = 0; j < d; ++j) to[i * stride + j] = from_float<T>(rows[i * d_pad + j] * f);
  }
}

struct Add {
  template <class Vec>
  static FASTPAR_INLINE Vec of(const Vec& a, const Vec& b) {
    return a + b;
  }
};
struct Max {
  template <class Vec>
  static FASTPAR_INLINE Vec of(const Vec& a, const Vec& b) {
    return a < b ? b : a;
  }
};

// One number from 32 lanes: lane k with k + 16, then k + 8, ... whatever the width.
template <class Op, int W>
FASTPAR_INLINE float fold(const typename Simd<W>::Vec* x) {
  using S4 = Simd<4>;
  float lanes[kPanel];
  for (int v = 0; v < Simd<W>::kVecs; ++v) Simd<W>::store(lanes + v * W, x[v]);
  S4::Vec part[8];
  for (int v = 0; v < 8; ++v) part[v] = S4::load(lanes + 4 * v);
  for (int v = 0; v < 4; ++v) part[v] = Op::of(part[v], part[v + 4]);
  const S4::Vec last = Op::of(Op::of(part[0], part[2]), Op::of(part[1], part[3]));
  return Op::of(Op::of(last[0], last[2]), Op::of(last[1], last[3]));
}

template <int W>
FASTPAR_INLINE float row_max(const float* x, int64_t wide) {
  using S = Simd<W>;
  typename S::Vec max[S::kVecs];
#pragma GCC unroll 8
  for (int v = 0; v < S::kVecs; ++v) max[v] = S::load(x + v * W);
  for (int64_t j = kPanel; j < wide; j += kPanel) {
#pragma GCC unroll 8
    for (int v = 0; v < S::kVecs; ++v) max[v] = Max::of(max[v], S::load(x + j + v * W));
  }
  return fold<Max, W>(max);
}

template <int W>
FASTPAR_INLINE float row_sum(const float* x, int64_t wide) {
  using S = Simd<W>;
  typename S::Vec sums[S::kVecs] = {};
  for (int64_t j = 0; j < wide; j += kPanel) {
#pragma GCC unroll 8
    for (int v = 0; v < S::kVecs; ++v) sums[v] += S::load(x + j + v * W);
  }
  return fold<Add, W>(sums);
}

template <int W>
FASTPAR_INLINE float row_dot(const float* x, const float* y, int64_t wide) {
  using S = Simd<W>;
  typename S::Vec sums[S::kVecs] = {};
  for (int64_t j = 0; j < wide; j += kPanel) {
#pragma GCC unroll 8
    for (int v = 0; v < S::kVecs; ++v) {
      sums[v] += S::load(x + j + v * W) * S::load(y + j + v * W);
    }
  }
  return fold<Add, W>(sums);
}

FASTPAR_INLINE void drop_row(const uint8_t* drawn, uint8_t threshold, float scale, int64_t n,
                             const float* x, float* y) {
  for (int64_t j = 0; j < n; ++j) {
    const uint32_t kept = -static_cast<uint32_t>(drawn[j] >= threshold);
    y[j] = bit_cast<float>(bit_cast<uint32_t>(x[j] * scale) & kept);
  }
}

// scores[block, keys] = rows[block, d] panels, the columns that a tile's last row sees.
template <int W>
FASTPAR_INLINE void multiply_panels(const Document& doc, int64_t q0, int64_t rows,
                                    const float* left, const float* panels, float* scores) {
  const int64_t all = doc.keys(std::min(doc.t, q0 + rows) - 1);
  for (int64_t p = 0; p < all; p += kPanel) {
    for (int64_t i = 0; i < rows; i += kTile) {
      if (p >= doc.keys(q0 + i + kTile - 1)) continue;
      multiply<W>(left + i * doc.d_pad, doc.d_pad, 1, panels + p * doc.d, kPanel, doc.d,
                  scores + i * doc.s_row + p, doc.s_row, false);
    }
  }
}

// out[block, d] = weights[block, keys] right[keys, d]
template <int W>
FASTPAR_INLINE void multiply_keys(const Document& doc, int64_t q0, int64_t rows,
                                  const float* weights, const float* right, float* out) {
  for (int64_t p = 0; p < doc.d_pad; p += kPanel) {
    for (int64_t i = 0; i < rows; i += kTile) {
      multiply<W>(weights + i * doc.s_row, doc.s_row, 1, right + p, doc.d_pad,
                  doc.keys(std::min(doc.t, q0 + i + kTile) - 1), out + i * doc.d_pad + p, doc.d_pad,
                  false);
    }
  }
}

// out[keys, d] += weights[block, keys]^T right[block, d]
template <int W>
FASTPAR_INLINE void add_queries(const Document& doc, int64_t q0, int64_t rows, const float* weights,
                                const float* right, float* out) {
  const int64_t all = doc.keys(q0 + rows - 1);
  for (int64_t p = 0; p < doc.d_pad; p += kPanel) {
    for (int64_t j = 0; j < all; j += kTile) {
      const int64_t skip = doc.causal ? std::max<int64_t>(0, j - (doc.tk - doc.t) - q0) : 0;
      multiply<W, true>(weights + skip * doc.s_row + j, 1, doc.s_row, right + skip * doc.d_pad + p,
                        doc.d_pad, rows - skip, out + j * doc.d_pad + p, doc.d_pad, true);
    }
  }
}

template <class T>
struct Head {  // one head of a document in a strided [B, T, H, D] or [total, H, D] tensor
  T* data;
  int64_t stride;
  Head(const Strided& x, const Document& doc, int64_t h)
      : data(static_cast<T*>(x.data) + doc.sample * x.batch + doc.start * x.row + h * x.head),
        stride(x.row) {}
  T* at(int64_t i) const { return data + i * stride; }
};

struct ForwardMemory {
  Buffer key_panels, values, q, scores, o;
  ForwardMemory(const Documents& of, bool /*mask*/)
      : key_panels(of.keys * of.d),
        values(of.keys * of.d_pad),
        q(of.block * of.d_pad),
        scores(of.scores),
        o(of.block * of.d_pad) {}
};

// All query heads of one key head.
template <class T, int W>
struct Forward {
  static FASTPAR_INLINE void run(const Document* document, int64_t hk, const Strided* q,
                                 const Strided* k, const Strided* v, const Strided* o, float* stats,
                                 ForwardMemory* m, RowMask* mask) {
    const Document& doc = *document;
    const Head<const T> kh(*k, doc, hk), vh(*v, doc, hk);
    transpose_rows(kh.data, kh.stride, doc.tk, doc.d, m->key_panels.get());
    copy_rows(vh.data, vh.stride, doc.tk, doc.d, doc.d_pad, m->values.get());
    float* const scores = m->scores.get();
    float factor[64];
    for (int64_t h = hk * doc.group; h < (hk + 1) * doc.group; ++h) {
      const Head<const T> qh(*q, doc, h);
      const Head<T> oh(*o, doc, h);
      float* const row_stats = stats + doc.stats(h);
      for (int64_t i = 0; i < doc.first(); ++i) {
        for (int64_t j = 0; j < doc.d; ++j) oh.at(i)[j] = from_float<T>(0.0f);
        row_stats[2 * i] = row_stats[2 * i + 1] = 0.0f;
      }
      for (int64_t q0 = doc.first(); q0 < doc.t; q0 += doc.block) {
        const int64_t n = std::min(doc.block, doc.t - q0), rows = round_up(n, kTile);
        copy_rows(qh.at(q0), qh.stride, n, doc.d, doc.d_pad, m->q.get());
        multiply_panels<W>(doc, q0, rows, m->q.get(), m->key_panels.get(), scores);
        for (int64_t i = 0; i < n; ++i) {
          float* const row = scores + i * doc.s_row;
          const int64_t seen = doc.keys(q0 + i);
          const int64_t wide = round_up(doc.keys(q0 + round_up(i + 1, kTile) - 1), kPanel);
          for (int64_t j = 0; j < wide; ++j) row[j] = j < seen ? row[j] * doc.scale : -INFINITY;
          const float max = row_max<W>(row, wide);
          for (int64_t j = 0; j < wide; ++j) row[j] = exp_float(row[j] - max);
          factor[i] = 1.0f / row_sum<W>(row, wide);
          row_stats[2 * (q0 + i)] = max;
          row_stats[2 * (q0 + i) + 1] = factor[i];
          if (mask->active()) {
            drop_row(mask->bytes(doc.sample, h, q0 + i, seen), mask->threshold(), mask->scale(),
                     seen, row, row);
          }
        }
        multiply_keys<W>(doc, q0, rows, scores, m->values.get(), m->o.get());
        store_rows(m->o.get(), factor, n, doc.d, doc.d_pad, oh.at(q0), oh.stride);
      }
    }
  }
};

struct BackwardMemory {
  Buffer keys, key_panels, value_panels, q, d_o, p, dropped, dp, dq, dk, dv;
  BackwardMemory(const Documents& of, bool mask)
      : keys(of.keys * of.d_pad),
        key_panels(of.keys * of.d),
        value_panels(of.keys * of.d),
        q(of.block * of.d_pad),
        d_o(of.block * of.d_pad),
        p(of.scores),
        dropped(mask ? of.scores : 0),
        dp(of.scores),
        dq(of.block * of.d_pad),
        dk(of.keys * of.d_pad),
        dv(of.keys * of.d_pad) {}
};

template <class T, int W>
struct Backward {
  static FASTPAR_INLINE void run(const Document* document, int64_t hk, const Strided* d_o,
                                 const Strided* q, const Strided* k, const Strided* v,
                                 const float* stats, const Strided* dq, const Strided* dk,
                                 const Strided* dv, BackwardMemory* m, RowMask* mask) {
    const Document& doc = *document;
    const Head<const T> kh(*k, doc, hk), vh(*v, doc, hk);
    copy_rows(kh.data, kh.stride, doc.tk, doc.d, doc.d_pad, m->keys.get());
    transpose_rows(kh.data, kh.stride, doc.tk, doc.d, m->key_panels.get());
    transpose_rows(vh.data, vh.stride, doc.tk, doc.d, m->value_panels.get());
    std::fill(m->dk.get(), m->dk.get() + doc.k_pad * doc.d_pad, 0.0f);
    std::fill(m->dv.get(), m->dv.get() + doc.k_pad * doc.d_pad, 0.0f);
    float* const dropped = mask->active() ? m->dropped.get() : m->p.get();
    for (int64_t h = hk * doc.group; h < (hk + 1) * doc.group; ++h) {
      const Head<const T> qh(*q, doc, h), doh(*d_o, doc, h);
      const Head<T> dqh(*dq, doc, h);
      const float* const row_stats = stats + doc.stats(h);
      for (int64_t i = 0; i < doc.first(); ++i) {
        for (int64_t j = 0; j < doc.d; ++j) dqh.at(i)[j] = from_float<T>(0.0f);
      }
      for (int64_t q0 = doc.first(); q0 < doc.t; q0 += doc.block) {
        const int64_t n = std::min(doc.block, doc.t - q0), rows = round_up(n, kTile);
        copy_rows(qh.at(q0), qh.stride, n, doc.d, doc.d_pad, m->q.get());
        copy_rows(doh.at(q0), doh.stride, n, doc.d, doc.d_pad, m->d_o.get());
        multiply_panels<W>(doc, q0, rows, m->q.get(), m->key_panels.get(), m->p.get());
        multiply_panels<W>(doc, q0, rows, m->d_o.get(), m->value_panels.get(), m->dp.get());
        for (int64_t i = 0; i < n; ++i) {
          float* const p = m->p.get() + i * doc.s_row;
          float* const dp = m->dp.get() + i * doc.s_row;
          const int64_t seen = doc.keys(q0 + i);
          const int64_t wide = round_up(doc.keys(q0 + round_up(i + 1, kTile) - 1), kPanel);
          const float max = row_stats[2 * (q0 + i)], factor = row_stats[2 * (q0 + i) + 1];
          for (int64_t j = 0; j < wide; ++j) {
            const float e = exp_float(p[j] * doc.scale - max) * factor;
            p[j] = j < seen ? e : 0.0f;
            dp[j] = j < seen ? dp[j] : 0.0f;
          }
          if (mask->active()) {
            const uint8_t* drawn = mask->bytes(doc.sample, h, q0 + i, seen);
            float* const kept = dropped + i * doc.s_row;
            drop_row(drawn, mask->threshold(), mask->scale(), seen, p, kept);
            for (int64_t j = seen; j < wide; ++j) kept[j] = 0.0f;
            drop_row(drawn, mask->threshold(), mask->scale(), seen, dp, dp);
          }
          const float delta = row_dot<W>(dp, p, wide);
          for (int64_t j = 0; j < wide; ++j) dp[j] = p[j] * (dp[j] - delta) * doc.scale;
        }
        multiply_keys<W>(doc, q0, rows, m->dp.get(), m->keys.get(), m->dq.get());
        store_rows(m->dq.get(), nullptr, n, doc.d, doc.d_pad, dqh.at(q0), dqh.stride);
        add_queries<W>(doc, q0, n, m->dp.get(), m->q.get(), m->dk.get());
        add_queries<W>(doc, q0, n, dropped, m->d_o.get(), m->dv.get());
      }
    }
    const Head<T> dkh(*dk, doc, hk), dvh(*dv, doc, hk);
    store_rows(m->dk.get(), nullptr, doc.tk, doc.d, doc.d_pad, dkh.data, dkh.stride);
    store_rows(m->dv.get(), nullptr, doc.tk, doc.d, doc.d_pad, dvh.data, dvh.stride);
  }
};

constexpr int64_t kGrain = 1 << 15;  // multiply-adds worth a thread

// Kernel on every key head of every document, each by one thread.
template <template <class, int> class Kernel, class Memory, class... Tensors>
void run_heads(const AttentionShape& shape, Dtype dtype, const MaskBlock& at, int64_t products,
               int threads, const Tensors&... tensors) {
  const Isa target = isa();
  const Documents documents(shape);
  const int64_t items = shape.batch * shape.key_heads;
  const int64_t wanted = useful_threads(products * documents.work, kGrain, threads);
  threads = static_cast<int>(std::min(items, wanted));
  with_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
      Memory memory(documents, at.threshold > 0);
      RowMask mask(at, target);
#pragma omp for schedule(dynamic)
      for (int64_t i = 0; i < items; ++i) {
        const Document* const doc = &documents.all[i / shape.key_heads];
        const int64_t h = i % shape.key_heads;
        if (target == Isa::avx512) {
          dispatch<Kernel<T, 16>>(target, doc, h, tensors..., &memory, &mask);
        } else if (target == Isa::avx2) {
          dispatch<Kernel<T, 8>>(target, doc, h, tensors..., &memory, &mask);
        } else {
          dispatch<Kernel<T, 4>>(target, doc, h, tensors..., &memory, &mask);
        }
      }
    }
  });
}

}  // namespace

void attention_fwd(const Strided& q, const Strided& k, const Strided& v, const Strided& o,
                   float* stats, Dtype dtype, const AttentionShape& shape, const MaskBlock& at,
                   int threads) {
  run_heads<Forward, ForwardMemory>(shape, dtype, at, 1, threads, &q, &k, &v, &o, stats);
}

void attention_bwd(const Strided& d_o, const Strided& q, const Strided& k, const Strided& v,
                   const float* stats, const Strided& dq, const Strided& dk, const Strided& dv,
                   Dtype dtype, const AttentionShape& shape, const MaskBlock& at, int threads) {
  run_heads<Backward, BackwardMemory>(shape, dtype, at, 4, threads, &d_o, &q, &k, &v, stats, &dq,
                                      &dk, &dv);
}

}  // namespace fastpar
