/* Two threads at the same pool or at the same memory of another process.
 *
 *   rivals .. take BYTES     each takes so much from one pool and gives it back, over and over
 *   rivals .. destroy BYTES  one takes and gives back, the other tries to destroy the pool, which is a default one
 *   rivals .. open           each opens the same memory of another process, looks whether it is paid, and closes it */
#include "both.h"
#include <pthread.h>
#include <sys/wait.h>
#include <time.h>

struct place { int kind, handles, location_type, location; void *windows; uint64_t rest[8]; };
struct ipc { uint64_t words[8]; };

#define ROUNDS 3000

static void *pool, *context, *none;
static size_t bytes;
static volatile int has_taken;
static uint64_t before;
static struct ipc shared;

static uint64_t milliseconds(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000ull + time.tv_nsec / 1000000;
}

static void *takes(void *unused) {
    uint64_t p;
    long refused = 0;
    ok(CU(cuCtxSetCurrent, context), "set current");
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t asked = milliseconds();
        if (CU(cuMemAllocFromPoolAsync, &p, bytes, pool, none)) {
            /* Who has waited for so long is refused: the other one was not run amid a call. */
            refused += milliseconds() - asked < 200;
            continue;
        }
        ok(CU(cuMemFreeAsync, p, none), "free");
        if (round % 3 == 0) ok(CU(cuCtxSynchronize), "wait");
    }
    has_taken = 1;
    say("{\"refusals\":%ld}", refused);
    return unused;
}

static void *destroys(void *unused) {
    long destroyed = 0;
    ok(CU(cuCtxSetCurrent, context), "set current");
    while (!has_taken) destroyed += !CU(cuMemPoolDestroy, pool);
    say("{\"destroyed\":%ld}", destroyed);
    return unused;
}

static void *opens(void *unused) {
    uint64_t p;
    long unpaid = 0;
    ok(CU(cuCtxSetCurrent, context), "set current");
    for (int round = 0; round < ROUNDS; round++) {
        ok(CU(cuIpcOpenMemHandle_v2, &p, shared, 1), "open");
        for (int look = 0; look < 5; look++) unpaid += charged() < before + 3 * MIB;
        ok(CU(cuIpcCloseMemHandle, p), "close");
    }
    say("{\"unpaid\":%ld}", unpaid);
    return unused;
}

static void two(void *(*one)(void *), void *(*other)(void *)) {
    pthread_t threads[2];
    ok(pthread_create(&threads[0], 0, one, 0) || pthread_create(&threads[1], 0, other, 0), "threads");
    ok(pthread_join(threads[0], 0) || pthread_join(threads[1], 0), "join");
}

static void other_process(int to, int until) {
    uint64_t p;
    char byte;
    begin();
    ok(CU(cuMemAlloc_v2, &p, 3 * MIB), "take");
    ok(CU(cuIpcGetMemHandle, &shared, p), "handle");
    ok(write(to, &shared, sizeof shared) != sizeof shared, "hand over");
    ok(read(until, &byte, 1) != 1, "end");
}

int main(int count, char **arguments) {
    struct place place = {1, 0, 1, 0, 0, {0}};
    uint64_t most = ~0ull, p;
    int handing[2], ending[2];
    ok(pipe(handing) || pipe(ending), "pipes");
    if (!strcmp(arguments[4], "open") && !fork()) {
        other_process(handing[1], ending[0]);
        return 0;
    }
    open_both(arguments);
    bytes = count > 5 ? strtoull(arguments[5], 0, 10) : 0;
    if (!strcmp(arguments[4], "open")) {
        ok(read(handing[0], &shared, sizeof shared) != sizeof shared, "handed over");
        /* A handle that no process of the claim has exported: the fake driver does not read the last word. */
        shared.words[7] = 1;
        context = begin();
        before = charged();
        two(opens, opens);
        two(opens, opens);
        say("{\"left\":%ld}", (long)(charged() - before));
        ok(write(ending[1], "e", 1) != 1, "end");
        wait(0);
        return 0;
    }
    context = begin();
    if (!strcmp(arguments[4], "take")) {
        ok(CU(cuMemPoolCreate, &pool, &place), "pool");
        two(takes, takes);
    } else {
        ok(CU(cuDeviceGetDefaultMemPool, &pool, 0), "pool");
        ok(CU(cuMemPoolSetAttribute, pool, 4, &most), "threshold");
        STEP(CU(cuMemAllocFromPoolAsync, &p, bytes, pool, none));
        say("{\"destroyed\":%d}", !CU(cuMemPoolDestroy, pool));
        both("not destroyed");
        two(takes, destroys);
        both("fought");
        STEP(CU(cuMemFreeAsync, p, none));
    }
    STEP(CU(cuMemPoolTrimTo, pool, (size_t)0));
    return 0;
}
