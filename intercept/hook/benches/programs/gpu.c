/* Asks a real driver, or the fake one: a line of JSON for each thing found.
 *
 *   gpu who                      the GPU and its driver; {"none":REASON} where there is none
 *   gpu used                     memory in use on GPU 0, by NVML
 *   gpu context                  what a context, a module and a launch take of GPU 0, by NVML
 *   gpu calibrate                rounds of the kernel that take a millisecond, when nobody else uses the GPU
 *   gpu fill [managed]           takes memory until it is refused, says what it sees then, and waits
 *   gpu beyond BYTES             takes that much, which is more than the GPU has, writes all of it and reads it back
 *   gpu run ROUNDS MS WINDOWS    kernels of a millisecond, as many as it gets: a line for each window
 *   gpu small ROUNDS MS WINDOWS  the same of one block each, which leave most of the GPU to others
 *   gpu latency N                a short launch and the wait for it, N times, in ns: median and 99th percentile
 *   gpu count N                  N launches, for a profiler to count
 *   gpu processors               multiprocessors of GPU 0, as CUDA says
 *   gpu launch N                 one launch, and one replay of a graph of 20, in ns: medians of 31 batches of N; kernels in 2 s
 *   gpu awaited ROUNDS MS        a kernel of 2 us and the wait for it, in ns
 *   gpu streams ROUNDS MS        kernels of 200 us and one block in 8 streams, in ns per kernel
 *   gpu overlap ROUNDS           200 kernels of 2 us beside one of 20 ms in another stream, in ns
 *   gpu shapes ROUNDS            a launch of one of 3,000 shapes in turn, in ns, after one of each
 *   gpu nodes ROUNDS MS          replays of a graph of 2,000 kernels of 2 us, in ns per kernel
 *   gpu half ROUNDS MS           kernels of a millisecond with half a CPU: part of the GPU's time
 *   gpu info PROCESSES N         cuMemGetInfo beside so many other processes, in ns: median of 31 batches of N
 *   gpu slice ROUNDS             kernels of 20 ms until it is killed, which leave the GPU at the end of each time slice
 *   gpu utilization MS           NVML's utilization of all processes, after so long: how many, the sum, the largest
 *   gpu opened                   what NVML counts more for all processes when one opens 256 MiB of another
 *   gpu events N                 the record of an event, in ns: median of 31 batches of N
 *   gpu memory N                 one allocation and its free, in ns: median of 31 batches of N
 *   gpu agree BARE AT SHIFT      what ledger and driver say after each kind of allocation (both.h has the arguments)
 */
#include "both.h"
#include <limits.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>

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
static const char IMAGE[] = ".version 6.0\n.target sm_60\n.address_size 64\n" KERNEL("spin_for_1ms") KERNEL("spin_for_1us")
    KERNEL("spin_for_2us") KERNEL("spin_for_200us") KERNEL("spin_for_20ms");

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

/* The value that so much of all are below, in sorted ones. */
static double part(double *each, size_t count, double part) {
    qsort(each, count, sizeof *each, compare);
    return each[(size_t)((double)(count - 1) * part + 0.5)];
}

static double median(double *each) { return part(each, BATCHES, 0.5); }

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

static void *nvml_device(void) {
    char uuid[64];
    void *device;
    int (*by_uuid)(const char *, void **) = must(dlsym(nvml(), "nvmlDeviceGetHandleByUUID"), "nvmlDeviceGetHandleByUUID");
    uuid_of_gpu(uuid);
    ok(by_uuid(uuid, &device), "NVML's handle");
    return device;
}

static uint64_t nvml_used_by(int (*info)(void *, uint64_t *)) {
    uint64_t total_free_used[3];
    ok(info(nvml_device(), total_free_used), "NVML's memory");
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

/* The file that the loader has a function of the driver from. */
static const char *file_of(void *function, char *path) {
    Dl_info info;
    if (!dladdr(function, &info) || !realpath(info.dli_fname, path)) ok(1, "the driver's file");
    return path;
}

static int who(void) {
    char cuda_file[PATH_MAX], nvml_file[PATH_MAX];
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
    file_of(must(dlsym(driver(), "cuInit"), "cuInit"), cuda_file);
    file_of(must(dlsym(nvml(), "nvmlInit_v2"), "nvmlInit_v2"), nvml_file);
    say("{\"name\":\"%s\",\"uuid\":\"%s\",\"cuda\":%d,\"driver\":\"%s\",\"total\":%zu,\"libcuda\":\"%s\",\"libnvml\":\"%s\"}",
        name, uuid, cuda, version, total, cuda_file, nvml_file);
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

/* Managed memory is attached to all streams, as by default. */
static int take(int managed, uint64_t *pointer, size_t bytes) {
    return managed ? CU(cuMemAllocManaged, pointer, bytes, 1u) : CU(cuMemAlloc_v2, pointer, bytes);
}

static void fill(int managed) {
    size_t piece = 256 * MIB, taken = 0, free_now, total;
    uint64_t pointer;
    begin();
    for (int result; piece >= MIB;) {
        result = take(managed, &pointer, piece);
        if (!result) taken += piece;
        else if (result == 2) piece /= 2;
        else ok(result, "allocation");
    }
    ok(CU(cuMemGetInfo_v2, &free_now, &total), "info");
    say("{\"taken\":%zu,\"total\":%zu,\"cudaUsed\":%zu,\"nvmlUsed\":%lu}", taken, total, total - free_now, nvml_used());
    pause();
}

enum { PIECE = 16 << 20, WORDS = PIECE / 4 };

/* No two words of memory beyond the GPU's are to be taken for each other. */
static uint32_t mark(uint64_t piece) { return (uint32_t)(piece * 2654435761u + 1); }

/* Where the host may look at it: memory that may leave the GPU is managed. */
static volatile uint32_t *word_of(uint64_t memory, uint64_t piece) { return (volatile uint32_t *)(memory + piece * PIECE); }

/* The GPU writes all, then writes the first half over the second; all of it is brought to the host and compared. */
static uint64_t wrong_by_gpu(uint64_t memory, uint64_t pieces, uint64_t *checked) {
    uint32_t *words = must(malloc(PIECE), "memory of the host");
    uint64_t wrong = 0, half = pieces / 2;
    for (uint64_t at = 0; at < pieces; at++) ok(CU(cuMemsetD32_v2, memory + at * PIECE, mark(at), (size_t)WORDS), "fill");
    for (uint64_t at = 0; at < half; at++)
        ok(CU(cuMemcpyDtoD_v2, memory + (half + at) * PIECE, memory + at * PIECE, (size_t)PIECE), "copy on the GPU");
    for (uint64_t at = 0; at < pieces; at++) {
        uint32_t wanted = mark(at >= half && at < 2 * half ? at - half : at);
        ok(CU(cuMemcpyDtoH_v2, words, memory + at * PIECE, (size_t)PIECE), "copy to the host");
        for (int word = 0; word < WORDS; word++, ++*checked) wrong += words[word] != wanted;
    }
    return wrong;
}

/* A word of each piece, by the host alone. */
static uint64_t wrong_by_host(uint64_t memory, uint64_t pieces, uint64_t *checked) {
    uint64_t wrong = 0;
    for (uint64_t at = 0; at < pieces; at++) *word_of(memory, at) = mark(at);
    for (uint64_t at = 0; at < pieces; at++, ++*checked) wrong += *word_of(memory, at) != mark(at);
    return wrong;
}

static void beyond(size_t bytes) {
    uint64_t memory, checked = 0, pieces = bytes / PIECE, wrong;
    begin();
    ok(CU(cuMemAlloc_v2, &memory, bytes), "more than the GPU has");
    /* The fake driver's GPU writes nothing. */
    ok(CU(cuMemsetD32_v2, memory, mark(0), (size_t)1), "fill");
    ok(CU(cuCtxSynchronize), "synchronize");
    int gpu = *word_of(memory, 0) == mark(0);
    wrong = gpu ? wrong_by_gpu(memory, pieces, &checked) : wrong_by_host(memory, pieces, &checked);
    say("{\"taken\":%zu,\"gpu\":%d,\"checked\":%lu,\"wrong\":%lu}", bytes, gpu, checked, wrong);
}

static void run(uint64_t window, int windows) {
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

static void record_graph(int nodes) {
    void *captured;
    ok(CU(cuStreamBeginCapture_v2, stream, 0), "capture");
    for (int at = 0; at < nodes; at++) launch();
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
    record_graph(NODES);
    double graph = batches(replay, count / NODES + 1);
    say("{\"launch\":%f,\"graph\":%f,\"replayed\":%lu}", one, graph, replayed());
}

static void latency(size_t count) {
    double *each = must(calloc(count, sizeof *each), "memory of the host");
    load("spin_for_1us");
    launch();
    synchronize();
    for (size_t at = 0; at < count; at++) {
        uint64_t from = now();
        launch();
        synchronize();
        each[at] = (double)(now() - from);
    }
    double middle = part(each, count, 0.5);
    say("{\"p50\":%f,\"p99\":%f}", middle, part(each, count, 0.99));
}

/* Loads a kernel that takes a part of a millisecond, of so many rounds. */
static void load_part(const char *name, long rounds_of_1ms, int part) {
    load(name);
    rounds = (uint64_t)rounds_of_1ms / (uint64_t)part;
    launch();
    synchronize();
}

/* Time of each kernel while `once` launches so many at a time, until a time is over. */
static void timed(void (*once)(void), int kernels, uint64_t window) {
    uint64_t from = now(), launched = 0;
    do once(), launched += (uint64_t)kernels;
    while (now() - from < window);
    ok(CU(cuCtxSynchronize), "synchronize");
    say("{\"ns\":%f}", (double)(now() - from) / (double)launched);
}

static void awaited(void) { launch(), synchronize(); }

enum { STREAMS = 8, SHAPES = 3000, LONG_GRAPH = 2000 };

static void *streams[STREAMS];

/* Eight kernels in each stream. */
static void in_streams(void) {
    for (int at = 0; at < 8 * STREAMS; at++) stream = streams[at % STREAMS], launch();
    ok(CU(cuCtxSynchronize), "synchronize");
}

static void many_streams(long rounds_of_1ms, uint64_t window) {
    load_part("spin_for_200us", rounds_of_1ms, 5);
    processors = 1;
    for (int at = 0; at < STREAMS; at++) ok(CU(cuStreamCreate, &streams[at], 1), "stream");
    timed(in_streams, 8 * STREAMS, window);
}

static void overlap(long rounds_of_1ms) {
    void *other;
    load("spin_for_20ms");
    ok(CU(cuStreamCreate, &other, 1), "stream");
    void *long_kernel = kernel, *parameters[] = {&rounds, &out};
    load_part("spin_for_2us", rounds_of_1ms, 500);
    rounds = (uint64_t)rounds_of_1ms * 20;
    ok(CU(cuLaunchKernel, long_kernel, 1, 1, 1, 128, 1, 1, 0, other, parameters, (void *)0), "launch");
    rounds = (uint64_t)rounds_of_1ms / 500;
    uint64_t from = now();
    for (int at = 0; at < 200; at++) launch();
    synchronize();
    say("{\"ns\":%f}", (double)(now() - from));
    ok(CU(cuCtxSynchronize), "synchronize");
}

static void all_shapes(void) {
    void *parameters[] = {&rounds, &out};
    for (int at = 0; at < SHAPES; at++)
        ok(CU(cuLaunchKernel, kernel, 1 + at % 50, 1 + at / 50 % 15, 1, 32 * (1 + at / 750), 1, 1, 0, stream, parameters, (void *)0), "launch");
    synchronize();
}

static void shapes(long rounds_of_1ms) {
    load_part("spin_for_2us", rounds_of_1ms, 500);
    all_shapes();
    timed(all_shapes, SHAPES, 1);
}

static void replay_awaited(void) { replay(), synchronize(); }

static void nodes(long rounds_of_1ms, uint64_t window) {
    load_part("spin_for_2us", rounds_of_1ms, 500);
    record_graph(LONG_GRAPH);
    replay_awaited();
    timed(replay_awaited, LONG_GRAPH, window);
}

/* Stops the process for the second half of each 100 ms, until it has ended: what the kernel does with a CPU limit of 500m. */
static void halve(pid_t process) {
    const struct timespec half = {0, 50 * 1000000};
    int status;
    for (nanosleep(&half, 0); !waitpid(process, &status, WNOHANG); nanosleep(&half, 0)) {
        kill(process, SIGSTOP);
        nanosleep(&half, 0);
        kill(process, SIGCONT);
    }
    ok(status, "the process with half a CPU");
}

/* The first window has the tokens that there are in the beginning. */
static void half(uint64_t window) {
    pid_t process = fork();
    if (process) {
        halve(process);
        return;
    }
    load("spin_for_1ms");
    run(window, 2);
    _exit(0);
}

static void ask_info(void) {
    size_t free_now, total;
    ok(CU(cuMemGetInfo_v2, &free_now, &total), "info");
}

/* Each of the others has a context before this process begins. */
static void info(int processes, int count) {
    int ready[2], end[2];
    char byte = 0;
    ok(pipe(ready) || pipe(end), "pipes");
    for (int at = 0; at < processes; at++) {
        if (fork()) continue;
        close(end[1]);
        load("spin_for_1us");
        ok(write(ready[1], &byte, 1) != 1, "ready");
        _exit(read(end[0], &byte, 1) < 0);
    }
    close(end[0]);
    close(ready[1]);
    for (int at = 0; at < processes; at++) ok(read(ready[0], &byte, 1) != 1, "others are ready");
    load("spin_for_1us");
    say("{\"ns\":%f}", batches(ask_info, count));
    close(end[1]);
    while (wait(0) > 0) {}
}

enum { MOST_PROCESSES = 256 };

/* nvmlProcessUtilizationSample_t: pid, time, and the utilization of the multiprocessors. */
struct sample { unsigned pid; uint64_t time; unsigned multiprocessors, rest[3]; };

/* Samples since a time of NVML; the time of the last one. */
static uint64_t utilization_since(uint64_t since, int is_said) {
    static struct sample samples[MOST_PROCESSES];
    unsigned count = MOST_PROCESSES, sum = 0, largest = 0;
    int (*utilization)(void *, struct sample *, unsigned *, uint64_t) =
        must(dlsym(nvml(), "nvmlDeviceGetProcessUtilization"), "nvmlDeviceGetProcessUtilization");
    ok(utilization(nvml_device(), samples, &count, since), "utilization");
    for (unsigned at = 0; at < count; at++) {
        sum += samples[at].multiprocessors;
        if (samples[at].multiprocessors > largest) largest = samples[at].multiprocessors;
        if (samples[at].time > since) since = samples[at].time;
    }
    if (is_said) say("{\"processes\":%u,\"sum\":%u,\"largest\":%u}", count, sum, largest);
    return since;
}

static void utilization(uint64_t window) {
    const struct timespec wait = {(time_t)(window / SECOND), (long)(window % SECOND)};
    ok(CU(cuInit, 0), "init");
    uint64_t since = utilization_since(0, 0);
    nanosleep(&wait, 0);
    utilization_since(since, 1);
}

/* nvmlProcessInfo_t */
struct process { unsigned pid; uint64_t bytes; unsigned instance, compute_instance; };

/* Memory of all processes with a context on the GPU. */
static uint64_t nvml_of_processes(void) {
    static struct process processes[MOST_PROCESSES];
    unsigned count = MOST_PROCESSES;
    uint64_t sum = 0;
    int (*running)(void *, unsigned *, struct process *) =
        must(dlsym(nvml(), "nvmlDeviceGetComputeRunningProcesses_v3"), "nvmlDeviceGetComputeRunningProcesses_v3");
    ok(running(nvml_device(), &count, processes), "processes");
    for (unsigned at = 0; at < count; at++) sum += processes[at].bytes;
    return sum;
}

struct handle { uint64_t words[8]; };

static void opened(void) {
    int ready[2], end[2];
    char byte = 0;
    uint64_t memory;
    struct handle handle;
    ok(pipe(ready) || pipe(end), "pipes");
    if (!fork()) {
        begin();
        ok(CU(cuMemAlloc_v2, &memory, 256 * MIB), "allocation");
        ok(CU(cuIpcGetMemHandle, &handle, memory), "handle");
        ok(write(ready[1], &handle, sizeof handle) != sizeof handle, "hand over");
        _exit(read(end[0], &byte, 1) < 0);
    }
    ok(read(ready[0], &handle, sizeof handle) != sizeof handle, "handed over");
    begin();
    uint64_t before = nvml_of_processes();
    ok(CU(cuIpcOpenMemHandle_v2, &memory, handle, 1), "open");
    say("{\"counted\":%ld}", (long)(nvml_of_processes() - before));
    ok(write(end[1], &byte, 1) != 1, "end");
    wait(0);
}

static void *recorded;
static void record_event(void) { ok(CU(cuEventRecord, recorded, stream), "record"); }

static void events(int count) {
    load("spin_for_1us");
    ok(CU(cuEventCreate, &recorded, 0), "event");
    say("{\"ns\":%f}", batches(record_event, count));
}

static void count_launches(int count) {
    load("spin_for_1us");
    for (int at = 0; at < count; at++) launch();
    synchronize();
    say("{\"launched\":%d}", count);
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
    else if (!strcmp(what, "fill")) fill(count > 2 && !strcmp(arguments[2], "managed"));
    else if (!strcmp(what, "beyond")) beyond((size_t)number(arguments, count, 2));
    else if (!strcmp(what, "latency")) latency((size_t)number(arguments, count, 2));
    else if (!strcmp(what, "count")) count_launches((int)number(arguments, count, 2));
    else if (!strcmp(what, "processors")) load("spin_for_1us"), say("{\"processors\":%d}", processors);
    else if (!strcmp(what, "run") || !strcmp(what, "small")) {
        load("spin_for_1ms");
        if (!strcmp(what, "small")) processors = 1;
        rounds = (uint64_t)number(arguments, count, 2);
        run((uint64_t)number(arguments, count, 3) * 1000000, (int)number(arguments, count, 4));
    } else if (!strcmp(what, "launch")) {
        launches((int)number(arguments, count, 2));
    } else if (!strcmp(what, "awaited")) {
        load_part("spin_for_2us", number(arguments, count, 2), 500);
        timed(awaited, 1, (uint64_t)number(arguments, count, 3) * 1000000);
    } else if (!strcmp(what, "streams")) many_streams(number(arguments, count, 2), (uint64_t)number(arguments, count, 3) * 1000000);
    else if (!strcmp(what, "overlap")) overlap(number(arguments, count, 2));
    else if (!strcmp(what, "shapes")) shapes(number(arguments, count, 2));
    else if (!strcmp(what, "nodes")) nodes(number(arguments, count, 2), (uint64_t)number(arguments, count, 3) * 1000000);
    else if (!strcmp(what, "half")) rounds = (uint64_t)number(arguments, count, 2), half((uint64_t)number(arguments, count, 3) * 1000000);
    else if (!strcmp(what, "info")) info((int)number(arguments, count, 2), (int)number(arguments, count, 3));
    else if (!strcmp(what, "slice")) {
        load("spin_for_20ms");
        rounds = (uint64_t)number(arguments, count, 2) * 20;
        for (;;) run(100 * 1000000, 1);
    } else if (!strcmp(what, "utilization")) utilization((uint64_t)number(arguments, count, 2) * 1000000);
    else if (!strcmp(what, "opened")) opened();
    else if (!strcmp(what, "events")) events((int)number(arguments, count, 2));
    else if (!strcmp(what, "memory")) memory((int)number(arguments, count, 2));
    else if (!strcmp(what, "agree") && count > 4) agree(arguments + 1);
    else ok(1, "what it is told");
    return 0;
}
