// kernels/norm: LayerNorm and RMSNorm, alone or after a residual add.
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <cmath>

#include "node.h"

namespace fastpar::nodes {
namespace norm {

using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Five = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
using Type = at::ScalarType;
using MaybeType = std::optional<Type>;
using MaybeNumbers = at::OptionalSymIntArrayRef;
using MaybeNumber = std::optional<c10::SymInt>;

// The mask of a dropout, the last arguments of an op; Rng of kernels/philox.py.
#define MASK_TYPES const Maybe&, c10::SymInt, int64_t, MaybeNumber, MaybeNumbers
#define MASK_ARGUMENTS \
  const Maybe &key, c10::SymInt site, int64_t threshold, MaybeNumber row_count, MaybeNumbers place
#define MASK key, std::move(site), threshold, std::move(row_count), place

using Fwd = Two(const Tensor&, const Maybe&, const Maybe&, double, bool);
using ResidualFwd = Three(const Tensor&, const Tensor&, const Maybe&, const Maybe&, const Maybe&,
                          double, bool, MASK_TYPES);
using Bwd = Five(const Tensor&, const Maybe&, const Tensor&, const Maybe&, const Tensor&, Type,
                 MaybeType, MaybeType, bool, MASK_TYPES);

const auto& fwd_op() {
  static const auto op = find<Fwd>("fastpar::layer_norm");
  return op;
}
const auto& residual_op() {
  static const auto op = find<ResidualFwd>("fastpar::residual_layer_norm");
  return op;
}
const auto& bwd_op() {
  static const auto op = find<Bwd>("fastpar::layer_norm_bwd");
  return op;
}

constexpr int64_t kMaxColumns = 16384;  // MAX_COLUMNS of kernels/norm

// What check() of kernels/norm allows.
bool is_usual(const Tensor& x, const Maybe& weight, const Maybe& bias, double eps) {
  if (!is_dense(x) || !is_number(x.scalar_type()) || x.dim() == 0) return false;
  const int64_t c = x.size(-1);
  return c >= 1 && c <= kMaxColumns && (!has(weight) || is_row(*weight, c, x)) &&
         (!bias || is_row(*bias, c, x)) && eps >= 0.0 && eps < INFINITY;
}

// What check_residual() allows.
bool is_usual(const Tensor& x, const Tensor& residual, const Maybe& weight, const Maybe& bias,
              const Maybe& x_bias, double eps) {
  if (!is_usual(residual, weight, bias, eps) || !is_dense(x) || x.sizes() != residual.sizes() ||
      x.device() != residual.device()) {
    return false;
  }
  const bool narrow = residual.scalar_type() == at::kFloat && is_number(x.scalar_type());
  return (narrow || x.scalar_type() == residual.scalar_type()) &&
         (!x_bias || is_row(*x_bias, x.size(-1), x));
}

// The weight as floats, ones if it is absent.
class Weight {
 public:
  Weight(const Maybe& x, int64_t c) : own_(x, c, has(x)), ones_(has(x) ? 0 : c, 1.0f) {}
  operator const float*() const {
    return ones_.empty() ? static_cast<const float*>(own_) : ones_.data();
  }

 private:
  Floats own_;
  std::vector<float> ones_;
};

// The mask of x's rows: n of c columns.
MaskBlock mask_of(const Tensor& x, int64_t n, int64_t c, const Maybe& key, const c10::SymInt& site,
                  int64_t threshold, const MaybeNumber& rows, const MaybeNumbers& place) {
  if (!has(key)) return no_mask(n, c);
  TORCH_CHECK_VALUE(threshold >= 0 && threshold <= 255,
                    "dropout: expected 0 <= threshold <= 255, got threshold=", threshold,
                    "; use quantize_p");
  const Tensor numbers = key->contiguous();
  const int64_t* at = numbers.const_data_ptr<int64_t>();
  MaskBlock block{at[0],
                  at[1],
                  static_cast<int>(site.expect_int()),
                  static_cast<int>(threshold),
                  n,
                  1,
                  1,
                  c,
                  0,
                  0,
                  0,
                  0};
  if (place) {
    block.first_row = (*place)[0].expect_int();
    block.low = (*place)[1].expect_int();
    block.high = (*place)[2].expect_int();
  }
  if (rows) {
    block.rows = rows->expect_int();
  } else {
    set_mask_shape(x.sizes(), &block);
  }
  return block;
}

// The parts that the two forward ops share.
Tensor normalize(const Tensor& x, const Tensor* residual, const Maybe& weight, const Maybe& bias,
                 const Maybe& x_bias, double eps, bool rms, const MaskBlock& at, Tensor* total,
                 Tensor* stats) {
  const int64_t c = x.size(-1), n = x.numel() / c;
  Tensor y = at::empty(x.sizes(), x.options());
  *stats = at::empty({rms ? 1 : 2, n}, x.options().dtype(at::kFloat));
  if (n) {
    float* s = stats->mutable_data_ptr<float>();
    layer_norm_fwd(x.const_data_ptr(), residual ? residual->const_data_ptr() : nullptr,
                   Floats(x_bias, c, residual), Weight(weight, c), Floats(bias, c),
                   residual ? total->mutable_data_ptr() : nullptr, y.mutable_data_ptr(),
                   rms ? nullptr : s, rms ? s : s + n, dtype_of(x), n, c, static_cast<float>(eps),
                   rms, at, at::get_num_threads());
  }
  return y;
}

Two forward(const Tensor& x_at, const Maybe& weight, const Maybe& bias, double eps, bool rms) {
  if (python_serves() || !is_usual(x_at, weight, bias, eps)) {
    return python(fwd_op(), x_at, weight, bias, eps, rms);
  }
  const Tensor x = x_at.contiguous();
  const int64_t c = x.size(-1);
  Tensor stats;
  Tensor y =
      normalize(x, nullptr, weight, bias, {}, eps, rms, no_mask(x.numel() / c, c), nullptr, &stats);
  return {std::move(y), std::move(stats)};
}

Three residual_forward(const Tensor& x_at, const Tensor& residual, const Maybe& weight,
                       const Maybe& bias, const Maybe& x_bias, double eps, bool rms,
                       MASK_ARGUMENTS) {
  if (python_serves() || !is_usual(x_at, residual, weight, bias, x_bias, eps)) {
    return python(residual_op(), x_at, residual, weight, bias, x_bias, eps, rms, MASK);
  }
  const Tensor r = residual.contiguous();
  const Tensor x = x_at.to(r.scalar_type()).contiguous();
  const int64_t c = x.size(-1), n = x.numel() / c;
  Tensor total = at::empty(x.sizes(), x.options()), stats;
  Tensor y = normalize(x, &r, weight, bias, x_bias, eps, rms,
                       mask_of(x, n, c, key, site, threshold, row_count, place), &total, &stats);
  return {std::move(y), std::move(total), std::move(stats)};
}

Five backward(const Tensor& dy_at, const Maybe& dtotal_at, const Tensor& x_at, const Maybe& weight,
              const Tensor& stats, Type x_dtype, MaybeType bias_dtype, MaybeType x_bias_dtype,
              bool rms, MASK_ARGUMENTS) {
  if (python_serves()) {
    return python(bwd_op(), dy_at, dtotal_at, x_at, weight, stats, x_dtype, bias_dtype,
                  x_bias_dtype, rms, MASK);
  }
  const Tensor dy = dy_at.contiguous(), x = x_at.contiguous();
  const Tensor dtotal = has(dtotal_at) ? dtotal_at->contiguous() : Tensor();
  const int64_t c = x.size(-1), n = x.numel() / c;
  const bool masked = has(key);
  check_memory(is_like(dy, x) && (!dtotal.defined() || is_like(dtotal, x)) &&
                   (!has(weight) || is_row(*weight, c, x)) && are_floats(stats, (rms ? 1 : 2) * n),
               "layer_norm_bwd");
  Tensor dsum = at::empty(x.sizes(), x.options());
  Tensor dx = masked ? at::empty(x.sizes(), x.options()) : Tensor();
  const auto row = [&](Type type) {
    const auto options = x.options().dtype(type);
    return n ? at::empty({c}, options) : at::zeros({c}, options);
  };
  Tensor dweight, dbias, dx_bias;
  if (has(weight)) dweight = row(weight->scalar_type());
  if (bias_dtype) dbias = row(*bias_dtype);
  if (x_bias_dtype) dx_bias = row(*x_bias_dtype);
  if (n) {
    const float* s = stats.const_data_ptr<float>();
    Sums of_weight(dweight), of_bias(dbias), of_x_bias(dx_bias);
    layer_norm_bwd(dy.const_data_ptr(), dtotal.defined() ? dtotal.const_data_ptr() : nullptr,
                   x.const_data_ptr(), Weight(weight, c), rms ? nullptr : s, rms ? s : s + n,
                   dsum.mutable_data_ptr(), masked ? dx.mutable_data_ptr() : nullptr, of_weight,
                   of_bias, of_x_bias, dtype_of(x), n, c, rms,
                   mask_of(x, n, c, key, site, threshold, row_count, place), at::get_num_threads());
    for (Sums* sums : {&of_weight, &of_bias, &of_x_bias}) sums->store();
  }
  if (x_dtype != x.scalar_type()) dx = (masked ? dx : dsum).to(x_dtype);
  const auto or_empty = [&](Tensor& t, Type type) {
    return t.defined() ? std::move(t) : at::empty({0}, x.options().dtype(type));
  };
  return {std::move(dsum), or_empty(dx, x_dtype), or_empty(dweight, at::kFloat),
          or_empty(dbias, at::kFloat), or_empty(dx_bias, at::kFloat)};
}

struct LayerNormBackward : public Node {
  SavedVariable rows, weight, stats, key;
  c10::SymInt site = 0;
  int64_t threshold = 0;
  MaybeNumber row_count;
  std::optional<std::vector<c10::SymInt>> place;
  bool plain = true, rms, has_weight, has_key = false;
  Type x_dtype, rows_dtype;
  MaybeType bias_dtype, x_bias_dtype;

  std::string name() const override { return "LayerNormBackward"; }
  void release_variables() override {
    for (SavedVariable* x : {&rows, &weight, &stats, &key}) x->reset_data();
  }
  variable_list apply(variable_list&& grads) override {
    check_one_backward(rms ? "rms_norm" : "layer_norm", grads);
    variable_list out(plain ? 3 : 5);
    const Tensor dtotal = plain ? Tensor() : grads[1];
    if (!grads[0].defined() && !dtotal.defined()) return out;
    const auto self = getptr();
    const Tensor x = rows.unpack(self), s = stats.unpack(self);
    const Maybe w = has_weight ? Maybe(weight.unpack(self)) : Maybe();
    const Maybe k = has_key ? Maybe(key.unpack(self)) : Maybe();
    const Tensor dy = grads[0].defined() ? grads[0] : at::zeros_like(x);
    auto [dsum, dx, dweight, dbias, dx_bias] =
        call_bwd(bwd_op(), dy, maybe(dtotal), x, w, s, x_dtype, bias_dtype, x_bias_dtype, rms, k,
                 site, threshold, row_count, place ? MaybeNumbers(*place) : MaybeNumbers());
    int i = 0;
    out[i++] = has_key || x_dtype != rows_dtype ? std::move(dx) : dsum;
    if (!plain) out[i++] = std::move(dsum);
    if (has_weight) out[i] = std::move(dweight);
    ++i;
    if (bias_dtype) out[i] = std::move(dbias);
    if (x_bias_dtype) out[4] = std::move(dx_bias);
    return out;
  }
};

MaybeType type_of(const Maybe& x) { return x ? MaybeType(x->scalar_type()) : MaybeType(); }

Two recorded(const Tensor& x, const Maybe& weight, const Maybe& bias, double eps, bool rms) {
  const bool record = is_recorded("layer_norm", x, weight, bias);
  Two out = below_autograd([&] { return fwd_op().call(x, weight, bias, eps, rms); });
  if (!record) return out;
  auto node = make_node<LayerNormBackward>();
  node->set_next_edges(torch::autograd::collect_next_edges(x, weight, bias));
  node->rms = rms;
  node->x_dtype = node->rows_dtype = x.scalar_type();
  node->bias_dtype = type_of(bias);
  torch::autograd::create_gradient_edge(std::get<0>(out), node);
  node->rows = SavedVariable(x, false);
  node->has_weight = has(weight);
  node->weight = saved(weight);
  node->stats = SavedVariable(std::get<1>(out), false);
  return out;
}

Three residual_recorded(const Tensor& x, const Tensor& residual, const Maybe& weight,
                        const Maybe& bias, const Maybe& x_bias, double eps, bool rms,
                        MASK_ARGUMENTS) {
  const bool record = is_recorded("residual_layer_norm", x, residual, weight, bias, x_bias);
  Three out = below_autograd([&] {
    return residual_op().call(x, residual, weight, bias, x_bias, eps, rms, key, site, threshold,
                              row_count, place);
  });
  if (!record) return out;
  auto& [y, total, stats] = out;
  auto node = make_node<LayerNormBackward>();
  node->set_next_edges(torch::autograd::collect_next_edges(x, residual, weight, bias, x_bias));
  node->plain = false;
  node->rms = rms;
  node->x_dtype = x.scalar_type();
  node->rows_dtype = residual.scalar_type();
  node->bias_dtype = type_of(bias);
  node->x_bias_dtype = type_of(x_bias);
  if (has(key)) {
    node->has_key = true;
    node->key = SavedVariable(*key, false);
    node->site = std::move(site);
    node->threshold = threshold;
    node->row_count = std::move(row_count);
    if (place) node->place = place->vec();
  }
  torch::autograd::create_gradient_edge(y, node);
  torch::autograd::create_gradient_edge(total, node);
  node->rows = SavedVariable(total, true);
  node->has_weight = has(weight);
  node->weight = saved(weight);
  node->stats = SavedVariable(stats, false);
  return out;
}

}  // namespace norm
}  // namespace fastpar::nodes

#undef MASK
#define MASK \
  ", Tensor? key=None, SymInt site=0, int threshold=0, SymInt? rows=None, SymInt[]? place=None)"
TORCH_LIBRARY_FRAGMENT(fastpar, m) {
  using namespace fastpar::nodes;
  define(m,
         "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps, bool rms) -> (Tensor, "
         "Tensor)",
         &norm::forward, &norm::recorded);
  define(
      m,
      "residual_layer_norm(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, Tensor? x_bias,"
      " float eps, bool rms" MASK " -> (Tensor, Tensor, Tensor)",
      &norm::residual_forward, &norm::residual_recorded);
  define(m,
         "layer_norm_bwd(Tensor dy, Tensor? dtotal, Tensor x, Tensor? weight, Tensor stats,"
         " ScalarType x_dtype, ScalarType? bias_dtype, ScalarType? x_bias_dtype, bool rms" MASK
         " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
         &norm::backward);
}
#undef MASK
#undef MASK_TYPES
#undef MASK_ARGUMENTS
