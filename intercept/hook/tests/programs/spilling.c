/* Plain memory of a container that may have more than the GPU has: what each call answers, and what ledger and driver say after it.
 *
 *   spilling <bare library> <total at> <shift> <what>
 */
#include "both.h"

static void *none;

static void step(const char *call, int result) {
    say("{\"call\":\"%s\",\"result\":%d,\"ledger\":%lu,\"driver\":%lu}", call, result, charged(), held());
}

#define TRY(name, ...) step(#name, CU(name, __VA_ARGS__))

static void about(const char *call, uint64_t pointer) {
    int managed = -1, device = -1;
    CU(cuPointerGetAttribute, &managed, 8, pointer);
    CU(cuPointerGetAttribute, &device, 9, pointer);
    say("{\"of\":\"%s\",\"managed\":%d,\"device\":%d}", call, managed, device);
}

/* Taken and given back in every way. */
static void frees(void) {
    void *context;
    uint64_t p = 0, q = 0, rows = 0;
    size_t pitch;
    TRY(cuMemAlloc_v2, &p, 100 * GIB);
    TRY(cuMemAlloc_v2, &q, 3 * MIB);
    TRY(cuMemAllocPitch_v2, &rows, &pitch, (size_t)1000, (size_t)1024, 4);
    TRY(cuMemAlloc_v2, &none, 61 * GIB);
    TRY(cuMemFree_v2, p);
    TRY(cuMemFree_v2, p);
    TRY(cuMemFree_v2, q);
    TRY(cuMemFreeAsync, rows, none);
    /* What was taken in a context goes with it. */
    TRY(cuCtxCreate_v2, &context, 0, 0);
    TRY(cuMemAlloc_v2, &p, 90 * GIB);
    TRY(cuCtxDestroy_v2, context);
}

static void rows(void) {
    for (size_t width = 1; width < 3000; width += 499) {
        uint64_t pointer = 0;
        size_t pitch = 0;
        int result = CU(cuMemAllocPitch_v2, &pointer, &pitch, width, (size_t)3, 16);
        say("{\"width\":%zu,\"result\":%d,\"pitch\":%zu,\"charged\":%lu}", width, result, pitch, charged());
        CU(cuMemFree_v2, pointer);
    }
}

/* The driver has no managed memory to give, and all other. */
static void fails(void) {
    uint64_t p = 0;
    size_t pitch;
    TRY(cuMemAlloc_v2, &p, 3 * MIB);
    TRY(cuMemAllocPitch_v2, &p, &pitch, (size_t)1000, (size_t)1024, 4);
    TRY(cuMemAllocAsync, &p, 3 * MIB, none);
}

struct place { int kind, handles, location_type, location; void *windows; uint64_t rest[8]; };
struct array { size_t width, height; int format; unsigned channels; };

/* Beyond what the GPU has only where it is plain. */
static void others(void) {
    struct place on_gpu = {1, 0, 1, 0, 0, {0}};
    struct array array = {1 << 18, 1 << 17, 0x20, 1};
    uint64_t p = 0;
    TRY(cuMemAllocAsync, &p, 100 * GIB, none);
    TRY(cuMemCreate, &p, 100 * GIB, &on_gpu, 0ull);
    TRY(cuArrayCreate_v2, &none, &array);
}

/* What tells managed memory from other. */
static void asks(void) {
    uint64_t p = 0, rows = 0, handle[8], async = 0;
    size_t pitch;
    ok(CU(cuMemAlloc_v2, &p, 3 * MIB), "plain");
    ok(CU(cuMemAllocPitch_v2, &rows, &pitch, (size_t)1000, (size_t)1024, 4), "pitched");
    ok(CU(cuMemAllocAsync, &async, 3 * MIB, none), "of a pool");
    about("plain", p);
    about("pitched", rows);
    about("of a pool", async);
    TRY(cuIpcGetMemHandle, handle, p);
}

int main(int count, char **arguments) {
    static const struct { const char *name; void (*run)(void); } parts[] = {
        {"frees", frees}, {"rows", rows}, {"fails", fails}, {"others", others}, {"asks", asks},
    };
    open_both(arguments);
    if (count > 4 && !strcmp(arguments[4], "fails")) setenv("TESSERA_FAKE_CUDA_FAILS", "cuMemAllocManaged", 1);
    begin();
    both("begun");
    for (size_t at = 0; at < sizeof parts / sizeof *parts; at++)
        if (count > 4 && !strcmp(arguments[4], parts[at].name)) parts[at].run();
    return 0;
}
