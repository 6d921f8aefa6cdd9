#include <algorithm>

#include "bindings.h"
#include "shm.h"

namespace fastpar {
namespace {

ShmType shm_type(Type type) {
  constexpr Type types[] = {Type::f32, Type::bf16, Type::f16, Type::f64, Type::i64};
  const auto found = std::find(std::begin(types), std::end(types), type);
  FASTPAR_CHECK(found != std::end(types), "ShmGroup: expected numbers that can be summed, got ",
                type_name(type), "; cast them");
  return static_cast<ShmType>(found - std::begin(types));
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
          [](ShmGroup& group, const Memory& x, bool mean, int64_t tag) {
            group.all_reduce(x.of(x.type, x.numel, "x"), x.numel, shm_type(x.type), mean, tag);
          },
          unlocked)
      .def(
          "reduce_scatter",
          [](ShmGroup& group, const Memory& out, const Memory& x, bool mean, int64_t tag) {
            const bool widened = out.type != x.type;
            const int64_t n = out.numel;
            group.reduce_scatter(out.of(widened ? Type::f32 : x.type, n, "out"),
                                 x.of(x.type, n * group.world(), "x"), n, shm_type(x.type), mean,
                                 widened, tag);
          },
          unlocked)
      .def(
          "all_gather",
          [](ShmGroup& group, const Memory& out, const Memory& x, const std::string& name,
             int64_t bytes, int64_t tag) {
            const int64_t n = x.numel;
            group.all_gather(out.of(x.type, n * group.world(), "out"), x.of(x.type, n, "x"), n,
                             {name.c_str(), bytes}, tag);
          },
          unlocked)
      .def(
          "broadcast",
          [](ShmGroup& group, const Memory& x, const std::string& name, int64_t bytes, int source,
             int64_t tag) {
            group.broadcast(x.of(x.type, x.numel, "x"), x.numel, {name.c_str(), bytes}, source,
                            tag);
          },
          unlocked)
      .def("barrier", &ShmGroup::barrier, unlocked)
      .def("stop", &ShmGroup::stop, unlocked)
      .def_property_readonly(
          "heap", [](const ShmGroup& group) { return reinterpret_cast<Address>(group.heap()); });
}

}  // namespace fastpar
