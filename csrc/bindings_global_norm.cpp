#include "bindings.h"
#include "norm_math.h"
#include "ops_cuda.h"

namespace fastpar {
namespace {

// (data, size, dtype, counted)
using Range = std::tuple<Address, int64_t, int, bool>;

std::vector<NormRange> norm_ranges(const std::vector<Range>& entries) {
  std::vector<NormRange> ranges;
  ranges.reserve(entries.size());
  for (const auto& [data, size, dtype, counted] : entries) {
    ranges.push_back({at<const void>(data), size, dtype_of(dtype), counted});
  }
  return ranges;
}

NormClip norm_clip(double max_norm, double eps, float loss_scale, Address loss_scale_at) {
  return {max_norm, eps, {loss_scale, at<const float>(loss_scale_at)}};
}

}  // namespace

void bind_global_norm(py::module_& m) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  m.attr("norm_words") = kNormWords;
  m.def(
      "norm_bins",
      [](const std::vector<Range>& entries, Address words, int threads) {
        const auto ranges = norm_ranges(entries);
        norm_bins(ranges.data(), static_cast<int64_t>(ranges.size()), at<int64_t>(words), threads);
      },
      unlocked);
  m.def(
      "norm_from_bins",
      [](Address words, double max_norm, double eps, float loss_scale, Address loss_scale_at,
         Address result) {
        norm_from_bins(at<const int64_t>(words),
                       norm_clip(max_norm, eps, loss_scale, loss_scale_at), at<float>(result));
      },
      unlocked);
#if FASTPAR_CUDA
  m.def("norm_rows_cuda", &norm_rows_cuda);
  m.def(
      "norm_partials_cuda",
      [](const std::vector<Range>& entries, Address rows, Address stream) {
        const auto ranges = norm_ranges(entries);
        return norm_partials_cuda(ranges.data(), static_cast<int64_t>(ranges.size()),
                                  at<int64_t>(rows), at<void>(stream));
      },
      unlocked);
  m.def(
      "norm_finish_cuda",
      [](Address rows, int64_t count, double max_norm, double eps, float loss_scale,
         Address loss_scale_at, Address words, Address result, Address stream) {
        norm_finish_cuda(at<const int64_t>(rows), count,
                         norm_clip(max_norm, eps, loss_scale, loss_scale_at), at<int64_t>(words),
                         at<float>(result), at<void>(stream));
      },
      unlocked);
#endif
}

}  // namespace fastpar
