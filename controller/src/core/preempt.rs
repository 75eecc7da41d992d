//! Preemption: pods of lower priority are evicted so that a pod gets its devices (ADR 131).
//!
//! One search at a time visits the nodes, some in each step. Its victims are evicted together, and
//! the devices are kept for the pod, the preemptor, until it has them or a time has passed. What
//! the allocator decides for the preemptor meanwhile, on any node, ends the preemption.
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

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tessera_allocator::Refusal;
use tessera_allocator::model::{Claim, DeviceResult, PendingPod, PodUid};
use tessera_allocator::preemption::{NodePreemption, Preemption, preempt_on};
use tessera_api::events;
use tessera_api::names::{ClaimUid, NodeName};

use super::allocate::Round;
use super::clock::Moment;
use super::effect::{Effect, EvictionPurpose, Evictions, PodReference};
use super::event::EvictionOutcome;
use super::holds::{HoldReason, Subject};
use super::notices::Topic;
use super::{State, Step};

/// The time for which devices are kept for a preemptor. Pods with a longer grace period are found
/// again by its next search, as pods that are ending.
const ROOM_TIME: Duration = Duration::from_secs(300);

/// The most preemptions under way.
const MAX_UNDER_WAY: usize = 16;

/// The most candidates of one search, as kube-scheduler's `minCandidateNodesAbsolute`.
const MAX_CANDIDATES: usize = 100;

/// The most nodes that are visited in one step: a node without a candidate takes 30 us.
const NODES_PER_STEP: usize = 64;

/// The most pods on nodes with a candidate that are examined in one step: each takes 0.1 ms.
const HOLDERS_PER_STEP: usize = 32;

/// The steps of the plans on one node, about 10 ms of CPU time.
const STEPS_PER_NODE: u64 = 20_000;

/// The pause between two steps of a search.
const SEARCH_PAUSE: Duration = Duration::from_millis(5);

/// The pause before a preemptor is placed that cannot be planned at present.
const BUSY_PAUSE: Duration = Duration::from_millis(100);

/// The time between two attempts to place a preemptor while no further claim becomes free: other
/// pods of the node may have ended.
const ATTEMPT_PAUSE: Duration = Duration::from_secs(5);

/// The most pods that one step considers as preemptors.
const MAX_CONSIDERED: usize = 256;

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
}

/// A search for victims under way.
#[derive(Debug)]
struct Search {
    pod: PendingPod,
    /// The number of nodes to visit.
    left: usize,
    candidates: usize,
    best: Option<(NodeName, NodePreemption)>,
}

/// A preemption under way.
#[derive(Debug)]
struct UnderWay {
    priority: i32,
    node: NodeName,
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
}

impl State {
    /// Returns the next pod to search victims for.
    fn next_preemptor(&self, round: &Round, now: Moment) -> Option<PendingPod> {
        let State { index, planning, preemptions, holds, .. } = self;
        let lowest = index.lowest_priority()?;
        let is_under_way = |pod: &PodUid| {
            preemptions.under_way.contains_key(pod) || preemptions.evicting.contains(pod)
        };
        let is_refused = |pod: &PendingPod| {
            let is_definite = |refusal: &&Refusal| !refusal.is_undecided();
            let mut definite = round.plan.refusals.iter().filter(is_definite);
            planning.backlog.class_of(&pod.uid).is_some()
                || definite.any(|refusal| refusal.pod == pod.uid)
        };
        let waits = |pod: &PendingPod| index.to_plan(&pod.uid).is_ok_and(|found| found.is_some());
        let is_held = |pod: &PendingPod| {
            holds.is_held(&Subject::pod(&pod.uid), HoldReason::PreemptionFailed, now)
        };
        let pods = planning.backlog.next_above(lowest, is_under_way).take(MAX_CONSIDERED);
        let mut preemptors = pods.filter(|pod| {
            !pod.is_group()
                && index.is_preempting(&pod.uid)
                && !is_held(pod)
                && waits(pod)
                && is_refused(pod)
        });
        preemptors.next().cloned()
    }

    /// Returns the node after the one that was visited last.
    fn next_node(&self) -> Option<NodeName> {
        let mut after = self.index.nodes_after(self.preemptions.last_node.as_ref());
        after.next().or_else(|| self.index.nodes_after(None).next()).cloned()
    }

    /// Returns the preemption on one node; none on a node that is reserved for another pod.
    fn preemption_on(
        &self,
        node: &NodeName,
        pod: &PendingPod,
        now: Moment,
    ) -> Option<NodePreemption> {
        let mut holders = self.index.holders_on(node);
        let is_reserved =
            self.reserved.as_ref().is_some_and(|one| one.node == *node && one.pod != pod.uid);
        if holders.pods.is_empty() || is_reserved {
            return None;
        }
        let snapshot = self.index.snapshot_of_node(node, pod, pod.priority)?;
        let is_refused =
            |pod| self.holds.is_held(&Subject::pod(pod), HoldReason::EvictionRefused, now);
        for holder in &mut holders.pods {
            let others = holder.group.iter().flat_map(|group| &group.members);
            holder.is_fixed |= others.chain([&holder.pod]).any(is_refused);
        }
        let settings = self.planning.settings_of_preemption(STEPS_PER_NODE);
        preempt_on(&snapshot, pod, &holders, settings)
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
        if remaining >= under_way.remaining && self.now < under_way.next_attempt {
            let next = under_way.next_attempt.min(until);
            self.wake_at(Some(next));
            return;
        }
        under_way.next_attempt = self.now + ATTEMPT_PAUSE;
        let pending = planning.backlog.get(pod).filter(|pod| pod.claims == waiting.claims).cloned();
        let node = under_way.node.clone();
        let is_free = |claim: &Arc<Claim>| !self.state.is_busy(&claim.uid, self.now);
        let Some(pending) = pending.filter(|pod| pod.pending_claims().all(is_free)) else {
            // Something keeps it from being planned at present.
            self.attempt_soon(pod);
            return;
        };
        if self.place_preemptor(&node, &pending) {
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

    /// Allocates devices for the pod on the node, if it fits there now. Returns true if it does.
    fn place_preemptor(&mut self, node: &NodeName, pod: &PendingPod) -> bool {
        let State { index, planning, .. } = &*self.state;
        let Some(snapshot) = index.snapshot_of_node(node, pod, i32::MIN) else {
            return false;
        };
        let settings = planning.settings_of_preemption(STEPS_PER_NODE);
        let plan = tessera_allocator::plan(&snapshot, std::slice::from_ref(pod), settings);
        plan.decisions.iter().for_each(|decision| self.carry_out(decision));
        !plan.decisions.is_empty()
    }

    /// Searches victims for pods that the plan has refused, and has them evicted.
    pub(super) fn preempt(&mut self, round: &Round) {
        let State { preemptions, .. } = &*self.state;
        self.figures.preemptions = Some(super::gauge(preemptions.under_way.len()));
        let is_decided = round.plan.unreached.is_empty() && round.plan.to_compile.is_empty();
        if preemptions.policy == PreemptionPolicy::Never
            || preemptions.under_way.len() >= MAX_UNDER_WAY
            || !is_decided
        {
            return;
        }
        let Some(mut search) = self.take_search(round) else { return };
        self.visit_nodes(&mut search);
        if search.left > 0 && search.candidates < MAX_CANDIDATES {
            self.state.preemptions.search = Some(search);
            self.wake_at(Some(self.now + SEARCH_PAUSE));
            return;
        }
        self.figures.preemption_attempts += 1;
        let Search { pod, best, .. } = search;
        // The node may have changed since it was visited.
        let best = best
            .and_then(|(node, _)| Some((self.state.preemption_on(&node, &pod, self.now)?, node)));
        match best {
            Some((candidate, node)) => self.begin_preemption(&pod, node, candidate.preemption),
            None => self.pause_preemption(&pod.uid),
        }
        self.wake_at(Some(self.now));
    }

    /// Returns the search under way, if its pod still waits, or a new one.
    fn take_search(&mut self, round: &Round) -> Option<Search> {
        let State { index, preemptions, .. } = &mut *self.state;
        let search = preemptions.search.take().filter(|search| {
            let found = index.to_plan(&search.pod.uid);
            found.is_ok_and(|found| found.is_some_and(|found| found.claims == search.pod.claims))
        });
        search.or_else(|| {
            let pod = self.state.next_preemptor(round, self.now)?;
            let left = self.state.index.nodes_after(None).count();
            Some(Search { pod, left, candidates: 0, best: None })
        })
    }

    /// Visits the next nodes of a search.
    fn visit_nodes(&mut self, search: &mut Search) {
        let mut holders = 0;
        for _ in 0..NODES_PER_STEP {
            if search.left == 0 || holders >= HOLDERS_PER_STEP {
                return;
            }
            let Some(node) = self.state.next_node() else {
                search.left = 0;
                return;
            };
            self.state.preemptions.last_node = Some(node.clone());
            search.left -= 1;
            let Some(candidate) = self.state.preemption_on(&node, &search.pod, self.now) else {
                continue;
            };
            holders += candidate.holders;
            search.candidates += 1;
            let is_better = search.best.as_ref().is_none_or(|(_, best)| candidate.loss < best.loss);
            if is_better {
                search.best = Some((node, candidate));
            }
        }
    }

    fn begin_preemption(&mut self, pod: &PendingPod, node: NodeName, preemption: Preemption) {
        let Preemption { decision, victims, freed } = preemption;
        self.cancel_lower(&node, pod.priority);
        let results: Vec<DeviceResult> =
            decision.claims.into_iter().flat_map(|claim| claim.results).collect();
        let State { index, preemptions, .. } = &mut *self.state;
        index.keep_room(&pod.uid, pod.priority, results.into());
        let under_way = UnderWay {
            priority: pod.priority,
            node: node.clone(),
            freed,
            remaining: usize::MAX,
            next_attempt: self.now,
            until: self.now + ROOM_TIME,
        };
        preemptions.under_way.insert(pod.uid.clone(), under_way);
        let victims: Vec<PodReference> =
            victims.iter().filter_map(|victim| self.state.pod_reference(victim)).collect();
        let (namespace, name, number) = (&pod.namespace, &pod.name, victims.len());
        tracing::info!(%namespace, %name, %node, victims = number, "making room for a pod");
        if let Some(preemptor) = self.state.pod_reference(&pod.uid).filter(|_| !victims.is_empty())
        {
            self.state.preemptions.evicting.insert(pod.uid.clone());
            let purpose = EvictionPurpose::Preemption { preemptor };
            self.effects.push(Effect::Evict(Evictions { purpose, victims }));
        }
    }

    /// Ends the preemptions on a node by pods of a lower priority, whose room the search has
    /// counted as free.
    fn cancel_lower(&mut self, node: &NodeName, priority: i32) {
        let under_way = self.state.preemptions.under_way.iter();
        let lower = under_way.filter(|(_, one)| one.node == *node && one.priority < priority);
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

    /// Tells the preemptor and the evicted pods about each other.
    fn notify_evicted(&mut self, preemptor: &PodReference, evicted: &[PodReference]) {
        let PodReference { namespace, name, uid } = preemptor;
        let node = self.state.preemptions.under_way.get(uid).map(|one| one.node.clone());
        let note = tessera_messages::preempted_message(namespace, name);
        for victim in evicted {
            let (reason, note) = (events::PREEMPTED, note.clone());
            self.notify_eviction(victim, reason, note, node.as_ref());
        }
        if let Some(node) = node.filter(|_| !evicted.is_empty()) {
            let name = |victim: &PodReference| format!("{}/{}", victim.namespace, victim.name);
            let names: Vec<String> = evicted.iter().map(name).collect();
            let note = tessera_messages::preempting_message(&node, &names);
            self.notify_incident(uid, Topic::Pod, events::PREEMPTING, note, Some(&node));
        }
    }
}
