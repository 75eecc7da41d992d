/* Times calls of the driver; what it finds, in nanoseconds, is a line of JSON.
 *
 *   launch N              one launch: median of 31 batches of N
 *   sync N                one launch and the wait for it, the same way
 *   resolve N             the first N answers of cuGetProcAddress: the time for all
 *   destroy LIVE          the end of a context with LIVE allocations
 *   info P N              cuMemGetInfo in one of P processes that hold memory: median of 31 batches of N
 *   memory LIVE N         one allocation and its free beside LIVE others: median of 31 batches of N
 *   threads T N           the same by T threads at once: wall time for each pair
 *   processes P N         the same by P processes at once
 *   start P               the first use in P processes at once: p50 and p99, and p99 of the CPU time it takes
 *   spawn N               a program that never calls CUDA, from its start to its end: median of N
 */
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include "driver.h"

#define BATCHES 31
#define BYTES 4096

static int (*launch)(), (*allocate)(uint64_t *, size_t), (*release)(uint64_t), (*synchronize)(void), (*info)(size_t *, size_t *);
static void *function;

static double by(clockid_t clock) {
    struct timespec time;
    clock_gettime(clock, &time);
    return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

static double now(void) {
    return by(CLOCK_MONOTONIC);
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double quantile(double *values, int count, double part) {
    qsort(values, (size_t)count, sizeof *values, compare);
    return values[(int)((count - 1) * part + 0.5)];
}

/* What a program does before it works. */
static void ready(void) {
    void *module;
    uint64_t first;
    begin();
    ok(CU(cuModuleLoadData, &module, "image"), "module");
    ok(CU(cuModuleGetFunction, &function, module, "kernel"), "function");
    launch = (int (*)())must(dlsym(driver(), "cuLaunchKernel"), "cuLaunchKernel");
    allocate = must(dlsym(driver(), "cuMemAlloc_v2"), "cuMemAlloc_v2");
    release = must(dlsym(driver(), "cuMemFree_v2"), "cuMemFree_v2");
    synchronize = must(dlsym(driver(), "cuCtxSynchronize"), "cuCtxSynchronize");
    info = must(dlsym(driver(), "cuMemGetInfo_v2"), "cuMemGetInfo_v2");
    ok(allocate(&first, BYTES), "first allocation");
}

static void launches(long count) {
    for (long at = 0; at < count; at++)
        ok(launch(function, 1, 1, 1, 32, 1, 1, 0, (void *)0, (void *)0, (void *)0), "launch");
}

static void launches_and_waits(long count) {
    for (long at = 0; at < count; at++) {
        launches(1);
        ok(synchronize(), "synchronize");
    }
}

static void infos(long count) {
    size_t unused, total;
    for (long at = 0; at < count; at++) ok(info(&unused, &total), "cuMemGetInfo");
}

static void pairs(long count) {
    uint64_t pointer;
    for (long at = 0; at < count; at++) {
        ok(allocate(&pointer, BYTES), "allocation");
        ok(release(pointer), "free");
    }
}

static double median_of_batches(void (*work)(long), long count) {
    double each[BATCHES];
    work(count);
    for (int batch = 0; batch < BATCHES; batch++) {
        double before = now();
        work(count);
        each[batch] = (now() - before) / (double)count;
    }
    return quantile(each, BATCHES, 0.5);
}

static void one_launch(void (*work)(long), long count) {
    ready();
    say("{\"ns\":%.2f}", median_of_batches(work, count));
}

/* As a CUDA runtime begins: most functions that it asks for have no hook. */
static void resolves(long count) {
    static const char *NAMES[] = {"cuDeviceGetName", "cuStreamWaitEvent", "cuMemAlloc", "cuModuleGetGlobal", "cuFuncGetAttribute",
                                  "cuMemcpyHtoDAsync", "cuMemsetD8Async", "cuLaunchKernel", "cuPointerGetAttribute", "cuGetErrorName"};
    int (*ask)(const char *, void **, int, uint64_t, int *) = must(dlsym(driver(), "cuGetProcAddress_v2"), "cuGetProcAddress_v2");
    void *found;
    int status;
    double before = now();
    for (long at = 0; at < count; at++) ok(ask(NAMES[at % (sizeof NAMES / sizeof *NAMES)], &found, 12000, 1, &status), "resolve");
    say("{\"ns\":%.0f}", now() - before);
}

static void one_destroy(long live) {
    void *context;
    uint64_t pointer;
    ready();
    ok(CU(cuCtxCreate_v2, &context, 0, 0), "context");
    for (long at = 0; at < live; at++) ok(allocate(&pointer, BYTES), "allocation");
    double before = now();
    ok(CU(cuCtxDestroy_v2, context), "destroy");
    say("{\"ns\":%.2f}", now() - before);
}

static void one_pair(long live, long count) {
    uint64_t pointer;
    ready();
    for (long at = 0; at < live; at++) ok(allocate(&pointer, BYTES), "allocation");
    say("{\"ns\":%.2f}", median_of_batches(pairs, count));
}

static pthread_barrier_t *barrier;
static long rounds;

struct span { double begin, end; };

/* Begins with the others, and says from when to when it worked: who waits for all of it may be woken late. */
static void timed(struct span *span) {
    pthread_barrier_wait(barrier);
    span->begin = now();
    pairs(rounds);
    span->end = now();
}

static void *thread(void *span) {
    timed(span);
    return 0;
}

/* Wall time for each pair of all of them. */
static double each(const struct span *spans, unsigned many) {
    double begin = spans[0].begin, end = spans[0].end;
    for (unsigned at = 1; at < many; at++) {
        if (spans[at].begin < begin) begin = spans[at].begin;
        if (spans[at].end > end) end = spans[at].end;
    }
    return (end - begin) / (double)rounds / many;
}

/* A barrier, and room for what each has to say, that processes share. */
static void *shared(unsigned many) {
    char *at = mmap(0, 4096 + many * sizeof(struct span), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pthread_barrierattr_t attributes;
    pthread_barrierattr_init(&attributes);
    pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    barrier = (pthread_barrier_t *)at;
    pthread_barrier_init(barrier, &attributes, many + 1);
    return at + 4096;
}

static void many_threads(unsigned many, long count) {
    pthread_t threads[many];
    ready();
    struct span *spans = shared(many);
    rounds = count;
    for (unsigned at = 0; at < many; at++) pthread_create(&threads[at], 0, thread, &spans[at]);
    pthread_barrier_wait(barrier);
    for (unsigned at = 0; at < many; at++) pthread_join(threads[at], 0);
    say("{\"ns\":%.2f}", each(spans, many));
}

static void wait_for_all(unsigned many) {
    int status;
    for (unsigned at = 0; at < many; at++)
        if (wait(&status) < 0 || status) exit(2);
}

static void many_processes(unsigned many, long count) {
    struct span *spans = shared(many);
    rounds = count;
    for (unsigned at = 0; at < many; at++) {
        if (fork()) continue;
        ready();
        timed(&spans[at]);
        _exit(0);
    }
    pthread_barrier_wait(barrier);
    wait_for_all(many);
    say("{\"ns\":%.2f}", each(spans, many));
}

/* The others hold memory and do nothing. */
static void info_beside(unsigned many, long count) {
    pid_t others[many];
    shared(many - 1);
    for (unsigned at = 1; at < many; at++) {
        if ((others[at] = fork())) continue;
        ready();
        pthread_barrier_wait(barrier);
        for (;;) pause();
    }
    ready();
    pthread_barrier_wait(barrier);
    say("{\"ns\":%.2f}", median_of_batches(infos, count));
    for (unsigned at = 1; at < many; at++) kill(others[at], SIGKILL);
    while (wait(0) > 0);
}

/* A process that is kept off the CPU by the others takes long, but no more of the CPU. */
static void many_starts(unsigned many) {
    /* A span has room for two numbers. */
    double *took = shared(many), *worked = took + many;
    for (unsigned at = 0; at < many; at++) {
        if (fork()) continue;
        driver();
        pthread_barrier_wait(barrier);
        double worked_before = by(CLOCK_THREAD_CPUTIME_ID), before = now();
        ready();
        took[at] = now() - before;
        worked[at] = by(CLOCK_THREAD_CPUTIME_ID) - worked_before;
        _exit(0);
    }
    pthread_barrier_wait(barrier);
    wait_for_all(many);
    double p99 = quantile(took, (int)many, 0.99), p50 = quantile(took, (int)many, 0.5);
    say("{\"ns\":%.0f,\"p99\":%.0f,\"cpu_p99\":%.0f}", p50, p99, quantile(worked, (int)many, 0.99));
}

static void spawns(long count) {
    double took[count];
    char *arguments[] = {"true", 0}, *environment[] = {0};
    for (long at = 0; at < count; at++) {
        pid_t child;
        double before = now();
        ok(posix_spawn(&child, "/bin/true", 0, 0, arguments, environment), "spawn");
        waitpid(child, 0, 0);
        took[at] = now() - before;
    }
    say("{\"ns\":%.0f}", quantile(took, (int)count, 0.5));
}

int main(int argc, char **argv) {
    long first = argc > 2 ? atol(argv[2]) : 0, second = argc > 3 ? atol(argv[3]) : 0;
    const char *what = argc > 1 ? argv[1] : "";
    if (!strcmp(what, "launch")) one_launch(launches, first);
    else if (!strcmp(what, "sync")) one_launch(launches_and_waits, first);
    else if (!strcmp(what, "resolve")) resolves(first);
    else if (!strcmp(what, "destroy")) one_destroy(first);
    else if (!strcmp(what, "info")) info_beside((unsigned)first, second);
    else if (!strcmp(what, "memory")) one_pair(first, second);
    else if (!strcmp(what, "threads")) many_threads((unsigned)first, second);
    else if (!strcmp(what, "processes")) many_processes((unsigned)first, second);
    else if (!strcmp(what, "start")) many_starts((unsigned)first);
    else if (!strcmp(what, "spawn")) spawns(first);
    else return 2;
    return 0;
}
