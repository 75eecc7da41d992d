/* Asks a driver at a path, and no other, for 2 GiB. With another argument: that is all of its environment. */
#include "driver.h"

int main(int argc, char **argv) {
    if (argc > 2) {
        char *again[] = {argv[0], argv[1], 0}, *environment[] = {argv[2], 0};
        return execve(argv[0], again, environment);
    }
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
