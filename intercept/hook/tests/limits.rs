//! A container is held to its grants.

mod container;

use container::{GIB, MIB, Mount, Node, Volume, can_contain};
use serde_json::Value;
use tessera_intercept_abi::{Grant, grant_offset};

const LIMIT: u64 = 19 * GIB;

/// What the probe sees of the first GPU: CUDA's total, NVML's total.
fn totals(see: &Value) -> (u64, u64) {
    let gpu = &see["devices"][0];
    (
        gpu["cudaTotalBytes"].as_u64().expect("a number"),
        gpu["nvmlTotalBytes"].as_u64().expect("a number"),
    )
}

fn taken(filled: &Value) -> u64 {
    assert_eq!(filled["event"], "filled", "{filled}");
    filled["takenBytes"].as_u64().expect("a number")
}

#[test]
fn a_program_sees_and_gets_what_the_grant_says_and_not_a_byte_more() {
    if !can_contain("a_program_sees_and_gets_what_the_grant_says_and_not_a_byte_more") {
        return;
    }
    let node = Node::new();
    let share = node.share("claim-0", 0, LIMIT);
    let lines = node.contain(&[&share]).probe(&["fill"]);
    assert_eq!(totals(&lines[0]), (LIMIT, LIMIT));
    assert_eq!(lines[0]["devices"][0]["cudaFreeBytes"], LIMIT);
    let filled = &lines[1];
    assert_eq!(taken(filled), LIMIT);
    assert_eq!(filled["refusedWith"], "CUDA_ERROR_OUT_OF_MEMORY");
    assert_eq!(
        (&filled["nvmlUsedBytes"], &filled["nvmlTotalBytes"]),
        (&LIMIT.into(), &LIMIT.into())
    );
    assert_eq!(filled["cudaFreeBytes"], 0);
    assert_eq!(share.ledger(|ledger| ledger.peak_bytes()), LIMIT);
    assert!(share.ledger(|ledger| ledger.refused()) > 0);
}

#[test]
fn a_gpu_without_a_grant_has_no_memory() {
    if !can_contain("a_gpu_without_a_grant_has_no_memory") {
        return;
    }
    let node = Node::new();
    let lines = node.contain(&[&node.share("claim-0", 0, LIMIT)]).probe(&["fill", "--device", "1"]);
    assert_eq!(
        (&lines[0]["devices"][1]["cudaTotalBytes"], &lines[0]["devices"][1]["nvmlTotalBytes"]),
        (&0.into(), &0.into())
    );
    assert_eq!(taken(&lines[1]), 0);
    let lines = node.contain(&[]).probe(&["fill"]);
    assert_eq!((totals(&lines[0]), taken(&lines[1])), ((0, 0), 0), "no grant at all");
}

#[test]
fn what_the_tenant_could_have_made_is_no_grant() {
    if !can_contain("what_the_tenant_could_have_made_is_no_grant") {
        return;
    }
    let node = Node::new();
    let share = node.share("claim-0", 0, LIMIT);
    for (mount, why) in
        [(Mount::Plain, "plain files"), (Mount::WritableGrant, "a grant that can be written")]
    {
        let lines = node.container(&[(&share, mount)]).probe(&["fill"]);
        assert_eq!((totals(&lines[0]), taken(&lines[1])), ((0, 0), 0), "{why}");
    }
}

/// An image with a symbolic link to `/dev/tessera` has the runtime mount files of a volume there,
/// whatever path the pod names.
#[test]
fn a_file_of_a_volume_is_no_grant_and_no_ledger() {
    if !can_contain("a_file_of_a_volume_is_no_grant_and_no_ledger") {
        return;
    }
    let node = Node::new();
    let share = node.share("claim-0", 0, LIMIT);
    for volume in [Volume::Disk, Volume::Memory] {
        for mount in [Mount::GrantOfVolume(volume), Mount::LedgerOfVolume(volume)] {
            let lines = node.container(&[(&share, mount)]).probe(&["fill"]);
            assert_eq!((totals(&lines[0]), taken(&lines[1])), ((0, 0), 0), "{mount:?}");
        }
    }
}

#[test]
fn a_grant_that_is_not_understood_gives_nothing() {
    if !can_contain("a_grant_that_is_not_understood_gives_nothing") {
        return;
    }
    let node = Node::new();
    for (id, at, byte, why) in [
        ("version", grant_offset::ABI_VERSION, 2, "another ABI version"),
        ("magic", grant_offset::MAGIC, 0, "no grant"),
        ("flags", grant_offset::FLAGS, 4, "a feature that is not known"),
        ("changing", grant_offset::SEQUENCE, 1, "a change that never ends"),
        ("id", grant_offset::ID, b'x', "the grant of another share"),
    ] {
        let share = node.share(id, 0, LIMIT);
        share.scribble_grant(at, &[byte]);
        let lines = node.contain(&[&share]).probe(&["fill"]);
        assert_eq!((totals(&lines[0]), taken(&lines[1])), ((0, 0), 0), "{why}");
    }
    let share = node.share("ledger", 0, LIMIT);
    share.scribble_ledger(8, &[2]);
    let lines = node.contain(&[&share]).probe(&["fill"]);
    assert_eq!((totals(&lines[0]), taken(&lines[1])), ((0, 0), 0), "a ledger of another version");
}

#[test]
fn two_grants_on_one_gpu_add_up() {
    if !can_contain("two_grants_on_one_gpu_add_up") {
        return;
    }
    let node = Node::new();
    let (first, second) = (node.share("claim-0", 0, 2 * GIB), node.share("claim-1", 0, GIB));
    let container = node.contain(&[&first, &second]);
    // More than either has.
    let mut running = container.start(container::probe(), &["hold", "--take", "2560Mi"]);
    running.event("holding");
    assert_eq!(
        first.ledger(|ledger| ledger.used_bytes()) + second.ledger(|ledger| ledger.used_bytes()),
        2560 * MIB
    );
    let lines = container.probe(&["fill"]);
    assert_eq!((totals(&lines[0]), taken(&lines[1])), ((3 * GIB, 3 * GIB), 512 * MIB));
}

#[test]
fn one_grant_in_two_containers_is_one_budget() {
    if !can_contain("one_grant_in_two_containers_is_one_budget") {
        return;
    }
    let node = Node::new();
    let share = node.share("claim-0", 3, 4 * GIB);
    let (one, other) = (node.contain(&[&share]), node.contain(&[&share]));
    let mut first = one.start(container::probe(), &["hold", "--device", "3", "--take", "3Gi"]);
    first.event("holding");
    let lines = other.probe(&["fill", "--device", "3"]);
    assert_eq!(taken(&lines[1]), GIB);
    assert_eq!(
        lines[0]["devices"][3]["nvmlUsedBytes"],
        3 * GIB,
        "the other container's use is seen"
    );
}

#[test]
fn a_killed_process_frees_what_it_held() {
    if !can_contain("a_killed_process_frees_what_it_held") {
        return;
    }
    let node = Node::new();
    let share = node.share("claim-0", 0, 4 * GIB);
    let container = node.contain(&[&share]);
    for _ in 0..3 {
        let mut running = container.start(container::probe(), &["hold", "--take", "4Gi"]);
        running.event("holding");
        assert_eq!(share.ledger(|ledger| ledger.used_bytes()), 4 * GIB);
        running.kill();
    }
    let lines = container.probe(&["fill"]);
    assert_eq!(lines[0]["devices"][0]["nvmlUsedBytes"], 0, "seen before anything is taken");
    assert_eq!(taken(&lines[1]), 4 * GIB);
}

#[test]
fn a_limit_changed_by_the_host_counts_at_once() {
    if !can_contain("a_limit_changed_by_the_host_counts_at_once") {
        return;
    }
    let node = Node::new();
    let share = node.share("claim-0", 0, GIB);
    let container = node.contain(&[&share]);
    let mut running = container.start(container::probe(), &["fill", "--hold"]);
    assert_eq!(taken(&running.event("filled")), GIB);
    share.change(Grant { memory_limit_bytes: 3 * GIB, ..share.grant });
    let lines = container.probe(&["fill"]);
    assert_eq!((totals(&lines[0]), taken(&lines[1])), ((3 * GIB, 3 * GIB), 2 * GIB));
}

#[test]
fn contexts_are_paid_for_when_they_are_made() {
    if !can_contain("contexts_are_paid_for_when_they_are_made") {
        return;
    }
    let node = Node::new();
    let share = node.share("claim-0", 0, GIB);
    let share = node.share_of(Grant { context_bytes: 520 * MIB, ..share.grant });
    let lines = node.contain(&[&share]).probe(&["fill"]);
    assert_eq!(lines[0]["devices"][0]["cudaFreeBytes"], GIB - 520 * MIB);
    assert_eq!(taken(&lines[1]), GIB - 520 * MIB);
    assert_eq!(lines[1]["nvmlUsedBytes"], GIB);
}

#[test]
fn a_ledger_that_a_tenant_wrote_over_gives_nobody_more() {
    if !can_contain("a_ledger_that_a_tenant_wrote_over_gives_nobody_more") {
        return;
    }
    let node = Node::new();
    let share = node.share("claim-0", 0, 4 * GIB);
    let container = node.contain(&[&share]);
    let mut running = container.start(container::probe(), &["hold", "--take", "4Gi"]);
    running.event("holding");
    // All of it zeroed: whoever comes next finds no ledger.
    share.scribble_ledger(0, &vec![0; tessera_intercept_abi::LEDGER_LEN]);
    let lines = container.probe(&["fill"]);
    assert_eq!((totals(&lines[0]), taken(&lines[1])), ((0, 0), 0));
}

#[test]
fn a_new_process_notices_a_total_that_was_zeroed() {
    if !can_contain("a_new_process_notices_a_total_that_was_zeroed") {
        return;
    }
    let node = Node::new();
    let share = node.share("claim-0", 0, 4 * GIB);
    let container = node.contain(&[&share]);
    let mut running = container.start(container::probe(), &["hold", "--take", "4Gi"]);
    running.event("holding");
    share.scribble_ledger(std::mem::offset_of!(tessera_intercept_abi::LedgerPage, total), &[0; 8]);
    // Not even a context, which costs memory.
    let lines = container.probe(&["fill"]);
    assert_eq!(
        (lines.len(), &lines[0]["name"]),
        (1, &"CUDA_ERROR_OUT_OF_MEMORY".into()),
        "{lines:?}"
    );
}

#[test]
fn nvml_agrees_in_both_forms_and_after_it_was_closed() {
    if !can_contain("nvml_agrees_in_both_forms_and_after_it_was_closed") {
        return;
    }
    let node = Node::new();
    let share = node.share("claim-0", 0, 4 * GIB);
    let container = node.contain(&[&share]);
    let mut holder = container.start(container::probe(), &["hold", "--take", "1Gi"]);
    holder.event("holding");
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
