extern crate std;
use std::string::ToString;

use super::*;

fn grant() -> Grant {
    Grant {
        gpu_uuid: "GPU-1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77".parse().expect("a UUID"),
        memory_limit_bytes: 19 << 30,
        context_bytes: 0,
        cores_percent: 25,
        policy: ComputePolicy::Fixed,
        oversubscribe: false,
        mps: false,
        claim_uid: Text::new("5c1c1f43-9c4d-4a11-8a37-3a9b8f3f2d10").expect("short"),
        id: Text::new("5c1c1f43-9c4d-4a11-8a37-3a9b8f3f2d10-0").expect("short"),
        sequence: 0,
    }
}

fn page() -> [u8; GRANT_LEN] {
    grant().encode().expect("in range")
}

fn applied(mut page: [u8; GRANT_LEN], update: &GrantUpdate) -> [u8; GRANT_LEN] {
    page[GrantUpdate::BODY_OFFSET..][..update.body.len()].copy_from_slice(&update.body);
    page[GrantUpdate::SEQUENCE_OFFSET..][..8].copy_from_slice(&update.end);
    page
}

#[test]
fn a_grant_survives_its_file() {
    assert_eq!(Grant::parse(&page()), Ok(grant()));
}

#[test]
fn a_grant_says_by_its_first_flag_that_memory_may_spill() {
    let spilling = Grant { oversubscribe: true, ..grant() };
    let written = spilling.encode().expect("in range");
    assert_eq!(written[grant_offset::FLAGS..][..8], GRANT_OVERSUBSCRIBE.to_le_bytes());
    assert_eq!((written[grant_offset::FLAGS], page()[grant_offset::FLAGS]), (1, 0));
    assert_eq!(Grant::parse(&written), Ok(spilling));
}

#[test]
fn a_grant_says_by_its_second_flag_that_the_gpu_is_shared_by_mps() {
    let shared = Grant { mps: true, ..grant() };
    let written = shared.encode().expect("in range");
    assert_eq!(written[grant_offset::FLAGS..][..8], GRANT_MPS.to_le_bytes());
    assert_eq!(Grant::parse(&written), Ok(shared));
    let both = Grant { oversubscribe: true, ..shared };
    assert_eq!(Grant::parse(&both.encode().expect("in range")), Ok(both));
}

#[test]
fn memory_may_be_allowed_to_spill_while_containers_read() {
    let update = Grant { oversubscribe: true, ..grant() }.update(&page()).expect("same share");
    assert_eq!(Grant::parse(&applied(page(), &update)).map(|grant| grant.oversubscribe), Ok(true));
}

#[test]
fn the_uuid_is_written_as_nvml_writes_it() {
    assert_eq!(grant().gpu_uuid.to_string(), "GPU-1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77");
    assert!("GPU-1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c7".parse::<GpuUuid>().is_err());
    assert!("MIG-1f0c2d3e-9a41-7c3b-8e55-0d6f2b1a4c77".parse::<GpuUuid>().is_err());
    assert!("GPU-1f0c2d3e-9a41-7c3b-8e55x0d6f2b1a4c77".parse::<GpuUuid>().is_err());
}

#[test]
fn another_abi_version_is_refused_by_name() {
    let mut page = page();
    page[grant_offset::ABI_VERSION] = 2;
    let error = Grant::parse(&page).expect_err("foreign");
    assert_eq!(error, GrantError::AbiVersion { found: 2 });
    assert!(error.to_string().contains("ABI version 2"), "{error}");
}

#[test]
fn what_is_not_understood_is_refused() {
    let broken = |at: usize, byte: u8| {
        let mut page = page();
        page[at] = byte;
        Grant::parse(&page)
    };
    assert_eq!(broken(grant_offset::MAGIC, 0), Err(GrantError::Magic));
    assert_eq!(broken(grant_offset::LENGTH, 1), Err(GrantError::Length { found: 4097 }));
    assert_eq!(broken(grant_offset::POLICY, 9), Err(GrantError::Policy { found: 9 }));
    assert_eq!(
        broken(grant_offset::FLAGS, 5),
        Err(GrantError::Flags { found: 5 }),
        "one is known, the other is not"
    );
    assert_eq!(
        broken(grant_offset::CORES_PERCENT, 101),
        Err(GrantError::CoresPercent { percent: 101 })
    );
    assert!(matches!(
        broken(grant_offset::MEMORY_LIMIT_BYTES + 7, 1),
        Err(GrantError::MemoryLimit { .. })
    ));
    assert!(matches!(
        broken(grant_offset::ID, b'\n'),
        Err(GrantError::Id(TextError::NotPrintable))
    ));
    assert!(matches!(broken(grant_offset::CLAIM_UID + 60, b'x'), Err(GrantError::ClaimUid(_))));
    assert_eq!(Grant::parse(&page()[1..]), Err(GrantError::Length { found: GRANT_LEN - 1 }));
}

#[test]
fn what_is_published_stays_over_a_change_and_is_no_part_of_the_grant() {
    let mut published = page();
    published[grant_offset::PUBLISHED..][..16].copy_from_slice(&[7; 16]);
    assert_eq!(Grant::parse(&published), Ok(grant()));
    let update = Grant { cores_percent: 50, ..grant() }.update(&published).expect("same share");
    assert_eq!(applied(published, &update)[grant_offset::PUBLISHED..][..16], [7; 16]);
}

#[test]
fn a_change_in_place_is_seen_whole_or_not_at_all() {
    let update =
        Grant { memory_limit_bytes: 20 << 30, ..grant() }.update(&page()).expect("same share");
    let mut during = page();
    during[GrantUpdate::SEQUENCE_OFFSET..][..8].copy_from_slice(&update.begin);
    assert_eq!(Grant::parse(&during), Err(GrantError::Changing));

    let after = Grant::parse(&applied(page(), &update)).expect("changed");
    assert_eq!((after.memory_limit_bytes, after.sequence), (20 << 30, 2));
}

#[test]
fn a_change_that_was_cut_off_is_done_over() {
    let mut cut = page();
    cut[GrantUpdate::SEQUENCE_OFFSET..][..8].copy_from_slice(&7_u64.to_le_bytes());
    let update = grant().update(&cut).expect("same share");
    assert_eq!(Grant::parse(&applied(cut, &update)).map(|grant| grant.sequence), Ok(8));
}

#[test]
fn a_change_in_place_keeps_the_share() {
    let other = Grant { id: Text::new("another").expect("short"), ..grant() };
    assert_eq!(other.update(&page()), Err(GrantError::Identity));
}

#[test]
fn limits_out_of_range_are_not_written() {
    let wide = Grant { memory_limit_bytes: MAX_MEMORY_BYTES + 1, ..grant() };
    assert_eq!(wide.encode(), Err(GrantError::MemoryLimit { bytes: MAX_MEMORY_BYTES + 1 }));
    let fast = Grant { cores_percent: 101, ..grant() };
    assert_eq!(fast.encode(), Err(GrantError::CoresPercent { percent: 101 }));
    assert!(Text::<4>::new("12345").is_err() && Text::<4>::new("a b").is_err());
}
