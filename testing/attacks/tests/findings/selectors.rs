//! C1 and C2: claims with expensive or very large selectors.

use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceClaim;
use tessera_attacks::bounds;
use tessera_attacks::cluster::create;
use tessera_attacks::objects;
use tessera_test_support::test_name;

use crate::harness::{Harness, TENANT};

/// Longest time for which the neighbour's pod may wait.
const LATENCY: Duration = Duration::from_secs(2);

/// Most memory of the controller: a quarter of the chart's limit.
const MEMORY_MIB: f64 = 256.0;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn expensive_selectors_neither_delay_nor_depose() {
    let Some(harness) = Harness::start(test_name!()).await else { return };
    for number in 0..16 {
        harness.pod(TENANT, &format!("expensive-{number}"), &objects::expensive(number)).await;
    }
    harness.check_neighbour(LATENCY).await;
    harness.check_leader().await;
    harness.check_memory(&harness.controller(), MEMORY_MIB);
    harness.cluster.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_expensive_pods_leave_the_controller_idle() {
    let Some(harness) = Harness::start(test_name!()).await else { return };
    let attack = async {
        for number in 0..bounds::size(1000, 40) {
            harness.pod(TENANT, &format!("worst-{number}"), &objects::worst(number)).await;
        }
    };
    tokio::join!(attack, harness.check_neighbour_often(Duration::from_millis(100)));
    // A debug build spends the same steps in much more time.
    harness.wait_idle(bounds::limit(Duration::from_secs(5))).await;
    harness.check_leader().await;
    harness.check_memory(&harness.controller(), MEMORY_MIB);
    harness.cluster.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_claims_without_pods_stay_uncompiled() {
    let Some(harness) = Harness::start(test_name!()).await else { return };
    let cpu_before = harness.controller().usage().unwrap().cpu_s;
    for number in 0..12 {
        let claim = objects::claim(&format!("large-{number}"), &objects::large(number, 140));
        create::<ResourceClaim>(&harness.cluster.api(TENANT), claim).await.unwrap();
    }
    harness.check_neighbour(LATENCY).await;
    harness.check_leader().await;
    harness.check_memory(&harness.controller(), MEMORY_MIB);
    let cpu = harness.controller().usage().unwrap().cpu_s - cpu_before;
    // Compiled, the 1,680 selectors take 40 s of an optimised build.
    assert!(cpu < 20.0, "{cpu} s of CPU time");
    harness.cluster.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_selectors_of_pods_are_bounded() {
    let Some(harness) = Harness::start(test_name!()).await else { return };
    // The first are refused for their size; the others are just within the limit.
    for (number, selectors) in (0..24).map(|number| (number, if number < 4 { 140 } else { 6 })) {
        harness.pod(TENANT, &format!("large-{number}"), &objects::large(number, selectors)).await;
    }
    harness.check_neighbour(LATENCY).await;
    harness.check_leader().await;
    harness.check_memory(&harness.controller(), MEMORY_MIB);
    harness.cluster.stop().await.unwrap();
}
