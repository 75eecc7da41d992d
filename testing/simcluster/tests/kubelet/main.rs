//! The kubelet stand-in against a small DRA driver over real sockets: what a driver may rely on.

#![expect(clippy::unwrap_used, reason = "a test says by panicking where it stands")]

mod plugin;
mod rig;

use std::path::Path;
use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::PostParams;
use kube::{Api, ResourceExt};
use serde_json::json;
use tessera_proto::SUPPORTS_DRA_V1BETA1;
use tessera_proto::health_v1::{DeviceHealth, DeviceIdentifier, HealthStatus};
use tessera_simcluster::node::container::State;
use tessera_test_support::test_name;

use plugin::{DRIVER, Plugin};
use rig::{NODE, Rig, WAIT, container};

#[tokio::test]
async fn a_pod_runs_with_what_its_claim_injects_and_leaves_nothing() {
    let Some(rig) = Rig::set_up(test_name!()).await else { return };
    let _plugin = Plugin::serve(&rig.root(), &rig.script);
    let kubelet = rig.kubelet().await;
    kubelet.registered(DRIVER).await;
    let mut status = rig.script.status.subscribe();
    assert!(status.wait_for(Option::is_some).await.unwrap().as_ref().unwrap().plugin_registered);
    rig.claim("claim").await;
    rig.pod("pod", &["claim"], json!({"containers": [container("echo $CLAIM", &["claim"])]})).await;
    rig.phase("pod", "Succeeded").await;
    assert_eq!(rig.log("pod").await, "claim\n");
    // Unprepared before the API hears of the end.
    assert_eq!(
        rig.script.calls(),
        [("prepare", vec!["claim".into()]), ("unprepare", vec!["claim".into()])]
    );
    rig.delete("pod").await;
    rig.gone("pod").await;
    assert_eq!(rig.script.calls().len(), 2);
    assert_eq!(std::fs::read_dir(rig.root().join("pods")).unwrap().count(), 0);
    kubelet.stop().await;
}

#[tokio::test]
async fn a_shared_claim_is_prepared_once_and_unprepared_by_its_last_pod() {
    let Some(rig) = Rig::set_up(test_name!()).await else { return };
    let _plugin = Plugin::serve(&rig.root(), &rig.script);
    let kubelet = rig.kubelet().await;
    kubelet.registered(DRIVER).await;
    rig.claim("claim").await;
    for name in ["one", "two"] {
        rig.pod(name, &["claim"], json!({"containers": [container(WAIT, &["claim"])]})).await;
        rig.phase(name, "Running").await;
    }
    rig.delete("one").await;
    rig.gone("one").await;
    assert_eq!(rig.script.calls(), [("prepare", vec!["claim".into()])]);
    rig.delete("two").await;
    rig.gone("two").await;
    assert_eq!(rig.script.calls().last().unwrap(), &("unprepare", vec!["claim".into()]));
    kubelet.stop().await;
}

#[tokio::test]
async fn the_claims_of_a_pod_come_in_one_call() {
    let Some(rig) = Rig::set_up(test_name!()).await else { return };
    let _plugin = Plugin::serve(&rig.root(), &rig.script);
    let kubelet = rig.kubelet().await;
    kubelet.registered(DRIVER).await;
    rig.claim("one").await;
    rig.claim("two").await;
    rig.pod("pod", &["one", "two"], json!({"containers": [container("echo $CLAIM", &["two"])]}))
        .await;
    rig.phase("pod", "Succeeded").await;
    assert_eq!(rig.log("pod").await, "two\n");
    assert_eq!(rig.script.calls()[0], ("prepare", vec!["one".into(), "two".into()]));
    kubelet.stop().await;
}

#[tokio::test]
async fn a_claim_that_is_not_reserved_for_the_pod_reaches_no_driver() {
    let Some(rig) = Rig::set_up(test_name!()).await else { return };
    let _plugin = Plugin::serve(&rig.root(), &rig.script);
    let kubelet = rig.kubelet().await;
    kubelet.registered(DRIVER).await;
    rig.claim("claim").await;
    let spec = json!({"containers": [container("echo $CLAIM", &["claim"])]});
    let pod = rig.pod_without_reservation("pod", &["claim"], spec).await;
    let event = rig.event("FailedPrepareDynamicResources").await;
    assert!(event.contains("not allowed to use ResourceClaim claim"), "{event}");
    assert_eq!(rig.script.calls(), []);
    rig.reserve("claim", &pod).await;
    rig.phase("pod", "Succeeded").await;
    kubelet.stop().await;
}

#[tokio::test]
async fn a_failed_prepare_is_told_and_tried_again_and_told_once() {
    let Some(rig) = Rig::set_up(test_name!()).await else { return };
    let _plugin = Plugin::serve(&rig.root(), &rig.script);
    let kubelet = rig.kubelet().await;
    kubelet.registered(DRIVER).await;
    rig.script.fail("claim", "the GPU is on fire");
    rig.claim("claim").await;
    rig.pod("pod", &["claim"], json!({"containers": [container("echo $CLAIM", &["claim"])]})).await;
    rig.script.called(3).await;
    rig.script.heal("claim");
    rig.phase("pod", "Succeeded").await;
    // The kubelet may have seen the pod before its claim was reserved, which is another event.
    let mut events = rig.events("FailedPrepareDynamicResources").await;
    events.retain(|event| event.message.as_deref().unwrap().contains("the GPU is on fire"));
    assert_eq!(events.len(), 1);
    kubelet.stop().await;
}

#[tokio::test]
async fn a_failing_unprepare_holds_the_pod_until_it_succeeds() {
    let Some(rig) = Rig::set_up(test_name!()).await else { return };
    let _plugin = Plugin::serve(&rig.root(), &rig.script);
    let kubelet = rig.kubelet().await;
    kubelet.registered(DRIVER).await;
    rig.claim("claim").await;
    rig.pod("pod", &["claim"], json!({"containers": [container(WAIT, &["claim"])]})).await;
    rig.phase("pod", "Running").await;
    rig.script.fail("claim", "busy");
    rig.delete("pod").await;
    rig.script.called(3).await;
    assert!(rig.pods().get_opt("pod").await.unwrap().is_some());
    rig.script.heal("claim");
    rig.gone("pod").await;
    kubelet.stop().await;
}

#[tokio::test]
async fn a_restarted_kubelet_finds_its_containers_and_prepares_nothing_again() {
    let Some(rig) = Rig::set_up(test_name!()).await else { return };
    let _plugin = Plugin::serve(&rig.root(), &rig.script);
    let kubelet = rig.kubelet().await;
    kubelet.registered(DRIVER).await;
    rig.claim("claim").await;
    rig.claim("other").await;
    let pod =
        rig.pod("stays", &["claim"], json!({"containers": [container(WAIT, &["claim"])]})).await;
    rig.pod("goes", &["other"], json!({"containers": [container(WAIT, &["other"])]})).await;
    rig.phase("stays", "Running").await;
    rig.phase("goes", "Running").await;
    let before = rig.runtime.containers(&pod.uid().unwrap());
    kubelet.stop().await;

    // Nobody is there to end it, so an impatient administrator takes the object away.
    let force = kube::api::DeleteParams { grace_period_seconds: Some(0), ..Default::default() };
    rig.pods().delete("goes", &force).await.unwrap();
    let kubelet = rig.kubelet().await;
    kubelet.registered(DRIVER).await;
    assert_eq!(rig.script.called(3).await[2], ("unprepare", vec!["other".into()]));
    let after = rig.runtime.containers(&pod.uid().unwrap());
    assert_eq!(before, after);
    assert!(matches!(after[0].state, State::Running { .. }));
    rig.delete("stays").await;
    rig.gone("stays").await;
    let calls = rig.script.calls();
    assert_eq!(calls.iter().filter(|(call, _)| *call == "prepare").count(), 2, "{calls:?}");
    kubelet.stop().await;
}

#[tokio::test]
async fn a_driver_of_the_older_version_alone_is_spoken_to_in_its_words() {
    let Some(rig) = Rig::set_up(test_name!()).await else { return };
    let _plugin = Plugin::serve_versions(&rig.root(), &rig.script, &[SUPPORTS_DRA_V1BETA1]);
    let kubelet = rig.kubelet().await;
    kubelet.registered(DRIVER).await;
    rig.claim("claim").await;
    rig.pod("pod", &["claim"], json!({"containers": [container(WAIT, &["claim"])]})).await;
    rig.phase("pod", "Running").await;
    assert_eq!(rig.script.calls(), [("prepare", vec!["claim".into()])]);
    kubelet.stop().await;
    rig.runtime.shut_down().await;
}

#[tokio::test]
async fn a_driver_of_unknown_versions_is_refused_and_told_why() {
    let Some(rig) = Rig::set_up(test_name!()).await else { return };
    let _plugin = Plugin::serve_versions(&rig.root(), &rig.script, &["v9.DRAPlugin"]);
    let kubelet = rig.kubelet().await;
    let mut status = rig.script.status.subscribe();
    let status = status.wait_for(Option::is_some).await.unwrap().clone().unwrap();
    assert!(!status.plugin_registered);
    assert!(status.error.contains("v9.DRAPlugin"), "{}", status.error);
    kubelet.stop().await;
}

#[tokio::test]
async fn the_health_of_a_device_shows_in_the_pods_status() {
    let Some(rig) = Rig::set_up(test_name!()).await else { return };
    let _plugin = Plugin::serve(&rig.root(), &rig.script);
    let kubelet = rig.kubelet().await;
    kubelet.registered(DRIVER).await;
    rig.claim("claim").await;
    rig.pod("pod", &["claim"], json!({"containers": [container(WAIT, &["claim"])]})).await;
    rig.phase("pod", "Running").await;
    for (health, word) in
        [(HealthStatus::Healthy, "Healthy"), (HealthStatus::Unhealthy, "Unhealthy")]
    {
        rig.script.report(vec![DeviceHealth {
            device: Some(DeviceIdentifier {
                pool_name: "pool".into(),
                device_name: "device".into(),
            }),
            health: health.into(),
            ..DeviceHealth::default()
        }]);
        rig.until("pod", |pod| {
            let pod = serde_json::to_value(pod).unwrap();
            let shown = &pod["status"]["containerStatuses"][0]["allocatedResourcesStatus"][0];
            shown["name"] == "claim:claim" && shown["resources"][0]["health"] == word
        })
        .await;
    }
    kubelet.stop().await;
    rig.runtime.shut_down().await;
}

#[tokio::test]
async fn the_nodes_slices_go_at_start_and_when_the_driver_stays_away() {
    let Some(rig) = Rig::set_up(test_name!()).await else { return };
    let api: Api<ResourceSlice> = Api::all(rig.client.clone());
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
    let kubelet = rig.kubelet_with(Duration::from_millis(50)).await;
    assert!(api.get_opt("old").await.unwrap().is_none());
    assert!(api.get_opt("elsewhere").await.unwrap().is_some());

    let plugin = Plugin::serve(&rig.root(), &rig.script);
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
async fn init_containers_run_in_order_and_before_the_others() {
    let Some(rig) = Rig::set_up(test_name!()).await else { return };
    let kubelet = rig.kubelet().await;
    let step = |name: &str, script: &str| {
        let mount = json!([{"name": "work", "mountPath": "/work"}]);
        json!({"name": name, "image": "tools", "command": ["sh", "-c", script], "volumeMounts": mount})
    };
    let spec = json!({
        "volumes": [{"name": "work", "emptyDir": {}}],
        "initContainers": [step("i1", "echo 1 >>/work/order"), step("i2", "echo 2 >>/work/order")],
        "containers": [step("c", "cat /work/order")],
    });
    rig.pod("pod", &[], spec).await;
    rig.phase("pod", "Succeeded").await;
    assert_eq!(rig.log("pod").await, "1\n2\n");
    kubelet.stop().await;
}

#[tokio::test]
async fn a_container_that_cannot_be_created_says_so_in_status_and_event() {
    let Some(rig) = Rig::set_up(test_name!()).await else { return };
    let kubelet = rig.kubelet().await;
    let spec = json!({"containers": [{"name": "c", "image": "nowhere/nothing:1"}]});
    rig.pod("pod", &[], spec).await;
    let event = rig.event("Failed").await;
    assert!(event.contains("nowhere/nothing:1"), "{event}");
    rig.until("pod", |pod| {
        let pod = serde_json::to_value(pod).unwrap();
        pod["status"]["containerStatuses"][0]["state"]["waiting"]["reason"] == "ErrImageNeverPull"
    })
    .await;
    rig.delete("pod").await;
    rig.gone("pod").await;
    kubelet.stop().await;
}

#[tokio::test]
async fn a_program_that_fails_fails_its_pod_and_a_deaf_one_is_killed_after_its_grace() {
    let Some(rig) = Rig::set_up(test_name!()).await else { return };
    let kubelet = rig.kubelet().await;
    rig.pod("fails", &[], json!({"containers": [container("exit 3", &[])]})).await;
    let pod = serde_json::to_value(rig.phase("fails", "Failed").await).unwrap();
    assert_eq!(pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"], 3);
    let deaf = rig
        .pod("deaf", &[], json!({"containers": [container("while :; do sleep 1; done", &[])]}))
        .await;
    rig.phase("deaf", "Running").await;
    let containers = rig.runtime.containers(&deaf.uid().unwrap());
    let State::Running { pid, .. } = containers[0].state else { panic!("{containers:?}") };
    rig.delete("deaf").await;
    rig.gone("deaf").await;
    assert!(!Path::new("/proc").join(pid.to_string()).exists());
    kubelet.stop().await;
}
