#include "bindings.h"
#include "ops_cuda.h"

namespace fastpar {

void bind_bucket(py::module_& m) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
#if FASTPAR_CUDA
  m.def(
      "accumulate_cuda",
      [](Address total, Address values, int total_dtype, int values_dtype, int64_t n,
         Address stream) {
        accumulate_cuda(at<void>(total), at<const void>(values), dtype_of(total_dtype),
                        dtype_of(values_dtype), n, at<void>(stream));
      },
      unlocked);
#endif
}

}  // namespace fastpar
