/* What becomes of a charge when processes fork. */
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include "driver.h"

static void take(size_t bytes) {
    uint64_t pointer;
    ok(CU(cuMemAlloc_v2, &pointer, bytes), "take");
}

int main(int argc, char **argv) {
    if (!strcmp(argv[1], "orphan")) {
        /* A child lives on, with everything it inherited; the parent that holds memory is killed. */
        begin();
        take(GIB);
        if (!fork()) for (;;) pause();
        kill(getpid(), SIGKILL);
    }
    if (!strcmp(argv[1], "own")) {
        /* Two processes from before the driver was used: each on its own. */
        int together[2], go[2];
        char byte = 0;
        if (pipe(together) || pipe(go)) return 2;
        pid_t child = fork();
        begin();
        take(256 * MIB);
        if (!child) {
            if (write(together[1], &byte, 1) != 1 || read(go[0], &byte, 1) != 1) return 2;
            return 0;
        }
        if (read(together[0], &byte, 1) != 1) return 2;
        say("{\"free\":%zu}", free_bytes());
        if (write(go[1], &byte, 1) != 1) return 2;
        waitpid(child, 0, 0);
        /* What dead processes held may be reported as used for 100 ms. */
        size_t now = free_bytes();
        for (time_t until = time(0) + 30; now == 512 * MIB && time(0) < until;) now = free_bytes();
        say("{\"free\":%zu}", now);
    }
    if (!strcmp(argv[1], "child")) {
        /* A child of a process that uses the driver cannot use it, and does not harm its parent's account. */
        begin();
        take(256 * MIB);
        pid_t child = fork();
        if (!child) {
            uint64_t pointer;
            _exit(CU(cuMemAlloc_v2, &pointer, MIB));
        }
        int status;
        waitpid(child, &status, 0);
        say("{\"result\":%d,\"free\":%zu}", WEXITSTATUS(status), free_bytes());
    }
    return 0;
}
