/* Memory of another process and of another API: what it costs to have it open, and that closing gives it back. */
#include "both.h"
#include <sys/wait.h>

struct place { int kind, handles, location_type, location; void *windows; uint64_t rest[8]; };
struct ipc { uint64_t words[8]; };
struct external { int kind; uint64_t handle[2]; uint64_t bytes; unsigned flags, reserved[16]; };

static uint64_t before;

static void start(void) { before = charged(); }

static void cost(const char *what, uint64_t during) {
    say("{\"import\":\"%s\",\"charged\":%lu,\"left\":%ld}", what, during - before, (long)(charged() - before));
}

/* What the other process hands over; the program keeps it until told to end. */
struct handed { struct ipc ipc, pointer; int memory, pool; };

static void other(int to, int until) {
    struct place place = {1, 1, 1, 0, 0, {0}};
    struct handed handed;
    uint64_t p, q, handle;
    void *pool;
    char byte;
    begin();
    ok(CU(cuMemAlloc_v2, &p, 3 * MIB), "take");
    ok(CU(cuIpcGetMemHandle, &handed.ipc, p), "handle");
    say("{\"own\":%d}", CU(cuIpcOpenMemHandle_v2, &q, handed.ipc, 1));
    ok(CU(cuMemCreate, &handle, 4 * MIB, &place, 0ull), "create");
    ok(CU(cuMemExportToShareableHandle, &handed.memory, handle, 1, 0ull), "export");
    ok(CU(cuMemPoolCreate, &pool, &place), "pool");
    ok(CU(cuMemAllocFromPoolAsync, &q, 5 * MIB, pool, (void *)0), "from pool");
    ok(CU(cuMemPoolExportToShareableHandle, &handed.pool, pool, 1, 0ull), "export pool");
    ok(CU(cuMemPoolExportPointer, &handed.pointer, q), "export pointer");
    ok(write(to, &handed, sizeof handed) != sizeof handed, "hand over");
    ok(read(until, &byte, 1) != 1, "end");
}

/* A descriptor of the other process. */
static void *descriptor(int of, int fd) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", of, fd);
    return (void *)(intptr_t)open(path, O_RDWR);
}

int main(int count, char **arguments) {
    int handing[2], ending[2];
    struct handed handed, foreign;
    uint64_t p, again, q, handle, during;
    void *pool, *memory;
    ok(pipe(handing) || pipe(ending), "pipes");
    int child = fork();
    if (!child) {
        other(handing[1], ending[0]);
        return 0;
    }
    open_both(arguments);
    ok(read(handing[0], &handed, sizeof handed) != sizeof handed, "handed over");
    begin();
    /* Handles that no process of the claim has exported: the fake driver does not read the last word. */
    foreign = handed;
    foreign.ipc.words[7] = foreign.pointer.words[7] = 1;

    start();
    ok(CU(cuIpcOpenMemHandle_v2, &p, handed.ipc, 1), "open");
    during = charged();
    ok(CU(cuIpcCloseMemHandle, p), "close");
    cost("within the claim", during);

    start();
    ok(CU(cuIpcOpenMemHandle_v2, &p, foreign.ipc, 1), "open");
    ok(CU(cuIpcOpenMemHandle, &again, foreign.ipc, 1), "open again");
    during = charged();
    ok(CU(cuIpcCloseMemHandle, p), "close");
    if (again != p || charged() != during) say("{\"import\":\"closed too early\",\"charged\":0,\"left\":1}");
    ok(CU(cuIpcCloseMemHandle, p), "close again");
    cost("cuIpcOpenMemHandle", during);
    say("{\"closed\":%d}", CU(cuIpcCloseMemHandle, p));

    start();
    ok(CU(cuMemImportFromShareableHandle, &handle, descriptor(child, handed.memory), 1), "import");
    ok(CU(cuMemAddressReserve, &p, 8 * MIB, (size_t)0, (uint64_t)0, 0ull), "reserve");
    ok(CU(cuMemMap, p, 4 * MIB, (size_t)0, handle, 0ull), "map");
    ok(CU(cuMemMap, p + 4 * MIB, 4 * MIB, (size_t)0, handle, 0ull), "map again");
    during = charged();
    ok(CU(cuMemRelease, handle), "release");
    ok(CU(cuMemUnmap, p, 4 * MIB), "unmap");
    if (charged() != during) say("{\"import\":\"unmapped too early\",\"charged\":0,\"left\":1}");
    ok(CU(cuMemUnmap, p + 4 * MIB, 4 * MIB), "unmap");
    cost("cuMemImportFromShareableHandle", during);

    start();
    ok(CU(cuMemPoolImportFromShareableHandle, &pool, descriptor(child, handed.pool), 1, 0ull), "import pool");
    ok(CU(cuMemPoolImportPointer, &p, pool, &handed.pointer), "import pointer");
    during = charged();
    ok(CU(cuMemFreeAsync, p, (void *)0), "free");
    cost("within the claim", during);

    start();
    ok(CU(cuMemPoolImportPointer, &p, pool, &foreign.pointer), "import pointer");
    during = charged();
    ok(CU(cuMemFreeAsync, p, (void *)0), "free");
    cost("cuMemPoolImportPointer", during);

    /* It is no context's. */
    void *primary, *context;
    ok(CU(cuCtxGetCurrent, &primary), "current");
    start();
    ok(CU(cuCtxCreate_v2, &context, 0, 0), "context");
    ok(CU(cuMemPoolImportPointer, &p, pool, &foreign.pointer), "import pointer");
    ok(CU(cuCtxDestroy_v2, context), "destroy");
    ok(CU(cuCtxSetCurrent, primary), "back");
    during = charged();
    ok(CU(cuMemFreeAsync, p, (void *)0), "free");
    cost("in a context that ended", during);

    struct external external = {1, {5}, 7 * MIB, 0, {0}};
    start();
    ok(CU(cuImportExternalMemory, &memory, &external), "import");
    during = charged();
    ok(CU(cuDestroyExternalMemory, memory), "destroy");
    cost("cuImportExternalMemory", during);

    /* What is not granted is not opened. */
    while (!CU(cuMemAlloc_v2, &q, MIB)) {}
    start();
    external.bytes = 1 << 20;
    say("{\"refused\":%d}", CU(cuIpcOpenMemHandle_v2, &p, foreign.ipc, 1));
    say("{\"refused\":%d}", CU(cuImportExternalMemory, &memory, &external));
    say("{\"refused\":%d}", CU(cuMemPoolImportPointer, &p, pool, &foreign.pointer));
    ok(CU(cuMemImportFromShareableHandle, &handle, descriptor(child, handed.memory), 1), "import");
    ok(CU(cuMemAddressReserve, &p, 8 * MIB, (size_t)0, (uint64_t)0, 0ull), "reserve");
    say("{\"refused\":%d}", CU(cuMemMap, p, 4 * MIB, (size_t)0, handle, 0ull));
    ok(CU(cuMemRelease, handle), "release");
    cost("refused", charged());
    /* What the claim has paid for is opened all the same. */
    start();
    ok(CU(cuIpcOpenMemHandle_v2, &p, handed.ipc, 1), "open");
    ok(CU(cuIpcCloseMemHandle, p), "close");
    cost("within a full claim", charged());
    external.bytes = 0;
    say("{\"closed\":%d}", CU(cuImportExternalMemory, &memory, &external));
    /* Memory whose owner has ended lives on. Only the driver knows who has it. */
    ok(CU(cuIpcOpenMemHandle_v2, &p, handed.ipc, 1), "open");
    ok(write(ending[1], "e", 1) != 1, "end");
    wait(0);
    during = held();
    ok(CU(cuIpcCloseMemHandle, p), "close");
    say("{\"lived\":%lu}", during - held());
    (void)count;
    return 0;
}
