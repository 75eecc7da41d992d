//! Owns this node's ResourceSlices: brings them in line with the hardware, and with what others did
//! to them.
//!
//! ```text
//! HardwareState --api::slice--> desired --\
//!                                          plan -> create, patch, delete -> API
//! watch of the slices ---> observed ------/                                  |
//!            ^---------------------------------------------------------------/
//! ```
//!
//! The kubelet deletes all slices of its node when it starts, and administrators delete what they
//! like: both are seen by the watch and repaired at once, with growing pauses if it does not stop.

pub mod plan;
mod stock_drain;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use futures::{Stream, StreamExt, TryStreamExt};
use k8s_openapi::api::{core::v1::Node, resource::v1::ResourceSlice};
use kube::{
    Api, Client, Resource,
    api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions},
    runtime::watcher::{self, DefaultBackoff, watcher},
};
use tessera_api::{
    names::{DRIVER_NAME, DeviceName, GpuUuid, NodeName, ORPHANED_TAINT_KEY},
    slice::same_content,
};
use tessera_runtime::cluster::patiently;
use tessera_runtime::error_chain::chain;
use tokio::{sync::watch, time::Instant};
use tokio_util::sync::CancellationToken;

use self::{
    plan::{Change, plan},
    stock_drain::StockDrain,
};
use crate::{
    audit::Orphaned,
    inventory::HardwareState,
    metrics::{Metrics, SliceWrite},
    mode::Mode,
    slices::SliceSource,
    state::journal::Journal,
};

/// Why the slices are not in line yet.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// The Node could not be read, which owns the slices.
    #[error("Node {node} could not be read, which is to own the ResourceSlices")]
    Node {
        /// The node.
        node: NodeName,
        /// What happened.
        source: kube::Error,
    },
    /// The API refused a change.
    #[error("ResourceSlice {name} could not be {verb}")]
    Write {
        /// The slice.
        name: String,
        /// What was tried.
        verb: &'static str,
        /// What happened.
        source: kube::Error,
    },
    /// The API server does not keep what it was given.
    #[error(
        "the API server did not keep ResourceSlice {name} as it was written: turn on the features DRADeviceTaints and DRAConsumableCapacity there{withdrawn}",
        withdrawn = if *.withdrawn { "; the slice is withdrawn, since without its taints other schedulers would allocate the GPUs" } else { "" }
    )]
    NotKept {
        /// The slice.
        name: String,
        /// Whether it was deleted again, because the fence was missing.
        withdrawn: bool,
    },
}

/// Between attempts after an error, and between repairs when somebody keeps changing the slices:
/// twice as long each time.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Publishes.
pub struct Publisher {
    slices: Api<ResourceSlice>,
    nodes: Api<Node>,
    source: SliceSource,
    hardware: watch::Receiver<Arc<HardwareState>>,
    /// What is in use, where what is published follows it.
    journal: Option<watch::Receiver<Arc<Journal>>>,
    /// GPUs of orphaned claims, once they are known.
    orphaned: watch::Receiver<Option<Arc<Orphaned>>>,
    metrics: Arc<Metrics>,
    /// This node's slices, by name: from the watch, and from what our own writes returned.
    observed: BTreeMap<String, ResourceSlice>,
    /// The highest generation that was ever seen or written: it never goes back, even when all
    /// slices were deleted.
    generation: i64,
    /// Where our controller allocates: GPUs that kube-scheduler may still be allocating. `None`
    /// where it always may.
    drain: Option<StockDrain>,
}

impl std::fmt::Debug for Publisher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Publisher").field("source", &self.source).finish_non_exhaustive()
    }
}

impl Publisher {
    /// Publishes `hardware` as the slices of the node of `source`.
    #[must_use]
    pub fn new(
        client: Client,
        source: SliceSource,
        hardware: watch::Receiver<Arc<HardwareState>>,
        journal: watch::Receiver<Arc<Journal>>,
        orphaned: watch::Receiver<Option<Arc<Orphaned>>>,
        metrics: Arc<Metrics>,
    ) -> Self {
        let (slices, nodes) = (Api::all(client.clone()), Api::all(client));
        let journal = source.follows_use().then_some(journal);
        let observed = BTreeMap::new();
        Self {
            slices,
            nodes,
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

    /// Keeps a GPU that was published for kube-scheduler from everybody for so long, before it is
    /// our controller's.
    #[must_use]
    pub fn draining(mut self, stock: Duration) -> Self {
        self.drain = (self.source.mode() == Mode::Managed).then(|| StockDrain::new(stock));
        self
    }

    /// Publishes until `stop`. What is published stays: a restart of the driver changes nothing.
    pub async fn run(mut self, stop: CancellationToken) {
        let fields = format!("spec.driver={DRIVER_NAME},spec.nodeName={}", self.source.node());
        let events = patiently(
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
                () = ends(&self.drain) => {}
            }
            if !complete || !pace.may_act() {
                continue;
            }
            match self.bring_in_line().await {
                Ok(0) => pace.rest(),
                Ok(changes) => {
                    tracing::info!(changes, "ResourceSlices are in line with the hardware");
                    pace.acted();
                }
                Err(error) => {
                    self.metrics.slice_failed();
                    tracing::error!(error = %chain(&error), "ResourceSlices are not in line with the hardware; trying again");
                    pace.failed();
                }
            }
        }
    }

    /// Takes this event and all that have arrived already: one look at the slices answers them
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
                    tracing::warn!(error = %chain(&error), "the watch of ResourceSlices broke; it begins again")
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

    /// Keeps the newer of what is known and `slice`: the watch lags behind our own writes.
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

    /// Makes the changes that are needed; returns how many there were.
    async fn bring_in_line(&mut self) -> Result<usize, PublishError> {
        let hardware = Arc::clone(&self.hardware.borrow_and_update());
        let journal = self.journal.as_mut().map(|journal| Arc::clone(&journal.borrow_and_update()));
        // A restart forgets them: until they are known again, they are those that are published.
        let orphaned = self.orphaned.borrow_and_update().clone();
        let orphaned =
            orphaned.unwrap_or_else(|| Arc::new(orphaned_as_published(self.observed.values())));
        let leaving_stock = self.leaving_stock();
        let Some(desired) =
            self.source.slices(&hardware, journal.as_deref(), &orphaned, leaving_stock)
        else {
            return Ok(0);
        };
        let observed: Vec<_> = self.observed.values().cloned().collect();
        let mut changes = plan(desired, observed, self.generation);
        if changes.iter().any(Change::creates) {
            let owner = self.node_uid().await?;
            changes.iter_mut().for_each(|change| change.owned_by(self.source.node(), &owner));
        }
        let count = changes.len();
        for change in changes {
            self.make(change).await?;
        }
        Ok(count)
    }

    /// The GPUs that are nobody's yet, as what is published says.
    fn leaving_stock(&mut self) -> BTreeSet<GpuUuid> {
        let now = Instant::now();
        let Some(drain) = &mut self.drain else { return BTreeSet::new() };
        drain.observe(self.observed.values(), now);
        drain.leaving(now)
    }

    /// Looked up each time: a Node that was deleted and made again has another UID, and the garbage
    /// collector removes what the old one owned.
    async fn node_uid(&self) -> Result<String, PublishError> {
        let name = self.source.node();
        let node = self.nodes.get(name.as_str()).await;
        let node = node.map_err(|source| PublishError::Node { node: name.clone(), source })?;
        Ok(node.metadata.uid.unwrap_or_default())
    }

    async fn make(&mut self, change: Change) -> Result<(), PublishError> {
        match change {
            Change::Delete(slice) => {
                self.delete(&slice).await?;
                self.observed.remove(slice.metadata.name.as_deref().unwrap_or_default());
                Ok(())
            }
            Change::Create(slice) => {
                let name = slice.metadata.name.clone().unwrap_or_default();
                let written = self.slices.create(&PostParams::default(), &slice).await;
                let written = written.map_err(|source| PublishError::Write {
                    name,
                    verb: "created",
                    source,
                })?;
                self.metrics.slice_written(SliceWrite::Create);
                self.check(&slice, written).await
            }
            Change::Patch { observed, wanted } => {
                let name = observed.metadata.name.clone().unwrap_or_default();
                let body = plan::patch(&observed, &wanted);
                let written =
                    self.slices.patch(&name, &PatchParams::default(), &Patch::Merge(body)).await;
                let written = written.map_err(|source| PublishError::Write {
                    name,
                    verb: "patched",
                    source,
                })?;
                self.metrics.slice_written(SliceWrite::Patch);
                self.check(&wanted, written).await
            }
        }
    }

    /// An API server with a feature turned off drops its fields without a word.
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
            Ok(_) => self.metrics.slice_written(SliceWrite::Delete),
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            Err(source) => return Err(PublishError::Write { name, verb: "deleted", source }),
        }
        Ok(())
    }
}

/// GPUs whose devices say so in these slices.
fn orphaned_as_published<'a>(slices: impl Iterator<Item = &'a ResourceSlice>) -> Orphaned {
    let devices = slices.flat_map(|slice| slice.spec.devices.iter().flatten());
    let orphaned = devices.filter(|device| {
        device.taints.iter().flatten().any(|taint| taint.key == ORPHANED_TAINT_KEY)
    });
    orphaned
        .filter_map(|device| GpuUuid::from_device_name(&DeviceName::new(&device.name).ok()?).ok())
        .collect()
}

/// Waits until another GPU has waited enough.
async fn ends(drain: &Option<StockDrain>) {
    match drain.as_ref().and_then(|drain| drain.next_end(Instant::now())) {
        Some(end) => tokio::time::sleep_until(end).await,
        None => std::future::pending().await,
    }
}

/// Waits for a change of the journal, where that is followed.
async fn changed(journal: &mut Option<watch::Receiver<Arc<Journal>>>) {
    let Some(journal) = journal else { return std::future::pending().await };
    if journal.changed().await.is_err() {
        // A journal that is gone changes no more.
        std::future::pending().await
    }
}

/// Numbers since Kubernetes 1.35 (KEP-5504); one that is none counts as newest.
fn version(slice: &ResourceSlice) -> u64 {
    let version = slice.metadata.resource_version.as_deref();
    version.and_then(|text| text.parse().ok()).unwrap_or(u64::MAX)
}

/// When the next attempt may be made.
#[derive(Debug)]
struct Pace {
    pause: Duration,
    not_before: Instant,
    again: bool,
}

impl Default for Pace {
    fn default() -> Self {
        Self { pause: FIRST_PAUSE, not_before: Instant::now(), again: false }
    }
}

impl Pace {
    fn may_act(&mut self) -> bool {
        let may = Instant::now() >= self.not_before;
        // What cannot be answered now is answered when it is due.
        self.again |= !may;
        may
    }

    async fn due(&self) {
        if self.again {
            tokio::time::sleep_until(self.not_before).await
        } else {
            std::future::pending().await
        }
    }

    /// Nothing was to be done.
    fn rest(&mut self) {
        self.again = false;
    }

    /// Changes were made. The first is answered at once and the next one a moment later; only who
    /// keeps at it is slowed down.
    fn acted(&mut self) {
        self.slow_down();
        self.again = false;
    }

    fn failed(&mut self) {
        self.slow_down();
        self.again = true;
    }

    fn slow_down(&mut self) {
        let now = Instant::now();
        let calm = now.duration_since(self.not_before) > LONGEST_PAUSE;
        self.pause = if calm { FIRST_PAUSE } else { (self.pause * 2).min(LONGEST_PAUSE) };
        self.not_before = now + self.pause;
    }
}
