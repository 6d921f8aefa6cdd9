// Reads the tensors of a list for the bindings in one call: csrc/lists.h.
#include "../lists.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

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

}  // namespace
}  // namespace fastpar::lists

TORCH_LIBRARY_FRAGMENT(fastpar, m) {
  m.def("_rows(Tensor[] tensors, int written) -> Tensor", &fastpar::lists::rows);
}
// Where torch would make other tensors of them first, whose memory dies with the call.
TORCH_LIBRARY_IMPL(fastpar, Negative, m) { m.impl("_rows", &fastpar::lists::rows); }
TORCH_LIBRARY_IMPL(fastpar, Conjugate, m) { m.impl("_rows", &fastpar::lists::rows); }
TORCH_LIBRARY_IMPL(fastpar, ZeroTensor, m) { m.impl("_rows", &fastpar::lists::rows); }
