//! Watches: changes of the cluster, as events for the core.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use futures::{StreamExt, TryStreamExt};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ManagedFieldsEntry;
use kube::runtime::utils::{Backoff, ResetTimerBackoff};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use tessera_api::names::{CONTROLLER_FIELD_MANAGER, DRIVER_NAME, ManagedDrivers};
use tessera_runtime::cluster::with_backoff;
use tessera_runtime::supervisor::Supervisor;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::core::event::{Change, WatchedKind, WatchedObject};
use crate::metrics::Metrics;

/// Capacity of the queue of changes. The core absorbs many at a time; a list of a large cluster
/// fills the queue, and then the watches wait, so that memory does not grow.
const QUEUE: usize = 4096;

/// A change, and the time of its arrival.
#[derive(Debug, Clone)]
pub struct Arrival {
    /// The change.
    pub change: Change,
    /// The time at which the watch delivered it.
    pub at: Instant,
}

/// The pause of a watch that failed before its next attempt. A lasting error (no permission, API
/// server away) is retried ever more slowly, but for ever.
#[derive(Debug)]
struct Pause(Duration);

impl Pause {
    /// kube's default begins at 0.8 s; a watch that merely ended must not delay a pending pod by
    /// that.
    const SHORTEST: Duration = Duration::from_millis(100);
    const LONGEST: Duration = Duration::from_secs(10);
    /// The time without a failure after which pauses start again with the shortest.
    const GOOD: Duration = Duration::from_secs(30);
}

impl Default for Pause {
    fn default() -> Self {
        Self(Self::SHORTEST)
    }
}

impl Iterator for Pause {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let pause = self.0;
        self.0 = (pause * 2).min(Self::LONGEST);
        Some(pause)
    }
}

impl Backoff for Pause {
    fn reset(&mut self) {
        *self = Self::default();
    }
}

/// Returns the queue of changes.
pub fn queue() -> (mpsc::Sender<Arrival>, mpsc::Receiver<Arrival>) {
    mpsc::channel(QUEUE)
}

/// Starts one task per kind; of ResourceSlices, those of `drivers` are watched. The tasks end when
/// the receiver of `changes` is dropped.
pub fn start(
    client: &Client,
    drivers: &ManagedDrivers,
    metrics: &Metrics,
    tasks: &mut Supervisor,
    changes: mpsc::Sender<Arrival>,
) {
    let mut watches = Watches { client, drivers, metrics, tasks, changes };
    watches.follow("watch-resourceslices", WatchedKind::Slice, WatchedObject::Slice);
    watches.follow("watch-devicetaintrules", WatchedKind::TaintRule, WatchedObject::TaintRule);
    watches.follow("watch-deviceclasses", WatchedKind::Class, WatchedObject::Class);
    watches.follow("watch-resourceclaims", WatchedKind::Claim, WatchedObject::Claim);
    let template = WatchedObject::Template;
    watches.follow("watch-resourceclaimtemplates", WatchedKind::Template, template);
    watches.follow("watch-gpuquotas", WatchedKind::Quota, WatchedObject::Quota);
    watches.follow("watch-gpudefaults", WatchedKind::Defaults, WatchedObject::Defaults);
    watches.follow("watch-gpuresizes", WatchedKind::Resize, WatchedObject::Resize);
    watches.follow("watch-podgroups", WatchedKind::PodGroup, WatchedObject::PodGroup);
    let of_volcano = WatchedObject::VolcanoPodGroup;
    watches.follow("watch-volcano-podgroups", WatchedKind::VolcanoPodGroup, of_volcano);
    watches.follow("watch-nodes", WatchedKind::Node, WatchedObject::Node);
    watches.follow("watch-pods", WatchedKind::Pod, WatchedObject::Pod);
}

/// The watches that are being started.
struct Watches<'a> {
    client: &'a Client,
    drivers: &'a ManagedDrivers,
    metrics: &'a Metrics,
    tasks: &'a mut Supervisor,
    changes: mpsc::Sender<Arrival>,
}

impl Watches<'_> {
    fn follow<K>(
        &mut self,
        task: &'static str,
        kind: WatchedKind,
        wrap: fn(Arc<K>) -> WatchedObject,
    ) where
        K: Resource<DynamicType = ()>
            + Default
            + Clone
            + DeserializeOwned
            + Debug
            + Send
            + Sync
            + 'static,
    {
        let config = match kind {
            // A field selector names one driver. The index ignores the slices of others.
            WatchedKind::Slice if self.drivers.is_tessera_only() => {
                watcher::Config::default().fields(&format!("spec.driver={DRIVER_NAME}"))
            }
            _ => watcher::Config::default(),
        };
        let (api, changes) = (Api::all(self.client.clone()), self.changes.clone());
        let metrics = self.metrics.clone();
        metrics.set_synced(kind, false);
        let closed = changes.clone();
        let watch = KindWatch { api, config, kind, wrap, changes, metrics };
        self.tasks.spawn(task, async move {
            tokio::select! {
                () = closed.closed() => {}
                () = watch.follow() => {}
            }
        });
    }
}

/// The cause for which a watch has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ended {
    /// The API server does not have the kind any more.
    Lost,
    /// The changes have no receiver.
    NoReceiver,
}

/// The watch of one kind.
struct KindWatch<K> {
    api: Api<K>,
    config: watcher::Config,
    kind: WatchedKind,
    wrap: fn(Arc<K>) -> WatchedObject,
    changes: mpsc::Sender<Arrival>,
    metrics: Metrics,
}

impl<K> KindWatch<K>
where
    K: Resource + Default + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
{
    /// Follows the kind for ever. After a gap the watcher lists again; objects that are not in the
    /// list were deleted meanwhile. A watcher of a kind that the API server has lost never lists
    /// again by itself, so another one takes its place.
    async fn follow(self) {
        let mut known = Known::default();
        while self.watch(&mut known).await == Ended::Lost {
            tracing::warn!(kind = self.kind.name(), "the API server has lost the kind");
        }
    }

    /// Follows the kind until the API server has lost it.
    async fn watch(&self, known: &mut Known<K>) -> Ended {
        let Self { kind, wrap, changes, metrics, .. } = self;
        let (kind, wrap) = (*kind, *wrap);
        let pause = ResetTimerBackoff::new(Pause::default(), Pause::GOOD);
        let events = with_backoff(watcher(self.api.clone(), self.config.clone()), pause);
        // The only use of them is who set a pod's nomination.
        let is_used = |entry: &ManagedFieldsEntry| {
            kind == WatchedKind::Pod && entry.manager.as_deref() == Some(CONTROLLER_FIELD_MANAGER)
        };
        let events = events.modify(move |object| object.managed_fields_mut().retain(is_used));
        let mut events = std::pin::pin!(events.into_stream());
        while let Some(event) = events.next().await {
            let at = Instant::now();
            let news = match event {
                Ok(event) => known.take(event, kind, wrap),
                Err(error) if may_be_missing(kind) && is_not_served(&error) => {
                    if std::mem::replace(&mut known.is_missing_reported, true) {
                        continue;
                    }
                    let name = kind.name();
                    if kind.pod_group_api().is_some() {
                        tracing::debug!("{name} is not served by this API server");
                    } else {
                        tracing::warn!("{name} is not served by this API server and ignored");
                    }
                    vec![Change::NotServed(kind)]
                }
                Err(error) if may_be_missing(kind) && is_lost(&error) => return Ended::Lost,
                Err(error) => {
                    let reason = failure_reason(&error);
                    metrics.count_watch_failure(kind, reason);
                    let kind = kind.name();
                    let error_chain = &error as &dyn std::error::Error;
                    tracing::warn!(kind, reason, error = error_chain, "watch failed, retrying");
                    if !is_interruption(&error) {
                        continue;
                    }
                    vec![Change::Interrupted]
                }
            };
            for change in news {
                if matches!(change, Change::Listed(_) | Change::NotServed(_)) {
                    metrics.set_synced(kind, true);
                }
                if changes.send(Arrival { change, at }).await.is_err() {
                    return Ended::NoReceiver;
                }
            }
        }
        Ended::NoReceiver
    }
}

/// Returns true if the API server is away, for us and probably for others. A refusal is not that,
/// and may last.
fn is_interruption(error: &watcher::Error) -> bool {
    !matches!(status_code(error), Some(401 | 403 | 404))
}

/// Returns the HTTP status of the API server's answer; none if there was no answer.
fn status_code(error: &watcher::Error) -> Option<u16> {
    match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status))
        | watcher::Error::WatchFailed(kube::Error::Api(status))
        | watcher::Error::WatchError(status) => Some(status.code),
        _ => None,
    }
}

/// Returns Kubernetes' reason of a failure, of few values: it is a label.
fn failure_reason(error: &watcher::Error) -> &'static str {
    match status_code(error) {
        Some(401) => "Unauthorized",
        Some(403) => "Forbidden",
        Some(404) => "NotFound",
        Some(410) => "Expired",
        Some(429) => "TooManyRequests",
        Some(_) => "Other",
        None => "NoAnswer",
    }
}

/// Returns true for kinds that an API server may lack: DeviceTaintRules before Kubernetes 1.37,
/// PodGroups, and kinds whose CustomResourceDefinition of the chart is not installed.
fn may_be_missing(kind: WatchedKind) -> bool {
    matches!(
        kind,
        WatchedKind::TaintRule
            | WatchedKind::Quota
            | WatchedKind::Defaults
            | WatchedKind::Resize
            | WatchedKind::PodGroup
            | WatchedKind::VolcanoPodGroup
    )
}

/// Returns true if the API server does not have the kind. A 403 is retried instead: a restarting
/// API server that has not synced its RBAC rules refuses everything, and planning without the rules
/// would allocate tainted devices.
fn is_not_served(error: &watcher::Error) -> bool {
    let watcher::Error::InitialListFailed(kube::Error::Api(status)) = error else { return false };
    status.code == 404
}

/// Returns true if the API server had the kind and does not have it any more.
fn is_lost(error: &watcher::Error) -> bool {
    let watcher::Error::WatchStartFailed(kube::Error::Api(status)) = error else { return false };
    status.code == 404
}

/// The identities of the objects that a watch has delivered, to report deletions after a gap. Whole
/// pods of a large cluster would take hundreds of megabytes.
struct Known<K> {
    objects: BTreeMap<String, Arc<K>>,
    listing: Option<BTreeMap<String, Arc<K>>>,
    /// It has been logged that the kind is not served.
    is_missing_reported: bool,
}

impl<K> Default for Known<K> {
    fn default() -> Self {
        Self { objects: BTreeMap::new(), listing: None, is_missing_reported: false }
    }
}

impl<K: Resource + Default> Known<K> {
    fn take(
        &mut self,
        event: watcher::Event<K>,
        kind: WatchedKind,
        wrap: fn(Arc<K>) -> WatchedObject,
    ) -> Vec<Change> {
        match event {
            watcher::Event::Init => {
                self.listing = Some(BTreeMap::new());
                Vec::new()
            }
            watcher::Event::InitApply(object) => {
                let object = Arc::new(object);
                self.listing
                    .get_or_insert_default()
                    .insert(key(object.as_ref()), identity(object.as_ref()));
                vec![Change::Applied(wrap(object))]
            }
            watcher::Event::InitDone => {
                self.is_missing_reported = false;
                let listed = self.listing.take().unwrap_or_default();
                let before = std::mem::replace(&mut self.objects, listed);
                let gone = before.into_iter().filter(|(key, _)| !self.objects.contains_key(key));
                let mut news: Vec<Change> =
                    gone.map(|(_, object)| Change::Deleted(wrap(object))).collect();
                news.push(Change::Listed(kind));
                news
            }
            watcher::Event::Apply(object) => {
                let object = Arc::new(object);
                self.objects.insert(key(object.as_ref()), identity(object.as_ref()));
                vec![Change::Applied(wrap(object))]
            }
            watcher::Event::Delete(object) => {
                let object = Arc::new(object);
                self.objects.remove(&key(object.as_ref()));
                vec![Change::Deleted(wrap(object))]
            }
        }
    }
}

/// Returns an object with only the name and UID of this one.
fn identity<K: Resource + Default>(object: &K) -> Arc<K> {
    let mut identity = K::default();
    let (to, from) = (identity.meta_mut(), object.meta());
    to.namespace.clone_from(&from.namespace);
    to.name.clone_from(&from.name);
    to.uid.clone_from(&from.uid);
    Arc::new(identity)
}

/// Returns the key of an object: the UID of a namespaced object, since names are reused, otherwise
/// the name.
fn key<K: Resource>(object: &K) -> String {
    let meta = object.meta();
    match (&meta.namespace, &meta.uid) {
        (Some(_), Some(uid)) => uid.clone(),
        _ => meta.name.clone().unwrap_or_default(),
    }
}
