//! Trial of the policy that hides GPUs for which no pod asked.

use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::Api;
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use tokio::time::{Duration, Instant, sleep};

use super::test_bed::{TestBed, holder};
use crate::harness::TrialOutcome;
use crate::runner::Outcome;

const VARIABLE: &str = "NVIDIA_VISIBLE_DEVICES";
/// Time limit for the API server to notice a label.
const NOTICE: Duration = Duration::from_secs(60);

pub(super) async fn hide(test_bed: TestBed) -> TrialOutcome {
    let before = variables(&dry_run(&test_bed, pod()).await?);
    anyhow::ensure!(before[0].is_empty() && before[1] == ["all"], "{before:?}");
    let namespaces: Api<Namespace> = Api::all(test_bed.client.clone());
    let label = json!({"metadata": {"labels": {"gpu.tessera.dev/trial": "unclaimed-gpus"}}});
    let parameters = PatchParams::default();
    namespaces.patch(test_bed.namespace(), &parameters, &Patch::Merge(label)).await?;
    let deadline = Instant::now() + NOTICE;
    loop {
        let seen = variables(&dry_run(&test_bed, pod()).await?);
        if seen.iter().all(|of| counts_as(of, "void")) {
            break;
        }
        anyhow::ensure!(Instant::now() < deadline, "not hidden: {seen:?}");
        sleep(Duration::from_millis(100)).await;
    }
    check_other_pods(&test_bed).await?;
    Ok(Outcome::Passed(vec![]))
}

/// Returns a pod without claims: an init container without variables, and two containers.
fn pod() -> Value {
    let all = json!([{"name": "A", "value": "1"}, {"name": VARIABLE, "value": "all"}]);
    json!({
        "metadata": {"name": "unclaimed"},
        "spec": {
            "initContainers": [{"name": "init", "image": "none"}],
            "containers": [
                {"name": "first", "image": "none", "env": all},
                {"name": "second", "image": "none", "env": all},
            ],
        },
    })
}

async fn dry_run(test_bed: &TestBed, pod: Value) -> anyhow::Result<Pod> {
    let parameters = PostParams { dry_run: true, ..PostParams::default() };
    Ok(test_bed.pods().create(&parameters, &serde_json::from_value(pod)?).await?)
}

/// Returns true if the last value, which counts, is this one.
fn counts_as(values: &[String], value: &str) -> bool {
    values.last().is_some_and(|last| last == value)
}

/// Returns the values of the variable in each container.
fn variables(pod: &Pod) -> Vec<Vec<String>> {
    let spec = pod.spec.as_ref();
    let init = spec.iter().flat_map(|spec| spec.init_containers.iter().flatten());
    let containers = init.chain(spec.iter().flat_map(|spec| &spec.containers));
    let of_container = containers.map(|container| {
        let entries = container.env.iter().flatten().filter(|entry| entry.name == VARIABLE);
        entries.map(|entry| entry.value.clone().unwrap_or_default()).collect()
    });
    of_container.collect()
}

/// Pods with claims or extended resources keep their variables, and other variables stay.
async fn check_other_pods(test_bed: &TestBed) -> anyhow::Result<()> {
    let claim = json!({"name": "gpu", "resourceClaimName": "one"});
    let with_claim = variables(&dry_run(test_bed, holder("claim", claim)).await?);
    anyhow::ensure!(with_claim == [Vec::<String>::new()], "{with_claim:?}");
    let mut of_plugin = pod();
    let limits = json!({"limits": {"example.com/gpu": 1}});
    of_plugin["spec"]["containers"][0]["resources"] = limits;
    let of_plugin = variables(&dry_run(test_bed, of_plugin).await?);
    anyhow::ensure!(counts_as(&of_plugin[1], "all"), "{of_plugin:?}");
    // A value that counts only if it is the last one.
    let mut twice = pod();
    let entry = |value: &str| json!({"name": VARIABLE, "value": value});
    twice["spec"]["containers"][0]["env"] = json!([entry("void"), entry("all")]);
    let twice = variables(&dry_run(test_bed, twice).await?);
    anyhow::ensure!(twice.iter().all(|of| counts_as(of, "void")), "{twice:?}");
    let hidden = dry_run(test_bed, pod()).await?;
    let env = json!(hidden.spec)["containers"][0]["env"].to_string();
    anyhow::ensure!(env.contains(r#""name":"A""#), "other variables: {env}");
    Ok(())
}
