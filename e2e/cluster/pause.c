/* The process that holds a pod's namespaces open: waits, and reaps what it inherits when it is PID 1 of the pod. */
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static void leave(int signal) { (void)signal; _exit(0); }
static void reap(int signal) { (void)signal; while (waitpid(-1, NULL, WNOHANG) > 0) { } }

int main(void) {
    signal(SIGTERM, leave);
    signal(SIGINT, leave);
    signal(SIGCHLD, reap);
    for (;;) pause();
}
