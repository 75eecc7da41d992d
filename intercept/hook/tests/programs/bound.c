/* Physical memory that is kept by something else than handles and mappings. */
#include "both.h"

struct place { int kind, handles, location_type, location; void *windows; uint64_t rest[8]; };
struct multicast { unsigned devices; size_t bytes; uint64_t handles, flags; };
struct solid { size_t width, height, depth; unsigned format, channels, flags; };
struct array_map {
    int resource_kind; void *resource; int place_kind; uint64_t place[4]; int operation, handle_kind; uint64_t handle, offset;
    unsigned devices, flags, reserved[2];
};

static uint64_t memory(void) {
    struct place place = {1, 0, 1, 0, 0, {0}};
    uint64_t handle;
    ok(CU(cuMemCreate, &handle, 4 * MIB, &place, 0ull), "create");
    return handle;
}

static uint64_t mapped(void) {
    uint64_t p, handle = memory();
    ok(CU(cuMemAddressReserve, &p, 4 * MIB, (size_t)0, (uint64_t)0, 0ull), "reserve");
    ok(CU(cuMemMap, p, 4 * MIB, (size_t)0, handle, 0ull), "map");
    ok(CU(cuMemRelease, handle), "release");
    return p;
}

int main(int count, char **arguments) {
    struct multicast multicast = {2, 8 * MIB, 0, 0};
    struct solid solid = {1024, 1024, 0, 0x20, 1, 0x40};
    uint64_t object, one, p, properties[8] = {0};
    unsigned endpoint;
    size_t none = 0;
    void *array;
    open_both(arguments);
    begin();
    /* Bound, let go of, and unbound. */
    STEP(CU(cuMulticastCreate, &object, &multicast));
    one = memory();
    STEP(CU(cuMulticastBindMem, object, none, one, none, 4 * MIB, 0ull));
    STEP(CU(cuMemRelease, one));
    STEP(CU(cuMulticastUnbind, object, 0, none, 4 * MIB));
    one = memory();
    STEP(CU(cuMulticastBindMem_v2, object, 0, none, one, none, 4 * MIB, 0ull));
    STEP(CU(cuMemRelease, one));
    p = mapped();
    STEP(CU(cuMulticastBindAddr, object, 4 * MIB, p + MIB, 2 * MIB, 0ull));
    STEP(CU(cuMemUnmap, p, 4 * MIB));
    STEP(CU(cuMulticastUnbind, object, 0, none, 4 * MIB));
    p = mapped();
    STEP(CU(cuMulticastBindAddr_v2, object, 0, none, p, 4 * MIB, 0ull));
    STEP(CU(cuMemUnmap, p, 4 * MIB));
    /* It goes with all that is still bound. */
    STEP(CU(cuMemRelease, object));
    /* The same for endpoints. */
    ok(CU(cuLogicalEndpointIdReserve, &endpoint, 1), "id");
    STEP(CU(cuLogicalEndpointCreate, endpoint, properties));
    one = memory();
    STEP(CU(cuLogicalEndpointBindMem, endpoint, 0, (uint64_t)0, one, (uint64_t)0, (uint64_t)4 * MIB, 0ull));
    STEP(CU(cuMemRelease, one));
    p = mapped();
    STEP(CU(cuLogicalEndpointBindAddr, endpoint, 0, (uint64_t)4 * MIB, p, (uint64_t)4 * MIB, 0ull));
    STEP(CU(cuMemUnmap, p, 4 * MIB));
    STEP(CU(cuLogicalEndpointUnbind, endpoint, 0, (uint64_t)0, (uint64_t)4 * MIB));
    STEP(CU(cuLogicalEndpointDestroy, endpoint));
    /* Sparse arrays. */
    STEP(CU(cuArray3DCreate_v2, &array, &solid));
    one = memory();
    struct array_map map = {0, array, 0, {0, 0, 256, 1}, 1, 0, one, 0, 1, 0, {0}};
    STEP(CU(cuMemMapArrayAsync, &map, 1, (void *)0));
    STEP(CU(cuMemRelease, one));
    map.operation = 2;
    STEP(CU(cuMemMapArrayAsync_ptsz, &map, 1, (void *)0));
    map.operation = 1;
    map.handle = one = memory();
    STEP(CU(cuMemMapArrayAsync, &map, 1, (void *)0));
    map.handle = memory();
    STEP(CU(cuMemMapArrayAsync, &map, 1, (void *)0));
    STEP(CU(cuMemRelease, one));
    STEP(CU(cuMemRelease, map.handle));
    STEP(CU(cuArrayDestroy, array));
    /* A handle that is got back from a mapping. */
    p = mapped();
    STEP(CU(cuMemRetainAllocationHandle, &one, p));
    STEP(CU(cuMemUnmap, p, 4 * MIB));
    STEP(CU(cuMemRelease, one));
    /* What fails changes nothing. */
    one = memory();
    say("{\"refused\":%d}", CU(cuMulticastBindMem, (uint64_t)0x1234, none, one, none, 4 * MIB, 0ull));
    say("{\"refused\":%d}", CU(cuMemUnmap, (uint64_t)0x1234, 4 * MIB));
    say("{\"refused\":%d}", CU(cuMemRelease, (uint64_t)0x1234));
    STEP(CU(cuMemRelease, one));
    say("{\"refused\":%d}", CU(cuMemRelease, one));
    both("end");
    (void)count;
    return 0;
}
