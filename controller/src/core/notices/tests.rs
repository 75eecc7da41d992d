use std::time::Duration;

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

#[test]
fn refusal_is_rendered_when_its_text_is_due() {
    let (mut notices, mut holds) = (Notices::default(), Holds::default());
    let draft = draft(pod(0));
    let causes = [(); 3].map(|()| Arc::new(RefusalCause::BudgetExceeded));
    let [first, second, third] = causes.each_ref().map(|cause| NoteSource::new(cause, None));
    let (now, interval) = (Moment::START, Duration::from_secs(2));
    assert_eq!(notices.render_at(&holds, &draft, &first, now), Some(now));
    assert!(matches!(notices.offer(&mut holds, &draft, "text".to_owned(), now), Offer::Send(..)));
    notices.rendered(&draft, first.clone(), now);
    let later = now + interval;
    for at in [now, later] {
        assert_eq!(notices.render_at(&holds, &draft, &first, at), None, "the pod has the text");
    }
    assert_eq!(notices.render_at(&holds, &draft, &second, now), Some(later), "not yet due");
    assert_eq!(notices.render_at(&holds, &draft, &second, later), Some(later));
    assert_eq!(notices.offer(&mut holds, &draft, "text".to_owned(), later), Offer::Known);
    notices.rendered(&draft, second, later);
    let next = notices.render_at(&holds, &draft, &third, later);
    assert_eq!(next, Some(later + interval), "its last rendering was a moment ago");
}
