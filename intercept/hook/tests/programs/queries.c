/* Makes every query of a table (name or ".", version, flags, symbol or "-") of cuGetProcAddress, and checks that what comes is
 * the symbol of the driver at a path, or a hook that comes for this symbol always and for no other; or nothing. */
#define _GNU_SOURCE
#include <link.h>
#include "driver.h"

typedef int (*get_proc_1)(const char *, void **, int, uint64_t);
typedef int (*get_proc_2)(const char *, void **, int, uint64_t, int *);

static struct link_map *driver_at(const char *path) {
    static struct link_map *found;
    if (found) return found;
    /* Loaded already, by the program or by the proxy. */
    found = driver();
    while (found->l_prev) found = found->l_prev;
    while (found && strcmp(found->l_name, path)) found = found->l_next;
    return must(found, path);
}

/* The driver's own symbol, past every interposed dlsym: from the tables of the loaded library. */
static void *real(const char *path, const char *symbol) {
    struct link_map *map = driver_at(path);
    const char *strings = 0;
    const ElfW(Sym) *symbols = 0;
    const uint32_t *hash = 0;
    for (ElfW(Dyn) *entry = map->l_ld; entry->d_tag; entry++) {
        if (entry->d_tag == DT_STRTAB) strings = (void *)entry->d_un.d_ptr;
        if (entry->d_tag == DT_SYMTAB) symbols = (void *)entry->d_un.d_ptr;
        if (entry->d_tag == DT_GNU_HASH) hash = (void *)entry->d_un.d_ptr;
    }
    /* Behind the last chain there is no symbol; the string table follows the symbols. */
    for (const ElfW(Sym) *at = symbols; (void *)at < (void *)strings && hash; at++)
        if (at->st_shndx && !strcmp(strings + at->st_name, symbol)) return (void *)(map->l_addr + at->st_value);
    return 0;
}

/* The function that a jump of the driver leads to: the driver hands out other addresses than it exports. */
static void *target(void *address) {
    const uint8_t *code = address;
#ifdef __aarch64__
    int32_t word;
    memcpy(&word, code, 4);
    return (word & 0xfc000000) == 0x14000000 ? (void *)(code + ((word << 6) >> 6) * 4L) : address;
#else
    int32_t far;
    memcpy(&far, code + 1, 4);
    return *code == 0xe9 ? (void *)(code + 5 + far) : *code == 0xeb ? (void *)(code + 2 + (int8_t)code[1]) : address;
#endif
}

/* A hook is the hook of one symbol. */
static int belongs(void *hook, const char *symbol) {
    static struct { void *hook; char symbol[128]; } known[1024];
    static int count;
    for (int i = 0; i < count; i++) {
        int same = known[i].hook == hook, named = !strcmp(known[i].symbol, symbol);
        if (same || named) return same && named;
    }
    known[count].hook = hook;
    strcpy(known[count++].symbol, symbol);
    return 1;
}

int main(int argc, char **argv) {
    char line[256], name[128], symbol[128];
    int version, flags, queries = 0, hooked = 0, wrong = 0;
    FILE *table = fopen(argv[1], "r");
    /* Drivers before CUDA 12 have the first form only, which answers 500 where there is nothing. */
    get_proc_2 ask = (get_proc_2)dlsym(driver(), "cuGetProcAddress_v2");
    get_proc_1 ask_old = (get_proc_1)must(dlsym(driver(), "cuGetProcAddress"), "cuGetProcAddress");
    begin();
    if (!table) return 2;
    char report[65536] = "";
    while (fgets(line, sizeof line, table)) {
        if (sscanf(line, "%127s %d %d %127s", name, &version, &flags, symbol) != 4) continue;
        if (!strcmp(name, ".")) name[0] = 0;
        int none = !strcmp(symbol, "-");
        void *found = 0, *own = none ? 0 : real(argv[2], symbol);
        int status, result = ask ? ask(name, &found, version, flags, &status) : ask_old(name, &found, version, flags);
        queries++;
        int hook = found && found != own && target(found) != own;
        hooked += hook;
        if (result != (none && !ask ? 500 : 0) || (own == 0) != none || (found == 0) != none || (hook && !belongs(found, symbol))) {
            wrong++;
            if (strlen(report) < 60000)
                sprintf(report + strlen(report), "{\"symbol\":\"%s\",\"result\":%d,\"hook\":%d}\n", symbol, result, hook);
        }
    }
    say("{\"queries\":%d,\"hooked\":%d,\"wrong\":%d}", queries, hooked, wrong);
    fputs(report, stdout);
    return 0;
}
