use std::collections::BTreeSet;

use super::*;

/// Placements with their holds.
#[derive(Default)]
struct Fixture {
    placements: Placements,
    holds: Holds,
}

impl Fixture {
    fn placed(&mut self, message: Option<&str>, now: Moment) {
        self.placed_pod(&pod(), message, now);
    }

    fn placed_pod(&mut self, pod: &PodUid, message: Option<&str>, now: Moment) {
        let message = message.map(str::to_owned);
        self.placements.placed(&mut self.holds, pod, node("node-a"), message, now);
    }

    fn not_written(&mut self, cause: NotWritten, now: Moment) {
        self.placements.not_written(&mut self.holds, &pod(), cause, now);
    }

    fn gave_up(&mut self, now: Moment) {
        self.placements.gave_up(&mut self.holds, &pod(), Some(&node("node-a")), now);
    }

    fn deallocated(&mut self, nominated: Option<&str>, now: Moment) -> Option<Deallocated> {
        let nomination = nominated.map(|node| nomination(node, Nominator::Scheduler));
        self.deallocated_with(nomination.as_ref(), None, now)
    }

    fn deallocated_with(
        &mut self,
        nomination: Option<&Nomination>,
        message: Option<&str>,
        now: Moment,
    ) -> Option<Deallocated> {
        self.placements.deallocated(&mut self.holds, &pod(), nomination, message, now)
    }

    fn verdict(&mut self, waiting: &Waiting, now: Moment) -> Verdict {
        self.placements.observe(&mut self.holds, waiting, now);
        let verdict = self.placements.verdict(waiting, now);
        assert_eq!(self.placements.verdict(waiting, now), verdict, "a question changes nothing");
        verdict
    }

    fn is_held(&self, reason: HoldReason, now: Moment) -> bool {
        self.holds.is_held(&Subject::pod(&pod()), reason, now)
    }

    fn excluded(&self, now: Moment) -> BTreeSet<NodeName> {
        self.holds.excluded_nodes(&pod(), now)
    }
}

fn nomination(name: &str, by: Nominator) -> Nomination {
    Nomination { node: node(name), by }
}

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
        is_complete: true,
        nominated_by: None,
        unschedulable: message.map(str::to_owned),
        repelled: None,
    }
}

fn seconds(n: u64) -> Duration {
    Duration::from_secs(n)
}

#[test]
fn new_failure_is_acted_on_sooner_than_an_old_one() {
    let now = Moment::START;
    let mut fixture = Fixture::default();
    fixture.placed(Some("old"), now);
    assert_eq!(fixture.verdict(&waiting(Some("old")), now), Verdict::WaitUntil(now + WITHOUT_NEWS));
    assert_eq!(
        fixture.verdict(&waiting(Some("new")), now + seconds(1)),
        Verdict::WaitUntil(now + seconds(1) + AFTER_NEW_FAILURE)
    );
    assert_eq!(fixture.verdict(&waiting(Some("new")), now + seconds(3)), Verdict::GiveUp);
}

#[test]
fn old_failure_is_acted_on_after_its_deadline() {
    let now = Moment::START;
    let mut fixture = Fixture::default();
    fixture.placed(Some("old"), now);
    assert_eq!(fixture.verdict(&waiting(Some("old")), now + WITHOUT_NEWS), Verdict::GiveUp);
}

#[test]
fn deadline_counts_from_the_write_of_the_decision() {
    let now = Moment::START;
    let mut fixture = Fixture::default();
    fixture.placed(Some("old"), now);
    let written = now + seconds(60);
    fixture.placements.written(&pod(), written);
    assert_eq!(
        fixture.verdict(&waiting(Some("old")), written),
        Verdict::WaitUntil(written + WITHOUT_NEWS)
    );
}

#[test]
fn interruptions_extend_the_deadline_once() {
    let now = Moment::START;
    let mut fixture = Fixture::default();
    fixture.placed(Some("old"), now);
    let deadline = now + WITHOUT_NEWS + AFTER_INTERRUPTION;
    for second in 0..79 {
        fixture.placements.interrupted(now + seconds(second));
        let verdict = fixture.verdict(&waiting(Some("old")), now + seconds(second));
        assert_eq!(verdict, Verdict::WaitUntil(deadline));
    }
    assert_eq!(fixture.verdict(&waiting(Some("old")), deadline), Verdict::GiveUp);
    let later = now + seconds(1000);
    fixture.placed(Some("old"), later);
    assert_eq!(
        fixture.verdict(&waiting(Some("old")), later),
        Verdict::WaitUntil(later + WITHOUT_NEWS)
    );
}

#[test]
fn only_recent_interruption_extends_the_deadline() {
    let interrupted = Moment::START;
    let mut fixture = Fixture::default();
    fixture.placements.interrupted(interrupted);
    for (after, more) in [(59, AFTER_INTERRUPTION), (60, Duration::ZERO)] {
        let now = interrupted + seconds(after);
        fixture.placed(Some("old"), now);
        let verdict = fixture.verdict(&waiting(Some("old")), now);
        assert_eq!(verdict, Verdict::WaitUntil(now + WITHOUT_NEWS + more));
    }
}

#[test]
fn interruption_does_not_delay_a_new_failure() {
    let now = Moment::START;
    let mut fixture = Fixture::default();
    fixture.placed(Some("old"), now);
    fixture.placements.interrupted(now);
    let news = fixture.verdict(&waiting(Some("new")), now);
    assert_eq!(news, Verdict::WaitUntil(now + AFTER_NEW_FAILURE));
}

#[test]
fn deadline_grows_with_the_queue_of_kube_scheduler() {
    let now = Moment::START;
    let other = PodUid::new("other");
    let mut fixture = Fixture::default();
    fixture.placed_pod(&other, None, now);
    fixture.placed(Some("old"), now + seconds(10));
    let bound = now + seconds(15);
    fixture.placements.bound([&other].into_iter(), bound);
    // The next pod may be bound faster, which moves the deadline back.
    assert_eq!(
        fixture.verdict(&waiting(Some("old")), now + seconds(35)),
        Verdict::WaitUntil(now + seconds(35) + PACE_CHECK)
    );
    let before = now + seconds(40) - Duration::from_millis(1);
    assert_eq!(
        fixture.verdict(&waiting(Some("old")), before),
        Verdict::WaitUntil(now + seconds(10) + seconds(30)),
        "twice the 15 s of the other"
    );
    assert_eq!(fixture.verdict(&waiting(Some("old")), now + seconds(40)), Verdict::GiveUp);
}

#[test]
fn pace_is_forgotten_when_no_pod_is_bound_any_more() {
    let now = Moment::START;
    let other = PodUid::new("other");
    let mut fixture = Fixture::default();
    fixture.placed_pod(&other, None, now);
    fixture.placements.bound([&other].into_iter(), now + seconds(15));
    let later = now + seconds(45);
    fixture.placed(Some("old"), later);
    assert_eq!(
        fixture.verdict(&waiting(Some("old")), later),
        Verdict::WaitUntil(later + WITHOUT_NEWS)
    );
}

#[test]
fn fast_scheduler_does_not_shorten_the_deadline() {
    let now = Moment::START;
    let other = PodUid::new("other");
    let mut fixture = Fixture::default();
    fixture.placed_pod(&other, None, now);
    fixture.placed(Some("old"), now);
    fixture.placements.bound([&other].into_iter(), now + seconds(1));
    assert_eq!(
        fixture.verdict(&waiting(Some("old")), now + seconds(2)),
        Verdict::WaitUntil(now + WITHOUT_NEWS)
    );
}

#[test]
fn failure_from_before_the_allocation_is_not_new() {
    let now = Moment::START;
    let mut fixture = Fixture::default();
    fixture.placed(None, now);
    let stale = waiting(Some("0/2 nodes are available: 2 cannot allocate all claims."));
    assert_eq!(fixture.verdict(&stale, now + seconds(5)), Verdict::WaitUntil(now + WITHOUT_NEWS));
}

#[test]
fn pod_without_failure_or_with_nomination_waits() {
    let now = Moment::START;
    let mut fixture = Fixture::default();
    fixture.placed(None, now);
    let later = now + seconds(1000);
    assert_eq!(fixture.verdict(&waiting(None), later), Verdict::Wait);
    assert_eq!(
        fixture.verdict(
            &Waiting { nominated_by: Some(Nominator::Scheduler), ..waiting(Some("new")) },
            later
        ),
        Verdict::Wait
    );
    assert_eq!(
        fixture.verdict(&Waiting { movable: Vec::new(), ..waiting(Some("new")) }, later),
        Verdict::Wait
    );
}

#[test]
fn node_is_excluded_for_longer_after_each_failure() {
    let mut now = Moment::START;
    let mut fixture = Fixture::default();
    for expected in [10, 20, 40] {
        fixture.placed(None, now);
        fixture.gave_up(now);
        let reason = HoldReason::AllocationReleased;
        assert!(fixture.is_held(reason, now), "kube-scheduler gets time to see it");
        assert_eq!(fixture.excluded(now + seconds(expected - 1)).len(), 1);
        assert_eq!(fixture.excluded(now + seconds(expected)).len(), 0);
        now += seconds(expected);
    }
    assert_eq!(grown(WITHOUT_NEWS, 30), LONGEST);
}

#[test]
fn failed_writes_count_only_for_the_next_try() {
    let mut now = Moment::START;
    let mut fixture = Fixture::default();
    for pause in [1, 2, 4, 8, 10, 10] {
        fixture.placed(None, now);
        fixture.not_written(NotWritten::Failed, now);
        let again = now + seconds(pause);
        assert!(fixture.is_held(HoldReason::WriteFailed, again - Duration::from_millis(1)));
        assert!(!fixture.is_held(HoldReason::WriteFailed, again));
        assert!(fixture.excluded(now).is_empty());
        now = again;
    }
    fixture.placed(Some("old"), now);
    assert_eq!(fixture.verdict(&waiting(Some("old")), now), Verdict::WaitUntil(now + WITHOUT_NEWS));
    now += WITHOUT_NEWS;
    assert_eq!(fixture.verdict(&waiting(Some("old")), now), Verdict::GiveUp);
    fixture.gave_up(now);
    assert!(fixture.excluded(now + HoldReason::NodeFailed.rule().first).is_empty(), "one failure");
    // After a stored write the count starts again.
    now += HoldReason::NodeFailed.rule().first;
    fixture.not_written(NotWritten::Failed, now);
    assert!(!fixture.is_held(HoldReason::WriteFailed, now + HoldReason::WriteFailed.rule().first));
}

#[test]
fn cleared_allocation_excludes_node_without_nomination() {
    let now = Moment::START;
    let mut fixture = Fixture::default();
    fixture.placed(None, now);
    assert_eq!(fixture.deallocated(None, now), Some(Deallocated::Unplaceable(node("node-a"))));
    assert_eq!(fixture.excluded(now).len(), 1);
    assert_eq!(fixture.deallocated(None, now), None, "reported once");
    let mut fixture = Fixture::default();
    fixture.placed(None, now);
    assert_eq!(
        fixture.deallocated(Some("node-a"), now),
        Some(Deallocated::RoomMade(node("node-a")))
    );
    assert_eq!(fixture.excluded(now).len(), 0);
}

#[test]
fn room_is_remembered_after_the_nomination_is_gone() {
    let now = Moment::START;
    let mut fixture = Fixture::default();
    fixture.placed(None, now);
    fixture.placements.nominated(&pod(), &nomination("node-b", Nominator::Scheduler), None);
    fixture.placements.nominated(&pod(), &nomination("node-a", Nominator::Scheduler), None);
    assert_eq!(fixture.deallocated(None, now), Some(Deallocated::RoomMade(node("node-a"))));
    assert_eq!(fixture.excluded(now).len(), 0);
    fixture.placed(None, now);
    fixture.placements.nominated(&pod(), &nomination("node-b", Nominator::Scheduler), None);
    assert_eq!(fixture.deallocated(None, now), Some(Deallocated::Unplaceable(node("node-a"))));
}

#[test]
fn own_nomination_makes_room_only_if_kept_after_a_failure() {
    let now = Moment::START;
    let own = nomination("node-a", Nominator::Controller);
    for (message, has_room) in [
        (None, false),
        (Some("before"), false),
        (Some("1 cannot allocate all claims"), false),
        (Some("preempted"), true),
    ] {
        let mut fixture = Fixture::default();
        fixture.placed(Some("before"), now);
        let lost = fixture.deallocated_with(Some(&own), message, now);
        assert_eq!(lost == Some(Deallocated::RoomMade(node("node-a"))), has_room, "{message:?}");
    }
}

#[test]
fn own_nomination_kept_after_a_failure_gets_more_time() {
    let now = Moment::START;
    let mut fixture = Fixture::default();
    fixture.placed(None, now);
    let kept =
        Waiting { nominated_by: Some(Nominator::Controller), ..waiting(Some("no free ports")) };
    assert_eq!(fixture.verdict(&kept, now), Verdict::WaitUntil(now + KEPT_NOMINATION));
    assert_eq!(fixture.verdict(&kept, now + KEPT_NOMINATION), Verdict::GiveUp);
    // kube-scheduler has removed it: it makes no room.
    let removed = Waiting { nominated_by: None, ..kept };
    assert_eq!(fixture.verdict(&removed, now + AFTER_NEW_FAILURE), Verdict::GiveUp);
}

#[test]
fn claim_of_another_pod_excludes_no_node() {
    let now = Moment::START;
    let mut fixture = Fixture::default();
    fixture.verdict(&waiting(Some("no cpu")), now);
    assert_eq!(fixture.deallocated(None, now), None);
    assert_eq!(fixture.excluded(now).len(), 0);
}

#[test]
fn deleted_node_is_given_up_at_once_without_nomination() {
    let now = Moment::START;
    let mut fixture = Fixture::default();
    fixture.placed(None, now);
    let gone = Waiting { node_gone: true, ..waiting(None) };
    let making_room = Waiting { nominated_by: Some(Nominator::Scheduler), ..gone.clone() };
    assert_eq!(fixture.verdict(&making_room, now), Verdict::Wait);
    assert_eq!(fixture.verdict(&gone, now), Verdict::GiveUp);
}

#[test]
fn release_holds_the_pod_and_excludes_the_node() {
    let now = Moment::START;
    let mut fixture = Fixture::default();
    fixture.gave_up(now);
    let released = now + HoldReason::AllocationReleased.rule().first;
    assert_eq!(fixture.holds.next_end(now), Some(released));
    let excluded = now + HoldReason::NodeFailed.rule().first;
    assert_eq!(fixture.holds.next_end(released), Some(excluded));
}

#[test]
fn released_pod_is_not_held_for_a_denied_write() {
    let now = Moment::START;
    let mut fixture = Fixture::default();
    for _ in 0..8 {
        fixture.not_written(NotWritten::Denied(Basis(1)), now);
    }
    fixture.gave_up(now);
    assert!(!fixture.is_held(HoldReason::WriteDenied, now));
    fixture.not_written(NotWritten::Denied(Basis(1)), now);
    assert!(fixture.is_held(HoldReason::WriteDenied, now + seconds(200)), "the count stays");
    fixture.verdict(&Waiting { is_complete: false, ..waiting(None) }, now);
    assert!(fixture.is_held(HoldReason::WriteDenied, now), "one claim is not written yet");
    fixture.verdict(&waiting(None), now);
    assert!(!fixture.is_held(HoldReason::WriteDenied, now), "all claims are written");
}

#[test]
fn release_of_incomplete_pod_keeps_the_pause_of_its_write() {
    let now = Moment::START;
    let mut fixture = Fixture::default();
    for _ in 0..8 {
        fixture.not_written(NotWritten::Denied(Basis(1)), now);
    }
    let incomplete = Waiting { is_complete: false, ..waiting(Some("old")) };
    assert_eq!(fixture.verdict(&incomplete, now), Verdict::WaitUntil(now + INCOMPLETE));
    let deadline = now + INCOMPLETE;
    fixture.not_written(NotWritten::Denied(Basis(1)), deadline);
    assert_eq!(fixture.verdict(&incomplete, deadline), Verdict::ReleaseIncomplete);
    fixture.placements.released_incomplete(&mut fixture.holds, &pod(), deadline);
    assert!(fixture.is_held(HoldReason::WriteDenied, deadline + seconds(200)));
    assert!(fixture.is_held(HoldReason::AllocationReleased, deadline));
    assert!(fixture.excluded(deadline).is_empty(), "the node is not the cause");
    assert_eq!(fixture.verdict(&incomplete, deadline), Verdict::WaitUntil(deadline + INCOMPLETE));
}

#[test]
fn decision_restarts_the_count_of_undecided_searches() {
    let now = Moment::START;
    let mut fixture = Fixture::default();
    let again = |fixture: &mut Fixture| {
        fixture.holds.hold(Subject::pod(&pod()), HoldReason::SearchUndecided, now) - now
    };
    assert_eq!(again(&mut fixture), seconds(1));
    assert_eq!(again(&mut fixture), seconds(2));
    fixture.placed(None, now);
    assert_eq!(again(&mut fixture), seconds(1));
}
