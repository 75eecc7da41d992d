//! Preemption: pods of lower priority are evicted so that a pod gets its devices (ADR 131), or all
//! pods of a group (ADR 141).
//!
//! One search at a time visits the nodes, some in each step. Its victims are evicted together, and
//! the devices are kept for the pod, the preemptor, until it has them or a time has passed. What
//! the allocator decides for the preemptor meanwhile, on any node, ends the preemption. A group is
//! one preemptor, named after its first pod.
//!
//! ```text
//! refused --search--> victims --evictions--> room kept --claims free--> placed on the node
//!    ^                   |         |             |
//!    '--pause-- none <---'         |             '-- time is up, placed elsewhere, deleted: end
//!    ^                             |
//!    '-- next victims -- one is refused by a PodDisruptionBudget
//! ```
//!
//! Nothing is stored: pods that are being deleted make room in the search of the next leader, too.

mod search;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tessera_allocator::model::{Claim, DeviceResult, PendingPod, PodUid};
use tessera_allocator::preemption::Preemption;
use tessera_api::events;
use tessera_api::names::{ClaimUid, NodeName};

use search::{Search, steps_of};

use super::clock::Moment;
use super::effect::{Effect, EvictionPurpose, Evictions, PodReference};
use super::event::EvictionOutcome;
use super::holds::{HoldReason, Subject};
use super::notices::Topic;
use super::{State, Step};

/// The time for which devices are kept for a preemptor. Pods with a longer grace period are found
/// again by its next search, as pods that are ending.
const ROOM_TIME: Duration = Duration::from_secs(300);

/// The pause before a preemptor is placed that cannot be planned at present.
const BUSY_PAUSE: Duration = Duration::from_millis(100);

/// The time between two attempts to place a preemptor while no further claim becomes free: other
/// pods of the node may have ended.
const ATTEMPT_PAUSE: Duration = Duration::from_secs(5);

/// The pods that others are evicted for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum PreemptionPolicy {
    /// Pods that fit on no node: pods of a strictly lower priority are evicted for them, unless
    /// their `preemptionPolicy` is `Never`.
    #[default]
    LowerPriority,
    /// None.
    Never,
}

/// The preemptions by this controller.
#[derive(Debug, Default)]
pub(super) struct Preemptions {
    policy: PreemptionPolicy,
    search: Option<Search>,
    under_way: BTreeMap<PodUid, UnderWay>,
    /// Preemptors whose evictions have no outcome yet.
    evicting: BTreeSet<PodUid>,
    /// The node that the last search ended with: the next one begins after it.
    last_node: Option<NodeName>,
    /// The time before which no search goes on.
    paused_until: Option<Moment>,
}

/// A preemption under way.
#[derive(Debug)]
struct UnderWay {
    priority: i32,
    /// The preemptor and the others of its group.
    pods: Vec<PodUid>,
    nodes: Vec<NodeName>,
    /// The claims that become free.
    freed: Vec<ClaimUid>,
    /// The number of those that were not free at the last attempt to place the preemptor.
    remaining: usize,
    /// The time of the next attempt if no further claim becomes free.
    next_attempt: Moment,
    until: Moment,
}

impl Preemptions {
    pub(super) fn new(policy: PreemptionPolicy) -> Self {
        Self { policy, ..Self::default() }
    }

    /// Returns true if pods are evicted for this one.
    pub(super) fn is_under_way(&self, pod: &PodUid) -> bool {
        self.under_way.contains_key(pod)
    }
}

impl Step<'_> {
    /// Places preemptors whose devices have become free, and ends preemptions without a preemptor.
    pub(super) fn settle_preemptions(&mut self) {
        let pods: Vec<PodUid> = self.state.preemptions.under_way.keys().cloned().collect();
        pods.iter().for_each(|pod| self.settle_preemption(pod));
    }

    fn settle_preemption(&mut self, pod: &PodUid) {
        let State { index, preemptions, planning, .. } = &mut *self.state;
        let Some(under_way) = preemptions.under_way.get_mut(pod) else { return };
        let Ok(Some(waiting)) = index.to_plan(pod) else {
            // It is placed or gone, or waits for something else.
            self.end_preemption(pod);
            return;
        };
        let until = under_way.until;
        if until <= self.now {
            self.end_preemption(pod);
            self.pause_preemption(pod);
            return;
        }
        let remaining = under_way.freed.iter().filter(|claim| index.has_devices(claim)).count();
        // A group needs all of its places, as a rule.
        let is_worth_a_try =
            remaining == 0 || remaining < under_way.remaining && !waiting.is_group();
        if !is_worth_a_try && self.now < under_way.next_attempt {
            let next = under_way.next_attempt.min(until);
            self.wake_at(Some(next));
            return;
        }
        under_way.next_attempt = self.now + ATTEMPT_PAUSE;
        let pending =
            planning.backlog.get(pod).filter(|pod| has_same_claims(pod, &waiting)).cloned();
        let nodes = under_way.nodes.clone();
        let is_free = |claim: &Arc<Claim>| !self.state.is_busy(&claim.uid, self.now);
        let is_ready =
            |pod: &PendingPod| pod.members().flat_map(PendingPod::pending_claims).all(is_free);
        let Some(pending) = pending.filter(is_ready) else {
            // Something keeps it from being planned at present.
            self.attempt_soon(pod);
            return;
        };
        if self.place_preemptor(&nodes, &pending) {
            self.end_preemption(pod);
        } else if remaining > 0 {
            if let Some(under_way) = self.state.preemptions.under_way.get_mut(pod) {
                under_way.remaining = remaining;
                let next = under_way.next_attempt.min(until);
                self.wake_at(Some(next));
            }
        } else {
            self.end_preemption(pod);
            self.pause_preemption(pod);
        }
    }

    /// Has the next attempt to place a preemptor made after a short pause.
    fn attempt_soon(&mut self, pod: &PodUid) {
        let soon = self.now + BUSY_PAUSE;
        if let Some(under_way) = self.state.preemptions.under_way.get_mut(pod) {
            under_way.next_attempt = soon;
            let next = soon.min(under_way.until);
            self.wake_at(Some(next));
        }
    }

    /// Allocates devices for the pod and its group on the nodes, if they fit there now. Returns
    /// true if they do.
    fn place_preemptor(&mut self, nodes: &[NodeName], pod: &PendingPod) -> bool {
        let State { index, planning, .. } = &*self.state;
        let snapshot = index.snapshot_of_nodes(nodes, pod, i32::MIN);
        let settings = planning.settings_of_preemption(steps_of(pod));
        let plan = tessera_allocator::plan(&snapshot, std::slice::from_ref(pod), settings);
        plan.decisions.iter().for_each(|decision| self.carry_out(decision));
        !plan.decisions.is_empty()
    }

    fn begin_preemption(&mut self, pod: &PendingPod, preemption: Preemption) {
        let Preemption { decisions, victims, freed } = preemption;
        let nodes: BTreeSet<NodeName> = decisions.iter().map(|one| one.node.clone()).collect();
        let priority = pod.lowest_priority();
        self.cancel_lower(&nodes, priority);
        let claims = decisions.into_iter().flat_map(|decision| decision.claims);
        let results: Vec<DeviceResult> = claims.flat_map(|claim| claim.results).collect();
        let State { index, preemptions, .. } = &mut *self.state;
        index.keep_room(&pod.uid, priority, results.into());
        let under_way = UnderWay {
            priority,
            pods: pod.members().map(|pod| pod.uid.clone()).collect(),
            nodes: nodes.into_iter().collect(),
            freed,
            remaining: usize::MAX,
            next_attempt: self.now,
            until: self.now + ROOM_TIME,
        };
        let (namespace, name) = (&pod.namespace, &pod.name);
        let (pods, nodes) = (under_way.pods.len(), under_way.nodes.len());
        tracing::info!(%namespace, %name, pods, nodes, victims = victims.len(), "making room");
        preemptions.under_way.insert(pod.uid.clone(), under_way);
        let victims: Vec<PodReference> =
            victims.iter().filter_map(|victim| self.state.pod_reference(victim)).collect();
        if let Some(preemptor) = self.state.pod_reference(&pod.uid).filter(|_| !victims.is_empty())
        {
            self.state.preemptions.evicting.insert(pod.uid.clone());
            let purpose = EvictionPurpose::Preemption { preemptor };
            self.effects.push(Effect::Evict(Evictions { purpose, victims }));
        }
    }

    /// Ends the preemptions on these nodes by pods of a lower priority, whose room the search has
    /// counted as free.
    fn cancel_lower(&mut self, nodes: &BTreeSet<NodeName>, priority: i32) {
        let under_way = self.state.preemptions.under_way.iter();
        let lower = under_way.filter(|(_, one)| {
            one.priority < priority && one.nodes.iter().any(|node| nodes.contains(node))
        });
        let lower: Vec<PodUid> = lower.map(|(pod, _)| pod.clone()).collect();
        lower.iter().for_each(|pod| self.end_preemption(pod));
    }

    fn end_preemption(&mut self, pod: &PodUid) {
        let State { index, preemptions, .. } = &mut *self.state;
        preemptions.under_way.remove(pod);
        index.end_room(pod);
    }

    /// Leaves the pod out of further searches for a time.
    fn pause_preemption(&mut self, pod: &PodUid) {
        let subject = Subject::pod(pod);
        self.state.holds.hold(subject, HoldReason::PreemptionFailed, self.now);
    }

    /// Takes in how the evictions for a pod have ended. Where one did not succeed, the next search
    /// chooses others; pods that are evicted already make room there.
    pub(super) fn end_preemption_evictions(
        &mut self,
        preemptor: &PodReference,
        outcomes: &[(PodReference, EvictionOutcome)],
    ) {
        self.state.preemptions.evicting.remove(&preemptor.uid);
        let is_evicted = |(_, outcome): &&_| matches!(outcome, EvictionOutcome::Evicted);
        let evicted: Vec<PodReference> =
            outcomes.iter().filter(is_evicted).map(|(victim, _)| victim.clone()).collect();
        self.notify_evicted(preemptor, &evicted);
        for (_, outcome) in outcomes {
            match outcome {
                EvictionOutcome::Evicted | EvictionOutcome::Gone => {}
                EvictionOutcome::Refused { .. } => self.end_preemption(&preemptor.uid),
                EvictionOutcome::Failed { .. } => {
                    self.end_preemption(&preemptor.uid);
                    self.pause_preemption(&preemptor.uid);
                }
            }
        }
    }

    /// Tells the pods of the preemptor and the evicted pods about each other.
    fn notify_evicted(&mut self, preemptor: &PodReference, evicted: &[PodReference]) {
        let PodReference { namespace, name, uid } = preemptor;
        let under_way = self.state.preemptions.under_way.get(uid);
        let under_way = under_way.map(|one| (one.pods.clone(), one.nodes.clone()));
        let (pods, nodes) = under_way.unwrap_or_default();
        let node = match nodes.as_slice() {
            [node] => Some(node),
            _ => None,
        };
        let note = tessera_messages::preempted_message(namespace, name);
        for victim in evicted {
            self.notify_eviction(victim, events::PREEMPTED, note.clone(), node);
        }
        if evicted.is_empty() || nodes.is_empty() {
            return;
        }
        let name = |victim: &PodReference| format!("{}/{}", victim.namespace, victim.name);
        let names: Vec<String> = evicted.iter().map(name).collect();
        let note = tessera_messages::preempting_message(&nodes, &names);
        for pod in &pods {
            self.notify_incident(pod, Topic::Pod, events::PREEMPTING, note.clone(), node);
        }
    }
}

/// Returns true if both are the same pods with the same claims.
fn has_same_claims(a: &PendingPod, b: &PendingPod) -> bool {
    a.members().count() == b.members().count()
        && a.members().zip(b.members()).all(|(a, b)| a.uid == b.uid && a.claims == b.claims)
}
