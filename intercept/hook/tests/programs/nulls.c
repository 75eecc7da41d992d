/* Calls each function with nothing but zeroes, and then with nothing but pointers to zeroes, before the driver is initialised and after: what
 * it answers, or that it is fatal. Arguments are integers and pointers, so one call suits all of them. */
#include <sys/wait.h>
#include "driver.h"

typedef int (*Any)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t);

static int with(const char *name, uint64_t all) {
    Any function = (Any)dlsym(driver(), name);
    return function ? function(all, all, all, all, all, all, all, all, all, all, all, all) : -2;
}

static void calls(const char *name, int how) {
    static uint64_t zeroes[1 << 16];
    if (how & 1) begin();
    say("{\"name\":\"%s\",\"how\":%d,\"result\":%d}", name, how, with(name, how & 2 ? (uint64_t)(uintptr_t)zeroes : 0));
}

int main(int count, char **arguments) {
    for (int at = 1; at < count; at++) {
        for (int how = 0; how < 4; how++) {
            int status;
            pid_t child = fork();
            if (!child) {
                calls(arguments[at], how);
                _exit(0);
            }
            waitpid(child, &status, 0);
            if (status) say("{\"name\":\"%s\",\"how\":%d,\"fatal\":%d}", arguments[at], how, status & 127);
        }
    }
    return 0;
}
