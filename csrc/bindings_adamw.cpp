#include <algorithm>

#include "bindings.h"
#include "ops_cuda.h"

namespace fastpar {
namespace {

// Of one argument for each tensor; the optional ones are empty lists where they are not used.
// params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, masters, exp_avg_scales,
// exp_avg_sq_scales
using Columns = std::array<std::vector<Memory>, 8>;
constexpr const char* kColumns[8] = {
    "params",          "grads",          "exp_avgs",       "exp_avg_sqs",
    "max_exp_avg_sqs", "master_weights", "exp_avg_scales", "exp_avg_sq_scales"};

struct AdamwCall {
  std::vector<AdamwRange> ranges;
  std::vector<AdamwHyper> hypers;
  AdamwModes modes;
};

// Memory of one column of one tensor.
struct Extent {
  Address begin, end;
  int column;
  int64_t tensor;
};

// Every element is written by one thread only if no two ranges share memory. Gradients that are
// only read may.
void refuse_overlap(std::vector<Extent>& extents, bool grads_too) {
  std::sort(extents.begin(), extents.end(),
            [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  const Extent* last = nullptr;  // the one that reaches furthest so far
  for (const Extent& next : extents) {
    const bool read = last && last->column == 1 && next.column == 1 && !grads_too;
    FASTPAR_CHECK(!last || read || last->end <= next.begin,
                  "adamw_step_: expected tensors and ranges that share no memory, got ",
                  kColumns[last->column], "[", last->tensor, "] overlapping ",
                  kColumns[next.column], "[", next.tensor,
                  "]; pass each parameter once and give it states of its own");
    if (!last || next.end > last->end) last = &next;
  }
}

// ranges: 5 numbers each: tensor, start, stop, hyper, first_index. hypers: 6 each, in the order of
// AdamwHyper, and hypers_at as many tensors, None where the number counts.
AdamwCall adamw_call(const Columns& columns, const std::vector<int64_t>& ranges,
                     const std::vector<double>& hypers, const std::vector<Memory>& hypers_at,
                     const std::array<int, 4>& storage, bool maximize, bool zero_grad,
                     const Memory& grad_scale, const Memory& found_inf, uint64_t seed) {
  AdamwCall call;
  const int64_t n = static_cast<int64_t>(columns[0].size());
  for (int c = 1; c < 8; ++c) {
    const int64_t size = static_cast<int64_t>(columns[c].size());
    FASTPAR_CHECK(size == n || (c >= 4 && size == 0),
                  "adamw_step: expected lists of equal length, got params=", n, " ", kColumns[c],
                  "=", size, "; pass one entry per tensor");
  }
  const int64_t hyper_count = static_cast<int64_t>(hypers.size()) / 6;
  FASTPAR_CHECK(hypers.size() == static_cast<size_t>(hyper_count) * 6 &&
                    hypers_at.size() == hypers.size() && ranges.size() % 5 == 0,
                "adamw_step: expected 6 numbers and tensors per hyper and 5 per range, got ",
                hypers.size(), ", ", hypers_at.size(), " and ", ranges.size(),
                "; use kernels/adamw.py");
  for (int64_t h = 0; h < hyper_count; ++h) {
    const double* x = &hypers[h * 6];
    const float* p[6];
    for (int i = 0; i < 6; ++i) p[i] = hypers_at[h * 6 + i].floats_or_null(1, "hyper");
    call.hypers.push_back({x[0], x[1], x[2], x[3], x[4], x[5], p[0], p[1], p[2], p[3], p[4], p[5]});
  }
  FASTPAR_CHECK(storage[2] >= 0 && storage[2] <= 2 && storage[3] >= 0 && storage[3] <= 3,
                "adamw_step: expected moment codes 0 to 2 and master codes 0 to 3, got ",
                storage[2], " and ", storage[3], "; use kernels/adamw.py");
  call.modes = {dtype_of(storage[0]),
                dtype_of(storage[1]),
                static_cast<Moment>(storage[2]),
                static_cast<Master>(storage[3]),
                maximize,
                zero_grad,
                grad_scale.floats_or_null(1, "grad_scale"),
                found_inf.floats_or_null(1, "found_inf"),
                seed};
  const Address param_bytes = call.modes.param == Dtype::float32 ? 4 : 2;
  const Address grad_bytes = call.modes.grad == Dtype::float32 ? 4 : 2;
  const Address moment_bytes = call.modes.moment == Moment::float32    ? 4
                               : call.modes.moment == Moment::bfloat16 ? 2
                                                                       : 1;
  const Address master_bytes = call.modes.master == Master::remainder ? 2 : 4;
  const Address bytes[6] = {param_bytes,  grad_bytes,   moment_bytes,
                            moment_bytes, moment_bytes, master_bytes};
  const Type moment = call.modes.moment == Moment::float32    ? Type::f32
                      : call.modes.moment == Moment::bfloat16 ? Type::bf16
                                                              : Type::u8;
  const Type types[8] = {static_cast<Type>(call.modes.param),
                         static_cast<Type>(call.modes.grad),
                         moment,
                         moment,
                         moment,
                         call.modes.master == Master::remainder ? Type::i16 : Type::f32,
                         Type::f32,
                         Type::f32};
  for (int c = 0; c < 8; ++c) {
    for (size_t i = 0; i < columns[c].size(); ++i) {
      const Memory& x = columns[c][i];
      const int64_t size = columns[0][i].numel, wanted = c < 6 ? size : (size + 255) / 256;
      FASTPAR_CHECK(x.type == types[c] && x.numel == wanted && x.dense, "adamw_step: expected ",
                    kColumns[c], "[", i, "] of ", wanted, " elements of ", type_name(types[c]),
                    " in one block of memory, got ", x.numel, " of ", type_name(x.type),
                    x.dense ? "" : " with gaps", "; use kernels/adamw.py");
    }
  }
  std::vector<Extent> extents;
  extents.reserve(ranges.size() / 5 * 6);
  for (size_t i = 0; i < ranges.size(); i += 5) {
    const int64_t tensor = ranges[i], start = ranges[i + 1], stop = ranges[i + 2];
    FASTPAR_CHECK(tensor >= 0 && tensor < n && 0 <= start && start <= stop &&
                      stop <= columns[0][tensor].numel && ranges[i + 3] >= 0 &&
                      ranges[i + 3] < hyper_count && ranges[i + 4] >= 0,
                  "adamw_step: expected ranges within their lists, got range ", i / 5, "; use ",
                  "kernels/adamw.py");
    if (start == stop) continue;
    Address found[8] = {};
    for (int c = 0; c < 8; ++c) {
      if (columns[c].empty()) continue;
      const Address offset = c < 6 ? start * bytes[c] : start / 256 * 4;
      const Address size = c < 6 ? (stop - start) * bytes[c] : (stop - start + 255) / 256 * 4;
      found[c] = columns[c][tensor].address + offset;
      extents.push_back({found[c], found[c] + size, c, tensor});
    }
    call.ranges.push_back({at<void>(found[0]), at<void>(found[1]), at<void>(found[2]),
                           at<void>(found[3]), at<void>(found[4]), at<void>(found[5]),
                           at<float>(found[6]), at<float>(found[7]), stop - start, ranges[i + 4],
                           static_cast<int>(ranges[i + 3])});
  }
  refuse_overlap(extents, zero_grad);
  return call;
}

void step(const Columns& columns, const std::vector<int64_t>& ranges,
          const std::vector<double>& hypers, const std::vector<Memory>& hypers_at,
          const std::array<int, 4>& storage, bool maximize, bool zero_grad,
          const Memory& grad_scale, const Memory& found_inf, uint64_t seed, int threads) {
  const AdamwCall call = adamw_call(columns, ranges, hypers, hypers_at, storage, maximize,
                                    zero_grad, grad_scale, found_inf, seed);
  adamw_step(call.ranges.data(), static_cast<int64_t>(call.ranges.size()), call.hypers.data(),
             static_cast<int64_t>(call.hypers.size()), call.modes, threads);
}

#if FASTPAR_CUDA
int64_t step_cuda(const Columns& columns, const std::vector<int64_t>& ranges,
                  const std::vector<double>& hypers, const std::vector<Memory>& hypers_at,
                  const std::array<int, 4>& storage, bool maximize, bool zero_grad,
                  const Memory& grad_scale, const Memory& found_inf, uint64_t seed,
                  Address stream) {
  const AdamwCall call = adamw_call(columns, ranges, hypers, hypers_at, storage, maximize,
                                    zero_grad, grad_scale, found_inf, seed);
  return adamw_step_cuda(call.ranges.data(), static_cast<int64_t>(call.ranges.size()),
                         call.hypers.data(), static_cast<int64_t>(call.hypers.size()), call.modes,
                         at<void>(stream));
}
#endif

}  // namespace

void bind_adamw(py::module_& m) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  m.def("adamw_step", &step, unlocked);
#if FASTPAR_CUDA
  m.def("adamw_step_cuda", &step_cuda, unlocked);
#endif
}

}  // namespace fastpar
