//! The core of the controller: `(state, events, now) -> (state, effects)`.
//!
//! The core reads no clock, makes no random numbers and performs no I/O, so a test drives it
//! without an API server, without a runtime and without mocks. The [shell](crate::shell) collects
//! events, calls [`Core::step`], and has the effects performed.
//!
//! # Parts
//! A step absorbs its events and then runs its parts in a fixed order, which is their precedence.
//! Each part is one file. It reads the state and acts through the methods of `Step`: `write`
//! refuses a claim with an open write, so two parts never act on one claim in one step.
//!
//! | part | decides |
//! |---|---|
//! | `absorb` | nothing: takes events into the state |
//! | `audit` | once a minute: reports drift, orphaned claims, unanswered writes |
//! | `overcommit` | which claims of overcommitted devices to release |
//! | `templates` | which claim templates of converted pods to create and to delete |
//! | `repair` | how to move claims to the nodes of the pods bound with them |
//! | `resizes` | which sizes of shares to change, and what the driver is to apply |
//! | `preempt` | which preemptors to place; after `release`, which pods to evict for others |
//! | `recover` | which pods to evict whose devices are not fit for use any more |
//! | `allocate` | which pods to plan; writes their allocations |
//! | `barriers` | which groups of pods may be bound, and which give their devices back |
//! | `explain` | events and metrics about pending pods |
//! | `release` | which allocations to release: unneeded, or the pod cannot run there |
//! | `nominations` | which nominations of pods to remove; `allocate` has them written |
//! | `placeholders` | which placeholder pods to create and to delete, so that an autoscaler adds nodes |
//! | `quotas` | which statuses of quotas to write; the allocator holds claims to them |
//!
//! The state consists of the index (facts), `planning` (the allocator's view of them), `writes`
//! (claims being written), `templates` (those of converted pods), `holds` (what is left alone, and
//! for how long), `placements` and `misplacements` (the causes of holds), and `notices` (the last
//! events of each pod).

pub mod clock;
pub mod effect;
pub mod event;

mod absorb;
mod allocate;
mod audit;
mod barriers;
mod blocked;
mod evictions;
mod explain;
mod holds;
mod loads;
mod misplacements;
mod nominations;
mod notices;
mod overcommit;
mod placeholders;
mod placements;
mod planning;
mod preempt;
mod queued;
mod quotas;
mod recover;
mod release;
mod repair;
mod resizes;
mod step_allowance;
mod templates;
#[cfg(test)]
mod tests;
mod visits;
mod writes;

use std::collections::BTreeSet;
use std::sync::Arc;

use tessera_allocator::model::PodUid;
use tessera_allocator::{PlanSettings, ReservedNode};
use tessera_api::events::EventReason;
use tessera_api::names::{ClaimUid, ManagedDrivers, NodeName};
use tessera_dialect::Converter;
use tessera_index::Index;

use crate::node_groups::NodeGroups;

use self::allocate::UndecidedPods;
use self::audit::Audits;
use self::barriers::Barriers;
use self::blocked::BlockedPods;
use self::clock::{Moment, Now};
use self::effect::{ClaimChange, ClaimWrite, Effect, Figures, Notice, PodReference, StepOutput};
use self::event::{Event, WatchedKind};
use self::holds::{HoldReason, Holds, Subject};
use self::loads::LoadAges;
use self::misplacements::Misplacements;
pub use self::nominations::NominationPolicy;
use self::nominations::Nominations;
use self::notices::{NoticeDraft, Notices, Offer, Topic};
use self::placeholders::Placeholders;
use self::placements::Placements;
use self::planning::Planning;
pub use self::preempt::PreemptionPolicy;
use self::preempt::Preemptions;
use self::queued::QueuedReasons;
use self::quotas::QuotaStatuses;
use self::recover::Recoveries;
pub use self::recover::{RecoveryPolicy, RecoverySettings};
use self::resizes::Resizes;
use self::templates::Templates;
use self::visits::Visits;
use self::writes::{OpenWrites, WritePurpose};

/// The core: all state of the controller, and the function that changes it.
pub struct Core {
    state: State,
    /// The time of the next step if no event comes before.
    wake: Option<Moment>,
    /// Only outcomes are awaited any more.
    is_stopping: bool,
}

/// The state of the core.
struct State {
    index: Index,
    planning: Planning,
    writes: OpenWrites,
    templates: Templates,
    holds: Holds,
    placements: Placements,
    placeholders: Placeholders,
    misplacements: Misplacements,
    notices: Notices,
    nominations: Nominations,
    preemptions: Preemptions,
    recoveries: Recoveries,
    barriers: Barriers,
    audits: Audits,
    /// The kinds that have been listed.
    listed: BTreeSet<WatchedKind>,
    /// The node that is reserved.
    reserved: Option<ReservedNode>,
    /// The pods that the next step examines although they have not changed.
    revisited: BTreeSet<PodUid>,
    /// The pods that have changed while the last step decided.
    changed_late: BTreeSet<PodUid>,
    /// Pods with a claim that was deallocated within the last seconds, and those of their groups.
    deallocated: BTreeSet<PodUid>,
    /// Pods that are delayed because their last search ended without a decision.
    undecided: UndecidedPods,
    /// The bound pods with misplaced claims that are looked at although they have not changed.
    repair_visits: Visits<PodUid>,
    /// The pods that wait for kube-scheduler and are looked at although they have not changed.
    waiting_visits: Visits<PodUid>,
    blocked: BlockedPods,
    /// The reasons of the pods in the backlog.
    queued: QueuedReasons,
    quota_statuses: QuotaStatuses,
    resizes: Resizes,
    loads: LoadAges,
}

/// A step under way: the state, the time, and the output so far.
struct Step<'s> {
    state: &'s mut State,
    now: Moment,
    wall: i64,
    /// The arrival of the first event that the step answers.
    cause: Moment,
    effects: Vec<Effect>,
    figures: Figures,
    wake: Option<Moment>,
}

impl Core {
    /// Returns a core that knows nothing yet. `settings` are those of its plans.
    pub fn new(settings: PlanSettings) -> Self {
        let state = State {
            index: Index::default(),
            planning: Planning::new(settings),
            writes: OpenWrites::default(),
            templates: Templates::default(),
            holds: Holds::default(),
            placements: Placements::default(),
            placeholders: Placeholders::default(),
            misplacements: Misplacements::default(),
            notices: Notices::default(),
            nominations: Nominations::new(NominationPolicy::Never),
            preemptions: Preemptions::new(PreemptionPolicy::Never),
            recoveries: Recoveries::default(),
            barriers: Barriers::default(),
            audits: Audits::default(),
            listed: BTreeSet::new(),
            reserved: None,
            revisited: BTreeSet::new(),
            changed_late: BTreeSet::new(),
            deallocated: BTreeSet::new(),
            undecided: UndecidedPods::default(),
            repair_visits: Visits::default(),
            waiting_visits: Visits::default(),
            blocked: BlockedPods::default(),
            queued: QueuedReasons::default(),
            quota_statuses: QuotaStatuses::default(),
            resizes: Resizes::default(),
            loads: LoadAges::default(),
        };
        Self { state, wake: None, is_stopping: false }
    }

    /// Returns the core that allocates the devices of these drivers; without them only Tessera's.
    ///
    /// Must come before the first step.
    #[must_use]
    pub fn managing(mut self, drivers: ManagedDrivers) -> Self {
        self.state.index = Index::new(drivers);
        self
    }

    /// Returns the core with a policy of nominations; without one it never nominates.
    #[must_use]
    pub fn nominating(mut self, policy: NominationPolicy) -> Self {
        self.state.nominations = Nominations::new(policy);
        self
    }

    /// Returns the core with a policy of preemptions; without one it never evicts pods.
    #[must_use]
    pub fn preempting(mut self, policy: PreemptionPolicy) -> Self {
        self.state.preemptions = Preemptions::new(policy);
        self
    }

    /// Returns the core with settings of recovery; without them it never evicts pods for it.
    #[must_use]
    pub fn recovering(mut self, settings: RecoverySettings) -> Self {
        self.state.recoveries = Recoveries::new(settings);
        self
    }

    /// Returns the core with groups of nodes, for which it asks a cluster autoscaler; without them
    /// it never does.
    #[must_use]
    pub fn asking_for_nodes(mut self, settings: Option<NodeGroups>) -> Self {
        self.state.placeholders = Placeholders::new(settings);
        self
    }

    /// Returns the core with the converter of the admission webhook, whose templates it creates;
    /// without one it only deletes those that no pod names.
    #[must_use]
    pub fn converting(mut self, converter: Option<Arc<Converter>>) -> Self {
        self.state.templates.set_converter(converter);
        self
    }

    /// Absorbs events, and decides if an event or the passing of time gives reason to.
    pub fn step(&mut self, now: Now, events: impl IntoIterator<Item = Event>) -> StepOutput {
        let mut step = Step {
            state: &mut self.state,
            now: now.monotonic,
            wall: now.wall,
            cause: now.monotonic,
            effects: Vec::new(),
            figures: Figures::default(),
            wake: None,
        };
        let news = step.absorb(events);
        step.state.loads.expire(&mut step.state.index, now.monotonic);
        step.figures.measured_nodes = Some(gauge(step.state.loads.count()));
        let is_due = news.is_some() || self.wake.is_some_and(|wake| wake <= now.monotonic);
        if !is_due {
            step.wake_at(self.wake);
        }
        if !self.is_stopping {
            step.audit_if_due();
            step.resend_notices();
            step.publish_deferred();
            let is_due = is_due || step.wake.is_some_and(|wake| wake <= now.monotonic);
            if is_due && step.state.is_listed() {
                step.wake = None;
                step.cause = news.unwrap_or(now.monotonic);
                step.decide();
            }
            if step.state.is_listed() {
                step.tell_queued();
            }
        }
        let Step { effects, figures, wake, .. } = step;
        self.wake = wake;
        if self.is_stopping {
            return StepOutput { effects, figures, wake: None };
        }
        let notice = self.state.notices.next_due(now.monotonic);
        let audit = self.state.audits.next();
        let wake = wake.into_iter().chain(notice).chain(self.state.queued.next()).chain([audit]);
        let wake = wake.min();
        StepOutput { effects, figures, wake }
    }

    /// Ends deciding. Further steps only absorb events.
    pub fn stop(&mut self) {
        self.is_stopping = true;
    }

    /// Returns true if a write has no outcome yet.
    pub fn has_open_writes(&self) -> bool {
        !self.state.writes.is_empty()
    }

    /// Returns true if all kinds have been listed, so that the core decides.
    pub fn is_listed(&self) -> bool {
        self.state.is_listed()
    }
}

impl State {
    fn is_listed(&self) -> bool {
        self.listed.len() == WatchedKind::ALL.len()
    }

    /// Returns true if a pause forbids to write the claim.
    fn is_held(&self, claim: &ClaimUid, now: Moment) -> bool {
        let reasons =
            [HoldReason::ClaimDeallocated, HoldReason::ClearingFailed, HoldReason::WriteContended];
        self.holds.is_held_for_any(&Subject::claim(claim), &reasons, now)
    }

    /// Returns true if the claim is being written, or a pause forbids to write it.
    fn is_busy(&self, claim: &ClaimUid, now: Moment) -> bool {
        self.writes.contains(claim) || self.is_held(claim, now)
    }

    /// Returns the pod as events and nominations refer to it; none if it does not exist.
    fn pod_reference(&self, pod: &PodUid) -> Option<PodReference> {
        let (namespace, name) = self.index.pod_name(pod)?;
        let (namespace, name) = (namespace.clone(), name.clone());
        Some(PodReference { namespace, name, uid: pod.clone() })
    }

    /// Returns the name of the claim, or its UID where the object is not known.
    fn claim_name(&self, claim: &ClaimUid) -> String {
        let name = self.index.claim_called(claim);
        name.map_or_else(|| claim.to_string(), ToString::to_string)
    }
}

impl Step<'_> {
    /// Runs the parts. Their order is their precedence.
    fn decide(&mut self) {
        // A rule that taints the whole cluster takes seconds; other pods are planned meanwhile.
        let is_tainting = self.state.index.continue_tainting();
        self.wake_at(is_tainting.then_some(self.now));
        self.note_facts();
        self.write_templates();
        self.release_overcommitted();
        let changed = self.changed_pods();
        let affected = self.state.index.take_affected(&changed);
        self.note_bound(&changed);
        self.repair_misplaced(affected.clone());
        self.resize_shares();
        self.settle_preemptions();
        self.recover();
        let round = self.plan_pending(changed);
        self.settle_barriers(&round.changed);
        self.explain(&round);
        self.hold_undecided(&round.plan);
        self.release_unneeded(&round, affected);
        self.preempt(&round);
        self.ask_for_nodes(&round);
        self.withdraw_nominations(&round);
        self.write_quota_statuses();
        self.forget_gone(&round.changed);
    }

    /// Takes over what the index has found out since the last step.
    fn note_facts(&mut self) {
        for claim in self.state.index.take_deallocated() {
            let subject = Subject::claim(&claim);
            self.state.holds.hold(subject, HoldReason::ClaimDeallocated, self.now);
        }
    }

    /// Forgets holds, placements and notices of the changed pods that do not wait any more.
    fn forget_gone(&mut self, changed: &BTreeSet<PodUid>) {
        let State { index, holds, placements, notices, .. } = &mut *self.state;
        let waiting = index.unbound_pods();
        for pod in changed.iter().filter(|pod| !waiting.contains(*pod)) {
            let exists = index.pod_name(pod).is_some();
            placements.forget(pod);
            holds.forget_pod(pod, exists);
            if !exists {
                notices.forget(pod);
            }
        }
        self.wake_at(self.state.holds.next_end(self.now));
    }

    /// Has the next step no later than at this moment.
    fn wake_at(&mut self, at: Option<Moment>) {
        self.wake = self.wake.into_iter().chain(at).min();
    }

    /// Starts a write of the claim. Returns false, and does nothing, while another write of the
    /// claim is open or its object is not known.
    fn write(
        &mut self,
        claim: &ClaimUid,
        purpose: WritePurpose,
        pod: Option<&PodUid>,
        since: Moment,
        change: impl FnOnce(&Index) -> ClaimChange,
    ) -> bool {
        // Before the object of an allocated claim is made, which reads its allocation.
        if self.state.writes.contains(claim) {
            return false;
        }
        let Some(object) = self.state.index.claim_object(claim) else { return false };
        let Some(id) = self.state.writes.open(claim, purpose, pod, since) else { return false };
        let change = change(&self.state.index);
        match &change {
            ClaimChange::Allocate(draft) => self.state.index.assume(&draft.claim_allocation),
            ClaimChange::Resize(sizes) => self.state.index.assume_sizes(claim, sizes),
            _ => {}
        }
        self.effects.push(Effect::Write(ClaimWrite { id, object, change }));
        true
    }

    /// Publishes an event about a state of `pod` that the next steps report again while it lasts,
    /// unless the pod has the same already about `topic`. `node` is the one that it refers to.
    /// Other texts of one reason are published at growing intervals.
    fn notify(
        &mut self,
        pod: &PodUid,
        topic: Topic,
        reason: EventReason,
        note: String,
        node: Option<&NodeName>,
    ) {
        let draft = NoticeDraft { pod: pod.clone(), topic, reason, node: node.cloned() };
        let later = self.publish(&draft, note);
        self.wake_at(later);
    }

    /// Publishes an event about an incident, which no further step reports, as
    /// [`notify`](Self::notify) does. While other events make it wait, it is deferred.
    fn notify_incident(
        &mut self,
        pod: &PodUid,
        topic: Topic,
        reason: EventReason,
        note: String,
        node: Option<&NodeName>,
    ) {
        let is_bound = self.state.index.node_of(pod).is_some();
        let draft = NoticeDraft { pod: pod.clone(), topic, reason, node: node.cloned() };
        match self.publish(&draft, note.clone()) {
            Some(later) => self.state.notices.defer(draft, note, later, is_bound),
            None => self.state.notices.drop_deferred(pod, reason),
        }
    }

    /// Publishes an event about an evicted pod, which may have ended before the outcome of its
    /// eviction came.
    fn notify_eviction(
        &mut self,
        victim: &PodReference,
        reason: EventReason,
        note: String,
        node: Option<&NodeName>,
    ) {
        if self.state.index.pod_name(&victim.uid).is_some() {
            self.notify_incident(&victim.uid, Topic::Pod, reason, note, node);
            return;
        }
        let (pod, topic, node) = (victim.uid.clone(), Topic::Pod, node.cloned());
        self.publish_about(victim.clone(), &NoticeDraft { pod, topic, reason, node }, note);
    }

    /// Publishes an event if it is due. Returns the time at which it is to be offered again.
    fn publish(&mut self, draft: &NoticeDraft, note: String) -> Option<Moment> {
        let about = self.state.pod_reference(&draft.pod)?;
        self.publish_about(about, draft, note)
    }

    /// Publishes an event as [`publish`](Self::publish) does, of a pod that may be gone.
    fn publish_about(
        &mut self,
        about: PodReference,
        draft: &NoticeDraft,
        note: String,
    ) -> Option<Moment> {
        let NoticeDraft { topic, reason, node, .. } = draft;
        let State { notices, holds, .. } = &mut *self.state;
        let (id, note) = match notices.offer(holds, draft, note, self.now) {
            Offer::Known => return None,
            Offer::Later(at) => return Some(at),
            Offer::Send(id, note) => (id, note),
        };
        let notice = Notice { id, pod: about, node: node.clone(), reason: *reason, note };
        self.state.notices.sent(topic.clone(), &notice);
        if *topic == Topic::Pod {
            // The texts about its claims are published again.
            let State { blocked, misplacements, repair_visits, .. } = &mut *self.state;
            blocked.tell_again(&draft.pod);
            if misplacements.has_pod(&draft.pod) {
                repair_visits.visit_next(draft.pod.clone());
            }
        }
        self.effects.push(Effect::Notify(notice));
        None
    }

    /// Publishes the deferred events that are due. What happened before a pod was bound is outdated
    /// once it is.
    fn publish_deferred(&mut self) {
        for deferred in self.state.notices.take_deferred(self.now) {
            let NoticeDraft { pod, topic, reason, node } = deferred.draft;
            if self.state.index.node_of(&pod).is_none() || deferred.is_bound {
                self.notify_incident(&pod, topic, reason, deferred.note, node.as_ref());
            }
        }
    }

    /// Publishes again the events that the API server has not taken.
    fn resend_notices(&mut self) {
        for notice in self.state.notices.take_due(&self.state.holds, self.now) {
            self.effects.push(Effect::Notify(notice));
        }
    }
}

/// Returns a count as gauges take it.
fn gauge(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
