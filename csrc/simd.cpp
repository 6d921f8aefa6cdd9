#include "simd.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>

#include "checks.h"

#if FASTPAR_X86 && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace fastpar {
namespace {

const char* const kNames[] = {"baseline", "avx2", "avx512", "amx"};

// The processor's tiles and their bf16 products; Linux wants each process to request the registers.
bool find_amx() {
#if FASTPAR_AMX && defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  return (d & kBf16) && (d & kTile) && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

bool supported(Isa isa) {
#if FASTPAR_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (isa == Isa::avx2) return avx2;
  if (isa == Isa::amx) {
    static const bool amx = find_amx();
    return amx && supported(Isa::avx512);
  }
  if (isa == Isa::avx512) {
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
#endif
  return isa == Isa::baseline;
}

Isa best() {
  if (supported(Isa::amx)) return Isa::amx;
  if (supported(Isa::avx512)) return Isa::avx512;
  return supported(Isa::avx2) ? Isa::avx2 : Isa::baseline;
}

std::atomic<Isa>& current() {
  static std::atomic<Isa> value{best()};
  return value;
}

Isa parse(const std::string& name) {
  for (int i = 0; i < 4; ++i) {
    if (name == kNames[i]) return static_cast<Isa>(i);
  }
  throw std::invalid_argument(
      concat("set_isa: expected auto, baseline, avx2, avx512 or amx, got isa=", name,
             "; correct FASTPAR_ISA"));
}

}  // namespace

Isa isa() { return std::min(current().load(std::memory_order_relaxed), Isa::avx512); }

std::string isa_name() { return kNames[static_cast<int>(current().load())]; }

bool cpu_is_intel() {
#if FASTPAR_X86
  __builtin_cpu_init();
  return __builtin_cpu_is("intel");
#else
  return false;
#endif
}

bool isa_supported(const std::string& name) { return supported(parse(name)); }

bool has_fma() { return !FASTPAR_X86 || supported(Isa::avx2); }

void set_isa(const std::string& name) {
  const Isa wanted = name == "auto" ? best() : parse(name);
  if (!supported(wanted)) {
    throw std::runtime_error(
        concat("set_isa: expected an instruction set of this machine, got isa=", name,
               "; unset FASTPAR_ISA"));
  }
  current().store(wanted, std::memory_order_relaxed);
}

}  // namespace fastpar
