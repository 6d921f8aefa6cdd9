// kernels/loss: cross-entropy of logits, and of a linear layer's by chunks of rows.
#include <ATen/ops/div.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/graph_task.h>

#include <cmath>
#include <numeric>

#include "product.h"

namespace fastpar::nodes {
namespace loss {

using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;

using Fwd = Three(const Tensor&, const Tensor&, std::optional<c10::SymInt>, int64_t,
                  c10::string_view, double, double, double, bool);
using LinearFwd = Four(const Tensor&, const Tensor&, const Tensor&, std::optional<c10::SymInt>,
                       int64_t, c10::string_view, double, double, double, c10::SymInt, bool, bool);
using LinearBwd = Two(const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                      std::optional<c10::SymInt>, int64_t, double, double, double, c10::SymInt,
                      bool, bool);

const auto& fwd_op() {
  static const auto op = find<Fwd>("fastpar::cross_entropy");
  return op;
}
const auto& linear_op() {
  static const auto op = find<LinearFwd>("fastpar::linear_cross_entropy");
  return op;
}
const auto& linear_bwd_op() {
  static const auto op = find<LinearBwd>("fastpar::linear_cross_entropy_bwd");
  return op;
}

// The classes of a call: V of the columns.
int64_t classes(const std::optional<c10::SymInt>& vocab_size, int64_t columns) {
  return vocab_size ? vocab_size->expect_int() : columns;
}

// What check_loss() of kernels/loss allows; x [..., C] of the rows, columns: of the logits.
bool is_usual(const Tensor& x, const Tensor& targets, const std::optional<c10::SymInt>& vocab_size,
              int64_t columns, c10::string_view reduction, double label_smoothing, double z_loss,
              double softcap) {
  const int64_t v = classes(vocab_size, columns);
  return is_dense(x) && is_number(x.scalar_type()) && x.dim() > 0 && is_dense(targets) &&
         targets.scalar_type() == at::kLong && targets.device() == x.device() &&
         targets.sizes() == x.sizes().slice(0, x.dim() - 1) && v > 0 && v <= columns &&
         (reduction == "mean" || reduction == "sum" || reduction == "none") &&
         label_smoothing >= 0.0 && label_smoothing <= 1.0 && z_loss >= 0.0 && z_loss < INFINITY &&
         softcap >= 0.0 && softcap < INFINITY;
}

Tensor number(float value, const Tensor& like) {
  Tensor x = at::empty({}, like.options().dtype(at::kFloat));
  *x.mutable_data_ptr<float>() = value;
  return x;
}

// (factor of gradients now, factor applied in backward): gradient_scale() of kernels/loss.
std::pair<float, float> gradient_scale(int64_t count, c10::string_view reduction, const Tensor& x) {
  if (reduction != "mean") return {1.0f, 1.0f};
  const float inverse = 1.0f / std::max(1.0f, static_cast<float>(count));
  return x.scalar_type() == at::kHalf ? std::pair(1.0f, inverse) : std::pair(inverse, 1.0f);
}

Tensor reduce(const Tensor& losses, int64_t count, c10::string_view reduction) {
  const float* at = losses.const_data_ptr<float>();
  double total = std::accumulate(at, at + losses.numel(), 0.0);
  if (reduction == "mean") total /= static_cast<double>(static_cast<float>(count));
  return number(static_cast<float>(total), losses);
}

struct Options {
  int64_t v, ignore_index;
  double label_smoothing, z_loss, softcap;
  const float* scale;  // of the rows' gradients
  int64_t scale_stride;
};

// losses [N] and, unless it is undefined, the gradient of logits [N, Vp], which may be logits.
void run_rows(const Tensor& logits, const Tensor& grad, const int64_t* targets, float* losses,
              const Options& how) {
  CrossEntropyRows rows;
  rows.logits = logits.const_data_ptr();
  rows.stride = logits.stride(0);
  rows.n = logits.size(0);
  rows.v = how.v;
  rows.width = logits.size(1);
  rows.targets = targets;
  rows.ignore_index = how.ignore_index;
  rows.grad_stride = grad.defined() ? grad.stride(0) : 0;
  rows.scale = how.scale;
  rows.scale_stride = how.scale_stride;
  rows.label_smoothing = how.label_smoothing;
  rows.z_loss = how.z_loss;
  rows.softcap = how.softcap;
  cross_entropy_rows(rows, grad.defined() ? grad.mutable_data_ptr() : nullptr, losses,
                     dtype_of(logits), at::get_num_threads());
}

Three forward(const Tensor& logits, const Tensor& targets_at, std::optional<c10::SymInt> vocab_size,
              int64_t ignore_index, c10::string_view reduction, double label_smoothing,
              double z_loss, double softcap, bool need_grad) {
  const auto ask_python = [&] {
    return python(fwd_op(), logits, targets_at, vocab_size, ignore_index, reduction,
                  label_smoothing, z_loss, softcap, need_grad);
  };
  if (python_serves() || logits.dim() < 1 || !is_dense(logits) ||
      !is_usual(logits, targets_at, vocab_size, logits.size(-1), reduction, label_smoothing, z_loss,
                softcap)) {
    return ask_python();
  }
  const int64_t columns = logits.size(-1), n = targets_at.numel(), v = classes(vocab_size, columns);
  Tensor rows = logits.reshape({n, columns});
  if (columns != 1 && rows.stride(1) != 1) rows = rows.contiguous();
  const Tensor targets = targets_at.contiguous();
  const int64_t* at = targets.const_data_ptr<int64_t>();
  const int64_t count = count_targets(at, n, v, ignore_index);
  if (count < 0) return ask_python();  // which names the target
  const auto [scale, factor] = gradient_scale(count, reduction, logits);
  Tensor grad = need_grad ? at::empty({n, columns}, logits.options()) : Tensor();
  Tensor losses = at::empty(targets.sizes(), logits.options().dtype(at::kFloat));
  run_rows(rows, grad, at, losses.mutable_data_ptr<float>(),
           {v, ignore_index, label_smoothing, z_loss, softcap, &scale, 0});
  return {reduction == "none" ? losses : reduce(losses, count, reduction),
          need_grad ? grad.view(logits.sizes()) : at::empty({0}, logits.options()),
          number(factor, losses)};
}

// The incoming gradient times the saved factor, if both are numbers on the CPU.
std::optional<float> product_of(const Tensor& dloss, const Tensor& factor) {
  if (!is_plain(dloss) || !is_plain(factor) || dloss.dim() || dloss.scalar_type() != at::kFloat ||
      !dloss.is_cpu() || !factor.is_cpu()) {
    return std::nullopt;
  }
  return *dloss.const_data_ptr<float>() * *factor.const_data_ptr<float>();
}

struct CrossEntropyBackward : public Node {
  SavedVariable dlogits, factor;

  std::string name() const override { return "CrossEntropyBackward"; }
  void release_variables() override {
    dlogits.reset_data();
    factor.reset_data();
  }
  variable_list apply(variable_list&& grads) override {
    check_one_backward("cross_entropy", grads);
    refuse_results("cross_entropy", grads);
    if (!grads[0].defined()) return variable_list(1);
    const auto self = getptr();
    Tensor grad = result_of(dlogits, self);
    const Tensor factor_at = factor.unpack(self);
    // The gradient is this node's own memory: it is scaled in place unless it is needed again.
    const bool keep = torch::autograd::get_current_graph_task_keep_graph();
    if (!keep && product_of(grads[0], factor_at) == 1.0f && is_plain(grad)) return {grad};
    const Tensor by = at::mul(grads[0], factor_at);
    if (keep || !is_plain(grad) || !is_plain(by)) {
      static const auto op =
          find<Tensor(const Tensor&, const Tensor&)>("fastpar::cross_entropy_bwd");
      return {call_bwd(op, grad, by)};
    }
    at::AutoDispatchBelowADInplaceOrView guard;
    if (grad.is_cpu()) {
      at::mul_out(grad, grad, by.dim() ? by.unsqueeze(-1) : by);
    } else {
      static const auto op = find<void(Tensor&, const Tensor&)>("fastpar::cross_entropy_bwd_");
      op.call(grad, by);
    }
    return {grad};
  }
};

Three recorded(const Tensor& logits, const Tensor& targets, std::optional<c10::SymInt> vocab_size,
               int64_t ignore_index, c10::string_view reduction, double label_smoothing,
               double z_loss, double softcap, bool need_grad) {
  const bool record = is_recorded("cross_entropy", logits);
  Three out = below_autograd([&] {
    return fwd_op().call(logits, targets, std::move(vocab_size), ignore_index, reduction,
                         label_smoothing, z_loss, softcap, need_grad);
  });
  if (!record) return out;
  auto node = make_node<CrossEntropyBackward>();
  node->set_next_edges(torch::autograd::collect_next_edges(logits));
  torch::autograd::create_gradient_edge(std::get<0>(out), node);
  node->dlogits = saved_result(std::get<1>(out), node);
  node->factor = SavedVariable(std::get<2>(out), false);
  return out;
}

// linear_cross_entropy

// Rows of a chunk on a CPU: default_chunk_rows() of kernels/loss.
int64_t chunk_rows_of(int64_t n, int64_t c) {
  const int64_t limit = c >= 512 ? 512 : 352;
  const int64_t chunks = std::max<int64_t>(1, (n + limit - 1) / limit);
  return std::max<int64_t>(1, (n + chunks - 1) / chunks);
}

struct Gradients {
  Tensor dx, dweight;  // dweight in fp32; [0] where not needed
};

// Of x [N, C], with losses [N] (may be null).
Gradients run_chunks(const Tensor& x, const Tensor& weight, const int64_t* targets, float* losses,
                     const Options& how, int64_t chunk_rows, bool need_dx, bool need_dweight) {
  const int64_t n = x.size(0), c = x.size(1);
  const int64_t most = chunk_rows ? chunk_rows : chunk_rows_of(n, c);
  Gradients out{need_dx ? at::empty({n, c}, x.options()) : at::empty({0}, x.options()), {}};
  std::vector<float> unread;
  if (losses == nullptr) unread.resize(static_cast<size_t>(std::min(most, n)));
  for (int64_t start = 0; start < n; start += most) {
    const int64_t rows = std::min(most, n - start);
    const Tensor part = x.narrow(0, start, rows);
    const Tensor logits = product(part, weight.t(), workspace(rows, weight.size(0), x));
    Options here = how;
    here.scale += start * how.scale_stride;
    run_rows(logits, need_dx || need_dweight ? logits : Tensor(), targets + start,
             losses ? losses + start : unread.data(), here);
    if (need_dx) product(logits, weight, out.dx.narrow(0, start, rows));
    if (need_dweight) accumulate(out.dweight, logits.t(), part);
  }
  if (!out.dweight.defined()) {
    const auto floats = weight.options().dtype(at::kFloat);
    out.dweight = need_dweight ? at::zeros(weight.sizes(), floats) : at::empty({0}, floats);
  }
  return out;
}

bool is_usual_product(const Tensor& x, const Tensor& weight, const c10::SymInt& chunk_rows) {
  return is_dense(x) && is_dense(weight) && weight.dim() == 2 && x.dim() > 0 &&
         x.size(-1) == weight.size(1) && x.scalar_type() == weight.scalar_type() &&
         x.device() == weight.device() && chunk_rows.expect_int() >= 0;
}

Four linear_forward(const Tensor& x_at, const Tensor& weight, const Tensor& targets_at,
                    std::optional<c10::SymInt> vocab_size, int64_t ignore_index,
                    c10::string_view reduction, double label_smoothing, double z_loss,
                    double softcap, c10::SymInt chunk_rows, bool need_dx, bool need_dweight) {
  const auto ask_python = [&] {
    return python(linear_op(), x_at, weight, targets_at, vocab_size, ignore_index, reduction,
                  label_smoothing, z_loss, softcap, chunk_rows, need_dx, need_dweight);
  };
  if (python_serves() || !is_usual_product(x_at, weight, chunk_rows) ||
      !is_usual(x_at, targets_at, vocab_size, weight.size(0), reduction, label_smoothing, z_loss,
                softcap)) {
    return ask_python();
  }
  const int64_t n = targets_at.numel(), v = classes(vocab_size, weight.size(0));
  const Tensor x = x_at.reshape({n, weight.size(1)}).contiguous();
  const Tensor targets = targets_at.contiguous();
  const int64_t* at = targets.const_data_ptr<int64_t>();
  const int64_t count = count_targets(at, n, v, ignore_index);
  if (count < 0) return ask_python();
  const auto [scale, factor] = gradient_scale(count, reduction, x);
  const bool now = reduction != "none";
  Tensor losses = at::empty(targets.sizes(), x.options().dtype(at::kFloat));
  auto [dx, dweight] = run_chunks(x, weight, at, losses.mutable_data_ptr<float>(),
                                  {v, ignore_index, label_smoothing, z_loss, softcap, &scale, 0},
                                  chunk_rows.expect_int(), need_dx && now, need_dweight && now);
  return {now ? reduce(losses, count, reduction) : losses,
          need_dx && now ? dx.view(x_at.sizes()) : dx, std::move(dweight), number(factor, losses)};
}

Two linear_backward(const Tensor& dlosses, const Tensor& x_at, const Tensor& weight,
                    const Tensor& targets_at, std::optional<c10::SymInt> vocab_size,
                    int64_t ignore_index, double label_smoothing, double z_loss, double softcap,
                    c10::SymInt chunk_rows, bool need_dx, bool need_dweight) {
  if (python_serves()) {
    return python(linear_bwd_op(), dlosses, x_at, weight, targets_at, vocab_size, ignore_index,
                  label_smoothing, z_loss, softcap, chunk_rows, need_dx, need_dweight);
  }
  const int64_t n = targets_at.numel(), v = classes(vocab_size, weight.size(0));
  check_memory(is_usual_product(x_at, weight, chunk_rows) && dlosses.numel() == n &&
                   is_usual(x_at, targets_at, vocab_size, weight.size(0), "none", label_smoothing,
                            z_loss, softcap),
               "linear_cross_entropy_bwd");
  const Tensor x = x_at.reshape({n, weight.size(1)}).contiguous();
  const Tensor targets = targets_at.contiguous();
  Tensor scale = dlosses.to(at::kFloat).contiguous(), largest;
  if (x.scalar_type() == at::kHalf) {  // the stored gradients of the logits stay near 1
    float most = 0.0f;
    const float* values = scale.const_data_ptr<float>();
    for (int64_t i = 0; i < n; ++i) {
      most = std::isnan(values[i]) || std::isnan(most) ? NAN : std::max(most, std::abs(values[i]));
    }
    largest = number(most > 0.0f ? most : 1.0f, scale);
    scale = at::div(scale, largest);
  }
  const int64_t* at = targets.const_data_ptr<int64_t>();
  check_memory(count_targets(at, n, v, ignore_index) >= 0, "linear_cross_entropy_bwd");
  auto [dx, dweight] = run_chunks(
      x, weight, at, nullptr,
      {v, ignore_index, label_smoothing, z_loss, softcap, scale.const_data_ptr<float>(), 1},
      chunk_rows.expect_int(), need_dx, need_dweight);
  if (largest.defined()) {
    dx.mul_(largest);
    dweight.mul_(largest);
  }
  return {need_dx ? dx.view(x_at.sizes()) : dx, std::move(dweight)};
}

struct LinearCrossEntropyBackward : public Node {
  SavedVariable dx, dweight, factor;  // or x, weight and targets, if rows are not reduced
  std::optional<c10::SymInt> vocab_size;
  int64_t ignore_index;
  double label_smoothing, z_loss, softcap;
  c10::SymInt chunk_rows = 0;
  bool rows, need_dx, need_dweight;
  at::ScalarType dtype;

  std::string name() const override { return "LinearCrossEntropyBackward"; }
  void release_variables() override {
    for (SavedVariable* x : {&dx, &dweight, &factor}) x->reset_data();
  }

  // grad times by, as dtype; where grad is not read again, in its memory: scaled() of kernels/loss.
  Tensor scaled(Tensor grad, const Tensor& by, bool is_one, bool keep) const {
    if (is_one) return grad.to(dtype, /*non_blocking=*/false, /*copy=*/keep);
    if (!is_plain(grad) || !is_plain(by)) return at::mul(grad, by).to(dtype);
    at::AutoDispatchBelowADInplaceOrView guard;
    if (!keep && (grad.scalar_type() == dtype || grad.is_cpu())) {
      return grad.mul_(by).to(dtype);
    }
    if (grad.scalar_type() == dtype) return at::mul(grad, by);
    Tensor out = at::empty_like(grad, grad.options().dtype(dtype));
    at::mul_out(out, grad, by);
    return out;
  }

  variable_list apply(variable_list&& grads) override {
    check_one_backward("linear_cross_entropy", grads);
    refuse_results("linear_cross_entropy", grads);
    variable_list out(2);
    if (!grads[0].defined()) return out;
    TORCH_CHECK(
        task_should_compute_output(0) <= need_dx && task_should_compute_output(1) <= need_dweight,
        "linear_cross_entropy: expected a call that was recorded with gradients, got a "
        "backward of one recorded without; record it where gradients are enabled and "
        "required");
    const auto self = getptr();
    Tensor first = rows ? dx.unpack(self) : result_of(dx, self);
    Tensor second = rows ? dweight.unpack(self) : result_of(dweight, self);
    const Tensor last = factor.unpack(self);
    const bool keep = torch::autograd::get_current_graph_task_keep_graph();
    if (rows) {
      std::tie(first, second) =
          call_bwd(linear_bwd_op(), grads[0], first, second, last, vocab_size, ignore_index,
                   label_smoothing, z_loss, softcap, chunk_rows, need_dx, need_dweight);
      if (need_dx) out[0] = std::move(first);
      if (need_dweight) out[1] = second.to(dtype);
      return out;
    }
    const bool is_one = product_of(grads[0], last) == 1.0f;
    const Tensor by = is_one ? Tensor() : at::mul(grads[0], last);
    if (need_dx) out[0] = scaled(std::move(first), by, is_one, keep);
    if (need_dweight) out[1] = scaled(std::move(second), by, is_one, keep);
    return out;
  }
};

Four linear_recorded(const Tensor& x, const Tensor& weight, const Tensor& targets,
                     std::optional<c10::SymInt> vocab_size, int64_t ignore_index,
                     c10::string_view reduction, double label_smoothing, double z_loss,
                     double softcap, c10::SymInt chunk_rows, bool need_dx, bool need_dweight) {
  const bool record = is_recorded("linear_cross_entropy", x, weight);
  Four out = below_autograd([&] {
    return linear_op().call(x, weight, targets, vocab_size, ignore_index, reduction,
                            label_smoothing, z_loss, softcap, chunk_rows, need_dx, need_dweight);
  });
  if (!record) return out;
  auto& [loss, dx, dweight, factor] = out;
  auto node = make_node<LinearCrossEntropyBackward>();
  node->set_next_edges(torch::autograd::collect_next_edges(x, weight));
  node->rows = reduction == "none";
  node->need_dx = need_dx;
  node->need_dweight = need_dweight;
  node->dtype = weight.scalar_type();
  torch::autograd::create_gradient_edge(loss, node);
  if (node->rows) {
    node->vocab_size = std::move(vocab_size);
    node->ignore_index = ignore_index;
    node->label_smoothing = label_smoothing;
    node->z_loss = z_loss;
    node->softcap = softcap;
    node->chunk_rows = std::move(chunk_rows);
  }
  node->dx = node->rows ? SavedVariable(x, false) : saved_result(dx, node);
  node->dweight = node->rows ? SavedVariable(weight, false) : saved_result(dweight, node);
  node->factor = SavedVariable(node->rows ? targets : factor, false);
  return out;
}

}  // namespace loss
}  // namespace fastpar::nodes

TORCH_LIBRARY_FRAGMENT(fastpar, m) {
  using namespace fastpar::nodes;
  define(m,
         "cross_entropy(Tensor logits, Tensor targets, SymInt? vocab_size, int ignore_index, "
         "str reduction, float label_smoothing, float z_loss, float softcap, bool need_grad)"
         " -> (Tensor, Tensor, Tensor)",
         &loss::forward, &loss::recorded);
  define(m,
         "linear_cross_entropy(Tensor x, Tensor weight, Tensor targets, SymInt? vocab_size, "
         "int ignore_index, str reduction, float label_smoothing, float z_loss, float softcap, "
         "SymInt chunk_rows, bool need_dx, bool need_dweight) -> (Tensor, Tensor, Tensor, Tensor)",
         &loss::linear_forward, &loss::linear_recorded);
  define(m,
         "linear_cross_entropy_bwd(Tensor dlosses, Tensor x, Tensor weight, Tensor targets, "
         "SymInt? vocab_size, int ignore_index, float label_smoothing, float z_loss, "
         "float softcap, SymInt chunk_rows, bool need_dx, bool need_dweight) -> (Tensor, Tensor)",
         &loss::linear_backward);
  m.impl("cross_entropy_bwd", refusal());
}
