//! Nominations: the node of an allocation as `status.nominatedNodeName` of the pod, so that
//! kube-scheduler tries that node before all others (KEP-5278). Without one it filters every node
//! of the cluster to find the only one where the devices are.
//!
//! The field also says where kube-scheduler evicts pods to make room. The API server records who
//! set it, so neither this process nor the next leader takes its own nomination for one of those,
//! and one by kube-scheduler is never replaced. A nomination is advice: no allocation waits for it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tessera_allocator::model::PodUid;
use tessera_api::names::NodeName;
use tessera_index::{Index, Nominator};

use super::allocate::Round;
use super::clock::Moment;
use super::effect::{Effect, NominationWrite};
use super::event::NominationOutcome;
use super::{State, Step};

/// The number of nodes from which [`NominationPolicy::Auto`] nominates. Measured in
/// docs/benchmarks/bench-cluster.md.
const AUTO_NODES: usize = 2000;

/// The pause after the API server has refused a nomination: a permission is missing.
const DENIED_PAUSE: Duration = Duration::from_secs(600);

/// The pause after a nomination that was not written, as while the API server does not answer: its
/// removal is repeated then.
const FAILED_PAUSE: Duration = Duration::from_secs(1);

/// The clusters in which the node of an allocation is written to the pod.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum NominationPolicy {
    /// In clusters of 2,000 nodes or more, where it makes kube-scheduler faster.
    #[default]
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

/// The nominations by this controller.
#[derive(Debug, Default)]
pub(super) struct Nominations {
    policy: NominationPolicy,
    written: BTreeMap<PodUid, Written>,
    /// Pods with a write under way: a second one might overtake it.
    open: BTreeSet<PodUid>,
    /// Pods of which a write has ended since the last step, or whose nomination is removed after a
    /// pause.
    ended: BTreeSet<PodUid>,
    paused_until: Option<Moment>,
}

/// A nomination that this process has written.
#[derive(Debug)]
struct Written {
    node: NodeName,
    /// The watch has shown it, so a pod without it has lost it.
    is_seen: bool,
}

impl Nominations {
    pub(super) fn new(policy: NominationPolicy) -> Self {
        Self { policy, ..Self::default() }
    }

    fn is_active(&self, nodes: usize, now: Moment) -> bool {
        let is_wanted = match self.policy {
            NominationPolicy::Auto => nodes >= AUTO_NODES,
            NominationPolicy::Always => true,
            NominationPolicy::Never => false,
        };
        is_wanted && !self.is_paused(now)
    }

    fn is_paused(&self, now: Moment) -> bool {
        self.paused_until.is_some_and(|until| now < until)
    }

    /// Returns the node of our nomination of the pod: as observed, or as written and not yet
    /// observed.
    fn current<'a>(&'a self, index: &'a Index, pod: &PodUid) -> Option<&'a NodeName> {
        let written = self.written.get(pod).map(|written| &written.node);
        match index.nomination(pod) {
            Some(observed) if observed.by == Nominator::Scheduler => None,
            Some(observed) => written.or(Some(&observed.node)),
            None => written,
        }
    }

    /// Compares what was written with what the watch shows.
    fn observe(&mut self, index: &Index, pod: &PodUid) {
        let observed = index.nomination(pod).map(|nomination| &nomination.node);
        if let Some(written) = self.written.get_mut(pod) {
            if observed == Some(&written.node) {
                written.is_seen = true;
            } else if written.is_seen {
                self.written.remove(pod);
            }
        }
    }

    /// Notes how a write has ended.
    fn end(
        &mut self,
        index: &Index,
        pod: PodUid,
        node: Option<NodeName>,
        outcome: NominationOutcome,
        now: Moment,
    ) {
        self.open.remove(&pod);
        self.ended.insert(pod.clone());
        match outcome {
            NominationOutcome::Stored => match node {
                Some(node) => {
                    self.written.insert(pod.clone(), Written { node, is_seen: false });
                    self.observe(index, &pod);
                }
                None => drop(self.written.remove(&pod)),
            },
            NominationOutcome::Outdated => drop(self.written.remove(&pod)),
            NominationOutcome::Denied => self.pause(now + DENIED_PAUSE),
            NominationOutcome::Failed => self.pause(now + FAILED_PAUSE),
        }
    }

    fn pause(&mut self, until: Moment) {
        self.paused_until = self.paused_until.max(Some(until));
    }

    /// Forgets pods that do not wait any more.
    pub(super) fn retain(&mut self, is_waiting: impl Fn(&PodUid) -> bool) {
        self.written.retain(|pod, _| is_waiting(pod));
    }
}

impl State {
    /// Returns true if the node is that of the pod's devices, stored or decided.
    fn is_at(&self, pod: &PodUid, node: &NodeName) -> bool {
        self.placements.is_placed_on(pod, node) || self.index.has_devices_on(pod, node)
    }
}

impl Step<'_> {
    /// Nominates the node of a decision, before its claims are written.
    pub(super) fn nominate(&mut self, pod: &PodUid, node: &NodeName) {
        let State { nominations, index, .. } = &*self.state;
        let is_free = index.nomination(pod).is_none_or(|n| n.by == Nominator::Controller);
        let current = nominations.current(index, pod);
        if is_free && current != Some(node) && nominations.is_active(index.node_count(), self.now) {
            let replaced = current.cloned();
            self.send_nomination(pod, Some(node.clone()), replaced);
        }
    }

    /// Removes our nominations of pods whose devices are not on that node any more: a nomination
    /// counts against other pods of the node. Examines the pods that have changed or have lost an
    /// allocation.
    pub(super) fn withdraw_nominations(&mut self, round: &Round) {
        let mut pods = std::mem::take(&mut self.state.nominations.ended);
        pods.extend(round.changed.iter().chain(&round.lost).cloned());
        for pod in &pods {
            let State { nominations, index, .. } = &mut *self.state;
            nominations.observe(index, pod);
            if !index.unbound_pods().contains(pod) {
                nominations.written.remove(pod);
                continue;
            }
            let Some(node) = nominations.current(index, pod).cloned() else { continue };
            if self.state.is_at(pod, &node) {
                continue;
            }
            if self.state.nominations.is_paused(self.now) {
                self.state.nominations.ended.insert(pod.clone());
                self.wake_at(self.state.nominations.paused_until);
            } else {
                self.send_nomination(pod, None, Some(node));
            }
        }
    }

    fn send_nomination(
        &mut self,
        pod: &PodUid,
        node: Option<NodeName>,
        replaced: Option<NodeName>,
    ) {
        let Some(reference) = self.state.pod_reference(pod) else { return };
        if self.state.nominations.open.insert(pod.clone()) {
            self.effects.push(Effect::Nominate(NominationWrite { pod: reference, node, replaced }));
        }
    }

    /// Takes in how the write of a nomination has ended. Returns true if it is to be removed
    /// again.
    pub(super) fn absorb_nomination(
        &mut self,
        pod: PodUid,
        node: Option<NodeName>,
        outcome: NominationOutcome,
    ) -> bool {
        match outcome {
            NominationOutcome::Stored => self.figures.nominations += 1,
            NominationOutcome::Outdated => {}
            NominationOutcome::Denied | NominationOutcome::Failed => {
                self.figures.nomination_errors += 1;
            }
        }
        let is_stale = node.as_ref().is_some_and(|node| !self.state.is_at(&pod, node));
        let State { nominations, index, .. } = &mut *self.state;
        nominations.end(index, pod, node, outcome, self.now);
        if nominations.is_paused(self.now) {
            let until = nominations.paused_until;
            self.wake_at(until);
        }
        is_stale && outcome == NominationOutcome::Stored
    }
}
