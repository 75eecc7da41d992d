//! Memory limits of containers.

mod container;

use container::{Container, GIB, MIB, Mount, Node, Volume, set_up};
use serde_json::Value;
use tessera_intercept_abi::{Grant, grant_offset};
use tessera_test_support::test_name;

const LIMIT: u64 = 19 * GIB;

/// Returns the first GPU's memory as reported to the probe by CUDA and by NVML.
fn totals(devices: &Value) -> (u64, u64) {
    let gpu = &devices["devices"][0];
    (
        gpu["cudaTotalBytes"].as_u64().expect("a number"),
        gpu["nvmlTotalBytes"].as_u64().expect("a number"),
    )
}

/// Returns the bytes that the probe allocated until it was refused.
fn allocated(filled: &Value) -> u64 {
    assert_eq!(filled["event"], "filled", "{filled}");
    filled["takenBytes"].as_u64().expect("a number")
}

/// Asserts that the first GPU reports `total` bytes, of which `free` can be allocated.
fn assert_memory(container: &Container<'_>, total: u64, free: u64, case: &str) {
    let lines = container.probe(&["fill"]);
    assert_eq!((totals(&lines[0]), allocated(&lines[1])), ((total, total), free), "{case}");
}

#[test]
fn program_sees_and_gets_exactly_the_granted_memory() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let share = node.share("claim-0", 0, LIMIT);
    let lines = node.container(&[&share]).probe(&["fill"]);
    assert_eq!(totals(&lines[0]), (LIMIT, LIMIT));
    assert_eq!(lines[0]["devices"][0]["cudaFreeBytes"], LIMIT);
    let filled = &lines[1];
    assert_eq!(allocated(filled), LIMIT);
    assert_eq!(filled["refusedWith"], "CUDA_ERROR_OUT_OF_MEMORY");
    assert_eq!(
        (&filled["nvmlUsedBytes"], &filled["nvmlTotalBytes"]),
        (&LIMIT.into(), &LIMIT.into())
    );
    assert_eq!(filled["cudaFreeBytes"], 0);
    assert_eq!(share.ledger(|ledger| ledger.peak_bytes()), LIMIT);
    assert!(share.ledger(|ledger| ledger.refused()) > 0);
    let (bytes, used) = share.ledger(|ledger| ledger.last_refusal());
    assert!(bytes > 0 && used == LIMIT, "{bytes} {used}");
}

/// A program that chooses and orders its GPUs is held to the share of the GPU that it uses.
#[test]
fn chosen_gpus_have_the_memory_of_their_own_shares() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let shares = [node.share("claim-0", 0, LIMIT), node.share("claim-1", 1, GIB)];
    let container = || node.container(&[&shares[0], &shares[1]]);
    for (list, total) in [("1,0", GIB), ("1", GIB), (node.first_uuid(), LIMIT), ("0,9,1", LIMIT)] {
        let lines = container().with_variables(&[("CUDA_VISIBLE_DEVICES", list)]).probe(&["fill"]);
        assert_eq!(lines[0]["devices"][0]["cudaTotalBytes"], total, "{list}: {lines:?}");
        assert_eq!(allocated(&lines[1]), total, "{list}");
    }
    assert_eq!(shares[1].ledger(|ledger| ledger.peak_bytes()), GIB);
}

#[test]
fn gpu_without_grant_has_no_memory() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let lines =
        node.container(&[&node.share("claim-0", 0, LIMIT)]).probe(&["fill", "--device", "1"]);
    assert_eq!(
        (&lines[0]["devices"][1]["cudaTotalBytes"], &lines[0]["devices"][1]["nvmlTotalBytes"]),
        (&0.into(), &0.into())
    );
    assert_eq!(allocated(&lines[1]), 0);
    assert_memory(&node.container(&[]), 0, 0, "no grant at all");
}

#[test]
fn writable_grant_or_plain_files_are_rejected() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let share = node.share("claim-0", 0, LIMIT);
    for (mount, case) in
        [(Mount::Plain, "plain files"), (Mount::WritableGrant, "a grant that can be written")]
    {
        assert_memory(&node.container_with_mounts(&[(&share, mount)]), 0, 0, case);
    }
}

/// An image with a symbolic link to `/dev/tessera` has the runtime mount files of a volume there,
/// whatever path the pod names.
#[test]
fn files_of_volumes_are_rejected_as_grant_and_ledger() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let share = node.share("claim-0", 0, LIMIT);
    for volume in [Volume::Disk, Volume::Memory] {
        for mount in [Mount::GrantOfVolume(volume), Mount::LedgerOfVolume(volume)] {
            let container = node.container_with_mounts(&[(&share, mount)]);
            assert_memory(&container, 0, 0, &format!("{mount:?}"));
        }
    }
}

#[test]
fn invalid_grant_or_ledger_gives_no_memory() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    for (id, at, byte, case) in [
        ("version", grant_offset::ABI_VERSION, 2, "another ABI version"),
        ("magic", grant_offset::MAGIC, 0, "no grant"),
        ("flags", grant_offset::FLAGS, 4, "an unknown feature"),
        ("changing", grant_offset::SEQUENCE, 1, "an unfinished change"),
        ("id", grant_offset::ID, b'x', "the grant of another share"),
    ] {
        let share = node.share(id, 0, LIMIT);
        share.overwrite_grant(at, &[byte]);
        assert_memory(&node.container(&[&share]), 0, 0, case);
    }
    let share = node.share("ledger", 0, LIMIT);
    share.overwrite_ledger(8, &[2]);
    assert_memory(&node.container(&[&share]), 0, 0, "a ledger of another version");
}

#[test]
fn two_grants_on_one_gpu_add_up() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let (first, second) = (node.share("claim-0", 0, 2 * GIB), node.share("claim-1", 0, GIB));
    let container = node.container(&[&first, &second]);
    // More than either has.
    let _running = container.hold("2560Mi");
    assert_eq!(
        first.ledger(|ledger| ledger.used_bytes()) + second.ledger(|ledger| ledger.used_bytes()),
        2560 * MIB
    );
    assert_memory(&container, 3 * GIB, 512 * MIB, "two grants");
}

#[test]
fn grant_is_shared_by_two_containers() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let share = node.share("claim-0", 3, 4 * GIB);
    let (one, other) = (node.container(&[&share]), node.container(&[&share]));
    let mut first = one.start(container::probe(), &["hold", "--device", "3", "--take", "3Gi"]);
    first.wait_for_event("holding");
    let lines = other.probe(&["fill", "--device", "3"]);
    assert_eq!(allocated(&lines[1]), GIB);
    assert_eq!(lines[0]["devices"][3]["nvmlUsedBytes"], 3 * GIB, "includes the other container");
}

#[test]
fn memory_of_killed_process_is_free() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let share = node.share("claim-0", 0, 4 * GIB);
    let container = node.container(&[&share]);
    for _ in 0..3 {
        let mut running = container.hold("4Gi");
        assert_eq!(share.ledger(|ledger| ledger.used_bytes()), 4 * GIB);
        running.kill();
    }
    let lines = container.probe(&["fill"]);
    assert_eq!(lines[0]["devices"][0]["nvmlUsedBytes"], 0, "before any allocation");
    assert_eq!(allocated(&lines[1]), 4 * GIB);
}

#[test]
fn changed_limit_applies_at_once() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let share = node.share("claim-0", 0, GIB);
    let container = node.container(&[&share]);
    let mut running = container.start(container::probe(), &["fill", "--hold"]);
    assert_eq!(allocated(&running.wait_for_event("filled")), GIB);
    share.change(Grant { memory_limit_bytes: 3 * GIB, ..share.grant });
    assert_memory(&container, 3 * GIB, 2 * GIB, "a changed grant");
}

#[test]
fn contexts_are_charged_when_created() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let share = node.share("claim-0", 0, GIB);
    let share = node.share_of(Grant { context_bytes: 520 * MIB, ..share.grant });
    let lines = node.container(&[&share]).probe(&["fill"]);
    assert_eq!(lines[0]["devices"][0]["cudaFreeBytes"], GIB - 520 * MIB);
    assert_eq!(allocated(&lines[1]), GIB - 520 * MIB);
    assert_eq!(lines[1]["nvmlUsedBytes"], GIB);
}

/// The host measures what the CUDA driver holds beyond what was charged.
#[test]
fn memory_of_the_driver_counts_against_the_limit() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let share = node.share("claim-0", 0, 2 * GIB);
    let container = node.container(&[&share]);
    let filled = |used: u64| {
        let lines = container.probe(&["fill"]);
        let (taken, total) = (allocated(&lines[1]), totals(&lines[0]));
        assert_eq!(total, (2 * GIB, 2 * GIB));
        assert_eq!(lines[0]["devices"][0]["cudaFreeBytes"], 2 * GIB - used);
        assert_eq!((lines[1]["nvmlUsedBytes"].clone(), taken), ((2 * GIB).into(), 2 * GIB - used));
    };
    filled(0);
    share.publish_overhead(300 * MIB as i64);
    filled(300 * MIB);
    // More than the limit.
    share.publish_overhead(3 * GIB as i64);
    assert_eq!(allocated(&container.probe(&["fill"])[1]), 0);
}

#[test]
fn contexts_that_take_less_than_charged_leave_more() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let share = node.share("claim-0", 0, GIB);
    let share = node.share_of(Grant { context_bytes: 520 * MIB, ..share.grant });
    share.publish_overhead(-(220 * MIB as i64));
    let lines = node.container(&[&share]).probe(&["fill"]);
    assert_eq!(lines[0]["devices"][0]["cudaFreeBytes"], GIB - 300 * MIB);
    assert_eq!(allocated(&lines[1]), GIB - 300 * MIB);
    assert_eq!(lines[1]["nvmlUsedBytes"], GIB);
}

#[test]
fn overwritten_ledger_gives_no_memory() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let share = node.share("claim-0", 0, 4 * GIB);
    let container = node.container(&[&share]);
    let _running = container.hold("4Gi");
    // All of it is zeroed: the next process finds no ledger.
    share.overwrite_ledger(0, &vec![0; tessera_intercept_abi::LEDGER_LEN]);
    assert_memory(&container, 0, 0, "a zeroed ledger");
}

#[test]
fn new_process_detects_zeroed_total() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let share = node.share("claim-0", 0, 4 * GIB);
    let container = node.container(&[&share]);
    let _running = container.hold("4Gi");
    share.overwrite_ledger(std::mem::offset_of!(tessera_intercept_abi::LedgerPage, total), &[0; 8]);
    // Not even a context, which costs memory.
    let lines = container.probe(&["fill"]);
    assert_eq!(
        (lines.len(), &lines[0]["name"]),
        (1, &"CUDA_ERROR_OUT_OF_MEMORY".into()),
        "{lines:?}"
    );
}

#[test]
fn nvml_agrees_in_all_versions_and_after_shutdown() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let share = node.share("claim-0", 0, 4 * GIB);
    let container = node.container(&[&share]);
    let _holder = container.hold("1Gi");
    let lines = container.run_c("nvml", false, &[]);
    assert_eq!(lines.len(), 3);
    for line in lines {
        assert_eq!(
            (&line["total"], &line["used"], &line["free"]),
            (&(4 * GIB).into(), &GIB.into(), &(3 * GIB).into())
        );
        assert_eq!(line["agree"], 1);
    }
}
