//! Trials with two allocators on one pool: tessera-controller, and kube-scheduler's device
//! allocator.
//!
//! Half of the pods are for kube-scheduler: their claims tolerate every device taint, including the
//! managed taint, and have a GpuConfig that tessera-controller rejects and kube-scheduler ignores.
//! Without the admission policies, both allocate the same device; this shows that the trial detects
//! it. With the policies the same load must never overcommit a device: the taint excludes
//! kube-scheduler from one half of the claims, the policy from the other half.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt;
use kube::api::DeleteParams;
use serde_json::{Value, json};
use tessera_api::slice::Fence;

use super::claim_watch::WrongSum;
use super::overcommit;
use super::pod_watch::{PodEvent, PodWatch};
use super::progress::Progress;
use super::test_bed::TestBed;
use super::{lost_claims, policies};
use crate::harness::TrialOutcome;
use crate::hollow::{HollowNodes, HollowNodesSpec};
use crate::inventory::DRIVER;
use crate::random::Random;
use crate::runner::Outcome;

/// Sixteen GPUs, about a third of the capacity that the concurrent pods request.
const NODES: u32 = 2;
const GPUS: u32 = 8;
const MAX_PODS: usize = 48;

/// Maximum time without the end of a pod. kube-scheduler retries pods without a relevant event
/// after five minutes.
const STALL_LIMIT: Duration = Duration::from_secs(330);

/// Maximum number of claims per pod.
const MAX_CLAIMS: u64 = 3;

/// Number of claims without policies. About one in a hundred is overcommitted; none in this number
/// means that the trial detects nothing.
const CLAIMS_WITHOUT_POLICIES: usize = 2000;

pub(super) async fn without_policies(test_bed: TestBed) -> TrialOutcome {
    let seen = policies::without(&test_bed, async {
        // The type of the error decides.
        Ok(run_load(&test_bed, CLAIMS_WITHOUT_POLICIES).await)
    });
    match seen.await? {
        Err(error) if error.is::<WrongSum>() => {
            println!("    expected without policies: {error}");
            Ok(Outcome::Passed(vec![]))
        }
        Err(error) => Err(error),
        Ok(_) => {
            anyhow::bail!(
                "{CLAIMS_WITHOUT_POLICIES} claims without policies, and no device was overcommitted"
            )
        }
    }
}

pub(super) async fn with_policies(test_bed: TestBed) -> TrialOutcome {
    let claims = test_bed.sizes().two_allocator_claims;
    let denied = run_load(&test_bed, claims).await?;
    println!("    kube-scheduler was denied {denied} of {claims} claims");
    anyhow::ensure!(denied > 0, "kube-scheduler did not try to allocate a claim");
    Ok(Outcome::Passed(vec![]))
}

/// Runs a load of `claims` claims on its own nodes. Ends when each is allocated, denied, or deleted
/// by [`lost_claims`]. Returns the number of denied claims, or an error if a device is
/// overcommitted.
async fn run_load(test_bed: &TestBed, claims: usize) -> anyhow::Result<usize> {
    let spec = HollowNodesSpec { nodes: NODES, gpus: GPUS, fence: Fence::Taint };
    let hollow = HollowNodes::create(&test_bed.client, test_bed.namespace(), spec).await?;
    let mut load = Load::new(test_bed, &hollow, claims);
    let outcome = tokio::select! {
        Err(error) = hollow.keep_ready() => Err(error),
        outcome = overcommit::check_during(test_bed, lost_claims::delete_affected_during(test_bed, load.run())) => outcome,
    };
    // The nodes have no kubelet that would end the pods.
    test_bed
        .pods()
        .delete_collection(&DeleteParams::default().grace_period(0), &Default::default())
        .await?;
    hollow.delete().await?;
    outcome.map(|()| load.denied)
}

/// Intended allocator of a pod's claims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Allocator {
    Controller,
    Scheduler,
}

/// A load of pods. Each is deleted when it is bound or denied, and replaced by the next.
struct Load<'a> {
    test_bed: &'a TestBed,
    hollow: &'a HollowNodes,
    random: Random,
    claims: usize,
    pods: usize,
    requested: usize,
    done: usize,
    denied: usize,
    /// Existing pods, and the number of their claims.
    present: BTreeMap<String, usize>,
}

impl<'a> Load<'a> {
    fn new(test_bed: &'a TestBed, hollow: &'a HollowNodes, claims: usize) -> Self {
        let seed = Random::fresh_seed();
        println!("    seed {seed}");
        let (random, present) = (Random::new(seed), BTreeMap::new());
        Self {
            test_bed,
            hollow,
            random,
            claims,
            pods: 0,
            requested: 0,
            done: 0,
            denied: 0,
            present,
        }
    }

    async fn run(&mut self) -> anyhow::Result<()> {
        self.templates().await?;
        let mut progress = Progress::new("claims", self.claims);
        let mut watch = PodWatch::new(self.test_bed.pods());
        for _ in 0..MAX_PODS {
            self.create().await?;
        }
        let mut last_end = Instant::now();
        while self.done < self.claims {
            let remaining = STALL_LIMIT.saturating_sub(last_end.elapsed());
            let Ok(seen) = tokio::time::timeout(remaining, watch.next()).await else {
                return Err(self.stalled());
            };
            let before = self.done;
            match seen? {
                PodEvent::Changed(pod) => self.delete_if_finished(&pod).await?,
                PodEvent::Deleted(pod) => {
                    self.record_deleted(&pod.name_any(), is_denied(&pod)).await?
                }
                PodEvent::Listed(pods) => self.resync(&pods).await?,
            }
            if self.done > before {
                last_end = Instant::now();
                progress.report(self.done, || format!(", {} of them denied", self.denied));
            }
        }
        Ok(())
    }

    /// Deletes the pod if it is bound or denied.
    async fn delete_if_finished(&self, pod: &Pod) -> anyhow::Result<()> {
        match pod.metadata.deletion_timestamp.is_none() && (is_bound(pod) || is_denied(pod)) {
            true => self.delete(&pod.name_any()).await,
            false => Ok(()),
        }
    }

    /// Handles a gap in the watch. Pods deleted in it count as not denied.
    async fn resync(&mut self, pods: &[Pod]) -> anyhow::Result<()> {
        let is_listed = |name: &&String| pods.iter().any(|pod| pod.name_any() == **name);
        let deleted: Vec<String> =
            self.present.keys().filter(|name| !is_listed(name)).cloned().collect();
        for name in deleted {
            self.record_deleted(&name, false).await?;
        }
        for pod in pods {
            self.delete_if_finished(pod).await?;
        }
        Ok(())
    }

    /// Counts a deleted pod and creates the next one.
    async fn record_deleted(&mut self, name: &str, denied: bool) -> anyhow::Result<()> {
        let Some(claims) = self.present.remove(name) else { return Ok(()) };
        self.done += claims;
        self.denied += if denied { claims } else { 0 };
        self.create().await
    }

    fn stalled(&self) -> anyhow::Error {
        anyhow::anyhow!("no pod ended for {STALL_LIMIT:?}; expected: {:?}", self.present)
    }

    /// A pod may be observed twice before its deletion is.
    async fn delete(&self, pod: &str) -> anyhow::Result<()> {
        self.test_bed.delete_if_exists(pod, &DeleteParams::default().grace_period(0)).await
    }

    /// Creates the next pod while claims remain.
    async fn create(&mut self) -> anyhow::Result<()> {
        if self.requested >= self.claims {
            return Ok(());
        }
        self.pods += 1;
        let allocator =
            if self.pods.is_multiple_of(2) { Allocator::Controller } else { Allocator::Scheduler };
        let entries = 1..=self.random.between(1, MAX_CLAIMS);
        let claims: Vec<Value> = entries
            .map(|entry| {
                let size = *self.random.one_of(&SIZES);
                let template = template_name(size, allocator);
                json!({"name": format!("gpu-{entry}"), "resourceClaimTemplateName": template})
            })
            .collect();
        self.requested += claims.len();
        let name = format!("pod-{}", self.pods);
        let pod = self.hollow.pod(&name, &json!(claims));
        // Before the creation, because its first event may arrive before the response.
        self.present.insert(name, claims.len());
        self.test_bed.create(pod).await?;
        Ok(())
    }

    async fn templates(&self) -> anyhow::Result<()> {
        for size in SIZES {
            for allocator in [Allocator::Controller, Allocator::Scheduler] {
                let devices = devices(size, allocator);
                self.test_bed
                    .create_template_with(&template_name(size, allocator), devices)
                    .await?;
            }
        }
        Ok(())
    }
}

/// Memory sizes for GPUs of 80 GiB.
const SIZES: [&str; 3] = ["24Gi", "40Gi", "80Gi"];

fn template_name(size: &str, allocator: Allocator) -> String {
    format!("{allocator:?}-{size}").to_lowercase()
}

fn devices(memory: &str, allocator: Allocator) -> Value {
    let exactly = json!({"deviceClassName": DRIVER, "capacity": {"requests": {"memory": memory}}});
    let mut devices = json!({"requests": [{"name": "gpu", "exactly": exactly}]});
    if allocator == Allocator::Scheduler {
        // Without a key: the policies deny claims that name the managed taint.
        devices["requests"][0]["exactly"]["tolerations"] = json!([{"operator": "Exists"}]);
        let parameters = json!({"apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "GpuConfig", "allocator": "kube-scheduler"});
        devices["config"] = json!([{"opaque": {"driver": DRIVER, "parameters": parameters}}]);
    }
    devices
}

fn is_bound(pod: &Pod) -> bool {
    pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some())
}

/// Returns true if the policy denied kube-scheduler the allocation of the pod's claims.
fn is_denied(pod: &Pod) -> bool {
    if is_bound(pod) {
        return false;
    }
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let messages = conditions.filter_map(|condition| condition.message.as_deref());
    messages.into_iter().any(|message| message.contains("only tessera-controller allocates"))
}
