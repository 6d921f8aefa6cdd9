#ifdef __linux__
#include <sched.h>
#endif

#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "checks.h"
#include "ops.h"

namespace fastpar {

#ifdef __linux__

namespace {

// Frees itself; room for every CPU number the kernel may use.
struct CpuSet {
  explicit CpuSet(int cpus) : bytes(CPU_ALLOC_SIZE(cpus)), set(CPU_ALLOC(cpus)) {
    CPU_ZERO_S(bytes, set);
  }
  ~CpuSet() { CPU_FREE(set); }
  CpuSet(const CpuSet&) = delete;
  CpuSet& operator=(const CpuSet&) = delete;

  size_t bytes;
  cpu_set_t* set;
};

constexpr int kMostCpus = 8192;  // Linux's own limit (CONFIG_NR_CPUS)

}  // namespace

void bind_workers(const std::vector<int>& cpus, int threads) {
  std::vector<int> errors(threads, 0);
  // [Note: no races] Iteration i writes errors[i] alone; with as many iterations as threads and a
  // static schedule, each thread runs one.
#pragma omp parallel for schedule(static, 1) num_threads(threads)
  for (int i = 0; i < threads; ++i) {
    CpuSet wanted(kMostCpus);
    for (const int cpu : cpus) CPU_SET_S(cpu, wanted.bytes, wanted.set);
    if (sched_setaffinity(0, wanted.bytes, wanted.set) != 0) errors[i] = errno;
  }
  for (const int error : errors) {
    if (error != 0) {
      throw std::runtime_error(concat("bind_threads: expected CPUs that this process may use, got ",
                                      std::strerror(error), "; see numa_nodes()"));
    }
  }
}

std::vector<std::vector<int>> worker_cpus(int threads) {
  std::vector<std::vector<int>> found(threads);
#pragma omp parallel for schedule(static, 1) num_threads(threads)
  for (int i = 0; i < threads; ++i) {
    CpuSet allowed(kMostCpus);
    if (sched_getaffinity(0, allowed.bytes, allowed.set) != 0) continue;
    for (int cpu = 0; cpu < kMostCpus; ++cpu) {
      if (CPU_ISSET_S(cpu, allowed.bytes, allowed.set)) found[i].push_back(cpu);
    }
  }
  return found;
}

#else

void bind_workers(const std::vector<int>&, int) {
  throw std::runtime_error(
      "bind_threads: expected Linux, got another system; leave the placement of threads to it");
}

std::vector<std::vector<int>> worker_cpus(int threads) {
  return std::vector<std::vector<int>>(threads);
}

#endif

}  // namespace fastpar
