/* Pools under a grant of 256 MiB: what they keep does not stand in the program's way, and does not go beyond the grant. */
#include "both.h"

struct place { int kind, handles, location_type, location; void *windows; uint64_t rest[8]; };

int main(int count, char **arguments) {
    uint64_t p, q, most = ~0ull;
    void *none = 0, *pool, *other;
    struct place place = {1, 0, 1, 0, 0, {0}};
    open_both(arguments);
    begin();
    ok(CU(cuMemPoolCreate, &pool, &place), "pool");
    ok(CU(cuMemPoolSetAttribute, pool, 4, &most), "threshold");
    /* All of it, in the pool: taken again from what the pool keeps, though nothing is left to charge. */
    for (int round = 0; round < 3; round++) {
        STEP(CU(cuMemAllocFromPoolAsync, &p, 256 * MIB, pool, none));
        say("{\"refused\":%d}", CU(cuMemAllocFromPoolAsync, &q, MIB, pool, none));
        say("{\"refused\":%d}", CU(cuMemAllocAsync, &q, MIB, none));
        say("{\"refused\":%d}", CU(cuMemAlloc_v2, &q, MIB));
        STEP(CU(cuMemFreeAsync, p, none));
        STEP(CU(cuStreamSynchronize, none));
    }
    /* Pools let go of it where others want it. */
    STEP(CU(cuMemAlloc_v2, &p, 200 * MIB));
    STEP(CU(cuMemFree_v2, p));
    STEP(CU(cuMemAllocFromPoolAsync, &p, 256 * MIB, pool, none));
    STEP(CU(cuMemFreeAsync, p, none));
    ok(CU(cuMemPoolCreate, &other, &place), "pool");
    STEP(CU(cuMemAllocFromPoolAsync, &p, 256 * MIB, other, none));
    STEP(CU(cuMemFreeAsync, p, none));
    /* The pool would take a chunk, of which the grant has not all. */
    STEP(CU(cuMemAlloc_v2, &q, 250 * MIB));
    say("{\"refused\":%d}", CU(cuMemAllocFromPoolAsync, &p, 2 * MIB, other, none));
    both("after a chunk that is not granted");
    STEP(CU(cuMemFree_v2, q));
    /* The same where the pool would keep it. */
    ok(CU(cuMemPoolSetAttribute, other, 4, &most), "threshold");
    STEP(CU(cuMemAlloc_v2, &q, 250 * MIB));
    say("{\"refused\":%d}", CU(cuMemAllocFromPoolAsync, &p, 2 * MIB, other, none));
    both("after a chunk that is not granted, for a pool that keeps all");
    STEP(CU(cuMemFree_v2, q));
    both("end");
    (void)count;
    return 0;
}
