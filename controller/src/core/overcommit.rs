//! Overcommitment: devices of which more is allocated than they have (ADR 32).

use tessera_allocator::model::{DeviceId, PodUid};
use tessera_api::events;
use tessera_api::names::ClaimUid;
use tessera_index::Overcommitted;

use super::effect::ClaimChange;
use super::notices::Topic;
use super::placements::NotWritten;
use super::writes::WritePurpose;
use super::{Step, gauge};

impl Step<'_> {
    /// Releases claims on overcommitted devices that are not reserved, the youngest first.
    pub(super) fn release_overcommitted(&mut self) {
        let found = self.state.index.overcommitted();
        self.figures.overcommitted = Some(gauge(found.len()));
        for Overcommitted { device, releasable } in found {
            for claim in releasable {
                if !self.state.is_busy(&claim, self.now) {
                    self.release_one(&device, &claim);
                }
            }
        }
    }

    fn release_one(&mut self, device: &DeviceId, claim: &ClaimUid) {
        let name = self.state.claim_name(claim);
        tracing::error!(%device, claim = name, "device is overcommitted, releasing a claim");
        let note = format!(
            "more of device {device} was allocated than there is; ResourceClaim {name}, which is not in use yet, is \
             allocated again"
        );
        for pod in self.state.index.pods_with(claim) {
            // This is no evidence against the node.
            self.note_not_written(&pod, NotWritten::Outdated);
            // Its claims are planned again, so what was published about them is outdated.
            self.notify_incident(&pod, Topic::Pod, events::OVERCOMMITTED, note.clone(), None);
        }
        self.release(claim, None);
    }

    /// Releases the allocation of a claim that is not reserved.
    pub(super) fn release(&mut self, claim: &ClaimUid, pod: Option<&PodUid>) {
        if self.state.is_held(claim, self.now) {
            return;
        }
        if self.write(claim, WritePurpose::Release, pod, self.now, |_| ClaimChange::Release) {
            tracing::info!(%claim, "releasing an unused allocation");
        }
    }
}
