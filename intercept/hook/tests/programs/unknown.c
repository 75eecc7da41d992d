/* Asks for a function that no table has, in both ways, and calls it. */
#include "driver.h"

int main(void) {
    int (*found)(void) = 0, status;
    begin();
    ok(CU(cuFunctionOfTomorrow), "dlsym");
    ok(CU(cuGetProcAddress_v2, "cuFunctionOfTomorrow", &found, 99000, (uint64_t)0, &status), "cuGetProcAddress");
    ok(found(), "cuGetProcAddress");
    /* A form that no table has: of a function that starts work, and of one that takes memory. */
    int launch = CU(cuGetProcAddress_v2, "cuLaunchKernel", &found, 99000, (uint64_t)0, &status);
    ok(found(), "launch");
    int memory = CU(cuGetProcAddress_v2, "cuMemAlloc", &found, 99000, (uint64_t)0, &status);
    say("{\"launch\":%d,\"memory\":%d,\"found\":%d}", launch, memory, found != 0);
    /* None that the driver does not have. */
    say("{\"none\":%d}", dlsym(driver(), "cuFunctionOfTheDayAfter") == 0);
    return 0;
}
