/* Everything that keeps memory beyond what the program holds: pools, contexts, limits. */
#include "both.h"

struct place { int kind, handles, location_type, location; void *windows; uint64_t rest[8]; };

static void *pool_on(int location_type) {
    struct place place = {1, 0, location_type, 0, 0, {0}};
    void *pool;
    ok(CU(cuMemPoolCreate, &pool, &place), "pool");
    return pool;
}

static void pools(void) {
    uint64_t p, q, most = ~0ull;
    void *pool, *none = 0, *stream, *event;
    ok(CU(cuStreamCreate, &stream, 1), "stream");
    ok(CU(cuEventCreate, &event, 0), "event");
    STEP(CU(cuMemAllocAsync, &p, 3 * MIB, stream));
    STEP(CU(cuMemAllocAsync, &q, 70 * MIB, none));
    STEP(CU(cuMemFreeAsync, p, stream));
    STEP(CU(cuStreamSynchronize, stream));
    STEP(CU(cuMemFreeAsync, q, none));
    STEP(CU(cuCtxSynchronize));
    STEP(CU(cuMemAllocAsync_ptsz, &p, 3 * MIB, none));
    STEP(CU(cuMemFreeAsync_ptsz, p, none));
    STEP(CU(cuEventSynchronize, event));
    STEP(CU(cuMemAllocAsync, &p, 3 * MIB, none));
    STEP(CU(cuMemFree_v2, p));
    pool = pool_on(1);
    STEP(CU(cuMemPoolSetAttribute, pool, 4, &most));
    STEP(CU(cuMemAllocFromPoolAsync, &p, 40 * MIB, pool, none));
    STEP(CU(cuMemAllocFromPoolAsync_ptsz, &q, 40 * MIB, pool, none));
    STEP(CU(cuMemFreeAsync, p, none));
    STEP(CU(cuStreamSynchronize, none));
    STEP(CU(cuMemPoolTrimTo, pool, 64 * MIB));
    STEP(CU(cuMemFreeAsync, q, none));
    STEP(CU(cuStreamSynchronize, none));
    STEP(CU(cuMemPoolTrimTo, pool, (size_t)0));
    STEP(CU(cuMemAllocFromPoolAsync, &p, 40 * MIB, pool, none));
    STEP(CU(cuMemPoolDestroy, pool));
    STEP(CU(cuMemFreeAsync, p, none));
    pool = pool_on(1);
    STEP(CU(cuMemAllocFromPoolAsync, &p, 40 * MIB, pool, none));
    STEP(CU(cuMemFreeAsync, p, none));
    STEP(CU(cuMemPoolDestroy, pool));
    pool = pool_on(2);
    STEP(CU(cuMemAllocFromPoolAsync, &p, 40 * MIB, pool, none));
    STEP(CU(cuMemFreeAsync, p, none));
    STEP(CU(cuMemPoolDestroy, pool));
}

/* The pool lets go when the stream comes to the free, not when the program waits for another. */
static void late(void) {
    void *module, *function, *busy, *idle, *none = 0;
    uint64_t p;
    ok(CU(cuStreamCreate, &busy, 1) || CU(cuStreamCreate, &idle, 1), "streams");
    STEP(CU(cuMemAllocAsync, &p, 3 * MIB, busy));
    ok(CU(cuModuleLoadData, &module, "image"), "module");
    ok(CU(cuModuleGetFunction, &function, module, "spin_for_200ms"), "function");
    ok(CU(cuLaunchKernel, function, 1, 1, 1, 32, 1, 1, 0, busy, none, none), "launch");
    /* What an image costs is not what this is about. */
    ok(CU(cuModuleUnload, module), "unload");
    STEP(CU(cuMemFreeAsync, p, busy));
    STEP(CU(cuStreamSynchronize, idle));
    STEP(CU(cuStreamSynchronize, busy));
}

/* Memory of a pool goes with the last context, without a call that frees it; its address comes again. */
static void again(void) {
    uint64_t p, q;
    void *none = 0;
    ok(CU(cuDevicePrimaryCtxReset_v2, 0), "reset");
    STEP(CU(cuMemAllocAsync, &p, 3 * MIB, none));
    STEP(CU(cuDevicePrimaryCtxReset_v2, 0));
    STEP(CU(cuMemAlloc_v2, &q, 3 * MIB));
    ok(p != q, "the same address");
    STEP(CU(cuMemFree_v2, q));
}

static void contexts(void *primary) {
    void *one, *other, *none = 0, *description, *again;
    uint64_t p, resource[32];
    STEP(CU(cuCtxCreate_v2, &one, 0, 0));
    STEP(CU(cuMemAlloc_v2, &p, 3 * MIB));
    STEP(CU(cuCtxAttach, &again, 0));
    STEP(CU(cuCtxCreate, &other, 0, 0));
    STEP(CU(cuCtxDestroy_v2, other));
    STEP(CU(cuCtxDetach, one));
    STEP(CU(cuCtxDetach, one));
    STEP(CU(cuCtxCreate_v3, &one, none, 0, 0, 0));
    STEP(CU(cuCtxCreate_v4, &other, none, 0, 0));
    STEP(CU(cuCtxDestroy, one));
    STEP(CU(cuCtxDestroy_v2, other));
    STEP(CU(cuGLCtxCreate_v2, &one, 0, 0));
    STEP(CU(cuGLCtxCreate, &other, 0, 0));
    STEP(CU(cuCtxDestroy_v2, one));
    STEP(CU(cuCtxDestroy_v2, other));
    STEP(CU(cuVDPAUCtxCreate_v2, &one, 0, 0, 0, none));
    /* Limits go with their context. */
    STEP(CU(cuCtxSetLimit, 0, (size_t)4096));
    STEP(CU(cuCtxSetLimit, 0, (size_t)2048));
    STEP(CU(cuCtxSetLimit, 2, 100 * MIB));
    STEP(CU(cuCtxSetLimit, 1, MIB));
    STEP(CU(cuCtxDestroy_v2, one));
    ok(CU(cuCtxSetCurrent, primary), "back");
    STEP(CU(cuCtxSetLimit, 2, 100 * MIB));
    STEP(CU(cuCtxSetLimit, 2, 8 * MIB));
    ok(CU(cuDeviceGetDevResource, 0, resource, 1), "resource");
    ok(CU(cuDevResourceGenerateDesc, &description, resource, 1), "description");
    STEP(CU(cuGreenCtxCreate, &one, description, 0, 1));
    STEP(CU(cuGreenCtxDestroy, one));
    /* The green context keeps the primary one alive, and its memory. */
    STEP(CU(cuMemAlloc_v2, &p, 3 * MIB));
    ok(CU(cuGreenCtxCreate, &one, description, 0, 1), "green");
    STEP(CU(cuDevicePrimaryCtxRelease_v2, 0));
    ok(CU(cuCtxCreate_v2, &other, 0, 0), "to ask in");
    STEP(CU(cuGreenCtxDestroy, one));
    STEP(CU(cuGreenCtxCreate, &one, description, 0, 1));
    STEP(CU(cuDevicePrimaryCtxRetain, &primary, 0));
    STEP(CU(cuGreenCtxDestroy, one));
    ok(CU(cuCtxSetCurrent, primary), "back");
    STEP(CU(cuCtxDestroy_v2, other));
}

int main(int count, char **arguments) {
    open_both(arguments);
    void *primary = begin();
    both("begun");
    pools();
    late();
    contexts(primary);
    again();
    both("end");
    (void)count;
    return 0;
}
