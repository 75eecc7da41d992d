/* Launches kernels that nobody has seen before, so many, and retains and releases the primary context while each is under way. */
#include "driver.h"

int main(int argc, char **argv) {
    void *module, *function, *context;
    begin();
    ok(CU(cuModuleLoadData, &module, "image"), "module");
    ok(CU(cuModuleGetFunction, &function, module, "spin_for_20ms"), "function");
    for (int round = 1; round <= atoi(argv[argc - 1]); round++) {
        ok(CU(cuLaunchKernel, function, round, 1, 1, 32, 1, 1, 0, (void *)0, (void *)0, (void *)0), "launch");
        ok(CU(cuDevicePrimaryCtxRetain, &context, 0), "retain");
        ok(CU(cuDevicePrimaryCtxRelease_v2, 0), "release");
        /* One that nothing is known of cannot be destroyed, and its events are left alone. */
        if (!CU(cuCtxDestroy_v2, (void *)0x1234560)) return 3;
        ok(CU(cuCtxSynchronize), "synchronize");
    }
    say("{\"launched\":true}");
    return 0;
}
