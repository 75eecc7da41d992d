//! Several processes on one grant: races, deaths, children.

mod container;

use container::{GIB, MIB, Node, can_contain, program};

/// Processes in a race that ends.
const RACERS: usize = 64;

/// Rounds of a race that is not to end by itself.
const FOR_EVER: &str = "1000000000";

#[test]
fn processes_racing_for_one_grant_get_exactly_the_grant() {
    if !can_contain("processes_racing_for_one_grant_get_exactly_the_grant") {
        return;
    }
    let node = Node::new();
    let limit = 777 * MIB;
    let share = node.share("claim-0", 0, limit);
    let race = program("race", false, node.path());
    let containers = [node.contain(&[&share]), node.contain(&[&share])];
    // A million calls, and each racer has two threads.
    let rounds = (1_000_000 / RACERS / 2).to_string();
    let mut racers: Vec<_> = (0..RACERS)
        .map(|seed| containers[seed % 2].start(&race, &[&seed.to_string(), &rounds]))
        .collect();
    let held: u64 =
        racers.iter_mut().map(|racer| racer.with("held")["held"].as_u64().expect("a number")).sum();
    assert_eq!(held, limit);
    share.ledger(|ledger| {
        assert_eq!((ledger.used_bytes(), ledger.peak_bytes()), (limit, limit));
        assert_eq!(ledger.processes().map(|process| process.used_bytes).sum::<u64>(), limit);
        assert_eq!(ledger.processes().count(), RACERS);
    });
    // Killed in mid-flight or not: all of it comes back.
    racers.iter_mut().for_each(container::Running::kill);
    assert_eq!(containers[0].probe(&["fill"])[1]["takenBytes"], limit);
}

#[test]
fn processes_killed_while_they_race_leave_no_drift() {
    if !can_contain("processes_killed_while_they_race_leave_no_drift") {
        return;
    }
    let node = Node::new();
    let limit = 600 * MIB;
    let share = node.share("claim-0", 0, limit);
    let race = program("race", false, node.path());
    let container = node.contain(&[&share]);
    let mut survivor = container.start(&race, &["1000", FOR_EVER]);
    for seed in 0..12_u64 {
        let mut victim = container.start(&race, &[&seed.to_string(), FOR_EVER]);
        assert_eq!(victim.next()["begun"], true);
        // From here on the kill hits it anywhere in its race: a little later every time.
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
fn a_child_that_lives_on_does_not_keep_its_parents_memory() {
    if !can_contain("a_child_that_lives_on_does_not_keep_its_parents_memory") {
        return;
    }
    let node = Node::new();
    let share = node.share("claim-0", 0, GIB);
    let forks = program("forks", false, node.path());
    let script = format!("{} orphan; exec {} fill", forks.display(), container::probe().display());
    let lines = container::lines_of(&node.contain(&[&share]).run("sh", &["-c", &script]));
    assert_eq!(lines[1]["takenBytes"], GIB, "{lines:?}");
}

#[test]
fn processes_that_part_before_they_use_the_driver_are_on_their_own() {
    if !can_contain("processes_that_part_before_they_use_the_driver_are_on_their_own") {
        return;
    }
    let node = Node::new();
    let share = node.share("claim-0", 0, GIB);
    let lines = node.contain(&[&share]).run_c("forks", false, &["own"]);
    assert_eq!((&lines[0]["free"], &lines[1]["free"]), (&(512 * MIB).into(), &(768 * MIB).into()));
    assert_eq!(
        share.ledger(|ledger| ledger.processes().count()),
        1,
        "the child's slot was found dead"
    );
}

#[test]
fn a_forked_child_does_not_harm_its_parents_account() {
    if !can_contain("a_forked_child_does_not_harm_its_parents_account") {
        return;
    }
    let node = Node::new();
    let share = node.share("claim-0", 0, GIB);
    let lines = node.contain(&[&share]).run_c("forks", false, &["child"]);
    // CUDA_ERROR_NOT_INITIALIZED, as without the library.
    assert_eq!((&lines[0]["result"], &lines[0]["free"]), (&3.into(), &(768 * MIB).into()));
}

#[test]
fn launches_are_counted() {
    if !can_contain("launches_are_counted") {
        return;
    }
    let node = Node::new();
    let share = node.share("claim-0", 0, GIB);
    node.contain(&[&share]).run_c("launches", false, &["1000"]);
    assert_eq!(share.ledger(|ledger| ledger.launches()), 3000);
}

#[test]
fn two_hundred_killed_processes_leave_all_they_held_at_once() {
    if !can_contain("two_hundred_killed_processes_leave_all_they_held_at_once") {
        return;
    }
    let node = Node::new();
    let share = node.share("claim-0", 0, GIB);
    let lines = node.contain(&[&share]).run_c("storm", false, &["200", &GIB.to_string()]);
    assert_eq!((&lines[0]["kills"], &lines[0]["missed"]), (&200.into(), &0.into()));
    // Whoever comes next finds what the last of them held, and nothing is lost over all of it.
    assert_eq!(node.contain(&[&share]).probe(&["fill"])[1]["takenBytes"], GIB);
    share.ledger(|ledger| assert!(ledger.peak_bytes() <= GIB, "{}", ledger.peak_bytes()));
}

#[test]
fn who_dies_beside_others_does_not_give_them_more() {
    // HAMi-core moves slots when a process dies, and loses what a survivor takes after that.
    if !can_contain("who_dies_beside_others_does_not_give_them_more") {
        return;
    }
    let node = Node::new();
    let limit = 2 * GIB;
    let share = node.share("claim-0", 0, limit);
    let lines = node.contain(&[&share]).run_c("storm", false, &["slots", &limit.to_string()]);
    assert_eq!((&lines[0]["more"], &lines[0]["rest"]), (&2.into(), &0.into()));
    assert_eq!(share.ledger(|ledger| ledger.peak_bytes()), limit);
}
