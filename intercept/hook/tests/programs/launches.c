/* Launches a kernel so many times in each of three ways. */
#include "driver.h"

struct config { unsigned grid[3], block[3], shared; void *stream, *attributes; unsigned count; };

int main(int argc, char **argv) {
    void *module, *function;
    struct config config = {{1, 1, 1}, {32, 1, 1}, 0, 0, 0, 0};
    begin();
    ok(CU(cuModuleLoadData, &module, "image"), "module");
    ok(CU(cuModuleGetFunction, &function, module, "spin_for_1us"), "function");
    int (*launch)() = (int (*)())dlsym(driver(), "cuLaunchKernel");
    for (int round = 0; round < atoi(argv[1]); round++) {
        ok(launch(function, 1, 1, 1, 32, 1, 1, 0, (void *)0, (void *)0, (void *)0), "launch");
        ok(CU(cuLaunchKernel_ptsz, function, 1, 1, 1, 32, 1, 1, 0, (void *)0, (void *)0, (void *)0), "launch ptsz");
        ok(CU(cuLaunchKernelEx, &config, function, (void *)0, (void *)0), "launch ex");
    }
    ok(CU(cuCtxSynchronize), "synchronize");
    /* What the driver refuses is no launch. */
    launch((void *)0x1234, 1, 1, 1, 32, 1, 1, 0, (void *)0, (void *)0, (void *)0);
    say("{\"launched\":true}");
    return 0;
}
