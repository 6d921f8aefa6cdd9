// The one PYBIND11_MODULE: fastpar.kernels._C. Pointers travel as integers (tensor.data_ptr()).
#include <pybind11/pybind11.h>

#include "ops.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled kernels of fastpar; see csrc/ops.h for every contract.";
  m.attr("built_with_cuda") = bool(FASTPAR_CUDA);
}
