// A CUDA driver that launches nothing and remembers what the last launch was given; the tests of
// csrc/bindings_launch.cpp read it (tests/support/fake_cuda.py).
#include <string.h>

long context = 1;                  // of every thread
long result;                       // what launches return
long launches, direct;             // direct: not by cuLaunchKernelEx, as Triton launches
long function, stream;             // of the last launch
unsigned shape[7];                 // its grid, threads and bytes of shared memory
unsigned sizes[128], count;        // of the parameters that a launch gets
unsigned char parameters[1 << 14];

int cuCtxGetCurrent(long *out) { return *out = context, 0; }

int cuGetErrorName(int error, const char **name) { return *name = "CUDA_ERROR_OF_A_TEST", 0; }

static void remember(void **params) {
  unsigned char *to = parameters;
  for (unsigned i = 0; i < count; to += sizes[i++]) memcpy(to, params[i], sizes[i]);
  ++launches;
}

int cuLaunchKernel(long f, unsigned gx, unsigned gy, unsigned gz, unsigned x, unsigned y,
                   unsigned z, unsigned shared, long on, void **params, void **extra) {
  unsigned given[7] = {gx, gy, gz, x, y, z, shared};
  memcpy(shape, given, sizeof(given));
  function = f, stream = on;
  ++direct;
  remember(params);
  return extra == 0 ? (int)result : 1;
}

struct Config {  // CUlaunchConfig
  unsigned shape[7];
  long stream;
  void *attributes;
  unsigned count;
};

int cuLaunchKernelEx(const struct Config *config, long f, void **params, void **extra) {
  memcpy(shape, config->shape, sizeof(shape));
  function = f, stream = config->stream;
  remember(params);
  return extra == 0 && config->count == 0 ? 0 : 1;
}

int cuTensorMapEncodeTiled(void *map, int type, unsigned rank, void *address, const long *dims,
                           const long *strides, const unsigned *box, const unsigned *steps,
                           int interleave, int swizzle, int promotion, int fill) {
  int numbers[6] = {type, (int)rank, interleave, swizzle, promotion, fill};
  unsigned char *to = map;
  memset(map, 0, 128);
  memcpy(to, numbers, 24), to += 24;
  memcpy(to, &address, 8), to += 8;
  memcpy(to, dims, 8 * rank), to += 8 * rank;
  memcpy(to, strides, 8 * (rank - 1)), to += 8 * (rank - 1);
  memcpy(to, box, 4 * rank), to += 4 * rank;
  for (unsigned i = 0; i < rank; ++i) *to++ = (unsigned char)steps[i];
  return (int)result == 2 ? 2 : 0;
}
