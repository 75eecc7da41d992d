//! Reasons of the pods that are refused like others: those in the queue of their class, and groups.
//!
//! A plan refuses at most the first and the last pod of a queue by themselves, and none if the
//! reasons are the same as before. The others have the reasons of the last one: their claims are
//! counted by class, and their events follow a few pods at a time, so that a step costs the same
//! however many pods wait. Of equal groups a plan refuses the first by itself.

use std::collections::BTreeMap;
use std::time::Duration;

use tessera_allocator::model::PodUid;
use tessera_allocator::{AllocationPlan, ClassId, ExplanationId, Refusal, RefusalCause};
use tessera_messages as message;

use super::clock::Moment;
use super::explain::Pending;
use super::{State, Step, gauge};

/// The most pods whose texts one step compares.
const PODS_PER_STEP: usize = 64;

/// The most reasons of nodes that one step counts for texts: about 1 ms of CPU time. Where no two
/// nodes are in the same state, one text needs a reason of each.
const REASONS_PER_STEP: usize = 10_000;

/// The reasons that count for the text of one claim: to find that it has not changed takes 2 us.
const REASONS_PER_TEXT: usize = 20;

/// The time between two steps that compare texts: some thousand pods a second.
const PAUSE: Duration = Duration::from_millis(20);

/// The reasons of the classes with queues, and how far their pods have been told.
#[derive(Debug, Default)]
pub(super) struct QueuedReasons {
    classes: BTreeMap<ClassId, Vec<ClassReason>>,
    round: TextRound,
}

/// The reason of one claim of a class.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ClassReason {
    /// None for reasons that are not about nodes.
    explanation: Option<ExplanationId>,
    /// Metric label; none if the claims are not reported.
    label: Option<&'static str>,
}

/// A round of comparing the texts of all pods in queues with their reasons.
#[derive(Debug, Default)]
struct TextRound {
    is_running: bool,
    /// A reason has changed since the round began, so another one has to follow.
    is_outdated: bool,
    /// The last pod that was compared.
    after: Option<PodUid>,
    /// The earliest time at which a text that was held back may be published.
    held_until: Option<Moment>,
    /// The time of the next step of the round.
    next: Moment,
}

impl QueuedReasons {
    /// Has the texts of all pods in queues compared with their reasons.
    pub(super) fn texts_changed(&mut self) {
        self.round.is_outdated = true;
    }

    /// Has the texts compared at this time: one was held back until then.
    pub(super) fn tell_at(&mut self, held_until: Option<Moment>) {
        self.round.held_until = self.round.held_until.into_iter().chain(held_until).min();
    }

    /// Returns the time at which texts are to be compared next.
    pub(super) fn next(&self) -> Option<Moment> {
        let round = &self.round;
        let is_due = round.is_running || round.is_outdated;
        if is_due { Some(round.next) } else { round.held_until }
    }
}

impl TextRound {
    /// Begins a round if one is due. Returns true if it has to continue now.
    fn begin_if_due(&mut self, now: Moment) -> bool {
        let is_due = self.is_outdated || self.held_until.is_some_and(|until| until <= now);
        if !self.is_running && is_due {
            *self = Self { is_running: true, next: self.next, ..Self::default() };
        }
        self.is_running && self.next <= now
    }
}

impl Step<'_> {
    /// Counts the claims of pods in queues, and tells some of the pods what has changed.
    pub(super) fn explain_queued(&mut self, plan: &AllocationPlan, pending: &mut Pending) {
        self.note_class_reasons(plan.refusals.iter().chain(&plan.renewed));
        for class in self.state.planning.backlog.classes() {
            for reason in self.state.queued.classes.get(&class.id).into_iter().flatten() {
                let Some(label) = reason.label else { continue };
                *pending.entry(label).or_default() += gauge(class.pods);
            }
        }
    }

    /// Tells the next pods in queues what has changed, if something has.
    pub(super) fn tell_queued(&mut self) {
        if self.state.queued.round.begin_if_due(self.now) {
            self.compare_texts();
        }
    }

    /// Takes over the reasons of each class, which are those of its last pod.
    fn note_class_reasons<'r>(&mut self, refusals: impl Iterator<Item = &'r Refusal>) {
        let mut of_classes = BTreeMap::new();
        for refusal in refusals {
            let backlog = &self.state.planning.backlog;
            if let Some(class) = backlog.class_whose_last_is(&refusal.pod) {
                of_classes.entry(class).or_insert_with(Vec::new).push(refusal);
            }
        }
        for (class, refusals) in of_classes {
            let known = self.state.queued.classes.remove(&class).unwrap_or_default();
            let reason = |(at, refusal): (usize, &&Refusal)| {
                self.state.class_reason(refusal, known.get(at).copied())
            };
            let reasons: Vec<ClassReason> = refusals.iter().enumerate().map(reason).collect();
            if reasons != known {
                self.state.queued.texts_changed();
            }
            self.state.queued.classes.insert(class, reasons);
        }
        let State { queued, planning, .. } = &mut *self.state;
        if queued.classes.len() > 2 * planning.backlog.class_count() + 16 {
            let is_known = |class: &ClassId, _: &mut _| planning.backlog.has_class(*class);
            queued.classes.retain(is_known);
        }
    }

    /// Continues the round: compares the texts of the next pods.
    fn compare_texts(&mut self) {
        let next = self.state.planning.backlog.pods_after(self.state.queued.round.after.as_ref());
        let next: Vec<PodUid> = next.take(PODS_PER_STEP).map(|(pod, _)| pod.clone()).collect();
        let (mut compared, mut counted) = (0, 0);
        while let Some(pod) = next.get(compared)
            && counted < REASONS_PER_STEP
        {
            counted += self.compare_text(pod);
            compared += 1;
        }
        let round = &mut self.state.queued.round;
        round.is_running = compared == PODS_PER_STEP || compared < next.len();
        round.after = compared.checked_sub(1).map(|last| next[last].clone());
        round.next = self.now + PAUSE;
    }

    /// Tells one pod that is refused like others, and its group, what has changed, unless a node is
    /// reserved for it: then each step does. Returns the number of reasons counted for it.
    fn compare_text(&mut self, pod: &PodUid) -> usize {
        let State { planning, reserved, .. } = &*self.state;
        let is_reserved_for = reserved.as_ref().is_some_and(|reserved| reserved.pod == *pod);
        if is_reserved_for {
            return 0;
        }
        let mut refusals = planning.refusals_of(pod).unwrap_or_default();
        refusals.retain(|refusal| self.state.is_reported(refusal));
        let mut counted = 0;
        for refusal in &refusals {
            let before = uncounted(refusal);
            let held_until = self.notify_refused(refusal, None);
            self.state.queued.tell_at(held_until);
            counted += before - uncounted(refusal) + REASONS_PER_TEXT;
        }
        counted
    }
}

/// Returns the number of reasons to count before the text is rendered.
fn uncounted(refusal: &Refusal) -> usize {
    match &*refusal.cause {
        RefusalCause::NoFit(explanation) => explanation.uncounted(),
        _ => 0,
    }
}

impl State {
    /// Returns the reason of a claim of a class. `known` is its reason so far: the label is only
    /// determined for another one.
    fn class_reason(&self, refusal: &Refusal, known: Option<ClassReason>) -> ClassReason {
        let explanation = match &*refusal.cause {
            RefusalCause::NoFit(explanation) => explanation.id(),
            _ => None,
        };
        if let Some(known) =
            known.filter(|k| k.explanation.is_some() && k.explanation == explanation)
        {
            return known;
        }
        let label = self.is_reported(refusal).then(|| message::metric_label(&refusal.cause));
        ClassReason { explanation, label }
    }
}
