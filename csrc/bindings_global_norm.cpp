#include "bindings.h"
#include "norm_math.h"
#include "ops_cuda.h"

namespace fastpar {
namespace {

// counted: of each tensor, empty: all are.
std::vector<NormRange> norm_ranges(const Rows& tensors, const std::vector<bool>& counted) {
  FASTPAR_CHECK(tensors.are_usual() && (counted.empty() || counted.size() == tensors.size),
                "norm_bins: expected contiguous float32, bfloat16 or float16 in one place, got ",
                tensors.size, " tensors; use kernels/global_norm.py");
  std::vector<NormRange> ranges;
  ranges.reserve(tensors.size);
  for (size_t i = 0; i < tensors.size; ++i) {
    const Listed& x = tensors[i];
    ranges.push_back({at<const void>(x.address), x.numel, static_cast<Dtype>(x.type),
                      counted.empty() || counted[i]});
  }
  return ranges;
}

NormClip norm_clip(double max_norm, double eps, float loss_scale, const Memory& loss_scale_at) {
  return {max_norm, eps, {loss_scale, loss_scale_at.floats_or_null(1, "loss_scale")}};
}

int64_t* words_of(const Memory& words) {
  return static_cast<int64_t*>(words.of(Type::i64, kNormWords, "words"));
}

}  // namespace

void bind_global_norm(py::module_& m) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  m.attr("norm_words") = kNormWords;
  m.def("are_usual", [](const Rows& tensors, size_t from) {
    return from <= tensors.size && Rows{tensors.first + from, tensors.size - from}.are_usual();
  });
  m.def(
      "norm_bins",
      [](const Rows& tensors, const std::vector<bool>& counted, const Memory& words, int threads) {
        const auto ranges = norm_ranges(tensors, counted);
        norm_bins(ranges.data(), static_cast<int64_t>(ranges.size()), words_of(words), threads);
      },
      unlocked);
  m.def(
      "norm_from_bins",
      [](const Memory& words, double max_norm, double eps, float loss_scale,
         const Memory& loss_scale_at, const Memory& result) {
        norm_result(words_of(words), norm_clip(max_norm, eps, loss_scale, loss_scale_at),
                    result.floats(3, "result"));
      },
      unlocked);
#if FASTPAR_CUDA
  m.def("norm_rows_cuda", &norm_rows_cuda);
  m.def(
      "norm_partials_cuda",
      [](const Rows& tensors, const std::vector<bool>& counted, const Memory& rows,
         Address stream) {
        const auto ranges = norm_ranges(tensors, counted);
        const int64_t count = static_cast<int64_t>(ranges.size());
        void* to = rows.of(Type::i64, norm_rows_cuda(count) * kNormWords, "rows");
        return norm_partials_cuda(ranges.data(), count, static_cast<int64_t*>(to),
                                  at<void>(stream));
      },
      unlocked);
  m.def(
      "norm_finish_cuda",
      [](const Memory& rows, int64_t count, double max_norm, double eps, float loss_scale,
         const Memory& loss_scale_at, const Memory& words, const Memory& result, Address stream) {
        FASTPAR_CHECK(rows.type == Type::i64 && rows.contiguous && rows.numel >= count * kNormWords,
                      "norm_finish: expected ", count, " rows of int64, got ", rows.numel,
                      " elements of ", type_name(rows.type), "; use kernels/global_norm.py");
        norm_finish_cuda(at<const int64_t>(rows.address), count,
                         norm_clip(max_norm, eps, loss_scale, loss_scale_at),
                         words ? words_of(words) : nullptr, result.floats_or_null(3, "result"),
                         at<void>(stream));
      },
      unlocked);
#endif
}

}  // namespace fastpar
