/* Two threads of a new process ask cuGetProcAddress at once, in as many processes as the argument says. */
#include <pthread.h>
#include <sys/wait.h>
#include "driver.h"

typedef int (*get_proc)(const char *, void **, int, uint64_t, int *);

static get_proc ask;
static pthread_barrier_t together;

static void *resolve(void *name) {
    void *found = 0;
    int status = 0;
    pthread_barrier_wait(&together);
    int result = ask(name, &found, 12000, 1, &status);
    return (void *)(long)(result || status || !found);
}

static int run(void) {
    pthread_t threads[2];
    void *failed[2];
    pthread_barrier_init(&together, 0, 2);
    pthread_create(&threads[0], 0, resolve, "cuMemAlloc");
    pthread_create(&threads[1], 0, resolve, "cuMemFree");
    for (int i = 0; i < 2; i++) pthread_join(threads[i], &failed[i]);
    return failed[0] || failed[1];
}

int main(int argc, char **argv) {
    int runs = atoi(argv[1]), failed = 0;
    ask = (get_proc)must(dlsym(driver(), "cuGetProcAddress_v2"), "cuGetProcAddress_v2");
    for (int i = 0; i < runs; i++) {
        int status = 0;
        pid_t child = fork();
        if (!child) _exit(run());
        if (child < 0 || waitpid(child, &status, 0) != child) return 2;
        failed += status != 0;
    }
    say("{\"runs\":%d,\"failed\":%d}", runs, failed);
    return 0;
}
