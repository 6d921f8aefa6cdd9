// A thread holds 16 elements, which are 16 bytes of codes: a block of 256 is half a warp's, one of
// 16 a thread's. Larger than 512, it is read twice by its warp, the second time from the cache.
#include "cuda_launch.h"
#include "quantize_math.h"

namespace fastpar {
namespace {

constexpr int kThreads = 256;
constexpr int kElements = 16;  // of a thread

struct Source {
  const void* x;
  bool seeded, aligned;  // aligned: x and codes, to 16 bytes
  int64_t n;
  uint64_t key, first_index;
};

// v = kElements elements from p on, 0 from `size` on.
template <class T>
__device__ FASTPAR_INLINE void load_all(const T* p, int size, bool aligned, float* v) {
  if (!aligned || size < kElements) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) v[i] = i < size ? to_float(p[i]) : 0.0f;
    return;
  }
  constexpr int kOnce = sizeof(Words16) / sizeof(T);
#pragma unroll
  for (int j = 0; j < kElements / kOnce; ++j) {
    const Words16 words = load16(p + j * kOnce);
#pragma unroll
    for (int i = 0; i < kOnce; ++i) {
      if constexpr (sizeof(T) == 4) {
        v[j * kOnce + i] = bit_cast<float>(words.word[i]);
      } else {
        const uint32_t bits = words.word[i / 2] >> (16 * (i % 2));
        v[j * kOnce + i] = to_float(T{static_cast<uint16_t>(bits)});
      }
    }
  }
}

template <class T>
__device__ FASTPAR_INLINE void store_all(T* p, int size, bool aligned, const float* v) {
  if (!aligned || size < kElements) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      if (i < size) p[i] = from_float<T>(v[i]);
    }
    return;
  }
  constexpr int kOnce = sizeof(Words16) / sizeof(T);
#pragma unroll
  for (int j = 0; j < kElements / kOnce; ++j) {
    Words16 words;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(T) == 4) {
        words.word[i] = bit_cast<uint32_t>(v[j * kOnce + i]);
      } else {
        const uint32_t low = from_float<T>(v[j * kOnce + 2 * i]).bits;
        words.word[i] = low | static_cast<uint32_t>(from_float<T>(v[j * kOnce + 2 * i + 1]).bits)
                                  << 16;
      }
    }
    store16(p + j * kOnce, words);
  }
}

template <class X, bool seeded>
__global__ void __launch_bounds__(kThreads, 2)
    quantize_kernel(const Source from, const QuantizeBlocks to) {
  const int steps = static_cast<int>(to.block / kElements);  // of threads, in a block
  const int lanes = steps < kWarp ? steps : kWarp;
  const int rounds = steps / lanes;
  const int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t block = thread / lanes;
  const int64_t own = block * to.block + thread % lanes * kElements;
  const auto size_at = [&](int64_t start) {
    const int64_t left = from.n - start;
    return static_cast<int>(left < 0 ? 0 : (left < kElements ? left : kElements));
  };
  float v[kElements];
  uint32_t largest = 0;
  for (int round = 0; round < rounds; ++round) {
    const int64_t start = own + int64_t(round) * lanes * kElements;
    load_all(static_cast<const X*>(from.x) + start, size_at(start), from.aligned, v);
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const uint32_t bits = magnitude_bits(v[i]);
      largest = bits > largest ? bits : largest;
    }
  }
  for (int step = lanes / 2; step > 0; step /= 2) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, largest, step);
    largest = other > largest ? other : largest;
  }
  const float scale = block_scale(largest);
  const float inverse = block_inverse(scale);
  if (thread % lanes == 0 && size_at(own) > 0) to.scales[block] = scale;
  for (int round = 0; round < rounds; ++round) {
    const int64_t start = own + int64_t(round) * lanes * kElements;
    const int size = size_at(start);
    if (rounds > 1) load_all(static_cast<const X*>(from.x) + start, size, from.aligned, v);
    Words16 codes;
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      const uint64_t index = from.first_index + static_cast<uint64_t>(start + i);
      const uint32_t code = inverse != 0.0f ? encode<seeded>(v[i], inverse, from.key, index) : 0u;
      uint32_t& word = codes.word[i / 4];
      word = i % 4 == 0 ? code : word | code << (8 * (i % 4));
    }
    uint8_t* out = static_cast<uint8_t*>(to.codes) + start;
    if (size == kElements) {
      store16(out, codes);
    } else {
#pragma unroll
      for (int i = 0; i < kElements; ++i) {
        if (i < size) out[i] = static_cast<uint8_t>(codes.word[i / 4] >> (8 * (i % 4)));
      }
    }
  }
}

template <class C, class Out>
__global__ void __launch_bounds__(kThreads)
    dequantize_kernel(const QuantizeBlocks from, Out* out, int64_t n, bool aligned) {
  const int64_t start = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * kElements;
  if (start >= n) return;
  const int size = static_cast<int>(n - start < kElements ? n - start : kElements);
  const uint8_t* codes = static_cast<const uint8_t*>(from.codes) + start;
  const float scale = from.scales[start / from.block];
  Words16 words = {};
  if (aligned && size == kElements) {
    words = load16(codes);
  } else {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      if (i < size) words.word[i / 4] |= static_cast<uint32_t>(codes[i]) << (8 * (i % 4));
    }
  }
  float v[kElements];
#pragma unroll
  for (int i = 0; i < kElements; ++i) {
    v[i] = C::decode(static_cast<uint8_t>(words.word[i / 4] >> (8 * (i % 4)))) * scale;
  }
  store_all(out + start, size, true, v);
}

bool aligned16(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % sizeof(Words16) == 0; }

template <class X>
void quantize_all(const Source& from, const QuantizeBlocks& to, Stream stream) {
  const int64_t blocks = (from.n + to.block - 1) / to.block;
  const int64_t lanes = std::min<int64_t>(kWarp, to.block / kElements);
  const int64_t grid = (blocks * lanes + kThreads - 1) / kThreads;
  if (from.seeded) {
    launch(quantize_kernel<X, true>, grid, kThreads, stream, from, to);
  } else {
    launch(quantize_kernel<X, false>, grid, kThreads, stream, from, to);
  }
}

}  // namespace

void quantize_blockwise_cuda(const void* x, Dtype x_dtype, const QuantizeBlocks& to, int64_t n,
                             const uint64_t* seed, uint64_t first_index, Stream stream) {
  const uint64_t key = seed ? random_key(*seed, 0, 0) : 0;
  const Source from = {x, seed != nullptr, aligned16(x), n, key, first_index};
  with_dtype(x_dtype, [&](auto x_tag) { quantize_all<decltype(x_tag)>(from, to, stream); });
}

void dequantize_blockwise_cuda(const QuantizeBlocks& from, Code code, void* out, Dtype out_dtype,
                               int64_t n, Stream stream) {
  const int64_t grid = (n + kThreads * kElements - 1) / (kThreads * kElements);
  with_dtype(out_dtype, [&](auto out_tag) {
    with_code(code, [&](auto decoder) {
      using Out = decltype(out_tag);
      launch(dequantize_kernel<decltype(decoder), Out>, grid, kThreads, stream, from,
             static_cast<Out*>(out), n, aligned16(from.codes));
    });
  });
}

}  // namespace fastpar
