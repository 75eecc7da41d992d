//! M2: many ResourceSlices with the token of one node.

use std::path::Path;

use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::{Api, Client};
use serde_json::{Value, json};
use tessera_attacks::cluster::{create, read_config};
use tessera_e2e::inventory::DRIVER;
use tessera_test_support::test_name;

use crate::harness::{Harness, NODE};

/// Slices of the finding.
const SLICES: usize = 1500;

/// Slices of a node that the policy allows. The driver has published one of them.
const ALLOWED: usize = 8;

/// Most memory that the slices add to the controller.
const MEMORY_MIB: f64 = 32.0;

fn slice(number: usize) -> Value {
    let device = |index: usize| {
        json!({
            "name": format!("gpu-{number}-{index}"), "allowMultipleAllocations": true,
            "attributes": {"type": {"string": "gpu"}, "index": {"int": index}},
            "capacity": {"memory": {"value": "80Gi"}},
        })
    };
    json!({
        "metadata": {"name": format!("{number:03}-{DRIVER}-{NODE}")},
        "spec": {
            "driver": DRIVER, "nodeName": NODE,
            "pool": {"name": NODE, "generation": 1000, "resourceSliceCount": 8},
            "devices": (0..64).map(device).collect::<Vec<_>>(),
        },
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn token_of_a_node_publishes_few_slices() {
    let Some(harness) = Harness::start(test_name!()).await else { return };
    let before = harness.controller().usage().unwrap();
    let kubeconfig = harness.driver().argument("--kubeconfig").unwrap().to_owned();
    let config = read_config(Path::new(&kubeconfig)).await.unwrap();
    let slices: Api<ResourceSlice> = Api::all(Client::try_from(config).unwrap());
    let (mut created, mut denied) = (0, 0);
    for number in 0..SLICES {
        match create(&slices, slice(number)).await {
            Ok(_) => created += 1,
            Err(error) => denied += usize::from(format!("{error:?}").contains("at most 8 slices")),
        }
    }
    harness.report("slices created, denied:", (created, denied));
    assert!(created < ALLOWED, "{created} slices were created");
    assert!(denied >= SLICES - ALLOWED, "{denied} slices were denied by the policy");
    let added = harness.controller().usage().unwrap().peak_rss_mib - before.rss_mib;
    harness.report("added memory in MiB", added);
    assert!(added < MEMORY_MIB, "{added} MiB more");
    harness.check_leader().await;
    harness.cluster.stop().await.unwrap();
}
