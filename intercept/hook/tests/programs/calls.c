/* Takes memory in every way and gives it back; says what each cost, and what was left of the cost afterwards. */
#include "driver.h"

static size_t before;

static void start(void) { before = free_bytes(); }

static void done(const char *call, size_t during) {
    say("{\"call\":\"%s\",\"charged\":%zu,\"left\":%zd}", call, before - during, (ssize_t)(before - free_bytes()));
}

struct flat { size_t width, height; unsigned format, channels; };
struct solid { size_t width, height, depth; unsigned format, channels, flags; };
struct place { int kind, handles, location_type, location; void *windows; uint64_t rest[8]; };

#define ROUND(name, take, give) do { start(); ok(take, name); size_t during = free_bytes(); ok(give, name " back"); done(name, during); } while (0)

/* A pool lets go of memory when the program waits. */
#define BACK(call, pointer) (CU(call, pointer, (void *)0) || CU(cuStreamSynchronize, (void *)0))

int main(void) {
    uint64_t p, q, handle, again;
    size_t pitch, during;
    void *array, *pool, *stream, *context;
    int device;
    void *primary = begin();
    struct flat flat = {1024, 1024, 0x20, 1};
    struct solid solid = {256, 256, 16, 0x01, 4, 0};
    struct place place = {1, 0, 1, 0, 0, {0}};
    struct place host = {1, 0, 3, 0, 0, {0}};

    ROUND("cuMemAlloc_v2", CU(cuMemAlloc_v2, &p, 3 * MIB), CU(cuMemFree_v2, p));
    ROUND("cuMemAllocManaged", CU(cuMemAllocManaged, &p, 3 * MIB, 1), CU(cuMemFree_v2, p));
    ROUND("cuMemAllocPitch_v2", CU(cuMemAllocPitch_v2, &p, &pitch, (size_t)1000, (size_t)1024, 4), CU(cuMemFree_v2, p));
    ROUND("cuMemAllocAsync", CU(cuMemAllocAsync, &p, 3 * MIB, (void *)0), BACK(cuMemFreeAsync, p));
    ROUND("cuMemAllocAsync_ptsz", CU(cuMemAllocAsync_ptsz, &p, 3 * MIB, (void *)0), BACK(cuMemFreeAsync_ptsz, p));
    ROUND("cuMemAllocAsync, cuMemFree_v2", CU(cuMemAllocAsync, &p, 3 * MIB, (void *)0), CU(cuMemFree_v2, p));
    ok(CU(cuDeviceGetDefaultMemPool, &pool, 0), "pool");
    ROUND("cuMemAllocFromPoolAsync", CU(cuMemAllocFromPoolAsync, &p, 3 * MIB, pool, (void *)0), BACK(cuMemFreeAsync, p));
    ROUND("cuMemAllocFromPoolAsync_ptsz", CU(cuMemAllocFromPoolAsync_ptsz, &p, 3 * MIB, pool, (void *)0), BACK(cuMemFreeAsync, p));
    ROUND("cuMemCreate", CU(cuMemCreate, &handle, 4 * MIB, &place, 0ull), CU(cuMemRelease, handle));
    ROUND("cuMemCreate on the host", CU(cuMemCreate, &handle, 4 * MIB, &host, 0ull), CU(cuMemRelease, handle));
    ROUND("cuArrayCreate_v2", CU(cuArrayCreate_v2, &array, &flat), CU(cuArrayDestroy, array));
    ROUND("cuArray3DCreate_v2", CU(cuArray3DCreate_v2, &array, &solid), CU(cuArrayDestroy, array));
    ROUND("cuMipmappedArrayCreate", CU(cuMipmappedArrayCreate, &array, &solid, 2), CU(cuMipmappedArrayDestroy, array));

    /* The handle goes first, the memory with the last mapping. */
    start();
    ok(CU(cuMemAddressReserve, &p, 8 * MIB, (size_t)0, (uint64_t)0, 0ull), "reserve");
    ok(CU(cuMemCreate, &handle, 4 * MIB, &place, 0ull), "create");
    ok(CU(cuMemMap, p, 4 * MIB, (size_t)0, handle, 0ull), "map");
    ok(CU(cuMemMap, p + 4 * MIB, 4 * MIB, (size_t)0, handle, 0ull), "map again");
    ok(CU(cuMemRelease, handle), "release");
    during = free_bytes();
    ok(CU(cuMemUnmap, p, 4 * MIB), "unmap one");
    if (free_bytes() != during) say("{\"call\":\"cuMemUnmap of one of two\",\"charged\":0,\"left\":1}");
    ok(CU(cuMemUnmap, p + 4 * MIB, 4 * MIB), "unmap other");
    ok(CU(cuMemAddressFree, p, 8 * MIB), "free addresses");
    done("cuMemMap", during);

    /* A context takes what was made in it along. */
    start();
    ok(CU(cuCtxCreate_v2, &context, 0, 0), "create context");
    ok(CU(cuMemAlloc_v2, &p, 3 * MIB), "in it");
    ok(CU(cuMemAlloc_v2, &q, 2 * MIB), "in it");
    during = free_bytes();
    ok(CU(cuCtxDestroy_v2, context), "destroy context");
    ok(CU(cuCtxSetCurrent, primary), "back");
    done("cuCtxDestroy_v2", during);

    start();
    ok(CU(cuMemAlloc_v2, &p, 3 * MIB), "in the primary");
    during = free_bytes();
    ok(CU(cuDevicePrimaryCtxReset_v2, 0), "reset");
    done("cuDevicePrimaryCtxReset_v2", during);

    start();
    ok(CU(cuMemAlloc_v2, &p, 3 * MIB), "in the primary");
    during = free_bytes();
    ok(CU(cuDevicePrimaryCtxRelease_v2, 0), "release");
    begin();
    done("cuDevicePrimaryCtxRelease_v2", during);

    /* Errors cost nothing and are the driver's own. */
    start();
    say("{\"error\":\"no such pointer\",\"result\":%d}", CU(cuMemFree_v2, (uint64_t)0x1234));
    say("{\"error\":\"NULL\",\"result\":%d}", CU(cuMemAlloc_v2, (void *)0, 3 * MIB));
    say("{\"error\":\"zero bytes\",\"result\":%d}", CU(cuMemAlloc_v2, &p, (size_t)0));
    say("{\"error\":\"NULL description\",\"result\":%d}", CU(cuArrayCreate_v2, &array, (void *)0));
    say("{\"error\":\"NULL properties\",\"result\":%d}", CU(cuMemCreate, &handle, 4 * MIB, (void *)0, 0ull));
    say("{\"error\":\"NULL info\",\"result\":%d}", CU(cuMemGetInfo_v2, (void *)0, (void *)0));
    place.location = 99;
    say("{\"error\":\"no such device\",\"result\":%d}", CU(cuMemCreate, &handle, 4 * MIB, &place, 0ull));
    ok(CU(cuCtxSetCurrent, (void *)0), "none current");
    say("{\"error\":\"no context\",\"result\":%d}", CU(cuMemAlloc_v2, &p, 3 * MIB));
    begin();
    done("errors", before);
    (void)stream, (void)device, (void)again;
    return 0;
}
