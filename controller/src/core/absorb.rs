//! Absorbing events: changes of objects, outcomes of writes and notices.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceClaim;
use tessera_allocator::model::PodUid;
use tessera_api::events;
use tessera_api::names::ClaimUid;

use super::clock::Moment;
use super::effect::WriteId;
use super::event::{Change, Event, WatchedObject, WriteOutcome};
use super::holds::{HoldReason, Subject};
use super::notices::Topic;
use super::placements::NotWritten;
use super::writes::{OpenWrite, WritePurpose};
use super::{State, Step};

impl Step<'_> {
    /// Takes events into the state. Returns the arrival of the first one that may change a
    /// decision.
    pub(super) fn absorb(&mut self, events: impl IntoIterator<Item = Event>) -> Option<Moment> {
        let mut first = None;
        for event in events {
            let news = match event {
                Event::Changed { change, at } => self.absorb_change(change, at).then_some(at),
                Event::WriteEnded { id, outcome } => {
                    self.absorb_outcome(id, outcome).then_some(self.now)
                }
                Event::NominationEnded { pod, node, outcome } => {
                    self.absorb_nomination(pod, node, outcome).then_some(self.now)
                }
                Event::TemplateEnded { template, outcome } => {
                    self.absorb_template(&template, outcome);
                    Some(self.now)
                }
                Event::QuotaStatusEnded { quota, outcome } => {
                    self.absorb_quota_status(&quota, outcome);
                    Some(self.now)
                }
                Event::ResizeStatusEnded { resize, is_stored } => {
                    self.state.resizes.status_ended(&resize, is_stored, self.now);
                    Some(self.now)
                }
                Event::PlaceholderEnded { pod, is_done } => {
                    self.absorb_placeholder(&pod, is_done);
                    None
                }
                Event::EvictionsEnded { purpose, outcomes } => {
                    self.absorb_evictions(&purpose, &outcomes);
                    Some(self.now)
                }
                Event::NoticeEnded { id, is_delivered } => {
                    let State { notices, holds, .. } = &mut *self.state;
                    notices.ended(holds, id, is_delivered, self.now);
                    None
                }
                Event::Compiled { namespace } => {
                    self.state.planning.compiled(&namespace).then_some(self.now)
                }
            };
            first = first.or(news);
        }
        first
    }

    /// Takes in a change. Returns true if it may change a decision.
    fn absorb_change(&mut self, change: Change, at: Moment) -> bool {
        let State { index, templates, resizes, loads, placeholders, holds, revisited, .. } =
            &mut *self.state;
        let mut is_news = true;
        let mut applied = Ok(());
        let is_served = !matches!(change, Change::NotServed(_));
        match change {
            Change::Listed(kind) | Change::NotServed(kind) => {
                // A new leader decides nothing before all rules are applied.
                while index.continue_tainting() {}
                if let Some(api) = kind.pod_group_api() {
                    index.set_pod_groups_served(api, is_served);
                }
                self.state.listed.insert(kind);
            }
            Change::Interrupted => {
                self.state.placements.interrupted(at);
                is_news = false;
            }
            Change::Measured { node, load } => {
                loads.apply(index, node, &load, at);
                is_news = false;
            }
            Change::Applied(WatchedObject::Slice(slice)) => applied = index.apply_slice(&slice),
            Change::Applied(WatchedObject::Class(class)) => {
                revisited.append(&mut holds.pods_with_basis());
                applied = index.apply_class(Arc::unwrap_or_clone(class));
            }
            Change::Applied(WatchedObject::Node(node)) => {
                placeholders.apply_node(&node);
                applied = index.apply_node(&node).map(|is_changed| is_news = is_changed);
            }
            Change::Applied(WatchedObject::Claim(claim)) => {
                resizes.note_claim(&claim);
                applied = index.apply_claim(&claim);
            }
            Change::Applied(WatchedObject::Resize(resize)) => resizes.apply(&resize),
            Change::Applied(WatchedObject::Quota(quota)) => {
                applied = index.apply_quota(&quota).map(|is_changed| is_news = is_changed);
            }
            Change::Applied(WatchedObject::Defaults(defaults)) => {
                applied = index.apply_defaults(&defaults).map(|is_changed| is_news = is_changed);
            }
            Change::Applied(WatchedObject::PodGroup(group)) => {
                is_news = index.apply_pod_group(&group);
            }
            Change::Applied(WatchedObject::VolcanoPodGroup(group)) => {
                is_news = index.apply_volcano_pod_group(&group);
            }
            Change::Applied(WatchedObject::TaintRule(rule)) => index.apply_taint_rule(&rule),
            Change::Applied(WatchedObject::Pod(pod)) => {
                placeholders.apply_pod(&pod);
                let names_templates = templates.apply_pod(&pod);
                is_news = index.apply_pod(&pod) || names_templates;
            }
            Change::Applied(WatchedObject::Template(template)) => {
                is_news = templates.apply_template(&template);
            }
            Change::Deleted(object) => match object {
                WatchedObject::Slice(slice) => index.remove_slice(&slice),
                WatchedObject::TaintRule(rule) => index.remove_taint_rule(&rule),
                WatchedObject::Class(class) => {
                    revisited.append(&mut holds.pods_with_basis());
                    index.remove_class(&class);
                }
                WatchedObject::Node(node) => {
                    placeholders.remove_node(&node);
                    index.remove_node(&node);
                }
                WatchedObject::Claim(claim) => {
                    resizes.note_claim(&claim);
                    index.remove_claim(&claim);
                }
                WatchedObject::Resize(resize) => resizes.remove(&resize),
                WatchedObject::Quota(quota) => index.remove_quota(&quota),
                WatchedObject::Defaults(defaults) => is_news = index.remove_defaults(&defaults),
                WatchedObject::PodGroup(group) => is_news = index.remove_pod_group(&group),
                WatchedObject::VolcanoPodGroup(group) => {
                    is_news = index.remove_volcano_pod_group(&group);
                }
                WatchedObject::Template(template) => is_news = templates.remove_template(&template),
                WatchedObject::Pod(pod) => {
                    placeholders.remove_pod(&pod);
                    templates.remove_pod(&pod);
                    index.remove_pod(&pod);
                }
            },
        }
        if let Err(error) = applied {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(error, "ignoring an object that cannot be read");
        }
        is_news
    }

    /// Takes in how a write has ended. Returns true if it was open, so that a decision may change.
    fn absorb_outcome(&mut self, id: WriteId, outcome: WriteOutcome) -> bool {
        let Some((claim, write)) = self.state.writes.end(id) else {
            tracing::error!(?id, "ignoring the outcome of a write that is not open");
            return false;
        };
        let current = match outcome {
            WriteOutcome::Stored(stored) => {
                self.note_stored(&claim, &write);
                Some(stored)
            }
            failure => self.note_failed(&claim, &write, failure),
        };
        if let Some(object) = &current {
            self.state.resizes.note_claim(object);
        }
        if let Some(object) = current
            && let Err(error) = self.state.index.apply_written_claim(&object)
        {
            let error = &error as &dyn std::error::Error;
            tracing::warn!(error, %claim, "cannot read a claim after it was written");
        }
        self.state.index.forget(&claim);
        true
    }

    fn note_stored(&mut self, claim: &ClaimUid, write: &OpenWrite) {
        let subject = Subject::claim(claim);
        self.state.holds.restart_count(&subject, HoldReason::WriteContended);
        match write.purpose {
            WritePurpose::Allocation => {
                if let Some(pod) = &write.pod {
                    self.state.placements.written(pod, self.now);
                }
                let took: Duration = self.now - write.since;
                self.figures.allocations.push(took);
            }
            WritePurpose::Release => self.figures.releases += 1,
            WritePurpose::Repair => self.figures.repairs += 1,
            WritePurpose::Resize => self.figures.resizes += 1,
            WritePurpose::Barrier => {}
        }
    }

    /// Takes in that a write was not stored. Returns the claim as it is now, where that is known.
    fn note_failed(
        &mut self,
        claim: &ClaimUid,
        write: &OpenWrite,
        failure: WriteOutcome,
    ) -> Option<Arc<ResourceClaim>> {
        self.state.holds.hold(Subject::claim(claim), HoldReason::WriteContended, self.now);
        // Without the claim as it is now, the next decision would be the same until its watch
        // catches up.
        let is_news = matches!(failure, WriteOutcome::Conflict(Some(_)));
        if matches!(failure, WriteOutcome::Conflict(_)) {
            self.figures.conflicts += 1;
        } else {
            self.figures.write_errors += 1;
        }
        let is_allocation = write.purpose == WritePurpose::Allocation;
        if let Some(pod) = write.pod.as_ref().filter(|_| is_allocation) {
            let cause = match &failure {
                _ if is_news => NotWritten::Outdated,
                WriteOutcome::FieldsDropped { .. } | WriteOutcome::Refused { is_lasting: true } => {
                    NotWritten::Denied(self.state.basis_of_write(pod))
                }
                _ => NotWritten::Failed,
            };
            self.note_not_written(pod, cause);
            if let WriteOutcome::FieldsDropped { message, .. } = &failure {
                let topic = Topic::Claim(claim.clone());
                let reason = events::ALLOCATION_FIELDS_DROPPED;
                self.notify_incident(pod, topic, reason, message.clone(), None);
            }
        }
        if !is_allocation && !is_news {
            self.state.holds.hold(Subject::claim(claim), HoldReason::ClearingFailed, self.now);
        }
        match failure {
            WriteOutcome::Conflict(current) | WriteOutcome::FieldsDropped { current, .. } => {
                current
            }
            WriteOutcome::Stored(_) | WriteOutcome::Refused { .. } => None,
        }
    }

    /// Notes that a decision for the pod is not stored.
    pub(super) fn note_not_written(&mut self, pod: &PodUid, cause: NotWritten) {
        let State { placements, holds, .. } = &mut *self.state;
        placements.not_written(holds, pod, cause, self.now);
    }
}
