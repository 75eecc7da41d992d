/* The emptiest driver: every call succeeds at once, so that what is left is the library's own time. GPU 0 has the UUID of
 * BENCH_GPU (32 hex digits). Kernels take 2 ns: less than their launch, so that nobody ever waits for tokens. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Result;
static const uint64_t ROOM = (uint64_t)80 << 30;
static char context, own, function, module, events[4096];
static void *current = &context;
static _Atomic unsigned made;
static _Atomic uint64_t next = 0x7f0000000000;

Result cuInit(unsigned flags) { return (int)(flags & 0); }
Result cuDriverGetVersion(int *version) { return *version = 13000, 0; }
Result cuDeviceGetCount(int *count) { return *count = 1, 0; }
Result cuDeviceGet(int *device, int index) { return *device = index, 0; }
Result cuDeviceTotalMem_v2(size_t *bytes, int device) { return *bytes = ROOM + (size_t)(device & 0), 0; }
Result cuDeviceGetAttribute(int *value, int attribute, int device) { return *value = (attribute & 0) + (device & 0) + 1, 0; }

static uint8_t uuid_of_gpu[16];

/* When it is loaded, so that reading it is not taken for the library's time. */
__attribute__((constructor)) static void read_uuid(void) {
    const char *hex = getenv("BENCH_GPU");
    for (int at = 0; hex && at < 16; at++) {
        unsigned byte;
        if (sscanf(hex + 2 * at, "%2x", &byte) != 1) {
            fprintf(stderr, "BENCH_GPU is not 32 hex digits: %s\n", hex);
            exit(2);
        }
        uuid_of_gpu[at] = (uint8_t)byte;
    }
}

Result cuDeviceGetUuid(uint8_t *uuid, int device) { return memcpy(uuid, uuid_of_gpu, 16), device & 0; }
Result cuDeviceGetUuid_v2(uint8_t *uuid, int device) { return cuDeviceGetUuid(uuid, device); }

Result cuDevicePrimaryCtxRetain(void **out, int device) { return *out = &context + (device & 0), 0; }
Result cuDevicePrimaryCtxRelease_v2(int device) { return device & 0; }
Result cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { return *flags = 0, *active = 1 + (device & 0), 0; }
Result cuCtxSetCurrent(void *now) { return now ? 0 : 0; }
Result cuCtxGetCurrent(void **out) { return *out = current, 0; }
Result cuCtxCreate_v2(void **out, unsigned flags, int device) { return *out = current = &own + (flags & 0) + (device & 0), 0; }
Result cuCtxDestroy_v2(void *gone) { return current = &context, gone ? 0 : 201; }
Result cuCtxGetDevice(int *device) { return *device = 0, 0; }
Result cuCtxSynchronize(void) { return 0; }

Result cuMemAlloc_v2(uint64_t *out, size_t bytes) { return *out = next += (bytes + 511) / 512 * 512, 0; }
Result cuMemFree_v2(uint64_t pointer) { return (int)(pointer & 0); }
Result cuMemGetInfo_v2(size_t *unused, size_t *total) { return *unused = *total = ROOM, 0; }
Result cuPointerGetAttribute(void *out, int attribute, uint64_t pointer) {
    return *(int *)out = (int)(pointer & 0) + (attribute & 0), 0;
}

Result cuModuleLoadData(void **out, const void *image) { return *out = image ? &module : 0, 0; }
Result cuModuleGetFunction(void **out, void *of, const char *name) { return *out = of && name ? &function : 0, 0; }
Result cuLaunchKernel(void *kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                      unsigned shared, void *stream, void **parameters, void **extra) {
    (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared, (void)stream, (void)parameters, (void)extra;
    return kernel ? 0 : 1;
}

Result cuEventCreate(void **out, unsigned flags) { return *out = &events[(made++ + (flags & 0)) % sizeof events], 0; }
Result cuEventDestroy_v2(void *of) { return of ? 0 : 1; }
/* An event is pending the first time that it is asked: the stream always has work before it. */
Result cuEventRecord(void *of, void *stream) { return (void)stream, of ? *(char *)of = 1, 0 : 1; }
Result cuEventQuery(void *of) { return !of ? 1 : *(char *)of ? *(char *)of = 0, 600 : 0; }
Result cuEventSynchronize(void *of) { return of ? 0 : 1; }
Result cuStreamQuery(void *stream) { return (void)stream, 600; }
Result cuEventElapsedTime(float *ms, void *from, void *to) { return *ms = 2e-6f, from && to ? 0 : 1; }
Result cuEventElapsedTime_v2(float *ms, void *from, void *to) { return cuEventElapsedTime(ms, from, to); }
Result cuStreamIsCapturing(void *stream, int *status) { return (void)stream, *status = 0, 0; }
Result cuThreadExchangeStreamCaptureMode(int *mode) { return *mode = 0, 0; }

/* Functions without a hook, which a program resolves too. */
#define UNHOOKED(X) X(cuDeviceGetName) X(cuDeviceCanAccessPeer) X(cuStreamWaitEvent) X(cuStreamGetPriority) X(cuEventDestroy) \
    X(cuModuleGetFunction) X(cuModuleGetGlobal) X(cuFuncGetAttribute) X(cuFuncSetAttribute) X(cuMemcpyHtoDAsync) \
    X(cuMemcpyDtoHAsync) X(cuMemsetD8Async) X(cuOccupancyMaxActiveBlocksPerMultiprocessor) X(cuPointerGetAttribute) \
    X(cuGetErrorString) X(cuGetErrorName)
#define DEFINE(name) static Result unhooked_##name(void) { return 801; }
#define ENTRY(name) {#name, (void *)unhooked_##name},
UNHOOKED(DEFINE)

static const struct { const char *name; void *at; } FUNCTIONS[] = {
    UNHOOKED(ENTRY)
#define F(name) {#name, (void *)name}
    F(cuInit), F(cuDriverGetVersion), F(cuDeviceGetCount), F(cuDeviceGet), F(cuDeviceGetAttribute), F(cuDeviceGetUuid),
    F(cuCtxSetCurrent), F(cuCtxGetCurrent), F(cuCtxGetDevice), F(cuCtxSynchronize), F(cuLaunchKernel), F(cuEventCreate),
    F(cuEventRecord), F(cuEventQuery), F(cuEventSynchronize), F(cuEventElapsedTime), F(cuStreamIsCapturing),
    F(cuThreadExchangeStreamCaptureMode), {"cuMemAlloc", (void *)cuMemAlloc_v2}, {"cuMemFree", (void *)cuMemFree_v2},
};

Result cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status) {
    (void)version, (void)flags;
    *out = 0;
    for (size_t at = 0; at < sizeof FUNCTIONS / sizeof *FUNCTIONS; at++)
        if (!strcmp(name, FUNCTIONS[at].name)) *out = FUNCTIONS[at].at;
    if (status) *status = *out ? 0 : 1;
    return 0;
}
