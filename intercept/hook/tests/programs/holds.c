/* Takes 1 MiB, asks the driver nothing, and keeps it until it is killed. */
#include "driver.h"

int main(void) {
    uint64_t pointer;
    begin();
    ok(CU(cuMemAlloc_v2, &pointer, MIB), "allocation");
    say("{\"holds\":true}");
    for (;;) pause();
}
