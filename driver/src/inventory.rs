//! Watches the GPUs: one thread asks the library, everybody else reads a watch channel.
//!
//! ```text
//! GpuLibrary::inventory, watch, recovery_action -> thread "gpus" -> base CDI spec -> HardwareState -> publisher, preparer
//!                                                         |                  \-> HealthReport  -> kubelet
//!                                         verdicts, other allocators
//! ```

mod verdicts;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use jiff::Timestamp;
use tessera_api::{
    Inventory,
    gpu::{Health, UnpublishedReason},
    labels::event,
    names::{GpuUuid, PoolName},
};
use tessera_gpu::{
    GpuLibrary, HealthEvent, HealthEventKind, HealthWatch, LibraryError, RecoveryAction, Verdict,
};
use tessera_runtime::error_chain::chain;
use tokio::sync::watch;

use self::verdicts::Verdicts;
use crate::{
    base_spec::{BaseDevice, BaseSpec},
    events::NodeNews,
    kubelet::health::{DeviceHealth, HealthReport},
    metrics::Metrics,
    other_allocators::{self, OtherAllocators},
    state::journal::Journal,
};

/// What is known of the node's GPUs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HardwareState {
    /// Nobody can tell: the first look has not ended, or the library does not answer.
    Unknown {
        /// Why.
        reason: String,
        /// Whether the library was asked: before that, nothing is published and nothing is
        /// withdrawn.
        asked: bool,
    },
    /// The GPUs.
    Known(Inventory),
}

impl Default for HardwareState {
    fn default() -> Self {
        Self::Unknown {
            reason: "the driver has just started and is looking for them".to_owned(),
            asked: false,
        }
    }
}

/// Between looks at the hardware while the library answers: finds what no event tells, such as MIG
/// mode.
const LOOK_EVERY: Duration = Duration::from_secs(60);

/// The same while something is held against a GPU, or keeps it from being published: no event tells
/// when that is over. A lost GPU is not watched either.
const LOOK_EVERY_IN_TROUBLE: Duration = Duration::from_secs(5);

/// Between attempts while it does not: soon enough for an administrator who has just installed the
/// driver.
const RETRY_EVERY: Duration = Duration::from_secs(10);

/// The longest wait for an event, after which the health that the kubelet is told is as fresh as
/// that, and it is seen what other allocators do.
const WAIT: Duration = Duration::from_secs(1);

/// What the watcher has to know besides the hardware.
#[derive(Debug)]
pub struct Inlets {
    /// Which GPUs are in use.
    pub journal: watch::Receiver<Arc<Journal>>,
    /// Who else hands out GPUs; those are not published.
    pub others: watch::Receiver<other_allocators::Known>,
}

/// Where the watcher's findings go.
#[derive(Debug)]
pub struct Outlets {
    /// The GPUs.
    pub hardware: watch::Sender<Arc<HardwareState>>,
    /// Their health.
    pub health: watch::Sender<Arc<HealthReport>>,
    /// What an operator should know.
    pub news: tokio::sync::mpsc::UnboundedSender<NodeNews>,
}

/// Watches the GPUs.
pub struct Watcher {
    library: Arc<dyn GpuLibrary>,
    pool: PoolName,
    base: Arc<BaseSpec>,
    inlets: Inlets,
    metrics: Arc<Metrics>,
    outlets: Outlets,
    verdicts: Verdicts,
    /// Whether the last look found anything that may pass without an event.
    in_trouble: bool,
    /// The watch for events, with the GPUs that it is on. It outlives looks: what happens during
    /// one is delivered after it.
    watch: Option<(Vec<GpuUuid>, Box<dyn HealthWatch>)>,
    /// What was last logged, so that a state that lasts is said once.
    said: BTreeSet<String>,
}

impl std::fmt::Debug for Watcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watcher").field("pool", &self.pool).finish_non_exhaustive()
    }
}

/// Stops the watcher's thread when dropped, at its next chance.
#[derive(Debug)]
pub struct WatcherHandle {
    _stop: mpsc::Sender<()>,
}

impl Watcher {
    /// Watches the GPUs of `pool` through `library`.
    #[must_use]
    pub fn new(
        library: Arc<dyn GpuLibrary>,
        pool: PoolName,
        base: Arc<BaseSpec>,
        inlets: Inlets,
        metrics: Arc<Metrics>,
        outlets: Outlets,
    ) -> Self {
        let (verdicts, said, in_trouble) = (Verdicts::default(), BTreeSet::new(), false);
        Self {
            library,
            pool,
            base,
            inlets,
            metrics,
            outlets,
            verdicts,
            in_trouble,
            watch: None,
            said,
        }
    }

    /// Starts the thread. It is never joined: a call into the library can hang as long as the
    /// kernel driver does.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn spawn(mut self) -> std::io::Result<WatcherHandle> {
        let (handle, stop) = mpsc::channel();
        thread::Builder::new().name("gpus".to_owned()).spawn(move || self.run(&stop))?;
        Ok(WatcherHandle { _stop: handle })
    }

    fn run(&mut self, stop: &mpsc::Receiver<()>) {
        loop {
            let pause = match self.library.inventory() {
                Ok(inventory) => {
                    let Some(others) = self.other_allocators() else { return };
                    let gpus = self.found(self.sharable(inventory, &others));
                    self.wait_for_events(gpus, stop)
                }
                Err(error) => {
                    // It may be a watch of a library that is to be loaded anew.
                    self.watch = None;
                    self.unknown(&chain(&error));
                    RETRY_EVERY
                }
            };
            // Disconnected is the order to stop; a message is never sent.
            if stop.recv_timeout(pause) == Err(mpsc::RecvTimeoutError::Disconnected) {
                return;
            }
        }
    }

    /// The other allocators of this node's GPUs, once it is known whether there are any: before,
    /// publishing a GPU could give it away twice. `None` when nobody will tell any more.
    fn other_allocators(&mut self) -> Option<Arc<OtherAllocators>> {
        let known =
            futures::executor::block_on(self.inlets.others.wait_for(Option::is_some)).ok()?;
        known.clone()
    }

    /// The inventory without GPUs that must not be shared, or that no container could use.
    fn sharable(&self, inventory: Inventory, others: &OtherAllocators) -> Inventory {
        let no_cuda = self
            .base
            .lacks_cuda()
            .map(|driver_root| UnpublishedReason::NoCudaLibrary { driver_root });
        inventory.setting_aside(|gpu| others.reason(gpu).or_else(|| no_cuda.clone()))
    }

    /// Waits until another look is due; returns how long to pause before it.
    fn wait_for_events(&mut self, gpus: Vec<GpuUuid>, stop: &mpsc::Receiver<()>) -> Duration {
        let due = Instant::now() + if self.in_trouble { LOOK_EVERY_IN_TROUBLE } else { LOOK_EVERY };
        while Instant::now() < due {
            match self.next_events(&gpus) {
                Ok(events) => {
                    self.still_healthy();
                    if self.take(&events) {
                        return Duration::ZERO;
                    }
                }
                Err(error) => {
                    self.watch = None;
                    self.say(format!("GPU events cannot be watched: {}", chain(&error)));
                    return RETRY_EVERY;
                }
            }
            let news_of_others = self.inlets.others.has_changed().unwrap_or(false);
            if news_of_others || stop.try_recv() == Err(mpsc::TryRecvError::Disconnected) {
                return Duration::ZERO;
            }
        }
        Duration::ZERO
    }

    /// Waits for events of these GPUs. A watch on just them goes on: one that is made anew misses
    /// what happened in between.
    fn next_events(&mut self, gpus: &[GpuUuid]) -> Result<Vec<HealthEvent>, LibraryError> {
        if let Some((watched, watch)) = &mut self.watch
            && watched == gpus
        {
            return watch.wait(WAIT);
        }
        let mut watch = self.library.watch(gpus)?;
        let events = match self.watch.take() {
            // What the old one has collected, of GPUs that are still there and of those that are
            // not.
            Some((_, mut old)) => old.wait(Duration::ZERO).unwrap_or_default(),
            None => watch.wait(WAIT)?,
        };
        self.watch = Some((gpus.to_vec(), watch));
        Ok(events)
    }

    /// Remembers what events say against GPUs. Returns whether the GPUs are to be looked at again:
    /// not for what tenants can bring about as often as they like.
    fn take(&mut self, events: &[HealthEvent]) -> bool {
        let mut look = false;
        for event in events {
            tracing::warn!(gpu = %event.gpu, event = ?event.kind, "a GPU reports");
            look |= match event.kind {
                // That a GPU is lost, or back, the next look sees by itself, as it does what the
                // driver asks for.
                HealthEventKind::Lost | HealthEventKind::Back => true,
                kind if kind.verdict() == Some(Verdict::RecoveryAction) => true,
                _ => self.verdicts.remember(event, Instant::now()),
            };
        }
        look
    }

    /// Tells everybody what a look found. Returns the GPUs to watch.
    fn found(&mut self, mut inventory: Inventory) -> Vec<GpuUuid> {
        self.verdicts.see(&inventory);
        for gpu in &mut inventory.gpus {
            let action = self.recovery_action(&gpu.uuid);
            gpu.health = self.verdicts.health(&gpu.uuid, action, Instant::now());
        }
        self.describe(&inventory);
        self.log(&inventory);
        let unhealthy = inventory.gpus.iter().filter(|gpu| !gpu.is_healthy()).count();
        self.in_trouble =
            unhealthy > 0 || inventory.unpublished.iter().any(|gpu| gpu.reason.is_trouble());
        self.metrics.hardware(
            true,
            inventory.gpus.len(),
            unhealthy,
            &inventory.unpublished_by_reason(),
        );
        let gpus = inventory.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
        self.send(HardwareState::Known(inventory));
        gpus
    }

    /// One that cannot be asked is as one that does not know.
    fn recovery_action(&self, gpu: &GpuUuid) -> Option<RecoveryAction> {
        self.library.recovery_action(gpu).unwrap_or_else(|error| {
            tracing::warn!(%gpu, error = %chain(&error), "the recovery action is not known");
            None
        })
    }

    /// Tells everybody that nothing is known.
    fn unknown(&mut self, reason: &str) {
        self.said.retain(|said| said == reason);
        self.say(reason.to_owned());
        self.metrics.hardware(false, 0, 0, &BTreeMap::new());
        self.send(HardwareState::Unknown { reason: reason.to_owned(), asked: true });
    }

    /// The base spec first: who reads the inventory may refer to it at once.
    fn describe(&self, inventory: &Inventory) {
        let base_device =
            |gpu: &tessera_api::Gpu| BaseDevice { gpu: gpu.uuid.clone(), minor: Some(gpu.minor) };
        let gpus: Vec<_> = inventory.gpus.iter().map(base_device).collect();
        let in_use = self.inlets.journal.borrow().gpus_in_use();
        if let Err(error) = self.base.describe(&gpus, &in_use) {
            tracing::error!(error = %chain(&error), "the base CDI spec is not written; claims cannot be prepared");
        }
    }

    /// Says what is new about the GPUs, once; trouble also to who operates the node.
    fn log(&mut self, inventory: &Inventory) {
        let mut now = BTreeSet::new();
        if inventory.gpus.is_empty() {
            now.insert(
                "the node has no GPU that can be shared; an empty ResourceSlice is published"
                    .to_owned(),
            );
        }
        let mut events: Vec<(String, NodeNews)> = Vec::new();
        for gpu in &inventory.gpus {
            let mut line = format!("GPU {} is published: {}", gpu.uuid, gpu.product_name);
            if let Health::Unhealthy { code, message } = &gpu.health {
                line.push_str(&format!(", unhealthy ({code}): {message}"));
                let note = format!(
                    "GPU {} gets no new claims, it is unhealthy ({code}): {message}",
                    gpu.uuid
                );
                events.push((line.clone(), NodeNews { reason: event::UNHEALTHY, note }));
            }
            now.insert(line);
        }
        let mut by_reason: BTreeMap<&UnpublishedReason, Vec<String>> = BTreeMap::new();
        for gpu in &inventory.unpublished {
            let name = gpu
                .uuid
                .as_ref()
                .map_or_else(|| format!("of index {:?}", gpu.index), ToString::to_string);
            now.insert(format!("GPU {name} is not published: {}", gpu.reason));
            by_reason.entry(&gpu.reason).or_default().push(name);
        }
        for (reason, names) in by_reason.into_iter().filter(|(reason, _)| reason.is_trouble()) {
            let note = format!("not published: {reason} (GPU {})", names.join(", "));
            now.insert(note.clone());
            events.push((note.clone(), NodeNews { reason: event::NOT_PUBLISHED, note }));
        }
        for news in now.difference(&self.said) {
            tracing::info!("{news}");
        }
        for (_, event) in events.into_iter().filter(|(line, _)| !self.said.contains(line)) {
            // Nobody listens any more when the driver stops.
            let _ = self.outlets.news.send(event);
        }
        self.said = now;
    }

    fn say(&mut self, what: String) {
        if self.said.insert(what.clone()) {
            tracing::error!("{what}");
        }
    }

    fn send(&self, state: HardwareState) {
        self.report_health(&state);
        self.outlets.hardware.send_if_modified(|current| {
            let news = **current != state;
            if news {
                *current = Arc::new(state);
            }
            news
        });
    }

    /// The hardware was asked and nothing is new: its health is as fresh as that.
    fn still_healthy(&self) {
        let state = Arc::clone(&self.outlets.hardware.borrow());
        self.report_health(&state);
    }

    fn report_health(&self, state: &HardwareState) {
        let devices = health_of(state, &self.pool, &self.inlets.journal.borrow().gpus_in_use());
        let report = HealthReport { checked_at: Timestamp::now().as_second(), devices };
        // A later time alone is no news: streams repeat what they have, with it.
        self.outlets.health.send_if_modified(|current| {
            let news = current.devices != report.devices;
            *current = Arc::new(report);
            news
        });
    }
}

/// The health of each GPU that is published, or that a claim has.
fn health_of(
    state: &HardwareState,
    pool: &PoolName,
    in_use: &BTreeSet<GpuUuid>,
) -> Vec<DeviceHealth> {
    let device = |gpu: &GpuUuid, healthy, message: String| DeviceHealth {
        pool: pool.to_string(),
        device: gpu.device_name().to_string(),
        healthy,
        message,
    };
    let inventory = match state {
        HardwareState::Unknown { reason, .. } => {
            return in_use.iter().map(|gpu| device(gpu, None, reason.clone())).collect();
        }
        HardwareState::Known(inventory) => inventory,
    };
    let mut devices: Vec<_> = inventory
        .gpus
        .iter()
        .map(|gpu| match &gpu.health {
            Health::Healthy => device(&gpu.uuid, Some(true), String::new()),
            Health::Unhealthy { message, .. } => device(&gpu.uuid, Some(false), message.clone()),
        })
        .collect();
    for gpu in in_use.iter().filter(|gpu| inventory.gpu(gpu).is_none()) {
        let known =
            inventory.unpublished.iter().find(|unpublished| unpublished.uuid.as_ref() == Some(gpu));
        let (healthy, message) = match known.map(|known| &known.reason) {
            None => (Some(false), "the GPU is gone".to_owned()),
            Some(reason @ (UnpublishedReason::Lost | UnpublishedReason::Unreadable { .. })) => {
                (Some(false), reason.to_string())
            }
            // Taken out of sharing by somebody; that says nothing of its health.
            Some(reason) => (None, reason.to_string()),
        };
        devices.push(device(gpu, healthy, message));
    }
    devices
}

#[cfg(test)]
mod tests;
