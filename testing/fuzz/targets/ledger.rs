//! Parses any ledger: a valid report has consistent values, and its time is monotonic.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tessera_intercept_abi::{LEDGER_LEN, LedgerReport, MAX_MEMORY_BYTES, ledger};

/// Size of a write: offset in words, and value.
const WRITE: usize = 2 + 8;

fn word(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte))
}

/// Returns a new ledger with words overwritten, so that a short input reaches all of it.
fn overwritten(writes: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; LEDGER_LEN];
    bytes[..24].copy_from_slice(&ledger::initial());
    for write in writes.chunks_exact(WRITE) {
        let at = word(&write[..2]) as usize % (LEDGER_LEN / 8) * 8;
        bytes[at..at + 8].copy_from_slice(&write[2..]);
    }
    bytes
}

fuzz_target!(|input: (u64, u64, &[u8])| {
    let (first, second, writes) = input;
    let _ = LedgerReport::parse(writes).map_err(|error| error.to_string());
    let bytes = overwritten(writes);
    let Ok(report) = LedgerReport::parse(&bytes).map_err(|error| error.to_string()) else { return };
    assert!(report.used_bytes() <= MAX_MEMORY_BYTES);
    let (earlier, later) = (first.min(second), first.max(second));
    assert!(report.busy_ns(earlier) <= report.busy_ns(later), "busy time is monotonic");
    let slots: Vec<_> = report.processes().map(|process| process.slot).collect();
    assert!(
        slots.is_sorted_by(|slot, next| slot < next)
            && slots.iter().all(|slot| *slot < ledger::SLOTS)
    );
    let _ = (
        report.peak_bytes(),
        report.refused(),
        report.launches(),
        report.gpu_ns(),
        report.waited_ns(),
        report.waits(),
    );
});
