/* A plugin that is linked with the driver. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

extern int cuMemAlloc_v2(uint64_t *, size_t);

int alloc(uint64_t *pointer, size_t bytes) { return cuMemAlloc_v2(pointer, bytes); }
void *find(void *driver, const char *name) { return dlsym(driver, name); }
