/* Asks for 2 GiB by every way that leads to the driver, and says what came of it. */
#include "driver.h"

typedef int (*alloc_fn)(uint64_t *, size_t);
typedef int (*get_proc_1)(const char *, void **, int, uint64_t);
typedef int (*get_proc_2)(const char *, void **, int, uint64_t, int *);

static void try(const char *route, void *function) {
    uint64_t pointer = 0;
    int result = function ? ((alloc_fn)function)(&pointer, 2 * GIB) : -1;
    say("{\"route\":\"%s\",\"result\":%d}", route, result);
}

#ifdef LINKED
extern int cuMemAlloc_v2(uint64_t *, size_t);
extern int cuGetProcAddress_v2(const char *, void **, int, uint64_t, int *);
#endif

int main(int argc, char **argv) {
    void *found;
    int status;
    begin();
    try("dlsym", dlsym(driver(), "cuMemAlloc_v2"));
    dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    try("dlsym default", dlsym(RTLD_DEFAULT, "cuMemAlloc_v2"));
    try("dlsym next", dlsym(RTLD_NEXT, "cuMemAlloc_v2"));
    try("dlopen by path", dlsym(dlopen(argv[1], RTLD_NOW), "cuMemAlloc_v2"));

    /* The loader's own dlsym, which an interposed one cannot hide by name. */
    void *(*own)(void *, const char *) = dlvsym(RTLD_NEXT, "dlsym", OLDEST_GLIBC);
    try("dlvsym dlsym", own(driver(), "cuMemAlloc_v2"));
    own = dlsym(RTLD_NEXT, "dlsym");
    try("dlsym dlsym", own(driver(), "cuMemAlloc_v2"));

    get_proc_1 one = (get_proc_1)dlsym(driver(), "cuGetProcAddress");
    ok(one("cuMemAlloc", &found, 3020, 0), "v1");
    try("cuGetProcAddress", found);
    get_proc_2 two = (get_proc_2)dlsym(driver(), "cuGetProcAddress_v2");
    ok(two("cuMemAlloc", &found, 12000, 0, &status), "v2");
    try("cuGetProcAddress_v2", found);
    ok(two("", &found, 0, 0, &status), "empty");
    two = (get_proc_2)found;
    ok(two("cuMemAlloc", &found, 12000, 0, &status), "through empty");
    try("cuGetProcAddress of \\\"\\\"", found);
    ok(two("cuGetProcAddress", &found, 12000, 0, &status), "itself");
    ok(((get_proc_2)found)("cuMemAlloc", &found, 12000, 0, 0), "through itself");
    try("cuGetProcAddress of itself", found);
#ifdef LINKED
    try("linked", cuMemAlloc_v2);
    ok(cuGetProcAddress_v2("cuMemAlloc", &found, 12000, 0, &status), "linked");
    try("linked cuGetProcAddress", found);
#endif
    return 0;
}
