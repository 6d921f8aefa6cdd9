#include "product.h"

#include <ATen/Context.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

#include <array>
#include <atomic>
#include <map>

namespace fastpar::nodes {
namespace {

// Set by kernels/linear and kernels/choice.
std::atomic<bool> has_gemm{false}, has_bf16_gemm{false};
std::atomic<int64_t> strict{0};

constexpr int64_t kOursFrom = 1 << 18, kTile = 32, kWide = 768,
                  kWideRows = 4096;  // of kernels/linear

bool ignores_times() { return strict.load() > 0 || at::globalContext().deterministicAlgorithms(); }

bool use_gemm_for(const Tensor& a, const Tensor& b) {
  return a.is_cpu() && use_gemm(a.scalar_type(), a.size(0), b.size(1), a.size(1), a.stride(0) == 1);
}

void run_gemm(const Tensor& out, const Tensor& a, const Tensor& b, bool add,
              const Maybe& bias = {}) {
  const Tensor added = has(bias) ? bias->contiguous() : Tensor();
  gemm({a.const_data_ptr(), a.stride(0), a.stride(1)},
       {b.const_data_ptr(), b.stride(0), b.stride(1)}, out.mutable_data_ptr(), out.stride(0),
       a.size(0), b.size(1), a.size(1), add, added.defined() ? added.const_data_ptr() : nullptr,
       dtype_of(a), dtype_of(out), at::get_num_threads());
}

using Buffers = std::map<at::ScalarType, Tensor>;
Buffers& buffers() {
  thread_local Buffers found;  // ranks may be threads of one process
  return found;
}

}  // namespace

bool use_gemm(at::ScalarType type, int64_t m, int64_t n, int64_t k, bool turned) {
  const int64_t work = m * n * k;
  if (type == at::kFloat) {
    return has_gemm && (work >= kOursFrom || (work > 0 && ignores_times()));
  }
  if (type != at::kBFloat16 || !has_bf16_gemm || work < kOursFrom || std::min(m, n) < kTile) {
    return false;
  }
  return turned || ignores_times() || (std::min(n, k) >= kWide && at::get_num_threads() > 1);
}

Tensor product(const Tensor& a, const Tensor& b, Tensor out, const Maybe& bias) {
  if (!use_gemm_for(a, b)) {
    if (!out.defined()) return has(bias) ? at::addmm(*bias, a, b) : at::mm(a, b);
    if (has(bias)) return at::addmm_out(out, *bias, a, b);
    return at::mm_out(out, a, b);
  }
  if (!out.defined()) out = at::empty({a.size(0), b.size(1)}, a.options());
  run_gemm(out, a, b, false, bias);
  return out;
}

void add_product(Tensor& out, const Tensor& a, const Tensor& b) {
  if (use_gemm_for(a, b)) {
    run_gemm(out, a, b, true);
  } else {
    at::addmm_out(out, out, a, b);
  }
}

void accumulate(Tensor& sum, const Tensor& a, const Tensor& b) {
  if (a.scalar_type() == at::kFloat) {
    if (sum.defined()) {
      add_product(sum, a, b);
    } else {
      sum = product(a, b);
    }
    return;
  }
  const bool add = sum.defined(), ours = use_gemm_for(a, b);
  const auto floats = a.options().dtype(at::kFloat);
  if (!add) {
    sum = ours ? at::empty({a.size(0), b.size(1)}, floats)
               : at::zeros({a.size(0), b.size(1)}, floats);
  }
  if (ours) {
    run_gemm(sum, a, b, add);
    return;
  }
  const Tensor wide = b.to(at::kFloat);
  for (int64_t start = 0; start < a.size(0); start += kWideRows) {
    const int64_t rows = std::min(kWideRows, a.size(0) - start);
    Tensor out = sum.narrow(0, start, rows);
    at::addmm_out(out, out, a.narrow(0, start, rows).to(at::kFloat), wide);
  }
}

Tensor workspace(int64_t rows, int64_t columns, const Tensor& like) {
  Tensor& buffer = buffers()[like.scalar_type()];
  if (!buffer.defined() || buffer.numel() < rows * columns) {
    const c10::InferenceMode normal(false);  // later calls may be in another mode than the first
    buffer = at::empty({rows * columns}, like.options());
  }
  return buffer.narrow(0, 0, rows * columns).view({rows, columns});
}

}  // namespace fastpar::nodes

TORCH_LIBRARY_FRAGMENT(fastpar, m) {
  using namespace fastpar::nodes;
  m.def("_set_gemm(bool fp32, bool bf16) -> ()", [](bool fp32, bool bf16) {
    has_gemm = fp32;
    has_bf16_gemm = bf16;
  });
  m.def("_ignore_times(int more) -> ()", [](int64_t more) {
    strict += more;
    forget_recipes();
  });
  m.def("_workspace_bytes() -> int", []() {
    int64_t bytes = 0;
    for (const auto& [type, buffer] : buffers()) bytes += static_cast<int64_t>(buffer.nbytes());
    return bytes;
  });
  m.def("_release_workspaces() -> ()", []() { buffers().clear(); });
}
