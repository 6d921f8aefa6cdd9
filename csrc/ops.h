// Every compiled op with its contract: the table of contents of csrc/.
//
// Shape legend: N rows, C columns, V vocabulary. Pointers are to contiguous memory unless a stride
// is named; `threads` is the number of OpenMP threads that the caller grants. Results do not depend
// on it, nor on the instruction set (simd.h). No op holds state between calls.
#pragma once

#include <cstdint>

#include "numeric.h"

// csrc/torch's library calls them in this one.
#pragma GCC visibility push(default)
namespace fastpar {

// Of u = x[N, C] + bias[C], bias null: 0. gelu: the tanh form; relu2: max(u, 0)^2; swiglu:
// silu(gate) * up, gate and up being the halves of C.
enum class Activation : int { gelu, relu2, swiglu };

// y[N, C], with swiglu [N, C / 2], of x. x and y of `dtype`.
void activation_fwd(const void* x, const float* bias, void* y, Activation kind, Dtype dtype,
                    int64_t n, int64_t c, int threads);

// dx[N, C] = dy * y'(u); dbias[C] = sum of dx's rows before rounding to `dtype`. bias and dbias may
// be null. Rows are summed within fixed blocks, blocks in order.
void activation_bwd(const void* dy, const void* x, const float* bias, void* dx, float* dbias,
                    Activation kind, Dtype dtype, int64_t n, int64_t c, int threads);

// Targets that are not ignore_index, or -(i + 1) for the first i whose target is outside [0, v).
int64_t count_targets(const int64_t* targets, int64_t n, int64_t v, int64_t ignore_index);

// Rows of logits [N, width], `stride` elements apart, of which the columns from v on are padding.
struct CrossEntropyRows {
  const void* logits;
  int64_t stride, n, v, width;
  const int64_t* targets;  // [N]
  int64_t ignore_index;
  int64_t grad_stride;  // of the gradient's rows
  const float* scale;   // scale[i * scale_stride] multiplies the gradient of row i
  int64_t scale_stride;
  double label_smoothing, z_loss;
  double softcap = 0.0;  // the loss is that of softcap * tanh(logits / softcap); 0: none
};

// loss[N] = lse - (1 - label_smoothing) * logits[i, targets[i]] - label_smoothing * mean(logits[i])
// + z_loss * lse^2, lse = logsumexp(logits[i, :v]); 0 where the target is ignore_index. Its
// gradient times scale goes to grad [N, width] unless null: 0 in padding and ignored rows. grad may
// be logits. Targets have been through count_targets.
void cross_entropy_rows(const CrossEntropyRows& at, void* grad, float* loss, Dtype dtype,
                        int threads);

// One shard's part, its columns being the classes from `first` on: max[N], sum[N] of exp(x - max),
// target_logit[N], 0 where another shard holds the target; 0, 1, 0 in ignored rows.
void cross_entropy_shard(const CrossEntropyRows& at, int64_t first, float* max, float* sum,
                         float* target_logit, Dtype dtype, int threads);

// grad[N, width] of the shard, given lse[N] of the whole rows; label_smoothing is not used. grad
// may be logits.
void cross_entropy_shard_grad(const CrossEntropyRows& at, int64_t first, const float* lse,
                              void* grad, Dtype dtype, int threads);

// Part of a dropout mask: heads [first_head, +heads) and rows [first_row, +rows) of `samples`
// samples from first_sample on, `cols` columns. An element is dropped with probability threshold /
// 256. The bits are those of kernels/philox.py [Note: the mask].
struct MaskBlock {
  int64_t seed, first_sample;
  int site, threshold;
  int64_t samples, heads, rows, cols, first_head, first_row;
  int64_t low, high;  // added to the numbers of rows in the first and second half of `rows`
};

// y = x * 256 / (256 - threshold) where kept, else 0. x and y are [samples, heads, rows, cols] of
// `dtype`; y may be x.
void dropout(const void* x, void* y, Dtype dtype, const MaskBlock& at, int threads);

// keep[samples, heads, rows, cols] = 1 where kept, else 0.
void keep_mask(uint8_t* keep, const MaskBlock& at, int threads);

// sum[N, C] = residual + dropout(x + x_bias), y = (sum - mean) * rstd * weight + bias; `at` holds
// the N rows from first_row on, threshold 0 is no dropout. With residual null x itself is
// normalized; x_bias and sum are not used then. No other pointer is null. mean and rstd are [N].
// rms: mean is 0 and not written, bias is not used.
void layer_norm_fwd(const void* x, const void* residual, const float* x_bias, const float* weight,
                    const float* bias, void* sum, void* y, float* mean, float* rstd, Dtype dtype,
                    int64_t n, int64_t c, float eps, bool rms, const MaskBlock& at, int threads);

// dsum[N, C] = gradient of x (the normalized rows) + dsum_out, which may be null; dx = dsum under
// the mask unless null. dweight, dbias and dx_bias (each may be null) are sums over the rows,
// within fixed blocks, blocks in order. rms: mean and dbias are not touched.
void layer_norm_bwd(const void* dy, const void* dsum_out, const void* x, const float* weight,
                    const float* mean, const float* rstd, void* dsum, void* dx, float* dweight,
                    float* dbias, float* dx_bias, Dtype dtype, int64_t n, int64_t c, bool rms,
                    const MaskBlock& at, int threads);

// Heads of n packed rows [queries + 2, groups, d]: a group has `queries` heads of queries, one of
// keys and one of values.
struct RopeShape {
  int64_t n, groups, queries, d;
  const float* turns;  // [turn_rows, d]: cosines, then sines; row i has i % turn_rows; null: none
  int64_t turn_rows;
  const float *q_weight, *k_weight;  // [d] of the norms; null: ones
  bool norm;                         // x / sqrt(mean(x * x) + eps) * weight of queries and keys
  float eps;
};

// q[n, groups * queries, d] (head r of group g is g * queries + r), k and v[n, groups, d] of
// qkv[n, queries + 2, groups, d]: queries and keys normalized, then their halves (a, b) turned into
// (a cos - b sin, b cos + a sin). All of dtype; floats inside.
void rope_fwd(const void* qkv, void* q, void* k, void* v, Dtype dtype, const RopeShape& at,
              int threads);

// dqkv, and the gradients of both weights (may be null), which sum within fixed blocks of rows,
// blocks in order. qkv is only read for the norm.
void rope_bwd(const void* dq, const void* dk, const void* dv, const void* qkv, void* dqkv,
              float* dq_weight, float* dk_weight, Dtype dtype, const RopeShape& at, int threads);

// A matrix of any strides, in elements.
struct Matrix {
  const void* data;
  int64_t row_stride, column_stride;
  const void* at(int64_t elements, int64_t size) const {
    return static_cast<const char*>(data) + elements * size;
  }
};

// c[m, n] (rows ldc apart) = a[m, k] @ b[k, n] + bias[n], or with accumulate c += a @ b. bias may
// be null. a, b and bias are of dtype: fp32, which needs AVX-512, or bf16, which needs AMX;
// c is of dtype or fp32. m, n, k >= 1.
void gemm(const Matrix& a, const Matrix& b, void* c, int64_t ldc, int64_t m, int64_t n, int64_t k,
          bool accumulate, const void* bias, Dtype dtype, Dtype out, int threads);

// A strided [B, T, H, D] tensor, or with batch stride 0 [total, H, D]: strides in elements, the
// last one is 1.
struct Strided {
  void* data;
  int64_t batch, row, head;
};

// q [batch, t, heads, d], k and v [batch, tk, key_heads, d], heads a multiple of key_heads. With
// cu_seqlens [batch + 1] documents of these lengths lie one after another: q [t, heads, d], k and v
// [t, key_heads, d], and document i is the rows from cu_seqlens[i] to cu_seqlens[i + 1]; the caller
// guarantees that these increase from 0 to t.
struct AttentionShape {
  int64_t batch, t, tk, heads, key_heads, d;
  bool causal;  // query i sees keys j <= i + tk - t
  float scale;
  const int32_t* cu_seqlens;  // null for a batch
};

// o = dropout(softmax(scale * q k^T)) v; stats[batch, heads, t, 2] (documents: [heads, t, 2]): the
// largest score of a row and the inverse of its sum of exponentials. `at` holds the mask [batch,
// heads, t, tk], threshold 0 is no dropout. Queries without a key give 0.
void attention_fwd(const Strided& q, const Strided& k, const Strided& v, const Strided& o,
                   float* stats, Dtype dtype, const AttentionShape& shape, const MaskBlock& at,
                   int threads);

// Gradients of attention_fwd; dq, dk and dv may be parts of one tensor.
void attention_bwd(const Strided& d_o, const Strided& q, const Strided& k, const Strided& v,
                   const float* stats, const Strided& dq, const Strided& dk, const Strided& dv,
                   Dtype dtype, const AttentionShape& shape, const MaskBlock& at, int threads);

// How an AdamW step stores the moments: floats, bfloat16 with stochastic rounding, or codes of 8
// bits with a scale for each 256 elements (adamw_math.h).
enum class Moment : int { float32 = 0, bfloat16 = 1, uint8 = 2 };

// Where the master of a parameter is: none: a float32 parameter is its own; full: float32, of which
// the 16-bit parameter is the rounded image, only written; remainder: bfloat16 parameter and int16
// remainder together; stochastic: none, a bfloat16 parameter is rounded stochastically.
enum class Master : int { none = 0, full = 1, remainder = 2, stochastic = 3 };

// The scalars of a step. Where <name>_at is not null, the value is read from that address, on the
// parameters' device.
struct AdamwHyper {
  double lr, beta1, beta2, eps, weight_decay, step;  // step: 1 in the first one
  const float *lr_at, *beta1_at, *beta2_at, *eps_at, *weight_decay_at, *step_at;
};

// Contiguous elements with the same scalars: a tensor or a part of a flat buffer.
struct AdamwRange {
  void *param, *grad, *exp_avg, *exp_avg_sq;
  void* max_exp_avg_sq;  // null without amsgrad, for all ranges of a call or none
  void* master;          // float32 or int16, null for Master::none and stochastic
  float *exp_avg_scale, *exp_avg_sq_scale;  // one for each 256 elements; Moment::uint8 only
  int64_t size;
  int64_t first_index;  // of element 0, for random bits; a multiple of 256 for Moment::uint8
  int hyper;            // index of its AdamwHyper
};

// What all ranges of a call share.
struct AdamwModes {
  Dtype param, grad;
  Moment moment;
  Master master;
  bool maximize, zero_grad;
  const float* grad_scale;  // multiplied into the gradients; null is 1
  const float* found_inf;   // nonzero: nothing changes but the gradients zeroed; null is 0
  uint64_t seed;            // of the random bits
};

// Updates every range in place; work is cut into chunks across all of them. Same bits for any cut,
// with Moment::uint8 for any cut at multiples of 256. max_exp_avg_sq and Moment::uint8 exclude each
// other.
void adamw_step(const AdamwRange* ranges, int64_t range_count, const AdamwHyper* hypers,
                int64_t hyper_count, const AdamwModes& modes, int threads);

// A factor: *at (memory of the tensors' device) where at is not null, else value.
struct Factor {
  float value;
  const float* at;
};

// out[n] = ((shards[0][n] + shards[1][n]) + (shards[2][n] + shards[3][n]) + ...) * scale, in float
// and in the order of sum_tree.h, rounded once. out may be one of the shards. world >= 1.
void sum_shards(const void* const* shards, int64_t world, void* out, int64_t n, Dtype shard_dtype,
                Dtype out_dtype, float scale, int threads);

// A flat range of a global norm. What is not `counted` (because another rank counts it) is only
// searched for values that are not finite.
struct NormRange {
  const void* data;
  int64_t size;
  Dtype dtype;
  bool counted;
};

// words[kNormWords] += the exact sum of squares of all ranges and the number of infinities and nans
// (norm_math.h).
void norm_bins(const NormRange* ranges, int64_t count, int64_t* words, int threads);

// How norm_result() (norm_math.h) reads a sum of squares: norm = sqrt(sum) / loss_scale, and the
// factor that clips gradients, min(1, max_norm / (norm + eps)) / loss_scale. max_norm < 0: none.
struct NormClip {
  double max_norm, eps;
  Factor loss_scale;
};

// Codes of one byte.
enum class Code : int { int8, e4m3, e5m2 };

constexpr int64_t kMaxQuantizeBlock = 4096;

// Blocks of `block` elements, a power of two from 16 to kMaxQuantizeBlock: a code of one byte for
// each element and a scale for each block (quantize_math.h). The last block may be shorter.
struct QuantizeBlocks {
  void* codes;
  float* scales;
  int64_t block;
};

// to = blocks of x[n], whole numbers of 8 bits. seed null: to nearest even; else stochastic with
// the random bits of (*seed, first_index + i).
void quantize_blockwise(const void* x, Dtype x_dtype, const QuantizeBlocks& to, int64_t n,
                        const uint64_t* seed, uint64_t first_index, int threads);

// out[n] = code * scale.
void dequantize_blockwise(const QuantizeBlocks& from, Code code, void* out, Dtype out_dtype,
                          int64_t n, int threads);

// Asks the allocator to keep freed memory mapped, so that large buffers cause page faults once and
// not in every step. False where the C library has no such setting.
bool keep_freed_memory();

}  // namespace fastpar
#pragma GCC visibility pop
