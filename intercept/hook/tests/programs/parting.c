/* Two processes that part before they use the driver hold memory, side by side. */
#include <signal.h>
#include <sys/prctl.h>
#include "driver.h"

int main(void) {
    int has[2];
    char byte = 0;
    uint64_t pointer;
    if (pipe(has)) return 2;
    pid_t child = fork();
    if (!child) prctl(PR_SET_PDEATHSIG, SIGKILL);
    begin();
    ok(CU(cuMemAlloc_v2, &pointer, 16 * MIB), "take");
    if (!child) {
        if (write(has[1], &byte, 1) != 1) return 2;
        for (;;) pause();
    }
    if (read(has[0], &byte, 1) != 1) return 2;
    say("{\"parted\":true}");
    for (;;) pause();
}
