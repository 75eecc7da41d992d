/* Launches kernels one after the other, and says how much GPU time they took of how much time there was.
 *
 *   compute <how> <kernel> <its us> <window ms> <windows>     a line for each window
 *   how: plain, cooperative, described, graph; sync waits for each launch, the others for each sixteenth;
 *        streams launches one in each of four streams, which run at the same time, and waits for these
 *   compute one <kernel> <ms>                                 one launch, a line after it and one after that time; then waits
 */
#include <time.h>
#include <sys/resource.h>
#include "driver.h"

struct config { unsigned grid[3], block[3], shared; void *stream, *attributes; unsigned count; };

static void *function, *stream, *executable, *beside[3];

static uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ull + time.tv_nsec;
}

static uint64_t cpu(void) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1000000000ull +
           (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1000ull;
}

static void *no_parameters[] = {0};

static void plain(void *on) {
    ok(CU(cuLaunchKernel, function, 1, 1, 1, 32, 1, 1, 0, on, no_parameters, (void *)0), "launch");
}

static void cooperative(void *on) {
    ok(CU(cuLaunchCooperativeKernel, function, 1, 1, 1, 32, 1, 1, 0, on, no_parameters), "launch cooperative");
}

static void described(void *on) {
    struct config config = {{1, 1, 1}, {32, 1, 1}, 0, on, 0, 0};
    ok(CU(cuLaunchKernelEx_ptsz, &config, function, no_parameters, (void *)0), "launch ex");
}

static void graph(void *on) { ok(CU(cuGraphLaunch, executable, on), "launch graph"); }

static void streams(void *on) {
    plain(on);
    for (int i = 0; i < 3; i++) plain(beside[i]);
    for (int i = 0; i < 3; i++) ok(CU(cuStreamSynchronize, beside[i]), "synchronize");
}

static void capture(void) {
    void *captured;
    ok(CU(cuStreamBeginCapture_v2, stream, 0), "begin capture");
    plain(stream);
    ok(CU(cuStreamEndCapture, stream, &captured), "end capture");
    ok(CU(cuGraphInstantiateWithFlags, &executable, captured, 0ull), "instantiate");
}

int main(int argc, char **argv) {
    void *module;
    void (*launch)(void *) = !strcmp(argv[1], "cooperative") ? cooperative : !strcmp(argv[1], "graph") ? graph : !strcmp(argv[1], "described") ? described : !strcmp(argv[1], "streams") ? streams : plain;
    begin();
    ok(CU(cuModuleLoadData, &module, "image"), "module");
    ok(CU(cuModuleGetFunction, &function, module, argv[2]), "function");
    ok(CU(cuStreamCreate, &stream, 1), "stream");
    for (int i = 0; i < 3; i++) ok(CU(cuStreamCreate, &beside[i], 1), "stream");
    if (!strcmp(argv[1], "one")) {
        plain(stream);
        say("{\"launchedNs\":%lu}", now());
        struct timespec rest = {atol(argv[3]) / 1000, atol(argv[3]) % 1000 * 1000000};
        nanosleep(&rest, 0);
        say("{\"ranNs\":%lu}", now());
        pause();
    }
    if (launch == graph) capture();
    int waits = !strcmp(argv[1], "sync") || launch == streams;
    uint64_t kernel = atol(argv[3]) * 1000, window = atol(argv[4]) * 1000000, begin = now();
    for (long left = atol(argv[5]); left; left--) {
        uint64_t from = now(), busy = cpu(), launches = 0;
        for (; now() - from < window; launches++) {
            launch(stream);
            /* Not for each: on a busy machine it takes as long as many kernels until this runs again. */
            if (waits || launches % 16 == 15) ok(CU(cuStreamSynchronize, stream), "synchronize");
        }
        ok(CU(cuStreamSynchronize, stream), "synchronize");
        uint64_t to = now();
        say("{\"beganNs\":%lu,\"endNs\":%lu,\"gpuNs\":%lu,\"gpu\":%f,\"cpu\":%f}", begin, to, launches * kernel,
            (double)launches * kernel / (to - from), (double)(cpu() - busy) / (to - from));
    }
    return 0;
}
