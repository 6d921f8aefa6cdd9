// Collectives of ranks that share one block of memory.
//
// [Note: rounds]
// A collective is cut into rounds of one chunk per peer. In a round each rank copies the parts that
// the others need into its staging area, advances its counter, waits until every counter has the
// same value, and reads its parts from the others' areas. A chunk is small enough to be read from
// the last-level cache, so each tensor passes through main memory about once. Rounds alternate
// between two staging areas: a rank overwrites in round r + 2 what was read in round r, and every
// rank had finished round r when it advanced its counter in r + 1 (test_many_rounds). All-reduce
// adds a second exchange to each round, of the sums.
//
// [Note: waiting]
// There may be more ranks than cores. A waiting rank spins for some microseconds, then sleeps on
// the peer's counter (futex), and checks every kSliceNs whether each rank is alive: the descriptor
// of a process (pidfd) becomes readable when the process ends. It checks all ranks, because the
// peer may itself be waiting for a dead one. A rank that gives up records the reason and the rank
// that caused it, so that all survivors name the same rank.
#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstring>

#include "checks.h"
#include "shm.h"
#include "sum_tree.h"

namespace fastpar {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kSpins = 4000;              // some 20 us
constexpr int64_t kSliceNs = 50'000'000;  // between two looks at a peer
constexpr int64_t kPage = 4096;

// Why a rank gave up: the low byte of Control::failed. The other bytes are the rank that caused it.
constexpr uint32_t kError = 1;
constexpr uint32_t kEnded = 2;
constexpr uint32_t kSilent = 3;
constexpr uint32_t kLeft = 4;

const char* name_of(ShmType type) {
  constexpr const char* kNames[] = {"float32", "bfloat16", "float16", "float64", "int64"};
  return kNames[static_cast<int>(type)];
}

// out[i] = the tree over ranks of from[r][i], divided by `divisor`, rounded once.
template <class T, class Out>
struct SumOverRanks {
  static FASTPAR_INLINE void run(const T* const* from, int world, Out* out, int64_t n,
                                 int divisor) {
    using S = typename Sum<T>::Type;
    SumTree<T> tree;
    for (int64_t first = 0; first < n; first += tree.kTile) {
      const int64_t size = std::min(tree.kTile, n - first);
      tree.add_up(from, world, first, size);
      S* sum = tree.levels[0];
      if (divisor != 1) {
        for (int64_t i = 0; i < size; ++i) sum[i] /= static_cast<S>(divisor);
      }
      for (int64_t i = 0; i < size; ++i) out[first + i] = Sum<Out>::narrow(sum[i]);
    }
  }
};

template <class Body>
void with_type(ShmType type, Body body) {
  switch (type) {
    case ShmType::float32:
      return body(float{});
    case ShmType::bfloat16:
      return body(BFloat16{});
    case ShmType::float16:
      return body(Float16{});
    case ShmType::float64:
      return body(double{});
    case ShmType::int64:
      return body(int64_t{});
  }
}

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

void wake(std::atomic<uint32_t>* counter) {
  syscall(SYS_futex, counter, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void pause_cpu() {
#if FASTPAR_X86
  __builtin_ia32_pause();
#endif
}

}  // namespace

// What a rank tells the others about the collective that it has entered.
struct ShmGroup::Record {
  uint64_t call;
  int64_t size, tag;
  int64_t place;  // in the heap, doubled, plus one for a call in place; -1 outside
  int detail;
  char name[16], element[20];
};

struct ShmGroup::Control {
  alignas(64) std::atomic<uint32_t> counter;
  std::atomic<uint32_t> sleepers;
  alignas(64) std::atomic<uint32_t> failed;
  Record records[2];  // of calls with even and odd number
};

int64_t ShmGroup::block_bytes(int world, int64_t chunk_bytes, int64_t heap_bytes) {
  const int64_t controls = round_up(world * int64_t(sizeof(Control)), kPage);
  const int64_t areas = int64_t(world) * 2 * (world + 1) * chunk_bytes;
  return controls + areas + world * round_up(heap_bytes, kPage);
}

ShmGroup::ShmGroup(void* block, int rank, int world, int64_t chunk_bytes, int64_t heap_bytes,
                   std::vector<int> pidfds, double timeout_s)
    : block_(static_cast<char*>(block)),
      rank_(rank),
      world_(world),
      chunk_bytes_(chunk_bytes),
      heap_bytes_(round_up(heap_bytes, kPage)),
      pidfds_(std::move(pidfds)),
      timeout_s_(timeout_s) {
  FASTPAR_CHECK(chunk_bytes > 0 && chunk_bytes % kPage == 0, "ShmGroup: expected whole pages of ",
                kPage, " bytes, got chunk_bytes=", chunk_bytes, "; round it up");
  FASTPAR_CHECK(static_cast<int>(pidfds_.size()) == world, "ShmGroup: expected ", world,
                " descriptors, got ", pidfds_.size(), "; pass -1 for none");
}

ShmGroup::Control& ShmGroup::control(int rank) const {
  return reinterpret_cast<Control*>(block_)[rank];
}

char* ShmGroup::staging(int rank, int slot) const {
  const int64_t controls = round_up(world_ * int64_t(sizeof(Control)), kPage);
  const int64_t index = (int64_t(rank) * 2 + parity_) * (world_ + 1) + slot;
  return block_ + controls + index * chunk_bytes_;
}

char* ShmGroup::heap_of(int rank) const {
  return block_ + block_bytes(world_, chunk_bytes_, 0) + rank * heap_bytes_;
}

char* ShmGroup::heap() const { return heap_of(rank_); }

void ShmGroup::fail(const std::string& why, uint32_t kind, int culprit) {
  broken_ = why;
  uint32_t none = 0;
  const uint32_t word = static_cast<uint32_t>(culprit) << 8 | kind;
  control(rank_).failed.compare_exchange_strong(none, word);
  wake(&control(rank_).counter);
  throw std::runtime_error(why);
}

void ShmGroup::stop() {
  stopped_.store(true);
  uint32_t none = 0;
  control(rank_).failed.compare_exchange_strong(none, static_cast<uint32_t>(rank_) << 8 | kLeft);
  for (int r = 0; r < world_; ++r) wake(&control(r).counter);  // this rank sleeps on a peer's
}

bool ShmGroup::behind(int peer) const {
  const uint32_t seen = control(peer).counter.load(std::memory_order_acquire);
  return static_cast<int32_t>(seen - counter_) < 0;
}

// Throws if `peer` will never reach this rank's counter. The peer's counter is read last: a peer
// that advanced it and then ended has not failed.
void ShmGroup::look_at(int peer) {
  const uint32_t word = control(peer).failed.load();
  pollfd process = {pidfds_[peer], POLLIN, 0};
  const bool ended = pidfds_[peer] >= 0 && poll(&process, 1, 0) == 1;
  if ((!word && !ended) || !behind(peer)) return;
  const uint32_t kind = word ? word & 255 : kEnded;
  const int culprit = word ? static_cast<int>(word >> 8) : peer;
  const char* advice = "; restart the run from its last checkpoint";
  if (kind == kEnded) {
    fail(concat(call_, ": the process of rank ", culprit, " ended", advice), kind, culprit);
  }
  if (kind == kLeft) {
    fail(concat(call_, ": rank ", culprit, " closed its group", advice), kind, culprit);
  }
  if (kind == kSilent) {
    fail(concat(call_, ": rank ", peer, " gave up waiting for rank ", culprit, advice), kind,
         culprit);
  }
  fail(concat(call_, ": rank ", peer, " failed; its own message says why"), kind, peer);
}

void ShmGroup::wait_for(int peer) {
  for (int spin = 0; spin < kSpins; ++spin) {
    if (!behind(peer)) return;
    pause_cpu();
  }
  Control& at = control(peer);
  const auto start = Clock::now();
  while (true) {
    at.sleepers.fetch_add(1);
    const uint32_t seen = at.counter.load();
    if (behind(peer) && !at.failed.load() && !stopped_.load()) {
      const timespec slice = {0, kSliceNs};
      syscall(SYS_futex, &at.counter, FUTEX_WAIT, seen, &slice, nullptr, 0);
    }
    at.sleepers.fetch_sub(1);
    if (!behind(peer)) return;
    if (stopped_.load()) {
      fail(concat(call_, ": the group was closed during the operation; wait for its handle first"),
           kLeft, rank_);
    }
    for (int r = 0; r < world_; ++r) {
      if (r != rank_) look_at(r);
    }
    const double waited = std::chrono::duration<double>(Clock::now() - start).count();
    if (waited > timeout_s_) {
      fail(concat(call_, ": rank ", peer, " did not arrive within timeout_s=", timeout_s_,
                  "; restart the run from its last checkpoint"),
           kSilent, peer);
    }
  }
}

void ShmGroup::exchange() {
  Control& mine = control(rank_);
  mine.counter.store(++counter_);
  if (mine.sleepers.load() > 0) wake(&mine.counter);
  for (int peer = 0; peer < world_; ++peer) {
    if (peer != rank_) wait_for(peer);
  }
}

// Enters a collective; throws unless every rank has called the same one. Returns whether x has the
// same place in every rank's heap: then the others may read it there.
bool ShmGroup::begin(const char* name, int64_t size, const char* element, int detail, int64_t tag,
                     const void* x, bool in_place) {
  call_ = concat("ShmCollectives.", name);
  if (!broken_.empty()) {
    throw std::runtime_error(
        concat(call_, ": the group has failed before (", broken_, "); make a new one"));
  }
  if (stopped_.load()) {
    throw std::runtime_error(concat(call_, ": the group was closed; make a new one"));
  }
  const char* address = static_cast<const char*>(x);
  const bool mine_in_heap = address >= heap() && address < heap() + heap_bytes_;
  const int64_t place = mine_in_heap ? (address - heap()) * 2 + in_place : -1;
  Record mine = {++calls_, size, tag, place, detail, {}, {}};
  std::strncpy(mine.name, name, sizeof(mine.name) - 1);
  std::strncpy(mine.element, element, sizeof(mine.element) - 1);
  control(rank_).records[calls_ % 2] = mine;
  exchange();
  bool in_heap = mine_in_heap;
  for (int peer = 0; peer < world_; ++peer) {
    const Record& theirs = control(peer).records[calls_ % 2];
    const auto show = [](const Record& r) {
      return concat(r.name, " of ", r.size, " elements (", r.element, ", option ", r.detail,
                    ", tag ", r.tag, ")");
    };
    if (theirs.call != mine.call || theirs.size != size || theirs.tag != tag ||
        theirs.detail != detail || std::strcmp(theirs.name, mine.name) != 0 ||
        std::strcmp(theirs.element, mine.element) != 0) {
      fail(concat(call_, ": expected the same call on every rank, got ", show(mine), " on rank ",
                  rank_, " and ", show(theirs), " on rank ", peer,
                  "; give every rank the same calls in the same order"),
           kError, rank_);
    }
    in_heap = in_heap && theirs.place == mine.place;
  }
  return in_heap;
}

template <class T>
void ShmGroup::all_reduce_of(T* x, int64_t n, bool mean, bool in_heap) {
  const Isa target = isa();
  const int divisor = mean ? world_ : 1;
  std::vector<const T*> from(world_);
  if (in_heap) {
    // Each rank sums one part of the tensor in place, then copies the others' parts.
    const int64_t part = round_up((n + world_ - 1) / world_, 64);
    const auto begin = [&](int r) { return std::min(n, r * part); };
    const auto theirs = [&](int r) {
      return reinterpret_cast<T*>(heap_of(r) + (reinterpret_cast<char*>(x) - heap()));
    };
    for (int r = 0; r < world_; ++r) from[r] = theirs(r) + begin(rank_);
    dispatch<SumOverRanks<T, T>>(target, from.data(), world_, x + begin(rank_),
                                 begin(rank_ + 1) - begin(rank_), divisor);
    exchange();
    for (int r = 0; r < world_; ++r) {
      if (r != rank_) {
        std::memcpy(x + begin(r), theirs(r) + begin(r), (begin(r + 1) - begin(r)) * sizeof(T));
      }
    }
    exchange();  // nobody reads x any more
    return;
  }
  const int64_t most = chunk_bytes_ / int64_t(sizeof(T));
  for (int64_t start = 0; start < n;) {
    const int64_t chunk = std::min(most, round_up((n - start + world_ - 1) / world_, 64));
    const auto begin = [&](int r) { return std::min(n, start + r * chunk); };
    const auto size = [&](int r) { return begin(r + 1) - begin(r); };
    parity_ ^= 1;
    for (int r = 0; r < world_; ++r) {
      if (r != rank_) std::memcpy(staging(rank_, r), x + begin(r), size(r) * sizeof(T));
    }
    exchange();
    for (int r = 0; r < world_; ++r) {
      from[r] = r == rank_ ? x + begin(r) : reinterpret_cast<const T*>(staging(r, rank_));
    }
    T* sum = reinterpret_cast<T*>(staging(rank_, world_));
    dispatch<SumOverRanks<T, T>>(target, from.data(), world_, sum, size(rank_), divisor);
    exchange();
    for (int r = 0; r < world_; ++r) {
      std::memcpy(x + begin(r), staging(r, world_), size(r) * sizeof(T));
    }
    start = begin(world_);
  }
}

template <class T, class Out>
void ShmGroup::reduce_scatter_of(Out* out, T* x, int64_t n, bool mean, bool in_heap) {
  const Isa target = isa();
  const int divisor = mean ? world_ : 1;
  std::vector<const T*> from(world_);
  if (in_heap) {
    for (int r = 0; r < world_; ++r) {
      from[r] =
          reinterpret_cast<T*>(heap_of(r) + (reinterpret_cast<char*>(x) - heap())) + rank_ * n;
    }
    dispatch<SumOverRanks<T, Out>>(target, from.data(), world_, out, n, divisor);
    exchange();
    return;
  }
  const int64_t most = chunk_bytes_ / int64_t(sizeof(T));
  for (int64_t start = 0; start < n; start += most) {
    const int64_t size = std::min(most, n - start);
    parity_ ^= 1;
    for (int r = 0; r < world_; ++r) {
      if (r != rank_) std::memcpy(staging(rank_, r), x + r * n + start, size * sizeof(T));
    }
    exchange();
    for (int r = 0; r < world_; ++r) {
      from[r] = r == rank_ ? x + r * n + start : reinterpret_cast<const T*>(staging(r, rank_));
    }
    dispatch<SumOverRanks<T, Out>>(target, from.data(), world_, out + start, size, divisor);
  }
}

void ShmGroup::all_reduce(void* x, int64_t n, ShmType type, bool mean, int64_t tag) {
  const bool in_heap = begin("all_reduce", n, name_of(type), mean, tag, x);
  with_type(type, [&](auto t) { all_reduce_of(static_cast<decltype(t)*>(x), n, mean, in_heap); });
}

void ShmGroup::reduce_scatter(void* out, void* x, int64_t n, ShmType type, bool mean, bool widened,
                              int64_t tag) {
  const std::string element = widened ? concat(name_of(type), " to float32") : name_of(type);
  const bool in_heap = begin("reduce_scatter", n, element.c_str(), mean, tag, x);
  with_type(type, [&](auto t) {
    using T = decltype(t);
    if constexpr (sizeof(T) == 2) {
      if (widened) {
        return reduce_scatter_of(static_cast<float*>(out), static_cast<T*>(x), n, mean, in_heap);
      }
    }
    reduce_scatter_of(static_cast<T*>(out), static_cast<T*>(x), n, mean, in_heap);
  });
}

void ShmGroup::all_gather(void* out, const void* x, int64_t n, ShmElement element, int64_t tag) {
  char* to = static_cast<char*>(out);
  const char* mine = static_cast<const char*>(x);
  const int64_t bytes = n * element.bytes;
  const bool in_place = mine == to + rank_ * bytes;
  // Without staging if the others can read this rank's part in its place: within out, or at the
  // same place of every heap.
  const char* read = in_place ? to : mine;
  if (begin("all_gather", n, element.name, 0, tag, read, in_place)) {
    if (!in_place) std::memcpy(to + rank_ * bytes, mine, bytes);
    for (int r = 0; r < world_; ++r) {
      const char* theirs = heap_of(r) + (read - heap()) + (in_place ? r * bytes : 0);
      if (r != rank_) std::memcpy(to + r * bytes, theirs, bytes);
    }
    exchange();  // nobody reads this rank's part any more
    return;
  }
  const int64_t most = chunk_bytes_ * (world_ + 1);  // all slots of an area
  for (int64_t start = 0; start < bytes; start += most) {
    const int64_t size = std::min(most, bytes - start);
    parity_ ^= 1;
    std::memcpy(staging(rank_, 0), mine + start, size);
    if (!in_place)
      std::memcpy(to + rank_ * bytes + start, mine + start, size);  // still in the cache
    exchange();
    for (int r = 0; r < world_; ++r) {
      if (r != rank_) std::memcpy(to + r * bytes + start, staging(r, 0), size);
    }
  }
}

void ShmGroup::broadcast(void* x, int64_t n, ShmElement element, int source, int64_t tag) {
  const bool in_heap = begin("broadcast", n, element.name, source, tag, x);
  char* to = static_cast<char*>(x);
  const int64_t bytes = n * element.bytes;
  if (in_heap) {
    if (rank_ != source) std::memcpy(to, heap_of(source) + (to - heap()), bytes);
    exchange();  // nobody reads the source's x any more
    return;
  }
  const int64_t most = chunk_bytes_ * (world_ + 1);  // all slots of an area
  for (int64_t start = 0; start < bytes; start += most) {
    const int64_t size = std::min(most, bytes - start);
    parity_ ^= 1;
    if (rank_ == source) std::memcpy(staging(rank_, 0), to + start, size);
    exchange();
    if (rank_ != source) std::memcpy(to + start, staging(source, 0), size);
  }
}

void ShmGroup::barrier(int64_t tag) { begin("barrier", 0, "none", 0, tag, nullptr); }

}  // namespace fastpar
