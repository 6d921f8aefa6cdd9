// The one PYBIND11_MODULE: fastpar.kernels._C. The ops of a model are bound here, those of the
// runtime in bindings_<op>.cpp.
#include "bindings.h"

#include <algorithm>
#include <array>

#include "ops_cuda.h"
#include "simd.h"

namespace fastpar {
namespace {

MaskBlock mask_block(int64_t seed, int64_t first_sample, int site, int threshold, int64_t samples,
                     int64_t heads, int64_t rows, int64_t cols, int64_t first_head,
                     int64_t first_row, int64_t low = 0, int64_t high = 0) {
  FASTPAR_CHECK(threshold >= 0 && threshold <= 255,
                "dropout: expected 0 <= threshold <= 255, got threshold=", threshold,
                "; use quantize_p");
  return {seed, first_sample, site,       threshold, samples, heads,
          rows, cols,         first_head, first_row, low,     high};
}

// (first_row, low, high) of a MaskBlock
using RowPlace = std::array<int64_t, 3>;

// c numbers as floats: their own memory or the buffer; zeros for None.
const float* row_of(const Memory& x, int64_t c, const char* name, std::vector<float>& buffer) {
  if (x && x.type == Type::f32) return x.floats(c, name);
  buffer.assign(static_cast<size_t>(c), 0.0f);
  if (x) {
    with_dtype(x.dtype(name), [&](auto tag) {
      const auto* from = static_cast<const decltype(tag)*>(x.of(x.dtype(name), c, name));
      std::transform(from, from + c, buffer.begin(), [](auto v) { return to_float(v); });
    });
  }
  return buffer.data();
}

// Where c sums are made that x holds in any dtype; null for None.
float* sums_of(const Memory& x, int64_t c, const char* name, std::vector<float>& buffer) {
  if (!x || x.type == Type::f32) return x.floats_or_null(c, name);
  x.of(x.dtype(name), c, name);
  buffer.resize(static_cast<size_t>(c));
  return buffer.data();
}

void store_sums(const Memory& x, const std::vector<float>& buffer) {
  if (buffer.empty()) return;
  with_dtype(x.dtype("sums"), [&](auto tag) {
    using T = decltype(tag);
    std::transform(buffer.begin(), buffer.end(), at<T>(x.address),
                   [](float v) { return from_float<T>(v); });
  });
}

// [batch, rows, heads, d], or documents without a batch: [rows, heads, d].
Strided strided(const View& x, Dtype dtype, int64_t batch, int64_t rows, int64_t heads, int64_t d,
                const char* name) {
  const Type type = static_cast<Type>(dtype);
  if (x.dims == 3) return {x.as(type, {rows, heads, d}, name), 0, x.stride[0], x.stride[1]};
  return {x.as(type, {batch, rows, heads, d}, name), x.stride[0], x.stride[1], x.stride[2]};
}

// q, k, v and their shape; cu_seqlens [batch + 1] or None.
struct AttentionInputs {
  AttentionShape shape;
  Dtype dtype;
  Strided q, k, v;

  AttentionInputs(const View& q_at, const View& k_at, const View& v_at, const Memory& cu_seqlens,
                  bool causal, float scale)
      : dtype(q_at.dtype("q")) {
    const int last = q_at.dims - 1;
    FASTPAR_CHECK((last == 2 || last == 3) && k_at.dims == q_at.dims,
                  "attention: expected q and k of 3 or 4 dimensions, got ", q_at.dims, " and ",
                  k_at.dims, "; use kernels/attention.py");
    const int64_t batch = cu_seqlens ? cu_seqlens.numel - 1 : last == 3 ? q_at.size[0] : 1;
    shape = {batch,
             q_at.size[last - 2],
             k_at.size[last - 2],
             q_at.size[last - 1],
             k_at.size[last - 1],
             q_at.size[last],
             causal,
             scale,
             nullptr};
    if (cu_seqlens) {
      shape.cu_seqlens =
          static_cast<const int32_t*>(cu_seqlens.of(Type::i32, batch + 1, "cu_seqlens"));
    }
    q = of_queries(q_at, "q");
    k = of_keys(k_at, "k");
    v = of_keys(v_at, "v");
  }
  Strided of_queries(const View& x, const char* name) const {
    return strided(x, dtype, shape.batch, shape.t, shape.heads, shape.d, name);
  }
  Strided of_keys(const View& x, const char* name) const {
    return strided(x, dtype, shape.batch, shape.tk, shape.key_heads, shape.d, name);
  }
  float* stats(const Memory& x) const {
    return x.floats((shape.cu_seqlens ? 1 : shape.batch) * shape.heads * shape.t * 2, "stats");
  }
};

// site_head: site << 16 | head of the model that the first head is; first_row: row of the mask that
// the first query has.
MaskBlock attention_mask(int64_t seed, int64_t first_sample, int site_head, int threshold,
                         int64_t first_row, const AttentionShape& s) {
  return mask_block(seed, first_sample, site_head >> 16, threshold, s.batch, s.heads, s.t, s.tk,
                    site_head & 0xffff, first_row);
}

// Rows of logits [N, width]; grad and scale, [] or [N], may be None.
CrossEntropyRows cross_entropy_rows(const View& logits, const Memory& targets, const View& grad,
                                    const View& scale, int64_t v, int64_t ignore_index,
                                    double label_smoothing, double z_loss, double softcap) {
  CrossEntropyRows rows;
  rows.n = logits.size[0];
  rows.width = logits.size[1];
  const Type type = static_cast<Type>(logits.dtype("logits"));
  rows.logits = logits.as(type, {rows.n, rows.width}, "logits");
  if (grad) grad.as(type, {rows.n, rows.width}, "grad");
  rows.targets = static_cast<const int64_t*>(targets.of(Type::i64, rows.n, "targets"));
  FASTPAR_CHECK(v <= rows.width, "cross_entropy: expected v <= ", rows.width, ", got v=", v,
                "; use kernels/loss/cross_entropy.py");
  rows.v = v;
  rows.stride = logits.stride[0];
  rows.grad_stride = grad.stride[0];
  FASTPAR_CHECK(!scale || (scale.type == Type::f32 && scale.numel == (scale.dims ? rows.n : 1)),
                "cross_entropy: expected scale of float32, one or ", rows.n, ", got ", scale.numel,
                " of ", type_name(scale.type), "; use kernels/loss/cross_entropy.py");
  rows.scale = at<const float>(scale.address);
  rows.scale_stride = scale.stride[0];
  rows.ignore_index = ignore_index;
  rows.label_smoothing = label_smoothing;
  rows.z_loss = z_loss;
  rows.softcap = softcap;
  return rows;
}

// exp_float over an array, for tests of its accuracy.
struct ExpArray {
  static FASTPAR_INLINE void run(const float* x, float* y, int64_t n) {
    for (int64_t i = 0; i < n; ++i) y[i] = exp_float(x[i]);
  }
};

// Conversion to and from a storage type over an array, for tests of its rounding.
template <class T>
struct RoundArray {
  static FASTPAR_INLINE void run(const float* x, float* y, int64_t n) {
    for (int64_t i = 0; i < n; ++i) y[i] = to_float(from_float<T>(x[i]));
  }
};

void bind_ops(py::module_& m) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  m.def("isa", &isa_name);
  m.def("isa_supported", &isa_supported);
  m.def("has_fma", &has_fma);
  m.def("cpu_is_intel", &cpu_is_intel);
  m.def("set_isa", &set_isa);
  m.def("keep_freed_memory", &keep_freed_memory);
  m.def(
      "gemm",
      [](const View& a, const View& b, const View& c, bool accumulate, const Memory& bias,
         int threads) {
        const int64_t rows = a.size[0], k = a.size[1], columns = b.size[1];
        const bool bf16 = a.type == Type::bf16;
        FASTPAR_CHECK(isa_supported(bf16 ? "amx" : "avx512"),
                      "gemm: expected a CPU with AVX-512, and AMX for bf16, got isa=", isa_name(),
                      "; use torch.mm");
        FASTPAR_CHECK(a.dims == 2 && b.dims == 2 && (bf16 || a.type == Type::f32) &&
                          b.type == a.type && b.size[0] == k,
                      "gemm: expected float32 or bfloat16 matrices [M, K] and [K, N], got K=", k,
                      " and K=", b.size[0], "; use torch.mm");
        const bool narrow = bf16 && c.type == Type::bf16;
        void* out = c.as(narrow ? Type::bf16 : Type::f32, {rows, columns}, "c");
        gemm({at<const void>(a.address), a.stride[0], a.stride[1]},
             {at<const void>(b.address), b.stride[0], b.stride[1]}, out, c.stride[0], rows, columns,
             k, accumulate, bias ? bias.of(a.type, columns, "bias") : nullptr,
             bf16 ? Dtype::bfloat16 : Dtype::float32, narrow ? Dtype::bfloat16 : Dtype::float32,
             threads);
      },
      unlocked);
  m.def(
      "bias_gelu_fwd",
      [](const Memory& x, const Memory& bias, const Memory& y, int64_t c, int threads) {
        const Dtype dtype = x.dtype("x");
        activation_fwd(x.of(dtype, x.numel, "x"), bias.floats_or_null(c, "bias"),
                       y.of(dtype, x.numel, "y"), Activation::gelu, dtype, x.numel / c, c, threads);
      },
      unlocked);
  m.def(
      "count_targets",
      [](const Memory& targets, int64_t v, int64_t ignore_index) {
        const void* at = targets.of(Type::i64, targets.numel, "targets");
        return count_targets(static_cast<const int64_t*>(at), targets.numel, v, ignore_index);
      },
      unlocked);
  m.def(
      "cross_entropy_rows",
      [](const View& logits, const Memory& targets, const View& scale, const View& grad,
         const Memory& loss, int64_t v, int64_t ignore_index, double label_smoothing, double z_loss,
         double softcap, int threads) {
        const auto rows = cross_entropy_rows(logits, targets, grad, scale, v, ignore_index,
                                             label_smoothing, z_loss, softcap);
        cross_entropy_rows(rows, at<void>(grad.address), loss.floats(rows.n, "loss"),
                           logits.dtype("logits"), threads);
      },
      unlocked);
  m.def(
      "cross_entropy_shard",
      [](const View& logits, const Memory& targets, const Memory& max, const Memory& sum,
         const Memory& target_logit, int64_t first, int64_t v, int64_t ignore_index, double softcap,
         int threads) {
        const auto rows =
            cross_entropy_rows(logits, targets, {}, {}, v, ignore_index, 0.0, 0.0, softcap);
        cross_entropy_shard(rows, first, max.floats(rows.n, "max"), sum.floats(rows.n, "sum"),
                            target_logit.floats(rows.n, "target_logit"), logits.dtype("logits"),
                            threads);
      },
      unlocked);
  m.def(
      "cross_entropy_shard_grad",
      [](const View& logits, const Memory& targets, const Memory& lse, const View& scale,
         const View& grad, int64_t first, int64_t v, int64_t ignore_index, double z_loss,
         double softcap, int threads) {
        const auto rows =
            cross_entropy_rows(logits, targets, grad, scale, v, ignore_index, 0.0, z_loss, softcap);
        cross_entropy_shard_grad(rows, first, lse.floats(rows.n, "lse"), at<void>(grad.address),
                                 logits.dtype("logits"), threads);
      },
      unlocked);
  m.def(
      "dropout",
      [](const Memory& x, const Memory& y, int64_t seed, int64_t first_sample, int site,
         int threshold, int64_t samples, int64_t heads, int64_t rows, int64_t cols,
         int64_t first_head, int64_t first_row, int threads) {
        const Dtype dtype = x.dtype("x");
        const int64_t n = samples * heads * rows * cols;
        dropout(x.of(dtype, n, "x"), y.of(dtype, n, "y"), dtype,
                mask_block(seed, first_sample, site, threshold, samples, heads, rows, cols,
                           first_head, first_row),
                threads);
      },
      unlocked);
  m.def(
      "keep_mask",
      [](const Memory& keep, int64_t seed, int64_t first_sample, int site, int threshold,
         int64_t samples, int64_t heads, int64_t rows, int64_t cols, int64_t first_head,
         int64_t first_row, int threads) {
        const auto block = mask_block(seed, first_sample, site, threshold, samples, heads, rows,
                                      cols, first_head, first_row);
        void* to = keep.of(Type::boolean, samples * heads * rows * cols, "keep");
        keep_mask(static_cast<uint8_t*>(to), block, threads);
      },
      unlocked);
  // stats: mean and rstd [2, N], with rms rstd alone [1, N].
  m.def(
      "layer_norm_fwd",
      [](const Memory& x, const Memory& residual, const Memory& x_bias, const Memory& weight,
         const Memory& bias, const Memory& sum, const Memory& y, const Memory& stats, float eps,
         bool rms, int64_t seed, int64_t first_sample, int site, int threshold, int64_t samples,
         int64_t heads, int64_t rows, const RowPlace& place, int threads) {
        const Dtype dtype = x.dtype("x");
        const int64_t size = x.numel, c = weight.numel, n = size / c;
        float* rstd = stats.floats(rms ? n : 2 * n, "stats");
        std::vector<float> of_x_bias, of_weight, of_bias;
        layer_norm_fwd(x.of(dtype, n * c, "x"),
                       residual ? residual.of(dtype, size, "residual") : nullptr,
                       row_of(x_bias, c, "x_bias", of_x_bias),
                       row_of(weight, c, "weight", of_weight), row_of(bias, c, "bias", of_bias),
                       sum ? sum.of(dtype, size, "sum") : nullptr, y.of(dtype, size, "y"),
                       rms ? nullptr : rstd, rms ? rstd : rstd + n, dtype, n, c, eps, rms,
                       mask_block(seed, first_sample, site, threshold, samples, heads, rows, c, 0,
                                  place[0], place[1], place[2]),
                       threads);
      },
      unlocked);
  m.def(
      "layer_norm_bwd",
      [](const Memory& dy, const Memory& dsum_out, const Memory& x, const Memory& weight,
         const Memory& stats, const Memory& dsum, const Memory& dx, const Memory& dweight,
         const Memory& dbias, const Memory& dx_bias, bool rms, int64_t seed, int64_t first_sample,
         int site, int threshold, int64_t samples, int64_t heads, int64_t rows,
         const RowPlace& place, int threads) {
        const Dtype dtype = x.dtype("x");
        const int64_t size = x.numel, c = weight.numel, n = size / c;
        const float* rstd = stats.floats(rms ? n : 2 * n, "stats");
        std::vector<float> of_weight, of_dweight, of_dbias, of_dx_bias;
        layer_norm_bwd(
            dy.of(dtype, size, "dy"), dsum_out ? dsum_out.of(dtype, size, "dsum_out") : nullptr,
            x.of(dtype, n * c, "x"), row_of(weight, c, "weight", of_weight), rms ? nullptr : rstd,
            rms ? rstd : rstd + n, dsum.of(dtype, size, "dsum"),
            dx ? dx.of(dtype, size, "dx") : nullptr, sums_of(dweight, c, "dweight", of_dweight),
            sums_of(dbias, c, "dbias", of_dbias), sums_of(dx_bias, c, "dx_bias", of_dx_bias), dtype,
            n, c, rms,
            mask_block(seed, first_sample, site, threshold, samples, heads, rows, c, 0, place[0],
                       place[1], place[2]),
            threads);
        store_sums(dweight, of_dweight);
        store_sums(dbias, of_dbias);
        store_sums(dx_bias, of_dx_bias);
      },
      unlocked);
  m.def(
      "attention_fwd",
      [](const View& q, const View& k, const View& v, const View& o, const Memory& stats,
         const Memory& cu_seqlens, bool causal, float scale, int64_t seed, int64_t first_sample,
         int site_head, int threshold, int64_t first_row, int threads) {
        const AttentionInputs x(q, k, v, cu_seqlens, causal, scale);
        attention_fwd(x.q, x.k, x.v, x.of_queries(o, "o"), x.stats(stats), x.dtype, x.shape,
                      attention_mask(seed, first_sample, site_head, threshold, first_row, x.shape),
                      threads);
      },
      unlocked);
  m.def(
      "attention_bwd",
      [](const View& d_o, const View& q, const View& k, const View& v, const Memory& stats,
         const View& dq, const View& dk, const View& dv, const Memory& cu_seqlens, bool causal,
         float scale, int64_t seed, int64_t first_sample, int site_head, int threshold,
         int64_t first_row, int threads) {
        const AttentionInputs x(q, k, v, cu_seqlens, causal, scale);
        attention_bwd(
            x.of_queries(d_o, "do"), x.q, x.k, x.v, x.stats(stats), x.of_queries(dq, "dq"),
            x.of_keys(dk, "dk"), x.of_keys(dv, "dv"), x.dtype, x.shape,
            attention_mask(seed, first_sample, site_head, threshold, first_row, x.shape), threads);
      },
      unlocked);
  m.def(
      "exp_array",
      [](const Memory& x, const Memory& y) {
        const float* from = x.floats(x.numel, "x");
        dispatch<ExpArray>(isa(), from, y.floats(x.numel, "y"), x.numel);
      },
      unlocked);
  m.def(
      "round_array",
      [](const Memory& x, const Memory& y, int dtype) {
        const float* from = x.floats(x.numel, "x");
        float* to = y.floats(x.numel, "y");
        with_dtype(dtype_of(dtype), [&](auto tag) {
          dispatch<RoundArray<decltype(tag)>>(isa(), from, to, x.numel);
        });
      },
      unlocked);
}

}  // namespace
}  // namespace fastpar

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled kernels of fastpar; see csrc/ops.h for every contract.";
  m.attr("built_with_cuda") = bool(FASTPAR_CUDA);
  m.attr("why_without_cuda") = FASTPAR_WITHOUT_CUDA;  // "" with CUDA
  fastpar::bind_ops(m);
  fastpar::bind_adamw(m);
  fastpar::bind_bucket(m);
  fastpar::bind_shm(m);
  fastpar::bind_global_norm(m);
  fastpar::bind_launch(m);
  fastpar::bind_eager(m);
}
