//! The search for victims: which pod it is for, and some nodes in each step.

use std::collections::BTreeSet;
use std::time::Duration;

use tessera_allocator::Refusal;
use tessera_allocator::model::{PendingPod, PodUid};
use tessera_allocator::preemption::{
    NodeHolders, NodePreemption, Preemption, SearchProgress, VictimSearch, preempt_on,
};
use tessera_api::names::NodeName;

use super::{PreemptionPolicy, Preemptions, has_same_claims};
use crate::core::allocate::Round;
use crate::core::clock::Moment;
use crate::core::holds::{HoldReason, Subject};
use crate::core::{State, Step, gauge};

/// The most preemptions under way.
const MAX_UNDER_WAY: usize = 16;

/// The most candidates of one search, as kube-scheduler's `minCandidateNodesAbsolute`. A group has
/// one more for each of its pods.
const MAX_CANDIDATES: usize = 100;

/// The candidates that suffice once this many pods on nodes with a candidate were examined, which
/// takes 0.1 s of CPU time for a single pod.
const ENOUGH_CANDIDATES: usize = 10;
const ENOUGH_HOLDERS: usize = 1_000;

/// The most nodes that are tried in one step: a node without a candidate takes 30 us.
const TRIALS_PER_STEP: usize = 64;

/// The most pods on nodes with a candidate that are examined in one step: each takes 0.1 ms for
/// each pod that is to fit there.
const HOLDERS_PER_STEP: usize = 32;

/// The steps of the plans on one node, about 10 ms of CPU time.
const STEPS_PER_NODE: u64 = 20_000;

/// The steps of the plan of a group on the nodes of its places, about 100 ms of CPU time.
const STEPS_PER_GROUP: u64 = 200_000;

/// The pause between two steps of a search. A step takes 3 to 6 ms, so decisions, whose steps come
/// between, have most of the time.
const SEARCH_PAUSE: Duration = Duration::from_millis(20);

/// The most pods that one step considers as preemptors.
const MAX_CONSIDERED: usize = 256;

/// A search for victims under way.
#[derive(Debug)]
pub(super) struct Search {
    victims: VictimSearch,
    /// The number of nodes to visit for the next pod.
    left: usize,
    /// The number of pods that were examined on nodes with a candidate for it.
    examined: usize,
}

impl Search {
    fn new(victims: VictimSearch, nodes: usize) -> Self {
        Self { victims, left: nodes, examined: 0 }
    }

    /// Returns true if further nodes are to be visited for the next pod.
    fn is_visiting(&self) -> bool {
        let is_long = self.examined >= ENOUGH_HOLDERS;
        let candidates = if is_long { ENOUGH_CANDIDATES } else { MAX_CANDIDATES };
        self.left > 0 && !self.victims.has_candidates(candidates)
    }
}

/// Returns the steps of the plan of a pod and its group on the nodes of their places.
pub(super) fn steps_of(pod: &PendingPod) -> u64 {
    if pod.is_group() { STEPS_PER_GROUP } else { STEPS_PER_NODE }
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
            planning.backlog.is_refused_like_others(&pod.uid)
                || definite.any(|refusal| refusal.pod == pod.uid)
        };
        let waits = |pod: &PendingPod| index.to_plan(&pod.uid).is_ok_and(|found| found.is_some());
        let is_held = |pod: &PendingPod| {
            holds.is_held(&Subject::pod(&pod.uid), HoldReason::PreemptionFailed, now)
        };
        let pods = planning.backlog.next_above(lowest, is_under_way).take(MAX_CONSIDERED);
        let mut preemptors = pods.filter(|pod| {
            index.is_preempting(pod) && !is_held(pod) && waits(pod) && is_refused(pod)
        });
        preemptors.next().cloned()
    }

    /// Returns the node after the one that was visited last.
    fn next_node(&self) -> Option<NodeName> {
        let mut after = self.index.nodes_after(self.preemptions.last_node.as_ref());
        after.next().or_else(|| self.index.nodes_after(None).next()).cloned()
    }

    /// Returns the preemption on one node after which these pods of the group of `pod` fit there,
    /// with pods that are evicted in any case; none on a node that is reserved for another pod.
    fn preemption_on(
        &self,
        node: &NodeName,
        pod: &PendingPod,
        pods: &PendingPod,
        evicted: &BTreeSet<PodUid>,
        now: Moment,
    ) -> Option<NodePreemption> {
        let is_reserved =
            self.reserved.as_ref().is_some_and(|one| one.node == *node && one.pod != pod.uid);
        if is_reserved {
            return None;
        }
        let holders = self.index.holders_on(node).with_ending(evicted);
        let holders = self.without_refused(holders, now);
        if !pod.is_group() && !holders.may_make_room_for(pods) {
            return None;
        }
        let nodes = std::slice::from_ref(node);
        let snapshot = self.index.snapshot_of_nodes(nodes, pod, pods.lowest_priority());
        let settings = self.planning.settings_of_preemption(STEPS_PER_NODE);
        preempt_on(&snapshot, pods, &holders, settings)
    }

    /// Excludes the pods as victims whose eviction was refused lately, with their groups.
    fn without_refused(&self, mut holders: NodeHolders, now: Moment) -> NodeHolders {
        let is_refused =
            |pod| self.holds.is_held(&Subject::pod(pod), HoldReason::EvictionRefused, now);
        for holder in &mut holders.pods {
            let others = holder.group.iter().flat_map(|group| &group.members);
            holder.is_fixed |= others.chain([&holder.pod]).any(is_refused);
        }
        holders
    }

    /// Returns the evictions that a complete search has found, if they are enough.
    fn outcome_of(&self, victims: VictimSearch) -> Option<Preemption> {
        let nodes: Vec<NodeName> = victims.nodes().cloned().collect();
        let pod = victims.group();
        let snapshot = self.index.snapshot_of_nodes(&nodes, pod, pod.lowest_priority());
        let holders = |node: NodeName| (node.clone(), self.index.holders_on(&node));
        let settings = self.planning.settings_of_preemption(steps_of(pod));
        victims.outcome(&snapshot, &nodes.into_iter().map(holders).collect(), settings)
    }
}

impl Step<'_> {
    /// Searches victims for pods that the plan has refused, and has them evicted.
    pub(in crate::core) fn preempt(&mut self, round: &Round) {
        let State { preemptions, .. } = &*self.state;
        self.figures.preemptions = Some(gauge(preemptions.under_way.len()));
        let is_decided = round.plan.unreached.is_empty() && round.plan.to_compile.is_empty();
        if preemptions.policy == PreemptionPolicy::Never
            || preemptions.under_way.len() >= MAX_UNDER_WAY
            || !is_decided
        {
            return;
        }
        if let Some(until) = preemptions.paused_until.filter(|until| *until > self.now) {
            // Also without a search: the plan may have refused a pod.
            self.wake_at(Some(until));
            return;
        }
        let Some(mut search) = self.take_search(round) else { return };
        let progress = self.advance(&mut search);
        self.state.preemptions.paused_until = Some(self.now + SEARCH_PAUSE);
        self.wake_at(Some(self.now + SEARCH_PAUSE));
        if matches!(progress, SearchProgress::Continues | SearchProgress::OtherKind) {
            self.state.preemptions.search = Some(search);
            return;
        }
        self.figures.preemption_attempts += 1;
        let pod = search.victims.group().clone();
        let is_complete = progress == SearchProgress::Complete;
        match is_complete.then(|| self.state.outcome_of(search.victims)).flatten() {
            Some(preemption) => self.begin_preemption(&pod, preemption),
            None => self.pause_preemption(&pod.uid),
        }
    }

    /// Returns the search under way, if its pod still waits, or a new one.
    fn take_search(&mut self, round: &Round) -> Option<Search> {
        let Preemptions { search, .. } = &mut self.state.preemptions;
        let search = search.take().filter(|search| {
            let pod = search.victims.group();
            let found = self.state.index.to_plan(&pod.uid);
            found.is_ok_and(|found| found.is_some_and(|found| has_same_claims(&found, pod)))
        });
        search.or_else(|| {
            let pod = self.state.next_preemptor(round, self.now)?;
            let policy = self.state.planning.settings_of_preemption(0).policy;
            let Some(victims) = VictimSearch::new(&pod, policy) else {
                self.pause_preemption(&pod.uid);
                return None;
            };
            Some(Search::new(victims, self.state.index.node_count()))
        })
    }

    /// Carries on with a search, as far as one step goes.
    fn advance(&mut self, search: &mut Search) -> SearchProgress {
        let (mut trials, mut holders) = (0, 0);
        let pod = search.victims.group().clone();
        while trials < TRIALS_PER_STEP && holders < HOLDERS_PER_STEP {
            let node = self.state.next_node().filter(|_| search.is_visiting());
            if node.is_some() {
                self.state.preemptions.last_node.clone_from(&node);
            }
            let (state, now) = (&*self.state, self.now);
            let before = holders;
            let mut trial = |node: &NodeName, pods: &PendingPod, evicted: &BTreeSet<PodUid>| {
                trials += 1;
                let found = state.preemption_on(node, &pod, pods, evicted, now)?;
                holders += found.holders * pods.members().count();
                Some(found)
            };
            if let Some(node) = node {
                search.victims.visit(&node, &mut trial);
                search.left -= 1;
                search.examined += holders - before;
                continue;
            }
            match search.victims.place_next(&mut trial) {
                SearchProgress::Continues => {}
                SearchProgress::OtherKind => {
                    (search.left, search.examined) = (state.index.node_count(), 0);
                }
                ended => return ended,
            }
        }
        SearchProgress::Continues
    }
}
