/* Images of modules: what of them lies in the GPU's memory is charged. */
#include "both.h"
#include <elf.h>

static struct { Elf64_Ehdr header; Elf64_Shdr section[3]; } elf = {
    {.e_ident = "\x7f" "ELF", .e_shoff = sizeof(Elf64_Ehdr), .e_shentsize = sizeof(Elf64_Shdr), .e_shnum = 3},
    /* Code, variables that the file has no room for, and what is not to be in memory. */
    {{.sh_flags = SHF_ALLOC, .sh_size = 1 << 20}, {.sh_flags = SHF_ALLOC, .sh_size = 64 << 20, .sh_type = SHT_NOBITS}, {.sh_size = 5 << 20}},
};

static struct {
    uint32_t magic; uint16_t version, header; uint64_t length;
    struct { uint16_t kind, zero; uint32_t header; uint64_t length, rest[5], unpacked; } packed;
    struct { uint16_t kind, zero; uint32_t header; uint64_t length, rest[6]; } plain;
    char image[sizeof elf];
} several = {0xba55ed50, 1, 16, sizeof several - 16, {2, 0, 64, 0, {0}, 3 << 20}, {2, 0, 64, sizeof elf, {0}}, {0}};

static struct { uint32_t magic, version; void *image, *other; } wrapper = {0x466243b1, 1, &several, 0};

int main(int count, char **arguments) {
    void *module, *library, *context, *none = 0;
    uint64_t before;
    open_both(arguments);
    void *primary = begin();
    STEP(CU(cuModuleLoadData, &module, &elf));
    STEP(CU(cuModuleUnload, module));
    STEP(CU(cuModuleLoadDataEx, &module, &elf, 0, none, none));
    STEP(CU(cuModuleUnload, module));
    STEP(CU(cuModuleLoadFatBinary, &module, &elf));
    STEP(CU(cuModuleUnload, module));
    STEP(CU(cuLibraryLoadData, &library, &elf, none, none, 0, none, none, 0));
    STEP(CU(cuLibraryUnload, library));
    STEP(CU(cuCtxCreate_v2, &context, 0, 0));
    STEP(CU(cuModuleLoadData, &module, &elf));
    STEP(CU(cuCtxDestroy_v2, context));
    ok(CU(cuCtxSetCurrent, primary), "back");
    /* The fake driver does not look into these. */
    memcpy(several.image, &elf, sizeof elf);
    before = charged();
    ok(CU(cuModuleLoadData, &module, &wrapper), "wrapper");
    say("{\"wrapped\":%lu}", charged() - before);
    ok(CU(cuModuleUnload, module), "unload");
    ok(CU(cuModuleLoadData, &module, ".version 8.0"), "text");
    say("{\"text\":%lu}", charged() - before);
    ok(CU(cuModuleUnload, module), "unload");
    ok(CU(cuModuleLoadData, &module, "x"), "short text");
    ok(CU(cuModuleUnload, module), "unload");
    say("{\"NULL\":%d,\"no module\":%d}", CU(cuModuleLoadData, &module, none), CU(cuModuleUnload, (void *)0x1234));
    both("errors");
    elf.section[1].sh_size = (uint64_t)100 << 30;
    say("{\"refused\":%d}", CU(cuModuleLoadData, &module, &elf));
    both("end");
    (void)count;
    return 0;
}
