/* Lets a plugin look a function up that was loaded with RTLD_DEEPBIND. */
#include "driver.h"

int main(int argc, char **argv) {
    uint64_t pointer;
    begin();
    void *plugin = must(dlopen(argv[1], RTLD_NOW | RTLD_DEEPBIND), "plugin");
    void *(*find)(void *) = (void *(*)(void *))must(dlsym(plugin, "find"), "find");
    int (*alloc)(uint64_t *, size_t) = (int (*)(uint64_t *, size_t))find(driver());
    say("{\"result\":%d}", alloc(&pointer, 2 * GIB));
    return 0;
}
