// The one PYBIND11_MODULE: fastpar.kernels._C. The ops of a model are bound here, those of the
// runtime in bindings_<op>.cpp.
#include "bindings.h"

#include <algorithm>
#include <array>

#include "ops_cuda.h"
#include "simd.h"

namespace fastpar {
namespace {

MaskBlock mask_block(int64_t seed, int64_t first_sample, int site, int threshold, int64_t samples,
                     int64_t heads, int64_t rows, int64_t cols, int64_t first_head,
                     int64_t first_row, int64_t low = 0, int64_t high = 0) {
  FASTPAR_CHECK(threshold >= 0 && threshold <= 255,
                "dropout: expected 0 <= threshold <= 255, got threshold=", threshold,
                "; use quantize_p");
  return {seed, first_sample, site,       threshold, samples, heads,
          rows, cols,         first_head, first_row, low,     high};
}

// Rows of logits [N, width]; grad and scale, [] or [N], may be None.
CrossEntropyRows cross_entropy_rows(const View& logits, const Memory& targets, const View& grad,
                                    const View& scale, int64_t v, int64_t ignore_index,
                                    double label_smoothing, double z_loss, double softcap) {
  CrossEntropyRows rows;
  rows.n = logits.size[0];
  rows.width = logits.size[1];
  const Type type = static_cast<Type>(logits.dtype("logits"));
  rows.logits = logits.as(type, {rows.n, rows.width}, "logits");
  if (grad) grad.as(type, {rows.n, rows.width}, "grad");
  rows.targets = static_cast<const int64_t*>(targets.of(Type::i64, rows.n, "targets"));
  FASTPAR_CHECK(v <= rows.width, "cross_entropy: expected v <= ", rows.width, ", got v=", v,
                "; use kernels/loss/cross_entropy.py");
  rows.v = v;
  rows.stride = logits.stride[0];
  rows.grad_stride = grad.stride[0];
  FASTPAR_CHECK(!scale || (scale.type == Type::f32 && scale.numel == (scale.dims ? rows.n : 1)),
                "cross_entropy: expected scale of float32, one or ", rows.n, ", got ", scale.numel,
                " of ", type_name(scale.type), "; use kernels/loss/cross_entropy.py");
  rows.scale = at<const float>(scale.address);
  rows.scale_stride = scale.stride[0];
  rows.ignore_index = ignore_index;
  rows.label_smoothing = label_smoothing;
  rows.z_loss = z_loss;
  rows.softcap = softcap;
  return rows;
}

// exp_float over an array, for tests of its accuracy.
struct ExpArray {
  static FASTPAR_INLINE void run(const float* x, float* y, int64_t n) {
    for (int64_t i = 0; i < n; ++i) y[i] = exp_float(x[i]);
  }
};

// Conversion to and from a storage type over an array, for tests of its rounding.
template <class T>
struct RoundArray {
  static FASTPAR_INLINE void run(const float* x, float* y, int64_t n) {
    for (int64_t i = 0; i < n; ++i) y[i] = to_float(from_float<T>(x[i]));
  }
};

// kernels/lists.py swap(): the entries of many dicts in one call.
void swap(const py::list& uses, const py::sequence& before, const py::sequence& after,
          const py::sequence& which) {
  const auto at = [](const py::handle& x, Py_ssize_t i) {
    py::object item = py::reinterpret_steal<py::object>(PySequence_GetItem(x.ptr(), i));
    if (!item) throw py::error_already_set();
    return item;
  };
  for (const py::handle use : uses) {
    const auto each = py::reinterpret_borrow<py::tuple>(use);
    const py::object table = each[0], name = each[1];
    const Py_ssize_t i = PyLong_AsSsize_t(each[2].ptr());
    if (i < 0 || !PyDict_Check(table.ptr())) throw py::type_error("_C.swap: expected uses");
    if (at(which, i).ptr() != Py_True) continue;
    PyObject* const found = PyDict_GetItemWithError(table.ptr(), name.ptr());
    if (found != nullptr && found == at(before, i).ptr()) {
      if (PyDict_SetItem(table.ptr(), name.ptr(), at(after, i).ptr())) {
        throw py::error_already_set();
      }
    } else if (PyErr_Occurred()) {
      throw py::error_already_set();
    }
  }
}

// kernels/lists.py same_entries(): many dicts and lists compared in one call.
bool same_entries(const py::dict& table, const py::list& keys, const py::list& values,
                  const py::list& of, const py::list& names, const py::list& columns) {
  if (table.size() != keys.size() || keys.size() != values.size()) return false;
  PyObject *key, *value;
  Py_ssize_t next = 0;
  for (size_t i = 0; PyDict_Next(table.ptr(), &next, &key, &value); ++i) {
    if (keys[i].ptr() != key || values[i].ptr() != value) return false;
  }
  for (size_t c = 0; c < names.size(); ++c) {
    const py::list column = columns[c];
    if (column.size() != of.size()) return false;
    for (size_t i = 0; i < of.size(); ++i) {
      PyObject* const entries = PyList_GET_ITEM(of.ptr(), static_cast<Py_ssize_t>(i));
      if (!PyDict_Check(entries)) return false;
      PyObject* const found = PyDict_GetItemWithError(entries, names[c].ptr());
      if (found == nullptr && PyErr_Occurred()) throw py::error_already_set();
      if (found != PyList_GET_ITEM(column.ptr(), static_cast<Py_ssize_t>(i))) return false;
    }
  }
  return true;
}

void bind_ops(py::module_& m) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  m.def("isa", &isa_name);
  m.def("isa_supported", &isa_supported);
  m.def("has_fma", &has_fma);
  m.def("cpu_is_intel", &cpu_is_intel);
  m.def("set_isa", &set_isa);
  m.def("keep_freed_memory", &keep_freed_memory);
  m.def("swap", &swap);
  m.def("same_entries", &same_entries);
  m.def(
      "gemm",
      [](const View& a, const View& b, const View& c, bool accumulate, const Memory& bias,
         int threads) {
        const int64_t rows = a.size[0], k = a.size[1], columns = b.size[1];
        const bool bf16 = a.type == Type::bf16;
        FASTPAR_CHECK(isa_supported(bf16 ? "amx" : "avx512"),
                      "gemm: expected a CPU with AVX-512, and AMX for bf16, got isa=", isa_name(),
                      "; use torch.mm");
        FASTPAR_CHECK(a.dims == 2 && b.dims == 2 && (bf16 || a.type == Type::f32) &&
                          b.type == a.type && b.size[0] == k,
                      "gemm: expected float32 or bfloat16 matrices [M, K] and [K, N], got K=", k,
                      " and K=", b.size[0], "; use torch.mm");
        const bool narrow = bf16 && c.type == Type::bf16;
        void* out = c.as(narrow ? Type::bf16 : Type::f32, {rows, columns}, "c");
        gemm({at<const void>(a.address), a.stride[0], a.stride[1]},
             {at<const void>(b.address), b.stride[0], b.stride[1]}, out, c.stride[0], rows, columns,
             k, accumulate, bias ? bias.of(a.type, columns, "bias") : nullptr,
             bf16 ? Dtype::bfloat16 : Dtype::float32, narrow ? Dtype::bfloat16 : Dtype::float32,
             threads);
      },
      unlocked);
  m.def(
      "count_targets",
      [](const Memory& targets, int64_t v, int64_t ignore_index) {
        const void* at = targets.of(Type::i64, targets.numel, "targets");
        return count_targets(static_cast<const int64_t*>(at), targets.numel, v, ignore_index);
      },
      unlocked);
  m.def(
      "cross_entropy_rows",
      [](const View& logits, const Memory& targets, const View& scale, const View& grad,
         const Memory& loss, int64_t v, int64_t ignore_index, double label_smoothing, double z_loss,
         double softcap, int threads) {
        const auto rows = cross_entropy_rows(logits, targets, grad, scale, v, ignore_index,
                                             label_smoothing, z_loss, softcap);
        cross_entropy_rows(rows, at<void>(grad.address), loss.floats(rows.n, "loss"),
                           logits.dtype("logits"), threads);
      },
      unlocked);
  m.def(
      "cross_entropy_shard",
      [](const View& logits, const Memory& targets, const Memory& max, const Memory& sum,
         const Memory& target_logit, int64_t first, int64_t v, int64_t ignore_index, double softcap,
         int threads) {
        const auto rows =
            cross_entropy_rows(logits, targets, {}, {}, v, ignore_index, 0.0, 0.0, softcap);
        cross_entropy_shard(rows, first, max.floats(rows.n, "max"), sum.floats(rows.n, "sum"),
                            target_logit.floats(rows.n, "target_logit"), logits.dtype("logits"),
                            threads);
      },
      unlocked);
  m.def(
      "cross_entropy_shard_grad",
      [](const View& logits, const Memory& targets, const Memory& lse, const View& scale,
         const View& grad, int64_t first, int64_t v, int64_t ignore_index, double z_loss,
         double softcap, int threads) {
        const auto rows =
            cross_entropy_rows(logits, targets, grad, scale, v, ignore_index, 0.0, z_loss, softcap);
        cross_entropy_shard_grad(rows, first, lse.floats(rows.n, "lse"), at<void>(grad.address),
                                 logits.dtype("logits"), threads);
      },
      unlocked);
  m.def(
      "dropout",
      [](const Memory& x, const Memory& y, int64_t seed, int64_t first_sample, int site,
         int threshold, int64_t samples, int64_t heads, int64_t rows, int64_t cols,
         int64_t first_head, int64_t first_row, int threads) {
        const Dtype dtype = x.dtype("x");
        const int64_t n = samples * heads * rows * cols;
        dropout(x.of(dtype, n, "x"), y.of(dtype, n, "y"), dtype,
                mask_block(seed, first_sample, site, threshold, samples, heads, rows, cols,
                           first_head, first_row),
                threads);
      },
      unlocked);
  m.def(
      "keep_mask",
      [](const Memory& keep, int64_t seed, int64_t first_sample, int site, int threshold,
         int64_t samples, int64_t heads, int64_t rows, int64_t cols, int64_t first_head,
         int64_t first_row, int threads) {
        const auto block = mask_block(seed, first_sample, site, threshold, samples, heads, rows,
                                      cols, first_head, first_row);
        void* to = keep.of(Type::boolean, samples * heads * rows * cols, "keep");
        keep_mask(static_cast<uint8_t*>(to), block, threads);
      },
      unlocked);
  // stats: mean and rstd [2, N], with rms rstd alone [1, N].
  m.def(
      "exp_array",
      [](const Memory& x, const Memory& y) {
        const float* from = x.floats(x.numel, "x");
        dispatch<ExpArray>(isa(), from, y.floats(x.numel, "y"), x.numel);
      },
      unlocked);
  m.def(
      "round_array",
      [](const Memory& x, const Memory& y, int dtype) {
        const float* from = x.floats(x.numel, "x");
        float* to = y.floats(x.numel, "y");
        with_dtype(dtype_of(dtype), [&](auto tag) {
          dispatch<RoundArray<decltype(tag)>>(isa(), from, to, x.numel);
        });
      },
      unlocked);
}

}  // namespace
}  // namespace fastpar

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled kernels of fastpar; see csrc/ops.h for every contract.";
  m.attr("built_with_cuda") = bool(FASTPAR_CUDA);
  m.attr("why_without_cuda") = FASTPAR_WITHOUT_CUDA;  // "" with CUDA
  fastpar::bind_ops(m);
  fastpar::bind_adamw(m);
  fastpar::bind_flat(m);
  fastpar::bind_shm(m);
  fastpar::bind_global_norm(m);
}
