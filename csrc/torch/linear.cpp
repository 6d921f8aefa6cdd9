// kernels/linear: y = x @ weight.T + bias, by our product where use_gemm() says so, else by
// torch's. Calls that a mode, transform or subclass watches become torch's own linear, which each
// of them knows; so does a backward that is itself recorded.
#include <ATen/autocast_mode.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>

#include "product.h"

namespace fastpar::nodes {
namespace linear {

using Three = std::tuple<Tensor, Tensor, Tensor>;
using Fwd = Tensor(const Tensor&, const Tensor&, const Maybe&);
using Bwd = Three(const Tensor&, const Maybe&, const Maybe&, bool, bool, bool);

const auto& fwd_op() {
  static const auto op = find<Fwd>("fastpar::linear");
  return op;
}
const auto& bwd_op() {
  static const auto op = find<Bwd>("fastpar::linear_bwd");
  return op;
}

// [N, C]; traced tensors may have sizes that are not known.
Tensor rows_of(const Tensor& x) {
  if (x.dim() == 2) return x;
  const auto sizes = x.sym_sizes();
  return x.reshape_symint({c10::multiply_integers(sizes.slice(0, sizes.size() - 1)), sizes.back()});
}

std::vector<int64_t> with_last(const Tensor& x, int64_t last) {
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.back() = last;
  return sizes;
}

void check(const Tensor& x, const Tensor& weight, const Maybe& bias) {
  TORCH_CHECK_VALUE(weight.dim() == 2 && x.dim() >= 1 && x.size(-1) == weight.size(1),
                    "linear: expected x [..., C] and weight [F, C], got x=", x.sizes(),
                    " weight=", weight.sizes(), "; pass the weight as F.linear takes it");
  TORCH_CHECK_VALUE(!has(bias) || (bias->dim() == 1 && bias->size(0) == weight.size(0)),
                    "linear: expected bias [F] with weight [F, C], got bias=", bias->sizes(),
                    " weight=", weight.sizes(), "; pass one bias for each row of weight");
}

// Whether a product of the op is ours: dweight's is, if any is.
bool is_ours(const Tensor& x, const Tensor& weight) {
  if (!x.is_cpu() || x.unsafeGetTensorImpl()->has_symbolic_sizes_strides() || x.dim() == 0 ||
      weight.unsafeGetTensorImpl()->has_symbolic_sizes_strides() || weight.dim() != 2) {
    return false;
  }
  const int64_t c = x.size(-1);
  return c && use_gemm(x.scalar_type(), x.numel() / c, weight.size(0), c, true);
}

Tensor forward(const Tensor& x, const Tensor& weight, const Maybe& bias) {
  check(x, weight, bias);
  const bool same = x.scalar_type() == weight.scalar_type() && x.device() == weight.device() &&
                    (!has(bias) || bias->scalar_type() == x.scalar_type());
  if (!same || !is_ours(x, weight)) return at::linear(x, weight, bias);
  return product(rows_of(x), weight.t(), {}, bias).view(with_last(x, weight.size(0)));
}

Three backward(const Tensor& dy, const Maybe& x, const Maybe& weight, bool need_dx,
               bool need_dweight, bool need_dbias) {
  const Tensor rows = rows_of(dy);
  check_memory((!need_dx || has(weight)) && (!need_dweight || has(x)), "linear_bwd");
  const auto made = [&](bool need, const auto& make) {
    return need ? make() : at::empty({0}, dy.options());
  };
  return {
      made(need_dx, [&] { return product(rows, *weight).view(with_last(dy, weight->size(1))); }),
      made(need_dweight, [&] { return product(rows.t(), rows_of(*x)); }),
      made(need_dbias, [&] { return rows.sum(0); }),
  };
}

struct LinearBackward : public Node {
  SavedVariable x, weight;

  std::string name() const override { return "LinearBackward"; }
  void release_variables() override {
    x.reset_data();
    weight.reset_data();
  }
  variable_list apply(variable_list&& grads) override {
    variable_list out(3);
    const Tensor& dy = grads[0];
    if (!dy.defined()) return out;
    const auto self = getptr();
    const bool dx = task_should_compute_output(0), dweight = task_should_compute_output(1);
    const bool dbias = task_should_compute_output(2);
    const Tensor w = dx ? weight.unpack(self) : Tensor();
    const Tensor inputs = dweight ? x.unpack(self) : Tensor();
    if (at::GradMode::is_enabled() || is_wrapped(dy)) {  // torch derives these once more
      const Tensor rows = rows_of(dy);
      if (dx) out[0] = at::matmul(dy, w);
      if (dweight) out[1] = at::mm(rows.t(), rows_of(inputs));
      if (dbias) out[2] = rows.sum(0);
      return out;
    }
    auto [a, b, c] = call_bwd(bwd_op(), dy, maybe(inputs), maybe(w), dx, dweight, dbias);
    if (dx) out[0] = std::move(a);
    if (dweight) out[1] = std::move(b);
    if (dbias) out[2] = std::move(c);
    return out;
  }
};

Tensor recorded(const Tensor& x, const Tensor& weight, const Maybe& bias) {
  const bool wrapped = is_wrapped(x) || is_wrapped(weight) || (has(bias) && is_wrapped(*bias));
  const bool tangent = has_tangent(x) || has_tangent(weight) || has_tangent(bias);
  if (tangent || in_transform() || (wrapped && !is_ours(x, weight))) {
    return at::linear(x, weight, bias);
  }
  const bool record = is_recorded("linear", x, weight, bias);
  Tensor y = below_autograd([&] { return fwd_op().call(x, weight, bias); });
  if (!record) return y;
  auto node = make_node<LinearBackward>();
  node->set_next_edges(torch::autograd::collect_next_edges(x, weight, bias));
  if (needs_grad(weight)) node->x = SavedVariable(x, false);
  if (needs_grad(x)) node->weight = SavedVariable(weight, false);
  torch::autograd::create_gradient_edge(y, node);
  return y;
}

template <at::DeviceType device>
Tensor autocast(const Tensor& x, const Tensor& weight, const Maybe& bias) {
  const c10::impl::ExcludeDispatchKeyGuard guard(
      at::autocast::get_autocast_dispatch_key_from_device_type(device));
  const auto to = at::autocast::get_autocast_dtype(device);
  const auto cast = [&](const auto& t) { return at::autocast::cached_cast(to, t, device); };
  return fwd_op().call(cast(x), cast(weight), cast(bias));
}

}  // namespace linear
}  // namespace fastpar::nodes

TORCH_LIBRARY_FRAGMENT(fastpar, m) {
  using namespace fastpar::nodes;
  using Key = c10::DispatchKey;
  m.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  m.def(
      "linear_bwd(Tensor dy, Tensor? x, Tensor? weight, bool need_dx, bool need_dweight, "
      "bool need_dbias) -> (Tensor, Tensor, Tensor)");
  for (const Key key : {Key::CPU, Key::CUDA}) {
    m.impl("linear", torch::dispatch(key, &linear::forward));
    m.impl("linear_bwd", torch::dispatch(key, &linear::backward));
  }
  m.impl("linear", torch::dispatch(Key::CompositeExplicitAutograd, &at::linear));
  m.impl("linear_bwd", torch::dispatch(Key::CompositeExplicitAutograd, &linear::backward));
  m.impl("linear", torch::dispatch(Key::FuncTorchBatched, &at::linear));
  m.impl("linear", torch::dispatch(Key::Autograd, &linear::recorded));
  m.impl("linear_bwd", refusal());
  m.impl("linear", torch::dispatch(Key::AutocastCPU, &linear::autocast<at::kCPU>));
  m.impl("linear", torch::dispatch(Key::AutocastCUDA, &linear::autocast<at::kCUDA>));
}
