/* Asks NVML for memory in both forms, closes it, and does it again. */
#include "driver.h"

struct one { uint64_t total, free, used; };
struct two { unsigned version; uint64_t total, reserved, free, used; };

int main(void) {
    for (int round = 0; round < 3; round++) {
        void *device, *handle = must(dlopen("libnvidia-ml.so.1", RTLD_NOW), "NVML"), *other = 0;
        struct one one;
        struct two two = {.version = sizeof two | 2 << 24};
        ok(((int (*)())dlsym(handle, "nvmlInit_v2"))(), "init");
        ok(((int (*)())dlsym(handle, "nvmlDeviceGetHandleByIndex_v2"))(0, &device), "handle");
        ok(((int (*)())dlsym(handle, "nvmlDeviceGetMemoryInfo"))(device, &one), "one");
        ok(((int (*)())dlsym(handle, "nvmlDeviceGetMemoryInfo_v2"))(device, &two), "two");
        say("{\"total\":%lu,\"used\":%lu,\"free\":%lu,\"agree\":%d}", one.total, one.used, one.free,
            one.total == two.total && one.used == two.used && one.free == two.free && !two.reserved);
        ok(((int (*)())dlsym(handle, "nvmlShutdown"))(), "shutdown");
        dlclose(handle);
        /* Something else comes to lie where it was. */
        for (int page = 0; page < 64; page++) other = malloc(1 << 20);
        (void)other;
    }
    return 0;
}
