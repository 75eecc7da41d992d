//! The whole controller but for leadership, against an API server in this process.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod fake_api;

use fake_api::FakeApi;
use fake_api::controller::{
    Controller, add_node, allocation, cluster, event, place, reserve_and_bind,
};
use fake_api::objects::{bound, claim, class, node, pod, slice, unschedulable};
use serde_json::{Value, json};
use tessera_allocator::PlanSettings;
use tessera_api::names::DriverName;
use tessera_controller::metrics::{KindLabel, ReasonLabel, WatchFailureLabels};
use tokio::time::{Duration, Instant};

#[tokio::test]
async fn pending_pod_gets_its_claim_allocated() {
    let api = cluster(1);
    let controller = Controller::start(&api);
    api.put("resourceclaims", claim("c", "19Gi"));
    api.put("pods", pod("p", &["c"]));
    let got = api.until("an allocation", |api| allocation(api, "c")).await;
    let result = &got["devices"]["results"][0];
    assert_eq!(result["device"], "gpu-0");
    assert_eq!(result["consumedCapacity"], json!({"cores": "25", "memory": "19Gi"}));
    assert!(got["allocationTimestamp"].is_string());
    controller.stop().await;
}

#[tokio::test]
async fn generated_claim_is_allocated_early_and_released_with_pod() {
    let api = cluster(1);
    let controller = Controller::start(&api);
    let mut waiting = pod("p", &[]);
    waiting["spec"]["resourceClaims"] = json!([{"name": "gpu", "resourceClaimTemplateName": "t"}]);
    let mut made = claim("p-gpu-x", "19Gi");
    made["metadata"]["annotations"] = json!({"resource.kubernetes.io/pod-claim-name": "gpu"});
    made["metadata"]["ownerReferences"] = json!([
        {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": waiting["metadata"]["uid"], "controller": true},
    ]);
    api.put("pods", waiting);
    api.put("resourceclaims", made);
    api.until("an allocation", |api| allocation(api, "p-gpu-x")).await;
    api.delete("pods", "default", "p");
    api.until("no allocation", |api| allocation(api, "p-gpu-x").is_none().then_some(())).await;
    controller.stop().await;
}

/// A pod of two claims from templates, both made, of which its status names one.
fn half_listed(api: &FakeApi, listed: &str) -> Value {
    let mut waiting = pod("p", &[]);
    let entries = ["one", "two"];
    waiting["spec"]["resourceClaims"] = entries
        .map(|entry| json!({"name": entry, "resourceClaimTemplateName": "t"}))
        .into_iter()
        .collect();
    waiting["status"]["resourceClaimStatuses"] =
        json!([{"name": listed, "resourceClaimName": format!("p-{listed}")}]);
    for entry in entries {
        let mut made = claim(&format!("p-{entry}"), "19Gi");
        made["metadata"]["annotations"] = json!({"resource.kubernetes.io/pod-claim-name": entry});
        made["metadata"]["ownerReferences"] = json!([
            {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": waiting["metadata"]["uid"], "controller": true},
        ]);
        api.put("resourceclaims", made);
    }
    waiting
}

#[tokio::test(start_paused = true)]
async fn pod_status_without_a_claim_is_reported_and_gets_nothing() {
    let api = cluster(1);
    let controller = Controller::start(&api);
    let holds = |api: &FakeApi| ["p-one", "p-two"].map(|claim| allocation(api, claim).is_some());
    const TRIED_BEFORE: &str =
        "0/1 nodes are available: pod \"default/p\": ResourceClaim not created yet.";
    let mut waiting = unschedulable(half_listed(&api, "one"), TRIED_BEFORE);
    api.put("pods", waiting.clone());
    api.until("both allocations", |api| (holds(api) == [true; 2]).then_some(())).await;
    // As kube-controller-manager before 1.37 repeatedly does.
    for listed in ["two", "one", "two", "one", "two"] {
        tokio::time::sleep(Duration::from_secs(60)).await;
        waiting["status"]["resourceClaimStatuses"] =
            json!([{"name": listed, "resourceClaimName": format!("p-{listed}")}]);
        api.put("pods", waiting.clone());
    }
    let note = event(&api, "p", "PodStatusMissingClaim").unwrap();
    assert!(note.contains("delete the pod"), "{note}");
    assert_eq!(holds(&api), [false; 2], "no other pod could use the devices");
    let names = ["one", "two"]
        .map(|entry| json!({"name": entry, "resourceClaimName": format!("p-{entry}")}));
    waiting["status"]["resourceClaimStatuses"] = names.into_iter().collect();
    api.put("pods", waiting);
    api.until("both allocations", |api| (holds(api) == [true; 2]).then_some(())).await;
    controller.stop().await;
}

#[tokio::test(start_paused = true)]
async fn pod_that_is_never_scheduled_releases_its_devices() {
    let api = cluster(1);
    let controller = Controller::start(&api);
    let holds = |api: &FakeApi| ["p-one", "p-two"].map(|claim| allocation(api, claim).is_some());
    let waiting = half_listed(&api, "one");
    api.put("pods", waiting);
    api.until("both allocations", |api| (holds(api) == [true; 2]).then_some(())).await;
    // Nothing else changes any more.
    tokio::time::sleep(Duration::from_secs(180)).await;
    assert_eq!(holds(&api), [false; 2]);
    let held_back = ReasonLabel { reason: "PodStatusMissingClaim" };
    assert_eq!(controller.metrics.pending.get_or_create(&held_back).get(), 2);
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert_eq!(holds(&api), [false; 2], "nor are they given to it again");
    controller.stop().await;
}

#[tokio::test]
async fn burst_of_pods_never_exceeds_capacity() {
    let api = cluster(3);
    for i in 0..20 {
        api.put("resourceclaims", claim(&format!("c{i}"), "19Gi"));
        api.put("pods", pod(&format!("p{i}"), &[&format!("c{i}")]));
    }
    let controller = Controller::start(&api);
    let allocated = |api: &FakeApi| {
        (0..20).filter_map(|i| allocation(api, &format!("c{i}"))).collect::<Vec<_>>()
    };
    api.until("twelve allocations", |api| (allocated(api).len() >= 12).then_some(())).await;
    api.until("eight pods told", |api| {
        ((0..20).filter(|i| event(api, &format!("p{i}"), "InsufficientDevices").is_some()).count()
            >= 8)
            .then_some(())
    })
    .await;
    let all = allocated(&api);
    assert_eq!(all.len(), 12, "four on each of three GPUs");
    for gpu in 0..3 {
        let on = all
            .iter()
            .filter(|a| a["devices"]["results"][0]["device"] == format!("gpu-{gpu}"))
            .count();
        assert_eq!(on, 4);
    }
    let metrics = controller.metrics.clone();
    controller.stop().await;
    assert_eq!(metrics.allocations.get(), 12);
}

#[tokio::test]
async fn pod_without_room_is_explained_and_placed_later() {
    let api = cluster(1);
    api.put("resourceclaims", claim("large", "70Gi"));
    api.put("pods", pod("large", &["large"]));
    let controller = Controller::start(&api);
    api.until("the first allocation", |api| allocation(api, "large")).await;
    reserve_and_bind(&api, "large", &["large"]);
    api.put("resourceclaims", claim("c", "19Gi"));
    api.put("pods", pod("p", &["c"]));
    let note = api.until("an event", |api| event(api, "p", "InsufficientDevices")).await;
    assert_eq!(note, "0/1 GPUs available for ResourceClaim c: 1 insufficient memory (9Gi short)");
    // The pod ends; kube-controller-manager clears the claim.
    let mut ended = bound(pod("large", &["large"]), "node-a");
    ended["status"]["phase"] = "Succeeded".into();
    api.put("pods", ended);
    api.put("resourceclaims", claim("large", "70Gi"));
    api.until("the second allocation", |api| allocation(api, "c")).await;
    controller.stop().await;
}

#[tokio::test]
async fn capacity_of_running_pod_stays_taken_without_its_claim() {
    let api = cluster(1);
    api.put("resourceclaims", claim("large", "70Gi"));
    api.put("pods", pod("large", &["large"]));
    let controller = Controller::start(&api);
    api.until("the first allocation", |api| allocation(api, "large")).await;
    reserve_and_bind(&api, "large", &["large"]);
    // Pods and claims come over different watches: that the binding was seen is proven by a pod
    // that comes after it.
    api.put("resourceclaims", claim("small", "1Gi"));
    api.put("pods", pod("small", &["small"]));
    api.until("another allocation", |api| allocation(api, "small")).await;
    api.delete("resourceclaims", "default", "large");
    api.put("resourceclaims", claim("c", "19Gi"));
    api.put("pods", pod("p", &["c"]));
    api.until("an event", |api| event(api, "p", "InsufficientDevices")).await;
    assert_eq!(allocation(&api, "c"), None);
    api.delete("pods", "default", "large");
    api.until("an allocation", |api| allocation(api, "c")).await;
    controller.stop().await;
}

#[tokio::test]
async fn conflict_drops_the_decision_and_plans_again() {
    let api = cluster(1);
    api.put("resourceclaims", claim("c", "19Gi"));
    api.put("pods", pod("p", &["c"]));
    let mut meddled = 0;
    api.fault(move |store, request| {
        if request.path.ends_with("resourceclaims/c") && meddled < 3 {
            meddled += 1;
            let mut object = store.get("resourceclaims", "default", "c").unwrap().clone();
            object["metadata"]["labels"] = json!({"meddled": meddled.to_string()});
            store.put("resourceclaims", object);
        }
        None
    });
    let controller = Controller::start(&api);
    api.until("an allocation", |api| allocation(api, "c")).await;
    let metrics = controller.metrics.clone();
    controller.stop().await;
    assert_eq!(metrics.conflicts.get(), 3);
}

#[tokio::test]
async fn devices_of_an_unanswered_write_are_not_allocated_again() {
    let api = cluster(1);
    for name in ["a", "b"] {
        api.put("resourceclaims", claim(name, "50Gi"));
        api.put("pods", pod(name, &[name]));
    }
    let mut lost = 0;
    api.fault(move |store, request| {
        if !request.path.ends_with("/status") || lost > 2 {
            return None;
        }
        lost += 1;
        if lost == 1 {
            let mut object = store.get("resourceclaims", "default", "a").unwrap().clone();
            object["status"] = request.body["status"].clone();
            store.put("resourceclaims", object);
        }
        Some(fake_api::failure(504, "Timeout"))
    });
    let controller = Controller::start(&api);
    api.until("an allocation and an event", |api| {
        allocation(api, "a").and(event(api, "b", "InsufficientDevices"))
    })
    .await;
    controller.stop().await;
    assert_eq!(allocation(&api, "b"), None, "50Gi and 50Gi do not fit into 80Gi");
}

#[tokio::test]
async fn claim_with_finalizer_only_is_allocated_after_a_crash() {
    let api = cluster(1);
    let mut half = claim("c", "19Gi");
    half["metadata"]["finalizers"] = json!(["resource.kubernetes.io/delete-protection"]);
    api.put("resourceclaims", half);
    api.put("pods", pod("p", &["c"]));
    let controller = Controller::start(&api);
    api.until("an allocation", |api| allocation(api, "c")).await;
    assert_eq!(
        api.writes().iter().filter(|w| w.path.contains("resourceclaims")).count(),
        1,
        "one write is enough"
    );
    controller.stop().await;
}

#[tokio::test]
async fn gated_and_foreign_are_ignored_and_mixed_claims_refused() {
    let api = cluster(1);
    let mut other = class();
    other["metadata"]["name"] = "nic.example.com".into();
    other["spec"]["selectors"][0]["cel"]["expression"] =
        "device.driver == 'nic.example.com'".into();
    api.put("deviceclasses", other);
    let mut foreign = claim("foreign", "19Gi");
    foreign["spec"]["devices"]["requests"][0]["exactly"]["deviceClassName"] =
        "nic.example.com".into();
    let mut mixed = claim("mixed", "19Gi");
    let second = foreign["spec"]["devices"]["requests"][0].clone();
    mixed["spec"]["devices"]["requests"].as_array_mut().unwrap().push(second);
    mixed["spec"]["devices"]["requests"][1]["name"] = "nic".into();
    for object in [foreign, mixed, claim("gated", "19Gi"), claim("last", "19Gi")] {
        api.put("resourceclaims", object);
    }
    let mut gated = pod("gated", &["gated"]);
    gated["spec"]["schedulingGates"] = json!([{"name": "kueue.x-k8s.io/admission"}]);
    api.put("pods", gated);
    api.put("pods", pod("foreign", &["foreign"]));
    api.put("pods", pod("mixed", &["mixed"]));
    let controller = Controller::start(&api);
    let note = api.until("an event", |api| event(api, "mixed", "MixedDrivers")).await;
    assert!(note.contains("mixed") && note.contains("split"), "{note}");
    // A pod that comes later is served: by then the others have been looked at.
    api.put("pods", pod("last", &["last"]));
    api.until("an allocation", |api| allocation(api, "last")).await;
    for name in ["foreign", "mixed", "gated"] {
        assert_eq!(allocation(&api, name), None, "{name}");
    }
    assert_eq!(event(&api, "foreign", "InsufficientDevices"), None);
    controller.stop().await;
}

#[tokio::test]
async fn claim_of_two_managed_drivers_is_allocated() {
    let api = cluster(1);
    let driver = "nic.example.com";
    let mut nics = class();
    nics["metadata"]["name"] = driver.into();
    nics["spec"]["selectors"][0]["cel"]["expression"] =
        format!("device.driver == '{driver}'").into();
    api.put("deviceclasses", nics);
    let mut slice = slice("node-a", 1);
    slice["metadata"]["name"] = "node-a-nics".into();
    slice["spec"]["driver"] = driver.into();
    slice["spec"]["devices"] = json!([{"name": "nic-0"}]);
    api.put("resourceslices", slice);
    let fence = json!({
        "metadata": {"name": "nics"},
        "spec": {
            "deviceSelector": {"driver": driver},
            "taint": {"key": "gpu.tessera.dev/managed", "effect": "NoSchedule"},
        },
    });
    api.put("devicetaintrules", fence);
    let mut pair = claim("pair", "19Gi");
    let nic = json!({"name": "nic", "exactly": {"deviceClassName": driver}});
    pair["spec"]["devices"]["requests"].as_array_mut().unwrap().push(nic);
    api.put("resourceclaims", pair);
    api.put("pods", pod("pair", &["pair"]));
    let drivers = [DriverName::new(driver).unwrap()].into_iter().collect();
    let controller = Controller::start_managing(&api, PlanSettings::default(), drivers);
    let allocated = api.until("an allocation", |api| allocation(api, "pair")).await;
    let results = allocated["devices"]["results"].as_array().unwrap();
    let drivers: Vec<_> = results.iter().map(|result| result["driver"].as_str().unwrap()).collect();
    assert_eq!(drivers, ["gpu.tessera.dev", driver]);
    controller.stop().await;
}

#[tokio::test]
async fn unknown_class_and_invalid_config_are_reported() {
    let api = cluster(1);
    let mut lost = claim("lost", "19Gi");
    lost["spec"]["devices"]["requests"][0]["exactly"]["deviceClassName"] =
        "h200.gpu.tessera.dev".into();
    let mut bad = claim("bad", "19Gi");
    bad["spec"]["devices"]["config"] = json!([{"opaque": {"driver": "gpu.tessera.dev", "parameters": {
        "apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "GpuConfig", "placement": {"nodes": "Binpack"},
    }}}]);
    api.put("resourceclaims", lost);
    api.put("resourceclaims", bad);
    api.put("pods", pod("lost", &["lost"]));
    api.put("pods", pod("bad", &["bad"]));
    let controller = Controller::start(&api);
    let note = api.until("an event", |api| event(api, "lost", "UnknownDeviceClass")).await;
    assert!(note.contains("h200.gpu.tessera.dev"), "{note}");
    let note = api.until("an event", |api| event(api, "bad", "InvalidConfig")).await;
    assert!(note.contains("placement.nodes"), "{note}");
    controller.stop().await;
}

#[tokio::test]
async fn unreserved_allocation_is_released_when_the_pod_ends() {
    let api = cluster(1);
    api.put("resourceclaims", claim("c", "19Gi"));
    api.put("pods", pod("p", &["c"]));
    let controller = Controller::start(&api);
    api.until("an allocation", |api| allocation(api, "c")).await;
    api.delete("pods", "default", "p");
    api.until("its end", |api| allocation(api, "c").is_none().then_some(())).await;
    controller.stop().await;
}

#[tokio::test]
async fn second_pod_of_a_claim_does_not_disturb_the_first() {
    let api = cluster(1);
    api.put("resourceclaims", claim("c", "19Gi"));
    api.put("pods", pod("p", &["c"]));
    let controller = Controller::start(&api);
    let first = api.until("an allocation", |api| allocation(api, "c")).await;
    reserve_and_bind(&api, "p", &["c"]);
    api.put(
        "pods",
        unschedulable(pod("late", &["c"]), "0/1 nodes are available: 1 Insufficient cpu."),
    );
    // Something that is answered proves that the late pod has been looked at.
    api.put("resourceclaims", claim("other", "19Gi"));
    api.put("pods", pod("other", &["other"]));
    api.until("an allocation", |api| allocation(api, "other")).await;
    assert_eq!(allocation(&api, "c"), Some(first));
    controller.stop().await;
}

#[tokio::test(start_paused = true)]
async fn unschedulable_pod_is_placed_on_another_node() {
    let api = cluster(1);
    api.put("resourceclaims", claim("c", "19Gi"));
    api.put(
        "pods",
        unschedulable(pod("p", &["c"]), "0/1 nodes are available: 1 cannot allocate all claims."),
    );
    let controller = Controller::start(&api);
    api.until("an allocation", |api| allocation(api, "c")).await;
    api.put("nodes", node("node-b"));
    api.put("resourceslices", slice("node-b", 1));
    api.put(
        "pods",
        unschedulable(
            pod("p", &["c"]),
            "0/2 nodes are available: 1 node(s) didn't have free ports.",
        ),
    );
    let elsewhere = |api: &FakeApi| {
        let pool = allocation(api, "c")?["devices"]["results"][0]["pool"].clone();
        (pool == "node-b").then_some(())
    };
    api.until("an allocation on the other node", elsewhere).await;
    let note = event(&api, "p", "Rescheduling").unwrap();
    assert!(note.contains("node-a") && note.contains("free ports"), "{note}");
    controller.stop().await;
}

#[tokio::test(start_paused = true)]
async fn slow_write_does_not_shorten_the_scheduler_deadline() {
    let api = cluster(1);
    api.put("resourceclaims", claim("c", "19Gi"));
    api.put(
        "pods",
        unschedulable(pod("p", &["c"]), "0/1 nodes are available: 1 cannot allocate all claims."),
    );
    let begun = Instant::now();
    api.fault(move |_, request| {
        let is_early = begun.elapsed() < Duration::from_secs(25);
        (is_early && request.path.ends_with("c/status"))
            .then(|| fake_api::failure(503, "ServiceUnavailable"))
    });
    let controller = Controller::start(&api);
    api.until("an allocation", |api| allocation(api, "c")).await;
    tokio::time::sleep(Duration::from_secs(19)).await;
    assert_eq!(event(&api, "p", "Rescheduling"), None, "kube-scheduler gets 20 s");
    api.until("that it is given up", |api| event(api, "p", "Rescheduling")).await;
    controller.stop().await;
}

#[tokio::test(start_paused = true)]
async fn interrupted_watches_extend_the_scheduler_deadline() {
    let api = cluster(1);
    api.put("resourceclaims", claim("c", "19Gi"));
    api.put(
        "pods",
        unschedulable(pod("p", &["c"]), "0/1 nodes are available: 1 cannot allocate all claims."),
    );
    let controller = Controller::start(&api);
    api.until("an allocation", |api| allocation(api, "c")).await;
    tokio::time::sleep(Duration::from_secs(10)).await;
    api.break_watches();
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(event(&api, "p", "Rescheduling"), None);
    api.until("that it is given up", |api| event(api, "p", "Rescheduling")).await;
    controller.stop().await;
}

#[tokio::test(start_paused = true)]
async fn no_claim_is_released_while_another_is_written() {
    let api = cluster(2);
    for name in ["one", "two"] {
        api.put("resourceclaims", claim(name, "19Gi"));
    }
    api.put(
        "pods",
        unschedulable(
            pod("p", &["one", "two"]),
            "0/1 nodes are available: 1 cannot allocate all claims.",
        ),
    );
    let begun = Instant::now();
    api.fault(move |_, request| {
        let is_early = begun.elapsed() < Duration::from_secs(25);
        (is_early && request.path.ends_with("two/status"))
            .then(|| fake_api::failure(503, "ServiceUnavailable"))
    });
    let controller = Controller::start(&api);
    let first = api.until("an allocation", |api| allocation(api, "one")).await;
    api.until("the other allocation", |api| allocation(api, "two")).await;
    tokio::time::sleep(Duration::from_secs(19)).await;
    assert_eq!(event(&api, "p", "Rescheduling"), None);
    assert_eq!(allocation(&api, "one"), Some(first));
    controller.stop().await;
}

#[tokio::test(start_paused = true)]
async fn missing_kind_is_listed_ever_more_rarely() {
    let api = cluster(1);
    api.lacks("devicetaintrules");
    let controller = Controller::start(&api);
    api.put("resourceclaims", claim("c", "19Gi"));
    api.put("pods", pod("p", &["c"]));
    api.until("an allocation", |api| allocation(api, "c")).await;
    tokio::time::sleep(Duration::from_secs(300)).await;
    let asked = api.lists().iter().filter(|(resource, _)| resource == "devicetaintrules").count();
    assert!((30..=45).contains(&asked), "every ten seconds in the end, not {asked} times");
    controller.stop().await;
}

#[tokio::test(start_paused = true)]
async fn kind_may_be_lost_and_served_again() {
    let api = cluster(1);
    let controller = Controller::start(&api);
    let in_group = |name: &str| {
        let mut pod = pod(name, &[name]);
        pod["spec"]["schedulingGroup"] = json!({"podGroupName": "train"});
        pod
    };
    api.put("resourceclaims", claim("first", "19Gi"));
    api.put("pods", in_group("first"));
    let note = api.until("an event", |api| event(api, "first", "GroupIncomplete")).await;
    assert!(note.contains("does not exist"), "{note}");
    api.lacks("podgroups");
    api.break_watches();
    api.until("an allocation", |api| allocation(api, "first")).await;
    api.permits("podgroups");
    tokio::time::sleep(Duration::from_secs(30)).await;
    api.put("resourceclaims", claim("second", "19Gi"));
    api.put("pods", in_group("second"));
    api.until("an event", |api| event(api, "second", "GroupIncomplete")).await;
    assert_eq!(allocation(&api, "second"), None);
    controller.stop().await;
}

#[tokio::test(start_paused = true)]
async fn forbidden_kind_is_reported_and_nothing_is_planned() {
    let api = cluster(1);
    api.forbids("devicetaintrules");
    let controller = Controller::start(&api);
    let metrics = controller.metrics.clone();
    let is_synced = |kind| metrics.watch_synced.get_or_create(&KindLabel { kind }).get();
    api.put("resourceclaims", claim("c", "19Gi"));
    api.put("pods", pod("p", &["c"]));
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(allocation(&api, "c"), None, "a rule may taint the device");
    assert_eq!((is_synced("DeviceTaintRule"), is_synced("ResourceClaim")), (0, 1));
    let labels = WatchFailureLabels { kind: "DeviceTaintRule", reason: "Forbidden" };
    let failures = metrics.watch_failures.get_or_create(&labels).get();
    assert!(failures >= 5, "{failures} refusals are counted");
    api.permits("devicetaintrules");
    api.until("an allocation", |api| allocation(api, "c")).await;
    assert_eq!(is_synced("DeviceTaintRule"), 1);
    controller.stop().await;
}

#[tokio::test(start_paused = true)]
async fn node_of_a_cleared_allocation_is_excluded_for_the_pod() {
    let api = cluster(1);
    api.put("resourceclaims", claim("c", "19Gi"));
    api.put("pods", pod("p", &["c"]));
    let controller = Controller::start(&api);
    api.until("an allocation", |api| allocation(api, "c")).await;
    let mut cleared = api.get("resourceclaims", "default", "c").unwrap();
    cleared.as_object_mut().unwrap().remove("status");
    api.put("resourceclaims", cleared);
    let note = api.until("an event", |api| event(api, "p", "Rescheduling")).await;
    assert!(note.contains("node-a"), "{note}");
    let note = api.until("an event", |api| event(api, "p", "InsufficientDevices")).await;
    assert!(note.contains("1 on nodes where the pod failed"), "{note}");
    api.put("nodes", node("node-b"));
    api.put("resourceslices", slice("node-b", 1));
    let got = api.until("another allocation", |api| allocation(api, "c")).await;
    assert_eq!(got["devices"]["results"][0]["pool"], "node-b");
    controller.stop().await;
}

#[tokio::test(start_paused = true)]
async fn preempted_node_is_allocated_again() {
    let api = cluster(1);
    api.put("resourceclaims", claim("c", "19Gi"));
    api.put("pods", pod("p", &["c"]));
    let controller = Controller::start(&api);
    api.until("an allocation", |api| allocation(api, "c")).await;
    let mut nominated = pod("p", &["c"]);
    nominated["status"]["nominatedNodeName"] = "node-a".into();
    api.put("pods", nominated);
    let mut cleared = api.get("resourceclaims", "default", "c").unwrap();
    cleared.as_object_mut().unwrap().remove("status");
    let version = api.put("resourceclaims", cleared)["metadata"]["resourceVersion"].clone();
    let again = |api: &FakeApi| {
        let object = api.get("resourceclaims", "default", "c")?;
        (object["metadata"]["resourceVersion"] != version).then(|| allocation(api, "c")).flatten()
    };
    let got = api.until("another allocation", again).await;
    assert_eq!(got["devices"]["results"][0]["pool"], "node-a");
    controller.stop().await;
}

#[tokio::test(start_paused = true)]
async fn room_made_is_remembered_without_the_nomination() {
    let api = cluster(1);
    api.put("resourceclaims", claim("c", "19Gi"));
    api.put("pods", pod("p", &["c"]));
    let controller = Controller::start(&api);
    api.until("an allocation", |api| allocation(api, "c")).await;
    add_node(&api, "node-b", 1);
    let mut cleared = api.get("resourceclaims", "default", "c").unwrap();
    cleared.as_object_mut().unwrap().remove("status");
    api.put("resourceclaims", cleared);
    let mut nominated = pod("p", &["c"]);
    nominated["status"]["nominatedNodeName"] = "node-a".into();
    api.put("pods", nominated);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(place(&api, "c"), None, "a PreBind under way has to find no allocation");
    // The victim is gone, kube-scheduler tries again, finds the claim without an allocation, and
    // takes its nomination back.
    api.put("pods", pod("p", &["c"]));
    api.until("another allocation", |api| allocation(api, "c")).await;
    assert_eq!(place(&api, "c").as_deref(), Some("node-a"));
    controller.stop().await;
}

#[tokio::test]
async fn restart_takes_over_allocations() {
    let api = cluster(1);
    api.put("resourceclaims", claim("large", "70Gi"));
    api.put("pods", pod("large", &["large"]));
    let controller = Controller::start(&api);
    let before = api.until("an allocation", |api| allocation(api, "large")).await;
    reserve_and_bind(&api, "large", &["large"]);
    controller.stop().await;
    api.put("resourceclaims", claim("c", "19Gi"));
    api.put("resourceclaims", claim("small", "10Gi"));
    api.put("pods", pod("p", &["c"]));
    api.put("pods", pod("small", &["small"]));
    let controller = Controller::start(&api);
    api.until("an allocation", |api| allocation(api, "small")).await;
    assert_eq!(allocation(&api, "c"), None, "19Gi do not fit beside 70Gi");
    assert_eq!(allocation(&api, "large"), Some(before));
    controller.stop().await;
}

#[tokio::test(start_paused = true)]
async fn deleted_claim_is_not_written_in_a_loop_before_its_watch() {
    let api = cluster(1);
    api.put("resourceclaims", claim("c", "19Gi"));
    let controller = Controller::start(&api);
    api.put("resourceclaims", claim("other", "19Gi"));
    api.put("pods", pod("other", &["other"]));
    api.until("proof that the claims were seen", |api| allocation(api, "other")).await;
    api.vanish("resourceclaims", "default", "c");
    api.put("pods", pod("p", &["c"]));
    tokio::time::sleep(Duration::from_secs(3)).await;
    let tries = api.writes().iter().filter(|w| w.path.contains("resourceclaims/c")).count();
    assert!((1..=3).contains(&tries), "{tries}");
    controller.stop().await;
}

#[tokio::test(start_paused = true)]
async fn unanswered_writes_do_not_delay_others() {
    let api = cluster(11);
    let stuck = |i: usize| format!("stuck{i}");
    for i in 0..40 {
        api.put("resourceclaims", claim(&stuck(i), "1Gi"));
        api.put("pods", pod(&stuck(i), &[&stuck(i)]));
    }
    // As an admission webhook that is away, for the objects that it is asked about.
    api.fault(|_, request| {
        request.path.contains("stuck").then(|| fake_api::failure(500, "InternalError"))
    });
    let controller = Controller::start(&api);
    api.put("resourceclaims", claim("z", "1Gi"));
    api.put("pods", pod("z", &["z"]));
    api.until("an allocation", |api| allocation(api, "z")).await;
    tokio::time::sleep(Duration::from_secs(90)).await;
    let note = event(&api, "stuck0", "APIServerTimeout").unwrap();
    assert!(note.contains("ResourceClaim stuck0"), "{note}");
    assert_eq!(controller.metrics.unanswered.get(), 40);
    controller.stop.cancel();
    assert!(!controller.task.await.unwrap(), "the others are still without an answer");
}

#[tokio::test(start_paused = true)]
async fn pending_pod_gets_events_ever_more_rarely() {
    let api = cluster(1);
    api.put("resourceclaims", claim("c", "90Gi"));
    api.put("pods", pod("p", &["c"]));
    let controller = Controller::start(&api);
    for i in 0..100 {
        tokio::time::sleep(Duration::from_secs(3)).await;
        api.put("nodes", node(&format!("more-{i}")));
        api.put("resourceslices", slice(&format!("more-{i}"), 1));
    }
    tokio::time::sleep(Duration::from_secs(600)).await;
    let notes: Vec<String> =
        api.list("events").iter().map(|e| e["note"].as_str().unwrap().to_owned()).collect();
    assert!((3..=12).contains(&notes.len()), "{notes:#?}");
    assert!(notes.iter().any(|n| n.contains(": 101 ")), "{notes:#?}");
    controller.stop().await;
}

#[tokio::test(start_paused = true)]
async fn incomplete_pod_does_not_move_a_shared_claim() {
    let api = cluster(1);
    api.put("resourceclaims", claim("shared", "19Gi"));
    api.put("resourceclaims", claim("huge", "90Gi"));
    // Of the same age, so that the first by UID counts as the older.
    api.put("pods", pod("a", &["shared", "huge"]));
    api.put("pods", pod("b", &["shared"]));
    let controller = Controller::start(&api);
    let first = api.until("an allocation", |api| allocation(api, "shared")).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    let writes =
        api.writes().iter().filter(|w| w.path.ends_with("resourceclaims/shared/status")).count();
    assert_eq!(writes, 1);
    assert_eq!(allocation(&api, "shared"), Some(first));
    // The younger one cannot run there: its failure counts.
    api.put(
        "pods",
        unschedulable(pod("b", &["shared"]), "0/1 nodes are available: 1 Insufficient cpu."),
    );
    api.until("its end", |api| allocation(api, "shared").is_none().then_some(())).await;
    controller.stop().await;
}

/// A claim whose selector goes over tens of thousands of numbers, and its pod, in a namespace of
/// their own.
fn put_expensive(api: &FakeApi, number: usize) {
    let name = format!("expensive-{number:02}");
    let expression =
        format!("lists.range(40000).all(i, i >= -{number}) && device.driver == 'gpu.tessera.dev'");
    let mut asking = claim(&name, "90Gi");
    asking["metadata"]["namespace"] = "tenant".into();
    asking["spec"]["devices"]["requests"][0]["exactly"]["selectors"] =
        json!([{"cel": {"expression": expression}}]);
    let mut waiting = pod(&name, &[&name]);
    waiting["metadata"]["namespace"] = "tenant".into();
    api.put("resourceclaims", asking);
    api.put("pods", waiting);
}

#[tokio::test(start_paused = true)]
async fn neighbor_is_allocated_while_expensive_pods_wait() {
    const EXPENSIVE: usize = 20;
    let api = cluster(1);
    (0..EXPENSIVE).for_each(|number| put_expensive(&api, number));
    let mut neighbor = pod("neighbor", &["c"]);
    neighbor["metadata"]["creationTimestamp"] = "1970-01-01T00:00:01Z".into();
    api.put("resourceclaims", claim("c", "19Gi"));
    api.put("pods", neighbor);
    let settings =
        PlanSettings { steps_per_pod: 20_000, steps_per_plan: 20_000, ..PlanSettings::default() };
    let controller = Controller::start_with(&api, settings);
    api.until("an allocation", |api| allocation(api, "c")).await;
    let cut = controller.metrics.plans_cut.get();
    assert!((1..5).contains(&cut), "{cut} plans ended before it");
    // Results of selectors are known in later plans.
    let told = |api: &FakeApi| {
        api.list("events").iter().filter(|e| e["reason"] == "InsufficientDevices").count()
    };
    api.until("events on all of them", |api| (told(api) == EXPENSIVE).then_some(())).await;
    controller.stop().await;
}

#[tokio::test(start_paused = true)]
async fn neighbor_is_allocated_while_bound_pods_are_expensive() {
    const EXPENSIVE: usize = 6;
    let api = cluster(1);
    for number in 0..EXPENSIVE {
        put_expensive(&api, number);
        let name = format!("expensive-{number:02}");
        let mut placed = api.get("pods", "tenant", &name).unwrap();
        placed["spec"]["nodeName"] = "node-a".into();
        api.put("pods", placed);
    }
    // Each takes more than the steps for all of them, so that one is planned in a step.
    let controller = Controller::start_with(
        &api,
        PlanSettings { steps_per_pod: 1_000_000, ..PlanSettings::default() },
    );
    api.put("resourceclaims", claim("c", "19Gi"));
    api.put("pods", pod("neighbor", &["c"]));
    api.until("an allocation", |api| allocation(api, "c")).await;
    let told = |api: &FakeApi| {
        api.list("events").iter().filter(|e| e["reason"] == "ClaimNodeMismatch").count()
    };
    api.until("events on all of them", |api| (told(api) == EXPENSIVE).then_some(())).await;
    controller.stop().await;
}

#[tokio::test(start_paused = true)]
async fn pod_that_is_not_decided_counts_as_pending_between_plans() {
    let api = cluster(2);
    let controller =
        Controller::start_with(&api, PlanSettings { steps_per_pod: 1, ..PlanSettings::default() });
    api.put("resourceclaims", claim("c", "19Gi"));
    api.put("pods", pod("p", &["c"]));
    api.until("an event", |api| event(api, "p", "SearchBudgetExceeded")).await;
    let waiting = ReasonLabel { reason: "SearchBudgetExceeded" };
    // Something changes every second, and the pod is not planned for minutes: the metric counts it
    // between plans.
    let mut planned = 0;
    for change in 0..600 {
        let before = controller.metrics.undecided_plans.get();
        add_node(&api, &format!("node-{change}"), 2);
        tokio::time::sleep(Duration::from_secs(1)).await;
        planned += controller.metrics.undecided_plans.get() - before;
        assert_eq!(controller.metrics.pending.get_or_create(&waiting).get(), 1);
    }
    assert!((1..=10).contains(&planned), "{planned} times in 600 s");
    controller.stop().await;
}
