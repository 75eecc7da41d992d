//! The one task that owns the state: applies changes, plans, hands out writes.

mod audit;
mod effects;
mod repair;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use tessera_allocator::model::{PendingPod, PodUid};
use tessera_allocator::{Kept, Plan, Settings};
use tessera_api::names::ClaimUid;
use tessera_index::Index;
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::commit::{CommitError, REQUEST_TIMEOUT, Writer};
use crate::contention::Contention;
use crate::leadership::Tenure;
use crate::metrics::Metrics;
use crate::notices::Notices;
use crate::repairs::Repairs;
use crate::retries::{NotWritten, Retries, TakenBack};
use crate::watch::{Change, Kind, Object, What};

/// After a change, so long is waited for more of them: pods, claims and statuses of one cause come
/// within moments.
const DEBOUNCE: Duration = Duration::from_millis(2);

/// Steps of one plan: one to two seconds of CPU time. What it has decided is written then, and the
/// next plan goes on.
const STEPS_PER_PLAN: u64 = 2_000_000;

/// How often the running sums are checked.
const AUDIT: Duration = Duration::from_secs(60);

/// The planner and everything it owns.
pub struct Planner {
    index: Index,
    retries: Retries,
    contention: Contention,
    repairs: Repairs,
    notices: Notices,
    writer: Writer,
    metrics: Metrics,
    settings: Settings,
    /// Runs the writes, which go on while the planner computes.
    executor: Handle,
    /// Kinds that have been listed.
    listed: BTreeSet<Kind>,
    /// Claims that are being written. Nothing is decided about them before the write has ended.
    writing: BTreeMap<ClaimUid, Writing>,
    /// Writes so far.
    writes: u64,
    outcomes: mpsc::UnboundedSender<Outcome>,
    finished: mpsc::UnboundedReceiver<Outcome>,
    /// Claims gone under their pods that the last audit saw.
    orphans: BTreeSet<(PodUid, ClaimUid)>,
    unlisted: Unlisted,
    /// When to look again although nothing has changed: back-off that ends, an event that was held
    /// back, a node that is kept free no more.
    wake: Option<Instant>,
    /// The node that is kept free.
    kept: Option<Kept>,
    /// What time it is: pods' ages are told by it.
    clock: Box<dyn Fn() -> Timestamp + Send + Sync>,
}

/// Pods whose status does not name all of their claims: kube-scheduler would not bind them.
#[derive(Default)]
struct Unlisted {
    /// That the last audit saw.
    seen: BTreeSet<PodUid>,
    /// That the audit before it saw too.
    confirmed: BTreeSet<PodUid>,
}

/// One write of one claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct WriteId(u64);

/// A write under way.
struct Writing {
    id: WriteId,
    write: Write,
    /// The pod that it is for, if it is for one.
    pod: Option<PodUid>,
    /// When it was decided on; of an allocation, when the change arrived that led to it.
    since: Instant,
}

/// How a write ended.
struct Outcome {
    id: WriteId,
    claim: ClaimUid,
    result: Result<ResourceClaim, CommitError>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Write {
    Allocation,
    Release,
    /// Of a claim that was elsewhere than the pod bound with it.
    Repair,
}

impl Planner {
    /// A planner without any knowledge yet. `identity` names it in events. Writes and events are
    /// sent by the runtime in which it is made, wherever it [runs](Self::run).
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub fn new(client: Client, identity: &str, settings: Settings, metrics: Metrics) -> Self {
        let (outcomes, finished) = mpsc::unbounded_channel();
        Self {
            index: Index::new(),
            retries: Retries::default(),
            contention: Contention::default(),
            repairs: Repairs::default(),
            notices: Notices::start(client.clone(), identity),
            writer: Writer::new(client),
            metrics,
            settings: Settings {
                steps_per_plan: settings.steps_per_plan.min(STEPS_PER_PLAN),
                ..settings
            },
            executor: Handle::current(),
            listed: BTreeSet::new(),
            writing: BTreeMap::new(),
            writes: 0,
            outcomes,
            finished,
            orphans: BTreeSet::new(),
            unlisted: Unlisted::default(),
            wake: None,
            kept: None,
            clock: Box::new(Timestamp::now),
        }
    }

    /// The same planner, which tells the time by `clock`.
    #[must_use]
    pub fn with_clock(self, clock: impl Fn() -> Timestamp + Send + Sync + 'static) -> Self {
        Self { clock: Box::new(clock), ..self }
    }

    /// The same planner, which writes nothing outside of `tenure`.
    #[must_use]
    pub fn during(self, tenure: Tenure) -> Self {
        Self { writer: self.writer.during(tenure), ..self }
    }

    /// Works until `stop`, then waits for the writes under way. Gives whether all of them have
    /// ended.
    pub async fn run(
        mut self,
        mut changes: mpsc::Receiver<Change>,
        stop: CancellationToken,
    ) -> bool {
        let mut audit = tokio::time::interval_at(Instant::now() + AUDIT, AUDIT);
        loop {
            let wake = self.wake;
            let mut cause = None;
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                Some(outcome) = self.finished.recv() => cause = self.conclude(outcome),
                // Before the changes: in a cluster where something always changes it would never come.
                _ = audit.tick() => self.audit(),
                change = changes.recv() => match change {
                    Some(change) => {
                        let at = change.at;
                        cause = self.apply(change).then_some(at);
                    }
                    None => break,
                },
                () = tokio::time::sleep_until(wake.unwrap_or_else(Instant::now)), if wake.is_some() => {
                    cause = Some(Instant::now());
                }
            }
            if let Some(cause) = cause {
                self.gather(&mut changes).await;
                self.step(cause);
            }
        }
        self.finish().await
    }

    /// Takes in what else has changed in this moment.
    async fn gather(&mut self, changes: &mut mpsc::Receiver<Change>) {
        if !self.is_listed() {
            return;
        }
        tokio::time::sleep(DEBOUNCE).await;
        while let Ok(change) = changes.try_recv() {
            self.apply(change);
        }
        while let Ok(outcome) = self.finished.try_recv() {
            self.conclude(outcome);
        }
    }

    fn is_listed(&self) -> bool {
        self.listed.len() == Kind::ALL.len()
    }

    /// Gives whether planning may come to something else by it.
    fn apply(&mut self, change: Change) -> bool {
        let mut is_news = true;
        let applied = match change.what {
            What::Listed(kind) => {
                self.listed.insert(kind);
                Ok(())
            }
            What::Interrupted => {
                self.retries.interrupted(change.at);
                is_news = false;
                Ok(())
            }
            What::Applied(Object::Slice(slice)) => self.index.apply_slice(&slice),
            What::Applied(Object::Class(class)) => {
                self.index.apply_class(Arc::unwrap_or_clone(class))
            }
            What::Applied(Object::Node(node)) => {
                self.index.apply_node(&node).map(|news| is_news = news)
            }
            What::Applied(Object::Claim(claim)) => self.index.apply_claim(&claim),
            What::Applied(Object::TaintRule(rule)) => {
                self.index.apply_taint_rule(&rule);
                Ok(())
            }
            What::Applied(Object::Pod(pod)) => {
                is_news = self.index.apply_pod(&pod);
                Ok(())
            }
            What::Deleted(object) => {
                match object {
                    Object::Slice(slice) => self.index.remove_slice(&slice),
                    Object::TaintRule(rule) => self.index.remove_taint_rule(&rule),
                    Object::Class(class) => self.index.remove_class(&class),
                    Object::Node(node) => self.index.remove_node(&node),
                    Object::Claim(claim) => self.index.remove_claim(&claim),
                    Object::Pod(pod) => self.index.remove_pod(&pod),
                }
                Ok(())
            }
        };
        if let Err(error) = applied {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                "an object cannot be used and is left out"
            );
        }
        is_news
    }

    /// Plans and acts. `cause` is when the change arrived that this answers.
    fn step(&mut self, cause: Instant) {
        if !self.is_listed() {
            return;
        }
        let now = Instant::now();
        self.wake = None;
        self.retries.deallocated(self.index.take_deallocated(), now);
        self.count_bound(now);
        self.undo_overcommit(now);
        self.repair(cause, now);
        let mut work = self.index.work();
        // Pods of which an allocation was taken back just now.
        let mut taken_back = BTreeSet::new();
        work.pending.retain(|pod| {
            let held = self.is_claim_held(pod, now);
            if held {
                taken_back.insert(pod.uid.clone());
                if let Some(node) = &pod.nominated {
                    self.retries.nominated(&pod.uid, node);
                }
            }
            !held
        });
        for pod in &mut work.pending {
            if let Some(what) = self.retries.taken_back(&pod.uid, pod.nominated.as_ref(), now) {
                tracing::info!(pod = %pod.name, namespace = %pod.namespace, ?what, "the allocation was taken back, planning again");
                self.tell_taken_back(&pod.uid, &what, now);
                taken_back.insert(pod.uid.clone());
                if let TakenBack::RoomIsMade(node) = what {
                    pod.nominated = Some(node);
                }
            }
            pod.excluded = self.retries.excluded(&pod.uid, now);
        }
        let mut undecided = 0;
        work.pending.retain(|pod| {
            if self.retries.is_undecided(&pod.uid, now) {
                undecided += pending_claims(pod);
            }
            !self.retries.is_held(&pod.uid, now)
                && !self.is_contended(pod, now)
                && !self.has_open_write(pod)
                && !self.is_long_unlisted(&pod.uid)
        });
        let wall = (self.clock)().as_second();
        let plan = self.index.plan(&work.pending, Settings { now: wall, ..self.settings });
        self.metrics.plan_time.observe(now.elapsed().as_secs_f64());
        for decision in &plan.decisions {
            self.carry_out(decision, cause, now);
        }
        if !plan.unreached.is_empty() {
            self.metrics.plans_cut.inc();
            self.wake_at(Some(now));
        }
        self.note_kept(plan.kept.as_ref());
        self.tell_refused(&plan, &work.blocked, undecided, now);
        self.hold_undecided(&plan, now);
        self.take_back(&plan.refusals, &taken_back, now);
        let waiting = self.index.unbound_pods();
        self.retries.retain(now, |pod| waiting.contains(pod));
        self.notices.retain(|pod| self.index.pod_name(pod).is_some());
        self.contention.retain(|claim| self.index.claim_object(claim).is_some());
        self.wake_at(self.retries.next_wake(now));
        self.wake_at(self.contention.next_wake(now));
        self.wake_at(plan.again.and_then(|again| in_seconds(now, again.saturating_sub(wall))));
    }

    /// Takes in how long kube-scheduler took for the pods that it has bound.
    fn count_bound(&mut self, now: Instant) {
        let is_bound = |pod: &&PodUid| self.index.node_of(pod).is_some();
        let bound: Vec<PodUid> = self.retries.pods().filter(is_bound).cloned().collect();
        self.retries.bound(bound.into_iter(), now);
    }

    /// Has pods wait that could not be decided on with all the steps that a pod gets.
    fn hold_undecided(&mut self, plan: &Plan, now: Instant) {
        let undecided = plan.refusals.iter().filter(|refusal| refusal.is_undecided());
        let pods: BTreeSet<&PodUid> = undecided.map(|refusal| &refusal.pod).collect();
        for pod in pods {
            self.metrics.undecided_plans.inc();
            self.retries.not_decided(pod, now);
        }
    }

    /// Returns `true` if a write of one of the claims to be decided has not ended, for example a
    /// release that was carried out and not answered.
    fn has_open_write(&self, pod: &PendingPod) -> bool {
        pod.pending_claims().any(|claim| self.writing.contains_key(&claim.uid))
    }

    /// Whether one of the claims that would be written is not to be written yet.
    fn is_contended(&self, pod: &PendingPod, now: Instant) -> bool {
        pod.pending_claims().any(|claim| self.contention.is_held(&claim.uid, now))
    }

    /// Whether devices would lie idle with the pod: for more than a minute its status has not named
    /// all of its claims.
    fn is_long_unlisted(&self, pod: &PodUid) -> bool {
        self.unlisted.confirmed.contains(pod) && self.index.is_unlisted(pod)
    }

    /// Whether the claim is not to be written yet.
    fn is_held(&self, claim: &ClaimUid, now: Instant) -> bool {
        self.retries.is_claim_held(claim, now) || self.contention.is_held(claim, now)
    }

    /// Whether a claim of the pod was allocated until just now: a PreBind under way has to notice
    /// first, and kube-scheduler to say whether it has made room.
    fn is_claim_held(&self, pod: &PendingPod, now: Instant) -> bool {
        pod.pending_claims().any(|claim| self.retries.is_claim_held(&claim.uid, now))
    }

    fn wake_at(&mut self, at: Option<Instant>) {
        self.wake = self.wake.into_iter().chain(at).min();
    }

    /// Takes in how a write ended. Gives the moment to answer to, if planning may have something to
    /// do now.
    fn conclude(&mut self, outcome: Outcome) -> Option<Instant> {
        let Outcome { id, claim, result } = outcome;
        let now = Instant::now();
        let Some(Writing { write, pod, since, .. }) = self.end_write(id, &claim) else {
            // It ends no write but its own.
            tracing::error!(%claim, ?id, "a write that is not under way has ended");
            return None;
        };
        let fresh = match result {
            Ok(written) => {
                self.contention.won(&claim);
                if let Some(pod) = pod.as_ref().filter(|_| write == Write::Allocation) {
                    self.retries.written(pod, now);
                }
                self.wrote(write, since);
                Some(written)
            }
            Err(error) => {
                self.contention.lost(&claim, now);
                self.not_written(write, &claim, pod.as_ref(), error, now)
            }
        };
        if let Some(object) = fresh
            && let Err(error) = self.index.apply_written_claim(&Arc::new(object))
        {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                "a claim that was written cannot be read"
            );
        }
        self.index.forget(&claim);
        Some(now)
    }

    fn wrote(&self, write: Write, since: Instant) {
        match write {
            Write::Allocation => {
                self.metrics.allocations.inc();
                self.metrics.latency.observe(since.elapsed().as_secs_f64());
            }
            Write::Release => {
                self.metrics.releases.inc();
            }
            Write::Repair => {
                self.metrics.repairs.inc();
            }
        }
    }

    /// Gives the claim as it is now, where that is known.
    fn not_written(
        &mut self,
        write: Write,
        claim: &ClaimUid,
        pod: Option<&PodUid>,
        error: CommitError,
        now: Instant,
    ) -> Option<ResourceClaim> {
        let is_conflict = matches!(error, CommitError::Conflict { .. });
        // Without the claim as it is now the next decision would be the same, until its watch
        // catches up.
        let is_news = matches!(error, CommitError::Conflict { now: Some(_), .. });
        if is_conflict {
            self.metrics.conflicts.inc();
            tracing::debug!(%error, ?write, "planning again");
        } else {
            self.metrics.write_errors.inc();
            tracing::warn!(error = &error as &dyn std::error::Error, ?write, "write failed");
        }
        if let Some(pod) = pod.filter(|_| write == Write::Allocation) {
            let why = match &error {
                _ if is_news => NotWritten::Outdated,
                error if error.will_last() => NotWritten::Denied,
                _ => NotWritten::Failed,
            };
            self.retries.not_written(pod, why, now);
            if matches!(error, CommitError::Dropped { .. }) {
                self.tell_pod(pod, "AllocationNotKept", error.to_string(), None, now);
            }
        }
        if write != Write::Allocation && !is_news {
            self.retries.hold_claim(claim.clone(), now);
        }
        match error {
            CommitError::Conflict { now, .. } | CommitError::Dropped { now, .. } => {
                now.map(|claim| *claim)
            }
            CommitError::Request { .. } => None,
        }
    }

    /// Waits for the writes under way, so that the lease is not given back before they have ended.
    /// Whether they have: a write that gets no answer is left to whoever leads next.
    async fn finish(mut self) -> bool {
        let patience = Instant::now() + REQUEST_TIMEOUT;
        while !self.writing.is_empty() {
            match tokio::time::timeout_at(patience, self.finished.recv()).await {
                Ok(Some(outcome)) => {
                    self.conclude(outcome);
                }
                Ok(None) | Err(_) => return false,
            }
        }
        true
    }
}

/// Returns the number of claims of the pod that are to be allocated.
fn pending_claims(pod: &PendingPod) -> i64 {
    i64::try_from(pod.pending_claims().count()).unwrap_or(i64::MAX)
}

/// So many seconds later, a second at least; none where that is beyond what a clock shows.
fn in_seconds(now: Instant, seconds: i64) -> Option<Instant> {
    now.checked_add(Duration::from_secs(u64::try_from(seconds).unwrap_or(0).max(1)))
}
