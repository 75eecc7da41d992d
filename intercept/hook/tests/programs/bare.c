/* A library that is loaded so that it finds the driver's own functions: for what the driver itself says. */
#define _GNU_SOURCE
#include <dlfcn.h>

void *bare(void *driver, const char *name) { return dlsym(driver, name); }
