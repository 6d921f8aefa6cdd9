#include <algorithm>
#include <optional>

#include "bindings.h"
#include "norm_math.h"
#include "ops_cuda.h"

namespace fastpar {
namespace {

int64_t element_size(Dtype dtype) { return dtype == Dtype::float32 ? 4 : 2; }

// Refuses destinations that overlap each other or another entry's source: the result would depend
// on the order of the work.
void refuse_overlap(const std::string& op, const std::vector<BucketRange>& ranges) {
  struct Span {
    Address first, last;
    size_t index;
  };
  std::vector<Span> spans;
  spans.reserve(ranges.size());
  for (size_t i = 0; i < ranges.size(); ++i) {
    const Address first = reinterpret_cast<Address>(ranges[i].to);
    const int64_t bytes = ranges[i].size * element_size(ranges[i].to_dtype);
    if (bytes > 0) spans.push_back({first, first + static_cast<Address>(bytes), i});
  }
  std::sort(spans.begin(), spans.end(),
            [](const Span& a, const Span& b) { return a.first < b.first; });
  for (size_t i = 1; i < spans.size(); ++i) {
    FASTPAR_CHECK(spans[i].first >= spans[i - 1].last, op,
                  ": expected destinations apart from each other, got entry ",
                  std::max(spans[i].index, spans[i - 1].index), " over entry ",
                  std::min(spans[i].index, spans[i - 1].index), "; pass distinct tensors");
  }
  for (size_t i = 0; i < ranges.size(); ++i) {
    const Address first = reinterpret_cast<Address>(ranges[i].from);
    const int64_t bytes = ranges[i].size * element_size(ranges[i].from_dtype);
    const Address last = first + static_cast<Address>(bytes);
    if (bytes == 0) continue;
    auto span = std::upper_bound(spans.begin(), spans.end(), first,
                                 [](Address at, const Span& s) { return at < s.last; });
    for (; span != spans.end() && span->first < last; ++span) {
      const bool in_place = span->index == i && span->first == first && span->last == last &&
                            ranges[i].to_dtype == ranges[i].from_dtype;
      FASTPAR_CHECK(in_place, op, ": expected sources apart from destinations, got source ", i,
                    " over destination ", span->index, "; clone() the source");
    }
  }
}

// Entry i is from[i] and to[i]. A list with offsets is one buffer: its entry i starts at offset i.
std::vector<BucketRange> checked_ranges(const std::string& op, const std::vector<Memory>& to,
                                        const std::vector<Memory>& from,
                                        const std::vector<int64_t>& to_offsets,
                                        const std::vector<int64_t>& from_offsets) {
  const bool pack = !to_offsets.empty(), unpack = !from_offsets.empty();
  const size_t count = pack ? from.size() : to.size();
  FASTPAR_CHECK(
      (pack ? to.size() == 1 && to_offsets.size() == count : to.size() == count) &&
          (unpack ? from.size() == 1 && from_offsets.size() == count : from.size() == count),
      op, ": expected lists of one length, got ", to.size(), " and ", from.size(),
      "; use kernels/bucket.py");
  std::vector<BucketRange> ranges;
  ranges.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    const Memory &x = to[pack ? 0 : i], &y = from[unpack ? 0 : i];
    const Dtype to_dtype = x.dtype("destinations"), from_dtype = y.dtype("sources");
    const int64_t first = pack ? to_offsets[i] : 0, second = unpack ? from_offsets[i] : 0;
    const int64_t size = pack ? y.numel : x.numel;
    FASTPAR_CHECK(x.dense && y.dense && first >= 0 && first + size <= x.numel && second >= 0 &&
                      second + size <= y.numel && (pack || unpack || x.numel == y.numel),
                  op, ": expected entry ", i, " to fit, got ", size, " elements, sizes of ",
                  x.numel, " and ", y.numel, " and offsets of ", first, " and ", second,
                  "; use kernels/bucket.py");
    ranges.push_back({at<void>(x.address + first * element_size(to_dtype)),
                      at<const void>(y.address + second * element_size(from_dtype)), size, to_dtype,
                      from_dtype});
  }
  refuse_overlap(op, ranges);
  return ranges;
}

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

int64_t* words_of(const Memory& words) {
  return words ? static_cast<int64_t*>(words.of(Type::i64, kNormWords, "words")) : nullptr;
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

using Offsets = std::vector<int64_t>;
using Tensors = std::vector<Memory>;

}  // namespace

void bind_bucket(py::module_& m) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  m.def(
      "bucket_copy",
      [](const std::string& op, const Tensors& to, const Tensors& from, const Offsets& to_offsets,
         const Offsets& from_offsets, bool add, float scale, const Memory& scale_at, int threads) {
        const auto ranges = checked_ranges(op, to, from, to_offsets, from_offsets);
        bucket_copy(ranges.data(), static_cast<int64_t>(ranges.size()), add,
                    {scale, scale_at.floats_or_null(1, "scale")}, threads);
      },
      unlocked);
  m.def(
      "sum_shards",
      [](const Tensors& shards, const Memory& out, float scale, const Memory& scale_at,
         const Memory& words, int threads) {
        const auto found = checked_shards(shards, out);
        const Dtype dtype = out.dtype("out");
        sum_shards(found.data(), static_cast<int64_t>(found.size()),
                   out.of(dtype, out.numel, "out"), out.numel, shards[0].dtype("shards"), dtype,
                   {scale, scale_at.floats_or_null(1, "scale")}, words_of(words), threads);
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
      "bucket_copy_cuda",
      [](const std::string& op, const Tensors& to, const Tensors& from, const Offsets& to_offsets,
         const Offsets& from_offsets, bool add, float scale, const Memory& scale_at,
         Address stream) {
        const auto ranges = checked_ranges(op, to, from, to_offsets, from_offsets);
        bucket_copy_cuda(ranges.data(), static_cast<int64_t>(ranges.size()), add,
                         {scale, scale_at.floats_or_null(1, "scale")}, at<void>(stream));
      },
      unlocked);
  m.def(
      "sum_shards_cuda",
      [](const Tensors& shards, const Memory& out, float scale, const Memory& scale_at,
         const Memory& words, Address stream) {
        const auto found = checked_shards(shards, out);
        const Dtype dtype = out.dtype("out");
        sum_shards_cuda(found.data(), static_cast<int64_t>(found.size()),
                        out.of(dtype, out.numel, "out"), out.numel, shards[0].dtype("shards"),
                        dtype, {scale, scale_at.floats_or_null(1, "scale")}, words_of(words),
                        at<void>(stream));
      },
      unlocked);
#endif
}

}  // namespace fastpar
