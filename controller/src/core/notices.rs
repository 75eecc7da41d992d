//! Notices: the last event of each pod, so that each text is published once.
//!
//! `kube`'s recorder merges events of one reason into a series and keeps the first text, so changed
//! numbers would never be read. Here the same text is published once, and another text is another
//! event. Numbers change with every pod that comes and goes, for each pending pod, so the intervals
//! between the events of a pod grow.

use std::collections::BTreeMap;

use tessera_allocator::model::PodUid;

use super::clock::Moment;
use super::effect::{Notice, NoticeId};
use super::holds::{HoldReason, Holds, Subject};

/// The last event of each pod.
#[derive(Debug, Default)]
pub(super) struct Notices {
    last: BTreeMap<PodUid, LastNotice>,
    sent: u64,
    /// Notices that are being published.
    open: BTreeMap<NoticeId, Notice>,
    /// Notices that the API server has not taken, by pod.
    refused: BTreeMap<PodUid, Notice>,
}

#[derive(Debug)]
struct LastNotice {
    id: NoticeId,
    reason: &'static str,
    note: String,
}

/// The answer to the offer of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Offer {
    /// The pod has it already.
    Known,
    /// Another event was published recently: offer it again at this time.
    Later(Moment),
    /// It is to be published.
    Send(NoticeId),
}

impl Notices {
    /// Decides about a text for `pod`.
    pub(super) fn offer(
        &mut self,
        holds: &mut Holds,
        pod: &PodUid,
        (reason, note): (&'static str, &str),
        now: Moment,
    ) -> Offer {
        let subject = Subject::pod(pod);
        let last = self.last.get(pod);
        if last.is_some_and(|last| last.note == note) {
            return Offer::Known;
        }
        let is_repeated = last.is_some_and(|last| last.reason == reason);
        let interval =
            if is_repeated { HoldReason::EventRepeated } else { HoldReason::EventPublished };
        if let Some(until) = holds.until(&subject, interval, now) {
            return Offer::Later(until);
        }
        if !is_repeated {
            holds.restart_count(&subject, HoldReason::EventRepeated);
        }
        holds.hold(subject.clone(), HoldReason::EventRepeated, now);
        holds.hold(subject, HoldReason::EventPublished, now);
        self.sent += 1;
        let id = NoticeId(self.sent);
        self.last.insert(pod.clone(), LastNotice { id, reason, note: note.to_owned() });
        self.refused.remove(pod);
        Offer::Send(id)
    }

    /// Keeps a notice until its publication has ended.
    pub(super) fn sent(&mut self, notice: &Notice) {
        self.open.insert(notice.id, notice.clone());
    }

    /// Notes how the publication of a notice ended. One that was not delivered is sent again
    /// later, unless the pod has had another one since.
    pub(super) fn ended(
        &mut self,
        holds: &mut Holds,
        id: NoticeId,
        is_delivered: bool,
        now: Moment,
    ) {
        let Some(notice) = self.open.remove(&id) else { return };
        let (pod, subject) = (notice.pod.uid.clone(), Subject::pod(&notice.pod.uid));
        if is_delivered {
            holds.restart_count(&subject, HoldReason::EventRefused);
        } else if self.last.get(&pod).is_some_and(|last| last.id == id) {
            holds.hold(subject, HoldReason::EventRefused, now);
            self.refused.insert(pod, notice);
        }
    }

    /// Returns the notices that are to be sent again now.
    pub(super) fn take_due(&mut self, holds: &Holds, now: Moment) -> Vec<Notice> {
        let is_due = |pod: &PodUid, _: &mut Notice| {
            !holds.is_held(&Subject::pod(pod), HoldReason::EventRefused, now)
        };
        let due: Vec<Notice> = self.refused.extract_if(.., is_due).map(|(_, n)| n).collect();
        due.iter().for_each(|notice| self.sent(notice));
        due
    }

    /// Returns the time at which the next notice is to be sent again.
    pub(super) fn next_resend(&self, holds: &Holds, now: Moment) -> Option<Moment> {
        let until = |pod| holds.until(&Subject::pod(pod), HoldReason::EventRefused, now);
        self.refused.keys().filter_map(until).min()
    }

    /// Forgets pods that do not exist any more.
    pub(super) fn retain(&mut self, exists: impl Fn(&PodUid) -> bool) {
        self.last.retain(|pod, _| exists(pod));
        self.refused.retain(|pod, _| exists(pod));
    }
}
