// kernels/attention: the C++ kernel's calls. Statistics of two numbers a row are this kernel's.
#include <ATen/ops/zeros.h>

#include <cmath>

#include "node.h"

namespace fastpar::nodes {
namespace flash {

using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

// The arguments after the tensors: how, which mask, which documents.
#define HOW_TYPES                                                                              \
  bool, std::optional<double>, const Maybe&, c10::SymInt, int64_t, const Maybe&, const Maybe&, \
      std::optional<c10::SymInt>
#define HOW_ARGUMENTS                                                                \
  bool causal, std::optional<double> scale, const Maybe &key, c10::SymInt site_head, \
      int64_t threshold, const Maybe &cu_seqlens, const Maybe &bits,                 \
      std::optional<c10::SymInt> first_row
#define HOW \
  causal, scale, key, std::move(site_head), threshold, cu_seqlens, bits, std::move(first_row)

using Fwd = Two(const Tensor&, const Maybe&, const Maybe&, HOW_TYPES);
using Bwd = Three(const Tensor&, const Tensor&, const Maybe&, const Maybe&, const Maybe&,
                  const Tensor&, HOW_TYPES);

const auto& fwd_op() {
  static const auto op = find<Fwd>("fastpar::attention");
  return op;
}
const auto& bwd_op() {
  static const auto op = find<Bwd>("fastpar::attention_bwd");
  return op;
}

constexpr int64_t kMaxHeadDim = 256;  // MAX_HEAD_DIM of kernels/attention

bool has_rows(const Tensor& x, int64_t dims) {
  return is_dense(x) && x.dim() == dims && is_number(x.scalar_type()) &&
         (x.stride(-1) == 1 || x.size(-1) <= 1);
}

// Documents that divide [0, total).
bool are_bounds(const Tensor& x, int64_t total) {
  if (!is_dense(x) || !x.is_cpu() || x.scalar_type() != at::kInt || x.dim() != 1 || x.size(0) < 2) {
    return false;
  }
  const auto at = x.contiguous();
  const int32_t* bounds = at.const_data_ptr<int32_t>();
  for (int64_t i = 1; i < x.size(0); ++i) {
    if (bounds[i] <= bounds[i - 1]) return false;
  }
  return bounds[0] == 0 && bounds[x.size(0) - 1] == total;
}

// What the checks of kernels/attention allow.
bool is_usual(const Tensor& q, const Maybe& k, const Maybe& v, std::optional<double> scale,
              const Maybe& cu_seqlens) {
  const int64_t dims = cu_seqlens ? 3 : 4;
  if (scale && !(*scale > 0.0 && *scale < INFINITY)) return false;
  if (!has_rows(q, k ? dims : dims + 1)) return false;
  const int64_t d = q.size(-1);
  if (d < 1 || d > kMaxHeadDim || (cu_seqlens && !are_bounds(*cu_seqlens, q.size(0)))) return false;
  if (!k) return q.size(-3) == 3;
  for (const Tensor* x : {&*k, &*v}) {
    if (!has_rows(*x, dims) || x->scalar_type() != q.scalar_type() || x->device() != q.device()) {
      return false;
    }
  }
  return k->sizes() == v->sizes() && k->size(0) == q.size(0) && k->size(-1) == d &&
         k->size(-3) > 0 && k->size(-2) > 0 && q.size(-2) % k->size(-2) == 0;
}

// Part i of three in the dimension before the heads, or all of a tensor without it.
Strided part(const Tensor& x, int64_t i, bool packed, bool documents) {
  char* data = static_cast<char*>(const_cast<void*>(x.const_data_ptr()));
  const int64_t dims = x.dim();
  if (packed) data += i * x.stride(dims - 3) * x.element_size();
  return {data, documents ? 0 : x.stride(0), x.stride(dims - (packed ? 4 : 3)), x.stride(dims - 2)};
}

struct Call {
  AttentionShape shape;
  MaskBlock mask;
  Tensor bounds;  // contiguous

  Call(const Tensor& q, const Maybe& k, bool causal, std::optional<double> scale, const Maybe& key,
       const c10::SymInt& site_head, int64_t threshold, const Maybe& cu_seqlens,
       const std::optional<c10::SymInt>& first_row) {
    const Tensor& keys = k ? *k : q;
    const bool packed = !k;
    const int64_t d = q.size(-1), rows = packed ? 4 : 3;
    if (cu_seqlens) bounds = cu_seqlens->contiguous();
    shape = {cu_seqlens ? bounds.size(0) - 1 : q.size(0),
             q.size(-rows),
             keys.size(-rows),
             q.size(-2),
             keys.size(-2),
             d,
             causal,
             static_cast<float>(scale ? *scale : std::pow(static_cast<double>(d), -0.5)),
             cu_seqlens ? bounds.const_data_ptr<int32_t>() : nullptr};
    int64_t seed = 0, first_sample = 0;
    if (has(key)) {
      const Tensor numbers = key->contiguous();
      seed = numbers.const_data_ptr<int64_t>()[0];
      first_sample = numbers.const_data_ptr<int64_t>()[1];
    }
    const int64_t place = site_head.expect_int();
    TORCH_CHECK_VALUE(threshold >= 0 && threshold <= 255,
                      "dropout: expected 0 <= threshold <= 255, got threshold=", threshold,
                      "; use quantize_p");
    mask = {seed,
            first_sample,
            static_cast<int>(place >> 16),
            static_cast<int>(threshold),
            shape.batch,
            shape.heads,
            shape.t,
            shape.tk,
            place & 0xffff,
            first_row ? first_row->expect_int() : 0,
            0,
            0};
  }
};

Two forward(const Tensor& q, const Maybe& k, const Maybe& v, HOW_ARGUMENTS) {
  if (python_serves() || !has_fma() || !is_usual(q, k, v, scale, cu_seqlens)) {
    return python(fwd_op(), q, k, v, HOW);
  }
  const bool packed = !k, documents = cu_seqlens.has_value();
  const Call call(q, k, causal, scale, key, site_head, threshold, cu_seqlens, first_row);
  const auto& s = call.shape;
  const int64_t batch = documents ? 1 : s.batch;
  Tensor o = documents ? at::empty({s.t, s.heads, s.d}, q.options())
                       : at::empty({batch, s.t, s.heads, s.d}, q.options());
  const auto floats = q.options().dtype(at::kFloat);
  Tensor stats = documents ? at::empty({s.heads, s.t, 2}, floats)
                           : at::empty({batch, s.heads, s.t, 2}, floats);
  if (o.numel()) {
    attention_fwd(part(q, 0, packed, documents), part(packed ? q : *k, 1, packed, documents),
                  part(packed ? q : *v, 2, packed, documents), part(o, 0, false, documents),
                  stats.mutable_data_ptr<float>(), dtype_of(q), s, call.mask,
                  at::get_num_threads());
  }
  return {std::move(o), std::move(stats)};
}

Three backward(const Tensor& dy, const Tensor& q, const Maybe& k, const Maybe& v, const Maybe& o,
               const Tensor& stats, HOW_ARGUMENTS) {
  if (python_serves() || stats.dim() != dy.dim() ||
      (cu_seqlens && !are_bounds(*cu_seqlens, q.size(0)))) {
    return python(bwd_op(), dy, q, k, v, o, stats, HOW);
  }
  const bool packed = !k, documents = cu_seqlens.has_value();
  const Tensor d_o = dy.stride(-1) == 1 ? dy : dy.contiguous();
  const int64_t rows = packed ? 4 : 3, d = q.size(-1);
  check_memory(is_usual(q, k, v, scale, cu_seqlens) && dy.scalar_type() == q.scalar_type() &&
                   dy.numel() * (packed ? 3 : 1) == q.numel() && dy.size(-1) == d &&
                   dy.size(-2) == q.size(-2) && dy.size(-3) == q.size(-rows) &&
                   are_floats(stats, d ? dy.numel() / d * 2 : 0),
               "attention_bwd");
  const auto like = [&](const Tensor& x) {
    return d_o.numel() ? at::empty(x.sizes(), x.options()) : at::zeros(x.sizes(), x.options());
  };
  Tensor dq = like(q);
  Tensor dk = packed ? at::empty({0}, q.options()) : like(*k);
  Tensor dv = packed ? at::empty({0}, q.options()) : like(*v);
  if (d_o.numel()) {
    const Call call(q, k, causal, scale, key, site_head, threshold, cu_seqlens, first_row);
    const auto of = [&](const Tensor& x, int64_t i) { return part(x, i, packed, documents); };
    attention_bwd(part(d_o, 0, false, documents), of(q, 0), of(packed ? q : *k, 1),
                  of(packed ? q : *v, 2), stats.const_data_ptr<float>(), of(dq, 0),
                  of(packed ? dq : dk, 1), of(packed ? dq : dv, 2), dtype_of(q), call.shape,
                  call.mask, at::get_num_threads());
  }
  return {std::move(dq), std::move(dk), std::move(dv)};
}

struct AttentionBackward : public Node {
  SavedVariable q, k, v, o, stats, key, cu_seqlens, bits;
  bool causal, packed, has_o, has_key, has_documents, has_bits;
  std::optional<double> scale;
  c10::SymInt site_head = 0;
  int64_t threshold;
  std::optional<c10::SymInt> first_row;

  std::string name() const override { return "AttentionBackward"; }
  void release_variables() override {
    for (SavedVariable* x : {&q, &k, &v, &o, &stats, &key, &cu_seqlens, &bits}) x->reset_data();
  }
  variable_list apply(variable_list&& grads) override {
    check_one_backward("attention", grads);
    variable_list out(3);
    if (!grads[0].defined()) return out;
    const auto self = getptr();
    const auto get = [&](SavedVariable& x, bool given) {
      return given ? Maybe(x.unpack(self)) : Maybe();
    };
    auto [dq, dk, dv] =
        call_bwd(bwd_op(), grads[0], q.unpack(self), get(k, !packed), get(v, !packed),
                 get(o, has_o), stats.unpack(self), causal, scale, get(key, has_key), site_head,
                 threshold, get(cu_seqlens, has_documents), get(bits, has_bits), first_row);
    out[0] = std::move(dq);
    if (!packed) {
      out[1] = std::move(dk);
      out[2] = std::move(dv);
    }
    return out;
  }
};

Two recorded(const Tensor& q_at, const Maybe& k_at, const Maybe& v_at, HOW_ARGUMENTS) {
  const Tensor q = with_memory(q_at);
  const Maybe k = with_memory(k_at), v = with_memory(v_at);
  const bool record = is_recorded("attention", q, k, v);
  Two out = below_autograd([&] {
    return fwd_op().call(q, k, v, causal, scale, key, site_head, threshold, cu_seqlens, bits,
                         first_row);
  });
  if (!record) return out;
  auto& [o, stats] = out;
  auto node = make_node<AttentionBackward>();
  node->set_next_edges(torch::autograd::collect_next_edges(q, k, v));
  node->causal = causal;
  node->scale = scale;
  node->site_head = std::move(site_head);
  node->threshold = threshold;
  node->first_row = std::move(first_row);
  node->packed = !has(k);
  node->has_o = stats.dim() + 1 == o.dim();  // statistics of another kernel, which needs it
  node->has_key = has(key);
  node->has_documents = has(cu_seqlens);
  node->has_bits = has(bits);
  torch::autograd::create_gradient_edge(o, node);
  node->q = SavedVariable(q, false);
  node->k = saved(k);
  node->v = saved(v);
  if (node->has_o) node->o = SavedVariable(o, true);
  node->stats = SavedVariable(stats, false);
  node->key = saved(key);
  node->cu_seqlens = saved(cu_seqlens);
  node->bits = saved(bits);
  return out;
}

}  // namespace flash
}  // namespace fastpar::nodes

#undef HOW
#define HOW                                                                            \
  "bool causal, float? scale, Tensor? key=None, SymInt site_head=0, int threshold=0, " \
  "Tensor? cu_seqlens=None, Tensor? bits=None, SymInt? first_row=None)"
TORCH_LIBRARY_FRAGMENT(fastpar, m) {
  using namespace fastpar::nodes;
  define(m, "attention(Tensor q, Tensor? k, Tensor? v, " HOW " -> (Tensor, Tensor)",
         &flash::forward, &flash::recorded);
  define(m,
         "attention_bwd(Tensor do, Tensor q, Tensor? k, Tensor? v, Tensor? o, Tensor stats, " HOW
         " -> (Tensor, Tensor, Tensor)",
         &flash::backward);
}
#undef HOW
#undef HOW_TYPES
#undef HOW_ARGUMENTS
