//! Parses any page as a grant: it is either rejected, or the result of a valid in-place update.
#![no_main]

use libfuzzer_sys::fuzz_target;
use tessera_intercept_abi::{ABI_VERSION, GRANT_LEN, Grant, GrantUpdate, grant_offset};

const MAGIC: &[u8] = b"TESGRANT";

/// Puts the bytes into a page with a grant's constant header, so that the fuzzer need not discover
/// it.
fn page(bytes: &[u8]) -> [u8; GRANT_LEN] {
    let mut page = [0; GRANT_LEN];
    let (front, rest) = page.split_at_mut(grant_offset::SEQUENCE);
    front[..8].copy_from_slice(MAGIC);
    front[8..12].copy_from_slice(&ABI_VERSION.to_le_bytes());
    front[12..16].copy_from_slice(&(GRANT_LEN as u32).to_le_bytes());
    let length = bytes.len().min(rest.len());
    rest[..length].copy_from_slice(&bytes[..length]);
    page
}

fn write_at(page: &mut [u8], at: usize, bytes: &[u8]) {
    page[at..at + bytes.len()].copy_from_slice(bytes);
}

fuzz_target!(|bytes: &[u8]| {
    let _ = Grant::parse(bytes).map_err(|error| error.to_string());
    let mut page = page(bytes);
    let mut even = page;
    even[grant_offset::SEQUENCE] &= !1;
    let Ok(grant) = Grant::parse(&even).map_err(|error| error.to_string()) else {
        assert!(Grant::parse(&page).is_err());
        return;
    };
    assert_eq!(
        Grant::parse(&page).is_err(),
        page != even,
        "an odd sequence number, and only that, is a change"
    );
    assert!(
        grant.id.as_str().len() <= 128
            && grant.claim_uid.as_str().bytes().all(|byte| byte.is_ascii_graphic())
    );
    // Updates the page, which may be in an update, to the same grant with other limits.
    let changed =
        Grant { memory_limit_bytes: grant.memory_limit_bytes / 2, cores_percent: 1, ..grant };
    let update = changed.update(&page).expect("same share");
    write_at(&mut page, GrantUpdate::SEQUENCE_OFFSET, &update.begin);
    write_at(&mut page, GrantUpdate::BODY_OFFSET, &update.body);
    assert!(Grant::parse(&page).is_err(), "unreadable during the update");
    write_at(&mut page, GrantUpdate::SEQUENCE_OFFSET, &update.end);
    let read = Grant::parse(&page).expect("complete");
    assert_eq!(Grant { sequence: changed.sequence, ..read }, changed);
});
