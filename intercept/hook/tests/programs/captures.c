/* Launches in one stream while another captures, and then what was captured. */
#include "driver.h"

static void *function;

static void launch(void *on) {
    ok(CU(cuLaunchKernel, function, 1, 1, 1, 32, 1, 1, 0, on, (void *)0, (void *)0), "launch");
}

int main(int argc, char **argv) {
    void *module, *captures, *other, *graph = 0, *executable = 0;
    begin();
    ok(CU(cuModuleLoadData, &module, "image"), "module");
    ok(CU(cuModuleGetFunction, &function, module, "spin_for_600us"), "function");
    ok(CU(cuStreamCreate, &captures, 1), "stream");
    ok(CU(cuStreamCreate, &other, 1), "other stream");
    /* Every mode, twice: the second time the kernel is known, and there are events to ask. */
    for (int mode = 0; mode < 6; mode++) {
        ok(CU(cuStreamBeginCapture_v2, captures, mode % 3), "begin capture");
        for (int round = 0; round < 10; round++) {
            launch(captures);
            if (round % 2) launch(other);
        }
        int result = CU(cuStreamEndCapture, captures, &graph);
        say("{\"mode\":%d,\"captured\":%d}", mode % 3, result);
        if (result) continue;
        ok(CU(cuGraphInstantiateWithFlags, &executable, graph, 0ull), "instantiate");
        ok(CU(cuGraphLaunch, executable, captures), "launch graph");
        ok(CU(cuCtxSynchronize), "synchronize");
    }
    /* Memory that is refused: pools and graphs release what they keep, and the capture goes on. */
    uint64_t kept, refused;
    ok(CU(cuMemAllocAsync, &kept, (size_t)(1 << 20), other), "allocate");
    ok(CU(cuStreamBeginCapture_v2, captures, 0), "begin capture");
    launch(captures);
    int result = CU(cuMemAllocAsync, &refused, (size_t)1 << 40, other);
    say("{\"refused\":%d,\"captured\":%d}", result, CU(cuStreamEndCapture, captures, &graph));
    return 0;
}
