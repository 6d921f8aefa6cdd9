// Collectives of ranks on one host over shared memory; see shm_cpu.cpp.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace fastpar {

enum class ShmType : int { float32 = 0, bfloat16 = 1, float16 = 2, float64 = 3, int64 = 4 };

// An element that is moved and not added; the name is what the ranks compare.
struct ShmElement {
  const char* name;
  int64_t bytes;
};

// One rank's view of a block of memory that all ranks map. The block begins zeroed. Every rank
// calls the same collectives in the same order, one at a time. Sums are trees in rank order
// (sum_tree.h), 16-bit types are added in float and rounded once, mean divides the sum; so every
// rank gets the same bits, whatever the chunks. `tag` names a call: ranks that pass unlike tags are
// out of step, which is an error on each of them. A call that fails leaves the group broken: every
// later call throws.
class ShmGroup {
 public:
  // Bytes of the block for `world` ranks, each with a heap of heap_bytes.
  static int64_t block_bytes(int world, int64_t chunk_bytes, int64_t heap_bytes);

  // pidfds[r]: descriptor of rank r's process, -1 where there is none to watch.
  ShmGroup(void* block, int rank, int world, int64_t chunk_bytes, int64_t heap_bytes,
           std::vector<int> pidfds, double timeout_s);

  // x[n] = the sum or mean over ranks.
  void all_reduce(void* x, int64_t n, ShmType type, bool mean, int64_t tag);
  // out[n] = the sum or mean over ranks of x[rank * n : (rank + 1) * n]; out may be that slice.
  // widened: out is float32 of a 16-bit x, and nothing is rounded to 16 bits.
  void reduce_scatter(void* out, void* x, int64_t n, ShmType type, bool mean, bool widened,
                      int64_t tag);
  // out[r * n : (r + 1) * n] = rank r's x; x may be its slice of out.
  void all_gather(void* out, const void* x, int64_t n, ShmElement element, int64_t tag);
  // x[n] = that of rank `source`.
  void broadcast(void* x, int64_t n, ShmElement element, int source, int64_t tag);
  void barrier(int64_t tag);

  // The one call for another thread than that of the collectives: this rank leaves. A collective
  // under way on this rank fails, and so do those of the others that need this rank.
  void stop();

  int world() const { return world_; }

  // This rank's heap: tensors at the same place in the heap of every rank are exchanged without a
  // copy in or out.
  char* heap() const;

 private:
  struct Control;
  struct Record;

  Control& control(int rank) const;
  char* staging(int rank, int slot) const;
  char* heap_of(int rank) const;
  bool begin(const char* name, int64_t size, const char* element, int detail, int64_t tag,
             const void* x, bool in_place = false);
  void exchange();
  void wait_for(int peer);
  bool behind(int peer) const;
  void look_at(int peer);
  [[noreturn]] void fail(const std::string& why, uint32_t kind, int culprit);
  template <class T>
  void all_reduce_of(T* x, int64_t n, bool mean, bool in_heap);
  template <class T, class Out>
  void reduce_scatter_of(Out* out, T* x, int64_t n, bool mean, bool in_heap);

  char* block_;
  int rank_, world_;
  int64_t chunk_bytes_, heap_bytes_;
  std::vector<int> pidfds_;
  double timeout_s_;
  uint32_t counter_ = 0;  // the value of this rank's counter
  uint64_t calls_ = 0;
  int parity_ = 0;
  std::atomic<bool> stopped_{false};
  std::string broken_;
  std::string call_;  // for messages
};

}  // namespace fastpar
