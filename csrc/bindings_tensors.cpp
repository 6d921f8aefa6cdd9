// Reads tensors through Python: no torch header is used.
#include <algorithm>

#include "bindings.h"

namespace fastpar {
namespace {

constexpr const char* kNames[kTypes + 1] = {
    "float32", "bfloat16", "float16", "float64",       "int64",       "int32",        "int16",
    "int8",    "uint8",    "bool",    "float8_e4m3fn", "float8_e5m2", "another dtype"};

// torch's dtypes and names; never destroyed, because Python may end before. The GIL is held.
struct Names {
  std::array<PyObject*, kTypes> types;
  PyObject *data_ptr, *numel, *is_contiguous, *dtype, *shape, *stride;

  Names() {
    const py::module_ torch = py::module_::import("torch");
    for (int i = 0; i < kTypes; ++i) types[i] = py::object(torch.attr(kNames[i])).release().ptr();
    data_ptr = PyUnicode_InternFromString("data_ptr");
    numel = PyUnicode_InternFromString("numel");
    is_contiguous = PyUnicode_InternFromString("is_contiguous");
    dtype = PyUnicode_InternFromString("dtype");
    shape = PyUnicode_InternFromString("shape");
    stride = PyUnicode_InternFromString("stride");
  }
};
Names* names = nullptr;

py::object checked(PyObject* result) {
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

py::object call(PyObject* x, PyObject* name) { return checked(PyObject_CallMethodNoArgs(x, name)); }

std::vector<int64_t> sizes_of(const py::object& tuple) {
  std::vector<int64_t> found(static_cast<size_t>(PyTuple_GET_SIZE(tuple.ptr())));
  for (size_t i = 0; i < found.size(); ++i) {
    found[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple.ptr(), static_cast<Py_ssize_t>(i)));
  }
  return found;
}

bool is_dense(PyObject* x) {
  const auto sizes = sizes_of(checked(PyObject_GetAttr(x, names->shape)));
  const auto strides = sizes_of(call(x, names->stride));
  std::vector<std::pair<int64_t, int64_t>> order;
  for (size_t i = 0; i < sizes.size(); ++i) order.emplace_back(strides[i], sizes[i]);
  std::sort(order.begin(), order.end());
  int64_t expected = 1;
  for (const auto& [stride, size] : order) {
    if (size != 1 && stride != expected) return false;
    expected *= size;
  }
  return true;
}

}  // namespace

const char* type_name(Type type) { return kNames[static_cast<int>(type)]; }

bool read(PyObject* x, Memory& memory) {
  if (x == Py_None) return true;
  if (names == nullptr) names = new Names;
  try {
    memory.address = PyLong_AsUnsignedLongLong(call(x, names->data_ptr).ptr());
    memory.numel = PyLong_AsLongLong(call(x, names->numel).ptr());
    memory.contiguous = call(x, names->is_contiguous).ptr() == Py_True;
    memory.dense = memory.contiguous || is_dense(x);
    const py::object dtype = checked(PyObject_GetAttr(x, names->dtype));
    const auto& types = names->types;
    memory.type =
        static_cast<Type>(std::find(types.begin(), types.end(), dtype.ptr()) - types.begin());
    memory.given = true;
  } catch (py::error_already_set&) {
    return false;  // not a tensor: pybind11 says so
  }
  return true;
}

bool read(PyObject* x, View& view) {
  if (!read(x, static_cast<Memory&>(view))) return false;
  if (!view) return true;
  const auto sizes = sizes_of(checked(PyObject_GetAttr(x, names->shape)));
  const auto strides = sizes_of(call(x, names->stride));
  if (sizes.size() > view.size.size()) return false;
  view.dims = static_cast<int>(sizes.size());
  std::copy(sizes.begin(), sizes.end(), view.size.begin());
  std::copy(strides.begin(), strides.end(), view.stride.begin());
  return true;
}

bool read(PyObject* x, Rows& rows) {
  Memory memory;
  if (!read(x, memory) || memory.type != Type::i64 || memory.numel % kListed != 0) return false;
  rows = {at<const Listed>(memory.address), static_cast<size_t>(memory.numel / kListed)};
  return true;
}

bool Rows::are_usual() const {
  return std::all_of(begin(), end(), [&](const Listed& x) {
    return x.in_memory && x.contiguous && x.type <= static_cast<int64_t>(Type::f16) &&
           x.device == first->device;
  });
}

void* View::as(Type wanted, std::initializer_list<int64_t> sizes, const char* name) const {
  const bool same = dims == static_cast<int>(sizes.size()) &&
                    std::equal(sizes.begin(), sizes.end(), size.begin());
  const bool rows = numel <= 1 || size[dims - 1] == 1 || stride[dims - 1] == 1;
  FASTPAR_CHECK(type == wanted && same && rows && (numel == 0 || address != 0), "_C: expected ",
                name, " of ", sizes.size(), " dimensions that fit the other arguments, of ",
                type_name(wanted), " and contiguous in the last one, got ", dims, " of ",
                type_name(type), "; allocate it with this dtype and size");
  return at<void>(address);
}

}  // namespace fastpar
