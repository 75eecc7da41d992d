//! The steps of the demo.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use futures::{AsyncBufReadExt, TryStreamExt};
use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use kube::api::{DeleteParams, ListParams, LogParams};
use kube::runtime::wait::await_condition;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, ResourceExt};
use serde_json::Value;
use tessera_api::events::Reporter;

use super::manifests::{self, POD, TEMPLATE};
use super::screen::Screen;
use super::tables;
use crate::testbed::TestBedOptions;

/// Far more than any step takes.
const TIMEOUT: Duration = Duration::from_secs(300);

pub(super) fn introduce(screen: &Screen, options: &TestBedOptions) {
    screen.title("Tessera: one GPU, many pods, each held to its share");
    let nodes: Vec<_> = options.nodes.iter().map(|(name, _)| name.as_str()).collect();
    screen.say(&format!("Starting a small cluster with the nodes {}.", nodes.join(" and ")));
    screen.say(
        "Real:      tessera-controller, tessera-driver on each node, the interceptor in each container.",
    );
    screen.say("Stand-ins: the GPUs (fake libnvidia-ml.so.1 and libcuda.so.1) and Kubernetes around it all.");
}

pub(super) fn keep(screen: &Screen, kubeconfig: &Path, directory: &Path) {
    screen.step("It is all yours");
    screen.quote(&format!(
        "export KUBECONFIG={}\nkubectl get pods,resourceclaims,resourceslices",
        kubeconfig.display()
    ));
    screen.say(&format!(
        "Logs of controller and drivers: {}. Ctrl-C ends everything.",
        directory.display()
    ));
}

pub(super) fn end(screen: &Screen) {
    screen.gap();
    screen.say("Everything is taken down.");
}

/// Everything that there is to see.
pub(super) async fn walk(screen: &Screen, client: &Client) -> anyhow::Result<()> {
    published(screen, client).await?;
    asked_for(screen, client).await?;
    packed(screen, client).await?;
    held(screen, client).await?;
    refused(screen, client).await?;
    room(screen, client).await
}

async fn published(screen: &Screen, client: &Client) -> anyhow::Result<()> {
    screen.step("The drivers found the GPUs through NVML and published them as ResourceSlices");
    let slices: Api<ResourceSlice> = Api::all(client.clone());
    let mut slices = slices.list(&ListParams::default()).await?.items;
    slices.sort_by_key(ResourceExt::name_any);
    screen.table(&tables::GPU_COLUMNS, &tables::gpus(&slices));
    Ok(())
}

async fn asked_for(screen: &Screen, client: &Client) -> anyhow::Result<()> {
    screen.step(
        "The administrator has made a DeviceClass for each type of GPU; a user asks for a share of one",
    );
    let classes: Api<DeviceClass> = Api::all(client.clone());
    let class = classes.get("h100.gpu.tessera.dev").await?;
    let selectors = class.spec.iter().flat_map(|spec| spec.selectors.iter().flatten());
    let selectors = selectors.filter_map(|selector| selector.cel.as_ref());
    let selectors: Vec<_> = selectors.map(|cel| format!("  - {}", cel.expression)).collect();
    screen.quote(&format!("DeviceClass {}\n{}", class.name_any(), selectors.join("\n")));
    screen.quote(TEMPLATE);
    screen.quote(POD);
    manifests::create(client, TEMPLATE).await
}

async fn packed(screen: &Screen, client: &Client) -> anyhow::Result<()> {
    screen.step("Four such pods: Binpack puts them on one GPU");
    let mut rows = Vec::new();
    for name in ["pod-1", "pod-2", "pod-3", "pod-4"] {
        manifests::create(client, &manifests::pod(name)).await?;
    }
    for name in ["pod-1", "pod-2", "pod-3", "pod-4"] {
        let pod = running(client, name).await?;
        let claim = claim_of(client, &pod).await?;
        let [node, gpu, memory, cores] =
            tables::allocation(&claim).context("a running pod has a GPU")?;
        rows.push(vec![name.to_owned(), claim.name_any(), node, gpu, memory, format!("{cores} %")]);
    }
    screen.table(&["POD", "CLAIM", "NODE", "GPU", "MEMORY", "COMPUTE"], &rows);
    let gpus: std::collections::BTreeSet<_> = rows.iter().map(|row| &row[3]).collect();
    anyhow::ensure!(gpus.len() == 1, "the pods are on {} GPUs", gpus.len());
    Ok(())
}

async fn held(screen: &Screen, client: &Client) -> anyhow::Result<()> {
    screen.step("Inside a container, CUDA and NVML know of that share and no more");
    let see = line(client, "pod-1", "see").await?;
    let filled = line(client, "pod-1", "filled").await?;
    let devices = see["devices"].as_array().map(Vec::as_slice).unwrap_or_default();
    let device = devices.first().context("the container sees no GPU")?;
    screen.good(&format!(
        "it sees {} GPU: {}",
        devices.len(),
        device["name"].as_str().unwrap_or_default()
    ));
    screen.good(&format!(
        "with {} in all by cuMemGetInfo, {} by nvmlDeviceGetMemoryInfo (the GPU has 79.65 GiB)",
        tables::gib(&device["cudaTotalBytes"]),
        tables::gib(&device["nvmlTotalBytes"])
    ));
    let refused = filled["refusedWith"].as_str().context("the container was not refused")?;
    screen.good(&format!(
        "it took {}, and then cuMemAlloc said {refused}",
        tables::gib(&filled["takenBytes"])
    ));
    screen.say(
        "Its 25 % of compute count for placement; it is held to them where its claim has a compute.policy.",
    );
    let share = Value::from(19_u64 << 30);
    anyhow::ensure!(
        device["cudaTotalBytes"] == share,
        "the container sees {} bytes",
        device["cudaTotalBytes"]
    );
    anyhow::ensure!(
        filled["takenBytes"].as_u64() <= share.as_u64(),
        "the container took {} bytes, more than its share",
        filled["takenBytes"]
    );
    Ok(())
}

async fn refused(screen: &Screen, client: &Client) -> anyhow::Result<()> {
    screen.step("A fifth pod finds no room, and is told why");
    manifests::create(client, &manifests::pod("pod-5")).await?;
    let events: Api<Event> = Api::namespaced(client.clone(), "default");
    let told = async {
        let mut stream = Box::pin(watcher(events, watcher::Config::default()).default_backoff());
        loop {
            if let Some(watcher::Event::Apply(event) | watcher::Event::InitApply(event)) =
                stream.try_next().await?
                && event.involved_object.name.as_deref() == Some("pod-5")
                && event.reporting_component.as_deref() == Some(Reporter::Controller.name())
            {
                return Ok::<_, watcher::Error>(event);
            }
        }
    };
    let event =
        tokio::time::timeout(TIMEOUT, told).await.context("nobody told pod-5 why it waits")??;
    let message = event.message.unwrap_or_default();
    screen.quote(&message.replacen("wait: ", "wait:\n  ", 1).replace("; ", "\n  "));
    Ok(())
}

async fn room(screen: &Screen, client: &Client) -> anyhow::Result<()> {
    screen.step("One of the four goes; the fifth gets its place at once");
    let claims: Api<ResourceClaim> = Api::namespaced(client.clone(), "default");
    let pods: Api<Pod> = Api::namespaced(client.clone(), "default");
    let waiting = claim_of(client, &pods.get("pod-5").await?).await?.name_any();
    let leaving = claim_of(client, &pods.get("pod-2").await?).await?.name_any();
    let measured = async {
        let mut stream = Box::pin(watcher(claims, watcher::Config::default()).default_backoff());
        let mut freed = None;
        loop {
            match stream.try_next().await? {
                Some(watcher::Event::InitDone) => {
                    pods.delete("pod-2", &DeleteParams::default()).await?;
                }
                Some(watcher::Event::Apply(claim)) if claim.name_any() == waiting => {
                    if let (Some(freed), Some(_)) = (freed, tables::allocation(&claim)) {
                        return Ok::<_, anyhow::Error>(Instant::now().duration_since(freed));
                    }
                }
                Some(watcher::Event::Apply(claim))
                    if claim.name_any() == leaving && tables::allocation(&claim).is_none() =>
                {
                    freed.get_or_insert_with(Instant::now);
                }
                Some(watcher::Event::Delete(claim)) if claim.name_any() == leaving => {
                    freed.get_or_insert_with(Instant::now);
                }
                _ => {}
            }
        }
    };
    let took =
        tokio::time::timeout(TIMEOUT, measured).await.context("pod-5 did not get the room")??;
    screen.good(&format!(
        "room appeared -> allocation written: {:.1} ms",
        took.as_secs_f64() * 1000.0
    ));
    running(client, "pod-5").await?;
    let see = line(client, "pod-5", "filled").await?;
    screen.good(&format!("pod-5 runs and took {}", tables::gib(&see["takenBytes"])));
    Ok(())
}

async fn running(client: &Client, name: &str) -> anyhow::Result<Pod> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), "default");
    let runs = |pod: Option<&Pod>| {
        let phase =
            pod.and_then(|pod| pod.status.as_ref()).and_then(|status| status.phase.as_deref());
        matches!(phase, Some("Running" | "Failed"))
    };
    let pod = tokio::time::timeout(TIMEOUT, await_condition(pods, name, runs)).await;
    let pod = pod
        .with_context(|| format!("{name} does not run"))??
        .with_context(|| format!("{name} is gone"))?;
    let status = serde_json::to_value(&pod.status)?;
    anyhow::ensure!(status["phase"] == "Running", "{name} failed: {}", status["containerStatuses"]);
    Ok(pod)
}

async fn claim_of(client: &Client, pod: &Pod) -> anyhow::Result<ResourceClaim> {
    let claims: Api<ResourceClaim> = Api::namespaced(client.clone(), "default");
    let statuses =
        pod.status.iter().flat_map(|status| status.resource_claim_statuses.iter().flatten());
    let name = statuses.into_iter().find_map(|status| status.resource_claim_name.clone());
    Ok(claims.get(&name.with_context(|| format!("{} has no claim", pod.name_any()))?).await?)
}

/// The first line of the probe's output with that event.
async fn line(client: &Client, pod: &str, event: &str) -> anyhow::Result<Value> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), "default");
    let parameters = LogParams { follow: true, ..LogParams::default() };
    let read = async {
        let mut lines = pods.log_stream(pod, &parameters).await?.lines();
        let mut said = Vec::new();
        while let Some(line) = lines.try_next().await? {
            match serde_json::from_str::<Value>(&line) {
                Ok(value) if value["event"] == event => return Ok(value),
                _ => said.push(line),
            }
        }
        anyhow::bail!("{pod} ended without saying `{event}`; it said: {}", said.join(" | "))
    };
    tokio::time::timeout(TIMEOUT, read)
        .await
        .with_context(|| format!("{pod} does not say `{event}`"))?
}
