#include <algorithm>
#include <optional>

#include "bindings.h"
#include "ops_cuda.h"

namespace fastpar {
namespace {

int64_t element_size(Dtype dtype) { return dtype == Dtype::float32 ? 4 : 2; }

// The shards' memory; refuses a shard that overlaps out without being out itself.
std::vector<const void*> checked_shards(const std::vector<Memory>& shards, const Memory& out) {
  FASTPAR_CHECK(!shards.empty(), "sum_shards: expected at least one shard, got 0; pass one a rank");
  const int64_t n = out.numel;
  const Dtype dtype = shards[0].dtype("shards");
  const Address end = out.address + static_cast<Address>(n * element_size(out.dtype("out")));
  std::vector<const void*> found;
  found.reserve(shards.size());
  for (size_t w = 0; w < shards.size(); ++w) {
    const Address start = shards[w].address;
    const bool apart =
        start >= end || start + static_cast<Address>(n * element_size(dtype)) <= out.address;
    const bool same = start == out.address && shards[w].type == out.type;
    FASTPAR_CHECK(n == 0 || apart || same,
                  "sum_shards: expected out apart from every shard, or one of them, got shard ", w,
                  " partly over out; pass another out");
    found.push_back(shards[w].of(dtype, n, "shards"));
  }
  return found;
}

// Of n elements.
QuantizeBlocks blocks_of(const Memory& codes, Type type, const Memory& scales, int64_t block,
                         int64_t n) {
  FASTPAR_CHECK(block >= 16 && block <= kMaxQuantizeBlock && (block & (block - 1)) == 0,
                "_C: expected a power of two from 16 to ", kMaxQuantizeBlock, ", got block=", block,
                "; use 256");
  return {codes.of(type, n, "codes"), scales.floats((n + block - 1) / block, "scales"), block};
}

Code code_of(const Memory& codes) {
  const Type type = codes.type;
  FASTPAR_CHECK(type == Type::i8 || type == Type::e4m3 || type == Type::e5m2,
                "_C: expected codes of int8, float8_e4m3fn or float8_e5m2, got ", type_name(type),
                "; use kernels/quantize.py");
  return type == Type::i8 ? Code::int8 : type == Type::e4m3 ? Code::e4m3 : Code::e5m2;
}

using Tensors = std::vector<Memory>;

}  // namespace

void bind_flat(py::module_& m) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  m.def(
      "sum_shards",
      [](const Tensors& shards, const Memory& out, float scale, int threads) {
        const auto found = checked_shards(shards, out);
        const Dtype dtype = out.dtype("out");
        sum_shards(found.data(), static_cast<int64_t>(found.size()),
                   out.of(dtype, out.numel, "out"), out.numel, shards[0].dtype("shards"), dtype,
                   scale, threads);
      },
      unlocked);
  m.def(
      "quantize_blockwise",
      [](const Memory& x, const Memory& codes, const Memory& scales, int64_t block,
         std::optional<uint64_t> seed, uint64_t first_index, int threads) {
        const Dtype dtype = x.dtype("x");
        quantize_blockwise(x.of(dtype, x.numel, "x"), dtype,
                           blocks_of(codes, Type::i8, scales, block, x.numel), x.numel,
                           seed ? &*seed : nullptr, first_index, threads);
      },
      unlocked);
  m.def(
      "dequantize_blockwise",
      [](const Memory& codes, const Memory& scales, int64_t block, const Memory& out, int threads) {
        const Dtype dtype = out.dtype("out");
        dequantize_blockwise(blocks_of(codes, codes.type, scales, block, codes.numel),
                             code_of(codes), out.of(dtype, codes.numel, "out"), dtype, codes.numel,
                             threads);
      },
      unlocked);
#if FASTPAR_CUDA
  m.def(
      "quantize_blockwise_cuda",
      [](const Memory& x, const Memory& codes, const Memory& scales, int64_t block,
         std::optional<uint64_t> seed, uint64_t first_index, Address stream) {
        const Dtype dtype = x.dtype("x");
        quantize_blockwise_cuda(x.of(dtype, x.numel, "x"), dtype,
                                blocks_of(codes, Type::i8, scales, block, x.numel), x.numel,
                                seed ? &*seed : nullptr, first_index, at<void>(stream));
      },
      unlocked);
  m.def(
      "dequantize_blockwise_cuda",
      [](const Memory& codes, const Memory& scales, int64_t block, const Memory& out,
         Address stream) {
        const Dtype dtype = out.dtype("out");
        dequantize_blockwise_cuda(blocks_of(codes, codes.type, scales, block, codes.numel),
                                  code_of(codes), out.of(dtype, codes.numel, "out"), dtype,
                                  codes.numel, at<void>(stream));
      },
      unlocked);
  m.def(
      "sum_shards_cuda",
      [](const Tensors& shards, const Memory& out, float scale, Address stream) {
        const auto found = checked_shards(shards, out);
        const Dtype dtype = out.dtype("out");
        sum_shards_cuda(found.data(), static_cast<int64_t>(found.size()),
                        out.of(dtype, out.numel, "out"), out.numel, shards[0].dtype("shards"),
                        dtype, scale, at<void>(stream));
      },
      unlocked);
#endif
}

}  // namespace fastpar
