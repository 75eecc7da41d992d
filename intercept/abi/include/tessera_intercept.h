/*
 * The two files that a container gets with every share of a GPU: /dev/tessera/<id>/grant, read-only, and /dev/tessera/<id>/ledger.
 *
 * Written by the test `header` of intercept/abi from its sources; do not edit. Numbers are little-endian. The grant changes in
 * place: copy it while `sequence` is even and the same before and after. Words of the ledger are written by other processes
 * at any time: read each with one atomic load, and write none. A file with another `abi_version` must not be used.
 */
#ifndef TESSERA_INTERCEPT_H
#define TESSERA_INTERCEPT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#define TESSERA_ASSERT(condition) static_assert(condition, #condition)
#else
#define TESSERA_ASSERT(condition) _Static_assert(condition, #condition)
#endif

/* The first eight bytes of a grant, and of a ledger. */
#define TESSERA_GRANT_MAGIC "TESGRANT"
#define TESSERA_LEDGER_MAGIC "TESLEDGR"

/* Bytes that all processes have taken, from `total` of the ledger. */
#define TESSERA_USED_BYTES(total) ((uint64_t)(total) >> 21)

#define TESSERA_ABI_VERSION 1
#define TESSERA_GRANT_OVERSUBSCRIBE 1
#define TESSERA_GRANT_MPS 2
#define TESSERA_GRANT_LEN 4096
#define TESSERA_LEDGER_LEN 61440
#define TESSERA_SLOTS 448
#define TESSERA_SLOT_LEN 128
#define TESSERA_HEADER_LEN 4096
#define TESSERA_LOCK_OFFSET 4294967296ull
#define TESSERA_SLOT_LIVE 1

/* One container's use of one GPU: 64 bytes. */
struct tessera_compute_page {
    /* Token bucket: monotonic ns at which its balance is 0. */
    uint64_t due_ns;
    /* Futex of waiting launches: it is incremented when they must ask again. */
    uint32_t wake;
    uint32_t reserved0;
    /* Time in ns that launches waited for tokens, added up. */
    uint64_t waited_ns;
    /* Launches that waited. */
    uint64_t waits;
    /* Wall ns in which ended processes had work, added up. */
    uint64_t past_busy_ns;
    /* GPU-ns of a process that always had work: grows slower under contention. */
    uint64_t turn_ns;
    /* Monotonic ns of the last update of turn_ns. */
    uint64_t turn_at_ns;
    /* Busy ns of other containers at that time, as the host published it. */
    uint64_t turn_others_ns;
};
TESSERA_ASSERT(offsetof(struct tessera_compute_page, due_ns) == 0);
TESSERA_ASSERT(offsetof(struct tessera_compute_page, wake) == 8);
TESSERA_ASSERT(offsetof(struct tessera_compute_page, waited_ns) == 16);
TESSERA_ASSERT(offsetof(struct tessera_compute_page, waits) == 24);
TESSERA_ASSERT(offsetof(struct tessera_compute_page, past_busy_ns) == 32);
TESSERA_ASSERT(offsetof(struct tessera_compute_page, turn_ns) == 40);
TESSERA_ASSERT(offsetof(struct tessera_compute_page, turn_at_ns) == 48);
TESSERA_ASSERT(offsetof(struct tessera_compute_page, turn_others_ns) == 56);
TESSERA_ASSERT(sizeof(struct tessera_compute_page) == 64);

/* One process's use of one GPU: 48 bytes. */
struct tessera_compute_slot {
    /* GPU-ns charged: in advance, and corrected by measured times. */
    uint64_t gpu_ns;
    /* GPU-ns charged for work that is not known to be done. */
    uint64_t outstanding_ns;
    /* Monotonic ns since when it has work that is not in busy_ns; 0: it has none. */
    uint64_t busy_since_ns;
    /* Wall ns in which it had work, up to busy_since_ns. */
    uint64_t busy_ns;
    /* Monotonic ns since when a launch waits; 0: none does. */
    uint64_t waiting_since_ns;
    /* Monotonic ns by which its work is done at the latest: a process that launches no more does
     * not update busy_since_ns. */
    uint64_t done_by_ns;
};
TESSERA_ASSERT(offsetof(struct tessera_compute_slot, gpu_ns) == 0);
TESSERA_ASSERT(offsetof(struct tessera_compute_slot, outstanding_ns) == 8);
TESSERA_ASSERT(offsetof(struct tessera_compute_slot, busy_since_ns) == 16);
TESSERA_ASSERT(offsetof(struct tessera_compute_slot, busy_ns) == 24);
TESSERA_ASSERT(offsetof(struct tessera_compute_slot, waiting_since_ns) == 32);
TESSERA_ASSERT(offsetof(struct tessera_compute_slot, done_by_ns) == 40);
TESSERA_ASSERT(sizeof(struct tessera_compute_slot) == 48);

/* Published by the host, read-only in the container: 48 bytes for each share of a GPU. Words are
 * written one after the other: a reader between them is off by one interval of the host. */
struct tessera_published_page {
    /* Bits 0..15 rate in 1/100 percent (0: never written), 15 set if launches are not metered,
     * 16..32 others in 1/256 contexts, 32..64 monotonic ms, the low bits. */
    uint64_t word;
    /* Busy ns of the processes of all other shares, added up: grows by one second each second for
     * each process that always has work. */
    uint64_t others_busy_ns;
    /* Bits 0..16 GPU time that NVML reports as a part of the charged GPU time, in 1/1024 (0: not
     * measured), 16..24 utilization that NVML reports for the share's processes in percent, 32..64
     * monotonic ms, the low bits. */
    uint64_t gain;
    /* Bytes that the CUDA driver holds for the share's processes beyond what their slots say.
     * Negative if they were charged more for their contexts than these take. */
    int64_t overhead_bytes;
    /* GPU-ns that NVML reported for the share's processes while launches were not metered, added
     * up. */
    uint64_t unmetered_gpu_ns;
    /* Part of the guaranteed cores that the container is entitled to while word is fresh, in
     * 1/100 percent; 0 and 10,000: all of them. Less while the shares of the GPU that have work
     * are guaranteed more than the GPU. */
    uint64_t scale;
};
TESSERA_ASSERT(offsetof(struct tessera_published_page, word) == 0);
TESSERA_ASSERT(offsetof(struct tessera_published_page, others_busy_ns) == 8);
TESSERA_ASSERT(offsetof(struct tessera_published_page, gain) == 16);
TESSERA_ASSERT(offsetof(struct tessera_published_page, overhead_bytes) == 24);
TESSERA_ASSERT(offsetof(struct tessera_published_page, unmetered_gpu_ns) == 32);
TESSERA_ASSERT(offsetof(struct tessera_published_page, scale) == 40);
TESSERA_ASSERT(sizeof(struct tessera_published_page) == 48);

/* The last handles under which processes of the claim have exported memory of the GPU. */
struct tessera_exports_page {
    /* Number of handles so far: each replaces the oldest one. */
    uint64_t count;
    /* A hash of each handle; 0: none. */
    uint64_t hashes[255];
};
TESSERA_ASSERT(offsetof(struct tessera_exports_page, count) == 0);
TESSERA_ASSERT(offsetof(struct tessera_exports_page, hashes) == 8);
TESSERA_ASSERT(sizeof(struct tessera_exports_page) == 2048);

/* The grant file, byte for byte. Code handles Grant; this is its layout and the proof of it. */
struct tessera_grant_page {
    /* TESGRANT. */
    uint64_t magic;
    /* ABI_VERSION. */
    uint32_t abi_version;
    /* GRANT_LEN. */
    uint32_t length;
    /* Even: stable. Odd: the host is changing what follows. Goes up by two with every change. */
    uint64_t sequence;
    /* Bytes of GPU memory; never more than MAX_MEMORY_BYTES. */
    uint64_t memory_limit_bytes;
    /* Bytes charged for each CUDA context on this GPU; 0 charges nothing. */
    uint64_t context_bytes;
    /* Percent of the GPU's compute, 0 to 100; 0 = best effort. */
    uint32_t cores_percent;
    /* ComputePolicy as a number. */
    uint32_t policy;
    /* Bits of features that must be understood: an unknown bit refuses the grant.
     * GRANT_OVERSUBSCRIBE, GRANT_MPS. */
    uint64_t flags;
    /* The GPU. */
    uint8_t gpu_uuid[16];
    /* UID of the claim, NUL padded. */
    uint8_t claim_uid[64];
    /* Name of the share, which is its directory under /dev/tessera, NUL padded. */
    uint8_t id[128];
    /* Zero; room to grow. */
    uint8_t reserved[3768];
    /* Values that the host publishes several times a second. sequence does not count these
     * writes. They have a cache line of their own, so that readers of the rest are not slowed
     * down. */
    struct tessera_published_page published;
    uint8_t reserved1[16];
};
TESSERA_ASSERT(offsetof(struct tessera_grant_page, magic) == 0);
TESSERA_ASSERT(offsetof(struct tessera_grant_page, abi_version) == 8);
TESSERA_ASSERT(offsetof(struct tessera_grant_page, length) == 12);
TESSERA_ASSERT(offsetof(struct tessera_grant_page, sequence) == 16);
TESSERA_ASSERT(offsetof(struct tessera_grant_page, memory_limit_bytes) == 24);
TESSERA_ASSERT(offsetof(struct tessera_grant_page, context_bytes) == 32);
TESSERA_ASSERT(offsetof(struct tessera_grant_page, cores_percent) == 40);
TESSERA_ASSERT(offsetof(struct tessera_grant_page, policy) == 44);
TESSERA_ASSERT(offsetof(struct tessera_grant_page, flags) == 48);
TESSERA_ASSERT(offsetof(struct tessera_grant_page, gpu_uuid) == 56);
TESSERA_ASSERT(offsetof(struct tessera_grant_page, claim_uid) == 72);
TESSERA_ASSERT(offsetof(struct tessera_grant_page, id) == 136);
TESSERA_ASSERT(offsetof(struct tessera_grant_page, published) == 4032);
TESSERA_ASSERT(sizeof(struct tessera_grant_page) == 4096);

/* A process's part of the ledger.
 *
 * A change of used_bytes is numbered: next_used_bytes and begun announce it, total applies
 * it together with slot and number, settled completes it. From these words the next process
 * completes or drops the change of an ended process. */
struct tessera_slot_page {
    /* SLOT_FREE or SLOT_LIVE; for readers, the lock is what counts. */
    uint32_t state;
    /* The process, as it sees itself in its own PID namespace. */
    uint32_t pid;
    /* Start of the process in clock ticks since boot (field 22 of /proc/<pid>/stat). */
    uint64_t start_ticks;
    /* Inode of the PID namespace. */
    uint64_t pid_namespace;
    /* Bytes taken, as of change settled. */
    uint64_t used_bytes;
    /* Bytes taken once change begun is done. */
    uint64_t next_used_bytes;
    /* Number of the last change that was begun. */
    uint64_t begun;
    /* Number of the last change known to be in the total. */
    uint64_t applied;
    /* Number of the last change that is in used_bytes. */
    uint64_t settled;
    /* Kernel launches. */
    uint64_t launches;
    /* Its use of the GPU's time. */
    struct tessera_compute_slot compute;
    /* The host's PID of the process; 0: unknown. Written by the process, as all words here. */
    uint32_t host_pid;
    /* The low half of the start_ticks that host_pid belongs to. A library that knows neither
     * may have taken the slot since. */
    uint32_t host_pid_start;
};
TESSERA_ASSERT(offsetof(struct tessera_slot_page, state) == 0);
TESSERA_ASSERT(offsetof(struct tessera_slot_page, pid) == 4);
TESSERA_ASSERT(offsetof(struct tessera_slot_page, start_ticks) == 8);
TESSERA_ASSERT(offsetof(struct tessera_slot_page, pid_namespace) == 16);
TESSERA_ASSERT(offsetof(struct tessera_slot_page, used_bytes) == 24);
TESSERA_ASSERT(offsetof(struct tessera_slot_page, next_used_bytes) == 32);
TESSERA_ASSERT(offsetof(struct tessera_slot_page, begun) == 40);
TESSERA_ASSERT(offsetof(struct tessera_slot_page, applied) == 48);
TESSERA_ASSERT(offsetof(struct tessera_slot_page, settled) == 56);
TESSERA_ASSERT(offsetof(struct tessera_slot_page, launches) == 64);
TESSERA_ASSERT(offsetof(struct tessera_slot_page, compute) == 72);
TESSERA_ASSERT(offsetof(struct tessera_slot_page, host_pid) == 120);
TESSERA_ASSERT(offsetof(struct tessera_slot_page, host_pid_start) == 124);
TESSERA_ASSERT(sizeof(struct tessera_slot_page) == 128);

/* A ledger as it is mapped by the processes of a claim. */
struct tessera_ledger_page {
    /* MAGIC. */
    uint64_t magic;
    /* ABI_VERSION. */
    uint32_t abi_version;
    /* LEDGER_LEN. */
    uint32_t length;
    /* SLOTS. */
    uint32_t slots;
    /* SLOT_LEN. */
    uint32_t slot_length;
    uint64_t reserved0[5];
    /* Bytes taken by all processes, and the change that made it so: a Total. */
    uint64_t total;
    /* The most bytes that were taken at one time. */
    uint64_t peak_bytes;
    /* Requests for memory refused by the limit. */
    uint64_t refused;
    /* Kernel launches of ended processes. */
    uint64_t past_launches;
    /* GPU-ns of ended processes. */
    uint64_t past_gpu_ns;
    uint64_t reserved1[3];
    /* Words about compute that the processes share. */
    struct tessera_compute_page compute;
    /* Memory that processes of the claim have exported. */
    struct tessera_exports_page exports;
    /* Bytes of the last request for memory that the limit refused. */
    uint64_t refused_bytes;
    /* Bytes that counted as used then. */
    uint64_t refused_used_bytes;
    uint64_t reserved2[229];
    /* Number of driver functions that programs got and that are not in the symbol table. In the
     * last 64 bits of the header. */
    uint64_t unknown_functions;
    /* One for each process. */
    struct tessera_slot_page slot[448];
};
TESSERA_ASSERT(offsetof(struct tessera_ledger_page, magic) == 0);
TESSERA_ASSERT(offsetof(struct tessera_ledger_page, abi_version) == 8);
TESSERA_ASSERT(offsetof(struct tessera_ledger_page, length) == 12);
TESSERA_ASSERT(offsetof(struct tessera_ledger_page, slots) == 16);
TESSERA_ASSERT(offsetof(struct tessera_ledger_page, slot_length) == 20);
TESSERA_ASSERT(offsetof(struct tessera_ledger_page, total) == 64);
TESSERA_ASSERT(offsetof(struct tessera_ledger_page, peak_bytes) == 72);
TESSERA_ASSERT(offsetof(struct tessera_ledger_page, refused) == 80);
TESSERA_ASSERT(offsetof(struct tessera_ledger_page, past_launches) == 88);
TESSERA_ASSERT(offsetof(struct tessera_ledger_page, past_gpu_ns) == 96);
TESSERA_ASSERT(offsetof(struct tessera_ledger_page, compute) == 128);
TESSERA_ASSERT(offsetof(struct tessera_ledger_page, exports) == 192);
TESSERA_ASSERT(offsetof(struct tessera_ledger_page, refused_bytes) == 2240);
TESSERA_ASSERT(offsetof(struct tessera_ledger_page, refused_used_bytes) == 2248);
TESSERA_ASSERT(offsetof(struct tessera_ledger_page, unknown_functions) == 4088);
TESSERA_ASSERT(offsetof(struct tessera_ledger_page, slot) == 4096);
TESSERA_ASSERT(sizeof(struct tessera_ledger_page) == 61440);

#endif
