// Ranks as threads on one block, for ThreadSanitizer: every collective, in and out of the heap,
// many rounds. Compiled and run by test_shm.py. Exit code 1: a wrong sum.
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "../../csrc/shm.h"

using fastpar::ShmGroup;
using fastpar::ShmType;

namespace {

constexpr int kWorld = 3;
constexpr int64_t kChunk = 4096, kHeap = 1 << 20, kSize = 30000;  // 10 rounds of a chunk each

void rank_main(char* block, int rank, bool* wrong) {
  ShmGroup group(block, rank, kWorld, kChunk, kHeap, std::vector<int>(kWorld, -1), 60.0);
  std::vector<float> own(kSize), gathered(kSize * kWorld);
  const auto check = [&](bool right) { *wrong |= !right; };
  for (int i = 0; i < 8; ++i) {
    float* x = i % 2 ? own.data() : reinterpret_cast<float*>(group.heap());
    for (int64_t j = 0; j < kSize; ++j) x[j] = float(rank + i);
    group.all_reduce(x, kSize, ShmType::float32, false, i);
    for (int64_t j = 0; j < kSize; ++j) check(x[j] == 3.0f * i + 3);
    const int64_t part = kSize / kWorld;
    for (int64_t j = 0; j < kSize; ++j) x[j] = float(rank);
    group.reduce_scatter(x + rank * part, x, part, ShmType::float32, false, false, i);
    group.all_gather(x, x + rank * part, part, {"float32", 4}, i);
    for (int64_t j = 0; j < kSize; ++j) check(x[j] == 3.0f);
    for (int64_t j = 0; j < kSize; ++j) x[j] = float(rank);
    group.broadcast(x, kSize, {"float32", 4}, i % kWorld, i);
    for (int64_t j = 0; j < kSize; ++j) check(x[j] == float(i % kWorld));
    for (int64_t j = 0; j < kSize; ++j) x[j] = -1.0f;  // nobody may still be reading it
    group.all_gather(gathered.data(), x, kSize, {"float32", 4}, i);
    group.barrier(i);
  }
}

}  // namespace

int main() {
  const int64_t bytes = ShmGroup::block_bytes(kWorld, kChunk, kHeap);
  char* block = static_cast<char*>(std::aligned_alloc(4096, bytes));
  for (int64_t i = 0; i < bytes; ++i) block[i] = 0;
  bool wrong[kWorld] = {};
  std::vector<std::thread> ranks;
  for (int r = 0; r < kWorld; ++r) ranks.emplace_back(rank_main, block, r, &wrong[r]);
  for (auto& rank : ranks) rank.join();
  std::free(block);
  for (bool w : wrong) {
    if (w) return 1;
  }
  std::puts("right");
  return 0;
}
