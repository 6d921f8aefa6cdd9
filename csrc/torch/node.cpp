#include "node.h"

#include <algorithm>
#include <atomic>

namespace fastpar::nodes {
namespace {

std::atomic<bool> python_on_cpu{false};

std::string stem(std::string name) {
  for (const char* end : {"_", "_bwd"}) {
    const std::string tail = end;
    if (name.size() > tail.size() && !name.compare(name.size() - tail.size(), tail.size(), tail)) {
      name.resize(name.size() - tail.size());
    }
  }
  return name;
}

[[noreturn]] void refuse_second(const std::string& op, const char* got) {
  TORCH_CHECK(false, op, ": expected one backward, got ", got, "; use fastpar.kernels.reference.",
              op, "_ref where second derivatives are needed");
}

struct RefuseBackward : public Node {
  std::string op;
  std::string name() const override { return "RefuseBackward"; }
  variable_list apply(variable_list&&) override {
    refuse_second(op, "a derivative of its gradient");
  }
};

template <class Do>
void each_tensor(const c10::IValue& value, const Do& act) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) act(value.toTensor());
  } else if (value.isTensorList()) {
    for (const Tensor& x : value.toTensorVector()) act(x);
  }
}

}  // namespace

bool python_serves() { return python_on_cpu.load(std::memory_order_relaxed); }

bool is_wrapped(const Tensor& x) {
  using c10::DispatchKey;
  constexpr c10::DispatchKeySet kWrapped({DispatchKey::Python, DispatchKey::FuncTorchBatched,
                                          DispatchKey::FuncTorchGradWrapper, DispatchKey::Batched,
                                          DispatchKey::Functionalize, DispatchKey::Negative,
                                          DispatchKey::Conjugate, DispatchKey::ZeroTensor});
  return x.key_set().has_any(kWrapped);
}

bool is_plain(const Tensor& x) {
  using c10::DispatchKey;
  const auto active = c10::impl::tls_local_dispatch_key_set().included_;
  return (x.is_cpu() || x.is_cuda()) && is_dense(x) && x.has_storage() && !is_wrapped(x) &&
         !active.has(DispatchKey::Python) &&
         !active.has(DispatchKey::FuncTorchDynamicLayerFrontMode);
}

void refuse_tangents(const char* op) {
  TORCH_CHECK(false, op,
              ": expected tensors without tangents, got forward-mode AD (jvp, dual tensors), which "
              "it does not support; use backward or torch.func.grad, or "
              "fastpar.kernels.reference.",
              stem(op), "_ref");
}

bool in_transform() {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

void refuse_second_backward(const char* op) { refuse_second(op, "a derivative of its gradient"); }

void refuse_create_graph(const char* op) {
  if (!in_transform()) refuse_second(op, "create_graph=True");
}

void record_refusal(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const size_t given = op.schema().arguments().size();
  const std::string name = op.schema().name().substr(sizeof("fastpar::") - 1);
  variable_list recorded;
  for (auto value = stack->end() - given; value != stack->end(); ++value) {
    each_tensor(*value, [&](const Tensor& x) {
      if (has_tangent(x)) refuse_tangents(name.c_str());
      if (at::GradMode::is_enabled() && x.requires_grad()) recorded.push_back(x);
    });
  }
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    op.callBoxed(stack);
  }
  if (recorded.empty()) return;
  auto node = make_node<RefuseBackward>();
  node->op = stem(name);
  node->set_next_edges(torch::autograd::collect_next_edges(recorded));
  const size_t returned = op.schema().returns().size();
  for (auto value = stack->end() - returned; value != stack->end(); ++value) {
    each_tensor(*value, [&](Tensor x) {
      if (x.is_floating_point()) torch::autograd::create_gradient_edge(x, node);
    });
  }
}

Floats::Floats(const Maybe& x, int64_t c, bool wanted) {
  if (!wanted) return;
  if (!has(x)) {
    copy_.assign(static_cast<size_t>(c), 0.0f);
  } else if (x->scalar_type() == at::kFloat) {
    kept_ = x->contiguous();
    at_ = kept_.const_data_ptr<float>();
    return;
  } else {
    const Tensor row = x->contiguous();
    copy_.resize(static_cast<size_t>(c));
    with_dtype(dtype_of(row), [&](auto tag) {
      const auto* from = static_cast<const decltype(tag)*>(row.const_data_ptr());
      std::transform(from, from + c, copy_.begin(), [](auto v) { return to_float(v); });
    });
  }
  at_ = copy_.data();
}

Sums::Sums(Tensor& x) : to_(x) {
  if (!x.defined()) return;
  if (x.scalar_type() == at::kFloat) {
    at_ = x.mutable_data_ptr<float>();
  } else {
    copy_.resize(static_cast<size_t>(x.numel()));
    at_ = copy_.data();
  }
}

void Sums::store() {
  if (copy_.empty()) return;
  with_dtype(dtype_of(to_), [&](auto tag) {
    using T = decltype(tag);
    std::transform(copy_.begin(), copy_.end(), static_cast<T*>(to_.mutable_data_ptr()),
                   [](float v) { return from_float<T>(v); });
  });
}

}  // namespace fastpar::nodes

TORCH_LIBRARY_FRAGMENT(fastpar, m) {
  m.def("_serve_cpu_by_python(bool on) -> ()", [](bool on) {
    fastpar::nodes::python_on_cpu.store(on, std::memory_order_relaxed);
    fastpar::nodes::forget_recipes();
  });
}
