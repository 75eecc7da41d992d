//! Two allocators on one pool: tessera-controller, and kube-scheduler with its own allocator of
//! devices.
//!
//! Half of the pods are for kube-scheduler: their claims tolerate every taint of devices, the fence
//! among them, and carry a GpuConfig that tessera-controller refuses and kube-scheduler does not
//! read. Without the policies nothing stops it, and the two hand out one device twice: that is what
//! shows that the trial can see it. With the policies the same load must never do so: the taint
//! keeps kube-scheduler from the claims of the one half, the policy from those of the other.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::{DeleteParams, PostParams};
use serde_json::{Value, json};
use tessera_api::slice::Fence;

use super::bench::Bench;
use super::overcommit::{self, Overcommitted};
use super::pod_watch::{PodWatch, Seen};
use super::progress::Progress;
use super::{lost_claims, policies};
use crate::harness::TrialOutcome;
use crate::hollow::{HollowNodes, Shape};
use crate::inventory::DRIVER;
use crate::random::Random;
use crate::runner::Outcome;

/// Sixteen GPUs, about a third of what the pods that are there at a time want.
const NODES: u32 = 2;
const GPUS: u32 = 8;
const PODS_AT_A_TIME: usize = 48;

/// The longest time without any pod's end. kube-scheduler looks again after five minutes at pods
/// that no event has brought back.
const STALL: Duration = Duration::from_secs(330);

/// Claims of one pod.
const MOST_CLAIMS: u64 = 3;

/// Without a fence one claim in a hundred is handed out on top of another. So many without any
/// would be a trial that sees nothing.
const UNFENCED_CLAIMS: usize = 2000;

pub(super) async fn unfenced(bench: Bench) -> TrialOutcome {
    let seen = policies::without(&bench, async {
        // An error is an outcome here, and which one decides.
        Ok(allocate(&bench, UNFENCED_CLAIMS).await)
    });
    match seen.await? {
        Err(error) if error.is::<Overcommitted>() => {
            println!("    as it should be without the fence: {error}");
            Ok(Outcome::Held(vec![]))
        }
        Err(error) => Err(error),
        Ok(_) => {
            anyhow::bail!(
                "{UNFENCED_CLAIMS} claims without a fence, and no device was handed out twice"
            )
        }
    }
}

pub(super) async fn fenced(bench: Bench) -> TrialOutcome {
    let claims = bench.sizes().fenced_claims;
    let denied = allocate(&bench, claims).await?;
    println!("    {denied} of {claims} claims were kube-scheduler's to allocate, and denied to it");
    anyhow::ensure!(denied > 0, "kube-scheduler never tried to allocate anything");
    Ok(Outcome::Held(vec![]))
}

/// Has so many claims allocated or denied (or given up: [`lost_claims`]), some at a time, on nodes
/// of their own. Gives how many were denied; an error if a device is given out twice.
async fn allocate(bench: &Bench, claims: usize) -> anyhow::Result<usize> {
    let shape = Shape { nodes: NODES, gpus: GPUS, fence: Fence::Managed };
    let hollow = HollowNodes::join(&bench.client, bench.namespace(), shape).await?;
    let mut load = Load::new(bench, &hollow, claims);
    let outcome = tokio::select! {
        Err(error) = hollow.keep_ready() => Err(error),
        outcome = overcommit::never_during(bench, lost_claims::given_up_during(bench, load.run())) => outcome,
    };
    // Without a kubelet nobody else ends them.
    bench
        .pods()
        .delete_collection(&DeleteParams::default().grace_period(0), &Default::default())
        .await?;
    hollow.leave().await?;
    outcome.map(|()| load.denied)
}

/// Whose claims a pod has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Allocator {
    Controller,
    Scheduler,
}

/// Pods come, are deleted as soon as they are bound or denied, and make room for the next.
struct Load<'a> {
    bench: &'a Bench,
    hollow: &'a HollowNodes,
    random: Random,
    claims: usize,
    pods: usize,
    asked: usize,
    done: usize,
    denied: usize,
    /// Pods that are there, and how many claims each has.
    there: BTreeMap<String, usize>,
}

impl<'a> Load<'a> {
    fn new(bench: &'a Bench, hollow: &'a HollowNodes, claims: usize) -> Self {
        let seed = Random::fresh_seed();
        println!("    seed {seed}");
        let (random, there) = (Random::new(seed), BTreeMap::new());
        Self { bench, hollow, random, claims, pods: 0, asked: 0, done: 0, denied: 0, there }
    }

    async fn run(&mut self) -> anyhow::Result<()> {
        self.templates().await?;
        let mut progress = Progress::new("claims", self.claims);
        let mut watch = PodWatch::of(self.bench.pods());
        for _ in 0..PODS_AT_A_TIME {
            self.create().await?;
        }
        let mut last_end = Instant::now();
        while self.done < self.claims {
            let left = STALL.saturating_sub(last_end.elapsed());
            let Ok(seen) = tokio::time::timeout(left, watch.next()).await else {
                return Err(self.stalled().await);
            };
            let before = self.done;
            match seen? {
                Seen::There(pod) => self.look_at(&pod).await?,
                Seen::Gone(pod) => self.ended(&pod.name_any(), is_denied(&pod)).await?,
                Seen::All(pods) => self.compare(&pods).await?,
            }
            if self.done > before {
                last_end = Instant::now();
                progress.at(self.done, || format!(", {} of them denied", self.denied));
            }
        }
        Ok(())
    }

    /// Deletes the pod once it is bound or denied.
    async fn look_at(&self, pod: &Pod) -> anyhow::Result<()> {
        match pod.metadata.deletion_timestamp.is_none() && (is_bound(pod) || is_denied(pod)) {
            true => self.delete(&pod.name_any()).await,
            false => Ok(()),
        }
    }

    /// After a gap in the watch. Whether those that went in it had been denied is not known.
    async fn compare(&mut self, pods: &[Pod]) -> anyhow::Result<()> {
        let is_listed = |name: &&String| pods.iter().any(|pod| pod.name_any() == **name);
        let gone: Vec<String> =
            self.there.keys().filter(|name| !is_listed(name)).cloned().collect();
        for name in gone {
            self.ended(&name, false).await?;
        }
        for pod in pods {
            self.look_at(pod).await?;
        }
        Ok(())
    }

    /// Makes room for the next.
    async fn ended(&mut self, name: &str, denied: bool) -> anyhow::Result<()> {
        let Some(claims) = self.there.remove(name) else { return Ok(()) };
        self.done += claims;
        self.denied += if denied { claims } else { 0 };
        self.create().await
    }

    async fn stalled(&self) -> anyhow::Error {
        let pods = self.bench.pods().list(&Default::default()).await;
        let states: Vec<String> = pods
            .iter()
            .flat_map(|pods| &pods.items)
            .map(|pod| format!("{}: {}", pod.name_any(), json!(pod.status)))
            .collect();
        let known = self.there.len();
        anyhow::anyhow!(
            "no pod ended for {STALL:?}; {known} should be there, and are:\n{}",
            states.join("\n")
        )
    }

    /// A pod may be seen twice before it is seen to be gone.
    async fn delete(&self, pod: &str) -> anyhow::Result<()> {
        self.bench.delete_if_there(pod, &DeleteParams::default().grace_period(0)).await
    }

    /// The next pod, while there are claims to ask for.
    async fn create(&mut self) -> anyhow::Result<()> {
        if self.asked >= self.claims {
            return Ok(());
        }
        self.pods += 1;
        let allocator =
            if self.pods.is_multiple_of(2) { Allocator::Controller } else { Allocator::Scheduler };
        let entries = 1..=self.random.between(1, MOST_CLAIMS);
        let claims: Vec<Value> = entries
            .map(|entry| {
                let size = *self.random.one_of(&SIZES);
                let template = template_name(size, allocator);
                json!({"name": format!("gpu-{entry}"), "resourceClaimTemplateName": template})
            })
            .collect();
        self.asked += claims.len();
        let (node_selector, tolerations) = self.hollow.placement();
        let name = format!("pod-{}", self.pods);
        let pod = json!({
            "metadata": {"name": name},
            "spec": {
                "nodeSelector": node_selector,
                "tolerations": tolerations,
                "containers": [{"name": "never-started", "image": "tessera/none"}],
                "resourceClaims": claims,
            },
        });
        // Before it is created: its first event may come before the answer.
        self.there.insert(name, claims.len());
        self.bench.pods().create(&PostParams::default(), &serde_json::from_value(pod)?).await?;
        Ok(())
    }

    async fn templates(&self) -> anyhow::Result<()> {
        for size in SIZES {
            for allocator in [Allocator::Controller, Allocator::Scheduler] {
                let devices = devices(size, allocator);
                self.bench.template_of(&template_name(size, allocator), devices).await?;
            }
        }
        Ok(())
    }
}

/// Of GPUs of 80 GiB.
const SIZES: [&str; 3] = ["24Gi", "40Gi", "80Gi"];

fn template_name(size: &str, allocator: Allocator) -> String {
    format!("{allocator:?}-{size}").to_lowercase()
}

fn devices(memory: &str, allocator: Allocator) -> Value {
    let exactly = json!({"deviceClassName": DRIVER, "capacity": {"requests": {"memory": memory}}});
    let mut devices = json!({"requests": [{"name": "gpu", "exactly": exactly}]});
    if allocator == Allocator::Scheduler {
        // Without a key: a claim that names the fence is refused when it is created.
        devices["requests"][0]["exactly"]["tolerations"] = json!([{"operator": "Exists"}]);
        let parameters = json!({"apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "GpuConfig", "allocator": "kube-scheduler"});
        devices["config"] = json!([{"opaque": {"driver": DRIVER, "parameters": parameters}}]);
    }
    devices
}

fn is_bound(pod: &Pod) -> bool {
    pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some())
}

/// The policy has kept kube-scheduler from allocating the pod's claims.
fn is_denied(pod: &Pod) -> bool {
    if is_bound(pod) {
        return false;
    }
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let messages = conditions.filter_map(|condition| condition.message.as_deref());
    messages.into_iter().any(|message| message.contains("only tessera-controller allocates"))
}
