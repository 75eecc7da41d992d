//! Load generator: creates pods as fast as possible or at a rate, and records their progress.

use std::collections::BTreeMap;
use std::path::Path;
use std::pin::Pin;
use std::time::Duration;

use anyhow::Context;
use futures::stream::{self, BoxStream};
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceClaimTemplate};
use kube::api::PostParams;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};
use tessera_dialect::{Conversion, Converter, DIALECT_LABEL, Dialect, Settings, Verdict};
use tokio::time::{Instant, interval, sleep_until};

use super::plan::Workload;
use super::usage;
use crate::inventory::DRIVER;
use crate::trials::dialect_manifest;

/// Maximum number of concurrent requests.
const MAX_CONCURRENT_REQUESTS: usize = 32;

/// A round fails if no pod is bound for this time. kube-scheduler's longest backoff for a pod is 10
/// s.
const STALL_LIMIT: Duration = Duration::from_secs(90);

/// Interval of progress messages.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(5);

/// Name of the claim template.
const TEMPLATE: &str = "share";

/// Times of one pod's progress. This client takes them from one clock when it sends a request or
/// observes an event.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PodTimes {
    /// The request that creates the pod was sent.
    pub created: Instant,
    /// The pod's claim was observed.
    pub claimed: Instant,
    /// The claim's allocation was observed.
    pub allocated: Instant,
    /// The pod's binding was observed.
    pub bound: Instant,
}

/// Creates pods in one namespace and waits until they are bound.
pub struct Load<'a> {
    client: &'a Client,
    namespace: &'a str,
    workload: &'a Workload,
    placement: (Value, Value),
    pids: &'a Path,
    /// Pods that are created in turn: of other systems, or those that are written for them; empty
    /// for pods of the workload.
    foreign: Vec<Value>,
    /// Specifications of the templates of `foreign`; empty if the webhook converts them.
    templates: Vec<Value>,
}

/// Dialects of the pods that are compared with native ones. Their pods ask for less than a GPU.
const DIALECTS: [Dialect; 5] = [
    Dialect::FourParadigm,
    Dialect::VgpuManager,
    Dialect::Volcano,
    Dialect::Elastic,
    Dialect::Gpushare,
];

/// Time limit for the webhook to be registered.
const REGISTRATION: Duration = Duration::from_secs(60);

impl<'a> Load<'a> {
    /// Creates a load in that namespace, on the nodes of `placement` (node selector and
    /// tolerations). The components of `pids` must keep running (see [`usage::read`]).
    pub fn new(
        client: &'a Client,
        namespace: &'a str,
        workload: &'a Workload,
        placement: (Value, Value),
        pids: &'a Path,
    ) -> Self {
        let (foreign, templates) = (Vec::new(), Vec::new());
        Self { client, namespace, workload, placement, pids, foreign, templates }
    }

    /// Returns the load with pods of five other systems.
    ///
    /// # Errors
    /// A dialect has no pod.
    pub fn of_dialects(self) -> anyhow::Result<Self> {
        let foreign = DIALECTS.map(|dialect| {
            let mut pod = dialect_manifest(dialect.name(), "pod")?;
            pod["metadata"]["labels"] = json!({DIALECT_LABEL: dialect.name()});
            Ok(pod)
        });
        Ok(Self { foreign: foreign.into_iter().collect::<anyhow::Result<_>>()?, ..self })
    }

    /// Returns the load with the native pods that are written for those of other systems.
    ///
    /// # Errors
    /// A dialect has no pod, or its pod has no GPU.
    pub fn of_converted(self) -> anyhow::Result<Self> {
        let (mut foreign, mut templates) = (Vec::new(), Vec::new());
        for (number, dialect) in DIALECTS.into_iter().enumerate() {
            let converter = Converter::new(Settings::with_defaults(&[dialect]))?;
            let mut pod = dialect_manifest(dialect.name(), "pod")?;
            let verdict = converter.admit(&pod, self.namespace, dialect)?;
            let Verdict::Convert(Conversion { template: Some(template), patch, .. }) = verdict
            else {
                anyhow::bail!("the pod of {} has no GPU", dialect.name());
            };
            json_patch::patch(&mut pod, &patch)?;
            // As convert does, which writes no annotation.
            pod["metadata"]["annotations"] = json!({});
            let claim = &mut pod["spec"]["resourceClaims"][0];
            claim["resourceClaimTemplateName"] = native_template(number).into();
            foreign.push(pod);
            templates.push(template.spec);
        }
        Ok(Self { foreign, templates, ..self })
    }

    /// Creates the templates of native claims, and waits until pods of other systems are converted.
    ///
    /// # Errors
    /// Returns an error if the API server refuses the template, or does not convert a pod.
    pub async fn prepare(&self) -> anyhow::Result<()> {
        let templates: Api<ResourceClaimTemplate> =
            Api::namespaced(self.client.clone(), self.namespace);
        let create = async |template: Value| {
            templates.create(&PostParams::default(), &serde_json::from_value(template)?).await?;
            anyhow::Ok(())
        };
        for (number, spec) in self.templates.iter().enumerate() {
            create(json!({"metadata": {"name": native_template(number)}, "spec": spec})).await?;
        }
        if self.templates.is_empty() {
            for number in 1..=self.foreign.len() {
                self.wait_converted(u32::try_from(number)?).await?;
            }
        }
        let Workload { memory, cores, .. } = self.workload;
        let capacity =
            json!({"requests": {"memory": format!("{memory}Gi"), "cores": cores.to_string()}});
        let request =
            json!({"name": "gpu", "exactly": {"deviceClassName": DRIVER, "capacity": capacity}});
        create(json!({
            "metadata": {"name": TEMPLATE}, "spec": {"spec": {"devices": {"requests": [request]}}},
        }))
        .await
    }

    async fn wait_converted(&self, number: u32) -> anyhow::Result<()> {
        let api: Api<Pod> = Api::namespaced(self.client.clone(), self.namespace);
        let pod: Pod = serde_json::from_value(self.pod("probe", number))?;
        let dry_run = PostParams { dry_run: true, ..PostParams::default() };
        let end = Instant::now() + REGISTRATION;
        loop {
            let seen = match api.create(&dry_run, &pod).await {
                Ok(pod) if pod.spec.as_ref().is_some_and(|s| s.resource_claims.is_some()) => {
                    return Ok(());
                }
                Ok(_) => "it is created as it is".to_owned(),
                Err(error) => error.to_string(),
            };
            anyhow::ensure!(Instant::now() < end, "pod {number} is not converted: {seen}");
            sleep_until(Instant::now() + Duration::from_millis(200)).await;
        }
    }

    /// Creates `pods` pods, `NAME-1` and so on, and waits until each is bound.
    ///
    /// # Errors
    /// Returns an error if a request fails, a component exits, or no pod is bound for 90 s.
    pub async fn run(
        &self,
        name: &str,
        pods: u32,
        rate: Option<u32>,
    ) -> anyhow::Result<Vec<PodTimes>> {
        let mut observer = PodObserver::start(self.client, self.namespace, name).await?;
        let (created, ()) = tokio::try_join!(
            self.create(name, pods, rate),
            observer.wait_all_bound(pods, self.pids)
        )?;
        let times = created.into_iter().map(|(pod, at)| observer.times(&pod, at));
        times.collect()
    }

    async fn create(
        &self,
        name: &str,
        pods: u32,
        rate: Option<u32>,
    ) -> anyhow::Result<Vec<(String, Instant)>> {
        let api: Api<Pod> = Api::namespaced(self.client.clone(), self.namespace);
        let period = rate.map_or(Duration::ZERO, |rate| Duration::from_secs(1) / rate);
        let began = Instant::now();
        let creating = stream::iter(1..=pods).map(|number| {
            let (api, name, due) =
                (&api, format!("{name}-{number}"), began + period * (number - 1));
            async move {
                let pod = serde_json::from_value(self.pod(&name, number))?;
                sleep_until(due).await;
                let sent = Instant::now();
                api.create(&PostParams::default(), &pod)
                    .await
                    .with_context(|| format!("cannot create pod {name}"))?;
                Ok((name, sent))
            }
        });
        creating.buffer_unordered(MAX_CONCURRENT_REQUESTS).try_collect().await
    }

    fn pod(&self, name: &str, number: u32) -> Value {
        let (node_selector, tolerations) = &self.placement;
        if !self.foreign.is_empty() {
            let mut pod = self.foreign[number as usize % self.foreign.len()].clone();
            pod["metadata"]["name"] = name.into();
            pod["spec"]["nodeSelector"] = node_selector.clone();
            pod["spec"]["tolerations"] = tolerations.clone();
            return pod;
        }
        json!({
            "metadata": {"name": name},
            "spec": {
                "nodeSelector": node_selector,
                "tolerations": tolerations,
                "containers": [{
                    "name": "never-started",
                    "image": "tessera/none",
                    "resources": {"claims": [{"name": "gpu"}]},
                }],
                "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": TEMPLATE}],
            },
        })
    }
}

/// Returns the name of the template of the pods with this number.
fn native_template(number: usize) -> String {
    format!("native-{number}")
}

/// A watch event.
enum WatchEvent {
    Pod(Box<Pod>),
    Claim(Box<ResourceClaim>),
    /// The initial list of one kind is complete.
    Listed,
}

/// Times at which the states of one pod were observed.
#[derive(Default)]
struct ObservedTimes {
    claimed: Option<Instant>,
    allocated: Option<Instant>,
    bound: Option<Instant>,
}

/// Observed states of the pods with one name prefix.
struct PodObserver {
    changes: Pin<Box<BoxStream<'static, anyhow::Result<WatchEvent>>>>,
    prefix: String,
    seen: BTreeMap<String, ObservedTimes>,
    bound: u32,
}

impl PodObserver {
    /// Starts the watches; objects created afterwards are observed.
    async fn start(client: &Client, namespace: &str, name: &str) -> anyhow::Result<Self> {
        let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
        let claims: Api<ResourceClaim> = Api::namespaced(client.clone(), namespace);
        let changes =
            stream::select(changes(pods, WatchEvent::Pod), changes(claims, WatchEvent::Claim));
        let changes = Box::pin(changes.boxed());
        let mut observer =
            Self { changes, prefix: format!("{name}-"), seen: BTreeMap::new(), bound: 0 };
        for _ in 0..2 {
            while !matches!(observer.next().await?, WatchEvent::Listed) {}
        }
        Ok(observer)
    }

    async fn next(&mut self) -> anyhow::Result<WatchEvent> {
        self.changes.next().await.context("invariant: a watcher never ends")?
    }

    /// Waits until that many pods are bound. Components are not restarted, so the exit of one ends
    /// the wait with an error.
    async fn wait_all_bound(&mut self, pods: u32, pids: &Path) -> anyhow::Result<()> {
        let began = Instant::now();
        let mut stalled = began + STALL_LIMIT;
        let mut report = interval(PROGRESS_INTERVAL);
        report.tick().await;
        while self.bound < pods {
            let before = self.bound;
            tokio::select! {
                event = self.next() => self.record(event?),
                _ = report.tick() => {
                    usage::read(pids)?;
                    eprintln!("    {} of {pods} pods bound after {:.0} s", self.bound, began.elapsed().as_secs_f64());
                }
                () = sleep_until(stalled) => anyhow::bail!(
                    "{} of {pods} pods are bound, and none in the last {} s: see the logs of the control plane",
                    self.bound, STALL_LIMIT.as_secs()
                ),
            }
            if self.bound > before {
                stalled = Instant::now() + STALL_LIMIT;
            }
        }
        Ok(())
    }

    fn record(&mut self, event: WatchEvent) {
        let now = Instant::now();
        match event {
            WatchEvent::Listed => {}
            WatchEvent::Pod(pod) => {
                let name = pod.name_any();
                if !name.starts_with(&self.prefix) {
                    return;
                }
                let times = self.seen.entry(name).or_default();
                let is_bound = pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some());
                if is_bound && times.bound.is_none() {
                    times.bound = Some(now);
                    self.bound += 1;
                }
            }
            WatchEvent::Claim(claim) => {
                let Some(pod) = owner(&claim).filter(|pod| pod.starts_with(&self.prefix)) else {
                    return;
                };
                let times = self.seen.entry(pod).or_default();
                times.claimed.get_or_insert(now);
                if claim.status.as_ref().is_some_and(|status| status.allocation.is_some()) {
                    times.allocated.get_or_insert(now);
                }
            }
        }
    }

    fn times(&self, pod: &str, created: Instant) -> anyhow::Result<PodTimes> {
        let seen = self.seen.get(pod).with_context(|| format!("pod {pod} was not observed"))?;
        let bound = seen.bound.with_context(|| format!("pod {pod} was not bound"))?;
        // Each kind has its own watch, so an allocation may be observed after the binding that it
        // led to.
        let claimed = seen.claimed.unwrap_or(bound);
        let allocated = seen.allocated.unwrap_or(bound);
        Ok(PodTimes { created, claimed, allocated, bound })
    }
}

fn changes<K>(
    api: Api<K>,
    wrap: fn(Box<K>) -> WatchEvent,
) -> impl futures::Stream<Item = anyhow::Result<WatchEvent>> + Send + 'static
where
    K: kube::Resource + Clone + serde::de::DeserializeOwned + std::fmt::Debug + Send + 'static,
{
    watcher(api, watcher::Config::default()).filter_map(move |event| async move {
        match event {
            Ok(Event::Apply(object) | Event::InitApply(object)) => Some(Ok(wrap(Box::new(object)))),
            Ok(Event::InitDone) => Some(Ok(WatchEvent::Listed)),
            Ok(Event::Init | Event::Delete(_)) => None,
            Err(error) => Some(Err(
                anyhow::Error::new(error).context("a watch failed, so the times are invalid")
            )),
        }
    })
}

/// Returns the name of the pod that owns the claim.
fn owner(claim: &ResourceClaim) -> Option<String> {
    let mut owners = claim.owner_references().iter().filter(|owner| owner.kind == "Pod");
    owners.next().map(|owner| owner.name.clone())
}
