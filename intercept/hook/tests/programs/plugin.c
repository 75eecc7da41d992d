/* A library that is loaded so that it prefers its own dependencies' symbols. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>

void *find(void *driver) { return dlsym(driver, "cuMemAlloc_v2"); }
