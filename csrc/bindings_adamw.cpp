#include "adamw_math.h"
#include "bindings.h"

namespace fastpar {
namespace {

void step_tensors(const Addresses& params, const Addresses& grads, const Addresses& exp_avgs,
                  const Addresses& exp_avg_sqs, const Addresses& masters,
                  const std::vector<int64_t>& sizes, int param_dtype, int grad_dtype,
                  float grad_scale, float decay, float one_minus_beta1, float beta2,
                  float one_minus_beta2, float step_size, float sqrt_bias_correction2, float eps,
                  int threads) {
  const size_t n = params.size();
  FASTPAR_CHECK(grads.size() == n && exp_avgs.size() == n && exp_avg_sqs.size() == n &&
                    sizes.size() == n && (masters.empty() || masters.size() == n),
                "adamw_step: expected lists of equal length, got params=", n,
                " grads=", grads.size(), " exp_avgs=", exp_avgs.size(),
                " exp_avg_sqs=", exp_avg_sqs.size(), " masters=", masters.size(),
                " sizes=", sizes.size(), "; pass one entry per tensor");
  FASTPAR_CHECK(param_dtype == 0 || !masters.empty() || n == 0,
                "adamw_step: expected masters for 16-bit parameters, got masters=0; pass them");
  std::vector<AdamwTensor> tensors(n);
  for (size_t i = 0; i < n; ++i) {
    tensors[i] = {at<void>(params[i]),
                  at<const void>(grads[i]),
                  at<float>(exp_avgs[i]),
                  at<float>(exp_avg_sqs[i]),
                  masters.empty() ? nullptr : at<float>(masters[i]),
                  sizes[i]};
  }
  fastpar::adamw_step(tensors, dtype_of(param_dtype), dtype_of(grad_dtype),
                      {grad_scale, decay, one_minus_beta1, beta2, one_minus_beta2, step_size,
                       sqrt_bias_correction2, eps, 0, 0, 0, 0},
                      threads);
}

}  // namespace

void bind_adamw(py::module_& m) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  m.def("adamw_step", &step_tensors, unlocked);
}

}  // namespace fastpar
