/* Libraries in a container that is full: they load, their kernels run, and large variables are refused. */
#include "both.h"
#include <elf.h>

typedef struct { Elf64_Ehdr header; Elf64_Shdr section[2]; } image;

static image of(uint64_t code, uint64_t flags, uint64_t bytes) {
    image made = {
        {.e_ident = "\x7f" "ELF", .e_shoff = sizeof(Elf64_Ehdr), .e_shentsize = sizeof(Elf64_Shdr), .e_shnum = 2},
        {{.sh_flags = SHF_ALLOC | SHF_EXECINSTR, .sh_size = code}, {.sh_flags = flags, .sh_size = bytes, .sh_type = SHT_NOBITS}},
    };
    return made;
}

static int load(void **library, image *from) {
    void *none = 0;
    return CU(cuLibraryLoadData, library, from, none, none, 0, none, none, 0);
}

int main(int count, char **arguments) {
    void *library, *module, *kernel, *function;
    uint64_t p, before, held[2] = {0}, taken = 0;
    open_both(arguments);
    begin();
    while (!CU(cuMemAlloc_v2, &p, MIB)) held[taken++ % 2] = p;
    before = charged();
    image small = of(8 * MIB, SHF_ALLOC | SHF_WRITE, MIB), large = of(MIB, SHF_ALLOC | SHF_WRITE, 64 * MIB);
    image shared = of(MIB, SHF_ALLOC | SHF_WRITE | SHF_INFO_LINK, 64 * MIB);
    int loaded = load(&library, &small);
    ok(CU(cuLibraryGetKernel, &kernel, library, "spin_for_1us"), "kernel");
    int found = CU(cuKernelGetFunction, &function, kernel);
    int launched = CU(cuLaunchKernel, function, 1, 1, 1, 32, 1, 1, 0, (void *)0, (void *)0, (void *)0);
    say("{\"loaded\":%d,\"found\":%d,\"launched\":%d,\"charged\":%ld}", loaded, found, launched, (long)(charged() - before));
    ok(CU(cuLibraryUnload, library), "unload");
    say("{\"large\":%d,\"module\":%d}", load(&library, &large), CU(cuModuleLoadData, &module, &shared));
    /* With room for it, a module of kernels with shared memory is charged its code. */
    for (int i = 0; i < 2; i++) ok(CU(cuMemFree_v2, held[i]), "free");
    before = charged();
    ok(CU(cuModuleLoadData, &module, &shared), "module");
    say("{\"shared\":%ld}", (long)(charged() - before));
    (void)count;
    return 0;
}
