// Lists of tensors in one call: read for the bindings (csrc/lists.h), compared, copied.
#include "../lists.h"

#include <ATen/ops/_foreach_copy.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "node.h"

namespace fastpar::lists {
namespace {

using at::Tensor;

Type type_of(at::ScalarType type) {
  constexpr at::ScalarType kAll[kTypes] = {
      at::kFloat, at::kBFloat16, at::kHalf, at::kDouble, at::kLong,          at::kInt,
      at::kShort, at::kChar,     at::kByte, at::kBool,   at::kFloat8_e4m3fn, at::kFloat8_e5m2};
  return static_cast<Type>(std::find(kAll, kAll + kTypes, type) - kAll);
}

int64_t number_of(at::Device device) {
  return device.is_cpu() ? 0 : static_cast<int64_t>(device.type()) * 256 + device.index() + 1;
}

int64_t hash_of(at::IntArrayRef numbers) {
  uint64_t hash = 0xcbf29ce484222325u + numbers.size();
  for (const int64_t x : numbers) hash = (hash ^ static_cast<uint64_t>(x)) * 0x9e3779b97f4a7c15u;
  return static_cast<int64_t>(hash);
}

Listed read(const Tensor& x) {
  Listed found{};
  found.type = static_cast<int64_t>(type_of(x.scalar_type()));
  found.device = number_of(x.device());
  found.numel = x.numel();
  if (x.layout() != at::kStrided || !x.has_storage()) return found;
  found.in_memory = !x.is_neg() && !x.is_conj() && !x._is_zerotensor() && !x.is_meta();
  if (!found.in_memory) return found;
  found.address = reinterpret_cast<std::uintptr_t>(x.const_data_ptr());
  found.contiguous = x.is_contiguous();
  found.dense = x.is_non_overlapping_and_dense();
  found.shape = hash_of(x.sizes());
  found.strides = hash_of(x.strides());
  return found;
}

// [tensors, kListed], on the host. The first `written` of them are about to be written through
// their addresses: autograd must know. A tensor in a mode or transform has no memory to read: the
// caller looks first.
Tensor rows(at::TensorList tensors, int64_t written) {
  const Tensor table = at::empty({static_cast<int64_t>(tensors.size()), kListed}, at::kLong);
  auto* to = reinterpret_cast<Listed*>(table.mutable_data_ptr<int64_t>());
  for (const Tensor& x : tensors) {
    *to++ = read(x);
    if (written-- > 0) x.unsafeGetTensorImpl()->bump_version();
  }
  return table;
}

// Whether each tensor of a is the same memory as that of b, as the same dtype and layout.
bool are_at(at::TensorList a, at::TensorList b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const Tensor& x, const Tensor& y) {
    return x.const_data_ptr() == y.const_data_ptr() && x.scalar_type() == y.scalar_type() &&
           x.sizes() == y.sizes() && x.strides() == y.strides();
  });
}

// Copies each tensor. Small ones at once: torch takes 2 us for each.
void copy(at::TensorList to, at::TensorList from) {
  constexpr size_t kSmall = 1 << 18;
  if (to.empty() || !to[0].is_cpu()) return at::_foreach_copy_(to, from);
  for (size_t i = 0; i < to.size(); ++i) {
    const Tensor &x = from[i], &y = to[i];
    if (x.is_cpu() && y.is_cpu() && nodes::is_plain(x) && nodes::is_plain(y) &&
        nodes::is_like(x, y) && x.is_contiguous() && y.is_contiguous() && x.nbytes() <= kSmall &&
        !(at::GradMode::is_enabled() && (x.requires_grad() || y.requires_grad()))) {
      std::memcpy(y.mutable_data_ptr(), x.const_data_ptr(), x.nbytes());
      y.unsafeGetTensorImpl()->bump_version();
    } else {
      y.copy_(x);
    }
  }
}

}  // namespace
}  // namespace fastpar::lists

TORCH_LIBRARY_FRAGMENT(fastpar, m) {
  m.def("_rows(Tensor[] tensors, int written) -> Tensor", &fastpar::lists::rows);
  m.def("_are_at(Tensor[] a, Tensor[] b) -> bool", &fastpar::lists::are_at);
  m.def("_copy_(Tensor(a!)[] to, Tensor[] from) -> ()", &fastpar::lists::copy);
}
// Where torch would make other tensors of them first, whose memory dies with the call.
TORCH_LIBRARY_IMPL(fastpar, Negative, m) { m.impl("_rows", &fastpar::lists::rows); }
TORCH_LIBRARY_IMPL(fastpar, Conjugate, m) { m.impl("_rows", &fastpar::lists::rows); }
TORCH_LIBRARY_IMPL(fastpar, ZeroTensor, m) { m.impl("_rows", &fastpar::lists::rows); }
