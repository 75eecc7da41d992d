//! The controller's core, and what answers its effects.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use tessera_allocator::PlanSettings;
use tessera_controller::core::clock::{Moment, Now};
use tessera_controller::core::effect::{ClaimChange, ClaimWrite, Effect, StepOutput};
use tessera_controller::core::event::{Change, Event, WatchedKind, WatchedObject, WriteOutcome};
use tessera_controller::core::{Core, NominationPolicy};

use crate::answers;
use crate::scale::{class, cpu_time, node_object, pod, slices};

/// Interval between two events.
pub(crate) const INTERVAL: Duration = Duration::from_millis(100);

/// CPU times of the plans after the first lists.
#[derive(Debug, Default)]
pub(crate) struct FirstPlans {
    pub(crate) first_decision: Duration,
    pub(crate) all: Duration,
    pub(crate) longest_step: Duration,
}

/// The core, an API server that answers at once, and a kube-scheduler that binds each pod whose
/// claim is allocated.
pub(crate) struct Controller {
    core: Core,
    pub(crate) now: Moment,
    /// Time of the next step without an event.
    wake: Option<Moment>,
    /// Answers that the next step gets.
    answers: Vec<Event>,
    /// Number of claims allocated so far.
    pub(crate) allocated: u64,
    /// CPU time of the longest step with an audit.
    pub(crate) audit: Duration,
    /// Adds the annotations of a pod that is bound.
    annotate: Box<dyn Fn(&mut Pod)>,
    /// Returns true if the API server refuses each write of the claim of this name.
    refuses: fn(&str) -> bool,
    /// The API server accepts events.
    pub(crate) takes_events: bool,
}

impl Controller {
    pub(crate) fn new(annotate: Box<dyn Fn(&mut Pod)>, refuses: fn(&str) -> bool) -> Self {
        let core = Core::new(PlanSettings::default()).nominating(NominationPolicy::default());
        Self {
            core,
            now: Moment::START,
            wake: None,
            answers: Vec::new(),
            allocated: 0,
            audit: Duration::ZERO,
            annotate,
            refuses,
            takes_events: true,
        }
    }

    /// Adds the class and nodes of eight GPUs.
    pub(crate) fn add_nodes(&mut self, nodes: usize) {
        self.add([WatchedObject::Class(Arc::new(class()))]);
        for node in 0..nodes {
            let slices = slices(node).into_iter().map(Arc::new).map(WatchedObject::Slice);
            self.add(slices);
            self.add([WatchedObject::Node(Arc::new(node_object(node)))]);
        }
    }

    /// Adds objects before all are listed, when nothing is decided.
    pub(crate) fn add(&mut self, objects: impl IntoIterator<Item = WatchedObject>) {
        let change = |object| Event::Changed { change: Change::Applied(object), at: self.now };
        let events: Vec<Event> = objects.into_iter().map(change).collect();
        let output = self.core.step(self.time(), events);
        assert!(output.effects.is_empty(), "nothing is decided before all kinds are listed");
    }

    /// Ends the first lists. Returns when a plan has reached all pods.
    pub(crate) fn list(&mut self) -> FirstPlans {
        let listed = WatchedKind::ALL.map(Change::Listed);
        let mut plans = FirstPlans::default();
        let mut took = self.step(listed);
        loop {
            plans.all += took;
            plans.longest_step = plans.longest_step.max(took);
            if self.allocated > 0 && plans.first_decision.is_zero() {
                plans.first_decision = plans.all;
            }
            if self.answers.is_empty() && self.wake != Some(self.now) {
                return plans;
            }
            took = self.step([]);
        }
    }

    /// Continues until no event about a pod waits. Returns the CPU time.
    pub(crate) fn settle(&mut self) -> Duration {
        let mut took = Duration::ZERO;
        let end = self.now + Duration::from_secs(60);
        while self.now < end {
            took += self.run_until(self.now + INTERVAL);
        }
        took
    }

    /// Makes all steps that are due until `end`.
    pub(crate) fn run_until(&mut self, end: Moment) -> Duration {
        let mut took = Duration::ZERO;
        loop {
            let wake = self.wake.filter(|wake| *wake <= end);
            match (self.answers.is_empty(), wake) {
                (true, None) => break,
                (true, Some(wake)) => self.now = self.now.max(wake),
                (false, _) => {}
            }
            took += self.step([]);
        }
        self.now = end;
        took
    }

    pub(crate) fn step(&mut self, changes: impl IntoIterator<Item = Change>) -> Duration {
        let at = self.now;
        let changes = changes.into_iter().map(|change| Event::Changed { change, at });
        let events: Vec<Event> = self.answers.drain(..).chain(changes).collect();
        let (now, mut output) = (self.time(), StepOutput::default());
        let took = cpu_time(|| output = self.core.step(now, events));
        self.wake = output.wake;
        let answers = output.effects.into_iter().flat_map(|effect| self.answer(effect));
        self.answers = answers.collect();
        if output.figures.unanswered.is_some() {
            self.audit = self.audit.max(took);
            return Duration::ZERO;
        }
        took
    }

    fn answer(&mut self, effect: Effect) -> Vec<Event> {
        if let Effect::Notify(notice) = &effect
            && !self.takes_events
        {
            return vec![Event::NoticeEnded { id: notice.id, is_delivered: false }];
        }
        if let Some(event) = answers::success(&effect) {
            return vec![event];
        }
        match effect {
            // No pod was converted, no namespace has a quota, no share is resized.
            Effect::WriteTemplate(_)
            | Effect::WriteQuotaStatus(_)
            | Effect::WriteResizeStatus(_)
            | Effect::WritePlaceholder(_) => vec![],
            Effect::Evict(_) => unreachable!("without a policy of preemptions"),
            Effect::Notify(_) | Effect::Nominate(_) | Effect::Compile { .. } => {
                unreachable!("answered above")
            }
            Effect::Write(write) => {
                if write.object.metadata.name.as_deref().is_some_and(self.refuses) {
                    let outcome = WriteOutcome::Refused { is_lasting: true };
                    return vec![Event::WriteEnded { id: write.id, outcome }];
                }
                self.allocated += 1;
                let stored = stored(&write, self.allocated);
                let bound = self.bound(&stored);
                let outcome = WriteOutcome::Stored(Arc::new(stored));
                let at = self.now;
                let bound =
                    bound.map(|object| Event::Changed { change: Change::Applied(object), at });
                [Event::WriteEnded { id: write.id, outcome }].into_iter().chain(bound).collect()
            }
        }
    }

    /// Returns the claim as kube-scheduler reserves it for its pod, and the pod as it binds it.
    fn bound(&self, claim: &ResourceClaim) -> [WatchedObject; 2] {
        let name = claim.metadata.name.as_deref().expect("claims have names");
        let mut claim = claim.clone();
        let status = claim.status.get_or_insert_default();
        let results = status.allocation.as_ref().and_then(|a| a.devices.as_ref()?.results.as_ref());
        let node = results.expect("the claim is allocated")[0].pool.clone();
        let mut pod = pod(name, Some(node));
        (self.annotate)(&mut pod);
        status.reserved_for = Some(vec![answers::reservation(&pod)]);
        claim.metadata.resource_version = Some("3".to_owned());
        [WatchedObject::Claim(Arc::new(claim)), WatchedObject::Pod(Arc::new(pod))]
    }

    fn time(&self) -> Now {
        answers::clocks(self.now)
    }
}

/// Returns the claim as the API server stores the write.
fn stored(write: &ClaimWrite, number: u64) -> ResourceClaim {
    let ClaimChange::Allocate(draft) = &write.change else {
        panic!("only allocations are expected: {:?}", write.change)
    };
    let mut claim = ResourceClaim::clone(&write.object);
    let allocation = answers::allocation(draft, &claim, number);
    claim.status.get_or_insert_default().allocation = Some(allocation);
    claim.metadata.resource_version = Some("2".to_owned());
    claim
}
