//! Trials of GpuQuotas: pods that race for one never exceed it, and a wrong quota is refused.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::Context as _;
use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use tessera_api::Quantity;
use tessera_api::quota::GpuQuota;
use tokio::sync::watch;

use super::claim_watch::{self, ClaimSums};
use super::controller::ControllerSwitch;
use super::test_bed::{TestBed, phase, wait_all, wait_one};
use crate::harness::TrialOutcome;
use crate::inventory::DRIVER;
use crate::leftovers::device_results;
use crate::runner::{Figure, Outcome};
use crate::wait::{self, CheckResult};

const QUOTA: &str = "team";
const PODS: usize = 64;
/// Time limit for the pods of a real cluster of two cores.
const TIMEOUT: Duration = Duration::from_secs(300);

/// 64 pods race for a quota, the controller restarts amid them, and the quota is raised and
/// lowered.
pub(super) async fn race(test_bed: TestBed) -> TrialOutcome {
    test_bed.node_with("h100", 8).await?;
    test_bed.create_template("share", DRIVER, json!({"memory": "1Gi", "cores": "1"})).await?;
    let (limit, seen) = watch::channel(gib(5));
    let sums = MemoryOfNamespace {
        namespace: test_bed.namespace().to_owned(),
        claims: BTreeMap::new(),
        limit: seen,
    };
    claim_watch::check_during(&test_bed, sums, race_for(&test_bed, &limit)).await
}

/// A quota that cannot be enforced is refused when it is written, with the field.
pub(super) async fn refuse(test_bed: TestBed) -> TrialOutcome {
    let wrong = [
        (json!({"memory": "lots"}), "spec.hard.memory"),
        (json!({"cores": -1}), "spec.hard.cores"),
        (json!({"gpus": "-1"}), "spec.hard.gpus"),
        (json!({}), "spec.hard"),
    ];
    for (hard, field) in wrong {
        match create(&test_bed, &hard).await {
            Err(kube::Error::Api(status)) if status.code == 422 => {
                let text = &status.message;
                anyhow::ensure!(text.contains(field), "{hard}: the message lacks {field}: {text}");
            }
            other => anyhow::bail!("{hard}: not refused: {other:?}"),
        }
    }
    // Numbers are read as they are written.
    create(&test_bed, &json!({"memory": 5_368_709_120_i64, "cores": 200, "gpus": "2"})).await?;
    wait_status(&test_bed, "memory", "5Gi", "0").await?;
    Ok(Outcome::Passed(vec![]))
}

async fn race_for(test_bed: &TestBed, limit: &watch::Sender<Quantity>) -> TrialOutcome {
    create(test_bed, &json!({"memory": "5Gi"})).await?;
    // Until then the controller may not have seen it.
    wait_status(test_bed, "memory", "5Gi", "0").await?;
    let began = std::time::Instant::now();
    let switch = ControllerSwitch::detect(test_bed).await?;
    for number in 0..PODS {
        test_bed.create_holder(&format!("pod-{number:02}"), "share").await?;
        if number == PODS / 2 {
            switch.stop().await?;
        }
    }
    switch.start().await?;
    wait_running(test_bed, 5).await?;
    let took = began.elapsed();
    wait_status(test_bed, "memory", "5Gi", "5Gi").await?;
    check_explained(test_bed).await?;

    let running = running(test_bed).await?;
    test_bed.delete(&running).await?;
    wait_running(test_bed, 5).await.context("after the first five have ended")?;

    limit.send_replace(gib(8));
    set(test_bed, "8Gi").await?;
    wait_running(test_bed, 8).await.context("after the quota was raised")?;
    lower(test_bed, limit).await?;
    check_plugin(test_bed).await?;
    test_bed.pods().delete_collection(&DeleteParams::default(), &ListParams::default()).await?;
    let check = CheckResult::none_left;
    wait::until(test_bed.pods(), Default::default(), "all pods to be deleted", TIMEOUT, check)
        .await?;
    wait_status(test_bed, "memory", "2Gi", "0").await?;
    let name = format!("{PODS} pods created, controller restarted -> 5 run by the quota");
    Ok(Outcome::Passed(vec![Figure { name, duration: took }]))
}

/// Lowers the quota below what is allocated: nothing is taken away, and nothing is added before
/// enough has ended.
async fn lower(test_bed: &TestBed, limit: &watch::Sender<Quantity>) -> anyhow::Result<()> {
    set(test_bed, "2Gi").await?;
    wait_status(test_bed, "memory", "2Gi", "8Gi").await?;
    limit.send_replace(gib(2));
    let mut before = running(test_bed).await?;
    anyhow::ensure!(before.len() == 8, "a lowered quota has ended a pod: {before:?} run");
    before.truncate(7);
    test_bed.delete(&before).await?;
    wait_running(test_bed, 2).await.context("after the quota was lowered")
}

/// A pod that waits is told by an event, and by the plugin.
async fn check_explained(test_bed: &TestBed) -> anyhow::Result<()> {
    let events: Api<Event> = Api::namespaced(test_bed.client.clone(), test_bed.namespace());
    let check = |events: &[Event]| {
        let text = |event: &Event| event.message.clone().unwrap_or_default();
        let of_quota = |event: &&Event| event.reason.as_deref() == Some("QuotaExceeded");
        let texts: Vec<String> = events.iter().filter(of_quota).map(text).collect();
        let is_exact = |text: &String| {
            text.contains("over quota by 1Gi of memory (used 5Gi of 5Gi)")
                && text.contains(&format!("GpuQuota `{QUOTA}`"))
        };
        CheckResult::done_if(texts.iter().any(is_exact), || format!("{texts:?}"))
    };
    wait_all(events, "an event about the quota", check).await
}

async fn check_plugin(test_bed: &TestBed) -> anyhow::Result<()> {
    let Ok(plugin) = test_bed.plugin() else { return Ok(()) };
    let output = plugin.call(&["quota", "-n", test_bed.namespace()], "").await?;
    let quota = &output.result["quotas"][0];
    let expected = json!([{"resource": "memory", "used": "2Gi", "hard": "2Gi"}]);
    anyhow::ensure!(quota["resources"] == expected, "kubectl tessera quota: {}", output.result);
    let waiting = quota["waitingPods"].as_array().map_or(0, Vec::len);
    anyhow::ensure!(waiting == PODS - 5 - 7 - 2, "{waiting} pods wait: {quota}");
    Ok(())
}

fn quotas(test_bed: &TestBed) -> Api<GpuQuota> {
    Api::namespaced(test_bed.client.clone(), test_bed.namespace())
}

async fn create(test_bed: &TestBed, hard: &Value) -> Result<GpuQuota, kube::Error> {
    let quota = json!({"metadata": {"name": QUOTA}, "spec": {"hard": hard}});
    let quota = serde_json::from_value(quota).map_err(kube::Error::SerdeError)?;
    quotas(test_bed).create(&PostParams::default(), &quota).await
}

async fn set(test_bed: &TestBed, memory: &str) -> anyhow::Result<()> {
    let patch = Patch::Merge(json!({"spec": {"hard": {"memory": memory}}}));
    quotas(test_bed).patch(QUOTA, &PatchParams::default(), &patch).await?;
    Ok(())
}

/// Waits until the status of the quota has this limit and use.
async fn wait_status(
    test_bed: &TestBed,
    resource: &str,
    hard: &str,
    used: &str,
) -> anyhow::Result<()> {
    let check = |quota: Option<&GpuQuota>| {
        let status = quota.and_then(|quota| quota.status.clone()).unwrap_or_default();
        let is = |amounts: &BTreeMap<String, String>, amount: &str| {
            let known = amounts.get(resource).and_then(|text| Quantity::parse(text).ok());
            known.is_some() && known == Quantity::parse(amount).ok()
        };
        CheckResult::done_if(is(&status.hard, hard) && is(&status.used, used), || {
            format!("{status:?}")
        })
    };
    let what = format!("the status of the quota to be {used} of {hard}");
    wait_one(quotas(test_bed), QUOTA, &what, check).await
}

async fn running(test_bed: &TestBed) -> anyhow::Result<Vec<String>> {
    let pods = test_bed.pods().list(&ListParams::default()).await?;
    let running = pods.iter().filter(|pod| phase(pod) == "Running");
    Ok(running.map(ResourceExt::name_any).collect())
}

/// Waits until this number of pods runs.
async fn wait_running(test_bed: &TestBed, number: usize) -> anyhow::Result<()> {
    let check = |pods: &[Pod]| {
        let running = pods.iter().filter(|pod| phase(pod) == "Running").count();
        CheckResult::done_if(running == number, || format!("{running} of {number}"))
    };
    let what = format!("{number} pods to run");
    Ok(wait::until(test_bed.pods(), Default::default(), &what, TIMEOUT, check).await?)
}

fn gib(number: u64) -> Quantity {
    Quantity::from_mib(number << 10)
}

/// The memory that the claims of a namespace hold. It must not grow beyond the limit.
struct MemoryOfNamespace {
    namespace: String,
    claims: BTreeMap<String, Quantity>,
    limit: watch::Receiver<Quantity>,
}

impl MemoryOfNamespace {
    fn sum(&self) -> Quantity {
        self.claims
            .values()
            .fold(Quantity::ZERO, |sum, memory| sum.checked_add(*memory).unwrap_or(sum))
    }
}

impl ClaimSums for MemoryOfNamespace {
    fn update(&mut self, claim: &ResourceClaim) -> Result<(), String> {
        if claim.namespace().as_deref() != Some(&self.namespace) {
            return Ok(());
        }
        let before = self.sum();
        let amounts = device_results(claim).filter_map(|result| {
            Quantity::parse(&result.consumed_capacity.as_ref()?.get("memory")?.0).ok()
        });
        let memory = amounts.fold(Quantity::ZERO, |sum, m| sum.checked_add(m).unwrap_or(sum));
        self.claims.insert(claim.name_any(), memory);
        let (sum, limit) = (self.sum(), *self.limit.borrow());
        if sum > before && sum > limit {
            return Err(format!("{sum} are allocated of a quota of {limit}: {:?}", self.claims));
        }
        Ok(())
    }

    fn remove(&mut self, claim: &ResourceClaim) {
        if claim.namespace().as_deref() == Some(&self.namespace) {
            self.claims.remove(&claim.name_any());
        }
    }

    fn clear(&mut self) {
        self.claims.clear();
    }
}
