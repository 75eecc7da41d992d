//! Trial of `kubectl tessera convert`: a pod of each dialect, converted, passes the API server and
//! runs with the share that it asked for.

use anyhow::Context as _;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaimTemplate;
use kube::Api;
use kube::api::PostParams;
use serde_json::Value;

use super::dialect_pods::{DialectPod, dialect_pods};
use super::test_bed::TestBed;
use crate::harness::TrialOutcome;
use crate::runner::Outcome;

pub(super) async fn run(test_bed: TestBed) -> TrialOutcome {
    test_bed.plugin()?;
    let mut measured = Vec::new();
    for pod in dialect_pods() {
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
    let manifest = pod.manifest(name)?;
    let arguments = ["convert", "--dialect", pod.dialect, "-f", "-"];
    let text = test_bed.plugin()?.text(&arguments, &manifest.to_string()).await?;
    let mut documents: Vec<Value> = serde_saphyr::from_multiple(&text)?;
    anyhow::ensure!(documents.len() == 2, "expected a template and a pod: {text}");
    // The scheduler of KAI is not there; its queue is not what is tried here.
    documents[1]["spec"]["schedulerName"] = "default-scheduler".into();
    create(test_bed, &documents, true).await?;
    create(test_bed, &documents, false).await?;
    let running = test_bed.wait_running(name).await?;
    pod.check_share(test_bed, &running).await?;
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
