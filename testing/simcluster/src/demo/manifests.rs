//! Objects of the demo. The lines shown are taken from them.

use anyhow::Context as _;
use kube::api::{ApiResource, DynamicObject, GroupVersionKind, PostParams};
use kube::{Api, Client};

/// A quarter of an H100. All pods share GPU 0, so that it is full after four.
const TEMPLATE: &str = r#"apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: h100-quarter}
spec:
  spec:
    devices:
      requests:
      - name: gpu
        exactly:
          deviceClassName: h100.gpu.tessera.dev
          capacity: {requests: {memory: 19Gi, cores: "25"}}
          selectors:
          - cel: {expression: "device.attributes['gpu.tessera.dev'].index == 0"}
      config:
      - opaque:
          driver: gpu.tessera.dev
          parameters:
            apiVersion: gpu.tessera.dev/v1alpha1
            kind: GpuConfig
            compute: {policy: Fixed}
"#;

/// A pod that allocates memory until CUDA refuses, launches kernels, and then waits.
const POD: &str = r#"apiVersion: v1
kind: Pod
metadata: {name: pod-1}
spec:
  restartPolicy: Never
  terminationGracePeriodSeconds: 5
  resourceClaims: [{name: gpu, resourceClaimTemplateName: h100-quarter}]
  containers:
  - name: cuda
    image: tessera/probe:e2e
    imagePullPolicy: Never
    command: [tessera-probe, fill, --compute-ms, "500", --hold]
    resources: {claims: [{name: gpu}]}
"#;

/// Lines of the template that matter to a user.
const TEMPLATE_FIELDS: [&str; 5] = ["kind: Res", "deviceClass", "capacity", "expression", "policy"];

/// Lines of the pod that matter to a user.
const POD_FIELDS: [&str; 3] = ["kind: Pod", "resourceClaims", "resources"];

/// Returns the lines to be shown: fields of the template, then of the pod.
pub(crate) fn excerpt() -> impl Iterator<Item = &'static str> {
    let lines = |manifest: &'static str, fields: &'static [&str]| {
        manifest.lines().filter(|line| fields.iter().any(|field| line.contains(field)))
    };
    lines(TEMPLATE, &TEMPLATE_FIELDS).chain(lines(POD, &POD_FIELDS)).map(|line| {
        let text = line.trim_start().trim_start_matches("- ");
        // The kinds are headings of their fields.
        if text.starts_with("kind:") { text } else { &line[line.len() - text.len() - 2..] }
    })
}

/// Creates the template.
pub(crate) async fn create_template(client: &Client) -> anyhow::Result<()> {
    create(client, TEMPLATE).await
}

/// Creates the pod under another name.
pub(crate) async fn create_pod(client: &Client, name: &str) -> anyhow::Result<()> {
    create(client, &POD.replace("pod-1", name)).await
}

async fn create(client: &Client, manifest: &str) -> anyhow::Result<()> {
    let object: DynamicObject = serde_saphyr::from_str(manifest).context("invalid manifest")?;
    let types = object.types.clone().context("manifest has no kind")?;
    let (group, version) = types.api_version.split_once('/').unwrap_or(("", &types.api_version));
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, &types.kind));
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), "default", &resource);
    api.create(&PostParams::default(), &object)
        .await
        .with_context(|| format!("cannot create {}", types.kind))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn excerpt_has_every_shown_field_once() {
        let lines: Vec<_> = excerpt().collect();
        assert_eq!(lines.len(), TEMPLATE_FIELDS.len() + POD_FIELDS.len(), "{lines:#?}");
    }
}
