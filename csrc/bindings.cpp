// The one PYBIND11_MODULE: fastpar.kernels._C. The ops of a model are bound here, those of the
// runtime in bindings_<op>.cpp.
#include "bindings.h"

#include <array>

#include "simd.h"

using fastpar::Address;
using fastpar::at;
using fastpar::dtype_of;
namespace py = pybind11;

namespace {

fastpar::MaskBlock mask_block(int64_t seed, int64_t first_sample, int site, int threshold,
                              int64_t samples, int64_t heads, int64_t rows, int64_t cols,
                              int64_t first_head, int64_t first_row, int64_t low = 0,
                              int64_t high = 0) {
  FASTPAR_CHECK(threshold >= 0 && threshold <= 255,
                "dropout: expected 0 <= threshold <= 255, got threshold=", threshold,
                "; use quantize_p");
  return {seed, first_sample, site,       threshold, samples, heads,
          rows, cols,         first_head, first_row, low,     high};
}

// (first_row, low, high) of a MaskBlock
using RowPlace = std::array<int64_t, 3>;

// (data_ptr, batch, row and head strides)
using Layout = std::array<int64_t, 4>;

fastpar::Strided strided(const Layout& x) {
  return {at<void>(static_cast<Address>(x[0])), x[1], x[2], x[3]};
}

// (batch, t, tk, heads, key_heads, d, address of cu_seqlens or 0)
using AttentionSizes = std::array<int64_t, 7>;

fastpar::AttentionShape attention_shape(const AttentionSizes& s, bool causal, float scale) {
  return {s[0],   s[1],  s[2],
          s[3],   s[4],  s[5],
          causal, scale, at<const int32_t>(static_cast<Address>(s[6]))};
}

// site_head: site << 16 | head of the model that the first head is; first_row: row of the mask that
// the first query has.
fastpar::MaskBlock attention_mask(int64_t seed, int64_t first_sample, int site_head, int threshold,
                                  int64_t first_row, const AttentionSizes& s) {
  return mask_block(seed, first_sample, site_head >> 16, threshold, s[0], s[3], s[1], s[2],
                    site_head & 0xffff, first_row);
}

// (n, v, width, stride, grad_stride, scale_stride, ignore_index)
using CrossEntropySizes = std::array<int64_t, 7>;

fastpar::CrossEntropyRows cross_entropy_rows(const CrossEntropySizes& s, Address logits,
                                             Address targets, Address scale, double label_smoothing,
                                             double z_loss) {
  fastpar::CrossEntropyRows rows;
  rows.logits = at<const void>(logits);
  rows.targets = at<const int64_t>(targets);
  rows.n = s[0];
  rows.v = s[1];
  rows.width = s[2];
  rows.stride = s[3];
  rows.grad_stride = s[4];
  rows.scale = at<const float>(scale);
  rows.scale_stride = s[5];
  rows.ignore_index = s[6];
  rows.label_smoothing = label_smoothing;
  rows.z_loss = z_loss;
  return rows;
}

// exp_float over an array, for tests of its accuracy.
struct ExpArray {
  static FASTPAR_INLINE void run(const float* x, float* y, int64_t n) {
    for (int64_t i = 0; i < n; ++i) y[i] = fastpar::exp_float(x[i]);
  }
};

// Conversion to and from a storage type over an array, for tests of its rounding.
template <class T>
struct RoundArray {
  static FASTPAR_INLINE void run(const float* x, float* y, int64_t n) {
    for (int64_t i = 0; i < n; ++i) y[i] = fastpar::to_float(fastpar::from_float<T>(x[i]));
  }
};

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled kernels of fastpar; see csrc/ops.h for every contract.";
  m.attr("built_with_cuda") = bool(FASTPAR_CUDA);
  m.attr("why_without_cuda") = FASTPAR_WITHOUT_CUDA;  // "" with CUDA
  const auto unlocked = py::call_guard<py::gil_scoped_release>();

  m.def("isa", &fastpar::isa_name);
  m.def("isa_supported", &fastpar::isa_supported);
  m.def("cpu_is_intel", &fastpar::cpu_is_intel);
  m.def("set_isa", &fastpar::set_isa);
  m.def("keep_freed_memory", &fastpar::keep_freed_memory);
  m.def("bind_workers", &fastpar::bind_workers, unlocked);
  m.def("worker_cpus", &fastpar::worker_cpus, unlocked);
  fastpar::bind_adamw(m);
  fastpar::bind_bucket(m);
  fastpar::bind_shm(m);
  fastpar::bind_global_norm(m);
  fastpar::bind_launch(m);
  fastpar::bind_eager(m);
  m.def(
      "gemm",
      [](Address a, int64_t a_row, int64_t a_column, Address b, int64_t b_row, int64_t b_column,
         Address c, int64_t ldc, int64_t rows, int64_t columns, int64_t k, bool accumulate,
         Address bias, int threads) {
        FASTPAR_CHECK(fastpar::isa_supported("avx512"),
                      "gemm: expected a CPU with AVX-512, got isa=", fastpar::isa_name(),
                      "; use torch.mm");
        fastpar::gemm({at<const float>(a), a_row, a_column}, {at<const float>(b), b_row, b_column},
                      at<float>(c), ldc, rows, columns, k, accumulate, at<const float>(bias),
                      threads);
      },
      unlocked);
  m.def(
      "bias_gelu_fwd",
      [](Address x, Address bias, Address y, int dtype, int64_t n, int64_t c, int threads) {
        fastpar::bias_gelu_fwd(at<const void>(x), at<const float>(bias), at<void>(y),
                               dtype_of(dtype), n, c, threads);
      },
      unlocked);
  m.def(
      "bias_gelu_bwd",
      [](Address dy, Address x, Address bias, Address dx, Address dbias, int dtype, int64_t n,
         int64_t c, int threads) {
        fastpar::bias_gelu_bwd(at<const void>(dy), at<const void>(x), at<const float>(bias),
                               at<void>(dx), at<float>(dbias), dtype_of(dtype), n, c, threads);
      },
      unlocked);
  m.def(
      "count_targets",
      [](Address targets, int64_t n, int64_t v, int64_t ignore_index) {
        return fastpar::count_targets(at<const int64_t>(targets), n, v, ignore_index);
      },
      unlocked);
  m.def(
      "cross_entropy_rows",
      [](const CrossEntropySizes& sizes, Address logits, Address targets, Address scale,
         double label_smoothing, double z_loss, Address grad, Address loss, int dtype,
         int threads) {
        fastpar::cross_entropy_rows(
            cross_entropy_rows(sizes, logits, targets, scale, label_smoothing, z_loss),
            at<void>(grad), at<float>(loss), dtype_of(dtype), threads);
      },
      unlocked);
  m.def(
      "cross_entropy_shard",
      [](const CrossEntropySizes& sizes, Address logits, Address targets, int64_t first,
         Address max, Address sum, Address target_logit, int dtype, int threads) {
        fastpar::cross_entropy_shard(cross_entropy_rows(sizes, logits, targets, 0, 0.0, 0.0), first,
                                     at<float>(max), at<float>(sum), at<float>(target_logit),
                                     dtype_of(dtype), threads);
      },
      unlocked);
  m.def(
      "cross_entropy_shard_grad",
      [](const CrossEntropySizes& sizes, Address logits, Address targets, int64_t first,
         Address lse, Address scale, double z_loss, Address grad, int dtype, int threads) {
        fastpar::cross_entropy_shard_grad(
            cross_entropy_rows(sizes, logits, targets, scale, 0.0, z_loss), first,
            at<const float>(lse), at<void>(grad), dtype_of(dtype), threads);
      },
      unlocked);
  m.def(
      "dropout",
      [](Address x, Address y, int dtype, int64_t seed, int64_t first_sample, int site,
         int threshold, int64_t samples, int64_t heads, int64_t rows, int64_t cols,
         int64_t first_head, int64_t first_row, int threads) {
        fastpar::dropout(at<const void>(x), at<void>(y), dtype_of(dtype),
                         mask_block(seed, first_sample, site, threshold, samples, heads, rows, cols,
                                    first_head, first_row),
                         threads);
      },
      unlocked);
  m.def(
      "keep_mask",
      [](Address keep, int64_t seed, int64_t first_sample, int site, int threshold, int64_t samples,
         int64_t heads, int64_t rows, int64_t cols, int64_t first_head, int64_t first_row,
         int threads) {
        fastpar::keep_mask(at<uint8_t>(keep),
                           mask_block(seed, first_sample, site, threshold, samples, heads, rows,
                                      cols, first_head, first_row),
                           threads);
      },
      unlocked);
  m.def(
      "layer_norm_fwd",
      [](Address x, Address residual, Address x_bias, Address weight, Address bias, Address sum,
         Address y, Address mean, Address rstd, int dtype, int64_t n, int64_t c, float eps,
         bool rms, int64_t seed, int64_t first_sample, int site, int threshold, int64_t samples,
         int64_t heads, int64_t rows, const RowPlace& place, int threads) {
        fastpar::layer_norm_fwd(at<const void>(x), at<const void>(residual),
                                at<const float>(x_bias), at<const float>(weight),
                                at<const float>(bias), at<void>(sum), at<void>(y), at<float>(mean),
                                at<float>(rstd), dtype_of(dtype), n, c, eps, rms,
                                mask_block(seed, first_sample, site, threshold, samples, heads,
                                           rows, c, 0, place[0], place[1], place[2]),
                                threads);
      },
      unlocked);
  m.def(
      "layer_norm_bwd",
      [](Address dy, Address dsum_out, Address x, Address weight, Address mean, Address rstd,
         Address dsum, Address dx, Address dweight, Address dbias, Address dx_bias, int dtype,
         int64_t n, int64_t c, bool rms, int64_t seed, int64_t first_sample, int site,
         int threshold, int64_t samples, int64_t heads, int64_t rows, const RowPlace& place,
         int threads) {
        fastpar::layer_norm_bwd(at<const void>(dy), at<const void>(dsum_out), at<const void>(x),
                                at<const float>(weight), at<const float>(mean),
                                at<const float>(rstd), at<void>(dsum), at<void>(dx),
                                at<float>(dweight), at<float>(dbias), at<float>(dx_bias),
                                dtype_of(dtype), n, c, rms,
                                mask_block(seed, first_sample, site, threshold, samples, heads,
                                           rows, c, 0, place[0], place[1], place[2]),
                                threads);
      },
      unlocked);
  m.def(
      "attention_fwd",
      [](const Layout& q, const Layout& k, const Layout& v, const Layout& o, Address stats,
         int dtype, const AttentionSizes& s, bool causal, float scale, int64_t seed,
         int64_t first_sample, int site_head, int threshold, int64_t first_row, int threads) {
        fastpar::attention_fwd(
            strided(q), strided(k), strided(v), strided(o), at<float>(stats), dtype_of(dtype),
            attention_shape(s, causal, scale),
            attention_mask(seed, first_sample, site_head, threshold, first_row, s), threads);
      },
      unlocked);
  m.def(
      "attention_bwd",
      [](const Layout& d_o, const Layout& q, const Layout& k, const Layout& v, Address stats,
         const Layout& dq, const Layout& dk, const Layout& dv, int dtype, const AttentionSizes& s,
         bool causal, float scale, int64_t seed, int64_t first_sample, int site_head, int threshold,
         int64_t first_row, int threads) {
        fastpar::attention_bwd(
            strided(d_o), strided(q), strided(k), strided(v), at<const float>(stats), strided(dq),
            strided(dk), strided(dv), dtype_of(dtype), attention_shape(s, causal, scale),
            attention_mask(seed, first_sample, site_head, threshold, first_row, s), threads);
      },
      unlocked);
  m.def(
      "exp_array",
      [](Address x, Address y, int64_t n) {
        fastpar::dispatch<ExpArray>(fastpar::isa(), at<const float>(x), at<float>(y), n);
      },
      unlocked);
  m.def(
      "round_array",
      [](Address x, Address y, int64_t n, int dtype) {
        fastpar::with_dtype(dtype_of(dtype), [&](auto tag) {
          fastpar::dispatch<RoundArray<decltype(tag)>>(fastpar::isa(), at<const float>(x),
                                                       at<float>(y), n);
        });
      },
      unlocked);
}
