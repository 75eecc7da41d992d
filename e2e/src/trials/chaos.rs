//! Chaos trial with API server faults. Meanwhile pods of random sizes are created and deleted, and
//! GPUs fail and recover.

mod failing_gpus;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use futures::TryStreamExt;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::DeleteParams;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};

use self::failing_gpus::FailingGpus;
use super::device_usage::DeviceUsage;
use super::residue;
use super::test_bed::{TestBed, holder, phase, wait_all};
use crate::harness::TrialOutcome;
use crate::inventory::DRIVER;
use crate::leftovers::device_results;
use crate::random::Random;
use crate::runner::{Figure, Outcome};
use crate::wait::CheckResult;

/// Duration of the faults, in seconds.
const FAULT_DURATION_S: u64 = 20;

/// Interval between pod creations or deletions.
const INTERVAL: Duration = Duration::from_millis(200);

/// Maximum number of pods at the same time. With the sizes below they always fit on twelve GPUs.
const MAX_PODS: usize = 16;

/// Memory and cores of the claim templates.
const SIZES: [(&str, &str, &str); 4] = [
    ("tiny", "1Gi", "1"),
    ("small", "8Gi", "10"),
    ("quarter", "19Gi", "25"),
    ("half", "38Gi", "40"),
];

/// Runs one fault plan per seed. Together they must inject every kind of fault; a short plan may
/// lack a rare kind.
pub(super) async fn run(test_bed: TestBed, seeds: Vec<u64>) -> TrialOutcome {
    for (name, memory, cores) in SIZES {
        test_bed.create_template(name, DRIVER, json!({"memory": memory, "cores": cores})).await?;
    }
    let (mut injected, mut figures) = (BTreeMap::<String, u64>::new(), Vec::new());
    for seed in seeds {
        let (counts, settled) = run_seed(&test_bed, seed)
            .await
            .with_context(|| format!("seed {seed}; replay it with TESSERA_CHAOS_SEED={seed}"))?;
        counts.into_iter().for_each(|(kind, count)| *injected.entry(kind).or_default() += count);
        figures.push(Figure { name: "last fault -> all pods run".to_owned(), duration: settled });
    }
    // A replayed seed may lack kinds of faults.
    let replayed = figures.len() == 1;
    let missing: Vec<_> =
        injected.iter().filter(|(_, count)| **count == 0).map(|(kind, _)| kind.as_str()).collect();
    anyhow::ensure!(
        replayed || missing.is_empty(),
        "fault kinds that were not injected: {missing:?}"
    );
    Ok(Outcome::Passed(figures))
}

/// Number of injected faults by kind, and the time from the last fault to the recovery.
type SeedResult = anyhow::Result<(BTreeMap<String, u64>, Duration)>;

async fn run_seed(test_bed: &TestBed, seed: u64) -> SeedResult {
    let operations = test_bed.operations()?;
    let usage = DeviceUsage::new(&test_bed.published_gpus().await?);
    let mut gpus = FailingGpus::new(test_bed, operations, seed).await?;
    let outcome = tokio::select! {
        seen = observe_claims(test_bed, usage) => Err(seen.err().unwrap_or_else(|| anyhow::anyhow!("claim watch ended"))),
        outcome = run_load(test_bed, seed, &mut gpus) => outcome,
    };
    // Also after a failure: later trials need healthy GPUs and no fault plan.
    gpus.recover().await?;
    while operations.run(&["chaos", "end"]).await.is_err()
        && fault_report(test_bed).await?.is_none()
    {
        tokio::task::yield_now().await;
    }
    outcome
}

async fn run_load(test_bed: &TestBed, seed: u64, gpus: &mut FailingGpus<'_>) -> SeedResult {
    let operations = test_bed.operations()?;
    operations.run(&["chaos", "begin", &seed.to_string(), &FAULT_DURATION_S.to_string()]).await?;
    let (mut random, mut alive, mut made) = (Random::new(seed), Vec::<String>::new(), 0);
    let mut ticks = tokio::time::interval(INTERVAL);
    let report = loop {
        ticks.tick().await;
        if let Some(report) = fault_report(test_bed).await? {
            break report;
        }
        if random.chance(20) {
            gpus.toggle().await?;
        }
        let is_full = alive.len() >= MAX_PODS;
        if is_full || (!alive.is_empty() && random.chance(33)) {
            let name = random.one_of(&alive).clone();
            alive.retain(|other| *other != name);
            test_bed.pods().delete(&name, &DeleteParams::default()).await?;
        } else {
            made += 1;
            let name = format!("pod-{made}");
            create(test_bed, &name, &mut random).await?;
            alive.push(name);
        }
    };
    let faults_ended = Instant::now();
    wait_all_running(test_bed, &alive).await?;
    let settled = faults_ended.elapsed();
    gpus.recover().await?;
    gpus.wait_published_healthy(test_bed).await?;
    for name in &alive {
        test_bed.pods().delete(name, &DeleteParams::default()).await?;
    }
    wait_all_deleted(test_bed).await?;
    residue::check(test_bed.clone()).await?;
    println!("  seed {seed}: {made} pods; {report:?}");
    Ok((report, settled))
}

/// Creates a pod with one or two claims.
async fn create(test_bed: &TestBed, name: &str, random: &mut Random) -> anyhow::Result<()> {
    let (size, ..) = random.one_of(&SIZES);
    let mut pod = holder(name, json!({"name": "gpu", "resourceClaimTemplateName": size}));
    // The second claim is small, so that all pods fit.
    let (second, ..) = random.one_of(&SIZES[..2]);
    if random.chance(25) {
        let entry =
            |list: &mut Value, entry: Value| list.as_array_mut().map(|list| list.push(entry));
        entry(
            &mut pod["spec"]["resourceClaims"],
            json!({"name": "more", "resourceClaimTemplateName": second}),
        );
        entry(&mut pod["spec"]["containers"][0]["resources"]["claims"], json!({"name": "more"}));
    }
    test_bed.create(pod).await?;
    Ok(())
}

/// Waits until exactly these pods exist and run.
async fn wait_all_running(test_bed: &TestBed, alive: &[String]) -> anyhow::Result<()> {
    let check = |pods: &[Pod]| {
        if let Some(failed) = pods.iter().find(|pod| phase(pod) == "Failed") {
            return CheckResult::Impossible(json!(failed.status).to_string());
        }
        let runs = |pod: &Pod| phase(pod) == "Running" && pod.metadata.deletion_timestamp.is_none();
        // The status is part of the message, because the cluster is deleted after a failure.
        let describe = |pod: &Pod| {
            format!(
                "{} ({}, {})",
                pod.name_any(),
                json!(pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref())),
                json!(pod.status)
            )
        };
        let not_yet: Vec<_> = pods.iter().filter(|pod| !runs(pod)).map(describe).collect();
        CheckResult::done_if(not_yet.is_empty() && pods.len() == alive.len(), || {
            format!("{} pods; not running: {not_yet:?}", pods.len())
        })
    };
    wait_all(test_bed.pods(), "all pods to run", check).await
}

/// Waits until no pod and no claim is left.
async fn wait_all_deleted(test_bed: &TestBed) -> anyhow::Result<()> {
    wait_all(test_bed.pods(), "all pods to be deleted", CheckResult::none_left).await?;
    wait_all(test_bed.claims(), "all claims to be deleted", CheckResult::none_left).await
}

/// Returns the number of injected faults by kind; `None` while faults are injected.
async fn fault_report(test_bed: &TestBed) -> anyhow::Result<Option<BTreeMap<String, u64>>> {
    let text = test_bed.operations()?.run(&["chaos", "report"]).await?;
    let counts = text.lines().filter_map(|line| {
        let (kind, count) = line.split_once(' ')?;
        Some((kind.to_owned(), count.parse().ok()?))
    });
    Ok(Some(counts.collect::<BTreeMap<_, _>>()).filter(|report| !report.is_empty()))
}

/// Observes every change of every claim. Checks that no device is overcommitted and no share is
/// allocated twice. Returns only with an error.
async fn observe_claims(test_bed: &TestBed, mut usage: DeviceUsage) -> anyhow::Result<()> {
    let claims: Api<ResourceClaim> = Api::all(test_bed.client.clone());
    let mut shares: BTreeMap<String, String> = BTreeMap::new();
    let mut stream = Box::pin(watcher(claims, watcher::Config::default()).default_backoff());
    loop {
        match stream.try_next().await {
            Ok(Some(watcher::Event::Apply(claim) | watcher::Event::InitApply(claim))) => {
                usage.update(&claim).map_err(|error| anyhow::anyhow!("overcommitted: {error}"))?;
                let uid = claim.uid().unwrap_or_default();
                for share in shares_of(&claim) {
                    let owner = shares.entry(share.clone()).or_insert_with(|| uid.clone());
                    anyhow::ensure!(
                        *owner == uid,
                        "share {share} was allocated to claims {owner} and {uid}"
                    );
                }
            }
            Ok(Some(watcher::Event::Delete(claim))) => usage.remove(&claim),
            // A second listing misses intermediate states.
            Ok(Some(watcher::Event::Init)) if usage.consumer_count() > 0 => {
                anyhow::bail!("claim watch was interrupted")
            }
            // Watches may fail at any time; the watcher resumes.
            Ok(_) | Err(_) => {}
        }
    }
}

fn shares_of(claim: &ResourceClaim) -> Vec<String> {
    device_results(claim).filter_map(|result| result.share_id.clone()).collect()
}
