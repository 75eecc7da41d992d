//! Trial of LeastLoaded: a pod gets the GPU that works least, as the drivers measure it. All but
//! one of the GPUs work.

use anyhow::Context as _;
use axum::http::Request;
use kube::api::ListParams;
use kube::{Client, ResourceExt};
use serde_json::json;
use tessera_api::load::{GpuLoad, NodeLoad, PATH};

use super::controller_deployment::ControllerDeployment;
use super::driver_instances::DriverInstances;
use super::placement::{node_name, wait_allocated};
use super::test_bed::{A100, TIMEOUT, TestBed, from_template};
use crate::harness::TrialOutcome;
use crate::inventory::attribute;
use crate::leftovers::device_results;
use crate::runner::Outcome;
use crate::wait::{self, CheckResult};

/// Load from which a GPU is known to work, in percent: more than the controller rounds.
const BUSY: u8 = 30;

pub(super) async fn places_by_load(test_bed: TestBed) -> TrialOutcome {
    let operations = test_bed.operations()?.clone();
    let node = test_bed.node_with("a100", 4).await?;
    let inventory = test_bed.published_gpus().await?;
    let gpus: Vec<(String, String)> = inventory
        .of_pool(&node)
        .filter_map(|(name, device)| {
            Some((name.to_owned(), attribute(device, "uuid").as_str()?.to_owned()))
        })
        .collect();
    // Without loads, the first GPU would be chosen.
    let [busy @ .., (idle, idle_uuid)] = gpus.as_slice() else { anyhow::bail!("no GPUs") };
    for (_, uuid) in busy {
        operations.run(&["gpu", &node, "busy", uuid, "100"]).await?;
    }
    let outcome = async {
        wait_measured(&test_bed, &node, idle_uuid).await?;
        check_place(&test_bed, idle).await
    };
    let outcome = outcome.await;
    for (_, uuid) in busy {
        operations.run(&["gpu", &node, "busy", uuid, "0"]).await?;
    }
    outcome?;
    test_bed.delete(&["pod"]).await?;
    Ok(Outcome::Passed(vec![]))
}

/// Places a pod, and checks that it has this device.
async fn check_place(test_bed: &TestBed, idle: &str) -> anyhow::Result<()> {
    let least = json!({"placement": {"node": "LeastLoaded", "device": "LeastLoaded"}});
    let capacity = json!({"memory": "1Gi", "cores": "10"});
    test_bed.create_configured_template("share", A100, capacity, least).await?;
    test_bed.create(from_template("pod", "share")).await?;
    let claim = wait_allocated(test_bed, "pod", "allocated", |_| true).await?;
    let devices: Vec<String> = device_results(&claim).map(|result| result.device.clone()).collect();
    anyhow::ensure!(devices == [idle], "the pod got {devices:?}; only {idle} is idle");
    test_bed.wait_running("pod").await.map(drop)
}

/// Waits until the driver reports the loads, and then until the controller has asked each driver.
async fn wait_measured(test_bed: &TestBed, node: &str, idle: &str) -> anyhow::Result<()> {
    let client = &test_bed.client;
    let drivers = DriverInstances::new(client).pods;
    let selector = ListParams::default().labels("app.kubernetes.io/name=tessera-driver");
    let drivers = drivers.list(&selector).await?.items;
    let of_node = drivers.iter().find(|pod| node_name(pod) == Some(node));
    let driver = of_node.map(ResourceExt::name_any).context("the node has no driver")?;
    let is_measured = async || {
        let load: NodeLoad = serde_json::from_str(&read(client, &driver, 9400, PATH).await?)?;
        anyhow::ensure!(!load.gpus.is_empty(), "{driver} reports no load");
        let is_right = |gpu: &GpuLoad| (gpu.busy_percent >= BUSY) != (gpu.uuid.as_str() == idle);
        Ok(CheckResult::done_if(load.gpus.iter().all(is_right), || json!(load).to_string()))
    };
    wait::poll("the driver to measure the loads", TIMEOUT, is_measured).await?;
    let leader = ControllerDeployment::new(test_bed).wait_leader("a leader", |_| true).await?;
    let leader = leader.name_any();
    let answered = async || {
        let metrics = read(client, &leader, 9401, "/metrics").await?;
        let series = "tessera_controller_load_samples_total{result=\"answered\"} ";
        let value = metrics.lines().find_map(|line| line.strip_prefix(series));
        anyhow::Ok(value.unwrap_or("0").parse::<usize>()?)
    };
    // A round may be under way: after twice as many answers as drivers, a whole one has ended.
    let enough = answered().await? + 2 * drivers.len();
    let has_asked = async || {
        let answers = answered().await?;
        Ok(CheckResult::done_if(answers >= enough, || format!("{answers} of {enough} answers")))
    };
    wait::poll("the controller to ask all drivers", TIMEOUT, has_asked).await
}

/// Sends a GET request to a pod of the chart, through the API server's pod proxy.
async fn read(client: &Client, pod: &str, port: u16, path: &str) -> anyhow::Result<String> {
    let path = format!("/api/v1/namespaces/tessera-system/pods/{pod}:{port}/proxy{path}");
    Ok(client.request_text(Request::get(path).body(Vec::new())?).await?)
}
