use super::*;

fn node(name: &str) -> NodeName {
    NodeName::new(name).unwrap()
}

fn pod() -> PodUid {
    PodUid::new("p")
}

fn waiting(message: Option<&str>) -> Waiting {
    Waiting {
        pod: pod(),
        movable: vec![tessera_api::names::ClaimUid::new("c").unwrap()],
        node: Some(node("node-a")),
        node_gone: false,
        nominated: false,
        unschedulable: message.map(str::to_owned),
    }
}

fn seconds(n: u64) -> Duration {
    Duration::from_secs(n)
}

#[test]
fn a_new_failure_is_acted_on_soon_and_an_old_one_late() {
    let now = Moment::START;
    let mut retries = Retries::default();
    retries.placed(&pod(), node("node-a"), Some("old".to_owned()), now);
    assert_eq!(retries.verdict(&waiting(Some("old")), now), Verdict::WaitUntil(now + WITHOUT_NEWS));
    assert_eq!(
        retries.verdict(&waiting(Some("new")), now + seconds(1)),
        Verdict::WaitUntil(now + seconds(1) + AFTER_NEW_FAILURE)
    );
    assert_eq!(retries.verdict(&waiting(Some("new")), now + seconds(3)), Verdict::GiveUp);
}

#[test]
fn an_old_failure_is_acted_on_after_its_deadline() {
    let now = Moment::START;
    let mut retries = Retries::default();
    retries.placed(&pod(), node("node-a"), Some("old".to_owned()), now);
    assert_eq!(retries.verdict(&waiting(Some("old")), now + WITHOUT_NEWS), Verdict::GiveUp);
}

#[test]
fn the_scheduler_has_its_time_from_when_the_decision_is_written() {
    let now = Moment::START;
    let mut retries = Retries::default();
    retries.placed(&pod(), node("node-a"), Some("old".to_owned()), now);
    let written = now + seconds(60);
    retries.written(&pod(), written);
    assert_eq!(
        retries.verdict(&waiting(Some("old")), written),
        Verdict::WaitUntil(written + WITHOUT_NEWS)
    );
}

#[test]
fn after_an_interruption_the_scheduler_gets_longer_and_not_for_ever() {
    let now = Moment::START;
    let mut retries = Retries::default();
    retries.placed(&pod(), node("node-a"), Some("old".to_owned()), now);
    let deadline = now + WITHOUT_NEWS + AFTER_INTERRUPTION;
    for second in 0..79 {
        retries.interrupted(now + seconds(second));
        let verdict = retries.verdict(&waiting(Some("old")), now + seconds(second));
        assert_eq!(verdict, Verdict::WaitUntil(deadline));
    }
    assert_eq!(retries.verdict(&waiting(Some("old")), deadline), Verdict::GiveUp);
    let later = now + seconds(1000);
    retries.placed(&pod(), node("node-a"), Some("old".to_owned()), later);
    assert_eq!(
        retries.verdict(&waiting(Some("old")), later),
        Verdict::WaitUntil(later + WITHOUT_NEWS)
    );
}

#[test]
fn an_interruption_shortly_before_counts_and_an_older_one_does_not() {
    let interrupted = Moment::START;
    let mut retries = Retries::default();
    retries.interrupted(interrupted);
    for (after, more) in [(59, AFTER_INTERRUPTION), (60, Duration::ZERO)] {
        let now = interrupted + seconds(after);
        retries.placed(&pod(), node("node-a"), Some("old".to_owned()), now);
        let verdict = retries.verdict(&waiting(Some("old")), now);
        assert_eq!(verdict, Verdict::WaitUntil(now + WITHOUT_NEWS + more));
    }
}

#[test]
fn an_interruption_delays_nothing_that_the_scheduler_has_said() {
    let now = Moment::START;
    let mut retries = Retries::default();
    retries.placed(&pod(), node("node-a"), Some("old".to_owned()), now);
    retries.interrupted(now);
    let news = retries.verdict(&waiting(Some("new")), now);
    assert_eq!(news, Verdict::WaitUntil(now + AFTER_NEW_FAILURE));
}

#[test]
fn a_pod_without_news_waits_for_its_turn_as_long_as_the_queue_is_long() {
    let now = Moment::START;
    let other = PodUid::new("other");
    let mut retries = Retries::default();
    retries.placed(&other, node("node-a"), None, now);
    retries.placed(&pod(), node("node-a"), Some("old".to_owned()), now + seconds(10));
    let bound = now + seconds(15);
    retries.bound([other].into_iter(), bound);
    let turns = Verdict::WaitUntil(now + seconds(10) + seconds(30));
    assert_eq!(
        retries.verdict(&waiting(Some("old")), now + seconds(35)),
        turns,
        "twice the 15 s of the other"
    );
    assert_eq!(retries.verdict(&waiting(Some("old")), now + seconds(40)), Verdict::GiveUp);
}

#[test]
fn what_the_queue_was_like_is_forgotten_when_nothing_is_bound_any_more() {
    let now = Moment::START;
    let other = PodUid::new("other");
    let mut retries = Retries::default();
    retries.placed(&other, node("node-a"), None, now);
    retries.bound([other].into_iter(), now + seconds(15));
    let later = now + seconds(45);
    retries.placed(&pod(), node("node-a"), Some("old".to_owned()), later);
    assert_eq!(
        retries.verdict(&waiting(Some("old")), later),
        Verdict::WaitUntil(later + WITHOUT_NEWS)
    );
}

#[test]
fn a_fast_scheduler_shortens_no_wait() {
    let now = Moment::START;
    let other = PodUid::new("other");
    let mut retries = Retries::default();
    retries.placed(&other, node("node-a"), None, now);
    retries.placed(&pod(), node("node-a"), Some("old".to_owned()), now);
    retries.bound([other].into_iter(), now + seconds(1));
    assert_eq!(
        retries.verdict(&waiting(Some("old")), now + seconds(2)),
        Verdict::WaitUntil(now + WITHOUT_NEWS)
    );
}

#[test]
fn a_failure_from_before_the_allocation_was_seen_is_no_news() {
    let now = Moment::START;
    let mut retries = Retries::default();
    retries.placed(&pod(), node("node-a"), None, now);
    let stale = waiting(Some("0/2 nodes are available: 2 cannot allocate all claims."));
    assert_eq!(retries.verdict(&stale, now + seconds(5)), Verdict::WaitUntil(now + WITHOUT_NEWS));
}

#[test]
fn a_pod_that_has_not_failed_or_has_room_being_made_is_left_alone() {
    let now = Moment::START;
    let mut retries = Retries::default();
    retries.placed(&pod(), node("node-a"), None, now);
    let later = now + seconds(1000);
    assert_eq!(retries.verdict(&waiting(None), later), Verdict::Wait);
    assert_eq!(
        retries.verdict(&Waiting { nominated: true, ..waiting(Some("new")) }, later),
        Verdict::Wait
    );
    assert_eq!(
        retries.verdict(&Waiting { movable: Vec::new(), ..waiting(Some("new")) }, later),
        Verdict::Wait
    );
}

#[test]
fn a_node_is_left_out_for_longer_after_every_failure() {
    let mut now = Moment::START;
    let mut retries = Retries::default();
    for expected in [10, 20, 40] {
        retries.placed(&pod(), node("node-a"), None, now);
        retries.gave_up(&pod(), Some(&node("node-a")), now);
        assert!(retries.is_held(&pod(), now), "the scheduler gets time to see it");
        assert_eq!(retries.excluded(&pod(), now + seconds(expected - 1)).len(), 1);
        assert_eq!(retries.excluded(&pod(), now + seconds(expected)).len(), 0);
        now += seconds(expected);
    }
    assert_eq!(grown(EXCLUSION, 30), LONGEST);
}

#[test]
fn decisions_that_could_not_be_written_count_for_nothing_but_the_next_try() {
    let mut now = Moment::START;
    let mut retries = Retries::default();
    for pause in [1, 2, 4, 8, 10, 10] {
        retries.placed(&pod(), node("node-a"), None, now);
        retries.not_written(&pod(), NotWritten::Failed, now);
        let again = now + seconds(pause);
        assert!(retries.is_held(&pod(), again - Duration::from_millis(1)));
        assert!(!retries.is_held(&pod(), again));
        assert!(retries.excluded(&pod(), now).is_empty());
        now = again;
    }
    retries.placed(&pod(), node("node-a"), Some("old".to_owned()), now);
    assert_eq!(retries.verdict(&waiting(Some("old")), now), Verdict::WaitUntil(now + WITHOUT_NEWS));
    now += WITHOUT_NEWS;
    assert_eq!(retries.verdict(&waiting(Some("old")), now), Verdict::GiveUp);
    retries.gave_up(&pod(), Some(&node("node-a")), now);
    assert!(retries.excluded(&pod(), now + EXCLUSION).is_empty(), "one failure");
    // Once one was written, the count begins anew.
    now += EXCLUSION;
    retries.not_written(&pod(), NotWritten::Failed, now);
    assert!(!retries.is_held(&pod(), now + AFTER_WRITE_ERROR));
}

#[test]
fn what_the_server_will_say_again_is_asked_ever_more_rarely() {
    let mut now = Moment::START;
    let mut retries = Retries::default();
    for pause in [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300] {
        retries.not_written(&pod(), NotWritten::Denied, now);
        assert!(retries.is_held(&pod(), now + seconds(pause) - Duration::from_millis(1)));
        now += seconds(pause);
        assert!(!retries.is_held(&pod(), now));
    }
}

#[test]
fn an_allocation_taken_back_by_others_leaves_the_node_out_unless_room_was_made_there() {
    let now = Moment::START;
    let mut retries = Retries::default();
    retries.placed(&pod(), node("node-a"), None, now);
    assert_eq!(
        retries.taken_back(&pod(), None, now),
        Some(Deallocated::Unplaceable(node("node-a")))
    );
    assert_eq!(retries.excluded(&pod(), now).len(), 1);
    assert_eq!(retries.taken_back(&pod(), None, now), None, "told once");
    let mut retries = Retries::default();
    retries.placed(&pod(), node("node-a"), None, now);
    assert_eq!(
        retries.taken_back(&pod(), Some(&node("node-a")), now),
        Some(Deallocated::RoomMade(node("node-a")))
    );
    assert_eq!(retries.excluded(&pod(), now).len(), 0);
}

#[test]
fn room_that_was_made_is_not_forgotten_with_the_nomination() {
    let now = Moment::START;
    let mut retries = Retries::default();
    retries.placed(&pod(), node("node-a"), None, now);
    retries.nominated(&pod(), &node("node-b"));
    retries.nominated(&pod(), &node("node-a"));
    assert_eq!(retries.taken_back(&pod(), None, now), Some(Deallocated::RoomMade(node("node-a"))));
    assert_eq!(retries.excluded(&pod(), now).len(), 0);
    retries.placed(&pod(), node("node-a"), None, now);
    retries.nominated(&pod(), &node("node-b"));
    assert_eq!(
        retries.taken_back(&pod(), None, now),
        Some(Deallocated::Unplaceable(node("node-a")))
    );
}

#[test]
fn a_claim_that_was_another_pods_says_nothing_against_its_node() {
    let now = Moment::START;
    let mut retries = Retries::default();
    retries.verdict(&waiting(Some("no cpu")), now);
    assert_eq!(retries.taken_back(&pod(), None, now), None);
    assert_eq!(retries.excluded(&pod(), now).len(), 0);
}

#[test]
fn the_next_wake_is_the_first_thing_that_ends() {
    let now = Moment::START;
    let mut retries = Retries::default();
    assert_eq!(retries.next_wake(now), None);
    retries.gave_up(&pod(), Some(&node("node-a")), now);
    assert_eq!(retries.next_wake(now), Some(now + AFTER_RELEASE));
    assert_eq!(retries.next_wake(now + AFTER_RELEASE), Some(now + EXCLUSION));
    retries.retain(now, |_| false);
    assert_eq!(retries.next_wake(now), None);
}

#[test]
fn a_claim_that_lost_its_allocation_is_held_for_a_moment_for_every_pod() {
    let now = Moment::START;
    let claim = ClaimUid::new("c").unwrap();
    let mut retries = Retries::default();
    retries.deallocated([claim.clone()].into(), now);
    assert!(retries.is_claim_held(&claim, now + seconds(1)));
    assert_eq!(
        retries.next_wake(now),
        Some(now + AFTER_RELEASE),
        "nothing else may happen until then"
    );
    assert!(!retries.is_claim_held(&claim, now + AFTER_RELEASE));
}

#[test]
fn a_node_that_is_gone_is_given_up_at_once_unless_room_is_being_made() {
    let now = Moment::START;
    let mut retries = Retries::default();
    retries.placed(&pod(), node("node-a"), None, now);
    let gone = Waiting { node_gone: true, ..waiting(None) };
    assert_eq!(retries.verdict(&Waiting { nominated: true, ..gone.clone() }, now), Verdict::Wait);
    assert_eq!(retries.verdict(&gone, now), Verdict::GiveUp);
}

#[test]
fn pauses_of_an_undecided_pod_double_up_to_five_minutes() {
    let mut now = Moment::START;
    let mut retries = Retries::default();
    for pause in [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300] {
        retries.not_decided(&pod(), now);
        assert!(retries.is_undecided(&pod(), now + seconds(pause) - Duration::from_millis(1)));
        assert_eq!(retries.next_wake(now), Some(now + seconds(pause)));
        now += seconds(pause);
        assert!(!retries.is_held(&pod(), now));
    }
    retries.placed(&pod(), node("node-a"), None, now);
    retries.not_decided(&pod(), now);
    assert_eq!(
        retries.next_wake(now),
        Some(now + seconds(1)),
        "once it was decided on, they begin anew"
    );
}
