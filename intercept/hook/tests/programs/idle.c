/* Has a context and no memory, and asks NVML for the processes of the GPU. */
#include "driver.h"

struct process { unsigned pid; uint64_t used; unsigned instance, compute; };

int main(void) {
    void *library = must(dlopen("libnvidia-ml.so.1", RTLD_NOW), "NVML"), *device;
    struct process list[8];
    unsigned count = 8;
    begin();
    ok(((int (*)())must(dlsym(library, "nvmlInit_v2"), "init"))(), "init");
    ok(((int (*)())must(dlsym(library, "nvmlDeviceGetHandleByIndex_v2"), "handle"))(0, &device), "handle");
    int (*ask)() = (int (*)())must(dlsym(library, "nvmlDeviceGetComputeRunningProcesses_v3"), "processes");
    ok(ask(device, &count, list), "processes");
    say("{\"count\":%u,\"own\":%d,\"bytes\":%lu}", count, count && list[0].pid == (unsigned)getpid(), count ? list[0].used : 0);
    return 0;
}
