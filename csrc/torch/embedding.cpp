// kernels/embedding: token plus position embedding, of torch's ops and the dropout's kernel.
#include <ATen/ops/embedding.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include "node.h"

namespace fastpar::nodes {
namespace lookup {

using Two = std::tuple<Tensor, Tensor>;
using Fwd = Tensor(const Tensor&, const Tensor&, const Maybe&, c10::SymInt, const Maybe&,
                   c10::SymInt, int64_t);
using Bwd = Two(const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, c10::SymInt, const Maybe&,
                c10::SymInt, int64_t);

const auto& fwd_op() {
  static const auto op = find<Fwd>("fastpar::embedding");
  return op;
}
const auto& bwd_op() {
  static const auto op = find<Bwd>("fastpar::embedding_bwd");
  return op;
}

// What _check() and _check_ids() of kernels/embedding allow.
bool is_usual(const Tensor& idx, const Tensor& wte, const Maybe& wpe, int64_t first) {
  const auto is_table = [](const Tensor& x) {
    return is_dense(x) && x.dim() == 2 &&
           (is_number(x.scalar_type()) || x.scalar_type() == at::kDouble);
  };
  if (!is_dense(idx) || idx.dim() != 2 || !is_table(wte) || idx.device() != wte.device() ||
      (idx.scalar_type() != at::kLong && idx.scalar_type() != at::kInt)) {
    return false;
  }
  if (wpe && (!is_table(*wpe) || wpe->size(1) != wte.size(1) || wpe->device() != wte.device() ||
              wpe->scalar_type() != wte.scalar_type() || first < 0 ||
              first + idx.size(1) > wpe->size(0))) {
    return false;
  }
  const Tensor ids = idx.contiguous();
  const auto inside = [&](const auto* at) {
    int64_t wrong = 0;
    for (int64_t i = 0; i < ids.numel(); ++i) wrong += at[i] < 0 || at[i] >= wte.size(0);
    return wrong == 0;
  };
  return ids.scalar_type() == at::kLong ? inside(ids.const_data_ptr<int64_t>())
                                        : inside(ids.const_data_ptr<int32_t>());
}

// x under the mask; in place if it is our own.
Tensor masked(const Tensor& x, const Maybe& key, const c10::SymInt& site, int64_t threshold,
              bool in_place) {
  if (!has(key)) return x;
  TORCH_CHECK_VALUE(threshold >= 0 && threshold <= 255,
                    "dropout: expected 0 <= threshold <= 255, got threshold=", threshold,
                    "; use quantize_p");
  Tensor y = in_place ? x : at::empty(x.sizes(), x.options());
  if (!x.numel()) return y;
  const Tensor numbers = key->contiguous();
  const int64_t* at = numbers.const_data_ptr<int64_t>();
  const MaskBlock block{at[0],
                        at[1],
                        static_cast<int>(site.expect_int()),
                        static_cast<int>(threshold),
                        x.size(0),
                        1,
                        x.size(1),
                        x.size(2),
                        0,
                        0,
                        0,
                        0};
  dropout(x.const_data_ptr(), y.mutable_data_ptr(), dtype_of(x), block, at::get_num_threads());
  return y;
}

Tensor forward(const Tensor& idx, const Tensor& wte, const Maybe& wpe, c10::SymInt first,
               const Maybe& key, c10::SymInt site, int64_t threshold) {
  if (python_serves() || !is_usual(idx, wte, wpe, first.expect_int()) ||
      (has(key) && !is_number(wte.scalar_type()))) {
    return python(fwd_op(), idx, wte, wpe, first, key, site, threshold);
  }
  Tensor x = at::embedding(wte, idx);
  if (wpe) x.add_(wpe->narrow(0, first.expect_int(), idx.size(1)));
  return masked(x, key, site, threshold, true);
}

Two backward(const Tensor& dx_at, const Tensor& idx, c10::SymInt rows_at, c10::SymInt positions_at,
             c10::SymInt first, const Maybe& key, c10::SymInt site, int64_t threshold) {
  const bool wide = dx_at.element_size() > 2;  // torch sums 16 bits in 16 bits
  if (python_serves() || !wide || (has(key) && !is_number(dx_at.scalar_type()))) {
    return python(bwd_op(), dx_at, idx, rows_at, positions_at, first, key, site, threshold);
  }
  check_memory(dx_at.dim() == 3 && idx.dim() == 2 && dx_at.size(0) == idx.size(0) &&
                   dx_at.size(1) == idx.size(1),
               "embedding_bwd");
  const Tensor dx = masked(dx_at.contiguous(), key, site, threshold, false);
  const int64_t rows = rows_at.expect_int(), positions = positions_at.expect_int();
  const int64_t c = dx.size(-1);
  Tensor dwte = rows ? at::embedding_dense_backward(dx, idx, rows, -1, false)
                     : at::empty({0, c}, dx.options());
  Tensor dwpe = at::zeros({positions, c}, dx.options());
  if (positions) {
    Tensor part = dwpe.narrow(0, first.expect_int(), idx.size(1));
    at::sum_out(part, dx, {0}, false);
  }
  return {std::move(dwte), std::move(dwpe)};
}

struct EmbeddingBackward : public Node {
  SavedVariable idx, key;
  bool has_key;
  c10::SymInt first, site, rows = 0, positions = 0;
  int64_t threshold;

  std::string name() const override { return "EmbeddingBackward"; }
  void release_variables() override {
    idx.reset_data();
    key.reset_data();
  }
  variable_list apply(variable_list&& grads) override {
    check_one_backward("embedding", grads);
    variable_list out(2);
    if (!grads[0].defined()) return out;
    const auto self = getptr();
    const bool of_wte = task_should_compute_output(0), of_wpe = task_should_compute_output(1);
    auto [dwte, dwpe] =
        call_bwd(bwd_op(), grads[0], idx.unpack(self), of_wte ? rows : c10::SymInt(0),
                 of_wpe ? positions : c10::SymInt(0), first,
                 has_key ? Maybe(key.unpack(self)) : Maybe(), site, threshold);
    if (of_wte) out[0] = std::move(dwte);
    if (of_wpe) out[1] = std::move(dwpe);
    return out;
  }
};

Tensor recorded(const Tensor& idx, const Tensor& wte, const Maybe& wpe, c10::SymInt first,
                const Maybe& key, c10::SymInt site, int64_t threshold) {
  const bool record = is_recorded("embedding", wte, wpe);
  Tensor x =
      below_autograd([&] { return fwd_op().call(idx, wte, wpe, first, key, site, threshold); });
  if (!record) return x;
  auto node = make_node<EmbeddingBackward>();
  node->set_next_edges(torch::autograd::collect_next_edges(wte, wpe));
  node->rows = wte.sym_size(0);
  if (wpe) node->positions = wpe->sym_size(0);
  node->first = std::move(first);
  node->site = std::move(site);
  node->threshold = threshold;
  node->idx = SavedVariable(idx, false);
  node->has_key = has(key);
  node->key = saved(key);
  torch::autograd::create_gradient_edge(x, node);
  return x;
}

}  // namespace lookup
}  // namespace fastpar::nodes

TORCH_LIBRARY_FRAGMENT(fastpar, m) {
  using namespace fastpar::nodes;
  define(m,
         "embedding(Tensor idx, Tensor wte, Tensor? wpe, SymInt first_position, Tensor? key=None, "
         "SymInt site=0, int threshold=0) -> Tensor",
         &lookup::forward, &lookup::recorded);
  define(
      m,
      "embedding_bwd(Tensor dx, Tensor idx, SymInt rows, SymInt positions, SymInt first_position, "
      "Tensor? key=None, SymInt site=0, int threshold=0) -> (Tensor, Tensor)",
      &lookup::backward);
}
