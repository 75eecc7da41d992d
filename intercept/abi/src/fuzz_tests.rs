//! Arbitrary bytes, as a tenant, a broken disk or another version may have written them.

extern crate std;
use std::vec::Vec;

use proptest::prelude::*;

use crate::{
    ComputePolicy, GRANT_LEN, GpuUuid, Grant, LEDGER_LEN, LedgerReport, MAX_MEMORY_BYTES, Text,
    ledger,
};

/// The most arbitrary bytes: Miri takes a tenth of a second to generate a hundred.
const LONGEST: usize = if cfg!(miri) { 64 } else { GRANT_LEN };

/// Lengths of files. Miri extends a file byte by byte.
const LENGTHS: core::ops::Range<usize> =
    if cfg!(miri) { GRANT_LEN - 1..GRANT_LEN + 2 } else { 0..2 * LEDGER_LEN };

fn text<const N: usize>() -> impl Strategy<Value = Text<N>> {
    "[a-z0-9-]{0,60}".prop_map(|text| Text::new(&text).expect("short"))
}

prop_compose! {
    fn grant()(
        gpu in any::<[u8; 16]>(),
        memory_limit_bytes in 0..=MAX_MEMORY_BYTES,
        context_bytes in any::<u64>(),
        cores_percent in 0..=100_u32,
        policy in prop_oneof![Just(ComputePolicy::None), Just(ComputePolicy::Fixed), Just(ComputePolicy::Balance)],
        oversubscribe in any::<bool>(),
        mps in any::<bool>(),
        claim_uid in text(),
        id in text(),
        sequence in any::<u64>().prop_map(|sequence| sequence & !1),
    ) -> Grant {
        Grant {
            gpu_uuid: GpuUuid(gpu),
            memory_limit_bytes,
            context_bytes,
            cores_percent,
            policy,
            oversubscribe,
            mps,
            claim_uid,
            id,
            sequence,
        }
    }
}

/// Places of a page that are overwritten, and their new bytes.
fn damage(length: usize) -> impl Strategy<Value = Vec<(usize, u8)>> {
    // The fields lie in front; most of the rest is reserved.
    let at = prop_oneof![4 => 0..300_usize, 1 => 0..length];
    proptest::collection::vec((at, any::<u8>()), 0..12)
}

fn damaged(mut page: Vec<u8>, damage: &[(usize, u8)]) -> Vec<u8> {
    damage.iter().for_each(|(at, byte)| page[*at] = *byte);
    page
}

fn fresh_ledger() -> Vec<u8> {
    let mut bytes = std::vec![0; LEDGER_LEN];
    bytes[..24].copy_from_slice(&ledger::initial());
    bytes
}

proptest! {
    #[test]
    fn what_is_read_as_a_grant_is_written_as_the_same_grant(grant in grant(), damage in damage(GRANT_LEN)) {
        let page = damaged(grant.encode().expect("in range").to_vec(), &damage);
        if let Ok(read) = Grant::parse(&page) {
            prop_assert!(read.memory_limit_bytes <= MAX_MEMORY_BYTES && read.cores_percent <= 100);
            prop_assert_eq!(Grant::parse(&read.encode().expect("what is read is in range")), Ok(read));
        }
    }

    #[test]
    fn a_change_is_whole_wherever_the_one_before_it_stopped(old in grant(), new in grant(), torn in any::<bool>()) {
        let new = Grant { gpu_uuid: old.gpu_uuid, claim_uid: old.claim_uid, id: old.id, ..new };
        let mut page = old.encode().expect("in range");
        page[16] |= u8::from(torn);
        let update = new.update(&page).expect("the same share");
        let sequence = crate::GrantUpdate::SEQUENCE_OFFSET;
        page[sequence..sequence + 8].copy_from_slice(&update.begin);
        prop_assert!(Grant::parse(&page).is_err(), "not readable during the update");
        let body = crate::GrantUpdate::BODY_OFFSET;
        page[body..body + update.body.len()].copy_from_slice(&update.body);
        prop_assert!(Grant::parse(&page).is_err(), "not readable during the update");
        page[sequence..sequence + 8].copy_from_slice(&update.end);
        let read = Grant::parse(&page).expect("done");
        prop_assert_eq!(Grant { sequence: new.sequence, ..read }, new);
        prop_assert_ne!(read.sequence, old.sequence);
    }

    #[test]
    fn what_is_cut_off_or_too_long_is_neither(
        bytes in proptest::collection::vec(any::<u8>(), 0..LONGEST),
        grant in grant(),
        length in LENGTHS,
    ) {
        prop_assert!(Grant::parse(&bytes).is_err());
        prop_assert!(LedgerReport::parse(&bytes).is_err());
        let (mut page, mut ledger) = (grant.encode().expect("in range").to_vec(), fresh_ledger());
        page.resize(length, 0);
        ledger.resize(length, 0);
        prop_assert_eq!(Grant::parse(&page).is_ok(), length == GRANT_LEN);
        prop_assert_eq!(LedgerReport::parse(&ledger).is_ok(), length == LEDGER_LEN);
    }

    #[test]
    fn whatever_a_tenant_wrote_into_its_ledger_is_a_number(
        damage in damage(LEDGER_LEN), garbage in any::<u8>(), from in 24..LEDGER_LEN, now in any::<u64>(),
    ) {
        let mut bytes = fresh_ledger();
        bytes[from..].fill(garbage);
        for slot in 0..ledger::SLOTS {
            bytes[ledger::HEADER_LEN + slot * ledger::SLOT_LEN..][..4].copy_from_slice(&ledger::SLOT_LIVE.to_le_bytes());
        }
        let bytes = damaged(bytes, &damage);
        if let Ok(report) = LedgerReport::parse(&bytes) {
            prop_assert!(report.used_bytes() <= MAX_MEMORY_BYTES);
            prop_assert!(report.processes().count() <= ledger::SLOTS);
            let _ = (report.launches(), report.gpu_ns(), report.busy_ns(now), report.waited_ns(), report.waits());
        }
    }
}
