#include "bindings.h"
#include "shm.h"

namespace fastpar {
namespace {

ShmType shm_type(int code) {
  FASTPAR_CHECK(code >= 0 && code <= 4, "ShmGroup: expected type code 0 to 4, got code=", code,
                "; use fastpar/comm/shm.py");
  return static_cast<ShmType>(code);
}

}  // namespace

void bind_shm(py::module_& m) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  py::class_<ShmGroup>(m, "ShmGroup", py::module_local())  // the tests load a second module
      .def(py::init([](Address block, int rank, int world, int64_t chunk_bytes, int64_t heap_bytes,
                       const std::vector<int>& pidfds, double timeout_s) {
        return new ShmGroup(at<void>(block), rank, world, chunk_bytes, heap_bytes, pidfds,
                            timeout_s);
      }))
      .def_static("block_bytes", &ShmGroup::block_bytes)
      .def(
          "all_reduce",
          [](ShmGroup& group, Address x, int64_t n, int type, bool mean, int64_t tag) {
            group.all_reduce(at<void>(x), n, shm_type(type), mean, tag);
          },
          unlocked)
      .def(
          "reduce_scatter",
          [](ShmGroup& group, Address out, Address x, int64_t n, int type, bool mean, bool widened,
             int64_t tag) {
            group.reduce_scatter(at<void>(out), at<void>(x), n, shm_type(type), mean, widened, tag);
          },
          unlocked)
      .def(
          "all_gather",
          [](ShmGroup& group, Address out, Address x, int64_t n, const std::string& name,
             int64_t bytes, int64_t tag) {
            group.all_gather(at<void>(out), at<const void>(x), n, {name.c_str(), bytes}, tag);
          },
          unlocked)
      .def(
          "broadcast",
          [](ShmGroup& group, Address x, int64_t n, const std::string& name, int64_t bytes,
             int source,
             int64_t tag) { group.broadcast(at<void>(x), n, {name.c_str(), bytes}, source, tag); },
          unlocked)
      .def("barrier", &ShmGroup::barrier, unlocked)
      .def("stop", &ShmGroup::stop, unlocked)
      .def_property_readonly(
          "heap", [](const ShmGroup& group) { return reinterpret_cast<Address>(group.heap()); });
}

}  // namespace fastpar
