// kernels/activation: bias and the activation of an MLP; GELU in its tanh form.
#include <ATen/ops/zeros.h>

#include "node.h"

namespace fastpar::nodes {
namespace activation {

using Two = std::tuple<Tensor, Tensor>;
using Fwd = Tensor(const Tensor&, const Maybe&, int64_t);
using Bwd = Two(const Tensor&, const Tensor&, const Maybe&, int64_t);

const auto& fwd_op() {
  static const auto op = find<Fwd>("fastpar::activation");
  return op;
}
const auto& bwd_op() {
  static const auto op = find<Bwd>("fastpar::activation_bwd");
  return op;
}

// KINDS of kernels/activation.
constexpr int64_t kGelu = 0, kRelu2 = 2, kSwiglu = 3;

Activation activation_of(int64_t kind) {
  return kind == kGelu ? Activation::gelu : kind == kRelu2 ? Activation::relu2 : Activation::swiglu;
}
const char* name_of(int64_t kind) { return kind < kRelu2 ? "bias_gelu" : "activation"; }

int64_t columns(const Tensor& x) { return x.dim() ? x.size(-1) : 1; }

std::vector<int64_t> sizes_of(const Tensor& x, int64_t kind) {
  std::vector<int64_t> sizes = x.sizes().vec();
  if (kind == kSwiglu) sizes.back() /= 2;
  return sizes;
}

bool is_usual(const Tensor& x, const Maybe& bias, int64_t kind) {
  return (kind == kGelu || kind == kRelu2 || (kind == kSwiglu && x.dim() && x.size(-1) % 2 == 0)) &&
         is_dense(x) && is_number(x.scalar_type()) &&
         (!bias || (x.dim() && is_row(*bias, x.size(-1), x)));
}

Tensor forward(const Tensor& x_at, const Maybe& bias, int64_t kind) {
  if (python_serves() || !is_usual(x_at, bias, kind)) return python(fwd_op(), x_at, bias, kind);
  const Tensor x = x_at.contiguous();
  Tensor y = at::empty(sizes_of(x, kind), x.options());
  if (x.numel()) {
    const int64_t c = columns(x);
    activation_fwd(x.const_data_ptr(), Floats(bias, c, bias.has_value()), y.mutable_data_ptr(),
                   activation_of(kind), dtype_of(x), x.numel() / c, c, at::get_num_threads());
  }
  return y;
}

Two backward(const Tensor& dy_at, const Tensor& x_at, const Maybe& bias, int64_t kind) {
  if (python_serves()) return python(bwd_op(), dy_at, x_at, bias, kind);
  const Tensor dy = dy_at.contiguous(), x = x_at.contiguous();
  check_memory(is_usual(x, bias, kind) && dy.sizes() == at::IntArrayRef(sizes_of(x, kind)) &&
                   dy.scalar_type() == x.scalar_type(),
               "activation_bwd");
  Tensor dx = at::empty(x.sizes(), x.options());
  const auto floats = x.options().dtype(bias ? bias->scalar_type() : at::kFloat);
  Tensor dbias = !bias       ? at::empty({0}, floats)
                 : x.numel() ? at::empty({columns(x)}, floats)
                             : at::zeros({columns(x)}, floats);
  if (x.numel()) {
    const int64_t c = columns(x);
    Tensor none;
    Sums sums(bias ? dbias : none);
    activation_bwd(dy.const_data_ptr(), x.const_data_ptr(), Floats(bias, c, bias.has_value()),
                   dx.mutable_data_ptr(), sums, activation_of(kind), dtype_of(x), x.numel() / c, c,
                   at::get_num_threads());
    sums.store();
  }
  return {std::move(dx), std::move(dbias)};
}

struct ActivationBackward : public Node {
  SavedVariable x, bias;
  bool has_bias;
  int64_t kind;

  std::string name() const override { return "ActivationBackward"; }
  void release_variables() override {
    x.reset_data();
    bias.reset_data();
  }
  variable_list apply(variable_list&& grads) override {
    check_one_backward(name_of(kind), grads);
    variable_list out(2);
    if (!grads[0].defined()) return out;
    const auto self = getptr();
    const Maybe b = has_bias ? Maybe(bias.unpack(self)) : Maybe();
    auto [dx, dbias] = call_bwd(bwd_op(), grads[0], x.unpack(self), b, kind);
    out[0] = std::move(dx);
    if (has_bias) out[1] = std::move(dbias);
    return out;
  }
};

Tensor recorded(const Tensor& x, const Maybe& bias, int64_t kind) {
  const bool record = is_recorded(name_of(kind), x, bias);
  Tensor y = below_autograd([&] { return fwd_op().call(x, bias, kind); });
  if (!record) return y;
  auto node = make_node<ActivationBackward>();
  node->set_next_edges(torch::autograd::collect_next_edges(x, bias));
  node->has_bias = bias.has_value();
  node->kind = kind;
  node->x = SavedVariable(x, false);
  node->bias = saved(bias);
  torch::autograd::create_gradient_edge(y, node);
  return y;
}

}  // namespace activation
}  // namespace fastpar::nodes

TORCH_LIBRARY_FRAGMENT(fastpar, m) {
  using namespace fastpar::nodes;
  define(m, "activation(Tensor x, Tensor? bias, int kind) -> Tensor", &activation::forward,
         &activation::recorded);
  define(m, "activation_bwd(Tensor dy, Tensor x, Tensor? bias, int kind) -> (Tensor, Tensor)",
         &activation::backward);
}
