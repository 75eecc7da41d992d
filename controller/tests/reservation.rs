//! A node is reserved for a pod that has waited long, and only for a while. Time is simulated.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fake_api;

use fake_api::FakeApi;
use fake_api::controller::{Controller, allocation, cluster, event, reserve_and_bind};
use fake_api::objects::{claim, pod};
use tokio::time::Duration;

async fn seconds(n: u64) {
    tokio::time::sleep(Duration::from_secs(n)).await;
}

/// `node-a` has two GPUs, of which `holder` uses one. `large` wants both.
async fn waiting() -> (FakeApi, Controller) {
    let api = cluster(2);
    let controller = Controller::start(&api);
    api.put("resourceclaims", claim("held", "70Gi"));
    api.put("pods", pod("holder", &["held"]));
    api.until("an allocation", |api| allocation(api, "held")).await;
    reserve_and_bind(&api, "holder", &["held"]);
    let mut both = claim("large", "80Gi");
    both["spec"]["devices"]["requests"][0]["exactly"]["count"] = 2.into();
    api.put("resourceclaims", both);
    api.put("pods", pod("large", &["large"]));
    api.until("an event", |api| event(api, "large", "InsufficientDevices")).await;
    (api, controller)
}

fn add_small(api: &FakeApi, name: &str) {
    api.put("resourceclaims", claim(name, "19Gi"));
    let mut small = pod(name, &[name]);
    small["metadata"]["creationTimestamp"] = "1970-01-01T00:01:00Z".into();
    api.put("pods", small);
}

fn notes(api: &FakeApi, pod: &str) -> Vec<String> {
    let events = api.list("events");
    let of_pod = events.iter().filter(|e| e["regarding"]["name"] == pod);
    of_pod.map(|e| e["note"].as_str().unwrap().to_owned()).collect()
}

#[tokio::test(start_paused = true)]
async fn node_is_reserved_for_a_turn_without_any_change() {
    let (api, controller) = waiting().await;
    seconds(290).await;
    assert_eq!(controller.metrics.reserved_nodes.get(), 0);
    seconds(20).await;
    assert_eq!(controller.metrics.reserved_nodes.get(), 1, "the reservation delay is over");
    add_small(&api, "small");
    let note = api.until("an event", |api| event(api, "small", "InsufficientDevices")).await;
    assert_eq!(
        note,
        "0/2 GPUs available for ResourceClaim small: 2 on nodes reserved for long-pending pod \
         default/large"
    );
    // An event of the same reason is published five minutes after the last one.
    seconds(300).await;
    assert_eq!(allocation(&api, "small"), None);
    let told = notes(&api, "large");
    assert!(
        told.iter().any(
            |note| note.contains("; node node-a is reserved for the pod until 1970-01-01T00:")
        ),
        "{told:?}"
    );
    seconds(900).await;
    assert!(allocation(&api, "small").is_some(), "the turn is over");
    assert_eq!(controller.metrics.reserved_nodes.get(), 0);
    controller.stop().await;
}

#[tokio::test(start_paused = true)]
async fn pod_gets_the_reserved_node_once_it_fits() {
    let (api, controller) = waiting().await;
    seconds(310).await;
    add_small(&api, "small");
    api.until("an event", |api| event(api, "small", "InsufficientDevices")).await;
    api.delete("pods", "default", "holder");
    api.delete("resourceclaims", "default", "held");
    api.until("an allocation", |api| allocation(api, "large")).await;
    assert_eq!(allocation(&api, "small"), None);
    seconds(1).await;
    assert_eq!(controller.metrics.reserved_nodes.get(), 0);
    controller.stop().await;
}
