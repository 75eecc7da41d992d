//! H3: as many shares as a tenant can ask for.

use std::collections::BTreeMap;
use std::time::Instant;

use k8s_openapi::api::core::v1::Event;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::ListParams;
use kube::runtime::watcher;
use serde_json::{Value, json};
use tessera_attacks::bounds;
use tessera_attacks::objects;
use tessera_attacks::processes::Process;
use tessera_e2e::leftovers::device_results;
use tessera_e2e::wait::{self, CheckResult};
use tessera_test_support::test_name;

use crate::harness::{Harness, TENANT, TIMEOUT, scrape};

/// Pods with one claim each: 16,000 shares, or twice as many as fit.
const PODS: [usize; 2] = [500, 100];

/// Requests of a claim, the most that Kubernetes allows.
const REQUESTS: usize = 32;

/// Shares of a GPU that the driver allows by default.
const MAX_SHARES: usize = 128;

/// Most memory of the driver, three quarters of the chart's limit: 60 MiB on an idle machine, and
/// 66 MiB on a busy one, where more claims are prepared at the same time.
const MEMORY_MIB: f64 = 96.0;

/// Longest answer of the driver to a scrape: 12 series per share and their labels.
const MAX_SCRAPE: usize = 8 << 20;

fn smallest_shares() -> Value {
    let request =
        |number: usize| json!({"name": format!("r{number}"), "exactly": objects::exactly("1Mi")});
    json!({"requests": (0..REQUESTS).map(request).collect::<Vec<_>>()})
}

/// Waits until the pod's claim is refused for lack of devices.
async fn wait_refused(harness: &Harness, pod: &str) {
    let selector = watcher::Config::default()
        .fields(&format!("involvedObject.name={pod},reason=InsufficientDevices"));
    let check = |events: &[Event]| CheckResult::done_if(!events.is_empty(), || "none".to_owned());
    let events = harness.cluster.api::<Event>(TENANT);
    wait::until(events, selector, "an event InsufficientDevices", TIMEOUT, check).await.unwrap();
}

/// Returns the number of shares of each device.
async fn shares(harness: &Harness) -> BTreeMap<String, usize> {
    let claims = harness.cluster.api::<ResourceClaim>(TENANT);
    let claims = claims.list(&ListParams::default()).await.unwrap();
    let mut shares = BTreeMap::new();
    for result in claims.iter().flat_map(device_results) {
        *shares.entry(format!("{} {}", result.pool, result.device)).or_default() += 1;
    }
    shares
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shares_beyond_the_bound_are_refused() {
    let Some(harness) = Harness::start(test_name!()).await else { return };
    let pods = bounds::size(PODS[0], PODS[1]);
    for number in 0..pods {
        harness.pod(TENANT, &format!("many-{number}"), &smallest_shares()).await;
    }
    wait_refused(&harness, &format!("many-{}", pods - 1)).await;
    let shares = shares(&harness).await;
    let most = shares.values().copied().max().unwrap();
    harness.report("GPUs, most shares of one:", (shares.len(), most));
    assert!((MAX_SHARES / 2..=MAX_SHARES).contains(&most), "{shares:?}");
    let driver = harness.driver();
    wait_prepared(&shares, &driver).await;
    let answer = scrape(&driver).await;
    harness.report("bytes of a scrape:", answer.len());
    assert!(answer.len() < MAX_SCRAPE, "{} bytes", answer.len());
    harness.check_memory(&driver, MEMORY_MIB);
    harness.check_memory(&harness.controller(), 256.0);
    harness.check_leader().await;
    harness.cluster.stop().await.unwrap();
}

/// Waits until the driver has prepared as many shares as are allocated on its node.
async fn wait_prepared(shares: &BTreeMap<String, usize>, driver: &Process) {
    let node = driver.argument("--node-name").unwrap();
    let of_node = shares.iter().filter(|(device, _)| device.starts_with(node));
    let allocated: usize = of_node.map(|(_, count)| count).sum();
    let begun = Instant::now();
    loop {
        let answer = scrape(driver).await;
        let prepared =
            answer.lines().filter(|line| line.starts_with("tessera_share_cores_percent{"));
        let prepared = prepared.count();
        if prepared >= allocated {
            return;
        }
        assert!(begun.elapsed() < TIMEOUT, "{prepared} of {allocated} shares are prepared");
    }
}
