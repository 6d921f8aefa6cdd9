"""The emulator that runs CUDA sources on a CPU finds the mistakes it is there for, and the random
bits that kernels share are random."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from cells import sweep

ROOT = Path(__file__).resolve().parents[2]
SOURCE = r"""
#include <cstdio>

#include "cuda_launch.h"
#include "random.h"

namespace fastpar {

__global__ void reverse(const int* in, int* out) {  // through shared memory
  __shared__ int tile[64];
  const int t = threadIdx.x;
  tile[t] = in[blockIdx.x * 64 + t];
  __syncthreads();
  out[blockIdx.x * 64 + t] = tile[63 - t];
}

__global__ void block_sum(const int* in, int* out) {  // shuffles, then one atomic a warp
  int value = in[threadIdx.x];
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  const unsigned even = __ballot_sync(0xffffffffu, threadIdx.x % 2 == 0);
  if (threadIdx.x % 32 == 0) atomicAdd(out, even == 0x55555555u ? value : -1);
}

__global__ void some_wait() {
  if (threadIdx.x < 40) __syncthreads();
}

__global__ void half_a_warp() {
  if (threadIdx.x < 16) __shfl_sync(0xffffffffu, 1, 0);
}

__global__ void order(int* out) { out[gridDim.x - 1] = blockIdx.x; }

__global__ void read16(const char* p, Words16* out) { *out = load16(p); }

template <class Body>
const char* caught(Body body) {
  static std::string text;
  try {
    body();
    return "";
  } catch (const std::exception& error) {
    text = error.what();
    return text.c_str();
  }
}

}  // namespace fastpar

using namespace fastpar;
extern "C" {
void run_reverse(const int* in, int* out, int blocks) {
  launch(reverse, blocks, 64, nullptr, in, out);
}
void run_sum(const int* in, int* out) { launch(block_sum, 1, 256, nullptr, in, out); }
int last_block() {
  int out[5];
  launch(order, 5, 32, nullptr, &out[0]);
  return out[4];
}
const char* run_some_wait() { return caught([] { launch(some_wait, 1, 64, nullptr); }); }
const char* run_half_a_warp() { return caught([] { launch(half_a_warp, 1, 32, nullptr); }); }
const char* run_read16(const char* p) {
  Words16 out;
  return caught([&] { launch(read16, 1, 32, nullptr, p, &out); });
}
using u64 = unsigned long long;
void bits(u64 seed, u64 step, u64 first, u64 stride, int n, unsigned* out) {
  const uint64_t key = random_key(seed, step, 0);
  for (int i = 0; i < n; ++i) out[i] = random_bits(key, first + i * stride);
}
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        pytest.skip(f"needs a C++ compiler: no {compiler}")
    folder = tmp_path_factory.mktemp("emulator")
    (folder / "kernels.cpp").write_text(SOURCE)
    command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-DFASTPAR_EMULATED"]
    command += [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests/support'}"]
    command += [str(folder / "kernels.cpp"), "-o", str(folder / "kernels.so")]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    loaded = ctypes.CDLL(str(folder / "kernels.so"))
    for name in ("run_some_wait", "run_half_a_warp", "run_read16"):
        getattr(loaded, name).restype = ctypes.c_char_p
    return loaded


def pointer(x):
    return x.ctypes.data_as(ctypes.c_void_p)


@pytest.mark.slow
def test_the_emulator_runs_kernels_and_finds_their_mistakes(library):
    x, total = np.arange(256, dtype=np.int32), np.zeros(1, dtype=np.int32)
    y = np.zeros_like(x)
    library.run_reverse(pointer(x), pointer(y), 4)  # barriers and shared memory
    assert (y.reshape(4, 64) == x.reshape(4, 64)[:, ::-1]).all()
    library.run_sum(pointer(x), pointer(total))  # a warp's functions, atomics
    assert total[0] == x.sum()
    assert {library.last_block(), library.last_block()} == {0, 4}  # blocks run in both orders
    assert b"40 of 64 threads wait at a barrier for ever" in library.run_some_wait()
    assert b"16 of 32 threads wait" in library.run_half_a_warp()
    aligned = -(-x.ctypes.data // 16) * 16
    assert library.run_read16(ctypes.c_void_p(aligned)) == b""
    assert b"misaligned access of 16 bytes" in library.run_read16(ctypes.c_void_p(aligned + 4))


def draw(library, seed, step, first, n, stride=1):
    out = np.empty(n, dtype=np.uint32)
    words = [ctypes.c_ulonglong(word) for word in (seed, step, first, stride)]
    library.bits(*words, n, pointer(out))
    return out


@pytest.mark.slow
@sweep("first", [0, 2**32 - 2**19, 2**40])
def test_random_bits_are_uniform_and_unrelated(library, first):
    """Each statistic is normal with known variance; six deviations: below 1e-6 for all together."""
    n = 1 << 20
    a = draw(library, 1, 1, first, n)
    assert (draw(library, 1, 1, first + 2**19 - 100, 300) == a[2**19 - 100 :][:300]).all()
    related = {
        "next element": np.roll(a, 1),
        "next step": draw(library, 1, 2, first, n),
        "next seed": draw(library, 2, 1, first, n),
        **{f"element 2^{k} later": draw(library, 1, 1, first + 2**k, n) for k in (7, 20, 32, 40)},
    }
    ones = np.array([int(((a >> bit) & 1).sum()) for bit in range(32)])
    assert np.abs(ones - n / 2).max() < 6 * np.sqrt(n) / 2
    for name, b in related.items():
        for turned in (b, b >> 16 | b << 16):  # agree in half of the bits
            unlike = int(np.unpackbits((a ^ turned).view(np.uint8)).sum())
            assert abs(unlike - 16 * n) < 6 * np.sqrt(32 * n) / 2, name
    cells = np.bincount(a >> 22, minlength=1024)
    chi2 = ((cells - n / 1024) ** 2 / (n / 1024)).sum()
    assert abs(chi2 - 1023) < 6 * np.sqrt(2 * 1023)
