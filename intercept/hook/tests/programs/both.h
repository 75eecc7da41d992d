/* What the ledger says and what the driver says, side by side. */
#include "driver.h"
#include <fcntl.h>

static int ledger;
static off_t total_at;
static int shift;
static int (*bare_info)(size_t *, size_t *);

/* The arguments: a library that finds the driver's own functions, where the ledger's total is, and how far it is shifted. */
static inline void open_both(char **arguments) {
    void *(*bare)(void *, const char *) =
        (void *(*)(void *, const char *))must(dlsym(must(dlopen(arguments[1], RTLD_NOW | RTLD_DEEPBIND), "bare"), "bare"), "bare");
    bare_info = (int (*)(size_t *, size_t *))must(bare(driver(), "cuMemGetInfo_v2"), "cuMemGetInfo_v2");
    ledger = open("/dev/tessera/claim-0/ledger", O_RDONLY);
    total_at = atoi(arguments[2]);
    shift = atoi(arguments[3]);
}

static inline uint64_t charged(void) {
    uint64_t word = 0;
    if (pread(ledger, &word, sizeof word, total_at) != sizeof word) exit(2);
    return word >> shift;
}

static inline uint64_t held(void) {
    size_t free_now, total;
    ok(bare_info(&free_now, &total), "what the driver says");
    return total - free_now;
}

static inline void both(const char *step) {
    say("{\"step\":\"%s\",\"ledger\":%lu,\"driver\":%lu}", step, charged(), held());
}

#define STEP(call) do { ok(call, #call); both(#call); } while (0)
