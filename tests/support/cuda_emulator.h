// CUDA's words on a CPU, for tests: the source of a *_cuda.cu file compiled as C++ runs here.
// See csrc/cuda_launch.h [Note: CUDA without a GPU].
//
// A block's threads are fibers of one OS thread that take turns at barriers and warp functions;
// blocks run one after another, in an order that is reversed in every other launch, so that a
// kernel which relies on order is found out. A barrier that some threads never reach, a warp
// function without all of its lanes and a misaligned 16-byte access are exceptions.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __grid_constant__
#define __constant__ static
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

struct EmulatedIndex {
  unsigned x = 0, y = 0, z = 0;
};
inline EmulatedIndex threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

inline void check_aligned(const void* p, unsigned bytes) {
  if (reinterpret_cast<std::uintptr_t>(p) % bytes) {
    throw std::logic_error("cuda emulator: misaligned access of " + std::to_string(bytes) +
                           " bytes");
  }
}

constexpr unsigned kLanes = 32;
constexpr std::size_t kStack = 1 << 17;

// Threads that wait for each other: a block or a warp.
struct Meeting {
  unsigned members = 0, arrived = 0;
  std::uint64_t round = 0;
};

class Block {
 public:
  explicit Block(unsigned threads)
      : threads_(threads), fibers_(threads), stacks_(threads), done_(threads), words_(threads),
        warps_((threads + kLanes - 1) / kLanes) {
    for (auto& stack : stacks_) stack.reset(new char[kStack]);
  }

  void run(const std::function<void()>& body) {
    body_ = &body;
    error_ = nullptr;
    all_ = {threads_, 0, 0};
    for (unsigned w = 0; w < warps_.size(); ++w) {
      warps_[w] = {std::min(kLanes, threads_ - w * kLanes), 0, 0};
    }
    std::fill(done_.begin(), done_.end(), false);
    for (unsigned t = 0; t < threads_; ++t) {
      getcontext(&fibers_[t]);
      fibers_[t].uc_stack.ss_sp = stacks_[t].get();
      fibers_[t].uc_stack.ss_size = kStack;
      fibers_[t].uc_link = &scheduler_;
      makecontext(&fibers_[t], reinterpret_cast<void (*)()>(&Block::enter), 0);
    }
    unsigned left = threads_;
    while (left > 0) {
      progress_ = false;
      for (unsigned t = 0; t < threads_; ++t) {
        if (done_[t]) continue;
        current_ = t;
        threadIdx.x = t;
        swapcontext(&scheduler_, &fibers_[t]);
        if (error_) std::rethrow_exception(error_);
        if (done_[t]) {
          --left;
          progress_ = true;
        }
      }
      if (!progress_ && left > 0) {
        throw std::logic_error("cuda emulator: " + std::to_string(left) + " of " +
                               std::to_string(threads_) + " threads wait at a barrier for ever");
      }
    }
  }

  void barrier() { meet(all_); }

  // Every lane's word, taken when all lanes have given theirs.
  template <class Pick>
  std::uint64_t exchange(unsigned mask, std::uint64_t word, Pick pick) {
    Meeting& warp = warps_[current_ / kLanes];
    if (mask != 0xffffffffu || warp.members != kLanes) {
      throw std::logic_error("cuda emulator: a warp function needs all 32 lanes");
    }
    words_[current_] = word;
    meet(warp);
    const std::uint64_t result = pick(&words_[current_ / kLanes * kLanes], current_ % kLanes);
    meet(warp);
    return result;
  }

  static Block*& active() {
    static Block* block = nullptr;
    return block;
  }

 private:
  static void enter() {
    Block* self = active();
    try {
      (*self->body_)();
    } catch (...) {
      self->error_ = std::current_exception();
    }
    self->done_[self->current_] = true;
  }

  void meet(Meeting& at) {
    const std::uint64_t round = at.round;
    progress_ = true;
    if (++at.arrived == at.members) {
      at.arrived = 0;
      ++at.round;
      return;
    }
    const unsigned me = current_;
    while (at.round == round) {
      swapcontext(&fibers_[me], &scheduler_);
    }
  }

  unsigned threads_, current_ = 0;
  bool progress_ = false;
  std::vector<ucontext_t> fibers_;
  ucontext_t scheduler_;
  std::vector<std::unique_ptr<char[]>> stacks_;
  std::vector<bool> done_;
  std::vector<std::uint64_t> words_;
  std::vector<Meeting> warps_;
  Meeting all_;
  const std::function<void()>* body_ = nullptr;
  std::exception_ptr error_;
};

inline std::int64_t& launches() {
  static std::int64_t count = 0;
  return count;
}

inline void run(std::int64_t blocks, int threads, const std::function<void()>& body) {
  static std::mutex one_launch_at_a_time;
  const std::lock_guard<std::mutex> lock(one_launch_at_a_time);
  Block block(static_cast<unsigned>(threads));
  Block::active() = &block;
  blockDim.x = static_cast<unsigned>(threads);
  gridDim.x = static_cast<unsigned>(blocks);
  const bool backward = launches()++ % 2;
  for (std::int64_t b = 0; b < blocks; ++b) {
    blockIdx.x = static_cast<unsigned>(backward ? blocks - 1 - b : b);
    block.run(body);
  }
}

template <class T>
std::uint64_t to_word(T value) {
  static_assert(sizeof(T) <= 8, "a warp function moves at most 8 bytes");
  std::uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(T));
  return word;
}

template <class T>
T from_word(std::uint64_t word) {
  T value;
  std::memcpy(&value, &word, sizeof(T));
  return value;
}

}  // namespace emulator

inline void __syncthreads() { emulator::Block::active()->barrier(); }

inline void __syncwarp(unsigned mask = 0xffffffffu) {
  emulator::Block::active()->exchange(mask, 0, [](const std::uint64_t*, unsigned) { return 0; });
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  return emulator::from_word<T>(emulator::Block::active()->exchange(
      mask, emulator::to_word(value),
      [&](const std::uint64_t* words, unsigned lane) { return words[lane ^ unsigned(lanes)]; }));
}

template <class T>
T __shfl_sync(unsigned mask, T value, int source) {
  return emulator::from_word<T>(emulator::Block::active()->exchange(
      mask, emulator::to_word(value),
      [&](const std::uint64_t* words, unsigned) { return words[unsigned(source) % 32]; }));
}

inline unsigned __reduce_max_sync(unsigned mask, unsigned value) {
  return unsigned(emulator::Block::active()->exchange(
      mask, value, [](const std::uint64_t* words, unsigned) {
        return *std::max_element(words, words + emulator::kLanes);
      }));
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return unsigned(emulator::Block::active()->exchange(
      mask, predicate != 0, [](const std::uint64_t* words, unsigned) {
        std::uint64_t bits = 0;
        for (unsigned l = 0; l < emulator::kLanes; ++l) bits |= words[l] << l;
        return bits;
      }));
}

inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }

// Fibers switch only at barriers and warp functions: plain operations are atomic.
template <class T>
T atomicAdd(T* address, T value) {
  const T old = *address;
  *address = old + value;
  return old;
}

template <class T>
T atomicOr(T* address, T value) {
  const T old = *address;
  *address = old | value;
  return old;
}

template <class T>
T atomicMax(T* address, T value) {
  const T old = *address;
  *address = std::max(old, value);
  return old;
}

inline void __threadfence() {}
