#include <cstdlib>

#include "ops.h"

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace fastpar {

bool keep_freed_memory() {
#ifdef __GLIBC__
  // Large blocks come from the heap instead of their own mappings, and the heap's top is never
  // given back: what one step freed is what the next step gets, already faulted in.
  return mallopt(M_MMAP_MAX, 0) == 1 && mallopt(M_TRIM_THRESHOLD, -1) == 1;
#else
  return false;
#endif
}

}  // namespace fastpar
