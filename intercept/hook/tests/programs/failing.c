/* Uses everything that takes memory while one function of the driver fails, for each of some functions in turn: what each call
 * answers, and whether ledger and driver agree after it.
 *
 *   failing <bare library> <total at> <shift> <function...>     with the library
 *   failing - <function...>                                     without
 */
#include <sys/wait.h>
#include "both.h"

static const char *fails;
static int compares;

static void step(const char *call, int result) {
    if (compares) say("{\"fails\":\"%s\",\"call\":\"%s\",\"result\":%d,\"ledger\":%lu,\"driver\":%lu}", fails, call, result, charged(), held());
    else say("{\"fails\":\"%s\",\"call\":\"%s\",\"result\":%d}", fails, call, result);
}

#define TRY(name, ...) step(#name, CU(name, __VA_ARGS__))

struct place { int kind, handles, location_type, location; void *windows; uint64_t rest[8]; };
struct array { size_t width, height; int format; unsigned channels; };
struct array3d { size_t width, height, depth; int format; unsigned channels, flags; };
struct alloc { struct place place; void *access; size_t count, bytes; uint64_t at; };

static const struct place ON_GPU = {1, 0, 1, 0, 0, {0}}, SHARED = {1, 1, 1, 0, 0, {0}};
static void *none;

static void plain(void) {
    uint64_t p = 0, q = 0;
    size_t pitch, left, total;
    TRY(cuMemAlloc_v2, &p, 3 * MIB);
    TRY(cuMemAllocPitch_v2, &q, &pitch, (size_t)1000, (size_t)1000, 4);
    step("cuMemGetInfo_v2", CU(cuMemGetInfo_v2, &left, &total));
    TRY(cuMemFree_v2, p);
    TRY(cuMemFree_v2, q);
}

/* What the fake driver does not take from the GPU. */
static void not_counted(void) {
    uint64_t m = 0;
    void *module = 0, *function = 0;
    int compared = compares;
    compares = 0;
    TRY(cuMemAllocManaged, &m, 5 * MIB, 1);
    TRY(cuModuleLoadData, &module, "image");
    if (module) {
        TRY(cuModuleGetFunction, &function, module, "spin_for_1us");
        TRY(cuLaunchKernel, function, 1, 1, 1, 32, 1, 1, 0, none, none, none);
        TRY(cuLaunchCooperativeKernel, function, 1, 1, 1, 32, 1, 1, 0, none, none);
        TRY(cuModuleUnload, module);
    }
    TRY(cuMemFree_v2, m);
    /* Where they cannot be given back they stay charged. */
    compares = compared && strcmp(fails, "cuModuleUnload") && strcmp(fails, "cuMemFree_v2");
}

static void arrays(void) {
    struct array flat = {1024, 1024, 0x20, 1};
    struct array3d deep = {256, 256, 16, 0x20, 1, 0};
    void *a = 0, *b = 0, *c = 0;
    TRY(cuArrayCreate_v2, &a, &flat);
    TRY(cuArray3DCreate_v2, &b, &deep);
    TRY(cuMipmappedArrayCreate, &c, &deep, 4);
    TRY(cuArrayDestroy, a);
    TRY(cuArrayDestroy, b);
    TRY(cuMipmappedArrayDestroy, c);
}

static void pools(void) {
    uint64_t p = 0, q = 0, most = ~0ull;
    void *pool = 0;
    TRY(cuMemAllocAsync, &p, 3 * MIB, none);
    TRY(cuMemFreeAsync, p, none);
    TRY(cuCtxSynchronize);
    TRY(cuMemPoolCreate, &pool, &ON_GPU);
    TRY(cuMemPoolSetAttribute, pool, 4, &most);
    TRY(cuMemAllocFromPoolAsync, &p, 40 * MIB, pool, none);
    TRY(cuMemAllocFromPoolAsync_ptsz, &q, 7 * MIB, pool, none);
    TRY(cuMemFreeAsync, p, none);
    TRY(cuMemFreeAsync_ptsz, q, none);
    TRY(cuStreamSynchronize, none);
    TRY(cuMemPoolTrimTo, pool, (size_t)0);
    TRY(cuMemPoolDestroy, pool);
}

static void physical(void) {
    uint64_t range = 0, handle = 0, again = 0;
    int descriptor = -1;
    CU(cuMemAddressReserve, &range, 64 * MIB, (size_t)0, (uint64_t)0, 0ull);
    TRY(cuMemCreate, &handle, 32 * MIB, &SHARED, 0ull);
    TRY(cuMemMap, range, 32 * MIB, (size_t)0, handle, 0ull);
    TRY(cuMemRetainAllocationHandle, &again, (void *)range);
    TRY(cuMemRelease, handle);
    if (again) TRY(cuMemRelease, again);
    TRY(cuMemUnmap, range, 32 * MIB);
    (void)descriptor;
}

static void graphs(void) {
    struct alloc alloc = {{1, 0, 1, 0, 0, {0}}, 0, 0, 20 * MIB, 0};
    void *graph = 0, *node = 0, *run = 0;
    if (CU(cuGraphCreate, &graph, 0)) return;
    TRY(cuGraphAddMemAllocNode, &node, graph, none, (size_t)0, &alloc);
    TRY(cuGraphAddMemFreeNode, &node, graph, none, (size_t)0, alloc.at);
    TRY(cuGraphInstantiateWithFlags, &run, graph, 0ull);
    if (run) {
        TRY(cuGraphUpload, run, none);
        TRY(cuGraphLaunch, run, none);
        TRY(cuStreamSynchronize, none);
        TRY(cuGraphExecDestroy, run);
    }
    TRY(cuDeviceGraphMemTrim, 0);
    TRY(cuGraphDestroy, graph);
}

static void contexts(void) {
    void *context = 0, *primary = 0;
    uint64_t p = 0;
    TRY(cuCtxCreate_v2, &context, 0, 0);
    TRY(cuCtxSetLimit, 2, 100 * MIB);
    TRY(cuMemAlloc_v2, &p, 3 * MIB);
    if (context) TRY(cuCtxDestroy_v2, context);
    TRY(cuDevicePrimaryCtxRetain, &primary, 0);
    TRY(cuDevicePrimaryCtxRelease_v2, 0);
}

static int everything(int with) {
    void *primary = 0;
    setenv("TESSERA_FAKE_CUDA_FAILS", fails, 1);
    ok(CU(cuInit, 0), "cuInit");
    int began = CU(cuDevicePrimaryCtxRetain, &primary, 0);
    if (!began) ok(CU(cuCtxSetCurrent, primary), "set current");
    /* From here on this process is in the ledger, and the dead are not. */
    compares = with && !began;
    step("cuDevicePrimaryCtxRetain", began);
    plain();
    arrays();
    pools();
    physical();
    graphs();
    contexts();
    not_counted();
    plain();
    return 0;
}

int main(int count, char **arguments) {
    int with = strcmp(arguments[1], "-"), status;
    for (int at = with ? 4 : 2; at < count; at++) {
        fails = arguments[at];
        pid_t child = fork();
        if (!child) {
            /* Finds the driver's own functions, before one of them fails. */
            if (with) open_both(arguments);
            _exit(everything(with));
        }
        waitpid(child, &status, 0);
        if (status) say("{\"fails\":\"%s\",\"call\":\"the process\",\"result\":%d}", fails, status);
    }
    return 0;
}
