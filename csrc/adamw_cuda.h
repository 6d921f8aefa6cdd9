// One range's part in a chunk of the CUDA step: what a block of threads does with it.
//
// [Note: bytes in flight] A thread loads everything that its 8 elements need, 128 bytes in fp32,
// before it uses any: 64 KiB for two blocks on a multiprocessor. Memory answers after somewhat less
// than a microsecond, so a third of that would keep it busy.
//
// [Note: whole sectors] A warp takes 256 elements at a time. Were a lane's 8 floats neighbours,
// each 16-byte store of the warp would fill every other half of 64 sectors, and the cache would be
// asked twice. So a lane takes two groups of four, kSecond elements apart: what a warp touches at
// once is one piece, of floats and of 16-bit types alike. Only beside 8-bit codes the 8 are
// neighbours.
//
// [Note: 8-bit blocks] A warp owns a block of 256 elements, 8 a lane, and finds the new scale with
// one warp maximum. Where the block is short or pointers are not aligned, the warp goes over it
// twice with narrow accesses, once for the scale and once to store: the new moments are computed
// again rather than kept.
#pragma once

#include <type_traits>

#include "adamw_math.h"
#include "cuda_launch.h"

namespace fastpar {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerUnit = 2;  // of a multiprocessor
constexpr int kGroup = 8;          // elements of one step of a thread: 16 bytes of a 16-bit type
constexpr int kGroups = 4;         // steps of a thread within a chunk
constexpr int kChunk = kThreads * kGroup * kGroups;

static_assert(kWarp * kGroup == kMomentBlock, "a warp takes a block of scales");
static_assert(kChunk % kMomentBlock == 0, "a block of scales is not cut");

FASTPAR_HOST_DEVICE bool has_master(const AdamwModes& modes) {
  return modes.master == Master::full || modes.master == Master::remainder;
}

struct alignas(8) Words8 {
  uint32_t word[2];
};

__device__ FASTPAR_INLINE Words8 load8(const void* p) {
#ifdef FASTPAR_EMULATED
  emulator::check_aligned(p, 8);
#endif
  return *static_cast<const Words8*>(p);
}

__device__ FASTPAR_INLINE void store8(void* p, const Words8& value) {
#ifdef FASTPAR_EMULATED
  emulator::check_aligned(p, 8);
#endif
  *static_cast<Words8*>(p) = value;
}

// Eight elements as they are stored.
struct Eight {
  uint32_t word[8];

  __device__ FASTPAR_INLINE void load(int at, const void* p) {  // 16 bytes into word[at..at + 3]
    const Words16 x = load16(p);
#pragma unroll
    for (int i = 0; i < 4; ++i) word[at + i] = x.word[i];
  }
  __device__ FASTPAR_INLINE void store(int at, void* p) const {
    store16(p, Words16{{word[at], word[at + 1], word[at + 2], word[at + 3]}});
  }
  __device__ FASTPAR_INLINE void load_half(int at, const void* p) {  // 8 bytes
    const Words8 x = load8(p);
    word[at] = x.word[0];
    word[at + 1] = x.word[1];
  }
  __device__ FASTPAR_INLINE void store_half(int at, void* p) const {
    store8(p, Words8{{word[at], word[at + 1]}});
  }
  __device__ FASTPAR_INLINE float full(int i) const { return bit_cast<float>(word[i]); }
  __device__ FASTPAR_INLINE uint16_t half(int i) const {
    return static_cast<uint16_t>(word[i / 2] >> (16 * (i % 2)));
  }
  __device__ FASTPAR_INLINE uint8_t byte(int i) const {
    return static_cast<uint8_t>(word[i / 4] >> (8 * (i % 4)));
  }
  __device__ FASTPAR_INLINE void set_full(int i, float x) { word[i] = bit_cast<uint32_t>(x); }
  __device__ FASTPAR_INLINE void set_half(int i, uint16_t bits) {
    word[i / 2] = i % 2 ? word[i / 2] | static_cast<uint32_t>(bits) << 16 : bits;
  }
  __device__ FASTPAR_INLINE void set_byte(int i, uint8_t bits) {
    word[i / 4] = i % 4 ? word[i / 4] | static_cast<uint32_t>(bits) << (8 * (i % 4)) : bits;
  }
};

struct Updated {
  float p, m, v, u;
};

// One range's part in a chunk.
template <Moment kMoment, bool kAmsgrad>
struct Part {
  using Stored =
      std::conditional_t<kMoment == Moment::float32, float,
                         std::conditional_t<kMoment == Moment::bfloat16, BFloat16, uint8_t>>;
  char *param, *grad, *master;
  Stored *m, *v, *u;
  float *m_scale, *v_scale;
  uint64_t first;
  int size;
  const AdamwModes* modes;
  const AdamwScalars* s;

  __device__ FASTPAR_INLINE int grad_bytes() const { return modes->grad == Dtype::float32 ? 4 : 2; }
  __device__ FASTPAR_INLINE bool is_full() const {
    return modes->master == Master::none || modes->master == Master::full;
  }
  // The floats that are updated, where floats are stored.
  __device__ FASTPAR_INLINE float* floats() const {
    return reinterpret_cast<float*>(modes->master == Master::full ? master : param);
  }

  // Elements after which every pointer is aligned to 16 bytes (codes to 8), -1 where there are
  // none.
  __device__ FASTPAR_INLINE int head() const {
    for (int n = 0; n < kGroup; ++n) {
      const auto off = [n](const void* p, int bytes) {
        return static_cast<uint32_t>(reinterpret_cast<std::uintptr_t>(p)) + n * bytes;
      };
      const int kept = modes->master == Master::remainder ? 2 : 4;
      uint32_t any = off(param, modes->param == Dtype::float32 ? 4 : 2) | off(grad, grad_bytes());
      if (has_master(*modes)) any |= off(master, kept);
      const int scale = kMoment == Moment::uint8 ? 2 : 1;
      uint32_t moments = off(m, sizeof(Stored)) | off(v, sizeof(Stored));
      if (kAmsgrad) moments |= off(u, sizeof(Stored));
      if ((any | moments * scale) % 16 == 0) return n;
    }
    return -1;
  }

  __device__ FASTPAR_INLINE float to_grad(uint16_t bits) const {
    return modes->grad == Dtype::bfloat16 ? to_float(BFloat16{bits}) : to_float(Float16{bits});
  }

  template <bool kSigned>
  __device__ FASTPAR_INLINE float to_moment(Stored x, float scale) const {
    if constexpr (kMoment == Moment::uint8) {
      return kSigned ? decode_signed(x, scale) : decode_positive(x, scale);
    } else {
      return to_float(x);
    }
  }

  template <bool kSigned>
  __device__ FASTPAR_INLINE Stored from_moment(float x, float scale, uint64_t key, int at) const {
    if constexpr (kMoment == Moment::uint8) {
      const uint32_t random = random_bits(key, first + at);
      return kSigned ? encode_signed(x, scale, random) : encode_positive(x, scale, random);
    } else if constexpr (kMoment == Moment::bfloat16) {
      return round_stochastic(x, random_bits(key, first + at));
    } else {
      return x;
    }
  }

  __device__ FASTPAR_INLINE uint16_t round_param(float kept) const {
    return modes->param == Dtype::bfloat16 ? round_master<BFloat16>(kept).bits
                                           : round_master<Float16>(kept).bits;
  }

  // Narrow accesses

  __device__ FASTPAR_INLINE Updated updated_one(int at, float old_m_scale,
                                                float old_v_scale) const {
    Updated x;
    if (is_full()) {
      x.p = floats()[at];
    } else {
      const BFloat16 top = reinterpret_cast<const BFloat16*>(param)[at];
      x.p = modes->master == Master::remainder
                ? master_join(top, reinterpret_cast<const int16_t*>(master)[at])
                : to_float(top);
    }
    const float g = modes->grad == Dtype::float32
                        ? reinterpret_cast<const float*>(grad)[at]
                        : to_grad(reinterpret_cast<const uint16_t*>(grad)[at]);
    x.m = to_moment<true>(m[at], old_m_scale);
    x.v = to_moment<false>(v[at], old_v_scale);
    if (kAmsgrad) x.u = to_moment<false>(u[at], 0.0f);
    adamw_update(g, &x.p, &x.m, &x.v, kAmsgrad ? &x.u : nullptr, *s);
    return x;
  }

  __device__ FASTPAR_INLINE void store_one(int at, const Updated& x, float new_m_scale,
                                           float new_v_scale) const {
    m[at] = from_moment<true>(x.m, new_m_scale, s->exp_avg_key, at);
    v[at] = from_moment<false>(x.v, new_v_scale, s->exp_avg_sq_key, at);
    if (kAmsgrad) u[at] = from_moment<false>(x.u, 0.0f, s->max_exp_avg_sq_key, at);
    uint16_t* halves = reinterpret_cast<uint16_t*>(param);
    switch (modes->master) {
      case Master::none:
        floats()[at] = x.p;
        break;
      case Master::full: {
        const float kept = modes->param == Dtype::bfloat16 ? keep_master<BFloat16>(x.p) : x.p;
        floats()[at] = kept;
        halves[at] = round_param(kept);
        break;
      }
      case Master::remainder: {
        const float kept = keep_master<BFloat16>(x.p);
        halves[at] = round_master<BFloat16>(kept).bits;
        reinterpret_cast<int16_t*>(master)[at] = master_remainder(kept);
        break;
      }
      case Master::stochastic:
        halves[at] = round_stochastic(x.p, random_bits(s->param_key, first + at)).bits;
        break;
    }
  }

  __device__ FASTPAR_INLINE void zero_one(int at) const {
    if (modes->grad == Dtype::float32) {
      reinterpret_cast<float*>(grad)[at] = 0.0f;
    } else {
      reinterpret_cast<uint16_t*>(grad)[at] = 0;
    }
  }

  // Wide accesses: elements place(at, 0..7), all pointers aligned there.
  // See [Note: whole sectors].

  static constexpr int kSecond = kMoment == Moment::uint8 ? kGroup / 2 : kMomentBlock / 2;

  static __device__ FASTPAR_INLINE int place(int at, int i) {
    return i < kGroup / 2 ? at + i : at + kSecond + i - kGroup / 2;
  }
  // The first of a thread's elements; i counts 8 a thread.
  static __device__ FASTPAR_INLINE int first_place(int i) {
    const int lanes = i % kMomentBlock;
    return kMoment == Moment::uint8 ? i : i - lanes + lanes / 2;
  }

  static __device__ FASTPAR_INLINE void load_floats(const void* from, int at, Eight* to) {
    const float* x = static_cast<const float*>(from) + at;
    to->load(0, x);
    to->load(4, x + kSecond);
  }
  static __device__ FASTPAR_INLINE void store_floats(const Eight& from, void* to, int at) {
    float* x = static_cast<float*>(to) + at;
    from.store(0, x);
    from.store(4, x + kSecond);
  }
  static __device__ FASTPAR_INLINE void load_halves(int word, const void* from, int at, Eight* to) {
    const uint16_t* x = static_cast<const uint16_t*>(from) + at;
    if constexpr (kMoment == Moment::uint8) {
      to->load(word, x);
    } else {
      to->load_half(word, x);
      to->load_half(word + 2, x + kSecond);
    }
  }
  static __device__ FASTPAR_INLINE void store_halves(int word, const Eight& from, void* to,
                                                     int at) {
    uint16_t* x = static_cast<uint16_t*>(to) + at;
    if constexpr (kMoment == Moment::uint8) {
      from.store(word, x);
    } else {
      from.store_half(word, x);
      from.store_half(word + 2, x + kSecond);
    }
  }

  __device__ FASTPAR_INLINE void load_moment(const Stored* from, int at, Eight* to) const {
    if constexpr (kMoment == Moment::uint8) {
      to->load_half(0, from + at);
    } else if constexpr (kMoment == Moment::bfloat16) {
      load_halves(0, from, at, to);
    } else {
      load_floats(from, at, to);
    }
  }

  template <bool kSigned>
  __device__ FASTPAR_INLINE float get_moment(const Eight& from, int i, float scale) const {
    if constexpr (kMoment == Moment::uint8) {
      return to_moment<kSigned>(from.byte(i), scale);
    } else if constexpr (kMoment == Moment::bfloat16) {
      return to_float(BFloat16{from.half(i)});
    } else {
      return from.full(i);
    }
  }

  template <bool kSigned>
  __device__ FASTPAR_INLINE void store_moment(const float* x, float scale, uint64_t key, Stored* to,
                                              int at) const {
    Eight packed;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const Stored stored = from_moment<kSigned>(x[i], scale, key, place(at, i));
      if constexpr (kMoment == Moment::uint8) {
        packed.set_byte(i, stored);
      } else if constexpr (kMoment == Moment::bfloat16) {
        packed.set_half(i, stored.bits);
      } else {
        packed.set_full(i, stored);
      }
    }
    if constexpr (kMoment == Moment::uint8) {
      packed.store_half(0, to + at);
    } else if constexpr (kMoment == Moment::bfloat16) {
      store_halves(0, packed, to, at);
    } else {
      store_floats(packed, to, at);
    }
  }

  __device__ FASTPAR_INLINE void step_eight(int at) const {
    Eight p_in = {}, g_in = {}, m_in = {}, v_in = {}, u_in = {};
    if (is_full()) {
      load_floats(floats(), at, &p_in);
    } else {
      load_halves(0, param, at, &p_in);
      if (modes->master == Master::remainder) load_halves(4, master, at, &p_in);
    }
    if (modes->grad == Dtype::float32) {
      load_floats(grad, at, &g_in);
    } else {
      load_halves(0, grad, at, &g_in);
    }
    load_moment(m, at, &m_in);
    load_moment(v, at, &v_in);
    if (kAmsgrad) load_moment(u, at, &u_in);
    float old_m_scale = 0.0f, old_v_scale = 0.0f;
    if (kMoment == Moment::uint8) {
      old_m_scale = m_scale[at / kMomentBlock];
      old_v_scale = v_scale[at / kMomentBlock];
    }

    float g[kGroup], p[kGroup], new_m[kGroup], new_v[kGroup], new_u[kGroup];
    if (modes->grad == Dtype::float32) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) g[i] = g_in.full(i);
    } else {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) g[i] = to_grad(g_in.half(i));
    }
    if (is_full()) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) p[i] = p_in.full(i);
    } else if (modes->master == Master::remainder) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const int16_t remainder = static_cast<int16_t>(p_in.half(kGroup + i));
        p[i] = master_join(BFloat16{p_in.half(i)}, remainder);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) p[i] = to_float(BFloat16{p_in.half(i)});
    }
    uint32_t largest_m = 0, largest_v = 0;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      new_m[i] = get_moment<true>(m_in, i, old_m_scale);
      new_v[i] = get_moment<false>(v_in, i, old_v_scale);
      if (kAmsgrad) new_u[i] = get_moment<false>(u_in, i, 0.0f);
      adamw_update(g[i], &p[i], &new_m[i], &new_v[i], kAmsgrad ? &new_u[i] : nullptr, *s);
      largest_m = larger(largest_m, magnitude_bits(new_m[i]));
      largest_v = larger(largest_v, magnitude_bits(new_v[i]));
    }
    float new_m_scale = 0.0f, new_v_scale = 0.0f;
    if (kMoment == Moment::uint8) {
      new_m_scale = block_scale(__reduce_max_sync(0xffffffffu, largest_m));
      new_v_scale = block_scale(__reduce_max_sync(0xffffffffu, largest_v));
      if (at % kMomentBlock == 0) store_scales(at, new_m_scale, new_v_scale);
    }
    store_moment<true>(new_m, new_m_scale, s->exp_avg_key, m, at);
    store_moment<false>(new_v, new_v_scale, s->exp_avg_sq_key, v, at);
    if (kAmsgrad) store_moment<false>(new_u, 0.0f, s->max_exp_avg_sq_key, u, at);
    store_params(p, at);
  }

  __device__ FASTPAR_INLINE void store_params(const float* p, int at) const {
    Eight out;
    if (modes->master == Master::stochastic) {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const uint32_t random = random_bits(s->param_key, first + place(at, i));
        out.set_half(i, round_stochastic(p[i], random).bits);
      }
      store_halves(0, out, param, at);
      return;
    }
    if (modes->master != Master::none) {
      float kept[kGroup];
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        kept[i] = modes->param == Dtype::bfloat16 ? keep_master<BFloat16>(p[i]) : p[i];
        out.set_half(i, round_param(kept[i]));
        if (modes->master == Master::remainder) {
          out.set_half(kGroup + i, static_cast<uint16_t>(master_remainder(kept[i])));
        }
      }
      store_halves(0, out, param, at);
      if (modes->master == Master::remainder) {
        store_halves(4, out, master, at);
        return;
      }
#pragma unroll
      for (int i = 0; i < kGroup; ++i) out.set_full(i, kept[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kGroup; ++i) out.set_full(i, p[i]);
    }
    store_floats(out, floats(), at);
  }

  __device__ FASTPAR_INLINE void zero_eight(int at) const {
    const Eight zeros = {};
    if (modes->grad == Dtype::float32) {
      store_floats(zeros, grad, at);
    } else {
      store_halves(0, zeros, grad, at);
    }
  }

  static __device__ FASTPAR_INLINE uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }

  __device__ FASTPAR_INLINE void store_scales(int at, float new_m_scale, float new_v_scale) const {
    m_scale[at / kMomentBlock] = new_m_scale;
    v_scale[at / kMomentBlock] = new_v_scale;
  }

  // A warp's way over elements [at, stop) of one block of scales with narrow accesses.
  __device__ FASTPAR_INLINE void step_block(int at, int stop) const {
    const int lane = threadIdx.x % kWarp;
    const float old_m_scale = m_scale[at / kMomentBlock];
    const float old_v_scale = v_scale[at / kMomentBlock];
    uint32_t largest_m = 0, largest_v = 0;
#pragma unroll 1
    for (int i = at + lane; i < stop; i += kWarp) {
      const Updated x = updated_one(i, old_m_scale, old_v_scale);
      largest_m = larger(largest_m, magnitude_bits(x.m));
      largest_v = larger(largest_v, magnitude_bits(x.v));
    }
    const float new_m_scale = block_scale(__reduce_max_sync(0xffffffffu, largest_m));
    const float new_v_scale = block_scale(__reduce_max_sync(0xffffffffu, largest_v));
#pragma unroll 1
    for (int i = at + lane; i < stop; i += kWarp) {
      const Updated x = updated_one(i, old_m_scale, old_v_scale);
      store_one(i, x, new_m_scale, new_v_scale);
      if (modes->zero_grad) zero_one(i);
    }
    if (lane == 0) store_scales(at, new_m_scale, new_v_scale);
  }

  __device__ FASTPAR_INLINE void run(bool skips) const {
    const bool blocks = kMoment == Moment::uint8;
    const int aligned_from = head();
    const bool wide = blocks ? aligned_from == 0 : aligned_from >= 0 && aligned_from < size;
    const int start = wide ? aligned_from : 0;
    // Wide accesses take what a warp takes whole.
    const int inner = wide ? (size - start) / kMomentBlock * kMomentBlock : 0;
#pragma unroll 1
    for (int i = threadIdx.x * kGroup; i < inner; i += kThreads * kGroup) {
      const int at = start + first_place(i);
      if (!skips) step_eight(at);
      if (modes->zero_grad) zero_eight(at);
    }
    if (blocks && !skips) {
#pragma unroll 1
      for (int at = inner + threadIdx.x / kWarp * kMomentBlock; at < size;
           at += kThreads * kGroup) {
        step_block(at, at + kMomentBlock < size ? at + kMomentBlock : size);
      }
      return;
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < size - inner; i += kThreads) {
      const int at = i < start ? i : i + inner;
      if (!skips) store_one(at, updated_one(at, 0.0f, 0.0f), 0.0f, 0.0f);
      if (modes->zero_grad) zero_one(at);
    }
  }
};

}  // namespace
}  // namespace fastpar
