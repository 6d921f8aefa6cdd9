// A tensor of a list, as csrc/torch/lists.cpp reads it and the bindings get it: reading 600 tensors
// through Python's attributes takes 200 us, as long as a step of small ones.
#pragma once

#include <cstdint>

namespace fastpar {

// dtypes of tensors; the first three are those of Dtype.
enum class Type : int { f32, bf16, f16, f64, i64, i32, i16, i8, u8, boolean, e4m3, e5m2, other };
constexpr int kTypes = static_cast<int>(Type::other);

struct Listed {
  std::uintptr_t address;
  int64_t numel, type;  // a Type
  int64_t device;       // 0: the CPU; others have one number each
  int64_t in_memory;    // its values are those at its address
  int64_t contiguous;
  int64_t dense;           // its elements fill one block of memory, in any order
  int64_t shape, strides;  // hashes
};
constexpr int64_t kListed = sizeof(Listed) / sizeof(int64_t);

}  // namespace fastpar
