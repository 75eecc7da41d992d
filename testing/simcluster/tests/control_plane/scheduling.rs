use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures::TryStreamExt;
use k8s_openapi::api::core::v1::{Event, Node, Pod};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams};
use kube::runtime::{WatchStreamExt, watcher};
use serde_json::json;
use tessera_simcluster::api::{ApiError, Fault};
use tessera_simcluster::scheduler::SchedulerOptions;

use crate::{
    TIMEOUT, allocate, allocated, apis, claim, cluster, consumers, create, generated, names, node,
    node_of, patch, patch_status, plain_pod, pod, present, sim, template, unschedulable, until,
    with_claim,
};

async fn until_bound(pods: &Api<Pod>, name: &str) -> String {
    let pod = until(pods, name, present(|pod: &Pod| node_of(pod).is_some())).await.unwrap();
    node_of(&pod).unwrap().to_owned()
}

/// Waits until the pod is unschedulable with exactly this message.
async fn until_unschedulable(pods: &Api<Pod>, name: &str, message: &str) -> Pod {
    let expected = message.to_owned();
    until_rejected(pods, name, move |message| message == expected).await
}

/// Waits until the pod is unschedulable with a message that is accepted.
async fn until_rejected(pods: &Api<Pod>, name: &str, accept: impl Fn(&str) -> bool) -> Pod {
    let is_rejected = |pod: &Pod| unschedulable(pod).is_some_and(|message| accept(&message));
    until(pods, name, present(is_rejected)).await.unwrap()
}

#[tokio::test]
async fn pod_is_bound_with_condition() {
    let (_cluster, client) = cluster().await;
    let (pods, _) = apis(&client);
    node(&client, "node-a", "4").await;
    create(&pods, plain_pod("p", "1")).await;
    assert_eq!(until_bound(&pods, "p").await, "node-a");
    let conditions = pods.get("p").await.unwrap().status.unwrap().conditions.unwrap();
    assert!(
        conditions
            .iter()
            .any(|condition| condition.type_ == "PodScheduled" && condition.status == "True")
    );
}

#[tokio::test]
async fn pod_without_nodes_is_reported_and_retried() {
    let (_cluster, client) = cluster().await;
    let (pods, _) = apis(&client);
    create(&pods, plain_pod("p", "1")).await;
    until_unschedulable(&pods, "p", "no nodes available to schedule pods").await;
    node(&client, "node-a", "4").await;
    assert_eq!(until_bound(&pods, "p").await, "node-a");
}

#[tokio::test]
async fn pods_spread_by_load_then_by_name() {
    let (mut cluster, client) = sim().await;
    let (pods, _) = apis(&client);
    cluster.stop_scheduler().await;
    node(&client, "node-b", "4").await;
    node(&client, "node-a", "4").await;
    cluster.start_scheduler(SchedulerOptions::default());
    for (name, expected) in [("one", "node-a"), ("two", "node-b"), ("three", "node-a")] {
        create(&pods, plain_pod(name, "1")).await;
        assert_eq!(until_bound(&pods, name).await, expected);
    }
}

#[tokio::test]
async fn node_is_never_overcommitted() {
    let (_cluster, client) = cluster().await;
    let (pods, _) = apis(&client);
    node(&client, "node-a", "3").await;
    for index in 0..5 {
        create(&pods, plain_pod(&format!("p-{index}"), "1")).await;
    }
    let message = "0/1 nodes are available: 1 Insufficient cpu. preemption: 0/1 nodes are available: 1 No preemption victims found for incoming pod.";
    // Any three pods: if a binding fails on a busy machine, its pod is retried after the
    // others.
    let bound = async |count| {
        let names = (0..5).map(|index| format!("p-{index}"));
        let (mut bound, mut pending) = (Vec::new(), Vec::new());
        for name in names {
            let decided = |pod: &Pod| {
                node_of(pod).is_some() || unschedulable(pod).as_deref() == Some(message)
            };
            let Some(pod) =
                until(&pods, &name, move |pod: Option<&Pod>| pod.is_none_or(decided)).await
            else {
                continue;
            };
            let list = if node_of(&pod).is_some() { &mut bound } else { &mut pending };
            list.push(name);
        }
        assert_eq!(bound.len(), count, "{bound:?}");
        (bound, pending)
    };
    let (running, pending) = bound(3).await;
    assert_eq!(pending.len(), 2);
    pods.delete(&running[0], &DeleteParams::default().grace_period(0)).await.unwrap();
    let first = pending.iter().map(|name| Box::pin(until_bound(&pods, name)));
    assert_eq!(futures::future::select_all(first).await.0, "node-a");
    let (running, pending) = bound(3).await;
    assert_eq!((running.len(), pending.len()), (3, 1));
}

#[tokio::test]
async fn every_filter_reports_its_reason() {
    let (_cluster, client) = cluster().await;
    let (pods, _) = apis(&client);
    let nodes: Api<Node> = Api::all(client.clone());
    for name in ["cordoned", "tainted", "silent", "small"] {
        node(&client, name, if name == "small" { "1" } else { "4" }).await;
    }
    patch(&nodes, "cordoned", json!({"spec": {"unschedulable": true}})).await;
    patch(&nodes, "tainted", json!({"spec": {"taints": [{"key": "a", "effect": "NoSchedule"}]}}))
        .await;
    let silent = json!({"key": "node.kubernetes.io/not-ready", "effect": "NoSchedule"});
    patch(&nodes, "silent", json!({"spec": {"taints": [silent]}})).await;
    let mut wants = plain_pod("p", "2");
    wants["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": "small"});
    create(&pods, wants).await;
    let message = "0/4 nodes are available: 1 Insufficient cpu, 1 node(s) were unschedulable, 2 node(s) had untolerated taint(s). \
        preemption: 0/4 nodes are available: 4 Preemption is not helpful for scheduling.";
    until_unschedulable(&pods, "p", message).await;
    patch(&nodes, "cordoned", json!({"spec": {"unschedulable": null}})).await;
    let message = "0/4 nodes are available: 1 Insufficient cpu, 1 node(s) didn't match Pod's node affinity/selector, 2 node(s) had untolerated taint(s). \
        preemption: 0/4 nodes are available: 4 Preemption is not helpful for scheduling.";
    until_unschedulable(&pods, "p", message).await;
}

#[tokio::test]
async fn node_that_is_not_ready_gets_no_pods() {
    // On a real cluster the node life cycle controller adds a taint in between.
    let (mut cluster, client) = sim().await;
    cluster.stop_scheduler().await;
    let (pods, _) = apis(&client);
    let nodes: Api<Node> = Api::all(client.clone());
    node(&client, "node-a", "4").await;
    patch_status(&nodes, "node-a", json!({"conditions": [{"type": "Ready", "status": "Unknown"}]}))
        .await;
    cluster.start_scheduler(SchedulerOptions::default());
    let message = "0/1 nodes are available: 1 node(s) had untolerated taint(s). preemption: 0/1 nodes are available: 1 Preemption is not helpful for scheduling.";
    create(&pods, plain_pod("p", "1")).await;
    until_unschedulable(&pods, "p", message).await;
    patch_status(&nodes, "node-a", json!({"conditions": [{"type": "Ready", "status": "True"}]}))
        .await;
    assert_eq!(until_bound(&pods, "p").await, "node-a");
}

#[tokio::test]
async fn pod_is_pending_until_its_claim_is_allocated() {
    let (_cluster, client) = cluster().await;
    let (pods, claims) = apis(&client);
    node(&client, "node-a", "4").await;
    node(&client, "node-b", "4").await;
    template(&client, "gpu").await;
    create(&pods, pod("p", json!({"resourceClaimTemplateName": "gpu"}))).await;
    let name = generated(&pods, "p").await;
    let message = "0/2 nodes are available: 2 cannot allocate all claims. preemption: 0/2 nodes are available: 2 Preemption is not helpful for scheduling.";
    let rejected = until_unschedulable(&pods, "p", message).await;
    let conditions = rejected.status.unwrap().conditions.unwrap();
    let scheduled = conditions.iter().find(|condition| condition.type_ == "PodScheduled").unwrap();
    assert_eq!(
        (scheduled.reason.as_deref(), scheduled.observed_generation),
        (Some("Unschedulable"), Some(1))
    );
    let events: Api<Event> = Api::default_namespaced(client.clone());
    let failed = ListParams::default().fields("reason=FailedScheduling");
    let has_message = |event: &Event| event.message.as_deref() == Some(message);
    let reported = async {
        while !events.list(&failed).await.unwrap().iter().any(has_message) {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(TIMEOUT, reported).await.unwrap();
    allocate(&client, &name, "node-b").await;
    assert_eq!(until_bound(&pods, "p").await, "node-b");
    assert_eq!(consumers(&claims.get(&name).await.unwrap()), ["p"]);
    assert_eq!(pods.get("p").await.unwrap().status.unwrap().nominated_node_name, None);
}

#[tokio::test]
async fn missing_device_class_is_named() {
    let (_cluster, client) = cluster().await;
    let (pods, claims) = apis(&client);
    node(&client, "node-a", "4").await;
    let request = json!({"name": "gpu", "exactly": {"deviceClassName": "h200.gpu.tessera.dev"}});
    create(
        &claims,
        json!({"metadata": {"name": "shared"}, "spec": {"devices": {"requests": [request]}}}),
    )
    .await;
    create(&pods, pod("p", with_claim())).await;
    let starts =
        "0/1 nodes are available: request gpu: device class h200.gpu.tessera.dev does not exist.";
    until_rejected(&pods, "p", |message| message.starts_with(starts)).await;
}

#[tokio::test]
async fn gated_pods_wait_without_an_attempt() {
    let (_cluster, client) = cluster().await;
    let (pods, _) = apis(&client);
    node(&client, "node-a", "4").await;
    let mut gated = plain_pod("gated", "1");
    gated["spec"]["schedulingGates"] = json!([{"name": "x.io/wait"}]);
    create(&pods, gated).await;
    create(&pods, pod("claimless", json!({"resourceClaimTemplateName": "none"}))).await;
    create(&pods, plain_pod("later", "1")).await;
    until_bound(&pods, "later").await;
    let by_gate = "Scheduling is blocked due to non-empty scheduling gates";
    for (name, message) in [("gated", Some(by_gate)), ("claimless", None)] {
        let pod = pods.get(name).await.unwrap();
        assert_eq!(node_of(&pod), None);
        assert_eq!(unschedulable(&pod).as_deref(), message, "{name}");
    }
    patch(&pods, "gated", json!({"spec": {"schedulingGates": null}})).await;
    until_bound(&pods, "gated").await;
}

#[tokio::test]
async fn claim_on_full_node_is_deallocated_for_another_node() {
    let (_cluster, client) = cluster().await;
    let (pods, claims) = apis(&client);
    node(&client, "node-a", "1").await;
    node(&client, "node-b", "1").await;
    let mut full = plain_pod("full", "1");
    full["spec"]["nodeSelector"] = json!({"kubernetes.io/hostname": "node-a"});
    create(&pods, full).await;
    until_bound(&pods, "full").await;
    claim(&client, "shared").await;
    allocate(&client, "shared", "node-a").await;
    create(&pods, pod("p", with_claim())).await;
    let starts = "0/2 nodes are available: 1 Insufficient cpu, 1 resourceclaim not available on the node. deallocation of ResourceClaim completed, preemption:";
    let changes = watcher(claims.clone(), watcher::Config::default()).applied_objects();
    let mut changes = std::pin::pin!(changes);
    let freed = async {
        while let Some(claim) = changes.try_next().await.unwrap() {
            if !allocated(&claim) {
                return claim;
            }
        }
        panic!("the watch ended");
    };
    let freed = tokio::time::timeout(TIMEOUT, freed).await.unwrap();
    assert_eq!(freed.finalizers().len(), 1, "the finalizer stays");
    let accept = |message: &str| message.starts_with(starts) || message.contains("cannot allocate");
    until_rejected(&pods, "p", accept).await;
    allocate(&client, "shared", "node-b").await;
    assert_eq!(until_bound(&pods, "p").await, "node-b");
}

#[tokio::test]
async fn claim_on_full_node_stays_without_another_node() {
    let (_cluster, client) = cluster().await;
    let (pods, claims) = apis(&client);
    node(&client, "node-a", "1").await;
    create(&pods, plain_pod("full", "1")).await;
    until_bound(&pods, "full").await;
    claim(&client, "shared").await;
    allocate(&client, "shared", "node-a").await;
    create(&pods, pod("p", with_claim())).await;
    let message = "0/1 nodes are available: 1 Insufficient cpu. preemption: 0/1 nodes are available: 1 No preemption victims found for incoming pod.";
    until_unschedulable(&pods, "p", message).await;
    assert!(allocated(&claims.get("shared").await.unwrap()));
}

#[tokio::test]
async fn second_pod_never_deallocates_a_used_claim() {
    let (_cluster, client) = cluster().await;
    let (pods, claims) = apis(&client);
    node(&client, "node-a", "1").await;
    node(&client, "node-b", "1").await;
    claim(&client, "shared").await;
    create(&pods, pod("one", with_claim())).await;
    allocate(&client, "shared", "node-a").await;
    until_bound(&pods, "one").await;
    create(&pods, pod("two", with_claim())).await;
    let starts = "0/2 nodes are available: 1 Insufficient cpu, 1 resourceclaim not available on the node. preemption:";
    until_rejected(&pods, "two", |message| message.starts_with(starts)).await;
    let claim = claims.get("shared").await.unwrap();
    assert!(allocated(&claim));
    assert_eq!(consumers(&claim), ["one"]);
}

#[tokio::test]
async fn claim_without_allocation_time_prevents_binding() {
    let (_cluster, client) = cluster().await;
    let (pods, claims) = apis(&client);
    node(&client, "node-a", "4").await;
    claim(&client, "shared").await;
    let selector = json!({"nodeSelectorTerms": [{"matchFields": [
        {"key": "metadata.name", "operator": "In", "values": ["node-a"]},
    ]}]});
    let allocation = json!({"devices": {"results": [
        {"request": "gpu", "driver": "d.e", "pool": "node-a", "device": "gpu-0"},
    ]}, "nodeSelector": selector});
    patch_status(&claims, "shared", json!({"allocation": allocation})).await;
    create(&pods, pod("p", with_claim())).await;
    let immutable = "field cannot be modified once set";
    let failed_pod = until_rejected(&pods, "p", |message| message.contains(immutable)).await;
    let conditions = failed_pod.status.unwrap().conditions.unwrap();
    assert!(
        conditions.iter().any(|condition| condition.reason.as_deref() == Some("SchedulerError"))
    );
}

#[tokio::test]
async fn failed_binding_is_unreserved_and_retried() {
    let (cluster, client) = sim().await;
    let (pods, claims) = apis(&client);
    node(&client, "node-a", "4").await;
    claim(&client, "shared").await;
    let failing = Arc::new(AtomicBool::new(true));
    let seen = failing.clone();
    cluster.api().set_fault_hook(Some(Arc::new(move |request| {
        let binding = request.subresource == "binding" && seen.load(Ordering::SeqCst);
        if binding {
            Fault::Refuse(ApiError::internal("etcdserver: timed out"))
        } else {
            Fault::None
        }
    })));
    create(&pods, pod("p", with_claim())).await;
    allocate(&client, "shared", "node-a").await;
    until_rejected(&pods, "p", |message| message.contains("binding rejected")).await;
    let claim = claims.get("shared").await.unwrap();
    assert!(allocated(&claim) && consumers(&claim).is_empty());
    failing.store(false, Ordering::SeqCst);
    assert_eq!(until_bound(&pods, "p").await, "node-a");
    assert_eq!(consumers(&claims.get("shared").await.unwrap()), ["p"]);
}

#[tokio::test]
async fn hundred_pods_with_claims_are_all_bound() {
    let (_cluster, client) = cluster().await;
    let (pods, claims) = apis(&client);
    node(&client, "node-a", "64").await;
    node(&client, "node-b", "64").await;
    template(&client, "gpu").await;
    for index in 0..100 {
        create(&pods, pod(&format!("p-{index}"), json!({"resourceClaimTemplateName": "gpu"})))
            .await;
    }
    for index in 0..100 {
        let claim = generated(&pods, &format!("p-{index}")).await;
        allocate(&client, &claim, if index % 2 == 0 { "node-a" } else { "node-b" }).await;
    }
    for index in 0..100 {
        let expected = if index % 2 == 0 { "node-a" } else { "node-b" };
        assert_eq!(until_bound(&pods, &format!("p-{index}")).await, expected);
    }
    let all = claims.list(&ListParams::default()).await.unwrap().items;
    assert_eq!(names(all.iter().filter(|claim| consumers(claim).len() == 1).cloned()).len(), 100);
}
