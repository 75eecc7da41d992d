/* Reads a grant and a ledger, and says what they say. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tessera_intercept.h"

static void read_file(const char *path, void *into, size_t length) {
    FILE *file = fopen(path, "rb");
    if (!file || fread(into, 1, length, file) != length || fgetc(file) != EOF) exit(2);
    fclose(file);
}

int main(int argc, char **argv) {
    static struct tessera_grant_page grant;
    static struct tessera_ledger_page ledger;
    if (argc != 3) return 2;
    read_file(argv[1], &grant, sizeof grant);
    read_file(argv[2], &ledger, sizeof ledger);
    if (memcmp(&grant.magic, TESSERA_GRANT_MAGIC, 8) || memcmp(&ledger.magic, TESSERA_LEDGER_MAGIC, 8)) return 3;
    if (grant.abi_version != TESSERA_ABI_VERSION || grant.length != TESSERA_GRANT_LEN) return 4;
    if (ledger.abi_version != TESSERA_ABI_VERSION || ledger.length != TESSERA_LEDGER_LEN) return 4;
    printf("%s of %02x%02x%02x%02x: %llu bytes, %u percent, policy %u%s\n", (const char *)grant.id, grant.gpu_uuid[0],
           grant.gpu_uuid[1], grant.gpu_uuid[2], grant.gpu_uuid[3], (unsigned long long)grant.memory_limit_bytes,
           grant.cores_percent, grant.policy, grant.flags & TESSERA_GRANT_OVERSUBSCRIBE ? ", may spill" : "");
    printf("%llu bytes taken, %llu refused, %llu unknown\n", (unsigned long long)TESSERA_USED_BYTES(ledger.total),
           (unsigned long long)ledger.refused, (unsigned long long)ledger.unknown_functions);
    for (int slot = 0; slot < TESSERA_SLOTS; slot++)
        if (ledger.slot[slot].state == TESSERA_SLOT_LIVE)
            printf("slot %d: process %u has %llu bytes\n", slot, ledger.slot[slot].pid,
                   (unsigned long long)ledger.slot[slot].used_bytes);
    return 0;
}
