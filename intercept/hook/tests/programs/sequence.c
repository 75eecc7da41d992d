/* What frameworks ask of the driver, in their order: synthetic, by what their sources do, until recorded on hardware.
 *
 *   sequence pytorch     caching allocator, stream-ordered pool, expandable segments, a captured graph and its replays
 *   sequence vllm        weights, KV cache, memory shared as NCCL does, a graph for each batch size
 *   sequence fill        a framework that takes until it is refused, empties its cache and goes on
 *
 * Every call is a line of JSON with what it answered: never an address or a handle, which nobody may depend on. Functions are
 * asked for as a CUDA 12.9 runtime asks for them.
 */
#include "driver.h"

#define RELEASE 12090

static int (*get_proc)(const char *, void **, int, uint64_t, int *);
static int quiet;

static void *function_of(const char *name) {
    void *found = 0;
    int status = 0;
    if (!get_proc) get_proc = (int (*)(const char *, void **, int, uint64_t, int *))must(dlsym(driver(), "cuGetProcAddress_v2"), name);
    ok(get_proc(name, &found, RELEASE, 0, &status), name);
    return must(found, name);
}

static int told(const char *name, int result) {
    if (!quiet) say("{\"call\":\"%s\",\"result\":%d}", name, result);
    return result;
}

#define CALL(name, ...) told(#name, ((int (*)())function_of(#name))(__VA_ARGS__))

enum { STREAMS = 4, EVENTS = 8 };

struct location { int type, id; };
struct property {
    int type, handle_types;
    struct location location;
    void *win32;
    uint8_t compression, rdma;
    uint16_t usage;
    uint8_t reserved[4];
};
struct access { struct location location; int flags; };

/* Pinned memory of GPU 0, to be given to other processes as descriptors. */
static const struct property ON_GPU = {1, 1, {1, 0}, 0, 0, 0, 0, {0}};
static const struct access READ_WRITE = {{1, 0}, 3};

static void *context, *module, *kernel, *streams[STREAMS], *events[EVENTS];

static void start(void) {
    int count, device, value;
    char name[64];
    CALL(cuInit, 0);
    CALL(cuDriverGetVersion, &value);
    CALL(cuDeviceGetCount, &count);
    CALL(cuDeviceGet, &device, 0);
    CALL(cuDeviceGetName, name, 64, device);
    CALL(cuDeviceGetAttribute, &value, 75, device);
    CALL(cuDeviceGetAttribute, &value, 16, device);
    CALL(cuDevicePrimaryCtxRetain, &context, device);
    CALL(cuCtxSetCurrent, context);
    CALL(cuModuleLoadData, &module, "image");
    CALL(cuModuleGetFunction, &kernel, module, "spin_for_1us");
    for (int at = 0; at < STREAMS; at++) CALL(cuStreamCreateWithPriority, &streams[at], 1, 0);
    for (int at = 0; at < EVENTS; at++) CALL(cuEventCreate, &events[at], 2);
}

static void launch(void *stream, unsigned blocks) {
    CALL(cuLaunchKernel, kernel, blocks, 1, 1, 128, 1, 1, 0, stream, (void *)0, (void *)0);
}

/* Blocks of 2 and of 20 MiB and large ones, some of which go to another stream and back before they are reused. */
static void caching_allocator(void) {
    uint64_t blocks[54];
    for (int at = 0; at < 54; at++) {
        size_t bytes = at < 20 ? 2 * MIB : at < 50 ? 20 * MIB : 512 * MIB;
        CALL(cuMemAlloc, &blocks[at], bytes);
    }
    for (int round = 0; round < 50; round++) {
        launch(streams[round % STREAMS], 1 + (unsigned)round);
        CALL(cuEventRecord, events[round % EVENTS], streams[round % STREAMS]);
        CALL(cuStreamWaitEvent, streams[(round + 1) % STREAMS], events[round % EVENTS], 0);
    }
    CALL(cuCtxSynchronize);
    for (int at = 0; at < 54; at++) CALL(cuMemFree, blocks[at]);
    /* Twice: the driver's own error. */
    CALL(cuMemFree, blocks[0]);
}

static void pool(void) {
    void *of_device;
    uint64_t all = UINT64_MAX, blocks[40];
    CALL(cuDeviceGetDefaultMemPool, &of_device, 0);
    CALL(cuMemPoolSetAttribute, of_device, 4, &all);
    for (int round = 0; round < 3; round++) {
        for (int at = 0; at < 40; at++) CALL(cuMemAllocAsync, &blocks[at], (size_t)(1 + at % 7) * MIB, streams[at % STREAMS]);
        for (int at = 0; at < STREAMS; at++) launch(streams[at], 8);
        for (int at = 0; at < 40; at++) CALL(cuMemFreeAsync, blocks[at], streams[at % STREAMS]);
        CALL(cuStreamSynchronize, streams[0]);
    }
    CALL(cuCtxSynchronize);
    CALL(cuMemPoolTrimTo, of_device, (size_t)0);
}

/* A range of addresses that grows by pieces of physical memory, gives some up in the middle, and grows again. */
static void expandable_segment(void) {
    enum { PIECES = 24 };
    size_t granularity, piece = 20 * MIB;
    uint64_t range, handles[PIECES];
    CALL(cuMemGetAllocationGranularity, &granularity, &ON_GPU, 1);
    CALL(cuMemAddressReserve, &range, piece * PIECES, (size_t)0, (uint64_t)0, 0ull);
    for (int round = 0; round < 2; round++) {
        for (int at = round ? PIECES / 2 : 0; at < PIECES; at++) {
            CALL(cuMemCreate, &handles[at], piece, &ON_GPU, 0ull);
            CALL(cuMemMap, range + (uint64_t)at * piece, piece, (size_t)0, handles[at], 0ull);
            CALL(cuMemSetAccess, range + (uint64_t)at * piece, piece, &READ_WRITE, (size_t)1);
        }
        for (int at = round ? 0 : PIECES / 2; at < PIECES; at++) {
            CALL(cuMemUnmap, range + (uint64_t)at * piece, piece);
            CALL(cuMemRelease, handles[at]);
        }
    }
    CALL(cuMemAddressFree, range, piece * PIECES);
}

static void graph(unsigned blocks, int replays) {
    void *captured, *executable;
    int capturing;
    CALL(cuStreamBeginCapture, streams[1], 1);
    for (int at = 0; at < 20; at++) launch(streams[1], blocks);
    CALL(cuStreamIsCapturing, streams[1], &capturing);
    CALL(cuStreamEndCapture, streams[1], &captured);
    CALL(cuGraphInstantiateWithFlags, &executable, captured, 0ull);
    for (int at = 0; at < replays; at++) CALL(cuGraphLaunch, executable, streams[1]);
    CALL(cuStreamSynchronize, streams[1]);
    CALL(cuGraphExecDestroy, executable);
    CALL(cuGraphDestroy, captured);
}

/* NCCL: a buffer that other processes map, from a descriptor. */
static void shared_buffer(void) {
    uint64_t handle, imported, range;
    int descriptor = -1;
    size_t bytes = 32 * MIB;
    CALL(cuMemCreate, &handle, bytes, &ON_GPU, 0ull);
    CALL(cuMemExportToShareableHandle, &descriptor, handle, 1, 0ull);
    CALL(cuMemImportFromShareableHandle, &imported, (void *)(uintptr_t)descriptor, 1);
    CALL(cuMemAddressReserve, &range, bytes, (size_t)0, (uint64_t)0, 0ull);
    CALL(cuMemMap, range, bytes, (size_t)0, imported, 0ull);
    CALL(cuMemSetAccess, range, bytes, &READ_WRITE, (size_t)1);
    CALL(cuMemRelease, imported);
    CALL(cuMemRelease, handle);
    launch(streams[2], 4);
    CALL(cuStreamSynchronize, streams[2]);
    CALL(cuMemUnmap, range, bytes);
    CALL(cuMemAddressFree, range, bytes);
    close(descriptor);
}

static void pytorch(void) {
    caching_allocator();
    pool();
    expandable_segment();
    graph(16, 50);
}

static void vllm(void) {
    enum { LAYERS = 32 };
    uint64_t weights[LAYERS], cache[LAYERS];
    for (int at = 0; at < LAYERS; at++) CALL(cuMemAlloc, &weights[at], 400 * MIB);
    shared_buffer();
    for (int at = 0; at < LAYERS; at++) CALL(cuMemAlloc, &cache[at], 600 * MIB);
    for (unsigned batch = 1; batch <= 128; batch *= 2) graph(batch, 10);
    pool();
    for (int at = 0; at < LAYERS; at++) CALL(cuMemFree, cache[at]), CALL(cuMemFree, weights[at]);
}

/* Takes GiB until it is refused, gives half of them back, and works on. */
static void fill(void) {
    enum { MOST = 100 };
    uint64_t blocks[MOST];
    int taken = 0, result;
    quiet = 1;
    while (taken < MOST && !(result = CALL(cuMemAlloc, &blocks[taken], GIB))) taken++;
    quiet = 0;
    told("refused", result);
    for (int at = 0; at < taken / 2; at++) CALL(cuMemFree, blocks[at]);
    pytorch();
    for (int at = taken / 2; at < taken; at++) CALL(cuMemFree, blocks[at]);
    say("{\"taken\":%d}", taken);
}

static void stop(void) {
    for (int at = 0; at < EVENTS; at++) CALL(cuEventDestroy, events[at]);
    for (int at = 0; at < STREAMS; at++) CALL(cuStreamDestroy, streams[at]);
    CALL(cuModuleUnload, module);
    CALL(cuCtxSynchronize);
}

int main(int argc, char **argv) {
    const char *which = argc > 1 ? argv[1] : "";
    start();
    if (!strcmp(which, "pytorch")) pytorch();
    else if (!strcmp(which, "vllm")) vllm();
    else fill();
    stop();
    /* Hold on until the ledger was looked at. */
    say("{\"done\":true}");
    if (argc > 2) pause();
    CALL(cuDevicePrimaryCtxRelease, 0);
    return 0;
}
