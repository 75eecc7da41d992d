//! Several processes with one grant: races, kills, forks.

mod container;

use container::{GIB, MIB, Node, program, set_up};
use tessera_test_support::test_name;

/// Number of processes in a race that ends.
const RACERS: usize = 64;

/// Number of rounds of a race that is ended by a kill.
const FOR_EVER: &str = "1000000000";

#[test]
fn racing_processes_get_exactly_the_grant() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let limit = 777 * MIB;
    let share = node.share("claim-0", 0, limit);
    let race = program("race", false, node.path());
    let containers = [node.container(&[&share]), node.container(&[&share])];
    // A million calls, and each racer has two threads.
    let rounds = (1_000_000 / RACERS / 2).to_string();
    let mut racers: Vec<_> = (0..RACERS)
        .map(|seed| containers[seed % 2].start(&race, &[&seed.to_string(), &rounds]))
        .collect();
    let held: u64 = racers
        .iter_mut()
        .map(|racer| racer.wait_for_field("held")["held"].as_u64().expect("a number"))
        .sum();
    assert_eq!(held, limit);
    share.ledger(|ledger| {
        assert_eq!((ledger.used_bytes(), ledger.peak_bytes()), (limit, limit));
        assert_eq!(ledger.processes().map(|process| process.used_bytes).sum::<u64>(), limit);
        assert_eq!(ledger.processes().count(), RACERS);
    });
    // All memory is free again, wherever the processes were killed.
    racers.iter_mut().for_each(container::Running::kill);
    assert_eq!(containers[0].probe(&["fill"])[1]["takenBytes"], limit);
}

#[test]
fn killed_racing_processes_leave_an_exact_ledger() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let limit = 600 * MIB;
    let share = node.share("claim-0", 0, limit);
    let race = program("race", false, node.path());
    let container = node.container(&[&share]);
    let mut survivor = container.start(&race, &["1000", FOR_EVER]);
    for seed in 0..12_u64 {
        let mut victim = container.start(&race, &[&seed.to_string(), FOR_EVER]);
        assert_eq!(victim.next()["begun"], true);
        // The kill hits the race at any point, a little later each time.
        for _ in 0..seed * 20 {
            assert!(share.ledger(|ledger| ledger.used_bytes()) <= limit);
        }
        victim.kill();
        assert!(share.ledger(|ledger| ledger.peak_bytes()) <= limit);
    }
    survivor.kill();
    let lines = container.probe(&["fill"]);
    assert_eq!(
        (&lines[0]["devices"][0]["nvmlUsedBytes"], &lines[1]["takenBytes"]),
        (&0.into(), &limit.into())
    );
}

#[test]
fn surviving_child_does_not_hold_its_parents_memory() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let share = node.share("claim-0", 0, GIB);
    let forks = program("forks", false, node.path());
    let script = format!("{} orphan; exec {} fill", forks.display(), container::probe().display());
    let lines = container::lines_of(&node.container(&[&share]).run("sh", &["-c", &script]));
    assert_eq!(lines[1]["takenBytes"], GIB, "{lines:?}");
}

#[test]
fn processes_forked_before_cuinit_have_own_slots() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let share = node.share("claim-0", 0, GIB);
    let lines = node.container(&[&share]).run_c("forks", false, &["own"]);
    assert_eq!((&lines[0]["free"], &lines[1]["free"]), (&(512 * MIB).into(), &(768 * MIB).into()));
    assert_eq!(
        share.ledger(|ledger| ledger.processes().count()),
        1,
        "the child's slot was found dead"
    );
}

#[test]
fn forked_child_leaves_its_parents_slot_intact() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let share = node.share("claim-0", 0, GIB);
    let lines = node.container(&[&share]).run_c("forks", false, &["child"]);
    // CUDA_ERROR_NOT_INITIALIZED, as without the library.
    assert_eq!((&lines[0]["result"], &lines[0]["free"]), (&3.into(), &(768 * MIB).into()));
}

#[test]
fn launches_are_counted() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let share = node.share("claim-0", 0, GIB);
    node.container(&[&share]).run_c("launches", false, &["1000"]);
    assert_eq!(share.ledger(|ledger| ledger.launches()), 3000);
}

#[test]
fn memory_of_200_killed_processes_is_free_at_once() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let share = node.share("claim-0", 0, GIB);
    let lines = node.container(&[&share]).run_c("storm", false, &["200", &GIB.to_string()]);
    assert_eq!((&lines[0]["kills"], &lines[0]["missed"]), (&200.into(), &0.into()));
    // The next process reclaims the slots, and no byte is lost.
    assert_eq!(node.container(&[&share]).probe(&["fill"])[1]["takenBytes"], GIB);
    share.ledger(|ledger| assert!(ledger.peak_bytes() <= GIB, "{}", ledger.peak_bytes()));
}

#[test]
fn death_of_a_process_gives_survivors_no_more() {
    // HAMi-core moves slots when a process is killed, and loses what a survivor allocates later.
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let limit = 2 * GIB;
    let share = node.share("claim-0", 0, limit);
    let lines = node.container(&[&share]).run_c("storm", false, &["slots", &limit.to_string()]);
    assert_eq!((&lines[0]["more"], &lines[0]["rest"]), (&2.into(), &0.into()));
    assert_eq!(share.ledger(|ledger| ledger.peak_bytes()), limit);
}
