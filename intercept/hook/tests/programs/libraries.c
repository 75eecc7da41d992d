/* A library and a module in a container that is full: they load, and their kernels run. */
#include "both.h"
#include <elf.h>

/* Code, and variables that the file has no room for. */
static struct { Elf64_Ehdr header; Elf64_Shdr section[2]; } image = {
    {.e_ident = "\x7f" "ELF", .e_shoff = sizeof(Elf64_Ehdr), .e_shentsize = sizeof(Elf64_Shdr), .e_shnum = 2},
    {{.sh_flags = SHF_ALLOC | SHF_EXECINSTR, .sh_size = 8 * MIB}, {.sh_flags = SHF_ALLOC | SHF_WRITE, .sh_size = MIB, .sh_type = SHT_NOBITS}},
};

int main(int count, char **arguments) {
    void *library, *module, *kernel, *function, *none = 0;
    uint64_t p, before;
    open_both(arguments);
    begin();
    while (!CU(cuMemAlloc_v2, &p, MIB)) continue;
    before = charged();
    int loaded = CU(cuLibraryLoadData, &library, &image, none, none, 0, none, none, 0);
    ok(CU(cuLibraryGetKernel, &kernel, library, "spin_for_1us"), "kernel");
    int found = CU(cuKernelGetFunction, &function, kernel);
    int launched = CU(cuLaunchKernel, function, 1, 1, 1, 32, 1, 1, 0, none, none, none);
    int eager = CU(cuModuleLoadData, &module, &image);
    say("{\"loaded\":%d,\"found\":%d,\"launched\":%d,\"module\":%d,\"charged\":%ld}",
        loaded, found, launched, eager, (long)(charged() - before));
    ok(CU(cuLibraryUnload, library), "unload");
    ok(CU(cuModuleUnload, module), "unload");
    (void)count;
    return 0;
}
