//! A rolling day of a large cluster: pods and groups of three priorities come, run, are preempted
//! and end, for as long as the simulation lasts.
//!
//! ```text
//! arrivals, ends --> objects --5 ms--> Core::step --effects--> writes, 10 ms each
//!                       ^                                          |
//!                       '------ kube-scheduler, one pod at a time -'
//! ```
//!
//! The clock advances by the CPU time of each step, so events that come meanwhile wait, as they do
//! for the one thread of the controller. Not modelled: watches that break, a full API server, and
//! the memory of the controller's watches.

mod api_server;
mod arrivals;
mod gpu_time;
mod kube_scheduler;

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;
use tessera_allocator::PlanSettings;
use tessera_controller::core::clock::{Moment, Now};
use tessera_controller::core::effect::{Effect, Evictions, StepOutput};
use tessera_controller::core::event::{Change, Event, EvictionOutcome, WatchedKind};
use tessera_controller::core::{Core, NominationPolicy, PreemptionPolicy};

use self::api_server::{ApiServer, Happening};
use self::arrivals::Arrivals;
use self::gpu_time::GpuTime;
use self::kube_scheduler::KubeScheduler;
use crate::answers;
use crate::scale::{EventCost, cpu_time, ms, resident_mib};

/// Delay of a watch.
const WATCH_LAG: Duration = Duration::from_millis(5);

/// Time of a write.
const WRITE: Duration = Duration::from_millis(10);

/// Time that an evicted pod takes to end.
const GRACE: Duration = Duration::from_secs(5);

/// Size of a day.
#[derive(Debug, Clone, Copy)]
pub struct DaySize {
    /// Number of nodes, with eight GPUs each.
    pub nodes: usize,
    /// Number of shares at the begin; a quarter of the GPUs is taken by whole pods besides.
    pub shares: usize,
    /// Arrivals per second: pods that ask for a share, for a GPU, and groups.
    pub rate: usize,
    /// Length of the simulation in seconds.
    pub seconds: u64,
    /// Seed of the random numbers.
    pub seed: u64,
}

/// The result of a day.
#[derive(Debug, Clone, Serialize)]
pub struct DayReport {
    /// CPU time of steps, in the first and in the last quarter of the simulation.
    pub steps: Vec<EventCost>,
    /// Longest step, in ms.
    pub longest_step_ms: f64,
    /// CPU time of all steps in percent of the simulated time.
    pub busy_percent: f64,
    /// Time from the creation of a pod or the last pod of a group until its devices are decided,
    /// for those that fit at once: the median, in ms.
    pub decision_p50_ms: f64,
    /// Such a time that 99 of 100 are at most, in ms.
    pub decision_p99_ms: f64,
    /// Numbers of pods and groups, by their fate.
    pub counts: BTreeMap<&'static str, u64>,
    /// Part of the GPU memory that is allocated, in percent, on average.
    pub allocated_percent: f64,
    /// Part of the allocated memory that pods of groups hold which are not bound, in percent.
    pub waiting_groups_percent: f64,
    /// Part of the allocated memory that single pods hold which are not bound, in percent.
    pub waiting_pods_percent: f64,
    /// Memory of the process after the lists and at the end, in MiB.
    pub memory_mib: [f64; 2],
}

/// Simulates a day.
///
/// # Errors
/// The memory of the process cannot be read.
///
/// # Panics
/// A device is allocated twice, or a pod of a group is bound before all have devices.
pub fn run(size: DaySize) -> std::io::Result<DayReport> {
    let mut day = Day::begin(size);
    let memory = resident_mib()?;
    let end = Moment::START + Duration::from_secs(size.seconds);
    while day.now < end {
        day.advance();
    }
    Ok(day.report(size, [memory, resident_mib()?]))
}

/// A simulation under way.
struct Day {
    core: Core,
    now: Moment,
    wake: Option<Moment>,
    api: ApiServer,
    scheduler: KubeScheduler,
    arrivals: Arrivals,
    gpu_time: GpuTime,
    agenda: Agenda,
    /// Events for the next step.
    inbox: Vec<Event>,
    steps: Vec<(Moment, Duration)>,
    counts: BTreeMap<&'static str, u64>,
}

/// The things that happen at later times.
#[derive(Default)]
pub(crate) struct Agenda {
    /// By time, and by number in the order in which they were added.
    happenings: BTreeMap<(Moment, u64), Happening>,
    next: u64,
}

impl Agenda {
    fn add(&mut self, at: Moment, happening: Happening) {
        self.next += 1;
        self.happenings.insert((at, self.next), happening);
    }

    fn next_at(&self) -> Option<Moment> {
        self.happenings.first_key_value().map(|((at, _), _)| *at)
    }

    fn take_due(&mut self, now: Moment) -> Option<Happening> {
        let next = self.happenings.first_entry()?;
        (next.key().0 <= now).then(|| next.remove())
    }
}

impl Day {
    fn begin(size: DaySize) -> Self {
        let core = Core::new(PlanSettings::default())
            .nominating(NominationPolicy::default())
            .preempting(PreemptionPolicy::LowerPriority);
        let mut day = Self {
            core,
            now: Moment::START,
            wake: None,
            api: ApiServer::default(),
            scheduler: KubeScheduler::new(size.seed),
            arrivals: Arrivals::new(size),
            gpu_time: GpuTime::default(),
            agenda: Agenda::default(),
            inbox: Vec::new(),
            steps: Vec::new(),
            counts: BTreeMap::new(),
        };
        let listed = day.arrivals.running(&mut day.api, &mut day.agenda);
        let at = day.now;
        let listed = listed.into_iter().map(|change| Event::Changed { change, at });
        day.core.step(day.time(), listed);
        let all = WatchedKind::ALL.map(|kind| Event::Changed { change: Change::Listed(kind), at });
        day.step(all.into());
        day.steps.clear();
        day.now = Moment::START;
        day.arrivals.schedule(&mut day.agenda, day.now);
        day
    }

    fn time(&self) -> Now {
        answers::clocks(self.now)
    }

    /// Continues until the core has taken a step.
    fn advance(&mut self) {
        let due = self.agenda.next_at().into_iter().chain(self.wake).min();
        let due = due.expect("invariant: arrivals never end");
        if self.inbox.is_empty() {
            self.now = self.now.max(due);
        }
        self.gpu_time.pass(self.now, &self.api);
        while let Some(happening) = self.agenda.take_due(self.now) {
            self.happen(happening);
        }
        let is_due = self.wake.is_some_and(|wake| wake <= self.now);
        if is_due || !self.inbox.is_empty() {
            let events = std::mem::take(&mut self.inbox);
            self.step(events);
        }
    }

    fn happen(&mut self, happening: Happening) {
        let Self { api, agenda, scheduler, arrivals, now, counts, .. } = self;
        match happening {
            Happening::Arrival => arrivals.arrive(api, agenda, *now),
            Happening::Delivered(change) => {
                let at = *now;
                self.inbox.push(Event::Changed { change, at });
            }
            Happening::Written(write) => {
                let (event, allocated) = api.write(&write, agenda, *now);
                self.inbox.push(event);
                if let Some(pod) = allocated {
                    scheduler.enqueue(pod, agenda, *now);
                }
            }
            Happening::Scheduled(pod) => scheduler.schedule(&pod, api, agenda, *now, counts),
            Happening::Polled(pod) => {
                if scheduler.poll(&pod, api, agenda, *now) {
                    arrivals.bound(&pod, api, agenda, *now);
                }
            }
            Happening::Ended(pod) => {
                api.end(&pod, agenda, *now);
                if let Some(unit) = arrivals.ended(&pod) {
                    arrivals.create(unit, api, agenda, *now);
                }
            }
            Happening::Answered(event) => self.inbox.push(*event),
        }
    }

    fn step(&mut self, events: Vec<Event>) {
        let now = self.time();
        let mut output = StepOutput::default();
        let took = cpu_time(|| output = self.core.step(now, events));
        self.now += took;
        self.steps.push((self.now, took));
        let StepOutput { effects, wake, figures } = output;
        self.wake = wake;
        *self.counts.entry("groups released at the barrier").or_default() += figures.failed_groups;
        *self.counts.entry("conflicts").or_default() += figures.conflicts;
        for effect in effects {
            self.perform(effect);
        }
    }

    fn perform(&mut self, effect: Effect) {
        let at = self.now + WRITE;
        if let Effect::Notify(notice) = &effect {
            self.arrivals.refused(notice.pod.name.as_str(), notice.reason);
        }
        if let Some(event) = answers::success(&effect) {
            self.agenda.add(at, Happening::Answered(Box::new(event)));
            return;
        }
        match effect {
            Effect::Write(write) => {
                self.arrivals.decided(&write, self.now);
                self.agenda.add(at, Happening::Written(Box::new(write)));
            }
            Effect::Notify(_) | Effect::Nominate(_) | Effect::Compile { .. } => {
                unreachable!("answered above")
            }
            Effect::Evict(evictions) => self.evict(evictions, at),
            // No pod was converted, no namespace has a quota, no share is resized.
            Effect::WriteTemplate(_)
            | Effect::WriteQuotaStatus(_)
            | Effect::WriteResizeStatus(_)
            | Effect::WritePlaceholder(_) => {}
        }
    }

    fn evict(&mut self, evictions: Evictions, at: Moment) {
        let Evictions { purpose, victims } = evictions;
        let mut outcomes = Vec::new();
        for victim in victims {
            let name = victim.name.to_string();
            let outcome = match self.api.begin_to_end(&name, &mut self.agenda, self.now) {
                true => {
                    *self.counts.entry("pods evicted").or_default() += 1;
                    self.arrivals.evicted(&name);
                    self.agenda.add(self.now + GRACE, Happening::Ended(name));
                    EvictionOutcome::Evicted
                }
                false => EvictionOutcome::Gone,
            };
            outcomes.push((victim, outcome));
        }
        let event = Event::EvictionsEnded { purpose, outcomes };
        self.agenda.add(at, Happening::Answered(Box::new(event)));
    }

    fn report(&self, size: DaySize, memory_mib: [f64; 2]) -> DayReport {
        let quarter = Duration::from_secs(size.seconds) / 4;
        let of = |event, is_in: &dyn Fn(Moment) -> bool| {
            let times = self.steps.iter().filter(|(at, _)| is_in(*at)).map(|(_, took)| *took);
            EventCost::of(event, times.collect())
        };
        let steps = vec![
            of("step in the first quarter", &|at| at < Moment::START + quarter),
            of("step in the last quarter", &|at| at >= Moment::START + quarter * 3),
        ];
        let total: Duration = self.steps.iter().map(|(_, took)| *took).sum();
        let longest = self.steps.iter().map(|(_, took)| *took).max().unwrap_or_default();
        let decision = EventCost::of("decision", self.arrivals.decisions());
        let mut counts = self.counts.clone();
        counts.insert("steps", self.steps.len() as u64);
        self.arrivals.count(&mut counts);
        let [allocated, groups, pods] = self.gpu_time.percentages(size.nodes);
        DayReport {
            steps,
            longest_step_ms: ms(longest),
            busy_percent: 100.0 * total.as_secs_f64() / size.seconds as f64,
            decision_p50_ms: decision.p50_ms,
            decision_p99_ms: decision.p99_ms,
            counts,
            allocated_percent: allocated,
            waiting_groups_percent: groups,
            waiting_pods_percent: pods,
            memory_mib,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_day_places_evicts_and_loses_nothing() {
        let size = DaySize { nodes: 8, shares: 150, rate: 2, seconds: 100, seed: 3 };
        let report = run(size).expect("measured");
        let count = |what: &str| report.counts.get(what).copied().unwrap_or_default();
        assert!(count("groups run") > 3 && count("pods run") > 100, "{:?}", report.counts);
        assert!(count("pods evicted") > 0, "{:?}", report.counts);
        assert!(report.allocated_percent > 80.0, "{}", report.allocated_percent);
        assert!(report.waiting_groups_percent < 30.0, "{}", report.waiting_groups_percent);
    }
}
