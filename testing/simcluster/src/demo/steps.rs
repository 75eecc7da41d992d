//! The steps of the demo.

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use futures::{AsyncBufReadExt, TryStreamExt};
use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use kube::api::{DeleteParams, ListParams, LogParams};
use kube::runtime::wait::await_condition;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, ResourceExt};
use serde_json::Value;
use tessera_api::events::Reporter;

use super::screen::Screen;
use super::{manifests, metrics, tables};
use crate::testbed::TestBedOptions;

pub(super) const TITLE: &str = "Tessera: many pods share one GPU, each within its limits";

/// Time limit of a step, far more than any takes.
const TIMEOUT: Duration = Duration::from_secs(300);

/// Pods that fill the GPU.
const PODS: [&str; 4] = ["pod-1", "pod-2", "pod-3", "pod-4"];

/// Memory of one share.
const SHARE_BYTES: u64 = 19 << 30;

/// Metric of the memory used by a share.
const SHARE_MEMORY_USED: &str = "tessera_share_memory_used_bytes";

/// Upper bound of the measured share of compute, in percent. The limit is 25, and without it the
/// process would use all of the GPU. An idle container may use 10 ms at once, 2 percent of half a
/// second. Tests with a virtual clock check how exact the limit is.
const MAX_GPU_PERCENT: f64 = 30.0;

pub(super) fn introduce(screen: &Screen, options: &TestBedOptions) {
    screen.title(TITLE);
    let nodes: Vec<_> = options.nodes.iter().map(|(name, _)| name.as_str()).collect();
    screen.say(&format!("Starting a cluster with the nodes {}.", nodes.join(" and ")));
    screen.say("Real:      tessera-controller, tessera-driver, the interceptor in each container");
    screen.say("Simulated: the GPUs (fake NVML and CUDA driver libraries) and Kubernetes");
}

/// Tells how to use the running cluster.
pub(super) fn keep(
    screen: &Screen,
    kubeconfig: &Path,
    directory: &Path,
    metrics: &[(String, SocketAddr)],
) -> anyhow::Result<()> {
    let programs = std::env::current_exe()?;
    let programs = programs.parent().unwrap_or(Path::new("/")).display();
    screen.step("The cluster is running; use it from another terminal");
    let kubeconfig = format!("export KUBECONFIG={}", kubeconfig.display());
    let path = format!("export PATH={programs}:$PATH");
    screen.commands(&[
        (&kubeconfig, ""),
        (&path, "for `kubectl tessera`"),
        ("kubectl tessera tree", "nodes, GPUs, shares"),
        ("kubectl apply --filename examples/quarter", "the first pod of README"),
        ("kubectl logs trainer", "the GPU as its container sees it"),
    ]);
    screen.gap();
    screen
        .say("Every image name resolves to the built-in probe program. It prints the GPUs that it");
    screen.say(
        "sees, whatever command the pod names (only tessera/probe:e2e runs the pod's command).",
    );
    screen.say("`kubectl exec` is not supported.");
    for (program, address) in metrics {
        screen.say(&format!("Metrics of {program}: http://{address}/metrics"));
    }
    screen.say(&format!("Logs of controller and drivers: {}", directory.display()));
    screen.say("Ctrl-C stops the cluster.");
    Ok(())
}

/// Prints three commands to continue with.
pub(super) fn suggest_next(screen: &Screen) -> anyhow::Result<()> {
    let program = std::env::current_exe()?;
    let directory = std::env::current_dir()?;
    let program = program.strip_prefix(&directory).unwrap_or(&program);
    let keep = format!("{} demo --keep", program.display());
    screen.gap();
    screen.say("Next:");
    screen.commands(&[
        (&keep, "keep the cluster, for kubectl and `kubectl tessera tree`"),
        ("less docs/README.md", "documentation by task"),
        ("helm install tessera deploy/chart/tessera ...", "see \"Install\" in README.md"),
    ]);
    Ok(())
}

/// Runs all steps.
pub(super) async fn run(
    screen: &Screen,
    client: &Client,
    metrics: &[(String, SocketAddr)],
) -> anyhow::Result<()> {
    show_published_gpus(screen, client).await?;
    show_request(screen, client).await?;
    let claim = share_one_gpu(screen, client).await?;
    show_limits(screen, client).await?;
    show_metrics(screen, metrics, &claim).await?;
    show_pending_pod(screen, client).await?;
    show_reallocation(screen, client).await
}

async fn show_published_gpus(screen: &Screen, client: &Client) -> anyhow::Result<()> {
    screen.step("tessera-driver finds the GPUs through NVML and publishes them as ResourceSlices");
    let slices: Api<ResourceSlice> = Api::all(client.clone());
    for node in tables::nodes(&slices.list(&ListParams::default()).await?.items) {
        screen.good(&node);
    }
    Ok(())
}

async fn show_request(screen: &Screen, client: &Client) -> anyhow::Result<()> {
    screen.step("A user requests a quarter of an H100 (the lines that matter)");
    screen.yaml(manifests::excerpt());
    screen.say("The selector keeps all pods on GPU 0, which is full after four of them.");
    manifests::create_template(client).await
}

/// Returns the name of the first pod's claim.
async fn share_one_gpu(screen: &Screen, client: &Client) -> anyhow::Result<String> {
    screen.step("tessera-controller allocates one GPU to four such pods");
    for name in PODS {
        manifests::create_pod(client, name).await?;
    }
    let mut rows = Vec::new();
    for name in PODS {
        let pod = running(client, name).await?;
        let claim = claim_of(client, &pod).await?;
        let [node, gpu, memory, cores] =
            tables::allocation(&claim).context("a running pod has no GPU")?;
        rows.push(vec![name.to_owned(), claim.name_any(), node, gpu, memory, cores]);
    }
    screen.table(&["POD", "CLAIM", "NODE", "GPU", "MEMORY", "COMPUTE"], &rows);
    let gpus: std::collections::BTreeSet<_> = rows.iter().map(|row| &row[3]).collect();
    anyhow::ensure!(gpus.len() == 1, "the pods are on {} GPUs", gpus.len());
    Ok(rows[0][1].clone())
}

async fn show_limits(screen: &Screen, client: &Client) -> anyhow::Result<()> {
    screen.step("Inside the container of pod-1");
    let see = line(client, "pod-1", "see").await?;
    let filled = line(client, "pod-1", "filled").await?;
    let computed = line(client, "pod-1", "computed").await?;
    let devices = see["devices"].as_array().map(Vec::as_slice).unwrap_or_default();
    let device = devices.first().context("the container sees no GPU")?;
    screen.good(&format!(
        "CUDA and NVML report {} GPU: {}",
        devices.len(),
        device["name"].as_str().unwrap_or_default()
    ));
    screen.good(&format!(
        "memory: {} by cuMemGetInfo, {} by nvmlDeviceGetMemoryInfo",
        tables::gib(&device["cudaTotalBytes"]),
        tables::gib(&device["nvmlTotalBytes"])
    ));
    let refusal = filled["refusedWith"].as_str().context("no allocation was refused")?;
    screen.good(&format!(
        "cuMemAlloc: {} allocated, then {refusal}",
        tables::gib(&filled["takenBytes"])
    ));
    let percent = computed["gpuPercent"].as_f64().context("no measured compute")?;
    screen.good(&format!(
        "compute: {} kernels of 1 ms in {:.2} s, {percent:.1} % of the GPU's time (limit 25 %)",
        computed["launches"],
        computed["seconds"].as_f64().unwrap_or_default()
    ));
    anyhow::ensure!(
        device["cudaTotalBytes"] == SHARE_BYTES,
        "the container sees {} bytes",
        device["cudaTotalBytes"]
    );
    anyhow::ensure!(
        filled["takenBytes"].as_u64() <= Some(SHARE_BYTES),
        "the container allocated {} bytes, more than its share",
        filled["takenBytes"]
    );
    anyhow::ensure!(percent <= MAX_GPU_PERCENT, "the container used {percent} % of the GPU's time");
    Ok(())
}

async fn show_metrics(
    screen: &Screen,
    metrics: &[(String, SocketAddr)],
    claim: &str,
) -> anyhow::Result<()> {
    screen.step("Metrics of that share");
    let (program, address) = metrics.first().context("no program serves metrics")?;
    let label = format!("resourceclaim=\"{claim}\"");
    let sample = metrics::sample(*address, SHARE_MEMORY_USED, &label).await?;
    let value = sample.rsplit(' ').next().unwrap_or_default();
    screen.say(&format!("One line of http://{address}/metrics ({program}):"));
    screen.message(&format!("{SHARE_MEMORY_USED}{{{label}, ...}} {value}"));
    Ok(())
}

async fn show_pending_pod(screen: &Screen, client: &Client) -> anyhow::Result<()> {
    screen.step("A fifth pod is pending, and an event gives the reason");
    manifests::create_pod(client, "pod-5").await?;
    let events: Api<Event> = Api::namespaced(client.clone(), "default");
    let reported = async {
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
    let event = tokio::time::timeout(TIMEOUT, reported).await.context("no event about pod-5")??;
    screen.say(&format!("{}:", event.reason.unwrap_or_default()));
    screen.message(&event.message.unwrap_or_default());
    Ok(())
}

async fn show_reallocation(screen: &Screen, client: &Client) -> anyhow::Result<()> {
    screen.step("pod-2 is deleted; pod-5 gets its share");
    let pods: Api<Pod> = Api::namespaced(client.clone(), "default");
    let pending = claim_of(client, &pods.get("pod-5").await?).await?.name_any();
    let released = claim_of(client, &pods.get("pod-2").await?).await?.name_any();
    let has_node = |pod: Option<&Pod>| {
        pod.and_then(|pod| pod.spec.as_ref()).is_some_and(|spec| spec.node_name.is_some())
    };
    let bound = async {
        await_condition(pods.clone(), "pod-5", has_node).await?;
        anyhow::Ok(Instant::now())
    };
    let both = futures::future::try_join(reallocation(client, &released, &pending), bound);
    let ((free, allocated), bound) =
        tokio::time::timeout(TIMEOUT, both).await.context("pod-5 got no share")??;
    // The two watches may report out of order, but an allocation precedes its binding.
    let allocated = allocated.min(bound);
    let milliseconds = |end: Instant| end.saturating_duration_since(free).as_secs_f64() * 1000.0;
    screen.good(&format!(
        "tessera-controller wrote the allocation {:.1} ms after the share was free",
        milliseconds(allocated)
    ));
    screen.good(&format!("kube-scheduler bound the pod after {:.1} ms", milliseconds(bound)));
    running(client, "pod-5").await?;
    let filled = line(client, "pod-5", "filled").await?;
    screen.good(&format!("pod-5 runs and allocated {}", tables::gib(&filled["takenBytes"])));
    Ok(())
}

/// Deletes pod-2. Returns the times of its claim's release and of the pending claim's allocation.
async fn reallocation(
    client: &Client,
    released: &str,
    pending: &str,
) -> anyhow::Result<(Instant, Instant)> {
    let claims: Api<ResourceClaim> = Api::namespaced(client.clone(), "default");
    let pods: Api<Pod> = Api::namespaced(client.clone(), "default");
    let mut stream = Box::pin(watcher(claims, watcher::Config::default()).default_backoff());
    let mut free = None;
    loop {
        match stream.try_next().await?.context("the watch ended")? {
            watcher::Event::InitDone => {
                pods.delete("pod-2", &DeleteParams::default()).await?;
            }
            watcher::Event::Apply(claim) if claim.name_any() == pending => {
                if let (Some(free), Some(_)) = (free, tables::allocation(&claim)) {
                    return Ok((free, Instant::now()));
                }
            }
            watcher::Event::Apply(claim)
                if claim.name_any() == released && tables::allocation(&claim).is_none() =>
            {
                free.get_or_insert_with(Instant::now);
            }
            watcher::Event::Delete(claim) if claim.name_any() == released => {
                free.get_or_insert_with(Instant::now);
            }
            _ => {}
        }
    }
}

async fn running(client: &Client, name: &str) -> anyhow::Result<Pod> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), "default");
    let has_started = |pod: Option<&Pod>| {
        let phase =
            pod.and_then(|pod| pod.status.as_ref()).and_then(|status| status.phase.as_deref());
        matches!(phase, Some("Running" | "Failed"))
    };
    let pod = tokio::time::timeout(TIMEOUT, await_condition(pods, name, has_started)).await;
    let pod = pod
        .with_context(|| format!("{name} does not run"))??
        .with_context(|| format!("{name} was deleted"))?;
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

/// Returns the first line of the probe's output with that event.
async fn line(client: &Client, pod: &str, event: &str) -> anyhow::Result<Value> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), "default");
    let parameters = LogParams { follow: true, ..LogParams::default() };
    let read = async {
        let mut lines = pods.log_stream(pod, &parameters).await?.lines();
        let mut others = Vec::new();
        while let Some(line) = lines.try_next().await? {
            match serde_json::from_str::<Value>(&line) {
                Ok(value) if value["event"] == event => return Ok(value),
                _ => others.push(line),
            }
        }
        anyhow::bail!("{pod} ended without the line `{event}`: {}", others.join(" | "))
    };
    tokio::time::timeout(TIMEOUT, read)
        .await
        .with_context(|| format!("{pod} does not print `{event}`"))?
}
