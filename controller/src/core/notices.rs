//! Notices: the events that each pod has, so that each text is published once.
//!
//! `kube`'s recorder merges events of one reason into a series and keeps the first text, so changed
//! numbers would never be read. Here the same text is published once, and another text is another
//! event. Numbers change with every pod that comes and goes, for each pending pod, so the intervals
//! between the events of a pod grow.

use std::collections::BTreeMap;
use std::time::Duration;

use tessera_allocator::model::PodUid;

use super::clock::Moment;
use super::effect::{Notice, NoticeId};

/// The shortest interval between two events of a pod, doubled with each event of the same reason.
const INTERVAL: Duration = Duration::from_secs(2);

/// The longest interval.
const LONGEST_INTERVAL: Duration = Duration::from_secs(300);

/// The last event of each pod.
#[derive(Debug, Default)]
pub(super) struct Notices {
    last: BTreeMap<PodUid, LastNotice>,
    sent: u64,
    /// Notices that have not been delivered yet.
    open: BTreeMap<NoticeId, OpenNotice>,
}

#[derive(Debug)]
struct LastNotice {
    id: NoticeId,
    reason: &'static str,
    note: String,
    /// The number of events of this reason before this one.
    before: u32,
    at: Moment,
}

#[derive(Debug)]
struct OpenNotice {
    notice: Notice,
    failures: u32,
    /// The time to send it again; none = it is under way.
    resend: Option<Moment>,
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

impl LastNotice {
    /// Returns the time before which nothing else of `reason` is published.
    fn quiet_until(&self, reason: &str) -> Moment {
        let before = if self.reason == reason { self.before } else { 0 };
        self.at + grown(before)
    }
}

impl Notices {
    /// Decides about a text for `pod`.
    pub(super) fn offer(
        &mut self,
        pod: &PodUid,
        reason: &'static str,
        note: &str,
        now: Moment,
    ) -> Offer {
        let mut before = 0;
        if let Some(last) = self.last.get(pod) {
            if last.note == note {
                return Offer::Known;
            }
            let quiet_until = last.quiet_until(reason);
            if now < quiet_until {
                return Offer::Later(quiet_until);
            }
            if last.reason == reason {
                before = last.before + 1;
            }
        }
        self.sent += 1;
        let id = NoticeId(self.sent);
        let last = LastNotice { id, reason, note: note.to_owned(), before, at: now };
        if let Some(old) = self.last.insert(pod.clone(), last)
            && self.open.get(&old.id).is_some_and(|open| open.resend.is_some())
        {
            self.open.remove(&old.id);
        }
        Offer::Send(id)
    }

    /// Keeps a notice until it is delivered.
    pub(super) fn sent(&mut self, notice: &Notice) {
        let open = OpenNotice { notice: notice.clone(), failures: 0, resend: None };
        self.open.insert(notice.id, open);
    }

    /// Takes in how the publication of a notice ended. One that was not delivered is sent again
    /// later, unless the pod has had another one since.
    pub(super) fn ended(&mut self, id: NoticeId, is_delivered: bool, now: Moment) {
        let Some(mut open) = self.open.remove(&id) else { return };
        let is_last = self.last.get(&open.notice.pod.uid).is_some_and(|last| last.id == id);
        if is_delivered || !is_last {
            return;
        }
        open.resend = Some(now + grown(open.failures));
        open.failures += 1;
        self.open.insert(id, open);
    }

    /// Returns the notices that are to be sent again now.
    pub(super) fn take_due(&mut self, now: Moment) -> Vec<Notice> {
        let due = self.open.values_mut().filter(|open| open.resend.is_some_and(|at| at <= now));
        due.map(|open| {
            open.resend = None;
            open.notice.clone()
        })
        .collect()
    }

    /// Returns the time at which the next notice is to be sent again.
    pub(super) fn next_resend(&self) -> Option<Moment> {
        self.open.values().filter_map(|open| open.resend).min()
    }

    /// Forgets pods that do not exist any more.
    pub(super) fn retain(&mut self, exists: impl Fn(&PodUid) -> bool) {
        self.last.retain(|pod, _| exists(pod));
        self.open.retain(|_, open| open.resend.is_none() || exists(&open.notice.pod.uid));
    }
}

fn grown(before: u32) -> Duration {
    INTERVAL.saturating_mul(1 << before.min(10)).min(LONGEST_INTERVAL)
}
