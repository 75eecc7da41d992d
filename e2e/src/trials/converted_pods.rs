//! Trial of `kubectl tessera convert`: a pod of each dialect, converted, passes the API server and
//! runs with the share that it asked for.

use anyhow::Context as _;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaimTemplate;
use kube::Api;
use kube::api::PostParams;
use serde_json::{Value, json};

use super::test_bed::{TestBed, holder};
use crate::harness::TrialOutcome;
use crate::runner::Outcome;

/// A pod of a dialect and its expected share.
struct DialectPod {
    dialect: &'static str,
    limits: Value,
    annotations: Value,
    scheduler: &'static str,
    /// Memory of the share; empty for a part of a GPU that is not known here.
    memory: &'static str,
    cores: &'static str,
}

const GPU: &str = "nvidia.com/gpu";
const GPUMEM: &str = "nvidia.com/gpumem";
const GPUCORES: &str = "nvidia.com/gpucores";

fn pods() -> Vec<DialectPod> {
    let plain = |dialect, limits: Value, memory, cores| DialectPod {
        dialect,
        limits,
        annotations: json!({}),
        scheduler: "default-scheduler",
        memory,
        cores,
    };
    let share = json!({GPU: 1, GPUMEM: 3000, GPUCORES: 30});
    let elastic = json!({"elasticgpu.io/gpu-core": 20, "elasticgpu.io/gpu-memory": 4096});
    let vgpu = json!({"nvidia.com/vgpu-number": 1, "nvidia.com/vgpu-memory": 4096, "nvidia.com/vgpu-cores": 30});
    let vcuda = json!({"tencent.com/vcuda-core": 20, "tencent.com/vcuda-memory": 4});
    let typed = json!({"nvidia.com/use-gputype": "a100, h100, v100, t4, l40"});
    vec![
        DialectPod { annotations: typed, ..plain("hami", share.clone(), "3000Mi", "30") },
        plain("4paradigm", share, "3000Mi", "30"),
        plain("vgpu-manager", vgpu, "4Gi", "30"),
        plain("volcano", json!({"volcano.sh/vgpu-memory": 3000}), "3000Mi", "0"),
        DialectPod {
            annotations: json!({"gpu-memory": "2048"}),
            scheduler: "kai-scheduler",
            ..plain("kai", json!({}), "2Gi", "0")
        },
        plain("nvidia", json!({GPU: 1}), "", "0"),
        plain("aws", json!({"k8s.amazonaws.com/vgpu": 1}), "", "10"),
        plain("elastic", elastic, "4Gi", "20"),
        plain("kubegpu", json!({GPU: 1}), "", "0"),
        plain("gpushare", json!({"aliyun.com/gpu-mem": 3}), "3Gi", "0"),
        plain("gpu-manager", vcuda, "1Gi", "20"),
    ]
}

pub(super) async fn run(test_bed: TestBed) -> TrialOutcome {
    test_bed.plugin()?;
    let mut measured = Vec::new();
    for pod in pods() {
        let name = format!("pod-{}", pod.dialect);
        run_one(&test_bed, &name, &pod)
            .await
            .with_context(|| format!("dialect {}", pod.dialect))?;
        measured.push(pod.dialect);
    }
    anyhow::ensure!(measured.len() == 11, "dialects: {measured:?}");
    Ok(Outcome::Passed(vec![]))
}

async fn run_one(test_bed: &TestBed, name: &str, pod: &DialectPod) -> anyhow::Result<()> {
    let mut manifest = holder(name, json!({"name": "gpu"}));
    manifest["apiVersion"] = "v1".into();
    manifest["kind"] = "Pod".into();
    manifest["metadata"]["annotations"] = pod.annotations.clone();
    manifest["spec"]["schedulerName"] = pod.scheduler.into();
    manifest["spec"]["containers"][0]["resources"] = json!({"limits": pod.limits});
    manifest["spec"].as_object_mut().context("a spec")?.remove("resourceClaims");
    let arguments = ["convert", "--dialect", pod.dialect, "-f", "-"];
    let text = test_bed.plugin()?.text(&arguments, &manifest.to_string()).await?;
    let mut documents: Vec<Value> = serde_saphyr::from_multiple(&text)?;
    anyhow::ensure!(documents.len() == 2, "expected a template and a pod: {text}");
    // The scheduler of KAI is not there; its queue is not what is tried here.
    documents[1]["spec"]["schedulerName"] = "default-scheduler".into();
    create(test_bed, &documents, true).await?;
    create(test_bed, &documents, false).await?;
    let running = test_bed.wait_running(name).await?;
    let claim = test_bed.claim_of(&running).await?;
    let consumed =
        json!(claim.status)["allocation"]["devices"]["results"][0]["consumedCapacity"].clone();
    let is_right = (pod.memory.is_empty() || consumed["memory"] == pod.memory)
        && consumed["cores"] == pod.cores;
    anyhow::ensure!(is_right, "allocated {consumed}");
    test_bed.delete(&[name]).await
}

/// Creates the template and the pod, or has the API server check them.
async fn create(test_bed: &TestBed, documents: &[Value], dry_run: bool) -> anyhow::Result<()> {
    let parameters = PostParams { dry_run, ..PostParams::default() };
    let templates: Api<ResourceClaimTemplate> =
        Api::namespaced(test_bed.client.clone(), test_bed.namespace());
    let template = serde_json::from_value(documents[0].clone())?;
    templates.create(&parameters, &template).await.context("template")?;
    let pod: Pod = serde_json::from_value(documents[1].clone())?;
    test_bed.pods().create(&parameters, &pod).await.context("pod")?;
    Ok(())
}
