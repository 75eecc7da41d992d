/* Says which functions of a list the driver has not, by dlsym: by its handle, and in all that is loaded. */
#include "driver.h"

int main(int argc, char **argv) {
    char name[256];
    FILE *list = fopen(argv[1], "r");
    if (!list || !dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL)) return 2;
    while (fscanf(list, "%255s", name) == 1) {
        int by_handle = dlsym(driver(), name) != 0, by_default = dlsym(RTLD_DEFAULT, name) != 0;
        if (!by_handle || !by_default) say("{\"missing\":\"%s\",\"handle\":%d,\"default\":%d}", name, by_handle, by_default);
    }
    say("{\"end\":true}");
    return 0;
}
