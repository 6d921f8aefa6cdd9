// kernels/rope: norm and rotation of the heads of a packed projection.
#include <ATen/ops/zeros.h>

#include <cmath>

#include "node.h"

namespace fastpar::nodes {
namespace rope {

using Three = std::tuple<Tensor, Tensor, Tensor>;
using Fwd = Three(const Tensor&, const Maybe&, const Maybe&, const Maybe&, bool, double);
using Bwd = Three(const Tensor&, const Tensor&, const Tensor&, const Maybe&, const Maybe&,
                  const Maybe&, const Maybe&, bool, double);

const auto& fwd_op() {
  static const auto op = find<Fwd>("fastpar::rope");
  return op;
}
const auto& bwd_op() {
  static const auto op = find<Bwd>("fastpar::rope_bwd");
  return op;
}

// Whether a contiguous copy of turns has the rows of x's last leading dimensions, so that row i of
// x has row i modulo their number.
bool repeats(const Tensor& turns, at::IntArrayRef lead) {
  int64_t first = 0;
  while (first < turns.dim() - 1 && turns.size(first) == 1) ++first;
  const auto rows = turns.sizes().slice(first, turns.dim() - 1 - first);
  return rows.size() <= lead.size() && rows == lead.slice(lead.size() - rows.size());
}

// turns, contiguous, with rows that repeat.
Maybe rows_of(const Maybe& turns, at::IntArrayRef lead) {
  if (!has(turns)) return {};
  if (repeats(*turns, lead)) return turns->contiguous();
  std::vector<int64_t> sizes = lead.vec();
  sizes.push_back(turns->size(-1));
  return turns->expand(sizes).contiguous();
}

RopeShape shape_of(int64_t n, int64_t groups, int64_t queries, int64_t d, const Maybe& turns,
                   const float* q_weight, const float* k_weight, bool norm, double eps) {
  return {n,
          groups,
          queries,
          d,
          has(turns) ? turns->const_data_ptr<float>() : nullptr,
          has(turns) ? turns->numel() / d : 1,
          q_weight,
          k_weight,
          norm,
          static_cast<float>(eps)};
}

// Whether turns has rows of d floats for leading dimensions `lead`.
bool fits(const Maybe& turns, at::IntArrayRef lead, int64_t d, const Tensor& x) {
  if (!has(turns)) return true;
  const int64_t dims = turns->dim() - 1;
  if (!is_dense(*turns) || turns->scalar_type() != at::kFloat || turns->device() != x.device() ||
      dims < 0 || dims > static_cast<int64_t>(lead.size()) || turns->size(-1) != d || d % 2) {
    return false;
  }
  for (int64_t i = 0; i < dims; ++i) {
    const int64_t size = turns->size(i);
    if (size != 1 && size != lead[lead.size() - dims + i]) return false;
  }
  return true;
}

// What check() of kernels/rope.py allows.
bool is_usual(const Tensor& qkv, const Maybe& turns, const Maybe& q_weight, const Maybe& k_weight,
              bool norm, double eps) {
  if (!is_dense(qkv) || !is_number(qkv.scalar_type()) || qkv.dim() < 3 || qkv.size(-3) < 3 ||
      qkv.size(-2) < 1 || qkv.size(-1) < 1 || !(eps >= 0.0 && eps < INFINITY) ||
      has(q_weight) != has(k_weight) || (has(q_weight) && !norm)) {
    return false;
  }
  const int64_t d = qkv.size(-1);
  return fits(turns, qkv.sizes().slice(0, qkv.dim() - 3), d, qkv) &&
         (!has(q_weight) || (is_row(*q_weight, d, qkv) && is_row(*k_weight, d, qkv)));
}

Three forward(const Tensor& qkv_at, const Maybe& turns, const Maybe& q_weight,
              const Maybe& k_weight, bool norm, double eps) {
  if (python_serves() || !is_usual(qkv_at, turns, q_weight, k_weight, norm, eps)) {
    return python(fwd_op(), qkv_at, turns, q_weight, k_weight, norm, eps);
  }
  const Tensor qkv = qkv_at.contiguous();
  const auto lead = qkv.sizes().slice(0, qkv.dim() - 3);
  const int64_t queries = qkv.size(-3) - 2, groups = qkv.size(-2), d = qkv.size(-1);
  std::vector<int64_t> sizes = lead.vec();
  sizes.insert(sizes.end(), {queries * groups, d});
  Tensor q = at::empty(sizes, qkv.options());
  sizes[lead.size()] = groups;
  Tensor k = at::empty(sizes, qkv.options()), v = at::empty(sizes, qkv.options());
  if (qkv.numel()) {
    const Maybe rows = rows_of(turns, lead);
    const nodes::Floats of_q(q_weight, d, has(q_weight)), of_k(k_weight, d, has(k_weight));
    rope_fwd(qkv.const_data_ptr(), q.mutable_data_ptr(), k.mutable_data_ptr(), v.mutable_data_ptr(),
             dtype_of(qkv),
             shape_of(v.numel() / (groups * d), groups, queries, d, rows, of_q, of_k, norm, eps),
             at::get_num_threads());
  }
  return {std::move(q), std::move(k), std::move(v)};
}

Three backward(const Tensor& dq_at, const Tensor& dk_at, const Tensor& dv_at, const Maybe& qkv_at,
               const Maybe& turns, const Maybe& q_weight, const Maybe& k_weight, bool norm,
               double eps) {
  if (python_serves()) {
    return python(bwd_op(), dq_at, dk_at, dv_at, qkv_at, turns, q_weight, k_weight, norm, eps);
  }
  const Tensor dq = dq_at.contiguous(), dk = dk_at.contiguous(), dv = dv_at.contiguous();
  const int64_t dims = dv.dim();
  bool fit = dims >= 2 && is_number(dv.scalar_type()) && is_like(dk, dv) && dq.dim() == dims &&
             dq.scalar_type() == dv.scalar_type() && dv.size(-2) >= 1 && dv.size(-1) >= 1 &&
             dq.size(-1) == dv.size(-1) && dq.size(-2) % dv.size(-2) == 0 &&
             dq.sizes().slice(0, dims - 2) == dv.sizes().slice(0, dims - 2);
  check_memory(fit, "rope_bwd");
  const auto lead = dv.sizes().slice(0, dims - 2);
  const int64_t groups = dv.size(-2), queries = dq.size(-2) / groups, d = dv.size(-1);
  std::vector<int64_t> sizes = lead.vec();
  sizes.insert(sizes.end(), {queries + 2, groups, d});
  Tensor dqkv = at::empty(sizes, dv.options());
  const Tensor qkv = has(qkv_at) ? qkv_at->contiguous() : dqkv;
  check_memory(is_like(qkv, dqkv) && norm == has(qkv_at) &&
                   is_usual(qkv, turns, q_weight, k_weight, norm, eps),
               "rope_bwd");
  const auto row = [&](const Maybe& weight) {
    const auto options = dv.options().dtype(has(weight) ? weight->scalar_type() : at::kFloat);
    if (!has(weight)) return at::empty({0}, options);
    return dqkv.numel() ? at::empty({d}, options) : at::zeros({d}, options);
  };
  Tensor dq_weight = row(q_weight), dk_weight = row(k_weight), none;
  if (dqkv.numel()) {
    const Maybe rows = rows_of(turns, lead);
    const nodes::Floats of_q(q_weight, d, has(q_weight)), of_k(k_weight, d, has(k_weight));
    Sums sum_q(has(q_weight) ? dq_weight : none), sum_k(has(k_weight) ? dk_weight : none);
    rope_bwd(dq.const_data_ptr(), dk.const_data_ptr(), dv.const_data_ptr(), qkv.const_data_ptr(),
             dqkv.mutable_data_ptr(), sum_q, sum_k, dtype_of(dv),
             shape_of(dv.numel() / (groups * d), groups, queries, d, rows, of_q, of_k, norm, eps),
             at::get_num_threads());
    sum_q.store();
    sum_k.store();
  }
  return {std::move(dqkv), std::move(dq_weight), std::move(dk_weight)};
}

struct RopeBackward : public Node {
  SavedVariable qkv, turns, q_weight, k_weight;  // qkv only for the norm
  bool norm, has_turns, has_weights;
  double eps;

  std::string name() const override { return "RopeBackward"; }
  void release_variables() override {
    for (SavedVariable* x : {&qkv, &turns, &q_weight, &k_weight}) x->reset_data();
  }
  variable_list apply(variable_list&& grads) override {
    check_one_backward("rope", grads);
    variable_list out(4);
    if (!grads[0].defined() && !grads[1].defined() && !grads[2].defined()) return out;
    for (uint32_t i = 0; i < 3; ++i) {
      if (!grads[i].defined()) grads[i] = input_metadata(i).zeros_like();
    }
    const auto self = getptr();
    const auto unpack = [&](SavedVariable& x, bool there) {
      return there ? Maybe(x.unpack(self)) : Maybe();
    };
    auto [dqkv, dq_weight, dk_weight] = call_bwd(
        bwd_op(), grads[0], grads[1], grads[2], unpack(qkv, norm), unpack(turns, has_turns),
        unpack(q_weight, has_weights), unpack(k_weight, has_weights), norm, eps);
    out[0] = std::move(dqkv);
    if (has_weights) {
      out[2] = std::move(dq_weight);
      out[3] = std::move(dk_weight);
    }
    return out;
  }
};

Three recorded(const Tensor& qkv, const Maybe& turns, const Maybe& q_weight, const Maybe& k_weight,
               bool norm, double eps) {
  const bool record = is_recorded("rope", qkv, q_weight, k_weight);
  Three out =
      below_autograd([&] { return fwd_op().call(qkv, turns, q_weight, k_weight, norm, eps); });
  if (!record) return out;
  auto node = make_node<RopeBackward>();
  node->set_next_edges(torch::autograd::collect_next_edges(qkv, Maybe(), q_weight, k_weight));
  node->norm = norm;
  node->eps = eps;
  node->has_turns = has(turns);
  node->has_weights = has(q_weight);
  torch::autograd::create_gradient_edge(std::get<0>(out), node);
  torch::autograd::create_gradient_edge(std::get<1>(out), node);
  torch::autograd::create_gradient_edge(std::get<2>(out), node);
  if (norm) node->qkv = SavedVariable(qkv, false);
  node->turns = saved(turns);
  node->q_weight = saved(q_weight);
  node->k_weight = saved(k_weight);
  return out;
}

}  // namespace rope
}  // namespace fastpar::nodes

TORCH_LIBRARY_FRAGMENT(fastpar, m) {
  using namespace fastpar::nodes;
  define(m,
         "rope(Tensor qkv, Tensor? turns, Tensor? q_weight, Tensor? k_weight, bool norm, float eps)"
         " -> (Tensor, Tensor, Tensor)",
         &rope::forward, &rope::recorded);
  define(m,
         "rope_bwd(Tensor dq, Tensor dk, Tensor dv, Tensor? qkv, Tensor? turns, Tensor? q_weight,"
         " Tensor? k_weight, bool norm, float eps) -> (Tensor, Tensor, Tensor)",
         &rope::backward);
}
