//! The shell around the [core](crate::core): receives events, reads the clocks, and passes effects
//! to the executor and figures to the metrics.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use kube::Client;
use tessera_allocator::PlanSettings;
use tessera_api::names::ManagedDrivers;
use tessera_dialect::Converter;
use tessera_runtime::supervisor::Supervisor;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::commit::REQUEST_TIMEOUT;
use crate::core::clock::{Moment, Now};
use crate::core::event::Event;
use crate::core::{Core, NominationPolicy, PreemptionPolicy, RecoverySettings};
use crate::executor::Executor;
use crate::leadership::Tenure;
use crate::metrics::Metrics;
use crate::node_groups::NodeGroups;
use crate::watch::Arrival;

/// The time between the cause of a step and the step. Pods, claims and statuses of one change
/// arrive within moments, so events are collected meanwhile.
const DEBOUNCE: Duration = Duration::from_millis(2);

/// The most changes that are absorbed by one step, so that a busy cluster does not keep the core
/// from deciding.
const CHANGES_PER_STEP: usize = 4096;

/// The connections to the API server.
#[derive(Clone)]
pub struct Clients {
    /// The one for everything but evictions.
    pub client: Client,
    /// One that does not repeat refused requests.
    pub evictions: Client,
}

/// The core and its connections to the outside.
pub struct Shell {
    core: Core,
    executor: Executor,
    /// Outcomes of effects.
    reports: mpsc::UnboundedReceiver<Event>,
    metrics: Metrics,
    /// The beginning of the core's monotonic clock.
    started: Instant,
    clock: Box<dyn Fn() -> Timestamp + Send + Sync>,
}

impl Shell {
    /// Returns a shell around a core that knows nothing yet. `identity` is the reporting instance
    /// of Kubernetes events. Effects are performed by `tasks`, on the runtime in which the shell is
    /// made, wherever it [runs](Self::run).
    ///
    /// # Panics
    /// Outside of a tokio runtime.
    pub fn new(
        clients: Clients,
        identity: &str,
        settings: PlanSettings,
        metrics: Metrics,
        tasks: &mut Supervisor,
    ) -> Self {
        let (executor, reports) = Executor::new(clients, identity, tasks);
        Self {
            core: Core::new(settings),
            executor,
            reports,
            metrics,
            started: Instant::now(),
            clock: Box::new(Timestamp::now),
        }
    }

    /// Returns the shell with this wall clock.
    #[must_use]
    pub fn with_clock(self, clock: impl Fn() -> Timestamp + Send + Sync + 'static) -> Self {
        Self { clock: Box::new(clock), ..self }
    }

    /// Returns the shell that allocates the devices of these drivers; without them only Tessera's.
    #[must_use]
    pub fn managing(self, drivers: ManagedDrivers) -> Self {
        Self { core: self.core.managing(drivers), ..self }
    }

    /// Returns the shell with a policy of nominations; without one it never nominates.
    #[must_use]
    pub fn nominating(self, policy: NominationPolicy) -> Self {
        Self { core: self.core.nominating(policy), ..self }
    }

    /// Returns the shell with a policy of preemptions; without one it never evicts pods.
    #[must_use]
    pub fn preempting(self, policy: PreemptionPolicy) -> Self {
        Self { core: self.core.preempting(policy), ..self }
    }

    /// Returns the shell with settings of recovery; without them it never evicts pods for it.
    #[must_use]
    pub fn recovering(self, settings: RecoverySettings) -> Self {
        Self { core: self.core.recovering(settings), ..self }
    }

    /// Returns the shell with groups of nodes, for which it asks a cluster autoscaler; without them
    /// it never does.
    #[must_use]
    pub fn asking_for_nodes(self, settings: Option<NodeGroups>) -> Self {
        Self { core: self.core.asking_for_nodes(settings), ..self }
    }

    /// Returns the shell with the converter of the admission webhook, whose claim templates it
    /// creates.
    #[must_use]
    pub fn converting(self, converter: Option<Arc<Converter>>) -> Self {
        Self { core: self.core.converting(converter), ..self }
    }

    /// Returns the shell with writes restricted to `tenure`.
    #[must_use]
    pub fn during(self, tenure: Tenure) -> Self {
        Self { executor: self.executor.during(tenure), ..self }
    }

    /// Runs the core until `stop`, then waits for the open writes. Returns true if all of them
    /// have ended.
    pub async fn run(
        mut self,
        mut changes: mpsc::Receiver<Arrival>,
        stop: CancellationToken,
    ) -> bool {
        let mut wake = None;
        loop {
            let mut events = Vec::new();
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                Some(report) = self.reports.recv() => events.push(report),
                // Without watches nothing changes any more; their supervisor ends the process.
                Some(change) = changes.recv() => events.push(self.event(change)),
                () = tokio::time::sleep_until(wake.unwrap_or_else(Instant::now)), if wake.is_some() => {}
            }
            self.collect(&mut events, &mut changes).await;
            wake = self.step(events);
        }
        self.finish().await
    }

    /// Collects the events that have arrived, after a moment.
    async fn collect(&mut self, events: &mut Vec<Event>, changes: &mut mpsc::Receiver<Arrival>) {
        if self.core.is_listed() {
            tokio::time::sleep(DEBOUNCE).await;
        }
        while events.len() < CHANGES_PER_STEP
            && let Ok(change) = changes.try_recv()
        {
            events.push(self.event(change));
        }
        while let Ok(report) = self.reports.try_recv() {
            events.push(report);
        }
    }

    /// Has the core take a step, and its effects performed. Returns the time of the next step.
    fn step(&mut self, events: Vec<Event>) -> Option<Instant> {
        let started = Instant::now();
        let now = Now { monotonic: self.moment(started), wall: (self.clock)().as_second() };
        let output = self.core.step(now, events);
        self.metrics.record(&output.figures, started.elapsed());
        for effect in output.effects {
            self.executor.perform(effect);
        }
        output.wake.and_then(|wake| self.started.checked_add(wake.since_start()))
    }

    fn event(&self, Arrival { change, at }: Arrival) -> Event {
        Event::Changed { change, at: self.moment(at) }
    }

    fn moment(&self, at: Instant) -> Moment {
        Moment::after_start(at.saturating_duration_since(self.started))
    }

    /// Waits for the open writes, so that the Lease is not released before they have ended.
    /// Returns true if they have: a write without an answer is left to the next leader.
    async fn finish(mut self) -> bool {
        let deadline = Instant::now() + REQUEST_TIMEOUT;
        self.core.stop();
        while self.core.has_open_writes() {
            match tokio::time::timeout_at(deadline, self.reports.recv()).await {
                Ok(Some(report)) => {
                    self.step(vec![report]);
                }
                Ok(None) | Err(_) => return false,
            }
        }
        true
    }
}
