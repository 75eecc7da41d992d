/* Uses a GPU for a second, and asks NVML how much of its time that was. */
#include <time.h>
#include "driver.h"

struct rates { unsigned gpu, memory; };
struct sample { unsigned pid; uint64_t time; unsigned multiprocessors, memory, encoder, decoder; };
struct info { uint64_t time; unsigned pid, multiprocessors, memory, encoder, decoder, jpeg, optical_flow; };
struct infos { unsigned version, count; uint64_t since; struct info *list; };

static void *nvml;

#define NV(name, ...) ((int (*)())must(dlsym(nvml, #name), #name))(__VA_ARGS__)

static uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ull + time.tv_nsec;
}

int main(void) {
    void *device, *module, *function, *none[] = {0};
    struct rates idle, busy, at_once;
    struct sample samples[4];
    struct info list[4];
    unsigned count = 4, little = 0;
    nvml = must(dlopen("libnvidia-ml.so.1", RTLD_NOW), "NVML");
    begin();
    ok(CU(cuModuleLoadData, &module, "image"), "module");
    ok(CU(cuModuleGetFunction, &function, module, "spin_for_1ms"), "function");
    ok(NV(nvmlInit_v2), "init");
    ok(NV(nvmlDeviceGetHandleByIndex_v2, 0, &device), "handle");
    ok(NV(nvmlDeviceGetUtilizationRates, device, &idle), "idle");
    for (uint64_t from = now(); now() - from < 1000000000ull;) {
        ok(CU(cuLaunchKernel, function, 1, 1, 1, 32, 1, 1, 0, (void *)0, none, (void *)0), "launch");
        ok(CU(cuCtxSynchronize), "synchronize");
    }
    ok(NV(nvmlDeviceGetUtilizationRates, device, &busy), "busy");
    ok(NV(nvmlDeviceGetUtilizationRates, device, &at_once), "at once");
    int none_fit = NV(nvmlDeviceGetProcessUtilization, device, (void *)0, &little, 0ull);
    ok(NV(nvmlDeviceGetProcessUtilization, device, samples, &count, 0ull), "samples");
    struct infos infos = {sizeof infos | 1 << 24, 4, 0, list};
    ok(NV(nvmlDeviceGetProcessesUtilizationInfo, device, &infos), "infos");
    say("{\"idle\":%u,\"busy\":%u,\"at once\":%u}", idle.gpu, busy.gpu, at_once.gpu);
    say("{\"without room\":%d,\"needed\":%u,\"count\":%u,\"own\":%d,\"percent\":%u}", none_fit, little, count,
        samples[0].pid == (unsigned)getpid(), samples[0].multiprocessors);
    say("{\"count\":%u,\"own\":%d,\"percent\":%u}", infos.count, list[0].pid == (unsigned)getpid(), list[0].multiprocessors);
    return 0;
}
