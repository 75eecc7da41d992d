//! Pods that could not run where their devices are, and what is tried next.
//!
//! kube-scheduler may find that a pod does not fit where we allocated (a port, a volume, a pod that
//! was faster). Two signals say so: it takes an allocation back itself, or the pod stays
//! unschedulable. Then the node is left out for this pod for a while that grows with every failure,
//! and the plan goes elsewhere.
//!
//! Time stamps in the pod do not tell whether a failure is newer than the allocation (identical
//! failures are not written again), so a message that differs from the one seen at the decision
//! counts as news, and otherwise a deadline does.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::clock::Moment;
use tessera_allocator::model::PodUid;
use tessera_api::names::{ClaimUid, NodeName};
use tessera_index::Waiting;

/// A failure that kube-scheduler reported after the allocation is acted on after this long: an
/// attempt that began before it saw the allocation may have been under way.
const AFTER_NEW_FAILURE: Duration = Duration::from_secs(2);

/// Without news the scheduler gets this long; its own back-off is at most 10 s. With a queue of
/// pods before this one it gets as many times what it took for the pod that it bound last: one that
/// had failed before waits for its turn anew.
const WITHOUT_NEWS: Duration = Duration::from_secs(20);
const TURNS: u32 = 2;

/// So much more where the API server was away while the pod waited or this long before:
/// kube-scheduler may hear nothing for longer than we. client-go's reflector waits up to 30 s
/// between attempts, and its jitter doubles that.
const AFTER_INTERRUPTION: Duration = Duration::from_secs(60);

/// For how long a node is left out after the first failure there.
const EXCLUSION: Duration = Duration::from_secs(10);

/// Nothing grows beyond this.
const LONGEST: Duration = Duration::from_secs(300);

/// After taking an allocation back, the scheduler gets this long to notice before the next one is
/// written.
const AFTER_RELEASE: Duration = Duration::from_secs(2);

/// After a write failed for a reason that is nobody's change; doubled for each in a row. The
/// longest is kube-scheduler's own longest back-off: who waits has done nothing wrong, and an API
/// server that comes back is to be noticed. What the server will say again ([`NotWritten::Denied`])
/// is asked as rarely as everything else.
const AFTER_WRITE_ERROR: Duration = Duration::from_secs(1);
const LONGEST_AFTER_WRITE_ERROR: Duration = Duration::from_secs(10);

/// After a search that had to be ended; doubled for each in a row.
const AFTER_UNDECIDED: Duration = Duration::from_secs(1);

/// What the scheduler writes about a pod whose claims are not allocated (dynamicresources plugin):
/// old news once they are.
const NOT_ALLOCATED: &str = "cannot allocate all claims";

/// What is known about the attempts of each pod.
#[derive(Debug, Default)]
pub(super) struct Retries {
    pods: BTreeMap<PodUid, Attempts>,
    /// Claims that are not to be written yet.
    claims: BTreeMap<ClaimUid, Moment>,
    pace: Option<Pace>,
    /// When the API server was last seen to be away.
    interrupted: Option<Moment>,
}

/// How fast kube-scheduler is.
#[derive(Debug, Clone, Copy)]
struct Pace {
    /// What it took from the writing of our decision to the binding, for the slowest of the pods
    /// that were bound last.
    took: Duration,
    /// When they were bound.
    seen: Moment,
}

#[derive(Debug, Default)]
struct Attempts {
    /// How often it could not run where it was placed.
    failures: u32,
    /// How often a decision in a row could not be written. Says nothing about nodes, nor about how
    /// long the scheduler may take: one count for both had pods wait for minutes, without a
    /// word, once an API server had been away for seconds.
    write_errors: u32,
    /// How often in a row the search for devices had to be ended.
    undecided: u32,
    excluded: BTreeMap<NodeName, Moment>,
    held_until: Option<Moment>,
    placed: Option<Placed>,
}

/// A decision that waits for the scheduler.
#[derive(Debug)]
struct Placed {
    node: Option<NodeName>,
    /// We decided it for this pod; otherwise the pod came to a claim that was allocated already.
    decided: bool,
    /// From when on the scheduler can have heard of it, as far as is known: when it was made, then
    /// when it was written.
    since: Moment,
    /// The scheduler's message when it was made.
    message: Option<String>,
    /// When another message was first seen.
    changed: Option<Moment>,
    /// The scheduler has made room on the node since.
    room_made: bool,
}

/// What to do about a pod that waits for the scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Nothing, until something changes.
    Wait,
    /// Nothing before then.
    WaitUntil(Moment),
    /// Take the allocation back and plan elsewhere.
    GiveUp,
}

/// Why a decision does not stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NotWritten {
    /// What it was made from has changed, and is known as it is now.
    Outdated,
    /// It could not be written now.
    Failed,
    /// The server does not take it, and will not until somebody changes something.
    Denied,
}

/// An allocation that somebody else, as a rule kube-scheduler, has taken back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Deallocated {
    /// The pod cannot run on this node, which is left out from now on.
    Unplaceable(NodeName),
    /// This node is the one to try again: pods are evicted from it for this one.
    RoomMade(NodeName),
}

impl Retries {
    /// Nodes to leave out for a pod.
    pub(super) fn excluded(&self, pod: &PodUid, now: Moment) -> BTreeSet<NodeName> {
        let excluded = self.pods.get(pod).into_iter().flat_map(|a| &a.excluded);
        excluded.filter(|(_, until)| **until > now).map(|(node, _)| node.clone()).collect()
    }

    /// Claims have lost their allocation, whoever took it. A PreBind that was under way meets a
    /// conflict, reads the claim again and would take any allocation that it finds then, on
    /// whatever node: it gets time to find none.
    pub(super) fn deallocated(&mut self, claims: BTreeSet<ClaimUid>, now: Moment) {
        for claim in claims {
            self.hold_claim(claim, now);
        }
    }

    /// The claim is not to be written for a moment.
    pub(super) fn hold_claim(&mut self, claim: ClaimUid, now: Moment) {
        self.claims.insert(claim, now + AFTER_RELEASE);
    }

    /// Whether the claim is not to be written yet.
    pub(super) fn is_claim_held(&self, claim: &ClaimUid, now: Moment) -> bool {
        self.claims.get(claim).is_some_and(|until| *until > now)
    }

    /// Whether a pod is not to be planned yet.
    pub(super) fn is_held(&self, pod: &PodUid, now: Moment) -> bool {
        self.pods.get(pod).and_then(|a| a.held_until).is_some_and(|until| until > now)
    }

    /// A decision was made for the pod; `message` is what the scheduler says about it at this
    /// moment.
    pub(super) fn placed(
        &mut self,
        pod: &PodUid,
        node: NodeName,
        message: Option<String>,
        now: Moment,
    ) {
        let attempts = self.pods.entry(pod.clone()).or_default();
        attempts.undecided = 0;
        attempts.placed = Some(Placed {
            node: Some(node),
            decided: true,
            since: now,
            message,
            changed: None,
            room_made: false,
        });
    }

    /// What was decided for the pod is written. The time until then, which may be long, was not the
    /// scheduler's.
    pub(super) fn written(&mut self, pod: &PodUid, now: Moment) {
        if let Some(placed) = self.pods.get_mut(pod).and_then(|attempts| attempts.placed.as_mut()) {
            placed.since = now;
        }
    }

    /// The API server is away, as we see it, or has been.
    pub(super) fn interrupted(&mut self, now: Moment) {
        self.interrupted = Some(now);
    }

    /// A decision does not stand: it could not be written, or not all of it. Unless that is news,
    /// it is not repeated at once.
    pub(super) fn not_written(&mut self, pod: &PodUid, why: NotWritten, now: Moment) {
        let attempts = self.pods.entry(pod.clone()).or_default();
        attempts.placed = None;
        let longest = match why {
            NotWritten::Outdated => return,
            NotWritten::Failed => LONGEST_AFTER_WRITE_ERROR,
            NotWritten::Denied => LONGEST,
        };
        let pause = grown(AFTER_WRITE_ERROR, attempts.write_errors).min(longest);
        attempts.held_until = Some(now + pause);
        attempts.write_errors += 1;
    }

    /// The search for devices for the pod took more steps than a pod gets. It goes on where it was,
    /// each time after a longer pause: such a pod costs the planner as much as thousands of
    /// others.
    pub(super) fn not_decided(&mut self, pod: &PodUid, now: Moment) {
        let attempts = self.pods.entry(pod.clone()).or_default();
        attempts.held_until = Some(now + grown(AFTER_UNDECIDED, attempts.undecided));
        attempts.undecided += 1;
    }

    /// Whether a pod is not to be planned yet because it could not be decided on.
    pub(super) fn is_undecided(&self, pod: &PodUid, now: Moment) -> bool {
        self.is_held(pod, now) && self.pods.get(pod).is_some_and(|attempts| attempts.undecided > 0)
    }

    /// kube-scheduler has nominated a node for a pod. Where it was placed there, that is kept in
    /// mind: a failed attempt while the claim is held takes the nomination away, and the room
    /// is there all the same.
    pub(super) fn nominated(&mut self, pod: &PodUid, node: &NodeName) {
        let placed = self.pods.get_mut(pod).and_then(|attempts| attempts.placed.as_mut());
        if let Some(placed) = placed.filter(|placed| placed.node.as_ref() == Some(node)) {
            placed.room_made = true;
        }
    }

    /// A pod has claims to be allocated. If it had been placed, its allocation was taken back by
    /// somebody else: where preemption has just made room (`nominated`) it is tried again,
    /// otherwise that node is left out for a while.
    pub(super) fn taken_back(
        &mut self,
        pod: &PodUid,
        nominated: Option<&NodeName>,
        now: Moment,
    ) -> Option<Deallocated> {
        let attempts = self.pods.get_mut(pod)?;
        // A claim that was another pod's before and is free now says nothing about its node.
        let Some(Placed { node: Some(node), decided: true, room_made, .. }) =
            attempts.placed.take()
        else {
            return None;
        };
        if room_made || nominated == Some(&node) {
            return Some(Deallocated::RoomMade(node));
        }
        attempts.exclude(node.clone(), now);
        Some(Deallocated::Unplaceable(node))
    }

    /// Pods that we have decided about have been bound.
    pub(super) fn bound(&mut self, pods: impl Iterator<Item = PodUid>, now: Moment) {
        let placed = |pod| self.pods.remove(&pod)?.placed.filter(|placed| placed.decided);
        let took = pods.filter_map(placed).map(|placed| now - placed.since).max();
        self.pace = took.map(|took| Pace { took, seen: now }).or(self.pace);
    }

    /// Pods of which something is known.
    pub(super) fn pods(&self) -> impl Iterator<Item = &PodUid> {
        self.pods.keys()
    }

    /// How long the scheduler gets for a pod without news. What it took for another pod counts for
    /// no longer than it would be waited for.
    fn patience(&self, failures: u32, now: Moment) -> Duration {
        let turns = self.pace.map(|pace| (pace.took * TURNS, pace.seen));
        let turns = turns
            .filter(|(turns, seen)| now - *seen < *turns)
            .map_or(Duration::ZERO, |(turns, _)| turns);
        grown(WITHOUT_NEWS, failures).max(turns).min(LONGEST)
    }

    /// What to do about a pod whose claims are all allocated.
    pub(super) fn verdict(&mut self, waiting: &Waiting, now: Moment) -> Verdict {
        let patience = self.patience(self.pods.get(&waiting.pod).map_or(0, |a| a.failures), now);
        let attempts = self.pods.entry(waiting.pod.clone()).or_default();
        // All that was decided is written.
        attempts.write_errors = 0;
        let placed = attempts.placed.get_or_insert_with(|| Placed {
            node: waiting.node.clone(),
            decided: false,
            since: now,
            message: waiting.unschedulable.clone(),
            changed: None,
            room_made: false,
        });
        if waiting.nominated || waiting.movable.is_empty() {
            return Verdict::Wait;
        }
        if waiting.node_gone {
            return Verdict::GiveUp;
        }
        let Some(message) = &waiting.unschedulable else { return Verdict::Wait };
        let news = Some(message) != placed.message.as_ref() && !message.contains(NOT_ALLOCATED);
        let was_interrupted =
            self.interrupted.is_some_and(|at| at + AFTER_INTERRUPTION > placed.since);
        let more = if was_interrupted { AFTER_INTERRUPTION } else { Duration::ZERO };
        let deadline = if news {
            *placed.changed.get_or_insert(now) + grown(AFTER_NEW_FAILURE, attempts.failures)
        } else {
            placed.since + (patience + more).min(LONGEST)
        };
        if now >= deadline { Verdict::GiveUp } else { Verdict::WaitUntil(deadline) }
    }

    /// The allocation of a pod is being taken back by us; `node` is where the pod could not run.
    pub(super) fn gave_up(&mut self, pod: &PodUid, node: Option<&NodeName>, now: Moment) {
        let attempts = self.pods.entry(pod.clone()).or_default();
        attempts.placed = None;
        attempts.held_until = Some(now + AFTER_RELEASE);
        if let Some(node) = node {
            attempts.exclude(node.clone(), now);
        }
    }

    /// When something that is being waited for is over by itself.
    pub(super) fn next_wake(&self, now: Moment) -> Option<Moment> {
        let of = |a: &Attempts| {
            a.excluded.values().copied().chain(a.held_until).filter(|t| *t > now).min()
        };
        let claims = self.claims.values().copied().filter(|t| *t > now);
        self.pods.values().filter_map(of).chain(claims).min()
    }

    /// Forgets pods that are not waiting any more, and what is over.
    pub(super) fn retain(&mut self, now: Moment, is_waiting: impl Fn(&PodUid) -> bool) {
        self.claims.retain(|_, until| *until > now);
        self.pods.retain(|pod, _| is_waiting(pod));
    }
}

impl Attempts {
    fn exclude(&mut self, node: NodeName, now: Moment) {
        self.failures += 1;
        self.excluded.insert(node, now + grown(EXCLUSION, self.failures - 1));
    }
}

/// `base`, doubled for each failure.
fn grown(base: Duration, failures: u32) -> Duration {
    base.saturating_mul(1 << failures.min(10)).min(LONGEST)
}
