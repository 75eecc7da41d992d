/* Asks a real driver, or the fake one: a line of JSON for each thing found.
 *
 *   gpu who                      the GPU and its driver; {"none":REASON} where there is none
 *   gpu used                     memory in use on GPU 0, by NVML
 *   gpu context                  what a context, a module and a launch take of GPU 0, by NVML
 *   gpu calibrate                rounds of the kernel that take a millisecond, when nobody else uses the GPU
 *   gpu fill                     takes memory until it is refused, says what it sees then, and waits
 *   gpu run ROUNDS MS WINDOWS    kernels of a millisecond, as many as it gets: a line for each window
 *   gpu launch N                 one launch, and one replay of a graph of 20, in ns: medians of 31 batches of N; kernels in 2 s
 *   gpu memory N                 one allocation and its free, in ns: median of 31 batches of N
 *   gpu agree BARE AT SHIFT      what ledger and driver say after each kind of allocation (both.h has the arguments)
 */
#include <time.h>
#include "both.h"

/* The body of both kernels: a chain of dependent multiplications, so that GPU time is what it takes, and not time that passes
 * while another's kernels run. What it ends with decides whether it is written: nothing of it can be left out. */
#define KERNEL(name) \
    ".visible .entry " name "(.param .u64 rounds, .param .u64 out)\n{\n" \
    "  .reg .pred %p<3>;\n  .reg .b64 %r<6>;\n" \
    "  ld.param.u64 %r1, [rounds];\n  ld.param.u64 %r2, [out];\n  mov.u64 %r3, %clock64;\n  mov.u64 %r4, 0;\n" \
    "again:\n  setp.ge.u64 %p1, %r4, %r1;\n  @%p1 bra done;\n" \
    "  mad.lo.s64 %r3, %r3, 6364136223846793005, 1442695040888963407;\n  add.u64 %r4, %r4, 1;\n  bra again;\n" \
    "done:\n  setp.ne.u64 %p2, %r3, 42;\n  @%p2 bra end;\n  st.global.u64 [%r2], %r3;\n" \
    "end:\n  ret;\n}\n"

/* The fake driver takes a kernel's length from its name. */
static const char IMAGE[] = ".version 6.0\n.target sm_60\n.address_size 64\n" KERNEL("spin_for_1ms") KERNEL("spin_for_1us");

enum { BATCHES = 31, NODES = 20, SECOND = 1000000000 };

static void *kernel, *stream;
static uint64_t rounds, out;
static int processors;

static uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * SECOND + (uint64_t)time.tv_nsec;
}

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static double median(double *each) {
    qsort(each, BATCHES, sizeof *each, compare);
    return each[BATCHES / 2];
}

static void *nvml(void) {
    static void *handle;
    if (!handle) {
        handle = must(dlopen("libnvidia-ml.so.1", RTLD_NOW), "libnvidia-ml.so.1");
        ok(((int (*)(void))must(dlsym(handle, "nvmlInit_v2"), "nvmlInit_v2"))(), "nvmlInit_v2");
    }
    return handle;
}

/* CUDA's GPU 0, which NVML may have in another place. */
static void uuid_of_gpu(char *text) {
    uint8_t uuid[16];
    ok(CU(cuDeviceGetUuid, uuid, 0), "uuid");
    text += sprintf(text, "GPU-");
    for (int at = 0; at < 16; at++) text += sprintf(text, at == 4 || at == 6 || at == 8 || at == 10 ? "-%02x" : "%02x", uuid[at]);
}

static uint64_t nvml_used_by(int (*info)(void *, uint64_t *)) {
    char uuid[64];
    void *device;
    uint64_t total_free_used[3];
    int (*by_uuid)(const char *, void **) = must(dlsym(nvml(), "nvmlDeviceGetHandleByUUID"), "nvmlDeviceGetHandleByUUID");
    uuid_of_gpu(uuid);
    ok(by_uuid(uuid, &device), "NVML's handle");
    ok(info(device, total_free_used), "NVML's memory");
    return total_free_used[2];
}

static uint64_t nvml_used(void) {
    return nvml_used_by(must(dlsym(nvml(), "nvmlDeviceGetMemoryInfo"), "nvmlDeviceGetMemoryInfo"));
}

static void load(const char *name) {
    void *module;
    begin();
    ok(CU(cuDeviceGetAttribute, &processors, 16, 0), "multiprocessors");
    ok(CU(cuModuleLoadData, &module, IMAGE), "module");
    ok(CU(cuModuleGetFunction, &kernel, module, name), "function");
    ok(CU(cuStreamCreate, &stream, 1), "stream");
    ok(CU(cuMemAlloc_v2, &out, (size_t)8), "memory");
}

static void launch(void) {
    void *parameters[] = {&rounds, &out};
    ok(CU(cuLaunchKernel, kernel, processors, 1, 1, 128, 1, 1, 0, stream, parameters, (void *)0), "launch");
}

static void synchronize(void) { ok(CU(cuStreamSynchronize, stream), "synchronize"); }

static int who(void) {
    char name[96] = "", version[80] = "", uuid[64];
    int cuda, result;
    size_t free_now, total;
    if (!dlopen("libcuda.so.1", RTLD_NOW)) return say("{\"none\":\"%s\"}", dlerror()), 0;
    if ((result = CU(cuInit, 0))) return say("{\"none\":\"cuInit answers %d\"}", result), 0;
    begin();
    ok(CU(cuDriverGetVersion, &cuda), "version");
    ok(CU(cuDeviceGetName, name, (int)sizeof name, 0), "name");
    ok(CU(cuMemGetInfo_v2, &free_now, &total), "info");
    uuid_of_gpu(uuid);
    int (*driver_version)(char *, unsigned) = must(dlsym(nvml(), "nvmlSystemGetDriverVersion"), "nvmlSystemGetDriverVersion");
    ok(driver_version(version, sizeof version), "driver's version");
    say("{\"name\":\"%s\",\"uuid\":\"%s\",\"cuda\":%d,\"driver\":\"%s\",\"total\":%zu}", name, uuid, cuda, version, total);
    return 0;
}

static void context(void) {
    ok(CU(cuInit, 0), "init");
    uint64_t before = nvml_used();
    begin();
    uint64_t made = nvml_used();
    load("spin_for_1us");
    launch();
    synchronize();
    say("{\"context\":%lu,\"worked\":%lu}", made - before, nvml_used() - before);
}

static void calibrate(void) {
    void *from, *to;
    float ms = 0;
    load("spin_for_1ms");
    ok(CU(cuEventCreate, &from, 0), "event");
    ok(CU(cuEventCreate, &to, 0), "event");
    rounds = 10000;
    /* The first rounds bring the clock up. */
    for (int round = 0; round < 20; round++) {
        ok(CU(cuEventRecord, from, stream), "record");
        launch();
        ok(CU(cuEventRecord, to, stream), "record");
        synchronize();
        ok(CU(cuEventElapsedTime, &ms, from, to), "elapsed");
        if (ms > 0.01f) rounds = (uint64_t)((double)rounds / (double)ms);
    }
    say("{\"rounds\":%lu,\"ms\":%f}", rounds, (double)ms);
}

static void fill(void) {
    size_t piece = 256 * MIB, taken = 0, free_now, total;
    uint64_t pointer;
    begin();
    for (int result; piece >= MIB;) {
        result = CU(cuMemAlloc_v2, &pointer, piece);
        if (!result) taken += piece;
        else if (result == 2) piece /= 2;
        else ok(result, "allocation");
    }
    ok(CU(cuMemGetInfo_v2, &free_now, &total), "info");
    say("{\"taken\":%zu,\"total\":%zu,\"cudaUsed\":%zu,\"nvmlUsed\":%lu}", taken, total, total - free_now, nvml_used());
    pause();
}

static void run(uint64_t window, int windows) {
    load("spin_for_1ms");
    for (; windows; windows--) {
        uint64_t from = now(), launches = 0;
        for (; now() - from < window; launches++) {
            launch();
            if (launches % 4 == 3) synchronize();
        }
        synchronize();
        say("{\"gpu\":%f}", (double)launches * 1e6 / (double)(now() - from));
    }
}

/* The queue is emptied between batches: who waits for room in it would measure kernels. */
static double batches(void (*once)(void), int count) {
    double each[BATCHES];
    for (int batch = -1; batch < BATCHES; batch++) {
        uint64_t from = now();
        for (int at = 0; at < count; at++) once();
        if (batch >= 0) each[batch] = (double)(now() - from) / count;
        synchronize();
    }
    return median(each);
}

static void *executable;
static void replay(void) { ok(CU(cuGraphLaunch, executable, stream), "graph"); }

static void record_graph(void) {
    void *captured;
    ok(CU(cuStreamBeginCapture_v2, stream, 0), "capture");
    for (int at = 0; at < NODES; at++) launch();
    ok(CU(cuStreamEndCapture, stream, &captured), "end of capture");
    ok(CU(cuGraphInstantiateWithFlags, &executable, captured, 0ull), "instantiate");
}

/* Kernels of a graph that is replayed for two seconds: nothing but the GPU should hold it up. */
static uint64_t replayed(void) {
    uint64_t from = now(), kernels = 0;
    for (; now() - from < 2ull * SECOND; synchronize())
        for (int at = 0; at < 8; at++, kernels += NODES) replay();
    return kernels;
}

static void launches(int count) {
    load("spin_for_1us");
    double one = batches(launch, count);
    record_graph();
    double graph = batches(replay, count / NODES + 1);
    say("{\"launch\":%f,\"graph\":%f,\"replayed\":%lu}", one, graph, replayed());
}

static void pair(void) {
    uint64_t pointer;
    ok(CU(cuMemAlloc_v2, &pointer, 2 * MIB), "allocation");
    ok(CU(cuMemFree_v2, pointer), "free");
}

static void memory(int count) {
    load("spin_for_1us");
    say("{\"pair\":%f}", batches(pair, count));
}

static int (*bare_nvml)(void *, uint64_t *);
static uint64_t charged_before, used_before;

/* What came since the beginning, by the ledger and by NVML. */
static void since(const char *step) {
    synchronize();
    say("{\"step\":\"%s\",\"ledger\":%ld,\"driver\":%ld}", step, (long)(charged() - charged_before),
        (long)(nvml_used_by(bare_nvml) - used_before));
}

static void pools(void) {
    void *pool;
    uint64_t pointer, all = UINT64_MAX;
    ok(CU(cuDeviceGetDefaultMemPool, &pool, 0), "pool");
    ok(CU(cuMemPoolSetAttribute, pool, 4, &all), "threshold");
    ok(CU(cuMemAllocAsync, &pointer, 256 * MIB, stream), "of the pool");
    since("pool: 256 MiB taken");
    ok(CU(cuMemFreeAsync, pointer, stream), "back to the pool");
    since("pool: given back, kept");
    ok(CU(cuMemPoolTrimTo, pool, (size_t)0), "trim");
    since("pool: trimmed");
}

struct property {
    int type, handles, location_type, location;
    void *windows;
    uint8_t compression, rdma;
    uint16_t usage;
    uint8_t reserved[4];
};
struct access { int type, id, flags; };

static void mapped(void) {
    const struct property property = {1, 0, 1, 0, 0, 0, 0, 0, {0}};
    const struct access access = {1, 0, 3};
    uint64_t at, handle;
    size_t bytes = 256 * MIB;
    ok(CU(cuMemAddressReserve, &at, bytes, (size_t)0, (uint64_t)0, 0ull), "reserve");
    ok(CU(cuMemCreate, &handle, bytes, &property, 0ull), "create");
    ok(CU(cuMemMap, at, bytes, (size_t)0, handle, 0ull), "map");
    ok(CU(cuMemSetAccess, at, bytes, &access, (size_t)1), "access");
    since("cuMemCreate: 256 MiB mapped");
    ok(CU(cuMemUnmap, at, bytes), "unmap");
    ok(CU(cuMemRelease, handle), "release");
    ok(CU(cuMemAddressFree, at, bytes), "free of the range");
    since("cuMemCreate: released");
}

static void graphs(void) {
    void *captured, *run;
    uint64_t pointer;
    ok(CU(cuStreamBeginCapture_v2, stream, 2), "capture");
    ok(CU(cuMemAllocAsync, &pointer, 256 * MIB, stream), "node");
    ok(CU(cuMemFreeAsync, pointer, stream), "node");
    ok(CU(cuStreamEndCapture, stream, &captured), "end of capture");
    ok(CU(cuGraphInstantiateWithFlags, &run, captured, 0ull), "instantiate");
    ok(CU(cuGraphLaunch, run, stream), "graph");
    since("graph: 256 MiB while it runs");
    ok(CU(cuGraphExecDestroy, run), "destroy");
    ok(CU(cuGraphDestroy, captured), "destroy");
    ok(CU(cuDeviceGraphMemTrim, 0), "trim");
    since("graph: destroyed and trimmed");
}

static void agree(char **arguments) {
    uint64_t pointer;
    void *(*bare)(void *, const char *);
    open_both(arguments);
    bare = (void *(*)(void *, const char *))must(dlsym(must(dlopen(arguments[1], RTLD_NOW | RTLD_DEEPBIND), "bare"), "bare"), "bare");
    bare_nvml = (int (*)(void *, uint64_t *))must(bare(nvml(), "nvmlDeviceGetMemoryInfo"), "NVML's memory");
    load("spin_for_1us");
    launch();
    synchronize();
    charged_before = charged(), used_before = nvml_used_by(bare_nvml);
    ok(CU(cuMemAlloc_v2, &pointer, 256 * MIB), "allocation");
    since("cuMemAlloc: 256 MiB");
    ok(CU(cuMemFree_v2, pointer), "free");
    since("cuMemAlloc: freed");
    pools();
    mapped();
    graphs();
}

static long number(char **arguments, int count, int at) {
    if (at >= count) ok(1, "an argument too few");
    return atol(arguments[at]);
}

int main(int count, char **arguments) {
    const char *what = count > 1 ? arguments[1] : "";
    if (!strcmp(what, "who")) return who();
    else if (!strcmp(what, "used")) ok(CU(cuInit, 0), "init"), say("{\"used\":%lu}", nvml_used());
    else if (!strcmp(what, "context")) context();
    else if (!strcmp(what, "calibrate")) calibrate();
    else if (!strcmp(what, "fill")) fill();
    else if (!strcmp(what, "run")) {
        rounds = (uint64_t)number(arguments, count, 2);
        run((uint64_t)number(arguments, count, 3) * 1000000, (int)number(arguments, count, 4));
    } else if (!strcmp(what, "launch")) {
        launches((int)number(arguments, count, 2));
    } else if (!strcmp(what, "memory")) memory((int)number(arguments, count, 2));
    else if (!strcmp(what, "agree") && count > 4) agree(arguments + 1);
    else ok(1, "what it is told");
    return 0;
}
