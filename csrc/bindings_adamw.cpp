#include <algorithm>
#include <optional>

#include "bindings.h"
#include "ops_cuda.h"

namespace fastpar {
namespace {

constexpr int kColumns = 8;
constexpr const char* kNames[kColumns] = {
    "params",          "grads",          "exp_avgs",       "exp_avg_sqs",
    "max_exp_avg_sqs", "master_weights", "exp_avg_scales", "exp_avg_sq_scales"};
enum Column { kParam, kGrad, kExpAvg, kExpAvgSq, kMax, kMaster, kScale, kScaleSq };

// One row for each tensor; null for optional lists that are not given.
struct Columns {
  std::array<const Listed*, kColumns> of{};
  const Listed* counters = nullptr;  // of steps, on the host
  int64_t n = 0;

  // used: parameters, then gradients; kept: the rows of all lists of states that are given, one
  // after another, then counters; bit c says that column c is given.
  Columns(const Rows& used, const Rows& kept, int given, bool counted) {
    n = static_cast<int64_t>(used.size) / 2;
    of[kParam] = used.begin();
    of[kGrad] = used.begin() + n;
    const Listed* next = kept.begin();
    for (int c = kExpAvg; c < kColumns; ++c) {
      if (given >> c & 1) of[c] = next, next += n;
    }
    if (counted) counters = next, next += n;
    FASTPAR_CHECK((given & 15) == 15 && used.size % 2 == 0 && next == kept.end(),
                  "adamw_step: expected lists of equal length, got ", used.size,
                  " parameters and gradients and ", kept.size,
                  " tensors of states; use kernels/adamw.py");
  }

  // Of all tensors of a column, Type::other if they differ.
  Type type(int c) const {
    const auto same = [&](const Listed& x) { return x.type == of[c]->type; };
    return of[c] && n && std::all_of(of[c], of[c] + n, same) ? static_cast<Type>(of[c]->type)
                                                             : Type::other;
  }

  // Whether all counters can be counted.
  bool counts() const {
    return !counters || std::all_of(counters, counters + n, [](const Listed& x) {
      const bool number =
          x.type == static_cast<int>(Type::f32) || x.type == static_cast<int>(Type::f64);
      return x.in_memory && x.device == 0 && x.numel == 1 && number;
    });
  }

  // The number of steps of a tensor, after adding to it.
  double count(int64_t i, float by) const {
    const Listed& x = counters[i];
    if (x.type == static_cast<int>(Type::f64)) return *at<double>(x.address) += by;
    return *at<float>(x.address) += by;
  }

  // Whether the tensors of a row can be updated as flat memory.
  bool fits(int64_t i) const {
    const Listed& p = of[kParam][i];
    for (int c = 0; c < kColumns; ++c) {
      if (!of[c]) continue;
      const Listed& x = of[c][i];
      if (!x.in_memory || x.device != of[kParam]->device) return false;
      if (c >= kScale) {
        if (!x.contiguous || x.numel != (p.numel + 255) / 256) return false;
      } else if (x.shape != p.shape || x.numel != p.numel) {
        return false;
      } else if (!(p.contiguous ? x.contiguous : x.dense && x.strides == p.strides)) {
        return false;
      }
    }
    return true;
  }
};

// How such lists are stored; none where kernels/adamw.py check_one refuses them, or its caller
// converts them first. stochastic: whether 16-bit parameters need no master.
std::optional<AdamwModes> modes_of(const Columns& columns, bool stochastic) {
  const Type param = columns.type(kParam), grad = columns.type(kGrad);
  const Type moment = columns.type(kExpAvg), master = columns.type(kMaster);
  if (param > Type::f16 || grad > Type::f16 || columns.type(kExpAvgSq) != moment) return {};
  AdamwModes modes{};
  modes.param = static_cast<Dtype>(param);
  modes.grad = static_cast<Dtype>(grad);
  const bool wide = grad == param || grad == Type::f32;
  if (columns.of[kMaster] && master == Type::f32 && param != Type::f32) {
    modes.master = Master::full;
  } else if (columns.of[kMaster] && master == Type::i16 && param == Type::bf16 && wide) {
    modes.master = Master::remainder;
  } else if (!columns.of[kMaster] && param == Type::f32 && grad == Type::f32) {
    modes.master = Master::none;
  } else if (!columns.of[kMaster] && param == Type::bf16 && wide && stochastic) {
    modes.master = Master::stochastic;
  } else {
    return {};
  }
  const bool codes = moment == Type::u8;
  if (!codes && moment != Type::f32 && moment != Type::bf16) return {};
  modes.moment = codes ? Moment::uint8 : moment == Type::f32 ? Moment::float32 : Moment::bfloat16;
  if (columns.of[kMax] && (codes || columns.type(kMax) != moment)) return {};
  for (int c = kScale; c <= kScaleSq; ++c) {
    if (codes ? columns.type(c) != Type::f32 : columns.of[c] != nullptr) return {};
  }
  for (int64_t i = 0; i < columns.n; ++i) {
    if (!columns.fits(i)) return {};
  }
  return modes;
}

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
    const bool read = last && last->column == kGrad && next.column == kGrad && !grads_too;
    FASTPAR_CHECK(!last || read || last->end <= next.begin,
                  "adamw_step_: expected tensors and ranges that share no memory, got ",
                  kNames[last->column], "[", last->tensor, "] overlapping ", kNames[next.column],
                  "[", next.tensor, "]; pass each parameter once and give it states of its own");
    if (!last || next.end > last->end) last = &next;
  }
}

// What each tensor of a call takes: its hyper (empty: the first), and the index of its first
// element (empty: after the tensors before, each rounded up to 256).
struct Places {
  const std::vector<int64_t>&hyper, &first_index;
};

struct AdamwCall {
  std::vector<AdamwRange> ranges;
  std::vector<AdamwHyper> hypers;
};

// Numbers of all hypers, 6 each in the order of AdamwHyper, and for some the tensor to read. Where
// there are counters, they have the steps.
struct Hypers {
  const std::vector<double>& numbers;
  const std::vector<Memory>& tensors;
  const std::vector<int64_t>& slots;
};

AdamwCall adamw_call(const Columns& columns, const AdamwModes& modes, const Places& places,
                     const Hypers& hypers) {
  AdamwCall call;
  const size_t count = columns.n;
  FASTPAR_CHECK(hypers.numbers.size() % 6 == 0 && hypers.tensors.size() == hypers.slots.size() &&
                    (places.hyper.empty() || places.hyper.size() == count) &&
                    (places.first_index.empty() || places.first_index.size() == count),
                "adamw_step: expected 6 numbers per hyper, a slot per hyper tensor and an entry per"
                " tensor, got ",
                hypers.numbers.size(), " numbers and ", count, " tensors; use kernels/adamw.py");
  for (size_t h = 0; h < hypers.numbers.size(); h += 6) {
    const double* x = &hypers.numbers[h];
    const float* p[6] = {};
    for (size_t i = 0; i < hypers.slots.size(); ++i) {
      const int64_t at = hypers.slots[i] - static_cast<int64_t>(h);
      if (at >= 0 && at < 6) p[at] = hypers.tensors[i].floats(1, "hyper");
    }
    call.hypers.push_back({x[0], x[1], x[2], x[3], x[4], x[5], p[0], p[1], p[2], p[3], p[4], p[5]});
  }
  const Address moment_bytes = modes.moment == Moment::float32    ? 4
                               : modes.moment == Moment::bfloat16 ? 2
                                                                  : 1;
  const Address bytes[6] = {modes.param == Dtype::float32 ? 4u : 2u,
                            modes.grad == Dtype::float32 ? 4u : 2u,
                            moment_bytes,
                            moment_bytes,
                            moment_bytes,
                            modes.master == Master::remainder ? 2u : 4u};
  std::vector<std::pair<int64_t, double>> counted;  // hyper and step of each of the call's hypers
  const std::vector<AdamwHyper> given = call.hypers;
  if (columns.counters) call.hypers.clear();
  const int64_t whole = modes.moment == Moment::uint8 ? 256 : 1;
  std::vector<Extent> extents;
  extents.reserve(count * 6);
  int64_t next = 0;  // among the random bits
  for (size_t i = 0; i < count; ++i) {
    const int64_t size = columns.of[kParam][i].numel;
    const int64_t first = places.first_index.empty() ? next : places.first_index[i];
    int64_t hyper = places.hyper.empty() ? 0 : places.hyper[i];
    next += (size + 255) / 256 * 256;
    FASTPAR_CHECK(first >= 0 && (size == 0 || first % whole == 0) && hyper >= 0 &&
                      hyper < static_cast<int64_t>(given.size()),
                  "adamw_step: expected places within their lists, got tensor ", i, "; use ",
                  "kernels/adamw.py");
    if (size == 0) continue;
    if (columns.counters) {
      const std::pair<int64_t, double> key{hyper, columns.count(i, 0.0f) + 1.0};
      const auto same = std::find(counted.rbegin(), counted.rend(), key);
      hyper = counted.rend() - same - 1;
      if (same == counted.rend()) {
        hyper = static_cast<int64_t>(counted.size());
        counted.push_back(key);
        call.hypers.push_back(given[key.first]);
        call.hypers.back().step = key.second;
      }
    }
    Address found[kColumns] = {};
    for (int c = 0; c < kColumns; ++c) {
      if (!columns.of[c]) continue;
      const Address length = c < kScale ? size * bytes[c] : (size + 255) / 256 * 4;
      found[c] = columns.of[c][i].address;
      extents.push_back({found[c], found[c] + length, c, static_cast<int64_t>(i)});
    }
    call.ranges.push_back({at<void>(found[0]), at<void>(found[1]), at<void>(found[2]),
                           at<void>(found[3]), at<void>(found[4]), at<void>(found[5]),
                           at<float>(found[6]), at<float>(found[7]), size, first,
                           static_cast<int>(hyper)});
  }
  refuse_overlap(extents, modes.zero_grad);
  return call;
}

int64_t run(const AdamwCall& call, const AdamwModes& modes, int threads) {
  adamw_step(call.ranges.data(), static_cast<int64_t>(call.ranges.size()), call.hypers.data(),
             static_cast<int64_t>(call.hypers.size()), modes, threads);
  return 0;
}

#if FASTPAR_CUDA
int64_t run_cuda(const AdamwCall& call, const AdamwModes& modes, Address stream) {
  return adamw_step_cuda(call.ranges.data(), static_cast<int64_t>(call.ranges.size()),
                         call.hypers.data(), static_cast<int64_t>(call.hypers.size()), modes,
                         at<void>(stream));
}
#endif

// The number of launches; None, and no step was made, for lists that kernels/adamw.py has to look
// at.
template <auto Run, class Where>
std::optional<int64_t> step(const Rows& used, const Rows& kept, int given, bool counted,
                            const std::vector<int64_t>& hyper_index,
                            const std::vector<int64_t>& first_indices,
                            const std::vector<double>& hypers,
                            const std::vector<Memory>& hyper_tensors,
                            const std::vector<int64_t>& hyper_slots, bool maximize, bool zero_grad,
                            const Memory& grad_scale, const Memory& found_inf,
                            std::optional<uint64_t> seed, Where where) {
  const Columns columns(used, kept, given, counted);
  auto modes = modes_of(columns, seed.has_value());
  const bool on_host = columns.n == 0 || columns.of[kParam]->device == 0;
  if (!modes || !columns.counts() || (counted && found_inf && !on_host)) return {};
  modes->maximize = maximize;
  modes->zero_grad = zero_grad;
  modes->grad_scale = grad_scale.floats_or_null(1, "grad_scale");
  modes->found_inf = found_inf.floats_or_null(1, "found_inf");
  modes->seed = seed.value_or(0);
  const int64_t launches = Run(adamw_call(columns, *modes, {hyper_index, first_indices},
                                          {hypers, hyper_tensors, hyper_slots}),
                               *modes, where);
  if (counted && !(found_inf && *modes->found_inf != 0.0f)) {
    for (int64_t i = 0; i < columns.n; ++i) columns.count(i, 1.0f);
  }
  return launches;
}

// Whether step() takes such lists.
bool fits(const Rows& used, const Rows& kept, int given, bool stochastic) {
  return modes_of(Columns(used, kept, given, false), stochastic).has_value();
}

}  // namespace

void bind_adamw(py::module_& m) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  m.def("adamw_step", &step<run, int>, unlocked);
  m.def("adamw_fits", &fits, unlocked);
#if FASTPAR_CUDA
  m.def("adamw_step_cuda", &step<run_cuda, Address>, unlocked);
#endif
}

}  // namespace fastpar
