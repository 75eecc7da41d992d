use super::*;

const ALL: [HoldReason; 21] = [
    HoldReason::ClaimDeallocated,
    HoldReason::ClearingFailed,
    HoldReason::WriteContended,
    HoldReason::AllocationReleased,
    HoldReason::WriteFailed,
    HoldReason::WriteDenied,
    HoldReason::SearchUndecided,
    HoldReason::NodeFailed,
    HoldReason::MisplacementUnconfirmed,
    HoldReason::RepairWritten,
    HoldReason::RepairUnplaced,
    HoldReason::RepairUndecided,
    HoldReason::EventPublished,
    HoldReason::EventRepeated,
    HoldReason::EventRefused,
    HoldReason::QuotaStatusWritten,
    HoldReason::QuotaStatusFailed,
    HoldReason::TemplateFailed,
    HoldReason::PreemptionFailed,
    HoldReason::GroupNotBound,
    HoldReason::EvictionRefused,
];

fn claim(name: &str) -> Subject {
    Subject::claim(&ClaimUid::new(name).unwrap())
}

fn pod(name: &str) -> PodUid {
    PodUid::new(name)
}

fn millis(n: u64) -> Duration {
    Duration::from_millis(n)
}

fn pauses(reason: HoldReason) -> Vec<u64> {
    let (mut holds, mut now) = (Holds::default(), Moment::START);
    let mut pauses = Vec::new();
    for _ in 0..12 {
        let until = holds.hold(claim("c"), reason, now);
        pauses.push(u64::try_from((until - now).as_millis()).unwrap());
        now = until;
    }
    pauses
}

#[test]
fn first_overtaken_write_is_repeated_at_once() {
    let expected = [0, 50, 100, 200, 400, 800, 1600, 2000, 2000, 2000, 2000, 2000];
    assert_eq!(pauses(HoldReason::WriteContended), expected);
}

#[test]
fn pauses_double_up_to_the_longest() {
    let expected = [1, 2, 4, 8, 10, 10, 10, 10, 10, 10, 10, 10].map(|s| s * 1000);
    assert_eq!(pauses(HoldReason::WriteFailed), expected);
    let expected = [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300].map(|s| s * 1000);
    assert_eq!(pauses(HoldReason::WriteDenied), expected);
    assert_eq!(pauses(HoldReason::SearchUndecided), expected);
    let expected = [4, 8, 16, 30, 30, 30, 30, 30, 30, 30, 30, 30].map(|s| s * 1000);
    assert_eq!(pauses(HoldReason::RepairUnplaced), expected);
    assert_eq!(pauses(HoldReason::ClaimDeallocated), [2000; 12]);
}

#[test]
fn no_pause_is_longer_than_five_minutes() {
    for reason in ALL {
        let rule = reason.rule();
        assert!(rule.longest <= Duration::from_secs(300), "{reason:?}");
        for before in [0, 1, 9, 31, 32, u32::MAX] {
            assert!(rule.pause(before) <= rule.longest, "{reason:?} after {before}");
        }
        assert!(!rule.pause(rule.free).is_zero(), "{reason:?}");
    }
}

#[test]
fn hold_is_of_its_subject_and_reason_and_ends_by_time() {
    let (mut holds, now) = (Holds::default(), Moment::START);
    let until = holds.hold(claim("c"), HoldReason::ClaimDeallocated, now);
    assert!(holds.is_held(&claim("c"), HoldReason::ClaimDeallocated, until - millis(1)));
    assert!(!holds.is_held(&claim("c"), HoldReason::ClaimDeallocated, until));
    assert!(!holds.is_held(&claim("c"), HoldReason::WriteContended, now));
    assert!(!holds.is_held(&claim("other"), HoldReason::ClaimDeallocated, now));
    assert_eq!(holds.last_end(&claim("c"), now), Some(until));
}

#[test]
fn next_end_is_the_first_of_those_that_wake() {
    let (mut holds, now) = (Holds::default(), Moment::START);
    holds.hold(Subject::pod(&pod("p")), HoldReason::EventPublished, now);
    assert_eq!(holds.next_end(now), None, "nothing is decided when an event may be published");
    let late = holds.hold(Subject::pod(&pod("p")), HoldReason::AllocationReleased, now);
    let soon = holds.hold(Subject::pod(&pod("q")), HoldReason::WriteFailed, now);
    assert!(soon < late);
    assert_eq!(holds.next_end(now), Some(soon));
    assert_eq!(holds.next_end(soon), Some(late));
    assert_eq!(holds.next_end(late), None);
    // A longer hold of the same takes the place of the first.
    let later = holds.hold(Subject::pod(&pod("q")), HoldReason::WriteFailed, soon);
    assert_eq!(holds.next_end(late), Some(later));
    holds.end(&Subject::pod(&pod("q")));
    assert_eq!(holds.next_end(late), None);
}

#[test]
fn counts_end_with_their_object_or_by_restart() {
    let (mut holds, now) = (Holds::default(), Moment::START);
    let subject = Subject::pod(&pod("p"));
    let first = HoldReason::WriteFailed.rule().first;
    let again = |holds: &mut Holds| holds.hold(subject.clone(), HoldReason::WriteFailed, now) - now;
    assert_eq!(again(&mut holds), first);
    assert_eq!(again(&mut holds), 2 * first);
    holds.restart_count(&subject, HoldReason::WriteFailed);
    assert!(holds.is_held(&subject, HoldReason::WriteFailed, now), "the hold lasts");
    assert_eq!(again(&mut holds), first);
    holds.retain(now, |_, end| end == CountEnd::WaitingPod);
    assert_eq!(again(&mut holds), 2 * first);
    holds.retain(now, |_, _| false);
    assert_eq!(holds.next_end(now), None, "the pod does not wait any more");
    assert_eq!(again(&mut holds), first);
}

#[test]
fn change_of_the_basis_ends_hold_and_count() {
    let (mut holds, now) = (Holds::default(), Moment::START);
    let (subject, reason) = (Subject::pod(&pod("p")), HoldReason::WriteDenied);
    let first = reason.rule().first;
    for expected in [first, 2 * first] {
        assert_eq!(holds.hold_on(&subject, reason, Basis(1), now) - now, expected);
        holds.end_if_changed(&subject, reason, Basis(1));
        assert!(holds.is_held(&subject, reason, now));
    }
    holds.end_if_changed(&subject, reason, Basis(2));
    assert!(!holds.is_held(&subject, reason, now));
    assert_eq!(holds.next_end(now), None);
    assert_eq!(holds.hold_on(&subject, reason, Basis(2), now) - now, first);
}

#[test]
fn hold_that_is_cut_short_keeps_its_count() {
    let (mut holds, now) = (Holds::default(), Moment::START);
    let (subject, reason) = (Subject::pod(&pod("p")), HoldReason::WriteDenied);
    holds.hold_on(&subject, reason, Basis(1), now);
    holds.cut_short(&subject, reason, now);
    assert!(!holds.is_held(&subject, reason, now));
    assert_eq!(holds.next_end(now), None);
    let again = holds.hold_on(&subject, reason, Basis(1), now) - now;
    assert_eq!(again, 2 * reason.rule().first);
}

#[test]
fn published_event_is_forgotten_with_its_pause() {
    let (mut holds, now) = (Holds::default(), Moment::START);
    let subject = Subject::pod(&pod("p"));
    let until = holds.hold(subject.clone(), HoldReason::EventPublished, now);
    holds.retain(until - millis(1), |_, _| true);
    assert!(holds.is_held(&subject, HoldReason::EventPublished, until - millis(1)));
    holds.retain(until, |_, _| true);
    assert!(holds.holds.is_empty(), "the pod exists, and nothing of the event is kept");
}

#[test]
fn excluded_nodes_are_those_of_the_pod() {
    let (mut holds, now) = (Holds::default(), Moment::START);
    let node = |name| NodeName::new(name).unwrap();
    for (name, on) in [("p", "a"), ("p", "b"), ("q", "c")] {
        holds.hold(Subject::pod_on(&pod(name), &node(on)), HoldReason::NodeFailed, now);
    }
    holds.hold(
        Subject::pod_with(&pod("p"), &ClaimUid::new("c").unwrap()),
        HoldReason::RepairWritten,
        now,
    );
    assert_eq!(holds.excluded_nodes(&pod("p"), now), [node("a"), node("b")].into());
    assert_eq!(holds.excluded_nodes(&pod("q"), now), [node("c")].into());
    let over = now + HoldReason::NodeFailed.rule().first;
    assert_eq!(holds.excluded_nodes(&pod("p"), over), BTreeSet::new());
}
