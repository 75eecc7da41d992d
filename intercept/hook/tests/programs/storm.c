#define _GNU_SOURCE
/* Processes that are killed while they take and give back: however they came to be, what they held is there for the next
 * as soon as they are dead.
 *
 *   storm KILLS LIMIT    kills so many, each in the middle of something, and takes all of LIMIT after each
 *   storm victim         what a victim becomes by exec, without an environment
 *   storm slots LIMIT    two of three that hold memory die, a new one comes: the third gets no more than is left
 */
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include "driver.h"

/* Says on this descriptor that it has begun. */
#define BEGUN 3

static uint64_t limit;

static int take(uint64_t *pointer, uint64_t bytes) { return CU(cuMemAlloc_v2, pointer, (size_t)bytes); }

/* Takes and gives back until it is killed. */
static void struggle(void) {
    uint64_t held[32] = {0}, random = (uint64_t)getpid() * 2654435761u;
    char byte = 0;
    begin();
    for (long round = 0;; round++) {
        random = random * 6364136223846793005ull + 1442695040888963407ull;
        int at = random >> 33 & 31;
        if (held[at]) {
            ok(CU(cuMemFree_v2, held[at]), "free");
            held[at] = 0;
        } else if (take(&held[at], (1 + (random >> 40 & 15)) * MIB)) {
            held[at] = 0;
        }
        if (round == 8 && write(BEGUN, &byte, 1) != 1) _exit(2);
    }
}

static char **the_fake_drivers(void) {
    static const char *NAMES[] = {"LD_LIBRARY_PATH", "TESSERA_FAKE_WORLD", "TESSERA_FAKE_STATE"};
    static char *variables[4];
    for (int at = 0; at < 3; at++)
        if (asprintf(&variables[at], "%s=%s", NAMES[at], getenv(NAMES[at])) < 0) _exit(2);
    return variables;
}

/* A process by a way of its own; what it becomes. */
static void victim(int way) {
    char *arguments[] = {"storm", "victim", 0};
    int status;
    switch (way & 3) {
    case 0: struggle(); break;
    /* Its child lives on with everything that it inherits. */
    case 1:
        begin();
        if (!fork()) {
            close(BEGUN);
            for (;;) pause();
        }
        struggle();
        break;
    /* A child that no handler of fork hears of; it dies with its parent, which waits for it. */
    case 2: {
        long child = syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
        if (!child) struggle();
        if (write(4, &child, sizeof child) != sizeof child) _exit(2);
        waitpid((pid_t)child, &status, 0);
        _exit(0);
    }
    /* No environment but what the fake driver needs to be found and to find its world. */
    case 3: execve("/proc/self/exe", arguments, the_fake_drivers()); _exit(2);
    }
}

/* All of the limit, at the first attempt. */
static int everything_is_there(void) {
    int status;
    pid_t child = fork();
    if (!child) {
        uint64_t pointer;
        begin();
        _exit(take(&pointer, limit) != 0);
    }
    waitpid(child, &status, 0);
    return WIFEXITED(status) && !WEXITSTATUS(status);
}

static void storm(long kills) {
    long missed = 0;
    for (long kill_number = 0; kill_number < kills; kill_number++) {
        int begun[2], whom[2], status;
        char byte;
        long grandchild = 0;
        ok(pipe2(begun, 0) || pipe2(whom, 0), "pipes");
        pid_t child = fork();
        if (!child) {
            if (dup2(whom[1], 14) < 0 || dup2(begun[1], BEGUN) < 0 || dup2(14, 4) < 0) _exit(2);
            victim((int)kill_number);
        }
        close(begun[1]), close(whom[1]);
        if ((kill_number & 3) == 2 && read(whom[0], &grandchild, sizeof grandchild) != sizeof grandchild) exit(2);
        if (read(begun[0], &byte, 1) != 1) exit(2);
        /* A little later each time, so that it hits anything. */
        for (volatile long wait = 0; wait < kill_number * 997; wait++) {}
        kill(grandchild ? (pid_t)grandchild : child, SIGKILL);
        waitpid(child, &status, 0);
        close(begun[0]), close(whom[0]);
        missed += !everything_is_there();
    }
    say("{\"kills\":%ld,\"missed\":%ld}", kills, missed);
}

/* A process that takes what it is told, and says whether it got it. */
struct worker { pid_t pid; int tell, hear; };

static struct worker worker(void) {
    int tell[2], hear[2];
    ok(pipe2(tell, O_CLOEXEC) || pipe2(hear, O_CLOEXEC), "pipes");
    pid_t pid = fork();
    if (!pid) {
        uint64_t bytes, pointer;
        begin();
        while (read(tell[0], &bytes, sizeof bytes) == sizeof bytes) {
            int result = take(&pointer, bytes);
            if (write(hear[1], &result, sizeof result) != sizeof result) _exit(2);
        }
        _exit(0);
    }
    return (struct worker){pid, tell[1], hear[0]};
}

static int takes(struct worker worker, uint64_t bytes) {
    int result = -1;
    if (write(worker.tell, &bytes, sizeof bytes) != sizeof bytes) exit(2);
    if (read(worker.hear, &result, sizeof result) != sizeof result) exit(2);
    return result;
}

static void dies(struct worker worker) {
    int status;
    kill(worker.pid, SIGKILL);
    waitpid(worker.pid, &status, 0);
}

static void slots(void) {
    struct worker first = worker(), second = worker(), third = worker();
    ok(takes(first, limit / 4) || takes(second, limit / 4) || takes(third, limit / 4), "a quarter each");
    dies(first), dies(second);
    struct worker fourth = worker();
    ok(takes(fourth, limit / 2), "what the dead have left");
    int more = takes(third, limit / 4 + MIB), rest = takes(third, limit / 4);
    say("{\"more\":%d,\"rest\":%d}", more, rest);
    dies(third), dies(fourth);
}

int main(int argc, char **argv) {
    if (argc == 2 && !strcmp(argv[1], "victim")) struggle();
    limit = strtoull(argv[argc - 1], 0, 10);
    if (!strcmp(argv[1], "slots")) slots();
    else storm(atol(argv[1]));
    /* Children that lived on go with the container. */
    return 0;
}
