#include "simd.h"

#include <atomic>
#include <stdexcept>

#include "checks.h"

namespace fastpar {
namespace {

const char* const kNames[] = {"baseline", "avx2", "avx512"};

bool supported(Isa isa) {
#if FASTPAR_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (isa == Isa::avx2) return avx2;
  if (isa == Isa::avx512) {
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  }
#endif
  return isa == Isa::baseline;
}

Isa best() {
  if (supported(Isa::avx512)) return Isa::avx512;
  return supported(Isa::avx2) ? Isa::avx2 : Isa::baseline;
}

std::atomic<Isa>& current() {
  static std::atomic<Isa> value{best()};
  return value;
}

Isa parse(const std::string& name) {
  for (int i = 0; i < 3; ++i) {
    if (name == kNames[i]) return static_cast<Isa>(i);
  }
  throw std::invalid_argument(concat(
      "set_isa: expected auto, baseline, avx2 or avx512, got isa=", name, "; correct FASTPAR_ISA"));
}

}  // namespace

Isa isa() { return current().load(std::memory_order_relaxed); }

std::string isa_name() { return kNames[static_cast<int>(isa())]; }

bool cpu_is_intel() {
#if FASTPAR_X86
  __builtin_cpu_init();
  return __builtin_cpu_is("intel");
#else
  return false;
#endif
}

bool isa_supported(const std::string& name) { return supported(parse(name)); }

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
