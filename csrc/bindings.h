// What the binding files share. Pointers travel as integers (tensor.data_ptr()); every op releases
// the GIL, because ranks may be threads of one process.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "checks.h"
#include "ops.h"

namespace fastpar {

namespace py = pybind11;

using Address = std::uintptr_t;
using Addresses = std::vector<Address>;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

inline Dtype dtype_of(int code) {
  FASTPAR_CHECK(code >= 0 && code <= 2, "_C: expected dtype code 0, 1 or 2, got code=", code,
                "; use kernels/backend.py");
  return static_cast<Dtype>(code);
}

// One for each file bindings_<name>.cpp.
void bind_adamw(py::module_& m);
void bind_bucket(py::module_& m);
void bind_shm(py::module_& m);
void bind_global_norm(py::module_& m);
void bind_launch(py::module_& m);
void bind_eager(py::module_& m);

}  // namespace fastpar
