//! The load: pods created as fast as they can be, or at a rate, and what became of them when.

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
use tokio::time::{Instant, interval, sleep_until};

use super::plan::Workload;
use super::usage;
use crate::inventory::DRIVER;

/// Requests of the client under way at once.
const AT_ONCE: usize = 32;

/// A round in which no pod was bound for so long has failed. The longest pause of kube-scheduler
/// for one pod is 10 s.
const STALLED: Duration = Duration::from_secs(90);

/// A line about the progress comes this often.
const TELL: Duration = Duration::from_secs(5);

/// The template of the claims.
const TEMPLATE: &str = "share";

/// What became of one pod. Times are those at which this client sent or saw something, all by one
/// clock.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PodTimes {
    /// The request that creates it was sent.
    pub created: Instant,
    /// Its claim was there.
    pub claimed: Instant,
    /// Its claim was allocated.
    pub allocated: Instant,
    /// It was bound.
    pub bound: Instant,
}

/// Creates pods in one namespace and sees them bound.
pub struct Load<'a> {
    client: &'a Client,
    namespace: &'a str,
    workload: &'a Workload,
    placement: (Value, Value),
    pids: &'a Path,
}

impl<'a> Load<'a> {
    /// A load in that namespace, on the nodes of `placement` (node selector and tolerations), while
    /// the components of `pids` ([`usage::read`]) run.
    pub fn new(
        client: &'a Client,
        namespace: &'a str,
        workload: &'a Workload,
        placement: (Value, Value),
        pids: &'a Path,
    ) -> Self {
        Self { client, namespace, workload, placement, pids }
    }

    /// Makes the template that all claims come from.
    ///
    /// # Errors
    /// What the API server says.
    pub async fn prepare(&self) -> anyhow::Result<()> {
        let Workload { memory, cores, .. } = self.workload;
        let capacity =
            json!({"requests": {"memory": format!("{memory}Gi"), "cores": cores.to_string()}});
        let request =
            json!({"name": "gpu", "exactly": {"deviceClassName": DRIVER, "capacity": capacity}});
        let template = json!({
            "metadata": {"name": TEMPLATE}, "spec": {"spec": {"devices": {"requests": [request]}}},
        });
        let templates: Api<ResourceClaimTemplate> =
            Api::namespaced(self.client.clone(), self.namespace);
        templates.create(&PostParams::default(), &serde_json::from_value(template)?).await?;
        Ok(())
    }

    /// Creates so many pods, `NAME-1` and so on, and waits until each is bound.
    ///
    /// # Errors
    /// What the API server says; that a component has ended, or that no pod was bound for a long
    /// time.
    pub async fn run(
        &self,
        name: &str,
        pods: u32,
        rate: Option<u32>,
    ) -> anyhow::Result<Vec<PodTimes>> {
        let mut watched = Watched::open(self.client, self.namespace, name).await?;
        let (created, ()) =
            tokio::try_join!(self.create(name, pods, rate), watched.all_bound(pods, self.pids))?;
        let times = created.into_iter().map(|(pod, at)| watched.times(&pod, at));
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
                let pod = serde_json::from_value(self.pod(&name))?;
                sleep_until(due).await;
                let sent = Instant::now();
                api.create(&PostParams::default(), &pod)
                    .await
                    .with_context(|| format!("creating pod {name}"))?;
                Ok((name, sent))
            }
        });
        creating.buffer_unordered(AT_ONCE).try_collect().await
    }

    fn pod(&self, name: &str) -> Value {
        let (node_selector, tolerations) = &self.placement;
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

/// A change that is seen.
enum Change {
    Pod(Box<Pod>),
    Claim(Box<ResourceClaim>),
    /// A kind has been listed.
    Listed,
}

/// When things were seen of one pod.
#[derive(Default)]
struct Sighting {
    claimed: Option<Instant>,
    allocated: Option<Instant>,
    bound: Option<Instant>,
}

/// What is seen of the pods of one name.
struct Watched {
    changes: Pin<Box<BoxStream<'static, anyhow::Result<Change>>>>,
    prefix: String,
    seen: BTreeMap<String, Sighting>,
    bound: u32,
}

impl Watched {
    /// Begins to watch; what is created afterwards is seen.
    async fn open(client: &Client, namespace: &str, name: &str) -> anyhow::Result<Self> {
        let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
        let claims: Api<ResourceClaim> = Api::namespaced(client.clone(), namespace);
        let changes = stream::select(changes(pods, Change::Pod), changes(claims, Change::Claim));
        let changes = Box::pin(changes.boxed());
        let mut watched =
            Self { changes, prefix: format!("{name}-"), seen: BTreeMap::new(), bound: 0 };
        for _ in 0..2 {
            while !matches!(watched.next().await?, Change::Listed) {}
        }
        Ok(watched)
    }

    async fn next(&mut self) -> anyhow::Result<Change> {
        self.changes.next().await.context("invariant: a watcher never ends")?
    }

    /// Waits until so many pods are bound. Nothing starts a component again that ends meanwhile, so
    /// that ends the wait.
    async fn all_bound(&mut self, pods: u32, pids: &Path) -> anyhow::Result<()> {
        let began = Instant::now();
        let mut stalled = began + STALLED;
        let mut tell = interval(TELL);
        tell.tick().await;
        while self.bound < pods {
            let before = self.bound;
            tokio::select! {
                change = self.next() => self.take(change?),
                _ = tell.tick() => {
                    usage::read(pids)?;
                    eprintln!("    {} of {pods} pods bound after {:.0} s", self.bound, began.elapsed().as_secs_f64());
                }
                () = sleep_until(stalled) => anyhow::bail!(
                    "{} of {pods} pods are bound, and none was in the last {} s: the logs of the control plane say why",
                    self.bound, STALLED.as_secs()
                ),
            }
            if self.bound > before {
                stalled = Instant::now() + STALLED;
            }
        }
        Ok(())
    }

    fn take(&mut self, change: Change) {
        let now = Instant::now();
        match change {
            Change::Listed => {}
            Change::Pod(pod) => {
                let name = pod.name_any();
                if !name.starts_with(&self.prefix) {
                    return;
                }
                let sighting = self.seen.entry(name).or_default();
                let is_bound = pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some());
                if is_bound && sighting.bound.is_none() {
                    sighting.bound = Some(now);
                    self.bound += 1;
                }
            }
            Change::Claim(claim) => {
                let Some(pod) = owner(&claim).filter(|pod| pod.starts_with(&self.prefix)) else {
                    return;
                };
                let sighting = self.seen.entry(pod).or_default();
                sighting.claimed.get_or_insert(now);
                if claim.status.as_ref().is_some_and(|status| status.allocation.is_some()) {
                    sighting.allocated.get_or_insert(now);
                }
            }
        }
    }

    fn times(&self, pod: &str, created: Instant) -> anyhow::Result<PodTimes> {
        let seen = self.seen.get(pod).with_context(|| format!("nothing was seen of pod {pod}"))?;
        let bound = seen.bound.with_context(|| format!("pod {pod} was not bound"))?;
        // Kinds are watched one by one: that a claim was allocated may be seen after what came of
        // it.
        let claimed = seen.claimed.unwrap_or(bound);
        let allocated = seen.allocated.unwrap_or(bound);
        Ok(PodTimes { created, claimed, allocated, bound })
    }
}

fn changes<K>(
    api: Api<K>,
    wrap: fn(Box<K>) -> Change,
) -> impl futures::Stream<Item = anyhow::Result<Change>> + Send + 'static
where
    K: kube::Resource + Clone + serde::de::DeserializeOwned + std::fmt::Debug + Send + 'static,
{
    watcher(api, watcher::Config::default()).filter_map(move |event| async move {
        match event {
            Ok(Event::Apply(object) | Event::InitApply(object)) => Some(Ok(wrap(Box::new(object)))),
            Ok(Event::InitDone) => Some(Ok(Change::Listed)),
            Ok(Event::Init | Event::Delete(_)) => None,
            Err(error) => Some(Err(
                anyhow::Error::new(error).context("a watch failed, so times would be wrong")
            )),
        }
    })
}

/// The pod that the claim was made for.
fn owner(claim: &ResourceClaim) -> Option<String> {
    let mut owners = claim.owner_references().iter().filter(|owner| owner.kind == "Pod");
    owners.next().map(|owner| owner.name.clone())
}
