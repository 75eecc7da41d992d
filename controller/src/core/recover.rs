//! Recovery: bound pods whose devices are not fit for use any more are evicted, so that their
//! owners create them again elsewhere (ADR 135).
//!
//! The trouble must last for some time, because health flaps and a hanging NVML taints all GPUs of
//! a node. The time since which a pod is troubled is in memory, so a new leader waits again.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tessera_allocator::model::PodUid;
use tessera_api::events;
use tessera_index::TroubledPod;

use super::Step;
use super::clock::Moment;
use super::effect::{Effect, EvictionPurpose, Evictions, PodReference};
use super::event::EvictionOutcome;
use super::holds::{HoldReason, Subject};

/// The most evictions under way. A rack that fails at once is emptied in portions, which
/// kube-scheduler and the drivers of other nodes take up meanwhile.
const MAX_UNDER_WAY: usize = 16;

/// The pods that are evicted for the trouble of their devices.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum RecoveryPolicy {
    /// None.
    #[default]
    Never,
    /// Pods on GPUs that the driver reports as unhealthy.
    Unhealthy,
    /// Also those on GPUs that are not published any more, or that are overcommitted.
    Always,
}

/// The settings of recovery.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RecoverySettings {
    /// The pods that are evicted.
    pub policy: RecoveryPolicy,
    /// The time for which a device is troubled before its pods are evicted.
    pub delay: Duration,
}

/// The recoveries by this controller.
#[derive(Debug, Default)]
pub(super) struct Recoveries {
    settings: RecoverySettings,
    /// The time since which pods are troubled.
    since: BTreeMap<PodUid, Moment>,
    /// Pods whose evictions have no outcome yet, each with the text of its event.
    evicting: BTreeMap<PodUid, String>,
    /// Pods that are evicted, until a watch shows that they are ending.
    evicted: BTreeSet<PodUid>,
}

impl Recoveries {
    pub(super) fn new(settings: RecoverySettings) -> Self {
        Self { settings, ..Self::default() }
    }
}

impl Step<'_> {
    /// Has pods evicted whose devices are troubled for long enough.
    pub(super) fn recover(&mut self) {
        let troubled = match self.state.recoveries.settings.policy {
            RecoveryPolicy::Never => return,
            RecoveryPolicy::Unhealthy => self.state.index.pods_on_unhealthy(),
            RecoveryPolicy::Always => {
                let mut troubled = self.state.index.pods_on_unhealthy();
                troubled.extend(self.state.index.pods_on_taken());
                troubled
            }
        };
        let pods: BTreeSet<&PodUid> = troubled.iter().map(|one| &one.pod).collect();
        let Recoveries { since, evicted, .. } = &mut self.state.recoveries;
        since.retain(|pod, _| pods.contains(pod));
        evicted.retain(|pod| pods.contains(pod));
        troubled.iter().for_each(|one| self.recover_pod(one));
    }

    fn recover_pod(&mut self, troubled: &TroubledPod) {
        let pod = &troubled.pod;
        let recoveries = &mut self.state.recoveries;
        let since = *recoveries.since.entry(pod.clone()).or_insert(self.now);
        let due = since + recoveries.settings.delay;
        if due > self.now {
            self.wake_at(Some(due));
            return;
        }
        let Recoveries { evicting, evicted, .. } = recoveries;
        let is_full = evicting.len() >= MAX_UNDER_WAY;
        // The outcome of an eviction gives the next occasion.
        if is_full || evicting.contains_key(pod) || evicted.contains(pod) {
            return;
        }
        let subject = Subject::pod(pod);
        let held = self.state.holds.until(&subject, HoldReason::EvictionRefused, self.now);
        if held.is_some() {
            self.wake_at(held);
            return;
        }
        let Some(victim) = self.state.pod_reference(pod) else { return };
        let note = tessera_messages::recovery_message(&troubled.device, &troubled.trouble);
        self.state.recoveries.evicting.insert(pod.clone(), note);
        let (purpose, victims) = (EvictionPurpose::Recovery, vec![victim]);
        self.effects.push(Effect::Evict(Evictions { purpose, victims }));
    }

    /// Takes in how the evictions of troubled pods have ended.
    pub(super) fn end_recovery(&mut self, outcomes: &[(PodReference, EvictionOutcome)]) {
        for (victim, outcome) in outcomes {
            let Some(note) = self.state.recoveries.evicting.remove(&victim.uid) else { continue };
            match outcome {
                EvictionOutcome::Evicted => {
                    self.state.recoveries.evicted.insert(victim.uid.clone());
                    let node = self.state.index.node_of(&victim.uid).cloned();
                    let reason = events::EVICTED_FROM_GPU;
                    self.notify_eviction(victim, reason, note, node.as_ref());
                }
                EvictionOutcome::Failed { .. } => {
                    let subject = Subject::pod(&victim.uid);
                    self.state.holds.hold(subject, HoldReason::EvictionRefused, self.now);
                }
                EvictionOutcome::Gone | EvictionOutcome::Refused { .. } => {}
            }
        }
    }
}
