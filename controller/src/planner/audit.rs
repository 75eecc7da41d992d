//! What is looked after besides planning: devices given out twice, running sums, claims that were
//! stripped from their pods, writes without an answer.

use std::time::Duration;

use tessera_index::Overcommitted;
use tessera_messages as message;
use tokio::time::Instant;

use super::Planner;
use crate::retries::NotWritten;

/// A write without an answer for so long is told. The API server has had more than ten tries by
/// then.
const UNANSWERED: Duration = Duration::from_secs(30);

impl Planner {
    /// Takes back what was given out twice, as far as nobody has reserved it: the youngest goes
    /// first.
    pub(super) fn undo_overcommit(&mut self, now: Instant) {
        let found = self.index.overcommitted();
        self.metrics.overcommitted.set(i64::try_from(found.len()).unwrap_or(i64::MAX));
        for Overcommitted { device, losers } in found {
            for claim in losers {
                if self.writing.contains_key(&claim) || self.is_held(&claim, now) {
                    continue;
                }
                let name = self.claim_name(&claim);
                tracing::error!(%device, claim = name, "more of the device is allocated than there is, taking a claim back");
                let note = format!(
                    "more of device {device} was allocated than there is; ResourceClaim {name}, which nobody uses yet, is \
                     allocated anew"
                );
                for pod in self.index.pods_with(&claim) {
                    // That says nothing against the node.
                    self.retries.not_written(&pod, NotWritten::Outdated, now);
                    self.tell_pod(&pod, "Overcommitted", note.clone(), None, now);
                }
                self.release(&claim, None, now);
            }
        }
    }

    /// Checks the running sums, and tells what nobody can put right.
    pub(super) fn audit(&mut self) {
        let now = Instant::now();
        let audit = self.index.audit();
        if audit.drifted {
            self.metrics.drift.inc();
            tracing::error!(
                "the running sums of allocated capacity were wrong and have been put right"
            );
        }
        self.metrics
            .overcommitted
            .set(i64::try_from(audit.overcommitted.len()).unwrap_or(i64::MAX));
        for device in &audit.overcommitted {
            tracing::error!(%device, "more of the device is allocated than there is");
            for pod in self.index.pods_on(device) {
                let note = format!(
                    "more of device {device} is allocated than there is; this pod is one of those that hold it"
                );
                self.tell_pod(&pod, "Overcommitted", note, None, now);
            }
        }
        self.audit_orphans(now);
        self.audit_unlisted(now);
        self.audit_writes(now);
    }

    /// Tells pods whose claim was deleted under them. Pods and claims come over different watches,
    /// so what only one audit sees may be a pod that has just ended.
    fn audit_orphans(&mut self, now: Instant) {
        let seen: Vec<_> = self.index.orphaned();
        let before = std::mem::replace(
            &mut self.orphans,
            seen.iter().map(|(p, c, _)| (p.clone(), c.clone())).collect(),
        );
        let confirmed =
            seen.into_iter().filter(|(p, c, _)| before.contains(&(p.clone(), c.clone())));
        let confirmed: Vec<_> = confirmed.collect();
        self.metrics.orphaned.set(i64::try_from(confirmed.len()).unwrap_or(i64::MAX));
        for (pod, claim, node) in confirmed {
            let claim = self
                .index
                .claim_called(&claim)
                .map_or_else(|| claim.to_string(), ToString::to_string);
            tracing::error!(%pod, claim, %node, "a claim in use is gone");
            let note = format!(
                "ResourceClaim {claim} was deleted while the pod uses it on node {node}; its devices stay taken until the pod \
                 has ended"
            );
            self.tell_pod(&pod, "ClaimGone", note, Some(&node), now);
        }
    }

    /// Tells pods whose status lacks one of their claims for longer than from one audit to the
    /// next. Devices are of no use to them.
    fn audit_unlisted(&mut self, now: Instant) {
        let seen = self.index.unlisted();
        let before = std::mem::replace(&mut self.unlisted.seen, seen);
        self.unlisted.confirmed = before.intersection(&self.unlisted.seen).cloned().collect();
        if !self.unlisted.confirmed.is_empty() {
            // What they hold is taken back, also where nothing else changes.
            self.wake_at(Some(now));
        }
        for pod in self.unlisted.confirmed.clone() {
            tracing::warn!(%pod, "the pod's status does not name all of its claims");
            self.tell_pod(
                &pod,
                message::NOT_LISTED,
                message::NOT_LISTED_NOTE.to_owned(),
                None,
                now,
            );
        }
    }

    /// Tells of writes that get no answer: until there is one, the devices stay taken.
    fn audit_writes(&mut self, now: Instant) {
        let old = self.writing.iter().filter(|(_, w)| now.duration_since(w.since) >= UNANSWERED);
        let old: Vec<_> =
            old.map(|(claim, writing)| (claim.clone(), writing.pod.clone())).collect();
        self.metrics.unanswered.set(i64::try_from(old.len()).unwrap_or(i64::MAX));
        for (claim, pod) in old {
            let claim = self.claim_name(&claim);
            tracing::error!(claim, "the API server does not answer a write");
            let note = format!(
                "the API server does not answer a write of ResourceClaim {claim}; it is sent again until there is an answer, \
                 and the devices stay taken until then (an admission webhook that is away?)"
            );
            if let Some(pod) = pod {
                self.tell_pod(&pod, "WriteNotAnswered", note, None, now);
            }
        }
    }
}
