//! Watches the GPUs: one thread calls the GPU library, all other parts read watch channels.
//!
//! ```text
//! GpuLibrary --> thread `gpus` --> base CDI spec --> HardwareState --> publisher, preparer
//!                     ^                         \--> HealthReport  --> kubelet
//!                     |
//!         verdicts, other allocators
//! ```

mod health;
mod stall;
mod verdicts;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, mpsc},
    time::{Duration, Instant},
};

use jiff::Timestamp;
use tessera_api::{
    Inventory, events,
    gpu::{Health, UnpublishedReason},
    names::{GpuUuid, PoolName},
};
use tessera_gpu::{
    GpuLibrary, HealthEvent, HealthEventKind, HealthImpact, HealthWatch, LibraryError,
    RecoveryAction,
};
use tessera_runtime::{error_chain::chain, supervisor::Supervisor};
use tokio::sync::watch;

use self::{
    health::health_of,
    stall::{Progress, StallWatch},
    verdicts::Verdicts,
};
use crate::{
    base_spec::{BaseDevice, BaseSpec},
    events::NodeEvent,
    kubelet::health::HealthReport,
    metrics::DriverMetrics,
    other_allocators::{self, OtherAllocators},
    state::journal::Journal,
};

/// The GPUs of the node, as far as they are known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HardwareState {
    /// Not known: the first look has not ended, or the library fails.
    Unknown {
        /// The reason.
        reason: String,
        /// True if the library was called. Before that, published slices stay as they are.
        is_queried: bool,
    },
    /// The inventory of GPUs.
    Known(Inventory),
}

impl Default for HardwareState {
    fn default() -> Self {
        Self::Unknown {
            reason: "the driver has just started and has not read it yet".to_owned(),
            is_queried: false,
        }
    }
}

/// Interval of inventories while the library answers: finds changes without events, such as MIG
/// mode.
const INTERVAL: Duration = Duration::from_secs(60);

/// Interval of inventories while a GPU is unhealthy or cannot be published: no event reports the
/// end of that. A lost GPU is not watched for events either.
const INTERVAL_IN_TROUBLE: Duration = Duration::from_secs(5);

/// Interval of inventories while the library fails: short enough for an operator who has just
/// installed the driver.
const RETRY_INTERVAL: Duration = Duration::from_secs(10);

/// Time for which the library may fail before the GPUs are withdrawn. An empty slice takes the node
/// out of scheduling, which one failed call does not justify.
const WITHDRAW_AFTER: Duration = Duration::from_secs(30);

/// Pause before the library is loaded again, which takes calls of other threads to end.
const PAUSE_BEFORE_RELOAD: Duration = Duration::from_millis(200);

/// Longest wait for an event. After it, the health sent to the kubelet is refreshed, and changes of
/// other allocators and of the GPUs that are bound to the kernel driver are seen.
const WAIT: Duration = Duration::from_secs(1);

/// Inputs of the watcher besides the GPU library.
#[derive(Debug)]
pub struct InventoryInputs {
    /// The prepared claims, which have GPUs in use.
    pub journal: watch::Receiver<Arc<Journal>>,
    /// The other allocators, whose GPUs are not published.
    pub others: watch::Receiver<other_allocators::KnownAllocators>,
}

/// Outputs of the watcher.
#[derive(Debug)]
pub struct InventoryOutputs {
    /// The inventory of GPUs.
    pub hardware: watch::Sender<Arc<HardwareState>>,
    /// The health of GPUs, for the kubelet.
    pub health: watch::Sender<Arc<HealthReport>>,
    /// Events on the Node.
    pub events: tokio::sync::mpsc::UnboundedSender<NodeEvent>,
}

/// The watcher of the GPUs, which runs in the thread `gpus`.
pub struct InventoryWatcher {
    library: Arc<dyn GpuLibrary>,
    pool: PoolName,
    base: Arc<BaseSpec>,
    inputs: InventoryInputs,
    metrics: Arc<DriverMetrics>,
    outputs: InventoryOutputs,
    verdicts: Verdicts,
    /// True if the last inventory had problems whose end no event reports.
    in_trouble: bool,
    /// The start of the present series of failed calls.
    failing_since: Option<Instant>,
    progress: Progress,
    /// The watch for events, with the watched GPUs. It outlives inventories: events that occur
    /// during one are delivered after it.
    watch: Option<(Vec<GpuUuid>, Box<dyn HealthWatch>)>,
    /// The state that was logged last: a state that lasts is logged once.
    logged: BTreeSet<String>,
}

impl std::fmt::Debug for InventoryWatcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("InventoryWatcher").field("pool", &self.pool).finish_non_exhaustive()
    }
}

/// Stops the thread of the watcher when dropped, as soon as the library returns.
#[derive(Debug)]
pub struct InventoryWatcherHandle {
    _stop: mpsc::Sender<()>,
}

impl InventoryWatcher {
    /// Returns a watcher of the GPUs of `pool`, which calls `library`.
    #[must_use]
    pub fn new(
        library: Arc<dyn GpuLibrary>,
        pool: PoolName,
        base: Arc<BaseSpec>,
        inputs: InventoryInputs,
        metrics: Arc<DriverMetrics>,
        outputs: InventoryOutputs,
    ) -> Self {
        Self {
            library,
            pool,
            base,
            inputs,
            metrics,
            outputs,
            verdicts: Verdicts::default(),
            in_trouble: false,
            failing_since: None,
            progress: Progress::default(),
            watch: None,
            logged: BTreeSet::new(),
        }
    }

    /// Starts the thread `gpus`, and the task that detects if it hangs. The thread is never joined:
    /// a call of the library can hang as long as the kernel driver does.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn spawn(mut self, tasks: &mut Supervisor) -> std::io::Result<InventoryWatcherHandle> {
        tasks.spawn("gpu-stall-watch", self.stall_watch().run(tasks.stop_token()));
        let (handle, stop) = mpsc::channel();
        tasks.spawn_thread("gpus", move || self.run(&stop))?;
        Ok(InventoryWatcherHandle { _stop: handle })
    }

    fn stall_watch(&self) -> StallWatch {
        StallWatch {
            progress: self.progress.clone(),
            hardware: self.outputs.hardware.clone(),
            metrics: Arc::clone(&self.metrics),
            events: self.outputs.events.clone(),
        }
    }

    fn run(&mut self, stop: &mpsc::Receiver<()>) {
        // The first call may hang as well.
        self.progress.record(Instant::now());
        loop {
            let before = Arc::clone(&self.inputs.journal.borrow());
            let pause = match self.library.inventory() {
                Ok(inventory) => {
                    let inventory = self.without_own_instances(inventory, &before);
                    // This may wait for the API server.
                    self.progress.suspend();
                    let Some(others) = self.other_allocators() else { return };
                    self.progress.record(Instant::now());
                    let gpus = self.found(self.sharable(inventory, &others));
                    self.wait_for_events(gpus, stop)
                }
                Err(error) => {
                    self.progress.record(Instant::now());
                    // The library may have been reloaded, and the watch be of the old one.
                    self.watch = None;
                    self.failed(&chain(&error), Instant::now());
                    RETRY_INTERVAL
                }
            };
            // A dropped handle disconnects the channel. No message is ever sent.
            if stop.recv_timeout(pause) == Err(mpsc::RecvTimeoutError::Disconnected) {
                return;
            }
        }
    }

    /// Returns the inventory without the MIG instances of claims. `before` is the journal before
    /// the inventory was read: a claim is in the journal from before its instances are created
    /// until after they are destroyed, so one of the two journals has the claim of each instance.
    fn without_own_instances(&self, inventory: Inventory, before: &Journal) -> Inventory {
        let after = Arc::clone(&self.inputs.journal.borrow());
        inventory.without_instances(|gpu, instance| {
            before.has_mig_instance(gpu, instance) || after.has_mig_instance(gpu, instance)
        })
    }

    /// Waits until the other allocators of this node's GPUs are known: a GPU that is published
    /// before could be allocated twice. Returns `None` if the driver stops.
    fn other_allocators(&mut self) -> Option<Arc<OtherAllocators>> {
        let known =
            futures::executor::block_on(self.inputs.others.wait_for(Option::is_some)).ok()?;
        known.clone()
    }

    /// Returns the inventory without GPUs that must not be shared, or that no container could use.
    fn sharable(&self, inventory: Inventory, others: &OtherAllocators) -> Inventory {
        let no_cuda = self
            .base
            .root_without_cuda()
            .map(|driver_root| UnpublishedReason::NoCudaLibrary { driver_root });
        inventory.setting_aside(|gpu| others.reason(gpu).or_else(|| no_cuda.clone()))
    }

    /// Waits until the next inventory is due, and returns the pause before it.
    fn wait_for_events(&mut self, gpus: Vec<GpuUuid>, stop: &mpsc::Receiver<()>) -> Duration {
        let due = Instant::now() + if self.in_trouble { INTERVAL_IN_TROUBLE } else { INTERVAL };
        while Instant::now() < due {
            match self.next_events(&gpus) {
                Ok(events) => {
                    let was_stalled = self.progress.record(Instant::now());
                    // After a stall the state still has the taints of the stall: `found` reports.
                    if !was_stalled {
                        self.refresh_health();
                    }
                    if self.remember(&events) || was_stalled {
                        return Duration::ZERO;
                    }
                }
                Err(error) => {
                    self.watch = None;
                    self.progress.record(Instant::now());
                    self.log_error(format!("cannot watch GPU events: {}", chain(&error)));
                    return RETRY_INTERVAL;
                }
            }
            if self.library.is_outdated() {
                // It is loaded again once nothing uses it.
                self.watch = None;
                return PAUSE_BEFORE_RELOAD;
            }
            let others_changed = self.inputs.others.has_changed().unwrap_or(false);
            if others_changed || stop.try_recv() == Err(mpsc::TryRecvError::Disconnected) {
                return Duration::ZERO;
            }
        }
        Duration::ZERO
    }

    /// Waits for events of these GPUs. A watch of the same GPUs is kept: a new one would miss
    /// events that occur in between.
    fn next_events(&mut self, gpus: &[GpuUuid]) -> Result<Vec<HealthEvent>, LibraryError> {
        if let Some((watched, watch)) = &mut self.watch
            && watched == gpus
        {
            return watch.wait(WAIT);
        }
        let mut watch = self.library.watch(gpus)?;
        let events = match self.watch.take() {
            // Events that the old watch has collected, also of GPUs that are gone.
            Some((_, mut old)) => old.wait(Duration::ZERO).unwrap_or_default(),
            None => watch.wait(WAIT)?,
        };
        self.watch = Some((gpus.to_vec(), watch));
        Ok(events)
    }

    /// Records the verdicts of events. Returns true if the inventory must be read again, which
    /// events that containers can cause at will do not require.
    fn remember(&mut self, events: &[HealthEvent]) -> bool {
        let mut is_due = false;
        for event in events {
            tracing::warn!(gpu = %event.gpu, event = ?event.kind, "GPU event");
            is_due |= match event.kind {
                // The next inventory shows whether a GPU is there, and its recovery action.
                HealthEventKind::Lost | HealthEventKind::Back => true,
                kind if kind.verdict() == Some(HealthImpact::RecoveryAction) => true,
                _ => self.verdicts.remember(event, Instant::now()),
            };
        }
        is_due
    }

    /// Sends the result of an inventory. Returns the GPUs to watch.
    fn found(&mut self, mut inventory: Inventory) -> Vec<GpuUuid> {
        self.failing_since = None;
        self.verdicts.record_absent(&inventory);
        for gpu in &mut inventory.gpus {
            let action = self.recovery_action(&gpu.uuid);
            gpu.health = self.verdicts.health(&gpu.uuid, action, Instant::now());
        }
        self.write_base_spec(&inventory);
        self.log(&inventory);
        let unhealthy = inventory.gpus.iter().filter(|gpu| !gpu.is_healthy()).count();
        self.in_trouble =
            unhealthy > 0 || inventory.unpublished.iter().any(|gpu| gpu.reason.is_trouble());
        self.metrics.set_nvml_up(true);
        self.metrics.set_gpu_counts(
            inventory.gpus.len(),
            unhealthy,
            &inventory.unpublished_by_reason(),
        );
        self.metrics.set_gpus(&self.pool, &inventory.gpus);
        let gpus = inventory.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
        self.send(HardwareState::Known(inventory));
        gpus
    }

    /// Returns the recovery action of a GPU, or `None` if the driver does not report it.
    fn recovery_action(&self, gpu: &GpuUuid) -> Option<RecoveryAction> {
        self.library.recovery_action(gpu).unwrap_or_else(|error| {
            tracing::warn!(%gpu, error = %chain(&error), "cannot read recovery action of GPU");
            None
        })
    }

    /// Handles a failed inventory. GPUs that were known stay published for a while.
    fn failed(&mut self, reason: &str, now: Instant) {
        let since = *self.failing_since.get_or_insert(now);
        let is_known = matches!(&**self.outputs.hardware.borrow(), HardwareState::Known(_));
        if is_known && now.saturating_duration_since(since) < WITHDRAW_AFTER {
            self.metrics.set_nvml_up(false);
            tracing::warn!(error = reason, "cannot read the inventory of GPUs; trying again");
        } else {
            self.unknown(reason);
        }
    }

    /// Withdraws the GPUs.
    fn unknown(&mut self, reason: &str) {
        self.logged.retain(|logged| logged == reason);
        self.log_error(reason.to_owned());
        self.metrics.set_nvml_up(false);
        self.metrics.set_gpu_counts(0, 0, &BTreeMap::new());
        self.metrics.set_gpus(&self.pool, &[]);
        self.send(HardwareState::Unknown { reason: reason.to_owned(), is_queried: true });
    }

    /// Writes the base spec, before the inventory is sent: claims may refer to it immediately.
    fn write_base_spec(&self, inventory: &Inventory) {
        let base_device =
            |gpu: &tessera_api::Gpu| BaseDevice { gpu: gpu.uuid.clone(), minor: Some(gpu.minor) };
        let gpus: Vec<_> = inventory.gpus.iter().map(base_device).collect();
        let in_use = self.inputs.journal.borrow().gpus_in_use();
        if let Err(error) = self.base.update(&gpus, &in_use) {
            tracing::error!(error = %chain(&error), "cannot write base CDI spec; claims cannot be prepared");
        }
    }

    /// Logs changes of the GPUs, and writes events on problems.
    fn log(&mut self, inventory: &Inventory) {
        let mut lines = BTreeSet::new();
        if inventory.gpus.is_empty() {
            lines.insert(
                "no GPU of this node can be shared; publishing an empty ResourceSlice".to_owned(),
            );
        }
        let mut events: Vec<(String, NodeEvent)> = Vec::new();
        for gpu in &inventory.gpus {
            let mut line = format!("GPU {} is published: {}", gpu.uuid, gpu.product_name);
            if let Health::Unhealthy { code, message } = &gpu.health {
                line.push_str(&format!(", unhealthy ({code}): {message}"));
                let note = format!(
                    "GPU {} gets no new claims, it is unhealthy ({code}): {message}",
                    gpu.uuid
                );
                events.push((line.clone(), NodeEvent { reason: events::GPU_UNHEALTHY, note }));
            }
            lines.insert(line);
        }
        let mut by_reason: BTreeMap<&UnpublishedReason, Vec<String>> = BTreeMap::new();
        for gpu in &inventory.unpublished {
            let name = gpu
                .uuid
                .as_ref()
                .map_or_else(|| format!("of index {:?}", gpu.index), ToString::to_string);
            lines.insert(format!("GPU {name} is not published: {}", gpu.reason));
            by_reason.entry(&gpu.reason).or_default().push(name);
        }
        for (reason, names) in by_reason.into_iter().filter(|(reason, _)| reason.is_trouble()) {
            let note = format!("not published: {reason} (GPU {})", names.join(", "));
            lines.insert(note.clone());
            events.push((note.clone(), NodeEvent { reason: events::GPU_NOT_PUBLISHED, note }));
        }
        for line in lines.difference(&self.logged) {
            tracing::info!(change = line, "inventory of GPUs changed");
        }
        for (_, event) in events.into_iter().filter(|(line, _)| !self.logged.contains(line)) {
            // The receiver is gone when the driver stops.
            let _ = self.outputs.events.send(event);
        }
        self.logged = lines;
    }

    /// Logs an error, unless it is logged already.
    fn log_error(&mut self, error: String) {
        if self.logged.insert(error.clone()) {
            tracing::error!(error, "GPU library failed");
        }
    }

    fn send(&self, state: HardwareState) {
        self.report_health(&state);
        self.outputs.hardware.send_if_modified(|current| {
            let is_changed = **current != state;
            if is_changed {
                *current = Arc::new(state);
            }
            is_changed
        });
    }

    /// Sends the known health with a new time: the library has answered, and nothing changed.
    fn refresh_health(&self) {
        let state = Arc::clone(&self.outputs.hardware.borrow());
        self.report_health(&state);
    }

    fn report_health(&self, state: &HardwareState) {
        let devices = health_of(state, &self.pool, &self.inputs.journal.borrow().devices_in_use());
        let report = HealthReport { checked_at: Timestamp::now().as_second(), devices };
        // A later time alone wakes no receiver: streams repeat the report with it.
        self.outputs.health.send_if_modified(|current| {
            let is_changed = current.devices != report.devices;
            *current = Arc::new(report);
            is_changed
        });
    }
}

#[cfg(test)]
mod tests;
