// A CUDA driver that launches nothing and writes down what it was given; tests/support/fake_cuda.py
// reads it. A function's handle is the address of its parameters' number and sizes in bytes.
#include <string.h>

long context = 1;   // of every thread
long result;        // what launches return
long used, direct;  // bytes of `written`; launches not by Triton
unsigned char written[1 << 20];

int cuCtxGetCurrent(long *out) { return *out = context, 0; }

int cuGetErrorName(int error, const char **name) { return *name = "CUDA_ERROR_OF_A_TEST", 0; }

static void put(const void *from, long bytes) {
  memcpy(written + used, from, bytes);
  used += bytes;
}

static int busy;  // a thread is writing
static void lock(void) {
  while (__sync_lock_test_and_set(&busy, 1)) {
  }
}
static void unlock(void) { __sync_lock_release(&busy); }

static void begin(long by_triton, const unsigned *f, long stream, const unsigned *shape) {
  if (used > (1 << 20) - (1 << 14)) used = 0;  // nobody reads it
  put(&by_triton, 8), put(&f, 8), put(&stream, 8), put(shape, 28);
}

int cuLaunchKernel(const unsigned *f, unsigned gx, unsigned gy, unsigned gz, unsigned x, unsigned y,
                   unsigned z, unsigned shared, long on, void **params, void **extra) {
  unsigned shape[7] = {gx, gy, gz, x, y, z, shared};
  if (result != 0 || extra != 0) return (int)result;
  lock();
  ++direct;
  begin(0, f, on, shape);
  for (unsigned i = 0; i < f[0]; ++i) put(params[i], f[1 + i]);
  unlock();
  return 0;
}

// What Triton would launch.
void note(const unsigned *f, long stream, const unsigned *shape, const void *params, long bytes) {
  lock();
  begin(1, f, stream, shape), put(params, bytes);
  unlock();
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
