//! Applies GpuResizes to the shares of this node, and reports what their containers are held to
//! (ADR 137).
//!
//! ```text
//! watch of GpuResizes of this node, journal --> [Resizer] --> LocalNode::resize --> grants
//!                                                   '--> status.applied, condition Applied
//! ```

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use futures::StreamExt;
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
use kube::{
    Api, Client, Resource as _, ResourceExt,
    api::{Patch, PatchParams},
    runtime::watcher::{self, DefaultBackoff, watcher},
};
use serde_json::json;
use tessera_api::{
    Quantity,
    names::{ClaimName, ClaimUid, Namespace, PoolName},
    resize::{
        APPLIED_CONDITION, GpuResize, GpuResizeStatus, IN_USE_REASON, REFUSED_REASON, SizedShare,
        apply_sizes, resize_results, same_sizes,
    },
};
use tessera_runtime::{cluster::with_backoff, error_chain::chain};
use tokio::{
    sync::watch,
    time::{Instant, sleep_until, timeout},
};
use tokio_util::sync::CancellationToken;

use crate::{
    inventory::HardwareState,
    prepare::{LocalNode, claim::PreparableClaim, resize::ShareResizeError, source::ClaimSource},
    state::journal::{ClaimRecord, RecordState},
};

/// Pause before a change is tried again.
const RETRY: Duration = Duration::from_secs(5);

/// Attempts after which a change is refused. One that waits for memory in use is never.
const ATTEMPTS: u32 = 8;

/// Deadline of one request to the API server.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// The manager of the driver's part of a status.
const FIELD_MANAGER: &str = "tessera-driver";

type Key = (String, String);

/// Applies the GpuResizes of one node.
pub struct Resizer {
    client: Client,
    node: Arc<LocalNode>,
    pool: PoolName,
    hardware: watch::Receiver<Arc<HardwareState>>,
    source: ClaimSource,
    /// The resizes of this node.
    known: BTreeMap<Key, Arc<GpuResize>>,
    /// The resizes to be examined.
    due: BTreeSet<Key>,
    /// The resizes to be tried again: the time, and the number of attempts so far.
    later: BTreeMap<Key, (Instant, u32)>,
}

impl std::fmt::Debug for Resizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Resizer").field("pool", &self.pool).finish_non_exhaustive()
    }
}

/// A change that could not be made.
struct Failure {
    /// Reason of the condition.
    reason: &'static str,
    message: String,
    /// The change is not tried again.
    is_final: bool,
    /// It counts as one of the attempts after which the change is refused.
    counts: bool,
}

/// Error: a report is not stored.
struct NotStored;

impl Resizer {
    /// Returns the part that changes shares of `node`, whose pool is `pool`.
    #[must_use]
    pub fn new(
        client: Client,
        node: Arc<LocalNode>,
        pool: PoolName,
        hardware: watch::Receiver<Arc<HardwareState>>,
        source: ClaimSource,
    ) -> Self {
        let (known, due, later) = Default::default();
        Self { client, node, pool, hardware, source, known, due, later }
    }

    /// Applies changes until `stop`.
    pub async fn run(mut self, stop: CancellationToken) {
        let config = watcher::Config::default().fields(&format!("status.node={}", self.pool));
        let events = watcher(Api::<GpuResize>::all(self.client.clone()), config);
        let mut events = std::pin::pin!(with_backoff(events, DefaultBackoff::default()));
        let mut journal = self.node.journal.watch();
        let mut listed = BTreeSet::new();
        let mut is_reported = false;
        loop {
            let next = self.later.values().map(|(at, _)| *at).min();
            tokio::select! {
                () = stop.cancelled() => return,
                event = events.next() => match event {
                    Some(Ok(event)) => self.observe(event, &mut listed),
                    Some(Err(error)) => {
                        // The definition is not installed, or not visible yet: once is enough.
                        if !std::mem::replace(&mut is_reported, true) {
                            tracing::warn!(error = %chain(&error), "cannot watch GpuResizes; trying again");
                        }
                    }
                    None => return,
                },
                Ok(()) = journal.changed() => {
                    journal.mark_unchanged();
                    self.due.extend(self.known.keys().cloned());
                }
                () = sleep_until(next.unwrap_or_else(Instant::now)), if next.is_some() => {
                    let now = Instant::now();
                    let is_due = |(_, (at, _)): &(&Key, &(Instant, u32))| *at <= now;
                    self.due.extend(self.later.iter().filter(is_due).map(|(key, _)| key.clone()));
                }
            }
            for key in std::mem::take(&mut self.due) {
                tokio::select! {
                    () = stop.cancelled() => return,
                    () = self.examine(&key) => {}
                }
            }
        }
    }

    fn observe(&mut self, event: watcher::Event<GpuResize>, listed: &mut BTreeSet<Key>) {
        let key = |object: &GpuResize| (object.namespace().unwrap_or_default(), object.name_any());
        match event {
            watcher::Event::Init => listed.clear(),
            watcher::Event::InitApply(object) => {
                listed.insert(key(&object));
                self.take(key(&object), object);
            }
            watcher::Event::InitDone => self.known.retain(|key, _| listed.contains(key)),
            watcher::Event::Apply(object) => self.take(key(&object), object),
            watcher::Event::Delete(object) => {
                self.known.remove(&key(&object));
            }
        }
        self.later.retain(|key, _| self.known.contains_key(key));
    }

    /// Takes over an object. One that differs only by the driver's own report is not examined.
    fn take(&mut self, key: Key, object: GpuResize) {
        if self.known.get(&key).is_none_or(|known| asked(known) != asked(&object)) {
            self.later.remove(&key);
            self.due.insert(key.clone());
        }
        self.known.insert(key, Arc::new(object));
    }

    /// Applies one resize, unless that has been done, and reports the result.
    async fn examine(&mut self, key: &Key) {
        let Some(object) = self.known.get(key).cloned() else { return };
        let Some((record, status, uid)) = self.open_change(&object) else {
            self.later.remove(key);
            return;
        };
        let attempts = self.later.get(key).map_or(0, |(_, attempts)| *attempts);
        let (applied, failure) = match self.apply(&record, &uid, status).await {
            Ok(record) => (sizes_of(&record, &status.granted), None),
            Err(failure) => {
                let is_final = failure.is_final || (failure.counts && attempts + 1 >= ATTEMPTS);
                let reason = if is_final { REFUSED_REASON } else { failure.reason };
                let journal = self.node.journal.watch().borrow().clone();
                let record = journal.claims.get(&uid).cloned().unwrap_or(record);
                let failure = Failure { reason, is_final, ..failure };
                (sizes_of(&record, &status.granted), Some(failure))
            }
        };
        let is_final = failure.as_ref().is_none_or(|failure| failure.is_final);
        let told = self.report(&object, status, applied, failure.as_ref()).await;
        let is_told = told.is_ok();
        // The changed journal makes this resize due again, before the watch delivers the report. A
        // change that is in the answer, too, is left to the watch.
        if let Ok(Some(stored)) = told
            && asked(&stored) == asked(&object)
        {
            self.known.insert(key.clone(), Arc::new(stored));
        }
        if is_final && is_told {
            self.later.remove(key);
        } else {
            let counted = u32::from(failure.is_some_and(|failure| failure.counts));
            self.later.insert(key.clone(), (Instant::now() + RETRY, attempts + counted));
        }
    }

    /// Returns the record and the status of a resize that is not applied, or whose result is not
    /// reported.
    fn open_change<'o>(
        &self,
        object: &'o GpuResize,
    ) -> Option<(ClaimRecord, &'o GpuResizeStatus, ClaimUid)> {
        let status = object.status.as_ref().filter(|status| !status.granted.is_empty())?;
        let uid = ClaimUid::new(status.claim_uid.as_deref()?).ok()?;
        let journal = self.node.journal.watch().borrow().clone();
        let record = journal.claims.get(&uid)?;
        if record.state != RecordState::Completed {
            return None;
        }
        let answer = object.answer();
        if answer.is_some_and(|answer| answer.reason == REFUSED_REASON) {
            return None;
        }
        let recorded = sizes_of(record, &status.granted);
        // An earlier allocation of the claim is still prepared. The journal changes when it ends.
        if recorded.len() != status.granted.len() {
            return None;
        }
        let is_recorded = same_sizes(&recorded, &status.granted);
        let is_told = answer.is_some_and(|answer| answer.status == "True");
        (!is_recorded || !is_told).then(|| (record.clone(), status, uid))
    }

    async fn apply(
        &self,
        record: &ClaimRecord,
        uid: &ClaimUid,
        status: &GpuResizeStatus,
    ) -> Result<ClaimRecord, Failure> {
        let (namespace, name) = (&record.namespace, &record.name);
        let until = Instant::now() + REQUEST_TIMEOUT;
        let claim = self.source.read(namespace, name, until).await;
        let claim = claim.map_err(|error| Failure::again("ClaimNotRead", chain(&error), false))?;
        let counted = self.checked(&claim, uid, namespace, name)?;
        let wanted = self.checked(&with_sizes(claim, &status.granted), uid, namespace, name)?;
        let (node, hardware) = (Arc::clone(&self.node), Arc::clone(&self.hardware.borrow()));
        let work = move || node.resize(&counted, &wanted, &hardware);
        let resized = tokio::task::spawn_blocking(work).await;
        let resized = resized.map_err(|error| Failure::again("Failed", chain(&error), true))?;
        let record = resized.map_err(|error| Failure::of(&error))?;
        tracing::info!(%namespace, claim = %name, %uid, "sizes of shares are applied");
        Ok(record)
    }

    fn checked(
        &self,
        claim: &ResourceClaim,
        uid: &ClaimUid,
        namespace: &Namespace,
        name: &ClaimName,
    ) -> Result<PreparableClaim, Failure> {
        PreparableClaim::check(claim, uid, namespace, name, &self.pool)
            .map_err(|error| Failure::refused(chain(&error)))
    }

    /// Writes the driver's part of the status. Returns the stored object; `None` if it was written
    /// before, or the object is gone.
    async fn report(
        &self,
        object: &GpuResize,
        status: &GpuResizeStatus,
        applied: Vec<SizedShare>,
        failure: Option<&Failure>,
    ) -> Result<Option<GpuResize>, NotStored> {
        let known = object.condition(APPLIED_CONDITION);
        let condition = condition(object, failure);
        let is_known = known == Some(&condition)
            && (&status.applied, status.applied_grant) == (&applied, status.grant);
        if is_known {
            return Ok(None);
        }
        let (namespace, name) = (object.namespace().unwrap_or_default(), object.name_any());
        let patch = Patch::Apply(json!({
            "apiVersion": GpuResize::api_version(&()), "kind": GpuResize::kind(&()),
            "metadata": {"name": name, "uid": object.metadata.uid},
            "status": {
                "applied": applied, "appliedGrant": status.grant, "conditions": [condition],
            },
        }));
        let api: Api<GpuResize> = Api::namespaced(self.client.clone(), &namespace);
        let parameters = PatchParams::apply(FIELD_MANAGER).force();
        let request = api.patch_status(&name, &parameters, &patch);
        let error = match timeout(REQUEST_TIMEOUT, request).await {
            Ok(Ok(stored)) => return Ok(Some(stored)),
            // It is deleted or another one, as the watch will report.
            Ok(Err(kube::Error::Api(answer))) if matches!(answer.code, 404 | 409) => {
                return Ok(None);
            }
            Ok(Err(error)) => chain(&error),
            Err(_) => "no answer".to_owned(),
        };
        tracing::warn!(namespace, name, error, "cannot write the status of a GpuResize");
        Err(NotStored)
    }
}

impl Failure {
    fn again(reason: &'static str, message: String, counts: bool) -> Self {
        Self { reason, message, is_final: false, counts }
    }

    fn refused(message: String) -> Self {
        Self { reason: REFUSED_REASON, message, is_final: true, counts: true }
    }

    fn of(error: &ShareResizeError) -> Self {
        let message = chain(error);
        match error {
            ShareResizeError::InUse { .. } => Self::again(IN_USE_REASON, message, false),
            // The claim is read again.
            ShareResizeError::NotCounted { .. } => Self::again("NotCounted", message, false),
            // It was unprepared meanwhile.
            ShareResizeError::NotPrepared => Self::again("NotPrepared", message, false),
            ShareResizeError::Prepare(_) => Self::again("Failed", message, true),
            ShareResizeError::Plan(error) if error.is_transient() => {
                Self::again("Failed", message, true)
            }
            ShareResizeError::Plan(_) | ShareResizeError::Unreadable { .. } => {
                Self::refused(message)
            }
        }
    }
}

/// Returns what decides about the sizes to apply: the rest of the object is the driver's own.
fn asked(object: &GpuResize) -> (Option<i64>, Option<&str>, Option<i64>) {
    let status = object.status.as_ref();
    let claim = status.and_then(|status| status.claim_uid.as_deref());
    (object.metadata.generation, claim, status.and_then(|status| status.grant))
}

/// Returns the claim with these sizes in its allocation.
fn with_sizes(mut claim: ResourceClaim, sizes: &[SizedShare]) -> ResourceClaim {
    if let Some(status) = &mut claim.status {
        apply_sizes(status);
        resize_results(status, sizes);
        status.devices = None;
    }
    claim
}

/// Returns the recorded sizes of these shares. One that has the granted size is written alike.
fn sizes_of(record: &ClaimRecord, granted: &[SizedShare]) -> Vec<SizedShare> {
    let size = |granted: &SizedShare| {
        let is_it = |id: &str| id == granted.share_id;
        let mut shares = record.shares.iter();
        let share =
            shares.find(|share| share.share_id.as_ref().is_some_and(|id| is_it(id.as_str())))?;
        let reserved = share.reservation();
        let memory = Quantity::from_bytes(reserved.memory_bytes).to_string();
        let sized =
            SizedShare { memory, cores: reserved.cores_percent.to_string(), ..granted.clone() };
        let is_granted = sized.size() == granted.size();
        Some(if is_granted { granted.clone() } else { sized })
    };
    granted.iter().filter_map(size).collect()
}

fn condition(object: &GpuResize, failure: Option<&Failure>) -> Condition {
    let status = if failure.is_none() { "True" } else { "False" };
    let known = object.condition(APPLIED_CONDITION).filter(|known| known.status == status);
    let message = "the containers of the claim are held to the sizes".to_owned();
    let now = || Time(Timestamp::from_second(Timestamp::now().as_second()).unwrap_or_default());
    Condition {
        type_: APPLIED_CONDITION.to_owned(),
        status: status.to_owned(),
        reason: failure.map_or("Applied", |failure| failure.reason).to_owned(),
        message: failure.map_or(message, |failure| failure.message.clone()),
        observed_generation: object.metadata.generation,
        last_transition_time: known.map_or_else(now, |known| known.last_transition_time.clone()),
    }
}
