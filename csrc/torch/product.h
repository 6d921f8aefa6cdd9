// Matrix products of the ops, outside of autograd: kernels/linear/__init__.py says whose they are.
#pragma once

#include "node.h"

namespace fastpar::nodes {

// Whether an [M, K] @ [K, N] product is our own: use_gemm() of kernels/linear.
bool use_gemm(at::ScalarType type, int64_t m, int64_t n, int64_t k, bool turned);

// a [M, K] @ b [K, N] + bias [N], any strides, in out (rows contiguous) unless that is undefined.
Tensor product(const Tensor& a, const Tensor& b, Tensor out = {}, const Maybe& bias = {});
// out += a @ b.
void add_product(Tensor& out, const Tensor& a, const Tensor& b);
// sum + a @ b in fp32, in place; an undefined sum is 0.
void accumulate(Tensor& sum, const Tensor& a, const Tensor& b);

// [rows, columns] of like's dtype: the same memory in every call of this thread.
Tensor workspace(int64_t rows, int64_t columns, const Tensor& like);

}  // namespace fastpar::nodes
