// kernels/gelu: bias + GELU, tanh form.
#include <ATen/ops/zeros.h>

#include "node.h"

namespace fastpar::nodes {
namespace gelu {

using Two = std::tuple<Tensor, Tensor>;
using Fwd = Tensor(const Tensor&, const Maybe&, bool);
using Bwd = Two(const Tensor&, const Tensor&, const Maybe&, bool);

const auto& fwd_op() {
  static const auto op = find<Fwd>("fastpar::bias_gelu");
  return op;
}
const auto& bwd_op() {
  static const auto op = find<Bwd>("fastpar::bias_gelu_bwd");
  return op;
}

int64_t columns(const Tensor& x) { return x.dim() ? x.size(-1) : 1; }

bool is_usual(const Tensor& x, const Maybe& bias, bool tanh) {
  return tanh && is_dense(x) && is_number(x.scalar_type()) &&
         (!bias || (x.dim() && is_row(*bias, x.size(-1), x)));
}

Tensor forward(const Tensor& x_at, const Maybe& bias, bool tanh) {
  if (python_serves() || !is_usual(x_at, bias, tanh)) return python(fwd_op(), x_at, bias, tanh);
  const Tensor x = x_at.contiguous();
  Tensor y = at::empty(x.sizes(), x.options());
  if (x.numel()) {
    const int64_t c = columns(x);
    bias_gelu_fwd(x.const_data_ptr(), Floats(bias, c, bias.has_value()), y.mutable_data_ptr(),
                  dtype_of(x), x.numel() / c, c, at::get_num_threads());
  }
  return y;
}

Two backward(const Tensor& dy_at, const Tensor& x_at, const Maybe& bias, bool tanh) {
  if (python_serves()) return python(bwd_op(), dy_at, x_at, bias, tanh);
  const Tensor dy = dy_at.contiguous(), x = x_at.contiguous();
  check_memory(is_like(dy, x) && is_usual(x, bias, tanh), "bias_gelu_bwd");
  Tensor dx = at::empty(x.sizes(), x.options());
  const auto floats = x.options().dtype(bias ? bias->scalar_type() : at::kFloat);
  Tensor dbias = !bias       ? at::empty({0}, floats)
                 : x.numel() ? at::empty({columns(x)}, floats)
                             : at::zeros({columns(x)}, floats);
  if (x.numel()) {
    const int64_t c = columns(x);
    Tensor none;
    Sums sums(bias ? dbias : none);
    bias_gelu_bwd(dy.const_data_ptr(), x.const_data_ptr(), Floats(bias, c, bias.has_value()),
                  dx.mutable_data_ptr(), sums, dtype_of(x), x.numel() / c, c,
                  at::get_num_threads());
    sums.store();
  }
  return {std::move(dx), std::move(dbias)};
}

struct BiasGeluBackward : public Node {
  SavedVariable x, bias;
  bool has_bias, tanh;

  std::string name() const override { return "BiasGeluBackward"; }
  void release_variables() override {
    x.reset_data();
    bias.reset_data();
  }
  variable_list apply(variable_list&& grads) override {
    check_one_backward("bias_gelu", grads);
    variable_list out(2);
    if (!grads[0].defined()) return out;
    const auto self = getptr();
    const Maybe b = has_bias ? Maybe(bias.unpack(self)) : Maybe();
    auto [dx, dbias] = call_bwd(bwd_op(), grads[0], x.unpack(self), b, tanh);
    out[0] = std::move(dx);
    if (has_bias) out[1] = std::move(dbias);
    return out;
  }
};

Tensor recorded(const Tensor& x, const Maybe& bias, bool tanh) {
  const bool record = is_recorded("bias_gelu", x, bias);
  Tensor y = below_autograd([&] { return fwd_op().call(x, bias, tanh); });
  if (!record) return y;
  auto node = make_node<BiasGeluBackward>();
  node->set_next_edges(torch::autograd::collect_next_edges(x, bias));
  node->has_bias = bias.has_value();
  node->tanh = tanh;
  node->x = SavedVariable(x, false);
  node->bias = saved(bias);
  torch::autograd::create_gradient_edge(y, node);
  return y;
}

}  // namespace gelu
}  // namespace fastpar::nodes

TORCH_LIBRARY_FRAGMENT(fastpar, m) {
  m.def("bias_gelu(Tensor x, Tensor? bias, bool tanh) -> Tensor");
  m.def("bias_gelu_bwd(Tensor dy, Tensor x, Tensor? bias, bool tanh) -> (Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(fastpar, CPU, m) {
  m.impl("bias_gelu", &fastpar::nodes::gelu::forward);
  m.impl("bias_gelu_bwd", &fastpar::nodes::gelu::backward);
}
TORCH_LIBRARY_IMPL(fastpar, Autograd, m) {
  m.impl("bias_gelu", &fastpar::nodes::gelu::recorded);
  m.impl("bias_gelu_bwd",
         torch::CppFunction::makeFromBoxedFunction<&fastpar::nodes::record_refusal>());
}
