/* Asks for 2 GiB by every way there is to the driver, the devious ones too, and says what came of it; -1 = no way there.
 * Arguments: a copy of the driver elsewhere; the real driver; a plugin that is linked with the driver. */
#define _GNU_SOURCE
#include <link.h>
#include "driver.h"

typedef int (*alloc_fn)(uint64_t *, size_t);
typedef void *(*dlsym_fn)(void *, const char *);
typedef int (*get_proc_1)(const char *, void **, int, uint64_t);
typedef int (*get_proc_2)(const char *, void **, int, uint64_t, int *);

static void try(const char *route, void *function) {
    uint64_t pointer = 0;
    int result = function ? ((alloc_fn)function)(&pointer, 2 * GIB) : -1;
    say("{\"route\":\"%s\",\"result\":%d}", route, result);
    if (!result) CU(cuMemFree_v2, pointer);
}

/* A function in the tables of a library that is loaded. */
static void *in_tables(struct link_map *map, const char *name) {
    const char *strings = 0;
    const ElfW(Sym) *symbols = 0;
    if (!map) return 0;
    for (ElfW(Dyn) *entry = map->l_ld; entry->d_tag; entry++) {
        if (entry->d_tag == DT_STRTAB) strings = (void *)entry->d_un.d_ptr;
        if (entry->d_tag == DT_SYMTAB) symbols = (void *)entry->d_un.d_ptr;
    }
    for (const ElfW(Sym) *at = symbols; (void *)at < (void *)strings; at++)
        if (at->st_shndx && !strcmp(strings + at->st_name, name)) return (void *)(map->l_addr + at->st_value);
    return 0;
}

static struct link_map *loaded(const char *part) {
    struct link_map *map = _r_debug.r_map;
    while (map && !strstr(map->l_name, part)) map = map->l_next;
    return map;
}

static void *ask(get_proc_2 two, const char *name, uint64_t flags) {
    void *found = 0;
    int status;
    return two && !two(name, &found, 12000, flags, &status) ? found : 0;
}

#ifdef LINKED
extern int cuMemAlloc_v2(uint64_t *, size_t);
extern int cuGetProcAddress_v2(const char *, void **, int, uint64_t, int *);
#endif

int main(int argc, char **argv) {
    void *found = 0;
    begin();
    dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
#ifdef LINKED
    try("a program that is linked with libcuda", cuMemAlloc_v2);
    try("`cuGetProcAddress` of a program that is linked with libcuda", ask(cuGetProcAddress_v2, "cuMemAlloc", 0));
#endif
    try("`dlopen` and `dlsym`", dlsym(driver(), "cuMemAlloc_v2"));
    try("`dlvsym`", dlvsym(driver(), "cuMemAlloc_v2", "libcuda.so.1") ?: dlsym(driver(), "cuMemAlloc_v2"));
    try("`dlsym` with `RTLD_DEFAULT`", dlsym(RTLD_DEFAULT, "cuMemAlloc_v2"));
    try("`dlsym` with `RTLD_NEXT`", dlsym(RTLD_NEXT, "cuMemAlloc_v2"));

    get_proc_1 one = (get_proc_1)dlsym(driver(), "cuGetProcAddress");
    if (one("cuMemAlloc", &found, 3020, 0)) found = 0;
    try("`cuGetProcAddress`, first form", found);
    get_proc_2 two = (get_proc_2)dlsym(driver(), "cuGetProcAddress_v2");
    try("`cuGetProcAddress`, second form", ask(two, "cuMemAlloc", 0));
    try("`cuGetProcAddress` of the empty name", ask((get_proc_2)ask(two, "", 0), "cuMemAlloc", 0));
    try("`cuGetProcAddress` of itself", ask((get_proc_2)ask(two, "cuGetProcAddress", 0), "cuMemAlloc", 0));

    dlsym_fn own = dlvsym(RTLD_NEXT, "dlsym", OLDEST_GLIBC);
    try("the loader's `dlsym`, by `dlvsym` with `RTLD_NEXT`", own(driver(), "cuMemAlloc_v2"));
    /* Before glibc 2.34 in a library of its own. */
    own = (dlsym_fn)(in_tables(loaded("/libc.so"), "dlsym") ?: in_tables(loaded("/libdl.so"), "dlsym"));
    try("the loader's `dlsym`, from the tables of libc", own ? own(driver(), "cuMemAlloc_v2") : 0);
    try("the tables of the library that `dlopen` gives", in_tables(driver(), "cuMemAlloc_v2"));

    void *plugin = dlopen(argv[3], RTLD_NOW | RTLD_DEEPBIND);
    dlsym_fn finds = plugin ? (dlsym_fn)dlsym(plugin, "find") : 0;
    try("a plugin opened with `RTLD_DEEPBIND` that is linked with libcuda", plugin ? dlsym(plugin, "alloc") : 0);
    try("a plugin opened with `RTLD_DEEPBIND` that uses `dlsym`", finds ? finds(driver(), "cuMemAlloc_v2") : 0);

    try("the real driver by its path, and `dlsym`", dlsym(dlopen(argv[2], RTLD_NOW), "cuMemAlloc_v2"));
    try("the tables of the real driver by its path", in_tables(dlopen(argv[2], RTLD_NOW), "cuMemAlloc_v2"));
    return 0;
}
