/* Takes and gives back at random with some threads, then takes all that is left, says how much, and holds it. */
#include <pthread.h>
#include "driver.h"

static void *primary;
static long rounds;
static uint64_t held;

static void *racer(void *seed) {
    uint64_t mine[64] = {0}, sizes[64] = {0}, random = (uint64_t)seed * 2654435761u + 1;
    ok(CU(cuCtxSetCurrent, primary), "set current");
    for (long round = 0; round < rounds; round++) {
        random = random * 6364136223846793005ull + 1442695040888963407ull;
        int at = random >> 33 & 63;
        if (mine[at]) {
            ok(CU(cuMemFree_v2, mine[at]), "free");
            mine[at] = 0;
        } else {
            sizes[at] = (1 + (random >> 40 & 31)) * MIB;
            if (CU(cuMemAlloc_v2, &mine[at], sizes[at])) mine[at] = 0;
        }
    }
    for (int at = 0; at < 64; at++)
        if (mine[at]) __atomic_fetch_add(&held, sizes[at], __ATOMIC_RELAXED);
    uint64_t last;
    while (!CU(cuMemAlloc_v2, &last, MIB)) __atomic_fetch_add(&held, MIB, __ATOMIC_RELAXED);
    return 0;
}

int main(int argc, char **argv) {
    pthread_t threads[2];
    rounds = atol(argv[2]);
    primary = begin();
    say("{\"begun\":true}");
    for (long t = 0; t < 2; t++) pthread_create(&threads[t], 0, racer, (void *)(t + 1 + 2 * atol(argv[1])));
    for (int t = 0; t < 2; t++) pthread_join(threads[t], 0);
    say("{\"held\":%lu}", held);
    pause();
    return 0;
}
