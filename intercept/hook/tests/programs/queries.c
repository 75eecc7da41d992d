/* Makes every query of a table (name or ".", version, flags, symbol or "-") of cuGetProcAddress, and checks that what comes is
 * the symbol, or the hook that is named after it; or nothing. */
#define _GNU_SOURCE
#include <link.h>
#include "driver.h"

typedef int (*get_proc)(const char *, void **, int, uint64_t, int *);

/* The driver's own symbol, past every interposed dlsym: from the tables of the loaded library. */
static void *real(const char *symbol) {
    struct link_map *map = driver();
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

static int is_drivers(void *address) {
    Dl_info info;
    return dladdr(address, &info) && strstr(info.dli_fname, "libcuda");
}

int main(int argc, char **argv) {
    char line[256], name[128], symbol[128];
    int version, flags, queries = 0, hooked = 0, wrong = 0;
    FILE *table = fopen(argv[1], "r");
    get_proc ask = (get_proc)dlsym(driver(), "cuGetProcAddress_v2");
    begin();
    if (!table) return 2;
    char report[65536] = "";
    while (fgets(line, sizeof line, table)) {
        if (sscanf(line, "%127s %d %d %127s", name, &version, &flags, symbol) != 4) continue;
        if (!strcmp(name, ".")) name[0] = 0;
        int none = !strcmp(symbol, "-");
        void *found = 0, *own = none ? 0 : real(symbol);
        int status, result = ask(name, &found, version, flags, &status);
        queries++;
        int hook = found && !is_drivers(found);
        void *by_name = none ? 0 : dlsym(driver(), symbol);
        hooked += hook;
        /* Handed out as by dlsym: both the hook of that very symbol, or both the driver's own. */
        if (result || (!own && !none) || found != by_name || (!hook && found != own)) {
            wrong++;
            if (strlen(report) < 60000)
                sprintf(report + strlen(report), "{\"symbol\":\"%s\",\"result\":%d,\"hook\":%d}\n", symbol, result, hook);
        }
    }
    say("{\"queries\":%d,\"hooked\":%d,\"wrong\":%d}", queries, hooked, wrong);
    fputs(report, stdout);
    return 0;
}
