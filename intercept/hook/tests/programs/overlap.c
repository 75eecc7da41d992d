/* Launches a long kernel in one stream, and says how long 200 launches in another stream take, four times. The first
 * argument is the number of kernels of different shapes that are launched in turn. */
#include <time.h>
#include "driver.h"

static void *kernel(void *module, const char *name) {
    void *function;
    ok(CU(cuModuleGetFunction, &function, module, name), name);
    return function;
}

static void launch(void *function, unsigned blocks, void *stream) {
    static void *none[] = {0};
    ok(CU(cuLaunchKernel, function, blocks, 1, 1, 32, 1, 1, 0, stream, none, (void *)0), "launch");
}

static uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ull + time.tv_nsec;
}

int main(int argc, char **argv) {
    void *module, *first, *second;
    unsigned shapes = argc > 1 ? atoi(argv[1]) : 1;
    begin();
    ok(CU(cuModuleLoadData, &module, "image"), "module");
    void *slow = kernel(module, "spin_for_50ms"), *fast = kernel(module, "spin_for_20us");
    ok(CU(cuStreamCreate, &first, 1), "stream");
    ok(CU(cuStreamCreate, &second, 1), "stream");
    for (int round = 0; round < 4; round++) {
        launch(slow, 1, first);
        uint64_t from = now();
        for (unsigned i = 0; i < 200; i++) launch(fast, 1 + i % shapes, second);
        say("{\"round\":%d,\"ns\":%lu}", round, now() - from);
        ok(CU(cuCtxSynchronize), "synchronize");
    }
    return 0;
}
