// AdamW on the CPU. The storage modes that most steps use have a loop of their own; all others go
// through one staged kernel, which widens a part of each array to floats in L1, updates and stores.
//
// [Note: no races] The elements of all ranges are cut into chunks; chunk i belongs to one iteration
// of one parallel loop, and ranges do not overlap (bindings_adamw.cpp refuses it). An iteration
// writes only param, states and, to zero it, grad of its own elements, and the scales of its own
// blocks of 256: chunks begin at multiples of kChunk within a range and a range with scales begins
// a block. What iterations share (ranges, scalars, modes) is written before the loop. So no two
// threads touch the same element, whatever the schedule.
#include <algorithm>
#include <cstring>
#include <vector>

#include "adamw_math.h"
#include "ops.h"
#include "simd.h"

namespace fastpar {
namespace {

// 16 K elements: 448 KiB of traffic, enough to hide the loop over chunks, small enough to balance.
constexpr int64_t kChunk = 1 << 14;
constexpr int64_t kPart = 1 << 10;  // floats of a staged array: five arrays fit into L1
static_assert(kChunk % kPart == 0 && kPart % kMomentBlock == 0, "a block of scales is not cut");

// P is its own master where it is float.
template <class P, class G>
struct AdamwChunk {
  static FASTPAR_INLINE void run(P* __restrict param, const G* __restrict grad,
                                 float* __restrict exp_avg, float* __restrict exp_avg_sq,
                                 float* __restrict master, int64_t n, const AdamwScalars* scalars) {
    const AdamwScalars s = *scalars;
    for (int64_t i = 0; i < n; ++i) {
      float p = master[i];
      float m = exp_avg[i];
      float v = exp_avg_sq[i];
      adamw_update(to_float(grad[i]), &p, &m, &v, nullptr, s);
      exp_avg[i] = m;
      exp_avg_sq[i] = v;
      p = keep_master<P>(p);
      master[i] = p;
      param[i] = round_master<P>(p);
    }
  }
};

template <class G>
struct AdamwChunk<float, G> {
  static FASTPAR_INLINE void run(float* __restrict param, const G* __restrict grad,
                                 float* __restrict exp_avg, float* __restrict exp_avg_sq, float*,
                                 int64_t n, const AdamwScalars* scalars) {
    const AdamwScalars s = *scalars;
    for (int64_t i = 0; i < n; ++i) {
      float p = param[i];
      float m = exp_avg[i];
      float v = exp_avg_sq[i];
      adamw_update(to_float(grad[i]), &p, &m, &v, nullptr, s);
      exp_avg[i] = m;
      exp_avg_sq[i] = v;
      param[i] = p;
    }
  }
};

template <class T>
FASTPAR_INLINE void widen(const void* from, int64_t n, float* __restrict to) {
  const T* __restrict x = static_cast<const T*>(from);
  for (int64_t i = 0; i < n; ++i) to[i] = to_float(x[i]);
}

// The n floats of `from`: itself where it holds floats, else the buffer.
FASTPAR_INLINE float* floats(void* from, Dtype dtype, int64_t n, float* buffer) {
  if (dtype == Dtype::float32) return static_cast<float*>(from);
  if (dtype == Dtype::bfloat16) {
    widen<BFloat16>(from, n, buffer);
  } else {
    widen<Float16>(from, n, buffer);
  }
  return buffer;
}

FASTPAR_INLINE void join(const BFloat16* __restrict param, const int16_t* __restrict remainder,
                         int64_t n, float* __restrict master) {
  for (int64_t i = 0; i < n; ++i) master[i] = master_join(param[i], remainder[i]);
}

FASTPAR_INLINE void split(const float* __restrict master, int64_t n, BFloat16* __restrict param,
                          int16_t* __restrict remainder) {
  for (int64_t i = 0; i < n; ++i) {
    const float kept = keep_master<BFloat16>(master[i]);
    param[i] = round_master<BFloat16>(kept);
    remainder[i] = master_remainder(kept);
  }
}

template <class P>
FASTPAR_INLINE void narrow(float* __restrict master, int64_t n, P* __restrict param) {
  for (int64_t i = 0; i < n; ++i) {
    const float kept = keep_master<P>(master[i]);
    master[i] = kept;
    param[i] = round_master<P>(kept);
  }
}

FASTPAR_INLINE void narrow_stochastic(const float* __restrict x, int64_t n, uint64_t key,
                                      uint64_t first, BFloat16* __restrict to) {
  for (int64_t i = 0; i < n; ++i) {
    to[i] = round_stochastic(x[i], random_bits_from(key, first, static_cast<uint32_t>(i)));
  }
}

template <bool kSigned>
FASTPAR_INLINE void decode(const uint8_t* __restrict codes, const float* scales, int64_t n,
                           float* __restrict to) {
  for (int64_t start = 0; start < n; start += kMomentBlock) {
    const int64_t stop = start + kMomentBlock < n ? start + kMomentBlock : n;
    const float scale = scales[start / kMomentBlock];
    for (int64_t i = start; i < stop; ++i) {
      to[i] = kSigned ? decode_signed(codes[i], scale) : decode_positive(codes[i], scale);
    }
  }
}

template <bool kSigned>
FASTPAR_INLINE void encode(const float* __restrict x, int64_t n, uint64_t key, uint64_t first,
                           uint8_t* __restrict codes, float* scales) {
  for (int64_t start = 0; start < n; start += kMomentBlock) {
    const int64_t stop = start + kMomentBlock < n ? start + kMomentBlock : n;
    uint32_t largest = 0;
    for (int64_t i = start; i < stop; ++i) {
      const uint32_t magnitude = magnitude_bits(x[i]);
      largest = magnitude > largest ? magnitude : largest;
    }
    const float scale = block_scale(largest);
    scales[start / kMomentBlock] = scale;
    for (int64_t i = start; i < stop; ++i) {
      const uint32_t random = random_bits_from(key, first, static_cast<uint32_t>(i));
      codes[i] =
          kSigned ? encode_signed(x[i], scale, random) : encode_positive(x[i], scale, random);
    }
  }
}

// A moment as floats, and back.
template <bool kSigned>
FASTPAR_INLINE float* load_moment(void* from, const float* scales, Moment moment, int64_t n,
                                  float* buffer) {
  if (moment == Moment::float32) return static_cast<float*>(from);
  if (moment == Moment::bfloat16) {
    widen<BFloat16>(from, n, buffer);
  } else {
    decode<kSigned>(static_cast<const uint8_t*>(from), scales, n, buffer);
  }
  return buffer;
}

template <bool kSigned>
FASTPAR_INLINE void store_moment(const float* x, void* to, float* scales, Moment moment, int64_t n,
                                 uint64_t key, uint64_t first) {
  if (moment == Moment::bfloat16) {
    narrow_stochastic(x, n, key, first, static_cast<BFloat16*>(to));
  } else if (moment == Moment::uint8) {
    encode<kSigned>(x, n, key, first, static_cast<uint8_t*>(to), scales);
  }
}

FASTPAR_INLINE void update(const float* __restrict g, int64_t n, float* __restrict p,
                           float* __restrict m, float* __restrict v, const AdamwScalars& scalars) {
  const AdamwScalars s = scalars;
  for (int64_t i = 0; i < n; ++i) {
    float p_i = p[i], m_i = m[i], v_i = v[i];
    adamw_update(g[i], &p_i, &m_i, &v_i, nullptr, s);
    p[i] = p_i;
    m[i] = m_i;
    v[i] = v_i;
  }
}

FASTPAR_INLINE void update_amsgrad(const float* __restrict g, int64_t n, float* __restrict p,
                                   float* __restrict m, float* __restrict v,
                                   float* __restrict max_v, const AdamwScalars& scalars) {
  const AdamwScalars s = scalars;
  for (int64_t i = 0; i < n; ++i) {
    float p_i = p[i], m_i = m[i], v_i = v[i], max_i = max_v[i];
    adamw_update(g[i], &p_i, &m_i, &v_i, &max_i, s);
    p[i] = p_i;
    m[i] = m_i;
    v[i] = v_i;
    max_v[i] = max_i;
  }
}

int64_t bytes_of(Dtype dtype) { return dtype == Dtype::float32 ? 4 : 2; }

int64_t bytes_of(Moment moment) {
  return moment == Moment::float32 ? 4 : (moment == Moment::bfloat16 ? 2 : 1);
}

void* moved(void* p, int64_t bytes) { return p ? static_cast<char*>(p) + bytes : nullptr; }

// Elements [start, start + n) of a range; start is a multiple of 256.
AdamwRange part_of(const AdamwRange& r, const AdamwModes& modes, int64_t start, int64_t n) {
  const int64_t moment = start * bytes_of(modes.moment);
  AdamwRange part = r;
  part.param = moved(r.param, start * bytes_of(modes.param));
  part.grad = moved(r.grad, start * bytes_of(modes.grad));
  part.exp_avg = moved(r.exp_avg, moment);
  part.exp_avg_sq = moved(r.exp_avg_sq, moment);
  part.max_exp_avg_sq = moved(r.max_exp_avg_sq, moment);
  part.master = moved(r.master, start * (modes.master == Master::remainder ? 2 : 4));
  if (modes.moment == Moment::uint8) {
    part.exp_avg_scale += start / kMomentBlock;
    part.exp_avg_sq_scale += start / kMomentBlock;
  }
  part.size = n;
  part.first_index += start;
  return part;
}

// Any storage mode, at most kPart elements.
struct StagedPart {
  static FASTPAR_INLINE void run(const AdamwRange* range, const AdamwModes* modes,
                                 const AdamwScalars* scalars) {
    const AdamwRange r = *range;
    const AdamwScalars s = *scalars;
    const Moment moment = modes->moment;
    const int64_t n = r.size;
    const uint64_t first = static_cast<uint64_t>(r.first_index);
    alignas(64) float p_buffer[kPart], g_buffer[kPart], m_buffer[kPart], v_buffer[kPart],
        max_buffer[kPart];
    const float* g = floats(r.grad, modes->grad, n, g_buffer);
    float* m = load_moment<true>(r.exp_avg, r.exp_avg_scale, moment, n, m_buffer);
    float* v = load_moment<false>(r.exp_avg_sq, r.exp_avg_sq_scale, moment, n, v_buffer);
    float* p = p_buffer;
    if (modes->master == Master::full) {
      p = static_cast<float*>(r.master);
    } else if (modes->master == Master::remainder) {
      join(static_cast<BFloat16*>(r.param), static_cast<int16_t*>(r.master), n, p);
    } else {
      p = floats(r.param, modes->param, n, p_buffer);
    }
    if (r.max_exp_avg_sq) {
      float* max_v = load_moment<false>(r.max_exp_avg_sq, nullptr, moment, n, max_buffer);
      update_amsgrad(g, n, p, m, v, max_v, s);
      store_moment<false>(max_v, r.max_exp_avg_sq, nullptr, moment, n, s.max_exp_avg_sq_key, first);
    } else {
      update(g, n, p, m, v, s);
    }
    store_moment<true>(m, r.exp_avg, r.exp_avg_scale, moment, n, s.exp_avg_key, first);
    store_moment<false>(v, r.exp_avg_sq, r.exp_avg_sq_scale, moment, n, s.exp_avg_sq_key, first);
    if (modes->master == Master::remainder) {
      split(p, n, static_cast<BFloat16*>(r.param), static_cast<int16_t*>(r.master));
    } else if (modes->master == Master::stochastic) {
      narrow_stochastic(p, n, s.param_key, first, static_cast<BFloat16*>(r.param));
    } else if (modes->param == Dtype::bfloat16) {
      narrow(p, n, static_cast<BFloat16*>(r.param));
    } else if (modes->param == Dtype::float16) {
      narrow(p, n, static_cast<Float16*>(r.param));
    }
  }
};

using StepPart = void (*)(Isa, const AdamwRange&, const AdamwModes&, const AdamwScalars&);

template <class P, class G>
void step_direct(Isa target, const AdamwRange& r, const AdamwModes&, const AdamwScalars& scalars) {
  dispatch<AdamwChunk<P, G>>(target, static_cast<P*>(r.param), static_cast<const G*>(r.grad),
                             static_cast<float*>(r.exp_avg), static_cast<float*>(r.exp_avg_sq),
                             static_cast<float*>(r.master), r.size, &scalars);
}

void step_staged(Isa target, const AdamwRange& r, const AdamwModes& modes,
                 const AdamwScalars& scalars) {
  for (int64_t start = 0; start < r.size; start += kPart) {
    const AdamwRange part = part_of(r, modes, start, std::min(kPart, r.size - start));
    dispatch<StagedPart>(target, &part, &modes, &scalars);
  }
}

template <class P>
StepPart direct_for(Dtype grad) {
  if (grad == Dtype::float32) return step_direct<P, float>;
  return grad == Dtype::bfloat16 ? step_direct<P, BFloat16> : step_direct<P, Float16>;
}

StepPart step_for(const AdamwModes& modes, bool amsgrad) {
  if (modes.moment != Moment::float32 || amsgrad) return step_staged;
  if (modes.master == Master::full) {
    return modes.param == Dtype::bfloat16 ? direct_for<BFloat16>(modes.grad)
                                          : direct_for<Float16>(modes.grad);
  }
  const bool plain = modes.master == Master::none && modes.grad == Dtype::float32;
  return plain ? step_direct<float, float> : step_staged;
}

}  // namespace

void adamw_step(const AdamwRange* ranges, int64_t range_count, const AdamwHyper* hypers,
                int64_t hyper_count, const AdamwModes& modes, int threads) {
  std::vector<int64_t> first_chunk;  // of each range, and the total at the end
  first_chunk.reserve(range_count + 1);
  first_chunk.push_back(0);
  for (int64_t i = 0; i < range_count; ++i) {
    first_chunk.push_back(first_chunk.back() + (ranges[i].size + kChunk - 1) / kChunk);
  }
  std::vector<AdamwScalars> scalars;
  for (int64_t i = 0; i < hyper_count; ++i) scalars.push_back(adamw_scalars(hypers[i], modes));
  const int64_t chunks = first_chunk.back();
  const bool skips = adamw_skips(modes);
  if (skips && !modes.zero_grad) return;
  const StepPart step = step_for(modes, range_count > 0 && ranges[0].max_exp_avg_sq);
  const Isa target = isa();
  threads = useful_threads(chunks, 2, threads);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {  // [Note: no races]
    const auto next = std::upper_bound(first_chunk.begin(), first_chunk.end(), chunk);
    const int64_t index = next - first_chunk.begin() - 1;
    const AdamwRange& r = ranges[index];
    const int64_t start = (chunk - first_chunk[index]) * kChunk;
    const AdamwRange part = part_of(r, modes, start, std::min(kChunk, r.size - start));
    if (!skips) step(target, part, modes, scalars[r.hyper]);
    if (modes.zero_grad) std::memset(part.grad, 0, part.size * bytes_of(modes.grad));
  }
}

}  // namespace fastpar
