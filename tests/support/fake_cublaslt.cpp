// cublasLt on a CPU, for tests of csrc/linear_lt.cpp: the functions that it opens, with the meaning
// that NVIDIA's manual gives them, on host memory and column-major matrices. What the manual
// forbids is a status. fake_fault(n): 1 ReLU in the place of GELU, 2 no algorithm is found.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <vector>

#include "numeric.h"

using fastpar::BFloat16;
using fastpar::Float16;

namespace {

constexpr int kInvalid = 7, kNotSupported = 15;
int fault = 0, calls = 0, asked = 0;

struct Attributes {
  std::map<int, std::vector<char>> values;

  template <class T>
  T get(int name, T otherwise) const {
    const auto at = values.find(name);
    if (at == values.end()) return otherwise;
    T value;
    std::memcpy(&value, at->second.data(), sizeof(T));
    return value;
  }
};

struct Layout {
  int type;
  uint64_t rows, columns;
  int64_t step;
};

double load(const void* data, int type, int64_t at) {
  if (type == 14) return fastpar::to_float(static_cast<const BFloat16*>(data)[at]);
  return fastpar::to_float(static_cast<const Float16*>(data)[at]);
}

void store(void* data, int type, int64_t at, double value) {
  const float x = static_cast<float>(value);
  if (type == 14) {
    static_cast<BFloat16*>(data)[at] = fastpar::from_float<BFloat16>(x);
  } else {
    static_cast<Float16*>(data)[at] = fastpar::from_float<Float16>(x);
  }
}

double gelu(double u) {
  if (fault == 1) return std::max(u, 0.0);
  return 0.5 * u * (1 + std::tanh(std::sqrt(2 / M_PI) * (u + 0.044715 * u * u * u)));
}

double gelu_slope(double u) {
  const double c = std::sqrt(2 / M_PI), t = std::tanh(c * (u + 0.044715 * u * u * u));
  return 0.5 * (1 + t) + 0.5 * u * (1 - t * t) * c * (1 + 3 * 0.044715 * u * u);
}

int status_of(const Attributes& desc, const Layout& a, const Layout& b, const Layout& d) {
  const bool ta = desc.get<int32_t>(3, 0), tb = desc.get<int32_t>(4, 0);
  if ((ta ? a.columns : a.rows) != d.rows || (tb ? b.rows : b.columns) != d.columns)
    return kInvalid;
  if ((ta ? a.rows : a.columns) != (tb ? b.columns : b.rows)) return kInvalid;
  for (const Layout* x : {&a, &b, &d}) {
    if (x->step < static_cast<int64_t>(x->rows) || x->type != d.type) return kInvalid;
  }
  const uint32_t epilogue = desc.get<uint32_t>(7, 1);
  const auto step = desc.get<int64_t>(12, 0);
  if (epilogue & 128) {
    if (step % 8 || step < static_cast<int64_t>(d.rows)) return kInvalid;
    if (desc.get<void*>(11, nullptr) == nullptr) return kInvalid;
  }
  return desc.get<void*>(8, nullptr) == nullptr ? kInvalid : 0;
}

}  // namespace

extern "C" {

void fake_fault(int n) { fault = n; }
int fake_calls() { return calls; }
int fake_asked() { return asked; }

int cublasLtCreate(void** handle) {
  *handle = new int(1);
  return 0;
}

int cublasLtMatmulDescCreate(void** desc, int compute, int scale) {
  *desc = new Attributes;
  return compute == 68 && scale == 0 ? 0 : kInvalid;
}

int cublasLtMatmulDescDestroy(void* desc) {
  delete static_cast<Attributes*>(desc);
  return 0;
}

int cublasLtMatmulDescSetAttribute(void* desc, int name, const void* value, size_t size) {
  const std::map<int, size_t> sizes = {{3, 4}, {4, 4}, {7, 4}, {8, 8}, {11, 8}, {12, 8}};
  if (!sizes.count(name) || sizes.at(name) != size) return kInvalid;
  const char* bytes = static_cast<const char*>(value);
  static_cast<Attributes*>(desc)->values[name] = {bytes, bytes + size};
  return 0;
}

int cublasLtMatrixLayoutCreate(void** layout, int type, uint64_t rows, uint64_t columns,
                               int64_t step) {
  *layout = new Layout{type, rows, columns, step};
  return 0;
}

int cublasLtMatrixLayoutDestroy(void* layout) {
  delete static_cast<Layout*>(layout);
  return 0;
}

int cublasLtMatmulPreferenceCreate(void** preference) {
  *preference = new Attributes;
  return 0;
}

int cublasLtMatmulPreferenceDestroy(void* preference) {
  delete static_cast<Attributes*>(preference);
  return 0;
}

int cublasLtMatmulPreferenceSetAttribute(void* preference, int name, const void* value,
                                         size_t size) {
  const std::map<int, size_t> sizes = {{1, 8}, {3, 4}, {5, 4}, {6, 4}, {7, 4}, {8, 4}};
  if (!sizes.count(name) || sizes.at(name) != size) return kInvalid;
  const char* bytes = static_cast<const char*>(value);
  static_cast<Attributes*>(preference)->values[name] = {bytes, bytes + size};
  return 0;
}

// Whether every operand begins and steps at a multiple of 16 bytes, as the epilogues want.
bool is_aligned(const Attributes& preference, const std::vector<void*>& layouts) {
  bool aligned = true;
  for (int name = 5; name <= 8; ++name) aligned &= preference.get<uint32_t>(name, 256) >= 16;
  for (void* layout : layouts) aligned &= static_cast<Layout*>(layout)->step % 8 == 0;
  return aligned;
}

int cublasLtMatmulAlgoGetHeuristic(void*, void* desc, void* a, void* b, void*, void* d,
                                   void* preference, int, void* result, int* found) {
  ++asked;
  std::memset(result, 0, 96);
  *found = fault != 2 && is_aligned(*static_cast<Attributes*>(preference), {a, b, d});
  if (*found == 0) return kNotSupported;
  return status_of(*static_cast<Attributes*>(desc), *static_cast<Layout*>(a),
                   *static_cast<Layout*>(b), *static_cast<Layout*>(d));
}

int cublasLtMatmul(void*, void* desc_, const void* alpha, const void* a, void* a_layout,
                   const void* b, void* b_layout, const void* beta, const void*, void*, void* d,
                   void* d_layout, const void*, void*, size_t, void*) {
  const Attributes& desc = *static_cast<Attributes*>(desc_);
  const Layout& la = *static_cast<Layout*>(a_layout);
  const Layout& lb = *static_cast<Layout*>(b_layout);
  const Layout& ld = *static_cast<Layout*>(d_layout);
  const int status = status_of(desc, la, lb, ld);
  if (status != 0) return status;
  if (*static_cast<const float*>(alpha) != 1 || *static_cast<const float*>(beta) != 0) {
    return kInvalid;
  }
  ++calls;
  const bool ta = desc.get<int32_t>(3, 0), tb = desc.get<int32_t>(4, 0);
  const uint32_t epilogue = desc.get<uint32_t>(7, 1);
  void* const bias = desc.get<void*>(8, nullptr);
  void* const aux = desc.get<void*>(11, nullptr);
  const auto aux_step = desc.get<int64_t>(12, 0);
  const auto inner = static_cast<int64_t>(ta ? la.rows : la.columns);
  const auto rows = static_cast<int64_t>(ld.rows), columns = static_cast<int64_t>(ld.columns);
  std::vector<double> sums(std::max(rows, columns), 0.0);
  for (int64_t c = 0; c < columns; ++c) {
    for (int64_t r = 0; r < rows; ++r) {
      double x = 0;
      for (int64_t k = 0; k < inner; ++k) {
        const double second = load(b, lb.type, tb ? c + k * lb.step : k + c * lb.step);
        x += load(a, la.type, ta ? k + r * la.step : r + k * la.step) * second;
        if (epilogue == 512 && r == 0) sums[c] += second;
      }
      const int64_t at = r + c * aux_step;
      if (epilogue == 164) {
        x += load(bias, ld.type, r);
        store(aux, ld.type, at, x);
        x = gelu(x);
      } else if (epilogue == 208) {
        x *= gelu_slope(load(aux, ld.type, at));
        sums[r] += x;
      }
      store(d, ld.type, r + c * ld.step, x);
    }
  }
  if (epilogue == 208 || epilogue == 512) {
    for (int64_t i = 0; i < (epilogue == 208 ? rows : columns); ++i) {
      store(bias, ld.type, i, sums[i]);
    }
  }
  return 0;
}

}  // extern "C"
