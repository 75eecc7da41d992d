use tessera_api::events;

use super::*;

fn pod(number: usize) -> PodUid {
    PodUid::new(&format!("pod-{number}"))
}

fn draft(pod: PodUid) -> NoticeDraft {
    NoticeDraft { pod, topic: Topic::Pod, reason: events::RESCHEDULING, node: None }
}

#[test]
fn latest_incident_of_a_reason_is_deferred() {
    let mut notices = Notices::default();
    let now = Moment::START;
    for text in ["first", "second"] {
        notices.defer(draft(pod(0)), text.to_owned(), now, false);
    }
    let due = notices.take_deferred(now);
    assert_eq!(due.iter().map(|one| one.note.as_str()).collect::<Vec<_>>(), ["second"]);
    assert!(notices.take_deferred(now).is_empty(), "taken once");
}

#[test]
fn deferred_incidents_are_bounded() {
    let mut notices = Notices::default();
    for number in 0..MAX_DEFERRED + 10 {
        notices.defer(draft(pod(number)), String::new(), Moment::START, false);
    }
    notices.defer(draft(pod(0)), "latest".to_owned(), Moment::START, false);
    let due = notices.take_deferred(Moment::START);
    assert_eq!(due.len(), MAX_DEFERRED);
    assert_eq!(due[0].note, "latest", "a newer one takes the place of its reason");
}
