// Lists of tensors in one call: read for the bindings (csrc/lists.h), compared, copied.
#include "../lists.h"

#include <ATen/ops/_foreach_copy.h>
#include <torch/custom_class.h>

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
  found.dense = found.contiguous || x.is_non_overlapping_and_dense();
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

// Tensors whose rows are read again and again. They are only held: nothing that Python's garbage
// collector should see may hang on them.
struct Kept : torch::CustomClassHolder {
  explicit Kept(std::vector<Tensor> of) : tensors(std::move(of)) {}
  Tensor written_rows() const { return rows(tensors, static_cast<int64_t>(tensors.size())); }

  const std::vector<Tensor> tensors;
};

// Whether each tensor of a is the same memory as that of b, as the same dtype and layout.
bool are_at(at::TensorList a, at::TensorList b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const Tensor& x, const Tensor& y) {
    return x.const_data_ptr() == y.const_data_ptr() && x.scalar_type() == y.scalar_type() &&
           x.sizes() == y.sizes() && x.strides() == y.strides();
  });
}

// Copies each tensor into a flat buffer, from its own start on. Small ones at once: torch takes 2
// us for each, and a view of the buffer another.
void copy_into(const Tensor& flat, at::IntArrayRef starts, at::TensorList from) {
  constexpr size_t kSmall = 1 << 18;
  TORCH_CHECK_VALUE(starts.size() == from.size() && flat.is_contiguous(),
                    "copy_into: expected a start for each tensor and a contiguous buffer, got ",
                    starts.size(), " starts of ", from.size(),
                    " tensors; pass lists of one length");
  std::vector<Tensor> views, others;
  const bool plain = flat.is_cpu() && nodes::is_plain(flat);
  for (size_t i = 0; i < from.size(); ++i) {
    const Tensor& x = from[i];
    TORCH_CHECK_VALUE(starts[i] >= 0 && starts[i] + x.numel() <= flat.numel(),
                      "copy_into: expected tensors that end within the buffer of ", flat.numel(),
                      " elements, got one from ", starts[i], " to ", starts[i] + x.numel());
    if (plain && nodes::is_plain(x) && x.is_cpu() && x.scalar_type() == flat.scalar_type() &&
        x.is_contiguous() && x.nbytes() <= kSmall) {
      auto* to = static_cast<char*>(flat.mutable_data_ptr());
      std::memcpy(to + starts[i] * flat.itemsize(), x.const_data_ptr(), x.nbytes());
    } else {
      views.push_back(flat.narrow(0, starts[i], x.numel()).view(x.sizes()));
      others.push_back(x);
    }
  }
  if (!views.empty()) at::_foreach_copy_(views, others);
  if (views.size() < from.size()) flat.unsafeGetTensorImpl()->bump_version();
}

}  // namespace
}  // namespace fastpar::lists

TORCH_LIBRARY_FRAGMENT(fastpar, m) {
  m.class_<fastpar::lists::Kept>("Kept")
      .def(torch::init<std::vector<at::Tensor>>())
      .def("written_rows", [](const c10::intrusive_ptr<fastpar::lists::Kept>& kept) {
        return kept->written_rows();
      });
  m.def("_rows(Tensor[] tensors, int written) -> Tensor", &fastpar::lists::rows);
  m.def("_are_at(Tensor[] a, Tensor[] b) -> bool", &fastpar::lists::are_at);
  m.def("_copy_into_(Tensor(a!) flat, int[] starts, Tensor[] from) -> ()",
        &fastpar::lists::copy_into);
}
// Where torch would make other tensors of them first, whose memory dies with the call.
TORCH_LIBRARY_IMPL(fastpar, Negative, m) { m.impl("_rows", &fastpar::lists::rows); }
TORCH_LIBRARY_IMPL(fastpar, Conjugate, m) { m.impl("_rows", &fastpar::lists::rows); }
TORCH_LIBRARY_IMPL(fastpar, ZeroTensor, m) { m.impl("_rows", &fastpar::lists::rows); }
