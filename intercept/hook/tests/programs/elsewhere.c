/* Asks a driver at a path, and no other, for 2 GiB. */
#include "driver.h"

int main(int argc, char **argv) {
    uint64_t pointer = 0;
    void *context, *other = must(dlopen(argv[1], RTLD_NOW), argv[1]);
    int (*init)() = dlsym(other, "cuInit"), (*retain)() = dlsym(other, "cuDevicePrimaryCtxRetain");
    int (*set)() = dlsym(other, "cuCtxSetCurrent"), (*alloc)() = dlsym(other, "cuMemAlloc_v2");
    ok(init(0), "cuInit");
    ok(retain(&context, 0), "retain");
    ok(set(context), "set current");
    say("{\"result\":%d}", alloc(&pointer, 2 * GIB));
    return 0;
}
