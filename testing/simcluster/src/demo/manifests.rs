//! The objects of the demo. What is shown is what is created.

use anyhow::Context as _;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind, PostParams};
use kube::{Api, Client};

/// A quarter of a GPU.
pub(crate) const TEMPLATE: &str = r#"apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: quarter-of-a-gpu}
spec:
  spec:
    devices:
      requests:
      - name: gpu
        exactly:
          deviceClassName: h100.gpu.tessera.dev
          capacity: {requests: {memory: 19Gi, cores: "25"}}
          selectors:     # only for this show: one GPU, so that it fills up
          - cel: {expression: "device.attributes['gpu.tessera.dev'].index == 0"}
      config:
      - opaque:
          driver: gpu.tessera.dev
          parameters:
            apiVersion: gpu.tessera.dev/v1alpha1
            kind: GpuConfig
            placement: {node: Binpack, device: Binpack}
"#;

/// A pod that takes all the memory that it can get, and keeps it.
pub(crate) const POD: &str = r#"apiVersion: v1
kind: Pod
metadata: {name: pod-1}
spec:
  restartPolicy: Never
  terminationGracePeriodSeconds: 5
  containers:
  - name: cuda
    image: tessera/probe:e2e
    imagePullPolicy: Never
    command: [tessera-probe, fill, --hold]   # takes memory until CUDA refuses
    resources: {claims: [{name: gpu}]}
  resourceClaims: [{name: gpu, resourceClaimTemplateName: quarter-of-a-gpu}]
"#;

/// The pod with another name.
pub(crate) fn pod(name: &str) -> String {
    POD.replace("pod-1", name)
}

/// Creates the object of a manifest.
pub(crate) async fn create(client: &Client, manifest: &str) -> anyhow::Result<()> {
    let object: DynamicObject =
        serde_saphyr::from_str(manifest).context("a manifest of the demo is not YAML")?;
    let types = object.types.clone().context("a manifest has a kind")?;
    let (group, version) = types.api_version.split_once('/').unwrap_or(("", &types.api_version));
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, &types.kind));
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), "default", &resource);
    api.create(&PostParams::default(), &object)
        .await
        .with_context(|| format!("cannot create a {}", types.kind))?;
    Ok(())
}
