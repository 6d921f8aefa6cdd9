// [Note: no header] cublasLt is opened at run time, where torch has loaded it, and the part of its
// binary interface that is used here is declared below: building needs neither its headers nor
// nvcc. The numbers are those of cublasLt.h, the same in CUDA 11.4 to 13
// (tests/ops/test_gelu_mlp.py compares them where the header is installed).
//
// [Note: order] cublasLt's matrices are column-major, so it is asked for the transposed product
// d^T = b^T @ a^T: its A is our b, its B our a. A bias along d's columns is then one along the rows
// of its result, which is what its epilogues add and sum up to.
#include <dlfcn.h>

#include <array>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#include "checks.h"
#include "ops_cuda.h"

namespace fastpar {
namespace {

using Opaque = void*;

struct Algorithm {
  uint64_t data[8];
};

struct Heuristic {
  Algorithm algorithm;
  size_t workspace_bytes;
  int status;
  float waves;
  int reserved[4];
};

constexpr int kRealFloat = 0, kRealHalf = 2, kRealBFloat16 = 14;  // cudaDataType_t
constexpr int kComputeFloat = 68;                                 // cublasComputeType_t
constexpr int kTransA = 3, kTransB = 4, kEpilogue = 7;            // of a matmul descriptor
constexpr int kBiasPointer = 8, kAuxPointer = 11, kAuxStep = 12;
constexpr int kMostWorkspace = 1, kReductions = 3, kAlignmentOfA = 5;  // of a preference
constexpr uint32_t kReduceInFloat = 2;  // parts of a split product are added in fp32, in order

struct Library {
  int (*create)(Opaque*) = nullptr;
  int (*desc_create)(Opaque*, int, int) = nullptr;
  int (*desc_destroy)(Opaque) = nullptr;
  int (*desc_set)(Opaque, int, const void*, size_t) = nullptr;
  int (*layout_create)(Opaque*, int, uint64_t, uint64_t, int64_t) = nullptr;
  int (*layout_destroy)(Opaque) = nullptr;
  int (*preference_create)(Opaque*) = nullptr;
  int (*preference_destroy)(Opaque) = nullptr;
  int (*preference_set)(Opaque, int, const void*, size_t) = nullptr;
  int (*heuristic)(Opaque, Opaque, Opaque, Opaque, Opaque, Opaque, Opaque, int, Heuristic*,
                   int*) = nullptr;
  int (*matmul)(Opaque, Opaque, const void*, const void*, Opaque, const void*, Opaque, const void*,
                const void*, Opaque, void*, Opaque, const Algorithm*, void*, size_t,
                Opaque) = nullptr;
};

using Key = std::array<int64_t, 13>;

std::mutex mutex;  // of all below
Library library;
std::map<int, Opaque> handles;        // by device; they live as long as the process
std::map<Key, Heuristic> algorithms;  // what the library chose for a product, or its refusal

void check(int status, const char* what, const LtProduct& p) {
  if (status == 0) return;
  throw std::runtime_error(concat("cublasLt: expected ", what, " to succeed, got status=", status,
                                  " for m=", p.m, " n=", p.n, " k=", p.k, " epilogue=", p.epilogue,
                                  "; set FASTPAR_BACKEND=torch"));
}

// An object of the library's, destroyed at the end of its scope.
class Owned {
 public:
  explicit Owned(int (*destroy)(Opaque)) : destroy_(destroy) {}
  ~Owned() {
    if (object_ != nullptr) destroy_(object_);
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  Opaque* out() { return &object_; }
  operator Opaque() const { return object_; }

 private:
  int (*destroy_)(Opaque);
  Opaque object_ = nullptr;
};

bool is_transposed(const LtMatrix& x) { return x.column != 1; }

int64_t step(const LtMatrix& x) { return is_transposed(x) ? x.column : x.row; }

// The largest power of 2, at most 256, that divides an address.
uint32_t alignment(const void* data) {
  const auto address = reinterpret_cast<std::uintptr_t>(data) | 256;
  return static_cast<uint32_t>(address & (~address + 1));
}

// The library's first choice; status is not 0 where it has none.
Heuristic choose(const LtProduct& p, const Library& lib, Opaque handle, Opaque desc, Opaque a,
                 Opaque b, Opaque d) {
  Owned preference(lib.preference_destroy);
  check(lib.preference_create(preference.out()), "a preference", p);
  const auto set = [&](int attribute, auto value) {
    check(lib.preference_set(preference, attribute, &value, sizeof(value)), "a preference", p);
  };
  set(kMostWorkspace, static_cast<uint64_t>(p.workspace_bytes));
  set(kReductions, kReduceInFloat);
  const void* const operands[] = {p.b.data, p.a.data, p.d, p.d};
  for (int i = 0; i < 4; ++i) set(kAlignmentOfA + i, alignment(operands[i]));
  Heuristic found = {};
  int count = 0;
  const int status = lib.heuristic(handle, desc, a, b, d, d, preference, 1, &found, &count);
  if (status != 0 || count == 0) found.status = status != 0 ? status : -1;
  return found;
}

}  // namespace

std::string open_lt(const std::string& name) {
  void* const file = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (file == nullptr) return dlerror();
  Library found;
  bool complete = true;
  const auto find = [&](const char* symbol, auto* function) {
    *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(dlsym(file, symbol));
    complete = complete && *function != nullptr;
  };
  find("cublasLtCreate", &found.create);
  find("cublasLtMatmulDescCreate", &found.desc_create);
  find("cublasLtMatmulDescDestroy", &found.desc_destroy);
  find("cublasLtMatmulDescSetAttribute", &found.desc_set);
  find("cublasLtMatrixLayoutCreate", &found.layout_create);
  find("cublasLtMatrixLayoutDestroy", &found.layout_destroy);
  find("cublasLtMatmulPreferenceCreate", &found.preference_create);
  find("cublasLtMatmulPreferenceDestroy", &found.preference_destroy);
  find("cublasLtMatmulPreferenceSetAttribute", &found.preference_set);
  find("cublasLtMatmulAlgoGetHeuristic", &found.heuristic);
  find("cublasLtMatmul", &found.matmul);
  if (!complete) return concat(name, " lacks functions of cublasLt");
  const std::lock_guard<std::mutex> lock(mutex);
  library = found;
  handles.clear();
  algorithms.clear();
  return "";
}

void matmul_lt(const LtProduct& p, Stream stream) {
  const std::lock_guard<std::mutex> lock(mutex);
  const Library& lib = library;
  FASTPAR_CHECK(lib.matmul != nullptr, "matmul_lt: expected an open library, got none; open_lt");
  FASTPAR_CHECK(p.dtype != Dtype::float32, "matmul_lt: expected 16 bits, got float32; use torch");
  Opaque& handle = handles[p.device];
  if (handle == nullptr) check(lib.create(&handle), "a handle", p);

  Owned desc(lib.desc_destroy);
  check(lib.desc_create(desc.out(), kComputeFloat, kRealFloat), "a descriptor", p);
  const auto set = [&](int attribute, auto value) {
    check(lib.desc_set(desc, attribute, &value, sizeof(value)), "a descriptor", p);
  };
  set(kTransA, static_cast<int32_t>(is_transposed(p.b)));
  set(kTransB, static_cast<int32_t>(is_transposed(p.a)));
  set(kEpilogue, static_cast<uint32_t>(p.epilogue));
  set(kBiasPointer, p.bias);
  if (p.aux != nullptr) {
    set(kAuxPointer, p.aux);
    set(kAuxStep, p.n);
  }

  const int type = p.dtype == Dtype::bfloat16 ? kRealBFloat16 : kRealHalf;
  Owned a(lib.layout_destroy), b(lib.layout_destroy), d(lib.layout_destroy);
  const auto lay_out = [&](Owned* layout, int64_t rows, int64_t columns, const LtMatrix& x) {
    const int64_t first = is_transposed(x) ? columns : rows;
    const int64_t second = is_transposed(x) ? rows : columns;
    check(lib.layout_create(layout->out(), type, first, second, step(x)), "a layout", p);
  };
  lay_out(&a, p.n, p.k, p.b);
  lay_out(&b, p.k, p.m, p.a);
  lay_out(&d, p.n, p.m, {p.d, p.n, 1});

  const void* const pointers[] = {p.a.data, p.b.data, p.d, p.bias, p.aux};
  int64_t alignments = 0;
  for (const void* pointer : pointers) alignments = alignments << 10 | alignment(pointer);
  const Key key = {p.device,
                   type,
                   p.epilogue,
                   p.m,
                   p.n,
                   p.k,
                   step(p.a),
                   step(p.b),
                   is_transposed(p.a),
                   is_transposed(p.b),
                   alignments,
                   p.workspace_bytes,
                   p.aux != nullptr};
  auto at = algorithms.find(key);
  if (at == algorithms.end()) {
    at = algorithms.emplace(key, choose(p, lib, handle, desc, a, b, d)).first;
  }
  Heuristic& chosen = at->second;
  check(chosen.status, "an algorithm", p);
  const float one = 1, zero = 0;
  chosen.status = lib.matmul(handle, desc, &one, p.b.data, a, p.a.data, b, &zero, p.d, d, p.d, d,
                             &chosen.algorithm, p.workspace, p.workspace_bytes, stream);
  check(chosen.status, "a product", p);
}

}  // namespace fastpar
