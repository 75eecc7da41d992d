extern crate std;
use std::string::ToString;
use std::vec;
use std::vec::Vec;

use super::*;

fn fresh() -> Vec<u8> {
    let mut bytes = vec![0; LEDGER_LEN];
    bytes[..24].copy_from_slice(&initial());
    bytes
}

fn put(bytes: &mut [u8], at: usize, word: u64) {
    bytes[at..at + 8].copy_from_slice(&word.to_le_bytes());
}

#[test]
fn a_fresh_ledger_says_that_nothing_is_taken() {
    let bytes = fresh();
    let report = LedgerReport::parse(&bytes).expect("fresh");
    assert_eq!((report.used_bytes(), report.peak_bytes(), report.refused()), (0, 0, 0));
    assert_eq!(report.processes().count(), 0);
}

#[test]
fn a_report_names_the_processes() {
    let mut bytes = fresh();
    let total = Total { used_bytes: 5 << 30, slot: 3, change: 9 };
    put(&mut bytes, offset_of!(LedgerPage, total), total.pack());
    let at = HEADER_LEN + 3 * SLOT_LEN;
    bytes[at] = 1;
    bytes[at + 4] = 77;
    put(&mut bytes, at + offset_of!(SlotPage, used_bytes), 5 << 30);
    put(&mut bytes, at + offset_of!(SlotPage, launches), 2);
    put(&mut bytes, offset_of!(LedgerPage, past_launches), 40);

    let report = LedgerReport::parse(&bytes).expect("a ledger");
    assert_eq!(report.used_bytes(), 5 << 30);
    assert_eq!(report.launches(), 42);
    let processes: Vec<_> = report.processes().collect();
    assert_eq!(processes.len(), 1);
    assert_eq!((processes[0].slot, processes[0].pid, processes[0].used_bytes), (3, 77, 5 << 30));
}

#[test]
fn what_the_host_calls_a_process_counts_for_the_process_that_was_told_so() {
    let mut bytes = fresh();
    let at = HEADER_LEN + 3 * SLOT_LEN;
    let host_pid = |bytes: &[u8]| {
        LedgerReport::parse(bytes)
            .expect("a ledger")
            .processes()
            .next()
            .expect("a process")
            .host_pid
    };
    bytes[at] = 1;
    put(&mut bytes, at + offset_of!(SlotPage, start_ticks), 7 << 32 | 1234);
    assert_eq!(host_pid(&bytes), None, "unknown");
    put(&mut bytes, at + offset_of!(SlotPage, host_pid), 1234 << 32 | 4711);
    assert_eq!(host_pid(&bytes), Some(4711));
    // A library that does not know the word takes the slot for another process.
    put(&mut bytes, at + offset_of!(SlotPage, start_ticks), 7 << 32 | 1235);
    assert_eq!(host_pid(&bytes), None);
}

#[test]
fn busy_time_is_of_the_living_and_the_dead_and_ends_when_the_work_should() {
    let mut bytes = fresh();
    put(&mut bytes, offset_of!(LedgerPage, compute.past_busy_ns), 100);
    put(&mut bytes, offset_of!(LedgerPage, compute.waited_ns), 9);
    put(&mut bytes, offset_of!(LedgerPage, compute.waits), 3);
    let at = HEADER_LEN + 5 * SLOT_LEN;
    bytes[at] = 1;
    put(&mut bytes, at + offset_of!(SlotPage, compute.busy_ns), 20);
    put(&mut bytes, at + offset_of!(SlotPage, compute.busy_since_ns), 1_000);
    put(&mut bytes, at + offset_of!(SlotPage, compute.done_by_ns), 1_050);
    put(&mut bytes, at + offset_of!(SlotPage, compute.waiting_since_ns), 1_020);
    let report = LedgerReport::parse(&bytes).expect("a ledger");
    assert_eq!((report.busy_ns(1_030), report.busy_ns(9_000)), (100 + 20 + 30, 100 + 20 + 50));
    assert_eq!((report.waited_ns(), report.waits()), (9, 3));
    assert!(report.processes().all(|process| process.waits));
}

#[test]
fn what_a_tenant_wrote_over_is_an_error_and_nothing_worse() {
    assert!(matches!(LedgerReport::parse(&[]), Err(LedgerError::Length { found: 0 })));
    assert!(matches!(LedgerReport::parse(&vec![0; LEDGER_LEN]), Err(LedgerError::Magic)));
    let mut foreign = fresh();
    foreign[8] = 7;
    let error = LedgerReport::parse(&foreign).expect_err("foreign");
    assert_eq!(error, LedgerError::AbiVersion { found: 7 });
    assert!(error.to_string().contains("ABI version 7"));
    let mut narrow = fresh();
    narrow[16] = 1;
    assert!(matches!(LedgerReport::parse(&narrow), Err(LedgerError::Slots { .. })));

    let mut garbage = vec![0xff; LEDGER_LEN];
    garbage[..24].copy_from_slice(&initial());
    let report = LedgerReport::parse(&garbage).expect("a header");
    assert_eq!(report.launches(), u64::MAX);
    assert_eq!(report.used_bytes(), Total::MAX_USED);
}

#[test]
fn the_total_keeps_bytes_slot_and_change_apart() {
    for total in [
        Total { used_bytes: 0, slot: 0, change: 0 },
        Total { used_bytes: Total::MAX_USED, slot: 0, change: 0 },
        Total { used_bytes: 0, slot: SLOTS - 1, change: 0 },
        Total { used_bytes: 12_345_678_901, slot: 300, change: Total::CHANGE_MASK },
    ] {
        assert_eq!(Total::unpack(total.pack()), total);
    }
    assert_eq!(
        Total::unpack(Total { used_bytes: u64::MAX, slot: 1, change: 2 }.pack()).used_bytes,
        Total::MAX_USED
    );
}
