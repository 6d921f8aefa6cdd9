#include <algorithm>

#include "ops.h"
#include "quantize_math.h"
#include "simd.h"

namespace fastpar {
namespace {

constexpr int64_t kChunk = kMaxQuantizeBlock;  // 16 KiB of floats: stay in the first cache
constexpr int64_t kChunksOfThread = 8;         // fewest that are worth a thread

template <class X>
struct Load {
  static FASTPAR_INLINE void run(const X* __restrict x, float* __restrict v, int64_t n) {
    for (int64_t i = 0; i < n; ++i) v[i] = to_float(x[i]);
  }
};

template <bool seeded>
struct Encode {
  static FASTPAR_INLINE void run(const float* __restrict v, uint8_t* __restrict codes,
                                 float* __restrict scales, int64_t n, int64_t block, uint64_t key,
                                 uint64_t index) {
    for (int64_t first = 0; first < n; first += block) {
      const int64_t size = std::min(block, n - first);
      const float* in = v + first;
      uint8_t* out = codes + first;
      int32_t largest = 0;
      for (int64_t i = 0; i < size; ++i) {
        largest = std::max(largest, static_cast<int32_t>(magnitude_bits(in[i])));
      }
      const float scale = block_scale(static_cast<uint32_t>(largest));
      const float inverse = block_inverse(scale);
      scales[first / block] = scale;
      if (inverse == 0.0f) {
        for (int64_t i = 0; i < size; ++i) out[i] = 0;
        continue;
      }
      const uint64_t at = index + static_cast<uint64_t>(first);
      for (int64_t i = 0; i < size; ++i) {
        out[i] = encode<seeded>(in[i], inverse, key, at + static_cast<uint64_t>(i));
      }
    }
  }
};

template <class C, class Out>
struct Decode {
  static FASTPAR_INLINE void run(const uint8_t* __restrict codes, const float* __restrict scales,
                                 Out* __restrict out, int64_t n, int64_t block) {
    for (int64_t first = 0; first < n; first += block) {
      const float scale = scales[first / block];
      const int64_t last = std::min(n, first + block);
      for (int64_t i = first; i < last; ++i) out[i] = from_float<Out>(C::decode(codes[i]) * scale);
    }
  }
};

template <class X>
void quantize_all(const X* x, const QuantizeBlocks& to, int64_t n, const uint64_t* seed,
                  uint64_t first_index, int threads) {
  const Isa target = isa();
  const uint64_t key = seed ? random_key(*seed, 0, 0) : 0;
  const int64_t chunks = (n + kChunk - 1) / kChunk;
  threads = useful_threads(chunks, kChunksOfThread, threads);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int64_t start = chunk * kChunk;
    const int64_t size = std::min(kChunk, n - start);
    const uint64_t index = first_index + static_cast<uint64_t>(start);
    uint8_t* codes = static_cast<uint8_t*>(to.codes) + start;
    float* scales = to.scales + start / to.block;
    float v[kChunk];
    const float* in = v;
    if constexpr (std::is_same_v<X, float>) {
      in = x + start;
    } else {
      dispatch<Load<X>>(target, x + start, static_cast<float*>(v), size);
    }
    if (seed) {
      dispatch<Encode<true>>(target, in, codes, scales, size, to.block, key, index);
    } else {
      dispatch<Encode<false>>(target, in, codes, scales, size, to.block, key, index);
    }
  }
}

}  // namespace

void quantize_blockwise(const void* x, Dtype x_dtype, const QuantizeBlocks& to, int64_t n,
                        const uint64_t* seed, uint64_t first_index, int threads) {
  with_dtype(x_dtype, [&](auto x_tag) {
    quantize_all(static_cast<const decltype(x_tag)*>(x), to, n, seed, first_index, threads);
  });
}

void dequantize_blockwise(const QuantizeBlocks& from, Code code, void* out, Dtype out_dtype,
                          int64_t n, int threads) {
  const Isa target = isa();
  const int64_t chunks = (n + kChunk - 1) / kChunk;
  threads = useful_threads(chunks, kChunksOfThread, threads);
  with_dtype(out_dtype, [&](auto out_tag) {
    with_code(code, [&](auto decoder) {
      using Out = decltype(out_tag);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
      for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const int64_t start = chunk * kChunk;
        dispatch<Decode<decltype(decoder), Out>>(
            target, static_cast<const uint8_t*>(from.codes) + start,
            static_cast<const float*>(from.scales) + start / from.block,
            static_cast<Out*>(out) + start, std::min(kChunk, n - start), from.block);
      }
    });
  });
}

}  // namespace fastpar
