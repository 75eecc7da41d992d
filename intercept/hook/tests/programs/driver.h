/* The driver API as the test programs use it: looked up by name, no headers of NVIDIA's. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)
#define GIB ((size_t)1 << 30)

/* The version that the loader's functions have had from the first on this kind of machine. */
#ifdef __aarch64__
#define OLDEST_GLIBC "GLIBC_2.17"
#else
#define OLDEST_GLIBC "GLIBC_2.2.5"
#endif

static void *driver(void) {
    static void *handle;
    if (!handle) handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
        fprintf(stderr, "%s\n", dlerror());
        exit(2);
    }
    return handle;
}

/* A call of a function of the driver by its name. */
#define CU(name, ...) ((int (*)())must(dlsym(driver(), #name), #name))(__VA_ARGS__)

static inline void *must(void *pointer, const char *what) {
    if (!pointer) {
        fprintf(stderr, "no %s\n", what);
        exit(2);
    }
    return pointer;
}

static inline void ok(int result, const char *what) {
    if (result) {
        fprintf(stderr, "%s: %d\n", what, result);
        exit(2);
    }
}

/* The first GPU's primary context, current. */
static inline void *begin(void) {
    void *context;
    ok(CU(cuInit, 0), "cuInit");
    ok(CU(cuDevicePrimaryCtxRetain, &context, 0), "retain");
    ok(CU(cuCtxSetCurrent, context), "set current");
    return context;
}

static inline size_t free_bytes(void) {
    size_t free_now, total;
    ok(CU(cuMemGetInfo_v2, &free_now, &total), "info");
    return free_now;
}

/* A line, whole also where several threads say one. */
static inline void say(const char *format, ...) {
    va_list list;
    flockfile(stdout);
    __builtin_va_start(list, format);
    vprintf(format, list);
    __builtin_va_end(list);
    putchar('\n');
    fflush(stdout);
    funlockfile(stdout);
}
