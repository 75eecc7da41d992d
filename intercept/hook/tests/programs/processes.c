/* Holds memory in two processes and asks NVML in every way who holds memory. */
#include "driver.h"
#include <sys/wait.h>

struct one { unsigned pid; uint64_t used; };
struct two { unsigned pid; uint64_t used; unsigned instance, compute; };
struct detail { struct two process; uint64_t protected_bytes; };
struct details { unsigned version, mode, count; struct detail *list; };
struct utilization { unsigned version, count; uint64_t since; void *list; };

static void *nvml(void) {
    static void *handle;
    if (!handle) handle = must(dlopen("libnvidia-ml.so.1", RTLD_NOW), "NVML");
    return handle;
}

#define NV(name, ...) ((int (*)())must(dlsym(nvml(), #name), #name))(__VA_ARGS__)
#define LIST(name, type) do { \
    type list[8]; unsigned count = 0; \
    int none = NV(name, device, &count, (void *)0); \
    unsigned needed = count; \
    count = 8; \
    ok(NV(name, device, &count, list), #name); \
    unsigned one = 1; \
    int small = NV(name, device, &one, list); \
    say("{\"list\":\"" #name "\",\"needed\":%u,\"without room\":%d,\"with little\":%d}", needed, none, small); \
    for (unsigned at = 0; at < count; at++) \
        say("{\"of\":\"" #name "\",\"pid\":%u,\"bytes\":%lu}", list[at].pid, list[at].used); \
} while (0)
#define NONE(name, ...) do { \
    unsigned count = 8; uint64_t room[64][8]; \
    int result = NV(name, device, &count, room __VA_OPT__(,) __VA_ARGS__); \
    say("{\"none\":\"" #name "\",\"result\":%d,\"count\":%u}", result, count); \
} while (0)

int main(int arguments, char **argument) {
    int ready[2], done[2];
    uint64_t p;
    char byte, name[64], tiny[4];
    void *device;
    ok(pipe(ready) || pipe(done), "pipes");
    int child = fork();
    begin();
    ok(CU(cuMemAlloc_v2, &p, child ? GIB : 512 * MIB), "take");
    if (!child) {
        if (write(ready[1], "r", 1) != 1 || read(done[0], &byte, 1) != 1) return 2;
        return 0;
    }
    ok(read(ready[0], &byte, 1) != 1, "ready");
    ok(NV(nvmlInit_v2), "init");
    ok(NV(nvmlDeviceGetHandleByIndex_v2, 0, &device), "handle");
    say("{\"parent\":%d,\"child\":%d}", getpid(), child);
    LIST(nvmlDeviceGetComputeRunningProcesses, struct one);
    LIST(nvmlDeviceGetComputeRunningProcesses_v2, struct two);
    LIST(nvmlDeviceGetComputeRunningProcesses_v3, struct two);
    struct detail list[8];
    struct details details = {sizeof details | 1 << 24, 0, 8, list};
    ok(NV(nvmlDeviceGetRunningProcessDetailList, device, &details), "details");
    for (unsigned at = 0; at < details.count; at++)
        say("{\"of\":\"nvmlDeviceGetRunningProcessDetailList\",\"pid\":%u,\"bytes\":%lu}", list[at].process.pid, list[at].process.used);
    NONE(nvmlDeviceGetGraphicsRunningProcesses);
    NONE(nvmlDeviceGetGraphicsRunningProcesses_v2);
    NONE(nvmlDeviceGetGraphicsRunningProcesses_v3);
    NONE(nvmlDeviceGetMPSComputeRunningProcesses);
    NONE(nvmlDeviceGetMPSComputeRunningProcesses_v2);
    NONE(nvmlDeviceGetMPSComputeRunningProcesses_v3);
    NONE(nvmlDeviceGetEncoderSessions);
    NONE(nvmlDeviceGetFBCSessions);
    unsigned count = 64, pids[64];
    int result = NV(nvmlDeviceGetAccountingPids, device, &count, pids);
    say("{\"none\":\"nvmlDeviceGetAccountingPids\",\"result\":%d,\"count\":%u}", result, count);
    count = 8;
    result = NV(nvmlDeviceGetProcessUtilization, device, (void *)0, &count, 0ull);
    say("{\"none\":\"nvmlDeviceGetProcessUtilization\",\"result\":%d,\"count\":%u}", result, count);
    struct utilization utilization = {sizeof utilization | 1 << 24, 8, 0, 0};
    result = NV(nvmlDeviceGetProcessesUtilizationInfo, device, &utilization);
    say("{\"none\":\"nvmlDeviceGetProcessesUtilizationInfo\",\"result\":%d,\"count\":%u}", result, utilization.count);
    uint64_t stats[32] = {0};
    say("{\"stats\":%d}", NV(nvmlDeviceGetAccountingStats, device, atoi(argument[1]), stats));
    ok(NV(nvmlSystemGetProcessName, getpid(), name, 64), "own name");
    say("{\"own name\":\"%s\",\"is\":\"%s\"}", name, argument[0]);
    say("{\"of host\":%d,\"tiny\":%d,\"NULL\":%d}", NV(nvmlSystemGetProcessName, atoi(argument[1]), name, 64),
        NV(nvmlSystemGetProcessName, getpid(), tiny, 4), NV(nvmlSystemGetProcessName, getpid(), (void *)0, 64));
    uint64_t bar1[3], attributes[5], sizes[2], protected_memory[3];
    ok(NV(nvmlDeviceGetBAR1MemoryInfo, device, bar1), "BAR1");
    ok(NV(nvmlDeviceGetAttributes_v2, device, attributes), "attributes");
    ok(NV(nvmlDeviceGetConfComputeMemSizeInfo, device, sizes), "sizes");
    ok(NV(nvmlDeviceGetConfComputeProtectedMemoryUsage, device, protected_memory), "protected");
    say("{\"bar1\":%lu,\"bar1 used\":%lu,\"attributes MiB\":%lu,\"protected KiB\":%lu,\"total\":%lu,\"used\":%lu}", bar1[0],
        bar1[2], attributes[4], sizes[0], protected_memory[0], protected_memory[2]);
    say("{\"no device\":%d}", NV(nvmlDeviceGetComputeRunningProcesses_v3, (void *)0, &count, list));
    ok(write(done[1], "d", 1) != 1, "done");
    wait(0);
    (void)arguments;
    return 0;
}
