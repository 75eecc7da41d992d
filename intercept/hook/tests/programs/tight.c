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
    /* The pool takes a chunk of 32 MiB, of which the grant has not all: what is left of the grant can be used, and no more. */
    for (int keeps = 0; keeps < 2; keeps++) {
        uint64_t pieces[8], third = 0;
        int taken = 0;
        void *another;
        if (keeps) ok(CU(cuMemPoolSetAttribute, other, 4, &most), "threshold");
        ok(CU(cuMemPoolCreate, &another, &place), "pool");
        STEP(CU(cuMemAlloc_v2, &q, 248 * MIB));
        while (taken < 8 && !CU(cuMemAllocFromPoolAsync, &pieces[taken], 2 * MIB, other, none)) taken++;
        say("{\"pieces\":%d,\"beyond\":%lu}", taken, held() - charged());
        say("{\"refused\":%d}", CU(cuMemAllocFromPoolAsync, &third, 2 * MIB, another, none));
        for (int piece = 0; piece < taken; piece++) ok(CU(cuMemFreeAsync, pieces[piece], none), "free");
        ok(CU(cuStreamSynchronize, none), "wait");
        ok(CU(cuMemFree_v2, q), "free");
        /* With room for it, what the pool keeps is charged with the next reading. */
        size_t left, all;
        ok(CU(cuMemGetInfo_v2, &left, &all), "reading");
        both("after a chunk that was not granted");
        ok(CU(cuMemPoolDestroy, another), "destroy");
    }
    both("end");
    (void)count;
    return 0;
}
