//! Notices: the last events of each pod, so that each text is published once.
//!
//! `kube`'s recorder merges events of one reason into a series and keeps the first text, so changed
//! numbers would never be read. Here the same text is published once, and another text is another
//! event. Numbers change with every pod that comes and goes, for each pending pod, so the intervals
//! between the events of a pod grow.
//!
//! A state that lasts is offered again in each step, an incident only once. An incident whose
//! interval is not over is deferred: the latest of each reason is kept.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::{Arc, Weak};

use tessera_allocator::model::{DeviceId, PodUid};
use tessera_allocator::{ExplanationId, RefusalCause, ReservedNode};
use tessera_api::events::EventReason;
use tessera_api::names::{ClaimUid, NodeName};

use super::clock::Moment;
use super::effect::{MAX_OPEN_NOTICES, Notice, NoticeId};
use super::holds::{HoldReason, Holds, Subject};

/// Upper bound of the deferred incidents of all pods. What exceeds it is lost.
const MAX_DEFERRED: usize = 1024;

/// The last events of each pod.
#[derive(Debug, Default)]
pub(super) struct Notices {
    last: BTreeMap<PodUid, LastNotices>,
    sent: u64,
    /// Notices that are being published.
    open: BTreeMap<NoticeId, (Topic, Notice)>,
    /// Notices that the API server has not taken.
    refused: BTreeMap<NoticeId, (Topic, Notice)>,
    /// The times at which these are sent again, and those of notices that are outdated since.
    resends: BTreeSet<(Moment, NoticeId)>,
    /// Incidents whose interval is not over, by pod and name of the reason.
    deferred: BTreeMap<(PodUid, &'static str), DeferredNotice>,
}

/// An event about a pod without its text.
#[derive(Debug, Clone)]
pub(super) struct NoticeDraft {
    pub(super) pod: PodUid,
    pub(super) topic: Topic,
    pub(super) reason: EventReason,
    /// The node that it also refers to.
    pub(super) node: Option<NodeName>,
}

/// An incident whose interval is not over.
#[derive(Debug, Clone)]
pub(super) struct DeferredNotice {
    pub(super) draft: NoticeDraft,
    pub(super) note: String,
    /// The time from which it may be published.
    at: Moment,
    /// The pod was bound at the time of the incident.
    pub(super) is_bound: bool,
}

/// The last events of a pod.
#[derive(Debug)]
struct LastNotices {
    /// The reason of the last one.
    reason: EventReason,
    /// The last one of each topic. With one for all, the texts of two claims would be published in
    /// turns for ever.
    topics: BTreeMap<Topic, LastNotice>,
}

#[derive(Debug)]
struct LastNotice {
    id: NoticeId,
    note: String,
    /// The source of the text and the time at which it was rendered last, for refusals.
    rendered: Option<(NoteSource, Moment)>,
}

/// The source of a refusal's text. While it is the same, so is the text.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct NoteSource {
    cause: CauseIdentity,
    reserved: Option<ReservedNode>,
}

/// The identity of a cause. It keeps no explanation in memory.
#[derive(Debug, Clone)]
enum CauseIdentity {
    Explanation(ExplanationId),
    Object(Weak<RefusalCause>),
}

impl LastNotice {
    fn new(id: NoticeId, note: String) -> Self {
        Self { id, note, rendered: None }
    }
}

impl NoteSource {
    pub(super) fn new(cause: &Arc<RefusalCause>, reserved: Option<&ReservedNode>) -> Self {
        let id = match &**cause {
            RefusalCause::NoFit(explanation) => explanation.id(),
            _ => None,
        };
        let object = || CauseIdentity::Object(Arc::downgrade(cause));
        let cause = id.map_or_else(object, CauseIdentity::Explanation);
        Self { cause, reserved: reserved.cloned() }
    }
}

impl PartialEq for CauseIdentity {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Explanation(a), Self::Explanation(b)) => a == b,
            (Self::Object(a), Self::Object(b)) => a.ptr_eq(b),
            _ => false,
        }
    }
}

/// The object that an event about a pod explains: an event takes the place of those before of the
/// same topic.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Topic {
    /// The pod itself.
    Pod,
    /// One of its claims.
    Claim(ClaimUid),
    /// A device that it holds.
    Device(DeviceId),
}

/// The answer to the offer of a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Offer {
    /// The pod has it already.
    Known,
    /// Another event was published recently: offer it again at this time.
    Later(Moment),
    /// This text is to be published.
    Send(NoticeId, String),
}

impl Notices {
    /// Decides about a text.
    pub(super) fn offer(
        &mut self,
        holds: &mut Holds,
        draft: &NoticeDraft,
        note: String,
        now: Moment,
    ) -> Offer {
        let NoticeDraft { pod, topic, reason, .. } = draft;
        let subject = Subject::pod(pod);
        if self.last_of(draft).is_some_and(|last| last.note == note) {
            return Offer::Known;
        }
        if let Some(until) = self.held_until(holds, draft, now) {
            return Offer::Later(until);
        }
        if !self.is_repeated(draft) {
            holds.restart_count(&subject, HoldReason::EventRepeated);
        }
        holds.hold(subject.clone(), HoldReason::EventRepeated, now);
        holds.hold(subject, HoldReason::EventPublished, now);
        // What happens to the pod itself changes the state of its claims, so the same text
        // about a claim is published again afterwards, and the other way round.
        self.end_topics(pod, |known| (*topic == Topic::Pod) != (*known == Topic::Pod));
        self.sent += 1;
        let id = NoticeId(self.sent);
        let fresh = || LastNotices { reason: *reason, topics: BTreeMap::new() };
        let last = self.last.entry(pod.clone()).or_insert_with(fresh);
        last.reason = *reason;
        let replaced = last.topics.insert(topic.clone(), LastNotice::new(id, note.clone()));
        if let Some(replaced) = replaced {
            self.refused.remove(&replaced.id);
        }
        Offer::Send(id, note)
    }

    /// Returns the time at which the text of this source has to be rendered to be offered; none if
    /// the pod has that text. The time is `now` or later. A text that is rendered again and again
    /// because its source changes, and is always the same, is rendered once in an interval.
    pub(super) fn render_at(
        &mut self,
        holds: &Holds,
        draft: &NoticeDraft,
        source: &NoteSource,
        now: Moment,
    ) -> Option<Moment> {
        let rendered = self.last_of(draft).and_then(|last| last.rendered.as_ref());
        if rendered.is_some_and(|(known, _)| known == source) {
            return None;
        }
        let next = rendered.map(|(_, at)| *at + HoldReason::EventPublished.rule().first);
        let held = self.held_until(holds, draft, now);
        Some(next.into_iter().chain(held).fold(now, Moment::max))
    }

    /// Notes that the text of the draft was rendered from this source and offered.
    pub(super) fn rendered(&mut self, draft: &NoticeDraft, source: NoteSource, now: Moment) {
        let last = self.last.get_mut(&draft.pod);
        if let Some(last) = last.and_then(|last| last.topics.get_mut(&draft.topic)) {
            last.rendered = Some((source, now));
        }
    }

    fn last_of(&self, draft: &NoticeDraft) -> Option<&LastNotice> {
        self.last.get(&draft.pod)?.topics.get(&draft.topic)
    }

    fn is_repeated(&self, draft: &NoticeDraft) -> bool {
        self.last.get(&draft.pod).is_some_and(|last| last.reason == draft.reason)
    }

    /// Returns the time before which a new text is not published; none if it may be now. Its
    /// outdated predecessor is not sent again.
    fn held_until(&mut self, holds: &Holds, draft: &NoticeDraft, now: Moment) -> Option<Moment> {
        if self.open.len() >= MAX_OPEN_NOTICES {
            return Some(now + HoldReason::EventPublished.rule().first);
        }
        let interval = if self.is_repeated(draft) {
            HoldReason::EventRepeated
        } else {
            HoldReason::EventPublished
        };
        let until = holds.until(&Subject::pod(&draft.pod), interval, now)?;
        self.drop_refused(&draft.pod, &draft.topic);
        Some(until)
    }

    /// Keeps an incident until its interval is over, in place of an earlier one of its reason.
    pub(super) fn defer(&mut self, draft: NoticeDraft, note: String, at: Moment, is_bound: bool) {
        let key = (draft.pod.clone(), draft.reason.name());
        if self.deferred.len() >= MAX_DEFERRED && !self.deferred.contains_key(&key) {
            tracing::warn!(pod = %draft.pod, reason = key.1, "too many events wait, dropping one");
            return;
        }
        self.deferred.insert(key, DeferredNotice { draft, note, at, is_bound });
    }

    /// Drops the deferred incident of the pod and reason: a later one needs no event any more.
    pub(super) fn drop_deferred(&mut self, pod: &PodUid, reason: EventReason) {
        self.deferred.remove(&(pod.clone(), reason.name()));
    }

    /// Takes the incidents whose interval is over.
    pub(super) fn take_deferred(&mut self, now: Moment) -> Vec<DeferredNotice> {
        let due = self.deferred.extract_if(.., |_, deferred| deferred.at <= now);
        due.map(|(_, deferred)| deferred).collect()
    }

    /// Drops a text that the API server has not taken and that is outdated.
    fn drop_refused(&mut self, pod: &PodUid, topic: &Topic) {
        let Some(last) = self.last.get_mut(pod) else { return };
        let is_refused = |last: &LastNotice| self.refused.remove(&last.id).is_some();
        if last.topics.get(topic).is_some_and(is_refused) {
            last.topics.remove(topic);
        }
    }

    /// Ends the texts about the claims of a pod: they are allocated.
    pub(super) fn placed(&mut self, pod: &PodUid) {
        self.end_topics(pod, |topic| matches!(topic, Topic::Claim(_)));
    }

    /// Forgets the texts of these topics, and does not send again those that the API server has not
    /// taken.
    fn end_topics(&mut self, pod: &PodUid, is_over: impl Fn(&Topic) -> bool) {
        let Some(last) = self.last.get_mut(pod) else { return };
        for (_, over) in last.topics.extract_if(.., |topic, _| is_over(topic)) {
            self.refused.remove(&over.id);
        }
    }

    /// Keeps a notice until its publication has ended.
    pub(super) fn sent(&mut self, topic: Topic, notice: &Notice) {
        self.open.insert(notice.id, (topic, notice.clone()));
    }

    /// Notes how the publication of a notice ended. One that was not delivered is sent again
    /// later, unless the pod has had another one of its topic since.
    pub(super) fn ended(
        &mut self,
        holds: &mut Holds,
        id: NoticeId,
        is_delivered: bool,
        now: Moment,
    ) {
        let Some((topic, notice)) = self.open.remove(&id) else { return };
        let pod = &notice.pod.uid;
        let last = self.last.get(pod).and_then(|last| last.topics.get(&topic));
        if is_delivered {
            holds.restart_count(&Subject::pod(pod), HoldReason::EventRefused);
        } else if last.is_some_and(|last| last.id == id) {
            // Once for all notices of the pod that were sent together.
            let (subject, reason) = (Subject::pod(pod), HoldReason::EventRefused);
            let held = holds.until(&subject, reason, now);
            let until = held.unwrap_or_else(|| holds.hold(subject, reason, now));
            self.resends.insert((until, id));
            self.refused.insert(id, (topic, notice));
        }
    }

    /// Returns the notices that are to be sent again now, as many as may be open. Each that ends
    /// causes a step, in which the rest follows.
    pub(super) fn take_due(&mut self, holds: &Holds, now: Moment) -> Vec<Notice> {
        let mut notices = Vec::new();
        while self.open.len() < MAX_OPEN_NOTICES
            && let Some((at, id)) = self.resends.first().copied()
            && at <= now
        {
            self.resends.pop_first();
            let Some((_, notice)) = self.refused.get(&id) else { continue };
            let subject = Subject::pod(&notice.pod.uid);
            if let Some(until) = holds.until(&subject, HoldReason::EventRefused, now) {
                self.resends.insert((until, id));
            } else if let Some(refused) = self.refused.remove(&id) {
                notices.push(refused.1.clone());
                self.open.insert(id, refused);
            }
        }
        notices
    }

    /// Returns the time at which the next notice is to be sent, again or after its interval.
    pub(super) fn next_due(&self, now: Moment) -> Option<Moment> {
        let later = (Bound::Excluded((now, NoticeId(u64::MAX))), Bound::Unbounded);
        let resend = self.resends.range(later).next().map(|(at, _)| *at);
        let deferred = self.deferred.values().map(|deferred| deferred.at);
        resend.into_iter().chain(deferred).min()
    }

    /// Forgets a pod that does not exist any more.
    pub(super) fn forget(&mut self, pod: &PodUid) {
        for last in self.last.remove(pod).into_iter().flat_map(|last| last.topics.into_values()) {
            self.refused.remove(&last.id);
        }
        self.deferred.retain(|(of, _), _| of != pod);
    }

    /// Forgets pods that do not exist any more.
    pub(super) fn retain(&mut self, exists: impl Fn(&PodUid) -> bool) {
        self.last.retain(|pod, _| exists(pod));
        self.refused.retain(|_, (_, notice)| exists(&notice.pod.uid));
        self.deferred.retain(|(pod, _), _| exists(pod));
    }
}
