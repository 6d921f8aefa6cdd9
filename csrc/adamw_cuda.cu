// [Note: one launch] A call's ranges travel as a kernel argument, the only memory that neither a
// copy to the device nor its lifetime in a captured graph troubles. Table is as large as CUDA
// allows; a range takes the words of range_words(): its pointers, a word for size and first chunk
// and, where bits are random, one for the first index. That is 5 words in fp32 and 7 with a full
// master and bfloat16 moments, so the 580 tensors of GPT-2 XL fit. Longer lists take one launch per
// Table. Each block walks over the chunks of all ranges and finds the range of a chunk in the
// table.
#include "adamw_cuda.h"

namespace fastpar {
namespace {

constexpr int kHypers = 32;  // of one launch
constexpr int kHyperWords = sizeof(AdamwHyper) / sizeof(uint64_t);
constexpr int kSizeBits = 40;     // of a range; the other 24 bits are its first chunk
constexpr int kAddressBits = 48;  // of a pointer; the others of param's word are its hyper
constexpr int kArgumentBytes = 32764;
constexpr int kWords = (kArgumentBytes - sizeof(AdamwModes) - 8) / sizeof(uint64_t);

static_assert(sizeof(AdamwHyper) % sizeof(uint64_t) == 0, "hypers are whole words");

struct Table {
  AdamwModes modes;
  int32_t count, hypers;
  uint64_t words[kWords];  // ranges from the front, hypers from the back
};
static_assert(sizeof(Table) <= kArgumentBytes, "CUDA allows no larger argument");

FASTPAR_HOST_DEVICE bool is_random(const AdamwModes& modes) {
  return modes.master == Master::stochastic || modes.moment != Moment::float32;
}

FASTPAR_HOST_DEVICE int range_words(const AdamwModes& modes, bool amsgrad) {
  return 5 + amsgrad + has_master(modes) + 2 * (modes.moment == Moment::uint8) + is_random(modes);
}

FASTPAR_HOST_DEVICE int first_chunk(const Table& table, int stride, int index) {
  return static_cast<int>(table.words[index * stride] >> kSizeBits);
}

// What a chunk of a range is.
template <Moment kMoment, bool kAmsgrad>
__device__ FASTPAR_INLINE Part<kMoment, kAmsgrad> part_of(const Table& table, int stride, int chunk,
                                                          const AdamwScalars* scalars) {
  const int low =
      range_of_chunk(table.count, chunk, [&](int i) { return first_chunk(table, stride, i); });
  const uint64_t* word = table.words + low * stride;
  const int64_t start = int64_t(chunk - first_chunk(table, stride, low)) * kChunk;
  const int64_t left = static_cast<int64_t>(*word++ & ((uint64_t(1) << kSizeBits) - 1)) - start;
  const auto next = [&](int64_t bytes) {
    const uint64_t address = *word++ & ((uint64_t(1) << kAddressBits) - 1);
    return reinterpret_cast<char*>(address) + bytes;
  };
  using Stored = typename Part<kMoment, kAmsgrad>::Stored;
  const auto next_moment = [&] { return reinterpret_cast<Stored*>(next(start * sizeof(Stored))); };
  Part<kMoment, kAmsgrad> part = {};
  part.modes = &table.modes;
  part.s = scalars + (*word >> kAddressBits);
  part.size = static_cast<int>(left < kChunk ? left : kChunk);
  part.param = next(start * (table.modes.param == Dtype::float32 ? 4 : 2));
  part.grad = next(start * (table.modes.grad == Dtype::float32 ? 4 : 2));
  part.m = next_moment();
  part.v = next_moment();
  if (kAmsgrad) part.u = next_moment();
  if (has_master(table.modes)) {
    part.master = next(start * (table.modes.master == Master::remainder ? 2 : 4));
  }
  if (kMoment == Moment::uint8) {
    const int64_t bytes = start / kMomentBlock * sizeof(float);
    part.m_scale = reinterpret_cast<float*>(next(bytes));
    part.v_scale = reinterpret_cast<float*>(next(bytes));
  }
  if (is_random(table.modes)) part.first = *word + start;
  return part;
}

template <Moment kMoment, bool kAmsgrad>
__global__ void __launch_bounds__(kThreads, kBlocksPerUnit)
    adamw_kernel(const __grid_constant__ Table table, int chunks) {
  __shared__ AdamwScalars scalars[kHypers];
  const bool skips = adamw_skips(table.modes);
  if (skips && !table.modes.zero_grad) return;
  if (static_cast<int>(threadIdx.x) < table.hypers) {
    AdamwHyper hyper;
    std::memcpy(&hyper, table.words + kWords - (threadIdx.x + 1) * kHyperWords, sizeof(hyper));
    scalars[threadIdx.x] = adamw_scalars(hyper, table.modes);
  }
  __syncthreads();
  const int stride = range_words(table.modes, kAmsgrad);
  for (int chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    part_of<kMoment, kAmsgrad>(table, stride, chunk, scalars).run(skips);
  }
}

uint64_t address_word(const void* p, int high) {
  const uint64_t address = reinterpret_cast<std::uintptr_t>(p);
  FASTPAR_CHECK(address >> kAddressBits == 0, "adamw_step_: expected addresses of ", kAddressBits,
                " bits, got address=", address, "; use memory of torch's CUDA allocator");
  return address | static_cast<uint64_t>(high) << kAddressBits;
}

// A launch that is being filled.
class Launch {
 public:
  Launch(const AdamwModes& modes, bool amsgrad)
      : amsgrad_(amsgrad), stride_(range_words(modes, amsgrad)) {
    table_.modes = modes;
    table_.count = table_.hypers = 0;
  }

  // Adds a range; false if it does not fit.
  bool add(const AdamwRange& r, const AdamwHyper* hypers) {
    int hyper = 0;
    while (hyper < table_.hypers && used_[hyper] != r.hyper) ++hyper;
    const bool is_new = hyper == table_.hypers;
    const int used = (table_.count + 1) * stride_ + (table_.hypers + is_new) * kHyperWords;
    const int64_t chunks = chunks_ + (r.size + kChunk - 1) / kChunk;
    if (used > kWords || hyper == kHypers || chunks >> (64 - kSizeBits)) return false;
    if (is_new) {
      used_[table_.hypers++] = r.hyper;
      std::memcpy(table_.words + kWords - table_.hypers * kHyperWords, hypers + r.hyper,
                  sizeof(AdamwHyper));
    }
    uint64_t* word = table_.words + table_.count++ * stride_;
    *word++ = static_cast<uint64_t>(r.size) | static_cast<uint64_t>(chunks_) << kSizeBits;
    *word++ = address_word(r.param, hyper);
    for (const void* p : {r.grad, r.exp_avg, r.exp_avg_sq}) *word++ = address_word(p, 0);
    if (amsgrad_) *word++ = address_word(r.max_exp_avg_sq, 0);
    if (has_master(table_.modes)) *word++ = address_word(r.master, 0);
    if (table_.modes.moment == Moment::uint8) {
      *word++ = address_word(r.exp_avg_scale, 0);
      *word++ = address_word(r.exp_avg_sq_scale, 0);
    }
    if (is_random(table_.modes)) *word++ = static_cast<uint64_t>(r.first_index);
    chunks_ = chunks;
    return true;
  }

  void start(Stream stream) {
    switch (table_.modes.moment) {
      case Moment::float32:
        return start(
            amsgrad_ ? adamw_kernel<Moment::float32, true> : adamw_kernel<Moment::float32, false>,
            stream);
      case Moment::bfloat16:
        return start(
            amsgrad_ ? adamw_kernel<Moment::bfloat16, true> : adamw_kernel<Moment::bfloat16, false>,
            stream);
      case Moment::uint8:
        return start(adamw_kernel<Moment::uint8, false>, stream);
    }
  }

 private:
  void start(void (*kernel)(const Table, int), Stream stream) {
    const int64_t blocks = std::min<int64_t>(chunks_, kBlocksPerUnit * multiprocessors());
    launch(kernel, blocks, kThreads, stream, table_, static_cast<int>(chunks_));
  }

  bool amsgrad_;
  int stride_;
  int64_t chunks_ = 0;
  int used_[kHypers];
  Table table_;
};

}  // namespace

int64_t adamw_step_cuda(const AdamwRange* ranges, int64_t range_count, const AdamwHyper* hypers,
                        int64_t, const AdamwModes& modes, Stream stream) {
  int64_t launches = 0;
  const bool amsgrad = range_count > 0 && ranges[0].max_exp_avg_sq;
  for (int64_t next = 0; next < range_count;) {
    Launch launch(modes, amsgrad);
    const int64_t first = next;
    while (next < range_count && launch.add(ranges[next], hypers)) ++next;
    FASTPAR_CHECK(next > first,
                  "adamw_step_: expected fewer than 2^37 elements, got size=", ranges[first].size,
                  "; pass the tensor in parts");
    launch.start(stream);
    ++launches;
  }
  return launches;
}

}  // namespace fastpar
