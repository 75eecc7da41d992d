//! The parts of kube-scheduler needed here.
//!
//! ```text
//! watches -> queue (active, backing off, unschedulable, gated) -> cycle::decide (pure) -> binding
//!              ^                                               |  no node fits
//!              +---------- events that may help <--------------+-> condition, event, deallocate
//! ```
//!
//! Follows pkg/scheduler of Kubernetes 1.37.1 with its default features: filters run in the default
//! order, and the first that rejects a node gives the reason; claims are reserved in PreBind by
//! updates that are retried after conflicts; PostFilter deallocates a claim that was unavailable on
//! some node. One pod at a time, binding included.
//!
//! Like the real one, it allocates claims itself if their devices' taints permit: `allocation`.
//! Left out: preemption, ports, volumes, pod affinity, spreading, extended resources backed by
//! devices. Of several fitting nodes it selects the least requested one, then the first by name;
//! the real one breaks ties at random.

mod affinity;
mod allocation;
mod binding;
mod conditions;
mod cycle;
mod filter;
mod queue;
mod waiting;

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, DeviceTaintRule, ResourceClaim, ResourceSlice};
use kube::{Api, Client, ResourceExt};
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};

use self::allocation::{Allocations, Devices};
use self::binding::BindError;
use self::conditions::Conditions;
use self::cycle::{ClusterState, Plugin, Verdict};
use self::queue::{PodQueue, Rejection};
use self::waiting::{WaitingPod, WaitingPods};
use crate::api::{ApiServer, User};
use crate::informer::{Change, Informer, Key};
use crate::pod_claim::{self, PodClaim};

/// Configuration of a [`Scheduler`].
#[derive(Clone, Debug)]
pub struct SchedulerOptions {
    /// Scheduler name; pods of other schedulers are ignored.
    pub name: String,
    /// Back-off after a pod's first failed attempt. It doubles with each further failure.
    pub first_backoff: Duration,
    /// Maximum back-off.
    pub max_backoff: Duration,
    /// True to try pods in back-off early while no other pod is active, as 1.33 and newer do by
    /// default.
    pub pop_from_backoff: bool,
    /// Time after which a pod is retried without an event.
    pub max_wait: Duration,
}

impl Default for SchedulerOptions {
    /// Returns the defaults of kube-scheduler 1.37.
    fn default() -> Self {
        Self {
            name: "default-scheduler".to_owned(),
            first_backoff: Duration::from_secs(1),
            max_backoff: Duration::from_secs(10),
            pop_from_backoff: true,
            max_wait: Duration::from_secs(5 * 60),
        }
    }
}

/// A running scheduler. Dropping it ends it soon; [`Scheduler::stop`] waits for that.
pub struct Scheduler {
    task: JoinHandle<()>,
    stop: DropGuard,
}

impl Scheduler {
    /// Starts a scheduler as user `system:kube-scheduler`.
    pub fn start(api: &ApiServer, options: SchedulerOptions) -> Self {
        let stop = CancellationToken::new();
        let client = api.client(&User::named("system:kube-scheduler"));
        let task = tokio::spawn(Loop::new(client, options).run(stop.clone()));
        Self { task, stop: stop.drop_guard() }
    }

    /// Stops it between two pods.
    pub async fn stop(self) {
        let Self { task, stop } = self;
        drop(stop);
        if let Err(error) = task.await {
            tracing::error!(%error, "fake scheduler failed");
        }
    }
}

struct Loop {
    options: SchedulerOptions,
    binder: binding::Binder,
    pods: Informer<Pod>,
    nodes: Informer<Node>,
    claims: Informer<ResourceClaim>,
    classes: Informer<DeviceClass>,
    slices: Informer<ResourceSlice>,
    rules: Informer<DeviceTaintRule>,
    devices: Devices,
    queue: PodQueue,
    waiting: WaitingPods,
}

impl Loop {
    fn new(client: Client, options: SchedulerOptions) -> Self {
        Self {
            binder: binding::Binder::new(client.clone(), &options.name),
            pods: Informer::start(Api::all(client.clone())),
            nodes: Informer::start(Api::all(client.clone())),
            claims: Informer::start(Api::all(client.clone())),
            classes: Informer::start(Api::all(client.clone())),
            slices: Informer::start(Api::all(client.clone())),
            rules: Informer::start(Api::all(client)),
            devices: Devices::default(),
            queue: PodQueue::new(&options),
            waiting: WaitingPods::default(),
            options,
        }
    }

    async fn run(mut self, stop: CancellationToken) {
        loop {
            let synced = self.is_synced();
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                changes = self.nodes.next() => changes.iter().for_each(|change| self.node_changed(change)),
                changes = self.classes.next() => self.classes_changed(&changes),
                changes = self.slices.next() => self.slices_changed(&changes),
                changes = self.rules.next() => self.rules_changed(&changes),
                changes = self.claims.next() => changes.iter().for_each(|change| self.claim_changed(change)),
                changes = self.pods.next() => changes.iter().for_each(|change| self.pod_changed(change)),
                () = std::future::ready(()), if synced && self.queue.has_next() => self.schedule_next().await,
                () = self.queue.wait_until_due() => {}
                key = self.waiting.next_poll() => self.continue_binding(&key).await,
            }
        }
    }

    fn is_synced(&self) -> bool {
        self.pods.is_synced()
            && self.nodes.is_synced()
            && self.claims.is_synced()
            && self.classes.is_synced()
            && self.slices.is_synced()
            && self.rules.is_synced()
    }

    fn classes_changed(&mut self, changes: &[Change<DeviceClass>]) {
        for change in changes {
            match &change.new {
                Some(class) => self.devices.put_class(class),
                None => self.devices.remove_class(&change.key.1),
            }
        }
        self.devices_changed(!changes.is_empty());
    }

    fn slices_changed(&mut self, changes: &[Change<ResourceSlice>]) {
        for change in changes {
            match &change.new {
                Some(slice) => self.devices.put_slice(slice),
                None => self.devices.remove_slice(&change.key.1),
            }
        }
        self.devices_changed(changes.iter().any(|change| change.new.is_some()));
    }

    fn rules_changed(&mut self, changes: &[Change<DeviceTaintRule>]) {
        for change in changes {
            match &change.new {
                Some(rule) => self.devices.put_rule(rule),
                None => self.devices.remove_rule(&change.key.1),
            }
        }
        self.devices_changed(!changes.is_empty());
    }

    /// Wakes every pod that waits for devices.
    fn devices_changed(&mut self, changed: bool) {
        if changed {
            self.queue.wake(|rejection| rejection.plugins.contains(&Plugin::DynamicResources));
        }
    }

    fn node_changed(&mut self, change: &Change<Node>) {
        let schedulable = |node: &Node| {
            (
                node.spec.clone(),
                node.metadata.labels.clone(),
                node.status
                    .as_ref()
                    .map(|status| (status.allocatable.clone(), filter::is_ready(node))),
            )
        };
        let same = match (&change.old, &change.new) {
            (Some(old), Some(new)) => schedulable(old) == schedulable(new),
            (_, None) => true,
            (None, Some(_)) => false,
        };
        if !same {
            self.queue.wake(|_| true);
        }
    }

    fn claim_changed(&mut self, change: &Change<ResourceClaim>) {
        let was_allocated = change.old.as_ref().is_some_and(|old| pod_claim::is_allocated(old));
        let is_allocated = change.new.as_ref().is_some_and(|new| pod_claim::is_allocated(new));
        self.devices_changed(was_allocated && !is_allocated);
        let status_changed = match (&change.old, &change.new) {
            (Some(old), Some(new)) => old.status != new.status,
            (old, new) => old.is_some() != new.is_some(),
        };
        let pods = self.pods.in_namespace(&change.key.0);
        let users: Vec<Arc<Pod>> =
            pods.filter(|pod| pod_claim::uses(pod, &change.key)).cloned().collect();
        for pod in users {
            // Gating depends on more than the status: creation, deletion, owner.
            self.admit(&pod);
            if status_changed && change.new.is_some() {
                let key = crate::informer::key(pod.as_ref());
                self.queue.wake(|rejection| {
                    rejection.key == key && rejection.plugins.contains(&Plugin::DynamicResources)
                });
            }
        }
    }

    fn pod_changed(&mut self, change: &Change<Pod>) {
        let Some(pod) = &change.new else {
            self.queue.remove(&change.key);
            self.queue.wake(|rejection| rejection.plugins.contains(&Plugin::NodeResourcesFit));
            return;
        };
        if pod_claim::is_terminal(pod) {
            self.queue.remove(&change.key);
            self.queue.wake(|rejection| rejection.plugins.contains(&Plugin::NodeResourcesFit));
            return;
        }
        let replaced = change.old.as_ref().is_some_and(|old| old.uid() != pod.uid());
        if replaced {
            self.queue.remove(&change.key);
        }
        // Changes written by the scheduler itself (conditions, nomination) do not count.
        let relevant_fields = |pod: &Pod| {
            let claims =
                pod.status.as_ref().and_then(|status| status.resource_claim_statuses.clone());
            (
                pod.spec.clone(),
                pod.metadata.labels.clone(),
                claims,
                pod.metadata.deletion_timestamp.clone(),
            )
        };
        if change
            .old
            .as_ref()
            .is_none_or(|old| replaced || relevant_fields(old) != relevant_fields(pod))
        {
            self.admit(pod);
            self.queue.wake(|rejection| rejection.key == change.key);
        }
    }

    /// Adds a pod to the queue, gates it, or removes it.
    fn admit(&mut self, pod: &Pod) {
        let key = crate::informer::key(pod);
        let spec = pod.spec.as_ref();
        let is_own =
            spec.is_some_and(|spec| spec.scheduler_name.as_deref() == Some(&self.options.name));
        let wanted = is_own
            && pod_claim::node_name(pod).is_none()
            && pod.metadata.deletion_timestamp.is_none()
            && !pod_claim::is_terminal(pod);
        if !wanted {
            self.queue.remove(&key);
            self.waiting.0.remove(&key);
            return;
        }
        if self.waiting.0.contains_key(&key) {
            return;
        }
        let gates = spec
            .and_then(|spec| spec.scheduling_gates.as_ref())
            .is_some_and(|gates| !gates.is_empty());
        if gates || self.claims_of(pod).is_none() {
            self.queue.gate(&key);
            return;
        }
        let priority = spec.and_then(|spec| spec.priority).unwrap_or(0);
        self.queue.add(&key, priority);
    }

    /// Returns the pod's claims, or `None` if one is missing, being deleted, or another pod's.
    fn claims_of(&self, pod: &Pod) -> Option<Vec<Arc<ResourceClaim>>> {
        let namespace = pod.namespace().unwrap_or_default();
        let mut claims = Vec::new();
        for entry in pod_claim::entries(pod) {
            let found = PodClaim::of(pod, entry);
            let name = match &found {
                PodClaim::NotCreated => return None,
                PodClaim::NotNeeded => continue,
                PodClaim::Named(name) | PodClaim::Generated(name) => name,
            };
            let claim = self.claims.get(&(namespace.clone(), name.clone()))?;
            let foreign =
                matches!(found, PodClaim::Generated(_)) && !pod_claim::is_for_pod(pod, claim);
            if foreign || claim.metadata.deletion_timestamp.is_some() {
                return None;
            }
            claims.push(claim.clone());
        }
        Some(claims)
    }

    async fn schedule_next(&mut self) {
        let Some(key) = self.queue.pop() else { return };
        let Some(pod) = self.pods.get(&key).cloned() else { return };
        let Some(claims) = self.claims_of(&pod) else {
            self.queue.gate(&key);
            return;
        };
        let verdict = {
            let nodes: Vec<&Node> = self.nodes.values().map(AsRef::as_ref).collect();
            let is_waiting = |pod: &&Pod| self.waiting.0.contains_key(&crate::informer::key(*pod));
            let pods = self.pods.values().map(AsRef::as_ref).filter(|pod| !is_waiting(pod));
            let assumed = self.waiting.0.values().map(|waiting| &waiting.pod);
            let pods: Vec<&Pod> = pods.chain(assumed).collect();
            let all = self.claims.values().collect();
            cycle::decide(
                &pod,
                &claims,
                &ClusterState { nodes, pods, claims: all, devices: &self.devices },
            )
        };
        match verdict {
            Verdict::Fits { node, allocations } => {
                self.bind(&key, &pod, &claims, allocations, &node).await;
            }
            Verdict::Error(message) => {
                self.queue.failed(&key);
                self.record_status_write(self.binder.failed(&pod, &message).await);
            }
            Verdict::NoFit(failure) => {
                let mut notes = Vec::new();
                if let Some(claim) = failure.deallocate.and_then(|index| claims.get(index)) {
                    match self.binder.deallocate(claim).await {
                        Ok(claim) => {
                            self.claims.assume(claim);
                            notes.push("deallocation of ResourceClaim completed".to_owned());
                        }
                        Err(error) => {
                            tracing::debug!(
                                error = &error as &dyn std::error::Error,
                                "cannot deallocate claim"
                            )
                        }
                    }
                }
                notes.push(failure.preemption);
                let message = format!("{} {}.", failure.message, notes.join(", "));
                self.queue.reject(Rejection { key, plugins: failure.plugins });
                self.record_status_write(self.binder.unschedulable(&pod, &message).await);
            }
        }
    }

    async fn bind(
        &mut self,
        key: &Key,
        pod: &Pod,
        claims: &[Arc<ResourceClaim>],
        allocations: Allocations,
        node: &str,
    ) {
        match self.binder.reserve_all(pod, claims, allocations, node).await {
            Ok(reserved) => {
                reserved.iter().cloned().for_each(|claim| self.claims.assume(claim));
                self.queue.remove(key);
                let waiting = WaitingPod::new(pod, node, reserved);
                self.waiting.0.insert(key.clone(), waiting);
                self.continue_binding(key).await;
            }
            Err(error) => self.binding_failed(key, pod, &error).await,
        }
    }

    /// Binds a pod whose binding conditions are true, and ends its attempt if one has failed.
    async fn continue_binding(&mut self, key: &Key) {
        let Some(waiting) = self.waiting.0.get(key) else { return };
        let Some(pod) = self.pods.get(key).filter(|pod| pod.uid() == waiting.pod.uid()).cloned()
        else {
            self.waiting.0.remove(key);
            return;
        };
        let claims = waiting.claims.iter().map(crate::informer::key);
        let claims = claims.filter_map(|claim| self.claims.get(&claim));
        let states: Vec<Conditions> = claims.map(|claim| Conditions::of(claim)).collect();
        let is_late = waiting.since.elapsed() >= waiting::TIMEOUT;
        let is_pending = states.contains(&Conditions::Pending);
        let has_failed = states.contains(&Conditions::Failed);
        if is_pending && !has_failed && !is_late {
            return;
        }
        let Some(waiting) = self.waiting.0.remove(key) else { return };
        if !is_pending && !has_failed {
            return self.finish_binding(key, &pod, waiting).await;
        }
        self.binder.give_back(&pod, &waiting.claims).await;
        self.admit(&pod);
        let failure =
            if has_failed { BindError::ConditionFailed } else { BindError::ConditionTimeout };
        self.binding_failed(key, &pod, &failure).await;
    }

    async fn finish_binding(&mut self, key: &Key, pod: &Pod, waiting: WaitingPod) {
        match self.binder.bind(pod, waiting.claims, &waiting.node).await {
            Ok(bound) => {
                bound.claims.into_iter().for_each(|claim| self.claims.assume(claim));
                bound.pod.into_iter().for_each(|pod| self.pods.assume(pod));
                self.queue.remove(key);
            }
            Err(error) => {
                self.admit(pod);
                self.binding_failed(key, pod, &error).await;
            }
        }
    }

    async fn binding_failed(&mut self, key: &Key, pod: &Pod, error: &BindError) {
        tracing::debug!(pod = key.1, error = error as &dyn std::error::Error, "cannot bind pod");
        self.queue.failed(key);
        self.record_status_write(self.binder.failed(pod, &error.condition_message()).await);
    }

    fn record_status_write(&mut self, written: Result<Option<Pod>, kube::Error>) {
        match written {
            Ok(Some(pod)) => self.pods.assume(pod),
            Ok(None) => {}
            Err(error) => {
                tracing::debug!(
                    error = &error as &dyn std::error::Error,
                    "cannot write pod condition"
                )
            }
        }
    }
}
