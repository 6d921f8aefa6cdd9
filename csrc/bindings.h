// What the binding files share. Python passes tensors, and their dtypes, sizes and layouts are
// checked here, where memory is written. Every op releases the GIL, because ranks may be threads of
// one process.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <vector>

#include "checks.h"
#include "lists.h"
#include "ops.h"

namespace fastpar {

namespace py = pybind11;

using Address = std::uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

inline Dtype dtype_of(int code) {
  FASTPAR_CHECK(code >= 0 && code <= 2, "_C: expected dtype code 0, 1 or 2, got code=", code,
                "; use kernels/backend.py");
  return static_cast<Dtype>(code);
}

const char* type_name(Type type);

// A tensor that Python passes; None is false.
struct Memory {
  Address address = 0;
  int64_t numel = 0;
  Type type = Type::other;
  bool given = false, contiguous = false;
  bool dense = false;  // its elements fill one block of memory, in any order

  explicit operator bool() const { return given; }

  // Its memory, which holds n contiguous elements.
  void* of(Type wanted, int64_t n, const char* name) const {
    FASTPAR_CHECK(type == wanted && numel == n && contiguous && (n == 0 || address != 0),
                  "_C: expected ", name, " of ", n, " contiguous elements of ", type_name(wanted),
                  ", got ", numel, " of ", type_name(type), contiguous ? "" : ", strided",
                  "; allocate it with this dtype and size");
    return at<void>(address);
  }
  void* of(Dtype wanted, int64_t n, const char* name) const {
    return of(static_cast<Type>(wanted), n, name);
  }
  float* floats(int64_t n, const char* name) const {
    return static_cast<float*>(of(Type::f32, n, name));
  }
  float* floats_or_null(int64_t n, const char* name) const {
    return given ? floats(n, name) : nullptr;
  }

  // Of numbers that kernels compute with.
  Dtype dtype(const char* name) const {
    FASTPAR_CHECK(type <= Type::f16, "_C: expected ", name,
                  " of float32, bfloat16 or float16, got ", type_name(type), "; cast it");
    return static_cast<Dtype>(type);
  }
};

// The tensors of a list.
struct Rows {
  const Listed* first = nullptr;
  size_t size = 0;

  const Listed& operator[](size_t i) const { return first[i]; }
  const Listed* begin() const { return first; }
  const Listed* end() const { return first + size; }
  // Whether all of them have contiguous memory with numbers that kernels compute with, in one
  // place.
  bool are_usual() const;
};

// A tensor of at most four dimensions and any strides.
struct View : Memory {
  int dims = 0;
  std::array<int64_t, 4> size{}, stride{};

  // Its memory, which holds these sizes of the type with the last dimension contiguous.
  void* as(Type wanted, std::initializer_list<int64_t> sizes, const char* name) const;
};

bool read(PyObject* x, Memory& memory);
bool read(PyObject* x, View& view);
bool read(PyObject* x, Rows& rows);

// One for each file bindings_<name>.cpp.
void bind_adamw(py::module_& m);
void bind_flat(py::module_& m);
void bind_shm(py::module_& m);
void bind_global_norm(py::module_& m);

}  // namespace fastpar

namespace pybind11::detail {

template <>
struct type_caster<fastpar::Memory> {
  PYBIND11_TYPE_CASTER(fastpar::Memory, const_name("Tensor | None"));
  bool load(handle x, bool) { return fastpar::read(x.ptr(), value); }
};

template <>
struct type_caster<fastpar::Rows> {
  PYBIND11_TYPE_CASTER(fastpar::Rows, const_name("Tensor"));
  bool load(handle x, bool) { return fastpar::read(x.ptr(), value); }
};

template <>
struct type_caster<fastpar::View> {
  PYBIND11_TYPE_CASTER(fastpar::View, const_name("Tensor | None"));
  bool load(handle x, bool) { return fastpar::read(x.ptr(), value); }
};

}  // namespace pybind11::detail
