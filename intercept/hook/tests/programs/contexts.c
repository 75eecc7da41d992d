/* Threads begin contexts, allocate in them and destroy most of them, all at once; the driver hands out their addresses again. */
#include <pthread.h>
#include "both.h"

static void *churn(void *rounds) {
    for (long round = 0; round < (long)rounds; round++) {
        void *context;
        uint64_t p;
        ok(CU(cuCtxCreate_v2, &context, 0, 0), "create");
        for (int i = 1; i <= 3; i++) ok(CU(cuMemAlloc_v2, &p, i * MIB), "take");
        if (round % 16) ok(CU(cuCtxDestroy_v2, context), "destroy");
    }
    return 0;
}

int main(int count, char **arguments) {
    pthread_t threads[4];
    setenv("TESSERA_FAKE_CUDA_PREEMPTS", "cuCtxDestroy_v2", 1);
    open_both(arguments);
    begin();
    both("begin");
    for (int i = 0; i < 4; i++) pthread_create(&threads[i], 0, churn, (void *)atol(arguments[4]));
    for (int i = 0; i < 4; i++) pthread_join(threads[i], 0);
    both("end");
    (void)count;
    return 0;
}
