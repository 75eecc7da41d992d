//! Publishes this node's ResourceSlices and reconciles them after changes of the hardware, or of
//! the slices by others.
//!
//! ```text
//! HardwareState --api::slice--> desired --\
//!                                          plan -> create, patch, delete -> API
//! watch of the slices ---> observed ------/                                  |
//!            ^---------------------------------------------------------------/
//! ```
//!
//! The kubelet deletes all slices of its node when it starts, and operators may delete slices, too.
//! The watch sees both, and the slices are restored immediately, with growing pauses if the changes
//! continue.

pub mod plan;
mod stock_drain;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use futures::{Stream, StreamExt, TryStreamExt};
use k8s_openapi::api::{
    core::v1::Node,
    resource::v1::{DeviceTaintRule, ResourceSlice},
};
use kube::{
    Api, Client, Resource,
    api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions},
    runtime::watcher::{self, DefaultBackoff, watcher},
};
use tessera_api::{
    names::{
        DRIVER_NAME, DeviceName, FENCE_RULE, GpuUuid, MANAGED_TAINT_KEY, NO_SCHEDULE, NodeName,
        ORPHANED_TAINT_KEY,
    },
    slice::{is_fence_of, same_content},
};
use tessera_runtime::cluster::with_backoff;
use tessera_runtime::error_chain::chain;
use tokio::{sync::watch, time::Instant};
use tokio_util::sync::CancellationToken;

use self::{
    plan::{SliceChange, plan},
    stock_drain::StockDrain,
};
use crate::{
    audit::{AuditFindings, OrphanedGpus},
    inventory::HardwareState,
    metrics::{DriverMetrics, SliceWrite},
    mode::DriverMode,
    slices::SliceSource,
    state::journal::Journal,
};

/// Errors of publishing slices.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// The Node, which owns the slices, could not be read.
    #[error("cannot get Node {node}, the owner of the ResourceSlices")]
    Node {
        /// The name of the Node.
        node: NodeName,
        /// The cause.
        source: kube::Error,
    },
    /// A slice could not be written.
    #[error("cannot {verb} ResourceSlice {name}")]
    Write {
        /// The name of the slice.
        name: String,
        /// The verb of the request.
        verb: &'static str,
        /// The cause.
        source: kube::Error,
    },
    /// The DeviceTaintRule that keeps kube-scheduler from the GPUs could not be read.
    #[error(
        "cannot get DeviceTaintRule {FENCE_RULE}, without which kube-scheduler would allocate the GPUs"
    )]
    Fence(#[source] kube::Error),
    /// The DeviceTaintRule does not exist, or is no fence.
    #[error(
        "DeviceTaintRule {FENCE_RULE} does not exist, or does not give all devices of {DRIVER_NAME} the taint {MANAGED_TAINT_KEY}:{NO_SCHEDULE}; without it kube-scheduler would allocate the GPUs, so they are published once tessera-controller has restored it (Kubernetes 1.37 or newer)"
    )]
    NotFenced,
    /// The API server dropped fields of a slice.
    #[error(
        "the API server dropped fields of ResourceSlice {name}: enable its feature gates DRADeviceTaints and DRAConsumableCapacity{withdrawn}",
        withdrawn = if *.withdrawn { "; the slice was deleted, since without its taints kube-scheduler would allocate the GPUs" } else { "" }
    )]
    NotKept {
        /// The name of the slice.
        name: String,
        /// True if the slice was deleted again, because its taints were dropped.
        withdrawn: bool,
    },
}

/// First and longest pause after an error, and between repairs of slices that others keep changing.
/// The pause doubles each time.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// The publisher of one node's slices.
pub struct Publisher {
    slices: Api<ResourceSlice>,
    nodes: Api<Node>,
    rules: Api<DeviceTaintRule>,
    source: SliceSource,
    hardware: watch::Receiver<Arc<HardwareState>>,
    /// The journal, if the slices depend on the prepared claims.
    journal: Option<watch::Receiver<Arc<Journal>>>,
    /// GPUs of orphaned claims.
    orphaned: watch::Receiver<AuditFindings>,
    metrics: Arc<DriverMetrics>,
    /// This node's slices by name: from the watch, and from the responses to own writes.
    observed: BTreeMap<String, ResourceSlice>,
    /// The highest generation that was seen or written. It never decreases, even if all slices are
    /// deleted.
    generation: i64,
    /// In mode managed, GPUs that kube-scheduler may still be allocating. `None` in mode stock.
    drain: Option<StockDrain>,
}

impl std::fmt::Debug for Publisher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Publisher").field("source", &self.source).finish_non_exhaustive()
    }
}

impl Publisher {
    /// Returns a publisher of `hardware` as the slices of the node of `source`.
    #[must_use]
    pub fn new(
        client: Client,
        source: SliceSource,
        hardware: watch::Receiver<Arc<HardwareState>>,
        journal: watch::Receiver<Arc<Journal>>,
        orphaned: watch::Receiver<AuditFindings>,
        metrics: Arc<DriverMetrics>,
    ) -> Self {
        let (slices, nodes) = (Api::all(client.clone()), Api::all(client.clone()));
        let rules = Api::all(client);
        let journal = source.depends_on_usage().then_some(journal);
        let observed = BTreeMap::new();
        Self {
            slices,
            nodes,
            rules,
            source,
            hardware,
            journal,
            orphaned,
            metrics,
            observed,
            generation: 0,
            drain: None,
        }
    }

    /// Sets the time for which a GPU that was published for kube-scheduler is tainted for both
    /// allocators, before the controller may allocate it.
    #[must_use]
    pub fn draining(mut self, stock: Duration) -> Self {
        self.drain = (self.source.mode() == DriverMode::Managed).then(|| StockDrain::new(stock));
        self
    }

    /// Publishes until `stop`. The slices stay: a restart of the driver changes nothing.
    pub async fn run(mut self, stop: CancellationToken) {
        let fields = format!("spec.driver={DRIVER_NAME},spec.nodeName={}", self.source.node());
        let events = with_backoff(
            watcher(self.slices.clone(), watcher::Config::default().fields(&fields)),
            DefaultBackoff::default(),
        );
        let mut events = std::pin::pin!(events);
        let mut pace = Pace::default();
        let mut complete = false;
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                event = events.next() => self.observe_all(event, &mut events, &mut complete).await,
                changed = self.hardware.changed() => if changed.is_err() { return },
                () = changed(&mut self.journal) => {}
                Ok(()) = self.orphaned.changed() => {}
                () = pace.due() => {}
                () = drained(&self.drain) => {}
            }
            if !complete || !pace.try_start() {
                continue;
            }
            match self.reconcile().await {
                Ok(0) => pace.rest(),
                Ok(changes) => {
                    tracing::info!(changes, "published ResourceSlices");
                    pace.acted();
                }
                Err(error) => {
                    self.metrics.inc_slice_failures();
                    tracing::error!(error = %chain(&error), "cannot publish ResourceSlices; trying again");
                    pace.failed();
                }
            }
        }
    }

    /// Observes this event and all that have arrived already: one reconciliation handles them
    /// together.
    async fn observe_all(
        &mut self,
        event: Option<Result<watcher::Event<ResourceSlice>, watcher::Error>>,
        events: &mut (impl Stream<Item = Result<watcher::Event<ResourceSlice>, watcher::Error>> + Unpin),
        complete: &mut bool,
    ) {
        let mut next = event;
        while let Some(event) = next {
            match event {
                Ok(event) => self.observe(event, complete),
                Err(error) => {
                    tracing::warn!(error = %chain(&error), "watch of ResourceSlices failed; restarting it")
                }
            }
            next = futures::FutureExt::now_or_never(events.try_next())
                .and_then(|arrived| arrived.transpose());
        }
    }

    fn observe(&mut self, event: watcher::Event<ResourceSlice>, complete: &mut bool) {
        match event {
            watcher::Event::Init => {
                *complete = false;
                self.observed.clear();
            }
            watcher::Event::InitApply(slice) | watcher::Event::Apply(slice) => self.remember(slice),
            watcher::Event::InitDone => *complete = true,
            watcher::Event::Delete(slice) => {
                let name = slice.metadata.name.unwrap_or_default();
                let same = self
                    .observed
                    .get(&name)
                    .is_some_and(|known| known.metadata.uid == slice.metadata.uid);
                if same {
                    self.observed.remove(&name);
                }
            }
        }
    }

    /// Stores `slice`, unless a newer version is known: the watch lags behind own writes.
    fn remember(&mut self, slice: ResourceSlice) {
        self.generation = self.generation.max(slice.spec.pool.generation);
        let name = slice.metadata.name.clone().unwrap_or_default();
        let older = self.observed.get(&name).is_some_and(|known| {
            known.metadata.uid == slice.metadata.uid && version(known) > version(&slice)
        });
        if !older {
            self.observed.insert(name, slice);
        }
    }

    /// Makes the necessary changes and returns their number.
    async fn reconcile(&mut self) -> Result<usize, PublishError> {
        let hardware = Arc::clone(&self.hardware.borrow_and_update());
        let journal = self.journal.as_mut().map(|journal| Arc::clone(&journal.borrow_and_update()));
        let findings = self.orphaned.borrow_and_update().clone();
        let mut orphaned = findings.gpus;
        let published = orphaned_as_published(self.observed.values());
        orphaned.extend(published.into_iter().filter(|gpu| findings.undecided.contains(gpu)));
        let leaving_stock = self.leaving_stock();
        let Some(desired) =
            self.source.slices(&hardware, journal.as_deref(), &orphaned, leaving_stock)
        else {
            return Ok(0);
        };
        let observed: Vec<_> = self.observed.values().cloned().collect();
        let mut changes = plan(desired, observed, self.generation);
        if changes.iter().any(SliceChange::relies_on_rule) {
            self.require_rule().await?;
        }
        if changes.iter().any(SliceChange::creates) {
            let owner = self.node_uid().await?;
            changes.iter_mut().for_each(|change| change.set_owner(self.source.node(), &owner));
        }
        let count = changes.len();
        for change in changes {
            self.write(change).await?;
        }
        Ok(count)
    }

    /// Returns the GPUs that neither allocator may use yet.
    fn leaving_stock(&mut self) -> BTreeSet<GpuUuid> {
        let now = Instant::now();
        let Some(drain) = &mut self.drain else { return BTreeSet::new() };
        drain.observe(self.observed.values(), now);
        drain.leaving(now)
    }

    /// Reads the DeviceTaintRule that keeps kube-scheduler from the GPUs. kube-scheduler may see
    /// the rule later than the slices; until then the policy `tessera-allocation` refuses its
    /// writes.
    async fn require_rule(&self) -> Result<(), PublishError> {
        let rule = self.rules.get_opt(FENCE_RULE).await.map_err(PublishError::Fence)?;
        let is_fence = rule.is_some_and(|rule| is_fence_of(&rule, DRIVER_NAME));
        if is_fence { Ok(()) } else { Err(PublishError::NotFenced) }
    }

    /// Returns the UID of the Node. Read each time: a Node that is deleted and created again has
    /// another UID, and the garbage collector deletes objects of the old one.
    async fn node_uid(&self) -> Result<String, PublishError> {
        let name = self.source.node();
        let node = self.nodes.get(name.as_str()).await;
        let node = node.map_err(|source| PublishError::Node { node: name.clone(), source })?;
        Ok(node.metadata.uid.unwrap_or_default())
    }

    async fn write(&mut self, change: SliceChange) -> Result<(), PublishError> {
        match change {
            SliceChange::Delete(slice) => {
                self.delete(&slice).await?;
                self.observed.remove(slice.metadata.name.as_deref().unwrap_or_default());
                Ok(())
            }
            SliceChange::Create(slice) => {
                let name = slice.metadata.name.clone().unwrap_or_default();
                let written = self.slices.create(&PostParams::default(), &slice).await;
                let written = written.map_err(|source| PublishError::Write {
                    name,
                    verb: "create",
                    source,
                })?;
                self.metrics.inc_slice_writes(SliceWrite::Create);
                self.check(&slice, written).await
            }
            SliceChange::Patch { observed, wanted } => {
                let name = observed.metadata.name.clone().unwrap_or_default();
                let body = plan::patch(&observed, &wanted);
                let written =
                    self.slices.patch(&name, &PatchParams::default(), &Patch::Merge(body)).await;
                let written = written.map_err(|source| PublishError::Write {
                    name,
                    verb: "patch",
                    source,
                })?;
                self.metrics.inc_slice_writes(SliceWrite::Patch);
                self.check(&wanted, written).await
            }
        }
    }

    /// Checks the response to a write: an API server drops fields of disabled features silently.
    async fn check(
        &mut self,
        wanted: &ResourceSlice,
        written: ResourceSlice,
    ) -> Result<(), PublishError> {
        let kept = same_content(wanted, &written);
        let fenced = plan::same_fence(wanted, &written);
        let name = written.metadata.name.clone().unwrap_or_default();
        if !fenced {
            self.delete(&written).await?;
            return Err(PublishError::NotKept { name, withdrawn: true });
        }
        self.remember(written);
        if kept { Ok(()) } else { Err(PublishError::NotKept { name, withdrawn: false }) }
    }

    async fn delete(&self, slice: &ResourceSlice) -> Result<(), PublishError> {
        let meta = slice.meta();
        let name = meta.name.clone().unwrap_or_default();
        let preconditions = Preconditions {
            uid: meta.uid.clone(),
            resource_version: meta.resource_version.clone(),
        };
        let parameters = DeleteParams::default().preconditions(preconditions);
        match self.slices.delete(&name, &parameters).await {
            Ok(_) => self.metrics.inc_slice_writes(SliceWrite::Delete),
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            Err(source) => return Err(PublishError::Write { name, verb: "delete", source }),
        }
        Ok(())
    }
}

/// Returns the GPUs whose devices have the taint of orphaned claims in these slices.
fn orphaned_as_published<'a>(slices: impl Iterator<Item = &'a ResourceSlice>) -> OrphanedGpus {
    let devices = slices.flat_map(|slice| slice.spec.devices.iter().flatten());
    let orphaned = devices.filter(|device| {
        device.taints.iter().flatten().any(|taint| taint.key == ORPHANED_TAINT_KEY)
    });
    orphaned.filter_map(|device| GpuUuid::of_device(&DeviceName::new(&device.name).ok()?)).collect()
}

/// Waits until the next GPU may be allocated by the controller.
async fn drained(drain: &Option<StockDrain>) {
    match drain.as_ref().and_then(|drain| drain.next_end(Instant::now())) {
        Some(end) => tokio::time::sleep_until(end).await,
        None => std::future::pending().await,
    }
}

/// Waits for a change of the journal, if there is one to follow.
async fn changed(journal: &mut Option<watch::Receiver<Arc<Journal>>>) {
    let Some(journal) = journal else { return std::future::pending().await };
    if journal.changed().await.is_err() {
        // The driver stops.
        std::future::pending().await
    }
}

/// Returns the resource version, a number since Kubernetes 1.35 (KEP-5504). Other text counts as
/// newest.
fn version(slice: &ResourceSlice) -> u64 {
    let version = slice.metadata.resource_version.as_deref();
    version.and_then(|text| text.parse().ok()).unwrap_or(u64::MAX)
}

/// The time of the next attempt.
#[derive(Debug)]
struct Pace {
    pause: Duration,
    not_before: Instant,
    is_due: bool,
}

impl Default for Pace {
    fn default() -> Self {
        Self { pause: FIRST_PAUSE, not_before: Instant::now(), is_due: false }
    }
}

impl Pace {
    /// Returns true if an attempt may be made now. Otherwise one is scheduled.
    fn try_start(&mut self) -> bool {
        let may = Instant::now() >= self.not_before;
        // A change that cannot be handled now is handled at the next attempt.
        self.is_due |= !may;
        may
    }

    async fn due(&self) {
        if self.is_due {
            tokio::time::sleep_until(self.not_before).await
        } else {
            std::future::pending().await
        }
    }

    /// Records that there was nothing to change.
    fn rest(&mut self) {
        self.is_due = false;
    }

    /// Records that changes were made. The first reaction to a change is immediate; only changes
    /// that continue are slowed down.
    fn acted(&mut self) {
        self.slow_down();
        self.is_due = false;
    }

    /// Records that the attempt failed.
    fn failed(&mut self) {
        self.slow_down();
        self.is_due = true;
    }

    fn slow_down(&mut self) {
        let now = Instant::now();
        let calm = now.duration_since(self.not_before) > LONGEST_PAUSE;
        self.pause = if calm { FIRST_PAUSE } else { (self.pause * 2).min(LONGEST_PAUSE) };
        self.not_before = now + self.pause;
    }
}
