// What the files of this folder share: an op of torch as a schema, a kernel for CPU tensors and an
// autograd node. Only narrow headers of torch are included: its header of everything takes 40
// seconds.
//
// [Note: an op] Its CPU kernel is C++, in front of csrc's kernels. For CUDA tensors its kernel is a
// Python function (kernels/op.py define_kernels), of which recipes.cpp repeats what it launched.
// The same function serves a CPU call that it alone can answer: python() redispatches to the key
// of sparse tensors, under which it is registered. It makes the checks with their words, and
// refuses; so a CPU kernel only asks whether a call is usual. Fakes are Python's, too.
//
// [Note: derivatives] One backward is defined. Its second derivative is refused: with create_graph
// at once, under torch.func's transforms (which always record) where it is taken (RefuseBackward).
// Tangents of forward-mode AD are refused: a node of our own would drop them without a word.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "../ops.h"
#include "../simd.h"

namespace fastpar::nodes {

using at::Tensor;
using Maybe = std::optional<Tensor>;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// torch owns nodes by std::shared_ptr up to 2.11, by c10::intrusive_ptr since node.h came.
#if __has_include(<torch/csrc/autograd/node.h>)
template <class T>
auto make_node() {
  return c10::make_intrusive<T>();
}
#else
template <class T>
auto make_node() {
  return std::shared_ptr<T>(new T(), torch::autograd::deleteNode);
}
#endif

template <class Signature>
auto find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// The op's Python function.
constexpr c10::DispatchKeySet kPython(c10::DispatchKey::SparseCPU);
template <class Op, class... Args>
decltype(auto) python(const Op& op, Args&&... args) {
  return op.redispatch(kPython, std::forward<Args>(args)...);
}

// Whether Python serves CPU tensors as well: FASTPAR_BACKEND=triton, in Triton's interpreter.
bool python_serves();

inline bool has(const Maybe& x) { return x.has_value() && x->defined(); }
inline bool needs_grad(const Tensor& x) { return x.defined() && x.requires_grad(); }
inline bool needs_grad(const Maybe& x) { return x.has_value() && needs_grad(*x); }
inline bool has_tangent(const Tensor& x) { return torch::autograd::isFwGradDefined(x); }
inline bool has_tangent(const Maybe& x) { return x.has_value() && has_tangent(*x); }

// A tensor that stands for others (a subclass, a fake, of a transform), or whose memory does not
// hold its values.
bool is_wrapped(const Tensor& x);
// An ordinary tensor whose memory holds its values, with no mode or transform about.
bool is_plain(const Tensor& x);

// torch itself resolves its zero tensors to one zero of strides that attention does not take.
inline Tensor with_memory(const Tensor& x) { return x._is_zerotensor() ? x.clone() : x; }
inline Maybe with_memory(const Maybe& x) { return has(x) ? Maybe(with_memory(*x)) : x; }

// Whether a transform of torch.func is active, which always records.
bool in_transform();

void refuse_tangents(const char* op);
void refuse_second_backward(const char* op);
void refuse_create_graph(const char* op);

// Whether a call on these tensors is recorded.
template <class... Tensors>
bool is_recorded(const char* op, const Tensors&... tensors) {
  if ((has_tangent(tensors) || ...)) refuse_tangents(op);
  return at::GradMode::is_enabled() && (needs_grad(tensors) || ...);
}

// The op's kernel for the tensors' device.
template <class Call>
auto below_autograd(const Call& call) {
  at::AutoDispatchBelowADInplaceOrView guard;
  return call();
}

// The start of a node's apply().
inline void check_one_backward(const char* op, const variable_list& grads) {
  if (at::GradMode::is_enabled()) refuse_create_graph(op);
  for (const Tensor& grad : grads) {
    if (grad.defined() && has_tangent(grad)) refuse_tangents(op);
  }
}

// A node that saves results of its own, computed from its inputs: they are outputs with a gradient,
// which a second derivative asks for.
template <class T>
SavedVariable saved_result(Tensor& x, const T& node) {
  torch::autograd::create_gradient_edge(x, node);
  return SavedVariable(x, true);
}
// Such a result, to be passed on as a gradient: a part of a graph only if one is made.
template <class T>
Tensor result_of(SavedVariable& x, const T& node) {
  Tensor found = x.unpack(node);
  if (at::GradMode::is_enabled()) return found;
  return is_plain(found) ? found.variable_data() : found.detach();
}
inline void refuse_results(const char* op, const variable_list& grads) {
  for (size_t i = 1; i < grads.size(); ++i) {
    if (grads[i].defined()) refuse_second_backward(op);
  }
}

// Calls the op of a backward: past autograd where nothing is recorded.
template <class Op, class... Args>
auto call_bwd(const Op& op, Args&&... args) {
  if (at::GradMode::is_enabled()) return op.call(std::forward<Args>(args)...);
  at::AutoDispatchBelowADInplaceOrView guard;
  return op.call(std::forward<Args>(args)...);
}

// Direct calls of an op of a backward: what it reads and writes by address has its sizes.
inline void check_memory(bool fits, const char* op) {
  TORCH_CHECK_VALUE(fits, op,
                    ": expected what its forward returned and gradients of these sizes, "
                    "got other tensors; call the public function and backward()");
}
inline bool is_like(const Tensor& a, const Tensor& b) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type();
}
inline bool are_floats(const Tensor& x, int64_t count) {
  return x.scalar_type() == at::kFloat && x.numel() == count && x.is_contiguous();
}

// The autograd kernel of every op of a backward.
void record_refusal(const c10::OperatorHandle& op, torch::jit::Stack* stack);
inline torch::CppFunction refusal() {
  return torch::dispatch(c10::DispatchKey::Autograd,
                         torch::CppFunction::makeFromBoxedFunction<&record_refusal>());
}

// The kernel of every op for CUDA tensors: recipes.cpp.
void serve_cuda(const c10::OperatorHandle& op, torch::jit::Stack* stack);
// Calls of CUDA tensors run their Python functions again.
void forget_recipes();

// An op by its schema: its kernel for CPU tensors, and what autograd does with it; without
// `recorded` it is an op of a backward.
template <class Kernel>
void define(torch::Library& m, const char* schema, Kernel* kernel, Kernel* recorded = nullptr) {
  using Key = c10::DispatchKey;
  const std::string whole = schema, name = whole.substr(0, whole.find('('));
  m.def(schema);
  m.impl(name.c_str(), torch::dispatch(Key::CPU, kernel));
  m.impl(name.c_str(),
         torch::dispatch(Key::CUDA, torch::CppFunction::makeFromBoxedFunction<&serve_cuda>()));
  m.impl(name.c_str(), recorded ? torch::dispatch(Key::Autograd, recorded) : refusal());
}

inline SavedVariable saved(const Maybe& x) {
  return has(x) ? SavedVariable(*x, false) : SavedVariable();
}
inline Maybe maybe(Tensor x) { return x.defined() ? Maybe(std::move(x)) : Maybe(); }

inline bool is_number(at::ScalarType type) {
  return type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
}
inline Dtype dtype_of(const Tensor& x) {
  return x.scalar_type() == at::kFloat      ? Dtype::float32
         : x.scalar_type() == at::kBFloat16 ? Dtype::bfloat16
                                            : Dtype::float16;
}
// Dense and with its values in memory; the dispatcher has resolved what is not.
inline bool is_dense(const Tensor& x) { return x.layout() == at::kStrided; }

// Whether v has one number for each of c columns, of x's dtype or float, where x is.
inline bool is_row(const Tensor& v, int64_t c, const Tensor& x) {
  return is_dense(v) && v.dim() == 1 && v.size(0) == c && v.device() == x.device() &&
         (v.scalar_type() == x.scalar_type() || v.scalar_type() == at::kFloat);
}

// c numbers as floats: their own memory or a copy; zeros if absent.
class Floats {
 public:
  Floats(const Maybe& x, int64_t c, bool wanted = true);  // null unless wanted
  operator const float*() const { return at_; }

 private:
  Tensor kept_;
  std::vector<float> copy_;
  const float* at_ = nullptr;
};

// Where c sums are made that a tensor of any dtype then holds; null if absent.
class Sums {
 public:
  explicit Sums(Tensor& x);
  operator float*() { return at_; }
  void store();

 private:
  Tensor& to_;
  std::vector<float> copy_;
  float* at_ = nullptr;
};

// The full mask of an x of these sizes, [B, ..., C]: mask_shape of kernels/philox.py.
inline void set_mask_shape(at::IntArrayRef sizes, MaskBlock* block) {
  const size_t first = sizes.size() > 3 ? 2 : 1;
  block->samples = sizes[0];
  block->heads = first == 2 ? sizes[1] : 1;
  block->rows = 1;
  for (size_t i = first; i + 1 < sizes.size(); ++i) block->rows *= sizes[i];
}

inline MaskBlock no_mask(int64_t rows, int64_t cols) {
  return {0, 0, 0, 0, 1, 1, rows > 0 ? rows : 1, cols, 0, 0, 0, 0};
}

}  // namespace fastpar::nodes
