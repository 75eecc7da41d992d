//! Trial of the fence as a DeviceTaintRule, with the real kube-scheduler: it finds no device under
//! the rule, also right after its start. Without the rule the policy denies its writes, and the
//! controller restores the rule.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Event, Pod};
use k8s_openapi::api::resource::v1::{DeviceTaintRule, ResourceSlice};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::core::DynamicObject;
use kube::discovery::ApiResource;
use kube::{Api, ResourceExt};
use serde_json::json;
use tessera_api::names::{FENCE_RULE, MANAGED_TAINT_KEY};
use tessera_api::slice::{Fence, is_fence_of, is_fenced_by_rule};
use tokio::time::{Instant, sleep};

use super::controller::ControllerSwitch;
use super::overcommit;
use super::placement::{node_name, wait_event_text};
use super::test_bed::{Skip, TestBed, wait_all, wait_one};
use crate::harness::TrialOutcome;
use crate::hollow::{HollowNodes, HollowNodesSpec};
use crate::inventory::DRIVER;
use crate::leftovers::holds_device;
use crate::runner::Outcome;
use crate::wait::CheckResult;

/// Time for which an administrator deletes the rule again and again.
const REMOVAL: Duration = Duration::from_secs(60);

/// Claims that exist at once meanwhile, on GPUs of 80 GiB with room for 320.
const CLAIMS: usize = 200;
const HOLLOW: HollowNodesSpec = HollowNodesSpec { nodes: 2, gpus: 8, fence: Fence::Rule };

/// Interval between checks that a user's rights are in force.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// A user who may write DeviceTaintRules, and no policies.
const OPERATOR: &str = "trial-fence-operator";

pub(super) async fn check_rule(test_bed: TestBed) -> TrialOutcome {
    let rules: Api<DeviceTaintRule> = Api::all(test_bed.client.clone());
    match rules.get(FENCE_RULE).await {
        Err(kube::Error::Api(status)) if status.code == 404 => {
            return Err(Skip("the fence of this cluster is in its slices".into()).into());
        }
        rule => anyhow::ensure!(is_fence_of(&rule?, DRIVER), "not a fence"),
    }
    check_slices(&test_bed).await?;
    test_bed.create_template("share", DRIVER, json!({"memory": "4Gi"})).await?;
    let switch = ControllerSwitch::detect(&test_bed).await?;
    switch.stop().await?;
    let checked = check_without_controller(&test_bed, &rules).await;
    switch.start().await?;
    checked?;
    for pod in PODS {
        test_bed.wait_running(pod).await?;
    }
    wait_event(&test_bed, "did not exist").await?;
    test_bed.delete(&PODS).await?;
    check_changed(&test_bed, &rules).await?;
    check_rights(&test_bed).await?;
    remove_under_load(&test_bed, &rules).await?;
    Ok(Outcome::Passed(vec![]))
}

/// Pods that wait while no controller runs.
const PODS: [&str; 3] = ["first", "second", "third"];

/// Slices say that a rule fences them, and no device has the managed taint.
async fn check_slices(test_bed: &TestBed) -> anyhow::Result<()> {
    let slices: Api<ResourceSlice> = Api::all(test_bed.client.clone());
    let slices = slices.list(&ListParams::default()).await?.items;
    let own: Vec<_> = slices.iter().filter(|slice| slice.spec.driver == DRIVER).collect();
    anyhow::ensure!(!own.is_empty() && own.iter().all(|slice| is_fenced_by_rule(slice)), "{own:?}");
    let devices = own.iter().flat_map(|slice| slice.spec.devices.iter().flatten());
    let mut taints = devices.flat_map(|device| device.taints.iter().flatten());
    anyhow::ensure!(!taints.any(|taint| taint.key == MANAGED_TAINT_KEY), "{own:?}");
    Ok(())
}

/// kube-scheduler finds no device under the rule; without it, its write is denied.
async fn check_without_controller(
    test_bed: &TestBed,
    rules: &Api<DeviceTaintRule>,
) -> anyhow::Result<()> {
    let [first, second, third] = PODS;
    test_bed.create_holder(first, "share").await?;
    wait_event_text(test_bed, first, &["cannot allocate all claims"]).await?;
    let operations = test_bed.operations()?;
    for action in ["kill", "start"] {
        operations.run(&[action, "control-plane", "kube-scheduler"]).await?;
    }
    test_bed.create_holder(second, "share").await?;
    wait_event_text(test_bed, second, &["cannot allocate all claims"]).await?;
    rules.delete(FENCE_RULE, &DeleteParams::default()).await?;
    test_bed.create_holder(third, "share").await?;
    wait_event_text(test_bed, third, &["only tessera-controller allocates"]).await?;
    let claims = test_bed.claims().list(&ListParams::default()).await?;
    anyhow::ensure!(claims.items.len() == PODS.len(), "{} claims", claims.items.len());
    anyhow::ensure!(!claims.iter().any(holds_device), "kube-scheduler allocated a claim");
    Ok(())
}

/// A rule whose content is changed gets it back.
async fn check_changed(test_bed: &TestBed, rules: &Api<DeviceTaintRule>) -> anyhow::Result<()> {
    for spec in [json!({"taint": {"effect": "None"}}), json!({"deviceSelector": {"pool": "x"}})] {
        let (patch, parameters) = (Patch::Merge(json!({"spec": spec})), PatchParams::default());
        rules.patch(FENCE_RULE, &parameters, &patch).await?;
        wait_restored(rules).await?;
    }
    wait_event(test_bed, "had another content").await
}

async fn wait_restored(rules: &Api<DeviceTaintRule>) -> anyhow::Result<()> {
    let check = |rule: Option<&DeviceTaintRule>| {
        let is_restored = rule.is_some_and(|rule| is_fence_of(rule, DRIVER));
        CheckResult::done_if(is_restored, || format!("{rule:?}"))
    };
    wait_one(rules.clone(), FENCE_RULE, "the rule to be restored", check).await
}

/// Waits for an event about the rule with this text.
async fn wait_event(test_bed: &TestBed, text: &str) -> anyhow::Result<()> {
    // Events about objects without a namespace are there.
    let events: Api<Event> = Api::namespaced(test_bed.client.clone(), "default");
    let check = |events: &[Event]| {
        let is_about = |event: &&Event| event.reason.as_deref() == Some("FenceRestored");
        let notes: Vec<_> = events.iter().filter(is_about).map(|e| e.message.clone()).collect();
        let has = notes.iter().flatten().any(|note| note.contains(text));
        CheckResult::done_if(has, || format!("{notes:?}"))
    };
    wait_all(events, &format!("an event FenceRestored with {text:?}"), check).await
}

/// A user who may write DeviceTaintRules changes other rules and not this one; the controller
/// writes no other.
async fn check_rights(test_bed: &TestBed) -> anyhow::Result<()> {
    const GROUP: &str = "rbac.authorization.k8s.io";
    let objects = [
        (
            "ClusterRole",
            "clusterroles",
            json!({"rules": [{"apiGroups": ["resource.k8s.io"], "resources": ["devicetaintrules"], "verbs": ["*"]}]}),
        ),
        (
            "ClusterRoleBinding",
            "clusterrolebindings",
            json!({
                "roleRef": {"apiGroup": GROUP, "kind": "ClusterRole", "name": OPERATOR},
                "subjects": [{"apiGroup": GROUP, "kind": "User", "name": OPERATOR}],
            }),
        ),
    ];
    let mut apis = Vec::new();
    for (kind, plural, mut object) in objects {
        let resource = ApiResource {
            group: GROUP.to_owned(),
            version: "v1".to_owned(),
            api_version: format!("{GROUP}/v1"),
            kind: kind.to_owned(),
            plural: plural.to_owned(),
        };
        let api: Api<DynamicObject> = Api::all_with(test_bed.client.clone(), &resource);
        object["metadata"] = json!({"name": OPERATOR});
        object["apiVersion"] = resource.api_version.clone().into();
        object["kind"] = kind.into();
        api.create(&PostParams::default(), &serde_json::from_value(object)?).await?;
        apis.push(api);
    }
    let checked = try_as_operator(test_bed).await;
    for api in apis {
        api.delete(OPERATOR, &DeleteParams::default()).await?;
    }
    checked?;
    let controller = "system:serviceaccount:tessera-system:tessera-controller";
    let rules: Api<DeviceTaintRule> = Api::all(test_bed.client_of(controller)?);
    let created = rules.create(&PostParams::default(), &other_rule()?).await;
    ensure_denied(created.map(drop), "writes only the DeviceTaintRule")
}

async fn try_as_operator(test_bed: &TestBed) -> anyhow::Result<()> {
    let rules: Api<DeviceTaintRule> = Api::all(test_bed.client_of(OPERATOR)?);
    // RBAC is in force some time after it is written.
    let deadline = Instant::now() + REMOVAL;
    while let Err(error) = rules.list(&ListParams::default()).await {
        anyhow::ensure!(Instant::now() < deadline, "the rights are not in force: {error}");
        sleep(CHECK_INTERVAL).await;
    }
    let parameters = PatchParams::default();
    let label = Patch::Merge(json!({"metadata": {"labels": {"trial": "fence"}}}));
    rules.patch(FENCE_RULE, &parameters, &label).await?;
    let disarmed = Patch::Merge(json!({"spec": {"taint": {"effect": "None"}}}));
    let text = "excludes kube-scheduler from the devices";
    ensure_denied(rules.patch(FENCE_RULE, &parameters, &disarmed).await.map(drop), text)?;
    let deleted = rules.delete(FENCE_RULE, &DeleteParams::default()).await;
    ensure_denied(deleted.map(drop), text)?;
    let other = rules.create(&PostParams::default(), &other_rule()?).await?;
    rules.delete(&other.name_any(), &DeleteParams::default()).await?;
    Ok(())
}

/// A rule that selects no device.
fn other_rule() -> anyhow::Result<DeviceTaintRule> {
    let taint = json!({"key": "trial.tessera.dev/fence", "effect": "NoSchedule"});
    let rule = json!({"metadata": {"name": "trial-other-rule"}, "spec": {"taint": taint}});
    Ok(serde_json::from_value(rule)?)
}

pub(super) fn ensure_denied(outcome: kube::Result<()>, text: &str) -> anyhow::Result<()> {
    match outcome {
        Err(kube::Error::Api(status)) if status.code == 403 && status.message.contains(text) => {
            Ok(())
        }
        other => anyhow::bail!("not denied with {text:?}: {other:?}"),
    }
}

/// The rule is deleted as soon as it is restored, while pods with claims are created and bound.
async fn remove_under_load(test_bed: &TestBed, rules: &Api<DeviceTaintRule>) -> anyhow::Result<()> {
    let hollow = HollowNodes::create(&test_bed.client, test_bed.namespace(), HOLLOW).await?;
    let load = async {
        let removing = keep_removing(rules);
        let (removals, rounds) = tokio::try_join!(removing, keep_binding(test_bed, &hollow))?;
        println!("    rule deleted {removals} times; {rounds} x {CLAIMS} claims allocated");
        anyhow::ensure!(removals > 1, "the rule was deleted {removals} times");
        Ok(())
    };
    let outcome = tokio::select! {
        Err(error) = hollow.keep_ready() => Err(error),
        outcome = overcommit::check_during(test_bed, load) => outcome,
    };
    let at_once = DeleteParams::default().grace_period(0);
    test_bed.pods().delete_collection(&at_once, &ListParams::default()).await?;
    hollow.delete().await?;
    wait_restored(rules).await?;
    outcome
}

/// Deletes the rule each time that it exists, for [`REMOVAL`]. Returns the number of deletions.
async fn keep_removing(rules: &Api<DeviceTaintRule>) -> anyhow::Result<usize> {
    let end = Instant::now() + REMOVAL;
    let mut removals = 0;
    while Instant::now() < end {
        match rules.delete(FENCE_RULE, &DeleteParams::default()).await {
            Ok(_) => removals += 1,
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            Err(error) => return Err(error.into()),
        }
        wait_restored(rules).await?;
    }
    Ok(removals)
}

/// Has pods with claims bound and deletes them, for [`REMOVAL`]. Returns the number of rounds.
async fn keep_binding(test_bed: &TestBed, hollow: &HollowNodes) -> anyhow::Result<usize> {
    let end = Instant::now() + REMOVAL;
    let claims = json!([{"name": "gpu", "resourceClaimTemplateName": "share"}]);
    let mut rounds = 0;
    while Instant::now() < end {
        for number in 0..CLAIMS {
            test_bed.create(hollow.pod(&format!("claim-{number}"), &claims)).await?;
        }
        let check = |pods: &[Pod]| {
            let bound = pods.iter().filter(|pod| node_name(pod).is_some()).count();
            CheckResult::done_if(bound == CLAIMS, || format!("{bound} of {CLAIMS}"))
        };
        wait_all(test_bed.pods(), "all pods to be bound", check).await?;
        let at_once = DeleteParams::default().grace_period(0);
        test_bed.pods().delete_collection(&at_once, &ListParams::default()).await?;
        let check = |pods: &[Pod]| CheckResult::done_if(pods.is_empty(), || "pods left".into());
        wait_all(test_bed.pods(), "the pods to be deleted", check).await?;
        rounds += 1;
    }
    Ok(rounds)
}
