// Runs the ops of csrc/ops.h on memory whose ends the sanitizers watch: odd sizes, odd offsets, one
// thread and several, every instruction set of the machine; and the shared-memory collectives by
// threads in place of ranks. tests/tools/test_sanitizers.py builds it with ASan and UBSan, and with
// TSan, and then runs it with the argument `threads`: several of them alone, at one offset. With
// `digest` it prints a hash of all that the ops wrote, which .ci/aarch64 compares between machines;
// then attention runs, too.

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "norm_math.h"
#include "ops.h"
#include "shm.h"
#include "simd.h"

namespace {

using namespace fastpar;

constexpr Dtype kDtypes[] = {Dtype::float32, Dtype::bfloat16, Dtype::float16};

int64_t bytes_of(Dtype dtype) { return dtype == Dtype::float32 ? 4 : 2; }

// A hash of what the ops wrote, unless it is off. All nans are one: their bits differ by machine.
class Digest {
 public:
  void fold(const void* data, int64_t bytes, int64_t element) {
    if (!on) return;
    for (int64_t i = 0; i < bytes; i += element) {
      uint64_t word = 0;
      std::memcpy(&word, static_cast<const char*>(data) + i, element);
      const uint64_t size = word & 0x7fffffffU;
      const bool half = (size & 0x7fffU) > 0x7c00U && (size & 0x7c00U) == 0x7c00U;
      if (element == 4 && size > 0x7f800000U) word = size | 0x7fffffffU;
      if (element == 2 && (half || (size & 0x7fffU) > 0x7f80U)) word = 0x7fffU;
      hash = (hash ^ word) * 0x100000001b3U;
    }
  }
  void print(const char* name) {
    if (on) std::printf("%s %016llx\n", name, static_cast<unsigned long long>(hash));
    hash = 0xcbf29ce484222325U;
  }

  bool on = false;
  uint64_t hash = 0xcbf29ce484222325U;
} digest;

uint32_t random_bits(int64_t i) {
  uint64_t x = (static_cast<uint64_t>(i) + 1) * 0x9e3779b97f4a7c15U;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  return static_cast<uint32_t>((x ^ (x >> 27)) >> 16);
}

// Heap memory that ends where the last element does and begins `offset` elements before the first.
// Floats of 32 bits from -2 to 2, or of 16 bits (of either kind), or bytes.
class Memory {
 public:
  Memory(int64_t n, int64_t element, int64_t offset = 0, bool positive = false)
      : base_(static_cast<char*>(std::malloc(n * element + offset * element + (n == 0)))),
        data_(base_ + offset * element),
        bytes_(n * element),
        element_(element) {
    for (int64_t i = 0; i < n; ++i) {
      uint32_t bits = random_bits(i);
      if (element == 2) {
        bits = (bits & 0x87ffU) | 0x3800U;
      } else if (element > 2) {
        const float value = static_cast<float>(static_cast<int32_t>(bits) >> 8) * 0x1p-22F;
        std::memcpy(&bits, &value, 4);
      }
      if (positive) bits &= element == 2 ? 0x7fffU : element == 1 ? 0xffU : 0x7fffffffU;
      const uint64_t word = bits;
      std::memcpy(data_ + i * element, &word, element);
    }
  }
  Memory(Memory&& other)
      : base_(other.base_), data_(other.data_), bytes_(other.bytes_), element_(other.element_) {
    other.base_ = nullptr;
  }
  ~Memory() {
    if (base_ != nullptr) digest.fold(data_, bytes_, element_);
    std::free(base_);
  }
  void* at() const { return data_; }
  float* floats() const { return reinterpret_cast<float*>(data_); }
  void zero() { std::memset(data_, 0, bytes_); }

 private:
  char* base_;
  char* data_;
  int64_t bytes_, element_;
};

struct Storage {
  Dtype param, grad;
  Moment moment;
  Master master;
};

void run_adamw(const std::vector<int64_t>& sizes, int64_t offset, int threads) {
  std::vector<Storage> storages;
  for (Moment moment : {Moment::float32, Moment::bfloat16, Moment::uint8}) {
    storages.push_back({Dtype::float32, Dtype::float32, moment, Master::none});
    for (Dtype grad : {Dtype::float32, Dtype::bfloat16}) {
      for (Master master : {Master::full, Master::remainder, Master::stochastic}) {
        storages.push_back({Dtype::bfloat16, grad, moment, master});
      }
    }
    storages.push_back({Dtype::float16, Dtype::float16, moment, Master::full});
  }
  for (const Storage& s : storages) {
    for (bool amsgrad : {false, true}) {
      if (amsgrad && s.moment == Moment::uint8) continue;
      const int64_t of_moment = s.moment == Moment::float32 ? 4 : s.moment == Moment::uint8 ? 1 : 2;
      const int64_t of_master = s.master == Master::full ? 4 : 2;
      const bool mastered = s.master == Master::full || s.master == Master::remainder;
      std::vector<Memory> kept;
      std::vector<AdamwRange> ranges;
      auto take = [&](int64_t n, int64_t element, bool positive = false) {
        kept.emplace_back(n, element, offset, positive);
        return kept.back().at();
      };
      int64_t first = 0;
      for (int64_t n : sizes) {
        AdamwRange r{};
        r.param = take(n, bytes_of(s.param));
        r.grad = take(n, bytes_of(s.grad));
        r.exp_avg = take(n, of_moment);
        r.exp_avg_sq = take(n, of_moment, true);
        if (amsgrad) r.max_exp_avg_sq = take(n, of_moment, true);
        if (mastered) r.master = take(n, of_master);
        if (s.moment == Moment::uint8) {
          r.exp_avg_scale = static_cast<float*>(take((n + 255) / 256, 4, true));
          r.exp_avg_sq_scale = static_cast<float*>(take((n + 255) / 256, 4, true));
        }
        r.size = n;
        r.first_index = first;
        first += (n + 255) / 256 * 256;
        ranges.push_back(r);
      }
      const AdamwHyper hyper = {1e-3,    0.9,     0.99,    1e-8,    0.1,     3,
                                nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
      const AdamwModes modes = {s.param, s.grad,  s.moment, s.master, true,
                                true,    nullptr, nullptr,  7};
      adamw_step(ranges.data(), static_cast<int64_t>(ranges.size()), &hyper, 1, modes, threads);
    }
  }
}

void run_shards(const std::vector<int64_t>& sizes, int64_t offset, int threads) {
  for (Dtype to : kDtypes) {
    for (Dtype from : kDtypes) {
      for (int64_t n : sizes) {
        const int world = 3 + 10 * (n % 2);  // within a leaf of the tree, and of several levels
        std::vector<Memory> shards;
        std::vector<const void*> at;
        for (int w = 0; w < world; ++w) {
          shards.emplace_back(n, bytes_of(from), offset);
          at.push_back(shards.back().at());
        }
        Memory out(n, bytes_of(to), 1);
        sum_shards(at.data(), world, out.at(), n, from, to, 0.5F, threads);
      }
    }
  }
}

void run_norm(const std::vector<int64_t>& sizes, int64_t offset, int threads) {
  std::vector<Memory> kept;
  std::vector<NormRange> ranges;
  for (Dtype dtype : kDtypes) {
    for (int64_t n : sizes) {
      kept.emplace_back(n, bytes_of(dtype), offset);
      ranges.push_back({kept.back().at(), n, dtype, n % 2 == 0});
    }
  }
  int64_t words[kNormWords] = {};
  norm_bins(ranges.data(), static_cast<int64_t>(ranges.size()), words, threads);
  digest.fold(words, sizeof(words), 8);
  Memory result(3, 4);
  norm_result(words, {1.0, 1e-6, {1.0F, nullptr}}, result.floats());
}

void run_quantize(const std::vector<int64_t>& sizes, int64_t offset, int threads) {
  const uint64_t seed = 5;
  for (int64_t block : {16, 256}) {
    for (int64_t n : sizes) {
      for (Dtype dtype : kDtypes) {
        Memory x(n, bytes_of(dtype), offset), codes(n, 1, offset);
        Memory scales((n + block - 1) / block, 4);
        const QuantizeBlocks blocks = {codes.at(), scales.floats(), block};
        for (const uint64_t* at : {static_cast<const uint64_t*>(nullptr), &seed}) {
          quantize_blockwise(x.at(), dtype, blocks, n, at, 3, threads);
        }
        for (Code code : {Code::int8, Code::e4m3, Code::e5m2}) {
          dequantize_blockwise(blocks, code, x.at(), dtype, n, threads);
        }
      }
    }
  }
}

void run_rows(int64_t n, int64_t c, int64_t offset, int threads) {
  for (Dtype dtype : kDtypes) {
    const int64_t element = bytes_of(dtype);
    Memory x(n * c, element, offset), y(n * c, element, offset), dx(n * c, element, offset);
    Memory bias(c, 4, 1), dbias(c, 4, 1), weight(c, 4), dweight(c, 4), mean(n, 4), rstd(n, 4);
    for (Activation kind : {Activation::gelu, Activation::relu2, Activation::swiglu}) {
      if (kind == Activation::swiglu && c % 2) continue;
      activation_fwd(x.at(), bias.floats(), y.at(), kind, dtype, n, c, threads);
      activation_bwd(y.at(), x.at(), bias.floats(), dx.at(), dbias.floats(), kind, dtype, n, c,
                     threads);
    }
    const MaskBlock mask = {1, 0, 2, 26, 1, 1, n, c, 0, 0};
    dropout(x.at(), y.at(), dtype, mask, threads);
    layer_norm_fwd(x.at(), nullptr, nullptr, weight.floats(), bias.floats(), nullptr, y.at(),
                   mean.floats(), rstd.floats(), dtype, n, c, 1e-5F, false, MaskBlock{}, threads);
    layer_norm_bwd(y.at(), nullptr, x.at(), weight.floats(), mean.floats(), rstd.floats(), dx.at(),
                   nullptr, dweight.floats(), dbias.floats(), nullptr, dtype, n, c, false,
                   MaskBlock{}, threads);
    Memory targets(n, 8), loss(n, 4), scale(1, 4);
    targets.zero();
    const CrossEntropyRows rows = {
        x.at(),         c, n,   c,   c, static_cast<const int64_t*>(targets.at()), -100, c,
        scale.floats(), 0, 0.1, 1e-4};
    cross_entropy_rows(rows, dx.at(), loss.floats(), dtype, threads);
  }
}

#ifdef DRIVE_ATTENTION
void run_attention(int threads) {
  for (Dtype dtype : kDtypes) {
    for (int64_t d : {8, 64}) {
      for (bool causal : {false, true}) {
        const int64_t t = 37, tk = 53, heads = 4, key_heads = 2, element = bytes_of(dtype);
        std::vector<Memory> kept;
        auto take = [&](int64_t rows, int64_t h) {
          kept.emplace_back(2 * rows * h * d, element);
          return Strided{kept.back().at(), rows * h * d, h * d, d};
        };
        const Strided q = take(t, heads), k = take(tk, key_heads), v = take(tk, key_heads);
        const Strided o = take(t, heads), d_o = take(t, heads);
        const Strided dq = take(t, heads), dk = take(tk, key_heads), dv = take(tk, key_heads);
        Memory stats(2 * heads * t * 2, 4);
        const AttentionShape shape = {2, t, tk, heads, key_heads, d, causal, 0.3F, nullptr};
        const MaskBlock mask = {1, 0, 2, causal ? 26 : 0, 2, heads, t, tk, 0, 0, 0, 0};
        attention_fwd(q, k, v, o, stats.floats(), dtype, shape, mask, threads);
        attention_bwd(d_o, q, k, v, stats.floats(), dq, dk, dv, dtype, shape, mask, threads);
      }
    }
  }
}
#endif

// Threads stand for the ranks of one block of shared memory.
void run_shm(int world, int64_t n) {
  const int64_t chunk = 4096, heap = 1 << 16;
  const int64_t bytes = ShmGroup::block_bytes(world, chunk, heap);
  void* block = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  std::memset(block, 0, bytes);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < world; ++rank) {
    ranks.emplace_back([=] {
      ShmGroup group(block, rank, world, chunk, heap, std::vector<int>(world, -1), 60.0);
      for (int round = 0; round < 3; ++round) {
        for (ShmType type : {ShmType::float32, ShmType::bfloat16, ShmType::int64}) {
          const int64_t element = type == ShmType::int64 ? 8 : type == ShmType::float32 ? 4 : 2;
          Memory whole(n * world, element, 1), part(n, element, 1);
          group.all_reduce(whole.at(), n * world, type, false, round);
          group.reduce_scatter(part.at(), whole.at(), n, type, false, false, round);
          if (element == 2) {
            Memory wide(n, 4, 1);
            group.reduce_scatter(wide.at(), whole.at(), n, type, true, true, round);
          }
          group.all_gather(whole.at(), part.at(), n, {"x", element}, round);
          group.broadcast(part.at(), n, {"x", element}, world - 1, round);
        }
        std::memset(group.heap(), rank, heap);
        group.all_reduce(group.heap(), n * world, ShmType::float32, false, round);
        group.barrier(round);
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  std::free(block);
}

// Two elements of one thread and one of the next, where two write: what a report has to look like.
void run_wrong(const std::string& how) {
  Memory x(8, 4);
  const void* shard = x.at();
  const auto sum = [&](int64_t n) {
    sum_shards(&shard, 1, x.at(), n, Dtype::float32, Dtype::float32, 0.5F, 1);
  };
  if (how == "overflow") {
    sum(9);
  } else if (how == "race") {
    std::thread other([&] { sum(8); });
    sum(8);
    other.join();
  } else if (how == "loop race") {  // one tensor twice in a list: two chunks of one loop
    std::vector<Memory> large;
    for (int i = 0; i < 4; ++i) large.emplace_back(1 << 20, 4);
    AdamwRange range{};
    range.param = large[0].at();
    range.grad = large[1].at();
    range.exp_avg = large[2].at();
    range.exp_avg_sq = large[3].at();
    range.size = 1 << 20;
    const AdamwRange ranges[] = {range, range};
    const AdamwHyper hyper = {1e-3,    0.9,     0.99,    1e-8,    0.1,     3,
                              nullptr, nullptr, nullptr, nullptr, nullptr, nullptr};
    const AdamwModes modes = {Dtype::float32, Dtype::float32, Moment::float32,
                              Master::none,   false,          false,
                              nullptr,        nullptr,        7};
    adamw_step(ranges, 2, &hyper, 1, modes, 2);
  } else {  // a value that fits no int
    volatile int largest = std::numeric_limits<int>::max();
    largest = largest + 1;
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  digest.on = what == "digest";
  const bool several = what == "threads";
  if (argc > 1 && !digest.on && !several) {
    run_wrong(what);
    return 0;
  }
  const std::vector<int64_t> tails = {0, 1, 5, 15, 16, 17, 31, 63, 64, 65, 255, 256, 257, 515};
  for (const char* name : {"baseline", "avx2", "avx512"}) {
    if (!isa_supported(name)) {
      if (!digest.on) std::printf("%s: not on this machine\n", name);
      continue;
    }
    set_isa(name);
    for (int threads : {1, 3}) {
      for (int64_t offset : {0, 1, 3}) {
        if (several && (threads == 1 || offset != 3)) continue;
        std::vector<int64_t> sizes = tails;
        if (threads > 1 || digest.on) sizes.push_back(140001);  // more than a chunk
        run_adamw(sizes, offset, threads);
        digest.print("adamw");
        run_shards(sizes, offset, threads);
        digest.print("shards");
        run_norm(sizes, offset, threads);
        digest.print("norm");
        run_quantize(sizes, offset, threads);
        digest.print("quantize");
        for (int64_t c : {1, 17, 40}) run_rows(65, c, offset, threads);
        digest.print("rows");
      }
#ifdef DRIVE_ATTENTION
      run_attention(threads);
      digest.print("attention");
#endif
    }
    if (!digest.on) std::printf("%s: done\n", name);
  }
  if (digest.on) return 0;
  for (int world : {2, 3}) {
    for (int64_t n : {1, 77, 3001}) run_shm(world, n);
  }
  std::printf("shm: done\n");
  return 0;
}
