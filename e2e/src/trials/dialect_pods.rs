//! A pod of each dialect, and the share that it gets.

use anyhow::Context as _;
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use super::test_bed::{TestBed, holder};

/// A pod of a dialect and its expected share.
pub(super) struct DialectPod {
    pub(super) dialect: &'static str,
    pub(super) limits: Value,
    pub(super) annotations: Value,
    pub(super) scheduler: &'static str,
    /// Memory of the share; empty for a part of a GPU that is not known here.
    memory: &'static str,
    cores: &'static str,
}

const GPU: &str = "nvidia.com/gpu";
const GPUMEM: &str = "nvidia.com/gpumem";
const GPUCORES: &str = "nvidia.com/gpucores";

/// Returns a pod of each dialect.
pub(super) fn dialect_pods() -> Vec<DialectPod> {
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

/// Returns a pod of the dialect as a user writes it for the old system.
///
/// # Errors
/// The dialect has no pod here.
pub(crate) fn dialect_manifest(dialect: &str, name: &str) -> anyhow::Result<Value> {
    let pods = dialect_pods();
    let pod = pods.iter().find(|pod| pod.dialect == dialect);
    pod.with_context(|| format!("no pod of dialect {dialect}"))?.manifest(name)
}

impl DialectPod {
    /// Returns the pod as a user writes it for the old system.
    pub(super) fn manifest(&self, name: &str) -> anyhow::Result<Value> {
        let mut manifest = holder(name, json!({"name": "gpu"}));
        manifest["apiVersion"] = "v1".into();
        manifest["kind"] = "Pod".into();
        manifest["metadata"]["annotations"] = self.annotations.clone();
        manifest["spec"]["schedulerName"] = self.scheduler.into();
        manifest["spec"]["containers"][0]["resources"] = json!({"limits": self.limits});
        manifest["spec"].as_object_mut().context("a spec")?.remove("resourceClaims");
        Ok(manifest)
    }

    /// Checks the share of the running pod.
    pub(super) async fn check_share(&self, test_bed: &TestBed, pod: &Pod) -> anyhow::Result<()> {
        let claim = test_bed.claim_of(pod).await?;
        let results = &json!(claim.status)["allocation"]["devices"]["results"];
        let consumed = &results[0]["consumedCapacity"];
        let is_right = (self.memory.is_empty() || consumed["memory"] == self.memory)
            && consumed["cores"] == self.cores;
        anyhow::ensure!(is_right, "allocated {consumed}");
        Ok(())
    }
}
