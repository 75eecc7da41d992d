//! Pods of random shapes come and go, and GPUs fail and recover, while everything happens that an
//! API server can do to its clients.

mod failing;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use futures::TryStreamExt;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{DeleteParams, PostParams};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, ResourceExt};
use serde::Serialize;
use serde_json::{Value, json};

use self::failing::FailingGpus;
use super::bench::{Bench, holder, phase};
use super::ledger::DeviceLedger;
use super::residue;
use crate::harness::TrialOutcome;
use crate::inventory::{DRIVER, GpuInventory};
use crate::random::Random;
use crate::runner::{Figure, Outcome};
use crate::wait::{self, Verdict};

/// How long faults go on, seconds.
const LENGTH: u64 = 20;

/// Between two pods that come or go.
const PACE: Duration = Duration::from_millis(200);

/// So many pods live at once. With the shapes below they fit on twelve GPUs, however they are
/// spread.
const MOST: usize = 16;

/// A pause of the controller after failures (20 s, doubled, and 60 s where the API server was away)
/// may begin with the last fault.
const PATIENCE: Duration = Duration::from_secs(300);

/// Memory and cores of the shapes.
const SHAPES: [(&str, &str, &str); 4] = [
    ("crumb", "1Gi", "1"),
    ("slice", "8Gi", "10"),
    ("quarter", "19Gi", "25"),
    ("half", "38Gi", "40"),
];

/// Lives through one plan after the other. All of them together must have had every kind of fault:
/// a short one may miss a rare kind.
pub(super) async fn survived(bench: Bench, seeds: Vec<u64>) -> TrialOutcome {
    for (name, memory, cores) in SHAPES {
        bench.template(name, DRIVER, json!({"memory": memory, "cores": cores})).await?;
    }
    let (mut happened, mut figures) = (BTreeMap::<String, u64>::new(), Vec::new());
    for seed in seeds {
        let (counts, settled) = survived_one(&bench, seed)
            .await
            .with_context(|| format!("seed {seed}; replay it with TESSERA_CHAOS_SEED={seed}"))?;
        counts.into_iter().for_each(|(kind, count)| *happened.entry(kind).or_default() += count);
        figures.push(Figure { of: "last fault -> all pods run".to_owned(), took: settled });
    }
    // Who replays a seed wants to see what it did.
    let replayed = figures.len() == 1;
    let missing: Vec<_> =
        happened.iter().filter(|(_, count)| **count == 0).map(|(kind, _)| kind.as_str()).collect();
    anyhow::ensure!(replayed || missing.is_empty(), "these faults have not happened: {missing:?}");
    Ok(Outcome::Held(figures))
}

/// How often each kind of fault happened, and how long it took until all was well after the last.
type Survived = anyhow::Result<(BTreeMap<String, u64>, Duration)>;

async fn survived_one(bench: &Bench, seed: u64) -> Survived {
    let hands = bench.hands()?;
    let ledger = DeviceLedger::new(&GpuInventory::read(&bench.client).await?);
    let mut gpus = FailingGpus::of(bench, hands, seed).await?;
    let outcome = tokio::select! {
        seen = watch_over(bench, ledger) => Err(seen.err().unwrap_or_else(|| anyhow::anyhow!("the watch ended"))),
        outcome = live(bench, seed, &mut gpus) => outcome,
    };
    // Also after a failure: whatever comes next begins with whole GPUs and a plan of its own.
    gpus.recover().await?;
    while hands.run(&["chaos", "end"]).await.is_err() && report(bench).await?.is_none() {
        tokio::task::yield_now().await;
    }
    outcome
}

async fn live(bench: &Bench, seed: u64, gpus: &mut FailingGpus<'_>) -> Survived {
    let hands = bench.hands()?;
    hands.run(&["chaos", "begin", &seed.to_string(), &LENGTH.to_string()]).await?;
    let (mut random, mut living, mut made) = (Random::new(seed), Vec::<String>::new(), 0);
    let mut ticks = tokio::time::interval(PACE);
    let report = loop {
        ticks.tick().await;
        if let Some(report) = report(bench).await? {
            break report;
        }
        if random.percent(20) {
            gpus.change().await?;
        }
        let is_full = living.len() >= MOST;
        if is_full || (!living.is_empty() && random.percent(33)) {
            let name = random.one_of(&living).clone();
            living.retain(|other| *other != name);
            bench.pods().delete(&name, &DeleteParams::default()).await?;
        } else {
            made += 1;
            let name = format!("pod-{made}");
            create(bench, &name, &mut random).await?;
            living.push(name);
        }
    };
    let calm = Instant::now();
    settled(bench, &living).await?;
    let settled = calm.elapsed();
    gpus.recover().await?;
    gpus.published_whole(bench).await?;
    for name in &living {
        bench.pods().delete(name, &DeleteParams::default()).await?;
    }
    settled_gone(bench).await?;
    residue::none(bench.clone()).await?;
    println!("  seed {seed}: {made} pods; {report:?}");
    Ok((report, settled))
}

/// A pod with one claim or two.
async fn create(bench: &Bench, name: &str, random: &mut Random) -> anyhow::Result<()> {
    let (shape, ..) = random.one_of(&SHAPES);
    let mut pod = holder(name, json!({"name": "gpu", "resourceClaimTemplateName": shape}));
    // Small ones, so that everything fits in the end.
    let (second, ..) = random.one_of(&SHAPES[..2]);
    if random.percent(25) {
        let entry =
            |list: &mut Value, entry: Value| list.as_array_mut().map(|list| list.push(entry));
        entry(
            &mut pod["spec"]["resourceClaims"],
            json!({"name": "more", "resourceClaimTemplateName": second}),
        );
        entry(&mut pod["spec"]["containers"][0]["resources"]["claims"], json!({"name": "more"}));
    }
    bench.pods().create(&PostParams::default(), &serde_json::from_value(pod)?).await?;
    Ok(())
}

/// Waits until exactly these pods are there, and run.
async fn settled(bench: &Bench, living: &[String]) -> anyhow::Result<()> {
    let judge = |pods: &[Pod]| {
        if let Some(failed) = pods.iter().find(|pod| phase(pod) == "Failed") {
            return Verdict::Hopeless(json!(failed.status).to_string());
        }
        let runs = |pod: &Pod| phase(pod) == "Running" && pod.metadata.deletion_timestamp.is_none();
        // What became of them says why: it is all that is left of a cluster that is gone.
        let told = |pod: &Pod| {
            format!(
                "{} ({}, {})",
                pod.name_any(),
                json!(pod.spec.as_ref().and_then(|spec| spec.node_name.as_ref())),
                json!(pod.status)
            )
        };
        let not_yet: Vec<_> = pods.iter().filter(|pod| !runs(pod)).map(told).collect();
        match not_yet.is_empty() && pods.len() == living.len() {
            true => Verdict::Done(()),
            false => Verdict::NotYet(format!("{} pods, {not_yet:?} do not run", pods.len())),
        }
    };
    Ok(wait::until(bench.pods(), Default::default(), "all pods to run", PATIENCE, judge).await?)
}

/// Waits until no pod and no claim is left.
async fn settled_gone(bench: &Bench) -> anyhow::Result<()> {
    wait::until(
        bench.pods(),
        Default::default(),
        "all pods to be gone",
        PATIENCE,
        none_left::<Pod>,
    )
    .await?;
    let claims = none_left::<ResourceClaim>;
    wait::until(bench.claims(), Default::default(), "all claims to be gone", PATIENCE, claims)
        .await?;
    Ok(())
}

fn none_left<K: ResourceExt + Serialize>(objects: &[K]) -> Verdict<()> {
    // What keeps them says who does not let go, as above.
    let told = |object: &K| format!("{} ({})", object.name_any(), json!(object));
    let left: Vec<_> = objects.iter().map(told).collect();
    if left.is_empty() { Verdict::Done(()) } else { Verdict::NotYet(left.join(", ")) }
}

/// How often each kind of fault has happened; none while faults still happen.
async fn report(bench: &Bench) -> anyhow::Result<Option<BTreeMap<String, u64>>> {
    let text = bench.hands()?.run(&["chaos", "report"]).await?;
    let counts = text.lines().filter_map(|line| {
        let (kind, count) = line.split_once(' ')?;
        Some((kind.to_owned(), count.parse().ok()?))
    });
    Ok(Some(counts.collect::<BTreeMap<_, _>>()).filter(|report| !report.is_empty()))
}

/// Looks at every change of every claim: what devices give, and that no share is given twice. Ends
/// only with an error.
async fn watch_over(bench: &Bench, mut ledger: DeviceLedger) -> anyhow::Result<()> {
    let claims: Api<ResourceClaim> = Api::all(bench.client.clone());
    let mut shares: BTreeMap<String, String> = BTreeMap::new();
    let mut stream = Box::pin(watcher(claims, watcher::Config::default()).default_backoff());
    loop {
        match stream.try_next().await {
            Ok(Some(watcher::Event::Apply(claim) | watcher::Event::InitApply(claim))) => {
                ledger.see(&claim).map_err(|error| anyhow::anyhow!("over-committed: {error}"))?;
                let uid = claim.uid().unwrap_or_default();
                for share in shares_of(&claim) {
                    let owner = shares.entry(share.clone()).or_insert_with(|| uid.clone());
                    anyhow::ensure!(
                        *owner == uid,
                        "share {share} was given to {owner} and to {uid}"
                    );
                }
            }
            Ok(Some(watcher::Event::Delete(claim))) => ledger.forget(&claim),
            // A second listing would have missed moments.
            Ok(Some(watcher::Event::Init)) if ledger.holding() > 0 => {
                anyhow::bail!("the watch over the devices was interrupted")
            }
            // All watches break now and then. It goes on where it was.
            Ok(_) | Err(_) => {}
        }
    }
}

fn shares_of(claim: &ResourceClaim) -> Vec<String> {
    let allocation = claim.status.as_ref().and_then(|status| status.allocation.as_ref());
    let results = allocation.and_then(|allocation| allocation.devices.as_ref()?.results.as_ref());
    results.into_iter().flatten().filter_map(|result| result.share_id.clone()).collect()
}
