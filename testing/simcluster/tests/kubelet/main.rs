//! The fake kubelet with a small DRA driver over real sockets: guarantees for drivers.

#![expect(clippy::unwrap_used, reason = "tests fail by panicking")]

mod harness;
mod plugin;

use std::path::Path;
use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::PostParams;
use kube::{Api, ResourceExt};
use serde_json::json;
use tessera_proto::SUPPORTS_DRA_V1BETA1;
use tessera_proto::health_v1::{DeviceHealth, DeviceIdentifier, HealthStatus};
use tessera_simcluster::node::container::ContainerState;
use tessera_test_support::test_name;

use harness::{ECHO, Harness, NODE, WAIT, container};
use plugin::{DRIVER, Plugin};

#[tokio::test]
async fn pod_gets_claim_edits_and_is_cleaned_up() {
    let Some((harness, kubelet)) = Harness::with_driver(test_name!()).await else { return };
    let mut status = harness.script.status.subscribe();
    assert!(status.wait_for(Option::is_some).await.unwrap().as_ref().unwrap().plugin_registered);
    harness.claim("claim").await;
    harness.run("pod", ECHO, &["claim"]).await;
    harness.phase("pod", "Succeeded").await;
    assert_eq!(harness.log("pod").await, "claim\n");
    // The claim is unprepared before the API shows the end.
    assert_eq!(
        harness.script.calls(),
        [("prepare", vec!["claim".into()]), ("unprepare", vec!["claim".into()])]
    );
    harness.delete("pod").await;
    harness.gone("pod").await;
    assert_eq!(harness.script.calls().len(), 2);
    assert_eq!(std::fs::read_dir(harness.root().join("pods")).unwrap().count(), 0);
    kubelet.stop().await;
}

#[tokio::test]
async fn shared_claim_is_prepared_once_and_unprepared_last() {
    let Some((harness, kubelet)) = Harness::with_driver(test_name!()).await else { return };
    harness.claim("claim").await;
    for name in ["one", "two"] {
        harness.run(name, WAIT, &["claim"]).await;
        harness.phase(name, "Running").await;
    }
    harness.delete("one").await;
    harness.gone("one").await;
    assert_eq!(harness.script.calls(), [("prepare", vec!["claim".into()])]);
    harness.delete("two").await;
    harness.gone("two").await;
    assert_eq!(harness.script.calls().last().unwrap(), &("unprepare", vec!["claim".into()]));
    kubelet.stop().await;
}

#[tokio::test]
async fn claims_of_a_pod_are_prepared_in_one_call() {
    let Some((harness, kubelet)) = Harness::with_driver(test_name!()).await else { return };
    harness.claim("one").await;
    harness.claim("two").await;
    let spec = json!({"containers": [container(ECHO, &["two"])]});
    harness.pod("pod", &["one", "two"], spec).await;
    harness.phase("pod", "Succeeded").await;
    assert_eq!(harness.log("pod").await, "two\n");
    assert_eq!(harness.script.calls()[0], ("prepare", vec!["one".into(), "two".into()]));
    kubelet.stop().await;
}

#[tokio::test]
async fn unreserved_claim_is_not_sent_to_driver() {
    let Some((harness, kubelet)) = Harness::with_driver(test_name!()).await else { return };
    harness.claim("claim").await;
    let spec = json!({"containers": [container(ECHO, &["claim"])]});
    let pod = harness.pod_without_reservation("pod", &["claim"], spec).await;
    let event = harness.event("FailedPrepareDynamicResources").await;
    assert!(event.contains("not allowed to use ResourceClaim claim"), "{event}");
    assert_eq!(harness.script.calls(), []);
    harness.reserve("claim", &pod).await;
    harness.phase("pod", "Succeeded").await;
    kubelet.stop().await;
}

#[tokio::test]
async fn failed_prepare_is_retried_with_one_event() {
    let Some((harness, kubelet)) = Harness::with_driver(test_name!()).await else { return };
    harness.script.fail("claim", "cannot reset the GPU");
    harness.claim("claim").await;
    harness.run("pod", ECHO, &["claim"]).await;
    harness.script.wait_for_calls(3).await;
    harness.script.succeed("claim");
    harness.phase("pod", "Succeeded").await;
    // The kubelet may have seen the pod before its claim was reserved, which is another event.
    let mut events = harness.events("FailedPrepareDynamicResources").await;
    events.retain(|event| event.message.as_deref().unwrap().contains("cannot reset the GPU"));
    assert_eq!(events.len(), 1);
    kubelet.stop().await;
}

#[tokio::test]
async fn failing_unprepare_delays_pod_deletion() {
    let Some((harness, kubelet)) = Harness::with_driver(test_name!()).await else { return };
    harness.claim("claim").await;
    harness.run("pod", WAIT, &["claim"]).await;
    harness.phase("pod", "Running").await;
    harness.script.fail("claim", "busy");
    harness.delete("pod").await;
    harness.script.wait_for_calls(3).await;
    assert!(harness.pods().get_opt("pod").await.unwrap().is_some());
    harness.script.succeed("claim");
    harness.gone("pod").await;
    kubelet.stop().await;
}

#[tokio::test]
async fn restarted_kubelet_adopts_containers_and_prepares_again() {
    let Some((harness, kubelet)) = Harness::with_driver(test_name!()).await else { return };
    harness.claim("claim").await;
    harness.claim("other").await;
    let pod = harness.run("stays", WAIT, &["claim"]).await;
    harness.run("goes", WAIT, &["other"]).await;
    harness.phase("stays", "Running").await;
    harness.phase("goes", "Running").await;
    let before = harness.runtime.containers(&pod.uid().unwrap());
    kubelet.stop().await;

    // No kubelet runs, so the pod is force-deleted.
    let force = kube::api::DeleteParams { grace_period_seconds: Some(0), ..Default::default() };
    harness.pods().delete("goes", &force).await.unwrap();
    let kubelet = harness.kubelet().await;
    kubelet.registered(DRIVER).await;
    let calls = harness.script.wait_for_calls(4).await;
    assert!(calls[2..].contains(&("unprepare", vec!["other".into()])), "{calls:?}");
    assert!(calls[2..].contains(&("prepare", vec!["claim".into()])), "{calls:?}");
    let after = harness.runtime.containers(&pod.uid().unwrap());
    assert_eq!(before, after);
    assert!(matches!(after[0].state, ContainerState::Running { .. }));
    harness.delete("stays").await;
    harness.gone("stays").await;
    let calls = harness.script.calls();
    assert_eq!(calls.iter().filter(|(call, _)| *call == "prepare").count(), 3, "{calls:?}");
    kubelet.stop().await;
}

#[tokio::test]
async fn v1beta1_driver_is_called_as_v1beta1() {
    let Some(mut harness) = Harness::set_up(test_name!()).await else { return };
    let plugin = Plugin::serve_versions(&harness.root(), &harness.script, &[SUPPORTS_DRA_V1BETA1]);
    let kubelet = harness.register(plugin).await;
    harness.claim("claim").await;
    harness.run("pod", WAIT, &["claim"]).await;
    harness.phase("pod", "Running").await;
    assert_eq!(harness.script.calls(), [("prepare", vec!["claim".into()])]);
    kubelet.stop().await;
    harness.runtime.shut_down().await;
}

#[tokio::test]
async fn driver_of_unknown_version_is_rejected_with_reason() {
    let Some(harness) = Harness::set_up(test_name!()).await else { return };
    let _plugin = Plugin::serve_versions(&harness.root(), &harness.script, &["v9.DRAPlugin"]);
    let kubelet = harness.kubelet().await;
    let mut status = harness.script.status.subscribe();
    let status = status.wait_for(Option::is_some).await.unwrap().clone().unwrap();
    assert!(!status.plugin_registered);
    assert!(status.error.contains("v9.DRAPlugin"), "{}", status.error);
    kubelet.stop().await;
}

#[tokio::test]
async fn device_health_is_in_pod_status() {
    let Some((harness, kubelet)) = Harness::with_driver(test_name!()).await else { return };
    harness.claim("claim").await;
    harness.run("pod", WAIT, &["claim"]).await;
    harness.phase("pod", "Running").await;
    for (health, word) in
        [(HealthStatus::Healthy, "Healthy"), (HealthStatus::Unhealthy, "Unhealthy")]
    {
        harness.script.report(vec![DeviceHealth {
            device: Some(DeviceIdentifier {
                pool_name: "pool".into(),
                device_name: "device".into(),
            }),
            health: health.into(),
            ..DeviceHealth::default()
        }]);
        harness
            .container_status("pod", |status| {
                let resources = &status["allocatedResourcesStatus"][0];
                resources["name"] == "claim:claim" && resources["resources"][0]["health"] == word
            })
            .await;
    }
    kubelet.stop().await;
    harness.runtime.shut_down().await;
}

#[tokio::test]
async fn slices_are_wiped_at_start_and_after_disconnect() {
    let Some(harness) = Harness::set_up(test_name!()).await else { return };
    let api: Api<ResourceSlice> = Api::all(harness.client.clone());
    let publish = |name: &'static str, node: &'static str| {
        let slice = json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": name},
            "spec": {"driver": DRIVER, "nodeName": node, "devices": [],
                "pool": {"name": node, "generation": 1, "resourceSliceCount": 1}},
        });
        let api = api.clone();
        async move {
            api.create(&PostParams::default(), &serde_json::from_value(slice).unwrap())
                .await
                .unwrap()
        }
    };
    publish("old", NODE).await;
    publish("elsewhere", "node-b").await;
    let kubelet = harness.kubelet_with(Duration::from_millis(50)).await;
    assert!(api.get_opt("old").await.unwrap().is_none());
    assert!(api.get_opt("elsewhere").await.unwrap().is_some());

    let plugin = Plugin::serve(&harness.root(), &harness.script);
    kubelet.registered(DRIVER).await;
    publish("new", NODE).await;
    drop(plugin);
    let gone = kube::runtime::wait::await_condition(
        api.clone(),
        "new",
        kube::runtime::conditions::is_deleted(""),
    );
    let _ = tokio::time::timeout(Duration::from_secs(300), gone).await.expect("the slice is wiped");
    assert!(api.get_opt("elsewhere").await.unwrap().is_some());
    kubelet.stop().await;
}

#[tokio::test]
async fn init_containers_run_first_and_in_order() {
    let Some(harness) = Harness::set_up(test_name!()).await else { return };
    let kubelet = harness.kubelet().await;
    let step = |name: &str, script: &str| {
        let mount = json!([{"name": "work", "mountPath": "/work"}]);
        json!({"name": name, "image": "tools", "command": ["sh", "-c", script], "volumeMounts": mount})
    };
    let spec = json!({
        "volumes": [{"name": "work", "emptyDir": {}}],
        "initContainers": [step("i1", "echo 1 >>/work/order"), step("i2", "echo 2 >>/work/order")],
        "containers": [step("c", "cat /work/order")],
    });
    harness.pod("pod", &[], spec).await;
    harness.phase("pod", "Succeeded").await;
    assert_eq!(harness.log("pod").await, "1\n2\n");
    kubelet.stop().await;
}

#[tokio::test]
async fn uncreated_container_is_in_status_and_event() {
    let Some(harness) = Harness::set_up(test_name!()).await else { return };
    let kubelet = harness.kubelet().await;
    let spec = json!({"containers": [{"name": "c", "image": "nowhere/nothing:1"}]});
    harness.pod("pod", &[], spec).await;
    let event = harness.event("Failed").await;
    assert!(event.contains("nowhere/nothing:1"), "{event}");
    harness
        .container_status("pod", |status| {
            status["state"]["waiting"]["reason"] == "ErrImageNeverPull"
        })
        .await;
    harness.delete("pod").await;
    harness.gone("pod").await;
    kubelet.stop().await;
}

#[tokio::test]
async fn failed_program_fails_pod_and_grace_period_ends_in_kill() {
    let Some(harness) = Harness::set_up(test_name!()).await else { return };
    let kubelet = harness.kubelet().await;
    harness.run("fails", "exit 3", &[]).await;
    let pod = serde_json::to_value(harness.phase("fails", "Failed").await).unwrap();
    assert_eq!(pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"], 3);
    let pod = harness.run("ignores-sigterm", "while :; do sleep 1; done", &[]).await;
    harness.phase("ignores-sigterm", "Running").await;
    let containers = harness.runtime.containers(&pod.uid().unwrap());
    let ContainerState::Running { pid, .. } = containers[0].state else { panic!("{containers:?}") };
    harness.delete("ignores-sigterm").await;
    harness.gone("ignores-sigterm").await;
    assert!(!Path::new("/proc").join(pid.to_string()).exists());
    kubelet.stop().await;
}
