#include <algorithm>
#include <optional>

#include "bindings.h"
#include "ops_cuda.h"

namespace fastpar {
namespace {

// (to, from, size, to_dtype, from_dtype)
using Range = std::tuple<Address, Address, int64_t, int, int>;

int64_t element_size(Dtype dtype) { return dtype == Dtype::float32 ? 4 : 2; }

// Refuses destinations that meet each other, or another element's source: the result would depend
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

std::vector<BucketRange> checked_ranges(const std::string& op, const std::vector<Range>& entries) {
  std::vector<BucketRange> ranges;
  ranges.reserve(entries.size());
  for (const auto& [to, from, size, to_dtype, from_dtype] : entries) {
    ranges.push_back(
        {at<void>(to), at<const void>(from), size, dtype_of(to_dtype), dtype_of(from_dtype)});
  }
  refuse_overlap(op, ranges);
  return ranges;
}

// Every shard lies apart from out or is out itself.
void check_shards(const Addresses& shards, Address out, int64_t n, Dtype shard_dtype,
                  Dtype out_dtype) {
  FASTPAR_CHECK(!shards.empty(), "sum_shards: expected at least one shard, got 0; pass one a rank");
  const Address last = out + static_cast<Address>(n * element_size(out_dtype));
  for (size_t w = 0; w < shards.size(); ++w) {
    const bool apart =
        shards[w] >= last || shards[w] + static_cast<Address>(n * element_size(shard_dtype)) <= out;
    const bool same = shards[w] == out && shard_dtype == out_dtype;
    FASTPAR_CHECK(n == 0 || apart || same,
                  "sum_shards: expected out apart from every shard, or one of them, got shard ", w,
                  " partly over out; pass another out");
  }
}

std::vector<const void*> pointers(const Addresses& addresses) {
  std::vector<const void*> result;
  result.reserve(addresses.size());
  for (const Address a : addresses) result.push_back(at<const void>(a));
  return result;
}

QuantizeBlocks blocks_of(Address codes, Address scales, int64_t block, int code) {
  FASTPAR_CHECK(code >= 0 && code <= 3, "_C: expected code 0, 1, 2 or 3, got code=", code,
                "; use kernels/quantize.py");
  FASTPAR_CHECK(block >= 16 && block <= kMaxQuantizeBlock && (block & (block - 1)) == 0,
                "_C: expected a power of two from 16 to ", kMaxQuantizeBlock, ", got block=", block,
                "; use 256");
  return {at<void>(codes), at<float>(scales), block, static_cast<Code>(code)};
}

}  // namespace

void bind_bucket(py::module_& m) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  m.def(
      "bucket_copy",
      [](const std::string& op, const std::vector<Range>& entries, bool add, float scale,
         Address scale_at, int threads) {
        const auto ranges = checked_ranges(op, entries);
        bucket_copy(ranges.data(), static_cast<int64_t>(ranges.size()), add,
                    {scale, at<const float>(scale_at)}, threads);
      },
      unlocked);
  m.def(
      "sum_shards",
      [](const Addresses& shards, Address out, int64_t n, int shard_dtype, int out_dtype,
         float scale, Address scale_at, Address words, int threads) {
        check_shards(shards, out, n, dtype_of(shard_dtype), dtype_of(out_dtype));
        sum_shards(pointers(shards).data(), static_cast<int64_t>(shards.size()), at<void>(out), n,
                   dtype_of(shard_dtype), dtype_of(out_dtype), {scale, at<const float>(scale_at)},
                   at<int64_t>(words), threads);
      },
      unlocked);
  m.def(
      "quantize_blockwise",
      [](Address x, int x_dtype, Address error, int error_dtype, Address codes, Address scales,
         int64_t block, int code, int64_t n, std::optional<uint64_t> seed, uint64_t first_index,
         int threads) {
        quantize_blockwise(at<const void>(x), dtype_of(x_dtype), at<void>(error),
                           dtype_of(error_dtype), blocks_of(codes, scales, block, code), n,
                           seed ? &*seed : nullptr, first_index, threads);
      },
      unlocked);
  m.def(
      "dequantize_blockwise",
      [](Address codes, Address scales, int64_t block, int code, Address out, int out_dtype,
         int64_t n, int threads) {
        dequantize_blockwise(blocks_of(codes, scales, block, code), at<void>(out),
                             dtype_of(out_dtype), n, threads);
      },
      unlocked);
#if FASTPAR_CUDA
  m.def(
      "quantize_blockwise_cuda",
      [](Address x, int x_dtype, Address error, int error_dtype, Address codes, Address scales,
         int64_t block, int code, int64_t n, std::optional<uint64_t> seed, uint64_t first_index,
         Address stream) {
        quantize_blockwise_cuda(at<const void>(x), dtype_of(x_dtype), at<void>(error),
                                dtype_of(error_dtype), blocks_of(codes, scales, block, code), n,
                                seed ? &*seed : nullptr, first_index, at<void>(stream));
      },
      unlocked);
  m.def(
      "dequantize_blockwise_cuda",
      [](Address codes, Address scales, int64_t block, int code, Address out, int out_dtype,
         int64_t n, Address stream) {
        dequantize_blockwise_cuda(blocks_of(codes, scales, block, code), at<void>(out),
                                  dtype_of(out_dtype), n, at<void>(stream));
      },
      unlocked);
  m.def(
      "bucket_copy_cuda",
      [](const std::string& op, const std::vector<Range>& entries, bool add, float scale,
         Address scale_at, Address stream) {
        const auto ranges = checked_ranges(op, entries);
        bucket_copy_cuda(ranges.data(), static_cast<int64_t>(ranges.size()), add,
                         {scale, at<const float>(scale_at)}, at<void>(stream));
      },
      unlocked);
  m.def(
      "sum_shards_cuda",
      [](const Addresses& shards, Address out, int64_t n, int shard_dtype, int out_dtype,
         float scale, Address scale_at, Address words, Address stream) {
        check_shards(shards, out, n, dtype_of(shard_dtype), dtype_of(out_dtype));
        sum_shards_cuda(pointers(shards).data(), static_cast<int64_t>(shards.size()), at<void>(out),
                        n, dtype_of(shard_dtype), dtype_of(out_dtype),
                        {scale, at<const float>(scale_at)}, at<int64_t>(words), at<void>(stream));
      },
      unlocked);
#endif
}

}  // namespace fastpar
