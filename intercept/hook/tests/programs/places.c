/* Where memory is to be: parts of devices cost what devices do, managed pools what managed memory does, and what is of a type
 * that nobody knows is not to be had. */
#include "both.h"

struct place { int kind, handles, location_type, location; void *windows; uint64_t rest[8]; };

/* The first device's domain 1: a byte with the device, and one with the domain. */
#define DOMAIN 6, 0x100
#define UNKNOWN 7, 0

static uint64_t p, handle;
static void *pool, *none;

static void cost(const char *what, uint64_t before) {
    say("{\"place\":\"%s\",\"charged\":%ld}", what, (long)(charged() - before));
}

static void domains(void) {
    struct place place = {1, 1, DOMAIN, 0, {0}};
    STEP(CU(cuMemCreate, &handle, 4 * MIB, &place, 0ull));
    STEP(CU(cuMemRelease, handle));
    STEP(CU(cuMemPoolCreate, &pool, &place));
    STEP(CU(cuMemAllocFromPoolAsync, &p, 40 * MIB, pool, none));
    STEP(CU(cuMemFreeAsync, p, none));
    STEP(CU(cuMemPoolDestroy, pool));
}

static void unknown(void) {
    struct place place = {1, 0, UNKNOWN, 0, {0}};
    say("{\"refused\":%d}", CU(cuMemCreate, &handle, 4 * MIB, &place, 0ull));
    both("physical memory of an unknown place");
    say("{\"refused\":%d}", CU(cuMemPoolCreate, &pool, &place));
    both("a pool of an unknown place");
}

/* What is not pinned moves to the GPU, wherever it is said to be. */
static void managed(int location_type, const char *what) {
    struct place place = {2, 0, location_type, 0, 0, {0}};
    uint64_t before = charged();
    ok(CU(cuMemPoolCreate, &pool, &place), "managed pool");
    ok(CU(cuMemAllocFromPoolAsync, &p, 40 * MIB, pool, none), "take");
    cost(what, before);
    ok(CU(cuMemFreeAsync, p, none), "free");
    ok(CU(cuMemPoolDestroy, pool), "destroy");
    cost("destroyed", before);
}

/* A descriptor of memory in a part of the device, back into this process. */
static void import(int location_type, int location) {
    struct place place = {1, 1, location_type, location, 0, {0}};
    uint64_t before, imported;
    int fd;
    ok(CU(cuMemCreate, &handle, 4 * MIB, &place, 0ull), "create");
    ok(CU(cuMemExportToShareableHandle, &fd, handle, 1, 0ull), "export");
    before = charged();
    ok(CU(cuMemImportFromShareableHandle, &imported, (void *)(intptr_t)fd, 1), "import");
    ok(CU(cuMemAddressReserve, &p, 4 * MIB, (size_t)0, (uint64_t)0, 0ull), "reserve");
    ok(CU(cuMemMap, p, 4 * MIB, (size_t)0, imported, 0ull), "map");
    cost("imported", before);
    ok(CU(cuMemUnmap, p, 4 * MIB), "unmap");
    ok(CU(cuMemRelease, imported), "release");
    ok(CU(cuMemRelease, handle), "release");
}

/* One call unmaps a range of memory of the host and of the device, with a gap between. */
static void mixed(void) {
    struct place host = {1, 0, 2, 0, 0, {0}}, device = {1, 0, 1, 0, 0, {0}};
    uint64_t before = charged(), handles[3];
    ok(CU(cuMemAddressReserve, &p, 16 * MIB, (size_t)0, (uint64_t)0, 0ull), "reserve");
    for (int i = 0; i < 3; i++) {
        ok(CU(cuMemCreate, &handles[i], 4 * MIB, i ? &device : &host, 0ull), "create");
        ok(CU(cuMemMap, p + (i == 2 ? 12 : 4 * i) * MIB, 4 * MIB, (size_t)0, handles[i], 0ull), "map");
        ok(CU(cuMemRelease, handles[i]), "release");
    }
    cost("mixed", before);
    ok(CU(cuMemUnmap, p, 16 * MIB), "unmap");
    cost("unmapped", before);
    ok(CU(cuMemAddressFree, p, 16 * MIB), "free the range");
}

int main(int count, char **arguments) {
    open_both(arguments);
    begin();
    domains();
    unknown();
    managed(0, "managed");
    managed(2, "managed, on the host");
    import(DOMAIN);
    mixed();
    both("end");
    (void)count;
    return 0;
}
